"""What people look at: text, pictures, GIFs, `python -m envs.play`, and the figures and samples of docs/games.md."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import envs
from envs import play, render
from envs.grid import GridGame
from envs.players import RulePlayers
from envs.render import View, ansi, picture

ROOT = Path(__file__).resolve().parent.parent
STAG, HARE = 2, 3  # codes of cells
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def hunt_state(game, players, things, t=3):
    """A state row: players' cells, {cell: code}."""
    row = np.zeros(game.state_size, np.int16)
    row[:2] = t, game.config.horizon
    row[2 : 2 + game.num_players] = players
    for cell, code in things.items():
        row[2 + game.num_players + cell] = code
    return row


def view_of(game, row, **more):
    return View.of(game, row, np.zeros(game.num_players), np.zeros(game.num_players, np.int8), **more)


# text ----------------------------------------------------------------------------------------------------------------


def test_text_of_a_known_state():
    game = envs.game("msh-4h1s-4x4")
    row = hunt_state(game, [5, -1, 5, 15], {5: STAG, 2: HARE, 12: 1})
    view = View.of(game, row, [0, 1, 0, 0], [0, 2, 0, 0], rewards=[0, 1, 0, 0], labels=["ns", "nh", "ns", "random"])
    assert ansi(view) == "\n".join(
        [
            "msh-4h1s-4x4   step 3 of 35",
            "+-----------------+",
            "| .   .   H   .   |",
            "| .   S13 .   .   |",
            "| .   .   .   .   |",
            "| #   .   .   4   |",
            "+-----------------+",
            "player 1 ns         0.0",
            "player 2 nh        +1.0  hare +1.0, left",
            "player 3 ns         0.0",
            "player 4 random     0.0",
        ]
    )


def test_text_with_colours_says_the_same():
    game = envs.game("msd-6x6", max_block_comp=2)
    view = view_of(game, game.draw(3, 1)[0])
    assert re.sub(r"\x1b\[\d+m", "", ansi(view, colour=True)) == ansi(view)
    assert ansi(view, colour=True) != ansi(view)


def test_endings():
    game = envs.game("msh-4h1s-4x4")
    assert view_of(game, hunt_state(game, [0, 1, 2, 3], {5: STAG})).ending == ""
    assert view_of(game, hunt_state(game, [0, 1, 2, 3], {5: STAG}, t=35)).ending == "time is up"
    assert view_of(game, hunt_state(game, [-1] * 4, {5: STAG})).ending == "everybody left"
    assert view_of(game, hunt_state(game, [0, -1, -1, -1], {})).ending == "no stag or hare is left"


def test_letters_never_repeat():
    assert render.letters(["stag", "hare"]) == ["S", "H"]
    assert render.letters(["stone", "stag", "s"]) == ["S", "T", "A"]


# pictures ------------------------------------------------------------------------------------------------------------


