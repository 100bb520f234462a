"""How many simulations per second the tree search of hopplus_mcts.py makes, next to a plain Python one in the same run.

    python benchmarks/mcts_speed.py --json speed.json           # about a minute on an idle core
    python benchmarks/mcts_speed.py --num-envs 1                # a single game: 16 trees (see envs/few_rows.py)
    python benchmarks/mcts_speed.py --run runs/<a run of hopplus_mcts.py>      # with trained networks

The setting is the script's own: 64 games x 4 players, its default trees and simulations, an opponent model asked for
every other player at every node that the search goes on from, with games taken from all stages of play at which
everybody is on the board. One simulation adds one node (or visits an end again) in one tree. The plain search has one
node object per state, children in a dict, the same PUCT, the same networks as torch modules called per node, and the
game's own step for one state. Rates count the CPU time of this process (on an idle core the wall time) and the wall
time; each is the best of several repeats, because other work on the machine can only slow one down.
"""

from __future__ import annotations

import os

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import json  # noqa: E402
import platform  # noqa: E402
import sys  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402
from time import perf_counter, process_time  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
import tyro  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import envs  # noqa: E402
import hopplus_mcts as hop  # noqa: E402
import pretrain_vae  # noqa: E402
from envs.grid import GONE, PLAYERS, STAY, T  # noqa: E402
from envs.players import RulePlayers  # noqa: E402
from envs.roles import find_checkpoint, read_spec  # noqa: E402

AIM = {"msh-4h1s-4x4": 330_000, "msh-4h1s-8x8": 230_000}
PARTS = ("networks", "walk", "ask and draw", "grow", "answer", "rest")
# the search of version 0.1.0, whose networks were written a second time, compiled, in turns with this one on an idle
# machine: its simulations per CPU second over those of today's plain search (1024 trees; 16 trees: one game). What is
# compiled and what is Python differ in speed from machine to machine: on a slower one the first was 103
TWINS = {("msh-4h1s-4x4", 64): 59, ("msh-4h1s-8x8", 64): 50, ("msh-4h1s-4x4", 1): 41, ("msh-4h1s-8x8", 1): 34}


@dataclass
class Args:
    json: str | None = None
    """file for all figures"""
    env_ids: tuple[str, ...] = ("msh-4h1s-4x4", "msh-4h1s-8x8")
    """games to measure"""
    run: str = ""
    """run folder of hopplus_mcts.py whose networks to use where it fits (default: random weights)"""
    num_envs: int = 64
    """games side by side; every player on the board plans"""
    seconds: float = 2.0
    """length of one repeat"""
    repeats: int = 5
    """repeats, of which the best counts"""
    sure: bool = True
    """make random networks prefer some actions clearly, as trained ones do; else as they are at the start of a run"""


def make_setting(args: Args, env_id: str) -> tuple[hop.Planner, np.ndarray, np.ndarray, str]:
    """A planner that has looked at games of all stages, and who is to decide: games and players."""
    env = envs.make(env_id, num_envs=args.num_envs, seed=1)
    game, learned = env.game, "random weights"
    checkpoint = find_checkpoint(args.run) if args.run else None
    if checkpoint and json.loads((checkpoint / "spec.json").read_text())["env_id"] == env_id:
        spec = read_spec(checkpoint, env)
        planner = hop.load_policy(checkpoint, spec, env, 0, None, 1, False).planner
        learned = str(args.run)
    else:
        torch.manual_seed(1)
        settings = hop.Args(env_id=env_id, goal_mode="oracle")
        offline = pretrain_vae.Args(env_id=env_id, goal_mode="oracle")
        models = pretrain_vae.GoalModels(pretrain_vae.sizes_of(offline, env.spec, game, list(game.kinds)))
        nets = hop.make_nets(settings, game, models, seed=1)
        if args.sure:
            nets["agent"].policy_head.weight.data *= 100.0
            models.moa.head.weight.data *= 20.0
        planner = hop.Planner(settings, game, nets, hop.Beliefs(settings, game, models, args.num_envs, 1))
    # row k after k % 12 steps of rule-based play, or fewer: while everybody is on the board
    players = RulePlayers(game, ["mix"] * game.num_players, args.num_envs, 1)
    states, actions = env.states.copy(), np.zeros((args.num_envs, game.num_players), np.int64)
    for step in range(12):
        rows = (np.arange(args.num_envs) % 12 >= step) & env.alive.all(1) & (env.t == step)
        states[rows] = env.states[rows]
        env.step(players.act(env.obs, env.legal, env.t, actions))
    env.set_states(states)
    planner.beliefs.look(env)
    rows, focal = np.nonzero(env.alive)
    return planner, rows, focal, learned


