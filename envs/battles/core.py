"""The battle itself, compiled: plain loops over envs, 8 ticks per step, float64 inside, float32 out.

Read it next to docs/battles.md: `tick` has the six numbered parts of the rules in order. A battle is one row of
records `units` (U,), in unit order; what never changes stands in `Rules`. Targets are unit indices, -1 for none.
Functions with one caller are inlined, since handing `Rules` over at each call would cost as much as the work.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from envs.battles.mapfile import WEAPONS, BattleMap, UnitType
from envs.battles.orca import avoid_unit, avoid_wall, choose_velocity
from envs.rng import below, unit

TICKS_PER_STEP = 8
TICK = 1.0 / 16.0  # seconds
SIGHT = 9.0
TARGET_RANGE = 6.0  # agents may order an attack up to here
MOVE_CHECK = 1.0  # a move is legal if this far ahead is walkable
MOVE_AHEAD = 2.0  # and its goal is this far ahead
SHIELD_DELAY = 10.0  # seconds without regeneration after a hit
SHIELD_PER_SECOND = 2.0
ENERGY_PER_SECOND = 0.5625
HEAL_PER_SECOND = 9.0
HEAL_PER_ENERGY = 3.0
HEAL_START_ENERGY = 5.0  # a healer needs this much to begin with a new target
WIN_BONUS = 200.0
KILL_BONUS = 10.0
RETURN_SCALE = 20.0  # the reward of a win without loss of any enemy's regeneration
START_DRAWS = 50  # tries to place a unit before it keeps its own place
OPPOSED_GAP = 6.0  # between sides that are drawn opposed, from a unit to its mirror image at least
SURROUND_SHARE = 0.25  # of the field's sides: the squares of the surrounded in the middle, and of the corners

NO_OP, STOP, NORTH, SOUTH, EAST, WEST, FIRST_TARGET = range(7)
MOVES = ((0.0, 1.0), (0.0, -1.0), (1.0, 0.0), (-1.0, 0.0))  # of NORTH, SOUTH, EAST, WEST
SINGLE, BEAM, BLAST, HEAL = range(len(WEAPONS))  # weapons
ATTACK_MOVE = 7  # the standing order of the enemies; agents' orders are STOP, NORTH..WEST or FIRST_TARGET
NOBODY = -1
FAR = 2e9  # the distance at which a unit counts that is far away but targets the one that looks

# what changes, per unit
UNIT = np.dtype(
    [
        ("x", "f8"), ("y", "f8"), ("vx", "f8"), ("vy", "f8"),
        ("hp", "f8"), ("shield", "f8"), ("energy", "f8"),
        ("cooldown", "f8"),  # seconds until it may fire
        ("shield_wait", "f8"),  # seconds until its shield regenerates
        ("heal_left", "f8"),  # hp that are paid for in energy but not given yet
        ("target", "i8"), ("previous_target", "i8"),
        ("order", "i8"), ("order_target", "i8"), ("goal_x", "f8"), ("goal_y", "f8"),
        ("wish_x", "f8"), ("wish_y", "f8"), ("next_vx", "f8"), ("next_vy", "f8"),  # within a tick
        ("v_single", "i8"), ("wish_single", "i8"), ("next_single", "i8"),  # 1: single precision, see orca.py
        ("firing", "i8"),  # within a tick: the unit it attacks, or NOBODY
        ("shot", "i8"),  # within a tick: the unit it fired at, or NOBODY
        ("drawn", "i8"),  # its type where types are drawn, as a row of Rules.table
    ]
)  # fmt: skip

# what never changes in a battle, per unit
KIND = np.dtype(
    [
        ("ally", "b1"), ("flies", "b1"), ("hits_ground", "b1"), ("hits_air", "b1"),
        ("weapon", "i8"), ("slot", "i8"), ("type_id", "i8"), ("attacks", "i8"),
        ("max_hp", "f8"), ("max_shield", "f8"), ("max_energy", "f8"), ("start_energy", "f8"), ("armour", "f8"),
        ("cooldown", "f8"), ("range", "f8"), ("scan", "f8"), ("speed", "f8"), ("radius", "f8"), ("regen", "f8"),
        ("blast_radius", "f8"), ("beam_length", "f8"), ("beam_width", "f8"), ("start_x", "f8"), ("start_y", "f8"),
    ]
)  # fmt: skip

RECORDED = ("x", "y", "hp", "shield", "cooldown", "energy", "target", "shot")  # columns of a recorded tick


class Rules(NamedTuple):
    """Everything fixed about one map; arrays over units are in unit order."""

    kinds: np.ndarray  # (U,) KIND
    damage: np.ndarray  # (U, U): one attack of the first on the second, before shield and armour
    allies: np.ndarray  # (N,) unit index of agent i
    enemies: np.ndarray  # (M,) unit index of enemy j
    walkable: np.ndarray  # (height, width) bool
    walls: np.ndarray  # (R, 4) blocked rectangles x0, y0, x1, y1
    near_walls: np.ndarray  # walls that may matter to a ground unit in a cell, cell after cell
    near_starts: np.ndarray  # (cells + 1,): those of cell c stand at near_starts[c] .. near_starts[c + 1]
    goal_x: float  # where the enemies attack
    goal_y: float
    max_radius: float
    reward_scale: float
    num_actions: int
    num_types: int  # type features per unit
    ally_shields: int  # 1 if some ally has a shield, so that allies have a shield feature
    enemy_shields: int
    limit: int  # steps until truncation
    jitter: float  # start positions move by up to this much
    shuffle: bool  # units act in a fresh random order each tick
    auto_reset: bool  # a battle that is over starts anew within the same step
    draws_places: bool  # start places are drawn, opposed or surrounded
    field: np.ndarray  # (4,) x0, y0, x1, y1: the smallest rectangle with all walkable cells
    table: np.ndarray  # (K,) KIND of the types that are drawn; none: every unit has its own
    table_damage: np.ndarray  # (K, K)
    chances: np.ndarray  # (K,) of the types, added up


def make_rules(
    battle: BattleMap, limit: int, jitter: float = 0.0, shuffle: bool = True, auto_reset: bool = True
) -> Rules:
    """The compiled simulator's view of a map."""
    units, drawn = battle.units, [unit for unit, _ in battle.drawn_types]
    kinds, table = make_kinds([unit for _, unit in units], battle), make_kinds(drawn, battle)
    slots = {"ally": 0, "enemy": 0}
    for kind, (side, _), (x, y) in zip(kinds, units, battle.start_positions(), strict=True):
        kind["ally"], kind["slot"] = side == "ally", slots[side]
        kind["start_x"], kind["start_y"] = np.float32(x), np.float32(y)
        slots[side] += 1
    allies, enemies = np.flatnonzero(kinds["ally"]), np.flatnonzero(~kinds["ally"])
    # agents address enemies by slot, and healers address allies by slot
    targets = len(enemies)
    if (table["weapon"] == HEAL).any():
        targets = max(targets, len(allies))
    elif (kinds["weapon"][allies] == HEAL).any():
        targets = max(targets, 1 + max(np.flatnonzero(kinds["weapon"][allies] != HEAL).tolist(), default=-1))
    walls, possible = battle.walls(), table if len(table) else kinds
    reach = (possible["radius"] + possible["speed"]).max()
    near_walls, near_starts = walls_by_cell(walls, battle.width, battle.height, reach)
    ally_kinds, enemy_kinds = (table, table) if len(table) else (kinds[allies], kinds[enemies])
    rows, columns = np.nonzero(battle.walkable)
    return Rules(
        kinds=kinds,
        damage=damage_between([unit for _, unit in units]),
        allies=allies,
        enemies=enemies,
        walkable=battle.walkable,
        walls=walls,
        near_walls=near_walls,
        near_starts=near_starts,
        goal_x=float(battle.attack_point[0]),
        goal_y=float(battle.attack_point[1]),
        max_radius=float(possible["radius"].max()),
        reward_scale=float(scale_reward(kinds, enemies)),
        num_actions=FIRST_TARGET + targets,
        num_types=len(battle.type_features),
        ally_shields=int((ally_kinds["max_shield"] > 0).any()),
        enemy_shields=int((enemy_kinds["max_shield"] > 0).any()),
        limit=int(limit),
        jitter=float(jitter),
        shuffle=bool(shuffle),
        auto_reset=bool(auto_reset),
        draws_places=battle.draws_places,
        field=np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1], np.float64),
        table=table,
        table_damage=damage_between(drawn),
        chances=np.cumsum([chance for _, chance in battle.drawn_types], dtype=np.float64),
    )


