"""One battle at a time: as a PettingZoo ParallelEnv, and with SMAC's own interface for runners in PyMARL's style."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

from envs import battles
from envs.battles.core import RECORDED, TICKS_PER_STEP
from envs.battles.env import BattleEnv
from envs.errors import ConfigError, check_count
from envs.grid import as_actions
from envs.zoo import check_agents, fresh_seed

RENDER_MODES = ("rgb_array",)
TICKS_PER_FRAME = 2  # of a replay


class Battle:
    """What both faces share: a batch of one battle that stops where it is over, SMAC's names, and pictures."""

    def __init__(self, env_id: str, render_mode: str | None = None, **overrides: Any):
        if render_mode not in (None, *RENDER_MODES):
            raise ConfigError(f"unknown render_mode '{render_mode}'; valid are {', '.join(RENDER_MODES)}")
        if env_id.startswith(battles.PACKAGE):
            self.env = battles.make(env_id, auto_reset=False, **overrides)
        else:
            self.env = BattleEnv(env_id, battles.load(env_id), record=True, auto_reset=False, **overrides)
        self.spec, self.render_mode = self.env.spec, render_mode
        self.n_agents, self.n_actions = self.spec.num_players, self.spec.num_actions
        self.episode_limit = self.spec.horizon

    def state(self) -> np.ndarray:
        return self.env.state[0].copy()

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

    def pictures(self, moments: list, team: str = "") -> list[np.ndarray]:
        """Pictures of some moments, through one camera that holds everybody; `team`: a word about who plays."""
        from envs.battles.render import camera, draw

        if not isinstance(self.env, BattleEnv):
            return moments  # the package draws its own
        view = camera(self.env, moments)
        return [draw(self.env, moment, view, team) for moment in moments]

    def render(self) -> np.ndarray | None:
        if self.render_mode is None:
            return None
        from envs.battles.render import draw

        moment = self.moments()[-1]
        return draw(self.env, moment) if isinstance(self.env, BattleEnv) else moment

    def close(self) -> None:
        self.env.close()


