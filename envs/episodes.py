"""Episodes to learn values from: a replay of whole ones, sequences side by side without padding, lambda returns.

    replay = Replay(60_000, game)                               # the newest steps of all agents of a team
    running = RunningEpisodes(game.num_envs, game.env.spec.horizon, replay)
    running.add(now={"obs": ..., "action": ...}, done=info["done"], final=game.final(info))     # after each env step
    mb = replay.sample(32, rng)
    out = gru(layer(mb["obs"]), mb["sizes"], memory)            # envs/memory.py

`sizes`: step by step, how many sequences still go on. An agent's sequence ends when it falls, and the longest stands
first, so the rows (R, ...) of a minibatch are those of agents on the field alone.
"""

from __future__ import annotations

import numpy as np
import torch

from envs.devices import move
from envs.team import TeamGame

Tensors = dict[str, torch.Tensor]
Columns = dict[str, tuple[tuple[int, ...], type]]


class Replay:
    """The newest episodes, one behind the other in flat arrays of `num_steps` rows. An episode of L steps has L + 1
    rows: the last one holds what was seen at its end. The oldest episodes go when their rows are needed. `agents`: how
    many of them are kept (default: all); `more`: further columns of each step."""

    def __init__(self, num_steps: int, game: TeamGame, agents: int | None = None, more: Columns | None = None):
        agents, rows = agents or game.num_agents, max(num_steps, game.env.spec.horizon + 1)
        shapes: Columns = {"obs": ((agents, game.obs_size), np.float16), "state": ((game.state_size,), np.float16)}
        shapes |= {"legal": ((agents, game.num_actions), np.bool_), "alive": ((agents,), np.bool_)}
        shapes |= {"action": ((agents,), np.int16), "reward": ((), np.float32), "terminated": ((), np.bool_)}
        shapes |= more or {}
        self.rows = {name: np.zeros((rows, *shape), dtype) for name, (shape, dtype) in shapes.items()}
        self.episodes = np.zeros((rows, 2), np.int64)  # first row and steps of each, the oldest first
        self.position = np.zeros(2, np.int64)  # next row, number of episodes

    def __len__(self) -> int:
        return int(self.position[1])

    def add(self, episode: dict[str, np.ndarray]) -> None:
        """columns (L + 1, ...)"""
        length, (first, count) = len(episode["obs"]), self.position.tolist()
        if first + length > len(self.rows["obs"]):
            first = 0
        starts, ends = self.episodes[:count, 0], self.episodes[:count].sum(1)
        kept = self.episodes[:count][(ends < first) | (starts >= first + length)]
        self.episodes[: len(kept)] = kept
        self.episodes[len(kept)] = first, length - 1
        self.position[:] = first + length, len(kept) + 1
        for name, column in episode.items():
            self.rows[name][first : first + length] = column

    def sample(self, num: int, rng: np.random.Generator, device: torch.device | str = "cpu") -> dict:
        """`num` episodes. Of the team, the shorter ones filled up with their last row: alive, state, reward, terminated
        (T + 1, E, ...), valid (T, E). Of the agents, rows (R, ...) of those on the field alone, as QNetwork wants them:
        obs, last_action, action, legal, agent, sizes, `place`, their place in (T + 1, E, N), and as arrays `row` and
        `step` of each, to look up other columns."""
        first, length = self.episodes[rng.integers(len(self), size=num)].T
        step = np.arange(length.max() + 1)[:, None]
        at = first + np.minimum(step, length)  # (T + 1, E)
        team = {name: self.rows[name][at] for name in ("alive", "state", "reward", "terminated")}
        acts = (team["alive"] & (step <= length)[..., None]).reshape(len(at), -1)  # (T + 1, E N)
        order = np.argsort(-acts.sum(0), kind="stable")  # the longest sequence first
        step_of, place = np.nonzero(acts[:, order])
        place = order[place]
        episode, agent = np.divmod(place, team["alive"].shape[2])
        row = at[step_of, episode]
        last_action = np.where(step_of > 0, self.rows["action"][row - 1, agent], self.rows["legal"].shape[2])
        agents = {name: self.rows[name][row, agent] for name in ("obs", "action", "legal")}
        agents |= {"last_action": last_action, "agent": agent, "place": step_of * acts.shape[1] + place}
        mb: dict = move(team | agents | {"valid": step[:-1] < length}, device)
        mb |= {name: mb[name].float() for name in ("obs", "state")}
        mb |= {name: mb[name].long() for name in ("action", "last_action")}
        return mb | {"sizes": [size for size in acts.sum(1).tolist() if size], "row": row, "step": step_of}

    def get_state(self) -> dict[str, np.ndarray]:
        return self.rows | {"episodes": self.episodes, "position": self.position}

    def set_state(self, saved: dict[str, np.ndarray]) -> None:
        for name, place in self.get_state().items():
            place[:] = saved[name]


class RunningEpisodes:
    """The episodes that are being played in B games, until they are whole."""

    def __init__(self, num_envs: int, horizon: int, replay: Replay):
        shape, self.replay = (num_envs, horizon + 1), replay
        self.columns = {name: np.zeros((*shape, *rows.shape[1:]), rows.dtype) for name, rows in replay.rows.items()}
        self.steps = np.zeros(num_envs, np.int64)

    def add(self, *, now: dict, done: np.ndarray, final: dict) -> None:
        """One step of all games: what was seen and done in it by column (B, ...), and, where an episode is done, what
        was seen at its end. What `final` does not say is as it was before: what is legal, when time ran out."""
        each = np.arange(len(self.steps))
        for name, column in self.columns.items():
            column[each, self.steps] = now[name]
        self.steps += 1
        for b in np.flatnonzero(done):
            length = self.steps[b]
            episode = {name: column[b, : length + 1] for name, column in self.columns.items()}
            for name, column in episode.items():
                column[length] = final[name][b] if name in final else column[length - 1]
            episode["terminated"][length] = False
            self.replay.add(episode)
        self.steps[done] = 0

    def get_state(self) -> dict[str, np.ndarray]:
        return self.columns | {"steps": self.steps}

    def set_state(self, saved: dict[str, np.ndarray]) -> None:
        for name, place in self.get_state().items():
            place[:] = saved[name]


def lambda_targets(reward, next_value, terminated, valid, alive, gamma: float, lam: float) -> torch.Tensor:
    """(T, E, V) from reward, terminated, valid (T, E), the value of what follows each step and whether its agent is on
    the field then (T, E, V): partly that value, partly what came of it. The last step of an episode has but the value,
    an end by the rules nothing. Who has fallen has no choice left: what its team earns from then on counts as it came.
    (Were it nothing, a learner for itself would rather hide than fight.)"""
    targets, following = torch.zeros_like(next_value), torch.zeros_like(next_value[0])
    for step in reversed(range(len(reward))):
        has_next = valid[step + 1, :, None] if step + 1 < len(valid) else torch.zeros_like(valid[0, :, None])
        after = torch.where(alive[step], (1 - lam) * next_value[step] + lam * following, following)
        after = torch.where(has_next, after, next_value[step])
        following = reward[step, :, None] + gamma * after * ~terminated[step, :, None]
        targets[step] = following
    return targets


def ends(info: dict[str, np.ndarray], truncated: np.ndarray) -> np.ndarray:
    """(B,) the episodes that ended by the rules, not by time"""
    return info["done"] & ~truncated.any(1)
