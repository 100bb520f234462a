"""The compiled core against the plain reference (reference.py), step for step; and both against worked examples."""

import random

import numpy as np
import pytest
import reference
from reference import CLEAR, DOWN, HARE, LEFT, RIGHT, STAG, STAY, UP, Snowdrift, StagHunt, State

import envs
from benchmarks.numpy_stag_hunt import NumpyStagHunt


def core_game(rules, **overrides):
    env_id = "msh-4h1s-4x4" if isinstance(rules, StagHunt) else "msd-4x4"
    return envs.game(env_id, **{**reference.settings(rules), **overrides})


def planes(rules, states):
    """What the reference sees: (B, N, H, W, C)."""
    shape = (len(states), rules.num_players, rules.height, rules.width, rules.num_players + 1 + len(rules.kinds))
    obs = np.zeros(shape, dtype=np.uint8)
    for row, state in enumerate(states):
        for player in range(rules.num_players):
            for place in rules.ones(state, player):
                obs[(row, player, *place)] = 1
    return obs


def masks(rules, states):
    legal = np.zeros((len(states), rules.num_players, rules.num_actions), dtype=bool)
    for row, state in enumerate(states):
        for player in range(rules.num_players):
            legal[row, player, list(rules.legal(state, player))] = True
    return legal


def on_board(states):
    return np.array([[cell is not None for cell in state.players] for state in states])


def rows(rules, states):
    return np.array([reference.to_row(rules, state) for state in states], dtype=np.int16)


def column(outcomes, name):
    return np.array([getattr(outcome, name) for outcome in outcomes])


def kinds_taken(rules, outcomes):
    return np.array([[0 if kind is None else 1 + rules.kinds.index(kind) for kind in o.taken] for o in outcomes])


def play_beside_the_core(rules, game, states, rng, steps):
    """Steps the reference and the core from the same states with the same actions; every number must agree."""
    now = rows(rules, states)
    buffers = game.transition(len(states))
    for step in range(steps):
        actions = [reference.random_actions(rules, state, rng) for state in states]
        outcomes = [rules.step(state, action) for state, action in zip(states, actions, strict=True)]
        given = now.copy()
        new = game.simulate(now, np.array(actions), out=buffers if step % 2 else None)
        where = f"{rules}, step {step}"
        np.testing.assert_array_equal(now, given, err_msg=f"simulate changed its input: {where}")
        np.testing.assert_allclose(new.reward, column(outcomes, "reward"), rtol=1e-6, atol=1e-6, err_msg=where)
        np.testing.assert_array_equal(new.terminated, column(outcomes, "terminated"), err_msg=where)
        np.testing.assert_array_equal(new.truncated, column(outcomes, "truncated"), err_msg=where)
        np.testing.assert_array_equal(new.taken, kinds_taken(rules, outcomes), err_msg=where)
        np.testing.assert_array_equal(new.illegal, column(outcomes, "illegal"), err_msg=where)
        states = [outcome.state for outcome in outcomes]
        now = new.states.copy()
        np.testing.assert_array_equal(now, rows(rules, states), err_msg=where)
        np.testing.assert_array_equal(game.observe(now), planes(rules, states), err_msg=where)
        np.testing.assert_array_equal(game.legal(now), masks(rules, states), err_msg=where)
        np.testing.assert_array_equal(game.alive(now), on_board(states), err_msg=where)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("some_rules", [reference.random_stag_hunt, reference.random_snowdrift])
def test_core_matches_reference_on_random_games(some_rules, seed):
    """Thousands of games of random size, players, items, blocks and options, from the start and from mid-game."""
    rng = random.Random(f"{some_rules.__name__} {seed}")
    for _ in range(12):
        rules = some_rules(rng)
        left, late = rng.choice([(0.0, 0.0), (0.4, 0.8)])
        num_blocks = rng.choice([0, 0, 2, 6])
        states = [reference.random_state(rules, rng, num_blocks, left, late) for _ in range(24)]
        play_beside_the_core(rules, core_game(rules), states, rng, steps=min(rules.horizon, 16) + 1)


