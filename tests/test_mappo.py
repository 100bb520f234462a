"""mappo_hyper.py: the old troubles of this algorithm one by one, the pieces against hand computations, whole runs."""

import copy
import csv
import itertools
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import envs
import mappo_hyper as mh
from envs.arguments import parse
from envs.memory import GRU, LSTM, Chunks, GRUSteps, LSTMSteps
from envs.pool import Teammates
from envs.roles import Seats, load_policy, play_episodes
from envs.run import main
from envs.team import Nearby, TeamGame, make_env

TINY = ["--num-envs", "8", "--num-steps", "16", "--chunk-length", "8", "--total-timesteps", "1280",
        "--hidden-size", "16", "--critic-hidden-size", "16", "--hyper-hidden-size", "8", "--eval-every", "384",
        "--eval-episodes", "8", "--log-every", "3", "--final-eval-episodes", "16", "--checkpoint-every", "4",
        "--target-every", "30"]  # fmt: skip
CLOCKS = ("wall_time", "charts/SPS", "time/env", "time/policy", "time/update", "time/eval")  # never the same twice
SMALL = {"num_envs": 12, "num_steps": 48, "chunk_length": 16, "hidden_size": 32, "critic_hidden_size": 32,
         "hyper_hidden_size": 16, "update_epochs": 1, "num_minibatches": 3}  # fmt: skip
VARIANTS = {
    "mappo": {"hyper": False}, "joint": {}, "local": {"hyper_input": "local"}, "id": {"hyper_input": "id"},
    "all": {"hyper_layers": "all"}, "whole matrices": {"hyper_rank": 0}, "no attention": {"hyper_attention": False},
    "no history": {"hyper_history": False},
}  # fmt: skip
HYPERS = [name for name in VARIANTS if name != "mappo"]
NO_RUN = SimpleNamespace(clock=lambda part: None, count=lambda info: None)  # a rollout outside of a run
needs_mpe = pytest.mark.skipif(not __import__("importlib.util").util.find_spec("mpe2"), reason="mpe2 is not installed")


def train(*argv: str) -> int:
    """A whole run in this process; returns its exit code."""
    return main(mh.Args, mh.train, list(argv))


def read_metrics(run_dir: Path) -> list[dict[str, str]]:
    with (run_dir / "metrics.csv").open(newline="") as file:
        return [{name: x for name, x in row.items() if name not in CLOCKS} for row in csv.DictReader(file)]


def make(env_id: str = "smac-3m", seed: int = 0, **settings):
    """Settings, game and agent; the hypernetwork's output is made large enough to matter."""
    args = mh.Args(env_id=env_id, **(SMALL | settings))
    game = TeamGame(make_env(env_id, args.num_envs, 3, continuous=args.continuous))
    agent = mh.Agent(args, game, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        agent.actor.layers[2].weight *= 50  # a policy with a will of its own
        if agent.hyper is not None:
            for output in agent.hyper.outputs:
                output.weight *= 30
    return args, game, agent


def make_batch(args, game, agent, seed: int = 1, target=None, teammates=None):
    """Real play as the rollout stores it (T, B, ...), and the memory at the starts of its chunks."""
    batch, outcome, starts = {}, {}, {}
    team = mh.Team(agent, game, torch.Generator().manual_seed(seed), teammates=teammates)
    mh.rollout(args, team, batch, outcome, starts, NO_RUN)
    advantages = torch.randn(outcome["values"].shape, generator=torch.Generator().manual_seed(seed))
    batch["returns"] = advantages + outcome["values"]
    batch["advantages"] = advantages.expand_as(batch["alive"]).contiguous()
    if agent.hyper is not None:
        memory = agent.initial_memory(args.num_envs)
        batch["reference"] = mh.reference_of(agent, batch, memory, target or agent.hyper)[0]
    return batch, starts


def view_of(batch, count: int | None = None, seed: int = 0, agent=None):
    """Some chunks in a random order, or all."""
    alive = batch["alive"] if agent is None else agent.in_view(batch)
    chunks = Chunks(alive, batch["is_first"], SMALL["chunk_length"])
    return chunks.view(torch.randperm(chunks.number, generator=torch.Generator().manual_seed(seed))[:count])


def policy_of(agent, batch, starts, hyper=None):
    """The policy of all agents that are on the field, step by step and agent by agent (T, B, N, A)."""
    view = view_of(batch)
    with torch.no_grad():
        return view.agents.put(agent.policy(batch, starts, view, hyper)[0], batch["policy"])


def learn(args, agent, batch, memory, lr=1e-3, hyper_lr=1e-3):
    """The weights after one whole update."""
    agent = copy.deepcopy(agent)
    optimizer = mh.make_optimizer(replace(args, learning_rate=lr, hyper_lr=hyper_lr), agent)
    mh.update(args, agent, optimizer, batch, memory, 0.01, torch.Generator().manual_seed(5))
    return agent.state_dict()


def same(a: dict, b: dict) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a.keys() & b.keys())


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    assert train("--run-dir", str(run_dir), "--seed", "5", *TINY) == 0
    return run_dir


# the old troubles


@pytest.mark.parametrize("variant", HYPERS)
def test_switching_the_hypernetwork_on_changes_logits(variant):
    args, game, agent = make(**VARIANTS[variant])
    batch, memory = make_batch(args, game, agent)
    with torch.no_grad():
        with_it = policy_of(agent, batch, memory)
        agent.hyper = None
        without = policy_of(agent, batch, memory)
    there = batch["alive"][..., None] & batch["legal"]
    assert ((with_it - without).abs()[there] > 1e-4).float().mean() > 0.5


