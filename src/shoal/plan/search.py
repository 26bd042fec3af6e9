"""Which plan to take: all that fit into a budget, fastest first, and why the others do not.

A search asks short models (`shallow`) and goes from plans that need little to plans that need more.
Where a plan does not fit, those that need at least as much are rejected without being asked; so are
those that surely take longer than one that fits (`bounds`). What is chosen was forecast whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch

from shoal.errors import UsageError
from shoal.layout import Even, Flat, Layout
from shoal.plan.accelerators import accelerator
from shoal.plan.bounds import Sizes, computes_no_less, needs_no_less, times_carried
from shoal.plan.forecast import Forecast, forecast_setup, freeze_old_objects, old_objects_frozen
from shoal.plan.setup import Setup
from shoal.plan.shallow import Estimate, ShallowModel
from shoal.plan.training import Workload, num_tokens_of

NUM_REFINED = 4
"""Of how many of the fastest plans units and prefetching are varied."""
NUM_DOUBTFUL = 3
"""How many plans are forecast whole that fit by what is allocated, but not by what is reserved."""
WORTH = 1.01
"""How much faster a plan must be, as far as anyone knows, to be asked."""
NUM_BETWEEN = 16
"""After so many plans, what they left behind is no longer searched for garbage."""


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
    needed_bytes: int | None = None
    """What it was judged by: what it surely needs."""
    is_slow: bool = False
    """Whether it was rejected for its time."""

    @property
    def fits(self) -> bool:
        """Whether it may be taken."""
        return self.why_not is None

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks."""
        figures = _figures(self)
        return figures.num_tokens / figures.step_ms * 1e3

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
    code: str
    """The calls that make the chosen plan, to paste."""

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        return {
            **self.forecast.to_json(),
            "chosen": str(self.chosen),
            "code": self.code,
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
        self._num_tokens: dict[tuple[Any, ...], int] = {}
        self._num_asked = 0
        self._shallow: ShallowModel | None = None

    # Answers.

    def fastest(self, sizes: Sequence[Sizes]) -> Choice:
        """The fastest plan that fits, of those with any of these sizes."""
        with old_objects_frozen():
            # Larger batches first: they are the faster ones, of those that fit.
            for one in sorted(sizes, key=self._tokens, reverse=True):
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
        key = tuple(sorted(sizes.items()))
        if key not in self._num_tokens:
            self._num_tokens[key] = num_tokens_of(self.workload(sizes))
        return self._num_tokens[key]

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
        """A plan is not asked if one that needs no more did not fit, or if it is surely slow."""
        too_large = self._too_large(setup, sizes)
        why_not = too_large or self._too_slow(setup, sizes)
        if why_not is None:
            return None
        return Judged(
            setup=setup, sizes=sizes, figures=None, why_not=why_not, is_slow=too_large is None
        )

    def _too_large(self, setup: Setup, sizes: Sizes) -> str | None:
        for other in self._judged.values():
            if other.fits or other.needed_bytes is None:
                continue
            if needs_no_less(setup, sizes, other.setup, other.sizes):
                needed = other.needed_bytes / 1e9
                return f"needs no less than ({other}), which needs {needed:.1f} GB"
        return None

    def _too_slow(self, setup: Setup, sizes: Sizes) -> str | None:
        """Why a plan is not worth asking; None as long as it may be the fastest that fits."""
        num_tokens = self._step_tokens(setup, sizes)
        least_ms = fastest_ms = 0.0
        for other in self._judged.values():
            figures = other.figures
            if figures is None or figures.num_tokens != num_tokens:
                continue
            least_ms = max(least_ms, _least_ms(setup, sizes, other, figures))
            if other.fits and not 0 < fastest_ms <= figures.step_ms:
                fastest_ms = figures.step_ms
        if least_ms * WORTH < fastest_ms or not fastest_ms:
            return None
        return f"takes {least_ms:.0f} ms or more, and another that fits {fastest_ms:.0f} ms"

    def _step_tokens(self, setup: Setup, sizes: Sizes) -> int:
        return self._tokens(sizes) * setup.world * setup.micro_batches

    def _asked(self, setup: Setup, sizes: Sizes) -> Judged:
        workload = self.workload(sizes)
        if self._shallow is None:
            self._shallow = ShallowModel(workload)
        figures = self._shallow.figures(workload, setup, self.options)
        if self._num_asked % NUM_BETWEEN == 0:
            freeze_old_objects()  # torch has imported all that it imports for a forecast
        self._num_asked += 1
        return self._with(figures, setup, sizes, least=figures.least_bytes)

    def _with(self, figures: Estimate, setup: Setup, sizes: Sizes, *, least: int) -> Judged:
        """Fits, or by how much it does not; `least` is what it surely needs."""
        why_not = None
        if least > self.budget_bytes:
            why_not = (
                f"needs {least / 1e9:.1f} GB, most of it {figures.dominated_by}: "
                f"{(least - self.budget_bytes) / 1e9:.1f} GB too much"
            )
        return Judged(
            setup=setup, sizes=sizes, figures=figures, why_not=why_not, needed_bytes=least
        )

    def _choose(self) -> Choice:
        """Forecast the fastest plans whole, until one fits that no other seems to beat."""
        whole: dict[tuple[Any, ...], Forecast] = {}
        while True:
            key = self._next(whole)
            if key is None:
                raise NothingFits(self._least())
            best = self._judged[key]
            if key in whole:
                return Choice(
                    chosen=best,
                    forecast=whole[key],
                    budget_bytes=self.budget_bytes,
                    judged=tuple(self._judged.values()),
                    code=self._code(best),
                )
            whole[key] = found = forecast_setup(
                self.workload(best.sizes), best.setup, draws=self.draws, **self.options
            )
            least = found.needed_bytes
            self._judged[key] = self._with(Estimate.of(found), best.setup, best.sizes, least=least)
            if not self._judged[key].fits:
                self._judge_again(whole)

    def _code(self, chosen: Judged) -> str:
        is_named = self.workload(chosen.sizes).units is not None
        is_cpu = accelerator(self.options.get("device", "h200")).is_cpu
        return chosen.setup.code(
            "units(model)" if is_named else "default_units(model)", "cpu" if is_cpu else "cuda"
        )

    def _next(self, whole: Mapping[Any, Forecast]) -> tuple[Any, ...] | None:
        """The fastest that fits, as far as anyone knows; of doubtful ones only some are tried."""
        fitting = {key: one for key, one in self._judged.items() if one.fits}
        reserved = {key: _figures(one).needed_bytes for key, one in fitting.items()}
        sure = [key for key in fitting if key in whole or reserved[key] <= self.budget_bytes]
        num_failed = sum(key not in fitting for key in whole)
        tried = [*fitting] if num_failed < NUM_DOUBTFUL else sure
        if tried or num_failed >= 2 * NUM_DOUBTFUL:
            return max(tried, key=lambda key: fitting[key].tokens_per_s, default=None)
        return min(fitting, key=lambda key: reserved[key], default=None)

    def _judge_again(self, whole: Mapping[Any, Forecast]) -> None:
        """A plan does not fit that others were compared to: look at those again."""
        for key, one in list(self._judged.items()):
            if one.is_slow:
                del self._judged[key]
                self._judge(one.setup, one.sizes)
            elif one.fits and key not in whole:
                why_not = self._too_large(one.setup, one.sizes)
                if why_not is not None:
                    self._judged[key] = replace(one, why_not=why_not, needed_bytes=None)

    def _least(self) -> str:
        asked = [one for one in self._judged.values() if one.needed_bytes is not None]
        if not asked:
            return (
                f"no plan: a global batch of {self.global_batch} tokens is no multiple of what "
                f"{self.base.world} ranks take in one micro-batch"
            )

        def least(one: Judged) -> int:
            return _figures(one).needed_bytes if one.fits else one.needed_bytes or 0

        best = min(asked, key=least)
        return (
            f"nothing fits into {self.budget_bytes / 1e9:.3g} GB. The least is "
            f"{least(best) / 1e9:.1f} GB, most of it {_figures(best).dominated_by}, "
            f"with {best}. Try more ranks, a smaller batch or a shorter sequence"
        )


def _least_ms(setup: Setup, sizes: Sizes, other: Judged, figures: Estimate) -> float:
    """What a plan surely takes, as far as another one tells."""
    computes = computes_no_less(setup, sizes, other.setup, other.sizes)
    times = times_carried(setup, other.setup)
    if computes and times:
        return max(figures.step_ms, figures.link_ms * times)
    return max(figures.compute_ms if computes else 0.0, figures.link_ms * times)


def _figures(one: Judged) -> Estimate:
    assert one.figures is not None
    return one.figures


class NothingFits(UsageError):
    """No plan fits into the budget."""


def _choices(setup: Setup) -> tuple[Any, ...]:
    return (
        *(setup.world, setup.replicas, setup.layout, setup.policy, setup.checkpointing),
        *(type(setup.reshard), setup.reshard, setup.prefetch_depth, setup.blocks_per_unit),
        *(setup.micro_batches, setup.reduces_each),
    )
