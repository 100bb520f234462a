"""ppo_baseline.py: the pieces against hand computations, and whole runs. Resume, stops, damage and bad input are the
recorder's and are tried in test_run.py for every script."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import envs
import ppo_baseline as ppo
from envs.checkpoints import digest_of
from envs.roles import Seats, load_policy, play_episodes
from envs.run import main
from envs.sight import Things

ROOT = Path(__file__).resolve().parent.parent
TINY = ["--num-envs", "8", "--num-steps", "8", "--total-timesteps", "1280", "--eval-every", "320", "--hidden-size",
        "16", "--eval-episodes", "16", "--final-eval-episodes", "32", "--log-every", "3",
        "--checkpoint-every", "4"]  # fmt: skip
CLOCKS = ("wall_time", "charts/SPS", "time/env", "time/policy", "time/update", "time/eval")  # never the same twice


def run(*args: str) -> int:
    return main(ppo.Args, ppo.train, list(args))


def read_metrics(run_dir: Path) -> list[dict[str, str]]:
    with (run_dir / "metrics.csv").open(newline="") as file:
        return [{name: x for name, x in row.items() if name not in CLOCKS} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    assert run("--run-dir", str(run_dir), "--seed", "5", *TINY) == 0
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


def make_agents(num_agents: int = 4, seed: int = 0):
    env = envs.make("msh-4h1s-4x4", num_envs=64, seed=3)
    things, args = Things(env.game), ppo.Args(hidden_size=32, shared_policy=num_agents == 1)
    return env, things, ppo.make_agents(args, things, env.spec.num_actions, num_agents, seed)


def make_batch(env, things, agents, steps: int = 8, seed: int = 1) -> dict[str, torch.Tensor]:
    """A batch (T, B, L, ...) of real play with some players gone, as the rollout stores it."""
    generator = torch.Generator().manual_seed(seed)
    stored: dict[str, list] = {}
    for _ in range(steps):
        seen = ppo.look(things, env.obs, env.t, env.legal)
        with torch.no_grad():
            log_probs, values = ppo.forward(agents, seen)
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


def rows_of(batch, num_agents):
    return {name: ppo.rows_of_agents(x, num_agents) for name, x in batch.items()}


@pytest.mark.parametrize("num_agents", [1, 4])
def test_ratio_is_exactly_one_on_the_first_minibatch(num_agents):
    env, things, agents = make_agents(num_agents)
    batch = rows_of(make_batch(env, things, agents), num_agents)
    rows = torch.randperm(batch["ids"].shape[1], generator=torch.Generator().manual_seed(0))[:128]
    _, stats, ratio = ppo.ppo_loss(ppo.Args(), agents, {name: x[:, rows] for name, x in batch.items()}, 0.01)
    assert torch.equal(ratio, torch.ones_like(ratio))
    assert stats["approx_kl"] == 0.0 and stats["clipfrac"] == 0.0


def test_illegal_actions_have_probability_zero():
    env, things, agents = make_agents()
    for _ in range(20):
        legal = torch.from_numpy(env.legal.copy())
        with torch.no_grad():
            log_probs, _ = ppo.forward(agents, ppo.look(things, env.obs, env.t, env.legal))
        assert (log_probs.exp()[~legal] == 0).all() and (log_probs.exp()[legal] > 0).all()
        actions = ppo.sample(log_probs, torch.Generator().manual_seed(0))
        assert legal.gather(2, actions[:, :, None]).all()
        assert env.step(actions.numpy())[-1]["illegal_actions"].sum() == 0


def test_each_learner_is_played_by_its_own_agent():
    """One agent for each column, in order; with a shared policy one for all."""
    env, things, agents = make_agents()
    seen = ppo.look(things, env.obs, env.t, env.legal)
    with torch.no_grad():
        log_probs, values = ppo.forward(agents, seen)
        for k, agent in enumerate(agents):
            alone = agent(seen["ids"][:, k], seen["t"][:, k], seen["legal"][:, k])
            assert torch.equal(alone[0], log_probs[:, k]) and torch.equal(alone[1], values[:, k])
        shared, _ = ppo.forward(agents[:1], seen)
        assert torch.equal(shared[:, 0], log_probs[:, 0]) and not torch.equal(shared[:, 1], log_probs[:, 1])


def test_players_that_left_have_no_part_in_anything():
    """Garbage in the rows of players that left changes neither the loss, nor a statistic, nor a gradient."""
    env, things, agents = make_agents()
    batch = make_batch(env, things, agents, steps=12)
    gone = ~batch["alive"]
    assert 50 < gone.sum() < gone.numel() / 2
    garbage = {name: x.clone() for name, x in batch.items()}
    for name in ("advantages", "returns", "values", "log_probs"):
        garbage[name][gone] = 7.5
    garbage["actions"][gone] = 0
    garbage["legal"][gone] = True

    def loss_and_gradient(data):
        agents.zero_grad()
        loss, stats, _ = ppo.ppo_loss(ppo.Args(), agents, rows_of(data, 4), 0.05)
        loss.backward()
        return loss.item(), stats, [parameter.grad.clone() for parameter in agents.parameters()]

    loss, stats, gradients = loss_and_gradient(batch)
    other_loss, other_stats, other_gradients = loss_and_gradient(garbage)
    assert loss == other_loss and stats == other_stats
    assert all(torch.equal(a, b) for a, b in zip(gradients, other_gradients, strict=True))
    garbage["advantages"][~gone] += 1.0  # the comparison is not blind: a row of a player on the board matters
    garbage["returns"][~gone] += 1.0
    assert loss_and_gradient(garbage)[0] != loss


def test_permuting_players_permutes_what_is_learned():
    """Exactly, after a whole first update: agent, data and all statistics of a learner do not depend on its seat."""
    order = [2, 0, 3, 1]
    learned = []
    for permute in (False, True):
        env, things, agents = make_agents()
        batch = make_batch(env, things, agents)
        if permute:
            batch = {name: x[:, :, order] for name, x in batch.items()}
            agents = torch.nn.ModuleList(agents[k] for k in order)
        optimizer = torch.optim.Adam(agents.parameters(), lr=1e-3, eps=1e-5, fused=True)
        before = {name: weight.clone() for name, weight in agents.state_dict().items()}
        ppo.update(
            ppo.Args(hidden_size=32), agents, optimizer, rows_of(batch, 4), 0.02, torch.Generator().manual_seed(4)
        )
        assert all(not torch.equal(before[name], weight) for name, weight in agents.state_dict().items())
        learned.append([agent.state_dict() for agent in agents])
    for k, seat in enumerate(order):
        for name, weight in learned[1][k].items():
            assert torch.equal(weight, learned[0][seat][name]), name


def test_an_empty_slot_is_nothing():
    """Id 0 fills up rows: it changes no output and has no weights that could learn."""
    env, things, agents = make_agents(1)
    seen = {name: x[:, 0] for name, x in ppo.look(things, env.obs, env.t, env.legal).items()}
    longer = seen | {"ids": torch.nn.functional.pad(seen["ids"], (0, 5))}
    assert (longer["ids"] == 0).any() and agents[0].embedding.shape[0] == things.num_ids
    for one, other in zip(agents[0](**seen), agents[0](**longer), strict=True):
        assert torch.equal(one, other)
    agents[0](**longer)[1].sum().backward()
    touched = agents[0].embedding.grad.any(1).nonzero()[:, 0]
    assert set(touched.tolist()) <= set(seen["ids"].flatten().tolist()) - {0}


def test_a_net_sees_the_same_from_every_seat():
    """Own-first planes: a board with the players' places rotated looks the same from the rotated seat."""
    env, things, _ = make_agents()
    states = env.states.copy()
    env.set_states(states)
    first = things(env.obs)[:, 0]
    rotated = states.copy()
    rotated[:, 2:6] = states[:, [5, 2, 3, 4]]  # who sat in seat 0 sits in seat 1
    env.set_states(rotated)
    assert np.array_equal(things(env.obs)[:, 1], first)


