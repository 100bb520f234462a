"""The recorder and the replay page: what is recorded is what was thought and done, and what the page shows in a real
browser is what was recorded."""

import json
import os
import re
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from boards import ID, make_nets, read_metrics
from browser import Browser, find
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import envs
import evaluate
import hopplus_mcts
import hopplus_nomcts
import mappo_hyper
import ppo_baseline
import qmix
import train_world_model
from envs import play, replay, system
from envs.grid import GONE, PLAYERS
from envs.pool import mixed_team
from envs.roles import Seats, play_in_a_row
from envs.run import main
from envs.sight import Things
from envs.team import TeamGame

ROOT = Path(__file__).resolve().parent.parent
torch.set_num_threads(1)
needs_browser = pytest.mark.skipif(not find(), reason="no Chromium: apt-get install chromium")


# players with random weights, that explain themselves


def make_hop(script, env, seat: int, greedy: bool = False):
    more = {"trees": 2, "simulations": 6} if script is hopplus_mcts else {"perfect_model": True}
    args, nets = make_nets(script, env.game, "learned", **more)
    beliefs = script.Beliefs(args, env.game, nets["models"], env.num_envs, 1)
    return script.Policy(script.Planner(args, env.game, nets, beliefs), seat, 1, greedy)


def make_ppo(env, seat: int, greedy: bool = False):
    [agent] = ppo_baseline.make_agents(ppo_baseline.Args(), Things(env.game), env.spec.num_actions, 1)
    return ppo_baseline.Policy(agent, Things(env.game), seat, 1, greedy)


def make_team(script, env, seat: int | None = None, greedy: bool = False):
    game, args = TeamGame(env), script.Args(env_id=env.spec.env_id)
    if script is qmix:
        team = qmix.Team(qmix.Networks(args, game).agent, game, 1)
    else:
        generator = torch.Generator().manual_seed(1)
        team = mappo_hyper.Team(mappo_hyper.Agent(args, game, generator), game, generator, greedy)
    team.seat = seat
    return team


MINDS = {
    "mcts": lambda env, seat, greedy=False: make_hop(hopplus_mcts, env, seat, greedy),
    "nomcts": lambda env, seat, greedy=False: make_hop(hopplus_nomcts, env, seat, greedy),
    "ppo": make_ppo,
    "mappo": lambda env, seat, greedy=False: make_team(mappo_hyper, env, seat, greedy),
    "qmix": lambda env, seat, greedy=False: make_team(qmix, env, seat, greedy),
}


def record_minds(minds: dict[int, str], episodes: int = 1, greedy: bool = False, env_id: str = ID, **how):
    """A replay of these minds in their seats, among a seeker, `mix` and random players."""
    others = ("mix", envs.game(env_id).mix[0], "random", "mix")
    roles = ["mind" if seat in minds else role for seat, role in enumerate(others)]

    def seats(env):
        policies = {seat: MINDS[name](env, seat, greedy) for seat, name in minds.items()}
        return Seats(env, roles, "mind", 3, greedy, policies)

    return replay.record_grid(env_id, roles, episodes, 3, greedy, {}, seats, **how)


def record_team(script, env_id: str = "smac-2s3z", episodes: int = 1, wrap=lambda team: team, **settings):
    battle = envs.parallel_env(env_id, **settings)
    battle.reset(seed=3)
    found = replay.Replay(battle.env, ["team"] * battle.env.spec.num_players, 3)
    team = wrap(make_team(script, battle.env))
    for _ in replay.play_battle(battle, team, episodes, found):
        pass
    return found


# what is recorded


