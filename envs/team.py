"""One face for all games that a team's script plays: battles, grid games and particle games, as tensors.

    game = TeamGame(make_env("smac-3m", num_envs=128, seed=1))
    seen = game.observe()                                  # obs, state, legal, alive of the current step
    info = game.env.step(game.env_actions(actions))[-1]    # actions (B, N) of the networks
    final = game.final(info)                               # obs, state, alive at the end of the episodes that are done

In a battle or a particle game all agents earn the same, fallen ones too, until the episode ends (`shared_reward`). In a
grid game everybody earns for itself until it leaves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import envs
from envs.grid import GridEnv, GridGame
from envs.particles import ParticleEnv


def make_env(env_id: str, num_envs: int, seed: int, start_jitter: float = 0.0, continuous: bool = False) -> Any:
    """The batched env behind any id that a team can play; `start_jitter` is for battles, `continuous` for particles."""
    is_particles = env_id.startswith("mpe-")
    if continuous and not is_particles:
        raise envs.ConfigError(f"--continuous is for mpe-simple-spread only; {env_id} has discrete actions")
    if start_jitter and not env_id.startswith(envs.BATTLES):
        raise envs.ConfigError(f"--start-jitter is for battles only, not for {env_id}")
    if is_particles:
        return ParticleEnv(env_id, num_envs, seed, continuous)
    settings: dict[str, Any] = {"start_jitter": start_jitter} if start_jitter else {}
    return envs.make(env_id, num_envs, seed, **settings)


class Nearby:
    """Turns the planes of a grid game into the own place and where each thing is from there, the nearest of its plane
    first: whether it is there, steps down and across as share of the board and as signs, and whether it is on the own
    cell. A layer on the planes themselves would have to learn every pair of cells by itself."""

    def __init__(self, game: GridGame):
        height, width, _ = game.obs_shape
        rows, columns = np.divmod(np.arange(height * width), width)
        down, across = rows - rows[:, None], columns - columns[:, None]  # (own cell, cell)
        distance = abs(down) + abs(across)
        features = [distance >= 0, down / height, across / width, np.sign(down), np.sign(across), distance == 0]
        self.nearest = distance.argsort(1, kind="stable")  # (own cell, rank)
        # what there is to say of a thing on the cell of each rank: (own cell, rank, 6)
        self.features = np.take_along_axis(np.stack(features, 2).astype(np.float32), self.nearest[:, :, None], 1)
        self.place = np.stack([rows >= 0, rows / height, columns / width], 1).astype(np.float32)  # (own cell, 3)
        self.slots = [1] * (game.num_players - 1) + [4 * game.config.max_block_comp, *game.item_counts.tolist()]
        self.size = 3 + 6 * sum(self.slots)

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        """obs (B, N, H, W, planes) of 0/1, own plane first -> (B, N, size); zeros for who has left"""
        cells = obs.reshape(obs.shape[0] * obs.shape[1], -1, obs.shape[-1])  # (B * N, cell, plane)
        present, own = cells[:, :, 0].max(1) > 0, cells[:, :, 0].argmax(1)
        by_rank, seen = np.take_along_axis(cells, self.nearest[own][:, :, None], 1), [self.place[own]]
        for plane, slots in enumerate(self.slots, start=1):
            things = by_rank[:, :, plane]  # (B * N, rank)
            ranks = (things == 0).argsort(1, kind="stable")[:, :slots]
            there = np.take_along_axis(things, ranks, 1)[:, :, None]
            seen.append((self.features[own[:, None], ranks] * there).reshape(len(cells), -1))
        return (np.concatenate(seen, 1) * present[:, None]).reshape(*obs.shape[:2], self.size)


class TeamGame:
    """Sizes of a batched env, and what the networks see and do, as tensors (B envs, N agents).

    `obs_size` is a multiple of 8, with zeros behind what is seen: products of other widths are rounded by a row's place
    in the batch. The state of a grid game is all observations side by side, each of which shows the whole board.
    """

    def __init__(self, env: Any):
        spec, self.env = env.spec, env
        self.is_grid, self.is_battle = isinstance(env, GridEnv), "battle_won" in env.info
        self.shared_reward, self.continuous = not self.is_grid, bool(getattr(env, "continuous", False))
        self.num_envs, self.num_agents, self.num_actions = env.num_envs, spec.num_players, spec.num_actions
        self.nearby: Any = Nearby(env.game) if self.is_grid else None
        self.num_features = self.nearby.size + 1 if self.nearby else int(np.prod(spec.obs_shape))
        self.obs_size = 8 * -(-self.num_features // 8)
        self.state_size = self.num_agents * self.obs_size if self.is_grid else spec.state_shape[0]

    def observe(self) -> dict[str, torch.Tensor]:
        """obs (B, N, D), state (B, S), legal (B, N, A), alive (B, N) of the current step."""
        env = self.env
        seen = self._see(env.obs, env.t, None if self.is_grid else env.state)
        return seen | {"legal": torch.from_numpy(env.legal.copy()), "alive": torch.from_numpy(env.alive.copy())}

    def final(self, info: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """obs (B, N, D), state (B, S), alive (B, N) at the end of the episodes that are done; the rest is old."""
        obs = info["final_obs"]
        shown = obs[..., 0].any((2, 3)) if self.is_grid else obs.any(2)  # who has left sees nothing of itself
        seen = self._see(obs, info["episode_length"], info.get("final_state"))
        return seen | {"alive": torch.from_numpy(shown)}

    def _see(self, obs: np.ndarray, t: np.ndarray, state: Any) -> dict[str, torch.Tensor]:
        """Grid games add the time; nobody acts at the horizon, so a final observation counts as one step earlier."""
        seen = torch.zeros(*obs.shape[:2], self.obs_size)
        if not self.is_grid:
            seen[:, :, : self.num_features] = torch.from_numpy(obs)
            return {"obs": seen, "state": torch.from_numpy(state.copy())}
        horizon = self.env.spec.horizon
        seen[:, :, : self.num_features - 1] = torch.from_numpy(self.nearby(obs))
        seen[:, :, self.num_features - 1] = torch.from_numpy(np.minimum(t, horizon - 1) / horizon)[:, None]
        return {"obs": seen, "state": seen.flatten(1)}

    def env_actions(self, actions: torch.Tensor) -> np.ndarray:
        """Actions as the env takes them: -1..1 becomes 0..1 for forces."""
        return ((actions.clamp(-1, 1) + 1) / 2 if self.continuous else actions).cpu().numpy()

    def reward(self) -> np.ndarray:
        """(B, N) of the last step"""
        if self.is_grid:
            return self.env.out.reward
        return self.env.battles.reward if hasattr(self.env, "battles") else self.env.reward

    def set_start_window(self, window: int, prob: float) -> None:
        """From the next episode on, start with probability `prob` inside a random window x window square."""
        if not self.is_grid:
            raise envs.ConfigError(f"--start-window is for grid games only, not for {self.env.spec.env_id}")
        self.env.set_start_window(window, prob)


def pick(q_values: torch.Tensor, legal: torch.Tensor, epsilon: float, rng: torch.Generator) -> torch.Tensor:
    """Legal actions (M,) of the highest value (M, A), a share `epsilon` of them at random."""
    actions = q_values.masked_fill(~legal, -1e9).argmax(1)
    if epsilon > 0.0:
        chances = torch.rand(legal.shape, generator=rng) * legal
        explore = torch.rand(actions.shape, generator=rng) < epsilon
        actions = torch.where(explore, chances.argmax(1), actions)
    return actions


class ChoosingTeam:
    """A team whose agents move by `choose(seen, who) -> (M,)`: actions of the M agents of `who` (B, N) bool, row by
    row, computed for them alone. With a `seat` it moves only that agent (see envs/roles.py)."""

    game: TeamGame
    seat: int | None = None

    def choose(self, seen: dict[str, torch.Tensor], who: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def decide(self) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        """What was seen and the actions (B, N); who has fallen does the one thing that is legal."""
        seen = self.game.observe()
        actions = seen["legal"].int().argmax(2)
        actions[seen["alive"]] = self.choose(seen, seen["alive"])
        return seen, actions.numpy()

    def act(self, env: Any = None) -> np.ndarray:
        """(B, N) actions for the env, or (B,) of the seat"""
        if self.seat is None:
            return self.decide()[1]
        who = torch.zeros(self.game.num_envs, self.game.num_agents, dtype=torch.bool)
        who[:, self.seat] = True
        return self.choose(self.game.observe(), who).numpy()


def play_team(game: TeamGame, team: Any, kinds: list[str] | None = None) -> dict[str, float]:
    """Scores of a team (`act(env) -> (B, N)` and `watch(env, actions, info)`) over one fresh episode in each env, so
    that long and short ones count alike. `kinds`: names (B,) of what sorts of episodes they are; what each sort wins
    is told besides."""
    env, episodes = game.env, game.num_envs
    returns, lengths, won = np.zeros((episodes, game.num_agents)), np.zeros(episodes), np.zeros(episodes)
    running = np.ones(episodes, bool)
    while running.any():
        actions = team.act(env)
        info = env.step(actions)[-1]
        team.watch(env, actions, info)
        ended = running & info["done"]
        returns[ended], lengths[ended] = info["episode_return"][ended], info["episode_length"][ended]
        if game.is_battle:
            won[ended] = info["battle_won"][ended]
        running &= ~ended
    score = returns.mean(1)
    scores = {"return": score.mean(), "return_ci95": 1.96 * score.std() / episodes**0.5, "episodes": episodes}
    if game.is_battle:
        scores |= {"win_rate": won.mean(), "win_rate_ci95": 1.96 * won.std() / episodes**0.5}
        for kind in sorted(set(kinds or ())):
            scores[f"win_rate-{kind}"] = won[np.array(kinds) == kind].mean()
    if not game.shared_reward:
        scores |= {f"return-player{i + 1}": returns[:, i].mean() for i in range(game.num_agents)}
    return {name: float(value) for name, value in (scores | {"length": lengths.mean()}).items()}
