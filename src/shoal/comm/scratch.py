"""Memory of collectives that are over, kept for those to come.

Fresh memory costs a page fault for every 4 KiB that is first written: of a 4 MiB exchange between
two ranks that was a third of the time.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_BYTES = 64 << 20
"""How much is kept. What is larger comes fresh: there, memory is worth more than time."""


class Scratch:
    """Spare flat buffers on the host, by dtype and size."""

    __slots__ = ("_max_bytes", "_num_bytes", "_spare")

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._spare: dict[tuple[torch.dtype, int], list[Tensor]] = {}

    def take(self, like: Tensor) -> Tensor:
        """A flat buffer with the size, dtype and device of `like`; its values are arbitrary."""
        spare = self._spare.get((like.dtype, like.numel())) if like.device.type == "cpu" else None
        if spare:
            tensor = spare.pop()
            self._num_bytes -= tensor.nbytes
            return tensor
        # It outlives the caller, and a tensor made in inference mode is of no use outside.
        with torch.inference_mode(False):
            return torch.empty(like.numel(), dtype=like.dtype, device=like.device)

    def give_back(self, tensor: Tensor) -> None:
        """Keep a buffer that nobody uses any more; sizes that went out of use make room."""
        if tensor.device.type != "cpu" or tensor.nbytes > self._max_bytes:
            return
        if self._num_bytes + tensor.nbytes > self._max_bytes:
            self._spare.clear()
            self._num_bytes = 0
        self._spare.setdefault((tensor.dtype, tensor.numel()), []).append(tensor)
        self._num_bytes += tensor.nbytes

    @property
    def num_bytes(self) -> int:
        """How much is kept at the moment."""
        return self._num_bytes
