"""mappo_hyper.py: the old troubles of this algorithm one by one, the pieces against hand computations, whole runs."""

import copy
import csv
import json
import re
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
import mappo_hyper as mh
from envs.roles import Seats, load_policy, play_episodes

ROOT = Path(__file__).resolve().parent.parent
TINY = ["--num-envs", "8", "--num-steps", "16", "--chunk-length", "8", "--total-timesteps", "1280", "--hidden", "16",
        "--critic-hidden", "16", "--hyper-hidden", "8", "--eval-every", "384", "--eval-episodes", "8",
        "--log-every", "3", "--final-eval-episodes", "16", "--checkpoint-every", "4",
        "--target-every", "30"]  # fmt: skip
CLOCKS = ("wall_time", "charts/SPS", "time/env", "time/policy", "time/update", "time/eval")  # never the same twice
SMALL = {"num_envs": 12, "num_steps": 48, "chunk_length": 16, "hidden": 32, "critic_hidden": 32, "hyper_hidden": 16,
         "update_epochs": 1, "num_minibatches": 3}  # fmt: skip
VARIANTS = {
    "mappo": {"hyper": False}, "joint": {}, "shared": {"hyper_share": True}, "local": {"hyper_input": "local"},
    "id": {"hyper_input": "id"}, "all": {"hyper_layers": "all"}, "whole matrices": {"hyper_rank": 0},
    "cumulative": {"delta": "cumulative"}, "no attention": {"hyper_attention": False},
    "no history": {"hyper_history": False}, "hyper ids": {"hyper_agent_id": True, "hyper_input": "local"},
    "perturbed": {"perturbation": 0.3}, "plain": {"layer_norm": False, "agent_id": False},
}  # fmt: skip
HYPERS = [name for name in VARIANTS if name != "mappo"]
needs_mpe = pytest.mark.skipif(not __import__("importlib.util").util.find_spec("mpe2"), reason="mpe2 is not installed")


def run(*args: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "mappo_hyper.py"), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, **options)


def read_metrics(run_dir: Path) -> list[dict[str, str]]:
    with (run_dir / "metrics.csv").open(newline="") as file:
        return [{name: x for name, x in row.items() if name not in CLOCKS} for row in csv.DictReader(file)]


def make(env_id: str = "smac-3m", seed: int = 0, **settings):
    """Settings, game and agent; the hypernetwork's output is made large enough to matter."""
    args = mh.Args(env_id=env_id, **(SMALL | settings))
    game = mh.Game(mh.make_env(args, args.num_envs, 3))
    agent = mh.Agent(args, game, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        agent.actor.layers[2].weight *= 50  # a policy with a will of its own
        if agent.hyper is not None:
            for output in agent.hyper.outputs:
                output.weight *= 30
    return args, game, agent


def make_batch(args, game, agent, seed: int = 1, target=None):
    """Real play as the rollout stores it, in chunks (L, C, ...), and the memory at their starts."""
    team = mh.Team(agent, game, torch.Generator().manual_seed(seed))
    stored, starts = {}, {}
    for step in range(args.num_steps):
        if step % args.chunk_length == 0:
            for name, x in team.states.items():
                starts.setdefault(name, []).append(x)
        seen, policy, actions = team.decide(args.perturbation)
        with torch.no_grad():
            values, memory = agent.critic(seen, team.states.get("critic"))
        if memory is not None:
            team.states["critic"] = memory
        seen |= {"policy": policy, "actions": actions, "values": values}
        seen |= {"log_probs": mh.log_prob_of(policy, actions, game.continuous)}
        for name, x in seen.items():
            stored.setdefault(name, []).append(x[0].clone())
        orders = game.orders(actions[0])
        team.watch(game.env, orders, game.env.step(orders)[-1])
    batch = {name: torch.stack(xs) for name, xs in stored.items()}
    generator = torch.Generator().manual_seed(seed)
    batch["advantages"] = torch.randn(batch["values"].shape, generator=generator)
    batch["returns"] = batch["advantages"] + batch["values"]
    batch["counted"] = torch.ones_like(batch["values"], dtype=torch.bool) if game.team else batch["alive"]
    with torch.no_grad():
        states = agent.start(args.num_envs)
        batch["reference"] = agent.policy(batch, states, args.perturbation, target)[0]
    chunks = {name: mh.chunks_of(x, args.chunk_length) for name, x in batch.items()}
    return chunks, {name: torch.stack(xs).flatten(0, 1) for name, xs in starts.items()}


def some(batch, states, count: int = 20, seed: int = 0):
    """A minibatch of chunks in a random order."""
    rows = torch.randperm(batch["first"].shape[1], generator=torch.Generator().manual_seed(seed))[:count]
    return {name: x.index_select(1, rows) for name, x in batch.items()}, {name: x[rows] for name, x in states.items()}


def learn(args, agent, batch, states, lr=1e-3, hyper_lr=1e-3):
    """The weights after one whole update."""
    agent = copy.deepcopy(agent)
    parts = [(agent.actor, lr), (agent.critic, lr), (agent.hyper, hyper_lr)]
    groups = [{"params": list(part.parameters()), "lr": rate} for part, rate in parts if part is not None]
    optimizer = torch.optim.Adam(groups, eps=1e-5, foreach=True)
    mh.update(args, agent, optimizer, batch, states, 0.01, args.perturbation, torch.Generator().manual_seed(5))
    return agent.state_dict()


def same(a: dict, b: dict) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a.keys() & b.keys())


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    done = run("--run-dir", str(run_dir), "--seed", "5", *TINY)
    assert done.returncode == 0, done.stderr
    return run_dir