@pytest.mark.parametrize("name", MINDS)
def test_what_is_told_fits_what_is_done(name):
    """Probabilities add up to 1 over the legal actions, what is most probable is done by who plays greedily, and the
    boards are those of the game."""
    found = record_minds({1: name}, greedy=True)
    [episode], game = found.data["episodes"], found.env.game
    frames, board = episode["frames"], episode["frames"][0]["board"]
    for frame, after, step in zip(frames, frames[1:], episode["steps"], strict=False):
        board = frame.get("board", board)
        state = np.array([[0, game.config.horizon, *frame["cells"], *board]], np.int16)
        out = game.simulate(state, np.array([step["actions"]]))
        assert out.states[0, PLAYERS : PLAYERS + 4].tolist() == after["cells"]
        np.testing.assert_allclose(out.reward[0], step["rewards"], atol=1e-3)
        assert step["taken"] == out.taken[0].tolist() and step["thoughts"].keys() <= {"1"}
        mind = step["thoughts"].get("1")
        assert (mind is not None) == (frame["cells"][1] != GONE)
        if mind is None:
            continue
        legal = step["legal"][1]
        chosen = step["actions"][1]
        best = mind.get("policy", mind.get("q_values"))
        assert best[legal.index(chosen)] == max(best)
        if "policy" in mind:
            assert len(mind["policy"]) == len(legal) and sum(mind["policy"]) == pytest.approx(1, abs=0.006)
        if "belief" not in mind:
            continue
        for j in range(4):
            here = j != 1 and frame["cells"][j] != GONE
            assert (mind["belief"][j] is not None) == (mind["predicted"][j] is not None) == here
            if here:
                assert len(mind["belief"][j]) == len(episode["goals"]["1"])
                assert sum(mind["belief"][j]) == pytest.approx(1, abs=0.006)
                assert sum(mind["predicted"][j]) == pytest.approx(1, abs=0.006)
        assert sum(mind.get("visits", [12])) == 12  # 2 trees of 6 simulations
        for ahead in mind.get("imagined", ()):  # the world is the rules here
            likely = zip(step["legal"], mind["predicted"], strict=True)
            joint = [allowed[int(np.argmax(probs))] if probs else 4 for allowed, probs in likely]
            joint[1] = ahead["action"]
            assert ahead["cells"] == game.simulate(state, np.array([joint])).states[0, PLAYERS : PLAYERS + 4].tolist()
    assert episode["ending"] and [part for part in episode["roles"] if part == "mix"] == []
    for role, kind in zip(episode["roles"], episode["seeks"], strict=True):
        assert kind == (game.seekers[role][0] if role in game.seekers else None)


def test_to_be_recorded_changes_nothing():
    """The same players earn the same, whether somebody asks what they think or not."""
    kinds = {0: "mcts", 1: "nomcts", 2: "ppo", 3: "mappo"}
    found = record_minds(kinds, episodes=2)
    env = envs.make(ID, num_envs=1, seed=3)
    policies = {seat: MINDS[name](env, seat) for seat, name in kinds.items()}
    returns = play_in_a_row(env, Seats(env, ["mind"] * 4, "mind", 3, False, policies), 2)
    np.testing.assert_allclose(found.returns()[:, 0], returns[0], atol=0.01)


@pytest.mark.parametrize("name", ["mcts", "nomcts"])
def test_beliefs_are_those_before_the_step(name, monkeypatch):
    """What is recorded is what was believed when the player acted, not what it learned from the step."""
    script, held = {"mcts": hopplus_mcts, "nomcts": hopplus_nomcts}[name], []
    act = script.Policy.act

    def watched(policy, env):
        actions = act(policy, env)
        held.append(policy.beliefs.belief[0].copy())
        return actions

    monkeypatch.setattr(script.Policy, "act", watched)
    [episode] = record_minds({0: name}).data["episodes"]
    told = [step["thoughts"]["0"]["belief"] for step in episode["steps"] if "0" in step["thoughts"]]
    assert len(told) > 1
    for belief, recorded in zip(held, told, strict=False):
        for j in (1, 2, 3):
            if recorded[j] is not None:
                np.testing.assert_allclose(recorded[j], belief[j], atol=6e-4)


