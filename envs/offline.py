"""Checkpoints of the offline scripts under vae_ckpts/: folders, specs and weights, checked before they are used.

A checkpoint is a folder with weights.safetensors and a spec.json that says what made it, for which game, and the
checksums of both. The spec is written last: without it a folder belongs to a run that did not finish.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import nn

from envs.checkpoints import SPEC, WEIGHTS, check_sum, read_json, read_tensors, refuse_non_finite, write_files
from envs.errors import ConfigError
from envs.grid import EnvSpec
from envs.recording import check_game, game_part, one_line
from envs.run import fail, guarded, parse


def read_spec(folder: Path, kind: str, spec: EnvSpec | None = None, obs_is_state: bool = False) -> dict[str, Any]:
    """The spec of a checkpoint folder; ConfigError in one sentence if it is of another kind, or not for this env."""
    if not (folder / SPEC).exists():
        raise ConfigError(f"'{folder}' is no checkpoint: it has no spec.json")
    found = read_json(folder / SPEC)
    if found.get("kind") != kind:
        raise ConfigError(f"'{folder}' holds a checkpoint of kind {str(found.get('kind'))[:50]!r}, not {kind!r}")
    if "sha256" in found:  # version 0.2.0 wrote none
        read_json(folder / SPEC, sha256=dict)
        check_sum(folder, found)
        read_tensors(folder / WEIGHTS, found["sha256"].get(WEIGHTS))
    if spec is not None:
        check_game("checkpoint was trained", found, spec, obs_is_state)
    return found


def check_sizes(folder: Path, sizes: Any, largest: dict[str, int]) -> dict[str, Any]:
    """The sizes of a spec, once all of them are whole numbers from 0 to the largest that can be ours."""
    good = isinstance(sizes, dict)
    good = good and all(type(sizes.get(name)) is int and 0 <= sizes[name] <= most for name, most in largest.items())
    if not good:
        raise ConfigError(f"'{folder / 'spec.json'}' has no usable sizes: {one_line(sizes)}")
    return sizes


def load_weights(make_model: Callable[[], nn.Module], path: Path) -> nn.Module:
    """The model with the weights of a safetensors file, once every name and shape is known to fit."""
    with torch.device("meta"):  # shapes without memory: a spec that lies about its size costs nothing
        wanted = {name: list(tensor.shape) for name, tensor in make_model().state_dict().items()}
    try:
        tensors = load_safetensors(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"checkpoint '{path.parent}' has no {path.name}") from None
    except (SafetensorError, OSError, RuntimeError, ValueError, KeyError) as error:
        raise ConfigError(f"'{path}' cannot be read: {one_line(error)}") from None
    found = {name: list(tensor.shape) for name, tensor in tensors.items()}
    for name in [*wanted, *found]:
        if found.get(name) != wanted.get(name):
            shapes = f"{name} is {found.get(name)}, not {wanted.get(name)}"
            raise ConfigError(f"'{path}' does not fit its spec.json: {shapes}")
    if not all(tensor.dtype == torch.float32 and tensor.isfinite().all() for tensor in tensors.values()):
        raise ConfigError(f"'{path}' has weights that are not finite float32 numbers")
    model = make_model()
    model.load_state_dict(tensors)
    return model.eval()


def newest(folders: Iterable[Path], usable: Callable[[Path], Any]) -> Path | None:
    """The last by name of the checkpoint folders of which `usable` is true and raises no ConfigError."""
    for folder in sorted(folders, reverse=True):
        try:
            if usable(folder) and (folder / "weights.safetensors").exists():
                return folder
        except (ConfigError, KeyError, TypeError):
            continue
    return None


def describe(kind: str, script: str, args: Any, spec: EnvSpec, obs_is_state: bool = False) -> dict[str, Any]:
    """What every checkpoint's spec says: what made it, and for which game."""
    version = hashlib.sha256(Path(script).read_bytes()).hexdigest()[:12]
    about = {"kind": kind, "script": Path(script).name, "code_version": version, "args": dataclasses.asdict(args)}
    return about | {"obs_is_state": obs_is_state, "num_actions": spec.num_actions, **game_part(spec)}


def save_checkpoint(folder: Path, model: nn.Module, spec: dict[str, Any]) -> None:
    """weights.safetensors and, last, spec.json: it means complete."""
    refuse_non_finite(model.state_dict(), "the weights", FloatingPointError)
    write_files(folder, {WEIGHTS: model.state_dict()}, spec)


def fresh_folder(out_dir: str | Path, name: str) -> Path:
    """<out_dir>/<name>__<unix time>, seconds later where that exists."""
    now = int(time.time())
    try:
        Path(out_dir).mkdir(parents=True, exist_ok=True)
        while True:
            try:
                folder = Path(out_dir) / f"{name}__{now}"
                folder.mkdir()
                return folder
            except FileExistsError:
                now += 1
    except OSError as error:
        raise ConfigError(f"cannot write to '{out_dir}': {error.strerror}") from None


def split_episodes(episode: np.ndarray, share: float, seed: np.random.SeedSequence) -> np.ndarray:
    """(M,) bool: rows of the episodes kept for validation."""
    episodes = np.random.default_rng(seed).permutation(np.unique(episode))
    num_val = max(1, round(share * len(episodes)))
    if num_val == len(episodes):
        raise ConfigError("there is only one episode; validation needs another")
    return np.isin(episode, episodes[:num_val])


def since(start: tuple[float, float]) -> tuple[float, float]:
    """Seconds of the clock and of one core."""
    return time.perf_counter() - start[0], time.process_time() - start[1]


def write_metrics(path: Path, history: list[dict[str, float]]) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(history[0]))
        writer.writeheader()
        writer.writerows(history)


def main(args_class: type, train: Callable[[Any], Any]) -> int:
    """The whole of an offline script: settings, work, one line for whatever goes wrong; returns the exit code."""
    doc = sys.modules[train.__module__].__doc__

    def work(_: Any) -> int:
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore  # progress shows at once in a log, too
        try:
            train(parse(args_class, doc))
        except FloatingPointError as error:
            return fail(error, 1)
        return 0

    return guarded(work)