def make_kinds(units: list[UnitType], battle: BattleMap) -> np.ndarray:
    """(U,) KIND of some types of units, without sides and places."""
    kinds = np.zeros(len(units), KIND)
    for kind, u in zip(kinds, units, strict=True):
        kind["flies"], kind["hits_ground"], kind["hits_air"] = u.plane == "air", "ground" in u.hits, "air" in u.hits
        kind["weapon"], kind["attacks"] = WEAPONS.index(u.weapon), u.attacks
        kind["type_id"] = battle.type_features.index(u.name) if battle.type_features else 0
        kind["max_hp"], kind["max_shield"], kind["armour"] = u.hp, u.shield, u.armour
        kind["max_energy"], kind["start_energy"] = u.energy, u.start_energy
        kind["cooldown"], kind["range"], kind["scan"] = u.cooldown, u.range, u.scan
        kind["speed"], kind["radius"], kind["regen"] = u.speed, u.radius, u.regen
        kind["blast_radius"], (kind["beam_length"], kind["beam_width"]) = u.blast_radius, u.beam
    return kinds


def damage_between(units: list[UnitType]) -> np.ndarray:
    return np.array([[a.damage_to(b) for b in units] for a in units], np.float64).reshape(len(units), len(units))


@njit(cache=True, nogil=True, error_model="numpy")
def scale_reward(kinds, enemies):
    """What a point is worth: a win without any enemy's regeneration earns RETURN_SCALE."""
    total = KILL_BONUS * enemies.shape[0] + WIN_BONUS
    for i in enemies:
        total += kinds[i].max_hp + kinds[i].max_shield
    return RETURN_SCALE / total


@njit(cache=True, nogil=True, error_model="numpy")
def rules_of(rules, battles, b):
    """The rules of battle b: where types are drawn, with its own."""
    if rules.table.shape[0] == 0:
        return rules
    return Rules(
        battles.kinds[b], battles.damage[b], rules.allies, rules.enemies, rules.walkable, rules.walls, rules.near_walls,
        rules.near_starts, rules.goal_x, rules.goal_y, rules.max_radius,
        scale_reward(battles.kinds[b], rules.enemies), rules.num_actions, rules.num_types, rules.ally_shields,
        rules.enemy_shields, rules.limit, rules.jitter, rules.shuffle, rules.auto_reset, rules.draws_places,
        rules.field, rules.table, rules.table_damage, rules.chances,
    )  # fmt: skip


def walls_by_cell(walls: np.ndarray, width: int, height: int, reach: float) -> tuple[np.ndarray, np.ndarray]:
    """For each cell of the map the walls within `reach` of it, so that units look only at those."""
    near = []
    for y in range(height):
        for x in range(width):
            gap_x = np.maximum(0.0, np.maximum(walls[:, 0] - (x + 1), x - walls[:, 2]))
            gap_y = np.maximum(0.0, np.maximum(walls[:, 1] - (y + 1), y - walls[:, 3]))
            near.append(np.flatnonzero(gap_x**2 + gap_y**2 <= reach**2))
    return np.concatenate(near), np.cumsum([0] + [len(cell) for cell in near])


def obs_size(rules: Rules) -> int:
    ally, enemy = 5 + rules.ally_shields + rules.num_types, 5 + rules.enemy_shields + rules.num_types
    return 4 + len(rules.enemies) * enemy + (len(rules.allies) - 1) * ally + ally - 4


def state_size(rules: Rules) -> int:
    ally, enemy = 4 + rules.ally_shields + rules.num_types, 3 + rules.enemy_shields + rules.num_types
    return len(rules.allies) * (ally + rules.num_actions) + len(rules.enemies) * enemy


