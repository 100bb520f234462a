"""ppo_baseline.py: the pieces against hand computations, and whole runs in subprocesses."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import envs
import ppo_baseline as ppo
from envs.roles import Seats, load_policy, play_episodes

ROOT = Path(__file__).resolve().parent.parent
TINY = ["--num-envs", "8", "--num-steps", "8", "--total-timesteps", "1280", "--eval-every", "320", "--hidden", "16",
        "--eval-episodes", "16", "--final-eval-episodes", "32", "--log-every", "3",
        "--checkpoint-every", "4"]  # fmt: skip
CLOCKS = ("wall_time", "charts/SPS", "time/env", "time/policy", "time/update", "time/eval")  # never the same twice


def run(*args: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "ppo_baseline.py"), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, **options)


def read_metrics(run_dir: Path) -> list[dict[str, str]]:
    with (run_dir / "metrics.csv").open(newline="") as file:
        return [{name: x for name, x in row.items() if name not in CLOCKS} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    done = run("--run-dir", str(run_dir), "--seed", "5", *TINY)
    assert done.returncode == 0, done.stderr
    return run_dir


# the pieces


def test_gae_against_a_hand_computation():
    """Three players: one terminates in step 1 (and is gone in step 2), one is truncated in step 1 and starts anew, one
    plays on. gamma 0.5, lambda 0.5."""
    reward = torch.tensor([[[0.0, 0.0, 1.0]], [[4.0, 2.0, 0.0]], [[9.0, 1.0, 1.0]]])  # (T=3, B=1, L=3)
    value = torch.tensor([[[1.0, 1.0, 1.0]], [[2.0, 2.0, 2.0]], [[9.0, 3.0, 3.0]]])
    next_value = torch.tensor([[[2.0, 2.0, 2.0]], [[9.0, 8.0, 3.0]], [[9.0, 4.0, 4.0]]])  # 8: of the final observation
    alive = torch.tensor([[[True, True, True]], [[True, True, True]], [[False, True, True]]])
    terminated = torch.tensor([[[False, False, False]], [[True, False, False]], [[False, False, False]]])
    truncated = torch.tensor([[[False, False, False]], [[False, True, False]], [[False, False, False]]])
    got = ppo.advantages_of(reward, value, next_value, alive, terminated, truncated, 0.5, 0.5)
    # player 0: step 1 ends by the rules: 4 - 2 = 2; step 0: 0 + .5*2 - 1 + .25*2 = 0.5; step 2: it had left
    # player 1: step 2: 1 + .5*4 - 3 = 0; step 1 bootstraps from 8, is cut: 2 + .5*8 - 2 = 4; step 0: 0 + 1 - 1 + 1 = 1
    # player 2: step 2: 1 + 2 - 3 = 0; step 1: 0 + 1.5 - 2 + 0 = -0.5; step 0: 1 + 1 - 1 - .125 = 0.875
    assert torch.equal(got[:, 0], torch.tensor([[0.5, 1.0, 0.875], [2.0, 4.0, -0.5], [0.0, 0.0, 0.0]]))


def make_agent(num_nets: int = 4, seed: int = 0, env_id: str = "msh-4h1s-4x4"):
    env = envs.make(env_id, num_envs=64, seed=3)
    things = ppo.Things(env.game)
    generator = torch.Generator().manual_seed(seed)
    return env, things, ppo.Agent(num_nets, things.num_ids, env.spec.num_actions, 32, generator)


def make_batch(env, things, agent, steps: int = 8, seed: int = 1) -> dict[str, torch.Tensor]:
    """A batch (T, B, L, ...) of real play with some players gone, as the rollout stores it."""
    generator = torch.Generator().manual_seed(seed)
    stored: dict[str, list] = {}
    for _ in range(steps):
        seen = ppo.look(things, env.obs, env.t, env.legal)
        with torch.no_grad():
            log_probs, values = ppo.forward(agent, seen)
        actions = ppo.sample(log_probs, generator)
        step = seen | {"alive": torch.from_numpy(env.alive.copy()), "actions": actions}
        step |= {"log_probs": log_probs.gather(2, actions[:, :, None])[:, :, 0], "values": values}
        for name, x in step.items():
            stored.setdefault(name, []).append(x.clone())
        env.step(actions.numpy())
    batch = {name: torch.stack(xs) for name, xs in stored.items()}
    shape = batch["values"].shape
    batch["advantages"] = torch.randn(shape, generator=generator) * batch["alive"]
    return batch | {"returns": batch["advantages"] + batch["values"]}


def nets_of(batch, num_nets):
    return {name: ppo.nets_first(x, num_nets) for name, x in batch.items()}


@pytest.mark.parametrize("shared", [False, True])
def test_ratio_is_exactly_one_on_the_first_minibatch(shared):
    env, things, agent = make_agent(1 if shared else 4)
    batch = nets_of(make_batch(env, things, agent), agent.num_nets)
    rows = torch.randperm(batch["ids"].shape[1], generator=torch.Generator().manual_seed(0))[:128]
    _, stats, ratio = ppo.ppo_loss(ppo.Args(), agent, {name: x[:, rows] for name, x in batch.items()}, 0.01)
    assert torch.equal(ratio, torch.ones_like(ratio))
    assert stats["approx_kl"] == 0.0 and stats["clipfrac"] == 0.0


def test_illegal_actions_have_probability_zero():
    env, things, agent = make_agent()
    for _ in range(20):
        legal = torch.from_numpy(env.legal.copy())
        with torch.no_grad():
            log_probs, _ = ppo.forward(agent, ppo.look(things, env.obs, env.t, env.legal))
        assert (log_probs.exp()[~legal] == 0).all() and (log_probs.exp()[legal] > 0).all()
        actions = ppo.sample(log_probs, torch.Generator().manual_seed(0))
        assert legal.gather(2, actions[:, :, None]).all()
        assert env.step(actions.numpy())[-1]["illegal_actions"].sum() == 0


def test_players_that_left_have_no_part_in_anything():
    """Garbage in the rows of players that left changes neither the loss, nor a statistic, nor a gradient."""
    env, things, agent = make_agent()
    batch = make_batch(env, things, agent, steps=12)
    gone = ~batch["alive"]
    assert 50 < gone.sum() < gone.numel() / 2
    garbage = {name: x.clone() for name, x in batch.items()}
    for name in ("advantages", "returns", "values", "log_probs"):
        garbage[name][gone] = 7.5
    garbage["actions"][gone] = 0
    garbage["legal"][gone] = True

    def loss_and_gradient(data):
        agent.zero_grad()
        loss, stats, _ = ppo.ppo_loss(ppo.Args(), agent, nets_of(data, 4), 0.05)
        loss.backward()
        return loss.item(), stats, [parameter.grad.clone() for parameter in agent.parameters()]

    loss, stats, gradients = loss_and_gradient(batch)
    other_loss, other_stats, other_gradients = loss_and_gradient(garbage)
    assert loss == other_loss and stats == other_stats
    assert all(torch.equal(a, b) for a, b in zip(gradients, other_gradients, strict=True))
    garbage["advantages"][~gone] += 1.0  # the comparison is not blind: a row of a player on the board matters
    garbage["returns"][~gone] += 1.0
    assert loss_and_gradient(garbage)[0] != loss


def test_permuting_players_permutes_what_is_learned():
    """Exactly, after a whole first update: nets, data and all statistics of a learner do not depend on its seat."""
    order = [2, 0, 3, 1]
    args = ppo.Args(hidden=32)
    learned = []
    for permute in (False, True):
        env, things, agent = make_agent()
        batch = make_batch(env, things, agent)
        if permute:
            batch = {name: x[:, :, order] for name, x in batch.items()}
            agent.load_state_dict({name: weight[order] for name, weight in agent.state_dict().items()})
        optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3, eps=1e-5, foreach=True)
        before = {name: weight.clone() for name, weight in agent.state_dict().items()}
        ppo.update(args, agent, optimizer, nets_of(batch, 4), 0.02, torch.Generator().manual_seed(4))
        assert all(not torch.equal(before[name], weight) for name, weight in agent.state_dict().items())
        learned.append(agent.state_dict())
    for name, weight in learned[0].items():
        assert torch.equal(weight[order], learned[1][name]), name


def test_a_net_sees_the_same_from_every_seat():
    """Own-first planes: a board with the players' places rotated looks the same from the rotated seat."""
    env, things, _ = make_agent()
    states = env.states.copy()
    env.set_states(states)
    first = things(env.obs)[:, 0]
    rotated = states.copy()
    rotated[:, 2:6] = states[:, [5, 2, 3, 4]]  # who sat in seat 0 sits in seat 1
    env.set_states(rotated)
    assert torch.equal(things(env.obs)[:, 1], first)


