"""envs/trees.py and the search over it in hopplus_mcts.py: by hand, against a plain search, and against enumeration."""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from boards import HARE, ID, blank_nets, make_nets, make_state, play_some
from torch import nn

import envs
import hopplus_mcts as hop
import pretrain_vae
from envs import trees as forest
from envs.grid import BLOCK, GONE, ITEM, LEFT, PLAYERS, RIGHT, STAY, T
from envs.players import RulePlayers
from envs.rng import make_streams, unit_at
from envs.sight import Things
from envs.trees import AIMLESS, HABIT, UNKNOWN, Roots, Trees

ROOT = Path(__file__).resolve().parent.parent
torch.set_num_threads(1)


def make_roots(game, nets, states, focal, code=None, goal=None, cell=None, seed: int = 0) -> Roots:
    """Roots with given goals (M, N-1, G) about code and cell (M, N-1), or with unknown ones."""
    states, num, others = np.asarray(states, np.int16), len(states), game.num_players - 1
    code = np.full((num, others), UNKNOWN) if code is None else code
    cell = np.full((num, others), -1) if cell is None else cell
    unknown = nets["models"].flag(pretrain_vae.UNKNOWN).numpy()
    goal = np.tile(unknown, (num, others, 1)) if goal is None else goal
    return Roots(states.copy(), np.asarray(focal, np.int64), cell, code, goal, make_streams(seed, num))


def search_from(args, game, nets, roots: Roots, simulations: int | None = None) -> hop.Planner:
    """A planner that has grown all trees of `roots`, in one block."""
    planner = hop.Planner(args, game, nets, None)
    planner.BLOCK, planner.simulations = len(roots.state), simulations or args.simulations
    planner.search(roots)
    return planner


def grown(planner) -> tuple:
    """The trees of a planner's only search, their leaves and what follows these."""
    [arrays] = planner.room.made.values()
    return arrays


def grow(*problem) -> Trees:
    return grown(search_from(*problem))[0]


def random_roots(num: int = 60, seed: int = 1, **settings):
    """Boards with blocks, some players gone, random networks, and goals of all sorts: about items that are there or
    not, anywhere or in a cell, or about none."""
    game, states = play_some(num=num, seed=seed, height=5, width=5, max_block_comp=2)
    args, nets = make_nets(hop, game, **settings)
    rng, others, size = np.random.default_rng(seed), game.num_players - 1, nets["models"].goal_size
    focal = np.array([rng.choice(np.flatnonzero(row)) for row in game.alive(states)])
    code = rng.choice([HABIT, AIMLESS, UNKNOWN, ITEM, ITEM + 1], size=(num, others))
    goal = rng.normal(size=(num, others, size)).astype(np.float32)
    goal[..., -pretrain_vae.FLAGS :] = 0.0
    flags = ((HABIT, pretrain_vae.HABIT), (UNKNOWN, pretrain_vae.UNKNOWN), (AIMLESS, pretrain_vae.AIMLESS))
    for which, flag in flags:
        goal[code == which] = nets["models"].flag(flag).numpy()
    cell = np.full((num, others), -1)
    for m, k in np.argwhere((code >= ITEM) & (rng.random(code.shape) < 0.6)):
        places = np.flatnonzero(states[m, PLAYERS + 4 :] == code[m, k])
        cell[m, k] = rng.choice(places if len(places) and rng.random() < 0.8 else np.arange(25))
    return args, game, nets, make_roots(game, nets, states, focal, code, goal, cell, seed)


def used_nodes(trees: Trees, m: int) -> list[int]:
    return [0, *(node for node in trees.child[m].ravel() if node > 0)]


# the search


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