# ---------------------------------------------------------------------------------------------------------------------
# geometry
# ---------------------------------------------------------------------------------------------------------------------


@njit(cache=True, nogil=True, error_model="numpy")
def is_within(units, i, j, reach):
    """Whether j is that near to i, in single precision like the positions."""
    dx, dy = np.float32(units[j].x - units[i].x), np.float32(units[j].y - units[i].y)
    return dx * dx + dy * dy <= np.float32(reach * reach)


@njit(cache=True, nogil=True, error_model="numpy")
def stood_within(units, places, i, j, reach):
    """Whether j, when the tick began, stood that near to where i is now: beams and blasts look for victims so."""
    dx, dy = places[j, 0] - units[i].x, places[j, 1] - units[i].y
    return dx * dx + dy * dy <= reach * reach


@njit(cache=True, nogil=True, error_model="numpy")
def is_in_attack_range(kinds, units, i, j):
    return is_within(units, i, j, kinds[i].range + kinds[i].radius + kinds[j].radius)


@njit(cache=True, nogil=True, error_model="numpy")
def can_hit(kinds, i, j):
    return kinds[i].hits_air if kinds[j].flies else kinds[i].hits_ground


@njit(cache=True, nogil=True, error_model="numpy")
def is_on_map(walkable, x, y):
    return 0.0 <= x < walkable.shape[1] and 0.0 <= y < walkable.shape[0]


@njit(cache=True, nogil=True, error_model="numpy")
def is_walkable(walkable, x, y):
    return is_on_map(walkable, x, y) and walkable[int(y), int(x)]


@njit(cache=True, nogil=True, error_model="numpy")
def is_wall(walkable, x, y):
    """Open edges of a map are no walls: a move that starts inside may end a little outside."""
    return is_on_map(walkable, x, y) and not walkable[int(y), int(x)]


# ---------------------------------------------------------------------------------------------------------------------
# one tick
# ---------------------------------------------------------------------------------------------------------------------


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def forget_targets(kinds, units, living):
    """1. Forget dead targets; an enemy also drops one that is out of its range and does not target it."""
    for i in living:
        me = units[i]
        me.previous_target = me.target
        if me.order == FIRST_TARGET:
            me.target = me.order_target if units[me.order_target].hp > 0.0 else NOBODY
        elif me.order != ATTACK_MOVE:
            me.target = NOBODY
        elif me.target != NOBODY:
            j = me.target
            if units[j].hp <= 0.0 or (units[j].target != i and not is_in_attack_range(kinds, units, i, j)):
                me.target = NOBODY


@njit(cache=True, nogil=True, error_model="numpy")
def pick_opponent(rules, units, i, include_far):
    """2. The opponent an enemy goes for: healers first, then the nearest. NOBODY if there is none."""
    kinds = rules.kinds
    best, best_healer, best_distance = NOBODY, False, 0.0
    for j in rules.allies:
        if units[j].hp <= 0.0 or not can_hit(kinds, i, j):
            continue
        dx, dy = units[j].x - units[i].x, units[j].y - units[i].y
        distance = np.sqrt(dx * dx + dy * dy)
        if distance > kinds[i].scan + rules.max_radius:
            if not include_far or units[j].target != i:
                continue
            distance = FAR
        elif distance >= kinds[i].scan + kinds[j].radius and units[j].target != i:
            continue
        healer = kinds[j].weapon == HEAL
        if best == NOBODY or (healer and not best_healer) or (healer == best_healer and distance < best_distance):
            best, best_healer, best_distance = j, healer, distance
    return best


@njit(cache=True, nogil=True, error_model="numpy")
def pick_patient(rules, units, i):
    """2. Whom an enemy healer goes for: the lowest hp among the hurt and the fighting in scan range."""
    kinds = rules.kinds
    best = NOBODY
    for j in rules.enemies:
        if units[j].hp <= 0.0 or j == i or not can_hit(kinds, i, j):
            continue
        dx, dy = units[j].x - units[i].x, units[j].y - units[i].y
        near = np.sqrt(dx * dx + dy * dy) < kinds[i].scan + kinds[j].radius
        if near and (units[j].hp < kinds[j].max_hp or units[j].target != NOBODY):
            if best == NOBODY or units[j].hp < units[best].hp:
                best = j
    return best


@njit(cache=True, nogil=True, error_model="numpy")
def escort_speed(rules, units, i):
    """An enemy healer on its way moves no faster than the slowest of those around it that it could heal."""
    kinds = rules.kinds
    speed = np.inf
    for j in rules.enemies:
        if units[j].hp > 0.0 and can_hit(kinds, i, j):
            if is_within(units, i, j, kinds[i].scan + rules.max_radius):
                speed = min(speed, kinds[j].speed)
    return kinds[i].speed if speed == np.inf else speed


@njit(cache=True, nogil=True, error_model="numpy")
def walk_towards(me, x, y, speed):
    dx, dy = x - me.x, y - me.y
    distance = np.sqrt(dx * dx + dy * dy)
    if distance > 0.0:
        me.wish_x, me.wish_y = dx * speed / distance, dy * speed / distance


