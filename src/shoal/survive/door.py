"""`survive`: the one call that an own loop makes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from shoal.survive.run import SurvivingRun
from shoal.survive.shares import Batches
from shoal.survive.state import Stateful


def survive(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    data: Batches,
    *,
    stateful: Sequence[Stateful] = (),
    parities: int = 1,
    start: int = 0,
) -> SurvivingRun:
    """Train so that ranks may die: the others rebuild their state and go on in place.

    `data` gives global batches by number of step, the same on all ranks; each rank trains on its
    share. `stateful` is what else changes with the steps and is the same on all ranks, such as
    schedulers. With two `parities` two ranks may die at the same time. `start` says how many steps
    the model has behind it. All ranks call it alike, in processes of a launcher that lets the
    others go on (`python -m shoal.survive`).
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    return SurvivingRun(model, optimizers, data, stateful, parities, start)
