"""Distant replicas beside tensor parallelism, shards on the host, tensors with gather hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from diloco import Outer, check_equal, mesh_of, outer_of, reference, sgd, train
from harness import ranks
from oracle import build, full, shard
from shoal import fully_shard
from shoal.checkpoint import load_model, load_training, save_training
from shoal.distant import DistantReplicas
from shoal.fsdp import CPUOffloadPolicy
from shoal.offload import step_in_backward
from wrapped import Wrapped


@pytest.mark.compose("distant replicas", "offload")
@ranks(4)
def test_shards_anchors_and_steps_on_the_host() -> None:
    mesh, outer = mesh_of(2), Outer(every=3, delay=1, share=0.5)
    model = shard(build(), mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = sgd(model.parameters())
    step_in_backward(model, optimizer)
    train(model, outer_of(model, outer), range(1, 9), optimizer)
    check_equal(model, reference(8, outer)[mesh.get_local_rank("replicate")])


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))


def inputs(step: int, replica: int) -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * step + replica))


def diloco(num_steps: int, every: int) -> tuple[list[nn.Module], nn.Module]:
    """The replicas and the anchor of plain models."""
    anchor, replicas = layers(), [layers() for _ in range(2)]
    optimizers = [sgd(one.parameters()) for one in replicas]
    outer = torch.optim.SGD(anchor.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for step in range(1, num_steps + 1):
        for number, (one, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            optimizer.zero_grad()
            one(inputs(step, number)).square().mean().backward()
            optimizer.step()
        if step % every == 0:
            with torch.no_grad():
                every_one = zip(
                    anchor.parameters(), *(one.parameters() for one in replicas), strict=True
                )
                for p, *own in every_one:
                    p.grad = torch.stack([p - q for q in own]).mean(0)
                outer.step()
                for one in replicas:
                    one.load_state_dict(anchor.state_dict())
    return replicas, anchor


def tensor_parallel() -> tuple[Any, DistantReplicas, torch.optim.Optimizer, int]:
    names = ("replicate", "shard", "tensor")
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=names)
    model: Any = layers()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["replicate", "shard"])
    outer = DistantReplicas(model, every=3)
    return model, outer, sgd(model.parameters()), mesh.get_local_rank("replicate")


@pytest.mark.compose("distant replicas", "TP")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@ranks(4)
def test_beside_tensor_parallelism(tmp_path: Path) -> None:
    model, outer, optimizer, replica = tensor_parallel()

    def steps(of: Any, its: Any, distant: DistantReplicas, numbers: range) -> None:
        for step in numbers:
            its.zero_grad()
            of(inputs(step, replica)).square().mean().backward()
            its.step()
            distant.step()

    steps(model, optimizer, outer, range(1, 5))
    save_training(tmp_path / "saved", model, optimizer, {})
    steps(model, optimizer, outer, range(5, 9))
    replicas, _ = diloco(8, 3)
    for p, q in zip(replicas[replica].parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(q.detach()), p.detach(), rtol=1e-5, atol=1e-6)
    other, its_outer, its, _ = tensor_parallel()
    load_training(tmp_path / "saved", other, its)
    steps(other, its, its_outer, range(5, 9))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.to_local(), q.to_local())
    plain = layers()
    load_model(tmp_path / "saved", plain)
    for p, q in zip(diloco(4, 3)[1].parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(q.detach(), p.detach(), rtol=1e-5, atol=1e-6)


class Hooked(Wrapped):
    """Says itself how it is gathered."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.whole,), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        (output,) = outputs
        return None if out is not None else (output, (output,))


@pytest.mark.compose(
    "distant replicas", "fp8", refused="the mean of their bytes is not that of values"
)
@ranks(2)
def test_tensors_with_gather_hooks_are_refused() -> None:
    model: Any = layers()
    model[0].weight = nn.Parameter(Hooked(model[0].weight.detach()))
    fully_shard(model, mesh=mesh_of(2))
    with pytest.raises(NotImplementedError, match=r"gather hooks, such as .*0\.weight"):
        DistantReplicas(model, every=2)
    dist.barrier()
