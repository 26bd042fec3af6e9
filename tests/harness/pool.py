"""A pool: the live ranks of one world size, seen from pytest's process."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import tempfile
import time
from multiprocessing import connection as channels
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from harness import stacks, verdict
from harness.failures import RankFailed
from harness.messages import Call, Outcome, Renew, Seat
from harness.server import start_rank
from harness.setup import Setup
from harness.verdict import Findings

START_S = 60.0
RENEW_S = 30.0
GRACE_S = 1.0
"""How long the other ranks may go on once one has failed: enough to tell their own errors."""

_prefixes = (f"pool{number}" for number in itertools.count())


class Pool:
    """Ranks that run one function after the other, for as long as they stay in step."""

    def __init__(self, *, world_size: int, setup: Setup, store_port: int) -> None:
        self._setup = setup
        self._folder = Path(tempfile.mkdtemp(prefix="shoal-ranks-"))
        prefix = next(_prefixes)
        self._seats = [
            Seat(
                rank=rank,
                world_size=world_size,
                setup=setup,
                store_port=store_port,
                prefix=prefix,
                folder=self._folder,
            )
            for rank in range(world_size)
        ]
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._disturbed = False
        try:
            for seat in self._seats:
                process, connection = start_rank(seat)
                self._processes.append(process)
                self._connections.append(connection)
            verdict.outcomes(self._collect(START_S))
        except BaseException:
            self.kill()
            raise

    def ready(self) -> bool:
        """Bring the ranks into a state to start a test; False if that needs another pool."""
        # An idle rank has nothing to say: what can be read is the end of its process.
        if not self._connections or any(connection.poll() for connection in self._connections):
            return False
        if not self._disturbed:
            return True
        try:
            verdict.outcomes(self._ask(Renew(prefix=next(_prefixes)), RENEW_S))
        except RankFailed:
            return False
        self._disturbed = False
        return True

    def run(self, call: Call, timeout_s: float) -> list[Outcome]:
        """Run `call` on every rank; return how each ended it, or raise what went wrong.

        The pool lives on if every rank ended the run, though it raised, in step with the others.
        """
        for seat in self._seats:
            os.truncate(seat.output, 0)
        try:
            findings = self._ask(call, timeout_s)
        except BaseException:
            # An interrupt, or pytest's own timeout: the ranks are still at work.
            self.kill()
            raise
        self._disturbed = any(ended.groups.disturbed for ended in findings.outcomes.values())
        if findings.missing() or findings.deaths or self._unusable(findings):
            self.kill()
        verdict.show_output(findings)
        return verdict.outcomes(findings)

    def kill(self) -> None:
        """End every rank, with the processes it started; the pool is of no further use."""
        for process in self._processes:
            process.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.join()
            process.close()
            connection.close()
        self._processes, self._connections = [], []
        shutil.rmtree(self._folder, ignore_errors=True)

    def _unusable(self, findings: Findings) -> bool:
        """Whether ranks that have all answered can still not run another test."""
        # Out of step, collectives are pending: to leave such a group could take for ever.
        sequences = {ended.groups.sequence for ended in findings.outcomes.values()}
        # A CUDA error stays with the process, and looks like any other.
        poisoned = self._setup.uses_cuda and findings.broken()
        return len(sequences) > 1 or poisoned

    def _ask(self, message: Call | Renew, timeout_s: float) -> Findings:
        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError):  # a dead rank is found while collecting
                connection.send(message)
        return self._collect(timeout_s)

    def _collect(self, timeout_s: float) -> Findings:
        """Wait until every rank has answered or died, or the time is up."""
        findings = Findings(world_size=len(self._seats), timeout_s=timeout_s)
        deadline = time.monotonic() + timeout_s
        while missing := findings.missing():
            waited_for = [self._connections[rank] for rank in missing]
            waited_for += [self._processes[rank].sentinel for rank in missing]
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not channels.wait(waited_for, left_s):
                break
            for rank in missing:
                self._look(rank, findings)
            if findings.broken():
                deadline = min(deadline, time.monotonic() + GRACE_S)
        for rank in findings.missing():
            stacks.ask(self._processes[rank], self._seats[rank].stacks)
        for rank in findings.missing():
            findings.stacks[rank] = stacks.answer(self._seats[rank].stacks)
        for seat in self._seats:
            findings.output[seat.rank] = seat.output.read_text(errors="replace")
        return findings

    def _look(self, rank: int, findings: Findings) -> None:
        """Note what a rank has sent, or that its process has ended."""
        process, connection = self._processes[rank], self._connections[rank]
        ended = process.exitcode is not None  # asked first: it may answer, then end
        if connection.poll():
            try:
                findings.outcomes[rank] = connection.recv()
                return
            except (EOFError, ConnectionResetError):
                process.join(START_S)  # its end of the pipe closes a moment before it ends
                ended = True
        if ended:
            findings.deaths[rank] = process.exitcode
