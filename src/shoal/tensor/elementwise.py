"""Element-wise operations: each rank computes on the elements that it holds, shard by shard."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal import _torch
from shoal.tensor.refusal import check_plain, differently_cut, refuse, unsupported
from shoal.tensor.sharded import Handler, Op, ShardedTensor, like, like_each


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
        return _or_each(_functional)
    return _or_each(_into_out if mutated == ("out",) else _in_place)


def _or_each(handle: Handler) -> Handler:
    """Serve tensors of several local shards too, one shard after another."""

    def handle_each(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
        try:
            return handle(op, args, kwargs)
        except AttributeError:
            # There is no `local` where a rank has several shards.
            operands = [a for a in (*args, *kwargs.values()) if isinstance(a, ShardedTensor)]
            if all(hasattr(operand, "local") for operand in operands):
                raise
        first = operands[0]
        for other in operands:
            if not first.placement.agrees(other.placement):
                raise differently_cut(op, first, other)
        for arg in args:
            if isinstance(arg, Tensor) and not isinstance(arg, ShardedTensor):
                check_plain(op, first, arg)
        results = [
            op(*(_shard(a, i) for a in args), **{k: _shard(a, i) for k, a in kwargs.items()})
            for i in range(len(first.locals))
        ]
        if not _torch.mutated_arguments(op):
            return like_each(first, results)
        return kwargs["out"] if "out" in kwargs else args[0]

    return handle_each


def _shard(arg: Any, index: int) -> Any:
    return arg.locals[index] if isinstance(arg, ShardedTensor) else arg


def _functional(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    example, local_args = _unwrap(op, args)
    return like(example, op(*local_args, **kwargs))


def _in_place(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    _, local_args = _unwrap(op, args)
    target = args[0]
    if not isinstance(target, ShardedTensor):
        raise unsupported(op, "its result goes into a plain tensor")
    op(*local_args, **kwargs)
    return target


def _into_out(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    target = kwargs["out"]
    if not isinstance(target, ShardedTensor):
        raise unsupported(op, "its result goes into a plain tensor")
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
