"""Rule-based players for the grid games, batched and compiled.

They see what any player sees (observation planes, legal actions, the step), and break ties at random from a stream of
their own for each env and seat. `random` and `fix` (never touches an item) know every game; each game names its
seekers, who walk the shortest way around blocks to the nearest item of the first kind in their list that is left
(`ns`, `nh`, `nd`); `mix` is one of the game's `mix` drawn anew for each episode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numba import njit

from envs.errors import ConfigError
from envs.grid import (
    BLOCK,
    DOWN,
    FIRST_INTERACTION,
    FREE,
    ITEM,
    LEFT,
    RIGHT,
    STAY,
    UP,
    GridGame,
    flat_planes,
)  # fmt: skip
from envs.rng import below, make_streams

NOBODY, MIX, RANDOM, FIX, SEEKER = range(5)  # codes of roles; SEEKER + k is the game's k-th seeker
# a set of moves is a number with bit a set for move a: how many it has, and which is its k-th
NUM_STEPS = np.array([max(1, bin(steps).count("1")) for steps in range(16)])
NTH_STEP = np.full((16, 4), STAY)
for _steps in range(1, 16):
    _moves = [move for move in range(STAY) if _steps >> move & 1]
    NTH_STEP[_steps, : len(_moves)] = _moves
STREAM_SALT = 7  # keeps the players' random streams apart from those of an env with the same seed


@njit(cache=True, nogil=True, inline="always")
def choose(allowed, num, streams, stream):
    """A uniform choice among the first `num` actions that are allowed (STAY if none is)."""
    count = 0
    for action in range(num):
        count += allowed[action]
    if count == 0:
        return STAY
    pick = 0 if count == 1 else below(streams, stream, count)
    for action in range(num):
        if allowed[action]:
            if pick == 0:
                return action
            pick -= 1
    return STAY


@njit(cache=True, nogil=True, inline="always")
def read_bit(grid, bit, viewer, bits, board, things, count, cells):
    """Note one set bit of a player's planes; returns how many items and blocks were noted so far."""
    cell, plane = bits[bit, 0], bits[bit, 1]
    if plane < grid.num_players:
        player = viewer + plane
        cells[player if player < grid.num_players else player - grid.num_players] = cell
        return count
    board[cell] = BLOCK + plane - grid.num_players
    things[count] = cell
    return count + 1


@njit(cache=True, nogil=True, inline="always")
def read_board(grid, planes, viewer, bits, board, things, cells):
    """What one player sees: board (H*W,) codes as in a state, things the cells that are not free, cells (N,) where
    each player on the board stands; returns how many things. Planes are mostly empty: eight bytes at a time."""
    count, num_words = 0, planes.shape[0] // 8
    words = planes[: 8 * num_words].view(np.uint64)
    for cell in range(board.shape[0]):
        board[cell] = FREE
    for word in range(num_words):
        if words[word] != 0:
            for bit in range(8 * word, 8 * word + 8):
                if planes[bit]:
                    count = read_bit(grid, bit, viewer, bits, board, things, count, cells)
    for bit in range(8 * num_words, planes.shape[0]):
        if planes[bit]:
            count = read_bit(grid, bit, viewer, bits, board, things, count, cells)
    return count


@njit(cache=True, nogil=True, inline="always")
def steps_in_the_open(grid, board, things, code, own):
    """The set of moves (bit a for move a) that begin a shortest way from cell `own` to an item `code`: no blocks."""
    row, column = grid.places[own, 0], grid.places[own, 1]
    nearest, steps = 2 * board.shape[0], 0
    for cell in things:
        down, across = grid.places[cell, 0] - row, grid.places[cell, 1] - column
        away = abs(down) + abs(across) if board[cell] == code else 4 * board.shape[0]
        towards = (down < 0) << UP | (down > 0) << DOWN | (across < 0) << LEFT | (across > 0) << RIGHT
        steps = towards if away < nearest else steps | (towards if away == nearest else 0)
        nearest = min(nearest, away)
    return steps


@njit(cache=True, nogil=True)
def steps_around_blocks(grid, board, things, code, own):
    """The same, walking around blocks: breadth first from all items `code` until `own` is met."""
    distance = np.full(board.shape[0], -1, np.int64)
    queue = np.empty(board.shape[0], np.int64)
    tail = 0
    for cell in things:
        if board[cell] == code:
            distance[cell] = 0
            queue[tail] = cell
            tail += 1
    head = 0
    while head < tail and distance[own] < 0:
        cell = queue[head]
        head += 1
        for action in range(STAY):
            other = grid.neighbours[cell, action]
            if distance[other] < 0 and board[other] != BLOCK:
                distance[other] = distance[cell] + 1
                queue[tail] = other
                tail += 1
    steps = 0
    for action in range(STAY):
        steps |= (distance[grid.neighbours[own, action]] == distance[own] - 1) << action
    return steps


@njit(cache=True, nogil=True, inline="always")
def seek(grid, order, board, things, blocked, own, legal, streams, stream):
    """One action of a seeker on cell `own`: order (K,) kinds to look for (-1: no further kind)."""
    for kind in order:
        if kind < 0:
            break
        if legal[FIRST_INTERACTION + kind]:
            return FIRST_INTERACTION + kind
        present = False
        for cell in things:
            present |= board[cell] == ITEM + kind
        if present:
            if blocked:
                steps = steps_around_blocks(grid, board, things, ITEM + kind, own)
            else:
                steps = steps_in_the_open(grid, board, things, ITEM + kind, own)
            return NTH_STEP[steps, below(streams, stream, NUM_STEPS[steps])]
    return STAY


