"""The entry point: `compile_step(model, loss_fn, optimizer)` makes one graph of a training step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal._torch import autograd, dynamo, fakes, optimizers, settings, traces, trees
from shoal.comm.modelled import BACKEND
from shoal.compile.aot.capture import LeftFakeError
from shoal.compile.backend import compiler_of
from shoal.compile.communication import schedule_collectives
from shoal.compile.compare_ranks import check_ranks_agree
from shoal.compile.lowering.graph_unit import prefetch_depth_of
from shoal.compile.node_kinds import NodeKind, kind
from shoal.compile.observe.observation import observing
from shoal.compile.options import BackendOptions
from shoal.compile.step.fingerprint import Fingerprint
from shoal.compile.step.refusals import changes_python, check_can_capture, check_kinds
from shoal.compile.step.step_data import StepData
from shoal.compile.step.step_tensors import Places, StepTensors
from shoal.compile.step.update import MissingStateError, clip, count_on_device, update
from shoal.ddp.replicated import replicas_of
from shoal.errors import UsageError
from shoal.runtime.module_state import state_of, units_of
from shoal.step.phase import Phase

Loss = Callable[[Any, Any], Tensor]

MAX_SHAPES = 64
"""How many graphs are kept; most of them for data of other shapes."""
MAX_GRAPHS = 8
"""How many are made for other reasons before a step has to be repeated to be captured."""

_logger = logging.getLogger("shoal.compile.step")


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

    The first step runs as it is written. The second one is captured: from then on Python does not
    run. Before each step all that it read is compared (`Fingerprint`): where anything is different,
    from a shape to a hook, another graph is made. What a graph cannot do raises
    `NotImplementedError`. `why_not_captured` says why the last step ran as it is written, if it
    did. On CUDA graphs are replayed; `why_not_replayed` says why not. `options` are those of the
    backend.
    """
    return CompiledStep(model, loss_fn, optimizer, max_norm, accumulate, BackendOptions.of(options))


