"""Recorded play: rows of what players saw and did, transitions of whole boards, and how predictable the rules are.

- Play: one row per step of a player on the board, with its goal in hindsight: the state in which its hunt happened.
- Transitions: one row per step of a grid game, with what happened to all players.
- Ceilings: rule-based players break ties at random, so no predictor is always right; `ceilings` says what a perfect
  one reaches, from the exact action probabilities of the rules.

Files are .npz without pickles; they carry the game they were made for, and reading checks everything.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

import envs
from envs.errors import ConfigError
from envs.grid import BLOCK, FIRST_INTERACTION, ITEM, STAY, EnvSpec, GridEnv, GridGame
from envs.players import RANDOM, RulePlayers, refuse_held_out
from envs.roles import Seats

EPISODES = 128  # of play, recorded at a time
NUM_ENVS = 256  # of transitions, at most
BATTLE_TEAMS = ("nearest", "focus", "random")
IGNORED_SETTINGS = ("strict", "start_window", "start_window_prob")  # of a game: they change no rule

# the rows of one player in one episode follow each other in time
PLAY = {
    "obs": None,  # (M, *obs_shape) what the player saw
    "legal": None,  # (M, A) bool
    "action": np.int64,  # (M,)
    "t": np.int64,  # (M,)
    "episode": np.int64,  # (M,)
    "player": np.int64,  # (M,)
    "role": np.int64,  # (M,) rule that played (index into `role_names`), -1 unknown
    "hunt": np.int64,  # (M,) later hunt: 1 + kind, 0 none
    "goal_row": np.int64,  # (M,) row whose obs is the state the player was heading for, -1 none
    "repeat": np.bool_,  # (M,) same player, observation and action as in the row before: not trained or judged on
}
TRANSITIONS = {
    "states": np.int16,  # (M, L) as in envs/grid.py
    "actions": np.int64,  # (M, N), STAY of who left
    "next_states": np.int16,  # (M, L)
    "reward": np.float32,  # (M, N)
    "end": np.bool_,  # (M,) the episode ended with this step
    "episode": np.int64,  # (M,)
}


# files


def one_line(thing: Any) -> str:
    """An error, or a value of a file that may hold anything, as a short part of a sentence."""
    return " ".join(str(thing).split())[:200]


def game_part(spec: EnvSpec) -> dict[str, Any]:
    """The part of a spec that must be equal wherever data or a checkpoint is used."""
    config = {name: value for name, value in spec.config.items() if name not in IGNORED_SETTINGS}
    part = {
        "env_id": spec.env_id, "obs_shape": spec.obs_shape, "state_shape": spec.state_shape, "planes": spec.plane_names,
        "action_names": spec.action_names, "num_players": spec.num_players, "config": config,
    }  # fmt: skip
    return json.loads(json.dumps(part))


def check_game(what: str, found: dict[str, Any], spec: EnvSpec, obs_is_state: bool) -> None:
    """ConfigError naming both sides if `found` (of a checkpoint or data file: `what`) was made for something else."""
    wanted = game_part(spec)
    if found.get("env_id") != wanted["env_id"]:
        raise ConfigError(f"{what} on {one_line(found.get('env_id'))}, this run uses {wanted['env_id']}")
    if found.get("obs_is_state") is not obs_is_state:
        sides = [f"{name} ({one_line(found.get(name + '_shape')).strip('[]')})" for name in ("obs", "state")]
        raise ConfigError(f"{what} on {sides[not obs_is_state]}, this run uses {sides[obs_is_state]}")
    config = found.get("config")
    found_config: dict[str, Any] = config if isinstance(config, dict) else {}
    pairs = {name: (found.get(name), value) for name, value in wanted.items() if name != "config"}
    for name in [*wanted["config"], *found_config]:
        pairs[name] = (found_config.get(name), wanted["config"].get(name))
    for name, (theirs, ours) in pairs.items():
        if theirs != ours:
            raise ConfigError(f"{what} with {name} {one_line(theirs)}, this run uses {name} {ours}")


def save_data(path: Path, data: dict[str, Any]) -> None:
    """All columns and `meta` as an .npz without pickles, written under another name first."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.npz")
    columns = {name: column for name, column in data.items() if name != "meta"}
    narrow = {name: column.astype(np.int32) for name, column in columns.items() if column.dtype == np.int64}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(temporary, meta=np.array(json.dumps(data["meta"])), **columns | narrow)
        temporary.replace(path)
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise ConfigError(f"data file '{path}' cannot be written: {one_line(error)}") from None
    print(f"[DATA] saved {path}")


