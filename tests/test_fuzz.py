"""Whatever happens to any script from outside ends in a run that works or in one line and exit code 2 (1 for what the
machine refuses): kills, damaged files, values that cannot be, two starts at once, a full disk, a read-only checkout.

Each test walks through a table of cases. A seeded sample of it runs always; all of it with `pytest -m slow`. Cases are
forked children of this process, which take tenths of a second; what only a new process shows is tried in a few.
docs/reliability.md says which promise which test holds.
"""

import contextlib
import ctypes
import functools
import io
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from test_run import FORK, ROOT, SCRIPTS, SHORT, arguments, content, faster, offline_models, rows_of  # noqa: F401

from envs import checkpoints, offline, run
from envs.arguments import Range, parse
from envs.guard import guarded
from envs.run import load_script

pytestmark = FORK
resource = pytest.importorskip("resource")  # not on Windows
OFFLINE = {"pretrain_vae.py": "train", "train_world_model.py": "train", "test_obs_reward_model.py": "report"}
TINY = {
    "pretrain_vae.py": ["--num-steps", "400", "--epochs", "1", "--hidden-size", "16", "--vae-hidden-size", "16",
                        "--dim", "8", "--reader-updates", "2", "--no-pictures"],
    "train_world_model.py": ["--num-transitions", "400", "--epochs", "1", "--hidden-size", "16"],
    "test_obs_reward_model.py": ["--checkpoint", "{world}", "--num-transitions", "200", "--no-pictures"],
}  # fmt: skip
MEMORY = 6 * 2**30  # bytes that a child may have
PATIENCE = 300.0  # seconds for a child that should end by itself


def few_or_all(few: int):
    """A test of a table: a sample of `few` cases, and, marked slow, all of them."""
    everything = pytest.param(10**9, marks=pytest.mark.slow, id="all")
    return pytest.mark.parametrize("few", [pytest.param(few, id="few"), everything])


def over(scripts, *always: str):
    """A test of every script: of these always, of the others marked slow."""
    marked = [name if name in always else pytest.param(name, marks=pytest.mark.slow) for name in scripts]
    return pytest.mark.parametrize("script", marked)


def chosen(cases: list, few: int, seed: Any = 0) -> list:
    return cases if few >= len(cases) else random.Random(f"{seed}").sample(cases, few)


# children


class Ended(NamedTuple):
    code: int | None  # exit code, -signal, or None: it was still at work
    out: str
    err: str


def call(script: str, argv: list[str]) -> int:
    """What `python script argv` does, in this process."""
    module = load_script(ROOT / script)
    if script in SCRIPTS:
        return run.main(module.Args, module.train, argv)
    if script == "evaluate.py":
        return guarded(lambda _: module.main(parse(module.Args, module.__doc__, argv)))
    if script == "sweep.py":
        return guarded(lambda signals: module.main(argv, signals))
    sys.argv = [script, *argv]
    return offline.main(module.Args, getattr(module, OFFLINE[script]))


