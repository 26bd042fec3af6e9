"""Communication hooks: functions of the user that average a bucket, by the contract of torch's DDP.

hook(state, bucket) -> Future of the averaged bucket, division included
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shoal._torch import groups
from shoal.comm.pending import Pending
from shoal.errors import UsageError

Hook: TypeAlias = Callable[[Any, Any], "torch.futures.Future[Any]"]


class GradBucket:
    """What a hook sees of a bucket; c10d's own class, which has these methods, cannot be made."""

    __slots__ = ("_buffer", "_gradients", "_index", "_is_last", "_parameters")

    def __init__(
        self,
        *,
        index: int,
        is_last: bool,
        buffer: Tensor,
        gradients: Sequence[Tensor],
        parameters: Sequence[Tensor],
    ) -> None:
        self._index = index
        self._is_last = is_last
        self._buffer = buffer
        self._gradients = gradients
        self._parameters = parameters

    def index(self) -> int:
        """The number of the bucket: 0 is the first to be complete."""
        return self._index

    def buffer(self) -> Tensor:
        """All gradients, in one flat tensor."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Put another tensor in the place of the flat one."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """The gradients in the flat tensor, each in its own shape."""
        return list(self._gradients)

    def parameters(self) -> list[Tensor]:
        """The parameters that the gradients are of."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Whether it is the last bucket of this backward."""
        return self._is_last


class _Future:
    """Waits for a hook's result, and puts it where the gradients are."""

    __slots__ = ("_flat", "_future")

    def __init__(self, future: torch.futures.Future[Any], flat: Tensor) -> None:
        self._future = future
        self._flat = flat

    def wait(self) -> None:
        result = self._future.wait()
        if isinstance(result, (list, tuple)) and len(result) == 1:
            result = result[0]
        if not isinstance(result, Tensor) or result.numel() != self._flat.numel():
            raise UsageError(
                f"a communication hook must give a tensor of {self._flat.numel()} elements, the "
                f"averaged bucket, got {_described(result)}"
            )
        if result.data_ptr() != self._flat.data_ptr() or result.dtype != self._flat.dtype:
            with torch.no_grad():
                self._flat.copy_(result.detach().view(-1))


def run_hook(
    hook: Hook, state: object, bucket: GradBucket, flat: Tensor, reason: str, launched: object
) -> Pending:
    """Let a hook start to average a bucket, whose result will be in `flat`."""
    future = hook(state, bucket)
    if not isinstance(future, groups.Future):
        raise UsageError(
            f"{reason}: the communication hook must return a torch.futures.Future, as "
            f"work.get_future() does, got {_described(future)}"
        )
    return Pending(flat, _Future(future, flat), reason, launched=launched)


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"one of {value.numel()} elements"
    return f"a {type(value).__name__}"
