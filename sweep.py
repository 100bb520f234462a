"""Many runs, one command, one report.

A sweep is a small TOML file in `experiments/`: scripts, seeds and settings. Each cell and seed of it becomes one
ordinary command line of an ordinary script, in a run folder of its own.

    python sweep.py run experiments/msh_selfplay.toml --dry-run       the commands, and nothing else
    python sweep.py run experiments/msh_selfplay.toml --jobs 2        runs them; the same line goes on after a stop
    python sweep.py run experiments/msh_selfplay.toml --engine ray    the same commands on a Ray cluster
    python sweep.py report experiments/msh_selfplay.toml              runs/msh_selfplay/report/*.{md,csv,png}
    python sweep.py report experiments/msh_selfplay.toml --docs       docs/results/msh_selfplay.{md,csv,png}
    python sweep.py results                                           docs/results.md from docs/results/*.md

This file reads sweeps and runs them; report.py makes tables and curves of the results, sweep_ray.py knows Ray. How to
write a sweep, and what each figure of a report means: docs/sweeps.md.
"""

import argparse
import ast
import contextlib
import csv
import difflib
import fnmatch
import hashlib
import io
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

import sweep_ray
from envs import processes, system
from envs.errors import ConfigError
from envs.guard import StopSignals, guarded

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

SWEEP_KEYS = {
    "name": "str", "description": "str", "expected_minutes": "float", "metric": "str", "at_steps": "list[int]",
}  # fmt: skip
SHARED_KEYS = {  # of the file for all cells, or of one cell
    "script": "str", "algorithm": "str", "baseline": "str",
    "seeds": "list[int]", "thresholds": "list[float]", "also": "list[str]", "switch_at": "int", "switch_metric": "str",
}  # fmt: skip
CELL_KEYS = SHARED_KEYS | {"label": "str", "task": "str"}
SET_HERE = ("seed", "run-dir", "resume", "track", "wandb-group", "wandb-tags")  # flags that only sweep.py sets
TRIES = 2  # a failed run is tried once more
LOSSES = 20  # a run whose Ray worker or node died goes on elsewhere, at most so often


# ---------------------------------------------------------------------------------------------------- flags of a script


class Source:
    """A Python file, read and never run."""

    def __init__(self, path: Path):
        self.path = path
        self.body = ast.parse(path.read_text(encoding="utf-8")).body

    def find(self, name: str) -> "tuple[Source, ast.AST | None]":
        """The class or expression that a name stands for, and the file it is written in; imports are followed."""
        for node in self.body:
            match node:
                case ast.ClassDef(name=found) if found == name:
                    return self, node
                case ast.Assign(targets=[ast.Name(id=found)]) if found == name:
                    return self, node.value
                case ast.ImportFrom(module=str(module)):
                    for alias in node.names:
                        if name == (alias.asname or alias.name):
                            return self.find_in(module, alias.name)
        return self, None

    def find_in(self, module: str, name: str) -> "tuple[Source, ast.AST | None]":
        for folder in (self.path.parent, Path(), Path(__file__).parent):
            path = folder / (module.replace(".", "/") + ".py")
            if path.is_file():
                return Source(path).find(name)
        return self, None  # a library's

    def fields(self, class_name: str) -> dict[str, tuple[ast.expr, object]]:
        """Flag -> (type, default) of a dataclass. What a class says of a field replaces what its bases say."""
        source, node = self.find(class_name)
        fields = {}
        if not isinstance(node, ast.ClassDef):
            return fields
        for base in reversed(node.bases):
            if isinstance(base, ast.Name):
                fields |= source.fields(base.id)
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                try:
                    default = ast.literal_eval(item.value) if item.value else None
                except ValueError:  # an expression: its text will do
                    default = ast.unparse(item.value)
                fields[item.target.id.replace("_", "-")] = (source.plain(item.annotation), default)
        return fields

    def plain(self, kind: ast.expr) -> ast.expr:
        """A type without what is said besides: Positive, which is Annotated[int, Range(1)], becomes int."""
        match kind:
            case ast.Name(id=name):
                source, meaning = self.find(name)
                return source.plain(meaning) if isinstance(meaning, ast.expr) else kind
            case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[inner, *_])):
                return self.plain(inner)
            case ast.BinOp(op=ast.BitOr(), left=left, right=right):
                return ast.BinOp(self.plain(left), ast.BitOr(), self.plain(right))
        return kind


