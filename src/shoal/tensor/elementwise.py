"""Element-wise operations: each rank computes on the elements that it holds, shard by shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shoal import _torch
from shoal.tensor.refusal import check_plain, differently_cut, refuse, unsupported
from shoal.tensor.sharded import Handler, Op, ShardedTensor, like, like_each

Result: TypeAlias = Callable[
    [ShardedTensor, list[Tensor], tuple[Any, ...], dict[str, Any]], ShardedTensor
]
"""What an operation returns: of the first operand, its results for each shard, its arguments."""


def is_elementwise(op: Op) -> bool:
    """Whether torch tags an operation, or the one that it does in place, as element-wise."""
    packet, _, overload = op.__name__.partition(".")
    if torch.Tag.nondeterministic_seeded in op.tags:
        return False
    if torch.Tag.pointwise in op.tags:
        return True
    twin = _torch.aten_overload(f"{packet.removesuffix('_')}.{overload}")
    return twin is not None and twin is not op and is_elementwise(twin)


def handler(op: Op) -> Handler:
    """Make the handler of one element-wise operation."""
    mutated = _torch.mutated_arguments(op)
    if len(mutated) > 1 or _torch.num_returns(op) != 1:
        return refuse
    if not mutated:
        return _or_each(_functional, _all_new)
    if mutated == ("out",):
        return _or_each(_into_out, _out)
    return _or_each(_in_place, _first)


def _or_each(handle: Handler, result: Result) -> Handler:
    """Serve tensors of several local shards too, one shard after another."""

    def handle_each(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
        try:
            return handle(op, args, kwargs)
        except AttributeError:
            # There is no `local` where a rank has several shards.
            operands = [a for a in (*args, *kwargs.values()) if isinstance(a, ShardedTensor)]
            if all(hasattr(operand, "local") for operand in operands):
                raise
        example = operands[0]
        _check_alike(op, example, operands, args)
        return result(example, _for_each(op, len(example.locals), args, kwargs), args, kwargs)

    return handle_each


def _all_new(
    example: ShardedTensor, locals_: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ShardedTensor:
    return like_each(example, locals_)


def _first(
    example: ShardedTensor, locals_: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ShardedTensor:
    return args[0]


def _out(
    example: ShardedTensor, locals_: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ShardedTensor:
    return kwargs["out"]


def _check_alike(
    op: Op, example: ShardedTensor, operands: Sequence[ShardedTensor], args: tuple[Any, ...]
) -> None:
    for other in operands:
        if other.placement is not example.placement and not example.placement.agrees(
            other.placement
        ):
            raise differently_cut(op, example, other)
    for arg in args:
        if isinstance(arg, Tensor) and not isinstance(arg, ShardedTensor):
            check_plain(op, example, arg)


def _for_each(op: Op, count: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Run an operation on as many shards, with a row of arguments for each."""
    rows = zip(*[_spread(arg, count) for arg in args], strict=True)
    if not kwargs:
        return [op(*row) for row in rows]
    named = zip(*[_spread(arg, count) for arg in kwargs.values()], strict=True)
    return [
        op(*row, **dict(zip(kwargs, values, strict=True)))
        for row, values in zip(rows, named, strict=True)
    ]


def _spread(arg: Any, count: int) -> tuple[Any, ...]:
    """An argument for each shard."""
    return arg.locals if isinstance(arg, ShardedTensor) else (arg,) * count


def _functional(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    example, local_args = _unwrap(op, args)
    return like(example, op(*local_args, **kwargs))


def _in_place(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    _, local_args = _unwrap(op, args)
    target = args[0]
    if not isinstance(target, ShardedTensor):
        raise unsupported(op, "its result goes into a plain tensor", args)
    op(*local_args, **kwargs)
    return target


def _into_out(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    target = kwargs["out"]
    if not isinstance(target, ShardedTensor):
        raise unsupported(op, "its result goes into a plain tensor", args)
    _, (out, *local_args) = _unwrap(op, (target, *args))
    op(*local_args, **{**kwargs, "out": out})
    return target


def _unwrap(op: Op, args: tuple[Any, ...]) -> tuple[ShardedTensor, list[Any]]:
    """Give the first ShardedTensor, and the arguments with local tensors in place of all."""
    example: ShardedTensor | None = None
    plain: list[Tensor] = []
    local_args: list[Any] = []
    for arg in args:
        if isinstance(arg, ShardedTensor):
            if example is None:
                example = arg
            elif arg.placement is not example.placement and not arg.placement.agrees(
                example.placement
            ):
                raise differently_cut(op, example, arg)
            local_args.append(arg.local)
        else:
            if isinstance(arg, Tensor):
                plain.append(arg)
            local_args.append(arg)
    if example is None:
        raise unsupported(op, "no operand is a ShardedTensor")
    for tensor in plain:
        check_plain(op, example, tensor)
    return example, local_args
