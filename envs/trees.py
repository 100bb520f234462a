"""Search trees over the states of a grid game: flat arrays of M trees, and the compiled bookkeeping around them.

A planner walks down its trees by a rule of its own, steps the leaves by the game's rules, and then

    asked = grow(...)       # the new states become nodes; what the networks must be asked about them, as rows of ids
    answer(trees, ...)      # their answers go into the nodes

so that all trees ask in one batch, and nothing here changes when a network does. What the others do at a node is asked
when the search first goes on from there (`ask_others`, `draw_others`): most leaves are never gone on from. Who plans
a tree is its focal player; the other players come in the order of the planes, the next one first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from envs.errors import ConfigError
from envs.grid import GONE, ITEM, PLAYERS, STAY, UNCOUNTED, GridGame, T, copy_row, is_legal, players_left, row_helper
from envs.rng import scramble, unit, unit_at
from envs.sight import Things, list_contents, write_ids

# codes of a goal that is no item; ITEM + kind is an item, as on the board
UNKNOWN, AIMLESS, HABIT, BYSTANDER, KEEN = 0, -1, -2, -3, -4


def free_goals(args: Any) -> tuple[list[int], np.ndarray]:
    """Codes (F,), ascending, of goals that need no item, and first beliefs in them (F,); the keen and bystanders only
    where there may be any."""
    priors = {KEEN: args.keen_prior, BYSTANDER: args.bystander_prior}
    priors = {code: prior for code, prior in priors.items() if prior > 0}
    priors |= {HABIT: args.habit_prior, AIMLESS: args.aimless_prior}
    if (total := sum(priors.values())) > 1.0:
        flags = "--keen-prior, --bystander-prior, --habit-prior and --aimless-prior"
        raise ConfigError(f"{flags} must add up to at most 1, not to {total:g}")
    return list(priors), np.array(list(priors.values()))


class Trees(NamedTuple):
    """M trees of up to S + 1 nodes; node 0 is the root."""

    state: np.ndarray  # (M, S+1, L) int16
    legal: np.ndarray  # (M, S+1, A) bool: what the focal player may do
    prior: np.ndarray  # (M, S+1, A) its raw policy
    value: np.ndarray  # (M, S+1) by the network; 0 after the end
    others: np.ndarray  # (M, S+1, N-1, A) cumulative probabilities of the others' actions
    asked: np.ndarray  # (M, S+1) bool: whether these are known
    visits: np.ndarray  # (M, S+1, A) int32
    q_values: np.ndarray  # (M, S+1, A) mean of the discounted returns seen through an action
    tried: np.ndarray  # (M, S+1) int32 visits of all actions
    child: np.ndarray  # (M, S+1, A, W) int32 node, or -1; W draws of the others' actions
    parent: np.ndarray  # (M, S+1) int32
    action: np.ndarray  # (M, S+1) int32 own action that led here
    reward: np.ndarray  # (M, S+1) of the step that led here
    ended: np.ndarray  # (M, S+1) bool: the focal player left, or the episode is over
    depth: np.ndarray  # (M, S+1) int32
    bounds: np.ndarray  # (M, 2) smallest and largest Q so far


class Roots(NamedTuple):
    """What each of M trees starts from: a state, who plans, and the goal that is drawn for every other player."""

    state: np.ndarray  # (M, L) int16
    focal: np.ndarray  # (M,) int64
    cell: np.ndarray  # (M, N-1) int64 where a goal's item is, -1: any of its kind
    code: np.ndarray  # (M, N-1) int64 what it is: ITEM + kind, or one of the codes above
    goal: np.ndarray  # (M, N-1, G) as a vector
    stream: np.ndarray  # (M,) uint64 random streams


class Leaves(NamedTuple):
    """Where each tree was left: a node and an own action without a child (slot -1: a node after the end)."""

    node: np.ndarray  # (M,) int64
    action: np.ndarray  # (M,) int64
    slot: np.ndarray  # (M,) int64 which draw of the others' actions
    state: np.ndarray  # (M, L) int16
    joint: np.ndarray  # (M, N) int64 everybody's actions there


class Questions(NamedTuple):
    """What the networks are asked about new nodes, a row each: of a focal player, or of one of the others. The goal of
    a player who left, or who lost what its goal is about, is unknown."""

    tree: np.ndarray  # (R,) int64
    index: np.ndarray  # type: ignore[assignment]  # (R,) int64 which of the others, 0 .. N-2
    ids: np.ndarray  # (R, K) int32 what the player sees
    t: np.ndarray  # (R,) float32 share of the episode that is over
    legal: np.ndarray  # (R, A) bool
    goal: np.ndarray  # (R, N-1, G) of all others, for a focal player; (R, 1, G) its own, for one of the others


def make_trees(game: GridGame, num: int, simulations: int, outcomes: int) -> Trees:
    nodes, actions, others = (num, simulations + 1), game.num_actions, game.num_players - 1
    shapes = {
        "state": ((*nodes, game.state_size), np.int16), "legal": ((*nodes, actions), np.bool_),
        "prior": ((*nodes, actions), np.float32), "value": (nodes, np.float32),
        "others": ((*nodes, others, actions), np.float32), "asked": (nodes, np.bool_),
        "visits": ((*nodes, actions), np.int32), "q_values": ((*nodes, actions), np.float32),
        "tried": (nodes, np.int32), "child": ((*nodes, actions, outcomes), np.int32), "parent": (nodes, np.int32),
        "action": (nodes, np.int32), "reward": (nodes, np.float32),
        "ended": (nodes, np.bool_), "depth": (nodes, np.int32), "bounds": ((num, 2), np.float32),
    }  # fmt: skip
    return Trees(**{name: np.zeros(shape, dtype) for name, (shape, dtype) in shapes.items()})


def make_leaves(game: GridGame, num: int) -> Leaves:
    node, action, slot = (np.zeros(num, np.int64) for _ in range(3))
    return Leaves(
        node, action, slot, np.zeros((num, game.state_size), np.int16), np.zeros((num, game.num_players), np.int64)
    )


def make_questions(game: GridGame, things: Things, num: int, goal_size: int) -> tuple[Questions, Questions]:
    """Room for the questions about the focal players of `num` trees, and about the others."""

    def room(count: int, goals: int) -> Questions:
        tree, index, t = np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count, np.float32)
        ids, legal = np.zeros((count, things.most), np.int32), np.zeros((count, game.num_actions), np.bool_)
        return Questions(tree, index, ids, t, legal, np.zeros((count, goals, goal_size), np.float32))

    others = game.num_players - 1
    return room(num, others), room(num * others, 1)


class Room:
    """Arrays for searches of any size, made once and used again."""

    def __init__(self, game: GridGame, things: Things, outcomes: int, goal_size: int):
        self.game, self.things, self.outcomes, self.goal_size = game, things, outcomes, goal_size
        self.made: dict[int, tuple] = {}  # by the simulations of a tree

    def of(self, count: int, simulations: int) -> tuple:
        """Trees, leaves and what follows them, for `count` trees; questions about the focal and the other players."""
        if simulations not in self.made or len(self.made[simulations][1].node) < count:
            trees, leaves = make_trees(self.game, count, simulations, self.outcomes), make_leaves(self.game, count)
            questions = make_questions(self.game, self.things, count, self.goal_size)
            self.made[simulations] = trees, leaves, self.game.transition(count), questions
        *arrays, questions = self.made[simulations]
        return *(type(columns)(*(x[:count] for x in columns)) for columns in arrays), *questions


def in_two_parts(first: np.ndarray, plan: Callable[[np.ndarray, bool], Any]) -> Any:
    """plan(first, True) and plan(~first, False) of decisions (R,), tuples of arrays, joined in the order of decisions.
    A part without decisions is not planned, unless there are none at all."""
    parts = [plan(some, which) for some, which in ((first, True), (~first, False)) if some.any()]
    parts = parts or [plan(first, False)]
    place = np.argsort(np.argsort(~first, kind="stable"))
    return type(parts[0])(*(np.concatenate(columns)[place] for columns in zip(*parts, strict=True)))


@row_helper
def is_there(grid, state, cell, code):
    """Whether what a goal is about is still on the board (cell -1: any of that kind); a goal without an item always."""
    board = state[PLAYERS + grid.num_players :]
    found = code < UNKNOWN
    if cell >= 0:
        found = board[cell] == code
    elif code >= ITEM:
        for k in range(board.shape[0]):
            found |= board[k] == code
    return found


@njit(cache=True, **UNCOUNTED)
def goals_there(grid, states, cell, code, there):
    """there (B, K) of goals cell and code (B, K): see `is_there`."""
    for b in range(states.shape[0]):
        for k in range(code.shape[1]):
            there[b, k] = is_there(grid, states[b], cell[b, k], code[b, k])


@row_helper
def ask_about(grid, table, state, contents, count, player, ask, row):
    """What `player` sees, and may do, as row `row` of the questions."""
    ask.t[row] = np.float32(min(state[T], grid.horizon - 1) / grid.horizon)
    write_ids(grid, table, state, contents, count, player, state[PLAYERS + player], ask.ids[row])
    for action in range(ask.legal.shape[1]):
        ask.legal[row, action] = is_legal(grid, state, player, action)


@row_helper
def write_goal(grid, roots, unknown_goal, state, m, k, goal):
    """The goal vector of the k-th other player of a tree: unknown once the player, or what it is about, has left."""
    here = state[PLAYERS + (roots.focal[m] + 1 + k) % grid.num_players] != GONE
    if here and is_there(grid, state, roots.cell[m, k], roots.code[m, k]):
        copy_row(roots.goal[m, k], goal)
    else:
        copy_row(unknown_goal, goal)


@row_helper
def open_node(grid, table, trees, roots, unknown_goal, m, node, own, contents, num_own):
    """Clear a node whose state is set, and ask about its focal player; returns the number of questions so far."""
    state, focal = trees.state[m, node], roots.focal[m]
    trees.value[m, node] = 0.0
    trees.tried[m, node] = 0
    trees.asked[m, node] = False
    for action in range(trees.visits.shape[2]):
        trees.visits[m, node, action] = 0
        trees.q_values[m, node, action] = 0.0
        for slot in range(trees.child.shape[3]):
            trees.child[m, node, action, slot] = -1
    if trees.ended[m, node]:
        return num_own
    own.tree[num_own] = m
    count = list_contents(grid, state, contents)
    ask_about(grid, table, state, contents, count, focal, own, num_own)
    copy_row(own.legal[num_own], trees.legal[m, node])
    for k in range(grid.num_players - 1):
        write_goal(grid, roots, unknown_goal, state, m, k, own.goal[num_own, k])
    return num_own + 1


@njit(cache=True, **UNCOUNTED)
def plant(grid, table, contents, trees, roots, unknown_goal, leaves, own):
    """Make the roots; returns how many questions there are about focal players."""
    num_own = 0
    for m in range(roots.state.shape[0]):
        copy_row(roots.state[m], trees.state[m, 0])
        trees.ended[m, 0] = False
        leaves.node[m] = 0
        trees.depth[m] = 0
        trees.bounds[m, 0], trees.bounds[m, 1] = 1e30, -1e30
        num_own = open_node(grid, table, trees, roots, unknown_goal, m, 0, own, contents, num_own)
    return num_own


@njit(cache=True, **UNCOUNTED)
def ask_others(grid, table, contents, trees, roots, unknown_goal, leaves, other):
    """Ask what the others do at the nodes that the search goes on from for the first time; returns how many questions
    there are."""
    num_other = 0
    for m in range(roots.state.shape[0]):
        node = leaves.node[m]
        if leaves.slot[m] < 0 or trees.asked[m, node]:
            continue
        trees.asked[m, node] = True
        state, count = trees.state[m, node], -1
        for k in range(grid.num_players - 1):
            player = (roots.focal[m] + 1 + k) % grid.num_players
            if state[PLAYERS + player] != GONE:
                count = list_contents(grid, state, contents) if count < 0 else count
                other.tree[num_other], other.index[num_other] = m, k
                ask_about(grid, table, state, contents, count, player, other, num_other)
                write_goal(grid, roots, unknown_goal, state, m, k, other.goal[num_other, 0])
                num_other += 1
    return num_other


@njit(cache=True, **UNCOUNTED)
def grow(grid, table, contents, trees, roots, unknown_goal, leaves, out, reward_scale, new, own):
    """Add the stepped states `out` as node `new` of every tree that was left at a leaf, and ask about them. A tree that
    was left after the end keeps its node. leaves.node becomes the node to back up from."""
    num_own = 0
    for m in range(roots.state.shape[0]):
        if leaves.slot[m] < 0:
            continue
        focal, parent, action = roots.focal[m], leaves.node[m], leaves.action[m]
        trees.child[m, parent, action, leaves.slot[m]] = new
        trees.parent[m, new], trees.action[m, new] = parent, action
        trees.depth[m, new] = trees.depth[m, parent] + 1
        copy_row(out.states[m], trees.state[m, new])
        trees.reward[m, new] = reward_scale * out.reward[m, focal]
        trees.ended[m, new] = out.terminated[m, focal] or out.truncated[m, focal]
        num_own = open_node(grid, table, trees, roots, unknown_goal, m, new, own, contents, num_own)
        leaves.node[m] = new
    return num_own


@njit(cache=True, **UNCOUNTED)
def answer(tree_prior, tree_value, node, tree, prior, value):
    """Put raw policies (R, A) and values (R,) of the focal players into node `node` of the trees that asked."""
    for row in range(prior.shape[0]):
        tree_value[tree[row], node] = value[row]
        for action in range(prior.shape[1]):
            tree_prior[tree[row], node, action] = prior[row, action]


@njit(cache=True, **UNCOUNTED)
def draw_others(grid, others, outcomes, roots, leaves, other, probs):
    """Put what the others do, probs (R, A), into `others` of the trees, at the nodes that were asked about. Then
    everybody's actions at the leaves: the own one, and a draw of the others'. The same draw for all own actions of a
    node: what is compared is actions, not luck."""
    for row in range(probs.shape[0]):
        so_far, m = np.float32(0.0), other.tree[row]
        for action in range(probs.shape[1]):
            so_far += probs[row, action]
            others[m, leaves.node[m], other.index[row], action] = so_far
    num_others = grid.num_players - 1
    for m in range(roots.state.shape[0]):
        focal, node, slot, state = roots.focal[m], leaves.node[m], leaves.slot[m], leaves.state[m]
        for player in range(grid.num_players):
            leaves.joint[m, player] = STAY
        if slot < 0:
            continue
        leaves.joint[m, focal] = leaves.action[m]
        for k in range(num_others):
            player = (focal + 1 + k) % grid.num_players
            if state[PLAYERS + player] != GONE:
                draw = unit_at(roots.stream[m], (node * outcomes + slot) * num_others + k)
                choice = 0
                while choice < others.shape[3] - 1 and draw >= others[m, node, k, choice]:
                    choice += 1
                leaves.joint[m, player] = choice


@row_helper
def next_slot(grid, trees, m, node, action):
    """Which draw of the others' actions is next: they take turns; who is alone needs one."""
    if players_left(grid, trees.state[m, node]) < 2:
        return 0
    return trees.visits[m, node, action] % trees.child.shape[3]


