"""omg.py and envs/pool.py: teammates and seats, the selector, the losses by hand, and each trouble of earlier code."""

import contextlib
import csv
import io
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import envs
import evaluate
import omg
import pretrain_vae
import qmix
from envs import replay as replays
from envs.episodes import Replay, RunningEpisodes
from envs.pool import LEARNER, Pool, find_members, keep_checkpoints, load_members, mixed_team
from envs.roles import find_checkpoint, load_policy
from envs.run import main
from envs.team import TeamGame, make_env, play_team
from experiments import probe_subgoals

torch.set_num_threads(1)
TINY = ["--num-envs", "4", "--num-steps", "8", "--total-timesteps", "512", "--batch-episodes", "4", "--updates", "1"]
TINY += ["--hidden-size", "16", "--buffer-steps", "400", "--eval-every", "256", "--eval-episodes", "4"]
TINY += ["--final-eval-episodes", "4", "--checkpoint-every", "4"]


def quietly(function, *args):
    with contextlib.redirect_stdout(io.StringIO()):
        return function(*args)


@pytest.fixture(scope="session")
def teammates(tmp_path_factory) -> str:
    """A pool of three small teams on 3m: two of IQL, one of QMIX."""
    folder = tmp_path_factory.mktemp("pool")
    for mixer, seed in (("none", 1), ("none", 2), ("qmix", 3)):
        flags = ["--mixer", mixer, "--seed", str(seed), "--run-dir", str(folder / f"{mixer}-{seed}"), *TINY]
        assert quietly(main, qmix.Args, qmix.train, [*flags, "--total-timesteps", "32", "--eval-every", "0"]) == 0
    return str(folder)


@pytest.fixture(scope="session")
def priors(tmp_path_factory) -> dict[bool, str]:
    """Small prior VAEs, of observations and of states."""
    how = {"env_id": "smac-3m", "num_steps": 400, "lineups": ("random",), "dim": 8, "loss": "recon", "epochs": 1}
    how |= {"hidden_size": 16, "vae_hidden_size": 16, "pictures": False, "out_dir": str(tmp_path_factory.mktemp("vae"))}
    train = pretrain_vae.train
    return {state: str(quietly(train, pretrain_vae.Args(obs_is_state=state, **how))) for state in (False, True)}


def make(teammates, priors, num_envs=4, **settings) -> SimpleNamespace:
    """All that a run consists of, without the run."""
    args = omg.Args(env_id="smac-3m", teammates=teammates, hidden_size=16, goal_size=8, batch_episodes=4, **settings)
    env = make_env("smac-3m", num_envs, 1)
    game, prior = TeamGame(env), None
    pool = Pool(game, load_members(find_members(teammates, env), env, 1), 1, args.team, own="omg")
    if args.model == "omg":
        models, _ = pretrain_vae.load_checkpoint(priors[args.obs_is_state], env.spec, args.obs_is_state)
        prior = omg.Prior(models, args.obs_is_state)
    nets = omg.Networks(args, game, 8, seed=1)
    replay = Replay(2000, game, 1, omg.columns_of(args, game, 8))
    play = omg.MixedPlay(omg.Learner(args, nets, game, 1), pool)
    return SimpleNamespace(args=args, game=game, pool=pool, prior=prior, nets=nets, replay=replay, play=play)


def record(it, episodes=8, epsilon=0.5) -> list[dict]:
    """Play into the replay as train does; returns what was seen and done in all games, step by step."""
    game, pool, learner, steps = it.game, it.pool, it.play.learner, []
    running = RunningEpisodes(game.num_envs, game.env.spec.horizon, it.replay)
    learner.epsilon = epsilon
    while len(it.replay) < episodes:
        seen, actions = it.play.decide()
        own = torch.from_numpy(pool.is_learner.copy())
        steps.append(seen | {"seat": pool.seat, "actions": actions.copy(), "t": game.env.t.copy()})
        _, _, _, truncated, info = game.env.step(actions)
        now = {name: seen[name][own][:, None] for name in ("obs", "legal", "alive")}
        now |= {
            "action": actions[own.numpy()][:, None],
            "reward": game.reward().mean(1),
            "state": seen["state"],
        }
        now |= {"terminated": qmix.ends(info, truncated), "seat": pool.seat, "joint": actions}
        now |= {"allies": (seen["alive"] & ~own).numpy(), "team_obs": seen["obs"][:, :, : game.num_features]}
        now |= {name: getattr(learner, name)[own] for name in ("mean", "log_var")}
        final = game.final(info)
        final |= {name: final[name][own][:, None] for name in ("obs", "alive")}
        running.add(now=now, done=info["done"], final=final)
        it.play.watch(game.env, actions, info)
    return steps


