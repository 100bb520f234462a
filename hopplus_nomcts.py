"""HOP+ without trees: the same goals, beliefs and opponent model, planning one step ahead in a learned world model.

Everything about the other players reads as in hopplus_mcts.py (`diff` the two): a weighted set of goals for each of
them, moved by Bayes' rule, and an opponent model that says what players with these goals do. The tree is gone. For each
own action the others' actions are drawn a few times, the world model of train_world_model.py says what follows, and the
value network says what that is worth; the player acts by a softmax of these scores mixed with its policy. The networks
learn by PPO from the games and, to save real steps, from games that go on in the world model alone, where the
co-players follow the opponent model. World model and opponent model keep learning from the real games.

    python hopplus_nomcts.py --seed 3                                   # Stag Hunt 4x4
    python hopplus_nomcts.py --env-id msh-4h1s-8x8 --start-window 3 --total-timesteps 300000
    python hopplus_nomcts.py --real-ratio 1.0                           # nothing imagined, only planned
    python hopplus_nomcts.py --no-world-model                           # PPO with goals
    python hopplus_nomcts.py --resume runs/msh-4h1s-4x4__hopplus_nomcts__3__1700000000

Missing offline checkpoints (pretrain_vae.py, train_world_model.py) are made first. docs/hopplus_nomcts.md tells more.
"""

import csv
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from numba import njit
from safetensors.torch import load_file, save_file
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

import envs
import pretrain_vae
import train_world_model
from envs.grid import BLOCK, FIRST_INTERACTION, FREE, GONE, ITEM, PLAYERS, STAY, T
from envs.recording import collect_play, collect_transitions
from envs.rng import make_streams, scramble, unit
from envs.roles import Seats, parse_roles, play_episodes


@dataclass
class Args:
    # run
    exp_name: str = "hopplus_nomcts"
    """name of this experiment, part of the run folder's name"""
    seed: int = 1
    """seed of everything: env, policy, planner, data, evaluation"""
    run_dir: str = ""
    """folder of this run (default: runs/<env>__<exp>__<seed>__<time>)"""
    resume: str = ""
    """run folder to go on with; all other settings are then taken from it"""
    track: bool = False
    """also log to Weights & Biases"""
    wandb_project_name: str = "hopplus-lab"
    """project of the tracked run"""
    wandb_entity: str | None = None
    """team of the tracked run"""
    wandb_group: str | None = None
    """group of the tracked run (a sweep sets it)"""
    wandb_tags: str = ""
    """comma-separated tags of the tracked run"""
    torch_threads: int = 1
    """threads of torch; small networks run best with one"""
    log_every: int = 5
    """iterations between two rows of metrics.csv and TensorBoard"""
    eval_every: int = 25_000
    """env steps between two evaluations, planned and raw (0: only at the end)"""
    eval_episodes: int = 512
    """episodes of each evaluation during training, always from the true starts"""
    final_eval_episodes: int = 4096
    """episodes of the evaluation at the end (a quarter of them for greedy play and for the best checkpoint)"""
    checkpoint_every: int = 10
    """iterations between two saves of checkpoints/last"""
    vae_ckpt: str = ""
    """folder of a pretrain_vae.py checkpoint (default: the newest that fits under vae_ckpts/, else one is made)"""
    world_ckpt: str = ""
    """folder of a train_world_model.py checkpoint (default: the newest that fits under vae_ckpts/, else one is made)"""

    # env
    env_id: str = "msh-4h1s-4x4"
    """which game to play"""
    roles: str = ""
    """one entry per player: hop, a rule-based player or a run folder, e.g. hop,ns,ns,ns (default: all hop)"""
    num_envs: int = 64
    """games played side by side"""
    start_window: int = 0
    """start curriculum: side of the square in which some episodes start (0: off)"""
    start_window_prob: float = 0.9
    """probability of such a start at the beginning of training, decaying linearly"""
    start_window_until: float = 0.5
    """share of training after which all episodes start as in the true game"""
    prosocial: bool = False
    """learn and plan for the mean reward of all players (evaluation counts selfish rewards)"""
    max_block_comp: int = 0
    """random pieces of blocks on the board"""

    # algorithm: planning and imagining
    world_model: bool = True
    """plan and imagine in a world model; without: PPO with goals"""
    perfect_model: bool = False
    """the game's own rules in the place of the learned world model (an upper bound)"""
    planes: bool = False
    """the older world model, each plane by itself, which may imagine the impossible"""
    draws: int = 4
    """draws of the others' goals and actions per decision; all own actions are scored on the same ones"""
    beta: float = 4.0
    """planned policy = softmax(prior_power log policy + beta score) at the start"""
    beta_final: float = 8.0
    """the same at the end, reached linearly"""
    play_beta: float = 8.0
    """the same in evaluations and wherever a checkpoint plays (scores of one step are too rough for a sharper one)"""
    prior_power: float = 0.97
    """below 1 a policy forgets what does not pay: where nothing seems to matter it wanders, and finds what does"""
    real_ratio: float = 0.2
    """share of real decisions among all that are learned from; the rest is imagined (1.0: none)"""
    imagine_horizon: int = 16
    """steps after which an imagined game starts anew from a board of real play"""
    world_updates: int = 4
    """minibatches of the world model per iteration"""
    world_learning_rate: float = 3e-4
    """its learning rate, brought linearly to zero"""
    # algorithm: goals, beliefs and the opponent model
    goal_mode: Literal["learned", "oracle", "none"] = "learned"
    """goals of the learned space (HOP+), the named kinds of prey (HOP), or none (direct opponent modelling)"""
    intra_om: bool = True
    """beliefs move within an episode, with every action seen"""
    inter_om: bool = True
    """beliefs of an episode start from what the player pursued before"""
    horizon: int = 10
    """steps ahead among which the goal inference looks for the state a player was heading for"""
    selector: Literal["hunt", "optimistic", "conservative", "random"] = "hunt"
    """which of these states: of the hunt, of the largest or smallest value to the others, or any"""
    hindsight_prob: float = 0.5
    """how often the network learns with the goals known in hindsight, at the start; falls to 0 by half of training"""
    hide_prob: float = 0.15
    """how often it learns with a goal hidden"""
    belief_floor: float = 0.02
    """share of every belief that stays with the inference network, so that no goal dies"""
    belief_decay: float = 0.995
    """what an earlier episode counts, per episode since"""
    open_mind: float = 0.3
    """share of a first belief that goes to all kinds of goals alike, whatever the inference network has got used to"""
    aimless_prior: float = 0.1
    """first belief that a player has no goal and moves at random"""
    habit_prior: float = 0.1
    """first belief that a player does what those met in the games so far have done, whatever their goals"""
    offline_share: float = 0.5
    """share of offline play in each batch of the opponent model and the world model"""
    offline_steps: int = 60_000
    """steps of rule-based play to learn the opponent model from before the first game; as many for the world model"""
    offline_updates: int = 800
    """minibatches of it"""
    # algorithm: learning
    total_timesteps: int = 60_000
    """env steps of the whole run (one step moves all players of one game; imagined games do not count)"""
    num_steps: int = 16
    """steps per game and iteration"""
    replay: int = 4
    """iterations whose data the opponent model and the world model draw on"""
    update_epochs: int = 6
    """passes over the decisions of each iteration"""
    batch_rows: int = 1024
    """decisions per minibatch"""
    moa_updates: int = 16
    """minibatches of the opponent model per iteration"""
    learning_rate: float = 1e-3
    """Adam's learning rate at the start, brought linearly to zero"""
    gamma: float = 0.97
    """discount; the time limit counts as an end"""
    reward_scale: float = 1.0
    """planning and learning count rewards times this (reports do not): with best returns near 5 the defaults fit"""
    td_lambda: float = 0.9
    """lambda of the returns that values and advantages are made of"""
    clip_coef: float = 0.2
    """PPO's clip range"""
    ppo_coef: float = 1.0
    """weight of PPO's loss"""
    plan_coef: float = 1.0
    """weight of the cross-entropy to the planned policy (0: PPO alone)"""
    ent_coef: float = 0.01
    """weight of the entropy bonus at the start, brought linearly to zero"""
    initial_value: float = 0.0
    """what the critic expects before it has learned"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """largest gradient norm of each network"""
    hidden: int = 64
    """width of all layers"""
    shared_policy: bool = True
    """one network for all learners instead of one each"""

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        return max(1, self.total_timesteps // self.batch_size)


ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")
# codes of a goal that is no item: unknown; none (moves at random); whatever the players met so far have pursued
HIDDEN, AIMLESS, HABIT = 0, -1, -2
FLAGS = 3  # numbers of a goal behind its z: habit, hidden, aimless
WORLD_ROWS = 4096  # transitions imagined at a time


# networks


class Things:
    """Turns planes into the ids of the few things on the board: each by its plane and its place relative to the own
    cell, and the own cell itself.

    A sum of embeddings of these ids is a dense layer on ego-centred planes at a fraction of its cost. Id 0 is nothing.
    """

    def __init__(self, game):
        height, width, planes = game.obs_shape
        num_cells, places = height * width, (2 * height - 1) * (2 * width - 1)
        rows, columns = np.divmod(np.arange(num_cells), width)
        down = rows[None, :] - rows[:, None] + height - 1  # (own cell, cell)
        across = columns[None, :] - columns[:, None] + width - 1
        ids = 1 + (down * (2 * width - 1) + across)[:, :, None] * planes + np.arange(planes)  # (own cell, cell, plane)
        ids[:, :, 0] = 1 + places * planes + np.arange(num_cells)  # the own plane tells the absolute place
        self.ids, self.planes, self.horizon = ids.reshape(num_cells, -1), planes, game.config.horizon
        self.num_ids = 1 + places * planes + num_cells
        self.most = game.num_players + int(game.item_counts.sum()) + 4 * game.config.max_block_comp

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        """obs (..., H, W, C) of 0/1 -> ids (..., most things that there can be)"""
        flat = obs.reshape(-1, self.ids.shape[1])
        row, bit = np.nonzero(flat)
        own_cell = flat[:, :: self.planes].argmax(1)
        count = np.bincount(row, minlength=len(flat))
        slot = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
        ids = np.zeros((len(flat), self.most), np.int32)
        ids[row, slot] = self.ids[own_cell[row], bit]
        return ids.reshape(*obs.shape[:-3], self.most)

    def time(self, t: np.ndarray) -> np.ndarray:
        """Share of the episode that is over; nobody acts at the horizon, so that counts as one step earlier."""
        return (np.minimum(t, self.horizon - 1) / self.horizon).astype(np.float32)


class Agent(nn.Module):
    """`num_nets` policies and values of one shape, stacked, given the others' goals: net p sees row p of every input.

    A goal is a vector of G numbers: z of the goal space, and two flags for a goal that is hidden or absent.
    """

    def __init__(self, num_nets: int, sizes: dict[str, int], generator: torch.Generator):
        super().__init__()
        hidden, others, goal_size = sizes["hidden"], sizes["num_players"] - 1, sizes["goal_size"]

        def normal(*shape: int, std: float) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator) * std)

        self.num_nets, self.num_actions, self.width = num_nets, sizes["num_actions"], hidden
        self.embedding = normal(num_nets, sizes["num_ids"], 2 * hidden, std=0.3)  # first layer of actor | critic
        self.time = normal(num_nets, 1, 2 * hidden, std=0.3)
        self.goals = normal(num_nets, others * goal_size, 2 * hidden, std=0.1)
        self.actor = normal(num_nets, hidden, hidden, std=(2 / hidden) ** 0.5)
        self.critic = normal(num_nets, hidden, hidden, std=(2 / hidden) ** 0.5)
        self.actor_bias = nn.Parameter(torch.zeros(num_nets, 1, hidden))
        self.critic_bias = nn.Parameter(torch.zeros(num_nets, 1, hidden))
        self.policy_head = normal(num_nets, self.num_actions, hidden, std=0.01 / hidden**0.5)
        self.policy_bias = nn.Parameter(torch.zeros(num_nets, 1, self.num_actions))
        self.value_head = normal(num_nets, hidden, 1, std=1 / hidden**0.5)
        self.value_bias = nn.Parameter(torch.zeros(num_nets, 1, 1))

    def forward(self, ids, t, legal, goals) -> tuple[torch.Tensor, torch.Tensor]:
        """ids (P, R, K), t (P, R) in 0..1, legal (P, R, A), goals (P, R, (N-1) G) -> log-probs (P, R, A), (P, R)"""
        bags = zip(ids, self.embedding.unbind(), strict=True)
        first = torch.stack([F.embedding_bag(row, table, mode="sum", padding_idx=0) for row, table in bags])
        first = torch.relu(first + t[:, :, None] * self.time + torch.bmm(goals, self.goals))
        actor = torch.relu(torch.baddbmm(self.actor_bias, first[:, :, : self.width], self.actor))
        critic = torch.relu(torch.baddbmm(self.critic_bias, first[:, :, self.width :], self.critic))
        logits = torch.baddbmm(self.policy_bias, actor, self.policy_head.mT).masked_fill(~legal, -1e9)
        return F.log_softmax(logits, dim=-1), torch.baddbmm(self.value_bias, critic, self.value_head)[:, :, 0]


class OpponentModel(nn.Module):
    """pi(action | observation of j, t, goal of j): small enough to be asked for everybody at every node of a tree."""

    def __init__(self, sizes: dict[str, int], generator: torch.Generator):
        super().__init__()
        hidden, num_actions = sizes["hidden"], sizes["num_actions"]

        def normal(*shape: int, std: float) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator) * std)

        self.embedding = normal(sizes["num_ids"], hidden, std=0.3)
        self.time = normal(hidden, std=0.3)
        self.goal = normal(sizes["goal_size"], hidden, std=0.3)
        self.layer = normal(hidden, hidden, std=(2 / hidden) ** 0.5)
        self.layer_bias = nn.Parameter(torch.zeros(hidden))
        self.head = normal(num_actions, hidden, std=0.1 / hidden**0.5)
        self.head_bias = nn.Parameter(torch.zeros(num_actions))

    def forward(self, ids, t, legal, goal) -> torch.Tensor:
        """ids (R, K), t (R,), legal (R, A), goal (R, G) -> log-probabilities (R, A)"""
        first = F.embedding_bag(ids, self.embedding, mode="sum", padding_idx=0)
        first = torch.relu(first + t[:, None] * self.time + goal @ self.goal)
        second = torch.relu(torch.addmm(self.layer_bias, first, self.layer))
        return F.log_softmax(torch.addmm(self.head_bias, second, self.head.T).masked_fill(~legal, -1e9), dim=-1)


class GoalReader(nn.Module):
    """q(z | what was seen of j this episode): a recurrent network over j's observations and actions."""

    def __init__(self, sizes: dict[str, int], generator: torch.Generator):
        super().__init__()
        hidden, z_size = sizes["hidden"], sizes["goal_size"] - FLAGS
        self.embedding = nn.Parameter(torch.randn(sizes["num_ids"], hidden, generator=generator) * 0.3)
        self.action = nn.Parameter(torch.randn(sizes["num_actions"] + 1, hidden, generator=generator) * 0.3)
        self.cell = nn.GRUCell(hidden, hidden)
        self.head = nn.Linear(hidden, 2 * z_size)
        for weight in (*self.cell.parameters(), *self.head.parameters()):
            weight.data = (torch.rand(weight.shape, generator=generator) * 2 - 1) / hidden**0.5

    def forward(self, ids, last_action, memory) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """ids (R, K), action before (R,) or A at the start, memory (R, H) -> mean (R, D), log std (R, D), memory"""
        seen = F.embedding_bag(ids, self.embedding, mode="sum", padding_idx=0) + self.action[last_action]
        memory = self.cell(torch.relu(seen), memory)
        mean, log_std = self.head(memory).chunk(2, 1)
        return mean, log_std.clamp(-3.0, 2.0), memory


