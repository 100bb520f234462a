"""The PettingZoo face of the grid games: one game, a dict per agent, agents leaving as they hunt."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

from envs.errors import ConfigError, check_count
from envs.grid import STAY, GridGame, T, as_actions, check_memory, illegal_message
from envs.rng import make_streams

RENDER_MODES = ("ansi", "rgb_array")


def fresh_seed() -> int:
    """A seed that nobody chose."""
    return int(np.random.SeedSequence().generate_state(1)[0])


def check_agents(actions: Any, agents: list[str], thing: str) -> None:
    """Whether `actions` is a dict with an action for each agent that acts now, before anything moves."""
    if not agents:
        raise RuntimeError(f"this {thing} is over (or was never started); call reset() before step()")
    if not isinstance(actions, dict):
        raise ValueError(f"actions must be a dict with an action for each of {', '.join(agents)}, not {actions!r}")
    if set(actions) != set(agents):
        given = ", ".join(map(str, actions)) or "nobody"
        raise ValueError(f"actions must be given for exactly {', '.join(agents)}, not for {given}")


class GridParallelEnv(ParallelEnv):
    """A grid game for PettingZoo; agents are player_1, player_2, ...

    An observation is {"observation": (H, W, planes) own plane first, "action_mask": (A,), "t": (1,)}. The batched
    env's rules are the same compiled functions; from the same state both give the same bytes.

    `flat` and `keep_agents` are for libraries that want plain arrays and the same agents in every step. `flat`: an
    observation is one float32 vector, the planes and then t / horizon, and the mask is in `info["action_mask"]`.
    `keep_agents`: who left stays with an observation of zeros, STAY as its one legal action and rewards of 0, and the
    episode ends for all at once: if time ended it, all are truncated, and who had left is terminated as well.
    """

    def __init__(
        self, game: GridGame, render_mode: str | None = None, flat: bool = False, keep_agents: bool = False
    ):  # fmt: skip
        if render_mode not in (None, *RENDER_MODES):
            raise ConfigError(f"unknown render_mode '{render_mode}'; valid are {', '.join(RENDER_MODES)}")
        self.game, self.render_mode, self.flat, self.keep_agents = game, render_mode, flat, keep_agents
        self.spec = game.spec()
        check_memory(1, self.spec)
        self.metadata = {"name": game.env_id, "render_modes": list(RENDER_MODES), "render_fps": 4}
        self.metadata["is_parallelizable"] = True
        self.possible_agents = list(self.spec.player_names)
        self.agents: list[str] = []
        self.observation_spaces = {agent: self._make_space() for agent in self.possible_agents}
        self.action_spaces = {agent: spaces.Discrete(game.num_actions) for agent in self.possible_agents}
        self.streams: np.ndarray | None = None  # from the first reset on, so that copies of a new env differ
        self.returns = np.zeros(game.num_players)
        self.taken = np.zeros(game.num_players, np.int8)  # what each player took in the last step
        self.took = np.zeros((game.num_players, len(game.kinds)), np.int64)  # how many of each kind in this episode
        self.out = game.transition(1)
        self.before: np.ndarray | None = None  # the state row one step ago

    def _make_space(self) -> spaces.Space:
        game = self.game
        if self.flat:
            return spaces.Box(0.0, 1.0, (int(np.prod(game.obs_shape)) + 1,), np.float32)
        return spaces.Dict(
            {
                "observation": spaces.Box(0, 1, game.obs_shape, np.uint8),
                "action_mask": spaces.Box(0, 1, (game.num_actions,), np.int8),
                "t": spaces.Box(0, game.config.horizon, (1,), np.int32),
            }
        )

    def observation_space(self, agent: str) -> spaces.Space:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Discrete:
        return self.action_spaces[agent]

    @property
    def state_row(self) -> np.ndarray:
        """(L,) the state as the batched env holds it (see envs/grid.py)."""
        return self.out.states[0].copy()

    def state(self) -> np.ndarray:
        return self.state_row

    def reset(self, seed: int | None = None, options: dict | None = None):
        if seed is not None or self.streams is None:
            self.streams = make_streams(fresh_seed() if seed is None else check_count("seed", seed, 0), 1)
        config = self.game.config
        self.game.start(self.out.states, self.streams, config.start_window, config.start_window_prob)
        return self._begin()

    def set_state(self, state_row: np.ndarray):
        """Start from a given state row; returns what `reset` returns."""
        self.out.states[:] = self.game.as_states([state_row], 1)
        return self._begin()

    def _begin(self):
        here = self.game.alive(self.out.states)[0] | self.keep_agents
        here &= ~self.game.over(self.out.states, trusted=True)
        self.agents = [agent for agent, there in zip(self.possible_agents, here, strict=True) if there]
        self.returns[:] = 0.0
        self.taken[:] = 0
        self.took[:] = 0
        self.out.illegal[:] = 0
        self.before = None
        return self._look(self.agents)

    def _look(self, agents: list[str]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """The observations and infos of these agents."""
        planes = self.game.observe(self.out.states, trusted=True)[0]
        self._legal = self.game.legal(self.out.states, trusted=True)[0]
        t, horizon = self.out.states[0, T], self.game.config.horizon
        observations: dict[str, Any] = {}
        infos: dict[str, dict[str, Any]] = {}
        for agent in agents:
            seat = self.possible_agents.index(agent)
            mask = self._legal[seat].astype(np.int8)
            infos[agent] = {"illegal_actions": int(self.out.illegal[0]), "taken": int(self.taken[seat])}
            if self.flat:
                clock = t / horizon if planes[seat].any() else 0.0
                observations[agent] = np.append(planes[seat], clock).astype(np.float32)
                infos[agent]["action_mask"] = mask
            else:
                now = np.array([t], np.int32)
                observations[agent] = {"observation": planes[seat], "action_mask": mask, "t": now}
        return observations, infos

    def step(self, actions: dict[str, int]):
        check_agents(actions, self.agents, "game")
        joint = as_actions([[actions.get(agent, STAY) for agent in self.possible_agents]], 1, self.game)
        if self.game.config.strict:
            for seat in np.flatnonzero(self.game.alive(self.out.states)[0]).tolist():
                if not self._legal[seat, joint[0, seat]]:
                    raise ValueError(illegal_message(self.spec, seat, joint[0, seat], self._legal[seat]))
        self.before = self.state_row
        self.game.simulate(self.out.states, joint, self.out, trusted=True)
        self.returns += self.out.reward[0]
        self.taken[:] = self.out.taken[0]
        for taker in np.flatnonzero(self.taken):
            self.took[taker, self.taken[taker] - 1] += 1

        terminated, truncated = self.out.terminated[0], self.out.truncated[0]
        if self.keep_agents:
            over = bool(self.game.over(self.out.states, trusted=True)[0])
            terminated, truncated = over & ~truncated, over & np.full_like(truncated, truncated.any())
        acted = self.agents
        seats = {agent: self.possible_agents.index(agent) for agent in acted}
        rewards = {agent: float(self.out.reward[0, seat]) for agent, seat in seats.items()}
        terminations = {agent: bool(terminated[seat]) for agent, seat in seats.items()}
        truncations = {agent: bool(truncated[seat]) for agent, seat in seats.items()}
        self.agents = [agent for agent in acted if not (terminations[agent] or truncations[agent])]
        observations, infos = self._look(acted)
        return observations, rewards, terminations, truncations, infos

    def render(self):
        if self.render_mode is None:
            return None
        from envs import render

        rewards = None if self.before is None else self.out.reward[0]
        view = render.View.of(
            self.game, self.out.states[0], self.returns, self.taken, rewards, self.before, self.took
        )  # fmt: skip
        return render.ansi(view) if self.render_mode == "ansi" else render.picture(view)

    def close(self) -> None:
        pass
