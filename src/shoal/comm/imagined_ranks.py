"""The pieces that imagined ranks of a modelled job send to the rank that runs.

Rank 0 of N is alone, so the other ranks are taken to hold the same values: a gather writes N
copies of its piece, a sum is N times its own contribution, a mean is its own. Host work does not
grow with N where tensors are flat.

`KeptGathers` is for steps that are timed. Writing the pieces of N - 1 ranks takes kernels that a
real rank does not run: its network writes them. So they are written beforehand: memory in which a
gather ends is filled when it is first seen, with values drawn from this rank's piece, and left as
it is from then on. Gathered values are finite, and distributed as this rank's parameters are.

That holds as long as nobody else writes there:

- An output that this rank's piece is not part of (FSDP1, collectives of a graph) is new: it is
  moved to a pool of its dtype, which only such outputs share.
- An output that this rank wrote its piece to must be in such a pool already. FSDP2 allocates it on
  a stream that allocates nothing else; shoal does if its arena is told to (`gather_apart`).

Measurements check the values with `ModelledGroup.sample_gathers`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from shoal._torch import collectives, cuda, kernels
from shoal.comm.calls import Call, Reduction, Slots, as_slots, as_tensor, move, reduction_name
from shoal.comm.collectives import Kind


def receive(call: Call, rank: int, size: int) -> None:
    """Write what `call` brings to rank `rank` of `size`."""
    _APPLY[call.kind](call, rank, size)


def _all_gather(call: Call, rank: int, size: int) -> None:
    _spread(as_slots(call.output), as_tensor(call.input), rank)


def _gather(call: Call, rank: int, size: int) -> None:
    if rank == call.root:
        _all_gather(call, rank, size)


def _reduce_scatter(call: Call, rank: int, size: int) -> None:
    _reduce_copies(call, as_slots(call.input)[rank], size)


def _all_reduce(call: Call, rank: int, size: int) -> None:
    _reduce_copies(call, as_tensor(call.input), size)


def _reduce(call: Call, rank: int, size: int) -> None:
    if rank == call.root:
        _all_reduce(call, rank, size)


def _scatter(call: Call, rank: int, size: int) -> None:
    if rank == call.root:
        move(as_tensor(call.output), as_slots(call.input)[rank])


def _all_to_all(call: Call, rank: int, size: int) -> None:
    piece, slots = as_slots(call.input)[rank], as_slots(call.output)
    if piece.numel() == slots[rank].numel():
        _spread(slots, piece, rank)


def _receive(call: Call, rank: int, size: int) -> None:
    as_tensor(call.output).data.zero_()


def _nothing(call: Call, rank: int, size: int) -> None:
    """Nothing changes here: the others hold it already, or nothing comes to this rank."""


_APPLY: dict[Kind, Callable[[Call, int, int], None]] = {
    Kind.ALL_GATHER: _all_gather,
    Kind.REDUCE_SCATTER: _reduce_scatter,
    Kind.ALL_REDUCE: _all_reduce,
    Kind.REDUCE: _reduce,
    Kind.BROADCAST: _nothing,
    Kind.GATHER: _gather,
    Kind.SCATTER: _scatter,
    Kind.ALL_TO_ALL: _all_to_all,
    Kind.BARRIER: _nothing,
    Kind.SEND: _nothing,
    Kind.RECEIVE: _receive,
}


def is_in_place(slots: Slots, piece: Tensor, rank: int) -> bool:
    """Whether a piece is this rank's slot already."""
    if slots.flat is None:
        return False
    return piece.data_ptr() == slots.flat.data_ptr() + rank * piece.nbytes


def _spread(slots: Slots, piece: Tensor, rank: int) -> None:
    if slots.flat is None:
        # Lists are for small things: sizes, pickled objects.
        pieces = [slot.data for slot in slots.pieces]
        kernels.foreach_copy(pieces, [piece.data.reshape(pieces[0].shape)] * slots.size)
    elif slots.is_even:
        rows, row = wide(slots.flat.view(slots.size, -1), piece.data.reshape(1, -1))
        # The piece may be this rank's slot, so that one is not written from itself.
        for others in (rows[:rank], rows[rank + 1 :]):
            if others.numel():
                others.copy_(row)
        move(slots[rank], piece)
    else:
        piece = piece.data.clone()
        slots.flat.zero_()
        move(slots[rank], piece)


_WIDEST = torch.complex128  # 16 bytes: as many as a thread moves at once


def wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same bytes as fewer, wider elements, where all tensors can be read so.

    A copy that repeats its source moves one element per thread: two bytes of bf16 each would take
    several times as long.
    """
    ends = ((one, numel) for one in tensors for numel in (one.storage_offset(), one.shape[-1]))
    if any(numel * one.element_size() % _WIDEST.itemsize for one, numel in ends):
        return tensors
    return tuple(one.view(_WIDEST) for one in tensors)


def _reduce_copies(call: Call, piece: Tensor, size: int) -> None:
    assert call.op is not None
    output, piece = as_tensor(call.output).data, piece.data
    if output.shape != piece.shape:
        piece = piece.reshape(output.shape)
    reduction_of(call.op)(output, piece, size, call.op)


def reduction_of(op: Reduction) -> Callable[[Tensor, Tensor, int, Reduction], None]:
    """The function that writes to an output the reduction of a piece over `size` equal pieces."""
    reduce = _REDUCE.get(collectives.reduction_kind(op))
    if reduce is None:
        raise NotImplementedError(f"reduction {reduction_name(op)} is not supported here")
    return reduce


def _sum(output: Tensor, piece: Tensor, size: int, op: Reduction) -> None:
    if piece.dtype == torch.bool:
        return move(output, piece)
    torch.mul(piece, size, out=output)


def _premultiplied_sum(output: Tensor, piece: Tensor, size: int, op: Reduction) -> None:
    torch.mul(piece, size * collectives.premultiplier(op), out=output)


def _product(output: Tensor, piece: Tensor, size: int, op: Reduction) -> None:
    if piece.dtype == torch.bool:
        return move(output, piece)
    torch.pow(piece, size, out=output)


def _xor(output: Tensor, piece: Tensor, size: int, op: Reduction) -> None:
    move(output, piece if size % 2 else torch.zeros_like(piece))


def _same(output: Tensor, piece: Tensor, size: int, op: Reduction) -> None:
    if output.data_ptr() != piece.data_ptr():
        output.copy_(piece)


_REDUCE: dict[ReduceOp.RedOpType, Callable[[Tensor, Tensor, int, Reduction], None]] = {
    ReduceOp.SUM: _sum,
    ReduceOp.PREMUL_SUM: _premultiplied_sum,
    ReduceOp.PRODUCT: _product,
    ReduceOp.BXOR: _xor,
    **dict.fromkeys((ReduceOp.AVG, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.BAND, ReduceOp.BOR), _same),
}


_DRAWN_AT_ONCE = 1 << 24
"""Elements. Their indices take eight bytes each."""


class KeptGathers:
    """Which memory holds gathered values, and the pools that it comes from."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pools: dict[torch.dtype, cuda.StreamPool] = {}
        self._drawn: set[tuple[int, int]] = set()
        self.num_refused = 0
        """Gathers of floats that had to be written all the same, since `forget`."""
        self._generator = torch.Generator(device).manual_seed(0)

    def forget(self) -> None:
        """Fill all memory anew when it is next seen."""
        self._drawn.clear()
        self.num_refused = 0

    def holds(self, flat: Tensor) -> bool:
        """Whether a tensor's memory was filled, and is left as it is."""
        return (flat.data_ptr(), flat.nbytes) in self._drawn

    def deliver(self, slots: Slots, piece: Tensor, rank: int) -> bool:
        """Give an all-gather's output what its memory kept; False if it has to be written."""
        flat = slots.flat
        if flat is None or not (slots.is_even and flat.is_cuda and flat.is_floating_point()):
            return False
        in_place = is_in_place(slots, piece, rank)
        if not in_place and not self._move(flat):
            self.num_refused += 1
            return False
        if not self.holds(flat):
            self._drawn.add((flat.data_ptr(), flat.nbytes))
            start, end = (rank * piece.numel(), (rank + 1) * piece.numel()) if in_place else (0, 0)
            self._draw(flat[:start], piece)
            self._draw(flat[end:], piece)
        return True

    def _move(self, flat: Tensor) -> bool:
        """Give an output that nobody has written to memory of its pool, if it has no neighbours."""
        storage = flat.untyped_storage()
        if storage.nbytes() != flat.nbytes:
            return False
        pool = self._pools.get(flat.dtype)
        if pool is None:
            pool = self._pools[flat.dtype] = cuda.StreamPool(self._device)
        storage.resize_(0)
        pool.allocate(storage.resize_, flat.nbytes)
        return True

    def _draw(self, target: Tensor, piece: Tensor) -> None:
        values = piece.data.reshape(-1)
        for part in target.split(_DRAWN_AT_ONCE):
            chosen = torch.randint(
                values.numel(), part.shape, device=part.device, generator=self._generator
            )
            part.copy_(values[chosen])
