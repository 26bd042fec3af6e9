"""Mistakes and the words for them: what was expected, what was given, what to do; on every rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from differential import DIM, PLAIN, SHOAL, check_close, error_of, loss_of, stack, train
from harness import ranks
from shoal.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from shoal.layout import Even, Flat, Layout, Packing, ParamSpec, Rows
from shoal.runtime.fully_shard import replicate


class Nameless(Layout):
    """As `Flat`, by somebody who forgot that layouts are values."""

    def pack(self, params: Sequence[ParamSpec], world_size: int) -> Packing:
        return Flat().pack(params, world_size)


class Encoder(nn.Module):
    """A method beside `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def root_first() -> None:
    model = fully_shard(stack())
    fully_shard(model.blocks[1])


def root_first_flat() -> None:
    model = fully_shard(stack(), layout=Flat())
    fully_shard(model.blocks[1], layout=Flat())


def with_group(**options: Any) -> Callable[[], Any]:
    return lambda: fully_shard(nn.Linear(DIM, DIM), **options)


def wrapped(**options: Any) -> Callable[[], Any]:
    return lambda: FullyShardedDataParallel(nn.Linear(DIM, DIM), **options)


def group_as_mesh() -> None:
    fully_shard(nn.Linear(DIM, DIM), mesh=dist.group.WORLD)


def plain_state_dict() -> None:
    SHOAL.shard(stack()).load_state_dict(stack().state_dict())


def tied_in_two_dtypes() -> None:
    model = stack()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    fully_shard(model.blocks[0])
    fully_shard(model.blocks[1], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def inner_layer() -> None:
    model = SHOAL.shard(stack(), layout=Flat())
    model(torch.ones(2, DIM))
    model.blocks[1].up(torch.ones(2, DIM))


def inner_layer_at_first() -> None:
    """Before the model has run, when nobody knows yet what the unit is called in it."""
    SHOAL.shard(stack(), layout=Flat()).blocks[1].up(torch.ones(2, DIM))


def unregistered_method() -> None:
    model = nn.Sequential(Encoder())
    fully_shard(model[0], layout=Rows())
    fully_shard(model)
    model(torch.ones(2, DIM))
    model[0].encode(torch.ones(2, DIM))


def operation_of_a_parameter() -> None:
    model = SHOAL.shard(stack(), layout=Flat())
    model(torch.ones(2, DIM))
    torch.linalg.qr(model.blocks[0].up.weight)


MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], list[str]]] = {
    "the root before its blocks": (
        root_first,
        ValueError,
        [
            "'blocks.1.gain'",
            " of Stack belongs",
            "this Block",
            "from the inside out",
            "blocks first",
        ],
    ),
    "the root before its blocks, flat": (root_first_flat, ValueError, ["from the inside out"]),
    "the name of a layout": (with_group(layout="flat"), ValueError, ["'flat'", "pass Flat("]),
    "an unknown layout": (with_group(layout="diagonal"), ValueError, ["Even(), Flat(), Rows()"]),
    "the class of a layout": (with_group(layout=Flat), ValueError, ["class Flat", "pass Flat("]),
    "a layout without value": (
        with_group(layout=Nameless()),
        ValueError,
        ["Nameless", "@dataclass"],
    ),
    "a dtype as policy": (
        with_group(mp_policy=torch.bfloat16),
        ValueError,
        ["torch.bfloat16", "MixedPrecisionPolicy(param_dtype=torch.bfloat16)"],
    ),
    "FSDP1's precision": (
        with_group(mp_policy=torch_fsdp.MixedPrecision(param_dtype=torch.float16)),
        ValueError,
        ["MixedPrecisionPolicy(param_dtype=torch.float16)"],
    ),
    "offload as a flag": (with_group(offload_policy=True), ValueError, ["CPUOffloadPolicy()"]),
    "FSDP1's offload": (
        with_group(offload_policy=torch_fsdp.CPUOffload(offload_params=True)),
        ValueError,
        ["CPUOffloadPolicy()"],
    ),
    "a number as mesh": (with_group(mesh=2), ValueError, ["DeviceMesh", "2", "init_device_mesh"]),
    "a group as mesh": (group_as_mesh, ValueError, ["DeviceMesh.from_group"]),
    "auto_wrap_policy": (with_group(auto_wrap_policy=None), TypeError, ["on each block"]),
    "sharding_strategy": (
        with_group(sharding_strategy=ShardingStrategy.FULL_SHARD),
        TypeError,
        ["reshard_after_forward=True"],
    ),
    "use_orig_params": (with_group(use_orig_params=True), TypeError, ["keep their names"]),
    "device_id": (with_group(device_id=0), TypeError, ["set_device"]),
    "a misspelt argument": (with_group(mesch=None), TypeError, ["'mesch'"]),
    "a plain state dict": (
        plain_state_dict,
        ValueError,
        ["'first.weight'", "set_model_state_dict", "full_parameters"],
    ),
    "tied weights in two dtypes": (
        tied_in_two_dtypes,
        ValueError,
        ["'up.weight'", "'Block.up.weight'", "torch.bfloat16", "one param_dtype"],
    ),
    "an inner layer": (
        inner_layer,
        NotImplementedError,
        ["'blocks.1.up.", "register_fsdp_forward_method"],
    ),
    "an inner layer before the first forward": (
        inner_layer_at_first,
        NotImplementedError,
        ["Block.up.", "register_fsdp_forward_method"],
    ),
    "names of ignored parameters": (
        with_group(ignored_params={"weight"}),
        ValueError,
        ["ignored_params", "'weight'", "get_parameter"],
    ),
    "a method that is not registered": (
        unregistered_method,
        NotImplementedError,
        ["'0.inner.", "register_fsdp_forward_method"],
    ),
    "an operation of a parameter": (
        operation_of_a_parameter,
        NotImplementedError,
        ["'blocks.0.up.weight'", "full_tensor()"],
    ),
    "the wrapper: fully_shard's policy": (
        wrapped(mixed_precision=MixedPrecisionPolicy()),
        TypeError,
        ["mixed_precision", "MixedPrecision"],
    ),
    "the wrapper: offload as a flag": (wrapped(cpu_offload=True), TypeError, ["CPUOffload"]),
    "the wrapper: a strategy's name": (
        wrapped(sharding_strategy="FULL_SHARD"),
        TypeError,
        ["ShardingStrategy", "'FULL_SHARD'"],
    ),
}


@ranks(2)
@pytest.mark.parametrize("name", MISTAKES)
def test_words(name: str) -> None:
    make, kind, words = MISTAKES[name]
    error = error_of(make)
    assert isinstance(error, kind), repr(error)
    missing = [word for word in words if word not in str(error)]
    assert not missing, f"{missing} not in {error}"
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, re.sub(r"\d+", "", str(error)))
    assert len(set(said)) == 1, said


@ranks(2, 4)
@pytest.mark.parametrize("layout", [None, Even(), Flat()], ids=repr)
def test_torchs_own_policies_mean_the_same(layout: Layout | None) -> None:
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    results = [
        train(SHOAL, SHOAL.shard(stack(), layout=layout, mp_policy=policy, offload_policy=offload))
        for policy, offload in (
            (MixedPrecisionPolicy(**dtypes), CPUOffloadPolicy(pin_memory=False)),
            (
                torch_fsdp.MixedPrecisionPolicy(**dtypes),
                torch_fsdp.CPUOffloadPolicy(pin_memory=False),
            ),
            (MixedPrecisionPolicy(**dtypes), OffloadPolicy()),
            (torch_fsdp.MixedPrecisionPolicy(**dtypes), torch_fsdp.OffloadPolicy()),
        )
    ]
    losses = [[float(step[0]) for step in result[:-1]] for result in results]
    assert losses[0] == losses[1] == losses[2] == losses[3]


@ranks(2)
def test_torchs_own_policies_for_replicas() -> None:
    policy = torch_fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = replicate(stack(), mp_policy=policy, offload_policy=torch_fsdp.OffloadPolicy())
    assert model(SHOAL.batches(1)[0]).dtype is torch.bfloat16
    with pytest.raises(TypeError, match="each block"):
        replicate(stack(), auto_wrap_policy=None)


@ranks(2)
@pytest.mark.parametrize("shard", [fully_shard, replicate])
def test_ignored_parameters_may_come_in_a_list(shard: Any) -> None:
    model = nn.Linear(DIM, DIM + 1)
    weight = model.weight
    assert shard(model, ignored_params=[weight]).weight is weight


@ranks(2)
def test_the_advice_for_plain_state_dicts_works() -> None:
    model, plain = SHOAL.shard(stack()), stack()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(2)
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, plain.state_dict(), options=options)
    check_close(model, plain)


@pytest.mark.parametrize("kind", ["norm and head", "three", "nested"])
@ranks(2, 4)
@pytest.mark.parametrize("layout", [Even(), Flat(), Rows()], ids=repr)
@pytest.mark.parametrize("way", ["model", "each module"])
def test_units_of_several_modules_come_from_meta(kind: str, layout: Layout, way: str) -> None:
    with torch.device("meta"):
        model: Any = stack()
    lists = {
        "norm and head": [[model.first, model.head]],
        "three": [[model.first, model.blocks[0], model.head]],
        "nested": [[model.blocks[0].up, model.blocks[1].up], [model.first, model.head]],
    }[kind]
    for modules in lists:
        fully_shard(modules, layout=layout)
    fully_shard(model, layout=layout)
    for module in [model] if way == "model" else [m for ms in lists for m in ms]:
        module.to_empty(device="cpu")
    if way != "model":
        model.to_empty(device="cpu")
    plain = stack()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), plain.parameters(), strict=True):
            parameter.copy_(value if not isinstance(layout, Even) else spread(value, parameter))
        for block in model.blocks:
            block.seen.zero_()
    for one, engine in ((model, SHOAL), (plain, PLAIN)):
        loss_of(one(engine.batches(1)[0])).backward()
    check_close(model, plain)


def spread(value: torch.Tensor, like: Any) -> torch.Tensor:
    return torch.distributed.tensor.distribute_tensor(value.data, like.device_mesh, like.placements)
