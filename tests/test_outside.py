"""What comes from outside (states, saved envs, huge settings, data files) is refused in one sentence, or works.

Compiled code checks no bounds: a cell of 9999 that gets through ends the process, and this file with it.
"""

import time
import zipfile

import numpy as np
import pytest

import envs
from envs import recording
from envs.errors import ConfigError
from envs.particles import ParticleEnv

HUNT = "msh-4h1s-4x4"


def one_sentence(error, *words):
    message = str(error.value)
    assert message and "\n" not in message and len(message) < 500, message
    for word in words:
        assert str(word) in message, f"'{word}' is not said in: {message}"


# states --------------------------------------------------------------------------------------------------------------

BOARD = 6  # column of the first board cell of a Stag Hunt for four on 4x4
WRONG = [  # column, value, what the sentence says
    (0, -1, ["t is -1", "35"]),
    (0, 36, ["t is 36", "35"]),
    (1, -5, ["deadline is -5"]),
    (1, 9999, ["deadline is 9999", "35"]),
    (2, 16, ["player 1", "16", "0..15"]),
    (3, 9999, ["player 2", "9999"]),
    (4, -2, ["player 3", "-2"]),
    (5, 32767, ["player 4", "32767"]),
    (BOARD, 4, ["board cell 0", "4", "0..3"]),
    (BOARD + 15, 999, ["board cell 15", "999"]),
    (BOARD + 7, -1, ["board cell 7", "-1"]),
    (BOARD + 3, 1, ["a player stands on a block"]),
]


def wrong_states(column, value):
    states = np.tile(np.array([0, 35, 3, 3, 5, -1, *[0] * 14, 2, 3], np.int16), (3, 1))
    states[1, column] = value
    return states


@pytest.mark.parametrize(("column", "value", "words"), WRONG)
def test_impossible_states_never_reach_compiled_code(column, value, words):
    states, env, single = wrong_states(column, value), envs.make(HUNT, num_envs=3), envs.parallel_env(HUNT)
    single.reset(seed=1)
    saved, before, alone = env.get_state(), env.states.copy(), single.state_row
    calls = [env.game.observe, env.game.legal, env.game.over, env.set_states, env.game.check_states]
    calls += [lambda s: env.game.simulate(s, np.full((3, 4), 4)), lambda s: env.set_state(saved | {"states": s})]
    for call in calls:
        with pytest.raises(ValueError) as error:
            call(states)
        one_sentence(error, "state 1", *words)
    with pytest.raises(ValueError) as error:
        single.set_state(states[1])
    one_sentence(error, *words)
    np.testing.assert_array_equal(env.states, before)
    np.testing.assert_array_equal(single.state_row, alone)


@pytest.mark.parametrize("env_id", [HUNT, "msd-6x6"])
def test_random_rows_are_refused_or_played(env_id):
    """Hundreds of rows with a few wrong numbers each: what is let through gives planes of 0 and 1 and goes on."""
    game, generator, refused = envs.game(env_id), np.random.default_rng(0), 0
    for states in game.draw(0, 1500)[:, None]:
        for _ in range(generator.integers(1, 3)):
            states[0, generator.integers(game.state_size)] = generator.choice([-9, -1, 0, 1, 2, 3, 4, 15, 16, 36, 999])
        try:
            seen = game.observe(states)
        except ValueError:
            refused += 1
            continue
        assert seen.max() <= 1 and (seen[0, ..., 0].sum((1, 2)) == game.alive(states)[0]).all()
        out = game.simulate(states, game.legal(states).argmax(2))
        game.check_states(out.states)
    assert 300 < refused < 1400


def test_other_things_than_states():
    game, states = envs.game(HUNT), envs.game(HUNT).draw(0, 3)
    for wrong in (states.astype(np.int64), states.astype(np.float32), states.tolist(), states.astype(">i2"), None):
        for call in (game.observe, game.legal, game.over, lambda s: game.simulate(s, np.full((3, 4), 4))):
            with pytest.raises(ValueError) as error:
                call(wrong)
            one_sentence(error, "int16")
    env = envs.make(HUNT, num_envs=3)
    for wrong in (states.astype(np.float32), states[:2], None, "states", [[1], [2, 3]], states * np.int64(70_000)):
        with pytest.raises(ValueError) as error:
            env.set_states(wrong)
        assert "\n" not in str(error.value)
    for same in (states.astype(np.int64), states.tolist(), states.astype(np.uint8)):  # integers that fit are fine
        env.set_states(same)
        np.testing.assert_array_equal(env.states, states)


