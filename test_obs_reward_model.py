"""Judge a world model: one-step errors, impossible predictions, ends, calibration, and errors over imagined steps.

A tool, not a test (pytest does not collect it). Without arguments it takes the newest world model of vae_ckpts/ and
makes fresh data with rule-based players; pictures go to the checkpoint's folder.

    python test_obs_reward_model.py
    python test_obs_reward_model.py --checkpoint vae_ckpts/world_model__1700000000 --data vae_ckpts/data/<file>.npz
    python test_obs_reward_model.py --policy runs/<run> --json scores.json       # on a trained policy's own play
"""

from __future__ import annotations

from envs import ConfigError  # first: from here on Ctrl-C is one line

# isort: split
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro

from envs.checkpoints import write_json
from envs.folders import check_output
from envs.offline import main
from envs.recording import collect_transitions, load_transitions
from envs.run import Positive, Range, Whole, check_ranges
from train_world_model import Args as TrainArgs
from train_world_model import default_lineups, error_growth, find_checkpoint, judge, load_checkpoint, views


@dataclass
class Args:
    # run
    checkpoint: str = ""
    """folder of a world model; empty: the newest under --ckpt-dir"""
    ckpt_dir: str = "vae_ckpts"
    """where to look for the newest one"""
    json: str = ""
    """also write all figures to this file"""
    pictures: bool = True
    """draw soft_triplets.png, calibration.png and error_growth.png into the checkpoint's folder"""
    tag: str = ""
    """ending of the pictures' names, to keep those of several data sets apart"""
    torch_threads: Positive = 1
    """threads of torch"""

    # data
    data: str = ""
    """an .npz of transitions; empty: play anew"""
    policy: str = ""
    """a run folder or checkpoint whose policy plays the fresh data in all seats, without noise"""
    lineups: tuple[str, ...] = ()
    """line-ups that play the fresh data, as in train_world_model.py"""
    num_transitions: Annotated[int, Range(1, 10**8), tyro.conf.arg(metavar="1..1e8")] = 10_000
    """size of the fresh data"""
    seed: Whole = 1001
    """seed of the fresh data"""

    # evaluation
    steps: Annotated[int, Range(1, 1000), tyro.conf.arg(metavar="1..1000")] = 10
    """imagined steps"""


def reliability(model, data: dict[str, Any], bins: int = 10) -> dict[str, np.ndarray]:
    """Predicted chances against what happened, over all cells of all player and item planes, and for ends."""
    edges = np.linspace(0, 1, bins + 1)
    count, chance, happened = np.zeros(bins), np.zeros(bins), np.zeros(bins)
    rewards = []
    for _, view in views(data, model.game):
        out = model.predict(view["obs"], view["actions"], view["t"])
        for guess, truth in ((out["planes"], view["next_obs"]), (out["end"], view["end"].float())):
            guess, truth = guess.flatten().clamp(0, 1).double().numpy(), truth.flatten().double().numpy()
            where = np.minimum((guess * bins).astype(int), bins - 1)
            count += np.bincount(where, minlength=bins)
            chance += np.bincount(where, guess, minlength=bins)
            happened += np.bincount(where, truth, minlength=bins)
        rewards.append(torch.stack([view["reward"], out["reward"]], 1).numpy())
    with np.errstate(invalid="ignore"):
        error = np.nansum(count * np.abs(chance - happened) / count) / count.sum()  # expected calibration error
        return {
            "edges": edges, "count": count, "predicted": chance / count, "observed": happened / count,
            "ece": error, "rewards": np.concatenate(rewards),
        }  # fmt: skip


