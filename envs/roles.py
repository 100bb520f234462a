"""Who plays which seat: rule-based players, and checkpoints of any training script of this project.

A role is the name of a rule-based player, a player of the user's own as FILE.py:CLASS (envs/user_players.py), or a path
to a run folder or one of its checkpoints; `PATH@2` picks the second learner of a run that trained several (default: the
learner of the same seat, else the first). The convention that lets any script play any other's checkpoint
(docs/checkpoints.md):

- a checkpoint is a folder with weights.safetensors and a spec.json that names its `script`, `env_id`, `obs_shape`
  and `num_actions`;
- that script has `load_policy(checkpoint, spec, env, seat, learner, seed, greedy)`, which returns an object with
  `act(env) -> (B,) actions` of its seat, and, if it remembers or draws anything, `watch(env, actions, info)`, called
  after each step, and `get_state()` / `set_state()` as dicts of arrays;
- or, if its agents learn as a team, `load_team(checkpoint, spec, env, seed, greedy)`, whose `act(env)` gives the
  actions (B, N) of all agents, or (B,) of one where its `seat` is set.

A policy that has `explain(row)` tells what it thought in game `row` before its last action, for replays
(docs/replay.md): a dict of arrays for its seat, with an agent axis in front if it plays a whole team. All are optional:
`policy`, `prior`, `visits`, `q_values` (A,); `value` and any other single number; `belief` (N, K) over goals that are
about `goal_cell` (K,) and `goal_code` (K,), as in envs/trees.py; `predicted` (N, A) actions of everybody;
`imagined_action`, `imagined_reward`, `imagined_over` (M,) and `imagined_state` (M, L) of next boards; `attention` (N,)
over agents; `subgoal_state` (S,) or `subgoal_obs` (D,), a subgoal decoded to a state or an observation of a battle.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from envs import checkpoints
from envs.arguments import check_ranges
from envs.errors import ConfigError
from envs.grid import STAY
from envs.players import RulePlayers, names
from envs.run import PROJECT, load_script
from envs.user_players import UserPlayer, is_file_role

ALGORITHMS = {  # of each script, as tables and figures call them
    "hopplus_mcts": "HOP+", "hopplus_nomcts": "HOP+ without trees", "ppo_baseline": "PPO",
    "ppo_lstm": "PPO with memory", "mappo_hyper": "MAPPO", "qmix": "QMIX", "omg": "OMG",
}  # fmt: skip


def parse_roles(text: str, num_players: int, default: str) -> list[str]:
    """Comma-separated roles, one per player; empty means `default` for everybody."""
    roles = [role.strip() for role in text.split(",")] if text else [default] * num_players
    if len(roles) != num_players:
        raise ConfigError(f"roles must name all {num_players} players, but '{text}' names {len(roles)}")
    return roles


def learners_of(roles: list[str], own: str) -> list[int]:
    """The seats whose role is `own`, the calling script's learner."""
    learners = [seat for seat, role in enumerate(roles) if role == own]
    if not learners:
        raise ConfigError(f"no role in '{','.join(roles)}' is {own}, so there is nobody to train")
    return learners


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint folder behind a path: itself, or the best (else the last) one of a run folder."""
    path = Path(path)
    for folder in (path, path / "checkpoints" / "best", path / "checkpoints" / "last"):
        if (folder / "spec.json").is_file():
            return folder
    raise ConfigError(f"'{path}' is no checkpoint: there is no spec.json in it or in its checkpoints/best or last")


def read_spec(checkpoint: Path, env: Any) -> dict[str, Any]:
    """The spec of a checkpoint, once it is sure to be whole and to fit the env."""
    spec = checkpoints.read_spec(checkpoint)
    here = {"obs_shape": list(env.spec.obs_shape), "num_actions": env.spec.num_actions}
    for name, value in here.items():
        if spec[name] != value:
            raise ConfigError(
                f"checkpoint '{checkpoint}' was trained on {spec['env_id']} with {name} {spec[name]},"
                f" this run uses {env.spec.env_id} with {value}"
            )
    return spec


def script_of(checkpoint: Path, spec: dict[str, Any]) -> Any:
    """The script that made a checkpoint: in the current folder or in the project's root."""
    name = Path(str(spec["script"])).name
    places = [folder / name for folder in (Path.cwd(), PROJECT)]
    script = next((path for path in places if path.is_file()), None)
    if script is None:
        where = "is neither in this folder nor in the project's root"
        raise ConfigError(f"checkpoint '{checkpoint}' was trained by '{name}', which {where}")
    return load_script(script)


