"""Rule-based players: what each does, by an independent search for shortest paths; and their known mean returns."""

import random
from itertools import pairwise

import numpy as np
import pytest
import reference
from reference import HARE, LEFT, RIGHT, STAG, STAY, Snowdrift, StagHunt, State

import envs
import train_world_model
from envs import play
from envs.players import FLIP_AFTER, HELD_OUT, RulePlayers, names, zoo_policy
from envs.recording import collect_play, collect_transitions, parse_lineups


def core_game(rules):
    env_id = "msh-4h1s-4x4" if isinstance(rules, StagHunt) else "msd-4x4"
    return envs.game(env_id, **reference.settings(rules))


def answers(game, states, role, seed=0, t=None):
    """What players of one role in every seat do in these states: (B, N)."""
    players = RulePlayers(game, [role] * game.num_players, len(states), seed)
    t = states[:, 0].astype(np.int32) if t is None else t
    return players.act(game.observe(states), game.legal(states), t).copy()


def copies(rules, state, num):
    return np.tile(np.array(reference.to_row(rules, state), dtype=np.int16), (num, 1))


def wish(rules, state, role):
    """The kind a seeker looks for now: its own while there is one, else the other."""
    first, then = {"ns": ("stag", "hare"), "nh": ("hare", "stag"), "nd": ("drift", "drift")}[role]
    return first if first in state.items.values() else then


@pytest.mark.parametrize("role", ["ns", "nh", "nd"])
def test_seekers_begin_every_shortest_path_to_a_nearest_item_and_nothing_else(role):
    """On boards with and without blocks, any number of items; all best first moves are used."""
    rng = random.Random(role)
    hunting, detours = 0, 0
    for _ in range(80):
        rules = reference.random_snowdrift(rng) if role == "nd" else reference.random_stag_hunt(rng)
        state = reference.random_state(rules, rng, num_blocks=rng.choice([0, 8, 20]), left=0.3, late=0.5)
        if rules.over(state):
            continue
        done = answers(core_game(rules), copies(rules, state, 80), role, seed=rng.randrange(1000))
        for player in range(rules.num_players):
            if state.players[player] is None:
                assert set(done[:, player]) == {STAY}
                continue
            kind = wish(rules, state, role)
            best = reference.best_actions(rules, state, player, kind)
            assert set(done[:, player].tolist()) == best, (rules, state, player)
            hunting += best.isdisjoint(range(5))
            row, column = state.players[player]
            nearest = min(abs(r - row) + abs(c - column) for (r, c), what in state.items.items() if what == kind)
            free = {(r, c) for r in range(rules.height) for c in range(rules.width)} - state.blocks
            steps = reference.distances(free, (row, column))
            detours += nearest < min(steps[cell] for cell, what in state.items.items() if what == kind)
    assert hunting > 5 and detours > 5, "the boards were too easy to prove anything"


def test_ties_are_broken_uniformly():
    """Two best moves to one stag, four to four hares: each as often as the others (five standard errors)."""
    rules, num = StagHunt(height=5, width=5), 20_000
    centre = (2, 2)
    items = {(0, 0): "stag", (2, 0): "hare", (2, 4): "hare", (0, 2): "hare", (4, 2): "hare"}
    state = State(0, 35, [centre] * 4, set(), items)
    for role, options in (("ns", [0, 2]), ("nh", [0, 1, 2, 3])):
        done = answers(core_game(rules), copies(rules, state, num), role, seed=3)
        for player in range(4):
            counts = np.bincount(done[:, player], minlength=7)
            assert counts[options].sum() == num
            assert np.abs(counts[options] - num / len(options)).max() < 5 * np.sqrt(num / 4)
        assert (done[:, 0] == done[:, 1]).mean() < 0.6, "players draw independently"


@pytest.mark.parametrize(("role", "most"), [("random", None), ("fix", 5)])
@pytest.mark.parametrize("rules", [StagHunt(), Snowdrift()])
def test_random_and_fix_are_uniform_over_their_legal_actions(rules, role, most):
    """`random`: all legal actions; `fix`: the legal ones among the first five, so it never hunts or clears."""
    num = 20_000
    items = {(0, 0): rules.kinds[0], (3, 3): rules.kinds[-1]}
    state = State(0, rules.horizon, [(0, 0), (3, 3), (1, 1), (1, 3)], {(1, 2)}, items)
    done = answers(core_game(rules), copies(rules, state, num), role, seed=5)
    for player in range(4):
        options = [action for action in sorted(rules.legal(state, player)) if most is None or action < most]
        counts = np.bincount(done[:, player], minlength=rules.num_actions)
        assert counts[options].sum() == num
        assert np.abs(counts[options] - num / len(options)).max() < 5 * np.sqrt(num / 4)


