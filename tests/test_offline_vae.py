"""pretrain_vae.py: data, hindsight, exact ceilings, goal modes, losses, the reader of goals, checkpoints."""

import csv
import dataclasses
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import envs
import pretrain_vae as pv
from envs import ConfigError, recording
from envs.grid import GridGame
from envs.offline import describe, fresh_folder, save_checkpoint
from envs.players import RulePlayers
from envs.sight import Things

ROOT = Path(__file__).resolve().parent.parent
ID = "msh-4h1s-4x4"
SMALL = {"hidden_size": 16, "vae_hidden_size": 16, "dim": 8, "num_steps": 600, "epochs": 1, "reader_updates": 3}
SMALL |= {"pictures": False}
torch.set_num_threads(1)


def make_models(env_id=ID, seed=0, **settings):
    """Untrained networks as the script makes them, and the settings and game they are for."""
    args = pv.Args(env_id=env_id, **SMALL | settings)
    game = envs.game(env_id) if env_id in GridGame.registry else None
    torch.manual_seed(seed)
    models = pv.GoalModels(pv.sizes_of(args, envs.spec(env_id), game, list(game.kinds) if game else []))
    return models, args, game


def small_play(env_id=ID, lineup=("mix",) * 4, num_envs=40, seed=3, **overrides):
    game = envs.game(env_id, **overrides)
    env = envs.make(env_id, num_envs=num_envs, **overrides)
    data = recording.play_episodes(env, game, lineup, seed)
    return game, data


def batch_of(models, args, game, data, rows=slice(0, 64)):
    """Some rows of recorded play as the losses want them."""
    columns = pv.as_columns(models, args, data, game, game.config.horizon)
    return pv.rows_of(columns, torch.arange(len(data["action"]))[rows])


def run(script, *args, cwd):
    return subprocess.run(
        [sys.executable, str(ROOT / script), *map(str, args)], cwd=cwd, capture_output=True, text=True, timeout=300
    )


# data ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lineup", [("nh",) * 4, ("ns", "nh", "mix", "random")])
def test_players_that_left_are_never_stored(lineup):
    """Earlier data was full of STAY of players that had left; here every row is a step of a player on the board."""
    _, data = small_play(lineup=lineup)
    own = data["obs"][..., 0].reshape(len(data["action"]), -1).sum(1)
    assert (own == 1).all()
    assert data["legal"][np.arange(len(own)), data["action"]].all()
    if set(lineup) == {"nh"}:  # everybody leaves with its hare: the hunt is each player's last row, and nobody idles
        assert (data["action"] != 4).all()
        last = np.append((np.diff(data["episode"]) != 0) | (np.diff(data["player"]) != 0), True)
        left = data["goal_row"] == np.arange(len(last))
        assert (last[left & (data["hunt"] == 2)]).all()
    # as many rows as an independent replay counts living players
    env = envs.make(ID, num_envs=40)
    env.reset(3)
    players = RulePlayers(envs.game(ID), lineup, 40, 3)
    over, count = np.zeros(40, bool), 0
    while not over.all():
        count += int((env.alive & ~over[:, None]).sum())
        over |= env.step(players.act(env.obs, env.legal, env.t))[4]["done"]
    assert count == len(own)


def test_hindsight_by_hand():
    """Player 0 tries a stag alone (row 1), walks, takes a hare (row 3); player 1 only tries (row 5), then idles."""
    data = {
        "episode": np.zeros(7, int), "player": np.array([0, 0, 0, 0, 1, 1, 1]), "obs": np.arange(7)[:, None],
        "action": np.array([0, 5, 1, 6, 2, 5, 4]), "taken": np.array([0, 0, 0, 2, 0, 0, 0]),
    }  # fmt: skip
    recording.add_hindsight(data, 0)
    assert data["goal_row"].tolist() == [3, 3, 3, 3, 5, 5, -1]
    assert data["hunt"].tolist() == [2, 2, 2, 2, 1, 1, 0]
    assert not data["repeat"].any()


def test_repeats_are_marked_only_within_one_player():
    data = {
        "episode": np.array([0, 0, 0, 1]), "player": np.array([0, 0, 1, 1]), "action": np.array([5, 5, 5, 5]),
        "taken": np.zeros(4, int), "obs": np.zeros((4, 2)),
    }  # fmt: skip
    recording.add_hindsight(data, 0)
    assert data["repeat"].tolist() == [False, True, False, False]


# ceilings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env_id", "blocks", "roles"),
    [(ID, 0, ("ns", "nh", "random", "fix")), ("msh-4h2s-8x8", 2, ("ns", "nh")), ("msd-4x4", 1, ("nd", "fix"))],
)
def test_rule_probabilities_are_those_of_the_players(env_id, blocks, roles):
    """The ceiling's chances against 600 draws of the real players in each of 25 states (some with blocks)."""
    game, draws = envs.game(env_id, max_block_comp=blocks), 600
    states = game.draw(5, 25)
    obs, legal = game.observe(states)[:, 0], game.legal(states)[:, 0]
    many = np.repeat(states, draws, 0)
    for role in roles:
        players = RulePlayers(game, (role, *(None,) * (game.num_players - 1)), len(many), 1)
        actions = players.act(game.observe(many), game.legal(many), np.zeros(len(many), np.int32))[:, 0]
        seen = np.stack([np.bincount(a, minlength=game.num_actions) for a in actions.reshape(25, draws)]) / draws
        chances = recording.rule_probabilities(game, role, obs, legal)
        assert ((seen > 0) <= (chances > 0)).all(), role
        assert np.abs(seen - chances).max() < 0.09, role  # 4.4 standard deviations


