"""Is there more to gain for one of four HOP+ players? Player 1 thinks harder, or knows the others' own network, and the
other three play as always.

    python experiments/best_reply.py runs/<1>/checkpoints/last runs/<2>/checkpoints/last runs/<3>/checkpoints/last

All rows of a run play the same starts, so what is compared is the difference of an episode's return to that of the
first row ('as the others'); +- is half the 95 % interval, over the episodes of all runs.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import envs  # noqa: E402
from envs.checkpoints import read_spec  # noqa: E402
from envs.errors import ConfigError  # noqa: E402
from envs.roles import Seats, find_checkpoint, load_policy, play_episodes  # noqa: E402
from envs.run import Positive, guarded, parse  # noqa: E402

SELF, LEARNER = "as the others", "hop"


@dataclass
class Args:
    runs: Annotated[tuple[str, ...], tyro.conf.Positional]
    """run folders or checkpoints of hopplus_mcts.py"""
    episodes: Positive = 8000
    """games of each row and run"""
    simulations: Positive = 256
    """of player 1, in each tree"""
    seed: Positive = 7
    """of starts and draws"""


def knowing(planner: Any) -> type:
    """The planner's class with the agents' own policy network (which knows no goals) for what the others do."""

    class Knowing(type(planner)):  # type: ignore[misc]
        def ask_others(self, count: int) -> np.ndarray:
            seen, t, legal, goal = (column[:count] for column in self.other[2:])
            nothing = np.tile(self.unknown_goal.numpy(), (count, self.game.num_players - 1, 1)).astype(goal.dtype)
            return self.agent(seen, t, legal, nothing)[0]

    return Knowing


def play(args: Args, run: str, simulations: int, knows: bool) -> np.ndarray:
    """(E, N) returns of episodes in which player 1 has so many simulations (0: as the others)."""
    checkpoint = find_checkpoint(run)
    spec = read_spec(checkpoint)
    if Path(str(spec["script"])).stem != "hopplus_mcts":
        raise ConfigError(f"'{run}' is of {spec['script']}; this is about players of hopplus_mcts.py")
    env = envs.make(spec["args"]["env_id"], num_envs=args.episodes, seed=args.seed)
    policies = {seat: load_policy(run, env, seat, args.seed + seat) for seat in range(env.spec.num_players)}
    if simulations:
        policies[0].simulations = simulations
    if knows:
        policies[0].planner.__class__ = knowing(policies[0].planner)
    return play_episodes(env, Seats(env, [LEARNER] * len(policies), LEARNER, args.seed, policies=policies)).returns


def main(args: Args) -> None:
    torch.set_num_threads(1)
    if not args.runs:
        raise ConfigError("name at least one run folder of hopplus_mcts.py")
    more, many = f"{args.simulations} simulations", args.simulations
    rows = {SELF: (0, False), more: (many, False), f"{more}, the others' own network": (many, True)}
    found: dict[str, np.ndarray] = {}
    print("| player 1 | its return | the others | gain, episode by episode | gain of each run |\n|---|---|---|---|---|")
    for name, how in rows.items():
        of_runs = [play(args, run, *how) for run in args.runs]
        found[name] = np.stack(of_runs)  # (runs, E, N)
        gain = found[name][..., 0] - found[SELF][..., 0]
        own, others = found[name][..., 0].mean(), found[name][..., 1:].mean()
        half = 1.96 * gain.std() / gain.size**0.5
        of_each = ", ".join(f"{x:+.3f}" for x in gain.mean(1))
        print(f"| {name} | {own:.3f} | {others:.3f} | {gain.mean():+.3f} +- {half:.3f} | {of_each} |", flush=True)


if __name__ == "__main__":
    sys.exit(guarded(lambda _: main(parse(Args, __doc__))))
