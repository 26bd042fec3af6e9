"""Rows of a sharded table, brought to whoever looks them up.

    indices ──those of a block's rows──▶ its holder: looks up ──▶ rows of a plain table

A rank asks for each row once, however often it needs it, and each element of a row travels once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from shoal.layout.region import Region
from shoal.tensor.matrix import held_by_rank, needs_gradient, own_blocks
from shoal.tensor.sharded import ShardedTensor
from shoal.tensor.swap import Block, Swaps, announce, place
from shoal.tensor.totals import add_up, largest

_EPSILON = 1e-7
"""What torch adds to a norm that it divides by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renorm:
    """Rows that are looked up get at most this norm first, in place."""

    max_norm: float
    order: float

    def __post_init__(self) -> None:
        if self.max_norm <= 0.0:
            raise ValueError(f'"max_norm" must be larger than zero! Got {self.max_norm}')


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The rows that a rank needs, each once, and where in them each of its indices is."""

    indices: Tensor
    rows: Tensor
    positions: Tensor

    def position_of(self, index: int | None) -> int | None:
        """Where the row of an index is; None where the rank does not need it."""
        found = [] if index is None else (self.indices == index).nonzero().tolist()
        return found[0][0] if found else None


def look_up(table: ShardedTensor, indices: Tensor, *, renorm: Renorm | None, reason: str) -> Found:
    """Bring the rows of the indices here: collective.

    All ranks raise where one asks for a row that is not there.
    """
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
    if renorm is not None:
        _renormalise(table, wanted, renorm)
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
    return Found(indices=distinct, rows=rows, positions=positions)


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


def _spans(distinct: Tensor, held: list[tuple[Region, ...]]) -> list[list[Block]]:
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
    answers: list[list[Tensor]] = [[] for _ in numels]
    for index, (_, block) in enumerate(blocks):
        rows = functional.embedding(wanted[index].to(block.device), block)
        for answer, part in zip(answers, rows.split([row[index] for row in numels]), strict=True):
            answer.append(part)
    return answers


def _length(span: slice) -> int:
    return span.stop - span.start


@torch.no_grad()
def _renormalise(table: ShardedTensor, wanted: list[Tensor], renorm: Renorm) -> None:
    """Scale the rows that any rank asked for, where their norm is too large.

    A row may lie on several ranks, so norms of all rows are put together.
    """
    placement = table.placement
    is_largest = math.isinf(renorm.order)
    parts = torch.zeros(table.shape[0], dtype=torch.float64, device=table.device)
    rows_of = [torch.unique(asked).to(table.device) for asked in wanted]
    for rows, (region, block) in zip(rows_of, table.parts(), strict=True):
        own = torch.linalg.vector_norm(block[rows].double(), renorm.order, dim=1)
        whole = parts[slice(*_row_bounds(region))]
        whole[rows] = (
            torch.maximum(whole[rows], own) if is_largest else (whole[rows] + own.pow(renorm.order))
        )
    norms = (
        largest(parts, placement) if is_largest else add_up(parts, placement).pow(1 / renorm.order)
    )
    scale = torch.where(norms > renorm.max_norm, renorm.max_norm / (norms + _EPSILON), 1.0)
    for rows, (region, block) in zip(rows_of, table.parts(), strict=True):
        block[rows] *= scale[slice(*_row_bounds(region))][rows].to(block.dtype).unsqueeze(1)