def test_ceilings_are_ordered_and_exact_for_a_random_player():
    game, data = small_play(lineup=("ns", "nh", "nh", "random"), num_envs=200)
    top = recording.ceilings(data, game)
    means = {name: top[name].mean() for name in pv.KNOWLEDGE}
    assert means["state"] <= means["history"] + 0.01 <= means["known"] + 0.02
    is_random = data["role"] == 0
    assert np.allclose(top["known"][is_random], 1 / data["legal"][is_random].sum(1))
    # no guesser that knows the roles beats the ceiling by more than luck
    best = np.argmax(top["best"] + 1e-6 * np.random.default_rng(0).random(top["best"].shape), 1)
    assert abs((best == data["action"]).mean() - means["known"]) < 0.02


# the networks --------------------------------------------------------------------------------------------------------


def test_masks_time_and_goal_reach_the_prediction():
    models, args, game = make_models()
    batch = batch_of(models, args, game, small_play()[1])
    seen, t, legal = batch["seen"], batch["t"], batch["legal"]
    goal = models.goals(torch.randn(64, 8))
    log_probs = models.moa(seen, t, legal, goal)
    assert torch.allclose(log_probs.exp().sum(1), torch.ones(64)) and (log_probs.exp()[~legal] == 0).all()
    for other in (
        models.moa(seen, t + 0.1, legal, goal),
        models.moa(seen, t, legal, models.flag(pv.UNKNOWN).expand(64, -1)),
    ):
        assert not torch.allclose(other, log_probs, atol=1e-4)
    assert not torch.equal(models.moa(seen.roll(1, 0), t, legal, goal), log_probs)


def test_goal_vectors_are_z_and_three_flags():
    models, _, _ = make_models()
    assert models.goal_size == 8 + 3
    assert models.goals(torch.ones(2, 8)).tolist() == [[1.0] * 8 + [0.0] * 3] * 2
    flags = {which: models.flag(which).tolist() for which in (pv.HABIT, pv.UNKNOWN, pv.AIMLESS)}
    assert flags == {
        pv.HABIT: [0.0] * 8 + [1, 0, 0], pv.UNKNOWN: [0.0] * 8 + [0, 1, 0], pv.AIMLESS: [0.0] * 8 + [0, 0, 1]
    }  # fmt: skip
    hidden = pv.hide(torch.randn(4000, 11), 0.15, np.random.default_rng(0))
    assert (hidden == models.flag(pv.UNKNOWN)).all(1).float().mean() == pytest.approx(0.15, abs=0.02)


def test_the_aimless_do_anything_legal_and_teach_nothing():
    models, args, game = make_models()
    batch = batch_of(models, args, game, small_play(lineup=("ns", "random", "random", "random"))[1], slice(0, 200))
    aimless = batch["aimless"]
    assert 20 < aimless.sum() < 180
    goal = models.flag(pv.AIMLESS).expand(200, -1)
    chances = models.moa(batch["seen"], batch["t"], batch["legal"], goal).exp()
    assert torch.allclose(chances, batch["legal"] / batch["legal"].sum(1, keepdim=True), atol=1e-6)

    def gradient(batch):
        models.train().zero_grad()
        pv.losses(models, batch, "both")["ce"].backward()
        return models.moa.layer.weight.grad.clone()

    torch.manual_seed(0)
    mixed = gradient(batch)
    other = torch.where(aimless, (torch.rand(batch["legal"].shape) * batch["legal"]).argmax(1), batch["action"])
    assert (other != batch["action"]).any() and mixed.any()
    torch.manual_seed(0)
    assert torch.equal(gradient(batch | {"action": other}), mixed)
    assert not gradient({name: column[aimless] for name, column in batch.items()}).any()


@pytest.mark.parametrize("mode", ["both", "moa", "recon"])
def test_each_loss_shapes_the_goal_space_as_its_mode_says(mode):
    models, args, game = make_models()
    batch = batch_of(models.train(), args, game, small_play()[1])
    torch.manual_seed(0)
    reached = {}
    for name in ("ce", "recon", "kl"):
        models.zero_grad()
        pv.losses(models, batch, mode, 0.5)[name].backward()
        grads = [models.space.first.table.grad, *(p.grad for p in models.space.encoder.parameters())]
        reached[name] = any(grad is not None and bool(grad.any()) for grad in grads)
    assert reached == {"ce": mode != "recon", "recon": mode != "moa", "kl": True}
    models.zero_grad()
    batch["has_goal"][:10] = False
    sum(pv.losses(models, batch, mode, 0.5).values()).backward()
    learning = [*models.space.named_parameters(), *models.moa.named_parameters()]
    assert [n for n, p in learning if p.grad is None or not p.grad.any()] == []  # everything learns, whatever the mode


def test_reconstruction_and_kl_by_hand():
    """Of rows without a goal nothing is reconstructed; KL of N(1, 1) in 8 dimensions is 4 nats; a decoder that says
    nothing needs log 2 per bit of the planes."""
    models, args, game = make_models()
    batch = batch_of(models, args, game, small_play()[1])
    with torch.no_grad():
        for parameter in models.space.parameters():
            parameter.zero_()
        models.space.encoder[-1].bias[:8] = 1.0
    batch["has_goal"][1:] = False
    parts = pv.losses(models, batch, "both")
    assert parts["kl"].item() == pytest.approx(4.0) and parts["recon"].item() == pytest.approx(
        112 * np.log(2), rel=1e-5
    )
    batch["has_goal"][0] = False
    parts = pv.losses(models, batch, "both")
    assert parts["kl"] == parts["recon"] == 0


