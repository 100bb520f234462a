"""Value-based teams: recurrent Q-learning with a mixer: none (IQL), a sum (VDN) or a monotonic network (QMIX).

One recurrent network gives every agent the values of its actions from what it sees, its last action and its id. What is
learned is the value of the team: each agent's own (Tan 1993), the sum of all (VDN, Sunehag et al. 2018), or a monotonic
mixing of all whose weights a hypernetwork makes from the state (QMIX, Rashid et al. 2018). Episodes come from many
games side by side and go to a replay; updates draw whole episodes, with double Q-learning, a target copy and lambda
returns. A fallen agent is in no value; time running out bootstraps, an end by the rules does not.

    python qmix.py --env-id smac-3m --seed 1                        # QMIX on 3 against 3 marines
    python qmix.py --env-id smac-8m --mixer vdn                     # VDN; --mixer none: IQL
    python qmix.py --env-id msh-4h1s-4x4 --gamma 0.97               # Stag Hunt for the team: the mean reward of all
    python qmix.py --env-id mpe-simple-spread                       # pip install mpe2
    python qmix.py --resume runs/smac-3m__qmix__1__1700000000
"""

import envs  # noqa: F401  (first: from here on Ctrl-C is one line)

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

from envs.checkpoints import Kept
from envs.devices import device_of
from envs.episodes import Replay, RunningEpisodes, Tensors, ends, lambda_targets
from envs.memory import GRU
from envs.run import Positive, Rate, Run, RunArgs, Share, Weight, Whole, descend, main, read_weights, saved_args
from envs.team import ChoosingTeam, TeamGame, make_env, pick, play_team

ALGORITHMS = {"none": "IQL", "vdn": "VDN", "qmix": "QMIX"}  # of each mixer


@dataclass
class Args(RunArgs):
    # run
    eval_every: Whole = 50_000
    """env steps between two evaluations, greedy (0: only the final evaluation)"""
    eval_episodes: Positive = 128
    """episodes of each evaluation during training"""
    final_eval_episodes: Positive = 256
    """episodes of the evaluations at the end"""
    checkpoint_every: Positive = 100
    """iterations between two saves of checkpoints/last (the replay is saved, too)"""

    # env
    env_id: str = "smac-3m"
    """which game to play: a battle (smac-...), a grid game (msh-...) or mpe-simple-spread"""
    num_envs: Positive = 64
    """games played side by side"""
    start_jitter: Weight = 0.0
    """battles: start positions move by up to this much, anew in each episode (0: always the same start)"""

    # algorithm
    mixer: Literal["none", "vdn", "qmix"] = "qmix"
    """how the agents' values make the team's: not at all (IQL), by a sum (VDN), or by a monotonic network (QMIX)"""
    total_timesteps: Positive = 500_000
    """env steps of the whole run (one step moves all agents of one game)"""
    num_steps: Positive = 16
    """steps per game and iteration"""
    updates: Positive = 4
    """minibatches per iteration"""
    batch_episodes: Positive = 32
    """episodes per minibatch"""
    buffer_steps: Positive = 60_000
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
    """share of random actions at the start"""
    epsilon_final: Share = 0.05
    """the same once epsilon_steps are over"""
    epsilon_steps: Positive = 50_000
    """env steps in which it gets there, linearly"""
    target_every: Positive = 50
    """minibatches after which the target networks become copies of the current ones"""
    max_grad_norm: Weight = 10.0
    """largest gradient norm"""
    hidden_size: Positive = 64
    """width of the agents' network and of its memory"""
    mixing_size: Positive = 32
    """width of QMIX's mixing network"""
    hyper_size: Positive = 64
    """width of the hypernetworks that make its weights"""


# networks


class QNetwork(nn.Module):
    """Values of an agent's actions from what it sees, its last action and its id; one network for all agents."""

    def __init__(self, args: Args, game: TeamGame):
        super().__init__()
        self.num_agents, self.num_actions, self.hidden_size = game.num_agents, game.num_actions, args.hidden_size
        self.first = nn.Linear(game.obs_size, args.hidden_size)
        self.last_action = nn.Embedding(game.num_actions + 1, args.hidden_size)
        self.agent = nn.Embedding(game.num_agents, args.hidden_size)
        self.gru = GRU(args.hidden_size, args.hidden_size)
        self.head = nn.Linear(args.hidden_size, game.num_actions)
        for table in (self.last_action, self.agent):  # as if one-hot entries stood beside what is seen
            nn.init.normal_(table.weight, std=game.obs_size**-0.5)

    def forward(self, obs: torch.Tensor, last_action: torch.Tensor, agent: torch.Tensor, sizes, memory=None):
        """obs (R, D), last action (R,) or A at the start, agent (R,), laid out as GRU says; memory (sizes[0], H),
        or None before an episode -> values (R, A), memory after each row (R, H)"""
        x = torch.relu(self.first(obs) + self.last_action(last_action) + self.agent(agent))
        memory = x.new_zeros(sizes[0], self.hidden_size) if memory is None else memory
        memories = self.gru(x, sizes, memory)
        return self.head(memories), memories


