"""What users set for torch's own ahead-of-time runtime."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch.fx import GraphModule


def joint_pass() -> Callable[[GraphModule, Any], GraphModule] | None:
    """The pass over joint graphs, before they are cut, that a user has set for torch's runtime."""
    from torch._functorch import config

    found: Any = getattr(config, "joint_custom_pass", None)
    return cast(Any, found) if callable(found) else None


def memory_budget() -> float:
    """The share of what would be saved that may stay, which a user has set for torch's runtime."""
    from torch._functorch import config

    chosen: Any = config.activation_memory_budget
    return 1.0 if chosen is None else float(chosen)


def functionalises_rng() -> bool:
    """Whether a user has set random states to be inputs and outputs of graphs."""
    from torch._functorch import config

    return bool(config.functionalize_rng_ops)


def backward_autocast() -> Any:
    """What a user has set backwards to be traced under; "off" if nothing.

    "same_as_forward", or the arguments of several `torch.amp.autocast`. The first is torch's own
    default, though not what eager does: it counts if somebody asked for it.
    """
    from torch._functorch import config

    name = "backward_pass_autocast"
    settings = cast(Any, config)
    if not hasattr(config, name) or settings._is_default(name):
        return "off"
    return getattr(config, name)


@contextlib.contextmanager
def autocast_of_backward() -> Iterator[None]:
    """Backward is traced outside of its forward's autocast, unless a user asked for another."""
    chosen = backward_autocast()
    with contextlib.ExitStack() as regions:
        if chosen != "same_as_forward":
            regions.enter_context(torch._C._DisableAutocast())
        for kwargs in () if isinstance(chosen, str) else chosen:
            regions.enter_context(torch.amp.autocast(**kwargs))
        yield
