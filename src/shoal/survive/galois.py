"""GF(2^8) over words: eight bytes at a time, each an element of the field.

Adding is xor. Multiplying by two is a shift that folds the carry back by the polynomial; every
other weight is made of it. There are no tables over data, so it runs on any device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_POLYNOMIAL = 0x1D
"""x^8 + x^4 + x^3 + x^2 + 1 without its highest bit: two generates all 255 elements but zero."""

_LOW_BITS = 0x7F7F7F7F7F7F7F7F
_ONES = 0x0101010101010101


def _powers() -> tuple[list[int], dict[int, int]]:
    powers, value = [], 1
    for _ in range(255):
        powers.append(value)
        value <<= 1
        if value > 255:
            value ^= 256 | _POLYNOMIAL
    return powers, {power: exponent for exponent, power in enumerate(powers)}


_POWERS, _LOGARITHMS = _powers()


def power(exponent: int) -> int:
    """Two to an exponent, which may be negative: the weight of a member of that number."""
    return _POWERS[exponent % 255]


def product(a: int, b: int) -> int:
    """Multiply two elements."""
    if a == 0 or b == 0:
        return 0
    return _POWERS[(_LOGARITHMS[a] + _LOGARITHMS[b]) % 255]


def inverse(a: int) -> int:
    """The element that gives one when multiplied by `a`."""
    if a == 0:
        raise ZeroDivisionError("zero has no inverse in GF(2^8)")
    return _POWERS[-_LOGARITHMS[a] % 255]


def double_(words: Tensor) -> Tensor:
    """Multiply every byte by two, in place."""
    carries = words.bitwise_right_shift(7).bitwise_and_(_ONES).mul_(_POLYNOMIAL)
    return words.bitwise_and_(_LOW_BITS).bitwise_left_shift_(1).bitwise_xor_(carries)


def scaled(words: Tensor, weight: int) -> Tensor:
    """Multiply every byte by a weight."""
    result = torch.zeros_like(words)
    for bit in reversed(range(weight.bit_length())):
        double_(result)
        if weight >> bit & 1:
            result.bitwise_xor_(words)
    return result


def add_up_(total: Tensor, pieces: Sequence[Tensor]) -> Tensor:
    """Xor pieces into a total."""
    for piece in pieces:
        total.bitwise_xor_(piece)
    return total


def weighted_sum(pieces: Sequence[tuple[int, Tensor]]) -> Tensor:
    """The sum of pieces, each times two to its exponent; one pass for each exponent in between."""
    ordered = sorted(pieces, key=lambda piece: piece[0], reverse=True)
    last, first = ordered[0]
    total = first.clone()
    for exponent, piece in ordered[1:]:
        for _ in range(last - exponent):
            double_(total)
        total.bitwise_xor_(piece)
        last = exponent
    for _ in range(last):
        double_(total)
    return total
