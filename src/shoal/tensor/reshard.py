"""Resharding: a tensor's elements brought to another placement.

    reshard(tensor, to)     another tensor, differentiable: its backward is the reshard back
    reshard_(tensor, to)    the same tensor, which from then on is cut differently

`to` is any spec, which names ranks of the tensor's group, or any placement over a group that has
all ranks of the tensor's, or some of them; every rank of the larger group calls:

    reshard ranks [0, 1, 2, 3] to [2, 3]: four ranks take part; two of them end up with nothing
    reshard ranks [2, 3] to [0, 1, 2, 3]: four ranks take part; two of them begin with nothing

Beside its old local shards a rank has at most `max_extra` times the larger of its old and new ones
at any time, of which the new ones are a part. Tensors of up to `transfer.ONE_ROUND_BYTES` may take
three times that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shoal._torch.sharded import ShardingSpec
from shoal.errors import UsageError
from shoal.layout.listing import Listing
from shoal.layout.parcel import Holding
from shoal.tensor.listed import Listed
from shoal.tensor.placement import Placement, shared_device
from shoal.tensor.sharded import ShardedTensor, allocate
from shoal.tensor.transfer import MAX_EXTRA, num_rounds, transfer

Target: TypeAlias = Placement | ShardingSpec


def reshard(tensor: ShardedTensor, to: Target, *, max_extra: float = MAX_EXTRA) -> ShardedTensor:
    """Give a tensor of the same values that is cut as `to` says: collective.

    It is the tensor itself where that is how it is cut already.
    """
    placement = _placement(tensor, to)
    if _is_placed(tensor, placement):
        return tensor
    moved = _moved(tensor, placement, max_extra)
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return moved
    back = partial(reshard, to=tensor.placement, max_extra=max_extra)
    return SameElements.apply(tensor, [moved], back)


def reshard_(tensor: ShardedTensor, to: Target, *, max_extra: float = MAX_EXTRA) -> ShardedTensor:
    """Cut a tensor as `to` says, in place, its gradient too: collective."""
    placement = _placement(tensor, to)
    if _is_placed(tensor, placement):
        return tensor
    moved = _moved(tensor, placement, max_extra)
    if tensor.grad_fn is not None and torch.is_grad_enabled():
        back = partial(reshard, to=tensor.placement, max_extra=max_extra)
        return SameElements.apply(tensor, [moved], back, True)
    gradient = tensor.grad
    tensor.grad = None
    tensor.adopt(moved)
    if isinstance(gradient, ShardedTensor):
        tensor.grad = reshard(gradient, placement, max_extra=max_extra)
    return tensor


class SameElements(torch.autograd.Function):
    """A tensor that has the elements of another one, which autograd knows.

    `back` makes the other's gradient of its own. In place, the other becomes the tensor.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        tensor: Any,
        made: list[Tensor],
        back: Callable[[Any], Tensor],
        in_place: bool = False,
    ) -> Tensor:
        """Return the tensor in the list, which autograd must not take for an input."""
        ctx.back = back
        if not in_place:
            return made[0]
        tensor.adopt(made[0])
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Carry the gradient back."""
        return ctx.back(gradient), None, None, None


class _ReshardedShards(torch.autograd.Function):
    """Local tensors that autograd sees by themselves, from local tensors of another placement."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        anchor: Tensor,
        source: Placement,
        target: Placement,
        max_extra: float,
        *locals_: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.source, ctx.target, ctx.max_extra = source, target, max_extra
        tensor = ShardedTensor.of([local.detach() for local in locals_], source)
        return _carried(tensor, target, max_extra).locals

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        locals_ = [each.contiguous() for each in gradients]
        back = ctx.target, ctx.source, ctx.max_extra
        carried = _ReshardedShards.apply(torch.empty(0), *back, *locals_)
        return None, None, None, None, *carried


