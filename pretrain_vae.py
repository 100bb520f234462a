"""Goals and the opponent model, offline: where players are heading and what they do on the way, from rule-based play.

Where a player is heading is known in hindsight: the state in which its hunt happened. The encoder of a VAE turns that
state into a goal vector z, the decoder draws the state again from z (Bernoulli for planes), and the opponent model
(MOA) predicts the player's actions on the way there from what it sees, the time and z; z is hidden at random, so that
the model also works without a goal. A recurrent reader of goals then learns to tell z from what was seen of a player so
far. Only steps of players on the board are stored, learned from or predicted.

    python pretrain_vae.py                                      # msh-4h1s-4x4, about a minute on one core
    python pretrain_vae.py --lineups mix --env-id msh-4h1s-8x8  # four players, each ns or nh for an episode
    python pretrain_vae.py --goal-mode oracle                   # named goals (the kind of prey) instead of learned ones
    python pretrain_vae.py --env-id smac-8m --obs-is-state      # battles: Gaussian likelihood, no ceiling

Each epoch prints `[MOA] epoch k: top1=...` beside what the best predictor of these rules gets that knows less than the
goal: they break ties at random, so nobody gets 1. One checkpoint holds all three networks; hopplus_mcts.py and
hopplus_nomcts.py plan with these very networks and go on training them in their games. docs/offline_models.md tells
more.
"""

from __future__ import annotations

import envs  # first: from here on Ctrl-C is one line

# isort: split
import csv
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from envs import ConfigError
from envs import trees as forest
from envs.devices import device_of, move, tensors
from envs.grid import FIRST_INTERACTION, STAY, EnvSpec, GridGame, T
from envs.offline import (
    check_sizes,
    describe,
    fresh_folder,
    load_weights,
    main,
    newest,
    read_spec,
    save_checkpoint,
    since,
    split_episodes,
    write_metrics,
)
from envs.recording import ceilings, collect_play, load_play, role_names, save_data
from envs.run import Positive, Range, Rate, Run, Share, Weight, Whole, check_ranges
from envs.sight import Things, embedding_table, legal_log_softmax, sum_of_embeddings

FLAGS = 3  # numbers of a goal vector behind its z:
HABIT, UNKNOWN, AIMLESS = -3, -2, -1  # does what players met so far do; goal not known; has none and acts at random
# (AIMLESS -1 instead of 1: a bystander, who acts at random but touches no item; HABIT -1: keen, heads for some item)


@dataclass
class Args:
    # run
    seed: Whole = 1
    """one seed, split into generators for envs, players, the split, the networks and their batches"""
    out_dir: str = "vae_ckpts"
    """the checkpoint goes to <out-dir>/vae__<unix time>/dim<D>/"""
    data: str = ""
    """an .npz of an earlier run to train on; empty: play anew and save it under <out-dir>/data/"""
    pictures: bool = True
    """draw the pictures of each epoch"""
    torch_threads: Positive = 1
    """threads of torch; more is slower whenever anything else runs"""

    # env
    env_id: str = "msh-4h1s-4x4"
    """a grid game or a battle"""
    lineups: tuple[str, ...] = ()
    """who plays: each a comma list of roles, one per seat or one for all; equal shares of the steps;
    empty: `mix` and one of each (`ns,nh,mix,random`); battles: rule-based teams or run folders, empty: `nearest`,
    `focus`, `random`"""
    num_steps: Annotated[int, Range(100, 10**9), tyro.conf.arg(metavar="100..1e9")] = 100_000
    """steps of players on the board to collect"""
    obs_is_state: bool = False
    """battles: learn from the state, the same for all agents, instead of each agent's observation"""
    goal_steps: Positive = 5
    """battles: the goal of a step is what the agent sees this many steps later (or last)"""
    val_share: Annotated[float, Range(0.01, 0.9), tyro.conf.arg(metavar="0.01..0.9")] = 0.1
    """share of the episodes kept for validation"""

    # algorithm
    goal_mode: Literal["learned", "oracle", "none"] = "learned"
    """goals of a learned space, the named kinds of prey, or none: the opponent model alone"""
    dim: Literal[8, 16, 32, 64] = 16
    """size of a learned goal vector"""
    loss: Literal["both", "moa", "recon"] = "both"
    """what shapes the goal space beside alpha KL: cross-entropy of actions, reconstruction, or both;
    the part left out still trains its own network on goals it cannot change"""
    alpha: Weight = 0.01
    """weight of KL(q(z | goal state) || N(0, 1))"""
    recon_weight: Weight = 0.03
    """weight of the reconstruction, summed over the planes"""
    hide_prob: Share = 0.15
    """how often the goal is hidden from the opponent model"""
    hidden_size: Annotated[int, Range(1, 8192), tyro.conf.arg(metavar="1..8192")] = 64
    """width of the opponent model and of the reader of goals"""
    vae_hidden_size: Annotated[int, Range(1, 8192), tyro.conf.arg(metavar="1..8192")] = 256
    """width of encoder and decoder"""
    epochs: Positive = 10
    """passes over the training steps"""
    batch_size: Positive = 512
    """steps per update"""
    learning_rate: Rate = 2e-3
    """of Adam, annealed to a tenth along a cosine"""
    weight_decay: Share = 1e-4
    """of AdamW"""
    reader_updates: Positive = 200
    """minibatches of 256 sequences for the reader of goals"""


# networks


