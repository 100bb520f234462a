"""HOP+: what both scripts share (networks, beliefs, imagined players, hindsight) is tested on both, by hand; and whole
runs of hopplus_mcts.py. Its trees: test_trees.py; planning without trees: test_hopplus_nomcts.py."""

import ast
import json
import re
from contextlib import contextmanager
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from boards import (
    HARE,
    ID,
    STAG,
    make_models,
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
import hopplus_mcts as mcts
import hopplus_nomcts as nomcts
import pretrain_vae
from envs.grid import GONE, ITEM, PLAYERS, STAY
from envs.roles import load_policy
from envs.run import descend, main
from envs.sight import legal_log_softmax, sum_of_embeddings
from envs.trees import AIMLESS, BYSTANDER, HABIT, KEEN, UNKNOWN, draw_goals
from train_world_model import World

ROOT = Path(__file__).resolve().parent.parent
NOTHING = np.zeros((1, 4), np.int64)  # was taken by anybody
BOTH = pytest.mark.parametrize("hop", [mcts, nomcts], ids=["mcts", "nomcts"])
PERFECT = {"hopplus_mcts": [], "hopplus_nomcts": ["--perfect-model"]}  # no world model to make first
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """(game, goal mode) -> a goal checkpoint, made when it is first asked for."""
    made = {}

    def checkpoint(env_id: str = ID, goal_mode: str = "learned") -> str:
        if (env_id, goal_mode) not in made:
            made[env_id, goal_mode] = pretrain(tmp_path_factory.mktemp("vae"), env_id, goal_mode)
        return made[env_id, goal_mode]

    return checkpoint


def make_beliefs(hop, goal_mode="oracle", num_envs=2, nets=None, game=ID, **settings):
    """An env, and what is believed of its players at first."""
    env = envs.make(game, num_envs=num_envs, seed=0)
    args, fresh = make_nets(hop, env.game, goal_mode, **{"open_mind": 0.0} | settings)
    return env, hop.Beliefs(args, env.game, (nets or fresh)["models"], num_envs, 0)


def make_planner(hop, goal_mode="oracle", num_envs=6, nets=None, game=ID, **settings):
    """The same, and a planner on these beliefs; without trees it plans with the rules as world."""
    env = envs.make(game, num_envs=num_envs, seed=3)
    more = {"perfect_model": True, "draws": 3} if hop is nomcts else {"trees": 3, "simulations": 16}
    args, fresh = make_nets(hop, env.game, goal_mode, **more | settings)
    nets = nets or fresh
    return env, hop.Planner(args, env.game, nets, hop.Beliefs(args, env.game, nets["models"], num_envs, 1))


def see(beliefs, env, prior):
    """`look` with a given prior of the reader of goals."""
    beliefs.read = lambda env_row, player: beliefs.prior.__setitem__(..., np.asarray(prior, np.float32))
    beliefs.look(env)


# networks: each is written once, and everybody uses it


def squashed_agent(self, seen, t, legal, goals):
    """Agent.forward with tanh in the place of relu."""
    first = sum_of_embeddings(seen, self.embedding) + t[:, None] * self.time + self.goals(goals.flatten(1))
    actor, critic = torch.tanh(first).chunk(2, dim=1)
    log_probs = legal_log_softmax(self.policy_head(torch.tanh(self.actor(actor))), legal)
    return log_probs, self.value_head(torch.tanh(self.critic(critic)))[:, 0]


@BOTH
@pytest.mark.parametrize("num_envs", [6, 1])  # trees of a single game are few: see envs/few_rows.py
def test_a_change_of_the_agent_changes_learning_planning_and_play(num_envs, hop, monkeypatch):
    """With another activation, set in Agent.forward alone, loss, plans and played policies are those of the changed
    network: each is compared with a direct call of it."""
    found = []
    for forward in (hop.Agent.forward, squashed_agent):
        monkeypatch.setattr(hop.Agent, "forward", forward)
        env, planner = make_planner(hop, "none", num_envs=num_envs, play_beta=0.5, prior_power=1.0)
        agent, things, drawn = planner.nets["agent"], planner.things, []
        rng = np.random.default_rng(0)
        for _ in range(3):
            random_step(env, rng)
        planner.beliefs.look(env)
        row, focal = np.nonzero(env.alive)
        seen, t = torch.from_numpy(things.of_states(env.states, row, focal)), torch.from_numpy(things.time(env.t[row]))
        legal, goals = torch.from_numpy(env.legal[row, focal]), planner.unknown_goal.expand(len(row), 3, -1)
        with torch.no_grad():
            log_probs, value = agent(seen, t, legal, goals)

            # learning
            policy = (legal / legal.sum(1, keepdim=True)).float()
            mb = {"seen": seen, "t": t, "legal": legal, "goals": goals, "policy": policy, "returns": torch.ones(len(t))}
            mb |= {"action": policy.argmax(1), "log_prob": torch.zeros(len(t)), "advantage": torch.randn(len(t))}
            losses = hop.agent_loss(planner.args, agent, mb, *((0.0,) if hop is nomcts else ()))
            expected = planner.args.vf_coef * (value - 1).pow(2).mean()
            assert losses["value_loss"].item() == pytest.approx(expected.item(), rel=1e-5)

        # planning
        plan = planner.plan(env.states, row, focal)
        assert hop is nomcts or planner.agent.trusted == (num_envs == 1)
        assert np.abs(plan.prior - log_probs.exp().numpy()).max() < 1e-5
        assert np.abs(plan.value - value.numpy()).max() < 1e-5

        # play, planned and raw
        monkeypatch.setattr(hop, "draw_rows", lambda probs, rng, drawn=drawn: drawn.append(probs) or probs.argmax(1))
        for planned in (True, False):
            hop.Policy(planner, 0, 0, False, planned).act(env)
        assert np.abs(drawn[1] - log_probs.exp().numpy()[focal == 0]).max() < 1e-5
        figures = [torch.stack(list(losses.values())).numpy(), plan.prior, plan.value, plan.q_values, *drawn]
        found.append(figures)
    for before, after in zip(*found, strict=True):
        assert np.abs(before - after).max() > 0.01


def always_stay(self, seen, t, legal, goal):
    """OpponentModel.forward of a model that knows one thing."""
    return legal_log_softmax(60.0 * torch.eye(legal.shape[1])[STAY].expand(len(seen), -1), legal)


@BOTH
def test_a_change_of_the_opponent_model_changes_beliefs_plans_and_imagined_players(hop, monkeypatch):
    env, planner = make_planner(hop, "oracle", num_envs=20)
    monkeypatch.setattr(pretrain_vae.OpponentModel, "forward", always_stay)
    beliefs, models, asked = planner.beliefs, planner.nets["models"], []
    beliefs.look(env)
    assert beliefs.predict()[..., STAY] == pytest.approx(np.ones((20, 4)), abs=1e-5)
    before = beliefs.belief.copy()
    actions = np.full((20, 4), STAY)
    hop.ImaginedPlayers(beliefs, 5, [0], 0).act(actions)
    assert (actions == STAY).all()

    row, focal = np.nonzero(env.alive)
    if hop is mcts:
        planner.plan(env.states, row, focal)
        [[trees, *_]] = planner.room.made.values()
        assert trees.others[:, 0, :, STAY] == pytest.approx(np.ones((len(row) * 3, 3)), abs=1e-5)
        assert trees.others[:, 0, :, STAY - 1].max() < 1e-5
    else:
        step = planner.world.step
        monkeypatch.setattr(planner.world, "step", lambda states, joint: asked.append(joint) or step(states, joint))
        planner.plan(env.states, row, focal)
        assert ((asked[0] != STAY).sum(1) <= 1).all() and len(asked[0]) > 100  # only who plans moves

    beliefs.watch(actions, NOTHING, env.alive, np.zeros(20, bool))
    assert np.abs(beliefs.belief - before).max() < 1e-5  # all goals explain staying alike
    seen, t = torch.from_numpy(beliefs.seen[:, 0]), torch.zeros(20)
    mb = {"seen": seen, "t": t, "legal": torch.from_numpy(env.legal[:, 0]), "goal": torch.zeros(20, models.goal_size)}
    mb["action"] = torch.full((20,), STAY)
    assert pretrain_vae.moa_loss(models.moa, mb, 0.0, np.random.default_rng(0)).item() < 1e-5
    monkeypatch.undo()
    beliefs.look(env)
    beliefs.watch(actions, NOTHING, env.alive, np.zeros(20, bool))
    assert np.abs(beliefs.belief - before).max() > 0.01


def learning_rows(hop, goal_mode="oracle", seed=0):
    """Rows of random play as the training loop makes them: of own decisions, of the opponent model, and sequences."""
    env = envs.make(ID, num_envs=16, seed=seed)
    args, nets = make_nets(hop, env.game, goal_mode)
    things, rng, size = envs.sight.Things(env.game), np.random.default_rng(seed), nets["models"].goal_size
    own, moa, steps = {}, {}, {}
    for _ in range(12):
        alive, legal, t = env.alive.copy(), env.legal.copy(), np.repeat(things.time(env.t)[:, None], 4, 1)
        now = {"seen": things(env.obs), "t": t, "legal": legal}
        actions = random_step(env, rng)
        policy = rng.random(legal.shape).astype(np.float32) * legal
        mine = {"goals": rng.normal(size=(16, 4, 3, size)).astype(np.float32), "action": actions}
        mine |= {"policy": policy / policy.sum(2, keepdims=True), "log_prob": np.zeros((16, 4), np.float32)}
        mine |= {name: rng.normal(size=(16, 4)).astype(np.float32) for name in ("returns", "advantage")}
        theirs = {"action": actions, "goal": rng.normal(size=(16, 4, size)).astype(np.float32)}
        for store, arrays in ((own, now | mine), (moa, now | theirs)):
            for name, array in arrays.items():
                store.setdefault(name, []).append(array[alive])
        known = {"known": alive, "resets": np.zeros((16, 4), bool), "last_action": np.full((16, 4), 3)}
        for name, array in (now | theirs | known).items():
            steps.setdefault(name, []).append(array.reshape(64, *array.shape[2:]))
    own, moa = ({name: np.concatenate(parts) for name, parts in store.items()} for store in (own, moa))
    sequences = {name: torch.from_numpy(np.stack(parts)) for name, parts in steps.items()}
    return args, nets, own, moa, sequences | {"memory": torch.zeros(64, 16)}


@BOTH
@pytest.mark.parametrize("goal_mode", ["learned", "oracle"])
def test_every_parameter_gets_a_gradient(hop, goal_mode):
    args, nets, own, moa, sequences = learning_rows(hop, goal_mode)
    models, own, moa = nets["models"], *({k: torch.from_numpy(x) for k, x in rows.items()} for rows in (own, moa))
    losses = hop.agent_loss(args, nets["agent"], own, *((0.01,) if hop is nomcts else ()))
    (losses["policy_loss"] + losses["value_loss"]).backward()
    pretrain_vae.moa_loss(models.moa, moa, 0.15, np.random.default_rng(0)).backward()
    for part in (nets["agent"], models.moa):
        for name, weight in part.named_parameters():
            assert torch.isfinite(weight.grad).all() and weight.grad.any(), name
    pretrain_vae.reader_loss(models, sequences).backward()
    for name, weight in models.reader.named_parameters():
        assert torch.isfinite(weight.grad).all() and weight.grad.any(), name
    assert not any(weight.requires_grad for weight in models.space.parameters())


def learn_once(hop, change=lambda *_: None):
    """The weights after the updates of one iteration on rows that `change` may change before."""
    args, nets, own, moa, sequences = learning_rows(hop, "learned")
    for name, value in {"updates": 3, "batch_rows": 64, "update_epochs": 1, "moa_updates": 3}.items():
        setattr(args, name, value)
    change(own, moa, sequences)
    models = nets["models"]
    parts = {"agent": nets["agent"], "moa": models.moa, "reader": models.reader, "space": models.space}
    trained = {name: torch.optim.Adam(parts[name].parameters(), lr=1e-3) for name in ("agent", "moa", "reader")}
    data, more = {"own": own, "moa": moa, "moa_offline": moa}, ((0.01,) if hop is nomcts else ())
    rng = np.random.default_rng(0)
    logs = [hop.update(args, nets, trained, data, sequences, rng, *more) for _ in range(2)]
    assert np.isfinite(list(logs[0].values())).all()
    return {name: torch.cat([x.detach().flatten() for x in part.parameters()]) for name, part in parts.items()}


@BOTH
def test_each_network_learns_from_its_own_rows_alone(hop):
    """Other returns change the agent, other actions seen the opponent model, other sequences the reader: each itself,
    and nothing else. Nothing changes the goal space."""

    def other_returns(own, moa, sequences):
        own["returns"] += 1.0
        own["advantage"][::2] *= -1.0

    def other_goals(own, moa, sequences):
        moa["goal"][:, 0] *= -1.0

    def other_sequences(own, moa, sequences):
        sequences["goal"] += 1.0

    usual, start = learn_once(hop), make_nets(hop, envs.game(ID), "learned")[1]["models"].space
    start = torch.cat([x.flatten() for x in start.parameters()])
    for change, moved in ((other_returns, "agent"), (other_goals, "moa"), (other_sequences, "reader")):
        changed = learn_once(hop, change)
        for part in ("agent", "moa", "reader"):
            same = torch.equal(usual[part], changed[part])
            assert same == (part != moved) or (part == "reader" and moved == "moa"), (part, moved)
        assert torch.equal(changed["space"], start)


@BOTH
def test_rotating_the_seats_rotates_beliefs_and_plans(hop):
    """No index bias: who sat in seat i and sits in i + 1 believes and plans the same. In the trees exactly so; without
    them, what is imagined comes in another order, and torch may round the last digit otherwise."""
    game, states = play_some(num=24, steps=3)
    nets, planners = make_nets(hop, game, "learned")[1], []
    for boards in (states, turn_seats(game, states)):
        env, planner = make_planner(hop, "learned", num_envs=24, nets=nets)
        env.set_states(boards)
        planner.beliefs.look(env)
        planners.append(planner)
    first, second = (planner.beliefs for planner in planners)
    assert np.abs(np.roll(first.belief, 1, axis=1) - second.belief)[second.alive].max() < 1e-5
    assert np.abs(np.roll(first.probs, 1, axis=1) - second.probs).max() < 1e-5
    second.streams[:] = np.roll(first.streams.reshape(24, 4), 1, axis=1).ravel()
    for name in ("belief", "goal", "probs"):
        getattr(second, name)[:] = np.roll(getattr(first, name), 1, axis=1)
    row, focal = np.nonzero(first.alive)
    plans = planners[0].plan(states, row, focal), planners[1].plan(turn_seats(game, states), row, (focal + 1) % 4)
    for name, a, b in zip(plans[0]._fields, *plans, strict=True):
        assert a.tobytes() == b.tobytes() if hop is mcts else np.allclose(a, b, atol=1e-5), name
    assert len(np.unique(plans[0].value)) > 40 and plans[0].prior.max(1).mean() > 0.3  # and these plans differ


# plans and their uses


def test_mean_q_values_by_hand():
    """Two trees. Q of action 0: 1 in tree 0, 3 in tree 1 -> 2; action 1 was tried in tree 0 alone: 1.5; action 2 never:
    it counts as the state: 4 visits of a mean Q of (0.5 * 2 + 0.25 * 1.5) / 0.75 and the network's 3, once."""
    visits, q_values = np.array([[[2, 1, 0], [1, 0, 0]]]), np.array([[[1.0, 1.5, 9.0], [3.0, 9.0, 9.0]]])
    prior, value = np.array([[0.5, 0.25, 0.25]]), np.array([3.0])
    state = (3.0 + 4 * (1.0 + 0.375) / 0.75) / 5
    assert mcts.mean_q_values(visits, q_values, prior, value)[0] == pytest.approx([2.0, 1.5, state], abs=1e-6)


@BOTH
def test_planned_policy_by_hand(hop):
    """softmax(power log prior + beta Q) over what is legal, whatever Q an illegal action has."""
    plan = SimpleNamespace(
        legal=np.array([[True, True, False]]),
        prior=np.array([[0.8, 0.2, 0.0]]),
        q_values=np.array([[1.0, 1.5, 50.0]]),
    )
    args = hop.Args(prior_power=0.5)
    odds = (0.8 / 0.2) ** 0.5 * np.exp(2.0 * (1.0 - 1.5))
    expected = [odds / (1 + odds), 1 / (1 + odds), 0.0]
    for policy in (hop.training_target, hop.acting_policy, hop.playing_policy):
        assert policy(args, plan, 2.0)[0] == pytest.approx(expected, abs=1e-6)


@BOTH
def test_a_checkpoint_plays_as_sharply_as_asked(hop, monkeypatch):
    """The same decision: the larger play_beta, the likelier the action planned most."""
    env, planner = make_planner(hop, "none", num_envs=64)
    policy, peaks = hop.Policy(planner, 0, 0, False), []
    monkeypatch.setattr(hop, "draw_rows", lambda p, rng: peaks.append(p.max(1).mean()) or p.argmax(1))
    assert policy.play_beta == planner.args.play_beta
    for beta in (0.5, 50.0):
        policy.play_beta = beta
        policy.act(env)
    assert peaks[1] > peaks[0] + 0.1


def test_more_simulations_on_demand():
    """As evaluate.py asks for them: the search of a loaded policy grows, whatever its run learned with."""
    env, planner = make_planner(mcts, "none")
    policy = mcts.Policy(planner, 0, 0, False)
    for simulations in (16, 5, 40):
        policy.simulations = simulations
        policy.act(env)
        assert (policy.thoughts[1]["visits"].sum(1) == 3 * simulations).all() and len(policy.thoughts[0]) == 6


def test_where_nobody_else_is_left_the_best_way_is_taken(monkeypatch):
    """Nothing is searched there, in however many steps a hare is: the best way by hand. Decisions come back in their
    order, whoever of them is alone."""
    env, planner = make_planner(mcts, "learned", num_envs=40)
    args, game, rows = planner.args, env.game, np.arange(40)
    states = env.states.copy()
    states[::3, PLAYERS + 1 : PLAYERS + 4] = GONE  # in every third game players 2 to 4 have left
    states[1, PLAYERS + 1 : PLAYERS + 3] = GONE  # one with two left
    env.set_states(states)
    planner.beliefs.look(env)
    searched, search = [], planner.search
    monkeypatch.setattr(planner, "search", lambda roots: searched.append(roots.state.copy()) or search(roots))
    plan = planner.plan(env.states, rows, np.zeros(40, int))
    [others] = searched
    assert (others == np.repeat(np.delete(states, np.s_[::3], 0), args.trees, 0)).all()
    assert (plan.legal == env.legal[:, 0]).all() and (plan.visits[::3] == 0).all()
    assert (plan.visits.sum(1)[rows % 3 > 0] == args.trees * args.simulations).mean() > 0.9  # a tree may end before
    policy = mcts.playing_policy(args, plan, args.play_beta)
    for row in rows[::3]:
        hares = np.stack(np.divmod(np.flatnonzero(states[row, PLAYERS + 4 :] == ITEM + 1), game.config.width), 1)

        def steps_from(cell):
            return int(np.abs(hares - np.divmod(cell, game.config.width)).sum(1).min())  # noqa: B023

        here = int(states[row, PLAYERS])
        if steps_from(here):
            nearer = [steps_from(cell) < steps_from(here) for cell in game.grid.neighbours[here]]
            expected = np.array([*nearer, 0, 0, 0]) / sum(nearer)  # any step towards a nearest hare
        else:
            expected = np.eye(7)[6]  # HARE
        assert policy[row] == pytest.approx(expected, abs=1e-3)
        assert plan.q_values[row].max() == pytest.approx(args.gamma ** steps_from(here), abs=1e-5)
    for some in (rows[::3], rows[1:3], rows[:0]):  # all alone, nobody alone, nobody at all
        plan = planner.plan(env.states, some, np.zeros(len(some), int))
        assert (plan.legal == env.legal[some, 0]).all() and len(plan.goals) == len(some)
    assert [len(states) for states in searched[1:]] == [2 * args.trees, 0]
    player = mcts.Policy(planner, 0, 0, False)
    player.act(env)
    told = {"prior", "visits", "depth"}  # by a search, which a replay shows
    assert not told & player.explain(0).keys() and told <= player.explain(2).keys() and "policy" in player.explain(0)


@BOTH
@pytest.mark.parametrize("goal_mode", ["learned", "none"])
def test_a_plan_is_made_on_goals_that_are_believed_in(hop, goal_mode, monkeypatch):
    """Each draw gives every other player on the board a goal: vector, cell and kind belong together and are
    hypotheses about that very player; who left has none. The first draw's goals are kept to learn with."""
    env, planner = make_planner(hop, goal_mode, num_envs=20)
    beliefs, rng, caught = planner.beliefs, np.random.default_rng(0), {}
    for _ in range(7):
        beliefs.look(env)
        info = env.step((rng.random(env.legal.shape) * env.legal).argmax(2))[-1]
        beliefs.watch(np.full((20, 4), STAY), NOTHING, env.alive, info["done"])
    beliefs.look(env)
    row, focal = np.nonzero(env.alive & (env.alive.sum(1) > 1)[:, None])  # who is alone needs but one draw
    if hop is mcts:
        search = planner.search
        monkeypatch.setattr(planner, "search", lambda roots, *x: caught.update(roots._asdict()) or search(roots, *x))
    else:
        ahead = planner.look_ahead
        names = ("streams", "goal", "cell", "code")
        monkeypatch.setattr(planner, "look_ahead", lambda *x: caught.update(zip(names, x[5], strict=True)) or ahead(*x))
    plan = planner.plan(env.states, row, focal)
    goal, cell, code = caught["goal"], caught["cell"], caught["code"]
    assert len(goal) == 3 * len(row) and (plan.goals == goal[::3]).all()
    unknown, gone = planner.unknown_goal.numpy(), 0
    for m, k in product(range(len(goal)), range(3)):
        env_row, player = row[m // 3], (focal[m // 3] + 1 + k) % 4
        if not env.alive[env_row, player]:
            assert (goal[m, k] == unknown).all() and code[m, k] == UNKNOWN
            gone += 1
            continue
        same = (beliefs.goal[env_row, player] == goal[m, k]).all(1)
        same &= (beliefs.cell[env_row] == cell[m, k]) & (beliefs.code[env_row] == code[m, k])
        assert beliefs.belief[env_row, player][same].sum() > 0
    assert gone > 20


# goals and beliefs


@BOTH
def test_bayes_by_hand(hop):
    """Kinds stag, hare, habit, aimless. First 0.8 * (0.75, 0.25), 0.1, 0.1. Then an action with likelihoods 0.5, 0.1,
    0.3, 0.2, a second with 0 (counts as 0.001), 0.4, 0.3, 0.2; a floor of 0.1 goes to the prior at each look."""
    env, beliefs = make_beliefs(hop, belief_floor=0.1)
    see(beliefs, env, [0.75, 0.25, 0.0, 0.0])
    prior = np.array([0.6, 0.2, 0.1, 0.1])
    assert beliefs.belief[1, 2] == pytest.approx(prior, abs=1e-6)
    expected, actions = prior, np.full((2, 4), STAY)
    for likelihood in ((0.5, 0.1, 0.3, 0.2), (0.0, 0.4, 0.3, 0.2)):
        beliefs.probs[1, 2, :, STAY] = likelihood
        beliefs.watch(actions, NOTHING, env.alive, np.zeros(2, bool))
        expected = expected * np.maximum(likelihood, 0.001)
        expected /= expected.sum()
        assert beliefs.belief[1, 2] == pytest.approx(expected, abs=1e-6)
        see(beliefs, env, [0.75, 0.25, 0.0, 0.0])
        expected = 0.9 * expected + 0.1 * prior
        assert beliefs.belief[1, 2] == pytest.approx(expected, abs=1e-6)
    assert beliefs.belief.sum(2) == pytest.approx(np.ones((2, 4)), abs=1e-5)


@BOTH
def test_an_open_mind_by_hand(hop):
    """0.4 of the first belief in a kind goes to all kinds alike: 0.6 * (0.75, 0.25) + 0.4 * (0.5, 0.5), times 0.8."""
    env, beliefs = make_beliefs(hop, open_mind=0.4)
    see(beliefs, env, [0.75, 0.25, 0.0, 0.0])
    assert beliefs.belief[0, 1] == pytest.approx([0.8 * 0.65, 0.8 * 0.35, 0.1, 0.1], abs=1e-5)


@BOTH
def test_a_goal_whose_prey_was_taken_is_impossible(hop):
    env, beliefs = make_beliefs(hop, belief_floor=0.1)
    see(beliefs, env, [0.75, 0.25, 0.0, 0.0])
    states = env.states.copy()
    board = states[:, PLAYERS + 4 :]
    board[board == ITEM] = 0  # no stag left
    beliefs.watch(np.full((2, 4), STAY), NOTHING, env.alive, np.zeros(2, bool))
    before = beliefs.belief.copy()
    env.set_states(states)
    see(beliefs, env, [0.75, 0.25, 0.0, 0.0])
    assert not beliefs.belief[:, :, 0].any()
    kept = before[..., 1:] / before[..., 1:].sum(-1, keepdims=True)
    assert beliefs.belief[..., 1:] == pytest.approx(0.9 * kept + 0.1 * np.array([0.8, 0.1, 0.1]), abs=1e-5)
    drawn = np.zeros((8, 50, 3), np.int64)
    rows, focal = np.divmod(np.arange(8), 4)
    draw_goals(beliefs.belief, beliefs.alive, rows, focal, beliefs.streams, drawn, np.zeros((8, 50), np.uint64))
    assert set(np.unique(drawn)) == {1, 2, 3}  # nobody is thought to hunt the stag


@BOTH
def test_what_was_pursued_is_carried_over(hop):
    """Habits: 0.995 of the old plus this episode's last belief; the next episode starts from habits + one prior."""
    env, beliefs = make_beliefs(hop)
    see(beliefs, env, [0.75, 0.25, 0.0, 0.0])
    prior = np.array([0.6, 0.2, 0.1, 0.1])
    beliefs.habits[1, 2, 0] = 2.0, 4.0, 1.0, 0.0
    beliefs.probs[1, 2, :, STAY] = 0.5, 0.1, 0.3, 0.2
    beliefs.watch(np.full((2, 4), STAY), NOTHING, env.alive, np.array([False, True]))
    last = prior * (0.5, 0.1, 0.3, 0.2)
    habits = 0.995 * np.array([2.0, 4.0, 1.0, 0.0]) + last / last.sum()
    assert beliefs.habits[1, 2, 0] == pytest.approx(habits, abs=1e-5)
    assert not beliefs.habits[0].any() and not beliefs.habits[:, :, 1].any()  # nobody took anything
    see(beliefs, env, [0.75, 0.25, 0.0, 0.0])
    assert beliefs.belief[1, 2] == pytest.approx((habits + prior) / (habits + prior).sum(), abs=1e-5)


@BOTH
def test_what_is_pursued_after_an_item_was_taken_counts_apart(hop):
    """Snowdrift, kinds drift, habit, aimless: player 2 clears a drift and stays. Half of its belief begins anew, from
    what it pursued after a drift in earlier episodes; what it pursued until then counts among the starts. Who took
    something as the episode ended begins the next one as ever, and nobody else is concerned."""
    env, beliefs = make_beliefs(hop, game="msd-4x4", num_envs=2, belief_floor=0.0)
    see(beliefs, env, [1.0, 0.0, 0.0])
    prior = np.array([0.8, 0.1, 0.1])
    beliefs.habits[0, 2, 1] = 0.0, 0.0, 9.0
    beliefs.probs[..., STAY] = 0.2, 0.4, 0.4
    taken = np.zeros((2, 4), np.int64)
    taken[0, 2] = taken[1, 1] = 1
    beliefs.watch(np.full((2, 4), STAY), taken, env.alive, np.array([False, True]))
    last = np.array([0.16, 0.04, 0.04]) / 0.24
    assert beliefs.habits[0, 2] == pytest.approx(np.stack([last, [0.0, 0.0, 9.0]]), abs=1e-5)
    assert (
        beliefs.habits[1, :, 0] == pytest.approx(np.tile(last, (4, 1)), abs=1e-5) and not beliefs.habits[1, :, 1].any()
    )
    assert not beliefs.habits[0, [0, 1, 3]].any()
    see(beliefs, env, [1.0, 0.0, 0.0])
    anew = (prior + np.array([0.0, 0.0, 9.0])) / 10
    assert beliefs.belief[0, 2] == pytest.approx(0.5 * last + 0.5 * anew, abs=1e-5)
    assert beliefs.belief[0, [0, 1, 3]] == pytest.approx(np.tile(last, (3, 1)), abs=1e-5)
    assert beliefs.belief[1] == pytest.approx(np.tile((last + prior) / 2, (4, 1)), abs=1e-5)
    held = beliefs.belief[0, 2].copy()
    beliefs.probs[...] = 1.0
    beliefs.watch(np.full((2, 4), STAY), NOTHING, env.alive, np.array([True, False]))
    assert beliefs.habits[0, 2] == pytest.approx(np.stack([last, held + 0.995 * np.array([0.0, 0.0, 9.0])]), abs=1e-5)
    see(beliefs, env, [1.0, 0.0, 0.0])
    assert beliefs.belief[0, 2] == pytest.approx((last + prior) / 2, abs=1e-5)  # an episode's start again


@BOTH
@pytest.mark.parametrize("bystander_prior", [0.0, 0.2])
def test_the_keen_are_a_hypothesis_of_their_own(hop, bystander_prior):
    """First of those without items, also where nobody is thought a bystander; imagined like the others."""
    env, beliefs = make_beliefs(hop, "learned", 40, game="msd-4x4", keen_prior=0.3, bystander_prior=bystander_prior)
    free = [KEEN, *[BYSTANDER] * (bystander_prior > 0), HABIT, AIMLESS]
    beliefs.look(env)
    assert beliefs.code[0, 6:].tolist() == free and (beliefs.kinds_of_goals()[0, 6:] == np.eye(1 + len(free))[1:]).all()
    first = [0.3, *[0.2] * (bystander_prior > 0), 0.1, 0.1]
    assert beliefs.belief[..., 6:] == pytest.approx(np.tile(first, (40, 4, 1)), abs=1e-5)
    assert (beliefs.goal[..., 6, :] == -beliefs.models.flag(pretrain_vae.HABIT).numpy()).all()
    imagined = hop.ImaginedPlayers(beliefs, 0, [0], 3)
    imagined.act(np.zeros((40, 4), np.int64))
    kinds = np.take_along_axis(beliefs.code, imagined.goal, 1)
    assert set(np.unique(kinds[kinds < 0])) == set(free)


@BOTH
def test_among_bystanders_a_player_is_as_good_as_alone(hop):
    """Others that touch nothing leave all drifts: their draws count as the best way on alone, and only theirs."""
    env, planner = make_planner(hop, "learned", 8, game="msd-4x4", bystander_prior=0.2)
    beliefs, rows, focal = planner.beliefs, np.arange(8), np.zeros(8, np.int64)
    steps = env.game.config.horizon + 1 if hop is mcts else planner.AMONG_BYSTANDERS
    how = steps, planner.args.reward_scale, planner.args.gamma
    ways, _ = World(env.game, None).ways_on(env.states, focal, *how, planner.raw)
    beliefs.look(env)
    bystander = int(np.flatnonzero(beliefs.code[0] == BYSTANDER)[0])
    beliefs.belief[:] = np.eye(beliefs.belief.shape[2])[bystander]
    plan = planner.plan(env.states, rows, focal)
    assert np.where(plan.legal, plan.q_values - ways, 0.0) == pytest.approx(np.zeros(ways.shape), abs=1e-4)
    assert plan.q_values.max(1).min() > 1.0  # up to six drifts at 2 each
    beliefs.belief[4:, 2] = np.eye(beliefs.belief.shape[2])[bystander + 1]  # of one player more is known
    mixed = planner.plan(env.states, rows, focal)
    assert mixed.q_values[:4] == pytest.approx(plan.q_values[:4], abs=1e-4)
    assert np.abs(mixed.q_values - plan.q_values)[4:].max(1).min() > 0.1


def test_patience_is_for_those_who_surely_act():
    """The discount of a decision: patient with somebody keen, unless somebody may be as oneself is."""
    models = make_models(envs.game(ID), "learned")
    habit, aimless, unknown = (
        models.flag(x).numpy() for x in (pretrain_vae.HABIT, pretrain_vae.AIMLESS, pretrain_vae.UNKNOWN)
    )
    keen, stag = -habit, np.append(np.ones(models.z_size, np.float32), np.zeros(pretrain_vae.FLAGS, np.float32))
    teams = [(keen, stag, unknown), (keen, -aimless, keen), (keen, habit, keen), (stag, unknown, aimless), (habit,) * 3]
    found = pretrain_vae.discounts(SimpleNamespace(gamma=0.7, patience=0.95), np.array([teams]))
    assert found.tolist() == [[0.95, 0.95, 0.7, 0.7, 0.7]]


@BOTH
def test_values_learn_with_the_discount_of_the_goals_that_were_drawn(hop):
    """The same steps, with and without patience: 1 + gamma * 4, of each player's own."""
    zero, no = np.zeros((1, 1, 2), np.float32), np.zeros((1, 1, 2), bool)
    follows, cut = np.full((1, 1, 2) if hop is nomcts else (1, 2), 4.0, np.float32), [no] if hop is nomcts else []
    got = hop.lambda_returns(zero + 1, zero, follows, no, *cut, np.array([[[0.5, 0.75]]]), 0.9)
    assert got.tolist() == [[[3.0, 4.0]]]


def test_half_of_those_who_head_for_something_teach_what_the_keen_do():
    """Of rule-based play, where somebody may be keen; the other rows stay as they are."""
    game = envs.game("msd-4x4")
    models = make_models(game, "learned")
    plain, taught = (pretrain_vae.rehearsal(models, game, 2000, 3, keen) for keen in (False, True))
    keen = (taught["goal"] == -models.flag(pretrain_vae.HABIT).numpy()).all(1)
    assert (taught["goal"][~keen] == plain["goal"][~keen]).all() and (taught["seen"] == plain["seen"]).all()
    heads = (plain["goal"][:, : models.z_size] != 0).any(1)
    assert heads[keen].all() and keen[heads].mean() == pytest.approx(0.5, abs=0.05) and (~heads).sum() > 100
    models = make_models(game, "none")
    assert not (pretrain_vae.rehearsal(models, game, 400, 3, True)["goal"] < 0).any()


@BOTH
def test_switches_of_opponent_modelling(hop):
    for intra, inter in ((False, True), (True, False), (False, False)):
        env, beliefs = make_beliefs(hop, intra_om=intra, inter_om=inter)
        see(beliefs, env, [0.75, 0.25, 0.0, 0.0])
        prior = np.array([0.6, 0.2, 0.1, 0.1])
        beliefs.probs[1, 2, :, STAY] = 0.5, 0.1, 0.3, 0.2
        beliefs.watch(np.full((2, 4), STAY), NOTHING, env.alive, np.array([False, True]))
        moved = prior * (0.5, 0.1, 0.3, 0.2)
        pursued = moved / moved.sum() if intra else prior
        assert beliefs.belief[1, 2] == pytest.approx(pursued, abs=1e-6)
        see(beliefs, env, [0.75, 0.25, 0.0, 0.0])
        first = (pursued + prior) / 2 if inter else prior
        assert beliefs.belief[1, 2] == pytest.approx(first, abs=1e-5)


@BOTH
def test_without_goals_there_is_one_belief_and_it_never_moves(hop):
    env, beliefs = make_beliefs(hop, "none")
    for _ in range(3):
        beliefs.look(env)
        assert beliefs.belief.shape == (2, 4, 1) and (beliefs.belief == 1.0).all()
        assert (beliefs.code == UNKNOWN).all()
        assert (beliefs.goal == beliefs.models.flag(pretrain_vae.UNKNOWN).numpy()).all()
        assert (beliefs.predict() == beliefs.probs[:, :, 0]).all()
        beliefs.watch(random_step(env, np.random.default_rng(0)), NOTHING, env.alive, np.zeros(2, bool))


@BOTH
def test_named_goals_are_the_kinds(hop):
    env, beliefs = make_beliefs(hop, "oracle")
    beliefs.look(env)
    assert beliefs.code.tolist() == [[ITEM, ITEM + 1, HABIT, AIMLESS]] * 2 and (beliefs.cell == -1).all()
    assert (beliefs.goal == np.eye(5)[[0, 1, 2, 4]]).all()  # stag, hare | habit, (unknown), aimless
    assert (beliefs.kinds_of_goals() == np.eye(4)).all()


@BOTH
@pytest.mark.parametrize("goal_mode", ["learned", "oracle"])
def test_a_bystander_is_believed_to_touch_nothing(hop, goal_mode):
    """With --bystander-prior there is one hypothesis more, last but two: a player that acts at random but hunts
    nothing. Whoever wanders over hares is soon taken for one, whoever takes one is none."""
    env, beliefs = make_beliefs(hop, goal_mode, num_envs=100, bystander_prior=0.2, belief_floor=0.0)
    items = len(beliefs.code[0]) - 3
    rng, acted = np.random.default_rng(0), None
    for step in range(12):
        beliefs.look(env)
        if step == 0:
            assert (beliefs.code[:, items:] == (BYSTANDER, HABIT, AIMLESS)).all()
            assert beliefs.belief[..., items:] == pytest.approx(np.tile([0.2, 0.1, 0.1], (100, 4, 1)), abs=1e-5)
            assert (beliefs.kinds_of_goals()[:, items:] == np.eye(5)[2:]).all()
        may = env.legal & (np.arange(7) <= STAY)
        assert np.allclose(
            beliefs.probs[..., items, :][env.alive], (may / may.sum(2, keepdims=True))[env.alive], atol=1e-6
        )
        random = beliefs.probs[..., items + 2, :][env.alive]
        assert np.allclose(random, (env.legal / env.legal.sum(2, keepdims=True))[env.alive], atol=1e-6)
        on_hare = env.legal[..., HARE] & env.alive
        actions = (rng.random(may.shape) * may).argmax(2)
        if step == 11:
            actions[:, 0] = np.where(on_hare[:, 0], HARE, actions[:, 0])
            acted = beliefs.belief[:, 0, items].copy(), on_hare[:, 0]
        beliefs.watch(actions, NOTHING, env.alive, env.step(actions)[-1]["done"])
    before, took = acted
    assert took.sum() > 5 and beliefs.belief[took, 0, items].max() < 0.3 * before[took].mean()
    ratio = beliefs.belief[:, 1:, items] / beliefs.belief[:, 1:, items + 2]  # were alike: 0.2 to 0.1
    assert ratio.min() >= 2 - 1e-3 and np.median(ratio) > 4


@BOTH
def test_learned_goals_are_the_encoders_view_of_standing_on_each_item(hop):
    env, beliefs = make_beliefs(hop, "learned", num_envs=6)
    beliefs.look(env)
    for b, player in product(range(6), range(4)):
        board = env.states[b, PLAYERS + 4 :]
        cells = np.flatnonzero(board >= ITEM)
        assert beliefs.cell[b, :5].tolist() == cells.tolist() and (beliefs.code[b, :5] == board[cells]).all()
        for k, cell in enumerate(cells):
            state = env.states[b].copy()
            state[PLAYERS + player] = cell
            seen = torch.from_numpy(beliefs.things(env.game.observe(state[None])[:, player]))
            z = beliefs.models.encode(seen)[0].numpy()
            assert np.abs(beliefs.goal[b, player, k, :-3] - z).max() < 1e-4
        assert beliefs.goal[b, player, 5].tolist() == [0.0] * 8 + [1.0, 0.0, 0.0]  # habit
        assert beliefs.goal[b, player, 6].tolist() == [0.0] * 8 + [0.0, 0.0, 1.0]  # aimless
    assert beliefs.belief.sum(2) == pytest.approx(np.ones((6, 4)), abs=1e-5)
    assert beliefs.belief[:, :, 5:] == pytest.approx(np.full((6, 4, 2), 0.1), abs=1e-5)


@BOTH
def test_the_reader_of_goals_gives_the_prior(hop):
    """Softmax over the goals of -(z - mean)^2 / 2 std^2, of what the reader says after all it has seen of an episode:
    when a new one begins (in the last game), it has seen nothing and no action."""
    env, beliefs = make_beliefs(hop, "learned", num_envs=5)
    beliefs.look(env)
    assert beliefs.memory.any(2).all()
    memory = torch.from_numpy(beliefs.memory[:, 1].copy())
    actions, done = random_step(env, np.random.default_rng(0)), np.arange(5) == 4
    beliefs.watch(actions, NOTHING, env.alive, done)
    beliefs.look(env)
    last = torch.from_numpy(np.where(done, env.spec.num_actions, actions[:, 1]))
    with torch.no_grad():
        seen = torch.from_numpy(beliefs.things(env.obs[:, 1]))
        mean, log_std, memory = beliefs.models.reader(seen, last, memory * ~torch.from_numpy(done)[:, None])
    z = torch.from_numpy(beliefs.goal[:, 1, :-2, :-3])
    fit = -0.5 * ((z - mean[:, None]) / log_std.exp()[:, None]).pow(2).sum(2)
    assert np.abs(beliefs.prior[:, 1, :-2] - fit.softmax(1).numpy()).max() < 1e-5
    assert np.abs(beliefs.memory[:, 1] - memory.numpy()).max() < 1e-5


@BOTH
@pytest.mark.parametrize("goal_mode", ["learned", "oracle"])
def test_beliefs_can_begin_in_the_middle_of_a_game(hop, goal_mode):
    """With fewer items on the board than at a start: only those are goals, and beliefs sum to one."""
    states = play_some(num=30, steps=10)[1]
    env, beliefs = make_beliefs(hop, goal_mode, num_envs=30)
    env.set_states(states)
    board = states[:, PLAYERS + 4 :]
    assert ((board >= ITEM).sum(1) < 5).any()
    beliefs.look(env)
    assert beliefs.belief.sum(2) == pytest.approx(np.ones((30, 4)), abs=1e-5)
    if goal_mode == "learned":
        assert (beliefs.there()[:, :-2].sum(1) == (board >= ITEM).sum(1)).all()
        assert not (beliefs.belief * ~beliefs.there()[:, None]).any()
        fewer = env.states.copy()  # and in the next episode, too: no goal of the one before is left
        fewer[:, PLAYERS + 4 :] = np.roll(fewer, 1, axis=0)[:, PLAYERS + 4 :]
        beliefs.watch(np.full((30, 4), STAY), NOTHING, env.alive, np.ones(30, bool))
        env.set_states(fewer)
        beliefs.look(env)
        board = fewer[:, PLAYERS + 4 :]
        assert (beliefs.there()[:, :-2].sum(1) == (board >= ITEM).sum(1)).all()
        assert beliefs.belief.sum(2) == pytest.approx(np.ones((30, 4)), abs=1e-5)


@BOTH
@pytest.mark.parametrize("goal_mode", ["learned", "oracle", "none"])
def test_players_that_left_are_not_predicted_watched_or_remembered(hop, goal_mode):
    """Whatever column of a player that left says, no belief, memory or habit changes; it has no prediction, nobody
    draws a goal for it, and one episode counts once in its habits."""
    nets = make_nets(hop, envs.game(ID), goal_mode)[1]
    pairs = [make_beliefs(hop, goal_mode, num_envs=30, nets=nets) for _ in range(2)]
    rng, gone_rows = np.random.default_rng(0), 0
    garbage = np.random.default_rng(1)
    for _ in range(20):
        alive = pairs[0][0].alive.copy()
        actions = (rng.random((30, 4, 7)) * pairs[0][0].legal).argmax(2)
        for k, (env, beliefs) in enumerate(pairs):
            beliefs.look(env)
            assert not beliefs.predict()[~alive].any() and not beliefs.probs[~alive].any()
            assert beliefs.predict()[alive].sum(1) == pytest.approx(np.ones(alive.sum()), abs=1e-4)
            drawn, streams = np.zeros((30, 3, 3), np.int64), np.zeros((30, 3), np.uint64)
            rows, focal = np.arange(30), np.full(30, 1)
            draw_goals(beliefs.belief, beliefs.alive, rows, focal, beliefs.streams.copy(), drawn, streams)
            assert ((drawn >= 0) == alive[:, None, [2, 3, 0]]).all()
            told = actions.copy()
            if k:
                told[~alive] = garbage.integers(7, size=(~alive).sum())
            before = beliefs.belief.copy()
            done = env.step(actions)[-1]["done"].copy()
            beliefs.watch(told, NOTHING, env.alive, done)
            assert (beliefs.belief[~alive] == before[~alive]).all()
        gone_rows += (~alive).sum()
        first, second = (beliefs.get_state() for _, beliefs in pairs)
        for name in ("belief", "prior", "habits", "goal", "memory", "took", "again"):
            assert first[name].tobytes() == second[name].tobytes(), name
    assert gone_rows > 100
    if goal_mode != "none":
        env, beliefs = pairs[0]
        beliefs.habits[:] = 0.0
        beliefs.args.belief_decay = 1.0
        ends = np.zeros(30)
        for _ in range(60):
            beliefs.look(env)
            actions = (rng.random((30, 4, 7)) * env.legal).argmax(2)
            done = env.step(actions)[-1]["done"].copy()
            ends += done
            beliefs.watch(np.full((30, 4), STAY), NOTHING, env.alive, done)
        weight = beliefs.habits[:, :, 0].sum(
            2
        )  # one for each episode of a player: those that ended, and the one it has left
        assert np.abs(weight - ends[:, None] - (~env.alive)).max() < 1.01 and ends.sum() > 30


@BOTH
@pytest.mark.parametrize("game", [ID, "msd-4x4"])
def test_beliefs_go_on_exactly_from_what_was_saved(hop, game):
    env, beliefs = make_beliefs(hop, "learned", num_envs=8, game=game, keen_prior=0.1)
    rng = np.random.default_rng(0)

    def play(some, steps):
        for _ in range(steps):
            some.look(env)
            actions = (rng.random(env.legal.shape) * env.legal).argmax(2)
            info = env.step(actions)[-1]
            some.watch(actions, info["taken"], env.alive, info["done"])

    play(beliefs, 12)
    assert (game == "msd-4x4") == beliefs.took.any()
    saved, board, drawn = beliefs.get_state(), env.get_state(), rng.bit_generator.state
    play(beliefs, 15)
    other = hop.Beliefs(beliefs.args, env.game, beliefs.models, 8, 77)
    other.set_state(saved)
    env.set_state(board)
    rng.bit_generator.state = drawn
    play(other, 15)
    for name, array in beliefs.get_state().items():
        assert array.tobytes() == other.get_state()[name].tobytes(), name


# imagined players


@BOTH
@pytest.mark.parametrize("bystander_prior", [0.0, 0.1])
@pytest.mark.parametrize("goal_mode", ["learned", "oracle", "none"])
def test_imagined_players_act_legally_for_goals_on_the_board(hop, goal_mode, bystander_prior):
    env, beliefs = make_beliefs(hop, goal_mode, num_envs=20, bystander_prior=bystander_prior)
    idle = 0
    imagined = hop.ImaginedPlayers(beliefs, 8, [0, 1, 2, 3], 3)
    assert imagined.rows.tolist() == list(range(8, 20)) and imagined.focal.tolist() == [0, 1, 2, 3] * 3
    for _ in range(40):
        beliefs.look(env)
        actions = np.full((20, 4), -7)
        imagined.act(actions)
        assert (actions[:8] == -7).all()
        assert np.take_along_axis(env.legal[8:], actions[8:, :, None], 2).all()
        assert (actions[8:][~env.alive[8:]] == STAY).all()
        if goal_mode != "none":
            assert np.take_along_axis(beliefs.there()[8:], imagined.goal, 1).all()
            kind = np.take_along_axis(beliefs.kinds_of_goals()[8:].argmax(2), imagined.goal, 1)
            left = (env.states[8:, PLAYERS + 4 :, None] == ITEM + np.arange(2)).any(1)  # (12, kinds)
            possible = np.concatenate([left, np.ones((12, beliefs.num_free), bool)], 1)
            wanted = np.take_along_axis(possible, imagined.kind, 1)
            assert (kind == imagined.kind)[wanted & env.alive[8:]].mean() > 0.95
            bystander = np.take_along_axis(beliefs.code[8:], imagined.goal, 1) == BYSTANDER
            assert (actions[8:][bystander & env.alive[8:]] <= STAY).all()
            idle += (env.legal[8:, :, STAY + 1 :].any(2) & bystander & env.alive[8:]).sum()
        goals = imagined.goals()  # what the others are heading for, as the focal player would have to know it
        for b, k in product(range(12), range(3)):
            player = (imagined.focal[b] + 1 + k) % 4
            true = beliefs.goal[8 + b, player, imagined.goal[b, player]]
            unknown = beliefs.models.flag(pretrain_vae.UNKNOWN).numpy()
            assert (goals[b, k] == (true if env.alive[8 + b, player] else unknown)).all()
        actions[:8] = STAY
        done = env.step(actions)[-1]["done"].copy()
        beliefs.watch(actions, NOTHING, env.alive, done)
    assert (idle > 10) == (goal_mode != "none" and bystander_prior > 0)


@BOTH
def test_teams_of_imagined_players_last_and_are_of_all_kinds(hop):
    """A team stays for ten episodes on average; half of the teams are of one kind; all kinds come."""
    env, beliefs = make_beliefs(hop, "oracle", num_envs=400)
    imagined = hop.ImaginedPlayers(beliefs, 0, [0], 3)
    beliefs.look(env)
    teams, actions = [], np.zeros((400, 4), np.int64)
    for _ in range(20):
        beliefs.new_episode[:] = True
        imagined.act(actions)
        teams.append(imagined.kind.copy())
    changed = np.mean([(a != b).any(1).mean() for a, b in pairwise(teams)])
    assert changed == pytest.approx(0.1, abs=0.03)
    alike = (teams[0] == teams[0][:, :1]).all(1).mean()
    assert alike == pytest.approx(0.5 + 0.5 / 64, abs=0.1)
    assert np.bincount(teams[0].ravel(), minlength=4) / 1600 == pytest.approx(np.full(4, 0.25), abs=0.08)


# hindsight and targets


def heading(action, taken, alive=None, done=None, horizon=10):
    """heading_for of one player of one game."""
    length = len(action)
    column = (length, 1, 1)
    alive = np.ones(column, bool) if alive is None else np.array(alive, bool).reshape(column)
    done = np.zeros((length, 1), bool) if done is None else np.array(done, bool).reshape(length, 1)
    action, taken = np.array(action).reshape(column), np.array(taken).reshape(column)
    return pretrain_vae.heading_for(action, taken, alive, done, horizon)[:, 0, 0].tolist()


def test_hindsight_by_hand():
    """Step whose state a player was heading for: the next success within the horizon, else the next try."""
    M = 0  # a move
    assert heading([M, STAG, M, M, HARE], [0, 0, 0, 0, 2]) == [4, 4, 4, 4, 4]  # a success overrules a try
    assert heading([M, STAG, M, M, M], [0] * 5) == [1, 1, -1, -1, -1]
    assert heading([M, STAG, M, STAG, M], [0] * 5) == [1, 1, 3, 3, -1]  # the next try
    assert heading([M, STAG, M, M, HARE], [0, 0, 0, 0, 2], horizon=3) == [1, 1, 4, 4, 4]  # within the horizon
    assert heading([M, M, M, M, HARE], [0, 0, 0, 0, 2], horizon=1) == [-1, -1, -1, -1, 4]
    # an episode ends in step 1: nothing of the next one is known before
    assert heading([M, M, M, HARE], [0, 0, 0, 2], done=[0, 1, 0, 0]) == [-1, -1, 3, 3]
    assert heading([M, HARE, M, HARE], [0, 2, 0, 2], done=[0, 1, 0, 0]) == [1, 1, 3, 3]
    # a player that left heads nowhere, whatever its column says
    assert heading([HARE, STAG, M, M], [2, 0, 0, 0], alive=[1, 0, 0, 1], done=[0, 0, 1, 0]) == [0, -1, -1, -1]
    assert heading([M, HARE], [0, 2], alive=[0, 1]) == [-1, 1]


def test_goals_of_hindsight():
    """Named: what stands on the own cell in the state headed for. Learned: that state, encoded. Else unknown."""
    game = envs.game(ID)
    things = envs.sight.Things(game)
    board = {6: ITEM + 1, 9: ITEM, 12: ITEM + 1, 13: ITEM + 1, 14: ITEM + 1}
    states = np.stack([make_state(game, [0, 1, 2, 3], board), make_state(game, [6, 9, 2, 3], board)])
    seen = things(game.observe(states))[:, None]  # (T=2, B=1, N=4, K)
    steps = np.array([[[1, 1, -1, 0]], [[1, 1, -1, 0]]])
    goals = pretrain_vae.hindsight_goals(make_models(game, "oracle"), steps, seen)
    hare, stag, unknown, nothing = np.eye(5)[1], np.eye(5)[0], np.eye(5)[3], np.zeros(5)
    assert (goals[:, 0] == np.stack([hare, stag, unknown, nothing])).all()
    models = make_models(game, "learned")
    goals = pretrain_vae.hindsight_goals(models, steps, seen)
    for t, i in product(range(2), range(4)):
        want = models.flag(pretrain_vae.UNKNOWN).numpy()
        if steps[t, 0, i] >= 0:
            z = models.space.encode(torch.from_numpy(seen[steps[t, 0, i], 0, i][None]))[0][0]
            want = np.concatenate([z.detach().numpy(), [0.0, 0.0, 0.0]])
        assert np.abs(goals[t, 0, i] - want).max() < 1e-5
    assert (pretrain_vae.hindsight_goals(make_models(game, "none"), steps, seen) == [0.0, 1.0, 0.0]).all()


def test_goals_to_learn_with_by_hand():
    """A player learns with the goals it planned with, or with hindsight's where that knows: those of the next player
    first. Some are hidden."""
    rng = np.random.default_rng(0)
    goals = rng.random((2, 200, 3, 5)).astype(np.float32)  # (T, B, N, G)
    goals[..., -3:] = 0.0
    unknown = np.eye(5, dtype=np.float32)[3]
    goals[0, :, 1] = unknown  # hindsight says nothing of player 1 in step 0
    batch = {"goals": rng.random((2, 200, 3, 2, 5)).astype(np.float32)}

    def fed(hindsight_prob, hide_prob):
        return pretrain_vae.goals_to_learn_with(batch, goals, hindsight_prob, hide_prob, rng)

    assert (fed(0.0, 0.0) == batch["goals"]).all()
    assert (fed(0.3, 1.0) == unknown).all()
    found = fed(1.0, 0.0)
    for t, i, k in product(range(2), range(3), range(2)):
        other = (i + 1 + k) % 3
        known = (t, other) != (0, 1)
        assert (found[t, :, i, k] == (goals[t, :, other] if known else batch["goals"][t, :, i, k])).all()
    found = fed(0.5, 0.2)
    hidden = (found == unknown).all(-1)
    assert hidden.mean() == pytest.approx(0.2, abs=0.05)
    planned = (found == batch["goals"]).all(-1)
    assert planned[1].mean() == pytest.approx(0.4, abs=0.05) and planned[0, :, 0, 0].mean() > 0.7
    both = planned[1] == planned[1][..., :1]  # one draw for all others of a player
    assert both[~hidden[1].any(-1)].all()


def test_half_of_what_is_met_teaches_habits():
    """Of players met in games half the goals become "habit", the others stay; without goals there is no such thing."""
    for goal_mode in ("oracle", "none"):
        models = make_models(envs.game(ID), goal_mode)
        goals = np.random.default_rng(0).random((4000, models.goal_size)).astype(np.float32)
        taught = pretrain_vae.with_habits(goals, models, np.random.default_rng(1))
        habit = (taught == models.flag(pretrain_vae.HABIT).numpy()).all(1)
        assert (taught[~habit] == goals[~habit]).all()
        assert habit.mean() == pytest.approx(0.5, abs=0.05) if goal_mode == "oracle" else not habit.any()


def test_habits_start_as_what_is_known_of_anybody_and_follow_those_met(checkpoints):
    """Before the first game a habit predicts what an unknown goal does; learning from players who never move teaches
    the habit alone, as rule-based play (which hides goals, too) says otherwise."""
    models, rng = pretrain_vae.load_checkpoint(checkpoints(goal_mode="oracle"))[0], np.random.default_rng(0)
    weight = models.moa.goal.weight
    assert torch.equal(weight[:, pretrain_vae.HABIT], weight[:, pretrain_vae.UNKNOWN])
    rows = pretrain_vae.rehearsal(models, envs.game(ID), 400, 3, False)
    met = {name: x[rows["action"] < STAY] for name, x in rows.items()}  # the same boards, where rules say: move
    met["action"] = np.full(len(met["t"]), STAY)
    met["goal"] = pretrain_vae.with_habits(met["goal"], models, rng)
    optimizer = torch.optim.Adam(models.moa.parameters(), lr=1e-2)
    for _ in range(80):
        mb = pretrain_vae.mixed_batch(met, rows, 1024, 0.5, rng)
        descend(optimizer, pretrain_vae.moa_loss(models.moa, mb, 0.15, rng), 0.5)
    with torch.no_grad():
        board = [torch.from_numpy(met[name]) for name in ("seen", "t", "legal")]
        stays = [
            models.moa(*board, models.flag(flag).expand(len(met["t"]), -1)).exp()[:, STAY].mean().item()
            for flag in (pretrain_vae.HABIT, pretrain_vae.UNKNOWN)
        ]
    assert stays[0] > 0.9 and stays[1] < 0.7


def test_the_reader_learns_nothing_from_players_that_left_or_from_before_a_reset():
    _, nets, _, _, sequences = learning_rows(mcts)
    models = nets["models"]
    assert 50 < (~sequences["known"]).sum() < sequences["known"].numel() / 2
    garbage = {name: x.clone() for name, x in sequences.items()}
    garbage["goal"][~sequences["known"]] = 7.5
    garbage["action"][~sequences["known"]] = STAY
    assert torch.equal(pretrain_vae.reader_loss(models, sequences), pretrain_vae.reader_loss(models, garbage))
    garbage["goal"][sequences["known"]] += 1.0
    assert pretrain_vae.reader_loss(models, sequences) != pretrain_vae.reader_loss(models, garbage)
    late = {name: x[6:] if name != "memory" else x for name, x in sequences.items()}
    sequences["resets"][6:7] = True  # a new episode: what came before cannot matter
    sequences["known"][:6] = False
    expected = pretrain_vae.reader_loss(models, late)
    assert torch.allclose(pretrain_vae.reader_loss(models, sequences), expected, rtol=1e-5)


def test_lambda_returns_by_hand():
    """gamma 0.5, lambda 0.5. Player 0 plays on; player 1 ends in step 1 and a new episode begins.

    player 0: step 2: 1 + .5 * 4 = 3; step 1: 0 + .5 * (.5 * 3 + .5 * 3) = 1.5; step 0: 2 + .5 * (.5 * 2 + .5 * 1.5)
    player 1: step 2: 0 + .5 * 8 = 4; step 1: 5, nothing after the end; step 0: 0 + .5 * (.5 * 2 + .5 * 5) = 1.75
    """
    reward = np.array([[[2.0, 0.0]], [[0.0, 5.0]], [[1.0, 0.0]]], np.float32)  # (T=3, B=1, N=2)
    value = np.array([[[1.0, 1.0]], [[2.0, 2.0]], [[3.0, 9.0]]], np.float32)
    ended = np.array([[[False, False]], [[False, True]], [[False, False]]])
    gamma = np.full(reward.shape, 0.5)
    got = mcts.lambda_returns(reward, value, np.array([[4.0, 8.0]], np.float32), ended, gamma, 0.5)
    assert got[:, 0].tolist() == [[2.875, 1.75], [1.5, 5.0], [3.0, 4.0]]


def test_agent_loss_by_hand():
    """Cross-entropy to the planned policy, half the squared error of the value; illegal actions weigh nothing."""
    _, nets, own, _, _ = learning_rows(mcts)
    mb = {name: torch.from_numpy(x) for name, x in own.items()}
    with torch.no_grad():
        losses = mcts.agent_loss(mcts.Args(vf_coef=0.5), nets["agent"], mb)
        log_probs, value = nets["agent"](mb["seen"], mb["t"], mb["legal"], mb["goals"])
    ce = [-(p[may] * logs[may]).sum() for p, logs, may in zip(mb["policy"], log_probs, mb["legal"], strict=True)]
    entropy = [-(logs[may].exp() * logs[may]).sum() for logs, may in zip(log_probs, mb["legal"], strict=True)]
    assert losses["policy_loss"].item() == pytest.approx(torch.stack(ce).mean().item(), rel=1e-4)
    assert losses["value_loss"].item() == pytest.approx(0.5 * (value - mb["returns"]).pow(2).mean().item(), rel=1e-5)
    assert losses["entropy"].item() == pytest.approx(torch.stack(entropy).mean().item(), rel=1e-4)


# whole runs


@pytest.fixture(scope="module")
def finished(tmp_path_factory, checkpoints) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    assert run_script(mcts, run_dir, "--vae-ckpt", checkpoints()) == 0
    return run_dir


def check_stored_rows(run_dir: Path) -> None:
    """What the networks learn from: steps of players on the board alone, their actions legal, policies masked."""
    stored = load_file(run_dir / "checkpoints" / "last" / "resume.safetensors")
    parts = {name.rsplit(".", 2)[0] for name in stored if name.startswith("replay.") and name.endswith("moa.action")}
    assert parts
    for part in parts:
        rows = {name.removeprefix(f"{part}."): x for name, x in stored.items() if name.startswith(f"{part}.")}
        for who in ("own", "moa"):
            assert rows[f"{who}.seen"].any(1).all() and len(rows[f"{who}.seen"]) > 10
        assert rows["moa.legal"].gather(1, rows["moa.action"][:, None]).all()
        assert (rows["moa.action"] != STAY).any() and rows["moa.legal"].sum(1).min() >= 2
        assert not rows["own.policy"][~rows["own.legal"]].any()
        assert torch.allclose(rows["own.policy"].sum(1), torch.ones(len(rows["own.policy"])), atol=1e-4)


def test_a_run_leaves_what_it_should(finished):
    rows = read_metrics(finished)
    assert int(rows[-1]["global_step"]) == 512
    assert sum(bool(row["eval/return"]) for row in rows) == sum(bool(row["eval/raw_return"]) for row in rows) == 2
    for name in ("charts/episodic_return", "charts/episodic_return-player4", "charts/stag_rate", "losses/policy_loss",
                 "losses/value_loss", "losses/moa_loss", "losses/goal_loss", "losses/explained_variance",
                 "planner/depth", "planner/kl", "planner/policy_gain", "moa/top1", "moa/top3", "moa/ce",
                 "moa/recall_action0", "moa/top1-player4", "goal/known", "goal/belief"):  # fmt: skip
        assert any(row[name] for row in rows), name
    result = json.loads((finished / "result.json").read_text())
    assert result["finished"] and result["global_step"] == 512 and result["eval"]["episodes"] == 8
    assert {"eval_raw", "eval_greedy", "eval_best"} <= result.keys()
    assert any(row["eval/return"] != row["eval/raw_return"] for row in rows)
    for name in ("last", "best"):
        spec = json.loads((finished / "checkpoints" / name / "spec.json").read_text())
        assert spec["script"] == "hopplus_mcts.py" and spec["env_id"] == ID and spec["learners"] == [0, 1, 2, 3]
    check_stored_rows(finished)


class Killed(BaseException):
    """The process ends here; nothing more is saved."""


@contextmanager
def killed_at(hop, update_number: int, monkeypatch):
    """Within, a run is killed in its k-th iteration, just before it learns."""
    update, count = hop.update, [0]

    def update_or_die(*args):
        count[0] += 1
        if count[0] == update_number:
            raise Killed
        return update(*args)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(hop, "update", update_or_die)
        yield


def test_a_killed_run_resumes_to_the_same_bits(finished, checkpoints, tmp_path, monkeypatch):
    """Beliefs, imagined players, replay, random streams: all that a run of HOP+ carries on."""
    run_dir = tmp_path / "killed"
    with killed_at(mcts, 6, monkeypatch):
        run_script(mcts, run_dir, "--vae-ckpt", checkpoints())
    assert json.loads((run_dir / "checkpoints" / "last" / "spec.json").read_text())["iteration"] == 3
    assert main(mcts.Args, mcts.train, ["--resume", str(run_dir)]) == 0
    for name in ("last", "best"):
        weights, expected = (load_file(d / "checkpoints" / name / "weights.safetensors") for d in (run_dir, finished))
        assert all(torch.equal(weights[key], expected[key]) for key in expected)
    assert read_metrics(run_dir) == read_metrics(finished)
    result, expected = (json.loads((d / "result.json").read_text()) for d in (run_dir, finished))
    assert result["eval"] == expected["eval"]


def test_a_run_killed_before_its_first_save_takes_the_same_goal_models(checkpoints, tmp_path, monkeypatch):
    """Without --vae-ckpt the newest is taken, which may be another one when the run starts anew."""
    first, asked, prepare = checkpoints(), [], pretrain_vae.prepare
    monkeypatch.setattr(pretrain_vae, "find_checkpoint", lambda *_, **__: Path(first))
    with killed_at(mcts, 1, monkeypatch):
        run_script(mcts, tmp_path / "run")
    monkeypatch.setattr(pretrain_vae, "find_checkpoint", lambda *_, **__: pytest.fail("looked for another one"))
    monkeypatch.setattr(pretrain_vae, "prepare", lambda wanted, *x: asked.append(wanted) or prepare(wanted, *x))
    with killed_at(mcts, 1, monkeypatch):
        main(mcts.Args, mcts.train, ["--resume", str(tmp_path / "run")])
    assert asked == [str(Path(first).resolve())]


# what a run learns from


def copied(arrays: dict) -> dict:
    return {name: x.copy() if isinstance(x, np.ndarray) else x for name, x in arrays.items()}


@pytest.fixture(scope="module", params=[mcts, nomcts], ids=["mcts", "nomcts"])
def watched(request, checkpoints, tmp_path_factory):
    """A run of four iterations, and for each of them whatever its parts were given and gave: see `note`."""
    hop, run_dir = request.param, tmp_path_factory.mktemp("watched") / "run"
    iterations, now = [], {}

    def note(patch, where, name, keep):
        """Keep, under its name, what `keep(arguments, result)` makes of each call of a function."""
        wrapped = getattr(where, name)

        def watch(*args):
            result = wrapped(*args)
            now.setdefault(name, []).append(keep(args, result))
            return result

        patch.setattr(where, name, watch)

    def worths() -> list[np.ndarray]:
        """Raw values of the boards after each step of imagined games, by the networks that played."""
        games, planner = [found["after"] for _, found in now.get("step", [])], now["plan"][0][0]
        return [planner.raw(after, np.arange(len(after)), np.arange(len(after)) % 4)[1] for after in games]

    update = hop.update

    def watch_update(args, nets, optimizers, data, sequences, *rest):
        iterations.append(dict(now) | {"data": {k: copied(x) for k, x in data.items()}, "sequences": sequences})
        now.clear()
        return update(args, nets, optimizers, data, sequences, *rest)

    with pytest.MonkeyPatch.context() as patch:
        note(patch, hop.Planner, "plan", lambda args, plan: (args[0], plan))
        note(patch, hop, "training_target", lambda args, policy: (args[2], policy))
        note(patch, hop, "acting_policy", lambda args, policy: (args[2], policy))
        note(patch, hop.ImaginedPlayers, "goals", lambda args, goals: goals)
        note(patch, hop, "lambda_returns", lambda args, returns: ([np.array(x) for x in args], returns, worths()))
        note(patch, pretrain_vae, "score_predictions", lambda args, _: args[2].copy())
        note(patch, pretrain_vae, "goals_to_learn_with", lambda args, fed: (copied(args[0]), args[1], args[2], fed))
        note(patch, nomcts.ImaginedGames, "step", lambda args, found: (args[0].boards.copy(), copied(found)))
        patch.setattr(hop, "update", watch_update)
        flags = ["--vae-ckpt", checkpoints(), "--replay", "1", "--total-timesteps", "256", "--eval-every", "0"]
        flags += ["--perfect-model"] if hop is nomcts else ["--dream-envs", "20"]
        assert run_script(hop, run_dir, *flags, "--log-every", "1") == 0
    assert len(iterations) == 4
    return SimpleNamespace(hop=hop, iterations=iterations, metrics=read_metrics(run_dir))


def test_the_opponent_model_and_the_reader_learn_from_real_games_alone(watched):
    """Imagined players follow the opponent model: learning from them it would learn from itself. Scores too are of real
    games. The reader gets whole sequences, of which it is known where an episode begins."""
    for seen in watched.iterations:
        batch, data, sequences = seen["goals_to_learn_with"][0][0], seen["data"], seen["sequences"]
        real = batch["alive"].copy()
        real[:, 8:] = False
        assert batch["alive"][:, 8:].any() and (seen["score_predictions"][0] == real).all()
        for name in ("action", "seen", "t", "legal"):
            assert np.array_equal(data["moa"][name], batch[name][real]), name
        assert np.take_along_axis(data["moa"]["legal"], data["moa"]["action"][:, None], 1).all()
        known = sequences["known"].reshape(8, 8, 4)
        assert np.array_equal(sequences["action"].numpy(), batch["action"][:, :8].reshape(8, 32))
        assert not known.numpy()[~batch["alive"][:, :8]].any()
        last, resets = (sequences[name].numpy().reshape(8, 8, 4) for name in ("last_action", "resets"))
        assert (last[1:] == np.where(resets[1:], 7, batch["action"][:-1, :8])).all()
    for name in ("known", "resets"):
        assert any(seen["sequences"][name][1:].any() for seen in watched.iterations)


def test_own_decisions_are_learned_from_as_they_were_planned(watched):
    """Of all learners in real games, of one player in an imagined one: what it saw, the planned policy as target, the
    planned value; the value of the last board stands for what follows."""
    for seen in watched.iterations:
        batch, _, _, fed = seen["goals_to_learn_with"][0]
        planned, own = batch["planned"], seen["data"]["own"]
        imagined = np.arange(8, planned.shape[1])
        plans_here = np.zeros(planned.shape, bool)
        plans_here[:, :8] = plans_here[:, imagined, imagined % 4] = True
        assert (planned == (batch["alive"] & plans_here)).all() and planned[:, 8:].any()
        plans = [plan for _, plan in seen["plan"]]
        target, policy = (np.concatenate([x for _, x in seen[name]]) for name in ("training_target", "acting_policy"))
        q_values = np.concatenate([plan.q_values for plan in plans])
        assert np.array_equal(own["policy"], target) and np.array_equal(own["goals"], fed[planned])
        for name in ("seen", "t", "legal"):
            assert np.array_equal(own[name], batch[name][planned]), name
        (reward, value, next_value, *_), returns, _ = seen["lambda_returns"][0]
        assert np.allclose(value[planned], (target * q_values).sum(1), atol=1e-5)
        assert np.array_equal(own["returns"], returns[planned]) and not reward[~batch["alive"]].any()
        last = next_value[-1] if watched.hop is nomcts else next_value
        assert last[:8].any() and np.isfinite(last).all()
        if watched.hop is nomcts:  # PPO: the chance with which the action was drawn, and how good it was
            chance = policy[np.arange(len(policy)), own["action"]]
            assert np.array_equal(own["action"], batch["action"][planned])
            assert np.allclose(own["log_prob"], np.log(chance), atol=1e-6)
            assert np.allclose(own["advantage"], (returns - value)[planned], atol=1e-6)


def test_half_of_the_imagined_players_goals_are_known(watched):
    """To who plans among them, when it learns: the others' true goals in half of the steps, else those it planned
    with."""
    true = total = 0
    for seen in watched.iterations:
        batch = seen["goals_to_learn_with"][0][0]
        for step, (goals, (_, plan)) in enumerate(zip(seen["goals"], seen["plan"], strict=True)):
            row = np.arange(8, batch["planned"].shape[1])
            here = batch["planned"][step, row, row % 4]
            kept, goals = batch["goals"][step, row, row % 4][here], goals[here]
            planned = np.zeros((*batch["planned"].shape[1:], *plan.goals.shape[1:]), np.float32)
            planned[batch["planned"][step]] = plan.goals
            is_true, is_planned = ((kept == x).all((1, 2)) for x in (goals, planned[row, row % 4][here]))
            assert (is_true | is_planned).all()
            true, total = true + (is_true & ~is_planned).sum(), total + here.sum()
    assert total > 60 and 0.3 < true / total < 0.6


def test_schedules(watched):
    """Sharper plans, less hindsight, smaller steps: from iteration to iteration of four."""
    betas = [{beta for beta, _ in seen["training_target"] + seen["acting_policy"]} for seen in watched.iterations]
    assert betas == [{4.0}, {5.0}, {6.0}, {7.0}]
    assert [seen["goals_to_learn_with"][0][2] for seen in watched.iterations] == [0.5, 0.25, 0.0, 0.0]
    rates = [float(row["charts/learning_rate"]) for row in watched.metrics]
    assert rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])


