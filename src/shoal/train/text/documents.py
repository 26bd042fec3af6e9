"""Documents, one after the other, from text files, JSONL, Parquet or a dataset of Hugging Face.

Nothing is read as a whole: of a file one block, line or batch is in memory. A long text comes in
pieces; `Passage.ends` tells where its document ends.
"""

from __future__ import annotations

import codecs
import difflib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from shoal.errors import UsageError
from shoal.files import open_regular, read_regular
from shoal.train.data import walk
from shoal.train.frameworks import import_framework, in_one_line

Kind = Literal["text", "jsonl", "parquet", "dataset"]

_SUFFIXES: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}
_BLOCK_BYTES = 1 << 20
_MOST_LINE_BYTES = 1 << 28
_ROWS = 256
_MOST_STATE_BYTES = 1 << 24
_DATASET, _SPLITS, _TRAIN = "state.json", "dataset_dict.json", "train"


class Passage(NamedTuple):
    """A stretch of a document."""

    text: str
    ends: bool
    """Whether the document ends with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Where documents come from: `files` are all of one kind, below `root` if it is a folder."""

    root: Path
    kind: Kind
    files: tuple[Path, ...]

    def passages(self, key: str, skipped: list[str]) -> Iterator[Passage]:
        """Yield the documents in an order that every machine agrees on.

        `key` names the text of a row. Files in a folder of texts that hold none go to `skipped`.
        """
        if self.kind == "dataset":
            yield from _rows(_dataset_batches(self.root, key), self.root)
            return
        for file in self.files:
            if self.kind == "jsonl":
                yield from _lines(file, key)
            elif self.kind == "parquet":
                yield from _rows(_parquet_batches(file, key), file)
            elif self.root.is_dir() and not _is_text(file):
                skipped.append(str(file.relative_to(self.root)))
            else:
                yield from _text(file)


def find_source(path: Path) -> Documents:
    """Tell what kind of data lies at `path`; raise a `UsageError` if there is none."""
    if not os.path.exists(path):
        raise UsageError(f"--data: there is no file or folder {path}")
    if not path.is_dir():
        return Documents(root=path, kind=_SUFFIXES.get(path.suffix, "text"), files=(path,))
    if (path / _SPLITS).exists():
        splits = sorted(inner.name for inner in path.iterdir() if (inner / _DATASET).exists())
        if _TRAIN not in splits:
            raise UsageError(
                f"--data: {path} is a dataset of the splits {', '.join(splits)}, none of which is "
                f"called {_TRAIN}; name one, for example --data {path / (splits or ['…'])[0]}"
            )
        path = path / _TRAIN
    if (path / _DATASET).exists():
        files = tuple(sorted(path.glob("*.arrow")))
        return Documents(root=path, kind="dataset", files=files)
    files = tuple(walk(path))
    kinds: set[Kind] = {_SUFFIXES[file.suffix] for file in files if file.suffix in _SUFFIXES}
    if len(kinds) > 1:
        raise UsageError(f"--data: {path} holds {' and '.join(sorted(kinds))}; give one kind")
    if kinds:
        (kind,) = kinds
        files = tuple(file for file in files if _SUFFIXES.get(file.suffix) == kind)
        return Documents(root=path, kind=kind, files=files)
    if not files:
        raise UsageError(f"--data: no files in {path}; it needs text, JSONL or Parquet")
    return Documents(root=path, kind="text", files=files)


def has_tables(folder: Path) -> bool:
    """Tell whether a folder holds a dataset, JSONL or Parquet, and is no folder of texts."""
    if (folder / _SPLITS).exists() or (folder / _DATASET).exists():
        return True
    return any(file.suffix in _SUFFIXES for file in walk(folder))


def _is_text(file: Path) -> bool:
    """Tell by its beginning whether a file among others is text."""
    try:
        with _opened(file) as read:
            block = read(_BLOCK_BYTES)
            codecs.getincrementaldecoder("utf-8")().decode(block)
    except (UsageError, UnicodeDecodeError):
        return False
    return b"\0" not in block


