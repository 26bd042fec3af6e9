"""`--profile 20:25`: what operators and units did in some steps, as a trace for Perfetto.

Each rank writes `profile/rank-N.json.gz`, and on CUDA `profile/memory-rank-N.pickle`, which
pytorch.org/memory_viz draws. Units have their own lines in the trace, as `shoal gather blocks.1`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from shoal._torch import cuda
from shoal.checkpoint.disk import disk_errors


class ProfileWindow:
    """Profiles the steps from `steps.start` to `steps.stop - 1`; of an empty range, none."""

    def __init__(self, steps: range, folder: Path, rank: int, device: torch.device) -> None:
        self._steps = steps
        self._folder = folder
        self._rank = rank
        self._on_cuda = device.type == "cuda"
        self._profile: profile | None = None

    @property
    def is_open(self) -> bool:
        """Whether the step that runs now is profiled."""
        return self._profile is not None

    def before(self, step: int) -> None:
        """Start, if the window begins with this step, or the run goes on inside of it."""
        if step not in self._steps or self._profile is not None:
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] * self._on_cuda)]
        self._profile = profile(activities=activities, profile_memory=True)
        if self._on_cuda:
            cuda.record_memory(True)
        self._profile.start()

    def after(self, step: int) -> Path | None:
        """Write the trace after the window's last step; return the file."""
        return self.close() if self.is_open and step + 1 not in self._steps else None

    def close(self) -> Path | None:
        """Write what there is of a window that is open, because the run ends in it."""
        running, self._profile = self._profile, None
        if running is None:
            return None
        running.stop()
        trace = self._folder / f"rank-{self._rank}.json.gz"
        with disk_errors("write", trace):
            self._folder.mkdir(exist_ok=True)
            running.export_chrome_trace(str(trace))
            if self._on_cuda:
                cuda.save_memory_snapshot(self._folder / f"memory-rank-{self._rank}.pickle")
                cuda.record_memory(False)
        return trace