def start(script: str, argv: list[str], folder: Path, before: Callable = lambda: None, cwd: Path | None = None) -> int:
    """A forked child whose output goes to `folder`, where it is at work, too; returns its process id."""
    load_script(ROOT / script)
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        os.chdir(cwd or folder)
        for name in ("out", "err"):
            number = os.open(folder / f"{name}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(number, 1 if name == "out" else 2)
        sys.stdout, sys.stderr = open(1, "w", buffering=1, closefd=False), open(2, "w", buffering=1, closefd=False)
        for number in (signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        before()
        code = call(script, argv)
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def end(pid: int, folder: Path, seconds: float = PATIENCE) -> Ended:
    """Wait for a child; one that is at work for longer than `seconds` is stopped."""
    deadline, code = time.monotonic() + seconds, None
    while code is None and time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if found else None
        time.sleep(0.005)
    if code is None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    texts = [(folder / f"{name}.txt") for name in ("out", "err")]
    return Ended(code, *(path.read_text(errors="replace") if path.exists() else "" for path in texts))


def forked(script: str, argv: list[str], folder: Path, before=lambda: None, seconds=PATIENCE, cwd=None) -> Ended:
    return end(start(script, argv, folder, before, cwd), folder, seconds)


def complaint(ended: Ended, codes: tuple[int | None, ...] = (0, 2)) -> str:
    """What is wrong with how a child ended, if anything."""
    lines = [line for line in ended.err.splitlines() if line.strip()]
    if "Traceback" in ended.err + ended.out:
        return f"traceback: {lines[-1] if lines else ended.out[-300:]}"
    if ended.code not in codes:
        return f"exit code {ended.code}: {ended.err[-300:]}"
    if ended.code in (1, 2) and (len(lines) != 1 or not lines[0].startswith(("error: ", "stopped after step"))):
        return f"exit code {ended.code} with {len(lines)} lines: {ended.err[:600]!r}"
    return ""


class Problems(list):
    """All that went wrong in a table of cases, shown at once."""

    def __enter__(self):
        self.count = 0
        return self

    def note(self, case: Any, what: str) -> None:
        self.count += 1
        if what:
            self.append(f"{case}: {what}")
            print(self[-1])

    def __exit__(self, kind, *_):
        print(f"{self.count} cases")
        if kind is None and self:
            pytest.fail(f"{len(self)} of {self.count} cases:\n" + "\n".join(self), pytrace=False)


# what cases start from


@functools.cache
def whole_run(script: str) -> Path:
    """A finished run, made in this process: its children find everything imported and compiled."""
    folder = Path(tempfile.mkdtemp()) / "run"
    with contextlib.redirect_stdout(io.StringIO()):
        assert call(script, ["--run-dir", str(folder), *arguments(script)]) == 0
    return folder


def unfinished(script: str, place: Path) -> Path:
    """A copy of that run that was killed in its final evaluation."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(whole_run(script), place)
    (place / "result.json").unlink()
    return place


def tiny(script: str) -> list[str]:
    words = TINY[script] if script in TINY else arguments(script)
    return [word.format(**offline_models()) if word.startswith("{") else word for word in words]


def difference(folder: Path, expected: Path) -> str:
    """In what a run differs from another, down to the last bit."""
    if rows_of(folder) != rows_of(expected):
        return "other rows in metrics.csv"
    for name in ("last", "best"):
        one, other = (checkpoints.read_checkpoint(d / "checkpoints" / name)[0] for d in (folder, expected))
        if one.keys() != other.keys() or not all(torch.equal(one[key], other[key]) for key in other):
            return f"other weights in checkpoints/{name}"
    one, other = (json.loads((d / "result.json").read_text()) for d in (folder, expected))
    scores = [name for name in other if name.startswith("eval") and one.get(name) != other[name]]
    return f"other scores: {scores}" if scores else ""


# kills


class KillAt:
    """Kills this process at the n-th change to the files below a folder, whoever makes it: before it, or, where a file
    is opened to be written, at once after that."""

    def __init__(self, number: int, folder: Path, half: bool = False):
        self.left, self.folder, self.half, self.busy = number, str(folder), half, False

    def __call__(self) -> None:
        sys.addaudithook(self.hear)

    def hear(self, event: str, args: tuple) -> None:
        if self.busy or event not in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"):
            return
        if event == "open" and not (args[2] or 0) & (os.O_WRONLY | os.O_RDWR):
            return
        if not os.path.abspath(str(args[0])).startswith(self.folder):
            return
        self.left -= 1
        if self.left == 0:
            self.busy = True
            if event == "open" and self.half:
                os.close(os.open(args[0], args[2], 0o666))
            os.kill(os.getpid(), signal.SIGKILL)

    @staticmethod
    def count(script: str, argv: list[str], folder: Path) -> int:
        """How many changes a run makes in all."""
        log = folder / "count"

        def watch() -> None:
            killer = KillAt(10**9, folder / "x")
            killer()
            exit_now = os._exit
            os._exit = lambda code: (log.write_text(str(10**9 - killer.left)), exit_now(code))

        ended = forked(script, argv, folder, watch)
        assert ended.code == 0, ended
        shutil.rmtree(folder / "x")
        return int(log.read_text())


@few_or_all(1)
@over(SCRIPTS, "ppo_baseline.py", "qmix.py")
def test_kills_at_any_change_to_a_file(script, few, tmp_path):
    """Once, twice or three times in a row; then the run ends with the bits of one that was never killed."""
    expected, folder, draws = whole_run(script), tmp_path / "x", random.Random(f"{script} {few}")
    fresh = ["--run-dir", str(folder), *arguments(script)]
    changes = KillAt.count(script, fresh, tmp_path)
    assert changes > 40
    with Problems() as problems:
        for case in range(few if few < 100 else 10):
            kills = [draws.randint(1, changes) for _ in range(case % 3 + 1)]
            for number in [*kills, 0]:
                argv = ["--resume", str(folder)] if (folder / "args.json").exists() else fresh
                killer = KillAt(number, folder, half=draws.random() < 0.5)
                ended = forked(script, argv, tmp_path, killer)
                what = complaint(ended, (0, -signal.SIGKILL) if number else (0,))
                if what:
                    break
            problems.note((case, kills), what or difference(folder, expected))
            shutil.rmtree(folder)


# damage


def flip(path: Path, place: float) -> None:
    """Turn one bit, at a share of the file's length."""
    data = bytearray(path.read_bytes())
    at = int(place * len(data))
    data[at] ^= 1 << at % 8
    path.write_bytes(data)


def become_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"more"),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "garbage": lambda path: path.write_bytes(random.Random(0).randbytes(2000)),
    "a list": lambda path: path.write_text("[1, 2, 3]\n"),
    "foreign": lambda path: path.write_text('{"name": "something else", "args": {}}\n'),
    "deep": lambda path: path.write_text("[" * 100_000),
    "a huge number": lambda path: path.write_text('{"args": ' + "9" * 5000 + "}"),
    "a folder": become_a_folder,
} | {f"bit at {place:.0%}": functools.partial(flip, place=place) for place in (0.0, 0.2, 0.37, 0.5, 0.71, 0.9, 0.999)}
RESUMED = ["args.json", "metrics.csv", "checkpoints/last/resume.safetensors"]
RESUMED += [f"checkpoints/{at}/{name}" for at in ("last", "best") for name in ("spec.json", "weights.safetensors")]


