"""One page of all adaptation tables: who gets which share of what can be had, among known and held-out co-players.

    python evaluate.py --env-id msh-4h1s-4x4 --adaptation runs/<1>,runs/<2> ... --csv runs/tables/msh-4h1s-4x4/hop.csv
    python experiments/adaptation_tables.py runs/tables

reads runs/tables/<game>/*.csv (tables of evaluate.py --adaptation, each of some rows of that game), writes
docs/results/adaptation_<game>.csv and .png, and docs/results/adaptation_tables.md of all games there. Rows that an
earlier call put there stay unless they come again, of whatever agents.

What can be had among some co-players is what the best response to them gets in episodes 6-30, or the oracle (planning
with the true co-players) where that is lower. After a switch it is that of the second co-players.
"""

import argparse
import csv
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import envs
from envs.adaptation import BACK, ENOUGH, PHASES, SWITCH_AFTER, back_after, plot_adaptation, t_interval
from envs.errors import ConfigError
from envs.guard import guarded
from envs.players import HELD_OUT

BEST, ORACLE = "best response", "oracle"
ENOUGH_OF_IT = 0.95  # the aim

INTRODUCTION = """\
Seat 1 plays 30 episodes in a row among three co-players, networks frozen; mean return of episodes 6-30 (after a switch
in episode 16: of 16-30). Behind +- the half width of the 95 % interval over agents (t distribution), in brackets the
share of what can be had: what the best response trained among just these co-players gets, or the oracle, which plans
with the true co-players, where that is lower. \\* marks co-players of whom one at least is in no training. A player is
back when three episodes reach {aim} of it. What these figures say and how they were made: [adaptation](adaptation.md).
"""


def read(files: list[Path]) -> dict[tuple[str, str, str], dict]:
    """The rows of tables of evaluate.py --adaptation, by line-up, player of seat 1 and agent."""
    rows = {}
    for path in files:
        try:
            with open(path, newline="", encoding="utf-8") as file:
                for row in csv.DictReader(file):
                    row["returns"] = json.loads(row["returns"])
                    rows[row["among"], row["player 1"], row["agent"]] = row
        except (OSError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} is no table of adaptation: {error}") from None
    return rows


class Table:
    """The rows of one game, by line-up and player of seat 1."""

    def __init__(self, game: str, files: list[Path], before: Path | None = None):
        self.game, self.rows = game, read(files)
        if before:  # what was there and did not come again
            again = {(among, player) for among, player, _ in self.rows}
            self.rows = {key: row for key, row in read([before]).items() if key[:2] not in again} | self.rows
        line_ups = dict.fromkeys(among for among, _, _ in self.rows)
        self.line_ups = sorted(line_ups, key=lambda name: (">" in name, held_out(name)))
        self.players = list(dict.fromkeys(player for _, player, _ in self.rows))
        self.players.sort(key=lambda name: (name == BEST, name == ORACLE))

    def agents(self, among: str, player: str) -> np.ndarray | None:
        """(agents, 30) mean returns of each agent, None if they did not play"""
        found = {agent: row["returns"] for (a, p, agent), row in self.rows.items() if (a, p) == (among, player)}
        single = [returns for agent, returns in found.items() if agent != "all"]
        return np.array(single or [*found.values()]) if found else None

    def level(self, among: str) -> float | None:
        """What can be had among these (the last ones, after a switch)."""
        last = among.rpartition(">")[2].strip()
        levels = [agents[:, 5:].mean() for name in (BEST, ORACLE) if (agents := self.agents(last, name)) is not None]
        return min(levels) if levels else None

    def late(self, among: str, player: str) -> np.ndarray | None:
        """(agents,) mean return in episodes 6-30, or after the switch"""
        agents = self.agents(among, player)
        return None if agents is None else agents[:, SWITCH_AFTER if ">" in among else 5 :].mean(1)

    def cell(self, among: str, player: str) -> str:
        """Return with its interval over agents, and the share of what can be had."""
        late, level = self.late(among, player), self.level(among)
        if late is None:
            return "-"
        text = f"{late.mean():.2f}" + (f" +- {t_interval(late):.2f}" if len(late) >= ENOUGH else "")
        share = late.mean() / level if level else None
        return text if share is None or player == BEST else f"{text} ({100 * share:.0f} %)"

    def overview(self) -> list[str]:
        head = ["among", *self.players]
        lines = [[in_words(among), *(self.cell(among, player) for player in self.players)] for among in self.line_ups]
        return markdown(head, lines)

    def course(self, player: str) -> list[str]:
        """Phase by phase, and how many episodes after a switch a player is back."""
        head = ["among", *(f"episodes {phase}" for phase in PHASES), "share of what can be had", "back after"]
        lines = []
        for among in self.line_ups:
            agents, level = self.agents(among, player), self.level(among)
            if agents is None:
                continue
            of_phases = [agents[:, episodes].mean(1) for episodes in PHASES.values()]
            texts = [f"{x.mean():.2f}" + (f" +- {t_interval(x):.2f}" if len(x) >= ENOUGH else "") for x in of_phases]
            share = f"{100 * self.late(among, player).mean() / level:.0f} %" if level else "-"
            back = "-"
            if ">" in among and level:
                episodes = back_after(agents.mean(0), level)
                back = f"episode {episodes:.0f}" if np.isfinite(episodes) else "never"
            lines.append([in_words(among), *texts, share, back])
        return markdown(head, lines)

    def short(self, player: str) -> list[str]:
        """Line-ups among which a player stays below the aim."""
        found = []
        for among in self.line_ups:
            late, level = self.late(among, player), self.level(among)
            if late is not None and level and late.mean() < ENOUGH_OF_IT * level:
                found.append(f"{in_words(among)} ({100 * late.mean() / level:.0f} %)")
        return found

    def write(self, stem: Path) -> None:
        rows = [self.rows[key] for key in sorted(self.rows, key=self.order)]
        names = dict.fromkeys(name for row in rows for name in row)
        draft = Path(f"{stem}.csv.tmp")
        with open(draft, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*names], restval="")
            writer.writeheader()
            writer.writerows([row | {"returns": json.dumps(row["returns"])} for row in rows])
        draft.replace(f"{stem}.csv")
        numbers = {name for phase in PHASES for name in (phase, f"ci95 {phase}")}
        plot_adaptation(f"{stem}.png", [row | {name: float(row[name]) for name in numbers} for row in rows])

    def order(self, key: tuple[str, str, str]) -> tuple:
        among, player, agent = key
        return self.line_ups.index(among), self.players.index(player), agent != "all", agent