def batch(it, seed=0) -> dict:
    return omg.sample(it.args, it.replay, it.game.num_actions, np.random.default_rng(seed))


def loss_of(it, mb, share=0.5):
    target = omg.Networks(it.args, it.game, 8, seed=2).q
    return omg.losses(it.args, it.nets, target, it.prior, mb, share, torch.Generator().manual_seed(1))


# the pool


def test_seats_and_teammates_are_drawn_anew_for_each_episode(teammates):
    env = make_env("smac-3m", 64, 1)
    members = load_members(find_members(teammates, env), env, 1)
    assert [member.algorithm for member in members] == ["iql", "iql", "qmix"]
    pool = Pool(TeamGame(env), members, seed=1)
    assert (pool.is_learner.sum(1) == 1).all() and set(pool.seat) == {0, 1, 2}
    others = [set(row[row != LEARNER]) for row in pool.member]
    assert all(len(kinds) == 1 for kinds in others) and {k for kinds in others for k in kinds} == {0, 1, 2}
    before, done = pool.member.copy(), np.arange(64) < 32
    pool.watch(env, env.legal.argmax(2), {"done": done})
    assert (pool.member[32:] == before[32:]).all() and (pool.member[:32] != before[:32]).any()
    mixed = Pool(TeamGame(env), members, 1, team="iql:1,qmix:1,omg:1", own="omg")
    assert (np.sort(mixed.member, 1)[:, 2] == 2).all() and set(np.sort(mixed.member, 1)[:, 1]) == {0, 1}


@pytest.mark.parametrize("team", ["iql:4,omg:1", "iql:3", "iql:1,vdn:1,omg:1", "iql:x,omg:1", "iql:1,omg:2"])
def test_a_team_that_cannot_be_is_refused_in_one_line(teammates, team):
    env = make_env("smac-3m", 2, 1)
    members = load_members(find_members(teammates, env), env, 1)
    with pytest.raises(envs.ConfigError, match="team"):
        Pool(TeamGame(env), members, 1, team=team, own="omg")
    with pytest.raises(envs.ConfigError, match="no run of smac-8m"):
        find_members(teammates, SimpleNamespace(spec=SimpleNamespace(env_id="smac-8m")))


def test_kept_checkpoints_are_members(teammates, tmp_path):
    kept = keep_checkpoints(Path(teammates), tmp_path)
    assert [str(place.relative_to(tmp_path)) for place in kept] == ["3m/iql-1", "3m/iql-2", "3m/qmix-3"]
    env = make_env("smac-3m", 2, 1)
    assert find_members(f"{tmp_path}/3m", env) == kept and find_members(f"{tmp_path}/3m/iql-*", env) == kept[:2]
    for before, after in zip(find_members(teammates, env), kept, strict=True):
        there = find_checkpoint(before) / "weights.safetensors"
        assert (after / "weights.safetensors").read_bytes() == there.read_bytes()
    with pytest.raises(envs.ConfigError, match="no run in"):
        keep_checkpoints(tmp_path, tmp_path / "more")


@pytest.mark.parametrize("map_name", sorted(path.name for path in Path("pools").glob("*/")))
def test_the_pools_of_the_project_play(map_name):
    """Each member loads and moves, training and test members are apart, and a strong one wins."""
    env = make_env(f"smac-{map_name}", 4, 1)
    trained, tested = find_members("", env), find_members(f"pools/{map_name}/*-10[1-3]", env)
    assert trained and not {path.resolve() for path in trained} & {path.resolve() for path in tested}
    algorithms = {member.algorithm for member in load_members(tested, env, 1)}
    assert algorithms - {"mappo_hyper"} == {"qmix", "vdn", "iql"}
    team = mixed_team([str(trained[0])], env, 1)
    assert play_team(TeamGame(env), team)["win_rate"] == 1.0


