"""Distributed tensors of one rank through a compiled program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from compile_compare import WRAPPED, compare


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def product(x: DTensor, w: DTensor) -> Tensor:
    return (x @ w.t()).relu()


def to_local(x: DTensor, w: DTensor) -> Tensor:
    product: Any = x * w
    return product.to_local() * 2


def moved(x: DTensor, w: DTensor) -> Tensor:
    return x.redistribute(placements=[Replicate()]) * w.redistribute(placements=[Replicate()])


@pytest.mark.parametrize("fn", [product, to_local, moved])
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_sharded_inputs(mesh: DeviceMesh, fn: Any, placement: Any) -> None:
    def inputs() -> tuple[Tensor, Tensor]:
        made = [
            distribute_tensor(torch.randn(4, 6), mesh, [placement], src_data_rank=None)
            for _ in range(2)
        ]
        return made[0].requires_grad_(), made[1].requires_grad_()

    compare(fn, inputs, scenarios=("train", "infer"), ignore=WRAPPED)


def test_tangent_in_another_placement(mesh: DeviceMesh) -> None:
    """A replicated tangent where a sharded one was traced is moved, not misread."""

    def inputs() -> tuple[Tensor, Tensor]:
        x = distribute_tensor(torch.randn(4, 6), mesh, [Shard(0)]).requires_grad_()
        return x, distribute_tensor(torch.randn(4, 6), mesh, [Shard(0)])

    def double(x: DTensor, w: DTensor) -> Tensor:
        return x * w

    def backward(outputs: DTensor, given: Any) -> None:
        outputs.backward(distribute_tensor(torch.ones(4, 6), mesh, [Replicate()]))

    # The gradient may come back in the placement that was traced.
    compare(double, inputs, backward=backward, scenarios=("train",), ignore=WRAPPED)
