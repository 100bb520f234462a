"""What MAPPO and hyper-MAPPO cost: env steps per second, and the shares of env, policy and update, measured in one run.

    python benchmarks/mappo_speed.py --maps 3m 8m 2s3z --repeats 3 [--json speed.json] [-- --hyper-input local ...]

Every repeat plays one rollout and makes one whole update with each algorithm in turn, so that both see the same load of
the machine; the reported time is the processor's, the median over the repeats after one that does not count. Flags
after `--` are mappo_hyper.py's own, for both algorithms.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import mappo_hyper as mh
from envs.arguments import parse


class Measured:
    """One algorithm on one map, without logging, checkpoints and evaluation; books time as a run does."""

    def __init__(self, argv: list[str]):
        self.args = parse(mh.Args, None, argv)
        self.game = mh.TeamGame(mh.make_env(self.args.env_id, self.args.num_envs, 1))
        self.agent = mh.Agent(self.args, self.game, torch.Generator().manual_seed(0))
        self.team = mh.Team(self.agent, self.game, torch.Generator().manual_seed(0))
        self.optimizer, self.generator = mh.make_optimizer(self.args, self.agent), torch.Generator().manual_seed(0)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0  # or else one algorithm would soon have more agents on the field than the other
        self.batch, self.outcome, self.starts, self.iterations = {}, {}, {}, 0

    def clock(self, part: str) -> None:
        now = time.process_time()
        self.spent[part] += now - self.clock_at
        self.clock_at = now

    def count(self, info: dict[str, np.ndarray]) -> None:
        """Episodes are of no interest here."""

    def iteration(self) -> dict[str, float]:
        """Seconds of processor time of each part of one iteration."""
        args, agent, before = self.args, self.agent, dict(self.team.memory)
        self.spent, self.clock_at = dict.fromkeys(("env", "policy", "update"), 0.0), time.process_time()
        mh.rollout(args, self.team, self.batch, self.outcome, self.starts, self)
        values, batch = self.outcome["values"], dict(self.batch)
        advantages = torch.randn(values.shape, generator=self.generator)
        batch |= {"returns": values + advantages, "advantages": advantages.expand_as(batch["alive"]).contiguous()}
        if agent.hyper is not None:  # right after a copy the reference is the policy that acted
            self.iterations += 1
            copied = self.iterations % (args.target_every // (args.update_epochs * args.num_minibatches)) == 0
            batch["reference"] = batch["policy"] if copied else mh.reference_of(agent, batch, before, agent.hyper)[0]
        mh.update(args, agent, self.optimizer, batch, self.starts, 0.01, self.generator)
        self.clock("update")
        return self.spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--maps", nargs="+", default=["3m", "8m", "2s3z"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", default="")
    parser.add_argument("flags", nargs="*", help="flags of mappo_hyper.py, after --")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print("| map | algorithm | steps/s | env | policy | update | cost per step |\n|---|---|---|---|---|---|---|")
    for name in options.maps:
        env_id = name if name.startswith(("smac", "msh", "msd", "mpe")) else f"smac-{name}"
        runs = {"MAPPO": Measured(["--env-id", env_id, "--no-hyper", *options.flags])}
        runs["hyper-MAPPO"] = Measured(["--env-id", env_id, *options.flags])
        spent = {label: [] for label in runs}
        for _ in range(options.repeats + 1):
            for label, run in runs.items():
                spent[label].append(run.iteration())
        base = None
        for label, run in runs.items():
            parts = {part: float(np.median([x[part] for x in spent[label][1:]])) for part in spent[label][0]}
            total = sum(parts.values())
            base = base or total
            shares = {part: seconds / total for part, seconds in parts.items()}
            row = {"env_id": env_id, "algorithm": label, "sps": run.args.batch_size / total}
            rows.append(row | shares | {"cost": total / base})
            text = " | ".join(f"{100 * share:.0f} %" for share in shares.values())
            print(f"| {name} | {label} | {rows[-1]['sps']:.0f} | {text} | {total / base:.2f} |", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
