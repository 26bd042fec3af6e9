"""The factor by which a loss in fp16 is multiplied, so that small gradients do not vanish.

It is halved whenever gradients overflow, in which case the step is skipped, and doubled after many
steps in which none did. A power of two throughout, so that taking it out again is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_FIRST = 2.0**16
_LARGEST = 2.0**24
_PATIENCE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """The factor, and for how many steps it has been good; precisions other than fp16 need none."""

    factor: float = 1.0
    good_steps: int = 0
    is_dynamic: bool = False

    def __post_init__(self) -> None:
        # A checkpoint brings it back, and may hold anything.
        if not isinstance(self.factor, int | float) or not 1 <= self.factor <= _LARGEST:
            raise ValueError(f"expected a factor from 1 to {_LARGEST:g}")
        if not isinstance(self.good_steps, int) or self.good_steps < 0:
            raise ValueError("expected a number of good steps")

    @classmethod
    def for_precision(cls, precision: Literal["auto", "bf16", "fp16", "fp32"]) -> LossScale:
        """What a run begins with."""
        return cls(factor=_FIRST, is_dynamic=True) if precision == "fp16" else cls()

    @property
    def can_shrink(self) -> bool:
        """Whether gradients that are not finite may be the factor's fault."""
        return self.is_dynamic and self.factor > 1

    def shrunk(self) -> LossScale:
        """What to use after gradients that were not finite."""
        return LossScale(factor=self.factor / 2, is_dynamic=True)

    def grown(self) -> LossScale:
        """What to use after a good step."""
        if not self.is_dynamic:
            return self
        if self.good_steps + 1 < _PATIENCE or self.factor >= _LARGEST:
            return LossScale(factor=self.factor, good_steps=self.good_steps + 1, is_dynamic=True)
        return LossScale(factor=2 * self.factor, is_dynamic=True)
