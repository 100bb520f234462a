"""Players of the user's own (FILE.py:CLASS): they sit in every script, survive a kill, and fail in one line."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_run import ROOT, arguments

import envs
from envs import checkpoints, folders, play
from envs.roles import Seats, play_episodes
from envs.run import load_script, main

GUIDE = (ROOT / "docs" / "games.md").read_text()
SAMPLE = re.search(r"```python\n(# my_players.py\n.*?)```", GUIDE, re.S)[1]


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "my_players.py"
    path.write_text(SAMPLE)
    return path


def test_the_sample_of_the_guide_plays_as_it_says(file):
    """`Sleeper` stays until somebody took something; `Hasty` takes what it stands on and never stays."""
    env = envs.make("msh-4h1s-4x4", num_envs=50, seed=1)
    seats = Seats(env, [f"{file}:Sleeper", f"{file}:Hasty", "nh", f"{file}:Hasty"], None, 3)
    hunted = np.zeros(50, bool)
    for _ in range(60):
        actions, alive = seats.act(), env.alive.copy()
        assert (actions[~hunted, 0] == 4).all()
        assert (actions[:, [1, 3]][alive[:, [1, 3]]] != 4).all()
        info = env.step(actions)[4]
        assert not info["illegal_actions"].any()
        seats.watch(actions, info)
        hunted = (hunted | (info["taken"] > 0).any(1)) & ~info["done"]
    assert hunted.any() and not hunted.all()


def test_what_they_keep_survives_a_kill(file):
    """Through the bytes of a checkpoint, in the middle of an episode; the players draw from generators of their own."""
    file.write_text(
        SAMPLE + "\n\nclass Counter:\n    def __init__(self, seat):\n        self.count, self.share = seat, 0.5\n\n"
        "    def act_one(self, legal, t, rng):\n        self.count += 1\n        self.share *= 0.9\n"
        "        allowed = np.flatnonzero(legal)\n        return allowed[self.count % len(allowed)]\n"
    )
    roles = [f"{file}:Sleeper", f"{file}:Hasty", "tft", f"{file}:Counter"]

    def make():
        env = envs.make("msh-4h1s-4x4", num_envs=6, seed=1)
        return env, Seats(env, roles, None, 3)

    def step(env, seats):
        actions = seats.act()
        seats.watch(actions, env.step(actions)[4])
        return actions

    (env, seats), (other_env, others) = make(), make()
    for _ in range(23):
        step(env, seats)
    checkpoints.unpack(other_env, checkpoints.pack(env), Path("x"), "env")
    checkpoints.unpack(others, checkpoints.pack(seats), Path("x"), "seats")
    assert others.policies[3].players[2].count > 3 and type(others.policies[3].players[2].count) is int
    for _ in range(50):
        np.testing.assert_array_equal(step(env, seats), step(other_env, others))


def test_they_see_copies_and_what_happened(tmp_path):
    """Writing into what it is given changes no game; rewards and ends are those of the env."""
    file = tmp_path / "vandal.py"
    file.write_text(
        "import numpy as np\n\n\nclass Vandal:\n    def __init__(self):\n"
        "        self.total, self.ends = np.zeros(4), 0\n\n    def act(self, obs, legal, t):\n"
        "        answer = legal.argmax(1)\n        obs[:], legal[:], t[:] = 0, 0, 9\n        return answer\n\n"
        "    def watch(self, reward, done, actions):\n        self.total += reward.sum(0)\n"
        "        self.ends += int(done.sum())\n        actions[:], done[:], reward[:] = 0, 0, 0\n"
    )
    env = envs.make("msh-4h1s-4x4", num_envs=20, seed=1)
    seats = Seats(env, ["ns", "ns", "nh", f"{file}:Vandal"], None, 3)
    played = play_episodes(env, seats)
    vandal = seats.policies[3].players[0]
    assert vandal.ends >= 20 and (vandal.total[:3] >= played.returns.sum(0)[:3] - 1e-4).all()


BAD = {
    "shape": ("return np.zeros(3, int)", "act must return an array of 5 integers, one for each game, not an array of"),
    "type": ("return np.zeros(5)", "not an array of shape (5,) and type float64"),
    "single": ("return 4", "not 4; a player of one game at a time has act_one"),
    "nothing": ("pass", "must return an array of 5 integers, one for each game, not None"),
    "ragged": ("return [[1], [1, 2]]", "not [[1], [1, 2]]"),
    "illegal": ("return np.full(5, 5)", r"action 5 \(STAG\) is illegal in game \d at step 0; legal are"),
    "unknown": ("return np.full(5, 99)", "action 99 is illegal in game 0 at step 0; legal are"),
    "exit": ("raise SystemExit(0)", "act failed in line 5: SystemExit: 0"),
    "exception": ("raise ValueError('one\\ntwo')", "act failed in line 5: ValueError: one two"),
}


@pytest.mark.parametrize("what", BAD)
def test_wrong_answers_are_one_sentence(what, tmp_path):
    body, words = BAD[what]
    file = tmp_path / "bad.py"
    file.write_text(f"import numpy as np\n\nclass Bad:\n    def act(self, obs, legal, t, rng):\n        {body}\n")
    env = envs.make("msh-4h1s-4x4", num_envs=5, seed=1)
    with pytest.raises(envs.ConfigError) as caught:
        Seats(env, ["ns", "ns", f"{file}:Bad", "ns"], None, 3).act()
    text = str(caught.value)
    assert text.startswith(f"{file}:Bad: ") and "\n" not in text
    assert words in text or re.search(words, text), text


@pytest.mark.parametrize(
    ("role", "words"),
    [
        ("nowhere.py:Shy", "there is no file 'nowhere.py'"),
        ("{file}:Shy", "has no class 'Shy'; its classes are: Sleeper, Hasty"),
        ("{file}:np", "has no class 'np'"),
        ("{file}", "must be followed by a class, as FILE.py:CLASS; its classes are: Sleeper, Hasty"),
        ("{broken}:Shy", "cannot be loaded: SyntaxError"),
        ("{odd}:Empty", "Empty has neither act(self, obs, legal, t, rng) nor act_one"),
        ("{odd}:Greedy", "act asks for 'state', but is given obs, legal, t, rng"),
        ("{odd}:Needy", "Needy asks for 'lives', but is given game, seat, num_envs"),
        ("{odd}:Sad", "Sad failed in line 15: ValueError: no"),
        ("{odd}:Deaf", "watch_one asks for 'info', but is given actions, reward, taken, done"),
    ],
)
def test_wrong_files_are_one_sentence(role, words, file, tmp_path):
    broken, odd = tmp_path / "broken.py", tmp_path / "odd.py"
    broken.write_text("class Shy:\n    def act(self\n")
    odd.write_text(
        "class Empty:\n    pass\n\nclass Greedy:\n    def act(self, state):\n        pass\n\nclass Needy:\n"
        "    def __init__(self, lives):\n        pass\n    act = None\n    act_one = len\n\nclass Sad:\n"
        "    def __init__(self): raise ValueError('no')\n    act = print\n\nclass Deaf:\n"
        "    def act_one(self): return 4\n    def watch_one(self, info): pass\n"
    )
    role = role.format(file=file, broken=broken, odd=odd)
    env = envs.make("msh-4h1s-4x4", num_envs=2, seed=1)
    with pytest.raises(envs.ConfigError) as caught:
        seats = Seats(env, ["ns", role, "ns", "ns"], None, 3)
        actions = seats.act()
        seats.watch(actions, env.step(actions)[4])
    assert words in str(caught.value) and "\n" not in str(caught.value), str(caught.value)


def test_a_relative_path_is_meant_from_where_the_run_was_started(file, tmp_path, monkeypatch):
    assert folders.follow_path("my_players.py:Hasty", tmp_path) == f"{file}:Hasty"
    assert folders.follow_path("nowhere.py:Hasty", tmp_path) == "nowhere.py:Hasty"


@pytest.mark.parametrize(
    ("script", "own"), [("ppo_baseline.py", "ppo"), ("hopplus_mcts.py", "hop"), ("hopplus_nomcts.py", "hop")]
)
def test_they_play_in_every_script(script, own, file, tmp_path, capsys):
    module = load_script(ROOT / script)
    roles = f"{own},{file}:Sleeper,{file}:Hasty,{own}"
    argv = [*arguments(script), "--roles", roles, "--total-timesteps", "64", "--run-dir", str(tmp_path / "x")]
    assert main(module.Args, module.train, argv) == 0, capsys.readouterr().err
    assert (tmp_path / "x/result.json").is_file()


def test_they_play_in_evaluate_and_play(file, tmp_path, capsys):
    play.run(["--roles", f"{file}:Hasty,ns,ns,{file}:Sleeper", "--episodes", "3", "--quiet"])
    assert "Hasty" in capsys.readouterr().out
    command = [sys.executable, str(ROOT / "evaluate.py"), "--episodes", "50", "--roles"]
    done = subprocess.run([*command, "my_players.py:Hasty,ns,ns,ns"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "my_players.py:Hasty" in done.stdout, done.stderr
    done = subprocess.run([*command, "my_players.py:Nasty,ns,ns,ns"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "no class 'Nasty'" in done.stderr
