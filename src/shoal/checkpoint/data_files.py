"""Data files: a rank's regions in one safetensors file, each written and read with its checksum.

Files are written here rather than by the library's `save_file`: region by region, so that a tensor
on an accelerator needs one region of host memory, with its checksum taken on the way. Any
safetensors reader opens them.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

import torch

from shoal.checkpoint.checksum import CHUNK_BYTES, Checksum
from shoal.checkpoint.manifest import (
    CODES,
    MAX_HEADER_BYTES,
    Manifest,
    StoredFile,
    StoredRegion,
    file_name,
)
from shoal.checkpoint.storage import Checkpoint, OpenFile
from shoal.errors import CheckpointError
from shoal.layout.region import Region, flat_span
from shoal.layout.spec import round_up

REGION_BYTES = 16 << 20
"""A region is cut along its outer dims into regions of at most this size.

A rank that loads on another world size reads and checks whole regions; small ones keep what it
reads in vain, and the memory it needs for that, small; large ones keep the manifest short.
"""

_ALIGNMENT = 64

Progress = Callable[[int], object]
"""Told the number of bytes that were dealt with since it was last told."""

Take = Callable[[int], torch.Tensor]
"""Gives that many bytes of host memory, aligned for any dtype."""


def fresh(num_bytes: int) -> torch.Tensor:
    """Give new host memory."""
    return torch.empty(num_bytes, dtype=torch.uint8)


def aligned(num_bytes: int) -> int:
    """How many bytes are taken for that many, so that any dtype may follow."""
    return round_up(num_bytes, _ALIGNMENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRegion:
    """A region that is written under one key, and what gives its values when its turn comes."""

    name: str
    region: Region
    dtype: torch.dtype
    source: Callable[[Region], torch.Tensor]

    @property
    def key(self) -> str:
        """Name and offsets, which together are unique within a checkpoint."""
        return f"{self.name}@{','.join(map(str, self.region.offsets))}"

    @property
    def num_bytes(self) -> int:
        """How many bytes the region takes in the file."""
        return self.region.numel * self.dtype.itemsize

    def read(self) -> torch.Tensor:
        """Give the values."""
        return self.source(self.region)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """A file that is on the disk, and the regions in it."""

    name: str
    file: StoredFile
    regions: tuple[StoredRegion, ...]


def plan_regions(
    name: str, region: Region, dtype: torch.dtype, source: Callable[[Region], torch.Tensor]
) -> Iterator[PlannedRegion]:
    """Cut a region along its outer dims into regions of at most `REGION_BYTES`, to be written."""
    if dtype not in CODES:
        raise NotImplementedError(f"{name!r}: checkpoints of {dtype} are not supported")
    for part in _cut(region, dtype.itemsize, 0) if region.numel else ():
        yield PlannedRegion(name=name, region=part, dtype=dtype, source=source)


def _cut(region: Region, itemsize: int, dim: int) -> Iterator[Region]:
    """Cut along a dim, or along the next one where a single row of this one is too large."""
    if dim == len(region.sizes):
        yield region
        return
    size = region.sizes[dim]
    rows = REGION_BYTES // (region.numel // size * itemsize)
    for start in range(0, size, max(1, rows)):
        offsets, sizes = list(region.offsets), list(region.sizes)
        offsets[dim] += start
        sizes[dim] = min(max(1, rows), size - start)
        part = Region(offsets=tuple(offsets), sizes=tuple(sizes))
        yield from [part] if rows else _cut(part, itemsize, dim + 1)


def by_width(planned: Iterable[PlannedRegion]) -> list[PlannedRegion]:
    """Wide elements first, so that every region starts at a multiple of its element size."""
    return sorted(planned, key=lambda item: -item.dtype.itemsize)


def write_regions(
    checkpoint: Checkpoint,
    rank: int,
    planned: Sequence[PlannedRegion],
    progress: Progress | None = None,
) -> WrittenFile | None:
    """Write a rank's file, unless there is nothing to write; say what is in it."""
    if not planned:
        return None
    name = file_name(rank)
    stored: list[StoredRegion] = []

    def note(item: PlannedRegion, start: int, data: memoryview) -> None:
        region = StoredRegion(
            name=item.name,
            dtype=item.dtype,
            file=name,
            start=start,
            region=item.region,
            crc32=Checksum.FOLDED.of(data),
        )
        stored.append(region)
        if progress is not None:
            progress(len(data))

    file = write_file(checkpoint, name, {item.key: item for item in by_width(planned)}, note)
    return WrittenFile(name=name, file=file, regions=tuple(stored))


def write_file(
    checkpoint: Checkpoint,
    name: str,
    planned: Mapping[str, PlannedRegion],
    note: Callable[[PlannedRegion, int, memoryview], object],
    about: Mapping[str, str] | None = None,
) -> StoredFile:
    """Write regions by their keys; `note` is told of each, at which byte it starts, and its bytes.

    `about` is what the header says of the file as a whole.
    """
    header = _header(planned, checkpoint.locate(name), about)
    num_bytes = len(header) + sum(item.num_bytes for item in planned.values())

    def chunks() -> Iterator[bytes | memoryview]:
        yield header
        start = len(header)
        for item in planned.values():
            data = raw_bytes(item.read())
            note(item, start, data)
            start += len(data)
            yield data

    checkpoint.write(name, chunks(), num_bytes)
    return StoredFile(
        num_bytes=num_bytes, header_bytes=len(header), header_crc32=zlib.crc32(header)
    )


