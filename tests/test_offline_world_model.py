"""train_world_model.py and test_obs_reward_model.py: player order, the impossible, imagined ends, checkpoints."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import envs
import pretrain_vae as pv
import train_world_model as wm
from envs import ConfigError
from envs.grid import GONE, PLAYERS, STAY, GridEnv, T
from envs.recording import collect_transitions, load_transitions, play_transitions
from envs.roles import Seats

ROOT = Path(__file__).resolve().parent.parent
ID = "msh-4h1s-4x4"
torch.set_num_threads(1)


def untrained(game, planes=False, seed=0, scale=3.0):
    """A model with wild weights: whatever it says must still be possible."""
    torch.manual_seed(seed)
    sizes = {"planes": planes, "hidden": 16, "reward_values": [0.0, 1.0, 5.0]}
    model = wm.make_model(sizes, game)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model.eval()


def transitions(game, num=600, lineup="mix", seed=1, noise=0.2):
    env = GridEnv(game, 32, seed)
    seats = Seats(env, [lineup] * game.num_players, None, seed)
    return play_transitions(env, seats, noise, num, np.random.default_rng(seed))


def random_policy(seed=0):
    generator = np.random.default_rng(seed)
    return lambda obs, legal, t: (generator.random(legal.shape) * legal).argmax(2)


class TrueModel:
    """The real rules in a model's clothes."""

    def __init__(self, game):
        self.game = game

    def imagine(self, states, actions):
        out = self.game.simulate(states, actions)
        return out.states, out.reward, self.game.over(out.states)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A small model trained for seconds by the script itself, and its folder."""
    out_dir = tmp_path_factory.mktemp("wm")
    args = ["--num-transitions", 4000, "--epochs", 6, "--hidden-size", 64, "--batch-size", 32, "--out-dir", out_dir]
    command = [sys.executable, str(ROOT / "train_world_model.py"), *map(str, args)]
    out = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=out_dir)
    assert out.returncode == 0, out.stderr
    (folder,) = out_dir.glob("world_model__*")
    return folder, out.stdout


# the model -----------------------------------------------------------------------------------------------------------


def test_planes_and_states_are_the_same_thing():
    game = envs.game("msh-4h2s-4x4", max_block_comp=1)
    states = transitions(game)["states"]
    cells, board, _ = wm.from_states(states, game)
    seen = game.observe(states)
    for viewer in range(4):
        alive = game.alive(states)[:, viewer]
        order = [(viewer + k) % 4 for k in range(4)]
        planes = wm.to_planes(cells[:, order], board, game)
        assert (planes.numpy()[alive] == seen[alive, viewer]).all()  # what the env shows, own plane first
        back_cells, back_board = wm.from_planes(planes, game)
        assert torch.equal(back_cells, cells[:, order]) and torch.equal(back_board, board)


def test_actions_are_ordered_like_the_planes():
    """Every viewer's prediction is the same world seen from another seat: planes and joint action rotate together."""
    game = envs.game(ID)
    model, data = untrained(game, scale=1.5), transitions(game, lineup="ns")
    everybody = game.alive(data["states"]).all(1)
    cells, board, t = (part[everybody] for part in wm.from_states(data["states"], game))
    actions = torch.from_numpy(data["actions"][everybody])
    first = model.predict(wm.to_planes(cells, board, game), actions, t)
    for viewer in range(1, 4):
        order = [(viewer + k) % 4 for k in range(4)]
        back = [(k - viewer) % 4 for k in range(4)]
        out = model.predict(wm.to_planes(cells[:, order], board, game), actions[:, order], t)
        assert torch.allclose(out["planes"][..., :4][..., back], first["planes"][..., :4], atol=1e-5)
        assert torch.allclose(out["planes"][..., 4:], first["planes"][..., 4:], atol=1e-5)
        assert torch.allclose(out["end"], first["end"], atol=1e-5)
        wrong = model.predict(wm.to_planes(cells[:, order], board, game), actions, t)  # the mix-up of old
        assert not torch.allclose(wrong["planes"][..., :4][..., back], first["planes"][..., :4], atol=1e-2)


def test_any_permutation_of_players_permutes_the_rewards():
    game = envs.game(ID)
    model, data = untrained(game, scale=1.5), transitions(game)
    cells, board, t = wm.from_states(data["states"], game)
    actions, order = torch.from_numpy(data["actions"]), [2, 0, 3, 1]
    with torch.no_grad():
        plain, mixed = model(cells, board, actions, t), model(cells[:, order], board, actions[:, order], t)
    assert torch.allclose(plain.reward[:, order], mixed.reward, atol=1e-5)
    assert torch.allclose(plain.moves[:, order], mixed.moves, atol=1e-5)


