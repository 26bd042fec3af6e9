"""Models that cannot be imagined: the command line says which part, and why, and ends with 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli.main import main

HEAD = """
import torch
from torch import nn
def inputs(batch=4):
    return torch.zeros(batch, 64)
def model():
    return M()
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)
        {init}
    def forward(self, x):
        {forward}
"""


def module(init: str = "pass", forward: str = "return self.layer(x)") -> str:
    return HEAD.format(init=init, forward=forward)


CASES = {
    "a number in the constructor": (
        module("self.n = self.layer.weight.norm().item()"),
        "model() needs values",
    ),
    "an array in the constructor": (
        module("self.n = self.layer.weight.detach().numpy()"),
        "model() needs values",
    ),
    "a buffer with memory": (
        module("self.register_buffer('b', torch.zeros(3, device='cpu'))"),
        "buffer 'b' has memory",
    ),
    "an error of its own": (module("raise KeyError('weights')"), "model() raised KeyError"),
    "a lazy module": (module("self.layer = nn.LazyLinear(3)"), "'layer.weight' has no shape yet"),
    "a compiled module": (module("self.layer.compile()"), "module 'layer' is compiled"),
    "a compiled model": (
        module() + "\ndef model(): return torch.compile(M())",
        "is compiled, which is not modelled",
    ),
    "a wrapper": (
        module() + "\ndef model():"
        "\n    from shoal.fsdp import FullyShardedDataParallel"
        "\n    return FullyShardedDataParallel(M())",
        "module 'model' is wrapped in FullyShardedDataParallel",
    ),
    "no parameters": (module() + "\ndef model(): return nn.ReLU()", "has no parameters"),
    "a branch on a value": (
        module(forward="return self.layer(x) if x.max().item() > 0 else x"),
        "the forward needs values",
    ),
    "a shape from values": (module(forward="return self.layer(x[x > 0])"), "needs values"),
    "numpy": (module(forward="return self.layer(x) * x.numpy()[0, 0]"), "needs values"),
    "another device": (
        module(forward="return self.layer(x) + torch.ones(64)"),
        "the forward puts a tensor on a device of its own",
    ),
    "autocast": (
        module(forward="with torch.autocast('cuda', torch.bfloat16): return self.layer(x)"),
        "torch.autocast",
    ),
    "autocast by the input's device": (
        module(forward="with torch.autocast(x.device.type): return self.layer(x)"),
        "torch.autocast",
    ),
    "an operator without shapes": (
        module(forward="return torch.ops.shoal_refusals.twice(self.layer(x))")
        + "\n@torch.library.custom_op('shoal_refusals::twice', mutates_args=())\n"
        "def twice(x: torch.Tensor) -> torch.Tensor: return x * 2",
        "calls an operator without shapes for meta tensors",
    ),
    "wrong inputs": (
        module() + "\ndef inputs(): return torch.zeros(4, 63)",
        "the forward raised RuntimeError",
    ),
    "no inputs": (module() + "\ndef inputs(): return None", "the arguments of forward"),
    "inputs that raise": (module() + "\ndef inputs(): return 1 / 0", "inputs() raised Zero"),
    "units of another model": (
        module() + "\ndef units(model): return [nn.Linear(3, 3)]",
        "returned a Linear that is not in the model",
    ),
    "the same unit twice": (
        module() + "\ndef units(model): return [model.layer, model.layer]",
        "units(model) returned module 'layer' twice",
    ),
    "the model as a unit": (
        module() + "\ndef units(model): return [model]",
        "returned the model itself",
    ),
    "nothing to train": (
        module() + "\ndef model(): return M().requires_grad_(False)",
        "requires a gradient: there is nothing to train",
    ),
    "a file that exits": (module() + "\nraise SystemExit(3)", "raised SystemExit: 3"),
    "no units": (module() + "\ndef units(model): return None", "units(model) raised TypeError"),
    "a loss that is no scalar": (module() + "\ndef loss(out): return out", "a scalar tensor"),
    "a loss that raises": (module() + "\ndef loss(out): return out.logits", "the loss raised"),
    "no optimizer": (module() + "\ndef optimizer(p): return None", "to return an optimizer"),
    "a closure": (
        module() + "\ndef optimizer(p): return torch.optim.LBFGS(p)",
        "the optimizer's step raised TypeError",
    ),
    "sparse gradients": (
        module() + "\ndef model(): return nn.Embedding(9, 8, sparse=True)"
        "\ndef inputs(): return torch.zeros(2, 3, dtype=torch.long)",
        "returns a sparse tensor",
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_what_cannot_be_imagined_is_named(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, words = CASES[case]
    path = tmp_path / "model.py"
    path.write_text(text)
    assert main(["plan", str(path), "--world", "2"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--budget", "-3"], "expected a size"),
        (["--budget", "nan"], "expected a size"),
        (["--fit", "0"], "expected a size"),
        (["--fit", "1MB"], "nothing fits into 0.001 GB. The least is 0."),
        (["--find", "cheapest"], "what it is to --fit into"),
        (["--global-batch", "4M"], "what it is to --fit into"),
        (["--fit", "80GiB", "--global-batch", "7"], "no multiple of what 8 ranks take"),
        (["--world", "1000000000"], "at most 1,048,576 ranks"),
        (["--world", "8", "--replicas", "3"], "that the replicas divide"),
    ],
)
def test_impossible_wishes_are_named(
    flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.py"
    path.write_text(module())
    assert main(["plan", str(path), *flags]) == 2
    assert words in capsys.readouterr().err


def test_offload_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.py"
    text = SHARDED.replace("import fully_shard", "import CPUOffloadPolicy, fully_shard")
    text = text.replace("mesh=mesh)", "mesh=mesh, offload_policy=CPUOffloadPolicy())")
    path.write_text(module() + text)
    assert main(["plan", str(path), "--world", "4"]) == 2
    assert "CPU offload is not modelled" in capsys.readouterr().err


SHARDED = """
def model():
    from torch.distributed.device_mesh import init_device_mesh
    from shoal import fully_shard
    made, mesh = M(), init_device_mesh("cuda", (4,))
    fully_shard(made.layer, mesh=mesh)
    return fully_shard(made, mesh=mesh)
