"""The entry point: `compile_step(model, loss_fn, optimizer)` makes one graph of a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal import _torch
from shoal.compile.agreement import check_ranks_agree
from shoal.compile.backend import pipeline_of
from shoal.compile.communication import schedule_collectives
from shoal.compile.observe.observation import observing
from shoal.compile.options import Options
from shoal.compile.partition.ops import Kind, kind
from shoal.compile.step.parts import Parts
from shoal.compile.step.replay import Replay, why_not
from shoal.compile.step.update import clip, count_on_device, update
from shoal.errors import UsageError
from shoal.runtime.module_state import state_of

Loss = Callable[[Any, Any], Tensor]


def compile_step(
    model: nn.Module,
    loss_fn: Loss,
    optimizer: torch.optim.Optimizer,
    *,
    max_norm: float | None = None,
    accumulate: int = 1,
    options: Mapping[str, Any] | None = None,
) -> CompiledStep:
    """A callable `step(inputs, targets)` that trains once, and gives this rank's loss.

    `inputs` go to the model (a tuple as several arguments, a dictionary by name), its output and
    `targets` to `loss_fn`. Gradients are averaged over ranks as the model's engine has it, clipped
    to `max_norm` if that is given, and used up: no `.grad` is left. With `accumulate`, data is cut
    along its first dim into so many parts, one after another, and the mean of their losses counts.

    The first step runs without a compiler. The second one is captured: what Python does beside
    tensors is not repeated after that. Other shapes, modes of modules, options of the optimizer
    (but for learning rates) or tensors in the place of others make another graph. On CUDA it is
    replayed; `why_not_replayed` says why not. `options` are those of the backend.
    """
    return CompiledStep(model, loss_fn, optimizer, max_norm, accumulate, Options.of(options))


class CompiledStep:
    """A training step, captured as often as it has to be."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss,
        optimizer: torch.optim.Optimizer,
        max_norm: float | None,
        accumulate: int,
        options: Options,
    ) -> None:
        if max_norm is not None and max_norm <= 0:
            raise UsageError(f"expected a norm above 0 to clip to, got max_norm={max_norm}")
        if accumulate < 1:
            raise UsageError(f"expected 1 part of the data or more, got accumulate={accumulate}")
        self._model, self._loss_fn, self._optimizer = model, loss_fn, optimizer
        self._max_norm, self._accumulate, self._options = max_norm, accumulate, options
        self._captured: dict[Any, _Captured] = {}
        self._parts: Parts | None = None
        self._is_first = True
        self.why_not_replayed: str | None = "it is not captured yet"
        """Why steps are not replayed as a CUDA graph; None if they are."""

    @property
    def num_graphs(self) -> int:
        """How many graphs there are."""
        return len(self._captured)

    def __call__(self, inputs: Any, targets: Any) -> Tensor:
        """Train once."""
        if self._is_first:
            self._is_first = False
            return self._run_eagerly(inputs, targets)
        data, structure = _torch.tree_flatten((inputs, targets))
        if self._parts is None or not self._parts.is_current():
            self._captured.clear()
            self._parts = self._find_parts()
        parts = self._parts
        key = (structure, tuple(map(_described, data)), self._modes(), self._settings())
        captured = self._captured.get(key)
        if captured is None:
            captured = self._captured[key] = self._capture(parts, data, structure)
        parts.set_rates()
        (loss,) = captured.run(data)
        self.why_not_replayed = captured.why_not_replayed
        _torch.count_update(self._optimizer)
        return loss

    def _run_eagerly(self, inputs: Any, targets: Any) -> Tensor:
        """An ordinary step: it makes the optimizer's state, and shows errors where they are."""
        self._optimizer.zero_grad()
        loss = self._loss(inputs, targets)
        loss.backward()
        if self._max_norm is not None:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._max_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def _loss(self, inputs: Any, targets: Any) -> Tensor:
        losses = []
        for part, wanted in _cut((inputs, targets), self._accumulate):
            if isinstance(part, dict):
                output = self._model(**part)
            else:
                output = self._model(*part) if isinstance(part, tuple) else self._model(part)
            losses.append(self._loss_fn(output, wanted))
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    def _find_parts(self) -> Parts:
        count_on_device(self._optimizer)
        with _torch.captured_for("shoal"):
            _lower_all(self._model)
        return Parts(self._model, self._optimizer)

    def _modes(self) -> tuple[bool, ...]:
        """What may change between steps without another tensor."""
        return (
            *(module.training for module in self._model.modules()),
            *(parameter.requires_grad for parameter in self._model.parameters()),
            torch.is_autocast_enabled("cuda"),
            torch.is_autocast_enabled("cpu"),
        )

    def _settings(self) -> tuple[Any, ...]:
        """The options of the optimizer that are constants of a graph."""
        return tuple(
            (key, str(value))
            for group in self._optimizer.param_groups
            for key, value in group.items()
            if key not in ("params", "lr")
        )

    def _capture(self, parts: Parts, data: Sequence[Any], structure: Any) -> _Captured:
        num_fixed = len(parts.tensors)

        def run(*given: Any) -> list[Tensor]:
            inputs, targets = _torch.tree_unflatten(given[num_fixed:], structure)
            with parts.in_place(given[:num_fixed]) as leaves, torch.enable_grad():
                loss = self._loss(inputs, targets)
                first = len(_torch.traced_nodes())
                grads = torch.autograd.grad(loss, leaves, allow_unused=True)
                _check_recomputed(_torch.traced_nodes()[first:])
            with torch.no_grad():
                if self._max_norm is not None:
                    grads = clip(parts, grads, self._max_norm)
                update(parts, given[:num_fixed], grads)
            return [loss.detach()]

        pipeline = pipeline_of(self._options)
        with (
            _torch.without_compiled_autograd(),
            observing(self._options.logs),
            _torch.captured_for("shoal"),
            torch.no_grad(),
        ):
            lowered = pipeline.lower(run, [*parts.tensors, *data], range(num_fixed))
            schedule_collectives(lowered, self._options)
            check_ranks_agree(lowered)
            return _Captured(pipeline.build(lowered), parts)