def corridor(horizon: int, move: float = 0.7, **settings):
    """1x4: two cells to walk, a block, and behind it a hare and another player that only stays, so that there are
    exactly two legal actions everywhere. Each step costs 0.1; the network says 0.2 for cell 0, 0.6 for cell 1, and
    moves with probability `move`."""
    game = envs.game(ID, height=1, width=4, num_players=2, num_stags=0, num_hares=1, time_reward=-0.1,
                     horizon=horizon, max_block_comp=1)  # fmt: skip
    args, nets = blank_nets(hop, game, gamma=0.5, **settings)
    things, agent, hidden = Things(game), nets["agent"], args.hidden_size
    for cell, value in ((0, 0.2), (1, 0.6)):
        agent.embedding[things.table[cell, cell * things.planes], hidden] = value
    agent.critic.weight[0, 0] = agent.value_head.weight[0, 0] = 1.0
    agent.policy_head.bias[[LEFT, RIGHT]], agent.policy_head.bias[STAY] = np.log(move), np.log(1 - move)
    nets["models"].moa.head.bias[STAY] = 60.0
    state = make_state(game, [0, 3], {2: BLOCK, 3: ITEM + 1})
    return args, game, nets, make_roots(game, nets, [state], [0])


def test_two_actions_by_hand():
    """gamma 0.5, c 1, one outcome; Q of what is not tried is the node's value; Q is scaled by all Q seen so far.

    1: nothing to scale, so the prior decides: move (0.7). Its leaf is worth 0.6: -0.1 + 0.5 * 0.6 = 0.2
    2: one Q only; sqrt 2 * 0.7 / 2 = 0.49 beats sqrt 2 * 0.3 = 0.42: move, then again move (back to 0.2):
       -0.1 + 0.5 * 0.2 = 0 there, -0.1 + 0.5 * 0 = -0.1 at the root; Q = (0.2 - 0.1) / 2 = 0.05; Qs from 0 to 0.2
    3: move 0.05 / 0.2 + sqrt 3 * 0.7 / 3 = 0.65; stay counts as 0.2 -> 1 + sqrt 3 * 0.3 = 1.52: stay;
       -0.1 + 0.5 * 0.2 = 0
    4: move 0.25 + 2 * 0.7 / 3 = 0.72; stay 0 + 2 * 0.3 / 2 = 0.3: move
    """
    problem = corridor(horizon=30, outcomes=1)
    for simulations, (moves, stays) in enumerate(((1, 0), (2, 0), (2, 1), (3, 1)), start=1):
        trees = grow(*problem, simulations)
        assert trees.visits[0, 0].tolist() == [0, 0, 0, moves, stays, 0, 0]
    trees = grow(*problem, 3)
    assert trees.q_values[0, 0, [RIGHT, STAY]] == pytest.approx([0.05, 0.0], abs=1e-6)
    assert trees.bounds[0] == pytest.approx([0.0, 0.2], abs=1e-6)
    assert trees.depth[0].tolist() == [0, 1, 2, 1] and trees.tried[0, 0] == 3


@pytest.mark.parametrize(
    ("horizon", "outcomes", "c_puct"),
    [(30, 1, 1.0), (30, 2, 1.0), (4, 1, 1.0), (4, 3, 1.0), (30, 1, 0.0), (30, 1, 8.0)],
)
def test_two_actions_as_a_plain_search_does_it(horizon, outcomes, c_puct):
    """The whole tree, node by node, after every number of simulations; short horizons end inside the tree."""
    move_prior = 0.737  # no ties
    problem = corridor(horizon, move_prior, outcomes=outcomes, c_puct=c_puct)
    for simulations in (1, 2, 5, 9, 17, 40):
        trees = grow(*problem, simulations)
        root = plain_search(simulations, outcomes, horizon, move_prior, c=c_puct)
        pairs = [(0, root)]
        while pairs:
            node, plain = pairs.pop()
            move = RIGHT if plain.cell == 0 else LEFT
            assert trees.state[0, node, PLAYERS] == plain.cell and trees.state[0, node, T] == plain.t
            assert trees.ended[0, node] == plain.ended
            for name, action in (("move", move), ("stay", STAY)):
                visits = plain.visits[name]
                assert trees.visits[0, node, action] == visits
                assert trees.q_values[0, node, action] * visits == pytest.approx(plain.total[name], abs=1e-5)
                for slot in range(outcomes):
                    child = trees.child[0, node, action, slot]
                    assert (child >= 0) == ((name, slot) in plain.children)
                    if child >= 0:
                        pairs.append((child, plain.children[name, slot]))
        assert trees.visits[0, 0].sum() == simulations


