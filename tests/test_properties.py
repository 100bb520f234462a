"""What must hold in every grid game, whatever the size, the players, the prey, the blocks and the options."""

import random
import tracemalloc

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import StagHunt

import envs

settings.register_profile("rules", max_examples=40, deadline=None, derandomize=True)
settings.load_profile("rules")

seeds = st.integers(0, 2**32 - 1)
STAY = 4


def core_game(rules, **overrides):
    env_id = "msh-4h1s-4x4" if isinstance(rules, StagHunt) else "msd-4x4"
    return envs.game(env_id, **{**reference.settings(rules), **overrides})


@st.composite
def situations(draw, games=("msh", "msd"), num_rows=16):
    """(rules, core game, states, generator): random rules and a batch of random mid-game states."""
    rng = random.Random(draw(seeds))
    some_rules = {"msh": reference.random_stag_hunt, "msd": reference.random_snowdrift}[draw(st.sampled_from(games))]
    rules = some_rules(rng)
    num_blocks, (left, late) = draw(st.integers(0, 6)), draw(st.sampled_from([(0.0, 0.0), (0.4, 0.8)]))
    states = [reference.random_state(rules, rng, num_blocks, left, late) for _ in range(num_rows)]
    rows = np.array([reference.to_row(rules, state) for state in states], dtype=np.int16)
    return rules, core_game(rules), rows, np.random.default_rng(rng.getrandbits(32))


def some_actions(game, states, rng):
    """Half of them anything, the others legal; hunting, the last legal action, more often than not."""
    legal = game.legal(states)
    anything = rng.integers(legal.shape[-1], size=legal.shape[:2])
    lawful = (legal * rng.random(legal.shape) ** np.array([8] * 5 + [1] * (legal.shape[-1] - 5))).argmax(-1)
    return np.where(rng.random(anything.shape) < 0.5, anything, lawful)


def parts(rules, states):
    """t, deadline, cells (B, N), board (B, H*W) of a batch of states."""
    players = rules.num_players
    return states[:, 0], states[:, 1], states[:, 2 : 2 + players].astype(int), states[:, 2 + players :]


def finished(rules, states):
    t, deadline, cells, board = parts(rules, states)
    return (t >= deadline) | ~(board >= 2).any(1) | (cells < 0).all(1)


# moving, leaving, earning


@given(situations())
def test_nobody_moves_more_than_one_cell_or_onto_a_block(situation):
    rules, game, states, rng = situation
    for _ in range(8):
        actions = some_actions(game, states, rng)
        after = game.simulate(states, actions).states.copy()
        _, _, cells, board = parts(rules, states)
        _, _, new_cells, new_board = parts(rules, after)
        stayed = (cells >= 0) & (new_cells >= 0)
        rows, columns = np.divmod(cells, rules.width)
        new_rows, new_columns = np.divmod(new_cells, rules.width)
        far = abs(rows - new_rows) + abs(columns - new_columns)
        assert (far[stayed] <= 1).all()
        assert (far[stayed & (actions >= STAY)] == 0).all(), "who stays or hunts does not move"
        env, player = np.nonzero(new_cells >= 0)
        assert (new_cells < rules.height * rules.width).all()
        assert (new_board[env, new_cells[env, player]] != 1).all(), "on a block"
        np.testing.assert_array_equal(board == 1, new_board == 1, err_msg="blocks never change")
        assert ((new_board == board) | ((board >= 2) & (new_board == 0))).all(), "items only vanish"
        states = after


@given(situations())
def test_who_left_never_acts_moves_or_earns(situation):
    rules, game, states, rng = situation
    for _ in range(8):
        gone = ~game.alive(states)
        np.testing.assert_array_equal(gone, parts(rules, states)[2] < 0)
        actions = some_actions(game, states, rng)
        new = game.simulate(states, actions)
        other = actions.copy()
        other[gone] = rng.integers(rules.num_actions, size=gone.sum())  # whatever they try, nothing is different
        again = game.simulate(states, other)
        for one, two in zip(new, again, strict=True):
            np.testing.assert_array_equal(one, two)
        assert (parts(rules, new.states)[2][gone] == -1).all()
        assert not new.reward[gone].any() and not new.taken[gone].any()
        assert not new.terminated[gone].any() and not new.truncated[gone].any()
        states = new.states.copy()
        gone = ~game.alive(states)
        assert not game.observe(states)[gone].any()
        assert (game.legal(states)[gone] == (np.arange(rules.num_actions) == STAY)).all()
        seen = game.observe(states)
        for player in range(rules.num_players):  # its plane is empty in the eyes of all others
            for plane in range(1, rules.num_players):
                assert not seen[gone[:, (player + plane) % rules.num_players], player, :, :, plane].any()