def test_equal_chances_are_no_preference():
    """The aimless do everything alike, and the evaluation does not say that they always go up."""
    models, args, game = make_models()
    batch = batch_of(models, args, game, small_play(lineup=("random",) * 4, num_envs=100)[1], slice(None))
    result = pv.evaluate(models, batch, {})["known"]
    legal = batch["legal"][~batch["repeat"]]
    chance = 1 / legal.sum(1, keepdim=True)
    guessed = result["confusion"].sum(0) / result["confusion"].sum()
    assert np.abs(guessed - (legal * chance).mean(0).numpy()).max() < 0.03
    assert result["top1"] == pytest.approx(chance.mean().item(), abs=0.03)


# goal modes ----------------------------------------------------------------------------------------------------------


def test_named_goals_are_the_kind_under_the_own_feet():
    models, _, game = make_models(goal_mode="oracle")
    assert models.z_size == 2 and list(game.kinds) == ["stag", "hare"]
    obs = np.zeros((4, 4, 4, 7), np.uint8)  # own plane, three others, blocks, stags, hares
    obs[:, 1, 2, 5] = obs[:, 0, 0, 6] = obs[:, 3, 1, 6] = 1
    for row, cell in enumerate([(1, 2), (0, 0), (3, 1), (2, 2)]):  # on the stag, on both hares, on nothing
        obs[row][cell][0] = 1
    obs[3, 1, 2, 1] = 1  # another player is on the stag
    assert models.encode(torch.from_numpy(Things(game)(obs))).tolist() == [[1, 0], [0, 1], [0, 1], [0, 0]]


def test_named_goals_are_what_hindsight_says():
    models, args, game = make_models(goal_mode="oracle")
    data = small_play(lineup=("ns", "nh", "mix", "random"))[1]
    goals = pv.play_rows(models, data, Things(game))["goal"]
    is_random, hunts = data["role"] == 0, data["hunt"] > 0
    assert (goals[is_random] == models.flag(pv.AIMLESS).numpy()).all() and is_random.any()
    hunts &= ~is_random
    assert (goals[hunts, :2].argmax(1) == data["hunt"][hunts] - 1).all() and (goals[hunts].sum(1) == 1).all()
    batch = batch_of(models, args, game, data, slice(None))
    parts = pv.losses(models.train(), batch, "both")
    assert parts["recon"] == parts["kl"] == 0 and parts["ce"] > 0  # there is no space to shape


def test_without_goals_everything_is_unknown(tmp_path):
    """The opponent model alone: what it learns from and is judged on offline is what HOP+ asks it with."""
    models, args, game = make_models(goal_mode="none")
    data = small_play(lineup=("ns", "nh", "mix", "random"))[1]
    batch = batch_of(models, args, game, data, slice(None))
    with torch.no_grad():  # whatever is fed but UNKNOWN would change the loss
        models.moa.goal.weight[:, [pv.HABIT, pv.AIMLESS]] = 9.0
        unknown = models.flag(pv.UNKNOWN).expand(len(batch["action"]), -1)
        log_probs = models.moa(batch["seen"], batch["t"], batch["legal"], unknown)
        wanted = torch.nn.functional.nll_loss(log_probs, batch["action"])
        assert torch.allclose(pv.losses(models.train(), batch, "both", 0.15)["ce"], wanted)
    assert torch.equal(pv.predict(models, batch, True), pv.predict(models, batch, False))
    assert (pv.play_rows(models, data, Things(game))["goal"] == models.flag(pv.UNKNOWN).numpy()).all()


@pytest.mark.parametrize("goal_mode", ["oracle", "none"])
def test_goal_modes_end_to_end(tmp_path, goal_mode):
    folder = pv.train(pv.Args(goal_mode=goal_mode, out_dir=str(tmp_path), **SMALL))
    models, about = pv.load_checkpoint(folder, envs.spec(ID))
    assert models.z_size == {"oracle": 2, "none": 0}[goal_mode] == about["sizes"]["z_size"]
    assert about["scores"]["moa/top1"] > 0.1 and ("goal/reader_loss" in about["scores"]) == (goal_mode == "oracle")
    assert pv.find_checkpoint(tmp_path, envs.spec(ID)) is None  # none with learned goals
    assert pv.find_checkpoint(tmp_path, envs.spec(ID), goal_mode=goal_mode) == folder


# batches and scores --------------------------------------------------------------------------------------------------


def test_minibatches_mix_old_and_new():
    offline, recent = {"x": np.zeros(7), "y": np.arange(7)}, {"x": np.ones(3), "y": 10 + np.arange(3)}
    rng = np.random.default_rng(0)
    for share, count in ((0.3, 30), (0.0, 0), (1.0, 100)):
        mb = pv.mixed_batch(recent, offline, 100, share, rng)
        assert len(mb["x"]) == 100 and (mb["x"] == 0).sum() == count
        assert torch.equal(mb["y"] >= 10, mb["x"] == 1)  # rows stay together
    nothing = {name: column[:0] for name, column in recent.items()}
    assert not pv.mixed_batch(nothing, offline, 100, 0.3, rng)["x"].any()


