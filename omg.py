"""OMG: one learner among teammates it does not control, which infers where the game is heading.

"Opponent Modeling based on Subgoal Inference" (Yu, Jiang, Lu 2024). A subgoal is the embedding of a state by a frozen
prior VAE. An inference network tells the subgoal from what the learner saw and what everybody did, and a recurrent
Q-network is conditioned on it: Q(s, g, a). In updates a selector looks ahead in the recorded episode and takes the
state whose embedding has the highest value for the learner (or the lowest); that is what the inference network aims at.
The learner's seat and its teammates, frozen checkpoints of qmix.py, are drawn anew for each episode: docs/omg.md

    python omg.py --seed 1                                                  # among the QMIX teams 1 to 5 of pools/8m
    python omg.py --teammates pools/8m --team iql:4,qmix:3,omg:1            # of two teams, four seats and three
    python omg.py --selector conservative                                   # the smallest value, not the largest
    python omg.py --model none --see-actions                                # IQL that sees its teammates' last actions
    python omg.py --resume runs/smac-8m__omg__1__1700000000
"""

import envs  # first: from here on Ctrl-C is one line

# isort: split
import copy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from matplotlib.figure import Figure

import pretrain_vae
from envs.checkpoints import Kept
from envs.devices import device_of, move
from envs.episodes import Columns, Replay, RunningEpisodes, Tensors, ends, lambda_targets
from envs.memory import GRU
from envs.pool import MixedPlay, Pool, find_members, load_members, with_a_stranger
from envs.run import Positive, Rate, Run, RunArgs, Share, Weight, Whole, descend, main, read_weights, saved_args
from envs.team import ChoosingTeam, TeamGame, make_env, pick, play_team

NAMES = {"omg": "OMG", "naive": "Naive OM", "liam": "LIAM", "none": "IQL"}


@dataclass
class Args(RunArgs):
    # run
    eval_every: Whole = 100_000
    """env steps between two evaluations, greedy (0: only the final evaluation)"""
    eval_episodes: Positive = 128
    """episodes of each evaluation during training"""
    final_eval_episodes: Positive = 256
    """episodes of the evaluations at the end"""
    checkpoint_every: Positive = 100
    """iterations between two saves of checkpoints/last (the replay is saved, too)"""

    # env
    env_id: str = "smac-8m"
    """which game to play: a battle (smac-...) or another game of a team"""
    num_envs: Positive = 256
    """games played side by side"""
    start_jitter: Weight = 0.0
    """battles: start positions move by up to this much, anew in each episode (0: always the same start)"""
    teammates: str = ""
    """folder of checkpoints or runs to take teammates from, or a pattern (empty: pools/<map>/qmix-[1-5])"""
    team: str = ""
    """seats of each algorithm, e.g. iql:4,qmix:3,omg:1; a run of each is drawn (empty: all teammates are of one run)"""
    test_teammates: str = ""
    """teammates of the evaluations (empty: those of the training)"""
    test_team: str = ""
    """a second kind of team to be evaluated in, as --team; its scores are called mixed_*"""

    # algorithm
    model: Literal["omg", "naive", "liam", "none"] = "omg"
    """subgoals (OMG), or an embedding that predicts the teammates' actions (naive) or also what they see (liam), or
    nothing at all (IQL)"""
    selector: Literal["optimistic", "conservative"] = "optimistic"
    """take the future state of the largest or of the smallest value"""
    horizon: Positive = 10
    """steps that the selector looks ahead (the paper's; the notes: 5)"""
    subgoal: Literal["inferred", "random", "zero", "oracle"] = "inferred"
    """what the Q-network is given: the inferred subgoal, noise, nothing, or in updates always the selected one"""
    mixing: Literal["q", "kl"] = "q"
    """where the selected subgoal takes part: in what Q is fed (paper), or in what the KL aims at (notes)"""
    mixing_epsilon: Share = 0.5
    """share of selected subgoals in the mixture at the start"""
    mixing_steps: Positive = 200_000
    """env steps in which it goes to 0"""
    target_subgoal: Literal["current", "next"] = "current"
    """TD targets: the value of the next state given the subgoal of this step (paper) or of the next one (notes)"""
    obs_is_state: bool = False
    """subgoals are embeddings of the state instead of the learner's own observation"""
    vae_ckpt: str = ""
    """prior VAE of pretrain_vae.py (empty: one is learned now from play of the teammates, a minute)"""
    vae_steps: Positive = 50_000
    """steps of that play"""
    see_actions: bool = False
    """the Q-network also sees the teammates' last actions (a control: the inference network sees them)"""
    kl_coef: Weight = 0.001
    """weight of KL(inferred || selected)"""
    total_timesteps: Positive = 600_000
    """env steps of the whole run (one step moves all agents of one game)"""
    num_steps: Positive = 16
    """steps per game and iteration"""
    updates: Positive = 8
    """minibatches per iteration"""
    batch_episodes: Positive = 128
    """episodes per minibatch"""
    buffer_steps: Positive = 200_000
    """steps that the replay holds"""
    learning_rate: Rate = 1e-3
    """Adam's learning rate at the start"""
    anneal_lr: bool = True
    """bring the learning rate linearly to zero"""
    gamma: Share = 0.99
    """discount"""
    td_lambda: Share = 0.8
    """lambda of the targets: 0 is one-step Q-learning"""
    epsilon: Share = 1.0
    """the learner's share of random actions at the start"""
    epsilon_final: Share = 0.05
    """the same once epsilon_steps are over"""
    epsilon_steps: Positive = 300_000
    """env steps in which it gets there, linearly"""
    target_every: Positive = 50
    """minibatches after which the target network becomes a copy of the current one"""
    max_grad_norm: Weight = 10.0
    """largest gradient norm"""
    hidden_size: Positive = 64
    """width of the Q-network and of its memory"""
    memory_size: Positive = 96
    """width of the inference network's memory"""
    goal_size: Positive = 64
    """size of the embedding of naive and liam, and of a prior VAE that is learned now"""

    def check(self) -> None:
        if self.goal_size not in (8, 16, 32, 64):
            raise envs.ConfigError(f"--goal-size must be 8, 16, 32 or 64, not {self.goal_size}")
        if self.subgoal != "inferred" and self.model != "omg":
            raise envs.ConfigError(f"--subgoal {self.subgoal} is for --model omg, not for {self.model}")