@pytest.mark.parametrize("env_id", [ID, "msh-4h2s-8x8", "msd-6x6"])
def test_impossible_predictions_are_impossible(env_id):
    game = envs.game(env_id, max_block_comp=2 if env_id != ID else 1)
    data = transitions(game, 400)
    for seed in range(3):
        model = untrained(game, seed=seed)
        assert wm.judge(model, data)["impossible"] == 0.0
        cells, board, t = wm.from_states(data["states"], game)
        out = model(cells, board, torch.from_numpy(data["actions"]), t)
        gone = torch.from_numpy(~game.alive(data["states"]))
        assert (out.moves.exp()[gone][:, : wm.LEFT_BOARD] == 0).all()
    assert wm.judge(untrained(game, planes=True), data)["impossible"] > 0.5  # each plane by itself may say anything


def test_what_counts_as_impossible():
    game = envs.game(ID)
    before = torch.zeros(1, 4, 4, 7)
    before[0, 1, 1, 0] = before[0, 0, 0, 1] = before[0, 0, 1, 4] = before[0, 0, 0, 5] = before[0, 3, 3, 6] = 1

    def says(*changes):
        after = before.clone()
        for r, c, plane, value in changes:
            after[0, r, c, plane] = value
        return bool(wm.impossible(before, after, game))

    assert not says()
    assert not says((1, 1, 0, 0), (1, 2, 0, 1))  # one step
    assert not says((0, 0, 1, 0), (0, 0, 5, 0))  # taken together with its prey
    assert says((1, 1, 0, 0), (1, 3, 0, 1))  # two cells
    assert says((1, 1, 0, 0), (2, 2, 0, 1))  # diagonal
    assert says((1, 2, 0, 1))  # in two cells
    assert says((1, 1, 0, 0), (0, 1, 0, 1))  # into a block
    assert says((1, 1, 0, 0))  # vanished where nothing is
    assert says((2, 2, 2, 1))  # somebody who left is back
    assert says((2, 2, 6, 1))  # a hare from nothing
    assert says((0, 1, 4, 0))  # a block is gone


def test_players_that_left_are_in_no_loss():
    game = envs.game(ID)
    model, data = untrained(game), transitions(game, lineup="nh")
    some = ~game.alive(data["states"]).all(1)
    assert some.sum() > 20

    def parts(data):
        batch = wm.tensors({name: column[some] for name, column in data.items()}, game)
        return model.loss(batch, torch.ones(7))

    changed = {name: array.copy() for name, array in data.items()}
    left = ~game.alive(data["states"])
    changed["actions"][left], changed["reward"][left] = 5, 7.0
    for name, value in parts(data).items():
        assert torch.equal(value, parts(changed)[name]), name


def test_channel_weights_change_the_loss_they_name():
    game = envs.game(ID)
    model, batch = untrained(game), wm.tensors(transitions(game), game)
    one = model.loss(batch, torch.ones(7))
    two = model.loss(batch, torch.tensor([2.0, 2, 2, 2, 1, 1, 1]))
    assert torch.allclose(two["moves"], 2 * one["moves"]) and torch.equal(two["items"], one["items"])
    no_prey = model.loss(batch, torch.tensor([1.0, 1, 1, 1, 1, 0, 0]))
    assert no_prey["items"] == 0 and one["items"] > 0


# imagined rollouts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("planes", [False, True])
def test_imagined_rollouts_respect_masks_ends_and_departures(planes):
    """Earlier rollouts never ended and allowed illegal actions; here even a wild model's do not."""
    game = envs.game(ID)
    model = untrained(game, planes)
    out = wm.rollout(model, game.draw(3, 50), random_policy(), 45)
    for step in range(45):
        legal = game.legal(out.states[step], trusted=planes)  # planes may show the impossible
        assert (legal == out.legal[step]).all()
        assert np.take_along_axis(legal, out.actions[step][:, :, None], 2).all()
    on_board = np.stack([game.alive(states) for states in out.states])
    assert not (on_board[1:] & ~on_board[:-1]).any()  # who left stays gone
    assert (out.actions[~out.alive] == STAY).all() and (out.reward[~out.alive] == 0).all()
    assert not (out.alive & out.done[:-1, :, None]).any()  # nothing happens after the end
    over = out.done[:-1]
    assert (out.states[1:][over] == out.states[:-1][over]).all()
    assert (out.done[1:] >= out.done[:-1]).all() and out.done.any()
    ended = (out.terminated | out.truncated).sum(0)
    assert (ended <= 1).all()  # each player ends at most once
    newly = out.done[1:] & ~out.done[:-1]
    assert ((out.terminated | out.truncated) | ~(newly[:, :, None] & out.alive)).all()


