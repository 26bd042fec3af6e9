"""Training on NCCL ranks that share one GPU: the unsharded model, torch's engine and shoal's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from differential import (
    PLAIN,
    SHOAL,
    TORCH,
    Engine,
    check_engines_agree,
    check_like_plain,
    check_same,
    gradients,
    in_full,
)
from gpu.runtime.steps import DEVICE, model_for, train
from harness import nccl_ranks
from oracle import CHECKPOINTS, Checkpoint, batches, check_bitwise_equal_to_torch, full, loss_of
from shoal.layout import Even, Flat, Layout, Whole
from shoal.runtime import context, gradient_matrix
from shoal.runtime.gradient_matrix import GradientMatrix

Scenario = Callable[[Engine], list[Any]]

HALF = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def ordinary(engine: Engine) -> list[Any]:
    return train(engine, model_for(engine))


def accumulating(engine: Engine) -> list[Any]:
    return train(engine, model_for(engine), every=2, num_steps=2)


def clipped(engine: Engine) -> list[Any]:
    return train(engine, model_for(engine), max_norm=0.05)


def fused(engine: Engine) -> list[Any]:
    return train(engine, model_for(engine), fused=True)


def frozen(engine: Engine) -> list[Any]:
    return train(engine, model_for(engine, is_partly_frozen=True), fused=True)


def kept(engine: Engine) -> list[Any]:
    return train(engine, model_for(engine, reshard_after_forward=False))


def separately_reduced(engine: Engine) -> list[Any]:
    model = model_for(engine)
    if engine.is_sharded:
        # Collectives may only add, so that division is a kernel after them, on a stream of its own.
        model.set_force_sum_reduction_for_comms(True)
        model.set_gradient_divide_factor(float(dist.get_world_size()))
        for block in model.blocks:
            block.set_force_sum_reduction_for_comms(True)
            block.set_gradient_divide_factor(float(dist.get_world_size()))
    return train(engine, model)


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (ordinary, accumulating, clipped, fused, frozen, kept, separately_reduced)
}


@nccl_ranks(2)
@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks(name: str) -> None:
    check_engines_agree(SCENARIOS[name])


@nccl_ranks(2, 4)
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_parameter_by_a_collective_of_its_own(name: str) -> None:
    with patch("shoal.layout.even.ALONE_NUMEL", 1):
        check_engines_agree(SCENARIOS[name])


@nccl_ranks(4)
@pytest.mark.parametrize("name", ["ordinary", "accumulating", "clipped", "separately_reduced"])
def test_four_ranks(name: str) -> None:
    check_engines_agree(SCENARIOS[name])


@nccl_ranks(2)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_recomputation(checkpoint: Checkpoint) -> None:
    check_engines_agree(lambda engine: train(engine, model_for(engine, checkpoint=checkpoint)))


@nccl_ranks(2)
@pytest.mark.parametrize("precise", [True, False])
def test_bitwise_equal_to_torch(precise: bool) -> None:
    check_bitwise_equal_to_torch(DEVICE, precise)


def check_near(actual: list[Any], expected: list[Any]) -> None:
    """Losses to bf16's precision: different kernels round differently."""
    for value, wanted in zip(actual, expected, strict=True):
        if isinstance(wanted, torch.Tensor):
            torch.testing.assert_close(full(value), full(wanted), rtol=2e-2, atol=2e-2)


@nccl_ranks(2)
def test_mixed_precision() -> None:
    """Bit by bit what torch's engine does, down to the optimizer's state."""

    def scenario(engine: Engine) -> list[Any]:
        return train(engine, model_for(engine, dtypes=HALF), every=2, max_norm=0.1)

    check_engines_agree(scenario, plain=False)
    check_near(scenario(SHOAL), scenario(PLAIN))


@nccl_ranks(2, 4)
@pytest.mark.parametrize("layout", [Flat(), Whole()], ids=repr)
def test_other_layouts(layout: Layout) -> None:
    actual = train(SHOAL, model_for(SHOAL, layout=layout), fused=True, max_norm=0.05)
    for engine in (PLAIN, TORCH):
        expected = in_full(train(engine, model_for(engine), fused=True, max_norm=0.05))
        check_same(in_full(actual), expected, exact=False, where=f"{layout} against {engine.name}")


@nccl_ranks(2)
@pytest.mark.parametrize("layout", [Flat(), Whole()], ids=repr)
def test_other_layouts_in_mixed_precision(layout: Layout) -> None:
    actual = train(SHOAL, model_for(SHOAL, layout=layout, dtypes=HALF), every=2)
    check_near(actual, train(TORCH, model_for(TORCH, dtypes=HALF), every=2))


@nccl_ranks(2, 4)
@pytest.mark.parametrize("layout", [Even(), Flat(), Whole()], ids=repr)
def test_reductions_in_parts(layout: Layout) -> None:
    at_once = train(SHOAL, model_for(SHOAL, layout=layout, dtypes=HALF), every=2)

    def in_small_parts(matrices: Sequence[GradientMatrix]) -> None:
        for matrix in matrices:
            matrix.part_bytes = 1024

    small = patch.object(gradient_matrix, "LARGE_BYTES", 1024)
    with small, patch.object(context, "limit_parts", in_small_parts):
        in_parts = train(SHOAL, model_for(SHOAL, layout=layout, dtypes=HALF), every=2)
    check_same(in_full(in_parts), in_full(at_once), exact=False, where=f"{layout} in parts")


@nccl_ranks(4)
def test_two_axes() -> None:
    """One test for all, since each mesh costs new NCCL groups."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("replicate", "shard"))

    def scenario(engine: Engine) -> list[Any]:
        return train(engine, model_for(engine, mesh=mesh))

    def reducing_late(engine: Engine) -> list[Any]:
        """The replicas add up the gradients of two backwards at once."""
        model = model_for(engine, mesh=mesh)
        for index, (whole, part) in enumerate(batches(2, dist.get_rank(), 4, DEVICE)):
            if engine.is_sharded:
                model.set_requires_all_reduce(index == 1)
            loss_of(model, part if engine.is_sharded else whole).backward()
        return [gradients(model)]

    check_engines_agree(scenario)
    check_engines_agree(reducing_late)
    expected = train(PLAIN, model_for(PLAIN))
    for layout in (Flat(), Whole()):
        actual = train(SHOAL, model_for(SHOAL, layout=layout, mesh=mesh))
        check_like_plain(actual, expected)


@nccl_ranks(4)
def test_resharding_to_fewer_ranks_after_forward() -> None:
    """Against the unsharded model: torch 2.11 splits groups for each unit here, and may crash."""
    actual = train(SHOAL, model_for(SHOAL, reshard_after_forward=2), fused=True)
    expected = in_full(train(PLAIN, model_for(PLAIN), fused=True))
    check_same(in_full(actual), expected, exact=False, where="resharded to two ranks")


@nccl_ranks(2)
@pytest.mark.skipif(
    not hasattr(TorchFSDPModule, "set_post_optim_event"), reason="this torch has no such setter"
)
def test_gathers_that_wait_for_the_optimizer_only() -> None:
    check_engines_agree(lambda engine: train(engine, model_for(engine), marks_updates=True))
