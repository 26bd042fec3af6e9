"""`full_parameters`: what one rank alone may do inside, and what the block leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

from differential import PLAIN, SHOAL, Steady, check_close, loss_of, stack, train
from harness import ranks
from shoal import ShardedTensor, fully_shard
from shoal.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    full_parameters,
)
from shoal.layout import Block, Even, Flat, Layout, Rows, Whole

LAYOUTS: list[Layout] = [Even(), Flat(), Rows(), Block(4), Whole()]


def sharded(layout: Layout, **options: Any) -> Any:
    return SHOAL.shard(stack(Steady), layout=layout, **options)


def check_is(state: dict[str, torch.Tensor], expected: nn.Module, dtype: Any = None) -> None:
    wanted = expected.state_dict()
    assert list(state) == list(wanted)
    for name, value in wanted.items():
        assert type(state[name]) is torch.Tensor
        assert torch.equal(state[name], value.to(dtype) if dtype else value), name


@ranks(2, 4)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize("when", ["before the first step", "later"])
def test_rank_0_alone_saves_a_state_dict(layout: Layout, when: str, tmp_path: Path) -> None:
    model, plain = sharded(layout), stack(Steady)
    if when == "later":
        train(SHOAL, model)
        train(PLAIN, plain)
        with full_parameters(model):
            plain.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    kept = None
    with full_parameters(model):
        if dist.get_rank() == 0:
            kept = model.state_dict()
            check_is(kept, plain)
            torch.save(kept, tmp_path / "whole.pt")
            save_file(kept, tmp_path / "whole.safetensors")
        check_is(model.blocks[1].state_dict(), plain.blocks[1])
    assert isinstance(model.head.weight, (DTensor, ShardedTensor))
    state = model.state_dict()
    assert all(
        isinstance(state[name], (DTensor, ShardedTensor)) for name, _ in model.named_parameters()
    )
    train(SHOAL, model)
    if kept is not None:
        # What was taken out lives on, whatever the engine has done with the memory since.
        check_is(kept, plain)
        check_is(torch.load(tmp_path / "whole.pt"), plain)
        loaded = load_file(tmp_path / "whole.safetensors")
        check_is({name: loaded[name] for name in kept}, plain)


@ranks(2, 4)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize("assign", [False, True])
def test_full_values_are_loaded_inside(layout: Layout, assign: bool) -> None:
    model, plain = sharded(layout), stack(Steady)
    train(PLAIN, plain)
    whole = {name: value.clone() for name, value in plain.state_dict().items()}
    with full_parameters(model, writeback=True):
        model.load_state_dict(whole, assign=assign)
        check_is(model.state_dict(), plain)
    for parameter in plain.parameters():
        parameter.grad = None
    check_close(model, plain)
    model.zero_grad()
    plain.zero_grad()
    train(SHOAL, model)
    train(PLAIN, plain)
    check_close(model, plain)


def change_and_reshard(model: Any) -> None:
    with full_parameters(model, writeback=True), torch.no_grad():
        model.blocks[0].up.weight += 1
        model.blocks[1].reshard()


@ranks(2)
def test_what_would_be_lost_is_refused() -> None:
    model, plain = sharded(Even()), stack()
    with full_parameters(model), pytest.raises(ValueError, match="writeback=True"):
        model.load_state_dict(plain.state_dict())
    model(SHOAL.batches(1)[0])
    with pytest.raises(RuntimeError, match=r"blocks\.1.*freed inside the block"):
        change_and_reshard(model)
    check_close(model, plain)


@ranks(2, 4)
@pytest.mark.parametrize("layout", [Even(), Flat()], ids=repr)
def test_rank_0_alone_runs_forwards(layout: Layout) -> None:
    """Another way through the model than the ranks take together: it must not be remembered."""
    model, plain = sharded(layout), stack(Steady)
    train(SHOAL, model)
    train(PLAIN, plain)
    batch = PLAIN.batches(1)[0]
    with full_parameters(model), torch.no_grad():
        if dist.get_rank() == 0:
            torch.testing.assert_close(model(batch), plain(batch))
            blocks, model.blocks = model.blocks, nn.ModuleList(reversed(list(model.blocks)))
            model(batch)
            model.blocks = blocks
            torch.testing.assert_close(model.blocks[1](batch), plain.blocks[1](batch))
    train(SHOAL, model)
    train(PLAIN, plain)
    check_close(model, plain)


@ranks(2)
def test_shared_parameters_stay_shared() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    fully_shard(model)
    with full_parameters(model):
        state = model.state_dict()
        assert state["0.weight"] is state["1.weight"]
        with torch.no_grad():
            first.weight += 1
        assert torch.equal(model.state_dict()["1.weight"], state["0.weight"] + 1)
        assert model.state_dict(keep_vars=True)["0.weight"] is first.weight


@ranks(2)
def test_blocks_inside_blocks() -> None:
    model, plain = sharded(Flat()), stack()
    with full_parameters(model):
        with full_parameters(model.blocks[0]):
            check_is(model.state_dict(), plain)
        check_is(model.state_dict(), plain)
    assert isinstance(model.state_dict()["blocks.0.up.weight"], ShardedTensor)


@ranks(2)
def test_values_have_the_dtype_of_compute() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model, plain = sharded(Even(), mp_policy=policy), stack()
    with full_parameters(model):
        state = {name: value for name, value in model.state_dict().items() if "seen" not in name}
        for name, value in state.items():
            assert torch.equal(value, plain.state_dict()[name].bfloat16())


@ranks(2, 4)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_the_wrapper_shows_whole_parameters_to_one_rank(use_orig_params: bool) -> None:
    model, plain = stack(), stack()
    wrapped = FullyShardedDataParallel(model, use_orig_params=use_orig_params)
    loss_of(wrapped(SHOAL.batches(1)[0])).backward()
    with FullyShardedDataParallel.summon_full_params(wrapped, writeback=False):
        if dist.get_rank() == 0:
            state = {k: v for k, v in wrapped.module.state_dict().items() if "seen" not in k}
            for name, value in state.items():
                assert torch.equal(value, plain.state_dict()[name])
