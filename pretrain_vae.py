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
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from matplotlib.figure import Figure
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

import envs
from envs import ConfigError
from envs.grid import FIRST_INTERACTION, EnvSpec, GridGame
from envs.recording import ceilings, check_game, collect_play, game_part, load_play, one_line, role_names, save_data

IMPOSSIBLE = -1e9  # logit of an illegal action


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


# network


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

    def features(self, obs: Tensor) -> Tensor:
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

    def encode(self, goal_obs: Tensor) -> tuple[Tensor, Tensor]:
        """Goal states (B, *obs_shape) -> mean and log variance of z, (B, D) each."""
        mean, log_var = self.encoder(self.features(goal_obs)).chunk(2, 1)
        return mean, log_var.clamp(-8.0, 4.0)

    def reconstruction(self, z: Tensor, goal_obs: Tensor) -> Tensor:
        """(B,) nats to describe the goal state given z: Bernoulli for planes, Gaussian for vectors."""
        out = self.decoder(z)
        if self.is_planes:
            return F.binary_cross_entropy_with_logits(out, goal_obs.float().flatten(1), reduction="none").sum(1)
        return 0.5 * (out - (goal_obs - self.mean) / self.std).pow(2).sum(1)

    def logits(self, obs: Tensor, t: Tensor, legal: Tensor, z: Tensor | None = None, player: Tensor | None = None):
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


# evaluation and pictures

KNOWLEDGE = ("state", "history", "known")  # of the perfect predictors in `ceilings`


@torch.no_grad()
def predict(model: GoalVAE, batch: dict[str, Tensor], with_goal: bool) -> Tensor:
    """(M, A) log-probabilities of actions, with the goal known in hindsight or hidden."""
    outs = []
    for rows in torch.arange(len(batch["action"])).split(4096):
        mb = {name: column[rows] for name, column in batch.items()}
        z = torch.where(mb["has_goal"][:, None], model.encode(mb["goal_obs"])[0], model.no_goal) if with_goal else None
        outs.append(F.log_softmax(model.logits(mb["obs"], mb["t"], mb["legal"], z, mb["player"]), 1))
    return torch.cat(outs)


def evaluate(model: GoalVAE, batch: dict[str, Tensor], ceiling: dict[str, np.ndarray]) -> dict[str, dict]:
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
            for name in ("state", "history"):  # who must guess the role cannot tell moves from hunts before
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


def draw_epoch(stem: Path, result: dict[str, dict], names: tuple[str, ...], history: list[dict[str, float]]) -> None:
    """Confusion, distribution and recall of this epoch's evaluation, and the loss curve so far."""
    names = [name.removeprefix("attack ") for name in names]
    size, place = max(3.6, 0.42 * len(names) + 1.2), np.arange(len(names))
    figure = Figure((2 * size + 0.8, size + 0.4), layout="constrained")
    for axis, mode in zip(figure.subplots(1, 2), ("known", "hidden"), strict=True):
        confusion = result[mode]["confusion"]
        share = confusion / np.maximum(confusion.sum(1, keepdims=True), 1)
        axis.imshow(share, vmin=0, vmax=1, cmap="Blues")
        for i, j in np.argwhere(confusion):
            colour = "w" if share[i, j] > 0.55 else "k"
            axis.text(j, i, f"{share[i, j]:.2f}", ha="center", va="center", size=7, color=colour)
        axis.set(xlabel="predicted", title=f"goal {mode}: top-1 {result[mode]['top1']:.3f}")
        axis.set_xticks(place, names, rotation=90, size=8)
        axis.set_yticks(place, [f"{name} ({n})" for name, n in zip(names, confusion.sum(1), strict=True)], size=8)
    figure.axes[0].set_ylabel("true (steps)")
    figure.savefig(f"{stem}_confusion_matrix.png")

    counts = {"true": result["known"]["count"]}
    counts |= {f"predicted, goal {mode}": result[mode]["confusion"].sum(0) for mode in ("known", "hidden")}
    recalls = {f"goal {mode}": np.nan_to_num(result[mode]["recall"]) for mode in ("known", "hidden")}
    if "ceiling" in result:
        recalls["perfect predictor that knows the role"] = np.nan_to_num(result["ceiling"]["recall"])
    for what, bars, label in (("class_distribution", counts, "steps"), ("per_class_recall", recalls, "recall")):
        figure = Figure((max(5.5, 0.6 * len(names) + 1.5), 3.2), layout="constrained")
        axis = figure.subplots()
        for k, (name, heights) in enumerate(bars.items()):
            axis.bar(place + (k - 1) * 0.27, heights, 0.27, label=name, color=("#4477aa", "#ee7733", "#aaaaaa")[k])
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
    "dim": 1024, "hidden": 8192, "horizon": 30_000, "num_players": 1024, "num_actions": 4096, "num_kinds": 4096,
    "num_cells": 1024,
}  # fmt: skip


