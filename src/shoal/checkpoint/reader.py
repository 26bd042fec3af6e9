"""Regions read back from a checkpoint's files, each compared with its checksum."""

from __future__ import annotations

import os
import zlib
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import torch

from shoal.checkpoint.disk import open_regular
from shoal.checkpoint.metadata import Manifest, StoredRegion, TensorEntry
from shoal.errors import CheckpointError

_CHUNK_BYTES = 1 << 18
"""How much is read at a time, so that the checksum finds it in the processor's cache."""

_ALIGNMENT = 64


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
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._taken_bytes = 0

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
        """Give a region's values, which are those that were saved; until `recycle`."""
        memory = self._take(stored.region.numel * entry.dtype.itemsize)
        data = memory.numpy().data
        found = 0
        for start in range(0, len(data), _CHUNK_BYTES):
            chunk = data[start : start + _CHUNK_BYTES]
            self._fill(name, stored, chunk, stored.start + start)
            found = zlib.crc32(chunk, found)
        self._compare(name, stored, found)
        return memory.view(entry.dtype).view(stored.region.sizes)

    def verify(self, name: str, entry: TensorEntry, stored: StoredRegion) -> None:
        """Compare a region with its checksum, without keeping it in memory."""
        found = 0
        stop = stored.start + stored.region.numel * entry.dtype.itemsize
        data = memoryview(bytearray(_CHUNK_BYTES))
        for start in range(stored.start, stop, _CHUNK_BYTES):
            chunk = data[: min(_CHUNK_BYTES, stop - start)]
            self._fill(name, stored, chunk, start)
            found = zlib.crc32(chunk, found)
        self._compare(name, stored, found)

    def recycle(self) -> None:
        """Let the next reads have the memory of all former ones, as much as they took."""
        if self._taken_bytes > self._memory.numel():
            self._memory = torch.empty(self._taken_bytes, dtype=torch.uint8)
        self._taken_bytes = 0

    def _take(self, num_bytes: int) -> torch.Tensor:
        start = self._taken_bytes
        self._taken_bytes += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        # Memory that is new to the process costs more than reading into it.
        if self._taken_bytes <= self._memory.numel():
            return self._memory[start : start + num_bytes]
        return torch.empty(num_bytes, dtype=torch.uint8)

    def check_file(self, name: str) -> None:
        """See that a file is there, as long as it should be, with the header it should have."""
        try:
            self._file(name)
        except (OSError, CheckpointError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            raise CheckpointError(f"{self._folder / name}: {reason}. {_MEND}") from error

    def _fill(self, name: str, stored: StoredRegion, data: memoryview, start: int) -> None:
        path = self._folder / stored.file
        try:
            file = self._file(stored.file)
            filled = 0
            while filled < len(data):
                count = os.preadv(file.fileno(), [data[filled:]], start + filled)
                if count == 0:
                    raise CheckpointError(f"the file ends at byte {start + filled:,}")
                filled += count
        except (OSError, CheckpointError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            raise CheckpointError(
                f"{path}: tensor {name!r} cannot be read: {reason}. {_MEND}"
            ) from error

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
