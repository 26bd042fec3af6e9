"""Regions read back from a checkpoint's files, each compared with its checksum."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import torch

from shoal.checkpoint.checksum import CHUNK_BYTES
from shoal.checkpoint.disk import open_regular
from shoal.checkpoint.metadata import Manifest, StoredRegion, TensorEntry
from shoal.errors import CheckpointError
from shoal.layout.region import Region, flat_span

Take = Callable[[int], torch.Tensor]
"""Gives that many bytes of host memory, aligned for any dtype."""


def fresh(num_bytes: int) -> torch.Tensor:
    """Give memory that nobody had before."""
    return torch.empty(num_bytes, dtype=torch.uint8)


class RegionReader:
    """Reads regions of a checkpoint into host memory.

    A file is opened once, and must have the length and the header that the manifest says. What a
    file says about itself is never parsed, so it cannot mislead anyone.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest
        self._files: dict[str, BinaryIO] = {}
        self._open = ExitStack()
        self._chunk = fresh(CHUNK_BYTES).numpy().data
        self._block = fresh(0)

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

    def read(
        self,
        name: str,
        entry: TensorEntry,
        stored: StoredRegion,
        parts: Sequence[Region],
        take: Take = fresh,
    ) -> list[torch.Tensor]:
        """Give the values of parts of a region, which are those that were saved.

        All of the region is read, once, and compared with its checksum; the parts alone are kept.
        """
        itemsize = entry.dtype.itemsize
        if len(parts) == 1:
            start, stop = flat_span(stored.region.sizes, parts[0])
            if stop - start == parts[0].numel:
                memory = take(parts[0].numel * itemsize)
                self._stream(name, entry, stored, memory.numpy().data, start * itemsize)
                return [memory.view(entry.dtype).view(parts[0].sizes)]
        values = self._whole(name, entry, stored)
        found: list[torch.Tensor] = []
        for part in parts:
            memory = take(part.numel * itemsize).view(entry.dtype).view(part.sizes)
            found.append(memory.copy_(values[part.slices]))
        return found

    def verify(self, name: str, entry: TensorEntry, stored: StoredRegion) -> None:
        """Compare a region with its checksum, without keeping it in memory."""
        self._stream(name, entry, stored, memoryview(b""), 0)

    def _whole(self, name: str, entry: TensorEntry, stored: StoredRegion) -> torch.Tensor:
        """All values of a region, until the next call: in memory that is used again."""
        num_bytes = stored.region.numel * entry.dtype.itemsize
        if self._block.numel() < num_bytes:
            self._block = fresh(num_bytes)
        memory = self._block[:num_bytes]
        self._stream(name, entry, stored, memory.numpy().data, 0)
        return memory.view(entry.dtype).view(stored.region.sizes)

    def _stream(
        self, name: str, entry: TensorEntry, stored: StoredRegion, kept: memoryview, first: int
    ) -> None:
        """Read a region, keep its bytes from `first` on as far as `kept` reaches, and compare.

        Chunk by chunk, so that the checksum finds in the processor's cache what was just read.
        """
        found = 0
        num_bytes = stored.region.numel * entry.dtype.itemsize
        for start in range(0, num_bytes, CHUNK_BYTES):
            stop = min(start + CHUNK_BYTES, num_bytes)
            begin, end = max(start, first), min(stop, first + len(kept))
            is_kept = (begin, end) == (start, stop)
            chunk = kept[start - first : stop - first] if is_kept else self._chunk[: stop - start]
            self._fill(name, stored, chunk, stored.start + start)
            found = self._manifest.checksum.extend(chunk, found)
            if begin < end and not is_kept:
                kept[begin - first : end - first] = chunk[begin - start : end - start]
        self._compare(name, stored, found)

    def check_file(self, name: str, tensor: str | None = None) -> None:
        """See that a file is there, as long as it should be, with the header it should have."""
        if name in self._files:
            return
        try:
            self._file(name)
        except (OSError, CheckpointError) as error:
            raise self._unreadable(name, tensor, error) from error

    def _fill(self, name: str, stored: StoredRegion, data: memoryview, start: int) -> None:
        try:
            file = self._file(stored.file)
            filled = 0
            while filled < len(data):
                count = os.preadv(file.fileno(), [data[filled:]], start + filled)
                if count == 0:
                    raise CheckpointError(f"the file ends at byte {start + filled:,}")
                filled += count
        except (OSError, CheckpointError) as error:
            raise self._unreadable(stored.file, name, error) from error

    def _unreadable(self, file: str, tensor: str | None, error: Exception) -> CheckpointError:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        what = "" if tensor is None else f"tensor {tensor!r} cannot be read: "
        return CheckpointError(f"{self._folder / file}: {what}{reason}. {_MEND}")

    def _compare(self, name: str, stored: StoredRegion, found: int) -> None:
        if found != stored.crc32:
            raise CheckpointError(
                f"{self._folder / stored.file}: tensor {name!r} at {stored.region.offsets} has "
                f"checksum {found:08x}, the manifest says {stored.crc32:08x}. {_MEND}"
            )

    def _file(self, name: str) -> BinaryIO:
        if name not in self._files:
            file = self._open.enter_context(open_regular(self._folder / name))
            expected = self._manifest.files[name]
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes != expected.num_bytes:
                raise CheckpointError(
                    f"the file has {num_bytes:,} bytes, the manifest says {expected.num_bytes:,}"
                )
            found = zlib.crc32(os.pread(file.fileno(), expected.header_bytes, 0))
            if found != expected.header_crc32:
                raise CheckpointError(
                    f"its header has checksum {found:08x}, the manifest says "
                    f"{expected.header_crc32:08x}"
                )
            self._files[name] = file
        return self._files[name]


_MEND = "The file is damaged or incomplete: copy the checkpoint anew, or load an earlier one"
