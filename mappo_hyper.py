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
    python mappo_hyper.py --env-id smac-8m --teammates nearest,focus --test-teammates hold      # among others
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
from envs.memory import GRU, LSTM, Chunks, View
from envs.pool import Teammates
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

    # teammates
    teammates: str = ""
    """battles: who takes some seats in each episode: rule-based teams and run folders (nearest,focus,runs/pool/8m-*)"""
    test_teammates: str = ""
    """those of a second evaluation (test_win_rate), which are never trained with"""
    later_teammates: str = ""
    """those who are drawn from half of the training on (empty: the same ones)"""
    teammate_seats: Whole = 0
    """seats that teammates take (0: from one to all but one, drawn in each episode)"""
    switch_step: Whole = 0
    """step of every episode in which other teammates are drawn for their seats (0: never)"""

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
    see_actions: bool = False
    """the actor also sees the last actions and reward of all agents, as the hypernetwork does"""

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
    hyper_attention: bool = True
    """joint input: attention over the living agents (off: their mean)"""
    hyper_history: bool = True
    """an LSTM over the episode with last actions and reward (off: the current step only)"""
    hyper_lr: Rate = 1e-4
    """the hypernetwork's learning rate at the start"""
    smooth_coef: Weight = 0.01
    """alpha, weight of L_smooth: mean squared change of the generated weights from step to step, by their own square"""
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
        for name in ("test_teammates", "later_teammates", "teammate_seats", "switch_step"):
            if getattr(self, name) and not self.teammates:
                raise envs.ConfigError(f"--{name.replace('_', '-')} needs --teammates")


# networks


