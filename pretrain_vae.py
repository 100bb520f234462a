"""Goals and the opponent model, offline: a goal VAE and pi(action | observation, t, goal) from rule-based play.

Where a player is heading is known in hindsight: the state in which its hunt happened. The encoder turns that state into
a goal vector z, the decoder draws the state again from z (Bernoulli for planes), and the opponent model (MOA) predicts
the player's actions on the way there from its own observation, the step and z; z is hidden at random, so that the model
also works without a goal. Only steps of players on the board are stored, learned from or predicted.

    python pretrain_vae.py                                      # msh-4h1s-4x4, about a minute on one core
    python pretrain_vae.py --lineups mix --env-id msh-4h1s-8x8  # four players, each ns or nh for an episode
    python pretrain_vae.py --env-id smac-8m --obs-is-state      # battles: Gaussian likelihood, no ceiling

Each epoch prints `[MOA] epoch k: top1=...` beside the ceiling: what a perfect predictor of these rules reaches, since
they break ties at random. Other scripts use `load_checkpoint`, `find_checkpoint` and `train`. See docs/offline_models.md.
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

EPISODES = 512  # played at a time while data is made
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
    empty: `mix`, `<first seeker>,<last seeker>,mix,random` and `random` (battles: nearest, focus, random)"""
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
    for k, (n_in, n_out) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
        layers += [nn.Linear(n_in, n_out)] + ([nn.ReLU()] if k < len(sizes) - 2 else [])
    return nn.Sequential(*layers)


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
        seekers = list(game.seekers) if game else []
        some = [seekers[k % len(seekers)] if k % 4 < 2 else ("mix", "random")[k % 2] for k in range(spec.num_players)] if game else []
        texts = ("mix", ",".join(some), "random") if game else BATTLE_TEAMS
    lineups = []
    for text in texts:
        roles = tuple(text.split(","))
        if game is None and len(set(roles)) > 1:
            raise ConfigError(f"line-up '{text}': a battle's agents play as one team, give one name of {', '.join(BATTLE_TEAMS)}, hold")
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
        step = {"obs": seen, "legal": env.legal[row, player], "action": actions[row, player], "t": env.t[row].astype(np.int64)}
        step |= {"episode": row, "player": player, "role": np.full(len(row), -1)}
        if game:
            step["role"] = np.where(players.codes >= RANDOM, players.codes, players.drawn)[row, player] - RANDOM
        _, _, _, _, info = env.step(actions)
        step["taken"] = info["taken"][row, player].astype(np.int64) if game else np.zeros(len(row), np.int64)
        steps.append({name: array.copy() for name, array in step.items()})
        over |= info["done"]
    data = {name: np.concatenate([step[name] for step in steps]) for name in steps[0]}
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
    except (OSError, ValueError, KeyError, EOFError, TypeError, AttributeError, IndexError, zipfile.BadZipFile) as error:
        raise ConfigError(f"data file '{path}' cannot be read: {' '.join(str(error).split())[:200]}") from None
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


def rule_probabilities(game: GridGame, role: str, obs: np.ndarray, legal: np.ndarray) -> np.ndarray:
    """(M, A) exact action probabilities of a rule-based player, as envs/players.py plays it."""
    num, num_cells = len(obs), game.config.height * game.config.width
    if role in ("random", "fix"):
        chances = legal.astype(np.float64)
        if role == "fix":
            chances[:, FIRST_INTERACTION:] = 0.0
        return chances / chances.sum(1, keepdims=True)
    planes = obs.reshape(num, num_cells, -1)
    content = planes[:, :, game.num_players :].astype(np.int64) @ np.arange(1, 2 + len(game.kinds))  # FREE, BLOCK, ITEM..
    own = planes[:, :, 0].argmax(1)
    wanted = np.full(num, -1)
    for kind in reversed(game.seekers[role]):  # the first kind of the list that is left
        wanted[(content == ITEM + kind).any(1)] = ITEM + kind
    far = num_cells + 1
    distance = np.where(content == wanted[:, None], 0, far)  # (M, H*W) steps to the nearest wanted item
    while True:
        nearer = np.where(content == BLOCK, far, 1 + distance[:, game.grid.neighbours].min(2)).clip(max=far)
        nearer = np.minimum(distance, nearer)
        if (nearer == distance).all():
            break
        distance = nearer
    here = distance[np.arange(num), own]
    chances = np.zeros((num, game.num_actions))
    steps = distance[np.arange(num)[:, None], game.grid.neighbours[own]] == here[:, None] - 1
    chances[:, :STAY] = steps & legal[:, :STAY] & (here > 0)[:, None]
    acts = (here == 0) & (wanted >= 0)
    chances[acts, FIRST_INTERACTION + wanted[acts] - ITEM] = 1.0
    chances[chances.sum(1) == 0, STAY] = 1.0  # nothing left to seek, or no way
    return chances / chances.sum(1, keepdims=True)


