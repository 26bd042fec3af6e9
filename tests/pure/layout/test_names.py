"""What the folder exports, and the picture in its docstring."""

from __future__ import annotations

import shoal.layout
from pure.layout.strategies import spec
from shoal.layout import Even, Layout, Packing, Rows, Whole

PARAMS = [spec("w", 10, 4), spec("b", 10)]


def draw(packing: Packing, rank: int) -> str:
    """A rank's shard as the docstring draws it."""
    text, end = "", 0
    for param, piece in zip(packing.params, packing.pieces(rank), strict=True):
        if not piece.regions:
            continue
        (region,) = piece.regions
        stop = piece.offset_bytes + piece.numel * param.itemsize
        gap = "|...." if piece.offset_bytes > end else ""
        rows = f"{region.offsets[0]}:{region.stops[0]}"
        text += f"{gap}|{piece.offset_bytes} {param.name}[{rows}] {stop}"
        end = stop
    return text + (f"|....|{packing.shard_bytes}" if end < packing.shard_bytes else "|")


def test_the_picture_is_true() -> None:
    lines = (shoal.layout.__doc__ or "").splitlines()
    layouts: list[Layout] = [Even(), Rows(), Whole()]
    for layout in layouts:
        packing = layout.pack(PARAMS, 2)
        at = next(i for i, line in enumerate(lines) if line.strip().startswith(repr(layout)[:4]))
        for rank in range(2):
            assert lines[at + rank].endswith(f"rank {rank}  {draw(packing, rank)}")
    rows = Rows().pack(PARAMS, 2)
    assert [rows.gathered_offset(index) for index in range(2)] == [0, 192]


def test_exported_names_are_sorted_and_there() -> None:
    names = shoal.layout.__all__
    assert names == sorted(names)
    assert all(hasattr(shoal.layout, name) for name in names)
    assert len(names) <= 15