@pytest.mark.parametrize("env_id", [ID, "msd-4x4"])
def test_rollout_with_the_true_rules_is_the_game(env_id):
    game = envs.game(env_id)
    start, steps = game.draw(3, 64), game.config.horizon + 3
    out = wm.rollout(TrueModel(game), start, random_policy(1), steps)
    states = start
    for step in range(steps):
        real = game.simulate(states, out.actions[step])
        states = real.states
        assert (states == out.states[step + 1]).all() and np.allclose(real.reward, out.reward[step])
        assert (real.terminated == out.terminated[step]).all() and (real.truncated == out.truncated[step]).all()
        assert (game.over(states) == out.done[step + 1]).all()
    assert out.done[-1].all() and out.truncated.any()


def test_illegal_actions_of_a_fixed_sequence_are_stay():
    game = envs.game(ID)
    start = game.draw(3, 8)
    start[:, PLAYERS : PLAYERS + 4] = 0  # everybody in the corner
    out = wm.rollout(TrueModel(game), start, np.zeros((2, 8, 4), int), 2)  # UP, off the board
    assert (out.actions == STAY).all() and (out.states[-1][:, PLAYERS : PLAYERS + 4] == 0).all()


def test_recorded_sequences_are_replayed_exactly():
    game = envs.game(ID)
    data = transitions(game, 1500, noise=0.1)
    growth = wm.error_growth(TrueModel(game), data, 10)
    assert growth["runs"][0] > 300
    assert min(growth["exact"]) == min(growth["all_exact"]) == min(growth["ends_right"]) == 1.0
    assert wm.error_growth(untrained(game), data, 10)["all_exact"][-1] < 0.5


# the world as HOP+ without trees uses it -----------------------------------------------------------------------------


def legal_actions(env, seed):
    return (np.random.default_rng(seed).random(env.legal.shape) * env.legal).argmax(2)


@pytest.mark.parametrize("prosocial", [False, True])
def test_a_world_of_rules_or_of_a_model_that_knows_them_is_the_game(prosocial, monkeypatch):
    """Also where the model, which pays selfish rewards, is asked in chunks."""
    game, plain = envs.game(ID, prosocial=prosocial), envs.game(ID)
    states = transitions(game, 300, lineup="nh", noise=0.3)["states"]
    actions = random_policy(1)(None, game.legal(states), None)
    real, alive = game.simulate(states, actions), game.alive(states)
    monkeypatch.setattr(wm, "WORLD_ROWS", 64)
    for world in (wm.World(game, None), wm.World(game, TrueModel(plain))):
        ahead = world.step(states, actions)
        assert (ahead.states == real.states).all() and (ahead.ended == (real.terminated | real.truncated)).all()
        assert np.allclose(ahead.reward[alive], real.reward[alive]) and not ahead.reward[~alive].any()
        assert (ahead.over == game.over(real.states)).all()
    assert (real.reward != 0).any() and not alive.all()


def imagined_games(num_imagined=20, horizon=5, seed=1, world=None):
    env = envs.make(ID, num_envs=6, seed=seed)
    return wm.ImaginedGames(env, world or wm.World(env.game, None), num_imagined, horizon, seed)


def test_real_games_do_not_feel_the_imagined_ones():
    alone, games = envs.make(ID, num_envs=6, seed=1), imagined_games()
    for step in range(60):
        assert (games.states[:6] == alone.states).all() and (games.legal[:6] == alone.legal).all()
        actions = legal_actions(games, step)
        _, reward, terminated, truncated, info = alone.step(actions[:6])
        found = games.step(actions)
        assert (found["reward"][:6] == reward).all() and (found["ended"][:6] == (terminated | truncated)).all()
        assert (found["done"][:6] == info["done"]).all() and not found["cut"][:6].any()
        assert (found["info"]["episode_return"] == info["episode_return"]).all() and len(found["info"]["done"]) == 6


