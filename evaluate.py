"""Play any mix of checkpoints and rule-based players on any grid game, and say how each seat fares.

    python evaluate.py --env-id msh-4h1s-4x4 --roles runs/<run>,ns,ns,random --episodes 4096 --seed 7
    python evaluate.py --roles runs/<run>,runs/<other>@2,nh,nh --greedy --rotate-seats --json scores.json
    python evaluate.py --roles runs/<run>,runs/<run>,runs/<run>,runs/<run> --gif hunt.gif
    python evaluate.py --env-id smac-3m --roles runs/<team> --episodes 256 --gif fight.gif
    python evaluate.py --env-id smac-3m --roles runs/<team>,runs/<other>,nearest --episodes 256
    python evaluate.py --roles runs/<hop>,ns,nh,runs/<ppo> --replay hunt.html --episodes 3
    python evaluate.py --adaptation runs/<hop> --compare runs/<ppo> --strangers runs/<ppo of another seed> \
        --best-responses runs/best_response --csv adaptation.csv --plot adaptation.png
    python evaluate.py --adaptation runs/<seed 1>,runs/<seed 2>,runs/<seed 3> --csv a.csv --plot a.png \
        --line-ups "tft,tft,tft;ns,ns,ns>nh,nh,nh" --rows "PPO with memory=runs/<lstm>;oracle=oracle:runs/<seed 1>"
    python evaluate.py --beliefs runs/<hop> --belief-roles fixed --plot beliefs.png

A role is a rule-based player, a class in a file of yours (FILE.py:CLASS, docs/games.md), a run folder (its best
checkpoint), or a checkpoint folder; `@2` picks the second learner of a run. How any script's checkpoint becomes a
player is one convention, told in envs/roles.py. Every episode is the first one of an env of its own, from the true
starts, so that long and short episodes count alike. In a battle a role is a team (a run folder, a checkpoint folder or
a rule-based team): one for all seats, or one for each.

`--replay` plays episodes in a row into one web page that shows what the players thought at every step (docs/replay.md);
with `--adaptation` the 30 episodes of the first agent among the first line-up.

`--adaptation` puts an agent into seat 1 among co-players it never trained with, for 30 episodes in a row, and shows how
its return grows with what it learns of them, beside its raw policy and agents that do not adapt. `--beliefs` shows what
it believes of rule-based players whose goals are known, and whether it can be taken at its word. Both take several
agents (seeds of one kind) and pool them, each in games of its own.
"""

import envs  # first: from here on Ctrl-C is one line

# isort: split
import csv
import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro

from envs.adaptation import (
    ENOUGH,
    NEXT_GAMES,
    adaptation,
    budget_of,
    make_company,
    parse_agents,
    parse_line_ups,
    plot_adaptation,
    t_interval,
)
from envs.film import film
from envs.folders import check_output
from envs.grid import ITEM, PLAYERS
from envs.players import RulePlayers
from envs.pool import mixed_team
from envs.recording import rule_probabilities
from envs.replay import MOST_EPISODES, Replay, plain, record
from envs.roles import Episodes, Seats, load_policy, parse_roles, play_episodes
from envs.run import Positive, Range, Share, Weight, Whole, guarded, parse

CHUNK = 4096  # episodes played side by side
HIDDEN = ("agent", "returns")  # columns of the adaptation table that go to files alone


