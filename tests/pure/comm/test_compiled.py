"""Functional collectives and compiled modules on groups answered in Python."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from shoal.comm.local import run_local
from shoal.comm.modelled import FREE, Kind, init_modelled

functional = torch.ops._c10d_functional

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="Inductor needs a C++ compiler on CPU, and there is neither g++ nor clang++",
)
BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=needs_compiler)]

Run = Callable[[Callable[[], object]], list]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def on_threads(body: Callable[[], object]) -> list:
    return run_local(2, body)


def as_rank_0_of_2(body: Callable[[], object]) -> list:
    init_modelled(2, FREE, "cpu")
    try:
        return [body()]
    finally:
        dist.destroy_process_group()


def everything(x: Tensor, group: str, size: int) -> list[Tensor]:
    """Use each functional collective once, in and out of place."""
    gathered = functional.wait_tensor(functional.all_gather_into_tensor(x * 2, size, group))
    reduced = functional.reduce_scatter_tensor(gathered + 1, "avg", size, group)
    total = functional.all_reduce(functional.wait_tensor(reduced), "sum", group)
    sent = functional.broadcast(functional.wait_tensor(total) * 3, 0, group)
    rows = [gathered.shape[0] // size] * size
    dealt = functional.all_to_all_single(gathered, rows, rows, group)
    both = functional.all_gather_into_tensor_coalesced([x, x + 1], size, group)
    return [functional.wait_tensor(tensor) for tensor in (sent, dealt, *both)]


def gathered_into_a_buffer(x: Tensor, buffer: Tensor, group: str, size: int) -> Tensor:
    """Use the out-variant, which c10d takes past Python overrides."""
    out = functional.all_gather_into_tensor_out(x * 2, size, group, out=buffer)
    return functional.wait_tensor(out) + 1


@pytest.mark.parametrize("run", [on_threads, as_rank_0_of_2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_functional_collectives(run: Run, backend: str) -> None:
    def body() -> tuple[list[Tensor], list[Tensor]]:
        group, size = dist.group.WORLD.group_name, dist.get_world_size()
        x = torch.arange(4.0) + dist.get_rank()
        compiled = torch.compile(everything, backend=backend, fullgraph=True)
        return compiled(x, group, size), everything(x, group, size)

    for compiled, plain in run(body):
        for found, expected in zip(compiled, plain, strict=True):
            torch.testing.assert_close(found, expected)


def test_functional_collectives_against_arithmetic() -> None:
    def body() -> list[Tensor]:
        x = torch.arange(4.0) + dist.get_rank()
        return everything(x, dist.group.WORLD.group_name, 2)

    ranks = [torch.arange(4.0), torch.arange(4.0) + 1]
    gathered = 2 * torch.cat(ranks)
    for rank, (sent, dealt, first, second) in enumerate(run_local(2, body)):
        total = (gathered + 1).view(2, 4).sum(0)
        assert torch.equal(sent, 3 * total)
        assert torch.equal(dealt, gathered.view(2, 4)[rank].repeat(2))
        assert torch.equal(first, torch.cat(ranks))
        assert torch.equal(second, torch.cat(ranks) + 1)


@pytest.mark.parametrize("run", [on_threads, as_rank_0_of_2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_out_variant_is_served(run: Run, backend: str) -> None:
    def body() -> tuple[Tensor, int]:
        group, size = dist.group.WORLD, dist.get_world_size()
        compiled = torch.compile(gathered_into_a_buffer, backend=backend, fullgraph=True)
        result = compiled(torch.ones(3), torch.empty(3 * size), group.group_name, size)
        traffic = getattr(group, "traffic", None)
        return result, 1 if traffic is None else traffic.by_kind[Kind.ALL_GATHER].num_collectives

    for result, num_gathers in run(body):
        assert torch.equal(result, torch.full((6,), 3.0))
        assert num_gathers == 1, "counted like any other gather"


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))


def by_fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def train(model: nn.Module, forward: Callable[[Tensor], Tensor], batch: Tensor) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = forward(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("engine", "backend"),
    [
        (by_fsdp1, "aot_eager"),
        (DistributedDataParallel, "aot_eager"),
        (fully_shard, "aot_eager"),
        pytest.param(fully_shard, "inductor", marks=needs_compiler),
    ],
)
def test_compiled_engines_train_like_one_process(
    engine: Callable[[nn.Module], nn.Module], backend: str
) -> None:
    batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))

    def body() -> list[float]:
        model = engine(make_model())
        mine = batch.chunk(2)[dist.get_rank()]
        return train(model, torch.compile(model, backend=backend), mine)

    model = make_model()
    expected = torch.tensor(train(model, model, batch))
    torch.testing.assert_close(torch.tensor(run_local(2, body)).mean(0), expected)
