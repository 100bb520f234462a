"""Watch a rule-based team fight: a line about how each battle ended, and a GIF of all of them."""

from __future__ import annotations

from typing import Any

from envs import battles
from envs.battles.teams import make_team
from envs.errors import ConfigError

TICKS_PER_FRAME = 2


def play(
    env_id: str, policy: str, episodes: int, seed: int, gif: str | None, fps: float, **overrides: Any
) -> list[dict[str, Any]]:
    """Play `episodes` battles and print how each ended; returns one dict per battle."""
    if episodes < 1 or not fps > 0:
        raise ConfigError(f"episodes and fps must be above 0, not {episodes} and {fps}")
    battle = battles.parallel_env(env_id, **overrides)
    team = make_team(policy, battle.env, seed)
    battle.reset(seed=seed)
    outcomes: list[dict[str, Any]] = []
    shown: list[Any] = []  # moments
    ends: list[int] = []
    for episode in range(episodes):
        if episode:
            battle.reset()
        shown += battle.moments(TICKS_PER_FRAME) if gif else []
        total, length = 0.0, 0
        while battle.agents:
            actions = team()[0].tolist()
            _, rewards, _, _, _ = battle.step(dict(zip(battle.possible_agents, actions, strict=True)))
            total, length = total + rewards[battle.possible_agents[0]], length + 1
            shown += battle.moments(TICKS_PER_FRAME) if gif else []
        ends.append(len(shown) - 1)
        outcomes.append({"outcome": battle.outcome(), "return": total, "length": length})
        print(f"episode {episode + 1}: {battle.outcome()}, return {total:.2f}, length {length}")
    if episodes > 1:
        wins = sum(outcome["outcome"] == "won" for outcome in outcomes)
        mean = sum(outcome["return"] for outcome in outcomes) / episodes
        print(f"{policy} on {env_id}: won {wins} of {episodes}, mean return {mean:.2f}")
    if gif:
        from envs.render import write_gif

        write_gif(gif, battle.pictures(shown), fps, ends)
        print(f"wrote {gif} ({len(shown)} frames)")
    battle.close()
    return outcomes