class Mixer(nn.Module):
    """QMIX: a monotonic function of the agents' values whose weights depend on the state."""

    def __init__(self, args: Args, game: TeamGame):
        super().__init__()
        size, self.num_agents, self.size = game.state_size, game.num_agents, args.mixing_size

        def hypernetwork(outputs: int) -> nn.Sequential:
            return nn.Sequential(nn.Linear(size, args.hyper_size), nn.ReLU(), nn.Linear(args.hyper_size, outputs))

        self.first_weight, self.first_bias = hypernetwork(game.num_agents * self.size), nn.Linear(size, self.size)
        self.last_weight, self.last_bias = hypernetwork(self.size), hypernetwork(1)

    def forward(self, q_values: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """q_values (..., N) of the agents, state (..., S) -> (..., 1) of the team"""
        weight = self.first_weight(state).abs().unflatten(-1, (self.num_agents, self.size))
        hidden = F.elu((q_values[..., None, :] @ weight)[..., 0, :] + self.first_bias(state))
        return (hidden * self.last_weight(state).abs()).sum(-1, keepdim=True) + self.last_bias(state)


class Networks(nn.Module):
    """The agents' network and, for QMIX, the mixer."""

    def __init__(self, args: Args, game: TeamGame, seed: int = 0):
        super().__init__()
        self.kind = args.mixer
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.agent = QNetwork(args, game)
            self.mixer = Mixer(args, game) if args.mixer == "qmix" else None

    def mix(self, q_values: torch.Tensor, alive: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """q_values and alive (..., N), state (..., S) -> (..., V): of the team, or (IQL) of each agent."""
        q_values = q_values * alive  # who has fallen adds nothing
        if self.mixer is not None:
            return self.mixer(q_values, state)
        return q_values.sum(-1, keepdim=True) if self.kind == "vdn" else q_values


# algorithm


def spread(values: torch.Tensor, mb: Tensors) -> torch.Tensor:
    """(R,) of the agents on the field -> (T + 1, E, N), 0 for the fallen"""
    return values.new_zeros(mb["alive"].numel()).index_copy(0, mb["place"], values).view(mb["alive"].shape)


def td_loss(args: Args, nets: Networks, target_nets: Networks, mb: Tensors) -> tuple[torch.Tensor, Tensors]:
    """Squared TD errors over the valid steps of a minibatch of episodes, and what there is to log."""
    inputs, valid = (mb["obs"], mb["last_action"], mb["agent"], mb["sizes"]), mb["valid"]
    q_values, _ = nets.agent(*inputs)  # (R, A)
    chosen = spread(q_values.gather(1, mb["action"][:, None])[:, 0], mb)
    value = nets.mix(chosen[:-1][valid], mb["alive"][:-1][valid], mb["state"][:-1][valid])  # (steps, V)
    with torch.no_grad():
        target_q, _ = target_nets.agent(*inputs)
        best = q_values.masked_fill(~mb["legal"], -1e9).argmax(1, keepdim=True)  # double Q-learning
        next_q = spread(target_q.gather(1, best)[:, 0], mb)
        next_value = value.new_zeros(*valid.shape, value.shape[1])
        next_value[valid] = target_nets.mix(next_q[1:][valid], mb["alive"][1:][valid], mb["state"][1:][valid])
        alive = mb["alive"][1:] if value.shape[1] > 1 else torch.ones_like(valid)[..., None]  # a team goes on
        targets = lambda_targets(
            mb["reward"][:-1], next_value, mb["terminated"][:-1], valid, alive, args.gamma, args.td_lambda
        )[valid]
    errors = value - targets
    if value.shape[1] > 1:  # IQL: nobody learns from what happens after it has fallen
        errors = errors[mb["alive"][:-1][valid]]
    with torch.no_grad():
        stats = {"td_error": errors.abs().mean(), "q_values": value.mean(), "targets": targets.mean()}
    return errors.pow(2).mean(), stats


def update(args: Args, nets: Networks, target_nets: Networks, optimizer, replay: Replay, count: np.ndarray, rng):
    """The minibatches of one iteration; `count` (1,) of all minibatches says when the target copy is due."""
    log: dict[str, list[float]] = {}
    for _ in range(args.updates):
        mb = replay.sample(args.batch_episodes, rng, device_of(nets))
        loss, stats = td_loss(args, nets, target_nets, mb)
        (norm,) = descend(optimizer, loss, args.max_grad_norm)
        count += 1
        if count[0] % args.target_every == 0:
            target_nets.load_state_dict(nets.state_dict())
        for name, x in (stats | {"loss": loss}).items():
            log.setdefault(name, []).append(x.item())
        log.setdefault("grad_norm", []).append(norm)
    return {f"losses/{name}": float(np.mean(values)) for name, values in log.items()}


# playing and evaluating


class Team(ChoosingTeam, Kept):
    """Plays agents greedily, but for a share `epsilon` of random actions."""

    KEPT = ("memory", "last_action", "rng")

    def __init__(self, agent: QNetwork, game: TeamGame, seed: int):
        self.agent, self.game, self.epsilon, self.device = agent, game, 0.0, device_of(agent)
        self.rng = torch.Generator().manual_seed(seed)
        self.memory = torch.zeros(game.num_envs, game.num_agents, agent.hidden_size)
        self.last_action = torch.full((game.num_envs, game.num_agents), game.num_actions)

    @torch.no_grad()
    def choose(self, seen: Tensors, who: torch.Tensor) -> torch.Tensor:
        """Actions (M,) of the agents of `who` (B, N); `seen` as the game shows it"""
        rows = seen["obs"][who], self.last_action[who], who.nonzero()[:, 1], self.memory[who]
        obs, last_action, agent, memory = (column.to(self.device) for column in rows)
        q_values, memory = self.agent(obs, last_action, agent, [len(obs)], memory)
        self.memory[who] = memory.cpu()
        self.q_values = torch.zeros(*who.shape, q_values.shape[1])  # (B, N, A) of who chose
        self.q_values[who] = q_values.cpu()
        return pick(self.q_values[who], seen["legal"][who], self.epsilon, self.rng)

    def explain(self, row: int = 0) -> dict[str, np.ndarray]:
        """Its Q values in game `row` before its last action (envs/roles.py), of all agents or of the seat."""
        return {"q_values": self.q_values[row, slice(None) if self.seat is None else self.seat].cpu().numpy()}

    def watch(self, env, actions: np.ndarray, info: dict[str, np.ndarray]) -> None:
        """Remember the actions (B, N) of a step, and forget all where an episode has ended."""
        self.last_action[:] = torch.from_numpy(np.asarray(actions, np.int64))
        if info["done"].any():
            done = torch.from_numpy(info["done"])
            self.memory[done], self.last_action[done] = 0.0, self.game.num_actions


def load_team(checkpoint: Path, spec: dict, env, seed: int, greedy: bool) -> Team:
    """A checkpoint of this script as a team for a batched env; it plays greedily in any case."""
    args, game = saved_args(Args, spec), TeamGame(env)
    nets = Networks(args, game)
    read_weights(checkpoint, nets)
    return Team(nets.agent, game, seed)


def evaluate(args: Args, nets: Networks, episodes: int, seed: int) -> dict[str, float]:
    """Scores of greedy play over fresh episodes."""
    game = TeamGame(make_env(args.env_id, episodes, seed, args.start_jitter))
    return play_team(game, Team(nets.agent, game, seed))


def train(args: Args, run: Run) -> None:
    """The whole run."""
    # seeding
    env_seed, policy_seed, data_seed, init_seed, eval_seed = (
        int(seed) for seed in np.random.SeedSequence(args.seed).generate_state(5)
    )
    data_rng = np.random.default_rng(data_seed)

    # env setup
    env = make_env(args.env_id, args.num_envs, env_seed, args.start_jitter)
    game = TeamGame(env)

    # networks and replay
    nets = Networks(args, game, init_seed).to(run.device)
    target_nets = copy.deepcopy(nets)
    optimizer = torch.optim.Adam(nets.parameters(), lr=args.learning_rate, foreach=True)
    team, replay, count = Team(nets.agent, game, policy_seed), Replay(args.buffer_steps, game), np.zeros(1, np.int64)
    running = RunningEpisodes(args.num_envs, env.spec.horizon, replay)
    keep = {"env": env, "team": team, "replay": replay, "running": running, "target": target_nets}
    keep |= {"optimizer": optimizer, "data_rng": data_rng, "count": count}
    name, seats = ALGORITHMS[args.mixer], list(range(game.num_agents))
    facts = {"algorithm": name.lower()}
    run.start(nets, env.spec, learners=seats, keep=keep, facts=facts, title=f"{name} on {args.env_id}")

    for _ in run.iterations():
        # rollout
        for _ in range(args.num_steps):
            share = min(1.0, (run.step - args.batch_size) / args.epsilon_steps)
            team.epsilon = args.epsilon + (args.epsilon_final - args.epsilon) * share
            seen, actions = team.decide()
            run.clock("policy")
            _, _, _, truncated, info = env.step(actions)
            now = seen | {"action": actions, "reward": game.reward().mean(1), "terminated": ends(info, truncated)}
            running.add(now=now, done=info["done"], final=game.final(info) if info["done"].any() else {})
            team.watch(env, actions, info)
            run.count(info)
            run.clock("env")

        # update
        losses = {}
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - run.progress * args.anneal_lr)
        if len(replay) >= args.batch_episodes:
            losses = update(args, nets, target_nets, optimizer, replay, count, data_rng)
        run.clock("update")

        # evaluation
        if run.evaluation_due():
            scores = evaluate(args, nets, args.eval_episodes, eval_seed)
            run.evaluated(scores, by=("win_rate", "return"))
            run.clock("eval")

        # logging
        if run.log_due():
            run.log(losses | {"charts/epsilon": team.epsilon, "charts/replay_episodes": len(replay)})

    # result
    results = {"eval": evaluate(args, nets, args.final_eval_episodes, eval_seed + 1)}
    if run.load_best():
        results["eval_best"] = evaluate(args, nets, args.final_eval_episodes, eval_seed + 1)
    run.finish(results)


if __name__ == "__main__":
    sys.exit(main(Args, train))