@few_or_all(2)
@over(SCRIPTS, "ppo_baseline.py", "qmix.py", "omg.py")
def test_damaged_run_folders_are_not_resumed(script, few, tmp_path):
    cases = chosen(list(itertools.product(RESUMED, DAMAGES)), few, script)
    with Problems() as problems:
        for name, damage in cases:
            folder = unfinished(script, tmp_path / "x")
            DAMAGES[damage](folder / name)
            before = content(folder)
            ended = forked(script, ["--resume", str(folder)], tmp_path)
            what = complaint(ended)
            if not what and ended.code == 2 and content(folder) != before:
                what = "files were changed"
            if not what and ended.code == 2 and Path(name).name not in ended.err:
                what = f"the file is not named: {ended.err}"
            if not what and ended.code == 0:  # what meant nothing: a bit of a remark, half a row as a kill leaves it
                harmless = damage.startswith("bit") or (name, damage) == ("metrics.csv", "longer")
                what = difference(folder, whole_run(script)) if harmless else "it was resumed"
            problems.note((name, damage), what)


def seats(script: str, role: Path) -> list[str]:
    battle = script in ("mappo_hyper.py", "qmix.py")
    return ["--env-id", "smac-3m", "--roles", str(role)] if battle else ["--roles", f"{role},ns,nh,random"]


@few_or_all(2)
@over(SCRIPTS, "ppo_baseline.py", "qmix.py", "omg.py")
def test_damaged_checkpoints_do_not_play(script, few, tmp_path):
    files = ("spec.json", "weights.safetensors")
    cases = chosen(list(itertools.product(("best", "last"), files, DAMAGES)), few, script)
    with Problems() as problems:
        for place, name, damage in cases:
            folder = unfinished(script, tmp_path / "x") / "checkpoints" / place
            DAMAGES[damage](folder / name)
            before = content(folder.parent)
            ended = forked("evaluate.py", [*seats(script, folder), "--episodes", "8"], tmp_path)
            what = complaint(ended, (2,))
            problems.note(
                (place, name, damage), what or ("files were changed" if content(folder.parent) != before else "")
            )


ODD = (
    None,
    True,
    -1,
    0,
    7,
    10**30,
    1.5,
    "",
    "x",
    "../../etc/passwd",
    [],
    [1],
    [[1]],
    {},
    {"a": 1},
    ["x"] * 3,
    "\ud800",
)


@few_or_all(2)
@over(SCRIPTS, "ppo_baseline.py", "qmix.py", "omg.py")
def test_specs_of_the_right_sum_and_the_wrong_kind(script, few, tmp_path):
    """Whoever edits a spec and its checksum gets one line, or a player: as a role and at --resume."""
    spec = checkpoints.read_spec(whole_run(script) / "checkpoints/best")
    keys = [(key,) for key in spec if key != "sha256"] + [("args", key) for key in spec["args"]]
    keys += [(key, inner) for key in ("env_config", "model_sizes") for inner in spec.get(key, {})]
    cases = [(key, odd) for key in keys for odd in ("gone", *ODD)]
    cases = chosen(cases, min(few, 60), script)
    with Problems() as problems:
        for key, odd in cases:
            folder = unfinished(script, tmp_path / "x")
            for place in ("best", "last"):
                changed = json.loads((folder / f"checkpoints/{place}/spec.json").read_text())
                inner = changed if len(key) == 1 else changed[key[0]]
                inner.update({key[-1]: odd}) if odd != "gone" else inner.pop(key[-1], None)
                sums = changed["sha256"] | {"spec.json": checkpoints.digest_of(changed)}
                (folder / f"checkpoints/{place}/spec.json").write_text(json.dumps(changed | {"sha256": sums}))
            for tool, argv in (("evaluate.py", [*seats(script, folder), "--episodes", "8"]),
                               (script, ["--resume", str(folder)])):  # fmt: skip
                problems.note((tool, key, odd), complaint(forked(tool, argv, tmp_path)))


