"""The PettingZoo face: PettingZoo's own tests, whole episodes from a seed, agents leaving or kept, drawing."""

import warnings

import numpy as np
import pytest
from pettingzoo.test import api_test, parallel_api_test, parallel_seed_test
from pettingzoo.utils import parallel_to_aec

import envs

GAMES = [
    ("msh-4h1s-4x4", {}),
    ("msh-4h2s-8x8", {"max_block_comp": 2, "final_time_after_first_hunt": 5}),
    ("msh-4h1s-4x4", {"num_players": 2, "num_hares": 1, "time_reward": -0.1}),
    ("msd-4x4", {}),
    ("msd-8x8", {"max_block_comp": 3, "prosocial": True}),
]
BATTLES = [("smac-3m", {}), ("smac-MMM2", {"start_jitter": 1.0, "horizon": 20})]
PLAIN = {"flat": True, "keep_agents": True}
all_games = pytest.mark.parametrize(("env_id", "options"), GAMES)
all_envs = pytest.mark.parametrize(
    ("env_id", "options"), GAMES + BATTLES + [(env_id, options | PLAIN) for env_id, options in GAMES + BATTLES]
)


@all_envs
def test_parallel_api(env_id, options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel_api_test(envs.parallel_env(env_id, **options), num_cycles=200)


@all_envs
def test_parallel_seed(env_id, options):
    parallel_seed_test(lambda: envs.parallel_env(env_id, **options), num_cycles=30)


@pytest.mark.filterwarnings("ignore:Observation")  # it would rather see plain arrays than dicts with a mask
@all_games
def test_aec_api(env_id, options, capsys):
    api_test(parallel_to_aec(envs.parallel_env(env_id, **options)), num_cycles=200)
    assert "Passed" in capsys.readouterr().out


def play(env, seed, episodes=4):
    """All bytes of some whole episodes with the action space's own random actions, legal ones by the mask."""
    for agent in env.possible_agents:
        env.action_space(agent).seed(seed)
    said, lengths = [], []
    for episode in range(episodes):
        seen, infos = env.reset(seed=seed) if episode == 0 else env.reset()
        lengths.append(0)
        assert env.agents == env.possible_agents and set(infos) == set(seen) == set(env.agents)
        while env.agents:
            actions = {}
            for agent, view in seen.items():
                assert env.observation_space(agent).contains(view)
                parts = view if isinstance(view, dict) else {"observation": view, **infos[agent]}
                said += [agent.encode(), *(np.asarray(parts[name]).tobytes() for name in sorted(parts))]
                actions[agent] = env.action_space(agent).sample(parts["action_mask"])
            seen, *rest = env.step(actions)
            infos = rest[-1]
            said.append(repr([list(part.items()) for part in rest]).encode())
            seen = {agent: seen[agent] for agent in env.agents}
            lengths[-1] += 1
    return said, lengths


@all_envs
def test_whole_episodes_repeat_from_a_seed(env_id, options):
    """PettingZoo's seed test stops after a few steps; this one goes through ends and restarts."""
    env = envs.parallel_env(env_id, **options)
    first, lengths = play(env, seed=3)
    assert max(lengths) <= env.spec.horizon
    assert play(envs.parallel_env(env_id, **options), seed=3) == (first, lengths)
    assert play(env, seed=3) == (first, lengths), "a used game, seeded again"
    assert play(env, seed=4) != (first, lengths)


def test_games_without_a_seed_differ():
    starts = set()
    for _ in range(5):
        env = envs.parallel_env("msh-4h1s-8x8")
        env.reset()
        starts.add(env.state_row.tobytes())
    assert len(starts) == 5


def test_agents_leave_as_they_hunt():
    env = envs.parallel_env("msh-4h1s-4x4")
    env.reset(seed=0)
    board = np.zeros(16, dtype=np.int16)
    board[[0, 5, 15]] = 2, 3, 3
    seen, _ = env.set_state(np.array([3, 35, 0, 0, 5, 10, *board], dtype=np.int16))
    assert seen["player_1"]["observation"].shape == (4, 4, 7) and seen["player_1"]["t"].item() == 3
    assert seen["player_1"]["action_mask"].tolist() == [0, 1, 0, 1, 1, 1, 0]
    seen, reward, terminated, truncated, infos = env.step({"player_1": 5, "player_2": 5, "player_3": 4, "player_4": 6})
    assert env.agents == ["player_3", "player_4"]
    assert reward == {"player_1": 5.0, "player_2": 5.0, "player_3": 0.0, "player_4": 0.0}
    assert terminated == {"player_1": True, "player_2": True, "player_3": False, "player_4": False}
    assert not any(truncated.values())
    assert infos["player_4"]["illegal_actions"] == 1  # no hare where it stands
    assert not seen["player_1"]["observation"].any()
    assert seen["player_1"]["action_mask"].tolist() == [0, 0, 0, 0, 1, 0, 0]
    seen, reward, terminated, _, _ = env.step({"player_3": 6, "player_4": 1})
    assert set(seen) == {"player_3", "player_4"} and reward["player_3"] == 1.0 and env.agents == ["player_4"]
    assert env.state_row[2:6].tolist() == [-1, -1, -1, 14]


def test_horizon_truncates():
    env = envs.parallel_env("msd-4x4", horizon=3)
    env.reset(seed=0)
    for step in range(3):
        assert env.agents == env.possible_agents
        _, _, terminated, truncated, _ = env.step(dict.fromkeys(env.agents, 4))
        assert not any(terminated.values()) and all(value == (step == 2) for value in truncated.values())
    assert env.agents == []


def test_a_finished_state_has_no_agents():
    """Nobody can act in it, so a loop over `agents` must end at once."""
    env = envs.parallel_env("msh-4h1s-4x4")
    env.reset(seed=0)
    row = env.state_row
    row[0] = row[1]
    env.set_state(row)
    assert env.agents == []


# plain arrays and the same agents all the time, for libraries that need them


@all_games
def test_keep_agents_changes_nothing_but_who_is_told(env_id, options):
    """The same actions give the same game: same rewards and planes; who left gets zeros and 0, and all end at once."""
    plain, kept = envs.parallel_env(env_id, **options), envs.parallel_env(env_id, **options, **PLAIN)
    rng, mixed = np.random.default_rng(0), 0
    for episode in range(30):
        seen, _ = plain.reset(seed=episode)
        vectors, infos = kept.reset(seed=episode)
        while kept.agents:
            assert kept.agents == kept.possible_agents and set(plain.agents) == set(seen)
            for agent, vector in vectors.items():
                assert kept.observation_space(agent).contains(vector)
                if agent in seen:
                    clock = seen[agent]["t"] / kept.game.config.horizon
                    np.testing.assert_allclose(vector, np.append(seen[agent]["observation"], clock))
                    np.testing.assert_array_equal(infos[agent]["action_mask"], seen[agent]["action_mask"])
                else:
                    assert not vector.any() and np.flatnonzero(infos[agent]["action_mask"]).tolist() == [4]
            actions = {agent: int(rng.integers(kept.action_space(agent).n)) for agent in kept.agents}
            acted = list(plain.agents)
            seen, rewards, terminated, truncated, told = plain.step({agent: actions[agent] for agent in acted})
            vectors, all_rewards, all_terminated, all_truncated, infos = kept.step(actions)
            seen = {agent: view for agent, view in seen.items() if agent in plain.agents}
            assert all_rewards == dict.fromkeys(kept.possible_agents, 0.0) | rewards
            assert all(infos[agent]["taken"] == told[agent]["taken"] for agent in acted)
            over = not plain.agents
            assert over == (not kept.agents) == all(all_terminated.values()) | all(all_truncated.values())
            assert any(all_truncated.values()) == (over and any(truncated.values()))
            for agent in kept.possible_agents:  # who is out of the game has nothing to expect, even if time ended it
                assert all_terminated[agent] == (over and not truncated.get(agent, False))
            mixed += over and any(truncated.values()) and any(terminated.values())
        np.testing.assert_array_equal(plain.state_row, kept.state_row)
    assert mixed or env_id != "msh-4h1s-4x4" or options, "somebody hunts as time runs out"


def test_one_hunts_as_the_others_time_out():
    """PettingZoo's flags are per agent, so they differ here. An adapter that waits for `all(terminated)` or
    `all(truncated)`, as RLlib's does, never sees this episode end; with `keep_agents` it does."""
    board = np.zeros(16, dtype=np.int16)
    board[[0, 5, 15]] = 2, 3, 3
    row = np.array([34, 35, 1, 1, 5, -1, *board], dtype=np.int16)
    env = envs.parallel_env("msh-4h1s-4x4")
    env.set_state(row)
    _, _, terminated, truncated, _ = env.step({"player_1": 4, "player_2": 4, "player_3": 6})
    assert terminated == {"player_1": False, "player_2": False, "player_3": True}
    assert truncated == {"player_1": True, "player_2": True, "player_3": False}
    assert env.agents == []
    env = envs.parallel_env("msh-4h1s-4x4", keep_agents=True)
    env.set_state(row)
    seen, rewards, terminated, truncated, _ = env.step({"player_1": 4, "player_2": 4, "player_3": 6, "player_4": 0})
    assert list(terminated.values()) == [False, False, True, True] and list(truncated.values()) == [True] * 4
    assert list(rewards.values()) == [0.0, 0.0, 1.0, 0.0] and not seen["player_4"]["observation"].any()
    assert env.agents == []


@pytest.mark.parametrize("options", [{}, PLAIN])
def test_illegal_actions_of_a_battle_are_stop_and_counted(options):
    """As in the grid games; `strict` raises instead, and who is dead may still say anything only if not strict."""
    one, two = envs.parallel_env("smac-3m", **options), envs.parallel_env("smac-3m", **options)
    for env in (one, two):
        _, infos = env.reset(seed=1)
        assert infos["marine_0"]["illegal_actions"] == 0
    _, _, _, _, infos = one.step({"marine_0": 0, "marine_1": 8, "marine_2": 1})
    assert infos["marine_0"]["illegal_actions"] == infos["marine_2"]["illegal_actions"] == 2
    _, _, _, _, infos = two.step({"marine_0": 1, "marine_1": 1, "marine_2": 1})
    assert infos["marine_0"]["illegal_actions"] == 0
    assert one.state().tobytes() == two.state().tobytes()
    strict = envs.parallel_env("smac-3m", strict=True, **options)
    strict.reset(seed=1)
    with pytest.raises(ValueError, match=r"attack enemy marine_2 of marine_1 is illegal; legal are stop, north"):
        strict.step({"marine_0": 1, "marine_1": 8, "marine_2": 1})
    with pytest.raises(ValueError, match="must be a dict with an action for each of marine_0, marine_1, marine_2"):
        strict.step([1, 1, 1])


def test_strict_and_kept_agents():
    """Who left may say anything; who is on the board may not."""
    env = envs.parallel_env("msh-4h1s-4x4", strict=True, keep_agents=True)
    board = np.zeros(16, dtype=np.int16)
    board[[0, 5]] = 2, 3
    env.set_state(np.array([0, 35, 0, -1, 5, 5, *board], dtype=np.int16))
    env.step({"player_1": 4, "player_2": 6, "player_3": 4, "player_4": 4})
    with pytest.raises(ValueError, match="action UP of player_1 is illegal"):
        env.step({"player_1": 0, "player_2": 6, "player_3": 4, "player_4": 4})


@pytest.mark.parametrize("env_id", ["msh-4h2s-4x4", "msd-6x6"])
def test_drawing(env_id):
    """Text and pictures exist from the start to the end of an episode, and change when something happens."""
    words, images = envs.parallel_env(env_id, render_mode="ansi"), envs.parallel_env(env_id, render_mode="rgb_array")
    rng = np.random.default_rng(0)
    texts, pictures = [], []
    for env, shots in ((words, texts), (images, pictures)):
        env.reset(seed=1)
        shots.append(env.render())
        while env.agents:
            env.step({agent: int(rng.integers(4)) for agent in env.agents})
            shots.append(env.render())
        env.close()
    assert all(isinstance(text, str) and text.count("\n") >= words.game.config.height - 1 for text in texts)
    assert len(set(texts)) > 5
    for picture in pictures:
        assert picture.dtype == np.uint8 and picture.ndim == 3 and picture.shape[2] == 3
        assert picture.shape == pictures[0].shape
    assert len({picture.tobytes() for picture in pictures}) > 5
    silent = envs.parallel_env(env_id)
    silent.reset(seed=0)
    assert silent.render() is None
