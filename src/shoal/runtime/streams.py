"""On which CUDA streams the engine works beside compute; on CPU there is only the host.

Compute allocates all memory. A lane waits for compute before it reads or writes any, and compute
waits for the lane before the memory is used again, so no memory is ever shared unordered and none
has to be recorded on a second stream.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from shoal._torch import cuda
from shoal.comm.imagined_device import Lane, imagined


class CudaLane:
    """One CUDA stream beside compute."""

    def __init__(self, device: torch.device) -> None:
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._make_current = cuda.maker_of_current(self._stream)
        self._start = torch.cuda.Event()
        self._compute: cuda.StreamInUse | None = None
        self._events: list[torch.cuda.Event] = []

    def __enter__(self) -> CudaLane:
        """Work here, after what compute was given so far."""
        self._compute = compute = cuda.stream_in_use(self._index)
        # One event serves all: a wait is for what was recorded when it was queued.
        cuda.record_event(self._start, compute.stream)
        cuda.wait_event(self._start, self._stream)
        self._make_current()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._compute is not None
        self._compute.make_current()

    def mark(self) -> torch.cuda.Event:
        """Marks all that the lane was given so far; hand it to `join`."""
        event = self._events.pop() if self._events else torch.cuda.Event()
        cuda.record_event(event, self._stream)
        return event

    def wait_for(self, event: torch.Event) -> None:
        """Let the lane's next work come after an event of any stream."""
        self._stream.wait_event(event)  # pyright: ignore[reportArgumentType]

    def follow(self, other: CudaLane, mark: torch.cuda.Event) -> None:
        """Let this lane's next work come after a mark of another one, which has it back."""
        cuda.wait_event(mark, self._stream)
        other._events.append(mark)

    def join(self, mark: torch.cuda.Event) -> None:
        """Let the current stream wait for a mark."""
        cuda.wait_event(mark, cuda.stream_in_use(self._index).stream)
        self._events.append(mark)


class Streams:
    """The lanes of one model; none on CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.gathering = _lane(device, "gather")
        self.reducing = _lane(device, "reduce")
        self.copying = CudaLane(device) if device.type == "cuda" else None
        """Where shards come from the host: not behind gathers, which wait for other ranks."""

    def run_hook(
        self,
        hook: Callable[[torch.Tensor], None],
        output: torch.Tensor,
        stream: torch.cuda.Stream | None,
    ) -> None:
        """Call a user's hook on the stream it wants, in order with the current one."""
        if stream is None:
            hook(output)
            return
        device = torch.get_device_module(self.device)  # on CPU streams are there, and do nothing
        current = device.current_stream(self.device)
        stream.wait_stream(current)
        with device.stream(stream):
            hook(output)
        current.wait_stream(stream)


def _lane(device: torch.device, name: str) -> Lane | None:
    notes = imagined()
    if notes is not None and device.type == "meta":
        return notes.lane(name)
    return CudaLane(device) if device.type == "cuda" else None


def no_wait() -> None:
    """What to call where there is nothing to wait for."""
