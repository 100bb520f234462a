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

import envs  # first: from here on Ctrl-C is one line

# isort: split
import copy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro

from envs.devices import device_of
from envs.run import Positive, Range, Rate, Run, RunArgs, Share, Weight, Whole, descend, main, read_weights, saved_args
from envs.team import TeamGame, make_env, play_team

Tensors = dict[str, torch.Tensor]


@dataclass
class Args(RunArgs):
    # run
    log_every: Positive = 5
    """iterations between two rows of metrics.csv and TensorBoard"""
    eval_every: Whole = 100_000
    """env steps between two evaluations; the last weights are evaluated too (0: only the final evaluation)"""
    eval_episodes: Positive = 256
    """episodes of each evaluation during training"""
    final_eval_episodes: Positive = 256
    """episodes of the evaluations at the end"""

    # env
    env_id: str = "smac-3m"
    """which game to play: a battle (smac-...), a grid game (msh-...) or mpe-simple-spread"""
    num_envs: Positive = 128
    """games played side by side"""
    start_jitter: Annotated[float, Range(0, 100), tyro.conf.arg(metavar="0..100")] = 0.0
    """battles: start positions move by up to this much, anew in each episode (0: always the same start)"""
    start_window: Whole = 0
    """grid games, start curriculum: side of the square in which some episodes start (0: off)"""
    start_window_prob: Share = 0.9
    """probability of such a start at the beginning of training, decaying linearly"""
    start_window_until: Share = 0.5
    """share of training after which all episodes start as in the true game"""
    continuous: bool = False
    """mpe-simple-spread: forces instead of five discrete actions"""

    # algorithm
    total_timesteps: Positive = 1_000_000
    """env steps of the whole run (one step moves all agents of one game)"""
    num_steps: Positive = 64
    """steps per game and iteration"""
    chunk_length: Positive = 16
    """steps of the sequences that the update learns from, each from the memory that was stored at its start"""
    learning_rate: Rate = 7e-4
    """Adam's learning rate of actor and critic at the start"""
    anneal_lr: bool = True
    """bring the learning rates linearly to zero"""
    gamma: Share = 0.99
    """discount"""
    gae_lambda: Share = 0.95
    """lambda of generalised advantage estimation"""
    num_minibatches: Positive = 4
    """minibatches per epoch"""
    update_epochs: Positive = 5
    """passes over each batch"""
    clip_coef: Weight = 0.2
    """PPO's clip range"""
    ent_coef: Weight = 0.01
    """weight of the entropy bonus at the start"""
    ent_coef_final: Weight = 0.0
    """weight of the entropy bonus at the end, reached linearly"""
    vf_coef: Weight = 0.5
    """weight of the value loss"""
    max_grad_norm: Weight = 10.0
    """largest gradient norm, of actor, critic and hypernetwork each"""
    initial_value: Annotated[float, Range(-(10**6), 10**6), tyro.conf.arg(metavar="-1e6..1e6")] = 0.0
    """what the critic expects before it has learned; optimism makes a hare a disappointment until stags are known"""
    hidden_size: Positive = 64
    """width of the actor's layers and of its memory"""
    critic_hidden_size: Positive = 128
    """width of the critic's layers"""

    # hypernetwork
    hyper: bool = True
    """move the actor's weights by a hypernetwork (--no-hyper: MAPPO)"""
    hyper_input: Literal["joint", "local", "id"] = "joint"
    """what it sees: all agents (needs communication in play), the own agent, or only which agent it is"""
    hyper_layers: Literal["last", "all"] = "last"
    """which weights it moves: the last layer (and scales of the others), or all layers outside the memory"""
    hyper_rank: Whole = 8
    """rank of a generated weight change, one factor learned and one generated (0: whole matrices are generated)"""
    hyper_hidden_size: Positive = 32
    """width of the hypernetwork"""
    hyper_heads: Positive = 2
    """heads of the attention over agents"""
    hyper_attention: bool = True
    """joint input: attention over the living agents (off: their mean)"""
    hyper_history: bool = True
    """an LSTM over the episode with last actions and reward (off: the current step only)"""
    hyper_lr: Rate = 1e-4
    """the hypernetwork's learning rate at the start"""
    smooth_coef: Weight = 0.1
    """alpha, weight of L_smooth: mean squared change of the generated weights between neighbouring steps"""
    align_coef: Weight = 0.05
    """beta, weight of L_align: KL(policy by the target hypernetwork || policy)"""
    target_every: Positive = 100
    """K, gradient steps after which the target hypernetwork becomes a copy of the current one"""

    def check(self) -> None:
        """What the ranges of single fields do not say."""
        for name in ("hidden_size", "hyper_hidden_size", "hyper_rank"):
            if getattr(self, name) % 8:  # products of other widths are rounded by a row's place: ratios are not 1
                flag = name.replace("_", "-")
                raise envs.ConfigError(f"--{flag} must be a multiple of 8, not {getattr(self, name)}")
        if self.num_steps % self.chunk_length:
            sizes = f"--num-steps {self.num_steps} must be a multiple of --chunk-length {self.chunk_length}"
            raise envs.ConfigError(sizes)
        if self.hyper_hidden_size % (2 * self.hyper_heads):
            sizes = f"--hyper-hidden-size {self.hyper_hidden_size} must be a multiple of twice --hyper-heads"
            raise envs.ConfigError(f"{sizes} {self.hyper_heads}")