def load(module: Any, wanted: str, checkpoint: Path, spec: dict[str, Any], *args: Any) -> Any:
    """What the function `wanted` of its script makes of a checkpoint."""
    name = Path(str(spec["script"])).name
    if not hasattr(module, wanted):
        raise ConfigError(f"{name} has no {wanted}, so its checkpoint '{checkpoint}' cannot play")
    try:
        if hasattr(module, "Args"):
            known = {field.name for field in fields(module.Args)} & spec["args"].keys()
            said = {name: spec["args"][name] for name in known}
            check_ranges(module.Args(**{k: tuple(x) if isinstance(x, list) else x for k, x in said.items()}))
        return getattr(module, wanted)(checkpoint, spec, *args)
    except (ConfigError, MemoryError):
        raise
    except Exception as error:  # a spec that says what no run of this script says
        what = f"{type(error).__name__}: {checkpoints.one_line(error)}"
        raise ConfigError(f"checkpoint '{checkpoint}' does not fit {name}: {what}") from error


def load_policy(path: str, env: Any, seat: int, seed: int, greedy: bool = False) -> Any:
    """The policy behind a checkpoint, ready for one seat of `env`, made by the script that trained it."""
    folder, _, learner = path.partition("@")
    if learner and not learner.isdigit():
        raise ConfigError(f"'{path}' must end in the number of a learner after '@'")
    checkpoint = find_checkpoint(folder)
    spec = read_spec(checkpoint, env)
    script = script_of(checkpoint, spec)
    if hasattr(script, "load_policy") or not hasattr(script, "load_team"):
        number, learners = int(learner) if learner else None, spec.get("learners")
        if number is not None and isinstance(learners, list) and not 1 <= number <= len(learners):
            raise ConfigError(f"checkpoint '{checkpoint}' has learners 1 to {len(learners)}, not {number}")
        return load(script, "load_policy", checkpoint, spec, env, seat, number, seed, greedy)
    if learner:
        raise ConfigError(f"checkpoint '{checkpoint}' has one policy for all seats, so '@{learner}' picks nothing")
    team = load_team(folder, env, seed, greedy)
    team.seat = seat
    return team


def load_team(path: str, env: Any, seed: int, greedy: bool = False) -> Any:
    """The policies of all seats of `env` behind a checkpoint of a team: `act(env) -> (B, N)`, and `watch` as above."""
    checkpoint = find_checkpoint(path)
    spec = read_spec(checkpoint, env)
    script, agents = script_of(checkpoint, spec), spec.get("num_agents", spec.get("learners"))  # how many, or which
    trained = len(agents) if isinstance(agents, list) else agents
    if hasattr(script, "load_team") and trained != env.spec.num_players:
        here = f"{env.spec.env_id} has {env.spec.num_players}"
        raise ConfigError(f"checkpoint '{checkpoint}' is of a team of {trained}, but {here}")
    return load(script, "load_team", checkpoint, spec, env, seed, greedy)


