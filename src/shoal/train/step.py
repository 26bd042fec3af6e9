"""One training step: its time in parts, and its number in the errors that it raises."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.comm.observer import timed, waiting
from shoal.runtime.fsdp_module import own_state
from shoal.runtime.module_state import context_of, state_of
from shoal.runtime.observe import watch
from shoal.runtime.recorder import EXPOSED, OPTIMIZER, Kind, RecordedAction
from shoal.step.phase import Phase
from shoal.train.model import next_token_loss, scores
from shoal.train.optimizer import clip_gradients, unscale_gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The measurements of one rank after a step."""

    grad_norm: float
    """Global norm of the gradient before clipping; the same on every rank."""
    step_ms: float
    actions: tuple[RecordedAction, ...]

    @property
    def exposed_ms(self) -> float:
        """Time in which compute stood still for communication."""
        return _total_ms(self.actions, EXPOSED)

    @property
    def optimizer_ms(self) -> float:
        """Time in clipping and in the optimizer."""
        return _total_ms(self.actions, {OPTIMIZER})

    @property
    def compute_ms(self) -> float:
        """All other time."""
        return max(0.0, self.step_ms - self.exposed_ms - self.optimizer_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAttempt:
    """The loss, norm and time of one rank before the optimizer has changed anything."""

    loss: float
    """Mean over this rank's share of the batch; in proportion, where shares differ."""
    grad_norm: float
    own_ms: float
    """Time so far that was not spent waiting for others."""


def training_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Tensor],
    *,
    clip: float,
    accept: Callable[[StepAttempt], bool],
    scale: float = 1.0,
    weight: float = 1.0,
    named: bool = False,
) -> StepResult:
    """Take one optimizer step on this rank's micro-batches, each (sequence, context + 1).

    `accept` decides, the same on all ranks, whether the optimizer may change the weights. The loss
    is multiplied by `scale` on its way backward. `weight` is what this rank's samples count in the
    mean of all ranks' means: 1 if all have as many. `named` names actions in the profiler's trace.
    """
    began_at = time.perf_counter()
    with watch(model, named=named) as recorder:
        loss = torch.zeros((), device=micro_batches[0].device)
        num_samples = sum(map(len, micro_batches))
        for sequences in micro_batches:
            part = next_token_loss(scores(model, sequences[:, :-1]), sequences[:, 1:])
            # Divided here, so that the gradients of all micro-batches add up to their mean.
            part = part / (num_samples / len(sequences) / weight)
            (part * scale if scale != 1 else part).backward()
            loss += part.detach()
        start = recorder.mark()
        unscale_gradients(model, scale)
        with waiting("the norm of all ranks' gradients"):
            grad_norm = clip_gradients(model, clip)
        clipped = recorder.mark()
        with timed("the device to compute the gradients"):
            attempt = StepAttempt(
                loss=float(loss),
                grad_norm=float(grad_norm),
                own_ms=(time.perf_counter() - began_at) * 1e3
                - _total_ms(recorder.actions(EXPOSED), EXPOSED),
            )
        recorder.add(OPTIMIZER, "optimizer", start, clipped)
        is_accepted = accept(attempt)
        start = recorder.mark()
        if is_accepted:
            optimizer.step()
        optimizer.zero_grad()
        recorder.add(OPTIMIZER, "optimizer", start, recorder.mark())
    actions = tuple(recorder.actions())  # waits for the device, so that the time below is whole
    return StepResult(
        grad_norm=attempt.grad_norm,
        step_ms=(time.perf_counter() - began_at) * 1e3,
        actions=actions,
    )


def _total_ms(actions: Sequence[RecordedAction], kinds: Container[Kind]) -> float:
    return sum(action.duration_us for action in actions if action.kind in kinds) / 1e3


@contextmanager
def naming_step(step: int, model: nn.Module) -> Iterator[None]:
    """Add to an error in which step it was raised, and what the model was computing."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in step {step}{_unit_at(model, error)}")
        raise


def _unit_at(model: nn.Module, error: BaseException) -> str:
    """Name the unit that was computing: by the calls in forward, by the phases in backward."""
    called = [
        unit.name
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if isinstance(module := frame.f_locals.get("self"), nn.Module)
        and (state := state_of(module)) is not None
        for unit in state.units
    ]
    if called:
        return f", in the forward of unit {called[-1]!r}"
    context = context_of(model, own_state(model))
    computing = [unit for unit in context.units if unit.phase is Phase.BACKWARD]
    # The root computes as long as any unit in it does, so an inner one tells more.
    inner = [unit for unit in computing if unit not in context.roots] or computing
    return f", in the backward of unit {inner[-1].name!r}" if inner else ""
