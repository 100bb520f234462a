"""How an agent fares among co-players it may never have met, in 30 episodes in a row: the table of evaluate.py
--adaptation, its figure, and an oracle that knows the co-players.

A line-up is the co-players of seat 1, as roles separated by commas; `ns,ns,ns>nh,nh,nh` has others from episode 16 on.
Rows are kinds of agents (several runs each, pooled), or a run played in another way: `raw:RUN` without planning,
`no-intra:RUN` and `no-inter:RUN` with beliefs that do not move within an episode or begin anew with each, `oracle:RUN`
planning with the true action probabilities of rule-based co-players in the place of its opponent model.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import envs
from envs.checkpoints import read_json
from envs.errors import ConfigError
from envs.players import RulePlayers
from envs.players import names as rule_names
from envs.roles import ALGORITHMS, Seats, find_checkpoint, load_policy, play_in_a_row
from envs.user_players import find_class, is_file_role

EPISODES, SWITCH_AFTER = 30, 15
SEAT_1 = "player 1"  # the role of the agent in question
LINE_UPS = ("ns,ns,ns", "nh,nh,nh", "random,random,random", "ns,nh,random", "ns,ns,random")
PHASES = {"1": slice(0, 1), "2-5": slice(1, 5), "6-15": slice(5, 15), "16-30": slice(15, 30)}  # episodes
BACK, WINDOW = 0.95, 3  # an agent is back when so many episodes reach this share of what can be had
ENOUGH = 3  # agents for an interval over agents
WITHOUT_PLAN = ("PPO", "PPO with memory", "MAPPO")  # their raw policy is all they have
BELIEFS = {"no-intra": "intra_om", "no-inter": "inter_om"}  # other ways to play a run: the setting that is off
WAYS = ("raw", "oracle", *BELIEFS)
COLOURS = ("#D55E00", "#E69F00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#882255", "#117733", "#999933", "#332288")
STYLES = ("-", "-.", "--", ":")
TOGETHER = 6  # line-ups that are played at once
NEXT_GAMES = 100_000  # added to the seed for each further agent: were the games the same, so would be their luck


# what is asked for


def parse_agents(flag: str, text: str) -> list[str]:
    """Run folders separated by commas, all there and each named once."""
    agents = [agent.strip() for agent in text.split(",")] if text else []
    for agent in agents:
        if agents.count(agent) > 1:
            raise ConfigError(f"--{flag} names '{agent}' twice, which makes no second agent")
        find_checkpoint(agent.partition("@")[0])
    return agents


def parse_rows(text: str) -> dict[str, tuple[list[str], str]]:
    """`name=run1,run2;name2=oracle:run3` -> name -> agents, and how they play: "" or one of WAYS."""
    rows = {}
    for entry in text.split(";") if text else ():
        name, equals, runs = (part.strip() for part in entry.partition("="))
        if not (name and equals and runs) or name in rows:
            raise ConfigError(f"--rows needs NAME=RUN,RUN;NAME=RUN, each name once, not '{entry.strip()}' in '{text}'")
        how, colon, rest = runs.partition(":")
        how = how if colon and how in WAYS else ""
        rows[name] = (parse_agents("rows", rest if how else runs), how)
    return rows


def parse_line_ups(args: Any, game: Any) -> dict[str, list[list[str]]]:
    """Name -> co-players of seat 1, and those after a switch, all of them known."""
    known, count = rule_names(game), game.num_players - 1
    texts = args.line_ups.split(";") if args.line_ups else [*LINE_UPS, *["strangers"] * bool(args.strangers)]
    line_ups = {}
    for text in (text.strip() for text in texts):
        parts = [[role.strip() for role in part.split(",")] for part in text.split(">")]
        if ["strangers"] in parts and not args.strangers:
            raise ConfigError("the line-up 'strangers' needs --strangers, their run folder")
        line_ups[text] = parts = [[args.strangers] * count if part == ["strangers"] else part for part in parts]
        if len(parts) > 2:
            raise ConfigError(f"line-up '{text}' has {len(parts) - 1} switches; one '>' is possible")
        for part in parts:
            if len(part) != count:
                raise ConfigError(f"line-up '{text}' must name the {count} co-players of seat 1 in {args.env_id}")
            for role in part:
                check_role(role, text, known)
    return line_ups


def check_role(role: str, line_up: str, known: tuple[str, ...]) -> None:
    if is_file_role(role):
        find_class(role)
    elif role not in known:
        if not role or not Path(role.partition("@")[0]).is_dir():
            valid = f"{', '.join(known)}, FILE.py:CLASS, or the path of a run folder"
            raise ConfigError(f"unknown role '{role}' in line-up '{line_up}'; valid are {valid}")
        find_checkpoint(role.partition("@")[0])


def algorithm_of(agents: list[str]) -> str:
    """What the agents are called in tables and figures: their algorithm, else the script that made them."""
    script = read_json(find_checkpoint(agents[0].partition("@")[0]) / "spec.json", script=str)["script"]
    return ALGORITHMS.get(Path(script).stem, Path(script).stem)


# best responses


def find_best_responses(folder: str, env_id: str) -> dict[str, list[str]]:
    """Co-players -> finished runs of this game below `folder` whose only learner sat in seat 1 among them."""
    found: dict[str, list[str]] = {}
    if not Path(folder).is_dir():
        raise ConfigError(f"--best-responses {folder}: there is no such folder; give one with runs, or a table (.csv)")
    for path in sorted(Path(folder).rglob("args.json")):
        args = read_json(path, args=dict)["args"]
        roles, here = str(args.get("roles")).split(","), args.get("env_id", env_id) == env_id
        if here and (path.parent / "result.json").is_file() and len(roles) > 1 and roles[0] in ("ppo", "hop"):
            found.setdefault(",".join(roles[1:]), []).append(str(path.parent))
    return found


def read_best_responses(path: str) -> dict[str, dict]:
    """Line-up -> its row of the best response in an earlier adaptation table, so that none has to be trained again."""
    if not Path(path).is_file():
        raise ConfigError(f"--best-responses {path}: there is no such table")
    with open(path, newline="", encoding="utf-8", errors="replace") as file:
        rows = [row for row in csv.DictReader(file) if row.get("player 1") == "best response"]
    try:
        return {row["among"]: read_row(row) for row in rows if row.get("agent", "all") == "all"}
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"--best-responses {path} is no table of adaptation: {error}") from None


def read_row(row: dict[str, str]) -> dict:
    """The cells of one row of a table."""
    returns = np.array(json.loads(row["returns"]))
    cells = {"agents": row.get("agents", "-"), "runs": int(row["runs"]), "ci95 over": row.get("ci95 over", "runs")}
    for phase, episodes in PHASES.items():  # an older table may have had other phases
        cells |= {phase: returns[episodes].mean().item(), f"ci95 {phase}": float(row.get(f"ci95 {phase}") or "nan")}
    return cells | {"share of best": 1.0, "back after": np.nan, "returns": returns.tolist()}


# playing


class Company:
    """An agent's policy in seat 1 and its co-players, others of them after a switch (in the games of `switches`: all),
    in B games."""

    def __init__(self, env: Any, policy: Any, parts: list[Seats], switches: np.ndarray | bool = True):
        self.env, self.policy, self.parts, self.switches = env, policy, parts, switches
        self.episode = np.zeros(env.num_envs, np.int64)

    @property
    def rules(self) -> Any:
        """The rule-based players of the first game"""
        return self.parts[-1 if self.switched[0] else 0].rules

    @property
    def policies(self) -> dict[int, Any]:
        """The checkpoints that play in the first game, by seat"""
        return {0: self.policy} | self.parts[-1 if self.switched[0] else 0].policies

    @property
    def switched(self) -> np.ndarray:
        """(B,) whether the second co-players sit there"""
        return (self.episode >= SWITCH_AFTER) & (len(self.parts) > 1) & self.switches

    def act(self) -> np.ndarray:
        actions = self.parts[0].act()
        if len(self.parts) > 1:
            actions[self.switched] = self.parts[1].act()[self.switched]
        actions[:, 0] = self.policy.act(self.env)
        return actions

    def watch(self, actions: np.ndarray, info: dict[str, np.ndarray]) -> None:
        for seats in self.parts:
            seats.watch(actions, info)
        if hasattr(self.policy, "watch"):
            self.policy.watch(self.env, actions, info)
        self.episode += info["done"]
        if len(self.parts) > 1:  # what others took before is no memory of theirs
            self.parts[1].rules.forget(info["done"] & (self.episode == SWITCH_AFTER))

    def probabilities(self, states: np.ndarray, env_row: np.ndarray, player: np.ndarray) -> np.ndarray:
        """(M, A) what player[m] of game env_row[m] would do in states[m], if all are rule-based"""
        chances = [seats.rules.probabilities(states, env_row, player) for seats in self.parts]
        return np.where(self.switched[env_row, None], chances[-1], chances[0])


def oracle_of(planner: Any, company: Company) -> type:
    """The planner's class with the true action probabilities of the co-players in the place of the opponent model."""

    class Oracle(type(planner)):  # type: ignore[misc]
        def plan_with(self, states, env_row, focal, drawn, streams):
            self.games, self.num_planted = np.repeat(env_row, drawn.shape[1]), 0
            return super().plan_with(states, env_row, focal, drawn, streams)

        def grow_trees(self, trees, roots, leaves, out):
            games = self.games[self.num_planted :][: len(roots.state)]
            self.num_planted += len(games)
            self.block = trees.state, roots.focal, games, leaves.node
            super().grow_trees(trees, roots, leaves, out)

        def ask_others(self, count):
            states, focal, games, node = self.block
            if not count:
                return np.zeros((0, self.game.num_actions), np.float32)
            tree, seat = self.other.tree[:count], self.other.index[:count] + 1
            player = (focal[tree] + seat) % self.game.num_players
            return company.probabilities(states[tree, node[tree]], games[tree], player).astype(np.float32)

    return Oracle


