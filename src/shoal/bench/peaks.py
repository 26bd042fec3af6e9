"""Peak memory over a stretch of steps."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

from shoal.bench.figures import Memory

GIB = 2**30
_CLEAR_PEAK = "5"  # see proc(5): writing it to clear_refs resets the peak resident set


def reset_peak(device: torch.device) -> None:
    """Forget the peak so far."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text(_CLEAR_PEAK)
    except OSError:
        # Not Linux, or not allowed: the peak then counts from the start of the process, which
        # is an upper bound that holds for every engine alike.
        return


def read_peak(device: torch.device) -> Memory:
    """The peak since `reset_peak`."""
    if device.type == "cuda":
        return Memory(
            allocated_gib=torch.cuda.max_memory_allocated(device) / GIB,
            reserved_gib=torch.cuda.max_memory_reserved(device) / GIB,
            resident_gib=None,
        )
    return Memory(allocated_gib=None, reserved_gib=None, resident_gib=_peak_resident() / GIB)


def _peak_resident() -> int:
    """Bytes."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
