"""Nothing outlives pytest: not after Ctrl-C, not when pytest itself is killed."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
MARK = "SHOAL_TEST_FAMILY"

HANGING = """
import pathlib
import time
import torch.distributed as dist
from harness import ranks

@ranks(2)
def test_hangs(tmp_path):
    pathlib.Path({folder!r}, str(dist.get_rank())).touch()
    if dist.get_rank() == 0:
        dist.barrier()
    time.sleep(1000)
"""


class HangingPytest:
    """A pytest whose ranks hang, one in a collective, one in Python."""

    def __init__(self, folder: Path) -> None:
        self.mark = uuid.uuid4().hex
        self._folder = folder
        folder.mkdir()
        file = folder / "test_hanging.py"
        file.write_text(HANGING.format(folder=str(folder)))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", str(file)],
            # A killed process cannot tidy up: what it leaves on disk goes with the test's folder.
            env={**os.environ, MARK: self.mark, "PYTHONPATH": str(TESTS), "TMPDIR": str(folder)},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def hangs(self) -> bool:
        return all((self._folder / str(rank)).exists() for rank in range(2))

    def family(self) -> list[int]:
        """Return all processes that inherited its mark."""
        found = []
        for environment in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"{MARK}={self.mark}".encode() in environment.read_bytes():
                    found.append(int(environment.parent.name))
            except OSError:
                continue  # it has ended, or belongs to someone else
        return found

    def end(self) -> None:
        for pid in self.family():
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_ranks_end_with_pytest(tmp_path):
    blows = {
        signal.SIGINT: pytest.ExitCode.INTERRUPTED,
        signal.SIGKILL: -signal.SIGKILL,
    }
    # Both at once, since most of the time goes into importing torch.
    runs = {blow: HangingPytest(tmp_path / blow.name) for blow in blows}
    try:
        for blow, run in runs.items():
            assert wait_until(run.hangs, 60)
            assert len(run.family()) >= 4  # pytest, the server that forks, two ranks
            run.process.send_signal(blow)
        for blow, run in runs.items():
            output, _ = run.process.communicate(timeout=30)
            assert run.process.returncode == blows[blow], output
            assert wait_until(lambda run=run: not run.family(), 10), output
    finally:
        for run in runs.values():
            run.end()
