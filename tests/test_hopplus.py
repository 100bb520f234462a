"""hopplus_mcts.py: search, networks, beliefs and targets against hand computations, and whole runs in subprocesses."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import tyro
from safetensors.torch import load_file

import envs
import hopplus_mcts as hop
import pretrain_vae
from envs.grid import BLOCK, DEADLINE, GONE, ITEM, LEFT, PLAYERS, RIGHT, STAY, T
from envs.rng import make_streams
from envs.roles import load_policy

ROOT = Path(__file__).resolve().parent.parent
ID = "msh-4h1s-4x4"
STAG, HARE = 5, 6
TINY = ["--num-envs", "8", "--num-steps", "8", "--total-timesteps", "640", "--dream-envs", "4", "--trees", "2",
        "--simulations", "4", "--eval-every", "320", "--eval-episodes", "8", "--final-eval-episodes", "8",
        "--hidden", "16", "--offline-steps", "600", "--offline-updates", "8", "--updates", "2", "--batch-rows", "64",
        "--log-every", "3", "--checkpoint-every", "4", "--seed", "5"]  # fmt: skip
CLOCKS = re.compile(r"wall_time|charts/SPS|planner/sims_per_second|time/.*")  # never the same twice
torch.set_num_threads(1)


def run(*args: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "hopplus_mcts.py"), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=cwd)


def read_metrics(run_dir: Path) -> list[dict[str, str]]:
    with (run_dir / "metrics.csv").open(newline="") as file:
        return [{name: x for name, x in row.items() if not CLOCKS.fullmatch(name)} for row in csv.DictReader(file)]


def make_nets(game, goal_mode: str = "oracle", num_nets: int = 1, hidden: int = 16, seed: int = 0):
    """Networks with random weights, their heads large enough to prefer some actions clearly."""
    args = hop.Args(goal_mode=goal_mode, hidden=hidden)
    vae_sizes = None
    if goal_mode == "learned":
        vae_sizes = {"obs_shape": list(game.obs_shape), "obs_is_state": False, "horizon": game.config.horizon,
                     "num_players": game.num_players, "num_actions": game.num_actions, "num_kinds": len(game.kinds),
                     "dim": 8, "hidden": 16, "num_cells": game.config.height * game.config.width}  # fmt: skip
        torch.manual_seed(seed)
    nets = hop.make_nets(args, game, num_nets, vae_sizes, torch.Generator().manual_seed(seed))
    nets["agent"].policy_head.data *= 100.0
    nets["moa"].head.data *= 20.0
    agent, moa = nets["agent"], nets["moa"]
    for weight in (agent.policy_bias, agent.value_bias, agent.critic_bias, moa.head_bias):
        weight.data += torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)) * 0.3
    return nets.requires_grad_(False)


def blank_nets(game, hidden: int = 4):
    """Networks of zeros, to be filled by hand: a uniform policy, value 0, opponents that move at random."""
    nets = make_nets(game, "none", hidden=hidden)
    for weight in nets.parameters():
        weight.data.zero_()
    return nets


def make_state(game, players, items: dict[int, int], t: int = 0) -> np.ndarray:
    """One state row; items: {cell: code of the board}."""
    state = np.zeros(game.state_size, np.int16)
    state[T], state[DEADLINE], state[PLAYERS : PLAYERS + game.num_players] = t, game.config.horizon, players
    for cell, code in items.items():
        state[PLAYERS + game.num_players + cell] = code
    return state


def make_roots(game, nets, states, focal, codes=None, goals=None, seed: int = 0, net=None) -> hop.Roots:
    """Roots with given goals (M, N-1, G) or hidden ones; codes (M, N-1) say which item each is about, anywhere."""
    states, num, others = np.asarray(states, np.int16), len(states), game.num_players - 1
    size, hidden = nets["moa"].goal.shape
    secret = np.eye(size, dtype=np.float32)[size - 2]
    goals = np.broadcast_to(secret, (num, others, size)) if goals is None else goals
    both = np.stack([goals, np.broadcast_to(secret, goals.shape)], 2)
    net = np.zeros(num, np.int64) if net is None else net
    matrix = nets["agent"].goals.numpy().reshape(-1, others, size, 2 * hidden)[net]  # (M, N-1, G, 2H)
    codes = np.full((num, others), hop.HIDDEN) if codes is None else np.asarray(codes)
    return hop.Roots(
        states.copy(), np.asarray(focal, np.int64), net, np.full((num, others), -1), codes,
        np.einsum("mkbg,mkgh->mkbh", both, matrix).astype(np.float32),
        np.ascontiguousarray((both @ nets["moa"].goal.numpy()).astype(np.float32)), make_streams(seed, num),
    )  # fmt: skip


def grow(game, nets, roots: hop.Roots, simulations: int, **settings) -> hop.Trees:
    """All trees of `roots` after so many simulations, in arrays that were zero before."""
    args = hop.Args(hidden=nets["agent"].width, simulations=simulations, **settings)
    search = hop.Search(game, hop.weights_of(nets["agent"], nets["moa"], hop.Things(game)), args)
    num = len(roots.state)
    trees = hop.make_trees(game, num, simulations, args.outcomes)
    streams = roots.stream.copy()
    search.grow_trees(trees, roots._replace(stream=streams), game.transition(num), simulations)
    return trees


def play_some(env_id: str = ID, num: int = 60, seed: int = 1, steps: int = 12, **overrides):
    """A game and states of all stages of random play: row k has made k % steps moves."""
    env = envs.make(env_id, num_envs=num, seed=seed, **overrides)
    rng, states = np.random.default_rng(seed), env.states.copy()
    for step in range(steps):
        states[np.arange(num) % steps == step] = env.states[np.arange(num) % steps == step]
        env.step((rng.random(env.legal.shape) * env.legal).argmax(2))
    return env.game, states


def random_goals(game, nets, num: int, rng: np.random.Generator):
    """Codes and vectors of goals of all sorts: items of a kind, hidden, aimless, habit."""
    others, size = game.num_players - 1, nets["moa"].goal.shape[0]
    sorts = [hop.HABIT, hop.AIMLESS, hop.HIDDEN, *(ITEM + k for k in range(len(game.kinds)))]
    codes = rng.choice(sorts, size=(num, others))
    goals = rng.normal(size=(num, others, size)).astype(np.float32)
    goals[..., -hop.FLAGS :] = 0.0
    for code, flag in ((hop.HABIT, -3), (hop.HIDDEN, -2), (hop.AIMLESS, -1)):
        goals[codes == code] = np.eye(size, dtype=np.float32)[flag]
    return codes, goals


def random_batch(num: int = 60, seed: int = 1, num_nets: int = 1):
    """Random boards with blocks, some players gone, random networks and goals of all sorts."""
    game, states = play_some(num=num, seed=seed, height=5, width=5, max_block_comp=2)
    nets, rng = make_nets(game, num_nets=num_nets), np.random.default_rng(seed)
    alive = game.alive(states)
    focal = np.array([rng.choice(np.flatnonzero(row)) for row in alive])
    codes, goals = random_goals(game, nets, num, rng)
    return game, nets, make_roots(game, nets, states, focal, codes, goals, seed, rng.integers(num_nets, size=num))


def used_nodes(trees: hop.Trees, m: int) -> list[int]:
    return [0, *(node for node in trees.child[m].ravel() if node > 0)]


# the compiled networks


@pytest.mark.parametrize("num_nets", [1, 3])
def test_compiled_networks_are_the_torch_networks(num_nets):
    game, states = play_some(height=5, width=6, max_block_comp=2)
    nets, things = make_nets(game, num_nets=num_nets, hidden=24), hop.Things(game)
    weights, work = hop.weights_of(nets["agent"], nets["moa"], things), hop.make_work(game, 24)
    rng, size = np.random.default_rng(0), nets["moa"].goal.shape[0]
    obs, legal, alive = game.observe(states), game.legal(states), game.alive(states)
    ids, t = torch.from_numpy(things(obs)), torch.from_numpy(things.time(states[:, T]))
    own_goals = rng.normal(size=(len(states), 4, 3 * size)).astype(np.float32)
    goal = rng.normal(size=(len(states), 4, size)).astype(np.float32)
    checked = 0
    for player in range(4):
        rows = np.flatnonzero(alive[:, player])
        shared = ids[rows, player], t[rows], torch.from_numpy(legal[rows, player])
        tiled = [x[None].expand(num_nets, *x.shape) for x in (*shared, torch.from_numpy(own_goals[rows, player]))]
        log_probs, values = nets["agent"](*tiled)
        predicted = nets["moa"](*shared, torch.from_numpy(goal[rows, player])).exp().numpy()
        for k, b in enumerate(rows):
            count, out = hop.list_things(game.grid, states[b], work), np.zeros(7, np.float32)
            for net in range(num_nets):
                bias = own_goals[b, player] @ nets["agent"].goals[net].numpy()
                value = hop.policy_value(game.grid, weights, states[b], work, count, player, net, bias, out)
                assert value == pytest.approx(values[net, k].item(), abs=1e-5)
                assert np.abs(out - log_probs[net, k].exp().numpy()).max() < 1e-5
                assert ((out > 0) == legal[b, player]).all()
            bias = goal[b, player] @ nets["moa"].goal.numpy()
            hop.opponent_probs(game.grid, weights, states[b], work, count, player, ITEM, bias, out)
            assert np.abs(out - predicted[k]).max() < 1e-5
            hop.opponent_probs(game.grid, weights, states[b], work, count, player, hop.AIMLESS, bias, out)
            assert np.abs(out - legal[b, player] / legal[b, player].sum()).max() < 1e-6
            checked += 1
    assert checked > 120


def test_compiled_networks_follow_the_weights():
    """The search reads views: a training step is seen without any copying."""
    game, states = play_some(num=1)
    nets = make_nets(game)
    weights, work = hop.weights_of(nets["agent"], nets["moa"], hop.Things(game)), hop.make_work(game, 16)
    count, out, bias = hop.list_things(game.grid, states[0], work), np.zeros(7, np.float32), np.zeros(32, np.float32)
    before = hop.policy_value(game.grid, weights, states[0], work, count, 0, 0, bias, out)
    nets["agent"].value_bias.data += 0.5
    after = hop.policy_value(game.grid, weights, states[0], work, count, 0, 0, bias, out)
    assert after - before == pytest.approx(0.5, abs=1e-6)


# search


class Node:
    """Of the plain search below."""

    def __init__(self, cell, t, reward=0.0, ended=False):
        self.cell, self.t, self.reward, self.ended, self.children = cell, t, reward, ended, {}
        self.visits, self.total = {"move": 0, "stay": 0}, {"move": 0.0, "stay": 0.0}


def plain_search(simulations: int, outcomes: int, horizon: int, move: float, gamma=0.5, c=1.0) -> Node:
    """PUCT, one node object per state, in the corridor of two cells: at 0 or 1, move or stay."""
    prior, value_of, low, high = {"move": move, "stay": 1 - move}, (0.2, 0.6), np.inf, -np.inf
    root = Node(0, 0)
    for _ in range(simulations):
        node, path = root, []
        while not node.ended:
            bonus = c * (sum(node.visits.values()) + 1) ** 0.5
            score = {}
            for action, visits in node.visits.items():
                q = node.total[action] / visits if visits else value_of[node.cell]
                scaled = min(max((q - low) / (high - low), 0.0), 1.0) if high > low else 0.0
                score[action] = scaled + bonus * prior[action] / (1 + visits)
            action = max(score, key=score.get)
            slot = action, node.visits[action] % outcomes
            path.append((node, action))
            if slot in node.children:
                node = node.children[slot]
                continue
            cell = 1 - node.cell if action == "move" else node.cell
            node.children[slot] = node = Node(cell, node.t + 1, -0.1, node.t + 1 >= horizon)
            break
        value = 0.0 if node.ended else value_of[node.cell]
        for parent, action in reversed(path):
            value = -0.1 + gamma * value
            parent.visits[action] += 1
            parent.total[action] += value
            q = parent.total[action] / parent.visits[action]
            low, high = min(low, q), max(high, q)
    return root


def corridor(horizon: int, move: float = 0.7):
    """1x4: two cells to walk, a block, and behind it a hare and another player that only stays, so that there are
    exactly two legal actions everywhere. Each step costs 0.1; the network says 0.2 for cell 0, 0.6 for cell 1, and
    moves with probability `move`."""
    game = envs.game(ID, height=1, width=4, num_players=2, num_stags=0, num_hares=1, time_reward=-0.1, horizon=horizon)
    nets, things = blank_nets(game), hop.Things(game)
    agent, hidden = nets["agent"], 4
    for cell, value in ((0, 0.2), (1, 0.6)):
        agent.embedding[0, things.ids[cell, cell * things.planes], hidden] = value
    agent.critic[0, 0, 0] = agent.value_head[0, 0, 0] = 1.0
    agent.policy_bias[0, 0, [LEFT, RIGHT]], agent.policy_bias[0, 0, STAY] = np.log(move), np.log(1 - move)
    nets["moa"].head_bias[STAY] = 60.0
    state = make_state(game, [0, 3], {2: BLOCK, 3: ITEM + 1})
    return game, nets, make_roots(game, nets, [state], [0])


def test_two_actions_by_hand():
    """gamma 0.5, c 1, one outcome; Q of what is not tried is the node's value; Q is scaled by all Q seen so far.

    1: nothing to scale, so the prior decides: move (0.7). Its leaf is worth 0.6: -0.1 + 0.5 * 0.6 = 0.2
    2: one Q only; sqrt 2 * 0.7 / 2 = 0.49 beats sqrt 2 * 0.3 = 0.42: move, then again move (back to 0.2):
       -0.1 + 0.5 * 0.2 = 0 there, -0.1 + 0.5 * 0 = -0.1 at the root; Q = (0.2 - 0.1) / 2 = 0.05; Qs from 0 to 0.2
    3: move 0.05 / 0.2 + sqrt 3 * 0.7 / 3 = 0.65; stay counts as 0.2 -> 1 + sqrt 3 * 0.3 = 1.52: stay;
       -0.1 + 0.5 * 0.2 = 0
    4: move 0.25 + 2 * 0.7 / 3 = 0.72; stay 0 + 2 * 0.3 / 2 = 0.3: move
    """
    game, nets, roots = corridor(horizon=30)
    for simulations, (moves, stays) in enumerate(((1, 0), (2, 0), (2, 1), (3, 1)), start=1):
        trees = grow(game, nets, roots, simulations, gamma=0.5, outcomes=1)
        assert trees.visits[0, 0].tolist() == [0, 0, 0, moves, stays, 0, 0]
    trees = grow(game, nets, roots, 3, gamma=0.5, outcomes=1)
    assert trees.total[0, 0, [RIGHT, STAY]] == pytest.approx([0.1, 0.0], abs=1e-6)
    assert trees.bounds[0] == pytest.approx([0.0, 0.2], abs=1e-6)


@pytest.mark.parametrize(("horizon", "outcomes"), [(30, 1), (30, 2), (4, 1), (4, 3)])
def test_two_actions_as_a_plain_search_does_it(horizon, outcomes):
    """The whole tree, node by node, after every number of simulations; short horizons end inside the tree."""
    move_prior = 0.737  # no ties
    game, nets, roots = corridor(horizon, move_prior)
    for simulations in (1, 2, 5, 9, 17, 40):
        trees = grow(game, nets, roots, simulations, gamma=0.5, outcomes=outcomes)
        root = plain_search(simulations, outcomes, horizon, move_prior)
        pairs = [(0, root)]
        while pairs:
            node, plain = pairs.pop()
            move = RIGHT if plain.cell == 0 else LEFT
            assert trees.state[0, node, PLAYERS] == plain.cell and trees.state[0, node, T] == plain.t
            assert trees.ended[0, node] == plain.ended
            for name, action in (("move", move), ("stay", STAY)):
                assert trees.visits[0, node, action] == plain.visits[name]
                assert trees.total[0, node, action] == pytest.approx(plain.total[name], abs=1e-5)
                for slot in range(outcomes):
                    child = trees.child[0, node, action, slot]
                    assert (child >= 0) == ((name, slot) in plain.children)
                    if child >= 0:
                        pairs.append((child, plain.children[name, slot]))
        assert trees.visits[0, 0].sum() == simulations


def test_backup_by_hand():
    """A chain with rewards 1, 2, 4 and a leaf worth 8, gamma 0.5: 4 + 4 = 8, 2 + 4 = 6, 1 + 3 = 4; then a sibling."""
    game = envs.game(ID)
    trees = hop.make_trees(game, 1, 4, 1)
    trees.bounds[0] = 1e30, -1e30
    trees.parent[0, 1:5], trees.action[0, 1:5] = (0, 1, 2, 1), (3, 4, 5, 0)
    trees.reward[0, 1:5], trees.value[0, 3:5] = (1.0, 2.0, 4.0, 0.0), (8.0, 2.0)
    hop.back_up(trees, 0, 3, 0.5)
    assert [trees.total[0, 0, 3], trees.total[0, 1, 4], trees.total[0, 2, 5]] == [4.0, 6.0, 8.0]
    assert trees.bounds[0].tolist() == [4.0, 8.0]
    hop.back_up(trees, 0, 4, 0.5)  # 0 + 0.5 * 2 = 1 at node 1, then 1 + 0.5 * 1 = 1.5 at the root
    assert trees.visits[0, 0, 3] == 2 and trees.total[0, 0, 3] == 5.5 and trees.total[0, 1, 0] == 1.0
    assert trees.bounds[0].tolist() == [1.0, 8.0]
    assert trees.visits.sum() == 5


def test_no_value_after_leaving_or_after_the_end():
    """The network says 5 everywhere. A hare at once pays 1 and no more; time running out pays nothing; the last prey
    taken by another ends it too; one step to a hare is gamma."""
    game = envs.game(ID, height=1, width=2, num_players=2, num_stags=0, num_hares=1, horizon=9)
    nets = blank_nets(game)
    nets["agent"].value_bias += 5.0
    nets["moa"].head_bias[HARE] = 60.0  # the other takes the hare when it can
    states = [
        make_state(game, [1, GONE], {1: ITEM + 1}),  # on the hare
        make_state(game, [1, GONE], {1: ITEM + 1}, t=8),  # in the last step
        make_state(game, [0, 1], {1: ITEM + 1}),  # the other takes the last prey now
        make_state(game, [0, GONE], {1: ITEM + 1}, t=7),  # one step away, two steps left
        make_state(game, [1, 1], {1: ITEM + 1}),  # shared with the other: one half
    ]
    trees = grow(game, nets, make_roots(game, nets, states, [0] * 5), 60, gamma=0.9)
    q = trees.total[:, 0] / np.maximum(trees.visits[:, 0], 1)  # (5, A)
    assert (trees.visits[0, 0, [LEFT, STAY, HARE]] > 0).all() and q[0, HARE] == 1.0
    assert q[1, [LEFT, STAY]].tolist() == [0.0, 0.0] and q[1, HARE] == 1.0
    assert trees.visits[2, 0, [RIGHT, STAY]].sum() == 60 and (q[2] == 0.0).all()
    grandchild = trees.child[3, 0, RIGHT, 0]
    assert trees.total[3, grandchild, HARE] == trees.visits[3, grandchild, HARE] > 0
    assert 0.0 < q[3, RIGHT] <= 0.9
    after_waiting = trees.child[3, 0, STAY, 0]
    assert not trees.total[3, after_waiting].any()  # too late: time runs out on the way
    assert q[4, HARE] == 0.5 and q[4, STAY] == 0.0
    for m in range(5):
        for node in used_nodes(trees, m):
            if trees.ended[m, node]:
                assert trees.value[m, node] == 0.0 and not trees.visits[m, node].any()
                assert (trees.child[m, node] == -1).all()
            else:
                assert trees.value[m, node] == 5.0


@pytest.mark.parametrize("root", ["puct", "gumbel"])
def test_masks_at_every_node(root):
    """An illegal action has no prior, no visit and no child, at no node; an opponent's illegal action no probability;
    nobody who left is ever asked, moves, or comes back."""
    game, nets, roots = random_batch()
    trees = grow(game, nets, roots, 40, root=root)
    checked = gone = blocked = 0
    for m, focal in enumerate(roots.focal):
        nodes = used_nodes(trees, m)
        legal, alive = game.legal(trees.state[m, nodes]), game.alive(trees.state[m, nodes])
        assert trees.visits[m, 0].sum() == 40
        for node, may, here in zip(nodes, legal, alive, strict=True):
            if trees.ended[m, node]:
                assert not trees.prior[m, node].any()
                continue
            mine = may[focal]
            assert ((trees.prior[m, node] > 0) == mine).all()
            assert trees.prior[m, node].sum() == pytest.approx(1.0, abs=1e-5)
            assert not trees.visits[m, node, ~mine].any() and (trees.child[m, node, ~mine] == -1).all()
            for k in range(game.num_players - 1):
                player = (focal + 1 + k) % game.num_players
                if not here[player]:
                    gone += 1
                    assert (trees.others[m, node, k] == 1.0).all()  # a mark, no distribution
                    for child in trees.child[m, node].ravel():
                        assert child < 0 or trees.state[m, child, PLAYERS + player] == GONE
                    continue
                probs = np.diff(trees.others[m, node, k], prepend=0.0)
                assert not probs[~may[player]].any() and probs.sum() == pytest.approx(1.0, abs=1e-5)
            checked += 1
            blocked += not mine[:4].all()
    assert checked > 1000 and gone > 200 and blocked > 200


def test_the_others_in_a_tree_move_as_the_model_says():
    """Over many trees of one state, the first draws of the others' moves have the model's frequencies."""
    game = envs.game(ID)
    nets = make_nets(game)
    state = make_state(game, [5, 6, 9, 10], {5: ITEM, 6: ITEM + 1, 0: ITEM + 1, 15: ITEM + 1, 3: ITEM + 1})
    num = 4000
    trees = grow(game, nets, make_roots(game, nets, [state] * num, [1] * num), 1)
    for k, player in enumerate((2, 3, 0)):
        cell = trees.state[:, 1, PLAYERS + player]
        probs = np.diff(trees.others[0, 0, k], prepend=0.0)
        home = state[PLAYERS + player]
        for action, target in enumerate(game.grid.neighbours[home]):
            assert (cell == target).mean() == pytest.approx(probs[action], abs=0.04)


def test_all_own_actions_face_the_same_draws_of_the_others():
    """Children of one node and slot differ in what the planner did; the two slots differ in what the others did."""
    game = envs.game(ID)
    nets = make_nets(game)
    state = make_state(game, [5, 6, 9, 10], {0: ITEM, 12: ITEM + 1, 3: ITEM + 1, 15: ITEM + 1, 8: ITEM + 1})
    trees = grow(game, nets, make_roots(game, nets, [state] * 50, [1] * 50), 60, c_puct=50.0, outcomes=2)
    slots = []
    for slot in range(2):
        child = trees.child[:, 0, :5, slot]  # four moves and staying
        assert (child > 0).all()
        after = np.take_along_axis(trees.state, child[:, :, None], 1)[:, :, PLAYERS : PLAYERS + 4]  # (50, 5, N)
        assert (after[:, :, [0, 2, 3]] == after[:, :1, [0, 2, 3]]).all() and (after[:, 0, 1] != after[:, 4, 1]).all()
        slots.append(after[:, 0])
    assert (slots[0] != slots[1]).any(1).mean() > 0.3


def test_reward_scale_scales_what_trees_count():
    """Without values of the network all sums are sums of rewards: three times the scale, three times each of them."""
    game, states = play_some(num=40)
    nets = blank_nets(game)
    focal = np.array([np.flatnonzero(row)[0] for row in game.alive(states)])
    once, thrice = (
        grow(game, nets, make_roots(game, nets, states, focal), 40, reward_scale=scale) for scale in (1.0, 3.0)
    )
    assert once.total.any() and np.allclose(thrice.total, 3 * once.total, atol=1e-4)


def test_a_checkpoint_plays_as_sharply_as_asked():
    """The same decision by the same mind: the larger play_beta, the likelier the action planned most."""
    env, mind = make_mind("none", num_envs=64, trees=2, simulations=16)
    policy, peaks = hop.Policy(mind, 0, 0, False), []
    plan = mind.plan
    mind.plan = lambda *args: (peaks.append((args[3], plan(*args)[0].max(1).mean())), plan(*args))[1]
    assert policy.play_beta == mind.args.play_beta
    for beta in (0.5, 50.0):
        policy.play_beta = beta
        policy.act(env)
    assert [beta for beta, _ in peaks] == [0.5, 50.0] and peaks[1][1] > peaks[0][1] + 0.1


@pytest.mark.parametrize(("root", "opponents"), [("puct", "learned"), ("gumbel", "learned"), ("puct", "perfect")])
def test_a_row_alone_grows_the_same_tree_as_in_a_batch(root, opponents):
    """Bitwise, all arrays of the tree; and `Search.run` gives the same whatever the size of its blocks."""
    game, nets, roots = random_batch(num=70, num_nets=2)
    together = grow(game, nets, roots, 24, root=root, opponents=opponents)
    for m in range(0, 70, 9):
        alone = grow(game, nets, hop.Roots(*(x[m : m + 1] for x in roots)), 24, root=root, opponents=opponents)
        for name, array in alone._asdict().items():
            assert array.tobytes() == getattr(together, name)[m : m + 1].tobytes(), name
    args = hop.Args(hidden=16, simulations=24, root=root, opponents=opponents)
    weights, results = hop.weights_of(nets["agent"], nets["moa"], hop.Things(game)), []
    with pytest.MonkeyPatch.context() as patch:
        for block in (1, 7, 64, 512):
            patch.setattr(hop, "BLOCK_OF_TREES", block)
            search = hop.Search(game, weights, args)
            for _ in range(2):  # also when the arrays are full of the trees before
                results.append(search.run(roots._replace(stream=roots.stream.copy()), 24))
    for found in results:
        assert all(a.tobytes() == b.tobytes() for a, b in zip(found, results[0], strict=True))
    assert np.array_equal(results[0].visits, together.visits[:, 0])
    assert np.array_equal(results[0].depth, together.depth.max(1))


def best_response(game, gamma: float, other_policy):
    """Exact Q of player 0's actions against one opponent, by enumeration: q(state) -> (A,), -inf where illegal."""
    known: dict[bytes, np.ndarray] = {}

    def q_of(state: np.ndarray) -> np.ndarray:
        key = state.tobytes()
        if key not in known:
            legal = game.legal(state[None])[0]
            probs = other_policy(state, legal[1])
            joint = [pair for pair in product(np.flatnonzero(legal[0]), range(7)) if probs[pair[1]] > 1e-9]
            out = game.simulate(np.repeat(state[None], len(joint), 0), np.array(joint))
            q = np.where(legal[0], 0.0, -np.inf)
            for k, (own, other) in enumerate(joint):
                over = out.terminated[k, 0] or out.truncated[k, 0]
                q[own] += probs[other] * (out.reward[k, 0] + (0.0 if over else gamma * q_of(out.states[k]).max()))
            known[key] = q
        return known[key]

    return q_of


