"""Many ranks in one process: each rank is a thread.

    def train() -> float:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        ...

    losses = run_local(4, train)

Inside, `torch.distributed` works as if every thread were a process: ranks, subgroups, meshes,
FSDP1, FSDP2, DDP, functional collectives, DCP. Ranks take turns (`baton`), so a run repeats
exactly, and ranks that wait for each other for ever are named at once.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shoal import _torch
from shoal.comm.baton import Aborted, Baton
from shoal.comm.calls import Call, Kind, move
from shoal.comm.exchange import exchange
from shoal.comm.local_store import LocalStore
from shoal.comm.python_group import PythonGroup, PythonWork
from shoal.comm.random_state import RandomState
from shoal.errors import InvariantError, UsageError

BACKEND = "shoal-local"

Result = TypeVar("Result")


class _Round:
    """One collective of one group: the calls that came so far."""

    def __init__(self, number: int, group: str, ranks: Sequence[int]) -> None:
        self.number = number
        self.group = group
        self.ranks = ranks
        self.calls: dict[int, Sequence[Call]] = {}
        self.done = False

    def join(self, rank: int, calls: Sequence[Call]) -> None:
        """Add a rank's calls; the last one to come carries them out for all."""
        if self.calls:
            first = next(iter(self.calls))
            theirs, ours = _signature(self.calls[first]), _signature(calls)
            if theirs != ours:
                raise InvariantError(
                    f"collective {self.number} of group {self.group!r} differs between ranks: "
                    f"rank {self.ranks[first]} called {theirs}, rank {self.ranks[rank]} {ours}"
                )
        self.calls[rank] = calls
        _synchronize(calls)
        if len(self.calls) == len(self.ranks):
            for same in zip(*(self.calls[each] for each in range(len(self.ranks))), strict=True):
                exchange(same)
            _synchronize(calls)
            self.done = True

    def where(self) -> str:
        """Say what a rank waits for, and for whom."""
        missing = [str(rank) for index, rank in enumerate(self.ranks) if index not in self.calls]
        return (
            f"waits at {_signature(next(iter(self.calls.values())))}, collective {self.number} of "
            f"group {self.group!r}, for rank {', '.join(missing)}"
        )


class _Meeting:
    """What the members of one group share."""

    def __init__(self) -> None:
        self.rounds: dict[int, _Round] = {}
        self.mail: dict[tuple[int, int, int, int], Tensor] = {}


class _Session:
    """What the ranks of one `run_local` share."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.baton = Baton(world_size)
        self.keys: dict[str, bytes] = {}
        self._meetings: dict[tuple[str, tuple[int, ...], int], _Meeting] = defaultdict(_Meeting)
        self._num_made: dict[tuple[str, int], int] = defaultdict(int)

    def meeting(self, group: str, ranks: Sequence[int], rank: int) -> _Meeting:
        """Where this rank meets the others of a group; a group made anew meets anew."""
        self._num_made[group, rank] += 1
        return self._meetings[group, tuple(ranks), self._num_made[group, rank]]


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
        self._label = name
        self._ranks = ranks
        self._baton = session.baton
        self._meeting = session.meeting(name, ranks, self._global_rank)
        self._num_rounds = 0
        self._num_messages: dict[tuple[Kind, int, int], int] = defaultdict(int)

    def run(self, calls: Sequence[Call], asynchronous: bool) -> PythonWork:
        """Bring this rank's calls to the meeting; the work waits for the others."""
        self._baton.check_thread(self._global_rank)
        if calls[0].kind in (Kind.SEND, Kind.RECEIVE):
            return self._run_message(calls[0])
        number, self._num_rounds = self._num_rounds, self._num_rounds + 1
        rounds = self._meeting.rounds
        if number not in rounds:
            rounds[number] = _Round(number, self._label, self._ranks)
        round = rounds[number]
        round.join(self._rank, calls)
        if round.done:
            del rounds[number]
        return _LocalWork(calls, self._wait_until, lambda: round.done, round.where)

    def _run_message(self, call: Call) -> PythonWork:
        # A message is numbered by both sides, so that they agree which is which. Sending copies
        # and never waits, as the buffered sends that gloo makes of small messages.
        key = (call.kind, call.root, call.tag)
        number, self._num_messages[key] = self._num_messages[key], self._num_messages[key] + 1
        mail = self._meeting.mail
        if call.kind == Kind.SEND:
            assert isinstance(call.input, Tensor)
            mail[self._rank, call.root, call.tag, number] = call.input.data.clone()
            return _LocalWork([call], self._wait_until, lambda: True, str)
        target, address = call.output, (call.root, self._rank, call.tag, number)
        assert isinstance(target, Tensor)

        def receive() -> None:
            message = mail.pop(address)
            if message.numel() != target.numel() or message.dtype != target.dtype:
                raise UsageError(
                    f"rank {self._ranks[call.root]} sent {message.numel()} of {message.dtype}, "
                    f"rank {self._global_rank} expected {target.numel()} of {target.dtype}"
                )
            move(target, message)

        return _LocalWork(
            [call],
            self._wait_until,
            lambda: address in mail,
            lambda: f"waits for message {number} of rank {self._ranks[call.root]}",
            receive,
        )

    def _wait_until(self, ready: Callable[[], bool], where: Callable[[], str]) -> None:
        self._baton.wait_until(self._global_rank, ready, where)


class _LocalWork(PythonWork):
    def __init__(
        self,
        calls: Sequence[Call],
        wait_until: Callable[[Callable[[], bool], Callable[[], str]], None],
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
        with _torch.ranks_as_threads() as begin_thread:
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
    baton = session.baton
    results: dict[int, Result] = {}

    def rank_main(rank: int) -> None:
        begin_thread()
        try:
            baton.begin(rank)
            # Backward must stay in this thread, which alone may call collectives.
            with torch.autograd.set_multithreading_enabled(False), _default_group(session, rank):
                results[rank] = fn(*args)
        except Aborted:
            pass
        except BaseException as error:
            error.add_note(f"raised on rank {rank} of {world_size}")
            baton.abort(error)
        finally:
            baton.end(rank)

    threads = [
        threading.Thread(target=rank_main, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    baton.start()
    try:
        if not baton.join(timeout_s):
            baton.expire(timeout_s)
    except BaseException as interruption:
        baton.abort(interruption)
    # Whoever only waited unwinds now; who is stuck elsewhere stays behind.
    if baton.join(1.0):
        for thread in threads:
            thread.join()
    if baton.error is not None:
        raise baton.error
    return [results[rank] for rank in range(world_size)]


@contextmanager
def _default_group(session: _Session, rank: int) -> Iterator[None]:
    _member.session = session
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _make_group, True, ["cpu", "cuda"])

    def wait_until(ready: Callable[[], bool], where: Callable[[], str]) -> None:
        session.baton.wait_until(rank, ready, where)

    # c10d refers to the C++ half of the store only: this frame keeps the Python half alive.
    store = LocalStore(session.keys, wait_until)
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


def _signature(calls: Sequence[Call]) -> str:
    return " + ".join(call.signature() for call in calls)


def _synchronize(calls: Sequence[Call]) -> None:
    # Ranks run on streams of their own, and copies between them on whichever rank came last.
    for call in calls:
        for tensor in call.tensors():
            if tensor.is_cuda:
                torch.cuda.current_stream(tensor.device).synchronize()