def test_beliefs_carry_over_to_the_next_episode():
    """In a row means: one memory. The first belief of the second episode is not that of the first."""
    first, second = record_minds({0: "mcts"}, episodes=2).data["episodes"]
    kinds = [[sum(b for b, goal in zip(ep["steps"][0]["thoughts"]["0"]["belief"][2], ep["goals"]["0"], strict=True)
                  if goal.get("kind") == kind) for kind in (0, 1)] for ep in (first, second)]  # fmt: skip
    assert abs(np.array(kinds[0]) - kinds[1]).max() > 0.01


@cache
def small_world() -> str:
    import tempfile

    args = train_world_model.Args(out_dir=tempfile.mkdtemp(), num_transitions=400, epochs=1, hidden_size=16)
    return str(train_world_model.train(args))


def test_a_world_model_foretells_each_player_where_it_can_be():
    """Every player's mass lies on its own cell and the four beside it, whoever looks; items only where they were."""
    found = record_minds({}, world=evaluate.world_of(small_world()))
    game, [episode] = found.env.game, found.data["episodes"]
    board = episode["frames"][0]["board"]
    for frame, step in zip(episode["frames"], episode["steps"], strict=False):
        board = frame.get("board", board)
        assert len(step["world"]["rewards"]) == 4 and 0 <= step["world"]["end"] <= 1
        mass = np.zeros(4)
        for plane, cell, value in step["world"]["planes"]:
            if plane < 4:
                assert cell in (frame["cells"][plane], *game.grid.neighbours[frame["cells"][plane]])
                mass[plane] += value
            else:
                assert board[cell] == 2 + plane - 4
        for j in range(4):  # who stands on no item cannot vanish
            if frame["cells"][j] != GONE and board[frame["cells"][j]] < 2:
                assert mass[j] == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("script", [mappo_hyper, qmix], ids=["mappo", "qmix"])
def test_a_battle_is_recorded_as_it_was(script):
    found = record_team(script)
    [episode], data = found.data["episodes"], found.data
    assert [unit["enemy"] for unit in data["units"]] == [False] * 5 + [True] * 5
    assert {unit["letter"] for unit in data["units"]} == {"S", "Z"}
    health = np.array([frame["units"] for frame in episode["frames"]])[:, :, 2]
    total = sum(step["rewards"][0] for step in episode["steps"])
    assert total == pytest.approx(float(found.env.info["episode_return"][0, 0]), abs=0.05)
    fired = set()
    for t, step in enumerate(episode["steps"]):
        assert {int(seat) for seat in step["thoughts"]} == set(np.flatnonzero(health[t, :5] > 0))
        fired |= {unit for unit, _ in step["shots"]}
        assert all(data["units"][u]["enemy"] != data["units"][v]["enemy"] for u, v in step["shots"])
        for seat, mind in step["thoughts"].items():
            assert step["actions"][int(seat)] in step["legal"][int(seat)]
            if script is mappo_hyper:
                assert sum(mind["policy"]) == pytest.approx(1, abs=0.01) and mind["weight_change"] > 0
                assert sum(mind["attention"]) == pytest.approx(1, abs=0.006)
                assert all(mind["attention"][k] == 0 for k in np.flatnonzero(health[t, :5] <= 0))
            else:
                assert len(mind["q_values"]) == len(step["legal"][int(seat)])
    assert fired & set(range(5)) and fired & set(range(5, 10))


def with_subgoals(team, name: str = "subgoal_state"):
    """A team as OMG would be: its subgoal is the present state, or what the agent sees, decoded without error."""

    def explain(row=0):
        env = team.game.env
        return team.explain(row) | {name: env.obs[row] if name == "subgoal_obs" else np.tile(env.state[row], (5, 1))}

    return SimpleNamespace(act=team.act, watch=team.watch, explain=explain)


