"""What the runs of a sweep say: tables, intervals and curves, for `python sweep.py report` and `results`.

What each figure means: docs/sweeps.md.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import os
import re
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from scipy import stats

from envs.errors import ConfigError

matplotlib.use("Agg")
import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from sweep import Cell, Run, Sweep

METRICS = {  # in words, for the axes
    "eval/return": "mean return per player and episode",
    "eval/win_rate": "battles won",
    "charts/episodic_return": "mean return per player and episode, in training",
    "charts/win_rate": "battles won, in training",
}
# settings that say how a run is measured, not how it learns
MEASURING = ("eval-every", "eval-episodes", "final-eval-episodes", "log-every", "checkpoint-every", "torch-threads")

# Told apart by colour-blind readers too (Okabe and Ito's, and a few more), and each line has a style besides. An
# algorithm has the same colour in every figure; other cells of a panel take the colours that are left.
COLOURS = {
    "HOP+": "#D55E00", "PPO": "#0072B2", "MAPPO": "#000000", "Hyper-MAPPO": "#E69F00", "HOP+ without trees": "#009E73",
    "QMIX": "#CC79A7", "VDN": "#56B4E9", "IQL": "#882255", "OMG": "#7766FF",
}  # fmt: skip
MORE_COLOURS = ["#56B4E9", "#CC79A7", "#882255", "#7766FF", "#772200", "#99CC77", "#332288"]
ABOUT = ("task", "cell", "algorithm", "seed", "state", "version", "curve", "command")  # columns that are no figures
BACK = 0.95  # of what it was before a switch: then a run is back
STYLES = ["-", "--", "-.", (0, (1, 1)), (0, (6, 1, 1, 1, 1, 1)), (0, (8, 2))]


# ---------------------------------------------------------------------------------------------------- a run in figures


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The rows of a run's metrics.csv, each without what it does not hold."""
    rows = []
    try:
        with open(folder / "metrics.csv", encoding="utf-8", errors="replace", newline="") as file:
            for row in csv.DictReader(line.replace("\0", "") for line in file):
                rows.append({name: value for name, text in row.items() if (value := number(text)) is not None})
    except (OSError, csv.Error):
        pass
    return rows


def number(text: object) -> float | None:
    try:
        value = float(text)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None


def read_rows(path: Path, runs: list[Run]) -> dict[Run, dict[str, str]]:
    """Of the CSV of an earlier report: its rows of finished runs."""
    usual = csv.field_size_limit(10**8)  # a curve is a long field
    try:
        with open(path, encoding="utf-8", errors="replace", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row.get("state") == "finished"]
    except (OSError, csv.Error):
        return {}
    finally:
        csv.field_size_limit(usual)
    of_folder = {word.rpartition("/")[2]: row for row in rows for word in (row.get("command") or "").split()}
    return {run: of_folder[run.name] for run in runs if run.name in of_folder}


def read_curve(text: str | None) -> list[tuple[float, float, float]]:
    """(env step, seconds, value) as write_csv writes them; nothing if it is no such list."""
    try:
        return [(float(step), float(seconds), float(value)) for step, seconds, value in json.loads(text or "[]")]
    except (TypeError, ValueError):
        return []


def curve(rows: list[dict[str, float]], metric: str) -> list[tuple[float, float, float]]:
    """(env step, seconds, value) in each row of metrics.csv that holds the metric: at each evaluation, for eval/*."""
    rows = [row for row in rows if metric in row and "global_step" in row]
    return [(row["global_step"], row.get("wall_time", math.nan), row[metric]) for row in rows]


def final_value(result: dict, metric: str, kind: str = "eval") -> float | None:
    """A run's final evaluation: eval/return is eval.return of its result.json."""
    scores = result.get(kind)
    return number(scores.get(metric.removeprefix("eval/"))) if isinstance(scores, dict) else None