class _Captured:
    """One graph of a step."""

    def __init__(self, run: Callable[..., Sequence[Any]], parts: Parts) -> None:
        self._run = run
        self._fixed = parts.tensors
        self._replay: Replay | None = None
        self._has_run = False
        self.why_not_replayed = why_not(parts.device)

    def run(self, data: Sequence[Any]) -> Sequence[Any]:
        """Do the step: at first as it is, so that libraries are set up, then from a recording."""
        if self.why_not_replayed is None and self._has_run:
            if self._replay is None:
                self._replay = Replay(self._run, self._fixed, data)
            return self._replay(data)
        self._has_run = True
        with torch.no_grad():
            return self._run(*self._fixed, *data)


def _lower_all(model: nn.Module) -> None:
    """Let a graph gather every unit of a model."""
    for module in model.modules():
        state = state_of(module)
        if state is not None:
            state.is_captured()


def _check_recomputed(nodes: Sequence[Any]) -> None:
    if any(node.op == "call_function" and kind(node) is Kind.RANDOM for node in nodes):
        raise NotImplementedError(
            "shoal: compile_step cannot compute random numbers (dropout) again in backward; use "
            "torch.compile(model, backend='shoal'), or no checkpoint around them"
        )


def _cut(data: Any, num_parts: int) -> Iterator[Any]:
    """Data in equal parts along the first dim of its tensors."""
    for number in range(num_parts):

        def part(one: Any, number: int = number) -> Any:
            if num_parts == 1 or not isinstance(one, Tensor):
                return one
            if one.shape[0] % num_parts:
                raise UsageError(
                    f"data of {one.shape[0]} rows cannot be cut into accumulate={num_parts} equal "
                    "parts"
                )
            size = one.shape[0] // num_parts
            return one[number * size : (number + 1) * size]

        yield _torch.tree_map(part, data)


def _described(one: Any) -> Any:
    if isinstance(one, Tensor):
        return tuple(one.shape), one.stride(), one.dtype, one.device
    return one
