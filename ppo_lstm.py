"""PPO with memory for the grid games: a learner that meets other co-players in every run of episodes, and remembers.

Proximal policy optimisation (Schulman et al. 2017) on an LSTM whose memory lasts over the ends of episodes, as in RL^2
(Duan et al. 2016): the common way to few-shot adaptation without a model of the others. Seat 1 learns. Its co-players
are drawn anew for every run of 30 episodes, and only then does it forget; it sees the board, what everybody did last,
what it earned, and where an episode ended. A player that left the board is in no loss, mean or normalisation, but its
memory goes on. Time running out is an end like any other: what it may still earn then is nothing.

    python ppo_lstm.py --seed 1                                            # Stag Hunt 4x4 among ns, nh, random and mix
    python ppo_lstm.py --env-id msh-4h2s-8x8 --co-players ns,nh,mix
    python evaluate.py --adaptation runs/<run> --line-ups "nh,nh,nh;tft,tft,tft"   # 30 episodes in a row
    python ppo_lstm.py --resume runs/msh-4h1s-4x4__ppo_lstm__1__1700000000
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro

import envs
from envs.checkpoints import Kept
from envs.devices import device_of, move
from envs.roles import Seats, play_in_a_row
from envs.run import Count, Positive, Range, Rate, Run, RunArgs, Share, Weight, descend, main, read_weights, saved_args
from envs.sight import Things, embedding_table, linear, sum_of_embeddings

OWN = "lstm"  # the learner's name among roles
REWARD_UNIT = 0.2  # of the reward that the network sees: half of a stag is 1


@dataclass
class Args(RunArgs):
    # run
    eval_every: Annotated[int, Range(0, 2**31), tyro.conf.arg(metavar="INT")] = 100_000
    """env steps between two evaluations; the last weights are evaluated too (0: only the final evaluation)"""

    # env
    env_id: str = "msh-4h1s-4x4"
    """which game to play"""
    co_players: str = ""
    """whom line-ups are drawn from: roles separated by commas (default: the game's seekers, random and mix)"""
    run_episodes: Count = 30
    """episodes of a run: as long the co-players stay and memory lasts"""
    num_envs: Count = 256
    """games played side by side"""
    max_block_comp: Annotated[int, Range(0, 100), tyro.conf.arg(metavar="0..100")] = 0
    """random pieces of blocks on the board"""

    # algorithm
    total_timesteps: Positive = 1_000_000
    """env steps of the whole run (one step moves all players of one game)"""
    num_steps: Count = 32
    """steps per game and iteration: how far back in time the gradient goes"""
    learning_rate: Rate = 3e-3
    """Adam's learning rate at the start"""
    anneal_lr: bool = True
    """bring the learning rate linearly to zero"""
    gamma: Share = 0.99
    """discount; the time limit counts as an end, which the network sees coming"""
    gae_lambda: Share = 0.95
    """lambda of generalised advantage estimation"""
    num_minibatches: Positive = 16
    """minibatches per epoch, of whole sequences"""
    update_epochs: Positive = 2
    """passes over each batch"""
    clip_coef: Weight = 0.2
    """PPO's clip range"""
    ent_coef: Weight = 0.01
    """weight of the entropy bonus at the start"""
    ent_coef_final: Weight = 0.0
    """weight of the entropy bonus at the end, reached linearly"""
    vf_coef: Weight = 0.5
    """weight of the value loss"""
    max_grad_norm: Weight = 0.5
    """largest gradient norm"""
    hidden_size: Annotated[int, Range(1, 512), tyro.conf.arg(metavar="1..512")] = 64
    """width of the hidden layers and of the memory"""


# networks


class Agent(nn.Module):
    """Actor and critic, side by side in the first layer, with one memory (an LSTM) beside them.

    A row's result does not depend on the other rows (of four or more), for which widths are multiples of 8.
    """

    def __init__(self, game, args: Args, generator: torch.Generator):
        super().__init__()
        self.hidden = hidden = 8 * -(-args.hidden_size // 8)
        self.num_actions, things = game.num_actions, Things(game)

        def layer(inputs: int, outputs: int, std: float) -> nn.Linear:
            return linear(inputs, outputs, std, generator)

        self.embedding = embedding_table(things.num_ids, 2 * hidden, generator)
        self.time = nn.Parameter(0.3 * torch.randn(2 * hidden, generator=generator))
        self.gates_of_input = layer(2 * hidden, 4 * hidden, std=(0.5 / hidden) ** 0.5)
        self.gates_of_last_step = layer(game.num_players * game.num_actions + 2, 4 * hidden, std=1.0)
        self.gates_of_memory = layer(hidden, 4 * hidden, std=hidden**-0.5)
        with torch.no_grad():  # units forget at all paces, up to that of a run
            paces = torch.rand(hidden, generator=generator) * np.log(args.run_episodes * game.config.horizon)
            self.gates_of_input.bias[hidden : 2 * hidden] = paces
        self.actor = layer(2 * hidden, hidden, std=hidden**-0.5)
        self.critic = layer(2 * hidden, hidden, std=hidden**-0.5)
        self.policy_head = layer(hidden, 8 * -(-game.num_actions // 8), std=0.01 / hidden**0.5)
        self.value_head = layer(hidden, 1, std=1 / hidden**0.5)

    def initial_memory(self, num: int) -> torch.Tensor:
        """(num, 2, H) h and c at the start of a run"""
        return torch.zeros(num, 2, self.hidden)

    def forward(self, seen: dict[str, torch.Tensor], memory: torch.Tensor):
        """seen (L, C, ...) as `Player.look` gives it for one step, memory (C, 2, H) -> log-probabilities (L, C, A),
        values (L, C), memory after. Memory begins anew where is_first (L, C) is set."""
        length, rows = seen["t"].shape
        first = sum_of_embeddings(seen["ids"].flatten(0, 1), self.embedding).view(length, rows, -1)
        first = torch.relu(first + seen["t"][..., None] * self.time)
        # one tensor per step: a gradient of inputs[step] would be as large as that of all inputs
        inputs = (self.gates_of_input(first) + self.gates_of_last_step(seen["last_step"])).unbind()
        keep = (~seen["is_first"])[..., None].float()
        h, c = memory.unbind(1)
        outputs = []
        for step, begins in enumerate(seen["is_first"].any(1).cpu().tolist()):
            if begins:
                h, c = h * keep[step], c * keep[step]
            gates, new = (inputs[step] + self.gates_of_memory(h)).split((3 * self.hidden, self.hidden), dim=1)
            take, forget, show = torch.sigmoid(gates).chunk(3, dim=1)
            c = forget * c + take * torch.tanh(new)
            h = show * torch.tanh(c)
            outputs.append(h)
        remembered = torch.stack(outputs)
        for_actor, for_critic = (torch.cat([half, remembered], dim=2) for half in first.chunk(2, dim=2))
        logits = self.policy_head(torch.relu(self.actor(for_actor)))[..., : self.num_actions]
        values = self.value_head(torch.relu(self.critic(for_critic)))[..., 0]
        return F.log_softmax(logits.masked_fill(~seen["legal"], -1e9), dim=2), values, torch.stack([h, c], dim=1)


# algorithm


def sample(log_probs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One action per row, by the Gumbel trick; an illegal action's log-probability is so low that it never wins."""
    noise = torch.rand(log_probs.shape, generator=generator).clamp_min(1e-20)
    return (log_probs - torch.log(-torch.log(noise))).argmax(-1)


def advantages_of(reward, value, next_value, alive, over, gamma: float, lam: float) -> torch.Tensor:
    """GAE; all (T, B). An end, also by time, cuts both the bootstrap and the sum. Zero where a player had left."""
    advantages = torch.zeros_like(reward)
    following = torch.zeros_like(reward[0])
    for step in reversed(range(len(reward))):
        delta = reward[step] + gamma * next_value[step] * ~over[step] - value[step]
        following = (delta + gamma * lam * ~over[step] * following) * alive[step]
        advantages[step] = following
    return advantages


def ppo_loss(args: Args, agent: Agent, mb: dict[str, torch.Tensor], memory: torch.Tensor, ent_coef: float):
    """The loss on a minibatch of sequences (T, C, ...) with the memory (C, 2, H) at their starts, what there is to log,
    and the ratios."""
    alive = mb["alive"].float()

    def mean(x: torch.Tensor) -> torch.Tensor:  # over the steps of players on the board
        return (x * alive).sum() / alive.sum().clamp_min(1.0)

    log_probs, value, _ = agent(mb, memory)
    log_prob = log_probs.gather(2, mb["actions"][:, :, None])[:, :, 0]
    entropy = mean(-(log_probs.exp() * log_probs.clamp_min(-1e8)).sum(2))
    log_ratio = (log_prob - mb["log_probs"]) * alive
    ratio = log_ratio.exp()
    centred = mb["advantages"] - mean(mb["advantages"])
    advantages = centred / (mean(centred**2).sqrt() + 1e-8)
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = mean(torch.max(-advantages * ratio, -advantages * clipped_ratio))
    value_loss = 0.5 * mean((value - mb["returns"]) ** 2)
    loss = policy_loss - ent_coef * entropy + args.vf_coef * value_loss
    with torch.no_grad():
        stats = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        stats |= {"approx_kl": mean(ratio - 1 - log_ratio)}
        stats |= {"clipfrac": mean(((ratio - 1).abs() > args.clip_coef).float())}
        return loss, {name: stat.item() for name, stat in stats.items()}, ratio


def update(args: Args, agent: Agent, optimizer, batch: dict[str, torch.Tensor], memory, ent_coef: float, generator):
    """All epochs over one batch of sequences (T, B, ...); returns the mean of what there is to log."""
    log, device = [], device_of(agent)
    batch, memory = move(batch, device), memory.to(device)
    for _ in range(args.update_epochs):
        order = torch.randperm(args.num_envs, generator=generator).to(device)
        for mb_inds in order.chunk(args.num_minibatches):
            mb = {name: x[:, mb_inds] for name, x in batch.items()}
            loss, stats, _ = ppo_loss(args, agent, mb, memory[mb_inds], ent_coef)
            descend(optimizer, loss, args.max_grad_norm)
            log.append(stats)
    return {f"losses/{name}": float(np.mean([stats[name] for stats in log])) for name in log[0]}


# playing and evaluating


class LineUps(Kept):
    """The co-players of seat 1: in every game drawn from `pool`, anew for each run of episodes. Half of the line-ups
    are of one kind. `player`, if given, sits in seat 1."""

    KEPT = ("drawn", "episode", "rng", "seats")

    def __init__(self, env, pool: list[str], run_episodes: int, seed: int, greedy: bool = False, player=None):
        others = env.spec.num_players - 1
        self.env, self.run_episodes, self.player = env, run_episodes, player
        self.seats = [Seats(env, [OWN, *[role] * others], OWN, seed + k, greedy) for k, role in enumerate(pool)]
        self.rng, self.episode = np.random.default_rng(seed), np.zeros(env.num_envs, np.int64)
        self.drawn = np.zeros((env.num_envs, others), np.int64)  # places in the pool
        self.draw(np.ones(env.num_envs, bool))

    def draw(self, games: np.ndarray) -> None:
        """New co-players in some games (B,)."""
        drawn = self.rng.integers(len(self.seats), size=self.drawn.shape)
        alike = self.rng.random(len(drawn)) < 0.5
        self.drawn[games] = np.where(alike[:, None], drawn[:, :1], drawn)[games]

    def act(self) -> np.ndarray:
        """(B, N) actions; seat 1 stays unless somebody sits there"""
        actions = np.stack([seats.act() for seats in self.seats])  # (pool, B, N)
        actions[0, :, 1:] = np.take_along_axis(actions[:, :, 1:], self.drawn[None], 0)[0]
        if self.player:
            actions[0, :, 0] = self.player.act(self.env)
        return actions[0]

    def watch(self, actions: np.ndarray, info: dict[str, np.ndarray]) -> None:
        for seats in self.seats:
            seats.watch(actions, info)
        if self.player:
            self.player.watch(self.env, actions, info)
        self.episode += info["done"]
        over = self.episode == self.run_episodes
        self.episode[over] = 0
        self.draw(over)


class Player(Kept):
    """An agent with its memory in one seat of any env (see envs/roles.py): in training, in evaluate.py, and for the
    roles of other runs."""

    KEPT = ("memory", "is_first", "last_step", "episode", "generator")

    def __init__(self, agent: Agent, env, seat: int, run_episodes: int, seed: int, greedy: bool = False):
        self.agent, self.things, self.seat, self.greedy = agent, Things(env.game), seat, greedy
        self.run_episodes, self.generator = run_episodes, torch.Generator().manual_seed(seed)
        num_players, self.num_actions = env.spec.num_players, env.spec.num_actions
        self.order = (seat + np.arange(num_players)) % num_players  # own first, as in what is observed
        self.memory = agent.initial_memory(env.num_envs)
        self.is_first = torch.ones(env.num_envs, dtype=torch.bool)  # a run begins
        # what everybody did last, the own reward, whether the episode ended
        self.last_step = torch.zeros(env.num_envs, num_players * self.num_actions + 2)
        self.episode = torch.zeros(env.num_envs, dtype=torch.int64)  # of the run

    def look(self, obs: np.ndarray, t: np.ndarray, legal: np.ndarray) -> dict[str, torch.Tensor]:
        """What the agent sees of obs (B, H, W, C), t (B,), legal (B, A): ids (B, K), t (B,), legal (B, A), and what it
        is told besides."""
        board = {"ids": self.things(obs), "t": self.things.time(t), "legal": legal}
        told = {"last_step": self.last_step, "is_first": self.is_first}
        return {name: torch.from_numpy(x) for name, x in board.items()} | told

    @torch.no_grad()
    def think(self, seen: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probabilities (B, A) and values (B,) of what is seen, memory after it; on the CPU as the games are"""
        device = device_of(self.agent)
        thought = self.agent({name: x[None].to(device) for name, x in seen.items()}, self.memory.to(device))
        log_probs, values, memory = (x.cpu() for x in thought)
        return log_probs[0], values[0], memory

    def decide(self, env) -> dict[str, torch.Tensor]:
        """What is seen in a step, actions, their log-probabilities and values, all (B, ...); memory moves on."""
        seen = self.look(env.obs[:, self.seat], env.t, env.legal[:, self.seat])
        log_probs, values, self.memory = self.think(seen)
        actions = log_probs.argmax(1) if self.greedy else sample(log_probs, self.generator)
        chosen = log_probs.gather(1, actions[:, None])[:, 0]
        return seen | {"actions": actions, "log_probs": chosen, "values": values}

    def act(self, env) -> np.ndarray:
        return self.decide(env)["actions"].numpy()

    def watch(self, env, actions: np.ndarray, info: dict[str, np.ndarray]) -> None:
        done = torch.from_numpy(info["done"])
        did = F.one_hot(torch.from_numpy(actions[:, self.order]), self.num_actions).flatten(1)
        reward = torch.from_numpy(env.out.reward[:, [self.seat]]) * REWARD_UNIT
        self.episode = self.episode + done
        self.is_first = self.episode == self.run_episodes
        self.episode[self.is_first] = 0
        self.last_step = torch.cat([did, reward, done[:, None]], dim=1) * ~self.is_first[:, None]


def load_policy(checkpoint: Path, spec: dict, env, seat: int, learner: int | None, seed: int, greedy: bool) -> Player:
    """A checkpoint of this script as a player; it has one learner."""
    args = saved_args(Args, spec)
    agent = Agent(env.game, args, torch.Generator())
    read_weights(checkpoint, agent)
    return Player(agent, env, seat, args.run_episodes, seed, greedy)


def evaluate(args: Args, agent: Agent, pool: list[str], episodes: int, seed: int, greedy: bool = False):
    """Scores of fresh runs from the true starts: the mean over all episodes, over the first ones, and over the last
    half of a run."""
    runs, each = -(-episodes // args.run_episodes), args.run_episodes
    env = envs.make(args.env_id, num_envs=runs, seed=seed, max_block_comp=args.max_block_comp)
    player = Player(agent, env, 0, each, seed, greedy)
    returns = play_in_a_row(env, LineUps(env, pool, each, seed, greedy, player), each)  # (runs, episodes)
    of_runs = returns.mean(1)
    scores = {"return": of_runs.mean(), "return_ci95": 1.96 * of_runs.std() / runs**0.5, "episodes": runs * each}
    scores |= {"return_first": returns[:, 0].mean(), "return_late": returns[:, each // 2 :].mean()}
    return {name: float(score) for name, score in scores.items()}


def train(args: Args, run: Run) -> None:
    """The whole run."""
    # seeding
    env_seed, seats_seed, policy_seed, data_seed, init_seed, eval_seed = (
        int(seed) for seed in np.random.SeedSequence(args.seed).generate_state(6)
    )
    data_generator = torch.Generator().manual_seed(data_seed)

    # env setup
    if args.env_id.startswith(envs.BATTLES):
        raise envs.ConfigError(f"'{args.env_id}' is a battle, which mappo_hyper.py plays; PPO here is for grid games")
    env = envs.make(args.env_id, num_envs=args.num_envs, seed=env_seed, max_block_comp=args.max_block_comp)
    pool = args.co_players.split(",") if args.co_players else [*env.game.seekers, "random", "mix"]
    line_ups = LineUps(env, pool, args.run_episodes, seats_seed)

    # agent
    agent = Agent(env.game, args, torch.Generator().manual_seed(init_seed)).to(run.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    player = Player(agent, env, 0, args.run_episodes, policy_seed)

    # checkpoint: what must survive a kill, besides the weights
    keep = {"optimizer": optimizer, "env": env, "line_ups": line_ups, "player": player}
    keep |= {"data_generator": data_generator}
    title, say = f"PPO with memory on {args.env_id}", [f"co-players {','.join(pool)}"]
    run.start(agent, env.spec, learners=[0], keep=keep, facts={"pool": pool}, title=title, say=say)

    # storage, all (T, B, ...), made at the first step
    batch: dict[str, torch.Tensor] = {}
    shape = (args.num_steps, args.num_envs)
    reward, over = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)

    for _ in run.iterations():
        ent_coef = args.ent_coef + (args.ent_coef_final - args.ent_coef) * run.progress
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - run.progress)

        # rollout
        memory = player.memory
        for step in range(args.num_steps):
            seen = {"alive": torch.from_numpy(env.alive[:, 0])} | player.decide(env)
            for name, x in seen.items():
                if name not in batch:
                    batch[name] = torch.zeros(args.num_steps, *x.shape, dtype=x.dtype)
                batch[name][step] = x
            run.clock("policy")

            actions = line_ups.act()
            actions[:, 0] = seen["actions"].numpy()
            _, rewards, terminated, truncated, info = env.step(actions)
            reward[step] = torch.from_numpy(rewards[:, 0])
            over[step] = torch.from_numpy(terminated[:, 0] | truncated[:, 0])
            line_ups.watch(actions, info)
            player.watch(env, actions, info)
            run.count(info)
            run.clock("env")

        # advantages
        last_values = player.think(player.look(env.obs[:, 0], env.t, env.legal[:, 0]))[1]
        following = torch.cat([batch["values"][1:], last_values[None]])
        gae = (following, batch["alive"], over, args.gamma, args.gae_lambda)
        advantages = advantages_of(reward, batch["values"], *gae)
        returns = advantages + batch["values"]

        # update
        b_all = batch | {"advantages": advantages, "returns": returns}
        losses = update(args, agent, optimizer, b_all, memory, ent_coef, data_generator)
        run.clock("update")

        # evaluation
        if run.evaluation_due():
            run.evaluated(evaluate(args, agent, pool, args.eval_episodes, eval_seed))
            run.clock("eval")

        # logging
        if run.log_due():
            targets, errors = returns[batch["alive"]], advantages[batch["alive"]]
            explained = 1 - (errors.var() / targets.var().clamp_min(1e-8)).item()
            scalars = {"charts/learning_rate": optimizer.param_groups[0]["lr"], "losses/explained_variance": explained}
            run.log(scalars | losses)

    # result
    episodes, seed = args.final_eval_episodes, eval_seed + 1
    results = {"eval": evaluate(args, agent, pool, episodes, seed)}
    results["eval_greedy"] = evaluate(args, agent, pool, episodes, seed, greedy=True)
    if run.load_best():
        results["eval_best"] = evaluate(args, agent, pool, episodes, seed)
    run.finish(results)


if __name__ == "__main__":
    sys.exit(main(Args, train))
