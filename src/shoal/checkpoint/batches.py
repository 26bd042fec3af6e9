"""Which tensors are loaded together, the same on all ranks, in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.checkpoint.agreement import Ranks
from shoal.errors import CheckpointError

STAGED_BYTES = 32 << 20
"""As much as this waits in host memory on a rank until all ranks have verified theirs.

The limit is the largest part that any rank has of any tensor, where that is larger: a tensor is
written when all of it is verified. So a load holds that much, and the block that is being read.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Tensors that are read and agreed on together, the next ones in order.

    `overlaps` says that no rank lacks the memory to read them while the ranks still agree on the
    batch before.
    """

    num_tensors: int
    overlaps: bool


def agreed_batches(ranks: Ranks, sizes: Sequence[int]) -> list[Batch]:
    """Cut the tensors, from how many bytes each takes here. Collective."""
    everywhere = ranks.gather(list(sizes))
    return ranks.first(lambda: batches_of(everywhere))


def batches_of(everywhere: Sequence[Sequence[int]]) -> list[Batch]:
    """Fill batches in order to half of the limit, so that two of them fit."""
    if len({len(sizes) for sizes in everywhere}) > 1:
        numbers = ", ".join(str(len(sizes)) for sizes in everywhere)
        raise CheckpointError(
            f"the ranks load different tensors: {numbers} of them. Give every rank the same names, "
            "include= and exclude="
        )
    limit = max([STAGED_BYTES, *(size for sizes in everywhere for size in sizes)])
    batches: list[Batch] = []
    before = used = [0] * len(everywhere)
    count = 0

    def close() -> None:
        fits = all(a + b <= limit for a, b in zip(before, used, strict=True))
        batches.append(Batch(num_tensors=count, overlaps=fits))

    for added in zip(*everywhere, strict=True):
        together = [a + b for a, b in zip(used, added, strict=True)]
        if count and max(together) > limit // 2:
            close()
            before, used, count = used, list(added), 1
        else:
            used, count = together, count + 1
    if count:
        close()
    return batches
