"""What all grid games share: the state row, legal actions, observations, start positions, and the batched env.

A state is one int16 row, so that planners can copy, stack and store states as plain arrays:

    [ t, deadline, cell of player 0 .. N-1, board cell 0 .. H*W-1 ]

`t` is the step; the time limit strikes when t reaches `deadline`. A player's cell is row * width + column, or -1 when
it left. A board cell is FREE, BLOCK or ITEM + k for an item of kind k (a stag, a hare, a drift, ...). Action 5 + k
acts on an item of kind k on the player's own cell. A game adds only its config, its names and `step_rows`
(see docs/adding_a_game.md); everything here works on any such game.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise, repeat
from numbers import Integral, Real
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numba import njit
from numba.core.options import DefaultOptions

from envs.errors import ConfigError, check_count, short
from envs.rng import below, make_streams, unit

UP, DOWN, LEFT, RIGHT, STAY, FIRST_INTERACTION = range(6)
MOVES = ("UP", "DOWN", "LEFT", "RIGHT", "STAY")
T, DEADLINE, PLAYERS = 0, 1, 2  # columns of a state row; the board starts at PLAYERS + num_players
FREE, BLOCK, ITEM = 0, 1, 2  # codes of a board cell
GONE = -1
BOARD_DRAWS = 1000  # redraws of the blocks (or of the start window) before a setting is called impossible
LARGEST = 10**9  # of any number in a config: more than any game needs, and far from overflowing float32 or int64
MOST_THREADS = 1024
MOST_BYTES = 8 * 2**30  # of observations in one batched env


class Grid(NamedTuple):
    """The sizes that compiled functions need."""

    height: int
    width: int
    num_players: int
    num_kinds: int
    horizon: int
    neighbours: np.ndarray  # (H*W, 4) int64: the cell that UP, DOWN, LEFT, RIGHT lead to; the same cell at the edge
    places: np.ndarray  # (H*W, 2) int64: row and column of each cell


def make_grid(height: int, width: int, num_players: int, num_kinds: int, horizon: int) -> Grid:
    cells = np.arange(height * width).reshape(height, width)
    neighbours = np.repeat(cells[:, :, None], 4, axis=2)
    neighbours[1:, :, UP] = cells[:-1]
    neighbours[:-1, :, DOWN] = cells[1:]
    neighbours[:, 1:, LEFT] = cells[:, :-1]
    neighbours[:, :-1, RIGHT] = cells[:, 1:]
    places = np.stack(np.divmod(cells.ravel(), width), axis=1)
    return Grid(height, width, num_players, num_kinds, horizon, neighbours.reshape(-1, 4), places)


# ---------------------------------------------------------------------------------------------------------------------
# compiled rules shared by all grid games
# ---------------------------------------------------------------------------------------------------------------------

# A view of a row (`states[b]`) counts as a reference to its array, and counting is atomic: up to half of the time of a
# loop over rows. What allocates nothing can do without, by a switch of numba's that is not public.
UNCOUNTED: dict[str, bool] = {"nogil": True} | ({"_nrt": False} if hasattr(DefaultOptions, "_nrt") else {})
# What is done for each row is inlined into the loop over rows: a call that passes the grid and a few views costs more
# than the work itself (2.5x in step_rows).
row_helper = njit(cache=True, forceinline=True, **UNCOUNTED)


@row_helper
def copy_row(source, target):
    """target[:] = source; as a loop it compiles to a plain copy, without numba's check for overlapping arrays."""
    for k in range(source.shape[0]):
        target[k] = source[k]


@row_helper
def is_legal(grid, state, player, action):
    """Whether a player on the board may do `action`: moves to free ground, STAY, and acting on its own cell's item."""
    cell = state[PLAYERS + player]
    board = PLAYERS + grid.num_players
    if action < STAY:
        target = grid.neighbours[cell, action]
        return (target != cell) & (state[board + target] != BLOCK)
    return action == STAY or state[board + cell] == ITEM + action - FIRST_INTERACTION


@row_helper
def items_left(grid, state):
    """How many; counting all cells of a view compiles to vector code, faster than looking for the first item."""
    board = state[PLAYERS + grid.num_players :]
    count = 0
    for cell in range(board.shape[0]):
        count += board[cell] >= ITEM
    return count


@row_helper
def players_left(grid, state):
    count = 0
    for player in range(grid.num_players):
        count += state[PLAYERS + player] != GONE
    return count


@row_helper
def is_over(grid, state):
    """An episode is over when time is up, everybody left, or no item is left."""
    return (state[T] >= state[DEADLINE]) | (players_left(grid, state) == 0) | (items_left(grid, state) == 0)


