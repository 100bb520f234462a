"""Rule-based players for the grid games, batched and compiled.

They see what any player sees (observation planes, legal actions, the step), and break ties at random from a stream of
their own for each env and seat. `random` and `fix` (never touches an item) know every game; each game names its
seekers, who walk the shortest way around blocks to the nearest item of the first kind in their list that is left
(`ns`, `nh`, `nd`); `mix` is one of the game's `mix` drawn anew for each episode. The players of HELD_OUT are for
evaluation, and for learners whose whole task they are: no offline data, default line-up or imagined game holds one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from envs.errors import ConfigError
from envs.grid import (
    BLOCK,
    DOWN,
    FIRST_INTERACTION,
    ITEM,
    LEFT,
    RIGHT,
    STAY,
    UP,
    GridGame,
    T,
    flat_planes,
)  # fmt: skip
from envs.rng import below, make_streams

NOBODY, MIX, RANDOM, FIX, SEEKER = range(5)  # codes of roles; SEEKER + k is the game's k-th seeker
HELD_OUT = ("shy", "late", "tft", "copycat", "flip", "picky", "lazy", "tired")  # of all games; each names its own
SHY, LATE, TFT, COPYCAT, FLIP, PICKY, LAZY, TIRED = range(100, 100 + len(HELD_OUT))
LEAST_WAIT, MOST_WAIT = 2, 8  # steps that `late` waits
FLIP_AFTER = 5  # episodes in which `flip` plays alike
NEAR = 2  # cells around `lazy` in which nobody may be when it clears
# a set of moves is a number with bit a set for move a: how many it has, and which is its k-th
NUM_STEPS = np.array([max(1, bin(steps).count("1")) for steps in range(16)])
NTH_STEP = np.full((16, 4), STAY)
for _steps in range(1, 16):
    _moves = [move for move in range(STAY) if _steps >> move & 1]
    NTH_STEP[_steps, : len(_moves)] = _moves
UNSEEN, FAR = -1, 1 << 20  # distances
NO_BITS, ONE, U58 = np.uint64(0), np.uint64(1), np.uint64(58)
DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)  # a bit times this has another number in its highest six bits for each bit
STREAM_SALT = 7  # keeps the players' random streams apart from those of an env with the same seed


@njit(cache=True, nogil=True, inline="always")
def choose(allowed, num, streams, stream):
    """A uniform choice among the first `num` actions that are allowed (STAY if none is)."""
    count = 0
    for action in range(num):
        count += allowed[action]
    if count == 0:
        return STAY
    pick = 0 if count == 1 else below(streams, stream, count)
    for action in range(num):
        if allowed[action]:
            if pick == 0:
                return action
            pick -= 1
    return STAY


@njit(cache=True, nogil=True, inline="always")
def any_but_stay(allowed):
    """Whether more than STAY is allowed."""
    some = False
    for action in range(STAY):
        some |= allowed[action]
    for action in range(FIRST_INTERACTION, allowed.shape[0]):
        some |= allowed[action]
    return some


@njit(cache=True, nogil=True, inline="always")
def read_planes(grid, words, viewer, bits, things, codes, cells):
    """What a player sees: the cells of all blocks and items (things) and their codes as in a state, and cells (N,)
    where each player on the board stands; returns how many things. See `plane_bits` for the order of reading.

    A player is noted among the things too, but not counted, so that the next one takes its place, and things are noted
    as one player too many: a branch would cost more.
    """
    num_players, count = grid.num_players, 0
    for group in range(bits.shape[0]):
        left = NO_BITS
        for k in range(min(8, words.shape[0] - 8 * group)):
            left |= np.uint64(words[8 * group + k]) << np.uint64(k)
        while left != NO_BITS:
            lowest = left & (~left + ONE)
            left ^= lowest
            bit = np.int64((lowest * DE_BRUIJN) >> U58)
            cell, plane = bits[group, bit, 0], bits[group, bit, 1]
            is_thing = plane >= num_players
            player = viewer + plane if viewer + plane < num_players else viewer + plane - num_players
            cells[num_players if is_thing else player] = cell
            things[count], codes[count] = cell, BLOCK + plane - num_players
            count += is_thing
    return count


@njit(cache=True, nogil=True, inline="always")
def steps_in_the_open(grid, things, codes, count, code, own):
    """The set of moves (bit a for move a) that begin a shortest way from cell `own` to an item `code`: no blocks.
    -1 if there is no such item."""
    row, column = grid.places[own, 0], grid.places[own, 1]
    nearest, steps = FAR, -1
    for k in range(count):
        if codes[k] != code:
            continue
        down, across = grid.places[things[k], 0] - row, grid.places[things[k], 1] - column
        away = abs(down) + abs(across)
        towards = (down < 0) << UP | (down > 0) << DOWN | (across < 0) << LEFT | (across > 0) << RIGHT
        steps = towards if away < nearest else steps | (towards if away == nearest else 0)
        nearest = min(nearest, away)
    return steps


@njit(cache=True, nogil=True)
def distances_from(grid, things, codes, count, sources, until=-1):
    """(H*W,) steps around blocks from the nearest cell that is marked in `sources` (H*W,); UNSEEN if there is none, or
    farther than the cell `until` (-1: all are found)."""
    num_cells = grid.height * grid.width
    distance = np.full(num_cells, UNSEEN, np.int64)
    queue = np.empty(num_cells, np.int64)
    for k in range(count):
        if codes[k] == BLOCK:
            distance[things[k]] = FAR
    tail = 0
    for cell in range(num_cells):
        if sources[cell]:
            distance[cell] = 0
            queue[tail] = cell
            tail += 1
    head = 0
    while head < tail and (until < 0 or distance[until] == UNSEEN):
        cell = queue[head]
        head += 1
        for action in range(STAY):
            other = grid.neighbours[cell, action]
            if distance[other] == UNSEEN:
                distance[other] = distance[cell] + 1
                queue[tail] = other
                tail += 1
    return distance


@njit(cache=True, nogil=True)
def distances_from_cell(grid, things, codes, count, cell):
    sources = np.zeros(grid.height * grid.width, np.bool_)
    sources[cell] = True
    return distances_from(grid, things, codes, count, sources)


@njit(cache=True, nogil=True)
def steps_down(grid, distance, own):
    """The set of moves (bit a for move a) that lead from cell `own` to a smaller distance."""
    steps = 0
    for action in range(STAY):
        steps |= (distance[grid.neighbours[own, action]] == distance[own] - 1) << action
    return steps


@njit(cache=True, nogil=True)
def steps_around_blocks(grid, things, codes, count, code, own):
    """The same as `steps_in_the_open`, walking around blocks."""
    sources = np.zeros(grid.height * grid.width, np.bool_)
    for k in range(count):
        sources[things[k]] |= codes[k] == code
    if not sources.any():
        return -1
    return steps_down(grid, distances_from(grid, things, codes, count, sources, own), own)


@njit(cache=True, nogil=True, inline="always")
def seek(grid, order, things, codes, count, blocked, own, legal, streams, stream):
    """One action of a seeker on cell `own`: order (K,) kinds to look for (-1: no further kind)."""
    for kind in order:
        if kind < 0:
            break
        if legal[FIRST_INTERACTION + kind]:
            return FIRST_INTERACTION + kind
        if blocked:
            steps = steps_around_blocks(grid, things, codes, count, ITEM + kind, own)
        else:
            steps = steps_in_the_open(grid, things, codes, count, ITEM + kind, own)
        if steps >= 0:
            return NTH_STEP[steps, below(streams, stream, NUM_STEPS[steps])]
    return STAY


class Memory(NamedTuple):
    """What players remember, all (B, N) int64."""

    drawn: np.ndarray  # the role that `mix` and `flip` play now
    episodes: np.ndarray  # that `flip` has begun in it
    wait: np.ndarray  # steps that `late` waits in this episode
    prey: np.ndarray  # the cell of the stag that `picky` is after, -1: none yet
    cells: np.ndarray  # where everybody was seen last, -1: nowhere
    took: np.ndarray  # 1 + kind of what each took last in this episode, 0 nothing
    took_before: np.ndarray  # in the episode before


def make_memory(num_envs: int, num_players: int) -> Memory:
    memory = Memory(*(np.zeros((num_envs, num_players), np.int64) for _ in Memory._fields))
    memory.prey[:], memory.cells[:] = -1, -1
    memory.took_before[:] = 1  # `tft` begins by trusting
    return memory


@njit(cache=True, nogil=True)
def is_stag(things, codes, count, cell):
    """Whether an item of the first kind is on a cell."""
    found = False
    for k in range(count):
        found |= things[k] == cell and codes[k] == ITEM
    return found


@njit(cache=True, nogil=True)
def mark_first_kind(order, things, codes, count, sources):
    """Mark all items of the first kind in `order` that is left."""
    found = False
    for kind in order:
        if kind >= 0 and not found:
            for k in range(count):
                if codes[k] == ITEM + kind:
                    sources[things[k]], found = True, True


@njit(cache=True, nogil=True)
def mark_followed(grid, things, codes, count, cells, player, sources):
    """Mark the stags that another player is nearer to, or stands on as `player` does; whether there is one."""
    found = False
    for k in range(count):
        if codes[k] != ITEM:
            continue
        distance = distances_from_cell(grid, things, codes, count, things[k])
        own = distance[cells[player]]
        for other in range(grid.num_players):
            if other != player and cells[other] >= 0:
                near = distance[cells[other]]
                if near < own or near == own == 0:
                    sources[things[k]], found = True, True
    return found


@njit(cache=True, nogil=True)
def mark_farthest(grid, things, codes, count, own, sources):
    """Mark the stags that are farthest from cell `own`; how many they are."""
    distance, most, found = distances_from_cell(grid, things, codes, count, own), -1, 0
    for k in range(count):
        if codes[k] == ITEM:
            most = max(most, distance[things[k]])
    for k in range(count):
        if codes[k] == ITEM and distance[things[k]] == most:
            sources[things[k]] = True
            found += 1
    return found


@njit(cache=True, nogil=True)
def mark_copied(grid, things, codes, count, cells, before, player, sources):
    """Mark what the nearest other player (of the first seat, if several are) seems to head for: of the items that its
    last step brought it nearer to (of all items, if none), the nearest. Alone on the board: of all items, the nearest.
    """
    distance, model, least = distances_from_cell(grid, things, codes, count, cells[player]), player, FAR
    for other in range(grid.num_players):
        if other != player and cells[other] >= 0 and distance[cells[other]] < least:
            model, least = other, distance[cells[other]]
    now = distances_from_cell(grid, things, codes, count, cells[model])
    last = before[model] if before[model] >= 0 and model != player else cells[model]
    then = distances_from_cell(grid, things, codes, count, last)
    approached, least = False, FAR
    for k in range(count):
        if codes[k] >= ITEM:
            nearer = now[things[k]] < then[things[k]]
            if nearer and not approached:
                approached, least = True, FAR
            if nearer == approached:
                least = min(least, now[things[k]])
    for k in range(count):
        here = things[k]
        sources[here] |= codes[k] >= ITEM and now[here] == least and (now[here] < then[here]) == approached


@njit(cache=True, nogil=True)
def is_alone(grid, cells, player):
    """Whether nobody else is within NEAR cells."""
    alone, own = True, grid.places[cells[player]]
    for other in range(grid.num_players):
        if other != player and cells[other] >= 0:
            place = grid.places[cells[other]]
            alone &= abs(place[0] - own[0]) + abs(place[1] - own[1]) > NEAR
    return alone


@njit(cache=True, nogil=True)
def options_of(grid, role, orders, memory, b, player, things, codes, count, cells, legal, t):
    """The actions of a player on the board (bit a for action a), each as likely as the others, by what it remembers;
    not for MIX, whose role is `drawn`."""
    own, seeks = cells[player], role >= SEEKER
    sources = np.zeros(grid.height * grid.width, np.bool_)
    order = orders[0]
    if role == FLIP:
        role = memory.drawn[b, player]
        seeks = role >= SEEKER
    if SEEKER <= role < SEEKER + len(orders):
        order = orders[role - SEEKER]
    elif role == TFT and memory.took_before[b, player] != 1:
        order = orders[1]
    if role == LATE and t < memory.wait[b, player]:
        return 1 << STAY
    if role == SHY:
        if not mark_followed(grid, things, codes, count, cells, player, sources):
            mark_first_kind(orders[1][:1], things, codes, count, sources)
    elif role == COPYCAT:
        mark_copied(grid, things, codes, count, cells, memory.cells[b], player, sources)
    elif role == PICKY and is_stag(things, codes, count, memory.prey[b, player]):
        sources[memory.prey[b, player]] = True
    elif role == LAZY:
        if legal[FIRST_INTERACTION] and is_alone(grid, cells, player):
            return 1 << FIRST_INTERACTION
        seeks = False
    elif role == TIRED and memory.took[b, player] > 0:
        seeks = False
    elif seeks and not (role == PICKY and mark_farthest(grid, things, codes, count, own, sources)):
        mark_first_kind(order, things, codes, count, sources)
    options = 0
    if not seeks:
        for action in range(legal.shape[0] if role == RANDOM else FIRST_INTERACTION):
            options |= legal[action] << action
    elif sources[own]:
        for action in range(FIRST_INTERACTION, legal.shape[0]):
            options |= legal[action] << action
    elif sources.any():
        options = steps_down(grid, distances_from(grid, things, codes, count, sources), own)
    return options if options else 1 << STAY


@njit(cache=True, nogil=True)
def remember(grid, role, memory, flips, b, player, things, codes, count, cells, t, streams, stream):
    """What a held-out player draws for the episode, before it acts."""
    if role == LATE and (t == 0 or memory.wait[b, player] == 0):
        memory.wait[b, player] = LEAST_WAIT + below(streams, stream, MOST_WAIT - LEAST_WAIT + 1)
    elif role == FLIP and (t == 0 or memory.drawn[b, player] == NOBODY):
        first, drawn = memory.drawn[b, player] == NOBODY, memory.drawn[b, player]
        if first or memory.episodes[b, player] == FLIP_AFTER:
            memory.episodes[b, player] = 0
            while memory.drawn[b, player] == drawn:  # another one
                memory.drawn[b, player] = flips[below(streams, stream, flips.shape[0])]
        memory.episodes[b, player] += 1
    elif role == PICKY and (t == 0 or not is_stag(things, codes, count, memory.prey[b, player])):
        farthest = np.zeros(grid.height * grid.width, np.bool_)
        found = mark_farthest(grid, things, codes, count, cells[player], farthest)
        memory.prey[b, player] = np.flatnonzero(farthest)[below(streams, stream, found)] if found else -1


@njit(cache=True, nogil=True)
def act_rows(grid, roles, mixed, flips, orders, memory, words, legal, t, streams, bits, things, codes, cells, actions):
    """Fill the columns of `actions` (B, N) whose role is rule-based.

    words (B, N, W) are the planes of `as_words`, legal (B, N, A), t (B,).
    """
    num_players, held_out = grid.num_players, roles.max() >= SHY
    chosen = np.zeros(legal.shape[2], np.bool_)
    for b in range(actions.shape[0]):
        looked, count, blocked = False, 0, False
        for player in range(num_players):
            role = roles[b, player]
            if role == NOBODY:
                continue
            stream = b * num_players + player
            if role == MIX:
                if t[b] == 0 or memory.drawn[b, player] == NOBODY:
                    memory.drawn[b, player] = mixed[below(streams, stream, mixed.shape[0])]
                role = memory.drawn[b, player]
            allowed = legal[b, player]
            if role == RANDOM:
                actions[b, player] = choose(allowed, allowed.shape[0], streams, stream)
            elif role == FIX:
                actions[b, player] = choose(allowed, FIRST_INTERACTION, streams, stream)
            elif not any_but_stay(allowed):
                actions[b, player] = STAY  # it left, or can do nothing else
            else:
                if not looked:  # everybody on the board sees the same things: read them once
                    if held_out:
                        cells[:] = -1
                    count = read_planes(grid, words[b, player], player, bits, things, codes, cells)
                    looked, blocked = True, False
                    for k in range(count):
                        blocked |= codes[k] == BLOCK
                if role >= SHY:
                    seen, now = (things, codes, count, cells), t[b]
                    remember(grid, role, memory, flips, b, player, *seen, now, streams, stream)
                    if now == 0:
                        memory.cells[b] = -1
                    options = options_of(grid, role, orders, memory, b, player, *seen, allowed, now)
                    for action in range(allowed.shape[0]):
                        chosen[action] = options >> action & 1
                    actions[b, player] = choose(chosen, chosen.shape[0], streams, stream)
                else:
                    order = orders[role - SEEKER]
                    actions[b, player] = seek(
                        grid, order, things, codes, count, blocked, cells[player], allowed, streams, stream
                    )
        if held_out and looked:
            memory.cells[b] = cells[:num_players]


@njit(cache=True, nogil=True)
def chances_rows(
    grid, roles, orders, memory, words, legal, t, env_row, player, bits, things, codes, cells, chances
):  # fmt: skip
    """chances (M, A): the actions of player[m] in a state, words (M, W), by what it remembers in game env_row[m]."""
    for m in range(chances.shape[0]):
        cells[:] = -1
        count = read_planes(grid, words[m], player[m], bits, things, codes, cells)
        b, role = env_row[m], roles[env_row[m], player[m]]
        if role == MIX:
            role = memory.drawn[b, player[m]]
        options = options_of(grid, role, orders, memory, b, player[m], things, codes, count, cells, legal[m], t[m])
        num = 0
        for action in range(chances.shape[1]):
            num += options >> action & 1
        for action in range(chances.shape[1]):
            chances[m, action] = (options >> action & 1) / num


def as_words(obs: np.ndarray) -> np.ndarray:
    """(B, N, H, W, C) planes, mostly empty -> a view (B, N, W) that can be read eight bytes at a time, if they fit."""
    planes = flat_planes(obs)
    return planes if planes.shape[2] % 8 else planes.view(np.uint64)


def plane_bits(num_cells: int, num_planes: int) -> np.ndarray:
    """(groups, 64, [cell, plane]): what the bits mean that `read_planes` meets.

    Bytes of planes are 0 or 1, so eight words fit into one, the k-th moved by k bits. The bit at 2^p of group g is the
    entry [g, (2^p * DE_BRUIJN) >> 58].
    """
    size = num_cells * num_planes
    word_bytes = 1 if size % 8 else 8
    bits = np.zeros((-(-size // (8 * word_bytes)), 64, 2), np.int64)
    place = np.arange(size)
    word, byte = np.divmod(place, word_bytes)
    power = ONE << (8 * byte + word % 8).astype(np.uint64)
    bits[word // 8, (power * DE_BRUIJN) >> U58] = np.stack(np.divmod(place, num_planes), axis=1)
    return bits


def names(game: GridGame) -> tuple[str, ...]:
    """The rule-based players that know this game, the held-out ones last."""
    return ("random", *game.seekers, "fix", "mix", *game.held_out)


def refuse_held_out(roles: Iterable[str]) -> None:
    """ConfigError if any of these roles, of play to learn from, is one that nobody may learn from."""
    for role in roles:
        if role in HELD_OUT:
            raise ConfigError(f"'{role}' is held out: it tests who never met it, so no recorded play may hold it")


class RulePlayers:
    """Rule-based players in some seats of a batched env.

    `roles` has one entry per seat: a name, or None for a seat that somebody else plays. Or it has such lists, one for
    each of several equal blocks of games.
    """

    def __init__(self, game: GridGame, roles: Sequence[Any], num_envs: int, seed: int):
        line_ups = roles if roles and isinstance(roles[0], list) else [roles]
        seekers = list(game.seekers)
        codes = {None: NOBODY, "mix": MIX, "random": RANDOM, "fix": FIX}
        codes |= {name: SEEKER + k for k, name in enumerate(seekers)}
        codes |= {name: SHY + HELD_OUT.index(name) for name in game.held_out}
        for line_up in line_ups:
            if len(line_up) != game.num_players:
                raise ConfigError(f"{game.env_id} has {game.num_players} players, but {len(line_up)} roles were given")
            for role in line_up:
                if role not in codes:
                    known = ", ".join(names(game))
                    raise ConfigError(f"unknown role '{role}'; the rule-based players of {game.env_id} are {known}")
        self.game, self.roles = game, tuple(line_ups[0])  # of the first game
        of_blocks = np.array([[codes[role] for role in line_up] for line_up in line_ups], np.int64)
        self.codes = of_blocks.repeat(num_envs // len(line_ups), axis=0)  # (B, N)
        self.mixed = np.array([codes[name] for name in game.mix], np.int64)
        self.flips = np.array([RANDOM, *(SEEKER + k for k in range(len(seekers)))], np.int64)  # what `flip` may be
        self.orders = np.full((len(seekers), len(game.kinds)), -1, np.int64)
        for k, name in enumerate(seekers):
            self.orders[k, : len(game.seekers[name])] = game.seekers[name]
        self.memory = make_memory(num_envs, game.num_players)
        self.drawn = self.memory.drawn  # what `mix` is in the running episode
        self.streams = make_streams(seed, num_envs * game.num_players, STREAM_SALT)
        num_cells = game.config.height * game.config.width
        sizes = (num_cells + 1, num_cells + 1, game.num_players + 1)  # things, codes, cells of the players
        self._scratch = (plane_bits(num_cells, game.obs_shape[2]), *(np.zeros(size, np.int64) for size in sizes))

    def act(self, obs: np.ndarray, legal: np.ndarray, t: np.ndarray, actions_out: np.ndarray | None = None):
        """obs (B, N, H, W, C), legal (B, N, A), t (B,) -> actions (B, N) int64; other seats' columns are left alone."""
        if legal.shape[0] != len(self.drawn):
            raise ValueError(f"these players were made for {len(self.drawn)} envs, not for {legal.shape[0]}")
        if actions_out is None:
            actions_out = np.full(legal.shape[:2], STAY, np.int64)
        bits, things, codes, cells = self._scratch
        act_rows(
            self.game.grid, self.codes, self.mixed, self.flips, self.orders, self.memory, as_words(obs), legal, t,
            self.streams, bits, things, codes, cells, actions_out,
        )  # fmt: skip
        return actions_out

    def watch(self, info: dict[str, np.ndarray]) -> None:
        """Learn what a step brought: info["taken"] (B, N) and info["done"] (B,) of the env."""
        taken, done, memory = info["taken"], info["done"], self.memory
        np.copyto(memory.took, taken, where=taken > 0)
        memory.took_before[done], memory.took[done] = memory.took[done], 0

    def forget(self, games: np.ndarray) -> None:
        """As if they met anew in some games (B,)."""
        for array, first in zip(self.memory, make_memory(1, self.game.num_players), strict=True):
            array[games] = first

    def probabilities(self, states: np.ndarray, env_row: np.ndarray, player: np.ndarray) -> np.ndarray:
        """(M, A) what player[m] (on the board) of game env_row[m] would do in states[m], remembering what it does now;
        after it acted in a step, so that what it draws for the episode is drawn. Two remember more on the way there:
        `copycat` the last steps of the others, `tired` what it has cleared."""
        chances = np.empty((len(states), self.game.num_actions))
        if not len(states):
            return chances
        each, (bits, things, codes, cells) = np.arange(len(states)), self._scratch
        words = as_words(self.game.observe(states, trusted=True))[each, player]
        legal, t = self.game.legal(states, trusted=True)[each, player], states[:, T]
        chances_rows(
            self.game.grid, self.codes, self.orders, self.memory, words, legal, t, env_row, player,
            bits, things, codes, cells, chances,
        )  # fmt: skip
        return chances

    def get_state(self) -> dict[str, np.ndarray]:
        held_out = (self.codes >= SHY).any()
        memory = self.memory._asdict() if held_out else {"drawn": self.drawn}
        return {name: array.copy() for name, array in memory.items()} | {"streams": self.streams.copy()}

    def set_state(self, saved: dict[str, np.ndarray]) -> None:
        for name in saved.keys() - {"streams"}:
            getattr(self.memory, name)[:] = saved[name]
        self.streams = np.array(saved["streams"], np.uint64)


def zoo_policy(name: str, game: Any, seed: int = 0) -> Callable[[dict[str, np.ndarray]], int]:
    """A rule-based player as a policy for the PettingZoo game: observation dict -> action.

    `game` is a GridGame, or anything with one as `.game` (the PettingZoo game, a batched env).
    """
    if name in ("tft", "tired"):
        raise ConfigError(f"'{name}' must be told what it took, which a PettingZoo policy is not")
    rules = game if isinstance(game, GridGame) else game.game
    seats = (name, *(None,) * (rules.num_players - 1))
    players = RulePlayers(rules, seats, 1, seed)
    obs = np.zeros((1, rules.num_players, *rules.obs_shape), np.uint8)
    legal = np.zeros((1, rules.num_players, rules.num_actions), np.bool_)
    t = np.zeros(1, np.int32)

    def policy(observation: dict[str, np.ndarray]) -> int:
        obs[0, 0], legal[0, 0], t[0] = observation["observation"], observation["action_mask"], observation["t"].item()
        return int(players.act(obs, legal, t)[0, 0])

    return policy