def test_things_tell_boards_apart():
    """The ids hold everything that the planes hold: distinct observations, distinct sets of ids."""
    env, things, _ = make_agents()
    ids = things(env.obs).reshape(-1, things.most)
    planes = env.obs.reshape(len(ids), -1)
    by_ids = {tuple(sorted(row.tolist())) for row in ids}
    assert len(by_ids) == len({row.tobytes() for row in planes})


def test_learners_gradients_are_clipped_apart():
    """A learner with huge rewards does not shrink the step of another."""
    env, things, agents = make_agents()
    batch = rows_of(make_batch(env, things, agents), 4)
    args, learned = ppo.Args(hidden_size=32, update_epochs=1, num_minibatches=1), []
    for huge in (False, True):
        _, _, agents = make_agents()
        optimizer = torch.optim.SGD(agents.parameters(), lr=0.1)
        batch["returns"][0] += 1e4 * huge
        ppo.update(args, agents, optimizer, batch, 0.0, torch.Generator().manual_seed(0))
        norm = sum(parameter.grad.norm() ** 2 for parameter in agents[0].parameters()) ** 0.5
        learned.append(agents[1].state_dict())
    assert norm.item() == pytest.approx(args.max_grad_norm, rel=1e-3)
    assert all(torch.equal(weight, learned[1][name]) for name, weight in learned[0].items())


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
    assert best["best"] == [max(tests)] and best["eval"]["return"] + best["eval"]["return_ci95"] >= max(tests)


