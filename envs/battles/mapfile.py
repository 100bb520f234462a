"""Maps are data: one small TOML file names the units, their places, the ground and the time limit (docs/battles.md).

`load_map("3m")` reads a map of this folder, `load_map_file(path)` a user's own. Every mistake in a file raises a
ConfigError that names the file, the entry and what would be right.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from envs.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
GROUP_GAP = 0.05  # between units of a group at the start

KINDS = ("light", "armoured", "bio", "mech", "massive", "structure", "psionic", "heroic")
PLANES = ("ground", "air")
WEAPONS = ("single", "beam", "blast", "heal")
SIDES = ("ally", "enemy")


@dataclass(frozen=True)
class UnitType:
    """One row of the table of units."""

    name: str
    hp: float
    speed: float
    radius: float
    range: float
    kinds: tuple[str, ...]
    hits: tuple[str, ...]
    damage: float = 0.0
    cooldown: float = 0.0
    shield: float = 0.0
    armour: float = 0.0
    attacks: int = 1
    regen: float = 0.0
    scan: float = 5.0
    energy: float = 0.0
    start_energy: float = 0.0
    plane: str = "ground"
    weapon: str = "single"
    blast_radius: float = 0.0
    beam: tuple[float, float] = (0.0, 0.0)
    bonus: tuple[tuple[str, float], ...] = ()

    def damage_to(self, other: UnitType) -> float:
        """Damage of one attack before shield and armour."""
        return self.damage + sum(amount for kind, amount in self.bonus if kind in other.kinds)


@dataclass(frozen=True)
class Group:
    """Units that start around one point; a map's groups in order give the unit order."""

    side: str
    x: float
    y: float
    units: tuple[UnitType, ...]


@dataclass(frozen=True)
class BattleMap:
    """A map file, read and checked."""

    name: str
    limit: int
    width: int
    height: int
    attack_point: tuple[float, float]
    type_features: tuple[str, ...]  # order of the one-hot type features; empty: no such features
    walkable: np.ndarray  # (height, width) bool
    groups: tuple[Group, ...]
    draws_places: bool = False  # start places are drawn anew in each battle
    drawn_types: tuple[tuple[UnitType, float], ...] = ()  # so are the types, by these chances; empty: as in the groups

    @property
    def units(self) -> list[tuple[str, UnitType]]:
        """(side, type) of every unit, in unit order."""
        return [(group.side, unit) for group in self.groups for unit in group.units]

    def start_positions(self) -> np.ndarray:
        """(U, 2) start positions, in unit order."""
        return np.array([place for group in self.groups for place in place_group(group)])

    def walls(self) -> np.ndarray:
        """(R, 4) blocked rectangles [x0, y0, x1, y1]: cells merged first along the row, then upwards."""
        left = ~self.walkable
        rectangles = []
        for y in range(self.height):
            for x in range(self.width):
                if not left[y, x]:
                    continue
                x_end, y_end = x + 1, y + 1
                while x_end < self.width and not self.walkable[y, x_end]:
                    x_end += 1
                while y_end < self.height and not self.walkable[y_end, x:x_end].any():
                    y_end += 1
                left[y:y_end, x:x_end] = False
                rectangles.append((x, y, x_end, y_end))
        return np.array(rectangles, np.float64).reshape(-1, 4)


def place_group(group: Group) -> list[tuple[float, float]]:
    """Row by row in a square around the group's point; enemies are filled in from the opposite corner."""
    side = math.ceil(math.sqrt(len(group.units)))
    rows = [group.units[k * side : (k + 1) * side] for k in range(side)]
    rows = [row for row in rows if row]
    row_radii = [max(unit.radius for unit in row) for row in rows]
    mirror = 1 if group.side == "ally" else -1
    width = max(sum(2 * unit.radius for unit in row) for row in rows)
    y = group.y - mirror * (2 * sum(row_radii) + (side - 1) * GROUP_GAP) / 2
    places, previous_row = [], 0.0
    for row, row_radius in zip(rows, row_radii, strict=True):
        x, previous = group.x - mirror * width / 2, 0.0
        y += mirror * (previous_row + row_radius)
        for unit in row:
            x += mirror * (previous + unit.radius)
            places.append((x, y))
            x, previous = x + mirror * GROUP_GAP, unit.radius
        y, previous_row = y + mirror * GROUP_GAP, row_radius
    return places