@njit(cache=True, nogil=True, error_model="numpy")
def chase(me, other, speed):
    """As `walk_towards`, in single precision (see orca.py)."""
    dx, dy = np.float32(other.x - me.x), np.float32(other.y - me.y)
    distance = np.sqrt(dx * dx + dy * dy)
    if distance > np.float32(0.0):
        me.wish_x, me.wish_y = dx * np.float32(speed) / distance, dy * np.float32(speed) / distance
        me.wish_single = 1


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def choose_wishes(rules, units, living):
    """2. and 3. Enemies pick targets; everybody's preferred velocity, and whom it attacks in this tick."""
    kinds = rules.kinds
    ally_healer = False
    for j in rules.allies:
        ally_healer |= units[j].hp > 0.0 and kinds[j].weapon == HEAL
    for i in living:
        me = units[i]
        me.wish_x, me.wish_y, me.wish_single, me.firing = 0.0, 0.0, 0, NOBODY
        speed = kinds[i].speed
        goal_x, goal_y, target = me.goal_x, me.goal_y, me.order_target
        if me.order == NO_OP or me.order == STOP:
            continue
        if me.order == ATTACK_MOVE:
            if kinds[i].weapon == HEAL:
                if me.target == NOBODY:
                    me.target = pick_patient(rules, units, i)
                    speed = min(speed, escort_speed(rules, units, i))
            elif me.target == NOBODY:
                me.target = pick_opponent(rules, units, i, True)
            elif ally_healer and kinds[me.target].weapon != HEAL:
                better = pick_opponent(rules, units, i, False)
                if better != NOBODY:
                    me.target = better
            target = me.target
        if target != NOBODY:
            if can_hit(kinds, i, target) and is_in_attack_range(kinds, units, i, target):
                me.firing = target
                continue
            chase(me, units[target], speed)
        else:
            walk_towards(me, goal_x, goal_y, speed)


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def avoid_collisions(rules, units, living, lines, projected, places):
    """4. New velocities for all at once; who wants to stand is never pushed."""
    kinds, walls, near_walls, near_starts = rules.kinds, rules.walls, rules.near_walls, rules.near_starts
    for i in living:
        me = units[i]
        me.next_vx, me.next_vy, me.next_single = me.wish_x, me.wish_y, 0
        if me.wish_x == 0.0 and me.wish_y == 0.0:
            continue
        x, y, vx, vy, radius, speed = me.x, me.y, me.vx, me.vy, kinds[i].radius, kinds[i].speed
        count = 0
        if not kinds[i].flies:
            column = min(max(int(x), 0), rules.walkable.shape[1] - 1)
            cell = min(max(int(y), 0), rules.walkable.shape[0] - 1) * rules.walkable.shape[1] + column
            for k in range(near_starts[cell], near_starts[cell + 1]):
                count = avoid_wall(lines, count, walls, near_walls[k], x, y, vx, vy, radius, radius + speed)
        num_walls = count
        reach_sq = (radius + rules.max_radius) ** 2
        for j in living:
            px, py = places[j, 0] - x, places[j, 1] - y
            if px * px + py * py > reach_sq:
                continue
            if j == i or kinds[j].flies != kinds[i].flies:
                continue
            other = units[j]
            share = 0.5 if other.wish_x != 0.0 or other.wish_y != 0.0 else 1.0
            single = me.v_single == 1 and other.v_single == 1
            count = avoid_unit(
                lines, count, px, py, vx, vy, other.vx, other.vy, single,
                radius + kinds[j].radius, share, 1.0 if i > j else -1.0,
            )  # fmt: skip
        me.next_vx, me.next_vy, me.next_single = choose_velocity(
            lines, num_walls, count, speed, me.wish_x, me.wish_y, me.wish_single == 1, projected
        )


@njit(cache=True, nogil=True, error_model="numpy")
def move(kind, me, walkable):
    """First of 5. The new position; where avoidance found no way past a wall, the wall still holds.

    Positions keep float32 precision as in the reference, so that equal distances tie in the same way.
    """
    me.vx, me.vy, me.v_single = me.next_vx, me.next_vy, me.next_single
    if me.vx == 0.0 and me.vy == 0.0:
        return
    x, y = np.float64(np.float32(me.x + me.vx * TICK)), np.float64(np.float32(me.y + me.vy * TICK))
    if kind.flies or not is_wall(walkable, x, y):
        me.x, me.y = x, y
    elif not is_wall(walkable, x, me.y):
        me.x, me.vy = x, 0.0
    elif not is_wall(walkable, me.x, y):
        me.y, me.vx = y, 0.0
    else:
        me.vx, me.vy = 0.0, 0.0


@njit(cache=True, nogil=True, error_model="numpy")
def run_clocks(kind, me):
    """Second of 5. Cooldown, shield timer and shield, energy, regeneration."""
    me.cooldown = max(me.cooldown - TICK, 0.0)
    me.shield_wait = max(me.shield_wait - TICK, 0.0)
    if me.shield_wait == 0.0:
        me.shield = min(me.shield + SHIELD_PER_SECOND * TICK, kind.max_shield)
    me.energy = min(me.energy + ENERGY_PER_SECOND * TICK, kind.max_energy)
    me.hp = min(me.hp + kind.regen * TICK, kind.max_hp)


@njit(cache=True, nogil=True, error_model="numpy")
def strike(rules, units, i, j):
    """All attacks of one shot of i on j; returns the team's points, which only damage to enemies gives."""
    kind, victim = rules.kinds[j], units[j]
    points = 0.0
    for _ in range(rules.kinds[i].attacks):
        if victim.hp <= 0.0:
            break
        if kind.max_shield > 0.0:
            victim.shield_wait = SHIELD_DELAY
        absorbed = min(rules.damage[i, j], victim.shield)
        victim.shield -= absorbed
        wound = max(0.0, min(rules.damage[i, j] - absorbed - kind.armour, victim.hp))
        victim.hp -= wound
        points += absorbed + wound
        if victim.hp <= 0.0:
            victim.hp = 0.0
            points += KILL_BONUS
    return 0.0 if kind.ally else points


@njit(cache=True, nogil=True, error_model="numpy")
def heal(kinds, units, i, j):
    """One tick of healing; a target that is whole, dead, or new and too costly is dropped."""
    me, patient = units[i], units[j]
    missing = kinds[j].max_hp - patient.hp
    starting = me.previous_target != me.target
    if patient.hp <= 0.0 or missing <= 0.0 or (starting and me.energy < HEAL_START_ENERGY):
        me.target = NOBODY
        return
    amount = min(missing, HEAL_PER_SECOND * TICK)
    if me.heal_left < amount:
        spent = min(1.0, me.energy)
        me.energy -= spent
        me.heal_left += spent * HEAL_PER_ENERGY
    amount = min(amount, me.heal_left)
    me.heal_left -= amount
    patient.hp += amount