@few_or_all(2)
@over(SCRIPTS, "ppo_baseline.py", "qmix.py", "omg.py")
def test_states_of_the_right_sum_that_cannot_be(script, few, tmp_path):
    """Compiled code checks no bounds: boards are checked before, and nothing else crashes the process."""
    saved = checkpoints.read_checkpoint(whole_run(script) / "checkpoints/previous", resume=True)
    cases = [(name, odd) for name in saved[1] for odd in (9999, -7, "least", "most", "nan", "turned")]
    with Problems() as problems:
        for name, odd in chosen(cases, min(few, 40), script):
            folder = unfinished(script, tmp_path / "x")
            shutil.rmtree(folder / "checkpoints/last")
            (folder / "checkpoints/previous").rename(folder / "checkpoints/last")  # from where there is work left
            weights, state, spec = checkpoints.read_checkpoint(folder / "checkpoints/last", resume=True)
            array = state[name]
            limits = torch.finfo(array.dtype) if array.is_floating_point() else None
            limits = limits or (torch.iinfo(array.dtype) if array.dtype != torch.bool else None)
            if odd == "turned":
                state[name] = torch.from_numpy(np.array(np.flip(array.numpy())))
            elif array.numel() and limits:
                value = {"least": limits.min, "most": limits.max, "nan": float("nan")}.get(odd, odd)
                if value != value and not array.is_floating_point():
                    continue
                array.view(-1)[array.numel() // 2] = max(limits.min, min(limits.max, value))
            checkpoints.write_checkpoint(folder / "checkpoints/last", weights, state, spec)
            ended = forked(script, ["--resume", str(folder)], tmp_path)
            crashed = f"killed by signal {-ended.code}" if (ended.code or 0) < 0 else ""
            problems.note((name, odd), complaint(ended, (0, 1, 2)) if name.startswith("env.") else crashed)


# data files and models of the offline scripts


@functools.cache
def data_file(script: str) -> Path:
    """An .npz of the kind that a script learns from."""
    name = "vae" if script == "pretrain_vae.py" else "world"
    stem = {"vae": "vae", "world": "world_model"}[name]
    folder = (Path(tempfile.gettempdir()) / offline_models()[name]).parents[name == "vae"]
    (path,) = folder.glob(f"data/msh*{stem}__*.npz")
    return path


def change_column(path: Path, change: Callable[[dict], Any]) -> None:
    columns = dict(np.load(path))
    change(columns)
    np.savez_compressed(path, **columns)


def claim_size(path: Path) -> None:
    """A column whose header promises more than any memory holds."""
    columns = dict(np.load(path))
    np.savez(path, **columns)
    data = path.read_bytes()
    at = data.index(b"'shape': (", data.index(b"episode.npy"))
    stop = data.index(b")", at)
    path.write_bytes(data[:at] + b"'shape': (9".ljust(stop - at, b"9") + data[stop:])


COLUMNS: dict[str, Callable[[dict], Any]] = {
    "no episode": lambda x: x.pop("episode"),
    "one row less": lambda x: x.update(episode=x["episode"][1:]),
    "no rows": lambda x: x.update({name: column[:0] for name, column in x.items() if name != "meta"}),
    "one episode": lambda x: x.update(episode=x["episode"] * 0),
    "floats": lambda x: x.update(episode=x["episode"] + 0.5),
    "texts": lambda x: x.update(episode=x["episode"].astype(str)),
    "two dimensions": lambda x: x.update(episode=x["episode"][:, None]),
    "below zero": lambda x: x.update(episode=x["episode"] - 10**6),
    "no dimensions": lambda x: x.update({name: np.array(0) for name in x if name != "meta"}),
    "a list as meta": lambda x: x.update(meta=np.array("[1]")),
    "meta of another game": lambda x: x.update(meta=np.array(str(x["meta"]).replace("msh-4h1s-4x4", "msd-4x4"))),
    "numbers as meta": lambda x: x.update(meta=np.arange(3)),
    "actions": lambda x: x.update({name: x[name] + 100 for name in x if name.startswith("action")}),
    "no numbers": lambda x: x.update({k: v * np.nan for k, v in x.items() if v.dtype.kind == "f"}),
    "pickles": lambda x: x.update(episode=np.array([None] * len(x["episode"]))),
}
DATA = {name: damage for name, damage in DAMAGES.items() if name != "a folder"}
DATA |= {name: functools.partial(change_column, change=change) for name, change in COLUMNS.items()}
DATA |= {f"bit at {k / 40}": functools.partial(flip, place=k / 40) for k in range(40)}
DATA |= {"a folder": become_a_folder, "too large": claim_size}


@few_or_all(4)
@pytest.mark.parametrize("script", OFFLINE)
def test_damaged_data_files(script, few, tmp_path):
    with Problems() as problems:
        for damage in chosen(list(DATA), few, script):
            path = Path(shutil.copy(data_file(script), tmp_path / "data.npz"))
            DATA[damage](path)
            out = ["--out-dir", str(tmp_path / "out")] if "obs_reward" not in script else []
            ended = forked(script, [*tiny(script), "--data", str(path), *out], tmp_path)
            what = complaint(ended)
            if not what and ended.code == 0 and not damage.startswith("bit"):
                harmless = ("below zero", "no numbers", "one episode", "longer")  # bytes behind the end of a zip file
                what = "it was learned from" if damage not in harmless else ""
            problems.note(damage, what)
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
            path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)


