"""Grid games as text and as pictures.

    view = View.of(game, state_row, returns, taken)      # what is to be seen of one state
    print(ansi(view))                                    # text for a terminal
    write_gif("hunt.gif", [picture(view), ...], fps=3)   # (H, W, 3) uint8 frames

Stags, hares and drifts have drawings of their own; an item of any other kind is a tile with its letter, and a new
kind gets a drawing by an entry in `DRAWINGS`.
"""

from __future__ import annotations

import colorsys
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from envs.errors import ConfigError
from envs.grid import BLOCK, DEADLINE, GONE, ITEM, PLAYERS, GridGame, T


@dataclass(frozen=True)
class View:
    """One state as people look at it; players and cells count from 0."""

    title: str
    kinds: tuple[str, ...]
    board: np.ndarray  # (H, W) codes of cells, as in a state row
    cells: tuple[int, ...]  # where each player is, GONE when it left
    t: int
    deadline: int
    returns: tuple[float, ...]  # of the episode so far
    taken: tuple[int, ...]  # in the last step: 1 + kind, 0 nothing
    rewards: tuple[float, ...] | None  # of the last step
    cells_before: tuple[int, ...] | None  # where each player was before the last step
    took: tuple[tuple[int, ...], ...]  # (N, kinds): what each player took in the episode so far
    labels: tuple[str, ...]  # a word about each player, such as its role

    @classmethod
    def of(
        cls,
        game: GridGame,
        state: np.ndarray,
        returns: Sequence[float] | np.ndarray,
        taken: Sequence[int] | np.ndarray,
        rewards: Sequence[float] | np.ndarray | None = None,
        before: np.ndarray | None = None,
        took: np.ndarray | None = None,
        labels: Sequence[str] | None = None,
    ) -> View:
        """`state` is one state row. With the last step's `rewards`, the state row `before` it, and `took` (N, kinds)
        counts of the episode, it also shows what was earned, where, and what those who left took with them."""
        num_players = game.num_players
        seats = slice(PLAYERS, PLAYERS + num_players)
        if took is None:
            took = np.arange(1, 1 + len(game.kinds)) == np.asarray(taken)[:, None]
        return cls(
            title=game.env_id,
            kinds=game.kinds,
            board=game.board(np.asarray(state)).copy(),
            cells=tuple(int(cell) for cell in state[seats]),
            t=int(state[T]),
            deadline=int(state[DEADLINE]),
            returns=tuple(float(x) for x in returns),
            taken=tuple(int(x) for x in taken),
            rewards=None if rewards is None else tuple(float(x) for x in rewards),
            cells_before=None if before is None else tuple(int(cell) for cell in before[seats]),
            took=tuple(tuple(int(x) for x in row) for row in took),
            labels=tuple(labels) if labels is not None else ("",) * num_players,
        )

    @property
    def ending(self) -> str:
        """Why the episode is over, or nothing if it goes on."""
        if all(cell == GONE for cell in self.cells):
            return "everybody left"
        if not (self.board >= ITEM).any():
            return f"no {' or '.join(self.kinds)} is left"
        return "time is up" if self.t >= self.deadline else ""

    def catch(self, player: int) -> str:
        """What a player took in the last step, such as "stag +5.0"; empty if nothing."""
        if not self.taken[player]:
            return ""
        earned = "" if self.rewards is None else f" {signed(self.rewards[player])}"
        return self.kinds[self.taken[player] - 1] + earned

    def bag(self, player: int) -> str:
        """What a player took in the episode, such as "2 drifts"; empty if nothing."""
        counts = zip(self.took[player], self.kinds, strict=True)
        return ", ".join(kind if count == 1 else f"{count} {kind}s" for count, kind in counts if count)

    def fate(self, player: int) -> str:
        """The last step's catch if there was one, else the player's bag, and whether it left."""
        left = "left" if self.cells[player] == GONE else ""
        done = self.catch(player) or self.bag(player)
        return f"{done}, {left}" if done and left else done or left