def test_on_the_stag_ns_hunts_every_step_and_without_stags_it_takes_hares():
    state = State(0, 35, [(0, 0)] * 4, set(), {(0, 0): "stag", (0, 1): "hare"})
    rules = StagHunt()
    assert (answers(core_game(rules), copies(rules, state, 50), "ns") == STAG).all()
    assert (answers(core_game(rules), copies(rules, state, 50), "nh") == RIGHT).all()
    state.items = {(0, 0): "hare"}
    assert (answers(core_game(rules), copies(rules, state, 50), "ns") == HARE).all()
    state.items = {(0, 0): "stag"}
    assert (answers(core_game(rules), copies(rules, state, 50), "nh") == STAG).all()


CORRIDOR = StagHunt(height=1, width=5, num_stags=1, num_hares=1)
SNOWY_CORRIDOR = Snowdrift(height=1, width=5, num_drifts=1)


def test_mix_is_drawn_anew_for_each_episode_and_kept_within_it():
    """In a corridor `ns` goes left and `nh` right, so one look at the action tells which it is."""
    state = State(0, 35, [(0, 2)] * 4, set(), {(0, 0): "stag", (0, 4): "hare"})
    game, num = core_game(CORRIDOR), 2000
    states = copies(CORRIDOR, state, num)
    players = RulePlayers(game, ["mix"] * 4, num, seed=1)
    obs, legal = game.observe(states), game.legal(states)
    episodes = []
    for _ in range(6):
        first = players.act(obs, legal, np.zeros(num, dtype=np.int32)).copy()
        assert set(np.unique(first)) == {LEFT, RIGHT}
        assert np.abs((first == LEFT).mean(0) - 0.5).max() < 5 * 0.5 / np.sqrt(num)
        for t in (1, 2, 30):
            np.testing.assert_array_equal(players.act(obs, legal, np.full(num, t, dtype=np.int32)), first)
        episodes.append(first)
    for one, two in pairwise(episodes):
        assert abs((one == two).mean() - 0.5) < 5 * 0.5 / np.sqrt(4 * num)
    assert abs((episodes[0][:, 0] == episodes[0][:, 1]).mean() - 0.5) < 5 * 0.5 / np.sqrt(num)


def test_mix_in_the_snow_is_nd_or_fix():
    state = State(0, 15, [(0, 2)] * 4, set(), {(0, 0): "drift"})
    game, num = core_game(SNOWY_CORRIDOR), 4000
    states = copies(SNOWY_CORRIDOR, state, num)
    done = answers(game, states, "mix")
    counts = np.bincount(done.ravel(), minlength=6) / done.size  # nd always LEFT, fix LEFT, RIGHT or STAY
    np.testing.assert_allclose(counts[[LEFT, RIGHT, STAY]], [0.5 + 0.5 / 3, 0.5 / 3, 0.5 / 3], atol=0.02)


def test_mix_that_first_sees_a_running_episode_is_one_of_its_two():
    state = State(7, 35, [(0, 2)] * 4, set(), {(0, 0): "stag", (0, 4): "hare"})
    done = answers(core_game(CORRIDOR), copies(CORRIDOR, state, 200), "mix")
    assert set(np.unique(done)) == {LEFT, RIGHT}


def test_each_seat_sees_only_its_own_observation_and_mask():
    game = envs.game("msh-4h1s-8x8", max_block_comp=2)
    states = game.draw(1, 200)
    roles = ["ns", "nh", "random", "fix"]
    t = np.zeros(200, dtype=np.int32)
    whole = RulePlayers(game, roles, 200, seed=1).act(game.observe(states), game.legal(states), t)
    for seat in range(4):  # all others look as if they had left
        obs, legal = np.zeros_like(game.observe(states)), np.zeros_like(game.legal(states))
        legal[:, :, STAY] = True
        obs[:, seat], legal[:, seat] = game.observe(states)[:, seat], game.legal(states)[:, seat]
        alone = RulePlayers(game, roles, 200, seed=1).act(obs, legal, t)
        np.testing.assert_array_equal(alone[:, seat], whole[:, seat])