@pytest.mark.parametrize("name", ["subgoal_state", "subgoal_obs"])
def test_a_decoded_subgoal_is_shown_as_units(name):
    """Decoded from the present itself, the subgoal must be where the units are, as far as they live and are seen."""
    [episode] = record_team(qmix, wrap=lambda team: with_subgoals(team, name)).data["episodes"]
    seen = 0
    for frame, step in zip(episode["frames"], episode["steps"], strict=False):
        for mind in step["thoughts"].values():
            for unit, ghost in zip(frame["units"], mind["subgoal"], strict=True):
                if unit[2] > 3 and ghost is not None and ghost[2] > 3:
                    np.testing.assert_allclose(ghost, unit, atol=0.05)
                    seen += 1
    assert seen > 100


def keys_of(part) -> set[str]:
    """All names in a JSON, but seats (numbers)."""
    if isinstance(part, list):
        return set().union(*(keys_of(x) for x in part[:40])) if part else set()
    if not isinstance(part, dict):
        return set()
    return {name for name in part if not name.isdigit()} | set().union(*(keys_of(x) for x in part.values()), set())


def test_every_entry_is_in_the_guide():
    guide = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "replay.md").read_text()))
    worlds = record_minds({0: "mcts", 1: "nomcts"}, world=evaluate.world_of(small_world())).data
    battles = record_team(mappo_hyper, wrap=with_subgoals).data
    known = keys_of({k: x for k, x in worlds.items() if k != "settings"} | {"settings": {}})
    known |= keys_of({k: x for k, x in battles.items() if k != "settings"})
    assert known - guide == set()
    told = (ROOT / "envs" / "roles.py").read_text()
    for name in (*replay.OF_ACTIONS, *replay.NEVER_SHOWN):
        assert f"`{name}`" in told, name