def signed(number: float) -> str:
    return f"{number:+.1f}" if abs(number) >= 0.05 else f"{abs(number):.1f}"


def letters(kinds: Sequence[str]) -> list[str]:
    """A capital for each kind: its initial, or its next letter that no earlier kind has."""
    chosen: list[str] = []
    for kind in kinds:
        candidates = kind.upper() + "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
        chosen.append(next((x for x in candidates if x.isalpha() and x not in chosen), "?"))
    return chosen


# ---------------------------------------------------------------------------------------------------------------------
# text
# ---------------------------------------------------------------------------------------------------------------------

TERMINAL_COLOURS = (94, 91, 95, 93, 96, 92)  # of players, in turn
BOLD, DIM = 1, 2


def legend(game: GridGame) -> str:
    """What the signs of `ansi` mean."""
    items = [f"{letter} {kind}" for letter, kind in zip(letters(game.kinds), game.kinds, strict=True)]
    return ", ".join([*items, "# block", f"1-{game.num_players} players"])


def ansi(view: View, colour: bool = False) -> str:
    """The board with a letter per item and a number per player, then a line for each player.

    `colour` adds terminal colours.
    """

    def paint(text: str, code: int) -> str:
        return f"\033[{code}m{text}\033[0m" if colour else text

    def player_colour(player: int) -> int:
        return TERMINAL_COLOURS[player % len(TERMINAL_COLOURS)]

    height, width = view.board.shape
    item_letters = letters(view.kinds)
    between = "" if len(view.cells) <= 9 else ","
    crowds = [[i for i, cell in enumerate(view.cells) if cell == here] for here in range(height * width)]
    plain, painted = [], []  # each cell's text without and with colours
    for code, crowd in zip(view.board.ravel(), crowds, strict=True):
        thing = item_letters[code - ITEM] if code >= ITEM else "#" if code == BLOCK else "" if crowd else "."
        numbers = [str(i + 1) for i in crowd]
        plain.append(thing + between.join(numbers))
        coloured = [paint(number, player_colour(i)) for number, i in zip(numbers, crowd, strict=True)]
        painted.append(paint(thing, BOLD if code >= ITEM else DIM) + between.join(coloured))
    space = max(2, max(len(text) for text in plain))
    padded = [text + " " * (space - len(bare)) for text, bare in zip(painted, plain, strict=True)]
    edge = "+" + "-" * (width * (space + 1) + 1) + "+"
    lines = [f"{view.title}   step {view.t} of {view.deadline}" + (f": {view.ending}" if view.ending else ""), edge]
    for r in range(height):
        lines.append("| " + " ".join(padded[r * width : (r + 1) * width]) + " |")
    lines.append(edge)
    label_space = max(len(label) for label in view.labels)
    for i, total in enumerate(view.returns):
        name = paint(f"player {i + 1:<{len(str(len(view.cells)))}}", player_colour(i))
        label = f" {view.labels[i]:<{label_space}}" if label_space else ""
        lines.append(f"{name}{label}  {signed(total):>6}  {view.fate(i)}".rstrip())
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# drawings of things: each fills the square that its brush stands for
# ---------------------------------------------------------------------------------------------------------------------

SMOOTH = 3  # pictures are drawn this many times larger and then reduced
INK, PAPER, GREY, PALE, GOLD = "#1f2933", "#fbfaf7", "#6b7784", "#e4e2dc", "#f2b81a"
PLAYER_COLOURS = ("#2563c9", "#d9432f", "#8a3ab9", "#e08e0b", "#0f8f8c", "#c2387f", "#5b6b1f", "#7a4b2a")


@functools.lru_cache(maxsize=64)
def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(max(size, 1))


def player_colour(player: int) -> str:
    if player < len(PLAYER_COLOURS):
        return PLAYER_COLOURS[player]
    r, g, b = colorsys.hsv_to_rgb((player * 0.618034) % 1.0, 0.65, 0.72)
    return f"#{int(r * 255):02x}{int(g * 255):02x}{int(b * 255):02x}"


