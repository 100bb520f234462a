"""How many env steps per second the grid games make, all against all in one run.

    python benchmarks/env_speed.py --json speed.json          # half a minute on an idle core

One env step advances one game by one joint action of all players, with all observations, masks, and the automatic
reset. The actions are uniform over the legal ones, drawn by the `random` rule-based players outside the clock, except
in the table of rule-based play. The clock is the CPU time of this process, which on an idle core is the wall time and
on a busy one leaves out waiting for it (`--clock wall` for the other). All candidates take turns for several rounds and
the best round counts, because other work on the machine can only slow a round down; medians are in the JSON file too.
"""

from __future__ import annotations

import os

THREADS_OF_LIBRARIES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
for variable in THREADS_OF_LIBRARIES:
    os.environ.setdefault(variable, "1")

import json  # noqa: E402
import platform  # noqa: E402
import random  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402
from statistics import median  # noqa: E402
from time import perf_counter, process_time  # noqa: E402
from typing import Literal  # noqa: E402

import numba  # noqa: E402
import numpy as np  # noqa: E402
import tyro  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

import reference  # noqa: E402
from numpy_stag_hunt import NumpyStagHunt  # noqa: E402

import envs  # noqa: E402
from envs.players import RulePlayers  # noqa: E402

GAMES = ("msh-4h1s-4x4", "msh-4h1s-8x8", "msd-4x4")
SEEKERS = {"msh-4h1s-4x4": "ns", "msh-4h1s-8x8": "ns", "msd-4x4": "nd"}
BATCHES = (1, 64, 256, 1024, 4096)
PLAY_BATCHES = (256, 1024)
ROUND_SECONDS = 0.02  # of one candidate in one round
LEAST_STEPS = 32  # in one round: two Snowdrift episodes, whose resets come at the same time in all envs

clock = process_time

STARTUP = """
from time import perf_counter
begin = perf_counter()
import envs
imported = perf_counter()
env = envs.make("{env_id}", num_envs=256, seed=1)
env.step(env.legal.argmax(2))
print(imported - begin, perf_counter() - imported)
"""


@dataclass
class Args:
    json: str | None = None
    """file for all figures"""
    rounds: int = 5
    """rounds in which all candidates take turns"""
    threads: int = 1
    """threads of the batched core"""
    clock: Literal["cpu", "wall"] = "cpu"
    """CPU time of this process, or wall time; with several threads only wall time says something"""


@dataclass
class Candidate:
    """Something that makes env steps; `advance(k)` makes k batches of them and returns its seconds on the clock."""

    what: str
    env_id: str
    batch: int
    advance: Callable[[int], tuple[float, ...]]  # (seconds of steps,) or (seconds of steps, seconds of players)
    steps: int = LEAST_STEPS  # of the batch in one round

    def calibrate(self) -> None:
        """Find how many steps make a round; also compiles everything."""
        self.advance(2)
        while sum(self.advance(self.steps)) < ROUND_SECONDS / 2:
            self.steps *= 2

    def measure(self) -> tuple[float, ...]:
        """Env steps per second by each clock, and by all together."""
        seconds = self.advance(self.steps)
        return tuple(self.steps * self.batch / s for s in (*seconds, sum(seconds)))


# ---------------------------------------------------------------------------------------------------------------------
# candidates
# ---------------------------------------------------------------------------------------------------------------------


def core(env_id: str, batch: int, threads: int, role: str = "random") -> Callable[[int], tuple[float, float]]:
    """The batched env; the second clock is the players'."""
    env = envs.make(env_id, num_envs=batch, seed=1, threads=threads)
    players = RulePlayers(env.game, [role] * env.game.num_players, batch, 1)
    actions = np.zeros((batch, env.game.num_players), np.int64)

    def advance(count: int) -> tuple[float, float]:
        stepping = acting = 0.0
        for _ in range(count):
            begin = clock()
            players.act(env.obs, env.legal, env.t, actions)
            middle = clock()
            env.step(actions)
            acting += middle - begin
            stepping += clock() - middle
        return stepping, acting

    return advance


def steps_only(advance: Callable[[int], tuple[float, ...]]) -> Callable[[int], tuple[float]]:
    return lambda count: advance(count)[:1]


