"""Play any mix of checkpoints and rule-based players on any grid game, and say how each seat fares.

    python evaluate.py --env-id msh-4h1s-4x4 --roles runs/<run>,ns,ns,random --episodes 4096 --seed 7
    python evaluate.py --roles runs/<run>,runs/<other>@2,nh,nh --greedy --rotate-seats --json scores.json
    python evaluate.py --roles runs/<run>,runs/<run>,runs/<run>,runs/<run> --gif hunt.gif
    python evaluate.py --env-id smac-3m --roles runs/<team> --episodes 256 --gif fight.gif
    python evaluate.py --adaptation runs/<hop> --compare runs/<ppo> --strangers runs/<ppo of another seed> \
        --best-responses runs/best_response --csv adaptation.csv --plot adaptation.png

A role is a rule-based player, a run folder (its best checkpoint), or a checkpoint folder; `@2` picks the second learner
of a run. How any script's checkpoint becomes a player is one convention, told in envs/roles.py. Every episode is the
first one of an env of its own, from the true starts, so that long and short episodes count alike. In a battle there is
one role, the team: a run folder, a checkpoint folder or a rule-based team.

`--adaptation` puts an agent into seat 1 among co-players it never trained with, for 30 episodes in a row, and shows how
its return grows with what it learns of them, beside its raw policy and agents that do not adapt. `--beliefs` shows what
it believes of rule-based players whose goals are known.
"""

import csv
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import tyro

import envs
from envs.grid import ITEM, PLAYERS
from envs.players import SEEKER
from envs.recording import rule_probabilities
from envs.roles import Episodes, Seats, load_policy, load_team, parse_roles, play_episodes

CHUNK = 4096  # episodes played side by side
LINE_UPS = ("ns,ns,ns", "nh,nh,nh", "random,random,random", "ns,nh,random", "ns,ns,random")  # of the adaptation table
PHASES = {"1-5": slice(0, 5), "6-15": slice(5, 15), "16-30": slice(15, 30)}  # episodes


@dataclass
class Args:
    env_id: str = "msh-4h1s-4x4"
    """which game to play"""
    roles: str = ""
    """one entry per player, separated by commas: a rule-based player, a run folder or a checkpoint folder"""
    episodes: int = 4096
    """episodes to play (of each seating, with --rotate-seats)"""
    seed: int = 7
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
    fps: float = 2.0
    """frames per second of the GIF"""

    # adaptation
    adaptation: str = ""
    """run folder of an agent that adapts: make its adaptation table instead"""
    adapt: Literal["beliefs", "online"] = "beliefs"
    """what may change while it plays: its beliefs alone, or also its opponent model"""
    simulations: int = 0
    """adaptation: simulations per tree of the agent that adapts (0: as many as it learned with)"""
    compare: str = ""
    """adaptation: run folder of an agent that does not adapt, to play in its place"""
    strangers: str = ""
    """adaptation: run folder of agents that are co-players, too"""
    best_responses: str = ""
    """adaptation: folder with runs of a learner (in seat 1) trained among the same co-players"""
    runs: int = 200
    """adaptation: how often each line-up is played for 30 episodes"""
    beliefs: str = ""
    """run folder of an agent that infers goals: show how well it does, watching rule-based players"""
    plot: str = ""
    """adaptation: write the learning curves to this picture"""


def parse_settings(pairs: tuple[str, ...]) -> dict:
    """name=value pairs -> settings; values are read as JSON (4, 0.5, true, [1,2,1,1], null)."""
    settings = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        try:
            settings[name] = json.loads(value)
        except ValueError as error:
            raise envs.ConfigError(f"--set {pair} must be name=value, with a number, true, false or null") from error
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