@row_helper
def begin_step(grid, time_reward, b, states, actions, next_states, reward, terminated, truncated, attempts, illegal):
    """The part of row b's step that all games share; returns False if the episode is over, so that nothing happens.

    Clears the outputs, pays `time_reward` to who is on the board, and carries out the moves. attempts[b, i] becomes
    1 + kind where player i acts on an item of its cell, else 0. An illegal action is STAY, and counted. Somebody who
    acts on an item does not move, and moving changes no item, so the order of players cannot matter.
    """
    state = next_states[b]
    copy_row(states[b], state)
    over = is_over(grid, state)
    illegal[b] = 0
    for player in range(grid.num_players):
        reward[b, player] = 0.0
        terminated[b, player] = False
        truncated[b, player] = False
        attempts[b, player] = 0
        if over or state[PLAYERS + player] == GONE:
            continue
        reward[b, player] = time_reward
        action = actions[b, player]
        if not is_legal(grid, state, player, action):
            illegal[b] += 1
        elif action >= FIRST_INTERACTION:
            attempts[b, player] = 1 + action - FIRST_INTERACTION
        elif action != STAY:
            state[PLAYERS + player] = grid.neighbours[state[PLAYERS + player], action]
    return not over


@row_helper
def end_step(grid, state, terminated, truncated):
    """One step later: no item left terminates the players still on the board, time running out truncates them."""
    ended = items_left(grid, state) == 0
    out_of_time = state[T] >= state[DEADLINE] and not ended
    for player in range(grid.num_players):
        if state[PLAYERS + player] != GONE:
            terminated[player] = ended
            truncated[player] = out_of_time


@row_helper
def share_rewards(grid, state, reward):
    """Team reward, called before anybody leaves: everybody on the board gets the mean over all players."""
    total = 0.0
    for player in range(grid.num_players):
        total += reward[player]
    for player in range(grid.num_players):
        reward[player] = total / grid.num_players if state[PLAYERS + player] != GONE else 0.0


@row_helper
def observe_row(grid, state, things, obs):
    """Planes of 0/1 for each player, obs (N, H*W*C): own plane first, then the others in turn, blocks, items.

    Plane p of a cell stands at cell * C + p. Who left sees nothing.
    """
    num_players = grid.num_players
    num_planes = num_players + 1 + grid.num_kinds
    board = state[PLAYERS + num_players :]
    count = 0
    for cell in range(board.shape[0]):
        things[count] = cell * num_planes + num_players + board[cell] - BLOCK
        count += board[cell] != FREE
    for viewer in range(num_players):
        planes = obs[viewer]
        for k in range(planes.shape[0]):
            planes[k] = 0
        if state[PLAYERS + viewer] == GONE:
            continue
        for k in range(count):
            planes[things[k]] = 1
        for player in range(num_players):
            cell = state[PLAYERS + player]
            if cell != GONE:
                plane = player - viewer + (num_players if player < viewer else 0)
                planes[cell * num_planes + plane] = 1


@row_helper
def legal_row(grid, state, legal):
    """legal (N, A): what each player may do; one that left has STAY alone."""
    board = state[PLAYERS + grid.num_players :]
    for player in range(grid.num_players):
        cell, allowed = state[PLAYERS + player], legal[player]
        if cell < 0:  # GONE
            for action in range(allowed.shape[0]):
                allowed[action] = action == STAY
            continue
        for action in range(STAY):
            target = grid.neighbours[cell, action]
            allowed[action] = (target != cell) & (board[target] != BLOCK)
        allowed[STAY] = True
        for kind in range(grid.num_kinds):
            allowed[FIRST_INTERACTION + kind] = board[cell] == ITEM + kind


@njit(cache=True, nogil=True)
def observe_rows(grid, states, obs):
    things = np.empty(grid.height * grid.width, np.uint32)
    for b in range(states.shape[0]):
        observe_row(grid, states[b], things, obs[b])


@njit(cache=True, nogil=True)
def legal_rows(grid, states, legal):
    for b in range(states.shape[0]):
        legal_row(grid, states[b], legal[b])


@njit(cache=True, nogil=True)
def over_rows(grid, states, over):
    for b in range(states.shape[0]):
        over[b] = is_over(grid, states[b])


@njit(cache=True, nogil=True)
def find_fault(states, num_players, num_codes, horizon):
    """The first row of states (B, L) that no game can be in, -1 if there is none."""
    for b in range(states.shape[0]):
        state = states[b]
        board = state[PLAYERS + num_players :]
        fine = (state[T] >= 0) & (state[T] <= horizon) & (state[DEADLINE] >= 0) & (state[DEADLINE] <= horizon)
        for cell in range(board.shape[0]):
            fine &= (board[cell] >= FREE) & (board[cell] < num_codes)
        for player in range(num_players):
            cell = state[PLAYERS + player]
            if cell < 0 or cell >= board.shape[0]:
                fine &= cell == GONE
            else:
                fine &= board[cell] != BLOCK
        if not fine:
            return b
    return -1


@njit(cache=True, nogil=True)
def all_below(actions, num_actions):
    """Whether all of actions (B, N) are in 0..num_actions - 1."""
    fine = True
    for b in range(actions.shape[0]):
        for player in range(actions.shape[1]):
            fine &= (actions[b, player] >= 0) & (actions[b, player] < num_actions)
    return fine


# ---------------------------------------------------------------------------------------------------------------------
# start positions
# ---------------------------------------------------------------------------------------------------------------------


