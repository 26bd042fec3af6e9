"""Blocks compiled one by one inside a model that is sharded eagerly."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from differential import (
    DIM,
    PLAIN,
    SHOAL,
    Block,
    Engine,
    Steady,
    check_engines_agree,
    check_like_plain,
    check_names,
    gradients,
    loss_of,
    snapshot,
    stack,
)
from harness import ranks

# Dynamo looks at the gradient of whatever it traces.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

COMPILE_S = 180.0
"""A compiler takes its time on a busy machine."""

BACKEND = "aot_eager"
"""Traces forward and backward as inductor does, without the time to compile kernels."""


def compiled(engine: Engine, how: str, backend: str = BACKEND, **options: Any) -> Any:
    """A sharded stack whose blocks are compiled; the unsharded one stays eager."""
    model = stack()
    if engine is PLAIN:
        return model
    for index, block in enumerate(model.blocks):
        if how == "in place":
            block.compile(backend=backend)
        elif how == "wrapped":
            model.blocks[index] = torch.compile(block, backend=backend)
        elif how == "a method":
            block.compute = torch.compile(block.compute, backend=backend)
    model = engine.shard(model, **options)
    if how == "after sharding":
        for block in model.blocks:
            block.compile(backend=backend)
    elif how == "everything":
        model.compile(backend=backend)
    return model


def named(found: dict[str, Any]) -> dict[str, Any]:
    """Observations by the names that parameters have in the eager model."""
    return {name.replace("_orig_mod.", ""): value for name, value in found.items()}


def steps(engine: Engine, model: nn.Module, num: int = 4) -> list[Any]:
    """Train; from the third step on nothing may be compiled any more."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: list[Any] = []
    for index, batch in enumerate(engine.batches(num)):
        stance = "fail_on_recompile" if index > 1 else "default"
        with torch.compiler.set_stance(stance):
            loss = loss_of(model(batch))
            loss.backward()
        seen.append([engine.mean(loss), named(gradients(model))])
        optimizer.step()
        optimizer.zero_grad()
    assert not engine.is_sharded or counters["stats"]["unique_graphs"] > 0
    left = snapshot(model, optimizer)
    return [*seen, {key: named(left[key]) for key in ("parameters", "buffers")}]


@ranks(2, timeout_s=COMPILE_S)
@pytest.mark.parametrize("how", ["in place", "wrapped", "a method", "after sharding"])
def test_compiled_blocks_train_like_eager_ones_and_are_compiled_once(how: str) -> None:
    check_engines_agree(lambda engine: steps(engine, compiled(engine, how)))


@ranks(2, timeout_s=COMPILE_S)
@pytest.mark.parametrize("reshard", [True, False])
def test_compiled_blocks_that_are_kept_or_freed_after_forward(reshard: bool) -> None:
    def scenario(engine: Engine) -> list[Any]:
        return steps(engine, compiled(engine, "in place", reshard_after_forward=reshard))

    check_engines_agree(scenario)


@ranks(2, timeout_s=COMPILE_S)
def test_a_model_compiled_as_a_whole_breaks_at_its_units() -> None:
    check_engines_agree(lambda engine: steps(engine, compiled(engine, "everything")))


@ranks(2, timeout_s=COMPILE_S)
@pytest.mark.parametrize("reduce", [torch.bfloat16, torch.float32])
def test_compiled_blocks_with_mixed_precision(reduce: torch.dtype) -> None:
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": reduce}

    def scenario(engine: Engine) -> list[Any]:
        return steps(engine, compiled(engine, "in place", dtypes=dtypes))

    check_engines_agree(scenario, plain=False)


@ranks(2, timeout_s=COMPILE_S)
def test_compiled_blocks_accumulate_and_evaluate() -> None:
    def scenario(engine: Engine) -> list[Any]:
        model = compiled(engine, "in place")
        seen: list[Any] = []
        for index, batch in enumerate(engine.batches(6)):
            if engine.is_sharded:
                model.set_requires_gradient_sync(index % 2 == 1)
            # The first round compiles for training, with and without gradients at hand.
            stance = "fail_on_recompile" if index > 3 else "default"
            with torch.compiler.set_stance(stance):
                loss_of(model(batch)).backward()
                with torch.no_grad():
                    seen.append(engine.mean(loss_of(model(batch))))
        if engine.is_sharded:
            model.reshard()
        return [*seen, gradients(model)]

    check_engines_agree(scenario)


