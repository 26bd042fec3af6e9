"""Whether local tensors fit a placement."""

from __future__ import annotations

from torch import Tensor

from shoal.errors import UsageError
from shoal.tensor.base import ShardedTensorBase
from shoal.tensor.placement import Placement


def check_locals(locals_: tuple[Tensor, ...], placement: Placement) -> None:
    """Raise unless there is a plain tensor of the right shape for each of the local shapes."""
    for local in locals_:
        if isinstance(local, ShardedTensorBase) or not isinstance(local, Tensor):
            raise UsageError(f"expected plain local tensors, got {described(local)}")
    shapes = tuple(tuple(local.shape) for local in locals_)
    if shapes != placement.local_shapes:
        raise UsageError(
            f"{placement} needs {_counted(placement.local_shapes)}, got {_listed(shapes)}"
        )
    if placement.shards_stand_alone:
        return
    for local in locals_:
        if local.requires_grad:
            raise UsageError(
                "expected a local tensor outside of autograd, got one that requires a gradient: "
                "detach it, and pass requires_grad=True for the ShardedTensor itself"
            )
        if not local.is_contiguous():
            raise UsageError(
                f"expected a contiguous local tensor, got strides {local.stride()}: "
                "pass local.contiguous()"
            )


def _counted(shapes: tuple[tuple[int, ...], ...]) -> str:
    if len(shapes) == 1:
        return f"a local tensor of shape {shapes[0]}"
    return f"{len(shapes)} local tensors of shapes {_listed(shapes)}"


def _listed(shapes: tuple[tuple[int, ...], ...]) -> str:
    return ", ".join(map(str, shapes)) or "none"


def described(value: object) -> str:
    """Say what was given instead, for errors."""
    if isinstance(value, ShardedTensorBase):
        return f"a ShardedTensor ({value.placement})"
    if isinstance(value, Tensor):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
