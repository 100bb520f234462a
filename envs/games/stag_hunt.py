"""Markov Stag Hunt: a stag takes two hunters who share 10, a hare takes one and pays 1; who hunted leaves the board."""

from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

import numpy as np
from numba import njit

from envs.errors import ConfigError
from envs.grid import (
    DEADLINE,
    FREE,
    GONE,
    PLAYERS,
    UNCOUNTED,
    GridConfig,
    GridGame,
    T,
    begin_step,
    end_step,
    share_rewards,
)

STAG, HARE = 1, 2  # in `taken`: 1 + the kind


@dataclass(frozen=True)
class StagHuntConfig(GridConfig):
    num_stags: int = 1
    """stags on the board at the start"""
    num_hares: int = 4
    """hares on the board at the start"""
    stag_reward: float = 10.0
    """split among the hunters of a stag by their strengths"""
    hare_reward: float = 1.0
    """split equally among the hunters of a hare"""
    hunters_needed: int = 2
    """players that must do STAG on one cell in the same step"""
    player_strength: tuple[float, ...] = ()
    """share of each player in a stag (empty: all equal)"""
    final_time_after_first_hunt: int | None = None
    """the episode ends this many steps after the first successful hunt (None: only at the horizon)"""


class Rules(NamedTuple):
    stag_reward: float
    hare_reward: float
    hunters_needed: int
    strength: np.ndarray  # (N,) float64
    steps_after_hunt: int  # -1: off
    time_reward: float
    prosocial: bool


@njit(cache=True, **UNCOUNTED)
def step_rows(grid, rules, states, actions, next_states, reward, terminated, truncated, taken, illegal):
    num_players = grid.num_players
    board = PLAYERS + num_players
    for b in range(states.shape[0]):
        if not begin_step(
            grid, rules.time_reward, b, states, actions, next_states, reward, terminated, truncated, taken, illegal
        ):
            continue
        state = next_states[b]

        # who hunts with whom: everybody who acts on the same cell hunts the same prey
        hunted = False
        for i in range(num_players):
            if taken[b, i] == 0:
                continue
            cell = state[PLAYERS + i]
            hunters, strength = 0, 0.0
            for j in range(num_players):
                if taken[b, j] != 0 and state[PLAYERS + j] == cell:
                    hunters += 1
                    strength += rules.strength[j]
            if taken[b, i] == HARE:
                reward[b, i] += rules.hare_reward / hunters
                hunted = True
            elif hunters >= rules.hunters_needed:
                reward[b, i] += rules.stag_reward * rules.strength[i] / strength
                hunted = True
            else:
                taken[b, i] = 0  # too few; the others on this cell will find too few as well
        if rules.prosocial:
            share_rewards(grid, state, reward[b])

        # hunters and prey leave
        if hunted:
            for i in range(num_players):
                terminated[b, i] = taken[b, i] != 0
                if taken[b, i] != 0:
                    state[board + state[PLAYERS + i]] = FREE
            for i in range(num_players):
                if taken[b, i] != 0:
                    state[PLAYERS + i] = GONE

        state[T] += 1
        if hunted and rules.steps_after_hunt >= 0 and state[DEADLINE] == grid.horizon:
            state[DEADLINE] = min(grid.horizon, state[T] + rules.steps_after_hunt)
        end_step(grid, state, terminated[b], truncated[b])


class StagHunt(GridGame):
    Config = StagHuntConfig
    settings = {
        "msh-4h1s-4x4": {},
        "msh-4h1s-8x8": {"height": 8, "width": 8},
        "msh-4h2s-4x4": {"num_stags": 2},
        "msh-4h2s-8x8": {"height": 8, "width": 8, "num_stags": 2},
    }
    kinds = ("stag", "hare")
    interactions = ("STAG", "HARE")
    seekers = {"ns": (0, 1), "nh": (1, 0)}
    mix = ("ns", "nh")
    held_out = ("shy", "late", "tft", "copycat", "flip", "picky")
    step_rows = step_rows

    def count_items(self):
        return self.config.num_stags, self.config.num_hares

    def check(self):
        config = self.config
        players, strength = config.num_players, config.player_strength
        if not 1 <= config.hunters_needed <= players:
            raise ConfigError(f"hunters_needed must be from 1 to the {players} players, not {config.hunters_needed}")
        if not isinstance(strength, (tuple, list)) or not all(isinstance(x, Real) for x in strength):
            raise ConfigError(f"player_strength must be a tuple of numbers, not {strength!r}")
        if len(strength) not in (0, players):
            raise ConfigError(f"player_strength needs a number for each of the {players} players, not {strength}")
        if not all(0 < x < float("inf") for x in strength):
            raise ConfigError(f"player_strength must be positive numbers, not {strength}")
        last = config.final_time_after_first_hunt
        if last is not None and (not isinstance(last, int) or isinstance(last, bool) or last < 0):
            raise ConfigError(f"final_time_after_first_hunt must be None or an integer of at least 0, not {last!r}")
        if not np.isfinite([config.stag_reward, config.hare_reward]).all():
            raise ConfigError(f"rewards must be finite, not {config.stag_reward} and {config.hare_reward}")

    def make_rules(self):
        config = self.config
        strength = np.array(config.player_strength or (1.0,) * config.num_players, np.float64)
        last = -1 if config.final_time_after_first_hunt is None else config.final_time_after_first_hunt
        return Rules(
            float(config.stag_reward), float(config.hare_reward), config.hunters_needed, strength, last,
            float(config.time_reward), config.prosocial,
        )  # fmt: skip
