"""How much memory a rank uses."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch


def memory_bytes(device: torch.device) -> int:
    """Return the peak allocated on a CUDA device, or this process's memory on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    # Elsewhere the peak will do. macOS counts it in bytes, others in KiB.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
