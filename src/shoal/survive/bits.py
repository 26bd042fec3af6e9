"""Sums over the bits of tensors: what says that memory is as it was written.

A sum of words, wrapped around at 64 bits, changes with any one bit that flips, wherever it is. It
does not depend on the order of words, so the sums of parts add up to that of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd

import torch
from torch import Tensor

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def sum_of_bits(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """One int64 for the memory of some tensors."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        total += _sum_of(tensor.detach(), tensor.nbytes)
    return total


def sum_of_parts(whole: Tensor, num_parts: int) -> Tensor:
    """The same for parts of one size, each summed as whoever has it alone sums it."""
    return _sum_of(whole.detach(), whole.nbytes // num_parts)


def _sum_of(tensor: Tensor, part_bytes: int) -> Tensor:
    """The words are as wide as parts allow, so that whole and parts have the same ones."""
    if not part_bytes:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    octets = tensor.contiguous().view(-1).view(torch.uint8)
    width = gcd(part_bytes, 8)
    if octets.storage_offset() % width:
        octets = octets.clone()
    return octets.view(_WORDS[width]).sum(dtype=torch.int64)
