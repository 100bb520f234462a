"""hopplus_nomcts.py: one-step planning, imagined games and the loss against hand computations, and whole runs. What it
shares with hopplus_mcts.py (beliefs, imagined players, hindsight) is tested in test_hopplus.py, on both."""

import csv
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from boards import (
    HARE,
    ID,
    blank_nets,
    make_nets,
    make_state,
    play_some,
    pretrain,
    random_step,
    read_metrics,
    run_script,
    turn_seats,
)
from safetensors.torch import load_file

import envs
import evaluate
import hopplus_nomcts as hop
import pretrain_vae
import train_world_model
from envs import adaptation
from envs.grid import GONE, ITEM, PLAYERS, STAY, T
from envs.rng import draw_rows
from envs.roles import load_policy
from envs.run import main
from envs.trees import UNKNOWN
from train_world_model import ImaginedGames, World

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory) -> dict[tuple[str, bool], Path]:
    """World models that are far from perfect: (game, planes) -> checkpoint."""
    made = {}
    for env_id, planes in ((ID, False), (ID, True), ("msd-4x4", False)):
        size = {"num_transitions": 1500, "epochs": 2} if planes else {"num_transitions": 3000, "epochs": 12}
        small = size | {"batch_size": 128, "learning_rate": 1e-2, "hidden_size": 32, "env_id": env_id, "planes": planes}
        out_dir = str(tmp_path_factory.mktemp("world"))
        made[env_id, planes] = train_world_model.train(train_world_model.Args(out_dir=out_dir, **small))
    return made


@pytest.fixture(scope="module")
def goals(tmp_path_factory) -> dict[str, str]:
    """Goal checkpoints with named goals, by game."""
    return {env_id: pretrain(tmp_path_factory.mktemp("vae"), env_id, "oracle") for env_id in (ID, "msd-4x4")}


def load_world(worlds, env_id: str = ID, planes: bool = False):
    return train_world_model.load_checkpoint(worlds[env_id, planes])[0]


def make_planner(num_envs: int = 6, world=None, goal_mode="oracle", env_id=ID, blank=False, **settings):
    """An env and a planner on its beliefs; without a world model the rules are the world."""
    env = envs.make(env_id, num_envs=num_envs, seed=3)
    settings |= {"perfect_model": world is None, "goal_mode": goal_mode}
    args, nets = make_nets(hop, env.game, world=world, **settings)
    if blank:
        args, nets = blank_nets(hop, env.game, **{k: x for k, x in settings.items() if k != "goal_mode"})
    return env, hop.Planner(args, env.game, nets, hop.Beliefs(args, env.game, nets["models"], num_envs, 1))