def area(points: list, until: float) -> float | None:
    """Area under a curve up to a step, divided by its width: the mean return on the way there (trapezoids)."""
    if not points or points[0][0] > until:
        return None
    steps, values = np.array([p[0] for p in points]), np.array([p[2] for p in points])
    at_end = np.interp(until, steps, values)
    values, steps = np.append(values[steps < until], at_end), np.append(steps[steps < until], until)
    if len(steps) == 1:
        return float(values[0])
    return float(((values[1:] + values[:-1]) / 2 * np.diff(steps)).sum() / (steps[-1] - steps[0]))


def first_at(points: list, threshold: float) -> tuple[float, float] | None:
    """(env steps, minutes) of the first evaluation that reaches a threshold."""
    return next(((step, seconds / 60) for step, seconds, value in points if value >= threshold), None)


def value_at(points: list, step: float) -> float | None:
    """The value of the first evaluation at or after a step."""
    return next((value for at, _, value in points if at >= step), None)


def after_switch(points: list, at: float) -> dict[str, float | None]:
    """The last value before a step and the first from it on, and how many steps later BACK of the former is reached."""
    before = next((value for step, _, value in reversed(points) if step < at), None)
    later = [point for point in points if point[0] >= at]
    if before is None or not later:
        return {}
    back = first_at(later, BACK * before)
    drop = before - later[0][2]
    return {"before": before, "after": later[0][2], "drop": drop, "steps_to_be_back": back[0] - at if back else None}


# ---------------------------------------------------------------------------------------------------- statistics


def iqm(values, axis=-1):
    """Interquartile mean: the mean without the lowest and the highest quarter (of n values, int(n / 4) each)."""
    return stats.trim_mean(values, 0.25, axis=axis)


def p_improvement(x, y, axis=-1):
    """Share of pairs (a seed of x, a seed of y) in which x is better; ties count half."""
    x, y = np.moveaxis(x, axis, -1)[..., :, None], np.moveaxis(y, axis, -1)[..., None, :]
    return ((x > y) + 0.5 * (x == y)).mean((-2, -1))


def mean_difference(x, y, axis=-1):
    """Mean over the seeds of x minus mean over the seeds of y."""
    return x.mean(axis) - y.mean(axis)


def interval(statistic: Callable, *samples, axis: int = 0):
    """95 % percentile bootstrap over seeds, or None with fewer than two of them."""
    samples = [np.asarray(sample, float) for sample in samples]
    if min(sample.shape[axis] for sample in samples) < 2:
        return None
    options = {"vectorized": True, "axis": axis, "method": "percentile", "n_resamples": 4999}
    low, high = stats.bootstrap(samples, statistic, rng=np.random.default_rng(0), **options).confidence_interval
    return low, high


def with_interval(statistic: Callable, *samples: list[float], form: str = ".3f") -> str:
    """A statistic over seeds with its interval, as a cell of a table."""
    if not all(samples):
        return "-"
    bounds = interval(statistic, *samples)
    text = f"{statistic(*map(np.array, samples)):{form}}"
    return f"{text} [{bounds[0]:{form}}, {bounds[1]:{form}}]" if bounds else f"{text} (1 seed)"


def difference(values: dict[int, float], base: dict[int, float]) -> str:
    """A cell minus its baseline, seed -> value each: a mean over pairs if they have the same seeds, else of means."""
    if values.keys() == base.keys():
        return with_interval(np.mean, [value - base[seed] for seed, value in values.items()], form="+.3f")
    return with_interval(mean_difference, list(values.values()), list(base.values()), form="+.3f")


def three_figures(values: list[float]) -> str:
    """The format that shows three figures of numbers of any size: 0.00512, 48.3, 4,446."""
    size = max(map(abs, values), default=0)
    return f",.{max(0, 2 - math.floor(math.log10(size)))}f" if 0 < size < math.inf else ".3f"


# ---------------------------------------------------------------------------------------------------- names