PREFERENCE = np.array([0.0, 2.0, 1.0, 3.0, 0.5, 5.0, 4.0])  # the stag, else the hare, else right, else down, ...


def follow_preference(state, legal):
    return np.eye(7)[np.where(legal, PREFERENCE, -1.0).argmax()]


def lean_to_preference(state, legal):
    probs = np.where(legal, np.exp(1.5 * PREFERENCE), 0.0)
    return probs / probs.sum()


@pytest.mark.parametrize("root", ["puct", "gumbel"])
@pytest.mark.parametrize("other", [follow_preference, lean_to_preference])
def test_search_finds_the_exact_best_response(root, other):
    """3x3, two players, a stag and a hare; the networks know nothing of value (uniform prior, value 0), but how the
    other moves is known: by a fixed order, or drawn with known probabilities, in which case many draws are needed.

    Q is a mean over all visits, also the exploring ones, so it comes from below; hence the shares of the tolerance.
    """
    certain = other is follow_preference
    horizon, simulations, outcomes, trees_each = (4, 20_000, 1, 1) if certain else (2, 12_000, 8, 8)
    game = envs.game(ID, height=3, width=3, num_players=2, num_hares=1, horizon=horizon)
    nets, q_of = blank_nets(game), best_response(game, 0.95, other)
    nets["moa"].head_bias += torch.from_numpy(PREFERENCE * (40.0 if certain else 1.5)).float()
    states = game.draw(5, 300)
    exact = np.array([q_of(state) for state in states])  # (300, A)
    best, second = -np.sort(-exact, axis=1)[:, :2].T
    clear = best - second > 0.3
    kinds = clear, best > 3.0, best > 0.3, clear & (best > 2.0)
    picked = np.unique(np.concatenate([np.flatnonzero(rows)[:3] for rows in kinds]))
    states, exact, best, clear = states[picked], exact[picked], best[picked], clear[picked]
    roots = make_roots(game, nets, np.repeat(states, trees_each, 0), [0] * len(picked) * trees_each)
    trees = grow(game, nets, roots, simulations, gamma=0.95, c_puct=4.0, outcomes=outcomes, root=root)
    visits = trees.visits[:, 0].reshape(-1, trees_each, 7)
    q = (trees.total[:, 0].reshape(visits.shape) / np.maximum(visits, 1)).mean(1)
    found = np.where((visits > 0).all(1), q, -np.inf)
    assert (found.max(1) < best + (1e-4 if certain else 0.5)).all()
    assert (found.max(1) > 0.85 * best - (0.02 if certain else 0.3)).all(), (found.max(1), best)
    assert (found.argmax(1) == exact.argmax(1))[clear].all()
    if root == "puct":
        assert (visits.sum(1).argmax(1) == exact.argmax(1))[clear].all()
    assert clear.sum() >= 3 and best.max() > 4.0 and best.min() < 1.0