def test_other_seats_are_left_alone():
    game = envs.game("msh-4h1s-4x4")
    states = game.draw(1, 50)
    actions = np.full((50, 4), 77)
    players = RulePlayers(game, [None, "ns", None, "random"], 50, seed=1)
    out = players.act(game.observe(states), game.legal(states), np.zeros(50, dtype=np.int32), actions)
    assert out is actions and (actions[:, [0, 2]] == 77).all() and (actions[:, [1, 3]] < 7).all()


def test_same_seed_same_actions_whatever_num_envs():
    game = envs.game("msh-4h1s-8x8")
    states = game.draw(1, 40)
    few, many = answers(game, states[:5], "random", seed=8), answers(game, states, "random", seed=8)
    np.testing.assert_array_equal(few, many[:5])
    assert not np.array_equal(many, answers(game, states, "random", seed=9))


def first_returns(env_id, roles, num, **options):
    """Returns (num, N) and lengths of the first episode in each of `num` envs (later ones would favour short games)."""
    env = envs.make(env_id, num_envs=num, seed=1, **options)
    players = RulePlayers(env.game, roles, num, seed=2)
    returns, lengths = np.full((num, 4), np.nan), np.zeros(num)
    while np.isnan(returns).any():
        info = env.step(players.act(env.obs, env.legal, env.t))[4]
        assert not info["illegal_actions"].any()
        new = info["done"] & np.isnan(returns[:, 0])
        returns[new], lengths[new] = info["episode_return"][new], info["episode_length"][new]
    return returns, lengths


@pytest.mark.parametrize(
    ("env_id", "mean", "episodes"),
    [
        ("msh-4h1s-4x4", 2.834, 40_000),
        ("msh-4h1s-8x8", 2.904, 40_000),
        ("msh-4h2s-4x4", 4.31, 80_000),
        ("msh-4h2s-8x8", 4.606, 50_000),
    ],
)
def test_known_mean_returns_of_four_ns(env_id, mean, episodes):
    returns, _ = first_returns(env_id, ["ns"] * 4, episodes)
    standard_error = returns.mean(1).std() / np.sqrt(len(returns))
    assert standard_error < 0.0045
    assert abs(returns.mean() - mean) < 0.02
    assert np.ptp(returns.mean(0)) < 0.1, "no seat is better than another"


@pytest.mark.parametrize("env_id", ["msd-4x4", "msd-6x6", "msd-8x8"])
def test_all_six_drifts_cleared_gives_30(env_id):
    returns, lengths = first_returns(env_id, ["nd"] * 4, 2000)
    horizon = {"msd-4x4": 15, "msd-6x6": 25, "msd-8x8": 50}[env_id]
    cleared = lengths < horizon
    assert cleared.mean() > 0.95
    np.testing.assert_allclose(returns[cleared].mean(1), 30, rtol=1e-6)


def test_four_hare_hunters_find_a_hare_each_or_share_one():
    """Four hares are enough for four `nh`: everybody gets 1, 1/2, 1/3 or 1/4, and whole hares are eaten."""
    returns, _ = first_returns("msh-4h1s-4x4", ["nh"] * 4, 4000)
    assert set(np.unique(returns.round(3))) == {1.0, 0.5, 0.333, 0.25}
    np.testing.assert_allclose(returns.sum(1), returns.sum(1).round(), atol=1e-6)


@pytest.mark.parametrize(("env_id", "role", "kind"), [("msh-4h1s-8x8", "ns", "stag"), ("msd-6x6", "nd", "drift")])
def test_pettingzoo_policies_walk_the_same_paths(env_id, role, kind):
    game = envs.parallel_env(env_id, max_block_comp=2)
    config = game.game.config
    book = StagHunt if kind == "stag" else Snowdrift
    rules = book(height=config.height, width=config.width, horizon=config.horizon)
    policies = {}
    for seat, agent in enumerate(game.possible_agents):
        policies[agent] = zoo_policy(role, game if seat % 2 else game.game, seed=seat)
    for episode in range(8):
        seen, _ = game.reset(seed=episode)
        while game.agents:
            state = reference.from_row(rules, game.state_row)
            actions = {agent: policies[agent](seen[agent]) for agent in game.agents}
            for agent, action in actions.items():
                player = game.possible_agents.index(agent)
                assert type(action) is int
                assert action in reference.best_actions(rules, state, player, wish(rules, state, role))
            seen, *_ = game.step(actions)


