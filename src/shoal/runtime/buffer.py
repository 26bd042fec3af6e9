"""A flat buffer that has memory only while it is in use.

It keeps one storage object for life and gives that bytes or takes them, so views of it can be made
once, and tensors that autograd saved see the bytes of the next use.
"""

from __future__ import annotations

import torch


class Buffer:
    """A flat tensor; it begins with memory, because without there can be no new views of it."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self._num_bytes = self.tensor.untyped_storage().nbytes()

    def fill(self) -> None:
        """Give it memory; what is in there is arbitrary."""
        self.tensor.untyped_storage().resize_(self._num_bytes)

    def empty(self) -> None:
        """Take its memory away."""
        self.tensor.untyped_storage().resize_(0)
