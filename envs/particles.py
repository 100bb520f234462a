"""Particle games of the package mpe2, batched behind the interface of our own games (`mpe-simple-spread`).

Every copy is the package's own PettingZoo ParallelEnv, so this is as slow as Python: a few thousand steps per second.
The game is cooperative, so all players get the mean of the players' rewards. Episode k of row r starts from a seed
drawn from (seed, r, k); as nothing else is random, `get_state()` keeps the actions of the running episodes, and
`set_state()` plays them again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from envs.errors import ConfigError, check_count
from envs.grid import EnvSpec, as_actions, check_saved

IDS = ("mpe-simple-spread",)
ACTIONS = ("stay", "left", "right", "down", "up")


class ParticleEnv:
    """Many copies of simple spread; the arrays that `reset` and `step` return are overwritten by the next step.

    `continuous` takes actions (B, N, 5) of forces in 0..1 instead of (B, N) integers. Nobody ever leaves and everything
    is legal; the time limit is the only end, so every episode ends truncated. A copy (`copy.deepcopy`, pickle) goes on
    from here on its own.
    """

    def __init__(
        self, env_id: str, num_envs: int = 1, seed: int = 0, continuous: bool = False, num_players: int = 3,
        horizon: int = 25,
    ):  # fmt: skip
        if env_id not in IDS:
            raise ConfigError(f"unknown particle game '{env_id}'; the particle games are {', '.join(IDS)}")
        num_envs, horizon = check_count("num_envs", num_envs, 1, 10**6), check_count("horizon", horizon, 1, 30_000)
        num_players = check_count("num_players", num_players, 1, 1000)
        self.num_envs, self.threads, self.seed, self.continuous = num_envs, 1, check_count("seed", seed, 0), continuous
        self.settings = {"N": num_players, "max_cycles": horizon, "continuous_actions": continuous}
        self.games = self._make_games(env_id)
        self.names = tuple(self.games[0].possible_agents)
        size = self.games[0].observation_space(self.names[0]).shape[0]
        self.spec = EnvSpec(
            env_id=env_id, num_players=num_players, num_actions=len(ACTIONS), action_names=ACTIONS, obs_shape=(size,),
            obs_dtype="float32", state_shape=(num_players * size,), horizon=horizon, player_names=self.names,
            plane_names=(), config={"continuous": continuous, "num_players": num_players, "horizon": horizon},
        )  # fmt: skip
        shape = (self.num_envs, num_players)
        self.obs, self.final_obs = np.zeros((*shape, size), np.float32), np.zeros((*shape, size), np.float32)
        self.legal, self.alive = np.ones((*shape, len(ACTIONS)), np.bool_), np.ones(shape, np.bool_)
        self.t, self.episode = np.zeros(num_envs, np.int32), np.zeros(num_envs, np.int64)
        self.reward, self.returns = np.zeros(shape, np.float32), np.zeros(shape)
        self.terminated, self.truncated = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
        played = (*shape, horizon, len(ACTIONS)) if continuous else (*shape, horizon)
        self.played = np.zeros(played, np.float32 if continuous else np.int64)  # actions of the running episodes
        self.info = {
            "done": np.zeros(num_envs, np.bool_), "final_obs": self.final_obs,
            "final_state": self.final_obs.reshape(num_envs, -1), "episode_return": np.zeros(shape),
            "episode_length": np.zeros(num_envs, np.int64), "illegal_actions": np.zeros(num_envs, np.int64),
        }  # fmt: skip
        self.reset()

    def _make_games(self, env_id: str) -> list[Any]:
        try:
            from mpe2 import simple_spread_v3
        except ImportError as error:
            raise ConfigError(f"{env_id} needs the package mpe2: pip install mpe2 (or the extra 'mpe')") from error
        return [simple_spread_v3.parallel_env(**self.settings) for _ in range(self.num_envs)]

    def __getstate__(self) -> dict[str, Any]:
        """For copies: the package's games hold pictures that cannot be copied, so a copy plays the episodes again."""
        return {name: value for name, value in self.__dict__.items() if name != "games"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.games, done = self._make_games(self.spec.env_id), self.info["done"].copy()
        self.info["final_state"] = self.final_obs.reshape(self.num_envs, -1)  # copying made the view its own array
        self.set_state(self.get_state())
        self.info["done"][:] = done

    @property
    def state(self) -> np.ndarray:
        """(B, S): all observations side by side."""
        return self.obs.reshape(self.num_envs, -1)

    def reset(self, seed: int | None = None) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Start every copy anew; with `seed` from the first episode of that seed, else from the next one."""
        if seed is not None:
            self.seed, self.episode[:] = check_count("seed", seed, 0), 0
        for row in range(self.num_envs):
            self._start(row)
        return self.obs, self.info

    def _start(self, row: int) -> None:
        start_seed = int(np.random.SeedSequence((self.seed, row, int(self.episode[row]))).generate_state(1)[0])
        obs, _ = self.games[row].reset(seed=start_seed)
        self.obs[row] = [obs[name] for name in self.names]
        self.t[row], self.returns[row] = 0, 0.0

    def step(self, actions) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """actions (B, N) integers, or (B, N, 5) forces -> obs, reward, terminated, truncated, info."""
        done, shape = self.info["done"], self.played[:, :, 0].shape
        if self.continuous:
            actions = np.asarray(actions, np.float32).clip(0.0, 1.0)
            if actions.shape != shape or np.isnan(actions).any():
                raise ValueError(f"actions must be numbers in 0..1 of shape {shape}, not of shape {actions.shape}")
        else:
            actions = as_actions(actions, self.num_envs, self.spec)
        self.played[np.arange(self.num_envs), :, self.t] = actions
        done[:] = self.truncated[:] = False
        for row in range(self.num_envs):
            self._move(row, actions[row])
            if self.t[row] == self.spec.horizon:
                done[row] = self.truncated[row] = True
                self.final_obs[row] = self.obs[row]
                self.info["episode_return"][row], self.info["episode_length"][row] = self.returns[row], self.t[row]
                self.episode[row] += 1
                self._start(row)
        return self.obs, self.reward, self.terminated, self.truncated, self.info

    def _move(self, row: int, actions: np.ndarray) -> None:
        orders = actions if self.continuous else actions.tolist()
        obs, rewards, *_ = self.games[row].step(dict(zip(self.names, orders, strict=True)))
        self.obs[row] = [obs[name] for name in self.names]
        self.reward[row] = np.mean([rewards[name] for name in self.names])
        self.returns[row] += self.reward[row]
        self.t[row] += 1

    def get_state(self) -> dict[str, np.ndarray]:
        saved: dict[str, np.ndarray] = {"t": self.t, "episode": self.episode, "played": self.played}
        return {name: array.copy() for name, array in saved.items()} | {"seed": np.array(self.seed)}

    def set_state(self, saved: dict[str, Any]) -> None:
        places = self.get_state()
        check_saved(self.spec.env_id, saved, places)
        most = {"t": self.spec.horizon - 1, "played": 1 if self.continuous else len(ACTIONS) - 1}
        for name in places:
            if np.min(saved[name]) < 0 or np.max(saved[name]) > most.get(name, np.inf):
                raise ConfigError(f"saved state does not fit {self.spec.env_id}: {name} has values that cannot be")
        self.seed, self.episode[:], self.played[:] = int(saved["seed"]), saved["episode"], saved["played"]
        self.reset()
        for row in range(self.num_envs):
            for step in range(saved["t"][row]):
                self._move(row, self.played[row, :, step])
        self.info["done"][:] = False

    def close(self) -> None:
        for game in self.games:
            game.close()
