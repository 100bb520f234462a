"""The batched battle env: many battles of one map stepped together, each with its own random stream."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from envs.battles import core
from envs.battles.core import ATTACK_MOVE, FIRST_TARGET, HEAL, HEAL_PER_ENERGY, NO_OP, NOBODY, SHIELD_DELAY, UNIT, Rules
from envs.battles.mapfile import BattleMap
from envs.battles.teams import Layout, layout_of
from envs.errors import ConfigError, check_count, short
from envs.grid import LARGEST, MOST_THREADS, EnvSpec, as_actions, check_memory, check_saved, illegal_message
from envs.rng import make_streams

SAVED = ("streams", "last_actions", "t", "returns")  # beside the units, what a battle goes on from
LONGEST = 1_000_000  # steps of a battle
ROUNDING = 1e-6  # of sums of damage, healing and time


@dataclass(frozen=True)
class BattleConfig:
    """Settings of a battle that are no part of its map."""

    horizon: int = 0
    """steps until truncation (0: the map's own limit)"""
    start_jitter: float = 0.0
    """start positions move by up to this much along both axes, anew in each episode (0: the same start every time)"""
    shuffle: bool = True
    """units act in a fresh random order each tick (off: in unit order, for comparisons)"""
    strict: bool = False
    """raise ValueError on an illegal action instead of treating it as stop"""


def make_config(env_id: str, overrides: dict[str, Any]) -> BattleConfig:
    defaults = dataclasses.asdict(BattleConfig())
    for name, value in overrides.items():
        if name not in defaults:
            raise ConfigError(f"{env_id} has no setting '{name}'; its settings are {', '.join(defaults)}")
        wanted = (int, float) if name == "start_jitter" else type(defaults[name])
        if not isinstance(value, wanted) or isinstance(value, bool) != isinstance(defaults[name], bool):
            kind = type(defaults[name]).__name__
            raise ConfigError(f"setting '{name}' of {env_id} must be {kind}, not {short(value)}")
    config = BattleConfig(**overrides)
    if not 0 <= config.horizon <= LONGEST:
        raise ConfigError(f"horizon must be from 1 to {LONGEST}, or 0 for the map's own limit, not {config.horizon}")
    if not 0.0 <= config.start_jitter <= 100.0:
        raise ConfigError(f"start_jitter must be from 0 to 100, not {short(config.start_jitter)}")
    return config


def numbered(names: list[str]) -> tuple[str, ...]:
    """marine, marine, medivac -> marine_0, marine_1, medivac_0"""
    return tuple(f"{name}_{names[:k].count(name)}" for k, name in enumerate(names))


def make_spec(env_id: str, battle: BattleMap, rules: Rules, config: BattleConfig) -> EnvSpec:
    allies = numbered([unit.name for side, unit in battle.units if side == "ally"])
    enemies = numbered([unit.name for side, unit in battle.units if side == "enemy"])
    heals = (rules.kinds["weapon"][rules.allies] == HEAL).any() or (rules.table["weapon"] == HEAL).any()
    if battle.drawn_types:  # who is who changes from battle to battle
        allies, enemies = (tuple(f"unit_{k}" for k in range(len(names))) for names in (allies, enemies))
    targets = []
    for k in range(rules.num_actions - FIRST_TARGET):
        attack = f"attack enemy {enemies[k]}" if k < len(enemies) else ""
        cure = f"heal ally {allies[k]}" if heals and k < len(allies) else ""
        targets.append(" / ".join(part for part in (attack, cure) if part))
    return EnvSpec(
        env_id=env_id,
        num_players=len(allies),
        num_actions=rules.num_actions,
        action_names=("no-op", "stop", "north", "south", "east", "west", *targets),
        obs_shape=(core.obs_size(rules),),
        obs_dtype="float32",
        state_shape=(core.state_size(rules),),
        horizon=rules.limit,
        player_names=allies,
        plane_names=(),
        config={"map": battle.name, **dataclasses.asdict(config), "horizon": rules.limit},
    )


class BattleEnv:
    """Many battles on one map; the arrays that `reset` and `step` return are overwritten by the next step.

    `state`, `legal`, `alive` and `t` always describe the current observation. A battle is won or lost by the whole
    team: rewards are the team's, and `terminated` and `truncated` are the same for all its players, dead or alive.
    A copy (`copy.deepcopy`, pickle) goes on from here on its own.
    """

    def __init__(
        self,
        env_id: str,
        battle: BattleMap,
        num_envs: int = 1,
        seed: int = 0,
        threads: int = 1,
        record: bool = False,
        auto_reset: bool = True,
        **overrides: Any,
    ):
        self.num_envs = check_count("num_envs", num_envs, 1, LARGEST)
        self.threads = min(check_count("threads", threads, 1, MOST_THREADS), self.num_envs)
        self.battle, self.config = battle, make_config(env_id, overrides)
        if battle.draws_places and self.config.start_jitter:
            raise ConfigError(f"start_jitter is for maps with fixed starts; {env_id} draws them anew in each battle")
        limit = self.config.horizon or battle.limit
        self.rules = core.make_rules(battle, limit, self.config.start_jitter, self.config.shuffle, auto_reset)
        self.spec = make_spec(env_id, battle, self.rules, self.config)
        check_memory(self.num_envs, self.spec)
        self.battles = core.make_battles(self.rules, self.num_envs, record)
        self.obs, self.state, self.legal = self.battles.obs, self.battles.state, self.battles.legal
        self.alive, self.t = self.battles.alive, self.battles.t
        self.info = {
            "done": self.battles.done,
            "final_obs": self.battles.final_obs,
            "final_state": self.battles.final_state,
            "episode_return": self.battles.final_returns,
            "episode_length": self.battles.final_lengths,
            "battle_won": self.battles.won,
            "illegal_actions": self.battles.illegal,
        }
        bounds = np.linspace(0, self.num_envs, self.threads + 1).astype(int).tolist()
        self._chunks = list(pairwise(bounds))
        self._pool = self._make_pool()
        self.reset(check_count("seed", seed, 0))

    def _make_pool(self) -> ThreadPoolExecutor | None:
        return ThreadPoolExecutor(self.threads) if self.threads > 1 else None

    def __getstate__(self) -> dict[str, Any]:
        """For copies: everything but the threads."""
        return {name: value for name, value in self.__dict__.items() if name != "_pool"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._pool = self._make_pool()

    @property
    def layout(self) -> Layout:
        """Where things stand in the state vector, for rule-based teams."""
        if not hasattr(self, "_layout"):
            self._layout = layout_of(self.rules)
        return self._layout

    def kinds(self, row: int = 0) -> np.ndarray:
        """(U,) what the units of a battle are, core.KIND"""
        return self.battles.kinds[row] if len(self.battles.kinds) else self.rules.kinds

    def unit_names(self, row: int = 0) -> list[str]:
        """(U,) the types of a battle's units"""
        if not self.battle.drawn_types:
            return [unit.name for _, unit in self.battle.units]
        return [self.battle.drawn_types[k][0].name for k in self.battles.units["drawn"][row]]

    def reset(self, seed: int | None = None) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Start every battle anew; with `seed` from that seed's random streams, else from where the streams are."""
        if seed is not None:
            self.battles.streams[:] = make_streams(check_count("seed", seed, 0), self.num_envs)
        core.reset_rows(self.rules, self.battles, 0, self.num_envs)
        return self.obs, self.info

    def step(self, actions) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """actions (B, N) integers -> obs, reward, terminated, truncated, info; what is over starts anew by itself."""
        actions = as_actions(actions, self.num_envs, self.spec)
        if self.config.strict:
            self._refuse_illegal(actions)
        if self._pool is None:
            core.step_rows(self.rules, self.battles, actions, 0, self.num_envs)
        else:
            rows = [self._pool.submit(core.step_rows, self.rules, self.battles, actions, *c) for c in self._chunks]
            for part in rows:
                part.result()
        return self.obs, self.battles.reward, self.battles.terminated, self.battles.truncated, self.info

    def _refuse_illegal(self, actions: np.ndarray) -> None:
        allowed = np.take_along_axis(self.legal, actions[:, :, None], axis=2)[:, :, 0]
        if not allowed.all():
            b, player = np.argwhere(~allowed)[0]
            where = f"env {b}: " if self.num_envs > 1 else ""
            raise ValueError(illegal_message(self.spec, player, actions[b, player], self.legal[b, player], where))

    def get_state(self) -> dict[str, np.ndarray]:
        """Everything needed to go on exactly from here, as plain arrays (for checkpoints)."""
        units = {f"unit_{name}": self.battles.units[name].copy() for name in UNIT.names or ()}
        return units | {name: getattr(self.battles, name).copy() for name in SAVED}

    def set_state(self, saved: dict[str, np.ndarray]) -> None:
        """Go on from what `get_state` gave; ConfigError, and nothing changed, if it does not fit."""
        places = {f"unit_{name}": self.battles.units[name] for name in UNIT.names or ()}
        places |= {name: getattr(self.battles, name) for name in SAVED}
        check_saved(self.spec.env_id, saved, places)
        self._check_values(saved)
        for name, place in places.items():
            place[...] = saved[name]
        for b in range(len(self.battles.kinds)):
            core.set_types(self.rules, self.battles, b)
        self.battles.done[:] = False
        core.look_rows(self.rules, self.battles, 0, self.num_envs)

    def _check_values(self, saved: dict[str, np.ndarray]) -> None:
        """Compiled code does not check bounds, so units, targets and actions that cannot be are stopped here."""
        kinds, battle, table = self.rules.kinds, self.battle, self.rules.table
        drawn, most_drawn = np.asarray(saved["unit_drawn"]), max(len(table) - 1, 0)
        if len(table):
            kinds = table[np.clip(drawn, 0, most_drawn)]  # (B, U)
            kinds["ally"] = self.rules.kinds["ally"]
        limits: dict[str, tuple[Any, Any]] = {  # of all units, and per unit
            "unit_x": (-battle.width, 2 * battle.width),  # the edges of a map may be open
            "unit_y": (-battle.height, 2 * battle.height),
            "unit_hp": (0.0, kinds["max_hp"]),
            "unit_shield": (0.0, kinds["max_shield"]),
            "unit_energy": (0.0, kinds["max_energy"]),
            "unit_cooldown": (0.0, kinds["cooldown"]),
            "unit_shield_wait": (0.0, SHIELD_DELAY),
            "unit_heal_left": (0.0, HEAL_PER_ENERGY * kinds["max_energy"]),
            "unit_goal_x": (-2 * battle.width, 3 * battle.width),
            "unit_goal_y": (-2 * battle.height, 3 * battle.height),
            "unit_drawn": (0, most_drawn),
            "unit_order": (NO_OP, np.where(kinds["ally"], FIRST_TARGET, ATTACK_MOVE)),
            "last_actions": (-1, self.spec.num_actions - 1),
            "t": (0, self.rules.limit),
        }
        for name in ("target", "previous_target", "order_target", "firing", "shot"):
            limits[f"unit_{name}"] = (NOBODY, len(self.rules.kinds) - 1)
        for name in ("vx", "vy", "wish_x", "wish_y", "next_vx", "next_vy"):
            limits[f"unit_{name}"] = (-2 * kinds["speed"], 2 * kinds["speed"])  # twice: they are rounded
        for name, (low, high) in limits.items():
            given = np.asarray(saved[name])
            wrong = (given < np.subtract(low, ROUNDING)) | (given > np.add(high, ROUNDING))
            if wrong.any():
                where = tuple(np.argwhere(wrong)[0])
                least, most = (np.broadcast_to(end, given.shape)[where] for end in (low, high))
                raise ConfigError(
                    f"saved state does not fit {self.spec.env_id}: {name} of battle {where[0]} is {given[where]},"
                    f" not from {least} to {most}"
                )
        if ((saved["unit_order"] == FIRST_TARGET) & (saved["unit_order_target"] == NOBODY)).any():
            raise ConfigError(f"saved state does not fit {self.spec.env_id}: an attack is ordered on nobody")

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
