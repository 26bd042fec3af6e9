"""The machine of a measurement: what it is, its fastest core, its peak memory.

Processes are kept on one core, so that host-bound figures repeat. Forward runs in one thread and
backward in another, never at the same time. On two cores each finds the other's Python objects in a
cold cache: on an H200's host FSDP2's step was seen to take 20 to 50 % longer then, and to vary as
much from step to step. Cores also differ, where a neighbour on the same machine keeps one busy: by
a third, on that host. The fastest is looked for before each round, and all engines have their turn
of the round on it.
"""

from __future__ import annotations

import os
import platform
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from shoal.bench.figures import Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Where a measurement was taken."""

    torch: str
    python: str
    system: str
    cpu: str
    num_cores: int
    memory_gib: float | None
    gpu: str | None
    cuda: str | None
    """The CUDA version torch was built for."""
    gpu_memory_gib: float | None = None


def describe_host() -> Host:
    """This machine, without its name."""
    cuda = torch.cuda.is_available()
    return Host(
        torch=torch.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        cpu=_cpu_name(),
        num_cores=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        memory_gib=_memory_gib(),
        gpu=torch.cuda.get_device_name(0) if cuda else None,
        gpu_memory_gib=round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
        if cuda
        else None,
        cuda=torch.version.cuda if cuda else None,
    )


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None


def fastest_core() -> int | None:
    """The core on which Python runs the fastest at the moment; None where none can be chosen."""
    if sys.platform != "linux":
        return None
    cores = os.sched_getaffinity(0)
    try:
        probes_ms = {core: _probe_ms(core) for core in cores}
    finally:
        os.sched_setaffinity(0, cores)
    return min(probes_ms, key=probes_ms.__getitem__)


def stay_on(core: int) -> float:
    """Move all threads of this process, and those to come, to a core.

    Return how long a little Python took there, in ms.
    """
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # a thread may end while we look
            os.sched_setaffinity(int(task.name), {core})
    return _probe_ms(core)


def _probe_ms(core: int) -> float:
    """How long a little Python takes on a core; the calling thread stays there."""
    os.sched_setaffinity(0, {core})
    times_ms: list[float] = []
    for _ in range(3):
        start = perf_counter()
        sum(number * number for number in range(20_000))
        times_ms.append((perf_counter() - start) * 1e3)
    return min(times_ms)


GIB = 2**30
_CLEAR_PEAK = "5"  # see proc(5): writing it to clear_refs resets the peak resident set


def reset_peak(device: torch.device) -> None:
    """Forget the peak of memory so far."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    # Not Linux, or not allowed: the peak then counts from the start of the process, which
    # is an upper bound that holds for every engine alike.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text(_CLEAR_PEAK)


def read_peak(device: torch.device) -> Memory:
    """The peak of memory since `reset_peak`."""
    if device.type == "cuda":
        return Memory(
            allocated_gib=torch.cuda.max_memory_allocated(device) / GIB,
            reserved_gib=torch.cuda.max_memory_reserved(device) / GIB,
            resident_gib=None,
        )
    return Memory(allocated_gib=None, reserved_gib=None, resident_gib=_peak_resident() / GIB)


def _peak_resident() -> int:
    """Bytes."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # macOS counts it in bytes, others in KiB.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
