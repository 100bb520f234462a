"""Many runs, one command, one report.

A sweep is a small TOML file in `experiments/`: scripts, seeds and settings. Each cell and seed of it becomes one
ordinary command line of an ordinary script, in a run folder of its own.

    python sweep.py run experiments/msh_selfplay.toml --dry-run       the commands, and nothing else
    python sweep.py run experiments/msh_selfplay.toml --jobs 2        runs them; the same line goes on after a stop
    python sweep.py run experiments/msh_selfplay.toml --engine ray    the same commands as tasks on a Ray cluster
    python sweep.py report experiments/msh_selfplay.toml              docs/results/msh_selfplay.{md,csv,png}
    python sweep.py results                                           docs/results.md from docs/results/*.md

How to write a file, and what each figure of a report means: docs/sweeps.md.
"""

import argparse
import ast
import csv
import ctypes
import difflib
import fnmatch
import hashlib
import io
import itertools
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

TEXT, INT, NUMBER, TABLE = "a string", "an integer", "a number", "a table"
INTS, NUMBERS, TEXTS, TABLES = (f"a list of {plural}" for plural in ("integers", "numbers", "strings", "tables"))
TOP_KEYS = {
    "name": TEXT, "description": TEXT, "expected_minutes": NUMBER, "metric": TEXT, "at_steps": INTS,
    # unless a cell says otherwise
    "script": TEXT, "algorithm": TEXT, "baseline": TEXT, "seeds": INTS, "thresholds": NUMBERS, "also": TEXTS,
    "fixed": TABLE, "cells": TABLES,
}  # fmt: skip
CELL_KEYS = {
    "name": TEXT, "script": TEXT, "algorithm": TEXT, "baseline": TEXT, "seeds": INTS, "thresholds": NUMBERS,
    "also": TEXTS,  # more columns of metrics.csv: the report shows their means over training
    "task": TEXT,  # cells of one task are compared, in one panel (default: the env id)
    "args": TABLE, "grid": TABLE,
}  # fmt: skip
SET_HERE = ("seed", "run-dir", "resume", "track", "wandb-group", "wandb-tags")  # flags that only sweep.py sets
TRIES = 2  # a failed run is tried once more
LOSSES = 20  # a run whose Ray worker or node died goes on elsewhere, at most so often
LOST = "lost"
ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")}
NOT_SHIPPED = ["/.git/", "/runs/", "/wandb/", "/vae_ckpts/", "/docs/", "__pycache__/", ".venv/", "venv/", ".*_cache/"]

# Okabe and Ito's colours, told apart by colour-blind readers too; one algorithm, one colour, in every figure
COLOURS = {
    "PPO": "#0072B2", "PPO (shared)": "#56B4E9", "HOP+ MCTS": "#D55E00", "HOP+ no MCTS": "#E69F00", "HOP": "#CC79A7",
    "no goals": "#009E73", "MAPPO": "#332288", "Hyper-MAPPO": "#882255",
}  # fmt: skip
OTHER_COLOURS = ["#117733", "#999933", "#AA4499", "#44AA99", "#661100", "#555555"]


class SweepError(Exception):
    """An error of the person at the keyboard: one line on stderr, exit code 2."""


# ---------------------------------------------------------------------------------------------------- the sweep file


@dataclass
class Cell:
    name: str
    parent: str
    """name in the file; differs from `name` where a grid made several cells of one"""
    script: str
    algorithm: str
    task: str
    baseline: str | None
    seeds: list[int]
    thresholds: list[float]
    also: list[str]
    args: dict
    """what the file sets: flag -> value"""
    settings: dict
    """`args` over the script's own defaults"""
    flags: list[str]
    line: int


@dataclass
class Sweep:
    path: Path
    name: str
    description: str
    expected_minutes: float | None
    metric: str
    at_steps: list[int]
    cells: list[Cell]


def key_lines(text: str) -> dict[tuple, int]:
    """The line of each key of a TOML text, by its path: ("cells", 0, "args", "env-id") -> 12."""
    lines: dict[tuple, int] = {}
    table: tuple = ()
    counts: Counter = Counter()
    quotes = None  # inside a string of several lines

    def parts(dotted: str) -> tuple:
        return tuple(part.strip().strip("\"'") for part in dotted.split("."))

    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if quotes:
            quotes = None if quotes in line else quotes
        elif match := re.match(r"\[\[([^\[\]]+)\]\]", line):
            (name,) = parts(match[1])[:1]
            table = (name, counts[name])
            counts[name] += 1
            lines[table] = number
        elif match := re.match(r"\[([^\[\],]+)\]\s*(#.*)?$", line):
            first, *rest = parts(match[1])
            table = (first, counts[first] - 1, *rest) if first in counts else (first, *rest)
            lines[table] = number
        elif match := re.match(r"([\w\"'.-]+)\s*=\s*(.*)", line):
            path, value = table + parts(match[1]), match[2]
            lines.setdefault(path, number)
            if value.startswith("{"):
                for key in re.findall(r"[{,]\s*[\"']?([\w-]+)[\"']?\s*=", value):
                    lines.setdefault((*path, key), number)
            for mark in ('"""', "'''"):
                if value.count(mark) == 1:
                    quotes = mark
    return lines


def script_fields(path: Path) -> dict[str, tuple[ast.expr, object]]:
    """Flag -> (type, default) of a script's `Args` dataclass, read from its source: nothing is imported or run."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    fields = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    try:
                        default = ast.literal_eval(item.value) if item.value else None
                    except ValueError:  # an expression: its text will do
                        default = ast.unparse(item.value)
                    fields[item.target.id.replace("_", "-")] = (item.annotation, default)
    return fields


def accepts(annotation: ast.expr, value) -> bool:
    """Whether a value of a TOML file fits a field's type. Types this does not know accept everything."""
    match annotation:
        case ast.Name(id="bool"):
            return isinstance(value, bool)
        case ast.Name(id="int"):
            return isinstance(value, int) and not isinstance(value, bool)
        case ast.Name(id="float"):
            return isinstance(value, (int, float)) and not isinstance(value, bool)
        case ast.Name(id="str"):
            return isinstance(value, str)
        case ast.Constant(value=None):
            return False
        case ast.Constant(value=str(text)):
            return accepts(ast.parse(text, mode="eval").body, value)
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            return accepts(left, value) or accepts(right, value)
        case ast.Subscript(value=ast.Name(id=outer), slice=inner):
            inners = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            if outer == "Literal":
                return any(ast.literal_eval(choice) == value for choice in inners)
            if outer == "Annotated":
                return accepts(inners[0], value)
            if outer in ("Optional", "Union"):
                return any(accepts(choice, value) for choice in inners)
            if outer in ("tuple", "list", "Tuple", "List", "Sequence"):
                return isinstance(value, list) and all(any(accepts(i, v) for i in inners) for v in value)
    return True