def titles(sweep: Sweep) -> dict[str, str]:
    """Cell -> its algorithm and, where that one has several cells in a task, what differs in words."""
    found: dict[str, str] = {}
    for cell in sweep.cells:
        others = [c for c in sweep.cells if c is not cell and (c.task, c.algorithm) == (cell.task, cell.algorithm)]
        own = {key: value for key, value in cell.args.items() if key not in MEASURING}
        own = {key: value for key, value in own.items() if any(c.settings.get(key) != value for c in others)}
        differs = [cell.label] if cell.label else [in_words(key, value) for key, value in own.items()]
        title = ", ".join([cell.algorithm, *differs])
        found[cell.name] = f"{title} ({cell.name})" if any(found.get(c.name) == title for c in others) else title
    return found


def in_words(key: str, value: object) -> str:
    words = key.replace("-", " ")
    if isinstance(value, bool):
        return words if value else f"no {words}"
    return f"{value:,} steps" if key == "total-timesteps" else f"{words} {value}"


def baseline_of(cell: Cell, cells: list[Cell]) -> Cell | None:
    """The cell that this one is compared with: the one of that name, or of that algorithm, in the same task."""
    same_task = [c for c in cells if c.task == cell.task]
    named = [c for c in same_task if c.name == cell.baseline]
    named = named or [c for c in same_task if cell.baseline in (c.parent, c.algorithm)]
    return named[0] if len(named) == 1 and named[0] is not cell else None


# ---------------------------------------------------------------------------------------------------- tables


