"""What uniformly random legal play earns and how long it lasts, to compare our battles with the SMAClite package.

    python benchmarks/battle_random.py --env-id smac-10m_vs_11m --episodes 400
    python benchmarks/battle_random.py --env-id smaclite-10m_vs_11m --episodes 400 --num-envs 1     # minutes

Every row plays the same number of episodes, so that short ones are not counted more often. Means with 95 % intervals.
"""

from __future__ import annotations

import csv
import os
import sys
from dataclasses import dataclass
from pathlib import Path

for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(name, "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np  # noqa: E402
import tyro  # noqa: E402

import envs  # noqa: E402


@dataclass
class Args:
    env_id: str = "smac-10m_vs_11m"
    """smac-<map> is our simulator, smaclite-<map> the package"""
    episodes: int = 400
    """a multiple of --num-envs"""
    num_envs: int = 100
    """battles played side by side"""
    seed: int = 1
    """seed of the battles and of the actions"""
    csv: str | None = None
    """file for one line per episode, written as they end"""


def play(env_id: str, episodes: int, num_envs: int, seed: int, csv_file: str | None = None) -> np.ndarray:
    """(episodes, [return, length, won]) of uniformly random legal play."""
    env = envs.make(env_id, num_envs=num_envs, seed=seed)
    rng = np.random.default_rng(seed)
    left, rows = np.full(num_envs, episodes // num_envs), []
    with open(csv_file or os.devnull, "w", newline="", buffering=1) as file:
        writer = csv.writer(file)
        writer.writerow(["return", "length", "won"])
        while left.any():
            ranks = np.where(env.legal, rng.random(env.legal.shape), -1.0)  # the highest of the legal ones: uniform
            info = env.step(ranks.argmax(axis=2))[4]
            for b in np.flatnonzero(info["done"] & (left > 0)):
                row = info["episode_return"][b, 0], info["episode_length"][b], info["battle_won"][b]
                rows.append([float(x) for x in row])
                writer.writerow([f"{row[0]:.6f}", int(row[1]), int(row[2])])
                left[b] -= 1
    env.close()
    return np.array(rows)


def main(args: Args) -> None:
    if args.num_envs < 1 or args.episodes < 1 or args.episodes % args.num_envs:
        raise envs.ConfigError(f"--episodes must be a multiple of --num-envs, not {args.episodes} of {args.num_envs}")
    played = play(args.env_id, args.episodes, args.num_envs, args.seed, args.csv)
    mean, deviation = played.mean(axis=0), played.std(axis=0, ddof=1)
    half = 1.96 * deviation / len(played) ** 0.5
    print(
        f"{args.env_id}, {len(played)} episodes: return {mean[0]:.3f} +- {half[0]:.3f} (sd {deviation[0]:.2f}),"
        f" length {mean[1]:.1f} +- {half[1]:.1f} (sd {deviation[1]:.1f}), won {mean[2]:.3f}"
    )


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except envs.ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
