"""ppo_lstm.py: what is remembered and for how long, PPO on sequences, and the line-ups it meets."""

import numpy as np
import pytest
import torch

import envs
import ppo_lstm
from envs.players import HELD_OUT
from envs.roles import Seats, load_policy, play_in_a_row
from envs.run import main
from ppo_lstm import Agent, Args, LineUps, Player, advantages_of, ppo_loss, sample, update

POOL = ["ns", "nh", "random", "mix"]


@pytest.fixture
def args() -> Args:
    return Args(num_envs=16, hidden_size=16, num_steps=24, run_episodes=2, total_timesteps=10_000)


def make(args: Args, seed: int = 1):
    """An env, an agent that has an opinion, and its player in seat 1."""
    env = envs.make(args.env_id, num_envs=args.num_envs, seed=seed)
    agent = Agent(env.game, args, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        agent.policy_head.weight.mul_(100.0)
    return env, agent, Player(agent, env, 0, args.run_episodes, seed)


def rollout(args: Args, env, player: Player):
    """`num_steps` steps as training stores them (T, B, ...), and the memory at their start."""
    line_ups, memory, steps = LineUps(env, POOL, args.run_episodes, 3), player.memory, []
    for _ in range(args.num_steps):
        step = {"alive": torch.from_numpy(env.alive[:, 0])} | player.decide(env)
        steps.append({name: x.clone() for name, x in step.items()})  # some are the env's own arrays
        actions = line_ups.act()
        actions[:, 0] = steps[-1]["actions"].numpy()
        info = env.step(actions)[4]
        line_ups.watch(actions, info)
        player.watch(env, actions, info)
    return {name: torch.stack([step[name] for step in steps]) for name in steps[0]}, memory


def test_memory_lasts_over_episodes_and_ends_with_the_run(args):
    """In a run of 3 episodes it starts anew with every third one and never else; it is told of the ends in between."""
    args.run_episodes = 3
    env, agent, player = make(args)
    ended = np.zeros(args.num_envs, int)
    resets = lasting = 0
    for _ in range(120):
        before = player.memory.clone()
        is_first = player.is_first.clone()
        np.testing.assert_array_equal(is_first.numpy(), (ended % 3 == 0) & (env.t == 0))
        actions = np.full((args.num_envs, 4), 4)
        actions[:, 0] = player.act(env)
        fresh = agent({name: x[None] for name, x in seen(player, env).items()}, torch.zeros_like(before))[2]
        begins = env.t == 0
        same = (player.memory == fresh).flatten(1).all(1).numpy()
        assert (same | ~is_first.numpy()).all(), "a run begins with an empty memory"
        lasting += (begins & ~is_first.numpy() & ~same).sum()
        resets += is_first.sum().item()
        actions[:, 1:] = np.where(env.legal[:, 1:, 6], 6, env.legal[:, 1:, :4].argmax(2))
        info = env.step(actions)[4]
        player.watch(env, actions, info)
        told = player.last_step[:, -1].bool().numpy()
        np.testing.assert_array_equal(told, info["done"] & ~player.is_first.numpy())
        assert (player.last_step[player.is_first] == 0).all()
        ended += info["done"]
    assert resets > args.num_envs and lasting > args.num_envs


def seen(player: Player, env):
    return player.look(env.obs[:, 0], env.t, env.legal[:, 0])


def test_it_is_told_what_everybody_did_and_what_it_earned():
    """Own action first, then those of the next seats; half a stag is 1."""
    args = Args(num_envs=2, hidden_size=16)
    env = envs.make(args.env_id, num_envs=2, seed=1)
    player = Player(Agent(env.game, args, torch.Generator()), env, 2, 30, 1)
    env.out.reward[:] = [[0, 0, 5, 1], [1, 1, 0, 0]]
    actions = np.array([[0, 1, 2, 3], [6, 5, 4, 0]])
    player.watch(env, actions, {"done": np.array([False, True])})
    told = player.last_step[:, :-2].view(2, 4, 7).argmax(2)
    assert told.tolist() == [[2, 3, 0, 1], [4, 0, 6, 5]]
    assert player.last_step[:, -2:].tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_with_unchanged_parameters_every_ratio_is_exactly_one(args):
    """Sequences of a minibatch, from the stored memory, give the very log-probabilities of the rollout."""
    env, agent, player = make(args)
    rollout(args, env, player)  # so that memory is not empty at the start
    batch, memory = rollout(args, env, player)
    assert memory.abs().sum() > 0 and batch["is_first"].any() and not batch["alive"].all()
    zeros = {"advantages": torch.randn(batch["t"].shape), "returns": torch.zeros(batch["t"].shape)}
    for rows in (torch.arange(16), torch.tensor([9, 2, 5, 3, 15, 0, 7, 8]), torch.tensor([14, 0, 3, 1])):
        mb = {name: x[:, rows] for name, x in (batch | zeros).items()}
        _, stats, ratio = ppo_loss(args, agent, mb, memory[rows], 0.01)
        assert (ratio == 1.0).all() and stats["approx_kl"] == 0.0 and stats["clipfrac"] == 0.0
        assert torch.equal(agent(mb, memory[rows])[1], mb["values"])


def test_the_gradient_goes_through_time_but_not_over_the_start_of_a_run(args):
    env, agent, player = make(args)
    batch, memory = rollout(args, env, player)
    batch["is_first"][:] = False
    batch["is_first"][10, 4:] = True
    batch["last_step"].requires_grad_(True)
    memory = memory.clone().requires_grad_(True)
    agent(batch, memory)[1][-1].sum().backward()
    by_step = batch["last_step"].grad.abs().sum(2)  # (T, B)
    assert (by_step[0, :4] > 0).all() and (by_step[10:] > 0).all()
    assert (by_step[:10, 4:] == 0).all()
    assert (memory.grad[:4] != 0).any() and (memory.grad[4:] == 0).all()


def test_a_cue_of_the_first_episode_is_used_in_the_second(args):
    """A task made by hand: what was earned in the first step says which move pays in the sixth, an episode later."""
    args.learning_rate, args.num_minibatches, args.run_episodes = 3e-3, 1, 2
    args.num_envs, steps = 64, 6
    env, agent, player = make(args)
    with torch.no_grad():
        agent.policy_head.weight.div_(100.0)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate)
    generator = torch.Generator().manual_seed(1)
    base = {name: x[None].repeat(steps, *[1] * x.dim()) for name, x in seen(player, env).items()}
    base["legal"] = torch.zeros_like(base["legal"])
    base["legal"][..., :2] = True
    base["last_step"][3, :, -1] = 1.0  # the first episode ends
    base["is_first"] = torch.zeros_like(base["is_first"])
    base["is_first"][0] = True
    alive = torch.ones(steps, 64, dtype=torch.bool)
    ends = torch.zeros(steps, 64, dtype=torch.bool)
    ends[-1] = True
    for _ in range(120):
        cue = torch.randint(2, (64,), generator=generator)
        batch = base | {"last_step": base["last_step"].clone(), "alive": alive}
        batch["last_step"][0, :, -2] = cue.float()
        memory = agent.initial_memory(64)
        with torch.no_grad():
            log_probs, values, _ = agent(batch, memory)
        batch["actions"] = sample(log_probs, generator)
        batch["log_probs"] = log_probs.gather(2, batch["actions"][..., None])[..., 0]
        reward = torch.zeros(steps, 64)
        reward[-1] = (batch["actions"][-1] == cue).float()
        following = torch.cat([values[1:], torch.zeros(1, 64)])
        batch["advantages"] = advantages_of(reward, values, following, alive, ends, 0.97, 0.95)
        batch["returns"] = batch["advantages"] + values
        update(args, agent, optimizer, batch, memory, 0.001, generator)
    assert reward[-1].mean() > 0.95


