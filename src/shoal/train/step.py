"""One training step, and where its time went."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.runtime.events import EXPOSED, Event, EventKind
from shoal.runtime.observe import watch
from shoal.train.model import next_byte_loss
from shoal.train.optimizer import clip_gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one rank knows after a step."""

    loss: float
    """Mean over this rank's share of the batch."""
    grad_norm: float
    """Global norm of the gradient before clipping; the same on every rank."""
    num_tokens: int
    """Bytes predicted in this rank's share of the batch."""
    step_ms: float
    events: tuple[Event, ...]

    @property
    def exposed_ms(self) -> float:
        """Time in which compute stood still for communication."""
        return self._sum_ms(EXPOSED)

    @property
    def optimizer_ms(self) -> float:
        """Time in clipping and in the optimizer."""
        return self._sum_ms({EventKind.OPTIMIZER})

    @property
    def compute_ms(self) -> float:
        """All other time."""
        return max(0.0, self.step_ms - self.exposed_ms - self.optimizer_ms)

    def _sum_ms(self, kinds: frozenset[EventKind] | set[EventKind]) -> float:
        return sum(event.duration_us for event in self.events if event.kind in kinds) / 1e3


def training_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Tensor],
    *,
    clip: float,
) -> StepResult:
    """Take one optimizer step on this rank's micro-batches, each (sequence, context + 1)."""
    began_at = time.perf_counter()
    with watch(model) as recorder:
        loss = torch.zeros((), device=micro_batches[0].device)
        for sequences in micro_batches:
            # Divided here, so that the gradients of all micro-batches add up to their mean.
            part = next_byte_loss(model(sequences[:, :-1]), sequences[:, 1:]) / len(micro_batches)
            part.backward()
            loss += part.detach()
        start = recorder.mark()
        grad_norm = clip_gradients(model, clip)
        if torch.isfinite(grad_norm):  # the same on every rank; else the weights stay as they are
            optimizer.step()
        optimizer.zero_grad()
        recorder.span(EventKind.OPTIMIZER, "optimizer", start, recorder.mark())
    events = tuple(recorder.events())  # waits for the device, so that the time below is whole
    return StepResult(
        loss=float(loss),
        grad_norm=float(grad_norm),
        num_tokens=sum(sequences[:, 1:].numel() for sequences in micro_batches),
        step_ms=(time.perf_counter() - began_at) * 1e3,
        events=events,
    )