# networks


def linear(in_size: int, out_size: int, gain: float, generator: torch.Generator, bias: bool = True) -> nn.Linear:
    """A layer with orthogonal weights and a bias of zero at the start."""
    layer = nn.Linear(in_size, out_size, bias)
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


class Recurrent(nn.Module):
    """A memory over (L, R, F) that starts anew where an episode does. What does not depend on memory is computed for
    all steps at once; a row's result does not depend on the other rows, down to the last bit."""

    num_gates: int

    def __init__(self, in_size: int, hidden_size: int, generator: torch.Generator):
        super().__init__()
        self.hidden_size = hidden_size
        self.from_input = linear(in_size, self.num_gates * hidden_size, 1.0, generator)
        self.from_memory = linear(hidden_size, self.num_gates * hidden_size, 1.0, generator)

    def forward(self, x: torch.Tensor, is_first: torch.Tensor, memory: tuple[torch.Tensor, ...]):
        """x (L, R, F), is_first (L, R) bool, memory (R, H) or two of them -> outputs (L, R, H), memory"""
        inputs, keep, outputs = self.from_input(x).unbind(), (~is_first[:, :, None]).float(), []
        for step, reset in enumerate(is_first.any(1).cpu().tolist()):
            if reset:
                memory = tuple(old * keep[step] for old in memory)
            memory = self.cell(inputs[step], *memory)
            outputs.append(memory[0])
        return torch.stack(outputs), memory


class GRU(Recurrent):
    num_gates = 3

    def cell(self, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor]:
        sizes = (2 * self.hidden_size, self.hidden_size)
        (gates_x, new_x), (gates_h, new_h) = x.split(sizes, dim=1), self.from_memory(h).split(sizes, dim=1)
        reset, update = torch.sigmoid(gates_x + gates_h).chunk(2, dim=1)
        new = torch.tanh(new_x + reset * new_h)
        return (torch.lerp(new, h, update),)


class LSTM(Recurrent):
    num_gates = 4

    def cell(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = (3 * self.hidden_size, self.hidden_size)
        gates, new = (x + self.from_memory(h)).split(sizes, dim=1)
        take, forget, show = torch.sigmoid(gates).chunk(3, dim=1)
        c = forget * c + take * torch.tanh(new)
        return show * torch.tanh(c), c


class Actor(nn.Module):
    """Two layers, a GRU and a last layer. The layers outside the memory are numbered 0, 1, 2: a hypernetwork may change
    what they do."""

    def __init__(self, args: Args, game: TeamGame, generator: torch.Generator):
        super().__init__()
        self.num_actions, self.continuous, hidden_size = game.num_actions, game.continuous, args.hidden_size
        # a multiple of 8 columns: otherwise a row's product is rounded by its place in the batch, and ratios are not 1
        out_size = 8 * -(-game.num_actions // 8)
        sizes, gains = (game.obs_size, hidden_size, hidden_size, out_size), (2**0.5, 2**0.5, 0.01)
        self.layers = nn.ModuleList(linear(*sizes[k : k + 2], gain, generator) for k, gain in enumerate(gains))
        self.gru = GRU(hidden_size, hidden_size, generator)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden_size) for _ in range(3))
        self.ids = nn.Parameter(torch.randn(game.num_agents, hidden_size, generator=generator) * 0.1)
        self.log_std = nn.Parameter(torch.full((game.num_actions,), -0.5)) if game.continuous else None

    def forward(self, obs: torch.Tensor, is_first: torch.Tensor, memory: torch.Tensor, hyper=None, codes=None):
        """obs (L, C, N, D), is_first (L, C), memory (C, N, H) -> logits or means (L, C, N, A), memory. With a
        hypernetwork and its codes (L, C, N, W) the layers are the changed ones."""

        def layer(k: int, x: torch.Tensor) -> torch.Tensor:
            y = self.layers[k](x)
            return y if hyper is None else hyper.change(k, x, y, codes)

        length, chunks, agents = obs.shape[:3]
        x = self.norms[0](torch.relu(layer(0, obs) + self.ids))
        x = self.norms[1](torch.relu(layer(1, x)))
        is_first = is_first[:, :, None].expand(length, chunks, agents).reshape(length, -1)
        x, (memory,) = self.gru(x.view(length, chunks * agents, -1), is_first, (memory.flatten(0, 1),))
        x = self.norms[2](x).view(length, chunks, agents, -1)
        return layer(2, x)[..., : self.num_actions], memory.view(chunks, agents, -1)


