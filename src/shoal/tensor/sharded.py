"""A sharded tensor: global shape, dtype and device outside, one rank's elements inside.

    ShardedTensor (6, 4)          rank 0: .local (9,)    rank 1: .local (15,)
    torch sees the global one; every operation runs on `.local`

Operations find their handler by one dictionary look-up; `dispatch` finds it the first time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from copy import deepcopy
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from shoal import _torch
from shoal.errors import UsageError
from shoal.layout.region import Region
from shoal.tensor.placement import Placement

Op: TypeAlias = _torch.OpOverload
Handler: TypeAlias = Callable[[Op, tuple[Any, ...], dict[str, Any]], Any]
Kind: TypeAlias = tuple[torch.device, torch.dtype]

_wrapper = _torch.make_wrapper
_strided = torch.strided


class _Handlers(dict[Op, Handler]):
    """The handlers of the operations seen so far."""

    def __missing__(self, op: Op) -> Handler:
        # Handlers need the class that is defined below, so they are imported when one is asked for.
        from shoal.tensor.dispatch import handler_of

        handler = self[op] = handler_of(op)
        return handler


_HANDLERS = _Handlers()
_KINDS: dict[Kind, Kind] = {}
"""One object for each device and dtype, so that lists of them compare by identity."""


class ShardedTensor(Tensor):
    """A tensor of which this rank holds the elements that its placement says.

    `local` is the very tensor that holds them, of the shape `placement.piece.shape`, often a view
    of a larger buffer; assign it to move the tensor to other memory of the same dtype and device.
    `kind` is that device and dtype.
    """

    __slots__ = ("kind", "local", "placement")

    kind: Kind
    local: Tensor
    placement: Placement

    __torch_function__ = _torch.no_torch_function

    # Optimizers ask both of every parameter in every step: 20 ns each, where torch takes 120 (it
    # looks for `__torch_function__`) and 70 (a function in Python).
    is_sparse = False  # pyright: ignore[reportAssignmentType]
    __hash__ = object.__hash__

    def __new__(
        cls, local: Tensor, placement: Placement, *, requires_grad: bool = False
    ) -> ShardedTensor:
        """Wrap a local tensor, which must have the shape of this rank's piece."""
        _check_local(local, placement)
        _introduce()
        return _made(_kind_of(local), local, placement, requires_grad)

    def __init__(self, local: Tensor, placement: Placement, *, requires_grad: bool = False) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Op,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _HANDLERS[func](func, args, kwargs or {})

    @property
    def regions(self) -> tuple[Region, ...]:
        """This rank's rectangles of the global tensor; none where it holds nothing."""
        return self.placement.piece.regions

    def parts(self) -> list[tuple[Region, Tensor]]:
        """Each region with this rank's memory for it, in the region's shape."""
        flat, start = self.local.view(-1), 0
        found: list[tuple[Region, Tensor]] = []
        for region in self.regions:
            stop = start + region.numel
            found.append((region, flat[start:stop].view(region.sizes)))
            start = stop
        return found

    def full_tensor(self) -> Tensor:
        """Gather the whole tensor on every rank of the group: collective, and detached."""
        from shoal.tensor.gather import gather

        return gather(self)

    @property
    def data(self) -> ShardedTensor:
        """The same elements, outside of autograd."""
        return cast(ShardedTensor, self.detach())

    @data.setter
    def data(self, other: Tensor) -> None:
        # torch alone would change the outer tensor and leave the elements where they were.
        if not isinstance(other, ShardedTensor) or not self.placement.agrees(other.placement):
            raise UsageError(
                f"`.data` of a ShardedTensor ({self.placement}) takes a ShardedTensor of the same "
                f"placement, got {_described(other)}; to change values, use copy_"
            )
        _torch.set_data(self, other)
        self.kind, self.local, self.placement = other.kind, other.local, other.placement

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Placement, bool]]:
        return ["local"], (self.placement, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[Placement, bool], size: object, stride: object
    ) -> ShardedTensor:
        placement, requires_grad = context
        return ShardedTensor(inner["local"], placement, requires_grad=requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise UsageError(
                "only a ShardedTensor that is a leaf of autograd can be deep-copied: detach it"
            )
        copied = ShardedTensor(self.local.clone(), self.placement, requires_grad=self.requires_grad)
        memo[id(self)] = copied
        vars(copied).update(deepcopy(vars(self), memo))
        if self.grad is not None:
            copied.grad = deepcopy(self.grad, memo)
        return copied

    def __reduce_ex__(self, protocol: object) -> Any:
        raise NotImplementedError(
            f"a ShardedTensor ({self.placement}) cannot be pickled, since its process group lives "
            "in this process: save it with shoal.checkpoint, or pickle `tensor.full_tensor()`"
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"ShardedTensor(shape={self.placement.shape}, dtype={self.dtype}, "
            f"device={self.device}, {self.placement}{grad}, local={self.local!r})"
        )


def like(example: ShardedTensor, local: Tensor) -> ShardedTensor:
    """Wrap a local tensor of the right shape with another's placement; checks nothing."""
    kind = example.kind
    if local.dtype is not kind[1] or local.device != kind[0]:
        kind = _kind_of(local)
    return _made(kind, local, example.placement, False)


def _made(kind: Kind, local: Tensor, placement: Placement, requires_grad: bool) -> ShardedTensor:
    device, dtype = kind
    shape = placement.shape
    tensor = _wrapper(
        ShardedTensor, shape, None, None, None, dtype, _strided, device, False, requires_grad
    )
    tensor.kind = kind
    tensor.local = local
    tensor.placement = placement
    return tensor


def _kind_of(local: Tensor) -> Kind:
    kind = local.device, local.dtype
    return _KINDS.setdefault(kind, kind)


@functools.cache
def _introduce() -> None:
    """Make torch's optimizers know the class, once there is a tensor of it."""
    from shoal.tensor.steps import grouped

    # Without it, optimizers and clipping would take tensors one by one on CUDA.
    _torch.offer_foreach(ShardedTensor)
    _torch.group_for_optimizers(grouped)


def _check_local(local: Tensor, placement: Placement) -> None:
    if isinstance(local, ShardedTensor) or not isinstance(local, Tensor):
        raise UsageError(f"expected a plain local tensor, got {_described(local)}")
    if tuple(local.shape) != placement.piece.shape:
        raise UsageError(
            f"{placement} needs a local tensor of shape {placement.piece.shape}, "
            f"got {tuple(local.shape)}"
        )
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


def _described(value: object) -> str:
    if isinstance(value, ShardedTensor):
        return f"a ShardedTensor ({value.placement})"
    if isinstance(value, Tensor):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