def read_data(path: str | Path, kind: str, columns: dict[str, Any], spec: EnvSpec, obs_is_state: bool = False):
    """The columns and `meta` of a data file; ConfigError in one sentence if it is of another kind or game."""
    try:
        with np.load(path, allow_pickle=False) as file:
            meta = json.loads(str(file["meta"]))
            if not isinstance(meta, dict) or meta.get("kind") != kind:
                raise ConfigError(f"data file '{path}' does not hold {kind}, which this script learns from")
            data = {name: as_column(file[name], dtype) for name, dtype in columns.items()}
    except FileNotFoundError:
        raise ConfigError(f"data file '{path}' does not exist") from None
    except ConfigError:
        raise
    except Exception as error:  # damage can break the reader anywhere: in zip, zlib, struct, json or numpy
        raise ConfigError(f"data file '{path}' cannot be read: {one_line(error) or type(error).__name__}") from None
    check_game(f"data file '{path}' was recorded", meta, spec, obs_is_state)
    lengths = {column.shape[:1] for column in data.values()}
    if len(lengths) > 1 or lengths <= {(), (0,)}:
        raise ConfigError(f"data file '{path}' is damaged: its columns do not fit together")
    return data | {"meta": meta}


def as_column(column: np.ndarray, dtype: Any) -> np.ndarray:
    """A column in the type it is worked with; ValueError if that would change what it says."""
    if dtype is None:
        return column
    kinds = {"i": "iu", "b": "b", "f": "f"}[np.dtype(dtype).kind]
    if column.dtype.kind not in kinds or (kinds == "iu" and not (column.astype(dtype) == column).all()):
        raise ValueError(f"a column of {column.dtype} is not one of {np.dtype(dtype)}")
    return column.astype(dtype)


# play


def role_names(game: GridGame | None) -> list[str]:
    """What the column `role` counts; nobody knows what rule an agent of a battle follows."""
    return ["random", "fix", *game.seekers] if game else []


def parse_lineups(texts: tuple[str, ...], spec: EnvSpec, game: GridGame | None) -> list[tuple[str, ...]]:
    if not texts:
        texts = BATTLE_TEAMS
        if game:
            some = [*game.seekers, "mix", "random"] * spec.num_players
            texts = ("mix", ",".join(some[: spec.num_players]))
    lineups = []
    for text in texts:
        roles = tuple(text.split(","))
        if len(roles) not in (1, spec.num_players):
            raise ConfigError(f"line-up '{text}' has {len(roles)} roles; {spec.env_id} needs 1 or {spec.num_players}")
        refuse_held_out(roles)
        lineups.append(roles * spec.num_players if len(roles) == 1 else roles)
    return lineups


def play_episodes(env, game: GridGame | None, lineup: tuple[str, ...], seed: int, obs_is_state=False, goal_steps=0):
    """One full episode in each row of `env`, as columns of PLAY; goal_steps: see `add_hindsight`."""
    env.reset(seed)
    if game:
        players = RulePlayers(game, lineup, env.num_envs, seed)
    else:
        from envs.pool import mixed_team

        team = mixed_team(list(lineup), env, seed)
    over = np.zeros(env.num_envs, bool)
    steps = []
    while not over.all():
        actions = players.act(env.obs, env.legal, env.t) if game else team.act(env)
        row, player = np.nonzero(env.alive & ~over[:, None])  # nobody who left, no second episode
        seen = env.state[row] if obs_is_state else env.obs[row, player]
        step = {"obs": seen, "legal": env.legal[row, player], "action": actions[row, player], "t": env.t[row]}
        step |= {"episode": row, "player": player, "role": np.full(len(row), -1)}
        if game:
            step["role"] = np.where(players.codes >= RANDOM, players.codes, players.drawn)[row, player] - RANDOM
        _, _, _, _, info = env.step(actions)
        if not game:
            team.watch(env, actions, info)
        step["taken"] = info["taken"][row, player].astype(np.int64) if game else np.zeros(len(row), np.int64)
        steps.append({name: array.copy() for name, array in step.items()})
        over |= info["done"]
    data = {name: np.concatenate([step[name] for step in steps]) for name in steps[0]}
    data["t"] = data["t"].astype(np.int64)
    order = np.lexsort((data["t"], data["player"], data["episode"]))
    data = {name: array[order] for name, array in data.items()}
    add_hindsight(data, goal_steps)
    return data