# the old troubles


@pytest.mark.parametrize("variant", HYPERS)
def test_switching_the_hypernetwork_on_changes_logits(variant):
    args, game, agent = make(**VARIANTS[variant])
    batch, states = make_batch(args, game, agent)
    with torch.no_grad():
        with_it = agent.policy(batch, states)[0]
        agent.hyper = None
        without = agent.policy(batch, states)[0]
    there = batch["alive"][..., None] & batch["legal"]
    assert ((with_it - without).abs()[there] > 1e-4).float().mean() > 0.5


@pytest.mark.parametrize("variant", HYPERS)
def test_with_the_output_layer_at_zero_it_is_mappo_bit_for_bit(variant):
    """The same policy in the same play, and the same actor and critic after a whole update, even with an
    hypernetwork that gets gradients all the while."""
    plain = {name: x for name, x in VARIANTS[variant].items() if name in ("perturbation", "layer_norm", "agent_id")}
    results = []
    for settings in (plain | {"hyper": False}, VARIANTS[variant] | {"align_coef": 0.0, "smooth_coef": 0.0}):
        args, game, agent = make(**settings)
        if agent.hyper is not None:
            for output in agent.hyper.outputs:
                torch.nn.init.zeros_(output.weight)
        batch, states = make_batch(args, game, agent)
        results.append((batch, learn(args, agent, batch, states, hyper_lr=0.0)))
    (batch, weights), (other_batch, other_weights) = results
    for name in ("policy", "actions", "log_probs", "values"):
        assert torch.equal(batch[name], other_batch[name]), name
    assert not same(weights, make(**(plain | {"hyper": False}))[2].state_dict())  # it did learn
    assert same(weights, other_weights)


@pytest.mark.parametrize("variant", HYPERS)
def test_every_parameter_gets_a_gradient(variant):
    args, game, agent = make(**VARIANTS[variant])
    batch, states = make_batch(args, game, agent)
    loss, _, _ = mh.ppo_loss(args, agent, *some(batch, states), 0.01)
    loss.backward()
    for name, parameter in agent.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("variant", ["joint", "shared", "local", "cumulative", "all"])
def test_alpha_and_beta_change_the_update(variant):
    args, game, agent = make(**VARIANTS[variant])
    target = copy.deepcopy(agent.hyper)
    for parameter in target.parameters():
        parameter.data *= 1.1
    batch, states = make_batch(args, game, agent, target=target)
    learned = {}
    for alpha, beta in ((0.0, 0.0), (0.1, 0.0), (0.0, 0.05)):
        args.smooth_coef, args.align_coef = alpha, beta
        learned[alpha, beta] = learn(args, agent, batch, states)
    assert not same(learned[0.0, 0.0], learned[0.1, 0.0])
    assert not same(learned[0.0, 0.0], learned[0.0, 0.05])


def test_alpha_changes_nothing_where_weights_do_not_move():
    """Weights by identity do not change in time: there is nothing to smooth."""
    args, game, agent = make(hyper_input="id")
    mb, states = some(*make_batch(args, game, agent))
    assert mh.ppo_loss(args, agent, mb, states, 0.01)[1]["hyper/smooth"] == 0.0


def test_k_says_when_the_target_moves(tmp_path):
    """Two short runs that differ in K alone part exactly when the earlier one copies; with beta 0 they never do."""
    common = ["--seed", "2", *TINY[:-2], "--total-timesteps", "384", "--eval-every", "0", "--log-every", "1",
              "--update-epochs", "2"]  # fmt: skip
    rows = {}
    for every, beta in ((8, 0.5), (16, 0.5), (8, 0.0), (16, 0.0)):  # eight gradient steps per iteration
        argv = [
            *common,
            "--target-every",
            str(every),
            "--align-coef",
            str(beta),
            "--run-dir",
            str(tmp_path / f"{every}{beta}"),
        ]
        args, run_dir = mh.prepare(tyro.cli(mh.Args, args=argv))
        assert mh.train(args, run_dir) == 0
        rows[every, beta] = [(row["losses/policy_loss"], row["hyper/align"]) for row in read_metrics(run_dir)]
    one, two = rows[8, 0.5], rows[16, 0.5]
    assert one[0] == two[0] and one[1] != two[1]
    assert [row[0] for row in rows[8, 0.0]] == [row[0] for row in rows[16, 0.0]]