def read_spec(folder: Path, kind: str, spec: EnvSpec | None = None, obs_is_state: bool = False) -> dict[str, Any]:
    """The spec of a checkpoint folder; ConfigError in one sentence if it is of another kind, or not for this env."""
    path = folder / "spec.json"
    try:
        text = path.read_bytes()
        found = json.loads(text) if len(text) < 10_000_000 else None
    except FileNotFoundError:
        raise ConfigError(f"'{folder}' is no checkpoint: it has no spec.json") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"'{path}' cannot be read: {one_line(error)}") from None
    found_kind = found.get("kind") if isinstance(found, dict) else None
    if found_kind != kind:
        raise ConfigError(f"'{folder}' holds a checkpoint of kind {str(found_kind)[:50]!r}, not {kind!r}")
    if spec is not None:
        check_game("checkpoint was trained", found, spec, obs_is_state)
    return found


def load_weights(make_model: Callable[[], nn.Module], path: Path) -> nn.Module:
    """The model with the weights of a safetensors file, once every name and shape is known to fit."""
    with torch.device("meta"):  # shapes without memory: a file that lies about its size costs nothing
        wanted = {name: list(tensor.shape) for name, tensor in make_model().state_dict().items()}
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
    model = make_model()
    model.load_state_dict(tensors)
    return model.eval()


def load_checkpoint(folder: str | Path, spec: EnvSpec | None = None, obs_is_state: bool = False):
    """A trained GoalVAE (in eval mode) and its spec dict. With `spec` of the env at hand, refuses any other's."""
    folder = Path(folder)
    found = read_spec(folder, "goal_vae", spec, obs_is_state)
    sizes = found.get("sizes") if isinstance(found.get("sizes"), dict) else {}
    shape = sizes.get("obs_shape") if isinstance(sizes.get("obs_shape"), list) else []
    good = len(shape) in (1, 3) and all(type(n) is int and 0 < n <= 10_000 for n in shape)
    good = good and (len(shape) == 1 or shape[0] * shape[1] <= LARGEST["num_cells"])
    good = good and all(type(sizes.get(name)) is int and 0 < sizes[name] <= most for name, most in LARGEST.items())
    if not good or type(sizes.get("obs_is_state")) is not bool:
        raise ConfigError(f"'{folder / 'spec.json'}' has no usable sizes: {str(sizes)[:200]}")
    return load_weights(lambda: GoalVAE(sizes), folder / "weights.safetensors"), found


def newest(folders: Iterable[Path], usable: Callable[[Path], Any]) -> Path | None:
    """The last by name of the checkpoint folders of which `usable` is true and raises no ConfigError."""
    for folder in sorted(folders, reverse=True):
        try:
            if usable(folder) and (folder / "weights.safetensors").exists():
                return folder
        except (ConfigError, KeyError, TypeError):
            continue
    return None


def find_checkpoint(out_dir: str | Path, spec: EnvSpec, obs_is_state: bool = False, dim: int | None = None):
    """The newest checkpoint under `out_dir` that fits this env (and has goals of size `dim`), or None."""
    folders = Path(out_dir).glob(f"vae__*/dim{dim or '*'}")
    return newest(folders, lambda folder: read_spec(folder, "goal_vae", spec, obs_is_state))