@given(situations(games=("msh",)))
def test_rewards_paid_equal_the_prey_taken_and_each_is_paid_once(situation):
    rules, _, states, rng = situation
    plain = core_game(rules, time_reward=0.0, prosocial=False)
    paid = np.zeros(len(states))
    boards = parts(rules, states)[3].copy()
    worth = np.array([0.0, 0.0, rules.stag_reward, rules.hare_reward])
    for _ in range(8):
        new = plain.simulate(states, some_actions(plain, states, rng))
        gone = parts(rules, states)[3] - parts(rules, new.states)[3]  # the prey that vanished in this step
        np.testing.assert_allclose(new.reward.sum(1), worth[gone].sum(1), rtol=1e-6)
        np.testing.assert_array_equal(new.reward > 0, new.taken > 0, err_msg="who is paid took something, and no other")
        left = (parts(rules, states)[2] >= 0) & (parts(rules, new.states)[2] < 0)
        np.testing.assert_array_equal(left, new.taken > 0, err_msg="who takes leaves, nobody else")
        paid += new.reward.sum(1)
        states = new.states.copy()
    np.testing.assert_allclose(paid, worth[boards].sum(1) - worth[parts(rules, states)[3]].sum(1), rtol=1e-5)


@given(situations(games=("msd",)))
def test_drifts_are_paid_once(situation):
    rules, _, states, rng = situation
    plain = core_game(rules, time_reward=0.0, prosocial=False)
    each = rules.num_players * rules.drift_reward - rules.clear_cost
    for _ in range(8):
        new = plain.simulate(states, some_actions(plain, states, rng))
        cleared = (parts(rules, states)[3] != parts(rules, new.states)[3]).sum(1)
        np.testing.assert_allclose(new.reward.sum(1), cleared * each, rtol=1e-5, atol=1e-5)
        idle = new.taken == 0
        np.testing.assert_allclose(new.reward[idle], np.repeat(cleared, idle.sum(1)) * rules.drift_reward, rtol=1e-6)
        assert (parts(rules, new.states)[2] >= 0).all(), "nobody leaves"
        states = new.states.copy()


@given(situations())
def test_time_reward_and_prosocial_only_change_who_gets_what(situation):
    rules, game, states, rng = situation
    plain = core_game(rules, time_reward=0.0, prosocial=False)
    actions = some_actions(game, states, rng)
    new, base = game.simulate(states, actions), plain.simulate(states, actions)
    np.testing.assert_array_equal(new.states, base.states)
    on_board = (parts(rules, states)[2] >= 0) & ~finished(rules, states)[:, None]
    expected = base.reward + rules.time_reward * on_board
    if rules.prosocial:
        expected = expected.mean(1, keepdims=True) * on_board
    np.testing.assert_allclose(new.reward, expected, rtol=1e-5, atol=1e-6)


@given(situations())
def test_ends(situation):
    """Terminated: left in this step, or nothing is left to take. Truncated: still there when time is up. Never both."""
    rules, game, states, rng = situation
    for _ in range(8):
        over = finished(rules, states)
        new = game.simulate(states, some_actions(game, states, rng))
        t, deadline, cells, board = parts(rules, new.states)
        np.testing.assert_array_equal(t, states[:, 0] + ~over)
        there = (parts(rules, states)[2] >= 0) & ~over[:, None]
        no_prey = ~(board >= 2).any(1, keepdims=True)
        np.testing.assert_array_equal(new.terminated, there & ((cells < 0) | no_prey))
        np.testing.assert_array_equal(new.truncated, there & (cells >= 0) & ~no_prey & (t >= deadline)[:, None])
        assert (deadline <= rules.horizon).all()
        states = new.states.copy()