@njit(cache=True, nogil=True, error_model="numpy")
def is_under_beam(kind, units, i, target, j, radius):
    """Whether the disc of j touches the rectangle that lies across the line from i to the target, at the target."""
    ahead_x, ahead_y = units[target].x - units[i].x, units[target].y - units[i].y
    length = np.sqrt(ahead_x * ahead_x + ahead_y * ahead_y)
    if length > 0.0:
        ahead_x, ahead_y = ahead_x / length, ahead_y / length
    else:
        ahead_x, ahead_y = 1.0, 0.0
    dx, dy = units[j].x - units[target].x, units[j].y - units[target].y
    along = max(0.0, abs(dx * ahead_x + dy * ahead_y) - kind.beam_width / 2)
    across = max(0.0, abs(dx * ahead_y - dy * ahead_x) - kind.beam_length / 2)
    return along * along + across * across <= radius * radius


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def fire(rules, units, places, i):
    """The rest of 5. A unit that attacks and is ready uses its weapon; returns the team's points."""
    kinds, me = rules.kinds, units[i]
    kind, j = kinds[i], me.firing
    me.cooldown = kind.cooldown
    me.shot = j
    if kind.weapon == SINGLE:
        return strike(rules, units, i, j)
    if kind.weapon == HEAL:
        heal(kinds, units, i, j)
        return 0.0
    points = 0.0
    if kind.weapon == BLAST:
        points = 0.0 if kind.ally else me.hp  # an enemy that blows itself up counts as damaged, not as a kill
        me.hp = 0.0
    for k in rules.enemies if kind.ally else rules.allies:
        if kind.weapon == BLAST:
            near = stood_within(units, places, i, k, kind.blast_radius + rules.max_radius)
            hit = near and is_within(units, i, k, kind.blast_radius + kinds[k].radius)
        else:
            near = stood_within(units, places, j, k, np.hypot(kind.beam_length, kind.beam_width) / 2)
            hit = near and is_under_beam(kind, units, i, j, k, kinds[k].radius)
        if hit:
            points += strike(rules, units, i, k)
    return points


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def act(rules, units, living, turns, places, streams, row):
    """5. In a freshly shuffled order, the living: move, run clocks, fire. Returns the team's points."""
    kinds, walkable = rules.kinds, rules.walkable
    points = 0.0
    for k in range(living.shape[0]):
        other = below(streams, row, k + 1) if rules.shuffle else k
        turns[k] = turns[other]
        turns[other] = living[k]
    for i in turns:
        me = units[i]
        if me.hp > 0.0:
            move(kinds[i], me, walkable)
            run_clocks(kinds[i], me)
            if me.firing != NOBODY and me.cooldown == 0.0:
                points += fire(rules, units, places, i)
    return points


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def find_living(units, living, places):
    """6. The dead are out: the living in unit order, and where they stand; returns how many."""
    count = 0
    for i in range(units.shape[0]):
        units[i].shot = NOBODY
        if units[i].hp > 0.0:
            living[count] = i
            places[i, 0], places[i, 1] = units[i].x, units[i].y
            count += 1
    return count


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def tick(rules, units, living, turns, lines, projected, places, streams, row):
    """One sixteenth of a second; returns the team's points."""
    count = find_living(units, living, places)
    living, turns = living[:count], turns[:count]
    forget_targets(rules.kinds, units, living)
    choose_wishes(rules, units, living)
    avoid_collisions(rules, units, living, lines, projected, places)
    return act(rules, units, living, turns, places, streams, row)


# ---------------------------------------------------------------------------------------------------------------------
# what agents may do and see
# ---------------------------------------------------------------------------------------------------------------------


@njit(cache=True, nogil=True, error_model="numpy")
def may_move(walkable, me, action):
    """To walkable ground, or from outside the map back towards it."""
    dx, dy = MOVES[action - NORTH]
    if is_walkable(walkable, me.x + dx * MOVE_CHECK, me.y + dy * MOVE_CHECK):
        return True
    middle_x, middle_y = walkable.shape[1] / 2, walkable.shape[0] / 2
    off_x, off_y = abs(me.x - middle_x) > middle_x, abs(me.y - middle_y) > middle_y
    return (off_x and dx * (middle_x - me.x) > 0.0) or (off_y and dy * (middle_y - me.y) > 0.0)


@njit(cache=True, nogil=True, error_model="numpy")
def may_target(kinds, units, i, j):
    """Enemies, for healers allies that are no healers; alive and near enough, whatever the unit's own range."""
    heals = kinds[i].weapon == HEAL
    fits = heals == kinds[j].ally and not (heals and kinds[j].weapon == HEAL)
    return fits and units[j].hp > 0.0 and is_within(units, i, j, TARGET_RANGE)


@njit(cache=True, nogil=True, error_model="numpy")
def targets_of(rules, i):
    """The units that actions FIRST_TARGET, FIRST_TARGET + 1, ... of unit i aim at."""
    return rules.allies if rules.kinds[i].weapon == HEAL else rules.enemies


@njit(cache=True, nogil=True, error_model="numpy")
def is_legal(rules, units, i, action):
    """Whether the agent with unit index i may do `action`."""
    if units[i].hp <= 0.0:
        return action == NO_OP
    if action < FIRST_TARGET:
        return action == STOP or (action >= NORTH and may_move(rules.walkable, units[i], action))
    targets = targets_of(rules, i)
    slot = action - FIRST_TARGET
    return slot < targets.shape[0] and may_target(rules.kinds, units, i, targets[slot])


@njit(cache=True, nogil=True, error_model="numpy")
def find_legal(rules, units, legal):
    """legal (N, A), by the same rules as `is_legal`."""
    kinds, walkable = rules.kinds, rules.walkable
    for a in range(rules.allies.shape[0]):
        i = rules.allies[a]
        for action in range(rules.num_actions):
            legal[a, action] = False
        if units[i].hp <= 0.0:
            legal[a, NO_OP] = True
            continue
        legal[a, STOP] = True
        for action in range(NORTH, FIRST_TARGET):
            legal[a, action] = may_move(walkable, units[i], action)
        targets = targets_of(rules, i)
        for slot in range(min(targets.shape[0], rules.num_actions - FIRST_TARGET)):
            legal[a, FIRST_TARGET + slot] = may_target(kinds, units, i, targets[slot])


