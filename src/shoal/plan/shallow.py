"""Models of equal blocks, forecast from a few of them.

Memory and time of a step grow with each further block by the same amount. So a search asks a model
of a few blocks, and of a few more, and reads the whole model's figures off the line through both.
What it chooses is then forecast whole.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from shoal.plan.forecast import Forecast, forecast_setup
from shoal.plan.setup import Setup
from shoal.plan.training import Workload, meta_model


def few_and_more(setup: Setup) -> tuple[int, int]:
    """Of how many blocks the short models are that a setup is asked with.

    There are more units than are gathered at once, and checkpointing of every n-th comes round.
    """
    every = setup.checkpointing
    period = math.lcm(setup.blocks_per_unit, every if isinstance(every, int) and every else 1)
    least = (setup.prefetch_depth + 2) * setup.blocks_per_unit
    few = -(-least // period) * period
    return few, few + period


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a search compares."""

    needed_bytes: int
    """What is reserved, and what CUDA takes beside: of a short model an estimate."""
    least_bytes: int
    """What is allocated, and what CUDA takes beside: of a short model too."""
    step_ms: float
    exposed_ms: float
    compute_ms: float
    """Of kernels alone: what no schedule is faster than."""
    link_ms: float
    """Of collectives alone."""
    num_tokens: int
    """Of all ranks' steps together."""
    dominated_by: str
    """What takes most of the memory."""

    @classmethod
    def of(cls, found: Forecast) -> Estimate:
        """Those of a forecast."""
        by_category = {**found.memory.by_category, "CUDA's context": found.context_bytes}
        return cls(
            needed_bytes=found.needed_bytes,
            least_bytes=found.memory.allocated_peak_bytes + found.context_bytes,
            step_ms=found.time.step_ms,
            exposed_ms=found.time.exposed_ms,
            compute_ms=found.time.compute_ms,
            link_ms=found.time.link_ms,
            num_tokens=found.num_tokens,
            dominated_by=max(by_category, key=lambda name: by_category[name], default="nothing"),
        )

    def extended(self, more: Estimate, times: float) -> Estimate:
        """What lies on the line from here through `more`, that many times as far away."""

        def along(name: str) -> float:
            here = getattr(self, name)
            return here + times * (getattr(more, name) - here)

        return replace(
            more,
            # What is reserved grows in leaps, and the line through two of them may fall.
            needed_bytes=int(max(along("needed_bytes"), along("least_bytes"))),
            least_bytes=int(along("least_bytes")),
            step_ms=along("step_ms"),
            exposed_ms=along("exposed_ms"),
            compute_ms=along("compute_ms"),
            link_ms=along("link_ms"),
        )


class ShallowModel:
    """A model whose largest list of equal blocks can be shortened."""

    def __init__(self, workload: Workload) -> None:
        self._model = meta_model(workload)
        self._place = _equal_blocks(self._model)
        self.num_blocks = 0 if self._place is None else len(_blocks_at(self._model, self._place))

    def with_blocks(self, count: int) -> Any:
        """A copy of the model with its first blocks."""
        if self._place is None or count >= self.num_blocks:
            return copy.deepcopy(self._model)
        blocks = _blocks_at(self._model, self._place)
        left_out = {id(block): None for block in list(blocks)[count:]}
        copied = copy.deepcopy(self._model, dict.fromkeys(left_out, _LEFT_OUT))
        kept = nn.ModuleList(list(_blocks_at(copied, self._place))[:count])
        parent, _, name = self._place.rpartition(".")
        setattr(copied.get_submodule(parent), name, kept)
        return copied

    def figures(self, workload: Workload, setup: Setup, options: Mapping[str, Any]) -> Estimate:
        """Forecast two short models, and read the whole one's figures off them."""

        def short(count: int) -> Estimate:
            shortened = replace(workload, model=lambda: self.with_blocks(count))
            return Estimate.of(forecast_setup(shortened, setup, num_steps=2, **options))

        few, more = few_and_more(setup)
        if self.num_blocks <= few + more:
            return short(self.num_blocks)
        return short(few).extended(short(more), (self.num_blocks - few) / (more - few))


_LEFT_OUT = nn.Identity()


def _blocks_at(model: nn.Module, place: str) -> nn.ModuleList:
    found = model.get_submodule(place)
    assert isinstance(found, nn.ModuleList)
    return found


def _equal_blocks(model: nn.Module) -> str | None:
    """Where the longest list of blocks is that are all alike."""
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and name:
            kinds = {_kind_of(block) for block in module}
            if len(kinds) == 1:
                found[name] = len(module)
    return max(found, key=lambda name: found[name], default=None)


def _kind_of(block: nn.Module) -> tuple[Any, ...]:
    tensors = (*block.named_parameters(), *block.named_buffers())
    return type(block), tuple((name, one.shape, one.dtype) for name, one in tensors)
