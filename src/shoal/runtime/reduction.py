"""Gradients on their way to the shards: copied together, reduced over ranks, added up.

gradients of the unit   → one matrix with a row per rank, in the reduce dtype
reduce-scatter          → this rank's row, summed over the ranks that shard
all-reduce              → summed over the replicas too, where there are any
divide, cast, add       → `.grad` of the sharded parameters
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from shoal._torch import collectives
from shoal.comm import observer
from shoal.comm.calls import Pair
from shoal.comm.pending import Pending
from shoal.comm.transport import Transport
from shoal.runtime.gradient_matrix import Batch, real_of
from shoal.runtime.streams import no_wait

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
    def is_before(self) -> bool:
        """Whether something is divided before the collective."""
        return self.before not in (None, 1)

    @property
    def is_in_collective(self) -> bool:
        """Whether the collective itself does all of it."""
        return not self.is_before and self.after in (None, 1)

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
        self._cuts = unit.matrix.cuts
        self._wait: Callable[[], object] | None = wait
        self._held = held

    @property
    def num_bytes(self) -> int:
        """The size of the gradient matrix that is reduced."""
        return self._output.nbytes * self.unit.size

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
        if self.host_mark is not None or self.unit.gradient_taker is not None:
            return False
        return self.unit.gradients.may_be_put_later(self._output.dtype)

    def finish(self) -> torch.cuda.Event | None:
        """Add the reduced gradients to those of the sharded parameters.

        Returns what the host has still to wait for, if gradients are on their way to it.
        """
        self.wait()
        if not self.indices:
            return None
        mark, dtype, taker = self.host_mark, self._output.dtype, self.unit.gradient_taker
        if taker is not None:
            taker.expect(self.unit)
        if mark is not None and self.unit.gradients.are_read_at_once(self.indices, dtype):
            mark.synchronize()
            mark = None
        self.unit.gradients.put_reduced(self.indices, self._output, self._cuts)
        if self.unit.inspector is not None:
            self.unit.inspector.on_reduced(self.unit, self._output)
        if taker is not None:
            taker.take(self.unit, mark)
            return None
        return mark


class PackedGradients:
    """Gradients of a unit that are laid out for their reduction."""

    __slots__ = ("batches", "division", "grads", "indices", "is_copied", "present", "rows")

    def __init__(
        self,
        indices: tuple[int, ...],
        present: tuple[int, ...],
        grads: dict[int, torch.Tensor],
        batches: list[Batch],
        rows: torch.Tensor | None,
        division: Division,
    ) -> None:
        self.indices = indices
        """The parameters whose gradients are reduced."""
        self.present = present
        """Those of which this rank has gradients."""
        self.grads = grads
        """The gradients, until they are copied."""
        self.batches = batches
        self.rows = rows
        """What goes back to the arena afterwards."""
        self.division = division
        self.is_copied = False

    def copy(self) -> None:
        """Copy them to the one batch there is, and give their memory back."""
        if not self.is_copied:
            ((batch),) = self.batches
            batch.copy()
            self.grads.clear()
            self.is_copied = True


class UnitReducer:
    """Reduces the gradients of one unit: over the ranks that shard, then over replicas."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._dtypes = {param.dtype for param in unit.compute_packing.params}
        self._separate: Transport | None = None
        self._division: tuple[object, Division] | None = None
        self._scatters: Callable[[torch.Tensor, Sequence[Pair]], object] | None = None

    def pack(
        self, grads: dict[int, torch.Tensor], unused: AbstractSet[int] = frozenset()
    ) -> PackedGradients:
        """Lay gradients out, with zeros for those that other ranks may have.

        On CUDA they are copied now, in compute's order, and give their memory back: what is
        gathered next can have it. A matrix in parts is copied part by part when it is reduced.
        """
        unit, matrix = self._unit, self._unit.matrix
        trained = unit.trained
        kept = grads.keys() | unused if unused else grads.keys()
        if not unit.trained_set.issuperset(kept):  # frozen since its gradient was kept
            trained = tuple(sorted({*trained, *kept}))
        dtype = unit.policy.sum_dtype(self._common_dtype(grads, trained))
        matrix.settle(trained, dtype)
        indices = matrix.trained
        if len(kept) != len(indices) and not unit.options.reduces_unused:
            indices = tuple(sorted(kept))
        division = self._divided()
        batches, rows = matrix.lay_out(
            grads, self._take, in_parts=self._is_plain(), is_written=division.is_before
        )
        reads_gaps = unit.inspector is not None or unit.encodes_gradients
        if reads_gaps and rows is not None and matrix.has_gaps:
            rows.zero_()  # what happens to lie in gaps is reduced too, and shares scales
        packed = PackedGradients(indices, tuple(sorted(grads)), grads, batches, rows, division)
        if unit.streams.reducing is not None and len(batches) == 1:
            packed.copy()
        return packed

    def unpack(self, packed: PackedGradients) -> dict[int, torch.Tensor]:
        """Take gradients back that will not be reduced now."""
        if not packed.is_copied:
            return packed.grads
        ((batch),) = packed.batches
        return self._unit.matrix.copy_out(packed.present, batch.inputs)

    def _is_plain(self) -> bool:
        """Whether reductions are the engine's own, on its own stream, with nobody looking."""
        options = self._unit.options
        return (
            self._unit.streams.reducing is not None
            and self._unit.reduce_scatter is None
            and options.reduce_group is None
            and self._unit.inspector is None
        )

    def _take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        custom = self._unit.reduce_scatter
        if custom is None:
            return self._unit.arena.take_rows(numel, dtype)
        return custom.allocate((numel,), dtype=dtype, device=self._unit.device)

    def _common_dtype(
        self, grads: Mapping[int, torch.Tensor], trained: tuple[int, ...]
    ) -> torch.dtype:
        """One for all ranks: where dtypes differ, not that of the gradients that happen to be."""
        dtypes = {grad.dtype for grad in grads.values()}
        if not dtypes or len(self._dtypes) > 1:
            dtypes = {self._unit.full.parameters[index].dtype for index in trained}
        return functools.reduce(torch.promote_types, dtypes)

    def launch(self, packed: PackedGradients) -> Reduction:
        """Start reducing."""
        unit, division, batches = self._unit, packed.division, packed.batches
        indices = packed.indices
        inputs = [one for batch in batches for one in batch.inputs]
        scatters = unit.transport is not None and unit.size > 1
        output = self._output(inputs[0].dtype, custom=scatters)
        outputs = iter(unit.matrix.outputs(output, len(inputs)))
        # The memory of a custom collective does not go back to the arena.
        kept = packed.rows if unit.reduce_scatter is None else None
        lane = unit.streams.reducing
        if lane is None:
            packed.copy()
            self._show(inputs)
            pairs = list(zip(outputs, inputs, strict=True))
            if scatters and self._is_single(division):
                pending = self._scatter(output, pairs, division)
                return Reduction(unit, indices, kept, output, pending.wait, inputs)
            self._scatter_now(division, output, pairs)
            indices, _ = self._complete(indices, output, division)
            return Reduction(unit, indices, kept, output, no_wait)
        *parts, last = batches
        for part in parts:  # each is copied while the one before is reduced
            part.copy()
            (rows_of_part,) = part.inputs
            with lane:
                self._show(part.inputs)
                self._scatter_now(division, output, [(next(outputs), rows_of_part)])
        if not packed.is_copied:
            last.copy()
            packed.grads.clear()
        with lane:
            self._show(last.inputs)
            self._scatter_now(division, output, list(zip(outputs, last.inputs, strict=True)))
            indices, used = self._complete(indices, output, division)
            host = self._to_host(output) if indices and unit.offloads else None
            mark = lane.mark()
            # One of its own: the other is recorded anew as soon as compute has waited for it.
            host_mark = None if host is None else lane.mark()
        reduction = Reduction(
            unit,
            indices,
            kept,
            output if host is None else host,
            partial(lane.join, mark),
            # What the lane still reads may not be given to others before compute has joined it.
            (inputs, output, used),
        )
        reduction.host_mark = host_mark
        return reduction

    def _show(self, matrices: Sequence[torch.Tensor]) -> None:
        """Let an inspector look at what is about to be reduced."""
        if self._unit.inspector is not None:
            self._unit.inspector.on_reducing(self._unit, matrices)

    def _to_host(self, output: torch.Tensor) -> torch.Tensor:
        """Start copying reduced gradients to where the shards live, beside compute."""
        stored = self._unit.shards.buffer
        dtypes = {member.dtype for member in self._unit.shards.members}
        if len(dtypes) == 1:  # on the host a cast would have to wait for the copy
            output = output.to(dtypes.pop())
        host = torch.empty(
            output.shape, dtype=output.dtype, pin_memory=stored.is_pinned(), device=stored.device
        )
        return host.copy_(output, non_blocking=True)

    def _is_single(self, division: Division) -> bool:
        """Whether one collective is all there is to do."""
        steps = (self._unit.replicas, self._unit.options.all_reduce_hook)
        is_scaled = self._unit.gradient_scale != 1
        return division.is_in_collective and not is_scaled and steps == (None, None)

    def _complete(
        self, indices: tuple[int, ...], output: torch.Tensor, division: Division
    ) -> tuple[tuple[int, ...], torch.Tensor | None]:
        """Do what comes after the reduction over the ranks that shard, on the current stream.

        Returns whose gradients are complete (none, if replicas are still to come), and what was
        read on the way.
        """
        unit, options = self._unit, self._unit.options
        used = None
        if unit.gradient_scale != 1:
            output.mul_(unit.gradient_scale)
        if unit.replicas is not None:
            indices, used = unit.gradients.add_partial(indices, output)
            if not options.all_reduces:
                unit.gradients.keep_partial(indices, output)
                return (), used
            reason = f"the all-reduce of unit {unit.name!r}"
            unit.replicas.all_reduce(real_of(output), division.all_reduce_op, reason=reason).wait()
        if options.all_reduce_hook is not None:
            unit.streams.run_hook(options.all_reduce_hook, output, options.all_reduce_hook_stream)
        if division.after is not None and division.after != 1:
            output.div_(division.after)
        return indices, used

    def _scatter_now(self, division: Division, output: torch.Tensor, pairs: list[Pair]) -> None:
        """Reduce over the ranks that shard, in order with the current stream."""
        unit, options = self._unit, self._unit.options
        if division.before is not None and division.before != 1:
            for _, rows in pairs:
                real_of(rows).div_(division.before)
        on_host = unit.streams.reducing is None
        if unit.transport is None or unit.size == 1:
            for kept, rows in pairs:
                kept.copy_(rows)
        elif on_host or unit.reduce_scatter is not None or options.reduce_group is not None:
            self._scatter(output, pairs, division).wait()
        elif self._scatters is not None:
            self._scatters(real_of(output), _real_pairs(pairs))

    def _output(self, dtype: torch.dtype, *, custom: bool) -> torch.Tensor:
        """Memory for this rank's row."""
        numel, device = self._unit.matrix.shard_numel, self._unit.device
        collective = self._unit.reduce_scatter
        if custom and collective is not None:
            return collective.allocate((numel,), dtype=dtype, device=device)
        return torch.empty(numel, dtype=dtype, device=device)

    def _scatter(self, output: torch.Tensor, pairs: list[Pair], division: Division) -> Pending:
        unit = self._unit
        reason = f"the reduction of unit {unit.name!r}"
        transport = self._own_transport(unit.options.reduce_group) or unit.transport
        assert transport is not None
        custom, op = unit.reduce_scatter, division.reduce_op
        output, pairs = real_of(output), _real_pairs(pairs)
        if custom is None:
            return transport.reduce_scatters(output, pairs, op, reason=reason)
        launched = observer.launching(reason, transport.group, output)
        ((_, rows),) = pairs
        work = custom(output, rows, transport.group, op, async_op=True)
        return Pending(output, work, reason, launched=launched)

    def _own_transport(self, group: dist.ProcessGroup | None) -> Transport | None:
        """Where gradients are reduced, if not where parameters are gathered."""
        if group is not None and (self._separate is None or self._separate.group is not group):
            self._separate = Transport(group)
        return None if group is None else self._separate

    def _divided(self) -> Division:
        unit, options = self._unit, self._unit.options
        dtype = unit.matrix.dtype
        key = (dtype, options, unit.replicas)
        if self._division is None or self._division[0] != key:
            assert dtype is not None
            # The default reduction multiplies by itself where a backend cannot, as gloo.
            has_factor = options.divide_factor is not None and options.reduce_scatter is not None
            division = Division.of(
                dtype.to_real() if dtype.is_complex else dtype,
                unit.size,
                1 if unit.replicas is None else unit.replicas.size,
                options.divide_factor,
                only_sums=options.only_sums or (has_factor and unit.device.type == "cpu"),
                halves=options.halves_division,
            )
            self._division = (key, division)
            if unit.transport is not None and unit.streams.reducing is not None:
                self._scatters = unit.transport.reduce_scatter_in_stream(
                    division.reduce_op, reason=f"the reduction of unit {unit.name!r}"
                )
        return self._division[1]


def _real_pairs(pairs: Sequence[Pair]) -> list[Pair]:
    return [(real_of(kept), real_of(rows)) for kept, rows in pairs]