def play_on(env, steps: int = 6) -> None:
    """Random legal steps, so that some players have left."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        random_step(env, rng)


def unknown_goals(planner, num: int):
    """Streams, goals, cells and codes of `num` draws in which nothing is known of the others."""
    others = planner.game.num_players - 1
    goals = np.tile(planner.unknown_goal.numpy(), (num, others, 1))
    streams = np.arange(num, dtype=np.uint64)[:, None]
    return streams, goals, np.full((num, others), -1), np.full((num, others), UNKNOWN)


# planning


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_scores_by_hand(scale):
    """Player 1 stands on a hare, the others far off: taking it pays 1 and is the end, all else is worth gamma V."""
    env, planner = make_planner(1, blank=True, draws=3, reward_scale=scale, gamma=0.9)
    planner.nets["agent"].value_head.bias += 2.0
    env.set_states(make_state(env.game, (0, 15, 15, 15), {0: ITEM + 1, 10: ITEM, 3: ITEM + 1})[None])
    planner.beliefs.look(env)
    plan = planner.plan(env.states, np.array([0]), np.array([0]))
    legal = env.legal[0, 0]
    score = np.where(np.arange(7) == HARE, scale, 2.0 * 0.9) * legal
    assert legal.sum() == 4 and np.allclose(plan.prior[0], legal / legal.sum()) and plan.value[0] == 2.0
    assert np.allclose(plan.q_values[0], score, atol=1e-6)
    policy = hop.planned_policy(planner.args, plan, 0.5)[0]
    expected = np.exp(0.97 * np.log(1 / legal.sum()) + 0.5 * score) * legal
    assert np.allclose(policy, expected / expected.sum(), atol=1e-6)


def test_scores_are_means_over_what_the_others_may_do():
    """Two players on the only hare, the other takes it now with probability 1/2: alone it pays 1, shared 1/2; who does
    not take it gets nothing then, and V if it is still there."""
    game = {"height": 1, "width": 2, "num_players": 2, "num_stags": 0, "num_hares": 1}
    env = envs.make(ID, num_envs=1, seed=0, **game)
    args, nets = blank_nets(hop, env.game, draws=4000, perfect_model=True, gamma=0.5)
    nets["agent"].value_head.bias += 4.0
    nets["models"].moa.head.bias[:4] = -60.0
    env.set_states(make_state(env.game, [1, 1], {1: ITEM + 1})[None])
    planner = hop.Planner(args, env.game, nets, hop.Beliefs(args, env.game, nets["models"], 1, 1))
    planner.beliefs.look(env)
    q_values = planner.plan(env.states, np.array([0]), np.array([0])).q_values[0]
    assert q_values[HARE] == pytest.approx(0.75, abs=0.03) and q_values[STAY] == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_hare_is_seen_from_as_many_steps_as_planning_looks_ahead(depth):
    """A player that values nothing yet, in a corridor: the hare is taken in the third step to come."""
    env = envs.make(ID, num_envs=1, seed=0, height=1, width=6, num_players=2, num_stags=0, num_hares=2)
    args, nets = blank_nets(hop, env.game, perfect_model=True, gamma=0.5, plan_depth=depth, play_beta=1000.0)
    planner = hop.Planner(args, env.game, nets, hop.Beliefs(args, env.game, nets["models"], 1, 1))
    for away in range(3):
        env.set_states(make_state(env.game, [0, 5], {away: ITEM + 1, 5: ITEM + 1})[None])
        planner.beliefs.look(env)
        q_values = planner.plan(env.states, np.array([0]), np.array([0])).q_values[0]
        expected = 0.5**away if away < depth else 0.0
        assert q_values[HARE if away == 0 else 3] == pytest.approx(expected, abs=1e-6)  # 3: to the right
        assert (q_values[~env.legal[0, 0]] == 0).all()


def test_where_nobody_else_is_left_all_ways_on_are_followed():
    """A corridor with a hare in three steps: who is alone sees it. Decisions come back in their order."""
    env = envs.make(ID, num_envs=3, seed=0, height=1, width=6, num_players=2, num_stags=0, num_hares=2)
    args, nets = blank_nets(hop, env.game, perfect_model=True, gamma=0.5, play_beta=1000.0, draws=3)
    planner = hop.Planner(args, env.game, nets, hop.Beliefs(args, env.game, nets["models"], 3, 1))
    boards = [make_state(env.game, [0, other], {2: ITEM + 1, 5: ITEM + 1}) for other in (5, GONE, 5)]
    env.set_states(np.stack(boards))
    planner.beliefs.look(env)
    plan = planner.plan(env.states, np.arange(3), np.zeros(3, int))
    assert plan.q_values[:, 3] == pytest.approx([0.0, 0.25, 0.0], abs=1e-6)


def best_by_hand(game, state, player, scale, gamma) -> np.ndarray:
    """(A,) what each legal action is worth on the best way on, one board after the other by the rules, to the end."""
    q_values = np.zeros(game.num_actions)
    for action in np.flatnonzero(game.legal(state[None])[0, player]):
        joint = np.full((1, game.num_players), STAY)
        joint[0, player] = action
        out = game.simulate(state[None], joint)
        q_values[action] = scale * out.reward[0, player]
        if not (out.terminated | out.truncated)[0, player]:
            later = best_by_hand(game, out.states[0], player, scale, gamma)
            q_values[action] += gamma * later[game.legal(out.states)[0, player]].max()
    return q_values


def test_the_best_way_on_alone_is_that_of_all_ways_one_by_one(monkeypatch):
    """With blocks, until time is up in one to five steps; each distinct step is imagined once."""
    env = envs.make(ID, num_envs=12, seed=3, max_block_comp=1)
    row, player = np.arange(12), np.arange(12) % 4
    states = env.states.copy()
    for seat in range(1, 4):
        states[row, PLAYERS + (player + seat) % 4] = GONE
    states[:, T] = env.game.config.horizon - 1 - row % 5
    asked, step = [], World.step
    monkeypatch.setattr(World, "step", lambda *x: asked.append(np.column_stack(x[1:])) or step(*x))
    raw = lambda boards, *_: (None, np.ones(len(boards)))  # noqa: E731
    found, policy = World(env.game, None).ways_on(states, player, 9, 2.0, 0.9, raw)
    assert len(np.unique(np.concatenate(asked), axis=0)) == sum(map(len, asked))
    for r in row:
        by_hand = best_by_hand(env.game, states[r], player[r], 2.0, 0.9)
        best = env.game.legal(states[r][None])[0, player[r]] & (by_hand >= by_hand.max() - 1e-6)
        assert found[r] == pytest.approx(by_hand, abs=1e-5) and policy[r] == pytest.approx(best / best.sum())
    assert (found.max(1) > 0).sum() > 4


def test_boards_that_are_too_far_away_have_their_raw_value():
    """In a corridor without prey near: two steps are imagined, where they lead is as good as the network says."""
    game = envs.game(ID, height=1, width=6, num_players=2, num_stags=0, num_hares=1)
    state = make_state(game, [0, GONE], {5: ITEM + 1})[None]
    asked = []

    def raw(boards, row, player):
        asked.extend(boards[:, PLAYERS].tolist())
        return None, np.full(len(boards), 7.0)

    found, _ = World(game, None).ways_on(state, np.array([0]), 2, 1.0, 0.5, raw)
    assert asked == [2] and found[0, 3] == pytest.approx(0.25 * 7.0) and found[0, STAY] == pytest.approx(0.125 * 7.0)


def test_looking_deeper_is_planning_again_on_the_next_board(monkeypatch):
    """Alone on the board nothing is left to chance: the scores of the best actions by hand, from plans one step ahead;
    no other action counts for more than these, and none is followed."""
    monkeypatch.setattr(hop.forest, "in_two_parts", lambda first, plan: plan(np.full(len(first), True), False))
    env, planner = make_planner(8)
    play_on(env, 3)
    env.states[:, PLAYERS + 1 : PLAYERS + 4] = -1  # the others have left
    env.set_states(env.states)
    args, game, row, focal = planner.args, env.game, np.arange(8), np.zeros(8, int)
    planner.beliefs.look(env)
    near = planner.plan(env.states, row, focal)
    args.plan_depth, asked = 2, []
    look_ahead = planner.look_ahead
    monkeypatch.setattr(planner, "look_ahead", lambda *x: asked.append(len(x[1])) or look_ahead(*x))
    far = planner.plan(env.states, row, focal)
    monkeypatch.setattr(planner, "look_ahead", look_ahead)
    assert asked[0] == 8 and asked[1] <= 8 * planner.WIDTH * args.draws
    args.plan_depth = 1
    for r in range(8):
        legal = np.flatnonzero(near.legal[r])
        best = sorted(legal, key=lambda action: near.q_values[r, action])[-planner.WIDTH :]
        for action in best:
            joint = np.array([[action, STAY, STAY, STAY]])
            ahead = planner.world.step(env.states[r : r + 1], joint)
            after = 0.0
            if not ahead.ended[0, 0]:
                after_env = envs.make(ID, num_envs=1, seed=1)
                after_env.set_states(ahead.states)
                beliefs = hop.Beliefs(args, game, planner.nets["models"], 1, 1)
                beliefs.look(after_env)
                plan = hop.Planner(args, game, planner.nets, beliefs).plan(ahead.states, np.array([0]), np.array([0]))
                after = (hop.planned_policy(args, plan, args.play_beta) * plan.q_values).sum()
            assert far.q_values[r, action] == pytest.approx(ahead.reward[0, 0] + args.gamma * after, abs=1e-5)
        others = [far.q_values[r, action] for action in legal if action not in best]
        assert max(others, default=-9.0) <= min(far.q_values[r, action] for action in best) + 1e-6


@pytest.mark.parametrize("perfect", [True, False])
def test_scores_are_those_of_one_imagined_step_each(worlds, perfect, monkeypatch):
    """Distinct steps are imagined once, which changes nothing: compared with every action and draw by itself."""
    env, planner = make_planner(12, None if perfect else load_world(worlds), draws=3)
    play_on(env)
    planner.beliefs.look(env)
    env_row, focal = np.nonzero(env.alive)
    rng = np.random.default_rng(2)
    joint = (rng.random((len(env_row), 3, 4, 7)) * env.legal[env_row][:, None]).argmax(3)
    asked, step = [], planner.world.step
    monkeypatch.setattr(planner.world, "step", lambda *x: asked.append(len(x[0])) or step(*x))
    legal = env.legal[env_row, focal]
    score = planner.look_ahead(env.states, env_row, focal, legal, joint, unknown_goals(planner, 3 * len(env_row)), 1)
    assert sum(asked) < 3 * legal.sum()
    for r, (row, player) in enumerate(zip(env_row, focal, strict=True)):
        for action in np.flatnonzero(legal[r]):
            worth = []
            for draw in range(3):
                actions = joint[r, draw].copy()
                actions[player] = action
                ahead = step(env.states[row : row + 1], actions[None])
                after = planner.raw(ahead.states, np.array([0]), np.array([player]))[1][0]
                worth.append(ahead.reward[0, player] + planner.args.gamma * after * ~ahead.ended[0, player])
            assert score[r, action] == pytest.approx(np.mean(worth), abs=1e-5)
        assert (score[r][~legal[r]] == 0).all()


def test_goals_whose_item_is_gone_are_unknown_on_imagined_boards():
    """The value of a board is asked with the goals drawn; of who left, and where a goal's item was taken, unknown."""
    env, planner = make_planner(8)
    play_on(env, 8)
    assert not env.alive.all()
    row, focal = np.nonzero(env.alive)
    rng, board = np.random.default_rng(0), env.states[row][:, PLAYERS + 4 :]
    code = rng.choice([ITEM, ITEM + 1], size=(len(row), 3))
    cell = np.where(rng.random(code.shape) < 0.5, rng.integers(16, size=code.shape), -1)
    goals = rng.normal(size=(*code.shape, planner.nets["models"].goal_size)).astype(np.float32)
    there = np.where(cell >= 0, np.take_along_axis(board, np.maximum(cell, 0), 1) == code, False)
    there |= (cell < 0) & (board[:, None, :] == code[:, :, None]).any(2)
    there &= env.alive[row[:, None], (focal[:, None] + 1 + np.arange(3)) % 4]
    assert 0.2 < there.mean() < 0.8
    known = np.where(there[..., None], goals, planner.unknown_goal.numpy())
    worth = planner.worth(env.states, row, focal, np.zeros((len(row), 1), np.uint64), goals, cell, code, 0)
    np.testing.assert_array_equal(worth, planner.ask(env.states, row, focal, known)[1])
    assert not np.allclose(worth, planner.ask(env.states, row, focal, goals)[1])