@pytest.mark.parametrize("watched", [nomcts], indirect=True, ids=["nomcts"])
def test_a_cut_game_is_worth_its_last_board(watched):
    """Where an imagined game is cut, the raw value of the board at which it was stands for the rest, and the next one
    starts from any board of real play so far."""
    cuts = 0
    for seen, before in zip(watched.iterations[1:], watched.iterations, strict=False):
        (_, _, next_value, _, cut, *_), _, worths = seen["lambda_returns"][0]
        for step, ((boards, found), worth) in enumerate(zip(seen["step"], worths, strict=True)):
            assert np.array_equal(cut[step, :, 0], found["cut"]) and not found["cut"][:8].any()
            row = np.flatnonzero(found["cut"][8:])
            assert np.allclose(next_value[step, 8 + row, row % 4], worth[row], atol=1e-6)
            assert np.array_equal(boards, before["data"]["world"]["states"])
            cuts += len(row)
    assert cuts > 20


@BOTH
def test_a_run_with_a_fitting_checkpoint_learns_nothing_offline(hop, checkpoints, tmp_path, monkeypatch):
    fitting = checkpoints()  # made here, if no test before this one did
    for name in ("train", "train_reader", "losses"):
        monkeypatch.setattr(pretrain_vae, name, lambda *_, **__: pytest.fail("offline learning in a run"))
    flags = ["--vae-ckpt", fitting, "--total-timesteps", "64", "--eval-every", "0"]
    assert run_script(hop, tmp_path / "run", *PERFECT[hop.__name__], *flags) == 0
    moa = load_file(tmp_path / "run" / "checkpoints" / "last" / "weights.safetensors")
    start = load_file(Path(fitting) / "weights.safetensors")
    assert all(torch.equal(moa[f"models.{name}"], x) for name, x in start.items() if name.startswith("space."))
    change = (moa["models.moa.head.weight"] - start["moa.head.weight"]).abs().max()
    assert 0 < change < 0.02  # it went on from there