def test_advantages_by_hand_and_none_beyond_the_time_limit():
    """gamma and lambda 0.5. Game 1 ends after its second step, by time or by the rules; who plays game 2 has left."""
    reward = torch.tensor([[1.0, 9.0], [3.0, 9.0], [4.0, 9.0]])
    value, following = torch.full((3, 2), 2.0), torch.full((3, 2), 2.0)
    alive, over = torch.tensor([[True, False]] * 3), torch.tensor([[False, False], [True, False], [False, False]])
    found = advantages_of(reward, value, following, alive, over, 0.5, 0.5)
    # steps 3, 2, 1: 4 + 0.5 * 2 - 2; 3 - 2, though its next value is 2; 1 + 0.5 * 2 - 2 + 0.25 * 1
    assert found.tolist() == [[0.25, 0.0], [1.0, 0.0], [3.0, 0.0]]


def test_time_running_out_is_an_end(tmp_path, monkeypatch):
    """Nobody moves: every episode is cut by the time limit, and no advantage reaches over it."""
    ends = []
    monkeypatch.setattr(ppo_lstm, "advantages_of", lambda *x: ends.append(x[4].clone()) or advantages_of(*x))
    argv = ["--num-envs", "4", "--num-steps", "35", "--total-timesteps", "140", "--co-players", "fix"]
    argv += ["--eval-every", "0", "--final-eval-episodes", "2", "--run-episodes", "1", "--run-dir", str(tmp_path)]
    monkeypatch.setattr(ppo_lstm, "sample", lambda log_probs, generator: torch.full(log_probs.shape[:1], 4))
    assert main(Args, ppo_lstm.train, argv) == 0
    assert ends[0][-1].all() and not ends[0][:-1].any()