@pytest.mark.parametrize("variant", HYPERS)
def test_with_the_output_layer_at_zero_it_is_mappo_bit_for_bit(variant):
    """The same policy in the same play, and the same actor and critic after a whole update, even with an
    hypernetwork that gets gradients all the while."""
    results = []
    for settings in ({"hyper": False}, VARIANTS[variant] | {"align_coef": 0.0, "smooth_coef": 0.0}):
        args, game, agent = make(**settings)
        if agent.hyper is not None:
            for output in agent.hyper.outputs:
                torch.nn.init.zeros_(output.weight)
        batch, memory = make_batch(args, game, agent)
        results.append((batch, learn(args, agent, batch, memory, hyper_lr=0.0)))
    (batch, weights), (other_batch, other_weights) = results
    for name in ("policy", "actions", "log_probs", "returns"):
        assert torch.equal(batch[name], other_batch[name]), name
    assert not same(weights, make(hyper=False)[2].state_dict())  # it did learn
    assert same(weights, other_weights)


@pytest.mark.parametrize("variant", HYPERS)
def test_every_parameter_gets_a_gradient(variant):
    args, game, agent = make(**VARIANTS[variant])
    batch, memory = make_batch(args, game, agent)
    loss, _, _ = mh.ppo_loss(args, agent, batch, memory, view_of(batch, 20), 0.01)
    loss.backward()
    for name, parameter in agent.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("variant", ["joint", "local", "all"])
def test_alpha_and_beta_change_the_update(variant):
    args, game, agent = make(**VARIANTS[variant])
    target = copy.deepcopy(agent.hyper)
    for parameter in target.parameters():
        parameter.data *= 1.1
    batch, memory = make_batch(args, game, agent, target=target)
    learned = {}
    for alpha, beta in ((0.0, 0.0), (0.1, 0.0), (0.0, 0.05)):
        args.smooth_coef, args.align_coef = alpha, beta
        learned[alpha, beta] = learn(args, agent, batch, memory)
    assert not same(learned[0.0, 0.0], learned[0.1, 0.0])
    assert not same(learned[0.0, 0.0], learned[0.0, 0.05])


def test_alpha_changes_nothing_where_weights_do_not_move():
    """Weights by identity do not change in time: there is nothing to smooth."""
    args, game, agent = make(hyper_input="id")
    batch, memory = make_batch(args, game, agent)
    assert mh.ppo_loss(args, agent, batch, memory, view_of(batch, 20), 0.01)[1]["hyper/smooth"] == 0.0


def test_k_says_when_the_target_moves(tmp_path):
    """Two short runs that differ in K alone part exactly when the earlier one copies; with beta 0 they never do."""
    common = ["--seed", "2", *TINY[:-2], "--total-timesteps", "384", "--eval-every", "0", "--log-every", "1",
              "--update-epochs", "2"]  # fmt: skip
    rows = {}
    for every, beta in ((8, 0.5), (16, 0.5), (8, 0.0), (16, 0.0)):  # eight gradient steps per iteration
        run_dir = tmp_path / f"{every}{beta}"
        settings = ["--target-every", str(every), "--align-coef", str(beta), "--run-dir", str(run_dir)]
        assert train(*common, *settings) == 0
        rows[every, beta] = [(row["losses/policy_loss"], row["hyper/align"]) for row in read_metrics(run_dir)]
    one, two = rows[8, 0.5], rows[16, 0.5]
    assert one[0] == two[0] and one[1] != two[1]
    assert [row[0] for row in rows[8, 0.0]] == [row[0] for row in rows[16, 0.0]]


GAMES = ["smac-3m", "smac-2s3z", "msh-4h1s-4x4"]


MIXED = [(env_id, variant) for env_id in GAMES[1:] for variant in ("mappo", "joint", "local")]


@pytest.mark.parametrize(("env_id", "variant"), [("smac-3m", name) for name in VARIANTS] + MIXED)
def test_ratio_is_exactly_one_before_the_first_step(env_id, variant):
    """With recurrence, masks, dead agents and episode ends in the batch, and chunks in any order."""
    args, game, agent = make(env_id, **VARIANTS[variant])
    batch, memory = make_batch(args, game, agent)
    assert batch["is_first"][1:].any() and (~batch["alive"]).any() and (~batch["legal"]).any()
    for count in (1, 5, 20, 36):
        _, stats, ratio = mh.ppo_loss(args, agent, batch, memory, view_of(batch, count, count), 0.01)
        assert torch.equal(ratio, torch.ones_like(ratio))
        assert stats["losses/approx_kl"] == 0.0 and stats["losses/clipfrac"] == 0.0


@needs_mpe
@pytest.mark.parametrize("variant", ["mappo", "joint"])
def test_ratio_is_exactly_one_with_continuous_actions(variant):
    args, game, agent = make("mpe-simple-spread", continuous=True, **(VARIANTS[variant] | {"num_envs": 6}))
    batch, memory = make_batch(args, game, agent)
    assert batch["is_first"][1:].any() and batch["actions"].shape[3] == 5
    _, _, ratio = mh.ppo_loss(args, agent, batch, memory, view_of(batch, 20), 0.01)
    assert torch.equal(ratio, torch.ones_like(ratio))