GAMES = ["smac-3m", "smac-2s3z", "msh-4h1s-4x4"]


MIXED = [(env_id, variant) for env_id in GAMES[1:] for variant in ("mappo", "joint", "shared", "local", "cumulative")]


@pytest.mark.parametrize(("env_id", "variant"), [("smac-3m", name) for name in VARIANTS] + MIXED)
def test_ratio_is_exactly_one_before_the_first_step(env_id, variant):
    """With recurrence, masks, dead agents and episode ends in the batch, and chunks in any order."""
    args, game, agent = make(env_id, **VARIANTS[variant])
    batch, states = make_batch(args, game, agent)
    assert batch["first"][1:].any() and (~batch["alive"]).any() and (~batch["legal"]).any()
    for count in (5, 20, 36):
        _, stats, ratio = mh.ppo_loss(args, agent, *some(batch, states, count, count), 0.01, args.perturbation)
        assert torch.equal(ratio, torch.ones_like(ratio))
        assert stats["losses/approx_kl"] == 0.0 and stats["losses/clipfrac"] == 0.0


@needs_mpe
@pytest.mark.parametrize("variant", ["mappo", "joint", "perturbed"])
def test_ratio_is_exactly_one_with_continuous_actions(variant):
    args, game, agent = make("mpe-simple-spread", continuous=True, **(VARIANTS[variant] | {"num_envs": 6}))
    batch, states = make_batch(args, game, agent)
    assert batch["first"][1:].any() and batch["actions"].shape[3] == 5
    _, _, ratio = mh.ppo_loss(args, agent, *some(batch, states), 0.01, args.perturbation)
    assert torch.equal(ratio, torch.ones_like(ratio))


def test_smoothness_is_that_of_the_weights_and_never_crosses_a_reset():
    """Against the definition, on the weight changes themselves, by loops."""
    generator = torch.Generator().manual_seed(0)
    codes, output = torch.randn(5, 4, 3, 8, generator=generator), torch.randn(40, 8, generator=generator)
    first, alive = torch.zeros(5, 4, dtype=torch.bool), torch.ones(5, 4, 3, dtype=torch.bool)
    first[2, 0] = first[0] = first[4, 3] = True
    alive[3:, 1, 2] = False
    changes, squares = codes @ output.T, []
    for step in range(1, 5):
        for chunk in range(4):
            for agent in range(3):
                if not first[step, chunk] and alive[step, chunk, agent] and alive[step - 1, chunk, agent]:
                    squares.append(((changes[step, chunk, agent] - changes[step - 1, chunk, agent]) ** 2).mean())
    assert mh.smoothness(codes, output, first, alive).item() == pytest.approx(
        torch.stack(squares).mean().item(), rel=1e-5
    )
    everywhere = torch.ones(5, 4, dtype=torch.bool)
    assert mh.smoothness(codes, output, everywhere, alive).item() == 0.0
    moved = codes.clone()
    moved[2:, 0] += 100.0  # all of it at the reset of chunk 0
    assert mh.smoothness(moved, output, first, alive).item() == pytest.approx(
        torch.stack(squares).mean().item(), rel=1e-3
    )


def test_alignment_uses_the_stored_inputs_and_the_target():
    """Right after a copy the reference is the policy that acted, to the last bit; then only the target counts."""
    args, game, agent = make()
    batch, states = make_batch(args, game, agent)
    mb, mb_states = some(batch, states)
    assert torch.equal(batch["reference"], batch["policy"])
    assert mh.ppo_loss(args, agent, mb, mb_states, 0.01)[1]["hyper/align"] == 0.0
    target = copy.deepcopy(agent.hyper)
    with torch.no_grad():
        target.outputs[2].weight *= 1.5
    args2, game2, agent2 = make()
    batch2, states2 = make_batch(args2, game2, agent2, target=target)
    with torch.no_grad():
        chunk = {name: x[:, :12] for name, x in batch2.items()}  # the first chunk of every env: memory from the start
        by_hand = agent.policy(chunk, agent.start(12), 0.0, target)[0]
    assert torch.equal(chunk["reference"], by_hand) and not torch.equal(chunk["reference"], chunk["policy"])
    align = mh.ppo_loss(args2, agent2, chunk, {n: x[:12] for n, x in states2.items()}, 0.01)[1]["hyper/align"]
    p, q, alive = chunk["reference"].exp(), chunk["policy"], chunk["alive"]
    by_hand = (p * (chunk["reference"] - q)).sum(-1)[alive].mean()
    assert align == pytest.approx(by_hand.item(), rel=1e-4) and align > 0


