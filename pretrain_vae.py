"""Goals and the opponent model, offline: a goal VAE and pi(action | observation, t, goal) from rule-based play.

Where a player is heading is known in hindsight: the state in which its hunt happened. The encoder turns that state into
a goal vector z, the decoder draws the state again from z (Bernoulli for planes), and the opponent model (MOA) predicts
the player's actions on the way there from its own observation, the step and z; z is hidden at random, so that the model
also works without a goal. Only steps of players on the board are stored, learned from or predicted.

    python pretrain_vae.py                                      # msh-4h1s-4x4, about two minutes on one core
    python pretrain_vae.py --lineups mix --env-id msh-4h1s-8x8  # four players, each ns or nh for an episode
    python pretrain_vae.py --env-id smac-8m --obs-is-state      # battles: Gaussian likelihood, no ceiling

Each epoch prints `[MOA] epoch k: top1=...` beside the ceiling: what a perfect predictor of these rules reaches, since
they break ties at random. Other scripts use `load_checkpoint`, `find_checkpoint` and `train`; docs/offline_models.md.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import os
import sys
import time
import zipfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm

import envs
from envs import ConfigError
from envs.grid import BLOCK, FIRST_INTERACTION, ITEM, STAY, EnvSpec, GridGame
from envs.players import RANDOM, RulePlayers

EPISODES = 128  # played at a time while data is made
BATTLE_TEAMS = ("nearest", "focus", "random")
IMPOSSIBLE = -1e9  # logit of an illegal action
IGNORED_SETTINGS = ("strict", "start_window", "start_window_prob")  # of a game: they change no rule


@dataclass
class Args:
    # run
    seed: int = 1
    """one seed, split into generators for envs, players, the split, the network and its batches"""
    out_dir: str = "vae_ckpts"
    """the checkpoint goes to <out-dir>/vae__<unix time>/dim<D>/"""
    data: str = ""
    """an .npz of an earlier run to train on; empty: play anew and save it under <out-dir>/data/"""
    pictures: bool = True
    """draw the pictures of each epoch"""
    torch_threads: int = 1
    """threads of torch; more is slower whenever anything else runs"""

    # env
    env_id: str = "msh-4h1s-4x4"
    """a grid game or a battle"""
    lineups: tuple[str, ...] = ()
    """who plays: each a comma list of roles, one per seat or one for all; equal shares of the steps;
    empty: `mix`, one of each (`ns,nh,mix,random`) and `random`; battles: `nearest`, `focus`, `random`"""
    num_steps: int = 100_000
    """steps of players on the board to collect"""
    obs_is_state: bool = False
    """battles: learn from the state, the same for all agents, instead of each agent's observation"""
    goal_steps: int = 5
    """battles: the goal of a step is what the agent sees this many steps later (or last)"""
    val_share: float = 0.1
    """share of the episodes kept for validation"""

    # algorithm
    dim: Literal[8, 16, 32] = 16
    """size of a goal vector"""
    loss: Literal["both", "moa", "recon"] = "both"
    """what shapes the goal space beside alpha KL: cross-entropy of actions, reconstruction, or both;
    the part left out still trains its own network on goals it cannot change"""
    alpha: float = 0.01
    """weight of KL(q(z | goal state) || N(0, 1))"""
    recon_weight: float = 0.03
    """weight of the reconstruction, summed over the planes"""
    goal_dropout: float = 0.15
    """how often the goal is hidden from the opponent model"""
    hidden: int = 256
    """width of all layers"""
    epochs: int = 10
    """passes over the training steps"""
    batch_size: int = 512
    """steps per update"""
    learning_rate: float = 1e-3
    """of Adam, annealed to 0 along a cosine"""
    weight_decay: float = 1e-4
    """of AdamW"""


# ---------------------------------------------------------------------------------------------------------------------
# network
# ---------------------------------------------------------------------------------------------------------------------


