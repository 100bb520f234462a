"""The rules of the grid games in plain Python: one game at a time, no tricks, written to be read beside the rules.

`StagHunt` and `Snowdrift` step a `State` and say what happened (`Outcome`). The compiled core has to agree with
them step for step (test_rules.py); nothing here imports it. `to_row` and `from_row` convert a `State` to the
core's row of integers (t, deadline, the players' cells, the board).
"""

import random
from collections import deque
from dataclasses import dataclass, field, fields

UP, DOWN, LEFT, RIGHT, STAY = range(5)
STAG, HARE = 5, 6
CLEAR = 5
MOVES = {UP: (-1, 0), DOWN: (1, 0), LEFT: (0, -1), RIGHT: (0, 1)}


@dataclass
class State:
    """One board: where everything is. Cells are (row, column)."""

    t: int
    deadline: int
    """the step at which time ends the episode"""
    players: list
    """cell of each player, None when it has left the board"""
    blocks: set
    items: dict
    """what lies on a cell: cell -> "stag", "hare" or "drift" """

    def copy(self):
        return State(self.t, self.deadline, list(self.players), set(self.blocks), dict(self.items))


@dataclass
class Outcome:
    """What one step did to each player."""

    state: State
    reward: list
    terminated: list
    truncated: list
    taken: list
    """kind of the item each player took in this step, None for nothing"""
    illegal: int = 0
    """actions of players on the board that were not legal"""


@dataclass
class GridRules:
    """What both games share: the board, moving, the end by time, the reward options."""

    height: int = 4
    width: int = 4
    num_players: int = 4
    horizon: int = 35
    time_reward: float = 0.0
    prosocial: bool = False

    kinds = ()
    """kinds of items, in the order of their observation planes"""
    hunts = {}
    """action -> the kind of item it needs under the player's feet"""

    @property
    def num_actions(self):
        return 5 + len(self.hunts)

    def free(self, state, cell):
        row, column = cell
        return 0 <= row < self.height and 0 <= column < self.width and cell not in state.blocks

    def legal(self, state, player):
        """The set of legal actions of a player; a player that left may only stay."""
        cell = state.players[player]
        if cell is None:
            return {STAY}
        actions = {STAY}
        for action, (down, right) in MOVES.items():
            if self.free(state, (cell[0] + down, cell[1] + right)):
                actions.add(action)
        for action, kind in self.hunts.items():
            if state.items.get(cell) == kind:
                actions.add(action)
        return actions

    def over(self, state):
        return state.t >= state.deadline or not state.items or all(cell is None for cell in state.players)

    def ones(self, state, player):
        """The observation of a player as the set of (row, column, plane) that hold a 1: own plane first."""
        if state.players[player] is None:
            return set()
        found = set()
        for plane in range(self.num_players):
            cell = state.players[(player + plane) % self.num_players]
            if cell is not None:
                found.add((*cell, plane))
        for cell in state.blocks:
            found.add((*cell, self.num_players))
        for cell, kind in state.items.items():
            found.add((*cell, self.num_players + 1 + self.kinds.index(kind)))
        return found

    def step(self, state, actions):
        """All players act at once. A finished game does not change any more."""
        players = range(self.num_players)
        after = state.copy()
        outcome = Outcome(
            after,
            reward=[0.0] * self.num_players,
            terminated=[False] * self.num_players,
            truncated=[False] * self.num_players,
            taken=[None] * self.num_players,
        )
        if self.over(state):
            return outcome

        on_board = [player for player in players if state.players[player] is not None]
        hunters = {}  # (cell, kind) -> the players that hunt there in this step
        for player in on_board:
            action = actions[player]
            if action not in self.legal(state, player):
                outcome.illegal += 1
                action = STAY
            cell = state.players[player]
            if action in MOVES:
                down, right = MOVES[action]
                after.players[player] = (cell[0] + down, cell[1] + right)
            elif action in self.hunts:
                hunters.setdefault((cell, self.hunts[action]), []).append(player)
        for (cell, kind), group in hunters.items():
            self.hunt(outcome, cell, kind, group)

        for player in on_board:
            outcome.reward[player] += self.time_reward
        if self.prosocial:
            mean = sum(outcome.reward) / self.num_players
            for player in on_board:
                outcome.reward[player] = mean

        after.t = state.t + 1
        self.end_of_step(state, outcome)
        for player in on_board:
            if after.players[player] is None or not after.items:
                outcome.terminated[player] = True
            elif after.t >= after.deadline:
                outcome.truncated[player] = True
        return outcome

    def hunt(self, outcome, cell, kind, group):
        raise NotImplementedError

    def end_of_step(self, before, outcome):
        """Room for a rule that looks at the whole step."""