@pytest.mark.parametrize("env_id", ["msh-4h1s-4x4", "msh-4h2s-8x8", "msd-6x6"])
def test_core_matches_reference_from_its_own_starts(env_id):
    """Whole games of the named settings, with the blocks the game draws itself."""
    rng = random.Random(env_id)
    game = envs.game(env_id, max_block_comp=2 if env_id != "msh-4h1s-4x4" else 0)
    book = StagHunt if env_id.startswith("msh") else Snowdrift
    names = set(reference.settings(book()))
    rules = book(**{name: value for name, value in vars(game.config).items() if name in names and value != ()})
    states = [reference.from_row(rules, row) for row in game.draw(7, 24)]
    assert all(state.t == 0 and state.deadline == rules.horizon for state in states)
    play_beside_the_core(rules, game, states, rng, steps=rules.horizon + 1)


@pytest.mark.parametrize("env_id", ["msh-4h1s-4x4", "msh-4h2s-4x4", "msd-4x4"])
def test_batched_env_matches_reference(env_id):
    """Through many episodes and automatic resets: rewards, ends, final observations, returns, lengths, masks."""
    rng = random.Random(env_id)
    env = envs.make(env_id, num_envs=24, seed=3)
    rules = StagHunt(num_stags=int(env_id[6])) if env_id.startswith("msh") else Snowdrift()
    obs, _ = env.reset()
    states = [reference.from_row(rules, row) for row in env.states]
    np.testing.assert_array_equal(obs, planes(rules, states))
    returns = np.zeros((24, 4))
    episodes = 0
    for _ in range(80):
        actions = [reference.random_actions(rules, state, rng) for state in states]
        outcomes = [rules.step(state, action) for state, action in zip(states, actions, strict=True)]
        obs, reward, terminated, truncated, info = env.step(np.array(actions))
        np.testing.assert_allclose(reward, column(outcomes, "reward"), rtol=1e-6)
        np.testing.assert_array_equal(terminated, column(outcomes, "terminated"))
        np.testing.assert_array_equal(truncated, column(outcomes, "truncated"))
        np.testing.assert_array_equal(info["illegal_actions"], column(outcomes, "illegal"))
        np.testing.assert_array_equal(info["taken"], kinds_taken(rules, outcomes))
        states = [outcome.state for outcome in outcomes]
        done = np.array([rules.over(state) for state in states])
        np.testing.assert_array_equal(info["done"], done)
        returns += column(outcomes, "reward")
        np.testing.assert_array_equal(info["final_obs"][done], planes(rules, states)[done])
        np.testing.assert_allclose(info["episode_return"][done], returns[done], rtol=1e-6)
        np.testing.assert_array_equal(info["episode_length"][done], [state.t for state in states if rules.over(state)])
        returns[done] = 0
        episodes += done.sum()
        for row in np.flatnonzero(done):  # the env has started a new episode here
            states[row] = reference.from_row(rules, env.states[row])
            assert states[row].t == 0 and None not in states[row].players
        np.testing.assert_array_equal(env.states, rows(rules, states))
        np.testing.assert_array_equal(obs, planes(rules, states))
        np.testing.assert_array_equal(env.legal, masks(rules, states))
        np.testing.assert_array_equal(env.alive, on_board(states))
        np.testing.assert_array_equal(env.t, [state.t for state in states])
    assert episodes >= 40


