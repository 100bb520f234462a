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
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import mappo_hyper as mh


class Run:
    """One algorithm on one map, without logging, checkpoints and evaluation."""

    def __init__(self, argv: list[str]):
        self.args = tyro.cli(mh.Args, args=argv)
        self.game = mh.Game(mh.make_env(self.args, self.args.num_envs, 1))
        self.agent = mh.Agent(self.args, self.game, torch.Generator().manual_seed(0))
        self.team = mh.Team(self.agent, self.game, torch.Generator().manual_seed(0))
        parts = [part for part in (self.agent.actor, self.agent.critic, self.agent.hyper) if part is not None]
        groups = [{"params": list(part.parameters())} for part in parts]
        self.optimizer = torch.optim.Adam(groups, lr=1e-4, eps=1e-5, foreach=True)
        self.generator = torch.Generator().manual_seed(0)

    def iteration(self) -> dict[str, float]:
        """Seconds of processor time of each part of one iteration."""
        args, agent, team, env = self.args, self.agent, self.team, self.game.env
        spent, clock = dict.fromkeys(("env", "policy", "update"), 0.0), time.process_time()

        def spend(part: str) -> None:
            nonlocal clock
            now = time.process_time()
            spent[part] += now - clock
            clock = now

        steps, starts, before = [], [], team.states
        for step in range(args.num_steps):
            if step % args.chunk_length == 0:
                starts.append(team.states)
            seen, policy, actions = team.decide()
            with torch.no_grad():
                values, memory = agent.critic(seen, team.states.get("critic"))
            if memory is not None:
                team.states["critic"] = memory
            seen |= {"policy": policy, "actions": actions, "values": values}
            steps.append(seen | {"log_probs": mh.log_prob_of(policy, actions, self.game.continuous)})
            spend("policy")
            orders = self.game.orders(actions[0])
            info = env.step(orders)[-1]
            team.watch(env, orders, info)
            spend("env")
        batch = {name: torch.cat([step[name] for step in steps]) for name in steps[0]}
        batch["advantages"] = torch.randn(batch["values"].shape)
        batch["returns"] = batch["values"] + batch["advantages"]
        batch["counted"] = torch.ones_like(batch["values"], dtype=torch.bool) if self.game.team else batch["alive"]
        if agent.hyper is not None:
            with torch.no_grad():
                batch["reference"] = agent.policy(batch, before)[0]
        chunks = {name: mh.chunks_of(x, args.chunk_length) for name, x in batch.items()}
        states = {name: torch.cat([start[name] for start in starts]) for name in starts[0]}
        mh.update(args, agent, self.optimizer, chunks, states, 0.01, 0.0, self.generator)
        spend("update")
        return spent


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
        runs = {"MAPPO": Run(["--env-id", env_id, "--no-hyper", *options.flags])}
        runs["hyper-MAPPO"] = Run(["--env-id", env_id, *options.flags])
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
            rows.append(
                {
                    "env_id": env_id,
                    "algorithm": label,
                    "sps": run.args.batch_size / total,
                    **shares,
                    "cost": total / base,
                }
            )
            text = " | ".join(f"{100 * share:.0f} %" for share in shares.values())
            print(f"| {name} | {label} | {rows[-1]['sps']:.0f} | {text} | {total / base:.2f} |", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