def flag(key: str, value, annotation: ast.expr) -> list[str]:
    """`key = value` as words of a command line: --key value; --key or --no-key for a switch."""
    if isinstance(value, bool) and accepts(annotation, True) and not accepts(annotation, "True"):
        return [f"--{key}" if value else f"--no-{key}"]
    words = [str(v) for v in (value if isinstance(value, list) else [value])]
    return [f"--{key}={words[0]}"] if len(words) == 1 and words[0].startswith("-") else [f"--{key}", *words]


def is_a(kind: str, value) -> bool:
    if one := {INTS: INT, NUMBERS: NUMBER, TEXTS: TEXT, TABLES: TABLE}.get(kind):
        return isinstance(value, list) and all(is_a(one, v) for v in value)
    types = {TEXT: str, INT: int, NUMBER: (int, float), TABLE: dict}[kind]
    return isinstance(value, types) and not isinstance(value, bool)


def hint(key: str, known) -> str:
    close = difflib.get_close_matches(key, known, 1)
    return f'; did you mean "{close[0]}"?' if close else f"; known: {', '.join(sorted(known))}"


def load(path: Path) -> Sweep:
    """Reads and checks a sweep file; whatever is wrong in it is named with its line."""
    try:
        text = path.read_text(encoding="utf-8")
        data = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise SweepError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    except tomllib.TOMLDecodeError as error:
        at = re.search(r"line (\d+)", str(error))
        raise SweepError(f"{path}:{at[1] if at else len(text.splitlines())}: not TOML: {error}") from None
    lines = key_lines(text)

    def line(*where) -> int:
        while where and where not in lines:
            where = where[:-1]
        return lines.get(where, 1)

    def fail(where: tuple, message: str):
        raise SweepError(f"{path}:{line(*where)}: {message}")

    def check(table: dict, known: dict, where: tuple = ()) -> None:
        for key, value in table.items():
            if key not in known:
                fail((*where, key), f'unknown key "{key}"{hint(key, known)}')
            if not is_a(known[key], value):
                fail((*where, key), f'"{key}" must be {known[key]}, not {json.dumps(value, default=str)}')
        if "seeds" in table and (not table["seeds"] or len(set(table["seeds"])) < len(table["seeds"])):
            fail((*where, "seeds"), '"seeds" must name each seed once, and at least one')

    def check_args(table: dict, where: tuple, script: str, fields: dict, grid: bool = False) -> dict:
        args = {}
        for key, value in table.items():
            name = key.replace("_", "-")
            if name in SET_HERE:
                fail((*where, key), f'"{key}" is set by sweep.py itself')
            if name not in fields:
                fail((*where, key), f'{script} has no setting "{key}"{hint(name, set(fields) - set(SET_HERE))}')
            if name in args:
                fail((*where, key), f'"{key}" is set twice')
            if grid and not (isinstance(value, list) and value):
                fail((*where, key), f'"{key}" in a grid must be a list of values, not {json.dumps(value, default=str)}')
            for v in value if grid else [value]:
                if not accepts(fields[name][0], v):
                    kind = ast.unparse(fields[name][0])
                    fail((*where, key), f'"{key}" of {script} must be {kind}, not {json.dumps(v, default=str)}')
            args[name] = value
        return args

    check(data, TOP_KEYS)
    name = data.get("name", path.stem)
    if not re.fullmatch(r"[\w.+-]+", name):
        fail(("name",), f'"name" may hold letters, digits and . _ + - only, not "{name}"')
    if not data.get("cells"):
        fail((), "no [[cells]]: nothing to run")

    cells: list[Cell] = []
    all_fields: dict[str, dict] = {}
    for index, table in enumerate(data["cells"]):
        where = ("cells", index)
        check(table, CELL_KEYS, where)
        for key in ("name", "script", "seeds"):
            if key not in table and (key == "name" or key not in data):
                fail(where, f'this cell has no "{key}"')
        script = table.get("script", data.get("script"))
        at = (*where, "script") if "script" in table else ("script",)
        if script not in all_fields:
            if not Path(script).is_file():
                fail(at, f'there is no script "{script}"{hint(script, [p.name for p in Path().glob("*.py")])}')
            try:
                all_fields[script] = script_fields(Path(script))
            except (SyntaxError, UnicodeDecodeError) as error:
                fail(at, f"{script} is not a Python script: {error}")
            missing = {"seed", "run-dir", "resume"} - set(all_fields[script])
            if missing:
                fail(at, f"{script} is no training script: its Args lack {', '.join(sorted(missing))}")
        fields = all_fields[script]
        fixed = check_args(data.get("fixed", {}), ("fixed",), script, fields)
        own = check_args(table.get("args", {}), (*where, "args"), script, fields)
        grid = check_args(table.get("grid", {}), (*where, "grid"), script, fields, grid=True)
        for key in grid:
            if key in own:
                fail((*where, "grid"), f'"{key}" is in both args and grid of cell "{table["name"]}"')
        for values in itertools.product(*grid.values()):
            chosen = dict(zip(grid, values, strict=True))
            args = fixed | own | chosen
            settings = {key: default for key, (_, default) in fields.items()} | args
            settings = {k: v for k, v in settings.items() if k not in SET_HERE and not k.startswith("wandb-")}
            cell_name = "_".join([table["name"], *(f"{k}={v}" for k, v in chosen.items() if len(grid[k]) > 1)])
            flags = [word for key, value in args.items() for word in flag(key, value, fields[key][0])]
            common = {key: table.get(key, data.get(key)) for key in ("baseline", "seeds")}
            cell = Cell(
                name=re.sub(r"[^\w.=+,-]+", "-", cell_name),
                parent=table["name"],
                script=script,
                algorithm=table.get("algorithm", data.get("algorithm", Path(script).stem)),
                task=table.get("task", str(settings.get("env-id", ""))),
                thresholds=table.get("thresholds", data.get("thresholds", [])),
                also=table.get("also", data.get("also", [])),
                args=args,
                settings=json.loads(json.dumps(settings, default=str)),  # as sweep.json will give them back
                flags=flags,
                line=line(*where),
                **common,
            )
            cells.append(cell)

    for a, b in itertools.combinations(cells, 2):
        if a.name == b.name:
            raise SweepError(f'{path}:{b.line}: a cell is called "{b.name}" already (line {a.line})')
        if (a.script, a.settings) == (b.script, b.settings):
            message = f'cells "{a.name}" (line {a.line}) and "{b.name}" would be the same run (same settings)'
            raise SweepError(f"{path}:{b.line}: {message}")
    for where, table in [((), data), *((("cells", i), table) for i, table in enumerate(data["cells"]))]:
        wanted = table.get("baseline")
        if wanted and not any(wanted in (c.name, c.parent, c.algorithm) for c in cells):
            fail((*where, "baseline"), f'baseline "{wanted}" is no cell or algorithm of this file')
    about = (data.get("description", "").strip(), data.get("expected_minutes"), data.get("metric", "eval/return"))
    return Sweep(path, name, *about, sorted(data.get("at_steps", [])), cells)


