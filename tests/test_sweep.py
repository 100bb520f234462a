"""sweep.py: its files, its commands, stopping and going on, and its statistics, against a stand-in training script."""

import csv
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import sweep

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


def run(*words) -> tuple[int, str]:
    process = start(*words)
    out, _ = process.communicate(timeout=300)
    return process.returncode, out


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
    assert sweep.main(["run", "toy.toml", "--dry-run"]) == 0
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
    sweep.main(["run", "toy.toml", "--dry-run"])
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
    sweep.main(["run", "toy.toml", "--dry-run", *words])
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
        ("seeds = [1, 2]", 'seeds = "1-2"', 'toy.toml:2: "seeds" must be a list of integers, not "1-2"'),
        ("at_steps = [3000]", 'also = "a/b"', 'toy.toml:6: "also" must be a list of strings, not "a/b"'),
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
    ],
)
def test_what_is_wrong_is_named_with_its_line(place, old, new, message):
    assert old in TOY
    text = TOY.replace(old, new, 1)
    if 'name = "plain"\nargs' in new:
        text = text.replace("grid = {", "#")
    Path("toy.toml").write_text(text)
    with pytest.raises(sweep.SweepError) as error:
        sweep.main(["run", "toy.toml", "--dry-run"])
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_lines_are_found_in_every_way_to_write_a_key():
    text = '''\
a = """
b = 1
"""
[fixed] # words
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
    lines = sweep.key_lines(text)
    assert lines[("fixed", "c-d")] == 5 and ("b",) not in lines
    assert lines[("cells", 0, "args", "x")] == 7 and lines[("cells", 0, "args", "z")] == 8
    assert lines[("cells", 0, "grid", "lr")] == 10 and lines[("cells", 1, "name")] == 14


def test_cells_that_would_be_the_same_run_are_pointed_out(place):
    # "b" spells out a default of the script: the same run as "a" all the same
    write_toy('[[cells]]\nname = "a"\n[[cells]]\nname = "b"\nargs = { learning-rate = 0.1 }\n')
    with pytest.raises(sweep.SweepError, match=r'toy.toml:7: cells "a" \(line 5\) and "b" would be the same run'):
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
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(place, words):
    Path("bad.toml").write_text("[fixed\n")
    code, out = run(*words)
    assert code == 2 and out.count("\n") == 1 and out.startswith("sweep.py: "), out


def test_a_changed_setting_is_a_new_folder(place):
    def folder():
        return sweep.make_runs(sweep.load(Path("toy.toml")), Path("runs"), ["plain"], [1])[0].folder

    first = folder()
    Path("toy.toml").write_text(TOY.replace("10000", "20000"))
    assert folder() != first
    Path("toy.toml").write_text(TOY)
    assert folder() == first
    assert run("run", "toy.toml", "--only", "plain", "--seeds", "1")[0] == 0
    source = Path("train.py").read_text()
    Path("train.py").write_text(source.replace("seed: int = 1", "seed: int = 1\n    a_new_flag: int = 3"))
    assert folder() == first  # a new flag changes nothing about the old run
    Path("train.py").write_text(source.replace("learning_rate: float = 0.1", "learning_rate: float = 0.2"))
    changed = folder()
    assert changed != first  # but a changed default does
    before = outcomes(Path("runs/toy"))
    assert run("run", "toy.toml", "--only", "plain", "--seeds", "1")[0] == 0
    assert folder() == changed and (changed / "result.json").exists()
    assert before.items() < outcomes(Path("runs/toy")).items()


def test_track_gives_group_and_tags_and_is_no_setting(place, capsys):
    sweep.main(["run", "toy.toml", "--dry-run", "--only", "plain", "--seeds", "1"])
    plain = capsys.readouterr().out.splitlines()[1]
    sweep.main(["run", "toy.toml", "--dry-run", "--only", "plain", "--seeds", "1", "--track"])
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
    code, out = run("run", "toy.toml")
    assert code == 1 and "2 of 3 runs finished, 1 failed" in out
    assert re.search(r"FAILED always__\w+__1 \(exit code 1\).*\n.*\n +something broke at step 3000\n", out)
    ended = {p.name.split("__")[0]: p for p in Path("runs/toy").glob("*__*")}
    assert (ended["always"] / "log.txt").read_text().count("$ python") == 2
    # the one that failed once ends exactly as the one that never did
    assert (ended["once"] / "metrics.csv").read_bytes() == (ended["good"] / "metrics.csv").read_bytes()
    assert "threads 1" in (ended["good"] / "log.txt").read_text()
    code, out = run("run", "toy.toml")
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
    code, out = run("run", "toy.toml", "--runs-dir", "stopped")
    assert code == 0 and "--resume stopped/toy/" in out
    assert all(path.stat().st_mtime_ns == at for path, at in finished.items())
    assert all(path.parent.name not in out for path in finished)
    assert run("run", "toy.toml", "--runs-dir", "whole", "--jobs", "4")[0] == 0
    assert outcomes(Path("stopped/toy")) == outcomes(Path("whole/toy"))
    assert len(outcomes(Path("whole/toy"))) == 3 * 4


def test_two_sweeps_at_once_share_the_work(place):
    write_toy('[[cells]]\nname = "a"\n', seeds="[1, 2, 3, 4]", fixed="total-timesteps = 6000\nsleep = 0.1")
    both = [start("run", "toy.toml", "--jobs", "1") for _ in range(2)]
    for process in both:
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 0 and "4 of 4 runs finished" in out
    logs = [log.read_text() for log in Path("runs/toy").glob("*/log.txt")]
    assert len(logs) == 4 and all(log.count("$ python") == 1 for log in logs)


def test_live_table_on_a_terminal(place):
    write_toy('[[cells]]\nname = "a"\n', seeds="[1]", fixed="total-timesteps = 8000\nsleep = 0.2")
    ours, theirs = pty.openpty()
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
    assert re.search(r"run +step +return +left", text) and "0 finished, 1 running, 0 waiting, 0 failed; about" in text
    rows = re.findall(r"a__\w+__1 +(\d),000 / 8,000 +\d\.\d{3} +0:0(\d)", text)  # a second for 1000 steps, it says
    assert rows and all(int(step) + int(left) == 8 for step, left in rows)
    assert "\x1b[" in text and "[1/1] finished a__" in text


# statistics, by hand


def test_interquartile_mean():
    assert sweep.iqm(np.array([1.0, 2.0, 3.0, 100.0])) == 2.5
    assert sweep.iqm(np.array([5.0, 1.0, 9.0])) == 5.0
    assert sweep.iqm(np.array([0.0, 1, 2, 3, 4, 5, 6, 1000])) == 3.5


def test_probability_of_improvement():
    # pairs (1,1) tie, (1,0) won, (3,1) won, (3,0) won
    assert sweep.p_improvement(np.array([1.0, 3.0]), np.array([1.0, 0.0])) == (0.5 + 3) / 4
    assert sweep.p_improvement(np.array([1.0]), np.array([2.0, 3.0])) == 0
    low, high = sweep.interval(sweep.p_improvement, [1.0, 2.0, 3.0], [0.0, 2.5, 2.6])
    assert 0 <= low < sweep.p_improvement(np.array([1.0, 2, 3]), np.array([0, 2.5, 2.6])) == 5 / 9 < high <= 1


def test_intervals():
    assert sweep.interval(np.mean, [3.0]) is None
    assert sweep.interval(np.mean, [2.0, 2.0, 2.0]) == (2.0, 2.0)
    assert sweep.interval(np.mean, [1.0, 2.0]) == (1.0, 2.0)
    values = np.random.default_rng(0).normal(0, 1, 200)
    low, high = sweep.interval(np.mean, values)
    assert low == pytest.approx(values.mean() - 1.96 * values.std() / 200**0.5, abs=0.01)
    assert high == pytest.approx(values.mean() + 1.96 * values.std() / 200**0.5, abs=0.01)


def test_differences_are_paired_if_the_seeds_are_the_same():
    base = {1: 1.0, 2: 3.0}
    # by seed +0.1 and +0.5, whatever their order; two seeds: the interval is the two values
    assert sweep.difference({2: 3.5, 1: 1.1}, base) == "+0.300 [+0.100, +0.500]"
    # other seeds, all at 2: the mean of the baseline is 1, 2 or 3 in a quarter, a half, a quarter of the resamples
    assert sweep.difference({1: 2.0, 2: 2.0, 3: 2.0}, base) == "+0.000 [-1.000, +1.000]"
    assert sweep.difference({3: 0.0, 4: 0.0}, base) == "-2.000 [-3.000, -1.000]"
    assert (
        sweep.difference({1: 0.5}, base) == "-1.500 (1 seed)"
        and sweep.difference({1: 0.5}, {1: 0.25}) == "+0.250 (1 seed)"
    )
    assert sweep.difference({}, base) == sweep.difference({}, {}) == "-"


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
    assert f"{np.mean(values):{sweep.three_figures(values)}}" == shown


POINTS = [(0.0, 0.0, 0.0), (100.0, 60.0, 1.0), (200.0, 180.0, 3.0), (400.0, 300.0, 2.0)]


def test_area_threshold_and_values_on_the_way():
    # trapezoids: 50 + 200 + 500 over 400 steps; up to 300 the last value is 2.5: 50 + 200 + 275 over 300
    assert sweep.area(POINTS, 400) == 750 / 400
    assert sweep.area(POINTS, 300) == 525 / 300
    assert sweep.area(POINTS[1:2], 100) == 1.0 and sweep.area(POINTS[1:], 50) is None
    assert sweep.first_at(POINTS, 1.0) == (100, 1.0) and sweep.first_at(POINTS, 2.5) == (200, 3.0)
    assert sweep.first_at(POINTS, 3.5) is None
    assert [sweep.value_at(POINTS, step) for step in (0, 1, 100, 101, 401)] == [0, 1, 1, 3, None]


def test_final_evaluation():
    result = {"eval": {"return": 2.5, "win_rate": 0.5, "return-player2": 4}}
    names = ("eval/return", "eval/win_rate", "eval/return-player2", "eval/none")
    assert [sweep.final_value(result, name) for name in names] == [2.5, 0.5, 4.0, None]


def test_colours_are_fixed():
    assert sweep.colour("PPO") == "#0072B2"
    assert sweep.colour("a new one") == sweep.colour("a new one") in sweep.OTHER_COLOURS


# the report


def test_report_says_what_it_has_and_what_it_lacks(place, capsys):
    assert run("run", "toy.toml", "--only", "plain")[0] == 0
    assert run("run", "toy.toml", "--only", "*0.3", "--seeds", "2")[0] == 0
    Path("docs/results").mkdir(parents=True)
    Path("docs/results/battles.md").write_text("## Battles\n\n![b](battles.png) [site](https://a.b) [up](#top)\n")
    assert sweep.main(["report", "toy.toml"]) == 0
    text = Path("docs/results/toy.md").read_text()
    assert "**Not complete.** other_learning-rate=0.2: 0 of 2 seeds finished (seed 1 missing, seed 2 missing)" in text
    assert "other_learning-rate=0.3: 1 of 2 seeds finished (seed 1 missing)" in text
    rows = list(csv.DictReader(open("docs/results/toy.csv")))
    finals = [float(row["final"]) for row in rows if row["cell"] == "plain" and row["row"].startswith("seed")]
    mean, low, high = sum(finals) / 2, min(finals), max(finals)
    assert f"| toy | plain | PPO | 2 | {mean:.3f} [{low:.3f}, {high:.3f}] |" in text
    assert "With two seeds an interval is no more than the two values." in text
    assert re.search(
        r"other_learning-rate=0.3 \| HOP \| \*\*1 of 2\*\* \| \d.\d+ \(1 seed\) .* \| 1.00 \(1 seed\) \|", text
    )
    assert "| toy | plain | 1.5 | 2 of 2 | 8,000 | 0.13 | 8,000; 8,000 |" in text
    assert "# plain: seeds 1, 2\npython train.py --total-timesteps 10000 --no-anneal --roles ppo,ns --seed 1" in text
    assert str(place) not in text + Path("docs/results/toy.csv").read_text()
    assert Path("docs/results/toy.png").read_bytes().startswith(b"\x89PNG")
    by_hand = {row["row"]: row for row in rows if row["cell"] == "plain"}
    curve = list(csv.DictReader(open(next(Path("runs/toy").glob("plain__*__1/metrics.csv")))))
    assert float(by_hand["seed 1"]["at_3000"]) == float(curve[3]["eval/return"])  # at 4000: the first one after 3000
    assert float(by_hand["mean"]["final"]) == pytest.approx(mean)
    # the page is assembled from the parts, the hand-made one among them, with their pictures
    page = Path("docs/results.md").read_text()
    assert page.index("## Battles") < page.index("## toy")
    assert "](results/battles.png)" in page and "](results/toy.png)" in page
    assert "](https://a.b)" in page and "](#top)" in page
    Path("docs/results/order.txt").write_text("toy\n")
    assert sweep.main(["results"]) == 0
    page = Path("docs/results.md").read_text()
    assert page.index("## toy") < page.index("## Battles")


def test_report_without_any_run(place):
    assert run("report", "toy.toml", "--out", "elsewhere")[0] == 0
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


def write_run(cell: str, seed: int, final: float, metrics: str) -> None:
    """A finished run of toy.toml, made up: its final evaluation and its metrics.csv."""
    runs = sweep.make_runs(sweep.load(Path("toy.toml")), Path("runs"), [cell], [seed])
    runs[0].folder.mkdir(parents=True)
    (runs[0].folder / "result.json").write_text(f'{{"eval": {{"return": {final}}}}}')
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
    assert sweep.main(["report", "toy.toml", "--out", "out"]) == 0
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
    rows = {(row["cell"], row["row"]): row for row in csv.DictReader(open("out/toy.csv"))}
    kl = {key: row["losses/kl"] and float(row["losses/kl"]) for key, row in rows.items()}
    assert kl["plain", "seed 1"] == pytest.approx(0.003) and kl["plain", "seed 2"] == pytest.approx(0.005)
    assert kl["hyper", "mean"] == pytest.approx(0.0045) and kl["hyper", "mean low"] == pytest.approx(0.002)
    assert kl["fast", "seed 1"] == kl["fast", "mean"] == rows["plain", "mean"]["hyper/size"] == ""
    assert float(rows["fast", "mean"]["charts/SPS"]) == 4000


def test_a_mean_over_training_is_of_all_seeds_or_of_none(place):
    write_logged_runs()
    (next(Path("runs/toy").glob("hyper__*__2")) / "metrics.csv").write_text("global_step,wall_time\n100,1\n")
    assert sweep.main(["report", "toy.toml", "--out", "out"]) == 0
    assert "\n| toy | hyper | - | - | - |\n" in Path("out/toy.md").read_text()


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
    ],
)
def test_a_column_that_no_run_has_is_an_error(place, old, new, message):
    write_logged_runs()
    Path("toy.toml").write_text(LOGGED.replace(old, new, 1))
    code, out = run("report", "toy.toml", "--out", "out")
    assert code == 2 and out.count("\n") == 1 and out.startswith(f"sweep.py: toy.toml: {message}"), out
    assert not Path("out").exists()


# the sweeps of this repository


@pytest.mark.parametrize("path", sorted((ROOT / "experiments").glob("*.toml")), ids=lambda path: path.stem)
def test_experiments_load(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    loaded = sweep.load(path)
    assert loaded.name == path.stem and loaded.description and loaded.expected_minutes


def test_the_smoke_sweep_runs_on_the_real_script(tmp_path):
    """experiments/smoke.toml from start to report, and a second start finds everything finished."""
    for name in ("ppo_baseline.py", "experiments"):
        (tmp_path / name).symlink_to(ROOT / name)

    def sweep_py(*words: str) -> str:
        command = [sys.executable, str(ROOT / "sweep.py"), *words, "experiments/smoke.toml"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    sweep_py("run")
    assert len(list(tmp_path.glob("runs/smoke/*/result.json"))) == 4
    assert "4 of them finished already" in sweep_py("run")
    sweep_py("report")
    page = (tmp_path / "docs" / "results" / "smoke.md").read_text()
    assert "| independent | PPO | 2 |" in page and "| shared | PPO (shared) | 2 |" in page
    assert "Not complete" not in page and (tmp_path / "docs" / "results" / "smoke.png").stat().st_size > 5000