def test_scores_of_fresh_predictions_by_hand():
    """Three steps of two players count: found at once, found second, and given no chance; the fourth had left."""
    predicted = np.zeros((2, 1, 2, 4))
    predicted[0, 0] = [[0.7, 0.2, 0.1, 0.0], [0.6, 0.4, 0.0, 0.0]]
    predicted[1, 0] = [[0.5, 0.3, 0.2, 0.0], [1.0, 0.0, 0.0, 0.0]]
    action, rows = np.array([[[0, 1]], [[3, 2]]]), np.array([[[True, True]], [[True, False]]])
    scores = pv.score_predictions(predicted, action, rows)
    assert scores["moa/top1"] == pytest.approx(1 / 3) and scores["moa/top3"] == pytest.approx(2 / 3)
    assert scores["moa/ce"] == pytest.approx(-(np.log(0.7) + np.log(0.4) + np.log(1e-6)) / 3, rel=1e-4)
    assert {k: v for k, v in scores.items() if "recall" in k} == {
        "moa/recall_action0": 1.0, "moa/recall_action1": 0.0, "moa/recall_action3": 0.0
    }  # fmt: skip
    assert scores["moa/top1-player1"] == 0.5 and scores["moa/top1-player2"] == 0.0


# the reader of goals -------------------------------------------------------------------------------------------------


def reading(num_steps=5, num_rows=3, seed=1):
    """Untrained models and random sequences to read, all of it known and without resets."""
    models, _, game = make_models(seed=seed)
    things, generator = Things(game), torch.Generator().manual_seed(seed)
    shape = (num_steps, num_rows)
    states = game.draw(seed, num_steps * num_rows)
    seen = torch.from_numpy(things(game.observe(states)[:, 0])).view(*shape, -1)
    legal = torch.from_numpy(game.legal(states)[:, 0]).view(*shape, -1)
    seq = {"seen": seen, "legal": legal, "t": torch.rand(shape, generator=generator)}
    seq |= {"last_action": torch.randint(8, shape, generator=generator), "action": torch.full(shape, 4)}
    seq |= {"goal": models.goals(torch.randn(*shape, 8, generator=generator))}
    seq |= {"known": torch.ones(shape, dtype=bool), "resets": torch.zeros(shape, dtype=bool)}
    return models, seq | {"memory": torch.randn(num_rows, 16, generator=generator)}


def loss_by_hand(models, seq, row, first, last, memory):
    """Sum over the known steps first..last of one player: minus the Gaussian's log-density of z (but for its constant)
    and minus the log-probability of the action, given the mean."""
    total = 0.0
    for step in range(first, last):
        mean, log_std, memory = models.reader(
            seq["seen"][step, row][None],
            seq["last_action"][step, row][None],
            memory[None] if memory.dim() == 1 else memory,
        )
        z = seq["goal"][step, row, :8]
        density = torch.distributions.Normal(mean[0], log_std[0].exp()).log_prob(z).sum() + 4 * np.log(2 * np.pi)
        inputs = (seq[name][step, row][None] for name in ("seen", "t", "legal"))
        action = models.moa(*inputs, models.goals(mean))[0, seq["action"][step, row]]
        total = total - (density + action) * seq["known"][step, row]
    return total


def test_reader_loss_by_hand():
    models, seq = reading()
    seq["known"][1, 0] = seq["known"][3:, 1] = False
    seq["resets"][2, 2] = seq["resets"][0, 1] = True
    nothing, whole = torch.zeros(16), range(3)
    parts = [loss_by_hand(models, seq, 0, 0, 5, seq["memory"][0]), loss_by_hand(models, seq, 1, 0, 5, nothing)]
    parts += [loss_by_hand(models, seq, 2, 0, 2, seq["memory"][2]), loss_by_hand(models, seq, 2, 2, 5, nothing)]
    assert len(whole) == 3 and seq["known"].sum() == 12
    assert torch.allclose(pv.reader_loss(models, seq), sum(parts) / 12, rtol=1e-5)


def test_the_reader_learns_nothing_from_padding_or_from_before_a_reset():
    models, seq = reading()
    seq["known"][3:] = False  # padding: nothing known from here on
    plain = pv.reader_loss(models, seq)
    for name in ("seen", "goal", "action", "t"):
        changed = seq[name].clone()
        changed[3:] = changed[3:].roll(1, 1) if name != "action" else 0
        assert torch.equal(pv.reader_loss(models, seq | {name: changed}), plain)
    seq["resets"][2] = True
    seq["known"][:2] = False
    plain = pv.reader_loss(models, seq)
    changed = seq["seen"].clone()
    changed[:2] = changed[:2].roll(1, 1)
    other = seq | {"seen": changed, "memory": seq["memory"] + 1}
    assert torch.equal(pv.reader_loss(models, other), plain)
    assert not torch.equal(pv.reader_loss(models, other | {"resets": torch.zeros_like(seq["resets"])}), plain)
    seq["known"][:] = False
    assert pv.reader_loss(models, seq) == 0


def test_sequences_to_read_by_hand():
    """Two players of 3 and 1 steps, sequences of 2: the third step is cut, the missing one is padding; a step without a
    goal in hindsight, or of a random player, is read but not learned from."""
    data = {"episode": np.zeros(4, int), "player": np.array([0, 0, 0, 1]), "t": np.array([0, 1, 2, 0])}
    data |= {"action": np.array([3, 2, 6, 1]), "goal_row": np.array([2, 2, 2, -1])}
    rows = {"t": np.array([0.0, 0.1, 0.2, 0.0]), "goal": np.zeros((4, 5)), "action": data["action"]}
    got = pv.sequences_of(rows, data, 7, 2)
    assert got["action"][:, 0].tolist() == [3, 2] and got["action"][0, 1] == 1
    assert got["last_action"][:, 0].tolist() == [7, 3] and got["last_action"][0, 1] == 7
    assert got["known"].tolist() == [[True, False], [True, False]] and not got["resets"].any()
    data["goal_row"][3] = 3
    assert pv.sequences_of(rows, data, 7, 2)["known"].tolist() == [[True, True], [True, False]]
    rows["goal"][3, pv.AIMLESS] = 1
    assert pv.sequences_of(rows, data, 7, 2)["known"].tolist() == [[True, False], [True, False]]