def test_files_asked_for(tmp_path, capsys):
    page, figures = tmp_path / "a.html", tmp_path / "a.json"
    args = {"roles": "ns,nh,mix,random", "replay": str(page), "replay_json": str(figures)}
    evaluate.main(evaluate.Args(episodes=3, **args))
    data = json.loads(figures.read_text())
    assert len(data["episodes"]) == 3 and data["version"] == replay.VERSION and "0.0" in capsys.readouterr().out
    assert json.loads(re.search(r'id="replay">(.*?)</script>', page.read_text(), re.S)[1]) == data
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page.read_text())  # nothing comes from the network
    assert sorted(os.listdir(tmp_path)) == ["a.html", "a.json"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--replay", "no/such/a.html"], "--replay no/such/a.html: there is no folder"),
        (["--replay", "a.gif"], "--replay a.gif must end in .html"),
        (["--replay-json", "a.html"], "--replay-json a.html must end in .json"),
        (["--world-model", "x"], "give --replay or --replay-json"),
        (["--replay", "a.html", "--world-model", "no/such"], "no/such"),
        (["--replay", "a.html", "--env-id", "smac-3m", "--roles", "hold", "--world-model", "x"], "is for grid games"),
        (["--replay", "a.html", "--roles", "ns,ns"], "roles must name all 4 players"),
    ],
)
def test_bad_input_is_one_sentence(flags, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(envs.ConfigError) as caught:
        evaluate.main(evaluate.parse(evaluate.Args, None, flags))
    assert words in str(caught.value) and "\n" not in str(caught.value) and os.listdir(tmp_path) == []


# the page, in a browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """name -> page and its figures."""
    folder, made = tmp_path_factory.mktemp("pages"), {}
    recorded = {
        "hunt": record_minds({0: "mcts", 3: "ppo"}, episodes=3),
        "world": record_minds({1: "nomcts"}, world=evaluate.world_of(small_world())),
        "drift": record_minds({2: "mappo"}, env_id="msd-4x4"),
        "rules": record_minds({}, episodes=2),
        "fight": record_team(mappo_hyper, episodes=2),
        "subgoals": record_team(qmix, wrap=with_subgoals),
    }
    for name, found in recorded.items():
        found.write(folder / f"{name}.html")
        made[name] = SimpleNamespace(path=folder / f"{name}.html", data=found.data)
    return made


@pytest.fixture(scope="module")
def browser():
    driven = Browser(find())
    yield driven
    driven.close()


def shown(probability: float) -> str:
    """As the page writes it."""
    return "<1 %" if 0 < probability < 0.005 else f"{int(100 * probability + 0.5)} %"


def where(browser) -> tuple[int, int]:
    return int(browser.run("document.body.dataset.e")), int(browser.run("document.body.dataset.t"))


@needs_browser
@pytest.mark.parametrize("name", ["hunt", "world", "drift", "rules", "fight", "subgoals"])
def test_every_page_steps_to_its_end_without_complaint(browser, pages, name):
    page = pages[name]
    browser.open(page.path)
    steps = len(page.data["episodes"][0]["steps"])
    for t in range(min(steps, 12)):
        assert where(browser) == (1, t)
        browser.press("ArrowRight")
    browser.press("End")
    assert where(browser) == (1, steps) and page.data["episodes"][0]["ending"] in browser.texts("#now")[0]
    total = np.sum([step["rewards"] for step in page.data["episodes"][0]["steps"]], 0)
    if page.data["kind"] == "grid":
        told = [float(text.replace("−", "-")) for text in browser.texts("[data-return]")]
        np.testing.assert_allclose(told, total, atol=0.051)
    else:
        assert float(browser.texts("[data-return-team]")[0]) == pytest.approx(total[0], abs=0.02)
        letters = browser.texts("#letters")[0]
        assert "stalker" in letters and "zealot" in letters
    for seat in range(len(page.data["players"])):
        browser.press(str(seat + 1))
        assert browser.run("document.body.dataset.mind") == str(seat + 1)
        browser.press("ArrowLeft")
    assert browser.errors == []


@needs_browser
def test_a_link_leads_to_a_moment_and_its_figures(browser, pages):
    data = pages["hunt"].data
    browser.open(pages["hunt"].path, "#e=2&t=1&p=1")
    for e, t in ((2, 1), (3, 0), (1, 0)):
        browser.run(f"location.hash = '#e={e}&t={t}&p=1'")
        browser.run("new Promise((done) => setTimeout(done, 50))")
        assert where(browser) == (e, t)
        step, goals = data["episodes"][e - 1]["steps"][t], data["episodes"][e - 1]["goals"]["0"]
        mind = step["thoughts"]["0"]
        for j in (1, 2, 3):
            cells = f"[...document.querySelectorAll('[data-belief^=\"{j}:\"]')]"
            told = dict(browser.run(f"{cells}.map((x) => [x.dataset.belief, x.textContent])"))
            assert len(told) > 2 and len(told) <= len(goals)
            for key, text in told.items():
                assert text == shown(mind["belief"][j][int(key.split(":")[1])])
            told = browser.texts(f'[data-predicted^="{j}:"]')
            assert told == [shown(p) for p in mind["predicted"][j]]
        assert browser.texts("[data-visits]") == [str(visits) for visits in mind["visits"]]
        assert browser.texts("[data-policy]") == [shown(p) for p in mind["policy"]]
        assert browser.texts("[data-q_values]") == [f"{q:.2f}" for q in mind["q_values"]]
        assert browser.texts('[data-figure="depth"]') == [str(mind["depth"])]
        places = browser.run("[0, 1, 2, 3].map((i) => document.getElementById('man' + i).style.transform)")
        for cell, place in zip(data["episodes"][e - 1]["frames"][t]["cells"], places, strict=True):
            x, y = map(float, re.findall(r"[\d.]+", place))
            assert (int(y // 100) * 4 + int(x // 100)) == cell
    assert browser.errors == []


@needs_browser
def test_scrub_events_play_and_themes(browser, pages):
    data = pages["hunt"].data
    browser.open(pages["hunt"].path, "#e=1&t=0&p=1")
    end = len(data["episodes"][0]["steps"])
    browser.run(f"scrub.value = {end - 1}; scrub.dispatchEvent(new Event('input', {{bubbles: true}}))")
    assert where(browser) == (1, end - 1) and browser.run("location.hash") == f"#e=1&t={end - 1}&p=1"
    browser.press("PageDown")
    assert where(browser) == (2, 0)
    hunts = [t + 1 for t, step in enumerate(data["episodes"][0]["steps"]) if any(step["taken"])]
    marks = browser.run("events(0).filter((ev) => ev.type === 'hunt').map((ev) => ev.t)")
    assert sorted(set(marks)) == hunts
    every = browser.run("[...new Set(events(0).map((ev) => ev.t))]")
    browser.run("location.hash = '#e=1&t=0&p=1'")
    browser.run("new Promise((done) => setTimeout(done, 50))")
    for t in [t for t in every if t > 0]:
        browser.press("ArrowDown")
        assert where(browser) == (1, t)
    surprises = [
        (t, j) for t, step in enumerate(data["episodes"][0]["steps"]) if "0" in step["thoughts"] for j in (1, 2, 3)
        if step["thoughts"]["0"]["predicted"][j] and len(step["legal"][j]) > 1
        and step["thoughts"]["0"]["predicted"][j][step["legal"][j].index(step["actions"][j])] < 0.05
    ]  # fmt: skip
    assert browser.run("events(0).filter((ev) => ev.type === 'surprise').length") == len(surprises)
    browser.run("location.hash = '#e=1&t=0&p=1'")
    browser.press("d")
    theme = browser.run("document.documentElement.dataset.theme")
    browser.press("d")
    assert {theme, browser.run("document.documentElement.dataset.theme")} == {"light", "dark"}
    browser.run("setSpeed(8); play()")
    browser.run("new Promise((done) => setTimeout(done, 400))")
    assert where(browser) > (1, 1)
    browser.press(" ")
    stopped = where(browser)
    browser.run("new Promise((done) => setTimeout(done, 300))")
    assert where(browser) == stopped and browser.errors == []


class Moody:
    """A policy of somebody's own that tells little: what others may do, and a figure that the page never heard of."""

    def act(self, env):
        self.seen = env.legal[0] / env.legal[0].sum(1, keepdims=True)
        return np.array([4])

    def explain(self, row=0):
        return {"predicted": self.seen, "mood": self.seen.max(), "nothing": np.nan}


@needs_browser
def test_whatever_a_policy_tells_is_shown(browser, tmp_path, monkeypatch):
    monkeypatch.setitem(MINDS, "moody", lambda env, seat, greedy=False: Moody())
    found = record_minds({1: "moody"})
    found.write(tmp_path / "own.html")
    browser.open(tmp_path / "own.html", "#e=1&t=0&p=2")
    step = found.data["episodes"][0]["steps"][0]
    assert browser.texts('[data-predicted^="0:"]') == [shown(p) for p in step["thoughts"]["1"]["predicted"][0]]
    assert "mood" in browser.texts("#right h2") and step["thoughts"]["1"]["nothing"] is None
    browser.press("End")
    assert browser.errors == []


@needs_browser
def test_what_was_foretold_and_imagined_is_shown(browser, pages):
    data = pages["world"].data
    browser.open(pages["world"].path, "#e=1&t=0&p=2")
    step, frame = data["episodes"][0]["steps"][0], data["episodes"][0]["frames"][0]
    here = [reward for reward, cell in zip(step["world"]["rewards"], frame["cells"], strict=True) if cell != GONE]
    assert [float(text.replace("−", "-")) for text in browser.texts("[data-world]")] == pytest.approx(here, abs=0.006)
    boards = browser.texts("#imagined figcaption")
    assert len(boards) == len(step["thoughts"]["1"]["imagined"]) == len(step["legal"][1])
    next_cells, off = data["episodes"][0]["frames"][1]["cells"], 0
    for cell in range(16):  # red: some player or item is off by more than 0.1
        foretold = {plane: value for plane, where, value in step["world"]["planes"] if where == cell and plane < 4}
        off += any(abs(foretold.get(j, 0) - (next_cells[j] == cell)) > 0.1 for j in range(4))
    assert browser.run("document.querySelectorAll('#world figure:first-child svg > rect[stroke]').length") >= off > 0
    assert browser.errors == []


@needs_browser
def test_battles_show_what_was_recorded(browser, pages):
    data = pages["fight"].data
    browser.open(pages["fight"].path, "#e=2&t=3&p=2")
    step, frame = data["episodes"][1]["steps"][3], data["episodes"][1]["frames"][3]
    mind = step["thoughts"]["1"]
    assert browser.texts("[data-attention]") == [shown(x) for x in mind["attention"]]
    assert sorted(browser.texts("[data-policy]")) == sorted(shown(p) for p in mind["policy"])[: len(step["legal"][1])]
    assert browser.texts('[data-figure="weight_change"]') == [f"{mind['weight_change']:.2f}"]
    places = browser.run("D.units.map((_, u) => document.getElementById('man' + u).style.transform)")
    for unit, place in zip(frame["units"], places, strict=True):
        x, y = map(float, re.findall(r"-?[\d.]+", place))
        assert (x, -y) == pytest.approx(tuple(unit[:2]), abs=0.01)
    browser.open(pages["subgoals"].path, "#e=1&t=2&p=1")
    ghosts = pages["subgoals"].data["episodes"][0]["steps"][2]["thoughts"]["0"]["subgoal"]
    count = browser.run("document.querySelectorAll('#ghosts circle').length")
    assert count == sum(ghost is not None and ghost[2] > 0 for ghost in ghosts)
    assert browser.errors == []


@needs_browser
def test_thirty_episodes_are_small_and_large_pages_are_compressed(browser, tmp_path, monkeypatch):
    """With four minds that all tell everything; six episodes stand for thirty."""
    found = record_minds({seat: "mcts" for seat in range(4)}, episodes=6)
    found.write(tmp_path / "run.html")
    assert 5 * len(found.text()) + 100_000 < 2e6
    monkeypatch.setattr(replay, "PLAIN", 1000)
    found.write(tmp_path / "small.html")
    assert (tmp_path / "small.html").stat().st_size < (tmp_path / "run.html").stat().st_size / 2
    browser.open(tmp_path / "small.html", "#e=6&t=0&p=3")
    assert where(browser) == (6, 0) and browser.texts("#run h2") == ["All 6 episodes in a row"]
    last = found.data["episodes"][5]["steps"][0]["thoughts"]["2"]
    assert browser.texts("[data-policy]") == [shown(p) for p in last["policy"]] and browser.errors == []


# a run shows itself


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        (ppo_baseline, ["--num-steps", "8", "--total-timesteps", "128", "--roles", "ppo,ns,nh,ppo"]),
        (mappo_hyper, ["--env-id", "smac-3m", "--num-steps", "16", "--total-timesteps", "128"]),
    ],
)
def test_films_of_evaluations_change_no_bit(script, flags, tmp_path, capsys):
    common = ["--num-envs", "8", *flags, "--eval-every", "64", "--eval-episodes", "4", "--final-eval-episodes", "4"]
    for name, more in (("plain", []), ("filmed", ["--capture-video"])):
        assert main(script.Args, script.train, ["--run-dir", str(tmp_path / name), *common, *more]) == 0
    assert read_metrics(tmp_path / "plain") == read_metrics(tmp_path / "filmed")
    films = sorted((tmp_path / "filmed" / "videos").iterdir())
    evaluated = {row["global_step"] for row in read_metrics(tmp_path / "filmed") if row.get("eval/return")}
    assert {f"step-{step}.gif" for step in evaluated} == {film.name for film in films}
    with Image.open(films[-1]) as film:
        assert film.n_frames > 1
    log = EventAccumulator(str(tmp_path / "filmed"), size_guidance={"images": 0}).Reload()
    assert [image.encoded_image_string for image in log.Images("eval/film")][-1][:3] == b"GIF"
    assert "__REPLAY__" not in (tmp_path / "filmed" / "replay.html").read_text()
    assert not (tmp_path / "filmed" / "checkpoints" / "shown").exists() and not (tmp_path / "plain" / "videos").exists()


def test_there_are_no_pictures_of_particles(capsys, tmp_path):
    flags = ["--env-id", "mpe-simple-spread", "--capture-video", "--run-dir", str(tmp_path / "x")]
    assert main(mappo_hyper.Args, mappo_hyper.train, flags) == 2
    assert "no pictures of mpe-simple-spread" in capsys.readouterr().err


# playing oneself


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="a terminal of Unix")
def test_single_keys_and_arrows(monkeypatch):
    """No Enter is needed, and the terminal is as before after each key."""
    import termios

    ours, theirs = os.openpty()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(fileno=lambda: theirs, isatty=lambda: True))
    before = termios.tcgetattr(theirs)
    arrows = {b"\033[A": "up", b"\033[D": "left", b"\033OB": "down", b"\033[5~": "?"}
    for typed, key in ({b"w": "w", b" ": " "} | arrows).items():
        os.write(ours, typed)
        assert system.read_key() == key and termios.tcgetattr(theirs) == before
    os.close(ours)
    os.close(theirs)


