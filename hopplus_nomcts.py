"""HOP+ without trees: infer the others' goals, model their actions, plan a step ahead in a learned world model.

The same mind as hopplus_mcts.py (goals, beliefs, opponent model, imagined co-players are line for line the same; `diff`
shows the rest). Where that one searches trees with the real rules, this one asks a learned world model what follows
each own action and a few draws of the others' actions, and values the boards it imagines. It learns by PPO on real
steps and on games that go on in the world model alone.

    python hopplus_nomcts.py --seed 3                                 # Stag Hunt 4x4, five minutes on one core
    python hopplus_nomcts.py --env-id msh-4h1s-8x8 --start-window 3
    python hopplus_nomcts.py --plan-depth 2                           # looks two steps ahead
    python hopplus_nomcts.py --no-world-model                         # PPO with goals: nothing planned or imagined
    python hopplus_nomcts.py --roles hop,ns,nh,random                 # one learner among rule-based players
    python hopplus_nomcts.py --resume runs/msh-4h1s-4x4__hopplus_nomcts__3__1700000000

Missing offline checkpoints (pretrain_vae.py, train_world_model.py) are made first. docs/hopplus_nomcts.md tells more.
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

import pretrain_vae
import train_world_model
from envs import trees as forest
from envs.checkpoints import Kept
from envs.devices import device_of, move, tensors
from envs.grid import ITEM, PLAYERS, STAY, T
from envs.rng import draw_rows, make_streams
from envs.roles import Seats, learners_of, parse_roles, play_episodes, score_episodes
from envs.run import Positive, Range, Rate, Run, RunArgs, Share, Weight, Whole, descend, main, read_weights, saved_args
from envs.sight import Things, embedding_table, legal_log_softmax, linear, sum_of_embeddings
from envs.trees import UNKNOWN
from pretrain_vae import FLAGS, GoalModels
from train_world_model import ImaginedGames, World


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
    world_ckpt: str = ""
    """folder of a train_world_model.py checkpoint (default: likewise)"""

    # env
    env_id: str = "msh-4h1s-4x4"
    """which game to play"""
    roles: str = ""
    """one entry per player: hop, a rule-based player or a run folder, e.g. hop,ns,ns,ns (default: all hop)"""
    num_envs: Positive = 64
    """games played side by side"""
    start_window: Whole = 0
    """start curriculum: side of the square in which most episodes start at first, none after half of it (0: off)"""
    prosocial: bool = False
    """learn and plan for the mean reward of all players (evaluation counts selfish rewards)"""
    max_block_comp: Annotated[int, Range(0, 100), tyro.conf.arg(metavar="0..100")] = 0
    """random pieces of blocks on the board"""

    # algorithm: planning and imagining
    world_model: bool = True
    """plan and imagine in a learned world model (--no-world-model: PPO with goals only)"""
    perfect_model: bool = False
    """the rules themselves in the place of the world model, to see what its errors cost"""
    plan_depth: Annotated[int, Range(1, 3), tyro.conf.arg(metavar="1..3")] = 1
    """steps that planning looks ahead; after the first one only from the best own actions"""
    draws: Positive = 4
    """draws of the others' goals and actions on which every own action is scored"""
    beta: Weight = 4.0
    """planned policy = softmax(prior_power log prior + beta score) at the start"""
    beta_final: Weight = 8.0
    """the same at the end, reached linearly"""
    play_beta: Weight = 8.0
    """the same in evaluations and wherever a checkpoint plays: what nobody learns from may be surer of itself"""
    prior_power: Share = 0.97
    """below 1 a policy forgets what does not pay: where nothing seems to matter it wanders, and finds what does"""
    real_ratio: Annotated[float, Range(0.01, 1), tyro.conf.arg(metavar="0.01..1")] = 0.2
    """share of real decisions among those that are learned from; the others are imagined (1: none are)"""
    imagine_horizon: Positive = 16
    """steps after which an imagined game is cut"""
    world_updates: Whole = 4
    """minibatches of the world model per iteration"""
    world_learning_rate: Rate = 3e-4
    """of the world model, brought linearly to zero"""

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
    offline_share: Share = 0.5
    """share of offline play in each batch of the opponent model and of the world model"""
    offline_steps: Positive = 60_000
    """steps of rule-based play to take it from"""

    # algorithm: learning
    total_timesteps: Positive = 60_000
    """env steps of the whole run (one step moves all players of one game; imagined games do not count)"""
    num_steps: Annotated[int, Range(2, 10**9), tyro.conf.arg(metavar="2..1e9")] = 16
    """steps per game and iteration"""
    replay: Positive = 4
    """iterations whose data the opponent model and the world model draw on"""
    update_epochs: Positive = 6
    """passes over each batch of decisions"""
    batch_rows: Positive = 1024
    """decisions per minibatch"""
    moa_updates: Positive = 16
    """minibatches of the opponent model per iteration"""
    learning_rate: Rate = 1e-3
    """Adam's learning rate at the start, brought linearly to zero"""
    gamma: Share = 0.97
    """discount; the time limit counts as an end"""
    reward_scale: Weight = 1.0
    """planning and learning count rewards times this (reports do not): with best returns near 5 the defaults fit"""
    td_lambda: Share = 0.9
    """lambda of the value targets"""
    clip_coef: Weight = 0.2
    """PPO's clip range"""
    ent_coef: Weight = 0.01
    """weight of the entropy bonus at the start, brought linearly to zero"""
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
    """Policy and value of a player, given the others' goals: everything that is learned from playing."""

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


