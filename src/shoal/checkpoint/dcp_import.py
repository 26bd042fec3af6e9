"""Checkpoints that `torch.distributed.checkpoint` (DCP) wrote, made into ours.

Its metadata is a pickle, each item a `torch.save` file. Names in them are an allow-list: classes of
torch's become records that do nothing.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import torch

from shoal.checkpoint.data_files import PlannedRegion, Progress
from shoal.checkpoint.disk import Folder, checkpoint_at
from shoal.checkpoint.manifest import CODES, JSON, check_json
from shoal.checkpoint.offline import outline, write_offline
from shoal.checkpoint.shares import Share
from shoal.checkpoint.storage import Checkpoint, FileNames, OpenFile, storage_errors
from shoal.checkpoint.untrusted import PickledClass, PickledObject, read_pickle
from shoal.errors import CheckpointError, UsageError
from shoal.layout.region import Region

METADATA = ".metadata"
_DATA_FILES = FileNames(pattern=re.compile(r"__[0-9]+_[0-9]+\.distcp"), example="__0_0.distcp")

_MAX_METADATA_BYTES = 1 << 28
_MAX_DIMS = 64
_Key = tuple[str, tuple[int, ...] | None]

_MODULE = "torch.distributed.checkpoint.metadata"
_CLASSES = (
    *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
    *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
)
_OF_METADATA = frozenset(
    {
        *((_MODULE, name) for name in _CLASSES),
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
"""The entries of an item may take this much beyond its length in the file."""
_MAX_ENTRIES = 1024
"""Of the archive that an item is; `torch.save` makes some seven for a tensor."""
_MAX_DEPTH = 500
"""Of values within values: JSON is not read back when it nests without end."""
_SHARED_SIGNS = 1 << 20
"""How much longer than its file a value may be as text; lists may share what they hold."""


def import_dcp(
    source: Folder | Checkpoint,
    folder: Folder | Checkpoint,
    *,
    rename: Callable[[str], str] = str,
    progress: Progress | None = None,
) -> None:
    """Make a checkpoint of a plain DCP one; its tensors become those that `rename` says.

    DCP keeps no checksums: what is damaged there already stays so. Values that are no tensors
    go to `extra["values"]`, by name, as JSON.
    """
    found = checkpoint_at(source)
    data = found.read_whole(METADATA, _MAX_METADATA_BYTES)
    try:
        metadata = unpickle_metadata(data)
        with _Items(found, metadata) as items:
            _convert(items, metadata, checkpoint_at(folder), rename, progress)
    except (CheckpointError, UsageError, AttributeError, TypeError) as error:
        # Fields of a hostile pickle may be of any type.
        raise CheckpointError(f"{found}: {error}") from error


class _Items(ExitStack):
    """Reads the items of a DCP checkpoint, each checked to lie in a file of it."""

    def __init__(self, source: Checkpoint, metadata: PickledObject) -> None:
        super().__init__()
        self._source = source
        self._files: dict[str, OpenFile] = {}
        self._num_read: dict[str, int] = defaultdict(int)
        self._where: dict[_Key, PickledObject] = {}
        for index, info in _mapping(metadata["storage_data"]).items():
            offset = index.get("offset")
            self._where[_text(index["fqn"]), None if offset is None else _ints(offset)] = info

    def __contains__(self, key: _Key) -> bool:
        return key in self._where

    def read(self, name: str, offsets: tuple[int, ...] | None) -> Any:
        """Give the tensor or the value that is stored under a name, at its offsets."""
        info = self._where.get((name, offsets))
        if info is None:
            raise CheckpointError(f"{name!r} at {offsets} is not in any file")
        file_name = _DATA_FILES.check(info["relative_path"])
        start, length = info["offset"], info["length"]
        if info.get("transform_descriptors"):
            raise NotImplementedError(
                f"{file_name}: DCP checkpoints with transforms are not supported"
            )
        file = self._file(file_name)
        size = file.num_bytes
        is_whole = type(start) is int and type(length) is int
        if not is_whole or not 0 <= start <= start + length <= size:
            raise CheckpointError(
                f"{file_name}: {name!r} should be {length!r:.30} bytes from {start!r:.30} on, "
                f"and the file has {size:,}"
            )
        # Else a small file could be shown again and again, as tensors of any size.
        self._num_read[file_name] += length
        if self._num_read[file_name] > size:
            raise CheckpointError(f"{file_name}: its {size:,} bytes are listed more than once")
        try:
            return read_item(file.read(start, length))
        except CheckpointError as error:
            raise CheckpointError(f"{file_name}: {name!r}: {error}") from error

    def _file(self, name: str) -> OpenFile:
        if name not in self._files:
            with storage_errors("read", self._source.locate(name)):
                self._files[name] = self.enter_context(closing(self._source.open(name)))
        return self._files[name]


def _convert(
    items: _Items,
    metadata: PickledObject,
    checkpoint: Checkpoint,
    rename: Callable[[str], str],
    progress: Progress | None,
) -> None:
    outlines: dict[str, Share] = {}
    values: dict[str, JSON] = {}
    planned: list[PlannedRegion] = []
    for name, entry in _mapping(metadata["state_dict_metadata"]).items():
        _text(name)
        if not is_pickled(entry, "TensorStorageMetadata"):
            values[name] = items.read(name, None)
            check_json(values[name], f"the value {name!r}")
            continue
        new_name = rename(name)
        if new_name in outlines:
            raise UsageError(f"`rename` gives two tensors the name {new_name!r}")
        outlines[new_name] = outline(_ints(entry["size"]), _dtype(name, entry), "from DCP")
        planned += _planned(items, name, new_name, entry)
    write_offline(checkpoint, outlines, [planned], {"values": values} if values else {}, progress)


def _planned(
    items: _Items, name: str, new_name: str, entry: PickledObject
) -> Iterator[PlannedRegion]:
    dtype = _dtype(name, entry)

    def read(region: Region) -> torch.Tensor:
        values = items.read(name, region.offsets)
        is_tensor = isinstance(values, torch.Tensor)
        found = (values.dtype, tuple(values.shape)) if is_tensor else type(values).__name__
        if found != (dtype, region.sizes):
            raise CheckpointError(
                f"{name!r} at {region.offsets} should be {dtype} {region.sizes}, got {found}"
            )
        return values

    seen: set[tuple[int, ...]] = set()
    for chunk in entry["chunks"]:
        region = Region(offsets=_ints(chunk["offsets"]), sizes=_ints(chunk["sizes"]))
        if not region.numel:
            continue
        # A short pickle can list one chunk without end; the files hold each once.
        if region.offsets in seen or (name, region.offsets) not in items:
            raise CheckpointError(f"{name!r} at {region.offsets} is listed twice, or in no file")
        seen.add(region.offsets)
        yield PlannedRegion(name=new_name, region=region, dtype=dtype, source=read)


def _dtype(name: str, entry: PickledObject) -> torch.dtype:
    """The dtype of a tensor, which comes first in the state of its properties."""
    state = entry["properties"].state
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, torch.dtype) or dtype not in CODES:
        raise CheckpointError(f"{name!r} has a dtype that is not supported: {dtype!r:.50}")
    return dtype


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise CheckpointError(f"expected a name in the metadata, got a {type(value).__name__}")
    return value


def _ints(value: object) -> tuple[int, ...]:
    items = value if isinstance(value, tuple) and len(value) <= _MAX_DIMS else None
    if items is None or any(type(item) is not int or not 0 <= item < 2**63 for item in items):
        raise CheckpointError(f"expected sizes or offsets in the metadata, got {value!r:.100}")
    return items


def _mapping(value: object) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"expected a table in the metadata, got a {type(value).__name__}")
    return value


def unpickle_metadata(data: bytes) -> PickledObject:
    """Read DCP's metadata; raises CheckpointError for anything that is not of its kind."""
    try:
        found = read_pickle(data, partial(_named, _OF_METADATA))
    except (ValueError, OverflowError) as error:
        raise CheckpointError(f"not readable as DCP metadata: {error!s:.200}") from error
    if not is_pickled(found, "Metadata"):
        raise CheckpointError(f"expected DCP metadata, got a {type(found).__name__}")
    return found


def is_pickled(value: object, kind: str) -> bool:
    """Whether a value stands for an object of a class of torch's."""
    return isinstance(value, PickledObject) and value.kind == kind


def read_item(data: bytes) -> Any:
    """Give the tensor or the plain value that `torch.save` wrote."""
    try:
        value = read_pickle(_pickle_of(data), partial(_named, _OF_ITEMS))
        if not isinstance(value, PickledObject):
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
    """Give the stand-in for a name in a pickle: a class, a dtype."""
    if (module, name) in allowed:
        return PickledClass(partial(PickledObject, name))
    if (module, name) == ("torch", "Size"):
        return PickledClass(_size)
    if (module, name) == ("collections", "OrderedDict"):
        return PickledClass(_empty_table)
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
