"""A part of the job's store that no earlier start of the ranks has written to.

torch's elastic agent keeps its store when it starts the ranks again, and gloo would find in it the
addresses of ranks that are gone. The agents of several hosts do not count restarts alike, so the
ranks agree on a name: every rank asks with a word of its own, rank 0 answers each such word, and
waits until all have heard. Words of earlier starts are answered too, and nobody reads that.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta

from torch.distributed import DistStoreError, PrefixStore, Store

from shoal.errors import RankError

_TIMEOUT = timedelta(minutes=5)
_POLL_S = 0.01


def fresh_store(store: Store, rank: int, world_size: int) -> Store:
    """Return a part of `store` that only the ranks of this start use; collective."""
    word = secrets.token_hex(8)
    if rank == 0:
        _answer(store, word, world_size)
    else:
        store.set(f"shoal/ask/{rank}", word)
        try:
            store.wait([f"shoal/answer/{word}"], _TIMEOUT)
        except DistStoreError as error:
            raise RankError(f"rank {rank} heard nothing of rank 0 for {_TIMEOUT}") from error
        word = store.get(f"shoal/answer/{word}").decode()
        store.set(f"shoal/heard/{word}/{rank}", "")
    return PrefixStore(f"shoal/start/{word}", store)


def _answer(store: Store, name: str, world_size: int) -> None:
    """Tell every rank that asks the name of this start, until all have heard it."""
    deadline = time.monotonic() + _TIMEOUT.total_seconds()
    missing = set(range(1, world_size))
    while missing:
        for rank in tuple(missing):
            if store.check([f"shoal/heard/{name}/{rank}"]):
                missing.discard(rank)
            elif store.check([f"shoal/ask/{rank}"]):
                store.set(f"shoal/answer/{store.get(f'shoal/ask/{rank}').decode()}", name)
        if missing and time.monotonic() > deadline:
            ranks = ", ".join(map(str, sorted(missing)))
            raise RankError(f"rank 0 heard nothing of rank {ranks} for {_TIMEOUT}")
        time.sleep(_POLL_S if missing else 0)
