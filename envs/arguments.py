"""Command lines: the types of settings with their ranges, and one line for whatever is wrong with them.

class Args:
    gamma: Share = 0.97
    \"\"\"discount\"\"\"
    num_envs: Annotated[int, Range(1, 10_000), tyro.conf.arg(metavar="1..10000")] = 128
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import sys
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro

from envs.errors import ConfigError

A = TypeVar("A")


@dataclass(frozen=True)
class Range:
    """The values that a setting can have, both ends included."""

    low: float
    high: float = 10**9

    def __str__(self) -> str:
        return f"from {self.low} to {self.high}"


Whole = Annotated[int, Range(0), tyro.conf.arg(metavar="0..")]
Positive = Annotated[int, Range(1), tyro.conf.arg(metavar="1..")]
Count = Annotated[int, Range(1, 10**6), tyro.conf.arg(metavar="1..1000000")]  # of what is in memory side by side
Share = Annotated[float, Range(0, 1), tyro.conf.arg(metavar="0..1")]
Weight = Annotated[float, Range(0, 10**6), tyro.conf.arg(metavar="0..1e6")]
Rate = Annotated[float, Range(0, 10), tyro.conf.arg(metavar="0..10")]

UNWRITABLE = re.compile("[\0\ud800-\udfff]")  # no file can be called so: a zero, bytes that are no UTF-8
KINDS = {int: "a whole number", float: "a number", bool: "True or False", str: "text", type(None): "None"}


def parse(args_class: type[A], description: str | None, argv: list[str] | None = None, prog: str | None = None) -> A:
    """The settings on the command line. Whatever cannot be is a ConfigError of one line; `--help` ends the process."""
    hints = get_type_hints(args_class, include_extras=True)
    argv = [spell_flag(word, hints) for word in (sys.argv[1:] if argv is None else argv)]
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            args = tyro.cli(args_class, prog=prog, description=description, args=argv)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ConfigError(unbox(box.getvalue(), hints)) from None
    check_ranges(args)
    return args


def spell_flag(word: str, hints: dict[str, Any]) -> str:
    """--flag=True and --flag=False, as sweepers write them, are --flag and --no-flag."""
    name, equals, value = word.partition("=")
    if not equals or not name.startswith("--") or hints.get(name[2:].replace("-", "_")) is not bool:
        return word
    if value.lower() not in ("true", "false"):
        raise ConfigError(f"{name} must be True or False, not '{value}'")
    return name if value.lower() == "true" else f"--no-{name[2:]}"


def unbox(text: str, hints: dict[str, Any]) -> str:
    """tyro's box of lines as one line: what stands below its title. A box is drawn by frames where the output is UTF-8,
    else, as often on Windows, by rules of hyphens."""
    lines = [line.strip("│ ") for line in text.splitlines()]
    rules = [k for k, line in enumerate(lines) if re.fullmatch(r"[╭╰].*|[─-]{4,}", line)]
    inside = lines[rules[0] + 1 : rules[1]] if len(rules) > 1 else lines
    message = " ".join(" ".join(inside).split())
    wrong = re.search(r"Error parsing --([\w-]+):.*'(.*)'", message)
    if wrong and wrong[1].replace("-", "_") in hints:
        return f"--{wrong[1]} must be {described(hints[wrong[1].replace('-', '_')])}, not '{wrong[2]}'"
    return f"{message} (--help lists all)"


def check_ranges(args: Any) -> None:
    """Types and ranges of all settings."""
    hints = get_type_hints(type(args), include_extras=True)
    for field in fields(args):
        value = getattr(args, field.name)
        if not fits(value, hints[field.name]):
            flag = "--" + field.name.replace("_", "-")
            raise ConfigError(f"{flag} must be {described(hints[field.name])}, not {value!r:.200}")


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is one of a type hint: numbers (finite, in their range), flags, texts, choices, tuples, None."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        ranges = [extra for extra in parts[1:] if isinstance(extra, Range)]
        return fits(value, parts[0]) and all(range.low <= value <= range.high for range in ranges)
    if origin is Literal:
        return value in parts
    if origin is tuple:
        return isinstance(value, tuple) and all(fits(x, parts[0]) for x in value)
    if parts:  # one of several: text | None
        return any(fits(value, one) for one in parts)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if hint is str:
        return isinstance(value, str) and not UNWRITABLE.search(value)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def described(hint: Any) -> str:
    """What a setting can be, in words."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        ranges = [str(extra) for extra in parts[1:] if isinstance(extra, Range)]
        whole = f"{KINDS[int]} " if parts[0] is int else ""
        return whole + ranges[0] if ranges else described(parts[0])
    if origin is Literal:
        return "one of " + ", ".join(map(str, parts))
    if origin is tuple:
        return f"a list, each {described(parts[0])}"
    return " or ".join(map(described, parts)) if parts else KINDS.get(hint, str(hint))
