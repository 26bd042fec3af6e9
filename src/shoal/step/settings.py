"""The choices that decide when a unit is gathered, freed and reduced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.step.unit_step import UnitStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What may change between steps; the setters of `FSDPModule` replace it as a whole."""

    reduces: bool = True
    """Whether gradients are reduced, or kept for a later backward."""
    reshards_after_forward: bool | None = None
    """Whether to free after forward; None: all but the root, whose backward comes first."""
    reshards_after_backward: bool = True
    gathers_in_backward: bool = True
    prefetches_late: bool = False
    """Whether a unit's backward ends before the gather of the next one starts."""
    prefetch_depth: int = 1
    """How many units are gathered ahead, where nothing was said by name."""
    copy_depth: int = 1
    """How many units more have their shards copied from the host ahead, where they lie there."""
    forward_prefetch: tuple[UnitStep, ...] | None = None
    """What to gather when its forward begins; None: those that came next last time."""
    backward_prefetch: tuple[UnitStep, ...] | None = None
    """What to gather when its backward begins; None: those that came before it."""
    reduces_unused: bool = False
    """Whether parameters without a gradient count as having a zero one."""
    max_reductions: int = 1
    """How many reductions may be in flight when the next one begins."""
