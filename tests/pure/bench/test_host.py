import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shoal.bench.host import fastest_core, read_peak


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process choose its cores")
def test_all_threads_end_up_on_one_core() -> None:
    script = (
        "import os, threading\n"
        "from shoal.bench.host import fastest_core, stay_on\n"
        "done = threading.Event(); seen = []\n"
        "look = lambda: (done.wait(), seen.append(os.sched_getaffinity(0)))\n"
        "thread = threading.Thread(target=look); thread.start()\n"
        "stay_on(fastest_core()); stay_on(fastest_core()); done.set(); thread.join()\n"
        "assert seen == [os.sched_getaffinity(0)] and len(seen[0]) == 1, seen\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, env=env)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process choose its cores")
def test_looking_for_a_core_moves_nobody() -> None:
    before = os.sched_getaffinity(0)
    assert fastest_core() in before
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(("system", "counted"), [("darwin", 3 << 30), ("freebsd14", 3 << 20)])
def test_the_peak_is_in_bytes_on_every_system(
    monkeypatch: pytest.MonkeyPatch, system: str, counted: int
) -> None:
    """macOS counts it in bytes, others in KiB."""

    def no_proc(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", no_proc)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=counted))
    assert read_peak(torch.device("cpu")).resident_gib == 3
