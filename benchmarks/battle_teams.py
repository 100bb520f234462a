"""What rule-based teams and an open-loop control win on each map: the baselines that learners must beat.

    python benchmarks/battle_teams.py --json teams.json --markdown teams.md

The open-loop control sees nothing but the time step. From the fixed start a sequence of joint actions is searched by
hill climbing: every round tries many changed copies of the best sequence, each in several battles, and keeps the best.
It begins with the actions of the best rule-based battle; actions that happen to be illegal are carried out as stop. Its
win rate is measured afterwards with other seeds. With jittered starts the same sequences are played again: a policy
that does not look should lose what it had.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(name, "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np  # noqa: E402
import tyro  # noqa: E402

import envs  # noqa: E402
from envs import battles  # noqa: E402
from envs.battles.teams import TEAMS, make_team  # noqa: E402


@dataclass
class Args:
    maps: tuple[str, ...] = tuple(env_id.removeprefix("smac-") for env_id in battles.ids())
    """maps to play"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """seeds; win rates are over all of their episodes"""
    episodes: int = 100
    """episodes per map, team and seed"""
    search_steps: int = 500_000
    """env steps that the open-loop search may take per map and seed"""
    jitter: float = 1.0
    """start_jitter of the second open-loop column"""
    json: str | None = None
    """file to write the figures to"""
    markdown: str | None = None
    """file to write the table to"""


def play_team(env_id: str, team: str, episodes: int, seed: int, **overrides) -> tuple[np.ndarray, np.ndarray]:
    """Wins and returns of one episode in each of `episodes` battles, all begun together."""
    env = envs.make(env_id, num_envs=episodes, seed=seed, **overrides)
    policy = make_team(team, env, seed)
    return first_episodes(env, lambda t: policy())


def first_episodes(env, policy) -> tuple[np.ndarray, np.ndarray]:
    """Wins and returns of every battle's first episode; the env counts the steps that took in `steps_taken`."""
    wins, returns, running = np.zeros(env.num_envs, bool), np.zeros(env.num_envs), np.ones(env.num_envs, bool)
    t = 0
    while running.any():
        info = env.step(policy(t))[4]
        ended = running & info["done"]
        wins[ended], returns[ended] = info["battle_won"][ended], info["episode_return"][ended, 0]
        running &= ~ended
        t += 1
    env.steps_taken = t * env.num_envs
    return wins, returns


def play_sequences(env, sequences: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """sequences (B, T, N): each row's battle plays its own, action by action."""
    env.reset(seed=seed)
    return first_episodes(env, lambda t: sequences[:, min(t, sequences.shape[1] - 1)])


def record_team(env_id: str, team: str, seed: int) -> tuple[float, np.ndarray]:
    """Mean return of a team and the actions (T, N) of its best of 16 battles."""
    env = envs.make(env_id, num_envs=16, seed=seed)
    policy, actions = make_team(team, env, seed), []

    def act(t: int) -> np.ndarray:
        actions.append(policy().copy())
        return actions[-1]

    _, returns = first_episodes(env, act)
    best = int(returns.argmax())
    sequence = np.ones((env.spec.horizon, env.spec.num_players), np.int64)
    sequence[: len(actions)] = np.stack(actions)[:, best]
    return float(returns.mean()), sequence


def change(sequence: np.ndarray, span: int, num_actions: int, rng: np.random.Generator) -> None:
    """Give one to four stretches of a sequence (T, N), within the first `span` steps, another action."""
    for _ in range(rng.integers(1, 5)):
        start, agent = rng.integers(span), rng.integers(sequence.shape[1])
        agents = slice(None) if rng.random() < 0.2 else agent  # at times for the whole team
        sequence[start : start + rng.integers(1, 9), agents] = rng.integers(1, num_actions)


def search_open_loop(env_id: str, seed: int, budget: int) -> tuple[np.ndarray, int]:
    """Hill climbing from the best rule-based battle; returns the sequence (T, N) and the env steps used."""
    candidates, repeats = 32, 8
    env = envs.make(env_id, num_envs=candidates * repeats, seed=seed)
    rng = np.random.default_rng(seed)
    best = max((record_team(env_id, team, seed) for team in TEAMS), key=lambda pair: pair[0])[1]
    used, span, sure = 0, env.spec.horizon, 0
    while used < budget and sure < 5:
        tried = np.repeat(best[None], candidates, axis=0)  # the first stays as it is
        for candidate in tried[1:]:
            change(candidate, span, env.spec.num_actions, rng)
        wins, returns = play_sequences(env, np.repeat(tried, repeats, axis=0), int(rng.integers(2**31)))
        used, span = used + env.steps_taken, min(env.steps_taken // env.num_envs + 2, env.spec.horizon)
        score = (returns + 20.0 * wins).reshape(candidates, repeats).mean(axis=1)
        won_all = wins[:repeats].all()
        sure = sure + 1 if won_all else 0  # rounds in a row in which the sequence they began with won every battle
        if not won_all:
            best = tried[score.argmax()]
    return best, used


def interval(wins: np.ndarray) -> tuple[float, float, float]:
    """Rate and its 95 % Wilson interval."""
    n, z = len(wins), 1.96
    rate = wins.mean()
    middle = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * np.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    return float(rate), float(max(middle - half, 0.0)), float(min(middle + half, 1.0))


def evaluate(args: Args, name: str) -> dict:
    env_id, row = f"smac-{name}", {"map": name}
    for team in TEAMS:
        played = [play_team(env_id, team, args.episodes, seed) for seed in args.seeds]
        row[team] = interval(np.concatenate([wins for wins, _ in played]))
        row[f"{team}_return"] = float(np.mean([returns.mean() for _, returns in played]))
    open_loop, jittered, used = [], [], 0
    for seed in args.seeds:
        sequence, steps = search_open_loop(env_id, seed, args.search_steps)
        used += steps
        moved = {} if battles.load(env_id).draws_places else {"start_jitter": args.jitter}  # those move anyway
        for overrides, results in (({}, open_loop), (moved, jittered)):
            env = envs.make(env_id, num_envs=args.episodes, **overrides)
            results.append(play_sequences(env, np.repeat(sequence[None], args.episodes, axis=0), 10_000 + seed)[0])
    row["open_loop"], row["open_loop_jittered"] = (
        interval(np.concatenate(open_loop)),
        interval(np.concatenate(jittered)),
    )
    row["search_steps"] = used
    return row


def table(rows: list[dict]) -> str:
    """Markdown: per cent of battles won, with 95 % intervals, and the env steps of all searches of a map."""
    columns = [*TEAMS, "open_loop", "open_loop_jittered"]
    head = ["map", *(column.replace("_", " ") for column in columns), "search steps"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        cells = [
            f"{100 * rate:.0f} ({100 * low:.0f}-{100 * high:.0f})" for rate, low, high in (row[c] for c in columns)
        ]
        lines.append("| " + " | ".join([row["map"], *cells, f"{row['search_steps']:,}"]) + " |")
    return "\n".join(lines)


def main(args: Args) -> None:
    rows = []
    for name in args.maps:
        start = time.perf_counter()
        rows.append(evaluate(args, name))
        print(f"{table(rows[-1:]).splitlines()[-1]}  {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        if args.json:
            Path(args.json).write_text(json.dumps(rows, indent=2))
    print(table(rows))
    if args.markdown:
        Path(args.markdown).write_text(table(rows) + "\n")


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except envs.ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
