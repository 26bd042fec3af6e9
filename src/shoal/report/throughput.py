"""How fast a run computes: floating-point operations per second, and as a part of the peak.

A token costs 6 operations per parameter (2 forward, 4 backward), and its attention
12 · layers · dim · context more. What is recomputed does not count: it is no progress.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.report.recorded_run import RecordedRun

PEAK_TFLOPS = {"B200": 2250.0, "H200": 989.0, "H100": 989.0, "A100": 312.0}
"""Of dense matrix products in bf16 and fp16, by data sheet, for names that contain the key."""

HALF = ("bf16", "fp16", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Of one rank."""

    tflops_per_s: float
    mfu: float | None
    """As a part of the device's peak; None where that is not known."""


def throughput(run: RecordedRun, tokens_per_s: float) -> Throughput | None:
    """The speed of one rank; None if the run does not say how large its model is."""
    num_parameters, ranks = run.setting("num_parameters"), run.setting("num_ranks")
    shape = [run.setting(name) for name in ("layers", "dim", "context")]
    numbers = [num_parameters, ranks, *shape, tokens_per_s]
    if not all(isinstance(n, int | float) and 0 < n < 1e18 for n in numbers):
        return None
    per_token = 6 * num_parameters + 12 * math.prod(shape)  # pyright: ignore
    tflops = per_token * tokens_per_s / ranks / 1e12  # pyright: ignore
    peak = _peak(run)
    return Throughput(tflops_per_s=tflops, mfu=None if peak is None else tflops / peak)


def _peak(run: RecordedRun) -> float | None:
    if run.timeline is None or run.setting("precision") not in HALF:
        return None
    device = run.timeline.device
    return next((peak for key, peak in PEAK_TFLOPS.items() if key in device), None)