def _header(
    planned: Mapping[str, PlannedRegion], where: str, about: Mapping[str, str] | None
) -> bytes:
    """The length of a JSON table, then the table, padded so that data starts aligned."""
    table: dict[str, object] = {"__metadata__": about} if about else {}
    end = 0
    for key, item in planned.items():
        start, end = end, end + item.num_bytes
        table[key] = {
            "dtype": CODES[item.dtype],
            "shape": list(item.region.sizes),
            "data_offsets": [start, end],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) + 8 > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"the header of {where} would have {len(text):,} bytes, and {MAX_HEADER_BYTES:,} is "
            "the most that is read back: save fewer tensors in one checkpoint, or on more ranks"
        )
    return len(text).to_bytes(8, "little") + text


def raw_bytes(values: torch.Tensor) -> memoryview:
    """A tensor's elements in row-major order, as they are on the disk."""
    values = values.detach().cpu().contiguous()
    return values.reshape(-1).view(torch.uint8).numpy().data


class RegionReader(ExitStack):
    """Reads regions of a checkpoint into host memory.

    A file is opened once, and must have the length and the header that the manifest says. What a
    file says about itself is never parsed, so it cannot mislead anyone.
    """

    def __init__(self, checkpoint: Checkpoint, manifest: Manifest) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._manifest = manifest
        self._files: dict[str, OpenFile] = {}
        self._chunk = fresh(CHUNK_BYTES).numpy().data
        self._region = fresh(0)

    def read(
        self, stored: StoredRegion, parts: Sequence[Region], take: Take = fresh
    ) -> list[torch.Tensor]:
        """Give the values of parts of a region, which are those that were saved.

        All of the region is read, once, and compared with its checksum; the parts alone are kept.
        """
        dtype = stored.dtype
        if len(parts) == 1:
            start, stop = flat_span(stored.region.sizes, parts[0])
            if stop - start == parts[0].numel:
                memory = take(parts[0].numel * dtype.itemsize)
                self._stream(stored, memory.numpy().data, start * dtype.itemsize)
                return [memory.view(dtype).view(parts[0].sizes)]
        values = self._whole(stored)
        found: list[torch.Tensor] = []
        for part in parts:
            memory = take(part.numel * dtype.itemsize).view(dtype).view(part.sizes)
            found.append(memory.copy_(values[part.slices]))
        return found

    def verify(self, stored: StoredRegion) -> None:
        """Compare a region with its checksum, without keeping it in memory."""
        self._stream(stored, memoryview(b""), 0)

    def open_file(self, name: str, tensor: str | None = None) -> OpenFile:
        """Open a file: it is there, as long as it should be, with the header it should have."""
        if name not in self._files:
            with self._naming(name, tensor):
                file = self.enter_context(closing(self._checkpoint.open(name)))
                _check_header(file, self._manifest.files[name])
            self._files[name] = file
        return self._files[name]

    def _whole(self, stored: StoredRegion) -> torch.Tensor:
        """All values of a region, until the next call: in memory that is used again."""
        if self._region.numel() < stored.num_bytes:
            self._region = fresh(stored.num_bytes)
        memory = self._region[: stored.num_bytes]
        self._stream(stored, memory.numpy().data, 0)
        return memory.view(stored.dtype).view(stored.region.sizes)

    def _stream(self, stored: StoredRegion, kept: memoryview, first: int) -> None:
        """Read a region, keep its bytes from `first` on as far as `kept` reaches, and compare.

        Chunk by chunk, so that the checksum finds in the processor's cache what was just read.
        """
        file = self.open_file(stored.file, stored.name)
        found = 0
        for start in range(0, stored.num_bytes, CHUNK_BYTES):
            stop = min(start + CHUNK_BYTES, stored.num_bytes)
            begin, end = max(start, first), min(stop, first + len(kept))
            is_kept = (begin, end) == (start, stop)
            chunk = kept[start - first : stop - first] if is_kept else self._chunk[: stop - start]
            with self._naming(stored.file, stored.name):
                _fill(file, chunk, stored.start + start)
            found = self._manifest.checksum.extend(chunk, found)
            if begin < end and not is_kept:
                kept[begin - first : end - first] = chunk[begin - start : end - start]
        if found != stored.crc32:
            raise CheckpointError(
                f"{self._checkpoint.locate(stored.file)}: tensor {stored.name!r} at "
                f"{stored.region.offsets} has checksum {found:08x}, the manifest says "
                f"{stored.crc32:08x}. {_MEND}"
            )

    @contextmanager
    def _naming(self, file: str, tensor: str | None) -> Iterator[None]:
        """Let an error say which file, and which tensor in it, cannot be read."""
        try:
            yield
        except (OSError, CheckpointError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            what = "" if tensor is None else f"tensor {tensor!r} cannot be read: "
            where = self._checkpoint.locate(file)
            raise CheckpointError(f"{where}: {what}{reason}. {_MEND}") from error


def _fill(file: OpenFile, memory: memoryview, start: int) -> None:
    filled = 0
    while filled < len(memory):
        count = file.read_into(start + filled, memory[filled:])
        if count == 0:
            raise CheckpointError(f"the file ends at byte {start + filled:,}")
        filled += count


def _check_header(file: OpenFile, expected: StoredFile) -> None:
    """Raise unless a file has the length and the header that the manifest says."""
    if file.num_bytes != expected.num_bytes:
        raise CheckpointError(
            f"the file has {file.num_bytes:,} bytes, the manifest says {expected.num_bytes:,}"
        )
    found = zlib.crc32(file.read(0, expected.header_bytes))
    if found != expected.header_crc32:
        raise CheckpointError(
            f"its header has checksum {found:08x}, the manifest says {expected.header_crc32:08x}"
        )


_MEND = "The file is damaged or incomplete: copy the checkpoint anew, or load an earlier one"
