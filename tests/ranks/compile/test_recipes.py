"""`torch.compile` and `fully_shard` in any order, on models and on blocks: torch's own training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from harness import ranks
from shoal.fsdp import fully_shard
from zoo import DIM, Model, Plain, assert_same, trained

# Dynamo looks at the gradient of whatever comes into a graph.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

NUM_BLOCKS = 10
"""More than the graphs that Dynamo makes for one function."""
BACKENDS = ("shoal", "aot_eager", "eager")
Shard = Callable[[nn.Module], Any]


def build(num_blocks: int) -> Model:
    torch.manual_seed(0)
    model = Model(Plain)
    model.blocks = nn.ModuleList(Plain() for _ in range(num_blocks))
    return model


def shard_all(model: Any, shard: Shard) -> None:
    for block in model.blocks:
        shard(block)
    shard(model)


def model_then_shards(model: Any, shard: Shard, **how: Any) -> Any:
    run = torch.compile(model, **how)
    shard_all(model, shard)
    return run


def shards_then_model(model: Any, shard: Shard, **how: Any) -> Any:
    shard_all(model, shard)
    return torch.compile(model, **how)


def method_then_shards(model: Any, shard: Shard, **how: Any) -> Any:
    model.compile(**how)
    shard_all(model, shard)
    return model


def shards_then_method(model: Any, shard: Shard, **how: Any) -> Any:
    shard_all(model, shard)
    model.compile(**how)
    return model


def blocks_then_shards(model: Any, shard: Shard, **how: Any) -> Any:
    for block in model.blocks:
        block.compile(**how)
    shard_all(model, shard)
    return model


def shards_then_blocks(model: Any, shard: Shard, **how: Any) -> Any:
    shard_all(model, shard)
    for block in model.blocks:
        block.compile(**how)
    return model


def shards_then_wrapped_blocks(model: Any, shard: Shard, **how: Any) -> Any:
    shard_all(model, shard)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, **how)
    return model


MODELS = (model_then_shards, method_then_shards, shards_then_model, shards_then_method)
BLOCKS = (blocks_then_shards, shards_then_blocks, shards_then_wrapped_blocks)


def state_of(recipe: Any, shard: Shard, num_blocks: int, **how: Any) -> dict[str, Tensor]:
    torch._dynamo.reset()
    model = build(num_blocks)
    run = recipe(model, shard, **how)
    state = trained(model, run, 2)
    return {name.replace("_orig_mod.", ""): one for name, one in state.items()}


def by_torch(num_blocks: int) -> dict[str, Tensor]:
    def eager(model: Any, shard: Shard) -> Any:
        shard_all(model, shard)
        return model

    return state_of(eager, torch_fully_shard, num_blocks)


@ranks(2, timeout_s=180)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_compiled_before_or_after(backend: str) -> None:
    expected = by_torch(1)
    # Compiled by shoal after it was sharded: see the tests of doors.
    for recipe in MODELS[:2] if backend == "shoal" else MODELS:
        # Only shoal has gathers in graphs; the others break theirs there, as with torch's engine.
        ours = state_of(recipe, fully_shard, 1, backend=backend, fullgraph=backend == "shoal")
        assert_same(ours, expected)


@ranks(2, timeout_s=180)
@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_compiled_before_or_after_share_one_graph(backend: str) -> None:
    """With the gathers left to the engine, which has several on their way."""
    expected = by_torch(NUM_BLOCKS)
    for recipe in BLOCKS:
        counters.clear()
        ours = state_of(recipe, fully_shard, NUM_BLOCKS, backend=backend, fullgraph=True)
        assert_same(ours, expected)
        assert counters["stats"]["unique_graphs"] == 1, recipe


@ranks(2, timeout_s=180)
def test_a_block_that_is_called_by_itself_gathers_in_its_graph() -> None:
    torch._dynamo.reset()
    block: Any = fully_shard(Plain())
    block.compile(backend="shoal", fullgraph=True)
    block(torch.ones(2, DIM)).sum().backward()
    assert all(unit.in_graph is not None for unit in block.__dict__["_shoal_state"].units)
    assert all(p.grad is not None for p in block.parameters())


class Calling(Plain):
    """Stands around its own calls, as some libraries' modules do."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().__call__(*args, **kwargs)


class Compiling(Plain):
    """Has a word in how it is compiled."""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        super().compile(*args, fullgraph=True, **kwargs)


@ranks(2, timeout_s=180)
@pytest.mark.parametrize("cls", [Calling, Compiling])
@pytest.mark.parametrize("backend", ["shoal", "eager"])
def test_modules_with_calls_of_their_own(cls: type[Plain], backend: str) -> None:
    seen = []
    for shard in (fully_shard, torch_fully_shard):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model: Any = shard(cls())
        model.compile(backend=backend if shard is fully_shard else "eager")
        output = model(torch.ones(2, DIM))
        output.sum().backward()
        seen.append([output, *(p.grad.full_tensor() for p in model.parameters())])
    for ours, theirs in zip(*seen, strict=True):
        assert torch.equal(ours, theirs)
