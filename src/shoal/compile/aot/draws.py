"""Random states that a traced function sets, and its graph would not: noticed at the next draw."""

from __future__ import annotations

import itertools

import torch

_seeds = itertools.count(1 << 48)


class Draws:
    """The draws of one trace, which draws nothing itself and leaves the state as it was.

    Each leaves a seed in the generator that nobody else would. Another one there means that the
    function has set the state. Draws on any device do so, since what sets the state of one device
    (a checkpoint, before it computes again) sets that of the CPU too.
    """

    def __init__(self) -> None:
        self._leave_seed()

    def __call__(self) -> None:
        """Say that a number is drawn here."""
        if torch.default_generator.initial_seed() != self._seed:
            raise NotImplementedError(
                "a function that sets the random state before it draws random numbers cannot be "
                "traced: its graph would draw others. Expected none of torch.manual_seed, "
                "torch.set_rng_state, torch.random.fork_rng, or torch.utils.checkpoint around a "
                "block that draws. Call it through torch.compile, which knows checkpoints, or set "
                "the state outside."
            )
        self._leave_seed()

    def _leave_seed(self) -> None:
        self._seed = next(_seeds)
        torch.default_generator.manual_seed(self._seed)
