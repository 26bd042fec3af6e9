"""Devices as a few numbers, and how long a kernel takes on one.

A kernel takes as long as its arithmetic or its traffic, whichever is more, at a part of what the
data sheet promises, and a constant. The H200's part was fitted to the unsharded steps of
`shoal bench` (B1, B3, B5: within 3 %); other devices take the H200's part of their own data sheets.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from shoal.comm.network import FREE, INFINIBAND, NVLINK, Network
from shoal.errors import UsageError

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One device and its host."""

    name: str
    memory_bytes: int
    tflops: Mapping[str, float]
    """Peak of matrix products, by dtype."""
    bytes_per_us: float
    """Peak of memory traffic."""
    efficiency: float = 0.82
    """What part of these a kernel reaches."""
    kernel_us: float = 3.5
    """What each kernel takes beside."""
    host_us: float = 25.0
    """What the host takes to launch an operator."""
    context_bytes: int = 685 << 20
    """What CUDA's context and loaded kernels take beside the allocator, as on an H200."""
    is_measured: bool = False
    is_cpu: bool = False

    def kernel_time_us(self, flops: int, num_bytes: int, dtype: str) -> float:
        """How long a kernel takes."""
        rate = self.tflops.get(dtype.removeprefix("torch."), self.tflops["float32"]) * 1e6
        busy = max(flops / rate, num_bytes / self.bytes_per_us)
        return busy / self.efficiency + self.kernel_us


def _gpu(
    name: str, gib: float, half: float, single: float, tb_per_s: float, **more: bool
) -> Accelerator:
    return Accelerator(
        name=name,
        memory_bytes=int(gib * GIB),
        tflops={"bfloat16": half, "float16": half, "float32": single, "float64": single / 2},
        bytes_per_us=tb_per_s * 1e6,
        **more,
    )


def _cpu_core() -> Accelerator:
    """One core of a server's CPU, to which a rank of the demo is bound; all memory of the host."""
    return Accelerator(
        name="cpu",
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        tflops={"float32": 0.08, "bfloat16": 0.04, "float16": 0.01, "float64": 0.04},
        bytes_per_us=8e3,
        efficiency=0.7,
        kernel_us=3.0,
        host_us=0.0,
        context_bytes=0,
        is_cpu=True,
    )


ACCELERATORS = {
    one.name: one
    for one in (
        _gpu("h200", 139.8, 790.0, 60.0, 4.8, is_measured=True),
        _gpu("h100", 79.6, 790.0, 60.0, 3.35),
        _gpu("a100", 79.2, 290.0, 19.5, 2.0),
        _gpu("b200", 178.0, 1750.0, 75.0, 8.0),
        _cpu_core(),
    )
}


def accelerator(name: str | Accelerator) -> Accelerator:
    """A device by its name."""
    if isinstance(name, Accelerator):
        return name
    if name not in ACCELERATORS:
        raise UsageError(
            f"unknown device {name!r}{_near(name, ACCELERATORS)}; known are "
            f"{', '.join(ACCELERATORS)}, and in Python an Accelerator(...) of your own"
        )
    return ACCELERATORS[name]


def device_here(device_type: str) -> str:
    """The name in the table for the device at hand; the H200's for GPUs that are not in it."""
    if device_type == "cpu":
        return "cpu"
    name = torch.cuda.get_device_name().lower()
    return next((one for one in ACCELERATORS if one in name), "h200")


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.5)
    return f" (did you mean {near[0]}?)" if near else ""


NODE_SIZE = 8
"""How many ranks share a fast network, where two networks are named."""


def network_of(name: str | Network, world_size: int) -> Network:
    """A network by its name, as a group of that many ranks sees it."""
    if isinstance(name, Network):
        return name
    named = {
        "free": FREE,
        "nvlink": NVLINK,
        "ib": INFINIBAND,
        "nvlink+ib": NVLINK if world_size <= NODE_SIZE else INFINIBAND,
    }
    if name not in named:
        raise UsageError(
            f"unknown network {name!r}{_near(name, named)}; known are {', '.join(named)}, "
            "and in Python a Network(name, bandwidth_gb_per_s, latency_us) of your own"
        )
    return named[name]
