"""`embedding` and `embedding_bag` with a sharded weight: torch's own, on the rows that are needed.

    indices ──those of a block's rows──▶ its holder: looks up ──▶ rows of a plain table

Every rank has indices of its own and gets its own output. The rows come from the ranks that hold
them, and torch's operation runs on those as on a small weight. So results have the bits of the
unsharded operation in every mode. A rank asks for each row once, however often it needs it, and
each element of a row travels once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from shoal.doors.sharded_tensor.block_exchange import (
    MatrixBlock,
    Swaps,
    announce,
    check_matrix,
    held_by_rank,
    needs_gradient,
    own_blocks,
    place,
)
from shoal.layout.region import Region
from shoal.tensor.reductions import add_up, largest
from shoal.tensor.sharded import ShardedTensor

_EPSILON = 1e-7
"""torch adds this to a norm before it divides by it."""


def embedding(
    input: Tensor,
    weight: ShardedTensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Do as `torch.nn.functional.embedding` does with the whole weight: collective.

    `max_norm` applies to the rows that any rank looks up, before any of them looks.
    """
    _check(input, weight, scale_grad_by_freq, sparse)
    found = look_up(
        weight,
        input,
        max_norm=max_norm,
        norm_type=norm_type,
        reason="embedding with a sharded weight",
    )
    return functional.embedding(
        found.positions, found.rows, found.position_of(_row(padding_idx, weight))
    )


