"""What a user can get wrong ends in one sentence that names the wrong value and, where there are any, the right one."""

import numpy as np
import pytest

import envs
from envs.players import RulePlayers, zoo_policy

HUNT, SNOW = "msh-4h1s-4x4", "msd-4x4"


def one_sentence(error, *words):
    """The message is one line that says all these words."""
    message = str(error.value)
    assert message and "\n" not in message and len(message) < 1000, message
    for word in words:
        assert str(word).lower() in message.lower(), f"'{word}' is not said in: {message}"


IMPOSSIBLE = [
    (HUNT, {"num_stags": 9, "num_hares": 8}, ["17", "16 cells"]),
    (SNOW, {"num_drifts": 17}, ["17", "16 cells"]),
    (HUNT, {"num_stags": 0, "num_hares": 0}, ["at least one", "stag", "hare"]),
    (SNOW, {"num_drifts": 0}, ["at least one", "drift"]),
    (HUNT, {"num_stags": -1}, ["stag", "-1"]),
    (HUNT, {"num_hares": -2}, ["hare", "-2"]),
    (SNOW, {"num_drifts": -1}, ["drift", "-1"]),
    (HUNT, {"hunters_needed": 5}, ["hunters_needed", "5", "4"]),
    (HUNT, {"hunters_needed": 0}, ["hunters_needed", "0"]),
    (HUNT, {"num_players": 1}, ["hunters_needed", "2", "1"]),
    (HUNT, {"num_players": 0}, ["num_players", "0"]),
    (SNOW, {"num_players": -3}, ["num_players", "-3"]),
    (HUNT, {"horizon": -1}, ["horizon", "-1"]),
    (SNOW, {"horizon": 0}, ["horizon", "0"]),
    (HUNT, {"horizon": 10**6}, ["horizon", "30000"]),
    (HUNT, {"height": 0}, ["height", "0"]),
    (SNOW, {"width": -4}, ["width", "-4"]),
    (HUNT, {"height": 1000, "width": 1000}, ["cells"]),
    (HUNT, {"max_block_comp": -1}, ["max_block_comp", "-1"]),
    (HUNT, {"max_block_comp": 40}, ["block", "40", "connected", "4x4"]),
    (SNOW, {"max_block_comp": 2, "num_drifts": 15}, ["block", "15"]),
    (HUNT, {"height": 1, "width": 3, "num_hares": 1, "max_block_comp": 1}, ["block", "1x3"]),
    (HUNT, {"start_window": 2, "start_window_prob": 0.5}, ["window", "2x2", "5"]),
    (SNOW, {"start_window": 5, "start_window_prob": 0.5}, ["start_window", "5", "4"]),
    (SNOW, {"start_window_prob": 0.5}, ["start_window", "0"]),
    (HUNT, {"start_window": -1}, ["start_window", "-1"]),
    (HUNT, {"start_window": 3, "start_window_prob": 1.5}, ["start_window_prob", "1.5", "0", "1"]),
    (HUNT, {"start_window": 3, "start_window_prob": float("nan")}, ["start_window_prob", "nan"]),
    (HUNT, {"player_strength": (1, 1)}, ["player_strength", "4", "(1, 1)"]),
    (HUNT, {"player_strength": (1, 1, 1, 0)}, ["player_strength", "positive"]),
    (HUNT, {"player_strength": (1, 1, 1, -2)}, ["player_strength", "positive"]),
    (HUNT, {"player_strength": (1, 1, 1, float("nan"))}, ["player_strength", "nan"]),
    (HUNT, {"player_strength": ("a", "b", "c", "d")}, ["player_strength"]),
    (HUNT, {"player_strength": 3}, ["player_strength", "3"]),
    (HUNT, {"final_time_after_first_hunt": -1}, ["final_time_after_first_hunt", "-1"]),
    (HUNT, {"final_time_after_first_hunt": 2.5}, ["final_time_after_first_hunt", "2.5"]),
    (HUNT, {"time_reward": float("nan")}, ["time_reward", "nan"]),
    (HUNT, {"stag_reward": float("inf")}, ["inf"]),
    (SNOW, {"drift_reward": float("nan")}, ["nan"]),
]
WRONG_TYPES = [
    (HUNT, {"horizon": 3.5}, ["horizon", "int", "3.5"]),
    (HUNT, {"horizon": "35"}, ["horizon", "int", "'35'"]),
    (HUNT, {"num_players": None}, ["num_players", "int", "None"]),
    (HUNT, {"num_hares": True}, ["num_hares", "int", "True"]),
    (SNOW, {"prosocial": "yes"}, ["prosocial", "bool", "'yes'"]),
    (SNOW, {"prosocial": 1}, ["prosocial", "bool", "1"]),
    (HUNT, {"stag_reward": "ten"}, ["stag_reward", "float", "'ten'"]),
    (HUNT, {"player_strength": [[1, 2], [3, 4]]}, ["player_strength"]),
    (HUNT, {"start_window_prob": "often"}, ["start_window_prob", "'often'"]),
]