def test_line_ups_last_for_a_run_and_half_of_them_are_of_one_kind():
    env = envs.make("msh-4h1s-4x4", num_envs=300, seed=1, horizon=10)
    line_ups = LineUps(env, POOL, 2, 3)
    twins = [Seats(env, [ppo_lstm.OWN, *[role] * 3], ppo_lstm.OWN, 3 + k) for k, role in enumerate(POOL)]
    episodes = np.zeros(300, int)
    drawn = line_ups.drawn.copy()
    first = drawn.copy()
    alike = (drawn == drawn[:, :1]).all(1).mean()
    assert 0.4 < alike < 0.7 and (np.bincount(drawn.ravel()) > 150).all()  # a half, and a sixteenth of the others
    for _ in range(60):
        actions, expected = line_ups.act(), np.stack([seats.act() for seats in twins])
        for seat in range(1, 4):
            np.testing.assert_array_equal(actions[:, seat], expected[drawn[:, seat - 1], np.arange(300), seat])
        info = env.step(actions)[4]
        line_ups.watch(actions, info)
        for seats in twins:
            seats.watch(actions, info)
        episodes += info["done"]
        changed = (line_ups.drawn != drawn).any(1)
        assert not (changed & ~(info["done"] & (episodes % 2 == 0))).any()
        drawn = line_ups.drawn.copy()
    assert (drawn != first).any(1).mean() > 0.5


def test_nobody_held_out_is_met_by_default(tmp_path, capsys):
    for env_id, pool in (("msh-4h1s-4x4", "ns,nh,random,mix"), ("msd-4x4", "nd,random,mix")):
        argv = ["--env-id", env_id, "--num-envs", "4", "--num-steps", "4", "--total-timesteps", "16"]
        argv += ["--eval-every", "0"]
        argv += ["--final-eval-episodes", "2", "--run-episodes", "1", "--run-dir", str(tmp_path / env_id)]
        assert main(Args, ppo_lstm.train, argv) == 0
        assert f"co-players {pool}\n" in capsys.readouterr().out
        assert not set(pool.split(",")) & set(HELD_OUT)


def test_a_checkpoint_plays_in_any_seat_and_remembers(tmp_path, capsys):
    argv = ["--num-envs", "8", "--num-steps", "8", "--total-timesteps", "128", "--eval-every", "64"]
    argv += ["--eval-episodes", "4", "--final-eval-episodes", "4", "--run-dir", str(tmp_path / "x")]
    assert main(Args, ppo_lstm.train, argv) == 0
    env = envs.make("msh-4h1s-4x4", num_envs=5, seed=1)
    seats = Seats(env, ["ns", str(tmp_path / "x"), "nh", str(tmp_path / "x")], None, 1)
    assert play_in_a_row(env, seats, 3).shape == (5, 3)
    assert seats.policies[3].memory.abs().sum() > 0 and (seats.policies[3].episode >= 3).all()
    with pytest.raises(envs.ConfigError, match="has learners 1 to 1, not 2"):
        load_policy(f"{tmp_path / 'x'}@2", env, 0, seed=0)