def accepts(kind: ast.expr, value) -> bool:
    """Whether a value of a TOML file fits a type. Types this does not know accept everything."""
    types = {"bool": bool, "int": int, "float": (int, float), "str": str, "dict": dict}
    match kind:
        case ast.Name(id=name) if name in types:
            return isinstance(value, types[name]) and (name == "bool" or not isinstance(value, bool))
        case ast.Constant(value=None):
            return False
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            return accepts(left, value) or accepts(right, value)
        case ast.Subscript(value=ast.Name(id=outer), slice=inner):
            inners = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            if outer == "Literal":
                return any(ast.literal_eval(choice) == value for choice in inners)
            if outer in ("list", "tuple"):
                return isinstance(value, list) and all(accepts(inners[0], v) for v in value)
    return True


def flag(key: str, value) -> list[str]:
    """`key = value` as words of a command line: --key value; --key or --no-key for a switch."""
    if isinstance(value, bool):
        return [f"--{key}" if value else f"--no-{key}"]
    words = [str(v) for v in (value if isinstance(value, list) else [value])]
    return [f"--{key}={words[0]}"] if len(words) == 1 and words[0].startswith("-") else [f"--{key}", *words]


# ---------------------------------------------------------------------------------------------------- the sweep file


@dataclass
class Cell:
    name: str
    parent: str
    """name in the file; differs from `name` where a grid made several cells of one"""
    script: str
    seeds: list[int]
    args: dict
    """what the file sets: flag -> value"""
    settings: dict
    """`args` over the script's own defaults"""
    flags: list[str]
    line: int
    algorithm: str
    task: str
    """cells of one task are compared, in one panel (default: the env id)"""
    label: str = ""
    """what differs from other cells of this algorithm, in words"""
    baseline: str = ""
    thresholds: list[float] = field(default_factory=list)
    also: list[str] = field(default_factory=list)
    """more columns of metrics.csv: the report shows their means over training"""
    switch_at: int = 0
    """env steps after which the task is another (0: it stays); the report shows the drop and the way back"""
    switch_metric: str = ""
    """where that shows (default: the sweep's metric)"""


@dataclass
class Sweep:
    path: Path
    cells: list[Cell]
    name: str
    description: str = ""
    expected_minutes: float | None = None
    metric: str = "eval/return"
    at_steps: list[int] = field(default_factory=list)


def hint(key: str, known) -> str:
    close = difflib.get_close_matches(key, known, 1)
    return f'; did you mean "{close[0]}"?' if close else f"; known: {', '.join(sorted(known))}"


