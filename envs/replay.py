"""What happened and what was thought, step by step: the recorder behind replay pages, films and `python -m envs.play`.

    replay = Replay(env, labels, seed=7)
    for view in play_grid(env, seats, labels, episodes=3, replay=replay):    # every board, as people look at it
        ...
    replay.write("hunt.html")                                               # or "hunt.json", the figures alone

Players tell what they think by `explain` (envs/roles.py). The page is replay.html with the figures put in; what they
are is told in docs/replay.md.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import envs
from envs import system
from envs.checkpoints import read_json
from envs.errors import ConfigError
from envs.grid import GONE, ITEM, PLAYERS, GridEnv
from envs.players import FIX, RANDOM, SEEKER
from envs.players import names as rule_names
from envs.pool import mixed_team
from envs.render import View, letters
from envs.roles import ALGORITHMS, Seats, find_checkpoint, parse_roles
from envs.trees import AIMLESS, BYSTANDER, HABIT, KEEN

VERSION = 1  # of the format
MOST_EPISODES = 100  # of one page
PLAIN = 1_500_000  # bytes of figures that stand in a page as they are; more are compressed
OF_ACTIONS = ("policy", "prior", "visits", "q_values")  # (A,) of what is thought
NEVER_SHOWN = ("goal_cell", "goal_code", "predicted", "belief", "imagined_action", "imagined_state",
               "imagined_reward", "imagined_over", "subgoal_state", "subgoal_obs", "attention")  # fmt: skip


# playing


def play_grid(
    env: GridEnv, seats: Seats, labels: list[str], episodes: int, replay: Replay | None = None
) -> Iterator[View]:
    """Every board of the first `episodes` episodes of game 0, one after the other."""
    game, nothing = env.game, np.zeros(env.spec.num_players)
    for _ in range(episodes):
        returns, took = nothing.copy(), np.zeros((len(nothing), len(game.kinds)), np.int64)
        if replay:
            replay.begin(state=env.states[0])
        yield View.of(game, env.states[0], returns, nothing, nothing, took=took, labels=labels)
        over = False
        while not over:
            actions = seats.act()
            before, legal = env.states[:1].copy(), env.legal[0].copy()
            minds = {seat: policy for seat, policy in seats.policies.items() if replay and env.alive[0, seat]}
            thoughts = {seat: explained(policy) for seat, policy in minds.items()}
            out = game.simulate(before, actions[:1])  # the env itself shows the next episode once this one is over
            info = env.step(actions)[-1]
            seats.watch(actions, info)
            over, taken = bool(info["done"][0]), out.taken[0]
            returns += out.reward[0]
            took += taken[:, None] == np.arange(1, 1 + len(game.kinds))
            view = View.of(game, out.states[0], returns, taken, out.reward[0], before[0], took, labels)
            if replay:
                replay.roles(true_roles(game, seats))
                replay.step(actions[0], legal, out.reward[0], thoughts, taken=taken, states=(before[0], out.states[0]))
                if over:
                    replay.end(view.ending)
            yield view


def play_battle(battle: Any, team: Any, episodes: int, replay: Replay | None = None, ticks: int = 2) -> Iterator[Any]:
    """Every moment of `episodes` battles, one picture for so many ticks; the last one of each has a caption."""
    env = battle.env
    for episode in range(episodes):
        if episode:
            battle.reset()
        moments = battle.moments(ticks)
        if replay:
            replay.begin(units=units_now(env))
        yield from moments
        while battle.agents:
            actions, legal = team.act(env), env.legal[0].copy()
            thoughts = explained(team) if replay else {}
            alive, place = env.alive[0].copy(), units_now(env)
            rewards = battle.step(dict(zip(battle.possible_agents, actions[0].tolist(), strict=True)))[1]
            team.watch(env, actions, env.info)
            if replay:
                each = {seat: {name: x[seat] for name, x in thoughts.items() if not np.isnan(x[seat]).all()}
                        for seat in np.flatnonzero(alive)}  # fmt: skip
                earned = np.full(len(alive), rewards[battle.possible_agents[0]])
                replay.step(actions[0], legal, earned, each if thoughts else {}, env=env, units=place)
                if not battle.agents:
                    replay.end(battle.outcome())
            yield from battle.moments(ticks)


def explained(policy: Any) -> dict[str, np.ndarray]:
    """What a policy tells of its last action in game 0, copied before it thinks on; nothing if it tells nothing."""
    told = policy.explain(0) if hasattr(policy, "explain") else {}
    return {name: np.array(x) for name, x in told.items()}


def true_roles(game: Any, seats: Seats) -> list[str]:
    """What the rule-based players are in this episode: their names, and for who draws one (`mix`), what it drew."""
    names = {RANDOM: "random", FIX: "fix"} | {SEEKER + k: name for k, name in enumerate(game.seekers)}
    drawn = [names.get(int(code), "") for code in seats.rules.drawn[0]]
    return [now or role or "" for now, role in zip(drawn, seats.rules.roles, strict=True)]


def label_of(role: str, env: Any) -> str:
    """A role in few words: the name of a rule-based player; of a checkpoint its algorithm and run folder."""
    known = rule_names(env.game) if isinstance(env, GridEnv) else ()
    path, _, learner = role.partition("@")
    if role in known or not Path(path).is_dir():
        return role
    folder = find_checkpoint(path)
    script = Path(read_json(folder / "spec.json", script=str)["script"]).stem
    folder = folder.parent.parent if folder.parent.name == "checkpoints" else folder
    return f"{ALGORITHMS.get(script, script)} {folder.resolve().name}{'@' * bool(learner)}{learner}"


def record_grid(
    env_id: str, roles: list[str], episodes: int, seed: int, greedy: bool, settings: dict, seats=None, world=None
) -> Replay:  # fmt: skip
    """A replay of grid games played in a row; `seats`: a function env -> players, instead of the roles' own."""
    env = envs.make(env_id, num_envs=1, seed=seed, **settings)
    labels = [label_of(role, env) for role in roles]
    replay = Replay(env, labels, seed, greedy, world(env) if world else None)
    players = seats(env) if seats else Seats(env, roles, None, seed, greedy)
    for _ in play_grid(env, players, labels, episodes, replay):
        pass
    return replay