def test_gradient_clipping_covers_the_hypernetwork():
    args, game, agent = make(max_grad_norm=1e-6, update_epochs=1, num_minibatches=1)
    batch, states = make_batch(args, game, agent)
    groups = [{"params": list(part.parameters())} for part in (agent.actor, agent.critic, agent.hyper)]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    before = copy.deepcopy(agent.hyper.state_dict())
    mh.update(args, agent, optimizer, batch, states, 0.01, 0.0, torch.Generator())
    moved = torch.stack([(x - before[name]).norm() for name, x in agent.hyper.state_dict().items()]).norm().item()
    assert 0 < moved < 1.1e-6


def test_flags_parse_as_said():
    parse = lambda *argv: tyro.cli(mh.Args, args=list(argv))  # noqa: E731
    assert parse().hyper and not parse("--no-hyper").hyper
    assert parse("--hyper-share").hyper_share and not parse("--no-hyper-share").hyper_share
    args = parse("--hyper-input", "id", "--delta", "cumulative", "--hyper-layers", "all", "--no-hyper-attention")
    assert (args.hyper_input, args.delta, args.hyper_layers, args.hyper_attention) == ("id", "cumulative", "all", False)
    for wrong in (["--hyper", "False"], ["--hyper-input", "all"], ["--delta", "none"], ["--value-norm", "yes"]):
        with pytest.raises(SystemExit):
            parse(*wrong)


def test_every_argument_is_explained():
    text = (ROOT / "mappo_hyper.py").read_text()
    for field in mh.fields(mh.Args):
        assert re.search(rf"    {field.name}: .*\n    \"\"\"", text), field.name


# the pieces


def test_gae_against_a_hand_computation():
    """Three players: one terminates in step 1 (and is gone in step 2), one is truncated in step 1 and starts anew, one
    plays on. gamma 0.5, lambda 0.5."""
    reward = torch.tensor([[[0.0, 0.0, 1.0]], [[4.0, 2.0, 0.0]], [[9.0, 1.0, 1.0]]])  # (T=3, B=1, V=3)
    value = torch.tensor([[[1.0, 1.0, 1.0]], [[2.0, 2.0, 2.0]], [[9.0, 3.0, 3.0]]])
    next_value = torch.tensor([[[2.0, 2.0, 2.0]], [[9.0, 8.0, 3.0]], [[9.0, 4.0, 4.0]]])  # 8: of the final observation
    counted = torch.tensor([[[True, True, True]], [[True, True, True]], [[False, True, True]]])
    terminated = torch.tensor([[[False, False, False]], [[True, False, False]], [[False, False, False]]])
    truncated = torch.tensor([[[False, False, False]], [[False, True, False]], [[False, False, False]]])
    got = mh.advantages_of(reward, value, next_value, counted, terminated, truncated, 0.5, 0.5)
    # player 0: step 1 ends by the rules: 4 - 2 = 2; step 0: 0 + .5*2 - 1 + .25*2 = 0.5; step 2: it had left
    # player 1: step 2: 1 + .5*4 - 3 = 0; step 1 bootstraps from 8, is cut: 2 + .5*8 - 2 = 4; step 0: 0 + 1 - 1 + 1 = 1
    # player 2: step 2: 1 + 2 - 3 = 0; step 1: 0 + 1.5 - 2 + 0 = -0.5; step 0: 1 + 1 - 1 - .125 = 0.875
    assert torch.equal(got[:, 0], torch.tensor([[0.5, 1.0, 0.875], [2.0, 4.0, -0.5], [0.0, 0.0, 0.0]]))


def test_memory_starts_anew_with_an_episode():
    """A chunk with a reset inside gives, after it, what a chunk that begins there gives."""
    args, game, agent = make(delta="cumulative", critic_recurrent=True)
    batch, states = make_batch(args, game, agent)
    step, chunk = (int(x) for x in batch["first"][2:-2].nonzero()[0] + torch.tensor([2, 0]))
    late = {name: x[step:, chunk : chunk + 1] for name, x in batch.items()}
    one = {name: x[:, chunk : chunk + 1] for name, x in batch.items()}
    with torch.no_grad():
        fresh = agent.policy(late, agent.start(1))[0]
        whole = agent.policy(one, {name: x[chunk : chunk + 1] + 3.0 for name, x in states.items()})[0]
        value = agent.critic(one, states["critic"][chunk : chunk + 1] + 3.0)[0][step:]
        fresh_value = agent.critic(late, agent.start(1)["critic"])[0]
    assert torch.allclose(whole[step:], fresh, atol=1e-5) and torch.allclose(value, fresh_value, atol=1e-5)


