"""What a load costs: host memory for one shard and one block, and each byte read once."""

import gc
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from shoal.checkpoint import data_files, load, read_manifest, save
from shoal.checkpoint.load import STAGED_BYTES, Staging, batches_of
from shoal.checkpoint.shares import Part, Share
from shoal.errors import CheckpointError
from shoal.layout.region import Region, flat_regions

SHAPE = (2560, 8192)
NAMES = ("a", "b")
SMALL = tuple(f"small.{index}" for index in range(24))
STATUS = Path("/proc/self/status")


def share(shape: tuple[int, ...], regions: Sequence[Region]) -> Share:
    """What one of several ranks holds of a tensor, in memory that the process has already."""
    parts = tuple(Part(region=region, local=torch.full(region.sizes, -1.0)) for region in regions)
    return Share(shape=shape, dtype=torch.float32, parts=parts, writes=False)


def half_of_rows(shape: tuple[int, ...]) -> list[Region]:
    return [Region(offsets=(shape[0] // 2, 0), sizes=(shape[0] // 2, shape[1]))]


def half_of_columns(shape: tuple[int, ...]) -> list[Region]:
    return [Region(offsets=(0, 0), sizes=(shape[0], shape[1] // 2))]


def half_of_elements(shape: tuple[int, ...]) -> list[Region]:
    numel = shape[0] * shape[1]
    return [*flat_regions(shape, numel // 4 + 3, 3 * numel // 4 + 3)]


def rss(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", STATUS.read_text())
    assert found
    return 1024 * int(found[1])


def growth(action: Callable[[], object]) -> int:
    """How much memory the process had at its peak over what it had before."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = rss("VmRSS")
    action()
    return rss("VmHWM") - before


@pytest.mark.skipif(not STATUS.exists(), reason="the peak of memory is known on Linux alone")
@pytest.mark.parametrize(
    ("half", "verify_first"),
    [(half_of_rows, True), (half_of_columns, False), (half_of_elements, False)],
)
def test_a_load_takes_less_than_two_shards_of_host_memory(
    large: Path, half: Callable[[tuple[int, ...]], list[Region]], verify_first: bool
) -> None:
    shard_bytes = 4 * SHAPE[0] * SHAPE[1] // 2
    assert shard_bytes > 2 * data_files.REGION_BYTES
    targets = {name: share(SHAPE, half(SHAPE)) for name in NAMES}
    targets |= {name: share((256, 1024), half((256, 1024))) for name in SMALL}
    used = growth(lambda: load(large, targets, verify_first=verify_first))
    assert 0.9 * shard_bytes <= used <= 2 * shard_bytes
    for item in targets.values():
        for part in item.parts:
            assert torch.equal(part.local, whole(item.shape)[part.region.slices])


def whole(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(float(shape[0] * shape[1])).reshape(shape)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large") / "c"
    values = {name: whole(SHAPE) for name in NAMES}
    save(folder, values | {name: whole((256, 1024)) for name in SMALL}, {})
    return folder


def test_no_region_is_read_twice_and_none_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_files, "REGION_BYTES", 80)
    shape = (9, 20)
    save(tmp_path / "c", {"x": whole(shape), "y": whole(shape)}, {})
    manifest = read_manifest(tmp_path / "c")
    seen: Counter[int] = Counter()
    real = os.preadv

    def counted(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        count = real(descriptor, buffers, offset)
        seen.update(range(offset, offset + count))
        return count

    monkeypatch.setattr(os, "preadv", counted)
    # From within a row to within another: three parts, of which each begins in a block's middle.
    target = share(shape, flat_regions(shape, 27, 133))
    load(tmp_path / "c", {"x": target}, include=["x"])
    needed = Counter(
        byte
        for stored in manifest.tensors["x"].regions
        if any(stored.region.overlap(part.region) for part in target.parts)
        for byte in range(stored.start, stored.start + 4 * stored.region.numel)
    )
    assert seen == needed
    for part in target.parts:
        assert torch.equal(part.local, whole(shape)[part.region.slices])


def test_blocks_are_small_however_long_a_row_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "REGION_BYTES", 64)
    region = Region(offsets=(2, 5, 1), sizes=(3, 4, 33))
    planned = data_files.plan_regions("x", region, torch.float32, lambda _: torch.empty(0))
    blocks = [item.region for item in planned]
    assert max(block.numel for block in blocks) == 16
    assert sum(block.numel for block in blocks) == region.numel
    held = torch.zeros(5, 9, 34)
    for block in blocks:
        held[block.slices] += 1
    assert held[region.slices].eq(1).all()


def test_batches_fit_every_rank() -> None:
    quarter = STAGED_BYTES // 4

    def found(*everywhere: list[int]) -> list[tuple[int, bool]]:
        return [(batch.num_tensors, batch.overlaps) for batch in batches_of(everywhere)]

    assert found([]) == []
    assert found([quarter] * 5) == [(2, True), (2, True), (1, True)]
    assert found([1, 1, 1, 1], [quarter, quarter, 3 * quarter, quarter]) == [
        (2, True),
        (1, False),
        (1, True),
    ]
    large = 2 * STAGED_BYTES
    assert found([large, quarter, large, large // 2, 1], [0, 0, 0, 0, 0]) == [
        (1, True),
        (1, False),
        (1, False),
        (1, False),
        (1, True),
    ]
    with pytest.raises(CheckpointError, match=r"different tensors: 2, 1 of them"):
        found([1, 2], [1])


def test_two_batches_never_meet_in_memory() -> None:
    staging = Staging(640)
    front, back = staging.end(0), staging.end(1)
    taken = [front(100), back(60), front(64), back(200), front(8), back(1)]
    for index, memory in enumerate(taken):
        assert memory.data_ptr() % 64 == staging.end(0)(1).data_ptr() % 64
        memory.fill_(index)
    assert all(bool(memory.eq(index).all()) for index, memory in enumerate(taken))
    assert staging.end(0)(1).data_ptr() == taken[0].data_ptr()
    assert staging.end(1)(60).data_ptr() == taken[1].data_ptr()
