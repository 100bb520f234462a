"""Markov Snowdrift: a cleared drift pays 6 to everybody, and those who cleared it share a cost of 4; nobody leaves."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit

from envs.errors import ConfigError
from envs.grid import FREE, PLAYERS, UNCOUNTED, GridConfig, GridGame, T, begin_step, end_step, share_rewards


@dataclass(frozen=True)
class SnowdriftConfig(GridConfig):
    num_drifts: int = 6
    """drifts on the board at the start"""
    drift_reward: float = 6.0
    """what every player gets for each drift cleared"""
    clear_cost: float = 4.0
    """shared by the players who cleared a drift in the same step"""


class Rules(NamedTuple):
    drift_reward: float
    clear_cost: float
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

        for i in range(num_players):
            if taken[b, i] != 0:
                clearers = 0
                for j in range(num_players):
                    clearers += taken[b, j] != 0 and state[PLAYERS + j] == state[PLAYERS + i]
                reward[b, i] -= rules.clear_cost / clearers
        cleared = 0
        for i in range(num_players):
            if taken[b, i] != 0 and state[board + state[PLAYERS + i]] != FREE:
                state[board + state[PLAYERS + i]] = FREE
                cleared += 1
        if cleared > 0:
            for i in range(num_players):
                reward[b, i] += cleared * rules.drift_reward
        if rules.prosocial:
            share_rewards(grid, state, reward[b])

        state[T] += 1
        end_step(grid, state, terminated[b], truncated[b])


class Snowdrift(GridGame):
    Config = SnowdriftConfig
    settings = {
        "msd-4x4": {"horizon": 15},
        "msd-6x6": {"height": 6, "width": 6, "horizon": 25},
        "msd-8x8": {"height": 8, "width": 8, "horizon": 50},
    }
    kinds = ("drift",)
    interactions = ("CLEAR",)
    seekers = {"nd": (0,)}
    mix = ("nd", "fix")
    held_out = ("lazy", "tired")
    step_rows = step_rows

    def count_items(self):
        return (self.config.num_drifts,)

    def check(self):
        if not np.isfinite([self.config.drift_reward, self.config.clear_cost]).all():
            raise ConfigError(f"rewards must be finite, not {self.config.drift_reward} and {self.config.clear_cost}")

    def make_rules(self):
        config = self.config
        return Rules(float(config.drift_reward), float(config.clear_cost), float(config.time_reward), config.prosocial)