@pytest.mark.parametrize("seed", range(3))
def test_numpy_version_matches_reference(seed):
    """The numpy Stag Hunt the benchmark compares with plays the same game."""
    rng = random.Random(f"numpy {seed}")
    for _ in range(8):
        rules = reference.random_stag_hunt(rng)
        left, late = rng.choice([(0.0, 0.0), (0.4, 0.8)])
        states = [reference.random_state(rules, rng, rng.choice([0, 3]), left, late) for _ in range(24)]
        game = NumpyStagHunt(24, **reference.settings(rules))
        game.reset()
        game.set_states(rows(rules, states))
        running = np.array([not rules.over(state) for state in states])
        for _ in range(min(rules.horizon, 12)):
            actions = [reference.random_actions(rules, state, rng) for state in states]
            outcomes = [rules.step(state, action) for state, action in zip(states, actions, strict=True)]
            obs, reward, terminated, truncated, info = game.step(np.array(actions), auto_reset=False)
            states = [outcome.state for outcome in outcomes]
            np.testing.assert_array_equal(game.get_states()[running], rows(rules, states)[running])
            np.testing.assert_array_equal(obs[running], planes(rules, states)[running])
            np.testing.assert_array_equal(game.legal[running], masks(rules, states)[running])
            np.testing.assert_allclose(reward[running], column(outcomes, "reward")[running], rtol=1e-6, atol=1e-6)
            np.testing.assert_array_equal(terminated[running], column(outcomes, "terminated")[running])
            np.testing.assert_array_equal(truncated[running], column(outcomes, "truncated")[running])
            np.testing.assert_array_equal(info["illegal_actions"][running], column(outcomes, "illegal")[running])
            running &= ~info["done"]


def test_numpy_version_resets_by_itself():
    game = NumpyStagHunt(64, seed=1)
    rules = StagHunt()
    game.reset()
    rng = np.random.default_rng(0)
    for _ in range(80):
        states = [reference.from_row(rules, row) for row in game.get_states()]
        actions = rng.integers(7, size=(64, 4))
        after = [rules.step(state, action).state for state, action in zip(states, actions, strict=True)]
        obs, _, _, _, info = game.step(actions)
        done = info["done"]
        np.testing.assert_array_equal(done, [rules.over(state) for state in after])
        np.testing.assert_array_equal(info["final_obs"][done], planes(rules, after)[done])
        now = [reference.from_row(rules, row) for row in game.get_states()]
        np.testing.assert_array_equal(obs, planes(rules, now))
        assert (game.t[done] == 0).all() and (game.prey[done] == 5).all()


# worked examples: what one step of GAMES.md's rules gives, by hand


def by_core(rules, state, actions):
    """One step of the core, answered in the reference's words."""
    new = core_game(rules).simulate(rows(rules, [state]), np.array([actions]))
    taken = [None if kind == 0 else rules.kinds[kind - 1] for kind in new.taken[0]]
    lists = (new.reward[0].tolist(), new.terminated[0].tolist(), new.truncated[0].tolist())
    return reference.Outcome(reference.from_row(rules, new.states[0]), *lists, taken, int(new.illegal[0]))


def by_reference(rules, state, actions):
    return rules.step(state, actions)


one_step = pytest.mark.parametrize("step", [by_reference, by_core])
A, B, C, D = (0, 0), (0, 3), (3, 0), (2, 2)


@one_step
def test_moves_and_walls(step):
    state = State(0, 35, [A, A, C, D], {(1, 0), (2, 3)}, {B: "stag"})
    out = step(StagHunt(), state, [UP, RIGHT, UP, LEFT])
    assert out.state.players == [A, (0, 1), (2, 0), (2, 1)]
    assert out.illegal == 1 and out.state.t == 1 and out.reward == [0, 0, 0, 0]
    out = step(StagHunt(), state, [DOWN, LEFT, DOWN, RIGHT])
    assert out.state.players == [A, A, C, D] and out.illegal == 4


@one_step
def test_one_alone_on_the_stag_gets_nothing_and_stays(step):
    state = State(3, 35, [B, B, C, D], set(), {B: "stag", C: "hare"})
    out = step(StagHunt(), state, [STAG, STAY, STAY, UP])
    assert out.reward == [0, 0, 0, 0] and out.illegal == 0 and out.terminated == [False] * 4
    assert out.state.players == [B, B, C, (1, 2)] and out.state.items == {B: "stag", C: "hare"}


