"""Functions of torch above autograd: for DTensors beside ShardedTensors, and replaced by doors.

torch looks for `__torch_function__` whenever it meets a tensor of a subclass, and finds that ours
has none, which is the fastest. `listen` gives it one: for the first matrix of listed shards, which
may be the weight of a layer, for the first replacement that a user registers, and for the first
model that has DTensors beside ShardedTensors. From then on every function and every attribute of a
sharded tensor goes through Python first: 1.6 µs each.

torch asks the class of the first tensor in a list, and DTensor's raises if not all are DTensors.
But `__torch_function__`, which DTensor does not use, comes before: ours sees every such call, and
sends it to ShardedTensor's handlers. They compute on the local tensors of both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch.distributed.tensor import DTensor

from shoal._torch import subclasses, trees
from shoal.tensor.sharded import Op, ShardedTensor

Function: TypeAlias = Callable[..., Any]

REPLACED: dict[Function, Callable[[Function, Any, Any, dict[str, Any] | None], Any]] = {}
"""By function of torch, the one that a door calls with the arguments of `__torch_function__`."""


@functools.cache
def listen() -> None:
    """Let functions of torch come here first, whenever a ShardedTensor is among the arguments."""
    ShardedTensor.__torch_function__ = staticmethod(_torch_function)  # pyright: ignore


def _torch_function(
    func: Function, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
) -> Any:
    if _has_dtensors(args if not kwargs else (*args, *kwargs.values())):
        return _run_together(func, types, args, kwargs or {})
    replacement = REPLACED.get(func)
    if replacement is not None:
        return replacement(func, types, args, kwargs)
    return subclasses.no_torch_function(func, types, args, kwargs or {})


def _has_dtensors(args: Sequence[Any]) -> bool:
    """Whether DTensors are among the arguments of a call, or in a list among them."""
    for arg in args:
        if isinstance(arg, DTensor):
            return True
        if type(arg) in (list, tuple) and any(isinstance(each, DTensor) for each in arg):
            return True
    return False


def _run_together(
    function: Function, types: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Call a function of torch that was given DTensors and ShardedTensors."""
    with _Together():
        return subclasses.no_torch_function(
            function, types, [*map(_number, args)], {k: _number(v) for k, v in kwargs.items()}
        )


class _Together(subclasses.TorchDispatchMode):
    """Sends operations to ShardedTensor's handlers, whichever tensor comes first."""

    def __torch_dispatch__(
        self, func: Op, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves = trees.tree_leaves((args, kwargs))
        if any(isinstance(leaf, ShardedTensor) for leaf in leaves):
            return ShardedTensor.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def _number(arg: Any) -> Any:
    """A 0-d DTensor, such as a norm, as the plain number that it is on every rank."""
    return arg.full_tensor() if isinstance(arg, DTensor) and arg.dim() == 0 else arg