@njit(cache=True, nogil=True, error_model="numpy")
def describe(kind, me, out, row, hp, rest, shields, num_types):
    """Write hp at out[row, hp], and from out[row, rest] on the shield, if this side has shields, and the type."""
    out[row, hp] = me.hp / kind.max_hp
    if shields and kind.max_shield > 0.0:
        out[row, rest] = me.shield / kind.max_shield
    if num_types:
        out[row, rest + shields + kind.type_id] = 1.0


@njit(cache=True, nogil=True, error_model="numpy")
def see(kind, me, other, out, row, base, flag, shields, num_types):
    """What unit `me` sees of another: flag, distance, offset, hp, shield, type; nothing of the dead and the far."""
    dx, dy = other.x - me.x, other.y - me.y
    distance_sq = dx * dx + dy * dy
    if other.hp > 0.0 and distance_sq <= SIGHT * SIGHT:
        out[row, base], out[row, base + 1] = flag, np.sqrt(distance_sq) / SIGHT
        out[row, base + 2], out[row, base + 3] = dx / SIGHT, dy / SIGHT
        describe(kind, other, out, row, base + 4, base + 5, shields, num_types)


@njit(cache=True, nogil=True, error_model="numpy")
def observe(rules, units, legal, obs):
    """obs (N, obs): legal moves | enemies | other allies | own; zeros for the dead and the unseen."""
    kinds, allies, enemies, num_types = rules.kinds, rules.allies, rules.enemies, rules.num_types
    ally_shields, enemy_shields = rules.ally_shields, rules.enemy_shields
    for a in range(allies.shape[0]):
        i = allies[a]
        me = units[i]
        for k in range(obs.shape[1]):
            obs[a, k] = 0.0
        if me.hp <= 0.0:
            continue
        for k in range(4):
            obs[a, k] = legal[a, NORTH + k]
        base = 4
        for e in range(enemies.shape[0]):
            j = enemies[e]
            see(kinds[j], me, units[j], obs, a, base, legal[a, FIRST_TARGET + e], enemy_shields, num_types)
            base += 5 + enemy_shields + num_types
        for j in allies:
            if j != i:
                see(kinds[j], me, units[j], obs, a, base, True, ally_shields, num_types)
                base += 5 + ally_shields + num_types
        describe(kinds[i], me, obs, a, base, base + 1, ally_shields, num_types)


@njit(cache=True, nogil=True, error_model="numpy")
def write_state(rules, units, last_actions, states, row):
    """states[row] (S,): allies | enemies | last actions one-hot (none before the first step: -1)."""
    kinds, num_types = rules.kinds, rules.num_types
    height, width = rules.walkable.shape
    for k in range(states.shape[1]):
        states[row, k] = 0.0
    base = 0
    for i in rules.allies:
        kind, me = kinds[i], units[i]
        if me.hp > 0.0:
            describe(kind, me, states, row, base, base + 4, rules.ally_shields, num_types)
            clock = me.energy / kind.max_energy if kind.weapon == HEAL else me.cooldown / kind.cooldown
            states[row, base + 1] = clock
            states[row, base + 2], states[row, base + 3] = (me.x - width / 2) / width, (me.y - height / 2) / height
        base += 4 + rules.ally_shields + num_types
    for i in rules.enemies:
        me = units[i]
        if me.hp > 0.0:
            describe(kinds[i], me, states, row, base, base + 3, rules.enemy_shields, num_types)
            states[row, base + 1], states[row, base + 2] = (me.x - width / 2) / width, (me.y - height / 2) / height
        base += 3 + rules.enemy_shields + num_types
    for a in range(last_actions.shape[0]):
        if last_actions[a] >= 0:
            states[row, base + last_actions[a]] = 1.0
        base += rules.num_actions


# ---------------------------------------------------------------------------------------------------------------------
# episodes
# ---------------------------------------------------------------------------------------------------------------------


@njit(cache=True, nogil=True, error_model="numpy")
def is_on_ground(walkable, x, y, radius):
    """Whether the four ends of a disc are on walkable ground."""
    for k in range(4):
        dx, dy = MOVES[k]
        if not is_walkable(walkable, x + dx * radius, y + dy * radius):
            return False
    return True


@njit(cache=True, nogil=True, error_model="numpy")
def is_free_start(rules, units, i, x, y):
    """Whether unit i may start at (x, y): its whole disc on walkable ground, clear of the units before it."""
    kinds = rules.kinds
    radius = kinds[i].radius
    if not is_on_ground(rules.walkable, x, y, radius):
        return False
    for j in range(i):
        gap = radius + kinds[j].radius
        dx, dy = units[j].x - x, units[j].y - y
        if kinds[j].flies == kinds[i].flies and dx * dx + dy * dy < gap * gap:
            return False
    return True


@njit(cache=True, nogil=True, error_model="numpy")
def set_types(rules, battles, b):
    """Kinds and damage of battle b from the types of its units."""
    units, kinds = battles.units[b], battles.kinds[b]
    for i in range(units.shape[0]):
        own = rules.kinds[i]
        kinds[i] = rules.table[units[i].drawn]
        kinds[i].ally, kinds[i].slot, kinds[i].start_x, kinds[i].start_y = own.ally, own.slot, own.start_x, own.start_y
        for j in range(units.shape[0]):
            battles.damage[b, i, j] = rules.table_damage[units[i].drawn, units[j].drawn]


@njit(cache=True, nogil=True, error_model="numpy")
def draw_types(rules, units, streams, row):
    """Types slot by slot, the same for both sides; a team of healers alone is drawn again."""
    fights = False
    while not fights:
        for k in range(rules.allies.shape[0]):
            chance, drawn = unit(streams, row) * rules.chances[-1], 0
            while chance >= rules.chances[drawn] and drawn < rules.chances.shape[0] - 1:
                drawn += 1
            units[rules.allies[k]].drawn = units[rules.enemies[k]].drawn = drawn
            fights = fights or rules.table[drawn].weapon != HEAL


