"""Bits that flip in memory and on the way are named: what, which unit, which rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from differential import SHOAL, loss_of, stack, two_axes
from harness import ranks
from shoal.errors import UsageError
from shoal.fsdp import MixedPrecisionPolicy, fully_shard
from shoal.layout import Even, Flat, Layout, Rows
from shoal.runtime.unit import Unit
from shoal.survive.corruption import (
    GATHERED,
    GRADIENTS,
    PARAMETERS,
    REDUCED,
    STATE,
    CorruptionChecks,
    CorruptionError,
    corruption_checks,
)

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def flip(tensor: Tensor, place: int, bit: int) -> None:
    """Flip a bit of a tensor's memory below autograd, so that nothing is counted."""
    octets = tensor.data.view(-1).view(torch.uint8)
    octets[place % octets.numel()] ^= 1 << bit


def sharded(layout: Layout | None = None, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model: Any = stack()
    for block in model.blocks:
        fully_shard(block, layout=layout or Even(), **options)
    fully_shard(model, layout=layout or Even(), **options)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def units_of(checks: CorruptionChecks) -> dict[str, Unit]:
    return {unit.name: unit for unit in checks._units}


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Tensor],
    *,
    before_step: Callable[[], object] = lambda: None,
) -> None:
    for batch in batches:
        loss_of(model(batch)).backward()
        before_step()
        optimizer.step()
        optimizer.zero_grad()


class Flipper:
    """An inspector that lets one look, and then flips a bit of what is on its way."""

    def __init__(self, checks: CorruptionChecks, place: int, bit: int, *, moment: str) -> None:
        self.checks, self.place, self.bit, self.moment = checks, place, bit, moment
        self.is_visible = True

    def _flip(self, moment: str, tensor: Tensor) -> None:
        if moment == self.moment:
            self.moment = ""
            flip(tensor, self.place, self.bit)

    def on_gathered(self, unit: Unit, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        self._flip(GATHERED, received[0])
        self.checks.on_gathered(unit, sent, received)

    def on_reducing(self, unit: Unit, matrices: Sequence[Tensor]) -> None:
        self.checks.on_reducing(unit, matrices)
        if self.moment == GRADIENTS:
            before = matrices[0].double()
            self._flip(GRADIENTS, matrices[0])
            change = (matrices[0].double() - before).abs().max()
            size = before.view(unit.size, -1).abs().sum(dim=1).max()
            # Far over what rounding can do, if gradients are of one size on all ranks.
            eps = torch.finfo(matrices[0].dtype).eps
            self.is_visible = not change <= 20 * eps * unit.size**2 * size

    def on_reduced(self, unit: Unit, output: Tensor) -> None:
        self.checks.on_reduced(unit, output)
        self._flip(REDUCED, output)


@contextmanager
def flipped_on_the_way(
    unit: Unit, place: int, bit: int, *, moment: str, here: bool
) -> Iterator[Flipper]:
    checks: Any = unit.inspector
    flipper = Flipper(checks, place, bit, moment=moment)
    if here:
        unit.inspector = flipper
    try:
        yield flipper
    finally:
        unit.inspector = checks


@ranks(2, 4)
@pytest.mark.parametrize("layout", [Even(), Flat(), Rows()], ids=repr)
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), HALF], ids=["fp32", "bf16"])
def test_sound_training_raises_nothing(layout: Layout, policy: MixedPrecisionPolicy) -> None:
    model, optimizer = sharded(layout, mp_policy=policy)
    twin, twins_optimizer = sharded(layout, mp_policy=policy)
    batches = SHOAL.batches(4)
    with corruption_checks(model, optimizer):
        train(model, optimizer, batches)
        with torch.no_grad():
            model(batches[0])
        optimizer.load_state_dict(optimizer.state_dict())
        model.load_state_dict(model.state_dict())
        loss_of(model(batches[0])).backward()  # two reductions of a step, and clipping
        clip = torch.nn.utils.clip_grad_norm_
        train(model, optimizer, batches[1:], before_step=lambda: clip(model.parameters(), 0.1))
    train(twin, twins_optimizer, batches)
    loss_of(twin(batches[0])).backward()
    train(twin, twins_optimizer, batches[1:], before_step=lambda: clip(twin.parameters(), 0.1))
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        local, other = (getattr(p, "_local_tensor", None) for p in (mine, its))
        if local is not None and other is not None:
            assert torch.equal(local, other)


@ranks(4)
def test_replicas_are_checked_too() -> None:
    model, optimizer = sharded(mesh=two_axes())
    with corruption_checks(model, optimizer) as checks:
        train(model, optimizer, SHOAL.batches(2))
        model.set_requires_all_reduce(False)
        loss_of(model(SHOAL.batches(1)[0])).backward()
        model.set_requires_all_reduce(True)
        train(model, optimizer, SHOAL.batches(2))
        unit = units_of(checks)["blocks.1"]
        with flipped_on_the_way(unit, 2, 6, moment=GRADIENTS, here=dist.get_rank() == 3):
            with pytest.raises(CorruptionError) as caught:
                train(model, optimizer, SHOAL.batches(1))
    found = {(one.unit, one.what) for one in caught.value.findings}
    assert found <= {("blocks.1", GRADIENTS)}