def baseline_of(cell: Cell, cells: list[Cell]) -> Cell | None:
    """The cell that this one is compared with: the one of that name, or of that algorithm, in the same task."""
    same_task = [c for c in cells if c.task == cell.task]
    named = [c for c in same_task if c.name == cell.baseline] or [
        c for c in same_task if cell.baseline in (c.parent, c.algorithm)
    ]
    return named[0] if len(named) == 1 and named[0] is not cell else None


# ---------------------------------------------------------------------------------------------------- run folders


def read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def note(folder: Path, **values) -> None:
    """Adds what sweep.py knows of a run to its sweep.json (written beside and renamed: never half a file)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sweep.json.tmp").write_text(json.dumps(read_json(folder / "sweep.json") | values, indent=1))
    (folder / "sweep.json.tmp").replace(folder / "sweep.json")


def machine() -> str:
    """The machine in words: processor, cores, system, Python. No names, no paths."""
    try:
        cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())[1]
    except (OSError, TypeError):
        cpu = platform.processor() or platform.machine()
    return f"{cpu}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"


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

    @property
    def state(self) -> str:
        if (self.folder / "result.json").exists():
            return "finished"
        if read_json(self.folder / "sweep.json").get("failed"):
            return "failed"
        return "unfinished" if (self.folder / "args.json").exists() else "missing"

    def acquire(self) -> bool:
        """Takes this run for this sweep. The lock is the system's (flock), held by the training process too, so it is
        free exactly when neither lives: there are no stale locks, and two sweeps never run one cell twice."""
        import fcntl

        locks = self.folder.parent / ".locks"
        locks.mkdir(parents=True, exist_ok=True)
        self.lock = open(locks / self.name, "a")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.release()
            return False
        old, incoming = swap_names(self.folder)  # a collection of this folder that was cut off
        if old.exists() and not self.folder.exists():
            old.rename(self.folder)
        for leftover in (old, incoming):
            shutil.rmtree(leftover, ignore_errors=True)
        return True

    def release(self) -> None:
        if self.lock:
            self.lock.close()
        self.lock = None

    def last_lines(self, count: int = 10) -> list[str]:
        try:
            text = (self.folder / "log.txt").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ["(it printed nothing)"]
        tail = [line for line in text.rpartition("\n$ ")[2].splitlines()[1:] if line.strip()]
        return tail[-count:] or ["(it printed nothing)"]


def make_runs(sweep: Sweep, runs_dir: Path, only: list[str], seeds: list[int], track: bool = False) -> list[Run]:
    """All runs of a sweep, or those asked for, seed by seed so that every cell has a first result early."""
    for pattern in only:
        if not any(fnmatch.fnmatchcase(n, pattern) for c in sweep.cells for n in (c.name, c.parent)):
            raise SweepError(f'--only: no cell "{pattern}" in {sweep.path}: {", ".join(c.name for c in sweep.cells)}')
    in_file = sorted({seed for cell in sweep.cells for seed in cell.seeds})
    if unknown := [str(seed) for seed in seeds if seed not in in_file]:
        raise SweepError(f"--seeds: {', '.join(unknown)} not in {sweep.path}: {', '.join(map(str, in_file))}")
    runs = []
    for position in range(max(len(cell.seeds) for cell in sweep.cells)):
        for cell in sweep.cells:
            asked = not only or any(fnmatch.fnmatchcase(n, p) for n in (cell.name, cell.parent) for p in only)
            for seed in cell.seeds[position : position + 1]:
                if asked and (not seeds or seed in seeds):
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


def progress(folder: Path, metric: str) -> dict:
    """Step, seconds and newest return of a run, from the end of its metrics.csv."""
    try:
        with open(folder / "metrics.csv", "rb") as file:
            header = file.readline()
            file.seek(max(len(header), os.fstat(file.fileno()).st_size - 65536))
            tail = file.read().decode(errors="replace")
    except OSError:
        return {}
    names = next(csv.reader([header.decode(errors="replace")]), [])
    found: dict = {}
    metric = metric if metric in names else "charts/episodic_return"
    for row in csv.reader(reversed(tail.splitlines()[: None if tail.endswith("\n") else -1])):
        values = dict(zip(names, row, strict=False))
        if len(row) != len(names):
            continue
        for key, column in (("step", "global_step"), ("seconds", "wall_time"), ("return", metric)):
            if key not in found and values.get(column):
                found[key] = float(values[column])
        if len(found) == 3:
            break
    return found


# ---------------------------------------------------------------------------------------------------- engines


def start_process(command: list[str], cwd: Path, log: Path, keep_open: tuple = ()) -> subprocess.Popen:
    """One run as a process: one thread, what it prints in log.txt, ended (SIGTERM: it saves) when its parent dies."""
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):  # not Linux: the lock still tells that it lives
        prctl = None
    with open(log, "a", encoding="utf-8") as out:
        out.write(f"\n$ {shlex.join(command)}\n")
        out.flush()
        return subprocess.Popen(
            [sys.executable, *command[1:]],
            cwd=cwd,
            env=os.environ | ONE_THREAD | {"PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C reaches sweep.py alone, which passes it on
            pass_fds=keep_open,
            preexec_fn=prctl and (lambda: prctl(1, signal.SIGTERM)),  # 1: PR_SET_PDEATHSIG
        )


class LocalEngine:
    """Processes on this machine."""

    def __init__(self, jobs: int):
        self.slots = jobs
        self.children: dict[Run, subprocess.Popen] = {}

    def start(self, run: Run, command: list[str]) -> None:
        note(run.folder, engine=f"local, {self.slots} at once", machine=machine())
        self.children[run] = start_process(command, Path(), run.folder / "log.txt", (run.lock.fileno(),))

    def poll(self, run: Run) -> int | str | None:
        """None while it runs, else its exit code."""
        code = self.children[run].poll()
        if code is not None:
            del self.children[run]
        return code

    def progress(self, run: Run, metric: str) -> dict:
        return progress(run.folder, metric)

    def stop(self, hard: bool) -> None:
        for child in self.children.values():
            child.kill() if hard else child.terminate()

    def close(self) -> None:
        pass


def checkpoint_stamp(folder: Path) -> list | None:
    """Changes whenever a checkpoint of a run does; None in the very moment in which one is renamed."""
    try:
        return sorted((str(p), p.stat().st_mtime_ns) for p in (folder / "checkpoints").rglob("*") if p.is_file())
    except FileNotFoundError:
        return None


def pack(folder: Path, final: bool) -> bytes | None:
    """A run folder as a tar archive of one moment: None if the checkpoint changed while packing. The metrics are read
    after the checkpoint, so they are never behind it; result.json counts only once the script has ended."""
    before, buffer = checkpoint_stamp(folder), io.BytesIO()
    try:
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            files = [p.relative_to(folder) for p in folder.rglob("*") if p.is_file()]
            for path in sorted(files, key=lambda p: (p.parts[0] != "checkpoints", p)):
                if final or path.name != "result.json":
                    info, content = tarfile.TarInfo(path.as_posix()), (folder / path).read_bytes()
                    info.size, info.mtime = len(content), int((folder / path).stat().st_mtime)
                    tar.addfile(info, io.BytesIO(content))
    except FileNotFoundError:
        return None
    return buffer.getvalue() if final or before == checkpoint_stamp(folder) is not None else None


def unpack(archive: bytes, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")


def swap_names(folder: Path) -> tuple[Path, Path]:
    return folder.with_name(folder.name + ".old"), folder.with_name(folder.name + ".incoming")


def install(archive: bytes, folder: Path) -> None:
    """Puts a collected archive in a run folder's place: all of it or nothing, even if killed here (see Run.acquire)."""
    old, incoming = swap_names(folder)
    shutil.rmtree(incoming, ignore_errors=True)
    unpack(archive, incoming)
    if folder.exists():
        folder.rename(old)
    incoming.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def ray_task(ticket: int, folder: str, command: list[str], archive: bytes, inputs: bytes, metric: str, mailbox, every):
    """On a worker: one run in a temporary folder of its own; what it saves goes to the mailbox as it comes."""
    import ray

    def report(**values) -> bool:
        return ray.get(mailbox.put.remote(ticket, values))

    with tempfile.TemporaryDirectory(prefix="sweep-", ignore_cleanup_errors=True) as work:
        here = Path(work) / folder
        unpack(inputs, Path(work))
        unpack(archive, here)
        for entry in Path.cwd().iterdir():  # the code as it was shipped
            if not (Path(work) / entry.name).exists():
                (Path(work) / entry.name).symlink_to(entry)
        note(here, engine="ray", machine=machine())
        if report(progress={}):
            return 128 + signal.SIGTERM, None
        child = start_process(command, Path(work), here / "log.txt")
        sent, sent_at, told = checkpoint_stamp(here), 0.0, False
        try:
            while child.poll() is None:
                time.sleep(min(1.0, every))
                news, stamp = {"progress": progress(here, metric)}, checkpoint_stamp(here)
                if stamp != sent and time.monotonic() - sent_at >= every and (packed := pack(here, final=False)):
                    news["archive"], sent, sent_at = packed, stamp, time.monotonic()
                if report(**news) and not told:
                    child.terminate()
                    told = True
        finally:
            if child.poll() is None:
                child.kill()
        return child.returncode, pack(here, final=True)