@pytest.mark.parametrize("env_id", ["smac-3m", "msh-4h1s-4x4"])
def test_the_fallen_have_no_part_in_the_policy_loss(env_id):
    """Garbage in what the fallen did changes neither the loss, nor a statistic, nor a gradient."""
    args, game, agent = make(env_id, hyper_input="local")
    batch, states = make_batch(args, game, agent)
    gone = ~batch["alive"]
    assert gone.sum() > 50
    garbage = {name: x.clone() for name, x in batch.items()}
    garbage["log_probs"][gone] = 7.5
    garbage["actions"][gone] = 0
    garbage["legal"][gone] = True
    garbage["reference"][gone] = -3.0
    if not game.team:
        for name in ("advantages", "returns", "values"):
            garbage[name][gone] = 7.5

    def loss_and_gradient(data):
        agent.zero_grad()
        loss, stats, _ = mh.ppo_loss(args, agent, data, states, 0.05)
        loss.backward()
        return loss.item(), stats, [parameter.grad.clone() for parameter in agent.parameters()]

    loss, stats, gradients = loss_and_gradient(batch)
    other_loss, other_stats, other_gradients = loss_and_gradient(garbage)
    assert loss == other_loss and stats == other_stats
    assert all(torch.equal(a, b) for a, b in zip(gradients, other_gradients, strict=True))
    garbage["log_probs"][~gone] += 1.0  # the comparison is not blind
    assert loss_and_gradient(garbage)[0] != loss


def test_attention_does_not_see_the_fallen():
    args, game, agent = make()
    batch, states = make_batch(args, game, agent)
    other = {name: x.clone() for name, x in batch.items()}
    other["obs"][~batch["alive"]] = 5.0
    with torch.no_grad():
        policy, other_policy = agent.policy(batch, states)[0], agent.policy(other, states)[0]
    there = batch["alive"][..., None].expand_as(policy)
    assert torch.equal(policy[there], other_policy[there])


def test_joint_input_sees_the_team_and_local_only_itself():
    for name, seen in (("joint", True), ("local", False), ("id", False)):
        args, game, agent = make(hyper_input=name)
        batch, states = make_batch(args, game, agent)
        other = {name: x.clone() for name, x in batch.items()}
        other["obs"][:, :, 1:] += 1.0
        other["last"][:, :, 1:] += 1.0
        with torch.no_grad():
            changed = not torch.equal(agent.policy(batch, states)[0][:, :, 0], agent.policy(other, states)[0][:, :, 0])
        assert changed == seen


@pytest.mark.parametrize("critic", [{}, {"critic_input": "agent"}, {"critic_recurrent": True}])
def test_popart_keeps_what_the_critic_says(critic):
    args, game, agent = make(**critic)
    batch, states = make_batch(args, game, agent)

    def values():
        centre, unit = agent.critic.scale()
        with torch.no_grad():
            return agent.critic(batch, states.get("critic"))[0] * unit + centre

    agent.critic.see_returns(torch.randn(500, generator=torch.Generator().manual_seed(0)) * 4 + 9)
    centre, unit = agent.critic.scale()
    assert centre.item() == pytest.approx(9, abs=0.5) and unit.item() == pytest.approx(4, abs=0.5)
    before = values()
    agent.critic.see_returns(torch.tensor([100.0, 140.0]))
    assert agent.critic.scale()[0] > centre + 2
    assert torch.allclose(before, values(), atol=1e-3)
    agent.critic.value_norm = "none"
    assert agent.critic.scale() == (0.0, 1.0)


def test_an_optimistic_critic_expects_more_until_it_has_learned():
    said = []
    for initial_value in (0.0, 6.0):
        args, game, agent = make(initial_value=initial_value)
        batch, states = make_batch(args, game, agent)
        with torch.no_grad():
            said.append(agent.critic(batch, states.get("critic"))[0])
    assert torch.allclose(said[0] + 6, said[1], atol=1e-5)


@pytest.mark.parametrize(("env_id", "settings"), [
    ("msh-4h1s-8x8", {}), ("msd-6x6", {}), ("msh-4h2s-8x8", {"max_block_comp": 2}),
])  # fmt: skip
def test_grid_games_are_seen_from_the_own_place(env_id, settings):
    """Against a plain loop over the cells, on boards of random play in which players have left."""
    env = envs.make(env_id, num_envs=16, seed=3, **settings)
    nearby, rng, left = mh.Nearby(env.game), np.random.default_rng(0), 0
    height, width, planes = env.spec.obs_shape
    for _ in range(12):
        seen = nearby(env.obs)
        for planes_seen, got in zip(
            env.obs.reshape(-1, height, width, planes), seen.reshape(-1, nearby.size), strict=True
        ):
            if not planes_seen[:, :, 0].any():
                left += 1
                assert not got.any()
                continue
            (row, column), expected = np.argwhere(planes_seen[:, :, 0])[0], []
            expected += [1, row / height, column / width]
            for plane, slots in enumerate(nearby.slots, start=1):
                steps = [(y - row, x - column) for y, x in np.argwhere(planes_seen[:, :, plane])]
                steps.sort(key=lambda step: abs(step[0]) + abs(step[1]))  # equally near ones in the order of cells
                assert len(steps) <= slots
                for y, x in steps:
                    expected += [1, y / height, x / width, np.sign(y), np.sign(x), y == x == 0]
                expected += [0] * 6 * (slots - len(steps))
            assert got == pytest.approx(np.array(expected, np.float32))
        env.step(np.array([[rng.choice(np.flatnonzero(one)) if one.any() else 0 for one in row] for row in env.legal]))
    assert left > 0 or env_id.startswith("msd")