def test_perfect_opponents_follow_their_own_raw_policy():
    game, states = play_some(num=30)
    nets = make_nets(game, num_nets=4)
    focal = np.array([np.flatnonzero(row)[0] for row in game.alive(states)])
    trees = grow(game, nets, make_roots(game, nets, states, focal, net=focal), 1, opponents="perfect")
    things, obs, legal = hop.Things(game), game.observe(states), game.legal(states)
    hidden = torch.zeros(4, 30, 3, nets["moa"].goal.shape[0])
    hidden[..., -2] = 1.0
    ids = torch.from_numpy(things(obs)).transpose(0, 1)
    t = torch.from_numpy(things.time(states[:, T])).expand(4, 30)
    log_probs, _ = nets["agent"](ids, t, torch.from_numpy(legal).transpose(0, 1), hidden.flatten(2))
    for m, k in product(range(30), range(3)):
        player = (focal[m] + 1 + k) % 4
        if states[m, PLAYERS + player] != GONE:
            probs = np.diff(trees.others[m, 0, k], prepend=0.0)
            assert np.abs(probs - log_probs[player, m].exp().numpy()).max() < 1e-5


def test_halving_spends_all_simulations_and_halves():
    table = hop.halving_table(7, 32)
    for legal in range(1, 8):
        visits = np.zeros(legal, int)
        for before in table[legal]:  # the action tried next has been tried exactly so often
            candidates = np.flatnonzero(visits == before)
            assert len(candidates), (legal, before)
            visits[candidates[0]] += 1
        assert visits.sum() == 32
        if legal >= 4:
            assert np.sort(visits)[-2:].sum() > 32 / legal * 2  # the two finalists got more than an even share


