"""Which plan to take: all that fit into a budget, fastest first, and why the others do not.

A search asks short models (`shallow`) and goes from plans that need little to plans that need more.
Where a plan does not fit, those that need at least as much are rejected without being asked. What
is chosen was forecast whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch

from shoal.errors import UsageError
from shoal.layout import Even, Flat, Layout
from shoal.plan.forecast import Forecast, forecast_setup, freeze_old_objects, old_objects_frozen
from shoal.plan.setup import Setup
from shoal.plan.shallow import Estimate, ShallowModel
from shoal.plan.training import Workload, num_tokens_of

Sizes = Mapping[str, int]
"""Of the inputs: `batch`, `sequence`."""

NUM_REFINED = 6
"""Of how many of the fastest plans units and prefetching are varied."""
NUM_CONFIRMED = 8
"""How many of the fastest plans are forecast whole before the search gives up on short ones."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """What may be chosen."""

    layouts: Sequence[Layout] = (Even(), Flat())
    reshards: Sequence[bool | int] = (True, False)
    """Beside groups of a node's ranks."""
    prefetch_depths: Sequence[int] = (1, 2)
    checkpointings: Sequence[bool | int] = (True, 2, False)
    blocks_per_unit: Sequence[int] = (1, 2)
    reduces_each: Sequence[bool] = (True, False)
    """Of several micro-batches."""
    reduce_dtypes: Sequence[torch.dtype | None] = ()
    """None but the setup's, unless given: a narrower one changes numbers."""
    node_size: int = 8


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A plan, and what became of it."""

    setup: Setup
    sizes: Sizes
    figures: Estimate | None
    """None if it was rejected without being asked."""
    why_not: str | None

    @property
    def fits(self) -> bool:
        """Whether it may be taken."""
        return self.why_not is None

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks."""
        assert self.figures is not None
        return self.figures.num_tokens / self.figures.step_ms * 1e3

    def __str__(self) -> str:
        sizes = "".join(f", {name} {size}" for name, size in self.sizes.items())
        return f"{self.setup}{sizes}"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a search found."""

    chosen: Judged
    forecast: Forecast
    """Of the chosen plan, whole."""
    budget_bytes: float
    judged: tuple[Judged, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        return {
            **self.forecast.to_json(),
            "chosen": str(self.chosen),
            "code": self.chosen.setup.code(),
            "plans": [_plain(one) for one in self.judged],
        }


def _plain(one: Judged) -> dict[str, Any]:
    figures = one.figures
    return {
        "plan": str(one),
        "needed_bytes": None if figures is None else figures.needed_bytes,
        "step_ms": None if figures is None else figures.step_ms,
        "tokens_per_s": None if figures is None else one.tokens_per_s,
        "why_not": one.why_not,
    }


@dataclass(kw_only=True)
class Search:
    """Looks for plans of one model."""

    workload: Callable[[Sizes], Workload]
    base: Setup
    """What is not searched: policy, and what the space leaves alone."""
    budget_bytes: float
    space: Space = field(default_factory=Space)
    global_batch: int | None = None
    """Tokens of a whole step, of all ranks and micro-batches."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Device, network and torch's version, as `forecast_setup` takes them."""
    draws: bool = False
    """Whether the chosen plan's forecast has its picture."""
    progress: Callable[[int, str], object] = lambda count, plan: None

    def __post_init__(self) -> None:
        self._judged: dict[tuple[Any, ...], Judged] = {}
        self._shallow: ShallowModel | None = None

    # Answers.

    def fastest(self, sizes: Sequence[Sizes]) -> Choice:
        """The fastest plan that fits, of those with any of these sizes."""
        with old_objects_frozen():
            for one in sizes:
                for setup in self._setups(one):
                    self._judge(setup, one)
            self._refine()
            return self._choose()

    def largest(self, name: str, fixed: Sizes, most: int = 1 << 24) -> Choice:
        """The fastest plan of the largest batch, or longest sequence, that fits at all."""
        with old_objects_frozen():
            low, high = 0, 1
            while high <= most and self._fits_somehow({**fixed, name: high}):
                low, high = high, high * 2
            if low == 0:
                return self._choose()
            while high - low > max(1, low // 32):
                middle = (low + high) // 2
                if self._fits_somehow({**fixed, name: middle}):
                    low = middle
                else:
                    high = middle
            while True:
                self._judged = {
                    key: one for key, one in self._judged.items() if one.sizes.get(name) == low
                }
                for setup in self._setups({**fixed, name: low}):
                    self._judge(setup, {**fixed, name: low})
                self._refine()
                try:
                    return self._choose()
                except NothingFits:  # what is reserved is known of whole forecasts alone
                    if low == 1:
                        raise
                    low -= max(1, low // 32)

    def fewest(self, sizes: Sequence[Sizes]) -> Choice:
        """The fastest plan on the fewest ranks that suffice; powers of two up to the base's."""
        world, most = 1, self.base.world
        while world <= most:
            smaller = replace(self, base=replace(self.base, world=world, replicas=1))
            smaller._shallow = self._shallow
            try:
                return smaller.fastest(sizes)
            except NothingFits:
                if world == most:
                    raise
            self._shallow = smaller._shallow
            world = min(world * 2, most)
        raise AssertionError("the last one raised")

    def cheapest(self, sizes: Sequence[Sizes]) -> Choice:
        """The plan with the most tokens per second and rank, on any power of two of ranks."""
        found: list[Choice] = []
        world = 1
        while world <= self.base.world:
            smaller = replace(self, base=replace(self.base, world=world, replicas=1))
            smaller._shallow = self._shallow
            try:
                found.append(smaller.fastest(sizes))
            except NothingFits:
                if world == self.base.world and not found:
                    raise
            self._shallow = smaller._shallow
            world *= 2
        return max(found, key=lambda one: one.chosen.tokens_per_s / one.chosen.setup.world)

    # What is asked, and in which order.

    def _setups(self, sizes: Sizes) -> Iterator[Setup]:
        """The plans of one size, those that need little before those that need more."""
        space, base = self.space, self.base
        micro_batches = self._micro_batches(sizes)
        if micro_batches is None:
            return
        dtypes = space.reduce_dtypes or (base.policy.reduce_dtype,)
        reduces = space.reduces_each if micro_batches > 1 else (base.reduces_each,)
        steps = [*product(space.checkpointings, reduces)]
        node = space.node_size
        for replicas in self._replicas():
            shards = base.world // replicas
            groups = [node] if node < shards and shards % node == 0 else []
            reshards = [*[one for one in space.reshards if one is True], *groups]
            reshards += [one for one in space.reshards if one is not True]
            for layout in space.layouts:
                for dtype in dtypes:
                    policy = replace(base.policy, reduce_dtype=dtype)
                    for checkpointing, reduces_each in steps:
                        for reshard in reshards:
                            if type(reshard) is int and layout != Even():
                                continue
                            yield replace(
                                base,
                                replicas=replicas,
                                layout=layout,
                                policy=policy,
                                checkpointing=checkpointing,
                                reshard=reshard,
                                micro_batches=micro_batches,
                                reduces_each=reduces_each,
                            )

    def _refine(self) -> None:
        """Vary units and prefetching of the fastest plans that fit."""
        fitting = [one for one in self._judged.values() if one.fits]
        for best in sorted(fitting, key=lambda one: -one.tokens_per_s)[:NUM_REFINED]:
            for blocks in self.space.blocks_per_unit:
                for depth in self.space.prefetch_depths:
                    varied = replace(best.setup, blocks_per_unit=blocks, prefetch_depth=depth)
                    self._judge(varied, best.sizes)

    def _replicas(self) -> list[int]:
        """No replicas; a replica in each node, and in every few nodes."""
        world, node = self.base.world, self.space.node_size
        sizes = [world, *(node * 2**power for power in range(20))]
        return sorted({world // size for size in sizes if size <= world and world % size == 0})

    def _micro_batches(self, sizes: Sizes) -> int | None:
        if self.global_batch is None:
            return self.base.micro_batches
        tokens = self.base.world * self._tokens(sizes)
        return self.global_batch // tokens if self.global_batch % tokens == 0 else None

    def _tokens(self, sizes: Sizes) -> int:
        """Of one rank's micro-batch."""
        return num_tokens_of(self.workload(sizes))

    def _fits_somehow(self, sizes: Sizes) -> bool:
        """Whether one of the plans that need little fits."""
        return any(self._judge(setup, sizes).fits for setup in self._frugal(sizes))

    def _frugal(self, sizes: Sizes) -> Iterator[Setup]:
        for setup in self._setups(sizes):
            if setup.replicas == 1 and (setup.reshard is None or setup.reshard is True):
                yield setup

    # Judging.

    def _judge(self, setup: Setup, sizes: Sizes) -> Judged:
        key = (*_choices(setup), tuple(sorted(sizes.items())))
        if key not in self._judged:
            self._judged[key] = self._rejected(setup, sizes) or self._asked(setup, sizes)
            self.progress(len(self._judged), str(self._judged[key]))
        return self._judged[key]

    def _rejected(self, setup: Setup, sizes: Sizes) -> Judged | None:
        """A plan is not asked if one that needs no more did not fit."""
        for other in self._judged.values():
            if not other.fits and other.figures is not None and _needs_no_less(setup, sizes, other):
                needed = other.figures.least_bytes / 1e9
                return Judged(
                    setup=setup,
                    sizes=sizes,
                    figures=None,
                    why_not=f"needs no less than ({other}), which needs {needed:.1f} GB",
                )
        return None

    def _asked(self, setup: Setup, sizes: Sizes) -> Judged:
        workload = self.workload(sizes)
        if self._shallow is None:
            self._shallow = ShallowModel(workload)
        figures = self._shallow.figures(workload, setup, self.options)
        if not self._judged:
            freeze_old_objects()  # torch has imported all that it imports for a forecast
        return self._with(figures, setup, sizes, least=figures.least_bytes)

    def _with(self, figures: Estimate, setup: Setup, sizes: Sizes, *, least: int) -> Judged:
        """Fits, or by how much it does not; `least` is what it surely needs."""
        why_not = None
        if least > self.budget_bytes:
            why_not = (
                f"needs {least / 1e9:.1f} GB, most of it {figures.dominated_by}: "
                f"{(least - self.budget_bytes) / 1e9:.1f} GB too much"
            )
        return Judged(setup=setup, sizes=sizes, figures=figures, why_not=why_not)

    def _choose(self) -> Choice:
        """Forecast the fastest plans whole, until one fits that no other seems to beat."""
        whole: dict[tuple[Any, ...], Forecast] = {}
        for _ in range(NUM_CONFIRMED):
            fitting = {key: one for key, one in self._judged.items() if one.fits}
            if not fitting:
                break
            key = max(fitting, key=lambda one: fitting[one].tokens_per_s)
            best = fitting[key]
            if key in whole:
                break
            found = forecast_setup(
                self.workload(best.sizes), best.setup, draws=self.draws, **self.options
            )
            figures = Estimate.of(found)
            whole[key] = found
            self._judged[key] = self._with(
                figures, best.setup, best.sizes, least=found.needed_bytes
            )
        sure = [key for key in whole if self._judged[key].fits]
        if not sure:
            raise NothingFits(self._least())
        key = max(sure, key=lambda one: self._judged[one].tokens_per_s)
        judged = tuple(self._judged.values())
        return Choice(
            chosen=self._judged[key],
            forecast=whole[key],
            budget_bytes=self.budget_bytes,
            judged=judged,
        )

    def _least(self) -> str:
        asked = [one for one in self._judged.values() if one.figures is not None]
        if not asked:
            return (
                f"no plan: a global batch of {self.global_batch} tokens is no multiple of what "
                f"{self.base.world} ranks take in one micro-batch"
            )
        best = min(asked, key=lambda one: one.figures.least_bytes)  # pyright: ignore
        assert best.figures is not None
        return (
            f"nothing fits into {self.budget_bytes / 1e9:.3g} GB. The least is "
            f"{best.figures.least_bytes / 1e9:.1f} GB, most of it {best.figures.dominated_by}, "
            f"with {best}. Try more ranks, a smaller batch or a shorter sequence"
        )


class NothingFits(UsageError):
    """No plan fits into the budget."""


def _choices(setup: Setup) -> tuple[Any, ...]:
    return (
        *(setup.world, setup.replicas, setup.layout, setup.policy, setup.checkpointing),
        *(type(setup.reshard), setup.reshard, setup.prefetch_depth, setup.blocks_per_unit),
        *(setup.micro_batches, setup.reduces_each),
    )


def _needs_no_less(setup: Setup, sizes: Sizes, other: Judged) -> bool:
    """Whether a plan surely needs at least the memory of another one.

    In one of the choices it keeps more than the other, and is like it in the rest.
    """
    its = other.setup
    if its.world != setup.world or its.policy != setup.policy or its.layout != setup.layout:
        return False
    if (its.micro_batches > 1) != (setup.micro_batches > 1):
        return False
    if its.blocks_per_unit != setup.blocks_per_unit:
        return False
    return (
        setup.replicas >= its.replicas
        and setup.reduces_each <= its.reduces_each
        and _kept(setup.reshard) >= _kept(its.reshard)
        and setup.prefetch_depth >= its.prefetch_depth
        and _saved(setup.checkpointing) >= _saved(its.checkpointing)
        and all(size >= other.sizes.get(name, size) for name, size in sizes.items())
        and sizes.keys() == other.sizes.keys()
    )


def _kept(reshard: bool | int | None) -> float:
    """How much of the gathered parameters is kept between forward and backward."""
    if isinstance(reshard, bool) or reshard is None:
        return 0.0 if reshard in (True, None) else 1.0
    return 1 / reshard


def _saved(checkpointing: Any) -> float:
    """How many units' activations are kept."""
    if isinstance(checkpointing, bool):
        return 0.0 if checkpointing else 1.0
    return 1 - 1 / checkpointing if isinstance(checkpointing, int) else 0.5
