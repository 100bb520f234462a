"""What a player of a grid game sees, as the ids of the few things on the board.

Each thing is named by its plane and its place relative to the player's own cell, the player itself by its cell. A sum
of embeddings of these ids is a dense layer on planes centred on the player, at a fraction of its cost. Id 0 is nothing:
rows are filled up with it.

    things = Things(env.game)
    ids = things(env.obs)                             # planes (..., H, W, C) -> (..., most) int32
    ids = things.of_states(env.states, row, viewer)   # the same from states, compiled
    first_layer = sum_of_embeddings(torch.from_numpy(ids), table)
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numba import njit
from torch import nn

from envs.grid import BLOCK, FREE, GONE, PLAYERS, UNCOUNTED, GridGame, row_helper


@row_helper
def list_contents(grid, state, contents):
    """contents[:count] = cell * C + plane of every block and item; returns count."""
    planes, board = grid.num_players + 1 + grid.num_kinds, state[PLAYERS + grid.num_players :]
    count = 0
    for cell in range(board.shape[0]):
        contents[count] = cell * planes + grid.num_players + board[cell] - BLOCK
        count += board[cell] != FREE
    return count


@row_helper
def write_ids(grid, table, state, contents, count, viewer, own, ids):
    """ids (most,) of what `viewer` sees, standing on cell `own`; contents and count are those of `list_contents`."""
    planes = grid.num_players + 1 + grid.num_kinds
    ids[0] = table[own, own * planes]
    for k in range(count):
        ids[1 + k] = table[own, contents[k]]
    seen = 1 + count
    for plane in range(1, grid.num_players):
        player = viewer + plane if viewer + plane < grid.num_players else viewer + plane - grid.num_players
        cell = state[PLAYERS + player]
        if cell != GONE:
            ids[seen] = table[own, cell * planes + plane]
            seen += 1
    for k in range(seen, ids.shape[0]):
        ids[k] = 0


@njit(cache=True, **UNCOUNTED)
def ids_rows(grid, table, states, row, viewer, own, ids, contents):
    """ids[m] of what player viewer[m] sees in states[row[m]], standing on own[m] (-1: where it is)."""
    for m in range(row.shape[0]):
        state = states[row[m]]
        count = list_contents(grid, state, contents)
        cell = own[m] if own[m] >= 0 else state[PLAYERS + viewer[m]]
        write_ids(grid, table, state, contents, count, viewer[m], cell, ids[m])


class Things:
    """Planes or states -> ids, for one game."""

    def __init__(self, game: GridGame):
        height, width, planes = game.obs_shape
        num_cells, places = height * width, (2 * height - 1) * (2 * width - 1)
        rows, columns = np.divmod(np.arange(num_cells), width)
        down = rows[None, :] - rows[:, None] + height - 1  # (own cell, cell)
        across = columns[None, :] - columns[:, None] + width - 1
        ids = 1 + (down * (2 * width - 1) + across)[:, :, None] * planes + np.arange(planes)  # (own cell, cell, plane)
        ids[:, :, 0] = 1 + places * planes + np.arange(num_cells)  # the own plane tells the absolute place
        self.table = ids.reshape(num_cells, -1).astype(np.int32)
        self.game, self.planes, self.horizon = game, planes, game.config.horizon
        self.num_ids = 1 + places * planes + num_cells
        self.most = game.num_players + int(game.item_counts.sum()) + 4 * game.config.max_block_comp

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        """obs (..., H, W, C) of 0/1, own plane first -> ids (..., most) int32"""
        flat = obs.reshape(-1, self.table.shape[1])
        row, bit = np.nonzero(flat)
        own_cell = flat[:, :: self.planes].argmax(1)
        count = np.bincount(row, minlength=len(flat))
        slot = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
        ids = np.zeros((len(flat), self.most), np.int32)
        ids[row, slot] = self.table[own_cell[row], bit]
        return ids.reshape(*obs.shape[:-3], self.most)

    def of_states(
        self, states: np.ndarray, row: np.ndarray, viewer: np.ndarray, own: np.ndarray | None = None
    ) -> np.ndarray:
        """What player viewer[m] (on the board) sees in states[row[m]] -> ids (M, most) int32. With `own` (M,): what it
        would see, standing on that cell."""
        ids = np.empty((len(row), self.most), np.int32)
        own = np.full(len(row), -1) if own is None else own
        ids_rows(self.game.grid, self.table, states, row, viewer, own, ids, self.room())
        return ids

    def room(self) -> np.ndarray:
        """Scratch of `list_contents`, for one board."""
        return np.empty(self.table.shape[0] + 1, np.int64)

    def time(self, t: np.ndarray) -> np.ndarray:
        """Share of the episode that is over; nobody acts at the horizon, so that counts as one step earlier."""
        return (np.minimum(t, self.horizon - 1) / self.horizon).astype(np.float32)


def embedding_table(num_ids: int, size: int, generator: torch.Generator | None = None) -> nn.Parameter:
    """(num_ids, size) an embedding of each id; that of id 0, nothing, is zero, and learning leaves it so."""
    table = torch.randn(num_ids - 1, size, generator=generator) * 0.3
    return nn.Parameter(F.pad(table, (0, 0, 1, 0)))


def sum_of_embeddings(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """ids (R, K), table (num_ids, H) as above -> (R, H). The `padding_idx` of embedding_bag would keep the gradient
    from the zero row, too, but takes a slow path on the CPU."""
    if torch.is_grad_enabled():
        table = F.pad(table[1:], (0, 0, 1, 0))
    return F.embedding_bag(ids, table, mode="sum")


def linear(size_in: int, size_out: int, std: float, generator: torch.Generator) -> nn.Linear:
    """A linear layer with weights of that spread, no bias at first, and a generator of its own."""
    layer = nn.Linear(size_in, size_out)
    nn.init.normal_(layer.weight, std=std, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer


def legal_log_softmax(logits: torch.Tensor, legal: torch.Tensor) -> torch.Tensor:
    """Logits (R, A) -> log-probabilities, of illegal actions so low that they never happen. Taken over columns: on the
    CPU, with few actions, several times as fast as over rows."""
    return F.log_softmax(torch.where(legal, logits, -1e9).T, dim=0).T