def changed_cells(game, one, other):
    """The cells of the board in which two pictures differ."""
    side, width = render.cell_size(game.config.height, game.config.width), game.config.width
    top = (one.shape[0] - game.config.height * side) // 2
    rows, columns = np.nonzero((one != other).any(axis=2))
    on_board = (columns >= render.MARGIN) & (columns < render.MARGIN + width * side)
    return set(((rows[on_board] - top) // side * width + (columns[on_board] - render.MARGIN) // side).tolist())


def test_a_move_changes_the_two_cells_it_concerns():
    game = envs.game("msh-4h1s-4x4")
    things = {10: STAG, 2: HARE}
    before = picture(view_of(game, hunt_state(game, [5, 0, 15, 15], things)))
    after = picture(view_of(game, hunt_state(game, [6, 0, 15, 15], things)))
    assert before.dtype == np.uint8 and before.ndim == 3 and before.shape[2] == 3
    assert changed_cells(game, before, after) == {5, 6}


@pytest.mark.parametrize("on", [0, STAG, HARE])
def test_everybody_in_a_crowded_cell_can_be_seen(on):
    """Each player's colour is in the cell, and goes with the player, with or without an item there."""
    game = envs.game("msh-4h1s-4x4")
    side = render.cell_size(4, 4)
    for absent in range(4):
        players = [5] * 4
        players[absent] = 0
        image = picture(view_of(game, hunt_state(game, players, {5: on, 15: STAG})))
        top = (image.shape[0] - 4 * side) // 2 + side
        cell = image[top : top + side, render.MARGIN + side : render.MARGIN + 2 * side]
        for player in range(4):
            colour = tuple(int(render.player_colour(player)[k : k + 2], 16) for k in (1, 3, 5))
            pixels = (cell == colour).all(axis=2).sum()
            assert (pixels > 60) == (player != absent)


def test_each_thing_looks_different():
    game = envs.game("msh-4h1s-4x4")
    looks = [picture(view_of(game, hunt_state(game, [0, 0, 0, 0], {9: code, 15: STAG}))) for code in (0, 1, STAG, HARE)]
    for k, one in enumerate(looks):
        assert all(changed_cells(game, one, other) == {9} for other in looks[:k])


def test_a_hunt_is_shown_where_it_happened():
    game = envs.game("msh-4h1s-4x4")
    before = hunt_state(game, [5, 5, 0, 15], {5: STAG, 2: HARE})
    out = game.simulate(before[None], np.array([[5, 5, 4, 4]]))
    arguments = (game, out.states[0], out.reward[0], out.taken[0])
    plain, shown = picture(View.of(*arguments)), picture(View.of(*arguments, out.reward[0], before))
    assert changed_cells(game, plain, shown) == {5}
    assert View.of(*arguments, out.reward[0]).fate(0) == "stag +5.0, left"


@pytest.mark.parametrize(("height", "width", "players"), [(1, 1, 1), (1, 7, 2), (3, 2, 4), (8, 8, 4), (20, 20, 12)])
def test_any_size_gives_a_picture(height, width, players):
    game = envs.game("msh-4h1s-4x4", height=height, width=width, num_players=players, num_stags=0, num_hares=1,
                     hunters_needed=1)  # fmt: skip
    image = picture(view_of(game, game.draw(1, 1)[0]))
    assert image.shape[0] % 2 == 0 and image.shape[1] % 2 == 0
    assert 200 <= image.shape[0] <= 1000 and 400 <= image.shape[1] <= 1000


def test_render_modes_of_the_pettingzoo_game():
    for mode, kind in (("ansi", str), ("rgb_array", np.ndarray)):
        env = envs.parallel_env("msd-4x4", render_mode=mode)
        env.reset(seed=1)
        first = env.render()
        env.step({agent: 4 for agent in env.agents})
        assert isinstance(first, kind)
        assert not np.array_equal(first, env.render())  # at least the step counter


def test_gif_has_all_frames_and_lingers_at_the_end(tmp_path):
    frames = [np.full((40, 60, 3), 40 * k, np.uint8) for k in range(6)]
    render.write_gif(tmp_path / "six.gif", frames, fps=5, pauses=[2])
    with Image.open(tmp_path / "six.gif") as gif:
        assert gif.n_frames == 6 and gif.size == (60, 40)
        durations = []
        for k in range(6):
            gif.seek(k)
            durations.append(gif.info["duration"])
            shown = np.asarray(gif.convert("RGB")).astype(int)
            assert abs(shown - 40 * k).max() <= 8
    assert durations == [200, 200, 1500, 200, 200, 1500]
    assert os.listdir(tmp_path) == ["six.gif"]


def test_a_gif_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "old.gif"
    path.write_bytes(b"old")

    def fail(*_):
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        render.write_gif(path, [np.zeros((4, 4, 3), np.uint8)], fps=5)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["old.gif"]


# play ----------------------------------------------------------------------------------------------------------------


def env_returns(env_id, roles, seed, episodes, **overrides):
    """(E, N) the first returns of row 0 of the batched env, and (N, kinds) what was taken per episode."""
    env = envs.make(env_id, num_envs=1, seed=seed, **overrides)
    players = RulePlayers(env.game, roles, 1, seed)
    returns, took = [], np.zeros((len(roles), len(env.game.kinds)))
    while len(returns) < episodes:
        *_, info = env.step(players.act(env.obs, env.legal, env.t))
        took += info["taken"][0][:, None] == np.arange(1, 1 + len(env.game.kinds))
        if info["done"][0]:
            returns.append(info["episode_return"][0].copy())
    return np.array(returns), took / episodes


@pytest.mark.parametrize(
    ("env_id", "roles", "overrides"),
    [("msh-4h1s-4x4", "ns,ns,nh,random", {}), ("msd-4x4", "nd,mix,fix,random", {"max_block_comp": 1})],
)
def test_printed_returns_are_the_envs(capsys, env_id, roles, overrides):
    settings = [text for name, value in overrides.items() for text in ("--set", f"{name}={value}")]
    play.run(["--env-id", env_id, "--roles", roles, "--episodes", "5", "--seed", "7", "--quiet", *settings])
    lines = capsys.readouterr().out.splitlines()
    returns, took = env_returns(env_id, roles.split(","), 7, 5, **overrides)
    printed = [[float(x) for x in re.search(r"returns (.*);", line)[1].split()] for line in lines[:5]]
    np.testing.assert_allclose(printed, returns, atol=0.006)
    table = [line.split()[3:] for line in lines if line.startswith("player")]
    np.testing.assert_allclose(np.array(table, float)[:, 0], returns.mean(axis=0), atol=0.0006)
    np.testing.assert_allclose(np.array(table, float)[:, 1:], took, atol=0.0006)


def test_boards_and_gif(capsys, tmp_path):
    path = tmp_path / "hunt.gif"
    play.run(["--roles", "ns,ns,nh,random", "--episodes", "2", "--gif", str(path), "--fps", "4"])
    text = capsys.readouterr().out
    boards = text.count("msh-4h1s-4x4   step")
    assert boards == text.count(" of 35\n") + text.count(" of 35: ")
    with Image.open(path) as gif:
        assert gif.n_frames == boards
    assert f"({boards} frames)" in text and "stag +5.0, left" in text


def test_default_roles_know_the_game():
    for env_id in GridGame.registry:
        for num_players in (2, 4, 5):
            game = envs.game(env_id, num_players=num_players)
            assert play.parse_roles(game, "") == play.default_roles(game)
    assert play.default_roles(envs.game("msh-4h1s-4x4")) == ["ns", "ns", "nh", "random"]


def run_play(*arguments, text=None):
    command = [sys.executable, "-m", "envs.play", *arguments]
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, input=text, capture_output=True, text=True, timeout=300)


def test_a_person_plays_by_a_pipe():
    """Keys, names and numbers work; what is illegal or no action is asked again; the pipe's end stops the game."""
    done = run_play("--roles", "human,fix,fix,fix", "--seed", "3", text="w\njump\nup\n4\n \nh\n")
    assert done.returncode == 0, done.stderr
    assert "'jump' is no action; legal are" in done.stdout
    assert "there is nothing to take on your cell" in done.stdout
    assert "step 4 of 35" in done.stdout and "step 5 of 35" not in done.stdout
    assert "stopped after 0 whole episodes" in done.stdout
    assert done.stderr == ""


def test_a_person_hunts_a_hare_and_quits(monkeypatch, capsys):
    """The first legal way to a hare, typed in; after it left, the others play on without asking it."""
    game = envs.game("msh-4h1s-4x4", num_hares=16, num_stags=0)
    assert game.num_players == 4
    answers = iter(["hare", "q"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(answers))
    play.run(["--roles", "human,nh,nh,nh", "--set", "num_hares=16", "--set", "num_stags=0"])
    text = capsys.readouterr().out
    assert "episode 1: 1 steps, everybody left" in text
    assert "stopped after 1 whole episodes" in text and "means of 1 episodes" in text


def test_understanding_what_was_typed():
    actions = envs.game("msh-4h1s-4x4").action_names
    legal = np.array([1, 0, 0, 1, 1, 0, 1], bool)
    meant = {"w": 0, "UP": 0, "0": 0, " d ": 3, "right": 3, " ": 4, "   ": 4, "stay": 4, "h": 6, "hare": 6, "6": 6}
    for text, action in meant.items():
        assert play.understand(text, actions, legal) == action
    wrong = {"s": "DOWN is illegal", "5": "STAG is illegal", "": "is no action", "77": "is no action"}
    for text, sentence in wrong.items():
        assert sentence in play.understand(text, actions, legal)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--env-id", "msh"], "unknown env id 'msh'; valid ids are msd-4x4"),
        (["--roles", "ns,ns,ns,bold"], "unknown role 'bold'; valid are human, random, ns"),
        (["--roles", "ns,ns"], "msh-4h1s-4x4 has 4 players, not the 2 of 'ns,ns'"),
        (["--set", "stags=3"], "has no setting 'stags'; its settings are"),
        (["--set", "num_stags"], "--set needs name=value, not 'num_stags'"),
        (["--set", "num_stags=many"], "must be int, not 'many'"),
        (["--set", "num_hares=50"], "do not fit on 16 cells"),
        (["--episodes", "0"], "--episodes must be a whole number from 1 to 1000000000, not 0"),
        (["--episodes", "many"], "--episodes"),
        (["--seed", "-1"], "--seed must be a whole number from 0 to 1000000000, not -1"),
        (["--fps", "0"], "--fps must be above 0"),
        (["--gif", "nowhere/hunt.gif"], "there is no folder 'nowhere'"),
        (["--gif", "hunt.png"], "ending in .gif, not 'hunt.png'"),
        (["--bold"], "--bold"),
        (["--env-id", "smac-3m", "--roles", "ns"], "a battle takes --policy"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(monkeypatch, capsys, arguments, sentence):
    monkeypatch.setattr(sys, "argv", ["play", *arguments])
    with pytest.raises(SystemExit) as end:
        play.main()
    said = capsys.readouterr()
    assert end.value.code == 2 and said.out == ""
    assert said.err.count("\n") == 1 and sentence in said.err


def test_bad_input_in_a_process_of_its_own():
    done = run_play("--roles", "ns,ns,ns,bold")
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1


# docs/games.md -------------------------------------------------------------------------------------------------------

GUIDE = (ROOT / "docs" / "games.md").read_text()


@pytest.mark.parametrize("sample", re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL))
def test_samples_of_the_guide_run(sample, capsys):
    exec(compile(sample, "docs/games.md", "exec"), {"__name__": "sample"})


def test_the_guide_has_every_setting_with_its_default():
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", GUIDE, re.MULTILINE))
    for env_id in ("msh-4h1s-4x4", "msd-4x4"):
        config = GridGame.registry[env_id].Config
        for field in dataclasses.fields(config):
            assert rows.get(field.name) == str(field.default), field.name
    known = {field.name for game in GridGame.registry.values() for field in dataclasses.fields(game.Config)}
    assert set(rows) <= known


def test_the_guide_has_every_id_with_its_sizes():
    for env_id, game in GridGame.registry.items():
        if game.__module__.startswith("envs.games."):
            config = envs.game(env_id).config
            row = next(line for line in GUIDE.splitlines() if line.startswith(f"| `{env_id}` |"))
            assert f"| {config.height} x {config.width} | {config.num_players} |" in row
            assert row.endswith(f"| {config.horizon} |")