def test_scores_do_not_depend_on_the_seat(worlds):
    env, planner = make_planner(20, load_world(worlds), goal_mode="none", draws=1)
    play_on(env)
    planner.beliefs.look(env)
    env_row, focal = np.nonzero(env.alive)
    joint = (np.random.default_rng(2).random((len(env_row), 1, 4, 7)) * env.legal[env_row][:, None]).argmax(3)
    legal, nothing = env.legal[env_row, focal], unknown_goals(planner, len(env_row))
    turned = turn_seats(env.game, env.states)
    scores = planner.look_ahead(env.states, env_row, focal, legal, joint, nothing, 1)
    again = planner.look_ahead(turned, env_row, (focal + 1) % 4, legal, np.roll(joint, 1, 2), nothing, 1)
    assert np.allclose(scores, again, atol=1e-5)


def test_the_others_do_what_the_opponent_model_says(monkeypatch):
    """Of the steps that are imagined: who left stays, all actions are legal, and their frequencies are the model's."""
    env, planner = make_planner(64, draws=50)
    play_on(env, 8)
    planner.beliefs.look(env)
    env_row, focal = np.nonzero(env.alive & (env.alive.sum(1) > 1)[:, None])  # who is alone needs but one draw
    caught = {}
    ahead = planner.look_ahead
    monkeypatch.setattr(planner, "look_ahead", lambda *x: caught.update(joint=x[4].copy()) or ahead(*x))
    planner.plan(env.states, env_row, focal)
    expected, joint = planner.beliefs.predict(), caught["joint"]  # (R, 50, N)
    assert not env.alive.all()
    for k in range(1, 4):
        player = (focal + k) % 4
        actions = joint[np.arange(len(focal)), :, player]  # (R, 50)
        here = env.alive[env_row, player]
        assert (actions[~here] == STAY).all()
        assert np.take_along_axis(env.legal[env_row, player], actions, 1).all()
        found = np.eye(7)[actions[here]].mean((0, 1))
        assert np.allclose(found, expected[env_row, player][here].mean(0), atol=0.03)


