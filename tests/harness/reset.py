"""Giving every test on a rank the same start: seeds, torch's switches, the test's surroundings."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch._dynamo.utils import counters

from harness.messages import WarningFilter

SEED = 0


def seed() -> None:
    """Seed every generator, alike on all ranks."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


def reset_torch(device: torch.device) -> None:
    """Put torch's global switches back."""
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    torch.autograd.set_detect_anomaly(False)
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)
    if counters:  # resetting dynamo is dear on CUDA, so only after something was compiled
        torch._dynamo.reset()
        counters.clear()
    if device.type == "cuda":
        torch.cuda.init()
        torch.cuda.set_device(device)
        torch.cuda.empty_cache()  # other ranks and pools live on the same GPU
        torch.cuda.reset_peak_memory_stats(device)


def enter(environment: Mapping[str, str], folder: str) -> None:
    """Take over the variables and the working folder, undoing what the last test changed."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    os.chdir(folder)


def adopt_filters(filters: Sequence[WarningFilter]) -> None:
    """Replace the warning filters."""
    warnings.resetwarnings()
    for action, message, category, module, line in filters:
        warnings.filterwarnings(action, message, category, module, line, append=True)


def present_filters() -> tuple[WarningFilter, ...]:
    """Describe this process's warning filters so that another can adopt them."""

    def pattern(text: object) -> str:
        return "" if text is None else getattr(text, "pattern", str(text))

    return tuple(
        (action, pattern(message), category, pattern(module), line)
        for action, message, category, module, line in warnings.filters
    )