def test_things_tell_boards_apart():
    """The ids hold everything that the planes hold: distinct observations, distinct sets of ids."""
    env, things, _ = make_agent()
    ids = things(env.obs).reshape(-1, things.most)
    planes = env.obs.reshape(len(ids), -1)
    by_ids = {tuple(sorted(row.tolist())) for row in ids}
    assert len(by_ids) == len({row.tobytes() for row in planes})


def test_learners_gradients_are_clipped_apart():
    _, _, agent = make_agent(2)
    for parameter in agent.parameters():
        parameter.grad = torch.ones_like(parameter)
        parameter.grad[0] *= 100.0
        parameter.grad[1] *= 1e-6
    ppo.clip_gradients(agent, 0.5)
    norm = torch.stack([p.grad.flatten(1).norm(dim=1) for p in agent.parameters()]).norm(dim=0)
    assert norm[0].item() == pytest.approx(0.5, rel=1e-4)
    assert agent.value_bias.grad[1].item() == pytest.approx(1e-6)


# whole runs


def test_a_run_leaves_what_it_should(finished):
    rows = read_metrics(finished)
    assert [int(row["global_step"]) for row in rows][-1] == 1280
    assert sum(bool(row["eval/return"]) for row in rows) == 4
    for name in ("charts/episodic_return", "charts/episodic_return-player4", "charts/stag_rate", "charts/hare_rate",
                 "charts/episodic_length", "charts/learning_rate", "losses/policy_loss", "losses/value_loss",
                 "losses/entropy", "losses/approx_kl", "losses/clipfrac", "losses/explained_variance"):  # fmt: skip
        assert name in rows[-1]
    result = json.loads((finished / "result.json").read_text())
    assert result["finished"] and result["global_step"] == 1280
    assert json.loads((finished / "args.json").read_text())["args"]["seed"] == 5
    assert (finished / "curve.png").stat().st_size > 5000
    assert list(finished.glob("events.out.tfevents.*"))
    for name in ("last", "best"):
        spec = json.loads((finished / "checkpoints" / name / "spec.json").read_text())
        assert spec["script"] == "ppo_baseline.py" and spec["env_id"] == "msh-4h1s-4x4"
    tests = [float(row["eval/return"]) for row in rows if row["eval/return"]]
    best = json.loads((finished / "checkpoints" / "best" / "spec.json").read_text())
    assert best["eval"]["return"] == max(tests)