def test_smoothness_is_that_of_the_weights_and_never_crosses_a_reset():
    """Against the definition, on the weight changes themselves, by loops over steps, games and agents."""
    args, game, agent = make("smac-2s3z")
    batch, memory = make_batch(args, game, agent)
    first, alive, view, squares = batch["is_first"], batch["alive"], view_of(batch), []
    assert first[1:].any() and (~alive).any()
    with torch.no_grad():
        codes = agent.hyper(batch, memory, view)[0]
        changes = codes @ agent.hyper.output_weight().T
    changes = view.agents.put(changes, torch.zeros(*alive.shape, changes.shape[1]))
    for step, b, i in alive.nonzero().tolist():
        if step % args.chunk_length and not first[step, b]:
            squares.append(((changes[step, b, i] - changes[step - 1, b, i]) ** 2).mean())
    smooth = mh.ppo_loss(args, agent, batch, memory, view, 0.01)[1]["hyper/smooth"]
    size = (changes[alive] ** 2).mean()
    assert smooth.item() == pytest.approx((torch.stack(squares).mean() / size).item(), rel=1e-4)
    with torch.no_grad():
        for output in agent.hyper.outputs:
            output.weight *= 0.1  # smaller weights are not smoother
    small = mh.ppo_loss(args, agent, batch, memory, view, 0.01)[1]["hyper/smooth"]
    assert small.item() == pytest.approx(smooth.item(), rel=1e-4)


def test_alignment_uses_the_stored_inputs_and_the_target():
    """Right after a copy the reference is the policy that acted, to the last bit; then only the target counts."""
    args, game, agent = make()
    batch, memory = make_batch(args, game, agent)
    there = batch["alive"]
    assert torch.equal(batch["reference"][there], batch["policy"][there])
    assert mh.ppo_loss(args, agent, batch, memory, view_of(batch, 20), 0.01)[1]["hyper/align"] == 0.0
    target = copy.deepcopy(agent.hyper)
    with torch.no_grad():
        target.outputs[2].weight *= 1.5
    args, game, agent = make()
    batch, memory = make_batch(args, game, agent, target=target)
    early = {name: x[: args.chunk_length] for name, x in batch.items()}  # the first chunk: memory from the start
    by_hand = policy_of(agent, early, agent.initial_memory(args.num_envs), target)[there[: args.chunk_length]]
    assert torch.equal(early["reference"][there[: args.chunk_length]], by_hand)
    p, q = batch["reference"][there], batch["policy"][there]
    assert not torch.equal(p, q)
    align = mh.ppo_loss(args, agent, batch, memory, view_of(batch), 0.01)[1]["hyper/align"]
    assert align.item() == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-4) and align > 0


def test_gradient_clipping_covers_the_hypernetwork():
    args, game, agent = make(max_grad_norm=1e-6, update_epochs=1, num_minibatches=1)
    batch, memory = make_batch(args, game, agent)
    groups = [{"params": list(part.parameters())} for part in (agent.actor, agent.critic, agent.hyper)]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    before = copy.deepcopy(agent.hyper.state_dict())
    mh.update(args, agent, optimizer, batch, memory, 0.01, torch.Generator())
    moved = torch.stack([(x - before[name]).norm() for name, x in agent.hyper.state_dict().items()]).norm().item()
    assert 0 < moved < 1.1e-6


def test_flags_parse_as_said():
    read = lambda *argv: parse(mh.Args, None, list(argv))  # noqa: E731
    assert read().hyper and not read("--no-hyper").hyper and not read("--hyper=False").hyper
    args = read("--hyper-input", "id", "--hyper-layers", "all", "--no-hyper-attention")
    assert (args.hyper_input, args.hyper_layers, args.hyper_attention) == ("id", "all", False)
    for wrong in (["--hyper", "False"], ["--hyper-input", "all"], ["--hyper-layers", "none"]):
        with pytest.raises(envs.ConfigError):
            read(*wrong)


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


def test_what_follows_a_step_is_the_next_value_or_that_of_the_final_observation():
    """With lambda 0 an advantage is r + gamma v' - v."""
    args = mh.Args(gamma=0.5, gae_lambda=0.0)
    outcome = {name: torch.zeros(3, 1, 2) for name in ("reward", "values", "final_values")}
    outcome["reward"] += 1.0
    outcome["values"][:, 0, 0], outcome["values"][:, 0, 1] = torch.arange(3.0), torch.arange(10.0, 13.0)
    outcome["final_values"] += 100.0  # counts where time ran out, and nowhere else
    outcome |= {name: torch.zeros(3, 1, 2, dtype=torch.bool) for name in ("terminated", "truncated")}
    outcome["truncated"][1, 0, 0] = outcome["terminated"][1, 0, 1] = True
    mask = torch.ones(3, 1, 2, dtype=torch.bool)
    advantages, returns = mh.estimate(args, outcome, torch.tensor([[[20.0, 40.0]]]), mask)
    assert torch.equal(returns[:, 0], torch.tensor([[1.5, 6.5], [51.0, 1.0], [11.0, 21.0]]))
    assert torch.equal(advantages, returns - outcome["values"])


@pytest.mark.parametrize("num_values", [1, 3])
def test_advantages_are_normalised_over_those_who_acted(num_values):
    generator = torch.Generator().manual_seed(0)
    advantages = torch.randn(6, 5, num_values, generator=generator) * 3 + 2
    alive = torch.rand(6, 5, 3, generator=generator) > 0.4
    normalised = mh.normalise(advantages, alive).expand_as(alive)
    assert normalised[alive].mean().abs() < 1e-6 and normalised[alive].std() == pytest.approx(1.0, abs=1e-5)
    assert normalised[~alive].mean().abs() > 1e-3  # the comparison is not blind


