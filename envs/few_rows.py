"""A torch network that a search over few trees asks, a few rows at a time.

A torch operation takes some microseconds, however small it is, and a numpy one not much less. So torch.fx follows the
network's own `forward` once, and writes down what it does as a tape of numbers, which one compiled loop plays on a copy
of its weights. No network is written twice, and nothing is compiled for a new one.

    agent = FewRows(net)                # net(*tensors): log-probabilities, and what else it says
    begin_search(num_trees, agent)      # takes the weights as they are now
    probs, *others = agent(*arrays)     # arrays, too

A new tape must say what torch says. The two are compared again in every sixteenth search, and whenever an attribute of
the network has changed. Torch answers by itself where they differ, where the network does something that is neither in
`VIEWS` nor in `WRITES`, and for many trees.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numba import njit
from torch import fx, nn

from envs.devices import device_of, tensors

FEW = 32  # trees
ROWS = 128  # of a question, at most
TOLERANCE = 1e-5
ADD, SUB, MUL, DIV, WHERE, RELU, TANH, EXP, SPREAD, LINEAR, SUM_ROWS, LOG_SOFTMAX = range(12)
ADDRESS = np.dtype([("at", np.int64), ("step", np.int64)])  # of a number in the first row, and how far to the next row

Arrays = tuple[np.ndarray, ...]


@njit(cache=True, nogil=True)
def play(tape, memory, num_rows):
    """A line of the tape (10,): what to do, where to, how many numbers in a row, from how many, and for up to three
    operands where the first row is and how far it is to the next."""
    for line in range(tape.shape[0]):
        act, to, width, size = tape[line, 0], tape[line, 1], tape[line, 2], tape[line, 3]
        a, a_step, b, b_step, c, c_step = [int(tape[line, k]) for k in range(4, 10)]
        if act == LINEAR:
            rows = np.empty((num_rows, size), memory.dtype)
            for row in range(num_rows):
                rows[row] = memory[a + row * a_step : a + row * a_step + size]
            found = np.dot(rows, memory[b : b + width * size].reshape(width, size).T)
            z = memory[c : c + width]
            for row in range(num_rows):
                y = memory[to + row * width : to + (row + 1) * width]
                for k in range(width):
                    y[k] = found[row, k] + z[k]
            continue
        for row in range(num_rows):
            y = memory[to + row * width : to + (row + 1) * width]
            x = memory[a + row * a_step : a + row * a_step + max(size, width)]
            z = memory[b + row * b_step : b + row * b_step + width]
            if act == ADD:
                for k in range(width):
                    y[k] = x[k] + z[k]
            elif act == SUB:
                for k in range(width):
                    y[k] = x[k] - z[k]
            elif act == MUL:
                for k in range(width):
                    y[k] = x[k] * z[k]
            elif act == DIV:
                for k in range(width):
                    y[k] = x[k] / z[k]
            elif act == WHERE:
                other = memory[c + row * c_step : c + row * c_step + width]
                for k in range(width):
                    y[k] = z[k] if x[k] != 0.0 else other[k]
            elif act == RELU:
                for k in range(width):
                    y[k] = max(x[k], np.float32(0.0))
            elif act == TANH:
                for k in range(width):
                    y[k] = np.tanh(x[k])
            elif act == EXP:
                for k in range(width):
                    y[k] = np.exp(x[k])
            elif act == SPREAD:
                y[:] = x[0]
            elif act == SUM_ROWS:
                y[:] = 0.0
                for j in range(size):
                    z = memory[b + int(x[j]) * width : b + int(x[j]) * width + width]
                    for k in range(width):
                        y[k] += z[k]
            elif act == LOG_SOFTMAX:
                top, total = x[:width].max(), np.float32(0.0)
                for k in range(width):
                    total += np.exp(x[k] - top)
                for k in range(width):
                    y[k] = x[k] - top - np.log(total)


class Tape:
    """What a network does with inputs of these shapes, (R, ...) each. A value is an array of addresses with a single
    row: numpy takes parts of it, turns it and spreads it as it would do with the numbers."""

    def __init__(self, net: nn.Module, shapes: list[tuple[int, ...]]):
        self.lines: list[list[int]] = []
        self.numbers: list[tuple[int, float]] = []
        self.size = 0
        graph, weights = fx.Graph(), weights_of(net)
        nodes = [graph.placeholder(f"given{k}") for k in range(len(shapes) + len(weights))]
        inputs = [self.room((1, *shape[1:])) for shape in shapes]
        values_of_weights = [self.room(weight.shape, 1) for weight in weights]
        node_of = {id(weight): node for weight, node in zip(weights, nodes[len(shapes) :], strict=True)}

        class Tracer(fx.proxy.GraphAppendingTracer):
            def create_arg(self, a):
                return node_of[id(a)] if isinstance(a, torch.Tensor) else super().create_arg(a)

        before, tracer = [{**vars(module)} for module in net.modules()], Tracer(graph)
        with torch.inference_mode():
            answers = ask(net, *(fx.Proxy(node, tracer) for node in nodes[: len(shapes)]))
        if before != [vars(module) for module in net.modules()]:
            raise NotImplementedError("a network that takes notes")
        found: dict[fx.Node, Any] = dict(zip(nodes, [*inputs, *values_of_weights], strict=True))
        for node in list(graph.nodes)[len(nodes) :]:
            given = fx.node.map_arg(node.args, found.__getitem__)
            if node.target in VIEWS:
                found[node] = VIEWS[node.target](*given, **node.kwargs)
            else:
                found[node] = WRITES[node.target](self, *given, **node.kwargs)
        outputs = [found[answer.node] for answer in answers]
        self.tape, self.memory = np.array(self.lines), np.zeros(self.size, np.float32)
        for at, number in self.numbers:
            self.memory[at] = number
        # the same as parts of the memory
        self.inputs, self.outputs, self.weights = (
            [self.part(value) for value in values] for values in (inputs, outputs, values_of_weights)
        )

    def room(self, shape: tuple[int, ...], rows: int = ROWS) -> np.ndarray:
        width = int(np.prod(shape))
        value = np.empty(width, ADDRESS)
        value["at"], value["step"] = self.size + np.arange(width), width if rows > 1 else 0
        self.size += rows * width
        return value.reshape(shape)

    def place(self, value: np.ndarray) -> tuple[int, int]:
        """Where the numbers of the first row are, one after the other, and how far it is to the next row."""
        at, step = value["at"].reshape(-1), value["step"].reshape(-1)
        if len(at) > 1 and (at == at[0]).all():
            return self.place(self.write(SPREAD, value.shape, value.reshape(-1)[:1]))
        if (np.diff(at) != 1).any() or (step != step[0]).any():
            raise NotImplementedError("numbers that are not side by side")
        return int(at[0]), int(step[0])

    def write(self, act: int, shape: tuple[int, ...], *operands: np.ndarray, size: int = 0) -> np.ndarray:
        places = [number for operand in operands for number in self.place(operand)]
        result = self.room(shape)
        to, width = self.place(result)
        self.lines.append([act, to, width, size, *(places + 4 * [0])[:6]])
        return result

    def value(self, operand: Any) -> np.ndarray:
        if isinstance(operand, np.ndarray):
            return operand
        cell = self.room((), 1)
        self.numbers.append((int(cell["at"]), float(operand)))
        return cell

    def each(self, act: int, *operands: Any) -> np.ndarray:
        values = np.broadcast_arrays(*map(self.value, operands))
        return self.write(act, values[0].shape, *values)

    def linear(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
        bias = self.room((len(weight),), 1) if bias is None else bias  # memory is zero at first
        return self.write(LINEAR, (*x.shape[:-1], len(weight)), x, weight, bias, size=x.shape[-1])

    def embedding_bag(self, ids: np.ndarray, table: np.ndarray, **_) -> np.ndarray:
        """Sums; another mode would differ from torch."""
        return self.write(SUM_ROWS, (1, table.shape[1]), ids, table, size=ids.shape[1])

    def log_softmax(self, x: np.ndarray, dim: int, **_) -> np.ndarray:
        """Of all numbers of a row; another `dim` would differ from torch."""
        return self.write(LOG_SOFTMAX, x.shape, x)

    def part(self, value: np.ndarray) -> np.ndarray:
        """The memory where a value is: (ROWS, ...), or like a weight."""
        first, step = self.place(value)
        one = self.memory[first : first + value.size].reshape(value.shape)
        if not step:
            return one
        steps = (step * one.itemsize, *one.strides[1:])
        return np.lib.stride_tricks.as_strided(one, (ROWS, *value.shape[1:]), steps)

    def load(self, weights: list[torch.Tensor]) -> None:
        """Copy the weights as they are now."""
        for part, weight in zip(self.weights, weights, strict=True):
            part[:] = weight.detach().numpy()

    def __call__(self, *arrays: np.ndarray) -> Arrays:
        rows = len(arrays[0])
        for part, array in zip(self.inputs, arrays, strict=True):
            part[:rows] = array
        play(self.tape, self.memory, rows)
        return tuple(part[:rows].copy() for part in self.outputs)


def chunk(x, count, dim=0):
    size, before = -(-x.shape[dim] // count), (slice(None),) * (dim % x.ndim)
    return [x[(*before, slice(first, first + size))] for first in range(0, x.shape[dim], size)]


# functions of torch and names of methods -> the same for addresses, or what to write on the tape
VIEWS: dict[Any, Callable] = {
    operator.getitem: operator.getitem, getattr: lambda x, name: {"T": x.T}[name], "chunk": chunk,
    "flatten": lambda x, first=0: x.reshape(*x.shape[:first], -1),
}  # fmt: skip
ACTS: dict[Any, int] = {
    operator.add: ADD, operator.sub: SUB, operator.mul: MUL, operator.truediv: DIV, torch.where: WHERE,
    torch.relu: RELU, F.relu: RELU, torch.tanh: TANH, torch.exp: EXP, "exp": EXP,
}  # fmt: skip
WRITES: dict[Any, Callable] = {
    F.linear: Tape.linear, F.embedding_bag: Tape.embedding_bag, F.log_softmax: Tape.log_softmax,
    **{what: (lambda tape, *x, act=act, inplace=False: tape.each(act, *x)) for what, act in ACTS.items()},
}  # fmt: skip


def weights_of(net: nn.Module) -> list[torch.Tensor]:
    return [*net.parameters(), *net.buffers()]


def ask(net: nn.Module, *question) -> tuple:
    """Probabilities in the place of the log-probabilities that come first."""
    answer = net(*question)
    log_probs, *others = answer if isinstance(answer, tuple) else (answer,)
    return log_probs.exp(), *others


def agree(some: Arrays, others: Arrays) -> bool:
    return all(
        a.dtype == b.dtype and a.shape == b.shape and np.abs(a - b).max() < TOLERANCE * max(1.0, np.abs(b).max())
        for a, b in zip(some, others, strict=True)
    )


class FewRows:
    """A network, asked by torch or by tape."""

    def __init__(self, net: nn.Module):
        self.net, self.device = net, device_of(net)
        self.possible = self.device.type == "cpu"
        self.tape: Tape | None = None
        self.trusted, self.searches, self.facts = False, 0, []  # type: tuple[bool, int, list]
        self.nothing: Arrays = ()  # the answer to no question

    def begin(self, num_trees: int) -> None:
        self.few, self.trusted = num_trees <= FEW and self.possible, False
        if self.few:
            modules = list(self.net.modules())
            watched = any(module._forward_hooks or module._forward_pre_hooks for module in modules)
            self.few = not watched  # who watches sees every answer
            facts = [fact for module in modules for fact in (type(module).forward, *vars(module).values())]
            same = len(facts) == len(self.facts) and all(map(operator.is_, facts, self.facts))
            if self.few and self.tape is not None and same and self.searches % 16:
                self.tape.load(weights_of(self.net))
                self.trusted = True
            self.facts = facts
            self.searches += 1

    def __call__(self, *arrays: np.ndarray) -> Arrays:
        rows = len(arrays[0])
        few = self.few and 0 < rows <= ROWS
        if few and self.trusted:
            return self.tape(*arrays)  # type: ignore[misc]
        if self.nothing and not rows:
            return self.nothing
        with torch.inference_mode():
            found = ask(self.net, *tensors(self.device, *arrays))
            answers = tuple(x.cpu().contiguous().numpy() for x in found)
        self.nothing = tuple(x[:0] for x in answers)
        if few:
            self.compare(arrays, answers)
        if few and self.trusted:  # compared or not: a run that was stopped and goes on must get the same answers
            return self.tape(*arrays)  # type: ignore[misc]
        return answers

    def compare(self, arrays: Arrays, answers: Arrays) -> None:
        """Let the tape answer the rest of this search if it says of its first question what torch has said."""
        try:
            if self.tape is not None:
                self.tape.load(weights_of(self.net))
                self.trusted = agree(self.tape(*arrays), answers)
            if not self.trusted:
                self.tape = Tape(self.net, [array.shape for array in arrays])
                self.tape.load(weights_of(self.net))
                self.trusted = self.possible = self.few = agree(self.tape(*arrays), answers)
        except Exception:  # whatever a network may do that cannot be followed: torch can
            self.possible = self.few = False


def begin_search(num_trees: int, *nets: FewRows) -> None:
    for net in nets:
        net.begin(num_trees)
