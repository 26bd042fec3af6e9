"""What follows a backward in a step: gradients clipped, parameters updated. Traced."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal import _torch
from shoal.compile.step.parts import Parts
from shoal.errors import UsageError

_EPSILON = 1e-6
"""As `clip_grad_norm_` of torch has it."""


def clip(parts: Parts, grads: Sequence[Tensor | None], max_norm: float) -> list[Tensor | None]:
    """Gradients scaled so that their norm, over all ranks, is at most `max_norm`."""
    num_units = len(parts.units)
    squares = [
        unit.in_graph.total_of_squares(grad)
        for unit, grad in zip(parts.units, grads[:num_units], strict=True)
        if grad is not None and unit.in_graph is not None
    ]
    squares += [
        torch.linalg.vector_norm(grad, dtype=torch.float32).square()
        for grad in grads[num_units:]
        if grad is not None
    ]
    if not squares:
        return list(grads)
    norm = torch.stack(squares).sum().sqrt()
    scale = torch.clamp(max_norm / (norm + _EPSILON), max=1.0)
    return [None if grad is None else grad * scale.to(grad.dtype) for grad in grads]


def count_on_device(optimizer: torch.optim.Optimizer) -> None:
    """Keep an optimizer's count of steps where its parameters are, if that is CUDA."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            step = state.get("step")
            if isinstance(step, Tensor) and parameter.is_cuda and not step.is_cuda:
                state["step"] = step.to(parameter.device)
                group["capturable"] = True


def update(parts: Parts, given: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Let the optimizer update what stands for its parameters and state."""
    optimizer = parts.optimizer
    twin = copy.copy(optimizer)
    groups, state = parts.stand_ins(given, grads)
    for group in groups:
        # Steps are counted in tensors, which a graph can count on. One operator for many
        # parameters, or one for each: never a fused one, which is the compiler's business.
        group.update({key: True for key in ("capturable", "foreach") if key in group})
        group.update({key: None for key in ("fused",) if key in group})
    twin.param_groups = groups
    twin.state = defaultdict(dict, state)
    known = {stand_in: set(held) for stand_in, held in state.items()}
    # Past what schedulers have put around the step of the optimizer itself.
    _torch.bare_step(optimizer)(twin)
    for stand_in, held in twin.state.items():
        new = set(held) - known.get(stand_in, set())
        if new:
            raise UsageError(
                f"the optimizer made new state ({', '.join(sorted(new))}) for a parameter that had "
                "no gradient in the first step. Let the first step come to all parameters, or "
                "leave those out of the optimizer that it does not come to."
            )