def test_backup_by_hand():
    """A chain with rewards 1, 2, 4 and a leaf worth 8, gamma 0.5: 4 + 4 = 8, 2 + 4 = 6, 1 + 3 = 4; then a sibling."""
    game = envs.game(ID)
    trees, leaves = forest.make_trees(game, 1, 4, 1), forest.make_leaves(game, 1)
    trees.bounds[0] = 1e30, -1e30
    trees.parent[0, 1:5], trees.action[0, 1:5] = (0, 1, 2, 1), (3, 4, 5, 0)
    trees.reward[0, 1:5], trees.value[0, 3:5] = (1.0, 2.0, 4.0, 0.0), (8.0, 2.0)
    leaves.node[0], gamma = 3, np.array([0.5])
    hop.back_up(trees, leaves, gamma)
    assert [trees.q_values[0, 0, 3], trees.q_values[0, 1, 4], trees.q_values[0, 2, 5]] == [4.0, 6.0, 8.0]
    assert trees.bounds[0].tolist() == [4.0, 8.0]
    leaves.node[0] = 4
    hop.back_up(trees, leaves, gamma)  # 0 + 0.5 * 2 = 1 at node 1, then 1 + 0.5 * 1 = 1.5 at the root
    assert trees.visits[0, 0, 3] == 2 and trees.q_values[0, 0, 3] == 2.75 and trees.q_values[0, 1, 0] == 1.0
    assert trees.bounds[0].tolist() == [1.0, 8.0]
    assert trees.visits.sum() == trees.tried.sum() == 5


def test_no_value_after_leaving_or_after_the_end():
    """The network says 5 everywhere. A hare at once pays 1 and no more; time running out pays nothing; the last prey
    taken by another ends it too; one step to a hare is gamma."""
    game = envs.game(ID, height=1, width=2, num_players=2, num_stags=0, num_hares=1, horizon=9)
    args, nets = blank_nets(hop, game, gamma=0.9, simulations=60)
    nets["agent"].value_head.bias += 5.0
    nets["models"].moa.head.bias[HARE] = 60.0  # the other takes the hare when it can
    states = [
        make_state(game, [1, GONE], {1: ITEM + 1}),  # on the hare
        make_state(game, [1, GONE], {1: ITEM + 1}, t=8),  # in the last step
        make_state(game, [0, 1], {1: ITEM + 1}),  # the other takes the last prey now
        make_state(game, [0, GONE], {1: ITEM + 1}, t=7),  # one step away, two steps left
        make_state(game, [1, 1], {1: ITEM + 1}),  # shared with the other: one half
    ]
    trees = grow(args, game, nets, make_roots(game, nets, states, [0] * 5))
    q = trees.q_values[:, 0]  # (5, A)
    assert (trees.visits[0, 0, [LEFT, STAY, HARE]] > 0).all() and q[0, HARE] == 1.0
    assert q[1, [LEFT, STAY]].tolist() == [0.0, 0.0] and q[1, HARE] == 1.0
    assert trees.visits[2, 0, [RIGHT, STAY]].sum() == 60 and (q[2] == 0.0).all()
    grandchild = trees.child[3, 0, RIGHT, 0]
    assert trees.q_values[3, grandchild, HARE] == 1.0 and trees.visits[3, grandchild, HARE] > 0
    assert 0.0 < q[3, RIGHT] <= 0.9
    assert not trees.q_values[3, trees.child[3, 0, STAY, 0]].any()  # too late: time runs out on the way
    assert q[4, HARE] == 0.5 and q[4, STAY] == 0.0
    for m in range(5):
        for node in used_nodes(trees, m):
            assert trees.value[m, node] == (0.0 if trees.ended[m, node] else 5.0)
            if trees.ended[m, node]:
                assert not trees.visits[m, node].any() and (trees.child[m, node] == -1).all()


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


