"""Many ranks in one process: each rank is a thread.

    def train() -> float:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        ...

    losses = run_local(4, train)

Inside, `torch.distributed` works as if every thread were a process: ranks, subgroups, meshes,
FSDP1, FSDP2, DDP, functional collectives, DCP. Ranks take turns (`turns`), so a run repeats
exactly, and ranks that wait for each other for ever are named at once.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shoal._torch import groups
from shoal.comm.call_exchange import CallExchange
from shoal.comm.calls import Call
from shoal.comm.collectives import Kind
from shoal.comm.python_group import PythonGroup, PythonWork
from shoal.comm.turns import Aborted, LocalStore, RandomState, Turns, Wait
from shoal.errors import UsageError

BACKEND = "shoal-local"

Result = TypeVar("Result")


class _Session:
    """What the ranks of one `run_local` share."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.turns = Turns(world_size)
        self.keys: dict[str, bytes] = {}
        self._exchanges: dict[tuple[str, tuple[int, ...], int], CallExchange] = {}
        self._num_made: dict[tuple[str, int], int] = defaultdict(int)

    def exchange(self, group: str, ranks: Sequence[int], rank: int) -> CallExchange:
        """Where this rank meets the others of a group; a group made anew meets anew."""
        self._num_made[group, rank] += 1
        key = (group, tuple(ranks), self._num_made[group, rank])
        return self._exchanges.setdefault(key, CallExchange(group, ranks))


class _Member(threading.local):
    """Which session this thread is a rank of."""

    session: _Session | None = None


_member = _Member()
_one_at_a_time = threading.Lock()


class LocalGroup(PythonGroup):
    """A process group whose ranks are threads of this process."""

    backend_name = BACKEND

    def __init__(self, name: str, rank: int, ranks: Sequence[int], session: _Session) -> None:
        super().__init__(rank, len(ranks))
        self._global_rank = ranks[rank]
        self._ranks = ranks
        self._turns = session.turns
        self._wait_until: Wait = partial(session.turns.wait_until, self._global_rank)
        self._exchange = session.exchange(name, ranks, self._global_rank)
        self._num_rounds = 0
        self._num_messages: dict[tuple[Kind, int, int], int] = defaultdict(int)

    def run(self, calls: Sequence[Call], asynchronous: bool) -> PythonWork:
        """Bring this rank's calls to the group's exchange; the work waits for the others."""
        self._turns.check_thread(self._global_rank)
        if calls[0].kind in (Kind.SEND, Kind.RECEIVE):
            return self._run_message(calls[0])
        number, self._num_rounds = self._num_rounds, self._num_rounds + 1
        round = self._exchange.join(number, self._rank, calls)
        return _LocalWork(calls, self._wait_until, lambda: round.done, round.where)

    def _run_message(self, call: Call) -> PythonWork:
        # Both sides number their messages, and so agree which is which. Sending leaves a copy and
        # never waits, as gloo does with small messages.
        exchange, other, tag = self._exchange, call.root, call.tag
        number = self._num_messages[call.kind, other, tag]
        self._num_messages[call.kind, other, tag] += 1
        if call.kind == Kind.SEND:
            exchange.leave((self._rank, other, tag, number), call)
            return _LocalWork([call], self._wait_until, lambda: True, str)
        address = (other, self._rank, tag, number)
        return _LocalWork(
            [call],
            self._wait_until,
            lambda: exchange.has(address),
            lambda: f"waits for message {number} of rank {self._ranks[other]}",
            lambda: exchange.collect(address, call),
        )


class _LocalWork(PythonWork):
    def __init__(
        self,
        calls: Sequence[Call],
        wait_until: Wait,
        ready: Callable[[], bool],
        where: Callable[[], str],
        then: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(calls)
        self._wait_until = wait_until
        self._ready = ready
        self._where = where
        self._then = then
        self._finished = False

    def finish(self) -> None:
        if self._finished:
            return
        self._wait_until(self._ready, self._where)
        if self._then is not None:
            self._then()
        self._finished = True

    def is_completed(self) -> bool:
        return self._finished or self._ready()


def run_local(
    world_size: int, fn: Callable[..., Result], *args: Any, timeout_s: float = 60.0
) -> list[Result]:
    """Run `fn(*args)` on `world_size` ranks, and return what each returned, in rank order.

    The first error of a rank stops the others, and is raised here with a note that names the rank.
    Ranks that cannot go on, or do not finish in time, raise `RankError` with what each waits for
    and where it stands. A rank that is stuck outside collectives cannot be stopped, only left.
    """
    if world_size < 1:
        raise UsageError(f"world_size must be at least 1, got {world_size}")
    if _member.session is not None or not _one_at_a_time.acquire(blocking=False):
        raise UsageError("run_local is running already in this process, and cannot run twice")
    random_state = RandomState.capture()
    try:
        with groups.ranks_as_threads() as begin_thread:
            return _run_threads(world_size, fn, args, timeout_s, begin_thread)
    finally:
        random_state.restore()
        _one_at_a_time.release()


def _run_threads(
    world_size: int,
    fn: Callable[..., Result],
    args: Sequence[Any],
    timeout_s: float,
    begin_thread: Callable[[], None],
) -> list[Result]:
    session = _Session(world_size)
    turns = session.turns
    results: dict[int, Result] = {}

    def rank_main(rank: int) -> None:
        begin_thread()
        try:
            turns.begin(rank)
            # Backward must stay in this thread, which alone may call collectives.
            with torch.autograd.set_multithreading_enabled(False), _default_group(session, rank):
                results[rank] = fn(*args)
        except Aborted:
            pass
        except BaseException as error:
            error.add_note(f"raised on rank {rank} of {world_size}")
            turns.abort(error)
        finally:
            turns.end(rank)

    threads = [
        threading.Thread(target=rank_main, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    turns.start()
    try:
        if not turns.join(timeout_s):
            turns.expire(timeout_s)
    except BaseException as interruption:
        turns.abort(interruption)
    # Ranks that only waited unwind now; a rank that is stuck elsewhere stays behind.
    if turns.join(1.0):
        for thread in threads:
            thread.join()
    if turns.error is not None:
        raise turns.error
    return [results[rank] for rank in range(world_size)]


@contextmanager
def _default_group(session: _Session, rank: int) -> Iterator[None]:
    _member.session = session
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _make_group, True, ["cpu", "cuda"])
    # c10d refers to the C++ half of the store only: this frame keeps the Python half alive.
    store = LocalStore(session.keys, partial(session.turns.wait_until, rank))
    dist.init_process_group(BACKEND, rank=rank, world_size=session.world_size, store=store)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _make_group(options: Any, _: Any) -> LocalGroup:
    if _member.session is None:
        raise UsageError(f"backend {BACKEND!r} exists only inside run_local")
    ranks = options.global_ranks_in_group or range(options.group_size)
    return LocalGroup(options.group_id, options.group_rank, ranks, _member.session)
