"""The stopwatch: one model on one device, stepped and timed.

A step is forward+backward. Gradients are dropped between steps, outside every timing. The loss of
every step, warm-up included, is looked at when the steps are over. The optimizer's learning rate is
0: it does all of its work, and parameters stay what gathered ones are compared with.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from shoal.bench.cases import Mode, Run
from shoal.bench.engines import ENGINES
from shoal.bench.figures import ComputeRound, Memory, OptimizerRound
from shoal.bench.host import read_peak, reset_peak
from shoal.bench.model import BenchTransformer, check_gathers, check_gradients, check_losses
from shoal.comm.modelled import ModelledGroup
from shoal.optim import AdamW

SEED = 0

Call = Callable[..., Any]
"""Calls the function it is given with the arguments that follow, and returns the result."""


def _call(function: Callable[..., Any], *args: object) -> Any:
    return function(*args)


def build_model(run: Run) -> BenchTransformer:
    """The model, on the device, in the dtype its engine starts from."""
    torch.manual_seed(SEED)
    # Straight on the device: initialising billions of weights on the host takes minutes.
    with run.device:
        model = BenchTransformer(run.case.shape)
    return model if ENGINES[run.engine].casts else model.to(run.compute_dtype)


class Workbench:
    """Steps a wrapped model and takes the time."""

    def __init__(self, run: Run, model: nn.Module) -> None:
        self._run = run
        self._model = model
        self._device = run.device
        adamw = AdamW if run.engine.startswith("shoal") else torch.optim.AdamW
        self._optimizer = adamw(model.parameters(), lr=0.0, fused=True)
        self._losses: list[Tensor] = []
        case = run.case
        generator = torch.Generator().manual_seed(SEED)
        tokens = torch.randint(
            case.shape.vocab_size, (case.batch_size, case.seq_len + 1), generator=generator
        ).to(self._device)
        self._tokens = tokens[:, :-1].contiguous()
        self._targets = tokens[:, 1:].contiguous()
        # Memory that initialising left in the cache is not memory that steps need.
        gc.collect()
        self.rest()

    @property
    def model(self) -> nn.Module:
        """The wrapped model."""
        return self._model

    def step(
        self,
        forward: Call = _call,
        between: Callable[[], object] = lambda: None,
        backward: Call = _call,
    ) -> Tensor:
        """Forward and backward, either called by what is passed; returns the loss."""
        if self._run.mode is Mode.CUDAGRAPHS:
            torch.compiler.cudagraph_mark_step_begin()
        loss: Tensor = forward(self._model, self._tokens, self._targets)
        between()
        backward(loss.backward)
        return loss.detach()

    def warm_up(self, steps: int) -> None:
        """Untimed steps."""
        for _ in range(steps):
            self._end_step(self.step())
        self._check_losses()

    def inspect(self, group: ModelledGroup | None) -> None:
        """Take one more step and look at its values: loss, gradients, and what was gathered."""
        losses: list[Tensor] = []
        step = lambda: losses.append(self.step())  # noqa: E731
        if group is None:
            step()
        else:
            check_gathers(group.sample_gathers(step), self._run.case.shape)
        check_gradients(self._model.parameters())
        self._end_step(losses[0])
        self._check_losses()

    def measure_memory(self, steps: int) -> Memory:
        """The peak of forward+backward steps in a row."""
        reset_peak(self._device)
        self.warm_up(steps)
        return read_peak(self._device)

    def measure_training_memory(self, steps: int) -> Memory:
        """The peak of whole training steps."""
        self._train(1)  # the first step makes the optimizer's state
        reset_peak(self._device)
        self._train(steps)
        return read_peak(self._device)

    def take_apart(self, steps: int, forward: Call, backward: Call) -> None:
        """Untimed steps, each from an idle device, whose halves are called by others: profilers."""
        for _ in range(steps):
            self._synchronize()
            self._end_step(self.step(forward=forward, backward=backward))
        self._check_losses()

    def time_compute(self, steps: int) -> ComputeRound:
        """Time forward+backward: in a row on CUDA, then a few from an idle device."""
        in_a_row: tuple[float, ...] = ()
        forward_ms: tuple[float, ...] = ()
        if self._device.type == "cuda":
            in_a_row, forward_ms = self._in_a_row(steps)
            steps = -(-steps // 3)
        wall_ms: list[float] = []
        host_ms: list[float] = []
        for _ in range(steps):
            self._synchronize()
            start = perf_counter()
            loss = self.step()
            returned = perf_counter()
            self._synchronize()
            wall_ms.append((perf_counter() - start) * 1e3)
            host_ms.append((returned - start) * 1e3)
            self._end_step(loss)
        self._check_losses()
        return ComputeRound(
            forward_backward_ms=in_a_row or tuple(wall_ms),
            wall_ms=tuple(wall_ms),
            host_ms=tuple(host_ms) if self._device.type == "cuda" else (),
            forward_ms=forward_ms,
        )

    def time_optimizer(self, steps: int) -> OptimizerRound:
        """Take whole training steps and time the optimizer's part."""
        if not self._optimizer.state:
            self._train(1)
        return OptimizerRound(optimizer_ms=self._train(steps))

    def rest(self) -> None:
        """Give up the memory that only steps need; the next steps take it anew."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _train(self, steps: int) -> tuple[float, ...]:
        optimizer_ms: list[float] = []
        for _ in range(steps):
            loss = self.step()
            self._synchronize()
            start = perf_counter()
            self._optimizer.step()
            self._synchronize()
            optimizer_ms.append((perf_counter() - start) * 1e3)
            self._end_step(loss)
        self._check_losses()
        return tuple(optimizer_ms)

    def _in_a_row(self, steps: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Of each step, the time of all of it and that of its forward."""
        spans: list[tuple[torch.cuda.Event, torch.cuda.Event, torch.cuda.Event]] = []
        for _ in range(steps):
            start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            start.record()
            loss = self.step(between=middle.record)
            end.record()
            self._end_step(loss)
            del loss  # a graph that is replayed wants its memory back
            spans.append((start, middle, end))
        self._synchronize()
        whole = tuple(start.elapsed_time(end) for start, _, end in spans)
        return whole, tuple(start.elapsed_time(middle) for start, middle, _ in spans)

    def _end_step(self, loss: Tensor) -> None:
        """Keep the loss, drop the gradients."""
        # A copy: where graphs are replayed, the next step's loss is written to the same memory.
        self._losses.append(loss.clone())
        self._optimizer.zero_grad(set_to_none=True)

    def _check_losses(self) -> None:
        self._synchronize()
        losses, self._losses = self._losses, []
        check_losses([float(loss) for loss in losses], self._run.case.shape)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