def roots_of(planner: hop.Planner, rows: np.ndarray, focal: np.ndarray) -> hop.Roots:
    """The roots that `plan` would search, caught on the way."""
    caught = []

    class Caught(Exception):
        pass

    def catch(roots: hop.Roots):
        caught.append(roots)
        raise Caught

    search, planner.search = planner.search, catch
    try:
        planner.plan(planner.beliefs.states, rows, focal)
    except Caught:
        pass
    planner.search = search
    return caught[0]


# ---------------------------------------------------------------------------------------------------------------------
# the search itself, whole and in parts
# ---------------------------------------------------------------------------------------------------------------------


def rates(count: int, once, seconds: float, repeats: int) -> tuple[float, float]:
    """Best simulations per CPU second and per wall second; `once()` makes `count` of them."""
    once()
    best_cpu = best_wall = 0.0
    for _ in range(repeats):
        wall, cpu, made = perf_counter(), process_time(), 0
        while perf_counter() - wall < seconds or not made:
            once()
            made += count
        best_cpu = max(best_cpu, made / (process_time() - cpu))
        best_wall = max(best_wall, made / (perf_counter() - wall))
    return best_cpu, best_wall


def shares(once) -> dict[str, float]:
    """Share of the CPU time of each part of the search, by timing every call of it in one go of `once`."""
    spent = dict.fromkeys(PARTS, 0.0)

    def timed(name: str, work):
        def call(*arguments):
            clock = process_time()
            result = work(*arguments)
            spent[name] += process_time() - clock
            return result

        return call

    places = {"networks": (hop.Planner, "ask_own ask_others"), "walk": (hop, "walk back_up")}
    places |= {"ask and draw": (hop.forest, "ask_others draw_others"), "grow": (hop.forest, "grow")}
    places |= {"answer": (hop.forest, "answer")}
    before = [(name, where, what) for name, (where, several) in places.items() for what in several.split()]
    before = [(name, where, what, getattr(where, what)) for name, where, what in before]
    for name, where, what, work in before:
        setattr(where, what, timed(name, work))
    clock = process_time()
    once()
    total = process_time() - clock
    for _, where, what, work in before:
        setattr(where, what, work)
    spent["rest"] = total - sum(spent.values())
    return {name: seconds / total for name, seconds in spent.items()}


# ---------------------------------------------------------------------------------------------------------------------
# the plain search
# ---------------------------------------------------------------------------------------------------------------------


class Node:
    """One state of one tree."""

    __slots__ = ("children", "ended", "legal", "others", "prior", "reward", "state", "total", "value", "visits")

    def __init__(self, state: np.ndarray, reward: float, ended: bool):
        self.state, self.reward, self.ended = state, reward, ended
        self.visits: dict[int, int] = {}
        self.total: dict[int, float] = {}
        self.children: dict[tuple[int, int], Node] = {}
        self.prior: dict[int, float] = {}
        self.others: dict[int, np.ndarray] = {}
        self.value = 0.0


