"""How many simulations per second the tree search of hopplus_mcts.py makes, next to a plain Python one in the same run.

    python benchmarks/mcts_speed.py --json speed.json           # about a minute on an idle core
    python benchmarks/mcts_speed.py --run runs/<a run of hopplus_mcts.py>      # with trained networks

The setting is the script's own: 64 games x 4 players, its default trees and simulations, an opponent model asked for
every other player at every node (one network row per player on the board: four per node while nobody left), with games
taken from all stages of play at which everybody is on the board. One simulation adds one node (or visits an end again)
in one tree. The plain search has one node object per state, children in a dict, the same PUCT, the same networks as
torch modules called per node, and the game's own step for one state. Rates count the CPU time of this process (on an
idle core the wall time) and the wall time; each is the best of several repeats, because other work on the machine can
only slow one down.
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
from safetensors.torch import load_file  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import envs  # noqa: E402
import hopplus_mcts as hop  # noqa: E402
from envs.grid import GONE, PLAYERS, STAY, T  # noqa: E402
from envs.players import RulePlayers  # noqa: E402
from envs.rng import make_streams  # noqa: E402
from envs.roles import find_checkpoint, read_spec  # noqa: E402

AIM = {"msh-4h1s-4x4": 130_000, "msh-4h1s-8x8": 80_000}
PARTS = ("select", "game step", "expand", "back up")


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


def make_setting(args: Args, env_id: str) -> tuple[hop.Mind, np.ndarray, np.ndarray, str]:
    """A mind that has looked at games of all stages, and who is to decide: games and players."""
    env = envs.make(env_id, num_envs=args.num_envs, seed=1)
    game, weights, settings, vae_sizes = env.game, None, hop.Args(env_id=env_id, goal_mode="oracle"), None
    learned = "random weights"
    if args.run:
        checkpoint = find_checkpoint(args.run)
        spec = json.loads((checkpoint / "spec.json").read_text())
        if spec["env_id"] == env_id:
            spec = read_spec(checkpoint, env)
            known = {field.name for field in hop.fields(hop.Args)}
            settings = hop.Args(**{name: value for name, value in spec["args"].items() if name in known})
            weights, vae_sizes = load_file(checkpoint / "weights.safetensors"), spec["vae_sizes"]
            learned = str(args.run)
    num_nets = 1 if settings.shared_policy or weights is None else len(spec["learners"])
    nets = hop.make_nets(settings, game, num_nets, vae_sizes, torch.Generator().manual_seed(1)).requires_grad_(False)
    if weights is not None:
        nets.load_state_dict(weights)
    elif args.sure:
        nets["agent"].policy_head *= 100.0
        nets["moa"].head *= 20.0
    # row k after k % 12 steps of rule-based play, or fewer: while everybody is on the board
    players = RulePlayers(game, ["mix"] * game.num_players, args.num_envs, 1)
    states, actions = env.states.copy(), np.zeros((args.num_envs, game.num_players), np.int64)
    for step in range(12):
        rows = (np.arange(args.num_envs) % 12 >= step) & env.alive.all(1) & (env.t == step)
        states[rows] = env.states[rows]
        env.step(players.act(env.obs, env.legal, env.t, actions))
    env.set_states(states)
    mind = hop.Mind(settings, game, nets, args.num_envs, list(range(game.num_players)), 1)
    mind.look(env)
    rows, focal = np.nonzero(env.alive)
    return mind, rows, focal, learned


def roots_of(mind: hop.Mind, rows: np.ndarray, focal: np.ndarray) -> hop.Roots:
    """The roots that `plan` would search, caught on the way."""
    caught = []

    class Caught(Exception):
        pass

    def catch(roots: hop.Roots, simulations: int):
        caught.append(roots)
        raise Caught

    run, mind.search.run = mind.search.run, catch
    try:
        mind.plan(mind.states, rows, focal, 4.0)
    except Caught:
        pass
    mind.search.run = run
    return caught[0]


# ---------------------------------------------------------------------------------------------------------------------
# the compiled search, whole and in parts
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


def shares(mind: hop.Mind, roots: hop.Roots, repeats: int) -> dict[str, float]:
    """Share of the CPU time of each part. `expand` is timed inside `grow` as what is left of it without backing up."""
    game, args, search = mind.game, mind.args, mind.search
    grid, perfect, spent = game.grid, args.opponents == "perfect", dict.fromkeys(PARTS, 0.0)
    block = hop.BLOCK_OF_TREES
    part = hop.Roots(*(np.ascontiguousarray(array[:block]) for array in roots))
    count, simulations = len(part.state), args.simulations
    trees, out = hop.Trees(*(x[:count] for x in search.trees)), type(search.out)(*(x[:count] for x in search.out))
    leaf, joint = np.zeros((count, 3), np.int64), np.zeros((count, game.num_players), np.int64)
    before = np.zeros((count, game.state_size), np.int16)
    gumbel = np.zeros((count, game.num_actions))
    back_up_all(trees, 0, simulations, args.gamma)  # compile
    for _ in range(max(20, 8 * repeats)):
        clock = process_time()
        hop.plant(grid, search.weights, trees, part, perfect, search.work)
        spent["expand"] += process_time() - clock
        for simulation in range(simulations):
            times = [process_time()]
            hop.select(grid, trees, part, args.c_puct, args.outcomes, gumbel, search.halving, simulation, leaf, before,
                       joint)  # fmt: skip
            times.append(process_time())
            game.step_rows(grid, game.rules, before, joint, *out)
            times.append(process_time())
            hop.grow(grid, search.weights, trees, part, perfect, args.gamma, leaf, simulation + 1, out, search.work)
            times.append(process_time())
            for name, seconds in zip(PARTS, np.diff(times), strict=False):
                spent[name] += seconds
        # backing up once more, all nodes of the trees at once, tells its share of `grow`
        clock = process_time()
        back_up_all(trees, count, simulations, args.gamma)
        spent["back up"] += process_time() - clock
    spent["expand"] -= spent["back up"]
    total = sum(spent.values())
    return {name: seconds / total for name, seconds in spent.items()}


@hop.njit(nogil=True)
def back_up_all(trees, count, simulations, gamma):
    for m in range(count):
        for node in range(1, simulations + 1):
            hop.back_up(trees, m, node, gamma)


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

    def __init__(self, mind: hop.Mind, seed: int = 1):
        self.game, self.nets, self.args, self.things = mind.game, mind.nets, mind.args, mind.things
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
            known = code < hop.HIDDEN or (board[cell] == code if cell >= 0 else (board == code).any())
            goals.append(root["goals"][k] if known else root["hidden"])
        goals = torch.from_numpy(np.stack(goals))
        may = torch.from_numpy(legal)
        net = root["net"]
        log_probs, value = self.nets["agent"](*(x.expand(self.nets["agent"].num_nets, *x.shape[1:]) for x in (
            ids[None, [focal]], t[None, [focal]], may[None, [focal]], goals.reshape(1, 1, -1))))  # fmt: skip
        prior = log_probs[net, 0].exp().numpy()
        node.prior = {int(a): float(prior[a]) for a in np.flatnonzero(legal[focal])}
        node.value = float(value[net, 0])
        node.visits, node.total = dict.fromkeys(node.prior, 0), dict.fromkeys(node.prior, 0.0)
        here = [k for k, player in enumerate(others) if state[0, PLAYERS + player] != GONE]
        if here:
            rows = [others[k] for k in here]
            probs = self.nets["moa"](ids[rows], t[rows], may[rows], goals[here]).exp().numpy()
            for k, player, row in zip(here, rows, probs, strict=True):
                aimless = root["code"][k] == hop.AIMLESS
                node.others[player] = np.cumsum(legal[player] / legal[player].sum() if aimless else row)

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


def plain_roots(mind: hop.Mind, roots: hop.Roots, num: int) -> list[dict]:
    """Some of the roots, spread over all, with goals as vectors."""
    picked, found = np.linspace(0, len(roots.state) - 1, num).astype(int), []
    rng = np.random.default_rng(0)
    for m in picked:
        goals = rng.normal(size=(mind.game.num_players - 1, mind.goal_size)).astype(np.float32)
        found.append({"state": roots.state[m], "focal": int(roots.focal[m]), "net": int(roots.net[m]),
                      "cell": roots.cell[m], "code": roots.code[m], "goals": goals,
                      "hidden": mind.hidden_goal})  # fmt: skip
    return found


# ---------------------------------------------------------------------------------------------------------------------


def rows_per_simulation(mind: hop.Mind, count: int) -> float:
    """Network rows per simulation in the last block of trees (`count` of them): for each new node that is no end, one
    for every player on the board (the own policy and value, and the opponent model of each other)."""
    trees, rows = mind.search.trees, 0
    for m in range(count):
        nodes = np.array([node for node in trees.child[m, : mind.args.simulations + 1].ravel() if node > 0])
        nodes = np.unique(nodes[~trees.ended[m, nodes]])
        rows += (trees.state[m, nodes, PLAYERS : PLAYERS + mind.game.num_players] != GONE).sum()
    return float(rows / count / mind.args.simulations)


def measure(args: Args, env_id: str) -> dict:
    mind, rows, focal, learned = make_setting(args, env_id)
    roots = roots_of(mind, rows, focal)
    simulations, settings = mind.args.simulations, mind.args
    count = len(roots.state) * simulations

    def compiled() -> None:
        mind.search.run(roots._replace(stream=make_streams(1, len(roots.state))), simulations)

    plain, some = PlainSearch(mind), plain_roots(mind, roots, 4)

    def plainly() -> None:
        for root in some:
            plain.search(root, simulations)

    def planned() -> None:
        mind.plan(mind.states, rows, focal, 4.0)

    cpu, wall = rates(count, compiled, args.seconds, args.repeats)
    plan_cpu, plan_wall = rates(count, planned, args.seconds, 2)
    plain_cpu, plain_wall = rates(len(some) * simulations, plainly, args.seconds, 2)
    depth = mind.search.run(roots._replace(stream=make_streams(1, len(roots.state))), simulations).depth.mean()
    network_rows = rows_per_simulation(mind, (len(roots.state) - 1) % hop.BLOCK_OF_TREES + 1)
    return {
        "env_id": env_id, "networks": learned, "hidden": settings.hidden, "trees": len(roots.state),
        "trees_per_decision": settings.trees, "simulations": simulations, "rows_per_simulation": network_rows,
        "network_rows_per_cpu_second": network_rows * cpu,
        "depth": float(depth), "simulations_per_cpu_second": cpu, "simulations_per_wall_second": wall,
        "whole_plan_per_cpu_second": plan_cpu, "whole_plan_per_wall_second": plan_wall,
        "plain_per_cpu_second": plain_cpu, "plain_per_wall_second": plain_wall, "times_plain": cpu / plain_cpu,
        "shares": shares(mind, roots, args.repeats),
    }  # fmt: skip


def table(rows: list[dict]) -> str:
    """Markdown: a row per game."""
    head = ["game", "trees x simulations", "sims/s (CPU)", "aim", "sims/s (wall)", "network rows per simulation"]
    head += ["network rows/s (CPU)", "plain Python (CPU)", "times plain", "whole `plan` (CPU)", *PARTS]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [row["env_id"], f"{row['trees']} x {row['simulations']}", f"{row['simulations_per_cpu_second']:,.0f}"]
        cells += [f"{AIM[row['env_id']]:,}" if row["env_id"] in AIM else "-"]
        cells += [f"{row['simulations_per_wall_second']:,.0f}", f"{row['rows_per_simulation']:.1f}"]
        cells += [f"{row['network_rows_per_cpu_second']:,.0f}", f"{row['plain_per_cpu_second']:,.0f}"]
        cells += [f"{row['times_plain']:,.0f}", f"{row['whole_plan_per_cpu_second']:,.0f}"]
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