def ceilings(data: dict[str, Any], game: GridGame) -> dict[str, np.ndarray]:
    """For each row the best possible chance of naming the action, for predictors that know more and more.

    `prior`    the rules and how common each role is, nothing of this player (assumes the state tells nothing of roles)
    `state`    also how common each role is in such a place: among rows with the same legal hunts, kinds left and step
               (a lower bound of what the state alone allows; `history` is an upper one)
    `history`  also the player's own earlier actions of the episode (exact Bayes over roles)
    `known`    the role itself; `best` (M, A) is how often each action is this predictor's guess
    """
    names, num = data["meta"]["roles"], len(data["action"])
    seen = np.unique(data["role"])
    chances = np.stack([rule_probabilities(game, names[k], data["obs"], data["legal"]) for k in seen])  # (R, M, A)
    role = np.searchsorted(seen, data["role"])
    first = np.append(True, (np.diff(data["episode"]) != 0) | (np.diff(data["player"]) != 0))
    prior = np.bincount(role[first], minlength=len(seen)) / first.sum()
    # posterior over roles before each row: prior times the chances of all earlier actions of the same player
    done = np.log(np.maximum(chances[:, np.arange(num), data["action"]], 1e-12))
    before = np.cumsum(done, 1) - done
    before -= before[:, np.flatnonzero(first)[np.cumsum(first) - 1]]
    posterior = prior[:, None] * np.exp(before - before.max(0))
    posterior /= posterior.sum(0)
    kinds = data["obs"][..., game.num_players + 1 :].reshape(num, -1, len(game.kinds)).any(1)
    looks = np.column_stack([data["t"], data["legal"][:, FIRST_INTERACTION:], kinds])
    _, place = np.unique(looks, axis=0, return_inverse=True)
    by_place = np.stack([np.bincount(place.ravel(), weights) for weights in posterior]) / np.bincount(place.ravel())
    known = chances[role, np.arange(num)]
    best = known == known.max(1, keepdims=True)
    return {
        "prior": np.einsum("r,rma->ma", prior, chances).max(1),
        "state": np.einsum("rm,rma->ma", by_place[:, place.ravel()], chances).max(1),
        "history": np.einsum("rm,rma->ma", posterior, chances).max(1),
        "known": known.max(1),
        "best": best / best.sum(1, keepdims=True),
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# evaluation and pictures
# ---------------------------------------------------------------------------------------------------------------------


def confusion_scores(truth: np.ndarray, guesses: np.ndarray, num_actions: int) -> dict[str, np.ndarray]:
    """confusion (A, A) [true, guessed] and per action count, ratio, precision, recall, f1 (nan where undefined)."""
    confusion = np.bincount(truth * num_actions + guesses, minlength=num_actions**2).reshape(num_actions, num_actions)
    right, count, guessed = np.diag(confusion), confusion.sum(1), confusion.sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        scores = {"precision": right / guessed, "recall": right / count, "f1": 2 * right / (count + guessed)}
    return {"confusion": confusion, "count": count, "ratio": count / max(len(truth), 1), **scores}


@torch.no_grad()
def predict(model: GoalVAE, batch: dict[str, torch.Tensor], with_goal: bool) -> torch.Tensor:
    """(M, A) log-probabilities of actions, with the goal known in hindsight or hidden."""
    outs = []
    for lo in range(0, len(batch["action"]), 4096):
        rows = {name: column[lo : lo + 4096] for name, column in batch.items()}
        z = None
        if with_goal:
            z = torch.where(rows["has_goal"][:, None], model.encode(rows["goal_obs"])[0], model.no_goal)
        outs.append(F.log_softmax(model.logits(rows["obs"], rows["t"], rows["legal"], z, rows["player"]), 1))
    return torch.cat(outs)


def evaluate(model: GoalVAE, batch: dict[str, torch.Tensor], ceiling: dict[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    """Scores on validation rows with the goal known and hidden: top1, top3, ce, on moves and hunts apart, per action."""
    truth = batch["action"].numpy()
    is_hunt = truth >= FIRST_INTERACTION
    result = {}
    for mode in ("known", "hidden"):
        logp = predict(model, batch, mode == "known")
        order = logp.argsort(1, descending=True).numpy()
        right = order[:, 0] == truth
        result[mode] = {
            "top1": right.mean(), "top3": (order[:, :3] == truth[:, None]).any(1).mean(),
            "ce": -logp[torch.arange(len(truth)), batch["action"]].mean().item(),
            "top1_moves": right[~is_hunt].mean() if (~is_hunt).any() else np.nan,
            "top1_hunts": right[is_hunt].mean() if is_hunt.any() else np.nan,
            **confusion_scores(truth, order[:, 0], logp.shape[1]),
        }  # fmt: skip
    if ceiling:
        best = ceiling["best"]
        with np.errstate(invalid="ignore", divide="ignore"):
            recall = np.array([best[truth == a, a].mean() if (truth == a).any() else np.nan for a in range(best.shape[1])])
        result["ceiling"] = {name: ceiling[name].mean() for name in ("prior", "state", "history", "known")}
        result["ceiling"] |= {f"{name}_moves": ceiling[name][~is_hunt].mean() for name in ("prior", "state", "history", "known")}
        result["ceiling"]["recall"] = recall
    return result


def write_evaluation(stem: Path, result: dict[str, dict[str, Any]], action_names: list[str]) -> None:
    """<stem>.csv: one row per mode and action; <stem>.npz: all numbers and confusion matrices."""
    with open(stem.with_suffix(".csv"), "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["goal", "action", "count", "ratio", "precision", "recall", "f1", "ceiling_recall"])
        for mode in ("known", "hidden"):
            r = result[mode]
            top = np.full(len(action_names), np.nan) if "ceiling" not in result else result["ceiling"]["recall"]
            for a, name in enumerate(action_names):
                figures = [f"{r[key][a]:.4f}" for key in ("ratio", "precision", "recall", "f1")]
                writer.writerow([mode, name, r["count"][a], *figures, f"{top[a]:.4f}"])
            writer.writerow([mode, "all", r["count"].sum(), 1.0, "", f"{r['top1']:.4f}", "", ""])
    np.savez(stem.with_suffix(".npz"), **{f"{mode}_{key}": value for mode, r in result.items() for key, value in r.items()})


def draw_evaluation(stem: Path, result: dict[str, dict[str, Any]], names: list[str]) -> None:
    import matplotlib.pyplot as plt

    size = max(3.6, 0.42 * len(names) + 1.2)
    figure, axes = plt.subplots(1, 2, figsize=(2 * size + 0.6, size + 0.4), layout="constrained")
    for axis, mode in zip(axes, ("known", "hidden"), strict=True):
        confusion = result[mode]["confusion"]
        share = confusion / np.maximum(confusion.sum(1, keepdims=True), 1)
        axis.imshow(share, vmin=0, vmax=1, cmap="Blues")
        for i, j in zip(*np.nonzero(confusion), strict=True):
            axis.text(j, i, f"{share[i, j]:.2f}", ha="center", va="center", size=7, color="w" if share[i, j] > 0.55 else "k")
        axis.set(xticks=range(len(names)), yticks=range(len(names)), xlabel="predicted", title=f"goal {mode}: top-1 {result[mode]['top1']:.3f}")
        axis.set_xticklabels(names, rotation=90, size=8)
        axis.set_yticklabels([f"{name} ({n})" for name, n in zip(names, confusion.sum(1), strict=True)], size=8)
    axes[0].set_ylabel("true (steps)")
    figure.savefig(f"{stem}_confusion_matrix.png", dpi=110)
    plt.close(figure)

    place, wide = np.arange(len(names)), max(5.0, 0.6 * len(names) + 1.5)
    bars = {"true": result["known"]["count"], "predicted, goal known": result["known"]["confusion"].sum(0)}
    bars["predicted, goal hidden"] = result["hidden"]["confusion"].sum(0)
    recalls = {f"goal {mode}": np.nan_to_num(result[mode]["recall"]) for mode in ("known", "hidden")}
    if "ceiling" in result:
        recalls["perfect predictor, role known"] = np.nan_to_num(result["ceiling"]["recall"])
    for what, groups, label in (("class_distribution", bars, "validation steps"), ("per_class_recall", recalls, "recall")):
        figure, axis = plt.subplots(figsize=(wide, 3.2), layout="constrained")
        for k, (name, heights) in enumerate(groups.items()):
            axis.bar(place + (k - 1) * 0.27, heights, 0.27, label=name, color=("#4477aa", "#ee7733", "#999999")[k])
        axis.set_xticks(place, names, rotation=45 if len(names) > 8 else 0, size=8)
        axis.set_ylabel(label)
        axis.spines[["top", "right"]].set_visible(False)
        figure.legend(*axis.get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False, fontsize=8)
        figure.savefig(f"{stem}_{what}.png", dpi=110)
        plt.close(figure)


def draw_losses(path: Path, history: list[dict[str, float]]) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.0), layout="constrained")
    epochs = [row["epoch"] for row in history]
    for axis, (name, title) in zip(axes, (("ce", "MOA cross-entropy"), ("recon", "reconstruction (nats)"), ("kl", "KL (nats)")), strict=True):
        for part, style in (("train", "-"), ("val", "--")):
            axis.plot(epochs, [row[f"losses/{part}_{name}"] for row in history], style, label=part)
        if name == "ce":
            axis.plot(epochs, [row["moa/ce_hidden"] for row in history], ":", label="val, goal hidden")
        axis.set(xlabel="epoch", title=title)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_goal_map(path: Path, z: np.ndarray, kind: np.ndarray, cell: np.ndarray, kinds: list[str], shape: tuple[int, ...], probes: dict[str, float]) -> None:
    """Goals projected on their two widest directions: coloured by the kind hunted, and by the place of the hunt."""
    import matplotlib.pyplot as plt

    z = z - z.mean(0)
    flat = z @ np.linalg.svd(z, full_matrices=False)[2][:2].T
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.6), layout="constrained")
    for k, name in enumerate(kinds):
        axes[0].scatter(*flat[kind == k].T, s=6, alpha=0.5, label=f"{name} ({(kind == k).sum()})", color=f"C{k}")
    if len(kinds) <= 10:
        axes[0].legend(frameon=False, markerscale=3)
    told = f"linear probe {probes['probe_kind']:.3f}" if np.isfinite(probes["probe_kind"]) else "one kind only"
    axes[0].set_title(f"goals by what is hunted ({told})")
    if len(shape) == 3:
        row, column = np.divmod(cell, shape[1])
        colour = np.stack([row / max(shape[0] - 1, 1), 0.35 + 0 * row, column / max(shape[1] - 1, 1)], 1)
        axes[1].scatter(*flat.T, s=6, alpha=0.6, c=colour)
        axes[1].set_title(f"by place: red = row, blue = column (linear probe {probes['probe_cell']:.3f})")
    else:
        axes[1].set_visible(False)
    for axis in axes:
        axis.set(xticks=[], yticks=[], xlabel="first principal direction of z", ylabel="second")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def fit_probe(probe: nn.Linear, z: torch.Tensor, label: torch.Tensor) -> None:
    """Multinomial logistic regression z -> label into `probe`."""
    with torch.enable_grad():
        nn.init.zeros_(probe.weight), nn.init.zeros_(probe.bias)
        optimizer = torch.optim.LBFGS(probe.parameters(), max_iter=200, line_search_fn="strong_wolfe")

        def loss():
            optimizer.zero_grad()
            value = F.cross_entropy(probe(z), label) + 1e-5 * probe.weight.pow(2).sum()
            value.backward()
            return value

        optimizer.step(loss)


