"""envs/run.py and its neighbours: whatever happens to a run, it goes on to the same bits or says in one line why not.

Most of it is tried on a tiny script (FAKE) in forked children of this process, which take a tenth of a second; what
every training script must do is tried on each of SCRIPTS.
"""

import ast
import contextlib
import csv
import errno
import functools
import hashlib
import importlib
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import EXPERIMENT_TAG, SESSION_START_INFO_TAG
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

import pretrain_vae
import qmix
import train_world_model
from envs import checkpoints, metrics, system
from envs import run as run_module
from envs.errors import ConfigError
from envs.guard import Unheard, guarded
from envs.run import Range, Run, load_script, main, parse

ROOT = Path(__file__).resolve().parent.parent
HOP = ["--num-envs", "4", "--num-steps", "4", "--total-timesteps", "192", "--hidden-size", "16"]
HOP += ["--offline-steps", "400", "--batch-rows", "16", "--replay", "2", "--vae-ckpt", "{vae}"]
SCRIPTS = {
    "ppo_baseline.py": ["--num-envs", "8", "--num-steps", "8", "--total-timesteps", "768", "--hidden-size", "16"],
    "ppo_lstm.py": ["--num-envs", "8", "--num-steps", "8", "--total-timesteps", "768", "--hidden-size", "16"],
    "hopplus_mcts.py": [*HOP, "--dream-envs", "4", "--trees", "2", "--simulations", "3", "--updates", "2"],
    "hopplus_nomcts.py": [*HOP, "--world-ckpt", "{world}", "--update-epochs", "1", "--moa-updates", "1"],
    "mappo_hyper.py": ["--num-envs", "4", "--num-steps", "16", "--total-timesteps", "768", "--hyper-hidden-size", "16"],
    "qmix.py": ["--num-envs", "4", "--num-steps", "16", "--total-timesteps", "768", "--buffer-steps", "400"],
    "omg.py": ["--env-id", "smac-3m", "--num-envs", "4", "--num-steps", "16", "--total-timesteps", "768",
               "--buffer-steps", "400", "--batch-episodes", "4", "--teammates", "{pool}", "--vae-ckpt", "{prior}"],
}  # fmt: skip


@functools.cache
def offline_models() -> dict[str, str]:
    """Small checkpoints of the offline scripts."""
    folder = tempfile.mkdtemp()
    small = {"out_dir": folder, "epochs": 1, "hidden_size": 16}
    goals = pretrain_vae.Args(num_steps=400, vae_hidden_size=16, dim=8, reader_updates=2, pictures=False, **small)
    prior = pretrain_vae.Args(env_id="smac-3m", num_steps=400, loss="recon", dim=8, pictures=False, **small)
    world = train_world_model.Args(num_transitions=400, **small)
    team = ["--run-dir", f"{folder}/pool/team", "--total-timesteps", "32", "--num-envs", "4", "--num-steps", "8"]
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(qmix.Args, qmix.train, [*team, "--eval-every", "0", "--final-eval-episodes", "4"]) == 0
        made = {"vae": pretrain_vae.train(goals), "world": train_world_model.train(world)}
        made |= {"prior": pretrain_vae.train(prior), "pool": f"{folder}/pool"}
    return {name: str(path) for name, path in made.items()}


def arguments(script: str) -> list[str]:
    """What a tiny run of a script is called with."""
    words = [*SCRIPTS[script], *SHORT]
    return [word.format(**offline_models()) if word.startswith("{") else word for word in words]


SHORT = ["--eval-every", "256", "--eval-episodes", "8", "--final-eval-episodes", "8", "--log-every", "3",
         "--checkpoint-every", "4", "--seed", "5"]  # fmt: skip
CLOCKS = re.compile(r"wall_time|charts/SPS|time/.*|planner/sims_per_second")  # never the same twice
FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks children")

FAKE = '''
"""A training script that learns nothing much, but all that a recorder must keep."""
import sys, time
from dataclasses import dataclass
import numpy as np
import torch
from envs.grid import EnvSpec
from envs.run import RunArgs, Run, Positive, Share, Whole, main

@dataclass
class Args(RunArgs):
    env_id: str = "toy"
    data: str = ""
    """a file"""
    gamma: Share = 0.9
    total_timesteps: Positive = 60
    nan_at: Whole = 0
    slow: Share = 0.0
    slow_in: str = ""
    batch_size = 10
    @property
    def num_iterations(self):
        return max(1, self.total_timesteps // 10)

class Env:
    def __init__(self):
        self.state = np.zeros(3, np.int16)
    def get_state(self):
        return {"state": self.state.copy()}
    def set_state(self, saved):
        self.state[:] = saved["state"]

def wait(args, where):
    if args.slow_in == where:
        time.sleep(args.slow)

def train(args, run):
    wait(args, "start")
    if args.data:
        open(args.data).close()
    torch.manual_seed(args.seed)
    net, target = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    draws, generator = np.random.default_rng(args.seed), torch.Generator().manual_seed(args.seed)
    env, replay, total = Env(), [], np.array(0)
    memory = {"h": torch.zeros(2)}
    spec = EnvSpec("toy", 2, 5, tuple("abcde"), (3,), "float32", None, 9, ("a", "b"), (), {"size": 3})
    keep = {"target": target, "optimizer": optimizer, "draws": draws, "generator": generator, "env": env}
    keep |= {"replay": replay, "total": total, "memory": memory}
    run.start(net, spec, learners=[0, 1], keep=keep, facts={"sizes": [3, 2]}, title="Toy")
    for iteration in run.iterations():
        wait(args, "training")
        noise = draws.random() + torch.rand(1, generator=generator).item()
        env.state += int(noise * 10)
        replay.append({"x": np.full(2, noise)})
        del replay[:-3]
        total += 1
        memory["h"] = memory["h"] + noise
        loss = (net(torch.full((3,), noise + float(env.state[0]) + float(memory["h"][0]))) ** 2).sum()
        loss = loss + sum(entry["x"].sum() for entry in replay) * net.bias.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = 0.01 * (1 - run.progress)
        optimizer.step()
        target.load_state_dict({name: 0.5 * x + 0.5 * net.state_dict()[name] for name, x in target.named_parameters()})
        if iteration == args.nan_at:
            with torch.no_grad():
                net.weight[0, 0] = float("nan")
        run.clock("update")
        run.count({"done": np.array([True, False]), "episode_length": np.array([3, 4]),
                   "episode_return": np.full((2, 2), noise)})
        if run.evaluation_due():
            run.evaluated({"return": -loss.item()})
        if run.log_due():
            extra = {"losses/late": noise} if iteration >= 4 else {}
            run.log({"losses/loss": loss.item(), "losses/none": float("nan")} | extra)
    wait(args, "end")
    results = {"eval": {"return": noise_free(net)}}
    if run.load_best():
        results["eval_best"] = {"return": noise_free(net)}
    run.finish(results)

def noise_free(net):
    return float(net.weight.sum().detach())

if __name__ == "__main__":
    sys.exit(main(Args, train))
'''
QUICK = ["--log-every", "1", "--eval-every", "20", "--checkpoint-every", "2", "--seed", "3"]