class CompiledStep:
    """A training step, captured as often as it has to be."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss,
        optimizer: torch.optim.Optimizer,
        max_norm: float | None,
        accumulate: int,
        options: BackendOptions,
    ) -> None:
        check_kinds(model, loss_fn, optimizer)
        if max_norm is not None and max_norm <= 0:
            raise UsageError(f"expected a norm above 0 to clip to, got max_norm={max_norm}")
        if accumulate < 1:
            raise UsageError(f"expected 1 part of the data or more, got accumulate={accumulate}")
        self._model, self._loss_fn, self._optimizer = model, loss_fn, optimizer
        self._max_norm, self._accumulate, self._options = max_norm, accumulate, options
        self._whole = model
        """The model, with the loss if that is a module too."""
        if isinstance(loss_fn, nn.Module):
            self._whole = nn.ModuleDict({"model": model, "loss_fn": loss_fn})
        self._captured: list[_Captured] = []
        """The graphs, that which ran last first."""
        self._num_made = 0
        self._has_run = False
        self._last: tuple[Fingerprint, Places] | None = None
        self.why_not_captured: str | None = "no step has run yet"
        """Why the last step ran as it is written; None if it was captured."""
        self.why_not_replayed: str | None = "it is not captured yet"
        """Why steps are not replayed as a CUDA graph; None if they are."""

    @property
    def num_graphs(self) -> int:
        """How many graphs there are."""
        return len(self._captured)

    def __call__(self, inputs: Any, targets: Any) -> Tensor:
        """Train once."""
        data = StepData(inputs, targets)
        self._free_full_parameters()
        captured = self._known(data) or self._made(data)
        if captured is None:
            loss = self._run_as_written(inputs, targets)
            self._has_run = True
            return loss
        loss = captured.run(data)
        self.why_not_captured, self.why_not_replayed = None, captured.why_not_replayed
        optimizers.count_update(self._optimizer)
        return loss

    def _free_full_parameters(self) -> None:
        """Begin with shards: a forward before may have left units full, for a backward."""
        units = self._captured[0].parts.units if self._captured else units_of(self._whole)
        for unit in units:
            if unit.phase is not Phase.SHARDED:
                unit.reshard()

    def _known(self, data: StepData) -> _Captured | None:
        """The graph of a step that read what this one would read."""
        if _what_intercepts() is not None:
            return None
        for at, captured in enumerate(self._captured):
            if captured.holds_for(data):
                if at:
                    self._captured.insert(0, self._captured.pop(at))
                return captured
        return None

    def _made(self, data: StepData) -> _Captured | None:
        """A new graph; None if this step is to run as it is written."""
        check_can_capture(self._whole, self._optimizer)
        self.why_not_captured = self._obstacle()
        if self.why_not_captured is not None:
            return None
        self._captured = [one for one in self._captured if one.parts.are_current()]
        count_on_device(self._optimizer)
        read = Fingerprint(self._model, self._loss_fn, self._optimizer, data)
        if not (self._may_make_more() or self._is_repeated(read, data)):
            return None
        captured = self._capture(data, read)
        if captured is not None:
            self._num_made += 1
            self._captured = [captured, *self._captured[: MAX_SHAPES - 1]]
        return captured

    def _may_make_more(self) -> bool:
        """Whether one more graph is likely to be of use: few were made, or data alone differs."""
        if self._num_made < MAX_GRAPHS:
            return True
        is_other_data = any(one.read.matches_but_data() for one in self._captured)
        return is_other_data and len(self._captured) < MAX_SHAPES

    def _obstacle(self) -> str | None:
        if not self._has_run:
            return "the first step makes the optimizer's state"
        if not any(parameter.requires_grad for parameter in self._whole.parameters()):
            return "no parameter requires a gradient"
        if any(one.averages and one.reducer.has_own for one in replicas_of(self._whole)):
            return "the step before ran in no_sync(), and its reducer has to begin anew"
        return _what_intercepts()

    def _is_repeated(self, read: Fingerprint, data: StepData) -> bool:
        """Whether the step before read the same, so that one more graph may be of use."""
        before, places = self._last, Places(self._whole, self._optimizer)
        self._last = read, places
        if before is not None and before[0].matches(data) and places.are_those_of(before[1]):
            return True
        changed = self._captured[0].read.difference(data) if self._captured else "memory moved"
        self.why_not_captured = f"{self._num_made} graphs were made, and none fits: {changed}"
        if before is None:
            _logger.warning(
                "compile_step made %d graphs, and none fits this step: %s. From here on it "
                "captures a step only if the one before read the same, and runs all others as they "
                "are written. Keep numbers that change from step to step in tensors.",
                *(self._num_made, changed),
            )
        return False

    def _run_as_written(self, inputs: Any, targets: Any) -> Tensor:
        """An ordinary step: it makes the optimizer's state, and shows errors where they are."""
        self._drop_gradients()
        try:
            loss = self._loss(inputs, targets)
            loss.backward()
            if self._max_norm is not None:
                nn.utils.clip_grad_norm_(self._whole.parameters(), self._max_norm)
            self._optimizer.step()
        finally:
            self._drop_gradients()
        return loss.detach()

    def _drop_gradients(self) -> None:
        self._optimizer.zero_grad()
        self._whole.zero_grad()

    def _loss(self, inputs: Any, targets: Any) -> Tensor:
        losses = []
        for part, wanted in _cut((inputs, targets), self._accumulate):
            if isinstance(part, dict):
                output = self._model(**part)
            else:
                output = self._model(*part) if isinstance(part, tuple) else self._model(part)
            losses.append(self._loss_fn(output, wanted))
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    def _capture(self, data: StepData, read: Fingerprint) -> _Captured | None:
        """A graph of the step; None if the optimizer has to make state before."""
        with dynamo.captured_for("shoal"):
            for state in filter(None, map(state_of, self._whole.modules())):
                state.is_captured()  # lets graphs gather its units
        parts = StepTensors(self._whole, self._optimizer, read.reads.loose, data)
        if not parts.lie_apart_from(data):
            self.why_not_captured = "the data shares memory with the model"
            return None
        num_fixed = len(parts.tensors)
        shares = [replica.have_buffers_changed for replica in parts.replicas]

        def run(*given: Any) -> list[Tensor]:
            for replica, is_shared in zip(parts.replicas, shares, strict=True):
                replica.have_buffers_changed = is_shared  # it is traced more than once
            inputs, targets = data.unflattened(given[num_fixed:])
            with parts.in_place(given[:num_fixed]) as leaves, torch.enable_grad():
                loss = self._loss(inputs, targets)
                first = len(traces.traced_nodes())
                grads = torch.autograd.grad(loss, leaves, allow_unused=True)
                _check_recomputed(traces.traced_nodes()[first:])
            with torch.no_grad():
                if self._max_norm is not None:
                    grads = clip(parts, grads, self._max_norm)
                update(parts, given[:num_fixed], grads)
            return [loss.detach()]

        compiler = compiler_of(self._options)
        with (
            autograd.without_compiled_autograd(),
            observing(self._options.logs),
            dynamo.captured_for("shoal"),
            torch.no_grad(),
        ):
            try:
                with _leaving_python(read), traces.without_fused_rnn():
                    lowered = compiler.lower(run, [*parts.tensors, *data.values], range(num_fixed))
            except MissingStateError:
                self.why_not_captured = "the optimizer has to make state for some parameters"
                return None
            schedule_collectives(lowered, self._options, prefetch_depth_of(parts.graph_units))
            check_ranks_agree(lowered)
            return _Captured(compiler.build(lowered), parts, read)