class Brush:
    """Draws inside a square of a picture; places and lengths are fractions of the square's side."""

    def __init__(self, image: Image.Image, left: float, top: float, side: float):
        self.draw, self.left, self.top, self.side = ImageDraw.Draw(image, "RGBA"), left, top, side

    def at(self, x: float, y: float) -> tuple[float, float]:
        return self.left + x * self.side, self.top + y * self.side

    def oval(self, x: float, y: float, rx: float, ry: float, fill: str) -> None:
        self.draw.ellipse((*self.at(x - rx, y - ry), *self.at(x + rx, y + ry)), fill=fill)

    def box(self, x: float, y: float, width: float, height: float, fill: str, round: float = 0.0) -> None:
        corners = (*self.at(x, y), *self.at(x + width, y + height))
        self.draw.rounded_rectangle(corners, round * self.side, fill=fill)

    def shape(self, points: Sequence[tuple[float, float]], fill: str) -> None:
        self.draw.polygon([self.at(x, y) for x, y in points], fill=fill)

    def line(self, points: Sequence[tuple[float, float]], width: float, fill: str) -> None:
        pixels = max(1, round(width * self.side))
        self.draw.line([self.at(x, y) for x, y in points], fill=fill, width=pixels, joint="curve")
        for x, y in points:
            self.oval(x, y, width / 2, width / 2, fill)

    def text(self, x: float, y: float, text: str, size: float, fill: str, anchor: str = "mm", bold: bool = False):
        pixels = round(size * self.side)
        stroke = round(pixels / 40) if bold else 0
        self.draw.text(self.at(x, y), text, fill, font(pixels), anchor, stroke_width=stroke, stroke_fill=fill)


def draw_stag(brush: Brush) -> None:
    antler, coat, dark, muzzle = "#6b4423", "#a8703d", "#7d4f28", "#e3c7a1"
    for side in (-1, 1):

        def across(points: list[tuple[float, float]], side: int = side) -> list[tuple[float, float]]:
            return [(0.5 + side * x, y) for x, y in points]

        brush.line(across([(0.07, 0.44), (0.13, 0.33), (0.25, 0.25), (0.30, 0.13), (0.27, 0.04)]), 0.05, antler)
        brush.line(across([(0.13, 0.33), (0.11, 0.22), (0.13, 0.14)]), 0.042, antler)
        brush.line(across([(0.25, 0.25), (0.36, 0.23), (0.42, 0.15)]), 0.042, antler)
        brush.line(across([(0.29, 0.15), (0.20, 0.07)]), 0.036, antler)
        brush.shape(across([(0.10, 0.47), (0.20, 0.41), (0.36, 0.41), (0.31, 0.50), (0.15, 0.56)]), dark)
        brush.shape(across([(0.15, 0.48), (0.22, 0.44), (0.31, 0.43), (0.27, 0.48), (0.17, 0.52)]), muzzle)
    brush.shape([(0.31, 0.50), (0.36, 0.42), (0.64, 0.42), (0.69, 0.50), (0.62, 0.80), (0.38, 0.80)], coat)
    brush.oval(0.5, 0.50, 0.19, 0.13, coat)
    brush.oval(0.5, 0.81, 0.13, 0.14, muzzle)
    brush.shape([(0.44, 0.40), (0.56, 0.40), (0.53, 0.66), (0.47, 0.66)], dark)
    for x in (0.39, 0.61):
        brush.oval(x, 0.57, 0.038, 0.046, "#26170c")
        brush.oval(x + 0.012, 0.555, 0.013, 0.013, "white")
    brush.oval(0.5, 0.84, 0.068, 0.05, "#26170c")
    brush.oval(0.48, 0.825, 0.016, 0.01, "#8d7867")