def describe(kind: str, script: str, args: Any, spec: EnvSpec, obs_is_state: bool = False) -> dict[str, Any]:
    """What every checkpoint's spec says: what made it, and for which game."""
    version = hashlib.sha256(Path(script).read_bytes()).hexdigest()[:12]
    about = {"kind": kind, "script": Path(script).name, "code_version": version, "args": dataclasses.asdict(args)}
    return about | {"obs_is_state": obs_is_state, "num_actions": spec.num_actions, **game_part(spec)}


def save_checkpoint(folder: Path, model: nn.Module, spec: dict[str, Any]) -> None:
    """weights.safetensors and spec.json, each written under another name first; spec.json last: it means complete."""
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / ".weights.tmp")
    (folder / ".weights.tmp").replace(folder / "weights.safetensors")
    (folder / ".spec.tmp").write_text(json.dumps(spec, indent=2) + "\n")
    (folder / ".spec.tmp").replace(folder / "spec.json")


def fresh_folder(out_dir: str | Path, name: str) -> Path:
    """<out_dir>/<name>__<unix time>, seconds later where that exists."""
    now = int(time.time())
    while True:
        try:
            folder = Path(out_dir) / f"{name}__{now}"
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            now += 1
        except OSError as error:
            raise ConfigError(f"cannot write to '{out_dir}': {error.strerror}") from None


# training

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


def losses(model: GoalVAE, batch: dict[str, Tensor], mode: str, dropout: float = 0.0) -> dict[str, Tensor]:
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


def split_episodes(episode: np.ndarray, share: float, seed: np.random.SeedSequence) -> np.ndarray:
    """(M,) bool: rows of the episodes kept for validation."""
    episodes = np.random.default_rng(seed).permutation(np.unique(episode))
    num_val = max(1, round(share * len(episodes)))
    if num_val == len(episodes):
        raise ConfigError("there is only one episode; validation needs another")
    return np.isin(episode, episodes[:num_val])


def since(start: tuple[float, float]) -> tuple[float, float]:
    """Seconds of the clock and of one core."""
    return time.perf_counter() - start[0], time.process_time() - start[1]


def write_metrics(path: Path, history: list[dict[str, float]]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(history[0]))
        writer.writeheader()
        writer.writerows(history)


def probe_goals(model: GoalVAE, data: dict[str, Any], in_val: np.ndarray, kinds: list[str], map_path: Path | None):
    """What the goal space means: linear probes for kind and cell of the prey on the goals of hunts, fitted on training
    episodes; their accuracy on validation hunts, of which a map is drawn."""
    hunted = np.unique(data["goal_row"][(data["goal_row"] >= 0) & (data["hunt"] > 0)])
    obs = torch.from_numpy(data["obs"][hunted])
    kind = torch.from_numpy(data["action"][hunted] - FIRST_INTERACTION - (not model.is_planes))
    cell = obs[..., 0].flatten(1).argmax(1) if model.is_planes else torch.zeros_like(kind)
    where = cell.numpy() if model.is_planes else data["hunt"][hunted]
    same_hunt = np.column_stack([data["episode"][hunted], data["player"][hunted], where])
    first = np.unique(same_hunt, axis=0, return_index=True)[1]  # one row per hunt, however long it waits
    is_val, kind, cell = torch.from_numpy(in_val[hunted[first]]), kind[first], cell[first]
    with torch.no_grad():
        z = torch.cat([model.encode(some)[0] for some in obs[first].split(4096)])
    scores = {}
    for name, label, probe in (("kind", kind, model.kind_probe), ("cell", cell, model.cell_probe)):
        scores[f"goal/probe_{name}"] = np.nan
        if len(label[~is_val].unique()) > 1 and is_val.any():
            fit_probe(probe, z[~is_val], label[~is_val])
            scores[f"goal/probe_{name}"] = (probe(z[is_val]).argmax(1) == label[is_val]).float().mean().item()
    print(
        f"[GOAL] linear probes on z, {is_val.sum()} validation hunts: kind of prey {scores['goal/probe_kind']:.4f},"
        f" which prey (its cell) {scores['goal/probe_cell']:.4f}"
    )
    if map_path and is_val.sum() > 2:
        height, width = obs.shape[1:3] if model.is_planes else (1, 1)
        place = np.stack(np.divmod(cell[is_val].numpy(), width), 1) / np.maximum([height - 1, width - 1], 1)
        told = model.kind_probe(z[is_val]).detach().numpy()
        draw_goal_map(map_path, z[is_val].numpy(), told, kind[is_val].numpy(), kinds, place)
    return scores