# ---------------------------------------------------------------------------------------------------------------------
# checkpoints
# ---------------------------------------------------------------------------------------------------------------------

SIZES = {
    "dim": 1024, "hidden": 16384, "horizon": 100_000, "num_players": 1024, "num_actions": 4096, "num_kinds": 4096, "num_cells": 65536,
}  # fmt: skip


def check_game(what: str, found: dict[str, Any], spec: EnvSpec, obs_is_state: bool) -> None:
    """ConfigError naming both sides if `found` (of a checkpoint or data file) was made for something else."""
    wanted = game_part(spec)
    if found.get("env_id") != wanted["env_id"]:
        raise ConfigError(f"{what} was made for {found.get('env_id')}, this run uses {wanted['env_id']}")
    if found.get("obs_is_state") is not obs_is_state:
        sides = []
        for is_state, part in ((not obs_is_state, found), (obs_is_state, wanted)):
            shape = part.get("state_shape" if is_state else "obs_shape") or []
            sides.append(f"{'state' if is_state else 'obs'} ({', '.join(map(str, shape))})")
        raise ConfigError(f"{what} was trained on {sides[0]}, this run uses {sides[1]}")
    for name, value in wanted.items():
        if name == "config":
            other = found.get("config") if isinstance(found.get("config"), dict) else {}
            for setting in [*value, *(key for key in other if key not in value)]:
                if other.get(setting) != value.get(setting):
                    raise ConfigError(f"{what} was made for {setting} = {other.get(setting)}, this run uses {setting} = {value.get(setting)}")
        elif found.get(name) != value:
            raise ConfigError(f"{what} was made for {name} {found.get(name)}, this run uses {name} {value}")


