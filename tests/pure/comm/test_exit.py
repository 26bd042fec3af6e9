"""A process whose work is done ends well, whatever threads of C++ are about to ask for Python."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys, threading
from datetime import timedelta
import torch.distributed as dist
from shoal.comm.transport import Transport

store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
if sys.argv[1:] == ["transport"]:
    Transport(dist.group.WORLD)
dist.destroy_process_group()

def return_late():  # from C++, as a thread of gloo that lets go of its last tensor
    try:
        store.wait(["never"], timedelta(milliseconds=25))
    except dist.DistStoreError:
        pass

threading.Thread(target=return_late, daemon=True).start()
"""


def end_of(*arguments: str) -> int:
    command = [sys.executable, "-c", SCRIPT, *arguments]
    return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode


def test_a_process_that_used_gloo_waits_for_its_threads() -> None:
    assert end_of("transport") == 0


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python 3.14 lets such threads hang")
def test_without_a_transport_nothing_waits() -> None:
    """What the wait is for: it can go where this fails."""
    assert any(end_of() != 0 for _ in range(5))
