"""PPO for the grid games: self-play, or learners among rule-based players and earlier checkpoints.

Proximal policy optimisation (Schulman et al. 2017) with clipping, GAE and masked illegal actions. Learners are
independent: every `ppo` seat has networks of its own, evaluated together as stacked matrices; `--shared-policy` trains
one network for all of them. The critic starts optimistic, which is what finds the stag before everybody is content with
a hare. A player that left the board is in no loss, mean or normalisation; time running out bootstraps, an end by the
rules does not.

    python ppo_baseline.py --seed 1                                        # Stag Hunt 4x4, ends near 2.89 (optimum 3.0)
    python ppo_baseline.py --env-id msh-4h1s-8x8 --total-timesteps 1200000 --start-window 3   # with a start curriculum
    python ppo_baseline.py --roles ppo,ns,nh,random                        # one learner, three rule-based players
    python ppo_baseline.py --resume runs/msh-4h1s-4x4__ppo_baseline__1__1700000000
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
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from safetensors.torch import load_file, save_file
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

import envs
from envs.roles import Seats, parse_roles, play_episodes


@dataclass
class Args:
    # run
    exp_name: str = "ppo_baseline"
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
    log_every: int = 10
    """iterations between two rows of metrics.csv and TensorBoard"""
    eval_every: int = 25_000
    """env steps between two evaluations (0: only at the end)"""
    eval_episodes: int = 1024
    """episodes of each evaluation during training, always from the true starts"""
    final_eval_episodes: int = 4096
    """episodes of the evaluation at the end"""
    checkpoint_every: int = 20
    """iterations between two saves of checkpoints/last"""

    # env
    env_id: str = "msh-4h1s-4x4"
    """which game to play"""
    roles: str = ""
    """one entry per player: ppo, a rule-based player or a run folder, e.g. ppo,ns,ns,ns (default: all ppo)"""
    num_envs: int = 128
    """games played side by side"""
    start_window: int = 0
    """start curriculum: side of the square in which some episodes start (0: off)"""
    start_window_prob: float = 0.9
    """probability of such a start at the beginning of training, decaying linearly"""
    start_window_until: float = 0.5
    """share of training after which all episodes start as in the true game"""
    prosocial: bool = False
    """learn from the mean reward of all players (evaluation is always selfish)"""
    max_block_comp: int = 0
    """random pieces of blocks on the board"""

    # algorithm
    total_timesteps: int = 300_000
    """env steps of the whole run (one step moves all players of one game)"""
    num_steps: int = 16
    """steps per game and iteration"""
    learning_rate: float = 1e-3
    """Adam's learning rate at the start"""
    anneal_lr: bool = True
    """bring the learning rate linearly to zero"""
    gamma: float = 0.97
    """discount"""
    horizon_ends: bool = False
    """take the horizon as an end by the rules, without bootstrapping: learn what pays before time runs out"""
    gae_lambda: float = 0.95
    """lambda of generalised advantage estimation"""
    num_minibatches: int = 4
    """minibatches per epoch"""
    update_epochs: int = 4
    """passes over each batch"""
    norm_adv: bool = True
    """normalise advantages in each minibatch"""
    clip_coef: float = 0.2
    """PPO's clip range"""
    clip_vloss: bool = False
    """clip the value loss too"""
    ent_coef: float = 0.05
    """weight of the entropy bonus at the start"""
    ent_coef_final: float = 0.0
    """weight of the entropy bonus at the end, reached linearly"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """largest gradient norm of each learner's networks"""
    initial_value: float = 6.0
    """what the critic expects before it has learned; optimism makes a hare a disappointment until stags are known"""
    hidden: int = 64
    """width of the hidden layers"""
    shared_policy: bool = False
    """one network for all learners instead of one each"""

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        return max(1, self.total_timesteps // self.batch_size)


LOSSES = ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac")
ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")


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

    def __call__(self, obs: np.ndarray) -> torch.Tensor:
        """obs (B, L, H, W, C) of 0/1 -> ids (B, L, most things that there can be)"""
        flat = obs.reshape(-1, self.ids.shape[1])
        row, bit = np.nonzero(flat)
        own_cell = flat[:, :: self.planes].argmax(1)
        count = np.bincount(row, minlength=len(flat))
        slot = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
        ids = np.zeros((len(flat), self.most), np.int64)
        ids[row, slot] = self.ids[own_cell[row], bit]
        return torch.from_numpy(ids).view(*obs.shape[:2], self.most)


class Agent(nn.Module):
    """`num_nets` actors and critics of the same shape, stacked: net p sees row p of every input."""

    def __init__(self, num_nets: int, num_ids: int, num_actions: int, hidden: int, generator: torch.Generator):
        super().__init__()
        self.num_nets, self.num_ids, self.num_actions, self.hidden = num_nets, num_ids, num_actions, hidden

        def normal(*shape: int, std: float) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator) * std)

        self.embedding = normal(num_nets, num_ids, 2 * hidden, std=0.3)  # first layer of actor | critic
        self.time = normal(num_nets, 1, 2 * hidden, std=0.3)
        self.actor = normal(num_nets, hidden, hidden, std=(2 / hidden) ** 0.5)
        self.critic = normal(num_nets, hidden, hidden, std=(2 / hidden) ** 0.5)
        self.actor_bias = nn.Parameter(torch.zeros(num_nets, 1, hidden))
        self.critic_bias = nn.Parameter(torch.zeros(num_nets, 1, hidden))
        # a multiple of 8 columns: with 7, a row's product is rounded by its place in the batch, and ratios are not 1
        columns = 8 * -(-num_actions // 8)
        self.policy_head = normal(num_nets, hidden, columns, std=0.01 / hidden**0.5)
        self.policy_bias = nn.Parameter(torch.zeros(num_nets, 1, columns))
        self.value_head = normal(num_nets, hidden, 1, std=1 / hidden**0.5)
        self.value_bias = nn.Parameter(torch.zeros(num_nets, 1, 1))

    def forward(self, ids: torch.Tensor, t: torch.Tensor, legal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """ids (P, R, K), t (P, R) in 0..1, legal (P, R, A) -> log-probabilities (P, R, A), values (P, R)"""
        bags = zip(ids, self.embedding.unbind(), strict=True)
        first = torch.stack([F.embedding_bag(row, table, mode="sum", padding_idx=0) for row, table in bags])
        first = torch.relu(first + t[:, :, None] * self.time)
        actor = torch.relu(torch.baddbmm(self.actor_bias, first[:, :, : self.hidden], self.actor))
        critic = torch.relu(torch.baddbmm(self.critic_bias, first[:, :, self.hidden :], self.critic))
        logits = torch.baddbmm(self.policy_bias, actor, self.policy_head)
        values = torch.baddbmm(self.value_bias, critic, self.value_head)
        logits = logits[:, :, : self.num_actions].masked_fill(~legal, -1e9)
        return F.log_softmax(logits, dim=-1), values[:, :, 0]

    def single(self, net: int) -> "Agent":
        """Net number `net` alone (the only one, if all learners share it), as it is now."""
        alone = Agent(1, self.num_ids, self.num_actions, self.hidden, torch.Generator())
        net = min(net, self.num_nets - 1)
        alone.load_state_dict({name: weight[net : net + 1] for name, weight in self.state_dict().items()})
        return alone


# algorithm


def sample(log_probs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One action per row, by the Gumbel trick; an illegal action's log-probability is so low that it never wins."""
    noise = torch.rand(log_probs.shape, generator=generator).clamp_min(1e-20)
    return (log_probs - torch.log(-torch.log(noise))).argmax(-1)


def advantages_of(reward, value, next_value, alive, terminated, truncated, gamma: float, lam: float) -> torch.Tensor:
    """GAE; all (T, B, L). next_value is the value of what follows a step: after a time limit, of the final observation.

    An end by the rules cuts both the bootstrap and the sum, a time limit only the sum. Zero where a player had left.
    """
    advantages = torch.zeros_like(reward)
    following = torch.zeros_like(reward[0])
    for step in reversed(range(len(reward))):
        delta = reward[step] + gamma * next_value[step] * ~terminated[step] - value[step]
        following = (delta + gamma * lam * ~(terminated[step] | truncated[step]) * following) * alive[step]
        advantages[step] = following
    return advantages


def ppo_loss(args: Args, agent: Agent, mb: dict[str, torch.Tensor], ent_coef: float):
    """The loss of one minibatch, summed over nets, and what to log; every entry of mb is (P, R, ...)."""
    alive = mb["alive"].float()
    count = alive.sum(1, keepdim=True).clamp_min(1.0)  # (P, 1)

    def mean(x: torch.Tensor) -> torch.Tensor:  # over the rows of players on the board, for each net
        return (x * alive).sum(1, keepdim=True) / count

    log_probs, value = agent(mb["ids"], mb["t"], mb["legal"])
    log_prob = log_probs.gather(2, mb["actions"][:, :, None])[:, :, 0]
    entropy = -(log_probs.exp() * log_probs.clamp_min(-1e8)).sum(2)
    log_ratio = (log_prob - mb["log_probs"]) * alive
    ratio = log_ratio.exp()
    advantages = mb["advantages"]
    if args.norm_adv:
        centred = advantages - mean(advantages)
        advantages = centred / (mean(centred**2).sqrt() + 1e-8)
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = mean(torch.max(-advantages * ratio, -advantages * clipped_ratio))
    value_loss = (value - mb["returns"]) ** 2
    if args.clip_vloss:
        clipped = mb["values"] + (value - mb["values"]).clamp(-args.clip_coef, args.clip_coef)
        value_loss = torch.max(value_loss, (clipped - mb["returns"]) ** 2)
    value_loss, entropy = 0.5 * mean(value_loss), mean(entropy)
    loss = (policy_loss - ent_coef * entropy + args.vf_coef * value_loss).sum()
    with torch.no_grad():
        approx_kl = mean(ratio - 1 - log_ratio)
        clipfrac = mean(((ratio - 1).abs() > args.clip_coef).float())
    stats = dict(zip(LOSSES, (policy_loss, value_loss, entropy, approx_kl, clipfrac), strict=True))
    return loss, {name: stat.mean().item() for name, stat in stats.items()}, ratio


def clip_gradients(agent: Agent, max_norm: float) -> torch.Tensor:
    """Clip the gradient of each stacked net by its own norm (returned), so that learners do not touch each other."""
    grads = [parameter.grad for parameter in agent.parameters()]
    norm = torch.stack([grad.flatten(1).norm(dim=1) for grad in grads]).norm(dim=0)  # (P,)
    scale = (max_norm / (norm + 1e-6)).clamp_max(1.0)
    for grad in grads:
        grad.mul_(scale.view(-1, *[1] * (grad.dim() - 1)))
    return norm


def update(args: Args, agent: Agent, optimizer, batch: dict[str, torch.Tensor], ent_coef: float, generator):
    """All epochs over one batch of (P, R, ...) tensors; returns the mean of what there is to log."""
    rows, log = batch["ids"].shape[1], []
    for _ in range(args.update_epochs):
        order = torch.randperm(rows, generator=generator)
        for mb_inds in order.chunk(args.num_minibatches):
            loss, stats, _ = ppo_loss(args, agent, {name: x[:, mb_inds] for name, x in batch.items()}, ent_coef)
            optimizer.zero_grad()
            loss.backward()
            norm = clip_gradients(agent, args.max_grad_norm)
            if not (torch.isfinite(loss) and torch.isfinite(norm).all()):
                raise FloatingPointError(f"the loss became {loss.item()} with a gradient of norm {norm.max().item()}")
            optimizer.step()
            log.append(stats)
    return {f"losses/{name}": float(np.mean([stats[name] for stats in log])) for name in log[0]}


# playing and evaluating


def nets_first(x: torch.Tensor, num_nets: int) -> torch.Tensor:
    """(T, B, L, ...) -> (P, R, ...): the rows of each net, one net for each of the L learners or one for all."""
    return x.movedim(2, 0).reshape(num_nets, -1, *x.shape[3:])


def look(things: Things, obs: np.ndarray, t: np.ndarray, legal: np.ndarray) -> dict[str, torch.Tensor]:
    """What the networks see of obs (B, L, H, W, C), t (B,), legal (B, L, A): ids (B, L, K), t (B, L), legal (B, L, A).

    Nobody acts at the horizon, so no value is trained there: a final observation counts as one step earlier.
    """
    share = torch.from_numpy(np.minimum(t, things.horizon - 1) / things.horizon).float()
    return {"ids": things(obs), "t": share[:, None].expand(obs.shape[:2]), "legal": torch.from_numpy(legal)}


def forward(agent: Agent, seen: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities (B, L, A) and values (B, L) for what is seen in one step."""
    batch, learners = seen["t"].shape
    log_probs, values = agent(**{name: nets_first(x[None], agent.num_nets) for name, x in seen.items()})
    return log_probs.view(learners, batch, -1).transpose(0, 1), values.view(learners, batch).T


class Policy:
    """A trained net in one seat of any env (see envs/roles.py), for evaluate.py and for the roles of other runs."""

    def __init__(self, agent: Agent, things: Things, seat: int, seed: int, greedy: bool):
        self.agent, self.things, self.seat, self.greedy = agent, things, seat, greedy
        self.generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def act(self, env) -> np.ndarray:
        seen = look(self.things, env.obs[:, [self.seat]], env.t, env.legal[:, [self.seat]])
        log_probs = forward(self.agent, seen)[0][:, 0]
        return (log_probs.argmax(-1) if self.greedy else sample(log_probs, self.generator)).numpy()

    def get_state(self) -> dict[str, np.ndarray]:
        return {"generator": self.generator.get_state().numpy()}

    def set_state(self, saved: dict[str, np.ndarray]) -> None:
        self.generator.set_state(torch.from_numpy(saved["generator"]))


def load_policy(checkpoint: Path, spec: dict, env, seat: int, learner: int | None, seed: int, greedy: bool) -> Policy:
    """A checkpoint of this script as a player: the net trained in that seat (else the first), or learner 1, 2, ..."""
    learners = spec["learners"]  # the seats that learned, in the order of the nets
    if learner is not None and not 1 <= learner <= len(learners):
        raise envs.ConfigError(f"checkpoint '{checkpoint}' has learners 1 to {len(learners)}, not {learner}")
    net = learner - 1 if learner else learners.index(seat) if seat in learners else 0
    things, num_nets = Things(env.game), 1 if spec["shared_policy"] else len(learners)
    agent = Agent(num_nets, things.num_ids, env.spec.num_actions, spec["hidden"], torch.Generator())
    try:
        agent.load_state_dict(load_file(checkpoint / "weights.safetensors"))
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise envs.ConfigError(f"the weights of checkpoint '{checkpoint}' cannot be loaded: {reason}") from error
    return Policy(agent.single(net), things, seat, seed, greedy)


def evaluate(args: Args, agent: Agent, things: Things, roles: list[str], episodes: int, seed: int, greedy=False):
    """Mean return of the learners (and of each player) over fresh episodes from the true starts, selfish rewards."""
    env = envs.make(args.env_id, num_envs=episodes, seed=seed, max_block_comp=args.max_block_comp)
    learners = [seat for seat, role in enumerate(roles) if role == "ppo"]
    policies = {seat: Policy(agent.single(k), things, seat, seed + k, greedy) for k, seat in enumerate(learners)}
    played = play_episodes(env, Seats(env, roles, "ppo", seed, greedy, policies))
    score = played.returns[:, learners].mean(1)
    result = {"return": score.mean(), "return_ci95": 1.96 * score.std() / episodes**0.5, "episodes": episodes}
    result |= {f"return-player{i + 1}": played.returns[:, i].mean() for i in range(len(roles))}
    result |= {f"{kind}_rate": played.taken[:, :, k].mean() for k, kind in enumerate(env.game.kinds)}
    return {name: float(value) for name, value in (result | {"length": played.lengths.mean()}).items()}


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
    """curve.png: return in training and evaluation over env steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with (run_dir / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, label, style in (("charts/episodic_return", "training", "-"), ("eval/return", "evaluation", "o-")):
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
    for name, least in (("num_envs", 1), ("num_steps", 1), ("total_timesteps", 1), ("num_minibatches", 1),
                        ("update_epochs", 1), ("hidden", 1), ("log_every", 1), ("checkpoint_every", 1), ("seed", 0),
                        ("eval_every", 0), ("eval_episodes", 1), ("final_eval_episodes", 1), ("torch_threads", 1),
                        ("max_grad_norm", 0), ("learning_rate", 0), ("start_window_until", 0)):  # fmt: skip
        if getattr(args, name) < least:
            raise envs.ConfigError(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(args, name)}")
    run_dir = Path(args.run_dir or f"runs/{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}")
    if (run_dir / "args.json").exists():
        raise envs.ConfigError(f"'{run_dir}' already holds a run; go on with --resume {run_dir}")
    return args, run_dir


def train(args: Args, run_dir: Path) -> int:
    """The whole run; returns the exit code."""
    # seeding
    torch.set_num_threads(args.torch_threads)
    env_seed, seats_seed, policy_seed, data_seed, init_seed, eval_seed = (
        int(seed) for seed in np.random.SeedSequence(args.seed).generate_state(6)
    )
    policy_generator = torch.Generator().manual_seed(policy_seed)
    data_generator = torch.Generator().manual_seed(data_seed)

    # env setup
    envs.game(args.env_id)  # refuses battles: their observations are no planes
    env = envs.make(
        args.env_id, num_envs=args.num_envs, seed=env_seed, prosocial=args.prosocial, max_block_comp=args.max_block_comp
    )
    env.game.check_window(args.start_window, args.start_window_prob if args.start_window else 0.0)
    roles = parse_roles(args.roles, env.spec.num_players, "ppo")
    seats = Seats(env, roles, "ppo", seats_seed)
    learners = [seat for seat, role in enumerate(roles) if role == "ppo"]
    if not learners:
        raise envs.ConfigError(f"no role in '{args.roles}' is ppo, so there is nobody to train")
    num_players, kinds = env.spec.num_players, env.game.kinds
    things = Things(env.game)

    # agent
    code_version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    num_nets = 1 if args.shared_policy else len(learners)
    init_generator = torch.Generator().manual_seed(init_seed)
    agent = Agent(num_nets, things.num_ids, env.spec.num_actions, args.hidden, init_generator)
    nn.init.constant_(agent.value_bias, args.initial_value)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, foreach=True)
    spec = {
        "script": Path(__file__).name, "code_version": code_version, "env_id": args.env_id, "roles": roles,
        "obs_shape": list(env.spec.obs_shape), "num_actions": env.spec.num_actions, "learners": learners,
        "hidden": args.hidden, "shared_policy": args.shared_policy, "env_config": env.spec.config, "args": asdict(args),
    }  # fmt: skip

    # resume
    first_iteration, wall_time, best = 1, 0.0, -float("inf")
    next_eval = args.eval_every or args.total_timesteps + 1
    window = np.zeros(2 + num_players + len(kinds))  # since the last log point: episodes, steps, returns, items taken
    saved = load_resume(run_dir) if args.resume else None
    if saved:
        weights, resume, saved_spec = saved
        agent.load_state_dict(weights)
        for k, parameter in enumerate(agent.parameters()):
            optimizer.state[parameter] = {name: resume[f"adam.{k}.{name}"] for name in ADAM_STATE}
        env.set_state({k.removeprefix("env."): v.numpy() for k, v in resume.items() if k.startswith("env.")})
        seats.set_state({k.removeprefix("seats."): v.numpy() for k, v in resume.items() if k.startswith("seats.")})
        policy_generator.set_state(resume["policy_generator"])
        data_generator.set_state(resume["data_generator"])
        window[:] = resume["window"].numpy()
        first_iteration, wall_time = saved_spec["iteration"] + 1, saved_spec["wall_time"]
        best, next_eval = saved_spec["best"], saved_spec["next_eval"]

    def save_last() -> None:
        state = {f"env.{k}": torch.from_numpy(v) for k, v in env.get_state().items()}
        state |= {f"seats.{k}": torch.from_numpy(v) for k, v in seats.get_state().items()}
        for k, parameter in enumerate(agent.parameters()):
            state |= {f"adam.{k}.{name}": optimizer.state[parameter][name] for name in ADAM_STATE}
        state |= {"policy_generator": policy_generator.get_state(), "data_generator": data_generator.get_state()}
        state |= {"window": torch.from_numpy(window)}
        progress = {"iteration": iteration, "global_step": global_step, "best": best, "next_eval": next_eval}
        save_checkpoint(run_dir, "last", agent, spec | progress | {"wall_time": time.perf_counter() - started}, state)

    # logging
    run_dir.mkdir(parents=True, exist_ok=True)
    about = {"script": spec["script"], "code_version": spec["code_version"], "args": asdict(args) | {"resume": ""}}
    write_json(run_dir / "args.json", about)
    players, rates = [f"return-player{i + 1}" for i in range(num_players)], [f"{kind}_rate" for kind in kinds]
    charts = [f"charts/episodic_{name}" for name in ("return", *players, "length")]
    charts += [f"charts/{name}" for name in (*rates, "SPS", "learning_rate", "start_window_prob")]
    charts += [f"losses/{name}" for name in (*LOSSES, "explained_variance")]
    charts += [f"eval/{name}" for name in ("return", "return_ci95", "episodes", *players, *rates, "length")]
    spent = dict.fromkeys(("time/env", "time/policy", "time/update", "time/eval"), 0.0)
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

    # storage, all (T, B, L, ...)
    shape = (args.num_steps, args.num_envs, len(learners))
    batch = {
        "ids": torch.zeros(*shape, things.most, dtype=torch.int64), "t": torch.zeros(shape),
        "legal": torch.zeros(*shape, env.spec.num_actions, dtype=torch.bool),
        "alive": torch.zeros(shape, dtype=torch.bool), "actions": torch.zeros(shape, dtype=torch.int64),
        "log_probs": torch.zeros(shape), "values": torch.zeros(shape),
    }  # fmt: skip
    reward, next_value = torch.zeros(shape), torch.zeros(shape)
    terminated, truncated = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)

    for iteration in range(first_iteration, args.num_iterations + 1):
        progress = (iteration - 1) / args.num_iterations
        ent_coef = args.ent_coef + (args.ent_coef_final - args.ent_coef) * progress
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - progress)
        window_prob = args.start_window_prob * max(0.0, 1 - progress / max(args.start_window_until, 1e-9))
        if args.start_window:
            env.set_start_window(args.start_window, window_prob)

        # rollout
        for step in range(args.num_steps):
            with torch.no_grad():
                seen = look(things, env.obs[:, learners], env.t, env.legal[:, learners])
                log_probs, values = forward(agent, seen)
                chosen = sample(log_probs, policy_generator)
            seen |= {"alive": torch.from_numpy(env.alive[:, learners]), "actions": chosen, "values": values}
            seen |= {"log_probs": log_probs.gather(2, chosen[:, :, None])[:, :, 0]}
            for name, x in seen.items():
                batch[name][step] = x
            spend("policy")

            actions = seats.act()
            actions[:, learners] = chosen.numpy()
            _, *outcome, info = env.step(actions)
            for storage, x in zip((reward, terminated, truncated), outcome, strict=True):
                storage[step] = torch.from_numpy(x[:, learners])
            if args.horizon_ends:
                terminated[step] |= truncated[step]
            seats.watch(actions, info)
            done = info["done"]
            if done.any():
                window[:2] += done.sum(), info["episode_length"][done].sum()
                window[2 : 2 + num_players] += info["episode_return"][done].sum(0)
            window[2 + num_players :] += [(info["taken"] == 1 + kind).sum() for kind in range(len(kinds))]
            spend("env")

            if truncated[step].any():  # the value of what would have followed, had time not run out
                final_obs, final_t = info["final_obs"][done][:, learners], info["episode_length"][done]
                final = look(things, final_obs, final_t, env.legal[done][:, learners])  # the value ignores legality
                with torch.no_grad():
                    next_value[step, torch.from_numpy(done)] = forward(agent, final)[1]
                spend("policy")

        # advantages
        with torch.no_grad():
            last_values = forward(agent, look(things, env.obs[:, learners], env.t, env.legal[:, learners]))[1]
        following = torch.cat([batch["values"][1:], last_values[None]])
        next_value = torch.where(truncated, next_value, following)
        gae = (batch["alive"], terminated, truncated, args.gamma, args.gae_lambda)
        advantages = advantages_of(reward, batch["values"], next_value, *gae)
        returns = advantages + batch["values"]

        # update
        b_all = batch | {"advantages": advantages, "returns": returns}
        b_nets = {name: nets_first(x, num_nets) for name, x in b_all.items()}  # (P, R, ...)
        try:
            losses = update(args, agent, optimizer, b_nets, ent_coef, data_generator)
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
            scores = evaluate(args, agent, things, roles, args.eval_episodes, eval_seed)
            if scores["return"] > best:
                best = scores["return"]
                save_checkpoint(run_dir, "best", agent, spec | {"global_step": global_step, "eval": scores})
            spend("eval")

        # logging
        if iteration % args.log_every == 0 or iteration == args.num_iterations or scores:
            wall_time = time.perf_counter() - started
            scalars = {"charts/SPS": global_step / wall_time, "charts/learning_rate": optimizer.param_groups[0]["lr"]}
            scalars |= {"charts/start_window_prob": window_prob if args.start_window else 0.0}
            if window[0]:  # episodes ended since the last row
                per_episode = window / window[0]
                mean_returns, taken = per_episode[2 : 2 + num_players], per_episode[2 + num_players :] / num_players
                scalars |= {"charts/episodic_return": mean_returns[learners].mean()}
                scalars |= {"charts/episodic_length": per_episode[1]}
                scalars |= {f"charts/episodic_{name}": x for name, x in zip(players, mean_returns, strict=True)}
                scalars |= {f"charts/{name}": x for name, x in zip(rates, taken, strict=True)}
            targets, errors = returns[batch["alive"]], advantages[batch["alive"]]
            scalars |= losses | {"losses/explained_variance": 1 - (errors.var() / targets.var().clamp_min(1e-8)).item()}
            scalars |= {f"eval/{name}": x for name, x in scores.items()}
            scalars |= {name: seconds / sum(spent.values()) for name, seconds in spent.items()}
            metrics.write(global_step, wall_time, {name: float(x) for name, x in scalars.items()})
            window[:] = 0.0
            latest = {"return": f"{scalars.get('charts/episodic_return', np.nan):.3f}", "best_eval": f"{best:.3f}"}
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
    result = {"last": evaluate(args, agent, things, roles, args.final_eval_episodes, eval_seed + 1)}
    result["last_greedy"] = evaluate(args, agent, things, roles, args.final_eval_episodes, eval_seed + 1, greedy=True)
    if (run_dir / "checkpoints" / "best").is_dir():
        agent.load_state_dict(load_file(run_dir / "checkpoints" / "best" / "weights.safetensors"))
        result["best"] = evaluate(args, agent, things, roles, args.final_eval_episodes, eval_seed + 1)
    wall_time = time.perf_counter() - started
    draw_curve(run_dir, f"PPO on {args.env_id}, seed {args.seed}")
    summary = {"finished": True, "global_step": global_step, "wall_time": wall_time, "eval": result["last"]}
    summary |= {"eval_greedy": result["last_greedy"], "eval_best": result.get("best"), "time": spent}
    write_json(run_dir / "result.json", summary)
    print(f"finished in {wall_time:.0f} s; {args.final_eval_episodes} fresh episodes each:")
    for name, scores in result.items():
        per_player = " ".join(f"{scores[player]:.3f}" for player in players)
        taken = " ".join(f"{rate} {scores[rate]:.3f}" for rate in rates)
        spread = f"{scores['return']:.3f} +- {scores['return_ci95']:.3f}"
        print(f"  {name:<12} return {spread}  players {per_player}  {taken}")
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