def test_only_real_games_are_read_online():
    shape = (3, 5, 2)  # T, B, N; the last two games are imagined
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(9, size=shape) for name in ("last_action", "t", "action")}
    batch |= {"seen": rng.integers(9, size=(*shape, 4)), "legal": np.ones((*shape, 7), bool)}
    goals, known, memory = rng.random((*shape, 5)), rng.random(shape) < 0.5, rng.random((5, 2, 16)).astype(np.float32)
    first, done = np.array([True, False, False, True, True]), rng.random((3, 5)) < 0.5
    got = pv.sequences_to_read(batch, goals, known, memory, first, done, 3)
    assert got["seen"].shape == (3, 6, 4) and got["memory"].shape == (6, 16)
    for game, player in np.ndindex(3, 2):
        row = 2 * game + player
        assert (got["seen"][:, row].numpy() == batch["seen"][:, game, player]).all()
        assert (got["goal"][:, row].numpy() == goals[:, game, player]).all()
        assert (got["known"][:, row].numpy() == known[:, game, player]).all()
        assert got["resets"][:, row].tolist() == [first[game], *done[:2, game]]  # the step after an end begins anew
        assert (got["memory"][row].numpy() == memory[game, player]).all()


def test_the_reader_learns_and_nothing_else_does():
    models, _, game = make_models(goal_mode="oracle")
    data = small_play(lineup=("ns", "nh", "ns", "nh"), num_envs=100)[1]
    sequences = pv.sequences_of(pv.play_rows(models, data, Things(game)), data, 7, 8)
    before = {name: tensor.clone() for name, tensor in models.state_dict().items()}
    first = pv.train_reader(models, sequences, 1, np.random.default_rng(0))
    assert pv.train_reader(models, sequences, 60, np.random.default_rng(0)) < first - 1
    changed = {
        name.split(".")[0] for name, tensor in models.state_dict().items() if not torch.equal(tensor, before[name])
    }
    assert changed == {"reader"}


# checkpoints ---------------------------------------------------------------------------------------------------------


def save(folder, env_id=ID, obs_is_state=False, **settings):
    models, args, _ = make_models(env_id, obs_is_state=obs_is_state, **settings)
    folder.mkdir(parents=True)
    about = describe("goal_models", pv.__file__, args, envs.spec(env_id), obs_is_state)
    save_checkpoint(folder, models, about | {"sizes": models.sizes})
    return models


def test_checkpoint_round_trip_and_find(tmp_path):
    models = save(tmp_path / "vae__100" / "dim8")
    save(tmp_path / "vae__200" / "dim8", "msh-4h2s-4x4")
    save(tmp_path / "vae__250" / "dim8", goal_mode="oracle")
    (tmp_path / "vae__300" / "dim8").mkdir(parents=True)  # of a run that was killed
    spec = envs.spec(ID)
    folder = pv.find_checkpoint(tmp_path, spec)
    assert folder == tmp_path / "vae__100" / "dim8" and pv.find_checkpoint(tmp_path / "no", spec) is None
    assert pv.find_checkpoint(tmp_path, spec, goal_mode="oracle") == tmp_path / "vae__250" / "dim8"
    assert pv.find_checkpoint(tmp_path, spec, goal_mode="none") is None
    loaded, about = pv.load_checkpoint(folder, spec)
    assert not loaded.training and about["env_id"] == ID
    for name, tensor in models.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])
    assert not list(folder.glob(".*"))  # nothing temporary left


def test_checkpoint_for_168_inputs_is_refused_for_80(tmp_path):
    save(tmp_path / "a", "smac-8m", obs_is_state=True)
    save(tmp_path / "b", "smac-8m")
    spec = envs.spec("smac-8m")
    with pytest.raises(ConfigError) as error:
        pv.load_checkpoint(tmp_path / "a", spec, obs_is_state=False)
    assert str(error.value) == "checkpoint was trained on state (168), this run uses obs (80)"
    with pytest.raises(ConfigError) as error:
        pv.load_checkpoint(tmp_path / "b", spec, obs_is_state=True)
    assert str(error.value) == "checkpoint was trained on obs (80), this run uses state (168)"
    pv.load_checkpoint(tmp_path / "a", spec, obs_is_state=True)


def test_checkpoint_of_another_game_is_refused(tmp_path):
    save(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"trained on msh-4h1s-4x4, this run uses msd-4x4"):
        pv.load_checkpoint(tmp_path / "a", envs.spec("msd-4x4"))
    with pytest.raises(ConfigError, match=r"trained with horizon 35, this run uses horizon 20"):
        pv.load_checkpoint(tmp_path / "a", envs.spec(ID, horizon=20))
    pv.load_checkpoint(tmp_path / "a", envs.spec(ID, start_window=3, start_window_prob=0.5))  # changes no rule


def test_prepare_takes_what_is_asked_for_or_fits_or_makes_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole_train, asked = pv.train, []

    def train(args):  # what it was asked for, but small
        asked.append((args.env_id, args.goal_mode, args.seed, args.out_dir))
        return whole_train(pv.Args(goal_mode=args.goal_mode, seed=args.seed, **SMALL))

    monkeypatch.setattr(pv, "train", train)
    made, models = pv.prepare("", ID, "oracle", 7)
    assert asked == [(ID, "oracle", 7, "vae_ckpts")] and models.z_size == 2
    assert pv.prepare("", ID, "oracle", 8)[0] == made and len(asked) == 1  # the newest that fits
    save(tmp_path / "mine")
    folder, models = pv.prepare("mine", ID, "learned", 1)
    assert folder == Path("mine") and models.z_size == 8
    with pytest.raises(ConfigError, match="'mine' was trained with goal mode learned, this run uses none"):
        pv.prepare("mine", ID, "none", 1)
    with pytest.raises(ConfigError, match="trained on msh-4h1s-4x4, this run uses msh-4h1s-8x8"):
        pv.prepare("mine", "msh-4h1s-8x8", "learned", 1)
    with pytest.raises(ConfigError, match="'nowhere' is no checkpoint"):
        pv.prepare("nowhere", ID, "learned", 1)


