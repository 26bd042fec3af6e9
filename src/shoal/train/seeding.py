"""Random generators that a run decides about, so that nothing in it depends on chance."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_generators(seed: int, rank: int) -> None:
    """Give every generator of this rank a state of its own, from the seed of the run."""
    for number, set_seed in enumerate((torch.manual_seed, random.seed, _seed_numpy)):
        sequence = np.random.SeedSequence([seed, rank, number])
        set_seed(int(sequence.generate_state(1, dtype=np.uint64)[0]))


def _seed_numpy(seed: int) -> None:
    np.random.seed(seed % 2**32)