def test_a_missing_goal_checkpoint_is_made_and_said(checkpoints, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    wanted, made = [], checkpoints(goal_mode="oracle")
    monkeypatch.setattr(pretrain_vae, "train", lambda args: wanted.append(args) or made)
    flags = ["--goal-mode", "oracle", "--total-timesteps", "64", "--eval-every", "0", "--seed", "4"]
    assert run_script(mcts, tmp_path / "run", *flags) == 0
    assert (wanted[0].env_id, wanted[0].goal_mode, wanted[0].seed) == (ID, "oracle", 4)
    assert f"no goal models for {ID} in vae_ckpts/" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("env_id", "goal_mode", "flags"),
    [
        (ID, "oracle", ["--roles", "hop,ns,nh,random", "--no-inter-om"]),
        ("msd-4x4", "none", ["--prosocial", "--max-block-comp", "1"]),
        (ID, "learned", ["--no-intra-om", "--outcomes", "1", "--prosocial", "--reward-scale", "4"]),
        pytest.param("msd-4x4", "oracle", ["--dream-envs", "0"], marks=pytest.mark.slow),
        pytest.param("msh-4h1s-8x8", "learned", [], marks=pytest.mark.slow),
    ],
)
def test_other_settings_run(env_id, goal_mode, flags, checkpoints, tmp_path):
    flags = [*flags, "--env-id", env_id, "--goal-mode", goal_mode, "--vae-ckpt", checkpoints(env_id, goal_mode)]
    assert run_script(mcts, tmp_path / "run", *flags, "--total-timesteps", "256") == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert np.isfinite(result["eval"]["return"])
    check_stored_rows(tmp_path / "run")
    if "--roles" in flags:
        spec = json.loads((tmp_path / "run" / "checkpoints" / "last" / "spec.json").read_text())
        assert spec["learners"] == [0]


