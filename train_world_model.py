"""A world model for the grid games: what happens next, who gets what, and does the episode end?

(own-first observation, joint action ordered like the planes, t) -> for each player a categorical over its own cell, the
four cells beside it and "gone"; for each item present or not; each player's reward as a categorical over the finite set
of values; the end of the episode. What the rules exclude gets probability 0 by construction: nobody moves two cells,
enters a block, comes back, or vanishes where there is nothing to take; items never appear. All players share the same
weights and everybody's fate is read from the cells around it, so the model is exactly blind to who has which index.

    python train_world_model.py                            # msh-4h1s-4x4, 50 k transitions, about a minute on one core
    python train_world_model.py --env-id msd-4x4
    python train_world_model.py --policy runs/.../checkpoints/best     # adds a trained policy's own play to the data
    python train_world_model.py --planes                   # the older model, each plane by itself, for comparison

`rollout` imagines: legal actions come from the imagined board, ends are respected, who left stays gone. The checkpoint
goes to vae_ckpts/world_model__<unix time>/; test_obs_reward_model.py judges and draws it. See docs/offline_models.md.
"""

from __future__ import annotations

import envs  # first: from here on Ctrl-C is one line

# isort: split
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch import Tensor
from tqdm import tqdm

from envs import ConfigError
from envs.devices import device_of, move
from envs.grid import BLOCK, GONE, ITEM, PLAYERS, STAY, EnvSpec, GridGame, T
from envs.offline import (
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
from envs.recording import TRANSITIONS, collect_transitions, load_transitions, save_data
from envs.rng import pack_generator, unpack_generator
from envs.run import Positive, Range, Rate, Run, Share, Whole, check_ranges
from pretrain_vae import mlp

HERE, LEFT_BOARD = 4, 5  # outcomes of a player: moved 0 UP, 1 DOWN, 2 LEFT, 3 RIGHT; stands still; is gone
IMPOSSIBLE = -1e9  # logit of what the rules exclude
MAX_REWARD_VALUES = 512
WORLD_ROWS = 2048  # steps imagined at a time: they stay in the cache

# obs (B, N, H, W, C), legal (B, N, A), t (B,) -> actions (B, N)
Policy = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


@dataclass
class Args:
    # run
    seed: Whole = 1
    """one seed, split into generators for envs, players, noise, the split, the network and its batches"""
    out_dir: str = "vae_ckpts"
    """the checkpoint goes to <out-dir>/world_model__<unix time>/"""
    data: str = ""
    """an .npz of an earlier run to train on; empty: play anew and save it under <out-dir>/data/"""
    torch_threads: Positive = 1
    """threads of torch; more is slower whenever anything else runs"""

    # env
    env_id: str = "msh-4h1s-4x4"
    """a grid game"""
    lineups: tuple[str, ...] = ()
    """who plays: each a comma list of roles (rule-based names or checkpoints), one per seat or one for all; equal
    shares of the transitions; empty: `random`, `mix`, and each seeker of the game in all seats"""
    policy: str = ""
    """a run folder or checkpoint whose policy plays all seats and gets a share like a line-up's; empty: none"""
    noise: Share = 0.1
    """how often a player does a random legal action instead of its own"""
    num_transitions: Annotated[int, Range(100, 10**9), tyro.conf.arg(metavar="100..1e9")] = 50_000
    """steps of the game to collect (each shows what happened to all players)"""
    val_share: Annotated[float, Range(0.01, 0.9), tyro.conf.arg(metavar="0.01..0.9")] = 0.1
    """share of the episodes held out"""

    # algorithm
    planes: bool = False
    """the older model: each plane predicted by itself with squared error (may predict the impossible)"""
    channel_weights: tuple[float, ...] = ()
    """weight of each plane in the loss, own plane first (a known variant: 2 2 2 2 1 1 1); empty: all 1"""
    hidden_size: Annotated[int, Range(1, 8192), tyro.conf.arg(metavar="1..8192")] = 128
    """width of all layers"""
    epochs: Positive = 8
    """passes over the training transitions"""
    batch_size: Positive = 256
    """transitions per update"""
    learning_rate: Rate = 2e-3
    """of Adam, annealed to 0 along a cosine"""


# networks


class Outcome(NamedTuple):
    """What a structured model says of one step, in the order in which the players were given."""

    moves: Tensor  # (B, N, 6) log-probabilities: UP, DOWN, LEFT, RIGHT, stands still, is gone
    stays: Tensor  # (B, H*W) probability that the item of a cell is still there (0 where there is none)
    stays_logit: Tensor  # (B, H*W) logits of the same, meaningful where `open` holds
    open: Tensor  # (B, H*W) bool: an item that could be taken, as somebody stands on it
    reward: Tensor  # (B, N, V) log-probabilities over the reward values
    end: Tensor  # (B,) logit that the episode ends


class WorldModel(nn.Module):
    """The structured model. A state enters as cells (B, N) of players (GONE = -1), board codes (B, H*W), and t (B,)."""

    def __init__(self, sizes: dict[str, Any], game: GridGame):
        super().__init__()
        self.sizes, self.game = dict(sizes), game
        hidden, num_actions, num_cells = sizes["hidden"], game.num_actions, game.config.height * game.config.width
        # the 3x3 cells around each cell; the index num_cells stands for "off the board"
        board = np.pad(np.arange(num_cells).reshape(game.obs_shape[:2]), 1, constant_values=num_cells)
        around = np.lib.stride_tricks.sliding_window_view(board, (3, 3)).reshape(num_cells, 9)
        around = np.append(around, np.full((1, 9), num_cells), 0)
        self.register_buffer("around", torch.from_numpy(around), persistent=False)  # (H*W + 1, 9)
        cell = np.arange(num_cells)[:, None]  # where UP, DOWN, LEFT, RIGHT, standing still and leaving lead to
        targets = np.concatenate([game.grid.neighbours, cell, np.full_like(cell, num_cells)], 1)
        targets = np.append(targets, np.full((1, 6), num_cells), 0)
        self.register_buffer("targets", torch.from_numpy(targets), persistent=False)  # (H*W + 1, 6)
        patch = 9 * (2 + len(game.kinds) + num_actions)
        self.player_net = mlp(patch + num_actions, hidden, hidden)  # what goes on around a player
        self.item_net = mlp(patch, hidden, hidden)  # ... and around an item that somebody stands on
        self.move_head = nn.Linear(hidden, 6)
        self.stays_head = nn.Linear(hidden, 1)
        self.reward_head = mlp(2 * hidden, hidden, len(sizes["reward_values"]))
        self.end_step = nn.Embedding(game.config.horizon + 1, 16)
        self.end_head = mlp(16 + 3, 64, 1)
        self.register_buffer("reward_values", torch.tensor(sizes["reward_values"], dtype=torch.float32))

    def forward(self, cells: Tensor, board: Tensor, actions: Tensor, t: Tensor) -> Outcome:
        num_rows, num_players = cells.shape
        num_cells, num_actions = board.shape[1], self.game.num_actions
        gone = cells == GONE
        place = off_board(cells, num_cells)  # (B, N)
        acts = F.one_hot(actions, num_actions).float().masked_fill(gone[:, :, None], 0.0)
        # what each cell shows: inside, block, items, how many players do what there: (B, H*W + 1, F)
        doing = torch.zeros(num_rows, num_cells + 1, num_actions, device=cells.device)
        doing.scatter_add_(1, place[:, :, None].expand(-1, -1, num_actions), acts)
        content = F.one_hot(board.clamp(max=BLOCK + len(self.game.kinds)), 2 + len(self.game.kinds))[:, :, 1:].float()
        looks = torch.cat([torch.ones_like(content[:, :, :1]), content], 2)
        looks = torch.cat([F.pad(looks, (0, 0, 0, 1)), doing], 2)
        flat = looks.flatten(0, 1)  # (B * (H*W + 1), F)
        first = torch.arange(num_rows, device=cells.device)[:, None] * (num_cells + 1)

        # players
        patch = flat[first[:, :, None] + self.around[place]].flatten(2)  # (B, N, 9 F)
        seen = F.relu(self.player_net(torch.cat([patch, acts], 2)))
        padded = F.pad(board, (0, 1))
        to = self.targets[place][:, :, :HERE]
        free = (to != place[:, :, None]) & (padded.gather(1, to.flatten(1)).view_as(to) != BLOCK) & ~gone[:, :, None]
        on_item = padded.gather(1, place) >= ITEM
        possible = torch.cat([free, ~gone[:, :, None], (on_item | gone)[:, :, None]], 2)
        moves = F.log_softmax(self.move_head(seen).masked_fill(~possible, IMPOSSIBLE), 2)

        # items: only one that somebody stands on can be taken
        is_item = board >= ITEM
        occupied = doing[:, :num_cells].sum(2) > 0
        is_open = is_item & occupied
        row, cell = is_open.nonzero(as_tuple=True)
        around_item = F.relu(self.item_net(flat[row[:, None] * (num_cells + 1) + self.around[cell]].flatten(1)))
        stays_logit = torch.zeros_like(doing[:, :num_cells, 0])
        stays_logit = stays_logit.index_put((row, cell), self.stays_head(around_item)[:, 0])
        stays = torch.where(is_open, torch.sigmoid(stays_logit), is_item.float())

        # rewards: what happens around the player, and at all items of the board
        everywhere = around_item.new_zeros(num_rows, around_item.shape[1]).index_add(0, row, around_item)
        reward = self.reward_head(torch.cat([seen, everywhere[:, None].expand(-1, num_players, -1)], 2))

        # end: chances that no item or no player is left, the share of items left, and the step
        none_left = torch.where(is_item, 1 - stays, 1.0).prod(1)
        all_gone = moves[:, :, LEFT_BOARD].exp().prod(1)
        left = stays.sum(1) / int(self.game.item_counts.sum())
        facts = torch.stack([none_left, all_gone, left], 1).detach()
        end = self.end_head(torch.cat([facts, self.end_step(t.clamp(0, self.game.config.horizon))], 1))[:, 0]
        return Outcome(moves, stays, stays_logit, is_open, F.log_softmax(reward, 2), end)

    def loss(self, batch: dict[str, Tensor], weights: Tensor) -> dict[str, Tensor]:
        """The parts of the loss, means over transitions; players that had left before are in none of them."""
        out = self(batch["cells"], batch["board"], batch["actions"], batch["t"])
        on_board = (batch["cells"] != GONE).float()
        num_rows, num_players = batch["cells"].shape
        num_cells = batch["board"].shape[1]
        to = self.targets[off_board(batch["cells"], num_cells)]
        outcome = (to == off_board(batch["next_cells"], num_cells)[:, :, None]).float()
        outcome[:, :, :HERE] *= 1 - outcome[:, :, HERE : HERE + 1]  # at the edge a move's target is the own cell
        moves = -(outcome * out.moves).sum(2) * on_board
        remains = (batch["next_board"] >= ITEM).float()
        items = F.binary_cross_entropy_with_logits(out.stays_logit, remains, reduction="none") * out.open
        items = items * weights[num_players + (batch["board"] - BLOCK).clamp(min=0)]
        value = (batch["reward"][:, :, None] - self.reward_values).abs().argmin(2)
        reward = F.nll_loss(out.reward.flatten(0, 1), value.flatten(), reduction="none").view_as(on_board) * on_board
        return {
            "moves": weights[:num_players].mean() * moves.sum() / num_rows,
            "items": items.sum() / num_rows,
            "reward": reward.sum() / num_rows,
            "end": F.binary_cross_entropy_with_logits(out.end, batch["end"]),
        }

    def soft_planes(self, cells: Tensor, board: Tensor, out: Outcome) -> Tensor:
        """(B, H, W, C) probabilities of the next planes, players in the order given."""
        num_cells = board.shape[1]
        players = out.moves.new_zeros(*cells.shape, num_cells + 1)
        players = players.scatter_add(2, self.targets[off_board(cells, num_cells)], out.moves.exp())[:, :, :num_cells]
        items = [(board == ITEM + kind) * out.stays for kind in range(len(self.game.kinds))]
        planes = torch.cat([players.transpose(1, 2), torch.stack([(board == BLOCK).float(), *items], 2)], 2)
        return planes.view(len(cells), *self.game.obs_shape)

    @torch.no_grad()
    def predict(self, obs: Tensor, actions: Tensor, t: Tensor) -> dict[str, Tensor]:
        """obs (B, H, W, C) and actions (B, N), both own first -> soft `planes` (B, H, W, C), `reward` and `end` (B,) of
        the focal player, and the most likely: `next_planes` 0/1, `reward_mode` (B,)."""
        cells, board = from_planes(obs, self.game)
        out = self(cells, board, actions, t)
        next_cells, next_board = self.most_likely(cells, board, out)
        planes = to_planes(next_cells, next_board, self.game)
        chance = out.reward[:, 0].exp()
        return {
            "planes": self.soft_planes(cells, board, out), "reward": chance @ self.reward_values,
            "end": torch.where(is_empty(next_cells, next_board), 1.0, torch.sigmoid(out.end)),
            "next_planes": planes, "reward_mode": self.reward_values[chance.argmax(1)],
        }  # fmt: skip

    def most_likely(self, cells: Tensor, board: Tensor, out: Outcome) -> tuple[Tensor, Tensor]:
        to = self.targets[off_board(cells, board.shape[1])]
        to = to.gather(2, out.moves.argmax(2, keepdim=True))[:, :, 0]
        next_cells = torch.where(to == board.shape[1], GONE, to)
        return next_cells, torch.where((board >= ITEM) & (out.stays < 0.5), 0, board)

    @torch.no_grad()
    def imagine(self, states: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """States (B, L) as in envs/grid.py, actions (B, N) -> most likely next states, rewards (B, N), ends (B,)."""
        cells, board, t = from_states(states, self.game, device_of(self))
        out = self(cells, board, torch.from_numpy(np.ascontiguousarray(actions, np.int64)).to(cells.device), t)
        next_cells, next_board = self.most_likely(cells, board, out)
        reward = self.reward_values[out.reward.argmax(2)].masked_fill(cells == GONE, 0.0)
        end = (out.end > 0) | is_empty(next_cells, next_board)
        after = to_states(states, next_cells, next_board, self.game.config.horizon)
        return after, reward.cpu().numpy(), end.cpu().numpy()


class PlanesModel(nn.Module):
    """The older model: a CNN that predicts every plane by itself (squared error), the focal reward, and the end."""

    def __init__(self, sizes: dict[str, Any], game: GridGame):
        super().__init__()
        self.sizes, self.game = dict(sizes), game
        hidden, planes = sizes["hidden"], game.obs_shape[2]
        inputs = game.num_players * game.num_actions + planes + 1
        self.body = nn.Sequential(
            nn.Conv2d(inputs, hidden, 3, padding=1), nn.ReLU(), nn.Conv2d(hidden, hidden, 3, padding=1), nn.ReLU()
        )  # fmt: skip
        self.next_planes = nn.Conv2d(hidden, planes, 1)
        self.pooled = mlp(hidden, hidden, 2)  # reward and end

    def forward(self, obs: Tensor, actions: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        planes = obs.float().permute(0, 3, 1, 2)  # (B, C, H, W)
        acts = F.one_hot(actions, self.game.num_actions).float()
        joint = torch.einsum("bnhw,bna->bnahw", planes[:, : self.game.num_players], acts).flatten(1, 2)
        step = (t.float() / self.game.config.horizon)[:, None, None, None].expand(-1, 1, *planes.shape[2:])
        body = self.body(torch.cat([joint, planes, step], 1))
        reward, end = self.pooled(body.mean((2, 3))).unbind(1)
        return self.next_planes(body).permute(0, 2, 3, 1), reward, end

    def loss(self, batch: dict[str, Tensor], weights: Tensor) -> dict[str, Tensor]:
        """As seen by one player on the board, drawn anew for each transition."""
        viewer = torch.multinomial((batch["cells"] != GONE).float(), 1)[:, 0]
        seats = torch.arange(batch["cells"].shape[1], device=viewer.device)
        order = (viewer[:, None] + seats) % len(seats)
        obs = to_planes(batch["cells"].gather(1, order), batch["board"], self.game)
        target = to_planes(batch["next_cells"].gather(1, order), batch["next_board"], self.game)
        planes, reward, end = self(obs, batch["actions"].gather(1, order), batch["t"])
        true_reward = batch["reward"].gather(1, viewer[:, None])[:, 0]
        return {
            "moves": ((planes - target).pow(2) * weights).mean(),
            "items": torch.zeros(()),
            "reward": 0.01 * F.mse_loss(reward, true_reward),
            "end": 0.01 * F.binary_cross_entropy_with_logits(end, batch["end"]),
        }

    @torch.no_grad()
    def predict(self, obs: Tensor, actions: Tensor, t: Tensor) -> dict[str, Tensor]:
        planes, reward, end = self(obs, actions, t)
        out = {"planes": planes, "reward": reward, "end": torch.sigmoid(end)}
        return out | {"next_planes": (planes > 0.5).float(), "reward_mode": reward}

    @torch.no_grad()
    def imagine(self, states: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As the structured model's: rounded planes seen by the first player on the board, rewards each by its own."""
        cells, board, t = from_states(states, self.game, device_of(self))
        num_rows, num_players = cells.shape
        each, seats = (torch.arange(size, device=cells.device) for size in cells.shape)
        order = (seats[:, None] + seats) % num_players  # (viewer, N): own first
        joint = torch.from_numpy(np.ascontiguousarray(actions, np.int64)).to(cells.device)[:, order].flatten(0, 1)
        obs = to_planes(cells[:, order].flatten(0, 1), board.repeat_interleave(num_players, 0), self.game)
        out = self.predict(obs, joint, t.repeat_interleave(num_players))
        out = {name: values.unflatten(0, (num_rows, num_players)) for name, values in out.items()}
        reward = torch.where(cells != GONE, out["reward"], 0.0)
        viewer = (cells != GONE).float().argmax(1)
        chance, where = out["planes"][each, viewer, ..., :num_players].flatten(1, 2).max(1)  # one cell at most
        next_cells = torch.where(chance > 0.5, where, GONE).gather(1, (seats - viewer[:, None]) % num_players)
        contents = out["next_planes"][each, viewer, ..., num_players:].flatten(1, 2)  # (B, H*W, 1 + K)
        next_board = torch.where(contents.amax(2) > 0, contents.argmax(2) + BLOCK, 0)
        next_cells[cells == GONE] = GONE
        after = to_states(states, next_cells, next_board, self.game.config.horizon)
        return after, reward.cpu().numpy(), (out["end"][each, viewer] > 0.5).cpu().numpy()


# states, planes, and rollouts on imagined boards


def from_states(states: np.ndarray, game: GridGame, device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
    """State rows -> cells (B, N), board codes (B, H*W), t (B,)."""
    rows = torch.from_numpy(np.asarray(states, np.int64)).to(device)
    return rows[:, PLAYERS : PLAYERS + game.num_players], rows[:, PLAYERS + game.num_players :], rows[:, T]


def to_states(states: np.ndarray, next_cells: Tensor, next_board: Tensor, horizon: int) -> np.ndarray:
    out = np.array(states, np.int16)
    out[:, T] = np.minimum(out[:, T] + 1, horizon)  # a model may forget the time limit
    out[:, PLAYERS : PLAYERS + next_cells.shape[1]] = next_cells.cpu().numpy()
    out[:, PLAYERS + next_cells.shape[1] :] = next_board.cpu().numpy()
    return out


def from_planes(obs: Tensor, game: GridGame) -> tuple[Tensor, Tensor]:
    """Planes (B, H, W, C) -> cells (B, N) in the order of the planes, board codes (B, H*W)."""
    flat = obs.flatten(1, 2).long()  # (B, H*W, C)
    present, cell = flat[:, :, : game.num_players].max(1)
    codes = torch.arange(1, 2 + len(game.kinds), device=obs.device)
    return torch.where(present > 0, cell, GONE), flat[:, :, game.num_players :] @ codes


def to_planes(cells: Tensor, board: Tensor, game: GridGame) -> Tensor:
    """The reverse: (B, H, W, C) float of 0/1, players in the order given (also for a viewer that left)."""
    players = F.one_hot(cells + 1, board.shape[1] + 1)[:, :, 1:].transpose(1, 2)
    planes = torch.cat([players, F.one_hot(board, 2 + len(game.kinds))[:, :, 1:]], 2)
    return planes.view(len(cells), *game.obs_shape).float()


def off_board(cells: Tensor, num_cells: int) -> Tensor:
    """Cells with GONE as an index beyond the board."""
    return torch.where(cells == GONE, num_cells, cells)


def tensors(data: dict[str, np.ndarray], game: GridGame) -> dict[str, Tensor]:
    """Columns of recorded transitions as a batch to learn from."""
    cells, board, t = from_states(data["states"], game)
    next_cells, next_board, _ = from_states(data["next_states"], game)
    batch = {"cells": cells, "board": board, "t": t, "next_cells": next_cells, "next_board": next_board}
    batch |= {"actions": torch.from_numpy(data["actions"]), "reward": torch.from_numpy(data["reward"])}
    return batch | {"end": torch.from_numpy(data["end"]).float()}


def is_empty(cells: Tensor, board: Tensor) -> Tensor:
    """(B,) bool: no player or no item is left, so by any rules the episode is over."""
    return (cells == GONE).all(1) | ~(board >= ITEM).any(1)


class Imagined(NamedTuple):
    """What `rollout` returns. Rows that are over stay as they are and pay nothing."""

    states: np.ndarray  # (steps + 1, B, L) int16
    actions: np.ndarray  # (steps, B, N): legal on the imagined board; STAY of who left
    legal: np.ndarray  # (steps, B, N, A) bool
    alive: np.ndarray  # (steps, B, N) bool: took part in this step
    reward: np.ndarray  # (steps, B, N) float32
    terminated: np.ndarray  # (steps, B, N) bool: left in this step, or nothing more can happen
    truncated: np.ndarray  # (steps, B, N) bool: still on the board when the model says time is up
    done: np.ndarray  # (steps + 1, B) bool: over before this step


def rollout(model: WorldModel | PlanesModel, states: np.ndarray, policies: Policy | np.ndarray, steps: int) -> Imagined:
    """Imagine `steps` steps from `states` (B, L).

    `policies` is a function (obs (B, N, H, W, C), legal (B, N, A), t (B,)) -> actions (B, N), or the actions themselves
    (steps, B, N). Legality is computed from the imagined board, and an illegal action is STAY, as in the game; an
    episode ends when the model says so.
    """
    game = model.game
    states = np.array(states, np.int16)
    over = game.over(states)
    history = []
    for step in range(steps):
        legal, alive = game.legal(states, trusted=True), game.alive(states) & ~over[:, None]
        t = states[:, T].astype(np.int32)
        actions = policies(game.observe(states, trusted=True), legal, t) if callable(policies) else policies[step]
        actions = np.asarray(actions, np.int64)
        actions = np.where(np.take_along_axis(legal, actions[:, :, None], 2)[:, :, 0] & alive, actions, STAY)
        after, reward, end = states.copy(), np.zeros(alive.shape, np.float32), np.zeros(len(states), bool)
        on = np.flatnonzero(~over)
        if len(on):
            after[on], reward[on], end[on] = model.imagine(states[on], actions[on])
        on_board = game.alive(after)
        end |= ~over & ~on_board.any(1)
        items_left = (after[:, PLAYERS + game.num_players :] >= ITEM).any(1)
        terminated = alive & (~on_board | (end & ~items_left)[:, None])
        truncated = alive & on_board & (end & items_left)[:, None]
        history.append((states, actions, legal, alive, reward, terminated, truncated, over))
        states, over = after, over | end
    columns = [np.stack(column) for column in zip(*history, strict=True)]
    columns[0] = np.append(columns[0], states[None], 0)
    columns[-1] = np.append(columns[-1], over[None], 0)
    return Imagined(*columns)


# evaluation


def views(data: dict[str, Any], game: GridGame, chunk: int = 4096):
    """Every transition as seen by every player on the board: chunks of own-first tensors and the rows they are of."""
    for viewer in range(game.num_players):
        rows_on = np.flatnonzero(game.alive(data["states"])[:, viewer])
        order = [(viewer + k) % game.num_players for k in range(game.num_players)]
        for lo in range(0, len(rows_on), chunk):
            rows = rows_on[lo : lo + chunk]
            cells, board, t = from_states(data["states"][rows], game)
            next_cells, next_board, _ = from_states(data["next_states"][rows], game)
            view = {"obs": to_planes(cells[:, order], board, game), "t": t}
            view["next_obs"] = to_planes(next_cells[:, order], next_board, game)
            view["actions"] = torch.from_numpy(data["actions"][rows][:, order])
            view["reward"] = torch.from_numpy(data["reward"][rows, viewer])
            view["end"] = torch.from_numpy(data["end"][rows])
            yield rows, view


def impossible(before: Tensor, after: Tensor, game: GridGame) -> Tensor:
    """(B,) bool: 0/1 planes `after` cannot follow `before`: somebody is in two cells, jumped, entered a block, came
    back, or vanished where there was nothing to take; a block changed; an item appeared."""
    seats = game.num_players
    old, new = before[..., :seats].flatten(1, 2), after[..., :seats].flatten(1, 2)  # (B, H*W, N)
    blocks, items = before[..., seats].flatten(1)[:, :, None], before[..., seats + 1 :].sum(3).flatten(1)[:, :, None]
    beside = torch.zeros_like(old)
    for action in range(STAY):
        beside.scatter_add_(1, torch.from_numpy(game.grid.neighbours[:, action])[None, :, None].expand_as(old), old)
    wrong = (new.sum(1) > 1) | ((new > 0) & (beside + old == 0)).any(1) | ((new > 0) & (blocks > 0)).any(1)
    vanished = (old.sum(1) > 0) & (new.sum(1) == 0)
    wrong |= vanished & ((old * items).sum(1) == 0)
    changed = (before[..., seats] != after[..., seats]).flatten(1).any(1)
    return wrong.any(1) | changed | (after[..., seats + 1 :] > before[..., seats + 1 :]).flatten(1).any(1)


def judge(model: WorldModel | PlanesModel, data: dict[str, Any]) -> dict[str, Any]:
    """All scores of one-step predictions, over every view of every transition."""
    game, square = model.game, torch.zeros(model.game.obs_shape[2], dtype=torch.float64)
    per_view: dict[str, list[np.ndarray]] = {}
    for rows, view in views(data, game):
        out = model.predict(view["obs"], view["actions"], view["t"])
        square += (out["planes"] - view["next_obs"]).double().pow(2).sum((0, 1, 2))
        for name, values in {
            "row": torch.from_numpy(rows),
            "exact": (out["next_planes"] == view["next_obs"]).flatten(1).all(1),
            "impossible": impossible(view["obs"], out["next_planes"], game),
            "reward": view["reward"].double(),
            "reward_error": out["reward_mode"].double() - view["reward"],
            "end": view["end"],
            "end_right": (out["end"] > 0.5) == view["end"],
        }.items():
            per_view.setdefault(name, []).append(values.numpy())
    v = {name: np.concatenate(values) for name, values in per_view.items()}
    rewarded = (np.abs(data["reward"] - game.config.time_reward) > 1e-6).any(1)[v["row"]]  # somebody took something
    channel_mse = (square / (len(v["row"]) * game.config.height * game.config.width)).tolist()
    by_value = {}
    for value in np.unique(v["reward"].round(4)):
        error = v["reward_error"][np.abs(v["reward"] - value) < 1e-3]
        exact = float((np.abs(error) < 0.01).mean())
        by_value[f"{value:.4g}"] = {"count": len(error), "mse": float((error**2).mean()), "exact": exact}
    scores = {"transitions": len(data["end"]), "views": len(v["row"]), "obs_mse": float(np.mean(channel_mse))}
    scores["psnr"] = float(-10 * np.log10(max(scores["obs_mse"], 1e-12)))
    scores |= {"channel_mse": dict(zip(game.plane_names, channel_mse, strict=True)), "exact": float(v["exact"].mean())}
    scores["exact_rewarded"] = float(v["exact"][rewarded].mean()) if rewarded.any() else float("nan")
    scores |= {"reward_mse": float((v["reward_error"] ** 2).mean()), "reward_by_value": by_value}
    scores["end_accuracy"] = float(v["end_right"].mean())
    scores["end_recall"] = float(v["end_right"][v["end"]].mean()) if v["end"].any() else float("nan")
    return scores | {"impossible": float(v["impossible"].mean())}


def sequences(data: dict[str, Any], steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Runs of `steps` recorded steps: actions (steps, B, N), true states (steps + 1, B, L), over (steps + 1, B).

    An episode that ends sooner stays as it ended; one that the recording cuts off is left out.
    """
    order = np.lexsort((data["states"][:, T], data["episode"]))
    episode, end = data["episode"][order], data["end"][order]
    last = np.append(episode[1:] != episode[:-1], True)
    last_row = np.flatnonzero(last)[np.cumsum(last) - last]  # of the same episode
    starts = np.arange(len(order))
    starts = starts[(starts + steps - 1 <= last_row) | end[last_row]]
    actions, states, over = [], [data["states"][order[starts]]], [np.zeros(len(starts), bool)]
    for step in range(steps):
        row = starts + step
        within = row <= last_row[starts]
        row = order[np.minimum(row, last_row[starts])]
        actions.append(np.where(within[:, None], data["actions"][row], STAY))
        states.append(np.where(within[:, None], data["next_states"][row], states[-1]))
        over.append(over[-1] | (within & data["end"][row]))
    return np.stack(actions), np.stack(states), np.stack(over)


def error_growth(model: WorldModel | PlanesModel, data: dict[str, Any], steps: int = 10) -> dict[str, list[float]]:
    """Imagine recorded action sequences: after 1..steps steps, the share of boards that are exact, of runs that were
    exact (board and end) all the way, of misplaced players, and of ends that are right."""
    actions, states, over = sequences(data, steps)
    if not len(states[0]):
        return {}
    out = rollout(model, states[0], actions, steps)
    same = (out.states[:, :, PLAYERS:] == states[:, :, PLAYERS:]).all(2)
    so_far = np.logical_and.accumulate(same & (out.done == over), axis=0)
    seats = slice(PLAYERS, PLAYERS + model.game.num_players)
    misplaced = (out.states[:, :, seats] != states[:, :, seats]).mean((1, 2))
    return {
        "exact": same[1:].mean(1).tolist(), "all_exact": so_far[1:].mean(1).tolist(), "runs": [same.shape[1]] * steps,
        "misplaced": misplaced[1:].tolist(), "ends_right": (out.done == over)[1:].mean(1).tolist(),
    }  # fmt: skip


def show(title: str, scores: dict[str, Any]) -> str:
    return (
        f"[{title}] exact {scores['exact']:.5f}, on rewarded steps {scores['exact_rewarded']:.5f};"
        f" obs MSE {scores['obs_mse']:.2e} (PSNR {scores['psnr']:.1f} dB); reward MSE {scores['reward_mse']:.2e};"
        f" ends {scores['end_accuracy']:.5f}; impossible {scores['impossible']:.5f}"
    )


# checkpoints


def make_model(sizes: dict[str, Any], game: GridGame) -> WorldModel | PlanesModel:
    return (PlanesModel if sizes["planes"] else WorldModel)(sizes, game)


def load_checkpoint(folder: str | Path, spec: EnvSpec | None = None) -> tuple[WorldModel | PlanesModel, dict[str, Any]]:
    """A trained model (in eval mode) and its spec. With `spec` of the env at hand, refuses one made for another."""
    folder = Path(folder)
    found = read_spec(folder, "world_model", spec)
    sizes, config = found.get("sizes"), found.get("config")
    values = sizes.get("reward_values") if isinstance(sizes, dict) else None
    good = isinstance(values, list) and 0 < len(values) <= MAX_REWARD_VALUES
    good = good and all(type(value) in (int, float) and abs(value) < 1e9 for value in values)
    good = good and type(sizes.get("planes")) is bool and type(sizes.get("hidden")) is int
    if not good or not 0 < sizes["hidden"] <= 8192:
        raise ConfigError(f"'{folder / 'spec.json'}' has no usable sizes: {str(sizes)[:200]}")
    board = [config.get(name) for name in ("height", "width", "num_players")] if isinstance(config, dict) else [None]
    if not all(type(size) is int and 0 < size <= 1000 for size in board):
        raise ConfigError(f"'{folder / 'spec.json'}' has no usable board: {str(config)[:200]}")
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in config.items()}
    game = envs.game(str(found.get("env_id")), **settings)
    return load_weights(lambda: make_model(sizes, game), folder / "weights.safetensors"), found


def find_checkpoint(out_dir: str | Path, spec: EnvSpec | None = None, planes: bool | None = False) -> Path | None:
    """The newest checkpoint under `out_dir` that fits this env (any, without `spec`) and model (planes=None: any)."""
    folders = Path(out_dir).glob("world_model__*")
    return newest(folders, lambda f: planes in (None, read_spec(f, "world_model", spec)["sizes"]["planes"]))


# the world as HOP+ without trees uses it


class Ahead(NamedTuple):
    """What a world says of one step of each row."""

    states: np.ndarray  # (B, L) int16
    reward: np.ndarray  # (B, N)
    ended: np.ndarray  # (B, N) bool: of players that took part: left, or the episode is over
    over: np.ndarray  # (B,) bool


Raw = Callable[..., tuple[np.ndarray, np.ndarray]]  # states (B, L), row (M,), player (M,) -> policies, values (M,)


class World:
    """A learned world model, or (model None) the rules themselves, behind one function."""

    def __init__(self, game: GridGame, model: WorldModel | PlanesModel | None):
        self.game, self.model = game, model

    def step(self, states: np.ndarray, actions: np.ndarray) -> Ahead:
        """States (B, L) of running episodes, legal actions (B, N) -> what follows."""
        game, alive = self.game, self.game.alive(states)
        if self.model is None:
            out = game.simulate(states, actions, trusted=True)
            ended = out.terminated | out.truncated
            return Ahead(out.states, out.reward, ended, (ended | ~game.alive(out.states)).all(1))
        chunks = [slice(first, first + WORLD_ROWS) for first in range(0, max(1, len(states)), WORLD_ROWS)]
        parts = [self.model.imagine(states[rows], actions[rows]) for rows in chunks]
        after, reward, over = (np.concatenate(column) for column in zip(*parts, strict=True))
        over |= ~game.alive(after).any(1)
        if game.config.prosocial:  # the model pays selfish rewards
            reward = np.where(alive, reward.mean(1, keepdims=True), 0.0).astype(np.float32)
        return Ahead(after, reward, alive & (over[:, None] | ~game.alive(after)), over)

    def step_once(self, states: np.ndarray, row: np.ndarray, actions: np.ndarray) -> tuple[Ahead, np.ndarray]:
        """What follows actions (M, N) in states[row[m]], each distinct step imagined once, and which one is m's."""
        size = self.game.num_actions ** np.arange(actions.shape[1] + 1)
        _, first, which = np.unique(row * size[-1] + actions @ size[:-1], return_index=True, return_inverse=True)
        return self.step(states[row[first]], actions[first]), which

    def ways_on(
        self, states: np.ndarray, player: np.ndarray, steps: int, reward_scale: float, gamma: float, raw: Raw
    ) -> tuple[np.ndarray, np.ndarray]:
        """(R, A) what each legal action is worth to player[r], alone on the board states[r], on the best way from there
        until time is up (illegal ones 0), and (R, A) a policy: the best action, or one of several as good. Whoever is
        alone can come back to a board, so each that can be reached in so many steps is imagined once, as of now; those
        farther away have their `raw` value."""
        num, first, found = len(states), 0, []
        boards = np.column_stack([np.arange(num), states])  # (U, 1 + L): all so far, each with the row r it is for
        for _ in range(steps):
            root, here = boards[first:, 0], boards[first:, 1:].astype(np.int16)
            legal = self.game.legal(here, trusted=True)[np.arange(len(here)), player[root]]
            board, action = np.nonzero(legal)  # (W,) of each way on
            way, who = np.arange(len(board)), player[root[board]]
            joint = np.full((len(board), self.game.num_players), STAY)
            joint[way, who] = action
            ahead = self.step(here[board], joint)
            goes_on = ~ahead.ended[way, who]
            after = np.column_stack([root[board], ahead.states]).astype(boards.dtype)
            after[:, 1 + T] = here[board, T]
            after = np.concatenate([boards, after])
            _, index, which = np.unique(after.view(f"V{after.itemsize * after.shape[1]}"), True, True)
            like = index[which.ravel()][len(boards) :]  # the first that is the same
            new = np.unique(like[goes_on & (like >= len(boards))])
            to = np.where(like < len(boards), like, len(boards) + np.searchsorted(new, like)) * goes_on
            found.append((first + board, action, reward_scale * ahead.reward[way, who], goes_on, to))
            first, boards = len(boards), np.concatenate([boards, after[new]])
            if not len(new):
                break
        board, action, reward, goes_on, to = (np.concatenate(column) for column in zip(*found, strict=True))
        far, value = boards[first:], np.zeros(len(boards), np.float32)  # of boards with no step left
        value[first:] = raw(far[:, 1:].astype(np.int16), np.arange(len(far)), player[far[:, 0]])[1]
        steps_left, ways = self.game.config.horizon - boards[:first, 1 + T], np.searchsorted(board, np.arange(first))
        for passed in range(1, steps_left.max(initial=0)):
            best = np.maximum.reduceat(reward + gamma * goes_on * value[to], ways)
            best = np.where(passed < steps_left, best, value[:first])
            if (best == value[:first]).all():
                break
            value[:first] = best
        q_values, own = np.full((num, self.game.num_actions), -np.inf, np.float32), board < num
        q_values[board[own], action[own]] = (reward + gamma * goes_on * value[to])[own]
        best = (q_values >= q_values.max(1, keepdims=True) - 1e-5 * reward_scale).astype(np.float32)
        return np.where(np.isfinite(q_values), q_values, 0.0), best / best.sum(1, keepdims=True)


class ImaginedGames:
    """Real games and, in the rows after them, games that go on in a world model alone; looks like one env.

    An imagined game starts from a board of real play and lasts until it is over, or cut after `horizon` steps.
    """

    def __init__(self, env: Any, world: World | None, num_imagined: int, horizon: int, seed: int):
        self.env, self.world, self.game, self.spec, self.horizon = env, world, env.game, env.spec, horizon
        self.num_real, self.num_envs = env.num_envs, env.num_envs + num_imagined
        self.rng = np.random.default_rng(seed)
        self.boards = env.states.copy()  # (P, L) to start from
        self.imagined = self.boards[self.rng.integers(len(self.boards), size=num_imagined)]  # (B - num_real, L)
        self.age = np.zeros(num_imagined, np.int64)
        self.selfish = envs.game(env.spec.env_id, **env.spec.config | {"prosocial": False})  # as the world model learns
        self.played: list[tuple[np.ndarray, ...]] = []  # steps of the real games since `transitions` was asked
        self.look()

    def look(self) -> None:
        self.states = np.concatenate([self.env.states, self.imagined])
        self.legal, self.alive = self.game.legal(self.states, trusted=True), self.game.alive(self.states)
        self.t = self.states[:, T].astype(np.int64)

    def step(self, actions: np.ndarray) -> dict[str, Any]:
        """actions (B, N) -> reward, ended, taken (B, N), done, cut (B,); `after` (B - num_real, L) before any restart;
        `info` of the real games."""
        before, joint = self.env.states.copy(), actions[: self.num_real].copy()
        real = self.selfish.simulate(before, joint, trusted=True)  # the env itself starts anew where an episode ends
        _, reward, terminated, truncated, info = self.env.step(joint)
        self.played.append((before, joint, real.states, real.reward, info["done"].copy()))
        found = {"reward": reward, "ended": terminated | truncated, "taken": info["taken"], "done": info["done"]}
        found["cut"], after = np.zeros(self.num_real, bool), self.imagined
        if len(self.imagined):
            ahead = self.world.step(self.imagined, actions[self.num_real :])
            self.age += 1
            after = ahead.states
            late = after[:, T] >= self.game.config.horizon  # a model may forget the time limit
            cut = ~ahead.over & ((self.age >= self.horizon) | late)
            more = {"reward": ahead.reward, "ended": ahead.ended, "done": ahead.over | cut, "cut": cut}
            more["taken"] = np.zeros(ahead.ended.shape, np.int8)  # the model does not say
            found = {name: np.concatenate([x, more[name]]) for name, x in found.items()}
            restart = self.boards[self.rng.integers(len(self.boards), size=len(after))]
            self.imagined = np.where(more["done"][:, None], restart, after)
            self.age[more["done"]] = 0
        self.look()
        return found | {"after": after, "info": info}

    def transitions(self) -> dict[str, np.ndarray]:
        """What a world model can learn from the steps of the real games since the last call."""
        columns = [np.concatenate(column) for column in zip(*self.played, strict=True)]
        self.played = []
        return dict(zip(("states", "actions", "next_states", "reward", "end"), columns, strict=True))

    def get_state(self) -> dict[str, np.ndarray]:
        own = {"imagined": self.imagined, "age": self.age, "rng": pack_generator(self.rng)}
        return {f"env.{name}": array for name, array in self.env.get_state().items()} | own

    def set_state(self, saved: dict[str, np.ndarray]) -> None:
        self.env.set_state({k.removeprefix("env."): x for k, x in saved.items() if k.startswith("env.")})
        self.imagined, self.age[:] = saved["imagined"], saved["age"]
        unpack_generator(self.rng, saved["rng"])
        self.look()


def score_fresh(model: WorldModel | PlanesModel, data: dict[str, np.ndarray]) -> dict[str, float]:
    """The world model on transitions it has not learned from yet."""
    game, states = model.game, data["states"]
    after, reward, end = model.imagine(states, data["actions"])
    alive, paid = game.alive(states), (data["reward"] != game.config.time_reward).any(1)
    exact = (after[:, PLAYERS:] == data["next_states"][:, PLAYERS:]).all(1)
    order = np.flatnonzero(alive[:, 0])  # as seen by player 1
    planes = [to_planes(*from_states(x[order], game)[:2], game) for x in (states, after)]
    result = {"exact": exact.mean(), "reward_mse": ((reward - data["reward"])[alive] ** 2).mean()}
    result |= {"end_accuracy": (end == data["end"]).mean()}
    result |= {"impossible": impossible(*planes, game).float().mean().item()}
    if paid.any():
        result["exact_rewarded"] = exact[paid].mean()
    return {f"wm/{name}": float(x) for name, x in result.items()}


def prepare(folder: str, env_id: str, seed: int) -> tuple[Path, WorldModel | PlanesModel]:
    """The checkpoint asked for, the newest structured one that fits, or one made now: its folder and model."""
    spec = envs.spec(env_id)
    found = folder or find_checkpoint("vae_ckpts", spec, planes=False)
    if not found:
        print(f"no world model for {env_id} in vae_ckpts/: making one with train_world_model.py", flush=True)
        found = train(Args(env_id=env_id, seed=seed))
    return Path(found), load_checkpoint(found, spec)[0]


def model_for(run: Run, args: Any) -> WorldModel | PlanesModel:
    """Of a run that begins: as it says; of one that goes on: the same network, to be filled from its checkpoint."""
    if run.resumed:  # learned with selfish rewards
        return make_model(run.spec["world_sizes"], envs.game(args.env_id, max_block_comp=args.max_block_comp))
    wanted = str(run.facts.get("world_model", args.world_ckpt))  # of a run that was killed before its first save
    folder, model = prepare(wanted, args.env_id, args.seed)
    run.record(world_model=str(folder.resolve()))
    return model


def loss_of(model: WorldModel | PlanesModel, mb: dict[str, Tensor]) -> Tensor:
    """The loss on rows of transitions, all parts of it together."""
    mb = move(tensors({name: x.numpy() for name, x in mb.items()}, model.game), device_of(model))
    return sum(model.loss(mb, torch.ones(model.game.obs_shape[2], device=device_of(model))).values())


def rehearsal(game: GridGame, num: int, seed: int) -> dict[str, np.ndarray]:
    """Steps of rule-based play, so that the world model does not forget what the learners no longer do."""
    plain = envs.game(game.env_id)
    data = collect_transitions(plain, list(default_lineups(plain)), 0.1, num, np.random.SeedSequence(seed), quiet=True)
    return {name: data[name] for name in ("states", "actions", "next_states", "reward", "end")}


# training


def default_lineups(game: GridGame) -> tuple[str, ...]:
    return ("random", "mix", *game.seekers)


def train(args: Args) -> Path:
    """The whole experiment; returns the folder of the checkpoint."""
    check_ranges(args)
    torch.set_num_threads(args.torch_threads)
    start = time.perf_counter(), time.process_time()

    # seeding
    play_seed, split_seed, torch_seed = np.random.SeedSequence(args.seed).spawn(3)
    torch.manual_seed(int(torch_seed.generate_state(1)[0]))

    # env setup
    game = envs.game(args.env_id)
    weights = torch.tensor(args.channel_weights or (1.0,) * game.obs_shape[2])
    if len(weights) != game.obs_shape[2] or not ((weights >= 0) & (weights <= 1e6)).all():
        given = ", ".join(map(str, args.channel_weights))
        raise ConfigError(f"--channel-weights needs a weight for each of {', '.join(game.plane_names)}, not {given}")

    # data
    if args.data:
        data = load_transitions(args.data, game)
    else:
        print(f"[DATA] {args.env_id}: playing {args.num_transitions} transitions")
        lineups = [*(args.lineups or default_lineups(game)), *([args.policy] if args.policy else [])]
        data = collect_transitions(game, lineups, args.noise, args.num_transitions, play_seed)
    folder = fresh_folder(args.out_dir, "world_model")
    if not args.data:
        save_data(Path(args.out_dir) / "data" / f"{args.env_id}__{folder.name}.npz", data)
    in_val = split_episodes(data["episode"], args.val_share, split_seed)
    held_out = {name: data[name][in_val] for name in TRANSITIONS}
    train_batch = tensors({name: data[name][~in_val] for name in TRANSITIONS}, game)
    paid = train_batch["reward"][train_batch["cells"] != GONE].double().numpy()
    values = np.unique(paid.round(4))
    if len(values) > MAX_REWARD_VALUES:
        raise ConfigError(f"{args.env_id} paid {len(values)} different rewards, more than {MAX_REWARD_VALUES}")
    num = len(train_batch["end"])
    print(f"[DATA] train {num}, held out {in_val.sum()} transitions of other episodes; {len(values)} reward values")

    # network
    sizes = {"planes": args.planes, "hidden": args.hidden_size, "reward_values": [round(float(v), 4) for v in values]}
    model = make_model(sizes, game)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * -(-num // args.batch_size))

    history: list[dict[str, float]] = []
    for epoch in tqdm(range(1, args.epochs + 1), desc="epochs", disable=not sys.stderr.isatty()):
        # update
        model.train()
        sums: dict[str, float] = {}
        for mb_rows in torch.randperm(num).split(args.batch_size):
            parts = model.loss({name: column[mb_rows] for name, column in train_batch.items()}, weights)
            optimizer.zero_grad()
            sum(parts.values()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            for name, part in parts.items():
                sums[name] = sums.get(name, 0.0) + part.item() * len(mb_rows) / num
        if not np.isfinite(sum(sums.values())):
            raise FloatingPointError(f"a loss is not finite in epoch {epoch}: {sums}; try a smaller --learning-rate")

        # evaluation and logging
        model.eval()
        scores = judge(model, held_out)
        print(show(f"WM epoch {epoch}", scores))
        row = dict(zip(("epoch", "wall_time", "cpu_time"), (epoch, *since(start)), strict=True))
        row |= {f"losses/{name}": value for name, value in sums.items()}
        history.append(row | {f"wm/{name}": value for name, value in scores.items() if isinstance(value, float)})
    growth = error_growth(model, held_out)
    if growth:
        shares = ", ".join(f"{share:.4f}" for share in growth["all_exact"])
        print(f"[WM] {growth['runs'][0]} imagined runs, exact all the way after 1..10 steps: {shares}")
    for value, figures in scores["reward_by_value"].items():
        print(f"[WM] reward {value}: {figures['count']} times, MSE {figures['mse']:.2e}, exact {figures['exact']:.4f}")
    write_metrics(folder / "metrics.csv", history)

    # checkpoint
    scores = json.loads(json.dumps({**scores, "imagined": growth}), parse_constant=lambda _: None)
    about = describe("world_model", __file__, args, game.spec())
    save_checkpoint(folder, model, about | {"sizes": sizes, "scores": scores})
    print("[DONE] {:.0f} s ({:.0f} s of one core); checkpoint {}".format(*since(start), folder))
    return folder


if __name__ == "__main__":
    sys.exit(main(Args, train))