def record_battle(env_id: str, role: str, episodes: int, seed: int, greedy: bool, settings: dict) -> Replay:
    battle = envs.parallel_env(env_id, **settings)
    battle.reset(seed=seed)
    team = mixed_team(role.split(","), battle.env, seed, greedy)
    replay = Replay(battle.env, [label_of(role, battle.env)] * battle.env.spec.num_players, seed, greedy)
    for _ in play_battle(battle, team, episodes, replay):
        pass
    battle.close()
    return replay


def record(env_id: str, roles: str, episodes: int, seed: int, greedy: bool, settings: dict, **how: Any) -> Replay:
    """A replay of any game; `how` is for grid games."""
    if env_id.startswith(envs.BATTLES):
        if how.get("world"):
            raise ConfigError(f"--world-model is for grid games, not for {env_id}")
        return record_battle(env_id, roles, episodes, seed, greedy, settings)
    names = parse_roles(roles, envs.game(env_id, **settings).num_players, "random")
    return record_grid(env_id, names, episodes, seed, greedy, settings, **how)


# recording


class Replay:
    """Figures of some episodes, ready for JSON. `world(before, actions)`, if given, foretells every step."""

    def __init__(self, env: Any, labels: list[str], seed: int = 0, greedy: bool = False, world: Any = None):
        self.env, self.world, spec = env, world, env.spec
        players = [{"name": name.replace("_", " "), "role": role}
                   for name, role in zip(spec.player_names, labels, strict=True)]  # fmt: skip
        config = {name: value for name, value in spec.config.items() if name != "strict"}
        self.data: dict[str, Any] = {
            "format": "hopplus-lab replay", "version": VERSION, "env_id": spec.env_id, "seed": seed, "greedy": greedy,
            "settings": config, "horizon": spec.horizon, "actions": list(spec.action_names), "players": players,
        }  # fmt: skip
        self.data |= about_grid(env.game) if isinstance(env, GridEnv) else about_battle(env)
        self.data["episodes"] = []

    def begin(self, state: np.ndarray | None = None, units: list | None = None) -> None:
        """A new episode, from its first board or battlefield."""
        start = {"units": units} if state is None else self.board(state)
        self.episode: dict[str, Any] = {"ending": "", "roles": [], "goals": {}, "frames": [start], "steps": []}
        self.data["episodes"].append(self.episode)

    def roles(self, roles: list[str]) -> None:
        """What is known of who plays what in this episode; what they seek first, as a kind of item, too."""
        seekers = self.env.game.seekers
        self.episode["roles"] = roles
        self.episode["seeks"] = [int(seekers[role][0]) if role in seekers else None for role in roles]

    def step(self, actions, legal, rewards, thoughts, taken=None, states=None, env=None, units=None) -> None:
        """One step: actions (N,), legal (N, A), rewards (N,), {seat: what was explained} before it; then of a grid game
        what was taken (N,) and the states before and after, of a battle its env and the units before."""
        allowed = [np.flatnonzero(row).tolist() for row in legal]
        step: dict[str, Any] = {"actions": plain(actions), "legal": allowed, "rewards": plain(rewards)}
        step["thoughts"] = {
            str(seat): self.thought(told, int(seat), allowed, states, units) for seat, told in thoughts.items() if told
        }
        if states is not None:
            step["taken"] = plain(taken)
            self.episode["frames"].append(self.board(states[1], states[0]))
            if self.world:
                step["world"] = self.world(states[0], actions)
        else:
            step |= shots_of(env)
            self.episode["frames"].append({"units": units_now(env)})
        self.episode["steps"].append(step)

    def end(self, ending: str) -> None:
        self.episode["ending"] = ending

    def board(self, state: np.ndarray, before: np.ndarray | None = None) -> dict[str, Any]:
        """Where everybody is, and what is on the cells, if that changed."""
        seats, found = self.env.spec.num_players, {}
        if before is None or (state[PLAYERS + seats :] != before[PLAYERS + seats :]).any():
            found = {"board": plain(state[PLAYERS + seats :])}
        return {"cells": plain(state[PLAYERS : PLAYERS + seats])} | found

    def thought(self, told: dict, seat: int, legal: list[list[int]], states, units) -> dict[str, Any]:
        """What a seat explained (see envs/roles.py), rounded; figures of actions are those of the legal ones."""
        found: dict[str, Any] = {name: plain(told[name][legal[seat]]) for name in OF_ACTIONS if name in told}
        here = np.ones(len(legal), bool) if states is None else states[0][PLAYERS : PLAYERS + len(legal)] != GONE
        others = [j for j in range(len(legal)) if j != seat and here[j]]
        if "belief" in told:
            goals = [self.goal(*about) for about in zip(told["goal_cell"], told["goal_code"], strict=True)]
            self.episode["goals"][str(seat)] = goals
            found["belief"] = [plain(row) if j in others else None for j, row in enumerate(told["belief"])]
        if "predicted" in told:
            rows = enumerate(told["predicted"])
            found["predicted"] = [plain(row[legal[j]]) if j in others else None for j, row in rows]
        if "imagined_state" in told:
            ahead = zip(*(told[f"imagined_{name}"] for name in ("action", "state", "reward", "over")), strict=True)
            found["imagined"] = [
                {"action": int(action), **self.board(state, states[0]), "reward": plain(reward), "over": bool(over)}
                for action, state, reward, over in ahead
            ]
        if "attention" in told:
            found["attention"] = plain(told["attention"])
        if "subgoal_state" in told:
            found["subgoal"] = units_of_state(self.env, told["subgoal_state"])
        elif "subgoal_obs" in told:
            found["subgoal"] = units_of_obs(self.env, told["subgoal_obs"], seat, units)
        more = {name: told[name] for name in told if name not in (*OF_ACTIONS, *NEVER_SHOWN)}
        return found | {name: plain(x) for name, x in more.items() if np.ndim(x) == 0}

    def goal(self, cell: int, code: int) -> dict[str, Any]:
        if code >= ITEM:
            return {"kind": int(code - ITEM)} | ({"cell": int(cell)} if cell >= 0 else {})
        names = {KEEN: "keen", BYSTANDER: "bystander", HABIT: "habit", AIMLESS: "aimless"}
        return {"name": names.get(int(code), "unknown")}

    def text(self) -> str:
        return json.dumps(self.data, separators=(",", ":"), allow_nan=False)

    def page(self) -> str:
        """The page with everything in it. Figures of many units are compressed, and rounded if that is not enough."""
        text = self.text().replace("</", "<\\/")
        if len(text) > PLAIN:
            packed = pack(text)
            text = packed if len(packed) <= PLAIN else pack(re.sub(r"(\.\d\d)\d", r"\1", text))
        return Path(__file__).with_name("replay.html").read_text(encoding="utf-8").replace("__REPLAY__", text)

    def write(self, path: str | Path) -> None:
        """A page, or with an ending .json its figures alone; whole or not at all."""
        path = Path(path)
        draft = path.with_name(f".{path.name}.tmp")
        system.write_file(draft, (self.text() + "\n" if path.suffix == ".json" else self.page()).encode())
        system.move(draft, path)

    def returns(self) -> np.ndarray:
        """(E, N)"""
        return np.array([np.sum([step["rewards"] for step in part["steps"]], 0) for part in self.data["episodes"]])


