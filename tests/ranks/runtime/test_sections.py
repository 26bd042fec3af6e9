"""Large parameters of the layout `Even`: gathered and reduced in place, each by its collective."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from collectives import log_traffic
from differential import (
    DIM,
    SHOAL,
    Engine,
    check_engines_agree,
    check_same,
    copies,
    gradients,
    loss_of,
    named_parameters,
    snapshot,
    stack,
    train,
    two_axes,
)
from harness import ranks
from shoal.comm import observer

WIDTH = 16


class Wide(nn.Module):
    """Two matrices that are sections of their own, one of which no rank count divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, WIDTH, bias=False)
        self.odd = nn.Parameter(torch.randn(13, WIDTH))
        self.down = nn.Linear(13, DIM)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(x.to(self.up.weight.dtype)))
        return x + self.gain * self.down(hidden @ self.odd.t())


@contextmanager
def small_sections() -> Iterator[None]:
    """Let parameters be large that a test can have."""
    with patch("shoal.layout.even.ALONE_NUMEL", 64):
        yield


def trained(engine: Engine, **options: Any) -> list[Any]:
    model = engine.shard(stack(Wide), **(options if engine.is_sharded else {}))
    if engine is SHOAL:
        unit = model.blocks[0].__dict__["_shoal_state"].units[0]
        assert len(unit.shards.packing.sections) == 3
    return train(engine, model)


POLICIES = {
    "plain": {},
    "cast": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
}
NARROW = {"param_dtype": torch.bfloat16}


@ranks(2, 3, 4)
@pytest.mark.parametrize("policy", POLICIES)
def test_training_is_torchs(policy: str) -> None:
    with small_sections():
        dtypes = POLICIES[policy]
        check_engines_agree(lambda e: trained(e, dtypes=dtypes), plain=policy == "plain")


@ranks(2)  # in bf16 the sums of more ranks show the order in which they were added
def test_gradients_reduced_where_autograd_put_them() -> None:
    with small_sections():
        check_engines_agree(lambda e: trained(e, dtypes=NARROW), plain=False)


class Twofold(nn.Module):
    """Two parameters whose gradients autograd leaves in the same memory, seen by a hook too."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(DIM, WIDTH))
        self.right = nn.Parameter(torch.randn(DIM, WIDTH))
        self.down = nn.Linear(WIDTH, DIM)
        self.heard: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.left.t() + self.right.t()
        weight.register_hook(self.heard.append)
        return x + self.down(torch.relu(x.to(weight.dtype) @ weight.t()))


@ranks(2)
def test_gradients_that_share_memory_are_divided_once() -> None:
    def run(engine: Engine) -> list[Any]:
        model = engine.shard(stack(Twofold), dtypes={"param_dtype": torch.float16})
        seen = train(engine, model)
        return [*seen, *(copies(block.heard) for block in model.blocks)]

    with small_sections():
        check_engines_agree(run, plain=False)


class Conjugated(nn.Module):
    """Complex matrices, whose gradients are conjugated without a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(DIM, WIDTH, dtype=torch.complex64))
        self.back = nn.Parameter(torch.randn(WIDTH, DIM, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = x.to(self.turn.dtype) @ (self.turn.conj() * 0.5)
        return x + (turned @ (self.back.conj() * 0.5)).abs()


@ranks(2, 3)
def test_conjugated_gradients() -> None:
    def gradients_of_steps() -> list[Any]:
        model = SHOAL.shard(stack(Conjugated))
        seen: list[Any] = []
        for batch in SHOAL.batches():
            loss_of(model(batch)).backward()
            seen.append(gradients(model))
            model.zero_grad()
        return seen

    expected = gradients_of_steps()
    with small_sections():
        check_same(gradients_of_steps(), expected, exact=True, where="in sections")


@ranks(2, 3)
@pytest.mark.parametrize("few", [0, 8])
@pytest.mark.parametrize("policy", POLICIES)
def test_small_ones_by_one_kernel_and_by_a_copy_each(policy: str, few: int) -> None:
    dtypes = POLICIES[policy]
    with patch("shoal._torch.kernels.FEW", few):
        check_engines_agree(
            lambda e: train(
                e, e.shard(stack(Wide), **({"dtypes": dtypes} if e.is_sharded else {}))
            ),
            plain=policy == "plain",
        )


@ranks(2)
@pytest.mark.parametrize("dim", [0, 1])
def test_of_several_dims_only_the_first_is_in_place(dim: int) -> None:
    def place(parameter: nn.Parameter) -> Shard | None:
        return Shard(dim) if parameter.dim() == 2 and parameter.shape[dim] % 2 == 0 else None

    def run(engine: Engine) -> list[Any]:
        options = {"shard_placement_fn": place} if engine.is_sharded else {}
        return train(engine, engine.shard(stack(Wide), **options))

    with small_sections():
        check_engines_agree(run)


@ranks(4)
def test_replicas() -> None:
    with small_sections():
        check_engines_agree(lambda e: trained(e, mesh=two_axes()))


def uneven(engine: Engine) -> list[Any]:
    """Freezing, accumulation without sync, parameters without gradients, moved shards."""
    model = engine.shard(stack(Wide))
    seen: list[Any] = []
    for index, batch in enumerate(engine.batches(6)):
        model.blocks[0].odd.requires_grad_(index % 2 == 0)
        model.blocks[1].up.requires_grad_(index != 3)
        if engine.is_sharded:
            model.set_requires_gradient_sync(index not in (1, 4))
        loss_of(model(batch)).backward()
        if index in (1, 4):
            continue
        seen.append(gradients(model))
        model.zero_grad()
        if index == 3:
            model.load_state_dict(copies(model.state_dict()), assign=True)
    return [*seen, copies(named_parameters(model)), snapshot(model)]


@ranks(2, 3)
def test_freezing_accumulation_and_moved_shards() -> None:
    with small_sections():
        check_engines_agree(uneven)


class Listener:
    """Hears of launches."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def launching(self, reason: str, group: Any, tensor: Any) -> None:
        self.heard.append(f"{reason}, {tensor.numel()}")

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@ranks(2)
def test_one_launch_is_heard_of_for_a_unit() -> None:
    with small_sections():
        model, listener = SHOAL.shard(stack(Wide, num=1)), Listener()
        loss_of(model(SHOAL.batches(1)[0])).backward()
        with observer.observing(listener):
            loss_of(model(SHOAL.batches(1)[0])).backward()
    units = [text.partition(" of unit ")[2].partition(",")[0] for text in listener.heard]
    assert units == ["'root'", "'blocks.0'", "'blocks.0'", "'blocks.0'", "'root'"]


@ranks(2)
def test_collectives_of_the_users_own_are_called_once_for_a_unit() -> None:
    def run(engine: Engine) -> list[Any]:
        model = engine.shard(stack(Wide))
        log = log_traffic(model)
        # torch's engine reduces a block before it gathers for the next one.
        found = train(engine, model)
        return [*found, [[one for one in log if kind in one] for kind in ("gather", "reduce")]]

    with small_sections():
        check_engines_agree(run, plain=False)
