"""Host memory where values wait until all ranks have verified theirs."""

from __future__ import annotations

from collections.abc import Callable

import torch

_ALIGNMENT = 64


class Staging:
    """One piece of memory with two ends, where two batches meet: each grows from its own.

    Memory that is new to the process costs more than reading into it, so it is taken once, and
    every batch has the memory of the last but one.
    """

    def __init__(self, num_bytes: int) -> None:
        self._memory = torch.empty(num_bytes, dtype=torch.uint8)

    def end(self, number: int) -> Callable[[int], torch.Tensor]:
        """Free all at the first end, or the second where the number is odd; give what takes it."""
        taken_bytes = 0

        def take(num_bytes: int) -> torch.Tensor:
            nonlocal taken_bytes
            before, taken_bytes = taken_bytes, taken_bytes + aligned(num_bytes)
            start = self._memory.numel() - taken_bytes if number % 2 else before
            return self._memory[start : start + num_bytes]

        return take


def aligned(num_bytes: int) -> int:
    """How many bytes are taken for that many, so that any dtype may follow."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
