"""Play the adaptation tables: every row of experiments/adaptation.toml among all line-ups of a game.

    python sweep.py run experiments/adaptation_agents.toml --only "two-4x4-*"
    python sweep.py run experiments/adaptation_best.toml --only "two-4x4-*"
    python experiments/adaptation_play.py two-4x4 --jobs 2
    python experiments/adaptation_tables.py runs/tables

Each row is a call of evaluate.py --adaptation with the finished runs of its cell, all their seeds, and a table of its
own, runs/tables/<env id>/<row>.csv. A row whose table is whole, and of these very runs, is not played again; one that
was stopped begins anew. Best responses are played last, each among the co-players it was trained with.
"""

import argparse
import csv
import shlex
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import sweep  # noqa: E402
from envs import processes  # noqa: E402
from envs.errors import ConfigError  # noqa: E402
from envs.guard import guarded  # noqa: E402

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

BEST, EVALUATE = "best response", ROOT / "evaluate.py"


class Row(NamedTuple):
    """What one call of evaluate.py plays."""

    env_id: str
    name: str
    agents: list[str]  # checkpoints, with how they play in front of the first
    line_ups: list[str]
    table: Path
    runs: int

    @property
    def flags(self) -> list[str]:
        flags = ["--env-id", self.env_id, "--runs", str(self.runs), "--csv", self.table.as_posix()]
        return [*flags, "--line-ups", ";".join(self.line_ups), "--rows", f"{self.name}={','.join(self.agents)}"]

    @property
    def is_whole(self) -> bool:
        """Whether its table has every line-up, played by every one of these agents so often."""
        try:
            with open(self.table, newline="", encoding="utf-8") as file:
                found = {(row["among"], row["agent"], int(row["runs"])) for row in csv.DictReader(file)}
        except (OSError, LookupError, TypeError, ValueError):
            return False
        agents = [agent.rpartition(":")[2] for agent in self.agents] if len(self.agents) > 1 else ["all"]
        return all((among, agent, self.runs) in found for among in self.line_ups for agent in agents)


def spelled_out(line_up: str) -> str:
    """ns>nh -> ns,ns,ns>nh,nh,nh"""
    return ">".join(part if "," in part else ",".join([part] * 3) for part in line_up.split(">"))


def last_weights(file: str, cells: str, runs_dir: Path) -> list[str]:
    """The last weights of all finished runs of these cells of a sweep, in the order of their seeds."""
    sweep_file = sweep.load(ROOT / "experiments" / file)
    runs = sweep.make_runs(sweep_file, runs_dir, [cells], [])
    return [(run.folder / "checkpoints" / "last").as_posix() for run in runs if run.state == "finished"]


def rows_of(name: str, plan: dict, wanted: list[str], options: argparse.Namespace) -> list[Row]:
    """The rows of a game that are wanted and whose agents are there; what is missing is said."""
    game = plan["games"][name]
    line_ups, rows = [spelled_out(line_up) for line_up in game["line-ups"]], []
    folder = options.runs_dir / "tables" / game["env-id"]

    def add(row: str, agents: list[str], among: list[str], table: str) -> None:
        rows.append(Row(game["env-id"], row, agents, among, folder / f"{table}.csv", options.runs))

    for row, of in plan["rows"].items():
        how, colon, cell = of.rpartition(":")
        if row not in wanted:
            continue
        agents = last_weights("adaptation_agents.toml", f"{name}-{cell}", options.runs_dir)
        if agents:
            add(row, [how + colon + agents[0], *agents[1:]], line_ups, row.replace(" ", "_").replace(",", ""))
        else:
            print(f"{name}: no finished run of cell {name}-{cell}, so no row '{row}'")
    if BEST in wanted:
        of_cells = {cell.name: cell for cell in sweep.load(ROOT / "experiments/adaptation_best.toml").cells}
        for cell in of_cells.values():
            among = str(cell.args["roles"]).partition(",")[2]
            if cell.args["env-id"] == game["env-id"] and among in line_ups:
                agents = last_weights("adaptation_best.toml", cell.name, options.runs_dir)
                if agents:
                    add(BEST, agents, [among], f"best_{cell.name}")
                else:
                    print(f"{name}: no finished run of cell {cell.name}, so no best response among {among}")
    return rows


def play(rows: list[Row], jobs: int) -> bool:
    """All rows, so many at once, each with a log beside its table; whether all were played to their end."""
    waiting, running, failed = list(rows), [], 0
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                row = waiting.pop(0)
                log = row.table.with_suffix(".log")
                running.append((row, log, processes.start(["python", str(EVALUATE), *row.flags], Path.cwd(), log)))
            time.sleep(0.2)
            for row, log, process in [*running]:
                if (code := process.poll()) is not None:
                    running.remove((row, log, process))
                    failed += code != 0
                    print(f"{row.env_id}: {row.name}: {row.table if code == 0 else f'exit code {code}, see {log}'}")
    finally:
        for _, _, process in running:
            process.terminate()
    return not failed


def main() -> int:
    with open(ROOT / "experiments/adaptation.toml", "rb") as file:
        plan = tomllib.load(file)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("games", nargs="+", help=f"of {', '.join(plan['games'])}")
    parser.add_argument("--only", action="append", default=[], metavar="ROW", help="this row only; may be repeated")
    parser.add_argument("--runs", type=int, default=67, help="runs of each agent among each line-up (default 67)")
    parser.add_argument("--jobs", type=int, default=2, help="rows at once, one thread each (default 2)")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where run folders are (default runs)")
    parser.add_argument("--dry-run", action="store_true", help="show the commands and play nothing")
    options = parser.parse_args()
    known = [*plan["rows"], BEST]
    for kind, names, valid in (("game", options.games, plan["games"]), ("row", options.only, known)):
        if unknown := [name for name in names if name not in valid]:
            raise ConfigError(f"there is no {kind} '{unknown[0]}'; valid are {', '.join(valid)}")
    for flag in ("runs", "jobs"):
        if getattr(options, flag) < 1:
            raise ConfigError(f"--{flag} must be at least 1, not {getattr(options, flag)}")
    rows = [row for name in options.games for row in rows_of(name, plan, options.only or known, options)]
    if options.dry_run:
        for row in rows:
            print(shlex.join(["python", "evaluate.py", *row.flags]))
        return 0
    to_play = [row for row in rows if not row.is_whole]
    print(f"{len(rows)} rows, {len(rows) - len(to_play)} of them played already", flush=True)
    return 0 if play(to_play, options.jobs) else 1


if __name__ == "__main__":
    sys.exit(guarded(lambda _: main()))
