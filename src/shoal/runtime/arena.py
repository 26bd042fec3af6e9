"""Which bytes: memory in which the units of a model take turns.

Slots are kept by size. A unit's buffer is a storage object of its own, which is attached to a slot
for a gather and detached when the unit is freed, so that a step that was seen before allocates
nothing, and a tensor saved by autograd finds the bytes of the next gather.

A buffer without memory points at a `Graveyard`, where every float is NaN. A backward
that comes to a unit without its outputs would read there; the engine notices when the unit's
gradients arrive, and says so.

torch 2.11 cannot move memory between storages: there a buffer is resized, and its memory comes
from the allocator's cache.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import Counter, defaultdict

import torch

from shoal._torch import cuda
from shoal._torch import storage as torch_storage
from shoal.comm.imagined_device import imagined, resizer

_CHUNK = 2 << 20
_FAILED = ctypes.c_void_p(-1).value


class Graveyard:
    """NaN for as many bytes as are asked for; private to this process, so writing harms nobody."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = -(-max(num_bytes, 1) // _CHUNK) * _CHUNK
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        private = mmap.MAP_PRIVATE
        read_write = mmap.PROT_READ | mmap.PROT_WRITE
        self._address = libc.mmap(
            None, self.num_bytes, read_write, private | mmap.MAP_ANONYMOUS, -1, 0
        )
        if self._address in (None, _FAILED):
            raise OSError(ctypes.get_errno(), "cannot reserve address space for freed parameters")
        if not hasattr(os, "memfd_create"):
            return  # other systems than Linux read zeros here
        file = os.memfd_create("shoal-freed")
        try:
            os.write(file, b"\xff" * _CHUNK)
            fixed = private | 0x10  # MAP_FIXED, which the mmap module does not name
            for offset in range(0, self.num_bytes, _CHUNK):
                at = libc.mmap(self._address + offset, _CHUNK, read_write, fixed, file, 0)
                if at == _FAILED:
                    raise OSError(ctypes.get_errno(), "cannot map memory for freed parameters")
        finally:
            os.close(file)

    def grave(self, num_bytes: int) -> torch.Tensor:
        """Bytes of it. They stay for the life of the process: storages may point there."""
        assert self._address is not None
        bytes_there = (ctypes.c_char * num_bytes).from_address(self._address)
        return torch.frombuffer(bytes_there, dtype=torch.uint8)


_KEPT_BYTES = 64 << 20
"""Up to here, memory to reduce from is kept from one step to the next; on CPU, slots are too."""


