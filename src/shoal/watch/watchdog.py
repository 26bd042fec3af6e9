"""The watchdog of a rank: notices that ranks do not meet, and finds out why, without collectives.

It is a thread that talks to those of the other ranks through the store that the job was started
with, over a connection of its own:

    a rank waits longer than the limit,    ->  it announces trouble
    fails in a collective, or raises
    every rank sees that within a moment   ->  and leaves its account: what it launched, where it is
    the rank that announced compares them  ->  and leaves the verdict, which ends all ranks alike

A second thread only looks at the clock: if the store cannot be reached (the network is cut, the
first host is gone), it ends this rank with what this rank knows.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shoal._torch import groups as torch_groups
from shoal.comm import observer
from shoal.errors import RankError, UsageError
from shoal.watch.account import Account, stack_of_main_thread
from shoal.watch.diagnosis import diagnose, post_mortem
from shoal.watch.log import CollectiveLog, Line, log_path, read_log
from shoal.watch.sigterm import printing_on_sigterm

_ACCOUNTS_S = 1.0
"""How long a rank may take to leave its account."""
_VERDICT_S = 1.7
"""How long after trouble a rank ends also without a verdict: before the limit + 2 s."""
_SILENCE_S = 1.2
"""The store cannot be reached if it has not answered for so long; it may be slow."""
_LAST_WORD_S = 0.2
"""How long the end of a watchdog waits for its threads, each of which may be asking the store."""
_FASTEST_S, _SLOWEST_S = 0.05, 0.5
_counter = itertools.count()


class Watchdog:
    """Watches the collectives of this process inside a `with` block; all ranks start one.

    A rank that waits longer than `limit_s` ends the job: `end` is called on every rank with the
    text that names who did not come, in a thread, and should end the process, whose main thread
    may never come back. Unless given, it prints the text and exits with status 1; then also a rank
    that SIGTERM ends prints what the logs tell before. `folder`, best shared by all ranks, holds
    their logs: they tell which rank launched another collective, also of ranks that are gone. An
    exception that leaves the block ends the other ranks too, unless it is one of `alike`, which
    all ranks raise. Where ranks `survive` the death of others, a collective that fails is no reason
    to end, nor is an exception; and this watchdog ends with the groups that it was made in.
    """

    def __init__(
        self,
        *,
        limit_s: float,
        folder: Path | str | None = None,
        end: Callable[[str], None] | None = None,
        alike: tuple[type[Exception], ...] = (),
        survive: bool = False,
    ) -> None:
        if limit_s <= 0:
            raise UsageError(f"expected a limit of more than 0 seconds, got {limit_s}")
        self._limit_s = limit_s
        self._poll_s = min(_SLOWEST_S, max(_FASTEST_S, limit_s / 8))
        self._folder = None if folder is None else Path(folder)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        self._end = end or _end_process
        self._alike = alike
        self._survives = survive
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._store = torch_groups.separate_store()
        # A rank that has joined has seen fewer watchdogs, but never two in one store.
        self._prefix = f"shoal/watch/{'survive' if survive else next(_counter)}"
        self._log = CollectiveLog(self._log_of(self._rank))
        world = dist.group.WORLD
        assert world is not None
        self._groups: dict[ProcessGroup, str] = {world: world.group_name}
        self._waits: tuple[str, float] | None = None  # what for, since when
        self._heard_at = time.monotonic()
        self._asked = ""
        self._is_heard = False
        self._deaf = ""  # why the store is not listened to any more
        self._verdict = ""
        self._concluded = threading.Event()
        self._stopping = threading.Event()
        self._held = ExitStack()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._held.enter_context(observer.observing(self))
        if self._folder is not None and self._end is _end_process:
            self._held.enter_context(printing_on_sigterm(self._on_sigterm))
        for task in (self._listen, self._mind_the_clock):
            thread = threading.Thread(target=task, name=f"watchdog {task.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        ends_all = not self._survives and not isinstance(error, self._alike)
        if isinstance(error, Exception) and ends_all:
            self.announce_failure(error)
            self._add_differences(error)
        self._stopping.set()
        self._held.close()
        for thread in self._threads:
            # One that comes back from the store while Python ends would abort the process; one
            # that waits for a store out of reach is not worth more.
            thread.join(_LAST_WORD_S)

    # What `shoal.comm` calls.

    def launching(self, reason: str, group: ProcessGroup, tensor: Tensor | None) -> Line:
        """Note a collective; returns its line of the log."""
        name = self._groups.get(group)
        if name is None:
            name = self._groups[group] = group.group_name
        size = "" if tensor is None else f"{tensor.numel()} of {str(tensor.dtype)[6:]}"
        return self._log.add(name, reason, size)

    def in_stream(self, launched: Line | None = None) -> None:
        """Note that the device runs it, and see which of those before have ended."""
        self._log.put_in_stream(launched)

    def waiting(self, reason: str) -> None:
        """Start the clock."""
        self._waits = (reason, time.monotonic())

    def arrived(self) -> None:
        """Stop the clock."""
        self._waits = None

    def explained(self, failure: str) -> str:
        """Add what the ranks did to the failure of a collective; takes two seconds at most."""
        if self._survives:
            return failure
        self._is_heard = True
        self._asked = failure
        self._concluded.wait(_VERDICT_S)
        return f"{failure}\n{self._verdict or self._differences() or self._advice}"

    # What a training loop calls.

    def take_digest(self) -> int:
        """A number that all ranks share if they launched the same collectives since the last."""
        return self._log.take_digest()

    def compare(self) -> None:
        """Raise, naming who differs; all ranks call this when their digests are not the same."""
        self._is_heard = True
        self._asked = "the ranks did not take part in the same collectives"
        self._concluded.wait(_VERDICT_S)
        raise RankError(self._verdict or f"{self._asked}, and no rank could say which differ")

    def announce_failure(self, error: BaseException) -> None:
        """Let the other ranks end too, with the name of this one and of its error."""
        if self._concluded.is_set():  # they know already
            return
        self._is_heard = True  # the main thread has its own error to raise
        notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
        text = f"rank {self._rank} failed{notes} with {type(error).__name__}: {error}"

        def announce() -> None:
            with suppress(RuntimeError):
                if self._claim(text):
                    self._store.set(f"{self._prefix}/verdict", text)
                    # The process that goes now may hold the store: let the others read it.
                    time.sleep(2 * self._poll_s)

        # In a thread, since a store that cannot be reached may block for minutes.
        thread = threading.Thread(target=announce, name="watchdog announce", daemon=True)
        thread.start()
        thread.join(_VERDICT_S)

    # The threads.

    def _listen(self) -> None:
        try:
            self._hear()
        except RuntimeError as error:  # without the store, the clock is left
            self._deaf = f" ({error})"

    def _hear(self) -> None:
        trouble = f"{self._prefix}/trouble"
        while not self._stopping.wait(self._until_overdue()):
            self._heard_at = time.monotonic()
            overdue = self._overdue()
            asked = self._asked or overdue
            if asked and self._claim(asked):
                self._lead()
                return
            if asked or self._store.check([trouble]):
                self._follow()
                return

    def _mind_the_clock(self) -> None:
        while not self._stopping.wait(self._poll_s):
            overdue = self._overdue(_VERDICT_S)
            if overdue and time.monotonic() - self._heard_at > _SILENCE_S:
                self._conclude(
                    f"{overdue}. The store of the job cannot be reached either: the network is "
                    f"cut, or the host of the first rank is gone{self._deaf}"
                )
                return

    def _until_overdue(self) -> float:
        """How long to sleep: not past the moment at which this rank has waited too long."""
        waits = self._waits
        if waits is None:
            return self._poll_s
        left_s = self._limit_s - (time.monotonic() - waits[1])
        return min(self._poll_s, max(_FASTEST_S, left_s))

    def _overdue(self, grace_s: float = 0.0) -> str:
        """Say what this rank has waited for too long, if it has."""
        waits = self._waits
        if waits is None or time.monotonic() - waits[1] < self._limit_s + grace_s:
            return ""
        reason, since = waits
        return (
            f"rank {self._rank} has waited {time.monotonic() - since:.1f} s for {reason}, longer "
            f"than the limit of {self._limit_s:g} s"
        )

    def _claim(self, text: str) -> bool:
        """Announce trouble; return whether this rank was the first."""
        mine = json.dumps({"rank": self._rank, "text": text})
        first = self._store.compare_set(f"{self._prefix}/trouble", "", mine)
        return first.decode() == mine

    def _lead(self) -> None:
        """Collect the accounts of all ranks, and leave the verdict."""
        accounts = {self._rank: self._account()}
        deadline = time.monotonic() + _ACCOUNTS_S
        missing = [rank for rank in range(self._size) if rank != self._rank]
        while missing and time.monotonic() < deadline:
            self._heard_at = time.monotonic()
            for rank in tuple(missing):
                key = f"{self._prefix}/account/{rank}"
                if self._store.check([key]):
                    accounts[rank] = Account.from_json(self._store.get(key).decode())
                    missing.remove(rank)
            time.sleep(_FASTEST_S / 5)
        for rank in missing:
            path = self._log_of(rank)
            entries = () if path is None else tuple(read_log(path))
            accounts[rank] = Account(rank=rank, entries=entries, is_silent=True)
        verdict = diagnose([accounts[rank] for rank in sorted(accounts)])
        if not self._is_heard:
            verdict = f"{self._asked or self._overdue()}\n{verdict}"
        self._store.set(f"{self._prefix}/verdict", verdict)
        time.sleep(_FASTEST_S)  # the process that ends now may hold the store: let others read
        self._conclude(verdict)

    def _follow(self) -> None:
        """Leave an account, and end with the verdict of the rank that asked."""
        account, verdict = self._account(), f"{self._prefix}/verdict"
        self._store.set(f"{self._prefix}/account/{self._rank}", account.to_json())
        deadline = time.monotonic() + _VERDICT_S
        while not self._store.check([verdict]):
            if time.monotonic() > deadline:
                trouble = json.loads(self._store.get(f"{self._prefix}/trouble"))
                self._conclude(f"rank {trouble['rank']} announced: {trouble['text']}")
                return
            time.sleep(_FASTEST_S / 5)
        self._conclude(self._store.get(verdict).decode())

    def _conclude(self, verdict: str) -> None:
        if self._concluded.is_set() or self._stopping.is_set():
            return
        self._verdict = verdict
        self._concluded.set()
        if not self._is_heard:  # else the main thread raises it
            self._end(verdict)

    # Accounts.

    def _account(self) -> Account:
        waits = self._waits
        groups = {name: group for group, name in self._groups.items()}
        counts = {name: torch_groups.num_launched(group) for name, group in groups.items()}
        return Account(
            rank=self._rank,
            entries=tuple(self._log.entries()),
            groups={
                name: tuple(dist.get_process_group_ranks(group)) for name, group in groups.items()
            },
            counts={name: count for name, count in counts.items() if count is not None},
            waits_for=waits[0] if waits else "",
            waited_s=time.monotonic() - waits[1] if waits else 0.0,
            stack=stack_of_main_thread(),
        )

    # What the logs tell.

    def _differences(self) -> str:
        """Say which rank launched another collective, by the logs; nothing without a folder."""
        return "" if self._folder is None else post_mortem(self._folder, range(self._size))

    def _on_sigterm(self) -> str:
        """The text to print when SIGTERM ends this rank, most often because another has died."""
        found = "" if self._concluded.is_set() else self._differences()
        return f"shoal: rank {self._rank} was ended by SIGTERM. {found}" if found else ""

    def _add_differences(self, error: Exception) -> None:
        """Let the error of a collective that shoal did not launch tell who differs, too."""
        found = "" if isinstance(error, RankError) else self._differences()
        if found:
            error.add_note(found)

    @property
    def _advice(self) -> str:
        """Advice for the user where the ranks could not find out why a collective failed."""
        if self._folder is None:
            return "Give the Watchdog a folder that all ranks share, to learn which rank differs."
        return (
            f"When all ranks have ended, shoal.watch.post_mortem({str(self._folder)!r}) tells "
            f"whether one launched another collective than the others."
        )

    def _log_of(self, rank: int) -> Path | None:
        return None if self._folder is None else log_path(self._folder, rank)


def digest_of_collectives() -> int:
    """The digest that this process's watchdog compares with other ranks'; 0 without one."""
    watchdog = observer.current
    return watchdog.take_digest() if isinstance(watchdog, Watchdog) else 0


def compare_collectives() -> None:
    """Raise, naming who took part in other collectives; see `Watchdog.compare`."""
    watchdog = observer.current
    if isinstance(watchdog, Watchdog):
        watchdog.compare()


def _end_process(verdict: str) -> None:
    print(f"shoal: {verdict}", file=sys.stderr, flush=True)
    os._exit(1)