class Recomputed(nn.Module):
    """Compiled inside, recomputed around."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Steady()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


@ranks(2, timeout_s=COMPILE_S)
@pytest.mark.parametrize("inside", [True, False])
def test_compiled_blocks_that_recompute(inside: bool) -> None:
    def scenario(engine: Engine) -> list[Any]:
        model = stack(Recomputed)
        for block in model.blocks:
            if engine.is_sharded:
                (block.inner if inside else block).compile(backend=BACKEND)
        return steps(engine, engine.shard(model))

    check_engines_agree(scenario)


class Twin(nn.Module):
    """One compiled block, called twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[0](self.blocks[0](x)))


@ranks(2, timeout_s=COMPILE_S)
def test_a_compiled_block_that_is_used_twice() -> None:
    def scenario(engine: Engine) -> list[Any]:
        torch.manual_seed(0)
        model = Twin()
        if engine.is_sharded:
            model.blocks[0].compile(backend=BACKEND)
        return steps(engine, engine.shard(model))

    check_engines_agree(scenario, exact=False)


@ranks(2, timeout_s=COMPILE_S)
@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_blocks_compiled_by_inductor(how: str) -> None:
    check_engines_agree(lambda engine: steps(engine, compiled(engine, how, "inductor")))


NUM_ROWS = [4, 3, 6, 2, 7, 3]
"""Of each step's batch on each rank; the second size makes the dimension dynamic."""


def resized(engine: Engine, how: str) -> list[Any]:
    """A graph for each whole block, whatever the size of the batch, in training and evaluation."""
    model = stack(num=2)
    if engine.is_sharded:
        for index, block in enumerate(model.blocks):
            if how == "in place":
                block.compile(backend=BACKEND, fullgraph=True)
            else:
                model.blocks[index] = torch.compile(block, backend=BACKEND, fullgraph=True)
    model = engine.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    seen: list[Any] = []
    for index, num_rows in enumerate(NUM_ROWS):
        parts = torch.randn(dist.get_world_size(), num_rows, DIM, generator=generator)
        x = parts[dist.get_rank()] if engine.is_sharded else parts.flatten(0, 1)
        with torch.compiler.set_stance("fail_on_recompile" if index > 2 else "default"):
            loss = loss_of(model(x))
            loss.backward()
            with torch.no_grad():
                evaluated = engine.mean(loss_of(model(x)))
        if engine.is_sharded:
            model.reshard()  # torch's root stays gathered after any forward
        seen.append([engine.mean(loss), evaluated, named(gradients(model))])
        optimizer.step()
        optimizer.zero_grad()
    assert not engine.is_sharded or counters["stats"]["unique_graphs"] > 0
    return [*seen, named(snapshot(model)["parameters"])]


@ranks(2, timeout_s=COMPILE_S)
@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_whole_compiled_blocks_with_batches_of_many_sizes(how: str) -> None:
    check_engines_agree(resized, how)


@ranks(2, timeout_s=COMPILE_S)
def test_compiled_autograd_is_right_or_refused_by_name() -> None:
    """Torch's engine takes it and gives gradients that are not those of the unsharded model."""
    plain, sharded = stack(), SHOAL.shard(stack())
    loss_of(plain(PLAIN.batches(1)[0])).backward()
    try:
        with compiled_autograd._enable(torch.compile(backend="eager")):
            loss_of(sharded(SHOAL.batches(1)[0])).backward()
    except NotImplementedError as error:
        check_names(error, "compiled autograd")
        return
    check_like_plain(gradients(sharded), gradients(plain))


@ranks(2, timeout_s=COMPILE_S)
def test_compiled_autograd_of_one_unit_is_refused_by_name() -> None:
    """Nothing is freed before its backward; torch's engine leaves this rank's own gradients."""
    sharded = SHOAL.api.fully_shard(stack())
    with (
        compiled_autograd._enable(torch.compile(backend=BACKEND)),
        pytest.raises(NotImplementedError, match="compiled autograd is not supported"),
    ):
        loss_of(sharded(SHOAL.batches(1)[0])).backward()


@ranks(2, timeout_s=COMPILE_S)
def test_another_shape_is_what_recompiling_looks_like() -> None:
    """Otherwise the tests above could not fail for it."""
    model = compiled(SHOAL, "in place")
    (batch,) = SHOAL.batches(1)
    loss_of(model(batch)).backward()
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="recom"):
        model(torch.cat([batch] * 2))
