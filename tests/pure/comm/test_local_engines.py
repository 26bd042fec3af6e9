"""torch's own engines on thread ranks train what one unsharded process trains."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shoal.comm.local import run_local

NUM_STEPS = 3
GLOBAL_BATCH = 8


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 7), nn.GELU(), nn.Linear(7, 3))


def make_batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(GLOBAL_BATCH, 6, generator=generator) for _ in range(NUM_STEPS)]


def train(model: nn.Module, rank: int = 0, size: int = 1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in make_batches():
        model(batch.chunk(size)[rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def unsharded() -> dict[str, Tensor]:
    model = make_model()
    train(model)
    return model.state_dict()


def by_ddp(model: nn.Module) -> dict[str, Tensor]:
    wrapped = DistributedDataParallel(model)
    train(wrapped, dist.get_rank(), dist.get_world_size())
    return wrapped.module.state_dict()


def by_fsdp1(model: nn.Module) -> dict[str, Tensor]:
    for name in ("0", "2"):
        layer = FullyShardedDataParallel(model.get_submodule(name), device_id=torch.device("cpu"))
        setattr(model, name, layer)
    wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    train(wrapped, dist.get_rank(), dist.get_world_size())
    with FullyShardedDataParallel.summon_full_params(wrapped):
        return {
            name.replace("_fsdp_wrapped_module.", ""): parameter.detach().clone()
            for name, parameter in wrapped.named_parameters()
        }


def by_fsdp2(model: nn.Module) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name in ("0", "2"):
        fully_shard(model.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, dist.get_rank(), dist.get_world_size())
    return full_state_dict(model)


def by_hsdp2(model: nn.Module) -> dict[str, Tensor]:
    shape = (2, dist.get_world_size() // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    train(model, dist.get_rank(), dist.get_world_size())
    return full_state_dict(model)


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    full: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        assert isinstance(tensor, DTensor)
        full[name] = tensor.full_tensor()
    return full


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("engine", [by_ddp, by_fsdp1, by_fsdp2, by_hsdp2])
def test_trains_like_one_process(
    engine: Callable[[nn.Module], dict[str, Tensor]], size: int
) -> None:
    expected = unsharded()
    results = run_local(size, lambda: engine(make_model()))
    for result in results:
        torch.testing.assert_close(result, expected)
    for result in results[1:]:
        for name in expected:
            assert torch.equal(result[name], results[0][name]), name


def test_gradients_before_the_step_are_the_mean_over_ranks() -> None:
    def body() -> Tensor:
        model = make_model()
        fully_shard(model)
        model(make_batches()[0].chunk(2)[dist.get_rank()]).sum().backward()
        grad = next(model.parameters()).grad
        assert isinstance(grad, DTensor)
        return grad.full_tensor()

    model = make_model()
    (model(make_batches()[0]).sum() / 2).backward()
    for result in run_local(2, body):
        torch.testing.assert_close(result, next(model.parameters()).grad)