@dataclass
class StagHunt(GridRules):
    """Markov Stag Hunt: two share a stag, one alone may have a hare; who has hunted leaves."""

    num_stags: int = 1
    num_hares: int = 4
    stag_reward: float = 10.0
    hare_reward: float = 1.0
    hunters_needed: int = 2
    player_strength: tuple = (1, 1, 1, 1)
    final_time_after_first_hunt: int | None = None

    kinds = ("stag", "hare")
    hunts = {STAG: "stag", HARE: "hare"}

    def hunt(self, outcome, cell, kind, group):
        if kind == "stag":
            if len(group) < self.hunters_needed:
                return
            together = sum(self.player_strength[player] for player in group)
            share = {player: self.stag_reward * self.player_strength[player] / together for player in group}
        else:
            share = {player: self.hare_reward / len(group) for player in group}
        del outcome.state.items[cell]
        for player in group:
            outcome.reward[player] += share[player]
            outcome.taken[player] = kind
            outcome.state.players[player] = None

    def end_of_step(self, before, outcome):
        if self.final_time_after_first_hunt is None:
            return
        first_hunt = None not in before.players and None in outcome.state.players
        if first_hunt:
            outcome.state.deadline = min(self.horizon, outcome.state.t + self.final_time_after_first_hunt)


@dataclass
class Snowdrift(GridRules):
    """Markov Snowdrift: everybody enjoys a cleared drift, only those who cleared it pay."""

    horizon: int = 15
    num_drifts: int = 6
    drift_reward: float = 6.0
    clear_cost: float = 4.0

    kinds = ("drift",)
    hunts = {CLEAR: "drift"}

    def hunt(self, outcome, cell, kind, group):
        del outcome.state.items[cell]
        for player in range(self.num_players):
            outcome.reward[player] += self.drift_reward
        for player in group:
            outcome.reward[player] -= self.clear_cost / len(group)
            outcome.taken[player] = kind


# boards


def neighbours(cell):
    return [(cell[0] + down, cell[1] + right) for down, right in MOVES.values()]


def connected(free):
    """Whether a set of cells hangs together."""
    return bool(free) and len(distances(free, next(iter(free)))) == len(free)


def distances(free, start):
    """Steps from `start` to every cell that can be reached through the set `free`."""
    found = {start: 0}
    queue = deque([start])
    while queue:
        cell = queue.popleft()
        for following in neighbours(cell):
            if following in free and following not in found:
                found[following] = found[cell] + 1
                queue.append(following)
    return found


def best_actions(rules, state, player, kind):
    """All actions that begin a shortest path to a nearest item of `kind` (the hunt itself when standing on one)."""
    cell = state.players[player]
    free = {(r, c) for r in range(rules.height) for c in range(rules.width)} - state.blocks
    steps = distances(free, cell)
    there = {item: steps[item] for item, what in state.items.items() if what == kind and item in steps}
    nearest = min(there.values())
    if nearest == 0:
        return {action for action, what in rules.hunts.items() if what == kind}
    goals = [item for item, distance in there.items() if distance == nearest]
    best = set()
    for action, (down, right) in MOVES.items():
        following = (cell[0] + down, cell[1] + right)
        if following in free:
            onward = distances(free, following)
            if any(onward.get(goal) == nearest - 1 for goal in goals):
                best.add(action)
    return best


# random games


def random_stag_hunt(rng: random.Random):
    """Any Stag Hunt: odd boards, few or many players and prey, every option."""
    height, width = rng.choice([(1, 4), (2, 2), (2, 3), (3, 3), (4, 4), (4, 4), (3, 6), (5, 5), (6, 2), (8, 8)])
    num_players = rng.choice([1, 2, 3, 4, 4, 4, 5, 7])
    most = min(height * width, 9)
    num_stags = rng.randint(0, min(3, most))
    num_hares = rng.randint(0 if num_stags else 1, min(5, most - num_stags))
    strength = (1,) * num_players if rng.random() < 0.5 else tuple(rng.randint(1, 5) / 2 for _ in range(num_players))
    return StagHunt(
        height=height,
        width=width,
        num_players=num_players,
        horizon=rng.choice([1, 2, 5, 12, 35]),
        time_reward=rng.choice([0.0, 0.0, -0.125, 0.3]),
        prosocial=rng.random() < 0.3,
        num_stags=num_stags,
        num_hares=num_hares,
        stag_reward=rng.choice([10.0, 10.0, 7.5]),
        hare_reward=rng.choice([1.0, 1.0, 2.25]),
        hunters_needed=min(num_players, rng.choice([1, 2, 2, 2, 3])),
        player_strength=strength,
        final_time_after_first_hunt=rng.choice([None, None, None, 1, 5]),
    )