@njit(cache=True, nogil=True)
def act_rows(grid, roles, mixed, orders, drawn, obs, legal, t, streams, bits, board, things, cells, actions):
    """Fill the columns of `actions` (B, N) whose role is rule-based; obs (B, N, H*W*C), legal (B, N, A), t (B,)."""
    num_players = grid.num_players
    for b in range(actions.shape[0]):
        looked, count, blocked = False, 0, False
        for player in range(num_players):
            role = roles[player]
            if role == NOBODY:
                continue
            stream = b * num_players + player
            if role == MIX:
                if t[b] == 0 or drawn[b, player] == NOBODY:
                    drawn[b, player] = mixed[below(streams, stream, mixed.shape[0])]
                role = drawn[b, player]
            allowed = legal[b, player]
            options = 0
            for action in range(allowed.shape[0]):
                options += allowed[action]
            if options == 1:
                actions[b, player] = STAY  # it left, or can do nothing else
            elif role == RANDOM:
                actions[b, player] = choose(allowed, allowed.shape[0], streams, stream)
            elif role == FIX:
                actions[b, player] = choose(allowed, FIRST_INTERACTION, streams, stream)
            else:
                if not looked:  # everybody on the board sees the same things: read them once
                    count = read_board(grid, obs[b, player], player, bits, board, things, cells)
                    looked, blocked = True, False
                    for k in range(count):
                        blocked |= board[things[k]] == BLOCK
                order = orders[role - SEEKER]
                actions[b, player] = seek(
                    grid, order, board, things[:count], blocked, cells[player], allowed, streams, stream
                )


def names(game: GridGame) -> tuple[str, ...]:
    """The rule-based players that know this game."""
    return ("random", *game.seekers, "fix", "mix")


class RulePlayers:
    """Rule-based players in some seats of a batched env.

    `roles` has one entry per seat: a name, or None for a seat that somebody else plays.
    """

    def __init__(self, game: GridGame, roles: Sequence[str | None], num_envs: int, seed: int):
        if len(roles) != game.num_players:
            raise ConfigError(f"{game.env_id} has {game.num_players} players, but {len(roles)} roles were given")
        seekers = list(game.seekers)
        codes = {None: NOBODY, "mix": MIX, "random": RANDOM, "fix": FIX}
        codes |= {name: SEEKER + k for k, name in enumerate(seekers)}
        for role in roles:
            if role not in codes:
                known = ", ".join(names(game))
                raise ConfigError(f"unknown role '{role}'; the rule-based players of {game.env_id} are {known}")
        self.game, self.roles = game, tuple(roles)
        self.codes = np.array([codes[role] for role in roles], np.int64)
        self.mixed = np.array([codes[name] for name in game.mix], np.int64)
        self.orders = np.full((len(seekers), len(game.kinds)), -1, np.int64)
        for k, name in enumerate(seekers):
            self.orders[k, : len(game.seekers[name])] = game.seekers[name]
        self.drawn = np.full((num_envs, game.num_players), NOBODY, np.int64)  # what `mix` is in the running episode
        self.streams = make_streams(seed, num_envs * game.num_players, STREAM_SALT)
        num_cells = game.config.height * game.config.width
        bits = np.stack(np.divmod(np.arange(num_cells * game.obs_shape[2]), game.obs_shape[2]), axis=1)  # cell, plane
        sizes = (num_cells, num_cells, game.num_players)  # board, things, cells of the players
        self._scratch = (bits, *(np.zeros(size, np.int64) for size in sizes))

    def act(self, obs: np.ndarray, legal: np.ndarray, t: np.ndarray, actions_out: np.ndarray | None = None):
        """obs (B, N, H, W, C), legal (B, N, A), t (B,) -> actions (B, N) int64; other seats' columns are left alone."""
        if legal.shape[0] != len(self.drawn):
            raise ValueError(f"these players were made for {len(self.drawn)} envs, not for {legal.shape[0]}")
        if actions_out is None:
            actions_out = np.full(legal.shape[:2], STAY, np.int64)
        act_rows(
            self.game.grid, self.codes, self.mixed, self.orders, self.drawn, flat_planes(obs), legal, t,
            self.streams, *self._scratch, actions_out,
        )  # fmt: skip
        return actions_out

    def get_state(self) -> dict[str, np.ndarray]:
        return {"drawn": self.drawn.copy(), "streams": self.streams.copy()}

    def set_state(self, saved: dict[str, np.ndarray]) -> None:
        self.drawn[:] = saved["drawn"]
        self.streams = np.array(saved["streams"], np.uint64)


def zoo_policy(name: str, game: Any, seed: int = 0) -> Callable[[dict[str, np.ndarray]], int]:
    """A rule-based player as a policy for the PettingZoo game: observation dict -> action.

    `game` is a GridGame, or anything with one as `.game` (the PettingZoo game, a batched env).
    """
    rules = game if isinstance(game, GridGame) else game.game
    seats = (name, *(None,) * (rules.num_players - 1))
    players = RulePlayers(rules, seats, 1, seed)
    obs = np.zeros((1, rules.num_players, *rules.obs_shape), np.uint8)
    legal = np.zeros((1, rules.num_players, rules.num_actions), np.bool_)
    t = np.zeros(1, np.int32)

    def policy(observation: dict[str, np.ndarray]) -> int:
        obs[0, 0], legal[0, 0], t[0] = observation["observation"], observation["action_mask"], observation["t"].item()
        return int(players.act(obs, legal, t)[0, 0])

    return policy