class SweepFile:
    """A TOML file, and whatever is wrong in it, named with its line."""

    def __init__(self, path: Path):
        self.path = path
        self.fields: dict[str, dict] = {}  # of each script
        try:
            text = path.read_text(encoding="utf-8")
            self.data = tomllib.loads(text)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
        except RecursionError:
            raise ConfigError(f"{path} is no sweep: it is nested too deeply") from None
        except tomllib.TOMLDecodeError as error:
            at = re.search(r"line (\d+)", str(error))
            raise ConfigError(f"{path}:{at[1] if at else len(text.splitlines())}: not TOML: {error}") from None
        no_prose = re.sub(r"('''|\"\"\").*?\1", lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL)
        self.lines = [line.partition("#")[0] for line in no_prose.splitlines()]

    def line(self, key: str, start: int = 1) -> int:
        """The line in which a key is set, from a line on; that line itself if it is not."""
        pattern = re.compile(rf"""(.*[\s{{,."'])?{re.escape(key)}["']?\s*=""")
        return next((n for n in range(start, len(self.lines) + 1) if pattern.match(self.lines[n - 1])), start)

    def header(self, pattern: str, index: int = 0) -> int:
        """The line of a table's header."""
        found = [number for number, line in enumerate(self.lines, 1) if re.match(pattern, line.strip())]
        return found[index] if index < len(found) else 1

    def fail(self, line: int, message: str):
        raise ConfigError(f"{self.path}:{line}: {message}")

    def check_table(self, table: dict, known: dict[str, str], start: int = 1) -> None:
        for key, value in table.items():
            if key not in known:
                self.fail(self.line(key, start), f'unknown key "{key}"{hint(key, known)}')
            if not accepts(ast.parse(known[key], mode="eval").body, value):
                found = json.dumps(value, default=str)
                self.fail(self.line(key, start), f'"{key}" must be {known[key]}, not {found}')
        if "seeds" in table and (not table["seeds"] or len(set(table["seeds"])) < len(table["seeds"])):
            self.fail(self.line("seeds", start), '"seeds" must name each seed once, and at least one')

    def check_script(self, script: str, line: int) -> None:
        """Reads the flags of a script."""
        if not Path(script).is_file():
            self.fail(line, f'there is no script "{script}"{hint(script, [p.name for p in Path().glob("*.py")])}')
        try:
            self.fields[script] = Source(Path(script)).fields("Args")
        except (SyntaxError, UnicodeDecodeError) as error:
            self.fail(line, f"{script} is not a Python script: {error}")
        if missing := {"seed", "run-dir", "resume"} - set(self.fields[script]):
            self.fail(line, f"{script} is no training script: its Args lack {', '.join(sorted(missing))}")

    def check_args(self, table: dict, start: int, script: str, grid: bool = False) -> dict:
        """The settings in a table, by the names that the script's flags have."""
        fields, args = self.fields[script], {}
        for key, value in table.items():
            name, line = key.replace("_", "-"), self.line(key, start)
            if name in SET_HERE:
                self.fail(line, f'"{key}" is set by sweep.py itself')
            if name not in fields:
                self.fail(line, f'{script} has no setting "{key}"{hint(name, set(fields) - set(SET_HERE))}')
            if name in args:
                self.fail(line, f'"{key}" is set twice')
            if grid and not (isinstance(value, list) and value):
                self.fail(line, f'"{key}" in a grid must be a list of values, not {json.dumps(value, default=str)}')
            kind = fields[name][0]
            for v in value if grid else [value]:
                if not accepts(kind, v):
                    found = json.dumps(v, default=str)
                    self.fail(line, f'"{key}" of {script} must be {ast.unparse(kind)}, not {found}')
            args[name] = value
        return args

    def cells(self, index: int) -> list[Cell]:
        """A table of [[cells]]: one cell, or one for each combination of its grid."""
        table, line = self.data["cells"][index], self.header(r"\[\[\s*cells", index)
        self.check_table(table, CELL_KEYS | {"name": "str", "args": "dict", "grid": "dict"}, line)
        about = {key: self.data[key] for key in SHARED_KEYS if key in self.data}
        about |= {key: table[key] for key in CELL_KEYS if key in table}
        for key in ("name", "script", "seeds"):
            if key not in table | about:
                self.fail(line, f'this cell has no "{key}"')
        script = about["script"]
        if script not in self.fields:
            self.check_script(script, self.line("script", line if "script" in table else 1))
        fixed = self.check_args(self.data.get("fixed", {}), self.header(r"\[\s*fixed"), script)
        own = self.check_args(table.get("args", {}), line, script)
        grid = self.check_args(table.get("grid", {}), line, script, grid=True)
        for key in grid:
            if key in own:
                self.fail(line, f'"{key}" is in both args and grid of cell "{table["name"]}"')
        fields, cells = self.fields[script], []
        for values in itertools.product(*grid.values()):
            chosen = dict(zip(grid, values, strict=True))
            args = fixed | own | chosen
            settings = {key: default for key, (_, default) in fields.items()} | args
            settings = {k: v for k, v in settings.items() if k not in SET_HERE and not k.startswith("wandb-")}
            varied = [f"{key}={value}" for key, value in chosen.items() if len(grid[key]) > 1]
            cell = Cell(
                name=re.sub(r"[^\w.=+,-]+", "-", "_".join([table["name"], *varied])),
                parent=table["name"],
                args=args,
                settings=json.loads(json.dumps(settings, default=str)),  # as sweep.json will give them back
                flags=[word for key, value in args.items() for word in flag(key, value)],
                line=line,
                **{"algorithm": Path(script).stem, "task": str(settings.get("env-id", ""))} | about,
            )
            cells.append(cell)
        return cells