def _all_turns(piece: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The distinct rotations and reflections of a piece, each moved to the corner (0, 0)."""
    turns = set()
    for flip in (False, True):
        cells = [(r, -c) if flip else (r, c) for r, c in piece]
        for _ in range(4):
            cells = [(c, -r) for r, c in cells]
            top, left = min(r for r, _ in cells), min(c for _, c in cells)
            turns.add(tuple(sorted((r - top, c - left) for r, c in cells)))
    return [list(turn) for turn in sorted(turns)]


_PIECES = [
    [(0, 0), (0, 1), (0, 2)],  # line of 3
    [(0, 0), (0, 1), (0, 2), (0, 3)],  # line of 4
    [(0, 0), (0, 1), (1, 0)],  # three cells of a 2x2 square
    [(0, 1), (0, 2), (1, 0), (1, 1)],  # S
    [(0, 0), (1, 0), (2, 0), (2, 1)],  # L
]
_TURNS = [_all_turns(piece) for piece in _PIECES]
# PIECE_CELLS (piece, turn, 4, [row, column]); a piece of 3 repeats its last cell, which marks nothing new
PIECE_CELLS = np.zeros((len(_PIECES), 8, 4, 2), np.int64)
PIECE_TURNS = np.array([len(turns) for turns in _TURNS])
for _p, _turns in enumerate(_TURNS):
    for _k, _cells in enumerate(_turns):
        PIECE_CELLS[_p, _k] = _cells + [_cells[-1]] * (4 - len(_cells))


@njit(cache=True, nogil=True)
def free_cells_connected(grid, state, min_free):
    """Whether the cells that are no block form one region of at least `min_free` cells."""
    board = PLAYERS + grid.num_players
    num_cells = grid.height * grid.width
    seen = np.zeros(num_cells, np.bool_)
    stack = np.empty(num_cells, np.int64)
    num_free, first = 0, -1
    for cell in range(num_cells):
        if state[board + cell] != BLOCK:
            num_free += 1
            first = cell
    if num_free < min_free:
        return False
    seen[first] = True
    stack[0] = first
    top, reached = 1, 1
    while top > 0:
        top -= 1
        here = stack[top]
        for action in range(STAY):
            cell = grid.neighbours[here, action]
            if not seen[cell] and state[board + cell] != BLOCK:
                seen[cell] = True
                stack[top] = cell
                top += 1
                reached += 1
    return reached == num_free


@njit(cache=True, nogil=True)
def place_blocks(grid, pieces, min_free, state, streams, row):
    """Draw `pieces` blocks until the free cells are connected; False if BOARD_DRAWS draws did not suffice."""
    board = PLAYERS + grid.num_players
    for _ in range(BOARD_DRAWS):
        state[board:] = FREE
        fits = True
        for _ in range(pieces):
            piece = below(streams, row, PIECE_CELLS.shape[0])
            cells = PIECE_CELLS[piece, below(streams, row, PIECE_TURNS[piece])]
            down = grid.height - cells[:, 0].max()
            across = grid.width - cells[:, 1].max()
            if down <= 0 or across <= 0:
                fits = False
                break
            top, left = below(streams, row, down), below(streams, row, across)
            for k in range(4):
                state[board + (top + cells[k, 0]) * grid.width + left + cells[k, 1]] = BLOCK
        if fits and free_cells_connected(grid, state, min_free):
            return True
    return False


@njit(cache=True, nogil=True)
def free_in_window(grid, state, top, left, height, width):
    count = 0
    for r in range(top, top + height):
        for c in range(left, left + width):
            count += state[PLAYERS + grid.num_players + r * grid.width + c] == FREE
    return count


@njit(cache=True, nogil=True)
def draw_start(grid, item_counts, block_pieces, window, window_prob, state, streams, row):
    """A new episode in `state`: blocks, then items on distinct free cells, then players on cells without a block.

    With probability `window_prob` items and players all start inside a random window x window square.
    Returns False if no board was found (a setting that cannot work).
    """
    board = PLAYERS + grid.num_players
    num_items = item_counts.sum()
    state[T] = 0
    state[DEADLINE] = grid.horizon
    if block_pieces > 0:
        if not place_blocks(grid, block_pieces, max(num_items, 1), state, streams, row):
            return False
    else:
        state[board:] = FREE

    top, left, height, width = 0, 0, grid.height, grid.width
    if window_prob > 0.0 and unit(streams, row) < window_prob:
        for _ in range(BOARD_DRAWS):
            top = below(streams, row, grid.height - window + 1)
            left = below(streams, row, grid.width - window + 1)
            height, width = window, window
            if block_pieces == 0 or free_in_window(grid, state, top, left, height, width) >= max(num_items, 1):
                break
        else:
            return False

    for kind in range(grid.num_kinds):
        for _ in range(item_counts[kind]):
            cell = -1
            while cell < 0 or state[board + cell] != FREE:
                cell = (top + below(streams, row, height)) * grid.width + left + below(streams, row, width)
            state[board + cell] = ITEM + kind
    for player in range(grid.num_players):
        cell = -1
        while cell < 0 or state[board + cell] == BLOCK:
            cell = (top + below(streams, row, height)) * grid.width + left + below(streams, row, width)
        state[PLAYERS + player] = cell
    return True


@njit(cache=True, nogil=True)
def start_rows(grid, item_counts, block_pieces, window, window_prob, states, streams):
    """Draw a new episode for every row; returns how many rows found no board."""
    failed = 0
    for b in range(states.shape[0]):
        if not draw_start(grid, item_counts, block_pieces, window, window_prob, states[b], streams, b):
            failed += 1
    return failed


@njit(cache=True, nogil=True)
def finish_rows(
    grid, item_counts, block_pieces, window, window_prob, states, streams, reward, terminated, truncated,
    returns, done, final_obs, final_returns, final_lengths, obs, legal, alive, t,
):  # fmt: skip
    """After `step_rows`: add up returns, start anew what is over (keeping its last observation), and look again."""
    failed = 0
    things = np.empty(grid.height * grid.width, np.uint32)
    for b in range(states.shape[0]):
        state = states[b]
        over = True
        for player in range(grid.num_players):
            returns[b, player] += reward[b, player]
            over &= (state[PLAYERS + player] == GONE) | terminated[b, player] | truncated[b, player]
        done[b] = over
        if over:
            observe_row(grid, state, things, final_obs[b])
            final_lengths[b] = state[T]
            for player in range(grid.num_players):
                final_returns[b, player] = returns[b, player]
                returns[b, player] = 0.0
            if not draw_start(grid, item_counts, block_pieces, window, window_prob, state, streams, b):
                failed += 1
        observe_row(grid, state, things, obs[b])
        legal_row(grid, state, legal[b])
        t[b] = state[T]
        for player in range(grid.num_players):
            alive[b, player] = state[PLAYERS + player] != GONE
    return failed


# ---------------------------------------------------------------------------------------------------------------------
# games
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GridConfig:
    """Settings that every grid game has; each game's config adds its own."""

    height: int = 4
    """rows of the board"""
    width: int = 4
    """columns of the board"""
    num_players: int = 4
    """players on the board at the start"""
    horizon: int = 35
    """steps after which the players still on the board are truncated"""
    max_block_comp: int = 0
    """random pieces of blocks (they may overlap), re-drawn until the free cells are connected"""
    time_reward: float = 0.0
    """added to every player on the board in each step"""
    prosocial: bool = False
    """everybody on the board gets the mean over all players of the step's rewards"""
    strict: bool = False
    """raise ValueError on an illegal action instead of treating it as STAY"""
    start_window: int = 0
    """side of the square inside which a windowed episode starts (0: no windowed episodes)"""
    start_window_prob: float = 0.0
    """probability that an episode starts with everything inside a random start_window x start_window square"""


class Transition(NamedTuple):
    """What `simulate` returns, or writes into when given as `out`."""

    states: np.ndarray  # (B, L) int16
    reward: np.ndarray  # (B, N) float32
    terminated: np.ndarray  # (B, N) bool: left the board, or nothing more can happen
    truncated: np.ndarray  # (B, N) bool: still on the board when time ran out
    taken: np.ndarray  # (B, N) int8: 1 + kind of the item taken in this step, 0 nothing
    illegal: np.ndarray  # (B,) int32: illegal actions, treated as STAY


Chunk = tuple[slice, Transition, list[np.ndarray]]  # the rows of one thread, see GridEnv._share_out


@dataclass(frozen=True)
class EnvSpec:
    """What a script must know of an env before it makes networks or checks a checkpoint."""

    env_id: str
    num_players: int
    num_actions: int
    action_names: tuple[str, ...]
    obs_shape: tuple[int, ...]
    obs_dtype: str
    state_shape: tuple[int, ...] | None
    horizon: int
    player_names: tuple[str, ...]
    plane_names: tuple[str, ...]
    config: dict[str, Any]


_POSITIVE = ("height", "width", "num_players", "horizon")
_TYPES = {"int": Integral, "float": Real, "bool": bool}


class GridGame:
    """The rules of one game with one config: pure functions on batches of states. Subclasses define one game."""

    Config: ClassVar[type[GridConfig]]
    settings: ClassVar[dict[str, dict[str, Any]]]  # env id -> what differs from Config's defaults
    kinds: ClassVar[tuple[str, ...]]  # names of the items, in the order of their planes and interactions
    interactions: ClassVar[tuple[str, ...]]  # names of actions 5, 6, ...: one per kind
    seekers: ClassVar[dict[str, tuple[int, ...]]]  # rule-based players: the kinds each walks to, in order
    mix: ClassVar[tuple[str, ...]]  # the players that `mix` draws from for each episode
    held_out: ClassVar[tuple[str, ...]] = ()  # players of envs/players.py that nobody learns from before meeting them
    step_rows: ClassVar[Callable]  # compiled: (grid, rules, states, actions, *Transition)
    registry: ClassVar[dict[str, type[GridGame]]] = {}

    def __init_subclass__(cls) -> None:
        cls.step_rows = staticmethod(cls.step_rows)
        for env_id in cls.settings:
            GridGame.registry[env_id] = cls

    def __init__(self, env_id: str, **overrides: Any):
        self.config = config = self._make_config(env_id, overrides)
        self.env_id = env_id
        self.num_players = config.num_players
        self.action_names = MOVES + self.interactions
        self.num_actions = len(self.action_names)
        self.plane_names = (
            "self", *(f"other {k}" for k in range(1, self.num_players)), "blocks", *(f"{kind}s" for kind in self.kinds)
        )  # fmt: skip
        self.obs_shape = (config.height, config.width, len(self.plane_names))
        self.state_size = PLAYERS + self.num_players + config.height * config.width
        self.grid = make_grid(config.height, config.width, config.num_players, len(self.kinds), config.horizon)
        self.item_counts = np.array(self.count_items(), np.int64)
        self._check_board()
        self.rules = self.make_rules()

    # what a game adds ------------------------------------------------------------------------------------------------

    def count_items(self) -> tuple[int, ...]:
        """How many items of each kind a new board has."""
        raise NotImplementedError

    def make_rules(self) -> NamedTuple:
        """The numbers that the game's `step_rows` needs, as a NamedTuple."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise ConfigError for settings of this game that cannot work."""

    # checks ----------------------------------------------------------------------------------------------------------

    def _make_config(self, env_id: str, overrides: dict[str, Any]) -> GridConfig:
        fields = {field.name: field for field in dataclasses.fields(self.Config)}
        for name, value in overrides.items():
            if name not in fields:
                raise ConfigError(f"{env_id} has no setting '{name}'; its settings are {', '.join(fields)}")
            wanted = getattr(fields[name].type, "__name__", fields[name].type)
            is_bool = isinstance(value, bool)
            if wanted in _TYPES and (not isinstance(value, _TYPES[wanted]) or is_bool != (wanted == "bool")):
                raise ConfigError(f"setting '{name}' of {env_id} must be {wanted}, not {short(value)}")
            values = value if isinstance(value, (tuple, list)) else (value,)
            numbers: list[Any] = [number for number in values if isinstance(number, Real)]
            for number in numbers:
                if LARGEST < abs(number) < math.inf:  # infinite ones: after the game's own checks
                    most = f"from -{LARGEST:g} to {LARGEST:g}"
                    raise ConfigError(f"setting '{name}' of {env_id} must be {most}, not {short(number)}")
        config = self.Config(**{**self.settings[env_id], **overrides})
        for name in _POSITIVE:
            if getattr(config, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(config, name)}")
        if config.horizon > 30_000 or config.height * config.width > 30_000 or config.num_players > 1000:
            raise ConfigError("horizon and the number of cells must be at most 30000, num_players at most 1000")
        return config

    def _check_board(self) -> None:
        config = self.config
        if config.max_block_comp < 0:
            raise ConfigError(f"max_block_comp must be at least 0, not {config.max_block_comp}")
        if (self.item_counts < 0).any():
            counts = self.item_counts.tolist()
            raise ConfigError(f"the numbers of {'s, '.join(self.kinds)}s must be at least 0, not {counts}")
        num_items, num_cells = int(self.item_counts.sum()), config.height * config.width
        if num_items < 1:
            raise ConfigError(f"{self.env_id} needs at least one {' or '.join(self.kinds)} on the board")
        if num_items > num_cells:
            raise ConfigError(f"{num_items} {'s and '.join(self.kinds)}s do not fit on {num_cells} cells")
        if config.max_block_comp > num_cells:
            raise ConfigError(
                f"max_block_comp of {config.max_block_comp} leaves no connected free cells on a"
                f" {config.height}x{config.width} board; it must be at most {num_cells}, one block piece for each cell"
            )
        self.check()
        for name, value in dataclasses.asdict(config).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{name} must be finite, not {value}")
        self.check_window(config.start_window, config.start_window_prob)
        if config.max_block_comp:
            trial = np.zeros((1, self.state_size), np.int16)
            if start_rows(self.grid, self.item_counts, config.max_block_comp, 0, 0.0, trial, make_streams(0, 1)):
                board = f"{config.height}x{config.width} board with {config.max_block_comp} block pieces"
                raise ConfigError(
                    f"no {board} had connected free cells for {num_items} items in {BOARD_DRAWS} draws;"
                    " use fewer blocks or a larger board"
                )

    def check_window(self, window: int, prob: float) -> None:
        """Raise ConfigError for a start window that cannot work."""
        if not 0.0 <= prob <= 1.0:
            raise ConfigError(f"start_window_prob must be between 0 and 1, not {prob}")
        if window < 0:
            raise ConfigError(f"start_window must be at least 0, not {window}")
        if prob > 0.0 or window > 0:
            side, num_items = min(self.config.height, self.config.width), int(self.item_counts.sum())
            if not 1 <= window <= side:
                raise ConfigError(f"start_window must be from 1 to {side} on this board, not {window}")
            if window * window < num_items:
                raise ConfigError(f"a start window of {window}x{window} cannot hold {num_items} items")

    # pure functions on states ----------------------------------------------------------------------------------------

    def spec(self) -> EnvSpec:
        names = tuple(f"player_{i + 1}" for i in range(self.num_players))
        return EnvSpec(
            self.env_id, self.num_players, self.num_actions, self.action_names, self.obs_shape, "uint8",
            (self.state_size,), self.config.horizon, names, self.plane_names, dataclasses.asdict(self.config),
        )  # fmt: skip

    def draw(self, seed: int, num: int) -> np.ndarray:
        """(num, L) fresh start states from the true start distribution."""
        states = np.empty((num, self.state_size), np.int16)
        self.start(states, make_streams(seed, num))
        return states

    def start(self, states: np.ndarray, streams: np.ndarray, window: int = 0, window_prob: float = 0.0) -> None:
        """Draw a new episode into every row of `states`."""
        pieces = self.config.max_block_comp
        check_drawn(start_rows(self.grid, self.item_counts, pieces, window, window_prob, states, streams))

    def transition(self, num: int) -> Transition:
        """Output arrays for `simulate`."""
        shape = (num, self.num_players)
        return Transition(
            states=np.empty((num, self.state_size), np.int16),
            reward=np.empty(shape, np.float32),
            terminated=np.empty(shape, np.bool_),
            truncated=np.empty(shape, np.bool_),
            taken=np.empty(shape, np.int8),
            illegal=np.empty(num, np.int32),
        )

    def check_states(self, states: np.ndarray) -> None:
        """ValueError in one sentence unless `states` (B, L) int16 can occur in a game.

        Compiled code does not check bounds: given an impossible cell it would read and write foreign memory. States
        that compiled code made need no check: `env.step` has none, and planners may say `trusted=True` or call
        `step_rows` itself.
        """
        if not isinstance(states, np.ndarray) or states.dtype != np.int16:
            raise ValueError(f"states must be an int16 array, not {getattr(states, 'dtype', type(states).__name__)}")
        if states.ndim != 2 or states.shape[1] != self.state_size:
            raise ValueError(f"states must have shape (rows, {self.state_size}), not {states.shape}")
        row = find_fault(states, self.num_players, ITEM + len(self.kinds), self.config.horizon)
        if row >= 0:
            raise ValueError(f"state {row} of {len(states)} cannot be: {self._name_fault(states[row])}")

    def _name_fault(self, state: np.ndarray) -> str:
        """What is wrong with a state that `find_fault` found."""
        horizon, codes, board = self.config.horizon, ITEM + len(self.kinds), self.board(state).ravel()
        for name, column in (("t", T), ("deadline", DEADLINE)):
            if not 0 <= state[column] <= horizon:
                return f"{name} is {state[column]}, not from 0 to the horizon {horizon}"
        for cell in np.flatnonzero((board < FREE) | (board >= codes)):
            return f"board cell {cell} holds {board[cell]}, not one of 0..{codes - 1}"
        for player, cell in enumerate(state[PLAYERS : PLAYERS + self.num_players]):
            if not GONE <= cell < board.size:
                return f"player {player + 1} is in cell {cell}, not in one of 0..{board.size - 1} or {GONE} (left)"
        return "a player stands on a block"

    def as_states(self, states: Any, num: int) -> np.ndarray:
        """States from outside, of any integer type, as (num, L) int16; ValueError in one sentence if they cannot be."""
        given, shape = np.asarray(states), (num, self.state_size)
        if given.shape != shape:
            raise ValueError(f"states must have shape {shape}, not {given.shape}")
        if given.dtype.kind not in "iu":
            raise ValueError(f"states must be integers, not {given.dtype}")
        checked = given.astype(np.int16)
        if (checked != given).any():
            raise ValueError(f"states must fit into int16, not hold {given[checked != given][0]}")
        self.check_states(checked)
        return checked

    @staticmethod
    def _fitting(out: np.ndarray | None, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        """`out` if compiled code can write such a result into it; a new array if there is none."""
        if out is None:
            return np.empty(shape, dtype)
        if out.shape != shape or out.dtype != dtype or not out.flags.c_contiguous:
            wanted = f"a contiguous {np.dtype(dtype)} array of shape {shape}"
            raise ValueError(f"out must be {wanted}, not {out.dtype} of shape {out.shape}")
        return out

    def simulate(
        self, states: np.ndarray, actions: np.ndarray, out: Transition | None = None, trusted: bool = False
    ) -> Transition:
        """Step every row of `states` (B, L) int16 by `actions` (B, N) int64, for planners: touches no env.

        A row that is over stays as it is and pays nothing. With `out` nothing is allocated; `out.states` may be
        `states` itself. `trusted`, here and below: the states come from these functions, so they need no check.
        """
        if not trusted:
            self.check_states(states)
        out = self.transition(len(states)) if out is None else out
        same = out.reward.shape == out.terminated.shape == out.truncated.shape == out.taken.shape
        if out.states.shape != states.shape or out.states.dtype != np.int16 or len(out.illegal) != len(states):
            raise ValueError(f"out is for {len(out.states)} states, not for {len(states)} of {self.env_id}")
        if not same or out.reward.shape != (len(states), self.num_players):
            raise ValueError(f"out is for other players than the {self.num_players} of {self.env_id}")
        self.step_rows(self.grid, self.rules, states, as_actions(actions, states.shape[0], self), *out)
        return out

    def observe(self, states: np.ndarray, out: np.ndarray | None = None, trusted: bool = False) -> np.ndarray:
        """(B, N, H, W, planes) uint8 of 0/1, own plane first; a player that left sees nothing."""
        if not trusted:
            self.check_states(states)
        out = self._fitting(out, (len(states), self.num_players, *self.obs_shape), np.uint8)
        observe_rows(self.grid, states, flat_planes(out))
        return out

    def legal(self, states: np.ndarray, out: np.ndarray | None = None, trusted: bool = False) -> np.ndarray:
        """(B, N, A) bool; a player that left has STAY alone."""
        if not trusted:
            self.check_states(states)
        out = self._fitting(out, (len(states), self.num_players, self.num_actions), np.bool_)
        legal_rows(self.grid, states, out)
        return out

    def alive(self, states: np.ndarray) -> np.ndarray:
        """(B, N) bool: on the board."""
        return states[:, PLAYERS : PLAYERS + self.num_players] != GONE

    def over(self, states: np.ndarray, out: np.ndarray | None = None, trusted: bool = False) -> np.ndarray:
        """(B,) bool: the episode has ended."""
        if not trusted:
            self.check_states(states)
        out = self._fitting(out, (len(states),), np.bool_)
        over_rows(self.grid, states, out)
        return out

    def board(self, state: np.ndarray) -> np.ndarray:
        """(H, W) view of one state's board codes."""
        return state[PLAYERS + self.num_players :].reshape(self.config.height, self.config.width)


def flat_planes(obs: np.ndarray) -> np.ndarray:
    """(B, N, H, W, C) -> a view (B, N, H*W*C)."""
    return obs.reshape(*obs.shape[:2], -1)


def check_drawn(failed: int) -> None:
    if failed:
        raise ConfigError(f"no board that fits the settings was found in {BOARD_DRAWS} draws; use fewer blocks")


def as_actions(actions: Any, num_rows: int, game: GridGame | EnvSpec) -> np.ndarray:
    """Check a joint action and return it as contiguous int64 (B, N); ValueError in one sentence if it cannot be one."""
    shape = (num_rows, game.num_players)
    try:
        array = np.asarray(actions)
    except ValueError:
        raise ValueError(f"actions must have shape {shape}, not rows of different lengths") from None
    if array.shape != shape:
        raise ValueError(f"actions must have shape {shape}, not {array.shape}")
    if array.dtype.kind not in "iu":
        raise ValueError(f"actions must be integers, not {array.dtype}")
    checked = np.ascontiguousarray(array, np.int64)
    if not all_below(checked, game.num_actions):
        wrong = array[(array < 0) | (array >= game.num_actions)].flat[0]
        raise ValueError(f"action {wrong} is not one of 0..{game.num_actions - 1} ({', '.join(game.action_names)})")
    return checked


# ---------------------------------------------------------------------------------------------------------------------
# the batched env
# ---------------------------------------------------------------------------------------------------------------------


class GridEnv:
    """Many copies of one game, stepped together, each with its own random stream and automatic reset.

    The arrays that `reset` and `step` return are the env's own and are overwritten by the next step: copy what you
    keep. `legal`, `alive`, `t` and `states` always describe the current observation. A copy (`copy.deepcopy`, pickle)
    goes on from here on its own.
    """

    def __init__(self, game: GridGame, num_envs: int = 1, seed: int = 0, threads: int = 1):
        self.game, self.num_envs = game, check_count("num_envs", num_envs, 1, LARGEST)
        self.threads = min(check_count("threads", threads, 1, MOST_THREADS), self.num_envs)
        self.spec = game.spec()
        check_memory(self.num_envs, self.spec)
        self.start_window, self.start_window_prob = game.config.start_window, game.config.start_window_prob
        shape = (self.num_envs, game.num_players)
        self.out = game.transition(self.num_envs)
        self.states = self.out.states  # (B, L) int16, stepped in place
        self.obs = np.zeros((*shape, *game.obs_shape), np.uint8)
        self.final_obs = np.zeros_like(self.obs)
        self.legal = np.zeros((*shape, game.num_actions), np.bool_)
        self.alive = np.zeros(shape, np.bool_)
        self.t = np.zeros(self.num_envs, np.int32)
        self.returns = np.zeros(shape, np.float64)  # of the running episodes
        self.done = np.zeros(self.num_envs, np.bool_)
        self.final_returns = np.zeros(shape, np.float64)
        self.final_lengths = np.zeros(self.num_envs, np.int64)
        self.streams = np.zeros(self.num_envs, np.uint64)
        self.info = {
            "done": self.done, "final_obs": self.final_obs, "episode_return": self.final_returns,
            "episode_length": self.final_lengths, "illegal_actions": self.out.illegal, "taken": self.out.taken,
        }  # fmt: skip
        self._share_out()
        self.reset(check_count("seed", seed, 0))

    def _share_out(self) -> None:
        """Give each thread its rows: which, their outputs of step_rows, and what finish_rows needs besides."""
        to_finish = (
            self.streams, self.out.reward, self.out.terminated, self.out.truncated, self.returns, self.done,
            flat_planes(self.final_obs), self.final_returns, self.final_lengths, flat_planes(self.obs), self.legal,
            self.alive, self.t,
        )  # fmt: skip
        bounds = np.linspace(0, self.num_envs, self.threads + 1).astype(int)
        self._chunks: list[Chunk] = [
            (slice(low, high), Transition(*(x[low:high] for x in self.out)), [x[low:high] for x in to_finish])
            for low, high in pairwise(bounds)
        ]
        self._pool = ThreadPoolExecutor(self.threads) if self.threads > 1 else None

    def __getstate__(self) -> dict[str, Any]:
        """For copies: without the threads, and without views, which would come back as arrays of their own."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_chunks", "_pool")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._share_out()

    def reset(self, seed: int | None = None) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Start every env anew; with `seed` from that seed's random streams, else from where the streams are."""
        if seed is not None:
            self.streams[:] = make_streams(check_count("seed", seed, 0), self.num_envs)
        self.game.start(self.states, self.streams, self.start_window, self.start_window_prob)
        self._look()
        return self.obs, self.info

    def _look(self) -> None:
        """Bring everything that describes the current states up to date and zero the running returns."""
        self.game.observe(self.states, self.obs, trusted=True)
        self.game.legal(self.states, self.legal, trusted=True)
        self.alive[:] = self.game.alive(self.states)
        self.t[:] = self.states[:, T]
        self.returns[:] = 0.0
        self.done[:] = False

    def step(self, actions) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """actions (B, N) integers -> obs, reward, terminated, truncated, info; what is over starts anew by itself."""
        actions = as_actions(actions, self.num_envs, self.game)
        if self.game.config.strict:
            self._refuse_illegal(actions)
        if self._pool is None:
            failed = self._step_chunk(self._chunks[0], actions)
        else:
            failed = sum(self._pool.map(self._step_chunk, self._chunks, repeat(actions)))
        check_drawn(failed)
        return self.obs, self.out.reward, self.out.terminated, self.out.truncated, self.info

    def _step_chunk(self, chunk: Chunk, actions: np.ndarray) -> int:
        rows, out, to_finish = chunk
        game, states = self.game, out.states
        game.step_rows(game.grid, game.rules, states, actions[rows], *out)
        return finish_rows(
            game.grid, game.item_counts, game.config.max_block_comp, self.start_window, self.start_window_prob,
            states, *to_finish,
        )  # fmt: skip

    def _refuse_illegal(self, actions: np.ndarray) -> None:
        allowed = np.take_along_axis(self.legal, actions[:, :, None], axis=2)[:, :, 0] | ~self.alive
        if not allowed.all():
            b, player = np.argwhere(~allowed)[0]
            legal = self.legal[b, player]
            raise ValueError(illegal_message(self.spec, player, actions[b, player], legal, f"env {b}: "))

    def set_start_window(self, window: int, prob: float) -> None:
        """From the next episode on, start with probability `prob` inside a random window x window square."""
        self.game.check_window(window, prob)
        self.start_window, self.start_window_prob = window, float(prob)

    def set_states(self, states: np.ndarray) -> None:
        """Put given states (B, L) into the envs; running returns begin at 0."""
        self.states[:] = self.game.as_states(states, self.num_envs)
        self._look()

    def get_state(self) -> dict[str, np.ndarray]:
        """Everything needed to go on exactly from here, as arrays (for checkpoints)."""
        saved = {"states": self.states, "streams": self.streams, "returns": self.returns}
        window = np.array([self.start_window, self.start_window_prob])
        return {name: array.copy() for name, array in saved.items()} | {"window": window}

    def set_state(self, saved: dict[str, np.ndarray]) -> None:
        """Go on from what `get_state` gave; ConfigError, and nothing changed, if it does not fit."""
        places = {"states": self.states, "streams": self.streams, "returns": self.returns, "window": np.zeros(2)}
        check_saved(self.spec.env_id, saved, places)
        try:
            states = self.game.as_states(saved["states"], self.num_envs)
        except ValueError as error:
            raise ConfigError(f"saved state does not fit {self.spec.env_id}: {error}") from None
        window, prob = saved["window"]
        self.set_start_window(int(window), float(prob))
        self.set_states(states)
        self.streams[:], self.returns[:] = saved["streams"], saved["returns"]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def check_memory(num_envs: int, spec: EnvSpec) -> None:
    """ConfigError for a batch whose observations alone would fill the machine."""
    size = num_envs * spec.num_players * math.prod(spec.obs_shape) * np.dtype(spec.obs_dtype).itemsize
    if size > MOST_BYTES:
        need, most = -(-size // 2**30), MOST_BYTES // 2**30
        raise ConfigError(f"num_envs {num_envs} of {spec.env_id} needs {need} GB for observations, more than {most}")


def check_saved(env_id: str, saved: dict[str, np.ndarray], places: dict[str, np.ndarray]) -> None:
    """ConfigError unless `saved` has an array for each of `places`, of its shape, integers where it has integers."""
    for name, place in places.items():
        if name not in saved:
            raise ConfigError(f"saved state does not fit {env_id}: {name} is missing")
        given = np.asarray(saved[name])
        if given.shape != place.shape:
            raise ConfigError(f"saved state does not fit {env_id}: {name} has shape {given.shape}, not {place.shape}")
        kinds, wanted = ("iuf", "finite numbers") if place.dtype.kind == "f" else ("iu", "integers")
        if given.dtype.kind not in kinds or not np.isfinite(given).all():
            raise ConfigError(f"saved state does not fit {env_id}: {name} must be {wanted} ({given.dtype} given)")


def illegal_message(spec: EnvSpec, player: int, action: int, legal: np.ndarray, where: str = "") -> str:
    """The sentence for an illegal action: names the player, the action and the legal ones."""
    allowed = ", ".join(spec.action_names[a] for a in np.flatnonzero(legal))
    return f"{where}action {spec.action_names[action]} of {spec.player_names[player]} is illegal; legal are {allowed}"