def mlp(*sizes: int) -> nn.Sequential:
    layers = []
    for size_in, size_out in pairwise(sizes):
        layers += [nn.Linear(size_in, size_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class GoalVAE(nn.Module):
    """Encoder q(z | goal state), decoder, opponent model pi(a | observation, t, z), and linear probes on z.

    Observations are planes (B, H, W, C) of 0/1 with the own plane first, or vectors (B, F). Planes are looked at from
    the player's own cell (everything shifted so that it stands in the middle) beside its absolute place.
    """

    def __init__(self, sizes: dict[str, Any]):
        super().__init__()
        self.sizes = dict(sizes)
        obs_shape, dim, hidden = tuple(sizes["obs_shape"]), sizes["dim"], sizes["hidden"]
        self.is_planes, flat = len(obs_shape) == 3, int(np.prod(obs_shape))
        if self.is_planes:
            height, width, planes = obs_shape
            rows, columns = np.divmod(np.arange(height * width), width)
            reach_r, reach_c = np.divmod(np.arange((2 * height - 1) * (2 * width - 1)), 2 * width - 1)
            r = rows[:, None] + reach_r - (height - 1)  # (own cell, seen cell): row and column that is seen there
            c = columns[:, None] + reach_c - (width - 1)
            inside = (r >= 0) & (r < height) & (c >= 0) & (c < width)
            seen = torch.from_numpy(np.where(inside, r * width + c, height * width))  # the last index: off the board
            self.register_buffer("seen", seen, persistent=False)
            features = seen.shape[1] * planes + height * width
        else:
            self.register_buffer("mean", torch.zeros(flat))
            self.register_buffer("std", torch.ones(flat))
            features = flat
        num_ids = sizes["num_players"] if sizes["obs_is_state"] else 0  # the state alone does not say who acts
        self.encoder = mlp(features, hidden, hidden, 2 * dim)
        self.decoder = mlp(dim, hidden, hidden, flat)
        self.step = nn.Embedding(sizes["horizon"] + 1, 32)
        self.moa = mlp(features + dim + 32 + num_ids, hidden, hidden, sizes["num_actions"])
        self.hidden_goal = nn.Parameter(torch.randn(dim))  # stands for "nothing is known of the goal"
        self.no_goal = nn.Parameter(torch.randn(dim))  # stands for "it will not hunt"
        self.kind_probe = nn.Linear(dim, sizes["num_kinds"])  # fitted after training: which kind is hunted
        self.cell_probe = nn.Linear(dim, sizes["num_cells"])  # ... and in which cell

    def features(self, obs: torch.Tensor) -> torch.Tensor:
        """(B, *obs_shape) -> (B, features)"""
        if not self.is_planes:
            return (obs - self.mean) / self.std
        planes = obs.float().flatten(1, 2)  # (B, H*W, C)
        own = planes[:, :, 0].argmax(1)
        others = torch.cat([planes[:, :, 1:], torch.zeros_like(planes[:, :, :1])], 2)
        off_board = F.one_hot(torch.tensor([others.shape[2] - 1]), others.shape[2]).float().expand(len(obs), 1, -1)
        padded = torch.cat([others, off_board], 1)  # (B, H*W + 1, C): last plane = off the board
        seen = self.seen[own].unsqueeze(2).expand(-1, -1, padded.shape[2])
        return torch.cat([padded.gather(1, seen).flatten(1), planes[:, :, 0]], 1)

    def encode(self, goal_obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Goal states (B, *obs_shape) -> mean and log variance of z, (B, D) each."""
        mean, log_var = self.encoder(self.features(goal_obs)).chunk(2, 1)
        return mean, log_var.clamp(-8.0, 4.0)

    def reconstruction(self, z: torch.Tensor, goal_obs: torch.Tensor) -> torch.Tensor:
        """(B,) nats to describe the goal state given z: Bernoulli for planes, Gaussian for vectors."""
        out = self.decoder(z)
        if self.is_planes:
            return F.binary_cross_entropy_with_logits(out, goal_obs.float().flatten(1), reduction="none").sum(1)
        return 0.5 * (out - (goal_obs - self.mean) / self.std).pow(2).sum(1)

    def logits(
        self,
        obs: torch.Tensor,
        t: torch.Tensor,
        legal: torch.Tensor,
        z: torch.Tensor | None = None,
        player: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Opponent model: (B, A) logits, illegal actions masked; z (B, D), or None where the goal is unknown."""
        z = self.hidden_goal.expand(len(obs), -1) if z is None else z
        parts = [self.features(obs), z, self.step(t.long().clamp(0, self.sizes["horizon"]))]
        if self.sizes["obs_is_state"]:
            parts.append(F.one_hot(player.long(), self.sizes["num_players"]).float())
        return self.moa(torch.cat(parts, 1)).masked_fill(~legal, IMPOSSIBLE)


def goal_candidates(obs: np.ndarray, num_players: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The goal states a player could be heading for: what it would see standing on each item of the board.

    obs (B, H, W, C) -> candidates (K, H, W, C), row (K,) of obs they belong to, kind (K,) of the item.
    """
    row, r, c, kind = np.nonzero(obs[..., num_players + 1 :])
    candidates = obs[row].copy()
    candidates[..., 0] = 0
    candidates[np.arange(len(row)), r, c, 0] = 1
    return candidates, row, kind


# ---------------------------------------------------------------------------------------------------------------------
# data: play of rule-based line-ups
# ---------------------------------------------------------------------------------------------------------------------

# one row per step of a player on the board; the rows of one player in one episode follow each other in time
COLUMNS = {
    "obs": None,  # (M, *obs_shape) what the player saw
    "legal": None,  # (M, A) bool
    "action": np.int64,  # (M,)
    "t": np.int64,  # (M,)
    "episode": np.int64,  # (M,)
    "player": np.int64,  # (M,)
    "role": np.int64,  # (M,) rule that played (index into `roles`), -1 unknown
    "hunt": np.int64,  # (M,) later hunt: 1 + kind, 0 none
    "goal_row": np.int64,  # (M,) row whose obs is the state the player was heading for, -1 none
    "repeat": np.bool_,  # (M,) same player, observation and action as in the row before: not trained or judged on
}


def parse_lineups(texts: tuple[str, ...], spec: EnvSpec, game: GridGame | None) -> list[tuple[str, ...]]:
    if not texts:
        texts = BATTLE_TEAMS
        if game:
            some = [*game.seekers, "mix", "random"] * spec.num_players
            texts = ("mix", ",".join(some[: spec.num_players]), "random")
    lineups = []
    for text in texts:
        roles = tuple(text.split(","))
        if game is None and len(set(roles)) > 1:
            raise ConfigError(f"line-up '{text}': the agents of a battle play as one team, so give one name")
        if len(roles) not in (1, spec.num_players):
            raise ConfigError(f"line-up '{text}' has {len(roles)} roles; {spec.env_id} needs 1 or {spec.num_players}")
        lineups.append(roles * spec.num_players if len(roles) == 1 else roles)
    return lineups


def play_episodes(env, game: GridGame | None, lineup: tuple[str, ...], seed: int, args: Args) -> dict[str, np.ndarray]:
    """One full episode in each row of `env`, as data columns."""
    env.reset(seed)
    if game:
        players = RulePlayers(game, lineup, env.num_envs, seed)
    else:
        from envs.battles.teams import make_team

        team = make_team(lineup[0], env, seed)
    over = np.zeros(env.num_envs, bool)
    steps = []
    while not over.all():
        actions = players.act(env.obs, env.legal, env.t) if game else team().copy()
        row, player = np.nonzero(env.alive & ~over[:, None])  # nobody who left, no second episode
        seen = env.state[row] if args.obs_is_state else env.obs[row, player]
        step = {"obs": seen, "legal": env.legal[row, player], "action": actions[row, player], "t": env.t[row]}
        step |= {"episode": row, "player": player, "role": np.full(len(row), -1)}
        if game:
            step["role"] = np.where(players.codes >= RANDOM, players.codes, players.drawn)[row, player] - RANDOM
        _, _, _, _, info = env.step(actions)
        step["taken"] = info["taken"][row, player].astype(np.int64) if game else np.zeros(len(row), np.int64)
        steps.append({name: array.copy() for name, array in step.items()})
        over |= info["done"]
    data = {name: np.concatenate([step[name] for step in steps]) for name in steps[0]}
    data["t"] = data["t"].astype(np.int64)
    order = np.lexsort((data["t"], data["player"], data["episode"]))
    data = {name: array[order] for name, array in data.items()}
    add_hindsight(data, args.goal_steps if game is None else 0)
    return data


def add_hindsight(data: dict[str, np.ndarray], goal_steps: int) -> None:
    """Fill hunt, goal_row and repeat, seeing the whole episode; uses `taken` up.

    The goal is the state of the player's next successful hunt, or of its next try if none succeeds (waiting for a
    partner on a stag is heading for that stag); in a battle (goal_steps > 0) what it sees goal_steps later.
    """
    num, taken = len(data["action"]), data.pop("taken")
    data["hunt"], data["goal_row"] = np.zeros(num, np.int64), np.full(num, -1)
    same = (np.diff(data["episode"]) == 0) & (np.diff(data["player"]) == 0)  # row k + 1 continues row k
    data["repeat"] = np.zeros(num, bool)
    stays = (data["obs"][1:] == data["obs"][:-1]).reshape(num - 1, -1).all(1)
    data["repeat"][1:] = same & stays & (data["action"][1:] == data["action"][:-1])
    last = np.append(np.where(same, num, np.arange(num - 1)), num - 1)
    last = np.minimum.accumulate(last[::-1])[::-1]  # last row of this player's episode
    if goal_steps:
        data["goal_row"] = np.minimum(np.arange(num) + goal_steps, last)
        data["hunt"] = np.maximum(data["action"][data["goal_row"]] - FIRST_INTERACTION, 0)
        return
    for wanted in (data["action"] >= FIRST_INTERACTION, taken > 0):  # a success overrules a try
        ahead = np.minimum.accumulate(np.where(wanted, np.arange(num), num)[::-1])[::-1]
        data["goal_row"] = np.where(ahead <= last, ahead, data["goal_row"])
    found = data["goal_row"] >= 0
    data["hunt"][found] = data["action"][data["goal_row"][found]] - FIRST_INTERACTION + 1


def collect(args: Args, spec: EnvSpec, game: GridGame | None, seeds: np.random.SeedSequence) -> dict[str, Any]:
    """Play every line-up until it has given its share of `num_steps`; seats rotate so that none is special."""
    lineups = parse_lineups(args.lineups, spec, game)
    share = -(-args.num_steps // len(lineups))
    parts, first_row, first_episode, draws = [], 0, 0, np.random.default_rng(seeds)
    env = envs.make(args.env_id, num_envs=max(1, min(EPISODES, share // spec.num_players)))
    print(f"[DATA] {args.env_id}: playing {args.num_steps} steps of {len(lineups)} line-ups")
    for lineup in lineups:
        count, turn, episodes = 0, 0, 0
        while count < share:
            seats = lineup[turn % len(lineup) :] + lineup[: turn % len(lineup)]
            part = play_episodes(env, game, seats, int(draws.integers(2**31)), args)
            part["goal_row"][part["goal_row"] >= 0] += first_row
            part["episode"] += first_episode
            first_row, first_episode = first_row + len(part["action"]), first_episode + env.num_envs
            count, turn, episodes = count + len(part["action"]), turn + 1, episodes + env.num_envs
            parts.append(part)
        print(f"[DATA]   {','.join(lineup)}: {count} steps of {episodes} episodes")
    env.close()
    data = {name: np.concatenate([part[name] for part in parts]) for name in COLUMNS}
    roles = ["random", "fix", *game.seekers] if game else []
    return data | {"meta": {"kind": "play", "roles": roles, "obs_is_state": args.obs_is_state, **game_part(spec)}}


def game_part(spec: EnvSpec) -> dict[str, Any]:
    """The part of a spec that must be equal wherever data or a checkpoint is used."""
    config = {name: value for name, value in spec.config.items() if name not in IGNORED_SETTINGS}
    part = {
        "env_id": spec.env_id, "obs_shape": spec.obs_shape, "state_shape": spec.state_shape, "planes": spec.plane_names,
        "action_names": spec.action_names, "num_players": spec.num_players, "config": config,
    }  # fmt: skip
    return json.loads(json.dumps(part))


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def save_data(path: Path, data: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.npz")
    arrays = {name: data[name] if COLUMNS[name] is not np.int64 else data[name].astype(np.int32) for name in COLUMNS}
    np.savez_compressed(temporary, meta=np.array(json.dumps(data["meta"])), **arrays)
    temporary.replace(path)


def load_data(path: str | Path, spec: EnvSpec, obs_is_state: bool = False) -> dict[str, Any]:
    """Read and check a data file; ConfigError in one sentence if it cannot be used here."""
    try:
        with np.load(path, allow_pickle=False) as file:
            meta = json.loads(str(file["meta"]))
            data = {name: file[name].astype(dtype) if dtype else file[name] for name, dtype in COLUMNS.items()}
    except FileNotFoundError:
        raise ConfigError(f"data file '{path}' does not exist") from None
    except (OSError, ValueError, LookupError, EOFError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise ConfigError(f"data file '{path}' cannot be read: {one_line(error)}") from None
    if not isinstance(meta, dict) or meta.get("kind") != "play":
        raise ConfigError(f"data file '{path}' is no data of pretrain_vae.py")
    check_game(f"data file '{path}'", meta, spec, obs_is_state)
    num, shape = len(data["action"]), spec.state_shape if obs_is_state else spec.obs_shape
    fits = data["obs"].shape == (num, *shape) and data["legal"].shape == (num, spec.num_actions)
    fits &= data["legal"].dtype == bool and data["obs"].dtype.kind in "uf" and isinstance(meta.get("roles"), list)
    fits &= all(data[name].shape == (num,) for name in COLUMNS if name not in ("obs", "legal"))
    if not fits or num == 0:
        raise ConfigError(f"data file '{path}' is damaged: its columns do not fit together")
    limits = {"action": (0, spec.num_actions), "t": (0, spec.horizon + 1), "player": (0, spec.num_players)}
    limits |= {"goal_row": (-1, num), "role": (-1, max(len(meta["roles"]), 1)), "hunt": (0, spec.num_actions)}
    for name, (low, high) in limits.items():
        if data[name].min() < low or data[name].max() >= high:
            raise ConfigError(f"data file '{path}' is damaged: column '{name}' has values outside {low}..{high - 1}")
    if not np.isfinite(data["obs"]).all() or not data["legal"][np.arange(num), data["action"]].all():
        raise ConfigError(f"data file '{path}' is damaged: it has illegal actions or numbers that are not finite")
    return data | {"meta": meta}


# ---------------------------------------------------------------------------------------------------------------------
# the ceiling: what the rules' own random tie-breaking leaves predictable
# ---------------------------------------------------------------------------------------------------------------------


def board_codes(game: GridGame, obs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Planes (M, H, W, C) -> codes (M, H*W) of what is in each cell (as in a state), own cell (M,)."""
    planes = obs.reshape(len(obs), -1, obs.shape[-1])
    codes = planes[:, :, game.num_players :].astype(np.int64) @ np.arange(1, 2 + len(game.kinds))
    return codes, planes[:, :, 0].argmax(1)


def distances(game: GridGame, codes: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """(M, H*W) steps around blocks from each cell to the nearest one with the code wanted (M,); H*W + 1: no way."""
    far = np.int16(codes.shape[1] + 1)
    distance = np.where(codes == wanted[:, None], np.int16(0), far)
    while True:
        nearer = np.where(codes == BLOCK, far, np.int16(1) + distance[:, game.grid.neighbours].min(2))
        nearer = np.minimum(distance, nearer)
        if (nearer == distance).all():
            return distance
        distance = nearer


def rule_probabilities(game: GridGame, role: str, obs: np.ndarray, legal: np.ndarray) -> np.ndarray:
    """(M, A) exact action probabilities of a rule-based player, as envs/players.py plays it."""
    if role in ("random", "fix"):
        chances = legal.astype(np.float64)
        if role == "fix":
            chances[:, FIRST_INTERACTION:] = 0.0
        return chances / chances.sum(1, keepdims=True)
    codes, own = board_codes(game, obs)
    wanted = np.full(len(obs), -1)
    for kind in reversed(game.seekers[role]):  # the first kind of the list that is left
        wanted[(codes == ITEM + kind).any(1)] = ITEM + kind
    distance, each = distances(game, codes, wanted), np.arange(len(obs))
    here = distance[each, own]
    chances = np.zeros((len(obs), game.num_actions))
    chances[:, :STAY] = legal[:, :STAY] & (distance[each[:, None], game.grid.neighbours[own]] == here[:, None] - 1)
    acts = (here == 0) & (wanted >= 0)
    chances[acts, FIRST_INTERACTION + wanted[acts] - ITEM] = 1.0
    chances[chances.sum(1) == 0, STAY] = 1.0  # nothing left to seek
    return chances / chances.sum(1, keepdims=True)


def ceilings(data: dict[str, Any], game: GridGame) -> dict[str, np.ndarray]:
    """For each row the best possible chance of naming the action, for predictors that know more and more:

    `prior`    the rules, and how common each role is: as if the state told nothing of roles
    `state`    also how common each role is among rows of the same step and the same distances to each kind of item:
               an estimate of what the state alone allows (`history` is a strict upper bound of it)
    `history`  also the player's own earlier actions of the episode: exact Bayes over roles
    `known`    the role itself; `best` (M, A) is how often each action is this predictor's guess
    """
    names, num = data["meta"]["roles"], len(data["action"])
    present = np.unique(data["role"])
    chances = np.stack([rule_probabilities(game, names[k], data["obs"], data["legal"]) for k in present])  # (R, M, A)
    role, each = np.searchsorted(present, data["role"]), np.arange(num)
    first = np.append(True, (np.diff(data["episode"]) != 0) | (np.diff(data["player"]) != 0))
    prior = np.bincount(role[first], minlength=len(present)) / first.sum()

    # posterior over roles before each row (R, M): prior times the chances of the same player's earlier actions
    log_chance = np.log(np.maximum(chances[:, each, data["action"]], 1e-12))
    before = np.cumsum(log_chance, 1) - log_chance
    before -= before[:, np.flatnonzero(first)[np.cumsum(first) - 1]]
    posterior = prior[:, None] * np.exp(before - before.max(0))
    posterior /= posterior.sum(0)

    codes, own = board_codes(game, data["obs"])
    away = [distances(game, codes, np.full(num, ITEM + kind))[each, own] for kind in range(len(game.kinds))]
    place = np.unique(np.column_stack([data["t"], *away]), axis=0, return_inverse=True)[1].ravel()
    by_place = np.stack([np.bincount(place, weights) for weights in posterior]) / np.bincount(place)
    known = chances[role, each]
    best = known == known.max(1, keepdims=True)
    return {
        "prior": np.einsum("r,rma->ma", prior, chances).max(1),
        "state": np.einsum("rm,rma->ma", by_place[:, place], chances).max(1),
        "history": np.einsum("rm,rma->ma", posterior, chances).max(1),
        "known": known.max(1),
        "best": best / best.sum(1, keepdims=True),
    }


# ---------------------------------------------------------------------------------------------------------------------
# evaluation and pictures
# ---------------------------------------------------------------------------------------------------------------------

KNOWLEDGE = ("prior", "state", "history", "known")  # of the perfect predictors in `ceilings`


@torch.no_grad()
def predict(model: GoalVAE, batch: dict[str, torch.Tensor], with_goal: bool) -> torch.Tensor:
    """(M, A) log-probabilities of actions, with the goal known in hindsight or hidden."""
    outs = []
    for rows in torch.arange(len(batch["action"])).split(4096):
        mb = {name: column[rows] for name, column in batch.items()}
        z = torch.where(mb["has_goal"][:, None], model.encode(mb["goal_obs"])[0], model.no_goal) if with_goal else None
        outs.append(F.log_softmax(model.logits(mb["obs"], mb["t"], mb["legal"], z, mb["player"]), 1))
    return torch.cat(outs)


def evaluate(model: GoalVAE, batch: dict[str, torch.Tensor], ceiling: dict[str, np.ndarray]) -> dict[str, dict]:
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
            logp = predict(model, batch, mode == "known").numpy()
            order = np.argsort(-logp, axis=1, kind="stable")
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
            for name in ("prior", "state", "history"):  # who must guess the role cannot tell moves from hunts before
                del result["ceiling"][f"{name}_moves"], result["ceiling"][f"{name}_hunts"]
            hits = [ceiling["best"][distinct & (truth == a), a].sum() for a in range(num_actions)]
            result["ceiling"]["recall"] = np.array(hits) / count
    return result


def write_evaluation(stem: Path, result: dict[str, dict], names: tuple[str, ...]) -> None:
    """<stem>.csv: one row per mode and action; <stem>.npz: all numbers and confusion matrices."""
    best = result["ceiling"]["recall"] if "ceiling" in result else np.full(len(names), np.nan)
    with open(f"{stem}.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["goal", "action", "count", "ratio", "precision", "recall", "f1", "perfect_recall"])
        for mode in ("known", "hidden"):
            for a, name in enumerate(names):
                figures = [result[mode][key][a] for key in ("ratio", "precision", "recall", "f1")]
                writer.writerow([mode, name, result[mode]["count"][a], *(f"{x:.4f}" for x in (*figures, best[a]))])
    np.savez(f"{stem}.npz", **{f"{mode}_{key}": value for mode, part in result.items() for key, value in part.items()})


def draw_evaluation(stem: Path, result: dict[str, dict], names: tuple[str, ...]) -> None:
    import matplotlib.pyplot as plt

    names = [name.removeprefix("attack ") for name in names]
    size, place = max(3.6, 0.42 * len(names) + 1.2), np.arange(len(names))
    figure, axes = plt.subplots(1, 2, figsize=(2 * size + 0.8, size + 0.4), layout="constrained")
    for axis, mode in zip(axes, ("known", "hidden"), strict=True):
        confusion = result[mode]["confusion"]
        share = confusion / np.maximum(confusion.sum(1, keepdims=True), 1)
        axis.imshow(share, vmin=0, vmax=1, cmap="Blues")
        for i, j in np.argwhere(confusion):
            colour = "w" if share[i, j] > 0.55 else "k"
            axis.text(j, i, f"{share[i, j]:.2f}", ha="center", va="center", size=7, color=colour)
        axis.set(xlabel="predicted", title=f"goal {mode}: top-1 {result[mode]['top1']:.3f}")
        axis.set_xticks(place, names, rotation=90, size=8)
        axis.set_yticks(place, [f"{name} ({n})" for name, n in zip(names, confusion.sum(1), strict=True)], size=8)
    axes[0].set_ylabel("true (steps)")
    figure.savefig(f"{stem}_confusion_matrix.png", dpi=100)
    plt.close(figure)

    counts = {"true": result["known"]["count"]}
    counts |= {f"predicted, goal {mode}": result[mode]["confusion"].sum(0) for mode in ("known", "hidden")}
    recalls = {f"goal {mode}": np.nan_to_num(result[mode]["recall"]) for mode in ("known", "hidden")}
    if "ceiling" in result:
        recalls["perfect predictor that knows the role"] = np.nan_to_num(result["ceiling"]["recall"])
    for what, bars, label in (("class_distribution", counts, "steps"), ("per_class_recall", recalls, "recall")):
        figure, axis = plt.subplots(figsize=(max(5.5, 0.6 * len(names) + 1.5), 3.2), layout="constrained")
        for k, (name, heights) in enumerate(bars.items()):
            axis.bar(place + (k - 1) * 0.27, heights, 0.27, label=name, color=("#4477aa", "#ee7733", "#aaaaaa")[k])
        axis.set_xticks(place, names, rotation=45 if len(names) > 8 else 0, size=8)
        axis.set_ylabel(label)
        axis.spines[["top", "right"]].set_visible(False)
        figure.legend(*axis.get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False, fontsize=8)
        figure.savefig(f"{stem}_{what}.png", dpi=100)
        plt.close(figure)


def draw_losses(path: Path, history: list[dict[str, float]]) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.0), layout="constrained")
    titles = {"ce": "opponent model: cross-entropy", "recon": "reconstruction (nats)", "kl": "KL (nats)"}
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        lines = {"training": f"losses/train_{name}", "validation": f"losses/val_{name}"}
        if name == "ce":
            lines["validation, goal hidden"] = "moa/ce_hidden"
        for (label, column), style in zip(lines.items(), ("-", "--", ":"), strict=False):
            axis.plot([row["epoch"] for row in history], [row[column] for row in history], style, label=label)
        axis.set(xlabel="epoch", title=title)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def draw_goal_map(path: Path, z: np.ndarray, kind: np.ndarray, kinds: list[str], place: np.ndarray, probe: nn.Linear):
    """Goals in two dimensions, by the kind hunted (across: what the linear probe says) and by place (M, 2) from 0 to 1
    (the two widest directions of z)."""
    import matplotlib.pyplot as plt

    centred, weight = z - z.mean(0), probe.weight.detach().numpy()
    flat = centred @ np.linalg.svd(centred, full_matrices=False)[2][:2].T
    figure, axes = plt.subplots(1, 2, figsize=(10.5, 4.8), layout="constrained")
    two = len(kinds) == 2
    told = z @ (weight[1] - weight[0]) + (probe.bias[1] - probe.bias[0]).item() if two else flat[:, 0]
    for k in np.unique(kind):
        label = f"{kinds[k]} ({(kind == k).sum()})"
        axes[0].scatter(told[kind == k], flat[kind == k, 0 if two else 1], s=6, alpha=0.5, label=label, color=f"C{k}")
    if two:
        axes[0].axvline(0, color="#999999", lw=1, ls=":")
    axes[0].legend(frameon=False, markerscale=3, fontsize=8)
    across = f"log-odds of the linear probe: {kinds[1]} over {kinds[0]}" if two else "widest direction of z"
    axes[0].set(title="goals of validation hunts, by what is hunted", xlabel=across, yticks=[])
    axes[0].set_ylabel("widest direction of z" if two else "second widest")
    axes[1].scatter(*flat.T, s=6, alpha=0.7, c=np.insert(place, 1, 0.3, axis=1))
    axes[1].set(title="by where: redder = lower row, bluer = more to the right", xticks=[], yticks=[])
    axes[1].set(xlabel="widest direction of z", ylabel="second widest")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def fit_probe(probe: nn.Linear, z: torch.Tensor, label: torch.Tensor) -> None:
    """Multinomial logistic regression z -> label."""
    nn.init.zeros_(probe.weight)
    nn.init.zeros_(probe.bias)
    optimizer = torch.optim.LBFGS(probe.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(probe(z), label) + 1e-5 * probe.weight.pow(2).sum()
        value.backward()
        return value

    optimizer.step(loss)


# ---------------------------------------------------------------------------------------------------------------------
# checkpoints
# ---------------------------------------------------------------------------------------------------------------------

LARGEST = {
    "dim": 1024, "hidden": 8192, "horizon": 30_000, "num_players": 1024, "num_actions": 4096, "num_kinds": 4096,
    "num_cells": 1024,
}  # fmt: skip  (sizes above these are no checkpoint of ours)


def check_game(what: str, found: dict[str, Any], spec: EnvSpec, obs_is_state: bool) -> None:
    """ConfigError naming both sides if `found` (of a checkpoint or data file) was made for something else."""
    wanted = game_part(spec)
    if found.get("env_id") != wanted["env_id"]:
        raise ConfigError(f"{what} was trained on {found.get('env_id')}, this run uses {wanted['env_id']}")
    if found.get("obs_is_state") is not obs_is_state:
        obs, state = found.get("obs_shape"), found.get("state_shape")
        sides = [f"obs ({', '.join(map(str, obs or []))})", f"state ({', '.join(map(str, state or []))})"]
        raise ConfigError(f"{what} was trained on {sides[not obs_is_state]}, this run uses {sides[obs_is_state]}")
    found_config = found.get("config") if isinstance(found.get("config"), dict) else {}
    pairs = {name: (found.get(name), value) for name, value in wanted.items() if name != "config"}
    for name in [*wanted["config"], *found_config]:
        pairs[name] = (found_config.get(name), wanted["config"].get(name))
    for name, (theirs, ours) in pairs.items():
        if theirs != ours:
            raise ConfigError(f"{what} was trained with {name} {theirs}, this run uses {name} {ours}")


def read_spec(folder: Path, kind: str) -> dict[str, Any]:
    """The spec of a checkpoint folder; ConfigError in one sentence if there is none of this kind."""
    path = folder / "spec.json"
    try:
        text = path.read_bytes()
        spec = json.loads(text) if len(text) < 10_000_000 else None
    except FileNotFoundError:
        raise ConfigError(f"'{folder}' is no checkpoint: it has no spec.json") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"'{path}' cannot be read: {one_line(error)}") from None
    found = spec.get("kind") if isinstance(spec, dict) else None
    if found != kind:
        raise ConfigError(f"'{folder}' holds a checkpoint of kind {str(found)[:50]!r}, not {kind!r}")
    return spec


def load_weights(model: nn.Module, path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, once every name and shape is known to fit `model`."""
    wanted = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    try:
        with safe_open(path, "pt") as file:
            found = {name: file.get_slice(name).get_shape() for name in file.keys()}
            for name in [*wanted, *found]:
                if found.get(name) != wanted.get(name):
                    shapes = f"{name} is {found.get(name)}, not {wanted.get(name)}"
                    raise ConfigError(f"'{path}' does not fit its spec.json: {shapes}")
            tensors = {name: file.get_tensor(name) for name in wanted}
    except FileNotFoundError:
        raise ConfigError(f"checkpoint '{path.parent}' has no {path.name}") from None
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ConfigError(f"'{path}' cannot be read: {one_line(error)}") from None
    if not all(tensor.dtype == torch.float32 and tensor.isfinite().all() for tensor in tensors.values()):
        raise ConfigError(f"'{path}' has weights that are not finite float32 numbers")
    return tensors


def load_checkpoint(
    folder: str | Path, spec: EnvSpec | None = None, obs_is_state: bool = False
) -> tuple[GoalVAE, dict[str, Any]]:
    """A trained GoalVAE (in eval mode) and its spec. With `spec` of the env at hand, refuses one made for another."""
    folder = Path(folder)
    found = read_spec(folder, "goal_vae")
    if spec is not None:
        check_game("checkpoint", found, spec, obs_is_state)
    sizes = found.get("sizes") if isinstance(found.get("sizes"), dict) else {}
    shape = sizes.get("obs_shape") if isinstance(sizes.get("obs_shape"), list) else []
    good = len(shape) in (1, 3) and all(type(n) is int and 0 < n <= 10_000 for n in shape)
    good = good and (len(shape) == 1 or shape[0] * shape[1] <= LARGEST["num_cells"])
    good = good and all(type(sizes.get(name)) is int and 0 < sizes[name] <= most for name, most in LARGEST.items())
    if not good or type(sizes.get("obs_is_state")) is not bool:
        raise ConfigError(f"'{folder / 'spec.json'}' has no usable sizes: {str(sizes)[:200]}")
    with torch.device("meta"):  # shapes without memory: a file that lies about its size costs nothing
        tensors = load_weights(GoalVAE(sizes), folder / "weights.safetensors")
    model = GoalVAE(sizes)
    model.load_state_dict(tensors)
    return model.eval(), found


def find_checkpoint(
    out_dir: str | Path, spec: EnvSpec, obs_is_state: bool = False, dim: int | None = None
) -> Path | None:
    """The newest checkpoint under `out_dir` that fits this env (and has goals of size `dim`), or None."""
    for folder in sorted(Path(out_dir).glob(f"vae__*/dim{dim or '*'}"), reverse=True):
        try:
            check_game("checkpoint", read_spec(folder, "goal_vae"), spec, obs_is_state)
        except ConfigError:
            continue
        if (folder / "weights.safetensors").exists():
            return folder
    return None


def save_checkpoint(folder: Path, model: nn.Module, spec: dict[str, Any]) -> None:
    """weights.safetensors and spec.json, each written under another name first; spec.json last: it means complete."""
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / ".weights.tmp")
    (folder / ".weights.tmp").replace(folder / "weights.safetensors")
    (folder / ".spec.tmp").write_text(json.dumps(spec, indent=2) + "\n")
    (folder / ".spec.tmp").replace(folder / "spec.json")


def fresh_folder(out_dir: str | Path, name: str) -> Path:
    """<out_dir>/<name>__<unix time>, a second later where that exists."""
    for now in range(int(time.time()), int(time.time()) + 1000):
        folder = Path(out_dir) / f"{name}__{now}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"cannot write to '{out_dir}': {error.strerror}") from None
    raise ConfigError(f"'{out_dir}' is full of folders named {name}__<time>")


# ---------------------------------------------------------------------------------------------------------------------
# training
# ---------------------------------------------------------------------------------------------------------------------

LIMITS = {
    "seed": (0, 2**32), "num_steps": (100, 10**9), "goal_steps": (1, 10**6), "hidden": (1, 8192), "epochs": (1, 10**6),
    "batch_size": (1, 10**9), "torch_threads": (1, 1024), "val_share": (0.01, 0.9), "goal_dropout": (0.0, 1.0),
    "alpha": (0.0, 1e6), "recon_weight": (0.0, 1e6), "learning_rate": (1e-9, 1.0), "weight_decay": (0.0, 1.0),
}  # fmt: skip


def check_limits(args: Any, limits: dict[str, tuple[float, float]]) -> None:
    for name, (low, high) in limits.items():
        if not low <= getattr(args, name) <= high:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} must be from {low:g} to {high:g}, not {getattr(args, name)}")


def losses(model: GoalVAE, batch: dict[str, torch.Tensor], mode: str, dropout: float = 0.0) -> dict[str, torch.Tensor]:
    """Cross-entropy, reconstruction and KL, the latter two as means over the rows with a goal. The part that `mode`
    leaves out sees z without a gradient to it. The opponent model gets a sample of z while training, hidden with
    probability `dropout`, and else the mean; the reconstruction is always of a sample."""
    has_goal = batch["has_goal"]
    mean, log_var = model.encode(batch["goal_obs"])
    z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
    weight = has_goal.float() / has_goal.sum().clamp(min=1)
    recon = (model.reconstruction(z.detach() if mode == "moa" else z, batch["goal_obs"]) * weight).sum()
    kl = (0.5 * (mean.pow(2) + log_var.exp() - 1 - log_var) * weight[:, None]).sum()
    goal = z if model.training else mean
    goal = torch.where(has_goal[:, None], goal.detach() if mode == "recon" else goal, model.no_goal)
    if model.training:
        goal = torch.where(torch.rand(len(goal), 1) < dropout, model.hidden_goal, goal)
    logits = model.logits(batch["obs"], batch["t"], batch["legal"], goal, batch["player"])
    return {"ce": F.cross_entropy(logits, batch["action"]), "recon": recon, "kl": kl}


def elapsed(start: float, start_cpu: float) -> str:
    return f"{time.perf_counter() - start:.0f} s ({time.process_time() - start_cpu:.0f} s of one core)"


def train(args: Args) -> Path:
    """The whole experiment; returns the folder of the checkpoint."""
    check_limits(args, LIMITS)
    torch.set_num_threads(args.torch_threads)
    start, start_cpu = time.perf_counter(), time.process_time()

    # seeding
    play_seed, split_seed, torch_seed = np.random.SeedSequence(args.seed).spawn(3)
    torch.manual_seed(int(torch_seed.generate_state(1)[0]))

    # env setup
    spec = envs.spec(args.env_id)
    game = envs.game(args.env_id) if args.env_id in GridGame.registry else None
    if game and args.obs_is_state:
        raise ConfigError(f"--obs-is-state is for battles; in {args.env_id} everybody sees the whole board")
    kinds = list(game.kinds) if game else [name.split(" / ")[0] for name in spec.action_names[FIRST_INTERACTION + 1 :]]

    # data
    data = load_data(args.data, spec, args.obs_is_state) if args.data else collect(args, spec, game, play_seed)
    folder = fresh_folder(args.out_dir, "vae") / f"dim{args.dim}"
    folder.mkdir()
    if not args.data:
        name = args.env_id.replace(":", "-").replace("/", "-")
        path = Path(args.out_dir) / "data" / f"{name}__{folder.parent.name}.npz"
        save_data(path, data)
        print(f"[DATA] saved {path}")
    roles, prey = [*data["meta"]["roles"], "unknown"], ["nothing", *kinds]
    for column, names in (("role", roles), ("hunt", prey)):
        counts = zip(*np.unique(data[column], return_counts=True), strict=True)
        print(f"[DATA] steps by {column}: {', '.join(f'{names[k]} {n}' for k, n in counts)}")

    # split by episode
    episodes = np.random.default_rng(split_seed).permutation(np.unique(data["episode"]))
    num_val = max(1, round(args.val_share * len(episodes)))
    if num_val == len(episodes):
        raise ConfigError("there is only one episode; validation needs another")
    in_val = np.isin(data["episode"], episodes[:num_val])
    train_rows, val_rows = np.flatnonzero(~in_val & ~data["repeat"]), np.flatnonzero(in_val)
    print(
        f"[DATA] {len(in_val)} steps, {data['repeat'].mean():.1%} of them mere repeats of the step before; training on"
        f" {len(train_rows)} distinct ones, validation on {len(val_rows)} of {num_val} episodes"
    )

    def tensors(rows: np.ndarray) -> dict[str, torch.Tensor]:
        goal_row = data["goal_row"][rows]
        columns = {name: data[name][rows] for name in ("obs", "legal", "action", "t", "player", "repeat")}
        columns |= {"goal_obs": data["obs"][np.maximum(goal_row, 0)], "has_goal": goal_row >= 0}
        return {name: torch.from_numpy(column) for name, column in columns.items()}

    train_batch, val_batch = tensors(train_rows), tensors(val_rows)
    ceiling = ceilings(data, game) if game and (data["role"] >= 0).all() else {}
    ceiling = {name: values[val_rows] for name, values in ceiling.items()}

    # network
    sizes = {
        "obs_shape": list(data["obs"].shape[1:]), "obs_is_state": args.obs_is_state, "horizon": spec.horizon,
        "num_players": spec.num_players, "num_actions": spec.num_actions, "num_kinds": len(kinds), "dim": args.dim,
        "hidden": args.hidden, "num_cells": int(np.prod(spec.obs_shape[:2])) if game else 1,
    }  # fmt: skip
    if sizes["num_cells"] > LARGEST["num_cells"]:
        raise ConfigError(f"a board of {sizes['num_cells']} cells is too large; the most is {LARGEST['num_cells']}")
    model = GoalVAE(sizes)
    if not model.is_planes:
        model.mean.copy_(train_batch["obs"].mean(0))
        model.std.copy_(train_batch["obs"].std(0).clamp(min=0.05))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)
    updates = args.epochs * -(-len(train_rows) // args.batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)

    history: list[dict[str, float]] = []
    for epoch in tqdm(range(1, args.epochs + 1), desc="epochs", disable=not sys.stderr.isatty()):
        # update
        model.train()
        sums = dict.fromkeys(("ce", "recon", "kl"), 0.0)
        for mb_rows in torch.randperm(len(train_rows)).split(args.batch_size):
            mb = {name: column[mb_rows] for name, column in train_batch.items()}
            parts = losses(model, mb, args.loss, args.goal_dropout)
            loss = parts["ce"] + args.recon_weight * parts["recon"] + args.alpha * parts["kl"]
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            for name, part in parts.items():
                sums[name] += part.item() * len(mb_rows) / len(train_rows)
        if not np.isfinite(sum(sums.values())):
            raise FloatingPointError(f"a loss is not finite in epoch {epoch}: {sums}; try a smaller --learning-rate")

        # evaluation
        model.eval()
        result = evaluate(model, val_batch, ceiling)
        val = dict.fromkeys(sums, 0.0)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            distinct = torch.from_numpy(np.flatnonzero(~data["repeat"][val_rows]))
            for mb_rows in distinct.split(4096):
                parts = losses(model, {name: column[mb_rows] for name, column in val_batch.items()}, args.loss)
                val = {name: val[name] + parts[name].item() * len(mb_rows) / len(distinct) for name in val}
            goal_obs = val_batch["goal_obs"][distinct][val_batch["has_goal"][distinct]]
            means = torch.cat([model.encode(some)[0] for some in goal_obs.split(4096)])
        active = int((means.var(0) > 0.01).sum()) if len(means) > 1 else 0
        collapsed = active == 0 or val["kl"] < 0.1
        known, hidden, top = result["known"], result["hidden"], result.get("ceiling")
        of = {name: f" of {top[name]:.4f}" if top else "" for name in ("known", "known_moves", "state")}
        print(
            f"[MOA] epoch {epoch}: top1={known['top1']:.4f}{of['known']},"
            f" top3={known['top3']:.4f}, ce={known['ce']:.4f}"
            f" (moves {known['top1_moves']:.4f}{of['known_moves']}, hunts {known['top1_hunts']:.4f});"
            f" goal hidden top1={hidden['top1']:.4f}{of['state']}"
            f" (moves {hidden['top1_moves']:.4f}, hunts {hidden['top1_hunts']:.4f})"
        )
        figures = f"reconstruction {val['recon']:.3f}, KL {val['kl']:.3f}, active dimensions {active} of {args.dim}"
        print(f"[VAE] epoch {epoch}: {figures}")
        if collapsed:
            print("[WARN] posterior collapse: the goals say (almost) nothing; try a smaller --alpha")

        # logging
        row = {"epoch": epoch, "wall_time": time.perf_counter() - start, "cpu_time": time.process_time() - start_cpu}
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
            draw_evaluation(stem, result, spec.action_names)
            draw_losses(folder / "vae_loss_curve.png", history)
    with open(folder / "metrics.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(history[0]))
        writer.writeheader()
        writer.writerows(history)

    # what the goal space means: linear probes on the goals of hunts, fitted on training episodes
    hunted = np.unique(data["goal_row"][(data["goal_row"] >= 0) & (data["hunt"] > 0)])
    where = data["obs"][hunted][..., 0].reshape(len(hunted), -1).argmax(1) if game else data["hunt"][hunted]
    same_hunt = np.column_stack([data["episode"][hunted], data["player"][hunted], where])
    hunted = hunted[np.unique(same_hunt, axis=0, return_index=True)[1]]  # one row per hunt, however long it waits
    with torch.no_grad():
        hunt_obs = torch.from_numpy(data["obs"][hunted])
        z = torch.cat([model.encode(some)[0] for some in hunt_obs.split(4096)])
    labels = {"kind": torch.from_numpy(data["action"][hunted] - (FIRST_INTERACTION if game else FIRST_INTERACTION + 1))}
    if game:
        labels["cell"] = hunt_obs[..., 0].flatten(1).argmax(1)
    is_val, probes = torch.from_numpy(in_val[hunted]), {"goal/probe_kind": np.nan, "goal/probe_cell": np.nan}
    for name, label in labels.items():
        if len(label[~is_val].unique()) > 1 and is_val.any():
            probe = {"kind": model.kind_probe, "cell": model.cell_probe}[name]
            fit_probe(probe, z[~is_val], label[~is_val])
            probes[f"goal/probe_{name}"] = (probe(z[is_val]).argmax(1) == label[is_val]).float().mean().item()
    print(
        f"[GOAL] linear probes on z, {is_val.sum()} validation hunts: kind of prey"
        f" {probes['goal/probe_kind']:.4f}, which prey (its cell) {probes['goal/probe_cell']:.4f}"
    )
    if args.pictures and is_val.sum() > 2:
        place = np.zeros((int(is_val.sum()), 2))
        if game:
            row_column = np.divmod(labels["cell"][is_val].numpy(), game.config.width)
            place = np.stack(row_column, 1) / np.maximum([game.config.height - 1, game.config.width - 1], 1)
        kind = labels["kind"][is_val].numpy()
        draw_goal_map(folder / "goal_map.png", z[is_val].numpy(), kind, kinds, place, model.kind_probe)

    # checkpoint
    scores = {k: v if np.isfinite(v) else None for k, v in (history[-1] | probes).items() if not k.endswith("_time")}
    checkpoint = {"kind": "goal_vae", "script": Path(__file__).name, "num_actions": spec.num_actions, "loss": args.loss}
    checkpoint |= {"obs_is_state": args.obs_is_state, **game_part(spec), "sizes": sizes, "scores": scores}
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    save_checkpoint(folder, model, checkpoint | {"args": dataclasses.asdict(args), "code_version": version})
    if top:
        for suffix, what in (("", "distinct steps"), ("_all", "all steps")):
            goal, state, past = top["known" + suffix], top["state" + suffix], top["history" + suffix]
            with_goal, without = known["top1" + suffix], hidden["top1" + suffix]
            print(
                f"[DONE] {what}: top1 {with_goal:.4f} with the goal, {with_goal / goal:.1%} of the ceiling {goal:.4f};"
                f" {without:.4f} without, {without / state:.1%} of {state:.4f} that the state alone allows"
                f" ({without / past:.1%} of {past:.4f} with the player's history)"
            )
    print(f"[DONE] {elapsed(start, start_cpu)}; checkpoint {folder}")
    return folder


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # progress shows at once in a log file, too
    try:
        train(tyro.cli(Args))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except FloatingPointError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
