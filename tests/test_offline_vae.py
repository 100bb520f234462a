"""pretrain_vae.py: data without players that left, hindsight, exact ceilings, masks and gradients, checkpoints."""

import csv
import json
import pickle
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
from envs.players import RulePlayers

ROOT = Path(__file__).resolve().parent.parent
ID = "msh-4h1s-4x4"
torch.set_num_threads(1)


def sizes(**changes):
    base = {"obs_shape": [4, 4, 7], "obs_is_state": False, "horizon": 35, "num_players": 4, "num_actions": 7}
    return base | {"num_kinds": 2, "dim": 8, "hidden": 16, "num_cells": 16} | changes


def small_play(env_id=ID, lineup=("mix",) * 4, num_envs=40, seed=3, **overrides):
    game = envs.game(env_id, **overrides)
    env = envs.make(env_id, num_envs=num_envs, **overrides)
    data = recording.play_episodes(env, game, lineup, seed)
    return game, data


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


# the network ---------------------------------------------------------------------------------------------------------


def batch_of(data, rows=slice(0, 64)):
    goal = data["goal_row"][rows]
    columns = {name: torch.from_numpy(data[name][rows]) for name in ("obs", "legal", "action", "t", "player", "repeat")}
    return columns | {
        "goal_obs": torch.from_numpy(data["obs"][np.maximum(goal, 0)]), "has_goal": torch.from_numpy(goal >= 0)
    }  # fmt: skip


def test_features_look_from_the_own_cell():
    model = pv.GoalVAE(sizes())
    obs = torch.zeros(2, 4, 4, 7)
    obs[0, 0, 0, 0] = obs[0, 1, 2, 5] = 1  # own at (0, 0), a stag one down and two to the right
    obs[1, 2, 1, 0] = obs[1, 3, 3, 5] = 1  # the same seen from (2, 1)
    seen = model.features(obs)[:, : 49 * 7].view(2, 7, 7, 7)
    assert seen[0, 3 + 1, 3 + 2, 4] == seen[1, 3 + 1, 3 + 2, 4] == 1
    assert seen[0, :3, :, 6].all() and not seen[0, 3:, 3:, 6].any()  # off the board above; on it below and to the right
    assert seen[:, :, :, 4].sum() == 2


def test_masks_and_goal_reach_the_prediction():
    _, data = small_play()
    model, batch = pv.GoalVAE(sizes()), batch_of(data)
    z = torch.randn(64, 8)
    logits = model.logits(batch["obs"], batch["t"], batch["legal"], z)
    assert (logits.softmax(1)[~batch["legal"]] == 0).all()
    hidden = model.logits(batch["obs"], batch["t"], batch["legal"])
    assert not torch.equal(logits, hidden)
    later = model.logits(batch["obs"], batch["t"] + 1, batch["legal"], z)
    assert not torch.equal(logits, later)


@pytest.mark.parametrize("mode", ["both", "moa", "recon"])
def test_each_loss_shapes_the_goal_space_as_its_mode_says(mode):
    _, data = small_play()
    torch.manual_seed(0)
    model, batch = pv.GoalVAE(sizes()).train(), batch_of(data)
    reached = {}
    for name in ("ce", "recon", "kl"):
        model.zero_grad()
        pv.losses(model, batch, mode, 0.5)[name].backward()
        reached[name] = model.encoder[0].weight.grad is not None and bool(model.encoder[0].weight.grad.any())
    assert reached == {"ce": mode != "recon", "recon": mode != "moa", "kl": True}
    model.zero_grad()
    batch["has_goal"][:10] = False
    sum(pv.losses(model, batch, mode, 0.5).values()).backward()
    still = [n for n, p in model.named_parameters() if "probe" not in n and (p.grad is None or not p.grad.any())]
    assert still == []  # everything learns, whatever the mode


def test_goal_candidates_stand_on_each_item():
    game = envs.game(ID)
    obs = game.observe(game.draw(1, 3))[:, 0]
    candidates, row, kind = pv.goal_candidates(obs, 4)
    assert np.bincount(row).tolist() == [5, 5, 5] and np.bincount(kind).tolist() == [3, 12]
    assert (candidates[..., 0].sum((1, 2)) == 1).all()
    items = np.take_along_axis(candidates[..., 5:], kind[:, None, None, None], 3)[..., 0]
    assert ((candidates[..., 0] * items).sum((1, 2)) == 1).all()
    assert (candidates[..., 1:] == obs[row][..., 1:]).all()


# checkpoints ---------------------------------------------------------------------------------------------------------


def save(folder, env_id=ID, obs_is_state=False, **changes):
    spec = envs.spec(env_id)
    shape = list(spec.state_shape if obs_is_state else spec.obs_shape)
    model = pv.GoalVAE(sizes(obs_shape=shape, obs_is_state=obs_is_state, num_players=spec.num_players, **changes))
    folder.mkdir(parents=True)
    about = {"kind": "goal_vae", "obs_is_state": obs_is_state, **recording.game_part(spec), "sizes": model.sizes}
    pv.save_checkpoint(folder, model, about)
    return model


