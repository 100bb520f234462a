"""evaluate.py: several agents pooled, line-ups, calibration and lasting roles, against figures worked out by hand."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_run import arguments

import envs
import evaluate
from envs import adaptation
from envs.players import SEEKER, RulePlayers, names
from envs.recording import rule_probabilities
from envs.roles import Seats
from envs.run import load_script, main

ROOT = Path(__file__).resolve().parent.parent


def make_agents(folder: Path, *names: str) -> list[str]:
    """Folders that look like checkpoints, for tests that put players of their own behind them."""
    for name in names:
        (folder / name).mkdir()
        (folder / name / "spec.json").write_text('{"script": "hopplus_mcts.py"}')
    return [str(folder / name) for name in names]


# adaptation


@pytest.fixture
def played(monkeypatch):
    """Stands in for the games: agent `x` gets 1 in its first run, 3 in the second, `y` 2 more, `z` 4 more, all the
    time; its raw policy half of that. Remembers (agent, co-players, seed)."""
    calls = []

    def adapt_among(args, agent, line_ups, settings, how, budget):
        calls.extend((Path(agent).name, ">".join(map(",".join, others)), args.seed) for others in line_ups)
        of_runs = np.array([1.0, 3.0]) + 2 * "xyz".index(Path(agent).name[0])
        returns = np.repeat(of_runs[:, None], 30, 1) * (0.5 if how == "raw" else 1.0)
        return np.stack([returns] * len(line_ups))

    monkeypatch.setattr(adaptation, "adapt_among", adapt_among)
    return calls


def table(args) -> list[dict]:
    return [row for rows in adaptation.adaptation(args, {}) for row in rows]


def best_responses(folder: Path, roles: str, *names: str) -> str:
    for name in names:
        (folder / "best" / name).mkdir(parents=True)
        (folder / "best" / name / "args.json").write_text(json.dumps({"args": {"roles": roles}}))
        (folder / "best" / name / "result.json").write_text("{}")
    return str(folder / "best")


def test_three_agents_are_pooled_by_hand(played, tmp_path, capsys):
    """Means of the agents: 2, 4, 6. Their mean: 4, its 95 % interval: 4.3027 * 2 / sqrt(3)."""
    agents = make_agents(tmp_path, "x", "y", "z")
    files = {"csv": str(tmp_path / "a.csv"), "plot": str(tmp_path / "a.png")}
    files["best_responses"] = best_responses(tmp_path, "ppo,ns,ns,ns", "x9", "y9", "z9")
    players = {"adaptation": ",".join(agents), "compare": agents[1], "line_ups": "ns,ns,ns;nh,nh,nh"}
    evaluate.main(evaluate.Args(runs=2, **players, **files))
    with open(tmp_path / "a.csv", newline="") as file:
        rows = {(row["among"], row["player 1"], Path(row["agent"]).name): row for row in csv.DictReader(file)}
    pooled = rows["ns,ns,ns", "HOP+", "all"]
    assert (pooled["agents"], pooled["runs"], pooled["ci95 over"]) == ("3", "6", "agents")
    for phase in adaptation.PHASES:
        assert float(pooled[phase]) == 4.0
        assert float(pooled[f"ci95 {phase}"]) == pytest.approx(4.302653 * 2 / 3**0.5, rel=1e-6)
    assert json.loads(pooled["returns"]) == [4.0] * 30
    assert float(pooled["share of best"]) == 1.0
    assert float(rows["ns,ns,ns", "HOP+, raw policy", "all"]["share of best"]) == 0.5
    for name, mean in (("x", 2.0), ("y", 4.0), ("z", 6.0)):  # each agent is a row, too, its interval over its two runs
        row = rows["ns,ns,ns", "HOP+", name]
        assert (row["agents"], row["runs"], row["ci95 over"], float(row["2-5"])) == ("1", "2", "runs", mean)
        assert float(row["ci95 2-5"]) == pytest.approx(1.96 / 2**0.5)
        assert float(row["share of best"]) == mean / 4
    alone = rows["ns,ns,ns", "HOP+, compared", "all"]
    assert (alone["agents"], alone["ci95 over"], float(alone["16-30"])) == ("1", "runs", 4.0)
    assert ("ns,ns,ns", "HOP+, compared", "y") not in rows  # it would say the same again
    assert np.isnan(float(rows["nh,nh,nh", "HOP+", "all"]["share of best"]))  # nobody trained there
    assert (tmp_path / "a.png").stat().st_size > 5000
    # the k-th agents meet the same starts, agents of one player never do
    seeds = {agent: {seed for name, _, seed in played if name == agent} for agent, _, _ in played}
    assert seeds["x"] == seeds["x9"] == {7} and seeds["y9"] < seeds["y"] and seeds["z"] == seeds["z9"]
    assert len(seeds["x9"] | seeds["y9"] | seeds["z9"]) == 3
    shown = capsys.readouterr().out
    assert "agents" in shown and agents[2] not in shown.splitlines()[3]


def test_best_responses_of_an_earlier_table(played, tmp_path, capsys):
    """The row of the best response (16-30: 4.0) is taken over; the new agent's 2.0 is half of it."""
    agents, table = make_agents(tmp_path, "x", "y"), str(tmp_path / "a.csv")
    best = best_responses(tmp_path, "ppo,ns,ns,ns", "x9", "y9", "z9")
    common = {"runs": 2, "line_ups": "ns,ns,ns;nh,nh,nh"}
    evaluate.main(evaluate.Args(adaptation=agents[1], best_responses=best, csv=table, **common))
    played.clear()
    again = str(tmp_path / "b.csv")
    evaluate.main(evaluate.Args(adaptation=agents[0], best_responses=table, csv=again, **common))
    assert {name for name, *_ in played} == {"x"}  # nobody else had to play
    with open(again, newline="") as file:
        rows = {(row["among"], row["player 1"]): row for row in csv.DictReader(file)}
    assert float(rows["ns,ns,ns", "HOP+"]["share of best"]) == 0.5
    assert float(rows["ns,ns,ns", "best response"]["16-30"]) == 4.0
    assert ("nh,nh,nh", "best response") not in rows and np.isnan(float(rows["nh,nh,nh", "HOP+"]["share of best"]))
    with pytest.raises(envs.ConfigError, match="no such table"):
        evaluate.main(evaluate.Args(adaptation=agents[0], best_responses=str(tmp_path / "c.csv"), **common))
    (tmp_path / "d.csv").write_text("among,player 1,returns,runs\nx,best response,3,3\n")
    with pytest.raises(envs.ConfigError, match="no table of adaptation"):
        evaluate.main(evaluate.Args(adaptation=agents[0], best_responses=str(tmp_path / "d.csv"), **common))