def test_without_a_world_nothing_is_planned():
    env = envs.make(ID, num_envs=6, seed=3)
    args, nets = make_nets(hop, env.game, "oracle", world_model=False)
    planner = hop.Planner(args, env.game, nets, hop.Beliefs(args, env.game, nets["models"], 6, 1))
    planner.beliefs.look(env)
    row, focal = np.nonzero(env.alive)
    plan = planner.plan(env.states, row, focal)
    assert planner.world is None
    assert (plan.q_values == np.where(plan.legal, plan.value[:, None], 0)).all()
    assert (hop.playing_policy(args, plan, 50.0) == plan.prior).all()
    prior, value, _ = planner.ask(env.states, row, focal, plan.goals)
    assert np.allclose(plan.prior, prior, atol=1e-6) and np.allclose(plan.value, value, atol=1e-6)


# imagined games


@pytest.mark.parametrize(("env_id", "planes"), [(ID, False), (ID, True), ("msd-4x4", False)])
def test_imagined_games_keep_to_the_rules(worlds, env_id, planes):
    """With a poor model: only legal actions, nobody comes back or is paid after leaving, ends are ends; games start
    from boards of real play and are cut after the horizon."""
    env, planner = make_planner(40, load_world(worlds, env_id, planes), env_id=env_id, draws=2)
    beliefs, num_players, horizon = planner.beliefs, env.spec.num_players, 12
    games = ImaginedGames(envs.make(env_id, num_envs=4, seed=8), planner.world, 36, horizon, seed=1)
    last_item = games.boards.copy()  # players 1 and 2 stand on the only item left: taking it is the end
    last_item[:, PLAYERS + num_players :] = 0
    last_item[:, PLAYERS + 1] = last_item[:, PLAYERS]
    last_item[np.arange(4), PLAYERS + num_players + last_item[:, PLAYERS]] = ITEM + len(env.game.kinds) - 1
    games.boards = np.concatenate([games.boards, last_item])
    imagined = hop.ImaginedPlayers(beliefs, 4, list(range(num_players)), 2)
    rng, age = np.random.default_rng(3), np.zeros(36, int)
    overs = cuts = left = 0
    for _ in range(30):
        beliefs.look(games)
        actions = np.full((40, num_players), STAY)
        imagined.act(actions)
        plans = games.alive & (np.arange(40) < 4)[:, None]
        plans[imagined.rows, imagined.focal] = games.alive[imagined.rows, imagined.focal]
        env_row, focal = np.nonzero(plans)
        policy = hop.acting_policy(planner.args, planner.plan(games.states, env_row, focal), 4.0)
        actions[env_row, focal] = draw_rows(policy, rng)
        assert np.take_along_axis(games.legal, actions[:, :, None], 2).all()
        assert (actions[~games.alive] == STAY).all()
        before, alive = games.states[4:].copy(), games.alive[4:].copy()
        found = games.step(actions)
        beliefs.watch(actions, found["taken"], games.alive, found["done"])
        after, on_board = found["after"], env.game.alive(found["after"])
        assert not (on_board & ~alive).any(), "who left stays gone"
        assert (found["reward"][4:][~alive] == 0).all() and not found["ended"][4:][~alive].any()
        assert (found["ended"][4:] | ~alive | on_board).all(), "leaving is an end"
        done, cut = found["done"][4:], found["cut"][4:]
        over = done & ~cut
        assert not found["cut"][:4].any() and not found["taken"][4:].any()
        assert (found["ended"][4:][over] | ~alive[over]).all(), "an episode's end is everybody's"
        assert not (found["ended"][4:] & on_board)[cut].any(), "a cut is nobody's end"
        assert (after[:, T] == before[:, T] + 1).all()
        age += 1
        assert (age <= horizon).all() and (done | (age < horizon)).all()
        assert ((age == horizon) | (after[:, T] >= env.spec.horizon))[cut].all()
        start = games.states[4:][done]
        assert (start[:, None] == games.boards).all(2).any(1).all(), "a new game starts from a board of real play"
        assert (games.states[4:][~done] == after[~done]).all()
        age[done] = 0
        overs, cuts, left = overs + over.sum(), cuts + cut.sum(), left + (alive & ~on_board).sum()
        if not planes:
            codes = slice(PLAYERS + num_players, None)
            assert ((after[:, codes] == before[:, codes]) | (after[:, codes] == 0)).all(), "no item appears"
            rows, columns = np.divmod(np.stack([before, after])[:, :, PLAYERS : PLAYERS + num_players], 4)
            far = np.abs(np.diff(rows, axis=0)) + np.abs(np.diff(columns, axis=0))
            assert (far[0][on_board] <= 1).all(), "nobody moves two cells"
    assert cuts + overs > 0 and (planes or min(cuts, overs) > 0) and (planes or left > 0 or env_id != ID)


