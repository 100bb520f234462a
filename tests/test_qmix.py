"""qmix.py: targets by hand, replay, masks, mixers, and that all three teams run by the same lines."""

from itertools import pairwise

import numpy as np
import pytest
import torch

import envs
import qmix
from envs.run import main
from envs.team import TeamGame, make_env

torch.set_num_threads(1)
TINY = [
    "--num-envs",
    "4",
    "--num-steps",
    "8",
    "--total-timesteps",
    "512",
    "--batch-episodes",
    "4",
    "--hidden-size",
    "16",
]
TINY += ["--updates", "1", "--buffer-steps", "400", "--eval-every", "256", "--eval-episodes", "4"]
TINY += ["--final-eval-episodes", "4", "--checkpoint-every", "4"]


def small(mixer="qmix", env_id="smac-3m", num_envs=3, **settings):
    game = TeamGame(make_env(env_id, num_envs, 1))
    args = qmix.Args(env_id=env_id, mixer=mixer, hidden_size=16, **settings)
    return args, game, qmix.Networks(args, game, seed=1)


def running_episodes(game, replay):
    return qmix.RunningEpisodes(game.num_envs, game.env.spec.horizon, replay)


def add(running, game, seen, actions, info, truncated) -> None:
    now = seen | {"action": actions, "reward": game.reward().mean(1), "terminated": qmix.ends(info, truncated)}
    running.add(now=now, done=info["done"], final=game.final(info))


def play(game, replay, episodes: int, seed: int = 1) -> list[int]:
    """Random legal play into the replay; returns the lengths of the episodes in the order of their ends."""
    running, rng, lengths = running_episodes(game, replay), np.random.default_rng(seed), []
    while len(lengths) < episodes:
        seen = game.observe()
        actions = (rng.random(game.env.legal.shape) * game.env.legal).argmax(2)
        _, _, _, truncated, info = game.env.step(actions)
        add(running, game, seen, actions, info, truncated)
        lengths += info["episode_length"][info["done"]].tolist()
    return lengths


def test_lambda_targets_by_hand():
    """Two episodes of three and two steps: one ends by the rules, one runs out of time."""
    reward = torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 9.0]])
    next_value = torch.tensor([[10.0, 10.0], [20.0, 20.0], [30.0, 99.0]])[..., None]
    terminated = torch.tensor([[False, False], [False, False], [True, False]])
    valid = torch.tensor([[True, True], [True, True], [True, False]])
    alive = torch.ones(3, 2, 1, dtype=torch.bool)
    targets = qmix.lambda_targets(reward, next_value, terminated, valid, alive, gamma=0.5, lam=0.4)[..., 0]
    last = 3.0  # an end by the rules: nothing follows
    second = 2 + 0.5 * (0.6 * 20 + 0.4 * last)
    assert targets[:, 0].tolist() == pytest.approx([1 + 0.5 * (0.6 * 10 + 0.4 * second), second, last])
    cut = 2 + 0.5 * 20  # time ran out: the value of what would have followed
    assert targets[:2, 1].tolist() == pytest.approx([1 + 0.5 * (0.6 * 10 + 0.4 * cut), cut])
    alive[0:, 0] = False  # falls in the first step: what its team earns afterwards counts as it came
    fallen = qmix.lambda_targets(reward, next_value, terminated, valid, alive, gamma=0.5, lam=0.4)[:, 0, 0]
    assert fallen[0].item() == pytest.approx(1 + 0.5 * (2 + 0.5 * 3))


def test_episodes_come_back_as_they_were_played():
    _, game, _ = small()
    replay = qmix.Replay(500, game)
    lengths = play(game, replay, 6)
    assert replay.episodes[: len(replay), 1].tolist() == lengths
    first, length = replay.episodes[0]
    rows = {name: column[first : first + length + 1] for name, column in replay.rows.items()}
    assert rows["legal"][np.arange(length)[:, None], np.arange(3), rows["action"][:length]].all()
    assert rows["terminated"].tolist() == [False] * (length - 1) + [True, False]
    assert rows["reward"][:length].sum() > 0
    assert (
        not rows["alive"][length].any() and rows["alive"][length - 1].any()
    )  # random play loses: the last row is its end


def test_the_oldest_episodes_go_and_none_is_half_overwritten():
    _, game, _ = small()
    replay = qmix.Replay(120, game)
    play(game, replay, 40)
    spans = sorted((first, first + steps + 1) for first, steps in replay.episodes[: len(replay)])
    assert all(end <= start for (_, end), (start, _) in pairwise(spans)) and spans[-1][1] <= 120
    for first, steps in replay.episodes[: len(replay)]:
        ends = np.flatnonzero(replay.rows["terminated"][first : first + steps])
        assert ends.tolist() == [steps - 1]  # its own end, and of nobody else


@pytest.mark.parametrize("mixer", ["none", "vdn", "qmix"])
def test_padding_and_the_dead_are_in_no_loss(mixer):
    args, game, nets = small(mixer)
    replay = qmix.Replay(500, game)
    play(game, replay, 6)
    mb = replay.sample(4, np.random.default_rng(0))
    loss = qmix.td_loss(args, nets, nets, mb)[0]
    longer = dict(mb)  # the rows of the agents hold no padding; those of the team do
    for name in ("alive", "state", "reward", "terminated"):
        longer[name] = torch.cat([mb[name], mb[name][-1:].expand(5, *mb[name].shape[1:])])
    longer["valid"] = torch.cat([mb["valid"], torch.zeros(5, 4, dtype=torch.bool)])
    assert qmix.td_loss(args, nets, nets, longer)[0].item() == pytest.approx(loss.item(), rel=1e-5)
    # what a fallen agent is said to have done changes nothing of the value at that step
    q_values, alive, state = torch.randn(7, 3), torch.tensor([True, False, True]), torch.randn(7, game.state_size)
    other = q_values.clone()
    other[:, 1] += 5.0
    one, two = nets.mix(q_values, alive, state), nets.mix(other, alive, state)
    assert torch.equal(one, two) and one.shape == (7, 3 if mixer == "none" else 1)


