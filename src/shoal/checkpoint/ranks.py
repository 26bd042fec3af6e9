"""Ranks that succeed together or fail together: no rank waits for one that has raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NoReturn, TypeVar

import torch
import torch.distributed as dist

from shoal.errors import CheckpointError, UsageError
from shoal.tensor.placement import preferred_device

T = TypeVar("T")


class Ranks:
    """The ranks of a process group; a single one where there is no group.

    Every method but the properties is collective: all ranks call it, in the same order.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        alone = group is None and not (dist.is_available() and dist.is_initialized())
        self._group = group
        self._present = None if alone else group or dist.group.WORLD
        self.rank = 0 if alone else dist.get_rank(group)
        self.size = 1 if alone else dist.get_world_size(group)
        if self.rank < 0:
            raise UsageError(
                f"rank {dist.get_rank()} is not in the group that saves or loads: "
                "call this on the ranks of the group only"
            )

    @property
    def key(self) -> tuple[int, str]:
        """This rank of this group, among all the ranks and groups that a process may hold."""
        if self._group is None:
            return self.rank, ""
        return dist.get_rank(), self._group.group_name

    def meets(self, other: Ranks) -> bool:
        """Whether collectives of the other join those of this one: not after a new start."""
        return self._present is other._present

    @property
    def is_first(self) -> bool:
        """Whether this rank does what is done once."""
        return self.rank == 0

    def exchange(self, value: T) -> list[T]:
        """Give every rank the value of every rank."""
        if self.size == 1:
            return [value]
        values: list[T] = [value] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def gather(self, value: T) -> list[T]:
        """Give the first rank the value of every rank, and the others nothing."""
        if self.size == 1:
            return [value]
        values: list[T] | None = [value] * self.size if self.is_first else None
        first = 0 if self._group is None else dist.get_global_rank(self._group, 0)
        dist.gather_object(value, values, dst=first, group=self._group)
        return values or []

    def together(self, action: Callable[[], T]) -> T:
        """Do something on every rank; if it raises on any, raise on all."""
        return self.begin(action).result()

    def begin(self, action: Callable[[], T]) -> Agreement[T]:
        """Do something on every rank, and go on while the others hear how it went.

        All ranks ask for the results, in the order in which they began.
        """
        return Agreement(self, _Attempt(action))

    def first(self, action: Callable[[], T]) -> T:
        """Do something on the first rank, and give its result, or its failure, to all."""
        attempt = _Attempt(action if self.is_first else lambda: None)
        failure, result = self.exchange((attempt.failure, attempt.result))[0]
        if failure is not None:
            self.fail({0: failure}, attempt.error)
        return result  # pyright: ignore[reportReturnType]

    def any(self, flag: bool) -> Callable[[], bool]:
        """Begin to tell the others; what it gives says whether the flag is true on any rank."""
        if self.size == 1:
            return lambda: flag
        flags = torch.tensor([flag], dtype=torch.int32, device=preferred_device(self._present))
        work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group, async_op=True)

        def found() -> bool:
            if work is not None:
                work.wait()
            return bool(flags.item())

        return found

    def fail(self, failures: dict[int, str], own: BaseException | None) -> NoReturn:
        """Raise the first rank's failure; a mistake in the code keeps its own type and trace."""
        if own is not None and (self.size == 1 or not isinstance(own, CheckpointError)):
            raise own
        rank, text = min(failures.items())
        everywhere = len(failures) == self.size and len(set(failures.values())) == 1
        raise CheckpointError(text if everywhere else f"rank {rank}: {text}") from own


class Agreement(Generic[T]):
    """Something that this rank has done, and that counts when all ranks have done it."""

    def __init__(self, ranks: Ranks, attempt: _Attempt[T]) -> None:
        self._ranks = ranks
        self._attempt = attempt
        self._failed = ranks.any(attempt.failure is not None)

    def result(self) -> T:
        """Return the action's result; raise if it raised on any rank. Collective."""
        if self._failed():
            texts = self._ranks.exchange(self._attempt.failure)
            failures = {rank: text for rank, text in enumerate(texts) if text is not None}
            self._ranks.fail(failures, self._attempt.error)
        return self._attempt.result  # pyright: ignore[reportReturnType]


class _Attempt(Generic[T]):
    """The result of an action, or the exception that it raised."""

    def __init__(self, action: Callable[[], T]) -> None:
        self.result: T | None = None
        self.error: BaseException | None = None
        try:
            self.result = action()
        except BaseException as error:
            # An interrupt too: the other ranks are waiting to hear of it.
            self.error = error
        self.failure = failure_text(self.error)


def failure_text(error: BaseException | None) -> str | None:
    """An error as text for other ranks; None where there was none."""
    if error is None:
        return None
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
