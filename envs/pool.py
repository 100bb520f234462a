"""Several checkpoints in the seats of one team, and pools of frozen teammates that are drawn anew for each episode.

    members = load_members(find_members("pools/8m/qmix-[1-5]", env), env, seed=1)
    pool = Pool(TeamGame(env), members, seed=1)            # every teammate of an episode is of one run
    pool = Pool(TeamGame(env), members, seed=1, team="iql:4,qmix:3,omg:1", own="omg")
    seen = game.observe()
    pool.seat                                              # (B,) the learner's seat in the running episodes
    actions = pool.act(seen)                               # (B, N), all but the learner's
    actions[range(B), pool.seat] = ...
    info = env.step(actions)[-1]
    pool.watch(env, actions, info)                         # memories; draws anew where an episode has ended
    pool = Teammates(TeamGame(env), ["nearest,focus", "runs/pool/8m-*"], seed=1)     # a learner in several seats

    python -m envs.pool runs/omg_pool pools                # keep checkpoints: pools/<map>/<algorithm>-<seed>

Every member acts once for all games in which it sits, however many those are. Teammates play greedily. A member is a
team as its script's `load_team` makes it (envs/roles.py). If that has `choose(seen, who) -> (M,)` for the M agents of
`who` (B, N), it computes those alone; else it computes all games, and what is not needed is left.
"""

from __future__ import annotations

import argparse
import glob
import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from envs import BATTLES
from envs.checkpoints import Kept, read_checkpoint, read_spec, write_checkpoint
from envs.errors import ConfigError
from envs.roles import PROJECT, find_checkpoint, load_team
from envs.team import TeamGame

LEARNER = -1  # in place of the number of a member


class Member(NamedTuple):
    name: str
    algorithm: str
    team: Any


def is_member(folder: Path) -> bool:
    """A run folder or a checkpoint."""
    return (folder / "checkpoints").is_dir() or (folder / "spec.json").is_file()


def find_members(pattern: str, env: Any) -> list[Path]:
    """The runs and checkpoints of this env in a folder, or those of a pattern such as pools/8m/qmix-*. Empty: the QMIX
    teams that come with the project."""
    pattern = pattern or f"{glob.escape(str(PROJECT))}/pools/{env.spec.env_id.removeprefix('smac-')}/qmix-[1-5]"
    folders = sorted(Path(path) for path in glob.glob(pattern))
    if len(folders) == 1 and not is_member(folders[0]):
        folders = sorted(folders[0].glob("*"))
    members = [folder for folder in folders if is_member(folder)]
    fits = [folder for folder in members if read_spec(find_checkpoint(folder))["env_id"] == env.spec.env_id]
    if not fits:
        where = f"behind the teammates '{pattern}'; `python sweep.py run experiments/omg_pool.toml` trains some"
        raise ConfigError(f"there is no run of {env.spec.env_id} {where}")
    return fits