@one_step
@pytest.mark.parametrize(
    ("actions", "strength", "reward"),
    [
        ([STAG, STAG, STAY, STAY], (1, 1, 1, 1), [5, 5, 0, 0]),
        ([STAG, STAG, STAG, STAG], (1, 1, 1, 1), [2.5, 2.5, 2.5, 2.5]),
        ([STAG, STAG, STAY, STAY], (1, 3, 1, 1), [2.5, 7.5, 0, 0]),
        ([STAG, STAY, STAG, STAG], (2, 9, 1, 1), [5, 0, 2.5, 2.5]),
    ],
)
def test_stag_is_split_by_strength(step, actions, strength, reward):
    state = State(0, 35, [D, D, D, D], set(), {D: "stag", A: "hare"})
    out = step(StagHunt(player_strength=strength), state, actions)
    assert out.reward == reward
    assert out.terminated == [action == STAG for action in actions] and not any(out.truncated)
    assert out.state.players == [None if action == STAG else D for action in actions]
    assert out.taken == ["stag" if action == STAG else None for action in actions]
    assert out.state.items == {A: "hare"}


@one_step
def test_two_stags_on_two_cells_do_not_mix(step):
    state = State(0, 35, [A, B, B, A], set(), {A: "stag", B: "stag", C: "hare"})
    out = step(StagHunt(num_stags=2), state, [STAG, STAG, STAY, STAY])
    assert out.reward == [0, 0, 0, 0] and out.state.players == [A, B, B, A]
    out = step(StagHunt(num_stags=2), state, [STAG, STAG, STAG, STAG])
    assert out.reward == [5, 5, 5, 5] and out.state.items == {C: "hare"} and out.terminated == [True] * 4


@one_step
def test_hunters_needed(step):
    state = State(0, 35, [A, A, A, B], set(), {A: "stag", B: "hare"})
    rules = StagHunt(hunters_needed=3)
    assert step(rules, state, [STAG, STAG, STAY, STAY]).reward == [0, 0, 0, 0]
    assert step(rules, state, [STAG, STAG, STAG, STAY]).reward == pytest.approx([10 / 3] * 3 + [0])


@one_step
def test_hare_is_split_equally_whatever_the_strength(step):
    state = State(0, 35, [C, C, A, B], set(), {C: "hare", B: "hare", D: "stag"})
    out = step(StagHunt(player_strength=(1, 4, 1, 1)), state, [HARE, HARE, HARE, HARE])
    assert out.reward == [0.5, 0.5, 0, 1] and out.illegal == 1
    assert out.terminated == [True, True, False, True] and out.state.items == {D: "stag"}
    assert out.taken == ["hare", "hare", None, "hare"]


@one_step
def test_hunting_the_wrong_animal_is_illegal(step):
    state = State(0, 35, [A, A, B, B], set(), {A: "stag", B: "hare"})
    out = step(StagHunt(), state, [HARE, HARE, STAG, STAG])
    assert out.illegal == 4 and out.reward == [0, 0, 0, 0] and out.state.players == [A, A, B, B]


@one_step
def test_who_left_earns_nothing_and_its_action_is_ignored(step):
    rules = StagHunt(time_reward=-1.0)
    state = State(5, 35, [None, B, C, None], set(), {D: "stag", C: "hare"})
    out = step(rules, state, [HARE, LEFT, HARE, UP])
    assert out.reward == [0, -1, 0, 0] and out.illegal == 0  # hare 1, time -1: a hunter leaving in this step included
    assert out.terminated == [False, False, True, False]
    assert out.state.players == [None, (0, 2), None, None]


@one_step
def test_prosocial_is_the_mean_over_all_players_for_those_on_the_board(step):
    rules = StagHunt(prosocial=True, time_reward=-1.0)
    state = State(5, 35, [None, B, C, C], set(), {D: "stag", C: "hare"})
    out = step(rules, state, [STAY, STAY, HARE, STAY])
    assert out.reward == [0, -0.5, -0.5, -0.5]  # (0 - 1 + 0 - 1) / 4
    state = State(0, 35, [D, D, C, B], set(), {D: "stag", C: "hare"})
    out = step(StagHunt(prosocial=True), state, [STAG, STAG, STAY, STAY])
    assert out.reward == [2.5, 2.5, 2.5, 2.5]


