"""hopplus_nomcts.py: one-step planning, imagined games and the loss against hand computations, and whole runs."""

import csv
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import tyro
from safetensors.torch import load_file

import envs
import evaluate
import hopplus_nomcts as hop
import train_world_model
from envs.grid import DEADLINE, GONE, ITEM, PLAYERS, STAY, T
from envs.roles import load_policy

ROOT = Path(__file__).resolve().parent.parent
ID = "msh-4h1s-4x4"
HARE = 6
TINY = ["--num-envs", "8", "--num-steps", "8", "--total-timesteps", "512", "--draws", "2", "--eval-every", "256",
        "--eval-episodes", "8", "--final-eval-episodes", "8", "--hidden", "16", "--offline-steps", "800",
        "--offline-updates", "8", "--update-epochs", "1", "--moa-updates", "2", "--world-updates", "2",
        "--batch-rows", "64", "--log-every", "2", "--checkpoint-every", "3", "--imagine-horizon", "5", "--seed", "5",
        "--goal-mode", "oracle"]  # fmt: skip
CLOCKS = re.compile(r"wall_time|charts/SPS|planner/steps_per_second|time/.*")  # never the same twice
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory) -> dict[tuple[str, bool], Path]:
    """World models that are far from perfect: (game, planes) -> checkpoint."""
    made = {}
    for env_id, planes in ((ID, False), (ID, True), ("msd-4x4", False)):
        size = {"num_transitions": 1500, "epochs": 2} if planes else {"num_transitions": 3000, "epochs": 12}
        small = size | {"batch_size": 128, "learning_rate": 1e-2, "hidden": 32, "env_id": env_id, "planes": planes}
        out_dir = str(tmp_path_factory.mktemp("world"))
        made[env_id, planes] = train_world_model.train(train_world_model.Args(out_dir=out_dir, **small))
    return made


def run(*args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "hopplus_nomcts.py"), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)


def train_here(run_dir: Path, *flags: str) -> int:
    """A run in this process, which has everything compiled already."""
    return hop.train(*hop.prepare(tyro.cli(hop.Args, args=[*TINY, "--run-dir", str(run_dir), *flags])))


