"""The Muon example: whole matrices on one rank each are updated as if nothing were sharded."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from cuts import parameters, random_tensors
from harness import ranks
from shoal.checkpoint import load_training, save_training
from shoal.comm.transport import Transport
from shoal.layout import Flat, Whole
from shoal.tensor import ShardedTensor

ROOT = Path(__file__).parents[3]
SHAPES = [(12, 8), (8, 20), (5, 5), (16, 3)]


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("muon", ROOT / "examples" / "muon.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@ranks(2, 4)
def test_steps_equal_unsharded_ones_and_communicate_nothing() -> None:
    muon = example()
    whole = [nn.Parameter(tensor) for tensor in random_tensors(SHAPES)]
    ours = parameters(whole, Whole())
    optimizers = [muon.Muon(p, lr=0.1, weight_decay=0.1) for p in (whole, ours)]
    for seed in (1, 2, 3):
        for gradient, p, q in zip(random_tensors(SHAPES, seed), whole, ours, strict=True):
            p.grad, q.grad = gradient, torch.zeros_like(q)
            q.grad.copy_(gradient)
        with patch.object(Transport, "__init__", side_effect=AssertionError("communicates")):
            for optimizer in optimizers:
                optimizer.step()
    for p, q in zip(whole, ours, strict=True):
        assert torch.equal(q.full_tensor(), p)
        momentum = optimizers[1].state[q]["momentum"]
        assert isinstance(momentum, ShardedTensor)
        assert torch.equal(momentum.full_tensor(), optimizers[0].state[p]["momentum"])


def test_singular_values_end_near_one() -> None:
    for matrix in random_tensors([(12, 8), (8, 20), (30, 30)]):
        values = torch.linalg.svdvals(example().orthogonalised(matrix))
        assert values.max() < 1.25
        assert values.median() > 0.65


@ranks(2)
def test_matrices_that_are_cut_are_refused() -> None:
    muon = example()
    mesh = init_device_mesh("cpu", (2,))
    rows = nn.Parameter(distribute_tensor(torch.zeros(8, 8), mesh, [Shard(0)]))
    (flat,) = parameters([torch.zeros(8, 8)], Flat())
    for cut in (rows, flat):
        with pytest.raises(ValueError, match=r"all of a matrix on one rank.*layout=Whole\(\)"):
            muon.Muon([cut])
    with pytest.raises(ValueError, match="give it to AdamW"):
        muon.Muon([nn.Parameter(torch.zeros(8))])


@ranks(2)
def test_the_sharded_model_learns_as_the_unsharded_one(tmp_path: Path) -> None:
    muon = example()
    model = muon.build()
    assert all(isinstance(p, ShardedTensor) for p in model.parameters())
    losses = muon.train(model, 12)
    # Ranks have data of their own, so that an unsharded model needs the average of gradients.
    plain = muon.build(shard=False)
    for parameter in plain.parameters():
        parameter.register_post_accumulate_grad_hook(average)
    expected = muon.train(plain, 12)
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-3)
    assert losses[-1] < losses[0]

    matrices = muon.optimizers_for(model)[0]
    save_training(tmp_path / "c", model, matrices, {})
    resumed = muon.build()
    load_training(tmp_path / "c", resumed, muon.optimizers_for(resumed)[0])
    for first, second in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(first.full_tensor(), second.full_tensor())


def average(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad)
    parameter.grad.div_(dist.get_world_size())


def test_the_script_runs() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "muon.py"), "--steps", "3"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("step    0  loss 3.")
