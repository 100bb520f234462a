"""The same sweep on a real Ray with three nodes: a worker and a node are killed in the middle, and nothing is lost."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed (extra: sweep)")

ROOT = Path(__file__).resolve().parent.parent
SWEEP = """\
name = "toy"
seeds = [1, 2]
script = "train.py"
[fixed]
total-timesteps = 600000
slow-while = "SLOW"
[[cells]]
name = "a"
"""


SMALL = {"object_store_memory": 100 * 2**20}


@pytest.fixture
def cluster(monkeypatch):
    """A head that runs nothing and two nodes with one CPU each."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **SMALL})
    nodes = [cluster.add_node(num_cpus=1, **SMALL) for _ in range(2)]
    yield cluster, nodes
    cluster.shutdown()


def start(*words) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "sweep.py"), "run", "toy.toml", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(condition, process, seconds=240):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def logs() -> list[str]:
    return [path.read_text() for path in sorted(Path("runs/toy").glob("*__*[0-9]/log.txt"))]


def saved() -> int:
    return sum((path / "checkpoints/last/spec.json").exists() for path in Path("runs/toy").glob("*__*[0-9]"))


@pytest.mark.slow
def test_killed_workers_and_nodes_go_on_from_their_checkpoints(cluster, tmp_path, monkeypatch):
    cluster, nodes = cluster
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "tests/fixtures/stand_in.py", "train.py")
    slow = tmp_path / "slow"  # while it exists the runs take minutes: they do not end before they are killed
    slow.touch()
    Path("toy.toml").write_text(SWEEP.replace("SLOW", str(slow)))
    whole = start("--runs-dir", "whole")  # for comparison: the same on this machine, undisturbed

    process = start("--engine", "ray", "--ray-address", cluster.address, "--collect-seconds", "0.5")
    wait_for(lambda: saved() == 2, process)  # checkpoints of both runs are back here while they go on
    parents = [int(re.search(r"parent (\d+)", log)[1]) for log in logs()]
    os.kill(parents[0], signal.SIGKILL)  # a Ray worker
    wait_for(lambda: sum("--resume" in log for log in logs()) == 1, process)
    cluster.remove_node(nodes[0], allow_graceful=False)  # a whole node: its run waits ...
    cluster.add_node(num_cpus=1, **SMALL)  # ... until another one joins
    wait_for(lambda: sum(log.count("--resume") for log in logs()) >= 2, process)

    # Ctrl-C: what runs on the cluster saves, comes back, and the same line goes on
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 130 and "go on with: python sweep.py run toy.toml --engine ray" in out
    assert out.count("lost the worker of") >= 2 and "FAILED" not in out
    assert any("stopped at step" in log for log in logs())
    slow.unlink()
    process = start("--engine", "ray", "--ray-address", cluster.address, "--collect-seconds", "0.5")
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and "2 of 2 runs finished" in out, out

    assert whole.wait(timeout=300) == 0

    # each part of a run started at a checkpoint of the part before, in a folder of its own, not here
    for log in logs():
        begun = [int(step) for step in re.findall(r"from step (\d+)", log)]
        assert begun == sorted(begun) and begun[0] == 0 and (len(begun) == 1 or begun[1] > 0)
        assert f" in {tmp_path}" not in log and len(set(re.findall(r" in (\S+) threads 1", log))) == len(begun)
    for path in Path("whole/toy").glob("*__*"):
        for name in ("metrics.csv", "result.json", "checkpoints/last/spec.json"):
            assert (Path("runs/toy") / path.name / name).read_bytes() == (path / name).read_bytes()
    assert {path.name for path in Path("runs/toy").iterdir()} == {path.name for path in Path("whole/toy").iterdir()}
