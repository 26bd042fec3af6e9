"""Where a rank is: its threads' Python stacks, even while it hangs inside a C++ collective.

faulthandler answers a signal from C, so neither the GIL nor the main thread is needed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import linecache
import os
import re
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

SIGNAL = signal.SIGUSR1
PATIENCE_S = 1.0
"""How long a rank has to answer; it takes milliseconds unless the process is stopped."""

HARNESS = Path(__file__).parent
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')


def answer_signal(path: Path) -> None:
    """In a rank: write all threads' stacks to `path` whenever `SIGNAL` arrives."""
    faulthandler.register(SIGNAL, file=path.open("ab", buffering=0), all_threads=True)


def ask(process: BaseProcess, path: Path) -> None:
    """Tell a rank to write its stacks; what it wrote before is forgotten."""
    os.truncate(path, 0)
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):  # it has just ended: there is no answer
        os.kill(process.pid, SIGNAL)


def answer(path: Path) -> str:
    """Read the stacks that a rank was asked for."""
    return readable(_settled(path, time.monotonic() + PATIENCE_S))


def _settled(path: Path, deadline: float) -> str:
    """Read a file once it has something in it and has stopped growing."""
    text = ""
    while time.monotonic() < deadline:
        previous, text = text, path.read_text(errors="replace")
        if text and text == previous:
            break
        time.sleep(0.02)
    return text


def readable(dump: str) -> str:
    """Turn faulthandler's dump into tracebacks: last call last, with source, without harness."""
    if not dump:
        return f"no stacks: the process did not answer within {PATIENCE_S} s"
    threads = [thread for block in dump.split("\n\n") if (thread := _readable_thread(block))]
    return "\n".join(threads) or "waiting for the next test"


def _readable_thread(block: str) -> str:
    """Rewrite one thread; empty when only harness frames are left of it."""
    head, *rest = block.strip().splitlines()
    frames: list[str] = []
    for match in filter(None, map(_FRAME.match, rest)):
        file, line, name = match["file"], int(match["line"]), match["name"]
        if Path(file).parent == HARNESS:
            break  # everything further out is how the rank was started
        source = linecache.getline(file, line).strip()
        frames.append(f'  File "{file}", line {line}, in {name}\n    {source}')
    if not frames:
        return ""
    return "\n".join([head.replace("first", "last"), *reversed(frames)])