def damage(folder, how):
    spec, weights = folder / "spec.json", folder / "weights.safetensors"
    about, raw = json.loads(spec.read_text()), weights.read_bytes()
    del about["sha256"]  # or nothing else would be looked at
    if how == "truncated":
        weights.write_bytes(raw[: len(raw) // 2])
    elif how == "empty":
        weights.write_bytes(b"")
    elif how == "pickle":
        weights.write_bytes(pickle.dumps({"a": 1}))
    elif how == "huge header":
        weights.write_bytes((2**62).to_bytes(8, "little") + raw[8:])
    elif how == "no weights":
        weights.unlink()
    elif how == "nan":
        tensors = load_file(weights)
        save_file({name: tensor * float("nan") for name, tensor in tensors.items()}, weights)
    elif how == "other sizes":
        about["sizes"]["hidden_size"] = 17
    elif how == "sizes that would fill the memory":
        about["sizes"] |= {"hidden_size": 8192, "vae_hidden_size": 8192, "z_size": 1024, "num_ids": 10**7}
    elif how == "sizes of a wrong type":
        about["sizes"]["z_size"] = "16"
    elif how == "sizes below zero":
        about["sizes"]["z_size"] = -1
    elif how == "another goal mode":
        about["sizes"]["goal_mode"] = "none"
    elif how == "no goal mode":
        about["sizes"]["goal_mode"] = ["learned"]
    elif how == "no sizes":
        about["sizes"] = [1, 2]
    elif how == "settings of a wrong type":
        about |= {"obs_is_state": "no", "obs_shape": 7, "state_shape": "a\nb"}
    elif how == "other kind":
        about["kind"] = {"x": 1}
    spec.write_text(json.dumps(about))
    if how == "no json":
        spec.write_bytes(b"\xff\xfe{")
    elif how == "nested json":
        spec.write_text("[" * 100_000)
    elif how == "no spec":
        spec.unlink()


@pytest.mark.parametrize(
    "how",
    [
        *("truncated", "empty", "pickle", "huge header", "no weights", "nan", "other sizes", "sizes of a wrong type"),
        *("sizes that would fill the memory", "no sizes", "settings of a wrong type", "other kind"),
        *("sizes below zero", "another goal mode", "no goal mode", "no json", "nested json", "no spec"),
    ],
)
def test_damaged_and_hostile_checkpoints_end_in_one_sentence(tmp_path, how):
    save(tmp_path / "a")
    damage(tmp_path / "a", how)
    with pytest.raises(ConfigError) as error:
        pv.load_checkpoint(tmp_path / "a", envs.spec(ID))
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


def test_damaged_and_hostile_data_files_end_in_one_sentence(tmp_path):
    game, data = small_play(num_envs=5)
    spec = game.spec()
    data["meta"] = {"kind": "play", "obs_is_state": False, **recording.game_part(spec)}
    path = tmp_path / "data.npz"
    recording.save_data(path, data)
    again = recording.load_play(path, spec)
    assert all((again[name] == data[name]).all() for name in recording.PLAY)
    good = dict(np.load(path))
    bad = {
        "pickle": good | {"action": np.array([{"a": 1}], dtype=object)},
        "short": good | {"action": good["action"][:-1]},
        "action": good | {"action": good["action"] + 50},
        "goal": good | {"goal_row": good["goal_row"] + 10**6},
        "no hunt": good | {"goal_row": np.flatnonzero(good["action"] < 5)[good["goal_row"] * 0]},
        "role": good | {"role": good["role"] + 9},
        "illegal": good | {"legal": ~good["legal"]},
        "meta": good | {"meta": np.array("[]")},
        "missing": {name: value for name, value in good.items() if name != "t"},
    }
    for name, columns in bad.items():
        np.savez(tmp_path / f"{name}.npz", **columns)
    (tmp_path / "half.npz").write_bytes(path.read_bytes()[:1000])
    (tmp_path / "text.npz").write_text("hello")
    for name in (*bad, "half", "text", "absent"):
        with pytest.raises(ConfigError) as error:
            recording.load_play(tmp_path / f"{name}.npz", spec)
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match=r"was recorded on msh-4h1s-4x4, this run uses msd-4x4"):
        recording.load_play(path, envs.spec("msd-4x4"))
    with pytest.raises(ConfigError, match="does not hold transitions"):
        recording.load_transitions(path, game)


# the script ----------------------------------------------------------------------------------------------------------


def test_what_is_judged_offline_is_what_plays(tmp_path, monkeypatch, capsys):
    """The opponent model behind the printed top-1 is, bit for bit, the one that HOP+ gets and plans with."""
    monkeypatch.chdir(tmp_path)
    evaluate, judged = pv.evaluate, []

    def watched(models, batch, ceiling):
        judged.append(({k: v.clone() for k, v in models.moa.state_dict().items()}, batch))
        return evaluate(models, batch, ceiling)

    monkeypatch.setattr(pv, "evaluate", watched)
    folder = pv.train(pv.Args(**SMALL | {"epochs": 2, "lineups": ("mix", "random")}))
    printed = re.findall(r"\[MOA\] epoch \d: top1=(\S+) .*goal hidden: top1=([\d.]+)", capsys.readouterr().out)[-1]
    (_, _), (weights, batch) = judged
    found, models = pv.prepare("", ID, "learned", 1)
    assert found.resolve() == folder.resolve()
    habit = models.goal_size + pv.HABIT
    others = [k for k in range(models.goal_size) if k != habit]
    for name, tensor in models.moa.state_dict().items():
        same = (weights[name], tensor)
        if name == "goal.weight":  # nobody was met yet: HABIT starts as UNKNOWN
            assert torch.equal(tensor[:, habit], tensor[:, models.goal_size + pv.UNKNOWN])
            same = (weights[name][:, others], tensor[:, others])
        assert same[0].numpy().tobytes() == same[1].numpy().tobytes(), name
    again = evaluate(models, batch, {})
    assert (f"{again['known']['top1']:.4f}", f"{again['hidden']['top1']:.4f}") == printed

    import hopplus_mcts
    import hopplus_nomcts

    for script in (hopplus_mcts, hopplus_nomcts):
        args, game = script.Args(), envs.game(ID)
        nets = (
            script.make_nets(args, game, models)
            if script is hopplus_mcts
            else script.make_nets(args, game, models, None)
        )
        beliefs = script.Beliefs(args, game, nets["models"], 6, 1)
        env = envs.make(ID, num_envs=6, seed=1)
        beliefs.look(env)
        row, player = np.nonzero(env.alive)
        ids, t = torch.from_numpy(beliefs.seen[row, player]), torch.from_numpy(beliefs.things.time(env.t)[row])
        habit = models.flag(pv.HABIT).expand(len(row), -1)
        said = models.moa(ids, t, torch.from_numpy(env.legal[row, player]), habit).exp().detach().numpy()
        assert np.allclose(beliefs.probs[row, player, -2], said, atol=1e-6)
        assert np.allclose(
            beliefs.probs[row, player, -1], env.legal[row, player] / env.legal[row, player].sum(1)[:, None]
        )


def test_script_runs_writes_its_files_and_repeats_itself(tmp_path):
    small = ["--num-steps", 1500, "--epochs", 1, "--vae-hidden-size", 32, "--reader-updates", 5, "--lineups", "mix"]
    first = run("pretrain_vae.py", *small, "--out-dir", "a", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "[MOA] epoch 1: top1=" in first.stdout and "top3=" in first.stdout and "reader of goals" in first.stdout
    (folder,) = (tmp_path / "a").glob("vae__*/dim16")
    for name in ("confusion_matrix", "class_distribution", "per_class_recall"):
        assert (folder / f"moa_eval_epoch1_{name}.png").stat().st_size > 5000
    assert (folder / "vae_loss_curve.png").exists() and (folder / "goal_map.png").exists()
    rows = list(csv.DictReader(open(folder / "moa_eval_epoch1.csv")))
    assert [row["action"] for row in rows[:7]] == list(envs.spec(ID).action_names)
    np.load(folder / "moa_eval_epoch1.npz")["known_confusion"]
    (data,) = (tmp_path / "a" / "data").glob("*.npz")
    trained = int(re.search(r"training on (\d+) distinct", first.stdout)[1])
    assert 0.8 < trained / (~np.load(data)["repeat"]).sum() < 1  # no repeats
    settings = {"epochs": 1, "vae_hidden_size": 32, "reader_updates": 5, "pictures": False}
    again = pv.train(pv.Args(data=str(data), out_dir=str(tmp_path / "b"), **settings))

    def scalars(path):  # the same seed and data give the same scalars and weights, bit for bit
        return [{k: v for k, v in row.items() if not k.endswith("_time")} for row in csv.DictReader(open(path))]

    assert scalars(folder / "metrics.csv") == scalars(again / "metrics.csv")
    assert (folder / "weights.safetensors").read_bytes() == (again / "weights.safetensors").read_bytes()
    other = pv.train(pv.Args(data=str(data), out_dir=str(tmp_path / "b"), seed=2, **settings))
    assert (folder / "weights.safetensors").read_bytes() != (other / "weights.safetensors").read_bytes()


def test_default_lineups(capsys):
    """`mix`, and one of each; the seats of a mixed line-up rotate."""
    game = envs.game(ID)
    data = recording.collect_play(game.spec(), game, (), 12_000, np.random.SeedSequence(1))
    out = capsys.readouterr().out
    assert "mix,mix,mix,mix: " in out and "ns,nh,mix,random: " in out
    assert len(np.unique(data["player"][data["role"] == 0])) > 1  # not always the last seat
    quiet = recording.collect_play(game.spec(), game, (), 12_000, np.random.SeedSequence(1), quiet=True)
    assert capsys.readouterr().out == "" and all((quiet[name] == data[name]).all() for name in recording.PLAY)


def test_rehearsal_is_distinct_steps_of_players_with_a_purpose():
    models, _, game = make_models()
    rows = pv.rehearsal(models, game, 500, 1, False)
    assert not rows["goal"][:, -pv.FLAGS :].any() and rows["legal"][np.arange(len(rows["t"])), rows["action"]].all()
    blocks = envs.game(ID, max_block_comp=2)  # fits into networks for boards with blocks
    assert pv.rehearsal(models, blocks, 500, 1, False)["seen"].shape[1] == Things(blocks).most


def test_collapse_is_said(tmp_path, capsys):
    pv.train(pv.Args(out_dir=str(tmp_path), **SMALL | {"epochs": 2, "lineups": ("nh",), "alpha": 1e4}))
    assert "posterior collapse" in capsys.readouterr().out


@pytest.mark.parametrize("env_id", ["msd-4x4", "msh-4h2s-8x8"])
def test_other_games(tmp_path, env_id):
    folder = pv.train(pv.Args(env_id=env_id, out_dir=str(tmp_path), **SMALL))
    _, about = pv.load_checkpoint(folder, envs.spec(env_id))
    assert about["scores"]["moa/top1"] > 0 and np.isfinite(about["scores"]["goal/reader_loss"])


@pytest.mark.parametrize(("obs_is_state", "inputs"), [(False, 80), (True, 168)])
def test_battles(tmp_path, obs_is_state, inputs):
    args = pv.Args(env_id="smac-8m", obs_is_state=obs_is_state, out_dir=str(tmp_path), **SMALL)
    folder = pv.train(args)
    models, about = pv.load_checkpoint(folder, envs.spec("smac-8m"), obs_is_state)
    assert models.mean.shape == (inputs,) == models.space.decoder[-1].bias.shape
    who = 8 * obs_is_state  # the state does not say who acts
    assert models.moa.first.dense.weight.shape[1] == models.space.first.dense.weight.shape[1] == inputs + who
    assert about["scores"]["moa/top1"] > 0 and models.mean.any() and (models.std >= 0.05 - 1e-6).all()
    with pytest.raises(ConfigError, match=f"{inputs}.*{248 - inputs}"):
        pv.load_checkpoint(folder, envs.spec("smac-8m"), not obs_is_state)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"lineups": ("ns,nx,ns,ns",)}, "nx"),
        ({"lineups": ("ns,ns",)}, "needs 1 or 4"),
        ({"env_id": "msh-9"}, "unknown env id"),
        ({"alpha": -1.0}, "--alpha must be from"),
        ({"hide_prob": 2.0}, "--hide-prob must be from 0 to 1"),
        ({"dim": 5}, "--dim must be one of 8, 16, 32"),
        ({"goal_mode": "kinds"}, "--goal-mode must be one of learned, oracle, none"),
        ({"data": "nowhere.npz"}, "does not exist"),
        ({"obs_is_state": True}, "--obs-is-state is for battles"),
        ({"env_id": "smac-8m", "goal_mode": "oracle"}, "--goal-mode oracle is for grid games"),
        ({"env_id": "smac-8m", "lineups": ("nearest,focus",)}, "has 2 roles"),
    ],
)
def test_wrong_settings_are_one_sentence(tmp_path, flags, words):
    with pytest.raises(ConfigError, match=words) as error:
        pv.train(pv.Args(out_dir=str(tmp_path), **SMALL | flags))
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())  # nothing is left behind