def test_pettingzoo_ns_reach_the_known_return():
    game = envs.parallel_env("msh-4h1s-4x4")
    policies = {agent: zoo_policy("ns", game, seed=seat) for seat, agent in enumerate(game.possible_agents)}
    game.reset(seed=0)
    total, episodes = 0.0, 400
    for _ in range(episodes):
        seen, _ = game.reset()
        while game.agents:
            seen, reward, *_ = game.step({agent: policies[agent](seen[agent]) for agent in game.agents})
            total += sum(reward.values()) / 4
    assert abs(total / episodes - 2.834) < 0.1


# held out


def walk(rules, state, player, cells):
    """The best actions of a player who wants to take something on one of these cells."""
    own = state.players[player]
    if own in cells:
        return {5 + rules.kinds.index(state.items[own])}
    free = {(r, c) for r in range(rules.height) for c in range(rules.width)} - state.blocks
    steps = [reference.distances(free, cell) for cell in cells]
    nearest = min((far[own] for far in steps), default=0)
    moves = {0: (-1, 0), 1: (1, 0), 2: (0, -1), 3: (0, 1)}
    ends = {move: (own[0] + down, own[1] + across) for move, (down, across) in moves.items()}
    return {move for move, end in ends.items() if any(far.get(end) == nearest - 1 for far in steps)} or {STAY}


def wanted_cells(rules, state, player, role):
    """What a held-out player is after on a board that it sees for the first time, as told in docs/games.md."""
    stags, hares = ([cell for cell, what in state.items.items() if what == kind] for kind in ("stag", "hare"))
    free = {(r, c) for r in range(rules.height) for c in range(rules.width)} - state.blocks
    others = [cell for k, cell in enumerate(state.players) if k != player and cell is not None]
    own = reference.distances(free, state.players[player])
    if role == "shy":
        from_stags = {cell: reference.distances(free, cell) for cell in stags}
        followed = {c for c in stags for o in others if from_stags[c][o] < own[c] or from_stags[c][o] == own[c] == 0}
        return followed or hares
    if role == "picky":
        farthest = max((own[cell] for cell in stags), default=0)
        return [cell for cell in stags if own[cell] == farthest] or hares
    if role == "copycat":
        model = min(others, key=lambda cell: own[cell], default=state.players[player])
        far = reference.distances(free, model)
        nearest = min(far[cell] for cell in state.items)
        return [cell for cell in state.items if far[cell] == nearest]
    return stags or hares  # tft that trusts, late that has waited


@pytest.mark.parametrize("role", ["shy", "picky", "copycat", "tft", "late"])
def test_held_out_hunters_want_what_the_table_says(role):
    """On random boards with and without blocks, several stags, players that left: all best actions and no other."""
    rng = random.Random(role)
    different = 0  # from both `ns` and `nh`
    for _ in range(60):
        rules = reference.random_stag_hunt(rng)
        state = reference.random_state(rules, rng, num_blocks=rng.choice([0, 8, 20]), left=0.3, late=0.5)
        if rules.over(state):
            continue
        t = np.full(60, 20, np.int32) if role == "late" else None
        done = answers(core_game(rules), copies(rules, state, 60), role, rng.randrange(1000), t)
        for player in range(rules.num_players):
            if state.players[player] is None:
                assert set(done[:, player]) == {STAY}
                continue
            if role == "picky":  # of stags equally far each game draws one: all are met
                cells = wanted_cells(rules, state, player, role)
                best = set().union(*(walk(rules, state, player, [c]) for c in cells)) if cells else {STAY}
                if cells and state.items[cells[0]] == "hare":
                    best = walk(rules, state, player, cells)
            else:
                best = walk(rules, state, player, wanted_cells(rules, state, player, role))
            assert set(done[:, player].tolist()) == best, (rules, state, player)
            kinds = [wish(rules, state, seeker) for seeker in ("ns", "nh")]
            different += best not in [reference.best_actions(rules, state, player, kind) for kind in kinds]
    assert different > 5 or role in ("tft", "late"), "the boards were too easy to prove anything"