def read_spec(folder: Path, kind: str) -> dict[str, Any]:
    """The spec of a checkpoint folder; ConfigError in one sentence if there is none of this kind."""
    path = folder / "spec.json"
    try:
        text = path.read_bytes()
        spec = json.loads(text) if len(text) < 10_000_000 else None
    except FileNotFoundError:
        raise ConfigError(f"'{folder}' is no checkpoint: it has no spec.json") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"'{path}' cannot be read: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(spec, dict) or spec.get("kind") != kind:
        found = spec.get("kind") if isinstance(spec, dict) else None
        raise ConfigError(f"'{folder}' is a checkpoint of kind {found!r}, not {kind!r}")
    return spec


def load_weights(model: nn.Module, path: Path) -> None:
    """Put the tensors of a safetensors file into `model` (made on the meta device), after checking every shape."""
    try:
        with safe_open(path, "pt") as file:
            wanted = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
            found = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
            if found != wanted:
                name = next(name for name in [*wanted, *found] if found.get(name) != wanted.get(name))
                raise ConfigError(f"'{path}' does not fit its spec.json: {name} is {found.get(name)}, not {wanted.get(name)}")
            tensors = {name: file.get_tensor(name) for name in wanted}
    except FileNotFoundError:
        raise ConfigError(f"checkpoint '{path.parent}' has no {path.name}") from None
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"'{path}' cannot be read: {' '.join(str(error).split())[:200]}") from None
    if not all(tensor.dtype == torch.float32 and tensor.isfinite().all() for tensor in tensors.values()):
        raise ConfigError(f"'{path}' has weights that are not finite float32 numbers")
    model.load_state_dict(tensors, assign=True)


