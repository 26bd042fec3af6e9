"""Functions of torch that are replaced for sharded tensors: layers by ours, any by a user's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

from torch.nn import functional

from shoal._torch import subclasses, trees
from shoal._torch.sharded import ShardingSpec
from shoal.doors.sharded_tensor.embedding import embedding, embedding_bag
from shoal.doors.sharded_tensor.linear import linear
from shoal.tensor.sharded import ShardedTensor
from shoal.tensor.torch_function import REPLACED, Function, listen

Replacement: TypeAlias = Callable[[Any, Any, Any, Any], Any]
"""Called with types, args and kwargs, as of `__torch_function__`, and the process group."""

_for_all: dict[Function, Replacement] = {}
_for_specs: dict[tuple[str, Function], Replacement] = {}
"""By the name of a spec's class, as torch has it."""
LAYERS: dict[Function, Function] = {
    functional.linear: linear,
    functional.embedding: embedding,
    functional.embedding_bag: embedding_bag,
}
"""For shards that stand alone, unless a user has another replacement."""


def custom_sharded_op_impl(func: Function) -> Callable[[Replacement], Replacement]:
    """Replace a function of torch wherever a ShardedTensor is among its arguments: a decorator."""
    return _registration(_for_all, func, func)


def custom_sharding_spec_op(
    sharding_spec_class: type[ShardingSpec], func: Function
) -> Callable[[Replacement], Replacement]:
    """Replace a function of torch for tensors of one kind of spec: a decorator."""
    return _registration(_for_specs, (sharding_spec_class.__qualname__, func), func)


def _registration(
    table: dict[Any, Replacement], key: object, func: Function
) -> Callable[[Replacement], Replacement]:
    def register(replacement: Replacement) -> Replacement:
        signature = inspect.signature(replacement)
        if len(signature.parameters) != 4:
            raise TypeError(
                f"Custom sharded op function for {func} expects signature: (types, args, kwargs, "
                f"process_group), but received signature: {signature}"
            )
        table[key] = replacement
        REPLACED[func] = call_replacement
        listen()
        return replacement

    return register


def call_replacement(func: Function, types: Any, args: Any, kwargs: dict[str, Any] | None) -> Any:
    """Call what stands for a function of torch: a user's replacement, a layer, or torch's own."""
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
    if first.placement.shards_stand_alone and func in LAYERS:
        return LAYERS[func](*args, **(kwargs or {}))
    return subclasses.no_torch_function(func, types, args, kwargs or {})


def _replacement(func: Function, tensor: ShardedTensor) -> Replacement | None:
    """A user's replacement; one for all tensors goes before one for a kind of spec."""
    found = _for_all.get(func)
    if found is not None or not _for_specs:
        return found
    return _for_specs.get((type(tensor.sharding_spec()).__qualname__, func))