def film(args: Args, settings: dict) -> None:
    """One episode as a GIF."""
    from envs import render

    env = envs.make(args.env_id, num_envs=1, seed=args.seed, **settings)
    roles = parse_roles(args.roles, env.spec.num_players, "random")
    seats = Seats(env, roles, None, args.seed, args.greedy)
    returns = np.zeros(len(roles))
    frames = [render.picture(render.View.of(env.game, env.states[0], returns, np.zeros(len(roles), np.int8)))]
    done = False
    while not done:
        actions = seats.act()
        after = env.game.simulate(env.states, actions)  # the env itself shows the next episode once this one is over
        info = env.step(actions)[-1]
        seats.watch(actions, info)
        returns += after.reward[0]
        frames.append(render.picture(render.View.of(env.game, after.states[0], returns, after.taken[0])))
        done = bool(info["done"][0])
    render.write_gif(args.gif, frames, args.fps)


def play_in_a_row(env, seats: Seats, episodes: int) -> np.ndarray:
    """(B, episodes) returns of seat 1 in the first episodes of every game, one after the other."""
    returns, count = np.zeros((env.num_envs, episodes)), np.zeros(env.num_envs, np.int64)
    while (count < episodes).any():
        env.needed = count < episodes
        actions = seats.act()
        info = env.step(actions)[-1]
        seats.watch(actions, info)
        ended = np.flatnonzero(info["done"] & (count < episodes))
        returns[ended, count[ended]] = info["episode_return"][ended, 0]
        count[ended] += 1
    return returns


def adapt_among(args: Args, agent: str, others: list[str], settings: dict, **how) -> np.ndarray:
    """(runs, 30) returns of `agent` among `others`; `how` sets attributes of its policy (planned, adapt)."""
    alone = how.get("adapt") == "online"  # then every run changes networks of its own: one game at a time
    returns = []
    for run in range(args.runs if alone else 1):
        env = envs.make(args.env_id, num_envs=1 if alone else args.runs, seed=args.seed + run, **settings)
        policy = load_policy(agent, env, 0, args.seed + run, args.greedy)
        for name, value in how.items():
            if not hasattr(policy, name):
                raise envs.ConfigError(f"'{agent}' has nothing that adapts: its policy has no '{name}'")
            setattr(policy, name, value)
        roles = [agent, *others]
        seats = Seats(env, roles, agent, args.seed + 1000 + run, args.greedy, {0: policy})
        returns.append(play_in_a_row(env, seats, 30))
    return np.concatenate(returns)


def find_best_responses(folder: str) -> dict[str, list[str]]:
    """Co-players -> finished runs below `folder` whose only learner sat in seat 1 among them."""
    found: dict[str, list[str]] = {}
    for path in sorted(Path(folder).rglob("args.json")):
        roles = json.loads(path.read_text())["args"].get("roles", "").split(",")
        if (path.parent / "result.json").is_file() and len(roles) > 1 and roles[0] in ("ppo", "hop"):
            found.setdefault(",".join(roles[1:]), []).append(str(path.parent))
    return found


def adaptation(args: Args, settings: dict) -> list[dict]:
    """The rows of the adaptation table, one per line-up and player of seat 1; curves in `returns`."""
    spec = envs.game(args.env_id, **settings).spec()
    line_ups = {text: text.split(",") for text in LINE_UPS}
    if args.strangers:
        line_ups["strangers"] = [args.strangers] * (spec.num_players - 1)
    if any(len(others) != spec.num_players - 1 for others in line_ups.values()):
        raise envs.ConfigError(f"the line-ups of the adaptation table are for 4 players, {args.env_id} has other ones")
    best = find_best_responses(args.best_responses) if args.best_responses else {}
    rows = []
    budget = {"simulations": args.simulations} if args.simulations else {}
    for name, others in line_ups.items():
        players = {
            "adapts": (args.adaptation, {"adapt": args.adapt} | budget),
            "raw policy": (args.adaptation, {"planned": False}),
        }
        if args.compare:
            players["does not adapt"] = (args.compare, {})
        responses = best.get(",".join(others), []) or best.get(",".join(others[-1:] + others[:-1]), [])
        played = {label: adapt_among(args, agent, others, settings, **how) for label, (agent, how) in players.items()}
        if responses:
            played["best response"] = np.concatenate([adapt_among(args, run, others, settings) for run in responses])
        for label, returns in played.items():
            row = {"among": name, "player 1": label, "runs": len(returns)}
            for phase, episodes in PHASES.items():
                mean = returns[:, episodes].mean(1)
                row |= {phase: mean.mean().item(), f"ci95 {phase}": 1.96 * mean.std().item() / len(mean) ** 0.5}
            share = row["16-30"] / played["best response"][:, PHASES["16-30"]].mean() if responses else np.nan
            rows.append(row | {"share of best": float(share), "returns": returns.mean(0).round(4).tolist()})
        print_table([{k: v for k, v in row.items() if k != "returns"} for row in rows if row["among"] == name])
    return rows