def draw_hare(brush: Brush) -> None:
    coat, shade, inner = "#d8d0c4", "#8f8577", "#efb3ad"
    for grow, colour in ((0.018, shade), (0.0, coat)):
        for x, lean in ((0.37, -0.07), (0.63, 0.07)):
            brush.line([(x + lean, 0.14), (x + lean / 2, 0.30), (x, 0.48)], 0.15 + 2 * grow, colour)
        brush.oval(0.5, 0.66, 0.27 + grow, 0.25 + grow, colour)
    for x, lean in ((0.37, -0.07), (0.63, 0.07)):
        brush.line([(x + lean * 0.95, 0.16), (x + lean / 2, 0.30), (x + lean / 6, 0.40)], 0.068, inner)
    for side in (-1, 1):
        brush.oval(0.5 + side * 0.095, 0.765, 0.105, 0.085, "#f6f2ec")
        brush.oval(0.5 + side * 0.13, 0.61, 0.042, 0.052, "#26170c")
        brush.oval(0.5 + side * 0.13 + 0.013, 0.592, 0.014, 0.014, "white")
        for rise in (-0.035, 0.01, 0.055):
            brush.line([(0.5 + side * 0.15, 0.76 + rise / 2), (0.5 + side * 0.34, 0.755 + rise)], 0.01, shade)
    brush.box(0.465, 0.79, 0.033, 0.07, "white", 0.01)
    brush.box(0.502, 0.79, 0.033, 0.07, "white", 0.01)
    brush.shape([(0.455, 0.70), (0.545, 0.70), (0.5, 0.755)], "#d9776f")
    brush.line([(0.5, 0.75), (0.5, 0.79)], 0.012, shade)


def draw_drift(brush: Brush) -> None:
    heap = ((0.27, 0.68, 0.15), (0.45, 0.53, 0.23), (0.66, 0.62, 0.18), (0.80, 0.71, 0.11))
    brush.oval(0.5, 0.80, 0.46, 0.09, "#93aec6")
    for grow, lift, colour in ((0.018, 0.0, "#7f9db9"), (0.0, 0.0, "#dbe8f3"), (-0.03, -0.025, "white")):
        for x, y, r in heap:
            brush.oval(x, y + lift, r + grow, r + grow, colour)
        brush.box(0.12 - grow, 0.66 + lift, 0.78 + 2 * grow, 0.16 + grow, colour, 0.08)
    brush.line([(0.30, 0.72), (0.42, 0.755), (0.55, 0.74)], 0.022, "#c3d6e6")
    brush.line([(0.62, 0.66), (0.71, 0.685), (0.78, 0.675)], 0.022, "#c3d6e6")
    for x, y, r in ((0.82, 0.26, 0.085), (0.17, 0.33, 0.06)):
        for dx, dy in ((0, 1), (0.87, 0.5), (0.87, -0.5)):
            brush.line([(x - dx * r, y - dy * r), (x + dx * r, y + dy * r)], 0.02, "white")


def draw_tile(brush: Brush, letter: str, index: int) -> None:
    """An item without a drawing of its own: a tile with its letter."""
    colour = ("#b8860b", "#2f7d5b", "#7b4fa3", "#a14242", "#33658a")[index % 5]
    brush.box(0.14, 0.14, 0.72, 0.72, colour, 0.16)
    brush.box(0.19, 0.19, 0.62, 0.62, "#fff8e7", 0.12)
    brush.text(0.5, 0.5, letter, 0.46, colour, bold=True)


DRAWINGS: dict[str, Callable[[Brush], None]] = {"stag": draw_stag, "hare": draw_hare, "drift": draw_drift}
MEADOW = ("#cfe0b4", "#c6d9a8", "#a9c186")  # of a ground: two tones of cells and the frame
SNOW = ("#c3d5e4", "#b9cede", "#9db6ca")
SAND = ("#ece2cd", "#e6dac1", "#cdbd99")
GROUNDS = {"stag": MEADOW, "drift": SNOW}  # by the game's first kind; SAND for others


