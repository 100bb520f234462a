"""Rule-based teams, as baselines: `random`, `nearest`, `hold`, `focus`.

They see what a centralised learner sees, the state and the legal actions, and work on any battle env:

    team = make_team("nearest", env, seed=1)
    env.step(team())

random   uniform over legal actions
nearest  the nearest legal target; none: walk towards the mean of the living enemies along the longer axis
hold     the nearest legal target; none: stop
focus    the legal target with the least hp and shield left (equal: the first), so that all shoot at one; none: as
         nearest

A healer of these teams heals the ally in reach that has the smallest part of its hp left, and stops if there is none.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from envs.battles.core import EAST, FIRST_TARGET, HEAL, NO_OP, NORTH, SOUTH, STOP, WEST, Rules
from envs.errors import ConfigError
from envs.rng import below, make_streams

TEAMS = ("random", "nearest", "hold", "focus")
RANDOM, NEAREST, HOLD, FOCUS = range(len(TEAMS))
TEAM_SALT = 7  # keeps a team's random streams apart from those of an env with the same seed


class Layout(NamedTuple):
    """Where things stand in a state vector, and what it gives only as fractions."""

    num_allies: int
    num_enemies: int
    ally_size: int  # features per ally: hp, cooldown, x, y, (shield), (type)
    enemy_size: int  # features per enemy: hp, x, y, (shield), (type)
    ally_shields: int
    enemy_shields: int
    width: float
    height: float
    max_hp: np.ndarray  # (allies + enemies,); where types are drawn, the most that any has
    max_shield: np.ndarray  # (allies + enemies,), the same
    healer: np.ndarray  # (allies,) bool
    type_hp: np.ndarray = np.zeros(0)  # (K,) of the types that are drawn
    type_shield: np.ndarray = np.zeros(0)  # (K,)
    type_heals: np.ndarray = np.zeros(0, bool)  # (K,)


def layout_of(rules: Rules) -> Layout:
    kinds, table = rules.kinds[np.concatenate([rules.allies, rules.enemies])], rules.table
    if len(table):
        kinds["max_hp"], kinds["max_shield"] = table["max_hp"].max(), table["max_shield"].max()
    height, width = rules.walkable.shape
    return Layout(
        num_allies=len(rules.allies),
        num_enemies=len(rules.enemies),
        ally_size=4 + rules.ally_shields + rules.num_types,
        enemy_size=3 + rules.enemy_shields + rules.num_types,
        ally_shields=rules.ally_shields,
        enemy_shields=rules.enemy_shields,
        width=float(width),
        height=float(height),
        max_hp=np.ascontiguousarray(kinds["max_hp"]),
        max_shield=np.ascontiguousarray(kinds["max_shield"]),
        healer=rules.kinds["weapon"][rules.allies] == HEAL,
        type_hp=np.ascontiguousarray(table["max_hp"]),
        type_shield=np.ascontiguousarray(table["max_shield"]),
        type_heals=table["weapon"] == HEAL,
    )


@njit(cache=True, nogil=True)
def base_of(layout, k):
    """Where unit k (allies first) begins in a state vector."""
    if k < layout.num_allies:
        return k * layout.ally_size
    return layout.num_allies * layout.ally_size + (k - layout.num_allies) * layout.enemy_size


@njit(cache=True, nogil=True)
def type_of(layout, state, k):
    """The drawn type of unit k; the fallen show none, and count as the first."""
    num_types, base = layout.type_hp.shape[0], base_of(layout, k)
    base += (layout.ally_size if k < layout.num_allies else layout.enemy_size) - num_types
    for drawn in range(num_types):
        if state[base + drawn] > 0.0:
            return drawn
    return 0


@njit(cache=True, nogil=True)
def whole(layout, state, k):
    """Hp and shield of unit k when it is whole."""
    if layout.type_hp.shape[0] == 0:
        return layout.max_hp[k], layout.max_shield[k]
    drawn = type_of(layout, state, k)
    return layout.type_hp[drawn], layout.type_shield[drawn]


@njit(cache=True, nogil=True)
def is_healer(layout, state, agent):
    return layout.type_heals[type_of(layout, state, agent)] if layout.type_hp.shape[0] else layout.healer[agent]


@njit(cache=True, nogil=True)
def read_unit(layout, state, k):
    """x, y, hp and shield of unit k (allies first) from a state vector."""
    place, shields = (2, layout.ally_shields) if k < layout.num_allies else (1, layout.enemy_shields)
    base, (hp, shield) = base_of(layout, k), whole(layout, state, k)
    x, y = state[base + place] * layout.width, state[base + place + 1] * layout.height
    return x, y, state[base] * hp, state[base + place + 2] * shield if shields else 0.0


@njit(cache=True, nogil=True)
def pick_target(layout, state, legal, agent, weakest):
    """The legal target that is nearest or weakest, as an action; NO_OP if there is none."""
    x, y, _, _ = read_unit(layout, state, agent)
    heals = is_healer(layout, state, agent)
    best, best_score = NO_OP, 0.0
    for action in range(FIRST_TARGET, legal.shape[0]):
        if not legal[action]:
            continue
        other = action - FIRST_TARGET + (0 if heals else layout.num_allies)
        other_x, other_y, hp, shield = read_unit(layout, state, other)
        if heals:
            score = hp / whole(layout, state, other)[0]
        elif weakest:
            score = hp + shield
        else:
            score = (other_x - x) ** 2 + (other_y - y) ** 2
        if best == NO_OP or score < best_score:
            best, best_score = action, score
    return best


@njit(cache=True, nogil=True)
def walk_to_enemies(layout, state, legal, agent):
    """A step towards the mean of the living enemies along the longer axis, or stop where that is blocked."""
    x, y, _, _ = read_unit(layout, state, agent)
    mean_x = mean_y = count = 0.0
    for k in range(layout.num_allies, layout.num_allies + layout.num_enemies):
        enemy_x, enemy_y, hp, _ = read_unit(layout, state, k)
        if hp > 0.0:
            mean_x, mean_y, count = mean_x + enemy_x, mean_y + enemy_y, count + 1.0
    dx, dy = mean_x / max(count, 1.0) - x, mean_y / max(count, 1.0) - y
    if abs(dx) >= abs(dy):
        action = EAST if dx > 0.0 else WEST
    else:
        action = NORTH if dy > 0.0 else SOUTH
    return action if legal[action] else STOP


@njit(cache=True, nogil=True)
def act_rows(layout, team, states, legals, actions, streams):
    """actions (B, N) of a rule-based team."""
    for b in range(states.shape[0]):
        for agent in range(layout.num_allies):
            legal = legals[b, agent]
            if team == RANDOM:
                nth = below(streams, b, legal.sum())
                for action in range(legal.shape[0]):
                    nth -= legal[action]
                    if nth < 0:
                        actions[b, agent] = action
                        break
            elif legal[NO_OP]:
                actions[b, agent] = NO_OP
            else:
                action = pick_target(layout, states[b], legal, agent, team == FOCUS)
                if action == NO_OP:
                    stays = team == HOLD or is_healer(layout, states[b], agent)
                    action = STOP if stays else walk_to_enemies(layout, states[b], legal, agent)
                actions[b, agent] = action


class Team:
    """A rule-based team that plays all battles of a batched env; each row draws from its own random stream."""

    def __init__(self, name: str, env, seed: int = 0):
        if name not in TEAMS:
            raise ConfigError(f"unknown team '{name}'; teams are {', '.join(TEAMS)}")
        self.name, self.env, self.index = name, env, TEAMS.index(name)
        self.streams = make_streams(seed, env.num_envs, TEAM_SALT)
        self.actions = np.zeros((env.num_envs, env.spec.num_players), np.int64)

    def __call__(self) -> np.ndarray:
        """(B, N) actions for the env's current state; overwritten by the next call."""
        act_rows(self.env.layout, self.index, self.env.state, self.env.legal, self.actions, self.streams)
        return self.actions


def make_team(name: str, env, seed: int = 0) -> Team:
    return Team(name, env, seed)