def test_same_command_same_scalars(finished, tmp_path):
    assert run("--run-dir", str(tmp_path / "again"), "--seed", "5", *TINY).returncode == 0
    assert read_metrics(tmp_path / "again") == read_metrics(finished)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_resumes_to_the_same_bits(finished, tmp_path, how):
    run_dir = tmp_path / "stopped"
    command = [sys.executable, str(ROOT / "ppo_baseline.py"), "--run-dir", str(run_dir), "--seed", "5", *TINY]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    deadline = time.time() + 200
    while not (run_dir / "checkpoints" / "last" / "spec.json").exists() and process.poll() is None:
        assert time.time() < deadline
        time.sleep(0.005)
    process.send_signal(how)
    out, err = process.communicate(timeout=100)
    if how == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 128 + how, err
        assert f"--resume {run_dir}" in out
    assert not (run_dir / "result.json").exists()
    resumed = run("--resume", str(run_dir))
    assert resumed.returncode == 0, resumed.stderr
    assert read_metrics(run_dir) == read_metrics(finished)
    for name in ("last", "best"):
        weights, expected = (load_file(d / "checkpoints" / name / "weights.safetensors") for d in (run_dir, finished))
        assert all(torch.equal(weights[key], expected[key]) for key in expected)
    result, expected = (json.loads((d / "result.json").read_text()) for d in (run_dir, finished))
    assert result["eval"] == expected["eval"]
    again = run("--resume", str(run_dir))
    assert again.returncode == 0 and "finished already" in again.stdout


