"""docs/copy_and_modify.md: each of its changes applies to the scripts as they are, is short, and trains."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pretrain_vae
import train_world_model

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "copy_and_modify.md").read_text(encoding="utf-8")
SHORT = ["--eval-every", "0", "--final-eval-episodes", "4", "--seed", "3"]
HOP = [*SHORT, "--num-envs", "2", "--num-steps", "4", "--total-timesteps", "16", "--offline-steps", "400"]
TREES = [*HOP, "--dream-envs", "2", "--trees", "2", "--simulations", "4", "--updates", "2", "--batch-rows", "16"]
RUNS = {
    "my_network.py": TREES,
    "my_ucb1.py": TREES,
    "my_hop.py": TREES,
    "my_bold_plan.py": [*HOP, "--plan-depth", "2", "--real-ratio", "1", "--moa-updates", "1", "--draws", "1"],
    "my_critic.py": [*SHORT, "--num-envs", "4", "--num-steps", "16", "--total-timesteps", "128"],
}


def changes() -> dict[str, tuple[str, list[str]]]:
    """New file -> the script it is copied from, and the hunks of its diff."""
    found = {}
    for block in re.findall(r"```diff\n(.*?)\n```", PAGE, re.S):
        old, new, *hunks = re.split(r"(?:^|\n)(?:--- |\+\+\+ |@@\n)", block)[1:]
        found[new] = old, hunks
    return found


def apply(text: str, hunks: list[str]) -> str:
    """The text after a diff: every hunk stands in it exactly once."""
    for hunk in hunks:
        lines = hunk.split("\n")
        before = "\n".join(line[1:] for line in lines if line[:1] != "+")
        after = "\n".join(line[1:] for line in lines if line[:1] != "-")
        assert text.count(f"\n{before}\n") == 1, f"the script has changed here; bring the page up to date:\n{before}"
        text = text.replace(f"\n{before}\n", f"\n{after}\n")
    return text


def test_the_page_has_five_changes_of_at_most_thirty_lines():
    assert len(re.findall(r"^## \d", PAGE, re.M)) == 5
    for new, (_, hunks) in changes().items():
        assert 0 < sum(line[:1] in "+-" for hunk in hunks for line in hunk.split("\n")) <= 30, new


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All changed scripts, outside of the project, and small offline models."""
    folder = tmp_path_factory.mktemp("copies")
    for new, (old, hunks) in changes().items():
        (folder / new).write_text(apply((ROOT / old).read_text(encoding="utf-8"), hunks), encoding="utf-8")
    small = {"num_steps": 400, "epochs": 1, "hidden_size": 16, "vae_hidden_size": 16, "dim": 8, "pictures": False}
    pretrain_vae.train(pretrain_vae.Args(out_dir=str(folder / "vae_ckpts"), reader_updates=2, **small))
    train_world_model.train(
        train_world_model.Args(out_dir=str(folder / "vae_ckpts"), num_transitions=400, epochs=1, hidden_size=16)
    )
    flags = ["--num-steps", "400", "--epochs", "1", "--hidden-size", "16", "--no-pictures", "--reader-updates", "2"]
    run(folder, "my_goals.py", *flags)
    return folder


def run(folder: Path, script: str, *flags: str) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script, *flags], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("script", RUNS)
def test_a_changed_copy_trains_and_its_checkpoint_plays(script, folder):
    run(folder, script, *RUNS[script], "--run-dir", f"runs/{script}")
    assert json.loads((folder / "runs" / script / "result.json").read_text())["finished"]
    game = ["--env-id", "smac-3m", "--roles", f"runs/{script}"]
    if script != "my_critic.py":
        game = ["--roles", f"runs/{script},ns,nh,random"]
    table = run(folder, str(ROOT / "evaluate.py"), *game, "--episodes", "2")
    assert f"runs/{script}" in table