@pytest.mark.parametrize("other", [follow_preference, lean_to_preference])
def test_search_finds_the_exact_best_response(other):
    """3x3, two players, a stag and a hare; the networks know nothing of value (uniform prior, value 0), but how the
    other moves is known: by a fixed order, or drawn with known probabilities, in which case many draws are needed.

    Q is a mean over all visits, also the exploring ones, so it comes from below; hence the shares of the tolerance.
    """
    certain = other is follow_preference
    horizon, simulations, outcomes, trees_each = (4, 12_000, 1, 1) if certain else (2, 4000, 8, 12)
    game = envs.game(ID, height=3, width=3, num_players=2, num_hares=1, horizon=horizon)
    settings = {"simulations": simulations, "outcomes": outcomes, "gamma": 0.95, "c_puct": 4.0}
    args, nets = blank_nets(hop, game, **settings)
    nets["models"].moa.head.bias += torch.from_numpy(PREFERENCE * (40.0 if certain else 1.5)).float()
    q_of, states = best_response(game, 0.95, other), game.draw(5, 300)
    exact = np.array([q_of(state) for state in states])  # (300, A)
    best, second = -np.sort(-exact, axis=1)[:, :2].T
    clear = best - second > 0.3
    kinds = clear, best > 3.0, best > 0.3, clear & (best > 2.0)
    picked = np.unique(np.concatenate([np.flatnonzero(rows)[:3] for rows in kinds]))
    states, exact, best, clear = states[picked], exact[picked], best[picked], clear[picked]
    roots = make_roots(game, nets, np.repeat(states, trees_each, 0), [0] * len(picked) * trees_each)
    trees = grow(args, game, nets, roots)
    visits, q = (x[:, 0].reshape(-1, trees_each, 7) for x in (trees.visits, trees.q_values))
    found = np.where((visits > 0).all(1), q.mean(1), -np.inf)
    assert (found.max(1) < best + (1e-4 if certain else 0.5)).all()
    assert (found.max(1) > 0.85 * best - (0.02 if certain else 0.3)).all(), (found.max(1), best)
    assert (found.argmax(1) == exact.argmax(1))[clear].all()
    assert (visits.sum(1).argmax(1) == exact.argmax(1))[clear].all()
    assert clear.sum() >= 3 and best.max() > 4.0 and best.min() < 1.0


def test_reward_scale_scales_what_trees_count():
    """Without values of the network all Q are sums of rewards: three times the scale, three times each of them."""
    game, states = play_some(num=40)
    focal = np.array([np.flatnonzero(row)[0] for row in game.alive(states)])
    grown = []
    for scale in (1.0, 3.0):
        args, nets = blank_nets(hop, game, simulations=40, reward_scale=scale)
        grown.append(grow(args, game, nets, make_roots(game, nets, states, focal)))
    assert grown[0].q_values.any() and np.allclose(grown[1].q_values, 3 * grown[0].q_values, atol=1e-4)


# what the networks are asked, and what their answers become


def test_every_node_holds_what_the_networks_say_of_its_state():
    """Of all nodes of all trees at once: raw policy, value, and, where the search went on, the others' chances, given
    the goals drawn; the goal of who left, or whose item is not there, is unknown; after the end nothing is asked."""
    args, game, nets, roots = random_roots(num=50, simulations=30)
    trees, things, models = grow(args, game, nets, roots), Things(game), nets["models"]
    pairs = [(m, node) for m in range(50) for node in used_nodes(trees, m) if not trees.ended[m, node]]
    tree, node = np.array(pairs).T
    went_on = (trees.child[tree, node] >= 0).any((1, 2))
    assert (trees.asked[tree, node] == went_on).all() and 0.2 < went_on.mean() < 0.8
    states, focal, code, cell = trees.state[tree, node], roots.focal[tree], roots.code[tree], roots.cell[tree]
    legal, t, each = game.legal(states), torch.from_numpy(things.time(states[:, T])), np.arange(len(tree))
    board, player = states[:, PLAYERS + 4 :], (focal[:, None] + 1 + np.arange(3)) % 4
    here = game.alive(states)[each[:, None], player]
    there = np.where(cell >= 0, np.take_along_axis(board, np.maximum(cell, 0), 1) == code, code < UNKNOWN)
    there |= (cell < 0) & (code >= ITEM) & (board[:, None, :] == code[:, :, None]).any(2)
    unknown = models.flag(pretrain_vae.UNKNOWN).numpy()
    goals = np.where((here & there)[..., None], roots.goal[tree], unknown)
    assert ((code >= ITEM) & here & ~there).sum() > 50 and ((code >= ITEM) & here & there).sum() > 50
    with torch.no_grad():
        seen = torch.from_numpy(things.of_states(states, each, focal))
        own = seen, t, torch.from_numpy(legal[each, focal]), torch.from_numpy(goals)
        log_prior, value = nets["agent"](*own)
        assert np.abs(trees.prior[tree, node] - log_prior.exp().numpy()).max() < 1e-5
        assert np.abs(trees.value[tree, node] - value.numpy()).max() < 1e-5
        for k in range(3):
            rows = np.flatnonzero(here[:, k] & went_on)
            seen = torch.from_numpy(things.of_states(states, rows, player[rows, k]))
            may = torch.from_numpy(legal[rows, player[rows, k]])
            chances = models.moa(seen, t[rows], may, torch.from_numpy(goals[rows, k])).exp()
            assert np.abs(trees.others[tree, node, k][rows] - chances.cumsum(1).numpy()).max() < 1e-5
    assert len(tree) > 1000 and (~here).sum() > 200 and t.max() > 0.3


