"""Muon on shards: the bits of the unsharded Muon, each matrix computed once, no byte too many."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shoal.optim
from differential import two_axes
from harness import ranks
from oracle import full
from shoal.checkpoint import load_training, save_training
from shoal.comm.transport import Transport
from shoal.fsdp import FullyShardedDataParallel, fully_shard
from shoal.layout import Block, Even, Flat, Layout, Rows, Whole
from shoal.optim import muon as implementation
from shoal.optim.matrix_places import owners
from shoal.tensor import ShardedTensor

LAYOUTS: list[Layout] = [Even(), Flat(), Rows(), Block(5), Whole()]
SHAPES = [(12, 8), (8, 20), (5, 5), (16, 3), (1, 7), (33, 6)]
OPTIONS: list[dict[str, Any]] = [
    {"lr": 0.1, "weight_decay": 0.1},
    {"lr": 0.1, "nesterov": False, "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw"},
]


class Held(nn.Module):
    """Matrices, whose forward nobody needs."""

    def __init__(self, shapes: list[tuple[int, int]], seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for index, shape in enumerate(shapes):
            matrix = nn.Parameter(torch.randn(shape, generator=generator))
            self.register_parameter(f"matrix{index}", matrix)

    def forward(self) -> None: ...


class Matrices(nn.Module):
    """In two units."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Held(SHAPES[:2]), Held(SHAPES[2:], 1)


def sharded(layout: Layout, **options: Any) -> Matrices:
    model = Matrices()
    for unit in (model.first, model.second):
        fully_shard(unit, layout=layout, **options)
    return model


def give_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        whole = torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, (DTensor, ShardedTensor)):
            with torch.no_grad():
                parameter.grad = torch.zeros_like(parameter)
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                whole = distribute_tensor(whole, mesh, placements)
                parameter.grad.to_local().copy_(whole.to_local())
            else:
                parameter.grad.copy_(whole)
        else:
            parameter.grad = whole


def check_steps(model: nn.Module, options: dict[str, Any], **own: Any) -> None:
    """Three steps are those of torch on whole matrices, bit by bit, and so is the momentum."""
    plain = Matrices()
    optimizers = [
        torch.optim.Muon(plain.parameters(), **options),
        shoal.optim.Muon(model.parameters(), **options, **own),
    ]
    for seed in (1, 2, 3):
        for one, optimizer in zip((plain, model), optimizers, strict=True):
            give_gradients(one, seed)
            optimizer.step()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(full(q.detach()), p), p.shape
        momentum = optimizers[1].state[q]["momentum_buffer"]
        assert torch.equal(full(momentum), optimizers[0].state[p]["momentum_buffer"])


@ranks(1, 2, 3, 4)
@pytest.mark.compose("Muon", "fully_shard", "every layout")
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_steps_are_those_of_torch(layout: Layout) -> None:
    for options in OPTIONS:
        check_steps(sharded(layout), options)


@ranks(4)
@pytest.mark.compose("Muon", "HSDP")
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_replicas_share_the_work(layout: Layout) -> None:
    mesh = two_axes()
    computed = counted()
    with computed as seen:
        check_steps(sharded(layout, mesh=mesh), OPTIONS[0], mesh=mesh)
    assert all_sums(len(seen)) == 3 * len(SHAPES) + 4 * 3 * len(SHAPES)


@ranks(4)
@pytest.mark.compose("Muon", "HSDP")
def test_replicas_that_are_not_known_compute_for_themselves() -> None:
    check_steps(sharded(Flat(), mesh=two_axes()), OPTIONS[0])


@contextmanager
def counted() -> Iterator[list[tuple[int, ...]]]:
    """The matrices that this rank makes orthogonal, by both implementations."""
    seen: list[tuple[int, ...]] = []
    original = torch.optim._muon._zeropower_via_newtonschulz

    def count(matrix: torch.Tensor, *args: Any) -> torch.Tensor:
        seen.append(tuple(matrix.shape))
        return original(matrix, *args)

    with (
        patch.object(implementation.optimizers, "orthogonalised", count),
        patch.object(torch.optim._muon, "_zeropower_via_newtonschulz", count),
    ):
        yield seen


def all_sums(number: int) -> int:
    total = torch.tensor(number)
    dist.all_reduce(total)
    return int(total)