def test_imagined_games_follow_the_world_and_are_cut():
    games = imagined_games()
    rules, age, ends = games.game, np.zeros(20, int), 0
    assert (games.states[6:][:, None] == games.boards).all(2).any(1).all()  # they start from real boards
    games.boards = rules.draw(99, 500)
    for step in range(40):
        before, actions = games.states[6:].copy(), legal_actions(games, step)
        found, real = games.step(actions), rules.simulate(before, actions[6:])
        age += 1
        over = rules.over(real.states)
        assert (found["after"] == real.states).all() and np.allclose(found["reward"][6:], real.reward)
        assert (found["cut"][6:] == (~over & (age >= 5))).all() and (found["done"][6:] == (over | (age >= 5))).all()
        done = found["done"][6:]
        assert (games.states[6:][~done] == real.states[~done]).all()
        assert (games.states[6:][done][:, None] == games.boards).all(2).any(1).all()
        age[done], ends = 0, ends + done.sum()
        assert (games.legal == rules.legal(games.states)).all() and (games.t == games.states[:, T]).all()
    assert ends > 100


def test_a_world_that_forgets_the_time_limit_is_cut_there():
    class Forgetful(wm.World):
        def step(self, states, actions):
            ahead = super().step(states, np.full_like(actions, STAY))
            return ahead._replace(over=np.zeros_like(ahead.over), ended=np.zeros_like(ahead.ended))

    env = envs.make(ID, num_envs=2, seed=1)
    games = wm.ImaginedGames(env, Forgetful(env.game, None), 4, 1000, 1)
    cuts = [games.step(np.full((6, 4), STAY))["cut"][2:].all() for _ in range(35)]
    assert cuts == [False] * 34 + [True]


def test_imagined_games_go_on_as_if_never_stopped():
    one, two = imagined_games(seed=1), imagined_games(seed=2)
    for step in range(7):
        one.step(legal_actions(one, step))
    two.set_state({name: array.copy() for name, array in one.get_state().items()})
    two.boards = one.boards  # of recent play: whoever trains keeps it
    for step in range(30):
        assert (one.states == two.states).all()
        found = [games.step(legal_actions(games, step)) for games in (one, two)]
        for name in ("reward", "ended", "taken", "done", "cut", "after"):
            assert (found[0][name] == found[1][name]).all()


def test_no_imagined_games_at_all():
    env = envs.make(ID, num_envs=3, seed=1)
    games = wm.ImaginedGames(env, None, 0, 5, 1)
    found = games.step(legal_actions(games, 0))
    assert found["reward"].shape == (3, 4) and found["after"].shape[0] == 0 and games.num_envs == 3


def test_fresh_scores_by_hand():
    game = envs.game(ID)
    data = transitions(game, 400)
    perfect = wm.score_fresh(TrueModel(game), data)
    wanted = {"exact": 1.0, "exact_rewarded": 1.0, "reward_mse": 0.0, "end_accuracy": 1.0, "impossible": 0.0}
    assert perfect == pytest.approx({f"wm/{name}": value for name, value in wanted.items()})

    class Wrong(TrueModel):
        """Wrong by 2 about player 1's reward, always says that it is over, and puts player 1 back into its cell."""

        def imagine(self, states, actions):
            after, reward, end = super().imagine(states, actions)
            after[:, PLAYERS], reward[:, 0] = states[:, PLAYERS], reward[:, 0] + 2.0
            return after, reward, np.ones_like(end)

    wrong, alive = wm.score_fresh(Wrong(game), data), game.alive(data["states"])
    stood = (data["states"][:, PLAYERS] == data["next_states"][:, PLAYERS]).mean()
    assert wrong["wm/exact"] == pytest.approx(stood) and wrong["wm/end_accuracy"] == pytest.approx(data["end"].mean())
    assert wrong["wm/reward_mse"] == pytest.approx(4 * alive[:, 0].sum() / alive.sum())
    nothing = (data["reward"] == 0).all(1)
    assert "wm/exact_rewarded" not in wm.score_fresh(TrueModel(game), {k: x[nothing] for k, x in data.items()})


