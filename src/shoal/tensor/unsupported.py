"""Refusals: what an operation that cannot run on the local parts alone answers."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal._torch import trees
from shoal.errors import UsageError
from shoal.tensor.sharded import Op, ShardedTensor

_OUTSIDE = (
    "It is the parameter {!r}, which is whole only while its module runs: call the module that was "
    "given to fully_shard and not a layer inside of it, call "
    "register_fsdp_forward_method(module, 'name') for another method than forward, or work in "
    "full_parameters(module). "
)


def refuse(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """Say that there is no handler, and what to do instead."""
    reason = "the operation is not one that each rank can do on its own elements"
    raise unsupported(op, reason, args, kwargs)


def unsupported(op: Op, reason: str, *operands: Any) -> NotImplementedError:
    """Build the error for an operation, or a way of calling it, that is missing.

    The first ShardedTensor of the operands says how it is cut.
    """
    sharded = [o for o in trees.tree_leaves(operands) if isinstance(o, ShardedTensor)]
    layout = f", for a tensor of {sharded[0].placement}" if sharded else ""
    name = next((n for n in (vars(one).get("_shoal_name") for one in sharded) if n), None)
    hint = "" if name is None else _OUTSIDE.format(name)
    return NotImplementedError(
        f"{op}: {reason}{layout}. {hint}Use tensor.full_tensor() for a whole copy on every rank, "
        "tensor.locals for the elements of this rank, or tensor.reshard(spec) for another cut; the "
        "operation itself is not supported for ShardedTensor!"
    )


def differently_cut(op: Op, first: ShardedTensor, second: ShardedTensor) -> UsageError:
    """Build the error for operands of which ranks hold different elements."""
    return UsageError(
        f"{op} needs ShardedTensors cut alike, got {first.placement} and {second.placement}, of "
        f"groups of {first.placement.group.size()} and {second.placement.group.size()}: give both "
        "one placement, or use full_tensor() on each"
    )


def check_plain(op: Op, example: ShardedTensor, plain: Tensor) -> None:
    """Raise unless a plain operand means the same for every element, on every rank."""
    if isinstance(plain, DTensor):
        raise unsupported(op, "one operand is a DTensor, which is cut in another way", example)
    if plain.dim() != 0:
        raise unsupported(
            op,
            f"one operand is a plain tensor of shape {tuple(plain.shape)}, of which it is not "
            "known whether it is whole or this rank's part",
            example,
        )
    if example.dim() == 0 and plain.dtype != example.dtype:
        # Locally it has a dim, so that torch would promote dtypes by another rule.
        reason = f"a 0-d {example.dtype} meets a 0-d {plain.dtype}: cast one first"
        raise unsupported(op, reason, example)
