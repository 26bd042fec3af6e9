"""A device that is only imagined: the engine runs on meta tensors, and its device takes notes.

While a device is imagined, `fully_shard` puts units on the meta device, and what the engine asks
of memory and streams comes here. So a forecast runs the engine itself, not a description of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

from shoal import mesh as meshes


class Lane(Protocol):
    """A stream beside compute."""

    def __enter__(self) -> Any:
        """Work here, after what compute was given so far."""
        ...

    def __exit__(self, *_: object) -> None:
        """Work on compute again."""
        ...

    def mark(self) -> Any:
        """Marks all that the lane was given so far; hand it to `join`."""
        ...

    def wait_for(self, event: torch.Event) -> None:
        """Let the lane's next work come after an event of any stream."""
        ...

    def join(self, mark: Any) -> None:
        """Let the current stream wait for a mark."""
        ...


class ImaginedDevice(Protocol):
    """What takes notes."""

    def can_swap_memory(self) -> bool:
        """Whether its torch can exchange the memory of two storages."""
        ...

    def lane(self, name: str) -> Lane | None:
        """One more stream; None on a device that has no streams."""
        ...

    def resize(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Give a storage so much memory, or take it away."""
        ...

    def is_for(self, storage: torch.UntypedStorage, purpose: str) -> None:
        """Say what the memory of a storage is for."""
        ...


_imagined: ImaginedDevice | None = None


def imagined() -> ImaginedDevice | None:
    """The device that is imagined now."""
    return _imagined


@contextmanager
def imagine(device: ImaginedDevice) -> Iterator[None]:
    """Let sharded models run on a device that takes notes, inside of the `with` block."""
    global _imagined
    before, _imagined = _imagined, device
    try:
        yield
    finally:
        _imagined = before


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device that units of a mesh compute on."""
    return meshes.device_of(mesh) if _imagined is None else torch.device("meta")


def resizer(storage: torch.UntypedStorage) -> Callable[[int], object]:
    """What gives a storage memory, and takes it away."""
    device = _imagined
    if device is None or storage.device.type != "meta":
        return storage.resize_
    return lambda num_bytes: device.resize(storage, num_bytes)