def linear(in_size: int, out_size: int, gain: float, generator: torch.Generator, bias: bool = True) -> nn.Linear:
    """A layer with orthogonal weights and a bias of zero at the start."""
    layer = nn.Linear(in_size, out_size, bias)
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def with_memory(layer: nn.Module, generator: torch.Generator) -> nn.Module:
    """A recurrent layer with orthogonal weights and biases of zero at the start."""
    for part in (layer.from_input, layer.from_memory):
        nn.init.orthogonal_(part.weight, generator=generator)
        nn.init.zeros_(part.bias)
    return layer


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
        self.gru = with_memory(GRU(hidden_size, hidden_size), generator)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden_size) for _ in range(3))
        self.ids = nn.Parameter(torch.randn(game.num_agents, hidden_size, generator=generator) * 0.1)
        self.log_std = nn.Parameter(torch.full((game.num_actions,), -0.5)) if game.continuous else None
        self.from_last = None
        if args.see_actions:
            self.from_last = linear(game.num_agents * (game.num_actions + 1), hidden_size, 1.0, generator, bias=False)

    def forward(self, inputs: Tensors, memory: torch.Tensor, view: View, hyper=None, codes=None):
        """Steps (T, B, ...) and memory of the agents in view -> logits or means (R, A), padded to a multiple of 8, and
        memory (R, H). With a hypernetwork and its codes (R, W) the layers are the changed ones."""
        rows, agents = view.agents, len(self.ids)

        def layer(k: int, x: torch.Tensor) -> torch.Tensor:
            y = self.layers[k](x)
            return y if hyper is None else hyper.change(k, x, y, generated[k])

        generated = None if hyper is None else hyper.generate(codes)
        x = layer(0, rows.take(inputs["obs"])) + self.ids.index_select(0, rows.place % agents)
        if self.from_last is not None:
            told = self.from_last(view.team.take(inputs["last_step"].flatten(2)[:, :, None]))  # (Q, H)
            x = x + told.index_select(0, view.slot // agents)
        x = self.norms[1](torch.relu(layer(1, self.norms[0](torch.relu(x)))))
        memory = self.gru(x, rows.sizes, rows.take_memory(memory))
        return layer(2, self.norms[2](memory)), memory


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
        width, self.num_agents = args.hyper_hidden_size, game.num_agents
        self.joint, self.id_table, self.attention, self.lstm = args.hyper_input == "joint", None, None, None
        if args.hyper_input == "id":
            self.id_table = nn.Parameter(torch.randn(self.num_agents, width, generator=generator))
        else:
            self.embed = linear(game.obs_size, width, 2**0.5, generator)
            if self.joint:
                if args.hyper_attention:  # query, key and value
                    self.attention = linear(width, 2 * width, 1.0, generator)
                self.from_team = linear(width, width, 1.0, generator)
            if args.hyper_history:
                last_size = (game.num_actions + 1) * (self.num_agents if self.joint else 1)
                self.from_last = linear(last_size, width, 1.0, generator)
                self.lstm = with_memory(LSTM(width, width), generator)
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

    def attend(self, x: torch.Tensor, alive: torch.Tensor, slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x (R, W) of the living, alive (Q, N), where each stands in it -> attention (Q, N, N) to the living, and what
        each is told (R, W)."""
        width = x.shape[1]
        projected = x.new_zeros(alive.numel(), 2 * width).index_copy(0, slot, self.attention(x))
        parts = projected.view(*alive.shape, 2 * width).split((width // 2, width // 2, width), dim=2)
        query, key, value = (part.contiguous() for part in parts)
        scores = query @ key.transpose(1, 2) / query.shape[2] ** 0.5
        # torch's softmax of a few columns takes four times as long
        weights = torch.exp(scores - scores.detach().amax(2, keepdim=True)) * alive[:, None]
        weights = weights / weights.sum(2, keepdim=True)
        return weights, (weights @ value).flatten(0, 1).index_select(0, slot)

    def forward(self, inputs: Tensors, memory: Tensors, view: View) -> tuple[torch.Tensor, Tensors]:
        """Steps (T, B, ...) as the rollout stores them -> codes (R, W) of the agents in view, memory after each row."""
        rows, last_step = view.agents, inputs.get("last_step")
        if self.id_table is not None:
            return torch.tanh(self.own(self.id_table)).index_select(0, rows.place % self.num_agents), {}
        own = shared = torch.relu(self.embed(rows.take(inputs["obs"])))  # (R, W)
        if self.joint:
            rows, team, last_step = view.team, view.slot // self.num_agents, last_step.flatten(2)[:, :, None]
            alive = rows.take(inputs["alive"][:, :, None]).float()  # (Q, N)

            def mean(x: torch.Tensor) -> torch.Tensor:  # (R, W) of the living -> (Q, W), added in the order of agents
                everybody = x.new_zeros(alive.numel(), x.shape[1]).index_copy(0, view.slot, x)
                return everybody.view(*alive.shape, -1).sum(1) / alive.sum(1, keepdim=True)

            if self.attention is None:
                own = own + self.from_team(mean(own)).index_select(0, team)
            else:
                own = own + self.from_team(self.attend(own, alive, view.slot)[1])
            shared = mean(own)
        if self.lstm is None:
            return torch.tanh(self.own(own)), {}
        before = tuple(rows.take_memory(memory[name]) for name in ("hyper_h", "hyper_c"))
        h, c = self.lstm(shared + self.from_last(rows.take(last_step)), rows.sizes, *before)
        return torch.tanh((h.index_select(0, team) if self.joint else h) + self.own(own)), {"hyper_h": h, "hyper_c": c}

    def generate(self, codes: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """codes (R, W) -> for each layer the factor G and a bias (R, (rank + 1) * columns), or scales (R, groups)."""
        return F.linear(codes, self.output_weight()).split([layer.out_features for layer in self.outputs], dim=1)

    def change(self, k: int, x: torch.Tensor, y: torch.Tensor, generated: torch.Tensor) -> torch.Tensor:
        """What layer k, which makes y of x, makes of it when it is changed as generated; all (R, ...)."""
        if k not in self.changed:
            return (y.unflatten(1, (self.NUM_SCALES, -1)) * (1 + generated[..., None])).view_as(y)
        low = self.factors[str(k)](x) if str(k) in self.factors else x
        low = F.pad(low, (0, 1), value=1.0)  # a one for the bias
        generated = generated.unflatten(1, (self.ranks[k] + 1, -1))  # (R, rank and bias, columns)
        if self.ranks[k] <= 16:  # vectors times small matrices: twice as fast as bmm
            return y + (low[:, :, None] * generated).sum(1)
        return y + torch.bmm(low[:, None], generated)[:, 0]

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

    def forward(self, x: torch.Tensor, agent: torch.Tensor | None = None) -> torch.Tensor:
        """States (..., S), or what agents see (..., D) and which they are -> values (...)"""
        x = self.first(x)
        if self.ids is not None:
            x = x + self.ids.index_select(0, agent)
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
        """Steps (L, B, ...) -> values in true units (L, B, V)"""
        mean, std = self.scale()
        if self.ids is None:
            return self(inputs["state"][:, :, None]) * std + mean
        return self(inputs["obs"], torch.arange(self.num_values, device=mean.device)) * std + mean

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

    def in_view(self, inputs: Tensors) -> torch.Tensor:
        """Whom to compute (T, B, N): the living and, where others play along, of them the learner's; joint: all."""
        everybody = "learner" not in inputs or (self.hyper is not None and self.hyper.joint)
        return inputs["alive"] if everybody else inputs["alive"] & inputs["learner"]

    def policy(self, inputs: Tensors, memory: Tensors, view: View, hyper: Hypernetwork | None = None):
        """Steps (T, B, ...) and memory -> what describes the policy (R, ...) of the agents in view, hypernetwork's
        codes, memory after each row.

        That is log-probabilities of the actions, or mean and log standard deviation of forces. Acting, learning and the
        reference policy (`hyper`: another hypernetwork) all go this way.
        """
        hyper, codes, after, rows = hyper or self.hyper, None, {}, view.agents
        if hyper is not None:
            codes, after = hyper(inputs, memory, view)
        logits, after["actor"] = self.actor(inputs, memory["actor"], view, hyper, codes)
        if self.actor.continuous:
            means = logits[:, : self.actor.num_actions]
            return torch.cat([means, self.actor.log_std.expand_as(means)], dim=1), codes, after
        return F.log_softmax(logits.masked_fill(~rows.take(inputs["legal"]), -1e9), dim=1), codes, after

    def remember(self, memory: Tensors, after: Tensors, view: View) -> Tensors:
        """Memory (B, agents or 1, size) with what it is after the last step in view."""
        of_team = () if self.hyper is None or not self.hyper.joint else ("hyper_h", "hyper_c")
        rows = {name: view.team if name in of_team else view.agents for name in memory}
        return {name: rows[name].put_last(x, after[name]) for name, x in memory.items()}


# policies: log-probabilities of actions, padded as the actor's last layer is, or means and log standard deviations of
# forces (..., 2 A)


def sample(policy: torch.Tensor, game: TeamGame, generator: torch.Generator) -> torch.Tensor:
    """One action per row; an illegal action's log-probability is so low that it never wins (the Gumbel trick)."""
    if game.continuous:
        mean, log_std = policy.chunk(2, dim=-1)
        return mean + log_std.exp() * torch.randn(mean.shape, generator=generator, device=mean.device)
    policy = policy[..., : game.num_actions]
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
    they were. With `teammates` those move in their seats.
    """

    seat: int | None = None

    def __init__(self, agent: Agent, game: TeamGame, generator: torch.Generator, greedy=False, teammates=None):
        self.agent, self.game, self.generator, self.greedy = agent, game, generator, greedy
        self.teammates: Teammates | None = teammates
        self.device = device_of(agent)
        self.memory = agent.initial_memory(game.num_envs)
        self.is_first = torch.ones(game.num_envs, dtype=torch.bool)
        self.last_step = torch.zeros(game.num_envs, game.num_agents, game.num_actions + 1)  # last action, last reward

    def observe(self) -> Tensors:
        """All that the networks see of the current step, as a sequence of length 1: (1, B, ...)"""
        inputs = self.game.observe() | {"is_first": self.is_first, "last_step": self.last_step}
        inputs["legal"] = F.pad(inputs["legal"], (0, -self.game.num_actions % 8))  # as wide as the actor's last layer
        if not self.game.shared_reward:
            del inputs["state"]  # everybody's critic sees what the agent sees
        if self.teammates is not None:
            inputs["learner"] = torch.from_numpy(self.teammates.is_learner)
        return {name: x[None].to(self.device) for name, x in inputs.items()}

    @torch.no_grad()
    def decide(self, who: torch.Tensor | None = None) -> tuple[Tensors, torch.Tensor, torch.Tensor]:
        """What was seen, the policy and the actions drawn from it, all (1, B, ...); of `who` (B, N), or of all."""
        inputs = self.observe() | ({} if who is None else {"learner": who[None].to(self.device)})
        view = View.of_step(self.agent.in_view(inputs), inputs["is_first"])
        of_rows, codes, after = self.agent.policy(inputs, self.memory, view)
        self.memory = self.agent.remember(self.memory, after, view)
        policy = of_rows.new_zeros(*inputs["alive"].shape, of_rows.shape[1])
        if not self.game.continuous:
            policy.masked_fill_(~inputs["legal"], -1e9)  # the fallen do what is legal
        policy.flatten(0, 2).index_copy_(0, view.slot, of_rows)
        self.thoughts = (inputs, policy, view, codes)
        if self.greedy:
            actions = policy.chunk(2, dim=-1)[0] if self.game.continuous else policy.argmax(-1)
        else:
            actions = sample(policy, self.game, self.generator)
        if self.teammates is not None:
            others = torch.from_numpy(self.teammates.act()).to(self.device)
            actions = torch.where(inputs["learner"], actions, others)
        return inputs, policy, actions

    def choose(self, seen: Tensors, who: torch.Tensor) -> torch.Tensor:
        """Actions (M,) of the M agents of `who` (B, N), as a member of a mixed team (envs/pool.py)"""
        return self.decide(who)[2][0].cpu()[who]

    def act(self, env=None) -> np.ndarray:
        """(B, N) actions for the env, or (B,) of the seat"""
        actions = self.game.env_actions(self.decide()[2][0])
        return actions if self.seat is None else actions[:, self.seat]

    @torch.no_grad()
    def explain(self, row: int = 0) -> dict[str, np.ndarray]:
        """What was thought in game `row` before the last action (envs/roles.py), of all agents or of the seat."""
        (inputs, policy, view, codes), hyper = self.thoughts, self.agent.hyper
        found = {"value": self.agent.critic.values(inputs)[0, row].expand(self.game.num_agents)}
        found |= {} if self.game.continuous else {"policy": policy[0, row, :, : self.game.num_actions].exp()}
        if hyper is not None:
            codes = codes.new_zeros(inputs["alive"].numel(), codes.shape[1]).index_copy(0, view.slot, codes)
            codes = codes.view(-1, self.game.num_agents, codes.shape[1])[row]
            found["weight_change"] = (codes @ hyper.output_weight().T).norm(dim=1)
            if hyper.attention is not None:
                alive = inputs["alive"][0, [row]]
                seen = torch.relu(hyper.embed(inputs["obs"][0, row, alive[0]]))
                found["attention"] = hyper.attend(seen, alive.float(), alive[0].nonzero()[:, 0])[0][0]
        return {name: x[slice(None) if self.seat is None else self.seat].cpu().numpy() for name, x in found.items()}

    def watch(self, env, actions: np.ndarray, info: dict[str, np.ndarray]) -> None:
        """Remember the env's actions (B, N) of a step, what they earned and what has ended."""
        done = torch.from_numpy(info["done"])
        known = torch.from_numpy(np.asarray(actions))
        known = 2 * known - 1 if self.game.continuous else F.one_hot(known.long(), self.game.num_actions)
        self.last_step = torch.cat([known.float(), torch.from_numpy(self.game.reward())[:, :, None]], dim=2)
        self.last_step[done] = 0.0
        self.is_first = done.clone()
        if done.any():  # who sits out the first step of an episode must not remember another one
            self.memory = {name: x * ~done[:, None, None].to(self.device) for name, x in self.memory.items()}
        if self.teammates is not None:
            self.teammates.watch(env, actions, info)

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
    trained, here = (config.get("max_block_comp", 0) for config in (spec["env_config"], env.spec.config))
    if trained != here:  # another size of what is seen
        blocks = f"was trained with max_block_comp={trained}, this game has {here}"
        raise envs.ConfigError(f"checkpoint '{checkpoint}' {blocks}")
    agent = Agent(args, game, torch.Generator())
    read_weights(checkpoint, agent)
    return Team(agent, game, torch.Generator().manual_seed(seed), greedy)


def make_teammates(args: Args, game: TeamGame, pools: list[str], seed: int) -> Teammates | None:
    pools = [pool for pool in pools if pool]
    return Teammates(game, pools, seed, args.teammate_seats, args.switch_step) if pools else None


def evaluate(args: Args, agent: Agent, episodes: int, seed: int, greedy: bool = False, progress: float = 1.0):
    """Scores of fresh episodes, one in each of as many envs; among the teammates of that part of the training, and, if
    there are any, of the test."""
    late, scores = bool(args.later_teammates) and progress >= 0.5, {}
    for prefix, pool in (("", args.later_teammates if late else args.teammates), ("test_", args.test_teammates)):
        if prefix and not pool:
            continue
        game = TeamGame(make_env(args.env_id, episodes, seed, args.start_jitter, args.continuous))
        generator = torch.Generator(device_of(agent)).manual_seed(seed)
        team = Team(agent, game, generator, greedy, make_teammates(args, game, [pool], seed))
        scores |= {prefix + name: score for name, score in play_team(game, team).items()}
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
    centre = acted.mean() if len(acted) else 0.0  # among teammates all of the learner's may have fallen
    return (advantages - centre) / (spread + 1e-8)


def mean_square(codes: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Mean square of the weight changes that codes (..., W) give by an output layer (P, W), without making them."""
    return (codes @ (output.T @ output / len(output)) * codes).sum(-1)


def mean_over(batch: Tensors, view: View):
    """A mean over rows in view, from a first one on; where others play along, over the learner's own."""
    own = view.agents.take(batch["learner"]).float() if "learner" in batch else None

    def mean(x: torch.Tensor, first: int = 0) -> torch.Tensor:
        if own is None:
            return x.sum() / max(len(x), 1)
        return (x * own[first:]).sum() / own[first:].sum().clamp_min(1.0)

    return mean


def ppo_loss(args: Args, agent: Agent, batch: Tensors, starts: Tensors, view: View, ent_coef: float):
    """The loss of the chunks in view of a rollout (T, B, ...) with memory at their starts (T / L, B, ...), and what to
    log. Only who was on the board is in view."""
    rows, continuous, mean = view.agents, agent.actor.continuous, mean_over(batch, view)
    policy, codes, _ = agent.policy(batch, starts, view)
    log_ratio = log_prob_of(policy, rows.take(batch["actions"]), continuous) - rows.take(batch["log_probs"])
    if "learner" in batch:  # what others did is no step of this policy
        log_ratio = log_ratio * rows.take(batch["learner"])
    ratio, advantages = log_ratio.exp(), rows.take(batch["advantages"])
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = mean(torch.max(-advantages * ratio, -advantages * clipped_ratio))
    entropy = mean(entropy_of(policy, continuous))

    returns_mean, returns_std = agent.critic.scale()
    if "state" in batch:
        values, returns = agent.critic(view.team.take(batch["state"][:, :, None])), view.team.take(batch["returns"])
    else:
        values = agent.critic(rows.take(batch["obs"]), rows.place % agent.num_agents)
        returns = rows.take(batch["returns"])
    value_loss = 0.5 * F.mse_loss(values, (returns - returns_mean) / returns_std)
    loss = policy_loss - ent_coef * entropy + args.vf_coef * value_loss
    stats = {"losses/policy_loss": policy_loss, "losses/value_loss": value_loss, "losses/entropy": entropy}
    with torch.no_grad():
        stats["losses/approx_kl"] = mean(ratio - 1 - log_ratio)
        stats["losses/clipfrac"] = mean(((ratio - 1).abs() > args.clip_coef).float())
    if codes is not None:
        # L_smooth: how much the generated weights change from one step to the next of an episode, by their own size
        first, output = len(rows.start), agent.hyper.output_weight()
        size = mean(mean_square(codes, output))
        smooth = mean(mean_square(codes[first:] - rows.before(codes), output), first) / (size + 1e-12)
        align = mean(kl_between(rows.take(batch["reference"]), policy, continuous))
        loss = loss + args.smooth_coef * smooth + args.align_coef * align
        stats |= {"hyper/smooth": smooth, "hyper/align": align, "hyper/delta_size": size.sqrt()}
    return loss, {name: stat.detach() for name, stat in stats.items()}, ratio


@torch.no_grad()
def reference_of(agent: Agent, batch: Tensors, memory: Tensors, target: Hypernetwork) -> tuple[torch.Tensor, Tensors]:
    """The policy by the target hypernetwork over a rollout (T, B, N, A), from its own memory, and memory after it."""
    view = Chunks(agent.in_view(batch), batch["is_first"], len(batch["alive"])).view()
    policy, _, after = agent.policy(batch, memory, view, target)
    return view.agents.put(policy, batch["policy"]), agent.remember(memory, after, view)


def make_optimizer(args: Args, agent: Agent) -> torch.optim.Optimizer:
    """Adam with a group for each network: actor, critic, hypernetwork."""
    rates = [(agent.actor, args.learning_rate), (agent.critic, args.learning_rate), (agent.hyper, args.hyper_lr)]
    groups = [{"params": list(net.parameters()), "lr": rate} for net, rate in rates if net is not None]
    return torch.optim.Adam(groups, eps=1e-5, fused=True)


def update(args: Args, agent: Agent, optimizer, batch: Tensors, starts: Tensors, ent_coef: float, generator):
    """All epochs over a rollout (T, B, ...) with the memory at the starts of its chunks; returns what to log."""
    chunks, log = Chunks(agent.in_view(batch), batch["is_first"], args.chunk_length), []
    for _ in range(args.update_epochs):
        for mb_inds in torch.randperm(chunks.number, generator=generator).chunk(args.num_minibatches):
            view = chunks.view(mb_inds)
            loss, stats, _ = ppo_loss(args, agent, batch, starts, view, ent_coef)
            norms = descend(optimizer, loss, args.max_grad_norm)
            names = ("losses/grad_norm", "losses/critic_grad_norm", "hyper/grad_norm")
            log.append(stats | dict(zip(names, norms, strict=False)))
    means = {name: torch.stack([torch.as_tensor(stats[name]) for stats in log]).mean().item() for name in log[0]}
    with torch.no_grad():  # how far the update moved the policy, on the last minibatch
        kl = kl_between(view.agents.take(batch["policy"]), agent.policy(batch, starts, view)[0], agent.actor.continuous)
        means["losses/policy_kl"] = mean_over(batch, view)(kl).item()
    return means


def train(args: Args, run: Run) -> None:
    """The whole run."""
    # seeding
    env_seed, policy_seed, data_seed, init_seed, eval_seed, pool_seed = (
        int(seed) for seed in np.random.SeedSequence(args.seed).generate_state(6)
    )
    data_generator = torch.Generator().manual_seed(data_seed)

    # env setup
    env = make_env(args.env_id, args.num_envs, env_seed, args.start_jitter, args.continuous)
    game = TeamGame(env)
    if args.start_window:
        game.set_start_window(args.start_window, args.start_window_prob)

    # agent
    agent = Agent(args, game, torch.Generator().manual_seed(init_seed)).to(run.device)
    teammates = make_teammates(args, game, [args.teammates, args.later_teammates], pool_seed)
    if teammates is not None:
        teammates.refuse(args.test_teammates)
    team = Team(agent, game, torch.Generator(run.device).manual_seed(policy_seed), teammates=teammates)
    optimizer = make_optimizer(args, agent)
    initial_rates = [group["lr"] for group in optimizer.param_groups]
    target, target_memory = copy.deepcopy(agent.hyper), agent.initial_memory(args.num_envs)
    copy_every = -(-args.target_every // (args.update_epochs * args.num_minibatches))  # iterations

    # logging
    keep = {"optimizer": optimizer, "env": env, "team": team, "data_generator": data_generator}
    if target is not None:
        keep |= {"target": target, "target_memory": target_memory}
    if teammates is not None:
        keep["teammates"] = teammates
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
        if args.later_teammates:
            teammates.current = int(run.progress >= 0.5)
        just_copied = (iteration - 1) % copy_every == 0
        if target is not None and just_copied:
            target.load_state_dict(agent.hyper.state_dict())

        # rollout
        next_values = rollout(args, team, batch, outcome, starts, run)

        # advantages
        value_mask = torch.ones_like(outcome["truncated"]) if game.shared_reward else batch["alive"]
        advantages, returns = estimate(args, outcome, next_values, value_mask)
        agent.critic.see_returns(returns[value_mask])

        # update
        b_all = batch | {"returns": returns}
        acted = batch["alive"] & batch["learner"] if teammates is not None else batch["alive"]
        b_all["advantages"] = normalise(advantages, acted).expand_as(acted).contiguous()
        if target is not None:  # the policy by the target hypernetwork, from the stored inputs and with its own memory
            known = (batch["policy"], team.memory) if just_copied else reference_of(agent, batch, target_memory, target)
            b_all["reference"] = known[0]
            target_memory.update(known[1])
        losses = update(args, agent, optimizer, b_all, starts, ent_coef, data_generator)
        run.clock("update")

        # evaluation
        if run.evaluation_due():
            scores = evaluate(args, agent, args.eval_episodes, eval_seed, progress=run.progress)
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