def held_out(line_up: str) -> bool:
    """Whether somebody of it is in no training."""
    return any(role.strip() in HELD_OUT for part in line_up.split(">") for role in part.split(","))


def in_words(line_up: str) -> str:
    """ns,ns,ns>nh,nh,nh: 3 ns, then 3 nh"""
    parts = []
    for part in line_up.split(">"):
        roles = [role.strip() for role in part.split(",")]
        parts.append(f"{len(roles)} {roles[0]}" if len({*roles}) == 1 else ", ".join(roles))
    return ", then ".join(parts) + (r" \*" if held_out(line_up) else "")


def markdown(head: list[str], lines: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *lines]]


def page(tables: list[Table]) -> str:
    lines = ["# Adaptation: all tables", "", INTRODUCTION.format(aim=f"{100 * BACK:.0f} %").strip()]
    for table in tables:
        first = table.players[0]
        name = f"adaptation_{table.game}"
        lines += ["", f"## {table.game}", "", *table.overview(), ""]
        if below := table.short(first):
            lines += [f"{first} below {100 * ENOUGH_OF_IT:.0f} %: {'; '.join(below)}.", ""]
        lines += [f"{first}, phase by phase:", "", *table.course(first), ""]
        lines += [f"![return over the episodes of a run, {table.game}]({name}.png)", ""]
        lines += [f"All rows: [{name}.csv]({name}.csv)"]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="<game>/*.csv below it (none: the page is made anew)")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    options = parser.parse_args()
    if options.folder and not options.folder.is_dir():
        raise ConfigError(f"there is no folder {options.folder}")
    for folder in sorted(options.folder.iterdir()) if options.folder else ():
        envs.game(folder.name)  # refuses a folder of another name
        stem = options.out / f"adaptation_{folder.name}"
        before = Path(f"{stem}.csv")
        Table(folder.name, sorted(folder.glob("*.csv")), before if before.is_file() else None).write(stem)
    found = sorted(options.out.glob("adaptation_ms*.csv"))
    tables = [Table(path.stem.removeprefix("adaptation_"), [path]) for path in found]
    (options.out / "adaptation_tables.md").write_text(page(tables), encoding="utf-8")
    print(f"wrote {options.out / 'adaptation_tables.md'} of {len(tables)} games")


if __name__ == "__main__":
    sys.exit(guarded(lambda _: main()))