class Weights(NamedTuple):
    """The weights of Agent and OpponentModel as the compiled search reads them: views, always up to date."""

    embedding: np.ndarray  # (P, ids, 2H)
    time: np.ndarray  # (P, 2H)
    goals: np.ndarray  # (P, (N-1) G, 2H)
    actor: np.ndarray  # (P, H, H)
    critic: np.ndarray  # (P, H, H)
    actor_bias: np.ndarray  # (P, H)
    critic_bias: np.ndarray  # (P, H)
    policy_head: np.ndarray  # (P, A, H)
    policy_bias: np.ndarray  # (P, A)
    value_head: np.ndarray  # (P, H)
    value_bias: np.ndarray  # (P,)
    moa_embedding: np.ndarray  # (ids, H)
    moa_time: np.ndarray  # (H,)
    moa_layer: np.ndarray  # (H, H)
    moa_layer_bias: np.ndarray  # (H,)
    moa_head: np.ndarray  # (A, H)
    moa_head_bias: np.ndarray  # (A,)
    ids: np.ndarray  # (own cell, cell * C + plane) of Things


def weights_of(agent: Agent, moa: OpponentModel, things: Things) -> Weights:
    def view(tensor: torch.Tensor) -> np.ndarray:
        return tensor.detach().numpy()

    own = [
        agent.embedding,
        agent.time[:, 0],
        agent.goals,
        agent.actor,
        agent.critic,
        agent.actor_bias[:, 0],
        agent.critic_bias[:, 0],
    ]
    own += [agent.policy_head, agent.policy_bias[:, 0], agent.value_head[:, :, 0], agent.value_bias[:, 0, 0]]
    model = [moa.embedding, moa.time, moa.layer, moa.layer_bias, moa.head, moa.head_bias]
    return Weights(*(view(tensor) for tensor in (*own, *model)), things.ids)


# the networks once more, compiled: a row's result depends on that row alone, whatever batch it is in


class Work(NamedTuple):
    """Scratch memory of the compiled networks."""

    things: np.ndarray  # (H*W + 1,) int64
    rows: np.ndarray  # (most,) int64 rows of a matrix to add
    scale: np.ndarray  # (most,) what to multiply each with
    ones: np.ndarray  # (most,)
    first: np.ndarray  # (2H,) first layer
    second: np.ndarray  # (H,) second layer
    bias: np.ndarray  # (2H,)
    blind: np.ndarray  # (2H,)


def make_work(game, hidden: int) -> Work:
    cells = game.config.height * game.config.width
    most = max(cells, hidden) + game.num_players + 2

    def zeros(size: int) -> np.ndarray:
        return np.zeros(size, np.float32)

    return Work(
        np.zeros(cells + 1, np.int64), np.zeros(most, np.int64), zeros(most), zeros(most) + 1, zeros(2 * hidden),
        zeros(hidden), zeros(2 * hidden), zeros(2 * hidden),
    )  # fmt: skip


@njit(cache=True, nogil=True)
def list_things(grid, state, work):
    """work.things[:count] = cell * C + plane of every block and item; returns count."""
    planes, board = grid.num_players + 1 + grid.num_kinds, state[PLAYERS + grid.num_players :]
    things, count = work.things, 0
    for cell in range(board.shape[0]):
        things[count] = cell * planes + grid.num_players + board[cell] - BLOCK
        count += board[cell] != FREE
    return count


@njit(cache=True, nogil=True, fastmath={"contract"})
def add_rows(matrix, rows, scale, count, out):
    """out += scale[k] * matrix[rows[k]] for k < count; four at a time, so that `out` is read and written less often"""
    k = 0
    while k + 4 <= count:
        row0, row1, row2, row3 = matrix[rows[k]], matrix[rows[k + 1]], matrix[rows[k + 2]], matrix[rows[k + 3]]
        x0, x1, x2, x3 = scale[k], scale[k + 1], scale[k + 2], scale[k + 3]
        for c in range(out.shape[0]):
            out[c] += x0 * row0[c] + x1 * row1[c] + x2 * row2[c] + x3 * row3[c]
        k += 4
    while k < count:
        row, x = matrix[rows[k]], scale[k]
        for c in range(out.shape[0]):
            out[c] += x * row[c]
        k += 1


@njit(cache=True, nogil=True)
def first_layer(grid, ids, table, time, state, work, count, viewer, bias, out):
    """out = bias + time + the embeddings of all that `viewer` sees"""
    own, planes = state[PLAYERS + viewer], grid.num_players + 1 + grid.num_kinds
    rows, ones, seen = work.rows, work.ones, count + 1
    rows[0] = ids[own, own * planes]
    for k in range(count):
        rows[1 + k] = ids[own, work.things[k]]
    for plane in range(1, grid.num_players):
        cell = state[PLAYERS + (viewer + plane) % grid.num_players]
        if cell != GONE:
            rows[seen] = ids[own, cell * planes + plane]
            seen += 1
    share = np.float32(min(state[T], grid.horizon - 1) / grid.horizon)
    for h in range(out.shape[0]):
        out[h] = bias[h] + share * time[h]
    add_rows(table, rows, ones, seen, out)


@njit(cache=True, nogil=True)
def dense(x, matrix, bias, work, out):
    """out = bias + relu(x) @ matrix; rows of the matrix where relu is 0 are skipped"""
    count = 0
    for k in range(x.shape[0]):
        work.rows[count], work.scale[count] = k, x[k]
        count += x[k] > 0.0
    for c in range(out.shape[0]):
        out[c] = bias[c]
    add_rows(matrix, work.rows, work.scale, count, out)


@njit(cache=True, nogil=True, fastmath=True)
def dot(x, row):
    """relu(x) . row"""
    total = np.float32(0.0)
    for k in range(x.shape[0]):
        total += max(x[k], np.float32(0.0)) * row[k]
    return total


@njit(cache=True, nogil=True)
def legal_softmax(grid, state, player, out):
    """Logits -> probabilities of the legal actions, in place; 0 for the others."""
    board, cell = state[PLAYERS + grid.num_players :], state[PLAYERS + player]
    top = np.float32(-1e30)
    for action in range(out.shape[0]):
        if action < STAY:
            target = grid.neighbours[cell, action]
            legal = (target != cell) & (board[target] != BLOCK)
        else:
            legal = (action == STAY) | (board[cell] == ITEM + action - FIRST_INTERACTION)
        if not legal:
            out[action] = np.float32(-1e30)
        top = max(top, out[action])
    total = np.float32(0.0)
    for action in range(out.shape[0]):
        out[action] = np.exp(out[action] - top) if out[action] > np.float32(-1e29) else np.float32(0.0)
        total += out[action]
    for action in range(out.shape[0]):
        out[action] /= total


@njit(cache=True, nogil=True)
def is_there(grid, state, cell, code):
    """Whether the item a goal is about is still on the board (cell -1: any of that kind)."""
    board = state[PLAYERS + grid.num_players :]
    if cell >= 0:
        return board[cell] == code
    for k in range(board.shape[0]):
        if board[k] == code:
            return True
    return False


@njit(cache=True, nogil=True)
def opponent_probs(grid, weights, state, work, count, player, code, bias, out):
    """What `player` does, given a goal's code and its part of the first layer: out (A,). AIMLESS is uniform."""
    if code == AIMLESS:
        out[:] = 0.0
    else:
        first, second = work.first[: bias.shape[0]], work.second
        table, time = weights.moa_embedding, weights.moa_time
        first_layer(grid, weights.ids, table, time, state, work, count, player, bias, first)
        dense(first, weights.moa_layer, weights.moa_layer_bias, work, second)
        for action in range(out.shape[0]):
            out[action] = weights.moa_head_bias[action] + dot(second, weights.moa_head[action])
    legal_softmax(grid, state, player, out)


@njit(cache=True, nogil=True)
def policy_value(grid, weights, state, work, count, player, net, bias, out):
    """Raw policy out (A,) of `player` by network `net`, given the goals' part of its first layer; returns the value."""
    hidden, first, second = weights.actor.shape[1], work.first, work.second
    table, time = weights.embedding[net], weights.time[net]
    first_layer(grid, weights.ids, table, time, state, work, count, player, bias, first)
    dense(first[hidden:], weights.critic[net], weights.critic_bias[net], work, second)
    value = weights.value_bias[net] + dot(second, weights.value_head[net])
    dense(first[:hidden], weights.actor[net], weights.actor_bias[net], work, second)
    for action in range(out.shape[0]):
        out[action] = weights.policy_bias[net, action] + dot(second, weights.policy_head[net, action])
    legal_softmax(grid, state, player, out)
    return value


# planning: one step ahead, in whatever stands for the world


class Ahead(NamedTuple):
    """What a world says of one step of each row."""

    states: np.ndarray  # (B, L) int16
    reward: np.ndarray  # (B, N)
    ended: np.ndarray  # (B, N) bool: of players that took part: left, or the episode is over
    over: np.ndarray  # (B,) bool


class World:
    """The learned world model, or the rules themselves (`--perfect-model`), behind one function."""

    def __init__(self, args: Args, game, model: nn.Module | None):
        self.game, self.model, self.prosocial, self.perfect = game, model, args.prosocial, args.perfect_model

    def step(self, states: np.ndarray, actions: np.ndarray) -> Ahead:
        """States (B, L) of running episodes, legal actions (B, N) -> what follows."""
        game, alive = self.game, self.game.alive(states)
        if self.perfect:
            out = game.simulate(states, actions)
            ended = out.terminated | out.truncated
            return Ahead(out.states, out.reward, ended, (ended | ~game.alive(out.states)).all(1))
        parts = [
            self.model.imagine(states[first : first + WORLD_ROWS], actions[first : first + WORLD_ROWS])
            for first in range(0, len(states), WORLD_ROWS)
        ]
        after, reward, over = (np.concatenate(column) for column in zip(*parts, strict=True))
        over |= ~game.alive(after).any(1)
        if self.prosocial:  # the model pays selfish rewards
            reward = np.where(alive, reward.mean(1, keepdims=True), 0.0).astype(np.float32)
        return Ahead(after, reward, alive & (over[:, None] | ~game.alive(after)), over)


@njit(cache=True, nogil=True)
def draw_actions(probs, env, focal, goals, streams, joint):
    """What the others do, next player first: goals (R, K, N-1) drawn for them -> joint (R, K, N), STAY of who left."""
    num_players = probs.shape[1]
    for r in range(goals.shape[0]):
        for draw in range(goals.shape[1]):
            joint[r, draw] = STAY
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


@njit(cache=True, nogil=True)
def evaluate_states(grid, weights, states, which, focal, net, cell, code, own_bias, hint, work, policy, value):
    """Raw policy (M, A) and value (M,) of player focal[m] in states[which[m]], with the goals of row hint[m]: a goal
    whose item is gone counts as hidden."""
    bias = work.bias
    for m in range(which.shape[0]):
        state, row = states[which[m]], hint[m]
        count = list_things(grid, state, work)
        bias[:] = 0.0
        for k in range(grid.num_players - 1):
            known = state[PLAYERS + (focal[m] + 1 + k) % grid.num_players] != GONE  # who left has a hidden goal
            known = known and (code[row, k] < HIDDEN or is_there(grid, state, cell[row, k], code[row, k]))
            own = own_bias[row, k, 0 if known else 1]
            for h in range(bias.shape[0]):
                bias[h] += own[h]
        value[m] = policy_value(grid, weights, state, work, count, focal[m], net[m], bias, policy[m])


