"""HOP+: infer the others' goals, model their actions given these goals, and plan the own move with Monte-Carlo trees.

After "Efficient Adaptation in Mixed-Motive Environments via Hierarchical Opponent Modeling and Planning" (HOP, Huang et
al. 2024), with a learned goal space in the place of named goals. For every other player there is a weighted set of
goals it may be heading for, moved by Bayes' rule after each action and carried over to the next episode. Each tree
draws one goal for everybody; at its nodes an opponent model says what players with these goals do, the real rules say
what happens, and a policy/value network that knows the drawn goals guides the search and learns from it. Some of the
games are imagined: there the co-players follow the opponent model with goals of all kinds, so that the network also
knows values among players that self-play never shows.

    python hopplus_mcts.py --seed 3                                   # Stag Hunt 4x4, four minutes on one core
    python hopplus_mcts.py --env-id msh-4h1s-8x8 --gamma 0.97
    python hopplus_mcts.py --prosocial --reward-scale 4 --gamma 0.95 --play-beta 8   # for the team: third players yield
    python hopplus_mcts.py --env-id msd-4x4 --gamma 0.7 --reward-scale 0.5 --beta-final 16 --play-beta 32 \
        --belief-floor 0.02 --belief-decay 0.8 --bystander-prior 0.2 --keen-prior 0.1 --dream-envs 256 --updates 192 \
        --total-timesteps 81920                                       # Snowdrift
    python hopplus_mcts.py --roles hop,ns,nh,random                   # one learner among rule-based players
    python hopplus_mcts.py --resume runs/msh-4h1s-4x4__hopplus_mcts__3__1700000000

A missing offline checkpoint (pretrain_vae.py) is made first. docs/hopplus.md tells the method and its results.
"""

import envs  # first: from here on Ctrl-C is one line

# isort: split
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
import torch.nn as nn
import tyro
from numba import njit

import pretrain_vae
from envs import trees as forest
from envs.checkpoints import Kept
from envs.devices import device_of, move, tensors
from envs.few_rows import FewRows, begin_search
from envs.grid import ITEM, PLAYERS, STAY, UNCOUNTED, T, copy_row
from envs.rng import draw_rows, make_streams
from envs.roles import Seats, learners_of, parse_roles, play_episodes, score_episodes
from envs.run import Positive, Range, Rate, Run, RunArgs, Share, Weight, Whole, descend, main, read_weights, saved_args
from envs.sight import Things, embedding_table, legal_log_softmax, linear, sum_of_embeddings
from envs.trees import UNKNOWN, Leaves, Roots, Trees
from pretrain_vae import FLAGS, GoalModels
from train_world_model import World


@dataclass
class Args(RunArgs):
    # run
    log_every: Positive = 5
    """iterations between two rows of metrics.csv and TensorBoard"""
    eval_every: Whole = 10_000
    """env steps between two evaluations, planned and raw (0: only the final evaluation)"""
    eval_episodes: Positive = 512
    """episodes of each evaluation during training, always from the true starts"""
    checkpoint_every: Positive = 10
    """iterations between two saves of checkpoints/last"""
    vae_ckpt: str = ""
    """folder of a pretrain_vae.py checkpoint (default: the newest that fits under vae_ckpts/, else one is made)"""

    # env
    env_id: str = "msh-4h1s-4x4"
    """which game to play"""
    roles: str = ""
    """one entry per player: hop, a rule-based player or a run folder, e.g. hop,ns,ns,ns (default: all hop)"""
    num_envs: Positive = 64
    """games played side by side"""
    prosocial: bool = False
    """learn and plan for the mean reward of all players (evaluation counts selfish rewards)"""
    max_block_comp: Annotated[int, Range(0, 100), tyro.conf.arg(metavar="0..100")] = 0
    """random pieces of blocks on the board"""

    # algorithm: planning
    trees: Positive = 4
    """trees per decision, each with its own draw of the others' goals"""
    simulations: Positive = 32
    """simulations per tree"""
    outcomes: Positive = 2
    """draws of the others' actions at a node, the same for all own actions: a child for each (1: one draw is fate)"""
    c_puct: Weight = 1.0
    """weight of the prior in PUCT, beside values scaled to 0..1 in each tree"""
    beta: Weight = 4.0
    """planned policy = softmax(prior_power log prior + beta Q) at the start"""
    beta_final: Weight = 8.0
    """the same at the end, reached linearly"""
    play_beta: Weight = 24.0
    """the same in evaluations and wherever a checkpoint plays: what nobody learns from may be surer of itself"""
    prior_power: Share = 0.97
    """below 1 a policy forgets what does not pay: where nothing seems to matter it wanders, and finds what does"""

    # algorithm: goals, beliefs and the opponent model
    goal_mode: Literal["learned", "oracle", "none"] = "learned"
    """goals of the learned space (HOP+), the named kinds of prey (HOP), or none (direct opponent modelling)"""
    intra_om: bool = True
    """beliefs move within an episode, with every action seen"""
    inter_om: bool = True
    """beliefs of an episode start from what the player pursued before"""
    horizon: Positive = 10
    """steps ahead in which hindsight looks for the hunt a player was heading for"""
    hindsight_prob: Share = 0.5
    """how often the network learns with the goals known in hindsight, at the start; falls to 0 by half of training"""
    hide_prob: Share = 0.15
    """how often it learns with a goal hidden"""
    belief_floor: Share = 0.2
    """share of every belief that stays with the reader of goals, so that no goal dies"""
    belief_decay: Share = 0.995
    """what an earlier episode counts, per episode since"""
    renewal: Share = 0.5
    """share of a belief that begins anew once a player has taken an item and stays: what it did then before"""
    open_mind: Share = 0.3
    """share of a first belief that goes to all kinds of goals alike, whatever the reader of goals has got used to"""
    aimless_prior: Share = 0.1
    """first belief that a player has no goal and moves at random"""
    bystander_prior: Share = 0.0
    """first belief that a player touches no item, whatever happens; 0: nobody does so (Snowdrift: 0.2)"""
    keen_prior: Share = 0.0
    """first belief that a player always heads for some item, whichever; 0: nobody does so (Snowdrift: 0.1)"""
    patience: Share = 0.98
    """discount in the place of --gamma where somebody is taken for keen and nobody for one of those met so far"""
    habit_prior: Share = 0.1
    """first belief that a player does what those met in the games so far have done, whatever their goals"""
    dream_envs: Whole = 128
    """further games with imagined co-players: one learner among players that follow the opponent model"""
    offline_share: Share = 0.5
    """share of offline play in each batch of the opponent model"""
    offline_steps: Positive = 60_000
    """steps of rule-based play to take it from"""

    # algorithm: learning
    total_timesteps: Positive = 60_000
    """env steps of the whole run (one step moves all players of one game; imagined games do not count)"""
    num_steps: Annotated[int, Range(2, 10**9), tyro.conf.arg(metavar="2..1e9")] = 16
    """steps per game and iteration"""
    replay: Positive = 4
    """iterations whose data each update draws on"""
    updates: Positive = 96
    """minibatches per iteration"""
    batch_rows: Positive = 1024
    """decisions per minibatch"""
    learning_rate: Rate = 1e-3
    """Adam's learning rate at the start, brought linearly to zero"""
    gamma: Share = 0.99
    """discount; the time limit counts as an end, which the trees see coming"""
    reward_scale: Weight = 1.0
    """planning and learning count rewards times this (reports do not): with best returns near 5 the defaults fit"""
    td_lambda: Share = 0.9
    """lambda of the value targets"""
    vf_coef: Weight = 0.5
    """weight of the value loss"""
    max_grad_norm: Weight = 0.5
    """largest gradient norm of each network"""
    hidden_size: Positive = 64
    """width of the policy and value network"""

    def check(self) -> None:
        forest.free_goals(self)  # refuses priors that add up to more than 1