def pack(text: str) -> str:
    """As a JSON string: gzip in base64."""
    return json.dumps(base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode())


def plain(x: Any) -> Any:
    """Arrays as numbers and lists for JSON, to three digits after the point; what is no number becomes null."""
    if np.ndim(x):
        return [plain(part) for part in x]
    number = round(float(x), 3)
    if not math.isfinite(number):
        return None
    return int(number) if number.is_integer() else number


def about_grid(game: Any) -> dict[str, Any]:
    size = {"height": game.config.height, "width": game.config.width}
    return {"kind": "grid", **size, "items": list(game.kinds), "letters": letters(game.kinds)}


# battles: units are listed as agents first, then enemies


def about_battle(env: Any) -> dict[str, Any]:
    layout = env.layout
    about = {"kind": "battle", "height": layout.height, "width": layout.width}
    names = [*env.spec.player_names, *(f"enemy {k}" for k in range(layout.num_enemies))]
    units = [{"name": name.replace("_", " "), "enemy": k >= layout.num_allies, "max_hp": plain(layout.max_hp[k]),
              "max_shield": plain(layout.max_shield[k])} for k, name in enumerate(names)]  # fmt: skip
    for unit, heals in zip(units, layout.healer, strict=False):
        unit["heals"] = bool(heals)
    if hasattr(env, "rules"):  # our own simulator knows more
        from envs.battles.env import numbered
        from envs.battles.render import letter_of

        kinds, order, names = env.kinds(), unit_order(env), env.unit_names()
        types = [names[i] for i in order]
        full = [*env.spec.player_names, *numbered(types[layout.num_allies :])]
        for unit, i, kind, name in zip(units, order, types, full, strict=True):
            unit |= {"name": name.replace("_", " "), "type": kind, "letter": letter_of(kind)}
            unit["radius"] = plain(max(kinds["radius"][i], 0.3))
        about["ground"] = ["".join(".#"[int(not cell)] for cell in row) for row in env.battle.walkable]
    return about | {"units": units}