# symmetry


@given(situations(), seeds)
def test_permuting_the_players_permutes_everything(situation, seed):
    """No index bias: not in observations, masks, rewards, ends; unequal strengths move with their players."""
    rules, game, states, rng = situation
    players = rules.num_players
    order = np.random.default_rng(seed).permutation(players)  # new player i is old player order[i]
    options = {"player_strength": tuple(rules.player_strength[i] for i in order)} if isinstance(rules, StagHunt) else {}
    mirrored = core_game(rules, **options)
    new_index = np.argsort(order)
    for _ in range(6):
        swapped = states.copy()
        swapped[:, 2 : 2 + players] = states[:, 2 + order]
        np.testing.assert_array_equal(mirrored.legal(swapped), game.legal(states)[:, order])
        seen, seen_swapped = game.observe(states), mirrored.observe(swapped)
        for i in range(players):
            for plane in range(players):
                old = (order[(i + plane) % players] - order[i]) % players
                np.testing.assert_array_equal(seen_swapped[:, i, ..., plane], seen[:, order[i], ..., old])
        np.testing.assert_array_equal(seen_swapped[..., players:], seen[:, order][..., players:])
        actions = some_actions(game, states, rng)
        one, two = game.simulate(states, actions), mirrored.simulate(swapped, actions[:, order])
        np.testing.assert_array_equal(two.reward, one.reward[:, order])
        np.testing.assert_array_equal(two.terminated, one.terminated[:, order])
        np.testing.assert_array_equal(two.truncated, one.truncated[:, order])
        np.testing.assert_array_equal(two.taken, one.taken[:, order])
        np.testing.assert_array_equal(two.illegal, one.illegal)
        np.testing.assert_array_equal(two.states[:, 2 + new_index], one.states[:, 2 : 2 + players])
        np.testing.assert_array_equal(two.states[:, :2], one.states[:, :2])
        np.testing.assert_array_equal(two.states[:, 2 + players :], one.states[:, 2 + players :])
        states = one.states.copy()


@given(situations())
def test_rows_of_simulate_are_independent(situation):
    """A state alone and the same state within a batch give the same, with or without output arrays."""
    _, game, states, rng = situation
    actions = some_actions(game, states, rng)
    whole = game.simulate(states, actions)
    whole = [array.copy() for array in whole]
    out = game.transition(1)
    for row in range(0, len(states), 5):
        alone = game.simulate(states[row : row + 1], actions[row : row + 1], out=out)
        assert alone.states is out.states and alone.reward is out.reward
        for one, many in zip(alone, whole, strict=True):
            np.testing.assert_array_equal(one[0], many[row])


@given(situations())
def test_states_of_a_game_pass_the_check_and_trust_changes_nothing(situation):
    """What the rules make is never refused, so that `trusted=True` may skip the check."""
    _, game, states, rng = situation
    for _ in range(8):
        game.check_states(states)
        actions = some_actions(game, states, rng)
        for call in (game.observe, game.legal, game.over):
            np.testing.assert_array_equal(call(states), call(states, trusted=True))
        new = game.simulate(states, actions)
        for one, two in zip(new, game.simulate(states, actions, trusted=True), strict=True):
            np.testing.assert_array_equal(one, two)
        states = new.states.copy()


# starts


def shapes():
    """All pieces a block may be, as sets of cells moved to the corner: every turn and mirror image."""
    drawings = ["###", "####", "##/#.", ".##/##.", "#../###"]
    found = set()
    for drawing in drawings:
        cells = [(r, c) for r, line in enumerate(drawing.split("/")) for c, mark in enumerate(line) if mark == "#"]
        for _ in range(2):
            cells = [(r, -c) for r, c in cells]
            for _ in range(4):
                cells = [(c, -r) for r, c in cells]
                top, left = min(r for r, _ in cells), min(c for _, c in cells)
                found.add(frozenset((r - top, c - left) for r, c in cells))
    return found