def add_hindsight(data: dict[str, np.ndarray], goal_steps: int) -> None:
    """Fill hunt, goal_row and repeat, seeing the whole episode; uses `taken` up.

    The goal is the state of the player's next successful hunt, or of its next try if none succeeds (waiting for a
    partner on a stag is heading for that stag); in a battle (goal_steps > 0) what it sees goal_steps later.
    """
    num, taken = len(data["action"]), data.pop("taken")
    data["hunt"], data["goal_row"] = np.zeros(num, np.int64), np.full(num, -1)
    same = (np.diff(data["episode"]) == 0) & (np.diff(data["player"]) == 0)  # row k + 1 continues row k
    data["repeat"] = np.zeros(num, bool)
    stays = (data["obs"][1:] == data["obs"][:-1]).reshape(num - 1, -1).all(1)
    data["repeat"][1:] = same & stays & (data["action"][1:] == data["action"][:-1])
    last = np.append(np.where(same, num, np.arange(num - 1)), num - 1)
    last = np.minimum.accumulate(last[::-1])[::-1]  # last row of this player's episode
    if goal_steps:
        data["goal_row"] = np.minimum(np.arange(num) + goal_steps, last)
        data["hunt"] = np.maximum(data["action"][data["goal_row"]] - FIRST_INTERACTION, 0)
        return
    for wanted in (data["action"] >= FIRST_INTERACTION, taken > 0):  # a success overrules a try
        ahead = np.minimum.accumulate(np.where(wanted, np.arange(num), num)[::-1])[::-1]
        data["goal_row"] = np.where(ahead <= last, ahead, data["goal_row"])
    found = data["goal_row"] >= 0
    data["hunt"][found] = data["action"][data["goal_row"][found]] - FIRST_INTERACTION + 1


