"""A rank's regions in a safetensors file: written once, in blocks, and read back checked.

Files are written here rather than by the library's `save_file`: block by block, so that a tensor
on an accelerator needs one block of host memory, with its checksum taken on the way and an fsync
at the end. Any safetensors reader opens them; ours is the library's.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from shoal.checkpoint.disk import write_synced
from shoal.checkpoint.metadata import StoredRegion, TensorEntry, file_name
from shoal.checkpoint.placement import Part, Share
from shoal.errors import CheckpointError
from shoal.layout.region import Region

BLOCK_BYTES = 16 << 20
"""A region is cut along its first dim into blocks of about this size.

A rank that loads on another world size reads and checks whole blocks; small ones keep what it
reads in vain small, large ones keep the manifest short.
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
}
"""The dtypes that a checkpoint can hold, as safetensors calls them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A region that is written under one key, and the local memory that holds it."""

    name: str
    region: Region
    values: torch.Tensor

    @property
    def key(self) -> str:
        """Name and offsets, which together are unique within a checkpoint."""
        return f"{self.name}@{','.join(map(str, self.region.offsets))}"

    @property
    def nbytes(self) -> int:
        """How many bytes the block takes in the file."""
        return self.values.numel() * self.values.dtype.itemsize


def blocks_of(name: str, share: Share) -> Iterator[Block]:
    """Cut what this rank writes of a tensor into blocks."""
    if share.dtype not in CODES:
        raise NotImplementedError(f"{name!r}: checkpoints of {share.dtype} are not supported")
    for part in share.parts if share.writes else ():
        yield from _blocks_of_part(name, part)


def _blocks_of_part(name: str, part: Part) -> Iterator[Block]:
    if not part.region.sizes:
        yield Block(name=name, region=part.region, values=part.local)
        return
    num_rows, *inner = part.region.sizes
    row_bytes = part.region.numel // num_rows * part.local.dtype.itemsize
    rows = max(1, BLOCK_BYTES // row_bytes)
    for start in range(0, num_rows, rows):
        values = part.local[start : start + rows]
        offsets = (part.region.offsets[0] + start, *part.region.offsets[1:])
        region = Region(offsets=offsets, sizes=(values.shape[0], *inner))
        yield Block(name=name, region=region, values=values)


def write_blocks(
    folder: Path, rank: int, blocks: Sequence[Block]
) -> list[tuple[str, StoredRegion]]:
    """Write a rank's file, unless there is nothing to write; say what is in it, by tensor."""
    if not blocks:
        return []
    # Wide elements first, so that every block starts at a multiple of its element size.
    blocks = sorted(blocks, key=lambda block: -block.values.dtype.itemsize)
    stored: list[tuple[str, StoredRegion]] = []

    def chunks() -> Iterator[bytes | memoryview]:
        yield _header(blocks)
        for block in blocks:
            data = _bytes(block.values)
            region = StoredRegion(
                file=file_name(rank), key=block.key, region=block.region, crc32=zlib.crc32(data)
            )
            stored.append((block.name, region))
            yield data

    write_synced(folder / file_name(rank), chunks())
    return stored


def _header(blocks: Sequence[Block]) -> bytes:
    """The length of a JSON table, then the table, padded so that data starts aligned."""
    table: dict[str, object] = {}
    end = 0
    for block in blocks:
        start, end = end, end + block.nbytes
        table[block.key] = {
            "dtype": CODES[block.values.dtype],
            "shape": list(block.region.sizes),
            "data_offsets": [start, end],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(values: torch.Tensor) -> memoryview:
    values = values.detach().cpu().contiguous()
    return values.reshape(-1).view(torch.uint8).numpy().data


class RegionReader:
    """Reads regions of a checkpoint; a file is opened once and mapped, not read whole."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.clear()
        self._open.close()

    def read(self, name: str, entry: TensorEntry, stored: StoredRegion) -> torch.Tensor:
        """Give a region's values in host memory, shape and dtype checked, values not."""
        from safetensors import SafetensorError

        path = self._folder / stored.file
        try:
            values = self._file(stored.file).get_tensor(stored.key)
        except (OSError, SafetensorError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{path}: tensor {name!r} cannot be read: {error}. {_MEND}"
            ) from error
        found = (values.dtype, tuple(values.shape))
        if found != (entry.dtype, stored.region.sizes):
            raise CheckpointError(
                f"{path}: tensor {name!r} should be stored as {entry.dtype} "
                f"{stored.region.sizes}, found {found[0]} {found[1]}. {_MEND}"
            )
        return values

    def verify(self, name: str, entry: TensorEntry, stored: StoredRegion) -> None:
        """Read a region and compare its checksum with the manifest's."""
        found = zlib.crc32(_bytes(self.read(name, entry, stored)))
        if found != stored.crc32:
            raise CheckpointError(
                f"{self._folder / stored.file}: tensor {name!r} at {stored.region.offsets} has "
                f"checksum {found:08x}, the manifest says {stored.crc32:08x}. {_MEND}"
            )

    def _file(self, name: str) -> Any:
        from safetensors import safe_open

        if name not in self._files:
            opened = safe_open(self._folder / name, framework="pt")
            self._files[name] = self._open.enter_context(opened)
        return self._files[name]


_MEND = "The file is damaged or incomplete: copy the checkpoint anew, or load an earlier one"
