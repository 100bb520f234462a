"""experiments/adaptation_play.py: which rows are played, by whom and among whom, and which are there already."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

import envs
import sweep
from envs.adaptation import check_role
from envs.players import HELD_OUT
from envs.players import names as rule_names
from envs.run import load_script

ROOT = Path(__file__).resolve().parent.parent
play = load_script(ROOT / "experiments/adaptation_play.py")
with open(ROOT / "experiments/adaptation.toml", "rb") as plan_file:
    PLAN = play.tomllib.load(plan_file)


def call(*words) -> tuple[int, str]:
    command = [sys.executable, str(ROOT / "experiments/adaptation_play.py"), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    return done.returncode, done.stdout + done.stderr


def finish(folder: Path, file: str, cell: str) -> list[str]:
    """The runs of a cell as if they had finished; their last weights."""
    runs = sweep.make_runs(sweep.load(ROOT / "experiments" / file), folder, [cell], [])
    for run in runs:
        run.folder.mkdir(parents=True)
        (run.folder / "result.json").write_text('{"finished": true}')
    return [f"{run.folder.as_posix()}/checkpoints/last" for run in runs]


@pytest.mark.parametrize("name", PLAN["games"])
def test_the_plan_has_twelve_line_ups_half_of_them_held_out_and_three_switches(name):
    """... each of which can be played, and a best response to all but switches and tft (why: adaptation_best.toml)."""
    game = envs.game(PLAN["games"][name]["env-id"])
    line_ups = [play.spelled_out(line_up) for line_up in PLAN["games"][name]["line-ups"]]
    roles = {line_up: line_up.replace(">", ",").split(",") for line_up in line_ups}
    for line_up, some in roles.items():
        assert len(some) == 3 * line_up.count(">") + 3
        for role in some:
            check_role(role, line_up, rule_names(game))
    assert len(set(line_ups)) >= 12 and sum(">" in line_up for line_up in line_ups) >= 3
    assert sum(bool({*some} & {*HELD_OUT}) for some in roles.values()) >= 6
    cells = sweep.load(ROOT / "experiments/adaptation_best.toml").cells
    best = {cell.args["roles"].removeprefix("ppo,") for cell in cells if cell.args["env-id"] == game.env_id}
    assert {line_up for line_up in line_ups if ">" not in line_up} - {"tft,tft,tft"} <= best
    of_agents = {cell.name for cell in sweep.load(ROOT / "experiments/adaptation_agents.toml").cells}
    assert {f"{name}-{cell.rpartition(':')[2]}" for cell in PLAN["rows"].values()} <= of_agents


def test_a_row_is_a_command_with_all_finished_runs_of_its_cell(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    hop = finish(tmp_path, "adaptation_agents.toml", "two-4x4-hop")
    [best] = finish(tmp_path, "adaptation_best.toml", "two-4x4-picky")
    Path(hop[1]).parent.parent.joinpath("result.json").unlink()  # one still trains
    code, out = call("two-4x4", "--dry-run", "--runs", "5", "--runs-dir", tmp_path)
    assert code == 0 and "no finished run of cell two-4x4-none, so no row 'HOP+, no goals'" in out
    commands = [line for line in out.splitlines() if line.startswith("python ")]
    assert len(commands) == 6  # HOP+, raw, oracle, no intra, no inter; one best response
    [oracle] = [line for line in commands if "oracle=" in line]
    assert f"oracle=oracle:{hop[0]},{hop[2]}" in oracle
    assert f"--runs 5 --csv {tmp_path}/tables/msh-4h2s-4x4/oracle.csv" in oracle
    assert ";nh,nh,nh>picky,picky,picky" in oracle
    [picky] = [line for line in commands if "best response=" in line]
    assert f"best response={best}" in picky and "--line-ups picky,picky,picky" in picky


def test_a_row_whose_table_is_whole_is_not_played_again(tmp_path):
    row = play.Row("x", "HOP+", ["raw:a", "b"], ["ns,ns,ns", "nh,nh,nh"], tmp_path / "t.csv", 3)

    def write(*rows) -> bool:
        with open(row.table, "w", newline="") as file:
            csv.writer(file).writerows([("among", "agent", "runs"), *rows])
        return row.is_whole

    whole = [(among, agent, 3) for among in row.line_ups for agent in ("a", "b")]
    assert not row.is_whole and not write() and write(*whole)
    assert not write(*whole[:3]) and not write(*whole[:3], ("nh,nh,nh", "b", 2)) and not write(*whole[:2], ("ns", "c"))
    only = row._replace(agents=["a"])  # its rows are those of all
    assert write(*whole) and not only.is_whole
    assert write(*whole, ("ns,ns,ns", "all", 3), ("nh,nh,nh", "all", 3)) and only.is_whole


def test_a_row_that_cannot_be_played_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    [best] = finish(tmp_path, "adaptation_best.toml", "two-4x4-picky")  # without a checkpoint
    code, out = call("two-4x4", "--only", "best response", "--runs-dir", tmp_path)
    log = tmp_path / "tables/msh-4h2s-4x4/best_two-4x4-picky.log"
    assert code == 1 and f"exit code 2, see {log}" in out and f"'{best}' is no checkpoint" in log.read_text()
    for words, said in (
        (["two"], "there is no game 'two'; valid are 4x4, two-4x4"),
        (["4x4", "--only", "hop"], "there is no row 'hop'; valid are PPO"),
        (["4x4", "--jobs", "0"], "--jobs must be at least 1, not 0"),
    ):
        code, out = call(*words)
        assert code == 2 and said in out and len(out.splitlines()) == 1
