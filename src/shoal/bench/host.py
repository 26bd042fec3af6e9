"""What a machine tells about itself, for the record of a measurement."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch


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
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None