def _moved(tensor: ShardedTensor, placement: Placement, max_extra: float) -> ShardedTensor:
    """Carry the elements over; where shards stand alone, autograd sees it shard by shard."""
    source = tensor.placement
    if not (
        source.shards_stand_alone
        and placement.shards_stand_alone
        and torch.is_grad_enabled()
        and (tensor.requires_grad or any(local.requires_grad for local in tensor.locals))
    ):
        return _carried(tensor, placement, max_extra)
    # A rank whose shards need no gradient, or that has none, has to take part in the backward too.
    anchor = torch.empty(0, requires_grad=True)
    locals_ = _ReshardedShards.apply(anchor, source, placement, max_extra, *tensor.locals)
    return ShardedTensor.of(locals_, placement)


def _carried(tensor: ShardedTensor, placement: Placement, max_extra: float) -> ShardedTensor:
    source = tensor.placement
    group = _common_group(source, placement)
    device = shared_device(tensor.device, source)
    with torch.no_grad():
        result = allocate(placement, tensor.dtype, device)
        if group is None:
            return result
        transfer(
            tensor.parts(),
            result.parts(),
            _renumbered(group, source),
            _renumbered(group, placement),
            group,
            device=shared_device(device, source, placement),
            rounds=num_rounds(
                tensor.numel() * tensor.element_size(), group.size(), max_extra=max_extra
            ),
            reason=f"the reshard of a ShardedTensor of {source.shape}",
        )
    return result


def _is_placed(tensor: ShardedTensor, placement: Placement) -> bool:
    """Whether a tensor is cut as a placement says; one that says where must find it there."""
    return tensor.placement.agrees(placement) and (
        placement.local_devices is None
        or placement.shards(tensor.device) == tensor.placement.shards(tensor.device)
    )


def _placement(tensor: ShardedTensor, to: object) -> Placement:
    group, shape = tensor.placement.group, tensor.placement.shape
    is_member = isinstance(group, ProcessGroup)
    if group is None or (isinstance(to, ShardingSpec) and not is_member):
        raise UsageError(
            f"a ShardedTensor of {shape} can be resharded by the ranks of its process group; "
            + ("it has none" if group is None else "this rank is not in it: pass a Placement")
        )
    if isinstance(to, ShardingSpec):
        return Listed.of_spec(to, shape, group)
    if not isinstance(to, Placement):
        raise UsageError(f"expected a ShardingSpec or a Placement, got {to!r}")
    if to.shape != shape:
        raise UsageError(f"a tensor of {shape} cannot be resharded to a placement of {to.shape}")
    return to


def _common_group(source: Placement, target: Placement) -> ProcessGroup | None:
    """The group over which elements can go from one placement to the other.

    None on a rank that is in neither; where no group has all ranks, it raises.
    """
    first, second = _members(source.group), _members(target.group)
    if first == second or second is None:
        return source.group if first is not None else None
    if first is None:
        return target.group
    if {*second} <= {*first}:
        smaller, larger = target, source
    elif {*first} <= {*second}:
        smaller, larger = source, target
    else:
        raise NotImplementedError(
            f"a tensor over ranks {first} cannot be resharded to ranks {second}: neither group has "
            "all ranks of the other; reshard it over a group that has them all first"
        )
    if {*first} != {*second} and not smaller.shards_stand_alone:
        raise NotImplementedError(
            f"a tensor over ranks {first} cannot be resharded to ranks {second}: the ranks outside "
            f"of {_members(smaller.group)} have no part in a placement of a layout ({smaller}); "
            "use a placement of listed shards there, Listed.of_spec on all ranks of both groups"
        )
    return larger.group


def _renumbered(group: ProcessGroup, placement: Placement) -> Holding:
    """A placement, with ranks as `group` counts them; ranks outside of it hold nothing."""
    members, own = dist.get_process_group_ranks(group), _members(placement.group)
    if own == members:
        return placement
    # By the placement of a rank outside of its group, ranks are those of the world.
    numbers = {rank: rank if own is None else own.index(rank) for rank in own or members}
    return Listing(
        (index, region)
        for index, rank in enumerate(members)
        if rank in numbers
        for region in placement.regions_of(numbers[rank])
    )


def _members(group: object) -> list[int] | None:
    """The members' global ranks; None where this rank is not one of them."""
    return dist.get_process_group_ranks(group) if isinstance(group, ProcessGroup) else None
