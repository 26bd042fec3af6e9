"""A guard: what torchrun starts in place of a rank, which is the guard's child.

    torchrun --nproc-per-node 4 -m shoal.survive program.py

torchrun ends all of its processes when one of them fails. So a rank that dies must not be one of
them: its guard stays, tells the others through the store of torchrun's agent, and ends well when
the others have come to their end.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

import torch.distributed as dist

from shoal.survive.environment import of_guarded
from shoal.survive.generation import StoreAddress
from shoal.survive.launcher import FALLEN, end_processes, start_rank
from shoal.survive.roster import Event, EventKind, EventLog

_POLL_S = 0.01
_NUM_FINISHED = "finished"
_NUM_ENDED = "ended"
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


def is_under_torchrun() -> bool:
    """Whether an agent of torchrun started this process, and holds a store."""
    return os.environ.get(_AGENT_STORE) == "True" and "SHOAL_SURVIVE_MEMBER" not in os.environ


def guard(arguments: Sequence[str]) -> int:
    """Run this Python with some arguments as a rank of torchrun's; returns the exit status."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    address = StoreAddress(
        host=os.environ["MASTER_ADDR"],
        port=int(os.environ["MASTER_PORT"]),
        prefix=f"shoal/survive/{restart}",
    )
    store = address.connect()
    child = start_rank(arguments, of_guarded(rank, num_ranks, address))

    def stop(number: int, _: object) -> NoReturn:
        end_processes([child])
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    try:
        status = child.wait()
    finally:
        end_processes([child])
    if status > 0:
        return status
    if status < 0:
        print(f"rank {rank} died of signal {-status}; the others go on", file=sys.stderr)
        EventLog(store).post(Event(kind=EventKind.LOST, member=rank))
    else:
        store.add(_NUM_FINISHED, 1)
    store.add(_NUM_ENDED, 1)
    return _wait_for_the_others(store, num_ranks, restart)


def _wait_for_the_others(store: dist.Store, num_ranks: int, restart: str) -> int:
    """Keep the place of a rank that has ended; what becomes of the others is the exit status."""
    try:
        while not store.check([FALLEN]):
            if store.add(_NUM_ENDED, 0) == num_ranks:
                if store.add(_NUM_FINISHED, 0):
                    return 0
                break
            time.sleep(_POLL_S)
    except RuntimeError:  # the agent is gone with its store
        return 1
    print(
        "more ranks died than can be rebuilt from parity; start again from the last checkpoint "
        f"(torchrun --max-restarts does; this was restart {restart})",
        file=sys.stderr,
    )
    return 1