"""


def test_a_model_may_shard_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, plain = tmp_path / "own.py", tmp_path / "plain.py"
    path.write_text(module() + SHARDED)
    plain.write_text(module() + "\ndef units(model): return [model.layer]")
    found = []
    for one in (path, plain):
        assert main(["plan", str(one), "--world", "4", "--json"]) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1]
    assert main(["plan", str(path), "--world", "4", "--layout", "flat"]) == 2
    assert "has sharded the model by itself" in capsys.readouterr().err
    assert main(["plan", str(path), "--world", "4", "--fit", "80GB"]) == 2
    assert "return the model unsharded" in capsys.readouterr().err


def test_arithmetic_that_is_not_known_is_an_assumption(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.py"
    path.write_text(module(forward="return torch.fft.rfft(self.layer(x)).abs()"))
    assert main(["plan", str(path), "--world", "2"]) == 0
    assert "the time of aten._fft_c2c, aten._fft_r2c is not known" in capsys.readouterr().out


def test_convolutions_that_need_no_gradient_of_images_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.py"
    path.write_text(
        module("self.layer = nn.Conv2d(3, 8, 3)") + "\ndef inputs(): return torch.zeros(2, 3, 8, 8)"
    )
    assert main(["plan", str(path), "--world", "2"]) == 0
    assert "what convolutions borrow" in capsys.readouterr().out


@pytest.mark.parametrize(("init", "is_said"), [("self.layer = nn.RMSNorm(64)", True), ("pass", 0)])
def test_time_that_is_left_out_is_said(
    init: str, is_said: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.py"
    path.write_text(module(init))
    assert main(["plan", str(path), "--world", "2"]) == 0
    said = capsys.readouterr().out
    assert ("the kernels of rms_norm take no time" in said) == is_said
    assert "not modelled" in said