# running


@pytest.fixture(scope="session")
def fake(tmp_path_factory):
    """A script with a dot in its name, in a folder of its own."""
    path = tmp_path_factory.mktemp("elsewhere") / "my_idea.v2.py"
    path.write_text(FAKE)
    module = load_script(path)
    main(module.Args, module.train, ["--run-dir", str(path.parent / "warm"), *QUICK])  # imports, once for all children
    return path


@pytest.fixture(autouse=True)
def faster(monkeypatch, request):
    """A kill loses nothing that the system knows already, so the disk need not; of all tests one draws the curve."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    if "curve" not in request.node.name:
        monkeypatch.setattr("envs.run.draw_curve", lambda *_: None)


def start(script: Path, argv: list[str], out: Path, cwd: Path | None = None, before=lambda: None) -> int:
    """A forked child that runs a script; returns its process id. What it prints goes to `out`."""
    module = load_script(script)
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        file = out.open("w", buffering=1)
        sys.stdout = sys.stderr = file
        os.chdir(cwd or out.parent)
        if hasattr(signal, "SIGHUP"):
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
        before()
        code = main(module.Args, module.train, argv)
        file.flush()
    except BaseException:
        import traceback

        traceback.print_exc()
        file.flush()
    finally:
        os._exit(code)


def wait_for(pid: int) -> int:
    """The exit code of a child; negative after a kill."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def child(script: Path, argv: list[str], out: Path, cwd: Path | None = None, before=lambda: None) -> tuple[int, str]:
    code = wait_for(start(script, argv, out, cwd, before))
    return code, out.read_text()


def here(script: Path, argv: list[str], capsys) -> tuple[int, str]:
    """The same in this process: exit code, and what it printed to stderr."""
    module = load_script(script)
    capsys.readouterr()
    code = main(module.Args, module.train, argv)
    return code, capsys.readouterr().err


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [{name: x for name, x in row.items() if not CLOCKS.fullmatch(name)} for row in csv.DictReader(file)]


def tensorboard_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    names = [name for name in events.Tags()["scalars"] if not CLOCKS.fullmatch(name)]
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in names}


def assert_same_run(folder: Path, expected: Path) -> None:
    """The same bits: weights, resume state, rows, and final scores."""
    assert rows_of(folder) == rows_of(expected)
    for name in ("last/weights", "last/resume", "best/weights", "previous/weights"):
        one, other = (load_file(d / "checkpoints" / f"{name}.safetensors") for d in (folder, expected))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one), name
    one, other = (json.loads((d / "result.json").read_text()) for d in (folder, expected))
    assert one["eval"] == other["eval"] and one["eval_best"] == other["eval_best"]