def test_improve_by_hand():
    """Two trees, three actions of which the last is illegal. beta 2.

    Q of action 0: 1 in tree 0 (2 / 2), 3 in tree 1 (3 / 1) -> 2; action 1: never tried. Visits 3 in all, mean prior
    0.5, 0.5; network value (1 + 3) / 2 = 2, mean Q of the tried = 2 -> action 1 counts as 2: prior decides.
    """
    found = hop.Searched(
        np.array([[0.6, 0.4, 0.0], [0.4, 0.6, 0.0]], np.float32), np.array([1.0, 3.0], np.float32),
        np.array([[2, 0, 0], [1, 0, 0]], np.int32), np.array([[2.0, 0, 0], [3.0, 0, 0]], np.float32),
        np.ones(2, np.int32),
    )  # fmt: skip
    policy, value = hop.improve(found, 2, 2.0, 1.0)
    assert policy == pytest.approx(np.array([[0.5, 0.5, 0.0]]), abs=1e-6) and value == pytest.approx([2.0])
    visits, total = np.array([[2, 1, 0], [1, 0, 0]], np.int32), np.array([[2.0, 1.5, 0], [3.0, 0, 0]], np.float32)
    policy, value = hop.improve(found._replace(visits=visits, total=total), 2, 2.0, 1.0)
    odds = np.exp(2 * (2.0 - 1.5))  # action 1 is worth 1.5, by the one tree that tried it
    assert policy[0] == pytest.approx([odds / (1 + odds), 1 / (1 + odds), 0.0], abs=1e-6)
    assert value[0] == pytest.approx((2.0 * odds + 1.5) / (1 + odds), abs=1e-6)
    prior = np.array([[0.8, 0.2, 0.0]] * 2, np.float32)  # to the power of 1/2 the odds of 4 are 2; Q is the same
    assert hop.improve(found._replace(prior=prior), 2, 2.0, 0.5)[0][0] == pytest.approx([2 / 3, 1 / 3, 0.0], abs=1e-6)


# goals and beliefs


def make_mind(goal_mode="oracle", num_envs=2, seed=0, nets=None, **settings):
    env = envs.make(ID, num_envs=num_envs, seed=seed)
    nets = nets or make_nets(env.game, goal_mode)
    args = hop.Args(goal_mode=goal_mode, hidden=16, **{"open_mind": 0.0} | settings)
    return env, hop.Mind(args, env.game, nets, num_envs, [0, 1, 2, 3], seed)


def see(mind, env, prior=None):
    """`look` with a given prior of the inference network."""
    if prior is not None:
        mind.read = lambda env: mind.prior.__setitem__(..., np.asarray(prior, np.float32))
    mind.look(env)


def test_bayes_by_hand():
    """Kinds stag, hare, habit, aimless. First 0.8 * (0.75, 0.25), 0.1, 0.1. Then an action with likelihoods 0.5, 0.1,
    0.3, 0.2, a second with 0 (counts as 0.001), 0.4, 0.3, 0.2; a floor of 0.02 goes to the prior at each look."""
    env, mind = make_mind()
    see(mind, env, [0.75, 0.25, 0.0, 0.0])
    prior = np.array([0.6, 0.2, 0.1, 0.1])
    assert mind.beliefs[1, 2] == pytest.approx(prior, abs=1e-6)
    expected, actions = prior, np.full((2, 4), STAY)
    for likelihood in ((0.5, 0.1, 0.3, 0.2), (0.0, 0.4, 0.3, 0.2)):
        mind.probs[1, 2, :, STAY] = likelihood
        mind.watch(actions, env.alive, np.zeros(2, bool))
        expected = expected * np.maximum(likelihood, 0.001)
        expected /= expected.sum()
        assert mind.beliefs[1, 2] == pytest.approx(expected, abs=1e-6)
        see(mind, env, [0.75, 0.25, 0.0, 0.0])
        expected = 0.98 * expected + 0.02 * prior
        assert mind.beliefs[1, 2] == pytest.approx(expected, abs=1e-6)
    assert mind.beliefs.sum(2) == pytest.approx(np.ones((2, 4)), abs=1e-5)