def test_a_run_killed_before_its_first_checkpoint_resumes_from_the_start(finished, tmp_path):
    run_dir = tmp_path / "early"
    run_dir.mkdir()
    args = json.loads((finished / "args.json").read_text())
    (run_dir / "args.json").write_text(json.dumps(args))
    (run_dir / "metrics.csv").write_text("global_step,wall_time\n64,1.0\n12")  # a row and a half, then the kill
    assert run("--resume", str(run_dir)).returncode == 0
    assert read_metrics(run_dir) == read_metrics(finished)


def test_a_kill_between_the_two_renames_loses_nothing(finished, tmp_path):
    folder = tmp_path / "checkpoints" / "last.new"
    folder.mkdir(parents=True)
    for file in (finished / "checkpoints" / "last").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights, _, spec = ppo.load_resume(tmp_path)
    assert spec["global_step"] == 1280 and "embedding" in weights


def test_nan_stops_the_run_and_keeps_the_checkpoint(finished, tmp_path):
    run_dir = tmp_path / "nan"
    (run_dir / "checkpoints").mkdir(parents=True)
    args = json.loads((finished / "args.json").read_text())
    args["args"] |= {"total_timesteps": 2560, "learning_rate": 1e30, "anneal_lr": False, "max_grad_norm": 1e30}
    (run_dir / "args.json").write_text(json.dumps(args))
    done = run("--resume", str(run_dir))
    assert done.returncode == 1
    assert re.search(r"stopped after step \d+: the loss became", done.stderr) and "Traceback" not in done.stderr
    for weights in (run_dir / "checkpoints").glob("*/weights.safetensors"):
        assert all(torch.isfinite(weight).all() for weight in load_file(weights).values())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--env-id", "msh-9x9"], ["unknown grid game 'msh-9x9'", "msh-4h1s-4x4"]),
        (["--env-id", "smac-3m"], ["unknown grid game 'smac-3m'"]),
        (["--roles", "ppo,ns"], ["all 4 players", "names 2"]),
        (["--roles", "ppo,ns,nx,ns"], ["unknown role 'nx'", "random, ns, nh, fix, mix"]),
        (["--roles", "ns,ns,ns,ns"], ["nobody to train"]),
        (["--num-envs", "0"], ["--num-envs must be at least 1"]),
        (["--start-window", "2"], ["2x2 cannot hold 5 items"]),
        (["--resume", "no/such/run"], ["no/such/run", "no args.json"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, words, tmp_path):
    done = run(*arguments, *([] if "--resume" in arguments else ["--run-dir", str(tmp_path / "x")]))
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert all(word in done.stderr for word in words), done.stderr
    assert not (tmp_path / "x").exists()


def test_a_run_folder_is_never_overwritten(finished):
    done = run("--run-dir", str(finished), *TINY)
    assert done.returncode == 2 and "already holds a run" in done.stderr


def test_flags_parse_as_said():
    """`--flag` turns on, `--no-flag` turns off, and `--flag False` is refused rather than read as on."""
    import tyro

    assert tyro.cli(ppo.Args, args=["--shared-policy", "--no-anneal-lr"]).shared_policy
    assert not tyro.cli(ppo.Args, args=["--no-anneal-lr"]).anneal_lr
    with pytest.raises(SystemExit):
        tyro.cli(ppo.Args, args=["--shared-policy", "False"])


def test_every_argument_is_explained():
    text = (ROOT / "ppo_baseline.py").read_text()
    for field in ppo.fields(ppo.Args):
        assert re.search(rf"    {field.name}: .*\n    \"\"\"", text), field.name


# roles and evaluation


def test_a_checkpoint_is_a_role(finished, tmp_path):
    roles = f"{finished},ns,ppo,{finished / 'checkpoints' / 'last'}@2"
    done = run("--roles", roles, "--run-dir", str(tmp_path / "mixed"), *TINY)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "mixed" / "checkpoints" / "last" / "spec.json").read_text())["learners"] == [2]


def test_a_loaded_policy_is_the_trained_net(finished):
    env = envs.make("msh-4h1s-4x4", num_envs=32, seed=9)
    weights = load_file(finished / "checkpoints" / "best" / "weights.safetensors")
    for seat, role, net in ((0, str(finished), 0), (2, str(finished), 2), (2, f"{finished}@4", 3)):
        policy = load_policy(role, env, seat, seed=0, greedy=True)
        assert torch.equal(policy.agent.policy_head[0], weights["policy_head"][net])
        legal = np.take_along_axis(env.legal[:, seat], policy.act(env)[:, None], 1)
        assert legal.all()


