"""Address space that freed parameters point at: every float there is NaN, and no memory is behind.

One small file of set bits is mapped again and again over a large range of addresses. Whoever
reads a freed parameter past all checks (a view that was kept, a backward that came another way)
gets NaN, which nobody takes for a result; reading at no address would end the process.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import torch

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
