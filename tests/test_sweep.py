"""sweep.py: its files, its commands, stopping and going on, and its statistics, against a stand-in training script."""

import csv
import dataclasses
import fcntl
import itertools
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import numpy as np
import pytest

import report
import sweep
from envs.errors import ConfigError
from envs.guard import StopSignals

ROOT = Path(__file__).resolve().parent.parent
TOY = """\
name = "toy"
seeds = [1, 2]
script = "train.py"
baseline = "plain"
thresholds = [1.5]
at_steps = [3000]

[fixed]
total-timesteps = 10000

[[cells]]
name = "plain"
algorithm = "PPO"
args = { anneal = false, roles = "ppo,ns" }

[[cells]]
name = "other"
algorithm = "HOP"
grid = { learning-rate = [0.2, 0.3], optimizer = ["adam"] }
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with a training script and a sweep."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "tests/fixtures/stand_in.py", "train.py")
    Path("toy.toml").write_text(TOY)
    return tmp_path


def write_toy(cells: str, seeds="[1, 2]", fixed="total-timesteps = 10000") -> None:
    Path("toy.toml").write_text(f'seeds = {seeds}\nscript = "train.py"\n[fixed]\n{fixed}\n{cells}')


def start(*words, **options) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "sweep.py"), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def sweep_py(*words) -> tuple[int, str]:
    process = start(*words)
    out, _ = process.communicate(timeout=300)
    return process.returncode, out


def main(words: list[str]) -> int:
    """The same in this process; errors are exceptions."""
    return sweep.main(words, StopSignals())


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def outcomes(folder: Path) -> dict:
    """Everything a sweep's runs ended with, byte for byte."""
    names = ("metrics.csv", "result.json", "checkpoints/last/spec.json")
    return {(run.name, name): (run / name).read_bytes() for run in folder.glob("*__*") for name in names}


# the file and its commands


def test_dry_run_prints_ordinary_commands(place, capsys):
    assert main(["run", "toy.toml", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    lines = [re.sub("__[0-9a-f]{8}__", "__HASH__", line) for line in printed.splitlines()]
    base = "python train.py --total-timesteps 10000"
    expected = []
    for seed in (1, 2):
        for name, flags in (
            ("plain", "--no-anneal --roles ppo,ns"),
            ("other_learning-rate=0.2", "--learning-rate 0.2 --optimizer adam"),
            ("other_learning-rate=0.3", "--learning-rate 0.3 --optimizer adam"),
        ):
            expected += [
                f"# {name}, seed {seed}: missing",
                f"{base} {flags} --seed {seed} --run-dir runs/toy/{name}__HASH__{seed}",
            ]
    assert lines == expected
    assert not Path("runs").exists()
    # pasted into a shell, the first one is a run
    command = printed.splitlines()[1].replace("python", sys.executable, 1)
    subprocess.run(command, shell=True, check=True, capture_output=True)
    main(["run", "toy.toml", "--dry-run"])
    assert "# plain, seed 1: finished" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--only", "plain"], [("plain", 1), ("plain", 2)]),
        (["--only", "other", "--seeds", "2"], [("other_learning-rate=0.2", 2), ("other_learning-rate=0.3", 2)]),
        (["--only", "*0.3", "--only", "plain", "--seeds", "1"], [("plain", 1), ("other_learning-rate=0.3", 1)]),
    ],
)
def test_only_and_seeds_narrow(place, capsys, words, expected):
    main(["run", "toy.toml", "--dry-run", *words])
    found = re.findall(r"^# (\S+), seed (\d+):", capsys.readouterr().out, re.M)
    assert [(name, int(seed)) for name, seed in found] == expected


