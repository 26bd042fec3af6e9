"""Full parameters out of gathered rows, and gradients into them, by calls that a graph can have.

`lay_in_row` is an operator of its own: tensors end to end in one row of another dtype. As casts and
a `cat` it would be a kernel for every tensor once a compiler has been over it, and a launch on the
host for each. This is one kernel for all of them, which CUDA graphs can record.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal._torch import kernels
from shoal.layout.even import EvenPacking
from shoal.layout.packing import Packing

NAMESPACE = "shoal"
_SCHEMA = "lay_in_row(Tensor[] parts, ScalarType dtype) -> Tensor"
Zeros = Callable[[tuple[int, ...]], Tensor]
Piece = tuple[int, int, tuple[int, ...]]
"""Where a parameter's piece begins and ends in a rank's shard, and its shape."""


def place_of(packing: Packing, index: int, rank: int) -> Piece:
    """Find a parameter's piece in a rank's shard."""
    piece = packing.piece(index, rank)
    start = piece.offset_bytes // packing.params[index].dtype.itemsize
    return start, start + piece.numel, tuple(piece.shape)


def full_in(packing: Packing, index: int, rows: Tensor) -> Tensor:
    """A parameter in the gathered rows: a view where it lies in one run."""
    param = packing.params[index]
    offset = packing.gathered_offset(index)
    if offset is not None:
        start = offset // param.dtype.itemsize
        return rows.view(-1)[start : start + param.numel].view(param.shape)
    if isinstance(packing, EvenPacking) and packing.dims[index] == 0:
        piece = packing.piece(index, 0)
        start = piece.offset_bytes // param.dtype.itemsize
        chunks = rows[:, start : start + piece.numel].reshape(-1)
        return chunks[: param.numel].view(param.shape)
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
    num_rows, num_columns = packing.world_size, packing.shard_bytes // _itemsize(packing)
    runs = _runs(packing)
    if runs is not None:
        return _row(packing, runs, grads, num_rows * num_columns, dtype)
    if not isinstance(packing, EvenPacking):
        matrix = zeros((num_rows, num_columns))
        for index, grad in enumerate(grads):
            if grad is not None:
                for stripe in packing.stripes(index):
                    stripe.of_rows(matrix).copy_(stripe.of_full(grad.reshape(-1)))
        return matrix
    parts: list[Tensor] = []
    end = 0
    for index in sorted(range(len(grads)), key=lambda i: packing.piece(i, 0).offset_bytes):
        piece, grad = packing.piece(index, 0), grads[index]
        start = piece.offset_bytes // _itemsize(packing)
        if piece.numel == 0:
            continue
        if start > end:
            parts.append(zeros((num_rows, start - end)))
        shape = (num_rows, piece.numel)
        if grad is None:
            parts.append(zeros(shape))
        else:
            parts.append(_columns(packing, index, grad.to(dtype).reshape(-1), start, zeros(shape)))
        end = start + piece.numel
    if num_columns > end:
        parts.append(zeros((num_rows, num_columns - end)))
    return torch.cat(parts, dim=1)


def _row(
    packing: Packing,
    runs: list[tuple[int, int]],
    grads: tuple[Tensor | None, ...],
    numel: int,
    dtype: torch.dtype,
) -> Tensor:
    """Gradients end to end, where each parameter lies in one run."""
    # Of their dtype: one kernel copies tensors of one dtype.
    given = next(grad for grad in grads if grad is not None)
    pieces: list[Tensor] = []
    end = 0
    for start, index in runs:
        if start > end:
            pieces.append(given.new_zeros(start - end))
        grad, end = grads[index], start + packing.params[index].numel
        pieces.append(given.new_zeros(end - start) if grad is None else grad)
    if numel > end:
        pieces.append(given.new_zeros(numel - end))
    return lay_in_row(pieces, dtype)


def _columns(packing: EvenPacking, index: int, flat: Tensor, start: int, blank: Tensor) -> Tensor:
    """A gradient as the columns that are its own: each rank's piece in its row."""
    if packing.dims[index] == 0:
        missing = blank.numel() - flat.numel()
        return torch.nn.functional.pad(flat, (0, missing)).view(blank.shape)
    for stripe in packing.stripes(index):
        ranks = slice(stripe.first_rank, stripe.first_rank + stripe.num_ranks)
        at = stripe.shard_offset - start
        target = blank[ranks, at : at + stripe.num_bands * stripe.numel]
        target.copy_(stripe.of_full(flat).reshape(stripe.num_ranks, -1))
    return blank


def _itemsize(packing: Packing) -> int:
    return packing.params[0].dtype.itemsize


def _runs(packing: Packing) -> list[tuple[int, int]] | None:
    """Where parameters begin in the gathered rows, in order; None if some do not lie in one run."""
    runs: list[tuple[int, int]] = []
    for index, param in enumerate(packing.params):
        offset = packing.gathered_offset(index)
        if offset is None:
            return None
        if param.numel:
            runs.append((offset // param.dtype.itemsize, index))
    return sorted(runs)


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
