"""--device: every training script on a stand-in for a GPU (tests/stand_in.py), from its first step to its result."""

import json
import shutil

import pytest
import torch
import torch.optim.optimizer as optimizers
from safetensors.torch import load_file
from stand_in import DEVICE, Elsewhere, Generator, StandIn
from test_run import ROOT, SCRIPTS, arguments, rows_of

from envs import run as recorder
from envs.devices import find_device
from envs.run import load_script, main


@pytest.fixture
def stand_in(monkeypatch):
    """The stand-in in the place of CUDA."""
    with monkeypatch.context() as patch:
        patch.setattr(recorder, "find_device", lambda name: DEVICE if name == "cuda" else torch.device(name))
        patch.setattr(torch, "Generator", Generator)
        for module in (optimizers, torch.utils._foreach_utils):  # which devices have them: CUDA and MPS do
            for kind in ("fused", "foreach"):
                patch.setattr(module, f"_get_{kind}_kernels_supported_devices", lambda: ["meta", "cpu"])
        yield StandIn()


SHORTER = ["--eval-episodes", "2", "--final-eval-episodes", "2", "--checkpoint-every", "1", "--total-timesteps"]
ENOUGH = {"hopplus_mcts.py": ["32", "--trees", "1", "--simulations", "2"], "hopplus_nomcts.py": ["32"]}
ENOUGH |= {script: ["128"] for script in ("mappo_hyper.py", "ppo_baseline.py", "ppo_lstm.py")}
ENOUGH |= {script: ["384", "--batch-episodes", "2"] for script in ("omg.py", "qmix.py")}


def train(script, *words):
    module = load_script(ROOT / script)
    return main(module.Args, module.train, list(words))


def ended(folder):
    weights = (folder / "checkpoints/last/weights.safetensors").read_bytes()
    return weights, json.loads((folder / "result.json").read_text())["eval"]


@pytest.mark.filterwarnings("ignore:for .* a non-meta parameter")  # to torch it is `meta`, which holds nothing
@pytest.mark.parametrize("script", [
    pytest.param(name, marks=pytest.mark.slow) if name.startswith(("hopplus", "mappo")) else name for name in SCRIPTS
])  # fmt: skip
def test_a_script_never_mixes_devices_and_computes_the_same(script, stand_in, tmp_path, monkeypatch, capsys):
    """Trained, saved, evaluated, and resumed on the device: what is saved is the same, bit for bit, as on the CPU."""
    monkeypatch.chdir(tmp_path)
    here, there = tmp_path / "here", tmp_path / "there"
    words = [*arguments(script), *SHORTER, *ENOUGH[script], "--run-dir"]
    assert train(script, *words, str(here)) == 0
    with stand_in:
        assert train(script, *words, str(there), "--device", "cuda") == 0
        assert stand_in.moves["up"] and stand_in.moves["down"]
    for name in ("last", "best"):
        one, other = (load_file(folder / "checkpoints" / name / "weights.safetensors") for folder in (here, there))
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert rows_of(there) == rows_of(here)
    assert any("losses/" in name for name in rows_of(here)[-1]), "it learned something"
    before = ended(there)

    (there / "result.json").unlink()  # as if it had been killed before its last save
    shutil.rmtree(there / "checkpoints/last")
    (there / "checkpoints/previous").rename(there / "checkpoints/last")
    with stand_in:
        assert train(script, "--resume", str(there)) == 0
    assert ended(there) == before


def test_the_stand_in_refuses_what_a_device_refuses():
    with StandIn():
        there, here, net = torch.ones(3, device=DEVICE), torch.ones(3), torch.nn.Linear(3, 2).to(DEVICE)
        assert isinstance(there, Elsewhere) and isinstance(net.weight, torch.nn.Parameter)
        assert (there + torch.tensor(1.0)).sum().item() == 6.0, "a scalar may be anywhere"
        net(there).sum().backward()
        assert net.weight.grad.device == DEVICE
        for mix in (lambda: there + here, lambda: net(here), lambda: torch.cat([there, here]), lambda: there.numpy(),
                    lambda: there[torch.tensor([0])], lambda: here[there.long()], lambda: there.double(),
                    lambda: torch.rand(3, generator=torch.Generator(), device=DEVICE),
                    lambda: torch.stack([there.sum(), torch.tensor(1.0)])):  # fmt: skip
            with pytest.raises(RuntimeError):
                mix()
        with torch.inference_mode():
            assert net(there).cpu().numpy().shape == (2,)


@pytest.mark.parametrize("name", ["cuda", "mps"])
def test_a_device_that_is_not_there_is_one_line(name, tmp_path, capsys):
    missing = {"cuda": torch.cuda, "mps": torch.backends.mps}[name]
    if missing.is_available():
        assert find_device(name).type == name
        return
    code = train("ppo_baseline.py", "--device", name, "--run-dir", str(tmp_path / "x"))
    text = capsys.readouterr().err
    assert code == 2 and text.count("\n") == 1 and f"--device {name}" in text and "only cpu" in text
    assert not (tmp_path / "x").exists()
