"""Pictures of a battle: units, health, shields and shots, seen from above (north is up)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from envs.battles.core import BEAM, BLAST, HEAL, NOBODY, RECORDED
from envs.battles.env import BattleEnv

CELL = 24  # pixels per cell
SMOOTH = 2  # pictures are drawn this much larger, then shrunk
STRIP = 44  # pixels of the strip above the field
SHOT_TICKS = 3  # a shot stays visible for so many ticks

X, Y, HP, SHIELD, SHOT = (RECORDED.index(name) for name in ("x", "y", "hp", "shield", "shot"))
NIGHT, FLOOR, GRID, TEXT = (16, 19, 26), (38, 44, 54), (45, 52, 63), (226, 230, 236)
ALLY, ENEMY, SHIELD_BLUE, HEAL_GREEN, DEAD = (70, 150, 245), (240, 90, 70), (120, 225, 255), (90, 220, 120), (88, 94, 104)
SHOT_COLOURS = {True: (150, 205, 255), False: (255, 190, 120)}
LETTERS = {"marine": "M", "marauder": "R", "medivac": "+", "stalker": "S", "zealot": "Z", "zergling": "z", "baneling": "b"}


class Canvas:
    """Draws in cells of the map, on the part of it that matters."""

    def __init__(self, env: BattleEnv):
        rows, columns = np.nonzero(env.battle.walkable)
        self.left, self.right = max(columns.min() - 1, 0), min(columns.max() + 2, env.battle.width)
        self.bottom, self.top = max(rows.min() - 1, 0), min(rows.max() + 2, env.battle.height)
        self.scale = CELL * SMOOTH
        self.width, field = (self.right - self.left) * self.scale, (self.top - self.bottom) * self.scale
        self.image = Image.new("RGB", (self.width, field + STRIP * SMOOTH), NIGHT)
        self.pen = ImageDraw.Draw(self.image, "RGBA")

    def at(self, x: float, y: float) -> tuple[float, float]:
        return (x - self.left) * self.scale, (self.top - y) * self.scale + STRIP * SMOOTH

    def box(self, x: float, y: float, half_width: float, half_height: float) -> tuple[float, float, float, float]:
        return *self.at(x - half_width, y + half_height), *self.at(x + half_width, y - half_height)

    def line(self, start, end, colour, width: float) -> None:
        self.pen.line((*self.at(*start), *self.at(*end)), fill=colour, width=max(1, round(width * self.scale)))

    def text(self, place: tuple[float, float], text: str, size: int, anchor: str, colour=TEXT) -> None:
        self.pen.text(place, text, font=ImageFont.load_default(size * SMOOTH), fill=colour, anchor=anchor)

    def pixels(self) -> np.ndarray:
        return np.asarray(self.image.reduce(SMOOTH))


def draw(env: BattleEnv, ticks: np.ndarray, row: int = 0, caption: str = "") -> np.ndarray:
    """The last of the recorded `ticks` (K, U, columns) of one battle; the shots of the ones before it fade."""
    canvas = Canvas(env)
    draw_floor(canvas, env.battle.walkable)
    draw_dead(canvas, env, ticks[-1], row)
    for age, tick in enumerate(ticks[: -SHOT_TICKS - 1 : -1]):
        draw_shots(canvas, env, ticks[-1], tick, row, 1.0 - age / SHOT_TICKS)
    for i in np.argsort(env.rules.kinds["flies"], kind="stable"):
        if ticks[-1, i, HP] > 0:
            draw_unit(canvas, env, i, ticks[-1, i])
    draw_strip(canvas, env, ticks[-1], row)
    if caption:
        middle = (canvas.width / 2, canvas.image.height / 2)
        left, top, right, bottom = canvas.pen.textbbox(
            middle, caption, font=ImageFont.load_default(36 * SMOOTH), anchor="mm"
        )
        canvas.pen.rectangle((left - 40, top - 24, right + 40, bottom + 24), fill=(*NIGHT, 210))
        canvas.text(middle, caption, 36, "mm")
    return canvas.pixels()


def draw_floor(canvas: Canvas, walkable: np.ndarray) -> None:
    for y in range(canvas.bottom, canvas.top):
        for x in range(canvas.left, canvas.right):
            if walkable[y, x]:
                canvas.pen.rectangle(canvas.box(x + 0.5, y + 0.5, 0.5, 0.5), fill=FLOOR, outline=GRID)


def draw_dead(canvas: Canvas, env: BattleEnv, tick: np.ndarray, row: int) -> None:
    for i, unit in enumerate(env.battles.units[row]):
        if not tick[i, HP] > 0:
            x, y, half = unit["x"], unit["y"], 0.22
            canvas.line((x - half, y - half), (x + half, y + half), DEAD, 0.08)
            canvas.line((x - half, y + half), (x + half, y - half), DEAD, 0.08)


def draw_shots(canvas: Canvas, env: BattleEnv, now: np.ndarray, tick: np.ndarray, row: int, strength: float) -> None:
    kinds, units = env.rules.kinds, env.battles.units[row]
    places = np.where(np.isnan(now[:, [X, Y]]), np.stack([units["x"], units["y"]], axis=1), now[:, [X, Y]])
    for i in np.flatnonzero(tick[:, SHOT] != NOBODY):
        weapon, start, end = kinds["weapon"][i], places[i], places[int(tick[i, SHOT])]
        colour = HEAL_GREEN if weapon == HEAL else SHOT_COLOURS[bool(kinds["ally"][i])]
        colour = (*colour, round(255 * strength))
        if weapon == BLAST:
            reach = kinds["blast_radius"][i]
            canvas.pen.ellipse(canvas.box(*start, reach, reach), fill=(*colour[:3], round(90 * strength)), outline=colour)
            continue
        canvas.line(start, end, colour, 0.1 if weapon == HEAL else 0.07)
        if weapon == BEAM:
            ahead = (end - start) / max(np.hypot(*(end - start)), 1e-9)
            across = np.array([-ahead[1], ahead[0]]) * kinds["beam_length"][i] / 2
            canvas.line(end - across, end + across, colour, kinds["beam_width"][i])


def draw_unit(canvas: Canvas, env: BattleEnv, i: int, record: np.ndarray) -> None:
    """A disc with the type's letter, its shield as a ring, its health as a bar above."""
    kind, name = env.rules.kinds[i], env.battle.units[i][1].name
    x, y, radius = record[X], record[Y], max(kind["radius"], 0.3)
    side = ALLY if kind["ally"] else ENEMY
    canvas.pen.ellipse(canvas.box(x, y, radius, radius), fill=(*side, 190 if kind["flies"] else 255), outline=NIGHT)
    size = max(8, round(radius * 1.1 * CELL))
    canvas.text(canvas.at(x, y), LETTERS.get(name, name[0].upper()), size, "mm", (255, 255, 255))
    if kind["max_shield"] > 0 and record[SHIELD] > 0:
        turn = 360 * record[SHIELD] / kind["max_shield"]
        ring = canvas.box(x, y, radius + 0.1, radius + 0.1)
        canvas.pen.arc(ring, -90, -90 + turn, fill=SHIELD_BLUE, width=round(0.09 * canvas.scale))
    part, bar = record[HP] / kind["max_hp"], y + radius + 0.22
    canvas.pen.rectangle(canvas.box(x, bar, radius, 0.07), fill=NIGHT)
    health = (round(230 - 150 * part), round(70 + 140 * part), 80)
    canvas.pen.rectangle(canvas.box(x - radius * (1 - part), bar, radius * part, 0.07), fill=health)