def test_death_masking_shows_the_critic_of_the_fallen_its_id_alone():
    args, game, agent = make(critic_input="agent")
    batch, _ = make_batch(args, game, agent)
    with torch.no_grad():
        values = agent.critic(batch, None)[0]
        other = batch | {"state": batch["state"] + 1.0}
        moved = agent.critic(other, None)[0]
    gone = ~batch["alive"]
    assert values.shape == gone.shape and torch.equal(values[gone], moved[gone])
    assert not torch.equal(values[~gone], moved[~gone])


def test_cumulative_changes_are_the_faded_sum():
    args, game, agent = make(delta="cumulative", decay=0.5)
    plain = make()[2]
    batch, _ = make_batch(args, game, agent)
    chunk = {name: x[:, :12] for name, x in batch.items()}
    with torch.no_grad():
        sums, base = (net.hyper(chunk, net.start(12))[0] for net in (agent, plain))
    total = torch.zeros_like(base[0])
    for step in range(len(base)):
        total = torch.where(chunk["first"][step][:, None, None], 0.0, 0.5 * total) + base[step]
        assert torch.allclose(sums[step], total, atol=1e-6)


def test_low_rank_and_whole_changes_are_weight_changes():
    """A generated layer is the layer with W + dW and b + db, for every agent by its own change."""
    for variant in ("joint", "whole matrices", "shared"):
        args, game, agent = make(**VARIANTS[variant])
        batch, states = make_batch(args, game, agent)
        with torch.no_grad():
            changes = agent.hyper.outputs[2](agent.hyper(batch, states)[0])
            x = torch.randn(*batch["alive"].shape, args.hidden)
            got = agent.actor.layer(2, x, changes, agent.hyper.factors)
            step, chunk, number = 3, 2, 1
            change = changes[step, chunk, number % changes.shape[2]].view(-1, agent.actor.columns[2])
            left = agent.hyper.factors["2"].weight.T if "2" in agent.hyper.factors else torch.eye(args.hidden)
            layer = agent.actor.layers[2]
            by_hand = x[step, chunk, number] @ (layer.weight.T + left @ change[:-1]) + layer.bias + change[-1]
        assert torch.allclose(got[step, chunk, number], by_hand, atol=1e-5)


def test_normal_policies_against_torch():
    generator = torch.Generator().manual_seed(0)
    mean, log_std, other = torch.randn(7, 5, generator=generator), torch.randn(7, 5, generator=generator) * 0.3, None
    policy, actions = torch.cat([mean, log_std], -1), torch.randn(7, 5, generator=generator)
    one = torch.distributions.Normal(mean, log_std.exp())
    two = torch.distributions.Normal(mean + 0.3, log_std.exp() * 1.2)
    other = torch.cat([two.loc, two.scale.log()], -1)
    assert torch.allclose(mh.log_prob_of(policy, actions, True), one.log_prob(actions).sum(-1), atol=1e-5)
    assert torch.allclose(mh.entropy_of(policy, True), one.entropy().sum(-1), atol=1e-5)
    kl = torch.distributions.kl_divergence(one, two).sum(-1)
    assert torch.allclose(mh.kl_between(policy, other, True), kl, atol=1e-5)


# particle games


@needs_mpe
@pytest.mark.parametrize("continuous", [False, True])
def test_particle_env_keeps_the_contract(continuous):
    from envs.particles import ParticleEnv

    env, twin = (ParticleEnv("mpe-simple-spread", 3, 7, continuous) for _ in range(2))
    generator = np.random.default_rng(0)
    draws = [generator.random((3, 3, 5)) if continuous else generator.integers(0, 5, (3, 3)) for _ in range(60)]
    saved = None
    for k, actions in enumerate(draws):
        obs, reward, terminated, truncated, info = env.step(actions)
        assert (reward == reward[:, :1]).all() and not terminated.any()
        assert (truncated == info["done"][:, None]).all() and info["done"].all() == ((k + 1) % 25 == 0)
        if info["done"].any():
            assert (info["episode_length"] == 25).all() and not np.array_equal(info["final_obs"], obs)
        if k == 30:
            saved = {name: x.copy() for name, x in env.get_state().items()}
    twin.set_state(saved)
    for actions in draws[31:]:
        info = twin.step(actions)[-1]
    assert np.array_equal(twin.obs, env.obs) and np.array_equal(twin.returns, env.returns)
    assert not np.array_equal(env.obs[0], env.obs[1])