MODELS = {  # script -> setting and model that it takes
    "hopplus_mcts.py": ("--vae-ckpt", "vae"), "hopplus_nomcts.py": ("--world-ckpt", "world"),
    "test_obs_reward_model.py": ("--checkpoint", "world"),
}  # fmt: skip


@few_or_all(4)
@pytest.mark.parametrize("script", MODELS)
def test_damaged_offline_models(script, few, tmp_path):
    setting, model = MODELS[script]
    cases = list(itertools.product(("spec.json", "weights.safetensors"), DAMAGES))
    with Problems() as problems:
        for name, damage in chosen(cases, few, script):
            shutil.rmtree(tmp_path / "model", ignore_errors=True)
            shutil.copytree(offline_models()[model], tmp_path / "model")
            DAMAGES[damage](tmp_path / "model" / name)
            before = content(tmp_path / "model")
            ended = forked(script, [*tiny(script), setting, str(tmp_path / "model")], tmp_path)
            what = complaint(ended, (2,)) or ("files were changed" if content(tmp_path / "model") != before else "")
            problems.note((name, damage), what or ("a run folder was left" if list(tmp_path.glob("runs/*")) else ""))


# values

WRONG = ("nan", "inf", "-inf", "-1", "-1e-9", "1e300", "9" * 30, "1e400", "x", "", "1.5", "0x10", "1_0", "True", "None")


def numeric(script: str) -> dict[str, tuple[type, list[Range]]]:
    """The settings of a script that are numbers: name -> type and ranges."""
    hints, found = get_type_hints(load_script(ROOT / script).Args, include_extras=True), {}
    for field in fields(load_script(ROOT / script).Args):
        hint = hints[field.name]
        kind, *extra = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if kind in (int, float):
            found[field.name] = kind, [x for x in extra if isinstance(x, Range)]
    return found


EVERY = (*SCRIPTS, *OFFLINE, "evaluate.py")