def test_an_open_mind_by_hand():
    """0.4 of the first belief in a kind goes to all kinds alike: 0.6 * (0.75, 0.25) + 0.4 * (0.5, 0.5), times 0.8."""
    env, mind = make_mind(open_mind=0.4)
    see(mind, env, [0.75, 0.25, 0.0, 0.0])
    assert mind.beliefs[0, 1] == pytest.approx([0.8 * 0.65, 0.8 * 0.35, 0.1, 0.1], abs=1e-5)


def test_a_goal_whose_prey_was_taken_is_impossible():
    env, mind = make_mind()
    see(mind, env, [0.75, 0.25, 0.0, 0.0])
    states = env.states.copy()
    board = states[:, PLAYERS + 4 :]
    board[board == ITEM] = 0  # no stag left
    mind.watch(np.full((2, 4), STAY), env.alive, np.zeros(2, bool))
    before = mind.beliefs.copy()
    env.set_states(states)
    see(mind, env, [0.75, 0.25, 0.0, 0.0])
    assert not mind.beliefs[:, :, 0].any()
    kept = before[..., 1:] / before[..., 1:].sum(-1, keepdims=True)
    assert mind.beliefs[..., 1:] == pytest.approx(0.98 * kept + 0.02 * np.array([0.8, 0.1, 0.1]), abs=1e-5)
    drawn = np.zeros((8, 50, 3), np.int64)
    rows, focal = np.divmod(np.arange(8), 4)
    hop.draw_goals(mind.beliefs, mind.alive, rows, focal, mind.streams, drawn, np.zeros((8, 50), np.uint64))
    assert set(np.unique(drawn)) == {1, 2, 3}  # nobody is thought to hunt the stag


def test_what_was_pursued_is_carried_over():
    """Habits: 0.995 of the old plus this episode's last belief; the next episode starts from habits + one prior."""
    env, mind = make_mind()
    see(mind, env, [0.75, 0.25, 0.0, 0.0])
    prior = np.array([0.6, 0.2, 0.1, 0.1])
    mind.habits[1, 2] = 2.0, 4.0, 1.0, 0.0
    mind.probs[1, 2, :, STAY] = 0.5, 0.1, 0.3, 0.2
    done = np.array([False, True])
    mind.watch(np.full((2, 4), STAY), env.alive, done)
    last = prior * (0.5, 0.1, 0.3, 0.2)
    habits = 0.995 * np.array([2.0, 4.0, 1.0, 0.0]) + last / last.sum()
    assert mind.habits[1, 2] == pytest.approx(habits, abs=1e-5) and not mind.habits[0].any()
    see(mind, env, [0.75, 0.25, 0.0, 0.0])
    assert mind.beliefs[1, 2] == pytest.approx((habits + prior) / (habits + prior).sum(), abs=1e-5)
    assert mind.settled[1].sum() == 0  # a new episode


def test_switches_of_opponent_modelling():
    for intra, inter in ((False, True), (True, False), (False, False)):
        env, mind = make_mind(intra_om=intra, inter_om=inter)
        see(mind, env, [0.75, 0.25, 0.0, 0.0])
        prior = np.array([0.6, 0.2, 0.1, 0.1])
        mind.probs[1, 2, :, STAY] = 0.5, 0.1, 0.3, 0.2
        mind.watch(np.full((2, 4), STAY), env.alive, np.array([False, True]))
        moved = prior * (0.5, 0.1, 0.3, 0.2)
        pursued = moved / moved.sum() if intra else prior
        assert mind.beliefs[1, 2] == pytest.approx(pursued, abs=1e-6)
        see(mind, env, [0.75, 0.25, 0.0, 0.0])
        first = (pursued + prior) / 2 if inter else prior
        assert mind.beliefs[1, 2] == pytest.approx(first, abs=1e-5)
    env, mind = make_mind("none")
    for _ in range(3):
        mind.look(env)
        assert mind.beliefs.shape == (2, 4, 1) and (mind.beliefs == 1.0).all()
        assert (mind.code == hop.HIDDEN).all() and (mind.goal == mind.hidden_goal).all()
        mind.watch(np.full((2, 4), STAY), env.alive, np.zeros(2, bool))


def test_learned_goals_are_the_encoders_view_of_standing_on_each_item():
    env, mind = make_mind("learned", num_envs=6)
    mind.look(env)
    for b, player in product(range(6), range(4)):
        board = env.states[b, PLAYERS + 4 :]
        cells = np.flatnonzero(board >= ITEM)
        assert mind.cell[b, :5].tolist() == cells.tolist() and (mind.code[b, :5] == board[cells]).all()
        for k, cell in enumerate(cells):
            state = env.states[b].copy()
            state[PLAYERS + player] = cell
            seen = torch.from_numpy(env.game.observe(state[None])[:, player])
            z = mind.nets["vae"].encode(seen)[0][0].numpy()
            assert np.abs(mind.goal[b, player, k, :-3] - z).max() < 1e-4
        assert mind.goal[b, player, 5].tolist() == [0.0] * 8 + [1.0, 0.0, 0.0]  # habit
        assert mind.goal[b, player, 6].tolist() == [0.0] * 8 + [0.0, 0.0, 1.0]  # aimless
    assert mind.beliefs.sum(2) == pytest.approx(np.ones((6, 4)), abs=1e-5)
    assert mind.beliefs[:, :, 5:] == pytest.approx(np.full((6, 4, 2), 0.1), abs=1e-5)


@pytest.mark.parametrize("goal_mode", ["learned", "oracle", "none"])
def test_players_that_left_are_not_predicted_watched_or_remembered(goal_mode):
    """Whatever column of a player that left says, no belief, memory or habit changes; it has no prediction, nobody
    draws a goal for it, and one episode counts once in its habits."""
    nets = make_nets(envs.game(ID), goal_mode)
    minds = [make_mind(goal_mode, num_envs=30, nets=nets) for _ in range(2)]
    rng, gone_rows = np.random.default_rng(0), 0
    garbage = np.random.default_rng(1)
    for _ in range(30):
        alive = minds[0][0].alive.copy()
        actions = (rng.random((30, 4, 7)) * minds[0][0].legal).argmax(2)
        done = None
        for k, (env, mind) in enumerate(minds):
            mind.look(env)
            assert not mind.predict()[~alive].any() and not mind.probs[~alive].any()
            assert mind.predict()[alive].sum(1) == pytest.approx(np.ones(alive.sum()), abs=1e-4)
            drawn = np.zeros((30, 3, 3), np.int64)
            streams = np.zeros((30, 3), np.uint64)
            hop.draw_goals(mind.beliefs, mind.alive, np.arange(30), np.full(30, 1), mind.streams.copy(), drawn, streams)
            assert ((drawn >= 0) == alive[:, None, [2, 3, 0]]).all()
            told = actions.copy()
            if k:
                told[~alive] = garbage.integers(7, size=(~alive).sum())
            before = mind.beliefs.copy()
            done = env.step(actions)[-1]["done"].copy()
            mind.watch(told, env.alive, done)
            assert (mind.beliefs[~alive] == before[~alive]).all()
        gone_rows += (~alive).sum()
        first, second = (mind.get_state() for _, mind in minds)
        for name in ("beliefs", "prior", "habits", "goal", "memory", "settled"):
            assert first[name].tobytes() == second[name].tobytes(), name
    assert gone_rows > 100
    if goal_mode != "none":
        mind = minds[0][1]
        mind.habits[:] = 0.0
        mind.args.belief_decay = 1.0
        env, ends = minds[0][0], np.zeros(30)
        for _ in range(80):
            mind.look(env)
            done = env.step((rng.random((30, 4, 7)) * env.legal).argmax(2))[-1]["done"].copy()
            ends += done
            mind.watch(np.full((30, 4), STAY), env.alive, done)
        weight = mind.habits.sum(2)  # one for each episode of a player: those that ended, and the one it has left
        assert np.abs(weight - ends[:, None] - (~env.alive)).max() < 1.01


def test_dream_players_act_legally_for_goals_on_the_board():
    for goal_mode in ("learned", "oracle", "none"):
        env, mind = make_mind(goal_mode, num_envs=20)
        dream = hop.DreamPlayers(mind, 8, [0, 1, 2, 3], 3)
        for _ in range(40):
            mind.look(env)
            actions = np.full((20, 4), -7)
            dream.act(actions)
            assert (actions[:8] == -7).all()
            rows, legal = np.arange(8, 20), env.legal[8:]
            assert np.take_along_axis(legal, actions[8:, :, None], 2).all()
            assert (actions[8:][~env.alive[8:]] == STAY).all()
            if goal_mode != "none":
                assert np.take_along_axis(mind.there()[rows], dream.goal, 1).all()
                kind = np.take_along_axis(mind.kinds_of_goals()[rows].argmax(2), dream.goal, 1)
                left = (env.states[8:, PLAYERS + 4 :, None] == ITEM + np.arange(2)).any(1)  # (12, kinds)
                possible = np.concatenate([left, np.ones((12, 2), bool)], 1)
                wanted = np.take_along_axis(possible, dream.kind, 1)
                assert (kind == dream.kind)[wanted & env.alive[8:]].mean() > 0.95
            actions[:8] = STAY
            done = env.step(actions)[-1]["done"].copy()
            mind.watch(actions, env.alive, done)
        assert dream.goals().shape == (12, 4, mind.goal_size)


