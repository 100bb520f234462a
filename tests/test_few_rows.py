"""envs/few_rows.py: a network asked by tape says what torch says, whatever happens to it."""

import numpy as np
import pytest
import torch
from test_trees import random_roots
from torch import nn

import hopplus_mcts as mcts
from envs import few_rows
from envs.few_rows import FewRows, begin_search
from envs.sight import legal_log_softmax, sum_of_embeddings

torch.set_num_threads(1)


class Net(nn.Module):
    """Everything that a tape can hold."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer = nn.Parameter(torch.randn(30, 12)), nn.Linear(6, 5)
        self.more = nn.Sequential(nn.Linear(8, 5, bias=False), nn.ReLU())
        self.register_buffer("scale", torch.rand(5) + 0.5)
        self.temperature = 1.0

    def forward(self, ids, t, legal, x):
        left, right = sum_of_embeddings(ids, self.table).chunk(2, dim=1)
        hidden = torch.tanh(self.layer(left - right * t[:, None])) + self.more(x.flatten(1)) / self.scale
        return legal_log_softmax(self.act(hidden) * self.temperature * (2 - x[:, 1, 3, None]), legal), hidden[:, 0]

    def act(self, hidden):
        return hidden


def question(rows: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    legal = rng.random((rows, 5)) < 0.6
    legal[:, 2] = True
    ids = rng.integers(30, size=(rows, 4), dtype=np.int32)
    return ids, rng.random(rows, np.float32), legal, rng.random((rows, 2, 4), np.float32)


def by_torch(net, arrays):
    with torch.no_grad():
        log_probs, value = net(*map(torch.from_numpy, arrays))
    return log_probs.exp().numpy(), value.numpy()


def check(few: FewRows, tape: bool, calls: int = 3) -> None:
    """Answers in a search of three trees are torch's, and from the second question on those of a tape, or not."""
    begin_search(3, few)
    for seed in range(calls):
        arrays = question(3 + 2 * seed, seed)
        for answer, expected in zip(few(*arrays), by_torch(few.net, arrays), strict=True):
            assert answer.shape == expected.shape and answer.dtype == expected.dtype
            assert np.abs(answer - expected).max() < 1e-5
    assert few.trusted == tape


def test_a_tape_says_what_torch_says():
    few = FewRows(Net())
    check(few, True, calls=40)
    assert [len(answer) for answer in few(*question(0))] == [0, 0]
    assert len(few(*question(few_rows.ROWS + 1))[0]) == few_rows.ROWS + 1  # no room: torch
    begin_search(few_rows.FEW + 1, few)
    few(*question(2))
    assert not few.trusted


def test_answers_do_not_hang_on_what_was_asked_before():
    """A run that was killed and goes on has a new tape, and compares it in another search."""
    old, new = FewRows(Net()), FewRows(Net())
    check(old, True)
    for few in (old, new):
        begin_search(3, few)
    for seed in range(3):
        for one, other in zip(old(*question(9, seed)), new(*question(9, seed)), strict=True):
            assert (one == other).all()


def test_all_changes_of_weights_and_code_are_seen(monkeypatch):
    few = FewRows(Net())
    check(few, True)
    net, tape = few.net, few.tape
    for fused in (False, True):  # a fused optimizer leaves no trace but in the numbers
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1, fused=fused)
        sum(x.sum() for x in net(*map(torch.from_numpy, question(5)))).backward()
        optimizer.step()
        check(few, True)
    net.layer.weight.data = torch.randn(5, 6)
    check(few, True)
    net.more[0].weight = nn.Parameter(torch.randn(5, 8))
    check(few, True)
    assert few.tape is tape
    net.temperature = 3.0
    check(few, True)
    assert few.tape is not tape
    net.layer = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5))
    check(few, False)  # other weights than on the tape: torch from now on


def test_a_change_that_no_attribute_shows_is_seen_in_the_sixteenth_search(monkeypatch):
    few = FewRows(Net())
    check(few, True)
    monkeypatch.setattr(Net, "act", lambda self, hidden: torch.relu(hidden))
    few.searches = 16
    check(few, True)


@pytest.mark.parametrize("act", [torch.sin, lambda x: x * len(x), lambda x: x if x.sum() > 0 else -x])
def test_torch_does_what_a_tape_cannot(act, monkeypatch):
    monkeypatch.setattr(Net, "act", lambda self, hidden: act(hidden))
    check(FewRows(Net()), False)


def test_a_wrong_tape_is_not_trusted(monkeypatch):
    monkeypatch.setitem(few_rows.WRITES, torch.tanh, few_rows.WRITES[torch.relu])
    check(FewRows(Net()), False)


def test_who_watches_a_network_sees_every_answer(monkeypatch):
    few, seen = FewRows(Net()), []
    check(few, True)
    handle = few.net.layer.register_forward_hook(lambda module, given, found: seen.append(found))
    check(few, False)
    assert len(seen) == 6  # three questions, each asked here once more
    handle.remove()
    check(few, True)
    monkeypatch.setattr(Net, "act", lambda self, hidden: setattr(self, "last", hidden) or hidden)
    check(FewRows(Net()), False)


def test_few_trees_grow_as_by_torch(monkeypatch):
    """Rounding can turn a close choice: a few trees may differ."""
    args, game, nets, roots = random_roots(num=32, simulations=24)
    found = []
    for few in (32, 0):
        monkeypatch.setattr(few_rows, "FEW", few)
        planner = mcts.Planner(args, game, nets, None)
        found.append(planner.search(roots))
        assert planner.agent.trusted == planner.moa.trusted == bool(few)
    same = (found[0][3] == found[1][3]).all(1)
    assert same.mean() > 0.9
    for tape, by_torch_alone in zip(*found, strict=True):
        assert np.abs(tape[same].astype(float) - by_torch_alone[same]).max() < 1e-4
