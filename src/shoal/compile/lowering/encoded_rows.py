"""A gather in a format of few bits, in a graph: two operators around an ordinary all-gather.

    shard ── encode_row ── all-gather ── wait ── decode_rows ── views ── full parameters

Formats are many small kernels with buffers of their own. As operators they are what the engine
runs, bit by bit, whatever a compiler does with the rest of the graph. An operator takes numbers and
words alone, so what it is to do stands in a table, under a key that is the same in every process:
graphs are kept on disk.
"""

from __future__ import annotations

import functools
import hashlib
import weakref

import torch
from torch import Tensor

from shoal.compile.lowering.gathered_rows import NAMESPACE
from shoal.errors import InvariantError
from shoal.layout.buffer import shard_views
from shoal.layout.packing import Packing
from shoal.low_precision.formats import GatherFormat
from shoal.low_precision.wire import Wire


class EncodedRows:
    """How a unit's shard becomes the row that a rank sends, and all rows full parameters."""

    def __init__(self, stored: Packing, packing: Packing, form: GatherFormat, rank: int) -> None:
        self._stored, self._rank = stored, rank
        self.packing = packing
        """Where full parameters lie once rows are decoded."""
        self._wire = Wire(packing, form)
        text = f"{stored} {packing} {form} {rank}"
        self.key = hashlib.sha256(text.encode()).hexdigest()[:16]
        define()
        _known[self.key] = self

    def encode(self, shard: Tensor) -> Tensor:
        """This rank's row, of the bytes of its shard; one node of a graph."""
        return torch.ops.shoal.encode_row(shard, self.key, self._wire.row_bytes)

    def decode(self, rows: Tensor) -> Tensor:
        """The bytes of full parameters, of all ranks' rows; one node of a graph."""
        return torch.ops.shoal.decode_rows(rows, self.key, self.packing.gathered_bytes)

    def write_row(self, shard: Tensor, row: Tensor) -> None:
        """What `encode` does to real tensors."""
        self._wire.encode(shard_views(self._stored, self._rank, shard), self._rank, row)

    def write_full(self, rows: Tensor, full: Tensor) -> None:
        """What `decode` does to real tensors."""
        self._wire.decoder(rows, full)()


_known: weakref.WeakValueDictionary[str, EncodedRows] = weakref.WeakValueDictionary()
"""Those of the units there are."""


@functools.cache
def define() -> torch.library.Library:
    """Make the operators known to torch, once."""
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    operators = {"encode_row": _encode_row, "decode_rows": _decode_rows}
    for name, run in operators.items():
        library.define(f"{name}(Tensor given, str key, int num_bytes) -> Tensor")
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", _bytes_for, lib=library)
    return library


def _encode_row(shard: Tensor, key: str, num_bytes: int) -> Tensor:
    row = _bytes_for(shard, key, num_bytes)
    _named(key).write_row(shard, row)
    return row


def _decode_rows(rows: Tensor, key: str, num_bytes: int) -> Tensor:
    full = _bytes_for(rows, key, num_bytes)
    _named(key).write_full(rows, full)
    return full


def _bytes_for(given: Tensor, key: str, num_bytes: int) -> Tensor:
    return given.new_empty(num_bytes, dtype=torch.uint8)


def _named(key: str) -> EncodedRows:
    rows = _known.get(key)
    if rows is None:
        raise InvariantError(
            "a graph gathers a unit in a format of few bits, and no unit of this process is laid "
            "out as the one it was captured with. Shard the model as then, or compile it again "
            "(torch._dynamo.reset())."
        )
    return rows