def load(path: Path) -> Sweep:
    """Reads and checks a sweep file."""
    file = SweepFile(path)
    data = file.data
    file.check_table(data, SWEEP_KEYS | SHARED_KEYS | {"fixed": "dict", "cells": "list[dict]"})
    name = data.get("name", path.stem)
    if not re.fullmatch(r"[\w.+-]+", name):
        file.fail(file.line("name"), f'"name" may hold letters, digits and . _ + - only, not "{name}"')
    if not data.get("cells"):
        file.fail(1, "no [[cells]]: nothing to run")
    cells = [cell for index in range(len(data["cells"])) for cell in file.cells(index)]
    for a, b in itertools.combinations(cells, 2):
        if a.name == b.name:
            file.fail(b.line, f'a cell is called "{b.name}" already (line {a.line})')
        if (a.script, a.settings) == (b.script, b.settings):
            both = f'cells "{a.name}" (line {a.line}) and "{b.name}"'
            file.fail(b.line, f"{both} would be the same run (same settings)")
    for cell in cells:
        if cell.baseline and not any(cell.baseline in (c.name, c.parent, c.algorithm) for c in cells):
            start = 1 if cell.baseline == data.get("baseline") else cell.line
            file.fail(file.line("baseline", start), f'baseline "{cell.baseline}" is no cell or algorithm of this file')
    return Sweep(path, cells, **{"name": name} | {key: data[key] for key in SWEEP_KEYS if key in data})


# ---------------------------------------------------------------------------------------------------- run folders


def read_json(path: Path) -> dict:
    """What a JSON file holds; nothing if it is missing, empty or broken."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


@dataclass(eq=False)
class Run:
    cell: Cell
    seed: int
    folder: Path
    extra: list[str] = field(default_factory=list)
    """flags that are no settings: tracking"""
    failures: int = 0
    losses: int = 0
    lock: io.IOBase | None = None
    error: str = ""

    @property
    def name(self) -> str:
        return self.folder.name

    def command(self, resume: bool = False) -> list[str]:
        """The ordinary command line of this run; after a kill: the one that goes on."""
        if resume:
            return ["python", self.cell.script, "--resume", self.folder.as_posix()]
        place = ["--seed", str(self.seed), "--run-dir", self.folder.as_posix()]
        return ["python", self.cell.script, *self.cell.flags, *place, *self.extra]

    def read(self, name: str) -> dict:
        return read_json(self.folder / name)

    def note(self, **values) -> None:
        """Adds what sweep.py knows of a run to its sweep.json (written beside and renamed: never half a file)."""
        self.folder.mkdir(parents=True, exist_ok=True)
        new = self.folder / "sweep.json.tmp"
        new.write_text(json.dumps(self.read("sweep.json") | values, indent=1), encoding="utf-8")
        new.replace(self.folder / "sweep.json")

    @property
    def state(self) -> str:
        if self.read("result.json").get("finished"):
            return "finished"
        if self.read("sweep.json").get("failed"):
            return "failed"
        return "unfinished" if (self.folder / "args.json").exists() else "missing"

    def acquire(self) -> bool:
        """Takes this run for this sweep. It is free when no other sweep has it and nobody trains it, as a process that
        outlived its sweep may: that one holds the lock in the run folder (see envs/run.py)."""
        locks = self.folder.parent / ".locks"
        locks.mkdir(parents=True, exist_ok=True)
        self.lock = system.lock(locks / self.name)
        if self.lock:
            sweep_ray.mend(self.folder)
            training = system.lock(self.folder / ".lock") if self.folder.exists() else None
            if training:
                training.close()
            elif self.folder.exists():
                self.release()
        return self.lock is not None

    def release(self) -> None:
        if self.lock:
            self.lock.close()
        self.lock = None

    def progress(self) -> tuple[int, str]:
        """Env steps so far and the newest return, from the last row of metrics.csv."""
        try:
            with open(self.folder / "metrics.csv", "rb") as file:
                header = file.readline()
                file.seek(max(len(header), os.fstat(file.fileno()).st_size - 65536))
                last = file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
            names, values = csv.reader([header.decode(), last.decode()])
            row = dict(zip(names, values, strict=True))
            return int(float(row["global_step"])), row.get("charts/episodic_return") or "?"
        except (OSError, ValueError, KeyError, csv.Error):  # there is none yet
            return 0, "?"

    def last_lines(self, count: int = 10) -> list[str]:
        try:
            text = (self.folder / "log.txt").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ["(it printed nothing)"]
        tail = [line for line in text.rpartition("\n$ ")[2].splitlines()[1:] if line.strip()]
        return tail[-count:] or ["(it printed nothing)"]


def make_runs(sweep: Sweep, runs_dir: Path, only: list[str], seeds: list[int], track: bool = False) -> list[Run]:
    """All runs of a sweep, or those asked for, seed by seed so that every cell has a first result early."""

    def fits(cell: Cell, pattern: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for name in (cell.name, cell.parent))

    for pattern in only:
        if not any(fits(cell, pattern) for cell in sweep.cells):
            raise ConfigError(f'--only: no cell "{pattern}" in {sweep.path}: {", ".join(c.name for c in sweep.cells)}')
    in_file = sorted({seed for cell in sweep.cells for seed in cell.seeds})
    if unknown := [str(seed) for seed in seeds if seed not in in_file]:
        raise ConfigError(f"--seeds: {', '.join(unknown)} not in {sweep.path}: {', '.join(map(str, in_file))}")
    cells = [cell for cell in sweep.cells if not only or any(fits(cell, pattern) for pattern in only)]
    runs = []
    for position in range(max(len(cell.seeds) for cell in cells)):
        for cell in cells:
            for seed in cell.seeds[position : position + 1]:
                if not seeds or seed in seeds:
                    tags = ",".join(t.replace(",", " ") for t in (sweep.name, cell.name, cell.algorithm))
                    extra = ["--track", "--wandb-group", sweep.name, "--wandb-tags", tags] if track else []
                    runs.append(Run(cell, seed, folder_of(runs_dir / sweep.name, cell, seed), extra))
    return runs


def folder_of(parent: Path, cell: Cell, seed: int) -> Path:
    """<cell>__<hash of the settings>__<seed>: a changed setting is a new folder. So is a default that changed in the
    script since (sweep.json in the folder remembers them), while a new flag of the script leaves old runs valid."""
    since: dict = {}
    while True:
        args = {k: v for k, v in cell.args.items() if not k.startswith("wandb-")}
        key = json.dumps([cell.script, args, since], sort_keys=True, default=str)
        folder = parent / f"{cell.name}__{hashlib.sha256(key.encode()).hexdigest()[:8]}__{seed}"
        then = read_json(folder / "sweep.json").get("settings", {})
        changed = {k: v for k, v in cell.settings.items() if k in then and then[k] != v and k not in since}
        if not changed:
            return folder
        since |= changed


def check_columns(sweep: Sweep, runs: list[Run]) -> None:
    """The columns that a report will ask for are in somebody's metrics.csv."""
    known: set[str] = set()
    for path in (run.folder / "metrics.csv" for run in runs):
        if path.is_file():
            with open(path, encoding="utf-8", errors="replace", newline="") as file, contextlib.suppress(csv.Error):
                known |= set(next(csv.reader(file), []))
    of_cells = [name for cell in sweep.cells for name in [*cell.also, *[cell.switch_metric] * bool(cell.switch_metric)]]
    for name in [sweep.metric, *of_cells]:
        if known and name not in known:
            raise ConfigError(f'{sweep.path}: no run has a column "{name}" in its metrics.csv{hint(name, known)}')