def test_every_child_is_a_step_of_the_game():
    """The state, reward and end of each child are those of the rules, for its own action and actions of the others
    that the draws of its parent and slot give; who left never acts, whatever was drawn for it before."""
    args, game, nets, roots = random_roots(num=60, simulations=30, outcomes=2, reward_scale=2.0)
    planner = search_from(args, game, nets, roots)
    trees, leaves, *_ = grown(planner)
    m, parent, action, slot = np.nonzero(trees.child > 0)
    child, before = trees.child[m, parent, action, slot], trees.state[m, parent]
    joint = np.full((len(m), 4), STAY)
    joint[np.arange(len(m)), roots.focal[m]] = action
    for row in range(len(m)):
        for k in range(3):
            player = (roots.focal[m[row]] + 1 + k) % 4
            if before[row, PLAYERS + player] != GONE:
                draw = unit_at(roots.stream[m[row]], int((parent[row] * 2 + slot[row]) * 3 + k))
                joint[row, player] = (draw >= trees.others[m[row], parent[row], k]).sum()
    out, each = game.simulate(before, joint), np.arange(len(m))
    assert not out.illegal.any()
    assert (out.states == trees.state[m, child]).all()
    assert (2.0 * out.reward[each, roots.focal[m]] == trees.reward[m, child]).all()
    ended = (out.terminated | out.truncated)[each, roots.focal[m]]
    assert (ended == trees.ended[m, child]).all() and 10 < ended.sum() < len(m) - 10
    assert (trees.parent[m, child] == parent).all() and (trees.action[m, child] == action).all()
    assert (trees.depth[m, child] == trees.depth[m, parent] + 1).all()
    assert (~game.alive(before)).sum() > 100
    gone = ~game.alive(leaves.state)  # in the last steps
    assert gone.any() and (leaves.joint[gone] == STAY).all() and (leaves.joint[~gone] != STAY).any()


def test_masks_at_every_node():
    """An illegal action has no prior, no visit and no child, at no node; an opponent's illegal action no probability;
    who left does not come back."""
    args, game, nets, roots = random_roots(simulations=40)
    trees = grow(args, game, nets, roots)
    checked = gone = blocked = asked = 0
    for m, focal in enumerate(roots.focal):
        nodes = used_nodes(trees, m)
        legal, alive = game.legal(trees.state[m, nodes]), game.alive(trees.state[m, nodes])
        assert trees.visits[m, 0].sum() == 40
        for node, may, here in zip(nodes, legal, alive, strict=True):
            if trees.ended[m, node]:
                continue
            mine = may[focal]
            assert (trees.legal[m, node] == mine).all() and ((trees.prior[m, node] > 0) == mine).all()
            assert trees.prior[m, node].sum() == pytest.approx(1.0, abs=1e-5)
            assert not trees.visits[m, node, ~mine].any() and (trees.child[m, node, ~mine] == -1).all()
            for k in range(3):
                player = (focal + 1 + k) % 4
                if not here[player]:
                    gone += 1
                    for child in trees.child[m, node].ravel():
                        assert child < 0 or trees.state[m, child, PLAYERS + player] == GONE
                    continue
                if trees.asked[m, node]:
                    probs = np.diff(trees.others[m, node, k], prepend=0.0)
                    assert not probs[~may[player]].any() and probs.sum() == pytest.approx(1.0, abs=1e-5)
                    asked += 1
            checked += 1
            blocked += not mine[:4].all()
    assert checked > 1000 and gone > 200 and blocked > 200 and asked > 1000