class Mailbox:
    """Between the workers and sweep.py: the newest progress and checkpoint of each task one way, «stop» the other."""

    def __init__(self):
        self.news: dict[int, dict] = {}
        self.stopping = False

    def put(self, ticket: int, values: dict) -> bool:
        self.news.setdefault(ticket, {}).update(values)
        return self.stopping

    def take(self) -> dict[int, dict]:
        news, self.news = self.news, {}
        return news

    def stop(self) -> None:
        self.stopping = True


class RayEngine:
    """The same commands as tasks of a Ray cluster. No shared file system is needed: the code is shipped to the workers,
    checkpoints come back while a run goes on, and a run whose worker died is sent out again with its newest one."""

    def __init__(self, address: str | None, cpus: float, gpus: float, every: float, metric: str, runs_dir: Path):
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # before the import: nothing is reported to anybody
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        try:
            import ray
        except ModuleNotFoundError:
            raise SweepError('--engine ray needs Ray: pip install ray (the extra "sweep")') from None
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.ray, self.every, self.metric, self.slots = ray, every, metric, 1000
        not_shipped = [*NOT_SHIPPED, f"/{runs_dir.as_posix()}/"]
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        code = {"working_dir": str(Path.cwd()), "excludes": not_shipped}
        here = {"address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        try:
            if address and (match := re.fullmatch(r"(?:ray://)?\[?(.+?)\]?:(\d+)", address)):
                socket.create_connection((match[1], int(match[2])), timeout=10).close()  # Ray itself tries for minutes
            ray.init(**({"address": address} if address else here), runtime_env=code, **quiet)
        except (OSError, ValueError, RuntimeError) as error:
            raise SweepError(f"no Ray cluster at {address}: {str(error).splitlines()[0]}") from None
        sizes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(size.get("CPU", 0) >= cpus and size.get("GPU", 0) >= gpus for size in sizes):
            print(f"warning: no node of the cluster has {cpus:g} CPUs and {gpus:g} GPUs: runs wait until one joins")
        on_this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self.mailbox = ray.remote(Mailbox).options(num_cpus=0, scheduling_strategy=on_this_node).remote()
        # max_retries=0: Ray would repeat the call as it was made; a run must go on from its newest checkpoint instead
        self.task = ray.remote(ray_task).options(num_cpus=cpus, num_gpus=gpus, max_retries=0)
        self.refs: dict[Run, tuple] = {}  # run -> (ticket of this attempt, what the task will return)
        self.newest: dict[Run, dict] = {}
        self.tickets = itertools.count()
        self.taken = 0.0

    def start(self, run: Run, command: list[str]) -> None:
        inputs = io.BytesIO()  # files that the command names and that are not shipped with the code
        with tarfile.open(fileobj=inputs, mode="w") as tar:
            for path in {Path(part) for word in command[2:] for part in word.split(",") if part} - {run.folder}:
                if path.exists() and not path.is_absolute() and ".." not in path.parts:
                    tar.add(path)
        archive = pack(run.folder, final=True)
        ticket, folder = next(self.tickets), run.folder.as_posix()
        arguments = (ticket, folder, command, archive, inputs.getvalue(), self.metric, self.mailbox, self.every)
        self.newest.pop(run, None)
        self.refs[run] = ticket, self.task.remote(*arguments)

    def collect(self) -> None:
        """Fetches what the workers sent. An attempt that was given up may still be sending: its ticket is void."""
        try:
            news = self.ray.get(self.mailbox.take.remote())
        except self.ray.exceptions.RayError as error:
            why = str(error).splitlines()[0]
            raise SweepError(f"lost the Ray cluster ({why}); the same line goes on from the checkpoints here") from None
        for run, (ticket, _) in self.refs.items():
            if archive := news.get(ticket, {}).get("archive"):
                install(archive, run.folder)
            self.newest[run] = news.get(ticket, {}).get("progress", self.newest.get(run, {"waits": True}))
        self.taken = time.monotonic()

    def poll(self, run: Run) -> int | str | None:
        ref = self.refs[run][1]
        done, _ = self.ray.wait([ref], timeout=0)
        if done or time.monotonic() - self.taken > 1:
            self.collect()  # before the end is looked at: what came on the way must not replace what came last
        if not done:
            return None
        del self.refs[run]
        try:
            code, archive = self.ray.get(ref)
        except self.ray.exceptions.RayTaskError as error:  # our own code failed there, or lost its mailbox
            run.error = str(error.cause).splitlines()[0]
            return LOST if isinstance(error.cause, self.ray.exceptions.RayError) else 1
        except self.ray.exceptions.RayError:  # worker, node or object gone
            return LOST
        if archive:
            install(archive, run.folder)
        return code

    def progress(self, run: Run, metric: str) -> dict:
        return self.newest.get(run, {"waits": True})

    def stop(self, hard: bool) -> None:
        self.mailbox.stop.remote()
        for run, (_, ref) in list(self.refs.items()):
            if hard or self.progress(run, "").get("waits"):  # nothing to save
                self.ray.cancel(ref, force=hard)

    def close(self) -> None:
        self.ray.shutdown()


# ---------------------------------------------------------------------------------------------------- running


def clock(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"


class Screen:
    """Lines that stay and, on a terminal, a table below them that is drawn again and again."""

    def __init__(self):
        self.live = sys.stdout.isatty()
        self.height = 0

    def clear(self) -> None:
        if self.height:
            print(f"\x1b[{self.height}A\x1b[J", end="")
        self.height = 0

    def line(self, text: str) -> None:
        self.clear()
        print(text, flush=True)

    def table(self, rows: list[str]) -> None:
        self.clear()
        columns, lines = shutil.get_terminal_size()
        rows = rows[: max(1, lines - 2)]
        print("\n".join(row[: columns - 1] for row in rows), flush=True)
        self.height = len(rows)


def run_sweep(sweep: Sweep, runs: list[Run], engine, again: str) -> int:
    """Runs what is not finished. Returns the exit code: 0, 1 if a run failed in the end, 128 + signal after a stop."""
    screen, signals = Screen(), []
    queue = deque(run for run in runs if run.state != "finished")
    finished, failed, active = [run for run in runs if run.state == "finished"], [], []
    elsewhere: dict[Run, float] = {}  # held by another sweep: looked at again from time to time
    took: list[float] = []
    expected = f", expected to take {sweep.expected_minutes:g} minutes on two cores" if sweep.expected_minutes else ""
    screen.line(f"sweep {sweep.name}: {len(runs)} runs, {len(finished)} of them finished already{expected}")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, lambda signum, frame: signals.append(signum))

    def begin(run: Run) -> None:
        resume = (run.folder / "args.json").exists()
        told = {"sweep": sweep.name, "cell": run.cell.name, "seed": run.seed, "settings": run.cell.settings}
        note(run.folder, command=shlex.join(run.command()), failed=None, **told)
        screen.line(f"$ {shlex.join(run.command(resume))}")
        run.error = ""
        engine.start(run, run.command(resume))
        active.append(run)

    def end(run: Run, code: int | str) -> None:
        active.remove(run)
        if run.state == "finished":
            finished.append(run)
            result = read_json(run.folder / "result.json")
            took.append(float(result.get("wall_time", 0)))
            value = final_value(result, sweep.metric)
            figure = "" if value is None else f" {sweep.metric} {value:.3f}"
            screen.line(f"[{len(finished)}/{len(runs)}] finished {run.name}{figure} in {clock(took[-1])}")
        elif code == LOST and run.losses < LOSSES and not signals:
            run.losses += 1
            screen.line(f"lost the worker of {run.name}: it goes on elsewhere from its last checkpoint")
            queue.appendleft(run)
            return  # keeps its lock
        elif not signals:
            run.failures += 1
            how = f"exit code {code}" if code else "it ended without a result.json"
            if run.failures < TRIES:
                screen.line(f"failed ({how}), trying once more: {run.name}")
                queue.appendleft(run)
                return
            failed.append(run)
            tail = [run.error] if run.error else run.last_lines()
            note(run.folder, failed=how)
            screen.line("\n    ".join([f"FAILED {run.name} ({how}); the last lines it printed:", *tail]))
        run.release()

    def table() -> list[str]:
        width = max([20, *(len(run.name) for run in active)])
        rows = [f"{'run':{width}}  {'step':>23}  {'return':>8}  {'left':>8}"]
        left, whole = [], list(took)  # seconds: what the running ones still need, what a run takes
        for run in [*active, *elsewhere]:
            now = engine.progress(run, sweep.metric) if run in active else progress(run.folder, sweep.metric)
            total, step = run.cell.settings.get("total-timesteps"), now.get("step", 0)
            if run in elsewhere or now.get("waits"):
                where = "in another sweep" if run in elsewhere else "waits for a place"
                rows.append(f"{run.name:{width}}  {where:>23}")
                continue
            known = step and isinstance(total, (int, float)) and "seconds" in now
            if known:
                left.append(max(0.0, now["seconds"] * (total - step) / step))
                whole.append(now["seconds"] * total / step)
            figure = f"{now['return']:.3f}" if "return" in now else "-"
            steps = f"{step:,.0f} / {total:,}" if isinstance(total, int) else f"{step:,.0f}"
            rows.append(f"{run.name:{width}}  {steps:>23}  {figure:>8}  {clock(left[-1] if known else None):>8}")
        slots = max(1, min(engine.slots, len(active)))
        remaining = (sum(left) + len(queue) * sum(whole) / len(whole)) / slots if whole else None
        counts = f"{len(finished)} finished, {len(active)} running, {len(queue)} waiting, {len(failed)} failed"
        rows.append(f"{sweep.name}: {counts}; about {clock(remaining)} left")
        return rows

    heard, drawn = 0, time.monotonic()
    while active or ((queue or elsewhere) and not signals):
        for run in list(active):
            if (code := engine.poll(run)) is not None:
                end(run, code)
        if len(signals) > heard:
            heard = len(signals)
            screen.line("stopping: the runs save first (once more: kill them)" if heard == 1 else "killing the runs")
            engine.stop(hard=heard > 1)
        for run, since in list(elsewhere.items()):
            if time.monotonic() - since > 2:
                del elsewhere[run]
                queue.append(run)
        while queue and len(active) < engine.slots and not signals:
            run = queue.popleft()
            if not run.lock and not run.acquire():
                elsewhere[run] = time.monotonic()
            elif run.state == "finished":  # meanwhile, by another sweep
                finished.append(run)
                run.release()
            else:
                begin(run)
        if time.monotonic() - drawn > (0.5 if screen.live else 30):
            drawn = time.monotonic()
            if screen.live:
                screen.table(table())
            else:
                print("\n".join(table()[1:]), flush=True)
        time.sleep(0.1)
    screen.clear()
    engine.close()
    if signals:
        unfinished = len(runs) - len(finished) - len(failed)
        screen.line(f"stopped with {unfinished} of {len(runs)} runs unfinished; go on with: {again}")
        return 128 + signals[0]
    screen.line(f"{len(finished)} of {len(runs)} runs finished" + (f", {len(failed)} failed:" if failed else ""))
    for run in failed:
        screen.line(f"    {run.name}: {(run.folder / 'log.txt').as_posix()}")
    return 1 if failed else 0


# ---------------------------------------------------------------------------------------------------- report


def final_value(result: dict, metric: str) -> float | None:
    """A run's final evaluation: eval/return is eval.return of its result.json."""
    value = result.get("eval", {}).get(metric.removeprefix("eval/"))
    return float(value) if isinstance(value, (int, float)) else None


def read_metrics(folder: Path) -> list[dict]:
    """The rows of a run's metrics.csv."""
    try:
        with open(folder / "metrics.csv", encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    except OSError:
        return []


def curve(rows: list[dict], metric: str) -> list[tuple[float, float, float]]:
    """(env step, seconds, value) in each row of metrics.csv that holds the metric: at each evaluation, for eval/*."""
    rows = [row for row in rows if row.get(metric) and row.get("global_step")]
    return [(float(row["global_step"]), float(row["wall_time"] or "nan"), float(row[metric])) for row in rows]


def iqm(values, axis=-1):
    """Interquartile mean: the mean without the lowest and the highest quarter (of n values, int(n / 4) each)."""
    from scipy import stats

    return stats.trim_mean(values, 0.25, axis=axis)


def p_improvement(x, y, axis=-1):
    """Share of pairs (a seed of x, a seed of y) in which x is better; ties count half."""
    import numpy as np

    x, y = np.moveaxis(x, axis, -1)[..., :, None], np.moveaxis(y, axis, -1)[..., None, :]
    return ((x > y) + 0.5 * (x == y)).mean((-2, -1))


def mean_difference(x, y, axis=-1):
    """Mean over the seeds of x minus mean over the seeds of y."""
    return x.mean(axis) - y.mean(axis)


def interval(statistic, *samples, axis: int = 0):
    """95 % percentile bootstrap over seeds, or None with fewer than two of them."""
    import numpy as np
    from scipy import stats

    samples = [np.asarray(sample, float) for sample in samples]
    if min(sample.shape[axis] for sample in samples) < 2:
        return None
    options = {"vectorized": True, "axis": axis, "method": "percentile", "n_resamples": 4999}
    low, high = stats.bootstrap(samples, statistic, rng=np.random.default_rng(0), **options).confidence_interval
    return low, high


def area(points: list, until: float) -> float | None:
    """Area under a curve up to a step, divided by its width: the mean return on the way there (trapezoids)."""
    import numpy as np

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


def colour(algorithm: str) -> str:
    return COLOURS.get(algorithm) or OTHER_COLOURS[zlib.crc32(algorithm.encode()) % len(OTHER_COLOURS)]


def column(rows: list[dict], name: str) -> list[float]:
    """What was measured of one figure."""
    return [row[name] for row in rows if row.get(name) is not None]


def with_interval(statistic, *samples, form: str = ".3f") -> str:
    """A statistic over seeds with its interval, as a cell of a table."""
    import numpy as np

    if not all(samples):
        return "-"
    bounds = interval(statistic, *samples)
    text = f"{statistic(*map(np.array, samples)):{form}}"
    return f"{text} [{bounds[0]:{form}}, {bounds[1]:{form}}]" if bounds else f"{text} (1 seed)"


def three_figures(values: list[float]) -> str:
    """The format that shows three figures of numbers of any size: 0.00512, 48.3, 4,446."""
    size = max(map(abs, values), default=0)
    return f",.{max(0, 2 - math.floor(math.log10(size)))}f" if 0 < size < math.inf else ".3f"


def difference(values: dict[int, float], base: dict[int, float]) -> str:
    """A cell minus its baseline, seed -> value each: a mean over pairs if they have the same seeds, else of means."""
    import numpy as np

    if values.keys() == base.keys():
        return with_interval(np.mean, [value - base[seed] for seed, value in values.items()], form="+.3f")
    return with_interval(mean_difference, list(values.values()), list(base.values()), form="+.3f")


def measure(sweep: Sweep, runs: list[Run]) -> dict[Run, dict]:
    """Every figure of every finished run, by the name it has in the CSV, and its curve."""
    import numpy as np

    logs = {run: read_metrics(run.folder) for run in runs}
    known = {name for rows in logs.values() for name in (rows[0] if rows else []) if name}
    for name in [sweep.metric, *(name for cell in sweep.cells for name in cell.also)]:
        if known and name not in known:
            raise SweepError(f'{sweep.path}: no run has a column "{name}" in its metrics.csv{hint(name, known)}')
    curves = {run: curve(logs[run], sweep.metric) for run in runs if run.state == "finished"}
    measured = {}
    for run, points in curves.items():
        result = read_json(run.folder / "result.json")
        final, seconds = final_value(result, sweep.metric), result.get("wall_time")
        shortest = min((p[-1][0] for other, p in curves.items() if other.cell.task == run.cell.task and p), default=0)
        row = {
            "final": points[-1][2] if final is None and points else final,
            "auc": area(points, shortest),
            "sps": result.get("global_step", 0) / seconds if seconds else None,
            "minutes": seconds / 60 if seconds else None,
            **{f"at_{step}": value_at(points, step) for step in sweep.at_steps},
        }
        for threshold in run.cell.thresholds:
            hit = first_at(points, threshold) or (None, None)
            row[f"steps_to_{threshold:g}"], row[f"minutes_to_{threshold:g}"] = hit
        for name in run.cell.also:
            values = [value for _, _, value in curve(logs[run], name)]
            row[name] = float(np.mean(values)) if values else None
        measured[run] = row | {"points": points, "from_curve": final is None}
    return measured


def other_finals(results: list[dict], metric: str) -> list[str]:
    """What else the runs of a cell measured at their end: greedy play, the best checkpoint, shares of the time."""
    import numpy as np

    name = metric.removeprefix("eval/")
    cells = []
    for kind in ("eval_greedy", "eval_best"):
        values = [result[kind][name] for result in results if (result.get(kind) or {}).get(name) is not None]
        cells.append(with_interval(np.mean, values))
    spent = [result["time"] for result in results if result.get("time")]
    shares = {
        part: np.mean([times[part] / (sum(times.values()) or 1.0) for times in spent]) for part in (spent or [{}])[0]
    }
    cells.append(", ".join(f"{part.removeprefix('time/')} {share:.0%}" for part, share in shares.items()) or "-")
    return cells


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def write_report(sweep: Sweep, runs: list[Run], out: Path) -> list[str]:
    """docs/results/<name>.md, .csv and .png. Returns what is missing, in words."""
    import numpy as np

    measured = measure(sweep, runs)
    of = {cell.name: [run for run in runs if run.cell is cell] for cell in sweep.cells}
    done = {name: [measured[run] for run in mine if run in measured] for name, mine in of.items()}
    also = list(dict.fromkeys(name for cell in sweep.cells for name in cell.also))
    gaps, main, compared, unpaired, reached, early, logged, ends = [], [], [], [], [], [], [], []

    def by_seed(cell: Cell, name: str) -> dict[int, float]:
        values = {run.seed: measured[run][name] for run in of[cell.name] if run in measured}
        return {seed: value for seed, value in values.items() if value is not None}

    for cell in sweep.cells:
        rows, base, names = done[cell.name], baseline_of(cell, sweep.cells), [cell.task, cell.name]
        seeds, final = str(len(rows)), column(rows, "final")
        if len(rows) < len(cell.seeds):
            words = ", ".join(f"seed {run.seed} {run.state}" for run in of[cell.name] if run not in measured)
            gaps.append(f"{cell.name}: {len(rows)} of {len(cell.seeds)} seeds finished ({words})")
            seeds = f"**{len(rows)} of {len(cell.seeds)}**"
        better = "baseline" if cell.baseline in (cell.name, cell.algorithm) else "-"
        if base:
            better = with_interval(p_improvement, final, column(done[base.name], "final"), form=".2f")
            pairs = [(by_seed(cell, name), by_seed(base, name)) for name in ("final", "auc")]
            compared.append([*names, base.name, *(difference(*pair) for pair in pairs)])
            unpaired += [cell.name] if any(x and y and x.keys() != y.keys() for x, y in pairs) else []
        statistics = [with_interval(np.mean, final), with_interval(iqm, final)]
        statistics += [with_interval(np.mean, column(rows, "auc")), better]
        speed = [column(rows, "sps"), column(rows, "minutes")]
        speed = [f"{np.mean(x):,.{digits}f}" if x else "-" for digits, x in enumerate(speed)]
        main.append([*names, cell.algorithm, seeds, *statistics, *speed])
        early.append([*names, *(with_interval(np.mean, column(rows, f"at_{step}")) for step in sweep.at_steps)])
        results = [read_json(run.folder / "result.json") for run in of[cell.name] if run in measured]
        ends.append([*names, *other_finals(results, sweep.metric)])
        columns = [column(rows, name) for name in also]
        columns = [values if len(values) == len(rows) else [] for values in columns]  # all seeds or none
        logged.append([*names, *(with_interval(np.mean, values, form=three_figures(values)) for values in columns)])
        for threshold in cell.thresholds if rows else []:
            steps, minutes = (column(rows, f"{kind}_to_{threshold:g}") for kind in ("steps", "minutes"))
            means = [f"{np.mean(steps):,.0f}", f"{np.mean(minutes):.2f}"] if steps else ["not reached", "-"]
            each = [row[f"steps_to_{threshold:g}"] for row in rows]
            each = "; ".join("not reached" if step is None else f"{step:,.0f}" for step in each)
            reached.append([*names, f"{threshold:g}", f"{len(steps)} of {len(rows)}", *means, each])

    metric, parts = f"`{sweep.metric}`", [f"## {sweep.name}", sweep.description]
    if gaps:
        parts.append("**Not complete.** " + "; ".join(gaps) + ". The figures below are of the finished seeds only.")
    header = ["task", "cell", "algorithm", "seeds", f"final {metric}, mean", "IQM", "mean over training (AUC)"]
    parts.append(markdown_table([*header, "P(better than baseline)", "steps/s", "minutes"], main))
    parts.append(f"![{sweep.name}: {sweep.metric} over environment steps]({sweep.name}.png)")
    if compared:
        header = ["task", "cell", "baseline", f"final {metric} minus the baseline's", "AUC minus the baseline's"]
        parts.append(markdown_table(header, compared))
    if reached:
        header = ["task", "cell", "threshold", "reached by", "env steps (mean of those)", "minutes (same)"]
        parts.append(markdown_table([*header, "env steps, seed by seed"], reached))
    if sweep.at_steps:
        header = ["task", "cell", *(f"{metric} at {step:,} steps" for step in sweep.at_steps)]
        parts.append(markdown_table(header, early))
    if also:
        header = ["task", "cell", *(f"`{name}`, mean over training" for name in also)]
        parts.append(markdown_table(header, logged))
    if any(cell != "-" for row in ends for cell in row[2:]):
        header = ["task", "cell", "final, greedy play", "final of the best checkpoint", "time goes to"]
        parts.append(markdown_table(header, ends))
    lines = remarks(sweep, measured)
    if compared:
        apart = f"; not paired: {', '.join(unpaired)}" if unpaired else ""
        lines.append(f"Differences to the baseline are paired by seed where both cells have the same seeds{apart}.")
    parts.append("\n".join(f"- {line}" for line in lines))
    commands = [f"python sweep.py run {Path(os.path.relpath(sweep.path)).as_posix()}"]
    for cell in sweep.cells:
        commands.append(f"\n# {cell.name}: seeds {', '.join(map(str, cell.seeds))}")
        commands.append(shlex.join(of[cell.name][0].command()))
    block = "\n".join(["```bash", *commands, "```"])
    intro = "All runs at once, then the command of each cell for its first seed:"
    parts.append(f"<details><summary>Commands and seeds</summary>\n\n{intro}\n\n{block}\n\n</details>")
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{sweep.name}.md").write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")
    write_csv(sweep, runs, measured, out / f"{sweep.name}.csv")
    draw(sweep, done, out / f"{sweep.name}.png")
    return gaps


def remarks(sweep: Sweep, measured: dict) -> list[str]:
    """What a careful reader should know about the figures."""
    notes = [read_json(run.folder / "sweep.json") for run in measured]
    episodes = {run.cell.settings.get("final-eval-episodes") for run in measured} - {None}
    found = {
        "Final evaluation: episodes per seed": sorted(map(str, episodes)),
        "Machine": sorted({n["machine"] for n in notes if n.get("machine")}),
        "Minutes were measured with engine": sorted({n["engine"] for n in notes if n.get("engine")}),
    }
    lines = [f"{words}: {'; '.join(values)}." for words, values in found.items() if values]
    lines.append("Intervals: 95 %, percentile bootstrap over seeds; with few seeds they are too narrow.")
    if any(sum(r.cell is cell for r in measured) == 2 for cell in sweep.cells):
        lines.append("With two seeds an interval is no more than the two values.")
    for task in dict.fromkeys(cell.task for cell in sweep.cells):
        ends = {row["points"][-1][0] for run, row in measured.items() if run.cell.task == task and row["points"]}
        if len(ends) > 1:
            lines.append(f"{task}: runs differ in length; AUC is taken up to {min(ends):,.0f} steps for all.")
    if any(row["from_curve"] and row["points"] for row in measured.values()):
        lines.append(f"Some final evaluations hold no `{sweep.metric}`: the last value of the curve stands for them.")
    if any(row["final"] is None for row in measured.values()):
        lines.append(f"Some finished runs hold no `{sweep.metric}` at all.")
    versions = {str(read_json(run.folder / "args.json").get("code_version")) for run in measured}
    if len(versions) > 1:
        lines.append(f"The runs come from {len(versions)} versions of the code: {', '.join(sorted(versions))}.")
    return lines


def write_csv(sweep: Sweep, runs: list[Run], measured: dict, path: Path) -> None:
    """One line per run, then per cell the mean and IQM over its finished seeds with their intervals."""
    import numpy as np

    names = [name for row in measured.values() for name in row if name not in ("points", "from_curve")]
    names = list(dict.fromkeys(names))
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["task", "cell", "algorithm", "row", "state", *names, "command"], restval="")
        writer.writeheader()
        for cell in sweep.cells:
            about, rows = {"task": cell.task, "cell": cell.name, "algorithm": cell.algorithm}, []
            for run in (run for run in runs if run.cell is cell):
                rows += [measured[run]] if run in measured else []
                figures = {k: v for k, v in measured.get(run, {}).items() if k in names and v is not None}
                row = {"row": f"seed {run.seed}", "state": run.state, "command": shlex.join(run.command())}
                writer.writerow(about | row | figures)
            about["state"] = f"{len(rows)} of {len(cell.seeds)} seeds"
            for label, statistic in (("mean", np.mean), ("iqm", iqm)):
                summary = {label: {}, f"{label} low": {}, f"{label} high": {}}
                for name in names:
                    values = column(rows, name)
                    if values and len(values) == len(rows):  # no mean of a threshold that some did not reach
                        summary[label][name] = statistic(np.array(values))
                        if bounds := interval(statistic, values):
                            summary[f"{label} low"][name], summary[f"{label} high"][name] = bounds
                for row, figures in summary.items():
                    writer.writerow(about | {"row": row} | figures)


