"""ShardedTensors and DTensors in one operation: a model whose units have different layouts.

torch asks the class of the first tensor in a list, and DTensor's raises if not all are DTensors.
But `__torch_function__`, which DTensor does not use, comes before: ours sees every such call, and
sends it to ShardedTensor's handlers. They compute on the local tensors of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from shoal._torch import distributed_tensor, subclasses, trees
from shoal.errors import UsageError
from shoal.tensor.refusal import unsupported
from shoal.tensor.sharded import Op, ShardedTensor
from shoal.tensor.totals import MeshAxis


def has_dtensors(args: Sequence[Any]) -> bool:
    """Whether DTensors are among the arguments of a call, or in a list among them."""
    for arg in args:
        if isinstance(arg, DTensor):
            return True
        if type(arg) in (list, tuple) and any(isinstance(each, DTensor) for each in arg):
            return True
    return False


def run_together(
    function: Callable[..., Any], types: Any, args: Sequence[Any], kwargs: dict[str, Any]
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


def check_column(op: Op, column: Sequence[Tensor]) -> Tensor:
    """An example of tensors that belong together, none of which is a ShardedTensor."""
    distributed = [tensor for tensor in column if isinstance(tensor, DTensor)]
    if not distributed:
        return column[0]
    example = distributed[0]
    if any(isinstance(placement, Partial) for placement in example.placements):
        raise unsupported(
            op, f"a DTensor has the placements {example.placements}; redistribute it first"
        )
    for tensor in column:
        is_alike = (
            distributed_tensor.place_getter(tensor) == distributed_tensor.place_getter(example)
            if isinstance(tensor, DTensor)
            else tensor.dim() == 0
        )
        if not is_alike:
            raise UsageError(
                f"{op} needs DTensors placed alike, got {_described(example)} and "
                f"{_described(tensor)}: redistribute one of them"
            )
    return example


def _described(tensor: Tensor) -> str:
    where = f"{tensor.placements} on {tensor.device_mesh}" if isinstance(tensor, DTensor) else ""
    return f"{tuple(tensor.shape)} {where or 'of a plain tensor'}"


def dtensor_like(example: DTensor, local: Tensor) -> DTensor:
    """Wrap a local tensor of the right shape as another DTensor is wrapped."""
    spec = distributed_tensor.spec_of(example)
    if local.dtype is not example.dtype:
        spec = distributed_tensor.dtensor_spec(
            spec.mesh, spec.placements, example.shape, example.stride(), local.dtype
        )
    return distributed_tensor.dtensor(local, spec)


def without_partial(tensor: Tensor) -> Tensor:
    """The same tensor with elements that are there; adds up what ranks have parts of."""
    if not isinstance(tensor, DTensor):
        return tensor
    placements = [Replicate() if isinstance(p, Partial) else p for p in tensor.placements]
    return tensor.redistribute(placements=placements)


def sharding_axes(tensor: DTensor) -> Iterator[MeshAxis]:
    """The mesh axes along which ranks hold different elements."""
    for axis, placement in enumerate(tensor.placements):
        if not isinstance(placement, Replicate):
            yield MeshAxis(tensor.device_mesh.get_group(axis))
