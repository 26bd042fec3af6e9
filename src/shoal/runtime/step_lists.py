"""The lists that Adam's step works on, made at once from local tensors.

torch asks every parameter in turn for its gradient and its state, and then carries hundreds of
tensors of a subclass through its operators. Adam's step never looks across elements, so that it
may as well get the local tensors: the rest of the step is torch's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from operator import attrgetter, itemgetter
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Adam, AdamW, Optimizer

from shoal import _torch
from shoal.tensor.sharded import ShardedTensor

_LOCAL: dict[type, Any] = {DTensor: _torch.local_getter, ShardedTensor: attrgetter("local")}
_WHERE: dict[type, Any] = {DTensor: _torch.place_getter, ShardedTensor: attrgetter("placement")}
_GRAD = attrgetter("grad")
_MOMENTS = ("exp_avg", "exp_avg_sq")


def speed_up(optimizer: Optimizer) -> None:
    """Let the steps of an optimizer that is known to be element-wise fill its lists faster."""
    if type(optimizer) in (Adam, AdamW) and "_init_group" not in vars(optimizer):
        optimizer._init_group = _Filler(optimizer)  # type: ignore[attr-defined]


class _Filler:
    """Stands for an optimizer's `_init_group`; whatever is unusual, torch does."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)  # which keeps this alive, and much memory

    def __call__(self, group: dict[str, Any], *lists: list[Any]) -> Any:
        """Fill the lists; returns whether any parameter is complex."""
        optimizer: Any = self._optimizer()
        is_unusual = group["amsgrad"] or group["differentiable"] or isinstance(group["lr"], Tensor)
        found = None
        if not is_unusual and (group["fused"] or group["foreach"]):
            found = _find(group["params"], optimizer.state)
        if found is None:
            return type(optimizer)._init_group(optimizer, group, *lists)
        params, grads, first, second, steps = found
        for target, values in zip(lists, (params, grads, first, second, (), steps), strict=True):
            target.extend(values)
        return any(param.is_complex() for param in params)


def _find(params: list[Any], state: Mapping[Any, Any]) -> tuple[list[Any], ...] | None:
    """Local tensors of parameters, gradients and moments, and steps; None if not all are alike."""
    kinds = {*map(type, params)}
    kind = next(iter(kinds), object)
    if len(kinds) != 1 or kind not in _LOCAL:
        return None
    local, where = _LOCAL[kind], _WHERE[kind]
    states = [*map(state.__getitem__, params)]
    if not all(states):  # its first step makes them
        return None
    others = [[*map(_GRAD, params)], *([*map(itemgetter(name), states)] for name in _MOMENTS)]
    places = [*map(where, params)]
    for tensors in others:
        if {*map(type, tensors)} != kinds or [*map(where, tensors)] != places:
            return None
    steps = [*map(itemgetter("step"), states)]
    return ([*map(local, params)], *([*map(local, tensors)] for tensors in others), steps)
