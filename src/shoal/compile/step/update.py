"""What follows a backward in a step: gradients clipped, parameters updated. Traced."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal._torch import optimizers, storage
from shoal.compile.step.step_tensors import StepTensors

_EPSILON = 1e-6
"""As `clip_grad_norm_` of torch has it."""


class MissingStateError(Exception):
    """A parameter has a gradient, but no state yet: the optimizer has to make it first."""


def clip(
    parts: StepTensors, grads: Sequence[Tensor | None], max_norm: float
) -> list[Tensor | None]:
    """Gradients scaled so that their norm, over all ranks, is at most `max_norm`."""
    num_units = len(parts.units)
    squares = [
        graph_unit.total_of_squares(grad)
        for graph_unit, grad in zip(parts.graph_units, grads[:num_units], strict=True)
        if grad is not None
    ]
    squares += [
        torch.linalg.vector_norm(grad, dtype=storage.wide_dtype(grad)).square()
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
            state = optimizer.state.get(parameter, {})
            step = state.get("step")
            if isinstance(step, Tensor) and parameter.is_cuda and not step.is_cuda:
                state["step"] = step.to(parameter.device)
                group["capturable"] = True


def update(parts: StepTensors, given: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Let the optimizer update what stands for its parameters and state."""
    optimizer = parts.optimizer
    twin = optimizers.twin_of(optimizer)
    groups, state = parts.stand_ins(given, grads)
    for group in groups:
        # Steps are counted in tensors, which a graph can count on. One operator for many
        # parameters, or one for each: never a fused one, which is the compiler's business.
        group.update({key: True for key in ("capturable", "foreach") if key in group})
        group.update({key: None for key in ("fused",) if key in group})
    twin.param_groups = groups
    twin.state = defaultdict(dict, {stand_in: _counting(held) for stand_in, held in state.items()})
    numbers = [_constants(group) for group in groups]
    # Past what schedulers have put around the step of the optimizer itself.
    optimizers.bare_step(optimizer)(twin)
    for group, before in zip(groups, numbers, strict=True):
        _check_constant("a group", _constants(group), before, optimizer)
    _check_constant("itself", _constants(vars(twin)), _constants(vars(optimizer)), optimizer)
    for stand_in, held in twin.state.items():
        known = state.get(stand_in, {})
        if held.keys() != known.keys():
            raise MissingStateError
        _check_constant("its state", _constants(held), _constants(known), optimizer)
        for key, one in held.items():
            if isinstance(one, Tensor) and one is not known[key]:
                known[key].copy_(one)  # state that is replaced, where a graph would lose it


def _counting(held: dict[str, Any]) -> dict[str, Any]:
    """State whose count of steps is exact enough to compute with, as Python's numbers are.

    Of `1 - 0.999 ** step` half the digits of float32 are lost in the first steps.
    """
    step = held.get("step")
    if isinstance(step, Tensor) and step.dim() == 0 and step.dtype is torch.float32:
        return {**held, "step": step.double()}
    return dict(held)


def _constants(held: dict[str, Any]) -> dict[str, Any]:
    """What is no tensor, and so a constant of the graph."""
    tensors = ("params", "state", "param_groups")
    return {k: one for k, one in held.items() if k not in tensors and not isinstance(one, Tensor)}


def _check_constant(
    where: str, now: dict[str, Any], before: dict[str, Any], optimizer: torch.optim.Optimizer
) -> None:
    changed = [key for key, one in now.items() if key not in before or before[key] != one]
    if changed:
        raise NotImplementedError(
            f"shoal: compile_step cannot capture {type(optimizer).__name__}: its step changes "
            f"{changed[0]!r} of {where}, which is no tensor, so a graph would not repeat it. Keep "
            "it as a tensor, or write the step out."
        )
