"""Memory of gathers that keeps what was written to it once.

Writing the pieces of N - 1 imagined ranks takes kernels that a real rank does not run: its network
writes them. For steps that are timed, they are written beforehand: memory in which a gather ends is
filled when it is first seen, with values drawn from this rank's piece, and left as it is from then
on. So what is multiplied is finite, and distributed as this rank's parameters are.

That holds as long as nobody else writes there:

- An output that this rank's piece is not part of (FSDP1, collectives of a graph) is new: it is
  moved to a pool of its dtype, which only such outputs share.
- An output that this rank wrote its piece to must be in such a pool already. FSDP2 allocates it on
  a stream that allocates nothing else; shoal does if its arena is told to (`gather_apart`).

Whoever measures looks at the values: `ModelledGroup.sample_gathers`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal._torch import cuda
from shoal.comm.calls import Slots
from shoal.comm.clones import is_in_place

_DRAWN_AT_ONCE = 1 << 24
"""Elements. Their indices take eight bytes each."""


class KeptGathers:
    """Which memory holds gathered values, and the pools that it comes from."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pools: dict[torch.dtype, cuda.StreamPool] = {}
        self._drawn: set[tuple[int, int]] = set()
        self.num_refused = 0
        """Gathers of floats that had to be written all the same, since `forget`."""
        self._generator = torch.Generator(device).manual_seed(0)

    def forget(self) -> None:
        """Fill all memory anew when it is next seen."""
        self._drawn.clear()
        self.num_refused = 0

    def holds(self, flat: Tensor) -> bool:
        """Whether a tensor's memory was filled, and is left as it is."""
        return (flat.data_ptr(), flat.nbytes) in self._drawn

    def deliver(self, slots: Slots, piece: Tensor, rank: int) -> bool:
        """Give an all-gather's output what its memory kept; False if it has to be written."""
        flat = slots.flat
        if flat is None or not (slots.is_even and flat.is_cuda and flat.is_floating_point()):
            return False
        in_place = is_in_place(slots, piece, rank)
        if not in_place and not self._move(flat):
            self.num_refused += 1
            return False
        if not self.holds(flat):
            self._drawn.add((flat.data_ptr(), flat.nbytes))
            start, end = (rank * piece.numel(), (rank + 1) * piece.numel()) if in_place else (0, 0)
            self._draw(flat[:start], piece)
            self._draw(flat[end:], piece)
        return True

    def _move(self, flat: Tensor) -> bool:
        """Give an output that nobody has written to memory of its pool, if it has no neighbours."""
        storage = flat.untyped_storage()
        if storage.nbytes() != flat.nbytes:
            return False
        pool = self._pools.get(flat.dtype)
        if pool is None:
            pool = self._pools[flat.dtype] = cuda.StreamPool(self._device)
        storage.resize_(0)
        pool.allocate(storage.resize_, flat.nbytes)
        return True

    def _draw(self, target: Tensor, piece: Tensor) -> None:
        values = piece.data.reshape(-1)
        for part in target.split(_DRAWN_AT_ONCE):
            chosen = torch.randint(
                values.numel(), part.shape, device=part.device, generator=self._generator
            )
            part.copy_(values[chosen])