class _Captured:
    """One graph of a step."""

    def __init__(
        self, run: Callable[..., Sequence[Tensor]], parts: StepTensors, read: Fingerprint
    ) -> None:
        self._run = run
        self.parts, self.read = parts, read
        self._recording: _StepRecording | None = None
        self._has_run = False
        self.why_not_replayed = _why_not_recorded(parts.device)

    def holds_for(self, data: StepData) -> bool:
        """Whether the graph does what the step as it is written would do now."""
        parts = self.parts
        return self.read.matches(data) and parts.are_current() and parts.lie_apart_from(data)

    def run(self, data: StepData) -> Tensor:
        """Do the step, and give the loss."""
        self.parts.set_rates()
        self.parts.drop_gradients()
        loss = self._loss(data.values)
        for unit in self.parts.units:
            unit.num_updates += 1  # what was gathered before is not current any more
        for replica in self.parts.replicas:
            replica.have_buffers_changed = replica.averages  # as after a forward
        return loss

    def _loss(self, data: Sequence[Any]) -> Tensor:
        """The loss of a step: called at first, so that libraries are set up, then recorded."""
        if self._has_run and self.why_not_replayed is None:
            if self._recording is None:
                self._recording = _StepRecording(self._run, self.parts.tensors, data)
            return self._recording.replay(data)
        self._has_run = True
        with torch.no_grad():
            (loss,) = self._run(*self.parts.tensors, *data)
        return loss


@contextmanager
def _leaving_python(read: Fingerprint) -> Iterator[None]:
    """Trace, and leave all that Python holds as it was; refuse a step that changes it.

    It is traced on fake tensors, which nobody must find afterwards.
    """
    reads = read.reads
    if reads.unrepeatable is not None:
        raise NotImplementedError(
            "shoal: compile_step cannot capture a step that may read from an iterator, "
            f"{reads.unrepeatable}: a graph would not go on in it. Give what it yields with the "
            "inputs."
        )
    change = drawn = None
    try:
        yield
        change, drawn = reads.change(), reads.drawn()
    except Exception as error:
        told = fakes.why_not_traced(error)
        if isinstance(error, LeftFakeError):
            told, change = "it keeps a tensor, and reads it in a later step", reads.change()
        if change is not None:
            raise changes_python(change) from error
        if told is None:
            raise
        raise NotImplementedError(
            f"shoal: compile_step cannot capture this step: {told}"
        ) from error
    finally:
        reads.restore()
    if change is not None:
        raise changes_python(change)
    if drawn is not None:
        raise NotImplementedError(
            f"shoal: compile_step cannot capture a step that draws random numbers from {drawn}: a "
            "graph would repeat one draw for ever. Draw outside of the step and give it the "
            "result, or draw with torch and compute with the tensor."
        )


def _what_intercepts() -> str | None:
    """Something that looks at every operator of a step, which a graph would not let it."""
    if torch.is_anomaly_enabled():
        return "torch.autograd.set_detect_anomaly is on"
    return settings.what_intercepts()


def _check_recomputed(nodes: Sequence[Any]) -> None:
    if any(node.op == "call_function" and kind(node) is NodeKind.RANDOM for node in nodes):
        raise NotImplementedError(
            "shoal: compile_step cannot compute random numbers (dropout) again in backward; use "
            "torch.compile(model, backend='shoal'), or no checkpoint around them"
        )


def _cut(data: Any, num_parts: int) -> Iterator[Any]:
    """Data in equal parts along the first dim of its tensors."""

    def part(number: int, one: Any) -> Any:
        if num_parts == 1 or not isinstance(one, Tensor):
            return one
        if one.shape[0] % num_parts:
            raise UsageError(
                f"data of {one.shape[0]} rows cannot be cut into accumulate={num_parts} equal parts"
            )
        size = one.shape[0] // num_parts
        return one[number * size : (number + 1) * size]

    for number in range(num_parts):
        yield trees.tree_map(partial(part, number), data)


RECORDED = ("nccl", BACKEND)
"""Backends whose collectives are work of the device alone."""


def _why_not_recorded(device: torch.device) -> str | None:
    """What stands against recording; None if nothing does."""
    if device.type != "cuda":
        return f"it runs on {device.type}, and only CUDA records graphs"
    is_grouped = dist.is_available() and dist.is_initialized()
    if is_grouped and (backend := dist.get_backend()) not in RECORDED:
        return f"its collectives go through {backend}, which waits on the host"
    return None


class _StepRecording:
    """A step as a CUDA graph, with memory of its own for the data, which differs by step."""

    def __init__(
        self, run: Callable[..., Sequence[Tensor]], fixed: Sequence[Tensor], data: Sequence[Any]
    ) -> None:
        self._data = [one.clone() if isinstance(one, Tensor) else one for one in data]
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):  # records, runs nothing
            (self._loss,) = run(*fixed, *self._data)

    def replay(self, data: Sequence[Any]) -> Tensor:
        """Do the step with other data; the loss is the caller's own."""
        for held, given in zip(self._data, data, strict=True):
            if isinstance(held, Tensor):
                held.copy_(given)
        self._graph.replay()
        return self._loss.clone()
