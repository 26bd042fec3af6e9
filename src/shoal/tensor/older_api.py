"""Functions that torch's older API asks of `ShardedTensor`, and that a door serves.

The class has torch's constructors and `remote_shards()`, since code in the wild calls them on it.
`doors.sharded_tensor` implements them. The core imports it when one of them is called.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.tensor.sharded import ShardedTensor

_DOOR = "shoal.doors.sharded_tensor"


def older_api() -> Any:
    """The door, whose modules are its attributes; imported by the first call."""
    return import_module(_DOOR)


def is_shared(tensor: ShardedTensor) -> bool:
    """Whether RRefs to a tensor's shards were exchanged; imports nothing to find out."""
    return _DOOR in sys.modules and older_api().remote_shards.is_shared(tensor)
