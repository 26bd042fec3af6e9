"""Shards kept in the compute dtype, written and sent on streams: the bits of gathers that cast."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from differential import SHOAL, check_same
from gpu.runtime.steps import model_for, train
from harness import nccl_ranks
from shoal.fsdp import CPUOffloadPolicy, plan_of
from shoal.layout import Even, Flat, Layout, Whole

HALF = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def trained(keep: bool, options: dict[str, Any], **how: Any) -> list[Any]:
    model = model_for(SHOAL, dtypes=HALF, **options)
    model.set_keep_low_precision_shards(keep)
    assert (plan_of(model).kept_bytes > 0) == keep
    return train(SHOAL, model, **how)


def check_bits(options: dict[str, Any], **how: Any) -> None:
    seen = [trained(keep, options, **how) for keep in (False, True)]
    check_same(seen[1], seen[0], exact=True, where="kept against cast anew")


@nccl_ranks(2)
@pytest.mark.parametrize("layout", [Even(), Flat(), Whole()], ids=repr)
@pytest.mark.parametrize("fused", [False, True])
def test_the_optimizers_step_writes_them(layout: Layout, fused: bool) -> None:
    check_bits({"layout": layout}, fused=fused, num_steps=4)


@nccl_ranks(2)
def test_the_optimizers_step_marked_by_an_event() -> None:
    check_bits({}, marks_updates=True, num_steps=4)


@nccl_ranks(2)
def test_micro_batches() -> None:
    check_bits({}, every=3)


@nccl_ranks(2)
@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.parametrize("layout", [Even(), Flat()], ids=repr)
def test_shards_on_the_host(layout: Layout, pin_memory: bool) -> None:
    offload = CPUOffloadPolicy(pin_memory=pin_memory)
    check_bits({"layout": layout, "offload_policy": offload}, every=2)
