"""MAPPO for teams, and a hypernetwork that moves its actor's weights at every step.

MAPPO (Yu et al. 2022): one recurrent actor shared by all agents, a centralised critic that sees the state, value
normalisation, PPO's clip and GAE. With the hypernetwork, what the team sees and has lately done (attention over agents,
LSTM over time) gives changes of the actor's weights, theta_t = theta_base + dtheta_t, held smooth in time (L_smooth)
and near those of a slowly moving copy (L_align). The update evaluates the whole policy, memory and hypernetwork
included, by the very lines that acted. `--no-hyper` is exactly MAPPO. A fallen agent is in no loss, mean or
normalisation of the policy; time running out bootstraps, an end by the rules does not. More: docs/mappo_hyper.md

    python mappo_hyper.py --env-id smac-3m --seed 1                         # hyper-MAPPO on 3 against 3 marines
    python mappo_hyper.py --env-id smac-2s3z --no-hyper                     # MAPPO
    python mappo_hyper.py --env-id smac-8m --hyper-input local              # without communication
    python mappo_hyper.py --env-id mpe-simple-spread --continuous           # pip install mpe2
    python mappo_hyper.py --env-id msh-4h1s-8x8 --num-steps 32 --start-window 3 --initial-value 6 --gamma 0.97 \\
        --ent-coef 0.05 --total-timesteps 200000                            # everybody for itself: Stag Hunt
    python mappo_hyper.py --resume runs/smac-3m__mappo_hyper__1__1700000000
"""

import copy
import csv
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from safetensors.torch import load_file, save_file
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

import envs


