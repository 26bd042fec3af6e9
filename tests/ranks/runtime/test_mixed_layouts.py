"""`Even` beside another layout in one model: lists of DTensors and ShardedTensors.

The unsharded model says what clipping, optimizers and gradient scaling have to give.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from differential import (
    DIM,
    PLAIN,
    SHOAL,
    Engine,
    check_like_plain,
    gradients,
    loss_of,
    seeded,
    snapshot,
    stack,
)
from harness import ranks
from oracle import full
from shoal import ShardedTensor, fully_shard
from shoal.fsdp import FullyShardedDataParallel
from shoal.layout import Block, Even, Flat, Layout, Rows, Whole

Layouts = tuple[Layout, ...]
"""Of three blocks and the root."""

MIXTURES: list[Layouts] = [
    (Even(), Flat(), Rows(), Even()),
    (Flat(), Even(), Whole(), Block(4)),
    (Whole(), Flat(), Rows(), Even()),
]


def mixed(engine: Engine, layouts: Layouts) -> Any:
    model = stack()
    if engine.is_sharded:
        for block, layout in zip(model.blocks, layouts, strict=False):
            fully_shard(block, layout=layout)
        fully_shard(model, layout=layouts[-1])
        kinds = {type(parameter) for parameter in model.parameters()}
        assert kinds == {DTensor, ShardedTensor}
    return model


def whole(norm: torch.Tensor) -> torch.Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def clipped(
    engine: Engine, layouts: Layouts, norm_type: float, foreach: bool | None
) -> dict[str, Any]:
    model = mixed(engine, layouts)
    loss_of(model(engine.batches(1)[0])).backward()
    before = nn.utils.get_total_norm([p.grad for p in model.parameters()], norm_type)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-2, norm_type, foreach=foreach)
    return {"before": whole(before), "norm": whole(norm), "gradients": gradients(model)}


@ranks(2, 4)
@pytest.mark.sampled
@pytest.mark.parametrize("layouts", MIXTURES, ids=repr)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, 0.0, float("inf")])
@pytest.mark.parametrize("foreach", [None, True])
def test_clipping_by_norm(layouts: Layouts, norm_type: float, foreach: bool | None) -> None:
    check_like_plain(
        clipped(SHOAL, layouts, norm_type, foreach), clipped(PLAIN, layouts, norm_type, foreach)
    )


@ranks(2, 4)
@pytest.mark.parametrize("layouts", MIXTURES, ids=repr)
def test_clipping_one_by_one(layouts: Layouts) -> None:
    """The norm is then a DTensor, since torch stacks the norms of both kinds."""
    check_like_plain(clipped(SHOAL, layouts, 2.0, False), clipped(PLAIN, layouts, 2.0, False))


def clipped_by_value(engine: Engine, layouts: Layouts, foreach: bool | None) -> Any:
    model = mixed(engine, layouts)
    loss_of(model(engine.batches(1)[0])).backward()
    nn.utils.clip_grad_value_(model.parameters(), 1e-2, foreach=foreach)
    return gradients(model)


@ranks(2, 4)
@pytest.mark.parametrize("layouts", MIXTURES, ids=repr)
@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_by_value(layouts: Layouts, foreach: bool | None) -> None:
    check_like_plain(
        clipped_by_value(SHOAL, layouts, foreach), clipped_by_value(PLAIN, layouts, foreach)
    )


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {}),
    "adamw foreach": (torch.optim.AdamW, {"foreach": True}),
    "adamw amsgrad": (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    "adamw fused": (torch.optim.AdamW, {"fused": True}),
    "adam fused": (torch.optim.Adam, {"fused": True}),
    "sgd foreach": (torch.optim.SGD, {"foreach": True, "momentum": 0.9, "nesterov": True}),
    "sgd fused": (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
    "adagrad fused": (torch.optim.Adagrad, {"fused": True}),
    "adagrad foreach": (torch.optim.Adagrad, {"foreach": True}),
    "rmsprop foreach": (torch.optim.RMSprop, {"foreach": True, "centered": True}),
    "nadam foreach": (torch.optim.NAdam, {"foreach": True}),
    "radam foreach": (torch.optim.RAdam, {"foreach": True}),
    "adamax foreach": (torch.optim.Adamax, {"foreach": True}),
    "adadelta foreach": (torch.optim.Adadelta, {"foreach": True}),
    "asgd foreach": (torch.optim.ASGD, {"foreach": True}),
    "rprop foreach": (torch.optim.Rprop, {"foreach": True}),
}


def stepped(engine: Engine, layouts: Layouts, name: str) -> list[Any]:
    """Three steps with clipping, and a reload of the optimizer's own state in between."""
    model = mixed(engine, layouts)
    make, options = OPTIMIZERS[name]
    optimizer = make(model.parameters(), lr=1e-2, **options)
    for batch in engine.batches(3):
        loss_of(model(batch)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.zero_grad()
    return [snapshot(model, optimizer)]


@ranks(2, 4)
@pytest.mark.sampled(1)
@pytest.mark.parametrize("layouts", MIXTURES, ids=repr)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps(layouts: Layouts, name: str) -> None:
    check_like_plain(stepped(SHOAL, layouts, name), stepped(PLAIN, layouts, name))


def scaled(engine: Engine, layouts: Layouts, overflow: int | None, fused: bool) -> list[Any]:
    """Steps of which the second overflows on one rank, in one block's gradient alone."""
    model = mixed(engine, layouts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    seen: list[Any] = []
    for index, batch in enumerate(engine.batches(4)):
        scaler.scale(loss_of(model(batch))).backward()
        if index == 1 and overflow is not None:
            spoil(model.blocks[overflow], on_one_rank=engine.is_sharded)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append(scaler.get_scale())
    return [*seen, snapshot(model)]


def spoil(module: nn.Module, *, on_one_rank: bool) -> None:
    """Make one element of the gradients infinite, of those that the last rank to hold any has."""
    held = []
    for parameter in module.parameters():
        grad: Any = parameter.grad
        local = grad.to_local() if isinstance(grad, DTensor) else getattr(grad, "local", grad)
        if local.numel():
            held.append(local)
    has_any = [None] * dist.get_world_size()
    dist.all_gather_object(has_any, bool(held))
    last = max(rank for rank, has in enumerate(has_any) if has)
    if not on_one_rank or dist.get_rank() == last:
        held[0].view(-1)[0] = float("inf")


@ranks(2, 4)
@pytest.mark.sampled
@pytest.mark.parametrize("layouts", MIXTURES, ids=repr)
@pytest.mark.parametrize("overflow", [None, 0, 1])
@pytest.mark.parametrize("fused", [False, True])
def test_gradient_scaling(layouts: Layouts, overflow: int | None, fused: bool) -> None:
    sharded, plain = (
        scaled(SHOAL, layouts, overflow, fused),
        scaled(PLAIN, layouts, overflow, fused),
    )
    assert sharded[1] == (8.0 if overflow is None else 4.0) * (2 if overflow is None else 1)
    check_like_plain(sharded, plain)


class Pair(nn.Module):
    """Two layers that tensor parallelism cuts, and one that a layout cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 12), nn.Linear(12, 6)
        self.head = nn.Linear(6, 6)
        self.free = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(torch.relu(self.up(x)))) * self.free


# Torch warns of an output that is a view, and tensor parallelism makes such outputs.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@ranks(4)
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_tensor_parallel_layers_beside_a_flat_one(norm_type: float) -> None:
    """DTensors on two meshes, ShardedTensors, and a plain parameter that nobody shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    model: Any = seeded(Pair)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh["tensor"], plan)
    fully_shard(model.up, mesh=mesh["shard"])
    fully_shard(model.head, mesh=mesh["shard"], layout=Flat())
    fully_shard(model, mesh=mesh["shard"], ignored_params={model.free})
    plain: Any = seeded(Pair)
    parts = [
        torch.randn(4, DIM, generator=torch.Generator().manual_seed(place)) for place in range(2)
    ]
    loss_of(model(parts[mesh["shard"].get_local_rank()])).backward()
    loss_of(plain(torch.cat(parts))).backward()
    # Nobody reduces the gradient of a parameter that is ignored.
    model.free.grad = plain.free.grad.clone()
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1, norm_type) for m in (model, plain)]
    torch.testing.assert_close(whole(norms[0]), norms[1])
    for fused in (False, True):
        for one in (model, plain):
            torch.optim.AdamW(one.parameters(), lr=1e-2, foreach=not fused, fused=fused).step()
    for sharded, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(sharded.detach()), expected.detach())
        torch.testing.assert_close(full(sharded.grad), expected.grad)