def test_settings_nested_without_end_are_one_line():
    with pytest.raises(envs.ConfigError, match=r"^--set horizon=\[+ must be name=value"):
        evaluate.parse_settings(("horizon=" + "[" * 100_000,))


def test_two_agents_are_too_few_for_an_interval_over_agents(played, tmp_path):
    agents = make_agents(tmp_path, "x", "y")
    rows = table(evaluate.Args(adaptation=",".join(agents), runs=2, line_ups="ns,ns,ns"))
    assert [row["agent"] for row in rows[:3]] == ["all", *agents]
    assert rows[0]["2-5"] == 3.0 and rows[0]["ci95 over"] == "runs"
    assert rows[0]["ci95 2-5"] == pytest.approx(1.96 * np.std([1, 3, 3, 5]) / 4**0.5)


def test_one_agent_is_not_pooled(played, tmp_path):
    """All play the games of --seed, so the three best responses are no independent sample: as runs, they are pooled."""
    [agent] = make_agents(tmp_path, "y")
    best = best_responses(tmp_path, "ppo,ns,ns,ns", "x9", "y9", "z9")
    args = evaluate.Args(adaptation=agent, runs=2, line_ups="ns,ns,ns", best_responses=best)
    rows = [row for row in table(args) if row["agent"] == "all"]
    assert [row["player 1"] for row in rows] == ["HOP+", "HOP+, raw policy", "best response"]
    assert [(row["agents"], row["runs"], row["ci95 over"]) for row in rows] == [(1, 2, "runs")] * 2 + [(3, 6, "runs")]
    assert {seed for _, _, seed in played} == {args.seed}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"args": 3}', b"\xff"])
def test_a_damaged_run_among_the_best_responses_is_named(played, tmp_path, content):
    [agent] = make_agents(tmp_path, "y")
    best = best_responses(tmp_path, "ppo,ns,ns,ns", "x9")
    (tmp_path / "best/x9/args.json").write_bytes(content)
    with pytest.raises(envs.ConfigError, match=r"best/x9/args.json' is damaged"):
        table(evaluate.Args(adaptation=agent, runs=2, line_ups="ns,ns,ns", best_responses=best))
    with pytest.raises(envs.ConfigError, match="there is no such folder"):
        table(evaluate.Args(adaptation=agent, runs=2, line_ups="ns,ns,ns", best_responses=f"{best}/none"))


def test_all_line_ups_or_those_asked_for(played, tmp_path):
    agent, stranger = make_agents(tmp_path, "x", "stranger")

    def met(**flags) -> list[str]:
        played.clear()
        rows = table(evaluate.Args(adaptation=agent, runs=2, **flags))
        assert list(dict.fromkeys(others for _, others, _ in played)) == [
            ",".join([stranger] * 3) if row["among"] == "strangers" else row["among"] for row in rows[::2]
        ]
        return [row["among"] for row in rows[::2]]

    assert met() == list(adaptation.LINE_UPS)
    assert met(strangers=stranger) == [*adaptation.LINE_UPS, "strangers"]
    assert met(strangers=stranger, line_ups="strangers;fix,nh,nh") == ["strangers", "fix,nh,nh"]
    assert met(line_ups="nd,nd,nd", env_id="msd-4x4") == ["nd,nd,nd"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--line-ups", "ns,nx,ns"], "unknown role 'nx' in line-up 'ns,nx,ns'; valid are random, ns, nh, fix, mix"),
        (["--line-ups", "nh,nh,nh;ns,ns"], "line-up 'ns,ns' must name the 3 co-players"),
        (["--line-ups", "strangers"], "needs --strangers"),
        (["--env-id", "msd-4x4"], "unknown role 'ns'"),
        (["--runs", "0"], "--runs must be a whole number from 1"),
        (["--compare", "no/such/run"], "'no/such/run' is no checkpoint"),
    ],
)
def test_bad_input_is_one_sentence(flags, words, tmp_path):

    [agent] = make_agents(tmp_path, "x")
    with pytest.raises(envs.ConfigError) as caught:
        evaluate.main(evaluate.parse(evaluate.Args, None, ["--adaptation", agent, *flags]))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_bad_line_up_is_one_line_and_exit_code_2(tmp_path):
    [agent] = make_agents(tmp_path, "x")
    command = [sys.executable, str(ROOT / "evaluate.py"), "--adaptation", agent, "--line-ups", "ns,nx,ns"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1, done.stderr
    assert "unknown role 'nx'" in done.stderr


def test_an_agent_named_twice_is_refused(tmp_path):
    [agent] = make_agents(tmp_path, "x")
    for flag in ("adaptation", "beliefs"):
        with pytest.raises(envs.ConfigError, match=f"--{flag} names .* twice"):
            evaluate.main(evaluate.Args(**{flag: f"{agent},{agent}"}))


def test_search_and_sharpness_are_asked_of_the_agent_that_adapts_alone(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(adaptation, "adapt_among", lambda *_: (asked.append(_[4:]), np.ones((1, 2, 30)))[1])
    agent = make_agents(tmp_path, "x")[0]
    players = {"adaptation": agent, "compare": agent, "line_ups": "ns,ns,ns"}
    how = {"simulations": 7, "play_beta": 3.5, "belief_floor": 0.3}
    evaluate.main(evaluate.Args(runs=2, csv=str(tmp_path / "a.csv"), **how, **players))
    assert asked == [("adapts", how), ("raw", {}), ("", {})]


def test_rows_of_many_kinds(played, tmp_path, capsys):
    """Each row has its agents, pooled, and its way of playing; a name is given once."""
    x, y, z = make_agents(tmp_path, "x", "y", "z")
    rows = table(
        evaluate.Args(adaptation=x, rows=f"all three={x},{y},{z};plain=raw:{y};known=oracle:{z}", line_ups="ns,ns,ns")
    )
    of_all = {row["player 1"]: row for row in rows if row["agent"] == "all"}
    assert list(of_all) == ["HOP+", "HOP+, raw policy", "all three", "plain", "known"]
    assert [row["16-30"] for row in of_all.values()] == [2.0, 1.0, 4.0, 2.0, 6.0]
    assert of_all["all three"]["ci95 over"] == "agents" and len(rows) == 5 + 3
    rows = table(evaluate.Args(rows=f"only these={y},{z}", line_ups="ns,ns,ns"))
    assert [(row["player 1"], row["agent"]) for row in rows] == [("only these", name) for name in ("all", y, z)]
    for rows, words in (
        (f"a={x};a={y}", "each name once"),
        ("a", "needs NAME=RUN"),
        (f"HOP+={y}", "there is a row 'HOP+' already"),
        ("a=nowhere", "'nowhere' is no checkpoint"),
        (f"a={x},{x}", "twice"),
    ):
        with pytest.raises(envs.ConfigError, match=words.replace("+", "[+]")):
            table(evaluate.Args(adaptation=x, rows=rows))


def test_back_after_a_switch_by_hand():
    """95 % of 2.0 is 1.9: reached by the mean of three episodes from the fourth one on, or at once, or never."""
    before, after = [1.0] * 15, [0.0, 1.0, 1.0, 1.8, 2.0, 2.0]
    assert adaptation.back_after(np.array(before + after + [2.0] * 9), 2.0) == 4
    assert adaptation.back_after(np.array(before + [1.9] * 15), 2.0) == 1
    assert np.isnan(adaptation.back_after(np.array(before + [1.8] * 15), 2.0))


def test_the_share_of_a_switch_is_of_the_second_co_players(played, tmp_path):
    """The best response among ns gets 4 (the mean of x9, y9, z9), so the agent's 4 in episodes 16-30 is all of it."""
    [agent] = make_agents(tmp_path, "y")
    best = best_responses(tmp_path, "ppo,ns,ns,ns", "x9", "y9", "z9")
    args = evaluate.Args(
        adaptation=agent, runs=2, line_ups="ns,ns,ns;nh,nh,nh>ns,ns,ns;ns,ns,ns>nh,nh,nh", best_responses=best
    )
    rows = {(row["among"], row["player 1"]): row for row in table(args) if row["agent"] == "all"}
    there = rows["nh,nh,nh>ns,ns,ns", "HOP+"]
    assert there["share of best"] == 1.0 and there["back after"] == 1
    assert np.isnan(rows["nh,nh,nh>ns,ns,ns", "HOP+, raw policy"]["back after"])  # half of it
    away = rows["ns,ns,ns>nh,nh,nh", "HOP+"]
    assert np.isnan(away["share of best"]) and away["back after"] == 1  # of what it gets itself in the end
    assert np.isnan(rows["ns,ns,ns", "HOP+"]["back after"]) and ("ns,ns,ns>nh,nh,nh", "best response") not in rows
    with pytest.raises(envs.ConfigError, match="one '>' is possible"):
        table(evaluate.Args(adaptation=agent, line_ups="ns,ns,ns>nh,nh,nh>ns,ns,ns"))


class Onward:
    """A policy that stays where it is."""

    def act(self, env):
        return np.full(env.num_envs, 4)


def test_co_players_switch_after_episode_15_and_come_without_a_past():
    """In every game on its own; `tft` after the switch trusts, whoever took what before."""
    env = envs.make("msh-4h1s-4x4", num_envs=20, seed=1, horizon=6)
    parts = [Seats(env, [adaptation.SEAT_1, *[role] * 3], adaptation.SEAT_1, 3) for role in ("nh", "tft")]
    company = adaptation.Company(env, Onward(), parts)
    alone = [Seats(env, [adaptation.SEAT_1, *[role] * 3], adaptation.SEAT_1, 3) for role in ("nh", "tft")]
    both = np.zeros(2, int)
    for _ in range(150):
        expected = [seats.act() for seats in alone]
        actions, switched = company.act(), company.switched
        if (company.episode == adaptation.SWITCH_AFTER).any():
            first = (company.episode == adaptation.SWITCH_AFTER) & (env.t == 0)
            assert (parts[1].rules.memory.took_before[first] == 1).all()
        np.testing.assert_array_equal(actions[~switched, 1:], expected[0][~switched, 1:])
        np.testing.assert_array_equal(switched, company.episode >= 15)
        both += [(~switched).sum(), switched.sum()]
        info = env.step(actions)[4]
        company.watch(actions, info)
        alone[0].watch(actions, info)
    assert (both > 100).all()


def test_best_responses_are_of_the_same_game(tmp_path):
    """A folder may hold those of several games."""
    folder = best_responses(tmp_path, "ppo,ns,ns,ns", "x9", "y9")
    other = {"args": {"roles": "ppo,ns,ns,ns", "env_id": "msh-4h2s-4x4"}}
    (tmp_path / "best" / "y9" / "args.json").write_text(json.dumps(other))
    for env_id, name in (("msh-4h1s-4x4", "x9"), ("msh-4h2s-4x4", "y9")):
        found = adaptation.find_best_responses(folder, env_id)["ns,ns,ns"]
        assert str(tmp_path / "best" / name) in found and (name == "y9" or len(found) == 1)


def test_line_ups_are_played_together(monkeypatch):
    """Each in its own block of games, where its players act as if they were in all of them, and switch alone."""
    env = envs.make("msh-4h1s-4x4", num_envs=12, seed=1, horizon=3)
    monkeypatch.setattr(adaptation, "load_policy", lambda *_: Onward())
    line_ups = [[["ns"] * 3], [["nh"] * 3, ["late"] * 3], [["tft", "random", "flip"]]]
    company = adaptation.make_company(evaluate.Args(), env, "x", line_ups, "", {})
    alone = [adaptation.make_company(evaluate.Args(), env, "x", [others], "", {}) for others in line_ups]
    switched = np.zeros(12, bool)
    for _ in range(60):
        actions = company.act()
        for k, one in enumerate(alone):
            np.testing.assert_array_equal(actions[4 * k : 4 * k + 4], one.act()[4 * k : 4 * k + 4])
        switched |= company.switched
        info = env.step(actions)[4]
        for one in (company, *alone):
            one.watch(actions, info)
    np.testing.assert_array_equal(switched, np.arange(12) // 4 == 1)


def test_line_ups_of_rules_are_batched_and_others_play_alone():
    rules, stranger = [["ns"] * 3], [["ns", "runs/x", "ns"]]
    line_ups = {f"{k}": rules for k in range(7)} | {"x": stranger, "y": rules, "z": [*rules, *stranger]}
    batches = [list(batch) for batch in adaptation.in_batches(line_ups, ("ns",))]
    assert batches == [list("012345"), ["6"], ["x"], ["y"], ["z"]]


@pytest.mark.parametrize("env_id", ["msh-4h2s-4x4", "msd-4x4"])
def test_an_oracle_knows_what_rule_based_players_do(env_id):
    """Of the plain ones as recording.py has it; of all, no action that a player takes has chance 0, and the mean chance
    of what they do is the mean chance of a guess by these chances."""
    env = envs.make(env_id, num_envs=60, seed=1)
    for role in names(env.game):
        players = RulePlayers(env.game, [role] * 4, 60, 3)
        taken, guessed = [], []
        for _ in range(20):
            actions = players.act(env.obs, env.legal, env.t)
            row, player = np.nonzero(env.alive)
            chances = players.probabilities(env.states[row], row, player)
            np.testing.assert_allclose(chances.sum(1), 1.0)
            if role in ("random", "fix", *env.game.seekers):
                exact = rule_probabilities(env.game, role, env.obs[row, player], env.legal[row, player])
                np.testing.assert_allclose(chances, exact)
            taken.append(chances[np.arange(len(row)), actions[row, player]])
            guessed.append((chances**2).sum(1))
            players.watch(env.step(actions)[4])
        taken, guessed = np.concatenate(taken), np.concatenate(guessed)
        if role != "copycat":  # it goes by the others' last steps
            assert taken.min() > 0 and abs(taken.mean() - guessed.mean()) < 0.03, role


@pytest.fixture(scope="module")
def hop_run(tmp_path_factory) -> str:
    """The run folder of a HOP+ agent that has learned for one iteration."""
    folder, module = tmp_path_factory.mktemp("hop") / "x", load_script(ROOT / "hopplus_mcts.py")
    few = ["--total-timesteps", "16", "--eval-every", "0", "--run-dir", str(folder)]
    assert main(module.Args, module.train, [*arguments("hopplus_mcts.py"), *few]) == 0
    return str(folder)


def test_beliefs_that_do_not_move_or_are_not_carried_over(hop_run):
    """`no-intra`: what a player does changes nothing within an episode. `no-inter`: what it pursued before changes
    nothing in the next one. Who holds no beliefs has no such row."""
    args, others = evaluate.Args(runs=4), [[["ns", "nh", "ns"]]]

    def beliefs_of(how: str):
        env = envs.make(args.env_id, num_envs=args.runs, seed=args.seed)
        company = adaptation.make_company(args, env, hop_run, others, how, {"simulations": 2})
        beliefs, first, moved = company.policy.beliefs, [], False
        for _ in range(80):
            company.act()
            if beliefs.new_episode.any():
                first.append(np.abs(beliefs.belief - beliefs.open_prior(beliefs.there()))[beliefs.new_episode].max())
            before = beliefs.belief.copy()
            actions = company.act()
            _, _, _, _, info = env.step(actions)
            company.watch(actions, info)
            moved |= not np.array_equal(before, beliefs.belief)
        return moved, len(first) > 2 and max(first[1:]) > 1e-5

    assert beliefs_of("") == (True, True)
    assert beliefs_of("no-intra") == (False, True)
    assert beliefs_of("no-inter") == (True, False)
    env = envs.make(args.env_id, num_envs=2, seed=1)
    how = {"simulations": 2, "belief_floor": 0.5}
    policy = adaptation.make_company(args, env, hop_run, others, "adapts", how).policy
    assert (policy.simulations, policy.args.belief_floor) == (2, 0.5)
    with pytest.raises(envs.ConfigError, match="holds no beliefs, so there is no row no-inter"):
        module = load_script(ROOT / "ppo_baseline.py")
        folder = hop_run.replace("/x", "/ppo")
        assert main(module.Args, module.train, [*arguments("ppo_baseline.py"), "--run-dir", folder]) == 0
        adaptation.make_company(args, env, folder, others, "no-inter", {})


def test_an_oracle_plans_with_the_true_co_players(hop_run, monkeypatch):
    """Its trees ask the rules themselves, of every other player on the board, first of the game as it is and then of
    what may follow. What cannot be known is refused."""
    asked, truth = [], adaptation.Company.probabilities

    def probabilities(self, states, env_row, player):
        chances = truth(self, states, env_row, player)
        same = (states == self.env.states[env_row]).all(1)
        asked.append((same, chances))
        assert (states[np.arange(len(states)), 2 + player] >= 0).all() and (player > 0).all()
        return chances

    monkeypatch.setattr(adaptation.Company, "probabilities", probabilities)
    monkeypatch.setattr(adaptation, "EPISODES", 1)
    args, run = evaluate.Args(runs=3), hop_run
    returns = adaptation.adapt_among(args, run, [[["nh", "late", "mix"]]], {}, "oracle", {"simulations": 4})
    assert returns.shape == (1, 3, 1)
    assert asked[0][0].all() and not asked[1][0].any() and sum(same.all() for same, _ in asked) > 3
    assert all(np.allclose(chances.sum(1), 1.0) for _, chances in asked)
    with pytest.raises(envs.ConfigError, match="an oracle knows rule-based players alone"):
        adaptation.adapt_among(args, run, [[[run, "ns", "ns"]]], {}, "oracle", {})


# beliefs


class Onlooker:
    """Beliefs with one hypothesis per kind, and aimless, that believes what it is told."""

    def __init__(self, env, believe):
        self.env, self.believe, self.args = env, believe, SimpleNamespace(goal_mode="oracle")
        self.num_goals, self.shape = len(env.game.kinds) + 1, (env.num_envs, env.spec.num_players)
        self.cell = np.full((env.num_envs, self.num_goals), -1)

    def look(self, env) -> None:
        self.belief = np.broadcast_to(self.believe(self), (*self.shape, self.num_goals)).astype(np.float32)

    def kinds_of_goals(self) -> np.ndarray:
        return np.broadcast_to(np.eye(self.num_goals, dtype=np.float32), (len(self.cell), *[self.num_goals] * 2))

    def predict(self) -> np.ndarray:
        return self.env.legal / self.env.legal.sum(-1, keepdims=True)

    def watch(self, actions, taken, alive, done) -> None:
        pass


@pytest.fixture
def onlookers(monkeypatch):
    """Put beliefs behind agents: {name: function of the mind -> (B, N, kinds + 1)}. Returns a list of the roles of all
    seats (B, N) at each step."""
    seen, believe = [], {}

    class Players(evaluate.RulePlayers):
        def act(self, obs, legal, t, *rest):
            actions = super().act(obs, legal, t, *rest)
            seen.append(self.drawn.copy())
            return actions

    def load_policy(path, env, seat, seed):
        return SimpleNamespace(beliefs=Onlooker(env, believe[Path(path).name]))

    monkeypatch.setattr(evaluate, "RulePlayers", Players)
    monkeypatch.setattr(evaluate, "load_policy", load_policy)
    return SimpleNamespace(believe=believe, roles=seen)


def test_calibration_by_hand():
    """Bins: 0.05 twice (one true), 0.7 four times (three true), 1.0 once (true); what is NaN is left out."""
    believed = np.array([0.05, 0.05, 0.7, 0.7, 0.7, 0.7, 1.0, np.nan])
    true = np.array([0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0])
    bins, error = evaluate.calibrate(believed, true)
    assert [(row["belief"], row["count"]) for row in bins] == [("0.0-0.1", 2), ("0.7-0.8", 4), ("0.9-1.0", 1)]
    assert [row["mean belief"] for row in bins] == pytest.approx([0.05, 0.7, 1.0])
    assert [row["frequency"] for row in bins] == [0.5, 0.75, 1.0]
    assert error == pytest.approx((2 * 0.45 + 4 * 0.05 + 0.0) / 7)
    for edge in range(10):  # in the upper bin, also in single precision
        for kind in (np.float32, np.float64):
            [row], _ = evaluate.calibrate(np.array([edge / 10], kind), np.ones(1))
            assert row["belief"].startswith(f"{edge / 10}-")


def test_a_posterior_made_by_hand_ends_in_known_bins(onlookers, tmp_path, capsys):
    """Always 0.7 stag, 0.2 hare, 0.1 aimless: two bins, and none for aimless. In the first step half of the players
    seek either kind: each bin is true in half of its claims, and the mean belief in the truth is 0.45."""
    [agent] = make_agents(tmp_path, "a")
    onlookers.believe["a"] = lambda mind: np.array([0.7, 0.2, 0.1])
    args = evaluate.Args(beliefs=agent, belief_roles="fixed", runs=50, episodes=1)
    table = evaluate.watch_beliefs(args, agent, {})
    assert table["sought"].sum(0).tolist() == [100, 100, 0] and (table["n"] == 0).all()
    row = evaluate.summarise_beliefs("all", [table])[0]
    assert row["belief in true kind"] == pytest.approx(0.45, abs=1e-6) and row["exact Bayes"] == 0.5
    bins, error = evaluate.calibrate(table["believed"][:, :-1].ravel(), table["sought"][:, :-1].ravel())
    expected = [("0.2-0.3", 200, 0.5), ("0.7-0.8", 200, 0.5)]
    assert [(row["belief"], row["count"], row["frequency"]) for row in bins] == expected
    assert error == pytest.approx((0.3 + 0.2) / 2, abs=1e-6)
    evaluate.main(args)
    assert "expected calibration error: 0.250" in capsys.readouterr().out


def test_who_knows_the_roles_is_perfectly_calibrated_and_above_exact_bayes(onlookers, tmp_path):
    """Roles last, so an onlooker can learn them once by peeping; a gone kind takes a step out of the figures."""

    def peep(mind):
        codes = onlookers.roles[-1] if onlookers.roles else None
        return np.full(3, 1 / 3) if codes is None else np.eye(3)[codes - SEEKER]

    [agent] = make_agents(tmp_path, "a")
    onlookers.believe["a"] = peep
    table = evaluate.watch_beliefs(evaluate.Args(beliefs=agent, belief_roles="fixed", runs=40, episodes=200), agent, {})
    later = {name: values[160:] for name, values in table.items()}  # after the first step of all
    known = np.isfinite(later["exact"])
    assert known.any() and not known.all() and (np.isfinite(later["believed"]).all(1) == known).all()
    bins, error = evaluate.calibrate(later["believed"][:, :-1].ravel(), later["sought"][:, :-1].ravel())
    assert error == 0.0 and [row["frequency"] for row in bins] == [0.0, 1.0]
    for row in evaluate.summarise_beliefs("all", [later]):
        assert row["belief in true kind"] == 1.0 and row["exact Bayes"] < 1.0


def test_roles_are_drawn_for_each_episode_or_last(onlookers, tmp_path):
    [agent] = make_agents(tmp_path, "a")
    onlookers.believe["a"] = lambda mind: np.array([0.5, 0.5, 0.0])
    exact = {}
    for roles in ("mix", "fixed"):
        onlookers.roles.clear()
        args = evaluate.Args(beliefs=agent, belief_roles=roles, runs=40, episodes=400)
        rows = evaluate.summarise_beliefs("all", [evaluate.watch_beliefs(args, agent, {})])
        exact[roles] = [row["exact Bayes"] for row in rows if row["actions seen"] != "all"]
        drawn = np.array(onlookers.roles)  # (T, B, N)
        if roles == "fixed":
            assert (drawn == drawn[0]).all() and (drawn[0] == SEEKER).sum() == drawn[0].size // 2
            assert all(len(np.unique(drawn[0][:, seat])) == 2 for seat in range(4))
        else:
            assert (drawn != drawn[0]).any(0).mean() > 0.5
    # exact Bayes knows nothing at the start of an episode, unless roles last and it saw earlier ones
    assert exact["mix"][0] == 0.5 and exact["fixed"][0] > 0.8
    assert (np.diff(exact["mix"]) > 0).all() and exact["mix"][-1] > 0.99


def test_beliefs_of_several_agents_are_pooled(onlookers, tmp_path, capsys):
    """Three agents give the true kind 0.5, whatever it is, times 1, 0.8 and 0.6: 0.4 on average, and each has a row."""
    agents = make_agents(tmp_path, "a", "b", "c")
    for name, share in (("a", 1.0), ("b", 0.8), ("c", 0.6)):
        onlookers.believe[name] = lambda mind, share=share: np.array([0.5 * share, 0.5 * share, 1 - share])
    files = {name: str(tmp_path / f"b.{name}") for name in ("csv", "json")} | {"plot": str(tmp_path / "b.png")}
    evaluate.main(evaluate.Args(beliefs=",".join(agents), runs=20, episodes=100, **files))
    content = json.loads((tmp_path / "b.json").read_text())
    rows = {(Path(row["agent"]).name, row["actions seen"]): row for row in content["rows"]}
    first = rows["all", "0"]
    assert first["steps"] == sum(rows[name, "0"]["steps"] for name in "abc")
    assert [rows[name, "0"]["belief in true kind"] for name in "abc"] == pytest.approx([0.5, 0.4, 0.3])
    weights = [rows[name, "0"]["steps"] for name in "abc"]
    assert first["belief in true kind"] == pytest.approx(np.average([0.5, 0.4, 0.3], weights=weights))
    assert first["ci95"] == pytest.approx(4.302653 * 0.1 / 3**0.5, rel=1e-4)
    # of the two claims about a player one is true
    assert [row["belief"] for row in content["calibration"]] == ["0.3-0.4", "0.4-0.5", "0.5-0.6"]
    assert all(row["frequency"] == 0.5 for row in content["calibration"])
    assert content["calibration_error"] == pytest.approx(
        sum(row["count"] * abs(row["mean belief"] - 0.5) for row in content["calibration"])
        / sum(row["count"] for row in content["calibration"])
    )
    with open(tmp_path / "b.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == len(rows)
    assert (tmp_path / "b.png").stat().st_size > 5000
    assert "agent by agent: 0.000, 0.100, 0.200" in capsys.readouterr().out


def test_in_snowdrift_who_clears_nothing_is_aimless(onlookers, tmp_path):
    """`fix` never seeks: belief in what it is after is belief in aimlessness."""
    [agent] = make_agents(tmp_path, "a")
    onlookers.believe["a"] = lambda mind: np.array([0.7, 0.3])
    args = evaluate.Args(env_id="msd-4x4", beliefs=agent, belief_roles="fixed", runs=20, episodes=50)
    table = evaluate.watch_beliefs(args, agent, {})
    assert table["sought"].mean(0) == pytest.approx([0.5, 0.5])
    rows = evaluate.summarise_beliefs("all", [table])
    assert rows[-1]["belief in true kind"] == pytest.approx(0.5)
    with pytest.raises(envs.ConfigError, match="needs every kind of item on the board: stag, hare"):
        evaluate.watch_beliefs(evaluate.Args(beliefs=agent), agent, {"num_hares": 0})
