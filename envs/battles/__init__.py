"""SMAC-style battles: our own compiled simulator (`smac-<map>`, `smac-file:<path>`) and an adapter for the SMAClite
package (`smaclite-<map>`) behind the same interface. Rules, maps and map files: docs/battles.md.
"""

from __future__ import annotations

from typing import Any

from envs.battles.env import BattleEnv
from envs.battles.mapfile import BattleMap, load_map, load_map_file, map_names
from envs.battles.teams import TEAMS, make_team
from envs.errors import ConfigError

__all__ = ["TEAMS", "BattleEnv", "ids", "load", "make", "make_team", "parallel_env", "play", "smac_env"]

OWN, FILE, PACKAGE = "smac-", "smac-file:", "smaclite-"


def ids() -> list[str]:
    """The battles that come along; `smac-file:<path>` and `smaclite-<map>` work as well."""
    return [OWN + name for name in map_names()]


def load(env_id: str) -> BattleMap:
    """The map of a `smac-` id."""
    if env_id.startswith(FILE):
        return load_map_file(env_id[len(FILE) :])
    if env_id.startswith(OWN):
        return load_map(env_id[len(OWN) :])
    raise ConfigError(f"unknown battle '{env_id}'; battles are {', '.join(ids())}, {FILE}<path> and {PACKAGE}<map>")


def make(env_id: str, num_envs: int = 1, seed: int = 0, threads: int = 1, **overrides: Any):
    """A batched env; overrides are the fields of BattleConfig, such as start_jitter=1.0."""
    if env_id.startswith(PACKAGE):
        from envs.battles.smaclite_adapter import SmacliteEnv

        return SmacliteEnv(env_id, num_envs, seed, threads, **overrides)
    return BattleEnv(env_id, load(env_id), num_envs, seed, threads, **overrides)


def parallel_env(
    env_id: str, render_mode: str | None = None, flat: bool = False, keep_agents: bool = True, **overrides: Any
):
    """One battle as a PettingZoo ParallelEnv that also knows SMAC's method names; its agents stay to the end anyway."""
    from envs.battles.zoo import BattleParallelEnv

    return BattleParallelEnv(env_id, render_mode, flat, **overrides)


def smac_env(map_name: str, seed: int | None = None, **options: Any):
    """One battle with SMAC's own interface; `map_name` is a map (3m) or the id of a battle (smac-3m)."""
    from envs.battles.zoo import SmacEnv

    is_id = str(map_name).startswith((OWN, FILE, PACKAGE))
    return SmacEnv(map_name if is_id else f"{OWN}{map_name}", seed, **options)


def play(
    env_id: str,
    policy: str = "nearest",
    episodes: int = 1,
    seed: int = 0,
    gif: str | None = None,
    fps: float = 16,
    page: str = "",
    **overrides: Any,
):
    """Play battles with a team, print how each ended, and write them as a GIF and a replay page."""
    from envs.battles.play import play as run

    return run(env_id, policy, episodes, seed, gif, fps, page, **overrides)