def test_a_model_that_forgets_the_time_limit_is_cut():
    """A world in which nothing ever ends: at the horizon of the game the imagined game is cut, however young."""
    env = envs.make(ID, num_envs=2, seed=0)
    alive = env.game.alive

    def step(states, actions):
        after = states.copy()
        after[:, T] += 1
        nothing = np.zeros(len(states), bool)
        return train_world_model.Ahead(after, np.zeros((len(states), 4)), ~alive(after), nothing)

    games = ImaginedGames(env, SimpleNamespace(step=step), 6, horizon=100, seed=0)
    games.imagined[:, T] = env.spec.horizon - 2
    games.look()
    actions = np.full((8, 4), STAY)
    assert not games.step(actions)["done"][2:].any()
    found = games.step(actions)
    assert found["cut"][2:].all() and not found["ended"][2:].any() and (games.imagined[:, T] < 3).all()


def test_the_perfect_world_is_the_game():
    env = envs.make(ID, num_envs=50, seed=3)
    world, rng = World(env.game, None), np.random.default_rng(1)
    for _ in range(30):
        actions, alive = (rng.random(env.legal.shape) * env.legal).argmax(2), env.alive.copy()
        ahead = world.step(env.states.copy(), actions)
        _, reward, terminated, truncated, info = env.step(actions)
        assert (ahead.reward == reward).all() and (ahead.over == info["done"]).all()
        assert (ahead.ended == (terminated | truncated)).all() and not ahead.ended[~alive].any()
        assert (ahead.states[~info["done"]] == env.states[~info["done"]]).all()


def test_team_reward_is_shared_in_imagination(worlds):
    model = load_world(worlds)
    game, states = play_some(num=50)
    actions = (np.random.default_rng(1).random((50, 4, 7)) * game.legal(states)).argmax(2)
    own = World(game, model).step(states, actions)
    shared = World(envs.game(ID, prosocial=True), model).step(states, actions)
    assert own.reward.any()
    assert np.allclose(shared.reward, np.where(game.alive(states), own.reward.mean(1, keepdims=True), 0.0))


def test_imagined_games_go_on_exactly_from_what_was_saved(worlds):
    world = World(envs.game(ID), load_world(worlds))

    def make():
        return ImaginedGames(envs.make(ID, num_envs=3, seed=1), world, 9, 5, seed=2)

    def play(games, steps):
        rng = np.random.default_rng(steps)
        for _ in range(steps):
            games.step((rng.random(games.legal.shape) * games.legal).argmax(2))
        return games.states

    games, other = make(), make()
    play(games, 7)
    saved = {name: array.copy() for name, array in games.get_state().items()}
    expected = play(games, 11).copy()
    other.set_state(saved)
    assert (play(other, 11) == expected).all()


