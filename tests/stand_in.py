"""A device that is none: its tensors hold values on the CPU, but say that they are elsewhere, and refuse whatever a GPU
refuses, and some things that it does silently. To torch it is `meta`, which every build has, so that the whole of
torch's own code (autograd, modules, optimizers) takes it for a device.

    with StandIn() as stand_in:
        net.to(DEVICE)                  # as with any device
        net(torch.zeros(3))             # RuntimeError: tensors on two devices
    stand_in.moves                      # how many tensors went up and down

Refused: operations on tensors of both devices (but for a scalar of the CPU, as torch allows), an index on the other
device (which torch moves silently), a generator of the other device, float64 (as MPS does), numpy() without cpu().
"""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
aten = torch.ops.aten
STRICT = {aten.cat.default, aten.stack.default, aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


class Elsewhere(torch.Tensor):
    """A tensor on the stand-in."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor):
        if held.dtype == torch.float64:
            raise RuntimeError("the device knows no float64")
        places = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        tensor = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=DEVICE, **places)
        tensor.held = held
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return StandIn.current.call(func, args, kwargs or {})


CPUGenerator = torch.Generator


class Generator(CPUGenerator):
    """torch.Generator, also for the stand-in."""

    elsewhere: dict[int, "Generator"] = {}  # those on the stand-in: torch hands over other objects for the same one

    def __new__(cls, device="cpu"):
        generator = super().__new__(cls)
        generator.place = torch.device(device)
        if generator.place == DEVICE:
            cls.elsewhere[generator._cdata] = generator
        return generator

    @property
    def device(self):
        return self.place


class StandIn(TorchDispatchMode):
    current: "StandIn"

    def __init__(self):
        super().__init__()
        self.moves = Counter()
        StandIn.current = self

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.call(func, args, kwargs or {})

    def call(self, func, args, kwargs):
        if torch.is_inference_mode_enabled() and func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        given = tree_leaves((args, kwargs))
        there = [x for x in given if isinstance(x, Elsewhere)]
        here = [x for x in given if isinstance(x, torch.Tensor) and not isinstance(x, Elsewhere)]
        wanted = kwargs.get("device") or (DEVICE if there else None)
        if not there and wanted != DEVICE:
            self.check_generator(given, torch.device("cpu"))
            return func(*args, **kwargs)
        held_args, held_kwargs = tree_map(lambda x: x.held if isinstance(x, Elsewhere) else x, (args, kwargs))
        if "device" in kwargs:
            held_kwargs["device"] = torch.device("cpu")

        if func is aten._to_copy.default or func is aten.copy_.default:  # the ways from one device to another
            moved = func(*held_args, **held_kwargs)
            target = isinstance(args[0], Elsewhere) if func is aten.copy_.default else wanted == DEVICE
            self.moves["up" if target else "down"] += bool(here) if target else 1
            if func is aten.copy_.default:
                return args[0]
            return Elsewhere(moved) if target else moved

        allowed = 0 if func in STRICT else 1  # scalars of the CPU go with tensors of any device
        if any(x.dim() >= allowed for x in here):
            raise RuntimeError(f"{func}: tensors on two devices: {[tuple(x.shape) for x in here]} are on the CPU")
        self.check_generator(given, DEVICE)
        out = tree_map(lambda x: Elsewhere(x) if isinstance(x, torch.Tensor) else x, func(*held_args, **held_kwargs))
        return return_and_correct_aliasing(func, args, kwargs, out)

    def check_generator(self, given, device):
        for x in given:
            if isinstance(x, CPUGenerator) and (x._cdata in Generator.elsewhere) != (device == DEVICE):
                raise RuntimeError(f"a generator of the other device for tensors on {device}")
