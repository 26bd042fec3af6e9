"""Full parameters out of gathered rows, and gradients into them, by calls that a graph can have.

`lay_in_row` is an operator of its own: tensors end to end in one row of another dtype. As casts and
a `cat` it would be a kernel for every tensor once a compiler has been over it, and a launch on the
host for each. This is one kernel for all of them, which CUDA graphs can record.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shoal._torch import kernels
from shoal.errors import InvariantError
from shoal.layout.even import EvenPacking
from shoal.layout.packing import Packing
from shoal.runtime.gradient_matrix import cut

NAMESPACE = "shoal"
_SCHEMA = "lay_in_row(Tensor[] parts, ScalarType dtype) -> Tensor"
Zeros = Callable[[tuple[int, ...]], Tensor]
Piece = tuple[int, int, tuple[int, ...]]
"""Where a parameter's piece begins and ends in a rank's shard, and its shape."""
Runs = dict[int, tuple[int, int]]
"""For each parameter, where its elements begin, and how many there are."""


def place_of(packing: Packing, index: int, rank: int) -> Piece:
    """Find a parameter's piece in a rank's shard."""
    piece = packing.piece(index, rank)
    start = piece.offset_bytes // packing.params[index].itemsize
    return start, start + piece.numel, tuple(piece.shape)


def full_in(packing: Packing, index: int, rows: Tensor) -> Tensor:
    """A parameter in the gathered rows: a view where it lies in one run."""
    param = packing.params[index]
    offset = packing.gathered_offset(index)
    if offset is not None:
        start = offset // param.itemsize
        return rows.view(-1)[start : start + param.numel].view(param.shape)
    if isinstance(packing, EvenPacking) and packing.dims[index] == 0:
        start, end, _ = place_of(packing, index, 0)
        return rows[:, start:end].reshape(-1)[: param.numel].view(param.shape)
    full = rows.new_empty(param.numel)
    for stripe in packing.stripes(index):
        stripe.of_full(full).copy_(stripe.of_rows(rows))
    return full.view(param.shape)


def matrix_of(
    packing: Packing, grads: tuple[Tensor | None, ...], dtype: torch.dtype, zeros: Zeros
) -> Tensor:
    """Gradients laid out as gathered rows; what has none, and what lies between, is zero.

    Put together by one operator: writes into a matrix would each become a copy of it in a graph.
    """
    given = {index: grad for index, grad in enumerate(grads) if grad is not None}
    num_rows = packing.world_size
    num_columns = packing.shard_bytes // packing.params[0].itemsize
    runs = _runs(packing)
    if runs is not None:
        # Zeros of the gradients' dtype: one kernel copies tensors of one dtype.
        new_zeros = next(iter(given.values())).new_zeros
        parts = _with_gaps(runs, num_rows * num_columns)
        row = [given[i] if i in given else new_zeros(numel) for numel, i in parts]
        return lay_in_row(row, dtype)
    if isinstance(packing, EvenPacking):
        columns: list[Tensor] = []
        for numel, index in _with_gaps(_chunks(packing), num_columns):
            blank = zeros((num_rows, numel))
            if index in given:
                blank = _columns(packing, index, given[index].to(dtype), blank)
            columns.append(blank)
        return torch.cat(columns, dim=1)
    matrix = zeros((num_rows, num_columns))
    for index, grad in given.items():
        for stripe in packing.stripes(index):
            stripe.of_rows(matrix).copy_(stripe.of_full(grad.reshape(-1)))
    return matrix


def parts_of(
    packing: Packing,
    grads: tuple[Tensor | None, ...],
    dtype: torch.dtype,
    bounds: Sequence[tuple[int, int]],
) -> list[Tensor]:
    """The matrix of gradients in parts, each with some of its columns, laid end to end.

    For packings in which every parameter lies in one run.
    """
    runs = _runs(packing)
    if runs is None:
        raise InvariantError(f"expected parameters that lie in one run each, got {packing}")
    num_columns = packing.shard_bytes // packing.params[0].itemsize
    new_zeros = next(grad for grad in grads if grad is not None).new_zeros
    pieces: list[tuple[int, Tensor]] = []
    start = 0
    for numel, index in _with_gaps(runs, packing.world_size * num_columns):
        grad = grads[index] if index >= 0 else None
        pieces.append((start, new_zeros(numel) if grad is None else grad.reshape(-1)))
        start += numel
    parts: list[Tensor] = []
    for first, stop in bounds:
        row: list[Tensor] = []
        for rank in range(packing.world_size):
            lowest, highest = rank * num_columns + first, rank * num_columns + stop
            for at, piece in pieces:
                begin, end = max(lowest - at, 0), min(highest - at, piece.numel())
                if begin < end:
                    row.append(piece[begin:end])
        parts.append(lay_in_row(row, dtype))
    return parts


def lies_in_runs(packing: Packing) -> bool:
    """Whether every parameter lies in one run of the gathered rows."""
    return _runs(packing) is not None


def _runs(packing: Packing) -> Runs | None:
    """Where parameters lie in the gathered rows; None if some do not lie in one run."""
    offsets = [packing.gathered_offset(index) for index in range(len(packing.params))]
    runs = {
        index: (offset // param.itemsize, param.numel)
        for index, (param, offset) in enumerate(zip(packing.params, offsets, strict=True))
        if offset is not None
    }
    return runs if len(runs) == len(offsets) else None


def _chunks(packing: EvenPacking) -> Runs:
    """Where parameters lie in every row."""
    places = [place_of(packing, index, 0) for index in range(len(packing.params))]
    return {index: (start, end - start) for index, (start, end, _) in enumerate(places)}


def _with_gaps(runs: Runs, length: int) -> list[tuple[int, int]]:
    """The sizes of runs and of the gaps between them, each with its parameter; -1 for gaps."""
    pieces = {i: (start, (numel,)) for i, (start, numel) in runs.items() if numel}
    shapes, wanted = cut(pieces, length)
    index_at = {at: index for index, at in wanted}
    return [(numel, index_at.get(at, -1)) for at, (numel,) in enumerate(shapes)]


def _columns(packing: EvenPacking, index: int, grad: Tensor, blank: Tensor) -> Tensor:
    """A gradient as the columns that are its own: each rank's piece in its row."""
    flat = grad.reshape(-1)
    if packing.dims[index] == 0:
        missing = blank.numel() - flat.numel()
        return torch.nn.functional.pad(flat, (0, missing)).view(blank.shape)
    for stripe in packing.stripes(index):
        replace(stripe, shard_offset=0).of_rows(blank).copy_(stripe.of_full(flat))
    return blank


def lay_in_row(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """All elements of some tensors in their order, cast; one node of a graph."""
    define()
    return torch.ops.shoal.lay_in_row(parts, dtype)


@functools.cache
def define() -> torch.library.Library:
    """Make the operator known to torch, once."""
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(_SCHEMA, tags=(torch.Tag.flexible_layout,))
    library.impl("lay_in_row", _lay_in_row, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::lay_in_row", _row_for, lib=library)
    return library


def _lay_in_row(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    row = _row_for(parts, dtype)
    targets = row.split_with_sizes([part.numel() for part in parts])
    kernels.foreach_copy(list(targets), [part.reshape(-1) for part in parts])
    return row


def _row_for(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return parts[0].new_empty(sum(part.numel() for part in parts), dtype=dtype)