# networks


class Agent(nn.Module):
    """Policy and value of a player, given the others' goals: everything that is learned from the search."""

    def __init__(self, args: Args, game, goal_size: int, generator: torch.Generator):
        super().__init__()
        hidden, others = args.hidden_size, game.num_players - 1
        # first layer of actor | critic
        self.embedding = embedding_table(Things(game).num_ids, 2 * hidden, generator)
        self.time = nn.Parameter(torch.randn(2 * hidden, generator=generator) * 0.3)
        self.goals = linear(others * goal_size, 2 * hidden, 0.1, generator)
        self.actor = linear(hidden, hidden, (2 / hidden) ** 0.5, generator)
        self.critic = linear(hidden, hidden, (2 / hidden) ** 0.5, generator)
        self.policy_head = linear(hidden, game.num_actions, 0.01 / hidden**0.5, generator)
        self.value_head = linear(hidden, 1, 1 / hidden**0.5, generator)

    def forward(self, seen, t, legal, goals) -> tuple[torch.Tensor, torch.Tensor]:
        """seen (R, K) ids, t (R,) in 0..1, legal (R, A), goals (R, N-1, G) -> log-probabilities (R, A), values (R,)"""
        first = sum_of_embeddings(seen, self.embedding) + t[:, None] * self.time + self.goals(goals.flatten(1))
        actor, critic = torch.relu(first).chunk(2, dim=1)
        log_probs = legal_log_softmax(self.policy_head(torch.relu(self.actor(actor))), legal)
        return log_probs, self.value_head(torch.relu(self.critic(critic)))[:, 0]


def make_nets(args: Args, game, models: GoalModels, seed: int = 0) -> nn.ModuleDict:
    """Everything a checkpoint holds: the agent, and goal space, opponent model and reader of goals."""
    agent = Agent(args, game, models.goal_size, torch.Generator().manual_seed(seed))
    models.space.requires_grad_(False)
    return nn.ModuleDict({"agent": agent, "models": models})


# search: select, step by the game's own rules, grow, back up
# (compiled in two seconds at every start: numba's cache would not find a script again under another name)


@njit(**UNCOUNTED)
def best_action(trees, m, node, c_puct):
    """PUCT: Q scaled to 0..1 plus the prior's bonus; an action not tried yet counts as the node's value."""
    low, high = trees.bounds[m, 0], trees.bounds[m, 1]
    scale = 1.0 / (high - low) if high > low else 0.0
    bonus, best, top = c_puct * np.sqrt(trees.tried[m, node] + 1.0), -1, -1e30
    for action in range(trees.visits.shape[2]):
        if trees.legal[m, node, action]:
            visits = trees.visits[m, node, action]
            q = trees.q_values[m, node, action] if visits else trees.value[m, node]
            score = min(max((q - low) * scale, 0.0), 1.0) + bonus * trees.prior[m, node, action] / (1.0 + visits)
            if score > top:
                best, top = action, score
    return best


@njit(**UNCOUNTED)
def select(grid, trees, c_puct, leaves):
    """Walk every tree from its root to an action without a child, or to a node after the end (slot -1)."""
    for m in range(leaves.node.shape[0]):
        node, slot = 0, -1
        while not trees.ended[m, node]:
            action = best_action(trees, m, node, c_puct)
            slot = forest.next_slot(grid, trees, m, node, action)
            child = trees.child[m, node, action, slot]
            if child < 0:
                break
            node, slot = child, -1
        leaves.node[m], leaves.slot[m] = node, slot
        copy_row(trees.state[m, node], leaves.state[m])
        if slot >= 0:
            leaves.action[m] = action


@njit(**UNCOUNTED)
def back_up(trees, leaves, gamma):
    """Add the value of each tree's leaf to all actions on the way to it."""
    for m in range(leaves.node.shape[0]):
        node = leaves.node[m]
        value = trees.value[m, node]
        while node > 0:
            value = trees.reward[m, node] + gamma[m] * value
            parent, action = trees.parent[m, node], trees.action[m, node]
            trees.tried[m, parent] += 1
            trees.visits[m, parent, action] += 1
            q = trees.q_values[m, parent, action]
            q += (value - q) / trees.visits[m, parent, action]
            trees.q_values[m, parent, action] = q
            trees.bounds[m, 0] = min(trees.bounds[m, 0], q)
            trees.bounds[m, 1] = max(trees.bounds[m, 1], q)
            node = parent


@njit(**UNCOUNTED)
def walk(grid, trees, leaves, gamma, c_puct):
    """Up from the newest nodes and down to the next leaves, in one call: for few trees it is calls that cost time."""
    back_up(trees, leaves, gamma)
    select(grid, trees, c_puct, leaves)


class Plan(NamedTuple):
    """What a search says of each of R decisions."""

    legal: np.ndarray  # (R, A) bool
    prior: np.ndarray  # (R, A) raw policy, given the goals of the trees; who is alone: the best actions, no search
    value: np.ndarray  # (R,) raw value, likewise
    visits: np.ndarray  # (R, A) over all trees
    q_values: np.ndarray  # (R, A) mean over the trees; an action that no tree tried has the value of the state
    goals: np.ndarray  # (R, N-1, G) of the first tree
    depth: np.ndarray  # (R,) of the deepest node