@few_or_all(12)
@pytest.mark.parametrize("script", EVERY)
def test_values_that_cannot_be(script, few, tmp_path, monkeypatch, capsys):
    """Refused at once, in one line that names the setting, before any file is made: in this very process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    cases = []
    for name, (kind, (limits, *_)) in numeric(script).items():
        for text in WRONG:
            with contextlib.suppress(ValueError):
                if limits.low <= kind(text) <= limits.high:
                    continue
            cases.append((name, text))
    with Problems() as problems:
        for name, text in chosen(cases, few, script):
            flag = f"--{name.replace('_', '-')}"
            code = call(script, [f"{flag}={text}"])
            ended = Ended(code, *capsys.readouterr())
            problems.note(
                (name, text), complaint(ended, (2,)) or ("" if flag in ended.err else f"unnamed: {ended.err}")
            )
    assert not list(tmp_path.iterdir())


def near(script: str) -> list[tuple[str, str]]:
    """The ends of the ranges of all settings, which may be odd but are allowed."""
    ends = []
    for name, (kind, (limits, *_)) in numeric(script).items():
        if name not in ("seed", "torch_threads"):
            ends += [(name, str(kind(limits.low))), (name, str(kind(limits.high)))]
        ends += [(name, "1e-300")] if kind is float and limits.low <= 0 else []
    return ends


@few_or_all(1)
@over(EVERY, "hopplus_nomcts.py", "pretrain_vae.py", "evaluate.py")
def test_values_at_the_ends_of_their_ranges(script, few, tmp_path):
    """A run that works (for as long as we look), or one line: too large for this machine, or no numbers any more."""
    argv = tiny(script) if script != "evaluate.py" else ["--roles", "ns,nh,mix,random", "--episodes", "20"]
    place = ["--run-dir", "{x}"] if script in SCRIPTS else ["--out-dir", "{x}"] if "obs_reward" not in script else []
    place = [] if script == "evaluate.py" else [word.format(x=tmp_path / "x") for word in place]
    if script in SCRIPTS:
        whole_run(script)
        argv = [*argv, "--total-timesteps", "128", "--eval-every", "64"]
    with Problems() as problems:
        for name, text in chosen(near(script), few, script):
            ended = forked(script, [*argv, *place, f"--{name.replace('_', '-')}={text}"], tmp_path, seconds=6)
            problems.note((name, text), complaint(ended, (0, 1, 2, None)))
            shutil.rmtree(tmp_path / "x", ignore_errors=True)


LONE = ["--num-envs", "1", "--roles", "hop,random,random,random"]


@pytest.mark.parametrize(("script", "argv"), [
    ("hopplus_mcts.py", [*LONE, "--dream-envs", "0"]),
    ("hopplus_mcts.py", [*LONE, "--dream-envs", "0", "--num-steps", "2"]),
    ("hopplus_nomcts.py", LONE),
    ("hopplus_nomcts.py", [*LONE, "--num-steps", "2", "--real-ratio", "1"]),
    ("ppo_baseline.py", ["--num-envs", "1", "--num-steps", "1", "--roles", "ppo,random,random,random"]),
    ("mappo_hyper.py", ["--num-envs", "1", "--num-steps", "1", "--chunk-length", "1"]),
    ("qmix.py", ["--num-envs", "1", "--num-steps", "1", "--buffer-steps", "1"]),
])  # fmt: skip
def test_the_smallest_runs(script, argv, tmp_path):
    """One game, in which whole iterations have nobody to learn from."""
    whole_run(script)
    words = [*tiny(script), "--total-timesteps", "80", "--eval-every", "40", *argv, "--run-dir", str(tmp_path / "x")]
    ended = forked(script, words, tmp_path)
    assert not complaint(ended, (0,)), complaint(ended, (0,))


PLACES = {  # where a script writes to
    **{script: ["--run-dir"] for script in SCRIPTS}, **{script: ["--out-dir"] for script in OFFLINE},
    "test_obs_reward_model.py": ["--json"], "sweep.py": ["--runs-dir"],
    "evaluate.py": ["--json", "--csv", "--gif", "--plot"],
}  # fmt: skip
ENDINGS = {"--json": ".json", "--csv": ".csv", "--gif": ".gif", "--plot": ".png"}


@pytest.mark.parametrize("script", PLACES)
def test_unusable_paths(script, tmp_path):
    """Named in one line before any work, and what was there stays."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder.json").mkdir()
    bad = [tmp_path / "file" / "x", Path("/dev/null/x"), tmp_path / ("x" * 300), Path("/proc/x")]
    bad += [tmp_path / "folder.json" if script in ("evaluate.py", "test_obs_reward_model.py") else tmp_path / "file"]
    argv = {"sweep.py": ["run", "experiments/smoke.toml"], "evaluate.py": ["--episodes", "8"]}.get(script)
    with Problems() as problems:
        for setting, path in itertools.product(PLACES[script], bad):
            text = f"{path}{ENDINGS.get(setting, '')}" if path.suffix != ".json" else str(path)
            ended = forked(script, [*(argv or tiny(script)), setting, text], tmp_path, cwd=ROOT)
            problems.note((setting, path), complaint(ended, (2,)))
    assert (tmp_path / "file").read_text() == "mine"


# the world around


@over([*SCRIPTS, "pretrain_vae.py", "train_world_model.py"], "hopplus_mcts.py", "train_world_model.py")
def test_two_starts_at_once(script, tmp_path):
    """In the same second, with the same words: two folders, the same bits."""
    here, stop_the_clock = tmp_path / "here", lambda: setattr(time, "time", lambda: 1_700_000_000.0)
    if script in SCRIPTS:
        whole_run(script)
    for folder in (here, tmp_path / "1", tmp_path / "2"):
        folder.mkdir()
    words = [*tiny(script), *([] if script in SCRIPTS else ["--out-dir", "out"])]
    pids = [start(script, words, tmp_path / name, stop_the_clock, cwd=here) for name in ("1", "2")]
    for pid, name in zip(pids, ("1", "2"), strict=True):
        ended = end(pid, tmp_path / name)
        assert not complaint(ended, (0,)), ended
    made = sorted(here.glob("runs/*" if script in SCRIPTS else "out/*__*"))
    assert len(made) == 2
    if script in SCRIPTS:
        assert not any(difference(folder, whole_run(script)) for folder in made)
    else:
        one, two = (path.read_bytes() for path in here.glob("out/*__*/**/weights.safetensors"))
        assert one == two


