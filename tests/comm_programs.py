"""Random programs of collectives, compute, views and writes into memory.

A program is a list of steps: an operation, and numbers that choose what it works on. It is valid
whatever the numbers are, so hypothesis can shrink it, and it has no races: memory that a collective
still reads is not written to, and what it still writes to is not read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor

from comm_graphs import all_reduce, comm, gather, integers, name, scatter, wait

SHAPES = ((4, 4), (8,), (4, 2, 2))
"""The first dimension is one that four ranks can share."""

Step = tuple[str, int, int]


def memory(value: Tensor) -> int:
    return value.untyped_storage()._cdata


def compute(state: State, one: Tensor, other: Tensor) -> None:
    state.add(torch.relu(one) - other if one.shape == other.shape else one.neg())


def transpose(state: State, one: Tensor, other: Tensor) -> None:
    state.add(one.transpose(0, -1))


def flat(state: State, one: Tensor, other: Tensor) -> None:
    state.add(one.reshape(-1))


def half(state: State, one: Tensor, other: Tensor) -> None:
    state.add(one / 2)


def random(state: State, one: Tensor, other: Tensor) -> None:
    state.add(torch.randint_like(one, 8))


def bump(state: State, one: Tensor, other: Tensor) -> None:
    if state.may_write(one):
        one.add_(1)


def overwrite(state: State, one: Tensor, other: Tensor) -> None:
    if one.shape == other.shape and state.may_write(one) and not state.share(one, other):
        one.copy_(other)


def reduce(state: State, one: Tensor, other: Tensor) -> None:
    state.start(all_reduce(one), one)


def reduce_half(state: State, one: Tensor, other: Tensor) -> None:
    state.start(all_reduce(one / 2), one)


def reduce_max(state: State, one: Tensor, other: Tensor) -> None:
    state.start(all_reduce(one, "max"), one)


def reduce_in_place(state: State, one: Tensor, other: Tensor) -> None:
    if state.may_write(one) and one.is_contiguous():
        state.start(comm.all_reduce_(one, "sum", name()), one)  # the same memory: see `settle`


def reduce_two(state: State, one: Tensor, other: Tensor) -> None:
    for started in comm.all_reduce_coalesced([one / 2, other / 2], "sum", name()):
        state.start(started, one, other)


def gather_all(state: State, one: Tensor, other: Tensor) -> None:
    # As much as it was, so that sizes stay small.
    state.start(gather(one.contiguous()), one, rows=one.shape[0])


def scatter_all(state: State, one: Tensor, other: Tensor) -> None:
    state.start(scatter(torch.cat([one] * dist.get_world_size())), one)


def arrive(state: State, one: Tensor, other: Tensor) -> None:
    state.arrive()


OPERATIONS: dict[str, Callable[[State, Tensor, Tensor], None]] = {
    fn.__name__: fn
    for fn in (
        *(compute, transpose, flat, half, random, bump, overwrite, arrive, reduce, reduce_half),
        *(reduce_max, reduce_in_place, reduce_two, gather_all, scatter_all),
    )
}


class State:
    """The values of a running program, and what is on its way."""

    def __init__(self, inputs: list[Tensor]) -> None:
        self.values = list(inputs)
        self.pending: list[tuple[Tensor, tuple[Tensor, ...], int | None]] = []
        self.waited: list[tuple[Tensor, Tensor]] = []
        """Results, and what was waited for: the same memory, which fake tensors do not show."""

    def add(self, value: Tensor) -> None:
        self.values.append(value)

    def start(self, started: Tensor, *used: Tensor, rows: int | None = None) -> None:
        self.pending.append((started, used, rows))

    def arrive(self) -> None:
        if self.pending:
            started, _, rows = self.pending.pop(0)
            result = wait(started)
            self.waited.append((result, started))
            self.add(result if rows is None else result[:rows])

    def settle(self, value: Tensor) -> None:
        """Wait until nothing on its way writes to the memory of a value."""
        while any(self.share(started, value) for started, _, _ in self.pending):
            self.arrive()

    def may_write(self, value: Tensor) -> bool:
        """Whether nothing on its way uses the memory of a value."""
        used = (one for started, used, _ in self.pending for one in (started, *used))
        return not any(self.share(one, value) for one in used)

    def share(self, one: Tensor, other: Tensor) -> bool:
        """Whether two values lie in the same memory."""
        return self._home(one) == self._home(other)

    def _home(self, value: Tensor) -> int:
        home = memory(value)
        for result, started in reversed(self.waited):
            home = memory(started) if home == memory(result) else home
        return home


def program(steps: list[Step]) -> Callable[..., list[Tensor]]:
    """A function that runs steps on its inputs, and returns all that came of it."""

    def run(*inputs: Tensor) -> list[Tensor]:
        state = State(list(inputs))
        for operation, first, second in steps:
            values = state.values
            one, other = values[first % len(values)], values[second % len(values)]
            state.settle(one)
            state.settle(other)
            OPERATIONS[operation](state, one, other)
        while state.pending:
            state.arrive()
        return state.values[len(inputs) :]

    return run


def inputs() -> tuple[Tensor, ...]:
    """The inputs of every program."""
    return tuple(integers(*shape) for shape in SHAPES)


def programs(max_steps: int = 24) -> Any:
    """The programs that hypothesis tries."""
    number = st.integers(0, 15)
    return st.lists(
        st.tuples(st.sampled_from(sorted(OPERATIONS)), number, number), max_size=max_steps
    )
