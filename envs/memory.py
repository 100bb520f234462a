"""Memories over sequences of different lengths, side by side without padding, with the way back written by hand.

    chunks = Chunks(alive, is_first, length=16)            # of a rollout (T, B, N), cut into chunks of 16 steps
    rows = chunks.view(some).agents                        # of some of the chunks: place, sizes, start, carried
    before = rows.take_memory(starts)                      # what was stored at the beginning of every chunk
    h = GRU(in_size, hidden_size)(rows.take(obs), rows.sizes, before)                      # (R, H) after each row

A sequence is an agent's way through an episode, as far as it lies in one chunk: it begins with the chunk, with stored
memory, or with the episode, with none, and it ends where the agent falls. So nothing is computed of the fallen, and
nothing has to be reset on the way. `sizes` says, step by step, how many sequences still go on; the longest is first.

What does not depend on memory is computed for all steps at once, in the way back the weights' gradient too. A row's
result does not depend on the other rows, down to the last bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from envs.devices import tensors

sigmoid_backward, tanh_backward = torch.ops.aten.sigmoid_backward.grad_input, torch.ops.aten.tanh_backward.grad_input
MIN_ROWS = 4  # products of fewer rows are rounded in another way


class Rows(NamedTuple):
    """Rows (R) of a rollout, step by step of S sequences."""

    place: torch.Tensor  # (R,) where each row is in the flat (T * B * N)
    sizes: list[int]  # sequences that still go on, step by step
    start: torch.Tensor  # (S,) whose memory a sequence begins with, in the flat (T / L * B * N)
    carried: torch.Tensor  # (S, 1) one, or zero for a sequence that begins with an episode

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """x (T, B, N, ...) -> (R, ...)"""
        return x.flatten(0, 2).index_select(0, self.place)

    def put(self, rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """rows (R, ...) in their places among zeros, like (T, B, N, ...)"""
        return torch.zeros_like(like).flatten(0, 2).index_copy_(0, self.place, rows).view_as(like)

    def take_memory(self, x: torch.Tensor) -> torch.Tensor:
        """x (T / L, B, N, H) or (B, N, H), stored at the beginning of every chunk -> (S, H)"""
        return x.flatten(0, -2).index_select(0, self.start) * self.carried

    def put_last(self, memory: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """memory (B, N, H) with those `after` rows (R, H) that are of the last step"""
        number = self.place
        if len(self.sizes) > 1:
            size = memory.shape[0] * memory.shape[1]
            number = number - int(number.max()) // size * size
            after, number = after[number >= 0], number[number >= 0]
        return memory.flatten(0, 1).index_copy(0, number, after).view_as(memory)

    def before(self, x: torch.Tensor) -> torch.Tensor:
        """x (R, ...) one step earlier, for all rows but the first of each sequence; those are the first sizes[0]."""
        steps = x.split(self.sizes)
        return torch.cat([x[:0], *(now[:size] for now, size in zip(steps, self.sizes[1:], strict=False))])


class View(NamedTuple):
    """What the networks compute of a rollout."""

    agents: Rows
    team: Rows  # the same steps, one row for each
    slot: torch.Tensor  # (R,) where each row of the agents is in the flat (rows of the team * N)

    @classmethod
    def of_step(cls, alive: torch.Tensor, is_first: torch.Tensor) -> View:
        """Of one step: alive (1, B, N), is_first (1, B)"""
        games, agents = alive.shape[1:]
        place, game, carried = alive.flatten().nonzero()[:, 0], torch.arange(games, device=alive.device), ~is_first.T
        own = Rows(place, [len(place)], place, carried.index_select(0, place // agents).float())
        return cls(own, Rows(game, [games], game, carried.float()), place)


class Chunks:
    """A rollout cut into chunks of `length` steps, as sequences of its agents and of its teams."""

    def __init__(self, alive: torch.Tensor, is_first: torch.Tensor, length: int):
        self.num_agents, self.num_steps = alive.shape[2], is_first.numel()
        self.agents = Sequences(alive, is_first, length)
        self.team = Sequences(torch.ones_like(is_first)[:, :, None], is_first, length)
        self.number = self.agents.num_chunks

    def view(self, chunks: torch.Tensor | None = None) -> View:
        """Of some chunks, which are numbered as (T / L, B), or of all."""
        agents, team = self.agents.rows(chunks), self.team.rows(chunks)
        row_of = torch.empty(self.num_steps, dtype=torch.long, device=team.place.device)
        row_of[team.place] = torch.arange(len(team.place), device=team.place.device)
        slot = row_of[agents.place // self.num_agents] * self.num_agents + agents.place % self.num_agents
        return View(agents, team, slot)


class Sequences:
    """The sequences of a rollout: `on` (T, B, N) says who is there, is_first (T, B) where an episode begins."""

    def __init__(self, on: torch.Tensor, is_first: torch.Tensor, length: int):
        self.device, (steps, games, agents) = on.device, on.shape
        there = on.cpu().numpy().reshape(steps, -1)  # (T, B * N)
        first = is_first.cpu().numpy().repeat(agents, 1)
        begins = there & (first | (np.arange(steps) % length == 0)[:, None])
        begins[1:] |= there[1:] & ~there[:-1]
        left = there.astype(np.int64)  # steps of the sequence from here on
        for step in range(steps - 2, -1, -1):
            left[step] += there[step] * ~begins[step + 1] * left[step + 1]
        first_step, column = np.nonzero(begins)
        order = np.argsort(-left[first_step, column], kind="stable")
        first_step, column = first_step[order], column[order]
        chunk, self.stride, self.num_chunks = first_step // length, there.shape[1], -(-steps // length) * games
        self.lengths, self.chunk = left[first_step, column], chunk * games + column // agents
        self.first_row, self.start = first_step * self.stride + column, chunk * self.stride + column
        self.carried = ((first_step % length == 0) & ~first[first_step, column]).astype(np.float32)[:, None]

    def rows(self, chunks: torch.Tensor | None = None) -> Rows:
        picked = np.ones(self.num_chunks, bool)
        if chunks is not None:
            picked[:] = False
            picked[chunks.cpu().numpy()] = True
        among = np.flatnonzero(picked[self.chunk])
        lengths, first_row = self.lengths[among], self.first_row[among]
        sizes = np.searchsorted(-lengths, -np.arange(lengths[0]), side="left").tolist() if len(among) else []
        steps = (first_row[:size] + step * self.stride for step, size in enumerate(sizes))
        place = np.concatenate([first_row[:0], *steps])  # there may be nobody
        rows, start, carried = tensors(self.device, place, self.start[among], self.carried[among])
        return Rows(rows, sizes, start, carried)


def steps_of(sizes: list[int], *arrays: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """Arrays (R, ...) step by step."""
    return list(zip(*(torch.split_with_sizes(x, sizes) for x in arrays), strict=True))


def add_product(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """out = y + x weight.T, where a row is rounded in the same way however few there are."""
    rows = x.shape[0]
    if rows < MIN_ROWS:
        x, y = (F.pad(each, (0, 0, 0, MIN_ROWS - rows)) if each.dim() == 2 else each for each in (x, y))
        out.copy_(torch.addmm(y, x, weight.T)[:rows])
    else:
        torch.addmm(y, x, weight.T, out=out)


def one_step_earlier(first: torch.Tensor, after: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """What rows began with, from what sequences began with and what came after each row."""
    return torch.cat([first, *(x[:size] for x, size in zip(after.split(sizes), sizes[1:], strict=False))])


class GRUSteps(torch.autograd.Function):
    """h' = (1 - u) n + u h with r, u = sigmoid(x + h W + b) and n = tanh(x_n + r (h W_n + b_n))."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: list[int], weight, bias, h: torch.Tensor) -> torch.Tensor:
        """x (R, 3 H): r, u, n from the input; h (S, H) -> (R, H)"""
        width, first = h.shape[1], h
        products, gates, new, after = (x.new_empty(len(x), k * width) for k in (3, 2, 1, 1))
        for x_now, products_now, gates_now, new_now, after_now in steps_of(sizes, x, products, gates, new, after):
            h = h[: x_now.shape[0]]
            add_product(bias, h, weight, out=products_now)
            torch.add(x_now[:, : 2 * width], products_now[:, : 2 * width], out=gates_now).sigmoid_()
            reset, update = gates_now.chunk(2, 1)
            torch.addcmul(x_now[:, 2 * width :], reset, products_now[:, 2 * width :], out=new_now).tanh_()
            h = torch.lerp(new_now, h, update, out=after_now)
        ctx.sizes = sizes
        ctx.save_for_backward(weight, first, products, gates, new, after)
        return after

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor):
        weight, first, products, gates, new, after = ctx.saved_tensors
        sizes, width, (reset, update) = ctx.sizes, first.shape[1], gates.chunk(2, 1)
        before = one_step_earlier(first, after, sizes)
        # for h W_n + b_n, r, u and n: first what dh' is multiplied with, then the gradients; those of what comes from
        # memory, the first three, and of what comes from the input, the last three, stand side by side
        found = gradient.new_empty(len(gradient), 4 * width)
        of_product, of_reset, of_update, of_new = found.chunk(4, 1)
        tanh_backward(1 - update, new, grad_input=of_new)
        torch.mul(of_new, reset, out=of_product)
        sigmoid_backward(of_new * products[:, 2 * width :], reset, grad_input=of_reset)
        sigmoid_backward(before - new, update, grad_input=of_update)
        weight, dh, back = weight.roll(width, 0), gradient.clone(), gradient[:0]
        for dh_now, found_now, update_now in reversed(steps_of(sizes, dh, found, update)):
            dh_now[: back.shape[0]] += back
            found_now.unflatten(1, (4, width)).mul_(dh_now[:, None])
            back = torch.addmm(dh_now * update_now, found_now[:, : 3 * width], weight)
        of_memory = found[:, : 3 * width]
        return (
            found[:, width:], None, (of_memory.T @ before).roll(-width, 0), of_memory.sum(0).roll(-width), back
        )  # fmt: skip


