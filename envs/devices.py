"""Where the networks are: on the processor or, by --device, on a GPU. Games, players and all that is saved stay on the
processor; docs/ecosystem.md says what is moved when, and when a GPU pays."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from envs.errors import ConfigError

Device = Literal["cpu", "cuda", "mps"]


def find_device(name: str) -> torch.device:
    """The device of that name, if this machine and this build of torch have it."""
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there[name]:
        here = " or ".join(device for device, found in there.items() if found)
        raise ConfigError(f"--device {name}: torch {torch.__version__} finds no such device here, only {here}")
    return torch.device(name)


def device_of(net: nn.Module) -> torch.device:
    return next(net.parameters()).device


def move(batch: dict[str, Any], device: torch.device | str) -> dict[str, torch.Tensor]:
    """A batch of arrays or tensors by name, as tensors on a device."""
    return {name: torch.as_tensor(column, device=device) for name, column in batch.items()}


def tensors(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    """Arrays as tensors on a device."""
    return [torch.from_numpy(array).to(device) for array in arrays]
