"""The example of docs/adding_a_game.md is a whole game: one file, and every face of the package works with it."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest

import envs
from envs.grid import GridGame
from envs.players import RulePlayers, names, zoo_policy
from envs.render import View, ansi, picture

ROOT = Path(__file__).resolve().parent.parent
GUIDE = (ROOT / "docs" / "adding_a_game.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
PICK, WATER, STAY = 5, 6, 4


@pytest.fixture(scope="module", autouse=True)
def orchard(tmp_path_factory):
    """The guide's game as a module of its own, with its compiled code outside the repository."""
    folder = tmp_path_factory.mktemp("orchard")
    path = folder / "orchard.py"
    path.write_text(BLOCKS[0])
    known, cache = dict(GridGame.registry), numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder / "cache")
    try:
        spec = importlib.util.spec_from_file_location("orchard", path)
        module = sys.modules["orchard"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        numba.config.CACHE_DIR = cache
    yield module
    GridGame.registry.clear()
    GridGame.registry.update(known)
    del sys.modules["orchard"]


def state_of(game, players, items, t=0):
    """A state row: players' cells, items as {cell: kind}."""
    row = np.zeros(game.state_size, np.int16)
    row[:2] = t, game.config.horizon
    row[2 : 2 + game.num_players] = players
    for cell, kind in items.items():
        row[2 + game.num_players + cell] = 2 + kind
    return row


def test_rules_by_hand():
    game = envs.game("orchard-5x5")
    state = state_of(game, [7, 7, 12, 0], {7: 0, 12: 1})
    out = game.simulate(state[None], np.array([[PICK, PICK, WATER, STAY]]))
    np.testing.assert_array_equal(out.reward[0], [1.0, 1.0, -1.0, 0.0])
    np.testing.assert_array_equal(out.taken[0], [1, 1, 2, 0])
    np.testing.assert_array_equal(out.states[0], state_of(game, [7, 7, 12, 0], {7: 1, 12: 0}, t=1))
    assert not out.terminated.any() and not out.truncated.any()
    # the picked tree is bare: PICK there is illegal now
    again = game.simulate(out.states, np.array([[PICK, STAY, PICK, STAY]]))
    assert again.illegal[0] == 1
    np.testing.assert_array_equal(again.reward[0], [0.0, 0.0, 2.0, 0.0])


def test_batched_env_plays_whole_episodes():
    env = envs.make("orchard-8x8", num_envs=32, seed=3, max_block_comp=2)
    players = RulePlayers(env.game, ["picker", "waterer", "mix", "random"], 32, seed=3)
    assert env.obs.shape == (32, 4, 8, 8, 7)
    assert env.spec.action_names[5:] == ("PICK", "WATER")
    done, earned = 0, np.zeros(4)
    for _ in range(130):
        _, reward, terminated, truncated, info = env.step(players.act(env.obs, env.legal, env.t))
        np.testing.assert_array_equal(truncated, np.repeat(info["done"][:, None], 4, axis=1))
        assert not terminated.any() and not info["illegal_actions"].any()
        assert ((env.states[:, 6:] >= 2).sum(axis=1) == 12).all()  # no tree is ever lost
        done += info["done"].sum()
        earned += reward.sum(axis=0)
    assert done == 64
    assert earned[0] > 0 > earned[1]


def test_pettingzoo_face_and_policies():
    env = envs.parallel_env("orchard-5x5", render_mode="rgb_array")
    policies = {agent: zoo_policy("picker", env, seed=k) for k, agent in enumerate(env.possible_agents)}
    observations, _ = env.reset(seed=1)
    steps = 0
    while env.agents:
        actions = {agent: policies[agent](observations[agent]) for agent in env.agents}
        observations, _, _, truncations, _ = env.step(actions)
        steps += 1
    assert steps == 30 and all(truncations.values())
    assert env.returns.sum() == pytest.approx(2.0 * 4)  # the pickers took the four apples and watered nothing
    assert env.render().dtype == np.uint8


def test_pictures_and_text():
    game = envs.game("orchard-5x5")
    assert names(game) == ("random", "picker", "waterer", "fix", "mix")
    view = View.of(game, state_of(game, [0, 6, 6, 24], {3: 0, 6: 1}), np.zeros(4), np.zeros(4, np.int8))
    assert ansi(view).splitlines()[2:4] == ["| 1   .   .   A   .   |", "| .   B23 .   .   .   |"]
    without_apple = View.of(game, state_of(game, [0, 6, 6, 24], {6: 1}), np.zeros(4), [0] * 4)
    assert (picture(view) != picture(without_apple)).any()


def test_registering_a_drawing_changes_the_picture():
    from envs import render

    game = envs.game("orchard-5x5")
    view = View.of(game, state_of(game, [0, 6, 6, 24], {3: 0}), np.zeros(4), [0] * 4)
    before, known = picture(view), dict(render.DRAWINGS)
    exec(BLOCKS[1], {})
    try:
        assert (picture(view) != before).any()
    finally:
        render.DRAWINGS.clear()
        render.DRAWINGS.update(known)


def test_a_wrong_setting_is_one_sentence():
    with pytest.raises(envs.ConfigError, match="rewards must be finite"):
        envs.make("orchard-5x5", apple_reward=float("inf"))
    with pytest.raises(envs.ConfigError, match=r"its settings are .*num_bare_trees"):
        envs.make("orchard-5x5", apples=3)


@pytest.mark.slow
def test_dropping_the_file_into_the_folder_is_enough(tmp_path):
    """A copy of the package with one more file, in a new process."""
    shutil.copytree(ROOT / "envs", tmp_path / "envs", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "envs" / "games" / "orchard.py").write_text(BLOCKS[0])
    command = [sys.executable, "-m", "envs.play", "--env-id", "orchard-5x5", "--episodes", "2", "--gif", "orchard.gif"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr
    assert "means of 2 episodes of orchard-5x5" in done.stdout
    assert (tmp_path / "orchard.gif").stat().st_size > 10_000