# draws


def test_the_others_in_a_tree_move_as_the_model_says():
    """Over many trees of one state, the first draws of the others' moves have the model's frequencies."""
    game = envs.game(ID)
    args, nets = make_nets(hop, game)
    state = make_state(game, [5, 6, 9, 10], {5: ITEM, 6: ITEM + 1, 0: ITEM + 1, 15: ITEM + 1, 3: ITEM + 1})
    num = 4000
    trees = grow(args, game, nets, make_roots(game, nets, [state] * num, [1] * num), 1)
    for k, player in enumerate((2, 3, 0)):
        cell = trees.state[:, 1, PLAYERS + player]
        probs = np.diff(trees.others[0, 0, k], prepend=0.0)
        home = state[PLAYERS + player]
        for action, target in enumerate(game.grid.neighbours[home]):
            assert (cell == target).mean() == pytest.approx(probs[action], abs=0.04)


class RawPolicies(nn.Module):
    """The others as they are, in the place of the opponent model: their own raw policies."""

    def __init__(self, nets, num_others: int):
        super().__init__()
        self.agent, self.goals = nets["agent"], nets["models"].flag(pretrain_vae.UNKNOWN).expand(num_others, -1)

    def forward(self, seen, t, legal, goal):
        return self.agent(seen, t, legal, self.goals.expand(len(seen), -1, -1))[0]


def test_perfect_opponents_move_by_their_own_raw_policies():
    """With the true policies in the place of the opponent model, the trees draw the others' actions from them."""
    game, states = play_some(num=30)
    args, nets = make_nets(hop, game)
    nets["models"].moa = RawPolicies(nets, 3)
    focal = np.array([np.flatnonzero(row)[0] for row in game.alive(states)])
    trees = grow(args, game, nets, make_roots(game, nets, states, focal), 1)
    planner = hop.Planner(args, game, nets, None)
    row, player = np.nonzero(game.alive(states))
    policy = np.zeros((30, 4, 7))
    policy[row, player] = planner.raw(states, row, player)[0]
    checked = 0
    for m, k in product(range(30), range(3)):
        other = (focal[m] + 1 + k) % 4
        if states[m, PLAYERS + other] != GONE:
            assert np.abs(np.diff(trees.others[m, 0, k], prepend=0.0) - policy[m, other]).max() < 1e-5
            checked += 1
    assert checked > 50
    many = grow(args, game, nets, make_roots(game, nets, states[[0] * 3000], [0] * 3000), 1)
    for other in (1, 2, 3):
        moved = many.state[:, 1, PLAYERS + other]
        for action, target in enumerate(game.grid.neighbours[states[0, PLAYERS + other]]):
            if target != states[0, PLAYERS + other]:
                assert (moved == target).mean() == pytest.approx(policy[0, other, action], abs=0.04)


def test_all_own_actions_face_the_same_draws_of_the_others():
    """Children of one node and slot differ in what the planner did; the two slots differ in what the others did."""
    game = envs.game(ID)
    args, nets = make_nets(hop, game, simulations=60, c_puct=50.0, outcomes=2)
    state = make_state(game, [5, 6, 9, 10], {0: ITEM, 12: ITEM + 1, 3: ITEM + 1, 15: ITEM + 1, 8: ITEM + 1})
    nets["agent"].policy_head.weight.data.zero_()  # tries everything
    trees = grow(args, game, nets, make_roots(game, nets, [state] * 50, [1] * 50))
    slots = []
    for slot in range(2):
        child = trees.child[:, 0, :5, slot]  # four moves and staying
        assert (child > 0).all()
        after = np.take_along_axis(trees.state, child[:, :, None], 1)[:, :, PLAYERS : PLAYERS + 4]  # (50, 5, N)
        assert (after[:, :, [0, 2, 3]] == after[:, :1, [0, 2, 3]]).all() and (after[:, 0, 1] != after[:, 4, 1]).all()
        slots.append(after[:, 0])
    assert (slots[0] != slots[1]).any(1).mean() > 0.3