@ranks(2)
@pytest.mark.parametrize("what", [PARAMETERS, STATE, GATHERED, GRADIENTS, REDUCED])
def test_a_flipped_bit_is_named_on_all_ranks(what: str) -> None:
    model, optimizer = sharded()
    with corruption_checks(model, optimizer) as checks:
        batches = SHOAL.batches(3)
        train(model, optimizer, batches[:1])
        before = [p._local_tensor.clone() for p in model.parameters()]
        unit, is_here = units_of(checks)["blocks.1"], dist.get_rank() == 1
        if what == PARAMETERS and is_here:
            flip(unit.shards.buffer, 7, 3)
        if what == STATE and is_here:
            held = optimizer.state[drawn_of(unit.shards.sharded, 0)]
            flip(held["exp_avg"]._local_tensor, 9, 0)
        with flipped_on_the_way(unit, 3, 6, moment=what, here=is_here):
            with pytest.raises(CorruptionError, match=f"{what} of unit 'blocks.1'") as caught:
                train(model, optimizer, batches[1:])
        (finding,) = caught.value.findings
        assert (finding.unit, finding.what) == ("blocks.1", what)
        if what != GRADIENTS:  # whose row it is says the place
            assert finding.rank == 1
        if what != PARAMETERS:  # and the step was not taken
            for parameter, local in zip(model.parameters(), before, strict=True):
                assert torch.equal(parameter._local_tensor, local)
        checks.written()  # go on all the same
        optimizer.zero_grad()
        train(model, optimizer, batches[1:])


@ranks(2)
def test_whoever_writes_weights_says_so() -> None:
    model, optimizer = sharded()
    (batch,) = SHOAL.batches(1)
    with corruption_checks(model, optimizer) as checks:
        train(model, optimizer, [batch])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.01, 0.01)
        checks.written()
        train(model, optimizer, [batch])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.001, 0.001)
        with pytest.raises(CorruptionError, match=r"call checks\.written\(\) after it"):
            train(model, optimizer, [batch])
        checks.written()
        with pytest.raises(UsageError, match="checked for corruption already"):
            CorruptionChecks(model, optimizer)


def caught_of(num: int, seed: int) -> dict[str, list[int]]:
    """Flip bits at random; of each kind, how many could be seen, were named, and were made.

    What could be seen is counted on the rank on which it flips.
    """
    model, optimizer = sharded()
    kinds = [PARAMETERS, STATE, GATHERED, REDUCED, GRADIENTS]
    drawn = random.Random(seed)
    counts = {kind: [0, 0, 0] for kind in kinds}
    batches = SHOAL.batches(3)
    with corruption_checks(model, optimizer) as checks:
        train(model, optimizer, batches[:1])
        units = units_of(checks)
        saved = ({k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict())
        for _ in range(num):
            what, name = drawn.choice(kinds), drawn.choice(sorted(units))
            rank, place, bit = (drawn.randrange(n) for n in (dist.get_world_size(), 1 << 20, 8))
            unit, is_here = units[name], dist.get_rank() == rank
            if what == PARAMETERS and is_here:
                flip(unit.shards.buffer, place, bit)
            if what == STATE and is_here:
                held = optimizer.state[drawn_of(unit.shards.sharded, place)]
                flip(held["exp_avg_sq"]._local_tensor, place, bit)
            is_caught = False
            with flipped_on_the_way(unit, place, bit, moment=what, here=is_here) as flipper:
                try:
                    train(model, optimizer, batches[1:2])
                except CorruptionError as error:
                    is_caught = any(
                        (one.unit, one.what) == (name, what)
                        and (one.rank == rank or what == GRADIENTS)
                        for one in error.findings
                    )
            counts[what][0] += is_caught or (is_here and flipper.is_visible)
            counts[what][1] += is_caught
            counts[what][2] += 1
            optimizer.zero_grad()
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
    return counts


def drawn_of(parameters: Sequence[Any], place: int) -> Any:
    there = [p for p in parameters if p._local_tensor.numel()]
    return there[place % len(there)]


@ranks(2)
def test_most_flips_are_caught() -> None:
    check_flips(caught_of(60, 0))


def check_flips(counts: dict[str, list[int]]) -> None:
    """All are named but gradients that rounding could have changed as much."""
    for what, (tried, caught, made) in counts.items():
        assert caught == tried, (what, tried, caught)
        assert caught == made or what == GRADIENTS, (what, caught, made)


@pytest.mark.soak
@ranks(4, timeout_s=600)
def test_of_a_thousand_flips_all_are_caught_that_can_be_seen() -> None:
    counts = caught_of(1000, 1)
    print({what: f"{caught} of {made}" for what, (_, caught, made) in counts.items()})
    check_flips(counts)
