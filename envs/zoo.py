"""The PettingZoo face of the grid games: one game, a dict per agent, agents leaving as they hunt."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

from envs.errors import ConfigError
from envs.grid import STAY, GridGame, T, as_actions, illegal_message
from envs.rng import make_streams

RENDER_MODES = ("ansi", "rgb_array")


class GridParallelEnv(ParallelEnv):
    """A grid game for PettingZoo; agents are player_1, player_2, ...

    An observation is {"observation": (H, W, planes) own plane first, "action_mask": (A,), "t": (1,)}. The batched
    env's rules are the same compiled functions; from the same state both give the same bytes.
    """

    def __init__(self, game: GridGame, render_mode: str | None = None):
        if render_mode not in (None, *RENDER_MODES):
            raise ConfigError(f"unknown render_mode '{render_mode}'; valid are {', '.join(RENDER_MODES)}")
        self.game, self.render_mode = game, render_mode
        self.spec = game.spec()
        self.metadata = {"name": game.env_id, "render_modes": list(RENDER_MODES), "render_fps": 4}
        self.metadata["is_parallelizable"] = True
        self.possible_agents = list(self.spec.player_names)
        self.agents: list[str] = []
        self.observation_spaces = {
            agent: spaces.Dict(
                {
                    "observation": spaces.Box(0, 1, game.obs_shape, np.uint8),
                    "action_mask": spaces.Box(0, 1, (game.num_actions,), np.int8),
                    "t": spaces.Box(0, game.config.horizon, (1,), np.int32),
                }
            )
            for agent in self.possible_agents
        }
        self.action_spaces = {agent: spaces.Discrete(game.num_actions) for agent in self.possible_agents}
        self.streams = make_streams(int(np.random.SeedSequence().generate_state(1)[0]), 1)
        self.returns = np.zeros(game.num_players)
        self.taken = np.zeros(game.num_players, np.int8)  # what each player took in the last step
        self.took = np.zeros((game.num_players, len(game.kinds)), np.int64)  # how many of each kind in this episode
        self.out = game.transition(1)
        self.before: np.ndarray | None = None  # the state row one step ago

    def observation_space(self, agent: str) -> spaces.Dict:
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
        if seed is not None:
            self.streams = make_streams(seed, 1)
        config = self.game.config
        self.game.start(self.out.states, self.streams, config.start_window, config.start_window_prob)
        return self._begin()

    def set_state(self, state_row: np.ndarray):
        """Start from a given state row; returns what `reset` returns."""
        self.out.states[0] = state_row
        return self._begin()

    def _begin(self):
        on_board = self.game.alive(self.out.states)[0] & ~self.game.over(self.out.states)
        self.agents = [agent for agent, here in zip(self.possible_agents, on_board, strict=True) if here]
        self.returns[:] = 0.0
        self.taken[:] = 0
        self.took[:] = 0
        self.before = None
        return self._observations(self.agents), {agent: {} for agent in self.agents}

    def _observations(self, agents: list[str]) -> dict[str, dict[str, np.ndarray]]:
        planes = self.game.observe(self.out.states)[0]
        self._legal = self.game.legal(self.out.states)[0]
        observations = {}
        for agent in agents:
            seat = self.possible_agents.index(agent)
            observations[agent] = {
                "observation": planes[seat],
                "action_mask": self._legal[seat].astype(np.int8),
                "t": np.array([self.out.states[0, T]], np.int32),
            }
        return observations

    def step(self, actions: dict[str, int]):
        if not self.agents:
            raise RuntimeError("this game is over (or was never started); call reset() before step()")
        agents = ", ".join(self.agents)
        if not isinstance(actions, dict):
            raise ValueError(f"actions must be a dict with an action for each of {agents}, not {actions!r}")
        if set(actions) != set(self.agents):
            given = ", ".join(map(str, actions)) or "nobody"
            raise ValueError(f"actions must be given for exactly {agents}, not for {given}")
        joint = np.full((1, self.game.num_players), STAY, np.int64)
        for agent, action in actions.items():
            seat = self.possible_agents.index(agent)
            joint[0, seat] = as_actions([[action] * self.game.num_players], 1, self.game)[0, 0]
            if self.game.config.strict and not self._legal[seat, joint[0, seat]]:
                raise ValueError(illegal_message(self.spec, seat, joint[0, seat], self._legal[seat]))
        self.before = self.state_row
        self.game.simulate(self.out.states, joint, self.out)
        self.returns += self.out.reward[0]
        self.taken[:] = self.out.taken[0]
        for seat in np.flatnonzero(self.taken):
            self.took[seat, self.taken[seat] - 1] += 1

        acted = self.agents
        seats = {agent: self.possible_agents.index(agent) for agent in acted}
        rewards = {agent: float(self.out.reward[0, seat]) for agent, seat in seats.items()}
        terminated = {agent: bool(self.out.terminated[0, seat]) for agent, seat in seats.items()}
        truncated = {agent: bool(self.out.truncated[0, seat]) for agent, seat in seats.items()}
        infos: dict[str, dict[str, Any]] = {
            agent: {"illegal_actions": int(self.out.illegal[0]), "taken": int(self.taken[seat])}
            for agent, seat in seats.items()
        }
        self.agents = [agent for agent in acted if not (terminated[agent] or truncated[agent])]
        return self._observations(acted), rewards, terminated, truncated, infos

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