def load_checkpoint(folder: str | Path, spec: EnvSpec | None = None, obs_is_state: bool = False) -> tuple[GoalVAE, dict[str, Any]]:
    """A trained GoalVAE (in eval mode) and its spec. With `spec` of the env at hand, refuses one made for another."""
    folder = Path(folder)
    found = read_spec(folder, "goal_vae")
    if spec is not None:
        check_game("checkpoint", found, spec, obs_is_state)
    sizes = found.get("sizes")
    shape = sizes.get("obs_shape") if isinstance(sizes, dict) else None
    good = isinstance(shape, list) and len(shape) in (1, 3) and all(type(n) is int and 0 < n <= 65536 for n in shape)
    good = good and int(np.prod(shape)) < 10**6 and type(sizes.get("obs_is_state")) is bool
    if not good or not all(type(sizes.get(name)) is int and 0 < sizes[name] <= most for name, most in SIZES.items()):
        raise ConfigError(f"'{folder / 'spec.json'}' has no usable sizes: {str(sizes)[:200]}")
    with torch.device("meta"):
        model = GoalVAE(sizes)
    load_weights(model, folder / "weights.safetensors")
    fresh = GoalVAE(sizes)  # brings the buffers that are computed, not stored
    fresh.load_state_dict(model.state_dict())
    return fresh.eval(), found


def find_checkpoint(out_dir: str | Path, spec: EnvSpec, obs_is_state: bool = False, dim: int | None = None) -> Path | None:
    """The newest checkpoint under `out_dir` that fits this env, or None."""
    for folder in sorted(Path(out_dir).glob("vae__*/dim*"), key=lambda path: (path.parent.name, path.name), reverse=True):
        try:
            found = read_spec(folder, "goal_vae")
            check_game("checkpoint", found, spec, obs_is_state)
        except ConfigError:
            continue
        if dim in (None, found.get("sizes", {}).get("dim")) and (folder / "weights.safetensors").exists():
            return folder
    return None