# targets


def test_lambda_returns_by_hand():
    """gamma 0.5, lambda 0.5. Player 0 plays on; player 1 ends in step 1 and a new episode begins.

    player 0: step 2: 1 + .5 * 4 = 3; step 1: 0 + .5 * (.5 * 3 + .5 * 3) = 1.5; step 0: 2 + .5 * (.5 * 2 + .5 * 1.5)
    player 1: step 2: 0 + .5 * 8 = 4; step 1: 5, nothing after the end; step 0: 0 + .5 * (.5 * 2 + .5 * 5) = 1.75
    """
    reward = np.array([[[2.0, 0.0]], [[0.0, 5.0]], [[1.0, 0.0]]], np.float32)  # (T=3, B=1, N=2)
    value = np.array([[[1.0, 1.0]], [[2.0, 2.0]], [[3.0, 9.0]]], np.float32)
    ended = np.array([[[False, False]], [[False, True]], [[False, False]]])
    got = hop.lambda_returns(reward, value, np.array([[4.0, 8.0]], np.float32), ended, 0.5, 0.5)
    assert got[:, 0].tolist() == [[2.875, 1.75], [1.5, 5.0], [3.0, 4.0]]


def heading(action, taken, alive=None, done=None, value=None, seed=0, **settings):
    """heading_for of one player of one game."""
    length = len(action)
    column = (length, 1, 1)
    alive = np.ones(column, bool) if alive is None else np.array(alive, bool).reshape(column)
    done = np.zeros((length, 1), bool) if done is None else np.array(done, bool).reshape(length, 1)
    value = np.zeros(column, np.float32) if value is None else np.array(value, np.float32).reshape(column)
    action, taken = np.array(action).reshape(column), np.array(taken).reshape(column)
    got = hop.heading_for(action, taken, alive, done, value, hop.Args(**settings), np.random.default_rng(seed))
    return got[:, 0, 0].tolist()


def test_hindsight_by_hand():
    """Step whose state a player was heading for: the next success within the horizon, else the next try."""
    M = 0  # a move
    assert heading([M, STAG, M, M, HARE], [0, 0, 0, 0, 2]) == [4, 4, 4, 4, 4]  # a success overrules a try
    assert heading([M, STAG, M, M, M], [0] * 5) == [1, 1, -1, -1, -1]
    assert heading([M, STAG, M, STAG, M], [0] * 5) == [1, 1, 3, 3, -1]  # the next try
    assert heading([M, STAG, M, M, HARE], [0, 0, 0, 0, 2], horizon=3) == [1, 1, 4, 4, 4]  # within the horizon
    assert heading([M, M, M, M, HARE], [0, 0, 0, 0, 2], horizon=1) == [-1, -1, -1, -1, 4]
    # an episode ends in step 1: nothing of the next one is known before
    assert heading([M, M, M, HARE], [0, 0, 0, 2], done=[0, 1, 0, 0]) == [-1, -1, 3, 3]
    assert heading([M, HARE, M, HARE], [0, 2, 0, 2], done=[0, 1, 0, 0]) == [1, 1, 3, 3]
    # a player that left heads nowhere, whatever its column says
    assert heading([HARE, STAG, M, M], [2, 0, 0, 0], alive=[1, 0, 0, 1], done=[0, 0, 1, 0]) == [0, -1, -1, -1]


def test_other_selectors_by_hand():
    value = [1.0, 5.0, 3.0, 4.0]
    nothing = [0] * 4
    assert heading(nothing, nothing, value=value, selector="optimistic") == [1, 1, 3, 3]
    assert heading(nothing, nothing, value=value, selector="conservative") == [0, 2, 2, 3]
    assert heading(nothing, nothing, value=value, selector="optimistic", horizon=2) == [1, 1, 3, 3]
    assert heading(nothing, nothing, value=value, selector="conservative", horizon=2) == [0, 2, 2, 3]
    assert heading(nothing, nothing, value=value, selector="optimistic", done=[1, 0, 0, 0]) == [0, 1, 3, 3]
    gone = {"alive": [1, 1, 0, 0], "value": value}
    assert heading(nothing, nothing, selector="optimistic", **gone) == [1, 1, -1, -1]
    seen = {tuple(heading(nothing, nothing, selector="random", seed=seed)) for seed in range(60)}
    assert {steps[0] for steps in seen} == {0, 1, 2, 3} and {steps[3] for steps in seen} == {3}


def test_goals_of_hindsight():
    env, mind = make_mind("oracle")
    steps = np.array([[[1, -1]], [[1, -1]]])  # (T=2, B=1, N=2)
    action = np.array([[[0, 0]], [[HARE, STAG]]])
    goals = hop.goals_of(steps, np.zeros((2, 1, 2, *env.spec.obs_shape), np.uint8), action, mind)
    assert goals[:, 0, 0].tolist() == [[0.0, 1.0, 0.0, 0.0, 0.0]] * 2  # the hare
    assert goals[:, 0, 1].tolist() == [[0.0, 0.0, 0.0, 1.0, 0.0]] * 2  # hidden
    env, mind = make_mind("learned")
    obs = np.stack([env.obs[:, :2], env.obs[:, 2:]])  # (T=2, B=2, N=2, ...)
    steps = np.array([[[1, 0], [-1, 1]], [[1, -1], [1, 1]]])
    goals = hop.goals_of(steps, obs, np.zeros((2, 2, 2), int), mind)
    for t, b, i in product(range(2), range(2), range(2)):
        want = mind.hidden_goal
        if steps[t, b, i] >= 0:
            z = mind.nets["vae"].encode(torch.from_numpy(obs[steps[t, b, i], b, i][None]))[0][0].numpy()
            want = np.concatenate([z, [0.0, 0.0, 0.0]])
        assert np.abs(goals[t, b, i] - want).max() < 1e-5


def test_half_of_what_is_met_teaches_habits():
    """Of players met in games half the goals become "habit", the others stay; without goals there is no such thing."""
    for goal_mode in ("oracle", "none"):
        mind = make_mind(goal_mode)[1]
        goals = np.random.default_rng(0).random((4000, mind.goal_size)).astype(np.float32)
        taught = hop.with_habits(goals, mind, np.random.default_rng(1))
        habit = (taught == mind.habit_goal).all(1)
        assert (taught[~habit] == goals[~habit]).all()
        assert habit.mean() == pytest.approx(0.5, abs=0.05) if goal_mode == "oracle" else not habit.any()


def test_habits_start_as_what_is_known_of_anybody_and_follow_those_met():
    """Before the first game a habit predicts what a hidden goal does; learning from players who never move teaches the
    habit alone, as rule-based play (which hides goals, too) says otherwise."""
    mind = make_mind("oracle", num_envs=16)[1]
    nets, args, rng = mind.nets, mind.args, np.random.default_rng(0)
    rows, sequences = hop.offline_play(replace(args, offline_steps=400), mind, 3)
    nets.requires_grad_(True)
    hop.learn_offline(replace(args, offline_updates=4), nets, rows, sequences, rng)
    assert torch.equal(nets["moa"].goal[-3], nets["moa"].goal[-2])
    met = {name: x[rows["action"] < STAY] for name, x in rows.items()}  # the same boards, where rules say: move
    met |= {"action": np.full(len(met["t"]), STAY)}
    met["goal"] = hop.with_habits(met["goal"], mind, rng)
    optimizer = torch.optim.Adam(nets["moa"].parameters(), lr=1e-2)
    for _ in range(60):
        loss = hop.moa_loss(nets["moa"], hop.moa_batch(args, met, rows, rng), args.hide_prob, rng)
        hop.step(optimizer, loss, nets["moa"], args)
    with torch.no_grad():
        board = [torch.from_numpy(met[name]) for name in ("ids", "t", "legal")]
        stays = [
            nets["moa"](*board, torch.from_numpy(goal).expand(len(met["t"]), -1)).exp()[:, STAY].mean().item()
            for goal in (mind.habit_goal, mind.hidden_goal)
        ]
    assert stays[0] > 0.9 and stays[1] < 0.7


# learning


def test_rotating_the_seats_rotates_beliefs_and_plans():
    """No index bias with a shared policy: who sat in seat i and sits in i + 1 believes and plans the same."""
    nets = make_nets(envs.game(ID), "learned")
    states = play_some(num=24)[1]
    turned = states.copy()
    turned[:, PLAYERS : PLAYERS + 4] = np.roll(states[:, PLAYERS : PLAYERS + 4], 1, axis=1)
    minds = []
    for boards in (states, turned):
        env, mind = make_mind("learned", num_envs=24, nets=nets, trees=3, simulations=16)
        env.set_states(boards)
        mind.look(env)
        minds.append(mind)
    first, second = minds
    assert np.abs(np.roll(first.beliefs, 1, axis=1) - second.beliefs)[second.alive].max() < 1e-5
    assert np.abs(np.roll(first.probs, 1, axis=1) - second.probs).max() < 1e-5
    second.streams[:] = np.roll(first.streams.reshape(24, 4), 1, axis=1).ravel()
    for name in ("beliefs", "goal"):
        getattr(second, name)[:] = np.roll(getattr(first, name), 1, axis=1)
    rows, focal = np.nonzero(first.alive)
    plans = first.plan(states, rows, focal, 4.0), second.plan(turned, rows, (focal + 1) % 4, 4.0)
    for name, a, b in zip(("policy", "value", "prior", "goals", "depth"), *plans, strict=True):
        assert a.tobytes() == b.tobytes(), name
    assert len(np.unique(plans[0][1])) > 40 and plans[0][0].max(1).mean() > 0.3  # and these plans differ


