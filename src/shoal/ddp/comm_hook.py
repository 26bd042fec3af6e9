"""Communication hooks: functions of the user that average a bucket, by the contract of torch's DDP.

hook(state, bucket) -> Future of the averaged bucket, division included
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shoal._torch import groups
from shoal.comm import observer
from shoal.comm.pending import Pending
from shoal.ddp.bucket import Bucket
from shoal.errors import UsageError

Hook: TypeAlias = Callable[[Any, Any], "torch.futures.Future[Any]"]


class GradBucket:
    """A bucket as hooks see it; c10d's own class with these methods cannot be made."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket, self._buffer = bucket, bucket.flat

    def index(self) -> int:
        """The number of the bucket: 0 is the first to be complete."""
        return self._bucket.index

    def buffer(self) -> Tensor:
        """All gradients, in one flat tensor."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Put another tensor in the place of the flat one."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """The gradients in the flat tensor, each in its own shape."""
        return list(self._bucket.views)

    def parameters(self) -> list[Tensor]:
        """The parameters that the gradients are of."""
        return list(self._bucket.parameters)

    def is_last(self) -> bool:
        """Whether it is the last bucket of this backward."""
        return self._bucket.is_last


def run_hook(hook: Hook, state: object, bucket: Bucket) -> Pending:
    """Let a hook start to average a bucket; its result will be in the bucket's flat tensor."""
    launched = observer.launching(bucket.reason, bucket.group, bucket.flat)
    future = hook(state, GradBucket(bucket))
    if not isinstance(future, groups.Future):
        raise UsageError(
            f"{bucket.reason}: the communication hook must return a torch.futures.Future, as "
            f"work.get_future() does, got {_described(future)}"
        )
    finish = partial(_take_result, future, bucket.flat)
    return Pending(bucket.flat, future, bucket.reason, finish, launched)


def _take_result(future: torch.futures.Future[Any], flat: Tensor) -> None:
    """Put the result of a hook where the gradients are."""
    result = future.value()
    if isinstance(result, (list, tuple)) and len(result) == 1:
        result = result[0]
    if not isinstance(result, Tensor) or result.numel() != flat.numel():
        raise UsageError(
            f"a communication hook must give a tensor of {flat.numel()} elements, the "
            f"averaged bucket, got {_described(result)}"
        )
    if result.data_ptr() != flat.data_ptr() or result.dtype != flat.dtype:
        flat.copy_(result.detach().view(-1))


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"one of {value.numel()} elements"
    return f"a {type(value).__name__}"
