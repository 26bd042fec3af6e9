"""On which CUDA streams the engine works beside compute; on CPU there is only the host.

Compute allocates all memory. A lane waits for compute before it reads or writes any, and compute
waits for the lane before the memory is used again, so no memory is ever shared unordered and none
has to be recorded on a second stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from shoal import _torch


class Lane:
    """One stream beside compute."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._start = torch.cuda.Event() if self._stream is not None else None
        self.waits_for: torch.cuda.Event | None = None
        """What to wait for instead of all that compute was given so far; used once."""

    @contextmanager
    def __call__(self) -> Iterator[Lane]:
        """Work here, after what compute was given so far."""
        if self._stream is None:
            yield self
            return
        assert self._start is not None
        assert self._device.index is not None
        compute = _torch.current_stream(self._device.index)
        if self.waits_for is not None:
            self._stream.wait_event(self.waits_for)
            self.waits_for = None
        else:
            self._start.record(compute)
            self._stream.wait_event(self._start)
        _torch.make_current(self._stream)
        try:
            yield self
        finally:
            _torch.make_current(compute)

    def done(self) -> torch.cuda.Event | None:
        """Marks all that the lane was given so far."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event


class Streams:
    """The lanes of one model."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_host = device.type == "cpu"
        self.gathering = Lane(device)
        self.reducing = Lane(device)

    def gathered(self) -> Callable[[], None] | None:
        """Waits on the current stream for what the gathering lane was given so far."""
        event = self.gathering.done()
        if event is None:
            return None
        return lambda: torch.cuda.current_stream(self.device).wait_event(event)

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
        current = torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            hook(output)
        current.wait_stream(stream)
