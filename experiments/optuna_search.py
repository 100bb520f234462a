"""A search by Optuna (pip install optuna): each trial is a run of its own, judged by its final evaluation.

    python experiments/optuna_search.py --trials 20 --jobs 2
    python experiments/optuna_search.py --trials 20 --study runs/optuna.db     # goes on where it stood

`suggest` is the place to change: what is searched, and in which ranges. Settings that win here were chosen on these
seeds, so judge them on others (`sweep.py`).
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import optuna

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from envs.run import Count, Positive, guarded, parse  # noqa: E402


@dataclass
class Args:
    script: str = "ppo_baseline.py"
    """which training script"""
    trials: Positive = 20
    """settings to try"""
    jobs: Count = 1
    """runs side by side"""
    total_timesteps: Positive = 100_000
    """env steps of each run"""
    seed: Positive = 1
    """of the search, and of each run"""
    study: str = ""
    """an SQLite file to keep the study in (default: in memory)"""
    more: str = ""
    """further settings of every run, as on its command line: --more='--env-id msd-4x4'"""


def suggest(trial: optuna.Trial) -> list[str]:
    """The settings of a trial, as words of a command line."""
    learning_rate = trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True)
    ent_coef = trial.suggest_float("ent_coef", 1e-3, 1e-1, log=True)
    num_steps = trial.suggest_categorical("num_steps", [8, 16, 32])
    return [f"--learning-rate={learning_rate}", f"--ent-coef={ent_coef}", f"--num-steps={num_steps}"]


def main(args: Args) -> int:
    def score(trial: optuna.Trial) -> float:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(ROOT / args.script), "--run-dir", f"{folder}/run", *suggest(trial)]
            command += [f"--total-timesteps={args.total_timesteps}", f"--seed={args.seed}", *args.more.split()]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise optuna.TrialPruned(done.stderr)
            return json.loads(Path(folder, "run", "result.json").read_text())["eval"]["return"]

    storage = f"sqlite:///{args.study}" if args.study else None
    sampler = optuna.samplers.TPESampler(seed=args.seed)
    study = optuna.create_study(storage=storage, sampler=sampler, study_name=args.script, direction="maximize",
                                load_if_exists=True)  # fmt: skip
    study.optimize(score, n_trials=args.trials, n_jobs=args.jobs)
    print(f"best return {study.best_value:.3f} with {study.best_params}")
    return 0


if __name__ == "__main__":
    sys.exit(guarded(lambda _: main(parse(Args, __doc__))))