def learning_rows(num_nets: int, goal_mode="oracle", seed=0):
    """Rows of real play as the training loop makes them: for Agent, for the opponent model, and sequences."""
    env = envs.make(ID, num_envs=16, seed=seed)
    nets = make_nets(env.game, goal_mode, num_nets).requires_grad_(True)
    things, rng, size = hop.Things(env.game), np.random.default_rng(seed), nets["moa"].goal.shape[0]
    own, moa, steps = {}, {}, {}
    for _ in range(12):
        alive, legal = env.alive.copy(), env.legal.copy()
        actions = (rng.random(legal.shape) * legal).argmax(2)
        policy = rng.random(legal.shape).astype(np.float32) * legal
        goal = rng.normal(size=(16, 4, size)).astype(np.float32)
        now = {"ids": things(env.obs), "t": np.repeat(things.time(env.t)[:, None], 4, 1), "legal": legal}
        mine = {"goals": rng.normal(size=(16, 4, 3 * size)).astype(np.float32)}
        mine |= {"policy": policy / policy.sum(2, keepdims=True), "net": np.tile(np.arange(4) % num_nets, (16, 1))}
        mine |= {"returns": rng.normal(size=(16, 4)).astype(np.float32)}
        theirs = {"action": actions, "goal": goal}
        for store, arrays in ((own, now | mine), (moa, now | theirs)):
            for name, array in arrays.items():
                store.setdefault(name, []).append(array[alive])
        known = {"known": alive, "resets": np.zeros((16, 4), bool), "last": np.full((16, 4), 3)}
        for name, array in (now | theirs | known).items():
            steps.setdefault(name, []).append(array.reshape(64, *array.shape[2:]))
        env.step(actions)
    own, moa = ({name: np.concatenate(parts) for name, parts in store.items()} for store in (own, moa))
    sequences = {name: torch.from_numpy(np.stack(parts)) for name, parts in steps.items()}
    return nets, own, moa, sequences | {"memory": torch.zeros(64, 16)}


def test_every_parameter_gets_a_gradient():
    nets, own, moa, sequences = learning_rows(2)
    mb_rows = np.stack([np.flatnonzero(own["net"] == p)[:200] for p in range(2)])
    mb = {name: torch.from_numpy(rows[mb_rows]) for name, rows in own.items() if name != "net"}
    losses = hop.agent_loss(hop.Args(), nets["agent"], mb)
    (losses["policy_loss"] + losses["value_loss"]).backward()
    batch = {name: torch.from_numpy(rows) for name, rows in moa.items()}
    hop.moa_loss(nets["moa"], batch, 0.15, np.random.default_rng(0)).backward()
    for part in ("agent", "moa"):
        for name, weight in nets[part].named_parameters():
            grad = weight.grad.reshape(2, -1) if part == "agent" else weight.grad.reshape(1, -1)
            assert torch.isfinite(grad).all() and (grad != 0).any(1).all(), (part, name)
    nets.zero_grad()
    hop.reader_loss(nets, sequences).backward()
    for name, weight in nets["reader"].named_parameters():
        assert torch.isfinite(weight.grad).all() and weight.grad.any(), name


def test_goal_inference_learns_nothing_from_players_that_left_or_from_before_a_reset():
    nets, _, _, sequences = learning_rows(1)
    assert 50 < (~sequences["known"]).sum() < sequences["known"].numel() / 2
    garbage = {name: x.clone() for name, x in sequences.items()}
    garbage["goal"][~sequences["known"]] = 7.5
    garbage["action"][~sequences["known"]] = STAY
    assert torch.equal(hop.reader_loss(nets, sequences), hop.reader_loss(nets, garbage))
    garbage["goal"][sequences["known"]] += 1.0
    assert hop.reader_loss(nets, sequences) != hop.reader_loss(nets, garbage)
    late = {name: x[6:] if name != "memory" else x for name, x in sequences.items()}
    sequences["resets"][6:7] = True  # a new episode: what came before cannot matter
    for step in range(6):
        sequences["known"][step] = False
    assert torch.allclose(hop.reader_loss(nets, sequences), hop.reader_loss(nets, late), rtol=1e-5)


def learn_once(nets, own, moa, **settings):
    args = hop.Args(goal_mode="none", updates=3, batch_rows=64, offline_share=0.5, **settings)
    optimizers = {name: torch.optim.Adam(nets[name].parameters(), lr=1e-3) for name in ("agent", "moa", "reader")}
    hop.learn(args, nets, optimizers, own, moa, moa, {}, np.random.default_rng(0))
    return {name: weight.detach().clone() for name, weight in nets["agent"].named_parameters()}


def test_independent_nets_learn_each_from_its_own_player():
    learned = []
    for change in (False, True):
        nets, own, moa, _ = learning_rows(4)
        if change:
            rows = own["net"] == 2
            own["returns"][rows] += 3.0
            own["policy"][rows] = own["legal"][rows] / own["legal"][rows].sum(1)[:, None]
        learned.append(learn_once(nets, own, moa))
    for name, weight in learned[0].items():
        for net in range(4):
            assert torch.equal(weight[net], learned[1][name][net]) == (net != 2), (name, net)
    env, mind = make_mind(nets=make_nets(envs.game(ID), num_nets=4))
    assert mind.net_of_seat.tolist() == [0, 1, 2, 3]
    some = hop.Mind(hop.Args(goal_mode="oracle", hidden=16), env.game, make_nets(env.game, num_nets=2), 2, [1, 3], 0)
    assert some.net_of_seat[[1, 3]].tolist() == [0, 1]


def test_each_seat_plans_with_its_own_net():
    game, states = play_some(num=6, steps=1)
    plans = []
    for changed in (False, True):
        nets = make_nets(game, num_nets=4)
        if changed:
            nets["agent"].value_bias[2] += 1.0
        env, mind = make_mind(num_envs=6, nets=nets, trees=2, simulations=8)
        env.set_states(states)
        mind.look(env)
        rows, focal = np.nonzero(mind.alive)
        plans.append(mind.plan(states, rows, focal, 4.0)[1])
    assert ((plans[0] != plans[1]) == (focal == 2)).all()


def test_learners_gradients_are_clipped_apart():
    nets = make_nets(envs.game(ID), num_nets=2).requires_grad_(True)
    for weight in nets["agent"].parameters():
        weight.grad = torch.ones_like(weight)
        weight.grad[0] *= 100.0
        weight.grad[1] *= 1e-6
    hop.clip_gradients(nets["agent"], 0.5)
    norm = torch.stack([w.grad.flatten(1).norm(dim=1) for w in nets["agent"].parameters()]).norm(dim=0)
    assert norm[0].item() == pytest.approx(0.5, rel=1e-4)
    assert nets["agent"].value_bias.grad[1].item() == pytest.approx(1e-6)


# whole runs


@pytest.fixture(scope="module")
def vae_ckpt(tmp_path_factory) -> str:
    args = pretrain_vae.Args(out_dir=str(tmp_path_factory.mktemp("vae")), num_steps=1500, epochs=1, hidden=32, dim=8,
                             pictures=False)  # fmt: skip
    return str(pretrain_vae.train(args))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, vae_ckpt) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    done = run("--run-dir", str(run_dir), "--vae-ckpt", vae_ckpt, *TINY)
    assert done.returncode == 0, done.stderr
    return run_dir


def check_stored_rows(run_dir: Path) -> None:
    """What the networks learn from: steps of players on the board alone, their actions legal, policies masked."""
    stored = load_file(run_dir / "checkpoints" / "last" / "resume.safetensors")
    parts = {name.split(".")[0] for name in stored if name.startswith("replay")}
    assert parts
    for part in parts:
        rows = {name.removeprefix(f"{part}."): x for name, x in stored.items() if name.startswith(f"{part}.")}
        for who in ("own", "moa"):
            assert rows[f"{who}.ids"].any(1).all() and len(rows[f"{who}.ids"]) > 20
        assert rows["moa.legal"].gather(1, rows["moa.action"][:, None]).all()
        assert (rows["moa.action"] != STAY).any() and rows["moa.legal"].sum(1).min() >= 2
        assert not rows["own.policy"][~rows["own.legal"]].any()
        assert torch.allclose(rows["own.policy"].sum(1), torch.ones(len(rows["own.policy"])), atol=1e-4)


