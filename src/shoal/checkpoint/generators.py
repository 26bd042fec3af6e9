"""The state of every rank's random number generators, as tensors with one row for each rank.

    random/torch     torch's generator of the CPU
    random/cuda      torch's generator of the current CUDA device, where there is one
    random/python    Python's `random`
    random/numpy     numpy's global generator

A row belongs to a rank, so states come back on the same number of ranks only.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Mapping

import numpy as np
import torch

from shoal.checkpoint.placement import Part, Share
from shoal.layout.region import Region

PREFIX = "random/"


def generator_shares(rank: int, world_size: int) -> dict[str, Share]:
    """This rank's states, as its rows of tensors that all ranks have together."""
    return {
        f"{PREFIX}{name}": _row(read(), rank, world_size) for name, (read, _) in _kinds().items()
    }


def restore_generators(shares: Mapping[str, Share]) -> None:
    """Set this rank's generators to states that were loaded into its rows."""
    for name, (_, write) in _kinds().items():
        share = shares.get(f"{PREFIX}{name}")
        if share is not None:
            write(share.parts[0].local[0])


def _row(state: torch.Tensor, rank: int, world_size: int) -> Share:
    region = Region(offsets=(rank, 0), sizes=(1, state.numel()))
    return Share(
        shape=(world_size, state.numel()),
        dtype=state.dtype,
        parts=(Part(region=region, local=state.unsqueeze(0)),),
        writes=True,
        layout="one row for each rank",
    )


Kind = tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], object]]


def _kinds() -> dict[str, Kind]:
    kinds: dict[str, Kind] = {
        "torch": (torch.get_rng_state, torch.set_rng_state),
        "python": (_read_python, _write_python),
        "numpy": (_read_numpy, _write_numpy),
    }
    # A process that has not used CUDA must not begin to because of a checkpoint.
    if torch.cuda.is_initialized():
        kinds["cuda"] = (torch.cuda.get_rng_state, torch.cuda.set_rng_state)
    return kinds


def _read_python() -> torch.Tensor:
    _, words, gauss = random.getstate()
    return torch.tensor([*words, *_packed(gauss)])


def _write_python(state: torch.Tensor) -> None:
    *words, has_gauss, bits = state.tolist()
    random.setstate((3, tuple(words), _unpacked(has_gauss, bits)))


def _read_numpy() -> torch.Tensor:
    state = np.random.get_state(legacy=False)
    inner = state["state"]
    gauss = state["gauss"] if state["has_gauss"] else None
    return torch.tensor([*inner["key"].tolist(), inner["pos"], *_packed(gauss)])


def _write_numpy(state: torch.Tensor) -> None:
    *key, position, has_gauss, bits = state.tolist()
    gauss = _unpacked(has_gauss, bits)
    words = np.array(key, dtype=np.uint32)
    np.random.set_state(("MT19937", words, position, int(has_gauss), gauss or 0.0))


def _packed(gauss: float | None) -> tuple[int, int]:
    """A number that is kept for the next draw, or its absence, as two whole numbers."""
    return int(gauss is not None), struct.unpack("<q", struct.pack("<d", gauss or 0.0))[0]


def _unpacked(has_gauss: int, bits: int) -> float | None:
    return struct.unpack("<d", struct.pack("<q", bits))[0] if has_gauss else None
