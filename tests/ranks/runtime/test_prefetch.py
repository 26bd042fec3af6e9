"""Which gathers are launched when, as the user asked for it."""

from typing import Any

import pytest
import torch
from torch import nn

from collectives import log_traffic
from differential import (
    SHOAL,
    TORCH,
    Block,
    Engine,
    Stack,
    check_engines_agree,
    loss_of,
    snapshot,
    stack,
    train,
)
from harness import ranks
from shoal import fully_shard
from shoal.layout import Even, Flat, Layout
from shoal.runtime.observe import watch
from shoal.step.action import ActionKind


class Announcing(nn.Module):
    """A block that says when it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()
        self.name, self.log = "", []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log.append(f"forward {self.name}")
        y = self.inner(x)
        y.register_hook(self._announce)
        return y * 1.0  # so that backward enters the unit before it comes to the hook

    def _announce(self, gradient: torch.Tensor) -> None:
        self.log.append(f"backward {self.name}")


def prefetching(engine: Engine, ahead: int) -> tuple[Stack, list[str]]:
    """Blocks that gather `ahead` others early, in both directions, and the log they write."""
    model = engine.shard(stack(Announcing, 4))
    blocks = list(model.blocks)
    log = log_traffic(model)
    for index, block in enumerate(blocks):
        block.name, block.log = f"blocks.{index}", log
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + ahead])
        block.set_modules_to_backward_prefetch(blocks[max(index - ahead, 0) : index][::-1])
    return model, log


def prefetched(engine: Engine, ahead: int) -> list[Any]:
    model, log = prefetching(engine, ahead)
    seen: list[Any] = []
    for batch in engine.batches(3):
        loss_of(model(batch)).backward()
        seen.append([line for line in log if line.startswith("gather")])
        log.clear()
    return [*seen, snapshot(model)]


@ranks(2)
@pytest.mark.parametrize("ahead", [0, 1, 2, 3], ids=["implicit", "one", "two", "three"])
def test_gathers_come_in_the_order_of_torch(ahead: int) -> None:
    check_engines_agree(prefetched, ahead, plain=False)


@ranks(2)
@pytest.mark.parametrize("engine", [TORCH, SHOAL], ids=["torch", "shoal"])
@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_explicit_prefetch_is_launched_before_the_block_computes(
    engine: Engine, ahead: int
) -> None:
    model, log = prefetching(engine, ahead)
    for batch in engine.batches(3):
        log.clear()
        loss_of(model(batch)).backward()
        turn = log.index("forward blocks.3")
        forward, backward = log[: turn + 1], log[turn:]
        for index in range(4):
            begun = forward[: forward.index(f"forward blocks.{index}")]
            for other in range(index, min(index + ahead, 3) + 1):
                assert f"gather blocks.{other}" in begun, (index, log)
            begun = backward[: backward.index(f"backward blocks.{index}")]
            for other in range(max(index - ahead, 0), index + 1):
                assert f"gather blocks.{other}" in begun, (index, log)


@ranks(2)
def test_the_record_shows_the_order_of_explicit_prefetch() -> None:
    model = SHOAL.shard(stack(num=3))
    blocks = list(model.blocks)
    model.set_modules_to_forward_prefetch(blocks)
    batch = SHOAL.batches(1)[0]
    loss_of(model(batch)).backward()
    with watch(model) as recorder:
        loss_of(model(batch)).backward()
    gathers = recorder.actions({ActionKind.GATHER})
    assert [gather.unit for gather in gathers[:4]] == ["root", "blocks.0", "blocks.1", "blocks.2"]
    forwards = recorder.actions({ActionKind.FORWARD})
    first = min(action.start_us for action in forwards if action.unit == "blocks.0")
    assert all(gather.start_us < first for gather in gathers[:4])


def wrong_prefetch(engine: Engine) -> list[Any]:
    """Gathers of units that do not come next, or not at all."""
    model = engine.shard(stack(num=4))
    first, second, third, fourth = model.blocks
    first.set_modules_to_forward_prefetch([fourth, second])
    third.set_modules_to_forward_prefetch([first])
    third.set_modules_to_backward_prefetch([fourth, first])
    second.set_modules_to_backward_prefetch([third])
    return train(engine, model)


@ranks(2)
def test_prefetch_of_the_wrong_units_changes_no_number() -> None:
    check_engines_agree(wrong_prefetch, plain=False)


class Stops(nn.Module):
    """Its forward raises when asked to, after it has asked for the last layer's parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.fails:
            raise ValueError("planned")
        return self.last(x)


@ranks(2)
@pytest.mark.parametrize("layout", [Even(), Flat()])
def test_unshard_gathers_anew_what_a_forward_that_raised_had_asked_for(layout: Layout) -> None:
    torch.manual_seed(0)
    model = Stops()
    for one in (model.first, model.last, model):
        fully_shard(one, layout=layout)
    x = torch.ones(2, 4)
    model(x).sum().backward()  # from now on the order of units is known
    model.fails = True
    with pytest.raises(ValueError, match="planned"):
        model(x)
    with torch.no_grad():
        for parameter in model.last.parameters():
            parameter.fill_(7.0)
    model.last.unshard()
    assert torch.equal(model.last.weight.detach(), torch.full((4, 4), 7.0))
