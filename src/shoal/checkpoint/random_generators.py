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
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shoal.checkpoint.data_files import RegionReader
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.offline import read_region
from shoal.checkpoint.shares import Part, Share
from shoal.checkpoint.storage import Checkpoint
from shoal.errors import CheckpointError
from shoal.layout.region import Region

PREFIX = "random/"
_TORCH_WORDS = 624


def generator_shares(rank: int, world_size: int) -> dict[str, Share]:
    """This rank's states, as its rows of tensors that all ranks have together."""
    return {
        PREFIX + name: _row(generator.read(), rank, world_size)
        for name, generator in _generators().items()
    }


def read_generators(
    checkpoint: Checkpoint, manifest: Manifest, rank: int, world_size: int
) -> dict[str, torch.Tensor]:
    """This rank's saved states, which its generators will take; none for other numbers of ranks."""
    states: dict[str, torch.Tensor] = {}
    with RegionReader(checkpoint, manifest) as reader:
        for name, share in generator_shares(rank, world_size).items():
            entry = manifest.tensors.get(name)
            # Those of CUDA are saved by runs that use it.
            if entry is None and manifest.world_size == world_size and name != f"{PREFIX}cuda":
                raise CheckpointError(
                    f"the checkpoint lacks {name!r}: it is damaged, or was made otherwise"
                )
            if entry is not None and entry.shape[:1] == (world_size,):
                if (entry.shape, entry.dtype) != (share.shape, share.dtype):
                    raise CheckpointError(
                        f"{name!r} is {entry.dtype} of shape {entry.shape} there, {share.dtype} "
                        f"of shape {share.shape} here"
                    )
                states[name] = read_region(reader, name, entry, share.parts[0].region)[0]
    for name, state in states.items():
        try:
            _generators()[name.removeprefix(PREFIX)].attempt(state)
        except Exception as error:
            # Each library raises what it likes.
            raise CheckpointError(f"{name!r} is not a generator's state: {error}") from error
    return states


def restore_generators(states: Mapping[str, torch.Tensor]) -> None:
    """Set this rank's generators to states that `read_generators` gave."""
    for name, generator in _generators().items():
        if PREFIX + name in states:
            generator.write(states[PREFIX + name])


def _row(state: torch.Tensor, rank: int, world_size: int) -> Share:
    region = Region(offsets=(rank, 0), sizes=(1, state.numel()))
    return Share(
        shape=(world_size, state.numel()),
        dtype=state.dtype,
        parts=(Part(region=region, local=state.unsqueeze(0)),),
        writes=True,
        layout="one row for each rank",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Generator:
    """How its state is read and written, and tried on a generator that nobody uses."""

    read: Callable[[], torch.Tensor]
    write: Callable[[torch.Tensor], object]
    attempt: Callable[[torch.Tensor], object]


def _generators() -> dict[str, _Generator]:
    generators = {
        "torch": _Generator(
            read=torch.get_rng_state,
            write=torch.set_rng_state,
            attempt=_attempt_torch,
        ),
        "python": _Generator(
            read=_read_python,
            write=lambda state: random.setstate(_python_state(state)),
            attempt=lambda state: random.Random().setstate(_python_state(state)),
        ),
        "numpy": _Generator(
            read=_read_numpy,
            write=lambda state: np.random.set_state(_numpy_state(state)),
            attempt=lambda state: np.random.RandomState().set_state(_numpy_state(state)),
        ),
    }
    # A process that has not used CUDA must not begin to because of a checkpoint.
    if torch.cuda.is_initialized():
        generators["cuda"] = _Generator(
            read=torch.cuda.get_rng_state,
            write=torch.cuda.set_rng_state,
            attempt=lambda state: torch.Generator("cuda").set_state(state),
        )
    return generators


def _attempt_torch(state: torch.Tensor) -> None:
    torch.Generator().set_state(state)
    # How many words are left, and the next one: torch would read beyond its memory.
    left, following = struct.unpack_from("<i4xQ", state.numpy().tobytes(), 8)
    if left + following > _TORCH_WORDS + 1:
        raise ValueError(f"{left} words left from word {following} on")


def _read_python() -> torch.Tensor:
    _, words, gauss = random.getstate()
    return torch.tensor([*words, *_packed(gauss)])


def _python_state(state: torch.Tensor) -> tuple[int, tuple[int, ...], float | None]:
    *words, has_gauss, bits = state.tolist()
    return 3, tuple(words), _unpacked(has_gauss, bits)


def _read_numpy() -> torch.Tensor:
    state = np.random.get_state(legacy=False)
    inner = state["state"]
    gauss = state["gauss"] if state["has_gauss"] else None
    return torch.tensor([*inner["key"].tolist(), inner["pos"], *_packed(gauss)])


def _numpy_state(state: torch.Tensor) -> tuple[str, Any, int, int, float]:
    *key, position, has_gauss, bits = state.tolist()
    if not 0 <= position <= len(key):
        # numpy would read beyond its memory.
        raise ValueError(f"position {position} of {len(key)}")
    gauss = _unpacked(has_gauss, bits)
    return "MT19937", np.array(key, dtype=np.uint32), position, int(has_gauss), gauss or 0.0


def _packed(gauss: float | None) -> tuple[int, int]:
    """A number that is kept for the next draw, or its absence, as two whole numbers."""
    return int(gauss is not None), struct.unpack("<q", struct.pack("<d", gauss or 0.0))[0]


def _unpacked(has_gauss: int, bits: int) -> float | None:
    return struct.unpack("<d", struct.pack("<q", bits))[0] if has_gauss else None
