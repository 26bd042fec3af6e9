"""Operations on lists of tensors: the multi-tensor and the fused steps of optimizers.

Lists are unwrapped once per call. Tensors at one index belong together: a parameter, its
gradient, its state; they are cut alike, or all plain, or single numbers such as a step count. At
other indices there may be DTensors, whose local tensors take part in the same call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal._torch import distributed_tensor, operators
from shoal.tensor.copies import copy_into
from shoal.tensor.mixed import check_column, dtensor_like
from shoal.tensor.refusal import check_plain, differently_cut
from shoal.tensor.sharded import Handler, Op, ShardedTensor, like, like_each

_FOREACH = "_foreach_"
_REDUCTIONS = frozenset({"max", "norm", "powsum"})


def is_elementwise(op: Op) -> bool:
    """Whether an operation does to each tensor of a list what an element-wise one does."""
    packet, _, overload = op.__name__.partition(".")
    if not packet.startswith(_FOREACH) or "out" in overload:
        return False
    single = packet.removeprefix(_FOREACH).removesuffix("_")
    if single == "zero":
        return True
    packets = getattr(torch.ops.aten, single, None)
    return (
        packets is not None
        and single not in _REDUCTIONS
        and any(torch.Tag.pointwise in getattr(packets, o).tags for o in packets.overloads())
    )


def foreach(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a multi-tensor operation on the local tensors."""
    examples, local_args = unwrap_lists(op, args)
    results = op(*local_args, **kwargs)
    if not results:
        return results
    if len(results) > len(examples):
        taken = iter(results)
        results = [[next(taken) for _ in range(count)] for count in _counts(examples)]
        return [
            like_each(example, locals_)
            if isinstance(example, ShardedTensor)
            else _like(example, locals_[0])
            for example, locals_ in zip(examples, results, strict=True)
        ]
    return [_like(example, local) for example, local in zip(examples, results, strict=True)]


def _like(example: Tensor, local: Tensor) -> Tensor:
    """A result that lies as its example does."""
    if isinstance(example, ShardedTensor):
        return like(example, local)
    return dtensor_like(example, local) if isinstance(example, DTensor) else local


def _foreach_copy(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Copy each source into its target; a source may be whole where the target is sharded."""
    targets, sources, *rest = args
    if all(
        isinstance(target, ShardedTensor)
        and isinstance(source, ShardedTensor)
        and hasattr(target, "local")
        and target.placement.agrees(source.placement)
        for target, source in zip(targets, sources, strict=True)
    ):
        op([t.local for t in targets], [s.local for s in sources], *rest, **kwargs)
        return
    for target, source in zip(targets, sources, strict=True):
        copy_into(op, target, source, *rest)


def _fused(num_lists: int) -> Handler:
    """Make the handler of a fused step in place; lists after the first so many are step counts."""

    def step(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        examples, local_args = unwrap_lists(op, args[:num_lists])
        counts = args[num_lists:]
        if len(local_args[0]) > len(examples):
            counts = tuple(_repeated(each, _counts(examples)) for each in counts)
        operators.binding(op)(*local_args, *counts, **kwargs)

    return step


def unwrap_lists(op: Op, args: tuple[Any, ...]) -> tuple[list[Tensor], list[Any]]:
    """Give the first list of tensors, and the arguments with local tensors in place of all."""
    examples: list[Any] = []
    placements: list[Any] = []
    local_args: list[Any] = []
    for arg in args:
        if not isinstance(arg, list) or not arg or not isinstance(arg[0], Tensor):
            local_args.append(arg)
            continue
        try:
            found = [tensor.placement for tensor in arg]
            local = [tensor.local for tensor in arg]
        except AttributeError:
            # Some are plain: rare enough to be looked at one by one.
            return _unwrap_mixed(op, args)
        if not examples:
            examples, placements = arg, found
        elif found != placements:
            for first, second in zip(examples, arg, strict=True):
                if not first.placement.agrees(second.placement):
                    raise differently_cut(op, first, second)
        local_args.append(local)
    return examples, local_args


def _unwrap_mixed(op: Op, args: tuple[Any, ...]) -> tuple[list[Tensor], list[Any]]:
    """Do as `unwrap_lists` does where some tensors are plain, or have several local shards.

    A tensor with several shards takes as many places in the lists, and so does what belongs to it.
    """
    lists = [a for a in args if isinstance(a, list) and a and isinstance(a[0], Tensor)]
    examples: list[Tensor] = []
    for column in zip(*lists, strict=True):
        sharded = [tensor for tensor in column if isinstance(tensor, ShardedTensor)]
        if not sharded:
            examples.append(check_column(op, column))
            continue
        examples.append(sharded[0])
        for tensor in column:
            if not isinstance(tensor, ShardedTensor):
                check_plain(op, sharded[0], tensor)
            elif not tensor.placement.agrees(sharded[0].placement):
                raise differently_cut(op, sharded[0], tensor)
    counts = _counts(examples)
    return examples, [_repeated(arg, counts) for arg in args]


def _counts(examples: Sequence[Tensor]) -> list[int]:
    """How many local tensors each tensor has on this rank."""
    return [len(each.locals) if isinstance(each, ShardedTensor) else 1 for each in examples]


def _repeated(arg: Any, counts: Sequence[int]) -> Any:
    """A list with local tensors in place of sharded ones, and the rest as often as they need it."""
    if not isinstance(arg, list) or len(arg) != len(counts):
        return arg
    repeated: list[Any] = []
    for each, count in zip(arg, counts, strict=True):
        if isinstance(each, ShardedTensor):
            repeated += each.locals
        else:
            repeated += [
                distributed_tensor.local_tensor(each) if isinstance(each, DTensor) else each
            ] * count
    return repeated


HANDLERS: dict[str, Handler] = {
    "_foreach_copy_": _foreach_copy,
    "_fused_adam_": _fused(5),
    "_fused_adamw_": _fused(5),
    "_fused_adagrad_": _fused(3),
    "_fused_sgd_": _fused(3),
}
