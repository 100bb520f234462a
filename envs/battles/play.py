"""Watch a team fight: a line about how each battle ended, a GIF of all of them, and a replay page."""

from __future__ import annotations

from typing import Any

from envs import battles
from envs.errors import ConfigError

TICKS_PER_FRAME = 2


def play(
    env_id: str, policy: str, episodes: int, seed: int, gif: str | None, fps: float, page: str = "", **overrides: Any
) -> list[dict[str, Any]]:
    """Play `episodes` battles and print how each ended; returns one dict per battle. `policy` is a rule-based team, or
    the run folder of a trained one."""
    from envs.pool import mixed_team
    from envs.render import write_gif
    from envs.replay import Replay, label_of, play_battle

    if episodes < 1 or not fps > 0:
        raise ConfigError(f"episodes and fps must be above 0, not {episodes} and {fps}")
    battle = battles.parallel_env(env_id, **overrides)
    team = mixed_team(policy.split(","), battle.env, seed, greedy=False)
    battle.reset(seed=seed)
    label = label_of(policy, battle.env)
    replay = Replay(battle.env, [label] * battle.env.spec.num_players, seed) if page else None
    outcomes: list[dict[str, Any]] = []
    shown: list[Any] = []  # moments
    ends: list[int] = []
    count = 0
    for moment in play_battle(battle, team, episodes, replay, TICKS_PER_FRAME):
        shown += [moment] if gif else []
        count += 1
        if not battle.agents and battle.outcome() and getattr(moment, "caption", "x"):
            ends.append(count - 1)
            total, length = float(battle.env.info["episode_return"][0, 0]), int(battle.env.info["episode_length"][0])
            outcomes.append({"outcome": battle.outcome(), "return": total, "length": length})
            print(f"episode {len(outcomes)}: {battle.outcome()}, return {total:.2f}, length {length}")
    if episodes > 1:
        wins = sum(outcome["outcome"] == "won" for outcome in outcomes)
        mean = sum(outcome["return"] for outcome in outcomes) / episodes
        print(f"{label} on {env_id}: won {wins} of {episodes}, mean return {mean:.2f}")
    if gif:
        write_gif(gif, battle.pictures(shown, label), fps, ends)
        print(f"wrote {gif} ({len(shown)} frames)")
    if replay:
        replay.write(page)
        print(f"wrote {page}: open it in a browser")
    battle.close()
    return outcomes
