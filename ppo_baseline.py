"""PPO for the grid games: self-play, or learners among rule-based players and earlier checkpoints.

Proximal policy optimisation (Schulman et al. 2017) with clipping, GAE and masked illegal actions. Learners are
independent: every `ppo` seat has a network of its own; `--shared-policy` trains one network for all of them. The critic
starts optimistic, which is what finds the stag before everybody is content with a hare. A player that left the board is
in no loss, mean or normalisation; time running out bootstraps, an end by the rules does not.

    python ppo_baseline.py --seed 1                                        # Stag Hunt 4x4, ends near 2.89 (optimum 3.0)
    python ppo_baseline.py --env-id msh-4h1s-8x8 --total-timesteps 1200000 --start-window 3   # with a start curriculum
    python ppo_baseline.py --roles ppo,ns,nh,random                        # one learner, three rule-based players
    python ppo_baseline.py --resume runs/msh-4h1s-4x4__ppo_baseline__1__1700000000
"""

import envs  # first: from here on Ctrl-C is one line

# isort: split
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro

from envs.devices import device_of, move
from envs.roles import Seats, learners_of, parse_roles, play_episodes, score_episodes
from envs.run import Count, Positive, Range, Rate, Run, RunArgs, Share, Weight, main, read_weights
from envs.sight import Things, embedding_table, linear, sum_of_embeddings


@dataclass
class Args(RunArgs):
    # env
    env_id: str = "msh-4h1s-4x4"
    """which game to play"""
    roles: str = ""
    """one entry per player: ppo, a rule-based player or a run folder, e.g. ppo,ns,ns,ns (default: all ppo)"""
    num_envs: Count = 128
    """games played side by side"""
    start_window: Annotated[int, Range(0, 100), tyro.conf.arg(metavar="0..100")] = 0
    """start curriculum: side of the square in which some episodes start (0: off)"""
    start_window_prob: Share = 0.9
    """probability of such a start at the beginning of training, decaying linearly"""
    start_window_until: Share = 0.5
    """share of training after which all episodes start as in the true game"""
    prosocial: bool = False
    """learn from the mean reward of all players (evaluation is always selfish)"""
    max_block_comp: Annotated[int, Range(0, 100), tyro.conf.arg(metavar="0..100")] = 0
    """random pieces of blocks on the board"""

    # algorithm
    total_timesteps: Positive = 300_000
    """env steps of the whole run (one step moves all players of one game)"""
    num_steps: Count = 16
    """steps per game and iteration"""
    learning_rate: Rate = 1e-3
    """Adam's learning rate at the start"""
    anneal_lr: bool = True
    """bring the learning rate linearly to zero"""
    gamma: Share = 0.97
    """discount"""
    horizon_ends: bool = False
    """take the horizon as an end by the rules, without bootstrapping: learn what pays before time runs out"""
    gae_lambda: Share = 0.95
    """lambda of generalised advantage estimation"""
    num_minibatches: Positive = 4
    """minibatches per epoch"""
    update_epochs: Positive = 4
    """passes over each batch"""
    clip_coef: Weight = 0.2
    """PPO's clip range"""
    ent_coef: Weight = 0.05
    """weight of the entropy bonus at the start"""
    ent_coef_final: Weight = 0.0
    """weight of the entropy bonus at the end, reached linearly"""
    vf_coef: Weight = 0.5
    """weight of the value loss"""
    max_grad_norm: Weight = 0.5
    """largest gradient norm of each learner's network"""
    initial_value: Annotated[float, Range(-1e6, 1e6), tyro.conf.arg(metavar="FLOAT")] = 6.0
    """what the critic expects before it has learned; optimism makes a hare a disappointment until stags are known"""
    hidden_size: Annotated[int, Range(1, 4096), tyro.conf.arg(metavar="1..4096")] = 64
    """width of the hidden layers"""
    shared_policy: bool = False
    """one network for all learners instead of one each"""


# networks


