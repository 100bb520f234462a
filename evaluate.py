"""Play any mix of checkpoints and rule-based players on any grid game, and say how each seat fares.

    python evaluate.py --env-id msh-4h1s-4x4 --roles runs/<run>,ns,ns,random --episodes 4096 --seed 7
    python evaluate.py --roles runs/<run>,runs/<other>@2,nh,nh --greedy --rotate-seats --json scores.json
    python evaluate.py --roles runs/<run>,runs/<run>,runs/<run>,runs/<run> --gif hunt.gif

A role is a rule-based player, a run folder (its best checkpoint), or a checkpoint folder; `@2` picks the second learner
of a run. How any script's checkpoint becomes a player is one convention, told in envs/roles.py. Every episode is the
first one of an env of its own, from the true starts, so that long and short episodes count alike.
"""

import csv
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

import envs
from envs.roles import Episodes, Seats, parse_roles, play_episodes

CHUNK = 4096  # episodes played side by side


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
    for name in ("json", "csv", "gif"):
        folder = Path(getattr(args, name) or ".").parent
        if not folder.is_dir():
            raise envs.ConfigError(f"--{name} {getattr(args, name)}: there is no folder '{folder}'")
    if args.episodes < 1:
        raise envs.ConfigError(f"--episodes must be at least 1, not {args.episodes}")
    if args.seed < 0:
        raise envs.ConfigError(f"--seed must be at least 0, not {args.seed}")
    settings = parse_settings(args.set)
    rows = evaluate(args, settings)
    how = "greedy" if args.greedy else "sampled"
    print(f"{args.env_id}, {args.episodes} episodes{' of each seating' if args.rotate_seats else ''}, {how} play")
    print_table(rows)
    if args.json:
        content = {"env_id": args.env_id, "settings": settings, "seed": args.seed, "greedy": args.greedy, "rows": rows}
        write_atomically(args.json, json.dumps(content, indent=2) + "\n")
    if args.csv:
        with open(args.csv + ".tmp", "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        os.replace(args.csv + ".tmp", args.csv)
    if args.gif:
        film(args, settings)
        print(f"GIF: {args.gif}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except envs.ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