@over(EVERY, "ppo_baseline.py", "pretrain_vae.py", "evaluate.py")
def test_a_disk_that_is_full(script, tmp_path):
    """One line, exit code 1 (2 if it shows before any work), and whatever was whole stays whole."""
    place = [PLACES[script][0], str(tmp_path / f"x{ENDINGS.get(PLACES[script][0], '')}")]
    if script in SCRIPTS:
        whole_run(script)
    words = [*(tiny(script) if script != "evaluate.py" else ["--episodes", "8"]), *place]
    with Problems() as problems:
        for most in (10, 700, 9000, 60_000):  # bytes of the largest file
            limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (most, most))
            pid = start(script, words, tmp_path, lambda limit=limit: (silence(tmp_path), limit()))
            ended = end(pid, tmp_path)
            what = complaint(ended, (0, 1, 2))
            for last in tmp_path.glob("x/checkpoints/*"):
                if last.name in ("last", "previous", "best") and not checkpoints.is_whole(last):
                    what = what or f"{last} is not whole"
            problems.note(most, what)
            for left in tmp_path.glob("x*"):
                shutil.rmtree(left) if left.is_dir() else left.unlink()


def silence(folder: Path) -> None:
    """Output goes into pipes, which no limit of files' sizes concerns: a child of this child writes it down."""
    for number, name in ((1, "out"), (2, "err")):
        reader, writer = os.pipe()
        if not os.fork():
            os.close(writer)
            with open(reader, "rb") as pipe, open(folder / f"{name}.txt", "wb") as file:
                for line in pipe:
                    file.write(line)
                    file.flush()
            os._exit(0)
        os.close(reader)
        os.dup2(writer, number)
        os.close(writer)


def command(script: str, argv: list[str], cwd: Path) -> subprocess.Popen:
    """A new process, as a user starts it."""
    words, pipe = [sys.executable, str(ROOT / script), *argv], subprocess.PIPE
    return subprocess.Popen(words, cwd=cwd, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize("seconds", [0.3, pytest.param(1.5, marks=pytest.mark.slow)])
@over(EVERY, "ppo_baseline.py")
def test_ctrl_c_at_the_start(script, seconds, tmp_path):
    """While Python still imports: one line, no traceback, nothing left behind."""
    process = command(script, tiny(script) if script != "evaluate.py" else [], tmp_path)
    await_import(process)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode in (-signal.SIGINT, 128 + signal.SIGINT) and not err
    assert re.search("^stopped", out, re.M) and not list(tmp_path.iterdir())


SWALLOWED = """
import envs, os, signal, sys
from envs.guard import guarded
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    pass
sys.exit(guarded(lambda signals: print("worked")))
"""


@pytest.mark.parametrize("script", [True, False])
def test_a_ctrl_c_that_a_library_swallows_in_its_imports(script, tmp_path):
    """The program does not begin. Without a program, as in a notebook, what was interrupted before means nothing."""
    (tmp_path / "program.py").write_text(SWALLOWED)
    how = [str(tmp_path / "program.py")] if script else ["-c", SWALLOWED]
    where = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, *how], capture_output=True, text=True, env=where)
    expected = (130, "stopped: there is nothing to save\n", "") if script else (0, "worked\n", "")
    assert (ended.returncode, ended.stdout, ended.stderr) == expected


@pytest.mark.parametrize("how", [["program.py"], ["-m", "program"]])
def test_ctrl_c_in_the_imports_of_a_program(how, tmp_path):
    """Whether it is started as a file or as a module, as envs.play is."""
    (tmp_path / "program.py").write_text("import envs\nimport library\n")
    (tmp_path / "library.py").write_text("raise KeyboardInterrupt")
    where = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, *how], capture_output=True, text=True, env=where, cwd=tmp_path)
    assert (ended.stdout, ended.stderr) == ("stopped: there is nothing to save\n", "")


def await_import(process: subprocess.Popen) -> None:
    """Wait until a new process has come to its imports: numba's libraries are there."""
    maps, deadline = Path(f"/proc/{process.pid}/maps"), time.monotonic() + PATIENCE
    if not maps.exists():
        pytest.skip("no /proc")
    while "llvmlite" not in maps.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.slow  # compiles everything