# ---------------------------------------------------------------------------------------------------- running


class LocalEngine:
    """Processes on this machine."""

    def __init__(self, jobs: int):
        self.slots = jobs
        self.children: dict[Run, subprocess.Popen] = {}

    def start(self, run: Run, command: list[str]) -> None:
        run.note(engine=f"local, {self.slots} at once", machine=processes.machine())
        self.children[run] = processes.start(command, Path(), run.folder / "log.txt")

    def poll(self, run: Run) -> int | str | None:
        """None while it runs, else its exit code."""
        code = self.children[run].poll()
        if code is not None:
            del self.children[run]
        return code

    def stop(self, hard: bool) -> None:
        for child in self.children.values():
            child.kill() if hard else system.ask_to_stop(child)

    def close(self) -> None:
        pass


class Runner:
    """Runs what is not finished, as many at once as the engine has places."""

    def __init__(self, sweep: Sweep, runs: list[Run], engine, signals: list[int]):
        self.sweep, self.runs, self.engine, self.signals = sweep, runs, engine, signals
        self.finished = [run for run in runs if run.state == "finished"]
        self.queue = deque(run for run in runs if run not in self.finished)
        self.failed: list[Run] = []
        self.active: dict[Run, tqdm] = {}  # with its progress bar
        self.elsewhere: dict[Run, float] = {}  # held by another sweep: looked at again from time to time

    def run(self, again: str) -> int:
        """Returns the exit code: 0, 1 if a run failed in the end, 128 + signal after a stop."""
        minutes, count = self.sweep.expected_minutes, len(self.runs)
        expected = f", expected to take {minutes:g} minutes on two cores" if minutes else ""
        self.say(f"sweep {self.sweep.name}: {count} runs, {len(self.finished)} of them finished already{expected}")
        tqdm.monitor_interval = 0  # no second thread: children are forked from this one
        bar = {"desc": self.sweep.name, "unit": "run", "leave": False, "disable": None}  # None: not if no terminal
        self.bar = tqdm(total=count, initial=len(self.finished), **bar)
        try:
            self.loop()
        finally:
            self.bar.close()
            if self.active:  # an error here
                self.engine.stop(hard=False)
            self.engine.close()
        if self.signals:
            left = count - len(self.finished) - len(self.failed)
            self.say(f"stopped with {left} of {count} runs unfinished; go on with: {again}")
            return 128 + self.signals[0]
        failures = f", {len(self.failed)} failed:" if self.failed else ""
        self.say(f"{len(self.finished)} of {count} runs finished{failures}")
        for run in self.failed:
            self.say(f"    {run.name}: {(run.folder / 'log.txt').as_posix()}")
        return 1 if self.failed else 0

    def say(self, text: str) -> None:
        tqdm.write(text)
        sys.stdout.flush()

    def loop(self) -> None:
        heard, drawn = 0, 0.0
        while self.active or ((self.queue or self.elsewhere) and not self.signals):
            for run in list(self.active):
                if (code := self.engine.poll(run)) is not None:
                    self.end(run, code)
            if len(self.signals) > heard:
                heard = len(self.signals)
                first = "stopping: the runs save first (once more: kill them)"
                self.say(first if heard == 1 else "killing the runs")
                self.engine.stop(hard=heard > 1)
            for run, since in list(self.elsewhere.items()):
                if time.monotonic() - since > 2:
                    del self.elsewhere[run]
                    self.queue.append(run)
            while self.queue and len(self.active) < self.engine.slots and not self.signals:
                self.begin(self.queue.popleft())
            if not self.bar.disable and time.monotonic() - drawn > 0.5:
                drawn = time.monotonic()
                self.draw()
            time.sleep(0.1)

    def draw(self) -> None:
        """The progress bars, on a terminal."""
        for run, bar in self.active.items():
            step, newest = run.progress()
            bar.n = max(step, bar.n)
            bar.set_postfix_str(f"return {newest:.5}")
        self.bar.n = len(self.finished)
        waiting, held = len(self.queue), len(self.elsewhere)
        self.bar.set_postfix({"waiting": waiting, "in another sweep": held, "failed": len(self.failed)})

    def begin(self, run: Run) -> None:
        if not run.lock and not run.acquire():
            self.elsewhere[run] = time.monotonic()
            return
        if run.state == "finished":  # meanwhile, by another sweep
            self.finished.append(run)
            run.release()
            return
        resume = (run.folder / "args.json").exists()
        told = {"sweep": self.sweep.name, "cell": run.cell.name, "seed": run.seed, "settings": run.cell.settings}
        run.note(command=shlex.join(run.command()), failed=None, **told)
        self.say(f"$ {shlex.join(run.command(resume))}")
        run.error = ""
        self.engine.start(run, run.command(resume))
        steps, (done, _) = run.cell.settings.get("total-timesteps"), run.progress()
        self.active[run] = tqdm(total=steps, initial=done, desc=run.name, unit="step", leave=False, disable=None)

    def end(self, run: Run, code: int | str) -> None:
        """A run that will be tried again keeps its lock."""
        self.active.pop(run).close()
        if run.state == "finished":
            self.finished.append(run)
            result, metric = run.read("result.json"), self.sweep.metric
            scores, seconds = result.get("eval"), result.get("wall_time")
            value = scores.get(metric.removeprefix("eval/")) if isinstance(scores, dict) else None
            figure = f" {metric} {value:.3f}" if isinstance(value, int | float) else ""
            took = f"{seconds / 60:.1f} minutes" if isinstance(seconds, int | float) else "unknown time"
            self.say(f"[{len(self.finished)}/{len(self.runs)}] finished {run.name}{figure} in {took}")
        elif code == sweep_ray.LOST and run.losses < LOSSES and not self.signals:
            run.losses += 1
            self.say(f"lost the worker of {run.name}: it goes on elsewhere from its last checkpoint")
            self.queue.appendleft(run)
            return
        elif not self.signals:
            run.failures += 1
            how = f"exit code {code}" if code else "it ended without a result.json"
            if run.failures < TRIES:
                self.say(f"failed ({how}), trying once more: {run.name}")
                self.queue.appendleft(run)
                return
            self.failed.append(run)
            run.note(failed=how)
            tail = [run.error] if run.error else run.last_lines()
            self.say("\n    ".join([f"FAILED {run.name} ({how}); the last lines it printed:", *tail]))
        run.release()


