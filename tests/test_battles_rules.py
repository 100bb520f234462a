"""Small fights computed by hand, one rule each, and properties that hold in any battle."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import envs
from envs import battles
from envs.battles import orca
from envs.battles.core import RECORDED
from envs.battles.env import BattleEnv
from envs.battles.teams import make_team

X, Y, HP, SHIELD, COOLDOWN, ENERGY, TARGET, SHOT = range(len(RECORDED))
ATTACK = 6
STATUES = """
[units.statue]
like = "marine"
speed = 0
damage = 0
[units.still_zealot]
like = "zealot"
speed = 0
[units.still_stalker]
like = "stalker"
speed = 0
damage = 0
[units.still_zergling]
like = "zergling"
speed = 0
damage = 0
regen = 0
[units.still_marauder]
like = "marauder"
speed = 0
damage = 0
"""


def fight(tmp_path, allies, enemies, **overrides):
    """A battle of units at given places, [(name, x, y), ...]; units act in unit order, allies first."""
    lines = ["limit = 1000", "attack_point = [16, 16]", 'walkable = ["0-31: 0-31"]', STATUES]
    for side, units in (("ally", allies), ("enemy", enemies)):
        for name, x, y in units:
            lines.append(f'[[groups]]\nside = "{side}"\nat = [{x}, {y}]\nunits = [["{name}", 1]]')
    path = tmp_path / "fight.toml"
    path.write_text("\n".join(lines))
    env_id = f"smac-file:{path}"
    return BattleEnv(env_id, battles.load(env_id), record=True, **{"shuffle": False, **overrides})


def run(env, actions, steps=1):
    """Play the same joint action; returns the recorded ticks (8 * steps, U, columns) and the rewards."""
    ticks, rewards = [], []
    for _ in range(steps):
        _, reward, *_ = env.step(np.array([actions]))
        ticks.append(env.battles.ticks[0].copy())
        rewards.append(float(reward[0, 0]))
    return np.concatenate(ticks), rewards


def test_damage_and_cooldown(tmp_path):
    env = fight(tmp_path, [("marine", 10, 16)], [("marine", 14, 16)])
    ticks, rewards = run(env, [ATTACK], 9)
    # a marine fires every ceil(16 * 0.61) = 10 ticks for 6 of 45 hp; the ally acts first, so its 8th shot decides
    shots = np.minimum(np.arange(72) // 10 + 1, 8)
    assert np.array_equal(ticks[:, 1, HP], np.maximum(45 - 6 * shots, 0))
    assert np.array_equal(ticks[:, 0, HP], 45 - 6 * np.minimum(shots, 7))
    assert np.allclose(ticks[:10, 0, COOLDOWN], np.maximum(0.61 - np.arange(10) / 16, 0))
    assert ticks[0, 0, SHOT] == 1 and (ticks[1:10, 0, SHOT] == -1).all()
    assert env.info["done"][0] and env.info["battle_won"][0] and env.info["episode_length"][0] == 9
    # 12 hp in the first step (ticks 0 to 7: one shot), scale 20 / (10 + 200 + 45)
    assert rewards[0] == pytest.approx(6 * 20 / 255) and sum(rewards) == pytest.approx(20.0)


def test_shield_absorbs_first_and_without_armour(tmp_path):
    env = fight(tmp_path, [("marine", 10, 16)], [("still_zealot", 14, 16)])
    ticks, _ = run(env, [ATTACK], 13)
    hits = np.arange(104) // 10 + 1
    assert np.array_equal(ticks[:, 1, SHIELD], np.maximum(50 - 6 * hits, 0))
    # the 9th hit meets 2 shield: 4 go through, armour takes 1; from then on 6 - 1
    assert ticks[79, 1, HP] == 100 and ticks[80, 1, HP] == 97 and ticks[90, 1, HP] == 92 and ticks[100, 1, HP] == 87


def test_shield_regenerates_ten_seconds_after_the_last_hit(tmp_path):
    env = fight(tmp_path, [("marine", 10, 16)], [("still_zealot", 14, 16)])
    run(env, [ATTACK])
    ticks, _ = run(env, [1], 21)
    shield = ticks[:, 1, SHIELD]  # first of these is tick 8
    assert (shield[: 159 - 8] == 44).all()
    assert shield[159 - 8] == 44.125 and shield[160 - 8] == 44.25  # 2 per second


@pytest.mark.parametrize(
    ("attacker", "victim", "distance", "hp_after", "shield_after"),
    [
        ("marauder", "still_stalker", 5, 80, 60),  # 10 + 10 against armoured, on the shield
        ("marauder", "still_marauder", 5, 125 - 19, 0),  # 20 less armour 1
        ("marauder", "statue", 5, 35, 0),  # light: no bonus
        ("stalker", "still_stalker", 5, 80, 62),  # 13 + 5
        ("stalker", "statue", 5, 32, 0),
        ("zealot", "still_marauder", 1.1, 125 - 2 * (8 - 1), 0),  # two attacks, armour against each
        ("zergling", "statue", 0.8, 40, 0),
        ("spine_crawler", "still_marauder", 6, 125 - 29, 0),  # 25 + 5 less 1
    ],
)
def test_armour_and_bonus(tmp_path, attacker, victim, distance, hp_after, shield_after):
    env = fight(tmp_path, [(attacker, 10, 16)], [(victim, 10 + distance, 16)])
    ticks, _ = run(env, [ATTACK])
    assert ticks[0, 1, HP] == hp_after and ticks[0, 1, SHIELD] == shield_after


def test_healing_costs_energy(tmp_path):
    env = fight(tmp_path, [("medivac", 10, 16), ("statue", 12, 16)], [("statue", 30, 16)])
    saved = env.get_state()
    saved["unit_hp"][0, 1] = 20.0
    env.set_state(saved)
    ticks, rewards = run(env, [ATTACK + 1, 1])
    assert np.allclose(ticks[:, 1, HP], 20 + 9 / 16 * np.arange(1, 9))
    # 1 energy buys 3 hp: paid at the first tick and again at the sixth; +0.5625 per second meanwhile
    paid = np.array([1, 1, 1, 1, 1, 2, 2, 2])
    assert np.allclose(ticks[:, 0, ENERGY], 50 + 0.5625 / 16 * np.arange(1, 9) - paid)
    assert rewards == [0.0] and env.state[0, 1] == pytest.approx(ticks[-1, 0, ENERGY] / 200)


def test_healer_does_not_begin_without_energy_nor_heal_the_whole(tmp_path):
    env = fight(tmp_path, [("medivac", 10, 16), ("statue", 12, 16)], [("statue", 30, 16)])
    ticks, _ = run(env, [ATTACK + 1, 1])
    assert (ticks[:, 1, HP] == 45).all() and (ticks[:, 0, ENERGY] > 50).all()
    saved = env.get_state()
    saved["unit_hp"][0, 1], saved["unit_energy"][0, 0] = 20.0, 4.0
    env.set_state(saved)
    ticks, _ = run(env, [ATTACK + 1, 1])
    assert (ticks[:, 1, HP] == 20).all()


def test_the_dead_are_not_healed_back(tmp_path):
    # marine first in unit order dies in the same tick in which the enemy healer acts after it
    env = fight(tmp_path, [("marine", 10, 16)], [("statue", 14, 16), ("medivac", 16, 16)])
    saved = env.get_state()
    saved["unit_hp"][0, 1] = 6.0
    env.set_state(saved)
    ticks, rewards = run(env, [ATTACK])
    assert (ticks[:, 1, HP] == 0).all()
    assert rewards[0] == pytest.approx((6 + 10) * 20 / (2 * 10 + 200 + 45 + 150))


def test_colossus_beam_lies_across_the_shot(tmp_path):
    # x within .15 + .375 of the target; y within 1.4 + .375, but the centre within half the diagonal, 1.408
    places = [(16, 16), (16, 17.4), (16, 17.45), (16.5, 15), (16.55, 15)]
    env = fight(tmp_path, [("colossus", 11, 16)], [("still_zergling", x, y) for x, y in places])
    ticks, rewards = run(env, [ATTACK])
    assert ticks[0, 1:, HP].tolist() == [5, 5, 35, 5, 35]  # (10 + 5 against light) twice
    assert rewards[0] == pytest.approx(90 * 20 / (5 * 10 + 200 + 5 * 35))


def test_baneling_dies_and_hits_all_around(tmp_path):
    places = [(10.8, 16), (10, 18.5), (10, 18.6), (8, 16)]  # reach 2.2 + .375
    env = fight(tmp_path, [("baneling", 10, 16), ("statue", 11, 18)], [("still_zergling", x, y) for x, y in places])
    ticks, rewards = run(env, [ATTACK, 1])
    assert ticks[0, 2:, HP].tolist() == [0, 0, 35, 0]
    assert ticks[0, 0, HP] == 0 and ticks[0, 1, HP] == 45  # itself, but no friends
    assert rewards[0] == pytest.approx(3 * (35 + 10) * 20 / (4 * 10 + 200 + 4 * 35))
    assert not env.alive[0, 0] and env.legal[0, 0].tolist() == [True] + [False] * (env.spec.num_actions - 1)


def test_blast_hits_who_stood_near_when_the_tick_began_and_still_is(tmp_path):
    allies = [("statue", 10.9, 16), ("marine", 7.4, 16), ("marine", 10, 18.5), ("marine", 10, 13.5)]
    env = fight(tmp_path, allies, [("baneling", 10, 16), ("statue", 30, 16)])
    ticks, _ = run(env, [1, 4, 2, 1])  # the allies act first: one walks in, one walks out, one stands 2.5 away
    assert ticks[0, 4, SHOT] == 0 and ticks[0, :4, HP].tolist() == [0, 45, 45, 0]
    reach = np.hypot(ticks[0, 1:4, X] - 10, ticks[0, 1:4, Y] - 16)
    assert (reach < 2.575).tolist() == [True, False, True]


def test_a_shot_at_a_corpse_is_wasted(tmp_path):
    env = fight(tmp_path, [("marine", 10, 16), ("marine", 10, 17)], [("statue", 14, 16), ("statue", 14, 17)])
    saved = env.get_state()
    saved["unit_hp"][0, 2] = 6.0
    env.set_state(saved)
    ticks, rewards = run(env, [ATTACK, ATTACK])
    assert ticks[0, 1, SHOT] == 2 and ticks[0, 1, COOLDOWN] == 0.61 and ticks[0, 2, HP] == 0
    assert (ticks[:, 3, HP] == 45).all() and rewards[0] == pytest.approx(16 * 20 / (2 * 10 + 200 + 90))


def test_moves_and_targets(tmp_path):
    env = fight(tmp_path, [("marine", 10, 16)], [("statue", 20, 16)])
    ticks, _ = run(env, [4])
    assert ticks[-1, 0, X] == pytest.approx(10 + 3.15 / 2, abs=1e-5) and ticks[-1, 0, Y] == 16
    env = fight(tmp_path, [("marine", 10, 16), ("marine", 10, 18)], [("statue", 16, 16), ("statue", 10, 0.5)])
    assert env.legal[0].tolist() == [
        [False, True, True, True, True, True, True, False],  # exactly 6 away: a legal target
        [False, True, True, True, True, True, False, False],
    ]
    env = fight(tmp_path, [("marine", 0.5, 0.5)], [("statue", 31, 31)])
    assert env.legal[0, 0, 2:6].tolist() == [True, False, True, False]  # the edge of the map


def test_nobody_gets_stuck_outside_an_open_edge(tmp_path):
    env = fight(tmp_path, [("stalker", 1.0, 16)], [("statue", 20, 16)])
    run(env, [5])
    assert env.battles.units["x"][0, 0] < 0  # a move of 2 that began 1 from the edge
    assert env.legal[0, 0, 4]  # but the way back is open
    ticks, _ = run(env, [4])
    assert ticks[-1, 0, X] > 0.9


def test_enemies_prefer_healers_then_the_nearest(tmp_path):
    env = fight(tmp_path, [("statue", 13, 16), ("medivac", 12, 16)], [("marine", 16, 16)])
    ticks, _ = run(env, [1, 1])
    assert (ticks[:, 2, TARGET] == 1).all()
    env = fight(tmp_path, [("statue", 12, 16), ("statue", 13, 16)], [("marine", 16, 16)])
    ticks, _ = run(env, [1, 1])
    assert (ticks[:, 2, TARGET] == 1).all()


def test_mirrored_duel_is_fair(tmp_path):
    """Both fire in the same ticks; only the random order of the last one decides, so each side wins half."""
    env = fight(tmp_path, [("marine", 14, 16)], [("marine", 18, 16)], num_envs=4000, shuffle=True)
    for _ in range(9):
        env.step(np.full((4000, 1), ATTACK))
    assert env.info["done"].all()
    assert abs(env.info["battle_won"].mean() - 0.5) < 4 * 0.5 / np.sqrt(4000)


def test_contact_is_decided_in_the_precision_of_the_reference():
    """Overlapping neighbours: the border between single-precision velocities, computed by numpy in single precision."""
    single = np.float32
    rng, lines = np.random.default_rng(1), np.zeros((1, 5))
    for share in (0.5, 1.0):
        px, py = rng.uniform(-0.6, 0.6, 2).astype(single)
        own, other = rng.uniform(-4, 4, (2, 2)).astype(single)
        w = own - other - single(16) * np.array([px, py])
        length = np.sqrt(w[0] * w[0] + w[1] * w[1])
        normal = w / length
        point = own + single(share) * ((single(16 * 0.875) - length) * normal)
        for is_single in (True, False):
            given = (float(px), float(py), *own.astype(float), *other.astype(float), is_single)
            assert orca.avoid_unit(lines, 0, *given, 0.875, share, 1.0) == 1
            want = [*point, normal[1], -normal[0], is_single]
            assert np.array_equal(lines[0], want) == is_single and np.allclose(lines[0], want, atol=1e-5)


@pytest.mark.parametrize("name", ["3m", "8m", "2s3z", "3s5z", "MMM"])
def test_symmetric_maps_are_mirrored(name):
    env = envs.make(f"smac-{name}")
    units = env.battles.units[0]
    allies, enemies = units[env.rules.allies], units[env.rules.enemies]
    assert np.allclose(allies["x"] + enemies["x"], 32) and np.allclose(allies["y"] + enemies["y"], 32)
    assert np.array_equal(allies["hp"], enemies["hp"])


def test_turning_the_map_around_turns_the_battle_around(tmp_path):
    """No direction is favoured: the same fight turned by 180 degrees goes the same way, move for move."""
    places = [("zealot", 12, 15), ("zealot", 12, 17), ("stalker", 10, 16.2)]
    foes = [("zealot", 18, 14.5), ("zealot", 18, 16.5), ("stalker", 20, 16)]
    turned = [[(name, 32 - x, 32 - y) for name, x, y in units] for units in (places, foes)]
    one, other = fight(tmp_path, places, foes), fight(tmp_path, *turned)
    mirror = np.array([0, 1, 3, 2, 5, 4, 6, 7, 8])
    team = make_team("nearest", one)
    for _ in range(12):
        actions = team()
        one.step(actions)
        other.step(mirror[actions])
        assert np.array_equal(one.battles.units["hp"], other.battles.units["hp"])
        assert np.allclose(one.battles.units["x"] + other.battles.units["x"], 32, atol=1e-3)
        assert np.allclose(one.battles.units["y"] + other.battles.units["y"], 32, atol=1e-3)


@pytest.mark.parametrize("env_id", battles.ids())
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**31), team=st.sampled_from(["random", "random", "nearest", "focus"]))
def test_properties_of_random_play(env_id, seed, team):
    battle = battles.load(env_id)
    jitter = 0.0 if battle.draws_places else seed % 2 * 1.5
    env = BattleEnv(env_id, battle, num_envs=4, seed=seed, record=True, start_jitter=jitter)
    policy = make_team(team, env, seed)
    for _ in range(40):
        kinds = np.stack([env.kinds(b) for b in range(4)]).copy()[:, None]  # (B, 1, U), of the battles before the step
        ground = ~kinds[:, 0, :]["flies"]
        before, legal, alive = env.battles.units.copy(), env.legal.copy(), env.alive.copy()
        actions = policy().copy()
        assert np.take_along_axis(legal, actions[:, :, None], 2).all()
        assert (legal[~alive].sum(axis=1) == 1).all() and legal[~alive][:, 0].all() and not legal[alive][:, 0].any()
        _, reward, terminated, truncated, info = env.step(actions)
        ticks, going = env.battles.ticks, ~info["done"]
        assert (info["illegal_actions"] == 0).all() and (reward >= 0).all() and np.isfinite(env.obs).all()
        assert (ticks[..., HP] >= 0).all() and (ticks[..., HP] <= kinds["max_hp"] + 1e-9).all()
        assert (ticks[..., SHIELD] >= 0).all() and (ticks[..., SHIELD] <= kinds["max_shield"]).all()
        assert (ticks[..., COOLDOWN] >= 0).all() and (ticks[..., ENERGY] >= -1e-9).all()
        x, y = (ticks[..., column].transpose(0, 2, 1)[ground] for column in (X, Y))  # (units on the ground, 8)
        inside = (x >= 0) & (y >= 0) & (x < env.battle.width) & (y < env.battle.height)
        assert env.battle.walkable[y[inside].astype(int), x[inside].astype(int)].all()
        assert (abs(x - 16) < 18.2).all() and (abs(y - 16) < 18.2).all()
        dead = before["hp"] <= 0
        assert (ticks[..., SHOT].transpose(0, 2, 1)[dead] == -1).all()  # the dead never act
        assert np.array_equal(env.battles.units["x"][going][dead[going]], before["x"][going][dead[going]])
        assert (env.obs[~env.alive] == 0).all() and (abs(env.obs) <= 1).all()
        assert np.array_equal(info["done"], terminated[:, 0] | truncated[:, 0])