def make_nets(args: Args, game, models: GoalModels, world: nn.Module | None, seed: int = 0) -> nn.ModuleDict:
    """Everything a checkpoint holds: the agent; goal space, opponent model, reader; the world model, if any."""
    agent = Agent(args, game, models.goal_size, torch.Generator().manual_seed(seed))
    models.space.requires_grad_(False)
    return nn.ModuleDict({"agent": agent, "models": models} | ({} if world is None else {"world": world}))


# planning: a step or more ahead, in whatever stands for the world


class Plan(NamedTuple):
    """What looking ahead says of each of R decisions."""

    legal: np.ndarray  # (R, A) bool
    prior: np.ndarray  # (R, A) raw policy, given the goals drawn; who is alone: the best actions
    value: np.ndarray  # (R,) raw value, likewise
    q_values: np.ndarray  # (R, A) reward + gamma value of what follows, the mean over the draws; 0 if illegal
    goals: np.ndarray  # (R, N-1, G) of the first draw


class Planner:
    """Scores every own action by looking ahead. Without a world it plans nothing: the raw policy, given the goals."""

    WIDTH = 2  # own actions that are looked at deeper
    ALONE = 20  # steps where nobody else is left, whatever its actions
    AMONG_BYSTANDERS = 4  # the same: 20 get 10.5 for 10.3 among `fix`, but take ten times the time

    def __init__(self, args: Args, game, nets: nn.ModuleDict, beliefs: "Beliefs"):
        self.args, self.game, self.nets, self.beliefs, self.things = args, game, nets, beliefs, Things(game)
        self.world = make_world(args, game, nets)
        self.unknown_goal = nets["models"].flag(pretrain_vae.UNKNOWN)

    @torch.no_grad()
    def ask(self, states: np.ndarray, row: np.ndarray, focal: np.ndarray, goals: np.ndarray):
        """Raw policies, values and legal actions of player focal[m] in states[row[m]], given goals (M, N-1, G)."""
        seen, t = self.things.of_states(states, row, focal), self.things.time(states[row, T])
        legal = self.game.legal(states, trusted=True)[row, focal]
        columns = tensors(device_of(self.nets), seen, t, legal, goals)
        parts = [self.nets["agent"](*some) for some in zip(*(column.split(4096) for column in columns), strict=True)]
        log_probs, value = (torch.cat(outputs) for outputs in zip(*parts, strict=True))
        return log_probs.exp().cpu().numpy(), value.cpu().numpy(), legal

    def worth(self, states, row, focal, streams, goals, cell, code, depth: int) -> np.ndarray:
        """(M,) values of states[row[m]] for player focal[m], given goals (M, N-1, G) about cell and code (M, N-1): the
        raw ones, or what the planned policy gets that looks `depth` steps ahead."""
        unknown = self.unknown_goal.numpy()
        player, alive, goals = forest.goals_left(self.game, states, row, focal, goals, cell, code, unknown)
        prior, value, legal = self.ask(states, row, focal, goals)
        if depth == 0:
            return value
        models, things = self.nets["models"], self.things
        joint = pretrain_vae.draw_others(models, things, states, row, focal, player, alive, goals, streams)
        q_values = self.look_ahead(states, row, focal, legal, joint, (streams, goals, cell, code), depth)
        policy = planned_policy(self.args, Plan(legal, prior, value, q_values, goals), self.args.play_beta)
        return (policy * q_values).sum(1)

    def plan(self, states: np.ndarray, env_row: np.ndarray, focal: np.ndarray) -> Plan:
        """Look ahead for player focal[r] in states[env_row[r]], on draws of the others' goals and actions. Where nobody
        else is left there is nothing to draw, and it looks farther."""
        beliefs, others, draws = self.beliefs, self.game.num_players - 1, self.args.draws if self.world else 1
        drawn = np.full((len(env_row), draws, others), -1)
        streams = np.zeros((len(env_row), draws), np.uint64)
        forest.draw_goals(beliefs.belief, beliefs.alive, env_row, focal, beliefs.streams, drawn, streams)
        joint = np.full((len(env_row), draws, others + 1), STAY)
        forest.draw_actions(beliefs.probs, env_row, focal, drawn, streams, joint)

        def plan_some(some: np.ndarray, alone: bool) -> Plan:
            on = (column[some, : 1 if alone else draws] for column in (drawn, streams, joint))
            return self.plan_with(states, env_row[some], focal[some], *on, alone)

        return forest.in_two_parts((drawn < 0).all((1, 2)), plan_some)

    def plan_with(self, states, env_row, focal, drawn, streams, joint, alone=False) -> Plan:
        """The same on goals (R, D, N-1), streams (R, D) and actions (R, D, N) that are drawn."""
        beliefs, (draws, others) = self.beliefs, drawn.shape[1:]
        decision = np.repeat(np.arange(len(env_row)), draws)  # (M,) of each draw
        drawn = drawn.reshape(-1, others)
        player = (focal[decision][:, None] + 1 + np.arange(others)) % self.game.num_players  # (M, N-1)
        row, gone = env_row[decision][:, None], drawn < 0
        goals = np.where(gone[..., None], self.unknown_goal.numpy(), beliefs.goal[row, player, drawn])
        cell, code = np.where(gone, -1, beliefs.cell[row, drawn]), np.where(gone, UNKNOWN, beliefs.code[row, drawn])
        prior, value, legal = self.ask(states, row[:, 0], focal[decision], goals)

        def by_decision(array: np.ndarray) -> np.ndarray:
            return array.reshape(-1, draws, *array.shape[1:])  # (R, D, ...)

        prior, value, legal = by_decision(prior).mean(1), by_decision(value).mean(1), by_decision(legal)[:, 0]
        q_values = np.where(legal, value[:, None], 0.0).astype(np.float32)
        if self.world and alone:
            how = self.ALONE, self.args.reward_scale, self.args.gamma
            q_values, prior = self.world.ways_on(states[env_row], focal, *how, self.raw)
        elif self.world:
            about = streams.reshape(-1, 1), goals, cell, code
            q_values = self.look_ahead(states, env_row, focal, legal, joint, about, self.args.plan_depth)
            bystander = code == forest.BYSTANDER
            share = by_decision((bystander | gone).all(1) & bystander.any(1)).mean(1)  # of draws as good as alone
            if len(some := np.flatnonzero(share)):
                how = self.AMONG_BYSTANDERS, self.args.reward_scale, self.args.gamma
                ways, _ = self.world.ways_on(states[env_row[some]], focal[some], *how, self.raw)
                q_values[some] += (share[some, None] * (ways - q_values[some])).astype(np.float32)
        return Plan(legal, prior, value, q_values, by_decision(goals)[:, 0])

    def look_ahead(self, states, env_row, focal, legal, joint, drawn, depth: int) -> np.ndarray:
        """(R, A) reward + gamma value of what follows each legal action, the mean over draws joint (R, D, N) of the
        others' actions, with `drawn` streams, goals, cells, codes (R D, ...); 0 for illegal ones. Farther than one step
        only the best actions are followed; no other counts for more than these."""
        draws, (decision, action) = joint.shape[1], np.nonzero(legal)
        joint = joint[decision]  # (M, D, N)
        joint[np.arange(len(decision)), :, focal[decision]] = action[:, None]
        draw = (decision[:, None] * draws + np.arange(draws)).ravel()
        focal = np.repeat(focal[decision], draws)
        ahead, which = self.world.step_once(states, env_row[draw // draws], joint.reshape(-1, joint.shape[2]))
        goes_on = ~ahead.ended[which, focal]  # after the own end there is nothing

        def score(followed: np.ndarray, steps: int) -> np.ndarray:  # (R, A)
            result, on = self.args.reward_scale * ahead.reward[which, focal], np.flatnonzero(followed)
            about = [column[draw[on]] for column in drawn]
            gamma = pretrain_vae.discounts(self.args, about[1]).astype(np.float32)
            result[on] += gamma * self.worth(ahead.states, which[on], focal[on], *about, steps)
            scores = np.zeros(legal.shape, np.float32)
            scores[decision, action] = result.reshape(-1, draws).mean(1)
            return scores

        q_values = score(goes_on, 0)
        if depth == 1:
            return q_values
        ranked = np.where(legal, q_values, -np.inf)
        best = legal & (ranked >= np.sort(ranked, 1)[:, [-self.WIDTH]])
        deeper = score(goes_on & np.repeat(best[decision, action], draws), depth - 1)
        most = np.where(best, deeper, np.inf).min(1, keepdims=True)
        return np.where(best, deeper, np.minimum(q_values, most) * legal)

    def raw(self, states: np.ndarray, env_row: np.ndarray, focal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Raw policies (R, A) and values (R,), which know no goals."""
        goals = np.tile(self.unknown_goal.numpy(), (len(env_row), self.game.num_players - 1, 1))
        return self.ask(states, env_row, focal, goals)[:2]


def make_world(args: Args, game, nets: nn.ModuleDict) -> World | None:
    """What the planner imagines in: the learned model, the rules, or nothing."""
    return World(game, None if args.perfect_model else nets["world"]) if args.world_model else None


def planned_policy(args: Args, plan: Plan, beta: float) -> np.ndarray:
    """(R, A) softmax(prior_power log prior + beta score) over the legal actions; with nothing planned, the prior"""
    if not args.world_model:
        return plan.prior
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
        found |= {"predicted": beliefs.predict()[row]}
        if self.planned and self.planner.world:  # the next boards, should the others do what is expected of them
            action = np.flatnonzero(thoughts["legal"][rows == row][0])
            joint = np.where(beliefs.alive[row], found["predicted"].argmax(1), STAY)[None].repeat(len(action), 0)
            joint[:, self.seat] = action
            ahead = self.planner.world.step(beliefs.states[row][None].repeat(len(action), 0), joint)
            found |= {"imagined_action": action, "imagined_state": ahead.states, "imagined_over": ahead.over}
            found |= {"imagined_reward": ahead.reward[:, self.seat]}
        return found

    def watch(self, env, actions: np.ndarray, info: dict[str, np.ndarray]) -> None:
        if self.beliefs.looked:
            self.beliefs.watch(actions, info["taken"], env.alive, info["done"])


def load_policy(checkpoint: Path, spec: dict, env, seat: int, learner: int | None, seed: int, greedy: bool) -> Policy:
    """A checkpoint of this script as a player; all learners share one network."""
    args = saved_args(Args, spec)
    game = envs.game(env.spec.env_id, **env.spec.config | {"prosocial": args.prosocial})  # as it learned
    world = train_world_model.make_model(spec["world_sizes"], game) if spec["world_sizes"] else None
    nets = make_nets(args, game, GoalModels(spec["model_sizes"]), world)
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


def lambda_returns(reward, value, next_value, ended, cut, gamma: np.ndarray, lam: float) -> np.ndarray:
    """Value targets, all (T, B, N): reward plus what follows, partly as valued and partly as it came. Where a game was
    cut, next_value, of the board at which it was, stands for the rest."""
    returns = np.zeros_like(reward)
    following = next_value[-1]
    for step in reversed(range(len(reward))):
        following = np.where(cut[step], next_value[step], following)
        following = reward[step] + gamma[step] * ~ended[step] * ((1 - lam) * next_value[step] + lam * following)
        returns[step] = following
    return returns


def agent_loss(args: Args, agent: Agent, mb: dict[str, torch.Tensor], ent_coef: float) -> dict[str, torch.Tensor]:
    """The parts of the loss, and what to log. The ratio is to the policy that acted, the planned one: what is gained is
    the raw policy's gain over how games were played, the clip keeps it near that, cross-entropy brings it there."""
    log_probs, value = agent(mb["seen"], mb["t"], mb["legal"], mb["goals"])
    log_probs = log_probs.clamp_min(-1e8)
    log_ratio = log_probs.gather(1, mb["action"][:, None])[:, 0] - mb["log_prob"]
    ratio, advantage = log_ratio.exp(), mb["advantage"]
    advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
    clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    entropy = -(log_probs.exp() * log_probs).sum(1).mean()
    losses = {
        "policy_loss": torch.max(-advantage * ratio, -advantage * clipped).mean(),
        "value_loss": args.vf_coef * (value - mb["returns"]).pow(2).mean(),
        "plan_loss": -(mb["policy"] * log_probs).sum(1).mean(),
        "entropy_loss": -ent_coef * entropy,
    }
    losses["loss"] = sum(losses.values())
    with torch.no_grad():
        losses |= {"entropy": entropy, "approx_kl": (ratio - 1 - log_ratio).mean()}
        losses |= {"clipfrac": ((ratio - 1).abs() > args.clip_coef).float().mean()}
    return losses


def update(args: Args, nets: nn.ModuleDict, optimizers: dict, data: dict[str, dict], sequences: dict, rng, ent_coef):
    """The updates of one iteration: policy and value, opponent model, reader of goals, world model. Returns what there
    is to log. data: rows of the `own` decisions, of `moa` and `moa_offline`, `world` and `world_offline`."""
    models, own, log = nets["models"], data["own"], {}

    def learn(net: str, loss: str, losses: dict[str, torch.Tensor]) -> None:
        descend(optimizers[net], losses[loss], args.max_grad_norm)
        for name, x in losses.items():
            log.setdefault(name, []).append(x.item())

    def batch_of(kind: str) -> dict[str, torch.Tensor]:
        return pretrain_vae.mixed_batch(data[kind], data[f"{kind}_offline"], args.batch_rows, args.offline_share, rng)

    num_batches = max(1, round(len(own["t"]) / args.batch_rows))
    for _ in range(args.update_epochs if len(own["t"]) else 0):
        for mb_rows in np.array_split(rng.permutation(len(own["t"])), num_batches):
            mb = move({name: rows[mb_rows] for name, rows in own.items()}, device_of(models))
            learn("agent", "loss", agent_loss(args, nets["agent"], mb, ent_coef))
    for _ in range(args.moa_updates):
        loss = pretrain_vae.moa_loss(models.moa, batch_of("moa"), args.hide_prob, rng)
        learn("moa", "moa_loss", {"moa_loss": loss})
    if args.goal_mode != "none":
        learn("reader", "goal_loss", {"goal_loss": pretrain_vae.reader_loss(models, sequences)})
    for _ in range(args.world_updates if "world" in nets else 0):
        learn("world", "world_loss", {"world_loss": train_world_model.loss_of(nets["world"], batch_of("world"))})
    return {f"losses/{name}": float(np.mean(values)) for name, values in log.items()}


def make_storage(args: Args, env, things: Things, goal_size: int) -> dict[str, np.ndarray]:
    """Arrays of one iteration, all (T, B, N, ...)."""
    shape, num_actions = (args.num_steps, env.num_envs, env.spec.num_players), env.spec.num_actions
    storage = {name: np.zeros(shape, bool) for name in ("alive", "planned", "ended")}
    storage |= {name: np.zeros(shape, np.int64) for name in ("action", "last_action", "taken")}
    storage |= {name: np.zeros(shape, np.float32) for name in ("t", "value", "reward", "log_prob", "next_value")}
    storage |= {name: np.zeros((*shape, num_actions), np.float32) for name in ("policy", "predicted")}
    storage |= {"seen": np.zeros((*shape, things.most), np.int32), "legal": np.zeros((*shape, num_actions), bool)}
    return storage | {"goals": np.zeros((*shape, shape[2] - 1, goal_size), np.float32)}


def train(args: Args, run: Run) -> None:
    # seeding
    env_seed, seats_seed, planner_seed, policy_seed, data_seed, init_seed, eval_seed, dream_seed, worlds_seed = (
        int(seed) for seed in np.random.SeedSequence(args.seed).generate_state(9)
    )
    policy_rng, data_rng = np.random.default_rng(policy_seed), np.random.default_rng(data_seed)

    # env setup: first the games that count, then the imagined ones
    envs.game(args.env_id)  # refuses battles: their observations are no planes
    settings = {"prosocial": args.prosocial, "max_block_comp": args.max_block_comp}
    real_env = envs.make(args.env_id, num_envs=args.num_envs, seed=env_seed, **settings)
    game, num_players = real_env.game, real_env.spec.num_players
    game.check_window(args.start_window, 0.9 if args.start_window else 0.0)
    roles = parse_roles(args.roles, num_players, "hop")
    seats = Seats(real_env, roles, "hop", seats_seed)
    learners = learners_of(roles, "hop")

    # networks
    learns_world = args.world_model and not args.perfect_model
    models = pretrain_vae.models_for(run, args)
    world_model = train_world_model.model_for(run, args) if learns_world else None
    nets = make_nets(args, game, models, world_model, init_seed).to(run.device)
    trained = {"agent": nets["agent"], "moa": models.moa, "reader": models.reader}
    trained |= {"world": world_model} if learns_world else {}
    optimizers = {name: torch.optim.Adam(net.parameters(), eps=1e-5, foreach=True) for name, net in trained.items()}
    num_real, world = args.num_envs, make_world(args, game, nets)
    num_imagined = round(num_real * len(learners) * (1 / args.real_ratio - 1)) if world else 0
    env = ImaginedGames(real_env, world, num_imagined, args.imagine_horizon, worlds_seed)
    num_envs = env.num_envs
    beliefs = Beliefs(args, game, models, num_envs, planner_seed)
    planner = Planner(args, game, nets, beliefs)
    imagined = ImaginedPlayers(beliefs, num_real, learners, dream_seed)
    replay: list[dict[str, np.ndarray]] = []  # of the last iterations: rows "moa.*" and "world.*"
    keep = {"env": env, "seats": seats, "beliefs": beliefs, "imagined": imagined, "replay": replay}
    keep |= {"policy_rng": policy_rng, "data_rng": data_rng, **{f"adam_{k}": x for k, x in optimizers.items()}}
    run.start(
        nets, env.spec, learners=learners, keep=keep,
        facts={"roles": roles, "model_sizes": models.sizes, "world_sizes": world_model.sizes if learns_world else None},
        title=f"HOP+ without trees on {args.env_id}, roles {','.join(roles)}",
        say=["return: mean per player and episode; best_eval: the best planned evaluation so far"],
    )  # fmt: skip
    offline = {"moa_offline": pretrain_vae.rehearsal(models, game, args.offline_steps, data_seed, args.keen_prior > 0)}
    if learns_world:
        offline["world_offline"] = train_world_model.rehearsal(game, -(-args.offline_steps // 4), data_seed)
    if replay:
        env.boards = np.concatenate([rows["world.states"] for rows in replay])

    # storage
    batch = make_storage(args, env, beliefs.things, models.goal_size)  # (T, B, N, ...)
    done, cut = np.zeros((args.num_steps, num_envs), bool), np.zeros((args.num_steps, num_envs), bool)
    plans_here = np.zeros((num_envs, num_players), bool)
    plans_here[:num_real, learners] = True
    plans_here[imagined.rows, imagined.focal] = True

    for _ in run.iterations():
        beta = args.beta + (args.beta_final - args.beta) * run.progress
        hindsight_prob = args.hindsight_prob * max(0.0, 1 - 2 * run.progress)
        for name, optimizer in optimizers.items():
            rate = args.world_learning_rate if name == "world" else args.learning_rate
            optimizer.param_groups[0]["lr"] = rate * (1 - run.progress)
        if args.start_window:
            real_env.set_start_window(args.start_window, 0.9 * max(0.0, 1 - 2 * run.progress))
        first_memory, first_resets = beliefs.memory.copy(), beliefs.new_episode.copy()
        kl = []

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
            kl.append((target * np.log((target + 1e-8) / (plan.prior + 1e-8))).sum(1))
            run.clock("planner")

            actions = np.full((num_envs, num_players), STAY)
            actions[:num_real] = seats.act()
            imagined.act(actions)
            chosen = draw_rows(policy, policy_rng)
            actions[env_row, focal] = chosen
            batch["log_prob"][step, env_row, focal] = np.log(policy[np.arange(len(chosen)), chosen])
            known = data_rng.random(len(imagined.rows)) < 0.5  # what imagined players are heading for is known
            batch["goals"][step, imagined.rows[known], imagined.focal[known]] = imagined.goals()[known]
            found = env.step(actions)
            now = {"action": actions, "reward": args.reward_scale * found["reward"], "taken": found["taken"]}
            for name, array in (now | {"ended": found["ended"]}).items():
                batch[name][step] = array
            done[step], cut[step] = found["done"], found["cut"]
            seats.watch(actions[:num_real], found["info"])
            beliefs.watch(actions, found["taken"], env.alive, found["done"])
            rows = np.flatnonzero(found["cut"][num_real:])
            if len(rows):  # a cut game would have gone on
                worth = planner.raw(found["after"], rows, imagined.focal[rows])[1]
                batch["next_value"][step, num_real + rows, imagined.focal[rows]] = worth
            run.count(found["info"])
            run.clock("env")

        # value targets and hindsight
        env_row, focal = np.nonzero(plans_here & env.alive)
        last_value = np.zeros((1, num_envs, num_players), np.float32)
        last_value[0, env_row, focal] = planner.raw(env.states, env_row, focal)[1]
        next_value = np.concatenate([batch["value"][1:], last_value])
        next_value = np.where(cut[:, :, None], batch["next_value"], next_value)
        played = batch["reward"], batch["value"], next_value, batch["ended"], cut[:, :, None]
        returns = lambda_returns(*played, pretrain_vae.discounts(args, batch["goals"]), args.td_lambda)
        heading = pretrain_vae.heading_for(batch["action"], batch["taken"], batch["alive"], done, args.horizon)
        goals = pretrain_vae.hindsight_goals(models, heading, batch["seen"])  # (T, B, N, G)

        # rows to learn from: the opponent model from real games only, and scored before it learns from them
        planned, real = batch["planned"], batch["alive"].copy()
        real[:, num_real:] = False
        predictions = pretrain_vae.score_predictions(batch["predicted"], batch["action"], real)
        batch_goals = pretrain_vae.goals_to_learn_with(batch, goals, hindsight_prob, args.hide_prob, data_rng)
        own = {name: batch[name][planned] for name in ("seen", "t", "legal", "policy", "action", "log_prob")}
        own |= {"goals": batch_goals[planned], "returns": returns[planned]}
        own |= {"advantage": (returns - batch["value"])[planned]}
        seen = env.transitions()
        predictions |= train_world_model.score_fresh(world_model, seen) if learns_world else {}
        rows = {f"world.{name}": x for name, x in seen.items()}
        rows |= {f"moa.{name}": batch[name][real] for name in ("seen", "t", "legal", "action")}
        rows |= {"moa.goal": pretrain_vae.with_habits(goals[real], models, data_rng)}
        replay[:] = [*replay, rows][-args.replay :]
        known = batch["alive"] & (heading >= 0)
        sequences = pretrain_vae.sequences_to_read(batch, goals, known, first_memory, first_resets, done, num_real)
        run.clock("beliefs")

        # update
        rows = {name: np.concatenate([part[name] for part in replay]) for name in rows}
        data = offline | {"own": own} | {
            kind: {name.removeprefix(f"{kind}."): x for name, x in rows.items() if name.startswith(f"{kind}.")}
            for kind in ("moa", "world")
        }  # fmt: skip
        env.boards = data["world"]["states"]
        losses = update(args, nets, optimizers, data, sequences, data_rng, args.ent_coef * (1 - run.progress))
        run.clock("update")

        # evaluation
        if run.evaluation_due():
            scores = evaluate(args, nets, roles, args.eval_episodes, eval_seed)
            scores["raw_return"] = evaluate(args, nets, roles, args.eval_episodes, eval_seed, planned=False)["return"]
            predictions["planner/policy_gain"] = scores["return"] - scores["raw_return"]
            run.evaluated(scores)
            run.clock("eval")

        # logging
        if run.iteration == args.num_iterations:
            pretrain_vae.draw_predictions(run.dir / "confusion_matrix.png", batch, real, env.spec.action_names)
        if run.log_due():
            belief = beliefs.belief[:num_real][beliefs.alive[:num_real]]
            scalars = losses | predictions | {"charts/learning_rate": optimizers["agent"].param_groups[0]["lr"]}
            scalars |= {"goal/belief": belief.max(1).mean(), "goal/known": (heading >= 0)[real].mean()}
            scalars |= {"goal/entropy": -(belief * np.log(belief + 1e-8)).sum(1).mean()}
            if planned.any():
                scalars["losses/explained_variance"] = 1 - own["advantage"].var() / max(own["returns"].var(), 1e-8)
                scalars["planner/kl"] = np.concatenate(kl).mean()
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