def goals_left(game, states, row, focal, goals, cell, code, unknown):
    """The others of player focal[m] in states[row[m]], next one first: who they are (M, N-1), whether they are on the
    board, and their goals (M, N-1, G): `unknown` where what one is about, cell and code (M, N-1), is not there."""
    there = np.zeros(code.shape, bool)
    goals_there(game.grid, states[row], cell, code, there)
    player = (focal[:, None] + 1 + np.arange(code.shape[1])) % game.num_players
    alive = game.alive(states)[row[:, None], player]
    return player, alive, np.where((there & alive)[..., None], goals, unknown)


@njit(cache=True, **UNCOUNTED)
def draw_goals(belief, alive, env, focal, streams, goals, tree_streams):
    """For each decision of player focal[r] in game env[r], and each of its trees: a goal of every other player drawn
    from belief (B, N, K), and a random stream. goals (R, T, N-1), -1 for who left; tree_streams (R, T), streams (B N,).
    """
    num_players = belief.shape[1]
    for r in range(env.shape[0]):
        row = env[r] * num_players + focal[r]
        for tree in range(goals.shape[1]):
            for k in range(num_players - 1):
                player = (focal[r] + 1 + k) % num_players
                goals[r, tree, k] = -1
                if alive[env[r], player]:
                    draw, choice, chances = unit(streams, row), 0, belief[env[r], player]
                    while choice < chances.shape[0] - 1 and draw >= chances[choice]:
                        draw -= chances[choice]
                        choice += 1
                    goals[r, tree, k] = choice
            unit(streams, row)
            tree_streams[r, tree] = scramble(streams[row])


@njit(cache=True, **UNCOUNTED)
def draw_actions(probs, env, focal, goals, streams, joint):
    """What the others do under goals (R, D, N-1) drawn for them, next player first, by probs (B, N, K, A) of everyone's
    actions under each goal: joint (R, D, N), filled with STAY before."""
    num_players = probs.shape[1]
    for r in range(goals.shape[0]):
        for draw in range(goals.shape[1]):
            for k in range(num_players - 1):
                if goals[r, draw, k] >= 0:
                    player = (focal[r] + 1 + k) % num_players
                    chance = probs[env[r], player, goals[r, draw, k]]
                    left, choice = unit(streams[r], draw), 0
                    while choice < chance.shape[0] - 1 and left >= chance[choice]:
                        left -= chance[choice]
                        choice += 1
                    while chance[choice] <= 0.0:  # rounding: the last action that can be
                        choice -= 1
                    joint[r, draw, player] = choice