def random_snowdrift(rng: random.Random):
    """Any Snowdrift."""
    height, width = rng.choice([(1, 4), (2, 3), (3, 3), (4, 4), (6, 6), (5, 3), (8, 8)])
    return Snowdrift(
        height=height,
        width=width,
        num_players=rng.choice([1, 2, 3, 4, 4, 6]),
        horizon=rng.choice([1, 4, 15, 25]),
        time_reward=rng.choice([0.0, 0.0, -0.125, 0.3]),
        prosocial=rng.random() < 0.3,
        num_drifts=rng.randint(1, min(6, height * width)),
        drift_reward=rng.choice([6.0, 6.0, 2.5]),
        clear_cost=rng.choice([4.0, 4.0, 1.0]),
    )


def settings(rules):
    """The fields of a rule book as the overrides of a core game."""
    return {one.name: getattr(rules, one.name) for one in fields(rules)}


def random_state(rules, rng: random.Random, num_blocks=0, left=0.0, late=0.0):
    """A board in mid-game: random blocks that keep the free cells connected, random items, some steps played.

    `left`: the probability that a player has left (only where players can leave); `late`: that the game is old.
    """
    cells = [(r, c) for r in range(rules.height) for c in range(rules.width)]
    hunting = isinstance(rules, StagHunt)
    items = ["stag"] * rules.num_stags + ["hare"] * rules.num_hares if hunting else ["drift"] * rules.num_drifts
    blocks = set()
    for cell in rng.sample(cells, len(cells)):
        room = len(cells) - len(blocks) - 1 >= max(1, len(items))
        if len(blocks) < num_blocks and room and connected(set(cells) - blocks - {cell}):
            blocks.add(cell)
    free = [cell for cell in cells if cell not in blocks]
    board = dict(zip(rng.sample(free, len(items)), items, strict=True))
    players = [rng.choice(free) for _ in range(rules.num_players)]
    t = rng.randrange(rules.horizon) if rng.random() < late else 0
    deadline = rules.horizon
    if hunting and t > 0:
        players = [None if rng.random() < left else cell for cell in players]
        if rules.final_time_after_first_hunt is not None and None in players:
            first_hunt = rng.randint(1, t)
            deadline = min(rules.horizon, first_hunt + rules.final_time_after_first_hunt)
    return State(t, deadline, players, blocks, board)


def random_actions(rules, state, rng: random.Random):
    """Half of the actions are anything (legal or not); the others hunt where they can and move where they may."""
    actions = []
    for player in range(rules.num_players):
        legal = sorted(rules.legal(state, player))
        if rng.random() < 0.5:
            actions.append(rng.randrange(rules.num_actions))
        else:
            actions.append(legal[-1] if rng.random() < 0.7 else rng.choice(legal))
    return actions


# the core's format


def to_row(rules, state):
    """The core's integers: t, deadline, players' cells (-1 left), board (0 free, 1 block, 2 + k an item of kind k)."""
    row = [state.t, state.deadline]
    row += [-1 if cell is None else cell[0] * rules.width + cell[1] for cell in state.players]
    for r in range(rules.height):
        for c in range(rules.width):
            if (r, c) in state.blocks:
                row.append(1)
            elif (r, c) in state.items:
                row.append(2 + rules.kinds.index(state.items[r, c]))
            else:
                row.append(0)
    return row


def from_row(rules, row):
    row = [int(number) for number in row]
    players = [None if cell < 0 else divmod(cell, rules.width) for cell in row[2 : 2 + rules.num_players]]
    blocks, items = set(), {}
    for index, what in enumerate(row[2 + rules.num_players :]):
        cell = divmod(index, rules.width)
        if what == 1:
            blocks.add(cell)
        elif what >= 2:
            items[cell] = rules.kinds[what - 2]
    return State(row[0], row[1], players, blocks, items)


@dataclass
class Episode:
    """One game played from a start, for those who want to count what the reference plays per second."""

    rules: GridRules
    state: State
    returns: list = field(default_factory=list)

    def __post_init__(self):
        self.returns = [0.0] * self.rules.num_players

    def step(self, actions):
        outcome = self.rules.step(self.state, actions)
        self.state = outcome.state
        self.returns = [total + reward for total, reward in zip(self.returns, outcome.reward, strict=True)]
        seen = [self.rules.ones(self.state, player) for player in range(self.rules.num_players)]
        masks = [self.rules.legal(self.state, player) for player in range(self.rules.num_players)]
        return outcome, seen, masks