class Planner:
    """Batched tree search: all trees of a block take their simulations together, one network batch for each step."""

    BLOCK = 1024  # trees: enough to fill the networks' batches, few enough for the cache

    def __init__(self, args: Args, game, nets: nn.ModuleDict, beliefs: "Beliefs"):
        self.args, self.game, self.nets, self.beliefs, self.things = args, game, nets, beliefs, Things(game)
        self.unknown_goal, self.device = nets["models"].flag(pretrain_vae.UNKNOWN), device_of(nets)
        self.simulations = args.simulations
        self.room = forest.Room(game, self.things, args.outcomes, len(self.unknown_goal))
        self.agent, self.moa = FewRows(nets["agent"]), FewRows(nets["models"].moa)

    def ask_own(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Raw policies and values of the focal players of so many questions."""
        return self.agent(*(column[:count] for column in self.own[2:]))

    def ask_others(self, count: int) -> np.ndarray:
        """What the others do, of so many questions."""
        seen, t, legal, goal = (column[:count] for column in self.other[2:])
        return self.moa(seen, t, legal, goal[:, 0])[0]

    def grow_trees(self, trees: Trees, roots: Roots, leaves: Leaves, out) -> None:
        """All simulations of a block of trees."""
        game, args, own, other = self.game, self.args, self.own, self.other
        place = (game.grid, self.things.table, self.things.room(), trees, roots, self.unknown_goal.numpy(), leaves)
        begin_search(len(roots.state), self.agent, self.moa)
        asked, simulations = forest.plant(*place, own), trees.value.shape[1] - 1
        gamma = pretrain_vae.discounts(args, roots.goal)
        for node in range(simulations):
            forest.answer(trees.prior, trees.value, node, own.tree, *self.ask_own(asked))
            walk(game.grid, trees, leaves, gamma, args.c_puct)
            asked = forest.ask_others(*place, other)
            forest.draw_others(game.grid, trees.others, args.outcomes, roots, leaves, other, self.ask_others(asked))
            game.step_rows(game.grid, game.rules, leaves.state, leaves.joint, *out)
            asked = forest.grow(*place, out, np.float32(args.reward_scale), node + 1, own)
        forest.answer(trees.prior, trees.value, simulations, own.tree, *self.ask_own(asked))
        back_up(trees, leaves, gamma)

    def search(self, roots: Roots) -> tuple[np.ndarray, ...]:
        """Legal, prior, value, visits, Q and depth of the M roots."""
        num = len(roots.state)
        block = max(1, -(-num // max(1, -(-num // self.BLOCK))))  # blocks of equal size
        found = []
        for first in range(0, max(1, num), block):
            some = Roots(*(array[first : first + block] for array in roots))
            trees, leaves, out, self.own, self.other = self.room.of(len(some.state), self.simulations)
            self.grow_trees(trees, some, leaves, out)
            root = (trees.legal, trees.prior, trees.value, trees.visits, trees.q_values)
            found.append([*(array[:, 0].copy() for array in root), trees.depth.max(1)])
        return tuple(np.concatenate(arrays) for arrays in zip(*found, strict=True))

    def plan(self, states: np.ndarray, env_row: np.ndarray, focal: np.ndarray) -> Plan:
        """Search for player focal[r] in states[env_row[r]]; each of its trees draws a goal for every other player."""
        trees, others = self.args.trees, self.game.num_players - 1
        drawn = np.full((len(env_row), trees, others), -1)
        streams = np.zeros((len(env_row), trees), np.uint64)
        forest.draw_goals(self.beliefs.belief, self.beliefs.alive, env_row, focal, self.beliefs.streams, drawn, streams)

        def plan_some(some: np.ndarray, alone: bool) -> Plan:
            where = states, env_row[some], focal[some]
            return self.plan_alone(*where) if alone else self.plan_with(*where, drawn[some], streams[some])

        return forest.in_two_parts((drawn < 0).all((1, 2)), plan_some)

    def plan_alone(self, states: np.ndarray, env_row: np.ndarray, focal: np.ndarray) -> Plan:
        """Where nobody else is left nothing is left to chance: no search, but the best way until time is up."""
        game, value = self.game, self.raw(states, env_row, focal)[1]
        q_values, best = self.ways_on(states[env_row], focal)
        legal = game.legal(states, trusted=True)[env_row, focal]
        goals = np.tile(self.unknown_goal.numpy(), (len(env_row), game.num_players - 1, 1))
        visits, depth = np.zeros(legal.shape, np.int32), np.zeros(len(env_row), np.int32)
        return Plan(legal, best, value, visits, q_values, goals, depth)

    def ways_on(self, states: np.ndarray, focal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Q (R, A) of player focal[r] in states[r] on the best way if nobody else acts, and the best actions."""
        how = self.game.config.horizon + 1, self.args.reward_scale, self.args.gamma
        return World(self.game, None).ways_on(states, focal, *how, self.raw)

    def plan_with(self, states, env_row, focal, drawn, streams) -> Plan:
        """Search with goals (R, T, N-1) and random streams (R, T) given. Among bystanders one is as good as alone."""
        beliefs, (trees, others) = self.beliefs, drawn.shape[1:]
        env_row, focal, drawn = np.repeat(env_row, trees), np.repeat(focal, trees), drawn.reshape(-1, others)
        player = (focal[:, None] + 1 + np.arange(others)) % self.game.num_players  # (M, N-1)
        gone = drawn < 0
        goals = np.where(gone[..., None], self.unknown_goal.numpy(), beliefs.goal[env_row[:, None], player, drawn])
        cell = np.where(gone, -1, beliefs.cell[env_row[:, None], drawn])
        code = np.where(gone, UNKNOWN, beliefs.code[env_row[:, None], drawn])
        roots = Roots(states[env_row], focal, cell, code, goals, streams.ravel())
        legal, prior, value, visits, q_values, depth = self.search(roots)
        alone = np.flatnonzero((gone | (code == forest.BYSTANDER)).all(1))
        if len(alone):
            _, first, which = np.unique(alone // trees, return_index=True, return_inverse=True)
            on = alone[first]
            visits[alone], q_values[alone] = legal[alone], self.ways_on(states[env_row[on]], focal[on])[0][which]

        def by_decision(array: np.ndarray) -> np.ndarray:
            return array.reshape(-1, trees, *array.shape[1:])  # (R, T, ...)

        prior, value = by_decision(prior).mean(1), by_decision(value).mean(1)
        q_values = mean_q_values(by_decision(visits), by_decision(q_values), prior, value)
        visits, goals = by_decision(visits).sum(1), by_decision(goals)[:, 0]
        return Plan(by_decision(legal)[:, 0], prior, value, visits, q_values, goals, by_decision(depth).max(1))

    @torch.no_grad()
    def raw(self, states: np.ndarray, env_row: np.ndarray, focal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Raw policies (R, A) and values (R,), which know no goals."""
        seen, t = self.things.of_states(states, env_row, focal), self.things.time(states[env_row, T])
        legal = self.game.legal(states, trusted=True)[env_row, focal]
        goals = self.unknown_goal.to(self.device).expand(len(env_row), self.game.num_players - 1, -1)
        log_probs, value = self.nets["agent"](*tensors(self.device, seen, t, legal), goals)
        return log_probs.exp().cpu().numpy(), value.cpu().numpy()


def mean_q_values(visits: np.ndarray, q_values: np.ndarray, prior: np.ndarray, value: np.ndarray) -> np.ndarray:
    """visits and Q (R, T, A), prior (R, A), value (R,) -> Q (R, A), the mean over the trees that tried an action. One
    that none tried counts as what the tried ones and the network say of the state."""
    tried = visits > 0
    count = tried.sum(1)  # (R, A)
    q_values = (q_values * tried).sum(1) / np.maximum(count, 1)
    known = prior * (count > 0)
    mean_q = (known * q_values).sum(1) / np.maximum(known.sum(1), 1e-8)
    num_visits = visits.sum((1, 2))
    state_value = (value + num_visits * mean_q) / (1 + num_visits)
    return np.where(count > 0, q_values, state_value[:, None]).astype(np.float32)


def planned_policy(args: Args, plan: Plan, beta: float) -> np.ndarray:
    """(R, A) softmax(prior_power log prior + beta Q) over the legal actions"""
    logits = args.prior_power * np.log(np.maximum(plan.prior, 1e-8)) + beta * plan.q_values
    logits = np.where(plan.legal, logits, -np.inf)
    policy = np.exp(logits - logits.max(1, keepdims=True))
    return (policy / policy.sum(1, keepdims=True)).astype(np.float32)


# three uses of a plan, each a function of its own, so that one can be changed without the others


def training_target(args: Args, plan: Plan, beta: float) -> np.ndarray:
    """What the policy network learns."""
    return planned_policy(args, plan, beta)


def acting_policy(args: Args, plan: Plan, beta: float) -> np.ndarray:
    """What acts in the games that are learned from."""
    return planned_policy(args, plan, beta)


def playing_policy(args: Args, plan: Plan, play_beta: float) -> np.ndarray:
    """What acts in evaluations and wherever a checkpoint plays."""
    return planned_policy(args, plan, play_beta)


# goals and beliefs


class Beliefs(Kept):
    """What is believed of every player of B games.

    All see the whole board, so a belief about player j is the same for everybody who holds one, and is kept once.
    K hypotheses per player: one per item of the episode's first board (learned) or per kind (oracle), then F that need
    no item: KEEN and BYSTANDER (if there may be any), HABIT and AIMLESS; with goal mode none a single one, UNKNOWN.
    """

    KEPT = (
        "belief", "prior", "habits", "took", "again", "cell", "code", "goal", "memory", "last_action", "new_episode",
        "states", "streams",
    )  # fmt: skip

    def __init__(self, args: Args, game, models: GoalModels, num_envs: int, seed: int):
        self.args, self.game, self.models, self.things = args, game, models, Things(game)
        self.free, self.priors = forest.free_goals(args)  # (F,) goals without items
        self.num_free = len(self.free)
        num_items = {"learned": int(game.item_counts.sum()), "oracle": len(game.kinds), "none": 0}[args.goal_mode]
        shape, num_goals = (num_envs, game.num_players), num_items + self.num_free if num_items else 1
        self.belief = np.zeros((*shape, num_goals), np.float32)  # (B, N, K)
        self.prior = np.zeros_like(self.belief)  # (B, N, K) by the reader of goals
        self.took, self.again = np.zeros(shape, bool), np.zeros(shape, int)  # (B, N) an item just now; before
        # (B, N, 2, kinds + F) pursued so far: at the start of episodes, and after an item was taken
        self.habits = np.zeros((*shape, 2, len(game.kinds) + self.num_free), np.float32)
        self.cell = np.full((num_envs, num_goals), -1)  # (B, K) where a goal's item is, -1: any of its kind
        self.code = np.full((num_envs, num_goals), UNKNOWN)  # (B, K) and what it is
        self.goal = np.zeros((*shape, num_goals, models.goal_size), np.float32)  # (B, N, K, G)
        self.goal[:] = models.flag(pretrain_vae.UNKNOWN).numpy()
        if num_items:
            habit, aimless = models.flag(pretrain_vae.HABIT).numpy(), models.flag(pretrain_vae.AIMLESS).numpy()
            flags = {forest.KEEN: -habit, forest.BYSTANDER: -aimless, forest.HABIT: habit, forest.AIMLESS: aimless}
            self.code[:, num_items:] = self.free
            self.goal[..., num_items:, :] = np.stack([flags[code] for code in self.free])
        if args.goal_mode == "oracle":
            self.code[:, :num_items] = ITEM + np.arange(num_items)
            self.goal[..., :num_items, :] = np.eye(num_items, models.goal_size)
        self.probs = np.zeros((*shape, num_goals, game.num_actions), np.float32)  # (B, N, K, A) of the opponent model
        self.memory = np.zeros((*shape, models.sizes["hidden_size"]), np.float32)  # of the reader
        self.last_action, self.new_episode = np.full(shape, game.num_actions), np.ones(num_envs, bool)
        self.states = np.zeros((num_envs, game.state_size), np.int16)
        self.streams = make_streams(seed, num_envs * game.num_players)
        self.seen = np.zeros((*shape, self.things.most), np.int32)  # (B, N, ids)
        self.looked = False  # at the boards of this step

    @torch.no_grad()
    def look(self, env) -> None:
        """Take in the current boards: which goals there are, what the others would do under each, what is believed."""
        args, states = self.args, env.states
        board = slice(PLAYERS + self.game.num_players, None)
        changed = self.new_episode | (states[:, board] != self.states[:, board]).any(1)
        self.states[:], self.alive = states, env.alive.copy()
        env_row, player = np.nonzero(self.alive)
        self.seen[:] = 0
        self.seen[env_row, player] = self.things.of_states(states, env_row, player)
        if args.goal_mode == "none":
            self.belief[:] = 1.0
        else:
            if args.goal_mode == "learned":
                self.list_goals(np.flatnonzero(self.new_episode))
                self.encode_goals(np.flatnonzero(changed))
            self.read(env_row, player)
            there = self.there()  # (B, K)
            prior = self.open_prior(there)
            kept = self.belief * there[:, None]
            total = kept.sum(-1, keepdims=True)
            kept = np.where(total > 1e-6, kept / np.maximum(total, 1e-6), prior)
            kept = (1 - args.belief_floor) * kept + args.belief_floor * prior
            self.again[self.new_episode] = 0
            first = self.first_beliefs(prior) if args.inter_om else prior
            kept = np.where(self.took[..., None], (1 - args.renewal) * kept + args.renewal * first, kept)
            self.belief[:] = np.where(self.new_episode[:, None, None], first, kept)
        self.predict_actions(env, env_row, player)
        self.looked = True

    def there(self) -> np.ndarray:
        """(B, K): what the goal is about is still on the board; goals without items need nothing"""
        there = np.zeros(self.code.shape, bool)
        forest.goals_there(self.game.grid, self.states, self.cell, self.code, there)
        return there

    def list_goals(self, rows: np.ndarray) -> None:
        """A new episode's goals: its items in the order of their cells."""
        self.cell[rows, : -self.num_free], self.code[rows, : -self.num_free] = -1, UNKNOWN
        codes = self.states[rows, PLAYERS + self.game.num_players :]
        row, cell = np.nonzero(codes >= ITEM)
        slot = np.arange(len(row)) - np.searchsorted(row, row)
        self.cell[rows[row], slot], self.code[rows[row], slot] = cell, codes[row, cell]

    def encode_goals(self, rows: np.ndarray) -> None:
        """z of each goal: the encoder's mean for what the player would see, standing on the item."""
        there = self.there()[rows][:, None, : -self.num_free]
        row, player, slot = np.nonzero(self.alive[rows][:, :, None] & there)
        row = rows[row]
        if len(row):
            seen = self.things.of_states(self.states, row, player, self.cell[row, slot])
            goals = self.models.goals(self.models.encode(torch.from_numpy(seen)))
            self.goal[row, player, slot] = goals.cpu().numpy()

    def read(self, env_row: np.ndarray, player: np.ndarray) -> None:
        """Let the reader of goals see the boards, and compare its z with those of the goals."""
        z = self.goal[:, :, : -self.num_free, :-FLAGS]  # (B, N, K-F, D)
        columns = (self.seen, self.last_action, self.memory, z)
        seen, last, memory, goals = tensors(device_of(self.models), *(column[env_row, player] for column in columns))
        mean, log_std, memory = self.models.reader(seen, last, memory)
        self.memory[env_row, player] = memory.cpu().numpy()
        fit = -0.5 * ((goals - mean[:, None]) / log_std.exp()[:, None]).pow(2).sum(2)
        self.prior[env_row, player, : -self.num_free] = torch.softmax(fit.clamp_min(-50.0), 1).cpu().numpy()

    def kinds_of_goals(self) -> np.ndarray:
        """(B, K, kinds + F) one-hot: the kind each goal is of, those without items last; UNKNOWN is of none"""
        free = len(self.game.kinds) + np.searchsorted(self.free, self.code)  # UNKNOWN comes after them all
        kind = np.where(self.code >= ITEM, self.code - ITEM, free)
        return np.eye(len(self.game.kinds) + self.num_free + 1, dtype=np.float32)[kind][..., :-1]

    def open_prior(self, there: np.ndarray) -> np.ndarray:
        """(B, N, K) first beliefs of an episode, were nothing known of the player: mostly the reader's, but a share of
        `open_mind` goes to all kinds of goals that are there alike, and their own priors to those without items."""
        args, free, last = self.args, self.num_free, self.priors
        kinds = self.kinds_of_goals()[:, :-free, :-free]  # (B, K - F, kinds)
        prior = (self.prior[..., :-free] + 1e-6) * there[:, None, :-free]
        of_kind = np.einsum("bnk,bkc->bnc", prior, kinds)
        share = of_kind / np.maximum(of_kind.sum(-1, keepdims=True), 1e-12)
        present = of_kind > 0
        share = (1 - args.open_mind) * share + args.open_mind * present / np.maximum(present.sum(-1, keepdims=True), 1)
        prior = prior * np.einsum("bkc,bnc->bnk", kinds, share / np.maximum(of_kind, 1e-12))
        prior = (1 - float(last.sum())) * prior
        aims = there[:, :-free].any(1)[:, None, None]
        last = np.broadcast_to(np.where(aims, last, (last + 1e-6) / (last + 1e-6).sum()), (*prior.shape[:2], free))
        return np.concatenate([prior, last], -1).astype(np.float32)

    def first_beliefs(self, prior: np.ndarray) -> np.ndarray:
        """Kinds as the player pursued them before (one more time as the prior says); within a kind, by the prior."""
        kinds = self.kinds_of_goals()
        of_kind = np.einsum("bnk,bkc->bnc", prior, kinds)
        habits = np.take_along_axis(self.habits, self.again[..., None, None], 2)[:, :, 0]
        wanted = (habits + of_kind) * (of_kind > 0)
        wanted /= wanted.sum(-1, keepdims=True)
        return prior * np.einsum("bkc,bnc->bnk", kinds, wanted / np.maximum(of_kind, 1e-8))

    def predict_actions(self, env, env_row: np.ndarray, player: np.ndarray) -> None:
        """Ask the opponent model what every player on the board would do under each goal."""
        num_goals = self.goal.shape[2]
        t = self.things.time(self.states[env_row, T])
        columns = (self.seen[env_row, player], t, env.legal[env_row, player], self.goal[env_row, player])
        *columns, goals = tensors(device_of(self.models), *columns)
        columns = [*(column.repeat_interleave(num_goals, 0) for column in columns), goals.flatten(0, 1)]
        parts = zip(*(column.split(8192) for column in columns), strict=True)
        probs = torch.cat([self.models.moa(*part).exp() for part in parts])
        self.probs[:] = 0.0
        self.probs[env_row, player] = probs.view(len(env_row), num_goals, -1).cpu().numpy()

    def predict(self) -> np.ndarray:
        """(B, N, A) what everybody will do, over all goals"""
        return np.einsum("bnk,bnka->bna", self.belief, self.probs)

    def watch(self, actions: np.ndarray, taken: np.ndarray, alive: np.ndarray, done: np.ndarray) -> None:
        """Learn from what everybody did and took (B, N); alive (B, N) and done (B,) are of after the step."""
        args, acted = self.args, self.alive
        if args.goal_mode != "none":
            if args.intra_om:
                likelihood = np.take_along_axis(self.probs, actions[:, :, None, None], 3)[..., 0]  # (B, N, K)
                moved = self.belief * np.maximum(likelihood, 1e-3)
                moved /= moved.sum(-1, keepdims=True)
                self.belief[acted] = moved[acted]
            self.took = acted & alive & (taken > 0)
            ended = acted & (done[:, None] | ~alive | self.took)
            pursued = np.einsum("bnk,bkc->bnc", self.belief, self.kinds_of_goals())[ended]
            which = (*np.nonzero(ended), self.again[ended])
            self.habits[which] = args.belief_decay * self.habits[which] + pursued
            self.again[self.took] = 1
        self.last_action[:] = np.where(done[:, None], self.game.num_actions, actions)
        self.memory[done] = 0.0
        self.new_episode[:] = done
        self.looked = False


class ImaginedPlayers(Kept):
    """The co-players in the last games of an env: each has a kind of goal (or a habit, or none) that lasts for some
    episodes, picks an item of that kind, and moves as the opponent model says of such a player."""

    KEPT = ("kind", "goal", "rng")

    def __init__(self, beliefs: Beliefs, first: int, learners: list[int], seed: int):
        self.beliefs, self.rng, self.num_kinds = beliefs, np.random.default_rng(seed), len(beliefs.game.kinds)
        self.rows = np.arange(first, len(beliefs.new_episode))
        self.focal = np.array(learners)[self.rows % len(learners)]
        shape = (len(self.rows), beliefs.game.num_players)
        self.kind, self.goal = np.full(shape, -1), np.full(shape, -1)  # the last kinds: those without items

    def act(self, actions: np.ndarray) -> None:
        """Fill the actions of all imagined players (the focal ones are overwritten by who plans)."""
        beliefs, rows, rng = self.beliefs, self.rows, self.rng
        new = beliefs.new_episode[rows]
        redraw = new & ((rng.random(len(rows)) < 0.1) | (self.kind[:, 0] < 0))  # a new team
        kinds = rng.integers(self.num_kinds + beliefs.num_free, size=self.kind.shape)
        kinds = np.where(rng.random((len(rows), 1)) < 0.5, kinds[:, :1], kinds)  # half of the teams are of one kind
        self.kind[redraw] = kinds[redraw]
        if beliefs.args.goal_mode == "none":
            self.goal[:] = 0
        else:
            there, kinds = beliefs.there()[rows], beliefs.kinds_of_goals()[rows]  # (B, K), (B, K, kinds + F)
            lost = (self.goal < 0) | new[:, None] | ~np.take_along_axis(there, np.maximum(self.goal, 0), 1)
            of_kind = np.take_along_axis(kinds, self.kind[:, None, :], 2).transpose(0, 2, 1)  # (B, N, K)
            chance = (beliefs.prior[rows] + 1e-6) * there[:, None] * (of_kind + 1e-4)
            free = self.num_kinds + np.arange(beliefs.num_free)
            chance[..., -beliefs.num_free :] = np.where(self.kind[..., None] == free, 1e3, 1e-9)
            self.goal = np.where(lost, draw_rows(chance, rng), self.goal)
        probs = np.take_along_axis(beliefs.probs[rows], self.goal[:, :, None, None], 2)[:, :, 0]  # (B, N, A)
        probs[..., STAY] += 1e-6  # who left stays
        actions[rows] = draw_rows(probs, rng)

    def goals(self) -> np.ndarray:
        """(B, N-1, G) what the others are really heading for, as their focal player would have to know it"""
        beliefs, others = self.beliefs, self.goal.shape[1] - 1
        true = np.take_along_axis(beliefs.goal[self.rows], self.goal[:, :, None, None], 2)[:, :, 0]  # (B, N, G)
        player = (self.focal[:, None] + 1 + np.arange(others)) % (others + 1)
        here = beliefs.alive[self.rows[:, None], player]
        unknown = beliefs.models.flag(pretrain_vae.UNKNOWN).numpy()
        return np.where(here[..., None], true[np.arange(len(true))[:, None], player], unknown)


# playing and evaluating


class Policy(Kept):
    """A trained network in one seat of any env (see envs/roles.py), planning on its beliefs. Several seats may share a
    planner. With `planned` off it plays the raw policy, which knows no goals."""

    KEPT = ("beliefs", "rng")

    def __init__(self, planner: Planner, seat: int, seed: int, greedy: bool, planned: bool = True):
        self.planner, self.beliefs, self.args = planner, planner.beliefs, planner.args
        self.seat, self.greedy, self.planned = seat, greedy, planned
        self.play_beta = self.args.play_beta
        self.simulations = self.args.simulations  # per tree: more cost time and play better, whatever it learned with
        self.rng = np.random.default_rng([seed, seat])
        self.thoughts: tuple[np.ndarray, dict] = (np.zeros(0, np.int64), {})  # games of its last action, and why

    def act(self, env) -> np.ndarray:
        if not self.beliefs.looked:
            self.beliefs.look(env)
        actions = np.full(env.num_envs, STAY)
        rows = np.flatnonzero(env.alive[:, self.seat] & getattr(env, "needed", True))
        if len(rows):
            seat = np.full(len(rows), self.seat)
            if self.planned:
                self.planner.simulations = self.simulations
                plan = self.planner.plan(env.states, rows, seat)
                policy, thoughts = playing_policy(self.args, plan, self.play_beta), plan._asdict()
            else:
                policy, value = self.planner.raw(env.states, rows, seat)
                thoughts = {"value": value}
            actions[rows] = policy.argmax(1) if self.greedy else draw_rows(policy, self.rng)
            self.thoughts = rows, thoughts | {"policy": policy}
        return actions

    def explain(self, row: int = 0) -> dict[str, np.ndarray]:
        """What it thought in game `row` before its last action, as envs/roles.py lists it; nothing once it has left."""
        beliefs, (rows, thoughts) = self.beliefs, self.thoughts
        if row not in rows or not beliefs.alive[row, self.seat]:
            return {}
        hidden = {"legal", "goals"}
        if beliefs.alive[row].sum() == 1:  # alone: the best way, of which the network and its search say nothing
            hidden |= {"prior", "visits", "depth"}
        found = {name: array[rows == row][0] for name, array in thoughts.items() if name not in hidden}
        found |= {"belief": beliefs.belief[row], "goal_cell": beliefs.cell[row], "goal_code": beliefs.code[row]}
        return found | {"predicted": beliefs.predict()[row]}

    def watch(self, env, actions: np.ndarray, info: dict[str, np.ndarray]) -> None:
        if self.beliefs.looked:
            self.beliefs.watch(actions, info["taken"], env.alive, info["done"])


def load_policy(checkpoint: Path, spec: dict, env, seat: int, learner: int | None, seed: int, greedy: bool) -> Policy:
    """A checkpoint of this script as a player; all learners share one network."""
    args = saved_args(Args, spec)
    game = envs.game(env.spec.env_id, **env.spec.config | {"prosocial": args.prosocial})  # as it learned
    nets = make_nets(args, game, GoalModels(spec["model_sizes"]))
    read_weights(checkpoint, nets)
    beliefs = Beliefs(args, game, nets["models"], env.num_envs, seed)
    return Policy(Planner(args, game, nets, beliefs), seat, seed, greedy)


def evaluate(args: Args, nets: nn.ModuleDict, roles: list[str], episodes: int, seed: int, planned=True, greedy=False):
    """Scores of fresh episodes from the true starts, selfish rewards."""
    env = envs.make(args.env_id, num_envs=episodes, seed=seed, max_block_comp=args.max_block_comp)
    learners = learners_of(roles, "hop")
    game = envs.game(args.env_id, prosocial=args.prosocial, max_block_comp=args.max_block_comp)
    planner = Planner(args, game, nets, Beliefs(args, game, nets["models"], episodes, seed))
    policies = {seat: Policy(planner, seat, seed, greedy, planned) for seat in learners}
    played = play_episodes(env, Seats(env, roles, "hop", seed, greedy, policies))
    return score_episodes(played, learners, game.kinds)


# learning


def lambda_returns(reward, value, next_value, ended, gamma: np.ndarray, lam: float) -> np.ndarray:
    """Value targets, all (T, B, N): reward plus what follows, partly as valued and partly as it came."""
    returns = np.zeros_like(reward)
    following = next_value
    for step in reversed(range(len(reward))):
        after = value[step + 1] if step + 1 < len(reward) else next_value
        following = reward[step] + gamma[step] * ~ended[step] * ((1 - lam) * after + lam * following)
        returns[step] = following
    return returns


def agent_loss(args: Args, agent: Agent, mb: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cross-entropy to the planned policy and squared error of the value; entropy to log."""
    log_probs, value = agent(mb["seen"], mb["t"], mb["legal"], mb["goals"])
    log_probs = log_probs.clamp_min(-1e8)
    return {
        "policy_loss": -(mb["policy"] * log_probs).sum(1).mean(),
        "value_loss": args.vf_coef * (value - mb["returns"]).pow(2).mean(),
        "entropy": -(log_probs.exp() * log_probs).sum(1).mean().detach(),
    }


def update(args: Args, nets: nn.ModuleDict, optimizers: dict, data: dict[str, dict], sequences: dict, rng):
    """The updates of one iteration: policy and value, opponent model, reader of goals. Returns what there is to log.
    data: rows of the `own` decisions, of `moa` and `moa_offline`."""
    models, own, log = nets["models"], data["own"], {}
    for _ in range(args.updates):
        losses = {}
        if len(own["t"]):  # somebody planned
            mb_rows = rng.integers(len(own["t"]), size=args.batch_rows)
            mb = move({name: rows[mb_rows] for name, rows in own.items()}, device_of(models))
            losses = agent_loss(args, nets["agent"], mb)
            descend(optimizers["agent"], losses["policy_loss"] + losses["value_loss"], args.max_grad_norm)
        mb = pretrain_vae.mixed_batch(data["moa"], data["moa_offline"], args.batch_rows, args.offline_share, rng)
        losses["moa_loss"] = pretrain_vae.moa_loss(models.moa, mb, args.hide_prob, rng)
        descend(optimizers["moa"], losses["moa_loss"], args.max_grad_norm)
        for name, loss in losses.items():
            log.setdefault(name, []).append(loss.item())
    if args.goal_mode != "none":
        loss = pretrain_vae.reader_loss(models, sequences)
        descend(optimizers["reader"], loss, args.max_grad_norm)
        log["goal_loss"] = [loss.item()]
    return {f"losses/{name}": float(np.mean(values)) for name, values in log.items()}


def make_storage(args: Args, env, things: Things, goal_size: int) -> dict[str, np.ndarray]:
    """Arrays of one iteration, all (T, B, N, ...)."""
    shape, num_actions = (args.num_steps, env.num_envs, env.spec.num_players), env.spec.num_actions
    storage = {name: np.zeros(shape, bool) for name in ("alive", "planned", "ended")}
    storage |= {name: np.zeros(shape, np.int64) for name in ("action", "last_action", "taken")}
    storage |= {name: np.zeros(shape, np.float32) for name in ("t", "value", "reward")}
    storage |= {name: np.zeros((*shape, num_actions), np.float32) for name in ("policy", "predicted")}
    storage |= {"seen": np.zeros((*shape, things.most), np.int32), "legal": np.zeros((*shape, num_actions), bool)}
    return storage | {"goals": np.zeros((*shape, shape[2] - 1, goal_size), np.float32)}


def train(args: Args, run: Run) -> None:
    # seeding
    env_seed, seats_seed, planner_seed, policy_seed, data_seed, init_seed, eval_seed, dream_seed = (
        int(seed) for seed in np.random.SeedSequence(args.seed).generate_state(8)
    )
    policy_rng, data_rng = np.random.default_rng(policy_seed), np.random.default_rng(data_seed)

    # env setup: first the games that count, then the imagined ones
    envs.game(args.env_id)  # refuses battles: their observations are no planes
    num_real, num_envs = args.num_envs, args.num_envs + args.dream_envs
    settings = {"prosocial": args.prosocial, "max_block_comp": args.max_block_comp}
    env = envs.make(args.env_id, num_envs=num_envs, seed=env_seed, **settings)
    game, num_players = env.game, env.spec.num_players
    roles = parse_roles(args.roles, num_players, "hop")
    seats = Seats(env, roles, "hop", seats_seed)
    learners = learners_of(roles, "hop")

    # networks
    models = pretrain_vae.models_for(run, args)
    nets = make_nets(args, game, models, init_seed).to(run.device)
    trained = {"agent": nets["agent"], "moa": models.moa, "reader": models.reader}
    optimizers = {
        name: torch.optim.Adam(net.parameters(), lr=args.learning_rate, eps=1e-5, foreach=True)
        for name, net in trained.items()
    }
    beliefs = Beliefs(args, game, models, num_envs, planner_seed)
    planner = Planner(args, game, nets, beliefs)
    imagined = ImaginedPlayers(beliefs, num_real, learners, dream_seed)
    replay: list[dict[str, np.ndarray]] = []  # of the last iterations: rows "own.*" and "moa.*"
    keep = {"env": env, "seats": seats, "beliefs": beliefs, "imagined": imagined, "replay": replay}
    keep |= {"policy_rng": policy_rng, "data_rng": data_rng, **{f"adam_{k}": x for k, x in optimizers.items()}}
    run.start(
        nets, env.spec, learners=learners, facts={"roles": roles, "model_sizes": models.sizes}, keep=keep,
        title=f"HOP+ on {args.env_id}, roles {','.join(roles)}",
        say=[f"every decision plans with {args.trees} trees of {args.simulations} simulations",
             "return: mean per player and episode; best_eval: the best planned evaluation so far"],
    )  # fmt: skip
    offline = {"moa_offline": pretrain_vae.rehearsal(models, game, args.offline_steps, data_seed, args.keen_prior > 0)}

    # storage
    batch = make_storage(args, env, beliefs.things, models.goal_size)  # (T, B, N, ...)
    done = np.zeros((args.num_steps, num_envs), bool)
    plans_here = np.zeros((num_envs, num_players), bool)
    plans_here[:num_real, learners] = True
    plans_here[imagined.rows, imagined.focal] = True

    for iteration in run.iterations():
        beta = args.beta + (args.beta_final - args.beta) * run.progress
        hindsight_prob = args.hindsight_prob * max(0.0, 1 - 2 * run.progress)
        learning_rate = args.learning_rate * (1 - run.progress)
        for optimizer in optimizers.values():
            optimizer.param_groups[0]["lr"] = learning_rate
        first_memory, first_resets = beliefs.memory.copy(), beliefs.new_episode.copy()
        simulations, depth, kl = 0, [], []

        # rollout
        for step in range(args.num_steps):
            beliefs.look(env)
            planned = plans_here & env.alive
            now = {"seen": beliefs.seen, "legal": env.legal, "alive": env.alive, "planned": planned}
            now |= {"t": beliefs.things.time(env.t)[:, None], "last_action": beliefs.last_action}
            for name, array in (now | {"predicted": beliefs.predict()}).items():
                batch[name][step] = array
            run.clock("beliefs")

            env_row, focal = np.nonzero(planned)
            plan = planner.plan(env.states, env_row, focal)
            target, policy = training_target(args, plan, beta), acting_policy(args, plan, beta)
            batch["policy"][step, env_row, focal] = target
            batch["value"][step, env_row, focal] = (target * plan.q_values).sum(1)
            batch["goals"][step, env_row, focal] = plan.goals
            simulations += plan.visits.sum()
            depth.append(plan.depth)
            kl.append((target * np.log((target + 1e-8) / (plan.prior + 1e-8))).sum(1))
            run.clock("planner")

            actions = seats.act()
            imagined.act(actions)
            actions[env_row, focal] = draw_rows(policy, policy_rng)
            known = data_rng.random(len(imagined.rows)) < 0.5  # what imagined players are heading for is known
            batch["goals"][step, imagined.rows[known], imagined.focal[known]] = imagined.goals()[known]
            _, reward, terminated, truncated, info = env.step(actions)
            now = {"action": actions, "reward": args.reward_scale * reward, "taken": info["taken"]}
            for name, array in (now | {"ended": terminated | truncated}).items():
                batch[name][step] = array
            done[step] = info["done"]
            seats.watch(actions, info)
            beliefs.watch(actions, info["taken"], env.alive, info["done"])
            run.count(info, num_real)
            run.clock("env")

        # value targets and hindsight
        env_row, focal = np.nonzero(plans_here & env.alive)
        next_value = np.zeros((num_envs, num_players), np.float32)
        next_value[env_row, focal] = planner.raw(env.states, env_row, focal)[1]
        gamma = pretrain_vae.discounts(args, batch["goals"])
        returns = lambda_returns(batch["reward"], batch["value"], next_value, batch["ended"], gamma, args.td_lambda)
        heading = pretrain_vae.heading_for(batch["action"], batch["taken"], batch["alive"], done, args.horizon)
        goals = pretrain_vae.hindsight_goals(models, heading, batch["seen"])  # (T, B, N, G)

        # rows to learn from: the opponent model from real games only, and scored before it learns from them
        planned, real = batch["planned"], batch["alive"].copy()
        real[:, num_real:] = False
        predictions = pretrain_vae.score_predictions(batch["predicted"], batch["action"], real)
        batch_goals = pretrain_vae.goals_to_learn_with(batch, goals, hindsight_prob, args.hide_prob, data_rng)
        rows = {f"own.{name}": batch[name][planned] for name in ("seen", "t", "legal", "policy")}
        rows |= {"own.goals": batch_goals[planned], "own.returns": returns[planned]}
        rows |= {f"moa.{name}": batch[name][real] for name in ("seen", "t", "legal", "action")}
        rows |= {"moa.goal": pretrain_vae.with_habits(goals[real], models, data_rng)}
        replay[:] = [*replay, rows][-args.replay :]
        known = batch["alive"] & (heading >= 0)
        sequences = pretrain_vae.sequences_to_read(batch, goals, known, first_memory, first_resets, done, num_real)
        run.clock("beliefs")

        # update
        rows = {name: np.concatenate([part[name] for part in replay]) for name in rows}
        data = offline | {
            kind: {name.removeprefix(f"{kind}."): x for name, x in rows.items() if name.startswith(f"{kind}.")}
            for kind in ("own", "moa")
        }  # fmt: skip
        losses = update(args, nets, optimizers, data, sequences, data_rng)
        run.clock("update")

        # evaluation
        gain = {}
        if run.evaluation_due():
            scores = evaluate(args, nets, roles, args.eval_episodes, eval_seed)
            scores["raw_return"] = evaluate(args, nets, roles, args.eval_episodes, eval_seed, planned=False)["return"]
            gain = {"planner/policy_gain": scores["return"] - scores["raw_return"]}
            run.evaluated(scores)
            run.clock("eval")

        # logging
        if run.iteration == args.num_iterations:
            pretrain_vae.draw_predictions(run.dir / "confusion_matrix.png", batch, real, env.spec.action_names)
        if run.log_due():
            belief = beliefs.belief[:num_real][beliefs.alive[:num_real]]
            scalars = {"charts/learning_rate": learning_rate, **losses, **predictions, **gain}
            scalars |= {"goal/belief": belief.max(1).mean(), "goal/known": (heading >= 0)[real].mean()}
            scalars |= {"goal/entropy": -(belief * np.log(belief + 1e-8)).sum(1).mean()}
            if planned.any():
                errors = (returns - batch["value"])[planned]
                scalars["losses/explained_variance"] = 1 - errors.var() / max(returns[planned].var(), 1e-8)
                scalars["planner/kl"] = np.concatenate(kl).mean()
                scalars["planner/depth"] = np.concatenate(depth).mean()
                scalars["planner/sims_per_second"] = simulations * iteration / run.spent["planner"]
            run.log(scalars)

    # result
    fewer = max(1, args.final_eval_episodes // 4)
    result = {"eval": evaluate(args, nets, roles, args.final_eval_episodes, eval_seed + 1)}
    result["eval_greedy"] = evaluate(args, nets, roles, fewer, eval_seed + 1, greedy=True)
    result["eval_raw"] = evaluate(args, nets, roles, args.final_eval_episodes, eval_seed + 1, planned=False)
    if run.load_best():
        result["eval_best"] = evaluate(args, nets, roles, fewer, eval_seed + 1)
    run.finish(result)


if __name__ == "__main__":
    sys.exit(main(Args, train))
