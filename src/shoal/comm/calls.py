"""A request for a collective, as data.

c10d has some twenty entry points for eleven collectives: into one tensor or a list, coalesced or
not, under old names and new. Each is one `Call` here, so that a process group written in Python
answers calls, not entry points.

    Call(Kind.ALL_GATHER, tensor, slots)            slots: a piece for each rank
    Call(Kind.REDUCE_SCATTER, slots, tensor, op)
    Call(Kind.BROADCAST, tensor, tensor, root=0)    the same tensor twice: in place
    Call(Kind.SEND, tensor, None, None, 1, tag)     root is the other rank
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from shoal.comm.collectives import Kind
from shoal.errors import UsageError


@dataclass(slots=True, eq=False)
class Slots:
    """One piece per rank, of one flat tensor or of a list of tensors; finding one is O(1)."""

    size: int
    flat: Tensor | None = None
    offsets: Sequence[int] | None = None
    """Where each rank's piece of `flat` begins, and the last one ends; None if they are equal."""
    pieces: Sequence[Tensor] = ()

    @classmethod
    def like(cls, piece: Tensor, tensor: Tensor, size: int) -> Slots:
        """Cut one tensor into `size` pieces, each as large as `piece`."""
        if tensor.numel() != size * piece.numel() or tensor.dtype != piece.dtype:
            raise UsageError(
                f"{tensor.numel()} elements of {tensor.dtype} are not {size} × {piece.numel()} of "
                f"{piece.dtype}, a piece for each of {size} ranks"
            )
        return cls(size, tensor.data if tensor.dim() == 1 else tensor.data.view(-1))

    @classmethod
    def equal(cls, tensor: Tensor, size: int) -> Slots:
        """Cut one tensor into `size` pieces of equal length."""
        if tensor.numel() % size:
            raise UsageError(
                f"a tensor of {tensor.numel()} elements has no {size} equal pieces, one per rank"
            )
        return cls(size, tensor.data if tensor.dim() == 1 else tensor.data.view(-1))

    @classmethod
    def uneven(cls, tensor: Tensor, rows: Sequence[int], size: int) -> Slots:
        """Cut one tensor along its first dimension into pieces of these numbers of rows."""
        if not rows:
            return cls.equal(tensor, size)
        num_rows = tensor.shape[0]
        if len(rows) != size or sum(rows) != num_rows:
            raise UsageError(
                f"split sizes must be {size} numbers that add up to {num_rows} rows, got {rows}"
            )
        row_numel = tensor.numel() // num_rows if num_rows else 0
        offsets = [0, *accumulate(num * row_numel for num in rows)]
        return cls(size, tensor.data.view(-1), offsets)

    @classmethod
    def listed(cls, tensors: Sequence[Tensor], size: int) -> Slots:
        """Take one tensor per rank."""
        if len(tensors) != size:
            raise UsageError(f"expected one tensor for each of {size} ranks, got {len(tensors)}")
        return cls(size, pieces=tensors)

    def __getitem__(self, rank: int) -> Tensor:
        if self.flat is None:
            return self.pieces[rank].data
        if self.offsets is None:
            numel = self.flat.numel() // self.size
            return self.flat[rank * numel : (rank + 1) * numel]
        return self.flat[self.offsets[rank] : self.offsets[rank + 1]]

    def tensors(self) -> list[Tensor]:
        """The tensors that must stay alive while the slots are in use."""
        return [self.flat] if self.flat is not None else list(self.pieces)

    @property
    def device(self) -> torch.device:
        """Where the pieces are."""
        return (self.flat if self.flat is not None else self.pieces[0]).device

    @property
    def is_even(self) -> bool:
        """Whether these are equal pieces of one tensor."""
        return self.flat is not None and self.offsets is None

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces together."""
        return self.flat.nbytes if self.flat is not None else sum(t.nbytes for t in self.pieces)


Operand = Tensor | Slots | None
Reduction = ReduceOp | ReduceOp.RedOpType
Pair = tuple[Tensor, Tensor]
"""The output and the input of one collective."""


@dataclass(slots=True)
class Call:
    """One rank's part in one collective. Plain and positional: it is made on the hot path."""

    kind: Kind
    input: Operand = None
    output: Operand = None
    op: Reduction | None = None
    root: int = -1
    tag: int = 0

    def tensors(self) -> list[Tensor]:
        """Every tensor that the collective reads or writes."""
        found: list[Tensor] = []
        for operand in (self.input, self.output):
            if isinstance(operand, Tensor):
                found.append(operand)
            elif operand is not None:
                found.extend(operand.tensors())
        return found

    @property
    def common(self) -> Tensor | None:
        """The operand whose size all ranks must agree on, if there is one."""
        for operand in (self.input, self.output):
            if isinstance(operand, Tensor):
                return operand
        return None

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole buffer: all slots where there are any."""
        for operand in (self.input, self.output):
            if type(operand) is Slots:
                return operand.num_bytes
        return 0 if self.common is None else self.common.nbytes

    def signature(self) -> str:
        """The part that all ranks must agree on, to read: `all_reduce(4 of float32, SUM)`."""
        parts = []
        if self.common is not None:
            dtype = str(self.common.dtype).removeprefix("torch.")
            parts.append(f"{self.common.numel()} of {dtype}")
        if self.op is not None:
            parts.append(reduction_name(self.op))
        if self.root >= 0:
            parts.append(f"root {self.root}")
        return f"{self.kind}({', '.join(parts)})"


def as_tensor(operand: Operand) -> Tensor:
    """An operand of a call whose kind says that it is one tensor."""
    assert isinstance(operand, Tensor)
    return operand


def as_slots(operand: Operand) -> Slots:
    """An operand of a call whose kind says that it is a piece for each rank."""
    assert isinstance(operand, Slots)
    return operand


def reduction_name(op: Reduction) -> str:
    """The bare name of a reduction: `SUM`."""
    return str(getattr(op, "op", op)).rpartition(".")[2]


def move(target: Tensor, source: Tensor) -> None:
    """Copy behind autograd's back, as c10d does: no graph, no version bump.

    Shapes may differ where numbers of elements agree. A copy onto itself is skipped: engines
    gather in place.
    """
    if target.data_ptr() == source.data_ptr() and target.device == source.device:
        return
    target, source = target.data, source.data
    if target.shape != source.shape:
        if target.numel() != source.numel():
            raise UsageError(
                f"a tensor of {target.numel()} elements cannot receive {source.numel()} elements"
            )
        source = source.reshape(target.shape)
    target.copy_(source)
