"""Pickling: a rank saves its own shards, and the same rank of an equal group loads them.

The group is the default one, or that of torch's `load_with_process_group`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shoal import _torch
from shoal.tensor import remote
from shoal.tensor.placement import Placement
from shoal.tensor.sharded import ShardedTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """What must be the same when a tensor is loaded."""

    local_rank: int
    global_rank: int
    local_world_size: int
    global_world_size: int

    @classmethod
    def of(cls, group: ProcessGroup) -> GroupState:
        """Describe a group as this rank sees it now."""
        return cls(
            local_rank=dist.get_rank(group),
            global_rank=dist.get_rank(),
            local_world_size=dist.get_world_size(group),
            global_world_size=dist.get_world_size(),
        )

    def check(self, now: GroupState) -> None:
        """Raise unless a group is like the one of the save."""
        for name in ("local_rank", "global_rank", "local_world_size", "global_world_size"):
            saved, found = getattr(self, name), getattr(now, name)
            if saved != found:
                raise RuntimeError(
                    f"{name.replace('_', ' ').capitalize()} at save time was {saved}, but at load "
                    f"time was {found}: load with load_with_process_group on as many ranks as "
                    "saved, or save with shoal.checkpoint, which loads on any number"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A rank's part of a tensor, without its process group."""

    locals: tuple[Tensor, ...]
    placement: Callable[[Any], Placement]
    requires_grad: bool
    group: GroupState
    is_shared: bool
    attributes: dict[str, Any]


def reduced(tensor: ShardedTensor) -> tuple[Callable[[Saved], ShardedTensor], tuple[Saved]]:
    """What pickle needs to know."""
    saved = Saved(
        locals=tensor.locals,
        placement=tensor.placement.without_group(),
        requires_grad=tensor.requires_grad,
        group=GroupState.of(tensor.placement.group),
        is_shared=remote.is_shared(tensor),
        attributes=vars(tensor),
    )
    return rebuilt, (saved,)


def rebuilt(saved: Saved) -> ShardedTensor:
    """Make the tensor again, in the group that it is loaded into."""
    if not dist.is_initialized():
        raise RuntimeError(
            "Need to initialize default process group using init_process_group before loading "
            "ShardedTensor"
        )
    group = _torch.group_to_load_into()
    saved.group.check(GroupState.of(group))
    tensor = ShardedTensor.of(
        saved.locals, saved.placement(group), requires_grad=saved.requires_grad
    )
    vars(tensor).update(saved.attributes)
    if saved.is_shared:
        remote.share(tensor)
    return tensor
