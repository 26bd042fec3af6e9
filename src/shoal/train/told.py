"""What ranks tell each other once in every step, so that all decide alike.

One exchange, before the optimizer changes anything: each rank sends a row of numbers, and all read
the same table.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

import torch

from shoal.train.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """What one rank has to tell."""

    loss: float
    own_ms: float
    """Time of the step so far that was not spent waiting for others."""
    memory_bytes: float
    stop: bool
    """Whether this rank was asked to stop."""
    save_status: int
    collectives: int
    """Digest of the collectives of the step so far."""
    folder_lost: bool = False
    """Whether rank 0 finds the run folder removed or replaced."""


@dataclass(frozen=True, slots=True)
class Told:
    """The words of all ranks, in rank order."""

    words: tuple[Word, ...]

    @classmethod
    def exchange(cls, world: World, word: Word) -> Told:
        """Tell this rank's word, and hear the others'; collective."""
        rows = world.gather([float(value) for value in astuple(word)])
        return cls(tuple(_word(row) for row in rows))

    @property
    def loss(self) -> float:
        """The mean loss of all ranks, whose shares of the batch are equal."""
        return torch.tensor([word.loss for word in self.words], dtype=torch.float64).mean().item()

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks whose loss is not finite."""
        return tuple(rank for rank, word in enumerate(self.words) if not math.isfinite(word.loss))

    @property
    def stopping(self) -> bool:
        """Whether any rank was asked to stop."""
        return any(word.stop for word in self.words)

    @property
    def folder_lost(self) -> bool:
        """Whether the run folder is gone: so all ranks raise it, and none waits for rank 0."""
        return any(word.folder_lost for word in self.words)

    @property
    def save_statuses(self) -> tuple[int, ...]:
        """What each rank knows of the save in flight."""
        return tuple(word.save_status for word in self.words)

    @property
    def communicated_alike(self) -> bool:
        """Whether all ranks took part in the same collectives in the same order."""
        return len({word.collectives for word in self.words}) == 1


def _word(row: torch.Tensor) -> Word:
    loss, own_ms, memory_bytes, stop, save_status, collectives, folder_lost = row.tolist()
    return Word(
        loss=loss,
        own_ms=own_ms,
        memory_bytes=memory_bytes,
        stop=bool(stop),
        save_status=int(save_status),
        collectives=int(collectives),
        folder_lost=bool(folder_lost),
    )
