"""Starting rank processes, quickly where that is safe.

Importing torch takes seconds, forking a process that has it takes milliseconds: CPU ranks are
forked from a server which has imported it once. A process that uses CUDA must not be forked from
one that has so much as counted its devices, which imports may do: GPU ranks import on their own.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection, Pipe
from multiprocessing.process import BaseProcess

from harness import rank
from harness.messages import Seat

PRELOADED = ("numpy", "pytest", "hypothesis", "torch", "torch.distributed.fsdp", "torch._dynamo")
"""What most tests on ranks would import; the server passes over those that are not installed."""

_SERVER_ENVIRONMENT = {
    # A process is safely forked only while it has no threads.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Devices are counted without the driver, so that ranks can still count them after the fork.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}


def start_rank(seat: Seat) -> tuple[BaseProcess, Connection]:
    """Start a process for the seat; it answers on the connection once it has met the others."""
    seat.output.touch()
    seat.stacks.touch()
    ours, theirs = Pipe()
    if seat.setup.uses_cuda:
        context = multiprocessing.get_context("spawn")
    else:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        with _environment(_SERVER_ENVIRONMENT):
            forkserver.ensure_running()
    process = context.Process(target=rank.main, args=(seat, theirs), name=f"rank{seat.rank}")
    process.start()
    theirs.close()
    return process, ours  # pyright: ignore[reportReturnType]: a Windows type, on Windows only


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
