"""Boards, and networks with random or given weights, for the tests of HOP+."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
import torch

import envs
import pretrain_vae
from envs.grid import DEADLINE, PLAYERS, T
from envs.run import main

ID = "msh-4h1s-4x4"
STAG, HARE = 5, 6  # actions
TINY = ["--num-envs", "8", "--num-steps", "8", "--eval-every", "256", "--eval-episodes", "8",
        "--final-eval-episodes", "8", "--hidden-size", "16", "--offline-steps", "600", "--batch-rows", "64",
        "--log-every", "2", "--checkpoint-every", "3", "--total-timesteps", "512", "--seed", "5"]  # fmt: skip
TINY_OWN = {
    "hopplus_mcts": ["--trees", "2", "--simulations", "4", "--dream-envs", "4", "--updates", "2"],
    "hopplus_nomcts": ["--draws", "2", "--update-epochs", "1", "--moa-updates", "2", "--world-updates", "2",
                       "--imagine-horizon", "5", "--real-ratio", "0.5"],
}  # fmt: skip
CLOCKS = re.compile(r"wall_time|charts/SPS|planner/sims_per_second|time/.*")  # never the same twice


def make_state(game, players, items: dict[int, int], t: int = 0) -> np.ndarray:
    """One state row; items: {cell: code of the board}."""
    state = np.zeros(game.state_size, np.int16)
    state[T], state[DEADLINE], state[PLAYERS : PLAYERS + game.num_players] = t, game.config.horizon, players
    for cell, code in items.items():
        state[PLAYERS + game.num_players + cell] = code
    return state


def random_step(env, rng: np.random.Generator) -> np.ndarray:
    """Any legal actions of everybody, stepped; returns them."""
    actions = (rng.random(env.legal.shape) * env.legal).argmax(2)
    env.step(actions)
    return actions


def play_some(env_id: str = ID, num: int = 60, seed: int = 1, steps: int = 12, **overrides):
    """A game and states of all stages of random play: row k has made k % steps moves."""
    env = envs.make(env_id, num_envs=num, seed=seed, **overrides)
    rng, states = np.random.default_rng(seed), env.states.copy()
    for step in range(steps):
        states[np.arange(num) % steps == step] = env.states[np.arange(num) % steps == step]
        random_step(env, rng)
    return env.game, states


def turn_seats(game, states: np.ndarray) -> np.ndarray:
    """The same boards, whoever sat in seat i sits in seat i + 1."""
    turned, seats = states.copy(), slice(PLAYERS, PLAYERS + game.num_players)
    turned[:, seats] = np.roll(states[:, seats], 1, axis=1)
    return turned


def make_models(game, goal_mode: str = "oracle", seed: int = 0) -> pretrain_vae.GoalModels:
    """Goal space, opponent model and reader with random weights; the opponent model prefers some actions clearly."""
    args = pretrain_vae.Args(goal_mode=goal_mode, hidden_size=16, vae_hidden_size=16, dim=8)
    torch.manual_seed(seed)
    models = pretrain_vae.GoalModels(pretrain_vae.sizes_of(args, game.spec(), game, list(game.kinds)))
    with torch.no_grad():
        models.moa.head.weight *= 20.0
        models.moa.head.bias += 0.3 * torch.randn(game.num_actions)
    return models


def make_nets(hop, game, goal_mode: str = "oracle", seed: int = 0, world=None, **settings):
    """All networks of a script (module `hop`) with random weights, and its Args."""
    args = hop.Args(goal_mode=goal_mode, hidden_size=16, **settings)
    more = (world,) if hop.__name__ == "hopplus_nomcts" else ()
    nets = hop.make_nets(args, game, make_models(game, goal_mode, seed), *more, seed=seed)
    with torch.no_grad():
        agent = nets["agent"]
        agent.policy_head.weight *= 100.0
        for layer in (agent.policy_head, agent.value_head, agent.critic):
            layer.bias += 0.3 * torch.randn(layer.bias.shape)
    return args, nets


def blank_nets(hop, game, **settings):
    """Networks of zeros, to be filled by hand: a uniform policy, value 0, others that move at random."""
    args, nets = make_nets(hop, game, "none", **settings)
    for weight in nets.parameters():
        weight.requires_grad_(False).zero_()
    return args, nets


def pretrain(folder: Path, env_id: str = ID, goal_mode: str = "learned") -> str:
    """A goal checkpoint of seconds."""
    small = {"num_steps": 1500, "epochs": 1, "hidden_size": 16, "vae_hidden_size": 32, "dim": 8, "reader_updates": 5}
    args = pretrain_vae.Args(out_dir=str(folder), env_id=env_id, goal_mode=goal_mode, lineups=("mix",), **small)
    args.pictures = False
    return str(pretrain_vae.train(args))


def run_script(hop, run_dir: Path, *flags: str) -> int:
    """A short run of a script in this process, which has everything compiled already; returns the exit code."""
    return main(hop.Args, hop.train, ["--run-dir", str(run_dir), *TINY, *TINY_OWN[hop.__name__], *flags])


def read_metrics(run_dir: Path) -> list[dict[str, str]]:
    with (run_dir / "metrics.csv").open(newline="") as file:
        return [{name: x for name, x in row.items() if not CLOCKS.fullmatch(name)} for row in csv.DictReader(file)]
