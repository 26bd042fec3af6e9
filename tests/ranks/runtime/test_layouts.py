"""Layouts beyond DTensor: the same training, with parameters cut in other places."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from harness import ranks
from oracle import batches, build, check_training_equals_unsharded, full, loss_of, shard
from shoal.errors import UsageError
from shoal.fsdp import MixedPrecisionPolicy, fully_shard
from shoal.layout import Block, Even, Flat, Layout, Rows, Whole
from shoal.tensor.sharded import ShardedTensor

LAYOUTS: list[Layout] = [Flat(), Rows(), Block(5), Whole()]


@pytest.mark.compose("Adam and AdamW", "fully_shard", "Flat", "Rows", "Block", "Whole")
@pytest.mark.compose("tied parameters in one unit", "fully_shard", "Flat", "Rows", "Block", "Whole")
@ranks(2, 4)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_training_equals_the_unsharded_model(layout: Layout) -> None:
    check_training_equals_unsharded("cpu", "none", layout=layout)


@pytest.mark.compose("activation checkpointing", "fully_shard", "Flat", "Whole")
@ranks(2)
@pytest.mark.parametrize("layout", [Flat(), Whole()], ids=repr)
@pytest.mark.parametrize("checkpoint", ["inside", "outside", "reentrant"])
def test_recomputation(layout: Layout, checkpoint: Any) -> None:
    check_training_equals_unsharded("cpu", checkpoint, layout=layout)


@pytest.mark.compose("Adam and AdamW", "HSDP")
@pytest.mark.compose("tied parameters in one unit", "HSDP")
@ranks(4)
@pytest.mark.parametrize("layout", [Flat(), Whole()], ids=repr)
def test_on_two_axes(layout: Layout) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    check_training_equals_unsharded("cpu", "none", layout=layout, mesh=mesh)


@pytest.mark.compose("mixed precision", "fully_shard", "every layout")
@pytest.mark.compose("clipping by norm", "fully_shard", "every layout")
@ranks(2, 4)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_mixed_precision_is_bitwise_that_of_the_even_layout(layout: Layout) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    models = [shard(build(), layout=cut, mp_policy=policy) for cut in (Even(), layout)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True) for m in models]
    for _, part in batches(3, dist.get_rank(), dist.get_world_size()):
        losses = [loss_of(model, part) for model in models]
        assert torch.equal(losses[0], losses[1])
        norms = []
        for loss, model, optimizer in zip(losses, models, optimizers, strict=True):
            loss.backward()
            norms.append(full(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(norms[1], norms[0])
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(full(q), full(p), rtol=1e-4, atol=1e-5)


@ranks(2)
def test_parameters_are_sharded_tensors_of_the_global_shape() -> None:
    model = shard(build(), layout=Rows())
    for (name, p), (_, q) in zip(build().named_parameters(), model.named_parameters(), strict=True):
        assert isinstance(q, ShardedTensor), name
        assert (q.shape, q.dtype) == (p.shape, p.dtype)
        assert torch.equal(full(q), p)


@pytest.mark.compose("frozen parameters", "fully_shard", "Flat")
@ranks(2)
@pytest.mark.parametrize("fused", [False, True])
def test_frozen_and_unused_parameters(fused: bool) -> None:
    plain, sharded = build(), shard(build(), layout=Flat())
    for model in (plain, sharded):
        for block in model.blocks[1:]:
            block.up.weight.requires_grad_(False)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2, fused=fused) for m in (plain, sharded)]
    for whole, part in batches(3, dist.get_rank(), 2):
        for model, tokens, optimizer in zip(
            (plain, sharded), (whole, part), optimizers, strict=True
        ):
            loss_of(model, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(plain.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(full(q), p)


@ranks(2)
def test_layouts_and_placements_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="shard_placement_fn chooses dims"):
        fully_shard(nn.Linear(4, 4), layout=Flat(), shard_placement_fn=lambda _: None)