def simulate(env_id: str, batch: int) -> Callable[[int], tuple[float]]:
    """One step from given states into given arrays: what a planner does; no observations, no reset."""
    game = envs.game(env_id)
    states, out = game.draw(1, batch), game.transition(batch)
    players = RulePlayers(game, ["random"] * game.num_players, batch, 1)
    t = np.zeros(batch, np.int32)
    for _ in range(5):  # some way into the episode
        players_see, legal = game.observe(states), game.legal(states)
        states = game.simulate(states, players.act(players_see, legal, t)).states
    actions = players.act(game.observe(states), game.legal(states), t)

    def advance(count: int) -> tuple[float]:
        begin = clock()
        for _ in range(count):
            game.simulate(states, actions, out)
        return (clock() - begin,)

    return advance


def numpy_version(env_id: str, batch: int) -> Callable[[int], tuple[float]]:
    game = envs.game(env_id)
    env = NumpyStagHunt(batch, seed=1, height=game.config.height, width=game.config.width)
    env.reset()
    players = RulePlayers(game, ["random"] * game.num_players, batch, 1)
    nothing = np.zeros((batch, game.num_players, *game.obs_shape), np.uint8)  # `random` needs the mask alone
    actions = np.zeros((batch, game.num_players), np.int64)

    def advance(count: int) -> tuple[float]:
        stepping = 0.0
        for _ in range(count):
            players.act(nothing, env.legal, env.t, actions)
            begin = clock()
            env.step(actions)
            stepping += clock() - begin
        return (stepping,)

    return advance


def pettingzoo_face(env_id: str) -> Callable[[int], tuple[float]]:
    env = envs.parallel_env(env_id)
    observations, _ = env.reset(seed=1)
    rng = random.Random(1)

    def advance(count: int) -> tuple[float]:
        nonlocal observations
        stepping = 0.0
        for _ in range(count):
            actions = {agent: rng.choice(observations[agent]["action_mask"].nonzero()[0]) for agent in env.agents}
            begin = clock()
            observations, *_ = env.step(actions)
            if not env.agents:
                observations, _ = env.reset()
            stepping += clock() - begin
        return (stepping,)

    return advance


def plain_python(env_id: str) -> Callable[[int], tuple[float]]:
    """The slow reference of the tests."""
    config = envs.game(env_id).config
    sizes = {"height": config.height, "width": config.width, "horizon": config.horizon}
    rules = reference.StagHunt(**sizes) if env_id.startswith("msh") else reference.Snowdrift(**sizes)
    rng = random.Random(1)
    state = reference.random_state(rules, rng)
    episode = reference.Episode(rules, state)
    masks = [rules.legal(state, player) for player in range(rules.num_players)]

    def advance(count: int) -> tuple[float]:
        nonlocal episode, masks
        stepping = 0.0
        for _ in range(count):
            actions = [rng.choice(sorted(mask)) for mask in masks]
            begin = clock()
            _, _, masks = episode.step(actions)
            if rules.over(episode.state):
                episode = reference.Episode(rules, reference.random_state(rules, rng))
                masks = [rules.legal(episode.state, player) for player in range(rules.num_players)]
            stepping += clock() - begin
        return (stepping,)

    return advance


def startup(env_id: str, times: int = 3) -> dict[str, float]:
    """Seconds of the import and of the first env and step in new processes, with compiled code in the cache."""
    command = [sys.executable, "-c", STARTUP.format(env_id=env_id)]
    seconds = []
    for _ in range(1 + times):  # the first may have to compile
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        seconds.append([float(x) for x in done.stdout.split()])
    best_import, best_first = min(seconds[1:], key=sum)
    return {"import": best_import, "first_env_and_step": best_first, "total": best_import + best_first}


# ---------------------------------------------------------------------------------------------------------------------
# tables
# ---------------------------------------------------------------------------------------------------------------------


def thousands(rate: float | None) -> str:
    return "-" if rate is None else f"{rate / 1e3:,.0f}" if rate >= 1e4 else f"{rate / 1e3:,.1f}"


def table(header: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[k]) for row in [header, *rows]) for k in range(len(header))]
    lines = []
    for first, *others in [header, ["-" * width for width in widths], *rows]:
        right = [text.rjust(width) for text, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *right]))
    return "\n".join(lines)


def machine(threads: int) -> dict[str, object]:
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return {
        "cpu": model, "cores": os.cpu_count(), "load_at_start": load, "threads_of_the_core": threads,
        "threads_of_libraries": {name: os.environ[name] for name in THREADS_OF_LIBRARIES},
        "python": platform.python_version(), "numpy": np.__version__, "numba": numba.__version__,
    }  # fmt: skip