def _text(file: Path) -> Iterator[Passage]:
    """Yield a text file in blocks that end with a line, as far as lines are no longer than one."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    held, position = "", 0
    with _opened(file) as read:
        while block := read(_BLOCK_BYTES):
            held += _decoded(decoder.decode, block, file, position)
            position += len(block)
            whole, newline, rest = held.rpartition("\n")
            if newline:
                yield Passage(whole + newline, ends=False)
                held = rest
            elif len(held) > _BLOCK_BYTES:
                yield Passage(held, ends=False)
                held = ""
        held += _decoded(lambda block: decoder.decode(block, final=True), b"", file, position)
    if position:
        yield Passage(held, ends=True)


def _decoded(decode: Callable[[bytes], str], block: bytes, file: Path, position: int) -> str:
    try:
        return decode(block)
    except UnicodeDecodeError as error:
        raise UsageError(
            f"--data: {file} is no UTF-8 text near byte {position + error.start:,}; convert it, or "
            "take it out"
        ) from None


def _lines(file: Path, key: str) -> Iterator[Passage]:
    with _opened(file) as read:
        for number, line in enumerate(_split_lines(read, file), start=1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UsageError(
                    f"--data: {where} is not JSON ({error}); mend the line or take it out"
                ) from None
            if not isinstance(row, dict):
                raise UsageError(f"--data: {where}: expected an object, got {type(row).__name__}")
            if key not in row:
                raise _no_key(where, key, row)
            yield _document(row[key], key, where)


def _split_lines(read: Callable[[int], bytes], file: Path) -> Iterator[bytes]:
    held = b""
    while block := read(_BLOCK_BYTES):
        *lines, held = (held + block).split(b"\n")
        yield from lines
        if len(held) > _MOST_LINE_BYTES:
            raise UsageError(
                f"--data: {file} has a line of more than {_MOST_LINE_BYTES:,} bytes; JSONL has one "
                "document in each line"
            )
    yield held


def _parquet_batches(file: Path, key: str) -> Iterator[list[object]]:
    parquet = import_framework("pyarrow.parquet", what=f"--data {file.name}")
    with _opened(file):
        pass  # a pipe, or a file that may not be read, is named before pyarrow waits for it
    with _refusing(file), parquet.ParquetFile(file) as opened:
        names = opened.schema_arrow.names
        if key not in names:
            raise _no_key(str(file), key, names)
        for batch in opened.iter_batches(batch_size=_ROWS, columns=[key]):
            yield batch.column(0).to_pylist()


def _dataset_batches(folder: Path, key: str) -> Iterator[list[object]]:
    datasets = import_framework("datasets", what=f"--data {folder.name}")
    with _refusing(folder):
        if not _has_files(folder):
            return  # which `datasets` writes of no rows, and cannot load
        dataset = datasets.load_from_disk(str(folder))
        if key not in dataset.column_names:
            raise _no_key(str(folder), key, dataset.column_names)
        for batch in dataset.select_columns(key).iter(batch_size=_ROWS):
            yield batch[key]


def _has_files(folder: Path) -> bool:
    """Tell whether a dataset names any files, without which it has no rows."""
    state = json.loads(read_regular(folder / _DATASET, _MOST_STATE_BYTES))
    return state["_data_files"] != []


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Turn whatever a library says of a broken file into one message that names it."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"--data: {path} cannot be read: {in_one_line(error)}; write it anew, or take it out"
        ) from error


def _rows(batches: Iterable[list[object]], path: Path) -> Iterator[Passage]:
    number = 0
    for batch in batches:
        for value in batch:
            yield _document(value, "the text", f"{path}, row {number}")
            number += 1


def _document(value: object, key: str, where: str) -> Passage:
    if not isinstance(value, str):
        raise UsageError(f"--data: {where}: {key} should be text, got {type(value).__name__}")
    return Passage(value, ends=True)


def _no_key(where: str, key: str, known: Iterable[str]) -> UsageError:
    names = [str(name) for name in known]
    near = difflib.get_close_matches(key, names, n=1) or names[:1]
    hint = f"; try --text-key {near[0]}" if near else ""
    return UsageError(f"--data: {where} has no {key!r}, only {', '.join(names)}{hint}")


@contextmanager
def _opened(file: Path) -> Iterator[Callable[[int], bytes]]:
    try:
        with open_regular(file, follow=True) as opened:
            yield lambda size: opened.read(size)
    except OSError as error:
        raise UsageError(f"--data: cannot read {file}: {error.strerror}") from None
