"""Formats of few bits: blocks of numbers as codes with a scale for each block.

    weights, a row   [ w w w w … w w w w | w w w w … w w w w ]
    encoded          codes [ c c c c … ]   scales [ s | s ]   and for NVFP4 one more scale per row

A block lies within one row: the elements of a tensor's last dim. So blocks, and what they round to,
are the same on any number of ranks. Nothing here communicates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from shoal.errors import UsageError

E4M3 = torch.float8_e4m3fn
_E4M3_MAX, _E2M1_MAX = 448.0, 6.0
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True, kw_only=True)
class CodePart:
    """One of the tensors that a parameter is encoded as."""

    dtype: torch.dtype
    each: int
    """How many elements of the parameter stand behind one element here."""


class GatherFormat(ABC):
    """How the shards of matrices travel in a gather. They are stored, and computed with, wider.

    Parameters with fewer than two dims travel as they are, and so do those whose last dim is no
    multiple of `multiple_of`: biases, norms, filters of 3 x 3.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def multiple_of(self) -> int:
        """What the last dim has to be a multiple of."""

    @abstractmethod
    def parts(self, row: int) -> tuple[CodePart, ...]:
        """What a parameter with rows of so many elements is encoded as."""

    @abstractmethod
    def encode(self, flat: torch.Tensor, row: int) -> tuple[torch.Tensor, ...]:
        """The parts of whole blocks of elements, given one after another."""

    @abstractmethod
    def decode(self, parts: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        """Write what parts stand for; their last dims are as many times shorter as `each` says."""

    def encodes(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Whether a parameter travels in this format."""
        is_matrix = len(shape) > 1 and prod(shape) > 0 and shape[-1] % self.multiple_of == 0
        return is_matrix and dtype.is_floating_point and dtype.itemsize > 1

    def cannot_be_cut(self, row: int) -> int:
        """How many consecutive elements a rank holds all of, or none."""
        return max(part.each for part in self.parts(row))

    def round_trip(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """What a tensor is on arrival: encoded, and decoded to a dtype. Others come as they are."""
        full = torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=tensor.device)
        with torch.no_grad():
            if self.encodes(tensor.shape, tensor.dtype):
                self.decode(self.encode(tensor.reshape(-1), tensor.shape[-1]), full.view(-1))
            else:
                full.copy_(tensor)
        return full


@dataclass(frozen=True, slots=True)
class Float8(GatherFormat):
    """Eight bits (e4m3) with one fp32 scale per row, or per `group` elements: 0.50 of bf16."""

    group: int | None = None

    def __post_init__(self) -> None:
        _check_group(self, self.group, 16)

    @property
    def multiple_of(self) -> int:
        """See `GatherFormat`."""
        return self.group or 16

    def parts(self, row: int) -> tuple[CodePart, ...]:
        """See `GatherFormat`."""
        scales = CodePart(dtype=torch.float32, each=self.group or row)
        return CodePart(dtype=E4M3, each=1), scales

    def encode(self, flat: torch.Tensor, row: int) -> tuple[torch.Tensor, ...]:
        """See `GatherFormat`."""
        groups = flat.float().view(-1, self.group or row)
        scales = (_largest(groups) / _E4M3_MAX).clamp_(min=_TINY)
        return (groups / scales).to(E4M3).view(-1), scales.view(-1)

    def decode(self, parts: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        """See `GatherFormat`."""
        codes, scales = parts
        _scale(into.copy_(codes), scales)


@dataclass(frozen=True, slots=True)
class MXFP8(GatherFormat):
    """Eight bits (e4m3), with a power of two (e8m0) for each 32 elements: 0.52 of bf16."""

    @property
    def multiple_of(self) -> int:
        """See `GatherFormat`."""
        return 32

    def parts(self, row: int) -> tuple[CodePart, ...]:
        """See `GatherFormat`."""
        return CodePart(dtype=E4M3, each=1), CodePart(dtype=torch.float8_e8m0fnu, each=32)

    def encode(self, flat: torch.Tensor, row: int) -> tuple[torch.Tensor, ...]:
        """See `GatherFormat`: the smallest power of two by which no element is too large."""
        blocks = flat.float().view(-1, 32)
        bits = (_largest(blocks) / _E4M3_MAX).view(torch.int32)
        # The exponent, rounded up; what is not finite becomes e8m0's NaN.
        exponents = (bits.clamp_(max=0x7F800000) + 0x7FFFFF) >> 23
        scales = exponents.to(torch.uint8).view(torch.float8_e8m0fnu)
        return (blocks / scales.float()).to(E4M3).view(-1), scales.view(-1)

    def decode(self, parts: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        """See `GatherFormat`."""
        codes, scales = parts
        _scale(into.copy_(codes), scales.float())


@dataclass(frozen=True, slots=True)
class NVFP4(GatherFormat):
    """Four bits (e2m1), an e4m3 scale for each 16 elements, an fp32 one per row: 0.28 of bf16.

    The second scale is for each `group` elements instead, if given.
    """

    group: int | None = None

    def __post_init__(self) -> None:
        _check_group(self, self.group, 16)

    @property
    def multiple_of(self) -> int:
        """See `GatherFormat`."""
        return self.group or 16

    def parts(self, row: int) -> tuple[CodePart, ...]:
        """See `GatherFormat`; a byte has two elements, the first in its lower half."""
        return (
            CodePart(dtype=torch.uint8, each=2),
            CodePart(dtype=E4M3, each=16),
            CodePart(dtype=torch.float32, each=self.group or row),
        )

    def encode(self, flat: torch.Tensor, row: int) -> tuple[torch.Tensor, ...]:
        """See `GatherFormat`."""
        blocks = flat.float().view(-1, (self.group or row) // 16, 16)
        largest = _largest(blocks)
        outer = (largest.amax(1, keepdim=True) / (_E2M1_MAX * _E4M3_MAX)).clamp_(min=_TINY)
        inner = (largest / _E2M1_MAX / outer).to(E4M3)
        # A block that is tiny beside its row has a scale of zero, and becomes zeros.
        scales = (inner.float() * outer).clamp_(min=_TINY)
        codes = _to_e2m1(blocks / scales).view(-1, 2)
        return codes[:, 0] | codes[:, 1] << 4, inner.view(-1), outer.view(-1)

    def decode(self, parts: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        """See `GatherFormat`."""
        codes, inner, outer = parts
        scales = _by_blocks(inner.float(), outer).mul_(_E4M3_OF_E2M1)
        halves = torch.stack((codes & 15, codes >> 4), dim=-1)
        _scale(into.copy_(_as_e4m3(halves).flatten(-2)), scales)


_E4M3_OF_E2M1 = 64.0
"""An e2m1 is this many times the e4m3 whose upper bits it has."""


def _to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6, of two the even one, as four bits of a byte."""
    magnitudes = values.abs()
    steps = torch.where(magnitudes < 2, 0.5, torch.where(magnitudes < 4, 1.0, 2.0))
    nearest = (magnitudes / steps).round_().mul_(steps).clamp_(max=_E2M1_MAX)
    bits = (nearest / _E4M3_OF_E2M1).copysign_(values).to(E4M3).view(torch.uint8)
    return (bits >> 4 & 8) | (bits >> 2 & 7)


def _as_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """Four bits each, as e4m3 numbers that are 64 times too small."""
    return ((codes & 8) << 4 | (codes & 7) << 2).view(E4M3)


def _largest(blocks: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each block; NaN where there is one."""
    return blocks.abs().amax(-1, keepdim=True)


def _by_blocks(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply each block of the last dim by its scale, in place."""
    blocks = values.unflatten(-1, (scales.shape[-1], -1))
    blocks.mul_(scales.unsqueeze(-1))
    return values


def _scale(into: torch.Tensor, scales: torch.Tensor) -> None:
    """Multiply codes, which every dtype of compute holds exactly, and round once."""
    _by_blocks(into, scales)


def _check_group(given: GatherFormat, group: int | None, step: int) -> None:
    if group is not None and (type(group) is not int or group < step or group % step):
        raise UsageError(
            f"{type(given).__name__} takes a group of {step} elements or a multiple of that, "
            f"got {group!r}"
        )