# learning


def test_returns_by_hand():
    """gamma .5, lambda .5; columns: plays on, ends in step 1, an imagined game that is cut in step 1."""
    reward = np.array([[0.0, 0.0, 0.0], [4.0, 4.0, 4.0], [8.0, 8.0, 8.0]], np.float32)[:, None]
    value = np.array([[9.0, 9.0, 9.0], [2.0, 2.0, 2.0], [6.0, 6.0, 6.0]], np.float32)[:, None]
    next_value = np.concatenate([value[1:], np.full((1, 1, 3), 4.0, np.float32)])
    next_value[1, 0, 2] = 12.0  # of the board at which the game was cut
    ended, cut = np.zeros((3, 1, 3), bool), np.zeros((3, 1, 3), bool)
    ended[1, 0, 1] = cut[1, 0, 2] = True
    got = hop.lambda_returns(reward, value, next_value, ended, cut, np.full(reward.shape, 0.5), 0.5)
    # step 2: 8 + .5 * 4 = 10; step 1: 4 + .5 (.5 * 6 + .5 * 10) = 8 | 4 | 4 + .5 * 12 = 10
    # step 0: .5 (.5 * 2 + .5 * that) = 2.5 | 1.5 | 3
    assert np.allclose(got[:, 0], [[2.5, 1.5, 3.0], [8.0, 4.0, 10.0], [10.0, 10.0, 10.0]])


def own_rows(planner, env, planned: bool) -> dict[str, torch.Tensor]:
    """Decisions as the rollout stores them, of planned or raw policies (both given the goals drawn)."""
    planner.beliefs.look(env)
    env_row, focal = np.nonzero(env.alive)
    plan = planner.plan(env.states, env_row, focal)
    prior, _, _ = planner.ask(env.states, env_row, focal, plan.goals)
    policy = hop.acting_policy(planner.args, plan, 4.0) if planned else prior
    action = draw_rows(policy, np.random.default_rng(0))
    each, rng = np.arange(len(action)), np.random.default_rng(1)
    rows = {"seen": planner.things(env.obs[env_row, focal]), "t": planner.things.time(env.t)[env_row]}
    rows |= {"legal": env.legal[env_row, focal], "goals": plan.goals, "policy": policy, "action": action}
    rows |= {"log_prob": np.log(policy[each, action]), "advantage": rng.normal(size=len(each)).astype(np.float32)}
    rows |= {"returns": rng.normal(size=len(each)).astype(np.float32)}
    return {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in rows.items()}


def test_the_ratio_is_to_the_policy_that_acted():
    """Unplanned rows: the raw policy acted, so the ratio is 1. Planned ones: it is raw / planned."""
    env, planner = make_planner(30)
    play_on(env)
    agent = planner.nets["agent"]
    losses = hop.agent_loss(planner.args, agent, own_rows(planner, env, planned=False), 0.0)
    assert abs(losses["approx_kl"].item()) < 1e-5 and losses["clipfrac"].item() == 0.0
    mb = own_rows(planner, env, planned=True)
    losses = hop.agent_loss(planner.args, agent, mb, 0.0)
    log_probs, value = agent(mb["seen"], mb["t"], mb["legal"], mb["goals"])
    ratio = (log_probs.gather(1, mb["action"][:, None])[:, 0] - mb["log_prob"]).exp()
    assert ratio.std() > 0
    assert losses["clipfrac"].item() == pytest.approx(((ratio - 1).abs() > 0.2).float().mean().item())
    advantage = (mb["advantage"] - mb["advantage"].mean()) / mb["advantage"].std(correction=0)
    clipped = torch.minimum(advantage * ratio, advantage * ratio.clamp(0.8, 1.2))
    assert losses["policy_loss"].item() == pytest.approx(-clipped.mean().item(), rel=1e-4)
    assert losses["plan_loss"].item() == pytest.approx(-(mb["policy"] * log_probs.clamp_min(-1e8)).sum(1).mean().item())
    assert losses["value_loss"].item() == pytest.approx(0.5 * (value - mb["returns"]).pow(2).mean().item(), rel=1e-5)
    parts = ("policy_loss", "value_loss", "plan_loss", "entropy_loss")
    assert losses["loss"].item() == pytest.approx(sum(losses[name].item() for name in parts), rel=1e-5)
    single = hop.agent_loss(planner.args, agent, {name: x[:1] for name, x in mb.items()}, 0.0)
    assert torch.isfinite(single["loss"])  # a minibatch of one decision


def test_every_loss_weight_changes_the_update():
    env, planner = make_planner(30)
    play_on(env)
    mb, agent = own_rows(planner, env, planned=True), planner.nets["agent"]

    def gradient(ent_coef: float = 0.01, **settings):
        agent.zero_grad()
        hop.agent_loss(hop.Args(**settings), agent, mb, ent_coef)["loss"].backward()
        return torch.cat([weight.grad.flatten() for weight in agent.parameters()])

    usual = gradient()
    assert torch.equal(usual, gradient())
    for other in (gradient(0.1), gradient(vf_coef=0.1), gradient(clip_coef=0.05)):
        assert not torch.equal(usual, other)