class BattleParallelEnv(Battle, ParallelEnv):
    """A battle for PettingZoo; agents are marine_0, marine_1, ... in the order of the map.

    An observation is {"observation": (obs,) float32, "action_mask": (A,)}; with `flat` it is the vector alone, and the
    mask is in `info["action_mask"]`. The team wins or loses together, so agents that die stay in the game with no-op
    as their only action until the battle is over. An illegal action counts as stop and in `info["illegal_actions"]`;
    with `strict=True` it raises ValueError.
    """

    def __init__(self, env_id: str, render_mode: str | None = None, flat: bool = False, **overrides: Any):
        super().__init__(env_id, render_mode, **overrides)
        self.flat, self.seeded = flat, False  # seeded by the first reset, so that copies of a new env differ
        self.metadata = {"name": env_id, "render_modes": list(RENDER_MODES), "render_fps": 2, "is_parallelizable": True}
        self.possible_agents = list(self.spec.player_names)
        self.agents: list[str] = []
        self.observation_spaces = {agent: self._make_space() for agent in self.possible_agents}
        self.action_spaces = {agent: spaces.Discrete(self.n_actions) for agent in self.possible_agents}
        self.state_space = spaces.Box(-1.0, 1.0, self.spec.state_shape, np.float32)

    def _make_space(self) -> spaces.Space:
        vector = spaces.Box(-1.0, 1.0, self.spec.obs_shape, np.float32)
        mask = spaces.Box(0, 1, (self.n_actions,), np.int8)
        return vector if self.flat else spaces.Dict({"observation": vector, "action_mask": mask})

    def observation_space(self, agent: str) -> spaces.Space:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Discrete:
        return self.action_spaces[agent]

    def reset(self, seed: int | None = None, options: dict | None = None):
        self.env.reset(seed if seed is not None or self.seeded else fresh_seed())
        self.seeded = True
        self.env.info["illegal_actions"][:] = 0
        self.agents = list(self.possible_agents)
        return self._look()

    def step(self, actions: dict[str, int]):
        check_agents(actions, self.agents, "battle")
        joint = as_actions([[actions[agent] for agent in self.possible_agents]], 1, self.spec)
        _, reward, terminated, truncated, _ = self.env.step(joint)
        rewards = dict.fromkeys(self.agents, float(reward[0, 0]))
        terminations = dict.fromkeys(self.agents, bool(terminated[0, 0]))
        truncations = dict.fromkeys(self.agents, bool(truncated[0, 0]))
        observations, infos = self._look()
        if self.env.info["done"][0]:
            self.agents = []
        return observations, rewards, terminations, truncations, infos

    def _look(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """The observations and infos of all agents."""
        observations: dict[str, Any] = {}
        infos: dict[str, dict[str, Any]] = {}
        won = bool(self.env.info["done"][0] and self.env.info["battle_won"][0])
        illegal = int(self.env.info["illegal_actions"][0])
        for k, agent in enumerate(self.possible_agents):
            seen, mask = self.get_obs_agent(k), self.env.legal[0, k].astype(np.int8)
            infos[agent] = {"alive": bool(self.env.alive[0, k]), "battle_won": won, "illegal_actions": illegal}
            observations[agent] = seen if self.flat else {"observation": seen, "action_mask": mask}
            if self.flat:
                infos[agent]["action_mask"] = mask
        return observations, infos


class SmacEnv(Battle):
    """A battle with SMAC's own interface, which runners of the PyMARL family call.

    `step(actions)` takes one action per agent and returns (reward, terminated, info) for the team. `terminated` is also
    True when time ran out; then `info["episode_limit"]` is True, by which such runners tell the one from the other.
    """

    def __init__(
        self, env_id: str, seed: int | None = None, replay_dir: str = "", replay_prefix: str = "", **overrides: Any
    ):
        super().__init__(env_id, **overrides)
        self.replay_dir, self.replay_prefix = replay_dir, replay_prefix
        self.battles_won = self.battles_game = self.timeouts = 0
        self._seed = fresh_seed() if seed is None else check_count("seed", seed, 0)
        self._next_seed: int | None = self._seed  # of the next reset; None: go on with the same random stream
        self._shown: list[Any] = []  # moments of the episode for a replay
        self._over = True

    def seed(self, seed: int | None = None) -> int:
        """The seed of this env; given a number, the next reset starts from that seed."""
        if seed is not None:
            self._seed = self._next_seed = check_count("seed", seed, 0)
        return self._seed

    def reset(self) -> tuple[list[np.ndarray], np.ndarray]:
        """The next battle: (observations of all agents, state)."""
        self.env.reset(self._next_seed)
        self._next_seed, self._over, self._shown = None, False, []
        self._remember()
        return self.get_obs(), self.get_state()

    def step(self, actions: Sequence[Any]) -> tuple[float, bool, dict[str, Any]]:
        """One integer per agent (also of numpy or torch) -> the team's reward, whether the episode is over, info."""
        if self._over:
            raise RuntimeError("this battle is over (or was never started); call reset() before step()")
        joint = as_actions([[int(action) for action in actions]], 1, self.spec)
        _, reward, _, truncated, done = self.env.step(joint)
        self._over = bool(done["done"][0])
        self._remember()
        layout, state = self.env.layout, self.env.state[0]
        enemies = state[layout.num_allies * layout.ally_size :][: layout.num_enemies * layout.enemy_size]
        info: dict[str, Any] = {
            "battle_won": bool(self._over and done["battle_won"][0]),
            "dead_allies": int((~self.env.alive[0]).sum()),
            "dead_enemies": int((enemies[:: layout.enemy_size] <= 0.0).sum()),
            "illegal_actions": int(done["illegal_actions"][0]),
        }
        if self._over:
            self.battles_game += 1
            self.battles_won += info["battle_won"]
            self.timeouts += int(truncated[0, 0])
        if truncated[0, 0]:
            info["episode_limit"] = True
        return float(reward[0, 0]), self._over, info

    def _remember(self) -> None:
        if isinstance(self.env, BattleEnv) or self.replay_dir:  # the package draws pictures at once: only if wanted
            self._shown += self.moments(TICKS_PER_FRAME)

    def get_stats(self) -> dict[str, float]:
        """Counts of the battles so far; `battles_draw` are those that time ended."""
        return {
            "battles_won": self.battles_won,
            "battles_game": self.battles_game,
            "battles_draw": self.timeouts,
            "win_rate": self.battles_won / max(self.battles_game, 1),
            "timeouts": self.timeouts,
            "restarts": 0,
        }

    def save_replay(self, path: str | Path | None = None) -> Path:
        """Write the present episode as a GIF; without `path` into `replay_dir`, named after the map."""
        from envs.render import write_gif

        name = f"{self.replay_prefix or self.spec.config['map']}_{self.battles_game}.gif"
        path = Path(self.replay_dir) / name if path is None else Path(path)
        if not self._shown:
            raise RuntimeError("there is no episode to save; call reset() first (and for SMAClite give a replay_dir)")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_gif(path, self.pictures(self._shown), 16 / TICKS_PER_FRAME)
        return path