# whole runs


def test_a_run_leaves_what_it_should(finished):
    rows = read_metrics(finished)
    assert [int(row["global_step"]) for row in rows][-1] == 1280
    assert sum(bool(row["eval/win_rate"]) for row in rows) == 3
    for name in ("charts/episodic_return", "charts/win_rate", "charts/episodic_length", "losses/policy_loss",
                 "losses/value_loss", "losses/entropy", "losses/approx_kl", "losses/clipfrac", "losses/policy_kl",
                 "losses/explained_variance", "hyper/smooth", "hyper/align", "hyper/delta_size",
                 "hyper/grad_norm", "losses/grad_norm"):  # fmt: skip
        assert rows[-1][name], name
    result = json.loads((finished / "result.json").read_text())
    assert result["finished"] and result["global_step"] == 1280 and "win_rate" in result["eval_greedy"]
    assert (finished / "curve.png").stat().st_size > 5000 and list(finished.glob("events.out.tfevents.*"))
    spec = json.loads((finished / "checkpoints" / "best" / "spec.json").read_text())
    assert spec["script"] == "mappo_hyper.py" and spec["env_id"] == "smac-3m"


@pytest.mark.parametrize("how", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_a_stopped_run_resumes_to_the_same_bits(finished, tmp_path, how):
    run_dir = tmp_path / "stopped"
    command = [sys.executable, str(ROOT / "mappo_hyper.py"), "--run-dir", str(run_dir), "--seed", "5", *TINY]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    deadline = time.time() + 200
    while not (run_dir / "checkpoints" / "last" / "spec.json").exists() and process.poll() is None:
        assert time.time() < deadline
        time.sleep(0.005)
    process.send_signal(how)
    out, err = process.communicate(timeout=100)
    assert process.returncode == (-how if how == signal.SIGKILL else 128 + how), err
    assert how == signal.SIGKILL or f"--resume {run_dir}" in out
    assert not (run_dir / "result.json").exists()
    args, _ = mh.prepare(mh.Args(resume=str(run_dir)))
    assert mh.train(args, run_dir) == 0
    assert read_metrics(run_dir) == read_metrics(finished)
    for name in ("last", "best"):
        weights, expected = (load_file(d / "checkpoints" / name / "weights.safetensors") for d in (run_dir, finished))
        assert weights.keys() == expected.keys() and same(weights, expected)
    result, expected = (json.loads((d / "result.json").read_text()) for d in (run_dir, finished))
    assert result["eval"] == expected["eval"]


@pytest.mark.parametrize(("env_id", "more"), [
    ("msh-4h1s-4x4", ["--delta", "cumulative", "--critic-recurrent", "--start-window", "3"]),
    pytest.param("mpe-simple-spread", ["--continuous"], marks=needs_mpe),
    ("smac-3m", ["--no-hyper", "--critic-input", "agent", "--value-norm", "running", "--huber-delta", "1"]),
])  # fmt: skip
def test_other_games_and_options_resume_to_the_same_bits(env_id, more, tmp_path, monkeypatch):
    """In one process: a run that is stopped after its first save, and resumed, against one that is not."""
    argv = ["--env-id", env_id, *more, *TINY, "--eval-every", "0", "--update-epochs", "1"]
    parts = []
    for name in ("whole", "stopped"):
        run_dir = tmp_path / name
        args, _ = mh.prepare(tyro.cli(mh.Args, args=[*argv, "--run-dir", str(run_dir)]))
        if name == "stopped":
            kept = mh.save_checkpoint

            def save_and_stop(*given, kept=kept):
                kept(*given)
                raise KeyboardInterrupt

            monkeypatch.setattr(mh, "save_checkpoint", save_and_stop)
            with pytest.raises(KeyboardInterrupt):
                mh.train(args, run_dir)
            monkeypatch.setattr(mh, "save_checkpoint", kept)
            args, _ = mh.prepare(mh.Args(resume=str(run_dir)))
        assert mh.train(args, run_dir) == 0
        parts.append((read_metrics(run_dir), load_file(run_dir / "checkpoints" / "last" / "weights.safetensors")))
    assert parts[0][0] == parts[1][0] and same(parts[0][1], parts[1][1])


def test_the_start_curriculum_fades(tmp_path, monkeypatch):
    seen = []
    made = mh.make_env

    def make_env(*given):
        env = made(*given)
        kept = env.set_start_window
        env.set_start_window = lambda window, prob: (seen.append((window, prob)), kept(window, prob))
        return env

    monkeypatch.setattr(mh, "make_env", make_env)
    sizes = {"num_envs": 4, "num_steps": 16, "total_timesteps": 4 * 64, "update_epochs": 1, "final_eval_episodes": 2}
    args = mh.Args(env_id="msh-4h1s-8x8", start_window=3, start_window_prob=0.8, eval_every=0, **sizes)
    assert mh.train(args, tmp_path / "run") == 0
    assert [window for window, _ in seen] == [3] * 4  # evaluation envs never get one
    assert [prob for _, prob in seen] == pytest.approx([0.8, 0.4, 0.0, 0.0])


def test_nan_stops_the_run_with_a_message(tmp_path, capsys):
    argv = [*TINY, "--run-dir", str(tmp_path / "nan"), "--learning-rate", "1e30", "--max-grad-norm", "1e30"]
    args, run_dir = mh.prepare(tyro.cli(mh.Args, args=argv))
    assert mh.train(args, run_dir) == 1
    assert re.search(r"stopped after step \d+: the loss became", capsys.readouterr().err)


def test_bad_input_is_one_line_and_exit_code_2(tmp_path):
    done = run("--env-id", "smac-99m", "--run-dir", str(tmp_path / "x"))
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1 and "99m" in done.stderr
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_steps": 50}, "--num-steps 50 must be a multiple of --chunk-length 16"),
        ({"hidden": 20}, "--hidden must be a multiple of 8"),
        ({"hyper_heads": 3}, "must be a multiple of twice --hyper-heads"),
        ({"hyper_share": True, "hyper_input": "local"}, "--hyper-share needs --hyper-input joint"),
        ({"perturbation": 2.0}, "--perturbation must be from 0 to 1"),
        ({"env_id": "nothing"}, "unknown env id 'nothing'"),
        ({"env_id": "mpe-nothing"}, "unknown particle game"),
        ({"continuous": True}, "--continuous is for mpe-simple-spread only"),
        ({"resume": "no/such/run"}, "no args.json"),
        ({"start_jitter": 500.0}, "start_jitter must be"),
        ({"start_window": 3}, "--start-window is for grid games only"),
        ({"env_id": "msh-4h1s-8x8", "start_window": 2}, "a start window of 2x2 cannot hold"),
    ],
)
def test_bad_settings_are_named(settings, words, tmp_path):
    with pytest.raises(envs.ConfigError, match=re.escape(words)):
        mh.train(*mh.prepare(mh.Args(run_dir=str(tmp_path / "x"), **settings)))
    assert not (tmp_path / "x").exists()