@pytest.mark.parametrize(
    "old, new, message",
    [
        (
            'script = "train.py"',
            'script = "trian.py"',
            'toy.toml:3: there is no script "trian.py"; did you mean "train.py"?',
        ),
        ("thresholds =", "treshholds =", 'toy.toml:5: unknown key "treshholds"; did you mean "thresholds"?'),
        ("seeds = [1, 2]", 'seeds = "1-2"', 'toy.toml:2: "seeds" must be list[int], not "1-2"'),
        ("at_steps = [3000]", 'also = "a/b"', 'toy.toml:6: "also" must be list[str], not "a/b"'),
        ("seeds = [1, 2]", "seeds = [1, 1]", 'toy.toml:2: "seeds" must name each seed once, and at least one'),
        ("total-timesteps", "total-timestep", 'toy.toml:9: train.py has no setting "total-timestep"; did you mean'),
        ("10000", '"many"', 'toy.toml:9: "total-timesteps" of train.py must be int, not "many"'),
        ("anneal = false", "anneal = 1", 'toy.toml:14: "anneal" of train.py must be bool, not 1'),
        ("anneal = false", "seed = 1", 'toy.toml:14: "seed" is set by sweep.py itself'),
        (
            '["adam"]',
            '["rmsprop"]',
            "toy.toml:19: \"optimizer\" of train.py must be Literal['sgd', 'adam'], not \"rmsprop\"",
        ),
        ("[0.2, 0.3]", "0.2", 'toy.toml:19: "learning-rate" in a grid must be a list of values, not 0.2'),
        ('name = "other"\n', "", 'toy.toml:16: this cell has no "name"'),
        ('name = "other"', 'name = "plain"\nargs={}', "toy.toml:16: a cell is called"),
        (
            'baseline = "plain"',
            'baseline = "plane"',
            'toy.toml:4: baseline "plane" is no cell or algorithm of this file',
        ),
        ('name = "toy"', 'name = "a/b"', 'toy.toml:1: "name" may hold'),
        ("[fixed]", "[fixed", "toy.toml:8: not TOML"),
        ('name = "toy"', "name = " + "[" * 10_000, "toy.toml is no sweep: it is nested too deeply"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(place, old, new, message):
    assert old in TOY
    text = TOY.replace(old, new, 1)
    if 'name = "plain"\nargs' in new:
        text = text.replace("grid = {", "#")
    Path("toy.toml").write_text(text)
    with pytest.raises(ConfigError) as error:
        main(["run", "toy.toml", "--dry-run"])
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_lines_are_found_in_every_way_to_write_a_key(place):
    text = '''\
a = """
c-d = 1
"""
[fixed] # words
# c-d = 2
"c-d" = 1
[[cells]]
args.x = 1
args = { y = 1, z = [1, 2] }
[cells.grid]
lr = [
  1,
]
[[cells]]
name = "n"
'''
    Path("keys.toml").write_text(text.replace("args = {", "more = {"))
    file = sweep.SweepFile(Path("keys.toml"))
    first, second = file.header(r"\[\[cells", 0), file.header(r"\[\[cells", 1)
    assert (file.header(r"\[fixed"), first, second) == (4, 7, 14)
    assert file.line("c-d") == 6 and file.line("name", second) == 15 and file.line("nothing", second) == 14
    assert [file.line(key, first) for key in ("x", "y", "z", "lr")] == [8, 9, 9, 11]


BASE = """\
from typing import Annotated
from words import Share as Fraction
Positive = Annotated[int, Range(1), arg(metavar="1..")]
Goals = Literal["learned", "none"]

class RunArgs:
    seed: Positive = 1
    run_dir: str = ""
    resume: str = ""
    track: bool = False
    eval_every: Positive = 25_000
    gamma: Fraction = 0.99
"""
SCRIPT = """\
from base import Goals, Positive, RunArgs

class Args(RunArgs):
    num_envs: Positive = 2 * 64
    eval_every: Positive = 5_000
    window: Positive | None = None
    goals: Goals = "learned"
    trees: Annotated[int, Range(1, 5)] = 2
"""


def test_flags_and_types_of_base_classes_are_read_from_other_files(place):
    Path("base.py").write_text(BASE)
    Path("words.py").write_text("from typing import Annotated\nShare = Annotated[float, Range(0, 1)]\n")
    Path("train.py").write_text(SCRIPT + "raise SystemExit('this file was run')\n")
    good = "num-envs = 4\nwindow = 3\ngamma = 1\ntrees = 4\ngoals = 'none'\ntrack-nothing = 1"
    write_toy('[[cells]]\nname = "a"\n', fixed=good)
    with pytest.raises(ConfigError, match=r'train\.py has no setting "track-nothing"'):
        sweep.load(Path("toy.toml"))
    write_toy('[[cells]]\nname = "a"\n', fixed=good.rpartition("\n")[0])
    (cell,) = sweep.load(Path("toy.toml")).cells
    assert cell.settings["eval-every"] == 5000  # the subclass's, not the base's
    assert cell.flags == "--num-envs 4 --window 3 --gamma 1 --trees 4 --goals none".split()
    wrong = {
        "num-envs = 4.5": "must be int, not 4.5",
        "gamma = '1'": 'must be float, not "1"',
        "window = true": "must be int | None, not true",
        "trees = false": "must be int, not false",
        "goals = 'no'": "must be Literal['learned', 'none'], not \"no\"",
        "eval-every = 'x'": 'must be int, not "x"',
    }
    for line, message in wrong.items():
        write_toy('[[cells]]\nname = "a"\n', fixed=line)
        with pytest.raises(ConfigError, match=re.escape(f'toy.toml:4: "{line.split()[0]}" of train.py {message}')):
            sweep.load(Path("toy.toml"))


def test_the_flags_of_every_run_are_those_of_the_recorder():
    from envs.run import RunArgs

    fields = sweep.Source(ROOT / "envs/run.py").fields("RunArgs")
    assert {key: default for key, (_, default) in fields.items()} == {
        field.name.replace("_", "-"): field.default for field in dataclasses.fields(RunArgs)
    }
    assert all(sweep.accepts(kind, default) for kind, default in fields.values() if default is not None)
    assert not any(sweep.accepts(kind, [1]) for kind, _ in fields.values())


def test_cells_that_would_be_the_same_run_are_pointed_out(place):
    # "b" spells out a default of the script: the same run as "a" all the same
    write_toy('[[cells]]\nname = "a"\n[[cells]]\nname = "b"\nargs = { learning-rate = 0.1 }\n')
    with pytest.raises(ConfigError, match=r'toy.toml:7: cells "a" \(line 5\) and "b" would be the same run'):
        sweep.load(Path("toy.toml"))


@pytest.mark.parametrize(
    "words",
    [
        ["run"],
        ["run", "none.toml"],
        ["walk"],
        ["run", "toy.toml", "--seeds", "7"],
        ["run", "bad.toml"],
        ["results", "x"],
        ["run", "toy.toml", "--jobs", "0"],
        ["run", "toy.toml", "--runs-dir", "train.py"],
        ["report", "toy.toml", "--out", "train.py"],
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(place, words):
    Path("bad.toml").write_text("[fixed\n")
    code, out = sweep_py(*words)
    assert code == 2 and out.count("\n") == 1 and out.startswith("error: "), out


def test_a_changed_setting_is_a_new_folder(place):
    def folder():
        return sweep.make_runs(sweep.load(Path("toy.toml")), Path("runs"), ["plain"], [1])[0].folder

    first = folder()
    Path("toy.toml").write_text(TOY.replace("10000", "20000"))
    assert folder() != first
    Path("toy.toml").write_text(TOY)
    assert folder() == first
    assert sweep_py("run", "toy.toml", "--only", "plain", "--seeds", "1")[0] == 0
    source = Path("train.py").read_text()
    Path("train.py").write_text(source.replace("seed: int = 1", "seed: int = 1\n    a_new_flag: int = 3"))
    assert folder() == first  # a new flag changes nothing about the old run
    Path("train.py").write_text(source.replace("learning_rate: float = 0.1", "learning_rate: float = 0.2"))
    changed = folder()
    assert changed != first  # but a changed default does
    before = outcomes(Path("runs/toy"))
    assert sweep_py("run", "toy.toml", "--only", "plain", "--seeds", "1")[0] == 0
    assert folder() == changed and (changed / "result.json").exists()
    assert before.items() < outcomes(Path("runs/toy")).items()


def test_track_gives_group_and_tags_and_is_no_setting(place, capsys):
    main(["run", "toy.toml", "--dry-run", "--only", "plain", "--seeds", "1"])
    plain = capsys.readouterr().out.splitlines()[1]
    main(["run", "toy.toml", "--dry-run", "--only", "plain", "--seeds", "1", "--track"])
    tracked = capsys.readouterr().out.splitlines()[1]
    assert tracked == f"{plain} --track --wandb-group toy --wandb-tags toy,plain,PPO"


# running


def test_failed_runs_are_tried_once_more_and_reported_while_others_go_on(place):
    write_toy(
        '[[cells]]\nname = "good"\n'
        '[[cells]]\nname = "once"\nargs = { fail-at = 5000 }\n'
        '[[cells]]\nname = "always"\nargs = { fail-at = 3000, fail-times = 9 }\n',
        seeds="[1]",
    )
    code, out = sweep_py("run", "toy.toml")
    assert code == 1 and "2 of 3 runs finished, 1 failed" in out
    assert re.search(r"FAILED always__\w+__1 \(exit code 1\).*\n.*\n +something broke at step 3000\n", out)
    ended = {p.name.split("__")[0]: p for p in Path("runs/toy").glob("*__*")}
    assert (ended["always"] / "log.txt").read_text().count("$ python") == 2
    # the one that failed once ends exactly as the one that never did
    assert (ended["once"] / "metrics.csv").read_bytes() == (ended["good"] / "metrics.csv").read_bytes()
    assert "threads 1" in (ended["good"] / "log.txt").read_text()
    code, out = sweep_py("run", "toy.toml")
    assert code == 1 and "3 runs, 2 of them finished already" in out and "good" not in out


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_stopped_sweep_goes_on_and_ends_as_if_never_stopped(place, how):
    cells = '[[cells]]\nname = "a"\n[[cells]]\nname = "b"\nargs = { learning-rate = 0.2 }\n'
    write_toy(cells, fixed="total-timesteps = 10000\nsleep = 0.08")
    first = start("run", "toy.toml", "--runs-dir", "stopped")

    def third_started():
        logs = list(Path("stopped/toy").glob("*__2/metrics.csv"))
        return logs and any(len(log.read_text().splitlines()) > 3 for log in logs)

    wait_for(third_started)
    first.send_signal(how)
    out, _ = first.communicate(timeout=120)
    if how != signal.SIGKILL:
        assert first.returncode == 128 + how
        assert "go on with: python sweep.py run toy.toml --runs-dir stopped" in out
        assert any("stopped at step" in log.read_text() for log in Path("stopped/toy").glob("*/log.txt"))
    finished = {p: p.stat().st_mtime_ns for p in Path("stopped/toy").glob("*/result.json")}
    assert 1 <= len(finished) < 4
    code, out = sweep_py("run", "toy.toml", "--runs-dir", "stopped")
    assert code == 0 and "--resume stopped/toy/" in out
    assert all(path.stat().st_mtime_ns == at for path, at in finished.items())
    assert all(path.parent.name not in out for path in finished)
    assert sweep_py("run", "toy.toml", "--runs-dir", "whole", "--jobs", "4")[0] == 0
    assert outcomes(Path("stopped/toy")) == outcomes(Path("whole/toy"))
    assert len(outcomes(Path("whole/toy"))) == 3 * 4


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"finished": false}', '{"eval": {"return": 3}'])
def test_an_empty_or_broken_result_is_no_finish(place, capsys, content):
    write_toy('[[cells]]\nname = "a"\n', seeds="[1]")
    (run,) = sweep.make_runs(sweep.load(Path("toy.toml")), Path("runs"), [], [])
    run.folder.mkdir(parents=True)
    (run.folder / "result.json").write_text(content)
    assert run.state == "missing"
    (run.folder / "args.json").write_text('{"args": {"total_timesteps": 4000}}')
    assert run.state == "unfinished"
    assert main(["report", "toy.toml", "--out", "out"]) == 0
    assert "0 of 1 seeds finished (seed 1 unfinished)" in Path("out/toy.md").read_text()
    if content not in ("", "{"):
        return  # two of them go on to their end
    code, out = sweep_py("run", "toy.toml")
    assert code == 0 and f"--resume {run.folder.as_posix()}" in out and run.state == "finished"


def test_a_run_that_somebody_trains_is_left_to_them(place):
    from envs.folders import RunFolder

    write_toy('[[cells]]\nname = "a"\n', seeds="[1]")
    ours, theirs = (sweep.make_runs(sweep.load(Path("toy.toml")), Path("runs"), [], [])[0] for _ in range(2))
    assert ours.acquire() and not theirs.acquire()  # two sweeps
    ours.release()
    ours.folder.mkdir(parents=True)
    training = RunFolder(ours.folder, None, Path("train.py"), Path())  # begun by hand, or by a sweep that was killed
    assert not ours.acquire() and ours.lock is None
    training.lock.close()
    assert ours.acquire() and not theirs.acquire()


WINDOWS = """\
import fcntl, signal, subprocess, sys, types
sys.path.insert(0, {root!r})
import envs, tqdm
windows = types.ModuleType("msvcrt")
windows.LK_NBLCK = 2
windows.locking = lambda handle, mode, count: fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
for name in ("envs.system", "envs.processes", "envs.guard"):
    sys.modules.pop(name, None)
sys.modules |= {{"fcntl": None, "msvcrt": windows}}
del signal.SIGHUP
signal.CTRL_BREAK_EVENT = signal.SIGINT  # anything that a child hears and SIGTERM, a kill there, is not
subprocess.CREATE_NEW_PROCESS_GROUP = 0
popen = subprocess.Popen.__init__
def refuse(self, *args, preexec_fn=None, pass_fds=(), start_new_session=False, **options):
    assert not (preexec_fn or pass_fds or start_new_session), "not on Windows"
    popen(self, *args, start_new_session=True, **options)
subprocess.Popen.__init__ = refuse
subprocess.Popen.terminate = None
import sweep
from envs.guard import guarded
sys.exit(guarded(lambda signals: sweep.main(sys.argv[1:], signals)))
"""


def test_a_system_without_fcntl_sighup_and_fork(place):
    Path("windows.py").write_text(WINDOWS.format(root=str(ROOT)))
    write_toy('[[cells]]\nname = "a"\n', fixed="total-timesteps = 10000\nsleep = 0.2")
    command = [sys.executable, "windows.py", "run", "toy.toml", "--jobs", "1"]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for(lambda: list(Path("runs/toy").glob("*__1/checkpoints/last/spec.json")))
    first.send_signal(signal.SIGINT)
    out, _ = first.communicate(timeout=60)
    assert first.returncode == 130 and "2 of 2 runs unfinished; go on with" in out, out
    (log,) = Path("runs/toy").glob("*__1/log.txt")
    assert "stopped at step" in log.read_text()
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]  # and they share the work
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    assert sorted(path.read_text().count("$ python") for path in Path("runs/toy").glob("*/log.txt")) == [1, 2]


def test_damaged_files_of_a_run_are_as_if_they_were_missing(tmp_path):
    (tmp_path / "result.json").write_text("[" * 100_000)
    (tmp_path / "metrics.csv").write_text("global_step\n" + "x" * 200_000)
    assert sweep.read_json(tmp_path / "result.json") == {}
    assert report.read_metrics(tmp_path) == []


@pytest.mark.parametrize("name", ["sweep.py", "sweep_ray.py", "report.py"])
def test_what_one_system_only_has_stands_elsewhere(name):
    assert not re.findall(r"fcntl|msvcrt|SIGHUP|SIGBREAK|pass_fds|preexec_fn|prctl|os\.name", (ROOT / name).read_text())


def test_two_sweeps_at_once_share_the_work(place):
    write_toy('[[cells]]\nname = "a"\n', seeds="[1, 2, 3, 4]", fixed="total-timesteps = 6000\nsleep = 0.1")
    both = [start("run", "toy.toml", "--jobs", "1") for _ in range(2)]
    for process in both:
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 0 and "4 of 4 runs finished" in out
    logs = [log.read_text() for log in Path("runs/toy").glob("*/log.txt")]
    assert len(logs) == 4 and all(log.count("$ python") == 1 for log in logs)


def test_progress_bars_on_a_terminal(place):
    write_toy('[[cells]]\nname = "a"\n', seeds="[1]", fixed="total-timesteps = 8000\nsleep = 0.3")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "sweep.py"), "run", "toy.toml"], stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:  # the other end is closed
        pass
    assert process.wait(timeout=60) == 0
    text = shown.decode()
    bars = re.findall(r"a__\w+__1: +(\d+)%\|.*?\| (\d)000/8000 \[00:0\d<00:0(\d).*?return (\d\.\d+)\]", text)
    assert bars and all(abs(int(percent) - int(step) * 12.5) <= 0.5 for percent, step, _, _ in bars)
    left = [int(seconds) for _, _, seconds, _ in bars]
    assert left[-1] <= left[0] <= 9
    assert re.search(r"toy: +0%\|.*\| 0/1 \[.*waiting=0", text) and "[1/1] finished a__" in text


# statistics, by hand


def test_interquartile_mean():
    assert report.iqm(np.array([1.0, 2.0, 3.0, 100.0])) == 2.5
    assert report.iqm(np.array([5.0, 1.0, 9.0])) == 5.0
    assert report.iqm(np.array([0.0, 1, 2, 3, 4, 5, 6, 1000])) == 3.5


def test_probability_of_improvement():
    # pairs (1,1) tie, (1,0) won, (3,1) won, (3,0) won
    assert report.p_improvement(np.array([1.0, 3.0]), np.array([1.0, 0.0])) == (0.5 + 3) / 4
    assert report.p_improvement(np.array([1.0]), np.array([2.0, 3.0])) == 0
    low, high = report.interval(report.p_improvement, [1.0, 2.0, 3.0], [0.0, 2.5, 2.6])
    assert 0 <= low < report.p_improvement(np.array([1.0, 2, 3]), np.array([0, 2.5, 2.6])) == 5 / 9 < high <= 1


def test_intervals():
    assert report.interval(np.mean, [3.0]) is None
    assert report.interval(np.mean, [2.0, 2.0, 2.0]) == (2.0, 2.0)
    assert report.interval(np.mean, [1.0, 2.0]) == (1.0, 2.0)
    values = np.random.default_rng(0).normal(0, 1, 200)
    low, high = report.interval(np.mean, values)
    assert low == pytest.approx(values.mean() - 1.96 * values.std() / 200**0.5, abs=0.01)
    assert high == pytest.approx(values.mean() + 1.96 * values.std() / 200**0.5, abs=0.01)


def test_differences_are_paired_if_the_seeds_are_the_same():
    base = {1: 1.0, 2: 3.0}
    # by seed +0.1 and +0.5, whatever their order; two seeds: the interval is the two values
    assert report.difference({2: 3.5, 1: 1.1}, base) == "+0.300 [+0.100, +0.500]"
    # other seeds, all at 2: the mean of the baseline is 1, 2 or 3 in a quarter, a half, a quarter of the resamples
    assert report.difference({1: 2.0, 2: 2.0, 3: 2.0}, base) == "+0.000 [-1.000, +1.000]"
    assert report.difference({3: 0.0, 4: 0.0}, base) == "-2.000 [-3.000, -1.000]"
    assert (
        report.difference({1: 0.5}, base) == "-1.500 (1 seed)"
        and report.difference({1: 0.5}, {1: 0.25}) == "+0.250 (1 seed)"
    )
    assert report.difference({}, base) == report.difference({}, {}) == "-"


@pytest.mark.parametrize(
    "values, shown",
    [
        ([0.004, 0.00624], "0.00512"),
        ([48.25], "48.2"),
        ([4446.0, 4446.4], "4,446"),
        ([0.0], "0.000"),
        ([-1e-3], "-0.00100"),
    ],
)
def test_three_figures_of_numbers_of_any_size(values, shown):
    assert f"{np.mean(values):{report.three_figures(values)}}" == shown


POINTS = [(0.0, 0.0, 0.0), (100.0, 60.0, 1.0), (200.0, 180.0, 3.0), (400.0, 300.0, 2.0)]


def test_area_threshold_and_values_on_the_way():
    # trapezoids: 50 + 200 + 500 over 400 steps; up to 300 the last value is 2.5: 50 + 200 + 275 over 300
    assert report.area(POINTS, 400) == 750 / 400
    assert report.area(POINTS, 300) == 525 / 300
    assert report.area(POINTS[1:2], 100) == 1.0 and report.area(POINTS[1:], 50) is None
    assert report.first_at(POINTS, 1.0) == (100, 1.0) and report.first_at(POINTS, 2.5) == (200, 3.0)
    assert report.first_at(POINTS, 3.5) is None
    assert [report.value_at(POINTS, step) for step in (0, 1, 100, 101, 401)] == [0, 1, 1, 3, None]


def test_final_evaluation():
    result = {"eval": {"return": 2.5, "win_rate": 0.5, "return-player2": 4}}
    names = ("eval/return", "eval/win_rate", "eval/return-player2", "eval/none")
    assert [report.final_value(result, name) for name in names] == [2.5, 0.5, 4.0, None]


# the report


def test_report_says_what_it_has_and_what_it_lacks(place, capsys):
    assert sweep_py("run", "toy.toml", "--only", "plain")[0] == 0
    assert sweep_py("run", "toy.toml", "--only", "*0.3", "--seeds", "2")[0] == 0
    Path("docs/results").mkdir(parents=True)
    Path("docs/results/battles.md").write_text("## Battles\n\n![b](battles.png) [site](https://a.b) [up](#top)\n")
    assert main(["report", "toy.toml"]) == 0
    assert not Path("docs/results/toy.md").exists() and not Path("docs/results.md").exists()  # only if asked
    assert main(["report", "toy.toml", "--docs"]) == 0
    text = Path("docs/results/toy.md").read_text()
    assert text == Path("runs/toy/report/toy.md").read_text()
    assert "**Not complete.** other_learning-rate=0.2: 0 of 2 seeds finished (seed 1 missing, seed 2 missing)" in text
    assert "other_learning-rate=0.3: 1 of 2 seeds finished (seed 1 missing)" in text
    rows = list(csv.DictReader(open("docs/results/toy.csv")))
    finals = [float(row["final"]) for row in rows if row["cell"] == "plain"]
    mean, low, high = sum(finals) / 2, min(finals), max(finals)
    assert f"| toy | plain | PPO | 2 | {mean:.3f} [{low:.3f}, {high:.3f}] |" in text
    assert "With two seeds an interval is no more than the two values." in text
    assert re.search(
        r"rate=0.3 \| HOP, learning rate 0.3 \| \*\*1 of 2\*\* \| \d.\d+ \(1 seed\) .* \| 1.00 \(1 seed\) \|", text
    )
    assert "| toy | plain | 8,000 (0.13 min; 2 of 2) |" in text
    assert "# plain: seeds 1, 2\npython train.py --total-timesteps 10000 --no-anneal --roles ppo,ns --seed 1" in text
    assert str(place) not in text + Path("docs/results/toy.csv").read_text()
    assert Path("docs/results/toy.png").read_bytes().startswith(b"\x89PNG")
    by_hand = {row["seed"]: row for row in rows if row["cell"] == "plain"}
    curve = list(csv.DictReader(open(next(Path("runs/toy").glob("plain__*__1/metrics.csv")))))
    assert float(by_hand["1"]["at_3000"]) == float(curve[3]["eval/return"])  # at 4000: the first one after 3000
    # the page is assembled from the parts, the hand-made one among them, with their pictures
    page = Path("docs/results.md").read_text()
    assert page.index("## Battles") < page.index("## toy")
    assert "](results/battles.png)" in page and "](results/toy.png)" in page
    assert "](https://a.b)" in page and "](#top)" in page
    Path("docs/results/order.txt").write_text("toy\n")
    assert main(["results"]) == 0
    page = Path("docs/results.md").read_text()
    assert page.index("## toy") < page.index("## Battles")


def test_a_report_keeps_the_runs_whose_folders_are_gone(place):
    """Their figures and curves are those of the report that stood there; seeds that are new join them."""
    assert sweep_py("run", "toy.toml", "--only", "plain", "--only", "*0.3")[0] == 0
    assert main(["report", "toy.toml", "--out", "out"]) == 0
    page, rows = Path("out/toy.md").read_text(), list(csv.DictReader(open("out/toy.csv")))
    for folder in Path("runs/toy").glob("*__1"):
        shutil.rmtree(folder)
    assert main(["report", "toy.toml", "--out", "out"]) == 0
    assert list(csv.DictReader(open("out/toy.csv"))) == rows
    kept = "- 2 of 4 runs are those of an earlier report, their folders are gone.\n"
    again = Path("out/toy.md").read_text()
    assert kept in again and again.splitlines()[:12] == page.splitlines()[:12]  # the overview

    # of a CSV that holds no curves the figures are kept, and so is the picture that shows them
    bare = [{name: "" if name == "curve" else value for name, value in row.items()} for row in rows]
    with open("out/toy.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(bare)
    picture = Path("out/toy.png").read_bytes()
    Path("out/toy.png").write_bytes(picture + b"as it was")
    assert main(["report", "toy.toml", "--out", "out"]) == 0
    assert Path("out/toy.png").read_bytes().endswith(b"as it was")
    assert again.splitlines()[:12] == Path("out/toy.md").read_text().splitlines()[:12]

    # a setting that changed is another run
    Path("toy.toml").write_text(Path("toy.toml").read_text().replace("[0.2, 0.3]", "[0.2, 0.4]"))
    assert main(["report", "toy.toml", "--out", "out"]) == 0
    assert "=0.4: 0 of 2 seeds finished (seed 1 missing, seed 2 missing)" in Path("out/toy.md").read_text()

    more = Path("out/toy.csv").read_bytes().replace(b"\r\n", b",1,2\r\n")  # columns without a name do not count
    Path("out/toy.csv").write_bytes(more.replace(b"command,1,2", b"command"))
    assert main(["report", "toy.toml", "--out", "out"]) == 0
    assert "plain: 1 of 2" not in Path("out/toy.md").read_text()

    for broken in (b"", b"\xff\x00,,\n\n", b'task,"state\n'):  # and a damaged CSV holds nothing
        Path("out/toy.csv").write_bytes(broken)
        assert main(["report", "toy.toml", "--out", "out"]) == 0
        assert "plain: 1 of 2 seeds finished (seed 1 missing)" in Path("out/toy.md").read_text()


def test_report_without_any_run(place):
    assert sweep_py("report", "toy.toml", "--out", "elsewhere")[0] == 0
    assert "plain: 0 of 2 seeds finished" in Path("elsewhere/toy.md").read_text()
    assert not Path("docs").exists()


LOGGED = """\
seeds = [1, 2]
script = "train.py"
baseline = "plain"
also = ["losses/kl", "hyper/size"]

[[cells]]
name = "plain"

[[cells]]
name = "hyper"
args = { learning-rate = 0.2 }
seeds = [2, 1]

[[cells]]
name = "fast"
args = { learning-rate = 0.3 }
seeds = [1, 2, 3]
also = ["charts/SPS", "hyper/size"]
"""


def write_run(cell: str, seed: int, final: float, metrics: str, **finals: float) -> None:
    """A finished run of toy.toml, made up: its final evaluation and its metrics.csv."""
    runs = sweep.make_runs(sweep.load(Path("toy.toml")), Path("runs"), [cell], [seed])
    runs[0].folder.mkdir(parents=True)
    (runs[0].folder / "result.json").write_text(json.dumps({"finished": True, "eval": {"return": final} | finals}))
    (runs[0].folder / "metrics.csv").write_text(metrics)


def write_logged_runs() -> None:
    Path("toy.toml").write_text(LOGGED)
    plain = "global_step,wall_time,losses/kl,eval/return\n100,1,{},\n200,2,{},0\n300,3,{},{}\n"
    write_run("plain", 1, 1.0, plain.format(0.001, 0.002, 0.006, 2))  # KL 0.003, AUC 1
    write_run("plain", 2, 3.0, plain.format(0.004, 0.005, 0.006, 6))  # KL 0.005, AUC 3
    hyper = "global_step,wall_time,losses/kl,hyper/size,eval/return\n100,1,{},,\n200,2,{},{},0\n300,3,,{},{}\n"
    write_run("hyper", 1, 1.1, hyper.format(0.001, 0.003, 10, 20, 3))  # KL 0.002 in two rows, size 15, AUC 1.5
    write_run("hyper", 2, 3.5, hyper.format(0.005, 0.009, 30, 60, 7.4))  # KL 0.007 in two rows, size 45, AUC 3.7
    fast = "global_step,wall_time,charts/SPS,eval/return\n200,2,{},2\n300,3,{},3\n"
    for seed in (1, 2, 3):
        write_run("fast", seed, 2.0, fast.format(1000 * seed, 3000 * seed))  # 2000, 4000 and 6000 steps/s, AUC 2.5


def test_report_shows_means_over_training_and_differences(place):
    write_logged_runs()
    assert main(["report", "toy.toml", "--out", "out"]) == 0
    text = Path("out/toy.md").read_text()
    table = """\
| task | cell | `losses/kl`, mean over training | `hyper/size`, mean over training | `charts/SPS`, mean over training |
| --- | --- | --- | --- | --- |
| toy | plain | 0.00400 [0.00300, 0.00500] | - | - |
| toy | hyper | 0.00450 [0.00200, 0.00700] | 30.0 [15.0, 45.0] | - |
| toy | fast | - | - | 4,000 ["""
    assert table in text
    # hyper minus plain, seed 1 and seed 2: final 0.1 and 0.5, AUC 0.5 and 0.7
    table = """\
| task | cell | baseline | final `eval/return` minus the baseline's | AUC minus the baseline's |
| --- | --- | --- | --- | --- |
| toy | hyper | plain | +0.300 [+0.100, +0.500] | +0.600 [+0.500, +0.700] |
| toy | fast | plain | +0.000 [-1.000, +1.000] | +0.500 [-0.500, +1.500] |
"""
    assert table in text
    assert "where both cells have the same seeds; not paired: fast.\n" in text
    rows = {(row["cell"], row["seed"]): row for row in csv.DictReader(open("out/toy.csv"))}
    kl = {key: row["losses/kl"] and float(row["losses/kl"]) for key, row in rows.items()}
    assert kl["plain", "1"] == pytest.approx(0.003) and kl["plain", "2"] == pytest.approx(0.005)
    assert kl["fast", "1"] == rows["plain", "1"]["hyper/size"] == ""
    assert [float(rows["fast", seed]["charts/SPS"]) for seed in "123"] == [2000, 4000, 6000]


def test_further_scores_of_evaluations_have_their_final_values_compared(place):
    Path("toy.toml").write_text(LOGGED.replace('"hyper/size"]', '"eval/mixed"]', 1))
    metrics = "global_step,wall_time,losses/kl,hyper/size,charts/SPS,eval/return,eval/mixed\n100,1,1,1,1,1,0\n"
    for cell, seed, mixed in (("plain", 1, 0.2), ("plain", 2, 0.6), ("hyper", 1, 0.3), ("hyper", 2, 0.9)):
        write_run(cell, seed, 1.0, metrics, mixed=mixed)
    assert main(["report", "toy.toml", "--out", "out"]) == 0
    table = """\
| task | cell | final `eval/mixed`, mean | final `eval/mixed` minus the baseline's |
| --- | --- | --- | --- |
| toy | plain | 0.400 [0.200, 0.600] | - |
| toy | hyper | 0.600 [0.300, 0.900] | +0.200 [+0.100, +0.300] |
"""
    assert table in Path("out/toy.md").read_text()


def test_drop_and_recovery_after_a_switch(place):
    """By the cell's own metric: the last value before, the first from the step on, and steps until 95 % of before."""
    Path("toy.toml").write_text(LOGGED.replace("also", "switch_at = 200\nswitch_metric = 'eval/b'\nalso", 1))
    rows = "global_step,wall_time,losses/kl,hyper/size,charts/SPS,eval/return,eval/b\n" + "".join(
        f"{step},1,1,1,1,7,{{}}\n" for step in (100, 199, 200, 300, 500)
    )
    write_run("plain", 1, 1.0, rows.format(9, 2.0, 1.0, 1.8, 1.95))
    write_run("plain", 2, 1.0, rows.format(9, 4.0, 2.0, 3.8, 0))
    write_run("hyper", 1, 1.0, rows.format(9, 2.0, 1.5, 1.6, 1.7))
    write_run("hyper", 2, 1.0, rows.format(9, 4.0, 2.5, 2.0, 2.0))
    assert main(["report", "toy.toml", "--out", "out"]) == 0
    text = Path("out/toy.md").read_text()
    assert "| drop | drop minus the baseline's | env steps to 95% of before (seeds) |\n" in text
    values = "3.000 [2.000, 4.000] | 1.500 [1.000, 2.000] | 1.500 [1.000, 2.000]"
    assert f"| toy | plain | {values} | - | 200 (2 of 2) |\n" in text
    values = "3.000 [2.000, 4.000] | 2.000 [1.500, 2.500] | 1.000 [0.500, 1.500]"
    assert f"| toy | hyper | {values} | -0.500 [-0.500, -0.500] | never (0 of 2) |\n" in text
    assert report.after_switch(POINTS, 0.0) == report.after_switch(POINTS, 500.0) == {}


def test_a_mean_over_training_is_of_all_seeds_or_of_none(place):
    write_logged_runs()
    (next(Path("runs/toy").glob("hyper__*__2")) / "metrics.csv").write_text("global_step,wall_time\n100,1\n")
    assert main(["report", "toy.toml", "--out", "out"]) == 0
    tables = Path("out/toy.md").read_text().split("\n\n")
    (table,) = [table for table in tables if "`losses/kl`, mean over training" in table]
    assert "| toy | plain | 0.00400" in table and "hyper |" not in table  # one of its two seeds has no such column


@pytest.mark.parametrize(
    "old, new, message",
    [
        ('"losses/kl"', '"losses/k"', 'no run has a column "losses/k" in its metrics.csv; did you mean "losses/kl"?'),
        ('"charts/SPS"', '"nonsense"', 'no run has a column "nonsense" in its metrics.csv; known: charts/SPS, eval/'),
        (
            "seeds",
            'metric = "eval/retrun"\nseeds',
            'no run has a column "eval/retrun" in its metrics.csv; did you mean',
        ),
        ("seeds", 'switch_metric = "eval/x"\nseeds', 'no run has a column "eval/x" in its metrics.csv; known'),
    ],
)
def test_a_column_that_no_run_has_is_an_error(place, old, new, message):
    write_logged_runs()
    Path("toy.toml").write_text(LOGGED.replace(old, new, 1))
    code, out = sweep_py("report", "toy.toml", "--out", "out")
    assert code == 2 and out.count("\n") == 1 and out.startswith(f"error: toy.toml: {message}"), out
    assert not Path("out").exists()


def test_a_damaged_metrics_file_costs_its_damaged_rows_only(place):
    write_logged_runs()
    path = next(Path("runs/toy").glob("plain__*__1")) / "metrics.csv"
    path.write_bytes(path.read_bytes() + b"400,4,\x00\xff,nonsense\n,,\n500")
    assert main(["report", "toy.toml", "--out", "out"]) == 0
    assert "| toy | plain | 0.00400 [0.00300, 0.00500] | - | - |" in Path("out/toy.md").read_text()


# the figure

PANEL = """\
seeds = [1]
script = "train.py"
algorithm = "HOP+"
[[cells]]
name = "4x4"
[[cells]]
name = "4x4-b"
args = { learning-rate = 0.2, anneal = false, total-timesteps = 20000 }
[[cells]]
name = "4x4-c"
label = "softer play"
args = { learning-rate = 0.3 }
[[cells]]
name = "4x4-ppo"
algorithm = "PPO"
args = { learning-rate = 0.4 }
[[cells]]
name = "8x8"
task = "8x8"
args = { learning-rate = 0.5 }
"""


def test_a_figure_names_algorithms_and_says_what_differs_in_words(place, monkeypatch):
    Path("toy.toml").write_text(PANEL)
    for cell in ("4x4", "4x4-b", "4x4-c", "4x4-ppo", "8x8"):
        write_run(cell, 1, 1.0, "global_step,wall_time,eval/return\n100,1,0\n200,2,1\n")
    figures = []
    monkeypatch.setattr(report.plt, "close", figures.append)
    assert main(["report", "toy.toml", "--out", "out"]) == 0
    first, second = figures[0].axes
    assert [text.get_text() for text in first.get_legend().texts] == [
        "HOP+, 1 seed",
        "HOP+, learning rate 0.2, no anneal, 20,000 steps, 1 seed",
        "HOP+, softer play, 1 seed",
        "PPO, 1 seed",
    ]
    assert [text.get_text() for text in second.get_legend().texts] == ["HOP+, 1 seed"]
    assert (first.get_xlabel(), first.get_ylabel()) == ("env steps", "mean return per player and episode")
    drawn = [line for line in first.lines if line.get_label().endswith("1 seed")]
    assert len({line.get_color() for line in drawn}) == len({str(line._dash_pattern) for line in drawn}) == 4
    assert drawn[0].get_color() == second.lines[0].get_color() == report.COLOURS["HOP+"]
    assert drawn[3].get_color() == report.COLOURS["PPO"]
    # the table says the same words, and what the figure calls by them
    assert "| toy | 4x4-c | HOP+, softer play | 1 |" in Path("out/toy.md").read_text()


# sRGB to what protanopes and deuteranopes see, in linear light (Machado, Oliveira and Fernandes 2009, severity 1)
EYES = [
    np.eye(3),
    [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
]


def lab(colour: str, eye) -> np.ndarray:
    """CIE L*a*b* of a colour, seen by an eye: distances in it are about as large as they look."""
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    light = np.clip(eye @ np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4), 0, 1)
    xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]] @ light / [0.9505, 1, 1.0888]
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_colours_of_a_panel_can_be_told_apart_by_colour_blind_readers_too():
    cells = [sweep.Cell(str(i), "", "", [], {}, {}, [], 1, algorithm, "") for i, algorithm in enumerate(ALGORITHMS)]
    found = report.colours(cells)
    assert list(found) != [] and len(set(found.values())) == len(cells) == 12
    assert found["1"] == report.COLOURS["PPO"] and found["2"] != report.COLOURS["PPO"]
    for one, other in itertools.combinations(found.values(), 2):
        assert min(np.linalg.norm(lab(one, eye) - lab(other, eye)) for eye in EYES) > 15, (one, other)


ALGORITHMS = ["new", "PPO", "PPO", "HOP+", "HOP+ without trees", "MAPPO", "Hyper-MAPPO", "HOP+", "a", "b", "c", "d"]


# the sweeps of this repository


SWEEPS = sorted({*(ROOT / "experiments").glob("*.toml")} - {ROOT / "experiments/adaptation.toml"})  # it says who plays


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_experiments_load(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    loaded = sweep.load(path)
    assert loaded.name == path.stem and loaded.description and loaded.expected_minutes


def test_the_smoke_sweep_runs_on_the_real_script(tmp_path):
    """experiments/smoke.toml from start to report, and a second start finds everything finished."""
    for name in ("ppo_baseline.py", "experiments"):
        (tmp_path / name).symlink_to(ROOT / name)

    def smoke(*words: str) -> str:
        command = [sys.executable, str(ROOT / "sweep.py"), *words, "experiments/smoke.toml"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    smoke("run")
    assert len(list(tmp_path.glob("runs/smoke/*/result.json"))) == 4
    assert "4 of them finished already" in smoke("run")
    smoke("report")
    page = (tmp_path / "runs/smoke/report/smoke.md").read_text()
    assert "| independent | PPO | 2 |" in page and "| shared | PPO, shared policy | 2 |" in page
    assert "Not complete" not in page and (tmp_path / "runs/smoke/report/smoke.png").stat().st_size > 5000