@given(st.sampled_from(["msh", "msd"]), st.integers(4, 8), st.integers(4, 8), st.integers(0, 3), seeds)
def test_starts(game_name, height, width, pieces, seed):
    """Blocks leave the free cells connected; items on distinct free cells; players on free cells."""
    env_id = {"msh": "msh-4h2s-4x4", "msd": "msd-4x4"}[game_name]
    pieces = min(pieces, 1 if height * width < 20 else 3)
    game = envs.game(env_id, height=height, width=width, max_block_comp=pieces)
    states = game.draw(seed % 2**31, 32)
    horizon = game.config.horizon
    for row in states:
        t, deadline, cells, board = row[0], row[1], row[2:6], row[6:].reshape(height, width)
        assert t == 0 and deadline == horizon
        free = {(int(r), int(c)) for r, c in np.argwhere(board != 1)}
        assert reference.connected(free)
        assert all(divmod(int(cell), width) in free for cell in cells)
        counts = [(board == kind).sum() for kind in (1, 2, 3)]
        assert counts[1:] == ([2, 4] if game_name == "msh" else [6, 0])
        assert counts[0] <= 4 * pieces


def test_one_block_is_one_of_the_shapes_and_every_shape_comes():
    states = envs.game("msh-4h1s-8x8", max_block_comp=1).draw(0, 4000)
    seen = set()
    for row in states:
        cells = [(int(r), int(c)) for r, c in np.argwhere(row[6:].reshape(8, 8) == 1)]
        if cells:
            top, left = min(r for r, _ in cells), min(c for _, c in cells)
            seen.add(frozenset((r - top, c - left) for r, c in cells))
    assert seen == shapes()


def test_every_cell_is_as_likely_for_everything():
    """Players, stags and hares fall on each cell equally often (five standard errors), without regard to the index."""
    num = 40_000
    states = envs.game("msh-4h2s-4x4").draw(11, num)
    for player in range(4):
        counts = np.bincount(states[:, 2 + player], minlength=16)
        assert abs(counts - num / 16).max() < 5 * np.sqrt(num / 16)
    same = [(states[:, 2] == states[:, 2 + other]).mean() for other in (1, 2, 3)]
    assert np.abs(np.array(same) - 1 / 16).max() < 5 * np.sqrt(1 / 16 / num)
    for kind, count in ((2, 2), (3, 4)):
        mean = (states[:, 6:] == kind).sum(0)
        assert abs(mean - num * count / 16).max() < 5 * np.sqrt(num * count / 16)
    with_player = (np.take_along_axis(states[:, 6:], states[:, 2:3].astype(int), 1) == 2).mean()
    assert abs(with_player - 2 / 16) < 5 * np.sqrt(2 / 16 / num)


def in_window(states, window):
    """(B,) whether all players and items of an 8 x 8 board lie inside some window x window square."""
    prey = np.array([np.flatnonzero(row[6:] >= 2) for row in states])
    rows, columns = np.divmod(np.hstack([states[:, 2:6], prey]), 8)
    return (np.ptp(rows, axis=1) < window) & (np.ptp(columns, axis=1) < window)


@given(st.sampled_from(["msh-4h1s-8x8", "msd-8x8"]), st.integers(3, 7), st.integers(0, 2), seeds)
def test_window_starts_keep_everything_in_a_window(env_id, window, pieces, seed):
    """In the first episodes and in those that follow by themselves."""
    options = {"start_window": window, "start_window_prob": 1.0, "max_block_comp": pieces, "horizon": 1}
    env = envs.make(env_id, num_envs=16, seed=seed, **options)
    for _ in range(2):
        assert in_window(env.states, window).all()
        assert ((env.states[:, 6:] >= 2).sum(1) == (5 if env_id.startswith("msh") else 6)).all()
        for row in env.states:
            board = row[6:]
            assert reference.connected({divmod(int(cell), 8) for cell in np.flatnonzero(board != 1)})
            assert (board[row[2:6]] != 1).all()
        env.step(np.full((16, 4), STAY))