class Results:
    """Every figure of every finished run of a sweep, by the name it has in the CSV, and the tables made of them."""

    def __init__(self, sweep: Sweep, runs: list[Run], earlier: Path | None = None):
        """`earlier`: the CSV of an earlier report, where runs stand whose folders are gone."""
        self.sweep, self.runs, self.titles = sweep, runs, titles(sweep)
        self.logs = {run: read_metrics(run.folder) for run in runs if run.state == "finished"}
        kept = read_rows(earlier, [run for run in runs if run.state == "missing"]) if earlier else {}
        self.versions = {run: run.read("args.json").get("code_version") for run in self.logs}
        self.versions |= {run: row.get("version") or None for run, row in kept.items()}
        self.curves = {run: curve(rows, sweep.metric) for run, rows in self.logs.items()}
        self.curves |= {run: read_curve(row.get("curve")) for run, row in kept.items()}
        self.figures = {run: self.measure(run) for run in self.logs}
        for run, row in kept.items():
            self.figures[run] = {name: number(text) for name, text in row.items() if name and name not in ABOUT}
        self.baselines = {cell.name: baseline_of(cell, sweep.cells) for cell in sweep.cells}

    def measure(self, run: Run) -> dict[str, float | None]:
        points, result, metric = self.curves[run], run.read("result.json"), self.sweep.metric
        ends = [other[-1][0] for r, other in self.curves.items() if r.cell.task == run.cell.task and other]
        seconds, final = number(result.get("wall_time")), final_value(result, metric)
        row = {
            "final": points[-1][2] if final is None and points else final,
            "auc": area(points, min(ends, default=0)),
            "sps": result.get("global_step", 0) / seconds if seconds else None,
            "minutes": seconds / 60 if seconds else None,
            "greedy": final_value(result, metric, "eval_greedy"),
            "best": final_value(result, metric, "eval_best"),
        }
        for step in self.sweep.at_steps:
            row[f"at_{step}"] = value_at(points, step)
        for threshold in run.cell.thresholds:
            hit = first_at(points, threshold) or (None, None)
            row[f"steps_to_{threshold:g}"], row[f"minutes_to_{threshold:g}"] = hit
        if run.cell.switch_at:
            watched = curve(self.logs[run], run.cell.switch_metric or metric)
            row |= after_switch(watched, run.cell.switch_at)
        for name in run.cell.also:
            values = [value for _, _, value in curve(self.logs[run], name)]
            row[name] = float(np.mean(values)) if values else None
            if name.startswith("eval/"):
                row[f"final {name}"] = final_value(result, name)
        return row

    def runs_of(self, cell: Cell, finished: bool = True) -> list[Run]:
        return [run for run in self.runs if run.cell is cell and (run in self.figures or not finished)]

    def by_seed(self, cell: Cell, name: str) -> dict[int, float]:
        """One figure of a cell: seed -> value, where it was measured."""
        values = {run.seed: self.figures[run].get(name) for run in self.runs_of(cell)}
        return {seed: value for seed, value in values.items() if value is not None}

    def values(self, cell: Cell, name: str) -> list[float]:
        """Of all finished seeds or of none: a mean over some of them would be of others than its neighbours."""
        values = list(self.by_seed(cell, name).values())
        return values if len(values) == len(self.runs_of(cell)) else []

    def gaps(self) -> list[str]:
        """What is missing, in words."""
        found = []
        for cell in self.sweep.cells:
            done, missing = self.runs_of(cell), [run for run in self.runs_of(cell, False) if run not in self.figures]
            if missing:
                words = ", ".join(f"seed {run.seed} {run.state}" for run in missing)
                found.append(f"{cell.name}: {len(done)} of {len(cell.seeds)} seeds finished ({words})")
        return found

    # what columns say of a cell

    def mean(self, name: str, cell: Cell, statistic: Callable = np.mean) -> str:
        return with_interval(statistic, self.values(cell, name))

    def mean_alone(self, name: str, form: str, cell: Cell) -> str:
        values = self.values(cell, name)
        return f"{np.mean(values):{form}}" if values else "-"

    def mean_over_training(self, name: str, cell: Cell) -> str:
        values = self.values(cell, name)
        return with_interval(np.mean, values, form=three_figures(values))

    def minus_baseline(self, name: str, cell: Cell) -> str:
        base = self.baselines[cell.name]
        return difference(self.by_seed(cell, name), self.by_seed(base, name)) if base else "-"

    def reached(self, threshold: float, cell: Cell) -> str:
        if threshold not in cell.thresholds or not self.runs_of(cell):
            return "-"
        steps = list(self.by_seed(cell, f"steps_to_{threshold:g}").values())
        minutes = list(self.by_seed(cell, f"minutes_to_{threshold:g}").values())
        count = f"{len(steps)} of {len(self.runs_of(cell))}"
        return f"{np.mean(steps):,.0f} ({np.mean(minutes):.2f} min; {count})" if steps else f"not reached ({count})"

    def back(self, cell: Cell) -> str:
        if not self.values(cell, "before"):
            return "-"
        steps = list(self.by_seed(cell, "steps_to_be_back").values())
        count = f"{len(steps)} of {len(self.runs_of(cell))}"
        return f"{np.mean(steps):,.0f} ({count})" if steps else f"never ({count})"

    def seeds(self, cell: Cell) -> str:
        done, wanted = len(self.runs_of(cell)), len(cell.seeds)
        return str(done) if done == wanted else f"**{done} of {wanted}**"

    def better(self, cell: Cell) -> str:
        if base := self.baselines[cell.name]:
            return with_interval(p_improvement, self.values(cell, "final"), self.values(base, "final"), form=".2f")
        return "baseline" if cell.baseline in (cell.name, cell.algorithm) else "-"

    def baseline(self, cell: Cell) -> str:
        return base.name if (base := self.baselines[cell.name]) else "-"

    def time_shares(self, cell: Cell) -> str:
        spent = [run.read("result.json").get("time") or {} for run in self.runs_of(cell)]
        total = sum(sum(times.values()) for times in spent) or 1.0
        names = dict.fromkeys(name for times in spent for name in times)
        shares = {name: sum(times.get(name, 0.0) for times in spent) / total for name in names}
        return ", ".join(f"{name.removeprefix('time/')} {share:.0%}" for name, share in shares.items()) or "-"

    def table(self, columns: dict[str, Callable[[Cell], str]]) -> str:
        """A row for each cell of which a column says anything; nothing at all if there is none."""
        rows = [[cell.task, cell.name, *(column(cell) for column in columns.values())] for cell in self.sweep.cells]
        rows = [row for row in rows if any(text != "-" for text in row[2:])]
        lines = [["task", "cell", *columns], ["---"] * (len(columns) + 2), *rows]
        lines = ["| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in lines]
        return "\n".join(lines) if rows else ""

    def tables(self) -> list[str]:
        """The first is the overview."""
        metric, cells = f"`{self.sweep.metric}`", self.sweep.cells
        overview = {
            "algorithm": lambda cell: self.titles[cell.name],
            "seeds": self.seeds,
            f"final {metric}, mean": partial(self.mean, "final"),
            "IQM": partial(self.mean, "final", statistic=iqm),
            "mean over training (AUC)": partial(self.mean, "auc"),
            "P(better than baseline)": self.better,
            "steps/s": partial(self.mean_alone, "sps", ",.0f"),
            "minutes": partial(self.mean_alone, "minutes", ",.1f"),
        }
        compared = {
            "baseline": self.baseline,
            f"final {metric} minus the baseline's": partial(self.minus_baseline, "final"),
            "AUC minus the baseline's": partial(self.minus_baseline, "auc"),
        }
        thresholds = sorted({threshold for cell in cells for threshold in cell.thresholds})
        also = dict.fromkeys(name for cell in cells for name in cell.also)
        evaluated = {}
        for name in (name for name in also if name.startswith("eval/")):
            evaluated[f"final `{name}`, mean"] = partial(self.mean, f"final {name}")
            evaluated[f"final `{name}` minus the baseline's"] = partial(self.minus_baseline, f"final {name}")
        switch = {
            "last before the switch": partial(self.mean, "before"),
            "first after it": partial(self.mean, "after"),
            "drop": partial(self.mean, "drop"),
            "drop minus the baseline's": partial(self.minus_baseline, "drop"),
            f"env steps to {BACK:.0%} of before (seeds)": self.back,
        }
        ends = {
            "final, greedy play": partial(self.mean, "greedy"),
            "final of the best checkpoint": partial(self.mean, "best"),
            "time goes to": self.time_shares,
        }
        all_columns = [
            overview,
            compared,
            {f"env steps to {value:g} (minutes; seeds)": partial(self.reached, value) for value in thresholds},
            {f"{metric} at {step:,} steps": partial(self.mean, f"at_{step}") for step in self.sweep.at_steps},
            evaluated,
            switch if any(cell.switch_at for cell in cells) else {},
            {f"`{name}`, mean over training": partial(self.mean_over_training, name) for name in also},
            ends,
        ]
        return [self.table(columns) for columns in all_columns]

    def remarks(self) -> str:
        """What a careful reader should know about the figures."""
        sweep, metric, notes = self.sweep, self.sweep.metric, [run.read("sweep.json") for run in self.figures]
        episodes = [run.cell.settings.get("final-eval-episodes") for run in self.figures]
        facts = {
            "Final evaluation: episodes per seed": episodes,
            "Machine": [note.get("machine") for note in notes],
            "Minutes were measured with engine": [note.get("engine") for note in notes],
            "Versions of the code": [*self.versions.values()],
        }
        lines = [f"`{metric}`: {METRICS[metric]}."] if metric in METRICS else []
        for words, values in facts.items():
            if known := sorted({str(value) for value in values if value is not None}):
                lines.append(f"{words}: {'; '.join(known)}.")
        lines.append("Intervals: 95 %, percentile bootstrap over seeds; with few seeds they are too narrow.")
        if any(len(self.runs_of(cell)) == 2 for cell in sweep.cells):
            lines.append("With two seeds an interval is no more than the two values.")
        for task in dict.fromkeys(cell.task for cell in sweep.cells):
            ends = {points[-1][0] for run, points in self.curves.items() if run.cell.task == task and points}
            if len(ends) > 1:
                lines.append(f"{task}: runs differ in length; AUC is taken up to {min(ends):,.0f} steps for all.")
        if gone := len(self.figures) - len(self.logs):
            lines.append(f"{gone} of {len(self.figures)} runs are those of an earlier report, their folders are gone.")
        if any(final_value(run.read("result.json"), metric) is None for run in self.logs):
            lines.append(f"Some final evaluations hold no `{metric}`: the last value of the curve stands for them.")
        pairs = [(cell, base) for cell in sweep.cells if (base := self.baselines[cell.name])]
        apart = [a.name for a, b in pairs if self.by_seed(a, "final").keys() != self.by_seed(b, "final").keys()]
        if pairs:
            apart = f"; not paired: {', '.join(apart)}" if apart else ""
            lines.append(f"Differences to the baseline are paired by seed where both cells have the same seeds{apart}.")
        return "\n".join(f"- {line}" for line in lines)

    def commands(self) -> str:
        lines = [f"python sweep.py run {Path(os.path.relpath(self.sweep.path)).as_posix()}"]
        for cell in self.sweep.cells:
            lines.append(f"\n# {cell.name}: seeds {', '.join(map(str, cell.seeds))}")
            lines.append(shlex.join(self.runs_of(cell, False)[0].command()))
        block = "\n".join(["```bash", *lines, "```"])
        intro = "All runs at once, then the command of each cell for its first seed:"
        return f"<details><summary>Commands and seeds</summary>\n\n{intro}\n\n{block}\n\n</details>"


def write_report(sweep: Sweep, runs: list[Run], out: Path) -> list[str]:
    """<name>.md, .csv and .png in a folder. Returns what is missing, in words."""
    results = Results(sweep, runs, out / f"{sweep.name}.csv")
    gaps, (overview, *tables) = results.gaps(), results.tables()
    warning = "**Not complete.** " + "; ".join(gaps) + ". The figures below are of the finished seeds only."
    curves = f"![{sweep.name}: {METRICS.get(sweep.metric, sweep.metric)} over env steps]({sweep.name}.png)"
    parts = [f"## {sweep.name}", sweep.description.strip(), warning if gaps else "", overview, curves, *tables]
    parts += [results.remarks(), results.commands()]
    (out / f"{sweep.name}.md").write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")
    write_csv(results, out / f"{sweep.name}.csv")
    picture = out / f"{sweep.name}.png"
    gone = [run for run in results.figures if run not in results.logs]
    if not picture.exists() or all(results.curves[run] for run in gone):  # one that shows more is kept
        draw(results, picture)
    return gaps


def write_csv(results: Results, path: Path) -> None:
    """One line per run."""
    names = dict.fromkeys(name for row in results.figures.values() for name in row)
    with open(path, "w", encoding="utf-8", newline="") as file:
        *about, last = ABOUT
        writer = csv.DictWriter(file, [*about, *names, last], restval="")
        writer.writeheader()
        for cell in results.sweep.cells:
            for run in results.runs_of(cell, False):
                state, version = "finished" if run in results.figures else run.state, results.versions.get(run)
                points = [(int(step), round(seconds, 2), value) for step, seconds, value in results.curves.get(run, [])]
                points = json.dumps(points, separators=(",", ":"))
                values = [cell.task, cell.name, results.titles[cell.name], run.seed, state, version, points]
                row = dict(zip(about, values, strict=True)) | results.figures.get(run, {})
                writer.writerow(row | {"command": shlex.join(run.command())})


# ---------------------------------------------------------------------------------------------------- curves


def colours(cells: list[Cell]) -> dict[str, str]:
    """Cell -> colour in a panel: the first of an algorithm has that algorithm's."""
    first = {cell.algorithm: cell for cell in reversed(cells) if cell.algorithm in COLOURS}
    found = {cell.name: COLOURS[algorithm] for algorithm, cell in first.items()}
    left = [colour for colour in [*MORE_COLOURS, *COLOURS.values()] if colour not in found.values()]
    others = [cell.name for cell in cells if cell.name not in found]
    return found | dict(zip(others, itertools.cycle(left), strict=False))


def draw(results: Results, path: Path) -> None:
    """One panel per task with anything to show."""
    panels: dict[str, list[Cell]] = {}
    for cell in results.sweep.cells:
        if any(results.curves[run] for run in results.runs_of(cell)):
            panels.setdefault(cell.task, []).append(cell)
    columns = min(3, len(panels)) or 1
    rows = math.ceil(len(panels) / columns) or 1
    size = (5.2 * columns, (3.8 + 0.19 * max(map(len, panels.values()), default=0)) * rows)  # legends stand below
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, (task, cells) in zip(axes.flat, panels.items(), strict=False):
        axis.set(title=task, xlabel="env steps")
        draw_panel(axis, cells, results)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_panel(axis: plt.Axes, cells: list[Cell], results: Results) -> None:
    """Means over seeds with their intervals and, where there is room for them, single seeds thin."""
    colour, metric = colours(cells), results.sweep.metric
    for cell, style in zip(cells, itertools.cycle(STYLES), strict=False):
        curves = [results.curves[run] for run in results.runs_of(cell) if results.curves[run]]
        end = min(points[-1][0] for points in curves)
        steps = np.array(sorted({step for points in curves for step, _, _ in points if step <= end}))
        values = np.array([np.interp(steps, [p[0] for p in points], [p[2] for p in points]) for points in curves])
        count = f"{len(curves)} seed{'s' if len(curves) > 1 else ''}"
        kind = {"color": colour[cell.name], "ls": style}
        axis.plot(steps, values.mean(0), label=f"{results.titles[cell.name]}, {count}", lw=1.8, **kind)
        if len(cells) <= 4:
            axis.plot(steps, values.T, lw=0.5, alpha=0.4, **kind)
        if bounds := interval(np.mean, values):
            axis.fill_between(steps, *bounds, color=colour[cell.name], alpha=0.15, lw=0)
    for threshold in {threshold for cell in cells for threshold in cell.thresholds}:
        axis.axhline(threshold, color="0.6", lw=0.8, ls=":")
    axis.set_ylabel(METRICS.get(metric, metric.rpartition("/")[2].replace("_", " ")))
    axis.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    if metric.endswith("win_rate"):
        axis.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    axis.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), handlelength=3.5)
    axis.spines[["top", "right"]].set_visible(False)