# ---------------------------------------------------------------------------------------------------- command line


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ConfigError(f"{message} (see {self.prog} --help)")


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="verb", required=True, metavar="run | report | results")
    run = commands.add_parser("run", help="run a sweep, or go on with it")
    run.add_argument("file", type=Path, help="the sweep, e.g. experiments/smoke.toml")
    run.add_argument("--dry-run", action="store_true", help="show the commands and run nothing")
    run.add_argument("--only", action="append", default=[], metavar="NAME", help="this cell only (wildcards)")
    run.add_argument("--seeds", type=numbers, default=[], metavar="1,2,3", help="these seeds of the file only")
    run.add_argument("--engine", choices=["local", "ray"], default="local", help="where the runs go")
    run.add_argument("--jobs", type=int, default=2, help="local: runs at once (default 2), one thread each")
    run.add_argument("--ray-address", default=os.environ.get("RAY_ADDRESS"), help="host:port; none: this machine")
    run.add_argument("--cpus-per-run", type=float, default=1, help="ray: CPUs that a run asks for (default 1)")
    run.add_argument("--gpus-per-run", type=float, default=0, help="ray: GPUs that a run asks for (default 0)")
    run.add_argument("--collect-seconds", type=float, default=5, help="ray: how often checkpoints come back")
    run.add_argument("--track", action="store_true", help="wandb: one group and tags for all runs")
    report = commands.add_parser("report", help="write a sweep's tables, CSV and curves")
    report.add_argument("file", type=Path, help="the sweep")
    place = report.add_mutually_exclusive_group()
    place.add_argument("--out", type=Path, help="folder (default: <runs-dir>/<sweep>/report)")
    place.add_argument("--docs", action="store_true", help="into docs/results, and assemble docs/results.md anew")
    for part in (run, report):
        part.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where run folders are (default runs)")
    results = commands.add_parser("results", help="assemble docs/results.md from docs/results/*.md")
    results.add_argument("names", nargs="*", help="parts to put first, in this order")
    return parser