def test_same_command_same_scalars(finished, tmp_path):
    assert run("--run-dir", str(tmp_path / "again"), "--seed", "5", *TINY) == 0
    assert read_metrics(tmp_path / "again") == read_metrics(finished)
    assert run("--run-dir", str(tmp_path / "other"), "--seed", "6", *TINY) == 0
    assert read_metrics(tmp_path / "other") != read_metrics(finished)


def test_a_loss_that_is_no_number_stops_the_update():
    env, things, agents = make_agents()
    batch = rows_of(make_batch(env, things, agents), 4)
    batch["returns"][2, 5] = torch.inf
    optimizer = torch.optim.Adam(agents.parameters())
    before = [weight.clone() for weight in agents.parameters()]
    with pytest.raises(FloatingPointError, match="the loss became"):
        ppo.update(ppo.Args(num_minibatches=1), agents, optimizer, batch, 0.0, torch.Generator())
    assert all(torch.equal(one, other) for one, other in zip(before, agents.parameters(), strict=True))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--env-id", "msh-9x9"], ["unknown env id 'msh-9x9'", "msh-4h1s-4x4"]),
        (["--env-id", "smac-3m"], ["'smac-3m' is a battle", "mappo_hyper.py"]),
        (["--roles", "ppo,ns"], ["all 4 players", "names 2"]),
        (["--roles", "ppo,ns,nx,ns"], ["unknown role 'nx'", "random, ns, nh, fix, mix"]),
        (["--roles", "ns,ns,ns,ns"], ["nobody to train"]),
        (["--start-window", "2"], ["2x2 cannot hold 5 items"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, words, tmp_path, capsys):
    assert run(*arguments, "--run-dir", str(tmp_path / "x")) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and all(word in text for word in words), text
    assert not (tmp_path / "x").exists()


# roles and evaluation


def test_a_checkpoint_is_a_role(finished, tmp_path):
    roles = f"{finished},ns,ppo,{finished / 'checkpoints' / 'last'}@2"
    assert run("--roles", roles, "--run-dir", str(tmp_path / "mixed"), *TINY) == 0
    assert json.loads((tmp_path / "mixed" / "checkpoints" / "last" / "spec.json").read_text())["learners"] == [2]


def test_a_loaded_policy_is_the_trained_agent(finished):
    env = envs.make("msh-4h1s-4x4", num_envs=32, seed=9)
    weights = load_file(finished / "checkpoints" / "best" / "weights.safetensors")
    for seat, role, number in ((0, str(finished), 0), (2, str(finished), 2), (2, f"{finished}@4", 3)):
        policy = load_policy(role, env, seat, seed=0, greedy=True)
        assert torch.equal(policy.agent.policy_head.weight, weights[f"{number}.policy_head.weight"])
        legal = np.take_along_axis(env.legal[:, seat], policy.act(env)[:, None], 1)
        assert legal.all()


def test_a_shared_policy_plays_every_seat(tmp_path):
    assert run("--run-dir", str(tmp_path / "shared"), *TINY, "--shared-policy") == 0
    env = envs.make("msh-4h1s-4x4", num_envs=8, seed=9)
    one, other = (load_policy(f"{tmp_path / 'shared'}{which}", env, 3, seed=0) for which in ("", "@2"))
    assert len(load_file(tmp_path / "shared/checkpoints/last/weights.safetensors")) == len(one.agent.state_dict())
    assert np.array_equal(one.act(env), other.act(env))


def cut_off(folder: Path) -> None:
    (folder / "weights.safetensors").write_bytes((folder / "weights.safetensors").read_bytes()[:-9])


def name_another_script(folder: Path) -> None:
    """With a checksum that fits: somebody meant to."""
    spec = json.loads((folder / "spec.json").read_text()) | {"script": "../evil.py"}
    spec["sha256"]["spec.json"] = digest_of(spec)
    (folder / "spec.json").write_text(json.dumps(spec))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda folder: (folder / "spec.json").write_text("{"), "spec.json"),
        (lambda folder: (folder / "weights.safetensors").write_bytes(bytes(50)), "weights.safetensors' is damaged"),
        (cut_off, "weights.safetensors' is damaged"),
        (name_another_script, "nor in the project's root"),
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
        assert run("--run-dir", str(tmp_path / str(seed)), "--seed", str(seed), "--total-timesteps", "60000") == 0
        scores = json.loads((tmp_path / str(seed) / "result.json").read_text())["eval"]
        returns.append([scores[f"return-player{i}"] for i in range(1, 5)])
    apart = np.array(returns) - np.mean(returns, axis=1, keepdims=True)
    assert (np.abs(apart.mean(0)) < 3 * apart.std(0) / 5**0.5 + 0.02).all()
