"""The order in which a run sees its text: every sample once per epoch, on any number of ranks.

A sample is a stretch of `context` bytes; stretches do not overlap and cover the text. An epoch is
all of them in an order that seed and epoch decide. A run goes through the epochs one after the
other, so that a single number, how many samples all ranks together have seen, says where it is:

    samples seen   0 ............ n-1 | n ........... 2n-1 | 2n ...
                        epoch 0       |      epoch 1       |

The number belongs to the run and not to a rank: a resume goes on with the next sample whatever the
number of ranks, or the size of the batch, is then.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np


def num_samples(*, num_bytes: int, context: int) -> int:
    """Count the samples of a text; each also needs the byte after it, which it predicts."""
    return (num_bytes - 1) // context


def sample_offsets(*, seed: int, seen: int, num: int, num_bytes: int, context: int) -> np.ndarray:
    """Return where the next `num` samples begin in the text, after `seen` ones of the run."""
    per_epoch = num_samples(num_bytes=num_bytes, context=context)
    epochs, places = np.divmod(np.arange(seen, seen + num, dtype=np.int64), per_epoch)
    indices = np.empty(num, dtype=np.int64)
    for epoch in np.unique(epochs):
        in_epoch = epochs == epoch
        indices[in_epoch] = _order(seed, int(epoch), per_epoch)[places[in_epoch]]
    return indices * context


# Two, because a batch may reach into the next epoch.
@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, num: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num)
