"""`fully_shard` in a graph: the training of the eager engine, and of torch's."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from harness import ranks
from shoal.compile import backend
from shoal.compile.aot.inner import Task, directly
from shoal.fsdp import MixedPrecisionPolicy, fully_shard
from shoal.passes import keep_gathered
from zoo import CASES, SAMPLED, Model, assert_same, batches, build, loss_of, trained

PRECISION = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def sharded(case: str, by: Any = fully_shard, **options: Any) -> Model:
    model = build(case)
    for block in model.blocks:
        by(block, **options)
    by(model, **options)
    return model


def compiled(case: str, **options: Any) -> dict[str, torch.Tensor]:
    torch._dynamo.reset()
    model = sharded(case, **options)
    run = torch.compile(model, backend="shoal", fullgraph=True, options={"cache": False})
    return trained(model, run)


@ranks(2, timeout_s=180)
@pytest.mark.parametrize("case", SAMPLED)
def test_twenty_steps_are_those_of_the_eager_engines(case: str) -> None:
    """Bit by bit beside our own: two ranks add up in one order only. torch scales elsewhere."""
    ours = compiled(case)
    assert_same(ours, trained(sharded(case)))
    assert_same(ours, trained(sharded(case, torch_fully_shard)), exact=False)


def check_half_precision() -> None:
    ours = compiled("mlp", mp_policy=MixedPrecisionPolicy(**PRECISION))
    theirs = sharded("mlp", torch_fully_shard, mp_policy=TorchPolicy(**PRECISION))
    assert_same(ours, trained(theirs), exact=False)


@ranks(2, timeout_s=180)
def test_twenty_steps_in_half_precision() -> None:
    check_half_precision()


@pytest.mark.soak
@ranks(4, timeout_s=240)
def test_twenty_steps_in_half_precision_on_four_ranks() -> None:
    check_half_precision()


@ranks(4, timeout_s=240)
def test_twenty_steps_on_two_axes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    theirs = trained(sharded("mlp", torch_fully_shard, mesh=mesh))
    assert_same(compiled("mlp", mesh=mesh), theirs, exact=False)


@pytest.mark.soak
@ranks(4, timeout_s=240)
@pytest.mark.parametrize("case", CASES)
def test_twenty_steps_on_four_ranks(case: str) -> None:
    ours = compiled(case)
    assert_same(ours, trained(sharded(case)), exact=False)
    assert_same(ours, trained(sharded(case, torch_fully_shard)), exact=False)


@ranks(2, timeout_s=180)
def test_a_budget_decides_what_backward_gathers_again() -> None:
    """Units that stay are not gathered again: nothing kept, the root and the last block, all."""
    model = sharded("mlp")
    sizes = {name: p.numel() * 4 for name, p in model.named_parameters()}
    block = sum(size for name, size in sizes.items() if name.startswith("blocks.1"))
    root = sum(size for name, size in sizes.items() if not name.startswith("blocks"))
    (tokens,) = batches(1)
    for budget, kept in ((0, []), (root + block, ["blocks.1", ""]), (10**6, None)):
        names = keep_gathered(model, budget / 2**20)
        assert kept is None or names == kept
        torch._dynamo.reset()
        options = {"cache": False, "bucket_mb": 1e-6}
        graphs: dict[str, Any] = {}

        def seeing(task: Task, graphs: dict[str, Any] = graphs) -> Any:
            graphs[task.role.value] = task.module.graph
            return directly(task)

        with patch.object(backend, "directly", seeing):
            run = torch.compile(model, backend="shoal", fullgraph=True, options=options)
            loss_of(run, tokens).backward()
        model.zero_grad()
        gathers = [
            node
            for node in graphs["backward"].nodes
            if node.target is torch.ops._c10d_functional.all_gather_into_tensor.default
        ]
        assert len(gathers) == 3 - len(names)