@dataclass
class Args:
    env_id: str = "msh-4h1s-4x4"
    """which game to play"""
    roles: str = ""
    """one entry per player, separated by commas: a rule-based player, a run folder or a checkpoint folder"""
    episodes: Positive = 4096
    """episodes to play (of each seating, with --rotate-seats)"""
    seed: Whole = 7
    """seed of the starts and of everything the players draw"""
    greedy: bool = False
    """checkpoints play their most probable action instead of sampling"""
    rotate_seats: bool = False
    """play every rotation of the roles, so that each role sits in each seat, and report by role"""
    set: tuple[str, ...] = ()
    """changed settings of the game, e.g. --set max_block_comp=2 horizon=50"""
    json: str = ""
    """write the table to this JSON file"""
    csv: str = ""
    """write the table to this CSV file"""
    gif: str = ""
    """also play one episode into this GIF"""
    fps: Annotated[float, Range(0.1, 60), tyro.conf.arg(metavar="0.1..60")] = 2.0
    """steps per second of the GIF"""
    replay: str = ""
    """play instead --episodes episodes (at most 100) in a row into this HTML page, with all that was thought"""
    replay_json: str = ""
    """write the figures of the replay to this JSON file"""
    world_model: str = ""
    """replay: folder of a world model, to show beside each board what it foretold"""

    # adaptation
    adaptation: str = ""
    """run folder of an agent that adapts, or several separated by commas: make their adaptation table instead"""
    simulations: Whole = 0
    """adaptation: simulations per tree of the agent that adapts (0: as many as it learned with)"""
    play_beta: Weight = 0.0
    """adaptation: how sharply the agent that adapts plays (0: as its run says)"""
    belief_floor: Share = 0.0
    """adaptation: share of its beliefs that stays open whatever it has seen (0: as its run says)"""
    compare: str = ""
    """adaptation: run folder of an agent that does not adapt, to play in its place, or several"""
    rows: str = ""
    """adaptation: further rows, or all of them, e.g. "no goals=RUN,RUN;PPO with memory=RUN;oracle=oracle:RUN" (or
    raw:RUN, no-intra:RUN, no-inter:RUN)"""
    strangers: str = ""
    """adaptation: run folder of agents that are co-players, too"""
    best_responses: str = ""
    """adaptation: folder with runs of a learner trained in seat 1 among the co-players, or an earlier table (.csv)"""
    line_ups: str = ""
    """adaptation: whom to meet, e.g. "nh,nh,nh;ns,ns,ns>nh,nh,nh;strangers": '>' is a switch after episode 15 (empty:
    five, and strangers if given)"""
    runs: Positive = 200
    """adaptation: how often each agent plays each line-up for 30 episodes; beliefs: games watched side by side"""
    beliefs: str = ""
    """run folder of an agent that infers goals, or several: show how well it does, watching rule-based players"""
    belief_roles: Literal["mix", "fixed"] = "mix"
    """beliefs: a player's role is drawn anew for each episode, or stays the same throughout a game"""
    plot: str = ""
    """adaptation: write the learning curves to this picture; beliefs: how true they are and how they grow"""


def parse_settings(pairs: tuple[str, ...]) -> dict:
    """name=value pairs -> settings; values are read as JSON (4, 0.5, true, [1,2,1,1], null)."""
    settings = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        try:
            settings[name] = json.loads(value)
        except (ValueError, RecursionError) as error:
            wanted = "must be name=value, with a number, true, false or null"
            raise envs.ConfigError(f"--set {pair:.80} {wanted}") from error
        if isinstance(settings[name], list):
            settings[name] = tuple(settings[name])
    return settings