def draw(sweep: Sweep, done: dict[str, list[dict]], path: Path) -> None:
    """One panel per task: mean over seeds with its interval, the interquartile mean dotted, single seeds thin."""
    import matplotlib
    import numpy as np

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tasks = list(dict.fromkeys(cell.task for cell in sweep.cells))
    columns = min(3, len(tasks))
    size = (5.2 * columns, 3.8 * math.ceil(len(tasks) / columns))
    figure, axes = plt.subplots(math.ceil(len(tasks) / columns), columns, figsize=size, squeeze=False)
    for axis, task in itertools.zip_longest(axes.flat, tasks):
        if task is None:
            axis.axis("off")
            continue
        seen: Counter = Counter()
        for cell in (cell for cell in sweep.cells if cell.task == task):
            style = ["-", "--", "-.", (0, (1, 1))][seen[colour(cell.algorithm)] % 4]  # cells of one colour
            seen[colour(cell.algorithm)] += 1
            curves = [row["points"] for row in done[cell.name] if row["points"]]
            if not curves:
                axis.plot([], [], color=colour(cell.algorithm), ls=style, label=f"{cell.name} (no finished seed)")
                continue
            steps = np.array(sorted({p[0] for c in curves for p in c if p[0] <= min(c[-1][0] for c in curves)}))
            values = np.array([np.interp(steps, [p[0] for p in c], [p[2] for p in c]) for c in curves])
            kind = {"color": colour(cell.algorithm), "ls": style}
            count = f"{len(curves)} seed{'s' if len(curves) > 1 else ''}"
            axis.plot(steps, values.mean(0), label=f"{cell.name} ({count})", lw=1.8, **kind)
            axis.plot(steps, values.T, lw=0.5, alpha=0.4, **kind)
            if len(curves) > 3:  # with fewer seeds it is the mean
                axis.plot(steps, iqm(values, 0), color=colour(cell.algorithm), ls=":", lw=1.2)
            if bounds := interval(np.mean, values):
                axis.fill_between(steps, *bounds, color=colour(cell.algorithm), alpha=0.2, lw=0)
        for threshold in sorted({t for c in sweep.cells if c.task == task for t in c.thresholds}):
            axis.axhline(threshold, color="0.6", lw=0.8, ls=":")
        axis.set(title=task, xlabel="environment steps", ylabel=sweep.metric)
        axis.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
        axis.legend(fontsize=7, frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


RESULTS_HEADER = """# Results

Assembled by `python sweep.py results` from the files in `docs/results/`; do not edit this one. Each part names its
seeds, commands and machine. Figures are means over seeds with 95 % bootstrap intervals in brackets; IQM is the
interquartile mean; AUC is the area under the evaluation curve divided by its width, the mean return during training;
P(better) is the share of pairs of seeds in which a cell ends above its baseline (ties count half).
See [sweeps](sweeps.md).

Assembled on: {machine}.
"""


def write_results(folder: Path, first: list[str]) -> Path:
    """docs/results.md from docs/results/*.md: the names given, then those of order.txt there, then the others."""
    parts = {path.stem: path for path in sorted(folder.glob("*.md"))}
    if unknown := [name for name in first if name not in parts]:
        raise SweepError(f"no {folder / unknown[0]}.md; there are: {', '.join(parts) or 'none'}")
    listed = (folder / "order.txt").read_text().split() if (folder / "order.txt").exists() else []
    order = dict.fromkeys([*first, *(name for name in listed if name in parts), *parts])
    texts = [RESULTS_HEADER.format(machine=machine())]
    for name in order:
        text = parts[name].read_text(encoding="utf-8").strip()
        texts.append(re.sub(r"\]\((?![a-z]+:|/|#)(\./)?([^)]+)\)", rf"]({folder.name}/\2)", text) + "\n")
    target = folder.parent / f"{folder.name}.md"
    target.write_text("\n".join(texts), encoding="utf-8")
    return target


# ---------------------------------------------------------------------------------------------------- command line


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise SweepError(f"{message} (see {self.prog} --help)")


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
    report = commands.add_parser("report", help="write a sweep's tables, CSV and curves, then docs/results.md")
    report.add_argument("file", type=Path, help="the sweep")
    report.add_argument("--out", type=Path, help="folder (default: docs/results, and docs/results.md)")
    for part in (run, report):
        part.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where run folders are (default runs)")
    results = commands.add_parser("results", help="assemble docs/results.md from docs/results/*.md")
    results.add_argument("names", nargs="*", help="parts to put first, in this order")
    return parser


def main(words: list[str]) -> int:
    args = parser().parse_args(words)
    results = Path("docs/results")
    if args.verb == "results":
        print(f"wrote {write_results(results, args.names)}")
        return 0
    sweep = load(args.file)
    if args.verb == "report":
        out = args.out or results
        gaps = write_report(sweep, make_runs(sweep, args.runs_dir, [], []), out)
        print("\n".join([*(f"not complete: {gap}" for gap in gaps), f"wrote {out / sweep.name}.md, .csv and .png"]))
        if out == results:
            print(f"wrote {write_results(results, [])}")
        return 0
    if args.jobs < 1 or args.cpus_per_run < 0 or args.gpus_per_run < 0 or args.collect_seconds <= 0:
        raise SweepError("--jobs must be 1 or more, --cpus-per-run and --gpus-per-run not negative")
    runs = make_runs(sweep, args.runs_dir, args.only, args.seeds, args.track)
    if args.dry_run:
        for run in runs:
            print(f"# {run.cell.name}, seed {run.seed}: {run.state}\n{shlex.join(run.command())}")
        return 0
    if args.engine == "ray":
        if args.runs_dir.is_absolute() or ".." in args.runs_dir.parts:
            raise SweepError(f"--runs-dir must be inside the current folder with --engine ray, not {args.runs_dir}")
        resources = (args.cpus_per_run, args.gpus_per_run, args.collect_seconds)
        engine = RayEngine(args.ray_address, *resources, sweep.metric, args.runs_dir)
    else:
        engine = LocalEngine(args.jobs)
    return run_sweep(sweep, runs, engine, shlex.join(["python", "sweep.py", *words]))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SweepError as error:
        print(f"sweep.py: {error}", file=sys.stderr)
        sys.exit(2)
