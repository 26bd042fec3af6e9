"""A c10d process group answered in Python: c10d's entry points become calls.

A subclass answers `run(calls, asynchronous) -> PythonWork` and nothing else. c10d looks methods up
by name, from Python and, through its trampolines, from C++. Both sets of names are here, those
since torch 2.13 (`all_gather_single`) and those before (`_allgather_base`).
"""

# c10d passes arguments by position, and its stubs name them differently in each release.
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work
from torch.futures import Future

from shoal._torch import collectives, dynamo
from shoal.comm.calls import Call, Pair, Reduction, Slots
from shoal.comm.collectives import Kind

# Works that only C++ refers to: it holds the C++ half of a work, and the Python half, where the
# waiting is done, would be collected.
_held_for_c: set[PythonWork] = set()
_answered_from_c: torch.library.Library | None = None


@dynamo.untraced
class PythonWork(Work):
    """A collective in flight; a subclass says how to wait."""

    def __init_subclass__(cls) -> None:
        dynamo.untraced(cls)

    def __init__(self, calls: Sequence[Call]) -> None:
        super().__init__()
        self._calls = calls

    @abstractmethod
    def finish(self) -> None:
        """Make the outputs readable; called again, do nothing."""

    @abstractmethod
    def is_completed(self) -> bool:
        """Whether the outputs are there already."""

    def wait(self, timeout: object = None) -> bool:
        """Make the outputs readable: the host waits on CPU, the current stream on CUDA."""
        self.finish()
        for call in self._calls:
            call.input = None  # it may be freed now, even if the work lives on
        _held_for_c.discard(self)
        return True

    def synchronize(self) -> None:
        """Wait, under c10d's other name."""
        self.wait()

    def is_success(self) -> bool:
        """Whether it ended well; a failure raises instead."""
        return self.is_completed()

    def exception(self) -> None:
        """None: a failure raises instead."""

    def result(self) -> list[Tensor]:
        """Give the tensors that the collective wrote."""
        written: list[Tensor] = []
        for call in self._calls:
            if isinstance(call.output, Slots):
                written.extend(call.output.tensors())
            elif call.output is not None:
                written.append(call.output)
        return written

    def get_future(self) -> Future:
        """Wait, and give the outputs as a future that is done: DDP asks for it."""
        self.wait()
        future: Future = Future()
        future.set_result(self.result())
        return future


class WorkBatch(PythonWork):
    """Several works that end together."""

    def __init__(self, works: Sequence[PythonWork]) -> None:
        super().__init__([call for work in works for call in work._calls])
        self._works = works

    def finish(self) -> None:
        """Wait for all of them."""
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        """Whether all of them are done."""
        return all(work.is_completed() for work in self._works)