class LSTMSteps(torch.autograd.Function):
    """c' = f c + i tanh(x_n + h W_n + b_n) and h' = o tanh(c') with o, i, f = sigmoid(x + h W + b)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: list[int], weight, h: torch.Tensor, c: torch.Tensor):
        """x (R, 4 H): i, f, o, n from the input; h and c (S, H) -> both (R, H)"""
        width, first = h.shape[1], (h, c)
        gates, shown, after_h, after_c = (x.new_empty(len(x), k * width) for k in (4, 1, 1, 1))
        for x_now, gates_now, shown_now, h_now, c_now in steps_of(sizes, x, gates, shown, after_h, after_c):
            h, c = h[: x_now.shape[0]], c[: x_now.shape[0]]
            add_product(x_now, h, weight, out=gates_now)
            gates_now[:, : 3 * width].sigmoid_()
            take, forget, show, new = gates_now.chunk(4, 1)
            new.tanh_()
            c = torch.mul(forget, c, out=c_now).addcmul_(take, new)
            h = torch.mul(show, torch.tanh(c, out=shown_now), out=h_now)
        ctx.sizes = sizes
        ctx.save_for_backward(weight, *first, gates, shown, after_h, after_c)
        ctx.mark_non_differentiable(after_c)
        return after_h, after_c

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor):
        weight, first_h, first_c, gates, shown, after_h, after_c = ctx.saved_tensors
        sizes, (take, forget, show, new) = ctx.sizes, gates.chunk(4, 1)
        before_h, before_c = one_step_earlier(first_h, after_h, sizes), one_step_earlier(first_c, after_c, sizes)
        # for i, f, o and n: first what dc' (for o: dh') is multiplied with, then the gradients
        found, of_c = torch.empty_like(gates), torch.ops.aten.tanh_backward(show, shown)
        of_take, of_forget, of_show, of_new = found.chunk(4, 1)
        sigmoid_backward(new, take, grad_input=of_take)
        sigmoid_backward(before_c, forget, grad_input=of_forget)
        sigmoid_backward(shown, show, grad_input=of_show)
        tanh_backward(take, new, grad_input=of_new)
        dh, back_h, back_c = gradient.clone(), gradient[:0], gradient[:0]
        for dh_now, found_now, of_c_now, forget_now in reversed(steps_of(sizes, dh, found, of_c, forget)):
            dh_now[: back_h.shape[0]] += back_h
            dc_now = dh_now * of_c_now
            dc_now[: back_c.shape[0]] += back_c
            found_now *= torch.cat([dc_now, dc_now, dh_now, dc_now], 1)
            back_h, back_c = found_now @ weight, dc_now * forget_now
        return found, None, found.T @ before_h, back_h, back_c


class Memory(nn.Module):
    """A layer over sequences: x (R, F), sizes, memory before (S, H) -> memory after each row (R, H)."""

    num_gates: int

    def __init__(self, in_size: int, hidden_size: int):
        super().__init__()
        self.hidden_size, width = hidden_size, self.num_gates * hidden_size
        self.from_input, self.from_memory = nn.Linear(in_size, width), nn.Linear(hidden_size, width)


class GRU(Memory):
    num_gates = 3

    def forward(self, x: torch.Tensor, sizes: list[int], h: torch.Tensor) -> torch.Tensor:
        return GRUSteps.apply(self.from_input(x), sizes, self.from_memory.weight, self.from_memory.bias, h)

    def cell(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        """One step of any rows: what `from_input` says (..., 3 H) and memory before (..., H) -> memory after"""
        width, product = h.shape[-1], self.from_memory(h)
        reset, update = torch.sigmoid(x[..., : 2 * width] + product[..., : 2 * width]).chunk(2, -1)
        return torch.lerp(torch.tanh(x[..., 2 * width :] + reset * product[..., 2 * width :]), h, update)


class LSTM(Memory):
    num_gates = 4

    def forward(self, x: torch.Tensor, sizes: list[int], h: torch.Tensor, c: torch.Tensor):
        x = F.linear(x, self.from_input.weight, self.from_input.bias + self.from_memory.bias)
        return LSTMSteps.apply(x, sizes, self.from_memory.weight, h, c)