@pytest.mark.parametrize("env_id", ["smac-2s3z", "msh-4h1s-4x4"])
def test_the_rollout_stores_what_happened_to_each_agent(env_id):
    """The stored actions, played again in an env of the same seed: whose observation, reward and end is whose."""
    args, game, agent = make(env_id)
    batch, outcome, starts = {}, {}, {}
    team = mh.Team(agent, game, torch.Generator().manual_seed(1))
    next_values = mh.rollout(args, team, batch, outcome, starts, NO_RUN)
    twin, num_values = TeamGame(make_env(env_id, args.num_envs, 3)), agent.critic.num_values
    timed_out, last = 0, torch.zeros_like(batch["last_step"][0])
    for step in range(args.num_steps):
        seen = twin.observe()
        seen["legal"] = torch.nn.functional.pad(seen["legal"], (0, -game.num_actions % 8))
        assert all(torch.equal(batch[name][step], seen[name]) for name in ("obs", "legal", "alive"))
        assert torch.equal(batch["last_step"][step], last)
        assert torch.equal(outcome["values"][step], agent.critic.values({k: x[None] for k, x in seen.items()})[0])
        _, reward, terminated, truncated, info = twin.env.step(batch["actions"][step].numpy())
        for name, x in (("reward", reward), ("terminated", terminated), ("truncated", truncated)):
            assert np.array_equal(outcome[name][step], x[:, :num_values])
        for b, i in np.argwhere(truncated[:, :num_values]):
            final = {name: x[None, b : b + 1] for name, x in twin.final(info).items()}
            value = agent.critic.values(final)[0, 0, i]
            assert outcome["final_values"][step, b, i].item() == pytest.approx(value.item(), abs=1e-5)
            timed_out += 1
        one_hot = torch.nn.functional.one_hot(batch["actions"][step], game.num_actions)
        last = torch.cat([one_hot, torch.from_numpy(reward)[:, :, None]], dim=2)
        last[torch.from_numpy(info["done"])] = 0.0
    assert timed_out > 0 or game.is_battle
    assert torch.equal(next_values, agent.critic.values({k: x[None] for k, x in twin.observe().items()}))
    for k, memory in enumerate(starts["actor"]):  # the memory with which each chunk began
        before = {name: x[: k * args.chunk_length] for name, x in batch.items()}
        again = agent.initial_memory(args.num_envs)
        if k:
            again = mh.reference_of(agent, before, again, agent.hyper)[1]
        stood = batch["alive"][max(k * args.chunk_length - 1, 0)]  # of the fallen nothing is kept
        assert torch.equal(memory[stood], again["actor"][stood])


def test_memory_starts_anew_with_an_episode():
    """A chunk with a reset inside gives, after it, what a chunk that begins there gives."""
    args, game, agent = make()
    batch, memory = make_batch(args, game, agent)
    step, b = (int(x) for x in batch["is_first"][18:30].nonzero()[0] + torch.tensor([18, 0]))
    late = {name: x[step:32, b : b + 1] for name, x in batch.items()}
    one = {name: x[16:32, b : b + 1] for name, x in batch.items()}
    fresh = policy_of(agent, late, agent.initial_memory(1))
    before = [{name: x[1, b : b + 1] + more for name, x in memory.items()} for more in (0.0, 3.0)]
    whole, other = (policy_of(agent, one, memory) for memory in before)
    assert torch.allclose(whole[step - 16 :], fresh, atol=1e-5) and torch.equal(whole[step - 16 :], other[step - 16 :])
    assert not torch.equal(whole[: step - 16], other[: step - 16])


