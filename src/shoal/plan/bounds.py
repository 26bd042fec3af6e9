"""What a plan needs and takes at least, told from plans like it that were asked.

A plan that is like another one but keeps more needs no less memory. One that computes more again,
or communicates more often, keeps its lanes busy for no less time; with both, the whole step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.plan.setup import Setup

Sizes = Mapping[str, int]
"""Of the inputs: `batch`, `sequence`."""


def needs_no_less(setup: Setup, sizes: Sizes, its: Setup, its_sizes: Sizes) -> bool:
    """Whether a plan surely needs at least the memory of another one: it keeps no less."""
    return (
        _is_alike(setup, its)
        and (its.micro_batches > 1) == (setup.micro_batches > 1)
        and setup.replicas >= its.replicas
        and setup.reduces_each <= its.reduces_each
        and _kept(setup.reshard) >= _kept(its.reshard)
        and setup.prefetch_depth >= its.prefetch_depth
        and _saved(setup.checkpointing) >= _saved(its.checkpointing)
        and sizes.keys() == its_sizes.keys()
        and all(size >= its_sizes[name] for name, size in sizes.items())
    )


def computes_no_less(setup: Setup, sizes: Sizes, its: Setup, its_sizes: Sizes) -> bool:
    """Whether kernels surely take at least the time of another plan's, for as many tokens.

    Smaller batches do the same arithmetic with more kernels.
    """
    return (
        _is_alike(setup, its)
        and setup.replicas >= its.replicas  # of which the optimizer's grow
        and _saved(setup.checkpointing) <= _saved(its.checkpointing)
        and sizes.keys() == its_sizes.keys()
        and all(
            size <= its_sizes[name] if name == "batch" else size == its_sizes[name]
            for name, size in sizes.items()
        )
    )


def times_carried(setup: Setup, its: Setup) -> float:
    """How many times the bytes of another plan are surely on the link; 0 if nobody knows."""
    if not (
        _is_alike(setup, its)
        and setup.replicas == its.replicas
        and setup.micro_batches >= its.micro_batches
        and setup.reduces_each >= its.reduces_each
        and setup.prefetch_depth <= its.prefetch_depth
        and (setup.reshard == its.reshard or its.reshard is False)
    ):
        return 0.0
    if not setup.reduces_each or not its.reduces_each:
        return 1.0
    return setup.micro_batches / its.micro_batches


def _is_alike(setup: Setup, its: Setup) -> bool:
    return (
        its.world == setup.world
        and its.policy == setup.policy
        and its.layout == setup.layout
        and its.blocks_per_unit == setup.blocks_per_unit
    )


def _kept(reshard: bool | int | None) -> float:
    """How much of the gathered parameters is kept between forward and backward."""
    if isinstance(reshard, bool) or reshard is None:
        return 0.0 if reshard in (True, None) else 1.0
    return 1 / reshard


def _saved(checkpointing: Any) -> float:
    """How many units' activations are kept."""
    if isinstance(checkpointing, bool):
        return 0.0 if checkpointing else 1.0
    return 1 - 1 / checkpointing if isinstance(checkpointing, int) else 0.5