def test_outputs_of_another_shape():
    game, other = envs.game(HUNT), envs.game("msh-4h1s-8x8", num_players=2)
    states, actions = game.draw(0, 3), np.full((3, 4), 4)
    seen = game.observe(states)
    with pytest.raises(ValueError, match="contiguous uint8"):
        game.observe(states, np.zeros((2, *seen.shape[1:]), np.uint8))
    with pytest.raises(ValueError, match="contiguous uint8"):
        game.observe(states, np.zeros((6, *seen.shape[1:]), np.uint8)[::2])  # would be written into a copy
    with pytest.raises(ValueError, match="bool"):
        game.legal(states, np.zeros((3, 4, 7), np.uint8))
    with pytest.raises(ValueError, match="shape"):
        game.over(states, np.zeros(2, np.bool_))
    good = game.transition(3)
    for wrong in (other.transition(3), good._replace(illegal=np.zeros(2, np.int32)),
                  good._replace(reward=np.zeros((3, 2), np.float32))):  # fmt: skip
        with pytest.raises(ValueError, match="out is for"):
            game.simulate(states, actions, wrong)


def test_saved_grid_envs_that_do_not_fit():
    env = envs.make(HUNT, num_envs=3)
    env.step(np.full((3, 4), 4))
    saved = env.get_state()
    before = {name: array.copy() for name, array in saved.items()}
    wrong = [
        ("streams", None, ["streams", "missing"]),
        ("streams", np.zeros(2, np.uint64), ["streams", "(2,)", "(3,)"]),
        ("streams", np.zeros(3), ["streams", "integers"]),
        ("returns", np.full((3, 4), np.nan), ["returns", "finite"]),
        ("returns", np.full((3, 4), "a"), ["returns", "finite numbers"]),
        ("window", np.array([9.0, 0.5]), ["start_window", "9"]),
        ("window", np.array([3.0, np.nan]), ["window"]),
        ("states", saved["states"].astype(np.float32), ["states", "integers"]),
    ]
    for name, array, words in wrong:
        damaged = {key: value for key, value in saved.items() if key != name or array is not None}
        with pytest.raises(ConfigError) as error:
            env.set_state(damaged | ({} if array is None else {name: array}))
        one_sentence(error, *words)
        assert all((array == before[key]).all() for key, array in env.get_state().items()), "nothing has changed"


BATTLE = [  # name, value, what the sentence says
    ("unit_x", 1e9, ["unit_x", "-32", "64"]),
    ("unit_y", np.nan, ["unit_y", "finite"]),
    ("unit_hp", 46.0, ["unit_hp", "46", "45"]),
    ("unit_hp", -1.0, ["unit_hp", "-1"]),
    ("unit_target", 6, ["unit_target", "6", "-1 to 5"]),
    ("unit_order_target", -2, ["unit_order_target", "-2"]),
    ("unit_firing", 10**6, ["unit_firing"]),
    ("unit_order", 9, ["unit_order", "9"]),
    ("unit_order", 6, ["attack", "nobody"]),
    ("unit_cooldown", 1e6, ["unit_cooldown"]),
    ("last_actions", 9, ["last_actions", "9", "8"]),
    ("last_actions", -7, ["last_actions", "-7"]),
    ("t", 61, ["t of battle", "61", "60"]),
    ("t", -1, ["-1"]),
    ("returns", np.inf, ["returns", "finite"]),
    ("unit_target", 0.5, ["unit_target", "integers"]),
]


@pytest.mark.parametrize(("name", "value", "words"), BATTLE)
def test_saved_battles_that_cannot_be(name, value, words):
    env = envs.make("smac-3m", num_envs=2, seed=1)
    saved = env.get_state()
    damaged = saved[name].astype(np.float64) if isinstance(value, float) else saved[name].copy()
    damaged.flat[0] = value
    with pytest.raises(ConfigError) as error:
        env.set_state(saved | {name: damaged})
    one_sentence(error, "smac-3m", *words)
    assert all((array == saved[key]).all() for key, array in env.get_state().items()), "nothing has changed"


def test_every_state_of_long_battles_is_accepted():
    """The bounds are no tighter than what really happens: shields, healers, open edges, jittered starts."""
    for name in ("MMM2", "3s_vs_5z", "corridor"):
        env = envs.make(f"smac-{name}", num_envs=8, seed=1, start_jitter=1.0)
        generator = np.random.default_rng(0)
        for _ in range(60):
            env.step((generator.random(env.legal.shape) * env.legal).argmax(2))
            env.set_state(env.get_state())


