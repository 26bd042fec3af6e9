"""Shards are copied from the host ahead of their gathers; the numbers are those without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from harness import ranks
from oracle import CHECKPOINTS, Checkpoint, batches, build, full, loss_of, shard
from shoal import fully_shard
from shoal.checkpoint import load_training, save_training
from shoal.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, plan_of
from shoal.layout import Block, Even, Flat, Layout, Rows, Whole
from shoal.offload import step_in_backward
from shoal.runtime.module_state import units_of
from shoal.runtime.observe import watch
from shoal.step.action import ActionKind

OFFLOAD = CPUOffloadPolicy(pin_memory=False)
LAYOUTS: list[Layout] = [Even(), Flat(), Rows(), Block(5), Whole()]
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def check_equal_without(checkpoint: Checkpoint = "none", depth: int = 1, **options: Any) -> Any:
    """Train with shards on the host, and without; return the first model."""
    models: list[Any] = [
        shard(build(checkpoint), **options, offload_policy=offload) for offload in (OFFLOAD, None)
    ]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in models]
    for model in models:
        model.set_prefetch_depth(depth)
    for _, part in batches(3, dist.get_rank(), dist.get_world_size()):
        for model, optimizer in zip(models, optimizers, strict=True):
            loss_of(model, part).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                loss_of(model, part)
        for (name, p), (_, q) in zip(*(m.named_parameters() for m in models), strict=True):
            assert torch.equal(full(p.detach()), full(q.detach())), name
    assert all(not unit.step.is_copied and unit._copied is None for unit in units_of(models[0]))
    return models[0]


@pytest.mark.compose("scheduled offload", "fully_shard", "every layout")
@ranks(2, 4)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), HALF], ids=["precise", "half"])
def test_training_is_that_without_offloading_to_the_bit(
    layout: Layout, policy: MixedPrecisionPolicy
) -> None:
    check_equal_without(layout=layout, mp_policy=policy)


@ranks(2)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("checkpoint", [one for one in CHECKPOINTS if one != "none"])
def test_with_recomputation(checkpoint: Checkpoint) -> None:
    check_equal_without(checkpoint)


@ranks(2)
@pytest.mark.parametrize("depth", [0, 2])
def test_at_other_depths(depth: int) -> None:
    check_equal_without(depth=depth)


@ranks(4)
@pytest.mark.parametrize("reshard_after_forward", [2, False])
def test_with_pieces_kept_after_forward(reshard_after_forward: int | bool) -> None:
    check_equal_without(reshard_after_forward=reshard_after_forward)


@pytest.mark.compose("scheduled offload", "HSDP")
@ranks(4)
def test_on_two_axes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    check_equal_without(mesh=mesh)


@ranks(2)
def test_where_ranks_use_different_units() -> None:
    models: list[Any] = [shard(build(), offload_policy=offload) for offload in (OFFLOAD, None)]
    for model in models:
        model.set_reduce_scatter_unused_params(True)
        for _, part in batches(2, dist.get_rank(), 2):
            loss_of(model, part).backward()
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert p.grad is not None
        assert torch.equal(full(p.grad), full(q.grad))


@ranks(2)
def test_what_is_performed_is_planned() -> None:
    model: Any = shard(build(), offload_policy=OFFLOAD)
    ((_, part),) = batches(1, dist.get_rank(), 2)
    loss_of(model, part).backward()
    with watch(model) as recorder:
        loss_of(model, part).backward()
    performed = [f"{one.kind} {one.unit}" for one in recorder.actions()]
    planned = [str(one) for one in plan_of(model).schedule()]
    assert performed == planned
    copies = [one for one in recorder.actions() if one.kind is ActionKind.COPY]
    gathers = [one for one in recorder.actions() if one.kind is ActionKind.GATHER]
    assert len(copies) == len(gathers)
    assert all(one.num_bytes > 0 for one in copies)
    # Each but the first of forward and of backward is copied before the gather of the unit before.
    assert performed.index("copy blocks.1") < performed.index("wait blocks.0")
    assert plan_of(model).peak_bytes() > plan_of(shard(build())).peak_bytes()


@ranks(2)
def test_some_units_on_the_host() -> None:
    models: list[Any] = []
    for offload in (OFFLOAD, None):
        model = build()
        for number, block in enumerate(model.blocks):
            fully_shard(block, offload_policy=offload if number else None)
        models.append(fully_shard(model))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in models]
    step_in_backward(models[0], optimizers[0])
    for _, part in batches(3, dist.get_rank(), 2):
        for model, optimizer in zip(models, optimizers, strict=True):
            loss_of(model, part).backward()
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(full(p.detach()), full(q.detach()))


@ranks(2)
def test_a_copy_of_a_forward_that_raised_is_not_gathered_when_shards_have_changed() -> None:
    model: Any = shard(build(), offload_policy=OFFLOAD)
    ((_, part),) = batches(1, dist.get_rank(), 2)
    loss_of(model, part)

    def refuse(*_: object) -> None:
        raise ArithmeticError("not this time")

    handle = model.blocks[0].up.register_forward_pre_hook(refuse)
    with pytest.raises(ArithmeticError, match="not this time"):
        loss_of(model, part)
    handle.remove()
    for module in (model, model.blocks[0]):  # which computed: their parameters are full
        module.reshard()
    assert any(unit.step.is_copied for unit in units_of(model))
    plain = build()
    with torch.no_grad():
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            p.mul_(0.5)
            q.mul_(0.5)
    with torch.no_grad():
        for block in model.blocks:
            block.unshard()
        torch.testing.assert_close(model.blocks[2].up.weight, plain.blocks[2].up.weight)
        for block in model.blocks:
            block.reshard()
        torch.testing.assert_close(loss_of(model, part), loss_of(plain, part))


@pytest.mark.compose("scheduled offload", "checkpoint")
@ranks(2)
def test_a_run_that_is_stepped_in_backward_resumes_to_the_bit(tmp_path: Path) -> None:
    def start() -> tuple[Any, Any]:
        model = shard(build(), offload_policy=OFFLOAD)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        step_in_backward(model, optimizer)
        return model, optimizer

    def train(model: nn.Module, optimizer: Any, steps: slice) -> None:
        for _, part in batches(6, dist.get_rank(), 2)[steps]:
            loss_of(model, part).backward()
            optimizer.step()

    model, optimizer = start()
    train(model, optimizer, slice(3))
    save_training(tmp_path / "saved", model, optimizer, {})
    train(model, optimizer, slice(3, 6))
    other, its = start()
    load_training(tmp_path / "saved", other, its)
    train(other, its, slice(3, 6))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(full(p.detach()), full(q.detach()))