def save_checkpoint(folder: Path, model: nn.Module, spec: dict[str, Any]) -> None:
    """weights.safetensors and spec.json, each written under another name first; spec.json last: it means complete."""
    temporary = folder / ".weights.tmp"
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, temporary)
    temporary.replace(folder / "weights.safetensors")
    temporary = folder / ".spec.tmp"
    temporary.write_text(json.dumps(spec, indent=2) + "\n")
    temporary.replace(folder / "spec.json")


def fresh_folder(out_dir: str | Path, name: str) -> Path:
    """<out_dir>/<name>__<unix time>, one second later where that exists."""
    now = int(time.time())
    while True:
        folder = Path(out_dir) / f"{name}__{now}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            now += 1
        except OSError as error:
            raise ConfigError(f"cannot write to '{out_dir}': {error.strerror}") from None


# ---------------------------------------------------------------------------------------------------------------------
# training
# ---------------------------------------------------------------------------------------------------------------------


def check_args(args: Args) -> None:
    for name, least in (("seed", 0), ("num_steps", 100), ("goal_steps", 1), ("hidden", 1), ("epochs", 1), ("batch_size", 1), ("torch_threads", 1)):
        if getattr(args, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(args, name)}")
    for name, low, high in (("val_share", 0.01, 0.9), ("goal_dropout", 0.0, 1.0), ("alpha", 0.0, 1e6), ("recon_weight", 0.0, 1e6), ("learning_rate", 1e-9, 1.0), ("weight_decay", 0.0, 1.0)):
        if not low <= getattr(args, name) <= high:
            raise ConfigError(f"--{name.replace('_', '-')} must be from {low:g} to {high:g}, not {getattr(args, name)}")


