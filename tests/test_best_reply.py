"""experiments/best_reply.py: player 1 searches more, or with the others' own network, among the same three players."""

from pathlib import Path

import numpy as np
import pytest
import torch
from boards import pretrain, run_script

import envs
import hopplus_mcts
from envs.errors import ConfigError
from envs.roles import load_policy
from envs.run import load_script

best_reply = load_script(Path(__file__).resolve().parent.parent / "experiments/best_reply.py")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("best_reply")
    goals = pretrain(folder / "goals")
    assert run_script(hopplus_mcts, folder / "run", "--vae-ckpt", goals, "--total-timesteps", "128") == 0
    return str(folder / "run")


def test_who_knows_asks_the_agents_own_network(run):
    """What the others do at the nodes of its trees is the raw policy with unknown goals."""
    env = envs.make("msh-4h1s-4x4", num_envs=9, seed=4)
    policy = load_policy(run, env, 0, 1)
    planner, asked = policy.planner, []
    knowing = best_reply.knowing(planner)

    class Watched(knowing):
        def ask_others(self, count):
            found = super().ask_others(count)
            seen, t, legal = (torch.from_numpy(column[:count].copy()) for column in self.other[2:5])
            unknown = self.unknown_goal.expand(count, 3, -1)
            expected = self.nets["agent"](seen, t, legal, unknown)[0].exp().detach().numpy()
            assert found == pytest.approx(expected, abs=1e-4)
            asked.append(count)
            return found

    planner.__class__ = Watched
    policy.act(env)
    assert sum(asked) > 9


def test_the_table_compares_the_same_starts(run, capsys):
    best_reply.main(best_reply.Args((run, run), episodes=12, simulations=9))
    _, _, *rows = capsys.readouterr().out.splitlines()
    cells = [row.strip("| ").split(" | ") for row in rows]
    assert [row[0] for row in cells] == ["as the others", "9 simulations", "9 simulations, the others' own network"]
    assert cells[0][3] == "+0.000 +- 0.000" and cells[0][4] == "+0.000, +0.000"
    args = best_reply.Args((run,), episodes=12)
    usual, more = (best_reply.play(args, run, simulations, False) for simulations in (0, 9))
    gain = (more - usual)[:, 0]  # the two runs are one and the same
    assert cells[1][1] == f"{more[:, 0].mean():.3f}" and cells[1][2] == f"{more[:, 1:].mean():.3f}"
    assert cells[1][3] == f"{gain.mean():+.3f} +- {1.96 * gain.std() / 24**0.5:.3f}"
    assert np.unique(usual).size > 1


def test_other_players_are_refused(run):
    with pytest.raises(ConfigError, match="name at least one run folder"):
        best_reply.main(best_reply.Args(()))
    spec = Path(run) / "checkpoints/last/spec.json"
    with pytest.raises(ConfigError, match="nowhere"):
        best_reply.play(best_reply.Args((run,)), str(spec.parent.parent / "nowhere"), 0, False)