def improve(prior: np.ndarray, score: np.ndarray, beta: float, power: float) -> tuple[np.ndarray, np.ndarray]:
    """Raw policy and scores of all legal actions (R, A) -> planned policy and value: softmax(power log prior
    + beta score)."""
    logits = np.where(prior > 0, power * np.log(np.maximum(prior, 1e-8)) + beta * score, -np.inf)
    policy = np.exp(logits - logits.max(1, keepdims=True))
    policy /= policy.sum(1, keepdims=True)
    return policy.astype(np.float32), (policy * score).sum(1).astype(np.float32)


# goals and beliefs


@njit(cache=True, nogil=True)
def hypothesis_probs(grid, weights, states, code, bias, work, out):
    """What every player on the board would do under each goal: code (B, K), bias (B, N, K, H) -> out (B, N, K, A)."""
    for b in range(states.shape[0]):
        count = list_things(grid, states[b], work)
        for player in range(grid.num_players):
            out[b, player] = 0.0
            if states[b, PLAYERS + player] != GONE:
                for k in range(code.shape[1]):
                    hint, probs = bias[b, player, k], out[b, player, k]
                    opponent_probs(grid, weights, states[b], work, count, player, code[b, k], hint, probs)


@njit(cache=True, nogil=True)
def draw_goals(beliefs, alive, env, focal, streams, goals, tree_streams):
    """For each decision (R,) and tree a goal of every other player, next first: goals (R, T, N-1), -1 for who left."""
    num_players = beliefs.shape[1]
    for r in range(env.shape[0]):
        row = env[r] * num_players + focal[r]
        for tree in range(goals.shape[1]):
            for k in range(num_players - 1):
                player = (focal[r] + 1 + k) % num_players
                goals[r, tree, k] = -1
                if alive[env[r], player]:
                    draw, choice, belief = unit(streams, row), 0, beliefs[env[r], player]
                    while choice < belief.shape[0] - 1 and draw >= belief[choice]:
                        draw -= belief[choice]
                        choice += 1
                    goals[r, tree, k] = choice
            unit(streams, row)
            tree_streams[r, tree] = scramble(streams[row])


