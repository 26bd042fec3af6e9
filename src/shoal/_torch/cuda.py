"""CUDA's streams, at little cost to the host."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

_SPIN = """
extern "C" __global__ void spin(int duration_ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        __nanosleep(100);
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - start < duration_ns);
}
"""
_MAX_SPIN_US = 1e6
"""The kernel takes nanoseconds as an int."""


def spin(duration_us: float) -> None:
    """Keep the current CUDA stream busy for a time.

    By the timer that has one rate: a kernel that counts cycles takes up to a quarter longer beside
    matrix products, for which the device lowers its clock.
    """
    device = torch.cuda.current_device()
    launch, stream = _spinner(device), torch._C._cuda_getCurrentRawStream(device)
    while duration_us > 0:
        launch(stream, _int_argument(int(min(duration_us, _MAX_SPIN_US) * 1e3)))
        duration_us -= _MAX_SPIN_US


@functools.cache
def _spinner(device_index: int) -> Callable[[int, object], None]:
    """What launches the kernel; past torch's own call of it, which loads the driver each time."""
    with torch.cuda.device(device_index):
        kernel = torch.cuda._compile_kernel(_SPIN, "spin")
    driver = ctypes.CDLL("libcuda.so.1")

    def launch(stream: int, arguments: object) -> None:
        sizes = (1, 1, 1, 1, 1, 1, 0)
        code = driver.cuLaunchKernel(kernel.func, *sizes, ctypes.c_void_p(stream), arguments, None)
        if code != 0:
            raise RuntimeError(f"the driver refused to launch a kernel that spins: error {code}")

    return launch


@functools.lru_cache(maxsize=1024)
def _int_argument(value: int) -> object:
    """A kernel's only argument, as the driver takes it."""
    held = ctypes.c_int(value)
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(held))
    pointers.held = held  # pyright: ignore[reportAttributeAccessIssue]
    return pointers


class StreamInUse(NamedTuple):
    """A CUDA stream that was current, and what makes it current again."""

    stream: torch.cuda.Stream
    make_current: Callable[[], None]


def stream_in_use(device_index: int) -> StreamInUse:
    """The current CUDA stream; the same object each time, which costs the host next to nothing."""
    return _stream_in_use(*torch._C._cuda_getCurrentStream(device_index))


@functools.cache
def _stream_in_use(number: int, device_index: int, device_type: int) -> StreamInUse:
    # A handle, not a stream: making one costs microseconds, keeping it costs nothing.
    stream = torch.cuda.Stream(stream_id=number, device_index=device_index, device_type=device_type)
    return StreamInUse(stream, maker_of_current(stream))


def maker_of_current(stream: torch.cuda.Stream) -> Callable[[], None]:
    """A function that makes a stream of the current device the current one; for hot paths."""
    return functools.partial(
        torch._C._cuda_setStream,
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )


class StreamPool:
    """Memory that the caching allocator keeps for one CUDA stream, apart from all other memory.

    Nothing runs on the stream. What is allocated here may be written only in order with all
    earlier uses of this memory, which the caller has to see to.
    """

    def __init__(self, device: torch.device) -> None:
        stream = torch.cuda.Stream(device)
        self._index = stream.device_index
        self._make_current = maker_of_current(stream)

    def allocate(self, resize: Callable[[int], object], num_bytes: int) -> None:
        """Let a storage without memory have some: call its `resize_`."""
        in_use = stream_in_use(self._index)
        self._make_current()
        try:
            resize(num_bytes)
        finally:
            in_use.make_current()


_event_in_c: Any = torch.cuda.Event.__mro__[1]


# Past the methods in Python around them: (event, stream).
record_event: Callable[[torch.cuda.Event, torch.cuda.Stream], None] = getattr(
    _event_in_c, "record", torch.cuda.Event.record
)


wait_event: Callable[[torch.cuda.Event, torch.cuda.Stream], None] = getattr(
    _event_in_c, "wait", torch.cuda.Event.wait
)


def record_memory(is_on: bool) -> None:
    """Keep the history of the allocator's blocks, with stacks, or stop to."""
    torch.cuda.memory._record_memory_history("all" if is_on else None)


def save_memory_snapshot(path: Path) -> None:
    """Write the history that was kept, as pytorch.org/memory_viz reads it."""
    torch.cuda.memory._dump_snapshot(str(path))