# ---------------------------------------------------------------------------------------------------------------------
# reading and checking
# ---------------------------------------------------------------------------------------------------------------------


class Entries:
    """A table of a TOML file that complains about wrong entries by their full name."""

    def __init__(self, table: Any, file: str, where: str = ""):
        self.file, self.where = file, where
        if not isinstance(table, dict):
            self.wrong("", f"must be a table, not {table!r}")
        self.table, self.known = dict(table), list[str]()

    def wrong(self, key: str, problem: str) -> NoReturn:
        entry = ".".join(part for part in (self.where, key) if part)
        raise ConfigError(f"map file {self.file}: {f'entry {entry} ' if entry else ''}{problem}")

    def take(self, key: str, *default: Any) -> Any:
        self.known.append(key)
        if key in self.table:
            return self.table.pop(key)
        if not default:
            self.wrong(key, "is missing")
        return default[0]

    def number(self, key: str, *default: float, least: float = 0.0, above: bool = False) -> float:
        value = self.take(key, *default)
        wanted = f"must be a number {'above' if above else 'of at least'} {least:g}"
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            self.wrong(key, f"{wanted}, not {value!r}")
        if value < least or (above and value == least):
            self.wrong(key, f"{wanted}, not {value!r}")
        return float(value)

    def integer(self, key: str, *default: int, least: int = 1, most: int = 1_000_000) -> int:
        value = self.take(key, *default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self.wrong(key, f"must be an integer from {least} to {most}, not {value!r}")
        return value

    def choice(self, key: str, choices: tuple[str, ...], *default: str) -> str:
        value = self.take(key, *default)
        if value not in choices:
            self.wrong(key, f"must be one of {', '.join(choices)}, not {value!r}")
        return value

    def choices(self, key: str, choices: tuple[str, ...], *default: tuple[str, ...]) -> tuple[str, ...]:
        value = self.take(key, *default)
        if not isinstance(value, (list, tuple)):
            self.wrong(key, f"must be a list of names, not {value!r}")
        for name in value:
            if name not in choices:
                self.wrong(key, f"must name only {', '.join(choices)}, not {name!r}")
        if len(set(value)) < len(value):
            self.wrong(key, f"names something twice: {', '.join(value)}")
        return tuple(value)

    def pair(self, key: str, *default: tuple[float, float]) -> tuple[float, float]:
        value = self.take(key, *default)
        good = isinstance(value, (list, tuple)) and len(value) == 2
        if not good or any(isinstance(v, bool) or not isinstance(v, (int, float)) for v in value):
            self.wrong(key, f"must be a pair of numbers, not {value!r}")
        return float(value[0]), float(value[1])

    def finish(self) -> None:
        for key in self.table:
            self.wrong(key, f"is unknown; known entries are {', '.join(self.known)}")


def read_unit(name: str, entries: Entries) -> UnitType:
    """One unit's table -> UnitType."""
    bonus = entries.take("bonus", {})
    if not isinstance(bonus, dict):
        entries.wrong("bonus", f"must be a table such as {{ armoured = 5 }}, not {bonus!r}")
    for kind, amount in bonus.items():
        if kind not in KINDS:
            entries.wrong(f"bonus.{kind}", f"is unknown; kinds are {', '.join(KINDS)}")
        if isinstance(amount, bool) or not isinstance(amount, (int, float)):
            entries.wrong(f"bonus.{kind}", f"must be a number, not {amount!r}")
    weapon = entries.choice("weapon", WEAPONS, "single")
    armed = weapon != "heal"
    unit = UnitType(
        name=name,
        weapon=weapon,
        bonus=tuple(bonus.items()),
        hp=entries.number("hp", above=True),
        speed=entries.number("speed"),
        radius=entries.number("radius", above=True),
        range=entries.number("range"),
        kinds=entries.choices("kinds", KINDS),
        hits=entries.choices("hits", PLANES),
        damage=entries.number("damage", *(() if armed else (0,))),
        cooldown=entries.number("cooldown", *(() if armed else (0,)), above=armed),
        shield=entries.number("shield", 0),
        armour=entries.number("armour", 0),
        attacks=entries.integer("attacks", 1, most=100),
        regen=entries.number("regen", 0),
        scan=entries.number("scan", 5),
        energy=entries.number("energy", *((0,) if armed else ()), above=not armed),
        start_energy=entries.number("start_energy", 0),
        plane=entries.choice("plane", PLANES, "ground"),
        blast_radius=entries.number("blast_radius", *(() if weapon == "blast" else (0,))),
        beam=entries.pair("beam", *(() if weapon == "beam" else ((0.0, 0.0),))),
    )
    entries.finish()
    return unit


@cache
def standard_units() -> dict[str, UnitType]:
    table = tomllib.loads((HERE / "units.toml").read_text(encoding="utf-8"))
    return {name: read_unit(name, Entries(entry, "units.toml", name)) for name, entry in table.items()}


def read_own_units(table: Any, file: str) -> dict[str, UnitType]:
    """The map's [units.<name>] tables; `like = "marine"` takes everything that is not given from a known unit."""
    units = dict(standard_units())
    for name, own in Entries(table, file, "units").table.items():
        entries = Entries(own, file, f"units.{name}")
        if "like" in entries.table:
            model = units[entries.choice("like", tuple(units))]
            given = {field.name: getattr(model, field.name) for field in fields(model) if field.name != "name"}
            entries.table = {**given, "bonus": dict(model.bonus), **entries.table}
        units[name] = read_unit(name, entries)
    return units


SPAN = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?")


def read_span(text: str, size: int, entries: Entries, key: str, axis: str) -> tuple[int, int]:
    """'3-10' or '7' -> first and last cell, both included."""
    match = SPAN.fullmatch(text)
    if not match:
        entries.wrong(key, f"must look like '8-23: 0-31' (rows: columns), but has {text.strip()!r}")
    first = int(match[1])
    last = int(match[2]) if match[2] else first
    if not first <= last < size:
        entries.wrong(key, f"has the {axis} {text.strip()}, but {axis} run from 0 to {size - 1}")
    return first, last


def read_walkable(rows: Any, entries: Entries, width: int, height: int) -> np.ndarray:
    """["8-23: 0-31", ...] (rows: columns, more columns after commas) -> (height, width) bool."""
    walkable = np.zeros((height, width), np.bool_)
    if not isinstance(rows, list) or not rows:
        entries.wrong("walkable", f"must be a list of spans such as '8-23: 0-31', not {rows!r}")
    for k, row in enumerate(rows):
        key = f"walkable[{k}]"
        if not isinstance(row, str) or row.count(":") != 1:
            entries.wrong(key, f"must look like '8-23: 0-31' (rows: columns), not {row!r}")
        row_span, column_spans = row.split(":")
        bottom, top = read_span(row_span, height, entries, key, "rows")
        for column_span in column_spans.split(","):
            left, right = read_span(column_span, width, entries, key, "columns")
            walkable[bottom : top + 1, left : right + 1] = True
    return walkable


def read_group(entries: Entries, units: dict[str, UnitType]) -> Group:
    side = entries.choice("side", SIDES)
    x, y = entries.pair("at")
    members = entries.take("units")
    if not isinstance(members, list) or not members:
        entries.wrong("units", f'must be a list such as [["marine", 3]], not {members!r}')
    group = []
    for member in members:
        if not isinstance(member, list) or len(member) != 2:
            entries.wrong("units", f'must hold pairs such as ["marine", 3], not {member!r}')
        name, count = member
        if name not in units:
            entries.wrong("units", f"names the unknown unit {name!r}; units are {', '.join(units)}")
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 200:
            entries.wrong("units", f"must have from 1 to 200 of {name}, not {count!r}")
        group += [units[name]] * count
    entries.finish()
    return Group(side, x, y, tuple(group))


def read_chances(entries: Entries, units: dict[str, UnitType]) -> tuple[tuple[UnitType, float], ...]:
    """The types that are drawn, with their chances."""
    chances = Entries(entries.take("types", {}), entries.file, "random.types")
    drawn = []
    for name in list(chances.table):
        if name not in units:
            chances.wrong(name, f"is an unknown unit; units are {', '.join(units)}")
        drawn.append((units[name], chances.number(name, above=True)))
    entries.finish()
    if drawn and abs(sum(chance for _, chance in drawn) - 1.0) > 1e-6:
        chances.wrong("", f"must add up to 1, not {sum(chance for _, chance in drawn):g}")
    return tuple(drawn)


def read_map(table: dict, name: str, file: str) -> BattleMap:
    entries = Entries(table, file)
    width, height = entries.integer("width", 32, least=4, most=256), entries.integer("height", 32, least=4, most=256)
    units = read_own_units(entries.take("units", {}), file)
    groups = entries.take("groups")
    if not isinstance(groups, list) or not groups:
        entries.wrong("groups", "must be a list of [[groups]] tables")
    draws_places = "random" in entries.table
    drawn_types = read_chances(Entries(entries.take("random", {}), file, "random"), units)
    battle = BattleMap(
        name=name,
        limit=entries.integer("limit"),
        width=width,
        height=height,
        attack_point=entries.pair("attack_point"),
        type_features=entries.choices("type_features", tuple(units), ()),
        walkable=read_walkable(entries.take("walkable"), entries, width, height),
        groups=tuple(read_group(Entries(g, file, f"groups[{k}]"), units) for k, g in enumerate(groups)),
        draws_places=draws_places,
        drawn_types=drawn_types,
    )
    entries.finish()
    check_map(battle, entries)
    return battle


def check_map(battle: BattleMap, entries: Entries) -> None:
    """What no single entry can show: both sides there, all types listed, everybody on walkable ground."""
    for side in SIDES:
        if all(group.side != side for group in battle.groups):
            entries.wrong("groups", f"has no group of side {side!r}")
    if battle.draws_places:
        allies = [side for side, _ in battle.units].count("ally")
        if 2 * allies != len(battle.units):  # enemies are mirror images of allies
            entries.wrong("groups", f"of a random map must have as many enemies as allies, which are {allies}")
    drawn = tuple(unit.name for unit, _ in battle.drawn_types)
    if drawn and battle.type_features != drawn:
        entries.wrong("type_features", f"must be the drawn types {', '.join(drawn)}, in this order")
    if drawn and all(unit.weapon == "heal" for unit, _ in battle.drawn_types):
        entries.wrong("random.types", "has healers alone")
    x, y = battle.attack_point
    if not (0 <= x < battle.width and 0 <= y < battle.height):
        entries.wrong("attack_point", f"must lie on the {battle.width} x {battle.height} map, not at ({x:g}, {y:g})")
    for k, group in enumerate(battle.groups):
        for unit, (x, y) in zip(group.units, place_group(group), strict=True):
            if battle.type_features and unit.name not in battle.type_features:
                entries.wrong("type_features", f"lacks {unit.name}, which groups[{k}] has")
            on_map = 0 <= x < battle.width and 0 <= y < battle.height
            if not on_map or (unit.plane == "ground" and not battle.walkable[int(y), int(x)]):
                place = "off the map" if not on_map else "on ground that is not walkable"
                entries.wrong(f"groups[{k}].at", f"puts a {unit.name} at ({x:.2f}, {y:.2f}), which is {place}")


def map_names() -> list[str]:
    """The maps that come along, by name."""
    return sorted((path.stem for path in (HERE / "maps").glob("*.toml")), key=lambda name: (name.lower(), name))


def load_map(name: str) -> BattleMap:
    if name not in map_names():
        raise ConfigError(f"unknown map '{name}'; maps are {', '.join(map_names())}, or smac-file:<path> for your own")
    return load_map_file(HERE / "maps" / f"{name}.toml")


def load_map_file(path: str | Path) -> BattleMap:
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"map file {path} cannot be read: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(f"map file {path} is no map: it is nested too deeply") from None
    except UnicodeDecodeError:
        raise ConfigError(f"map file {path} is no text file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"map file {path} is no valid TOML: {error}") from None
    return read_map(table, path.stem, str(path))