class Arena:
    """The memory of one model on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._notes = imagined() if device.type == "meta" else None
        self.swaps = (self._notes or torch_storage).can_swap_memory()
        """Whether storages exchange memory; if not, they are resized."""
        self._buries = self.swaps and device.type == "cpu"
        self._slots: defaultdict[int, list[torch.UntypedStorage]] = defaultdict(list)
        self._slot_bytes = 0
        """Of all slots that are not in use."""
        self._rows: defaultdict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        self._users: Counter[int] = Counter()
        self._graveyard: Graveyard | None = None
        self.pool: cuda.StreamPool | None = None
        """What buffers that are resized get their memory from; None: compute's pool."""
        self.generation = 0
        """How often memory was given up: what was remembered of it is void."""

    def blank(self, num_bytes: int) -> torch.Tensor:
        """Bytes of which views can be made; what `attach` gives memory to later."""
        if self._buries:
            return self._grave(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def bury(self, storage: torch.UntypedStorage) -> None:
        """Leave a new storage without memory."""
        if not self._buries:
            resizer(storage)(0)

    def gather_apart(self) -> None:
        """Keep memory of gathers apart from all other, as slots are where storages exchange it.

        It is as ordered as slots are: a gather waits for compute, and compute for the gather.
        """
        if not self.swaps and self.device.type == "cuda" and self.pool is None:
            self.pool = cuda.StreamPool(self.device)

    def adopt(self, storage: torch.UntypedStorage) -> torch.UntypedStorage | None:
        """Let memory that came from elsewhere be taken back; returns what `detach` wants."""
        if not self.swaps:
            return None
        slot = self.blank(storage.nbytes()).untyped_storage()
        self.bury(slot)
        return slot

    def attach(self, storage: torch.UntypedStorage, num_bytes: int) -> torch.UntypedStorage:
        """Give an empty storage memory; returns what has to be given back with `detach`."""
        slots = self._slots[num_bytes]
        if slots:
            slot = slots.pop()
            self._slot_bytes -= num_bytes
        else:
            slot = self._new(num_bytes)
        torch_storage.swap_memory(storage, slot)
        return slot

    def detach(
        self, storage: torch.UntypedStorage, num_bytes: int, slot: torch.UntypedStorage
    ) -> None:
        """Take a storage's memory back."""
        torch_storage.swap_memory(storage, slot)
        # On CPU large slots go back to the system, which zeroes new ones: a cost by the byte, of a
        # unit that computes much longer. Kept, the slots of an embedding and of a head would be
        # there, unused, when backward or the optimizer is at its peak.
        if self._slot_bytes + num_bytes > _KEPT_BYTES and self.device.type == "cpu":
            if num_bytes > _KEPT_BYTES:
                return
            self._drop_slots()  # of sizes that went out of use, maybe
        self._slots[num_bytes].append(slot)
        self._slot_bytes += num_bytes

    def expect_rows(self, num_bytes: int) -> None:
        """Announce that one more unit will reduce through that many bytes.

        A size that only one unit has is not kept: its memory is better used by others.
        """
        self._users[num_bytes] += 1

    def keeps_rows(self, num_bytes: int) -> bool:
        """Whether memory of that size comes back in the next step.

        Large memory is needed for something else in forward, and its host cost is small beside
        what is done with it.
        """
        return self._users[num_bytes] > 1 and num_bytes <= _KEPT_BYTES

    def take_rows(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory to reduce from; what is in there is arbitrary."""
        rows = self._rows[numel, dtype]
        if rows:
            return rows.pop()
        new = torch.empty(numel, dtype=dtype, device=self.device)
        if self._notes is not None:
            self._notes.is_for(new.untyped_storage(), "gradient matrices")
        return new

    def give_rows(self, rows: torch.Tensor) -> None:
        """Return what `take_rows` gave, once the current stream may overwrite it."""
        if self.keeps_rows(rows.nbytes):
            self._rows[rows.numel(), rows.dtype].append(rows)

    @property
    def num_bytes(self) -> int:
        """The memory that is not in use now, and kept."""
        rows = sum(kept.nbytes for rows in self._rows.values() for kept in rows)
        return self._slot_bytes + rows

    def trim(self) -> None:
        """Give up the memory that is not in use."""
        self.generation += 1
        self._drop_slots()
        self._rows.clear()

    def _drop_slots(self) -> None:
        self._slots.clear()
        self._slot_bytes = 0

    def _new(self, num_bytes: int) -> torch.UntypedStorage:
        new = torch.empty(num_bytes, dtype=torch.uint8, device=self.device).untyped_storage()
        if self._notes is not None:
            self._notes.is_for(new, "gathered parameters")
        return new

    def _grave(self, num_bytes: int) -> torch.Tensor:
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        if self._graveyard is None or self._graveyard.num_bytes < num_bytes:
            self._graveyard = Graveyard(num_bytes)
        return self._graveyard.grave(num_bytes)


class Buffer:
    """Bytes that come from an arena and go back there."""

    __slots__ = ("_arena", "_resize", "_slot", "_storage", "bytes", "num_bytes")

    def __init__(self, num_bytes: int, arena: Arena) -> None:
        self.num_bytes = num_bytes
        self.bytes = arena.blank(num_bytes)
        """All of it. Make the views, then call `settle`: later there can be no new ones."""
        self._begin(self.bytes.untyped_storage(), arena)

    def _begin(self, storage: torch.UntypedStorage, arena: Arena) -> None:
        self._storage, self._arena = storage, arena
        self._slot: torch.UntypedStorage | None = None
        self._resize = None if arena.swaps else resizer(storage)

    @classmethod
    def around(cls, tensor: torch.Tensor, arena: Arena) -> Buffer:
        """Take over the memory of a tensor that has some: it counts as filled."""
        storage = tensor.untyped_storage()
        buffer = cls.__new__(cls)
        buffer.num_bytes = storage.nbytes()
        buffer.bytes = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        buffer._begin(storage, arena)
        buffer._slot = arena.adopt(storage)
        return buffer

    def settle(self) -> None:
        """All views are made; from here on there is memory only between `fill` and `empty`."""
        self._arena.bury(self._storage)

    def typed(self, dtype: torch.dtype) -> torch.Tensor:
        """All of it as elements of a dtype."""
        return self.bytes.view(dtype)

    def fill(self) -> None:
        """Give it memory; what is in there is arbitrary."""
        if self._resize is None:
            self._slot = self._arena.attach(self._storage, self.num_bytes)
        elif self._arena.pool is None:
            self._resize(self.num_bytes)
        else:
            self._arena.pool.allocate(self._resize, self.num_bytes)

    def empty(self) -> None:
        """Take its memory away."""
        if self._resize is not None:
            self._resize(0)
        else:
            assert self._slot is not None
            self._arena.detach(self._storage, self.num_bytes, self._slot)
            self._slot = None