def embedding_bag(
    input: Tensor,
    weight: ShardedTensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Do as `torch.nn.functional.embedding_bag` does with the whole weight: collective."""
    _check(input, weight, scale_grad_by_freq, sparse)
    _check_bags(input, offsets, mode, per_sample_weights, include_last_offset)
    found = look_up(
        weight,
        input,
        max_norm=max_norm,
        norm_type=norm_type,
        reason="embedding_bag with a sharded weight",
    )
    return functional.embedding_bag(
        # Offsets and indices have one dtype.
        found.positions.to(input.dtype),
        found.rows,
        offsets,
        mode=mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
        padding_idx=found.position_of(_row(padding_idx, weight)),
    )


def _check(input: object, weight: object, scale_grad_by_freq: bool, sparse: bool) -> None:
    if not isinstance(input, Tensor) or isinstance(input, ShardedTensor):
        raise TypeError(f"input need to be torch.Tensor, this rank's own; got {type(input)}")
    check_matrix(weight)
    if scale_grad_by_freq or sparse:
        flag = "scale_grad_by_freq" if scale_grad_by_freq else "sparse"
        raise RuntimeError(f'nn.Embedding weight sharded with flag on "{flag}" not supported!')


def _check_bags(
    input: Tensor,
    offsets: object,
    mode: str,
    per_sample_weights: object,
    include_last_offset: bool,
) -> None:
    for name, given in (("offsets", offsets), ("per_sample_weights", per_sample_weights)):
        if given is not None and not isinstance(given, Tensor):
            raise TypeError(f"{name} need to be torch.Tensor, got {type(given)}")
    if input.dim() > 2:
        raise ValueError(f"Input more than 2 dims not supported, got {input.dim()}")
    if offsets is not None and input.dim() != 1:
        raise ValueError(
            f"Input dimension needs to be exactly 1 dim with offsets, got {input.dim()}"
        )
    if offsets is None and include_last_offset:
        raise ValueError('offsets is required for flag "include_last_offset"!')
    if offsets is None and input.dim() == 1:
        raise ValueError("offsets is required for 1D input")
    if isinstance(offsets, Tensor) and include_last_offset and offsets[-1] != input.shape[0]:
        raise ValueError(
            "offsets need to have the input size in the end when the flag "
            f'"include_last_offset" is on! Expected {input.shape[0]}, got {int(offsets[-1])}'
        )
    if isinstance(per_sample_weights, Tensor) and per_sample_weights.shape != input.shape:
        raise ValueError(
            f"per_sample_weights size {per_sample_weights.size()} not equal to input size "
            f"{input.size()}"
        )
    if mode not in ("sum", "mean", "max"):
        raise ValueError(f"mode '{mode}' is not supported: expected sum, mean or max")


def _row(padding_idx: int | None, weight: ShardedTensor) -> int | None:
    if padding_idx is None:
        return None
    if not -weight.shape[0] <= padding_idx < weight.shape[0]:
        raise AssertionError(
            f"padding_idx must be within the {weight.shape[0]} rows of the weight, "
            f"got {padding_idx}"
        )
    return padding_idx % weight.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRows:
    """The rows that a rank needs, each once, and where in them each of its indices is."""

    indices: Tensor
    rows: Tensor
    positions: Tensor

    def position_of(self, index: int | None) -> int | None:
        """The position of an index's row; None where the rank does not need it."""
        found = [] if index is None else (self.indices == index).nonzero().tolist()
        return found[0][0] if found else None


def look_up(
    table: ShardedTensor,
    indices: Tensor,
    *,
    max_norm: float | None,
    norm_type: float | None,
    reason: str,
) -> FoundRows:
    """Bring the rows of the indices here, after they got at most `max_norm` in place: collective.

    All ranks raise where one asks for a row that is not there.
    """
    if max_norm is not None and max_norm <= 0.0:
        raise ValueError(f'"max_norm" must be larger than zero! Got {max_norm}')
    group, held = table.placement.group, held_by_rank(table)
    problem = _out_of_range(indices, table)
    distinct, positions = torch.unique(
        indices.new_empty(0) if problem is not None else indices, return_inverse=True
    )
    distinct = distinct.long()
    spans = _spans(distinct, held)
    numels = announce(
        [[_length(rows) for rows, _ in row] for row in spans],
        problem,
        group,
        table.device,
        reason=reason,
    )
    swaps = Swaps(group, reason)
    asked = swaps.swap([[distinct[rows] for rows, _ in row] for row in spans], numels, distinct)
    blocks = own_blocks(table)
    wanted = [
        torch.cat([row[index] for row in asked]) - region.offsets[0]
        for index, (region, _) in enumerate(blocks)
    ]
    if max_norm is not None:
        _renormalise(table, wanted, max_norm, 2.0 if norm_type is None else norm_type)
    like = torch.empty(0, dtype=table.dtype, device=indices.device)
    answers = swaps.swap(
        _answers(blocks, wanted, numels),
        [[_length(rows) * _length(columns) for rows, columns in row] for row in spans],
        like,
        needs_gradient=needs_gradient(table),
    )
    rows = place(
        [block for row in spans for block in row],
        [answer for row in answers for answer in row],
        (len(distinct), table.shape[1]),
        like,
    )
    return FoundRows(indices=distinct, rows=rows, positions=positions)


def _out_of_range(indices: Tensor, table: ShardedTensor) -> Exception | None:
    if indices.numel() == 0:
        return None
    low, high = (int(bound) for bound in indices.aminmax())
    if low >= 0 and high < table.shape[0]:
        return None
    return ValueError(
        f"Index out of range in Input: expected rows of [0, {table.shape[0]}), got indices from "
        f"{low} to {high}"
    )


def _spans(distinct: Tensor, held: list[tuple[Region, ...]]) -> list[list[MatrixBlock]]:
    """For each block of each rank which of the rows it has (they are in order), and columns."""
    bounds = [bound for row in held for region in row for bound in _row_bounds(region)]
    edges = torch.tensor(bounds, dtype=torch.int64, device=distinct.device)
    found = iter(torch.searchsorted(distinct, edges).tolist())
    return [[(slice(next(found), next(found)), region.slices[1]) for region in row] for row in held]


def _row_bounds(region: Region) -> tuple[int, int]:
    return region.offsets[0], region.stops[0]


def _answers(
    blocks: list[tuple[Region, Tensor]], wanted: list[Tensor], numels: list[list[int]]
) -> list[list[Tensor]]:
    """For each rank what it asked of each block of this one."""
    answers: list[tuple[Tensor, ...]] = []
    for index, (_, block) in enumerate(blocks):
        rows = functional.embedding(wanted[index].to(block.device), block)
        answers.append(rows.split([row[index] for row in numels]))
    return [[answer[rank] for answer in answers] for rank in range(len(numels))]


def _length(span: slice) -> int:
    return span.stop - span.start


@torch.no_grad()
def _renormalise(table: ShardedTensor, wanted: list[Tensor], max_norm: float, order: float) -> None:
    """Scale the rows that any rank asked for, where their norm is too large.

    A row may lie on several ranks, so norms of all rows are put together.
    """
    placement = table.placement
    is_largest = math.isinf(order)
    parts = torch.zeros(table.shape[0], dtype=torch.float64, device=table.device)
    rows_of = [torch.unique(asked).to(table.device) for asked in wanted]
    for rows, (region, block) in zip(rows_of, table.parts(), strict=True):
        own = torch.linalg.vector_norm(block[rows].double(), order, dim=1)
        whole = parts[slice(*_row_bounds(region))]
        whole[rows] = (
            torch.maximum(whole[rows], own) if is_largest else (whole[rows] + own.pow(order))
        )
    norms = largest(parts, placement) if is_largest else add_up(parts, placement).pow(1 / order)
    scale = torch.where(norms > max_norm, max_norm / (norms + _EPSILON), 1.0)
    for rows, (region, block) in zip(rows_of, table.parts(), strict=True):
        block[rows] *= scale[slice(*_row_bounds(region))][rows].to(block.dtype).unsqueeze(1)
