"""envs/sight.py: what a player sees as ids, against the planes of the env and by hand."""

from itertools import product

import numpy as np
import pytest
import torch
from boards import ID, make_state, play_some, turn_seats

import envs
from envs.grid import BLOCK, ITEM, PLAYERS, GridGame, T
from envs.sight import Things, embedding_table, legal_log_softmax, sum_of_embeddings

BOARDS = [(env_id, {}) for env_id in GridGame.registry]
BOARDS += [(ID, {"height": 5, "width": 7, "max_block_comp": 3}), ("msd-4x4", {"height": 6, "max_block_comp": 1})]


@pytest.mark.parametrize(("env_id", "settings"), BOARDS)
def test_planes_and_states_show_the_same_things(env_id, settings):
    """The two ways to ids, in all stages of random play; every bit of the planes has one id, and no two the same."""
    game, states = play_some(env_id, num=90, steps=30, **settings)
    things, obs = Things(game), game.observe(states)
    row, viewer = np.nonzero(game.alive(states))
    of_planes, of_states = things(obs)[row, viewer], things.of_states(states, row, viewer)
    assert of_planes.shape == of_states.shape == (len(row), things.most) and of_states.dtype == np.int32
    assert (np.sort(of_planes, 1) == np.sort(of_states, 1)).all()
    assert ((of_states > 0).sum(1) == obs[row, viewer].sum((1, 2, 3))).all()
    for ids in of_states:
        assert len(np.unique(ids[ids > 0])) == (ids > 0).sum() and ids.max() < things.num_ids
    assert not things(obs)[~game.alive(states)].any()  # who left sees nothing
    if "max_block_comp" in settings:
        assert (states[:, PLAYERS + game.num_players :] == BLOCK).any()


def test_ids_by_hand():
    """3x4, two players: a hare one up and two to the left, a block one to the right, the other player on the same
    cell. Places of 5 x 7 around the own cell, planes own, other, block, stag, hare; then 12 own cells."""
    game = envs.game(ID, height=3, width=4, num_players=2, num_stags=0, num_hares=1, max_block_comp=1)
    state = make_state(game, [6, 6], {0: ITEM + 1, 7: BLOCK})
    things = Things(game)
    ids = things.of_states(state[None], np.array([0]), np.array([0]))[0]
    hare = 1 + ((-1 + 2) * 7 + (-2 + 3)) * 5 + 4
    block = 1 + ((0 + 2) * 7 + (1 + 3)) * 5 + 2
    other = 1 + ((0 + 2) * 7 + (0 + 3)) * 5 + 1
    own = 1 + 5 * 7 * 5 + 6
    assert sorted(ids[ids > 0]) == sorted([hare, block, other, own])
    assert things.num_ids == 1 + 5 * 7 * 5 + 12 and things.most == 2 + 1 + 4


def test_a_shifted_board_looks_the_same_but_for_the_own_place():
    game = envs.game(ID, height=6, width=6)
    things, rng = Things(game), np.random.default_rng(0)
    for _ in range(20):
        cells = rng.choice(25, size=9, replace=False)  # of 5x5
        rows, columns = np.divmod(cells, 5)
        seen = []
        for down, right in product((0, 1), (0, 1)):
            place = (rows + down) * 6 + columns + right
            state = make_state(game, place[:4], dict(zip(place[4:], [ITEM] + [ITEM + 1] * 4, strict=True)))
            seen.append(things.of_states(state[None], np.array([0]), np.array([2]))[0])
        assert len({ids[0] for ids in seen}) == 4
        assert len({tuple(sorted(ids[1:])) for ids in seen}) == 1


def test_seats_are_seen_in_turn():
    """Who sits where does not matter: with all seats turned by one, the next player sees what this one saw."""
    game, states = play_some(num=40)
    things, turned = Things(game), turn_seats(game, states)
    row, viewer = np.nonzero(game.alive(states))
    assert (things.of_states(states, row, viewer) == things.of_states(turned, row, (viewer + 1) % 4)).all()


