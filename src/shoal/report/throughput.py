"""How fast a run computes: floating-point operations per second, and as a part of the peak.

What a token costs, the run says itself (`operations_per_token`). Of older runs it is computed: 6
operations per parameter, and for its attention 12 · layers · dim · context more.
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
    per_token, ranks = run.setting("operations_per_token"), run.setting("num_ranks")
    if per_token is None:
        names = ("num_parameters", "layers", "dim", "context")
        num_parameters, *shape = [run.setting(name) for name in names]
        if not _are_counts(num_parameters, *shape):
            return None
        per_token = 6 * num_parameters + 12 * math.prod(shape)  # pyright: ignore
    if not _are_counts(per_token, ranks, tokens_per_s):
        return None
    device = "" if run.timeline is None else run.timeline.device
    tflops = per_token * tokens_per_s / ranks / 1e12  # pyright: ignore
    return of_rank(tflops, device, str(run.setting("precision")))


def of_rank(tflops_per_s: float, device: str, precision: str) -> Throughput:
    """The speed of a rank on a device of this name."""
    peak = None
    if precision in HALF:
        peak = next((peak for key, peak in PEAK_TFLOPS.items() if key in device), None)
    return Throughput(tflops_per_s=tflops_per_s, mfu=None if peak is None else tflops_per_s / peak)


def _are_counts(*numbers: object) -> bool:
    return all(isinstance(n, int | float) and 0 < n < 1e30 for n in numbers)
