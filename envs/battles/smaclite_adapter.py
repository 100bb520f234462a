"""The real SMAClite (uoe-agents/smaclite) behind the same interface as our own battles: `smaclite-<map>`.

    pip install "smaclite @ git+https://github.com/uoe-agents/smaclite" && pip install -U rtree

What the package leaves to its users is done here: actions become Python ints, the last-action block of the state is
zeroed by a reset, the time limit exists and truncates, every env gets its own seed, healers get all `n_actions`
actions, and what the package prints stays off stdout. Maps that only we have (3m, 8m, ...) are handed to it from our
map files.
"""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np

from envs.battles.core import NO_OP, STOP
from envs.battles.env import check_count, numbered
from envs.battles.mapfile import BattleMap, load_map, map_names
from envs.battles.teams import Layout
from envs.errors import ConfigError
from envs.grid import EnvSpec, as_actions, illegal_message
from envs.rng import make_streams

PREFIX = "smaclite-"
OTHER_LIMITS = {"2c_vs_64zg": 400, "bane_vs_bane": 200, "2s_vs_1sc": 300}  # SMAC's, of maps that only the package has
WORD = 2**64  # a PCG64 generator's state is two numbers of two such words


def quiet() -> contextlib.AbstractContextManager:
    """Keeps what the package prints off stdout."""
    return contextlib.redirect_stdout(io.StringIO())


def import_package() -> Any:
    """The package's modules; ConfigError with the way to install them if something is missing."""
    try:
        with quiet():
            import smaclite  # noqa: F401  (registers its maps with gymnasium)
            import smaclite.env.maps.map as package
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{PREFIX}<map> needs the SMAClite package, but module '{error.name}' is missing: "
            'pip install "smaclite @ git+https://github.com/uoe-agents/smaclite" and a current rtree'
        ) from None
    return package


def hand_over(battle: BattleMap, package: Any) -> Any:
    """Our map in the package's form."""
    from smaclite.env.terrain.terrain import TerrainType
    from smaclite.env.units.unit_type import StandardUnit
    from smaclite.env.util.faction import Faction

    def unit_type(name: str) -> Any:
        return StandardUnit[name.upper()]

    groups = []
    for group in battle.groups:
        names = [unit.name for unit in group.units]
        counts = [(unit_type(name), names.count(name)) for name in dict.fromkeys(names)]
        groups.append(package.Group(group.x, group.y, Faction[group.side.upper()], counts))
    cells = {True: TerrainType.NORMAL, False: TerrainType.NONE}
    sides = {side: [unit for s, unit in battle.units if s == side] for side in ("ally", "enemy")}
    return package.MapInfo(
        name=battle.name,
        num_allied_units=len(sides["ally"]),
        num_enemy_units=len(sides["enemy"]),
        groups=groups,
        attack_point=battle.attack_point,
        terrain=[[cells[bool(cell)] for cell in row] for row in battle.walkable],
        ally_has_shields=any(unit.shield for unit in sides["ally"]),
        enemy_has_shields=any(unit.shield for unit in sides["enemy"]),
        width=battle.width,
        height=battle.height,
        num_unit_types=len(battle.type_features),
        unit_type_ids={unit_type(name): k for k, name in enumerate(battle.type_features)},
    )