def budget_of(args: Any) -> dict[str, float]:
    """What is asked of the agent that adapts."""
    return {name: value for name in ("simulations", "play_beta", "belief_floor") if (value := getattr(args, name))}


def make_company(args: Any, env: Any, agent: str, line_ups: list[list[list[str]]], how: str, budget: dict) -> Company:
    """`agent` among the co-players of each line-up, in as many games each; several line-ups are rule-based. `budget`
    sets those attributes (simulations, play_beta) that its policy or the policy's args have; `adapts` and `raw` need
    theirs."""
    policy = load_policy(agent, env, 0, args.seed, args.greedy)
    for name, value in (budget | ({"planned": False} if how == "raw" else {})).items():
        if owner := next((x for x in (policy, getattr(policy, "args", None)) if hasattr(x, name)), None):
            setattr(owner, name, value)
        elif how in ("adapts", "raw"):
            raise ConfigError(f"'{agent}' has nothing that adapts: its policy has no '{name}'")
    if how in BELIEFS:
        if not hasattr(getattr(policy, "args", None), BELIEFS[how]):
            raise ConfigError(f"'{agent}' holds no beliefs, so there is no row {how}:{agent}")
        setattr(policy.args, BELIEFS[how], False)
    parts = []
    for k in range(max(map(len, line_ups))):
        now = [others[min(k, len(others) - 1)] for others in line_ups]
        parts.append(Seats(env, [SEAT_1, *now[0]], SEAT_1, args.seed + 1000, args.greedy))
        if len(now) > 1:
            parts[k].rules = RulePlayers(env.game, [[None, *part] for part in now], env.num_envs, args.seed + 1000)
    switches = np.repeat([len(others) > 1 for others in line_ups], env.num_envs // len(line_ups))
    company = Company(env, policy, parts, switches)
    if how == "oracle":
        if not hasattr(getattr(policy, "planner", None), "grow_trees"):
            raise ConfigError(f"'{agent}' plans with no trees, so it cannot be an oracle")
        for role in {role for others in line_ups for part in others for role in part} - {*rule_names(env.game)}:
            raise ConfigError(f"an oracle knows rule-based players alone, not '{role}'")
        policy.planner.__class__ = oracle_of(policy.planner, company)
    return company


def adapt_among(
    args: Any, agent: str, line_ups: list[list[list[str]]], settings: dict, how: str, budget: dict
) -> np.ndarray:
    """(line-ups, runs, 30) returns of `agent` among the co-players of each line-up"""
    env = envs.make(args.env_id, num_envs=args.runs * len(line_ups), seed=args.seed, **settings)
    returns = play_in_a_row(env, make_company(args, env, agent, line_ups, how, budget), EPISODES)
    return returns.reshape(len(line_ups), args.runs, EPISODES)


def in_batches(line_ups: dict[str, list[list[str]]], known: tuple[str, ...]) -> Iterator[dict[str, list[list[str]]]]:
    """The line-ups in their order, rule-based neighbours together: a planner is faster with many games."""
    batch: dict[str, list[list[str]]] = {}
    for name, others in line_ups.items():
        alone = any(role not in known for part in others for role in part)
        if batch and (alone or len(batch) == TOGETHER):
            yield batch
            batch = {}
        batch[name] = others
        if alone:
            yield batch
            batch = {}
    if batch:
        yield batch


# the table


def t_interval(means: list[float]) -> float:
    """Half width of the 95 % interval of the mean of a few agents' means."""
    from scipy.stats import t

    return float(t.ppf(0.975, len(means) - 1) * np.std(means, ddof=1) / len(means) ** 0.5)


def interval(parts: list[np.ndarray], over: str) -> float:
    """Half width of the 95 % interval of the mean of all; parts: (runs,) means of each agent."""
    pooled = np.concatenate(parts)
    return t_interval([part.mean() for part in parts]) if over == "agents" else 1.96 * pooled.std() / len(pooled) ** 0.5


def summarise_runs(parts: list[np.ndarray], over: str) -> dict:
    """Cells of the adaptation table; parts: (runs, 30) returns of each agent; `over` says what ci95 is over."""
    cells: dict[str, Any] = {"agents": len(parts), "runs": sum(map(len, parts)), "ci95 over": over}
    for phase, episodes in PHASES.items():
        means = [part[:, episodes].mean(1) for part in parts]
        cells |= {phase: np.concatenate(means).mean().item(), f"ci95 {phase}": float(interval(means, over))}
    return cells


def back_after(returns: np.ndarray, level: float) -> float:
    """How many episodes after the switch it takes to be back: the first episode that begins WINDOW ones with a mean
    return of at least BACK times `level`, 1 for the first one; NaN if there is none. returns (30,)"""
    after = returns[SWITCH_AFTER:]
    means = np.convolve(after, np.ones(WINDOW) / WINDOW, "valid")
    found = np.flatnonzero(means >= BACK * level)
    return float(found[0] + 1) if len(found) else np.nan


def adaptation(args: Any, settings: dict) -> Iterator[list[dict]]:
    """The rows of the adaptation table, line-up by line-up: one per player of seat 1, all its agents pooled, then one
    per agent if there are several. Means of the 30 episodes are in `returns`."""
    line_ups = parse_line_ups(args, envs.game(args.env_id, **settings))
    agents, compared = parse_agents("adaptation", args.adaptation), parse_agents("compare", args.compare)
    budget, own_name = budget_of(args), algorithm_of(agents) if agents else ""
    players: dict[str, tuple[list[str], str, dict]] = {own_name: (agents, "adapts", budget)} if agents else {}
    if agents and own_name not in WITHOUT_PLAN:
        players[f"{own_name}, raw policy"] = (agents, "raw", {})
    if compared:
        name = algorithm_of(compared)
        players[f"{name}, compared" if name == own_name else name] = (compared, "", {})
    for name, (several, how) in parse_rows(args.rows).items():
        if name in players:
            raise ConfigError(f"--rows: there is a row '{name}' already")
        players[name] = (several, how, {} if how == "raw" else budget)
    num_seeds = max(len(several) for several, _, _ in players.values())  # k-th agents of all players: the same starts
    earlier = read_best_responses(args.best_responses) if args.best_responses.endswith(".csv") else {}
    best = find_best_responses(args.best_responses, args.env_id) if args.best_responses and not earlier else {}
    levels = {name: row["16-30"] for name, row in earlier.items()}  # what the best response gets in the end

    def play(several: list[str], how: str, more: dict, batch: list[list[list[str]]]) -> dict[str, np.ndarray]:
        """Agent -> (line-ups, runs, 30)"""
        games = [replace(args, seed=args.seed + NEXT_GAMES * (k % num_seeds)) for k in range(len(several))]
        return {agent: adapt_among(games[k], agent, batch, settings, how, more) for k, agent in enumerate(several)}

    for batch in in_batches(line_ups, rule_names(envs.game(args.env_id, **settings))):
        played = {label: play(*how, [*batch.values()]) for label, how in players.items()}
        for j, (name, others) in enumerate(batch.items()):
            of_players = {label: {agent: r[j] for agent, r in found.items()} for label, found in played.items()}
            responses = best.get(",".join(others[0])) or best.get(",".join(others[0][-1:] + others[0][:-1]), [])
            if responses and len(others) == 1:
                found = play(responses, "", {}, [others])
                of_players["best response"] = {agent: r[0] for agent, r in found.items()}
                levels[name] = np.mean([r[0][:, PHASES["16-30"]].mean() for r in found.values()])
            level = levels.get(name.rpartition(">")[2].strip())  # after a switch, that of the second co-players
            rows = rows_of(name, of_players, level, num_seeds, switched=len(others) > 1)
            if name in earlier:
                rows.append({"among": name, "player 1": "best response", "agent": "all"} | earlier[name])
            yield rows


def rows_of(
    name: str, of_players: dict[str, dict[str, np.ndarray]], level: float | None, num_seeds: int, switched: bool
) -> list[dict]:
    """Rows of one line-up; of_players: player -> agent -> (runs, 30) returns, level: what the best response gets."""
    rows = []
    for label, of_agents in of_players.items():
        groups = {"all": list(of_agents.values())}
        groups |= {agent: [part] for agent, part in of_agents.items() if len(of_agents) > 1}
        for agent, parts in groups.items():
            # agents that met the same starts are no independent sample
            over = "agents" if ENOUGH <= len(parts) <= num_seeds else "runs"
            cells, returns = summarise_runs(parts, over), np.concatenate(parts).mean(0)
            cells["share of best"] = float(cells["16-30"] / level) if level else np.nan
            cells["back after"] = back_after(returns, level or returns[-5:].mean()) if switched else np.nan
            cells["returns"] = returns.round(4).tolist()
            rows.append({"among": name, "player 1": label, "agent": agent} | cells)
    return rows


# the figure


def panel_limits(rows: list[dict], episodes: slice) -> tuple[float, float]:
    """Of the y-axis in these episodes: around all rows with at least 60 % of the best one's return, so that these can
    be told apart."""
    returns = [np.array(row["returns"])[episodes] for row in rows]
    most = max(some.mean() for some in returns)
    smooth = [np.convolve(some, np.ones(WINDOW) / WINDOW, "valid") for some in returns if some.mean() >= 0.6 * most]
    low, high = min(curve.min() for curve in smooth), max(curve.max() for curve in smooth)
    margin = max(0.12 * (high - low), 0.03 * abs(high), 1e-3)
    return low - margin, high + margin


def draw_panel(axes: Any, rows: list[dict], episodes: slice, players: list[str]) -> dict[str, Any]:
    """Rows of one line-up in some episodes; who is far below is named in the corner. Returns a line of each player."""
    low, high = panel_limits(rows, episodes)
    handles: dict[str, Any] = {}
    below = []
    for row in rows:
        label, returns = row["player 1"], np.array(row["returns"])[episodes]
        if label == "best response":
            handles[label] = axes.axhline(np.mean(row["returns"]), color="#555555", ls="--", lw=1, label=label)
            continue
        style = players.index(label)
        colour, dashes = COLOURS[style % len(COLOURS)], STYLES[style % len(STYLES)]
        axes.plot(range(episodes.start + 1, episodes.stop + 1), returns, dashes, color=colour, lw=0.6, alpha=0.5)
        for phase, part in PHASES.items():
            if episodes.start <= part.start and part.stop <= episodes.stop:
                first, last = part.start + 0.6, part.stop + 0.4
                mean, band = row[phase], row[f"ci95 {phase}"]
                [handles[label]] = axes.plot([first, last], [mean, mean], dashes, color=colour, lw=1.8, label=label)
                axes.fill_between([first, last], mean - band, mean + band, color=colour, alpha=0.15, lw=0)
        if np.median(returns) < low:
            below.append(f"{label} {returns.mean():.2f}")
    if below:
        axes.text(0.02, 0.02, "below: " + ",\n".join(below), transform=axes.transAxes, fontsize=7)
    axes.set(xlabel="episode", xlim=(episodes.start, episodes.stop + 1), ylim=(low, high))
    axes.grid(alpha=0.3)
    return handles


def plot_adaptation(path: str, rows: list[dict]) -> None:
    """A panel per line-up: return of seat 1 over the episodes of a run (thin), its mean in each phase and the 95 % band
    of that. The y-axes show the differences of the better rows; before and after a switch they have their own."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["agent"] == "all"]
    names = list(dict.fromkeys(row["among"] for row in rows))
    columns = min(3, len(names))
    figure = Figure(figsize=(4.2 * columns, 3.1 * -(-len(names) // columns)), layout="constrained")
    places = figure.add_gridspec(-(-len(names) // columns), columns)
    players = [name for name in dict.fromkeys(row["player 1"] for row in rows) if name != "best response"]
    handles: dict[str, Any] = {}
    for k, name in enumerate(names):
        panel, place = [row for row in rows if row["among"] == name], places[divmod(k, columns)]
        if ">" in name:
            before, after = name.split(">")
            parts = [(before, slice(0, SWITCH_AFTER)), (f"then {after.strip()}", slice(SWITCH_AFTER, EPISODES))]
        else:
            parts = [(name, slice(0, EPISODES))]
        cells = place.subgridspec(1, len(parts))
        for j, (title, episodes) in enumerate(parts):
            axes = figure.add_subplot(cells[0, j])
            of_first = episodes.start == 0 and len(parts) > 1  # the best response is one to the last co-players
            shown = [row for row in panel if not (of_first and row["player 1"] == "best response")]
            handles = draw_panel(axes, shown, episodes, players) | handles
            axes.set_title(f"among {title}" if episodes.start == 0 else title, fontsize=9 if len(parts) > 1 else 11)
    figure.axes[0].set_ylabel("mean return of player 1")
    order = [name for name in [*players, "best response"] if name in handles]
    figure.legend([handles[name] for name in order], order, loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=120)