def train(args: Args) -> Path:
    """The whole experiment; returns the folder of the checkpoint."""
    check_args(args)
    torch.set_num_threads(args.torch_threads)

    # seeding
    play_seed, split_seed, torch_seed = np.random.SeedSequence(args.seed).spawn(3)
    split_generator = np.random.default_rng(split_seed)
    torch.manual_seed(int(torch_seed.generate_state(1)[0]))

    # env setup
    spec = envs.spec(args.env_id)
    game = envs.game(args.env_id) if args.env_id in GridGame.registry else None
    if game and args.obs_is_state:
        raise ConfigError(f"--obs-is-state is for battles; in {args.env_id} everybody sees the whole board")

    # data
    if args.data:
        data = load_data(args.data, spec, args.obs_is_state)
    else:
        data = collect(args, spec, game, play_seed)
    folder = fresh_folder(args.out_dir, "vae") / f"dim{args.dim}"
    folder.mkdir()
    if not args.data:
        path = Path(args.out_dir) / "data" / f"{args.env_id.replace(':', '-').replace('/', '-')}__{folder.parent.name}.npz"
        save_data(path, data)
        print(f"[DATA] saved {path}")
    kinds = list(game.kinds) if game else list(spec.action_names[FIRST_INTERACTION + 1 :])
    roles = [*data["meta"]["roles"], "unknown"]
    counts = ", ".join(f"{roles[k]} {n}" for k, n in zip(*np.unique(data["role"], return_counts=True), strict=True))
    hunts = ", ".join(f"{['nothing', *kinds][k]} {n}" for k, n in zip(*np.unique(data["hunt"], return_counts=True), strict=True))
    print(f"[DATA] {len(data['action'])} steps ({data['repeat'].sum()} mere repeats, left out); by role: {counts}; later hunt: {hunts}")

    # split by episode
    episodes = split_generator.permutation(np.unique(data["episode"]))
    num_val = max(1, round(args.val_share * len(episodes)))
    if num_val >= len(episodes):
        raise ConfigError(f"{len(episodes)} episodes are too few to keep {args.val_share} of them for validation")
    in_val = np.isin(data["episode"], episodes[:num_val])
    knows_rules = game is not None and (data["role"] >= 0).all()
    ceiling = ceilings(data, game) if knows_rules else {}
    val_rows, train_rows = np.flatnonzero(in_val & ~data["repeat"]), np.flatnonzero(~in_val & ~data["repeat"])
    print(f"[DATA] train {len(train_rows)} steps, validation {len(val_rows)} steps of {num_val} episodes")

    def tensors(rows: np.ndarray) -> dict[str, torch.Tensor]:
        goal_row = data["goal_row"][rows]
        columns = {name: data[name][rows] for name in ("obs", "legal", "action", "t", "player", "hunt")}
        columns |= {"goal_obs": data["obs"][np.maximum(goal_row, 0)], "has_goal": goal_row >= 0}
        return {name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in columns.items()}

    train_batch, val_batch = tensors(train_rows), tensors(val_rows)
    val_ceiling = {name: values[val_rows] for name, values in ceiling.items()}

    # network
    sizes = {
        "obs_shape": list(data["obs"].shape[1:]), "obs_is_state": args.obs_is_state, "horizon": spec.horizon, "dim": args.dim,
        "num_players": spec.num_players, "num_actions": spec.num_actions, "num_kinds": len(kinds), "hidden": args.hidden,
        "num_cells": int(np.prod(spec.obs_shape[:2])) if game else 1,
    }  # fmt: skip
    model = GoalVAE(sizes)
    if not model.is_planes:
        model.mean.copy_(train_batch["obs"].mean(0))
        model.std.copy_(train_batch["obs"].std(0).clamp(min=0.05))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)
    updates = args.epochs * -(-len(train_rows) // args.batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)

    def losses(batch: dict[str, torch.Tensor], training: bool) -> dict[str, torch.Tensor]:
        """The three parts, means over rows (reconstruction and KL: over rows with a goal)."""
        has_goal = batch["has_goal"]
        mean, log_var = model.encode(batch["goal_obs"])
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp() if training else mean
        weight = has_goal.float() / has_goal.sum().clamp(min=1)
        recon = (model.reconstruction(z if args.loss != "moa" else z.detach(), batch["goal_obs"]) * weight).sum()
        kl = (0.5 * (mean.pow(2) + log_var.exp() - 1 - log_var) * weight[:, None]).sum()
        goal = z if args.loss != "recon" else z.detach()
        goal = torch.where(has_goal[:, None], goal, model.no_goal)
        if training:
            goal = torch.where(torch.rand(len(goal), 1) < args.goal_dropout, model.hidden_goal, goal)
        logits = model.logits(batch["obs"], batch["t"], batch["legal"], goal, batch["player"])
        return {"ce": F.cross_entropy(logits, batch["action"]), "recon": recon, "kl": kl}

    history, start = [], time.perf_counter()
    bar = tqdm(range(1, args.epochs + 1), desc="epochs", disable=not sys.stderr.isatty())
    for epoch in bar:
        # update
        model.train()
        sums = dict.fromkeys(("ce", "recon", "kl"), 0.0)
        for mb_rows in torch.randperm(len(train_rows)).split(args.batch_size):
            parts = losses({name: column[mb_rows] for name, column in train_batch.items()}, True)
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
        result = evaluate(model, val_batch, val_ceiling)
        with torch.no_grad():
            some = torch.arange(len(val_rows)).split(4096)
            parts = [losses({name: column[rows] for name, column in val_batch.items()}, False) for rows in some]
            val = {name: sum(p[name].item() * len(rows) for p, rows in zip(parts, some, strict=True)) / len(val_rows) for name in sums}
            means = torch.cat([model.encode(val_batch["goal_obs"][rows])[0] for rows in some])[val_batch["has_goal"]]
        active = int((means.var(0) > 0.01).sum()) if len(means) > 1 else 0
        collapsed = active == 0 or val["kl"] < 0.1
        stem = folder / f"moa_eval_epoch{epoch}"
        write_evaluation(stem, result, list(spec.action_names))
        known, hidden, top = result["known"], result["hidden"], result.get("ceiling")
        of = (lambda name: f" (ceiling {top[name]:.3f})") if top else (lambda name: "")
        print(
            f"[MOA] epoch {epoch}: top1={known['top1']:.4f}{of('known')}, top3={known['top3']:.4f}, ce={known['ce']:.4f}; moves only {known['top1_moves']:.4f}"
            f"{of('known_moves')}, hunts {known['top1_hunts']:.4f}; goal hidden top1={hidden['top1']:.4f}{of('state')}, moves {hidden['top1_moves']:.4f}"
        )
        print(f"[VAE] epoch {epoch}: recon={val['recon']:.3f} kl={val['kl']:.3f} active dimensions {active}/{args.dim}")
        if collapsed:
            print(f"[WARN] posterior collapse: KL {val['kl']:.3f}, {active} active dimensions; goals say nothing, try a smaller --alpha")

        # logging
        row = {"epoch": epoch, "wall_time": round(time.perf_counter() - start, 2)}
        row |= {f"losses/train_{name}": value for name, value in sums.items()} | {f"losses/val_{name}": value for name, value in val.items()}
        row |= {f"moa/{name}": known[name] for name in ("top1", "top3", "ce", "top1_moves", "top1_hunts")}
        row |= {f"moa/{name}_hidden": hidden[name] for name in ("top1", "top3", "ce", "top1_moves", "top1_hunts")}
        row |= {f"moa/recall_action{a}": known["recall"][a] for a in range(spec.num_actions)}
        row |= {f"moa/ceiling_{name}": value for name, value in (top or {}).items() if name != "recall"}
        row |= {"goal/kl": val["kl"], "goal/active_dims": active, "goal/collapsed": int(collapsed)}
        history.append({name: float(value) if name != "epoch" else value for name, value in row.items()})
        if args.pictures:
            draw_evaluation(stem, result, list(spec.action_names))
            draw_losses(folder / "vae_loss_curve.png", history)
    with open(folder / "metrics.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(history[0]))
        writer.writeheader()
        writer.writerows(history)

    # what the goal space means: linear probes on the goals of hunts, fitted on training episodes
    scores = {name: value for name, value in history[-1].items() if name != "wall_time"}
    probes = {"probe_kind": float("nan"), "probe_cell": float("nan")}
    goals = {}
    for part, chosen in (("train", ~in_val), ("val", in_val)):
        rows = np.unique(data["goal_row"][chosen & (data["goal_row"] >= 0)])
        rows = rows[data["hunt"][rows] > 0]  # one row per hunt
        obs = torch.from_numpy(data["obs"][rows])
        with torch.no_grad():
            z = torch.cat([model.encode(some)[0] for some in obs.split(4096)]) if len(rows) else torch.zeros(0, args.dim)
        cell = obs.flatten(1, 2)[:, :, 0].argmax(1) if game else torch.zeros(len(rows), dtype=torch.long)
        goals[part] = z, torch.from_numpy(data["hunt"][rows] - 1), cell
    (z, kind, cell), (val_z, val_kind, val_cell) = goals["train"], goals["val"]
    if len(z) and len(val_z):
        for name, probe, label, val_label in (("kind", model.kind_probe, kind, val_kind), ("cell", model.cell_probe, cell, val_cell)):
            if len(label.unique()) > 1:
                fit_probe(probe, z, label)
                probes[f"probe_{name}"] = (probe(val_z).argmax(1) == val_label).float().mean().item()
        print(f"[GOAL] linear probes on z: kind {probes['probe_kind']:.4f}, cell {probes['probe_cell']:.4f} ({len(val_z)} validation hunts)")
        if args.pictures:
            draw_goal_map(folder / "goal_map.png", val_z.numpy(), val_kind.numpy(), val_cell.numpy(), kinds, tuple(spec.obs_shape), probes)

    # checkpoint
    scores |= {name: value for name, value in probes.items()}
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    checkpoint = {"kind": "goal_vae", "loss": args.loss, "obs_is_state": args.obs_is_state, **game_part(spec), "sizes": sizes}
    checkpoint |= {"scores": {k: round(v, 6) if np.isfinite(v) else None for k, v in scores.items()}, "args": dataclasses.asdict(args), "code_version": version}
    save_checkpoint(folder, model, checkpoint)
    if top:
        print(
            f"[DONE] top1 {known['top1']:.4f} = {known['top1'] / top['known']:.1%} of the ceiling {top['known']:.4f} (goal known); "
            f"{hidden['top1']:.4f} = {hidden['top1'] / top['state']:.1%} of {top['state']:.4f} (state alone), {hidden['top1'] / top['history']:.1%} of {top['history']:.4f} (history)"
        )
    print(f"[DONE] checkpoint {folder}")
    return folder


if __name__ == "__main__":
    try:
        train(tyro.cli(Args))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except FloatingPointError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
