"""The batched battle env and its PettingZoo face: shapes, seeds, resets, saving, errors, pictures."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import envs
from envs import battles
from envs.battles.env import BattleEnv
from envs.battles.teams import TEAMS, make_team

TABLE = {  # map: agents, limit, obs, state, actions
    "3m": (3, 60, 30, 48, 9),
    "8m": (8, 120, 80, 168, 14),
    "10m_vs_11m": (10, 150, 105, 243, 17),
    "27m_vs_30m": (27, 180, 285, 1170, 36),
    "2s3z": (5, 120, 80, 120, 11),
    "3s5z": (8, 150, 128, 216, 14),
    "3s5z_vs_3s6z": (8, 170, 136, 230, 15),
    "3s_vs_5z": (3, 250, 48, 68, 11),
    "MMM": (10, 150, 160, 290, 16),
    "MMM2": (10, 180, 176, 322, 18),
    "corridor": (6, 400, 156, 282, 30),
    "5m_vs_6m": (5, 70, 55, 98, 12),
    "8m_vs_9m": (8, 120, 85, 179, 15),
    "2c_vs_64zg": (2, 400, 332, 342, 70),
    "2s_vs_1sc": (2, 300, 17, 27, 7),
    "bane_vs_bane": (24, 200, 336, 984, 30),
    "random-5v5-marines": (5, 150, 50, 90, 11),
    "random-5v5-terran": (5, 150, 80, 120, 11),
    "random-5v5-protoss": (5, 150, 90, 130, 11),
}


def test_all_maps_of_the_table_are_there():
    assert set(battles.ids()) == {f"smac-{name}" for name in TABLE}
    assert set(battles.ids()) <= set(envs.ids())


@pytest.mark.parametrize("name", TABLE)
def test_sizes(name):
    env = envs.make(f"smac-{name}", num_envs=2, seed=1)
    agents, limit, obs, state, actions = TABLE[name]
    assert (env.spec.num_players, env.spec.horizon, env.spec.num_actions) == (agents, limit, actions)
    assert env.spec.obs_shape == (obs,) and env.spec.state_shape == (state,)
    assert env.obs.shape == (2, agents, obs) and env.obs.dtype == np.float32
    assert env.state.shape == (2, state) and env.legal.shape == (2, agents, actions)
    assert len(env.spec.action_names) == actions and len(set(env.spec.player_names)) == agents


def test_start_of_3m():
    env = envs.make("smac-3m")
    units = env.battles.units[0]
    assert np.allclose(units["x"], [8.625, 9.425, 8.625, 23.375, 22.575, 23.375])
    assert np.allclose(units["y"], [15.6, 15.6, 16.4, 16.4, 16.4, 15.6])
    assert (env.state[0, -27:] == 0).all() and env.alive.all() and env.t[0] == 0


def test_step_returns_what_the_contract_says():
    env = envs.make("smac-3m", num_envs=5, seed=1)
    obs, info = env.reset()
    assert obs is env.obs and obs.shape == (5, 3, 30)
    obs, reward, terminated, truncated, info = env.step(np.ones((5, 3), int))
    assert reward.shape == terminated.shape == truncated.shape == (5, 3)
    assert reward.dtype == np.float32 and terminated.dtype == truncated.dtype == np.bool_
    assert info["final_obs"].shape == (5, 3, 30) and info["final_state"].shape == (5, 48)
    assert info["episode_return"].shape == (5, 3) and info["episode_return"].dtype == np.float64
    assert info["done"].shape == info["battle_won"].shape == info["illegal_actions"].shape == (5,)
    assert np.array_equal(env.state[:, -27:].reshape(5, 3, 9).argmax(2), np.ones((5, 3)))  # last actions
    assert (env.t == 1).all()


def test_termination_and_truncation_are_told_apart():
    env = envs.make("smac-3m", num_envs=2, horizon=4)
    for step in range(4):
        _, _, terminated, truncated, info = env.step(np.ones((2, 3), int))
        assert not terminated.any() and truncated.all() == (step == 3) and info["done"].all() == (step == 3)
    assert (info["episode_length"] == 4).all() and not info["battle_won"].any() and (env.t == 0).all()
    env = envs.make("smac-3m", num_envs=1)
    team = make_team("nearest", env)
    while not env.step(team())[4]["done"][0]:
        pass
    assert env.info["battle_won"][0] and env.battles.terminated.all() and not env.battles.truncated.any()
    assert env.info["episode_return"][0] == pytest.approx([20.0] * 3)


def test_automatic_reset_keeps_the_final_observation_and_state():
    auto = envs.make("smac-2s3z", num_envs=3, seed=4)
    plain = BattleEnv("smac-2s3z", battles.load("smac-2s3z"), num_envs=3, seed=4, auto_reset=False)
    first_obs, first_state, first_legal = auto.obs.copy(), auto.state.copy(), auto.legal.copy()
    team, seen = make_team("random", auto, seed=2), np.zeros(3, bool)
    total = np.zeros(3)
    while not seen.all():
        actions = team().copy()
        _, reward, _, _, info = auto.step(actions)
        plain.step(actions)
        total += reward[:, 0]
        for b in np.flatnonzero(info["done"] & ~seen):
            assert plain.info["done"][b]
            assert np.array_equal(info["final_obs"][b], plain.obs[b])
            assert np.array_equal(info["final_state"][b], plain.state[b])
            assert info["episode_length"][b] == plain.t[b]
            assert info["episode_return"][b, 0] == pytest.approx(total[b], abs=1e-4)
            assert np.array_equal(auto.obs[b], first_obs[b]) and np.array_equal(auto.state[b], first_state[b])
            assert np.array_equal(auto.legal[b], first_legal[b]) and auto.t[b] == 0
        seen |= info["done"]


def rollout(num_envs, threads=1, steps=70, env_id="smac-2s3z", **overrides):
    env = envs.make(env_id, num_envs=num_envs, seed=9, threads=threads, **overrides)
    team = make_team("random", env, seed=5)
    rows = []
    for _ in range(steps):
        _, reward, terminated, truncated, info = env.step(team())
        flags = np.stack([reward, terminated, truncated], axis=2).reshape(num_envs, -1)
        rows.append(np.concatenate([env.obs.reshape(num_envs, -1), env.state, flags, info["done"][:, None]], axis=1))
    env.close()
    return np.stack(rows)


@pytest.mark.parametrize("overrides", [{}, {"start_jitter": 1.0}, {"env_id": "smac-random-5v5-protoss"}])
def test_same_seed_same_bytes_whatever_the_batch(overrides):
    many = rollout(8, **overrides)
    assert rollout(3, **overrides).tobytes() == many[:, :3].tobytes()
    assert rollout(1, **overrides).tobytes() == many[:, :1].tobytes()
    assert rollout(8, threads=3, **overrides).tobytes() == many.tobytes()


def test_rows_differ_and_seeds_matter():
    env = envs.make("smac-3s5z", num_envs=2, seed=1, start_jitter=1.0)
    assert not np.array_equal(env.obs[0], env.obs[1])
    other = envs.make("smac-3s5z", num_envs=2, seed=2, start_jitter=1.0)
    assert not np.array_equal(env.obs, other.obs)
    first = env.reset(seed=2)[0]
    assert np.array_equal(first, other.obs)


def test_jitter_moves_everybody_a_little_and_nobody_into_anybody():
    env = envs.make("smac-MMM2", num_envs=50, seed=1, start_jitter=0.8)
    units, kinds = env.battles.units, env.rules.kinds
    assert (abs(units["x"] - kinds["start_x"]) <= 0.8 + 1e-6).all() and np.ptp(units["x"][:, 3]) > 0.5
    plain = envs.make("smac-MMM2", num_envs=3, seed=1)
    assert np.array_equal(plain.obs[0], plain.obs[2])  # off by default
    overlaps = 0
    for i in range(len(kinds)):
        for j in range(i):
            if kinds["flies"][i] == kinds["flies"][j]:
                gap = np.hypot(units["x"][:, i] - units["x"][:, j], units["y"][:, i] - units["y"][:, j])
                overlaps += (gap < kinds["radius"][i] + kinds["radius"][j] - 1e-6).mean()
    assert overlaps < 0.5  # a unit that finds no room keeps its own place, which may be taken; rare


RANDOM = [name for name in TABLE if name.startswith("random")]


@pytest.mark.parametrize("name", RANDOM)
def test_random_maps_draw_types_and_places_as_said(name):
    """Shares of types and of the two kinds of starts, mirror images, and nobody in a wall or in anybody."""
    env = envs.make(f"smac-{name}", num_envs=2000, seed=4)
    units, kinds = env.battles.units, np.stack([env.kinds(b) for b in range(2000)])
    x, y, middle = units["x"], units["y"], 16.0
    chances = [chance for _, chance in env.battle.drawn_types]
    assert np.array_equal(units["drawn"][:, :5], units["drawn"][:, 5:])  # both sides are equally strong
    if chances:
        shares = np.bincount(units["drawn"][:, :5].ravel(), minlength=3) / 10_000
        assert shares == pytest.approx(chances, abs=0.015)
        assert not (kinds["weapon"][:, :5] == 3).all(1).any()  # somebody fights
        names = np.array(env.battle.type_features)[units["drawn"][7]]
        assert env.unit_names(7) == names.tolist()
        enemies = env.state[:, : -5 * 11].reshape(2000, -1)[:, 5 * env.layout.ally_size :].reshape(2000, 5, -1)
        assert (enemies[..., 0] == 1.0).all() and np.array_equal(enemies[..., -3:].argmax(2), units["drawn"][:, 5:])
    opposed = np.isclose(x[:, :5] + x[:, 5:], 2 * middle, atol=1e-3).all(1) & np.isclose(y[:, :5], y[:, 5:]).all(1)
    assert opposed.mean() == pytest.approx(0.5, abs=0.04)
    west = (x[opposed, :5] < middle - 2.99).all(1)
    assert (west | (x[opposed, :5] > middle + 2.99).all(1)).all() and west.mean() == pytest.approx(0.5, abs=0.06)
    around = ~opposed
    assert (abs(x[around, :5] - middle) <= 3.001).all() and (abs(y[around, :5] - middle) <= 3.001).all()
    corners = (abs(x[around, 5:] - middle) >= 5.999) & (abs(y[around, 5:] - middle) >= 5.999)
    assert corners.all()
    quarter = (x[around, 5:] > middle) * 2 + (y[around, 5:] > middle)
    assert np.bincount(quarter.ravel()) / quarter.size == pytest.approx([0.25] * 4, abs=0.03)
    radius = kinds["radius"]
    assert (x - radius >= 4).all() and (x + radius <= 28).all() and (y - radius >= 4).all() and (y + radius <= 28).all()
    for i in range(10):
        for j in range(i):
            gap = np.hypot(x[:, i] - x[:, j], y[:, i] - y[:, j])
            same = kinds["flies"][:, i] == kinds["flies"][:, j]
            assert (gap[same] >= (radius[:, i] + radius[:, j])[same] - 1e-5).all()
    assert np.allclose(units["goal_x"], x[:, :5].mean(1)[:, None])  # where the enemies walk to


def test_an_open_loop_wins_nothing_on_random_maps():
    """The actions of won battles, played again: from the same start they win, from other starts they do not."""
    env = envs.make("smac-random-5v5-marines", num_envs=64, seed=1)
    team, actions = make_team("focus", env, seed=1), []
    won, running = np.zeros(64, bool), np.ones(64, bool)
    while running.any():
        actions.append(team().copy())
        info = env.step(actions[-1])[-1]
        won |= running & info["done"] & info["battle_won"]
        running &= ~info["done"]
    assert won.sum() > 15
    again = envs.make("smac-random-5v5-marines", num_envs=64, seed=1)
    other = envs.make("smac-random-5v5-marines", num_envs=64, seed=2)
    results = []
    for twin in (again, other):
        wins, running = np.zeros(64, bool), np.ones(64, bool)
        for k in range(151):
            joint = actions[min(k, len(actions) - 1)]
            info = twin.step(joint)[-1]
            wins |= running & info["done"] & info["battle_won"]
            running &= ~info["done"]
        results.append(wins[won].mean())
    assert results[0] == 1.0 and results[1] < 0.05


def test_a_random_map_says_what_is_wrong_with_it(tmp_path):
    good = (Path(battles.__file__).parent / "maps" / "random-5v5-terran.toml").read_text()
    file = tmp_path / "own.toml"
    five, four = ('at = [23, 16]\nunits = [["marine", 5]]', 'at = [23, 16]\nunits = [["marine", 4]]')
    for old, new, words in (
        ("medivac = 0.1 }", "medivac = 0.2 }", "entry random.types must add up to 1, not 1.1"),
        ("medivac = 0.1 }", "nobody = 0.1 }", "entry random.types.nobody is an unknown unit"),
        ('"marauder", "medivac"]', '"medivac", "marauder"]', "must be the drawn types marine, marauder"),
        (five, four, "as many enemies as allies"),
        ("[random]", "[random]\nplace = 1", "entry random.place is unknown"),
    ):  # fmt: skip
        assert old in good
        file.write_text(good.replace(old, new))
        with pytest.raises(envs.ConfigError, match=re.escape(words)):
            envs.make(f"smac-file:{file}")
    with pytest.raises(envs.ConfigError, match="start_jitter is for maps with fixed starts"):
        envs.make("smac-random-5v5-terran", start_jitter=1.0)


@pytest.mark.parametrize("name", ["MMM2", "random-5v5-terran"])
def test_save_and_restore_is_exact(name):
    env = envs.make(f"smac-{name}", num_envs=3, seed=5)
    team = make_team("random", env, seed=1)
    for _ in range(20):
        env.step(team())
    saved, streams = env.get_state(), team.streams.copy()
    assert all(isinstance(value, np.ndarray) and value.dtype.names is None for value in saved.values())
    first = [np.concatenate([env.step(team())[0].ravel(), env.state.ravel(), env.t]) for _ in range(40)]
    other = envs.make(f"smac-{name}", num_envs=3, seed=77)
    other.set_state(saved)
    team = make_team("random", other, seed=1)
    team.streams[:] = streams
    again = [np.concatenate([other.step(team())[0].ravel(), other.state.ravel(), other.t]) for _ in range(40)]
    assert np.array_equal(first, again)
    with pytest.raises(envs.ConfigError, match=r"smac-3m.*unit_x"):
        envs.make("smac-3m", num_envs=3).set_state(saved)


@pytest.mark.parametrize("name", ["vx", "next_vy", "wish_x", "goal_y", "heal_left"])
def test_speeds_and_goals_beyond_all_bounds_are_no_state(name):
    """They are finite and no index, but a battle with them would come to NaN."""
    env = envs.make("smac-random-5v5-terran", num_envs=2)
    saved = env.get_state()
    saved[f"unit_{name}"][1, 2] = 1e300
    with pytest.raises(envs.ConfigError, match=rf"unit_{name} of battle 1 is 1e\+300, not from"):
        env.set_state(saved)


def test_illegal_actions_are_stop_and_counted():
    env, stopping = envs.make("smac-3m", num_envs=2), envs.make("smac-3m", num_envs=2)
    env.step([[6, 0, 4], [1, 1, 1]])  # nobody in reach; no-op alive; a legal move
    stopping.step([[1, 1, 4], [1, 1, 1]])
    assert env.info["illegal_actions"].tolist() == [2, 0]
    assert np.array_equal(env.obs, stopping.obs) and np.array_equal(env.state, stopping.state)
    with pytest.raises(ValueError, match=r"env 1: action attack enemy marine_0 of marine_2 is illegal; legal are stop"):
        envs.make("smac-3m", num_envs=2, strict=True).step([[1, 1, 1], [1, 1, 6]])


@pytest.mark.parametrize("actions", [[[1, 1]], [[1, 1, 1.5]], [[1, 1, 9]], [[1, 1, -1]], [1, 1, 1], "abc"])
def test_wrong_actions_are_refused(actions):
    with pytest.raises(ValueError, match="action"):
        envs.make("smac-3m").step(actions)


# what a user can get wrong -------------------------------------------------------------------------------------------

MAP = """
limit = 60
attack_point = [9, 16]
walkable = ["8-23: 0-31"]
[[groups]]
side = "ally"
at = [9, 16]
units = [["marine", 3]]
[[groups]]
side = "enemy"
at = [23, 16]
units = [["marine", 3]]
"""


def test_own_map_file(tmp_path):
    path = tmp_path / "my_map.toml"
    path.write_text(MAP + '[units.sniper]\nlike = "marine"\nrange = 9\n')
    mine, ours = envs.make(f"smac-file:{path}", seed=3), envs.make("smac-3m", seed=3)
    assert np.array_equal(mine.obs, ours.obs) and mine.spec.config["map"] == "my_map"
    path.write_text(MAP.replace('[["marine", 3]]', '[["medivac", 1], ["marine", 3]]', 1))
    healers = envs.make(f"smac-file:{path}")  # more allies than enemies, healer first: every ally has its action
    assert healers.spec.num_actions == 10 and healers.legal[0, 0, 7:].all() and not healers.legal[0, 0, 6]


WRONG = [
    ("limit = 60", "", ["entry limit", "missing"]),
    ("limit = 60", "limit = 0", ["limit", "from 1"]),
    ("limit = 60", 'limit = "x"', ["limit", "'x'"]),
    ("limit = 60", "limit = 60\nspeed = 3", ["entry speed", "unknown", "known entries", "attack_point"]),
    ("[9, 16]\nwalkable", "[9]\nwalkable", ["attack_point", "pair"]),
    ("[9, 16]\nwalkable", "[99, 16]\nwalkable", ["attack_point", "32 x 32"]),
    ('"8-23: 0-31"', '"8-23"', ["walkable[0]", "8-23: 0-31"]),
    ('"8-23: 0-31"', '"8-40: 0-31"', ["walkable[0]", "rows 8-40", "0 to 31"]),
    ('"8-23: 0-31"', '"8-23: 5-3"', ["walkable[0]", "columns 5-3"]),
    ('"8-23: 0-31"', '"18-23: 0-31"', ["groups[0].at", "marine", "not walkable"]),
    ('side = "ally"', 'side = "friend"', ["groups[0].side", "ally, enemy", "friend"]),
    ('side = "ally"', 'side = "enemy"', ["groups", "ally"]),
    ("at = [9, 16]", "at = [90, 16]", ["groups[0].at", "off the map"]),
    ('["marine", 3]', '["marin", 3]', ["groups[0].units", "marin", "marine, marauder"]),
    ('["marine", 3]', '["marine", 0]', ["groups[0].units", "from 1", "0"]),
    ('["marine", 3]', '["marine"]', ["groups[0].units", "pairs"]),
    ("limit = 60", 'limit = 60\ntype_features = ["zealot"]', ["type_features", "marine"]),
    ("limit = 60", "limit = ", ["TOML"]),
    ("[[groups]]", '[units.x]\nlike = "ghost"\n[[groups]]', ["units.x.like", "ghost"]),
    ("[[groups]]", '[units.x]\nlike = "marine"\nhp = -3\n[[groups]]', ["units.x.hp", "above 0", "-3"]),
    ("[[groups]]", '[units.x]\nlike = "marine"\nwings = 2\n[[groups]]', ["units.x.wings", "unknown"]),
    ("[[groups]]", "[units.x]\nhp = 3\n[[groups]]", ["units.x.", "missing"]),
]


@pytest.mark.parametrize(("old", "new", "words"), WRONG)
def test_wrong_map_files_name_the_entry(tmp_path, old, new, words):
    path = tmp_path / "wrong.toml"
    path.write_text(MAP.replace(old, new, 1))
    with pytest.raises(envs.ConfigError) as error:
        envs.make(f"smac-file:{path}")
    assert "\n" not in str(error.value)
    for word in ["wrong.toml", *words]:
        assert word in str(error.value), str(error.value)


@pytest.mark.parametrize(
    ("env_id", "settings", "words"),
    [
        ("smac-4m", {}, ["4m", "3m", "corridor", "smac-file:"]),
        ("smac-file:/nowhere/map.toml", {}, ["/nowhere/map.toml", "No such file"]),
        ("smac-3m", {"jitter": 1.0}, ["jitter", "start_jitter", "horizon"]),
        ("smac-3m", {"start_jitter": -1.0}, ["start_jitter", "-1"]),
        ("smac-3m", {"start_jitter": "far"}, ["start_jitter", "far"]),
        ("smac-3m", {"horizon": 2.5}, ["horizon", "2.5"]),
        ("smac-3m", {"horizon": -1}, ["horizon", "-1"]),
        ("smac-3m", {"num_envs": 0}, ["num_envs", "0"]),
        ("smac-3m", {"threads": 0}, ["threads", "0"]),
        ("smac-3m", {"seed": -1}, ["seed", "-1"]),
    ],
)
def test_wrong_settings(env_id, settings, words):
    with pytest.raises(envs.ConfigError) as error:
        envs.make(env_id, **settings)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_unknown_team():
    with pytest.raises(envs.ConfigError, match=r"nearst.*random, nearest, hold, focus"):
        make_team("nearst", envs.make("smac-3m"))


# teams ---------------------------------------------------------------------------------------------------------------


def test_focus_shoots_at_the_weakest_in_reach():
    env = envs.make("smac-8m", seed=1)
    team = make_team("focus", env)
    for _ in range(6):
        env.step(team())
    actions, legal, hp = team()[0], env.legal[0], env.battles.units["hp"][0, env.rules.enemies]
    for agent in np.flatnonzero(legal[:, 6:].any(axis=1)):
        targets = np.flatnonzero(legal[agent, 6:])
        assert actions[agent] - 6 == targets[np.argmin(hp[targets])]


def test_hold_never_walks():
    env = envs.make("smac-2s3z", num_envs=4)
    team = make_team("hold", env)
    for _ in range(30):
        actions = team()
        assert not ((actions >= 2) & (actions <= 5)).any()
        env.step(actions)


# PettingZoo, SMAC's names, pictures ----------------------------------------------------------------------------------


@pytest.mark.parametrize("env_id", ["smac-3m", "smac-MMM2"])
def test_pettingzoo_api(env_id):
    from pettingzoo.test import parallel_api_test

    parallel_api_test(envs.parallel_env(env_id), num_cycles=150)


def test_single_env_plays_as_the_batched_one():
    single, batched = envs.parallel_env("smac-2s3z"), envs.make("smac-2s3z", num_envs=3, seed=8)
    obs, _ = single.reset(seed=8)
    assert single.agents == ["stalker_0", "stalker_1", "zealot_0", "zealot_1", "zealot_2"]
    team = make_team("random", batched, seed=1)
    while single.agents:
        actions = team().copy()
        given = dict(zip(single.agents, actions[0].tolist(), strict=True))
        obs, rewards, terminated, truncated, infos = single.step(given)
        _, reward, terminated_b, truncated_b, info = batched.step(actions)
        assert rewards["zealot_1"] == reward[0, 0] and terminated["stalker_0"] == terminated_b[0, 0]
        want = info["final_obs"][0] if info["done"][0] else batched.obs[0]
        assert np.array_equal([obs[agent]["observation"] for agent in single.possible_agents], want)
        state = info["final_state"][0] if info["done"][0] else batched.state[0]
        assert np.array_equal(single.state(), state) and single.state_space.contains(single.state())
    assert info["done"][0] and truncated["zealot_0"] == truncated_b[0, 0]
    assert single.outcome() in ("lost", "time is up") and not infos["zealot_0"]["battle_won"]
    with pytest.raises(RuntimeError, match="over"):
        single.step(given)


def test_single_env_refuses_illegal_actions():
    env = envs.parallel_env("smac-3m", strict=True)
    env.reset(seed=1)
    with pytest.raises(ValueError, match=r"attack enemy marine_1 of marine_2 is illegal; legal are stop"):
        env.step({"marine_0": 1, "marine_1": 1, "marine_2": 7})
    with pytest.raises(ValueError, match="marine_2"):
        env.step({"marine_0": 1, "marine_1": 1})
    with pytest.raises(envs.ConfigError, match=r"human.*rgb_array"):
        envs.parallel_env("smac-3m", render_mode="human")


def test_smac_names():
    env = envs.parallel_env("smac-3m")
    env.reset(seed=1)
    info = {"state_shape": 48, "obs_shape": 30, "n_actions": 9, "n_agents": 3, "episode_limit": 60}
    assert env.get_env_info() == info
    assert len(env.get_obs()) == 3 and env.get_obs()[0].shape == (30,) and env.get_state().shape == (48,)
    assert np.shape(env.get_avail_actions()) == (3, 9) and env.get_avail_agent_actions(0) == env.get_avail_actions()[0]
    assert env.get_avail_agent_actions(0) == [0, 1, 1, 1, 1, 1, 0, 0, 0]
    assert (env.get_obs_size(), env.get_state_size(), env.get_total_actions()) == (30, 48, 9)


def test_pictures_show_health_shields_and_shots():
    env = envs.parallel_env("smac-2s3z", render_mode="rgb_array")
    env.reset(seed=1)
    start = env.render()
    assert start.dtype == np.uint8 and start.ndim == 3 and start.shape[2] == 3
    team, pictures = make_team("nearest", env.env), [start]
    for _ in range(12):
        env.step(dict(zip(env.agents, team()[0].tolist(), strict=True)))
        pictures.append(env.render())
    assert all(picture.shape == start.shape for picture in pictures)

    def count(picture, colour):
        return (abs(picture.astype(int) - colour).sum(axis=2) < 30).sum()

    ally, enemy, shield, shot = (70, 150, 245), (240, 90, 70), (120, 225, 255), (150, 205, 255)
    assert count(start, ally) > 500 and count(start, enemy) > 500
    assert count(start, shield) > 100 and count(pictures[-1], shield) < count(start, shield)
    assert count(start, shot) < max(count(picture, shot) for picture in pictures)
    assert envs.parallel_env("smac-3m").render() is None


def test_play_prints_outcomes_and_writes_a_gif(tmp_path):
    from PIL import Image

    gif = tmp_path / "fight.gif"
    command = [sys.executable, "-m", "envs.play", "--env-id", "smac-3m", "--policy", "nearest", "--gif", str(gif)]
    result = subprocess.run(
        [*command, "--episodes", "1"], capture_output=True, text=True, cwd=Path(__file__).parent.parent, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert "episode 1: won, return 20.00, length 1" in result.stdout
    with Image.open(gif) as animation:
        assert animation.n_frames > 40


def test_teams_are_offered():
    assert TEAMS == ("random", "nearest", "hold", "focus")


# benchmarks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "flags", "words"),
    [
        ("battle_speed.py", ["--num-envs", "4", "--seconds", "0.02", "--repeats", "1"], ["3m", "SMAX", "1 thread"]),
        ("battle_teams.py", ["--episodes", "4", "--seeds", "1", "--search-steps", "9"], ["3m", "open loop", "nearest"]),
    ],
)
def test_benchmarks_run(tmp_path, script, flags, words):
    root = Path(__file__).parent.parent
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(root / "benchmarks" / script), "--maps", "3m", "--json", str(figures), *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert all(word in result.stdout for word in words) and figures.stat().st_size > 50