def unit_order(env: Any) -> np.ndarray:
    return np.concatenate([env.rules.allies, env.rules.enemies])


def units_now(env: Any) -> list:
    """[x, y, hp, shield] of every unit."""
    if not hasattr(env, "rules"):
        return units_of_state(env, env.state[0])
    now = env.battles.units[0][unit_order(env)]
    return plain(np.stack([now[name] for name in ("x", "y", "hp", "shield")], 1).round(2))


def shots_of(env: Any) -> dict[str, Any]:
    """Who fired at whom in the last step, and whom everybody aims at after it, as numbers of units."""
    if not hasattr(env, "rules"):
        return {}
    from envs.battles.core import NOBODY
    from envs.battles.render import SHOT

    order, ticks = unit_order(env), env.battles.ticks[0]
    place = np.append(np.argsort(order), NOBODY)  # NOBODY is the last entry, too
    fired = {(int(place[i]), int(place[int(tick[i, SHOT])])) for tick in ticks for i in order if tick[i, SHOT] >= 0}
    targets = place[env.battles.units[0]["target"][order]]
    return {"shots": [list(pair) for pair in sorted(fired)], "targets": plain(targets)}


def units_of_state(env: Any, state: np.ndarray) -> list:
    """[x, y, hp, shield] of every unit, as a state vector (of the env, or of a model) has it."""
    from envs.battles.teams import read_unit

    layout = env.layout
    found = [read_unit(layout, np.asarray(state, np.float64), k) for k in range(len(layout.max_hp))]
    return plain([(x + layout.width / 2, y + layout.height / 2, hp, shield) for x, y, hp, shield in found])


def units_of_obs(env: Any, obs: np.ndarray, seat: int, units: list) -> list:
    """The same of an observation of one agent, seen from where it stands; units that it does not show are null."""
    from envs.battles.core import SIGHT

    layout, (x, y) = env.layout, units[seat][:2]
    num_types = layout.ally_size - 4 - layout.ally_shields
    others = [k for k in range(layout.num_allies) if k != seat]
    found: list[Any] = [None] * len(layout.max_hp)
    base = 4
    for k in [*range(layout.num_allies, len(found)), *others]:
        shields = layout.ally_shields if k < layout.num_allies else layout.enemy_shields
        if obs[base + 4] > 0.05:
            shield = obs[base + 5] * layout.max_shield[k] if shields else 0.0
            place = (x + SIGHT * obs[base + 2], y + SIGHT * obs[base + 3])
            found[k] = plain([*place, obs[base + 4] * layout.max_hp[k], shield])
        base += 5 + shields + num_types
    return found
