"""The checksum of a region: CRC-32 of its bytes, folded first so that it costs little.

CRC-32 of every byte takes longer than reading the bytes. So a chunk is laid out in rows, the rows
are folded into one by exclusive or, and the CRC-32 goes on over these folds:

    chunk   b00 b01 b02 …        fold   b00^b10^b20…  b01^b11^b21…  …
            b10 b11 b12 …
            b20 b21 …                   CRC-32 of all folds, in order

Whatever CRC-32 always finds it still does (a flipped bit, any damage within 32 bits), but for two
flips of the same bit in the same column of one chunk. A row has a prime number of words: pages or
blocks of the disk that changed places come to lie in other columns, and are found too.
"""

from __future__ import annotations

import zlib
from enum import Enum

import numpy as np

_ROW_WORDS = 2039
_ROW_BYTES = 8 * _ROW_WORDS
_NUM_ROWS = 64

CHUNK_BYTES = _ROW_BYTES * _NUM_ROWS
"""How much is folded into one row; about what the processor's cache holds after reading it."""


class Checksum(Enum):
    """How the checksums of a checkpoint's regions are taken."""

    PLAIN = "crc32"
    """Of every byte: what format version 2 has."""

    FOLDED = "folded-crc32"

    def extend(self, chunk: memoryview, found: int) -> int:
        """Go on from the checksum of the chunks before; all but the last have `CHUNK_BYTES`."""
        if self is Checksum.PLAIN or len(chunk) < 2 * _ROW_BYTES:
            # Nothing to fold, or next to nothing: a small tensor's checksum is the plain one.
            return zlib.crc32(chunk, found)
        return zlib.crc32(_folded(chunk), found)

    def of(self, data: memoryview) -> int:
        """Take the checksum of all of a region."""
        found = 0
        for start in range(0, len(data), CHUNK_BYTES):
            found = self.extend(data[start : start + CHUNK_BYTES], found)
        return found


def _folded(chunk: memoryview) -> memoryview:
    whole = len(chunk) // _ROW_BYTES * _ROW_BYTES
    rows = np.frombuffer(chunk[:whole], np.uint64).reshape(-1, _ROW_WORDS)
    folded = np.bitwise_xor.reduce(rows, axis=0)
    rest = np.frombuffer(chunk[whole:], np.uint8)
    folded.view(np.uint8)[: len(rest)] ^= rest
    return folded.data