def test_a_run_leaves_what_it_should(finished):
    rows = read_metrics(finished)
    assert int(rows[-1]["global_step"]) == 640
    assert sum(bool(row["eval/return"]) for row in rows) == sum(bool(row["eval/raw_return"]) for row in rows) == 2
    for name in ("charts/episodic_return", "charts/episodic_return-player4", "charts/stag_rate", "losses/policy_loss",
                 "losses/value_loss", "losses/moa_loss", "losses/goal_loss", "losses/explained_variance",
                 "planner/depth", "planner/kl", "planner/policy_gain", "moa/top1", "moa/top3", "moa/ce",
                 "moa/recall_action0", "moa/top1-player4", "goal/known", "goal/belief"):  # fmt: skip
        assert any(row[name] for row in rows), name
    result = json.loads((finished / "result.json").read_text())
    assert result["finished"] and result["global_step"] == 640 and result["eval"]["episodes"] == 8
    assert {"eval_raw", "eval_greedy", "eval_best"} <= result.keys()
    assert (finished / "curve.png").stat().st_size > 5000
    assert list(finished.glob("events.out.tfevents.*"))
    for name in ("last", "best"):
        spec = json.loads((finished / "checkpoints" / name / "spec.json").read_text())
        assert spec["script"] == "hopplus_mcts.py" and spec["env_id"] == ID and spec["learners"] == [0, 1, 2, 3]
    check_stored_rows(finished)


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_stopped_run_resumes_to_the_same_bits(finished, vae_ckpt, tmp_path, how):
    run_dir = tmp_path / "stopped"
    command = [sys.executable, str(ROOT / "hopplus_mcts.py"), "--run-dir", str(run_dir), "--vae-ckpt", vae_ckpt, *TINY]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    deadline = time.time() + 500
    while not (run_dir / "checkpoints" / "last" / "spec.json").exists() and process.poll() is None:
        assert time.time() < deadline
        time.sleep(0.005)
    process.send_signal(how)
    out, err = process.communicate(timeout=100)
    if how == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 128 + how, err
        assert f"--resume {run_dir}" in out
    assert not (run_dir / "result.json").exists()
    resumed = run("--resume", str(run_dir))
    assert resumed.returncode == 0, resumed.stderr
    for name in ("last", "best"):
        weights, expected = (load_file(d / "checkpoints" / name / "weights.safetensors") for d in (run_dir, finished))
        assert all(torch.equal(weights[key], expected[key]) for key in expected)
    assert read_metrics(run_dir) == read_metrics(finished)
    result, expected = (json.loads((d / "result.json").read_text()) for d in (run_dir, finished))
    assert result["eval"] == expected["eval"]


def test_resuming_a_finished_run_says_so(finished):
    again = run("--resume", str(finished))
    assert again.returncode == 0 and "finished already" in again.stdout


@pytest.mark.parametrize(
    "flags",
    [
        ["--goal-mode", "oracle", "--root", "gumbel", "--roles", "hop,ns,ns,ns", "--dream-envs", "0"],
        ["--goal-mode", "none", "--env-id", "msd-4x4", "--no-shared-policy"],
        pytest.param(["--goal-mode", "oracle", "--env-id", "msd-4x4", "--no-intra-om"], marks=pytest.mark.slow),
        pytest.param(["--goal-mode", "oracle", "--roles", "hop,ns,nh,random", "--no-inter-om"], marks=pytest.mark.slow),
        pytest.param(["--goal-mode", "oracle", "--opponents", "perfect", "--no-shared-policy"], marks=pytest.mark.slow),
        pytest.param(["--goal-mode", "none", "--prosocial", "--max-block-comp", "1"], marks=pytest.mark.slow),
        pytest.param(["--goal-mode", "none", "--selector", "random", "--start-window", "3"], marks=pytest.mark.slow),
        pytest.param(["--goal-mode", "none", "--env-id", "msh-4h1s-8x8"], marks=pytest.mark.slow),
    ],
)
def test_other_settings_run(flags, tmp_path):
    done = run("--run-dir", str(tmp_path / "run"), *TINY, *flags)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert np.isfinite(result["eval"]["return"])
    check_stored_rows(tmp_path / "run")
    if "hop,ns,ns,ns" in flags:
        spec = json.loads((tmp_path / "run" / "checkpoints" / "last" / "spec.json").read_text())
        assert spec["learners"] == [0]


SMALL_PRETRAINING = """
import functools, runpy, sys
import pretrain_vae
pretrain_vae.Args = functools.partial(pretrain_vae.Args, num_steps=1500, epochs=1, hidden=32, dim=8)
sys.argv = [sys.argv[1], *sys.argv[2:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_missing_goal_checkpoint_is_made(tmp_path):
    """In an empty folder, with the pretraining cut short; the next run would find what this one made."""
    command = [sys.executable, "-c", SMALL_PRETRAINING, str(ROOT / "hopplus_mcts.py"), "--run-dir", "first", *TINY,
               "--total-timesteps", "64", "--eval-every", "0"]  # fmt: skip
    path = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path, env=path)
    assert done.returncode == 0, done.stderr
    assert f"no goal space for {ID}" in done.stdout and (tmp_path / "first" / "result.json").is_file()
    made = list((tmp_path / "vae_ckpts").glob("vae__*/dim8"))
    assert made == [pretrain_vae.find_checkpoint(tmp_path / "vae_ckpts", envs.spec(ID))]


@pytest.mark.slow
def test_a_fresh_clone_trains_at_once(tmp_path):
    done = run("--run-dir", str(tmp_path / "run"), *TINY, cwd=tmp_path)
    assert done.returncode == 0 and "no goal space" in done.stdout, done.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["finished"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--env-id", "msh-9x9"], ["unknown grid game 'msh-9x9'", ID]),
        (["--env-id", "smac-3m"], ["unknown grid game 'smac-3m'"]),
        (["--roles", "hop,ns"], ["all 4 players", "names 2"]),
        (["--roles", "hop,ns,nx,ns"], ["unknown role 'nx'", "random, ns, nh, fix, mix"]),
        (["--roles", "ns,ns,ns,ns"], ["nobody to train"]),
        (["--roles", "hop,ns,ns,ns", "--opponents", "perfect"], ["self-play"]),
        (["--simulations", "0"], ["--simulations must be at least 1"]),
        (["--hide-prob", "1.5"], ["--hide-prob must be from 0 to 1"]),
        (["--start-window", "2"], ["2x2 cannot hold 5 items"]),
        (["--vae-ckpt", "no/such/vae"], ["no/such/vae"]),
        (["--resume", "no/such/run"], ["no/such/run", "no args.json"]),
    ],
)
def test_bad_input_is_one_sentence(arguments, words, tmp_path):
    given = arguments if "--resume" in arguments else [*TINY, *arguments, "--run-dir", str(tmp_path / "x")]
    with pytest.raises(envs.ConfigError) as caught:
        hop.train(*hop.prepare(tyro.cli(hop.Args, args=given)))
    assert "\n" not in str(caught.value) and all(word in str(caught.value) for word in words), caught.value
    assert not (tmp_path / "x").exists()


def test_bad_input_is_one_line_and_exit_code_2(finished, tmp_path):
    for arguments, words in (
        (["--roles", "hop,ns", "--run-dir", str(tmp_path / "x")], "names 2"),
        (["--run-dir", str(finished), *TINY], "already holds a run"),
    ):
        done = run(*arguments)
        assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1 and words in done.stderr, done.stderr
    assert not (tmp_path / "x").exists()


def test_every_argument_is_explained():
    text = (ROOT / "hopplus_mcts.py").read_text()
    for field in hop.fields(hop.Args):
        assert re.search(rf"    {field.name}: .*\n    \"\"\"", text), field.name


# playing what was trained


def test_a_loaded_policy_is_the_trained_net(finished):
    env = envs.make(ID, num_envs=12, seed=9)
    weights = load_file(finished / "checkpoints" / "best" / "weights.safetensors")
    policy = load_policy(str(finished), env, 2, seed=0)
    for name, weight in policy.mind.nets.state_dict().items():
        assert torch.equal(weight, weights[name]), name
    rng, gone = np.random.default_rng(0), 0
    for _ in range(12):
        actions = (rng.random(env.legal.shape) * env.legal).argmax(2)
        actions[:, 2] = policy.act(env)
        assert np.take_along_axis(env.legal, actions[:, :, None], 2).all()
        gone += (~env.alive[:, 2]).sum()
        info = env.step(actions)[-1]
        policy.watch(env, actions, info)
    assert gone  # and STAY was all it could do then
    with pytest.raises(envs.ConfigError, match=r"trained on msh-4h1s-4x4 with obs_shape \[4, 4, 7\]"):
        load_policy(str(finished), envs.make("msh-4h1s-8x8", num_envs=2), 0, seed=0)


def test_evaluate_plays_a_checkpoint(finished, tmp_path):
    command = [sys.executable, str(ROOT / "evaluate.py"), "--roles", f"{finished},ns,{finished},random", "--episodes",
               "30", "--json", str(tmp_path / "e.json")]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "e.json").read_text())["rows"]
    assert [row["role"] for row in rows[:4]] == [str(finished), "ns", str(finished), "random"]
    assert all(np.isfinite(row["return"]) for row in rows)