def test_saved_particles_that_cannot_be():
    pytest.importorskip("mpe2")
    env = ParticleEnv("mpe-simple-spread", 2, seed=1)
    saved = env.get_state()
    for name, value in (("t", 25), ("t", -1), ("played", 5), ("seed", -3), ("episode", -1)):
        damaged = saved[name].copy()
        damaged[...] = value
        with pytest.raises(ConfigError) as error:
            env.set_state(saved | {name: damaged})
        one_sentence(error, name)


# settings ------------------------------------------------------------------------------------------------------------

HUGE = [
    (HUNT, {"max_block_comp": 10**7}, ["max_block_comp", "10000000", "4x4", "16"]),
    (HUNT, {"max_block_comp": 10**30}, ["max_block_comp"]),
    (HUNT, {"num_stags": 10**30}, ["num_stags"]),
    (HUNT, {"num_hares": -(10**30)}, ["num_hares"]),
    (HUNT, {"horizon": 10**5000}, ["horizon"]),
    (HUNT, {"height": 10**12}, ["height"]),
    (HUNT, {"final_time_after_first_hunt": 10**30}, ["final_time_after_first_hunt"]),
    (HUNT, {"hunters_needed": 10**30}, ["hunters_needed"]),
    (HUNT, {"start_window": 10**30, "start_window_prob": 0.5}, ["start_window"]),
    (HUNT, {"stag_reward": 1e300}, ["stag_reward", "1e+300"]),
    (HUNT, {"hare_reward": 10**400}, ["hare_reward"]),
    (HUNT, {"time_reward": float("-inf")}, ["time_reward", "-inf"]),
    (HUNT, {"player_strength": (1, 1, 1, 1e308)}, ["player_strength", "1e+308"]),
    ("msd-4x4", {"clear_cost": float("nan")}, ["finite", "nan"]),
    ("msd-4x4", {"num_drifts": 2**63}, ["num_drifts"]),
    ("smac-3m", {"horizon": 10**30}, ["horizon"]),
    ("smac-3m", {"start_jitter": 1e300}, ["start_jitter", "1e+300"]),
    ("smac-3m", {"start_jitter": float("nan")}, ["start_jitter", "nan"]),
    (HUNT, {"num_envs": 10**8}, ["num_envs", "100000000", "GB"]),
    (HUNT, {"num_envs": 10**30}, ["num_envs"]),
    (HUNT, {"threads": 10**9}, ["threads"]),
    ("smac-3m", {"num_envs": 10**9}, ["num_envs", "GB"]),
    (HUNT, {"num_players": 1000, "height": 150, "width": 200}, ["num_envs 1", "GB"]),
]


@pytest.mark.parametrize(("env_id", "settings", "words"), HUGE)
def test_huge_settings_are_refused_at_once(env_id, settings, words):
    begin = time.perf_counter()
    with pytest.raises(ConfigError) as error:
        envs.make(env_id, **settings)
    one_sentence(error, *words)
    assert time.perf_counter() - begin < 5


def test_as_many_blocks_as_cells_are_tried():
    """The bound is no tighter than the board, and the slowest board it allows is refused in a moment too."""
    begin = time.perf_counter()
    with pytest.raises(ConfigError, match="connected"):
        envs.game(HUNT, height=150, width=200, max_block_comp=30_000)
    assert time.perf_counter() - begin < 20
    envs.game(HUNT, height=150, width=200, max_block_comp=100)


# data files ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data_files(tmp_path_factory):
    """One file of play and one of transitions, small."""
    folder, game = tmp_path_factory.mktemp("data"), envs.game(HUNT)
    play = recording.collect_play(game.spec(), game, ("mix",), 400, np.random.SeedSequence(0))
    recording.save_data(folder / "play.npz", play)
    transitions = recording.collect_transitions(game, ["mix"], 0.1, 300, np.random.SeedSequence(0))
    recording.save_data(folder / "transitions.npz", transitions)
    return folder


def load(path, kind):
    game = envs.game(HUNT)
    return recording.load_play(path, game.spec()) if kind == "play" else recording.load_transitions(path, game)