def test_illegal_actions_are_never_the_best_and_targets_use_the_target_network():
    args, game, nets = small("vdn", td_lambda=0.0)
    replay = qmix.Replay(500, game)
    play(game, replay, 4)
    mb, target = replay.sample(4, np.random.default_rng(0)), qmix.Networks(args, game, seed=2)
    base = qmix.td_loss(args, nets, target, mb)[1]["targets"]
    with torch.no_grad():
        nets.agent.head.bias[0] += 100.0  # no-op is legal for the dead alone
    assert qmix.td_loss(args, nets, target, mb)[1]["targets"].item() == pytest.approx(base.item(), rel=1e-5)
    with torch.no_grad():
        target.agent.head.bias += 1.0
    assert qmix.td_loss(args, nets, target, mb)[1]["targets"] > base + 0.5


def test_the_mixer_is_monotonic_and_depends_on_the_state():
    _, game, nets = small()
    q_values = torch.randn(20, 3, requires_grad=True)
    state = torch.randn(20, game.state_size)
    alive = torch.ones(20, 3, dtype=torch.bool)
    total = nets.mix(q_values, alive, state)
    total.sum().backward()
    assert (q_values.grad >= 0).all() and (q_values.grad > 0).any()
    assert not torch.allclose(total, nets.mix(q_values, alive, torch.randn(20, game.state_size)))


def test_a_seat_plays_itself_alone_and_greedily():
    _, game, nets = small()
    team = qmix.Team(nets.agent, game, seed=1)
    whole = team.act()
    alone = qmix.Team(nets.agent, game, seed=2)
    alone.seat = 1
    assert np.array_equal(alone.act(), whole[:, 1])
    legal = np.take_along_axis(game.env.legal, whole[:, :, None], 2)
    assert legal.all()
    team.epsilon = 1.0
    assert any(not np.array_equal(team.decide()[1], whole) for _ in range(5))


def test_the_update_sees_each_agent_on_the_field_as_it_acted():
    """Memories of one episode, step by step: in the update the same as in play, and none of a fallen agent."""
    _, game, nets = small("vdn", num_envs=1)
    replay, team, memories = qmix.Replay(500, game), qmix.Team(nets.agent, game, seed=1), []
    team.epsilon, running = 0.5, running_episodes(game, replay)
    while not len(replay):
        seen, actions = team.decide()
        memories.append(team.memory[0].clone())
        _, _, _, truncated, info = game.env.step(actions)
        add(running, game, seen, actions, info, truncated)
        team.watch(game.env, actions, info)
    mb, net = replay.sample(2, np.random.default_rng(0)), nets.agent
    x = torch.relu(net.first(mb["obs"]) + net.last_action(mb["last_action"]) + net.agent(mb["agent"]))
    out = net.gru(x, mb["sizes"], torch.zeros(mb["sizes"][0], 16))
    step, episode, agent = np.unravel_index(mb["place"].numpy(), mb["alive"].shape)
    assert mb["alive"][step, episode, agent].all() and len(out) == mb["alive"].sum()
    assert len(out) < 2 * 3 * len(memories)  # somebody fell before the end
    acted = step < len(memories)
    assert torch.allclose(out[acted], torch.stack(memories)[step[acted], agent[acted]], atol=2e-3)  # float16 replay


@pytest.mark.parametrize(
    ("mixer", "env_id"), [("none", "smac-3m"), ("vdn", "smac-3m"), ("qmix", "msh-4h1s-4x4"), ("qmix", "smac-2s3z")]
)
def test_every_mixer_trains_and_plays(mixer, env_id, tmp_path, capsys):
    flags = ["--env-id", env_id, "--mixer", mixer, "--run-dir", str(tmp_path / "run"), *TINY]
    assert main(qmix.Args, qmix.train, flags) == 0, capsys.readouterr().err
    env = envs.make(env_id, num_envs=2, seed=3)
    from envs.roles import load_policy, load_team

    team = load_team(str(tmp_path / "run"), env, seed=1)
    actions = team.act(env)
    assert actions.shape == (2, env.spec.num_players)
    team.watch(env, actions, env.step(actions)[-1])
    assert load_policy(str(tmp_path / "run"), env, 1, seed=1).act(env).shape == (2,)


def test_a_team_of_another_size_is_one_line(monkeypatch):
    from envs import roles

    env, read = envs.make("smac-8m", num_envs=1, seed=3), roles.read_spec
    monkeypatch.setattr(roles, "read_spec", lambda *args: read(*args) | {"learners": [0, 1, 2]})
    with pytest.raises(envs.ConfigError, match="is of a team of 3, but smac-8m has 8"):
        roles.load_team("pools/8m/qmix-1", env, 1)
    with pytest.raises(envs.ConfigError, match="is of a team of 3, but smac-8m has 8"):
        roles.load_policy("pools/8m/qmix-1", env, 2, 1)
    monkeypatch.undo()
    with pytest.raises(envs.ConfigError, match="one policy for all seats, so '@2' picks nothing"):
        roles.load_policy("pools/8m/qmix-1@2", env, 2, 1)