@njit(cache=True, nogil=True, error_model="numpy")
def draw_place(rules, units, i, x0, y0, x1, y1, mirror, streams, row):
    """A free place of unit i in a rectangle; with `mirror` >= 0 that unit stands on the other side of the field.
    Where none is found, both keep their own."""
    me, field, radius = units[i], rules.field, rules.kinds[i].radius
    me.x, me.y = rules.kinds[i].start_x, rules.kinds[i].start_y
    if mirror >= 0:
        units[mirror].x, units[mirror].y = rules.kinds[mirror].start_x, rules.kinds[mirror].start_y
    for _ in range(START_DRAWS):
        x = np.float64(np.float32(x0 + (x1 - x0) * unit(streams, row)))
        y = np.float64(np.float32(y0 + (y1 - y0) * unit(streams, row)))
        other_x = np.float64(np.float32(field[0] + field[2] - x))
        if is_free_start(rules, units, i, x, y) and (mirror < 0 or is_on_ground(rules.walkable, other_x, y, radius)):
            me.x, me.y = x, y
            if mirror >= 0:
                units[mirror].x, units[mirror].y = other_x, y
            return


@njit(cache=True, nogil=True, error_model="numpy")
def draw_places(rules, units, streams, row):
    """Half of the battles are opposed, half surrounded (docs/battles.md); the enemies walk to where the allies are."""
    (x0, y0, x1, y1), corner = rules.field, SURROUND_SHARE * (rules.field[2:] - rules.field[:2])
    middle_x, middle_y = (x0 + x1) / 2, (y0 + y1) / 2
    for i in range(units.shape[0]):  # nobody is in the way of those who are placed before it
        units[i].x, units[i].y = -FAR, -FAR
    if unit(streams, row) < 0.5:
        west = unit(streams, row) < 0.5
        for k in range(rules.allies.shape[0]):
            left, right = (x0, middle_x - OPPOSED_GAP / 2) if west else (middle_x + OPPOSED_GAP / 2, x1)
            draw_place(rules, units, rules.allies[k], left, y0, right, y1, rules.enemies[k], streams, row)
    else:
        for i in rules.allies:
            draw_place(
                rules, units, i, middle_x - corner[0] / 2, middle_y - corner[1] / 2,
                middle_x + corner[0] / 2, middle_y + corner[1] / 2, NOBODY, streams, row,
            )  # fmt: skip
        for i in rules.enemies:
            left = x0 if below(streams, row, 2) == 0 else x1 - corner[0]
            bottom = y0 if below(streams, row, 2) == 0 else y1 - corner[1]
            draw_place(rules, units, i, left, bottom, left + corner[0], bottom + corner[1], NOBODY, streams, row)
    goal_x = goal_y = 0.0
    for i in rules.allies:
        goal_x, goal_y = goal_x + units[i].x / rules.allies.shape[0], goal_y + units[i].y / rules.allies.shape[0]
    for i in range(units.shape[0]):
        units[i].goal_x, units[i].goal_y = goal_x, goal_y


@njit(cache=True, nogil=True, error_model="numpy")
def start_battle(rules, battles, b):
    """A new episode: everybody whole and at its place, or up to `jitter` away from it, or wherever is drawn."""
    units, last_actions, streams, row = battles.units[b], battles.last_actions[b], battles.streams, b
    if rules.table.shape[0] > 0:
        draw_types(rules, units, streams, row)
        set_types(rules, battles, b)
    rules = rules_of(rules, battles, b)
    kinds = rules.kinds
    for i in range(units.shape[0]):
        units[i].goal_x, units[i].goal_y = rules.goal_x, rules.goal_y
    if rules.draws_places:
        draw_places(rules, units, streams, row)
    for i in range(units.shape[0]):
        kind, me = kinds[i], units[i]
        if not rules.draws_places:
            me.x, me.y = kind.start_x, kind.start_y
        if rules.jitter > 0.0:
            for _ in range(START_DRAWS):
                x = np.float64(np.float32(kind.start_x + rules.jitter * (2.0 * unit(streams, row) - 1.0)))
                y = np.float64(np.float32(kind.start_y + rules.jitter * (2.0 * unit(streams, row) - 1.0)))
                if is_free_start(rules, units, i, x, y):
                    me.x, me.y = x, y
                    break
        me.vx, me.vy, me.wish_x, me.wish_y, me.next_vx, me.next_vy = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        me.v_single, me.wish_single, me.next_single = 1, 0, 0  # who never moved counts as single, who stands does not
        me.hp, me.shield, me.energy = kind.max_hp, kind.max_shield, kind.start_energy
        me.cooldown, me.shield_wait, me.heal_left = 0.0, 0.0, 0.0
        me.target, me.previous_target, me.order_target, me.firing, me.shot = NOBODY, NOBODY, NOBODY, NOBODY, NOBODY
        me.order = STOP if kind.ally else ATTACK_MOVE
    for a in range(last_actions.shape[0]):
        last_actions[a] = -1


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def give_orders(rules, units, actions, last_actions):
    """Turn the agents' actions into orders for the whole step; returns how many were illegal (carried out as stop)."""
    illegal = 0
    for a in range(actions.shape[0]):
        i, action = rules.allies[a], actions[a]
        me = units[i]
        if not is_legal(rules, units, i, action):
            illegal += 1
            action = STOP if me.hp > 0.0 else NO_OP
        last_actions[a] = action
        me.order, me.order_target = min(action, FIRST_TARGET), NOBODY
        if action >= FIRST_TARGET:
            me.order_target = targets_of(rules, i)[action - FIRST_TARGET]
        elif action >= NORTH:
            dx, dy = MOVES[action - NORTH]
            me.goal_x, me.goal_y = me.x + dx * MOVE_AHEAD, me.y + dy * MOVE_AHEAD
    return illegal


@njit(cache=True, nogil=True, error_model="numpy")
def any_alive(units, side):
    for i in side:
        if units[i].hp > 0.0:
            return True
    return False


