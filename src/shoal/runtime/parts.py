"""A large matrix of gradients, reduced in parts of a size that others have too.

    the matrix, a row per rank      [ a a a a a | b b b ]
    reduced one after the other     [ a a a a a ]   [ b b b ]     each in memory of its own

Memory of a size that only one unit needs would be reserved for it alone, or cut up by others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from shoal._torch import kernels
from shoal.layout.packing import Packing
from shoal.layout.spec import ALIGN_NUMEL, round_up
from shoal.layout.stripe import Stripe

LARGE_BYTES = 512 << 20
"""Smaller matrices are reduced at once."""


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
    """The parts of a matrix that a packing lays out: `width` columns each, the last one fewer."""

    def __init__(self, packing: Packing, num_columns: int, width: int) -> None:
        self._num_rows = packing.world_size
        self._bounds = [
            (start, min(start + width, num_columns)) for start in range(0, num_columns, width)
        ]
        self._cuts = [_cuts_of(packing, start, stop) for start, stop in self._bounds]

    @classmethod
    def of(cls, packing: Packing, dtype: torch.dtype, part_bytes: int) -> Parts | None:
        """The parts of a matrix of that dtype; None if it goes at once."""
        num_columns = packing.shard_bytes // dtype.itemsize
        row_bytes = packing.world_size * dtype.itemsize
        width = round_up(part_bytes // row_bytes, ALIGN_NUMEL)
        if num_columns * row_bytes < LARGE_BYTES or not 0 < width < num_columns:
            return None
        stripes = [s for i in range(len(packing.params)) for s in packing.stripes(i)]
        if any(stripe.num_bands > 1 for stripe in stripes):  # cut along an inner dim
            return None
        return cls(packing, num_columns, width)

    def copy_in(
        self, grads: Mapping[int, torch.Tensor], dtype: torch.dtype, device: torch.device
    ) -> list[torch.Tensor]:
        """Copy gradients into new memory for each part; those that are missing are zero."""
        flats = {index: grad.reshape(-1) for index, grad in grads.items()}
        parts: list[torch.Tensor] = []
        for (start, stop), cuts in zip(self._bounds, self._cuts, strict=True):
            rows = torch.empty(self._num_rows * (stop - start), dtype=dtype, device=device)
            matrix = rows.view(self._num_rows, -1)
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
                kernels.foreach_copy(into, sources)
            parts.append(rows)
        return parts

    def outputs(self, output: torch.Tensor) -> list[torch.Tensor]:
        """Where each part goes in this rank's row."""
        return [output[start:stop] for start, stop in self._bounds]


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