def test_playing_against_a_mind_ends_in_a_page(monkeypatch, tmp_path, capsys):
    """Keys are heeded one by one, illegal ones refused with what is legal, and the page has what was thought of one."""
    monkeypatch.chdir(tmp_path)
    keys = iter(["up", "left", "down", "right", "x", " "] * 40)
    monkeypatch.setattr(system, "read_key", lambda: next(keys))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("envs.roles.load_policy", lambda path, env, seat, *_: make_hop(hopplus_mcts, env, seat))
    (tmp_path / "hop").mkdir()
    (tmp_path / "hop" / "spec.json").write_text('{"script": "hopplus_mcts.py"}')
    play.run(["--roles", "human,hop,nh,fix", "--episodes", "1", "--seed", "3"])
    said = capsys.readouterr().out
    assert "is no action; legal are" in said and "space STAY" in said and "(" in said and "wrote replay.html" in said
    page = (tmp_path / "replay.html").read_text()
    data = json.loads(re.search(r'id="replay">(.*?)</script>', page, re.S)[1])
    assert [player["role"] for player in data["players"]] == ["you", "HOP+ hop", "nh", "fix"]
    [episode] = data["episodes"]
    thought = episode["steps"][0]["thoughts"]["1"]
    assert thought["belief"][0] is not None and len(thought["predicted"][0]) == len(episode["steps"][0]["legal"][0])


