"""What torch's DCP wrote: its metadata is a pickle, each item a `torch.save` file.

Names in them are an allow-list, too: classes of torch's become records that do nothing.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Set
from functools import partial
from typing import Any

import torch

from shoal.checkpoint.bounded_pickle import Class, Record, read_pickle
from shoal.errors import CheckpointError

_METADATA = "torch.distributed.checkpoint.metadata"
_OF_METADATA = frozenset(
    {
        (_METADATA, "BytesStorageMetadata"),
        (_METADATA, "ChunkStorageMetadata"),
        (_METADATA, "Metadata"),
        (_METADATA, "MetadataIndex"),
        (_METADATA, "StorageMeta"),
        (_METADATA, "TensorProperties"),
        (_METADATA, "TensorStorageMetadata"),
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("pathlib", "WindowsPath"),
    }
)
_TENSORS = frozenset({"_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"})
_STORAGES = (
    *("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool"),
    *("ComplexDouble", "ComplexFloat"),
)
_OF_ITEMS = frozenset(
    {
        *(("torch._utils", name) for name in _TENSORS),
        *(("torch", f"{name}Storage") for name in _STORAGES),
        *(("torch.storage", name) for name in ("UntypedStorage", "TypedStorage")),
    }
)

_SLACK_BYTES = 1 << 16
"""What the values of an item may take beyond its length in the file."""
_MAX_ENTRIES = 1024
"""Of the archive that an item is; `torch.save` makes some seven for a tensor."""
_MAX_DEPTH = 500
"""Of values within values: JSON is not read back when it nests without end."""
_SHARED_SIGNS = 1 << 20
"""How much longer than its file a value may be as text; lists may share what they hold."""


def unpickle_metadata(data: bytes) -> Record:
    """Read DCP's metadata; raises CheckpointError for anything that is not of its kind."""
    try:
        found = read_pickle(data, partial(_named, _OF_METADATA))
    except (ValueError, OverflowError) as error:
        raise CheckpointError(f"not readable as DCP metadata: {error!s:.200}") from error
    if not is_record(found, "Metadata"):
        raise CheckpointError(f"expected DCP metadata, got a {type(found).__name__}")
    return found


def is_record(value: object, kind: str) -> bool:
    """Whether a value stands for an object of a class of torch's."""
    return isinstance(value, Record) and value.kind == kind


def read_item(data: bytes) -> Any:
    """Give the tensor or the plain value that `torch.save` wrote."""
    try:
        value = read_pickle(_pickle_of(data), partial(_named, _OF_ITEMS))
        if not isinstance(value, Record):
            _check_tree(value, len(data) + _SHARED_SIGNS)
            return value
        if value.kind not in _TENSORS:
            raise CheckpointError(f"it is a {value.kind}, and no tensor")
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except CheckpointError as error:
        raise CheckpointError(f"not readable as a saved tensor: {error}") from error
    except Exception as error:
        # Of an archive that is damaged, or was made to do harm, anything may be raised.
        raise CheckpointError(f"not readable as a saved tensor: {error!s:.200}") from error
    if found.nbytes > len(data):
        # Strides of zero show few bytes many times, and a copy would hold them all.
        raise CheckpointError(
            f"not readable as a saved tensor: {len(data):,} bytes show {found.nbytes:,}"
        )
    return found


def _check_tree(value: object, most: int) -> None:
    """Refuse a value that is in itself, or repeats its parts: short here, without end as text."""
    levels: list[Iterator[object]] = [iter((value,))]
    num_signs = 0
    while levels:
        for item in levels[-1]:
            num_signs += 1 + _num_signs(item)
            if isinstance(item, dict):
                levels.append(iter((*item.keys(), *item.values())))
            elif isinstance(item, list | tuple):
                levels.append(iter(item))
            else:
                continue
            break
        else:
            levels.pop()
        if num_signs > most or len(levels) > _MAX_DEPTH:
            raise CheckpointError("its values repeat each other, or nest, without end")


def _num_signs(item: object) -> int:
    if isinstance(item, int):
        return item.bit_length() // 3
    return len(item) if isinstance(item, str) else 0


def _pickle_of(data: bytes) -> bytes:
    """The pickle in an archive, of which nothing is compressed: that could unpack to any size."""
    if data.count(b"PK\x01\x02") > _MAX_ENTRIES:
        raise CheckpointError(f"it is an archive of more than {_MAX_ENTRIES:,} files")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or (
            sum(entry.file_size for entry in entries) > len(data) + _SLACK_BYTES
        ):
            raise CheckpointError("its items are compressed, which DCP does not do")
        pickles = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise CheckpointError(f"it holds {len(pickles)} pickles, and should one")
        return archive.read(pickles[0])


def _named(allowed: Set[tuple[str, str]], module: str, name: str) -> Any:
    """What stands for a name in a pickle."""
    if (module, name) in allowed:
        return Class(partial(Record, name))
    if (module, name) == ("torch", "Size"):
        return Class(_size)
    if (module, name) == ("collections", "OrderedDict"):
        return Class(_empty_table)
    if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
        return getattr(torch, name)
    raise CheckpointError(f"it names {module}.{name}, which is not allowed there")


def _size(arguments: tuple[object, ...]) -> tuple[object, ...]:
    """The sizes themselves, not a copy: one for each mention would be without bound."""
    if len(arguments) != 1 or type(arguments[0]) is not tuple:
        raise CheckpointError("it has a torch.Size that is not made of a tuple")
    return arguments[0]


def _empty_table(arguments: tuple[object, ...]) -> dict[str, object]:
    if arguments:
        raise CheckpointError("it has an OrderedDict that is made of something")
    return {}
