"""How fast the battles are: env steps per second of random legal play, with observations, states and masks.

    python benchmarks/battle_speed.py                          # our simulator, one thread, next to the peers' figures
    python benchmarks/battle_speed.py --threads 1 2 --json speed.json

Where the SMAClite package is installed it is measured in the same run; else its column shows the figure measured on two
cores without a GPU, as does the column of SMAX (JaxMARL's simpler rules, compiled, 256 envs, both cores). Every figure
is the best of several repeats, which is what a busy machine disturbs least; "per processor second" counts only the time
in which this process ran, so that other people's work on the machine does not count (the ratios are made from it).
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path

for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(name, "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import tyro  # noqa: E402

import envs  # noqa: E402
from envs.battles.teams import make_team  # noqa: E402

# env steps per second on two cores, no GPU: the package one env at a time; SMAX with 256 envs on both cores
SMACLITE = {"3m": 88, "8m": 57, "2s3z": 66, "3s5z": 55, "MMM2": 28, "corridor": 15}
SMAX = {"3m": 71_000, "8m": 18_000, "2s3z": 27_000, "3s5z": 23_000}


@dataclass
class Args:
    maps: tuple[str, ...] = ("3m", "8m", "2s3z", "3s5z", "MMM2", "corridor", "2c_vs_64zg", "2s_vs_1sc", "bane_vs_bane")
    """maps to measure"""
    num_envs: int = 256
    """battles stepped together"""
    threads: tuple[int, ...] = (1,)
    """numbers of threads to measure"""
    seconds: float = 1.0
    """length of one repeat"""
    repeats: int = 5
    """repeats, of which the best counts"""
    measure_smaclite: bool = True
    """measure the SMAClite package too, if it is installed"""
    json: str | None = None
    """file to write the figures to"""


def measure(env_id: str, num_envs: int, threads: int, seconds: float, repeats: int) -> tuple[float, float]:
    """Best env steps per second of random legal play, and per second of processor time."""
    env = envs.make(env_id, num_envs=num_envs, seed=1, threads=threads)
    team = make_team("random", env, seed=1)
    for _ in range(10):  # compile, and leave the common start behind
        env.step(team())
    best, best_busy = 0.0, 0.0
    for _ in range(repeats):
        start, busy, steps = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - start < seconds:
            env.step(team())
            steps += num_envs
        best = max(best, steps / (time.perf_counter() - start))
        best_busy = max(best_busy, steps / (time.process_time() - busy))
    env.close()
    return best, best_busy


def main(args: Args) -> dict:
    installed = importlib.util.find_spec("smaclite") is not None and args.measure_smaclite
    rows = []
    for name in args.maps:
        row: dict = {"map": name, "ours": {}}
        for threads in args.threads:
            rate, busy = measure(f"smac-{name}", args.num_envs, threads, args.seconds, args.repeats)
            row["ours"][threads] = rate
            row.setdefault("ours_per_processor_second", busy)
        row["smaclite_measured_here"] = installed
        row["smaclite"] = SMACLITE.get(name)
        if installed:
            row["smaclite"] = measure(f"smaclite-{name}", 1, 1, max(args.seconds, 3.0), 2)[1]
        row["smax"] = SMAX.get(name)
        rows.append(row)
        print(f"{name}: {', '.join(f'{v:,.0f} ({k} threads)' for k, v in row['ours'].items())}", file=sys.stderr)
    figures = {
        "rows": rows,
        "num_envs": args.num_envs,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "command": f"python benchmarks/battle_speed.py {' '.join(sys.argv[1:])}".strip(),
    }
    print(table(figures, args.threads, installed))
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2))
    return figures


def table(figures: dict, threads: tuple[int, ...], installed: bool) -> str:
    """Markdown: a row per map."""
    source = "measured here" if installed else "known figure"
    head = [
        "map",
        *(f"{k} thread{'s' * (k > 1)}" for k in threads),
        "per processor second",
        f"SMAClite ({source})",
        "times SMAClite",
        "SMAX",
        "times SMAX",
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in figures["rows"]:
        first = row["ours_per_processor_second"]
        cells = [row["map"], *(f"{row['ours'][k]:,.0f}" for k in threads), f"{first:,.0f}"]
        for peer in (row["smaclite"], row["smax"]):
            cells += [f"{peer:,.0f}", f"{first / peer:,.1f}"] if peer else ["-", "-"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except envs.ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