@pytest.mark.parametrize("outcomes", [1, 2, 3])
def test_draws_take_turns(outcomes):
    """After v visits of an action its draws were followed v / W times each, the first ones first; a player that is
    alone on the board needs one."""
    args, game, nets, roots = random_roots(num=40, simulations=50, outcomes=outcomes)
    alone = make_state(game, [3, GONE, GONE, GONE], {20: ITEM + 1})
    roots = Roots(*(x[:-1] for x in roots))
    roots = Roots(*map(np.concatenate, zip(roots, make_roots(game, nets, [alone], [0], seed=9), strict=True)))
    trees = grow(args, game, nets, roots)
    checked = {True: 0, False: 0}
    for m in range(40):
        for node in used_nodes(trees, m):
            company = game.alive(trees.state[m, node][None]).sum() > 1
            for action in np.flatnonzero(trees.visits[m, node] > 1):
                visits, slots = trees.visits[m, node, action], outcomes if company else 1
                assert (trees.child[m, node, action, slots:] == -1).all()
                for slot in range(min(slots, visits)):
                    child = trees.child[m, node, action, slot]
                    assert child > 0
                    if not trees.ended[m, child]:  # made once, then gone through
                        assert 1 + trees.tried[m, child] == -(-(visits - slot) // slots)
                        checked[bool(company)] += 1
    assert checked[True] > 200 and checked[False] > 10


def test_goals_are_drawn_from_the_beliefs():
    """For each tree and other player, next first, by what is believed of that player; -1 for who left. The streams of
    two trees, and of two decisions, differ; the same streams give the same draws."""
    rng, num = np.random.default_rng(0), 3000
    belief = rng.dirichlet(np.ones(5), size=(2, 4)).astype(np.float32)
    belief[0, 1] = 0, 0.5, 0, 0.5, 0
    alive = np.ones((2, 4), bool)
    alive[1, 0] = False
    env_row, focal = np.array([0, 1]), np.array([3, 2])

    def draw():
        goals, streams = np.full((2, num, 3), -7), np.zeros((2, num), np.uint64)
        forest.draw_goals(belief, alive, env_row, focal, make_streams(4, 8), goals, streams)
        return goals, streams

    goals, streams = draw()
    for r, k in product(range(2), range(3)):
        player = (focal[r] + 1 + k) % 4
        if not alive[env_row[r], player]:
            assert (goals[r, :, k] == -1).all()
            continue
        shares = np.bincount(goals[r, :, k], minlength=5) / num
        assert np.abs(shares - belief[env_row[r], player]).max() < 0.04
        assert not shares[belief[env_row[r], player] == 0].any()
    assert len(np.unique(streams)) == 2 * num
    assert all((a == b).all() for a, b in zip(draw(), (goals, streams), strict=True))


def test_actions_are_drawn_for_the_goals_drawn():
    """As `draw_goals`, one step further: what a player with that goal does; who left, and the focal player, stay."""
    rng, num = np.random.default_rng(0), 6000
    probs = rng.dirichlet(np.ones(7), size=(2, 4, 3)).astype(np.float32)
    env_row, focal = np.array([1, 0]), np.array([1, 3])
    goals = rng.integers(3, size=(2, num, 3))
    goals[1, :, 2] = -1
    joint = np.full((2, num, 4), STAY)
    forest.draw_actions(probs, env_row, focal, goals, make_streams(2, 2 * num).reshape(2, num), joint)
    assert (joint[[0, 1], :, focal] == STAY).all() and (joint[1, :, 2] == STAY).all()
    for r, k, goal in product(range(2), range(3), range(3)):
        chosen = goals[r, :, k] == goal
        if chosen.any():
            player = (focal[r] + 1 + k) % 4
            shares = np.bincount(joint[r, chosen, player], minlength=7) / chosen.sum()
            assert np.abs(shares - probs[env_row[r], player, goal]).max() < 0.05
    probs[:] = 0.3, 0.0, 0.6, 0.0, 0.0, 0.0, 0.0  # as if rounded: what has no chance is not drawn all the same
    forest.draw_actions(probs, env_row, focal, goals, make_streams(2, 2 * num).reshape(2, num), joint)
    assert np.isin(joint[0][:, [0, 2, 3]], (0, 2)).all()


def test_streams_of_envs_and_of_their_players_are_apart():
    """An env and rule-based players with the same seed draw from different streams: else chance on the board would tell
    how the players break ties."""
    env = envs.make(ID, num_envs=64, seed=5)
    env.streams[:] = make_streams(5, 64)  # as before the first board was drawn
    players = RulePlayers(env.game, ["ns"] * 4, 64, 5)
    assert not np.isin(players.streams, env.streams).any()


# batches


def test_a_row_alone_grows_the_same_tree_as_in_a_batch():
    """Trees do not know of each other. Torch may round otherwise in another batch, which can turn a close choice: of
    all trees a few may differ, and where the visits are the same the values are."""
    args, game, nets, roots = random_roots(num=120, simulations=24)
    planner = hop.Planner(args, game, nets, None)
    together, same = planner.search(roots), []
    for m in range(0, 120, 4):
        alone = planner.search(Roots(*(x[m : m + 1] for x in roots)))
        same.append((alone[3] == together[3][m]).all())
        for a, b in zip(alone, together, strict=True):
            if same[-1]:
                assert np.abs(a[0].astype(float) - b[m]).max() < 1e-4
    assert np.mean(same) > 0.95
    with pytest.MonkeyPatch.context() as patch:
        for block in (1, 7, 64):
            patch.setattr(hop.Planner, "BLOCK", block)
            for _ in range(2 if block > 1 else 1):  # also when the arrays are full of the trees before
                again = planner.search(roots)
                equal = (again[3] == together[3]).all(1)
                assert equal.mean() > 0.95
                assert np.abs(again[4] - together[4])[equal].max() < 1e-4 and (again[5] == together[5])[equal].all()


def test_memory_of_earlier_trees_does_not_show():
    """The very same search twice in the same arrays, and in new ones: the same bits."""
    args, game, nets, roots = random_roots(num=40, simulations=24)
    planner = hop.Planner(args, game, nets, None)
    first = planner.search(roots)
    planner.search(random_roots(num=40, seed=7, simulations=24)[3])
    for other in (planner, hop.Planner(args, game, nets, None)):
        for a, b in zip(first, other.search(roots), strict=True):
            assert a.tobytes() == b.tobytes()


# compiled code

TINY_SCRIPT = """
import envs
from numba import njit

@njit(cache=True)
def inner(x):
    return x + 1

@njit(cache=True)
def outer(x):
    return inner(x) * 2

if __name__ == "__main__":
    print(outer(1))
"""


def test_what_is_compiled_for_a_checkpoint_does_not_break_its_script(tmp_path):
    """Whoever plays a checkpoint loads its script under a name of its own, which compiled code remembers: the script
    must still run, and be imported, afterwards."""
    (tmp_path / "tiny.py").write_text(TINY_SCRIPT)
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    settings = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": path}
    load = "from envs.run import load_script; print(load_script('tiny.py').outer(1))"
    for command in (["-c", load], ["tiny.py"], ["-c", "import tiny; print(tiny.outer(1))"]):
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, timeout=300, cwd=tmp_path, env=settings
        )
        assert done.stdout.strip() == "4", done.stderr


def test_the_benchmark_of_the_search_runs(tmp_path):
    """benchmarks/mcts_speed.py reaches into the planner, so it has to follow its changes."""
    script = Path(hop.__file__).parent / "benchmarks/mcts_speed.py"
    words = ["--num-envs", "2", "--seconds", "0.01", "--repeats", "1", "--json", str(tmp_path / "speed.json")]
    done = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "msh-4h1s-4x4" in done.stdout and (tmp_path / "speed.json").stat().st_size > 100