def watch_beliefs(args: Args, settings: dict) -> list[dict]:
    """What a run's mind believes of seekers it only watches (drawn for each episode), beside exact Bayes on the rules.

    One row per number of actions seen: mass on the kind of item the player seeks, on the very item it will take, share
    of actions predicted, and what a perfect predictor of these rules that must infer the role would get.
    """
    env = envs.make(args.env_id, num_envs=args.runs, seed=args.seed, **settings)
    mind = getattr(load_policy(args.beliefs, env, 0, args.seed), "mind", None)
    if mind is None or mind.args.goal_mode == "none":
        raise envs.ConfigError(f"'{args.beliefs}' believes nothing of goals")
    game, shape = env.game, (env.num_envs, env.spec.num_players)
    roles, wanted = list(game.mix), np.array([game.seekers[role][0] for role in game.mix])
    codes = np.array([SEEKER + list(game.seekers).index(role) for role in roles])
    seats = Seats(env, ["mix"] * shape[1], None, args.seed)
    exact = np.full((*shape, len(roles)), 1 / len(roles))  # posterior over roles by the rules themselves
    steps: dict[str, list] = {"n": [], "kind": [], "item": [], "top1": [], "ceiling": []}
    hunts: list[list] = [[] for _ in range(shape[0] * shape[1])]  # of the running episodes: where in `steps`, beliefs
    for _ in range(args.episodes * 4 // args.runs):
        mind.look(env)
        actions = seats.act()
        row, player = np.nonzero(env.alive)
        each, did = np.arange(len(row)), actions[row, player]
        obs, legal, posterior = env.obs[row, player], env.legal[row, player], exact[row, player].T  # (roles, M)
        chances = np.stack([rule_probabilities(game, role, obs, legal) for role in roles])  # (roles, M, A)
        kind = wanted[(seats.rules.drawn[row, player][:, None] == codes).argmax(1)]
        left = (env.states[row][:, PLAYERS + shape[1] :] == (ITEM + kind)[:, None]).any(1)
        kinds = np.einsum("bnk,bkc->bnc", mind.beliefs, mind.kinds_of_goals())[row, player, kind]
        predicted = mind.predict()[row, player]
        for b, i, place in zip(row, player, range(len(steps["n"]), len(steps["n"]) + len(row)), strict=True):
            hunts[b * shape[1] + i].append((place, mind.beliefs[b, i].copy()))
        steps["n"] += env.t[row].tolist()
        steps["kind"] += np.where(left, kinds, np.nan).tolist()
        steps["item"] += [np.nan] * len(row)
        steps["top1"] += (predicted[each, did] >= predicted.max(1)).tolist()
        steps["ceiling"] += np.einsum("rm,rma->ma", posterior, chances).max(1).tolist()
        likelihood = chances[:, each, did] * posterior + 1e-12
        exact[row, player] = (likelihood / likelihood.sum(0)).T
        cells, places = mind.cell.copy(), env.states[:, PLAYERS : PLAYERS + shape[1]].copy()
        info = env.step(actions)[-1]
        mind.watch(actions, env.alive, info["done"])
        for b, i in np.argwhere(info["done"][:, None] | (info["taken"] > 0)):
            for place, beliefs in hunts[b * shape[1] + i]:
                if info["taken"][b, i] and mind.args.goal_mode == "learned":
                    steps["item"][place] = float(beliefs[cells[b] == places[b, i]].sum())
            hunts[b * shape[1] + i] = []
        exact[info["done"]] = 1 / len(roles)
    table = {name: np.array(values, float) for name, values in steps.items()}
    rows = []
    for low, high in ((0, 1), (1, 2), (2, 3), (4, 5), (8, 9), (0, 1 << 30)):
        some = (table["n"] >= low) & (table["n"] < high)
        if some.any():
            mean = {name: float(np.nanmean(values[some])) for name, values in table.items()}
            row = {"actions seen": "all" if high > 9 else str(low), "steps": int(some.sum())}
            row |= {"belief in true kind": mean["kind"], "in the item taken": mean["item"], "top-1": mean["top1"]}
            rows.append(row | {"ceiling": mean["ceiling"], "share": mean["top1"] / mean["ceiling"]})
    sure = table["kind"][np.isfinite(table["kind"])]
    top = np.maximum(sure, 1 - sure)
    print("calibration: how often the likelier of 'the true kind' and 'anything else' was the true kind")
    for low in (0.5, 0.6, 0.7, 0.8, 0.9):
        inside = (top >= low) & (top < low + 0.1 + 1e-9)
        if inside.any():
            print(f"  believed {top[inside].mean():.3f}: true {(sure[inside] > 0.5).mean():.3f} of {inside.sum()}")
    return rows


def plot_adaptation(path: str, rows: list[dict]) -> None:
    """A panel per line-up: return of seat 1 over the episodes of a run."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["among"] for row in rows))
    figure = Figure(figsize=(3.4 * min(3, len(names)), 2.7 * -(-len(names) // 3)), layout="constrained")
    styles = {"adapts": ("C3", "-", 2.0), "raw policy": ("C1", "-", 1.0), "does not adapt": ("C0", "-", 1.0)}
    for k, name in enumerate(names):
        axes = figure.add_subplot(-(-len(names) // 3), min(3, len(names)), k + 1)
        for row in (row for row in rows if row["among"] == name):
            if row["player 1"] == "best response":
                axes.axhline(np.mean(row["returns"]), color="#555555", ls="--", lw=1, label="best response (PPO)")
            else:
                colour, style, width = styles[row["player 1"]]
                axes.plot(range(1, 31), row["returns"], style, color=colour, lw=width, label=row["player 1"])
        axes.set(title=f"among {name}", xlabel="episode")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("return")
    figure.axes[0].legend(fontsize=7, loc="lower right")
    figure.savefig(path, dpi=120)


# battles


def make_battle_team(role: str, env, seed: int, greedy: bool):
    """What plays a whole team: `act(env)` gives its orders, and `watch`, if it has a memory, is told what happened."""
    from envs.battles import TEAMS, make_team

    if "," in role or not role:
        raise envs.ConfigError(f"a battle has one role, one team for all units; '{role}' is not one team")
    if role not in TEAMS:
        if not Path(role).exists():
            raise envs.ConfigError(f"unknown team '{role}'; valid are {', '.join(TEAMS)}, or the path of a run folder")
        return load_team(role, env, seed, greedy)
    team = make_team(role, env, seed)
    return SimpleNamespace(act=lambda env: team(), watch=lambda env, actions, info: None)


def evaluate_battle(args: Args, settings: dict) -> list[dict]:
    """One row: how often the team wins, and what it earns."""
    env = envs.make(args.env_id, num_envs=args.episodes, seed=args.seed, **settings)
    team = make_battle_team(args.roles, env, args.seed, args.greedy)
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


def film_battle(args: Args, settings: dict) -> None:
    """One battle as a GIF; --fps counts steps (2 is the game's own speed), each shown in four pictures."""
    from envs.battles import BattleEnv
    from envs.battles.render import camera, draw
    from envs.render import write_gif

    battle = envs.parallel_env(args.env_id, **settings)
    battle.reset(seed=args.seed)
    team, shown = make_battle_team(args.roles, battle.env, args.seed, args.greedy), battle.moments(2)
    while battle.agents:
        actions = team.act(battle.env)
        battle.step(dict(zip(battle.possible_agents, actions[0].tolist(), strict=True)))
        team.watch(battle.env, actions, battle.env.info)
        shown += battle.moments(2)
    if isinstance(battle.env, BattleEnv):  # the package draws its own pictures
        view = camera(battle.env, shown)
        shown = [draw(battle.env, moment, view) for moment in shown]
    write_gif(args.gif, shown, 4 * args.fps, [len(shown) - 1])


def print_table(rows: list[dict]) -> None:
    names = list(rows[0])
    cells = [[f"{row[name]:.3f}" if isinstance(row[name], float) else str(row[name]) for name in names] for row in rows]
    widths = [max(len(name), *(len(line[k]) for line in cells)) for k, name in enumerate(names)]
    for line in [names, ["-" * width for width in widths], *cells]:
        left = [cell.ljust(width) for cell, width in zip(line[:2], widths[:2], strict=True)]
        print("  ".join(left + [cell.rjust(width) for cell, width in zip(line[2:], widths[2:], strict=True)]))


def write_atomically(path: str, text: str) -> None:
    draft = Path(path + ".tmp")
    draft.write_text(text)
    os.replace(draft, path)


def main(args: Args) -> None:
    for name in ("json", "csv", "gif", "plot"):
        folder = Path(getattr(args, name) or ".").parent
        if not folder.is_dir():
            raise envs.ConfigError(f"--{name} {getattr(args, name)}: there is no folder '{folder}'")
    if args.episodes < 1:
        raise envs.ConfigError(f"--episodes must be at least 1, not {args.episodes}")
    if args.seed < 0:
        raise envs.ConfigError(f"--seed must be at least 0, not {args.seed}")
    settings = parse_settings(args.set)
    if args.adaptation:
        if args.runs < 1:
            raise envs.ConfigError(f"--runs must be at least 1, not {args.runs}")
        print(f"{args.env_id}, {args.runs} runs of 30 episodes, seat 1 plays {args.adaptation} (--adapt {args.adapt})")
        rows = adaptation(args, settings)
        if args.plot:
            plot_adaptation(args.plot, rows)
        write_rows(args, settings, rows)
        return
    if args.beliefs:
        rows = watch_beliefs(args, settings)
        print_table(rows)
        write_rows(args, settings, rows)
        return
    is_battle = args.env_id.startswith(("smac-", "smaclite-"))
    rows = evaluate_battle(args, settings) if is_battle else evaluate(args, settings)
    how = "greedy" if args.greedy else "sampled"
    print(f"{args.env_id}, {args.episodes} episodes{' of each seating' if args.rotate_seats else ''}, {how} play")
    print_table(rows)
    write_rows(args, settings, rows)
    if args.gif:
        film_battle(args, settings) if is_battle else film(args, settings)
        print(f"GIF: {args.gif}")


def write_rows(args: Args, settings: dict, rows: list[dict]) -> None:
    if args.json:
        content = {"env_id": args.env_id, "settings": settings, "seed": args.seed, "greedy": args.greedy, "rows": rows}
        write_atomically(args.json, json.dumps(content, indent=2) + "\n")
    if args.csv:
        with open(args.csv + ".tmp", "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        os.replace(args.csv + ".tmp", args.csv)


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except envs.ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
