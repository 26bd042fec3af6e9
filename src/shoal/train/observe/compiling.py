"""News of a compilation: a step that takes a minute without a word looks like a hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shoal.compile.observe import records

_EVERY_S = 5.0


@contextmanager
def telling_compilation(note: Callable[[str], None], every_s: float = _EVERY_S) -> Iterator[None]:
    """Say that the step inside compiles, then every few seconds how far it is, then how long."""
    began_at, before = time.monotonic(), len(records())
    done = threading.Event()

    def progress() -> str:
        num = len(records()) - before
        graphs = "1 graph" if num == 1 else f"{num} graphs"
        return f"{graphs}, {time.monotonic() - began_at:.0f} s"

    def tell() -> None:
        while not done.wait(every_s):
            note(f"compiling … {progress()}")

    note("compiling … the first step takes longer than those that follow")
    teller = threading.Thread(target=tell, name="tell-compilation", daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()
    note(f"compiled: {progress()}")
