"""Pictures of a battle: units, health, shields and shots, seen from above (north is up)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from envs.battles.core import BEAM, BLAST, HEAL, NOBODY, RECORDED
from envs.battles.env import BattleEnv

WIDTH = 768  # pixels, at most
SMOOTH = 2  # pictures are drawn this much larger, then shrunk
STRIP = 44  # pixels of the strip above the field, and of the legend below it
SHOT_TICKS = 3  # a shot stays visible for so many ticks
MARGIN = 1.5  # cells around the units that a camera keeps in sight

X, Y, HP, SHIELD, SHOT = (RECORDED.index(name) for name in ("x", "y", "hp", "shield", "shot"))
NIGHT, FLOOR, GRID, TEXT = (16, 19, 26), (38, 44, 54), (45, 52, 63), (226, 230, 236)
GOLD = (242, 184, 26)
ALLY, ENEMY, DEAD = (70, 150, 245), (240, 90, 70), (88, 94, 104)
SHIELD_BLUE, HEAL_GREEN = (120, 225, 255), (90, 220, 120)
SHOT_COLOURS = {True: (150, 205, 255), False: (255, 190, 120)}
LETTERS = {"marauder": "R", "medivac": "+", "zergling": "z", "baneling": "b", "colossus": "C", "spine_crawler": "T"}


def letter_of(name: str) -> str:
    """The letter on a unit of a type."""
    return LETTERS.get(name, name[0].upper())


class Moment(NamedTuple):
    """What a picture shows: the last of the recorded ticks; the shots of the ones before it fade."""

    ticks: np.ndarray  # (K, U, columns of RECORDED)
    t: int  # step of the episode
    caption: str = ""


class View(NamedTuple):
    """The part of the map in the picture, in cells."""

    left: int
    bottom: int
    right: int
    top: int


def whole_field(env: BattleEnv) -> View:
    """All walkable ground and one cell around it."""
    rows, columns = np.nonzero(env.battle.walkable)
    return cut(env, columns.min() - 1, rows.min() - 1, columns.max() + 2, rows.max() + 2)


def camera(env: BattleEnv, moments: list[Moment]) -> View:
    """Just large enough to hold every unit of all moments while it lives."""
    seen = np.concatenate([moment.ticks[-1] for moment in moments])
    seen = seen[seen[:, HP] > 0]
    low, high = seen[:, [X, Y]].min(axis=0) - MARGIN, seen[:, [X, Y]].max(axis=0) + MARGIN
    high[1] = max(high[1], low[1] + (high[0] - low[0]) * 0.4)  # no letter boxes
    return cut(env, *np.floor(low), *np.ceil(high))


def cut(env: BattleEnv, left: float, bottom: float, right: float, top: float) -> View:
    width, height = env.battle.width, env.battle.height
    return View(max(int(left), 0), max(int(bottom), 0), min(int(right), width), min(int(top), height))


class Canvas:
    """Draws in cells of the map."""

    def __init__(self, view: View):
        self.view = view
        self.scale = max(12, min(WIDTH // (view.right - view.left), 64)) * SMOOTH
        self.width, field = (view.right - view.left) * self.scale, (view.top - view.bottom) * self.scale
        self.image = Image.new("RGB", (self.width, field + 2 * STRIP * SMOOTH), NIGHT)
        self.pen = ImageDraw.Draw(self.image, "RGBA")

    def at(self, x: float, y: float) -> tuple[float, float]:
        return (x - self.view.left) * self.scale, (self.view.top - y) * self.scale + STRIP * SMOOTH

    def box(self, x: float, y: float, half_width: float, half_height: float) -> tuple[float, float, float, float]:
        return *self.at(x - half_width, y + half_height), *self.at(x + half_width, y - half_height)

    def line(self, start, end, colour, width: float) -> None:
        self.pen.line((*self.at(*start), *self.at(*end)), fill=colour, width=max(1, round(width * self.scale)))

    def text(self, place: tuple[float, float], text: str, size: float, colour=TEXT) -> None:
        self.pen.text(place, text, font=ImageFont.load_default(size * SMOOTH), fill=colour, anchor="mm")


def draw(env: BattleEnv, moment: Moment, view: View | None = None, team: str = "") -> np.ndarray:
    """(height, width, 3) uint8; `team` is a word about who plays."""
    canvas, now = Canvas(view or whole_field(env)), moment.ticks[-1]
    draw_floor(canvas, env.battle.walkable)
    for x, y in now[now[:, HP] <= 0][:, [X, Y]]:
        for lean in (-0.22, 0.22):
            canvas.line((x - 0.22, y - lean), (x + 0.22, y + lean), DEAD, 0.08)
    living = [i for i in np.argsort(env.kinds()["flies"], kind="stable") if now[i, HP] > 0]
    for i in living:  # below all units, so that no bar hides a neighbour's letter
        draw_health(canvas, env.kinds()[i], now[i])
    for i in living:
        draw_unit(canvas, env, i, now[i])
    for age, tick in enumerate(moment.ticks[: -SHOT_TICKS - 1 : -1]):
        draw_shots(canvas, env, now, tick[:, SHOT].astype(int), 1.0 - age / SHOT_TICKS)
    draw_strip(canvas, env, now, moment)
    draw_legend(canvas, env, team)
    return np.asarray(canvas.image.reduce(SMOOTH))


def draw_floor(canvas: Canvas, walkable: np.ndarray) -> None:
    left, bottom, right, top = canvas.view
    for y in range(bottom, top):
        for x in range(left, right):
            if walkable[y, x]:
                canvas.pen.rectangle(canvas.box(x + 0.5, y + 0.5, 0.5, 0.5), fill=FLOOR, outline=GRID)


def draw_shots(canvas: Canvas, env: BattleEnv, now: np.ndarray, shots: np.ndarray, strength: float) -> None:
    kinds = env.kinds()
    for i in np.flatnonzero(shots != NOBODY):
        weapon, start, end = kinds["weapon"][i], now[i, [X, Y]], now[shots[i], [X, Y]]
        base = HEAL_GREEN if weapon == HEAL else SHOT_COLOURS[bool(kinds["ally"][i])]
        colour = (*base, round(255 * strength))
        if weapon == BLAST:
            reach = kinds["blast_radius"][i]
            glow = (*base, round(90 * strength))
            canvas.pen.ellipse(canvas.box(start[0], start[1], reach, reach), fill=glow, outline=colour)
            continue
        canvas.line(start, end, colour, 0.1 if weapon == HEAL else 0.07)
        if weapon == BEAM:
            ahead = (end - start) / max(np.hypot(*(end - start)), 1e-9)
            across = np.array([-ahead[1], ahead[0]]) * kinds["beam_length"][i] / 2
            canvas.line(end - across, end + across, colour, kinds["beam_width"][i])


def draw_unit(canvas: Canvas, env: BattleEnv, i: int, record: np.ndarray) -> None:
    """A disc with the type's letter and its shield as a ring."""
    kind, name = env.kinds()[i], env.unit_names()[i]
    x, y, radius = record[X], record[Y], max(kind["radius"], 0.3)
    side = ALLY if kind["ally"] else ENEMY
    canvas.pen.ellipse(canvas.box(x, y, radius, radius), fill=(*side, 190 if kind["flies"] else 255), outline=NIGHT)
    canvas.text(canvas.at(x, y), letter_of(name), radius * 1.1 * canvas.scale / SMOOTH, (255, 255, 255))
    if kind["max_shield"] > 0 and record[SHIELD] > 0:
        turn = 360 * record[SHIELD] / kind["max_shield"]
        ring = canvas.box(x, y, radius + 0.1, radius + 0.1)
        canvas.pen.arc(ring, -90, -90 + turn, fill=SHIELD_BLUE, width=round(0.09 * canvas.scale))


