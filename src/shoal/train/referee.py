"""Decides, on all ranks alike, whether a step may change the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from shoal.train.divergence import PATIENCE, nonfinite
from shoal.train.memory import memory_bytes
from shoal.train.saver import Saver
from shoal.train.scale import LossScale
from shoal.train.step import Attempt
from shoal.train.told import Told, Word
from shoal.train.world import World
from shoal.watch import compare_collectives, digest_of_collectives


class Referee:
    """Exchanges what the ranks know of each step, and judges by it.

    After a step `told` is what all ranks said, `notes` what a person wants to know of it, and
    `diverged` why the run has to stop, if it has to; `scale` is what the next step's loss is
    multiplied by.
    """

    told: Told

    def __init__(
        self,
        world: World,
        on_nonfinite: Literal["stop", "skip", "ignore"],
        stop_requested: Callable[[], bool],
        saver: Saver,
        scale: LossScale,
    ) -> None:
        self.notes: tuple[str, ...] = ()
        self.diverged = ""
        self.scale = scale
        self._world = world
        self._on_nonfinite = on_nonfinite
        self._stop_requested = stop_requested
        self._saver = saver
        self._num_skipped = 0

    def judge(self, step: int) -> Callable[[Attempt], bool]:
        """What accepts a step, or does not; collective."""

        def accept(attempt: Attempt) -> bool:
            self.told = self._exchange(attempt)
            if not self.told.communicated_alike:
                compare_collectives()
            self.notes = ()
            found = nonfinite(step, self.told, attempt.grad_norm)
            if found and not self.told.lost and self.scale.can_shrink:
                self.scale = self.scale.shrunk()
                self.notes = (f"{found}; skipped, losses are scaled by {self.scale.factor:g} now",)
                return False
            if not found or self._on_nonfinite == "ignore":
                self._num_skipped = 0
                self.scale = self.scale.grown()
                return True
            self._num_skipped += 1
            if self._on_nonfinite == "stop":
                self.diverged = found
            elif self._num_skipped >= PATIENCE:
                self.diverged = f"{found}, as in the {PATIENCE - 1} steps before it"
            else:
                self.notes = (f"{found}; the step is skipped on all ranks",)
            return False

        return accept

    def _exchange(self, attempt: Attempt) -> Told:
        word = Word(
            loss=attempt.loss,
            own_ms=attempt.own_ms,
            memory_bytes=memory_bytes(self._world.device),
            stop=self._stop_requested(),
            save_status=self._saver.status,
            collectives=digest_of_collectives(),
            folder_lost=self._saver.folder_lost,
        )
        return Told.exchange(self._world, word)