@pytest.mark.parametrize(("env_id", "options", "words"), IMPOSSIBLE + WRONG_TYPES)
def test_impossible_settings(env_id, options, words):
    """Refused when the game is made, by every face alike."""
    for make in (envs.game, envs.make, envs.parallel_env, envs.spec):
        with pytest.raises(envs.ConfigError) as error:
            make(env_id, **options)
        one_sentence(error, *words)


@pytest.mark.parametrize("make", [envs.game, envs.make, envs.parallel_env, envs.spec])
@pytest.mark.parametrize("env_id", ["msh-4x4", "", "MSH-4H1S-4X4", 3, None])
def test_wrong_id(make, env_id):
    with pytest.raises(envs.ConfigError) as error:
        make(env_id)
    one_sentence(error, env_id, "msh-4h1s-4x4", "msh-4h1s-8x8", "msh-4h2s-4x4", "msh-4h2s-8x8")
    one_sentence(error, "msd-4x4", "msd-6x6", "msd-8x8")


@pytest.mark.parametrize("make", [envs.game, envs.make, envs.parallel_env, envs.spec])
def test_wrong_override(make):
    with pytest.raises(envs.ConfigError) as error:
        make(HUNT, number_of_stags=2)
    one_sentence(error, "number_of_stags", "num_stags", "num_hares", "horizon", "hunters_needed", HUNT)
    with pytest.raises(envs.ConfigError) as error:
        make(SNOW, num_stags=2)
    one_sentence(error, "num_stags", "num_drifts", "clear_cost", SNOW)


@pytest.mark.parametrize(
    "options", [{"num_envs": 0}, {"num_envs": -1}, {"num_envs": 2.5}, {"threads": 0}, {"seed": -1}, {"seed": "one"}]
)
def test_wrong_batch(options):
    with pytest.raises(envs.ConfigError) as error:
        envs.make(HUNT, **options)
    [(name, value)] = options.items()
    one_sentence(error, name, value)


def test_wrong_render_mode():
    with pytest.raises(envs.ConfigError) as error:
        envs.parallel_env(HUNT, render_mode="human")
    one_sentence(error, "human", "ansi", "rgb_array")


def test_wrong_window_during_training():
    env = envs.make(HUNT)
    for window, prob, words in ((9, 0.5, ["9", "4"]), (2, 0.5, ["2x2"]), (3, -0.1, ["-0.1"]), (0, 0.5, ["0"])):
        with pytest.raises(envs.ConfigError) as error:
            env.set_start_window(window, prob)
        one_sentence(error, "window", *words)
    assert env.start_window == 0 and env.start_window_prob == 0


