"""A step recorded as a CUDA graph: replayed with one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.modelled import BACKEND

RECORDED = ("nccl", BACKEND)
"""Backends whose collectives are work of the device alone."""


def why_not(device: torch.device) -> str | None:
    """What stands against recording; None if nothing does."""
    if device.type != "cuda":
        return f"it runs on {device.type}, and only CUDA records graphs"
    if not (dist.is_available() and dist.is_initialized()):
        return None
    if dist.get_backend() not in RECORDED:
        return f"its collectives go through {dist.get_backend()}, which waits on the host"
    return None


class Replay:
    """A recording, with memory of its own for what differs from call to call."""

    def __init__(
        self, run: Callable[..., Sequence[Any]], fixed: Sequence[Tensor], data: Sequence[Any]
    ) -> None:
        self._data = [one.clone() if isinstance(one, Tensor) else one for one in data]
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):  # records, runs nothing
            self._results = run(*fixed, *self._data)

    def __call__(self, data: Sequence[Any]) -> list[Any]:
        """Do the step with other data; the results are the caller's own."""
        for held, given in zip(self._data, data, strict=True):
            if isinstance(held, Tensor):
                held.copy_(given)
        self._graph.replay()
        return [one.clone() if isinstance(one, Tensor) else one for one in self._results]
