"""A parameter as the layout sees it: name, shape, dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch

from shoal.errors import UsageError

ALIGN_NUMEL = 16
"""Every parameter starts at a multiple of this many of its own elements.

Counted in elements, not in bytes, for two reasons. For any dtype it is at least 16 bytes, which
vector loads want. And it survives a cast: a buffer of one dtype, cast as a whole, has every
parameter where a packing of the other dtype has it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One parameter, without its values."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype):
            raise UsageError(f"parameter {self.name!r} needs a torch.dtype, got {self.dtype!r}")
        shape = tuple(int(size) for size in self.shape)
        if any(size < 0 for size in shape):
            raise UsageError(f"parameter {self.name!r} needs sizes of 0 or more, got {shape}")
        # A torch.Size prints differently; equal specs must have equal fingerprints.
        object.__setattr__(self, "shape", shape)

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Self:
        """Describe a tensor."""
        return cls(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)

    @property
    def numel(self) -> int:
        """How many elements the parameter has; 1 for a 0-d one."""
        return math.prod(self.shape)

    @property
    def row_numel(self) -> int:
        """How many elements a row has, where a row is what one index into dim 0 selects."""
        return math.prod(self.shape[1:])

    @property
    def itemsize(self) -> int:
        """How many bytes one element has."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """How many bytes the parameter has."""
        return self.numel * self.itemsize

    @property
    def align_bytes(self) -> int:
        """The parameter starts at a multiple of this many bytes of a buffer."""
        return ALIGN_NUMEL * self.itemsize


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple
