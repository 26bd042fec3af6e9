"""The matrix a unit's gradients are reduced from: one row per rank, cut as the shards are."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from math import prod
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shoal._torch import kernels
from shoal.comm import observer
from shoal.comm.transport import Pending, Transport
from shoal.layout.even import EvenPacking
from shoal.layout.packing import Packing
from shoal.runtime.cuts import cut, examples_of
from shoal.runtime.parts import Parts
from shoal.runtime.reduction import Division, Reduction
from shoal.runtime.streams import no_wait

if TYPE_CHECKING:
    from shoal.runtime.unit import Unit


Cuts = tuple[list[int], list[tuple[int, int]], list[torch.Tensor] | None]
"""The widths of gradients and gaps in a row, which pieces are whose, and their shapes."""


class Rows:
    """How the gradients of one unit are laid out for a reduction, and the reduction itself."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._dtypes = {param.dtype for param in unit.compute_packing.params}
        self._packing: Packing | None = None
        self._parts: Parts | None = None
        self.trained: tuple[int, ...] = ()
        self._dtype: torch.dtype | None = None
        self._targets: dict[int, list[list[torch.Tensor]]] = {}
        self._generation = 0
        self._separate: Transport | None = None
        self._division: tuple[object, Division] | None = None
        self._scatters: Callable[[torch.Tensor, torch.Tensor], object] | None = None
        self._cuts: Cuts | None = None
        self.part_bytes: int | None = None
        """The size to reduce a larger matrix in parts of."""

    def launch(
        self, grads: dict[int, torch.Tensor], unused: AbstractSet[int] = frozenset()
    ) -> Reduction:
        """Copy gradients in, zeros for those that other ranks may have, and start reducing."""
        unit = self._unit
        trained = unit.trained
        kept = grads.keys() | unused if unused else grads.keys()
        if not unit.trained_set.issuperset(kept):  # frozen since its gradient was kept
            trained = tuple(sorted({*trained, *kept}))
        dtype = unit.policy.sum_dtype(self._common_dtype(grads, trained))
        self._settle(trained, dtype)
        indices = self.trained
        if len(kept) != len(indices) and not unit.options.reduces_unused:
            indices = tuple(sorted(kept))
        if self._parts is not None and self._is_plain():
            parts = self._parts.copy_in(grads, dtype, unit.device)
        else:
            parts = [self._take(self._num_rows_numel, dtype)]
            self._copy_in(grads, parts[0])
        grads.clear()  # their memory may serve the collective
        return self._reduce(indices, parts)

    def _is_plain(self) -> bool:
        """Whether reductions are the engine's own, on its own stream."""
        options = self._unit.options
        return (
            self._unit.streams.reducing is not None
            and options.reduce_scatter is None
            and options.reduce_group is None
        )

    def _take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        custom = self._unit.options.reduce_scatter
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

    def _settle(self, trained: tuple[int, ...], dtype: torch.dtype) -> None:
        """Lay out the parameters that are trained; all of them where cuts depend on neighbours."""
        unit = self._unit
        if trained is self.trained and dtype is self._dtype:
            return
        whole = unit.shards.whole
        self._targets.clear()
        self.trained, self._dtype = trained, dtype
        self._cuts = None
        self._offsets: dict[int, int] = {}
        dtypes = {whole.params[i].dtype for i in trained}
        self._parts = self._parts_of(whole, trained, dtype)
        if (
            self._parts is None
            and isinstance(whole, EvenPacking)
            and not any(whole.dims[i] for i in trained)
            and len(dtypes) == 1
        ):
            self._packing = None
            self._settle_columns(whole, trained)
        else:
            self._packing = whole.with_dtypes([dtype] * len(whole.params))
            self._is_zero_copy = [self._packing.is_zero_copy(i) for i in range(len(whole.params))]
            self._is_all_zero_copy = all(self._is_zero_copy)
            numel = self._packing.shard_bytes // dtype.itemsize
            self.shard_numel = numel
            for index in trained:
                piece = self._packing.piece(index, unit.rank)
                self._offsets[index] = piece.offset_bytes // dtype.itemsize
        self._num_rows_numel = unit.size * self.shard_numel
        unit.arena.expect_rows(self._num_rows_numel * dtype.itemsize)

    def _parts_of(
        self, whole: Packing, trained: tuple[int, ...], dtype: torch.dtype
    ) -> Parts | None:
        """In which parts to reduce, if it is too much for one."""
        unit = self._unit
        if unit.streams.reducing is None or unit.size == 1 or len(trained) < len(whole.params):
            return None
        if self.part_bytes is None:
            return None
        return Parts.of(whole.with_dtypes([dtype] * len(whole.params)), dtype, self.part_bytes)

    @property
    def whole_bytes(self) -> int:
        """The size of the matrix if every parameter is trained."""
        unit = self._unit
        whole = unit.shards.whole
        dtype = unit.policy.reduce_dtype or unit.policy.param_dtype
        packing = whole if dtype is None else whole.with_dtypes([dtype] * len(whole.params))
        return unit.size * packing.shard_bytes

    def _settle_columns(self, whole: EvenPacking, trained: tuple[int, ...]) -> None:
        """Chunks beside each other with no gaps; those that keep others aligned come first."""
        chunks = {i: whole.piece(i, 0).numel for i in trained}
        order = sorted(trained, key=lambda i: chunks[i] % 16 != 0)
        self._in_order = [i for i in order if chunks[i] > 0]
        end = 0
        for index in order:
            self._offsets[index] = end
            end += chunks[index]
        self.shard_numel = end

    def _copy_in(self, grads: Mapping[int, torch.Tensor], rows: torch.Tensor) -> None:
        unit = self._unit
        if self._packing is None:
            tensors = [
                grads[i] if i in grads else rows.new_zeros(unit.shards.members[i].spec.shape)
                for i in self._in_order
            ]
            if len({tensor.dtype for tensor in tensors}) > 1:
                tensors = [tensor.to(rows.dtype) for tensor in tensors]
            if rows.is_complex():
                tensors = [torch.view_as_real(tensor.resolve_conj()) for tensor in tensors]
            if self.shard_numel:
                kernels.chunk_into_columns(tensors, unit.size, _real(rows).view(unit.size, -1))
            return
        everything = self._targets_in(rows)
        if self._is_all_zero_copy and len(grads) == len(everything):
            # Not in the order of the gradients: those kept from earlier backwards come last.
            sources = [grads[index] for index in range(len(everything))]
            kernels.foreach_copy([target for (target,) in everything], sources)
            return
        into: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for index, targets in enumerate(everything):
            grad = grads.get(index)
            if grad is None:
                for target in targets:
                    target.zero_()
            elif self._is_zero_copy[index]:
                into.extend(targets)
                sources.append(grad)
            else:
                into.extend(targets)
                flat = grad.reshape(-1)
                sources.extend(s.of_full(flat) for s in self._packing.stripes(index))
        if into:
            kernels.foreach_copy(into, sources)

    def _targets_in(self, rows: torch.Tensor) -> list[list[torch.Tensor]]:
        """Where each gradient goes; remembered for memory that is used again."""
        assert self._packing is not None
        if self._generation != self._unit.arena.generation:
            self._generation = self._unit.arena.generation
            self._targets.clear()
        known = self._targets.get(rows.data_ptr())
        if known is not None:
            return known
        matrix = rows.view(self._unit.size, -1)
        targets: list[list[torch.Tensor]] = []
        for index, param in enumerate(self._packing.params):
            offset = self._packing.gathered_offset(index)
            if offset is not None:
                start = offset // rows.dtype.itemsize
                targets.append([rows[start : start + param.numel].view(param.shape)])
            else:
                targets.append([s.of_rows(matrix) for s in self._packing.stripes(index)])
        if self._unit.arena.keeps_rows(rows.nbytes):
            self._targets[rows.data_ptr()] = targets
        return targets

    def _reduce(self, indices: tuple[int, ...], parts: list[torch.Tensor]) -> Reduction:
        """Reduce what was copied in."""
        unit = self._unit
        division = self._divided()
        scatters = unit.transport is not None and unit.size > 1
        output = self._output(parts[0]) if scatters else torch.empty_like(parts[0])
        kept = self._kept(parts[0]) if len(parts) == 1 else None
        lane = unit.streams.reducing
        if lane is None and scatters and self._is_single(division):
            pending = self._scatter(_real(output), _real(parts[0]), division)
            return Reduction(unit, indices, kept, output, pending.wait)
        if lane is None:
            indices, _ = self._chain(indices, parts, output, division)
            return Reduction(unit, indices, kept, output, no_wait)
        with lane:
            indices, used = self._chain(indices, parts, output, division)
            host = self._to_host(output) if indices and unit.offloads else None
            mark = lane.mark()
        reduction = Reduction(
            unit,
            indices,
            kept,
            output if host is None else host,
            partial(lane.join, mark),
            # What the lane still reads may not be given to others before compute has joined it.
            (parts, output, used),
        )
        if host is not None:
            reduction.host_mark = mark
        return reduction

    def _kept(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Memory that goes back to the arena; a custom collective's does not."""
        return rows if self._unit.options.reduce_scatter is None else None

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
        return division.is_in_collective and not any(step is not None for step in steps)

    def _chain(
        self,
        indices: tuple[int, ...],
        parts: list[torch.Tensor],
        output: torch.Tensor,
        division: Division,
    ) -> tuple[tuple[int, ...], torch.Tensor | None]:
        """Reduce, step after step on the current stream.

        Returns whose gradients are complete (none, if replicas are still to come), and what was
        read on the way.
        """
        unit, options = self._unit, self._unit.options
        used = None
        if len(parts) == 1 or self._parts is None:
            self._scatter_now(division, output, parts[0])
        else:
            for piece, rows in zip(self._parts.outputs(output), parts, strict=True):
                self._scatter_now(division, piece, rows)
        if unit.replicas is not None:
            indices, used = unit.add_partial(indices, output)
            if not options.all_reduces:
                unit.keep_partial(indices, output)
                return (), used
            reason = f"the all-reduce of unit {unit.name!r}"
            unit.replicas.all_reduce(_real(output), division.all_reduce_op, reason=reason).wait()
            self._note_in_stream()
        if options.all_reduce_hook is not None:
            unit.streams.run_hook(options.all_reduce_hook, output, options.all_reduce_hook_stream)
        if division.after is not None and division.after != 1:
            output.div_(division.after)
        return indices, used

    def _scatter_now(self, division: Division, output: torch.Tensor, rows: torch.Tensor) -> None:
        """Reduce over the ranks that shard, in order with the current stream."""
        unit, options = self._unit, self._unit.options
        output, rows = _real(output), _real(rows)
        if division.before is not None and division.before != 1:
            rows.div_(division.before)
        on_host = unit.streams.reducing is None
        if unit.transport is None or unit.size == 1:
            output.copy_(rows)
        elif on_host or options.reduce_scatter is not None or options.reduce_group is not None:
            self._scatter(output, rows, division).wait()
            self._note_in_stream()
        elif self._scatters is not None:
            self._scatters(output, rows)

    def _note_in_stream(self) -> None:
        """On CUDA the lane waits for the collective just launched, and the host does not."""
        if self._unit.streams.reducing is not None:
            observer.in_stream()

    def _output(self, rows: torch.Tensor) -> torch.Tensor:
        custom = self._unit.options.reduce_scatter
        if custom is not None:
            return custom.allocate((self.shard_numel,), dtype=rows.dtype, device=rows.device)
        return torch.empty(self.shard_numel, dtype=rows.dtype, device=rows.device)

    def _scatter(self, output: torch.Tensor, rows: torch.Tensor, division: Division) -> Pending:
        unit = self._unit
        reason = f"the reduction of unit {unit.name!r}"
        transport = self._own_transport(unit.options.reduce_group) or unit.transport
        assert transport is not None
        custom = unit.options.reduce_scatter
        if custom is None:
            return transport.reduce_scatter(output, rows, division.reduce_op, reason=reason)
        observer.launching(reason, transport.group, output)
        work = custom(output, rows, transport.group, division.reduce_op, async_op=True)
        return Pending(output, work, reason)

    def _own_transport(self, group: dist.ProcessGroup | None) -> Transport | None:
        """Where gradients are reduced, if not where parameters are gathered."""
        if group is not None and (self._separate is None or self._separate.group is not group):
            self._separate = Transport(group)
        return None if group is None else self._separate

    def _divided(self) -> Division:
        unit, options = self._unit, self._unit.options
        key = (self._dtype, options)
        if self._division is None or self._division[0] != key:
            assert self._dtype is not None
            division = Division.of(
                self._dtype.to_real() if self._dtype.is_complex else self._dtype,
                unit.size,
                1 if unit.replicas is None else unit.replicas.size,
                options.divide_factor,
                only_sums=options.only_sums,
                halves=options.halves_division,
            )
            self._division = (key, division)
            if unit.transport is not None and unit.streams.reducing is not None:
                self._scatters = unit.transport.reduce_scatter_in_stream(
                    division.reduce_op, reason=f"the reduction of unit {unit.name!r}"
                )
        return self._division[1]

    @property
    def cuts(self) -> Cuts:
        """How a row is cut now; what is trained may change before it is cut."""
        if self._cuts is None:
            self._cuts = self._cut()
        return self._cuts

    def views(self, output: torch.Tensor, cuts: Cuts) -> list[tuple[int, torch.Tensor]]:
        """Every gradient in this rank's row of the reduced matrix, by parameter."""
        widths, wanted, examples = cuts
        pieces = (
            output.split_with_sizes(widths)
            if examples is None
            else kernels.unflatten(output, examples)
        )
        return [(index, pieces[at]) for index, at in wanted]

    def _cut(self) -> Cuts:
        members = self._unit.shards.members
        pieces = {
            index: (offset, tuple(members[index].local.shape))
            for index, offset in self._offsets.items()
        }
        shapes, wanted = cut(pieces, self.shard_numel)
        is_flat = all(len(shape) == 1 for shape in shapes)
        return [prod(shape) for shape in shapes], wanted, None if is_flat else examples_of(shapes)


def _real(row: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs of real ones, which collectives can add; others as they are."""
    return torch.view_as_real(row).view(-1) if row.is_complex() else row


def limit_parts(all_rows: Sequence[Rows]) -> None:
    """Let matrices of a size that no other unit has go in parts of a size that several have.

    It depends on the declared units alone, so that all ranks cut alike.
    """
    sizes = Counter(rows.whole_bytes for rows in all_rows)
    shared = [size for size, count in sizes.items() if count > 1]
    for rows in all_rows:
        own = rows.whole_bytes
        smaller = [size for size in shared if size < own]
        rows.part_bytes = max(smaller) if sizes[own] == 1 and smaller else None