def mlp(*sizes: int) -> nn.Sequential:
    layers = []
    for size_in, size_out in pairwise(sizes):
        layers += [nn.Linear(size_in, size_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class FirstLayer(nn.Module):
    """The first layer on what is seen: a sum of embeddings of ids (grid games), or a dense one on vectors (battles)."""

    def __init__(self, sizes: dict[str, Any], width: int):
        super().__init__()
        if sizes["num_ids"]:
            self.table = embedding_table(sizes["num_ids"], width)
        else:
            self.dense = nn.Linear(sizes["vector_size"], width)

    def forward(self, seen: Tensor) -> Tensor:
        return self.dense(seen) if hasattr(self, "dense") else sum_of_embeddings(seen, self.table)


class GoalVAE(nn.Module):
    """The learned goal space: encoder q(z | goal state) and decoder."""

    def __init__(self, sizes: dict[str, Any]):
        super().__init__()
        hidden = sizes["vae_hidden_size"]
        self.is_planes = sizes["num_ids"] > 0
        self.first = FirstLayer(sizes, hidden)
        self.encoder = mlp(hidden, hidden, 2 * sizes["z_size"])
        self.decoder = mlp(sizes["z_size"], hidden, hidden, sizes["obs_size"])

    def encode(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        """What is seen in goal states -> mean and log variance of z, (R, D) each."""
        mean, log_var = self.encoder(torch.relu(self.first(seen))).chunk(2, 1)
        return mean, log_var.clamp(-8.0, 4.0)

    def reconstruction(self, z: Tensor, obs: Tensor) -> Tensor:
        """(R,) nats to describe the goal state obs (R, ...) given z: Bernoulli for planes, Gaussian for vectors."""
        out = self.decoder(z)
        if self.is_planes:
            return F.binary_cross_entropy_with_logits(out, obs.float().flatten(1), reduction="none").sum(1)
        return 0.5 * (out - obs).pow(2).sum(1)


class NamedGoals(nn.Module):
    """HOP's goals: the kind of item on the player's own cell, one-hot; with goal mode none, nothing at all."""

    def __init__(self, sizes: dict[str, Any]):
        super().__init__()
        height, width, planes = sizes["height"], sizes["width"], sizes["num_players"] + 1 + sizes["num_kinds"]
        own_place = (height - 1) * (2 * width - 1) + width - 1  # as in envs/sight.py
        first_kind = 1 + own_place * planes + sizes["num_players"] + 1
        ids = first_kind + torch.arange(sizes["z_size"])
        self.register_buffer("ids", ids, persistent=False)

    def encode(self, seen: Tensor) -> tuple[Tensor, None]:
        return (seen[:, :, None] == self.ids).any(1).float(), None


class OpponentModel(nn.Module):
    """pi(action | what j sees, time, goal of j): small enough to be asked for everybody at every node of a tree."""

    def __init__(self, sizes: dict[str, Any]):
        super().__init__()
        hidden = sizes["hidden_size"]
        self.first = FirstLayer(sizes, hidden)
        self.time = nn.Parameter(torch.randn(hidden) * 0.3)
        self.goal = nn.Linear(sizes["z_size"] + FLAGS, hidden, bias=False)
        self.layer = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, sizes["num_actions"])
        nn.init.normal_(self.goal.weight, std=0.3)
        nn.init.normal_(self.layer.weight, std=(2 / hidden) ** 0.5)
        nn.init.normal_(self.head.weight, std=0.1 / hidden**0.5)
        touches = torch.arange(sizes["num_actions"]) >= FIRST_INTERACTION
        self.register_buffer("touches", 1e9 * touches.float(), persistent=False)  # (A,)

    def forward(self, seen: Tensor, t: Tensor, legal: Tensor, goal: Tensor) -> Tensor:
        """seen (R, ...), t (R,) in 0..1, legal (R, A), goal (R, G) -> log-probabilities (R, A)"""
        first = torch.relu(self.first(seen) + t[:, None] * self.time + self.goal(goal))
        logits = self.head(torch.relu(self.layer(first)))
        aimless, bystander = torch.relu(goal[:, AIMLESS, None]), torch.relu(goal[:, AIMLESS, None] * -1)
        logits = logits * (1 - aimless - bystander) - bystander * self.touches  # who has no goal does anything legal
        return legal_log_softmax(logits, legal)


class GoalReader(nn.Module):
    """q(z | what was seen of j this episode): a recurrent network over what j saw and did."""

    def __init__(self, sizes: dict[str, Any]):
        super().__init__()
        hidden = sizes["hidden_size"]
        self.first = FirstLayer(sizes, hidden)
        self.action = nn.Embedding(sizes["num_actions"] + 1, hidden)
        self.cell = nn.GRUCell(hidden, hidden)
        self.head = nn.Linear(hidden, 2 * max(1, sizes["z_size"]))  # without goals it is never asked
        nn.init.normal_(self.action.weight, std=0.3)

    def forward(self, seen: Tensor, last_action: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """seen (R, ...), action before (R,) or A at the start, memory (R, H) -> mean (R, D), log std (R, D), memory"""
        memory = self.cell(torch.relu(self.first(seen) + self.action(last_action)), memory)
        mean, log_std = self.head(memory).chunk(2, 1)
        return mean, log_std.clamp(-3.0, 2.0), memory


class GoalModels(nn.Module):
    """Goal space, opponent model and reader of goals: what one checkpoint holds, and what HOP+ plans with.

    A goal vector has G numbers: z, and a flag each for the goals that have no z (HABIT, UNKNOWN, AIMLESS).
    """

    def __init__(self, sizes: dict[str, Any]):
        super().__init__()
        self.sizes, self.z_size, self.goal_size = dict(sizes), sizes["z_size"], sizes["z_size"] + FLAGS
        self.space = GoalVAE(sizes) if sizes["goal_mode"] == "learned" else NamedGoals(sizes)
        self.moa = OpponentModel(sizes)
        self.reader = GoalReader(sizes)
        if not sizes["num_ids"]:  # vectors are standardised
            self.register_buffer("mean", torch.zeros(sizes["obs_size"]))
            self.register_buffer("std", torch.ones(sizes["obs_size"]))

    def flag(self, which: int) -> Tensor:
        """(G,) the goal vector of HABIT, UNKNOWN or AIMLESS"""
        return F.one_hot(torch.tensor(self.goal_size + which), self.goal_size).float()

    def goals(self, z: Tensor) -> Tensor:
        """z (..., D) -> goal vectors (..., G)"""
        return F.pad(z, (0, FLAGS))

    def encode(self, seen: Tensor) -> Tensor:
        """z (R, D) of goal states: the encoder's means"""
        with torch.no_grad():
            return torch.cat([self.space.encode(some)[0] for some in seen.to(device_of(self)).split(4096)])


def sizes_of(args: Args, spec: EnvSpec, game: GridGame | None, kinds: list[str]) -> dict[str, Any]:
    height, width = spec.obs_shape[:2] if game else (1, 1)
    obs_size = int(np.prod(spec.state_shape if args.obs_is_state else spec.obs_shape))
    sizes = {"goal_mode": args.goal_mode, "hidden_size": args.hidden_size, "vae_hidden_size": args.vae_hidden_size}
    sizes |= {"num_players": spec.num_players, "num_actions": spec.num_actions, "num_kinds": len(kinds)}
    sizes |= {"height": height, "width": width, "obs_size": obs_size, "num_ids": Things(game).num_ids if game else 0}
    # the state alone does not say who acts: the player's number stands behind it
    sizes["vector_size"] = 0 if game else obs_size + spec.num_players * args.obs_is_state
    return sizes | {"z_size": {"learned": args.dim, "oracle": len(kinds), "none": 0}[args.goal_mode]}


# losses


def hide(goal: Tensor, prob: float, rng: np.random.Generator) -> Tensor:
    """Goal vectors (..., G), some of them replaced by UNKNOWN."""
    unknown = F.one_hot(torch.tensor(goal.shape[-1] + UNKNOWN), goal.shape[-1]).float().to(goal.device)
    return torch.where(torch.from_numpy(rng.random(goal.shape[:-1]) < prob)[..., None].to(goal.device), unknown, goal)


def moa_loss(moa: OpponentModel, mb: dict[str, Tensor], hide_prob: float, rng: np.random.Generator) -> Tensor:
    """Cross-entropy of actions, some goals hidden."""
    mb = move(mb, device_of(moa))
    return F.nll_loss(moa(mb["seen"], mb["t"], mb["legal"], hide(mb["goal"], hide_prob, rng)), mb["action"])


def reader_loss(models: GoalModels, seq: dict[str, Tensor]) -> Tensor:
    """Gaussian likelihood of the goals players were heading for, and of their actions given the inferred z.

    seq: seen (T, R, ...), last action (T, R), t, legal, action, goal (T, R, G), known (T, R): on the board with a known
    goal, resets (T, R): a new episode begins here, and memory (R, H) before the first step.
    """
    seq = move(seq, device_of(models))
    memory, loss, count = seq["memory"], torch.zeros(()), seq["known"].sum().clamp_min(1)
    for step in range(len(seq["seen"])):
        memory = memory * ~seq["resets"][step][:, None]
        mean, log_std, memory = models.reader(seq["seen"][step], seq["last_action"][step], memory)
        z = seq["goal"][step][:, :-FLAGS]
        nll = (0.5 * ((z - mean) / log_std.exp()).pow(2) + log_std).sum(1)
        explain = models.moa(seq["seen"][step], seq["t"][step], seq["legal"][step], models.goals(mean))
        explain = -explain.gather(1, seq["action"][step][:, None])[:, 0]
        loss = loss + ((nll + explain) * seq["known"][step]).sum() / count
    return loss


def losses(models: GoalModels, batch: dict[str, Tensor], mode: str, hide_prob: float = 0.0) -> dict[str, Tensor]:
    """Cross-entropy, reconstruction and KL, the latter two as means over the rows with a goal. The part that `mode`
    leaves out sees z without a gradient to it. The opponent model gets a sample of z while training, hidden with
    probability `hide_prob`, and else the mean; the reconstruction is always of a sample."""
    has_goal = batch["has_goal"]
    mean, log_var = models.space.encode(batch["goal_seen"])
    z, recon, kl = mean, torch.zeros(()), torch.zeros(())
    if log_var is not None:
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        weight = has_goal.float() / has_goal.sum().clamp(min=1)
        recon = models.space.reconstruction(z.detach() if mode == "moa" else z, batch["goal_obs"])
        recon = (recon * weight).sum()
        kl = (0.5 * (mean.pow(2) + log_var.exp() - 1 - log_var) * weight[:, None]).sum()
    goal = z if models.training else mean
    goal = models.goals(goal.detach() if mode == "recon" else goal)
    goal = torch.where(has_goal[:, None], goal, models.flag(UNKNOWN))
    goal = torch.where(batch["aimless"][:, None], models.flag(AIMLESS), goal)
    if models.training:
        goal = torch.where(torch.rand(len(goal), 1) < hide_prob, models.flag(UNKNOWN), goal)
    log_probs = models.moa(batch["seen"], batch["t"], batch["legal"], goal)
    return {"ce": F.nll_loss(log_probs, batch["action"]), "recon": recon, "kl": kl}


# hindsight: what players were heading for, known afterwards


def heading_for(action: np.ndarray, taken: np.ndarray, alive: np.ndarray, done: np.ndarray, horizon: int) -> np.ndarray:
    """(T, B, N) step of the hunt each player was heading for, -1 if unknown: its next successful one within `horizon`
    steps of the same episode, else its next try. action, taken, alive (T, B, N), done (T, B)."""
    steps = np.full(action.shape, -1)
    for wanted in ((action >= FIRST_INTERACTION) & alive, (taken > 0) & alive):  # a success overrules a try
        ahead = np.full(action.shape[1:], -1)
        for step in reversed(range(len(action))):
            ahead[done[step]] = -1
            ahead = np.where(wanted[step], step, ahead)
            steps[step] = np.where((ahead >= 0) & (ahead - step < horizon), ahead, steps[step])
    steps[~alive] = -1
    return steps


def hindsight_goals(models: GoalModels, steps: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """(T, B, N, G) goal vectors of what was seen (T, B, N, ...) at `steps` (T, B, N); UNKNOWN where that is -1."""
    goals = np.tile(models.flag(UNKNOWN).numpy(), (*steps.shape, 1))
    step, env_row, player = np.nonzero(steps >= 0)
    if len(step) and models.z_size:
        at = np.stack([steps[step, env_row, player], env_row, player])
        key, back = np.unique(at, axis=1, return_inverse=True)
        z = models.encode(torch.from_numpy(seen[tuple(key)]))
        goals[step, env_row, player] = models.goals(z).cpu().numpy()[back.ravel()]
    return goals


def goals_to_learn_with(batch: dict, goals: np.ndarray, hindsight_prob: float, hide_prob: float, rng) -> np.ndarray:
    """(T, B, N, N-1, G): the goals a player planned with; instead, at random, those that hindsight shows, or none."""
    num_players = goals.shape[2]
    order = (np.arange(num_players)[:, None] + 1 + np.arange(num_players - 1)) % num_players  # (N, N-1) the next first
    hindsight = goals[:, :, order]  # (T, B, N, N-1, G)
    known = hindsight[..., UNKNOWN, None] == 0
    use = (rng.random(goals.shape[:3]) < hindsight_prob)[..., None, None] & known
    fed = torch.from_numpy(np.where(use, hindsight, batch["goals"]))
    return hide(fed, hide_prob, rng).numpy()


def play_rows(models: GoalModels, data: dict[str, Any], things: Things) -> dict[str, np.ndarray]:
    """Recorded play of a grid game as rows to learn from: seen, t, legal, action, goal (M, G)."""
    seen = things(data["obs"])
    goals = hindsight_goals(models, data["goal_row"][:, None, None], seen[:, None, None])[:, 0, 0]
    if models.z_size:
        goals[data["role"] == 0] = models.flag(AIMLESS).numpy()  # of `role_names`: random
    return {"seen": seen, "t": things.time(data["t"]), "legal": data["legal"], "action": data["action"], "goal": goals}


def rehearsal(models: GoalModels, game: GridGame, num_steps: int, seed: int, keen: bool) -> dict[str, np.ndarray]:
    """Distinct steps of players with a purpose, so that what is learned online does not push the offline play out. With
    `keen`, half of those that head for something teach what such players do, whatever it is that they head for."""
    plain = envs.game(game.env_id)
    data = collect_play(plain.spec(), plain, ("mix",), num_steps, np.random.SeedSequence(seed), quiet=True)
    rows = play_rows(models, data, Things(game))
    if keen and models.z_size:
        some = (data["goal_row"] >= 0) & (np.random.default_rng(seed).random(len(data["goal_row"])) < 0.5)
        rows["goal"][some] = -models.flag(HABIT).numpy()
    return {name: column[~data["repeat"]] for name, column in rows.items()}


def sequences_of(rows: dict[str, np.ndarray], data: dict[str, Any], num_actions: int, length: int):
    """The first `length` steps of every player and episode, as `reader_loss` wants them: (T, R, ...)."""
    first = np.flatnonzero(np.append(True, (np.diff(data["episode"]) != 0) | (np.diff(data["player"]) != 0)))
    count = np.minimum(np.diff(np.append(first, len(data["t"]))), length)
    step = np.arange(length)[:, None]
    at = np.minimum(first + step, len(data["t"]) - 1)  # (T, R)
    last_action = np.where(step == 0, num_actions, data["action"][np.maximum(at - 1, 0)])
    sequences = {name: column[at] for name, column in rows.items()}
    known = (step < count) & (data["goal_row"][at] >= 0) & (rows["goal"][at][..., AIMLESS] == 0)
    return sequences | {"last_action": last_action, "resets": np.zeros(at.shape, bool), "known": known}


def sequences_to_read(batch: dict, goals, known, first_memory, first_resets, done, num_real: int) -> dict[str, Tensor]:
    """What the reader of goals learns from, as reader_loss wants it: the real games, (T, R, ...) of R players."""
    shape = batch["action"].shape
    resets = np.concatenate([first_resets[None], done[:-1]])
    sequences = {name: batch[name] for name in ("seen", "last_action", "t", "legal", "action")}
    sequences |= {"goal": goals, "known": known, "resets": np.broadcast_to(resets[:, :, None], shape)}
    sequences = {k: x[:, :num_real].reshape(shape[0], -1, *x.shape[3:]) for k, x in sequences.items()}
    sequences = {k: torch.from_numpy(np.ascontiguousarray(x)) for k, x in sequences.items()}
    return sequences | {"memory": torch.from_numpy(first_memory[:num_real].reshape(-1, first_memory.shape[-1]))}


def mixed_batch(
    recent: dict[str, np.ndarray], offline: dict[str, np.ndarray], size: int, share: float, rng: np.random.Generator
) -> dict[str, Tensor]:
    """A minibatch of `size` rows: a share of offline ones, the others seen lately (all offline, were there none)."""
    num_offline, num_recent = (len(next(iter(rows.values()))) for rows in (offline, recent))
    count = round(size * share) if num_recent else size
    old, new = rng.integers(num_offline, size=count), rng.integers(max(num_recent, 1), size=size - count)
    return {name: torch.from_numpy(np.concatenate([offline[name][old], recent[name][new]])) for name in offline}


def with_habits(goals: np.ndarray, models: GoalModels, rng: np.random.Generator) -> np.ndarray:
    """Goals (R, G) of players met in a game, half of them replaced by HABIT: what such players do, goals aside."""
    if not models.z_size:
        return goals
    return np.where(rng.random((len(goals), 1)) < 0.5, models.flag(HABIT).numpy(), goals)


def discounts(args: Any, goals: np.ndarray) -> np.ndarray:
    """(...) of decisions given the others' goals (..., N-1, G). It pays to wait for those who surely act; but among
    those that may be like oneself (HABIT) all would wait for each other."""
    flags = goals[..., HABIT]
    return np.where((flags < 0).any(-1) & ~(flags > 0).any(-1), args.patience, args.gamma)


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


def train_reader(models: GoalModels, sequences: dict[str, np.ndarray], updates: int, rng: np.random.Generator) -> float:
    """Teach the reader of goals, everything else as it is; returns the mean loss of the last updates."""
    parameters = list(models.reader.parameters())
    optimizer = torch.optim.Adam(parameters, lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, updates), 2e-4)
    log = []
    for _ in tqdm(range(updates), desc="reader of goals", leave=False, disable=not sys.stderr.isatty()):
        pick = rng.integers(sequences["t"].shape[1], size=256)
        mb = {name: torch.from_numpy(column[:, pick]) for name, column in sequences.items()}
        loss = reader_loss(models, mb | {"memory": torch.zeros(len(pick), models.sizes["hidden_size"])})
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        schedule.step()
        log.append(loss.item())
    return float(np.mean(log[-20:]))


# evaluation and pictures

KNOWLEDGE = ("state", "history", "known")  # of the perfect predictors in `ceilings`


@torch.no_grad()
def predict(models: GoalModels, batch: dict[str, Tensor], with_goal: bool) -> Tensor:
    """(M, A) log-probabilities of actions, with the goal known in hindsight or hidden."""
    outs = []
    for rows in torch.arange(len(batch["action"])).split(4096):
        mb = {name: column[rows] for name, column in batch.items()}
        goal = models.flag(UNKNOWN).expand(len(rows), -1)
        if with_goal:
            goal = torch.where(mb["has_goal"][:, None], models.goals(models.space.encode(mb["goal_seen"])[0]), goal)
            goal = torch.where(mb["aimless"][:, None], models.flag(AIMLESS), goal)
        outs.append(models.moa(mb["seen"], mb["t"], mb["legal"], goal))
    return torch.cat(outs)


@torch.no_grad()
def draw_others(models: GoalModels, things: Things, states, row, focal, player, alive, goals, streams) -> np.ndarray:
    """(M, 1, N) what the others of focal[m], player (M, N-1), do in states[row[m]], given goals (M, N-1, G)."""
    game, (m, k) = things.game, np.nonzero(alive)
    at, who = row[m], player[m, k]
    seen, t = things.of_states(states, at, who), things.time(states[at, T])
    columns = tensors(device_of(models), seen, t, game.legal(states, trusted=True)[at, who], goals[m, k])
    parts = zip(*(column.split(8192) for column in columns), strict=True)
    probs = np.zeros((len(row), game.num_players, 1, game.num_actions), np.float32)
    probs[m, who, 0] = torch.cat([models.moa(*part).exp() for part in parts]).cpu().numpy()
    joint = np.full((len(row), 1, game.num_players), STAY)
    forest.draw_actions(probs, np.arange(len(row)), focal, alive[:, None] - 1, streams, joint)
    return joint


def evaluate(models: GoalModels, batch: dict[str, Tensor], ceiling: dict[str, np.ndarray]) -> dict[str, dict]:
    """Scores with the goal known and hidden, and the ceilings: over distinct steps, over moves and hunts apart, and
    (`_all`) over all steps; nan where there is nothing to count."""
    truth, distinct = batch["action"].numpy(), ~batch["repeat"].numpy()
    num_actions = batch["legal"].shape[1]
    hunts = truth >= FIRST_INTERACTION
    parts = {"": distinct, "_moves": distinct & ~hunts, "_hunts": distinct & hunts, "_all": distinct | True}

    def means(values: np.ndarray, name: str) -> dict[str, float]:
        return {name + part: values[rows].mean() if rows.any() else np.nan for part, rows in parts.items()}

    result = {}
    with np.errstate(invalid="ignore", divide="ignore"):
        for mode in ("known", "hidden"):
            logp = predict(models, batch, mode == "known").numpy()
            ties = np.random.default_rng(0).random(logp.shape)  # an aimless player's actions are all alike
            order = np.lexsort((ties, -logp), axis=1)
            pairs = truth[distinct] * num_actions + order[distinct, 0]
            confusion = np.bincount(pairs, minlength=num_actions**2).reshape(num_actions, num_actions)
            right, count, guessed = np.diag(confusion), confusion.sum(1), confusion.sum(0)
            result[mode] = {
                **means(order[:, 0] == truth, "top1"), **means((order[:, :3] == truth[:, None]).any(1), "top3"),
                **means(-logp[np.arange(len(truth)), truth], "ce"), "confusion": confusion, "count": count,
                "ratio": count / count.sum(), "precision": right / guessed, "recall": right / count,
                "f1": 2 * right / (count + guessed),
            }  # fmt: skip
        if ceiling:
            result["ceiling"] = {k: v for name in KNOWLEDGE for k, v in means(ceiling[name], name).items()}
            for name in ("state", "history"):  # who must guess the role cannot tell moves from hunts before
                del result["ceiling"][f"{name}_moves"], result["ceiling"][f"{name}_hunts"]
            hits = [ceiling["best"][distinct & (truth == a), a].sum() for a in range(num_actions)]
            result["ceiling"]["recall"] = np.array(hits) / count
    return result


def write_evaluation(stem: Path, result: dict[str, dict], names: tuple[str, ...]) -> None:
    """<stem>.csv: one row per mode and action; <stem>.npz: all numbers and confusion matrices."""
    best = result["ceiling"]["recall"] if "ceiling" in result else np.full(len(names), np.nan)
    with open(f"{stem}.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["goal", "action", "count", "ratio", "precision", "recall", "f1", "perfect_recall"])
        for mode in ("known", "hidden"):
            for a, name in enumerate(names):
                figures = [result[mode][key][a] for key in ("ratio", "precision", "recall", "f1")]
                writer.writerow([mode, name, result[mode]["count"][a], *(f"{x:.4f}" for x in (*figures, best[a]))])
    np.savez(f"{stem}.npz", **{f"{mode}_{key}": value for mode, part in result.items() for key, value in part.items()})


def draw_confusion(axis, confusion: np.ndarray, names: list[str], title: str) -> None:
    """confusion (A, A): steps with a true action (row) that were predicted as another (column)"""
    share, place = confusion / np.maximum(confusion.sum(1, keepdims=True), 1), np.arange(len(names))
    axis.imshow(share, vmin=0, vmax=1, cmap="Blues")
    for i, j in np.argwhere(confusion):
        colour = "w" if share[i, j] > 0.55 else "k"
        axis.text(j, i, f"{share[i, j]:.2f}", ha="center", va="center", size=7, color=colour)
    axis.set(xlabel="predicted", title=title)
    axis.set_xticks(place, names, rotation=90, size=8)
    axis.set_yticks(place, [f"{name} ({n})" for name, n in zip(names, confusion.sum(1), strict=True)], size=8)


def draw_predictions(path: Path, batch: dict[str, np.ndarray], rows: np.ndarray, names: tuple[str, ...]) -> None:
    """The confusion matrix of what was predicted (T, B, N, A) and done (T, B, N), where `rows` (T, B, N) holds."""
    confusion = np.zeros((len(names), len(names)), int)
    np.add.at(confusion, (batch["action"][rows], batch["predicted"][rows].argmax(1)), 1)
    figure = Figure((0.42 * len(names) + 2, 0.42 * len(names) + 1.6), layout="constrained")
    right = np.diag(confusion).sum() / max(1, confusion.sum())
    draw_confusion(figure.subplots(), confusion, list(names), f"opponent model: top-1 {right:.3f}")
    figure.savefig(path)


def draw_epoch(stem: Path, result: dict[str, dict], names: tuple[str, ...], history: list[dict[str, float]]) -> None:
    """Confusion, distribution and recall of this epoch's evaluation, and the loss curve so far."""
    names = [name.removeprefix("attack ") for name in names]
    size, place = max(3.6, 0.42 * len(names) + 1.2), np.arange(len(names))
    figure = Figure((2 * size + 0.8, size + 0.4), layout="constrained")
    for axis, mode in zip(figure.subplots(1, 2), ("known", "hidden"), strict=True):
        title = f"goal {mode}: top-1 {result[mode]['top1']:.3f}"
        draw_confusion(axis, result[mode]["confusion"], names, title)
    figure.axes[0].set_ylabel("true (steps)")
    figure.savefig(f"{stem}_confusion_matrix.png")

    counts = {"true": result["known"]["count"]}
    counts |= {f"predicted, goal {mode}": result[mode]["confusion"].sum(0) for mode in ("known", "hidden")}
    recalls = {f"goal {mode}": np.nan_to_num(result[mode]["recall"]) for mode in ("known", "hidden")}
    if "ceiling" in result:
        recalls["perfect predictor that knows the role"] = np.nan_to_num(result["ceiling"]["recall"])
    colours = {"true": "#aaaaaa", "perfect predictor that knows the role": "#aaaaaa"}
    for what, bars, label in (("class_distribution", counts, "steps"), ("per_class_recall", recalls, "recall")):
        figure = Figure((max(5.5, 0.6 * len(names) + 1.5), 3.2), layout="constrained")
        axis = figure.subplots()
        for k, (name, heights) in enumerate(bars.items()):
            colour = colours.get(name, "#4477aa" if name.endswith("known") else "#ee7733")
            axis.bar(place + (k - 1) * 0.27, heights, 0.27, label=name, color=colour)
        axis.set_xticks(place, names, rotation=45 if len(names) > 8 else 0, size=8)
        axis.set_ylabel(label)
        figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=8)
        figure.savefig(f"{stem}_{what}.png")

    figure = Figure((10.5, 3.0), layout="constrained")
    titles = {"ce": "opponent model: cross-entropy", "recon": "reconstruction (nats)", "kl": "KL (nats)"}
    for axis, (name, title) in zip(figure.subplots(1, 3), titles.items(), strict=True):
        columns = {"training": f"losses/train_{name}", "validation": f"losses/val_{name}"}
        columns |= {"validation, goal hidden": "moa/ce_hidden"} if name == "ce" else {}
        for label, column in columns.items():
            axis.plot([row["epoch"] for row in history], [row[column] for row in history], label=label)
        axis.set(xlabel="epoch", title=title)
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(stem.parent / "vae_loss_curve.png")


def draw_goal_map(path: Path, z: np.ndarray, told: np.ndarray, kind: np.ndarray, kinds: list[str], place: np.ndarray):
    """Goals z in two dimensions, by the kind hunted and by place (M, 2) from 0 to 1; told (M, K): the kind probe."""
    wide, second = np.linalg.svd(z - z.mean(0), full_matrices=False)[2][:2] @ (z - z.mean(0)).T
    across, meaning = second, "second widest direction of z"
    if len(kinds) == 2:
        across, meaning = told[:, 1] - told[:, 0], f"log-odds of the linear probe: {kinds[1]} over {kinds[0]}"
    figure = Figure((10.5, 4.8), layout="constrained")
    by_kind, by_place = figure.subplots(1, 2)
    for k in np.unique(kind):
        label = f"{kinds[k]} ({(kind == k).sum()})"
        by_kind.scatter(across[kind == k], wide[kind == k], s=6, alpha=0.5, label=label, color=f"C{k}")
    by_kind.legend(frameon=False, markerscale=3, fontsize=8)
    by_kind.set(title="goals of validation hunts, by what is hunted", xlabel=meaning, ylabel="widest direction of z")
    by_place.scatter(wide, second, s=6, alpha=0.7, c=np.insert(place, 1, 0.3, axis=1))
    by_place.set(title="by where: redder = lower row, bluer = more to the right", xticks=[], yticks=[])
    by_place.set(xlabel="widest direction of z", ylabel="second widest")
    figure.savefig(path)


def fit_probe(probe: nn.Linear, z: Tensor, label: Tensor) -> None:
    """Multinomial logistic regression z -> label."""
    nn.init.zeros_(probe.weight)
    nn.init.zeros_(probe.bias)
    optimizer = torch.optim.LBFGS(probe.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(probe(z), label) + 1e-5 * probe.weight.pow(2).sum()
        value.backward()
        return value

    optimizer.step(loss)


# checkpoints

LARGEST = {  # sizes above these are no checkpoint of ours
    "z_size": 1024, "hidden_size": 8192, "vae_hidden_size": 8192, "num_players": 1024, "num_actions": 4096,
    "num_kinds": 4096, "height": 30_000, "width": 30_000, "obs_size": 10**7, "num_ids": 10**7, "vector_size": 10**6,
}  # fmt: skip


def load_checkpoint(folder: str | Path, spec: EnvSpec | None = None, obs_is_state: bool = False):
    """Trained GoalModels (in eval mode) and their spec dict. With `spec` of the env at hand, refuses any other's."""
    folder = Path(folder)
    found = read_spec(folder, "goal_models", spec, obs_is_state)
    sizes = check_sizes(folder, found.get("sizes"), LARGEST)
    if sizes.get("goal_mode") not in ("learned", "oracle", "none"):
        raise ConfigError(f"'{folder / 'spec.json'}' has no usable goal_mode: {str(sizes.get('goal_mode'))[:50]!r}")
    return load_weights(lambda: GoalModels(sizes), folder / "weights.safetensors"), found


def find_checkpoint(out_dir: str | Path, spec: EnvSpec, obs_is_state: bool = False, goal_mode: str = "learned"):
    """The newest checkpoint under `out_dir` that fits this env and goal mode, or None."""

    def fits(folder: Path) -> bool:
        return read_spec(folder, "goal_models", spec, obs_is_state)["sizes"]["goal_mode"] == goal_mode

    return newest(Path(out_dir).glob("vae__*/dim*"), fits)


def prepare(folder: str, env_id: str, goal_mode: str, seed: int) -> tuple[Path, GoalModels]:
    """The checkpoint asked for, the newest that fits, or one made now: its folder and networks."""
    spec = envs.spec(env_id)
    found = folder or find_checkpoint("vae_ckpts", spec, goal_mode=goal_mode)
    if not found:
        print(f"no goal models for {env_id} in vae_ckpts/: making them first (pretrain_vae.py, a minute)", flush=True)
        found = train(Args(env_id=env_id, seed=seed, goal_mode=goal_mode, pictures=False))
    models, about = load_checkpoint(found, spec)
    if about["sizes"]["goal_mode"] != goal_mode:
        modes = f"goal mode {about['sizes']['goal_mode']}, this run uses {goal_mode}"
        raise ConfigError(f"checkpoint '{found}' was trained with {modes}")
    return Path(found), models


def models_for(run: Run, args: Any) -> GoalModels:
    """Of a run that begins: as it says; of one that goes on: the same networks, to be filled from its checkpoint."""
    if run.resumed:
        return GoalModels(run.spec["model_sizes"])
    wanted = str(run.facts.get("goal_models", args.vae_ckpt))  # of a run that was killed before its first save
    folder, models = prepare(wanted, args.env_id, args.goal_mode, args.seed)
    run.record(goal_models=str(folder.resolve()))
    return models


# training


def probe_goals(models: GoalModels, data: dict[str, Any], seen: Tensor, in_val: np.ndarray, kinds: list[str], picture):
    """What the goal space means: linear probes for kind and cell of the prey on the goals of hunts, fitted on training
    episodes; their accuracy on validation hunts, of which a map is drawn to the path `picture`, if any."""
    is_planes = models.sizes["num_ids"] > 0
    hunted = np.unique(data["goal_row"][(data["goal_row"] >= 0) & (data["hunt"] > 0)])
    kind = torch.from_numpy(data["action"][hunted] - FIRST_INTERACTION - (not is_planes))
    cell = torch.zeros_like(kind)
    if is_planes:
        cell = torch.from_numpy(data["obs"][hunted][..., 0]).flatten(1).argmax(1)
    where = cell.numpy() if is_planes else data["hunt"][hunted]
    same_hunt = np.column_stack([data["episode"][hunted], data["player"][hunted], where])
    first = np.unique(same_hunt, axis=0, return_index=True)[1]  # one row per hunt, however long it waits
    is_val, kind, cell = torch.from_numpy(in_val[hunted[first]]), kind[first], cell[first]
    z = models.encode(seen[hunted[first]])
    scores, kind_probe = {}, None
    for name, label in (("kind", kind), ("cell", cell)):
        scores[f"goal/probe_{name}"] = np.nan
        if len(label[~is_val].unique()) > 1 and is_val.any():
            probe = nn.Linear(z.shape[1], int(label.max()) + 1)
            fit_probe(probe, z[~is_val], label[~is_val])
            scores[f"goal/probe_{name}"] = (probe(z[is_val]).argmax(1) == label[is_val]).float().mean().item()
            kind_probe = probe if name == "kind" else kind_probe
    words = {"kind": "what was taken" if is_planes else "which enemy was attacked", "cell": "on which cell"}
    told = [f"{word} {scores[f'goal/probe_{name}']:.4f}" for name, word in words.items()]
    told = ", ".join(text for text in told if not text.endswith("nan")) or "there is one kind only"
    print(f"[GOAL] linear probes on z, {is_val.sum()} validation interactions: {told}")
    if picture and kind_probe and is_val.sum() > 2:
        height, width = models.sizes["height"], models.sizes["width"]
        place = np.stack(np.divmod(cell[is_val].numpy(), width), 1) / np.maximum([height - 1, width - 1], 1)
        kind_told = kind_probe(z[is_val]).detach().numpy()
        draw_goal_map(picture, z[is_val].numpy(), kind_told, kind[is_val].numpy(), kinds, place)
    return scores


def read_or_play(args: Args, spec: EnvSpec, game: GridGame | None, seed: np.random.SeedSequence) -> dict[str, Any]:
    """The recorded play asked for, or new play."""
    if args.data:
        return load_play(args.data, spec, args.obs_is_state)
    goal_steps = 0 if game else args.goal_steps
    return collect_play(spec, game, args.lineups, args.num_steps, seed, args.obs_is_state, goal_steps)


def as_columns(models: GoalModels, args: Args, data: dict[str, Any], game: GridGame | None, horizon: int):
    """Recorded play as tensors, all rows: what is seen, time, legal, action, and what hindsight says of the goal."""
    columns = {name: torch.from_numpy(data[name]) for name in ("legal", "action", "repeat")}
    if game:
        things = Things(game)
        columns |= {"seen": torch.from_numpy(things(data["obs"])), "t": torch.from_numpy(things.time(data["t"]))}
        columns |= {"obs": torch.from_numpy(data["obs"]), "aimless": torch.from_numpy(data["role"] == 0)}
    else:
        obs = (torch.from_numpy(data["obs"]) - models.mean) / models.std
        who = F.one_hot(torch.from_numpy(data["player"]), models.sizes["num_players"]).float()
        columns |= {"seen": torch.cat([obs, who], 1) if args.obs_is_state else obs, "obs": obs}
        columns |= {"t": torch.from_numpy(data["t"] / horizon).float(), "aimless": torch.zeros(len(obs), dtype=bool)}
    columns["goal_row"] = torch.from_numpy(data["goal_row"])
    if not models.z_size:  # without goals nothing is known of any
        columns |= {"goal_row": torch.full_like(columns["goal_row"], -1), "aimless": columns["aimless"] & False}
    return columns


def rows_of(columns: dict[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """Some rows of `as_columns`, each with what was seen in its goal state."""
    mb = {name: column[rows] for name, column in columns.items() if name != "obs"}
    goal_row = mb.pop("goal_row")
    at = goal_row.clamp_min(0)
    return mb | {"has_goal": goal_row >= 0, "goal_seen": columns["seen"][at], "goal_obs": columns["obs"][at]}


def train(args: Args) -> Path:
    """The whole experiment; returns the folder of the checkpoint."""
    check_ranges(args)
    torch.set_num_threads(args.torch_threads)
    start = time.perf_counter(), time.process_time()

    # seeding
    play_seed, split_seed, torch_seed, reader_seed = np.random.SeedSequence(args.seed).spawn(4)
    torch.manual_seed(int(torch_seed.generate_state(1)[0]))

    # env setup
    spec = envs.spec(args.env_id)
    game = envs.game(args.env_id) if args.env_id in GridGame.registry else None
    if game and args.obs_is_state:
        raise ConfigError(f"--obs-is-state is for battles; in {args.env_id} everybody sees the whole board")
    if not game and args.goal_mode == "oracle":
        raise ConfigError(f"--goal-mode oracle is for grid games: nothing in {args.env_id} has a name to head for")
    kinds = list(game.kinds) if game else [name.split(" / ")[0] for name in spec.action_names[FIRST_INTERACTION + 1 :]]

    # data
    data = read_or_play(args, spec, game, play_seed)
    folder = fresh_folder(args.out_dir, "vae") / f"dim{args.dim}"
    folder.mkdir()
    if not args.data:
        name = args.env_id.replace(":", "-").replace("/", "-")
        save_data(Path(args.out_dir) / "data" / f"{name}__{folder.parent.name}.npz", data)
    for column, names in (("role", [*role_names(game), "unknown"]), ("hunt", ["nothing", *kinds])):
        counts = zip(*np.unique(data[column], return_counts=True), strict=True)
        print(f"[DATA] steps by {column}: {', '.join(f'{names[k]} {n}' for k, n in counts)}")
    in_val = split_episodes(data["episode"], args.val_share, split_seed)
    train_rows, val_rows = np.flatnonzero(~in_val & ~data["repeat"]), np.flatnonzero(in_val)
    print(
        f"[DATA] {len(in_val)} steps, {data['repeat'].mean():.1%} of them mere repeats of the step before; training on"
        f" {len(train_rows)} distinct ones, validation on {len(val_rows)} of other episodes"
    )
    ceiling = ceilings(data, game) if game and (data["role"] >= 0).all() else {}
    ceiling = {name: values[val_rows] for name, values in ceiling.items()}

    # networks
    sizes = sizes_of(args, spec, game, kinds)
    models = GoalModels(sizes)
    if not game:
        models.mean.copy_(torch.from_numpy(data["obs"][train_rows].mean(0)))
        models.std.copy_(torch.from_numpy(data["obs"][train_rows].std(0)).clamp(min=0.05))
    columns = as_columns(models, args, data, game, spec.horizon)
    train_rows, val_batch = torch.from_numpy(train_rows), rows_of(columns, torch.from_numpy(val_rows))
    parameters = [*models.space.parameters(), *models.moa.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=args.learning_rate, weight_decay=args.weight_decay)
    updates = args.epochs * -(-len(train_rows) // args.batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates, args.learning_rate / 10)

    print("[INFO] MOA: the model of the others' actions (top1: share named right); VAE: the space of their goals")
    history: list[dict[str, float]] = []
    for epoch in tqdm(range(1, args.epochs + 1), desc="epochs", disable=not sys.stderr.isatty()):
        # update
        models.train()
        sums = dict.fromkeys(("ce", "recon", "kl"), 0.0)
        for mb_rows in train_rows[torch.randperm(len(train_rows))].split(args.batch_size):
            parts = losses(models, rows_of(columns, mb_rows), args.loss, args.hide_prob)
            loss = parts["ce"] + args.recon_weight * parts["recon"] + args.alpha * parts["kl"]
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            sums = {name: sums[name] + parts[name].item() * len(mb_rows) / len(train_rows) for name in sums}
        if not np.isfinite(sum(sums.values())):
            raise FloatingPointError(f"a loss is not finite in epoch {epoch}: {sums}; try a smaller --learning-rate")

        # evaluation
        models.eval()
        result = evaluate(models, val_batch, ceiling)
        val = dict.fromkeys(sums, 0.0)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            distinct = (~val_batch["repeat"]).nonzero()[:, 0]
            for mb_rows in distinct.split(4096):
                parts = losses(models, {name: column[mb_rows] for name, column in val_batch.items()}, args.loss)
                val = {name: val[name] + parts[name].item() * len(mb_rows) / len(distinct) for name in val}
        means = models.encode(val_batch["goal_seen"][distinct][val_batch["has_goal"][distinct]])
        active = int((means.var(0) > 0.01).sum()) if len(means) > 1 else 0
        collapsed = args.goal_mode == "learned" and (active == 0 or val["kl"] < 0.1)
        known, hidden, top = result["known"], result["hidden"], result.get("ceiling")
        print(describe_epoch(epoch, result))
        figures = f"reconstruction {val['recon']:.3f}, KL {val['kl']:.3f}, active dimensions {active}"
        print(f"[VAE] epoch {epoch}: {figures} of {sizes['z_size']}")
        if collapsed:
            print("[WARN] posterior collapse: the goals say (almost) nothing; try a smaller --alpha")

        # logging
        row = dict(zip(("epoch", "wall_time", "cpu_time"), (epoch, *since(start)), strict=True))
        row |= {f"losses/train_{name}": value for name, value in sums.items()}
        row |= {f"losses/val_{name}": value for name, value in val.items()}
        for mode, suffix in ((known, ""), (hidden, "_hidden")):
            row |= {f"moa/{k}{suffix}": v for k, v in mode.items() if k.startswith(("top1", "top3", "ce"))}
            row |= {f"moa/recall_action{a}{suffix}": recall for a, recall in enumerate(mode["recall"])}
        row |= {f"moa/ceiling_{name}": value for name, value in (top or {}).items() if name != "recall"}
        row |= {"goal/kl": val["kl"], "goal/active_dims": active, "goal/collapsed": int(collapsed)}
        history.append({name: round(float(value), 6) for name, value in row.items()} | {"epoch": epoch})
        stem = folder / f"moa_eval_epoch{epoch}"
        write_evaluation(stem, result, spec.action_names)
        if args.pictures:
            draw_epoch(stem, result, spec.action_names, history)
    write_metrics(folder / "metrics.csv", history)

    # the reader of goals, and what the goals mean
    scores = dict(history[-1])
    if args.goal_mode == "learned":
        picture = folder / "goal_map.png" if args.pictures else None
        scores |= probe_goals(models, data, columns["seen"], in_val, kinds, picture)
    with torch.no_grad():
        models.moa.goal.weight[:, HABIT] = models.moa.goal.weight[:, UNKNOWN]  # nobody was met yet
    if args.goal_mode != "none" and game:
        rows = play_rows(models, data, Things(game))
        sequences = sequences_of(rows, data, spec.num_actions, length=16)
        scores["goal/reader_loss"] = train_reader(
            models, sequences, args.reader_updates, np.random.default_rng(reader_seed)
        )
        print(f"[GOAL] reader of goals: loss {scores['goal/reader_loss']:.3f} after {args.reader_updates} minibatches")

    # checkpoint
    scores = {k: v if np.isfinite(v) else None for k, v in scores.items() if not k.endswith("_time")}
    about = describe("goal_models", __file__, args, spec, args.obs_is_state)
    save_checkpoint(folder, models, about | {"loss": args.loss, "sizes": sizes, "scores": scores})
    if top:
        print(
            f"[DONE] distinct steps: top1 {known['top1']:.4f} with the goal in hindsight (a perfect predictor that"
            f" knows the role, not which item: {top['known']:.4f}); {hidden['top1']:.4f} without (a perfect predictor"
            f" from the state alone: {top['state']:.4f}, from the player's history, too: {top['history']:.4f})"
        )
    print("[DONE] {:.0f} s ({:.0f} s of one core); checkpoint {}".format(*since(start), folder))
    return folder


def describe_epoch(epoch: int, result: dict[str, dict]) -> str:
    """The console line of an epoch: scores, and what the best predictor gets that knows a player's role but not which
    item it heads for (less than the goal in hindsight tells), or the state alone."""
    known, hidden, top = result["known"], result["hidden"], result.get("ceiling")
    knows = {"known": "role", "known_moves": "role", "state": "state"}
    best = {name: f" (best by {what} alone {top[name]:.4f})" if top else "" for name, what in knows.items()}
    return (
        f"[MOA] epoch {epoch}: top1={known['top1']:.4f}{best['known']}, top3={known['top3']:.4f}, ce={known['ce']:.4f};"
        f" moves {known['top1_moves']:.4f}{best['known_moves']}, interactions {known['top1_hunts']:.4f};"
        f" goal hidden: top1={hidden['top1']:.4f}{best['state']},"
        f" moves {hidden['top1_moves']:.4f}, interactions {hidden['top1_hunts']:.4f}"
    )


if __name__ == "__main__":
    sys.exit(main(Args, train))
