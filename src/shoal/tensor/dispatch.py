"""Which handler an operation gets: one by name, one by torch's element-wise tag, or a refusal.

By the tag, each rank computes on the elements that it holds, shard by shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal._torch import operators
from shoal.tensor import complex_pairs, copy_and_fill, optimizer_lists, reductions
from shoal.tensor.sharded import Handler, Op, ShardedTensor, like, like_each
from shoal.tensor.unsupported import check_plain, differently_cut, refuse, unsupported

_NAMED: dict[str, Handler] = {
    **complex_pairs.HANDLERS,
    **copy_and_fill.HANDLERS,
    **optimizer_lists.HANDLERS,
    **reductions.HANDLERS,
}
"""By operation and overload; a name alone means all overloads of it."""


def handler_of(op: Op) -> Handler:
    """Find the handler of an operation, which then serves all its calls."""
    if op.namespace != "aten":
        return refuse
    packet = op.__name__.partition(".")[0]
    named = _NAMED.get(op.__name__) or _NAMED.get(packet)
    if named is not None:
        return named
    if optimizer_lists.is_foreach_elementwise(op):
        return optimizer_lists.foreach
    if _is_elementwise(op):
        return _elementwise_handler(op)
    return refuse


def _is_elementwise(op: Op) -> bool:
    """Whether torch tags an operation, or the one that it does in place, as element-wise."""
    packet, _, overload = op.__name__.partition(".")
    if torch.Tag.nondeterministic_seeded in op.tags:
        return False
    if torch.Tag.pointwise in op.tags:
        return True
    twin = operators.aten_overload(f"{packet.removesuffix('_')}.{overload}")
    return twin is not None and twin is not op and _is_elementwise(twin)


def _elementwise_handler(op: Op) -> Handler:
    """Make the handler of one element-wise operation."""
    mutated = operators.mutated_arguments(op)
    if len(mutated) > 1 or len(operators.schema_of(op).returns) != 1:
        return refuse
    run = operators.straight(op)
    if not mutated:
        return _functional(run)
    return _into_out(run) if mutated == ("out",) else _in_place(run)


def _functional(run: Callable[..., Any]) -> Handler:
    def handle(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
        example, local_args, count = _unwrap(op, args)
        if count == 1:
            return like(example, run(*local_args, **kwargs))
        return like_each(example, [run(*row, **kwargs) for row in _each_local(local_args, count)])

    return handle


def _in_place(run: Callable[..., Any]) -> Handler:
    def handle(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
        _, local_args, count = _unwrap(op, args)
        target = args[0]
        if not isinstance(target, ShardedTensor):
            raise unsupported(op, "its result goes into a plain tensor", args)
        if count == 1:
            run(*local_args, **kwargs)
        else:
            for row in _each_local(local_args, count):
                run(*row, **kwargs)
        return target

    return handle


def _into_out(run: Callable[..., Any]) -> Handler:
    def handle(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
        target = kwargs["out"]
        if not isinstance(target, ShardedTensor):
            raise unsupported(op, "its result goes into a plain tensor", args)
        _, local_args, count = _unwrap(op, (target, *args))
        for out, *row in _each_local(local_args, count):
            run(*row, **{**kwargs, "out": out})
        return target

    return handle


def _unwrap(op: Op, args: tuple[Any, ...]) -> tuple[ShardedTensor, list[Any], int]:
    """Give the first ShardedTensor, the arguments with local tensors in place of all, their number.

    Where a rank has several local tensors, a tuple of them stands for each ShardedTensor.
    """
    example: ShardedTensor | None = None
    plain: list[Tensor] = []
    local_args: list[Any] = []
    count = 1
    for arg in args:
        if isinstance(arg, ShardedTensor):
            if example is None:
                example = arg
            elif arg.placement is not example.placement and not arg.placement.agrees(
                example.placement
            ):
                raise differently_cut(op, example, arg)
            # To ask like this takes 20 ns more than to just take it, and an exception 500.
            local: Any = getattr(arg, "local", None) if count == 1 else arg._several
            if local is None:
                local = arg._several
                count = len(local)
            local_args.append(local)
        else:
            if isinstance(arg, Tensor):
                plain.append(arg)
            local_args.append(arg)
    if example is None:
        raise unsupported(op, "no operand is a ShardedTensor")
    for tensor in plain:
        check_plain(op, example, tensor)
    return example, local_args, count


def _each_local(local_args: Sequence[Any], count: int) -> Iterable[tuple[Any, ...]]:
    """The arguments for each of several local tensors; torch itself passes no tuples."""
    if count == 1:
        return [tuple(local_args)]
    return zip(*[a if type(a) is tuple else (a,) * count for a in local_args], strict=True)