@dataclass
class Args:
    # run
    exp_name: str = "mappo_hyper"
    """name of this experiment, part of the run folder's name"""
    seed: int = 1
    """seed of everything: env, policy, minibatches, evaluation"""
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
    eval_every: int = 100_000
    """env steps between two evaluations (0: only at the end)"""
    eval_episodes: int = 256
    """episodes of each evaluation during training"""
    final_eval_episodes: int = 256
    """episodes of the evaluations at the end"""
    checkpoint_every: int = 20
    """iterations between two saves of checkpoints/last"""

    # env
    env_id: str = "smac-3m"
    """which game to play: a battle (smac-...), a grid game (msh-...) or mpe-simple-spread"""
    num_envs: int = 128
    """games played side by side"""
    start_jitter: float = 0.0
    """battles: start positions move by up to this much, anew in each episode (0: always the same start)"""
    start_window: int = 0
    """grid games, start curriculum: side of the square in which some episodes start (0: off)"""
    start_window_prob: float = 0.9
    """probability of such a start at the beginning of training, decaying linearly"""
    start_window_until: float = 0.5
    """share of training after which all episodes start as in the true game"""
    continuous: bool = False
    """mpe-simple-spread: forces instead of five discrete actions"""

    # algorithm
    total_timesteps: int = 1_000_000
    """env steps of the whole run (one step moves all agents of one game)"""
    num_steps: int = 64
    """steps per game and iteration"""
    chunk_length: int = 16
    """steps of the sequences that the update learns from, each from the memory that was stored at its start"""
    learning_rate: float = 7e-4
    """Adam's learning rate of actor and critic at the start"""
    anneal_lr: bool = True
    """bring the learning rates linearly to zero"""
    gamma: float = 0.99
    """discount"""
    gae_lambda: float = 0.95
    """lambda of generalised advantage estimation"""
    num_minibatches: int = 4
    """minibatches per epoch"""
    update_epochs: int = 5
    """passes over each batch"""
    norm_adv: bool = True
    """normalise the advantages of each batch"""
    clip_coef: float = 0.2
    """PPO's clip range"""
    clip_vloss: bool = False
    """clip the value loss too"""
    huber_delta: float = 0.0
    """value errors beyond this many (normalised) units count linearly (0: squared error)"""
    value_norm: Literal["popart", "running", "none"] = "popart"
    """values in units of the returns' running mean and deviation; popart keeps the critic's answers when these move"""
    ent_coef: float = 0.01
    """weight of the entropy bonus at the start"""
    ent_coef_final: float = 0.0
    """weight of the entropy bonus at the end, reached linearly"""
    perturbation: float = 0.0
    """exploration: share of uniformly random legal actions (continuous: extra noise), falling linearly to zero"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 10.0
    """largest gradient norm, of actor, critic and hypernetwork each"""
    initial_value: float = 0.0
    """what the critic expects before it has learned; optimism makes a hare a disappointment until stags are known"""
    hidden: int = 64
    """width of the actor's layers and of its memory"""
    critic_hidden: int = 128
    """width of the critic's layers"""
    critic_input: Literal["state", "agent"] = "state"
    """state: one value for the team; agent: one per agent, from the state, its own observation and its id"""
    critic_recurrent: bool = False
    """give the critic a memory too"""
    agent_id: bool = True
    """tell the actor which agent it is"""
    layer_norm: bool = True
    """normalise the features of the actor's layers"""

    # hypernetwork
    hyper: bool = True
    """move the actor's weights by a hypernetwork (--no-hyper: MAPPO)"""
    hyper_input: Literal["joint", "local", "id"] = "joint"
    """what it sees: all agents (needs communication in play), the own agent, or only which agent it is"""
    hyper_layers: Literal["last", "all"] = "last"
    """which weights it moves: the last layer (and scales of the others), or all layers outside the memory"""
    hyper_share: bool = False
    """one change for the whole team instead of one per agent"""
    delta: Literal["base", "cumulative"] = "base"
    """weights are base + change, or base + a sum of changes that fades within an episode"""
    decay: float = 0.9
    """what is left of the cumulative change after each step"""
    hyper_rank: int = 8
    """rank of a generated weight change, one factor learned and one generated (0: whole matrices are generated)"""
    hyper_hidden: int = 32
    """width of the hypernetwork"""
    hyper_heads: int = 2
    """heads of the attention over agents"""
    hyper_attention: bool = True
    """joint input: attention over the living agents (off: their mean)"""
    hyper_history: bool = True
    """an LSTM over the episode with last actions and reward (off: the current step only)"""
    hyper_agent_id: bool = False
    """joint and local input: also tell it which agent it is"""
    hyper_lr: float = 1e-4
    """the hypernetwork's learning rate at the start"""
    smooth_coef: float = 0.1
    """alpha, weight of L_smooth: mean squared change of the generated weights between neighbouring steps"""
    align_coef: float = 0.05
    """beta, weight of L_align: KL(policy by the target hypernetwork || policy)"""
    target_every: int = 100
    """K, gradient steps after which the target hypernetwork becomes a copy of the current one"""

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        return max(1, self.total_timesteps // self.batch_size)


LOSSES = ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac")
ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")
SCALES = 8  # groups of units with a scale of their own, in layers that are scaled and not changed


# env


def make_env(args: Args, num_envs: int, seed: int):
    """The batched env of a run."""
    is_battle, is_particles = args.env_id.startswith(("smac-", "smaclite-")), args.env_id.startswith("mpe-")
    if args.continuous and not is_particles:
        raise envs.ConfigError(f"--continuous is for mpe-simple-spread only; {args.env_id} has discrete actions")
    if args.start_jitter and not is_battle:
        raise envs.ConfigError(f"--start-jitter is for battles only, not for {args.env_id}")
    if args.start_window and (is_battle or is_particles):
        raise envs.ConfigError(f"--start-window is for grid games only, not for {args.env_id}")
    if is_particles:
        from envs.particles import ParticleEnv

        return ParticleEnv(args.env_id, num_envs, seed, args.continuous)
    return envs.make(args.env_id, num_envs, seed, **({"start_jitter": args.start_jitter} if args.start_jitter else {}))


class Nearby:
    """Turns the planes of a grid game into the own place and where each thing is from there, the nearest of its plane
    first: whether it is there, steps down and across as share of the board and as signs, and whether it is on the own
    cell. A layer on the planes themselves would have to learn every pair of cells by itself."""

    def __init__(self, game):
        height, width, _ = game.obs_shape
        rows, columns = np.divmod(np.arange(height * width), width)
        down, across = rows - rows[:, None], columns - columns[:, None]  # (own cell, cell)
        distance = abs(down) + abs(across)
        sight = [distance >= 0, down / height, across / width, np.sign(down), np.sign(across), distance == 0]
        self.nearest = distance.argsort(1, kind="stable")  # (own cell, rank)
        self.sight = np.take_along_axis(np.stack(sight, 2).astype(np.float32), self.nearest[:, :, None], 1)
        self.place = np.stack([rows >= 0, rows / height, columns / width], 1).astype(np.float32)
        self.slots = [1] * (game.num_players - 1) + [4 * game.config.max_block_comp, *game.item_counts.tolist()]
        self.size = 3 + 6 * sum(self.slots)

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        """obs (B, N, H, W, planes) of 0/1, own plane first -> (B, N, size); zeros for who has left"""
        flat = obs.reshape(obs.shape[0] * obs.shape[1], -1, obs.shape[-1])
        present, own = flat[:, :, 0].any(1), flat[:, :, 0].argmax(1)
        near, parts = np.take_along_axis(flat, self.nearest[own][:, :, None], 1), [self.place[own]]
        for plane, slots in enumerate(self.slots, start=1):
            things = near[:, :, plane]  # (rows, rank)
            ranks = (things == 0).argsort(1, kind="stable")[:, :slots]
            seen = self.sight[own[:, None], ranks] * np.take_along_axis(things, ranks, 1)[:, :, None]
            parts.append(seen.reshape(len(flat), -1))
        return (np.concatenate(parts, 1) * present[:, None]).reshape(*obs.shape[:2], self.size)


class Game:
    """One face for battles, grid games and particle games: sizes, and what the networks see, as tensors.

    In a team game (`team`) all agents earn the same, fallen ones too, until the episode ends; in a grid game everybody
    earns for itself until it leaves. A grid game's state is the own observation: all of the board.
    """

    def __init__(self, env):
        spec, self.env = env.spec, env
        self.team, self.is_battle = not hasattr(env, "game"), "battle_won" in env.info
        self.num_agents, self.num_actions = spec.num_players, spec.num_actions
        self.continuous = bool(getattr(env, "continuous", False))
        self.nearby = None if self.team else Nearby(env.game)
        self.features = int(np.prod(spec.obs_shape)) if self.team else self.nearby.size + 1
        self.obs_size = 8 * -(-self.features // 8)  # zeros behind, so that products are rounded alike in every batch
        self.state_size = spec.state_shape[0] if self.team else 0

    def flat(self, obs: np.ndarray, t: np.ndarray) -> torch.Tensor:
        """obs (B, N, ...) -> (B, N, D). Grid games add the time; nobody acts at the horizon, so a final observation
        counts as one step earlier."""
        flat = torch.zeros(*obs.shape[:2], self.obs_size)
        if self.team:
            flat[:, :, : self.features] = torch.from_numpy(obs)
        else:
            flat[:, :, : self.features - 1] = torch.from_numpy(self.nearby(obs))
            share = np.minimum(t, self.env.spec.horizon - 1) / self.env.spec.horizon
            flat[:, :, self.features - 1] = torch.from_numpy(share)[:, None]
        return flat

    def state_of(self, state: np.ndarray | None) -> torch.Tensor:
        return torch.from_numpy(state.copy()) if self.team else torch.zeros(self.env.num_envs, 0)

    def look(self) -> dict[str, torch.Tensor]:
        """obs (B, N, D), state (B, S), legal (B, N, A), alive (B, N) of the current step."""
        env = self.env
        seen = {"obs": self.flat(env.obs, env.t), "state": self.state_of(env.state if self.team else None)}
        return seen | {"legal": torch.from_numpy(env.legal.copy()), "alive": torch.from_numpy(env.alive.copy())}

    def final(self, info: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """The same, as far as a critic needs it, of the last step of the episodes that are done."""
        seen = {"obs": self.flat(info["final_obs"], info["episode_length"])}
        return seen | {"state": self.state_of(info["final_state"] if self.team else None)}

    def reward(self) -> np.ndarray:
        """(B, N) of the last step"""
        env = self.env
        return env.out.reward if not self.team else env.battles.reward if hasattr(env, "battles") else env.reward

    def orders(self, actions: torch.Tensor) -> np.ndarray:
        """Actions as the env takes them: -1..1 becomes 0..1 for forces."""
        return ((actions.clamp(-1, 1) + 1) / 2 if self.continuous else actions).numpy()


# networks


def linear(rows: int, columns: int, gain: float, generator: torch.Generator) -> nn.Linear:
    """A layer with orthogonal weights and no bias at the start."""
    layer = nn.Linear(rows, columns)
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer


class Recurrent(nn.Module):
    """A GRU or an LSTM over (L, R, F) that starts anew where an episode does. What does not depend on memory is
    computed for all steps at once; a row's result does not depend on the other rows, down to the last bit."""

    def __init__(self, kind: Literal["gru", "lstm"], size: int, hidden: int, generator: torch.Generator):
        super().__init__()
        self.kind, self.hidden, gates = kind, hidden, {"gru": 3, "lstm": 4}[kind]
        self.from_input = linear(size, gates * hidden, 1.0, generator)
        self.from_memory = linear(hidden, gates * hidden, 1.0, generator)

    def forward(self, x: torch.Tensor, first: torch.Tensor, memory: tuple[torch.Tensor, ...]):
        """x (L, R, F), first (L, R) bool, memory (R, H) or two of them -> outputs (L, R, H), memory"""
        cell, outputs = self.gru if self.kind == "gru" else self.lstm, []
        inputs, keep, resets = self.from_input(x).unbind(), (~first[:, :, None]).float(), first.any(1).tolist()
        for step, reset in enumerate(resets):
            if reset:
                memory = tuple(part * keep[step] for part in memory)
            memory = cell(inputs[step], *memory)
            outputs.append(memory[0])
        return torch.stack(outputs), memory

    def gru(self, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor]:
        sizes = (2 * self.hidden, self.hidden)
        (gates_x, new_x), (gates_h, new_h) = x.split(sizes, dim=1), self.from_memory(h).split(sizes, dim=1)
        reset, update = torch.sigmoid(gates_x + gates_h).chunk(2, dim=1)
        new = torch.tanh(new_x + reset * new_h)
        return (torch.lerp(new, h, update),)

    def lstm(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gates, new = (x + self.from_memory(h)).split((3 * self.hidden, self.hidden), dim=1)
        take, forget, show = torch.sigmoid(gates).chunk(3, dim=1)
        c = forget * c + take * torch.tanh(new)
        return show * torch.tanh(c), c


class Actor(nn.Module):
    """Two layers, a GRU and a last layer; a hypernetwork's changes come as one vector per row and layer.

    The layers outside the memory are numbered 0, 1, 2. A changed layer is x -> x (W + dW) + b + db, with dW = U G of a
    learned U and a generated G, or dW = G where the rank is 0; a scaled one is (1 + s) times itself, in SCALES groups.
    """

    def __init__(self, args: Args, game: Game, generator: torch.Generator):
        super().__init__()
        self.num_agents, self.num_actions, self.continuous = game.num_agents, game.num_actions, game.continuous
        # a multiple of 8 columns: otherwise a row's product is rounded by its place in the batch, and ratios are not 1
        hidden, columns = args.hidden, 8 * -(-game.num_actions // 8)
        rows, self.columns = (game.obs_size, hidden, hidden), (hidden, hidden, columns)
        gains = (2**0.5, 2**0.5, 0.01)
        self.layers = nn.ModuleList(
            linear(r, c, g, generator) for r, c, g in zip(rows, self.columns, gains, strict=True)
        )
        self.memory = Recurrent("gru", hidden, hidden, generator)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) if args.layer_norm else nn.Identity() for _ in range(3))
        self.ids = (
            nn.Parameter(torch.randn(game.num_agents, hidden, generator=generator) * 0.1) if args.agent_id else None
        )
        self.log_std = nn.Parameter(torch.full((game.num_actions,), -0.5)) if game.continuous else None

    def plan_changes(self, args: Args) -> list[int]:
        """How many numbers a hypernetwork generates for each layer: a change (rank and a bias), or scales."""
        self.changed = (0, 1, 2) if args.hyper_layers == "all" else (2,)
        self.ranks = [min(args.hyper_rank, layer.in_features) or layer.in_features for layer in self.layers]
        plan = zip(self.ranks, self.columns, strict=True)
        return [(rank + 1) * columns if k in self.changed else SCALES for k, (rank, columns) in enumerate(plan)]

    def layer(
        self, k: int, x: torch.Tensor, change: torch.Tensor | None, factors: nn.ModuleDict | None
    ) -> torch.Tensor:
        """Layer k on x (L, C, N, F), changed by (L, C, M, size of its change), M agents or one for all."""
        y = self.layers[k](x)
        if change is None:
            return y
        if k not in self.changed:
            return (y.view(*y.shape[:3], SCALES, -1) * (1 + change[..., None])).view_as(y)
        agents, low = self.num_agents // change.shape[2], factors[str(k)](x) if str(k) in factors else x
        low = F.pad(low, (0, 1), value=1.0).view(-1, agents, self.ranks[k] + 1)  # a one for the bias
        change = change.reshape(-1, self.ranks[k] + 1, self.columns[k])  # (L * C * M, rank and bias, columns)
        if agents == 1 and self.ranks[k] <= 16:  # vectors times small matrices: twice as fast as bmm
            return y + (low.transpose(1, 2) * change).sum(1).view_as(y)
        return y + torch.bmm(low, change).view_as(y)

    def forward(self, obs, first, memory, changes=None, factors=None):
        """obs (L, C, N, D), first (L, C), memory (C, N, H), changes of each layer (L, C, M, ...) -> logits, memory"""
        length, chunks, agents = obs.shape[:3]
        parts = changes or (None, None, None)
        x = self.layer(0, obs, parts[0], factors)
        x = self.norms[0](torch.relu(x if self.ids is None else x + self.ids))
        x = self.norms[1](torch.relu(self.layer(1, x, parts[1], factors)))
        first = first[:, :, None].expand(length, chunks, agents).reshape(length, -1)
        x, (memory,) = self.memory(x.view(length, chunks * agents, -1), first, (memory.flatten(0, 1),))
        x = self.norms[2](x).view(length, chunks, agents, -1)
        return self.layer(2, x, parts[2], factors), memory.view(chunks, agents, -1)


class Hypernetwork(nn.Module):
    """From what is seen to a code (W) per agent, or one for the team; `outputs` turn it into weight changes (P).

    joint: every agent's observation through one layer and attention over the living agents; their mean, with the last
    joint action and reward, feeds the team's LSTM; a code joins that with the own attention. local: an LSTM for each
    agent, fed with its own observation, last action and reward. id: a table, whatever is seen. The output layer has no
    bias and starts near zero, so that training starts as MAPPO.
    """

    def __init__(self, args: Args, game: Game, actor: Actor, generator: torch.Generator):
        super().__init__()
        width, agents, self.heads = args.hyper_hidden, game.num_agents, args.hyper_heads
        self.joint, self.num_codes = args.hyper_input == "joint", 1 if args.hyper_share else agents
        self.decay = args.decay if args.delta == "cumulative" else None
        self.table = self.ids = self.attend = self.memory = None
        if args.hyper_input == "id":
            self.table = nn.Parameter(torch.randn(agents, width, generator=generator))
        else:
            self.embed = linear(game.obs_size, width, 2**0.5, generator)
            self.ids = (
                nn.Parameter(torch.randn(agents, width, generator=generator) * 0.1) if args.hyper_agent_id else None
            )
            if self.joint:
                self.attend = linear(width, 2 * width, 1.0, generator) if args.hyper_attention else None
                self.team = linear(width, width, 1.0, generator)
            if args.hyper_history:
                size = (game.num_actions + 1) * (agents if self.joint else 1)
                self.last = linear(size, width, 1.0, generator)
                self.memory = Recurrent("lstm", width, width, generator)
        self.own = linear(width, width, 2**0.5, generator) if self.memory is None or self.num_codes > 1 else None
        sizes, factors = actor.plan_changes(args), actor.changed if args.hyper_rank else ()
        self.factors = nn.ModuleDict(
            {str(k): nn.Linear(actor.layers[k].in_features, actor.ranks[k], bias=False) for k in factors}
        )
        self.outputs = nn.ModuleList(nn.Linear(width, size, bias=False) for size in sizes)
        for gain, layers in ((1.0, self.factors.values()), (0.01, self.outputs)):
            for layer in layers:
                nn.init.orthogonal_(layer.weight, gain, generator=generator)

    @property
    def output(self) -> torch.Tensor:
        """The whole output layer (P, W)."""
        return torch.cat([layer.weight for layer in self.outputs])

    def start(self, num_envs: int) -> dict[str, torch.Tensor]:
        """Memory before an episode, by name (C, rows, W)."""
        width, rows = self.outputs[0].in_features, {}
        if self.memory is not None:
            rows |= dict.fromkeys(("hyper_h", "hyper_c"), 1 if self.joint else self.num_codes)
        rows |= {"hyper_sum": self.num_codes} if self.decay is not None else {}
        return {name: torch.zeros(num_envs, count, width) for name, count in rows.items()}

    def over_agents(self, x: torch.Tensor, alive: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x (L, C, N, W) with what each agent has to know of the living, and the mean of the living (L, C, 1, W)."""
        shape, (agents, width) = x.shape, x.shape[2:]
        x, alive = x.reshape(-1, agents, width), alive.reshape(-1, 1, agents)
        mean = alive / alive.sum(2, keepdim=True).clamp_min(1)  # (L * C, 1, N), a weight for each agent
        if self.attend is None:
            x = x + self.team(mean @ x)
        else:
            query, key, value = (  # (L * C, heads, N, W / 2 / heads or W / heads)
                part.view(-1, agents, self.heads, part.shape[2] // self.heads).transpose(1, 2).contiguous()
                for part in self.attend(x).split((width // 2, width // 2, width), dim=2)
            )
            scores = query @ key.transpose(2, 3) / query.shape[3] ** 0.5
            weights = torch.softmax(scores.masked_fill(~alive[:, None], -1e9), dim=3)
            x = x + self.team((weights @ value).transpose(1, 2).reshape(x.shape))
        return x.view(shape), (mean @ x).view(*shape[:2], 1, width)

    def forward(self, seen: dict[str, torch.Tensor], states: dict[str, torch.Tensor]):
        """Steps (L, C, ...) as the rollout stores them -> codes (L, C, M, W), memory; M agents or one for all."""
        (length, chunks), after = seen["first"].shape, {}
        if self.table is not None:
            codes = torch.tanh(self.own(self.table)).expand(length, chunks, -1, -1)
        else:
            own = torch.relu(self.embed(seen["obs"]))
            own = team = own if self.ids is None else own + self.ids
            if self.joint:
                own, team = self.over_agents(own, seen["alive"])
            if self.num_codes == 1:
                own = team
            if self.memory is not None:
                team = team + self.last(seen["last"].flatten(2)[:, :, None] if self.joint else seen["last"])
                rows, first = team.shape[2], seen["first"].repeat_interleave(team.shape[2], dim=1)
                memory = tuple(states[name].flatten(0, 1) for name in ("hyper_h", "hyper_c"))
                team, memory = self.memory(team.reshape(length, chunks * rows, -1), first, memory)
                after = {name: x.view(chunks, rows, -1) for name, x in zip(("hyper_h", "hyper_c"), memory, strict=True)}
                team = team.view(length, chunks, rows, -1)
                codes = torch.tanh(team + self.own(own)) if self.own is not None else team
            else:
                codes = torch.tanh(self.own(own))
        if self.decay is not None:  # the output layer is linear: summing codes sums weight changes
            total, sums = states["hyper_sum"], []
            for code, new in zip(codes, seen["first"], strict=True):
                total = self.decay * total * ~new[:, None, None] + code
                sums.append(total)
            codes, after["hyper_sum"] = torch.stack(sums), total
        return codes, after


class Critic(nn.Module):
    """Values in normalised units: one for the team from the state, or one per agent from state, observation and id.

    Death masking: a fallen agent's critic sees nothing but its id, and so learns what the team earns without it.
    """

    def __init__(self, args: Args, game: Game, generator: torch.Generator):
        super().__init__()
        self.num_values = game.num_agents if args.critic_input == "agent" or not game.team else 1
        size = game.state_size + (game.obs_size if self.num_values > 1 else 0)
        self.first = linear(size, args.critic_hidden, 2**0.5, generator)
        self.memory = (
            Recurrent("gru", args.critic_hidden, args.critic_hidden, generator) if args.critic_recurrent else None
        )
        self.second = (
            None if args.critic_recurrent else linear(args.critic_hidden, args.critic_hidden, 2**0.5, generator)
        )
        self.head = linear(args.critic_hidden, 1, 1.0, generator)
        nn.init.constant_(self.head.bias, args.initial_value)
        self.ids = None
        if self.num_values > 1:
            self.ids = nn.Parameter(torch.randn(self.num_values, args.critic_hidden, generator=generator) * 0.1)
        self.register_buffer("moments", torch.zeros(3))  # of the returns: weight, sum, sum of squares
        self.value_norm = args.value_norm

    def forward(self, seen: dict[str, torch.Tensor], memory: torch.Tensor | None):
        """Steps (L, C, ...), memory (C, V, H) or None -> values (L, C, V), memory"""
        x = seen["state"][:, :, None]  # (L, C, 1, S)
        if self.ids is not None:
            x = x.expand(-1, -1, self.num_values, -1) * seen["alive"][..., None]
            x = self.first(torch.cat([x, seen["obs"]], dim=3)) + self.ids
        else:
            x = self.first(x)
        x, shape = torch.relu(x), x.shape[:3]
        if self.memory is None:
            return self.head(torch.relu(self.second(x)))[..., 0], None
        first = seen["first"][:, :, None].expand(shape).flatten(1)
        x, (memory,) = self.memory(x.view(shape[0], first.shape[1], -1), first, (memory.flatten(0, 1),))
        return self.head(x).view(shape), memory.view(*shape[1:], -1)

    def scale(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation of the returns seen so far (recent ones first)."""
        weight, total, squares = self.moments
        if self.value_norm == "none" or weight == 0:
            return torch.tensor(0.0), torch.tensor(1.0)
        mean = total / weight
        return mean, (squares / weight - mean**2).clamp_min(1e-4).sqrt()

    @torch.no_grad()
    def see_returns(self, returns: torch.Tensor, keep: float = 0.97) -> None:
        """Move the scale; popart: the last layer too, so that values in true units stay what they were."""
        (old_mean, old_std), count = self.scale(), torch.tensor(1.0)
        self.moments.mul_(keep).add_(torch.stack([count, returns.mean(), (returns**2).mean()]) * (1 - keep))
        mean, std = self.scale()
        if self.value_norm == "popart":
            self.head.weight.mul_(old_std / std)
            self.head.bias.mul_(old_std).add_(old_mean - mean).div_(std)


class Agent(nn.Module):
    """The actor, the critic and, if there is one, the hypernetwork."""

    def __init__(self, args: Args, game: Game, generator: torch.Generator):
        super().__init__()
        self.actor, self.critic = Actor(args, game, generator), Critic(args, game, generator)
        self.hyper = Hypernetwork(args, game, self.actor, generator) if args.hyper else None

    def start(self, num_envs: int) -> dict[str, torch.Tensor]:
        """Memory before an episode, by name (C, agents or rows, size)."""
        states = {"actor": torch.zeros(num_envs, self.actor.num_agents, self.actor.memory.hidden)}
        if self.critic.memory is not None:
            states["critic"] = torch.zeros(num_envs, self.critic.num_values, self.critic.memory.hidden)
        return states | (self.hyper.start(num_envs) if self.hyper is not None else {})

    def policy(
        self, seen: dict[str, torch.Tensor], states: dict[str, torch.Tensor], perturbation: float = 0.0, hyper=None
    ):
        """Steps (L, C, ...) and memory -> what describes the policy (L, C, N, ...), hypernetwork's codes, memory after.

        That is log-probabilities of the actions, or mean and log standard deviation of forces. Acting, learning and the
        reference policy (`hyper`: another hypernetwork) all go this way.
        """
        hyper, codes, changes, factors, after = hyper or self.hyper, None, None, None, {}
        if hyper is not None:
            codes, after = hyper(seen, states)
            changes, factors = [output(codes) for output in hyper.outputs], hyper.factors
        raw, after["actor"] = self.actor(seen["obs"], seen["first"], states["actor"], changes, factors)
        raw = raw[..., : self.actor.num_actions]
        if self.actor.continuous:
            log_std = self.actor.log_std
            if perturbation:
                log_std = 0.5 * torch.log(torch.exp(2 * log_std) + perturbation**2)
            return torch.cat([raw, log_std.expand_as(raw)], dim=3), codes, after
        legal = seen["legal"]
        log_probs = F.log_softmax(raw.masked_fill(~legal, -1e9), dim=3)
        if perturbation:
            uniform = legal / legal.sum(3, keepdim=True)
            log_probs = torch.log((1 - perturbation) * log_probs.exp() + perturbation * uniform + 1e-38)
        return log_probs, codes, after


# algorithm


def sample(policy: torch.Tensor, continuous: bool, generator: torch.Generator) -> torch.Tensor:
    """One action per row; an illegal action's log-probability is so low that it never wins (the Gumbel trick)."""
    if continuous:
        mean, log_std = policy.chunk(2, dim=-1)
        return mean + log_std.exp() * torch.randn(mean.shape, generator=generator)
    noise = torch.rand(policy.shape, generator=generator).clamp_min(1e-20)
    return (policy - torch.log(-torch.log(noise))).argmax(-1)


def log_prob_of(policy: torch.Tensor, actions: torch.Tensor, continuous: bool) -> torch.Tensor:
    if not continuous:
        return policy.gather(-1, actions[..., None])[..., 0]
    mean, log_std = policy.chunk(2, dim=-1)
    return (-0.5 * ((actions - mean) / log_std.exp()) ** 2 - log_std - 0.5 * np.log(2 * np.pi)).sum(-1)


def entropy_of(policy: torch.Tensor, continuous: bool) -> torch.Tensor:
    if continuous:
        return (policy.chunk(2, dim=-1)[1] + 0.5 + 0.5 * np.log(2 * np.pi)).sum(-1)
    return -(policy.exp() * policy.clamp_min(-1e8)).sum(-1)


def kl_between(policy: torch.Tensor, other: torch.Tensor, continuous: bool) -> torch.Tensor:
    """KL(policy || other) of each row."""
    if continuous:
        (mean, log_std), (other_mean, other_log_std) = policy.chunk(2, dim=-1), other.chunk(2, dim=-1)
        spread = (torch.exp(2 * log_std) + (mean - other_mean) ** 2) / torch.exp(2 * other_log_std)
        return (other_log_std - log_std + 0.5 * spread - 0.5).sum(-1)
    return (policy.exp() * (policy - other)).sum(-1)


def advantages_of(reward, value, next_value, counted, terminated, truncated, gamma: float, lam: float) -> torch.Tensor:
    """GAE; all (T, B, V). next_value is the value of what follows a step: after a time limit, of the final observation.

    An end by the rules cuts both the bootstrap and the sum, a time limit only the sum. Zero where nobody is counted.
    """
    advantages = torch.zeros_like(reward)
    following = torch.zeros_like(reward[0])
    for step in reversed(range(len(reward))):
        delta = reward[step] + gamma * next_value[step] * ~terminated[step] - value[step]
        following = (delta + gamma * lam * ~(terminated[step] | truncated[step]) * following) * counted[step]
        advantages[step] = following
    return advantages


def mean_square(codes: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Mean square of the weight changes that codes (..., W) give by an output layer (P, W), without making them."""
    return (codes @ (output.T @ output / len(output)) * codes).sum(-1)


def smoothness(codes: torch.Tensor, output: torch.Tensor, first: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
    """L_smooth: mean squared change of the generated weights from one step to the next of an episode.

    codes (L, C, M, W), output (P, W), first (L, C), alive (L, C, N)
    """
    same = ~first[1:, :, None].expand(-1, -1, codes.shape[2])
    if codes.shape[2] > 1:  # a fallen agent's weights are of no use to anybody
        same = same & alive[1:] & alive[:-1]
    return (mean_square(codes[1:] - codes[:-1], output) * same).sum() / same.sum().clamp_min(1)


def ppo_loss(
    args: Args,
    agent: Agent,
    mb: dict[str, torch.Tensor],
    states: dict[str, torch.Tensor],
    ent_coef: float,
    perturbation=0.0,
):
    """The loss of one minibatch of chunks (L, C, ...), and what to log."""
    alive, counted, continuous = mb["alive"].float(), mb["counted"].float(), agent.actor.continuous

    def mean(x: torch.Tensor, weight: torch.Tensor = alive) -> torch.Tensor:  # over those who are on the board
        return (x * weight).sum() / weight.sum().clamp_min(1.0)

    policy, codes, _ = agent.policy(mb, states, perturbation)
    log_ratio = (log_prob_of(policy, mb["actions"], continuous) - mb["log_probs"]) * alive
    ratio = log_ratio.exp()
    advantages = mb["advantages"].expand_as(ratio)
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = mean(torch.max(-advantages * ratio, -advantages * clipped_ratio))
    entropy = mean(entropy_of(policy, continuous))

    value, _ = agent.critic(mb, states.get("critic"))
    centre, unit = agent.critic.scale()
    target, old_value = (mb["returns"] - centre) / unit, (mb["values"] - centre) / unit

    def value_error(x: torch.Tensor) -> torch.Tensor:
        return (
            F.huber_loss(x, target, reduction="none", delta=args.huber_delta)
            if args.huber_delta
            else 0.5 * (x - target) ** 2
        )

    value_loss = value_error(value)
    if args.clip_vloss:
        clipped = old_value + (value - old_value).clamp(-args.clip_coef, args.clip_coef)
        value_loss = torch.max(value_loss, value_error(clipped))
    value_loss = mean(value_loss, counted)
    loss = policy_loss - ent_coef * entropy + args.vf_coef * value_loss
    with torch.no_grad():
        approx_kl = mean(ratio - 1 - log_ratio)
        clipfrac = mean(((ratio - 1).abs() > args.clip_coef).float())
    stats = {
        f"losses/{name}": x
        for name, x in zip(LOSSES, (policy_loss, value_loss, entropy, approx_kl, clipfrac), strict=True)
    }
    if codes is not None:
        output = agent.hyper.output
        smooth = smoothness(codes, output, mb["first"], mb["alive"])
        align = mean(kl_between(mb["reference"], policy, continuous))
        loss = loss + args.smooth_coef * smooth + args.align_coef * align
        size = mean_square(codes.detach(), output.detach()).mean().sqrt()
        stats |= {"hyper/smooth": smooth, "hyper/align": align, "hyper/delta_size": size}
    return loss, {name: stat.item() for name, stat in stats.items()}, ratio


def chunks_of(x: torch.Tensor, length: int) -> torch.Tensor:
    """(T, B, ...) -> (L, T / L * B, ...): the rollout cut into sequences of L steps, those of the first steps first."""
    return x.view(len(x) // length, length, *x.shape[1:]).transpose(0, 1).flatten(1, 2)


def update(
    args: Args,
    agent: Agent,
    optimizer,
    batch: dict[str, torch.Tensor],
    states,
    ent_coef: float,
    perturbation: float,
    generator,
):
    """All epochs over one batch of chunks (L, C, ...) with the memory at their starts (C, ...); returns what to log."""
    chunks, log = batch["first"].shape[1], []
    for _ in range(args.update_epochs):
        order = torch.randperm(chunks, generator=generator)
        for mb_inds in order.chunk(args.num_minibatches):
            mb = {name: x.index_select(1, mb_inds) for name, x in batch.items()}
            mb_states = {name: x[mb_inds] for name, x in states.items()}
            loss, stats, _ = ppo_loss(args, agent, mb, mb_states, ent_coef, perturbation)
            optimizer.zero_grad()
            loss.backward()
            norms = [nn.utils.clip_grad_norm_(group["params"], args.max_grad_norm) for group in optimizer.param_groups]
            if not torch.isfinite(torch.stack([loss.detach(), *norms])).all():
                raise FloatingPointError(f"the loss became {loss.item()} with a gradient of norm {max(norms).item()}")
            optimizer.step()
            names = ("losses/grad_norm", "losses/critic_grad_norm", "hyper/grad_norm")
            log.append(stats | {name: norm.item() for name, norm in zip(names, norms, strict=False)})
    with torch.no_grad():  # how far the update moved the policy, on the last minibatch
        kl = kl_between(mb["policy"], agent.policy(mb, mb_states, perturbation)[0], agent.actor.continuous)
        policy_kl = (kl * mb["alive"]).sum() / mb["alive"].sum().clamp_min(1)
    return {name: float(np.mean([stats[name] for stats in log])) for name in log[0]} | {
        "losses/policy_kl": policy_kl.item()
    }


# playing and evaluating


class Team:
    """Plays all agents of an env: what they remember, and what was last done and earned."""

    def __init__(self, agent: Agent, game: Game, generator: torch.Generator, greedy: bool = False):
        self.agent, self.game, self.generator, self.greedy = agent, game, generator, greedy
        num_envs = game.env.num_envs
        self.states, self.first = agent.start(num_envs), torch.ones(num_envs, dtype=torch.bool)
        self.last = torch.zeros(num_envs, game.num_agents, game.num_actions + 1)  # last action, last reward

    def see(self) -> dict[str, torch.Tensor]:
        """All that the networks see of the current step, as a sequence of length 1: (1, B, ...)"""
        seen = self.game.look() | {"first": self.first, "last": self.last}
        return {name: x[None] for name, x in seen.items()}

    @torch.no_grad()
    def decide(self, perturbation: float = 0.0) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        """What was seen, the policy and the actions drawn from it, all (1, B, ...)."""
        seen = self.see()
        policy, _, after = self.agent.policy(seen, self.states, perturbation)
        self.states = self.states | after
        if self.greedy:
            actions = policy.chunk(2, dim=-1)[0] if self.game.continuous else policy.argmax(-1)
        else:
            actions = sample(policy, self.game.continuous, self.generator)
        return seen, policy, actions

    def act(self, env=None) -> np.ndarray:
        """(B, N) orders for the env"""
        self.actions = self.decide()[2][0]
        return self.game.orders(self.actions)

    def watch(self, env, actions: np.ndarray, info: dict[str, np.ndarray]) -> None:
        """Remember the orders (B, N) of a step, what they earned and what has ended."""
        done = torch.from_numpy(info["done"])
        known = torch.from_numpy(np.asarray(actions))
        known = 2 * known - 1 if self.game.continuous else F.one_hot(known.long(), self.game.num_actions)
        self.last = torch.cat([known.float(), torch.from_numpy(self.game.reward())[:, :, None]], dim=2)
        self.last[done] = 0.0
        self.first = done.clone()

    def get_state(self) -> dict[str, np.ndarray]:
        saved = {f"states.{name}": x for name, x in self.states.items()}
        saved |= {"first": self.first, "last": self.last, "generator": self.generator.get_state()}
        return {name: x.numpy() for name, x in saved.items()}

    def set_state(self, saved: dict[str, np.ndarray]) -> None:
        saved = {name: torch.from_numpy(np.array(x)) for name, x in saved.items()}
        self.states = {name: saved[f"states.{name}"] for name in self.states}
        self.first, self.last = saved["first"], saved["last"]
        self.generator.set_state(saved["generator"])


class Seat(Team):
    """One agent of a trained team in one seat of any env (see envs/roles.py). It remembers for the whole team what all
    did, whoever they were, and moves only itself."""

    seat = 0

    def act(self, env=None) -> np.ndarray:
        return super().act(env)[:, self.seat]


def load_team(checkpoint: Path, spec: dict, env, seed: int, greedy: bool, kind: type[Team] = Team) -> Team:
    """A checkpoint of this script as a team for a batched env."""
    known = {field.name for field in fields(Args)}
    args, game = Args(**{name: value for name, value in spec["args"].items() if name in known}), Game(env)
    if spec["num_agents"] != game.num_agents:
        here = f"{env.spec.env_id} has {game.num_agents}"
        raise envs.ConfigError(f"checkpoint '{checkpoint}' is of a team of {spec['num_agents']}, but {here}")
    trained, here = (config.get("max_block_comp", 0) for config in (spec["env_config"], env.spec.config))
    if trained != here:  # another size of what is seen
        reason = f"was trained with max_block_comp={trained}, this game has {here}"
        raise envs.ConfigError(f"checkpoint '{checkpoint}' {reason}")
    agent = Agent(args, game, torch.Generator())
    try:
        agent.load_state_dict(load_file(checkpoint / "weights.safetensors"))
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise envs.ConfigError(f"the weights of checkpoint '{checkpoint}' cannot be loaded: {reason}") from error
    return kind(agent, game, torch.Generator().manual_seed(seed), greedy)


def load_policy(checkpoint: Path, spec: dict, env, seat: int, learner: int | None, seed: int, greedy: bool) -> Seat:
    """A checkpoint of this script as one player: the agent of that seat."""
    if learner is not None:
        raise envs.ConfigError(f"checkpoint '{checkpoint}' has one policy for all seats, so '@{learner}' picks nothing")
    player = load_team(checkpoint, spec, env, seed, greedy, Seat)
    player.seat = seat
    return player


def evaluate(args: Args, agent: Agent, episodes: int, seed: int, greedy: bool = False) -> dict[str, float]:
    """Fresh episodes, one in each of as many envs, so that long and short ones count alike."""
    env = make_env(args, episodes, seed)
    game = Game(env)
    team = Team(agent, game, torch.Generator().manual_seed(seed), greedy)
    returns, lengths, won = np.zeros((episodes, game.num_agents)), np.zeros(episodes), np.zeros(episodes)
    running = np.ones(episodes, bool)
    while running.any():
        orders = team.act()
        info = env.step(orders)[-1]
        team.watch(env, orders, info)
        ended = running & info["done"]
        returns[ended], lengths[ended] = info["episode_return"][ended], info["episode_length"][ended]
        won[ended] = info["battle_won"][ended] if game.is_battle else 0.0
        running &= ~ended
    env.close()
    score = returns.mean(1)
    result = {"return": score.mean(), "return_ci95": 1.96 * score.std() / episodes**0.5, "episodes": episodes}
    if game.is_battle:
        result |= {"win_rate": won.mean(), "win_rate_ci95": 1.96 * won.std() / episodes**0.5}
    if not game.team:
        result |= {f"return-player{i + 1}": returns[:, i].mean() for i in range(game.num_agents)}
    return {name: float(value) for name, value in (result | {"length": lengths.mean()}).items()}


# run folder


def write_json(path: Path, content: dict) -> None:
    """Write a JSON file so that it is there whole or not at all."""
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(draft, path)


def save_checkpoint(run_dir: Path, name: str, agent: Agent, spec: dict, resume: dict[str, torch.Tensor] | None = None):
    """Write checkpoints/<name>: a new folder beside the old one, then two renames (load_resume knows the gap)."""
    target = run_dir / "checkpoints" / name
    draft, old = target.with_name(name + ".new"), target.with_name(name + ".old")
    for leftover in (draft, old):
        shutil.rmtree(leftover, ignore_errors=True)
    draft.mkdir(parents=True)
    save_file({key: weight.contiguous() for key, weight in agent.state_dict().items()}, draft / "weights.safetensors")
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
    """curve.png: return, and in battles the win rate, in training and evaluation over env steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with (run_dir / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    panels = [("charts/episodic_return", "eval/return", "mean return")]
    panels += [("charts/win_rate", "eval/win_rate", "battles won")] if "eval/win_rate" in rows[0] else []
    figure, axes = plt.subplots(1, len(panels), figsize=(6 * len(panels), 4), layout="constrained", squeeze=False)
    for panel, (*names, label) in zip(axes[0], panels, strict=True):
        for name, style in zip(names, ("-", "o-"), strict=True):
            points = [(int(row["global_step"]), float(row[name])) for row in rows if row[name]]
            if points:
                who = "training" if style == "-" else "evaluation"
                panel.plot(*zip(*points, strict=True), style, markersize=4, label=who, alpha=0.6 if style == "-" else 1)
        panel.set(xlabel="env steps", ylabel=label, title=title)
        panel.grid(alpha=0.3)
        panel.legend()
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
    for name, least in (("num_envs", 1), ("num_steps", 1), ("total_timesteps", 1), ("num_minibatches", 1),
                        ("update_epochs", 1), ("hidden", 8), ("critic_hidden", 1), ("log_every", 1), ("seed", 0),
                        ("checkpoint_every", 1), ("eval_every", 0), ("eval_episodes", 1), ("final_eval_episodes", 1),
                        ("torch_threads", 1), ("max_grad_norm", 0), ("learning_rate", 0), ("hyper_lr", 0),
                        ("chunk_length", 1), ("target_every", 1), ("hyper_rank", 0), ("hyper_hidden", 8),
                        ("hyper_heads", 1), ("huber_delta", 0), ("smooth_coef", 0), ("align_coef", 0),
                        ("start_window", 0), ("start_window_until", 0)):  # fmt: skip
        if getattr(args, name) < least:
            raise envs.ConfigError(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(args, name)}")
    for name in ("hidden", "hyper_hidden", "hyper_rank"):  # other widths are rounded by a row's place: ratios not 1
        if getattr(args, name) % 8:
            raise envs.ConfigError(f"--{name.replace('_', '-')} must be a multiple of 8, not {getattr(args, name)}")
    for name, most in (("perturbation", 1), ("decay", 1)):
        if not 0 <= getattr(args, name) <= most:
            raise envs.ConfigError(f"--{name} must be from 0 to {most}, not {getattr(args, name)}")
    if args.num_steps % args.chunk_length:
        raise envs.ConfigError(f"--num-steps {args.num_steps} must be a multiple of --chunk-length {args.chunk_length}")
    if args.hyper_hidden % (2 * args.hyper_heads):
        raise envs.ConfigError(
            f"--hyper-hidden {args.hyper_hidden} must be a multiple of twice --hyper-heads {args.hyper_heads}"
        )
    if args.hyper and args.hyper_share and args.hyper_input != "joint":
        raise envs.ConfigError(f"--hyper-share needs --hyper-input joint, not {args.hyper_input}")
    env_name = args.env_id.replace(":", "_").replace("/", "_")  # a map of one's own is a path
    run_dir = Path(args.run_dir or f"runs/{env_name}__{args.exp_name}__{args.seed}__{int(time.time())}")
    if (run_dir / "args.json").exists():
        raise envs.ConfigError(f"'{run_dir}' already holds a run; go on with --resume {run_dir}")
    return args, run_dir


def train(args: Args, run_dir: Path) -> int:
    """The whole run; returns the exit code."""
    # seeding
    torch.set_num_threads(args.torch_threads)
    env_seed, policy_seed, data_seed, init_seed, eval_seed = (
        int(seed) for seed in np.random.SeedSequence(args.seed).generate_state(5)
    )
    policy_generator = torch.Generator().manual_seed(policy_seed)
    data_generator = torch.Generator().manual_seed(data_seed)

    # env setup
    env = make_env(args, args.num_envs, env_seed)
    game = Game(env)
    if args.start_window:
        env.game.check_window(args.start_window, args.start_window_prob)

    # agent
    code_version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    agent = Agent(args, game, torch.Generator().manual_seed(init_seed))
    team, target = Team(agent, game, policy_generator), copy.deepcopy(agent.hyper)
    target_states, num_values = agent.start(args.num_envs), agent.critic.num_values
    groups = [(agent.actor, args.learning_rate), (agent.critic, args.learning_rate), (agent.hyper, args.hyper_lr)]
    groups = [{"params": list(part.parameters()), "lr": lr} for part, lr in groups if part is not None]
    optimizer = torch.optim.Adam(groups, eps=1e-5, foreach=True)
    first_rates = [group["lr"] for group in optimizer.param_groups]
    spec = {
        "script": Path(__file__).name, "code_version": code_version, "env_id": args.env_id,
        "obs_shape": list(env.spec.obs_shape), "num_actions": env.spec.num_actions, "num_agents": game.num_agents,
        "learners": list(range(game.num_agents)), "env_config": env.spec.config, "args": asdict(args),
    }  # fmt: skip

    # resume
    first_iteration, wall_time, best, copied_at = 1, 0.0, -float("inf"), 0
    next_eval = args.eval_every or args.total_timesteps + 1
    window = np.zeros(3 + game.num_agents)  # since the last log point: episodes, steps, battles won, returns
    saved = load_resume(run_dir) if args.resume else None
    if saved:
        weights, resume, saved_spec = saved

        def part(prefix: str) -> dict[str, torch.Tensor]:
            return {name.removeprefix(prefix): x for name, x in resume.items() if name.startswith(prefix)}

        agent.load_state_dict(weights)
        for k, parameter in enumerate(agent.parameters()):
            optimizer.state[parameter] = {name: resume[f"adam.{k}.{name}"] for name in ADAM_STATE}
        env.set_state({name: x.numpy() for name, x in part("env.").items()})
        team.set_state({name: x.numpy() for name, x in part("team.").items()})
        if target is not None:
            target.load_state_dict(part("target."))
            target_states = part("target_states.")
        data_generator.set_state(resume["data_generator"])
        window[:] = resume["window"].numpy()
        first_iteration, wall_time = saved_spec["iteration"] + 1, saved_spec["wall_time"]
        best, next_eval, copied_at = saved_spec["best"], saved_spec["next_eval"], saved_spec["copied_at"]

    def save_last() -> None:
        state = {f"env.{k}": torch.from_numpy(v) for k, v in env.get_state().items()}
        state |= {f"team.{k}": torch.from_numpy(v) for k, v in team.get_state().items()}
        if target is not None:
            state |= {f"target.{k}": v for k, v in target.state_dict().items()}
            state |= {f"target_states.{k}": v for k, v in target_states.items()}
        for k, parameter in enumerate(agent.parameters()):
            state |= {f"adam.{k}.{name}": optimizer.state[parameter][name] for name in ADAM_STATE}
        state |= {"data_generator": data_generator.get_state(), "window": torch.from_numpy(window)}
        progress = {"iteration": iteration, "global_step": global_step, "best": best, "next_eval": next_eval}
        progress |= {"copied_at": copied_at, "wall_time": time.perf_counter() - started}
        save_checkpoint(run_dir, "last", agent, spec | progress, state)

    # logging
    run_dir.mkdir(parents=True, exist_ok=True)
    about = {"script": spec["script"], "code_version": spec["code_version"], "args": asdict(args) | {"resume": ""}}
    write_json(run_dir / "args.json", about)
    players = [] if game.team else [f"return-player{i + 1}" for i in range(game.num_agents)]
    wins = ["win_rate"] if game.is_battle else []
    charts = [f"charts/episodic_{name}" for name in ("return", *players, "length")]
    charts += [f"charts/{name}" for name in (*wins, "SPS", "learning_rate")]
    charts += [
        f"losses/{name}" for name in (*LOSSES, "policy_kl", "grad_norm", "critic_grad_norm", "explained_variance")
    ]
    charts += [f"hyper/{name}" for name in ("smooth", "align", "delta_size", "grad_norm") if args.hyper]
    charts += [f"eval/{name}" for name in ("return", "return_ci95", "episodes", *players, "length")]
    charts += [f"eval/{name}" for name in ("win_rate", "win_rate_ci95") if wins]
    spent = dict.fromkeys(("time/env", "time/policy", "time/update", "time/eval"), 0.0)
    total_steps, global_step = args.num_iterations * args.batch_size, (first_iteration - 1) * args.batch_size
    metrics = Metrics(args, run_dir, [*charts, *spent], global_step)
    bar = tqdm(total=total_steps, initial=global_step, unit=" steps", unit_scale=True, disable=not sys.stderr.isatty())
    name = "hyper-MAPPO" if args.hyper else "MAPPO"
    print(f"{name} on {args.env_id}, {total_steps} env steps -> {run_dir}", flush=True)
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

    # storage, (T, B, N, ...) of agents, (T, B, V) of values, and the memory at the start of every chunk (T / L, B, ...)
    shape, batch = (args.num_steps, args.num_envs), {}
    starts = {name: torch.zeros(args.num_steps // args.chunk_length, *x.shape) for name, x in team.states.items()}
    reward, next_value = torch.zeros(*shape, num_values), torch.zeros(*shape, num_values)
    terminated, truncated = (torch.zeros(*shape, num_values, dtype=torch.bool) for _ in range(2))

    for iteration in range(first_iteration, args.num_iterations + 1):
        progress = (iteration - 1) / args.num_iterations
        ent_coef = args.ent_coef + (args.ent_coef_final - args.ent_coef) * progress
        perturbation = args.perturbation * (1 - progress)
        if args.start_window:
            window_prob = args.start_window_prob * max(0.0, 1 - progress / max(args.start_window_until, 1e-9))
            env.set_start_window(args.start_window, window_prob)
        for group, rate in zip(optimizer.param_groups, first_rates, strict=True):
            group["lr"] = rate * (1 - progress) if args.anneal_lr else rate
        gradient_steps = (iteration - 1) * args.update_epochs * args.num_minibatches
        if target is not None and gradient_steps - copied_at >= args.target_every:
            target.load_state_dict(agent.hyper.state_dict())
            target_states, copied_at = dict(team.states), gradient_steps

        # rollout
        for step in range(args.num_steps):
            if step % args.chunk_length == 0:
                for name, x in team.states.items():
                    starts[name][step // args.chunk_length] = x
            seen, policy, actions = team.decide(perturbation)
            with torch.no_grad():
                values, memory = agent.critic(seen, team.states.get("critic"))
            if memory is not None:
                team.states["critic"] = memory
            centre, unit = agent.critic.scale()
            seen |= {"policy": policy, "actions": actions, "values": values * unit + centre}
            seen |= {"log_probs": log_prob_of(policy, actions, game.continuous)}
            for name, x in seen.items():
                if name not in batch:
                    batch[name] = torch.zeros(args.num_steps, *x.shape[1:], dtype=x.dtype)
                batch[name][step] = x[0]
            spend("policy")

            orders = game.orders(actions[0])
            _, *outcome, info = env.step(orders)
            for storage, x in zip((reward, terminated, truncated), outcome, strict=True):
                storage[step] = torch.from_numpy(x[:, :num_values])
            team.watch(env, orders, info)
            done = info["done"]
            if done.any():
                window[:2] += done.sum(), info["episode_length"][done].sum()
                window[2] += info["battle_won"][done].sum() if game.is_battle else 0.0
                window[3:] += info["episode_return"][done].sum(0)
            spend("env")

            if truncated[step].any():  # the value of what would have followed, had time not run out
                final = {name: x[None] for name, x in game.final(info).items()}
                final |= {"alive": final["obs"].any(-1), "first": torch.zeros_like(seen["first"])}
                with torch.no_grad():
                    next_value[step] = agent.critic(final, team.states.get("critic"))[0][0] * unit + centre
                spend("policy")

        # advantages
        with torch.no_grad():
            last_values = agent.critic(team.see(), team.states.get("critic"))[0] * unit + centre
        following = torch.cat([batch["values"][1:], last_values])
        next_value = torch.where(truncated, next_value, following)
        counted = torch.ones_like(reward, dtype=torch.bool) if game.team else batch["alive"]
        gae = (counted, terminated, truncated, args.gamma, args.gae_lambda)
        advantages = advantages_of(reward, batch["values"], next_value, *gae)
        returns = advantages + batch["values"]
        agent.critic.see_returns(returns[counted])
        normed = advantages
        if args.norm_adv:  # over those who acted
            acted = advantages.expand_as(batch["alive"])[batch["alive"]]
            normed = (advantages - acted.mean()) / (acted.std() + 1e-8)

        # update
        b_all = batch | {"counted": counted, "advantages": normed, "returns": returns}
        if target is not None:  # the policy by the target hypernetwork, from the stored inputs and with its own memory
            with torch.no_grad():
                b_all["reference"], _, target_states = agent.policy(batch, target_states, perturbation, target)
        b_chunks = {name: chunks_of(x, args.chunk_length) for name, x in b_all.items()}  # (L, C, ...)
        b_starts = {name: x.flatten(0, 1) for name, x in starts.items()}  # (C, ...)
        try:
            losses = update(args, agent, optimizer, b_chunks, b_starts, ent_coef, perturbation, data_generator)
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
            scores = evaluate(args, agent, args.eval_episodes, eval_seed)
            score = scores["return"] * (0.001 if wins else 1.0) + scores.get("win_rate", 0.0)  # wins first
            if score > best:
                best = score
                save_checkpoint(run_dir, "best", agent, spec | {"global_step": global_step, "eval": scores})
            spend("eval")

        # logging
        if iteration % args.log_every == 0 or iteration == args.num_iterations or scores:
            wall_time = time.perf_counter() - started
            scalars = {"charts/SPS": global_step / wall_time, "charts/learning_rate": optimizer.param_groups[0]["lr"]}
            if window[0]:  # episodes ended since the last row
                _, length, won, *mean_returns = window / window[0]
                scalars |= {"charts/episodic_return": np.mean(mean_returns), "charts/episodic_length": length}
                scalars |= {f"charts/{name}": won for name in wins}
                scalars |= {f"charts/episodic_{name}": x for name, x in zip(players, mean_returns, strict=False)}
            targets, errors = returns[counted], advantages[counted]
            scalars |= losses | {"losses/explained_variance": 1 - (errors.var() / targets.var().clamp_min(1e-8)).item()}
            scalars |= {f"eval/{name}": x for name, x in scores.items()}
            scalars |= {name: seconds / sum(spent.values()) for name, seconds in spent.items()}
            metrics.write(global_step, wall_time, {name: float(x) for name, x in scalars.items()})
            window[:] = 0.0
            shown = {"return": scalars.get("charts/episodic_return", np.nan), "best_eval": best}
            shown |= {"win_rate": scalars.get("charts/win_rate", np.nan)} if wins else {}
            shown = {name: f"{x:.3f}" for name, x in shown.items()}
            bar.set_postfix(shown, refresh=False)
            if bar.disable and (global_step >= next_line or iteration == args.num_iterations):
                next_line += total_steps / 10
                latest = " ".join(f"{name} {x}" for name, x in shown.items())
                print(f"step {global_step}/{total_steps} {latest} SPS {scalars['charts/SPS']:.0f}", flush=True)
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
    result = {"last": evaluate(args, agent, args.final_eval_episodes, eval_seed + 1)}
    result["last_greedy"] = evaluate(args, agent, args.final_eval_episodes, eval_seed + 1, greedy=True)
    if (run_dir / "checkpoints" / "best").is_dir():
        agent.load_state_dict(load_file(run_dir / "checkpoints" / "best" / "weights.safetensors"))
        result["best"] = evaluate(args, agent, args.final_eval_episodes, eval_seed + 1)
    wall_time = time.perf_counter() - started
    draw_curve(run_dir, f"{'hyper-MAPPO' if args.hyper else 'MAPPO'} on {args.env_id}, seed {args.seed}")
    summary = {"finished": True, "global_step": global_step, "wall_time": wall_time, "eval": result["last"]}
    summary |= {"eval_greedy": result["last_greedy"], "eval_best": result.get("best"), "time": spent}
    write_json(run_dir / "result.json", summary)
    print(f"finished in {wall_time:.0f} s; {args.final_eval_episodes} fresh episodes each:")
    for name, scores in result.items():
        won = f"  win rate {scores['win_rate']:.3f} +- {scores['win_rate_ci95']:.3f}" if wins else ""
        spread = f"{scores['return']:.3f} +- {scores['return_ci95']:.3f}"
        print(f"  {name:<12} return {spread}{won}  length {scores['length']:.1f}")
    print(f"curve: {run_dir}/curve.png")
    return 0


if __name__ == "__main__":
    try:
        args, run_dir = prepare(tyro.cli(Args, description=__doc__))
        if (run_dir / "result.json").is_file():
            print(f"{run_dir} is finished already: {(run_dir / 'result.json')}")
            sys.exit(0)
        sys.exit(train(args, run_dir))
    except envs.ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
