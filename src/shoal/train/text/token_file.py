"""The token file: all documents of a run as tokens, one after the other, mapped into memory.

    <out>/.tokens/<name>/tokens.bin     little-endian, as wide as the tokenizer needs
                         tokens.json    how many, of what; there only once the file is whole

The name is made of the data's files, the tokenizer and the options, so that runs share what they
can, and a change of any makes another file. Samples are read at random places, so that their order
may be any: shuffling, and resuming on other ranks, need nothing but a number.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from shoal.checkpoint.disk import disk_errors
from shoal.errors import CheckpointError, UsageError
from shoal.files import read_regular, write_all
from shoal.train.text.documents import Documents, find_source
from shoal.train.text.tokenizer import Tokenizer

FOLDER = ".tokens"
"""Beside the run folders: where token files lie."""

PROGRESS_S = 2.0
"""How often a person hears how far a token file is."""

_FORMAT = 1
_DATA, _INFO = "tokens.bin", "tokens.json"
_MOST_INFO_BYTES = 1 << 24
_BATCH_CHARS = 1 << 20
_BATCH_PIECES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInfo:
    """What a token file holds."""

    tokens: int
    dtype: str
    documents: int
    digest: str
    skipped: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """The tokens of some data; the file may still have to be made."""

    folder: Path
    data: Path
    key: str
    max_bytes: int | None

    @property
    def exists(self) -> bool:
        """Whether the file is there, as a whole."""
        return (self.folder / _INFO).is_file()

    def read(self) -> tuple[np.ndarray, TokenInfo]:
        """Map the tokens into memory, read-only."""
        path = self.folder / _DATA
        try:
            content = json.loads(read_regular(self.folder / _INFO, _MOST_INFO_BYTES))
            info = TokenInfo(**{**content, "skipped": tuple(content["skipped"])})
            tokens = np.memmap(path, dtype=np.dtype(info.dtype), mode="r")
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"{self.folder} cannot be read as tokens: {error}; remove it, and it is made anew"
            ) from error
        if len(tokens) != info.tokens:
            raise CheckpointError(
                f"{path} holds {len(tokens)} tokens, expected {info.tokens}; remove {self.folder}, "
                "and it is made anew"
            )
        return tokens, info

    def remove(self) -> None:
        """Take the file away again."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):
            self.folder.parent.rmdir()  # if it is empty

    def make(self, tokenizer: Tokenizer) -> Iterator[str]:
        """Write the file; yields after each batch how far it is, in words.

        Nothing is left behind if it ends with an error, or is not run to its end.
        """
        source = find_source(self.data)
        part = self.folder.with_name(f"{self.folder.name}.{os.getpid()}")
        with disk_errors("write tokens into", self.folder.parent):
            part.mkdir(parents=True)
        try:
            with disk_errors("write", part / _DATA):
                yield from _write(part, source, tokenizer, self.key, self.max_bytes)
            with suppress(FileExistsError, OSError):
                os.rename(part, self.folder)
            if not self.exists:
                raise CheckpointError(f"{part} could not be renamed to {self.folder}")
        finally:
            shutil.rmtree(part, ignore_errors=True)
            with suppress(OSError):
                self.folder.parent.rmdir()  # if it is empty


def token_file(
    out: Path, data: Path, tokenizer: Tokenizer, *, key: str, max_bytes: int | None
) -> TokenFile:
    """Name the token file of some data below `out`."""
    source = find_source(data)
    stats = [(os.path.relpath(file, data), file.stat()) for file in source.files]
    of = {
        "format": _FORMAT,
        "kind": source.kind,
        "files": [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats],
        "root": str(data.absolute()),
        "tokenizer": tokenizer.digest,
        "key": key,
        "max_bytes": max_bytes,
    }
    name = hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:24]
    return TokenFile(folder=out / FOLDER / name, data=data, key=key, max_bytes=max_bytes)


def _write(
    part: Path, source: Documents, tokenizer: Tokenizer, key: str, max_bytes: int | None
) -> Iterator[str]:
    dtype = np.dtype(np.uint8 if tokenizer.size <= 2**8 else "<u2")
    if tokenizer.size > 2**16:
        dtype = np.dtype("<u4")
    sha, skipped = hashlib.sha256(), []
    tokens = documents = num_bytes = 0
    end = tokenizer.end().astype(dtype).tobytes()
    with open(part / _DATA, "xb", buffering=0) as file:
        for batch in _batches(source.passages(key, skipped), max_bytes):
            texts = [piece.text for piece in batch]
            encoded = tokenizer.encode(texts)
            data = b"".join(
                ids.astype(dtype).tobytes() + (end if piece.ends else b"")
                for piece, ids in zip(batch, encoded, strict=True)
            )
            write_all(file, data)
            sha.update(data)
            tokens += len(data) // dtype.itemsize
            documents += sum(piece.ends for piece in batch)
            num_bytes += sum(len(text) for text in texts)
            yield f"{tokens:,} tokens of {documents:,} documents"
    if not num_bytes:
        raise UsageError(
            f"--data: {source.root} holds no text: "
            + (f"none of its {len(skipped)} files is UTF-8" if skipped else "it is empty")
        )
    info = TokenInfo(
        tokens=tokens,
        dtype=dtype.str,
        documents=documents,
        digest=sha.hexdigest(),
        skipped=tuple(skipped),
    )
    (part / _INFO).write_text(json.dumps(asdict(info)))


def _batches(pieces: Iterator, max_bytes: int | None) -> Iterator[list]:
    """Group pieces; stop where the texts are longer than `max_bytes` together."""
    batch, chars, left = [], 0, max_bytes
    for piece in pieces:
        if left is not None:
            size = len(piece.text.encode())
            if size > left:
                cut = piece.text.encode()[:left].decode(errors="ignore")
                batch.append(piece._replace(text=cut, ends=True))
                break
            left -= size
        batch.append(piece)
        chars += len(piece.text)
        if chars >= _BATCH_CHARS or len(batch) >= _BATCH_PIECES:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def in_turns(making: Iterator[str], seconds: float) -> Iterator[str]:
    """Yield less often: once in so many seconds, and what came last."""
    said_at, last = time.monotonic(), ""
    for last in making:
        if time.monotonic() - said_at >= seconds:
            said_at = time.monotonic()
            yield last
            last = ""
    if last:
        yield last
