"""Each rank's share of a global batch: the same samples in order, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from shoal.errors import UsageError
from shoal.runtime.module_state import map_tensors


class Batches(Protocol):
    """Global batches by the number of the step: a list of tensors, or whatever has their order."""

    def __len__(self) -> int:
        """How many steps there are."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """The whole batch of a step, as all ranks see it: tensors with samples along dim 0."""
        ...


def span_of(num_samples: int, rank: int, world_size: int) -> tuple[int, int]:
    """Where a rank's samples begin and end: shares differ by one at most."""
    each, more = divmod(num_samples, world_size)
    start = rank * each + min(rank, more)
    return start, start + each + (rank < more)


def weight_of(num_samples: int, rank: int, world_size: int) -> float:
    """What the mean over a rank's samples counts in the mean of all ranks' means; 1 if equal."""
    start, stop = span_of(num_samples, rank, world_size)
    return world_size * (stop - start) / num_samples


def num_samples_in(batch: Any) -> int:
    """How many samples a batch has; its tensors must agree."""
    found: set[int] = set()

    def look(tensor: Tensor) -> Tensor:
        found.add(tensor.shape[0] if tensor.dim() else -1)
        return tensor

    map_tensors(look, batch)
    if len(found) != 1 or found == {-1}:
        raise UsageError(
            "a global batch must hold tensors with the same number of samples along dim 0, got "
            f"{sorted(found) or 'no tensors'}"
        )
    return found.pop()


def check_shares(batch: Any, world_size: int) -> int:
    """Raise unless each rank could have a sample of a batch; returns how many it has."""
    num = num_samples_in(batch)
    if num < world_size:
        raise UsageError(
            f"a global batch of {num} samples cannot be shared by {world_size} ranks: each needs "
            "one at least"
        )
    return num


def share_in(batch: Any, rank: int, world_size: int) -> tuple[Any, float]:
    """A rank's part of a batch, and its weight."""
    num = check_shares(batch, world_size)
    start, stop = span_of(num, rank, world_size)
    cut: Callable[[Tensor], Tensor] = lambda tensor: tensor[start:stop]  # noqa: E731
    return map_tensors(cut, batch), weight_of(num, rank, world_size)