def collect_play(
    spec: EnvSpec,
    game: GridGame | None,
    lineups: tuple[str, ...],
    num_steps: int,
    seeds: np.random.SeedSequence,
    obs_is_state: bool = False,
    goal_steps: int = 0,
    quiet: bool = False,
) -> dict[str, Any]:
    """Play every line-up until it has given its share of `num_steps`; seats rotate so that none is special."""
    parsed = parse_lineups(lineups, spec, game)
    share = -(-num_steps // len(parsed))
    parts, first_row, first_episode, draws = [], 0, 0, np.random.default_rng(seeds)
    env = envs.make(spec.env_id, num_envs=max(1, min(EPISODES, share // spec.num_players)))
    if not quiet:
        print(f"[DATA] {spec.env_id}: playing {num_steps} steps of {len(parsed)} line-ups")
    for lineup in parsed:
        count, turn, episodes = 0, 0, 0
        while count < share:
            seats = lineup[turn % len(lineup) :] + lineup[: turn % len(lineup)]
            part = play_episodes(env, game, seats, int(draws.integers(2**31)), obs_is_state, goal_steps)
            part["goal_row"][part["goal_row"] >= 0] += first_row
            part["episode"] += first_episode
            first_row, first_episode = first_row + len(part["action"]), first_episode + env.num_envs
            count, turn, episodes = count + len(part["action"]), turn + 1, episodes + env.num_envs
            parts.append(part)
        if not quiet:
            print(f"[DATA]   {','.join(lineup)}: {count} steps of {episodes} episodes")
    env.close()
    data = {name: np.concatenate([part[name] for part in parts]) for name in PLAY}
    return data | {"meta": {"kind": "play", "obs_is_state": obs_is_state, **game_part(spec)}}


def load_play(path: str | Path, spec: EnvSpec, obs_is_state: bool = False) -> dict[str, Any]:
    """Read and check recorded play; ConfigError in one sentence if it cannot be used here."""
    data = read_data(path, "play", PLAY, spec, obs_is_state)
    game = envs.game(spec.env_id) if spec.env_id in GridGame.registry else None
    num, first_hunt = len(data["action"]), FIRST_INTERACTION + (game is None)
    shapes: dict[str, tuple[int, ...]] = {name: (num,) for name in PLAY}
    shapes["legal"] = (num, spec.num_actions)
    shapes["obs"] = (num, *((spec.state_shape or ()) if obs_is_state else spec.obs_shape))
    fits = all(data[name].shape == shape for name, shape in shapes.items())
    if not fits or data["legal"].dtype != bool or data["obs"].dtype != spec.obs_dtype:
        raise ConfigError(f"data file '{path}' is damaged: its columns do not fit together")
    limits = {"action": (0, spec.num_actions), "t": (0, spec.horizon + 1), "player": (0, spec.num_players)}
    limits |= {
        "episode": (0, 2**31),
        "goal_row": (-1, num),
        "role": (-1, len(role_names(game))),
        "hunt": (0, spec.num_actions - first_hunt + 1),
    }
    for name, (low, high) in limits.items():
        if data[name].min() < low or data[name].max() >= high:
            raise ConfigError(f"data file '{path}' is damaged: column '{name}' has values outside {low}..{high - 1}")
    if game and data["obs"].max() > 1:
        raise ConfigError(f"data file '{path}' is damaged: planes hold 0 and 1, not {data['obs'].max()}")
    if not np.isfinite(data["obs"]).all() or not data["legal"][np.arange(num), data["action"]].all():
        raise ConfigError(f"data file '{path}' is damaged: it has illegal actions or numbers that are not finite")
    goal_row = data["goal_row"][data["hunt"] > 0]
    if (goal_row < 0).any() or (data["action"][goal_row] < first_hunt).any():
        raise ConfigError(f"data file '{path}' is damaged: column 'goal_row' names rows in which nobody hunts")
    return data


# transitions


def play_transitions(env: GridEnv, seats: Seats, noise: float, num: int, generator: np.random.Generator):
    """`num` transitions of running episodes, as columns of TRANSITIONS; episodes are numbered from 0."""
    episode, next_episode = np.arange(env.num_envs), env.num_envs
    steps = []
    for _ in range(-(-num // env.num_envs)):
        states = env.states.copy()
        actions, other = seats.act(), (generator.random(env.legal.shape) * env.legal).argmax(2)
        actions = np.where((generator.random(other.shape) < noise) & env.alive, other, actions)
        after = env.game.simulate(states, actions)  # the env itself goes on to the next episode where this one ends
        _, _, _, _, info = env.step(actions)
        seats.watch(actions, info)
        done = info["done"].copy()
        steps.append((states, actions, after.states, after.reward, done, episode.copy()))
        episode[done] = next_episode + np.arange(done.sum())
        next_episode += int(done.sum())
    columns = (np.concatenate(values)[:num] for values in zip(*steps, strict=True))
    return dict(zip(TRANSITIONS, columns, strict=True))


def collect_transitions(
    game: GridGame, lineups: list[str], noise: float, num: int, seeds: np.random.SeedSequence, quiet: bool = False
) -> dict[str, Any]:
    """`num` transitions in equal shares of the line-ups; `noise`: how often a player does a random legal action."""
    generator, parts, first_episode = np.random.default_rng(seeds), [], 0
    for k, lineup in enumerate(lineups):
        env_seed, seats_seed = (int(seed) for seed in generator.integers(2**31, size=2))
        roles = lineup.split(",") * (1 if "," in lineup else game.num_players)
        if len(roles) != game.num_players:
            raise ConfigError(f"line-up '{lineup}' has {len(roles)} roles; {game.env_id} needs 1 or {game.num_players}")
        refuse_held_out(roles)
        share = num * (k + 1) // len(lineups) - num * k // len(lineups)
        if share == 0:  # fewer transitions than line-ups
            continue
        env = GridEnv(game, max(1, min(NUM_ENVS, share // 40)), env_seed)  # long enough to hold whole episodes
        part = play_transitions(env, Seats(env, roles, None, seats_seed), noise, share, generator)
        part["episode"] += first_episode
        first_episode = part["episode"].max() + 1
        if not quiet:
            paid = (part["reward"] != game.config.time_reward).any(1).mean()
            episodes = len(np.unique(part["episode"]))
            print(f"[DATA]   {lineup}: {share} transitions of {episodes} episodes, {paid:.1%} with a reward")
        parts.append(part)
    data = {name: np.concatenate([part[name] for part in parts]) for name in TRANSITIONS}
    return data | {"meta": {"kind": "transitions", "obs_is_state": False, **game_part(game.spec())}}


def load_transitions(path: str | Path, game: GridGame) -> dict[str, Any]:
    """Read and check recorded transitions; ConfigError in one sentence if it cannot be used here."""
    data = read_data(path, "transitions", TRANSITIONS, game.spec())
    num, seats, size = len(data["end"]), game.num_players, game.state_size
    shapes: dict[str, tuple[int, ...]] = {"states": (num, size), "next_states": (num, size), "actions": (num, seats)}
    shapes |= {"reward": (num, seats), "end": (num,), "episode": (num,)}
    if any(data[name].shape != shape for name, shape in shapes.items()):
        raise ConfigError(f"data file '{path}' is damaged: its columns do not fit together")
    for name in ("states", "next_states"):
        try:
            game.check_states(data[name])
        except ValueError as error:
            raise ConfigError(f"data file '{path}' is damaged: column '{name}': {error}") from None
    known = ((data["actions"] >= 0) & (data["actions"] < game.num_actions)).all()
    if not known or not np.isfinite(data["reward"]).all() or not game.alive(data["states"]).any(1).all():
        raise ConfigError(f"data file '{path}' is damaged: unknown actions, empty boards or infinite rewards")
    return data


# the ceiling: what the rules' own random tie-breaking leaves predictable


def board_codes(game: GridGame, obs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Planes (M, H, W, C) -> codes (M, H*W) of what is in each cell (as in a state), own cell (M,)."""
    planes = obs.reshape(len(obs), -1, obs.shape[-1])
    codes = planes[:, :, game.num_players :].astype(np.int64) @ np.arange(1, 2 + len(game.kinds))
    return codes, planes[:, :, 0].argmax(1)


def distances(game: GridGame, codes: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """(M, H*W) steps around blocks from each cell to the nearest one with the code wanted (M,); H*W + 1: no way."""
    far = np.int16(codes.shape[1] + 1)
    distance = np.where(codes == wanted[:, None], np.int16(0), far)
    while True:
        nearer = np.where(codes == BLOCK, far, np.int16(1) + distance[:, game.grid.neighbours].min(2))
        nearer = np.minimum(distance, nearer)
        if (nearer == distance).all():
            return distance
        distance = nearer


def rule_probabilities(game: GridGame, role: str, obs: np.ndarray, legal: np.ndarray) -> np.ndarray:
    """(M, A) exact action probabilities of a rule-based player, as envs/players.py plays it."""
    if role in ("random", "fix"):
        chances = legal.astype(np.float64)
        if role == "fix":
            chances[:, FIRST_INTERACTION:] = 0.0
        return chances / chances.sum(1, keepdims=True)
    codes, own = board_codes(game, obs)
    wanted = np.full(len(obs), -1)
    for kind in reversed(game.seekers[role]):  # the first kind of the list that is left
        wanted[(codes == ITEM + kind).any(1)] = ITEM + kind
    distance, each = distances(game, codes, wanted), np.arange(len(obs))
    here = distance[each, own]
    chances = np.zeros((len(obs), game.num_actions))
    chances[:, :STAY] = legal[:, :STAY] & (distance[each[:, None], game.grid.neighbours[own]] == here[:, None] - 1)
    acts = (here == 0) & (wanted >= 0)
    chances[acts, FIRST_INTERACTION + wanted[acts] - ITEM] = 1.0
    chances[chances.sum(1) == 0, STAY] = 1.0  # nothing left to seek
    return chances / chances.sum(1, keepdims=True)


def ceilings(data: dict[str, Any], game: GridGame) -> dict[str, np.ndarray]:
    """For each row the best possible chance of naming the action, for predictors that know more and more:

    `state`    the rules, and how common each role is among rows of the same step and the same distances to each kind
               of item: an estimate of what the state alone allows (`history` is a strict upper bound of it)
    `history`  also the player's own earlier actions of the episode: exact Bayes over roles
    `known`    the role itself; `best` (M, A) is how often each action is this predictor's guess
    """
    names, num = role_names(game), len(data["action"])
    present = np.unique(data["role"])
    chances = np.stack([rule_probabilities(game, names[k], data["obs"], data["legal"]) for k in present])  # (R, M, A)
    role, each = np.searchsorted(present, data["role"]), np.arange(num)
    first = np.append(True, (np.diff(data["episode"]) != 0) | (np.diff(data["player"]) != 0))
    prior = np.bincount(role[first], minlength=len(present)) / first.sum()

    # posterior over roles before each row (R, M): prior times the chances of the same player's earlier actions
    log_chance = np.log(np.maximum(chances[:, each, data["action"]], 1e-12))
    before = np.cumsum(log_chance, 1) - log_chance
    before -= before[:, np.flatnonzero(first)[np.cumsum(first) - 1]]
    posterior = prior[:, None] * np.exp(before - before.max(0))
    posterior /= posterior.sum(0)

    codes, own = board_codes(game, data["obs"])
    away = [distances(game, codes, np.full(num, ITEM + kind))[each, own] for kind in range(len(game.kinds))]
    place = np.unique(np.column_stack([data["t"], *away]), axis=0, return_inverse=True)[1].ravel()
    by_place = np.stack([np.bincount(place, weights) for weights in posterior]) / np.bincount(place)
    known = chances[role, each]
    best = known == known.max(1, keepdims=True)
    return {
        "state": np.einsum("rm,rma->ma", by_place[:, place], chances).max(1),
        "history": np.einsum("rm,rma->ma", posterior, chances).max(1),
        "known": known.max(1),
        "best": best / best.sum(1, keepdims=True),
    }