@ranks(4)
@pytest.mark.compose("Muon", "TP")
@pytest.mark.parametrize("tensor_dim", [0, 1])
@pytest.mark.parametrize("data_dim", [0, 1])
def test_tensor_parallel_matrices(tensor_dim: int, data_dim: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    plain, model = Held([(16, 8)]), Held([(16, 8)])
    tensor = mesh["tensor"]
    placed = distribute_tensor(model.matrix0.detach(), tensor, [Shard(tensor_dim)])
    model.matrix0 = nn.Parameter(placed)
    fully_shard(model, mesh=mesh["data"], layout=Even(data_dim))
    optimizers = [
        torch.optim.Muon(plain.parameters(), lr=0.1),
        shoal.optim.Muon(model.parameters(), lr=0.1),
    ]
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        plain.matrix0.grad = torch.randn(16, 8, generator=generator)
        cut = distribute_tensor(plain.matrix0.grad, tensor, [Shard(tensor_dim)]).to_local()
        own = cut.chunk(2, data_dim)[mesh["data"].get_local_rank()].contiguous()
        model.matrix0.grad = torch.zeros_like(model.matrix0)
        model.matrix0.grad.to_local().copy_(own)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(full(model.matrix0.detach()), plain.matrix0)


@contextmanager
def sent_bytes() -> Iterator[list[int]]:
    """What this rank sends to others, all-to-all by all-to-all."""
    seen: list[int] = []
    original = Transport.all_to_all

    def all_to_all(self: Transport, output: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(input.nbytes)
        assert args[1][self.rank] == args[0][self.rank] == 0
        return original(self, output, input, *args, **kwargs)

    with patch.object(Transport, "all_to_all", all_to_all):
        yield seen


@ranks(2, 4)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_no_byte_travels_that_need_not(layout: Layout) -> None:
    """Each element that its owner has not goes there and back once, in two bytes."""
    model = sharded(layout)
    optimizer = shoal.optim.Muon(model.parameters(), lr=0.1)
    give_gradients(model, 1)
    with sent_bytes() as seen:
        optimizer.step()
    ((exchange, matrices),) = optimizer._known.exchanges
    away = sum(
        exchange._cuts[index].numel_on(rank)
        for index, owner in enumerate(exchange.owners)
        for rank in range(dist.get_world_size())
        if rank != owner
    )
    assert all_sums(sum(seen)) == 2 * 2 * away
    assert len(matrices) == len(SHAPES)


@ranks(4)
def test_whole_matrices_of_equal_cost_do_not_travel() -> None:
    model = fully_shard(Held(8 * [(6, 6)]), layout=Whole())
    optimizer = shoal.optim.Muon(model.parameters(), lr=0.1)
    give_gradients(model, 1)
    with patch.object(Transport, "all_to_all", side_effect=AssertionError("communicates")):
        optimizer.step()
    ((exchange, _),) = optimizer._known.exchanges
    assert sorted(exchange.owners) == [0, 0, 1, 1, 2, 2, 3, 3]


@ranks(2)
@pytest.mark.parametrize("round_bytes", [1, 1 << 20])
def test_rounds_change_no_bit(round_bytes: int) -> None:
    with patch("shoal.optim.matrix_exchange.ROUND_BYTES", round_bytes):
        check_steps(sharded(Flat()), OPTIONS[0])


@ranks(2)
@pytest.mark.compose("Muon", "checkpoint")
def test_checkpoints(tmp_path: Path) -> None:
    def make(layout: Layout) -> tuple[Matrices, torch.optim.Optimizer]:
        model = sharded(layout)
        return model, shoal.optim.Muon(model.parameters(), lr=0.1)

    model, optimizer = make(Flat())
    give_gradients(model, 1)
    optimizer.step()
    save_training(tmp_path / "c", model, optimizer, {})
    resumed, other = make(Even())
    load_training(tmp_path / "c", resumed, other)
    copied = copy.deepcopy(optimizer)
    for one, step in ((model, optimizer), (resumed, other)):
        give_gradients(one, 2)
        step.step()
    for p, q in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(full(p.detach()), full(q.detach()))
    assert copied.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


@ranks(2)
def test_a_matrix_without_a_gradient_on_one_rank_hangs_nobody() -> None:
    model = sharded(Even())
    optimizer = shoal.optim.Muon(model.parameters(), lr=0.1, weight_decay=0.0)
    give_gradients(model, 1)
    first = next(model.parameters())
    before = full(first.detach()).clone()
    first.grad = None
    optimizer.step()
    assert torch.equal(full(first.detach()), before)


@ranks(2)
@pytest.mark.compose("Muon", "wrapper", refused="a wrapper's shards are ranges without a shape")
def test_ranges_are_refused() -> None:
    wrapped = FullyShardedDataParallel(nn.Linear(6, 6, bias=False), use_orig_params=True)
    with pytest.raises(ValueError, match="only supports 2D parameters"):
        shoal.optim.Muon(wrapped.parameters())


def test_owners_are_about_equally_busy() -> None:
    """The matrices of 16 Llama-like blocks of 2048, on 8 and on 64 ranks."""
    shapes = 16 * (4 * [(2048, 2048)] + 3 * [(5504, 2048)])
    for size, most in ((8, 1.02), (64, 1.25)):
        cuts: list[Any] = [_Even(shape, size) for shape in shapes]
        costs = [implementation._cost(shape) for shape in shapes]
        loads = [0.0] * size
        for cost, owner in zip(costs, owners(costs, cuts), strict=True):
            loads[owner] += cost
        assert max(loads) <= most * sum(costs) / size


class _Even:
    """As many elements on each rank."""

    def __init__(self, shape: tuple[int, ...], size: int) -> None:
        self.shape, self.group = shape, self
        self.size: Callable[[], int] = lambda: size

    def numel_on(self, rank: int) -> int:
        return self.shape[0] * self.shape[1] // self.size()
