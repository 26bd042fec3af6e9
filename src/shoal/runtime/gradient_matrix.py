"""The matrix a unit's gradients are reduced from: one row per rank, cut as the shards are.

    the matrix, a row per rank      [ a a a a a | b b b ]
    reduced one after the other     [ a a a a a ]   [ b b b ]     each in memory of its own

A large matrix goes in parts of a size that other units have too: memory of a size that only one
unit needs would be reserved for it alone, or cut up by others.

A parameter that is a section of its own (`Even`, cut along dim 0) is a matrix of its own: as its
gradient lies, that is the matrix. It is only cast, or reduced from where autograd has put it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch

from shoal._torch import kernels
from shoal.layout.even import EvenPacking
from shoal.layout.packing import Packing
from shoal.layout.spec import ALIGN_NUMEL, round_up
from shoal.layout.stripe import Stripe

if TYPE_CHECKING:
    from shoal.runtime.unit import Unit

Cuts = tuple[list[int], list[tuple[int, int]], list[torch.Tensor] | None]
"""The widths of gradients and gaps in a row, which pieces are whose, and their shapes."""
Take = Callable[[int, torch.dtype], torch.Tensor]
"""Memory for so many elements of a dtype."""


class Batch(NamedTuple):
    """Gradients that one launch reduces."""

    inputs: list[torch.Tensor]
    copy: Callable[[], None]
    """Copies gradients to the inputs, on the current stream."""


class GradientMatrix:
    """How the gradients of one unit are laid out for a reduction."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._packing: Packing | None = None
        self.parts: MatrixParts | None = None
        """In which parts it is reduced, if it is too much for one."""
        self.trained: tuple[int, ...] = ()
        """The parameters that it has place for."""
        self.dtype: torch.dtype | None = None
        self._in_sections = True
        self._targets: dict[int, list[list[torch.Tensor]]] = {}
        self._generation = 0
        self._cuts: Cuts | None = None
        self.part_bytes: int | None = None
        """The size to reduce a larger matrix in parts of."""

    def settle(self, trained: tuple[int, ...], dtype: torch.dtype) -> None:
        """Lay out the parameters that are trained; all of them where cuts depend on neighbours."""
        unit = self._unit
        # A collective of the user's own is called once for the unit.
        in_sections = unit.reduce_scatter is None
        if (trained, dtype, in_sections) == (self.trained, self.dtype, self._in_sections):
            return
        self._in_sections = in_sections
        whole = unit.shards.whole.in_one_section()
        self._targets.clear()
        self.trained, self.dtype = trained, dtype
        self._cuts = None
        self._offsets: dict[int, int] = {}
        self._alone: list[int] = []
        dtypes = {whole.params[i].dtype for i in trained}
        self.parts = self._parts_of(whole, trained, dtype)
        if (
            self.parts is None
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
            if self._is_all_zero_copy:
                shapes, places = cut(_fulls_in(self._packing, dtype), unit.size * numel)
                self._fulls = examples_of(shapes), [at for _, at in sorted(places)]
            for index in trained:
                piece = self._packing.piece(index, unit.rank)
                self._offsets[index] = piece.offset_bytes // dtype.itemsize
        self._num_rows_numel = unit.size * self.shard_numel
        unit.arena.expect_rows(self._num_rows_numel * dtype.itemsize)

    def _parts_of(
        self, whole: Packing, trained: tuple[int, ...], dtype: torch.dtype
    ) -> MatrixParts | None:
        """In which parts to reduce, if it is too much for one."""
        unit = self._unit
        if unit.streams.reducing is None or unit.size == 1 or len(trained) < len(whole.params):
            return None
        if self.part_bytes is None:
            return None
        return MatrixParts.of(
            whole.with_dtypes([dtype] * len(whole.params)), dtype, self.part_bytes
        )

    @property
    def whole_bytes(self) -> int:
        """The size of the matrix if every parameter is trained."""
        unit = self._unit
        whole = unit.shards.whole
        dtype = unit.policy.reduce_dtype or unit.policy.param_dtype
        packing = whole if dtype is None else whole.with_dtypes([dtype] * len(whole.params))
        return unit.size * packing.shard_bytes

    def _settle_columns(self, whole: EvenPacking, trained: tuple[int, ...]) -> None:
        """Sections first; then chunks beside each other with no gaps, the aligned ones first."""
        sections = self._unit.shards.whole
        self._chunks = {i: whole.piece(i, 0).numel for i in trained}
        assert isinstance(sections, EvenPacking)
        self._alone = [i for i in trained if self._in_sections and i in sections.alone]
        rest = [i for i in trained if i not in self._alone]
        rest.sort(key=lambda i: self._chunks[i] % 16 != 0)
        self._in_order = [i for i in rest if self._chunks[i] > 0]
        end = 0
        for index in (*self._alone, *rest):
            self._offsets[index] = end
            end += self._chunks[index]
        self.shard_numel = end
        self._rest_numel = sum(self._chunks[i] for i in rest)
        size = self._unit.size
        self._are_few = len(self._in_order) <= kernels.FEW and all(
            size * self._chunks[i] == whole.params[i].numel for i in self._in_order
        )

    @property
    def has_gaps(self) -> bool:
        """Whether there may be memory between gradients that nobody writes."""
        return self._packing is not None

    def lay_out(
        self, grads: Mapping[int, torch.Tensor], take: Take, *, in_parts: bool, is_written: bool
    ) -> tuple[list[Batch], torch.Tensor | None]:
        """What to reduce, launch by launch, and the memory that comes from `take`.

        `is_written` says that the inputs are changed before they are reduced. Then none is a
        gradient as it lies: its memory may be another gradient's too, or the user's.
        """
        assert self.dtype is not None
        if self.parts is not None and in_parts:
            return self.parts.batches(grads, self.dtype, self._unit.device), None
        if not self._alone:
            rows = take(self._num_rows_numel, self.dtype)
            return [Batch([rows], partial(self._copy_in, grads, rows))], rows
        size = self._unit.size
        alone = [
            index
            for index in self._alone
            if is_written or not self._is_ready(grads.get(index), index)
        ]
        copied_numel = size * (sum(self._chunks[index] for index in alone) + self._rest_numel)
        rows = take(copied_numel, self.dtype) if copied_numel else None
        end = 0
        inputs: list[torch.Tensor] = []
        for index in self._alone:
            if index not in alone:
                inputs.append(grads[index].view(-1))
                continue
            assert rows is not None
            start, end = end, end + size * self._chunks[index]
            inputs.append(rows[start:end])
        if self._rest_numel:
            assert rows is not None
            inputs.append(rows[end:])
        return [Batch(inputs, partial(self._copy_sections, grads, inputs, alone))], rows

    def _copy_sections(
        self, grads: Mapping[int, torch.Tensor], inputs: Sequence[torch.Tensor], alone: list[int]
    ) -> None:
        """Cast gradients that are a matrix of their own, and copy the others beside each other."""
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for index, into in zip(self._alone, inputs, strict=False):
            if index not in alone:
                continue
            grad = grads.get(index)
            numel = 0 if grad is None else grad.numel()
            if grad is not None:
                targets.append(into[:numel].view(grad.shape))
                sources.append(grad)
            if numel < into.numel():
                into[numel:].zero_()
        if targets:
            kernels.foreach_copy(targets, sources)
        if self._rest_numel:
            self._copy_columns(grads, inputs[-1])

    def outputs(self, output: torch.Tensor, num_inputs: int) -> list[torch.Tensor]:
        """Where each of the inputs goes in this rank's row."""
        if num_inputs == 1:
            return [output]
        if self.parts is not None:
            return self.parts.outputs(output)
        widths = [self._chunks[index] for index in self._alone]
        return list(output.split([*widths, self._rest_numel] if self._rest_numel else widths))

    def _is_ready(self, grad: torch.Tensor | None, index: int) -> bool:
        """Whether a gradient is, as it lies, what would be copied.

        One that is conjugated or negated is not: its memory is of what it was before.
        """
        return (
            grad is not None
            and grad.dtype is self.dtype
            and grad.is_contiguous()
            and grad.numel() == self._unit.size * self._chunks[index]
            and not (grad.is_conj() or grad.is_neg())
        )

    def _copy_columns(self, grads: Mapping[int, torch.Tensor], rows: torch.Tensor) -> None:
        """Copy gradients into the columns that are theirs, and cast them on the way."""
        unit = self._unit
        tensors = [
            grads[i] if i in grads else rows.new_zeros(unit.shards.members[i].spec.shape)
            for i in self._in_order
        ]
        if len({tensor.dtype for tensor in tensors}) > 1:
            tensors = [tensor.to(rows.dtype) for tensor in tensors]
        if rows.is_complex():
            tensors = [torch.view_as_real(tensor.resolve_conj()) for tensor in tensors]
        if not tensors:
            return
        matrix = real_of(rows).view(unit.size, -1)
        if not self._are_few:
            kernels.chunk_into_columns(tensors, unit.size, matrix)
            return
        widths = [tensor.numel() // unit.size for tensor in tensors]
        sources = [tensor.reshape(unit.size, -1) for tensor in tensors]
        kernels.foreach_copy(list(matrix.split(widths, dim=1)), sources)

    def _copy_in(self, grads: Mapping[int, torch.Tensor], rows: torch.Tensor) -> None:
        if self._packing is None:
            self._copy_columns(grads, rows)
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
        if self._is_all_zero_copy:  # by one call, since large memory is other memory each time
            examples, places = self._fulls
            pieces = kernels.unflatten(rows, examples)
            targets = [[pieces[at]] for at in places]
        else:
            targets = self._stripes_in(rows)
        if self._unit.arena.keeps_rows(rows.nbytes):
            self._targets[rows.data_ptr()] = targets
        return targets

    def copy_out(
        self, indices: Sequence[int], inputs: Sequence[torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """The gradients that were copied to inputs, in new memory and the matrix' dtype."""
        members = self._unit.shards.members
        if self._packing is None:
            return {i: self._column_of(i, inputs).view(members[i].spec.shape) for i in indices}
        (rows,) = inputs
        stripes = self._stripes_in(rows)
        grads: dict[int, torch.Tensor] = {}
        for index in indices:
            if self._is_zero_copy[index]:
                (grads[index],) = (one.clone() for one in stripes[index])
                continue
            grad = rows.new_empty(members[index].spec.shape)
            flat = grad.view(-1)
            into = [stripe.of_full(flat) for stripe in self._packing.stripes(index)]
            kernels.foreach_copy(into, stripes[index])
            grads[index] = grad
        return grads

    def _column_of(self, index: int, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """A gradient among sections and columns, flat and in new memory."""
        numel = prod(self._unit.shards.members[index].spec.shape)
        if index in self._alone:
            return inputs[self._alone.index(index)][:numel].clone()
        rows = inputs[-1].view(self._unit.size, -1)
        if numel == 0:
            return rows.new_empty(0)
        widths = [self._chunks[i] for i in self._in_order]
        return rows.split(widths, dim=1)[self._in_order.index(index)].reshape(-1)[:numel].clone()

    def _stripes_in(self, rows: torch.Tensor) -> list[list[torch.Tensor]]:
        assert self._packing is not None
        matrix = rows.view(self._unit.size, -1)
        targets: list[list[torch.Tensor]] = []
        for index, param in enumerate(self._packing.params):
            offset = self._packing.gathered_offset(index)
            if offset is not None:
                start = offset // rows.dtype.itemsize
                targets.append([rows[start : start + param.numel].view(param.shape)])
            else:
                targets.append([s.of_rows(matrix) for s in self._packing.stripes(index)])
        return targets

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


def _fulls_in(packing: Packing, dtype: torch.dtype) -> dict[int, tuple[int, Shape]]:
    """Where each gradient lies in a matrix in which all of them lie whole."""
    pieces: dict[int, tuple[int, Shape]] = {}
    for index, param in enumerate(packing.params):
        offset = packing.gathered_offset(index)
        assert offset is not None
        pieces[index] = offset // dtype.itemsize, tuple(param.shape)
    return pieces


LARGE_BYTES = 512 << 20
"""Smaller matrices are reduced at once."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """What one part has of a stripe of parameter `index`."""

    index: int
    stripe: Stripe
    start: int
    stop: int
    in_part: Stripe

    def source(self, flat: torch.Tensor) -> torch.Tensor:
        return self.stripe.of_full(flat)[..., self.start : self.stop]


class MatrixParts:
    """The parts of a matrix that a packing lays out: `width` columns each, the last one fewer."""

    def __init__(self, packing: Packing, num_columns: int, width: int) -> None:
        self._num_rows = packing.world_size
        self.bounds = [
            (start, min(start + width, num_columns)) for start in range(0, num_columns, width)
        ]
        """Where each part begins and ends in a row."""
        self._cuts = [_cuts_of(packing, start, stop) for start, stop in self.bounds]

    @classmethod
    def of(cls, packing: Packing, dtype: torch.dtype, part_bytes: int) -> MatrixParts | None:
        """The parts of a matrix of that dtype; None if it goes at once."""
        num_columns = packing.shard_bytes // dtype.itemsize
        row_bytes = packing.world_size * dtype.itemsize
        width = round_up(part_bytes // row_bytes, ALIGN_NUMEL)
        if num_columns * row_bytes < LARGE_BYTES or not 0 < width < num_columns:
            return None
        stripes = [s for i in range(len(packing.params)) for s in packing.stripes(i)]
        if any(stripe.num_bands > 1 for stripe in stripes):  # cut along an inner dim
            return None
        return cls(packing, num_columns, width)

    def batches(
        self, grads: Mapping[int, torch.Tensor], dtype: torch.dtype, device: torch.device
    ) -> list[Batch]:
        """A launch for each part, in new memory."""
        batches: list[Batch] = []
        for (start, stop), cuts in zip(self.bounds, self._cuts, strict=True):
            rows = torch.empty(self._num_rows * (stop - start), dtype=dtype, device=device)
            batches.append(Batch([rows], partial(self._copy_part, grads, rows, cuts)))
        return batches

    def _copy_part(
        self, grads: Mapping[int, torch.Tensor], rows: torch.Tensor, cuts: Sequence[_Cut]
    ) -> None:
        """Copy what one part has of the gradients; those that are missing are zero."""
        matrix = rows.view(self._num_rows, -1)
        into: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for cut in cuts:
            target, grad = cut.in_part.of_rows(matrix), grads.get(cut.index)
            if grad is None:
                target.zero_()
            else:
                into.append(target)
                sources.append(cut.source(grad.reshape(-1)))
        if into:
            kernels.foreach_copy(into, sources)

    def outputs(self, output: torch.Tensor) -> list[torch.Tensor]:
        """Where each part goes in this rank's row."""
        return [output[start:stop] for start, stop in self.bounds]


def _cuts_of(packing: Packing, start: int, stop: int) -> list[_Cut]:
    """What is in the columns from `start` to `stop`."""
    cuts: list[_Cut] = []
    for index in range(len(packing.params)):
        for stripe in packing.stripes(index):
            first = max(stripe.shard_offset, start)
            last = min(stripe.shard_offset + stripe.numel, stop)
            if first < last:
                cuts.append(
                    _Cut(
                        index,
                        stripe,
                        first - stripe.shard_offset,
                        last - stripe.shard_offset,
                        replace(stripe, shard_offset=first - start, numel=last - first),
                    )
                )
    return cuts


def real_of(row: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs of real ones, which collectives can add; others as they are."""
    return torch.view_as_real(row).view(-1) if row.is_complex() else row


def limit_parts(matrices: Sequence[GradientMatrix]) -> None:
    """Let matrices of a size that no other unit has go in parts of a size that several have.

    It depends on the declared units alone, so that all ranks cut alike.
    """
    sizes = Counter(matrix.whole_bytes for matrix in matrices)
    shared = [size for size, count in sizes.items() if count > 1]
    for matrix in matrices:
        own = matrix.whole_bytes
        smaller = [size for size in shared if size < own]
        matrix.part_bytes = max(smaller) if sizes[own] == 1 and smaller else None


Shape = tuple[int, ...]


def cut(
    pieces: Mapping[int, tuple[int, Shape]], length: int | None = None
) -> tuple[list[Shape], list[tuple[int, int]]]:
    """The shapes of all parts of a row, and for each piece its number and its place among them.

    `pieces` have numbers, and say where they begin. Up to the end of the last one, or for so many
    elements.
    """
    shapes: list[Shape] = []
    wanted: list[tuple[int, int]] = []
    reached = 0
    for number, (start, shape) in sorted(pieces.items(), key=lambda item: (item[1][0], item[0])):
        if (numel := prod(shape)) > 0:
            if start > reached:
                shapes.append((start - reached,))
            reached = start + numel
        wanted.append((number, len(shapes)))
        shapes.append(shape)
    if length is not None and length > reached:
        shapes.append((length - reached,))
    return shapes, wanted


def examples_of(shapes: list[Shape]) -> list[torch.Tensor]:
    """Tensors of these shapes, with no memory behind them."""
    blank = torch.empty(())
    return [blank.expand(shape) for shape in shapes]