@pytest.fixture(scope="module")
def finished(worlds, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    done = run("--run-dir", str(run_dir), "--world-ckpt", str(worlds[ID, False]), *TINY)
    assert done.returncode == 0, done.stderr
    return run_dir


def read_metrics(run_dir: Path) -> list[dict[str, str]]:
    with (run_dir / "metrics.csv").open(newline="") as file:
        return [{name: x for name, x in row.items() if not CLOCKS.fullmatch(name)} for row in csv.DictReader(file)]


def make_nets(args: hop.Args, game, model=None, blank: bool = False):
    sizes = model.sizes if model else None
    nets = hop.make_nets(args, game, 1, None, sizes, torch.Generator().manual_seed(0))
    if model:
        nets["world"].load_state_dict(model.state_dict())
    nets["agent"].policy_head.data *= 100.0
    nets["moa"].head.data *= 20.0
    if blank:  # a uniform policy, value 0, opponents that move at random
        for weight in nets.parameters():
            weight.data.zero_()
    return nets.requires_grad_(False)


def make_mind(num_envs: int = 6, model=None, blank: bool = False, env_id: str = ID, **settings):
    args = hop.Args(goal_mode=settings.pop("goal_mode", "oracle"), hidden=16, **settings)
    env = envs.make(env_id, num_envs=num_envs, seed=3)
    nets = make_nets(args, env.game, model, blank)
    return env, hop.Mind(args, env.game, nets, num_envs, list(range(env.spec.num_players)), 1)


def make_state(game, players, items: dict[int, int]) -> np.ndarray:
    state = np.zeros(game.state_size, np.int16)
    state[T], state[DEADLINE], state[PLAYERS : PLAYERS + game.num_players] = 0, game.config.horizon, players
    for cell, code in items.items():
        state[PLAYERS + game.num_players + cell] = code
    return state


def play_some(env, steps: int = 6) -> None:
    """Random legal steps, so that some players have left."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        env.step((rng.random(env.legal.shape) * env.legal).argmax(2))


# planning


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_scores_by_hand(scale):
    """Player 1 stands on a hare, the others far off: taking it pays 1 and is the end, all else is worth gamma V."""
    env, mind = make_mind(1, blank=True, perfect_model=True, draws=3, reward_scale=scale)
    mind.nets["agent"].value_bias.data += 2.0
    state = make_state(env.game, (0, 15, 15, 15), {0: ITEM + 1, 10: ITEM, 3: ITEM + 1})
    env.set_states(state[None])
    mind.look(env)
    policy, value, prior, _ = mind.plan(env.states, np.array([0]), np.array([0]), beta=0.5)
    legal = env.legal[0, 0]
    score = np.where(np.arange(7) == HARE, scale, 2.0 * mind.args.gamma)
    expected = np.exp(0.97 * np.log(1 / legal.sum()) + 0.5 * score) * legal
    assert np.allclose(prior[0], legal / legal.sum()) and legal.sum() == 4
    assert np.allclose(policy[0], expected / expected.sum(), atol=1e-6)
    assert np.allclose(value[0], (policy[0] * score).sum(), atol=1e-6)


@pytest.mark.parametrize("perfect", [True, False])
def test_scores_are_those_of_one_imagined_step_each(worlds, perfect):
    """Distinct steps are imagined once, which changes nothing: compared with every action and draw by itself."""
    model = None if perfect else train_world_model.load_checkpoint(worlds[ID, False])[0]
    env, mind = make_mind(12, model, perfect_model=perfect, draws=3)
    play_some(env)
    mind.look(env)
    env_row, focal = np.nonzero(env.alive)
    rng = np.random.default_rng(2)
    joint = (rng.random((len(env_row), 3, 4, 7)) * env.legal[env_row][:, None]).argmax(3)
    secret = np.tile(mind.hidden_goal, (3 * len(env_row), 3, 1))
    hidden = np.full(secret.shape[:2], hop.HIDDEN)
    hints = (hidden - 1, hidden, mind.goal_biases(secret, np.zeros(len(secret), np.int64)))
    asked = []
    step = mind.world.step
    mind.world.step = lambda states, actions: asked.append(len(states)) or step(states, actions)
    score = mind.score(env.states, env_row, focal, env.legal[env_row, focal], joint, hints)
    assert sum(asked) < 3 * env.legal[env_row, focal].sum()
    for r, (row, player) in enumerate(zip(env_row, focal, strict=True)):
        for action in np.flatnonzero(env.legal[row, player]):
            worth = []
            for draw in range(3):
                actions = joint[r, draw].copy()
                actions[player] = action
                ahead = step(env.states[row : row + 1], actions[None])
                after = mind.plan(ahead.states, np.array([0]), np.array([player]), 1.0, planned=False)[1][0]
                worth.append(ahead.reward[0, player] + mind.args.gamma * after * ~ahead.ended[0, player])
            assert score[r, action] == pytest.approx(np.mean(worth), abs=1e-5)
        assert (score[r][~env.legal[row, player]] == 0).all()


def test_scores_do_not_depend_on_the_seat(worlds):
    model = train_world_model.load_checkpoint(worlds[ID, False])[0]
    env, mind = make_mind(20, model, goal_mode="none", draws=1)
    play_some(env)
    mind.look(env)
    env_row, focal = np.nonzero(env.alive)
    joint = (np.random.default_rng(2).random((len(env_row), 1, 4, 7)) * env.legal[env_row][:, None]).argmax(3)
    hidden = np.full((len(env_row), 3), hop.HIDDEN)
    secret = np.tile(mind.hidden_goal, (len(env_row), 3, 1))
    hints = (hidden - 1, hidden, mind.goal_biases(secret, np.zeros(len(secret), np.int64)))
    legal = env.legal[env_row, focal]
    turned = env.states.copy()
    turned[:, PLAYERS : PLAYERS + 4] = np.roll(env.states[:, PLAYERS : PLAYERS + 4], 1, 1)
    scores = mind.score(env.states, env_row, focal, legal, joint, hints)
    again = mind.score(turned, env_row, (focal + 1) % 4, legal, np.roll(joint, 1, 2), hints)
    assert np.allclose(scores, again, atol=1e-5)


def test_draws_follow_the_opponent_model_and_who_left_stays():
    env, mind = make_mind(64, perfect_model=True)
    play_some(env, 8)
    mind.look(env)
    env_row, focal = np.nonzero(env.alive)
    assert not env.alive.all()
    drawn, streams = np.full((len(env_row), 50, 3), -1), np.zeros((len(env_row), 50), np.uint64)
    hop.draw_goals(mind.beliefs, mind.alive, env_row, focal, mind.streams, drawn, streams)
    joint = np.empty((len(env_row), 50, 4), np.int64)
    hop.draw_actions(mind.probs, env_row, focal, drawn, streams, joint)
    expected = mind.predict()
    for k in range(1, 4):
        player = (focal + k) % 4
        actions = joint[np.arange(len(focal)), :, player]  # (R, 50)
        here = env.alive[env_row, player]
        assert (actions[~here] == STAY).all()
        assert np.take_along_axis(env.legal[env_row, player], actions, 1).all()
        found = np.eye(7)[actions[here]].mean((0, 1))
        assert np.allclose(found, expected[env_row, player][here].mean(0), atol=0.03)


# imagined games


@pytest.mark.parametrize(("env_id", "planes"), [(ID, False), (ID, True), ("msd-4x4", False)])
def test_imagined_games_keep_to_the_rules(worlds, env_id, planes):
    """With a poor model: only legal actions, nobody comes back or is paid after leaving, ends are ends."""
    model = train_world_model.load_checkpoint(worlds[env_id, planes])[0]
    env, mind = make_mind(40, model, env_id=env_id, planes=planes, draws=2)
    num_players, horizon = env.spec.num_players, 12
    real = envs.make(env_id, num_envs=4, seed=8)
    world = hop.Worlds(real, mind.world, 36, horizon, seed=1)
    last_item = world.boards.copy()  # players 1 and 2 stand on the only item left: taking it is the end
    last_item[:, PLAYERS + num_players :] = 0
    last_item[:, PLAYERS + 1] = last_item[:, PLAYERS]
    last_item[np.arange(4), PLAYERS + num_players + last_item[:, PLAYERS]] = ITEM + len(env.game.kinds) - 1
    world.boards = np.concatenate([world.boards, last_item])
    dream, rng, age = (
        hop.DreamPlayers(mind, 4, list(range(num_players)), 2),
        np.random.default_rng(3),
        np.zeros(36, int),
    )
    overs = cuts = left = 0
    for _ in range(50):
        mind.look(world)
        actions = np.full((40, num_players), STAY)
        dream.act(actions)
        env_row, focal = np.nonzero(world.alive & (np.arange(40) < 4)[:, None])
        for rows, seats in ((env_row, focal), (dream.rows, dream.focal)):
            on = world.alive[rows, seats]
            policy = mind.plan(world.states, rows[on], seats[on], 4.0)[0]
            actions[rows[on], seats[on]] = hop.draw_rows(policy, rng)
        assert np.take_along_axis(world.legal, actions[:, :, None], 2).all()
        assert (actions[~world.alive] == STAY).all()
        before, alive = world.states[4:].copy(), world.alive[4:].copy()
        found = world.step(actions)
        mind.watch(actions, world.alive, found["done"])
        after, on_board = found["after"], env.game.alive(found["after"])
        assert not (on_board & ~alive).any(), "who left stays gone"
        assert (found["reward"][4:][~alive] == 0).all() and not found["ended"][4:][~alive].any()
        assert (found["ended"][4:] | ~alive | on_board).all(), "leaving is an end"
        done, cut = found["done"][4:], found["cut"][4:]
        over = done & ~cut
        assert (found["ended"][4:][over] | ~alive[over]).all(), "an episode's end is everybody's"
        assert (after[:, T] == before[:, T] + 1).all()
        age += 1
        assert (age <= horizon).all() and (done | (age < horizon)).all()
        start = world.states[4:][done]
        assert (start[:, None] == world.boards).all(2).any(1).all(), "a new game starts from a board of real play"
        assert (world.states[4:][~done] == after[~done]).all()
        age[done] = 0
        overs, cuts, left = overs + over.sum(), cuts + cut.sum(), left + (alive & ~on_board).sum()
        if not planes:
            codes = slice(PLAYERS + num_players, None)
            assert ((after[:, codes] == before[:, codes]) | (after[:, codes] == 0)).all(), "no item appears"
            rows, columns = np.divmod(np.stack([before, after])[:, :, PLAYERS : PLAYERS + num_players], 4)
            far = np.abs(np.diff(rows, axis=0)) + np.abs(np.diff(columns, axis=0))
            assert (far[0][on_board] <= 1).all(), "nobody moves two cells"
    assert cuts + overs > 0 and (planes or min(cuts, overs) > 0) and (planes or left > 0 or env_id != ID)


def test_the_perfect_world_is_the_game():
    env, mind = make_mind(50, perfect_model=True)
    for _ in range(30):
        actions = (np.random.default_rng(1).random(env.legal.shape) * env.legal).argmax(2)
        alive = env.alive.copy()
        ahead = mind.world.step(env.states.copy(), actions)
        _, reward, terminated, truncated, info = env.step(actions)
        assert (ahead.reward == reward).all() and (ahead.over == info["done"]).all()
        assert (ahead.ended == (terminated | truncated)).all() and not ahead.ended[~alive].any()
        assert (ahead.states[~info["done"]] == env.states[~info["done"]]).all()


def test_team_reward_is_shared_in_imagination(worlds):
    model = train_world_model.load_checkpoint(worlds[ID, False])[0]
    env, mind = make_mind(50, model)
    play_some(env)
    team = hop.World(hop.Args(prosocial=True), env.game, model)
    actions = (np.random.default_rng(1).random(env.legal.shape) * env.legal).argmax(2)
    own, shared = mind.world.step(env.states, actions), team.step(env.states, actions)
    assert np.allclose(shared.reward, np.where(env.alive, own.reward.mean(1, keepdims=True), 0.0))


# learning


def test_returns_by_hand():
    """gamma .5, lambda .5; columns: plays on, ends in step 1, an imagined game that is cut in step 1."""
    reward = np.array([[0.0, 0.0, 0.0], [4.0, 4.0, 4.0], [8.0, 8.0, 8.0]], np.float32)[:, None]
    value = np.array([[9.0, 9.0, 9.0], [2.0, 2.0, 2.0], [6.0, 6.0, 6.0]], np.float32)[:, None]
    next_value = np.concatenate([value[1:], np.full((1, 1, 3), 4.0, np.float32)])
    next_value[1, 0, 2] = 10.0  # of the board at which the game was cut
    ended, cut = np.zeros((3, 1, 3), bool), np.zeros((3, 1, 3), bool)
    ended[1, 0, 1] = cut[1, 0, 2] = True
    got = hop.lambda_returns(reward, value, next_value, ended, cut, 0.5, 0.5)
    # step 2: 8 + .5 * 4 = 10; step 1: 4 + .5 (.5 * 6 + .5 * 10) = 8 | 4 | 4 + .5 * 10 = 9
    # step 0: .5 (.5 * 2 + .5 * that) = 2.5 | 1.5 | 2.75
    assert np.allclose(got[:, 0], [[2.5, 1.5, 2.75], [8.0, 4.0, 9.0], [10.0, 10.0, 10.0]])


def own_rows(mind, env, planned: bool) -> dict[str, torch.Tensor]:
    """Decisions as the rollout stores them: (P, R, ...)"""
    mind.look(env)
    env_row, focal = np.nonzero(env.alive)
    policy, _, _, goals = mind.plan(env.states, env_row, focal, 4.0, planned)
    action = hop.draw_rows(policy, np.random.default_rng(0))
    each = np.arange(len(action))
    rng = np.random.default_rng(1)
    rows = {"ids": mind.things(env.obs[env_row, focal]), "t": mind.things.time(env.t)[env_row], "action": action}
    rows |= {"legal": env.legal[env_row, focal], "goals": goals.reshape(len(each), -1), "policy": policy}
    rows |= {"log_prob": np.log(policy[each, action]), "advantage": rng.normal(size=len(each)).astype(np.float32)}
    rows |= {"returns": rng.normal(size=len(each)).astype(np.float32)}
    return {name: torch.from_numpy(np.ascontiguousarray(x))[None] for name, x in rows.items()}


def test_the_ratio_is_to_the_policy_that_acted():
    """Unplanned rows: the raw policy acted, so the ratio is 1. Planned ones: it is raw / planned."""
    env, mind = make_mind(30, perfect_model=True)
    play_some(env)
    losses = hop.agent_loss(mind.args, mind.nets["agent"], own_rows(mind, env, planned=False), 0.0)
    assert abs(losses["approx_kl"].item()) < 1e-5 and losses["clipfrac"].item() == 0.0
    mb = own_rows(mind, env, planned=True)
    losses = hop.agent_loss(mind.args, mind.nets["agent"], mb, 0.0)
    log_probs, _ = mind.nets["agent"](mb["ids"], mb["t"], mb["legal"], mb["goals"])
    ratio = (log_probs.gather(2, mb["action"][:, :, None])[:, :, 0] - mb["log_prob"]).exp()
    assert (
        losses["clipfrac"].item() == pytest.approx(((ratio - 1).abs() > 0.2).float().mean().item()) and ratio.std() > 0
    )
    assert losses["plan_loss"].item() == pytest.approx(-(mb["policy"] * log_probs.clamp_min(-1e8)).sum(2).mean().item())


def test_every_loss_weight_changes_the_update():
    env, mind = make_mind(30, perfect_model=True)
    play_some(env)
    mb, agent = own_rows(mind, env, planned=True), mind.nets["agent"].requires_grad_(True)

    def gradient(ent_coef: float = 0.01, **settings):
        agent.zero_grad()
        losses = hop.agent_loss(hop.Args(**settings), agent, mb, ent_coef)
        sum(losses[name] for name in ("policy_loss", "value_loss", "plan_loss", "entropy_loss")).backward()
        return torch.cat([weight.grad.flatten() for weight in agent.parameters()])

    usual = gradient()
    for other in (gradient(0.1), gradient(ppo_coef=0.5), gradient(plan_coef=0.0), gradient(vf_coef=0.1)):
        assert not torch.equal(usual, other)
    mind.nets.requires_grad_(False)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_reward_scale_scales_what_is_learned(worlds, tmp_path, monkeypatch, scale):
    """Players that know nothing take hares, mostly alone, for a reward of 1."""
    rewards, returns = [], hop.lambda_returns

    def watch_returns(reward, *rest):
        rewards.append(reward[reward > 0])
        return returns(reward, *rest)

    monkeypatch.setattr(hop, "lambda_returns", watch_returns)
    flags = ("--total-timesteps", "384", "--eval-every", "0", "--world-ckpt", str(worlds[ID, False]))
    assert train_here(tmp_path / "run", *flags, "--reward-scale", str(scale)) == 0
    assert np.median(np.concatenate(rewards)) == scale


def test_models_are_scored_on_fresh_data_before_they_learn_from_it(worlds, tmp_path, monkeypatch):
    events = []
    score, learn = hop.score_world, hop.learn

    def watch_score(model, data):
        events.append(("score", data["states"].copy(), model.move_head.weight.detach().clone()))
        return score(model, data)

    def watch_learn(args, nets, optimizers, data, *rest):
        events.append(("learn", data["world"]["states"].copy(), nets["world"].move_head.weight.detach().clone()))
        return learn(args, nets, optimizers, data, *rest)

    monkeypatch.setattr(hop, "score_world", watch_score)
    monkeypatch.setattr(hop, "learn", watch_learn)
    flags = ("--total-timesteps", "192", "--eval-every", "0", "--world-ckpt", str(worlds[ID, False]))
    assert train_here(tmp_path / "run", *flags) == 0
    assert [kind for kind, *_ in events] == ["score", "learn"] * 3
    for (_, fresh, scored), (_, learned, about_to_learn) in zip(events[::2], events[1::2], strict=True):
        assert (learned[-len(fresh) :] == fresh).all() and torch.equal(scored, about_to_learn)
    assert not torch.equal(events[0][2], events[-1][2]), "it does learn"


def test_a_missing_world_model_is_made_first_and_said(worlds, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    wanted = []
    made = worlds[ID, False]
    monkeypatch.setattr(train_world_model, "train", lambda args: wanted.append(args) or made)
    assert hop.world_checkpoint(hop.Args(seed=4)) is not None
    assert wanted[0].env_id == ID and wanted[0].seed == 4 and not wanted[0].planes
    assert f"no world model for {ID} in vae_ckpts/" in capsys.readouterr().out
    assert hop.world_checkpoint(hop.Args(perfect_model=True)) is None
    assert hop.world_checkpoint(hop.Args(world_model=False)) is None


# whole runs


def test_a_run_leaves_what_it_should(finished):
    rows = read_metrics(finished)
    assert int(rows[-1]["global_step"]) == 512
    for name in ("charts/episodic_return", "charts/episodic_return-player4", "losses/policy_loss", "losses/plan_loss",
                 "losses/value_loss", "losses/world_loss", "losses/moa_loss", "moa/top1", "moa/top3", "wm/exact",
                 "wm/reward_mse", "wm/end_accuracy", "wm/impossible", "planner/kl", "eval/return", "eval/raw_return",
                 "planner/policy_gain", "goal/belief"):  # fmt: skip
        assert any(row[name] for row in rows), name
    result = json.loads((finished / "result.json").read_text())
    assert result["finished"] and result["global_step"] == 512 and result["eval"]["episodes"] == 8
    assert (finished / "curve.png").is_file() and list(finished.glob("events.out.tfevents.*"))
    for name in ("last", "best"):
        spec = json.loads((finished / "checkpoints" / name / "spec.json").read_text())
        assert spec["script"] == "hopplus_nomcts.py" and spec["env_id"] == ID


def test_a_stopped_run_resumes_to_the_same_bits(finished, worlds, tmp_path):
    run_dir = tmp_path / "stopped"
    command = [sys.executable, str(ROOT / "hopplus_nomcts.py"), "--run-dir", str(run_dir), *TINY]
    command += ["--world-ckpt", str(worlds[ID, False])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    while not (run_dir / "checkpoints" / "last" / "spec.json").exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 143 and f"--resume {run_dir}" in out, err
    resumed = hop.prepare(hop.Args(resume=str(run_dir)))
    assert hop.train(*resumed) == 0
    assert read_metrics(run_dir) == read_metrics(finished)
    for name in ("last", "best"):
        weights, expected = (load_file(d / "checkpoints" / name / "weights.safetensors") for d in (run_dir, finished))
        assert all(torch.equal(weights[key], expected[key]) for key in expected)


@pytest.mark.parametrize(
    ("env_id", "flags"),
    [
        (ID, ["--planes"]),
        (ID, ["--perfect-model", "--no-shared-policy"]),
        (ID, ["--no-world-model", "--goal-mode", "none"]),
        (ID, ["--real-ratio", "1.0", "--roles", "hop,ns,nh,hop", "--prosocial"]),
        ("msd-4x4", ["--real-ratio", "0.3"]),
    ],
)
def test_other_settings_run_and_resume(worlds, tmp_path, env_id, flags):
    world = [] if {"--perfect-model", "--no-world-model"} & {*flags} else [str(worlds[env_id, "--planes" in flags])]
    flags = [*flags, *(["--world-ckpt", *world] if world else []), "--env-id", env_id, "--total-timesteps", "320"]
    assert train_here(tmp_path / "run", *flags) == 0
    rows = read_metrics(tmp_path / "run")
    assert bool(rows[-1]["wm/exact"]) == bool(world)
    (tmp_path / "run" / "result.json").unlink()
    shorter = json.loads((tmp_path / "run" / "args.json").read_text())["args"] | {"resume": str(tmp_path / "run")}
    assert hop.train(hop.Args(**shorter | {"total_timesteps": 384}), tmp_path / "run") == 0
    assert int(read_metrics(tmp_path / "run")[-1]["global_step"]) == 384


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--real-ratio", "0"], "--real-ratio must be from 0.01 to 1, not 0"),
        (["--draws", "0"], "--draws must be at least 1, not 0"),
        (["--planes", "--perfect-model"], "--planes is a learned world model"),
        (["--roles", "ns,ns,ns,ns", "--goal-mode", "none"], "nobody to train"),
        (["--env-id", "smac-3m"], "unknown grid game 'smac-3m'"),
        (["--world-ckpt", "no/such", "--goal-mode", "none"], "no/such"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, flags, words):
    with pytest.raises(envs.ConfigError, match=re.escape(words)) as caught:
        hop.train(*hop.prepare(tyro.cli(hop.Args, args=["--run-dir", str(tmp_path / "x"), *flags])))
    assert "\n" not in str(caught.value) and not (tmp_path / "x").exists()


def test_a_model_of_the_wrong_kind_is_refused(worlds):
    with pytest.raises(envs.ConfigError, match="is a --planes world model, not a structured one"):
        hop.world_checkpoint(hop.Args(world_ckpt=str(worlds[ID, True])))
    with pytest.raises(envs.ConfigError, match="msd-4x4"):
        hop.world_checkpoint(hop.Args(world_ckpt=str(worlds["msd-4x4", False])))


def test_every_argument_is_explained():
    text = (ROOT / "hopplus_nomcts.py").read_text()
    for field in hop.fields(hop.Args):
        assert re.search(rf"    {field.name}: .*\n    \"\"\"", text), field.name


def test_a_checkpoint_plays_and_adapts(finished):
    env = envs.make(ID, num_envs=8, seed=9)
    policy = load_policy(str(finished), env, 2, seed=0, greedy=True)
    assert policy.planned and policy.adapt == "beliefs"
    assert np.take_along_axis(env.legal[:, 2], policy.act(env)[:, None], 1).all()
    args = evaluate.Args(adaptation=str(finished), runs=2)
    for how in ({"adapt": "beliefs"}, {"planned": False}, {"adapt": "online"}):
        returns = evaluate.adapt_among(args, str(finished), ["ns", "nh", "random"], {}, **how)
        assert returns.shape == (2, 30) and np.isfinite(returns).all()


def test_checkpoints_are_watched_and_pooled(finished, tmp_path):
    """Twice the same agent: pooled steps are those of both, each in games of its own; all kinds' beliefs sum to one."""
    again = shutil.copytree(finished, tmp_path / "again")
    files = {"csv": str(tmp_path / "b.csv"), "plot": str(tmp_path / "b.png")}
    agents = f"{finished},{again}"
    evaluate.main(evaluate.Args(beliefs=agents, runs=8, episodes=16, belief_roles="fixed", **files))
    with open(tmp_path / "b.csv", newline="") as file:
        steps = {row["agent"]: int(row["steps"]) for row in csv.DictReader(file) if row["actions seen"] == "all"}
    assert steps["all"] == steps[str(finished)] + steps[str(again)] and (tmp_path / "b.png").stat().st_size > 5000
    table = evaluate.watch_beliefs(evaluate.Args(runs=8, episodes=16), str(finished), {})
    believed = table["believed"][np.isfinite(table["exact"])]
    assert len(believed) and believed.min() >= 0 and believed.sum(1) == pytest.approx(1.0, abs=1e-5)
    rows = evaluate.adaptation(evaluate.Args(adaptation=agents, runs=2, line_ups="ns,nh,random"), {})
    for pooled, first, second in (rows[:3], rows[3:]):
        assert pooled["16-30"] == pytest.approx((first["16-30"] + second["16-30"]) / 2) and pooled["runs"] == 4


def test_what_both_scripts_share_reads_the_same():
    """Goals, beliefs, opponent model, goal inference, imagined co-players: line for line those of hopplus_mcts.py."""
    import ast

    def parts(name: str) -> dict[str, str]:
        text = (ROOT / name).read_text()
        found = {}
        for node in ast.parse(text).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                found[node.name] = ast.get_source_segment(text, node)
                for inner in node.body if isinstance(node, ast.ClassDef) else []:
                    if isinstance(inner, ast.FunctionDef):
                        found[f"{node.name}.{inner.name}"] = ast.get_source_segment(text, inner)
        return found

    here, there = parts("hopplus_nomcts.py"), parts("hopplus_mcts.py")
    same = "Things Agent OpponentModel GoalReader opponent_probs policy_value hypothesis_probs draw_goals".split()
    same += "DreamPlayers heading_for goals_of moa_loss reader_loss hide goal_encoder offline_play".split()
    same += "score_predictions save_checkpoint load_resume Metrics".split()
    planning = ("Mind.__init__", "Mind.plan", "Mind.goal_biases", "Policy.simulations")
    same += [name for name in there if name.startswith(("Mind.", "Policy.")) and name not in planning]
    assert [name for name in same if here.get(name) != there[name]] == []


def test_who_left_is_never_learned_from():
    """Rows of the opponent model and own decisions come from players on the board alone."""
    env, mind = make_mind(64, perfect_model=True)
    play_some(env, 8)
    mind.look(env)
    assert (mind.probs[~env.alive] == 0).all() and (env.states[:, PLAYERS : PLAYERS + 4][~env.alive] == GONE).all()
    probs = hop.score_predictions(mind.predict()[None], np.full((1, 64, 4), STAY), env.alive[None])
    assert np.isfinite(list(probs.values())).all()
