"""The link of a modelled rank, which its collectives occupy one after another.

There is one, whatever the number of groups: a gather and a reduction both send and receive, so that
both directions are in use by either. Collectives are carried in the order of their launch, also
those of different groups: one that waits for its input holds up the others, which a real link would
not do.

On CPU a collective is over when its time has passed on the clock. On CUDA it is a kernel that spins
for that time, on a stream of its group's if asynchronous and on the current stream if not, as
NCCL does; the host never waits.

    compute   ── gather 1 ── layer 0 ────── wait ── layer 1 ──
                    │                        ▲
    group           └── write, spin ─────────┘
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.futures import Future

from shoal._torch import cuda
from shoal.comm.calls import Call
from shoal.comm.collectives import Kind
from shoal.comm.python_group import PythonWork


class CpuLink:
    """A link whose clock is the host's; all groups of a rank have the same."""

    def __init__(self) -> None:
        self._free_at_s = 0.0

    def launch(
        self, calls: Sequence[Call], move: Callable[[], None], duration_us: float, _: bool
    ) -> PythonWork:
        """Move the bytes now, and let the work end when the link has carried them."""
        move()
        if duration_us == 0:
            return CpuWork(calls, 0.0)
        self._free_at_s = max(time.perf_counter(), self._free_at_s) + duration_us * 1e-6
        return CpuWork(calls, self._free_at_s)

    def carry(self, move: Callable[[], None], duration_us: float) -> None:
        """Move the bytes, and wait until the link has carried them."""
        self.launch((), move, duration_us, False).finish()


class CpuWork(PythonWork):
    """A collective that is over at a time of the host's clock."""

    def __init__(self, calls: Sequence[Call], due_s: float) -> None:
        super().__init__(calls)
        self._due_s = due_s

    def finish(self) -> None:
        """Sleep until it is over."""
        remaining_s = self._due_s - time.perf_counter()
        if remaining_s > 0:
            time.sleep(remaining_s)

    def is_completed(self) -> bool:
        """Whether its time has passed."""
        return time.perf_counter() >= self._due_s

    def get_future(self) -> Future:
        """Give a future that is done when the collective is; DDP waits for it in C++."""
        future: Future = Future()
        remaining_s = self._due_s - time.perf_counter()
        if remaining_s <= 0:
            future.set_result(self.result())
        else:
            timer = threading.Timer(remaining_s, future.set_result, (self.result(),))
            timer.daemon = True
            timer.start()
        return future


class CudaWire:
    """A device's wire, which all groups of a rank share."""

    def __init__(self, device: torch.device, is_free: bool) -> None:
        self.last: _Launch | None = None
        if not is_free:
            with torch.cuda.device(device):
                cuda.spin(1.0)  # compiled now, and not in a measured step


class CudaLink:
    """A group's stream onto the wire; its clock is the device's timer."""

    def __init__(self, device: torch.device, wire: CudaWire) -> None:
        self._wire = wire
        self._device_index = torch.cuda.current_device() if device.index is None else device.index
        self._stream = torch.cuda.Stream(device)
        self._carried = torch.cuda.Event()
        self._make_current = cuda.maker_of_current(self._stream)
        self._reached = torch.cuda.Event()
        self._unwaited: dict[CudaWork, None] = {}

    def launch(
        self,
        calls: Sequence[Call],
        move: Callable[[], None],
        duration_us: float,
        asynchronous: bool,
    ) -> PythonWork:
        """Queue the copies, then the spin, behind what the link already carries."""
        in_use = cuda.stream_in_use(self._device_index)
        current = in_use.stream
        if not asynchronous and duration_us == 0:
            move()  # nobody has to queue for a link that takes no time
            return CudaWork(calls, None, current)
        captured = torch.cuda.is_current_stream_capturing()
        if not asynchronous:
            self._occupy(current, move, duration_us, captured)
            return CudaWork(calls, None, current)
        stream = self._stream
        # One event serves all launches: a wait is for what was recorded when it was queued.
        self._reached.record(current)
        stream.wait_event(self._reached)
        self._make_current()
        try:
            event = self._occupy(stream, move, duration_us, captured)
        finally:
            in_use.make_current()
        work = CudaWork(calls, event, stream)
        if not captured:
            self._keep(work)
        return work

    def carry(self, move: Callable[[], None], duration_us: float) -> None:
        """Queue the copies and the spin on the current stream, at little cost to the host."""
        if duration_us == 0:
            move()
            return
        captured = torch.cuda.is_current_stream_capturing()
        # Nobody but the next launch waits for this event, and does so before it is used again.
        event = None if captured else self._carried
        self._occupy(
            cuda.stream_in_use(self._device_index).stream, move, duration_us, captured, event
        )

    def _occupy(
        self,
        stream: torch.cuda.Stream,
        move: Callable[[], None],
        duration_us: float,
        captured: bool,
        event: torch.cuda.Event | None = None,
    ) -> torch.cuda.Event:
        """Be carried on the current stream, after what went before on any other."""
        wire, event = self._wire, event or torch.cuda.Event()
        if duration_us == 0:
            move()
            event.record(stream)
            return event
        last = wire.last
        # What was queued outside a graph capture cannot be waited for inside it, nor the reverse.
        if last is not None and last.stream is not stream and last.captured == captured:
            stream.wait_event(last.event)
        move()
        cuda.spin(duration_us)
        event.record(stream)
        wire.last = _Launch(stream, event, captured)
        return event

    def _keep(self, work: CudaWork) -> None:
        # A work that its owner drops without waiting keeps its tensors here until it is over. A
        # work that is waited for leaves at once: recorded CUDA graphs count references to memory.
        unwaited = self._unwaited
        while unwaited and (first := next(iter(unwaited))).is_completed():
            del unwaited[first]
        unwaited[work] = None
        work.held_in = unwaited


class _Launch(NamedTuple):
    stream: torch.cuda.Stream
    event: torch.cuda.Event
    captured: bool


class CudaWork(PythonWork):
    """A collective that is over at an event; with no event, it is ordered by its stream alone."""

    def __init__(
        self, calls: Sequence[Call], event: torch.cuda.Event | None, stream: torch.cuda.Stream
    ) -> None:
        super().__init__(calls)
        self._event = event
        self._stream = stream
        self._waited = False
        self.held_in: dict[CudaWork, None] | None = None
        """Where it is kept until somebody waits for it."""

    def finish(self) -> None:
        """Make the current stream wait; a barrier makes the host wait too."""
        current = cuda.stream_in_use(self._stream.device_index).stream
        if self._event is not None:
            current.wait_event(self._event)
        if not self._waited and self._calls[0].kind == Kind.BARRIER:
            current.synchronize()
        self._waited = True
        if self.held_in is not None:
            self.held_in.pop(self, None)
            self.held_in = None

    def is_completed(self) -> bool:
        """Whether the device is past it."""
        return self._stream.query() if self._event is None else self._event.query()

    def get_future(self) -> Future:
        """Give a future that orders its readers' streams behind the collective."""
        future: Future = Future(devices=[self._stream.device])
        with torch.cuda.stream(self._stream):
            future.set_result(self.result())
        return future


def device_of(calls: Sequence[Call]) -> torch.device | None:
    """Where the tensors of a launch are; None for a launch without any."""
    for call in calls:
        for operand in (call.input, call.output):
            if operand is not None:
                return operand.device
    return None