WRONG_ACTIONS = [
    (np.zeros((3, 3), dtype=int), ["shape", "(3, 4)", "(3, 3)"]),
    (np.zeros((2, 4), dtype=int), ["shape", "(3, 4)", "(2, 4)"]),
    (np.zeros(12, dtype=int), ["shape", "(3, 4)", "(12,)"]),
    (np.zeros((3, 4, 1), dtype=int), ["shape", "(3, 4)", "(3, 4, 1)"]),
    (4, ["shape", "(3, 4)"]),
    (None, ["(3, 4)"]),
    ([[0, 1], [2]], ["(3, 4)"]),
    ({"player_1": 0}, ["(3, 4)"]),
    (np.zeros((3, 4)), ["integers", "float64"]),
    (np.zeros((3, 4), dtype=bool), ["integers", "bool"]),
    (np.full((3, 4), "UP"), ["integers"]),
    (np.full((3, 4), 7), ["7", "0..6", "STAG"]),
    (np.full((3, 4), -1), ["-1", "0..6", "HARE"]),
    (np.full((3, 4), 2**40), [2**40, "0..6"]),
]


@pytest.mark.parametrize(("actions", "words"), WRONG_ACTIONS)
def test_wrong_actions(actions, words):
    """Refused before anything moves, by the batched env and by `simulate`."""
    env = envs.make(HUNT, num_envs=3)
    before = env.states.copy()
    for step in (env.step, lambda wrong: env.game.simulate(before, wrong)):
        with pytest.raises(ValueError) as error:
            step(actions)
        one_sentence(error, *words)
    np.testing.assert_array_equal(env.states, before)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.int64])
def test_any_integers_are_actions(dtype):
    rows = [envs.make(HUNT, num_envs=3).step(np.full((3, 4), 1, dtype=dtype))[0].tobytes() for _ in range(2)]
    assert rows[0] == envs.make(HUNT, num_envs=3).step([[1] * 4] * 3)[0].tobytes()


def test_strict_names_player_action_and_the_legal_ones():
    """In the top left corner without prey: DOWN, RIGHT, STAY. Nothing has moved when the error comes."""
    board = np.zeros(16, dtype=np.int16)
    board[[6, 15]] = 2, 3
    row = np.array([0, 35, 5, 0, -1, 5, *board], dtype=np.int16)
    env = envs.make(HUNT, num_envs=2, strict=True)
    env.set_states(np.stack([row, row]))
    with pytest.raises(ValueError) as error:
        env.step([[4, 1, 4, 4], [4, 0, 4, 4]])
    one_sentence(error, "UP", "player_2", "DOWN, RIGHT, STAY", "1")
    np.testing.assert_array_equal(env.states, np.stack([row, row]))
    env.step([[4, 1, 6, 4], [4, 3, 0, 4]])  # who left may say anything
    game = envs.parallel_env(HUNT, strict=True)
    game.reset(seed=0)
    game.set_state(row)
    with pytest.raises(ValueError) as error:
        game.step({"player_1": 4, "player_2": 5, "player_4": 4})
    one_sentence(error, "STAG", "player_2", "DOWN, RIGHT, STAY")
    np.testing.assert_array_equal(game.state_row, row)


def test_wrong_states():
    env = envs.make(HUNT, num_envs=3)
    for wrong in (np.zeros((2, 22), dtype=np.int16), np.zeros((3, 21), dtype=np.int16), np.zeros(22, dtype=np.int16)):
        with pytest.raises(ValueError) as error:
            env.set_states(wrong)
        one_sentence(error, "shape", "(3, 22)", wrong.shape)
    game = envs.parallel_env(HUNT)
    with pytest.raises(ValueError) as error:
        game.set_state(np.zeros(21, dtype=np.int16))
    one_sentence(error, "22", "21")


def test_simulate_and_its_kin_refuse_states_and_outputs_of_another_shape():
    """They are compiled loops: what is not refused here reads and writes foreign memory."""
    game = envs.game(HUNT)
    states, actions = game.draw(0, 3), np.full((3, 4), 4)
    for wrong in (states[:, :21], states[0], np.hstack([states, states])):
        for call in (game.observe, game.legal, lambda s: game.simulate(s, actions)):
            with pytest.raises(ValueError) as error:
                call(wrong)
            one_sentence(error, "states", "22", wrong.shape)
    with pytest.raises(ValueError) as error:
        game.simulate(states, actions, out=game.transition(4))
    one_sentence(error, "out", "3", "4")