class Seats:
    """The players of all seats whose role is not `own` (the calling script's learners).

    `policies` puts ready policies into some of those `own` seats, to evaluate what is being learned.
    """

    def __init__(
        self, env: Any, roles: list[str], own: str | None, seed: int, greedy: bool = False,
        policies: dict[int, Any] | None = None,
    ):  # fmt: skip
        self.env = env
        known = names(env.game)
        self.rules = RulePlayers(env.game, [role if role in known else None for role in roles], env.num_envs, seed)
        self.policies: dict[int, Any] = dict(policies or {})
        for seat, role in enumerate(roles):
            if is_file_role(role):
                self.policies[seat] = UserPlayer(role, env, seat, seed + seat)
            elif role != own and role not in known:
                if not Path(role.partition("@")[0]).exists():
                    valid = ", ".join(((own,) if own else ()) + known)
                    raise ConfigError(
                        f"unknown role '{role}'; valid are {valid}, FILE.py:CLASS, or the path of a run folder"
                    )
                self.policies[seat] = load_policy(role, env, seat, seed + seat, greedy)

    def act(self, actions: np.ndarray | None = None) -> np.ndarray:
        """Fill these seats' columns of `actions` (B, N)."""
        if actions is None:
            actions = np.full((self.env.num_envs, self.env.spec.num_players), STAY, np.int64)
        self.rules.act(self.env.obs, self.env.legal, self.env.t, actions)
        for seat, policy in self.policies.items():
            actions[:, seat] = policy.act(self.env)
        return actions

    def watch(self, actions: np.ndarray, info: dict[str, np.ndarray]) -> None:
        """Tell players with a memory what happened in a step."""
        self.rules.watch(info)
        for policy in self.policies.values():
            if hasattr(policy, "watch"):
                policy.watch(self.env, actions, info)

    def get_state(self) -> dict[str, np.ndarray]:
        saved = {f"rules.{name}": array for name, array in self.rules.get_state().items()}
        for seat, policy in self.policies.items():
            if hasattr(policy, "get_state"):
                saved |= {f"policy{seat}.{name}": array for name, array in policy.get_state().items()}
        return saved

    def set_state(self, saved: dict[str, np.ndarray]) -> None:
        def part(prefix: str) -> dict[str, np.ndarray]:
            return {name.removeprefix(prefix): array for name, array in saved.items() if name.startswith(prefix)}

        self.rules.set_state(part("rules."))
        for seat, policy in self.policies.items():
            if hasattr(policy, "set_state"):
                policy.set_state(part(f"policy{seat}."))


class Episodes(NamedTuple):
    returns: np.ndarray  # (E, N)
    taken: np.ndarray  # (E, N, kinds) how many items of each kind a player took
    lengths: np.ndarray  # (E,)


def play_episodes(env: Any, seats: Seats) -> Episodes:
    """One episode in each env, from its start to its end, so that long and short ones count alike."""
    shape = (env.num_envs, env.spec.num_players)
    returns, lengths = np.zeros(shape), np.zeros(env.num_envs, np.int64)
    taken = np.zeros((*shape, len(env.game.kinds)), np.int64)
    running = np.ones(env.num_envs, bool)
    env.needed = running  # planners need not think in games whose episode is counted already
    while running.any():
        actions = seats.act()
        info = env.step(actions)[-1]
        seats.watch(actions, info)
        for kind in range(len(env.game.kinds)):
            taken[running, :, kind] += info["taken"][running] == 1 + kind
        ended = running & info["done"]
        returns[ended], lengths[ended] = info["episode_return"][ended], info["episode_length"][ended]
        running &= ~ended
    return Episodes(returns, taken, lengths)


def play_in_a_row(env: Any, seats: Any, episodes: int) -> np.ndarray:
    """(B, episodes) returns of seat 1 in the first episodes of every game, one after the other."""
    returns, count = np.zeros((env.num_envs, episodes)), np.zeros(env.num_envs, np.int64)
    while (count < episodes).any():
        env.needed = count < episodes
        actions = seats.act()
        info = env.step(actions)[-1]
        seats.watch(actions, info)
        ended = np.flatnonzero(info["done"] & (count < episodes))
        returns[ended, count[ended]] = info["episode_return"][ended, 0]
        count[ended] += 1
    return returns


def score_episodes(played: Episodes, learners: list[int], kinds: tuple[str, ...]) -> dict[str, float]:
    """What an evaluation says: the mean return of the learners and its 95 % interval, of each player, items taken."""
    score, episodes = played.returns[:, learners].mean(1), len(played.returns)
    result = {"return": score.mean(), "return_ci95": 1.96 * score.std() / episodes**0.5, "episodes": episodes}
    result |= {f"return-player{i + 1}": mean for i, mean in enumerate(played.returns.mean(0))}
    result |= {f"{kind}_rate": played.taken[:, :, k].mean() for k, kind in enumerate(kinds)}
    return {name: float(value) for name, value in (result | {"length": played.lengths.mean()}).items()}