def cut_off(folder: Path) -> None:
    (folder / "weights.safetensors").write_bytes((folder / "weights.safetensors").read_bytes()[:-9])


def name_another_script(folder: Path) -> None:
    text = (folder / "spec.json").read_text()
    (folder / "spec.json").write_text(text.replace("ppo_baseline.py", "../evil.py"))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda folder: (folder / "spec.json").write_text("{"), "spec.json of checkpoint"),
        (lambda folder: (folder / "weights.safetensors").write_bytes(bytes(50)), "cannot be loaded"),
        (cut_off, "cannot be loaded"),
        (lambda folder: save_file({"x": torch.zeros(2)}, folder / "weights.safetensors"), "cannot be loaded"),
        (name_another_script, "not in this project"),
    ],
)
def test_broken_checkpoints_are_refused_in_one_sentence(finished, tmp_path, harm, words):
    for file in (finished / "checkpoints" / "best").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    harm(tmp_path)
    env = envs.make("msh-4h1s-4x4", num_envs=2)
    with pytest.raises(envs.ConfigError, match=words) as caught:
        load_policy(str(tmp_path), env, 0, seed=0)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_of_another_board_is_refused(finished):
    env = envs.make("msh-4h1s-8x8", num_envs=2)
    with pytest.raises(envs.ConfigError, match=r"trained on msh-4h1s-4x4 with obs_shape \[4, 4, 7\], .* \[8, 8, 7\]"):
        load_policy(str(finished), env, 0, seed=0)


def test_evaluate_prints_and_writes_the_same_table(finished, tmp_path):
    command = [sys.executable, str(ROOT / "evaluate.py"), "--roles", f"{finished},ns,nh,random", "--episodes", "200",
               "--json", str(tmp_path / "e.json"), "--csv", str(tmp_path / "e.csv"),
               "--gif", str(tmp_path / "e.gif")]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "e.json").read_text())["rows"]
    assert [row["role"] for row in rows] == [str(finished), "ns", "nh", "random", "everybody"]
    assert rows[-1]["return"] == pytest.approx(np.mean([row["return"] for row in rows[:4]]))
    for row in rows[:4]:
        assert row["stag_rate"] + row["hare_rate"] + row["nothing_rate"] == pytest.approx(1.0)
        assert f"{row['return']:.3f}" in done.stdout
    with (tmp_path / "e.csv").open(newline="") as file:
        assert [float(row["return"]) for row in csv.DictReader(file)] == [row["return"] for row in rows]
    assert (tmp_path / "e.gif").read_bytes()[:3] == b"GIF"


def test_rotating_seats_gives_each_role_each_seat():
    from evaluate import Args, evaluate

    roles = "ns,nh,random,fix"
    rows = evaluate(Args(roles=roles, episodes=500, rotate_seats=True, seed=1), {})
    parts = []
    for turn, seating in enumerate(("ns,nh,random,fix", "fix,ns,nh,random", "random,fix,ns,nh", "nh,random,fix,ns")):
        env = envs.make("msh-4h1s-4x4", num_envs=500, seed=1 + turn)
        played = play_episodes(env, Seats(env, seating.split(","), None, 1 + turn))
        parts.append(played.returns[:, (1 + turn) % 4].mean())
    assert rows[1]["role"] == "nh" and rows[1]["episodes"] == 2000
    assert rows[1]["return"] == pytest.approx(np.mean(parts))
    assert rows[3]["role"] == "fix" and rows[3]["return"] == 0.0


@pytest.mark.slow
def test_symmetric_learners_earn_alike(tmp_path):
    """No index bias: over five short runs the mean return of each seat agrees with the others within noise."""
    returns = []
    for seed in range(1, 6):
        done = run("--run-dir", str(tmp_path / str(seed)), "--seed", str(seed), "--total-timesteps", "60000",
                   env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
        assert done.returncode == 0
        scores = json.loads((tmp_path / str(seed) / "result.json").read_text())["eval"]
        returns.append([scores[f"return-player{i}"] for i in range(1, 5)])
    apart = np.array(returns) - np.mean(returns, axis=1, keepdims=True)
    assert (np.abs(apart.mean(0)) < 3 * apart.std(0) / 5**0.5 + 0.02).all()