def test_rule_players_refuse_another_number_of_envs():
    game = envs.game(HUNT, height=1, width=2, num_hares=1)  # nothing to choose at random here
    states = np.tile(np.array([0, 35, 0, 0, 0, 0, 2, 3], dtype=np.int16), (3, 1))
    players = RulePlayers(game, ["ns"] * 4, 2, seed=0)
    with pytest.raises(ValueError) as error:
        players.act(game.observe(states), game.legal(states), np.zeros(3, dtype=np.int32))
    one_sentence(error, "2", "3")


def test_stepping_a_finished_pettingzoo_game():
    game = envs.parallel_env(HUNT, horizon=1)
    with pytest.raises(RuntimeError) as error:
        game.step({"player_1": 4})
    one_sentence(error, "reset")
    game.reset(seed=0)
    game.step(dict.fromkeys(game.agents, 4))
    for actions in ({}, dict.fromkeys(game.possible_agents, 4)):
        with pytest.raises(RuntimeError) as error:
            game.step(actions)
        one_sentence(error, "over", "reset")
    game.reset()
    game.step(dict.fromkeys(game.agents, 4))


PETTINGZOO_ACTIONS = [
    ({}, ["player_1", "player_4", "nobody"]),
    ({"player_1": 4}, ["player_1", "player_2", "player_3", "player_4"]),
    (dict.fromkeys(["player_0", "player_1", "player_2", "player_3"], 4), ["player_0", "player_4"]),
    (dict.fromkeys(["player_1", "player_2", "player_3", "player_4"], 7), ["7", "0..6"]),
    (dict.fromkeys(["player_1", "player_2", "player_3", "player_4"], -1), ["-1", "0..6"]),
    (dict.fromkeys(["player_1", "player_2", "player_3", "player_4"], 1.0), ["integers", "float"]),
    (dict.fromkeys(["player_1", "player_2", "player_3", "player_4"], None), ["integers"]),
    ([4, 4, 4, 4], ["player_1", "player_4"]),
    (np.full(4, 4), ["player_1", "player_4"]),
    (None, ["player_1", "player_4"]),
]


@pytest.mark.parametrize(("actions", "words"), PETTINGZOO_ACTIONS)
def test_wrong_pettingzoo_actions(actions, words):
    game = envs.parallel_env(HUNT)
    game.reset(seed=0)
    before = game.state_row
    with pytest.raises(ValueError) as error:
        game.step(actions)
    one_sentence(error, *words)
    np.testing.assert_array_equal(game.state_row, before)


def test_wrong_role():
    hunt, snow = envs.game(HUNT), envs.game(SNOW)
    for game, role, words in (
        (hunt, "nd", ["nd", "random", "ns", "nh", "fix", "mix"]),
        (snow, "ns", ["ns", "random", "nd", "fix", "mix"]),
        (hunt, "", ["random", "ns", "nh", "fix", "mix"]),
        (hunt, 3, ["3", "random", "ns", "nh", "fix", "mix"]),
    ):
        with pytest.raises(envs.ConfigError) as error:
            RulePlayers(game, [None, role, None, None], 1, 0)
        one_sentence(error, *words)
        with pytest.raises(envs.ConfigError) as error:
            zoo_policy(role, game, 0)
        one_sentence(error, *words)
    for roles in (["ns"], ["ns"] * 5, []):
        with pytest.raises(envs.ConfigError) as error:
            RulePlayers(hunt, roles, 1, 0)
        one_sentence(error, "4 players", len(roles))


@pytest.mark.parametrize("settings", [{"height": 10**9}, {"horizon": 10**6}, {"num_players": 10**6}])
def test_sizes_beyond_the_state_row_are_refused_at_once(settings):
    with pytest.raises(envs.ConfigError, match="must be at most 30000"):
        envs.game("msh-4h1s-4x4", **settings)
