"""One battle as a PettingZoo ParallelEnv, which also answers to SMAC's method names."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

from envs import battles
from envs.battles.core import RECORDED, TICKS_PER_STEP
from envs.battles.env import BattleEnv
from envs.errors import ConfigError
from envs.grid import as_actions

RENDER_MODES = ("rgb_array",)


class BattleParallelEnv(ParallelEnv):
    """A battle for PettingZoo; agents are marine_0, marine_1, ... in the order of the map.

    An observation is {"observation": (obs,) float32, "action_mask": (A,)}. The team wins or loses together, so agents
    that die stay in the game with no-op as their only action until the battle is over. An illegal action raises
    ValueError.
    """

    def __init__(self, env_id: str, render_mode: str | None = None, **overrides: Any):
        if render_mode not in (None, *RENDER_MODES):
            raise ConfigError(f"unknown render_mode '{render_mode}'; valid are {', '.join(RENDER_MODES)}")
        overrides = {"strict": True, **overrides}
        seed = int(np.random.SeedSequence().generate_state(1)[0])
        if env_id.startswith(battles.PACKAGE):
            self.env = battles.make(env_id, seed=seed, auto_reset=False, **overrides)
        else:
            self.env = BattleEnv(env_id, battles.load(env_id), seed=seed, record=True, auto_reset=False, **overrides)
        self.spec, self.render_mode = self.env.spec, render_mode
        self.metadata = {"name": env_id, "render_modes": list(RENDER_MODES), "render_fps": 2, "is_parallelizable": True}
        self.possible_agents = list(self.spec.player_names)
        self.agents: list[str] = []
        self.n_agents, self.n_actions = self.spec.num_players, self.spec.num_actions
        self.episode_limit = self.spec.horizon
        self.observation_spaces = {
            agent: spaces.Dict(
                {
                    "observation": spaces.Box(-1.0, 1.0, self.spec.obs_shape, np.float32),
                    "action_mask": spaces.Box(0, 1, (self.n_actions,), np.int8),
                }
            )
            for agent in self.possible_agents
        }
        self.action_spaces = {agent: spaces.Discrete(self.n_actions) for agent in self.possible_agents}
        self.state_space = spaces.Box(-1.0, 1.0, self.spec.state_shape, np.float32)

    def observation_space(self, agent: str) -> spaces.Dict:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Discrete:
        return self.action_spaces[agent]

    def reset(self, seed: int | None = None, options: dict | None = None):
        self.env.reset(seed)
        self.agents = list(self.possible_agents)
        return self._observations(), self._infos()

    def step(self, actions: dict[str, int]):
        if not self.agents:
            raise RuntimeError("this battle is over (or was never started); call reset() before step()")
        if set(actions) != set(self.agents):
            given = ", ".join(actions) or "nobody"
            raise ValueError(f"actions must be given for exactly {', '.join(self.agents)}, not for {given}")
        joint = as_actions([[actions[agent] for agent in self.possible_agents]], 1, self.spec)
        _, reward, terminated, truncated, _ = self.env.step(joint)
        rewards = dict.fromkeys(self.agents, float(reward[0, 0]))
        terminations = dict.fromkeys(self.agents, bool(terminated[0, 0]))
        truncations = dict.fromkeys(self.agents, bool(truncated[0, 0]))
        observations, infos = self._observations(), self._infos()
        if self.env.info["done"][0]:
            self.agents = []
        return observations, rewards, terminations, truncations, infos

    def _observations(self) -> dict[str, dict[str, np.ndarray]]:
        return {
            agent: {"observation": self.get_obs_agent(k), "action_mask": self.env.legal[0, k].astype(np.int8)}
            for k, agent in enumerate(self.possible_agents)
        }

    def _infos(self) -> dict[str, dict[str, bool]]:
        won = bool(self.env.info["done"][0] and self.env.info["battle_won"][0])
        return {
            agent: {"alive": bool(self.env.alive[0, k]), "battle_won": won}
            for k, agent in enumerate(self.possible_agents)
        }

    def state(self) -> np.ndarray:
        return self.env.state[0].copy()

    # pictures --------------------------------------------------------------------------------------------------------

    def outcome(self) -> str:
        """How the battle ended; empty while it goes on."""
        if not self.env.info["done"][0]:
            return ""
        if self.env.info["battle_won"][0]:
            return "won"
        return "time is up" if self.env.alive[0].any() else "lost"

    def moments(self, every: int = TICKS_PER_STEP) -> list:
        """What pictures of the last step show, one for every so many ticks (of the package: one finished picture)."""
        from envs.battles.render import Moment

        if not isinstance(self.env, BattleEnv):
            return [self.env.picture()]
        t = int(self.env.t[0])
        if t == 0:
            units = self.env.battles.units[0]
            now = np.stack([units[name].astype(np.float64) for name in RECORDED], axis=1)
            return [Moment(now[None], t)]
        ticks = self.env.battles.ticks[0].copy()  # (8, U, columns)
        captions = {TICKS_PER_STEP - 1: self.outcome()}
        return [Moment(ticks[: k + 1], t, captions.get(k, "")) for k in range(every - 1, TICKS_PER_STEP, every)]

    def render(self) -> np.ndarray | None:
        if self.render_mode is None:
            return None
        from envs.battles.render import draw

        moment = self.moments()[-1]
        return draw(self.env, moment) if isinstance(self.env, BattleEnv) else moment

    def close(self) -> None:
        self.env.close()

    # SMAC's names ----------------------------------------------------------------------------------------------------

    def get_obs(self) -> list[np.ndarray]:
        return [self.get_obs_agent(k) for k in range(self.n_agents)]

    def get_obs_agent(self, agent_id: int) -> np.ndarray:
        return self.env.obs[0, agent_id].copy()

    def get_obs_size(self) -> int:
        return self.spec.obs_shape[0]

    def get_state(self) -> np.ndarray:
        return self.state()

    def get_state_size(self) -> int:
        return self.spec.state_shape[0]

    def get_avail_actions(self) -> list[list[int]]:
        return [self.get_avail_agent_actions(k) for k in range(self.n_agents)]

    def get_avail_agent_actions(self, agent_id: int) -> list[int]:
        return self.env.legal[0, agent_id].astype(int).tolist()

    def get_total_actions(self) -> int:
        return self.n_actions

    def get_env_info(self) -> dict[str, int]:
        return {
            "state_shape": self.get_state_size(),
            "obs_shape": self.get_obs_size(),
            "n_actions": self.n_actions,
            "n_agents": self.n_agents,
            "episode_limit": self.episode_limit,
        }
