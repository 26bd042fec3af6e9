"""A last word before SIGTERM ends a rank: launchers end the others as soon as one has died.

gloo ends a process on the spot when the sizes of a collective differ, and the launcher then sends
SIGTERM to the ranks that could tell why. Python runs a signal's handler in the main thread, which
may wait in a collective for good; but the signal's number goes into a pipe at once, and a thread
reads it there.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_armed = False
"""Whether this process has something to say: its forks have not."""


@contextmanager
def printing_on_sigterm(tell: Callable[[], str]) -> Iterator[None]:
    """Print what `tell` returns, if anything, when SIGTERM comes; then die of it as ever.

    Only where SIGTERM would end the process: a program that handles it has its own way to end. Nor
    where another part of the program reads signals from a pipe, as asyncio does.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        if before != -1:
            signal.set_wakeup_fd(before)
            yield
        else:
            with _listening(reader, writer, tell):
                yield
    finally:
        os.close(reader)
        os.close(writer)


@contextmanager
def _listening(reader: int, writer: int, tell: Callable[[], str]) -> Iterator[None]:
    global _armed
    thread = threading.Thread(
        target=_listen, args=(reader, tell), name="watchdog sigterm", daemon=True
    )
    thread.start()
    signal.signal(signal.SIGTERM, _ignore)
    _armed = True
    try:
        yield
    finally:
        _disarm()
        os.write(writer, b"\0")  # ends the thread, so that nobody reads a closed pipe
        thread.join()


def _listen(reader: int, tell: Callable[[], str]) -> None:
    """Wait for SIGTERM's number in the pipe; other signals write theirs too."""
    while True:
        numbers = os.read(reader, 64)
        if signal.SIGTERM in numbers:
            _print_and_die(tell)
        if not numbers or 0 in numbers:
            return


def _print_and_die(tell: Callable[[], str]) -> None:
    with suppress(Exception):  # whatever happens, SIGTERM ends the process
        text = tell()
        if text:
            print(text, file=sys.stderr, flush=True)
    # Python changes handlers in the main thread only, which may never come back.
    ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
    os.kill(os.getpid(), signal.SIGTERM)


def _ignore(number: int, frame: object) -> None:
    """Let the thread do it."""


def _disarm() -> None:
    global _armed
    if _armed:
        _armed = False
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Fork(threading.local):
    """A fork shares the pipe: its SIGTERM would end this process, and not the fork.

    So the fork gets none before it is disarmed.
    """

    mask: set[int] | None = None

    def begin(self) -> None:
        if _armed:
            self.mask = {*signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})}

    def end(self) -> None:
        mask, self.mask = self.mask, None
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def end_in_child(self) -> None:
        _disarm()
        self.end()


_fork = _Fork()
os.register_at_fork(
    before=_fork.begin, after_in_parent=_fork.end, after_in_child=_fork.end_in_child
)
