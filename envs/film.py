"""Films of any game as GIFs, and what a run shows of itself: a film at each evaluation, a replay page at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import envs
from envs import replay
from envs.checkpoints import write_checkpoint
from envs.pool import mixed_team
from envs.render import picture, write_gif
from envs.replay import label_of, play_battle, play_grid
from envs.roles import Seats, parse_roles
from envs.system import remove

SETTINGS = ("max_block_comp", "start_jitter")  # of a game, as far as scripts change them
TICKS = 2  # of a battle, for each picture: four pictures a step


def film(path: str | Path, env_id: str, roles: str, seed: int, greedy: bool, settings: dict, fps: float) -> None:
    """One episode as a GIF; `fps` counts steps (2 is the own speed of battles)."""
    if env_id.startswith(envs.BATTLES):
        battle = envs.parallel_env(env_id, **settings)
        battle.reset(seed=seed)
        team = mixed_team(roles.split(","), battle.env, seed, greedy)
        moments = list(play_battle(battle, team, 1, ticks=TICKS))
        write_gif(path, battle.pictures(moments, label_of(roles, battle.env)), 4 * fps)
        battle.close()
        return
    env = envs.make(env_id, num_envs=1, seed=seed, **settings)
    names = parse_roles(roles, env.spec.num_players, "random")
    labels = [label_of(role, env) for role in names]
    views = play_grid(env, Seats(env, names, None, seed, greedy), labels, 1)
    write_gif(path, [picture(view) for view in views], fps)


def capture(run: Any, page: bool = False) -> Path:
    """One episode of the present weights as <run>/videos/step-<n>.gif, or three as <run>/replay.html."""
    args, checkpoint = run.args, run.dir / "checkpoints" / "shown"
    write_checkpoint(checkpoint, run.net.state_dict(), None, run.spec_of_now())
    try:
        if args.env_id.startswith(envs.BATTLES):
            roles = str(checkpoint)
        else:
            others = parse_roles(getattr(args, "roles", ""), len(run.player_names), "")
            roles = ",".join(str(checkpoint) if seat in run.learners else role for seat, role in enumerate(others))
        settings = {name: value for name, value in run.facts_of_spec["env_config"].items() if name in SETTINGS}
        with torch.random.fork_rng():  # networks are made with weights that are thrown away
            if page:
                path = run.dir / "replay.html"
                replay.record(args.env_id, roles, 3, args.seed, False, settings).write(path)
            else:
                path = run.dir / "videos" / f"step-{run.step}.gif"
                path.parent.mkdir(exist_ok=True)
                film(path, args.env_id, roles, args.seed, False, settings, 2.0)
    finally:
        remove(checkpoint)
    return path