def draw_item(brush: Brush, kinds: Sequence[str], kind: int) -> None:
    if kinds[kind] in DRAWINGS:
        DRAWINGS[kinds[kind]](brush)
    else:
        draw_tile(brush, letters(kinds)[kind], kind)


def draw_block(brush: Brush) -> None:
    brush.box(0.05, 0.08, 0.90, 0.89, "#4f5865", 0.14)
    brush.box(0.05, 0.04, 0.90, 0.84, "#7d8794", 0.14)
    brush.box(0.12, 0.10, 0.70, 0.62, "#919ba8", 0.12)
    brush.line([(0.30, 0.22), (0.44, 0.34), (0.40, 0.48)], 0.022, "#737d8a")
    brush.line([(0.62, 0.56), (0.72, 0.50), (0.74, 0.38)], 0.022, "#737d8a")


def draw_player(brush: Brush, player: int, x: float, y: float, radius: float, rim: str = "white") -> None:
    brush.oval(x, y + radius * 0.16, radius * 1.08, radius * 1.04, "#00000040")
    brush.oval(x, y, radius * 1.08, radius * 1.08, rim)
    brush.oval(x, y, radius * 0.92, radius * 0.92, player_colour(player))
    number = str(player + 1)
    brush.text(x, y, number, radius * (1.25 if len(number) == 1 else 0.95), "white", bold=True)


def place_item(crowd: int) -> tuple[float, float, float]:
    """x, y and side of an item in a cell with `crowd` players."""
    return ((0.07, 0.07, 0.86), (0.03, 0.03, 0.70))[crowd] if crowd < 2 else (0.18, 0.0, 0.64)