def test_the_world_is_scored_on_fresh_steps_before_it_learns_from_them(worlds, goals, tmp_path, monkeypatch):
    """And only from real steps, whole ones: what followed is what the rules say, also where an episode ended."""
    events = []
    score, update = train_world_model.score_fresh, hop.update

    def watch_score(model, data):
        events.append(("score", data["states"].copy(), model.move_head.weight.detach().clone()))
        return score(model, data)

    def watch_update(args, nets, optimizers, data, *rest):
        rows = {name: x.copy() for name, x in data["world"].items()}
        events.append(("update", rows, nets["world"].move_head.weight.detach().clone()))
        return update(args, nets, optimizers, data, *rest)

    monkeypatch.setattr(train_world_model, "score_fresh", watch_score)
    monkeypatch.setattr(hop, "update", watch_update)
    flags = ["--goal-mode", "oracle", "--vae-ckpt", goals[ID], "--world-ckpt", str(worlds[ID, False]), "--prosocial"]
    flags += ["--num-envs", "2", "--num-steps", "36", "--total-timesteps", "216", "--eval-every", "0"]
    assert run_script(hop, tmp_path / "run", *flags) == 0
    assert [kind for kind, *_ in events] == ["score", "update"] * 3
    for (_, fresh, scored), (_, learned, about_to_learn) in zip(events[::2], events[1::2], strict=True):
        assert len(fresh) == 72 and (learned["states"][-72:] == fresh).all() and torch.equal(scored, about_to_learn)
    assert not torch.equal(events[0][2], events[-1][2]), "it does learn"
    game, rows = envs.game(ID), events[-1][1]
    out = game.simulate(rows["states"], rows["actions"])
    assert (out.states == rows["next_states"]).all() and (out.reward == rows["reward"]).all()
    assert (game.over(out.states) == rows["end"]).all() and rows["end"].any() and len(rows["end"]) == 216


# whole runs


@pytest.fixture(scope="module")
def finished(worlds, goals, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    flags = ["--goal-mode", "oracle", "--vae-ckpt", goals[ID], "--world-ckpt", str(worlds[ID, False])]
    assert run_script(hop, run_dir, *flags) == 0
    return run_dir


def test_a_run_leaves_what_it_should(finished):
    rows = read_metrics(finished)
    assert int(rows[-1]["global_step"]) == 512
    for name in ("charts/episodic_return", "charts/episodic_return-player4", "losses/policy_loss", "losses/plan_loss",
                 "losses/value_loss", "losses/world_loss", "losses/moa_loss", "losses/goal_loss", "moa/top1",
                 "moa/top3", "wm/exact", "wm/reward_mse", "wm/end_accuracy", "wm/impossible", "planner/kl",
                 "eval/return", "eval/raw_return", "planner/policy_gain", "goal/belief"):  # fmt: skip
        assert any(row[name] for row in rows), name
    result = json.loads((finished / "result.json").read_text())
    assert result["finished"] and result["global_step"] == 512 and result["eval"]["episodes"] == 8
    for name in ("last", "best"):
        spec = json.loads((finished / "checkpoints" / name / "spec.json").read_text())
        assert spec["script"] == "hopplus_nomcts.py" and spec["env_id"] == ID


class Killed(BaseException):
    """The process ends here; nothing more is saved."""


def test_a_killed_run_resumes_to_the_same_bits(finished, worlds, goals, tmp_path, monkeypatch):
    """Beliefs, imagined games and their players, replay, world model: all that a run carries on."""
    run_dir, update, count = tmp_path / "killed", hop.update, [0]

    def update_or_die(*args):
        count[0] += 1
        if count[0] == 6:
            raise Killed
        return update(*args)

    flags = ["--goal-mode", "oracle", "--vae-ckpt", goals[ID], "--world-ckpt", str(worlds[ID, False])]
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(hop, "update", update_or_die)
        run_script(hop, run_dir, *flags)
    assert json.loads((run_dir / "checkpoints" / "last" / "spec.json").read_text())["iteration"] == 3
    assert main(hop.Args, hop.train, ["--resume", str(run_dir)]) == 0
    assert read_metrics(run_dir) == read_metrics(finished)
    for name in ("last", "best"):
        weights, expected = (load_file(d / "checkpoints" / name / "weights.safetensors") for d in (run_dir, finished))
        assert all(torch.equal(weights[key], expected[key]) for key in expected)


def test_a_run_with_fitting_checkpoints_learns_nothing_offline(worlds, goals, tmp_path, monkeypatch):
    for module, name in ((pretrain_vae, "train"), (pretrain_vae, "train_reader"), (train_world_model, "train")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("offline learning in a run"))
    flags = ["--goal-mode", "oracle", "--vae-ckpt", goals[ID], "--world-ckpt", str(worlds[ID, False])]
    assert run_script(hop, tmp_path / "run", *flags, "--total-timesteps", "64", "--eval-every", "0") == 0
    weights = load_file(tmp_path / "run" / "checkpoints" / "last" / "weights.safetensors")
    change = weights["world.move_head.weight"] - load_world(worlds).move_head.weight
    assert 0 < change.abs().max() < 0.01  # it went on from there


def test_a_missing_world_model_is_made_first_and_said(worlds, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    wanted, made = [], worlds[ID, False]
    monkeypatch.setattr(train_world_model, "train", lambda args: wanted.append(args) or made)
    folder, model = train_world_model.prepare("", ID, 4)
    assert folder == made and model.game.env_id == ID
    assert wanted[0].env_id == ID and wanted[0].seed == 4 and not wanted[0].planes
    assert f"no world model for {ID} in vae_ckpts/" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("env_id", "flags"),
    [
        (ID, ["--perfect-model", "--start-window", "3", "--max-block-comp", "1"]),
        (ID, ["--no-world-model"]),
        (ID, ["--real-ratio", "1.0", "--roles", "hop,ns,nh,hop", "--prosocial"]),
        ("msd-4x4", ["--real-ratio", "0.3", "--plan-depth", "2"]),
    ],
)
def test_other_settings_run(worlds, goals, tmp_path, env_id, flags):
    learns_world = not {"--perfect-model", "--no-world-model"} & {*flags}
    flags = [*flags, "--env-id", env_id, "--goal-mode", "oracle", "--vae-ckpt", goals[env_id]]
    flags += ["--world-ckpt", str(worlds[env_id, False])] if learns_world else []
    assert run_script(hop, tmp_path / "run", *flags, "--total-timesteps", "256") == 0
    rows = read_metrics(tmp_path / "run")
    assert any(row.get("wm/exact") for row in rows) == learns_world
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert np.isfinite(result["eval"]["return"])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--real-ratio", "0"], "--real-ratio must be from 0.01 to 1, not 0"),
        (["--start-window", "2", "--perfect-model"], "2x2 cannot hold 5 items"),
        (["--world-ckpt", "no/such"], "no/such"),
        (["--world-ckpt", "OTHER GAME"], "msd-4x4"),
    ],
)
def test_settings_that_cannot_be_are_one_line(worlds, goals, tmp_path, flags, words, capsys):
    flags = [str(worlds["msd-4x4", False]) if flag == "OTHER GAME" else flag for flag in flags]
    assert run_script(hop, tmp_path / "run", "--goal-mode", "oracle", "--vae-ckpt", goals[ID], *flags) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1, said