class Battles(NamedTuple):
    """The arrays of a batch of B battles; the env hands them out as they are."""

    units: np.ndarray  # (B, U) UNIT
    kinds: np.ndarray  # (B, U) KIND where types are drawn, or (0, U)
    damage: np.ndarray  # (B, U, U) where types are drawn, or (0, U, U)
    streams: np.ndarray  # (B,) uint64 random streams
    last_actions: np.ndarray  # (B, N) int64, -1 before the first step
    t: np.ndarray  # (B,) int32
    returns: np.ndarray  # (B,) float64, of the running episode
    obs: np.ndarray  # (B, N, obs) float32
    state: np.ndarray  # (B, S) float32
    legal: np.ndarray  # (B, N, A) bool
    alive: np.ndarray  # (B, N) bool
    reward: np.ndarray  # (B, N) float32
    terminated: np.ndarray  # (B, N) bool
    truncated: np.ndarray  # (B, N) bool
    done: np.ndarray  # (B,) bool
    won: np.ndarray  # (B,) bool
    illegal: np.ndarray  # (B,) int32
    final_obs: np.ndarray  # (B, N, obs) float32
    final_state: np.ndarray  # (B, S) float32
    final_returns: np.ndarray  # (B, N) float64
    final_lengths: np.ndarray  # (B,) int64
    ticks: np.ndarray  # (B, 8, U, columns of RECORDED) float64, or (0, ...) when nobody records


def make_battles(rules: Rules, num_envs: int, record: bool) -> Battles:
    agents, shape, units = len(rules.allies), (num_envs, len(rules.allies)), len(rules.kinds)
    drawn = num_envs if len(rules.table) else 0
    return Battles(
        units=np.zeros((num_envs, units), UNIT),
        kinds=np.zeros((drawn, units), KIND),
        damage=np.zeros((drawn, units, units)),
        streams=np.zeros(num_envs, np.uint64),
        last_actions=np.full(shape, -1, np.int64),
        t=np.zeros(num_envs, np.int32),
        returns=np.zeros(num_envs, np.float64),
        obs=np.zeros((*shape, obs_size(rules)), np.float32),
        state=np.zeros((num_envs, state_size(rules)), np.float32),
        legal=np.zeros((num_envs, agents, rules.num_actions), np.bool_),
        alive=np.zeros(shape, np.bool_),
        reward=np.zeros(shape, np.float32),
        terminated=np.zeros(shape, np.bool_),
        truncated=np.zeros(shape, np.bool_),
        done=np.zeros(num_envs, np.bool_),
        won=np.zeros(num_envs, np.bool_),
        illegal=np.zeros(num_envs, np.int32),
        final_obs=np.zeros((*shape, obs_size(rules)), np.float32),
        final_state=np.zeros((num_envs, state_size(rules)), np.float32),
        final_returns=np.zeros(shape, np.float64),
        final_lengths=np.zeros(num_envs, np.int64),
        ticks=np.zeros((num_envs if record else 0, TICKS_PER_STEP, len(rules.kinds), len(RECORDED)), np.float64),
    )


@njit(cache=True, nogil=True, error_model="numpy")
def look_rows(rules, battles, first, last):
    """Bring observation, state, legal actions and alive flags of rows first..last-1 up to date."""
    for b in range(first, last):
        units, mine = battles.units[b], rules_of(rules, battles, b)
        find_legal(mine, units, battles.legal[b])
        observe(mine, units, battles.legal[b], battles.obs[b])
        write_state(mine, units, battles.last_actions[b], battles.state, b)
        for a in range(rules.allies.shape[0]):
            battles.alive[b, a] = units[rules.allies[a]].hp > 0.0


@njit(cache=True, nogil=True, error_model="numpy")
def reset_rows(rules, battles, first, last):
    """Start rows first..last-1 anew."""
    for b in range(first, last):
        start_battle(rules, battles, b)
        battles.t[b], battles.returns[b], battles.done[b] = 0, 0.0, False
    look_rows(rules, battles, first, last)


@njit(cache=True, nogil=True, error_model="numpy")
def record_tick(units, out):
    """One row of RECORDED per unit; the dead lie where they fell, with hp 0."""
    for i in range(units.shape[0]):
        me = units[i]
        out[i, 0], out[i, 1], out[i, 2], out[i, 3] = me.x, me.y, me.hp, me.shield
        out[i, 4], out[i, 5], out[i, 6], out[i, 7] = me.cooldown, me.energy, me.target, me.shot


@njit(cache=True, nogil=True, error_model="numpy")
def keep_final(battles, b):
    """Keep how the episode of row b ended, before a new one begins."""
    battles.final_lengths[b] = battles.t[b]
    for k in range(battles.state.shape[1]):
        battles.final_state[b, k] = battles.state[b, k]
    for a in range(battles.obs.shape[1]):
        battles.final_returns[b, a] = battles.returns[b]
        for k in range(battles.obs.shape[2]):
            battles.final_obs[b, a, k] = battles.obs[b, a, k]


@njit(cache=True, nogil=True, error_model="numpy")
def step_rows(rules, battles, actions, first, last):
    """One env step of rows first..last-1, with automatic reset of battles that are over."""
    num_units, num_lines = rules.kinds.shape[0], rules.kinds.shape[0] + 4 * rules.walls.shape[0]
    living, turns = np.empty(num_units, np.int64), np.empty(num_units, np.int64)
    lines, projected = np.empty((num_lines, 5)), np.empty((num_lines, 5))
    places = np.empty((num_units, 2))
    for b in range(first, last):
        units, mine = battles.units[b], rules_of(rules, battles, b)
        battles.illegal[b] = give_orders(mine, units, actions[b], battles.last_actions[b])
        points = 0.0
        for k in range(TICKS_PER_STEP):
            points += tick(mine, units, living, turns, lines, projected, places, battles.streams, b)
            if battles.ticks.shape[0] > 0:
                record_tick(units, battles.ticks[b, k])
        won = not any_alive(units, rules.enemies)
        decided = won or not any_alive(units, rules.allies)
        battles.t[b] += 1
        out_of_time = battles.t[b] >= rules.limit and not decided
        reward = (points + WIN_BONUS * won) * mine.reward_scale
        battles.returns[b] += reward
        battles.won[b], battles.done[b] = won, decided or out_of_time
        for a in range(actions.shape[1]):
            battles.reward[b, a], battles.terminated[b, a], battles.truncated[b, a] = reward, decided, out_of_time
        look_rows(rules, battles, b, b + 1)
        if battles.done[b]:
            keep_final(battles, b)
        if battles.done[b] and rules.auto_reset:
            start_battle(rules, battles, b)
            battles.t[b], battles.returns[b] = 0, 0.0
            look_rows(rules, battles, b, b + 1)