@BOTH
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_step_in_which_no_learner_is_on_the_board(hop, checkpoints, tmp_path):
    """One game, one learner: it leaves, the others play on, and there is nobody to plan for."""
    alone = {"hopplus_mcts": ["--dream-envs", "0"], "hopplus_nomcts": ["--perfect-model", "--real-ratio", "1"]}
    flags = ["--num-envs", "1", "--roles", "hop,ns,ns,ns", "--num-steps", "32", "--total-timesteps", "160"]
    flags += ["--vae-ckpt", checkpoints(), "--eval-every", "0", *alone[hop.__name__]]
    assert run_script(hop, tmp_path / "run", *flags) == 0


@BOTH
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_reward_scale_scales_what_is_learned(hop, scale, checkpoints, tmp_path, monkeypatch):
    """Players that know nothing take hares, mostly alone, for a reward of 1."""
    rewards, returns = [], hop.lambda_returns

    def watch_returns(reward, *rest):
        rewards.append(reward[reward > 0])
        return returns(reward, *rest)

    monkeypatch.setattr(hop, "lambda_returns", watch_returns)
    flags = ["--total-timesteps", "256", "--eval-every", "0", "--goal-mode", "oracle", *PERFECT[hop.__name__]]
    flags += ["--vae-ckpt", checkpoints(goal_mode="oracle"), "--reward-scale", str(scale)]
    assert run_script(hop, tmp_path / "run", *flags) == 0
    assert np.median(np.concatenate(rewards)) == scale


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--env-id", "smac-3m"], "unknown grid game 'smac-3m'"),
        (["--roles", "ns,ns,ns,ns"], "nobody to train"),
        (["--habit-prior", "0.6", "--aimless-prior", "0.6"], "must add up to at most 1, not to 1.2"),
        (["--num-steps", "1"], "--num-steps must be a whole number from 2"),
        (["--goal-mode", "oracle", "--vae-ckpt", "CHECKPOINT"], "goal mode learned, this run uses oracle"),
        (["--env-id", "msd-4x4", "--vae-ckpt", "CHECKPOINT"], "msd-4x4"),
        (["--vae-ckpt", "no/such/vae"], "no/such/vae"),
    ],
)
@BOTH
def test_settings_that_cannot_be_are_one_line(hop, flags, words, checkpoints, tmp_path, capsys):
    flags = [checkpoints() if flag == "CHECKPOINT" else flag for flag in flags]
    assert run_script(hop, tmp_path / "run", *PERFECT[hop.__name__], *flags) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1, said


