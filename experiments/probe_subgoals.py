"""What OMG's subgoals are worth: does the prior's space say anything, is the inferred subgoal about the future, and
does the Q-network use it?

    python experiments/probe_subgoals.py runs/omg/8m-omg__* --teammates "pools/8m/*-10[1-3]"

Each run (omg.py --model omg; its last weights and its prior) plays among the teammates, greedily. Then

- space: how much of the variance of what is seen a linear map finds in the prior's embedding of it;
- future: how much of the variance of the embedding `ahead` steps later it finds in the embedding now, in the inferred
  subgoal, and in both. Both above now: the inference network knows something of the future that the present does not
  show. Maps are fitted on half of the episodes and judged on the others;
- use: win rates when the Q-network is given the inferred subgoal, that of another game at the same step, zeros, or
  noise: same starts, seats and teammates. If they are alike, play does not hang on what the subgoal says.
"""

import csv
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import omg  # noqa: E402
from envs.checkpoints import read_spec  # noqa: E402
from envs.errors import ConfigError  # noqa: E402
from envs.pool import Pool, find_members, load_members  # noqa: E402
from envs.run import Positive, guarded, parse  # noqa: E402
from envs.team import TeamGame, make_env, play_team  # noqa: E402

GIVEN = ("inferred", "of another game", "zero", "noise")


@dataclass
class Args:
    runs: Annotated[tuple[str, ...], tyro.conf.Positional]
    """run folders of omg.py --model omg"""
    teammates: str = ""
    """folder or pattern of the teammates (empty: those of the run's tests)"""
    episodes: Positive = 512
    """games of each evaluation"""
    ahead: Positive = 5
    """steps from now to the future that is looked for in the inferred subgoal"""
    seed: Positive = 1
    """of starts, seats and teammates"""
    out: str = ""
    """a CSV file for the figures"""


class Given(omg.Learner):
    """A learner whose Q-network is given another subgoal than the inferred one."""

    given = "inferred"

    def subgoal(self, who, x, legal, memory):
        mean = self.mean[who]
        if self.given == "of another game":
            return mean.roll(1, 0)
        if self.given == "noise":
            return torch.randn(mean.shape, generator=self.rng)
        return torch.zeros_like(mean) if self.given == "zero" else mean


class Notes(omg.Recording):
    """Notes also what was seen and inferred at each step."""

    def __init__(self, learner: omg.Learner, pool: Pool):
        super().__init__(learner, pool)
        self.seen: list[torch.Tensor] = []
        self.inferred: list[torch.Tensor] = []

    def decide(self):
        seen, actions = super().decide()
        own, prior = torch.from_numpy(self.pool.is_learner), self.learner.prior
        shown = seen["state"] if prior.obs_is_state else seen["obs"][own]
        self.seen.append(shown[:, : len(prior.models.mean)].clone())
        self.inferred.append(self.learner.mean[own].clone())
        return seen, actions


def explained(inputs: np.ndarray, outputs: np.ndarray, fitted: np.ndarray) -> float:
    """Share of the variance of outputs (R, M) that a ridge regression on inputs (R, K), fitted on the rows `fitted`
    (R,), finds in the others."""
    x = (inputs - inputs[fitted].mean(0)) / (inputs[fitted].std(0) + 1e-6)
    mean = outputs[fitted].mean(0)
    kept = x[fitted]
    weights = np.linalg.solve(kept.T @ kept + 1e-3 * len(kept) * np.eye(x.shape[1]), kept.T @ (outputs[fitted] - mean))
    left = outputs[~fitted] - mean - x[~fitted] @ weights
    return 1.0 - float((left**2).sum() / ((outputs[~fitted] - outputs[~fitted].mean(0)) ** 2).sum())


def probe(run: str, args: Args) -> dict[str, object]:
    """The figures of one run."""
    checkpoint = Path(run) / "checkpoints" / "last"
    spec = read_spec(checkpoint)
    how = omg.saved_args(omg.Args, spec)
    if how.model != "omg":
        raise ConfigError(f"'{run}' is of --model {how.model}, which has no subgoals")
    team = omg.load_team(checkpoint, spec, make_env(how.env_id, 1, 1), 1, greedy=True)
    if team.prior is None:
        raise ConfigError(f"the prior VAE of '{run}' is not where it was: {spec.get('prior')}")
    found: dict[str, object] = {"run": run}
    for given in GIVEN:
        env = make_env(how.env_id, args.episodes, args.seed, how.start_jitter)
        game = TeamGame(env)
        learner = Given(how, team.nets, game, args.seed, team.prior)
        learner.given = given
        teammates = args.teammates or how.test_teammates or how.teammates
        members = load_members(find_members(teammates, env), env, args.seed)
        play = (Notes if given == "inferred" else omg.MixedPlay)(learner, Pool(game, members, args.seed, own="omg"))
        scores = play_team(game, play)
        found[f"wins, {given}"] = scores["win_rate"]
        if isinstance(play, Notes):
            found |= look(play, args.ahead)
    return found


def look(notes: Notes, ahead: int) -> dict[str, float]:
    """What the space and the inferred subgoals say."""
    usable = torch.stack(notes.usable).numpy()  # (T, B)
    space, inferred, seen = (torch.stack(x).numpy() for x in (notes.subgoals, notes.inferred, notes.seen))
    now = usable[:-ahead] & usable[ahead:]
    present, told, then = space[:-ahead][now], inferred[:-ahead][now], space[ahead:][now]
    fitted = np.broadcast_to(np.arange(usable.shape[1]) % 2 == 0, usable.shape)
    half = fitted[:-ahead][now]
    std = seen[usable].std(0)
    features = seen[..., std > 1e-3] / std[std > 1e-3]
    return {
        "space": explained(space[usable], features[usable], fitted[usable]),
        f"{ahead} ahead from now": explained(present, then, half),
        f"{ahead} ahead from inferred": explained(told, then, half),
        f"{ahead} ahead from both": explained(np.concatenate([present, told], 1), then, half),
    }


def main(args: Args) -> None:
    torch.set_num_threads(1)
    rows = []
    for run in args.runs:
        rows.append(probe(run, args))
        print(run, *(f"  {name}: {x:.3f}" for name, x in rows[-1].items() if name != "run"), sep="\n", flush=True)
    if args.out:
        with open(args.out, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(guarded(lambda _: main(parse(Args, __doc__))))