@one_step
def test_horizon_truncates_and_no_prey_terminates(step):
    state = State(34, 35, [A, A, B, C], set(), {A: "stag", B: "hare"})
    out = step(StagHunt(), state, [STAG, STAG, STAY, STAY])
    assert out.terminated == [True, True, False, False] and out.truncated == [False, False, True, True]
    assert out.state.t == 35
    out = step(StagHunt(), state, [STAG, STAG, HARE, STAY])
    assert out.terminated == [True] * 4 and out.truncated == [False] * 4
    state.t = 10
    out = step(StagHunt(), state, [STAG, STAG, HARE, STAY])
    assert out.terminated == [True] * 4 and out.state.players == [None, None, None, C]
    out = step(StagHunt(), state, [STAY] * 4)
    assert not any(out.terminated + out.truncated)


@one_step
def test_final_time_after_first_hunt(step):
    rules = StagHunt(final_time_after_first_hunt=5)
    state = State(10, 35, [A, A, B, C], set(), {A: "stag", B: "hare", D: "hare"})
    out = step(rules, state, [STAG, STAY, STAY, STAY])
    assert out.state.deadline == 35  # one alone has not hunted
    out = step(rules, state, [STAY, STAY, HARE, STAY])
    assert out.state.deadline == 16
    out.state.players[0] = D
    out = step(rules, out.state, [HARE, STAY, STAY, STAY])
    assert out.state.deadline == 16 and out.state.t == 12  # the second hunt changes nothing
    for _ in range(3):
        out = step(rules, out.state, [STAY] * 4)
        assert not any(out.truncated)
    out = step(rules, out.state, [STAY] * 4)
    assert out.state.t == 16 and out.truncated == [False, True, False, True] and not any(out.terminated)
    late = State(33, 35, [A, A, B, C], set(), {A: "stag", B: "hare", D: "hare"})
    assert step(rules, late, [STAY, STAY, HARE, STAY]).state.deadline == 35


@one_step
@pytest.mark.parametrize(
    "state",
    [
        State(35, 35, [A, A, B, C], set(), {A: "stag", B: "hare"}),
        State(9, 35, [A, A, B, C], set(), {}),
        State(9, 35, [None] * 4, set(), {A: "stag"}),
    ],
)
def test_a_finished_game_stands_still(step, state):
    out = step(StagHunt(time_reward=-1.0), state, [STAG, STAG, HARE, UP])
    assert out.state == state and out.reward == [0] * 4
    assert not any(out.terminated + out.truncated) and out.illegal == 0


@one_step
def test_snowdrift(step):
    rules = Snowdrift()
    state = State(0, 15, [A, A, B, C], set(), {A: "drift", B: "drift", D: "drift"})
    out = step(rules, state, [CLEAR, CLEAR, STAY, CLEAR])
    assert out.reward == [4, 4, 6, 6] and out.illegal == 1 and out.taken == ["drift", "drift", None, None]
    assert out.state.players == [A, A, B, C] and out.state.items == {B: "drift", D: "drift"}
    out = step(rules, state, [CLEAR, STAY, CLEAR, STAY])
    assert out.reward == [8, 12, 8, 12] and not any(out.terminated)
    assert step(Snowdrift(prosocial=True, time_reward=-1.0), state, [CLEAR, STAY, STAY, STAY]).reward == [4] * 4


@one_step
def test_snowdrift_ends(step):
    last = State(14, 15, [A, A, B, C], set(), {A: "drift"})
    out = step(Snowdrift(), last, [CLEAR, STAY, STAY, STAY])
    assert out.terminated == [True] * 4 and out.truncated == [False] * 4 and out.reward == [2, 6, 6, 6]
    out = step(Snowdrift(), last, [STAY] * 4)
    assert out.terminated == [False] * 4 and out.truncated == [True] * 4


def test_observation_by_hand():
    """Own plane first, then the following players, blocks, stags, hares; a player that left sees and shows nothing."""
    state = State(4, 35, [A, B, None, D], {(1, 1)}, {B: "stag", C: "hare"})
    seen = core_game(StagHunt()).observe(rows(StagHunt(), [state]))[0]
    assert seen.shape == (4, 4, 4, 7) and seen.dtype == np.uint8
    assert {tuple(int(i) for i in place) for place in np.argwhere(seen[3])} == {
        (2, 2, 0), (0, 0, 1), (0, 3, 2), (1, 1, 4), (0, 3, 5), (3, 0, 6),
    }  # fmt: skip
    assert not seen[2].any()
