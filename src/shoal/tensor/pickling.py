"""Pickling: a rank saves its own shards, and the same rank of an equal group loads them.

The group is the default one, or that of torch's `load_with_process_group`.

A pickle holds tensors, numbers, strings and tuples of them, and one function, `rebuilt`. So
`torch.load(weights_only=True)` loads it: that function is the only thing it is told to trust.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shoal._torch import sharded
from shoal.errors import UsageError
from shoal.layout.even import EvenPacking
from shoal.layout.ragged import ParamRun, RaggedPacking
from shoal.layout.spec import ParamSpec
from shoal.layout.whole import WholePacking
from shoal.tensor import listed, packed, spec
from shoal.tensor.older_api import is_shared, older_api
from shoal.tensor.sharded import ShardedTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """Ranks and sizes of the groups, which must be the same when a tensor is loaded."""

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


def reduced(tensor: ShardedTensor) -> tuple[Callable[..., ShardedTensor], tuple[dict[str, Any]]]:
    """The function that makes the tensor again, and its argument, for pickle."""
    placement = tensor.placement
    kind = type(placement).__name__
    values = tuple((name, _plain(v)) for name, v in placement.without_group().items())
    return rebuilt, (
        {
            "locals": tensor.locals,
            "placement": (kind, values),
            "requires_grad": tensor.requires_grad,
            "group": asdict(GroupState.of(placement.group)),
            "is_shared": is_shared(tensor),
            "attributes": vars(tensor),
        },
    )


def rebuilt(saved: dict[str, Any]) -> ShardedTensor:
    """Make the tensor again, in the group that it is loaded into.

    The pickle may come from anywhere: its values check themselves and one another.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "Need to initialize default process group using init_process_group before loading "
            "ShardedTensor"
        )
    group = sharded.group_to_load_into()
    GroupState(**saved["group"]).check(GroupState.of(group))
    kind, values = saved["placement"]
    placement = _PLACEMENTS[kind](group, **{name: _from_plain(value) for name, value in values})
    attributes = saved["attributes"]
    if hidden := [name for name in attributes if hasattr(ShardedTensor, name)]:
        raise UsageError(f"a pickled ShardedTensor replaces {hidden} of its class: not loaded")
    tensor = ShardedTensor.of(
        tuple(saved["locals"]), placement, requires_grad=saved["requires_grad"]
    )
    vars(tensor).update(attributes)
    if saved["is_shared"]:
        older_api().remote_shards.share(tensor)
    return tensor


_PLACEMENTS = {"Packed": packed.packed, "Listed": listed.listed}

_PACKINGS = (EvenPacking, RaggedPacking, WholePacking)
_VALUES = (
    ParamSpec,
    ParamRun,
    sharded.ShardMetadata,
    sharded.ChunkShardingSpec,
    sharded.EnumerableShardingSpec,
    spec.ChunkShardingSpec,
)
"""The classes of values in placements; they check themselves when they are made."""


def _plain(value: Any) -> Any:
    """A value as numbers, strings and tuples; values of users' own classes stay what they are."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, list):
        return "<list>", (("items", tuple(map(_plain, value))),)
    if isinstance(value, sharded.RemoteDevice):
        return "<device>", (("remote_device", str(value)),)
    if type(value) in _PACKINGS:
        return _plain_packing(value)
    return _plain_fields(value) if type(value) in _VALUES else value


def _plain_fields(value: Any) -> Any:
    names = [field.name for field in fields(value) if field.init]
    values = tuple((name, _plain(getattr(value, name))) for name in names)
    return _tag(type(value)), values


def _tag(kind: type) -> str:
    name = "Run" if kind is ParamRun else kind.__name__  # files have its first name
    return f"<{kind.__module__}.{name}>"


def _from_plain(value: Any) -> Any:
    """The opposite of `_plain`."""
    if not isinstance(value, tuple):
        return value
    if value and isinstance(value[0], str) and value[0] in _MAKERS:
        return _MAKERS[value[0]](value[1])
    return tuple(map(_from_plain, value))


def _maker(make: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda values: make(**{name: _from_plain(value) for name, value in values})


# All tensors of a unit have one packing: a pickle holds it once, and it is made once.
_plain_packing = lru_cache(maxsize=8)(_plain_fields)
_MAKERS: dict[str, Callable[[Any], Any]] = {
    **{_tag(kind): _maker(kind) for kind in _VALUES},
    **{_tag(kind): lru_cache(maxsize=8)(_maker(kind)) for kind in _PACKINGS},
    "<list>": _maker(lambda items: list(items)),
    "<device>": _maker(sharded.RemoteDevice),
}

torch.serialization.add_safe_globals([rebuilt])
