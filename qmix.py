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

import copy
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import envs
from envs.run import Positive, Rate, Run, RunArgs, Share, Weight, Whole, check_ranges, main, read_weights
from envs.team import TeamGame, make_env, play_team

Tensors = dict[str, torch.Tensor]
MIXERS = {"none": "IQL", "vdn": "VDN", "qmix": "QMIX"}


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
    num_envs: Positive = 32
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
    updates: Positive = 8
    """minibatches per iteration"""
    batch_episodes: Positive = 32
    """episodes per minibatch"""
    buffer_steps: Positive = 60_000
    """steps that the replay holds"""
    learning_rate: Rate = 1e-3
    """Adam's learning rate"""
    gamma: Share = 0.99
    """discount"""
    td_lambda: Share = 0.6
    """lambda of the targets: 0 is one-step Q-learning"""
    epsilon: Share = 1.0
    """share of random actions at the start"""
    epsilon_final: Share = 0.05
    """the same once epsilon_steps are over"""
    epsilon_steps: Positive = 50_000
    """env steps in which it gets there, linearly"""
    target_every: Positive = 200
    """minibatches after which the target networks become copies of the current ones"""
    max_grad_norm: Weight = 10.0
    """largest gradient norm"""
    hidden_size: Positive = 64
    """width of the agents' network and of its memory"""
    mixing_size: Positive = 32
    """width of QMIX's mixing network"""
    hyper_size: Positive = 64
    """width of the hypernetworks that make its weights"""

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        return max(1, self.total_timesteps // self.batch_size)


# networks


class QNetwork(nn.Module):
    """Values of an agent's actions from what it sees, its last action and its id; one network for all agents."""

    def __init__(self, args: Args, game: TeamGame):
        super().__init__()
        self.num_agents, self.num_actions, self.hidden_size = game.num_agents, game.num_actions, args.hidden_size
        self.first = nn.Linear(game.obs_size + game.num_actions + game.num_agents, args.hidden_size)
        self.gru = nn.GRU(args.hidden_size, args.hidden_size)
        self.head = nn.Linear(args.hidden_size, game.num_actions)

    def forward(self, obs: torch.Tensor, last_action: torch.Tensor, memory: torch.Tensor | None = None):
        """obs (T, B, N, D), last action one-hot (T, B, N, A), memory (1, B N, H) or None before an episode
        -> values (T, B, N, A), memory"""
        ids = torch.eye(self.num_agents).expand(*obs.shape[:2], -1, -1)
        x = torch.relu(self.first(torch.cat([obs, last_action, ids], dim=3)))
        x, memory = self.gru(x.flatten(1, 2), memory)
        return self.head(x).view(*obs.shape[:3], -1), memory


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


# replay


class Replay:
    """The newest episodes, one behind the other in flat arrays of `num_steps` rows. An episode of L steps has L + 1
    rows: the last one holds what was seen at its end. The oldest episodes go when their rows are needed."""

    def __init__(self, num_steps: int, game: TeamGame):
        agents, rows = game.num_agents, max(num_steps, game.env.spec.horizon + 1)
        shapes = {"obs": ((agents, game.obs_size), np.float16), "state": ((game.state_size,), np.float16)}
        shapes |= {"legal": ((agents, game.num_actions), np.bool_), "alive": ((agents,), np.bool_)}
        shapes |= {"action": ((agents,), np.int16), "reward": ((), np.float32), "terminated": ((), np.bool_)}
        self.rows = {name: np.zeros((rows, *shape), dtype) for name, (shape, dtype) in shapes.items()}
        self.episodes = np.zeros((rows, 2), np.int64)  # first row and steps of each, the oldest first
        self.position = np.zeros(2, np.int64)  # next row, number of episodes

    def __len__(self) -> int:
        return int(self.position[1])

    def add(self, episode: dict[str, np.ndarray]) -> None:
        """columns (L + 1, ...)"""
        length, (first, count) = len(episode["obs"]), self.position
        if first + length > len(self.rows["obs"]):
            first = 0
        starts, ends = self.episodes[:count, 0], self.episodes[:count].sum(1)
        kept = self.episodes[:count][(ends < first) | (starts >= first + length)]
        self.episodes[: len(kept)] = kept
        self.episodes[len(kept)] = first, length - 1
        self.position[:] = first + length, len(kept) + 1
        for name, column in episode.items():
            self.rows[name][first : first + length] = column

    def sample(self, num: int, rng: np.random.Generator) -> Tensors:
        """Columns (T + 1, E, ...) of `num` episodes, the shorter ones filled up with their last row; `valid` (T, E)."""
        first, length = self.episodes[rng.integers(len(self), size=num)].T
        step = np.arange(length.max() + 1)[:, None]
        at = first + np.minimum(step, length)
        mb = {name: torch.from_numpy(rows[at]) for name, rows in self.rows.items()}
        mb |= {name: mb[name].float() for name in ("obs", "state")}
        return mb | {"action": mb["action"].long(), "valid": torch.from_numpy(step[:-1] < length)}

    def get_state(self) -> dict[str, np.ndarray]:
        return self.rows | {"episodes": self.episodes, "position": self.position}

    def set_state(self, saved: dict[str, np.ndarray]) -> None:
        for name, place in self.get_state().items():
            place[:] = saved[name]


class RunningEpisodes:
    """The episodes that are being played in B games, until they are whole."""

    def __init__(self, game: TeamGame, replay: Replay):
        self.game, self.replay = game, replay
        shape = (game.num_envs, game.env.spec.horizon + 1)
        self.columns = {name: np.zeros((*shape, *rows.shape[1:]), rows.dtype) for name, rows in replay.rows.items()}
        self.steps = np.zeros(game.num_envs, np.int64)

    def add(self, seen: Tensors, action: np.ndarray, info: dict[str, np.ndarray], truncated: np.ndarray) -> None:
        """One step of all games: what was seen before it, what was done, and how it ended."""
        game, each = self.game, np.arange(self.game.num_envs)
        done = info["done"]
        now = {name: seen[name].numpy() for name in ("obs", "state", "legal", "alive")}
        now |= {"action": action, "reward": game.reward().mean(1), "terminated": done & ~truncated.any(1)}
        for name, array in now.items():
            self.columns[name][each, self.steps] = array
        self.steps += 1
        if done.any():
            final = game.final(info)
            for b in np.flatnonzero(done):
                length = self.steps[b]
                episode = {name: column[b, : length + 1] for name, column in self.columns.items()}
                for name in ("obs", "state", "alive"):
                    episode[name][length] = final[name][b].numpy()
                episode["legal"][length] = episode["legal"][length - 1]  # what was legal before time ran out
                self.replay.add(episode)
            self.steps[done] = 0

    def get_state(self) -> dict[str, np.ndarray]:
        return self.columns | {"steps": self.steps}

    def set_state(self, saved: dict[str, np.ndarray]) -> None:
        for name, place in self.get_state().items():
            place[:] = saved[name]


# algorithm


def lambda_targets(reward, next_value, terminated, valid, gamma: float, lam: float) -> torch.Tensor:
    """(T, E, V) from reward, terminated, valid (T, E) and the value of what follows each step (T, E, V): partly that
    value, partly what came of it. The last step of an episode has but the value, an end by the rules nothing."""
    targets, following = torch.zeros_like(next_value), torch.zeros_like(next_value[0])
    for step in reversed(range(len(reward))):
        has_next = valid[step + 1, :, None] if step + 1 < len(valid) else torch.zeros_like(valid[0, :, None])
        after = torch.where(has_next, (1 - lam) * next_value[step] + lam * following, next_value[step])
        following = reward[step, :, None] + gamma * after * ~terminated[step, :, None]
        targets[step] = following
    return targets


def td_loss(args: Args, nets: Networks, target_nets: Networks, mb: Tensors) -> tuple[torch.Tensor, Tensors]:
    """Squared TD errors over the valid steps of a minibatch of episodes, and what there is to log."""
    last_action = F.one_hot(mb["action"], nets.agent.num_actions).float()
    last_action = torch.cat([torch.zeros_like(last_action[:1]), last_action[:-1]])
    q_values, _ = nets.agent(mb["obs"], last_action)  # (T + 1, E, N, A)
    chosen = q_values[:-1].gather(3, mb["action"][:-1, ..., None])[..., 0]
    with torch.no_grad():
        target_q, _ = target_nets.agent(mb["obs"], last_action)
        best = q_values[1:].masked_fill(~mb["legal"][1:], -1e9).argmax(3, keepdim=True)  # double Q-learning
        next_q = target_q[1:].gather(3, best)[..., 0]
        next_value = target_nets.mix(next_q, mb["alive"][1:], mb["state"][1:])
        targets = lambda_targets(
            mb["reward"][:-1], next_value, mb["terminated"][:-1], mb["valid"], args.gamma, args.td_lambda
        )
    value = nets.mix(chosen, mb["alive"][:-1], mb["state"][:-1])  # (T, E, V)
    mask = mb["valid"][..., None].expand_as(value)
    if value.shape[2] > 1:  # IQL: nobody learns from what happens after it has fallen
        mask = mask & mb["alive"][:-1]
    errors = (value - targets)[mask]
    with torch.no_grad():
        stats = {"td_error": errors.abs().mean(), "q_values": value[mask].mean(), "targets": targets[mask].mean()}
    return errors.pow(2).mean(), stats


def update(args: Args, nets: Networks, target_nets: Networks, optimizer, replay: Replay, count: np.ndarray, rng):
    """The minibatches of one iteration; `count` (1,) of all minibatches says when the target copy is due."""
    log: dict[str, list[float]] = {}
    for _ in range(args.updates):
        loss, stats = td_loss(args, nets, target_nets, replay.sample(args.batch_episodes, rng))
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(nets.parameters(), args.max_grad_norm)
        if not torch.isfinite(loss + norm):
            raise FloatingPointError(f"the loss became {loss.item()} with a gradient of norm {norm.item()}")
        optimizer.step()
        count += 1
        if count[0] % args.target_every == 0:
            target_nets.load_state_dict(nets.state_dict())
        for name, x in (stats | {"loss": loss, "grad_norm": norm}).items():
            log.setdefault(name, []).append(x.item())
    return {f"losses/{name}": float(np.mean(values)) for name, values in log.items()}


# playing and evaluating


class Team:
    """Plays all agents of an env, greedily but for a share `epsilon` of random actions. With a `seat` it moves only
    that agent (see envs/roles.py), and remembers what all did."""

    seat: int | None = None

    def __init__(self, agent: QNetwork, game: TeamGame, seed: int):
        self.agent, self.game, self.epsilon = agent, game, 0.0
        self.rng = torch.Generator().manual_seed(seed)
        self.memory = torch.zeros(1, game.num_envs * game.num_agents, agent.hidden_size)
        self.last_action = torch.zeros(game.num_envs, game.num_agents, game.num_actions)

    @torch.no_grad()
    def decide(self) -> tuple[Tensors, torch.Tensor]:
        """What was seen and the actions (B, N)."""
        seen = self.game.observe()
        q_values, self.memory = self.agent(seen["obs"][None], self.last_action[None], self.memory)
        self.q_values = q_values[0]  # (B, N, A)
        actions = self.q_values.masked_fill(~seen["legal"], -1e9).argmax(2)
        if self.epsilon > 0.0:
            chances = torch.rand(seen["legal"].shape, generator=self.rng) * seen["legal"]
            explore = torch.rand(actions.shape, generator=self.rng) < self.epsilon
            actions = torch.where(explore, chances.argmax(2), actions)
        return seen, actions

    def act(self, env=None) -> np.ndarray:
        """(B, N) actions for the env, or (B,) of the seat"""
        actions = self.decide()[1].numpy()
        return actions if self.seat is None else actions[:, self.seat]

    def explain(self, row: int = 0) -> dict[str, np.ndarray]:
        """Its Q values in game `row` before its last action (envs/roles.py), of all agents or of the seat."""
        return {"q_values": self.q_values[row, slice(None) if self.seat is None else self.seat].cpu().numpy()}

    def watch(self, env, actions: np.ndarray, info: dict[str, np.ndarray]) -> None:
        """Remember the actions (B, N) of a step, and forget all where an episode has ended."""
        done = torch.from_numpy(info["done"])
        self.last_action = F.one_hot(torch.from_numpy(np.asarray(actions)).long(), self.game.num_actions).float()
        self.last_action[done] = 0.0
        self.memory = self.memory * ~done.repeat_interleave(self.game.num_agents)[None, :, None]

    def get_state(self) -> dict[str, np.ndarray]:
        saved = {"memory": self.memory, "last_action": self.last_action, "rng": self.rng.get_state()}
        return {name: x.numpy() for name, x in saved.items()}

    def set_state(self, saved: dict[str, np.ndarray]) -> None:
        self.memory, self.last_action = (torch.from_numpy(saved[name].copy()) for name in ("memory", "last_action"))
        self.rng.set_state(torch.from_numpy(saved["rng"]))


def load_team(checkpoint: Path, spec: dict, env, seed: int, greedy: bool) -> Team:
    """A checkpoint of this script as a team for a batched env; it plays greedily in any case."""
    known = {field.name for field in fields(Args)}
    args, game = Args(**{name: value for name, value in spec["args"].items() if name in known}), TeamGame(env)
    check_ranges(args)
    if len(spec["learners"]) != game.num_agents:
        here = f"{env.spec.env_id} has {game.num_agents}"
        raise envs.ConfigError(f"checkpoint '{checkpoint}' is of a team of {len(spec['learners'])}, but {here}")
    nets = Networks(args, game)
    read_weights(checkpoint, nets)
    return Team(nets.agent, game, seed)


def load_policy(checkpoint: Path, spec: dict, env, seat: int, learner: int | None, seed: int, greedy: bool) -> Team:
    """A checkpoint of this script as one player: the agent of that seat."""
    if learner is not None:
        raise envs.ConfigError(f"checkpoint '{checkpoint}' has one policy for all seats, so '@{learner}' picks nothing")
    team = load_team(checkpoint, spec, env, seed, greedy)
    team.seat = seat
    return team


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
    nets = Networks(args, game, init_seed)
    target_nets = copy.deepcopy(nets)
    optimizer = torch.optim.Adam(nets.parameters(), lr=args.learning_rate, foreach=True)
    team, replay, count = Team(nets.agent, game, policy_seed), Replay(args.buffer_steps, game), np.zeros(1, np.int64)
    running = RunningEpisodes(game, replay)
    keep = {"env": env, "team": team, "replay": replay, "running": running, "target": target_nets}
    keep |= {"optimizer": optimizer, "data_rng": data_rng, "count": count}
    title = f"{MIXERS[args.mixer]} on {args.env_id}"
    run.start(nets, env.spec, learners=list(range(game.num_agents)), keep=keep, title=title)

    for _ in run.iterations():
        # rollout
        for _ in range(args.num_steps):
            share = min(1.0, (run.step - args.batch_size) / args.epsilon_steps)
            team.epsilon = args.epsilon + (args.epsilon_final - args.epsilon) * share
            seen, actions = team.decide()
            actions = actions.numpy()
            run.clock("policy")
            _, _, _, truncated, info = env.step(actions)
            running.add(seen, actions, info, truncated)
            team.watch(env, actions, info)
            run.count(info)
            run.clock("env")

        # update
        losses = {}
        if len(replay) >= args.batch_episodes:
            losses = update(args, nets, target_nets, optimizer, replay, count, data_rng)
        run.clock("update")

        # evaluation
        if run.evaluation_due():
            scores = evaluate(args, nets, args.eval_episodes, eval_seed)
            run.evaluated(scores, rank=tuple(scores[name] for name in ("win_rate", "return") if name in scores))
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