class SmacliteEnv:
    """Python envs of the package, stepped one after the other; see BattleEnv for what everything means."""

    def __init__(
        self, env_id: str, num_envs: int = 1, seed: int = 0, threads: int = 1, auto_reset: bool = True, **overrides: Any
    ):
        package = import_package()
        maps = {preset.value.name: preset.value for preset in package.MapPreset}
        name = env_id[len(PREFIX) :]
        if name not in maps and name not in map_names():
            known = sorted(set(maps) | set(map_names()), key=str.lower)
            raise ConfigError(f"unknown map '{name}' of {PREFIX}<map>; maps are {', '.join(known)}")
        for setting in overrides:
            if setting not in ("horizon", "strict"):
                raise ConfigError(f"{env_id} has no setting '{setting}'; its settings are horizon, strict")
        self.num_envs, self.threads = check_count("num_envs", num_envs, 1), 1
        check_count("threads", threads, 1)
        horizon = check_count("horizon", overrides.get("horizon", 0), 0)
        self.strict, self.auto_reset = bool(overrides.get("strict", False)), auto_reset
        if name in map_names() and load_map(name).draws_places:
            raise ConfigError(f"the SMAClite package does not draw starts; smac-{name} does")
        limit = horizon or (load_map(name).limit if name in map_names() else OTHER_LIMITS[name])
        map_info = maps[name] if name in maps else hand_over(load_map(name), package)

        from smaclite.env import SMACliteEnv

        with quiet():
            makers = [SMACliteEnv(map_info=map_info, render_mode="rgb_array") for _ in range(self.num_envs)]
        self.envs = [env.unwrapped for env in makers]
        first = self.envs[0]
        players, actions, shape = first.n_agents, first.n_actions, (self.num_envs, first.n_agents)
        self.obs = np.zeros((*shape, first.obs_size), np.float32)
        self.state = np.zeros((self.num_envs, first.state_size), np.float32)
        self.legal = np.zeros((*shape, actions), np.bool_)
        self.alive = np.zeros(shape, np.bool_)
        self.t = np.zeros(self.num_envs, np.int32)
        self.reward = np.zeros(shape, np.float32)
        self.terminated, self.truncated = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
        self.returns = np.zeros(self.num_envs)
        self.history = np.zeros((self.num_envs, limit, players), np.int16)  # actions of the running episodes
        self.begun_from = np.zeros((self.num_envs, 6), np.uint64)  # the random generators at their start
        self.info = {
            "done": np.zeros(self.num_envs, np.bool_),
            "final_obs": np.zeros_like(self.obs),
            "final_state": np.zeros_like(self.state),
            "episode_return": np.zeros(shape),
            "episode_length": np.zeros(self.num_envs, np.int64),
            "battle_won": np.zeros(self.num_envs, np.bool_),
            "illegal_actions": np.zeros(self.num_envs, np.int32),
        }
        config = {"map": name, "horizon": limit, "strict": self.strict}
        self._describe(env_id, map_info, limit, config)
        self.reset(check_count("seed", seed, 0))

    def _describe(self, env_id: str, map_info: Any, limit: int, config: dict[str, Any]) -> None:
        first = self.envs[0]
        types: dict[str, list[Any]] = {"ALLY": [], "ENEMY": []}
        for group in map_info.groups:
            for unit_type, count in group.units:
                types[group.faction.name] += [unit_type] * count
        names = {side: numbered([t.stats.name for t in members]) for side, members in types.items()}
        healer = np.array([t.stats.combat_type.name == "HEALING" for t in types["ALLY"]])
        targets = [f"target {k}" for k in range(first.n_actions - 6)]
        self.spec = EnvSpec(
            env_id=env_id,
            num_players=first.n_agents,
            num_actions=first.n_actions,
            action_names=("no-op", "stop", "north", "south", "east", "west", *targets),
            obs_shape=(first.obs_size,),
            obs_dtype="float32",
            state_shape=(first.state_size,),
            horizon=limit,
            player_names=names["ALLY"],
            plane_names=(),
            config=config,
        )
        units = types["ALLY"] + types["ENEMY"]
        self.layout = Layout(
            num_allies=first.n_agents,
            num_enemies=first.n_enemies,
            ally_size=first.ally_state_feat_size,
            enemy_size=first.enemy_state_feat_size,
            ally_shields=int(map_info.ally_has_shields),
            enemy_shields=int(map_info.enemy_has_shields),
            width=float(map_info.width),
            height=float(map_info.height),
            max_hp=np.array([t.stats.hp for t in units], np.float64),
            max_shield=np.array([t.stats.shield for t in units], np.float64),
            healer=healer,
        )

    def reset(self, seed: int | None = None) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Start every battle anew; with `seed` from that seed's random streams, else from where the streams are."""
        seeds: list[int | None] = [None] * self.num_envs
        if seed is not None:
            streams = make_streams(check_count("seed", seed, 0), self.num_envs)
            seeds = [int(stream >> np.uint64(33)) for stream in streams]
        for b, row_seed in enumerate(seeds):
            self._begin(b, row_seed)
        self.info["done"][:] = False
        return self.obs, self.info

    def _begin(self, b: int, seed: int | None = None) -> None:
        env = self.envs[b]
        env.reset(seed=seed)
        env.last_actions = np.zeros_like(env.last_actions)
        self.begun_from[b] = pack_generator(env._np_random)
        self.t[b], self.returns[b] = 0, 0.0
        self._look(b)

    def _look(self, b: int) -> None:
        env = self.envs[b]
        self.obs[b], self.state[b] = np.stack(env.get_obs()), env.get_state()
        self.legal[b] = np.stack(env.get_avail_actions()) > 0
        self.alive[b] = [agent in env.agents for agent in range(env.n_agents)]

    def step(self, actions) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """actions (B, N) integers -> obs, reward, terminated, truncated, info; what is over starts anew by itself."""
        actions = as_actions(actions, self.num_envs, self.spec).copy()
        allowed = np.take_along_axis(self.legal, actions[:, :, None], axis=2)[:, :, 0]
        if self.strict and not allowed.all():
            b, player = np.argwhere(~allowed)[0]
            raise ValueError(illegal_message(self.spec, player, actions[b, player], self.legal[b, player]))
        self.info["illegal_actions"][:] = (~allowed).sum(axis=1)
        actions[~allowed] = np.where(self.alive, STOP, NO_OP)[~allowed]
        for b in range(self.num_envs):
            self._step_row(b, actions[b])
        return self.obs, self.reward, self.terminated, self.truncated, self.info

    def _step_row(self, b: int, actions: np.ndarray) -> None:
        self.history[b, self.t[b]] = actions
        _, reward, decided, _, info = self.envs[b].step([int(action) for action in actions])
        self.t[b] += 1
        self.returns[b] += reward
        self._look(b)
        out_of_time = not decided and self.t[b] >= self.spec.horizon
        self.reward[b], self.terminated[b], self.truncated[b] = reward, decided, out_of_time
        self.info["done"][b], self.info["battle_won"][b] = decided or out_of_time, info["battle_won"]
        if decided or out_of_time:
            self.info["final_obs"][b], self.info["final_state"][b] = self.obs[b], self.state[b]
            self.info["episode_return"][b], self.info["episode_length"][b] = self.returns[b], self.t[b]
            if self.auto_reset:
                self._begin(b)

    def get_state(self) -> dict[str, np.ndarray]:
        """Everything needed to go on exactly from here: the start of each running episode and its actions so far."""
        return {"begun_from": self.begun_from.copy(), "history": self.history.copy(), "t": self.t.copy()}

    def set_state(self, saved: dict[str, np.ndarray]) -> None:
        """Go on from what `get_state` gave, by playing the running episodes again."""
        for b in range(self.num_envs):
            unpack_generator(self.envs[b]._np_random, saved["begun_from"][b])
            self._begin(b)
            for actions in saved["history"][b, : saved["t"][b]]:
                self._step_row(b, actions)
        self.info["done"][:] = False

    def picture(self) -> np.ndarray:
        """(height, width, 3) uint8 of the first battle, by the package's own renderer."""
        with quiet():
            return np.asarray(self.envs[0].render(), np.uint8)

    def close(self) -> None:
        for env in self.envs:
            env.close()


def pack_generator(generator: np.random.Generator) -> list[int]:
    """A PCG64 generator's state as six 64-bit numbers."""
    saved = generator.bit_generator.state
    state, increment = saved["state"]["state"], saved["state"]["inc"]
    return [state // WORD, state % WORD, increment // WORD, increment % WORD, saved["has_uint32"], saved["uinteger"]]


def unpack_generator(generator: np.random.Generator, packed: np.ndarray) -> None:
    high, low, increment_high, increment_low, has_uint32, uinteger = (int(word) for word in packed)
    state = {"state": high * WORD + low, "inc": increment_high * WORD + increment_low}
    generator.bit_generator.state = {
        "bit_generator": "PCG64",
        "state": state,
        "has_uint32": has_uint32,
        "uinteger": uinteger,
    }