def test_memories_are_those_of_torch_and_their_way_back_is_right():
    """Outputs of one long sequence against torch's own layers, whose gates stand in another order; gradients against
    differences, with sequences that end."""
    generator, x = torch.Generator().manual_seed(0), torch.randn(7, 5)
    gru, lstm, h, c = GRU(5, 3), LSTM(5, 3), torch.randn(1, 3), torch.randn(1, 3)
    for ours, theirs, order in ((gru, torch.nn.GRU(5, 3), (0, 1, 2)), (lstm, torch.nn.LSTM(5, 3), (0, 1, 3, 2))):
        with torch.no_grad():
            for of_layer, name in ((ours.from_input, "ih"), (ours.from_memory, "hh")):
                for kind in ("weight", "bias"):
                    gates = getattr(of_layer, kind).chunk(len(order))
                    getattr(theirs, f"{kind}_{name}_l0").copy_(torch.cat([gates[k] for k in order]))
            if ours is gru:
                assert torch.allclose(gru(x, [1] * 7, h), theirs(x, h)[0], atol=1e-6)
            else:
                after, memory = theirs(x, (h, c))
                assert torch.allclose(lstm(x, [1] * 7, h, c)[0], after, atol=1e-6)
                assert torch.allclose(lstm(x, [1] * 7, h, c)[1][-1:], memory[1], atol=1e-6)

    def some(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    sizes = [5, 5, 3, 1]
    given = (some(14, 9), some(9, 3), some(9), some(5, 3))
    assert torch.autograd.gradcheck(lambda x, weight, bias, h: GRUSteps.apply(x, sizes, weight, bias, h), given)
    given = (some(14, 12), some(12, 3), some(5, 3), some(5, 3))
    assert torch.autograd.gradcheck(lambda x, weight, h, c: LSTMSteps.apply(x, sizes, weight, h, c)[0], given)


def test_sequences_hold_every_step_of_the_living_once():
    """Each in the order of its steps, from the chunk's memory or from none, and never across an episode's start."""
    generator = torch.Generator().manual_seed(0)
    is_first = torch.rand(12, 5, generator=generator) < 0.2
    alive = torch.ones(12, 5, 3, dtype=torch.bool)
    for step in range(1, 12):  # some fall, and all are back in the next episode
        falls = torch.rand(5, 3, generator=generator) < 0.2
        alive[step] = is_first[step, :, None] | (alive[step - 1] & ~falls)
    chunks, picked = Chunks(alive, is_first, 4), torch.tensor([0, 3, 4, 9, 12])
    view = chunks.view(picked)
    number = torch.arange(12 * 5 * 3).view(12, 5, 3)  # 15 apart from step to step
    wanted = [number[k // 5 * 4 : k // 5 * 4 + 4, k % 5][alive[k // 5 * 4 : k // 5 * 4 + 4, k % 5]] for k in picked]
    assert torch.equal(view.agents.place.sort()[0], torch.cat(wanted).sort()[0])
    steps = view.agents.place.split(view.agents.sizes)
    assert all(torch.equal(now[: len(then)] + 15, then) for now, then in itertools.pairwise(steps))
    step, game = steps[0] // 15, steps[0] % 15 // 3
    assert torch.equal(view.agents.carried[:, 0].bool(), (step % 4 == 0) & ~is_first[step, game])
    assert ((step % 4 == 0) | is_first[step, game]).all()
    assert not is_first[torch.cat(steps[1:]) // 15, torch.cat(steps[1:]) % 15 // 3].any()
    assert torch.equal(view.team.place[view.slot // 3] * 3 + view.slot % 3, view.agents.place)
    assert torch.equal(view.agents.start, step // 4 * 15 + steps[0] % 15)


@pytest.mark.parametrize("env_id", ["smac-3m", "msh-4h1s-4x4"])
def test_the_fallen_have_no_part_in_the_policy_loss(env_id):
    """Garbage in what the fallen did changes neither the loss, nor a statistic, nor a gradient."""
    args, game, agent = make(env_id, hyper_input="local")
    batch, memory = make_batch(args, game, agent)
    gone = ~batch["alive"]
    assert gone.sum() > 50
    garbage = {name: x.clone() for name, x in batch.items()}
    garbage["log_probs"][gone] = -200.0  # a ratio beyond all numbers
    garbage["actions"][gone] = 0
    garbage["legal"][gone] = True
    garbage["reference"][gone] = -3.0
    if not game.shared_reward:
        for name in ("advantages", "returns"):
            garbage[name][gone] = 7.5
    garbage["obs"][gone] = 3.0

    def loss_and_gradient(data):
        agent.zero_grad()
        loss, stats, _ = mh.ppo_loss(args, agent, data, memory, view_of(data), 0.05)
        loss.backward()
        return loss.item(), stats, [parameter.grad.clone() for parameter in agent.parameters()]

    loss, stats, gradients = loss_and_gradient(batch)
    other_loss, other_stats, other_gradients = loss_and_gradient(garbage)
    assert loss == other_loss and stats == other_stats
    assert all(torch.equal(a, b) for a, b in zip(gradients, other_gradients, strict=True))
    garbage["log_probs"][~gone] += 1.0  # the comparison is not blind
    assert loss_and_gradient(garbage)[0] != loss


@pytest.mark.parametrize("variant", ["mappo", "joint", "local"])
def test_what_teammates_do_is_in_no_loss(variant):
    """Garbage in what they did, and in what was thought of it, changes neither loss, nor statistic, nor gradient; the
    learner's own ratios are exactly 1, and its actions are those that were played."""
    args, game, agent = make("smac-2s3z", **VARIANTS[variant], see_actions=variant == "mappo")
    teammates = Teammates(game, ["nearest,focus"], seed=3)
    batch, memory = make_batch(args, game, agent, teammates=teammates)
    view, others = view_of(batch, agent=agent), batch["alive"] & ~batch["learner"]
    assert others.sum() > 100 and (batch["alive"] & batch["learner"]).sum() > 100
    assert (variant == "joint") == (len(view.agents.place) == batch["alive"].sum())

    def loss_and_gradient(data):
        agent.zero_grad()
        loss, stats, ratio = mh.ppo_loss(args, agent, data, memory, view, 0.05)
        loss.backward()
        return loss.item(), stats, ratio, [parameter.grad.clone() for parameter in agent.parameters()]

    loss, stats, ratio, gradients = loss_and_gradient(batch)
    assert torch.equal(ratio, torch.ones_like(ratio))
    garbage = {name: x.clone() for name, x in batch.items()}
    garbage["log_probs"][others], garbage["actions"][others], garbage["advantages"][others] = -200.0, 0, 7.5
    if agent.hyper is not None:
        garbage["reference"][others] = -3.0
    other_loss, other_stats, _, other_gradients = loss_and_gradient(garbage)
    assert loss == other_loss and stats == other_stats
    assert all(torch.equal(a, b) for a, b in zip(gradients, other_gradients, strict=True))
    garbage["log_probs"][batch["learner"]] += 1.0  # the comparison is not blind
    assert loss_and_gradient(garbage)[0] != loss


@pytest.mark.parametrize("variant", ["mappo", "joint", "local", "id"])
def test_an_update_in_which_none_of_the_learner_s_is_left(variant):
    """They fell, and the teammates fight on: the critic learns, and no weight becomes NaN."""
    args, game, agent = make(**VARIANTS[variant], num_steps=16)
    batch, memory = make_batch(args, game, agent, teammates=Teammates(game, ["nearest"], seed=3))
    batch["learner"][:] = False
    acted = batch["alive"] & batch["learner"]
    batch["advantages"] = mh.normalise(batch["returns"], acted).expand_as(acted).contiguous()
    after = learn(args, agent, batch, memory)
    assert all(torch.isfinite(x).all() for x in after.values()) and not same(after, agent.state_dict())


def test_seats_and_teammates_are_drawn_fairly_and_switch_when_said():
    env = envs.make("smac-3s5z", num_envs=3000, seed=1)
    pool = Teammates(TeamGame(env), ["nearest,focus", "hold,random"], seed=5)
    taken = ~pool.is_learner
    assert np.bincount(taken.sum(1), minlength=9) / 3000 == pytest.approx([0, *[1 / 7] * 7, 0], abs=0.025)
    assert taken.mean(0) == pytest.approx(0.5, abs=0.04)  # every seat alike
    assert np.bincount(pool.member[taken]) / taken.sum() == pytest.approx([0.5, 0.5], abs=0.02)
    fixed = Teammates(TeamGame(env), ["nearest"], seed=5, seats=3)
    assert ((~fixed.is_learner).sum(1) == 3).all()

    env = envs.make("smac-3m", num_envs=40, seed=1)
    pool = Teammates(TeamGame(env), ["nearest,focus", "hold,random"], seed=5, switch_step=4)
    changes, late = 0, 0
    for step in range(60):
        pool.current = int(step >= 30)
        before, t = pool.member.copy(), env.t.copy()
        actions = pool.act()
        info = env.step(actions)[-1]
        pool.watch(env, actions, info)
        moved, switched = (pool.member != before).any(1), (t == 3) & ~info["done"]
        assert not moved[~switched & ~info["done"]].any()
        assert np.array_equal(pool.is_learner[switched], before[switched] == -1)
        new = pool.member[switched | info["done"]]
        assert np.isin(new[new >= 0], [0, 1] if step < 30 else [2, 3]).all()
        changes, late = changes + moved[switched].sum(), late + (step >= 30) * len(new)
    assert changes > 30 and late > 30


def test_an_actor_that_sees_actions_does(tmp_path):
    args, game, agent = make(hyper=False, see_actions=True)
    batch, memory = make_batch(args, game, agent)
    other = batch | {"last_step": batch["last_step"].roll(1, dims=3)}
    assert not torch.equal(policy_of(agent, batch, memory), policy_of(agent, other, memory))
    args, game, agent = make(hyper=False)
    assert torch.equal(policy_of(agent, batch, memory), policy_of(agent, other, memory))


def test_a_checkpoint_is_a_teammate(finished, tmp_path):
    """As a member it does in its seats what it does as a team, if its own memory is all that it needs."""
    env = envs.make("smac-3m", num_envs=6, seed=4)
    member, alone = (mh.Team(make(hyper=False)[2], TeamGame(env), torch.Generator(), greedy=True) for _ in range(2))
    who = torch.zeros(6, 3, dtype=torch.bool)
    who[:, 1] = who[:3, 2] = True
    for _ in range(30):
        actions = alone.act()
        there = who & torch.from_numpy(env.alive)
        assert torch.equal(member.choose({}, there), torch.from_numpy(actions)[there])
        info = env.step(actions)[-1]
        member.watch(env, actions, info)
        alone.watch(env, actions, info)
    argv = ["--teammates", f"nearest,{finished}", "--test-teammates", "hold", *TINY, "--total-timesteps", "256"]
    assert train(*argv, "--run-dir", str(tmp_path / "run")) == 0
    scores = json.loads((tmp_path / "run" / "result.json").read_text())["eval"]
    assert {"win_rate", "test_win_rate"} <= scores.keys()
    (tmp_path / "other_name").symlink_to(finished)
    with pytest.raises(envs.ConfigError, match="which is trained with"):
        Teammates(TeamGame(env), [str(finished)], seed=1).refuse(str(tmp_path / "other_name"))


def test_attention_does_not_see_the_fallen():
    args, game, agent = make()
    batch, memory = make_batch(args, game, agent)
    other = {name: x.clone() for name, x in batch.items()}
    other["obs"][~batch["alive"]] = 5.0
    assert torch.equal(policy_of(agent, batch, memory), policy_of(agent, other, memory))


def test_joint_input_sees_the_team_and_local_only_itself():
    for name, seen in (("joint", True), ("local", False), ("id", False)):
        args, game, agent = make(hyper_input=name)
        batch, memory = make_batch(args, game, agent)
        other = {name: x.clone() for name, x in batch.items()}
        other["obs"][:, :, 1:] += 1.0
        other["last_step"][:, :, 1:] += 1.0
        before, after = (policy_of(agent, x, memory)[:, :, 0] for x in (batch, other))
        assert torch.equal(before, after) != seen


@pytest.mark.parametrize("env_id", ["smac-3m", "msh-4h1s-4x4"])
def test_popart_keeps_what_the_critic_says(env_id):
    args, game, agent = make(env_id)
    batch, _ = make_batch(args, game, agent)
    agent.critic.see_returns(torch.randn(500, generator=torch.Generator().manual_seed(0)) * 4 + 9)
    mean, std = agent.critic.scale()
    assert mean.item() == pytest.approx(9, abs=0.5) and std.item() == pytest.approx(4, abs=0.5)
    before = agent.critic.values(batch)
    agent.critic.see_returns(torch.tensor([100.0, 140.0]))
    assert agent.critic.scale()[0] > mean + 2
    assert torch.allclose(before, agent.critic.values(batch), atol=1e-3)


def test_an_optimistic_critic_expects_more_until_it_has_learned():
    said = []
    for initial_value in (0.0, 6.0):
        args, game, agent = make(initial_value=initial_value)
        said.append(agent.critic.values(make_batch(args, game, agent)[0]))
    assert torch.allclose(said[0] + 6, said[1], atol=1e-5)


@pytest.mark.parametrize(("env_id", "settings"), [
    ("msh-4h1s-8x8", {}), ("msd-6x6", {}), ("msh-4h2s-8x8", {"max_block_comp": 2}),
])  # fmt: skip
def test_grid_games_are_seen_from_the_own_place(env_id, settings):
    """Against a plain loop over the cells, on boards of random play in which players have left."""
    env = envs.make(env_id, num_envs=16, seed=3, **settings)
    nearby, rng, left = Nearby(env.game), np.random.default_rng(0), 0
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


def test_generated_layers_are_layers_with_changed_weights():
    """W + dW and b + db, for every agent by its own change; scaled layers are (1 + s) times themselves by groups."""
    for variant in ("joint", "whole matrices"):
        args, game, agent = make(**VARIANTS[variant])
        batch, memory = make_batch(args, game, agent)
        row, hyper = 77, agent.hyper
        with torch.no_grad():
            codes = hyper(batch, memory, view_of(batch))[0]
            x = torch.randn(len(codes), args.hidden_size, generator=torch.Generator().manual_seed(0))
            for k in (1, 2):
                layer = agent.actor.layers[k]
                got = hyper.change(k, x, layer(x), hyper.generate(codes)[k])[row]
                generated = hyper.outputs[k](codes)[row]
                if k == 2:
                    change = generated.view(-1, layer.out_features)
                    left = hyper.factors["2"].weight.T if "2" in hyper.factors else torch.eye(args.hidden_size)
                    by_hand = x[row] @ (layer.weight.T + left @ change[:-1]) + layer.bias + change[-1]
                else:
                    by_hand = layer(x[row]) * (1 + generated.repeat_interleave(args.hidden_size // 8))
                assert torch.allclose(got, by_hand, atol=1e-5)


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


# games


@pytest.mark.parametrize("env_id", ["smac-MMM", "msh-4h1s-4x4", pytest.param("mpe-simple-spread", marks=needs_mpe)])
def test_one_face_for_all_games(env_id):
    """Sizes as said, ends with who was still there, the step's reward, and scores as the env counts them itself."""
    game, rng = TeamGame(make_env(env_id, 6, 3)), np.random.default_rng(0)
    shape, ends, left = (6, game.num_agents), 0, 0
    for _ in range(60):
        seen = game.observe()
        assert seen["obs"].shape == (*shape, game.obs_size) and seen["state"].shape == (6, game.state_size)
        assert seen["alive"].shape == shape and seen["legal"].shape == (*shape, game.num_actions)
        legal = np.where(game.env.alive[:, :, None], game.env.legal, True)
        actions = (legal * rng.random(legal.shape)).argmax(2)
        before = game.env.alive.copy()
        _, reward, terminated, truncated, info = game.env.step(game.env_actions(torch.from_numpy(actions)))
        assert np.array_equal(game.reward(), reward)
        if game.shared_reward:
            assert (reward == reward[:, :1]).all()
        final = game.final(info)
        for b in np.flatnonzero(info["done"]):
            ends += 1
            there = final["alive"][b].numpy()
            left += int((~there).sum())
            assert not there[~before[b]].any()  # nobody comes back
            if game.is_battle and terminated[b].any():  # somebody of the winners stands
                assert there.any() == info["battle_won"][b]
            else:  # whomever the end of time found was there
                assert there[truncated[b]].all()
    assert ends > 0 and (left > 0 or not game.is_battle)


@pytest.mark.parametrize("env_id", ["smac-3m", "msh-4h1s-4x4"])
def test_scores_are_of_one_episode_in_each_env(env_id):
    args, _, agent = make(env_id)
    scores = mh.evaluate(args, agent, 10, 7)
    twin = TeamGame(make_env(env_id, 10, 7))
    team, returns, won, lengths = mh.Team(agent, twin, torch.Generator().manual_seed(7)), {}, {}, {}
    while len(returns) < 10:
        actions = team.act()
        info = twin.env.step(actions)[-1]
        team.watch(twin.env, actions, info)
        for b in np.flatnonzero(info["done"]):
            if b not in returns:
                returns[b], lengths[b] = info["episode_return"][b].copy(), info["episode_length"][b]
                won[b] = twin.is_battle and info["battle_won"][b]
    assert scores["return"] == pytest.approx(np.mean(list(returns.values()))) and scores["episodes"] == 10
    assert scores["length"] == pytest.approx(np.mean(list(lengths.values())))
    if twin.is_battle:
        assert scores["win_rate"] == pytest.approx(np.mean(list(won.values())))
    else:
        by_player = np.mean(list(returns.values()), axis=0)
        assert [scores[f"return-player{i + 1}"] for i in range(4)] == pytest.approx(by_player)


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
    assert sum(bool(row["eval/win_rate"]) for row in rows) == 4  # three on the way, and the last weights
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


@pytest.mark.parametrize(("env_id", "more"), [
    ("smac-3m", []),
    ("smac-3m", ["--no-hyper"]),
    ("smac-3m", ["--teammates", "random", "--later-teammates", "random,hold", "--switch-step", "5", "--see-actions"]),
    ("msh-4h1s-4x4", ["--hyper-input", "local", "--start-window", "3"]),
    pytest.param("mpe-simple-spread", ["--continuous"], marks=needs_mpe),
])  # fmt: skip
def test_every_kind_of_game_resumes_to_the_same_bits(env_id, more, tmp_path, monkeypatch):
    """A run that is stopped in its sixth iteration and resumed, against one that is not: memories, target and all."""
    argv = ["--env-id", env_id, *more, *TINY, "--eval-every", "0", "--update-epochs", "2"]
    update, ends = mh.update, []
    for name, stop_at in (("whole", 0), ("stopped", 6)):
        run_dir, calls = tmp_path / name, []

        def update_and_stop(*given, calls=calls, stop_at=stop_at):
            calls.append(given)
            if len(calls) == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            return update(*given)

        monkeypatch.setattr(mh, "update", update_and_stop)
        assert train(*argv, "--run-dir", str(run_dir)) == (128 + signal.SIGTERM if stop_at else 0)
        if stop_at:
            assert train("--resume", str(run_dir)) == 0
        ends.append((read_metrics(run_dir), load_file(run_dir / "checkpoints" / "last" / "weights.safetensors")))
    assert len(ends[0][0]) == 4 and ends[0][0] == ends[1][0] and same(ends[0][1], ends[1][1])


def test_the_start_curriculum_fades(tmp_path, monkeypatch):
    seen = []

    def set_start_window(game, window, prob, kept=TeamGame.set_start_window):
        seen.append((game.num_envs, window, prob))
        kept(game, window, prob)

    monkeypatch.setattr(TeamGame, "set_start_window", set_start_window)
    argv = ["--env-id", "msh-4h1s-8x8", "--start-window", "3", "--start-window-prob", "0.8", "--num-envs", "4",
            "--num-steps", "16", "--total-timesteps", "256", "--update-epochs", "1", "--eval-every", "0",
            "--final-eval-episodes", "2", "--run-dir", str(tmp_path / "run")]  # fmt: skip
    assert train(*argv) == 0
    assert {(num_envs, window) for num_envs, window, _ in seen} == {(4, 3)}  # evaluation envs never get one
    assert [prob for *_, prob in seen[1:]] == pytest.approx([0.8, 0.4, 0.0, 0.0])


def test_an_update_that_is_no_number_is_refused():
    args, game, agent = make()
    batch, memory = make_batch(args, game, agent)
    batch["advantages"][3, 2] = torch.nan
    with pytest.raises(FloatingPointError, match="the loss became nan"):
        learn(args, agent, batch, memory)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--num-steps 50", "--num-steps 50 must be a multiple of --chunk-length 16"),
        ("--hidden-size 20", "--hidden-size must be a multiple of 8"),
        ("--gamma 2", "--gamma must be from 0 to 1, not 2.0"),
        ("--env-id nothing", "unknown env id 'nothing'"),
        ("--env-id mpe-nothing", "unknown particle game"),
        ("--continuous", "--continuous is for mpe-simple-spread only"),
        ("--start-jitter 500", "--start-jitter must be from 0 to 100"),
        ("--env-id msh-4h1s-4x4 --start-jitter 1", "--start-jitter is for battles only"),
        ("--start-window 3", "--start-window is for grid games only"),
        ("--env-id msh-4h1s-8x8 --start-window 2", "a start window of 2x2 cannot hold"),
        ("--switch-step 3", "--switch-step needs --teammates"),
        ("--env-id msh-4h1s-4x4 --teammates nearest", "--teammates are for battles only"),
        ("--teammates nobody", "there is no run of smac-3m behind the teammates 'nobody'"),
        ("--teammates nearest --test-teammates nobody", "there is no run of smac-3m behind the teammates 'nobody'"),
        ("--teammates nearest --teammate-seats 3", "--teammate-seats must be from 0 to 2 here, not 3"),
        ("--teammates nearest,hold --test-teammates hold", "--test-teammates has hold, which is trained with"),
    ],
)
def test_bad_settings_are_named(argv, words, tmp_path, capsys):
    assert train(*argv.split(), "--run-dir", str(tmp_path / "x")) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and words in said[0]
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
        ("smac-3m", "", "unknown team ''"),
        ("smac-3m", "nearest,nearest", "one team"),
    ):  # fmt: skip
        with pytest.raises(envs.ConfigError, match=words):
            evaluate.main(evaluate.Args(env_id=env_id, roles=roles, episodes=2))


def test_a_team_checkpoint_plays_a_seat_of_a_grid_game(tmp_path):
    run_dir = tmp_path / "grid"
    argv = ["--env-id", "msh-4h1s-4x4", *TINY, "--total-timesteps", "256", "--run-dir", str(run_dir)]
    assert train(*argv) == 0
    env = envs.make("msh-4h1s-4x4", num_envs=16, seed=9)
    played = play_episodes(env, Seats(env, [str(run_dir), "ns", "nh", str(run_dir)], None, 1))
    assert (played.lengths > 0).all()
    with pytest.raises(envs.ConfigError, match="trained with max_block_comp=0, this game has 2"):
        load_policy(str(run_dir), envs.make("msh-4h1s-4x4", num_envs=1, seed=9, max_block_comp=2), 0, seed=0)
    with pytest.raises(envs.ConfigError, match="one policy for all seats"):
        load_policy(f"{run_dir}@2", env, 0, seed=0)
