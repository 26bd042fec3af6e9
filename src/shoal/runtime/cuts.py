"""A row of elements cut into pieces that are wanted, and gaps between them."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

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
    blank = torch.empty(1)
    return [blank.expand(shape) for shape in shapes]