def test_window_starts_come_with_the_given_probability_and_can_be_changed():
    """A whole game fits into a 4 x 4 window by chance in well under a thousandth of the true starts."""
    num = 8000
    stay = np.full((num, 4), STAY)
    env = envs.make("msh-4h1s-8x8", num_envs=num, horizon=1)
    assert in_window(env.states, 4).mean() < 0.002
    for probability in (0.3, 0.7, 0.0, 1.0):
        env.set_start_window(4, probability)  # during training: from the next episode on
        env.step(stay)
        assert abs(in_window(env.states, 4).mean() - probability) < 5 * np.sqrt(0.25 / num) + 0.002
    assert (np.bincount(env.states[:, 2], minlength=64) > 0).all(), "windows lie everywhere"
    env = envs.make("msh-4h1s-8x8", num_envs=num, start_window=4, start_window_prob=0.3)
    assert abs(in_window(env.states, 4).mean() - 0.3) < 5 * np.sqrt(0.25 / num) + 0.002
    assert in_window(env.game.draw(0, num), 4).mean() < 0.002, "draw is the true start distribution"


@pytest.mark.parametrize("face", ["batched", "pettingzoo"])
def test_off_by_default(face):
    config = (envs.make if face == "batched" else envs.parallel_env)("msh-4h1s-8x8").game.config
    assert config.start_window_prob == 0 and config.max_block_comp == 0 and not config.prosocial and not config.strict


# the two faces, and planners


@given(situations(num_rows=5), st.integers(0, 4))
def test_pettingzoo_game_and_row_k_agree_step_for_step(situation, k):
    """From the same state and with the same actions, until the PettingZoo game is over."""
    rules, game, states, rng = situation
    fresh = game.draw(int(rng.integers(1000)), 5)
    states = np.where(finished(rules, states)[:, None], fresh, states)
    env = envs.make(game.env_id, num_envs=5, seed=0, **reference.settings(rules))
    env.set_states(states)
    one = envs.parallel_env(game.env_id, **reference.settings(rules))
    one.reset(seed=1)
    seen, _ = one.set_state(states[k])
    seats = {name: seat for seat, name in enumerate(one.possible_agents)}
    assert list(seats) == [f"player_{i + 1}" for i in range(rules.num_players)]
    assert set(seen) == set(one.agents) == {name for name, seat in seats.items() if env.alive[k, seat]}
    for agent in one.agents:
        np.testing.assert_array_equal(seen[agent]["observation"], env.obs[k, seats[agent]])
    done, total, steps = False, np.zeros(rules.num_players), 0
    while one.agents:
        actions = some_actions(game, env.states, rng)
        acting = list(one.agents)
        seen, reward, terminated, truncated, infos = one.step({name: int(actions[k, seats[name]]) for name in acting})
        obs, rewards, terminations, truncations, info = env.step(actions)
        done = bool(info["done"][k])
        look = info["final_obs"] if done else obs
        steps += 1
        assert set(seen) == set(reward) == set(terminated) == set(truncated) == set(infos) == set(acting)
        for name in acting:
            seat = seats[name]
            np.testing.assert_array_equal(seen[name]["observation"], look[k, seat])
            assert reward[name] == rewards[k, seat]
            assert terminated[name] == terminations[k, seat] and truncated[name] == truncations[k, seat]
            total[seat] += rewards[k, seat]
            if not done:
                np.testing.assert_array_equal(seen[name]["action_mask"], env.legal[k, seat])
                assert seen[name]["t"].item() == env.t[k] and (one.state_row == env.states[k]).all()
        assert one.agents == [name for name in acting if not (terminated[name] or truncated[name])]
        idle = [seat for name, seat in seats.items() if name not in acting]
        assert not rewards[k, idle].any(), "who left earns nothing"
        assert bool(one.agents) != done
    np.testing.assert_allclose(info["episode_return"][k], total, rtol=1e-6, atol=1e-9)
    assert steps <= rules.horizon