class Hypernetwork(nn.Module):
    """From what is seen to a code (W) for each agent, and from codes to changes of the actor's layers.

    joint: every agent's observation through one layer and attention over the living agents; their mean, with the last
    joint action and reward, feeds the team's LSTM; a code joins that with the own attention. local: an LSTM for each
    agent, fed with its own observation, last action and reward. id: a table, whatever is seen.

    A changed layer is x (W + dW) + b + db, with dW = U G of a learned U and a generated G, or dW = G where the rank is
    0; a scaled one is (1 + s) times itself, in groups of units. The generating layers have no bias and start near zero,
    so that training starts as MAPPO.
    """

    NUM_SCALES = 8  # groups of units with a scale of their own, in layers that are scaled and not changed

    def __init__(self, args: Args, game: TeamGame, actor: Actor, generator: torch.Generator):
        super().__init__()
        width, self.num_agents, self.heads = args.hyper_hidden_size, game.num_agents, args.hyper_heads
        self.joint, self.id_table, self.attention, self.lstm = args.hyper_input == "joint", None, None, None
        if args.hyper_input == "id":
            self.id_table = nn.Parameter(torch.randn(self.num_agents, width, generator=generator))
        else:
            self.embed = linear(game.obs_size, width, 2**0.5, generator)
            if self.joint:
                self.attention = linear(width, 2 * width, 1.0, generator) if args.hyper_attention else None
                self.from_team = linear(width, width, 1.0, generator)
            if args.hyper_history:
                last_size = (game.num_actions + 1) * (self.num_agents if self.joint else 1)
                self.from_last = linear(last_size, width, 1.0, generator)
                self.lstm = LSTM(width, width, generator)
        self.own = linear(width, width, 2**0.5, generator)
        self.changed = (0, 1, 2) if args.hyper_layers == "all" else (2,)
        self.ranks = [min(args.hyper_rank, layer.in_features) or layer.in_features for layer in actor.layers]
        self.factors, self.outputs = nn.ModuleDict(), nn.ModuleList()  # U of changed layers, and what generates
        for k in self.changed if args.hyper_rank else ():
            self.factors[str(k)] = linear(actor.layers[k].in_features, self.ranks[k], 1.0, generator, bias=False)
        for k, layer in enumerate(actor.layers):  # the factor G and a bias, or scales
            size = (self.ranks[k] + 1) * layer.out_features if k in self.changed else self.NUM_SCALES
            self.outputs.append(linear(width, size, 0.01, generator, bias=False))

    def initial_memory(self, num_envs: int) -> Tensors:
        """Memory before an episode, by name (C, 1 or N, W): one for the team, or one for each agent."""
        if self.lstm is None:
            return {}
        shape = (num_envs, 1 if self.joint else self.num_agents, self.lstm.hidden_size)
        return {name: torch.zeros(shape, device=device_of(self)) for name in ("hyper_h", "hyper_c")}

    def over_agents(self, x: torch.Tensor, alive: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x (L, C, N, W) with what each agent has to know of the living, and the mean of the living (L, C, 1, W)."""
        shape, (agents, width) = x.shape, x.shape[2:]
        x, alive = x.reshape(-1, agents, width), alive.reshape(-1, 1, agents)
        mean = alive / alive.sum(2, keepdim=True).clamp_min(1)  # (L * C, 1, N), a weight for each agent
        if self.attention is None:
            x = x + self.from_team(mean @ x)
        else:
            weights, value = self.attend(x, alive)
            x = x + self.from_team((weights @ value).transpose(1, 2).reshape(x.shape))
        return x.view(shape), (mean @ x).view(*shape[:2], 1, width)

    def attend(self, x: torch.Tensor, alive: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x (R, N, W), alive (R, 1, N) -> attention (R, heads, N, N) to the living, and what is seen in them."""
        agents, width = x.shape[1:]
        query, key, value = (  # (R, heads, N, W / 2 / heads or W / heads)
            projected.view(-1, agents, self.heads, projected.shape[2] // self.heads).transpose(1, 2).contiguous()
            for projected in self.attention(x).split((width // 2, width // 2, width), dim=2)
        )
        scores = query @ key.transpose(2, 3) / query.shape[3] ** 0.5
        return torch.softmax(scores.masked_fill(~alive[:, None], -1e9), dim=3), value

    def forward(self, inputs: Tensors, memory: Tensors) -> tuple[torch.Tensor, Tensors]:
        """Steps (L, C, ...) as the rollout stores them -> codes (L, C, N, W), memory."""
        length, chunks = inputs["is_first"].shape
        if self.id_table is not None:
            return torch.tanh(self.own(self.id_table)).expand(length, chunks, -1, -1), {}
        own = team = torch.relu(self.embed(inputs["obs"]))
        if self.joint:
            own, team = self.over_agents(own, inputs["alive"])
        if self.lstm is None:
            return torch.tanh(self.own(own)), {}
        last_step = inputs["last_step"].flatten(2)[:, :, None] if self.joint else inputs["last_step"]
        team = team + self.from_last(last_step)
        num_memories = team.shape[2]
        is_first = inputs["is_first"].repeat_interleave(num_memories, dim=1)
        before = tuple(memory[name].flatten(0, 1) for name in ("hyper_h", "hyper_c"))
        team, after = self.lstm(team.reshape(length, chunks * num_memories, -1), is_first, before)
        h, c = (x.view(chunks, num_memories, -1) for x in after)
        codes = torch.tanh(team.view(length, chunks, num_memories, -1) + self.own(own))
        return codes, {"hyper_h": h, "hyper_c": c}

    def change(self, k: int, x: torch.Tensor, y: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """What layer k, which makes y of x, makes of it when it is changed as codes say; all (L, C, N, ...)."""
        generated = self.outputs[k](codes)
        if k not in self.changed:
            return (y.view(*y.shape[:3], self.NUM_SCALES, -1) * (1 + generated[..., None])).view_as(y)
        low = self.factors[str(k)](x) if str(k) in self.factors else x
        low = F.pad(low, (0, 1), value=1.0).view(-1, 1, self.ranks[k] + 1)  # a one for the bias
        generated = generated.reshape(-1, self.ranks[k] + 1, y.shape[3])  # (L * C * N, rank and bias, columns)
        if self.ranks[k] <= 16:  # vectors times small matrices: twice as fast as bmm
            return y + (low.transpose(1, 2) * generated).sum(1).view_as(y)
        return y + torch.bmm(low, generated).view_as(y)

    def output_weight(self) -> torch.Tensor:
        """The generating layers as one (P, W)."""
        return torch.cat([layer.weight for layer in self.outputs])


class Critic(nn.Module):
    """Values in normalised units: one for the team from the state or, where everybody earns for itself, one for each
    agent from its observation and id. PopArt: when the scale of the returns moves, the last layer moves along."""

    def __init__(self, args: Args, game: TeamGame, generator: torch.Generator):
        super().__init__()
        self.num_values, hidden_size = 1 if game.shared_reward else game.num_agents, args.critic_hidden_size
        in_size = game.state_size if game.shared_reward else game.obs_size
        self.first = linear(in_size, hidden_size, 2**0.5, generator)
        self.second = linear(hidden_size, hidden_size, 2**0.5, generator)
        self.head = linear(hidden_size, 1, 1.0, generator)
        nn.init.constant_(self.head.bias, args.initial_value)
        self.ids = None
        if not game.shared_reward:
            self.ids = nn.Parameter(torch.randn(game.num_agents, hidden_size, generator=generator) * 0.1)
        self.register_buffer("moments", torch.zeros(3))  # of the returns: weight, sum, sum of squares

    def forward(self, inputs: Tensors) -> torch.Tensor:
        """Steps (L, C, ...) -> values (L, C, V)"""
        if self.ids is None:
            x = self.first(inputs["state"][:, :, None])
        else:
            x = self.first(inputs["obs"]) + self.ids
        return self.head(torch.relu(self.second(torch.relu(x))))[..., 0]

    def scale(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation of the returns seen so far (recent ones first)."""
        weight, total, squares = self.moments
        if weight == 0:
            return torch.zeros_like(total), torch.ones_like(total)
        mean = total / weight
        return mean, (squares / weight - mean**2).clamp_min(1e-4).sqrt()

    @torch.no_grad()
    def values(self, inputs: Tensors) -> torch.Tensor:
        """Values in true units (L, C, V)."""
        mean, std = self.scale()
        return self(inputs) * std + mean

    @torch.no_grad()
    def see_returns(self, returns: torch.Tensor, keep: float = 0.97) -> None:
        """Move the scale, and the last layer so that values in true units stay what they were."""
        (old_mean, old_std), count = self.scale(), torch.ones_like(returns.sum())
        self.moments.mul_(keep).add_(torch.stack([count, returns.mean(), (returns**2).mean()]) * (1 - keep))
        mean, std = self.scale()
        self.head.weight.mul_(old_std / std)
        self.head.bias.mul_(old_std).add_(old_mean - mean).div_(std)


class Agent(nn.Module):
    """The actor, the critic and, if there is one, the hypernetwork."""

    def __init__(self, args: Args, game: TeamGame, generator: torch.Generator):
        super().__init__()
        self.num_agents, self.actor = game.num_agents, Actor(args, game, generator)
        self.critic = Critic(args, game, generator)
        self.hyper = Hypernetwork(args, game, self.actor, generator) if args.hyper else None

    def initial_memory(self, num_envs: int) -> Tensors:
        """Memory before an episode, by name (C, agents or 1, size)."""
        shape = (num_envs, self.num_agents, self.actor.gru.hidden_size)
        memory = {"actor": torch.zeros(shape, device=device_of(self))}
        return memory | (self.hyper.initial_memory(num_envs) if self.hyper is not None else {})

    def policy(self, inputs: Tensors, memory: Tensors, hyper: Hypernetwork | None = None):
        """Steps (L, C, ...) and memory -> what describes the policy (L, C, N, ...), hypernetwork's codes, memory after.

        That is log-probabilities of the actions, or mean and log standard deviation of forces. Acting, learning and the
        reference policy (`hyper`: another hypernetwork) all go this way.
        """
        hyper, codes, after = hyper or self.hyper, None, {}
        if hyper is not None:
            codes, after = hyper(inputs, memory)
        logits, after["actor"] = self.actor(inputs["obs"], inputs["is_first"], memory["actor"], hyper, codes)
        if self.actor.continuous:
            return torch.cat([logits, self.actor.log_std.expand_as(logits)], dim=3), codes, after
        return F.log_softmax(logits.masked_fill(~inputs["legal"], -1e9), dim=3), codes, after


# policies: log-probabilities of actions, or means and log standard deviations of forces (..., A) or (..., 2 A)


def sample(policy: torch.Tensor, continuous: bool, generator: torch.Generator) -> torch.Tensor:
    """One action per row; an illegal action's log-probability is so low that it never wins (the Gumbel trick)."""
    if continuous:
        mean, log_std = policy.chunk(2, dim=-1)
        return mean + log_std.exp() * torch.randn(mean.shape, generator=generator, device=mean.device)
    noise = torch.rand(policy.shape, generator=generator, device=policy.device).clamp_min(1e-20)
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


# playing and evaluating


class Team:
    """Plays all agents of an env: what they remember, and what was last done and earned.

    With a `seat` it moves only that agent (see envs/roles.py), and remembers for the whole team what all did, whoever
    they were.
    """

    seat: int | None = None

    def __init__(self, agent: Agent, game: TeamGame, generator: torch.Generator, greedy: bool = False):
        self.agent, self.game, self.generator, self.greedy = agent, game, generator, greedy
        self.device = device_of(agent)
        self.memory = agent.initial_memory(game.num_envs)
        self.is_first = torch.ones(game.num_envs, dtype=torch.bool)
        self.last_step = torch.zeros(game.num_envs, game.num_agents, game.num_actions + 1)  # last action, last reward

    def observe(self) -> Tensors:
        """All that the networks see of the current step, as a sequence of length 1: (1, B, ...)"""
        inputs = self.game.observe() | {"is_first": self.is_first, "last_step": self.last_step}
        if not self.game.shared_reward:
            del inputs["state"]  # everybody's critic sees what the agent sees
        return {name: x[None].to(self.device) for name, x in inputs.items()}

    @torch.no_grad()
    def decide(self) -> tuple[Tensors, torch.Tensor, torch.Tensor]:
        """What was seen, the policy and the actions drawn from it, all (1, B, ...)."""
        inputs = self.observe()
        policy, codes, after = self.agent.policy(inputs, self.memory)
        self.memory, self.thoughts = self.memory | after, (inputs, policy, codes)
        if self.greedy:
            actions = policy.chunk(2, dim=-1)[0] if self.game.continuous else policy.argmax(-1)
        else:
            actions = sample(policy, self.game.continuous, self.generator)
        return inputs, policy, actions

    def act(self, env=None) -> np.ndarray:
        """(B, N) actions for the env, or (B,) of the seat"""
        actions = self.game.env_actions(self.decide()[2][0])
        return actions if self.seat is None else actions[:, self.seat]

    @torch.no_grad()
    def explain(self, row: int = 0) -> dict[str, np.ndarray]:
        """What was thought in game `row` before the last action (envs/roles.py), of all agents or of the seat."""
        (inputs, policy, codes), hyper = self.thoughts, self.agent.hyper
        found = {"value": self.agent.critic.values(inputs)[0, row].expand(self.game.num_agents)}
        found |= {} if self.game.continuous else {"policy": policy[0, row].exp()}
        if hyper is not None:
            found["weight_change"] = (codes[0, row] @ hyper.output_weight().T).norm(dim=1)
            if hyper.attention is not None:
                seen = torch.relu(hyper.embed(inputs["obs"][0, [row]]))
                found["attention"] = hyper.attend(seen, inputs["alive"][0, [row], None])[0][0].mean(0)  # over heads
        return {name: x[slice(None) if self.seat is None else self.seat].cpu().numpy() for name, x in found.items()}

    def watch(self, env, actions: np.ndarray, info: dict[str, np.ndarray]) -> None:
        """Remember the env's actions (B, N) of a step, what they earned and what has ended."""
        done = torch.from_numpy(info["done"])
        known = torch.from_numpy(np.asarray(actions))
        known = 2 * known - 1 if self.game.continuous else F.one_hot(known.long(), self.game.num_actions)
        self.last_step = torch.cat([known.float(), torch.from_numpy(self.game.reward())[:, :, None]], dim=2)
        self.last_step[done] = 0.0
        self.is_first = done.clone()

    def get_state(self) -> dict[str, np.ndarray]:
        saved = {f"memory.{name}": x for name, x in self.memory.items()}
        saved |= {"is_first": self.is_first, "last_step": self.last_step, "generator": self.generator.get_state()}
        return {name: x.cpu().numpy() for name, x in saved.items()}

    def set_state(self, saved: dict[str, np.ndarray]) -> None:
        saved = {name: torch.from_numpy(np.array(x)) for name, x in saved.items()}
        self.memory = {name: saved[f"memory.{name}"].to(self.device) for name in self.memory}
        self.is_first, self.last_step = saved["is_first"], saved["last_step"]
        self.generator.set_state(saved["generator"])


def load_team(checkpoint: Path, spec: dict, env, seed: int, greedy: bool) -> Team:
    """A checkpoint of this script as a team for a batched env."""
    args, game = saved_args(Args, spec), TeamGame(env)
    num_agents = len(spec["learners"])
    if num_agents != game.num_agents:
        here = f"{env.spec.env_id} has {game.num_agents}"
        raise envs.ConfigError(f"checkpoint '{checkpoint}' is of a team of {num_agents}, but {here}")
    trained, here = (config.get("max_block_comp", 0) for config in (spec["env_config"], env.spec.config))
    if trained != here:  # another size of what is seen
        blocks = f"was trained with max_block_comp={trained}, this game has {here}"
        raise envs.ConfigError(f"checkpoint '{checkpoint}' {blocks}")
    agent = Agent(args, game, torch.Generator())
    read_weights(checkpoint, agent)
    return Team(agent, game, torch.Generator().manual_seed(seed), greedy)


def load_policy(checkpoint: Path, spec: dict, env, seat: int, learner: int | None, seed: int, greedy: bool) -> Team:
    """A checkpoint of this script as one player: the agent of that seat."""
    if learner is not None:
        raise envs.ConfigError(f"checkpoint '{checkpoint}' has one policy for all seats, so '@{learner}' picks nothing")
    team = load_team(checkpoint, spec, env, seed, greedy)
    team.seat = seat
    return team


def evaluate(args: Args, agent: Agent, episodes: int, seed: int, greedy: bool = False) -> dict[str, float]:
    """Scores of fresh episodes, one in each of as many envs."""
    game = TeamGame(make_env(args.env_id, episodes, seed, args.start_jitter, args.continuous))
    scores = play_team(game, Team(agent, game, torch.Generator(device_of(agent)).manual_seed(seed), greedy))
    game.env.close()
    return scores


# algorithm


def store(storage: Tensors, step: int, num_steps: int, values: Tensors) -> None:
    """storage[name][step] = values[name], with room for all steps made at the first one."""
    for name, x in values.items():
        if name not in storage:
            storage[name] = torch.zeros(num_steps, *x.shape, dtype=x.dtype, device=x.device)
        storage[name][step] = x


def rollout(args: Args, team: Team, batch, outcome, starts, run) -> torch.Tensor:
    """Play `num_steps` steps with the team into storage that is made once and used again; returns values (1, B, V) of
    what comes next.

    batch (T, B, N, ...): what the update learns from. outcome (T, B, V): reward, terminated, truncated, values, and
    final_values of the last step of episodes that ran out of time. starts (T / L, B, ...): the memory at every chunk.
    """
    game, critic, num_values = team.game, team.agent.critic, team.agent.critic.num_values
    for step in range(args.num_steps):
        if step % args.chunk_length == 0:
            store(starts, step // args.chunk_length, args.num_steps // args.chunk_length, team.memory)
        inputs, policy, actions = team.decide()
        values = critic.values(inputs)
        inputs |= {"policy": policy, "actions": actions, "log_probs": log_prob_of(policy, actions, game.continuous)}
        store(batch, step, args.num_steps, {name: x[0] for name, x in inputs.items()})
        run.clock("policy")

        env_actions = game.env_actions(actions[0])
        _, reward, terminated, truncated, info = game.env.step(env_actions)
        earned = {"reward": reward, "terminated": terminated, "truncated": truncated}
        earned = {name: torch.from_numpy(x[:, :num_values]).to(team.device) for name, x in earned.items()}
        team.watch(game.env, env_actions, info)
        run.count(info)
        run.clock("env")

        final_values = torch.zeros_like(values)
        if truncated[:, :num_values].any():  # the value of what would have followed, had time not run out
            final_values = critic.values({name: x[None].to(team.device) for name, x in game.final(info).items()})
        store(outcome, step, args.num_steps, earned | {"values": values[0], "final_values": final_values[0]})
        run.clock("policy")
    return critic.values(team.observe())


def advantages_of(reward, value, next_value, mask, terminated, truncated, gamma: float, lam: float) -> torch.Tensor:
    """GAE; all (T, B, V). next_value is the value of what follows a step: after a time limit, of the final observation.

    An end by the rules cuts both the bootstrap and the sum, a time limit only the sum. Zero where the mask is off.
    """
    advantages = torch.zeros_like(reward)
    following = torch.zeros_like(reward[0])
    for step in reversed(range(len(reward))):
        delta = reward[step] + gamma * next_value[step] * ~terminated[step] - value[step]
        following = (delta + gamma * lam * ~(terminated[step] | truncated[step]) * following) * mask[step]
        advantages[step] = following
    return advantages


def estimate(args: Args, outcome: Tensors, next_values: torch.Tensor, mask: torch.Tensor):
    """Advantages and returns (T, B, V) of a rollout; next_values (1, B, V) are of what comes after it."""
    values, truncated = outcome["values"], outcome["truncated"]
    following = torch.cat([values[1:], next_values])
    following = torch.where(truncated, outcome["final_values"], following)
    ends = (outcome["terminated"], truncated)
    advantages = advantages_of(outcome["reward"], values, following, mask, *ends, args.gamma, args.gae_lambda)
    return advantages, advantages + values


def normalise(advantages: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
    """advantages (T, B, V) with mean 0 and deviation 1 over those who were there to act, alive (T, B, N)."""
    acted = advantages.expand_as(alive)[alive]
    spread = acted.std() if len(acted) > 1 else 1.0  # of a single one there is none
    return (advantages - acted.mean()) / (spread + 1e-8)


def mean_square(codes: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Mean square of the weight changes that codes (..., W) give by an output layer (P, W), without making them."""
    return (codes @ (output.T @ output / len(output)) * codes).sum(-1)


def smoothness(codes: torch.Tensor, output: torch.Tensor, is_first: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
    """L_smooth: mean squared change of the generated weights from one step to the next of an episode. A fallen agent's
    weights are of no use to anybody.

    codes (L, C, N, W), output (P, W), is_first (L, C), alive (L, C, N)
    """
    same = ~is_first[1:, :, None] & alive[1:] & alive[:-1]
    return (mean_square(codes[1:] - codes[:-1], output) * same).sum() / same.sum().clamp_min(1)


def ppo_loss(args: Args, agent: Agent, mb: Tensors, memory: Tensors, ent_coef: float):
    """The loss of one minibatch of chunks (L, C, ...), and what to log."""
    alive, value_mask, continuous = mb["alive"].float(), mb["value_mask"].float(), agent.actor.continuous

    def mean(x: torch.Tensor, mask: torch.Tensor = alive) -> torch.Tensor:  # over those who are on the board
        return (x * mask).sum() / mask.sum().clamp_min(1.0)

    policy, codes, _ = agent.policy(mb, memory)
    log_ratio = (log_prob_of(policy, mb["actions"], continuous) - mb["log_probs"]) * alive
    ratio = log_ratio.exp()
    advantages = mb["advantages"].expand_as(ratio)
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = mean(torch.max(-advantages * ratio, -advantages * clipped_ratio))
    entropy = mean(entropy_of(policy, continuous))

    value = agent.critic(mb)
    returns_mean, returns_std = agent.critic.scale()
    value_loss = mean(0.5 * (value - (mb["returns"] - returns_mean) / returns_std) ** 2, value_mask)
    loss = policy_loss - ent_coef * entropy + args.vf_coef * value_loss
    stats = {"losses/policy_loss": policy_loss, "losses/value_loss": value_loss, "losses/entropy": entropy}
    with torch.no_grad():
        stats["losses/approx_kl"] = mean(ratio - 1 - log_ratio)
        stats["losses/clipfrac"] = mean(((ratio - 1).abs() > args.clip_coef).float())
    if codes is not None:
        output = agent.hyper.output_weight()
        smooth = smoothness(codes, output, mb["is_first"], mb["alive"])
        align = mean(kl_between(mb["reference"], policy, continuous))
        loss = loss + args.smooth_coef * smooth + args.align_coef * align
        size = mean_square(codes.detach(), output.detach()).mean().sqrt()
        stats |= {"hyper/smooth": smooth, "hyper/align": align, "hyper/delta_size": size}
    return loss, {name: stat.item() for name, stat in stats.items()}, ratio


def chunks_of(x: torch.Tensor, length: int) -> torch.Tensor:
    """(T, B, ...) -> (L, T / L * B, ...): the rollout cut into sequences of L steps, those of the first steps first."""
    return x.view(len(x) // length, length, *x.shape[1:]).transpose(0, 1).flatten(1, 2)


def make_optimizer(args: Args, agent: Agent) -> torch.optim.Optimizer:
    """Adam with a group for each network: actor, critic, hypernetwork."""
    rates = [(agent.actor, args.learning_rate), (agent.critic, args.learning_rate), (agent.hyper, args.hyper_lr)]
    groups = [{"params": list(net.parameters()), "lr": rate} for net, rate in rates if net is not None]
    return torch.optim.Adam(groups, eps=1e-5, foreach=True)


def update(args: Args, agent: Agent, optimizer, batch: Tensors, memory: Tensors, ent_coef: float, generator):
    """All epochs over one batch of chunks (L, C, ...) with the memory at their starts (C, ...); returns what to log."""
    chunks, log = batch["is_first"].shape[1], []
    for _ in range(args.update_epochs):
        order = torch.randperm(chunks, generator=generator).to(batch["is_first"].device)
        for mb_inds in order.chunk(args.num_minibatches):
            mb = {name: x.index_select(1, mb_inds) for name, x in batch.items()}
            mb_memory = {name: x[mb_inds] for name, x in memory.items()}
            loss, stats, _ = ppo_loss(args, agent, mb, mb_memory, ent_coef)
            norms = descend(optimizer, loss, args.max_grad_norm)
            names = ("losses/grad_norm", "losses/critic_grad_norm", "hyper/grad_norm")
            log.append(stats | dict(zip(names, norms, strict=False)))
    with torch.no_grad():  # how far the update moved the policy, on the last minibatch
        kl = kl_between(mb["policy"], agent.policy(mb, mb_memory)[0], agent.actor.continuous)
        policy_kl = (kl * mb["alive"]).sum() / mb["alive"].sum().clamp_min(1)
    means = {name: float(np.mean([stats[name] for stats in log])) for name in log[0]}
    return means | {"losses/policy_kl": policy_kl.item()}


def train(args: Args, run: Run) -> None:
    """The whole run."""
    # seeding
    env_seed, policy_seed, data_seed, init_seed, eval_seed = (
        int(seed) for seed in np.random.SeedSequence(args.seed).generate_state(5)
    )
    data_generator = torch.Generator().manual_seed(data_seed)

    # env setup
    env = make_env(args.env_id, args.num_envs, env_seed, args.start_jitter, args.continuous)
    game = TeamGame(env)
    if args.start_window:
        game.set_start_window(args.start_window, args.start_window_prob)

    # agent
    agent = Agent(args, game, torch.Generator().manual_seed(init_seed)).to(run.device)
    team = Team(agent, game, torch.Generator(run.device).manual_seed(policy_seed))
    optimizer = make_optimizer(args, agent)
    initial_rates = [group["lr"] for group in optimizer.param_groups]
    target, target_memory = copy.deepcopy(agent.hyper), agent.initial_memory(args.num_envs)
    copy_every = -(-args.target_every // (args.update_epochs * args.num_minibatches))  # iterations

    # logging
    keep = {"optimizer": optimizer, "env": env, "team": team, "data_generator": data_generator}
    if target is not None:
        keep |= {"target": target, "target_memory": target_memory}
    title = f"{'hyper-MAPPO' if args.hyper else 'MAPPO'} on {args.env_id}"
    run.start(agent, env.spec, learners=list(range(game.num_agents)), keep=keep, title=title)
    batch, outcome, starts = {}, {}, {}

    for iteration in run.iterations():
        ent_coef = args.ent_coef + (args.ent_coef_final - args.ent_coef) * run.progress
        if args.start_window:
            prob = args.start_window_prob * max(0.0, 1 - run.progress / max(args.start_window_until, 1e-9))
            game.set_start_window(args.start_window, prob)
        for group, rate in zip(optimizer.param_groups, initial_rates, strict=True):
            group["lr"] = rate * (1 - run.progress) if args.anneal_lr else rate
        if target is not None and (iteration - 1) % copy_every == 0:
            target.load_state_dict(agent.hyper.state_dict())
            target_memory.update(team.memory)

        # rollout
        next_values = rollout(args, team, batch, outcome, starts, run)

        # advantages
        value_mask = torch.ones_like(outcome["truncated"]) if game.shared_reward else batch["alive"]
        advantages, returns = estimate(args, outcome, next_values, value_mask)
        agent.critic.see_returns(returns[value_mask])

        # update
        b_all = batch | {"value_mask": value_mask, "returns": returns}
        b_all["advantages"] = normalise(advantages, batch["alive"])
        if target is not None:  # the policy by the target hypernetwork, from the stored inputs and with its own memory
            with torch.no_grad():
                b_all["reference"], _, after = agent.policy(batch, target_memory, target)
            target_memory.update(after)
        b_chunks = {name: chunks_of(x, args.chunk_length) for name, x in b_all.items()}  # (L, C, ...)
        b_starts = {name: x.flatten(0, 1) for name, x in starts.items()}  # (C, ...)
        losses = update(args, agent, optimizer, b_chunks, b_starts, ent_coef, data_generator)
        run.clock("update")

        # evaluation
        if run.evaluation_due():
            scores = evaluate(args, agent, args.eval_episodes, eval_seed)
            run.evaluated(scores, by=("win_rate", "return"))
            run.clock("eval")

        # logging
        if run.log_due():
            unexplained = advantages[value_mask].var() / returns[value_mask].var().clamp_min(1e-8)
            losses["losses/explained_variance"] = 1 - unexplained.item()
            run.log(losses | {"charts/learning_rate": optimizer.param_groups[0]["lr"]})

    # result
    seed = eval_seed + 1
    results = {"eval": evaluate(args, agent, args.final_eval_episodes, seed)}
    results["eval_greedy"] = evaluate(args, agent, args.final_eval_episodes, seed, greedy=True)
    if run.load_best():
        results["eval_best"] = evaluate(args, agent, args.final_eval_episodes, seed)
    run.finish(results)


if __name__ == "__main__":
    sys.exit(main(Args, train))