def test_a_checkout_and_a_home_that_cannot_be_written(tmp_path):
    """Nor a folder for compiled code: it compiles into a temporary folder and runs."""
    project, home, work = (tmp_path / name for name in ("project", "home", "work"))
    shutil.copytree(ROOT, project, ignore=shutil.ignore_patterns(".*", "__pycache__", "runs", "vae_ckpts", "docs"))
    home.mkdir()
    work.mkdir()
    for folder in (home, project, *(path for path in project.rglob("*") if path.is_dir())):
        folder.chmod(0o555)
    environment = {"HOME": str(home), "TMPDIR": str(work), "PYTHONPATH": str(project)}
    argv = ["--num-envs", "4", "--num-steps", "4", "--total-timesteps", "32", "--eval-every", "0"]
    for place, words in (
        ("", ["--final-eval-episodes", "4"]),
        (str(home / "cache"), ["--run-dir", str(project / "x")]),
    ):
        process = subprocess.Popen(
            [sys.executable, str(project / "ppo_baseline.py"), *argv, *words], cwd=work, text=True,
            env=os.environ | environment | {"NUMBA_CACHE_DIR": place}, preexec_fn=obey_permissions,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        out, err = process.communicate(timeout=900)
        if place:
            assert process.returncode == 2 and err.count("\n") == 1 and "cannot be made: Permission denied" in err
        else:
            assert process.returncode == 0 and "finished in" in out and "Traceback" not in err, err
    assert not list(home.iterdir())
    assert not [path for path in work.iterdir() if path.name.startswith("hopplus-numba")], "compiled code was left"


def obey_permissions() -> None:
    """Root, too, writes only where it may (Linux: without the capability to override)."""
    if os.geteuid() == 0:
        ctypes.CDLL(None).prctl(24, 1)


@over(EVERY, "mappo_hyper.py", "train_world_model.py", "evaluate.py")
def test_output_that_nobody_reads(script, tmp_path):
    """`| head -1`, or no output at all: the work goes on to its end."""

    def close() -> None:
        reader, writer = os.pipe()
        os.close(reader)
        for number in (1, 2):
            os.dup2(writer, number)

    place = [PLACES[script][0], str(tmp_path / f"x{ENDINGS.get(PLACES[script][0], '')}")]
    if script in SCRIPTS:
        whole_run(script)
    words = [*(tiny(script) if script != "evaluate.py" else ["--episodes", "8"]), *place]
    assert forked(script, words, tmp_path, close).code == 0
    if script in SCRIPTS:
        assert not difference(tmp_path / "x", whole_run(script))
    else:
        assert list(tmp_path.glob("x*"))


def await_guard(pid: int) -> None:
    """Wait until a child hears SIGTERM."""
    status, deadline = Path(f"/proc/{pid}/status"), time.monotonic() + PATIENCE
    if not status.exists():
        pytest.skip("no /proc")
    while not int(re.search(r"SigCgt:\s*(\w+)", status.read_text())[1], 16) >> (signal.SIGTERM - 1) & 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
@pytest.mark.parametrize("script", ["pretrain_vae.py", "train_world_model.py", "evaluate.py", "sweep.py"])
def test_stop_signals_of_scripts_without_a_run_folder(script, number, tmp_path):
    """One line, exit code 128 + n; what is half done is not taken for a checkpoint."""
    words = {"evaluate.py": ["--episodes", "4000000"], "sweep.py": ["run", "experiments/smoke.toml"]}.get(script)
    place = {"evaluate.py": [], "sweep.py": ["--runs-dir", str(tmp_path / "runs")]}.get(script)
    words = [
        *(words or [*TINY[script], "--epochs", "1000000"]),
        *(place or ["--out-dir", str(tmp_path / "out")] * (not words)),
    ]
    pid = start(script, words, tmp_path, cwd=ROOT)
    await_guard(pid)
    time.sleep(0.3)
    os.kill(pid, number)
    ended = end(pid, tmp_path)
    assert not complaint(ended, (128 + number,)), ended
    assert "stopped" in ended.out and not ended.err
    assert not list(tmp_path.glob("out/*__*/**/spec.json"))


@over(SCRIPTS, "hopplus_nomcts.py")
def test_resumed_in_another_folder(script, tmp_path):
    """Relative paths among the settings are meant from where the run began."""
    home, away = tmp_path / "home", tmp_path / "away"
    for folder in (home, away):
        folder.mkdir()
    words = tiny(script)
    for k, word in enumerate(words):
        if Path(word).is_dir():
            shutil.copytree(word, home / f"model{k}")
            words[k] = f"model{k}"
    changes = random.Random(script).randint(12, 24)
    folder = tmp_path / "x"
    whole_run(script)
    ended = forked(script, ["--run-dir", "../x", *words], tmp_path, KillAt(changes, folder), cwd=home)
    assert ended.code == -signal.SIGKILL, ended
    ended = forked(script, ["--resume", "../x"], tmp_path, cwd=away)
    assert not complaint(ended, (0,)), ended
    assert not difference(folder, whole_run(script))


# the table of promises


def test_every_test_that_docs_name_is_there():
    text = (ROOT / "docs/reliability.md").read_text()
    named = re.findall(r"`(test_\w+)\.py::(test_\w+)`", text)
    assert len(named) > 30
    for file, test in named:
        assert re.search(rf"^def {test}\(", (ROOT / f"tests/{file}.py").read_text(), re.M), f"{file}.py::{test}"
    mine = re.findall(r"^def (test_\w+)\(", Path(__file__).read_text(), re.M)
    assert {test for file, test in named if file == "test_fuzz"} >= set(mine) - {
        "test_every_test_that_docs_name_is_there"
    }