@pytest.fixture(scope="session")
def finished(fake, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("fake")
    code, text = child(fake, ["--run-dir", str(folder / "whole"), *QUICK], folder / "out")
    assert code == 0, text
    return folder / "whole"


@pytest.fixture
def unfinished(finished, tmp_path) -> Path:
    """A copy of a run that was killed in its final evaluation."""
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    return tmp_path / "run"


def content(folder: Path) -> dict[str, str]:
    """All files of a folder but the lock, by what is in them."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# a run


@FORK
def test_a_run_leaves_what_it_should(finished):
    assert json.loads((finished / "args.json").read_text())["script"] == "my_idea.v2.py"
    spec = json.loads((finished / "checkpoints/last/spec.json").read_text())
    assert (spec["iteration"], spec["global_step"], spec["sizes"]) == (6, 60, [3, 2])
    assert spec["script"] == "my_idea.v2.py" and spec["obs_shape"] == [3] and spec["args"]["seed"] == 3
    assert json.loads((finished / "checkpoints/previous/spec.json").read_text())["global_step"] == 40
    best = json.loads((finished / "checkpoints/best/spec.json").read_text())
    returns = [float(row["eval/return"]) for row in rows_of(finished) if row["eval/return"]]
    assert len(returns) == 3 and best["eval"]["return"] == max(returns) and best["best"] == [max(returns)]
    result = json.loads((finished / "result.json").read_text())
    assert result["finished"] and result["global_step"] == 60 and result["wall_time"] > 0
    assert sorted(path.name for path in (finished / "checkpoints").iterdir()) == ["best", "last", "previous"]


@FORK
def test_a_new_scalar_is_a_new_column(finished):
    rows = rows_of(finished)
    assert [int(row["global_step"]) for row in rows] == [10, 20, 30, 40, 50, 60]
    assert [bool(row["losses/late"]) for row in rows] == [False, False, False, True, True, True]
    assert "losses/none" not in rows[0]  # no number, no cell
    board = tensorboard_of(finished)
    assert [step for step, _ in board["losses/late"]] == [40, 50, 60]
    result = json.loads((finished / "result.json").read_text())
    assert board["final/eval/return"] == [(60, pytest.approx(result["eval"]["return"]))]


@FORK
def test_the_last_weights_are_evaluated(fake, tmp_path):
    argv = ["--run-dir", str(tmp_path / "x"), *QUICK, "--eval-every", "40"]
    assert child(fake, argv, tmp_path / "out")[0] == 0
    evaluated = [row["global_step"] for row in rows_of(tmp_path / "x") if row["eval/return"]]
    assert evaluated == ["40", "60"]


def test_the_luckiest_evaluation_does_not_win(monkeypatch, tmp_path):
    """Later weights replace the best ones unless they are clearly worse; slow decline does not slip through."""
    kept = []
    monkeypatch.setattr(run_module, "write_checkpoint", lambda folder, weights, state, spec: kept.append(spec["eval"]))
    args, net = SimpleNamespace(eval_every=10), torch.nn.Linear(1, 1)
    run = SimpleNamespace(dir=tmp_path, step=10, args=args, best=None, net=net, spec_of_now=dict, show_itself=str)
    for score, spread, keeps in ((2.80, 0.02, 1), (2.90, 0.02, 1), (2.89, 0.02, 1), (2.879, 0.02, 0), (2.88, 0.02, 1),
                                 (math.nan, 0.02, 0), (2.9, 0.0, 1), (2.91, 0.0, 1), (2.90, 0.0, 0)):  # fmt: skip
        before = len(kept)
        run_module.Run.evaluated(run, {"return": score, "return_ci95": spread})
        assert len(kept) - before == keeps, (score, spread)
    assert run.best == (2.91,) and run.next_eval == 20
    run.best, before = None, len(kept)
    for won, total, keeps in ((0.9, 5.0, 1), (0.9, 4.0, 1), (0.8, 9.0, 0), (1.0, 1.0, 1)):
        scores = {"return": total, "win_rate": won, "win_rate_ci95": 0.0}
        run_module.Run.evaluated(run, scores, by=("win_rate", "return"))
        assert len(kept) - before == keeps, (won, total)
        before = len(kept)
    assert run.best == (1.0, 1.0)


@FORK
def test_no_json_holds_what_json_does_not_know(fake, tmp_path):
    argv = ["--run-dir", str(tmp_path / "x"), *QUICK, "--eval-every", "0"]
    assert child(fake, argv, tmp_path / "out")[0] == 0

    def refuse(word):
        raise AssertionError(word)

    for path in (tmp_path / "x").rglob("*.json"):
        json.loads(path.read_text(), parse_constant=refuse)
    assert json.loads((tmp_path / "x/checkpoints/last/spec.json").read_text())["best"] is None
    assert not (tmp_path / "x/checkpoints/best").exists()


@FORK
def test_the_curve_and_the_printed_lines(fake, tmp_path):
    code, text = child(fake, ["--run-dir", str(tmp_path / "x"), *QUICK, "--eval-every", "30"], tmp_path / "out")
    assert code == 0 and (tmp_path / "x/curve.png").stat().st_size > 5000
    assert re.search(r"^Toy, 60 env steps -> .*x$", text, re.M)
    assert re.search(r"^step 10/60 return \d\.\d{3} best_eval none yet SPS \d+$", text, re.M), text
    assert re.search(r"^step 60/60 return \d\.\d{3} best_eval -?\d+\.\d{3} SPS \d+$", text, re.M)
    assert re.search(r"^  last +return .*\n  best +return ", text, re.M)


# kills


class Killer:
    """Kills this process at the n-th change to the disk: before it, or in the middle of it."""

    operations = ("make_folder", "write_file", "append_file", "move", "remove")

    def __init__(self, at: int, log: Path | None = None):
        self.left, self.log = at, log

    def __call__(self) -> None:
        for name in self.operations:
            setattr(system, name, self.watch(name, getattr(system, name)))

    def watch(self, name: str, work):
        def watched(path: Path, *args):
            self.left -= 1
            if self.log:
                with self.log.open("a") as file:
                    file.write(f"{name} {path.name}\n")
            if self.left == 0:
                if name in ("write_file", "append_file"):  # half of it
                    with path.open("wb" if name == "write_file" else "ab") as file:
                        file.write(args[0][: len(args[0]) // 2])
                if name == "remove" and path.is_dir():
                    next(iter(path.iterdir())).unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            return work(path, *args)

        return watched


@FORK
def test_killed_at_every_change_to_the_disk_and_then_again(fake, finished, tmp_path):
    """Every run is killed at one operation, its resume at another, a third time at a third; then it ends as ever."""
    log = tmp_path / "log"
    assert child(fake, ["--run-dir", str(tmp_path / "count"), *QUICK], tmp_path / "out", before=Killer(0, log))[0] == 0
    operations = log.read_text().splitlines()
    assert len(operations) > 40 and {line.split()[0] for line in operations} == set(Killer.operations)
    for number in range(1, len(operations) + 1):
        folder = tmp_path / f"killed{number}"
        code, text = child(fake, ["--run-dir", str(folder), *QUICK], tmp_path / "out", before=Killer(number))
        assert code == -signal.SIGKILL, (number, text)
        for again in (1 + number * 7 % 31, 1 + number * 5 % 11):
            if (folder / "args.json").exists():
                code, text = child(fake, ["--resume", str(folder)], tmp_path / "out", before=Killer(again))
                assert code in (0, -signal.SIGKILL), (number, again, text)
        whole = [name for name in ("last", "last.new", "previous") if is_whole(folder / "checkpoints" / name)]
        assert whole or not (folder / "checkpoints/last").exists()
        if (folder / "args.json").exists():
            code, text = child(fake, ["--resume", str(folder)], tmp_path / "out")
        else:  # killed before it began
            code, text = child(fake, ["--run-dir", str(folder), *QUICK], tmp_path / "out")
        assert code == 0, (number, text)
        assert_same_run(folder, finished)
        assert not list((folder / "checkpoints").glob("*.old*")), number
        shutil.rmtree(folder)


def is_whole(folder: Path) -> bool:
    return checkpoints.is_whole(folder, resume=True)


@FORK
def test_tensorboard_shows_each_point_once_after_kills(fake, finished, tmp_path):
    folder = tmp_path / "killed"
    assert child(fake, ["--run-dir", str(folder), *QUICK], tmp_path / "out", before=Killer(35))[0] == -signal.SIGKILL
    assert (folder / "checkpoints/last").exists() and len(rows_of(folder)) > 2
    assert child(fake, ["--resume", str(folder)], tmp_path / "out")[0] == 0
    assert tensorboard_of(folder) == tensorboard_of(finished)


# stops


@FORK
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_saves_and_the_run_goes_on(fake, finished, tmp_path, number):
    folder, slow = tmp_path / "x", ["--slow", "0.1", "--slow-in", "training"]
    pid = start(fake, ["--run-dir", str(folder), *QUICK, *slow], tmp_path / "out")
    await_file(folder / "metrics.csv", "\n10,")
    os.kill(pid, number)
    assert wait_for(pid) == 128 + number
    text = (tmp_path / "out").read_text()
    line = re.search(r"stopped and saved at step (\d+); go on with: python .*my_idea.v2.py --resume (.*)", text)
    assert line and int(line[1]) < 60 and line[2] == str(folder) and "Traceback" not in text
    assert child(fake, ["--resume", str(folder)], tmp_path / "out")[0] == 0
    assert rows_of(folder) == rows_of(finished)


def await_file(path: Path, text: str = "") -> None:
    """Wait until a file is there, with this text in it."""
    deadline = time.time() + 60
    while not path.exists() or text not in path.read_text():
        assert time.time() < deadline, path
        time.sleep(0.01)


@FORK
@pytest.mark.parametrize(
    ("where", "wait_on", "said"),
    [("start", ".lock", "before the first iteration: there is nothing to save"),
     ("end", "checkpoints/last/spec.json", "in the final evaluation: nothing is lost; go on with")],
)  # fmt: skip
def test_a_stop_before_and_after_the_training(fake, tmp_path, where, wait_on, said):
    folder, slow = tmp_path / "x", ["--slow", "1", "--slow-in", where, "--checkpoint-every", "6"]
    pid = start(fake, ["--run-dir", str(folder), *QUICK, *slow], tmp_path / "out")
    await_file(folder / wait_on)
    time.sleep(0.1)
    os.kill(pid, signal.SIGINT)
    assert wait_for(pid) == 130
    text = (tmp_path / "out").read_text()
    assert said in text and "Traceback" not in text
    assert folder.exists() == (where == "end")
    if where == "end":
        assert child(fake, ["--resume", str(folder)], tmp_path / "out")[0] == 0


@FORK
def test_a_closed_terminal_is_no_reason_under_nohup(fake, tmp_path):
    folder, slow = tmp_path / "x", ["--slow", "0.05", "--slow-in", "training"]
    ignore = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)  # noqa: E731
    pid = start(fake, ["--run-dir", str(folder), *QUICK, *slow], tmp_path / "out", before=ignore)
    await_file(folder / "metrics.csv", "\n10,")
    os.kill(pid, signal.SIGHUP)
    assert wait_for(pid) == 0


@FORK
def test_a_pipe_that_nobody_reads_does_not_end_a_training(fake, finished, tmp_path):
    def close_the_pipe():
        reader, writer = os.pipe()
        os.close(reader)
        sys.stdout = open(writer, "w")

    assert child(fake, ["--run-dir", str(tmp_path / "x"), *QUICK], tmp_path / "out", before=close_the_pipe)[0] == 0
    assert_same_run(tmp_path / "x", finished)


def test_a_terminal_that_does_not_know_a_letter_still_shows_the_line():
    raw = io.BytesIO()
    stream = Unheard(io.TextIOWrapper(raw, encoding="ascii"))
    stream.write("runs/\u00e9")
    stream.flush()
    assert raw.getvalue() == b"runs/\\xe9"


@FORK
def test_weights_that_are_no_numbers_are_never_saved(fake, tmp_path):
    code, text = child(fake, ["--run-dir", str(tmp_path / "x"), *QUICK, "--nan-at", "4"], tmp_path / "out")
    assert code == 1 and "'weight' has values that are no numbers" in text and "Traceback" not in text
    assert re.search(r"stopped after step 30: .*; the last good checkpoint is .*last", text)
    assert json.loads((tmp_path / "x/checkpoints/last/spec.json").read_text())["global_step"] == 20
    for path in (tmp_path / "x").rglob("weights.safetensors"):
        assert all(torch.isfinite(x).all() for x in load_file(path).values())


@FORK
def test_a_full_disk_is_one_line_and_keeps_the_last_checkpoint(fake, finished, tmp_path):
    def fill_the_disk():
        write, left = system.write_file, [14]

        def full(path, content):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            write(path, content)

        system.write_file = full

    code, text = child(fake, ["--run-dir", str(tmp_path / "x"), *QUICK], tmp_path / "out", before=fill_the_disk)
    assert code == 1 and "Traceback" not in text
    assert re.search(r"^error: .*No space left on device.*the last good checkpoint is", text, re.M), text
    assert child(fake, ["--resume", str(tmp_path / "x")], tmp_path / "out")[0] == 0
    assert_same_run(tmp_path / "x", finished)


# folders


@FORK
def test_two_starts_in_one_second_get_two_folders(fake, finished, tmp_path):
    stop_the_clock = lambda: setattr(time, "time", lambda: 1_700_000_000.0)  # noqa: E731
    outs = [tmp_path / "out1", tmp_path / "out2"]
    pids = [start(fake, QUICK, out, cwd=tmp_path, before=stop_the_clock) for out in outs]
    assert [wait_for(pid) for pid in pids] == [0, 0]
    folders = sorted((tmp_path / "runs").iterdir())
    names = [f"toy__my_idea.v2__3__{1_700_000_000 + k}" for k in (0, 1)]
    assert [folder.name for folder in folders] == names
    for folder in folders:
        assert_same_run(folder, finished)


@FORK
def test_one_folder_for_two_starts_is_given_to_one(fake, tmp_path):
    argv = ["--run-dir", str(tmp_path / "x"), *QUICK, "--slow", "0.05", "--slow-in", "training"]
    outs = [tmp_path / "out1", tmp_path / "out2"]
    pids = [start(fake, argv, out) for out in outs]
    assert sorted(wait_for(pid) for pid in pids) == [0, 2]
    text = "".join(out.read_text() for out in outs)
    assert re.search(r"^error: .*(is in use|already holds a run)", text, re.M)


@FORK
def test_one_of_two_resumes_goes_on_and_a_kill_leaves_no_lock(fake, finished, tmp_path):
    folder, slow = tmp_path / "x", ["--slow", "0.5", "--slow-in", "training"]
    pid = start(fake, ["--run-dir", str(folder), *QUICK, *slow], tmp_path / "out")
    await_file(folder / "checkpoints/last/spec.json")
    code, text = child(fake, ["--resume", str(folder)], tmp_path / "out2")
    os.kill(pid, signal.SIGKILL)
    wait_for(pid)
    assert code == 2 and text == f"error: '{folder}' is in use: another process is at work on this very run\n"
    assert wait_for(start(fake, ["--resume", str(folder)], tmp_path / "out2", before=lambda: make_fast(fake))) == 0
    assert rows_of(folder) == rows_of(finished)


def make_fast(script: Path) -> None:
    load_script(script).wait = lambda *_: None


def test_folders_that_can_and_cannot_be_a_run_s(fake, finished, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "foreign" / "checkpoints").mkdir(parents=True)
    long = tmp_path / ("x" * 300)
    for path, words in (
        (tmp_path / "file", "there is a file of that name"),
        (tmp_path / "file" / "x", "cannot be made"),
        (Path("/dev/null/x"), "cannot be made"),
        (long, "cannot be made"),
        (finished, f"already holds a run; go on with --resume {finished}"),
        (tmp_path / "foreign", "holds checkpoints of another run"),
    ):
        code, text = here(fake, ["--run-dir", str(path)], capsys)
        assert code == 2 and words in text and text.count("\n") == 1, text
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "log.txt").write_text("a sweep's")
    assert here(fake, ["--run-dir", str(tmp_path / "empty"), *QUICK], capsys)[0] == 0


@pytest.mark.parametrize("name", ["../..", "a/b", "a\\b", "..", "c:d"])
def test_the_name_of_an_experiment_stays_in_runs(fake, tmp_path, capsys, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    code, text = here(fake, ["--exp-name", name], capsys)
    assert code == 2 and text.startswith("error: --exp-name") and name in text
    assert not list(tmp_path.iterdir())


@FORK
def test_paths_among_the_settings_are_meant_from_where_the_run_began(fake, tmp_path):
    (tmp_path / "a" / "data").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    for name in ("data/x.txt", "y.txt"):
        (tmp_path / "a" / name).write_text("")
        folder = tmp_path / name.replace("/", "_")
        argv = ["--run-dir", str(folder), "--data", name, *QUICK]
        assert child(fake, argv, tmp_path / "out", cwd=tmp_path / "a", before=Killer(40))[0] == -signal.SIGKILL
        for _ in range(2):  # the second resume finds a save that the first one made
            code, text = child(fake, ["--resume", str(folder)], tmp_path / "out", cwd=tmp_path / "b", before=Killer(30))
            assert code in (0, -signal.SIGKILL), text
        code, text = child(fake, ["--resume", str(folder)], tmp_path / "out", cwd=tmp_path / "b")
        assert code == 0, text


# damage

DAMAGES = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "garbage": lambda path: path.write_bytes(bytes(range(256)) * 4),
    "a list": lambda path: path.write_text("[1, 2, 3]\n"),
    "foreign": lambda path: path.write_text('{"name": "something else", "args": {}}\n'),
    "deep": lambda path: path.write_text("[" * 100_000),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}
FILES = ("args.json", "metrics.csv", "checkpoints/last/spec.json", "checkpoints/last/weights.safetensors",
         "checkpoints/last/resume.safetensors", "checkpoints/best/weights.safetensors",
         "checkpoints/best/spec.json")  # fmt: skip


@FORK
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_damaged_files_are_named_and_nothing_is_overwritten(fake, unfinished, capsys, name, damage):
    DAMAGES[damage](unfinished / name)
    before = content(unfinished)
    code, text = here(fake, ["--resume", str(unfinished)], capsys)
    assert code == 2 and text.startswith("error: ") and text.count("\n") == 1 and len(text) < 1000, text
    assert Path(name).name in text, text
    if name.startswith("checkpoints/last"):
        assert "checkpoints/previous is whole, of step 40: rename it to last to go on from there" in text
    assert content(unfinished) == before


@FORK
@pytest.mark.parametrize("name", FILES)
def test_flipped_bits_are_noticed(fake, unfinished, capsys, name):
    path = unfinished / name
    whole = path.read_bytes()
    for place in np.random.default_rng(0).integers(len(whole), size=25):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << int(place) % 8
        path.write_bytes(flipped)
        before = content(unfinished)
        line = whole[: place + 1].decode(errors="replace").splitlines()[-1]
        if name == "args.json" and re.search("code_version|started_in", line + "x" * 9):
            continue  # these two decide nothing
        code, text = here(fake, ["--resume", str(unfinished)], capsys)
        assert code == 2 and text.count("\n") == 1, (place, line, text)
        assert content(unfinished) == before


@FORK
def test_the_offered_save_goes_on(fake, finished, unfinished, capsys):
    shutil.rmtree(unfinished / "checkpoints/last")
    code, text = here(fake, ["--resume", str(unfinished)], capsys)
    assert code == 2 and "rename it to last" in text
    (unfinished / "checkpoints/previous").rename(unfinished / "checkpoints/last")
    assert here(fake, ["--resume", str(unfinished)], capsys)[0] == 0
    assert rows_of(unfinished) == rows_of(finished)


@FORK
@pytest.mark.parametrize("text", ["", "{", "[]", '{"finished": false}', '{"finished": "yes"}'])
def test_a_broken_result_is_no_finish(fake, finished, unfinished, capsys, text):
    (unfinished / "result.json").write_text(text)
    assert here(fake, ["--resume", str(unfinished)], capsys)[0] == 0
    assert_same_run(unfinished, finished)


@FORK
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda args: args.pop("gamma"), "no setting: gamma"),
        (lambda args: args.update(delta=1), "does not know: delta"),
        (lambda args: args.update(gamma="high"), "--gamma must be from 0 to 1, not 'high'"),
        (lambda args: args.update(gamma=2), "--gamma must be from 0 to 1, not 2"),
        (lambda args: args.update(seed=True), "--seed must be a whole number"),
        (lambda args: args.update(seed=4), "its seed is 3, here it is 4"),
        (lambda args: args.update(total_timesteps=600), "its total_timesteps is 60, here it is 600"),
    ],
)
def test_wrong_settings_in_args_json_are_named(fake, unfinished, capsys, change, words):
    about = json.loads((unfinished / "args.json").read_text())
    change(about["args"])
    (unfinished / "args.json").write_text(json.dumps(about))
    code, text = here(fake, ["--resume", str(unfinished)], capsys)
    assert code == 2 and words in text and text.count("\n") == 1, text


@FORK
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w, s, spec: w.pop("bias"), "it has no 'bias'"),
        (lambda w, s, spec: w.update(other=torch.zeros(1)), "unknown 'other'"),
        (lambda w, s, spec: w.update(bias=torch.zeros(3)), "'bias' has shape (3,), not (2,)"),
        (lambda w, s, spec: w.update(bias=torch.zeros(2).double()), "'bias' has dtype torch.float64"),
        (lambda w, s, spec: s.pop("env.state"), "it has no 'env.state'"),
        (lambda w, s, spec: s.update({"x.y": torch.zeros(1)}), "unknown 'x'"),
        (lambda w, s, spec: s.update({"env.state": torch.zeros(4).short()}), "'env.state' has shape (4,), not (3,)"),
        (lambda w, s, spec: s.pop("optimizer.lr.0"), "'optimizer' cannot be restored"),
        (lambda w, s, spec: s.update({"optimizer.0.exp_avg": torch.zeros(1)}), "'optimizer' cannot be restored"),
        (lambda w, s, spec: s.update({"draws.state": torch.zeros(9).byte()}), "'draws' cannot be restored"),
        (lambda w, s, spec: s.update({"generator.state": torch.zeros(9).byte()}), "'generator.state' has shape"),
        (lambda w, s, spec: spec.update(obs_shape=[4]), "obs_shape is [4], not [3]"),
        (lambda w, s, spec: spec.update(learners=[1]), "learners is [1], not [0, 1]"),
        (lambda w, s, spec: spec.update(iteration=7), "iteration 7"),
        (lambda w, s, spec: spec.update(iteration="6"), "'iteration' must be int, not '6'"),
        (lambda w, s, spec: spec.update(wall_time=None), "'wall_time' must be int or float, not None"),
    ],
)
def test_saves_that_do_not_fit_are_named(fake, unfinished, capsys, change, words):
    last = unfinished / "checkpoints/last"
    saved = checkpoints.read_checkpoint(last, resume=True)
    change(*saved)
    checkpoints.write_checkpoint(last, *saved)
    before = content(unfinished)
    code, text = here(fake, ["--resume", str(unfinished)], capsys)
    assert code == 2 and words in text and text.count("\n") == 1, text
    assert content(unfinished) == before


@FORK
def test_weights_that_are_no_numbers_are_not_loaded(unfinished):
    last = unfinished / "checkpoints/last"
    weights, state, spec = checkpoints.read_checkpoint(last, resume=True)
    weights["bias"][0] = torch.inf
    with pytest.raises(FloatingPointError, match="'bias'"):
        checkpoints.write_checkpoint(last, weights, state, spec)
    whole = checkpoints.refuse_non_finite
    checkpoints.refuse_non_finite = lambda *_: None
    try:
        checkpoints.write_checkpoint(last, weights, state, spec)
    finally:
        checkpoints.refuse_non_finite = whole
    with pytest.raises(ConfigError, match="weight 'bias' has values that are no numbers"):
        checkpoints.read_weights(last, torch.nn.Linear(3, 2))


@FORK
def test_another_version_of_the_script_is_said(fake, finished, unfinished, tmp_path):
    changed = tmp_path / "later" / fake.name
    changed.parent.mkdir()
    changed.write_text(FAKE + "\n# a remark\n")
    code, text = child(changed, ["--resume", str(unfinished)], tmp_path / "out")
    assert code == 0 and re.search(r"^note: my_idea.v2.py has changed since this run was saved", text, re.M)
    assert_same_run(unfinished, finished)


@FORK
def test_a_run_of_another_script_is_refused(finished, capsys):
    code, text = here(ROOT / "ppo_baseline.py", ["--resume", str(finished)], capsys)
    assert code == 2 and "is a run of my_idea.v2.py, not of ppo_baseline.py" in text


@FORK
def test_a_finished_run_says_so(fake, finished, capsys):
    module, before = load_script(fake), content(finished)
    assert main(module.Args, module.train, ["--resume", str(finished)]) == 0
    assert "is finished already" in capsys.readouterr().out
    assert content(finished) == before


# systems


@FORK
def test_files_that_somebody_has_open_are_tried_again(fake, finished, tmp_path, monkeypatch):
    """As on Windows: nothing can be moved while it is read, and what is read cannot be removed."""
    tries = {}

    def refuse_at_first(work, times):
        def attempt(path, *args, **more):
            tries[str(path)] = tries.get(str(path), 0) + 1
            if tries[str(path)] % (times + 1):
                raise PermissionError(errno.EACCES, "somebody reads it", str(path))
            return work(path, *args, **more)

        return attempt

    monkeypatch.setattr(system, "PAUSE", 0.0)
    monkeypatch.setattr(os, "rename", refuse_at_first(os.rename, 2))
    monkeypatch.setattr(os, "replace", refuse_at_first(os.replace, 1))
    monkeypatch.setattr(system.shutil, "rmtree", refuse_at_first(shutil.rmtree, 1))
    monkeypatch.setattr(system, "sync_folder", lambda folder: None)
    code, text = child(fake, ["--run-dir", str(tmp_path / "x"), *QUICK], tmp_path / "out")
    assert code == 0, text
    assert_same_run(tmp_path / "x", finished)


@FORK
def test_an_old_save_that_cannot_be_removed_does_not_end_a_run(fake, finished, tmp_path, monkeypatch):
    def refuse(path, *args, **more):
        raise PermissionError(errno.EACCES, "somebody reads it", str(path))

    monkeypatch.setattr(system, "PATIENCE", 0.0)
    monkeypatch.setattr(system.shutil, "rmtree", refuse)
    code, text = child(fake, ["--run-dir", str(tmp_path / "x"), *QUICK], tmp_path / "out")
    assert code == 0, text
    monkeypatch.undo()
    assert_same_run(tmp_path / "x", finished)


def test_a_system_without_fcntl_and_hangup(monkeypatch, tmp_path):
    """The parts of envs/system.py for Windows, as far as they can be tried elsewhere."""
    held = set()

    class Msvcrt:
        LK_NBLCK = 2

        @staticmethod
        def locking(number, mode, size):
            place = os.fstat(number).st_ino
            if place in held:
                raise OSError(errno.EACCES, "locked")
            held.add(place)

    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "msvcrt", Msvcrt)
    monkeypatch.delattr(signal, "SIGHUP", raising=False)
    try:
        importlib.reload(system)
        assert system.STOP_SIGNALS == [signal.SIGINT, signal.SIGTERM]
        lock = system.lock(tmp_path / "lock")
        assert lock is not None and system.lock(tmp_path / "lock") is None
        lock.close()
    finally:
        monkeypatch.undo()
        importlib.reload(system)


SOURCES = [path for folder in ("", "envs", "envs/games", "envs/battles") for path in (ROOT / folder).glob("*.py")]


def test_what_only_one_system_has_stands_in_one_file():
    only = r"\b(fcntl|termios|msvcrt|SIGHUP|SIGBREAK|SIGKILL|CTRL_BREAK\w+|os\.(fork|rename|O_DIRECTORY|geteuid|uname)"
    only += r"|prctl|preexec_fn|pass_fds|start_new_session|creationflags|symlink_to|load_file|os\.name)\b"
    found = {path.name for path in SOURCES if re.search(only, path.read_text(encoding="utf-8"))}
    assert found == {"system.py"}


def test_text_is_utf8_on_every_system():
    """Windows would write and read the letters of a path in another way, or refuse them."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called == "open" or called.endswith((".read_text", ".write_text")):
                binary = called == "open" and any("b" in ast.unparse(mode) for mode in node.args[1:])
                assert binary or "encoding" in [word.arg for word in node.keywords], f"{path.name}:{node.lineno}"


def test_a_link_is_a_copy_where_links_are_refused(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("text")
    monkeypatch.setattr(Path, "symlink_to", refuse)
    for name in ("folder", "folder/file"):
        system.link(tmp_path / name, tmp_path / "other")
        assert not (tmp_path / "other").is_symlink() and (tmp_path / "other").exists()
        system.remove(tmp_path / "other")


def refuse(*_):
    raise OSError(errno.EPERM, "a required privilege is not held by the client")


@FORK
def test_no_file_is_left_open(finished):
    """Weights are read into memory: on Windows a mapped file could not be replaced."""
    before = set(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else None
    if before is None:
        pytest.skip("no /proc")
    net = torch.nn.Linear(3, 2)
    checkpoints.read_weights(finished / "checkpoints/best", net)
    assert str(finished) not in Path("/proc/self/maps").read_text()
    assert set(os.listdir("/proc/self/fd")) == before


# command lines


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--gamma", "2"], "--gamma must be from 0 to 1, not 2.0"),
        (["--gamma", "nan"], "--gamma must be from 0 to 1, not nan"),
        (["--gamma", "x"], "--gamma must be from 0 to 1, not 'x'"),
        (["--seed", "-1"], "--seed must be a whole number from 0 to 1000000000, not -1"),
        (["--seed", "1.5"], "--seed must be a whole number from 0 to 1000000000, not '1.5'"),
        (["--seed", "9" * 30], "--seed must be"),
        (["--seed"], "--seed"),
        (["--gama", "1"], "--gama"),
        (["stray"], "stray"),
        (["--track=perhaps"], "--track must be True or False, not 'perhaps'"),
        (["--run-dir", "a\udcffb"], "--run-dir must be text, not 'a\\udcffb'"),
        (["--resume", "a" * 300], "File name too long"),
    ],
)
def test_wrong_settings_are_one_line(fake, capsys, argv, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, text = here(fake, argv, capsys)
    assert code == 2 and text.startswith("error: ") and text.count("\n") == 1 and words in text, text
    assert not list(tmp_path.iterdir())


def test_a_name_that_is_no_text_is_one_line(capsys):
    """On the command line of a script without settings of a type, as sweep.py."""
    assert guarded(lambda _: "a\udcffb".encode()) == 2
    assert capsys.readouterr().err == "error: 'a\\udcffb' is no text, and no name of a file: surrogates not allowed\n"


def test_a_setting_that_is_no_path_leaves_no_run(fake, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, text = here(fake, ["--data", "a" * 300], capsys)
    assert code == 2 and text.startswith("error: ") and text.count("\n") == 1 and "File name too long" in text, text
    assert not list(tmp_path.glob("runs/*"))


def test_wrong_settings_are_one_line_where_boxes_are_of_hyphens(fake, monkeypatch):
    """tyro draws them so if the output is not UTF-8, as in a pipe on Windows."""
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "cp1252"))
    with pytest.raises(ConfigError, match=r"^Unrecognized options: --gama, 1 \(--help lists all\)$"):
        parse(load_script(fake).Args, "", ["--gama", "1"])


def test_flags_can_be_written_as_sweepers_do(fake):
    module = load_script(fake)
    assert parse(module.Args, "", ["--track=True"]).track is True
    assert parse(module.Args, "", ["--track=false"]).track is False
    assert parse(module.Args, "", ["--track", "--no-track"]).track is False


def test_a_script_is_loaded_once_whatever_its_name(fake, tmp_path):
    assert load_script(fake) is load_script(str(fake))
    other = tmp_path / fake.name
    other.write_text("VALUE = 3")
    assert load_script(other).VALUE == 3 and load_script(other) is not load_script(fake)
    (tmp_path / "broken.py").write_text("import nothing_of_that_name")
    with pytest.raises(ConfigError, match=r"broken\.py' cannot be loaded"):
        load_script(tmp_path / "broken.py")
    with pytest.raises(ConfigError, match="no Python script"):
        load_script(tmp_path / "none.py")


# trackers


def test_wandb_gets_the_script_the_scalars_the_final_scores_and_pictures(fake, tmp_path, monkeypatch, capsys):
    class Tracked:
        def __init__(self, **settings):
            self.settings, self.rows, self.files, self.open = settings, [], [], True

        def log(self, scalars, step):
            assert self.open
            self.rows.append((step, scalars))

        def save(self, path, base_path, policy):
            self.files.append(Path(path).name)

        def finish(self):
            self.open = False

    made = []

    class Wandb:
        @staticmethod
        def init(**settings):
            made.append(Tracked(**settings))
            return made[-1]

        @staticmethod
        def Image(path):
            return Path(path).name

    monkeypatch.setitem(sys.modules, "wandb", Wandb)
    show = metrics.Metrics.show_pictures
    monkeypatch.setattr(metrics.Metrics, "show_pictures", lambda *how: (how[1] / "b.png").touch() or show(*how))
    code, text = here(fake, ["--run-dir", str(tmp_path / "x"), "--track", "--wandb-tags", "a,b", *QUICK], capsys)
    assert code == 0, text
    (tracked,) = made
    assert tracked.files == [fake.name] and not tracked.open and tracked.settings["tags"] == ["a", "b"]
    assert [step for step, _ in tracked.rows] == [10, 20, 30, 40, 50, 60, 60, 60]
    assert set(tracked.rows[-2][1]) == {"final/eval/return", "final/eval_best/return"}
    assert tracked.rows[-1][1] == {"b": "b.png"}
    monkeypatch.setattr(Wandb, "init", lambda **_: 1 / 0)
    code, text = here(fake, ["--run-dir", str(tmp_path / "y"), "--track", *QUICK], capsys)
    assert code == 2 and "wandb could not be started" in text and text.count("\n") == 1


def test_tensorboard_knows_the_settings_and_the_final_scores(fake, tmp_path, capsys):
    folder = tmp_path / "x"
    assert here(fake, ["--run-dir", str(folder), *QUICK], capsys)[0] == 0
    events = EventAccumulator(str(folder)).Reload()
    session = HParamsPluginData.FromString(events.summary_metadata[SESSION_START_INFO_TAG].plugin_data.content)
    assert session.session_start_info.hparams["gamma"].number_value == 0.9
    assert session.session_start_info.hparams["device"].string_value == "cpu"
    experiment = HParamsPluginData.FromString(events.summary_metadata[EXPERIMENT_TAG].plugin_data.content)
    assert [info.name.tag for info in experiment.experiment.metric_infos] == ["final/eval/return"]
    result = json.loads((folder / "result.json").read_text())
    assert events.Scalars("final/eval/return")[-1].value == pytest.approx(result["eval"]["return"])


@pytest.mark.parametrize("script", SCRIPTS)
def test_flags_can_be_given_as_sweepers_write_them(script):
    module = load_script(ROOT / script)
    flags = [field.name for field in fields(module.Args) if isinstance(field.default, bool)]
    assert "track" in flags
    for name in flags:
        for spelled in (name, name.replace("_", "-")):
            for value in (True, False):
                assert getattr(parse(module.Args, "", [f"--{spelled}={value}"]), name) is value


def test_the_sweep_for_wandb_fits_its_script():
    yaml = pytest.importorskip("yaml")
    sweep = yaml.safe_load((ROOT / "experiments/wandb_sweep.yaml").read_text())
    args_class = load_script(ROOT / sweep["program"]).Args
    for name, choice in sweep["parameters"].items():
        for value in choice.get("values", [choice.get("value", choice.get("min"))]):
            parse(args_class, "", [f"--{name}={value}"])
    assert sweep["metric"]["name"] == "final/eval/return"


def test_rows_are_read_up_to_the_first_that_is_none(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("global_step,wall_time,a,b\n10,1.0,,2\n20,2.0,3,\n30,3.0,4,5\nnonsense\n40,4.0,4,5\n50,5.")
    rows = metrics.read_rows(path, 99)
    assert rows == [{"global_step": "10", "wall_time": "1.0", "b": "2"}, {"global_step": "20", "wall_time": "2.0",
                    "a": "3"}, {"global_step": "30", "wall_time": "3.0", "a": "4", "b": "5"}]  # fmt: skip
    assert metrics.read_rows(path, 20) == rows[:2]


# every training script


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_setting_is_explained_and_has_its_range(script, capsys):
    module = load_script(ROOT / script)
    hints = get_type_hints(module.Args, include_extras=True)
    for field in fields(module.Args):
        hint = hints[field.name]
        kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        if kind in (int, float):
            assert any(isinstance(extra, Range) for extra in get_args(hint)[1:]), f"--{field.name} has no range"
    with pytest.raises(SystemExit) as stop:
        main(module.Args, module.train, ["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert " ".join(module.__doc__.split())[:60] in " ".join(text.split())
    source = (ROOT / script).read_text() + (ROOT / "envs/run.py").read_text()
    for field in fields(module.Args):
        assert re.search(rf"^    {field.name}: .*\n    \"\"\"", source, re.M), f"--{field.name} is not explained"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_bad_setting_of_a_script_makes_no_folder(script, tmp_path, capsys):
    module = load_script(ROOT / script)
    for argv, words in ((["--env-id", "msh-9x9"], "'msh-9x9'"), (["--learning-rate", "-1"], "--learning-rate must be"),
                        (["--num-envs", "0"], "--num-envs must be a whole number from 1"),
                        (["--learning-rate", "inf"], "not inf"), (["--num-envs", "many"], "not 'many'")):  # fmt: skip
        code = main(module.Args, module.train, [*argv, "--run-dir", str(tmp_path / "x")])
        text = capsys.readouterr().err
        assert code == 2 and words in text and text.count("\n") == 1, text
        assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("script", ["mappo_hyper.py", "qmix.py", "omg.py"])
def test_start_jitter_moves_the_starts_of_training_and_of_evaluations(script, tmp_path, monkeypatch):
    module, makes = load_script(ROOT / script), []
    make_env = module.make_env
    monkeypatch.setattr(module, "make_env", lambda *args, **kw: makes.append(make_env(*args, **kw)) or makes[-1])
    argv = ["--run-dir", str(tmp_path / "x"), *arguments(script), "--start-jitter", "0.7"]
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(module.Args, module.train, argv) == 0
    assert len(makes) > 2  # the training's, and one or more of each evaluation
    assert {env.config.start_jitter for env in makes} == {0.7}


@pytest.fixture(scope="session")
def whole_runs(tmp_path_factory) -> dict[str, Path]:
    """A finished run of each script, made when asked for."""
    return {}


def whole_run(script: str, whole_runs: dict[str, Path], tmp_path_factory) -> Path:
    if script not in whole_runs:
        folder = tmp_path_factory.mktemp("whole")
        argv = ["--run-dir", str(folder / "run"), *arguments(script)]
        code, text = child(ROOT / script, argv, folder / "out", cwd=ROOT)
        assert code == 0, text
        whole_runs[script] = folder / "run"
    return whole_runs[script]


@FORK
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_that_was_stopped_goes_on_to_the_same_bits(script, how, whole_runs, tmp_path, tmp_path_factory):
    expected = whole_run(script, whole_runs, tmp_path_factory)
    folder = tmp_path / "x"
    pid = start(ROOT / script, ["--run-dir", str(folder), *arguments(script)], tmp_path / "out", cwd=ROOT)
    await_file(folder / "checkpoints/last/spec.json")
    os.kill(pid, how)
    assert wait_for(pid) == (-how if how == signal.SIGKILL else 128 + how), (tmp_path / "out").read_text()
    assert not (folder / "result.json").exists()
    code, text = child(ROOT / script, ["--resume", str(folder)], tmp_path / "out", cwd=tmp_path)
    assert code == 0, text
    assert rows_of(folder) == rows_of(expected)
    for name in ("last", "best"):
        one, other = (load_file(d / "checkpoints" / name / "weights.safetensors") for d in (folder, expected))
        assert all(torch.equal(one[key], other[key]) for key in other)
    one, other = (json.loads((d / "result.json").read_text()) for d in (folder, expected))
    assert one["eval"] == other["eval"] and one["eval_best"] == other["eval_best"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_copy_of_a_script_trains_in_another_folder(script, tmp_path):
    copy = tmp_path / f"my_{Path(script).stem}.v2.py"
    shutil.copy(ROOT / script, copy)
    command = [sys.executable, copy.name, *arguments(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200,
                          env=os.environ | {"PYTHONPATH": str(ROOT)})  # fmt: skip
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert copy.stem in folder.name
    assert json.loads((folder / "checkpoints/last/spec.json").read_text())["script"] == copy.name


class Pair(checkpoints.Kept):
    KEPT = ("array", "rng", "torch_rng", "tensor", "inner", "several")

    def __init__(self, seed: int, inner: bool = True):
        self.array, self.tensor = np.full(3, seed), torch.full((2,), float(seed))
        self.rng, self.torch_rng = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        self.inner = Pair(seed + 1, False) if inner else np.zeros(1)
        self.several = [Pair(seed + 2, False)] if inner else []

    def draw(self) -> list[float]:
        mine = [*self.array, *self.tensor.tolist(), self.rng.random(), torch.rand(1, generator=self.torch_rng).item()]
        return mine + (self.inner.draw() + self.several[0].draw() if self.several else [])


def test_what_is_kept_goes_on_as_it_was():
    """Arrays, tensors, both kinds of generators, and things of the same kind, alone or in a list."""
    one, other = Pair(1), Pair(50)
    saved = one.get_state()
    then = one.draw()
    assert other.draw() != then
    other.set_state(saved)
    one.array += 1  # what was saved is a copy
    assert other.draw() == then


def test_what_is_recorded_already_is_not_written_again():
    """So that a resume which is refused later on has changed nothing."""
    written: list[dict] = []
    folder = SimpleNamespace(facts={"goals": "here"}, write_about=lambda: written.append(dict(folder.facts)))
    recorder = SimpleNamespace(folder=folder)
    Run.record(recorder, goals="here")
    assert not written
    Run.record(recorder, world="there")
    assert written == [{"goals": "here", "world": "there"}]