# playing what was trained


def test_a_loaded_policy_is_the_trained_net(finished):
    env = envs.make(ID, num_envs=12, seed=9)
    weights = load_file(finished / "checkpoints" / "best" / "weights.safetensors")
    policy = load_policy(str(finished), env, 2, seed=0)
    for name, weight in policy.planner.nets.state_dict().items():
        assert torch.equal(weight, weights[name]), name
    rng, gone = np.random.default_rng(0), 0
    for _ in range(12):
        actions = (rng.random(env.legal.shape) * env.legal).argmax(2)
        actions[:, 2] = policy.act(env)
        assert np.take_along_axis(env.legal, actions[:, :, None], 2).all()
        gone += (~env.alive[:, 2]).sum()
        info = env.step(actions)[-1]
        policy.watch(env, actions, info)
    assert gone  # and STAY was all it could do then
    assert policy.beliefs.habits.any()  # it remembers whom it met
    with pytest.raises(envs.ConfigError, match=r"trained on msh-4h1s-4x4 with obs_shape \[4, 4, 7\]"):
        load_policy(str(finished), envs.make("msh-4h1s-8x8", num_envs=2), 0, seed=0)
    with pytest.raises(envs.ConfigError, match="has learners 1 to 4, not 5"):
        load_policy(f"{finished}@5", env, 0, seed=0)


