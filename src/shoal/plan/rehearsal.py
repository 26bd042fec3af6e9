"""A rehearsal: the engine itself takes some steps on the device at hand, as rank 0 of N.

The other ranks are imagined, and the network is modelled (`comm.modelled`); memory, kernels and
the host are real. The model is built, sharded and stepped by the same code as in a forecast, so the
differences between the two are what the forecast gets wrong.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from shoal._torch import distributed_tensor, trees
from shoal.comm.modelled import init_modelled
from shoal.comm.network import Network
from shoal.plan.accelerators import network_of
from shoal.plan.setup import Setup
from shoal.plan.training import (
    NUM_STEPS,
    Workload,
    arguments,
    meta_model,
    shard,
    take_steps,
)
from shoal.tensor.sharded import ShardedTensor

NUM_TIMED = 5
_STEP = "shoal.plan: step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What was measured."""

    device: str
    allocated_peak_bytes: int
    """Of the third step; on a CPU what tensors took, as the profiler saw it."""
    reserved_peak_bytes: int | None
    """None on a CPU, whose allocator keeps nothing."""
    step_ms: float
    """The median of the timed steps."""
    forward_backward_ms: float
    steps_ms: tuple[float, ...]


def rehearse(
    workload: Workload,
    setup: Setup,
    *,
    device_type: str | None = None,
    network: str | Network = "nvlink+ib",
    num_timed: int = NUM_TIMED,
    progress: Callable[[str], object] = lambda said: None,
) -> Rehearsal:
    """Take some steps on this machine's device, and measure them.

    Parameters and inputs are random numbers, since matrix units run faster on zeros.
    """
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(device_type)
    init_modelled(setup.world, network_of(network, setup.world), device_type)
    try:
        if device_type == "cuda":
            return _on_cuda(workload, setup, device, num_timed, progress)
        return _on_cpu(workload, setup, device, num_timed, progress)
    finally:
        dist.destroy_process_group()


def _on_cuda(
    workload: Workload,
    setup: Setup,
    device: torch.device,
    num_timed: int,
    progress: Callable[[str], object],
) -> Rehearsal:
    torch.cuda.empty_cache()
    progress("building")
    model, inputs = _built(workload, setup, device)
    stopwatch = _Stopwatch(device)
    progress("stepping")
    take_steps(stopwatch, model, inputs, workload, setup, NUM_STEPS + num_timed, None)
    torch.cuda.synchronize(device)
    return Rehearsal(
        device=torch.cuda.get_device_name(device),
        allocated_peak_bytes=stopwatch.allocated,
        reserved_peak_bytes=stopwatch.reserved,
        **stopwatch.times(),
    )


def _on_cpu(
    workload: Workload,
    setup: Setup,
    device: torch.device,
    num_timed: int,
    progress: Callable[[str], object],
) -> Rehearsal:
    progress("measuring memory")
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model, inputs = _built(workload, setup, device)
        take_steps(_Stopwatch(device), model, inputs, workload, setup, NUM_STEPS, None)
    del model
    peak = _profiled_peak(profiler)
    progress("measuring time")
    model, inputs = _built(workload, setup, device)
    stopwatch = _Stopwatch(device)
    take_steps(stopwatch, model, inputs, workload, setup, NUM_STEPS + num_timed, None)
    return Rehearsal(
        device="cpu", allocated_peak_bytes=peak, reserved_peak_bytes=None, **stopwatch.times()
    )


def _profiled_peak(profiler: Any) -> int:
    """The most that tensors took in the last step, of what came since the profile began."""
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda one: one.start_ns())
    begin = max(one.start_ns() for one in events if one.name() == _STEP)
    now = peak = 0
    for event in events:
        if event.name() == "[memory]":
            now += event.nbytes()
        if event.start_ns() >= begin:
            peak = max(peak, now)
    return peak


def _built(workload: Workload, setup: Setup, device: torch.device) -> tuple[nn.Module, Any]:
    model = meta_model(workload)
    shard(model, workload, setup, device.type)
    model.to_empty(device=device)
    gc.collect()
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            _fill(_local(parameter), generator)
        for buffer in model.buffers():
            buffer.zero_()
    with device:
        inputs = arguments(workload, device)
    for one in trees.tree_leaves(inputs):
        if isinstance(one, Tensor):
            _fill(one, generator)
    return model, inputs


def _local(parameter: Any) -> Tensor:
    if isinstance(parameter, ShardedTensor):
        return parameter.local
    return distributed_tensor.local_tensor(parameter)


def _fill(tensor: Tensor, generator: torch.Generator) -> None:
    if tensor.is_floating_point() and tensor.numel():
        tensor.normal_(0.0, 0.02, generator=generator)


class _Stopwatch:
    """Hears how far a run has come, and takes the time; on CUDA by events, without waiting."""

    def __init__(self, device: torch.device) -> None:
        self.phase = ""
        self.allocated = self.reserved = 0
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []
        self._num_steps = 0

    def moment(self, name: str, unit: str = "") -> None:
        """See `RunFollower`; the peak is that of the step that a forecast tells of."""
        if name == "step":
            self._num_steps += 1
            if self._num_steps == NUM_STEPS and self._is_cuda:
                torch.cuda.reset_peak_memory_stats(self._device)
            with record_function(_STEP):
                pass
        if name not in ("step", "computed", "stepped"):
            return
        self._marks.append((name, self._now()))
        if name == "stepped" and self._num_steps == NUM_STEPS and self._is_cuda:
            self.allocated = torch.cuda.max_memory_allocated(self._device)
            self.reserved = torch.cuda.max_memory_reserved(self._device)

    def _now(self) -> Any:
        if not self._is_cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def times(self) -> dict[str, Any]:
        """Of the steps after the warm ones."""
        by_name: dict[str, list[Any]] = {"step": [], "computed": [], "stepped": []}
        for name, mark in self._marks:
            by_name[name].append(mark)
        some = slice(NUM_STEPS, None)
        begins, computed, ends = (by_name[name][some] for name in by_name)
        steps = tuple(map(self._between, begins, ends))
        halves = tuple(map(self._between, begins, computed))
        return {
            "step_ms": median(steps),
            "forward_backward_ms": median(halves),
            "steps_ms": steps,
        }

    def _between(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) if self._is_cuda else (end - begin) * 1e3
