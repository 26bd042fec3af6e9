"""The process of one rank: starts once, then runs what it is sent until pytest goes away."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import pickle
import signal
import sys
import traceback
import unittest
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import modules, reset, stacks
from harness.groups import Groups
from harness.messages import Call, Ending, Outcome, Renew, Seat

_PR_SET_PDEATHSIG = 1


def main(seat: Seat, connection: Connection) -> None:
    """Take the seat, then serve."""
    # Imported modules never become garbage: without them a collection takes microseconds.
    gc.freeze()
    _end_with_pytest()
    _redirect_output(seat.output)
    stacks.answer_signal(seat.stacks)
    reset.enter({**os.environ, **seat.environment}, os.getcwd())
    device = torch.device(seat.setup.device)
    reset.reset_torch(device)
    groups = Groups(seat)
    connection.send(Outcome(ending=Ending.RETURNED, groups=groups.state()))
    while True:
        try:
            message: Renew | Call = connection.recv()
        except EOFError:
            os._exit(0)
        connection.send(_serve(message, seat, groups, device))


def _serve(message: Renew | Call, seat: Seat, groups: Groups, device: torch.device) -> Outcome:
    if isinstance(message, Renew):
        groups.renew(message.prefix)
        return Outcome(ending=Ending.RETURNED, groups=groups.state())
    try:
        payload = _run(message, seat, device)
        ending, error, trace = Ending.RETURNED, "", ""
    except BaseException as raised:
        payload = b""
        ending, error, trace = _describe(raised)
    gc.collect()
    sys.stdout.flush()
    sys.stderr.flush()
    return Outcome(
        ending=ending, groups=groups.state(), payload=payload, error=error, traceback=trace
    )


def _run(call: Call, seat: Seat, device: torch.device) -> bytes:
    reset.enter({**call.environment, **seat.environment}, call.folder)
    reset.adopt_filters(call.filters)
    reset.reset_torch(device)
    body = modules.find(call.module, call.file, call.qualname)
    args, kwargs = pickle.loads(call.payload)
    reset.seed()  # last, since importing the body's module may draw
    value = body(*args, **kwargs)
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"expected {call.qualname} to return a value that can be pickled, got "
            f"{type(value).__name__} ({error}); return plain values or tensors"
        ) from None


def _describe(raised: BaseException) -> tuple[Ending, str, str]:
    if isinstance(raised, (pytest.skip.Exception, unittest.SkipTest)):
        return Ending.SKIPPED, str(raised), ""
    if isinstance(raised, pytest.xfail.Exception):
        return Ending.XFAILED, str(raised), ""
    trace = raised.__traceback__
    while trace is not None and Path(trace.tb_frame.f_code.co_filename).parent == stacks.HARNESS:
        trace = trace.tb_next
    # With no frame left the harness itself failed, on an argument or a result: show all of it.
    text = "".join(traceback.format_exception(raised.with_traceback(trace or raised.__traceback__)))
    first_line, *_ = [*str(raised).splitlines(), ""]
    return Ending.RAISED, f"{type(raised).__qualname__}: {first_line}".rstrip(": "), text


def _end_with_pytest() -> None:
    """Make the kernel end this process with its parent: pytest, or the server that forked it."""
    # Its own process group: Ctrl-C reaches pytest alone, and a kill takes the rank's children too.
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The server lives while anyone holds this pipe. A rank that hangs must not keep it alive.
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


def _redirect_output(path: Path) -> None:
    """Send stdout and stderr, of C++ too, to one file, and crashes' stacks with them."""
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    faulthandler.enable(file=2)
