"""A large matrix of gradients, reduced part by part through little memory.

    the matrix, a row per rank      [ a a a a | b b b b | c c ]
    reduced one after another       [ a a a a ]  [ b b b b ]  [ c c ]     each in the same memory

All parts are copied, cast and reduced on the stream that reduces, so that none overwrites one that
is still read, and compute goes on. In exchange the gradients live until the last part is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from shoal import _torch
from shoal.layout.packing import Packing
from shoal.layout.spec import ALIGN_NUMEL
from shoal.layout.stripe import Stripe

PART_BYTES = 256 << 20
"""Matrices up to here are reduced at once."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """What one part has of a stripe of parameter `index`."""

    index: int
    stripe: Stripe
    start: int
    stop: int
    in_part: Stripe

    def source(self, flat: torch.Tensor) -> torch.Tensor:
        return self.stripe.of_full(flat)[..., self.start : self.stop]


class Parts:
    """The parts of a matrix with `num_columns` columns and a row for each rank."""

    def __init__(self, packing: Packing, num_columns: int, width: int) -> None:
        self.num_rows = packing.world_size
        self.width = width
        """Columns of every part but the last."""
        self._bounds = [
            (start, min(start + width, num_columns)) for start in range(0, num_columns, width)
        ]
        self._cuts = [_cuts_of(packing, start, stop) for start, stop in self._bounds]

    @classmethod
    def of(cls, packing: Packing, num_columns: int, dtype: torch.dtype) -> Parts | None:
        """The parts of a matrix laid out by a packing; None if it goes at once."""
        num_rows = packing.world_size
        if num_rows * num_columns * dtype.itemsize <= PART_BYTES:
            return None
        stripes = [s for i in range(len(packing.params)) for s in packing.stripes(i)]
        if any(
            stripe.num_bands > 1 for stripe in stripes
        ):  # cut along an inner dim: not in columns
            return None
        width = PART_BYTES // (num_rows * dtype.itemsize) // ALIGN_NUMEL * ALIGN_NUMEL
        return cls(packing, num_columns, max(width, ALIGN_NUMEL))

    @property
    def numel(self) -> int:
        """The elements that the largest part needs."""
        return self.num_rows * self.width

    def reduce(
        self,
        grads: Mapping[int, torch.Tensor],
        memory: torch.Tensor,
        output: torch.Tensor,
        scatter: Callable[[torch.Tensor, torch.Tensor], object],
    ) -> None:
        """Copy each part into `memory`, and scatter it to its place in this rank's row."""
        flats = {index: grad.reshape(-1) for index, grad in grads.items()}
        for (start, stop), cuts in zip(self._bounds, self._cuts, strict=True):
            rows = memory[: self.num_rows * (stop - start)]
            matrix = rows.view(self.num_rows, -1)
            into: list[torch.Tensor] = []
            sources: list[torch.Tensor] = []
            for cut in cuts:
                target = cut.in_part.of_rows(matrix)
                if cut.index in flats:
                    into.append(target)
                    sources.append(cut.source(flats[cut.index]))
                else:
                    target.zero_()
            if into:
                _torch.foreach_copy(into, sources)
            scatter(output[start:stop], rows)


def _cuts_of(packing: Packing, start: int, stop: int) -> list[_Cut]:
    """What is in the columns from `start` to `stop`."""
    cuts: list[_Cut] = []
    for index in range(len(packing.params)):
        for stripe in packing.stripes(index):
            first = max(stripe.shard_offset, start)
            last = min(stripe.shard_offset + stripe.numel, stop)
            if first < last:
                cuts.append(
                    _Cut(
                        index,
                        stripe,
                        first - stripe.shard_offset,
                        last - stripe.shard_offset,
                        replace(stripe, shard_offset=first - start, numel=last - first),
                    )
                )
    return cuts