def test_checkpoint_round_trip_and_find(tmp_path):
    model = save(tmp_path / "vae__100" / "dim8")
    save(tmp_path / "vae__200" / "dim8", "msh-4h2s-4x4")
    (tmp_path / "vae__300" / "dim8").mkdir(parents=True)  # of a run that was killed
    spec = envs.spec(ID)
    folder = pv.find_checkpoint(tmp_path, spec)
    assert folder == tmp_path / "vae__100" / "dim8"
    assert pv.find_checkpoint(tmp_path, spec, dim=16) is None and pv.find_checkpoint(tmp_path / "no", spec) is None
    loaded, about = pv.load_checkpoint(folder, spec)
    assert not loaded.training and about["env_id"] == ID
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])
    obs = torch.from_numpy(envs.game(ID).observe(envs.game(ID).draw(0, 5))[:, 0])
    assert torch.equal(model.features(obs), loaded.features(obs))
    assert not list(folder.glob(".*"))  # nothing temporary left


def test_checkpoint_for_168_inputs_is_refused_for_80(tmp_path):
    save(tmp_path / "a", "smac-8m", obs_is_state=True, num_cells=1)
    save(tmp_path / "b", "smac-8m", num_cells=1)
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


def damage(folder, how):
    spec, weights = folder / "spec.json", folder / "weights.safetensors"
    about, raw = json.loads(spec.read_text()), weights.read_bytes()
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
        about["sizes"]["hidden"] = 17
    elif how == "sizes that would fill the memory":
        about["sizes"] |= {"hidden": 8192, "dim": 1024, "obs_shape": [100, 100, 100]}
    elif how == "sizes of a wrong type":
        about["sizes"]["dim"] = "16"
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
        *("no json", "nested json", "no spec"),
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


def test_script_runs_writes_its_files_and_repeats_itself(tmp_path):
    small = ["--num-steps", 1500, "--epochs", 1, "--hidden", 32, "--lineups", "mix"]
    first = run("pretrain_vae.py", *small, "--out-dir", "a", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "[MOA] epoch 1: top1=" in first.stdout and "top3=" in first.stdout and "[GOAL]" in first.stdout
    (folder,) = (tmp_path / "a").glob("vae__*/dim16")
    for name in ("confusion_matrix", "class_distribution", "per_class_recall"):
        assert (folder / f"moa_eval_epoch1_{name}.png").stat().st_size > 5000
    assert (folder / "vae_loss_curve.png").exists() and (folder / "goal_map.png").exists()
    rows = list(csv.DictReader(open(folder / "moa_eval_epoch1.csv")))
    assert [row["action"] for row in rows[:7]] == list(envs.spec(ID).action_names)
    np.load(folder / "moa_eval_epoch1.npz")["known_confusion"]
    pv.load_checkpoint(folder, envs.spec(ID))
    (data,) = (tmp_path / "a" / "data").glob("*.npz")
    again = pv.train(pv.Args(data=str(data), epochs=1, hidden=32, pictures=False, out_dir=str(tmp_path / "b")))

    def scalars(path):  # the same seed and data give the same scalars, bit for bit
        return [{k: v for k, v in row.items() if not k.endswith("_time")} for row in csv.DictReader(open(path))]

    assert scalars(folder / "metrics.csv") == scalars(again / "metrics.csv")


def test_collapse_is_said(tmp_path, capsys):
    args = pv.Args(num_steps=400, epochs=2, hidden=16, lineups=("nh",), alpha=1e4, pictures=False)
    args.out_dir = str(tmp_path)
    pv.train(args)
    assert "posterior collapse" in capsys.readouterr().out


@pytest.mark.parametrize("env_id", ["msd-4x4", "msh-4h2s-8x8", "smac-8m"])
def test_other_games(tmp_path, env_id):
    args = pv.Args(env_id=env_id, num_steps=600, epochs=1, hidden=16, pictures=False, out_dir=str(tmp_path))
    args.obs_is_state = env_id == "smac-8m"
    folder = pv.train(args)
    model, about = pv.load_checkpoint(folder, envs.spec(env_id), args.obs_is_state)
    assert about["scores"]["moa/top1"] > 0 and model.sizes["obs_is_state"] is args.obs_is_state


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lineups", "ns,nx,ns,ns"], "nx"),
        (["--lineups", "ns,ns"], "needs 1 or 4"),
        (["--env-id", "msh-9"], "unknown env id"),
        (["--alpha", "-1"], "--alpha must be from"),
        (["--data", "nowhere.npz"], "does not exist"),
        (["--obs-is-state"], "--obs-is-state is for battles"),
    ],
)
def test_wrong_settings_are_one_sentence(tmp_path, flags, words):
    import tyro

    args = tyro.cli(pv.Args, args=[*flags, "--out-dir", str(tmp_path)])
    with pytest.raises(ConfigError, match=words) as error:
        pv.train(args)
    assert "\n" not in str(error.value)


def test_wrong_setting_ends_the_script_with_one_line(tmp_path):
    out = run("pretrain_vae.py", "--lineups", "nobody", "--out-dir", tmp_path, cwd=tmp_path)
    assert out.returncode == 2 and out.stderr.startswith("error: ") and len(out.stderr.strip().splitlines()) == 1