class Table:
    """Some games of one env, played by one line-up step by step."""

    def __init__(self, env_id, roles, num, seed=1, **options):
        self.env = envs.make(env_id, num_envs=num, seed=seed, **options)
        self.players = RulePlayers(self.env.game, roles, num, seed)

    def step(self, **seats):
        actions = self.players.act(self.env.obs, self.env.legal, self.env.t)
        for seat, chosen in seats.items():
            actions[:, int(seat[1:])] = chosen
        states, t = self.env.states.copy(), self.env.t.copy()
        info = self.env.step(actions)[4]
        assert not info["illegal_actions"].any()
        self.players.watch(info)
        return states, t, actions, info


def test_late_waits_two_to_eight_steps_drawn_for_each_episode():
    table, waits, running = Table("msh-4h1s-8x8", ["late"] * 4, 300), [], np.zeros((300, 4), int)
    for _ in range(120):
        _, t, actions, _ = table.step()
        running = np.where(t[:, None] == 0, 0, running)
        moved = (actions != STAY) & (running == 0)
        waits += t.repeat(4).reshape(-1, 4)[moved].tolist()
        running += actions != STAY
    counts = np.bincount(waits)
    assert counts[:2].sum() == 0 and len(counts) <= 9 + 27  # who starts on a stag hunts where it stands
    assert np.ptp(counts[2:9]) < 0.25 * counts[2:9].mean() and counts[2:9].sum() > 0.99 * counts.sum()


def test_tft_hunts_the_stag_as_long_as_it_got_one_the_last_time():
    """In a corridor, stag left and hare right: the first move of an episode tells."""
    game = core_game(CORRIDOR)
    state = State(0, 35, [(0, 2)] * 4, set(), {(0, 0): "stag", (0, 4): "hare"})
    states = copies(CORRIDOR, state, 4)
    players = RulePlayers(game, ["tft"] * 4, 4, seed=1)
    obs, legal, t = game.observe(states), game.legal(states), np.zeros(4, np.int32)
    nothing, over = np.zeros((4, 4), np.int8), np.ones(4, bool)
    assert (players.act(obs, legal, t) == LEFT).all()
    taken = nothing.copy()
    taken[0], taken[1, :2], taken[2] = 1, 1, 2  # all got it; two did; all hares; nothing
    players.watch({"taken": taken, "done": np.zeros(4, bool)})  # in the middle of the episode
    assert (players.act(obs, legal, t + 1) == LEFT).all(), "the hunt is not over yet"
    players.watch({"taken": nothing, "done": over})
    second = players.act(obs, legal, t).copy()
    assert (second[0] == LEFT).all() and second[1].tolist() == [LEFT, LEFT, RIGHT, RIGHT]
    assert (second[2:] == RIGHT).all()
    players.watch({"taken": np.full((4, 4), 1, np.int8), "done": over})  # a stag all the same: trust comes back
    assert (players.act(obs, legal, t) == LEFT).all()


def test_copycat_goes_by_the_last_step_of_the_nearest_other():
    """Hare right, stag left: the other stands nearer to the hare, but goes left, so the copycat does, too."""
    rules = StagHunt(height=1, width=9, num_stags=1, num_hares=1, num_players=2, player_strength=(1, 1))
    game, items = core_game(rules), {(0, 0): "stag", (0, 8): "hare"}
    players = RulePlayers(game, ["copycat", None], 1, seed=1)
    actions = []
    for t, other in enumerate([6, 5, 5, 6, 7]):
        states = copies(rules, State(t, 35, [(0, 4), (0, other)], set(), items), 1)
        actions.append(players.act(game.observe(states), game.legal(states), np.array([t], np.int32))[0, 0])
    assert actions == [RIGHT, LEFT, RIGHT, RIGHT, RIGHT]


def test_flip_is_another_of_three_after_every_few_episodes():
    table = Table("msh-4h1s-4x4", ["flip"] * 4, 100)
    drawn = [[] for _ in range(100)]
    for _ in range(700):
        table.step()
        for b in np.flatnonzero(table.env.t == 1):
            drawn[b].append(table.players.drawn[b].tolist())
    whole = min(map(len, drawn)) // FLIP_AFTER
    assert whole >= 4
    for history in drawn:
        blocks = np.array(history[: whole * FLIP_AFTER]).reshape(whole, FLIP_AFTER, 4)
        assert (blocks == blocks[:, :1]).all() and (blocks[1:, 0] != blocks[:-1, 0]).all()
    counts = np.unique(np.array([history[: whole * FLIP_AFTER] for history in drawn]), return_counts=True)[1]
    assert len(counts) == 3 and np.ptp(counts) < 0.2 * counts.mean()