def draw_rows(probs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(..., A) probabilities -> one draw of each row"""
    draws = rng.random(probs.shape[:-1])[..., None] * probs.sum(-1, keepdims=True)
    return np.minimum((np.cumsum(probs, -1) <= draws).sum(-1), probs.shape[-1] - 1)


def pack(rng: np.random.Generator) -> np.ndarray:
    """The state of a generator as bytes, for checkpoints."""
    return np.frombuffer(json.dumps(rng.bit_generator.state).encode(), np.uint8).copy()


def unpack(rng: np.random.Generator, saved: np.ndarray) -> None:
    rng.bit_generator.state = json.loads(saved.tobytes())


class Mind:
    """What is believed of every player of B games, and the plans made on it.

    All see the whole board, so a belief about player j is the same for everybody who holds one, and is kept once.
    K hypotheses per player: one per item of the episode's first board (learned) or per kind (oracle), then "habit" and
    "aimless"; with goal mode none a single one, "hidden".
    """

    def __init__(self, args: Args, game, nets: nn.ModuleDict, num_envs: int, learners: list[int], seed: int):
        self.args, self.game, self.nets = args, game, nets
        self.net_of_seat = np.zeros(game.num_players, np.int64)
        if nets["agent"].num_nets > 1:
            self.net_of_seat[learners] = np.arange(len(learners))
        self.things = Things(game)
        self.weights = weights_of(nets["agent"], nets["moa"], self.things)
        self.work = make_work(game, args.hidden)
        self.world = World(args, game, nets["world"] if "world" in nets else None) if args.world_model else None
        self.goal_size = nets["moa"].goal.shape[0]
        num_items = {"learned": int(game.item_counts.sum()), "oracle": len(game.kinds), "none": 0}[args.goal_mode]
        shape = (num_envs, game.num_players)
        num_goals = num_items + 2 if num_items else 1
        self.beliefs = np.zeros((*shape, num_goals), np.float32)  # (B, N, K)
        self.prior = np.zeros_like(self.beliefs)  # (B, N, K) by the inference network
        self.habits = np.zeros((*shape, len(game.kinds) + 2), np.float32)  # (B, N, kinds + 2) pursued in past episodes
        self.cell = np.full((num_envs, num_goals), -1, np.int64)  # (B, K) where a goal's item is
        self.code = np.full((num_envs, num_goals), AIMLESS if num_items else HIDDEN, np.int64)  # (B, K) and what it is
        self.goal = np.zeros((*shape, num_goals, self.goal_size), np.float32)  # (B, N, K, G)
        flags = np.eye(FLAGS, self.goal_size, self.goal_size - FLAGS, dtype=np.float32)
        self.habit_goal, self.hidden_goal, aimless_goal = flags
        self.goal[..., -1, :] = self.hidden_goal
        if num_items:
            self.code[:, -2] = HABIT
            self.goal[..., -2:, :] = self.habit_goal, aimless_goal
        self.probs = np.zeros((*shape, num_goals, game.num_actions), np.float32)  # (B, N, K, A)
        self.memory = np.zeros((*shape, args.hidden), np.float32)
        self.last_action = np.full(shape, game.num_actions)
        self.fresh, self.settled = np.ones(num_envs, bool), np.zeros(shape, bool)
        self.states = np.zeros((num_envs, game.state_size), np.int16)
        self.streams = make_streams(seed, num_envs * game.num_players)
        self.looked = False  # at the boards of this step

    STATE = (
        "beliefs", "prior", "habits", "cell", "code", "goal", "memory", "last_action", "fresh", "settled", "states",
        "streams",
    )  # fmt: skip

    def get_state(self) -> dict[str, np.ndarray]:
        return {name: getattr(self, name).copy() for name in self.STATE}

    def set_state(self, saved: dict[str, np.ndarray]) -> None:
        for name in self.STATE:
            getattr(self, name)[:] = saved[name]

    @torch.no_grad()
    def look(self, env) -> None:
        """Take in the current boards: which goals there are, what the others would do under each, what is believed."""
        args, game, states = self.args, self.game, env.states
        board = slice(PLAYERS + game.num_players, None)
        changed = self.fresh | (states[:, board] != self.states[:, board]).any(1)
        self.states[:], self.alive = states, env.alive.copy()
        if args.goal_mode != "none":
            self.list_goals(np.flatnonzero(self.fresh))
            there = self.there()  # (B, K)
            if args.goal_mode == "learned":
                self.encode_goals(env.obs, np.flatnonzero(changed), there)
            self.read(env)
            prior = self.open_prior(there)
            kept = self.beliefs * there[:, None]
            total = kept.sum(-1, keepdims=True)
            kept = np.where(total > 1e-6, kept / np.maximum(total, 1e-6), prior)
            kept = (1 - args.belief_floor) * kept + args.belief_floor * prior
            first = self.first_beliefs(prior) if args.inter_om else prior
            self.beliefs[:] = np.where(self.fresh[:, None, None], first, kept)
        else:
            self.beliefs[:] = 1.0
        self.settled[self.fresh] = False
        bias = self.goal @ self.nets["moa"].goal.numpy()  # (B, N, K, H)
        hypothesis_probs(game.grid, self.weights, states, self.code, bias, self.work, self.probs)
        self.looked = True

    def there(self) -> np.ndarray:
        """(B, K): the goal's item is still on the board; the last goals (habit, aimless) need none"""
        codes = self.states[:, PLAYERS + self.game.num_players :]
        if self.args.goal_mode == "learned":
            there = np.take_along_axis(codes, np.maximum(self.cell, 0), 1) == self.code
        else:
            there = (codes[:, None, :] == self.code[:, :, None]).any(2)
        there[:, -2:] = True
        return there

    def open_prior(self, there: np.ndarray) -> np.ndarray:
        """(B, N, K) first beliefs of an episode, were nothing known of the player: mostly the reader's, but a share of
        `open_mind` goes to all kinds of goals that are there alike, `habit_prior` and `aimless_prior` to the rest."""
        args, kinds = self.args, self.kinds_of_goals()[:, :-2, :-2]  # (B, K - 2, kinds)
        prior = (self.prior[..., :-2] + 1e-6) * there[:, None, :-2]
        of_kind = np.einsum("bnk,bkc->bnc", prior, kinds)
        share = of_kind / np.maximum(of_kind.sum(-1, keepdims=True), 1e-12)
        present = of_kind > 0
        share = (1 - args.open_mind) * share + args.open_mind * present / np.maximum(present.sum(-1, keepdims=True), 1)
        prior = prior * np.einsum("bkc,bnc->bnk", kinds, share / np.maximum(of_kind, 1e-12))
        last = np.array([args.habit_prior, args.aimless_prior])
        aims = there[:, :-2].any(1)[:, None, None]
        last = np.broadcast_to(np.where(aims, last, (last + 1e-6) / (last + 1e-6).sum()), (*prior.shape[:2], 2))
        return np.concatenate([(1 - args.habit_prior - args.aimless_prior) * prior, last], -1).astype(np.float32)

    def list_goals(self, rows: np.ndarray) -> None:
        """A new episode's goals: its items in the order of their cells, or the kinds."""
        if self.args.goal_mode == "oracle":
            self.code[:, :-2] = ITEM + np.arange(len(self.game.kinds))
            self.goal[:, :, np.arange(len(self.game.kinds)), np.arange(len(self.game.kinds))] = 1.0
            return
        codes = self.states[rows, PLAYERS + self.game.num_players :]
        row, cell = np.nonzero(codes >= ITEM)
        slot = np.arange(len(row)) - np.searchsorted(row, row)
        self.cell[rows[row], slot], self.code[rows[row], slot] = cell, codes[row, cell]

    def encode_goals(self, obs: np.ndarray, rows: np.ndarray, there: np.ndarray) -> None:
        """z of each goal: the encoder's mean for what the player would see, standing on the item."""
        row, player, slot = np.nonzero(self.alive[rows][:, :, None] & there[rows][:, None, :-2])
        row = rows[row]
        height, width, planes = self.game.obs_shape
        seen = obs[row, player].reshape(len(row), height * width, planes).copy()
        seen[:, :, 0] = 0
        seen[np.arange(len(row)), self.cell[row, slot], 0] = 1
        seen = torch.from_numpy(seen.reshape(-1, *self.game.obs_shape))
        if len(seen):
            z = torch.cat([self.nets["vae"].encode(some)[0] for some in seen.split(4096)])
            self.goal[row, player, slot, :-FLAGS] = z.numpy()

    def read(self, env) -> None:
        """Let the inference network see the boards, and compare its z with those of the goals."""
        env_row, player = np.nonzero(self.alive)
        ids = torch.from_numpy(self.things(env.obs[env_row, player]))
        last = torch.from_numpy(self.last_action[env_row, player])
        memory = torch.from_numpy(self.memory[env_row, player])
        mean, log_std, memory = self.nets["reader"](ids, last, memory)
        self.memory[env_row, player] = memory.numpy()
        goals = torch.from_numpy(self.goal[env_row, player, :-2, :-FLAGS])  # (R, K-2, D)
        fit = -0.5 * ((goals - mean[:, None]) / log_std.exp()[:, None]).pow(2).sum(2)
        self.prior[env_row, player, :-2] = torch.softmax(fit.clamp_min(-50.0), 1).numpy()

    def kinds_of_goals(self) -> np.ndarray:
        """(B, K, kinds + 2) one-hot: the kind each goal is of, habit and aimless last"""
        kind = np.where(self.code >= ITEM, self.code - ITEM, len(self.game.kinds) + self.code - HABIT)
        return np.eye(len(self.game.kinds) + 2, dtype=np.float32)[kind]

    def first_beliefs(self, prior: np.ndarray) -> np.ndarray:
        """Kinds as the player pursued them before (one more episode as the prior says); within a kind, by the prior."""
        kinds = self.kinds_of_goals()
        of_kind = np.einsum("bnk,bkc->bnc", prior, kinds)
        wanted = (self.habits + of_kind) * (of_kind > 0)
        wanted /= wanted.sum(-1, keepdims=True)
        return prior * np.einsum("bkc,bnc->bnk", kinds, wanted / np.maximum(of_kind, 1e-8))

    def predict(self) -> np.ndarray:
        """(B, N, A) what everybody will do, over all goals"""
        return np.einsum("bnk,bnka->bna", self.beliefs, self.probs)

    def plan(self, states: np.ndarray, env_row: np.ndarray, focal: np.ndarray, beta: float, planned: bool = True):
        """Decisions of player focal[r] in states[env_row[r]] -> policy (R, A), value (R,), prior (R, A), the goals of
        the first draw (R, N-1, G). Without `planned`, the raw policy and value, which know no goals."""
        args, others = self.args, self.game.num_players - 1
        draws = args.draws if planned and self.world else 1
        drawn = np.full((len(env_row), draws, others), -1)
        streams = np.zeros((len(env_row), draws), np.uint64)
        if planned:
            draw_goals(self.beliefs, self.alive, env_row, focal, self.streams, drawn, streams)
        player = (focal[:, None] + 1 + np.arange(others)) % self.game.num_players  # (R, N-1)
        index = (env_row[:, None, None], player[:, None], drawn)
        gone = drawn < 0
        goals = np.where(gone[..., None], self.hidden_goal, self.goal[index]).astype(np.float32)  # (R, D, N-1, G)
        cell = np.where(gone, -1, self.cell[env_row[:, None, None], drawn])
        code = np.where(gone, HIDDEN, self.code[env_row[:, None, None], drawn])

        def flat(array: np.ndarray) -> np.ndarray:
            return np.ascontiguousarray(array.reshape(-1, *array.shape[2:]))

        net = self.net_of_seat[focal]
        own_bias = self.goal_biases(flat(goals), np.repeat(net, draws))
        hints = (flat(cell), flat(code), own_bias)
        row = np.repeat(np.arange(len(env_row)), draws)  # decision of each draw
        prior, value = self.evaluate(states, env_row[row], focal[row], hints, np.arange(len(row)))
        prior, value = prior.reshape(-1, draws, prior.shape[1]).mean(1), value.reshape(-1, draws).mean(1)
        if not (planned and self.world):
            return prior, value, prior, goals[:, 0]
        joint = np.empty((len(env_row), draws, others + 1), np.int64)
        draw_actions(self.probs, env_row, focal, drawn, streams, joint)
        score = self.score(states, env_row, focal, prior > 0, joint, hints)
        policy, value = improve(prior, score, beta, args.prior_power)
        return policy, value, prior, goals[:, 0]

    def evaluate(self, states, which, focal, hints, hint) -> tuple[np.ndarray, np.ndarray]:
        """Raw policies and values of player focal[m] in states[which[m]], given the goals hints[hint[m]]."""
        policy = np.empty((len(which), self.game.num_actions), np.float32)
        value = np.empty(len(which), np.float32)
        net = self.net_of_seat[focal]
        evaluate_states(self.game.grid, self.weights, states, which, focal, net, *hints, hint, self.work, policy, value)
        return policy, value

    def score(self, states, env_row, focal, legal, joint, hints) -> np.ndarray:
        """(R, A) reward + gamma value of what follows each legal action, averaged over the draws joint (R, D, N) of
        the others' actions; 0 for illegal ones. A step that several draws or players imagine is imagined once."""
        draws, num_players, num_actions = joint.shape[1], joint.shape[2], self.game.num_actions
        row, action = np.nonzero(legal)
        all_joint = joint[row]  # (M, D, N)
        all_joint[np.arange(len(row)), :, focal[row]] = action[:, None]
        digits = num_actions ** np.arange(num_players)
        key = (env_row[row][:, None] * num_actions**num_players + all_joint @ digits).ravel()
        _, first, which = np.unique(key, return_index=True, return_inverse=True)
        before = states[env_row[row[first // draws]]]
        ahead = self.world.step(before, all_joint.reshape(-1, num_players)[first])
        focal, hint = np.repeat(focal[row], draws), (row[:, None] * draws + np.arange(draws)).ravel()
        result = self.args.reward_scale * ahead.reward[which, focal]
        on = np.flatnonzero(~ahead.ended[which, focal])  # after the own end there is nothing
        result[on] += self.args.gamma * self.evaluate(ahead.states, which[on], focal[on], hints, hint[on])[1]
        score = np.zeros(legal.shape, np.float32)
        score[row, action] = result.reshape(-1, draws).mean(1)
        return score

    def goal_biases(self, goals: np.ndarray, net: np.ndarray) -> np.ndarray:
        """First-layer parts of goals (M, N-1, G), and of hidden ones, in Agent: (M, N-1, 2, 2H)"""
        num, others, size = goals.shape
        both = np.stack([goals, np.broadcast_to(self.hidden_goal, goals.shape)], 2)  # (M, N-1, 2, G)
        matrix = self.nets["agent"].goals.detach().numpy()
        matrix = matrix.reshape(matrix.shape[0], others, size, -1)  # (P, N-1, G, 2H)
        own = np.empty((num, others, 2, matrix.shape[-1]), np.float32)
        for p in range(len(matrix)):
            rows = net == p
            for k in range(others):
                own[rows, k] = both[rows, k] @ matrix[p, k]
        return own

    def watch(self, actions: np.ndarray, alive: np.ndarray, done: np.ndarray) -> None:
        """Learn from what everybody did: actions (B, N); alive (B, N) and done (B,) after the step."""
        args, acted = self.args, self.alive
        if args.goal_mode != "none":
            if args.intra_om:
                seen = np.take_along_axis(self.probs, actions[:, :, None, None], 3)[..., 0]  # (B, N, K)
                moved = self.beliefs * np.maximum(seen, 1e-3)
                moved /= moved.sum(-1, keepdims=True)
                self.beliefs[acted] = moved[acted]
            ended = acted & (done[:, None] | ~alive) & ~self.settled
            pursued = np.einsum("bnk,bkc->bnc", self.beliefs, self.kinds_of_goals())
            self.habits[ended] = args.belief_decay * self.habits[ended] + pursued[ended]
            self.settled |= ended
        self.last_action[:] = np.where(done[:, None], self.game.num_actions, actions)
        self.memory[done] = 0.0
        self.fresh[:] = done
        self.looked = False


class Policy:
    """A trained network in one seat of any env (see envs/roles.py), planning on a mind's beliefs.

    With `planned` off it plays the raw policy, which knows no goals. With `adapt` "online" the opponent model also goes
    on learning, after each episode, from all that was seen; that needs an env with a single game.
    """

    def __init__(self, mind: Mind, seat: int, seed: int, greedy: bool, planned: bool = True):
        self.mind, self.seat, self.greedy, self.planned, self.adapt = mind, seat, greedy, planned, "beliefs"
        self.play_beta = mind.args.play_beta
        self.rng = np.random.default_rng([seed, seat])
        self.episode: list[dict[str, np.ndarray]] = []  # steps of the running episode, kept to learn from online
        self.seen: dict[str, np.ndarray] = {}

    def act(self, env) -> np.ndarray:
        if not self.mind.looked:  # seats that share a mind look once
            self.mind.look(env)
        if self.adapt == "online":
            now = {"obs": env.obs, "legal": env.legal, "alive": env.alive, "t": env.t}
            self.episode.append({name: array.copy() for name, array in now.items()})
        actions = np.full(env.num_envs, STAY)
        rows = np.flatnonzero(env.alive[:, self.seat] & getattr(env, "needed", True))
        if len(rows):
            seat = np.full(len(rows), self.seat)
            policy = self.mind.plan(env.states, rows, seat, self.play_beta, self.planned)[0]
            actions[rows] = policy.argmax(1) if self.greedy else draw_rows(policy, self.rng)
        return actions

    def watch(self, env, actions: np.ndarray, info: dict[str, np.ndarray]) -> None:
        if self.mind.looked:
            self.mind.watch(actions, env.alive, info["done"])
        if self.adapt == "online":
            self.episode[-1] |= {"action": actions.copy(), "taken": info["taken"].copy(), "done": info["done"].copy()}
            if info["done"][0]:
                self.learn_online()

    def learn_online(self, updates: int = 10, learning_rate: float = 3e-3) -> None:
        """A few steps of the opponent model on everything seen of the others, the newest episode included."""
        mind = self.mind
        batch = {name: np.stack([step[name] for step in self.episode]) for name in self.episode[0]}  # (T, 1, N, ...)
        self.episode, alive = [], batch["alive"].copy()
        alive[:, :, self.seat] = False
        steps = heading_for(
            batch["action"], batch["taken"], alive, batch["done"], 0.0 * batch["action"], mind.args, self.rng
        )
        share = np.broadcast_to(mind.things.time(batch["t"])[:, :, None], alive.shape)
        rows = {"ids": mind.things(batch["obs"])[alive], "t": share[alive], "legal": batch["legal"][alive]}
        goals = goals_of(steps, batch["obs"], batch["action"], mind)[alive]
        rows |= {"action": batch["action"][alive], "goal": with_habits(goals, mind, self.rng)}
        self.seen = {name: np.concatenate([self.seen[name], x]) if self.seen else x for name, x in rows.items()}
        moa = mind.nets["moa"].requires_grad_(True)
        optimizer = torch.optim.SGD(moa.parameters(), lr=learning_rate, momentum=0.9)
        for _ in range(updates):
            pick = self.rng.integers(len(self.seen["t"]), size=128)
            mb = {name: torch.from_numpy(x[pick]) for name, x in self.seen.items()}
            step(optimizer, moa_loss(moa, mb, mind.args.hide_prob, self.rng), moa, mind.args)
        moa.requires_grad_(False)

    def get_state(self) -> dict[str, np.ndarray]:
        return self.mind.get_state() | {"rng": pack(self.rng)}

    def set_state(self, saved: dict[str, np.ndarray]) -> None:
        self.mind.set_state(saved)
        unpack(self.rng, saved["rng"])


# learning


def lambda_returns(reward, value, next_value, ended, cut, gamma: float, lam: float) -> np.ndarray:
    """Reward plus what follows, partly as valued and partly as it came; all (T, B, N). next_value is the value of what
    follows a step. An end cuts both, the end of an imagined game (`cut`) only what came."""
    returns = np.zeros_like(reward)
    following = next_value[-1]
    for step in reversed(range(len(reward))):
        following = np.where(cut[step], next_value[step], following)
        following = reward[step] + gamma * ~ended[step] * ((1 - lam) * next_value[step] + lam * following)
        returns[step] = following
    return returns


def heading_for(action, taken, alive, done, value, args: Args, rng: np.random.Generator) -> np.ndarray:
    """(T, B, N) step whose state each player was heading for, -1 if unknown: by `--selector`, within `--horizon` steps
    of the same episode. `hunt`: the next successful hunt, else the next try."""
    length, ahead = len(action), np.full(action.shape[1:], -1)
    steps = np.full(action.shape, -1)
    if args.selector == "hunt":
        for wanted in ((action >= FIRST_INTERACTION) & alive, (taken > 0) & alive):  # a success overrules a try
            ahead[:] = -1
            for step in reversed(range(length)):
                ahead[done[step]] = -1
                ahead = np.where(wanted[step], step, ahead)
                steps[step] = np.where((ahead >= 0) & (ahead - step < args.horizon), ahead, steps[step])
    else:
        sign = {"optimistic": 1.0, "conservative": -1.0, "random": 0.0}[args.selector]
        score = sign * value + (rng.random(value.shape) if args.selector == "random" else 0.0)
        for step in range(length):
            best, on = np.full(action.shape[1:], -np.inf), alive[step].copy()
            for later in range(step, min(length, step + args.horizon)):
                better = on & (score[later] > best)
                steps[step], best = np.where(better, later, steps[step]), np.where(better, score[later], best)
                on &= ~done[later][:, None]
                if later + 1 < length:
                    on &= alive[later + 1]
    steps[~alive] = -1
    return steps


def goals_of(steps: np.ndarray, obs: np.ndarray, action: np.ndarray, mind: Mind) -> np.ndarray:
    """(T, B, N, G) goal vectors of the states at `steps`; hidden where unknown."""
    goals = np.tile(mind.hidden_goal, (*steps.shape, 1))
    known = steps >= 0
    if mind.args.goal_mode == "oracle":  # a kind is known from a hunt alone
        known &= np.take_along_axis(action, np.maximum(steps, 0), 0) >= FIRST_INTERACTION
    step, env_row, player = np.nonzero(known)
    at = steps[step, env_row, player]
    if mind.args.goal_mode == "none" or not len(step):
        return goals
    if mind.args.goal_mode == "oracle":
        z = np.eye(len(mind.game.kinds), dtype=np.float32)[action[at, env_row, player] - FIRST_INTERACTION]
    else:
        key, back = np.unique(np.stack([at, env_row, player]), axis=1, return_inverse=True)
        with torch.no_grad():
            seen = torch.from_numpy(obs[tuple(key)])
            z = torch.cat([mind.nets["vae"].encode(some)[0] for some in seen.split(4096)]).numpy()[back.ravel()]
    goals[step, env_row, player] = np.concatenate([z, np.zeros((len(z), FLAGS), np.float32)], 1)
    return goals


def with_habits(goals: np.ndarray, mind: Mind, rng: np.random.Generator) -> np.ndarray:
    """Goals (R, G) of players met in a game, half of them replaced by "habit": what such players do, goals aside."""
    if mind.args.goal_mode == "none":
        return goals
    return np.where(rng.random((len(goals), 1)) < 0.5, mind.habit_goal, goals)


def clip_gradients(net: nn.Module, max_norm: float) -> torch.Tensor:
    """Clip the gradient of a network by its norm (returned); the stacked nets of Agent each by its own."""
    grads = [parameter.grad for parameter in net.parameters()]
    stacked = net.num_nets if isinstance(net, Agent) else 1
    norm = torch.stack([grad.reshape(stacked, -1).norm(dim=1) for grad in grads]).norm(dim=0)  # (P,)
    scale = (max_norm / (norm + 1e-6)).clamp_max(1.0)
    for grad in grads:
        grad.view(stacked, -1).mul_(scale[:, None])
    return norm


def agent_loss(args: Args, agent: Agent, mb: dict[str, torch.Tensor], ent_coef: float) -> dict[str, torch.Tensor]:
    """The parts of the loss, summed over nets, and what to log; mb is (P, R, ...).

    The ratio is to the probability with which the action was drawn: that of the planned policy. So the expectation is
    that of the raw policy's gain over how the games were really played, and the clip keeps it near that play; the
    cross-entropy brings it there.
    """
    log_probs, value = agent(mb["ids"], mb["t"], mb["legal"], mb["goals"])
    log_probs = log_probs.clamp_min(-1e8)
    log_ratio = log_probs.gather(2, mb["action"][:, :, None])[:, :, 0] - mb["log_prob"]
    ratio, advantage = log_ratio.exp(), mb["advantage"]
    advantage = (advantage - advantage.mean(1, keepdim=True)) / (advantage.std(1, keepdim=True) + 1e-8)
    clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    entropy = -(log_probs.exp() * log_probs).sum(2)
    losses = {
        "policy_loss": args.ppo_coef * torch.max(-advantage * ratio, -advantage * clipped).mean(1).sum(),
        "value_loss": args.vf_coef * (value - mb["returns"]).pow(2).mean(1).sum(),
        "plan_loss": -args.plan_coef * (mb["policy"] * log_probs).sum(2).mean(1).sum(),
        "entropy_loss": -ent_coef * entropy.mean(1).sum(),
    }
    with torch.no_grad():
        losses |= {"entropy": entropy.mean(), "approx_kl": (ratio - 1 - log_ratio).mean()}
        losses |= {"clipfrac": ((ratio - 1).abs() > args.clip_coef).float().mean()}
    return losses


def moa_loss(moa: OpponentModel, mb: dict[str, torch.Tensor], hide_prob: float, rng) -> torch.Tensor:
    return F.nll_loss(moa(mb["ids"], mb["t"], mb["legal"], hide(mb["goal"], hide_prob, rng)), mb["action"])


def reader_loss(nets: nn.ModuleDict, seq: dict[str, torch.Tensor]) -> torch.Tensor:
    """Gaussian likelihood of the goals players were heading for, and of their actions given the inferred z.

    seq: ids (T, R, K), action before (T, R), t, legal, action, goal (T, R, G), known (T, R): on the board with a known
    goal, resets (T, R): a new episode begins here, and memory (R, H) before the first step.
    """
    memory, loss, count = seq["memory"], torch.zeros(()), seq["known"].sum().clamp_min(1)
    for step in range(len(seq["ids"])):
        memory = memory * ~seq["resets"][step][:, None]
        mean, log_std, memory = nets["reader"](seq["ids"][step], seq["last"][step], memory)
        z = seq["goal"][step][:, :-FLAGS]
        nll = (0.5 * ((z - mean) / log_std.exp()).pow(2) + log_std).sum(1)
        goal = torch.cat([mean, torch.zeros(len(mean), FLAGS)], 1)
        explain = nets["moa"](seq["ids"][step], seq["t"][step], seq["legal"][step], goal)
        explain = -explain.gather(1, seq["action"][step][:, None])[:, 0]
        loss = loss + ((nll + explain) * seq["known"][step]).sum() / count
    return loss


def learn(args: Args, nets, optimizers: dict, data: dict[str, dict], sequences: dict, ent_coef: float, rng):
    """The updates of one iteration: policy and value, opponent model, goal inference, world model. Returns what there
    is to log. data: rows of the `own` decisions, of `moa` and `moa.offline`, `world` and `world.offline`."""
    own, log = data["own"], {}
    of_net = [np.flatnonzero(own["net"] == p) for p in range(nets["agent"].num_nets)]
    num = min(map(len, of_net))
    for _ in range(args.update_epochs):
        order = np.stack([rng.permutation(some)[:num] for some in of_net])  # (P, R)
        for mb_rows in np.array_split(order, max(1, round(num / args.batch_rows)), axis=1):
            mb = {name: torch.from_numpy(rows[mb_rows]) for name, rows in own.items() if name != "net"}
            losses = agent_loss(args, nets["agent"], mb, ent_coef)
            total = sum(losses[name] for name in ("policy_loss", "value_loss", "plan_loss", "entropy_loss"))
            step(optimizers["agent"], total, nets["agent"], args)
            for name, loss in losses.items():
                log.setdefault(name, []).append(loss.item())
    for _ in range(args.moa_updates):
        mb = mixed_batch(args, data["moa"], data["moa.offline"], rng)
        loss = moa_loss(nets["moa"], mb, args.hide_prob, rng)
        step(optimizers["moa"], loss, nets["moa"], args)
        log.setdefault("moa_loss", []).append(loss.item())
    if args.goal_mode != "none":
        loss = reader_loss(nets, sequences)
        step(optimizers["reader"], loss, nets["reader"], args)
        log["goal_loss"] = [loss.item()]
    if "world" in nets:
        weights = torch.ones(nets["world"].game.obs_shape[2])
        torch.manual_seed(int(rng.integers(2**31)))  # the model of planes draws whose eyes it sees with
        for _ in range(args.world_updates):
            mb = mixed_batch(args, data["world"], data["world.offline"], rng)
            mb = train_world_model.tensors({name: x.numpy() for name, x in mb.items()}, nets["world"].game)
            loss = sum(nets["world"].loss(mb, weights).values())
            step(optimizers["world"], loss, nets["world"], args)
            log.setdefault("world_loss", []).append(loss.item())
    return {f"losses/{name}": float(np.mean(values)) for name, values in log.items()}


def mixed_batch(args: Args, recent: dict, offline: dict, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """A minibatch for the opponent model or the world model: offline play and what was seen lately."""
    sizes = [len(next(iter(source.values()))) for source in (offline, recent)]
    share = round(args.batch_rows * args.offline_share) if sizes[1] else args.batch_rows
    picks = [rng.integers(sizes[0], size=share), rng.integers(max(sizes[1], 1), size=args.batch_rows - share)]
    parts = [
        {name: source[name][pick] for name in offline} for source, pick in zip((offline, recent), picks, strict=True)
    ]
    return {name: torch.from_numpy(np.concatenate([part[name] for part in parts])) for name in offline}


def step(optimizer, loss: torch.Tensor, net: nn.Module, args: Args) -> None:
    optimizer.zero_grad()
    loss.backward()
    norm = clip_gradients(net, args.max_grad_norm)
    if not (torch.isfinite(loss) and torch.isfinite(norm).all()):
        raise FloatingPointError(f"the loss became {loss.item()} with a gradient of norm {norm.max().item()}")
    optimizer.step()


def hide(goal: torch.Tensor, prob: float, rng: np.random.Generator) -> torch.Tensor:
    """Hide some of the goals (..., G)."""
    hidden = torch.zeros(goal.shape[-1])
    hidden[-2] = 1.0
    return torch.where(torch.from_numpy(rng.random(goal.shape[:-1]) < prob)[..., None], hidden, goal)


# offline models


def goal_encoder(args: Args) -> pretrain_vae.GoalVAE | None:
    """The goal space of pretrain_vae.py: the checkpoint asked for, the newest that fits, or one made now."""
    if args.goal_mode != "learned":
        return None
    spec = envs.spec(args.env_id)
    folder = args.vae_ckpt or pretrain_vae.find_checkpoint("vae_ckpts", spec)
    if not folder:
        print(
            f"no goal space for {args.env_id} in vae_ckpts/: learning one first (pretrain_vae.py, a minute or two)",
            flush=True,
        )
        folder = pretrain_vae.train(pretrain_vae.Args(env_id=args.env_id, seed=args.seed, pictures=False))
    vae, _ = pretrain_vae.load_checkpoint(folder, spec)
    print(f"goal space: {folder}", flush=True)
    return vae.requires_grad_(False)


def world_checkpoint(args: Args) -> nn.Module | None:
    """The world model of train_world_model.py: the checkpoint asked for, the newest that fits, or one made now."""
    if not args.world_model or args.perfect_model:
        return None
    spec = envs.spec(args.env_id)
    folder = args.world_ckpt or train_world_model.find_checkpoint("vae_ckpts", spec, args.planes)
    if not folder:
        print(f"no world model for {args.env_id} in vae_ckpts/: making one with train_world_model.py", flush=True)
        settings = {
            "env_id": args.env_id,
            "seed": args.seed,
            "planes": args.planes,
            "torch_threads": args.torch_threads,
        }
        folder = train_world_model.train(train_world_model.Args(**settings))
    model, about = train_world_model.load_checkpoint(folder, spec)
    if about["sizes"]["planes"] != args.planes:
        kinds = {False: "structured", True: "--planes"}
        raise envs.ConfigError(f"'{folder}' is a {kinds[not args.planes]} world model, not a {kinds[args.planes]} one")
    print(f"world model of {folder}", flush=True)
    return model


def offline_transitions(args: Args, game, seed: int) -> dict[str, np.ndarray]:
    """Steps of rule-based play, so that the world model does not forget what the learners no longer do."""
    lineups = list(train_world_model.default_lineups(game))
    data = collect_transitions(game, lineups, 0.1, args.offline_steps // 4, np.random.SeedSequence(seed))
    return {name: data[name] for name in ("states", "actions", "next_states", "reward", "end")}


def offline_play(args: Args, mind: Mind, seed: int) -> tuple[dict[str, np.ndarray], dict[str, torch.Tensor]]:
    """Steps of rule-based players with a purpose: rows for the opponent model, sequences for the goal inference."""
    spec = envs.spec(args.env_id)
    data = collect_play(spec, envs.game(args.env_id), ("mix",), args.offline_steps, np.random.SeedSequence(seed))
    # one "game" per row and player 0 alone: the shapes of goals_of
    goals = goals_of(data["goal_row"][:, None, None], data["obs"][:, None, None], data["action"][:, None, None], mind)
    rows = {"ids": mind.things(data["obs"]), "t": mind.things.time(data["t"]), "legal": data["legal"]}
    rows |= {"action": data["action"], "goal": goals[:, 0, 0]}
    first = np.flatnonzero(np.append(True, (np.diff(data["episode"]) != 0) | (np.diff(data["player"]) != 0)))
    length = np.minimum(np.diff(np.append(first, len(data["t"]))), args.num_steps)
    step = np.arange(args.num_steps)[:, None]
    at, on = np.minimum(first + step, len(data["t"]) - 1), step < length  # (T, R)
    last = np.where(step == 0, spec.num_actions, data["action"][np.maximum(at - 1, 0)])
    sequences = {name: rows[name][at] for name in rows} | {"last": last, "resets": np.zeros(at.shape, bool)}
    sequences |= {"known": on & (data["goal_row"][at] >= 0)}
    distinct = ~data["repeat"]
    return {name: array[distinct] for name, array in rows.items()}, sequences


def learn_offline(args: Args, nets: nn.ModuleDict, offline: dict, sequences: dict, rng: np.random.Generator) -> None:
    """Opponent model and goal inference before the first game."""
    nothing = {name: rows[:0] for name, rows in offline.items()}
    for name, updates in (("moa", args.offline_updates), ("reader", args.offline_updates // 4)):
        if name == "reader" and args.goal_mode == "none":
            continue
        optimizer, losses = torch.optim.Adam(nets[name].parameters(), lr=2e-3, foreach=True), []
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates, 2e-4)
        for _ in tqdm(range(updates), desc=f"{name} offline", leave=False, disable=not sys.stderr.isatty()):
            if name == "moa":
                loss = moa_loss(nets["moa"], mixed_batch(args, nothing, offline, rng), args.hide_prob, rng)
            else:
                pick = rng.integers(sequences["t"].shape[1], size=256)
                mb = {key: torch.from_numpy(array[:, pick]) for key, array in sequences.items()}
                loss = reader_loss(nets, mb | {"memory": torch.zeros(len(pick), args.hidden)})
            step(optimizer, loss, nets[name], args)
            schedule.step()
            losses.append(loss.item())
        what = {"moa": "opponent model", "reader": "goal inference"}[name]
        print(
            f"{what} from rule-based play: loss {np.mean(losses[:20]):.3f} -> {np.mean(losses[-20:]):.3f}", flush=True
        )
    with torch.no_grad():
        nets["moa"].goal[-3] = nets["moa"].goal[-2]  # nobody was met yet: habits are what is known of anybody


def score_predictions(predicted: np.ndarray, action: np.ndarray, rows: np.ndarray) -> dict[str, float]:
    """The opponent model on data it has not learned from yet: predicted (T, B, N, A), action and rows (T, B, N)."""
    probs, truth, player = predicted[rows], action[rows], np.nonzero(rows)[2]
    each = np.arange(len(truth))
    rank = (probs > probs[each, truth][:, None]).sum(1)
    result = {"top1": (rank == 0).mean(), "top3": (rank < 3).mean(), "ce": -np.log(probs[each, truth] + 1e-6).mean()}
    for a in range(probs.shape[1]):
        if (truth == a).any():
            result[f"recall_action{a}"] = (rank[truth == a] == 0).mean()
    for i in range(rows.shape[2]):
        if (player == i).any():
            result[f"top1-player{i + 1}"] = (rank[player == i] == 0).mean()
    return {f"moa/{name}": float(x) for name, x in result.items()}


def score_world(model: nn.Module, data: dict[str, np.ndarray]) -> dict[str, float]:
    """The world model on transitions it has not learned from yet."""
    game, states = model.game, data["states"]
    after, reward, end = model.imagine(states, data["actions"])
    alive, paid = game.alive(states), (data["reward"] != game.config.time_reward).any(1)
    exact = (after[:, PLAYERS:] == data["next_states"][:, PLAYERS:]).all(1)
    order = np.flatnonzero(alive[:, 0])  # as seen by player 1
    planes = [
        train_world_model.to_planes(*train_world_model.from_states(x[order], game)[:2], game) for x in (states, after)
    ]
    result = {"exact": exact.mean(), "reward_mse": ((reward - data["reward"])[alive] ** 2).mean()}
    result |= {"end_accuracy": (end == data["end"]).mean()}
    result |= {"impossible": train_world_model.impossible(*planes, game).float().mean().item()}
    if paid.any():
        result["exact_rewarded"] = exact[paid].mean()
    return {f"wm/{name}": float(x) for name, x in result.items()}


# playing and evaluating


def make_nets(
    args: Args, game, num_nets: int, vae_sizes: dict | None, world_sizes: dict | None, generator: torch.Generator
) -> nn.ModuleDict:
    """Agent, opponent model, goal inference, (for learned goals) the goal space, and the world model, if any."""
    z_size = {"learned": vae_sizes["dim"] if vae_sizes else 0, "oracle": len(game.kinds), "none": 0}[args.goal_mode]
    sizes = {"hidden": args.hidden, "num_players": game.num_players, "num_actions": game.num_actions}
    sizes |= {"num_ids": Things(game).num_ids, "goal_size": z_size + FLAGS}
    nets = {"agent": Agent(num_nets, sizes, generator), "moa": OpponentModel(sizes, generator)}
    nets |= {"reader": GoalReader(sizes, generator)}
    if vae_sizes:
        nets["vae"] = pretrain_vae.GoalVAE(vae_sizes).eval().requires_grad_(False)
    if world_sizes:
        nets["world"] = train_world_model.make_model(world_sizes, game)
    return nn.ModuleDict(nets)


def load_policy(checkpoint: Path, spec: dict, env, seat: int, learner: int | None, seed: int, greedy: bool) -> Policy:
    """A checkpoint of this script as a player: the net trained in that seat (else the first), or learner 1, 2, ..."""
    learners = spec["learners"]  # the seats that learned, in the order of the nets
    if learner is not None and not 1 <= learner <= len(learners):
        raise envs.ConfigError(f"checkpoint '{checkpoint}' has learners 1 to {len(learners)}, not {learner}")
    known = {field.name for field in fields(Args)}
    args = Args(**{name: value for name, value in spec["args"].items() if name in known})
    num_nets = 1 if args.shared_policy else len(learners)
    nets = make_nets(args, env.game, num_nets, spec["vae_sizes"], spec["world_sizes"], torch.Generator())
    try:
        nets.load_state_dict(load_file(checkpoint / "weights.safetensors"))
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise envs.ConfigError(f"the weights of checkpoint '{checkpoint}' cannot be loaded: {reason}") from error
    net = learner - 1 if learner else learners.index(seat) if seat in learners else 0
    game = envs.game(env.spec.env_id, **env.spec.config | {"prosocial": args.prosocial})  # as it learned
    mind = Mind(args, game, nets.requires_grad_(False), env.num_envs, learners, seed)
    mind.net_of_seat[seat] = min(net, num_nets - 1)
    return Policy(mind, seat, seed, greedy)


def evaluate(args: Args, nets: nn.ModuleDict, roles: list[str], episodes: int, seed: int, planned: bool, greedy=False):
    """Mean return of the learners (and of each player) over fresh episodes from the true starts, selfish rewards."""
    env = envs.make(args.env_id, num_envs=episodes, seed=seed, max_block_comp=args.max_block_comp)
    learners = [seat for seat, role in enumerate(roles) if role == "hop"]
    game = envs.game(args.env_id, prosocial=args.prosocial, max_block_comp=args.max_block_comp)
    mind = Mind(args, game, nets, episodes, learners, seed)
    policies = {seat: Policy(mind, seat, seed, greedy, planned) for seat in learners}
    played = play_episodes(env, Seats(env, roles, "hop", seed, greedy, policies))
    score = played.returns[:, learners].mean(1)
    result = {"return": score.mean(), "return_ci95": 1.96 * score.std() / episodes**0.5, "episodes": episodes}
    result |= {f"return-player{i + 1}": played.returns[:, i].mean() for i in range(len(roles))}
    result |= {f"{kind}_rate": played.taken[:, :, k].mean() for k, kind in enumerate(env.game.kinds)}
    return {name: float(value) for name, value in (result | {"length": played.lengths.mean()}).items()}


class DreamPlayers:
    """The imagined co-players of the last games of an env: each has a kind of goal (or a habit, or none) that lasts for
    some episodes, picks an item of that kind, and moves as the opponent model says of such a player."""

    def __init__(self, mind: Mind, first: int, learners: list[int], seed: int):
        self.mind, self.rng, game = mind, np.random.default_rng(seed), mind.game
        self.rows = np.arange(first, len(mind.fresh))
        self.focal = np.array(learners)[self.rows % len(learners)]
        shape = (len(self.rows), game.num_players)
        self.kind, self.goal = np.full(shape, -1), np.full(shape, -1)  # the last kinds: habit, aimless

    def act(self, actions: np.ndarray) -> None:
        """Fill the actions of all imagined players (the focal ones are overwritten by who plans)."""
        mind, rows, rng = self.mind, self.rows, self.rng
        new = mind.fresh[rows]
        redraw = new & ((rng.random(len(rows)) < 0.1) | (self.kind[:, 0] < 0))  # a new team
        kinds = rng.integers(len(mind.game.kinds) + 2, size=self.kind.shape)
        kinds = np.where(rng.random((len(rows), 1)) < 0.5, kinds[:, :1], kinds)  # half of the teams are of one kind
        self.kind[redraw] = kinds[redraw]
        if mind.args.goal_mode == "none":
            self.goal[:] = 0
        else:
            there, kinds = mind.there()[rows], mind.kinds_of_goals()[rows]  # (B, K), (B, K, kinds + 2)
            lost = (self.goal < 0) | new[:, None] | ~np.take_along_axis(there, np.maximum(self.goal, 0), 1)
            of_kind = np.take_along_axis(kinds, self.kind[:, None, :], 2).transpose(0, 2, 1)  # (B, N, K)
            chance = (mind.prior[rows] + 1e-6) * there[:, None] * (of_kind + 1e-4)
            last = self.kind[..., None] == len(mind.game.kinds) + np.arange(2)
            chance[..., -2:] = np.where(last, 1e3, 1e-9)
            self.goal = np.where(lost, draw_rows(chance, rng), self.goal)
        probs = np.take_along_axis(mind.probs[rows], self.goal[:, :, None, None], 2)[:, :, 0]  # (B, N, A)
        probs[..., STAY] += 1e-6  # who left stays
        actions[rows] = draw_rows(probs, rng)

    def goals(self) -> np.ndarray:
        """(B, N, G) the true goals"""
        return np.take_along_axis(self.mind.goal[self.rows], self.goal[:, :, None, None], 2)[:, :, 0]

    def get_state(self) -> dict[str, np.ndarray]:
        return {"kind": self.kind, "goal": self.goal, "rng": pack(self.rng)}

    def set_state(self, saved: dict[str, np.ndarray]) -> None:
        self.kind[:], self.goal[:] = saved["kind"], saved["goal"]
        unpack(self.rng, saved["rng"])


class Worlds:
    """Real games and, in the rows after them, games that go on in the world model alone; looks like one env.

    An imagined game starts from a board of real play and lasts until it is over, or cut after --imagine-horizon steps.
    """

    def __init__(self, env, world: World | None, num_imagined: int, horizon: int, seed: int):
        self.env, self.world, self.game, self.spec, self.horizon = env, world, env.game, env.spec, horizon
        self.num_real, self.num_envs = env.num_envs, env.num_envs + num_imagined
        self.rng = np.random.default_rng(seed)
        self.boards = env.states.copy()  # (P, L) to start from
        self.imagined = self.boards[self.rng.integers(len(self.boards), size=num_imagined)]  # (B - num_real, L)
        self.age = np.zeros(num_imagined, np.int64)
        self.look()

    def look(self) -> None:
        self.states = np.concatenate([self.env.states, self.imagined])
        self.obs, self.legal = self.game.observe(self.states), self.game.legal(self.states)
        self.alive, self.t = self.game.alive(self.states), self.states[:, T].astype(np.int64)

    def step(self, actions: np.ndarray) -> dict[str, np.ndarray]:
        """actions (B, N) -> reward, ended, taken (B, N), done, cut (B,); `after` (B - num_real, L) before any restart;
        `info` of the real games."""
        _, reward, terminated, truncated, info = self.env.step(actions[: self.num_real])
        found = {"reward": reward, "ended": terminated | truncated, "taken": info["taken"], "done": info["done"]}
        found["cut"], after = np.zeros(self.num_real, bool), self.imagined
        if len(self.imagined):
            ahead = self.world.step(self.imagined, actions[self.num_real :])
            self.age += 1
            after, config, items = ahead.states, self.game.config, ahead.states[:, PLAYERS + self.game.num_players :]
            # a model of planes may forget the time limit or imagine more things than there can be: these games are cut
            wrong = (after[:, T] >= config.horizon) | ((items != FREE).sum(1) > self.most_things())
            cut = ~ahead.over & ((self.age >= self.horizon) | wrong)
            more = {"reward": ahead.reward, "ended": ahead.ended, "done": ahead.over | cut, "cut": cut}
            more["taken"] = np.zeros(ahead.ended.shape, np.int8)  # the model does not say
            found = {name: np.concatenate([x, more[name]]) for name, x in found.items()}
            restart = self.boards[self.rng.integers(len(self.boards), size=len(after))]
            self.imagined = np.where(more["done"][:, None], restart, after)
            self.age[more["done"]] = 0
        self.look()
        return found | {"after": after, "info": info}

    def most_things(self) -> int:
        return int(self.game.item_counts.sum()) + 4 * self.game.config.max_block_comp

    def get_state(self) -> dict[str, np.ndarray]:
        own = {"boards": self.boards, "imagined": self.imagined, "age": self.age, "rng": pack(self.rng)}
        return {f"env.{name}": array for name, array in self.env.get_state().items()} | own

    def set_state(self, saved: dict[str, np.ndarray]) -> None:
        self.env.set_state({k.removeprefix("env."): x for k, x in saved.items() if k.startswith("env.")})
        self.boards, self.imagined, self.age[:] = saved["boards"], saved["imagined"], saved["age"]
        unpack(self.rng, saved["rng"])
        self.look()


# run folder


def write_json(path: Path, content: dict) -> None:
    """Write a JSON file so that it is there whole or not at all."""
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(draft, path)


def save_checkpoint(
    run_dir: Path, name: str, nets: nn.Module, spec: dict, resume: dict[str, torch.Tensor] | None = None
):
    """Write checkpoints/<name>: a new folder beside the old one, then two renames (load_resume knows the gap)."""
    target = run_dir / "checkpoints" / name
    draft, old = target.with_name(name + ".new"), target.with_name(name + ".old")
    for leftover in (draft, old):
        shutil.rmtree(leftover, ignore_errors=True)
    draft.mkdir(parents=True)
    save_file({key: weight.contiguous() for key, weight in nets.state_dict().items()}, draft / "weights.safetensors")
    if resume is not None:
        save_file({key: array.contiguous() for key, array in resume.items()}, draft / "resume.safetensors")
    write_json(draft / "spec.json", spec)
    if target.exists():
        os.rename(target, old)
    os.rename(draft, target)
    shutil.rmtree(old, ignore_errors=True)


def load_resume(run_dir: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict] | None:
    """Weights, resume state and spec of the last complete save, if there is one."""
    for name in ("last", "last.new", "last.old"):  # a kill between the two renames leaves `last` under another name
        folder = run_dir / "checkpoints" / name
        if (folder / "spec.json").is_file():
            spec = json.loads((folder / "spec.json").read_text())
            return load_file(folder / "weights.safetensors"), load_file(folder / "resume.safetensors"), spec
    return None


class Metrics:
    """metrics.csv, TensorBoard and, if asked for, wandb: the same names in each."""

    def __init__(self, args: Args, run_dir: Path, names: list[str], step: int):
        self.path, self.columns = run_dir / "metrics.csv", ["global_step", "wall_time", *names]
        kept = []
        if self.path.is_file():  # resumed: forget what was logged after the checkpoint
            with self.path.open(newline="") as file:
                kept = [row for row in csv.reader(file)][1:]
            kept = [row for row in kept if len(row) == len(self.columns) and int(row[0]) <= step]
        draft = run_dir / "metrics.csv.tmp"
        with draft.open("w", newline="") as file:
            csv.writer(file).writerows([self.columns, *kept])
        os.replace(draft, self.path)
        self.tensorboard = SummaryWriter(str(run_dir), purge_step=step + 1 if step else None)
        table = "\n".join(f"|{name}|{value}|" for name, value in asdict(args).items())
        self.tensorboard.add_text("hyperparameters", f"|param|value|\n|-|-|\n{table}")
        self.wandb = None
        if args.track:
            import wandb

            self.wandb = wandb.init(
                project=args.wandb_project_name, entity=args.wandb_entity, group=args.wandb_group, dir=str(run_dir),
                tags=[tag for tag in args.wandb_tags.split(",") if tag], name=run_dir.name, config=asdict(args),
                id=hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:16], resume="allow",
            )  # fmt: skip

    def write(self, step: int, wall_time: float, scalars: dict[str, float]) -> None:
        row = {"global_step": step, "wall_time": f"{wall_time:.3f}", **scalars}
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self.columns).writerow(row)
        for name, value in scalars.items():
            self.tensorboard.add_scalar(name, value, step)
        if self.wandb:
            self.wandb.log(scalars, step=step)

    def close(self) -> None:
        self.tensorboard.close()
        if self.wandb:
            self.wandb.finish()


def draw_curve(run_dir: Path, title: str) -> None:
    """curve.png: return in training and evaluation over env steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with (run_dir / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    lines = (
        ("charts/episodic_return", "training", "-"),
        ("eval/return", "planned", "o-"),
        ("eval/raw_return", "raw", "s--"),
    )
    for name, label, style in lines:
        points = [(int(row["global_step"]), float(row[name])) for row in rows if row[name]]
        if points:
            axes.plot(*zip(*points, strict=True), style, markersize=4, label=label, alpha=0.6 if style == "-" else 1)
    axes.set(xlabel="env steps", ylabel="mean return of the learners", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(run_dir / "curve.png", dpi=120)
    plt.close(figure)


def prepare(args: Args) -> tuple[Args, Path]:
    """The folder of this run, and the args: those of the command line, or of the run that is resumed."""
    if args.resume:
        run_dir = Path(args.resume)
        if not (run_dir / "args.json").is_file():
            raise envs.ConfigError(f"'{run_dir}' cannot be resumed: it has no args.json")
        saved = json.loads((run_dir / "args.json").read_text())
        if saved["script"] != Path(__file__).name:
            raise envs.ConfigError(f"'{run_dir}' is a run of {saved['script']}, not of {Path(__file__).name}")
        known = {field.name for field in fields(Args)}
        return Args(**{k: v for k, v in saved["args"].items() if k in known} | {"resume": args.resume}), run_dir
    for name, least in (("num_envs", 1), ("num_steps", 2), ("total_timesteps", 1), ("draws", 1), ("horizon", 1),
                        ("imagine_horizon", 1), ("hidden", 1), ("log_every", 1), ("checkpoint_every", 1),
                        ("seed", 0), ("eval_every", 0), ("eval_episodes", 1), ("final_eval_episodes", 1), ("replay", 1),
                        ("torch_threads", 1), ("update_epochs", 1), ("batch_rows", 1), ("moa_updates", 0),
                        ("world_updates", 0), ("world_learning_rate", 0), ("max_grad_norm", 0), ("reward_scale", 0),
                        ("learning_rate", 0), ("offline_steps", 400), ("offline_updates", 1),
                        ("start_window_until", 0), ("clip_coef", 0), ("ppo_coef", 0), ("plan_coef", 0),
                        ("ent_coef", 0)):  # fmt: skip
        if getattr(args, name) < least:
            raise envs.ConfigError(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(args, name)}")
    for name in ("hindsight_prob", "hide_prob", "belief_floor", "belief_decay", "prior_power", "aimless_prior",
                 "habit_prior", "open_mind", "offline_share", "gamma", "td_lambda"):  # fmt: skip
        if not 0.0 <= getattr(args, name) <= 1.0:
            raise envs.ConfigError(f"--{name.replace('_', '-')} must be from 0 to 1, not {getattr(args, name)}")
    if not 0.01 <= args.real_ratio <= 1.0:
        raise envs.ConfigError(f"--real-ratio must be from 0.01 to 1, not {args.real_ratio}")
    if args.planes and (args.perfect_model or not args.world_model):
        raise envs.ConfigError(
            "--planes is a learned world model: it does not go with --perfect-model, --no-world-model"
        )
    if args.perfect_model and not args.world_model:
        raise envs.ConfigError("--perfect-model does not go with --no-world-model")
    if args.habit_prior + args.aimless_prior > 1.0:
        total = args.habit_prior + args.aimless_prior
        raise envs.ConfigError(f"--habit-prior and --aimless-prior must add up to at most 1, not to {total:g}")
    run_dir = Path(args.run_dir or f"runs/{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}")
    if (run_dir / "args.json").exists():
        raise envs.ConfigError(f"'{run_dir}' already holds a run; go on with --resume {run_dir}")
    return args, run_dir


def train(args: Args, run_dir: Path) -> int:
    """The whole run; returns the exit code."""
    # seeding
    torch.set_num_threads(args.torch_threads)
    env_seed, seats_seed, planner_seed, policy_seed, data_seed, init_seed, eval_seed, dream_seed, world_seed = (
        int(seed) for seed in np.random.SeedSequence(args.seed).generate_state(9)
    )
    policy_rng, data_rng = np.random.default_rng(policy_seed), np.random.default_rng(data_seed)

    # env setup
    torch.manual_seed(init_seed)
    true_game = envs.game(args.env_id, max_block_comp=args.max_block_comp)  # refuses battles; pays selfish rewards
    real_env = envs.make(
        args.env_id, num_envs=args.num_envs, seed=env_seed, prosocial=args.prosocial, max_block_comp=args.max_block_comp
    )
    game, spec_of_env = real_env.game, real_env.spec
    game.check_window(args.start_window, args.start_window_prob if args.start_window else 0.0)
    roles = parse_roles(args.roles, spec_of_env.num_players, "hop")
    seats = Seats(real_env, roles, "hop", seats_seed)
    learners = [seat for seat, role in enumerate(roles) if role == "hop"]
    if not learners:
        raise envs.ConfigError(f"no role in '{args.roles}' is hop, so there is nobody to train")
    num_players, num_actions, kinds = spec_of_env.num_players, spec_of_env.num_actions, game.kinds
    num_real, num_imagined = args.num_envs, 0
    if args.world_model:  # one learner in each imagined game
        num_imagined = round(num_real * len(learners) * (1 - args.real_ratio) / args.real_ratio)
    num_envs = num_real + num_imagined

    # networks
    code_version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    saved = load_resume(run_dir) if args.resume else None
    vae = None if saved else goal_encoder(args)
    vae_sizes = saved[2]["vae_sizes"] if saved else vae.sizes if vae else None
    model = None if saved else world_checkpoint(args)
    world_sizes = saved[2]["world_sizes"] if saved else model.sizes if model else None
    num_nets = 1 if args.shared_policy else len(learners)
    nets = make_nets(args, game, num_nets, vae_sizes, world_sizes, torch.Generator().manual_seed(init_seed))
    nn.init.constant_(nets["agent"].value_bias, args.initial_value)
    if vae:
        nets["vae"].load_state_dict(vae.state_dict())
    if model:
        nets["world"].load_state_dict(model.state_dict())
    if saved:
        nets.load_state_dict(saved[0])  # before anything is encoded with the goal space
    optimizers = {
        name: torch.optim.Adam(nets[name].parameters(), lr=args.learning_rate, eps=1e-5, foreach=True)
        for name in ("agent", "moa", "reader", *(["world"] if world_sizes else []))
    }
    mind = Mind(args, game, nets, num_envs, learners, planner_seed)
    env = Worlds(real_env, mind.world, num_imagined, args.imagine_horizon, world_seed)
    dream = DreamPlayers(mind, num_real, learners, dream_seed)
    offline, offline_sequences = offline_play(args, mind, data_seed)
    offline_world = offline_transitions(args, true_game, data_seed + 1) if world_sizes else {}
    spec = {
        "script": Path(__file__).name, "code_version": code_version, "env_id": args.env_id, "roles": roles,
        "obs_shape": list(spec_of_env.obs_shape), "num_actions": num_actions, "learners": learners,
        "vae_sizes": vae_sizes, "world_sizes": world_sizes, "env_config": spec_of_env.config, "args": asdict(args),
    }  # fmt: skip

    # resume
    first_iteration, wall_time, best = 1, 0.0, -float("inf")
    next_eval = args.eval_every or args.total_timesteps + 1
    window = np.zeros(2 + num_players + len(kinds))  # since the last log point: episodes, steps, returns, items taken
    replay: list[dict[str, np.ndarray]] = []  # of the last iterations: rows "moa.*" and "world.*"
    if saved:
        _, resume, saved_spec = saved

        def part(prefix: str) -> dict[str, np.ndarray]:
            return {k.removeprefix(prefix): v.numpy() for k, v in resume.items() if k.startswith(prefix)}

        for name, optimizer in optimizers.items():
            for k, parameter in enumerate(nets[name].parameters()):
                if f"adam.{name}.{k}.step" in resume:
                    optimizer.state[parameter] = {key: resume[f"adam.{name}.{k}.{key}"] for key in ADAM_STATE}
        for prefix, thing in (("env.", env), ("seats.", seats), ("mind.", mind), ("dream.", dream)):
            thing.set_state(part(prefix))
        unpack(policy_rng, part("rng.")["policy"])
        unpack(data_rng, part("rng.")["data"])
        replay = [part(f"replay{k}.") for k in range(saved_spec["replay_parts"])]
        window[:] = resume["window"].numpy()
        first_iteration, wall_time = saved_spec["iteration"] + 1, saved_spec["wall_time"]
        best, next_eval = saved_spec["best"], saved_spec["next_eval"]
    else:
        learn_offline(args, nets, offline, offline_sequences, data_rng)

    def save_last() -> None:
        state = {"window": window, "rng.policy": pack(policy_rng), "rng.data": pack(data_rng)}
        for prefix, thing in (("env.", env), ("seats.", seats), ("mind.", mind), ("dream.", dream)):
            state |= {f"{prefix}{k}": v for k, v in thing.get_state().items()}
        for k, part in enumerate(replay):
            state |= {f"replay{k}.{name}": rows for name, rows in part.items()}
        state = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in state.items()}
        for name, optimizer in optimizers.items():
            for k, parameter in enumerate(nets[name].parameters()):
                if parameter in optimizer.state:
                    state |= {f"adam.{name}.{k}.{key}": optimizer.state[parameter][key] for key in ADAM_STATE}
        progress = {"iteration": iteration, "global_step": global_step, "best": best, "next_eval": next_eval}
        progress |= {"replay_parts": len(replay), "wall_time": time.perf_counter() - started}
        save_checkpoint(run_dir, "last", nets, spec | progress, state)

    # logging
    run_dir.mkdir(parents=True, exist_ok=True)
    about = {"script": spec["script"], "code_version": spec["code_version"], "args": asdict(args) | {"resume": ""}}
    write_json(run_dir / "args.json", about)
    players, rates = [f"return-player{i + 1}" for i in range(num_players)], [f"{kind}_rate" for kind in kinds]
    charts = [f"charts/episodic_{name}" for name in ("return", *players, "length")]
    charts += [f"charts/{name}" for name in (*rates, "SPS", "learning_rate", "start_window_prob")]
    charts += [
        f"losses/{name}"
        for name in ("policy_loss", "value_loss", "plan_loss", "entropy_loss", "entropy", "approx_kl", "clipfrac")
    ]
    charts += [f"losses/{name}" for name in ("moa_loss", "goal_loss", "world_loss", "explained_variance")]
    charts += [f"planner/{name}" for name in ("steps_per_second", "kl", "policy_gain")]
    charts += [f"wm/{name}" for name in ("exact", "exact_rewarded", "reward_mse", "end_accuracy", "impossible")]
    charts += [f"moa/{name}" for name in ("top1", "top3", "ce", *(f"recall_action{a}" for a in range(num_actions)))]
    charts += [f"moa/top1-player{i + 1}" for i in range(num_players)] + ["goal/known", "goal/belief", "goal/entropy"]
    charts += [
        f"eval/{name}" for name in ("return", "return_ci95", "episodes", *players, *rates, "length", "raw_return")
    ]
    spent = dict.fromkeys(("time/env", "time/beliefs", "time/planner", "time/update", "time/eval"), 0.0)
    total_steps, global_step = args.num_iterations * args.batch_size, (first_iteration - 1) * args.batch_size
    metrics = Metrics(args, run_dir, [*charts, *spent], global_step)
    bar = tqdm(total=total_steps, initial=global_step, unit=" steps", unit_scale=True, disable=not sys.stderr.isatty())
    print(f"{args.env_id}, roles {','.join(roles)}, {total_steps} env steps -> {run_dir}", flush=True)
    stop_signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: stop_signals.append(received))
    started, clock = time.perf_counter() - wall_time, time.perf_counter()
    next_line = global_step + total_steps / 10

    def spend(part: str) -> None:
        """Book the time since the last call on one part of the loop."""
        nonlocal clock
        now = time.perf_counter()
        spent[f"time/{part}"] += now - clock
        clock = now

    # storage, all (T, B, N, ...)
    shape = (args.num_steps, num_envs, num_players)
    batch = {
        "obs": np.zeros((*shape, *spec_of_env.obs_shape), np.uint8), "legal": np.zeros((*shape, num_actions), bool),
        "alive": np.zeros(shape, bool), "planned": np.zeros(shape, bool), "action": np.zeros(shape, np.int64),
        "last": np.zeros(shape, np.int64), "policy": np.zeros((*shape, num_actions), np.float32),
        "value": np.zeros(shape, np.float32), "reward": np.zeros(shape, np.float32), "ended": np.zeros(shape, bool),
        "taken": np.zeros(shape, np.int8), "goals": np.zeros((*shape, num_players - 1, mind.goal_size), np.float32),
        "predicted": np.zeros((*shape, num_actions), np.float32), "belief": np.zeros(shape, np.float32),
    }  # fmt: skip
    batch |= {"log_prob": np.zeros(shape, np.float32), "next_value": np.zeros(shape, np.float32)}
    t, done, cut = np.zeros(shape[:2], np.int64), np.zeros(shape[:2], bool), np.zeros(shape[:2], bool)
    who_plans = np.zeros((num_envs, num_players), bool)
    who_plans[:num_real, learners] = True
    who_plans[dream.rows, dream.focal] = True

    for iteration in range(first_iteration, args.num_iterations + 1):
        progress = (iteration - 1) / args.num_iterations
        beta = args.beta + (args.beta_final - args.beta) * progress
        hindsight_prob = args.hindsight_prob * max(0.0, 1 - 2 * progress)
        for name, optimizer in optimizers.items():
            rate = args.world_learning_rate if name == "world" else args.learning_rate
            optimizer.param_groups[0]["lr"] = rate * (1 - progress)
        window_prob = args.start_window_prob * max(0.0, 1 - progress / max(args.start_window_until, 1e-9))
        if args.start_window:
            real_env.set_start_window(args.start_window, window_prob)
        first_memory = mind.memory.copy()
        planned_steps, kl, transitions = 0, [], []
        first_resets = mind.fresh.copy()

        # rollout
        for step_number in range(args.num_steps):
            mind.look(env)
            env_row, focal = np.nonzero(who_plans & env.alive)
            now = {"obs": env.obs, "legal": env.legal, "alive": env.alive, "last": mind.last_action}
            now |= {"planned": who_plans & env.alive, "predicted": mind.predict()}
            for name, array in now.items():
                batch[name][step_number] = array
            t[step_number] = env.t
            spend("beliefs")

            policy, value, prior, goals = mind.plan(env.states, env_row, focal, beta)
            batch["policy"][step_number, env_row, focal] = policy
            batch["value"][step_number, env_row, focal] = value
            batch["goals"][step_number, env_row, focal] = goals
            planned_steps += len(env_row) * args.draws
            kl.append((policy * np.log((policy + 1e-8) / (prior + 1e-8))).sum(1).mean())
            spend("planner")

            actions = np.full((num_envs, num_players), STAY)
            actions[:num_real] = seats.act()
            dream.act(actions)
            chosen = draw_rows(policy, policy_rng)
            actions[env_row, focal] = chosen
            batch["action"][step_number] = actions
            batch["log_prob"][step_number, env_row, focal] = np.log(policy[np.arange(len(chosen)), chosen])
            if len(dream.rows):  # what the imagined players are heading for is known
                known = data_rng.random(len(dream.rows)) < 0.5
                true_goals, rows, focals = dream.goals()[known], dream.rows[known], dream.focal[known]
                others = (focals[:, None] + 1 + np.arange(num_players - 1)) % num_players
                here = env.alive[rows[:, None], others]
                true_goals = true_goals[np.arange(len(rows))[:, None], others]
                batch["goals"][step_number, rows, focals] = np.where(here[..., None], true_goals, mind.hidden_goal)
            # what the world model can learn from; the env itself goes on to the next episode where one ends
            before = real_env.states.copy()
            after = true_game.simulate(before, actions[:num_real])
            found = env.step(actions)
            info = found["info"]
            transitions.append((before, actions[:num_real], after.states, after.reward, info["done"].copy()))
            for name in ("reward", "taken", "ended"):
                batch[name][step_number] = found[name]
            done[step_number], cut[step_number] = found["done"], found["cut"]
            seats.watch(actions[:num_real], info)
            mind.watch(actions, env.alive, found["done"])
            rows = np.flatnonzero(found["cut"][num_real:])
            if len(rows):  # a cut game would have gone on
                worth = mind.plan(found["after"], rows, dream.focal[rows], beta, planned=False)[1]
                batch["next_value"][step_number, num_real + rows, dream.focal[rows]] = worth
            real = info["done"][:num_real]
            if real.any():
                window[:2] += real.sum(), info["episode_length"][:num_real][real].sum()
                window[2 : 2 + num_players] += info["episode_return"][:num_real][real].sum(0)
            window[2 + num_players :] += [(info["taken"][:num_real] == 1 + kind).sum() for kind in range(len(kinds))]
            spend("env")

        # value targets and hindsight
        env_row, focal = np.nonzero(who_plans & env.alive)
        last_value = np.zeros((1, *shape[1:]), np.float32)
        last_value[0, env_row, focal] = mind.plan(env.states, env_row, focal, beta, planned=False)[1]
        next_value = np.concatenate([batch["value"][1:], last_value])
        next_value = np.where(cut[:, :, None], batch["next_value"], next_value)
        returns = lambda_returns(
            args.reward_scale * batch["reward"],
            batch["value"],
            next_value,
            batch["ended"],
            cut[:, :, None],
            args.gamma,
            args.td_lambda,
        )
        alive, action = batch["alive"], batch["action"]
        value = batch["value"].sum(2, keepdims=True) - batch["value"]  # to the others
        steps = heading_for(action, batch["taken"], alive, done, value, args, data_rng)
        goals = goals_of(steps, batch["obs"], action, mind)  # (T, B, N, G)
        spend("beliefs")

        # fresh data: how good were the predictions, before anything learns from it?
        real_rows = alive.copy()
        real_rows[:, num_real:] = False
        opponent = score_predictions(batch["predicted"], action, real_rows)
        columns = (np.concatenate(column) for column in zip(*transitions, strict=True))
        seen = dict(zip(("states", "actions", "next_states", "reward", "end"), columns, strict=True))
        world_scores = score_world(nets["world"], seen) if world_sizes else {}

        # rows to learn from
        ids, time_share = mind.things(batch["obs"]), np.broadcast_to(mind.things.time(t)[:, :, None], shape)
        order = (np.arange(num_players)[:, None] + 1 + np.arange(num_players - 1)) % num_players  # (N, N-1)
        hindsight = goals[:, :, order]  # (T, B, N, N-1, G)
        use = (data_rng.random(shape) < hindsight_prob)[..., None, None] & (hindsight[..., -2:-1] == 0)
        fed = np.where(use, hindsight, batch["goals"])
        fed = hide(torch.from_numpy(fed), args.hide_prob, data_rng).numpy()
        plans = batch["planned"]
        net = np.broadcast_to(mind.net_of_seat, shape)
        own = {"ids": ids[plans], "t": time_share[plans], "legal": batch["legal"][plans], "net": net[plans]}
        own |= {"goals": fed[plans].reshape(plans.sum(), -1), "returns": returns[plans]}
        own |= {name: batch[name][plans] for name in ("policy", "action", "log_prob")}
        own |= {"advantage": (returns - batch["value"])[plans]}
        part = {"moa.ids": ids[real_rows], "moa.t": time_share[real_rows], "moa.legal": batch["legal"][real_rows]}
        part |= {"moa.action": action[real_rows], "moa.goal": with_habits(goals[real_rows], mind, data_rng)}
        part |= {f"world.{name}": x for name, x in seen.items()}
        replay = [*replay, part][-args.replay :]
        resets = np.concatenate([first_resets[None], done[:-1]])
        sequences = {"ids": ids, "last": batch["last"], "t": time_share, "legal": batch["legal"], "action": action}
        sequences |= {"goal": goals, "known": alive & (steps >= 0)}
        sequences |= {"resets": np.broadcast_to(resets[:, :, None], shape)}
        sequences = {k: x[:, :num_real].reshape(args.num_steps, -1, *x.shape[3:]) for k, x in sequences.items()}
        sequences = {k: torch.from_numpy(np.ascontiguousarray(x)) for k, x in sequences.items()}
        sequences["memory"] = torch.from_numpy(first_memory[:num_real].reshape(-1, args.hidden))

        # update
        rows = {name: np.concatenate([part[name] for part in replay]) for name in part}
        data = {
            kind: {name.removeprefix(kind + "."): x for name, x in rows.items() if name.startswith(kind + ".")}
            for kind in ("moa", "world")
        }
        env.boards = data["world"]["states"]
        data |= {"own": own, "moa.offline": offline, "world.offline": offline_world}
        try:
            losses = learn(args, nets, optimizers, data, sequences, args.ent_coef * (1 - progress), data_rng)
        except FloatingPointError as error:
            bar.close()
            metrics.close()
            kept = run_dir / "checkpoints" / "last"
            kept = f"the last good checkpoint is {kept}" if kept.exists() else "no checkpoint was saved yet"
            print(f"stopped after step {global_step}: {error}; {kept}", file=sys.stderr)
            return 1
        global_step = iteration * args.batch_size
        spend("update")

        # evaluation
        scores = {}
        if global_step >= next_eval:
            next_eval = (global_step // args.eval_every + 1) * args.eval_every
            scores = evaluate(args, nets, roles, args.eval_episodes, eval_seed, planned=True)
            scores["raw_return"] = evaluate(args, nets, roles, args.eval_episodes, eval_seed, planned=False)["return"]
            if scores["return"] > best:
                best = scores["return"]
                save_checkpoint(run_dir, "best", nets, spec | {"global_step": global_step, "eval": scores})
            spend("eval")

        # logging
        if iteration % args.log_every == 0 or iteration == args.num_iterations or scores:
            wall_time = time.perf_counter() - started
            scalars = {
                "charts/SPS": global_step / wall_time,
                "charts/learning_rate": args.learning_rate * (1 - progress),
            }
            scalars |= {"charts/start_window_prob": window_prob if args.start_window else 0.0}
            if window[0]:  # episodes ended since the last row
                per_episode = window / window[0]
                mean_returns, taken = per_episode[2 : 2 + num_players], per_episode[2 + num_players :] / num_players
                scalars |= {"charts/episodic_return": mean_returns[learners].mean()}
                scalars |= {"charts/episodic_length": per_episode[1]}
                scalars |= {f"charts/episodic_{name}": x for name, x in zip(players, mean_returns, strict=True)}
                scalars |= {f"charts/{name}": x for name, x in zip(rates, taken, strict=True)}
            errors = returns[plans] - batch["value"][plans]
            scalars |= losses | opponent | world_scores
            scalars |= {"losses/explained_variance": 1 - errors.var() / max(returns[plans].var(), 1e-8)}
            sure = mind.beliefs[:num_real][mind.alive[:num_real]]
            scalars |= {"goal/belief": sure.max(1).mean(), "goal/entropy": -(sure * np.log(sure + 1e-8)).sum(1).mean()}
            scalars |= {"goal/known": (steps >= 0)[real_rows].mean(), "planner/kl": np.mean(kl)}
            scalars |= {f"eval/{name}": x for name, x in scores.items()}
            if scores:
                scalars |= {"planner/policy_gain": scores["return"] - scores["raw_return"]}
            scalars |= {name: seconds / sum(spent.values()) for name, seconds in spent.items()}
            scalars |= {
                "planner/steps_per_second": planned_steps * (iteration - first_iteration + 1) / spent["time/planner"]
            }
            metrics.write(global_step, wall_time, {name: float(x) for name, x in scalars.items() if np.isfinite(x)})
            window[:] = 0.0
            latest = {
                "return": f"{scalars.get('charts/episodic_return', np.nan):.3f}",
                "best_eval": f"{best:.3f}" if best > -np.inf else "none yet",
            }
            bar.set_postfix(latest, refresh=False)
            if bar.disable and (global_step >= next_line or iteration == args.num_iterations):
                next_line += total_steps / 10
                print(f"step {global_step}/{total_steps} return {latest['return']} best_eval {latest['best_eval']}"
                      f" SPS {scalars['charts/SPS']:.0f}", flush=True)  # fmt: skip
        bar.update(args.batch_size)

        # checkpoint
        if iteration % args.checkpoint_every == 0 or iteration == args.num_iterations or stop_signals:
            save_last()
        if stop_signals:
            bar.close()
            metrics.close()
            print(f"stopped and saved at step {global_step}; go on with: python {spec['script']} --resume {run_dir}")
            return 128 + stop_signals[0]
    bar.close()
    metrics.close()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # everything is saved

    # result
    fewer = max(1, args.final_eval_episodes // 4)
    result = {"last": evaluate(args, nets, roles, args.final_eval_episodes, eval_seed + 1, planned=True)}
    result["last_greedy"] = evaluate(args, nets, roles, fewer, eval_seed + 1, planned=True, greedy=True)
    result["last_raw"] = evaluate(args, nets, roles, args.final_eval_episodes, eval_seed + 1, planned=False)
    if (run_dir / "checkpoints" / "best").is_dir():
        nets.load_state_dict(load_file(run_dir / "checkpoints" / "best" / "weights.safetensors"))
        result["best"] = evaluate(args, nets, roles, fewer, eval_seed + 1, planned=True)
    wall_time = time.perf_counter() - started
    draw_curve(run_dir, f"HOP+ without trees on {args.env_id}, seed {args.seed}")
    summary = {"finished": True, "global_step": global_step, "wall_time": wall_time, "eval": result["last"]}
    summary |= {"eval_greedy": result["last_greedy"], "eval_raw": result["last_raw"], "eval_best": result.get("best")}
    write_json(run_dir / "result.json", summary | {"time": spent})
    print(f"finished in {wall_time:.0f} s; on fresh episodes:")
    for name, scores in result.items():
        per_player = " ".join(f"{scores[player]:.3f}" for player in players)
        taken = " ".join(f"{rate} {scores[rate]:.3f}" for rate in rates)
        spread = f"{scores['return']:.3f} +- {scores['return_ci95']:.3f}"
        print(f"  {name:<12} return {spread}  players {per_player}  {taken}  ({scores['episodes']:.0f} episodes)")
    print(f"curve: {run_dir}/curve.png")
    return 0


def main() -> int:
    """Read the command line, train; returns the exit code."""
    try:
        args, run_dir = prepare(tyro.cli(Args, description=__doc__))
        if (run_dir / "result.json").is_file():
            print(f"{run_dir} is finished already: {(run_dir / 'result.json')}")
            return 0
        return train(args, run_dir)
    except envs.ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    # as an imported module: numba finds compiled code again only for classes that have an importable name
    sys.exit(import_module(Path(__file__).stem).main())