# networks


class QNetwork(nn.Module):
    """Q(s, g, a) of the learner from what it sees, its last action, its seat and the subgoal."""

    def __init__(self, args: Args, game: TeamGame, goal_size: int):
        super().__init__()
        width, joint = args.hidden_size, game.num_agents * game.num_actions
        self.first = nn.Linear(game.obs_size, width)
        self.last_action, self.seat = nn.Embedding(game.num_actions + 1, width), nn.Embedding(game.num_agents, width)
        self.others = nn.Linear(joint, width, bias=False) if args.see_actions else None
        self.goal = nn.Linear(goal_size, width, bias=False) if goal_size else None
        self.gru, self.head = GRU(width, width), nn.Linear(width, game.num_actions)
        for table in (self.last_action, self.seat):  # as if one-hot entries stood beside what is seen
            nn.init.normal_(table.weight, std=game.obs_size**-0.5)

    def see(self, obs: torch.Tensor, last_action: torch.Tensor, seat: torch.Tensor, others: torch.Tensor):
        """What the first layer makes of all but the subgoal: (R, H)"""
        x = self.first(obs) + self.last_action(last_action) + self.seat(seat)
        return x if self.others is None else x + self.others(others)

    def forward(self, x: torch.Tensor, goal: torch.Tensor, sizes: list[int], memory: torch.Tensor | None = None):
        """x (R, H) of `see`, goal (R, G), laid out as GRU says -> values (R, A), the memory at each step (R, H)"""
        x = torch.relu(x if self.goal is None else x + self.goal(goal))
        memory = x.new_zeros(sizes[0], x.shape[1]) if memory is None else memory
        memories = self.gru(x, sizes, memory)
        return self.head(memories), memories

    def step(self, x: torch.Tensor, goal: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """Values (..., A) of one step from the memory before it; `goal` as `self.goal` sees it (..., H)"""
        return self.head(self.gru.cell(self.gru.from_input(torch.relu(x + goal)), memory))


class InferenceNetwork(nn.Module):
    """q(g | history): mean and log variance of the subgoal from what is seen now and a memory of what was seen and
    done. The decoder draws real features from a subgoal: what was seen (OMG), the teammates' actions (naive), or what
    they see and do (LIAM)."""

    def __init__(self, args: Args, game: TeamGame, goal_size: int):
        super().__init__()
        joint, features = game.num_agents * game.num_actions, game.num_features
        outputs = {"omg": features + joint, "naive": joint, "liam": game.num_agents * features + joint}
        self.num_features, self.num_actions, self.memory_size = game.num_features, game.num_actions, args.memory_size
        self.now = nn.Linear(game.obs_size, 32)
        self.gru = GRU(game.obs_size + joint + game.num_actions, args.memory_size)
        self.encoder = nn.Sequential(nn.Linear(32 + args.memory_size, 128), nn.ReLU(), nn.Linear(128, 2 * goal_size))
        self.decoder = nn.Sequential(nn.Linear(goal_size, 128), nn.ReLU(), nn.Linear(128, outputs[args.model]))

    def forward(self, obs, last_obs, others, last_action, sizes: list[int], memory: torch.Tensor | None = None):
        """obs and last_obs (R, D), others (R, N A), last action (R,), laid out as GRU says
        -> mean and log variance (R, G), the memory at each step (R, M)"""
        did = F.one_hot(last_action, self.num_actions + 1)[:, :-1].float()
        memory = obs.new_zeros(sizes[0], self.memory_size) if memory is None else memory
        memories = self.gru(torch.cat([last_obs, others, did], 1), sizes, memory)
        mean, log_var = self.encoder(torch.cat([torch.relu(self.now(obs)), memories], 1)).chunk(2, 1)
        return mean, log_var.clamp(-8.0, 4.0), memories


class Networks(nn.Module):
    """What the learner plays with."""

    def __init__(self, args: Args, game: TeamGame, goal_size: int, seed: int = 0):
        super().__init__()
        self.goal_size = goal_size if args.model != "none" else 0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.q = QNetwork(args, game, self.goal_size)
            self.inference = InferenceNetwork(args, game, goal_size) if args.model != "none" else None


class Prior:
    """The frozen prior VAE: subgoals of states, or of what the learner in its seat sees."""

    def __init__(self, models: pretrain_vae.GoalModels, obs_is_state: bool):
        self.models, self.obs_is_state, self.size = models, obs_is_state, models.z_size

    @torch.no_grad()
    def __call__(self, seen: torch.Tensor, seat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """seen (M, obs or state size), seat (M,) -> mean and log variance (M, G)"""
        seen = (seen[:, : len(self.models.mean)] - self.models.mean) / self.models.std
        if self.obs_is_state:  # which does not say who acts
            seen = torch.cat([seen, F.one_hot(seat, self.models.sizes["num_players"]).float()], 1)
        return self.models.space.encode(seen)

    @torch.no_grad()
    def decode(self, goal: torch.Tensor) -> torch.Tensor:
        """Subgoals (M, G) -> the states or observations (M, ...) that they stand for"""
        return self.models.space.decoder(goal) * self.models.std + self.models.mean


def load_prior(args: Args, folder: str | Path, device: str | torch.device = "cpu") -> Prior:
    """The prior VAE of a folder; starts that move make no other one of it."""
    models, _ = pretrain_vae.load_checkpoint(folder, envs.spec(args.env_id), args.obs_is_state)
    return Prior(models.to(device), args.obs_is_state)


def others_actions(joint: torch.Tensor, seat: torch.Tensor, num_actions: int) -> torch.Tensor:
    """Joint actions (R, N), A where there was none -> one-hot (R, N A), the own seat's (R,) left out"""
    actions = F.one_hot(joint, num_actions + 1)[:, :, :-1].float()
    actions[torch.arange(len(seat), device=seat.device), seat] = 0.0
    return actions.flatten(1)


# algorithm


def columns_of(args: Args, game: TeamGame, goal_size: int) -> Columns:
    """What the replay holds of a step besides the learner's own: its seat, what all did, and what a model asks for."""
    columns: Columns = {"seat": ((), np.int16), "joint": ((game.num_agents,), np.int16)}
    if args.model in ("naive", "liam"):
        columns["allies"] = ((game.num_agents,), np.bool_)  # teammates on the field
    if args.model == "liam":
        columns["team_obs"] = ((game.num_agents, game.num_features), np.float16)
    if args.model == "omg" and args.mixing == "kl":
        columns |= {"mean": ((goal_size,), np.float32), "log_var": ((goal_size,), np.float32)}
    return columns


def sample(args: Args, replay: Replay, num_actions: int, rng: np.random.Generator, device="cpu") -> dict:
    """Episodes of the replay with all that the losses want: rows (R, ...) of steps at which the learner is on the
    field, `before` and `after` (R,) the rows of the neighbouring steps, -1 where there is none, and `acted` (R,)."""
    mb = replay.sample(args.batch_episodes, rng, device)
    rows, row, step, sizes = replay.rows, mb["row"], mb["step"], np.array([*mb["sizes"], 0])
    starts = np.cumsum(sizes) - sizes
    position = np.arange(len(row)) - starts[step]  # among the sequences that go on: the same at every step
    before = np.where(step > 0, starts[step - 1] + position, -1)
    after = np.where(position < sizes[step + 1], starts[step + 1] + position, -1)
    joint = np.where((step > 0)[:, None], rows["joint"][row - 1], num_actions)
    more = {"before": before, "after": after, "last_joint": joint.astype(np.int64)}
    more |= {name: rows[name][row] for name in rows if name not in mb}
    mb |= move(more, device)
    mb |= {name: mb[name].long() for name in ("seat", "joint")}
    mb["acted"] = F.pad(mb["valid"].flatten(), (0, mb["valid"].shape[1]))[mb["place"]]  # nobody acts in the last row
    mb["others"] = others_actions(mb["last_joint"], mb["seat"], num_actions)
    mb["last_obs"] = mb["obs"][mb["before"]] * (mb["before"] >= 0)[:, None]
    return mb


def embed(prior: Prior, mb: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean and log variance (T + 1 times E, G) of the subgoal at every step of the episodes, and where there is one: up
    to the end of the episode, or with observations as long as the learner is on the field."""
    steps, num, _ = mb["alive"].shape
    if prior.obs_is_state:
        seat = mb["seat"].new_zeros(num).index_copy(0, mb["place"][:num], mb["seat"][:num])
        usable = torch.cat([mb["valid"].new_ones(1, num), mb["valid"]]).flatten()
        return *prior(mb["state"].flatten(0, 1), seat.repeat(steps)), usable
    usable = mb["valid"].new_zeros(steps * num).index_fill(0, mb["place"], True)
    parts = (x.new_zeros(steps * num, prior.size).index_copy(0, mb["place"], x) for x in prior(mb["obs"], mb["seat"]))
    return *parts, usable


def candidates(place: torch.Tensor, usable: torch.Tensor, num: int, horizon: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Places (R, H + 1) of this state and of the next `horizon` ones of the same episode, `num` episodes side by side,
    and which of them may be taken: future ones, or, where there is none, this very state."""
    at = place[:, None] + num * torch.arange(horizon + 1, device=place.device)
    takable = (at < len(usable)) & usable[at.clamp(max=len(usable) - 1)]
    takable[:, 0] = ~takable[:, 1:].any(1)
    return at.clamp(max=len(usable) - 1), takable


@torch.no_grad()
def values_of(q: QNetwork, x, goal, legal, memory) -> torch.Tensor:
    """V(s, g), the mean of Q over the legal actions: x and memory (R, H), goal as `q.goal` sees it (R, K, H), legal
    (R, A) -> (R, K)"""
    q_values = q.step(x[:, None], goal, memory[:, None])
    return (q_values * legal[:, None]).sum(2) / legal.sum(1, keepdim=True)


def select(values: torch.Tensor, takable: torch.Tensor, selector: str) -> torch.Tensor:
    """(R,) which candidate (R, K) has the largest value (optimistic) or the smallest one (conservative)"""
    sign = 1.0 if selector == "optimistic" else -1.0
    return (sign * values).masked_fill(~takable, -torch.inf).argmax(1)


def gaussian_kl(mean, log_var, other_mean, other_log_var) -> torch.Tensor:
    """(R,) KL(q || p) of diagonal Gaussians (R, G)"""
    ratio = (log_var - other_log_var).exp()
    gap = (mean - other_mean).pow(2) / other_log_var.exp()
    return 0.5 * (ratio + gap - 1 - log_var + other_log_var).sum(1)


def model_loss(args: Args, nets: Networks, mb: dict, goal, inferred: tuple, aim: tuple | None) -> tuple:
    """What the inference network learns, over the steps at which the learner acted, and what there is to log. OMG: mean
    squared error of what was seen, drawn from a sample of the subgoal, and the KL to the subgoal aimed at. Naive and
    LIAM: cross-entropy of what teammates on the field do next, LIAM also the squared error of what they see."""
    acted, drawn = mb["acted"], nets.inference.decoder(goal)
    if args.model == "omg":
        features = torch.cat([mb["obs"][:, : nets.inference.num_features], mb["others"]], 1)
        recon = (drawn - features).pow(2).mean(1)[acted].mean()
        kl = gaussian_kl(*inferred, *aim)[acted].mean()
        return recon + args.kl_coef * kl, {"goal/reconstruction": recon, "goal/kl": kl}
    logits = drawn[:, -mb["others"].shape[1] :].unflatten(1, (*mb["joint"].shape[1:], -1))
    allies = mb["allies"] & acted[:, None]
    loss = F.cross_entropy(logits[allies], mb["joint"][allies])
    log = {"moa/ce": loss, "moa/top1": (logits.argmax(2) == mb["joint"])[allies].float().mean()}
    if args.model == "liam":
        seen = drawn[:, : mb["team_obs"][0].numel()].unflatten(1, mb["team_obs"].shape[1:])
        recon = (seen - mb["team_obs"]).pow(2).mean(2)[allies].mean()
        loss, log = loss + recon, log | {"moa/reconstruction": recon}
    return loss, log


def losses(args: Args, nets: Networks, target_q: QNetwork, prior: Prior | None, mb: dict, share: float, rng) -> tuple:
    """The TD loss and the model's, added (they share no weight), and what there is to log. `share`: how many subgoals
    of the mixture are selected ones."""
    sizes, acted, device, log = mb["sizes"], mb["acted"], mb["obs"].device, {}
    x = nets.q.see(mb["obs"], mb["last_action"], mb["seat"], mb["others"])
    goal, model_part = x.new_zeros(len(x), nets.goal_size), x.new_zeros(())

    # the subgoal
    if nets.inference is not None:
        *inferred, _ = nets.inference(mb["obs"], mb["last_obs"], mb["others"], mb["last_action"], sizes)
        mean, log_var = inferred
        noise = torch.randn(mean.shape, generator=rng).to(device)
        drawn = mean + (0.5 * log_var).exp() * noise if args.model == "omg" else mean
        goal = {"random": noise, "zero": torch.zeros_like(mean)}.get(args.subgoal, drawn).detach()
        aim = None
        if args.model == "omg":
            _, aim, log = look_ahead(args, nets.q, prior, mb, x.detach(), goal, mean.detach())
            chance = torch.rand(len(x), generator=rng).to(device)
            mixed = chance < (1.0 if args.subgoal == "oracle" else share)
            if args.subgoal == "oracle" or (args.subgoal == "inferred" and args.mixing == "q"):
                goal = torch.where(mixed[:, None], aim[0], goal)
            if args.mixing == "kl":  # the others aim at what was inferred in play
                played = (mb["mean"], mb["log_var"])
                aim = tuple(torch.where(mixed[:, None], *pair) for pair in zip(aim, played, strict=True))
        model_part, more = model_loss(args, nets, mb, drawn, inferred, aim)
        log |= more

    # TD
    q_values, memories = nets.q(x, goal, sizes)
    chosen = q_values.gather(1, mb["action"][:, None])[:, 0]
    now = (mb["after"] >= 0).nonzero()[:, 0]
    then = mb["after"][now]
    with torch.no_grad():
        target_x = target_q.see(mb["obs"], mb["last_action"], mb["seat"], mb["others"])
        target_values, target_memories = target_q(target_x, goal, sizes)
        if args.target_subgoal == "next" or nets.q.goal is None:
            online, target = q_values[then], target_values[then]
        else:
            online = nets.q.step(x[then], nets.q.goal(goal[now]), memories[now])
            target = target_q.step(target_x[then], target_q.goal(goal[now]), target_memories[now])
        best = online.masked_fill(~mb["legal"][then], -1e9).argmax(1, keepdim=True)  # double Q-learning
        next_value = target.new_zeros(mb["valid"].numel()).index_copy(0, mb["place"][now], target.gather(1, best)[:, 0])
        next_value, alive = next_value.view(*mb["valid"].shape, 1), mb["alive"][1:]
        targets = lambda_targets(
            mb["reward"][:-1], next_value, mb["terminated"][:-1], mb["valid"], alive, args.gamma, args.td_lambda
        ).flatten()[mb["place"][acted]]
    errors = chosen[acted] - targets
    td_loss = errors.pow(2).mean()
    log |= {"losses/td_loss": td_loss, "losses/model_loss": model_part, "losses/td_error": errors.abs().mean()}
    return td_loss + model_part, log | {"losses/q_values": chosen[acted].mean()}


@torch.no_grad()
def look_ahead(args: Args, q: QNetwork, prior: Prior, mb: dict, x, goal, inferred_mean) -> tuple:
    """The place (R,) of the state selected at each step, mean and log variance of its subgoal, and what there is to
    log: how often the state nearest to the inferred subgoal is the selected one, and how much higher its value is than
    that of the inferred one."""
    means, log_vars, usable = embed(prior, mb)
    at, takable = candidates(mb["place"], usable, mb["alive"].shape[1], args.horizon)
    q_values, memories = q(x, goal, mb["sizes"])  # memories as in play
    memory = memories[mb["before"]] * (mb["before"] >= 0)[:, None]
    values = values_of(q, x, q.goal(means)[at], mb["legal"], memory)
    taken = select(values, takable, args.selector)
    place = at.gather(1, taken[:, None])[:, 0]
    nearest = torch.cdist(inferred_mean[:, None], means[at])[:, 0].masked_fill(~takable, torch.inf).argmin(1)
    acted = mb["acted"]
    plain = (q_values * mb["legal"]).sum(1) / mb["legal"].sum(1)
    gain = values.gather(1, taken[:, None])[:, 0] - plain
    spread = values.masked_fill(~takable, -torch.inf).amax(1) - values.masked_fill(~takable, torch.inf).amin(1)
    log = {"goal/hit_ratio": (nearest == taken)[acted].float().mean(), "goal/value_gain": gain[acted].mean()}
    log |= {"goal/chance": (1 / takable.sum(1))[acted].mean(), "goal/value_spread": spread[acted].mean()}
    log["goal/steps_ahead"] = taken[acted].float().mean()
    return place, (means[place], log_vars[place]), log


def update(args: Args, nets, target_q, prior, optimizer, replay, count, share, num_actions, data_rng, rng) -> dict:
    """The minibatches of one iteration; `count` (1,) of all minibatches says when the target copy is due."""
    logs: dict[str, list[float]] = {}
    for _ in range(args.updates):
        mb = sample(args, replay, num_actions, data_rng, device_of(nets))
        loss, log = losses(args, nets, target_q, prior, mb, share, rng)
        (norm,) = descend(optimizer, loss, args.max_grad_norm)
        count += 1
        if count[0] % args.target_every == 0:
            target_q.load_state_dict(nets.q.state_dict())
        for name, x in log.items():
            logs.setdefault(name, []).append(x.item())
        logs.setdefault("losses/grad_norm", []).append(norm)
    return {name: float(np.mean(values)) for name, values in logs.items()}


@torch.no_grad()
def draw_subgoals(path: Path, args: Args, nets: Networks, prior: Prior, mb: dict) -> None:
    """Some steps: the state that was selected, and what the prior's decoder draws from its subgoal and from the
    inferred one, as standardised features."""
    mean, _, _ = nets.inference(mb["obs"], mb["last_obs"], mb["others"], mb["last_action"], mb["sizes"])
    x = nets.q.see(mb["obs"], mb["last_action"], mb["seat"], mb["others"])
    place, (selected, _), log = look_ahead(args, nets.q, prior, mb, x, mean, mean)
    seen = mb["state"].flatten(0, 1)
    if not prior.obs_is_state:
        seen = mb["obs"].new_zeros(len(seen), mb["obs"].shape[1]).index_copy(0, mb["place"], mb["obs"])
    models, acted = prior.models, mb["acted"].nonzero()[:, 0]
    shown = acted[torch.linspace(0, len(acted) - 1, 16).long().to(acted.device)]
    came = (seen[place[shown]][:, : len(models.mean)] - models.mean) / models.std
    drawn = [came, models.space.decoder(selected[shown]), models.space.decoder(mean[shown])]
    errors = [(picture - came).pow(2).mean().item() for picture in drawn]
    figure = Figure(figsize=(8, 7), layout="constrained")
    names = ("selected state", "drawn from its subgoal", "drawn from the inferred subgoal")
    for axes, picture, name, error in zip(figure.subplots(3, 1), drawn, names, errors, strict=True):
        axes.imshow(picture.cpu().numpy(), aspect="auto", cmap="coolwarm", vmin=-2, vmax=2)
        axes.set(title=f"{name}: mean squared error {error:.3f}", ylabel="step", xlabel="feature")
    hits, guesses = log["goal/hit_ratio"].item(), log["goal/chance"].item()
    figure.suptitle(f"nearest candidate is the selected one: {hits:.2f} (guessing: {guesses:.2f})", fontsize=9)
    figure.savefig(path, dpi=100)


# playing and evaluating


class Learner(ChoosingTeam, Kept):
    """Plays agents greedily, but for a share `epsilon` of random actions, by the mean of the inferred subgoal."""

    KEPT = ("memory", "history", "last_obs", "joint", "mean", "log_var", "rng")

    def __init__(self, args: Args, nets: Networks, game: TeamGame, seed: int, prior: Prior | None = None):
        self.args, self.nets, self.game, self.epsilon, self.prior = args, nets, game, 0.0, prior
        self.q_values = torch.zeros(game.num_envs, game.num_agents, game.num_actions)
        self.rng = torch.Generator().manual_seed(seed)
        shape = (game.num_envs, game.num_agents)
        self.memory, self.last_obs = torch.zeros(*shape, args.hidden_size), torch.zeros(*shape, game.obs_size)
        self.history = torch.zeros(*shape, args.memory_size)  # the inference network's memory
        self.joint = torch.full(shape, game.num_actions)
        self.mean, self.log_var = (torch.zeros(*shape, nets.goal_size) for _ in range(2))  # as inferred last

    @torch.no_grad()
    def choose(self, seen: Tensors, who: torch.Tensor) -> torch.Tensor:
        """Actions (M,) of the agents of `who` (B, N); `seen` as the game shows it"""
        (at, seat), sizes, device = who.nonzero().T, [int(who.sum())], device_of(self.nets)
        rows = seat, seen["obs"][who], self.joint[who], self.joint[at], self.last_obs[who]
        seat, obs, last_action, joint, last_obs = (column.to(device) for column in rows)
        others = others_actions(joint, seat, self.game.num_actions)
        if self.nets.inference is not None:
            history = self.history[who].to(device)
            inferred = self.nets.inference(obs, last_obs, others, last_action, sizes, history)
            self.mean[who], self.log_var[who], self.history[who] = (x.cpu() for x in inferred)
        x, memory = self.nets.q.see(obs, last_action, seat, others), self.memory[who].to(device)
        goal = self.subgoal(who, x, seen["legal"][who].to(device), memory)
        q_values, memory = self.nets.q(x, goal.to(device), sizes, memory)
        self.memory[who], self.last_obs[who], self.q_values[who] = memory.cpu(), seen["obs"][who], q_values.cpu()
        return pick(self.q_values[who], seen["legal"][who], self.epsilon, self.rng)

    def subgoal(self, who: torch.Tensor, x, legal, memory) -> torch.Tensor:
        """What the Q-network is given for the agents of `who`, of which the first layer made x: (M, G)"""
        mean = self.mean[who]
        if self.args.subgoal == "random":
            return torch.randn(mean.shape, generator=self.rng)
        return torch.zeros_like(mean) if self.args.subgoal == "zero" else mean

    def explain(self, row: int = 0) -> dict[str, np.ndarray]:
        """Its Q values in game `row` and, decoded by the prior VAE, the subgoals it inferred (envs/roles.py)."""
        seats = slice(None) if self.seat is None else self.seat
        found = {"q_values": self.q_values[row, seats].numpy()}
        if self.prior:
            name = "subgoal_state" if self.prior.obs_is_state else "subgoal_obs"
            found[name] = self.prior.decode(self.mean[row, seats]).numpy()
        return found

    def watch(self, env, actions: np.ndarray, info: dict[str, np.ndarray]) -> None:
        """Remember the actions (B, N) of a step, and forget all where an episode has ended."""
        self.joint[:] = torch.from_numpy(np.asarray(actions, np.int64))
        if info["done"].any():
            done = torch.from_numpy(info["done"])
            self.memory[done], self.history[done], self.last_obs[done] = 0.0, 0.0, 0.0
            self.joint[done] = self.game.num_actions


class Recording(MixedPlay):
    """Notes the subgoal at each step of the first episode in each game, as long as there is one (see `embed`)."""

    def __init__(self, learner: Learner, pool: Pool):
        super().__init__(learner, pool)
        self.running, self.subgoals, self.usable = torch.ones(pool.game.num_envs, dtype=torch.bool), [], []

    def decide(self) -> tuple[Tensors, np.ndarray]:
        seen, actions = super().decide()
        own, prior = torch.from_numpy(self.pool.is_learner), self.learner.prior
        shown = seen["state"] if prior.obs_is_state else seen["obs"][own]
        shown, seat = (x.to(device_of(self.learner.nets)) for x in (shown, torch.from_numpy(self.pool.seat)))
        self.subgoals.append(prior(shown, seat)[0].cpu())
        self.usable.append(self.running if prior.obs_is_state else self.running & seen["alive"][own])
        return seen, actions

    def watch(self, env, actions: np.ndarray, info: dict[str, np.ndarray]) -> None:
        super().watch(env, actions, info)
        self.running = self.running & ~torch.from_numpy(info["done"])


class Foresight(Learner):
    """Plays the same games a second time, and is given the subgoal that the selector takes from what came the first
    time: what it would be worth to know the future (which is another one as soon as the learner plays otherwise)."""

    def foresee(self, record: Recording) -> None:
        self.usable, self.step = torch.cat(record.usable), 0
        subgoals = record.subgoals[:1]
        for then, usable in zip(record.subgoals[1:], record.usable[1:], strict=True):  # the last one stays
            subgoals.append(torch.where(usable[:, None], then, subgoals[-1]))
        self.subgoals = torch.cat(subgoals).to(device_of(self.nets))

    def subgoal(self, who: torch.Tensor, x, legal, memory) -> torch.Tensor:
        """The Q-network values candidates as `look_ahead` does."""
        num, q = len(who), self.nets.q
        step = min(self.step, len(self.usable) // num - 1)
        at, takable = candidates(step * num + who.nonzero()[:, 0], self.usable, num, self.args.horizon)
        values = values_of(q, x, q.goal(self.subgoals)[at], legal, memory)
        taken = select(values.cpu(), takable, self.args.selector)
        return self.subgoals[at.gather(1, taken[:, None])[:, 0]]

    def watch(self, env, actions: np.ndarray, info: dict[str, np.ndarray]) -> None:
        super().watch(env, actions, info)
        self.step += 1


def load_team(checkpoint: Path, spec: dict, env, seed: int, greedy: bool) -> Learner:
    """A checkpoint of this script for any seats of a batched env; it plays greedily in any case."""
    args, game = saved_args(Args, spec), TeamGame(env)
    nets, prior = Networks(args, game, int(spec["goal_size"])), None
    read_weights(checkpoint, nets)
    if args.model == "omg" and (Path(spec.get("prior", "")) / "spec.json").is_file():  # only to show what it infers
        prior = load_prior(args, spec["prior"])
    return Learner(args, nets, game, seed, prior)


def play_among(args: Args, nets, prior, teammates: str, team: str, episodes: int, seed: int) -> dict[str, float]:
    """Scores of greedy play among teammates over fresh episodes, win rates also by the teammates' algorithm. With
    oracle subgoals those of a second time, when the future is known, and beside them the first time's (inferred_*)."""

    def play(learner_class: type[Learner], play_class: type[MixedPlay], record: Recording | None = None) -> tuple:
        env = make_env(args.env_id, episodes, seed, args.start_jitter)
        game = TeamGame(env)
        pool = Pool(game, load_members(find_members(teammates, env), env, seed), seed, team, own="omg")
        play = play_class(learner_class(args, nets, game, seed, prior), pool)
        if record is not None:
            play.learner.foresee(record)
        return play_team(game, play, pool.algorithms), play

    if args.subgoal != "oracle":
        return play(Learner, MixedPlay)[0]
    first, record = play(Learner, Recording)
    inferred = {f"inferred_{name}": first[name] for name in ("win_rate", "return") if name in first}
    return play(Foresight, MixedPlay, record)[0] | inferred


def evaluate(args: Args, nets: Networks, prior: Prior | None, episodes: int, seed: int) -> dict[str, float]:
    """Scores among the teammates of the test, among those of the training (train_*), and in the second kind of team
    (mixed_*), as far as they differ."""
    test = args.test_teammates or args.teammates
    scores = play_among(args, nets, prior, test, "" if args.test_teammates else args.team, episodes, seed)
    kinds = {"train": (args.teammates, args.team)} if args.test_teammates else {}
    kinds |= {"mixed": (test, args.test_team)} if args.test_team else {}
    for kind, (teammates, team) in kinds.items():
        others = play_among(args, nets, prior, teammates, team, episodes, seed)
        names = ("win_rate", "win_rate_ci95", "return", "inferred_win_rate")
        scores |= {f"{kind}_{name}": others[name] for name in names if name in others}
    return scores


def prepare_prior(args: Args, run: Run, env, members: list[Path]) -> Prior | None:
    """The prior VAE asked for, or one learned now from play of the teammates; its folder is recorded."""
    if args.model != "omg":
        return None
    folder = args.vae_ckpt or str(run.facts.get("prior", ""))
    if not folder:
        print("learning the prior VAE from play of the teammates", flush=True)
        lineups = (*map(str, members), *with_a_stranger(members, env.spec.num_players), "random")
        how = {"obs_is_state": args.obs_is_state, "dim": args.goal_size, "loss": "recon", "num_steps": args.vae_steps}
        how |= {"recon_weight": 1.0, "alpha": 0.04, "vae_hidden_size": 128, "pictures": False, "epochs": 5}
        out_dir = str(run.dir / "prior")
        folder = pretrain_vae.train(pretrain_vae.Args(
            env_id=args.env_id, lineups=lineups, seed=args.seed, out_dir=out_dir, **how
        ))  # fmt: skip
    prior = load_prior(args, folder, run.device)
    run.record(prior=str(Path(folder).resolve()))
    return prior


def train(args: Args, run: Run) -> None:
    """The whole run."""
    # seeding
    env_seed, policy_seed, data_seed, init_seed, eval_seed, pool_seed, noise_seed = (
        int(seed) for seed in np.random.SeedSequence(args.seed).generate_state(7)
    )
    data_rng, noise_rng = np.random.default_rng(data_seed), torch.Generator().manual_seed(noise_seed)

    # env setup
    env = make_env(args.env_id, args.num_envs, env_seed, args.start_jitter)
    game = TeamGame(env)
    members = find_members(args.teammates, env)
    pool = Pool(game, load_members(members, env, pool_seed), pool_seed, args.team, own="omg")

    # networks and replay
    prior = prepare_prior(args, run, env, members)
    goal_size = prior.size if prior else args.goal_size
    nets = Networks(args, game, goal_size, init_seed).to(run.device)
    target_q = copy.deepcopy(nets.q)
    optimizer = torch.optim.Adam(nets.parameters(), lr=args.learning_rate, foreach=True)
    play = MixedPlay(Learner(args, nets, game, policy_seed), pool)
    replay, count = Replay(args.buffer_steps, game, 1, columns_of(args, game, goal_size)), np.zeros(1, np.int64)
    running = RunningEpisodes(args.num_envs, env.spec.horizon, replay)
    keep = {"env": env, "learner": play.learner, "pool": pool, "replay": replay, "running": running}
    keep |= {"target": target_q, "optimizer": optimizer, "data_rng": data_rng, "noise_rng": noise_rng, "count": count}
    facts = {"algorithm": "omg", "goal_size": goal_size, "num_agents": game.num_agents}
    facts["members"] = [str(member) for member in members]
    title = f"{NAMES[args.model]} on {args.env_id} among {len(members)} frozen teams"
    run.start(nets, env.spec, learners=[0], keep=keep, facts=facts, title=title)

    for _ in run.iterations():
        # rollout
        for _ in range(args.num_steps):
            progress = min(1.0, (run.step - args.batch_size) / args.epsilon_steps)
            play.learner.epsilon = args.epsilon + (args.epsilon_final - args.epsilon) * progress
            seen, actions = play.decide()
            run.clock("policy")
            own, seat = pool.is_learner.copy(), pool.seat
            _, _, _, truncated, info = env.step(actions)
            now = {name: seen[name][torch.from_numpy(own)][:, None] for name in ("obs", "legal", "alive")}
            now |= {"action": actions[own][:, None], "reward": game.reward().mean(1), "state": seen["state"]}
            now |= {"terminated": ends(info, truncated), "seat": seat, "joint": actions}
            now |= {"allies": seen["alive"].numpy() & ~own, "team_obs": seen["obs"][:, :, : game.num_features]}
            now |= {name: getattr(play.learner, name)[torch.from_numpy(own)] for name in ("mean", "log_var")}
            final = game.final(info) if info["done"].any() else {}
            final |= {name: final[name][torch.from_numpy(own)][:, None] for name in ("obs", "alive") if final}
            running.add(now=now, done=info["done"], final=final)
            play.watch(env, actions, info)
            run.count(info)
            run.clock("env")

        # update
        scalars = {}
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - run.progress * args.anneal_lr)
        share = args.mixing_epsilon * max(0.0, 1 - (run.step - args.batch_size) / args.mixing_steps)
        if len(replay) >= args.batch_episodes:
            scalars = update(
                args, nets, target_q, prior, optimizer, replay, count, share, game.num_actions, data_rng, noise_rng
            )
        run.clock("update")

        # evaluation
        if run.evaluation_due():
            scores = evaluate(args, nets, prior, args.eval_episodes, eval_seed)
            # by how they fare among the teammates of the training, never of the test
            prefix = "train_" if "train_return" in scores else ""
            run.evaluated(scores, by=(f"{prefix}win_rate", f"{prefix}return"))
            run.clock("eval")

        # logging
        if run.log_due():
            run.log(scalars | {"charts/epsilon": play.learner.epsilon, "charts/replay_episodes": len(replay)})

    # result
    if prior and len(replay):
        mb = sample(args, replay, game.num_actions, data_rng, run.device)
        draw_subgoals(run.dir / "subgoals.png", args, nets, prior, mb)
    results = {"eval": evaluate(args, nets, prior, args.final_eval_episodes, eval_seed + 1)}
    if run.load_best():
        results["eval_best"] = evaluate(args, nets, prior, args.final_eval_episodes, eval_seed + 1)
    run.finish(results)


if __name__ == "__main__":
    sys.exit(main(Args, train))
