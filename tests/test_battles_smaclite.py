"""The adapter for the real SMAClite package; skipped where it is not installed."""

import importlib.util

import numpy as np
import pytest

import envs
from envs.battles.teams import make_team

missing = next((name for name in ("smaclite", "rtree", "sklearn") if importlib.util.find_spec(name) is None), None)
installed = pytest.mark.skipif(missing is not None, reason=f"the SMAClite adapter needs the package '{missing}'")


@pytest.mark.skipif(missing is None, reason="SMAClite is installed")
def test_without_the_package_the_way_to_get_it_is_named():
    with pytest.raises(envs.ConfigError, match=r"smaclite.*pip install"):
        envs.make("smaclite-2s3z")


@installed
@pytest.mark.parametrize("name", ["3m", "2s3z", "MMM2", "corridor"])
def test_same_interface_and_same_start(name):
    theirs, ours = envs.make(f"smaclite-{name}", num_envs=2, seed=1), envs.make(f"smac-{name}", num_envs=2, seed=1)
    for field in ("num_players", "num_actions", "obs_shape", "state_shape", "horizon", "player_names"):
        assert getattr(theirs.spec, field) == getattr(ours.spec, field), field
    assert np.allclose(theirs.obs, ours.obs, atol=1e-4) and np.allclose(theirs.state, ours.state, atol=1e-4)
    assert np.array_equal(theirs.legal, ours.legal) and np.array_equal(theirs.alive, ours.alive)
    team = make_team("hold", theirs)
    for _ in range(3):
        actions = team().copy()
        theirs.step(actions)
        ours.step(actions)
        assert np.allclose(theirs.obs, ours.obs, atol=1e-4) and np.allclose(theirs.state, ours.state, atol=1e-4)
        assert set(theirs.info) == set(ours.info) and np.array_equal(theirs.t, ours.t)


@installed
def test_traps_are_handled(capsys):
    env = envs.make("smaclite-3m", num_envs=2, seed=3, horizon=5)
    assert capsys.readouterr().out == ""  # the package's prints
    for step in range(5):
        _, reward, terminated, truncated, info = env.step(np.full((2, 3), 4, np.int64))  # numpy integers
        assert reward.shape == (2, 3) and not terminated.any()
        assert truncated.all() == (step == 4)
    assert info["done"].all() and (info["episode_length"] == 5).all()
    assert (env.state[:, -27:] == 0).all()  # last actions after the automatic reset
    assert (info["final_state"][:, -27:].reshape(2, 3, 9).argmax(2) == 4).all()
    env.step(np.full((2, 3), 6))  # out of reach: stop, counted
    assert env.info["illegal_actions"].tolist() == [3, 3]
    with pytest.raises(ValueError, match="illegal"):
        envs.make("smaclite-3m", strict=True).step([[6, 6, 6]])
    with pytest.raises(envs.ConfigError, match=r"4m.*2s3z"):
        envs.make("smaclite-4m")
    with pytest.raises(envs.ConfigError, match=r"start_jitter.*horizon"):
        envs.make("smaclite-3m", start_jitter=1.0)


@installed
def test_healers_have_all_their_actions():
    env = envs.make("smaclite-MMM2", seed=1)
    assert env.spec.num_actions == 18 and env.legal[0, 0, 7:16].any()
    env.step(make_team("hold", env)())


@installed
def test_seeds_and_exact_restore():
    def run(env, steps, team_seed=2):
        team, seen = make_team("random", env, team_seed), []
        for _ in range(steps):
            env.step(team())
            seen.append(np.concatenate([env.obs.ravel(), env.state.ravel()]))
        return np.array(seen)

    first = run(envs.make("smaclite-2s3z", num_envs=2, seed=5), 12)
    assert np.array_equal(first, run(envs.make("smaclite-2s3z", num_envs=2, seed=5), 12))
    env = envs.make("smaclite-2s3z", num_envs=1, seed=5)
    run(env, 12)
    saved = env.get_state()
    ahead = run(env, 6, 4)
    other = envs.make("smaclite-2s3z", num_envs=1, seed=50)
    other.set_state(saved)
    assert np.array_equal(ahead, run(other, 6, 4))


@installed
def test_pettingzoo_face():
    env = envs.parallel_env("smaclite-2s3z", render_mode="rgb_array", horizon=3)
    obs, _ = env.reset(seed=1)
    while env.agents:
        obs, *_ = env.step({agent: int(obs[agent]["action_mask"].nonzero()[0][0]) for agent in env.agents})
    assert env.outcome() == "time is up" and env.get_env_info()["episode_limit"] == 3
    assert env.render().ndim == 3