def test_teammates_play_greedily_each_as_if_it_were_alone(teammates, priors):
    """However games are grouped, and however much the learner explores, a member does what its own team would do."""
    it = make(teammates, priors, num_envs=6, model="none")
    env = it.game.env
    alone = load_members(find_members(teammates, env), env, 5)
    it.play.learner.epsilon = 1.0
    for _ in range(12):
        member = it.pool.member.copy()
        _, actions = it.play.decide()
        for k, other in enumerate(alone):
            there = (member == k) & env.alive
            assert (actions[there] == other.team.act(env)[there]).all()
        info = env.step(actions)[-1]
        it.play.watch(env, actions, info)
        for other in alone:
            other.team.watch(env, actions, info)


def test_a_team_of_several_checkpoints_and_rules(teammates):
    env = make_env("smac-3m", 3, 1)
    paths = [str(path) for path in find_members(teammates, env)]
    team = mixed_team([paths[0], "nearest", paths[2]], env, seed=1)
    actions = team.act(env)
    assert np.array_equal(actions[:, 2], load_policy(paths[2], env, 2, 1).act(env))
    assert np.array_equal(actions[:, 1], mixed_team(["nearest"], env, seed=1).act(env)[:, 1])
    with pytest.raises(envs.ConfigError, match="3 seats, not 2"):
        mixed_team(["nearest", "focus"], env, seed=1)


# what is stored


def test_steps_and_seats_come_back_as_they_were_played(teammates, priors):
    """Written at t, read back at t, and of the learner's own seat, which differs from episode to episode."""
    it = make(teammates, priors, num_envs=1, model="none")
    steps = record(it, episodes=6)
    with pytest.raises(TypeError):
        RunningEpisodes(1, 10, it.replay).add({}, np.zeros(1, bool), {})
    mb, starts = batch(it), [k for k, step in enumerate(steps) if step["t"][0] == 0]
    assert len({steps[k]["seat"][0] for k in starts}) > 1
    rows, first = it.replay.rows, it.replay.episodes[: len(it.replay), 0]
    checked = 0
    for r, (row, t) in enumerate(zip(mb["row"], mb["step"], strict=True)):
        episode = int((first <= row).sum()) - 1
        assert row - first[episode] == t
        if not mb["acted"][r]:
            continue
        step = steps[starts[episode] + t]
        seat = int(step["seat"][0])
        assert mb["seat"][r] == seat and mb["action"][r] == step["actions"][0, seat]
        assert torch.allclose(mb["obs"][r], step["obs"][0, seat], atol=1e-3)
        assert (
            torch.equal(mb["legal"][r], step["legal"][0, seat])
            and mb["joint"][r].tolist() == step["actions"][0].tolist()
        )
        last = steps[starts[episode] + t - 1]["actions"][0].tolist() if t else [it.game.num_actions] * 3
        assert mb["last_joint"][r].tolist() == last and mb["last_action"][r] == last[seat]
        checked += 1
    assert checked == mb["acted"].sum() > 10 and rows["seat"].dtype == np.int16


def test_own_actions_are_not_among_the_others():
    joint, seat = torch.tensor([[1, 2, 0], [3, 3, 3]]), torch.tensor([1, 0])
    actions = omg.others_actions(joint, seat, 3).view(2, 3, 3)
    assert actions[0].tolist() == [[0, 1, 0], [0, 0, 0], [1, 0, 0]]
    assert not actions[1].any()  # nobody has done anything yet


def test_what_was_inferred_is_there_at_every_step(teammates, priors):
    it = make(teammates, priors, mixing="kl")
    record(it)
    mb = batch(it)
    acted = mb["acted"]
    assert (mb["mean"][acted].abs().sum(1) > 0).all() and (mb["log_var"][acted].abs().sum(1) > 0).all()
    # in play and in the update the same network sees the same
    mean, _, _ = it.nets.inference(mb["obs"], mb["last_obs"], mb["others"], mb["last_action"], mb["sizes"])
    assert torch.allclose(mean[acted], mb["mean"][acted], atol=5e-3)  # the replay holds half floats


