"""Functions that torch's older API asks of `ShardedTensor`, and that a door serves.

The class has torch's constructors and `remote_shards()`, since code in the wild calls them on it.
`doors.sharded_tensor` implements them, and says so here when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.tensor.sharded import ShardedTensor

_DOOR = "shoal.doors.sharded_tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class OlderApi:
    """The functions, with the arguments of the methods that call them."""

    allocate: Callable[..., ShardedTensor]
    """Shards of a spec, as `ShardedTensor(spec, *size)` makes them."""
    assemble: Callable[..., ShardedTensor]
    assemble_by_spec: Callable[..., ShardedTensor]
    assemble_by_metadata: Callable[..., ShardedTensor]
    assemble_without_group: Callable[..., ShardedTensor]
    share: Callable[[ShardedTensor], None]
    """Exchange RRefs to all shards between all RPC workers."""
    is_shared: Callable[[ShardedTensor], bool]
    """Whether RRefs to its shards were exchanged."""
    remote_shards: Callable[[ShardedTensor], dict[int, list[Any]]]


_served: OlderApi | None = None


def serve(api: OlderApi) -> None:
    """Have methods of `ShardedTensor` call these functions from now on."""
    global _served
    _served = api


def older_api() -> OlderApi:
    """The functions; imports the door where a tensor came by `torch.load` or `from_dtensor`."""
    if _served is None:
        import_module(_DOOR)
    assert _served is not None, f"{_DOOR} has not registered itself"
    return _served


def is_shared(tensor: ShardedTensor) -> bool:
    """Whether RRefs to a tensor's shards were exchanged; imports nothing to find out."""
    return _served is not None and _served.is_shared(tensor)