def main(args: Args) -> None:
    if args.rounds < 1 or args.threads < 1:
        raise envs.ConfigError(f"--rounds and --threads must be at least 1, not {args.rounds} and {args.threads}")
    global clock
    clock = process_time if args.clock == "cpu" else perf_counter
    begin = perf_counter()
    about = machine(args.threads)
    print(f"{about['cpu']}, {about['cores']} cores, load {about['load_at_start']:.1f} at the start, {args.clock} time;"
          f" threads of the core: {args.threads}, of other libraries: {os.environ['OMP_NUM_THREADS']};"
          f" Python {about['python']}, numpy {about['numpy']}, numba {about['numba']}")  # fmt: skip

    candidates = []
    for env_id in GAMES:
        for batch in BATCHES:
            stepping = steps_only(core(env_id, batch, args.threads))
            candidates.append(Candidate("core", env_id, batch, stepping))
            if env_id.startswith("msh"):
                candidates.append(Candidate("numpy", env_id, batch, numpy_version(env_id, batch)))
            candidates.append(Candidate("simulate", env_id, batch, simulate(env_id, batch)))
        for batch in PLAY_BATCHES:
            for role in ("random", SEEKERS[env_id]):
                candidates.append(Candidate(f"play {role}", env_id, batch, core(env_id, batch, args.threads, role)))
        candidates.append(Candidate("pettingzoo", env_id, 1, pettingzoo_face(env_id)))
        candidates.append(Candidate("reference", env_id, 1, plain_python(env_id)))
    for candidate in candidates:
        candidate.calibrate()
    rounds = [[candidate.measure() for candidate in candidates] for _ in range(args.rounds)]

    # best[what, env_id, batch]: env steps/s by each clock and by all together
    results, best = [], {}
    for k, candidate in enumerate(candidates):
        rates = np.array([one_round[k] for one_round in rounds])  # (rounds, clocks + 1)
        best[candidate.what, candidate.env_id, candidate.batch] = rates.max(axis=0)
        results.append(
            {"what": candidate.what, "env_id": candidate.env_id, "batch": candidate.batch,
             "best_env_steps_per_second": rates[:, -1].max(), "median_env_steps_per_second": median(rates[:, -1])}
        )  # fmt: skip

    def rate(what: str, env_id: str, batch: int) -> float | None:
        found = best.get((what, env_id, batch))
        return None if found is None else float(found[-1])

    print("\n1000 env steps/s; core: all observations, masks, automatic reset; simulate: given states to given arrays")
    rows, ratios = [], []
    for env_id in GAMES:
        for batch in BATCHES:
            ours, numpys = rate("core", env_id, batch), rate("numpy", env_id, batch)
            zoo, slow = rate("pettingzoo", env_id, batch), rate("reference", env_id, batch)
            times_numpy = None if numpys is None else ours / numpys
            ratios.append({"env_id": env_id, "batch": batch, "core_over_numpy": times_numpy})
            rows.append(
                [env_id, str(batch), thousands(ours), thousands(rate("simulate", env_id, batch)), thousands(numpys),
                 "-" if times_numpy is None else f"{times_numpy:.1f}", thousands(zoo), thousands(slow)]
            )  # fmt: skip
    print(table(["game", "batch", "core", "simulate", "numpy", "core/numpy", "PettingZoo", "plain Python"], rows))

    print("\nrule-based play, 1000 env steps/s: env.step alone, and with the players choosing all actions")
    rows, plays = [], []
    for env_id in GAMES:
        for batch in PLAY_BATCHES:
            for role in ("random", SEEKERS[env_id]):
                alone, _, together = best[f"play {role}", env_id, batch]
                part = float(together / alone)
                plays.append({"env_id": env_id, "batch": batch, "role": role, "step_alone": float(alone),
                              "with_players": float(together), "ratio": part})  # fmt: skip
                rows.append([env_id, str(batch), role, thousands(alone), thousands(together), f"{part:.2f}"])
    print(table(["game", "batch", "role", "step alone", "with players", "ratio"], rows))

    print("\nstart-up in a new process with a warm cache, seconds")
    starts = {env_id: startup(env_id) for env_id in GAMES[::2]}
    rows = [[env_id, *(f"{seconds[part]:.2f}" for part in seconds)] for env_id, seconds in starts.items()]
    print(table(["game", "import envs", "first env and step", "total"], rows))
    print(f"\n{perf_counter() - begin:.0f} seconds, best of {args.rounds} rounds")

    if args.json is not None:
        report = {"machine": about, "clock": args.clock, "rounds": args.rounds, "speed": results,
                  "core_over_numpy": ratios, "rule_based_play": plays, "startup_seconds": starts}  # fmt: skip
        unfinished = Path(f"{args.json}.part")
        unfinished.write_text(json.dumps(report, indent=1) + "\n")
        unfinished.replace(args.json)


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except (envs.ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