# ---------------------------------------------------------------------------------------------------- docs/results.md

RESULTS_HEADER = """# Results

Assembled by `python sweep.py results` from the files in `docs/results/`; do not edit this one. Each part names its
seeds, commands and machine. Figures are means over seeds with 95 % bootstrap intervals in brackets; IQM is the
interquartile mean; AUC is the area under the evaluation curve divided by its width, the mean return during training;
P(better) is the share of pairs of seeds in which a cell ends above its baseline (ties count half).
See [sweeps](sweeps.md).
"""


def write_results(folder: Path, first: list[str]) -> Path:
    """docs/results.md from docs/results/*.md: the names given, then those of order.txt there, then the others."""
    parts = {path.stem: path for path in sorted(folder.glob("*.md"))}
    if unknown := [name for name in first if name not in parts]:
        raise ConfigError(f"no {folder / unknown[0]}.md; there are: {', '.join(parts) or 'none'}")
    listed = (folder / "order.txt").read_text(encoding="utf-8").split() if (folder / "order.txt").exists() else []
    texts = [RESULTS_HEADER]
    for name in dict.fromkeys([*first, *(name for name in listed if name in parts), *parts]):
        text = parts[name].read_text(encoding="utf-8").strip()
        texts.append(re.sub(r"\]\((?![a-z]+:|/|#)(\./)?([^)]+)\)", rf"]({folder.name}/\2)", text) + "\n")
    target = folder.parent / f"{folder.name}.md"
    target.write_text("\n".join(texts), encoding="utf-8")
    return target