def test_prepare_takes_what_is_asked_for_or_fits_or_makes_one(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, _ = trained
    found, model = wm.prepare(str(folder), ID, 1)
    assert found == folder and model.game.env_id == ID and not list(tmp_path.iterdir())
    whole_train, asked = wm.train, []

    def train(args):  # what it was asked for, but small
        asked.append((args.env_id, args.seed, args.planes, args.out_dir))
        return whole_train(wm.Args(env_id=args.env_id, num_transitions=300, epochs=1, hidden_size=8))

    monkeypatch.setattr(wm, "train", train)
    made, _ = wm.prepare("", "msd-4x4", 5)
    assert asked == [("msd-4x4", 5, False, "vae_ckpts")] and wm.prepare("", "msd-4x4", 6)[0] == made
    whole_train(wm.Args(env_id="msd-4x4", num_transitions=300, epochs=1, hidden_size=8, planes=True))
    assert wm.prepare("", "msd-4x4", 6)[0] == made  # not the older kind of model, though newer
    with pytest.raises(ConfigError, match=r"trained on msh-4h1s-4x4, this run uses msd-4x4"):
        wm.prepare(str(folder), "msd-4x4", 1)
    with pytest.raises(ConfigError, match=r"'nowhere' is no checkpoint"):
        wm.prepare("nowhere", ID, 1)


def test_rehearsal_is_rule_based_play_with_selfish_rewards(capsys):
    game = envs.game(ID, prosocial=True, max_block_comp=1)
    data = wm.rehearsal(game, 400, 1)
    assert capsys.readouterr().out == "" and {len(column) for column in data.values()} == {400}
    plain = envs.game(ID)
    after = plain.simulate(data["states"], data["actions"])
    assert (after.states == data["next_states"]).all() and (after.reward == data["reward"]).all()
    assert (data["reward"] != 0).any()


# training, checkpoints, the tester -----------------------------------------------------------------------------------


def test_a_minute_model_is_nearly_exact(trained):
    folder, printed = trained
    model, spec = wm.load_checkpoint(folder, envs.spec(ID))
    fresh = wm.judge(model, transitions(envs.game(ID), 2000, seed=9))
    assert fresh["exact"] > 0.97 and fresh["end_accuracy"] > 0.97 and fresh["impossible"] == 0.0
    assert "impossible 0.00000" in printed and "imagined runs" in printed
    assert spec["scores"]["exact"] > 0.97 and wm.find_checkpoint(folder.parent, envs.spec(ID)) == folder
    assert wm.find_checkpoint(folder.parent, envs.spec(ID), planes=True) is None
    assert wm.find_checkpoint(folder.parent, envs.spec("msd-4x4")) is None


def test_world_model_checkpoints_are_checked(trained, tmp_path):
    folder, _ = trained
    with pytest.raises(ConfigError, match=r"checkpoint was trained on msh-4h1s-4x4, this run uses msh-4h1s-8x8"):
        wm.load_checkpoint(folder, envs.spec("msh-4h1s-8x8"))
    with pytest.raises(ConfigError, match=r"trained with prosocial False, this run uses prosocial True"):
        wm.load_checkpoint(folder, envs.spec(ID, prosocial=True))
    with pytest.raises(ConfigError, match=r"kind 'world_model', not 'goal_models'"):
        pv.load_checkpoint(folder)
    spec, weights = json.loads((folder / "spec.json").read_text()), (folder / "weights.safetensors").read_bytes()
    del spec["sha256"]  # or nothing else would be looked at
    sizes = [{"reward_values": ["a"]}, {"hidden": 9}, {"planes": True}, {"hidden": 10**12}, {"hidden": None}]
    config = spec["config"]
    changed = [{"env_id": "nothing"}, {"config": config | {"height": 10**9}}, {"config": config | {"no such": 1}}]
    changed += [{"config": []}, {"config": {}}, {"config": config | {"player_strength": [-1]}}]
    changed += [{"sizes": None}, *({"sizes": spec["sizes"] | change} for change in sizes)]
    bad_files = [({}, weights[:100]), ({}, b""), *((changes, weights) for changes in changed)]
    for k, (changes, raw) in enumerate(bad_files):
        bad = tmp_path / str(k)
        bad.mkdir()
        (bad / "spec.json").write_text(json.dumps(spec | changes))
        (bad / "weights.safetensors").write_bytes(raw)
        with pytest.raises(ConfigError) as error:
            wm.load_checkpoint(bad)
        assert "\n" not in str(error.value), changes


def test_data_files_are_checked(trained, tmp_path):
    folder, _ = trained
    (path,) = (folder.parent / "data").glob("*.npz")
    game = envs.game(ID)
    data = load_transitions(path, game)
    assert len(data["end"]) == 4000 and set(np.unique(data["states"][:, T])) <= set(range(35))
    good = dict(np.load(path))
    bad = {
        "cells": good | {"next_states": good["next_states"] + 100}, "short": good | {"end": good["end"][1:]},
        "actions": good | {"actions": good["actions"] - 3}, "nan": good | {"reward": good["reward"] * np.nan},
        "pickle": good | {"reward": np.array([None])}, "meta": good | {"meta": np.array("x")},
        "dead": good | {"states": np.where(np.arange(22) < PLAYERS, good["states"], GONE)},
    }  # fmt: skip
    for name, columns in bad.items():
        np.savez(tmp_path / f"{name}.npz", **columns)
    (tmp_path / "half.npz").write_bytes(path.read_bytes()[:2000])
    for name in (*bad, "half", "absent"):
        with pytest.raises(ConfigError) as error:
            load_transitions(tmp_path / f"{name}.npz", game)
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="this run uses msd-4x4"):
        load_transitions(path, envs.game("msd-4x4"))


