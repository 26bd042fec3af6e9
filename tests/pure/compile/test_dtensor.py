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

from compile_compare import BACKEND, ENTRIES, WRAPPED, Entry, compare, compiled
from shoal.compile.aot.subclasses import as_traced, wrapping_of


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


def written(x: DTensor, w: DTensor) -> Tensor:
    with torch.no_grad():
        x.mul_(2)
    return x * w


def views(x: DTensor, w: DTensor) -> tuple[Tensor, Tensor]:
    return x.t(), (x * w).t()


def summed(x: DTensor, w: DTensor) -> tuple[Tensor, Tensor]:
    return (x * w).sum(0), x.full_tensor() * 2


@pytest.mark.parametrize("fn", [product, to_local, moved, written, views, summed])
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


def test_tangent_takes_the_traced_placement(mesh: DeviceMesh) -> None:
    """On one rank both look alike: what counts is that it was moved."""
    traced, given = (
        distribute_tensor(torch.randn(4, 6), mesh, [placement])
        for placement in (Shard(0), Replicate())
    )
    assert as_traced(given, wrapping_of(traced)).placements == (Shard(0),)


@pytest.mark.parametrize("through", ENTRIES)
def test_written_local_tensor(mesh: DeviceMesh, through: Entry) -> None:
    """A write past the wrapper is one to the argument."""

    def inputs() -> tuple[Tensor]:
        return (distribute_tensor(torch.randn(4, 6), mesh, [Shard(0)]),)

    def program(x: DTensor) -> tuple[Tensor, Tensor]:
        return x.to_local().mul_(2), x * 3

    compare(program, inputs, through=through, scenarios=("train", "infer"), ignore=WRAPPED)


@pytest.mark.parametrize("through", ENTRIES)
def test_made_of_local_tensors(mesh: DeviceMesh, through: Entry) -> None:
    def inputs() -> tuple[Tensor]:
        return (torch.randn(4, 6, requires_grad=True),)

    def program(x: Tensor) -> Tensor:
        return DTensor.from_local(x * 2, mesh, [Shard(0)]) * 3

    compare(program, inputs, through=through, scenarios=("train", "infer"), ignore=WRAPPED)


def test_placement_is_a_guard(mesh: DeviceMesh) -> None:
    call = compiled(lambda x: x * 2, backend="shoal", through="aot")
    for placement in (Shard(0), Replicate()):
        out = call(distribute_tensor(torch.randn(4, 6), mesh, [placement]))
        assert out.placements == (placement,)


def test_symbolic_sizes(mesh: DeviceMesh) -> None:
    """One graph for all sizes, local and whole."""

    def program(x: Any, w: Any) -> Any:
        return (x @ w).relu()

    call = compiled(program, backend=BACKEND, through="compile", dynamic=True)
    w = distribute_tensor(torch.randn(6, 6), mesh, [Replicate()]).requires_grad_()
    for size in (4, 5, 8):
        x = distribute_tensor(torch.randn(size, 6), mesh, [Shard(0)]).requires_grad_()
        want, got = program(x, w), call(x, w)
        assert torch.equal(got.to_local(), want.to_local())
        assert got._spec == want._spec
        grad, wanted = (torch.autograd.grad(one.sum(), x)[0] for one in (got, want))
        assert torch.equal(grad.to_local(), wanted.to_local())  # type: ignore[attr-defined]
        assert grad._spec == wanted._spec  # type: ignore[attr-defined]


def test_parameters_that_are_sharded(mesh: DeviceMesh) -> None:
    layer = torch.nn.Linear(6, 6)
    for name, parameter in list(layer.named_parameters()):
        sharded = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
        setattr(layer, name, torch.nn.Parameter(sharded))
    x = distribute_tensor(torch.randn(4, 6), mesh, [Replicate()])
    layer(x).sum().backward()
    want = [parameter.grad for parameter in layer.parameters()]
    layer.zero_grad()
    compiled(layer, backend=BACKEND, through="compile")(x).sum().backward()
    for parameter, grad in zip(layer.parameters(), want, strict=True):
        # The gradient may come back in the placement that was traced.
        whole = parameter.grad.full_tensor()  # type: ignore[union-attr]
        assert torch.equal(whole, grad.full_tensor())  # type: ignore[union-attr]
