"""A player of the user's own: a class in a Python file, in any seat of any script.

    python ppo_baseline.py --roles ppo,my_players.py:Shy,ns,ns

The class has `act`, for all B games at once, or `act_one`, for one game at a time (then every game has an object of its
own). They take what they name, of obs, legal, t and rng; `watch` or `watch_one`, if there is one, is told after each
step what it names of actions, reward, taken and done; `__init__` likewise of game, seat and num_envs. docs/games.md has
an example of each.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from envs.errors import ConfigError, short
from envs.grid import STAY
from envs.rng import pack_generator, unpack_generator
from envs.run import load_script

NUMBERS = (bool, int, float, np.generic)


def is_file_role(role: str) -> bool:
    """Whether a role is FILE.py:CLASS, or FILE.py alone, which lacks a class; a run folder may be called so, too."""
    return (role.endswith(".py") or role.rpartition(":")[0].endswith(".py")) and not Path(role).is_dir()


def find_class(role: str) -> type:
    """The class behind FILE.py:CLASS."""
    path, _, name = role.rpartition(":") if not role.endswith(".py") else (role, "", "")
    if not Path(path).is_file():
        raise ConfigError(f"role '{role}': there is no file '{path}'")
    module = load_script(path)
    found = getattr(module, name, None) if name else None
    if not isinstance(found, type):
        classes = [name for name, x in vars(module).items() if getattr(x, "__module__", "") == module.__name__]
        there = ", ".join(name for name in classes if isinstance(getattr(module, name), type)) or "none"
        what = f"has no class '{name}'" if name else "must be followed by a class, as FILE.py:CLASS"
        raise ConfigError(f"role '{role}': '{path}' {what}; its classes are: {there}")
    if not any(callable(getattr(found, name, None)) for name in ("act", "act_one")):
        raise ConfigError(f"role '{role}': {name} has neither act(self, obs, legal, t, rng) nor act_one of the same")
    return found


class UserPlayer:
    """One seat of all games of `env`, played by the class behind `role`."""

    def __init__(self, role: str, env: Any, seat: int, seed: int):
        kind = find_class(role)
        self.role, self.path, self.seat, self.spec = role, Path(role.rpartition(":")[0]).resolve(), seat, env.spec
        self.one = "" if callable(getattr(kind, "act", None)) else "_one"  # ending of its methods
        self.games = range(env.num_envs if self.one else 1)
        self.rngs = [np.random.default_rng([seed, seat, game]) for game in self.games]
        about = {"game": env.game, "seat": seat, "num_envs": env.num_envs}
        self.players = [self.call(kind, about, kind.__name__) for _ in self.games]
        # what is saved: arrays and numbers that it had from the start
        kept = vars(self.players[0]).items() if hasattr(self.players[0], "__dict__") else ()
        self.types = {
            name: type(x)
            for name, x in kept
            if isinstance(x, NUMBERS) or (isinstance(x, np.ndarray) and x.dtype != object)
        }

    def call(self, function: Callable, known: dict[str, Any], name: str) -> Any:
        """What a function of the user's returns to the arguments that it names; whatever it raises in one sentence."""
        try:
            parameters = inspect.signature(function).parameters.values()
            named = {p.name: p.default for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
            for wanted, default in named.items():
                if wanted not in known and default is inspect.Parameter.empty:
                    raise ConfigError(f"{self.role}: {name} asks for '{wanted}', but is given {', '.join(known)}")
            return function(**{wanted: known[wanted] for wanted in named if wanted in known})
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in frames if Path(frame.filename) == self.path]
            where = f" in line {lines[-1]}" if lines else ""
            told = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(f"{self.role}: {name} failed{where}: {told}") from error

    def act(self, env: Any) -> np.ndarray:
        obs, legal, t = env.obs[:, self.seat].copy(), env.legal[:, self.seat].copy(), env.t.copy()
        alive = env.alive[:, self.seat]
        if not self.one:
            known = {"obs": obs, "legal": legal, "t": t, "rng": self.rngs[0]}
            actions = self.as_actions(self.call(self.players[0].act, known, "act"), (len(t),))
        else:
            actions = np.full(len(t), STAY)
            for b in np.flatnonzero(alive):
                known = {"obs": obs[b], "legal": legal[b], "t": int(t[b]), "rng": self.rngs[b]}
                actions[b] = self.as_actions(self.call(self.players[b].act_one, known, "act_one"), ())
        known_actions = actions.clip(0, self.spec.num_actions - 1)
        allowed = (known_actions == actions) & env.legal[np.arange(len(t)), self.seat, known_actions]
        for b in np.flatnonzero(alive & ~allowed)[:1]:
            names = self.spec.action_names
            did = f"{actions[b]} ({names[actions[b]]})" if known_actions[b] == actions[b] else f"{actions[b]}"
            valid = ", ".join(f"{a} ({names[a]})" for a in np.flatnonzero(env.legal[b, self.seat]))
            raise ConfigError(f"{self.role}: action {did} is illegal in game {b} at step {t[b]}; legal are {valid}")
        return np.where(alive, actions, STAY)

    def as_actions(self, answer: Any, shape: tuple[int, ...]) -> np.ndarray:
        """An answer of the user's as integers of this shape."""
        try:
            actions = np.asarray(answer)
        except ValueError:  # lists of different lengths
            actions = np.asarray(None)
        if actions.shape == shape and actions.dtype.kind in "iu":
            return actions.astype(np.int64)
        wanted = f"an array of {shape[0]} integers, one for each game" if shape else "an integer"
        is_array = isinstance(answer, np.ndarray) and answer.dtype != object
        got = f"an array of shape {answer.shape} and type {answer.dtype}" if is_array else short(answer)
        hint = "" if self.one else "; a player of one game at a time has act_one"
        raise ConfigError(f"{self.role}: act{self.one} must return {wanted}, not {got}{hint}")

    def watch(self, env: Any, actions: np.ndarray, info: dict[str, np.ndarray]) -> None:
        known = {"actions": actions, "reward": env.out.reward, "taken": info["taken"], "done": info["done"]}
        for b, player in enumerate(self.players):
            if hasattr(player, f"watch{self.one}"):
                told = {name: x[b] if self.one else x for name, x in known.items()}
                told = {name: x.copy() if isinstance(x, np.ndarray) else bool(x) for name, x in told.items()}
                self.call(getattr(player, f"watch{self.one}"), told, f"watch{self.one}")

    def get_state(self) -> dict[str, np.ndarray]:
        saved = {"rng": np.stack([pack_generator(rng) for rng in self.rngs])}
        try:
            for name in self.types:
                saved[f"own.{name}"] = np.stack([np.asarray(getattr(player, name)) for player in self.players])
        except (AttributeError, ValueError) as error:
            raise ConfigError(f"{self.role}: attribute '{name}' cannot be saved: {error}") from None
        return saved

    def set_state(self, saved: dict[str, np.ndarray]) -> None:
        for b, player in enumerate(self.players):
            unpack_generator(self.rngs[b], saved["rng"][b])
            for name, kind in self.types.items():
                x = saved[f"own.{name}"][b]
                setattr(player, name, np.array(x) if kind is np.ndarray else kind(x))