# films


def test_the_end_of_a_battle_is_seen_and_its_letters_are_told():
    """The caption stands in the strip above the field: the field is the same with and without it."""
    from envs.battles.render import STRIP

    battle = envs.parallel_env("smac-2s3z", horizon=3)
    battle.reset(seed=1)
    team = mixed_team(["nearest"], battle.env, 1, False)
    *_, last = replay.play_battle(battle, team, 1)
    assert last.caption == "time is up"
    with_caption, without = battle.pictures([last, last._replace(caption="")])
    changed = np.nonzero((with_caption != without).any((1, 2)))[0]
    assert len(changed) and changed.max() < STRIP
    named, unnamed = battle.pictures([last], "QMIX mine")[0], battle.pictures([last])[0]
    changed = np.nonzero((named != unnamed).any((1, 2)))[0]
    assert len(changed) and changed.min() > len(named) - STRIP
    assert (unnamed[-STRIP:] != unnamed[-1, 0]).any()  # the legend


def test_films_name_the_roles(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr("envs.film.picture", lambda view: (shown.append(view.labels), np.zeros((8, 8, 3), np.uint8))[1])
    evaluate.main(evaluate.Args(roles="ns,nh,mix,random", episodes=4, gif=str(tmp_path / "a.gif")))
    assert set(shown) == {("ns", "nh", "mix", "random")}