@dynamo.untraced
class PythonGroup(ProcessGroup):
    """A process group whose collectives are calls to `run`."""

    backend_name = "python"

    def __init_subclass__(cls) -> None:
        dynamo.untraced(cls)

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]
        self._rank = rank
        self._size = size
        self._name = self._description = ""
        self._coalesced: list[PythonWork] | None = None
        _answer_gathers_from_c()

    @abstractmethod
    def run(self, calls: Sequence[Call], asynchronous: bool) -> PythonWork:
        """Start these calls, which belong together, and say how to wait for them."""

    def gather_in_stream(self, pairs: Sequence[Pair]) -> Callable[[], object]:
        """A function that gathers in order with the current stream, any number of times."""
        calls = [self._gather(output, input) for output, input in pairs]
        return lambda: self.run([replace(call) for call in calls], False).wait()

    def reduce_scatter_in_stream(self, op: Reduction) -> Callable[[Sequence[Pair]], None]:
        """A function of outputs and inputs that reduces in order with the current stream."""

        def scatter(pairs: Sequence[Pair]) -> None:
            self.run([self._scatter(output, input, op) for output, input in pairs], False).wait()

        return scatter

    # A group's identity, by the names that c10d uses from C++ and from Python.

    def getBackendName(self) -> str:
        """Name the backend, for c10d."""
        return self.backend_name

    def setGroupName(self, name: str) -> None:
        """Take the name that c10d gives the group."""
        self._name = name

    def getGroupName(self) -> str:
        """Give the group's name back to c10d."""
        return self._name

    def setGroupDesc(self, description: str) -> None:
        """Take the description that c10d gives the group."""
        self._description = description

    def getGroupDesc(self) -> str:
        """Give the group's description back to c10d."""
        return self._description

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    # Gathering and scattering.

    def allgather(self, outputs: list, inputs: list[Tensor] | Tensor, opts: Any = None) -> Work:
        """Gather into one tensor per rank."""
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        return self._start(
            [
                Call(Kind.ALL_GATHER, input, Slots.listed(output, self._size))
                for output, input in zip(outputs, inputs, strict=True)
            ],
            opts,
        )

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Gather into one tensor."""
        return self._start([self._gather(output, input)], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        """Gather several tensors, each into one."""
        pairs = zip(outputs, inputs, strict=True)
        return self._start([self._gather(*pair) for pair in pairs], opts)

    def _gather(self, output: Tensor, input: Tensor) -> Call:
        return Call(Kind.ALL_GATHER, input, Slots.like(input, output, self._size))

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work:
        """Gather at one rank, into one tensor per rank."""
        output = Slots.listed(outputs[0], self._size) if outputs else None
        return self._start([Call(Kind.GATHER, inputs[0], output, root=_root(opts))], opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Work:
        """Deal one rank's tensors to all ranks."""
        input = Slots.listed(inputs[0], self._size) if inputs else None
        return self._start([Call(Kind.SCATTER, input, outputs[0], root=_root(opts))], opts)

    # Reducing.

    def allreduce(self, tensors: list[Tensor] | Tensor, opts: Any = None) -> Work:
        """Reduce in place on all ranks."""
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        op = _op(opts)
        return self._start([Call(Kind.ALL_REDUCE, each, each, op) for each in tensors], opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        """Reduce in place at one rank."""
        calls = [Call(Kind.REDUCE, each, each, _op(opts), _root(opts)) for each in tensors]
        return self._start(calls, opts)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> Work:
        """Reduce one tensor per rank, and keep this rank's."""
        op = _op(opts)
        return self._start(
            [
                Call(Kind.REDUCE_SCATTER, Slots.listed(input, self._size), output, op)
                for output, input in zip(outputs, inputs, strict=True)
            ],
            opts,
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Reduce one tensor, and keep this rank's piece."""
        return self._start([self._scatter(output, input, _op(opts))], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        """Reduce several tensors, and keep this rank's piece of each."""
        pairs = zip(outputs, inputs, strict=True)
        return self._start([self._scatter(*pair, _op(opts)) for pair in pairs], opts)

    def _scatter(self, output: Tensor, input: Tensor, op: Reduction) -> Call:
        return Call(Kind.REDUCE_SCATTER, Slots.like(output, input, self._size), output, op)

    # Moving.

    def broadcast(self, tensors: list[Tensor] | Tensor, opts: Any) -> Work:
        """Overwrite with one rank's tensors."""
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        root = _root(opts)
        return self._start([Call(Kind.BROADCAST, t, t, root=root) for t in tensors], opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_rows: list[int],
        input_rows: list[int],
        opts: Any = None,
    ) -> Work:
        """Exchange pieces of one tensor."""
        sent = Slots.uneven(input, input_rows, self._size)
        received = Slots.uneven(output, output_rows, self._size)
        return self._start([Call(Kind.ALL_TO_ALL, sent, received)], opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """Exchange one tensor per pair of ranks."""
        sent, received = Slots.listed(inputs, self._size), Slots.listed(outputs, self._size)
        return self._start([Call(Kind.ALL_TO_ALL, sent, received)], opts)

    def send(self, tensors: list[Tensor], receiver: int, tag: int) -> Work:
        """Send to one rank."""
        return self._start([Call(Kind.SEND, t, None, None, receiver, tag) for t in tensors])

    def recv(self, tensors: list[Tensor], sender: int, tag: int) -> Work:
        """Receive from one rank."""
        return self._start([Call(Kind.RECEIVE, None, t, None, sender, tag) for t in tensors])

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Work:
        """Refuse: which message comes first would be arbitrary."""
        raise NotImplementedError(
            f"backend {self.backend_name} does not receive from any source: name the sender"
        )

    def barrier(self, opts: Any = None) -> Work:
        """Wait for all ranks."""
        return self._start([Call(Kind.BARRIER)], opts)

    # Several entry points in one launch.

    def start_coalescing(self, device: torch.device) -> None:
        """Collect what is started from here on."""
        self._coalesced = []

    def end_coalescing(self, device: torch.device) -> Work:
        """Give one work for everything collected."""
        works, self._coalesced = self._coalesced or [], None
        return WorkBatch(works)

    def _start(self, calls: Sequence[Call], opts: Any = None) -> PythonWork:
        work = self.run(calls, collectives.is_asynchronous(opts))
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work


for _name, _before in collectives.RENAMED.items():
    setattr(PythonGroup, _before, getattr(PythonGroup, _name))


def _op(opts: Any) -> Reduction:
    return ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)


def _root(opts: Any) -> int:
    return getattr(opts, "rootRank", opts)


def _answer_gathers_from_c() -> None:
    global _answered_from_c
    if _answered_from_c is not None:
        return

    def answer(
        group: ProcessGroup, output: Tensor, input: Tensor, asynchronous: bool
    ) -> Work | None:
        if not isinstance(group, PythonGroup):
            return None
        work = group.run([group._gather(output, input)], asynchronous)
        _held_for_c.add(work)
        return work

    _answered_from_c = collectives.answer_gathers_from_c(answer)
