"""Random values: as an unsharded tensor would draw them, or shard by shard.

For a tensor that a layout has cut, every rank draws the whole and keeps its own elements. So ranks
that share the state of their generator get exactly the values of the unsharded tensor, and share
the state afterwards too. The price is the memory of one whole tensor at a time, which
initialisation can pay. Listed shards are drawn one by one, each rank its own, as torch does it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shoal.tensor.copies import keep_own
from shoal.tensor.refusal import unsupported
from shoal.tensor.sharded import Handler, Op, ShardedTensor


def _draw(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    target, *rest = args
    if any(isinstance(arg, torch.Tensor) for arg in rest):
        raise unsupported(op, "its parameters are tensors", target)
    if target.placement.shards_stand_alone:
        for local in target.locals:
            op(local, *rest, **kwargs)
        return target
    whole = torch.empty(target.placement.shape, dtype=target.dtype, device=target.device)
    op(whole, *rest, **kwargs)
    keep_own(target, whole)
    return target


def _drawn_like(draw: Callable[[torch.Tensor], object]) -> Handler:
    """Make the handler of a function that draws a tensor like another."""

    def handle(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        made = torch.empty_like(*args, **kwargs)
        draw(made)
        return made

    return handle


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

HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(_NAMES, _draw),
    "rand_like": _drawn_like(torch.Tensor.uniform_),
    "randn_like": _drawn_like(torch.Tensor.normal_),
}