class PlainSearch:
    """One tree after the other, one node after the other; all players of a node in one torch batch per network."""

    def __init__(self, planner: hop.Planner, seed: int = 1):
        self.game, self.nets, self.args, self.things = planner.game, planner.nets, planner.args, planner.things
        self.rng = np.random.default_rng(seed)

    def expand(self, node: Node, root: dict) -> None:
        game, focal, state = self.game, root["focal"], node.state[None]
        obs, legal = game.observe(state)[0], game.legal(state)[0]
        ids = torch.from_numpy(self.things(obs))
        t = torch.from_numpy(self.things.time(state[:, T])).expand(game.num_players)
        others = [(focal + 1 + k) % game.num_players for k in range(game.num_players - 1)]
        board = state[0, PLAYERS + game.num_players :]
        goals = []
        for k in range(len(others)):
            cell, code = root["cell"][k], root["code"][k]
            known = code < hop.UNKNOWN or (board[cell] == code if cell >= 0 else (board == code).any())
            goals.append(root["goals"][k] if known else root["unknown"])
        goals = torch.stack(goals)
        may = torch.from_numpy(legal)
        log_probs, value = self.nets["agent"](ids[[focal]], t[[focal]], may[[focal]], goals[None])
        prior = log_probs[0].exp().numpy()
        node.prior = {int(a): float(prior[a]) for a in np.flatnonzero(legal[focal])}
        node.value = float(value[0])
        node.visits, node.total = dict.fromkeys(node.prior, 0), dict.fromkeys(node.prior, 0.0)
        here = [k for k, player in enumerate(others) if state[0, PLAYERS + player] != GONE]
        if here:
            rows = [others[k] for k in here]
            probs = self.nets["models"].moa(ids[rows], t[rows], may[rows], goals[here]).exp().numpy()
            for player, row in zip(rows, probs, strict=True):
                node.others[player] = np.cumsum(row)

    @torch.no_grad()
    def search(self, root_info: dict, simulations: int) -> Node:
        game, args, low, high = self.game, self.args, float("inf"), -float("inf")
        root, focal = Node(root_info["state"], 0.0, False), root_info["focal"]
        self.expand(root, root_info)
        for _ in range(simulations):
            node, path = root, []
            while not node.ended:
                scale = 1.0 / (high - low) if high > low else 0.0
                bonus, best, top = args.c_puct * (sum(node.visits.values()) + 1) ** 0.5, -1, -1e30
                for action, prior in node.prior.items():
                    visits = node.visits[action]
                    q = node.total[action] / visits if visits else node.value
                    score = min(max((q - low) * scale, 0.0), 1.0) if scale else 0.0
                    score += bonus * prior / (1 + visits)
                    if score > top:
                        best, top = action, score
                slot = best, node.visits[best] % args.outcomes if node.others else 0
                path.append((node, best))
                if slot in node.children:
                    node = node.children[slot]
                    continue
                joint = np.full((1, game.num_players), STAY)
                joint[0, focal] = best
                for player, cumulative in node.others.items():
                    drawn = np.searchsorted(cumulative, self.rng.random(), "right")
                    joint[0, player] = min(drawn, game.num_actions - 1)
                out = game.simulate(node.state[None], joint)
                ended = bool(out.terminated[0, focal] or out.truncated[0, focal])
                child = node.children[slot] = Node(out.states[0], float(out.reward[0, focal]), ended)
                if not ended:
                    self.expand(child, root_info)
                node = child
                break
            value = node.value
            for k in range(len(path) - 1, -1, -1):
                parent, action = path[k]
                value = (path[k + 1][0] if k + 1 < len(path) else node).reward + args.gamma * value
                parent.visits[action] += 1
                parent.total[action] += value
                q = parent.total[action] / parent.visits[action]
                low, high = min(low, q), max(high, q)
        return root


def plain_roots(planner: hop.Planner, roots: hop.Roots, num: int) -> list[dict]:
    """Some of the roots, spread over all."""
    found = []
    for m in np.linspace(0, len(roots.state) - 1, num).astype(int):
        found.append({"state": roots.state[m], "focal": int(roots.focal[m]), "cell": roots.cell[m],
                      "code": roots.code[m], "goals": torch.from_numpy(roots.goal[m]),
                      "unknown": planner.unknown_goal})  # fmt: skip
    return found


# ---------------------------------------------------------------------------------------------------------------------


