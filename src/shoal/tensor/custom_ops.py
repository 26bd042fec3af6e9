"""Functions of torch that stand above autograd, replaced for sharded tensors by us or by users.

torch looks for `__torch_function__` whenever it meets a tensor of a subclass, and finds that ours
has none, which is the fastest. The first matrix of listed shards, which may be the weight of a
layer, gives it one, and so does the first replacement that somebody registers, and the first model
that has DTensors beside ShardedTensors. From then on every function and every attribute of a
sharded tensor goes through Python first: 1.6 µs each.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

from torch.nn import functional

from shoal._torch import subclasses, trees
from shoal._torch.sharded import ShardingSpec
from shoal.tensor.embedding import embedding, embedding_bag
from shoal.tensor.linear import linear
from shoal.tensor.mixed import has_dtensors, run_together
from shoal.tensor.sharded import ShardedTensor

Function: TypeAlias = Callable[..., Any]
Replacement: TypeAlias = Callable[[Any, Any, Any, Any], Any]
"""Called with types, args and kwargs, as of `__torch_function__`, and the process group."""

_for_all: dict[Function, Replacement] = {}
_for_specs: dict[tuple[str, Function], Replacement] = {}
"""By the name of a spec's class, as torch has it."""
_of_weights: dict[Function, Function] = {
    functional.linear: linear,
    functional.embedding: embedding,
    functional.embedding_bag: embedding_bag,
}
"""For shards that stand alone, unless a user has another replacement."""
_replaced: set[Function] = {*_of_weights}


def custom_sharded_op_impl(func: Function) -> Callable[[Replacement], Replacement]:
    """Replace a function of torch wherever a ShardedTensor is among its arguments: a decorator."""

    def register(replacement: Replacement) -> Replacement:
        _for_all[func] = _checked(func, replacement)
        _replaced.add(func)
        listen()
        return replacement

    return register


def custom_sharding_spec_op(
    sharding_spec_class: type[ShardingSpec], func: Function
) -> Callable[[Replacement], Replacement]:
    """Replace a function of torch for tensors of one kind of spec: a decorator."""

    def register(replacement: Replacement) -> Replacement:
        _for_specs[sharding_spec_class.__qualname__, func] = _checked(func, replacement)
        _replaced.add(func)
        listen()
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
def listen() -> None:
    """Let functions of torch come here first, whenever a ShardedTensor is among the arguments."""
    ShardedTensor.__torch_function__ = staticmethod(_torch_function)  # pyright: ignore


def _torch_function(
    func: Function, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
) -> Any:
    if has_dtensors(args if not kwargs else (*args, *kwargs.values())):
        return run_together(func, types, args, kwargs or {})
    if func not in _replaced:
        if kwargs is None:
            return subclasses.no_torch_function(func, types, args)
        return subclasses.no_torch_function(func, types, args, kwargs)
    tensors = [t for t in trees.tree_leaves((args, kwargs)) if isinstance(t, ShardedTensor)]
    first = tensors[0]
    group = first.placement.group
    if any(tensor.placement.group is not group for tensor in tensors):
        raise RuntimeError(
            "All distributed tensors should use the same ProcessGroup if used together in an op: "
            f"{func} got tensors of different groups"
        )
    replacement = _replacement(func, first)
    if replacement is not None:
        return replacement(types, args, kwargs, group)
    if first.placement.shards_stand_alone and func in _of_weights:
        return _of_weights[func](*args, **(kwargs or {}))
    return subclasses.no_torch_function(func, types, args, kwargs or {})


def _replacement(func: Function, tensor: ShardedTensor) -> Replacement | None:
    """What a user has registered; for all tensors goes before for one kind of spec."""
    found = _for_all.get(func)
    if found is not None or not _for_specs:
        return found
    return _for_specs.get((type(tensor.sharding_spec()).__qualname__, func))
