"""Plain values out of pickles that nobody vouches for: an allow-list, and nothing is called.

torch's DCP keeps its metadata in a pickle, and each item as a `torch.save` file. A pickle is a
program; here all that it can build is numbers, texts, containers, dtypes and records, which stand
in the place of torch's classes and do nothing but keep what they are given.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import Any

import torch

from shoal.errors import CheckpointError

_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = frozenset(
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

_SLACK_BYTES = 1 << 16
"""What the values of an item may take beyond its length in the file."""


class Record:
    """What an object was made of: the arguments of its class, and its state."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, key: str) -> Any:
        """Give a field; raises CheckpointError if there is none."""
        if not isinstance(self.fields, dict) or key not in self.fields:
            raise CheckpointError(f"expected a {type(self).__name__} with a field {key!r}")
        return self.fields[key]

    def get(self, key: str) -> Any:
        """Give a field that is left out of the state where it is None."""
        return self[key] if isinstance(self.fields, dict) and key in self.fields else None

    @property
    def fields(self) -> Any:
        """The state, which is a table for most classes."""
        # An object that was made without a call of its class has no state before it gets one.
        return self.__dict__.get("state", {})


def unpickle_metadata(data: bytes) -> Record:
    """Read DCP's metadata; raises CheckpointError for anything that is not of its kind."""
    try:
        found = _Unpickler(io.BytesIO(data)).load()
    except CheckpointError:
        raise
    except Exception as error:
        # A hostile or damaged pickle can raise whatever its opcodes can.
        raise CheckpointError(f"not readable as DCP metadata: {error!r:.200}") from error
    if not is_record(found, "Metadata"):
        raise CheckpointError(f"expected DCP metadata, got a {type(found).__name__}")
    return found


def is_record(value: object, name: str) -> bool:
    """Whether a value stands for an object of a class of torch's."""
    return isinstance(value, Record) and type(value).__name__ == name


def read_item(data: bytes) -> Any:
    """Give the tensor or the plain value that `torch.save` wrote."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
        # Values that are packed could unpack to any size.
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or (
            sum(entry.file_size for entry in entries) > len(data) + _SLACK_BYTES
        ):
            raise CheckpointError("its items are compressed, which DCP does not do")
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"not readable as a saved tensor: {error!s:.200}") from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Give what stands for a name in the pickle."""
        if (module, name) in _RECORDS:
            # A class of its own for each mention: whatever is done to it is gone with it.
            return type(name, (Record,), {})
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(f"its metadata names {module}.{name}, which is not allowed there")