def train(args: Args) -> Path:
    """The whole experiment; returns the folder of the checkpoint."""
    check_limits(args, LIMITS)
    torch.set_num_threads(args.torch_threads)
    start = time.perf_counter(), time.process_time()

    # seeding
    play_seed, split_seed, torch_seed = np.random.SeedSequence(args.seed).spawn(3)
    torch.manual_seed(int(torch_seed.generate_state(1)[0]))

    # env setup
    spec = envs.spec(args.env_id)
    game = envs.game(args.env_id) if args.env_id in GridGame.registry else None
    if game and args.obs_is_state:
        raise ConfigError(f"--obs-is-state is for battles; in {args.env_id} everybody sees the whole board")
    num_cells = int(np.prod(spec.obs_shape[:2])) if game else 1
    if num_cells > LARGEST["num_cells"]:
        raise ConfigError(f"a board of {num_cells} cells is too large; the most is {LARGEST['num_cells']}")
    kinds = list(game.kinds) if game else [name.split(" / ")[0] for name in spec.action_names[FIRST_INTERACTION + 1 :]]

    # data
    if args.data:
        data = load_play(args.data, spec, args.obs_is_state)
    else:
        how = args.lineups, args.num_steps, play_seed, args.obs_is_state, 0 if game else args.goal_steps
        data = collect_play(spec, game, *how)
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

    def tensors(rows: np.ndarray) -> dict[str, Tensor]:
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
        "hidden": args.hidden, "num_cells": num_cells,
    }  # fmt: skip
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
            sums = {name: sums[name] + parts[name].item() * len(mb_rows) / len(train_rows) for name in sums}
        if not np.isfinite(sum(sums.values())):
            raise FloatingPointError(f"a loss is not finite in epoch {epoch}: {sums}; try a smaller --learning-rate")

        # evaluation
        model.eval()
        result = evaluate(model, val_batch, ceiling)
        val = dict.fromkeys(sums, 0.0)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            distinct = (~val_batch["repeat"]).nonzero()[:, 0]
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
    probes = probe_goals(model, data, in_val, kinds, folder / "goal_map.png" if args.pictures else None)

    # checkpoint
    scores = {k: v if np.isfinite(v) else None for k, v in (history[-1] | probes).items() if not k.endswith("_time")}
    about = describe("goal_vae", __file__, args, spec, args.obs_is_state)
    save_checkpoint(folder, model, about | {"loss": args.loss, "sizes": sizes, "scores": scores})
    for suffix, what in (("", "distinct steps"), ("_all", "all steps")) if top else ():
        goal, state, past = (top[name + suffix] for name in ("known", "state", "history"))
        with_goal, without = known["top1" + suffix], hidden["top1" + suffix]
        print(
            f"[DONE] {what}: top1 {with_goal:.4f} with the goal, {with_goal / goal:.1%} of {goal:.4f} that"
            " knowing the role allows (a goal also says which item it is after);"
            f" {without:.4f} without, {without / state:.1%} of {state:.4f} that the state alone allows"
            f" ({without / past:.1%} of {past:.4f} with the player's history)"
        )
    print("[DONE] {:.0f} s ({:.0f} s of one core); checkpoint {}".format(*since(start), folder))
    return folder


def main(train: Callable[[Any], Any], args_type: type) -> None:
    """From the command line: errors that a user can cause end in one line."""
    sys.stdout.reconfigure(line_buffering=True)  # progress shows at once in a log file, too
    try:
        train(tyro.cli(args_type))
    except (ConfigError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


if __name__ == "__main__":
    main(train, Args)
