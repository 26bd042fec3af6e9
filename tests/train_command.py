"""`shoal train` as a running command, for tests that watch it from outside."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
TINY = [
    *("--dim", "16", "--layers", "1", "--heads", "2", "--context", "16", "--batch-size", "4"),
    *("--device", "cpu", "--validate-every", "0", "--sample-tokens", "8", "--max-bytes", "50000"),
]
FOREVER = ["--steps", "1000000", "--save-every", "0"]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


class Command:
    """A running `shoal train`, in a process group of its own like a shell's foreground job."""

    def __init__(self, folder: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> None:
        words = [sys.executable, *launcher, "-m", "shoal", "train", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            words,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def finish(self, timeout_s: float = 60) -> tuple[int, str, str]:
        """Wait for the end; return status, stdout and stderr."""
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err

    def ranks(self) -> list[int]:
        """Return the pids of the launched ranks, in order."""
        return children_of(self.process.pid)


def children_of(pid: int) -> list[int]:
    """The processes that a process has started, and that are there still."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            found.append(int(stat.parent.name))
    return sorted(found)


def wait_until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.05)


def wait_for_steps(folder: Path, num: int = 3, timeout_s: float = 60) -> None:
    metrics = folder / "metrics.jsonl"
    line = '"kind": "step"'
    wait_until(lambda: metrics.exists() and metrics.read_text().count(line) >= num, timeout_s)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def steps_in(folder: Path) -> list[int]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if line["kind"] == "step"]
