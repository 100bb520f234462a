"""The games: Markov Stag Hunt, Markov Snowdrift and SMAC-style battles, batched for training and as PettingZoo games.

    env = envs.make("msh-4h1s-4x4", num_envs=256, seed=1)     # many copies stepped together
    game = envs.parallel_env("msh-4h1s-8x8")                  # one PettingZoo ParallelEnv
    rules = envs.game("msd-4x4")                              # pure functions on states, for planners
    vector = envs.make_vec("msd-4x4", num_envs=16, seed=1)    # a gymnasium VectorEnv
    battle = envs.smac_env("3m")                              # SMAC's own interface

Overrides are fields of the game's config, e.g. envs.make("msh-4h1s-8x8", start_window=4, start_window_prob=0.7).
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from envs.errors import ConfigError


def _end_imports_quietly() -> None:
    """Ctrl-C while a program imports, which takes seconds, is one line: for this the scripts import envs first."""
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        while trace and trace.tb_next and "runpy" in trace.tb_frame.f_code.co_filename:  # python -m
            trace = trace.tb_next
        code = trace.tb_next.tb_frame.f_code if trace and trace.tb_next else None  # below the program itself
        importing = code and (code.co_name == "<module>" or "importlib" in code.co_filename)
        if importing and issubclass(kind, KeyboardInterrupt):
            print("stopped: there is nothing to save", flush=True)
        else:
            before(kind, error, trace)

    sys.excepthook = show
    is_script = hasattr(sys.modules.get("__main__"), "__file__")  # in a notebook an interrupt ends a cell, no program
    if is_script and threading.current_thread() is threading.main_thread():
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _note_interrupt)


def _note_interrupt(number: int, frame: Any) -> None:
    """As usual, and a note: some libraries swallow a KeyboardInterrupt in their imports. `guarded` looks at it."""
    interrupts.append(number)
    signal.default_int_handler(number, frame)


interrupts: list[int] = []  # before the program itself began
_end_imports_quietly()

import numba  # noqa: E402  (takes a while)

__all__ = ["ConfigError", "game", "ids", "make", "make_vec", "parallel_env", "smac_env", "spec"]


def _fresh_compiled_code() -> None:
    """Key numba's cache by the text of all compiled files: numba itself only sees changes in the file of the outer
    function, so an edit to a rule that another file calls would go on running as it was."""
    here, text, given = Path(__file__).parent, hashlib.sha256(), os.environ.get("NUMBA_CACHE_DIR")
    for source in sorted(here.rglob("*.py")):
        content = source.read_bytes()
        if b"njit" in content and source != Path(__file__):
            text.update(content)
    cache = Path(given or here / "__pycache__" / f"numba-{text.hexdigest()[:12]}")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            pass
    except OSError:  # a place that cannot be written: compile for this process alone
        cache = Path(tempfile.mkdtemp(prefix="hopplus-numba-"))
        atexit.register(shutil.rmtree, cache, ignore_errors=True)
    setattr(numba.config, "CACHE_DIR", str(cache))  # noqa: B010  (numba makes its settings at run time)
    for old in [] if given else cache.parent.glob("numba-*"):
        with contextlib.suppress(OSError):  # another process may be doing the same
            if old != cache and time.time() - old.stat().st_mtime > 86_400:  # nothing that runs now still reads it
                shutil.rmtree(old, ignore_errors=True)


_fresh_compiled_code()

from envs import games  # noqa: E402, F401  (after the cache is set; importing the games registers them)
from envs.grid import EnvSpec, GridEnv, GridGame  # noqa: E402

BATTLES = ("smac-", "smac-file:", "smaclite-")


def ids() -> list[str]:
    """All env ids that can be made without a file or an extra package."""
    from envs import battles

    return sorted(GridGame.registry) + battles.ids()


def game(env_id: str, **overrides: Any) -> GridGame:
    """The rules of a grid game: `simulate`, `observe`, `legal` on batches of given states."""
    if env_id not in GridGame.registry:
        raise ConfigError(f"unknown grid game '{env_id}'; the grid games are {', '.join(sorted(GridGame.registry))}")
    return GridGame.registry[env_id](env_id, **overrides)


def make(env_id: str, num_envs: int = 1, seed: int = 0, threads: int = 1, **overrides: Any):
    """A batched env: `num_envs` copies stepped together, row k with the k-th random stream of `seed`."""
    if _is_battle(env_id):
        from envs import battles

        return battles.make(env_id, num_envs=num_envs, seed=seed, threads=threads, **overrides)
    return GridEnv(game(env_id, **overrides), num_envs, seed, threads)


def parallel_env(
    env_id: str, render_mode: str | None = None, flat: bool = False, keep_agents: bool = False, **overrides: Any
):
    """One game as a PettingZoo ParallelEnv.

    `flat` (plain vectors as observations, masks in the infos) and `keep_agents` (nobody leaves before the end) are for
    libraries that need them: docs/ecosystem.md.
    """
    if _is_battle(env_id):
        from envs import battles

        return battles.parallel_env(env_id, render_mode, flat, keep_agents, **overrides)
    from envs.zoo import GridParallelEnv

    return GridParallelEnv(game(env_id, **overrides), render_mode, flat, keep_agents)


def make_vec(env_id: str, num_envs: int = 1, seed: int = 0, **options: Any):
    """A gymnasium VectorEnv; options are those of envs.vector.VectorEnv (per_player, copy, threads) and of the game."""
    from envs.vector import VectorEnv

    return VectorEnv(env_id, num_envs, seed, **options)


def smac_env(map_name: str, seed: int | None = None, **options: Any):
    """One battle with SMAC's own interface, for runners of the PyMARL family: `smac_env("3m")`."""
    from envs import battles

    return battles.smac_env(map_name, seed, **options)


def spec(env_id: str, **overrides: Any) -> EnvSpec:
    """Sizes and names of an env."""
    return make(env_id, **overrides).spec if _is_battle(env_id) else game(env_id, **overrides).spec()


def _is_battle(env_id: str) -> bool:
    """Whether an id belongs to the battles; an id that belongs to nothing is refused here."""
    if not isinstance(env_id, str) or (not env_id.startswith(BATTLES) and env_id not in GridGame.registry):
        raise ConfigError(f"unknown env id '{env_id}'; valid ids are {', '.join(ids())}")
    return env_id not in GridGame.registry