@pytest.mark.parametrize("flags", [["--lineups", "nobody"], ["--hidden", "3"]])
def test_wrong_settings_end_the_script_with_one_line(tmp_path, flags):
    out = run("pretrain_vae.py", *flags, "--out-dir", tmp_path, cwd=tmp_path)
    assert out.returncode == 2 and out.stderr.startswith("error: ") and len(out.stderr.strip().splitlines()) == 1


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "no" / "where")
    (tmp_path / "file").write_text("")
    for name in ("link", "file"):
        with pytest.raises(ConfigError, match=f"cannot write to '.*{name}'"):
            fresh_folder(tmp_path / name, "vae")
    assert fresh_folder(tmp_path / "new" / "one", "vae") != fresh_folder(tmp_path / "new" / "one", "vae")


# the pages -----------------------------------------------------------------------------------------------------------

PAGES = ("docs/offline_models.md", "docs/hopplus.md", "docs/hopplus_nomcts.md", "vae_ckpts/README.md")


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_settings_and_functions_that_exist(page):
    """Every `--flag` is one of some script's, and every `name` that looks like one of ours is in the code."""
    import evaluate
    import hopplus_mcts
    import hopplus_nomcts
    import test_obs_reward_model
    import train_world_model as wm

    text = (ROOT / page).read_text()
    scripts = (pv, wm, test_obs_reward_model, evaluate, hopplus_nomcts, hopplus_mcts)
    if page == "docs/hopplus.md":
        scripts = (hopplus_mcts, evaluate)
    if page == "docs/hopplus_nomcts.md":
        scripts = (hopplus_nomcts,)
    fields = {field.name.replace("_", "-") for script in scripts for field in dataclasses.fields(script.Args)}
    flags = set(re.findall(r"(?<![\w-])--([a-z][a-z-]*)", text))
    assert {flag.removeprefix("no-") for flag in flags if flag not in fields} <= fields
    files = [*ROOT.glob("*.py"), *ROOT.glob("envs/**/*.py")]
    source = "\n".join(file.read_text() for file in files)
    code = re.sub(r"```.*?```", "", text, flags=re.S)
    names = re.findall(r"`((?:[A-Z]\w+\.)?[A-Za-z]\w*_\w+|[A-Z][a-z]+[A-Z]\w+(?:\.\w+)?)`", code)
    assert len(names) > 3 or "README" in page
    assert [name for name in names if not re.search(rf"\b{name.split('.')[-1]}\b", source)] == []
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert ((ROOT / page).parent / link).exists(), link


def test_the_example_of_the_page_runs(tmp_path, monkeypatch, capsys):
    import train_world_model as wm

    monkeypatch.chdir(tmp_path)
    pv.train(pv.Args(**SMALL))
    wm.train(wm.Args(num_transitions=300, epochs=1, hidden_size=8))
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "offline_models.md").read_text(), re.S)
    exec(example, {})
    assert "torch.Size([32, 7]) torch.Size([32, 8]) (8, 4) (11, 8, 22)" in capsys.readouterr().out
