"""experiments/adaptation_tables.py: shares of what can be had, from tables made by hand."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from envs.adaptation import PHASES, SWITCH_AFTER, plot_adaptation

ROOT = Path(__file__).resolve().parent.parent
GAME = "msh-4h1s-4x4"


def tables(*words) -> tuple[int, str]:
    command = [sys.executable, str(ROOT / "experiments/adaptation_tables.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


def write(path: Path, rows: dict[tuple[str, str, str], list[float]]) -> None:
    """(among, player, agent) -> 30 returns, as evaluate.py --adaptation writes them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        names = ["among", "player 1", "agent", *[n for phase in PHASES for n in (phase, f"ci95 {phase}")], "returns"]
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        for (among, player, agent), returns in rows.items():
            means = {phase: np.mean(returns[episodes]) for phase, episodes in PHASES.items()}
            means |= {f"ci95 {phase}": 0.1 for phase in PHASES} | {"returns": json.dumps(returns)}
            writer.writerow({"among": among, "player 1": player, "agent": agent} | means)


def cells(page: str, among: str) -> list[list[str]]:
    """The rows of that line-up, one for each table of the page."""
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return [row[1:] for row in rows if row[0] == among]


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("docs").mkdir()
    hop = {"1": [0.0] * 5 + [1.0] * 25, "2": [0.0] * 5 + [2.0] * 25, "3": [0.0] * 5 + [3.0] * 25}
    rows = {("ns,ns,ns", "HOP+", agent): returns for agent, returns in hop.items()}
    rows |= {("ns,ns,ns", "HOP+", "all"): np.mean([*hop.values()], 0).tolist()}
    rows |= {("ns,ns,ns", "best response", "all"): [9.0] * 5 + [4.0] * 25}
    rows |= {("shy,ns,ns", "HOP+", "all"): [3.0] * 30, ("shy,ns,ns", "oracle", "all"): [3.1] * 30}
    rows |= {("nh,nh,nh>ns,ns,ns", "HOP+", "all"): [1.0] * 16 + [3.8] * 14}
    write(Path(f"in/{GAME}/hop.csv"), rows)
    return tmp_path


def test_shares_are_of_the_best_response_or_of_the_oracle_where_that_is_lower(place):
    assert tables("in", "--out", "docs")[0] == 0
    page = Path("docs/adaptation_tables.md").read_text()
    overview, course = cells(page, "3 ns")
    assert overview[0] == "2.00 +- 2.48 (50 %)" and overview[2] == "4.00"  # t(2) 4.303 / sqrt 3
    assert course == ["0.00 +- 0.00", "0.00 +- 0.00", "2.00 +- 2.48", "2.00 +- 2.48", "50 %", "-"]
    assert cells(page, r"shy, ns, ns \*")[0] == ["3.00 (97 %)", "3.10 (100 %)", "-"]
    # after a switch: of the second co-players; 3 episodes from the second on reach 95 % of 4
    assert cells(page, "3 nh, then 3 ns")[0][0] == "3.61 (90 %)"
    assert cells(page, "3 nh, then 3 ns")[1][-2:] == ["90 %", "episode 2"]
    assert "HOP+ below 95 %: 3 ns (50 %); 3 nh, then 3 ns (90 %)." in page
    assert Path(f"docs/adaptation_{GAME}.png").read_bytes().startswith(b"\x89PNG")

    # another call adds rows to those that are there, and an oracle below the best response sets what can be had
    Path(f"in/{GAME}/hop.csv").unlink()
    write(Path(f"in/{GAME}/more.csv"), {("ns,ns,ns", "oracle", "all"): [2.5] * 30})
    assert tables("in", "--out", "docs")[0] == 0
    assert cells(Path("docs/adaptation_tables.md").read_text(), "3 ns")[0][:2] == [
        "2.00 +- 2.48 (80 %)",
        "2.50 (100 %)",
    ]
    rows = list(csv.DictReader(open(f"docs/adaptation_{GAME}.csv")))
    assert len(rows) == 9 and [row["agent"] for row in rows[:4]] == ["all", "1", "2", "3"]
    before = Path("docs/adaptation_tables.md").read_text()
    assert tables("--out", "docs")[0] == 0 and Path("docs/adaptation_tables.md").read_text() == before

    # a row that comes again comes without its earlier agents, and only among those line-ups
    write(Path(f"in/{GAME}/more.csv"), {("ns,ns,ns", "HOP+", "of today"): [2.4] * 30})
    assert tables("in", "--out", "docs")[0] == 0
    rows = list(csv.DictReader(open(f"docs/adaptation_{GAME}.csv")))
    assert [row["agent"] for row in rows if row["player 1"] == "HOP+"] == ["of today", "all", "all"]
    assert cells(Path("docs/adaptation_tables.md").read_text(), "3 ns")[0][0] == "2.40 (96 %)"


@pytest.mark.parametrize("content", ["", "a,b\n1,2\n", "among,player 1,agent,returns\nns,x,all,[1\n"])
def test_a_damaged_table_is_one_line_and_exit_code_2(place, content):
    Path(f"in/{GAME}/broken.csv").write_text(content)
    code, out = tables("in", "--out", "docs")
    if not content:  # no rows
        assert code == 0
    else:
        assert code == 2 and len(out.splitlines()) == 1 and "broken.csv is no table of adaptation" in out
    assert tables("nowhere")[0] == 2
    (place / "in/no_such_game").mkdir()
    assert tables("in", "--out", "docs")[0] == 2


def test_the_figure_shows_differences_before_and_after_a_switch(monkeypatch):
    """A panel of its own for each, its y-axis around the better rows there; who is far below is named."""
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    rows = []
    levels = {"HOP+": (1.0, 4.5), "PPO": (0.9, 4.4), "lost": (0.1, 4.3), "best response": (4.6, 4.6)}
    for player, (before, after) in levels.items():
        returns = [before] * SWITCH_AFTER + [after] * (30 - SWITCH_AFTER)
        means = {phase: np.mean(returns[part]) for phase, part in PHASES.items()}
        means |= {f"ci95 {phase}": 0.01 for phase in PHASES}
        for among in ("nh,nh,nh>ns,ns,ns", "ns,ns,ns"):
            rows.append({"among": among, "player 1": player, "agent": "all", "returns": returns} | means)
    plot_adaptation("unused.png", rows)
    first, second, whole = drawn[0].axes
    assert first.get_ylim()[0] > 0.8 and first.get_ylim()[1] < 1.1 and second.get_ylim()[0] > 4.0
    assert first.get_xlim()[1] == SWITCH_AFTER + 1 and second.get_xlim()[0] == SWITCH_AFTER
    assert [text.get_text() for text in first.texts] == ["below: lost 0.10"] and not second.texts
    assert (first.get_title(), second.get_title()) == ("among nh,nh,nh", "then ns,ns,ns")
    assert whole.get_xlim() == (0, 31) and whole.get_title() == "among ns,ns,ns"
    assert [text.get_text() for text in drawn[0].legends[0].texts] == ["HOP+", "PPO", "lost", "best response"]