# subgoals


def test_selector_by_hand_on_five_steps():
    """One episode of five steps beside a longer one: H is cut at the end, and both signs pick what they should."""
    num, steps = 2, 7
    usable = torch.ones(steps, num, dtype=torch.bool)
    usable[6:, 0] = False  # states 0..5 of the first episode
    place = torch.arange(5) * num  # its five steps
    at, takable = omg.candidates(place, usable.flatten(), num, horizon=3)
    assert [row[ok].tolist() for row, ok in zip(at // num, takable, strict=True)] == [
        [1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5], [5]
    ]  # fmt: skip
    value = torch.tensor([9.0, 1.0, 5.0, 2.0, 4.0, 3.0, 99.0]).repeat_interleave(num)[at]
    ahead = {kind: omg.select(value, takable, kind).tolist() for kind in ("optimistic", "conservative")}
    assert ahead == {"optimistic": [2, 1, 2, 1, 1], "conservative": [1, 2, 1, 2, 1]}
    last = torch.tensor([5 * num])  # the state at the end: there is no future but itself
    assert omg.candidates(last, usable.flatten(), num, 3)[1].tolist() == [[True, False, False, False]]


def test_values_average_legal_actions_alone(teammates, priors):
    it = make(teammates, priors)
    x, memory, goal = torch.randn(5, 16), torch.randn(5, 16), torch.randn(5, 3, 8)
    legal = torch.rand(5, it.game.num_actions) < 0.5
    legal[:, 1], legal[:, 0] = True, False
    values = omg.values_of(it.nets.q, x, it.nets.q.goal(goal), legal, memory)
    q_values = it.nets.q.step(x[:, None], it.nets.q.goal(goal), memory[:, None])
    assert values[2, 1].item() == pytest.approx(q_values[2, 1][legal[2]].mean().item(), rel=1e-5)
    with torch.no_grad():
        it.nets.q.head.bias[0] += 100.0
    assert torch.allclose(omg.values_of(it.nets.q, x, it.nets.q.goal(goal), legal, memory), values, atol=1e-4)


def test_one_step_from_a_memory_is_what_the_sequence_says(teammates, priors):
    it = make(teammates, priors)
    x, goal, sizes = torch.randn(9, 16), torch.randn(9, 8), [4, 3, 2]
    values, memories = it.nets.q(x, goal, sizes)
    again = it.nets.q.step(x[4:7], it.nets.q.goal(goal[4:7]), memories[:3])
    assert torch.allclose(again, values[4:7], atol=1e-6)


@pytest.mark.parametrize("obs_is_state", [False, True])
def test_states_and_observations_are_embedded_one_for_each_step(teammates, priors, obs_is_state):
    """The state has no agent axis: one row for each step of an episode, whoever the learner is."""
    it = make(teammates, priors, obs_is_state=obs_is_state)
    record(it)
    mb = batch(it)
    means, log_vars, usable = omg.embed(it.prior, mb)
    steps, num, _ = mb["alive"].shape
    assert means.shape == log_vars.shape == (steps * num, 8) and usable.shape == (steps * num,)
    lengths = mb["valid"].sum(0) + 1
    assert (
        usable.view(steps, num).sum(0).tolist() == (lengths if obs_is_state else mb["alive"][:, :, 0].sum(0)).tolist()
    )
    r = int(mb["acted"].nonzero()[-1])
    place = mb["place"][r]
    seen = mb["state"].flatten(0, 1)[place] if obs_is_state else mb["obs"][r]
    assert torch.allclose(means[place], it.prior(seen[None], mb["seat"][r, None])[0][0], atol=1e-5)


@pytest.mark.parametrize(("obs_is_state", "size"), [(False, 80), (True, 168)])
def test_sizes_come_from_the_spec(obs_is_state, size):
    env = make_env("smac-8m", 1, 1)
    args, game = omg.Args(env_id="smac-8m", obs_is_state=obs_is_state, goal_size=16), TeamGame(env)
    vae = pretrain_vae.Args(env_id="smac-8m", obs_is_state=obs_is_state, dim=32)
    models = pretrain_vae.GoalModels(pretrain_vae.sizes_of(vae, env.spec, None, ["x"]))
    prior = omg.Prior(models, obs_is_state)
    assert models.sizes["obs_size"] == size
    mean, log_var = prior(torch.randn(3, size), torch.tensor([0, 7, 3]))
    assert mean.shape == log_var.shape == (3, 32)
    nets = omg.Networks(args, game, prior.size)
    learner = omg.Learner(args, nets, game, 1)
    assert learner.act().shape == (1, 8) and learner.mean.shape == (1, 8, 32)
    assert nets.inference.decoder[-1].out_features == 80 + 8 * 14


# losses


def test_kl_by_hand():
    zero, one = torch.zeros(1, 2), torch.ones(1, 2)
    assert omg.gaussian_kl(one, zero, zero, zero).item() == pytest.approx(1.0)  # half a square for each of two
    assert omg.gaussian_kl(zero, zero, zero, one).item() == pytest.approx(1 + np.exp(-1) - 1, abs=1e-6)
    assert omg.gaussian_kl(one, 2 * one, one, 2 * one).item() == pytest.approx(0.0, abs=1e-6)


def test_reconstruction_by_hand_of_real_features(teammates, priors):
    """The decoder has to draw what was really seen: an embedding that goes to zero does not make it cheap."""
    it = make(teammates, priors)
    record(it)
    mb = batch(it)
    with torch.no_grad():
        for layer in (it.nets.inference.encoder[-1], it.nets.inference.decoder[-1]):
            layer.weight.zero_()
            layer.bias.zero_()
    inferred = (torch.zeros(len(mb["obs"]), 8),) * 2
    loss, log = omg.model_loss(it.args, it.nets, mb, inferred[0], inferred, inferred)
    features = torch.cat([mb["obs"][:, : it.game.num_features], mb["others"]], 1)[mb["acted"]]
    assert log["goal/reconstruction"].item() == pytest.approx(features.pow(2).mean(1).mean().item(), rel=1e-5)
    assert log["goal/kl"].item() == 0.0 and loss.item() > 0.01


@pytest.mark.parametrize("model", ["omg", "naive", "liam"])
def test_no_td_gradient_reaches_the_inference_network(teammates, priors, model, monkeypatch):
    it = make(teammates, priors, model=model)
    record(it)
    monkeypatch.setattr(omg, "model_loss", lambda *_: (torch.zeros(()), {}))
    loss_of(it, batch(it))[0].backward()
    assert all(p.grad is None or not p.grad.any() for p in it.nets.inference.parameters())
    assert it.nets.q.goal.weight.grad.abs().sum() > 0  # though Q itself learns what to make of subgoals


@pytest.mark.parametrize("model", ["omg", "naive", "liam", "none"])
def test_padding_changes_no_loss(teammates, priors, model):
    it = make(teammates, priors, model=model, obs_is_state=True)
    record(it)
    mb = batch(it)
    longer = dict(mb)
    for name in ("alive", "state", "reward", "terminated"):
        longer[name] = torch.cat([mb[name], mb[name][-1:].expand(5, *mb[name].shape[1:])])
    longer["valid"] = torch.cat([mb["valid"], torch.zeros(5, 4, dtype=torch.bool)])
    (one, log), (two, other) = loss_of(it, mb), loss_of(it, longer)
    assert one.item() == pytest.approx(two.item(), rel=1e-5)
    assert {name: x.item() for name, x in log.items()} == pytest.approx(
        {k: x.item() for k, x in other.items()}, rel=1e-4
    )


def test_conservative_really_takes_the_smallest(teammates, priors):
    logs = {}
    for selector in ("optimistic", "conservative"):
        it = make(teammates, priors, selector=selector)
        record(it)
        logs[selector] = loss_of(it, batch(it))[1]
    spread = logs["optimistic"]["goal/value_spread"]
    gap = logs["optimistic"]["goal/value_gain"] - logs["conservative"]["goal/value_gain"]
    assert spread > 0 and gap.item() == pytest.approx(spread.item(), rel=1e-3)


def test_mixing_feeds_q_or_aims_the_kl(teammates, priors):
    """Paper: the share of selected subgoals changes what Q is fed; notes: it changes what the KL aims at."""
    for mixing, changed, same in (("q", "losses/td_loss", "goal/kl"), ("kl", "goal/kl", "losses/td_loss")):
        it = make(teammates, priors, mixing=mixing)
        record(it)
        none, all_ = (loss_of(it, batch(it), share)[1] for share in (0.0, 1.0))
        assert none[changed].item() != pytest.approx(all_[changed].item(), rel=1e-6)
        assert none[same].item() == pytest.approx(all_[same].item(), rel=1e-6)


def test_target_of_the_paper_keeps_the_subgoal_of_the_step(teammates, priors):
    losses = {}
    for target in ("current", "next"):
        it = make(teammates, priors, target_subgoal=target)
        record(it)
        losses[target] = loss_of(it, batch(it), 0.0)[1]["losses/td_loss"].item()
        with torch.no_grad():
            it.nets.q.goal.weight.zero_()
        target_q = omg.Networks(it.args, it.game, 8, seed=2).q
        with torch.no_grad():
            target_q.goal.weight.zero_()
        rng = torch.Generator().manual_seed(1)
        blind = omg.losses(it.args, it.nets, target_q, it.prior, batch(it), 0.0, rng)[1]["losses/td_loss"].item()
        losses[f"blind {target}"] = blind
    assert losses["current"] != losses["next"]
    assert losses["blind current"] == pytest.approx(losses["blind next"], rel=1e-4)  # without a subgoal no difference


# runs


def test_the_prior_sees_teams_with_a_stranger(teammates):
    """Each member with somebody at random in one seat, and not always the same; roles as pretrain_vae.py takes them."""
    members = find_members(teammates, make_env("smac-3m", 1, 1))
    lineups = [lineup.split(",") for lineup in omg.with_a_stranger(members, 3)]
    assert [set(lineup) for lineup in lineups] == [{str(member), "random"} for member in members]
    assert [lineup.index("random") for lineup in lineups] == [0, 1, 2]
    assert all(lineup.count("random") == 1 and len(lineup) == 3 for lineup in lineups)


def test_win_rates_are_told_by_the_teammates_algorithm(teammates, priors):
    """Each algorithm's share of won battles, and together the share of all; a mixed team goes by both names."""
    it = make(teammates, priors, num_envs=24)
    kinds = it.pool.algorithms
    for row, kind in enumerate(kinds):
        (k,) = {k for k in it.pool.member[row].tolist() if k != LEARNER}
        assert kind == it.pool.members[k].algorithm
    counts = {kind: kinds.count(kind) for kind in ("iql", "qmix")}
    assert sum(counts.values()) == 24 and min(counts.values()) > 0

    class Winner:  # wins where an IQL team sits, gives up elsewhere
        act = staticmethod(lambda env: np.where(env.legal[..., 6:].any(2), 6 + env.legal[..., 6:].argmax(2), 1))
        watch = staticmethod(lambda env, actions, info: info["battle_won"].__setitem__(slice(None), won))

    won = np.array([kind == "iql" for kind in kinds])
    scores = play_team(it.game, Winner, kinds)
    assert (scores["win_rate-iql"], scores["win_rate-qmix"]) == (1.0, 0.0)
    assert scores["win_rate"] == counts["iql"] / 24
    mixed = make(teammates, priors, team="iql:1,qmix:1,omg:1")
    assert set(mixed.pool.algorithms) == {"iql+qmix"}


@pytest.mark.parametrize(("selector", "obs_is_state"), [("optimistic", False), ("conservative", True)])
def test_the_oracle_plays_by_the_recorded_future(teammates, priors, selector, obs_is_state):
    """Of the states that came up to three steps later in the same game it is given the one of the largest value, or
    of the smallest; after the end of what was recorded the last one."""
    settings = {"subgoal": "oracle", "selector": selector, "obs_is_state": obs_is_state, "horizon": 3}
    first, again = (make(teammates, priors, **settings) for _ in range(2))
    record = omg.Recording(omg.Learner(first.args, first.nets, first.game, 1, first.prior), first.pool)
    play_team(first.game, record)
    seer, given = omg.Foresight(again.args, again.nets, again.game, 1, again.prior), []
    seer.foresee(record)
    subgoal = seer.subgoal
    seer.subgoal = lambda *seen: given.append((*seen, subgoal(*seen))) or given[-1][-1]
    play_team(again.game, omg.MixedPlay(seer, again.pool))
    choices = 0
    for step, (who, x, legal, memory, goals) in enumerate(given[: len(record.usable) + 2]):
        for row, game in enumerate(who.nonzero()[:, 0].tolist()):
            ahead = [k for k in range(step + 1, min(step + 4, len(record.usable))) if record.usable[k][game]]
            if not ahead:
                last = max(k for k, usable in enumerate(record.usable) if usable[game])
                assert (goals[row] == record.subgoals[last][game]).all()
                continue
            options, many = torch.stack([record.subgoals[k][game] for k in ahead]), len(ahead)
            with torch.no_grad():
                q_values, _ = again.nets.q(x[[row] * many], options, [many], memory[[row] * many])
            values = q_values[:, legal[row]].mean(1)
            best = values.max() if selector == "optimistic" else values.min()
            assert values[(options == goals[row]).all(1)][0] == pytest.approx(best.item(), abs=1e-5)
            choices += many > 1
    assert choices > 20


VARIANTS = {
    "iql": ["--model", "none"],
    "iql with actions": ["--model", "none", "--see-actions", "--team", "iql:1,qmix:1,omg:1"],
    "naive": ["--model", "naive"],
    "liam": ["--model", "liam"],
    "omg": ["--vae-ckpt", "{obs}", "--test-team", "iql:1,qmix:1,omg:1"],
    "notes": [
        "--vae-ckpt",
        "{state}",
        "--obs-is-state",
        "--mixing",
        "kl",
        "--target-subgoal",
        "next",
        "--horizon",
        "5",
    ],
    "random": ["--vae-ckpt", "{obs}", "--subgoal", "random", "--selector", "conservative"],
    "oracle": ["--vae-ckpt", "{obs}", "--subgoal", "oracle"],
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_trains_and_plays(teammates, priors, variant, tmp_path, capsys):
    flags = [flag.format(obs=priors[False], state=priors[True]) for flag in VARIANTS[variant]]
    flags += ["--env-id", "smac-3m", "--teammates", teammates, "--run-dir", str(tmp_path / "run"), "--goal-size", "8"]
    assert main(omg.Args, omg.train, [*flags, *TINY, "--total-timesteps", "256"]) == 0, capsys.readouterr().err
    assert (tmp_path / "run/subgoals.png").exists() == ("--vae-ckpt" in flags)
    scores = json.loads((tmp_path / "run/result.json").read_text())["eval"]
    assert ("inferred_win_rate" in scores) == ("oracle" in flags)
    env = envs.make("smac-3m", num_envs=2, seed=3)
    policy = load_policy(str(tmp_path / "run"), env, 1, seed=1)
    actions = env.legal.argmax(2)
    actions[:, 1] = policy.act(env)
    assert np.take_along_axis(env.legal, actions[:, :, None], 2).all()
    policy.watch(env, actions, env.step(actions)[-1])
    told, sizes = policy.explain(1), {"subgoal_obs": env.spec.obs_shape, "subgoal_state": env.spec.state_shape}
    shown = {name: told[name].shape for name in told if name.startswith("subgoal")}
    name = "subgoal_state" if "--obs-is-state" in flags else "subgoal_obs"
    assert shown == ({name: sizes[name]} if "--vae-ckpt" in flags else {}) and told["q_values"].shape == (9,)


def test_a_replay_shows_the_subgoals_of_the_learner_alone(teammates, priors, tmp_path, capsys):
    """In a battle of an OMG learner among others, each unit's thoughts are those of its own policy."""
    flags = ["--vae-ckpt", priors[False], "--env-id", "smac-3m", "--teammates", teammates, "--goal-size", "8"]
    run = str(tmp_path / "run")
    assert main(omg.Args, omg.train, [*flags, "--run-dir", run, *TINY, "--total-timesteps", "256"]) == 0
    other = next(Path(teammates).iterdir())
    for settings in ({}, {"start_jitter": 0.5}):
        [episode] = replays.record("smac-3m", f"{run},{other},nearest", 1, 3, True, settings).data["episodes"]
        first = episode["steps"][0]["thoughts"]
        assert "subgoal" in first["0"] and "q_values" in first["1"]
        assert "subgoal" not in first["1"] and not first.get("2")


def test_how_much_a_linear_map_explains():
    """All of it, none of it, and half of the variance; judged on what was not fitted."""
    rng = np.random.default_rng(1)
    x, noise, fitted = rng.normal(size=(4000, 3)), rng.normal(size=(4000, 2)), np.arange(4000) % 2 == 0
    told = x @ rng.normal(size=(3, 2))
    told /= told.std(0)
    assert probe_subgoals.explained(x, told, fitted) > 0.99
    assert abs(probe_subgoals.explained(x, noise, fitted)) < 0.02
    assert probe_subgoals.explained(x, told + noise, fitted) == pytest.approx(0.5, abs=0.05)


def test_the_probe_of_subgoals(teammates, priors, tmp_path, capsys, monkeypatch):
    """Its inferred subgoals are those of play, from starts that move as the run's did; the others are what they are
    called."""
    flags = ["--vae-ckpt", priors[False], "--env-id", "smac-3m", "--teammates", teammates, "--goal-size", "8"]
    flags += ["--start-jitter", "0.5"]
    run, table = str(tmp_path / "run"), tmp_path / "probe.csv"
    assert main(omg.Args, omg.train, [*flags, "--run-dir", run, *TINY, "--total-timesteps", "256"]) == 0
    given, subgoal = {name: [] for name in probe_subgoals.GIVEN}, probe_subgoals.Given.subgoal

    def note(self, who, *seen):
        given[self.given].append((self.mean[who].clone(), subgoal(self, who, *seen)))
        return given[self.given][-1][1]

    def make_moved(env_id, num_envs, seed, *jitter):
        assert num_envs == 1 or jitter == (0.5,)
        return make_env(env_id, num_envs, seed, *jitter)

    monkeypatch.setattr(probe_subgoals, "make_env", make_moved)
    monkeypatch.setattr(probe_subgoals.Given, "subgoal", note)
    probe_subgoals.main(probe_subgoals.Args((run,), episodes=8, ahead=2, out=str(table)))
    assert all(torch.equal(inferred, goal) for inferred, goal in given["inferred"])
    assert all(torch.equal(inferred[:-1], goal[1:]) for inferred, goal in given["of another game"])
    assert not any(goal.any() for _, goal in given["zero"])
    assert all(len(goal) == 0 or goal.any() for _, goal in given["noise"])
    [row] = csv.DictReader(table.open())
    assert {"space", "2 ahead from both", "wins, noise"} <= set(row) and float(row["space"]) <= 1.0
    assert "2 ahead from inferred: " in capsys.readouterr().out


def test_a_prior_of_states_is_refused_where_observations_are_seen(teammates, priors, tmp_path, capsys):
    flags = ["--env-id", "smac-3m", "--teammates", teammates, "--vae-ckpt", priors[True], *TINY]
    assert main(omg.Args, omg.train, [*flags, "--run-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err.strip()
    spec = envs.spec("smac-3m")
    assert f"trained on state ({spec.state_shape[0]}), this run uses obs ({spec.obs_shape[0]})" in error
    assert "\n" not in error


@pytest.mark.parametrize(
    "flags",
    [
        ["--env-id", "smac-MMM"],
        ["--teammates", "nowhere"],
        ["--teammates", "x", "--model", "none", "--subgoal", "zero"],
    ],
)
def test_bad_settings_end_in_one_line(flags, tmp_path, capsys):
    assert main(omg.Args, omg.train, [*flags, "--run-dir", str(tmp_path / "run"), *TINY]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_battle_of_several_checkpoints_is_scored_and_filmed(teammates, tmp_path):
    roles = ",".join([f"{teammates}/none-1", f"{teammates}/qmix-3", "focus"])
    files = {"json": str(tmp_path / "scores.json"), "gif": str(tmp_path / "fight.gif")}
    quietly(evaluate.main, evaluate.Args(env_id="smac-3m", roles=roles, episodes=4, **files))
    assert (tmp_path / "fight.gif").stat().st_size > 1000 and '"win_rate"' in (tmp_path / "scores.json").read_text()
