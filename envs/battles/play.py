"""Watch a rule-based team fight: outcome lines, and a GIF of all battles."""

from __future__ import annotations

from typing import Any

from envs import battles
from envs.battles.teams import make_team
from envs.errors import ConfigError

TICKS_PER_FRAME = 2


def play(
    env_id: str, policy: str, episodes: int, seed: int, gif: str | None, fps: int, **overrides: Any
) -> list[dict[str, Any]]:
    """Play `episodes` battles and print how each ended; returns one dict per battle."""
    for name, value in (("episodes", episodes), ("fps", fps)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
    battle = battles.parallel_env(env_id, **overrides)
    team = make_team(policy, battle.env, seed)
    battle.reset(seed=seed)
    outcomes, frames = [], []
    for episode in range(episodes):
        if episode:
            battle.reset()
        frames += battle.frames() if gif else []
        total, length = 0.0, 0
        while battle.agents:
            actions = team()[0].tolist()
            _, rewards, _, truncated, infos = battle.step(dict(zip(battle.possible_agents, actions, strict=True)))
            first = battle.possible_agents[0]
            total, length = total + rewards[first], length + 1
            frames += battle.frames(TICKS_PER_FRAME) if gif else []
        outcome = "won" if infos[first]["battle_won"] else "time is up" if truncated[first] else "lost"
        outcomes.append({"outcome": outcome, "return": total, "length": length})
        print(f"episode {episode + 1}: {outcome}, return {total:.2f}, length {length}")
    if gif:
        from envs.battles.render import write_gif

        write_gif(frames, gif, fps)
        print(f"wrote {gif} ({len(frames)} frames)")
    battle.close()
    return outcomes
