"""The one exception for mistakes a user can make in settings: always one clear sentence."""

from numbers import Integral
from typing import Any


class ConfigError(ValueError):
    """A setting, id, role or file that cannot be used; the message names the wrong value and the right ones."""


def check_count(name: str, value: Any, least: int, most: int | None = None) -> int:
    """An integer setting from `least` to `most` as int; ConfigError if it is anything else."""
    high = "" if most is None else f" and at most {most}"
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or int(value) < least or (most is not None and int(value) > most):
        raise ConfigError(f"{name} must be an integer of at least {least}{high}, not {short(value)}")
    return int(value)


def short(value: Any) -> str:
    """A wrong value as part of a sentence: on one line, and not longer than a line."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python refuses to write integers of more than 4300 digits
        text = f"a number of {value.bit_length()} bits"
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
