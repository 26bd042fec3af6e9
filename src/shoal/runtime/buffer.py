"""A flat buffer that has memory only while it is in use.

It keeps one storage object for life and gives that bytes or takes them, so views of it can be made
once, and tensors that autograd saved see the bytes of the next use.
"""

from __future__ import annotations

import torch

from shoal.runtime.arena import Arena


class Buffer:
    """Bytes that come from an arena and go back there."""

    __slots__ = ("_arena", "_resize", "_slot", "_storage", "bytes", "num_bytes")

    def __init__(self, num_bytes: int, arena: Arena) -> None:
        self.num_bytes = num_bytes
        self.bytes = arena.blank(num_bytes)
        """All of it. Make the views, then call `settle`: later there can be no new ones."""
        self._begin(self.bytes.untyped_storage(), arena)

    def _begin(self, storage: torch.UntypedStorage, arena: Arena) -> None:
        self._storage, self._arena = storage, arena
        self._slot: torch.UntypedStorage | None = None
        self._resize = None if arena.swaps else storage.resize_

    @classmethod
    def around(cls, tensor: torch.Tensor, arena: Arena) -> Buffer:
        """Take over the memory of a tensor that has some: it counts as filled."""
        storage = tensor.untyped_storage()
        buffer = cls.__new__(cls)
        buffer.num_bytes = storage.nbytes()
        buffer.bytes = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        buffer._begin(storage, arena)
        buffer._slot = arena.adopt(storage)
        return buffer

    def settle(self) -> None:
        """All views are made; from here on there is memory only between `fill` and `empty`."""
        self._arena.bury(self._storage)

    def typed(self, dtype: torch.dtype) -> torch.Tensor:
        """All of it as elements of a dtype."""
        return self.bytes.view(dtype)

    def fill(self) -> None:
        """Give it memory; what is in there is arbitrary."""
        if self._resize is None:
            self._slot = self._arena.attach(self._storage, self.num_bytes)
        elif self._arena.pool is None:
            self._resize(self.num_bytes)
        else:
            self._arena.pool.allocate(self._resize, self.num_bytes)

    def empty(self) -> None:
        """Take its memory away."""
        if self._resize is not None:
            self._resize(0)
        else:
            assert self._slot is not None
            self._arena.detach(self._storage, self.num_bytes, self._slot)
            self._slot = None
