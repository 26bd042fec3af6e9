"""A rank's regions in a safetensors file, written once, in blocks.

Files are written here rather than by the library's `save_file`: block by block, so that a tensor
on an accelerator needs one block of host memory, with its checksum taken on the way and an fsync
at the end. Any safetensors reader opens them; `reader` is ours.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.checkpoint.checksum import Checksum
from shoal.checkpoint.disk import write_synced
from shoal.checkpoint.metadata import (
    MAX_HEADER_BYTES,
    StoredFile,
    StoredRegion,
    file_name,
)
from shoal.checkpoint.placement import Part, Share
from shoal.errors import CheckpointError
from shoal.layout.region import Region

BLOCK_BYTES = 16 << 20
"""A region is cut along its outer dims into blocks of at most this size.

A rank that loads on another world size reads and checks whole blocks; small ones keep what it
reads in vain, and the memory it needs for that, small; large ones keep the manifest short.
"""

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""The dtypes that a checkpoint can hold, as safetensors calls them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A region that is written under one key, and what gives its values when its turn comes."""

    name: str
    region: Region
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    @property
    def key(self) -> str:
        """Name and offsets, which together are unique within a checkpoint."""
        return f"{self.name}@{','.join(map(str, self.region.offsets))}"

    @property
    def num_bytes(self) -> int:
        """How many bytes the block takes in the file."""
        return self.region.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """A file that is on the disk, and the regions in it, each with the name of its tensor."""

    name: str
    file: StoredFile
    regions: tuple[tuple[str, StoredRegion], ...]


def blocks_of(name: str, share: Share) -> Iterator[Block]:
    """Cut what this rank writes of a tensor into blocks."""
    for part in share.parts if share.writes else ():
        yield from _blocks_of_part(name, part)


def _blocks_of_part(name: str, part: Part) -> Iterator[Block]:
    dtype = part.local.dtype
    for region in block_regions(name, part.region, dtype):
        values = part.local[region.relative_to(part.region).slices]
        yield Block(name=name, region=region, dtype=dtype, read=lambda values=values: values)


def block_regions(name: str, region: Region, dtype: torch.dtype) -> Iterator[Region]:
    """Cut a region along its outer dims into regions of at most `BLOCK_BYTES`."""
    if dtype not in CODES:
        raise NotImplementedError(f"{name!r}: checkpoints of {dtype} are not supported")
    if region.numel:
        yield from _cut(region, dtype.itemsize, 0)


def _cut(region: Region, itemsize: int, dim: int) -> Iterator[Region]:
    """Cut along a dim, or along the next one where a single row of this one is too large."""
    if dim == len(region.sizes):
        yield region
        return
    size = region.sizes[dim]
    rows = BLOCK_BYTES // (region.numel // size * itemsize)
    for start in range(0, size, max(1, rows)):
        offsets, sizes = list(region.offsets), list(region.sizes)
        offsets[dim] += start
        sizes[dim] = min(max(1, rows), size - start)
        block = Region(offsets=tuple(offsets), sizes=tuple(sizes))
        yield from [block] if rows else _cut(block, itemsize, dim + 1)


def write_blocks(folder: Path, rank: int, blocks: Sequence[Block]) -> WrittenFile | None:
    """Write a rank's file, unless there is nothing to write; say what is in it."""
    if not blocks:
        return None
    name = file_name(rank)
    # Wide elements first, so that every block starts at a multiple of its element size.
    blocks = sorted(blocks, key=lambda block: -block.dtype.itemsize)
    header = header_of({block.key: block for block in blocks}, folder / name)
    stored: list[tuple[str, StoredRegion]] = []
    num_bytes = len(header) + sum(block.num_bytes for block in blocks)

    def chunks() -> Iterator[bytes | memoryview]:
        yield header
        start = len(header)
        for block in blocks:
            data = raw_bytes(block.read())
            found = StoredRegion(
                file=name,
                start=start,
                region=block.region,
                crc32=Checksum.FOLDED.of(data),
            )
            stored.append((block.name, found))
            start += len(data)
            yield data

    write_synced(folder / name, chunks(), num_bytes)
    file = StoredFile(
        num_bytes=num_bytes, header_bytes=len(header), header_crc32=zlib.crc32(header)
    )
    return WrittenFile(name=name, file=file, regions=tuple(stored))


def header_of(
    blocks: Mapping[str, Block], path: Path, about: Mapping[str, str] | None = None
) -> bytes:
    """The length of a JSON table, then the table, padded so that data starts aligned."""
    table: dict[str, object] = {"__metadata__": about} if about else {}
    end = 0
    for key, block in blocks.items():
        start, end = end, end + block.num_bytes
        table[key] = {
            "dtype": CODES[block.dtype],
            "shape": list(block.region.sizes),
            "data_offsets": [start, end],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) + 8 > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"the header of {path} would have {len(text):,} bytes, and {MAX_HEADER_BYTES:,} is "
            "the most that is read back: save fewer tensors in one checkpoint, or on more ranks"
        )
    return len(text).to_bytes(8, "little") + text


def raw_bytes(values: torch.Tensor) -> memoryview:
    """A tensor's elements in row-major order, as they are on the disk."""
    values = values.detach().cpu().contiguous()
    return values.reshape(-1).view(torch.uint8).numpy().data
