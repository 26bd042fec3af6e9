"""The network between the ranks of a job: gathers of a few sizes are timed, and a line fitted.

What is measured is kept in a file, and `--network measured` asks for it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from shoal._torch import collectives
from shoal.comm.collectives import Kind, bytes_sent
from shoal.comm.network import Network
from shoal.errors import UsageError
from shoal.files import read_regular, replace

_SIZES = tuple(1 << power for power in range(12, 29, 2))
"""Bytes of whole gathers, 4 KiB to 256 MiB."""
_LARGEST_ON_CPU = 1 << 24
_WARM, _TIMED = 2, 7
_MOST_BYTES = 1 << 16
_LEAST_RISE = 0.01
"""The largest gather takes that part of a usual one longer, or there is no slope to be seen."""


def measure_network(device: torch.device) -> Network:
    """Time the default process group; all ranks call it, and each gets what it saw itself."""
    size = dist.get_world_size()
    if size < 2:
        raise UsageError(
            "a network is between two ranks or more, and there is one: run torchrun "
            "--nproc-per-node N -m shoal plan --measure-network"
        )
    most = _LARGEST_ON_CPU if device.type == "cpu" else _SIZES[-1]
    points = [
        (bytes_sent(Kind.ALL_GATHER, num_bytes, size), _gather_us(num_bytes, device))
        for num_bytes in _SIZES
        if num_bytes <= most
    ]
    return fitted(f"measured between {size} ranks on {device.type}", points)


def fitted(name: str, points: Sequence[tuple[float, float]]) -> Network:
    """The network that misses these by least; points are bytes sent, and µs that it took.

    What counts is by what part of the time it misses: else the large ones alone would.
    """
    weights = [1 / took**2 for _, took in points]
    total = sum(weights)
    bytes_mean = sum(w * sent for w, (sent, _) in zip(weights, points, strict=True)) / total
    took_mean = sum(w * took for w, (_, took) in zip(weights, points, strict=True)) / total
    both = own = 0.0
    for weight, (sent, took) in zip(weights, points, strict=True):
        both += weight * (sent - bytes_mean) * (took - took_mean)
        own += weight * (sent - bytes_mean) ** 2
    us_per_byte = both / own if own else 0.0
    if us_per_byte * points[-1][0] < _LEAST_RISE * took_mean:
        raise UsageError(
            f"network {name!r}: larger gathers took no longer than small ones, so it has no "
            "bandwidth to tell: measure again when the machine is quiet"
        )
    latency_us = max(0.0, took_mean - us_per_byte * bytes_mean)
    return Network(name, 1e-3 / us_per_byte, latency_us)


def store_network(path: Path, found: Network) -> None:
    """Write what was measured."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, json.dumps(asdict(found)).encode()).close()
    except OSError as error:
        raise UsageError(f"cannot write the network {path}: {error.strerror}") from error


def read_network(path: Path) -> Network:
    """What was measured before."""
    try:
        content = json.loads(read_regular(path, _MOST_BYTES))
        return Network(
            str(content["name"]), float(content["bandwidth_gb_per_s"]), float(content["latency_us"])
        )
    except FileNotFoundError as error:
        raise UsageError(
            f"no network was measured yet, there is no {path}: run torchrun --nproc-per-node N -m "
            "shoal plan --measure-network"
        ) from error
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"cannot read the network {path}: {error}; measure it again") from error


def _gather_us(num_bytes: int, device: torch.device) -> float:
    """The median time of a gather whose result has so many bytes."""
    size = dist.get_world_size()
    mine = torch.zeros(max(1, num_bytes // size), dtype=torch.uint8, device=device)
    whole = torch.empty(mine.numel() * size, dtype=torch.uint8, device=device)
    group = dist.group.WORLD
    assert group is not None
    gather = collectives.gather_method(group)
    took: list[float] = []
    for number in range(_WARM + _TIMED):
        dist.barrier()
        begin = perf_counter()
        gather(whole, mine).wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= _WARM:
            took.append((perf_counter() - begin) * 1e6)
    return median(took)