# playing what was trained


def test_a_checkpoint_plays_and_adapts(finished):
    env = envs.make(ID, num_envs=8, seed=9)
    policy = load_policy(str(finished), env, 2, seed=0, greedy=True)
    weights = load_file(finished / "checkpoints" / "best" / "weights.safetensors")
    for name, weight in policy.planner.nets.state_dict().items():
        assert torch.equal(weight, weights[name]), name
    assert policy.planned and policy.planner.world.model is policy.planner.nets["world"]
    assert np.take_along_axis(env.legal[:, 2], policy.act(env)[:, None], 1).all()
    line_ups = [[["ns", "nh", "random"]], [["ns"] * 3, ["tft"] * 3]]
    returns = adaptation.adapt_among(evaluate.Args(runs=2), str(finished), line_ups, {}, "raw", {})
    assert returns.shape == (2, 2, 30) and np.isfinite(returns).all()


def test_checkpoints_are_watched_and_pooled(finished, tmp_path):
    """Twice the same agent: pooled steps are those of both, each in games of its own; all kinds' beliefs sum to one."""
    again = shutil.copytree(finished, tmp_path / "again")
    files = {"csv": str(tmp_path / "b.csv"), "plot": str(tmp_path / "b.png")}
    agents = f"{finished},{again}"
    evaluate.main(evaluate.Args(beliefs=agents, runs=8, episodes=16, belief_roles="fixed", **files))
    with open(tmp_path / "b.csv", newline="") as file:
        steps = {row["agent"]: int(row["steps"]) for row in csv.DictReader(file) if row["actions seen"] == "all"}
    assert steps["all"] == steps[str(finished)] + steps[str(again)] and (tmp_path / "b.png").stat().st_size > 5000
    table = evaluate.watch_beliefs(evaluate.Args(runs=8, episodes=16), str(finished), {})
    believed = table["believed"][np.isfinite(table["exact"])]
    assert len(believed) and believed.min() >= 0 and believed.sum(1) == pytest.approx(1.0, abs=1e-5)
    (rows,) = adaptation.adaptation(evaluate.Args(adaptation=agents, runs=2, line_ups="ns,nh,random"), {})
    for pooled, first, second in (rows[:3], rows[3:]):
        assert pooled["16-30"] == pytest.approx((first["16-30"] + second["16-30"]) / 2) and pooled["runs"] == 4