def test_picky_keeps_to_the_stag_it_chose():
    """Nobody else hunts, so its stag stays: on the way there it is nearer to the other one, and still goes on."""
    table = Table("msh-4h2s-8x8", ["picky", "fix", "fix", "fix"], 200)
    chosen = []
    for _ in range(12):
        states, _, actions, _ = table.step()
        prey, cell = table.players.memory.prey[:, 0].copy(), states[:, 2]
        assert (states[np.arange(200), 6 + prey] == 2).all(), "a stag stands there"
        assert ((actions[:, 0] == STAG) == (cell == prey)).all()
        chosen.append(prey)
    assert (np.array(chosen) == chosen[0]).all() and (cell == prey).mean() > 0.7


def test_lazy_clears_where_nobody_is_near_and_wanders_otherwise():
    rules = Snowdrift(height=8, width=8, num_drifts=2)
    items = {(0, 0): "drift", (7, 7): "drift"}
    for cells, clears in (
        ([(0, 0), (0, 3), (4, 4), (5, 5)], True),
        ([(0, 0), (1, 1), (4, 4), (5, 5)], False),
        ([(0, 0), (0, 2), (4, 4), (5, 5)], False),
        ([(0, 0), (0, 0), (4, 4), (5, 5)], False),
    ):
        done = answers(core_game(rules), copies(rules, State(0, 15, cells, set(), items), 300), "lazy")
        assert set(done[:, 0]) == ({5} if clears else {1, 3, STAY})
        assert set(done[:, 2]) == {0, 1, 2, 3, STAY}


def test_tired_clears_one_and_never_again_in_an_episode():
    table = Table("msd-4x4", ["tired"] * 4, 200)
    cleared = np.zeros((200, 4), int)
    counts = []
    for _ in range(60):
        _, _, _, info = table.step()
        cleared += info["taken"] > 0
        assert cleared.max() <= 1
        counts += cleared[info["done"]].ravel().tolist()
        cleared[info["done"]] = 0
    assert 0.9 < np.mean(counts) <= 1.0


@pytest.mark.parametrize("env_id", ["msh-4h2s-4x4", "msd-4x4"])
def test_held_out_players_go_on_as_they_were(env_id):
    """What they remember is in their state: a copy in the middle of an episode does the same from there on."""
    game = envs.game(env_id)
    roles = [*game.held_out, *["mix"] * 4][:4] if env_id == "msd-4x4" else None
    for seats in [roles] if roles else [game.held_out[:4], (*game.held_out[2:],)]:
        one, two = (Table(env_id, list(seats), 20) for _ in range(2))
        for _ in range(47):
            one.step()
        two.env.set_state(one.env.get_state())
        two.players.set_state(one.players.get_state())
        for _ in range(100):
            np.testing.assert_array_equal(one.step()[2], two.step()[2])


def test_nobody_learns_from_held_out_players():
    """Not in the roles that recorded play and `mix` draw from, and refused where play to learn from is asked for.
    Imagined players follow the opponent model, which knows that play alone."""
    for env_id in ("msh-4h1s-4x4", "msd-4x4"):
        game, spec = envs.game(env_id), envs.spec(env_id)
        assert set(game.held_out) == set(names(game)) & set(HELD_OUT) and game.held_out
        assert not {*game.mix, *game.seekers} & set(HELD_OUT)
        defaults = {role for lineup in parse_lineups((), spec, game) for role in lineup}
        defaults |= set(train_world_model.default_lineups(game)) | set(play.default_roles(game))
        assert not defaults & set(HELD_OUT)
        for role in game.held_out:
            with pytest.raises(envs.ConfigError, match=f"'{role}' is held out"):
                collect_play(spec, game, (role,), 10, np.random.SeedSequence(1), quiet=True)
            with pytest.raises(envs.ConfigError, match=f"'{role}' is held out"):
                collect_transitions(game, [role], 0.0, 10, np.random.SeedSequence(1), quiet=True)