def rows_per_simulation(planner: hop.Planner, once, count: int) -> float:
    """Network rows per simulation: the focal player of each new node, the others where the search goes on."""
    rows, names = 0, ("ask_own", "ask_others")

    def counted(ask):
        def call(num: int):
            nonlocal rows
            rows += num
            return ask(num)

        return call

    for name in names:
        setattr(planner, name, counted(getattr(planner, name)))
    once()
    for name in names:
        delattr(planner, name)
    return rows / count


def measure(args: Args, env_id: str) -> dict:
    planner, rows, focal, learned = make_setting(args, env_id)
    roots = roots_of(planner, rows, focal)
    simulations, settings = planner.args.simulations, planner.args
    count = len(roots.state) * simulations

    def batched() -> None:
        planner.search(roots)

    plain, some = PlainSearch(planner), plain_roots(planner, roots, 4)

    def plainly() -> None:
        for root in some:
            plain.search(root, simulations)

    def planned() -> None:
        planner.plan(planner.beliefs.states, rows, focal)

    cpu, wall = rates(count, batched, args.seconds, args.repeats)
    plan_cpu, plan_wall = rates(count, planned, args.seconds, 2)
    plain_cpu, plain_wall = rates(len(some) * simulations, plainly, args.seconds, 2)
    network_rows = rows_per_simulation(planner, batched, count)
    return {
        "env_id": env_id, "networks": learned, "hidden": settings.hidden_size, "trees": len(roots.state),
        "trees_per_decision": settings.trees, "simulations": simulations, "rows_per_simulation": network_rows,
        "network_rows_per_cpu_second": network_rows * cpu, "depth": float(planner.search(roots)[-1].mean()),
        "simulations_per_cpu_second": cpu, "simulations_per_wall_second": wall,
        "whole_plan_per_cpu_second": plan_cpu, "whole_plan_per_wall_second": plan_wall,
        "plain_per_cpu_second": plain_cpu, "plain_per_wall_second": plain_wall, "times_plain": cpu / plain_cpu,
        "twins_times_plain": TWINS.get((env_id, args.num_envs)), "shares": shares(batched),
    }  # fmt: skip


def table(rows: list[dict]) -> str:
    """Markdown: a row per game."""
    head = ["game", "trees x simulations", "sims/s (CPU)", "aim", "sims/s (wall)", "network rows per simulation"]
    head += ["network rows/s (CPU)", "plain Python (CPU)", "times plain", "compiled twins, times plain"]
    head += ["whole `plan` (CPU)", *PARTS]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [row["env_id"], f"{row['trees']} x {row['simulations']}", f"{row['simulations_per_cpu_second']:,.0f}"]
        cells += [f"{AIM[row['env_id']]:,}" if row["env_id"] in AIM else "-"]
        cells += [f"{row['simulations_per_wall_second']:,.0f}", f"{row['rows_per_simulation']:.1f}"]
        cells += [f"{row['network_rows_per_cpu_second']:,.0f}", f"{row['plain_per_cpu_second']:,.0f}"]
        cells += [f"{row['times_plain']:,.0f}", str(row["twins_times_plain"] or "-")]
        cells += [f"{row['whole_plan_per_cpu_second']:,.0f}"]
        cells += [f"{row['shares'][part]:.0%}" for part in PARTS]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(args: Args) -> None:
    for name in ("num_envs", "repeats"):
        if getattr(args, name) < 1:
            raise envs.ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    torch.set_num_threads(1)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    print(f"{os.cpu_count()} cores, load {load:.1f} at the start, one thread; Python {platform.python_version()},"
          f" torch {torch.__version__}")  # fmt: skip
    rows = [measure(args, env_id) for env_id in args.env_ids]
    print(table(rows))
    if args.json is not None:
        command = f"python benchmarks/mcts_speed.py {' '.join(sys.argv[1:])}".strip()
        report = {"command": command, "cores": os.cpu_count(), "load_at_start": load, "rows": rows}
        unfinished = Path(f"{args.json}.part")
        unfinished.write_text(json.dumps(report, indent=1) + "\n")
        unfinished.replace(args.json)


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except (envs.ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