def draw_triplets(path: Path, model, data: dict[str, Any]) -> None:
    """Before, true, predicted and error, plane by plane, with the numbers in the cells: a rewarded step, and the step
    with the largest error."""
    import matplotlib.pyplot as plt

    names, examples, worst = model.game.plane_names, {}, -1.0
    for _, view in views(data, model.game):
        out = model.predict(view["obs"], view["actions"], view["t"])
        error = (out["planes"] - view["next_obs"]).abs().flatten(1).amax(1)
        paid = np.flatnonzero(np.abs(view["reward"].numpy()) > 1e-6)
        picks = {"largest error": int(error.argmax())} if error.max() > worst else {}
        worst = max(worst, float(error.max()))
        picks |= {"a rewarded step": int(paid[0])} if len(paid) and "a rewarded step" not in examples else {}
        for title, k in picks.items():
            acts = ", ".join(model.game.action_names[a] for a in view["actions"][k])
            told = f"{title}: own first, the players do {acts}; reward {view['reward'][k]:.3f}, predicted"
            told += f" {out['reward'][k]:.3f}; end {bool(view['end'][k])}, predicted {out['end'][k]:.3f}"
            planes = [view["obs"][k], view["next_obs"][k], out["planes"][k], out["planes"][k] - view["next_obs"][k]]
            examples[title] = told, [plane.numpy() for plane in planes]
    height, width = model.game.obs_shape[:2]
    figure = plt.figure(figsize=(1.45 * len(names) + 0.8, 6.6 * len(examples)), layout="constrained")
    parts = np.atleast_1d(figure.subfigures(len(examples), 1))
    for part, (told, planes) in zip(parts, examples.values(), strict=True):
        part.suptitle(told, fontsize=9)
        axes = part.subplots(4, len(names))
        for r, (title, values) in enumerate(zip(("before", "true", "predicted", "error"), planes, strict=True)):
            for c, name in enumerate(names):
                axis, grid = axes[r, c], values[:, :, c]
                axis.imshow(grid, vmin=-1 if r == 3 else 0, vmax=1, cmap="RdBu_r" if r == 3 else "Greens")
                axis.set(xticks=[], yticks=[], title=name if r == 0 else "", ylabel=title if c == 0 else "")
                for (y, x), value in np.ndenumerate(grid):
                    if height * width <= 25 or abs(value) >= 0.005:
                        text = "0" if value == 0 else "1" if value == 1 else f"{value:.2f}"
                        text = text if abs(value) >= 0.005 or value == 0 else f"{value:.0e}".replace("e-0", "e-")
                        dark = abs(value) > 0.6
                        axis.text(x, y, text, ha="center", va="center", size=6, color="w" if dark else "#555555")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_calibration(path: Path, figures: dict[str, np.ndarray]) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    middle = (figures["edges"][1:] + figures["edges"][:-1]) / 2
    axes[0].bar(middle, figures["count"], 0.9 * (middle[1] - middle[0]), color="#4477aa", log=True)
    axes[0].set(xlabel="predicted probability", ylabel="cells and ends", title="how sure the model is")
    some = figures["count"] > 0
    size = 12 + 18 * np.log10(figures["count"][some])
    axes[1].plot([0, 1], [0, 1], ":", color="#999999")
    axes[1].scatter(figures["predicted"][some], figures["observed"][some], s=size, color="#4477aa", alpha=0.8)
    for x, y, n in zip(*(figures[name][some] for name in ("predicted", "observed", "count")), strict=True):
        axes[1].annotate(f"{int(n)}", (x, y), xytext=(5, -9 if x < 0.5 else 6), textcoords="offset points", size=6.5)
    title = f"and how often it is right (expected error {figures['ece']:.1e})"
    axes[1].set(xlabel="predicted probability", ylabel="observed frequency", title=title)
    truth, guess = figures["rewards"].T
    low, high = figures["rewards"].min() - 0.3, figures["rewards"].max() + 0.3
    axes[2].plot([low, high], [low, high], ":", color="#999999")
    axes[2].scatter(truth, guess, s=14, alpha=0.4, color="#ee7733")
    axes[2].set(xlabel="true reward", ylabel="predicted (mean)", title="rewards of the focal player")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_growth(path: Path, growth: dict[str, list[float]]) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    steps = np.arange(1, len(growth["exact"]) + 1)
    axes[0].plot(steps, growth["exact"], "o-", label="board exact at this step")
    axes[0].plot(steps, growth["all_exact"], "s--", label="board and end exact all the way")
    axes[0].set(xlabel="imagined steps", ylabel="share of runs", title=f"{growth['runs'][0]} imagined runs")
    axes[0].set_ylim(min(0.9, min(growth["all_exact"]) - 0.02), 1.005)
    axes[0].legend(frameon=False, fontsize=8, loc="lower left")
    axes[1].plot(steps, growth["misplaced"], "o-", color="#ee7733", label="players in a wrong cell")
    axes[1].plot(steps, 1 - np.array(growth["ends_right"]), "s--", color="#999999", label="wrong about the end")
    axes[1].set(xlabel="imagined steps", ylabel="share", title="errors")
    axes[1].set_ylim(-0.0005, max(0.01, 1.1 * max(growth["misplaced"]), 1.1 * (1 - min(growth["ends_right"]))))
    axes[1].legend(frameon=False, fontsize=8, loc="upper left")
    for axis in axes:
        axis.set_xticks(steps)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def report(args: Args) -> dict[str, Any]:
    check_ranges(args)
    if args.json:
        check_output("--json", args.json)
    torch.set_num_threads(args.torch_threads)

    # model
    newest = find_checkpoint(args.ckpt_dir, planes=None)
    if not args.checkpoint and newest is None:
        raise ConfigError(f"no world model under '{args.ckpt_dir}'; run train_world_model.py or give --checkpoint")
    folder = Path(args.checkpoint or newest)
    model, _ = load_checkpoint(folder)
    game = model.game
    print(f"[INFO] loaded model. obs_shape={game.obs_shape}, action_dim={game.num_actions}")

    # data
    if args.data:
        data = load_transitions(args.data, game)
    else:
        lineups, noise = args.lineups or default_lineups(game), TrainArgs.noise
        if args.policy:
            lineups, noise = (args.policy,), 0.0
        data = collect_transitions(game, lineups, noise, args.num_transitions, np.random.SeedSequence(args.seed))
    print(f"[INFO] dataset size={len(data['end'])}, inferred n_agents={data['actions'].shape[1]}")

    # figures
    scores = judge(model, data)
    growth = error_growth(model, data, args.steps)
    calibration = reliability(model, data)
    print(f"Obs MSE: {scores['obs_mse']:.3e}")
    print(f"PSNR: {scores['psnr']:.2f} dB")
    print(f"Reward MSE: {scores['reward_mse']:.3e}")
    print("Per-channel MSE: " + ", ".join(f"{name} {mse:.2e}" for name, mse in scores["channel_mse"].items()))
    print(f"Exact next states: {scores['exact']:.5f} (on rewarded steps: {scores['exact_rewarded']:.5f})")
    print(f"Physically impossible predictions: {scores['impossible']:.5f}")
    print(f"Ends: accuracy {scores['end_accuracy']:.5f}, of true ends found {scores['end_recall']:.5f}")
    print(f"Calibration: expected error {calibration['ece']:.2e}")
    print("Reward by value:")
    for value, figures in scores["reward_by_value"].items():
        print(f"  {value:>8}: {figures['count']:6d} times, MSE {figures['mse']:.2e}, exact {figures['exact']:.4f}")
    if growth:
        print(f"Imagined steps ({growth['runs'][0]} runs): board exact | exact all the way | misplaced players")
        for k in range(args.steps):
            row = (growth[name][k] for name in ("exact", "all_exact", "misplaced"))
            print(f"  {k + 1:3d}: " + " | ".join(f"{share:.5f}" for share in row))

    # files
    scores |= {"imagined": growth, "calibration_error": float(calibration["ece"]), "checkpoint": str(folder)}
    if args.json:
        write_json(Path(args.json), scores)
    if args.pictures:
        tag = f"_{args.tag}" if args.tag else ""
        draw_triplets(folder / f"soft_triplets{tag}.png", model, data)
        draw_calibration(folder / f"calibration{tag}.png", calibration)
        if growth:
            draw_growth(folder / f"error_growth{tag}.png", growth)
        print(f"[INFO] pictures in {folder}")
    return scores


if __name__ == "__main__":
    sys.exit(main(Args, report))