def test_tester_prints_and_draws(trained, tmp_path):
    folder, _ = trained
    args = ["--ckpt-dir", folder.parent, "--num-transitions", "600", "--json", tmp_path / "scores.json"]
    command = [sys.executable, str(ROOT / "test_obs_reward_model.py"), *map(str, args)]
    out = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr
    lines = out.stdout.splitlines()
    assert lines[0] == "[INFO] loaded model. obs_shape=(4, 4, 7), action_dim=7"
    assert "[INFO] dataset size=600, inferred n_agents=4" in lines
    for start in ("Obs MSE: ", "PSNR: ", "Reward MSE: ", "Per-channel MSE: ", "Exact next states: ", "Ends: "):
        assert any(line.startswith(start) for line in lines), start
    assert "Physically impossible predictions: 0.00000" in lines
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert len(scores["imagined"]["exact"]) == 10 and scores["views"] > 600
    for name in ("soft_triplets", "calibration", "error_growth"):
        assert (folder / f"{name}.png").stat().st_size > 5000


def test_the_tester_is_no_test():
    import test_obs_reward_model as tool

    assert not [name for name in vars(tool) if name.lower().startswith("test")]


@pytest.mark.parametrize(("env_id", "planes"), [("msd-4x4", False), ("msh-4h1s-8x8", False), (ID, True)])
def test_other_games_and_the_planes_model(tmp_path, env_id, planes):
    args = wm.Args(env_id=env_id, num_transitions=600, epochs=1, hidden_size=16, planes=planes, out_dir=str(tmp_path))
    folder = wm.train(args)
    model, _ = wm.load_checkpoint(folder, envs.spec(env_id))
    game = envs.game(env_id)
    assert wm.rollout(model, game.draw(1, 4), random_policy(), 3).states.shape == (4, 4, game.state_size)
    assert wm.find_checkpoint(tmp_path, envs.spec(env_id), planes) == folder


def test_same_seed_same_weights(tmp_path):
    args = {"num_transitions": 400, "epochs": 1, "hidden_size": 16}
    one, two = (wm.train(wm.Args(out_dir=str(tmp_path / k), **args)) for k in "ab")
    assert (one / "weights.safetensors").read_bytes() == (two / "weights.safetensors").read_bytes()
    other = wm.train(wm.Args(out_dir=str(tmp_path / "c"), seed=2, **args))
    assert (one / "weights.safetensors").read_bytes() != (other / "weights.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"env_id": "smac-8m"}, "unknown grid game"),
        ({"lineups": ("ns,ns",)}, "needs 1 or 4"),
        ({"lineups": ("nx",)}, "unknown role 'nx'"),
        ({"policy": "nowhere"}, "nowhere"),
        ({"channel_weights": (1.0, 2.0)}, "a weight for each of self, other 1"),
        ({"noise": 2.0}, "--noise must be from 0 to 1"),
        ({"num_transitions": 3}, "--num-transitions must be a whole number from 100"),
    ],
)
def test_wrong_settings_are_one_sentence(tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words) as error:
        wm.train(wm.Args(**({"num_transitions": 300, "out_dir": str(tmp_path)} | changes)))
    assert "\n" not in str(error.value)


def test_fewer_transitions_than_line_ups():
    game, seeds = envs.game("msh-4h1s-4x4"), np.random.SeedSequence(1)
    data = collect_transitions(game, ["ns", "nh", "random"], 0.1, 2, seeds, quiet=True)
    assert len(data["episode"]) == 2 == len(np.unique(data["episode"]))