def test_a_loaded_policy_plans_for_what_it_learned_for(checkpoints, tmp_path):
    """Trained on team rewards, it searches with team rewards, also in an env that pays each its own."""
    flags = ["--vae-ckpt", checkpoints(), "--prosocial", "--total-timesteps", "64", "--eval-every", "0"]
    assert run_script(mcts, tmp_path / "run", *flags) == 0
    env = envs.make(ID, num_envs=2, seed=9)
    assert load_policy(str(tmp_path / "run"), env, 0, seed=0).planner.game.config.prosocial
    assert not env.game.config.prosocial


# both scripts


def definitions(name: str) -> dict[str, str]:
    """The text of all functions, classes and methods of a script."""
    text = (ROOT / name).read_text()
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found[node.name] = ast.get_source_segment(text, node)
            for inner in node.body if isinstance(node, ast.ClassDef) else []:
                if isinstance(inner, ast.FunctionDef):
                    found[f"{node.name}.{inner.name}"] = ast.get_source_segment(text, inner)
    return found


def test_what_both_scripts_share_reads_the_same():
    """Beliefs, imagined players, network, play, learning with goals: line for line, so that `diff` shows the rest."""
    here, there = definitions("hopplus_nomcts.py"), definitions("hopplus_mcts.py")
    same = "Agent.__init__ Agent.forward Beliefs ImaginedPlayers training_target acting_policy playing_policy"
    same = [*same.split(), "evaluate", "Args.check"]
    same += [name for name in there if name.startswith("Policy.") and name != "Policy.explain"]
    there = {name: re.sub(r".*simulations.*\n", "", text) for name, text in there.items()}
    assert [name for name in same if here.get(name) != there[name]] == []