def damaged_bytes(whole):
    """Name and content of damaged variants: cut, overwritten, with single bits flipped, with foreign content."""
    yield "empty", b""
    yield "foreign", b"hello\n" * 50
    yield "twice", whole + whole
    yield "tail", whole[len(whole) // 2 :]
    for part in (1, 4, 30, 100, len(whole) // 3, len(whole) // 2, len(whole) - 30, len(whole) - 1):
        yield f"first {part}", whole[:part]
    for k in range(60):
        place = (k * 2654435761) % len(whole)
        yield f"bit at {place}", whole[:place] + bytes([whole[place] ^ (1 << k % 8)]) + whole[place + 1 :]
    for k in range(10):
        place = (k * 40503 * 9973) % (len(whole) - 40)
        yield f"zeros at {place}", whole[:place] + b"\0" * 40 + whole[place + 40 :]


@pytest.mark.parametrize("kind", ["play", "transitions"])
def test_damaged_files(data_files, tmp_path, kind):
    """Refused in one sentence that names the file, or read as they were (a flip in an unused field of the archive)."""
    whole, path = (data_files / f"{kind}.npz").read_bytes(), tmp_path / "damaged.npz"
    good, refused = load(data_files / f"{kind}.npz", kind), 0
    for name, content in damaged_bytes(whole):
        path.write_bytes(content)
        try:
            data = load(path, kind)
        except ConfigError as error:
            assert "damaged.npz" in str(error) and "\n" not in str(error) and len(str(error)) < 500, name
            refused += 1
        else:
            assert all(np.array_equal(data[column], good[column]) for column in good if column != "meta"), name
    assert refused > 60


def columns_of(path):
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


COLUMNS = [
    ("play", "action", lambda x: np.array(3)),
    ("play", "action", lambda x: x[:0]),
    ("play", "action", lambda x: x[:-1]),
    ("play", "action", lambda x: x.astype(np.float64) + 0.5),
    ("play", "action", lambda x: x.astype(str)),
    ("play", "action", lambda x: x.astype(complex)),
    ("play", "t", lambda x: x.astype(np.int64) - 2**33),
    ("play", "episode", lambda x: x - 5),
    ("play", "obs", lambda x: x * 3),
    ("play", "obs", lambda x: x.astype(np.float64)),
    ("play", "obs", lambda x: x[..., :-1]),
    ("play", "legal", lambda x: x.astype(np.int8)),
    ("play", "legal", lambda x: np.zeros_like(x)),
    ("play", "goal_row", lambda x: x + 10**6),
    ("play", "meta", lambda x: np.array("[1, 2")),
    ("play", "meta", lambda x: np.array("[" * 100_000)),
    ("play", "meta", lambda x: np.array('{"kind": "play", "env_id": "msh-4h1s-4x4", "config": 3}')),
    ("transitions", "states", lambda x: np.full_like(x, 999)),
    ("transitions", "next_states", lambda x: x.astype(np.int64) + 70_000),
    ("transitions", "states", lambda x: x[0]),
    ("transitions", "actions", lambda x: x + 7),
    ("transitions", "reward", lambda x: x * np.float32(np.nan)),
    ("transitions", "end", lambda x: x.astype(np.int32)),
    ("transitions", "end", lambda x: np.array(True)),
]


@pytest.mark.parametrize(("kind", "column", "change"), COLUMNS)
def test_whole_files_with_wrong_columns(data_files, tmp_path, kind, column, change):
    columns, path = columns_of(data_files / f"{kind}.npz"), tmp_path / "wrong.npz"
    np.savez(path, **columns | {column: change(columns[column])})
    with pytest.raises(ConfigError) as error:
        load(path, kind)
    one_sentence(error, "wrong.npz")


def test_other_files(data_files, tmp_path):
    columns, path = columns_of(data_files / "play.npz"), tmp_path / "other.npz"
    del columns["legal"]
    np.savez(path, **columns)
    locked, odd = tmp_path / "odd.zip", tmp_path / "plain.npy"
    with zipfile.ZipFile(locked, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("meta.npy", b"\x93NUMPY\x01\x00" + b"{" * 200)
    np.save(odd, np.zeros(3))
    for wrong in (path, locked, odd, tmp_path, tmp_path / "missing.npz", data_files / "transitions.npz"):
        with pytest.raises(ConfigError) as error:
            load(wrong, "play")
        one_sentence(error, wrong.name)


def test_files_that_cannot_be_written(data_files, tmp_path):
    data = load(data_files / "play.npz", "play")
    (tmp_path / "file").write_text("in the way")
    for path in (tmp_path / "file" / "data.npz", tmp_path / ("x" * 300 + ".npz")):
        with pytest.raises(ConfigError, match="cannot be written"):
            recording.save_data(path, data)
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        recording.save_data(tmp_path / "folder.npz", data)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.npz"], "nothing half-written is left"