def test_a_missing_package_is_named(monkeypatch):
    from envs.particles import ParticleEnv

    monkeypatch.setitem(sys.modules, "mpe2", None)
    with pytest.raises(envs.ConfigError, match="pip install mpe2"):
        ParticleEnv("mpe-simple-spread")


def test_evaluate_plays_a_battle_checkpoint_and_films_it(finished, tmp_path):
    import evaluate

    files = {"json": str(tmp_path / "e.json"), "gif": str(tmp_path / "e.gif")}
    evaluate.main(evaluate.Args(env_id="smac-3m", roles=str(finished), episodes=20, **files))
    row = json.loads((tmp_path / "e.json").read_text())["rows"][0]
    assert row["episodes"] == 20 and 0 <= row["win_rate"] <= 1 and row["team"] == str(finished)
    assert (tmp_path / "e.gif").read_bytes()[:3] == b"GIF"
    evaluate.main(evaluate.Args(env_id="smac-3m", roles="nearest", episodes=20, json=str(tmp_path / "n.json")))
    assert json.loads((tmp_path / "n.json").read_text())["rows"][0]["win_rate"] == 1.0
    for env_id, roles, words in (
        ("smac-8m", str(finished), "trained on smac-3m"), ("smac-3m", "nobody", "unknown team 'nobody'"),
        ("smac-3m", "nearest,nearest", "one team"),
    ):  # fmt: skip
        with pytest.raises(envs.ConfigError, match=words):
            evaluate.main(evaluate.Args(env_id=env_id, roles=roles, episodes=2))


def test_a_team_checkpoint_plays_a_seat_of_a_grid_game(tmp_path):
    run_dir = tmp_path / "grid"
    argv = ["--env-id", "msh-4h1s-4x4", *TINY, "--total-timesteps", "256", "--run-dir", str(run_dir)]
    assert mh.train(*mh.prepare(tyro.cli(mh.Args, args=argv))) == 0
    env = envs.make("msh-4h1s-4x4", num_envs=16, seed=9)
    played = play_episodes(env, Seats(env, [str(run_dir), "ns", "nh", str(run_dir)], None, 1))
    assert (played.lengths > 0).all()
    with pytest.raises(envs.ConfigError, match="trained with max_block_comp=0, this game has 2"):
        load_policy(str(run_dir), envs.make("msh-4h1s-4x4", num_envs=1, seed=9, max_block_comp=2), 0, seed=0)
    with pytest.raises(envs.ConfigError, match="one policy for all seats"):
        load_policy(f"{run_dir}@2", env, 0, seed=0)
