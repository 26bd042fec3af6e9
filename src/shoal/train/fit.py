"""Whether a run can fit into this machine at all: only what is impossible is refused."""

from __future__ import annotations

import os

import torch

from shoal.errors import UsageError
from shoal.report.number_format import size
from shoal.train.config import TrainConfig

_BYTES_PER_NUMBER = 4
_COPIES = 4
"""Weights, gradients and AdamW's two moments."""

_PATIENCE = 2
"""What is refused would need this many times the memory of the machine: swap may do some."""


def check_memory(
    config: TrainConfig, num_parameters: int, *, num_ranks: int, num_local_ranks: int
) -> None:
    """Raise a `UsageError` if a run cannot fit into this machine by any means."""
    model = num_parameters * _BYTES_PER_NUMBER
    sequences = config.run.batch_size // (num_ranks * config.run.accumulate)
    activations = sequences * config.model.context * config.model.dim * _BYTES_PER_NUMBER
    per_rank = model * _COPIES // num_ranks + activations
    whole = model * num_local_ranks  # each rank makes the whole model before it is sharded
    needed = {"the whole model once per rank": whole}
    if config.parallel.device == "cpu":
        needed["shards and activations"] = per_rank * num_local_ranks
    else:
        _check_fits("a rank's shards and activations", per_rank, "a CUDA device", _device_bytes())
    for what, num_bytes in needed.items():
        _check_fits(what, num_bytes, "this machine", _machine_bytes())


def _check_fits(what: str, needed: int, where: str, available: int) -> None:
    if needed > _PATIENCE * available:
        raise UsageError(
            f"{what} would take at least {size(needed)}, but {where} has {size(available)}; "
            f"lower --dim, --layers, --batch-size or --context"
        )


def _machine_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _device_bytes() -> int:
    return torch.cuda.get_device_properties(0).total_memory