class Agent(nn.Module):
    """Actor and critic of one learner, side by side in the first layer."""

    def __init__(self, things: Things, num_actions: int, hidden: int, generator: torch.Generator):
        super().__init__()
        self.hidden, self.num_actions = hidden, num_actions

        self.embedding = embedding_table(things.num_ids, 2 * hidden, generator)
        self.time = nn.Parameter(0.3 * torch.randn(2 * hidden, generator=generator))
        self.actor = linear(hidden, hidden, (2 / hidden) ** 0.5, generator)
        self.critic = linear(hidden, hidden, (2 / hidden) ** 0.5, generator)
        # a multiple of 8 columns: with 7, a row's product is rounded by its place in the batch, and ratios are not 1
        self.policy_head = linear(hidden, 8 * -(-num_actions // 8), 0.01 / hidden**0.5, generator)
        self.value_head = linear(hidden, 1, 1 / hidden**0.5, generator)

    def forward(self, ids: torch.Tensor, t: torch.Tensor, legal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """ids (R, K), t (R,) in 0..1, legal (R, A) -> log-probabilities (R, A), values (R,)"""
        first = torch.relu(sum_of_embeddings(ids, self.embedding) + t[:, None] * self.time)
        for_actor, for_critic = first.split(self.hidden, dim=1)
        logits = self.policy_head(torch.relu(self.actor(for_actor)))
        values = self.value_head(torch.relu(self.critic(for_critic)))
        logits = logits[:, : self.num_actions].masked_fill(~legal, -1e9)
        return F.log_softmax(logits, dim=1), values[:, 0]


def make_agents(args: Args, things: Things, num_actions: int, num_learners: int, seed: int = 0) -> nn.ModuleList:
    """One agent for each learner, or one for all of them."""
    generator = torch.Generator().manual_seed(seed)
    num_agents = 1 if args.shared_policy else num_learners
    return nn.ModuleList(Agent(things, num_actions, args.hidden_size, generator) for _ in range(num_agents))


def evaluate_rows(agents: nn.ModuleList, ids: torch.Tensor, t: torch.Tensor, legal: torch.Tensor):
    """Each agent on its rows: (agent, row, ...) -> log-probabilities (agent, row, A), values (agent, row)"""
    outputs = [agent(ids[k], t[k], legal[k]) for k, agent in enumerate(agents)]
    log_probs, values = zip(*outputs, strict=True)
    return torch.stack(log_probs), torch.stack(values)


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


def ppo_loss(args: Args, agents: nn.ModuleList, mb: dict[str, torch.Tensor], ent_coef: float):
    """The sum of the agents' losses on a minibatch (agent, row, ...), what there is to log, and the ratios."""
    alive = mb["alive"].float()
    count = alive.sum(1, keepdim=True).clamp_min(1.0)

    def mean(x: torch.Tensor) -> torch.Tensor:  # over the rows of players on the board, for each agent
        return (x * alive).sum(1, keepdim=True) / count

    log_probs, value = evaluate_rows(agents, mb["ids"], mb["t"], mb["legal"])
    log_prob = log_probs.gather(2, mb["actions"][:, :, None])[:, :, 0]
    entropy = mean(-(log_probs.exp() * log_probs.clamp_min(-1e8)).sum(2))
    log_ratio = (log_prob - mb["log_probs"]) * alive
    ratio = log_ratio.exp()
    centred = mb["advantages"] - mean(mb["advantages"])
    advantages = centred / (mean(centred**2).sqrt() + 1e-8)
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = mean(torch.max(-advantages * ratio, -advantages * clipped_ratio))
    value_loss = 0.5 * mean((value - mb["returns"]) ** 2)
    loss = (policy_loss - ent_coef * entropy + args.vf_coef * value_loss).sum()
    with torch.no_grad():
        stats = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        stats |= {"approx_kl": mean(ratio - 1 - log_ratio)}
        stats |= {"clipfrac": mean(((ratio - 1).abs() > args.clip_coef).float())}
        return loss, {name: stat.mean().item() for name, stat in stats.items()}, ratio


def update(args: Args, agents: nn.ModuleList, optimizer, batch: dict[str, torch.Tensor], ent_coef: float, generator):
    """All epochs over one batch of (agent, row, ...) tensors; returns the mean of what there is to log."""
    log = []
    for _ in range(args.update_epochs):
        order = torch.randperm(batch["ids"].shape[1], generator=generator).to(batch["ids"].device)
        for mb_inds in order.chunk(args.num_minibatches):
            loss, stats, _ = ppo_loss(args, agents, {name: x[:, mb_inds] for name, x in batch.items()}, ent_coef)
            optimizer.zero_grad()
            loss.backward()  # nothing of one agent is in the loss of another
            norms = [nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm, foreach=True) for agent in agents]
            if not torch.isfinite(loss + sum(norms)):
                raise FloatingPointError(f"the loss became {loss.item()} with a gradient of norm {max(norms).item()}")
            optimizer.step()
            log.append(stats)
    return {f"losses/{name}": float(np.mean([stats[name] for stats in log])) for name in log[0]}


# playing and evaluating


def look(things: Things, obs: np.ndarray, t: np.ndarray, legal: np.ndarray) -> dict[str, torch.Tensor]:
    """What agents see of obs (B, L, H, W, C), t (B,), legal (B, L, A): ids (B, L, K), t (B, L), legal (B, L, A)."""
    share = torch.from_numpy(things.time(t))[:, None].expand(obs.shape[:2])
    return {"ids": torch.from_numpy(things(obs)), "t": share, "legal": torch.from_numpy(legal)}


def rows_of_agents(x: torch.Tensor, num_agents: int) -> torch.Tensor:
    """(T, B, L, ...) -> (agent, row, ...): one agent for each of the L learners, or one for all."""
    return x.movedim(2, 0).reshape(num_agents, -1, *x.shape[3:])


def forward(agents: nn.ModuleList, seen: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities (B, L, A) and values (B, L) for what is seen in one step, on the CPU as the games are."""
    batch, learners = seen["t"].shape
    rows = {name: rows_of_agents(x[None], len(agents)).to(device_of(agents)) for name, x in seen.items()}
    log_probs, values = (x.cpu() for x in evaluate_rows(agents, rows["ids"], rows["t"], rows["legal"]))
    return log_probs.view(learners, batch, -1).transpose(0, 1), values.view(learners, batch).T


class Policy:
    """A trained agent in one seat of any env (see envs/roles.py), for evaluate.py and for the roles of other runs."""

    def __init__(self, agent: Agent, things: Things, seat: int, seed: int, greedy: bool):
        self.agent, self.things, self.seat, self.greedy = agent, things, seat, greedy
        self.generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def act(self, env) -> np.ndarray:
        seen = look(self.things, env.obs[:, [self.seat]], env.t, env.legal[:, [self.seat]])
        log_probs, value = (x[:, 0] for x in forward(nn.ModuleList([self.agent]), seen))
        self.thoughts = {"policy": log_probs.exp(), "value": value}
        return (log_probs.argmax(-1) if self.greedy else sample(log_probs, self.generator)).numpy()

    def explain(self, row: int = 0) -> dict[str, np.ndarray]:
        """What it thought in game `row` before its last action (envs/roles.py)."""
        return {name: x[row].cpu().numpy() for name, x in self.thoughts.items()}

    def get_state(self) -> dict[str, np.ndarray]:
        return {"generator": self.generator.get_state().numpy()}

    def set_state(self, saved: dict[str, np.ndarray]) -> None:
        self.generator.set_state(torch.from_numpy(saved["generator"]))


def load_policy(checkpoint: Path, spec: dict, env, seat: int, learner: int | None, seed: int, greedy: bool) -> Policy:
    """A checkpoint of this script as a player: the agent trained in that seat (else the first), or learner 1, 2, ..."""
    learners = spec["learners"]  # the seats that learned, in the order of the agents
    number = learner - 1 if learner else learners.index(seat) if seat in learners else 0
    things = Things(env.game)
    args = Args(hidden_size=spec["args"]["hidden_size"], shared_policy=spec["args"]["shared_policy"])
    agents = make_agents(args, things, env.spec.num_actions, len(learners))
    read_weights(checkpoint, agents)
    return Policy(agents[0 if args.shared_policy else number], things, seat, seed, greedy)


def evaluate(args: Args, agents: nn.ModuleList, roles: list[str], episodes: int, seed: int, greedy=False):
    """Scores of fresh episodes from the true starts, selfish rewards."""
    env = envs.make(args.env_id, num_envs=episodes, seed=seed, max_block_comp=args.max_block_comp)
    learners, things = [seat for seat, role in enumerate(roles) if role == "ppo"], Things(env.game)
    agent_of = {seat: agents[0 if args.shared_policy else k] for k, seat in enumerate(learners)}
    policies = {seat: Policy(agent_of[seat], things, seat, seed + k, greedy) for k, seat in enumerate(learners)}
    played = play_episodes(env, Seats(env, roles, "ppo", seed, greedy, policies))
    return score_episodes(played, learners, env.game.kinds)


def train(args: Args, run: Run) -> None:
    """The whole run."""
    # seeding
    env_seed, seats_seed, policy_seed, data_seed, init_seed, eval_seed = (
        int(seed) for seed in np.random.SeedSequence(args.seed).generate_state(6)
    )
    policy_generator = torch.Generator().manual_seed(policy_seed)
    data_generator = torch.Generator().manual_seed(data_seed)

    # env setup
    if args.env_id.startswith(envs.BATTLES):
        raise envs.ConfigError(f"'{args.env_id}' is a battle, which mappo_hyper.py plays; PPO here is for grid games")
    env = envs.make(
        args.env_id, num_envs=args.num_envs, seed=env_seed, prosocial=args.prosocial, max_block_comp=args.max_block_comp
    )
    env.game.check_window(args.start_window, args.start_window_prob if args.start_window else 0.0)
    roles = parse_roles(args.roles, env.spec.num_players, "ppo")
    seats = Seats(env, roles, "ppo", seats_seed)
    learners = learners_of(roles, "ppo")
    things, num_actions = Things(env.game), env.spec.num_actions

    # agents
    agents = make_agents(args, things, num_actions, len(learners), init_seed).to(run.device)
    for agent in agents:
        nn.init.constant_(agent.value_head.bias, args.initial_value)
    optimizer = torch.optim.Adam(agents.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)

    # checkpoint: what must survive a kill, besides the weights
    keep = {"optimizer": optimizer, "env": env, "seats": seats}
    keep |= {"policy_generator": policy_generator, "data_generator": data_generator}
    title, say = f"PPO on {args.env_id}", [f"roles {','.join(roles)}"]
    run.start(agents, env.spec, learners=learners, keep=keep, facts={"roles": roles}, title=title, say=say)

    # storage, all (T, B, L, ...)
    shape = (args.num_steps, args.num_envs, len(learners))
    batch = {
        "ids": torch.zeros(*shape, things.most, dtype=torch.int32),
        "t": torch.zeros(shape),
        "legal": torch.zeros(*shape, num_actions, dtype=torch.bool),
        "alive": torch.zeros(shape, dtype=torch.bool),
        "actions": torch.zeros(shape, dtype=torch.int64),
        "log_probs": torch.zeros(shape),
        "values": torch.zeros(shape),
    }
    reward, next_value = torch.zeros(shape), torch.zeros(shape)
    terminated, truncated = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)

    for _ in run.iterations():
        ent_coef = args.ent_coef + (args.ent_coef_final - args.ent_coef) * run.progress
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - run.progress)
        window_prob = args.start_window_prob * max(0.0, 1 - run.progress / max(args.start_window_until, 1e-9))
        if args.start_window:
            env.set_start_window(args.start_window, window_prob)

        # rollout
        for step in range(args.num_steps):
            with torch.no_grad():
                seen = look(things, env.obs[:, learners], env.t, env.legal[:, learners])
                log_probs, values = forward(agents, seen)
                chosen = sample(log_probs, policy_generator)
            seen |= {"alive": torch.from_numpy(env.alive[:, learners]), "actions": chosen, "values": values}
            seen |= {"log_probs": log_probs.gather(2, chosen[:, :, None])[:, :, 0]}
            for name, x in seen.items():
                batch[name][step] = x
            run.clock("policy")

            actions = seats.act()
            actions[:, learners] = chosen.numpy()
            _, *outcome, info = env.step(actions)
            for storage, x in zip((reward, terminated, truncated), outcome, strict=True):
                storage[step] = torch.from_numpy(x[:, learners])
            if args.horizon_ends:
                terminated[step] |= truncated[step]
            seats.watch(actions, info)
            run.count(info)
            run.clock("env")

            if truncated[step].any():  # the value of what would have followed, had time not run out
                done = info["done"]
                final_obs, final_t = info["final_obs"][done][:, learners], info["episode_length"][done]
                final = look(things, final_obs, final_t, env.legal[done][:, learners])  # the value ignores legality
                with torch.no_grad():
                    next_value[step, torch.from_numpy(done)] = forward(agents, final)[1]
                run.clock("policy")

        # advantages
        with torch.no_grad():
            last_values = forward(agents, look(things, env.obs[:, learners], env.t, env.legal[:, learners]))[1]
        following = torch.cat([batch["values"][1:], last_values[None]])
        next_value = torch.where(truncated, next_value, following)
        gae = (batch["alive"], terminated, truncated, args.gamma, args.gae_lambda)
        advantages = advantages_of(reward, batch["values"], next_value, *gae)
        returns = advantages + batch["values"]

        # update
        b_all = batch | {"advantages": advantages, "returns": returns}
        b_agents = {name: rows_of_agents(x, len(agents)) for name, x in b_all.items()}  # (agent, row, ...)
        losses = update(args, agents, optimizer, move(b_agents, run.device), ent_coef, data_generator)
        run.clock("update")

        # evaluation
        if run.evaluation_due():
            run.evaluated(evaluate(args, agents, roles, args.eval_episodes, eval_seed))
            run.clock("eval")

        # logging
        if run.log_due():
            targets, errors = returns[batch["alive"]], advantages[batch["alive"]]
            explained = 1 - (errors.var() / targets.var().clamp_min(1e-8)).item()
            scalars = {"charts/learning_rate": optimizer.param_groups[0]["lr"], "losses/explained_variance": explained}
            scalars |= {"charts/start_window_prob": window_prob if args.start_window else 0.0}
            run.log(scalars | losses)

    # result
    episodes, seed = args.final_eval_episodes, eval_seed + 1
    results = {"eval": evaluate(args, agents, roles, episodes, seed)}
    results["eval_greedy"] = evaluate(args, agents, roles, episodes, seed, greedy=True)
    if run.load_best():
        results["eval_best"] = evaluate(args, agents, roles, episodes, seed)
    run.finish(results)


if __name__ == "__main__":
    sys.exit(main(Args, train))