def test_simulate_touches_no_env_and_allocates_nothing():
    env = envs.make("msh-4h1s-4x4", num_envs=2048, seed=1)
    rng = np.random.default_rng(0)
    actions = rng.integers(7, size=(2048, 4))
    states, out = env.states.copy(), env.game.transition(2048)
    before = {name: array.tobytes() for name, array in env.get_state().items()}
    env.game.simulate(states, actions, out)
    tracemalloc.start()
    env.game.simulate(states, actions, out)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2048, "a batch of 2048 rows needs no new array"
    assert {name: array.tobytes() for name, array in env.get_state().items()} == before
    env.step(actions)
    same = env.t > 0  # rows that go on
    assert same.any()
    np.testing.assert_array_equal(out.states[same], env.states[same])


# the same seed


def record(env, rows, steps=60):
    """Everything the env says about these rows while each row plays its own fixed actions, as bytes."""
    obs, _ = env.reset()
    said = [obs[rows].tobytes(), env.states[rows].tobytes()]
    num_actions, num_players = env.spec.num_actions, env.spec.num_players
    size = (steps, num_players)
    plans = [np.random.default_rng([5, k]).integers(num_actions, size=size) for k in range(env.num_envs)]
    dones = 0
    for step in range(steps):
        answer = env.step(np.array([plan[step] for plan in plans]))
        info = answer[4]
        said += [array[rows].tobytes() for array in answer[:4]]
        said += [array[rows].tobytes() for array in (env.states, env.legal, env.alive, env.t)]
        done = info["done"][rows]
        said += [info[name][rows][done].tobytes() for name in ("final_obs", "episode_return", "episode_length")]
        said += [info[name][rows].tobytes() for name in ("done", "taken", "illegal_actions")]
        dones += done.sum()
    return said, dones


@pytest.mark.parametrize("env_id", ["msh-4h1s-4x4", "msh-4h2s-8x8", "msd-4x4"])
def test_same_seed_same_bytes_whatever_num_envs_and_threads(env_id):
    options = {"max_block_comp": 1, "start_window": 3, "start_window_prob": 0.5, "horizon": 12}
    rows = np.arange(3)
    alone, dones = record(envs.make(env_id, num_envs=3, seed=9, **options), rows)
    assert dones >= 3 * 4
    assert record(envs.make(env_id, num_envs=3, seed=9, **options), rows)[0] == alone
    assert record(envs.make(env_id, num_envs=37, seed=9, **options), rows)[0] == alone
    assert record(envs.make(env_id, num_envs=37, seed=9, threads=2, **options), rows)[0] == alone
    assert record(envs.make(env_id, num_envs=3, seed=10, **options), rows)[0] != alone


def test_rows_differ_and_reset_with_a_seed_starts_again():
    env = envs.make("msh-4h1s-8x8", num_envs=50, seed=4)
    first = env.states.copy()
    assert len({row.tobytes() for row in first}) == 50
    env.step(np.full((50, 4), STAY))
    env.reset()
    assert not np.array_equal(env.states, first), "the next episodes are new ones"
    env.reset(seed=4)
    np.testing.assert_array_equal(env.states, first)
    env.reset(seed=5)
    assert not np.array_equal(env.states, first)
    np.testing.assert_array_equal(env.game.draw(4, 50), first)
    one = envs.parallel_env("msh-4h1s-8x8")
    one.reset(seed=4)
    np.testing.assert_array_equal(one.state_row, first[0])


def test_saved_env_goes_on_with_the_same_bytes():
    rng = np.random.default_rng(0)
    env = envs.make("msh-4h2s-4x4", num_envs=6, seed=1, max_block_comp=1, horizon=9)
    env.reset()
    plans = rng.integers(7, size=(60, 6, 4))
    for actions in plans[:20]:
        env.step(actions)
    saved = {name: np.copy(array) for name, array in env.get_state().items()}
    other = envs.make("msh-4h2s-4x4", num_envs=6, seed=77, max_block_comp=1, horizon=9)
    other.reset()
    other.set_state(saved)
    for actions in plans[20:]:
        one, two = env.step(actions), other.step(actions)
        for a, b in zip(one[:4], two[:4], strict=True):
            assert a.tobytes() == b.tobytes()
        done = one[4]["done"]
        np.testing.assert_array_equal(done, two[4]["done"])
        np.testing.assert_array_equal(one[4]["episode_return"][done], two[4]["episode_return"][done])
        assert env.states.tobytes() == other.states.tobytes()