def test_a_viewer_can_be_put_elsewhere():
    """`own`: what a player would see on that cell is what it sees once it stands there; -1 is where it is."""
    game, states = play_some(num=60, height=5, width=5, max_block_comp=2)
    rng, things = np.random.default_rng(0), Things(game)
    row, viewer = np.nonzero(game.alive(states))
    own = rng.integers(25, size=len(row))
    moved = states[row]
    moved[np.arange(len(row)), PLAYERS + viewer] = own
    there = things.of_states(moved, np.arange(len(row)), viewer)
    assert (things.of_states(states, row, viewer, own) == there).all()
    some = rng.random(len(row)) < 0.5
    mixed = things.of_states(states, row, viewer, np.where(some, own, -1))
    assert (mixed == np.where(some[:, None], there, things.of_states(states, row, viewer))).all()


def test_time_is_a_share_that_never_reaches_the_end():
    things = Things(envs.game(ID, horizon=20))
    shares = things.time(np.array([0, 5, 19, 20]))
    assert shares.dtype == np.float32 and shares == pytest.approx([0.0, 0.25, 0.95, 0.95])
    game, states = play_some(num=4)
    assert Things(game).time(states[:, T]) == pytest.approx(states[:, T] / game.config.horizon)


def test_a_sum_of_embeddings_is_a_dense_layer_on_one_hot_ids():
    """Forward, and backward: the same gradients; id 0 adds nothing and gets none."""
    game, states = play_some(num=50)
    things = Things(game)
    row, viewer = np.nonzero(game.alive(states))
    ids = torch.from_numpy(things.of_states(states, row, viewer))
    table = embedding_table(things.num_ids, 9, torch.Generator().manual_seed(0))
    same = table.detach().clone().requires_grad_(True)
    dense = torch.nn.functional.one_hot(ids.long(), things.num_ids).sum(1).float()
    weights = torch.randn(len(ids), 9, generator=torch.Generator().manual_seed(1))
    summed, expected = sum_of_embeddings(ids, table), dense @ same
    assert torch.allclose(summed, expected, atol=1e-5)
    (summed * weights).sum().backward()
    (expected * weights).sum().backward()
    assert torch.allclose(table.grad[1:], same.grad[1:], atol=1e-5) and table.grad.any() and not table.grad[0].any()
    seen = torch.zeros(things.num_ids, dtype=bool).index_fill_(0, ids.unique().long(), True)
    assert not table.grad[~seen].any() and (ids == 0).any()
    nothing = torch.zeros(3, 4, dtype=torch.int32)
    table.grad = None
    assert not sum_of_embeddings(nothing, table).any()
    sum_of_embeddings(nothing, table).sum().backward()
    assert not table.grad.any()


@pytest.mark.parametrize("kind", [{"fused": True}, {"foreach": True}])
def test_acting_sees_what_was_learned_and_nothing_stays_nothing(kind):
    """After every step of an optimizer, in either mode, with weight decay too."""
    table = embedding_table(6, 4, torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW([table], lr=0.1, **kind)
    ids = torch.tensor([[1, 5, 0], [2, 0, 0]], dtype=torch.int32)
    for _ in range(3):
        with torch.no_grad():
            acting = sum_of_embeddings(ids, table)
        learning = sum_of_embeddings(ids, table)
        assert torch.equal(acting, learning.detach()) and not table[0].any()
        optimizer.zero_grad()
        learning.pow(2).sum().backward()
        optimizer.step()


def test_masked_log_softmax_is_the_plain_one_over_legal_actions():
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(300, 7, generator=generator)
    legal = torch.rand(300, 7, generator=generator) < 0.5
    legal[:, 4] = True
    log_probs = legal_log_softmax(logits, legal)
    for row, mask, found in zip(logits, legal, log_probs, strict=True):
        assert torch.allclose(found[mask], torch.log_softmax(row[mask], 0), atol=1e-5)
        assert not found[~mask].exp().any()
    assert torch.isfinite(log_probs).all()
    assert torch.allclose(legal_log_softmax(logits, torch.ones(300, 7, dtype=bool)), torch.log_softmax(logits, 1))
