"""Our battles against recordings: of the reference game where they are at hand, and of our own simulator always.

The recordings of the reference stay outside this project; without them those tests are skipped. The small files in
tests/fixtures/battles were recorded from our simulator (python tests/test_battles_parity.py records them anew).
"""

from pathlib import Path

import numpy as np
import pytest

import envs
from envs import battles
from envs.battles.env import BattleEnv
from envs.battles.teams import TEAMS, act_rows, make_team

TRACES = Path(__file__).parents[2] / "shared" / "battle_traces"
GOLDEN = Path(__file__).parent / "fixtures" / "battles"
RECORDED_FIGHTS = [("3m", "nearest", 20), ("2s3z", "focus", 24), ("MMM2", "hold", 16), ("corridor", "random", 10)]

reference = pytest.mark.skipif(not TRACES.is_dir(), reason="recordings of the reference game are not at hand")


def trace_names():
    return sorted(path.stem for path in TRACES.glob("*.npz")) if TRACES.is_dir() else ["none"]


@reference
@pytest.mark.parametrize("name", trace_names())
def test_follows_the_reference(name):
    trace = np.load(TRACES / f"{name}.npz")
    env_id = f"smac-{name.rsplit('_', 1)[0]}"
    env = BattleEnv(env_id, battles.load(env_id), record=True, auto_reset=False)
    order = np.concatenate([env.rules.allies, env.rules.enemies])
    place = np.append(np.argsort(order), -1)  # unit index -> place in the recording, -1 stays -1
    until = int(trace["first_divergence_tick"])
    compared = 0
    for step in range(len(trace["actions"]) + 1):
        if step * 8 > until:
            break
        assert np.allclose(env.obs[0], trace["obs"][step], atol=1e-4)
        assert np.allclose(env.state[0], trace["state"][step], atol=1e-4)
        assert np.array_equal(env.legal[0], trace["avail"][step].astype(bool))
        if step == len(trace["actions"]):
            break
        _, reward, *_ = env.step(trace["actions"][step][None])
        for tick in range(step * 8, min(step * 8 + 8, until)):
            ours, theirs = env.battles.ticks[0, tick - step * 8][order], trace["ticks"][tick]
            alive = ~np.isnan(theirs[:, 2])
            assert np.array_equal(ours[:, 2] > 0, alive)
            assert abs(ours - np.append(theirs, ours[:, 7:], axis=1))[alive][:, :2].max() < 1e-3
            assert np.array_equal(ours[alive, 2:4], theirs[alive, 2:4])  # hp, shield
            assert np.allclose(ours[alive, 4:6], theirs[alive, 4:6], atol=1e-9)  # cooldown, energy
            assert np.array_equal(place[ours[alive, 6].astype(int)], theirs[alive, 6])  # target
            compared += 1
        if step * 8 + 8 <= until:
            assert abs(reward[0, 0] - trace["reward"][step]) < 1e-5
    assert compared == until


@reference
@pytest.mark.parametrize("name", trace_names())
def test_scripted_teams_choose_what_the_recorded_ones_chose(name):
    trace = np.load(TRACES / f"{name}.npz")
    map_name, team = name.rsplit("_", 1)
    actions = np.zeros_like(trace["actions"])
    steps = len(actions)
    legal = trace["avail"][:steps].astype(bool)
    layout = envs.make(f"smac-{map_name}").layout
    act_rows(layout, TEAMS.index(team), trace["state"][:steps], legal, actions, np.zeros(steps, np.uint64))
    assert np.array_equal(actions, trace["actions"])


def play(env_id, team, episodes, seed=1):
    """Returns, lengths and wins of the first episodes of each row."""
    env = envs.make(env_id, num_envs=100, seed=seed)
    policy, left = make_team(team, env, seed), np.full(100, episodes // 100)
    returns, lengths, wins = [], [], []
    while left.any():
        info = env.step(policy())[4]
        ended = info["done"] & (left > 0)
        returns.append(info["episode_return"][ended, 0])
        lengths.append(info["episode_length"][ended])
        wins.append(info["battle_won"][ended])
        left[ended] -= 1
    return np.concatenate(returns), np.concatenate(lengths), np.concatenate(wins)


STATED = {  # 100 episodes of random play in the reference, as stated with the rules: return, length
    "3m": (1.50, 26),
    "8m": (2.13, 35),
    "2s3z": (4.00, 44),
    "3s5z": (4.13, 47),
    "10m_vs_11m": (2.04, 34),
    "MMM2": (1.92, 46),
    "corridor": (2.78, 32),
}
# 100 episodes know a mean length to some 10 % (95 %; the standard deviation is 20). Where ours is further than 5 %
# from the stated one, 400 episodes of the package itself decide: return 2.033 +- 0.048, length 36.5 +- 1.9
# (docs/results/battles.md).
MEASURED = {"10m_vs_11m": (2.033, 36.5)}


@pytest.mark.parametrize("name", STATED)
def test_random_play_earns_what_it_earns_in_the_reference(name):
    returns, lengths, wins = play(f"smac-{name}", "random", 400)
    earned, length = MEASURED.get(name, STATED[name])
    assert len(returns) == 400
    assert abs(returns.mean() / earned - 1) < 0.05
    assert abs(lengths.mean() / length - 1) < 0.05
    assert wins.mean() < 0.05


NEAREST_WINS = {"3m": True, "2s3z": True, "corridor": True, "8m": False, "MMM2": False}


@pytest.mark.parametrize(("name", "wins"), NEAREST_WINS.items())
def test_nearest_wins_where_it_wins_in_the_reference(name, wins):
    assert play(f"smac-{name}", "nearest", 100)[2].mean() == float(wins)


def record(name, team, steps):
    env_id = f"smac-{name}"
    env = BattleEnv(env_id, battles.load(env_id), num_envs=2, seed=3, record=True)
    policy, rows = make_team(team, env, seed=3), []
    for _ in range(steps):
        actions = policy().copy()
        _, reward, *_ = env.step(actions)
        ticks = env.battles.ticks[:, 7, :, :7]
        rows.append((actions, ticks.copy(), reward[:, 0].copy(), env.legal.copy(), env.obs.copy()))
    actions, ticks, reward, legal, obs = (np.stack(column) for column in zip(*rows, strict=True))
    return {
        "actions": actions.astype(np.int8),  # (T, 2, N)
        "ticks": ticks.astype(np.float32),  # (T, 2, U, 7): the last tick of each step
        "reward": reward,  # (T, 2)
        "legal": np.packbits(legal),
        "obs_sums": obs.sum(axis=3),  # (T, 2, N)
        "final_state": env.state.copy(),  # (2, S)
    }


@pytest.mark.parametrize(("name", "team", "steps"), RECORDED_FIGHTS)
def test_golden_fights(name, team, steps):
    """Our own recordings: a change of any rule shows here first."""
    golden, now = np.load(GOLDEN / f"{name}_{team}.npz"), record(name, team, steps)
    assert set(golden.files) == set(now)
    for key in golden.files:
        assert np.allclose(golden[key], now[key], atol=1e-4, equal_nan=True), key


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for fight in RECORDED_FIGHTS:
        np.savez_compressed(GOLDEN / f"{fight[0]}_{fight[1]}.npz", **record(*fight))