@ranks(2)
def test_results_lie_as_their_operands_do() -> None:
    model = mixed(SHOAL, MIXTURES[0])
    parameters = [parameter.detach() for parameter in model.parameters()]
    doubled = torch._foreach_mul(parameters, 2.0)
    assert [type(one) for one in doubled] == [type(one) for one in parameters]
    wide = torch._foreach_add(parameters, [one.double() for one in parameters])
    for one, two, parameter in zip(doubled, wide, parameters, strict=True):
        assert two.dtype is torch.float64
        torch.testing.assert_close(full(one), full(parameter) * 2)
        torch.testing.assert_close(full(two), full(parameter).double() * 2)


@ranks(2)
def test_operations_that_mean_nothing_together_are_refused_by_name() -> None:
    model = mixed(SHOAL, MIXTURES[0])
    first, second = model.blocks[0].up.weight.detach(), model.blocks[1].up.weight.detach()
    with pytest.raises(NotImplementedError, match="cat"):
        torch.cat([first, second])
    with pytest.raises(NotImplementedError, match="one operand is a DTensor"):
        first + second


@ranks(2, 4)
@pytest.mark.parametrize("layout", [Even(), Flat()], ids=repr)
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_a_wrapper_clips_what_fully_shard_has_sharded(layout: Layout, norm_type: float) -> None:
    model, plain = stack(), stack()
    fully_shard(model.blocks[0], layout=layout)
    wrapped = FullyShardedDataParallel(model, use_orig_params=True)
    loss_of(wrapped(SHOAL.batches(1)[0])).backward()
    loss_of(plain(PLAIN.batches(1)[0])).backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 1e-2, norm_type)
    torch.testing.assert_close(wrapped.clip_grad_norm_(1e-2, norm_type), norm)
    found = gradients(model.blocks[0])
    check_like_plain(found, gradients(plain.blocks[0]))