def with_a_stranger(members: list[Path], num_agents: int) -> list[str]:
    """Line-ups of each member with somebody at random in one seat, as the learner is at first. By themselves members
    play nearly the same battle over and over, and a prior learns little from it."""
    lineups = []
    for k, member in enumerate(members):
        seats = [str(member)] * num_agents
        seats[k * num_agents // len(members)] = "random"
        lineups.append(",".join(seats))
    return lineups


class RuleTeam(Kept):
    """A rule-based team of a battle as a member."""

    KEPT = ("streams",)

    def __init__(self, name: str, env: Any, seed: int):
        from envs.battles import make_team

        self.team = make_team(name, env, seed)
        self.streams = self.team.streams

    def act(self, env: Any) -> np.ndarray:
        return self.team()

    def watch(self, env: Any, actions: np.ndarray, info: dict[str, np.ndarray]) -> None:
        pass


def load_member(role: str | Path, env: Any, seed: int, greedy: bool = True) -> Member:
    """A rule-based team by its name, or the team of a checkpoint."""
    from envs.battles import TEAMS

    if str(role) in TEAMS:
        return Member(str(role), str(role), RuleTeam(str(role), env, seed))
    if not str(role) or not Path(role).exists():
        raise ConfigError(f"unknown team '{role}'; valid are {', '.join(TEAMS)}, or the path of a run folder")
    spec = read_spec(find_checkpoint(role))
    algorithm = str(spec.get("algorithm") or Path(spec["script"]).stem)
    return Member(str(role), algorithm, load_team(str(role), env, seed, greedy))


def load_members(roles: Sequence[str | Path], env: Any, seed: int) -> list[Member]:
    return [load_member(role, env, seed + k) for k, role in enumerate(roles)]


class MixedTeam(Kept):
    """Members in the seats of a batch of games: `member` (B, N) says who sits where."""

    KEPT: tuple[str, ...] = ("member", "remembering")

    def __init__(self, game: TeamGame, members: list[Member], member: np.ndarray | None = None):
        self.game, self.members = game, members
        self.remembering = [member.team for member in members if hasattr(member.team, "get_state")]
        shape = (game.num_envs, game.num_agents)
        self.member = np.full(shape, LEARNER) if member is None else np.broadcast_to(member, shape).copy()

    def act(self, env: Any = None, seen: dict[str, torch.Tensor] | None = None) -> np.ndarray:
        """(B, N) actions of the members; who has fallen, and the learner, does the first thing that is legal."""
        env = self.game.env
        seen = self.game.observe() if seen is None else seen
        actions = env.legal.argmax(2)
        for k in np.unique(self.member[self.member != LEARNER]):
            who, team = (self.member == k) & env.alive, self.members[k].team
            if who.any() and hasattr(team, "choose"):
                actions[who] = team.choose(seen, torch.from_numpy(who)).numpy()
            elif who.any():
                actions[who] = team.act(env)[who]
        return actions

    def explain(self, row: int = 0) -> dict[str, np.ndarray]:
        """What was thought in game `row` (envs/roles.py), of each agent by its own member; NaN where that tells nothing
        of the kind."""
        seats = self.member[row].tolist()
        told: dict[int, dict] = {k: getattr(self.members[k].team, "explain", lambda row: {})(row) for k in set(seats)}
        if len(told) == 1:
            return told[seats[0]]
        found: dict[str, np.ndarray] = {}
        for seat, k in enumerate(seats):
            for name, array in told[k].items():
                if np.shape(array)[:1] == (len(seats),):
                    empty = np.full(np.shape(array), np.nan, np.float32)
                    found.setdefault(name, empty)[seat] = array[seat]
        return found

    def watch(self, env: Any, actions: np.ndarray, info: dict[str, np.ndarray]) -> None:
        for member in self.members:
            member.team.watch(env, actions, info)


def mixed_team(roles: list[str], env: Any, seed: int, greedy: bool = True) -> MixedTeam:
    """A team of one role for each seat, or of one for all: rule-based teams and checkpoints."""
    if len(roles) not in (1, env.spec.num_players):
        needs = f"{env.spec.env_id} has {env.spec.num_players} seats"
        raise ConfigError(f"a battle has one role for each seat, or one team for all; {needs}, not {len(roles)}")
    distinct = list(dict.fromkeys(roles))
    members = [load_member(role, env, seed + k, greedy) for k, role in enumerate(distinct)]
    return MixedTeam(TeamGame(env), members, np.array([distinct.index(role) for role in roles]))


def parse_team(text: str, own: str, num_agents: int, members: list[Member]) -> list[tuple[int, list[int]]]:
    """Groups of teammates as (seats, numbers of the members that may take them); empty: one group of anybody."""
    if not text:
        return [(num_agents - 1, list(range(len(members))))]
    groups: list[tuple[int, list[int]]] = []
    seats, learners = 0, 0
    known = sorted({member.algorithm for member in members})
    for part in text.split(","):
        name, _, count = part.strip().partition(":")
        if not count.isdigit() or int(count) < 1 or (name != own and name not in known):
            raise ConfigError(f"'{part}' of team '{text}' must be NAME:SEATS with one of {', '.join([own, *known])}")
        seats += int(count)
        learners += int(count) * (name == own)
        if name != own:
            groups.append((int(count), [k for k, member in enumerate(members) if member.algorithm == name]))
    if seats != num_agents or learners != 1:
        needs = f"{num_agents} seats, one of them of {own}"
        raise ConfigError(f"team '{text}' has {seats} seats, {learners} of them of {own}; this game has {needs}")
    return groups


class Pool(MixedTeam):
    """One seat of each game is the learner's; the others are taken by members. Both are drawn anew for each episode:
    the learner's seat, one member for each group of teammates, and where the group sits."""

    KEPT = (*MixedTeam.KEPT, "rng")

    def __init__(self, game: TeamGame, members: list[Member], seed: int, team: str = "", own: str = "learner"):
        super().__init__(game, members)
        self.groups = parse_team(team, own, game.num_agents, members)
        self.rng = torch.Generator().manual_seed(seed)
        self.draw(np.arange(game.num_envs))

    @property
    def is_learner(self) -> np.ndarray:
        """(B, N) true for the learner's seat"""
        return self.member == LEARNER

    @property
    def seat(self) -> np.ndarray:
        """(B,) the learner's seat"""
        return self.is_learner.argmax(1)

    @property
    def algorithms(self) -> list[str]:
        """(B,) of the teammates in the running episodes: qmix, or where there are several iql+qmix"""
        teams = [sorted({self.members[k].algorithm for k in row if k != LEARNER}) for row in self.member.tolist()]
        return ["+".join(team) for team in teams]

    def draw(self, games: np.ndarray) -> None:
        """Draw who sits where in these games."""
        order = torch.rand(len(games), self.game.num_agents, generator=self.rng).argsort(1).numpy()
        self.member[games[:, None], order[:, :1]] = LEARNER
        first = 1
        for seats, candidates in self.groups:
            drawn = torch.randint(len(candidates), (len(games), 1), generator=self.rng).numpy()
            self.member[games[:, None], order[:, first : first + seats]] = np.array(candidates)[drawn]
            first += seats

    def watch(self, env: Any, actions: np.ndarray, info: dict[str, np.ndarray]) -> None:
        super().watch(env, actions, info)
        if info["done"].any():
            self.draw(np.flatnonzero(info["done"]))


class MixedPlay:
    """A learner, a team that can `choose` (envs/team.py), in its drawn seats among the members of a pool."""

    def __init__(self, learner: Any, pool: Pool):
        self.learner, self.pool = learner, pool

    def decide(self) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        """What was seen and the actions (B, N) of all"""
        seen = self.pool.game.observe()
        actions, who = self.pool.act(seen=seen), torch.from_numpy(self.pool.is_learner) & seen["alive"]
        if who.any():
            actions[who.numpy()] = self.learner.choose(seen, who).numpy()
        return seen, actions

    def act(self, env: Any = None) -> np.ndarray:
        return self.decide()[1]

    def watch(self, env: Any, actions: np.ndarray, info: dict[str, np.ndarray]) -> None:
        self.learner.watch(env, actions, info)
        self.pool.watch(env, actions, info)


def find_teammates(text: str, env: Any) -> list[str | Path]:
    """Rule-based teams by name and run folders by pattern, with commas between: nearest,runs/pool/8m-*"""
    from envs.battles import TEAMS

    if not env.spec.env_id.startswith(BATTLES):
        raise ConfigError(f"--teammates are for battles only, not for {env.spec.env_id}")
    found: list[str | Path] = []
    for part in (part.strip() for part in text.split(",")):
        if not part:
            raise ConfigError(f"between the commas of teammates '{text}' there must be names")
        found += [part] if part in TEAMS else find_members(part, env)
    return found


class Teammates(MixedTeam):
    """In each episode some seats, drawn anew, are taken by members, each drawn by itself; the learner has the others.

    `pools`: texts as find_teammates reads them; those of `pools[current]` are drawn. `seats`: how many seats are taken
    (0: from one to all but one, drawn). With `switch_step` the same seats get other members in that step of every
    episode; who comes in then knows nothing of what was.
    """

    KEPT = (*MixedTeam.KEPT, "rng")

    def __init__(self, game: TeamGame, pools: list[str], seed: int, seats: int = 0, switch_step: int = 0):
        if not 0 <= seats < game.num_agents:
            raise ConfigError(f"--teammate-seats must be from 0 to {game.num_agents - 1} here, not {seats}")
        roles = [find_teammates(text, game.env) for text in pools]
        ends = np.cumsum([0, *map(len, roles)])
        super().__init__(game, load_members([role for pool in roles for role in pool], game.env, seed))
        self.candidates = [np.arange(first, last) for first, last in pairwise(ends)]
        self.seats, self.switch_step, self.current = seats, switch_step, 0
        self.rng = torch.Generator().manual_seed(seed)
        self.draw(np.arange(game.num_envs))

    def refuse(self, test: str) -> None:
        """Teammates of a test must not be among these."""
        known = {os.path.realpath(member.name) for member in self.members}
        for role in find_teammates(test, self.game.env) if test else ():
            if os.path.realpath(role) in known:  # however it is spelled
                raise ConfigError(f"--test-teammates has {role}, which is trained with")

    @property
    def is_learner(self) -> np.ndarray:
        """(B, N) true for the learner's seats"""
        return self.member == LEARNER

    def draw_members(self, games: np.ndarray) -> np.ndarray:
        """(games, N) numbers of members that may be drawn now"""
        candidates = self.candidates[self.current]
        return candidates[torch.randint(len(candidates), (len(games), self.game.num_agents), generator=self.rng)]

    def draw(self, games: np.ndarray) -> None:
        """Draw who sits where in these games."""
        agents = self.game.num_agents
        taken = torch.randint(1, agents, (len(games), 1), generator=self.rng).numpy() if not self.seats else self.seats
        rank = torch.rand(len(games), agents, generator=self.rng).argsort(1).argsort(1).numpy()
        self.member[games] = np.where(rank < taken, self.draw_members(games), LEARNER)

    def watch(self, env: Any, actions: np.ndarray, info: dict[str, np.ndarray]) -> None:
        super().watch(env, actions, info)
        if info["done"].any():
            self.draw(np.flatnonzero(info["done"]))
        if self.switch_step:
            games = np.flatnonzero((env.t == self.switch_step) & ~info["done"])
            self.member[games] = np.where(self.is_learner[games], LEARNER, self.draw_members(games))


def keep_checkpoints(runs: Path, pools: Path) -> list[Path]:
    """The best checkpoint of each run in a folder, copied to pools/<map>/<algorithm>-<seed>."""
    kept = []
    for run in sorted(folder for folder in runs.glob("*") if (folder / "checkpoints").is_dir()):
        weights, _, spec = read_checkpoint(find_checkpoint(run))
        map_name, algorithm = spec["env_id"].removeprefix("smac-"), spec.get("algorithm") or Path(spec["script"]).stem
        place = pools / map_name / f"{algorithm}-{spec['args'].get('seed')}"
        if place in kept:
            raise ConfigError(f"'{runs}' has two runs of {algorithm} on {map_name} with one seed, one of them '{run}'")
        write_checkpoint(place, weights, None, spec)
        kept.append(place)
    if not kept:
        raise ConfigError(f"there is no run in '{runs}'")
    return kept


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m envs.pool", description=keep_checkpoints.__doc__)
    parser.add_argument("runs", type=Path, help="folder with run folders, such as that of a sweep")
    parser.add_argument("pools", type=Path, help="where the checkpoints go")
    try:
        print(*keep_checkpoints(**vars(parser.parse_args())), sep="\n")
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
