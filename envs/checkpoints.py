"""Checkpoints on the disk: whole or not there, checked when they are read, and turned into arrays and back.

A checkpoint is a folder with weights.safetensors, for `--resume` resume.safetensors, and spec.json, which is written
last and holds the SHA-256 of the others. `last` is replaced by moving folders: at every moment a whole save stands
under `last`, `last.new` or `previous`, however often a process is killed.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import nn

from envs import system
from envs.errors import ConfigError
from envs.rng import pack_generator, unpack_generator

WEIGHTS, RESUME, SPEC = "weights.safetensors", "resume.safetensors", "spec.json"

Tensors = dict[str, torch.Tensor]


# files


def plain(value: Any) -> Any:
    """The same as JSON knows it: no NaN, no infinity, no arrays."""
    if isinstance(value, dict):
        return {str(key): plain(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(x) for x in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file so that it is there whole or not at all."""
    draft = path.with_name(path.name + ".tmp")
    system.write_file(draft, (json.dumps(plain(content), indent=2, allow_nan=False) + "\n").encode())
    system.move(draft, path)


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        reason = "it is missing" if isinstance(error, FileNotFoundError) else (error.strerror or str(error)).lower()
        raise ConfigError(f"'{path}' cannot be read: {reason}") from None


def read_json(path: Path, **types: Any) -> dict[str, Any]:
    """A JSON file that must hold a dict with at least these entries, of these types."""
    content = read_bytes(path)
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        what = "it is empty" if not content.strip() else "it is no JSON"
        raise ConfigError(f"'{path}' is damaged: {what}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"'{path}' is damaged: it must hold a JSON object, not a {type(found).__name__}")
    for name, kind in types.items():
        if name not in found:
            raise ConfigError(f"'{path}' is damaged: it has no '{name}'")
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(found[name], kinds) or (isinstance(found[name], bool) and bool not in kinds):
            wanted = " or ".join("null" if k is type(None) else k.__name__ for k in kinds)
            raise ConfigError(f"'{path}' is damaged: '{name}' must be {wanted}, not {found[name]!r:.80}")
    return found


def read_tensors(path: Path, checksum: Any) -> Tensors:
    """A safetensors file, read as a whole into memory, so that nobody is kept from replacing it."""
    content = read_bytes(path)
    if hashlib.sha256(content).hexdigest() != checksum:
        what = "it is empty" if not content else f"its content is not that which {SPEC} knows"
        raise ConfigError(f"'{path}' is damaged: {what}")
    try:
        return {name: tensor.clone() for name, tensor in load(content).items()}
    except Exception as error:
        raise ConfigError(f"'{path}' is damaged: {one_line(error)}") from None


def to_bytes(tensors: Tensors) -> bytes:
    """The content of a safetensors file; tensors that share memory are written one by one."""
    return save({name: x.detach().cpu().clone(memory_format=torch.contiguous_format) for name, x in tensors.items()})


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


# whole checkpoints


def refuse_non_finite(tensors: Tensors, where: str, error: type[Exception]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise error(f"{where} '{name}' has values that are no numbers (NaN or infinity)")


def write_checkpoint(target: Path, weights: Tensors, resume: Tensors | None, spec: dict, keep: str = "") -> None:
    """Replace a checkpoint. The one before becomes the folder `keep` beside it, or goes.

    Nothing is removed before the new one stands whole under `target.new`; `repair` knows the gap between the moves.
    """
    refuse_non_finite(weights, "the weights", FloatingPointError)
    if not target.parent.is_dir():
        system.make_folder(target.parent)
    draft = target.with_name(target.name + ".new")
    system.remove(draft)
    system.make_folder(draft)
    write_files(draft, {WEIGHTS: weights} if resume is None else {WEIGHTS: weights, RESUME: resume}, spec)
    system.sync_folder(draft)

    if target.exists():
        kept = target.with_name(keep) if keep else free_name(target)
        if kept.exists():
            system.move(kept, free_name(kept))
        system.move(target, kept)
    system.move(draft, target)
    remove_old(target.parent)


def write_files(folder: Path, files: dict[str, Tensors], spec: dict[str, Any]) -> None:
    """The files of a checkpoint and, last, its spec with the checksums of all of them."""
    sums = {}
    for name, tensors in files.items():
        content = to_bytes(tensors)
        system.write_file(folder / name, content)
        sums[name] = hashlib.sha256(content).hexdigest()
    spec = plain(spec)
    write_json(folder / SPEC, spec | {"sha256": sums | {SPEC: digest_of(spec)}})


def remove_old(folder: Path) -> None:
    """Remove what was replaced."""
    for old in sorted(folder.glob("*.old*")):
        try:
            system.remove(old)
        except OSError:
            pass  # somebody reads it: the next save tries again


def digest_of(spec: dict[str, Any]) -> str:
    """A checksum of what a spec says, however it is laid out."""
    said = {name: value for name, value in spec.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def free_name(path: Path) -> Path:
    """Where a folder waits to be removed: path.old, or path.old2, ... if one could not be removed."""
    names = (path.with_name(f"{path.name}.old{number or ''}") for number in range(1000))
    return next(name for name in names if not name.exists())


def read_spec(folder: Path, resume: bool = False) -> dict[str, Any]:
    """The spec of a checkpoint: all that every one has, of the right types and as it was written."""
    types: dict[str, Any] = {"script": str, "code_version": str, "env_id": str, "obs_shape": list, "num_actions": int}
    types |= {"args": dict, "learners": list, "global_step": int, "sha256": dict}
    if resume:
        types |= {"iteration": int, "wall_time": (int, float), "next_eval": int, "best": (list, type(None))}
        types |= {"time": dict, "metrics": str}
    spec = read_json(folder / SPEC, **types)
    check_sum(folder, spec)
    return spec


def check_sum(folder: Path, spec: dict[str, Any]) -> None:
    if digest_of(spec) != spec["sha256"].get(SPEC):
        raise ConfigError(f"'{folder / SPEC}' is damaged: its content is not that which was written")


def read_checkpoint(folder: Path, resume: bool = False) -> tuple[Tensors, Tensors, dict[str, Any]]:
    """Weights, resume state (if asked for) and spec of a checkpoint, or a ConfigError that says what is wrong."""
    spec = read_spec(folder, resume)
    weights = read_tensors(folder / WEIGHTS, spec["sha256"].get(WEIGHTS))
    refuse_non_finite(weights, f"'{folder / WEIGHTS}' cannot be used: weight", ConfigError)
    return weights, read_tensors(folder / RESUME, spec["sha256"].get(RESUME)) if resume else {}, spec


def read_weights(folder: Path, net: nn.Module) -> None:
    """Load the weights of a checkpoint into `net`, while the training that writes it may be going on."""
    for attempt in range(5):
        try:
            weights = read_checkpoint(folder)[0]
            break
        except ConfigError:
            if attempt == 4:
                raise
            time.sleep(0.05)  # perhaps it was being replaced: spec of the one, weights of the other
    load_weights(net, weights, folder / WEIGHTS)


def load_weights(net: nn.Module, weights: Tensors, where: Path) -> None:
    """Put weights into a network once names, shapes and types are sure to fit."""
    check_alike(weights, net.state_dict(), where)
    net.load_state_dict(weights)


def check_alike(found: dict[str, Any], wanted: dict[str, Any], where: Path, prefix: str = "") -> None:
    """Arrays of the same names, shapes and types, or a ConfigError that names the first difference."""
    for name in sorted(found.keys() ^ wanted.keys()):
        what = "it has no" if name in wanted else "it has an unknown"
        raise ConfigError(f"'{where}' does not fit: {what} '{prefix}{name}'")
    for name, array in wanted.items():
        for what in ("shape", "dtype"):
            one, other = getattr(found[name], what), getattr(array, what)
            one, other = (tuple(one), tuple(other)) if what == "shape" else (one, other)
            if one != other:
                raise ConfigError(f"'{where}' does not fit: '{prefix}{name}' has {what} {one}, not {other}")


def is_whole(folder: Path, resume: bool = False) -> bool:
    try:
        read_checkpoint(folder, resume)
    except ConfigError:
        return False
    return True


def repair(folder: Path) -> None:
    """End a replacement that was interrupted between its moves: the new checkpoint takes the empty place."""
    for name, resume in (("last", True), ("best", False)):
        draft = folder / f"{name}.new"
        if not (folder / name).exists() and is_whole(draft, resume):
            system.move(draft, folder / name)


def read_last(folder: Path) -> tuple[Tensors, Tensors, dict[str, Any]] | None:
    """What `--resume` goes on from; None if nothing was saved yet."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"'{folder}' cannot be used: it is no folder")
    repair(folder)
    last, previous = folder / "last", folder / "previous"
    if not last.exists() and not previous.exists():
        return None
    try:
        saved = read_checkpoint(last, resume=True)
        remove_old(folder)
        return saved
    except ConfigError as error:
        if not is_whole(previous, resume=True):
            raise
        step = read_json(previous / SPEC)["global_step"]
        hint = f"{previous} is whole, of step {step}: rename it to last to go on from there"
        raise ConfigError(f"{error}; {hint}") from None


# things that survive a kill


def pack(thing: Any) -> Tensors:
    """All that a thing must not forget, as tensors by name."""
    if isinstance(thing, nn.Module):
        return dict(thing.state_dict())
    if isinstance(thing, torch.optim.Optimizer):
        return pack_optimizer(thing)
    if isinstance(thing, torch.Generator):
        return {"state": thing.get_state()}
    if isinstance(thing, np.random.Generator):
        return {"state": as_tensor(np.frombuffer(json.dumps(thing.bit_generator.state).encode(), np.uint8))}
    if isinstance(thing, (np.ndarray, torch.Tensor)):
        return {"value": as_tensor(thing)}
    if isinstance(thing, dict):
        return {name: as_tensor(array) for name, array in thing.items()}
    if isinstance(thing, list):
        return {f"{k}.{name}": as_tensor(array) for k, entry in enumerate(thing) for name, array in entry.items()}
    return {name: as_tensor(array) for name, array in thing.get_state().items()}


def unpack(thing: Any, saved: Tensors, where: Path, name: str) -> None:
    """Bring a thing back to what `pack` gave, in place; a ConfigError if that does not fit."""
    if not isinstance(thing, (list, torch.optim.Optimizer, np.random.Generator)):  # these hold other arrays with time
        check_alike(saved, pack(thing), where, f"{name}.")
    try:
        if isinstance(thing, nn.Module):
            thing.load_state_dict(saved)
        elif isinstance(thing, torch.optim.Optimizer):
            unpack_optimizer(thing, saved)
        elif isinstance(thing, torch.Generator):
            thing.set_state(saved["state"])
        elif isinstance(thing, np.random.Generator):
            thing.bit_generator.state = json.loads(saved["state"].numpy().tobytes())
        elif isinstance(thing, np.ndarray):
            thing[...] = saved["value"].numpy()
        elif isinstance(thing, torch.Tensor):
            thing.copy_(saved["value"])
        elif isinstance(thing, dict):
            thing.update({key: as_kind(x, thing[key]) for key, x in saved.items()})
        elif isinstance(thing, list):
            thing[:] = unpack_list(saved)
        else:
            thing.set_state({key: x.numpy() for key, x in saved.items()})
    except (KeyError, ValueError, TypeError, IndexError, RuntimeError, AttributeError) as error:
        raise ConfigError(f"'{where}' does not fit: '{name}' cannot be restored: {one_line(error)}") from None


def unpack_list(saved: Tensors) -> list[dict[str, np.ndarray]]:
    entries: dict[int, dict[str, np.ndarray]] = {}
    for key, x in saved.items():
        number, _, name = key.partition(".")
        entries.setdefault(int(number), {})[name] = x.numpy()
    return [entries[k] for k in sorted(entries)]


def as_kind(saved: torch.Tensor, thing: Any) -> Any:
    """A saved tensor as what it was: a tensor on its device, or an array."""
    return saved.to(thing.device) if isinstance(thing, torch.Tensor) else saved.numpy()


def as_tensor(array: Any) -> torch.Tensor:
    return array if isinstance(array, torch.Tensor) else torch.from_numpy(np.array(array, order="C"))


def pack_optimizer(optimizer: torch.optim.Optimizer) -> Tensors:
    """Learning rates of the groups, and what the optimizer remembers of each parameter, numbered over all groups."""
    rates = [torch.as_tensor(group["lr"], dtype=torch.float64) for group in optimizer.param_groups]
    saved = {f"lr.{k}": rate for k, rate in enumerate(rates)}
    for k, parameter in enumerate(parameters_of(optimizer)):
        state = optimizer.state.get(parameter, {})
        saved |= {f"{k}.{name}": x for name, x in state.items() if isinstance(x, torch.Tensor)}
    return saved


def unpack_optimizer(optimizer: torch.optim.Optimizer, saved: Tensors) -> None:
    for k, group in enumerate(optimizer.param_groups):
        group["lr"] = saved[f"lr.{k}"].item()
    # torch keeps the count of steps on the CPU but for these
    on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    parameters = parameters_of(optimizer)
    for key, x in saved.items():
        number, _, name = key.partition(".")
        if number == "lr":
            continue
        parameter = parameters[int(number)]
        if x.dim() and x.shape != parameter.shape:
            raise ValueError(f"{name} of parameter {number} has shape {tuple(x.shape)}, not {tuple(parameter.shape)}")
        if not x.dim() and not x >= 0:  # torch takes roots of powers of the count of steps
            raise ValueError(f"{name} of parameter {number} is {x.item()}")
        optimizer.state[parameter][name] = x.to(parameter.device) if x.dim() or on_device else x


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def part(saved: Tensors, name: str) -> Tensors:
    """The entries of one thing: those under `name.`, without it."""
    return {key.removeprefix(f"{name}."): x for key, x in saved.items() if key.startswith(f"{name}.")}


def pack_all(things: dict[str, Any]) -> Tensors:
    """The entries of many things, each under its name."""
    return {f"{name}.{key}": x for name, thing in things.items() for key, x in pack(thing).items()}


class Kept:
    """A thing whose attributes named in KEPT survive a kill: arrays, tensors and generators of the CPU, things like
    itself and lists of them."""

    KEPT: tuple[str, ...] = ()

    def get_state(self) -> dict[str, np.ndarray]:
        saved = {}
        for name in self.KEPT:
            value = getattr(self, name)
            if isinstance(value, np.random.Generator):
                saved[name] = pack_generator(value)
            elif isinstance(value, torch.Generator):
                saved[name] = value.get_state().numpy()
            elif isinstance(value, torch.Tensor):
                saved[name] = value.numpy().copy()
            elif isinstance(value, np.ndarray):
                saved[name] = value.copy()
            else:
                for place, thing in numbered(name, value).items():
                    saved |= {f"{place}.{key}": array for key, array in thing.get_state().items()}
        return saved

    def set_state(self, saved: dict[str, np.ndarray]) -> None:
        for name in self.KEPT:
            value = getattr(self, name)
            if isinstance(value, np.random.Generator):
                unpack_generator(value, saved[name])
            elif isinstance(value, torch.Generator):
                value.set_state(torch.from_numpy(saved[name]))
            elif isinstance(value, torch.Tensor):
                value[:] = torch.from_numpy(saved[name])
            elif isinstance(value, np.ndarray):
                value[:] = saved[name]
            else:
                for place, thing in numbered(name, value).items():
                    thing.set_state({key: saved[f"{place}.{key}"] for key in thing.get_state()})


def numbered(name: str, value: Any) -> dict[str, Any]:
    """One thing by its name, or those of a list by name and number."""
    return {f"{name}{k}": thing for k, thing in enumerate(value)} if isinstance(value, list) else {name: value}