def draw_strip(canvas: Canvas, env: BattleEnv, tick: np.ndarray, row: int) -> None:
    """Above the field: what is left of both sides, the battle's name and the step."""
    kinds = env.rules.kinds
    left = np.nan_to_num(tick[:, HP] + tick[:, SHIELD])
    edge, middle = 10 * SMOOTH, STRIP * SMOOTH / 2
    length = canvas.width * 0.3
    for side, colour in ((env.rules.allies, ALLY), (env.rules.enemies, ENEMY)):
        part = left[side].sum() / (kinds["max_hp"] + kinds["max_shield"])[side].sum()
        start = edge if colour == ALLY else canvas.width - edge - length
        canvas.pen.rectangle((start, middle - 12, start + length, middle + 12), fill=FLOOR)
        begin = start if colour == ALLY else start + length * (1 - part)
        canvas.pen.rectangle((begin, middle - 12, begin + length * part, middle + 12), fill=colour)
        count = f"{int((left[side] > 0).sum())} left"
        canvas.text((start + length / 2, middle), count, 11, "mm")
    title = f"{env.spec.env_id.split('/')[-1]}   {int(env.t[row])} / {env.spec.horizon}"
    canvas.text((canvas.width / 2, middle), title, 14, "mm")


def write_gif(frames: list[np.ndarray], path: str | Path, fps: int) -> None:
    """One palette for all frames keeps colours still and the file small."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    palette = Image.fromarray(frames[len(frames) // 2]).quantize(64)
    pictures = [Image.fromarray(frame).quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    pauses = [round(1000 / fps)] * (len(pictures) - 1) + [1500]
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=pauses, loop=0, optimize=True)