def play(env_id: str, roles: list[str], episodes: int, seed: int, greedy: bool, settings: dict) -> Episodes:
    """As many episodes, CHUNK at a time."""
    parts = []
    for first in range(0, episodes, CHUNK):
        env = envs.make(env_id, num_envs=min(CHUNK, episodes - first), seed=seed + first, **settings)
        parts.append(play_episodes(env, Seats(env, roles, None, seed + first, greedy)))
    return Episodes(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def summarise(label: dict, returns: np.ndarray, taken: np.ndarray, lengths: np.ndarray, kinds: tuple[str, ...]) -> dict:
    """One row of the table: returns (E,), taken (E, kinds), lengths (E,)."""
    row = label | {"episodes": len(returns), "return": returns.mean()}
    row["ci95"] = 1.96 * returns.std() / len(returns) ** 0.5
    row |= {f"{kind}_rate": taken[:, k].mean() for k, kind in enumerate(kinds)}
    row |= {"nothing_rate": (taken.sum(1) == 0).mean(), "length": lengths.mean()}
    return {name: value.item() if isinstance(value, np.generic) else value for name, value in row.items()}


def evaluate(args: Args, settings: dict) -> list[dict]:
    """The rows of the table: one per seat (or per role, with rotated seats), then the mean of all."""
    rules = envs.game(args.env_id, **settings)
    spec, kinds = rules.spec(), rules.kinds
    roles = parse_roles(args.roles, spec.num_players, "random")
    num_players = len(roles)
    turns = range(num_players if args.rotate_seats else 1)
    played = [
        play(args.env_id, roles[-turn:] + roles[:-turn], args.episodes, args.seed + turn, args.greedy, settings)
        for turn in turns
    ]
    lengths = np.concatenate([part.lengths for part in played])
    rows = []
    for number, role in enumerate(roles):
        # after `turn` rotations this role sits `turn` seats further on
        seats = [(number + turn) % num_players for turn in turns]
        label = {"seat": "all" if args.rotate_seats else spec.player_names[number], "role": role}
        returns = np.concatenate([part.returns[:, seat] for part, seat in zip(played, seats, strict=True)])
        taken = np.concatenate([part.taken[:, seat] for part, seat in zip(played, seats, strict=True)])
        rows.append(summarise(label, returns, taken, lengths, kinds))
    returns = np.concatenate([part.returns.mean(1) for part in played])
    taken = np.concatenate([part.taken.mean(1) for part in played])
    everybody = summarise({"seat": "mean", "role": "everybody"}, returns, taken, lengths, kinds)
    everybody["nothing_rate"] = float(np.mean([row["nothing_rate"] for row in rows]))
    return [*rows, everybody]


def watch_beliefs(args: Args, agent: str, settings: dict) -> dict[str, np.ndarray]:
    """What a run believes of seekers it only watches, beside exact Bayes on the rules, at M steps of players:

    n (M,) actions seen in the episode; believed (M, kinds + 1) mass on each kind of item, aimless last, and sought
    (M, kinds + 1) what the player is after; exact (M,) what exact Bayes gives its role; item (M,) mass on the very item
    it will take; top1 (M,) whether its action was predicted, and ceiling (M,) how likely a perfect predictor is right
    that knows the rules but not the role. `believed` and `exact` are NaN once a kind of item is gone from the board: up
    to then what a player seeks is its role.
    """
    env = envs.make(args.env_id, num_envs=args.runs, seed=args.seed, **settings)
    beliefs = getattr(load_policy(agent, env, 0, args.seed), "beliefs", None)
    if beliefs is None or beliefs.args.goal_mode == "none":
        raise envs.ConfigError(f"'{agent}' believes nothing of goals")
    game, shape = env.game, (env.num_envs, env.spec.num_players)
    if not all(game.item_counts):
        raise envs.ConfigError(f"--beliefs needs every kind of item on the board: {', '.join(game.kinds)}")
    kinds, roles = np.arange(len(game.kinds)), list(game.mix)
    wanted = np.eye(len(kinds) + 1)[[game.seekers.get(role, (-1,))[0] for role in roles]]  # (roles, kinds + 1)
    players, fixed = RulePlayers(game, ["mix"] * shape[1], shape[0], args.seed), args.belief_roles == "fixed"
    if fixed:  # each role in as many seats of all games
        seats = np.random.default_rng(args.seed).permutation(shape[0] * shape[1])
        players.drawn[:] = players.mixed[seats % len(roles)].reshape(shape)
    exact = np.full((*shape, len(roles)), 1 / len(roles))  # posterior over roles by the rules themselves
    steps: dict[str, list] = {name: [] for name in "n believed sought exact item top1 ceiling".split()}
    hunts: list[list] = [[] for _ in range(shape[0] * shape[1])]  # of the running episodes: where in `steps`, beliefs
    for _ in range(max(1, args.episodes * 4 // args.runs)):
        beliefs.look(env)
        actions = players.act(env.obs, env.legal, np.ones_like(env.t) if fixed else env.t)  # roles are drawn at t = 0
        row, player = np.nonzero(env.alive)
        each, did = np.arange(len(row)), actions[row, player]
        obs, legal, posterior = env.obs[row, player], env.legal[row, player], exact[row, player].T  # (roles, M)
        chances = np.stack([rule_probabilities(game, role, obs, legal) for role in roles])  # (roles, M, A)
        role = (players.drawn[row, player][:, None] == players.mixed).argmax(1)
        board = env.states[row][:, PLAYERS + shape[1] :]
        gone = ~(board[:, :, None] == ITEM + kinds).any(1).all(1)
        believed = np.einsum("bnk,bkc->bnc", beliefs.belief, beliefs.kinds_of_goals())[row, player]
        believed = believed[:, [*range(len(game.kinds)), -1]]  # given that it is no mere habit
        believed /= np.maximum(believed.sum(1, keepdims=True), 1e-9)
        predicted = beliefs.predict()[row, player]
        for b, i, place in zip(row, player, range(len(steps["n"]), len(steps["n"]) + len(row)), strict=True):
            hunts[b * shape[1] + i].append((place, beliefs.belief[b, i].copy()))
        steps["n"] += env.t[row].tolist()
        steps["believed"] += np.where(gone[:, None], np.nan, believed).tolist()
        steps["sought"] += wanted[role].tolist()
        steps["exact"] += np.where(gone, np.nan, posterior[role, each]).tolist()
        steps["item"] += [np.nan] * len(row)
        steps["top1"] += (predicted[each, did] >= predicted.max(1)).tolist()
        steps["ceiling"] += np.einsum("rm,rma->ma", posterior, chances).max(1).tolist()
        likelihood = chances[:, each, did] * posterior + 1e-12
        exact[row, player] = (likelihood / likelihood.sum(0)).T
        cells, places = beliefs.cell.copy(), env.states[:, PLAYERS : PLAYERS + shape[1]].copy()
        info = env.step(actions)[-1]
        beliefs.watch(actions, info["taken"], env.alive, info["done"])
        for b, i in np.argwhere(info["done"][:, None] | (info["taken"] > 0)):
            for place, held in hunts[b * shape[1] + i]:
                if info["taken"][b, i] and beliefs.args.goal_mode == "learned":
                    steps["item"][place] = float(held[cells[b] == places[b, i]].sum())
            hunts[b * shape[1] + i] = []
        if not fixed:
            exact[info["done"]] = 1 / len(roles)
    return {name: np.array(values, float) for name, values in steps.items()}


def calibrate(believed: np.ndarray, true: np.ndarray) -> tuple[list[dict], float]:
    """Ten bins of beliefs in something against how often it was true, and the expected calibration error: how far off
    the beliefs of a bin are, on average over all beliefs. NaN is no belief."""
    believed, true = believed[np.isfinite(believed)], true[np.isfinite(believed)]
    place = np.minimum((believed * 10 + 1e-6).astype(int), 9)  # an edge is in the upper bin, however it is rounded
    bins = []
    for k in np.unique(place):
        here = place == k
        row = {"belief": f"{k / 10:.1f}-{(k + 1) / 10:.1f}", "count": here.sum().item()}
        bins.append(row | {"mean belief": believed[here].mean().item(), "frequency": true[here].mean().item()})
    return bins, sum(row["count"] * abs(row["mean belief"] - row["frequency"]) for row in bins) / max(1, len(believed))


def summarise_beliefs(agent: str, tables: list[dict[str, np.ndarray]]) -> list[dict]:
    """One row per number of actions seen, over the steps of all tables; from enough agents, with ci95 of the belief."""

    def mean(values: np.ndarray) -> float:
        known = values[np.isfinite(values)]
        return known.mean().item() if len(known) else np.nan

    rows = []
    table = {name: np.concatenate([part[name] for part in tables]) for name in tables[0]}
    table["kind"] = (table["believed"] * table["sought"]).sum(1)
    owner = np.repeat(range(len(tables)), [len(part["n"]) for part in tables])
    for seen in ("0", "1", "2", "4", "8", "all"):
        some = np.full(len(owner), True) if seen == "all" else table["n"] == int(seen)
        if some.any():
            row = {"actions seen": seen, "agent": agent, "steps": int(some.sum())}
            row["belief in true kind"] = mean(table["kind"][some])
            if len(tables) >= ENOUGH:
                row["ci95"] = t_interval([mean(table["kind"][some & (owner == k)]) for k in range(len(tables))])
            columns = {"exact Bayes": "exact", "in the item taken": "item", "top-1": "top1", "ceiling": "ceiling"}
            row |= {title: mean(table[name][some]) for title, name in columns.items()}
            rows.append(row | {"share": row["top-1"] / row["ceiling"]})
    return rows


def beliefs(args: Args, settings: dict) -> None:
    """Print, draw and write what agents believe, pooled; each agent watches games of its own."""
    tables = {}
    for k, agent in enumerate(parse_agents("beliefs", args.beliefs)):
        tables[agent] = watch_beliefs(replace(args, seed=args.seed + NEXT_GAMES * k), agent, settings)
    rows = summarise_beliefs("all", list(tables.values()))
    roles = {"mix": "drawn for each episode", "fixed": "kept throughout a game"}[args.belief_roles]
    print(f"{args.env_id}, agents: {len(tables)}, games watched by each: {args.runs}, roles {roles}")
    print_table(rows, hide=("agent",))
    claims = [(table["believed"][:, :-1].ravel(), table["sought"][:, :-1].ravel()) for table in tables.values()]
    bins, error = calibrate(*map(np.concatenate, zip(*claims, strict=True)))
    print("\ncalibration: belief that a player seeks a kind of item, and how often it did")
    print_table(bins)
    of_agents = ", ".join(f"{calibrate(*claim)[1]:.3f}" for claim in claims)
    print(f"expected calibration error: {error:.3f}" + (f" (agent by agent: {of_agents})" if len(tables) > 1 else ""))
    if args.plot:
        plot_beliefs(args.plot, rows, bins, error)
    for agent, table in tables.items() if len(tables) > 1 else ():
        rows += [dict.fromkeys(rows[0], np.nan) | row for row in summarise_beliefs(agent, [table])]
    write_rows(args, settings, rows, calibration=bins, calibration_error=error)


def plot_beliefs(path: str, rows: list[dict], bins: list[dict], error: float) -> None:
    """Left how often beliefs are true, right how the belief in the true kind grows with the actions seen."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    believed, true, count = (np.array([row[name] for row in bins]) for name in ("mean belief", "frequency", "count"))
    left.plot([0, 1], [0, 1], "--", color="#555555", lw=1)
    left.plot(believed, true, color="C3")
    left.scatter(believed, true, 10 + 150 * count / count.sum(), "C3")
    left.set(title=f"calibration error {error:.3f}", xlabel="belief that a player seeks a kind", ylabel="frequency")
    rows = [row for row in rows if row["actions seen"] != "all"]
    seen, kind, exact = ([row[name] for row in rows] for name in ("actions seen", "belief in true kind", "exact Bayes"))
    right.plot(seen, exact, "--", color="#555555", lw=1, label="exact Bayes")
    right.errorbar(seen, kind, [row.get("ci95", 0.0) for row in rows], color="C3", marker="o", ms=4, label="agent")
    right.set(xlabel="actions seen in the episode", ylabel="belief in the true kind", ylim=(0, 1.02))
    right.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=120)


# battles


def evaluate_battle(args: Args, settings: dict) -> list[dict]:
    """One row: how often the team wins, and what it earns."""
    env = envs.make(args.env_id, num_envs=args.episodes, seed=args.seed, **settings)
    team = mixed_team(args.roles.split(","), env, args.seed, args.greedy)
    returns, lengths, won = np.zeros(args.episodes), np.zeros(args.episodes), np.zeros(args.episodes)
    running = np.ones(args.episodes, bool)
    while running.any():
        actions = team.act(env)
        info = env.step(actions)[-1]
        team.watch(env, actions, info)
        ended = running & info["done"]
        returns[ended], lengths[ended] = info["episode_return"][ended, 0], info["episode_length"][ended]
        won[ended] = info["battle_won"][ended]
        running &= ~ended
    error = 1.96 / args.episodes**0.5
    row = {"team": args.roles, "episodes": args.episodes, "win_rate": won.mean(), "win ci95": error * won.std()}
    row |= {"return": returns.mean(), "ci95": error * returns.std(), "length": lengths.mean()}
    return [{name: value.item() if isinstance(value, np.generic) else value for name, value in row.items()}]


# replay


def record_replay(args: Args, settings: dict) -> Replay:
    """What was played and thought, in a row in one game."""
    how = {"world": world_of(args.world_model)} if args.world_model else {}
    if args.adaptation:
        agent, *_ = parse_agents("adaptation", args.adaptation)
        others, *_ = parse_line_ups(args, envs.game(args.env_id, **settings)).values()
        how["seats"] = lambda env: make_company(args, env, agent, [others], "adapts", budget_of(args))
        return record(args.env_id, ",".join([agent, *others[0]]), 30, args.seed, args.greedy, settings, **how)
    episodes = min(args.episodes, MOST_EPISODES)
    return record(args.env_id, args.roles, episodes, args.seed, args.greedy, settings, **how)


def world_of(folder: str):
    """env -> what a trained world model foretells of a step of it: planes as [plane, cell, value] (players, then kinds
    of items), rewards (N,) and the chance that the episode ends."""
    import torch

    import train_world_model

    def make(env):
        model, num_players = train_world_model.load_checkpoint(folder, env.spec)[0], env.spec.num_players
        order = (torch.arange(num_players)[:, None] + torch.arange(num_players)) % num_players  # (viewer, N) own first

        def foretell(state: np.ndarray, actions: np.ndarray) -> dict:
            cells, board, t = train_world_model.from_states(np.tile(state, (num_players, 1)), model.game)
            obs = train_world_model.to_planes(cells.gather(1, order), board, model.game)
            out = model.predict(obs, torch.from_numpy(np.asarray(actions, np.int64))[order], t)
            viewer = int((cells[0] >= 0).int().argmax())
            planes = out["planes"][viewer].flatten(0, 1).numpy()  # (cells, C)
            things = np.concatenate([planes[:, order[viewer].argsort()], planes[:, num_players + 1 :]], 1).T
            shown = [[int(k), int(cell), plain(things[k, cell])] for k, cell in np.argwhere(abs(things) > 0.01)]
            return {"planes": shown, "rewards": plain(out["reward"]), "end": plain(out["end"][viewer])}

        return foretell

    return make


def write_replay(args: Args, replay: Replay) -> None:
    """The files asked for, and who earned what."""
    returns, players = replay.returns(), replay.data["players"]
    how = "greedy" if args.greedy else "sampled"
    print(f"{args.env_id}, {len(returns)} episodes in a row, {how} play")
    print_table([
        {"player": player["name"], "role": player["role"], "return": float(mean)}
        for player, mean in zip(players, returns.mean(0), strict=True)
    ])  # fmt: skip
    for path in filter(None, (args.replay, args.replay_json)):
        replay.write(path)
        print(f"replay: {path} ({Path(path).stat().st_size / 1e6:.2f} MB)")


def print_table(rows: list[dict], hide: tuple[str, ...] = ()) -> None:
    names = [name for name in rows[0] if name not in hide]
    cells = [[f"{row[name]:.3f}" if isinstance(row[name], float) else str(row[name]) for name in names] for row in rows]
    widths = [max(len(name), *(len(line[k]) for line in cells)) for k, name in enumerate(names)]
    places = ["<" if isinstance(rows[0][name], str) else ">" for name in names]
    for line in [names, ["-" * width for width in widths], *cells]:
        print("  ".join(f"{cell:{place}{width}}" for cell, place, width in zip(line, places, widths, strict=True)))


def write_atomically(path: str, text: str) -> None:
    draft = Path(path + ".tmp")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def check_outputs(args: Args) -> None:
    """Whatever is to be written can be: asked before any work is done."""
    endings = {"json": (".json",), "csv": (".csv",), "gif": (".gif",), "plot": (".png", ".pdf", ".svg")}
    endings |= {"replay": (".html",), "replay_json": (".json",)}
    for name, known in endings.items():
        path = getattr(args, name)
        if path and Path(path).suffix not in known:
            raise envs.ConfigError(f"--{name.replace('_', '-')} {path} must end in {' or '.join(known)}")
        if path:
            check_output(f"--{name.replace('_', '-')}", path)


def main(args: Args) -> None:
    check_outputs(args)
    settings = parse_settings(args.set)
    if args.replay or args.replay_json:
        write_replay(args, record_replay(args, settings))
        if args.gif:
            write_film(args, settings)
        return
    if args.world_model:
        raise envs.ConfigError("--world-model shows what it foretold in a replay: give --replay or --replay-json, too")
    if args.adaptation or args.rows:
        rows: list[dict] = []
        for of_line_up in adaptation(args, settings):
            if not rows:
                print(f"{args.env_id}, {args.runs} runs of 30 episodes, seat 1 plays {args.adaptation or args.rows}")
            print_table([row for row in of_line_up if row["agent"] == "all"], hide=HIDDEN)
            rows += of_line_up
            write_rows(args, settings, rows)  # a table takes long: what is known is kept
        if args.plot:
            plot_adaptation(args.plot, rows)
        return
    if args.beliefs:
        beliefs(args, settings)
        return
    is_battle = args.env_id.startswith(("smac-", "smaclite-"))
    rows = evaluate_battle(args, settings) if is_battle else evaluate(args, settings)
    how = "greedy" if args.greedy else "sampled"
    print(f"{args.env_id}, {args.episodes} episodes{' of each seating' if args.rotate_seats else ''}, {how} play")
    print_table(rows)
    write_rows(args, settings, rows)
    if args.gif:
        write_film(args, settings)


def write_film(args: Args, settings: dict) -> None:
    film(args.gif, args.env_id, args.roles, args.seed, args.greedy, settings, args.fps)
    print(f"GIF: {args.gif}")


def write_rows(args: Args, settings: dict, rows: list[dict], **more) -> None:
    """The rows to the JSON and CSV files asked for; `more` goes to the JSON alone."""
    if args.json:
        content = {"env_id": args.env_id, "settings": settings, "seed": args.seed, "greedy": args.greedy, "rows": rows}
        write_atomically(args.json, json.dumps(content | more, indent=2) + "\n")
    if args.csv:
        with open(args.csv + ".tmp", "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        os.replace(args.csv + ".tmp", args.csv)


if __name__ == "__main__":
    sys.exit(guarded(lambda _: main(parse(Args, __doc__))))