def make_folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the folder {path} cannot be made: {error.strerror}") from None
    return path


def write_results(args: argparse.Namespace) -> None:
    """The verbs `report` and `results`."""
    import report  # statistics and plots take a second to load

    docs, first = Path("docs/results"), []
    if args.verb == "report":
        sweep = load(args.file)
        runs = make_runs(sweep, args.runs_dir, [], [])
        check_columns(sweep, runs)
        out = docs if args.docs else args.out or args.runs_dir / sweep.name / "report"
        for gap in report.write_report(sweep, runs, make_folder(out)):
            print(f"not complete: {gap}")
        print(f"wrote {out / sweep.name}.md, .csv and .png")
        if not args.docs:
            return
    else:
        first = args.names
    print(f"wrote {report.write_results(docs, first)}")


def main(words: list[str], signals: StopSignals) -> int:
    args = parser().parse_args(words)
    if args.verb != "run":
        write_results(args)
        return 0
    for name, low in {"jobs": 1, "cpus_per_run": 0, "gpus_per_run": 0, "collect_seconds": 0.1}.items():
        if not getattr(args, name) >= low:
            raise ConfigError(f"--{name.replace('_', '-')} must be {low} or more, not {getattr(args, name)}")
    sweep = load(args.file)
    runs = make_runs(sweep, args.runs_dir, args.only, args.seeds, args.track)
    if args.dry_run:
        for run in runs:
            print(f"# {run.cell.name}, seed {run.seed}: {run.state}\n{shlex.join(run.command())}")
        return 0
    make_folder(args.runs_dir / sweep.name)
    engine = LocalEngine(args.jobs)
    if args.engine == "ray":
        resources = (args.cpus_per_run, args.gpus_per_run, args.collect_seconds)
        engine = sweep_ray.RayEngine(args.ray_address, *resources, args.runs_dir)
    signals.hold = True  # from here on there is something to save
    return Runner(sweep, runs, engine, signals.received).run(shlex.join(["python", "sweep.py", *words]))


if __name__ == "__main__":
    sys.exit(guarded(lambda signals: main(sys.argv[1:], signals)))
