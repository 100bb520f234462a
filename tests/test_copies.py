"""Copies of envs (`copy.deepcopy`, pickle) are independent and right: both go on alike, neither touches the other."""

import copy
import importlib.util
import pickle

import numpy as np
import pytest

import envs
from envs.particles import ParticleEnv

WINDOWS = {"max_block_comp": 1, "start_window": 3, "start_window_prob": 0.5, "horizon": 12}
BATCHED = {
    "stag hunt": lambda seed: envs.make("msh-4h1s-4x4", num_envs=5, seed=seed),
    "stag hunt, 3 threads": lambda seed: envs.make("msh-4h2s-8x8", num_envs=7, seed=seed, threads=3, **WINDOWS),
    "snowdrift, 2 threads": lambda seed: envs.make("msd-4x4", num_envs=6, seed=seed, threads=2),
    "one game": lambda seed: envs.make("msh-4h1s-4x4", seed=seed, threads=4),
    "battle": lambda seed: envs.make("smac-3m", num_envs=3, seed=seed, horizon=9),
    "random battle": lambda seed: envs.make("smac-random-5v5-terran", num_envs=3, seed=seed, horizon=9),
    "battle, 2 threads": lambda seed: envs.make("smac-2s3z", num_envs=4, seed=seed, threads=2, start_jitter=1.0),
}
if importlib.util.find_spec("mpe2"):
    BATCHED["particles"] = lambda seed: ParticleEnv("mpe-simple-spread", 3, seed, horizon=6)
    BATCHED["particles, forces"] = lambda seed: ParticleEnv("mpe-simple-spread", 2, seed, continuous=True, horizon=6)
SINGLE = {
    "game": lambda: envs.parallel_env("msh-4h1s-4x4", max_block_comp=1),
    "flat game": lambda: envs.parallel_env("msd-4x4", flat=True, keep_agents=True),
    "battle": lambda: envs.parallel_env("smac-3m", start_jitter=1.0),
    "flat battle": lambda: envs.parallel_env("smac-3m", flat=True, keep_agents=True),
}
HOW = {"deepcopy": copy.deepcopy, "pickle": lambda env: pickle.loads(pickle.dumps(env))}
all_ways = pytest.mark.parametrize("how", HOW)


def facts(env):
    """Everything a batched env says about its present, as bytes."""
    arrays = [env.obs, env.legal, env.alive, env.t, getattr(env, "states", None), getattr(env, "state", None)]
    arrays += list(env.info.values()) + list(env.get_state().values())
    return [np.asarray(array).tobytes() for array in arrays if array is not None]


def step(env, actions):
    answer = env.step(actions)
    return [array.tobytes() for array in answer[:4]], [array.tobytes() for array in answer[4].values()], facts(env)


def make_plan(env, seed, steps):
    generator, shape = np.random.default_rng(seed), (steps, env.num_envs, env.spec.num_players)
    if getattr(env, "continuous", False):
        return generator.random((*shape, env.spec.num_actions), np.float32)
    return generator.integers(env.spec.num_actions, size=shape)


@all_ways
@pytest.mark.parametrize("name", BATCHED)
def test_batched(name, how):
    """The copy does what the original does later, and what a new env with the same seed and history does."""
    make = BATCHED[name]
    env, fresh = make(5), make(5)
    plan, other = make_plan(env, 0, 60), make_plan(env, 1, 40)
    for actions in plan[:20]:
        env.step(actions)
        fresh.step(actions)
    twin, present = HOW[how](env), facts(env)
    assert facts(twin) == present
    said = [step(twin, actions) for actions in plan[20:]]
    assert any(np.frombuffer(infos[0], np.bool_).any() for _, infos, _ in said), "episodes must end in this test"
    assert facts(env) == present, "stepping the copy moved the original"
    assert [step(fresh, actions) for actions in plan[20:]] == said
    after = facts(twin)
    assert [step(env, actions) for actions in plan[20:]] == said
    for actions in other:
        env.step(actions)
    assert facts(twin) == after, "stepping the original moved the copy"
    twin.reset(seed=5)
    assert facts(twin)[0] == make(5).obs.tobytes()
    for each in (env, fresh, twin):
        each.close()


@all_ways
@pytest.mark.parametrize("per_player", [False, True])
def test_gymnasium(how, per_player):
    vector = envs.make_vec("msh-4h1s-4x4", num_envs=3, seed=2, per_player=per_player, horizon=5)
    vector.reset(seed=2)
    actions = np.random.default_rng(0).integers(7, size=(30, *vector.action_space.shape))
    for joint in actions[:8]:
        vector.step(joint)
    twin = HOW[how](vector)
    first = [[part.tobytes() for part in twin.step(joint)[:4]] for joint in actions[8:]]
    assert [[part.tobytes() for part in vector.step(joint)[:4]] for joint in actions[8:]] == first


def flatten(thing):
    """An answer of a PettingZoo env as something that can be compared."""
    if isinstance(thing, dict):
        return {name: flatten(part) for name, part in thing.items()}
    if isinstance(thing, (list, tuple)):
        return [flatten(part) for part in thing]
    return thing.tobytes() if isinstance(thing, np.ndarray) else thing


def play(env, generator, steps):
    said = []
    for _ in range(steps):
        if not env.agents:
            said.append(flatten(env.reset()))
        actions = {agent: int(generator.integers(env.action_space(agent).n)) for agent in env.agents}
        said.append(flatten(env.step(actions)))
        said.append(env.state().tobytes())
    return said


@all_ways
@pytest.mark.parametrize("name", SINGLE)
def test_single(name, how):
    env, fresh = SINGLE[name](), SINGLE[name]()
    for each in (env, fresh):
        each.reset(seed=3)
        play(each, np.random.default_rng(0), 25)
    twin, present = HOW[how](env), env.state().tobytes()
    said = play(twin, np.random.default_rng(1), 90)
    assert env.state().tobytes() == present
    assert play(fresh, np.random.default_rng(1), 90) == said
    assert play(env, np.random.default_rng(1), 90) == said


@all_ways
def test_smac(how):
    env = envs.smac_env("3m", seed=1)
    env.reset()
    for _ in range(5):
        env.step([row.index(1) for row in env.get_avail_actions()])
    twin = HOW[how](env)
    for _ in range(10):
        actions = [len(row) - 1 - row[::-1].index(1) for row in env.get_avail_actions()]
        assert twin.step(actions) == env.step(actions)
        assert twin.get_state().tobytes() == env.get_state().tobytes()


@all_ways
def test_rules(how):
    game = envs.game("msh-4h1s-8x8", max_block_comp=2, player_strength=(1, 2, 3, 4))
    states, actions = game.draw(0, 50), np.random.default_rng(0).integers(7, size=(50, 4))
    for one, two in zip(game.simulate(states, actions), HOW[how](game).simulate(states, actions), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("env_id", ["msh-4h1s-8x8", "smac-3m"])
def test_copies_of_a_new_unseeded_game_are_different_games(env_id):
    """Libraries make many envs by copying one; without a seed those must not all play the same episodes."""
    env = envs.parallel_env(env_id, **({"start_jitter": 1.0} if env_id.startswith("smac") else {}))
    starts = set()
    for _ in range(4):
        twin = copy.deepcopy(env)
        twin.reset()
        starts.add(twin.state().tobytes())
    assert len(starts) == 4
