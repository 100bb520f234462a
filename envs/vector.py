"""The batched envs as a gymnasium VectorEnv, so that gymnasium's vector wrappers and single-agent scripts run on them.

Gymnasium knows one learner per row with one reward. Two ways to make a game of N players one (`per_player`):

    False  a row is a game: observations (N, ...), one action for each player (MultiDiscrete), the mean of the players'
           rewards (a battle: the team's reward); each player's own is in info["player_rewards"]
    True   a row is a player: row g * N + i is player i of game g, with its own observation, action and reward, as for
           parameter sharing; who left stays with zeros, STAY and rewards of 0 until its game is over

The legal actions are in info["action_mask"]. A game that is over starts anew within the same step, which
`metadata["autoreset_mode"]` declares; its last observations are in info["final_obs"], how it went in
info["final_info"]. Gymnasium's observation wrappers refuse that mode. For them there is AutoresetMode.NEXT_STEP: the
last observation is returned as such, and the next step, whatever the action, starts the new game.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces, vector
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

import envs
from envs.errors import ConfigError, check_count
from envs.rng import make_streams

MODES = (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP)


class VectorEnv(vector.VectorEnv):
    """`copy`: what `reset` and `step` return is the caller's to keep. Without it observations, masks and other infos
    are the env's own arrays, which the next step overwrites: a little faster, but no wrapper may write into them.
    Rewards and ends are always new arrays. `env` is the batched env itself, `env.spec` its sizes and names.
    """

    def __init__(
        self, env_id: str, num_envs: int = 1, seed: int = 0, per_player: bool = False, copy: bool = True,
        autoreset_mode: AutoresetMode = AutoresetMode.SAME_STEP, threads: int = 1, **overrides: Any,
    ):  # fmt: skip
        if autoreset_mode not in MODES:
            raise ConfigError(f"autoreset_mode must be one of {', '.join(map(str, MODES))}, not {autoreset_mode!r}")
        self.env = envs.make(env_id, num_envs, seed, threads, **overrides)
        self.env_id, self.per_player, self.copy = env_id, per_player, copy
        game = self.env.spec
        self.num_games, self.num_players = self.env.num_envs, game.num_players
        self.num_envs = self.num_games * (self.num_players if per_player else 1)
        self.metadata = {"autoreset_mode": autoreset_mode, "render_modes": []}
        self.waits = np.zeros(self.num_games, np.bool_)  # NEXT_STEP: over, and its next step starts the new game
        shape = game.obs_shape if per_player else (self.num_players, *game.obs_shape)
        low = 0 if game.obs_dtype == "uint8" else -1
        self.single_observation_space = spaces.Box(low, 1, shape, np.dtype(game.obs_dtype).type)
        if per_player:
            self.single_action_space = spaces.Discrete(game.num_actions)
        else:
            self.single_action_space = spaces.MultiDiscrete([game.num_actions] * self.num_players)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def reset(
        self, *, seed: int | Sequence[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start all games anew: with a seed as `envs.make(seed=...)` does, with one seed for each game each from its
        own (as the PettingZoo game does), else from where the random streams are. Of the options, gymnasium's
        `reset_mask` (num_envs,) bool restricts this to some rows, in whole games; others are ignored.
        """
        mask = self._games_of((options or {}).get("reset_mask"))
        before = self.env.get_state()
        if isinstance(seed, Sequence):
            self._start_streams(seed)
            self.env.reset()
        else:
            super().reset(seed=None if seed is None else check_count("seed", seed, 0))
            self.env.reset(seed)
        self._take_back(~mask, before)
        self.waits &= ~mask
        return self._rows(self.env.obs), self._infos()

    def _games_of(self, reset_mask: np.ndarray | None) -> np.ndarray:
        """(games,) bool: which games a mask of rows means."""
        if reset_mask is None:
            return np.ones(self.num_games, np.bool_)
        mask = np.asarray(reset_mask)
        if mask.shape != (self.num_envs,) or mask.dtype != np.bool_:
            raise ValueError(f"reset_mask must be {self.num_envs} bools, not {mask.dtype} of shape {mask.shape}")
        by_game = mask.reshape(self.num_games, -1)
        if (by_game.any(axis=1) != by_game.all(axis=1)).any():
            raise ValueError("reset_mask must be the same for all players of a game")
        return by_game[:, 0]

    def _start_streams(self, seeds: Sequence[int]) -> None:
        saved = self.env.get_state()
        if "streams" not in saved:
            raise ConfigError(f"{self.env_id} takes one seed, not a list")
        if len(seeds) != self.num_games:
            raise ValueError(f"seeds must be given for {self.num_games} games, not for {len(seeds)}")
        for row, seed in enumerate(seeds):
            saved["streams"][row] = make_streams(check_count("seed", seed, 0), 1)[0]
        self.env.set_state(saved)

    def _take_back(self, games: np.ndarray, before: dict[str, np.ndarray]) -> None:
        """Put these games back to where they were."""
        if games.any():
            now = self.env.get_state()
            for name, array in now.items():
                if np.shape(array)[:1] == games.shape:  # all but settings
                    array[games] = before[name][games]
            self.env.set_state(now)

    def step(self, actions: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        actions = np.asarray(actions)
        if actions.shape != self.action_space.shape:
            raise ValueError(f"actions must have shape {self.action_space.shape}, not {actions.shape}")
        joint, waits = actions.reshape(self.num_games, self.num_players), self.waits
        before = {}
        if waits.any():
            joint, before = np.where(waits[:, None], self.env.legal.argmax(axis=2), joint), self.env.get_state()
        _, reward, _, truncated, info = self.env.step(joint)
        done = info["done"] & ~waits
        infos: dict[str, Any] = {}
        told = [name for name in ("taken", "illegal_actions") if name in info]
        for array in (reward, *(info[name] for name in told)):  # who waits did nothing
            array[waits] = 0
        if self.per_player:
            rewards, out_of_time = reward.astype(np.float64).ravel(), truncated.ravel() & self._rows(done)
        else:
            rewards, out_of_time = reward.mean(axis=1, dtype=np.float64), truncated.any(axis=1) & done
            infos |= self._told("player_rewards", self._rows(reward))
        for name in told:
            infos |= self._told(name, self._rows(info[name]))
        self._take_back(waits, before)
        infos |= self._infos()
        obs, over = self._rows(self.env.obs), self._rows(done)
        if done.any():
            infos |= self._ends(info, over)
        if self.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP:
            obs = np.where(over.reshape(-1, *[1] * (obs.ndim - 1)), self._rows(info["final_obs"]), obs)
            self.waits = done
        return obs, rewards, over & ~out_of_time, out_of_time, infos

    def _rows(self, array: np.ndarray) -> np.ndarray:
        """(games, N, ...) or (games,) -> (rows, ...), as a copy if that was asked for."""
        if self.per_player:
            per_player = array.shape[1:2] == (self.num_players,)
            array = array.reshape(-1, *array.shape[2:]) if per_player else np.repeat(array, self.num_players)
        return array.copy() if self.copy else array

    def _told(self, name: str, values: Any, where: np.ndarray | None = None) -> dict[str, Any]:
        """An entry of an info as gymnasium has them: the values, and which rows have one (all)."""
        return {name: values, f"_{name}": np.ones(self.num_envs, np.bool_) if where is None else where.copy()}

    def _infos(self) -> dict[str, Any]:
        return self._told("action_mask", self._rows(self.env.legal)) | self._told("alive", self._rows(self.env.alive))

    def _ends(self, info: dict[str, np.ndarray], over: np.ndarray) -> dict[str, Any]:
        """How the episodes went that are over, and their last observations where the next ones are shown."""
        ends: dict[str, Any] = {}
        for name in ("episode_return", "episode_length", "battle_won"):
            if name in info:
                ends |= self._told(name, self._rows(info[name]), over)
        told = self._told("final_info", ends, over)
        if self.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP:
            last, seen = np.full(self.num_envs, None, object), self._rows(info["final_obs"])  # gymnasium's form
            for row in np.flatnonzero(over):
                last[row] = seen[row].copy()
            told |= self._told("final_obs", last, over)
        return told

    def close_extras(self, **kwargs: Any) -> None:
        if hasattr(self, "env"):  # older gymnasiums also close what was refused in __init__
            self.env.close()

    def __enter__(self) -> VectorEnv:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"VectorEnv({self.env_id}, num_envs={self.num_envs}, per_player={self.per_player})"