def place_players(count: int, below_item: bool) -> list[tuple[float, float, float]]:
    """x, y and radius of each of `count` players in one cell; with an item they stand in the lower part."""
    if count <= 1:
        return [(0.75, 0.75, 0.19) if below_item else (0.5, 0.5, 0.30)] * count
    if count <= 4:
        columns = count if below_item else 2
    else:
        columns = int(np.ceil(np.sqrt(2 * count if below_item else count)))
    rows = -(-count // columns)
    high = 0.36 if below_item else 0.90
    radius = min(0.17 if below_item else 0.20, 0.46 / columns, high / 2 / rows)
    places = []
    for k in range(count):
        row, column = divmod(k, columns)
        in_row = min(columns, count - row * columns)
        x = 0.5 + (column - (in_row - 1) / 2) * min(0.92 / columns, 2.4 * radius)
        middle = 0.79 if below_item else 0.5
        places.append((x, middle + (row - (rows - 1) / 2) * high / rows, radius))
    return places


# ---------------------------------------------------------------------------------------------------------------------
# pictures
# ---------------------------------------------------------------------------------------------------------------------

MARGIN, PANEL = 24, 300  # pixels


def cell_size(height: int, width: int) -> int:
    """Side of a cell in pixels: boards become about 520 wide or high, cells 26 to 120."""
    return int(np.clip(520 // max(height, width), 26, 120))


def picture(view: View) -> np.ndarray:
    """(H, W, 3) uint8: the board, and a panel with the step and each player's return and catch."""
    height, width = view.board.shape
    side = cell_size(height, width)
    row_height = 62 if len(view.cells) <= 6 else 44
    panel_height = 92 + len(view.cells) * row_height + 40
    total_width = MARGIN + width * side + MARGIN + PANEL + MARGIN
    total_height = MARGIN + max(height * side, panel_height) + MARGIN
    total_width, total_height = total_width + total_width % 2, total_height + total_height % 2  # even, for video
    image = Image.new("RGB", (total_width * SMOOTH, total_height * SMOOTH), PAPER)
    draw_board(image, view, side, MARGIN, (total_height - height * side) // 2)
    draw_panel(image, view, MARGIN + width * side + MARGIN, MARGIN, row_height)
    return np.asarray(image.reduce(SMOOTH))


def draw_board(image: Image.Image, view: View, side: int, left: int, top: int) -> None:
    height, width = view.board.shape
    light, dark, frame = GROUNDS.get(view.kinds[0], SAND)
    left, top, side = left * SMOOTH, top * SMOOTH, side * SMOOTH
    rim = 6 * SMOOTH
    whole = (left - rim, top - rim, left + width * side + rim, top + height * side + rim)
    ImageDraw.Draw(image).rounded_rectangle(whole, 2 * rim, fill=frame)
    for r in range(height):
        for c in range(width):
            Brush(image, left + c * side, top + r * side, side).box(0, 0, 1, 1, light if (r + c) % 2 else dark)

    for cell in range(height * width):
        r, c = divmod(cell, width)
        corner = (left + c * side, top + r * side)
        code = int(view.board[r, c])
        crowd = [i for i, at in enumerate(view.cells) if at == cell]
        takers = [i for i, kind in enumerate(view.taken) if kind and view.cells_before and view.cells_before[i] == cell]
        if code == BLOCK:
            draw_block(Brush(image, *corner, side))
        people = sorted({*crowd, *takers})
        if code >= ITEM:
            draw_item(inside(image, corner, side, *place_item(len(people))), view.kinds, code - ITEM)
        elif takers:
            draw_catch(image, view, corner, side, takers, len(people))
        for i, place in zip(people, place_players(len(people), code >= ITEM or bool(takers)), strict=True):
            draw_player(Brush(image, *corner, side), i, *place, rim=GOLD if i in takers else "white")


def inside(image: Image.Image, corner: tuple[int, int], side: int, x: float, y: float, part: float) -> Brush:
    """A brush for a square inside a cell."""
    return Brush(image, corner[0] + x * side, corner[1] + y * side, part * side)


def draw_catch(
    image: Image.Image, view: View, corner: tuple[int, int], side: int, takers: list[int], crowd: int
) -> None:  # fmt: skip
    """What was taken on a cell in the last step: the item fading, a golden frame, and what it paid."""
    box = (corner[0], corner[1], corner[0] + side, corner[1] + side)
    ground = image.crop(box)
    faded = ground.copy()
    draw_item(inside(faded, (0, 0), side, *place_item(crowd)), view.kinds, view.taken[takers[0]] - 1)
    image.paste(Image.blend(ground, faded, 0.5), box[:2])
    brush = Brush(image, *corner, side)
    frame = (*brush.at(0.02, 0.02), *brush.at(0.98, 0.98))
    brush.draw.rounded_rectangle(frame, 0.12 * side, outline=GOLD, width=max(2, round(0.035 * side)))
    if view.rewards is not None and side >= 45 * SMOOTH:
        # takers of one item may earn differently (by their strengths): every different amount once
        text = " / ".join(dict.fromkeys(signed(view.rewards[i]) for i in takers))
        pixels = round(min(0.27, 1.6 / len(text)) * side)
        brush.draw.text(
            brush.at(0.5, 0.28), text, INK, font(pixels), "mm", stroke_width=max(1, pixels // 9), stroke_fill="white"
        )  # fmt: skip


def draw_panel(image: Image.Image, view: View, left: int, top: int, row_height: int) -> None:
    pen = Brush(image, left * SMOOTH, top * SMOOTH, SMOOTH)  # measures in pixels of the finished picture
    pen.text(0, 8, view.title, fitting(view.title, 21, PANEL), INK, "lm", bold=True)
    pen.text(0, 38, f"step {view.t} of {view.deadline}", 16, GREY, "lm")
    if view.ending:
        pen.text(PANEL, 38, view.ending, 16, INK, "rm")
    pen.box(0, 54, PANEL, 6, PALE, 3)
    pen.box(0, 54, max(6, PANEL * min(1.0, view.t / view.deadline)), 6, INK, 3)

    middle = 78 + row_height / 2
    for i, total in enumerate(view.returns):
        gone, caught = view.cells[i] == GONE, view.catch(i)
        if caught:
            pen.box(-8, middle - row_height / 2 + 2, PANEL + 16, row_height - 4, "#fdf0c4", 10)
        if gone and not caught:
            pen.oval(18, middle, 17, 17, player_colour(i))
            pen.oval(18, middle, 15, 15, PAPER)
            pen.text(18, middle, str(i + 1), 18 if i < 9 else 15, player_colour(i), bold=True)
        else:
            draw_player(pen, i, 18, middle, 17)
        name = f"player {i + 1}"
        fate = caught or ("left" if gone else "")
        lift = 11 if fate and row_height > 50 else 0
        pen.text(48, middle - lift, name, 18, GREY if gone and not caught else INK, "lm", bold=True)
        bag_left = draw_bag(image, view, i, (left + 225) * SMOOTH, (top + middle) * SMOOTH) / SMOOTH - left
        label_left = 58 + font(18).getlength(name)
        label = shortened(view.labels[i], 14, bag_left - 4 - label_left)
        pen.text(label_left, middle - lift, label, 14, GREY, "lm")
        if fate and row_height > 50:
            pen.text(48, middle + 12, fate, 15, INK if caught else GREY, "lm")
        pen.text(PANEL, middle, signed(total), 22, INK, "rm", bold=True)
        middle += row_height
    line = middle - row_height / 2 + 4
    pen.box(0, line, PANEL, 1.5, PALE)
    pen.text(48, line + 20, "mean", 16, GREY, "lm")
    pen.text(PANEL, line + 20, f"{sum(view.returns) / len(view.returns):.2f}", 18, GREY, "rm")


def draw_bag(image: Image.Image, view: View, player: int, x: float, middle: float) -> float:
    """Small drawings of what a player took, each with its number if more than one, ending at `x`; where they begin."""
    size = 30 * SMOOTH
    for kind in reversed(range(len(view.kinds))):
        count = view.took[player][kind]
        if count:
            if count > 1:
                brush = Brush(image, x, middle, SMOOTH)
                brush.text(0, 2, f"x{count}", 15, GREY, "rm")
                x -= (6 + font(15).getlength(f"x{count}")) * SMOOTH
            x -= size
            draw_item(Brush(image, x, middle - size / 2, size), view.kinds, kind)
            x -= 4 * SMOOTH
    return x


def shortened(text: str, size: int, width: float) -> str:
    """`text`, or as much of its beginning as is at most `width` wide."""
    if font(size).getlength(text) <= width:
        return text
    while text and font(size).getlength(text + "...") > width:
        text = text[:-1]
    return text + "..." if text else ""


def fitting(text: str, size: int, width: int) -> int:
    """The largest font size up to `size` at which `text` is at most `width` wide."""
    return max(10, min(size, int(size * width / max(font(size).getlength(text), 1))))


# ---------------------------------------------------------------------------------------------------------------------
# GIF
# ---------------------------------------------------------------------------------------------------------------------


def write_gif(path: str | os.PathLike, frames: Sequence[np.ndarray], fps: float, pauses: Sequence[int] = ()) -> None:
    """Write frames (H, W, 3) uint8 as a GIF that repeats; the last frame, and those numbered in `pauses`, stay longer.

    The file appears whole or not at all. All frames share one palette, so nothing flickers.
    """
    if not len(frames):
        raise ValueError("a GIF needs at least one frame")
    if fps <= 0:
        raise ConfigError(f"fps must be above 0, not {fps}")
    path = Path(path)
    duration = max(20, round(1000 / fps / 10) * 10)  # GIF counts in hundredths of a second, and viewers refuse 10 ms
    durations = [duration] * len(frames)
    for k in {*pauses, len(frames) - 1}:
        durations[k] = max(4 * duration, 1500)
    sample = np.concatenate(frames[:: max(1, len(frames) // 8)])
    palette = Image.fromarray(sample).quantize(255, dither=Image.Dither.NONE)
    images = [Image.fromarray(frame).quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        images[0].save(
            unfinished, "GIF", save_all=True, append_images=images[1:], duration=durations, loop=0, optimize=False
        )  # fmt: skip
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