def draw_health(canvas: Canvas, kind: np.void, record: np.ndarray) -> None:
    """A bar above the unit."""
    x, y, radius = record[X], record[Y], max(kind["radius"], 0.3)
    part, bar = record[HP] / kind["max_hp"], y + radius + 0.22
    canvas.pen.rectangle(canvas.box(x, bar, radius, 0.07), fill=NIGHT)
    health = (round(230 - 150 * part), round(70 + 140 * part), 80)
    canvas.pen.rectangle(canvas.box(x - radius * (1 - part), bar, radius * part, 0.07), fill=health)


def draw_strip(canvas: Canvas, env: BattleEnv, now: np.ndarray, moment: Moment) -> None:
    """Above the field: what is left of both sides; the battle's name and the step, or how it ended."""
    kinds, left = env.kinds(), now[:, HP] + np.where(now[:, HP] > 0, now[:, SHIELD], 0.0)
    edge, middle, length = 10 * SMOOTH, STRIP * SMOOTH / 2, canvas.width * 0.3
    for side, colour in ((env.rules.allies, ALLY), (env.rules.enemies, ENEMY)):
        part = left[side].sum() / (kinds["max_hp"] + kinds["max_shield"])[side].sum()
        start = edge if colour == ALLY else canvas.width - edge - length
        begin = start if colour == ALLY else start + length * (1 - part)
        canvas.pen.rectangle((start, middle - 16, start + length, middle + 16), fill=FLOOR)
        canvas.pen.rectangle((begin, middle - 16, begin + length * part, middle + 16), fill=colour)
        canvas.text((start + length / 2, middle), f"{int((left[side] > 0).sum())} left", 11)
    title = moment.caption or f"{env.battle.name}   {moment.t} / {env.spec.horizon}"
    canvas.text((canvas.width / 2, middle), title, 24 if moment.caption else 14, GOLD if moment.caption else TEXT)


def draw_legend(canvas: Canvas, env: BattleEnv, team: str) -> None:
    """Below the field: who plays, what the letters and the ring mean; as large as fits."""
    names = dict.fromkeys(env.unit_names())
    words = [f"{letter_of(name)} {name.replace('_', ' ')}" for name in names]
    words += ["ring: shield"] if env.kinds()["max_shield"].any() else []
    text = "    ".join([*([team] if team else []), *words])
    size = 12.0
    while size > 5 and ImageFont.load_default(size * SMOOTH).getlength(text) > canvas.width - 20 * SMOOTH:
        size -= 0.5
    canvas.text((canvas.width / 2, canvas.image.height - STRIP * SMOOTH / 2), text, size)
