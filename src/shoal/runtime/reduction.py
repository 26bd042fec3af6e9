"""Gradients on their way to the shards: copied together, reduced over ranks, added up.

gradients of the unit   → one matrix with a row per rank, in the reduce dtype
reduce-scatter          → this rank's row, summed over the ranks that shard
all-reduce              → summed over the replicas too, where there are any
divide, cast, add       → `.grad` of the sharded parameters
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ReduceOp

from shoal._torch import collectives

if TYPE_CHECKING:
    from shoal.runtime.unit import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How a sum of gradients becomes their mean."""

    before: float | None
    after: float | None
    reduce_op: Any
    all_reduce_op: Any

    @property
    def is_in_collective(self) -> bool:
        """Whether the collective itself does all of it."""
        return self.before in (None, 1) and self.after in (None, 1)

    @classmethod
    def of(
        cls,
        dtype: torch.dtype,
        shard_size: int,
        num_replicas: int,
        factor: float | None,
        *,
        only_sums: bool,
        halves: bool = False,
    ) -> Division:
        """Let the collective divide where it can; half before and half after in narrow dtypes."""
        # fp16 overflows when many gradients are added, and underflows when each is divided first.
        is_narrow = halves or dtype not in (torch.float32, torch.bfloat16, torch.float64)
        if not is_narrow and not only_sums:
            if factor is None:
                op = ReduceOp.SUM if shard_size * num_replicas == 1 else ReduceOp.AVG
                return cls(before=None, after=None, reduce_op=op, all_reduce_op=op)
            op = ReduceOp.SUM
            if shard_size == 1:
                return cls(before=None, after=factor, reduce_op=op, all_reduce_op=op)
            divides = (
                ReduceOp.AVG if factor == shard_size else collectives.premultiplied_sum(1 / factor)
            )
            return cls(before=None, after=None, reduce_op=divides, all_reduce_op=op)
        total = float(shard_size * num_replicas) if factor is None else factor
        before = 1.0
        while is_narrow and total % before == 0 and total / before > before:
            before *= 2
        return cls(
            before=before if is_narrow else None,
            after=total / before,
            reduce_op=ReduceOp.SUM,
            all_reduce_op=ReduceOp.SUM,
        )


class Reduction:
    """One reduction of a unit's gradients, in flight."""

    __slots__ = ("_cuts", "_held", "_output", "_rows", "_wait", "host_mark", "indices", "unit")

    def __init__(
        self,
        unit: Unit,
        indices: Sequence[int],
        rows: torch.Tensor | None,
        output: torch.Tensor,
        wait: Callable[[], object],
        held: object = None,
    ) -> None:
        self.unit = unit
        self.indices = indices
        """The parameters whose gradients these are."""
        self.host_mark: torch.cuda.Event | None = None
        """What the host has to wait for before it reads the gradients, where they go there."""
        self._rows = rows
        self._output = output
        self._cuts = unit.rows.cuts
        self._wait: Callable[[], object] | None = wait
        self._held = held

    def wait(self) -> None:
        """Order the current stream (on CPU, the host) after the collectives."""
        if self._wait is None:
            return
        self._wait()
        self._wait = self._held = None
        if self._rows is not None:
            self.unit.arena.give_rows(self._rows)
            self._rows = None

    @property
    def can_wait(self) -> bool:
        """Whether its gradients may be put on the parameters when backward is over.

        There it costs the host a quarter, since then all units do the same thing.
        """
        return self.host_mark is None and self.unit.may_take_later(self._output.dtype)

    def finish(self) -> torch.cuda.Event | None:
        """Add the reduced gradients to those of the sharded parameters.

        Returns what the host has still to wait for, if gradients are on their way to it.
        """
        self.wait()
        if not self.indices:
            return None
        mark, dtype = self.host_mark, self._output.dtype
        if mark is not None and self.unit.reads_grads_at_once(self.indices, dtype):
            mark.synchronize()
            mark = None
        self.unit.take_reduced(self.indices, self._output, self._cuts)
        return mark
