"""Functions of torch that users replace for sharded tensors.

torch looks for `__torch_function__` whenever it meets a tensor of a subclass, and finds that ours
has none, which is the fastest. The first replacement that somebody registers gives it one. From
then on every function and every attribute of a sharded tensor goes through Python first: about
1 µs each, in processes that asked for it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

from torch.distributed import ProcessGroup

from shoal import _torch
from shoal._torch import ShardingSpec
from shoal.tensor.sharded import ShardedTensor

Function: TypeAlias = Callable[..., Any]
Replacement: TypeAlias = Callable[[Any, Any, Any, Any], Any]
"""Called with types, args and kwargs, as of `__torch_function__`, and the process group."""

_for_all: dict[Function, Replacement] = {}
_for_specs: dict[tuple[str, Function], Replacement] = {}
"""By the name of a spec's class, as torch has it."""


def custom_sharded_op_impl(func: Function) -> Callable[[Replacement], Replacement]:
    """Replace a function of torch wherever a ShardedTensor is among its arguments: a decorator."""

    def register(replacement: Replacement) -> Replacement:
        _for_all[func] = _checked(func, replacement)
        _listen()
        return replacement

    return register


def custom_sharding_spec_op(
    sharding_spec_class: type[ShardingSpec], func: Function
) -> Callable[[Replacement], Replacement]:
    """Replace a function of torch for tensors of one kind of spec: a decorator."""

    def register(replacement: Replacement) -> Replacement:
        _for_specs[sharding_spec_class.__qualname__, func] = _checked(func, replacement)
        _listen()
        return replacement

    return register


def _checked(func: Function, replacement: Replacement) -> Replacement:
    signature = inspect.signature(replacement)
    if len(signature.parameters) != 4:
        raise TypeError(
            f"Custom sharded op function for {func} expects signature: (types, args, kwargs, "
            f"process_group), but received signature: {signature}"
        )
    return replacement


@functools.cache
def _listen() -> None:
    ShardedTensor.__torch_function__ = classmethod(_torch_function)  # pyright: ignore


def _torch_function(
    cls: type, func: Function, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
) -> Any:
    found = _replacement(func, args, kwargs)
    if found is None:
        with _torch.no_torch_function_subclass():
            return func(*args, **(kwargs or {}))
    replacement, group = found
    return replacement(types, args, kwargs, group)


def _replacement(
    func: Function, args: Any, kwargs: dict[str, Any] | None
) -> tuple[Replacement, ProcessGroup] | None:
    if func not in _for_all and not any(func is known for _, known in _for_specs):
        return None
    leaves = _torch.tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, ShardedTensor)]
    group = tensors[0].placement.group
    if any(tensor.placement.group is not group for tensor in tensors):
        raise RuntimeError(
            "All distributed tensors should use the same ProcessGroup if used together in an op: "
            f"{func} got tensors of different groups"
        )
    own = _for_all.get(func)
    if own is None:
        own = _for_specs.get((type(tensors[0].sharding_spec()).__qualname__, func))
    return None if own is None else (own, group)
