"""Random values, drawn as an unsharded tensor would draw them.

Every rank draws the whole tensor and keeps its own elements. So ranks that share the state of
their generator get exactly the values of the unsharded tensor, and share the state afterwards too.
The price is the memory of one whole tensor at a time, which initialisation can pay.
"""

from __future__ import annotations

from typing import Any

import torch

from shoal.tensor.copies import keep_own
from shoal.tensor.refusal import unsupported
from shoal.tensor.sharded import Handler, Op, ShardedTensor


def _draw(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    target, *rest = args
    if any(isinstance(arg, torch.Tensor) for arg in rest):
        raise unsupported(op, "its parameters are tensors")
    whole = torch.empty(target.placement.shape, dtype=target.dtype, device=target.device)
    op(whole, *rest, **kwargs)
    keep_own(target, whole)
    return target


_NAMES = (
    "bernoulli_",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "normal_",
    "random_",
    "uniform_",
)

HANDLERS: dict[str, Handler] = dict.fromkeys(_NAMES, _draw)
