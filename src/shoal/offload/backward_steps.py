"""The optimizer's step beside backward, on host threads, unit by unit as gradients arrive.

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    step_in_backward(model, optimizer)
    for batch in batches:
        model(batch).sum().backward()   # units are stepped meanwhile
        optimizer.step()                # waits for them, and steps what is left

A thread steps a unit's parameters by a copy of the optimizer that holds these alone and has the
same state. Then it drops their gradients, so that the host needs memory for a few units' at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shoal._torch import autograd
from shoal.errors import InvariantError, UsageError
from shoal.runtime.module_state import units_of
from shoal.runtime.unit import Unit
from shoal.runtime.updates import leave_uncounted

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""The optimizers that never look across elements, so that a thread communicates with nobody."""


def step_in_backward(model: nn.Module, optimizer: Optimizer, *, threads: int = 1) -> BackwardSteps:
    """From now on step each unit of a model as soon as its reduced gradients are on the host.

    The numbers are those of `optimizer.step()` after backward, to the bit. That call stays: it
    waits for the threads, and steps the parameters that have gradients still. Each unit's
    gradients must be reduced once per step: accumulate with `set_requires_gradient_sync(False)` in
    all backwards but the last. Gradients are gone after it, so nothing can be clipped or
    unscaled. The kernels of a thread use as many cores as `torch.get_num_threads()` says.

    Args:
        model: Its shards are in host memory: sharded with `CPUOffloadPolicy`, or on a CPU mesh.
        optimizer: One that steps element by element, such as AdamW; `fused=True` is the fastest.
        threads: How many units are stepped at the same time.

    Raises:
        UsageError: The model has no unit in host memory whose parameters the optimizer holds.
        NotImplementedError: The optimizer looks across elements, or shards are on a device.
    """
    return BackwardSteps(model, optimizer, threads)


class BackwardSteps:
    """Steps units on threads; `remove()` goes back to stepping at the end."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, threads: int) -> None:
        if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
            raise UsageError(f"expected a number of threads of 1 or more, got {threads!r}")
        if not isinstance(optimizer, ELEMENTWISE):
            names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
            raise NotImplementedError(
                f"shoal: step_in_backward does not support {type(optimizer).__name__}, which may "
                f"look across elements and ranks; use one of {names}, or a class derived from it"
            )
        self._units = _units_on_host(model, optimizer)
        self._optimizer = optimizer
        self._parts: dict[Unit, _Part] = {}
        self._running: dict[Unit, Future[None]] = {}
        """The units that were stepped since the last `optimizer.step()`."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="shoal-step")
        self._hook = optimizer.register_step_pre_hook(self._wait)
        for unit in self._units:
            unit.gradient_taker = self

    def remove(self) -> None:
        """Wait, and leave later steps to `optimizer.step()` alone."""
        self._wait()
        self._hook.remove()
        for unit in self._units:
            if unit.gradient_taker is self:
                unit.gradient_taker = None
        self._pool.shutdown()

    def expect(self, unit: Unit) -> None:
        """Reduced gradients are about to be put on a unit's parameters. See `GradientTaker`."""
        if unit in self._running:
            raise InvariantError(
                f"unit {unit.name!r} has gradients a second time before optimizer.step(), and was "
                "stepped with the first ones already (step_in_backward): its module ran twice, or "
                "there were two backwards. Accumulate with set_requires_gradient_sync(False) in "
                "all backwards but the last, or step at the end (remove())"
            )

    def take(self, unit: Unit, mark: torch.cuda.Event | None) -> None:
        """They are there, as of a mark: step. See `GradientTaker`."""
        part = self._parts.get(unit)
        if part is None or not part.holds_for(unit):
            part = self._parts[unit] = _Part(self._optimizer, unit)
        part.follow(self._optimizer)
        self._running[unit] = self._pool.submit(part.step, mark)

    def before_read(self, unit: Unit) -> None:
        """A unit's shards are about to be gathered. See `GradientTaker`."""
        running = self._running.get(unit)
        if running is None:
            return
        if autograd.inside_backward():
            self.expect(unit)
        running.result()

    def _wait(self, *_: object) -> None:
        """Wait for all threads; raise what the first of them has raised."""
        running, self._running = self._running, {}
        failures = [future.exception() for future in running.values()]
        for failure in failures:
            if failure is not None:
                raise failure


class _Part:
    """An optimizer of one unit's parameters, with the state of the one that holds all."""

    def __init__(self, optimizer: Optimizer, unit: Unit) -> None:
        self._sharded = unit.shards.sharded
        own = {id(parameter) for parameter in self._sharded}
        self._optimizer = copy.copy(optimizer)
        leave_uncounted(self._optimizer)
        self._optimizer.param_groups = [
            {**group, "params": [p for p in group["params"] if id(p) in own]}
            for group in optimizer.param_groups
        ]

    def holds_for(self, unit: Unit) -> bool:
        """Whether the unit's parameters are the very same objects."""
        return unit.shards.sharded is self._sharded

    def follow(self, optimizer: Optimizer) -> None:
        """Take over what schedulers and state dicts have changed since."""
        own = self._optimizer
        own.state = optimizer.state
        for group, whole in zip(own.param_groups, optimizer.param_groups, strict=True):
            group.update({key: value for key, value in whole.items() if key != "params"})

    def step(self, mark: torch.cuda.Event | None) -> None:
        """Step, and drop the gradients; on a thread."""
        if mark is not None:
            mark.synchronize()
        self._optimizer.step()
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def _units_on_host(model: nn.Module, optimizer: Optimizer) -> list[Unit]:
    held = _held(optimizer.param_groups)
    units = [
        unit
        for unit in units_of(model)
        if any(id(parameter) in held for parameter in unit.shards.sharded)
    ]
    if not units:
        raise UsageError(
            f"the optimizer holds no parameter of a unit of this {type(model).__name__}: shard it "
            "with fully_shard, and build the optimizer from model.parameters() after that"
        )
    on_host = [unit for unit in units if unit.shards.buffer.device.type == "cpu"]
    if not on_host:
        raise NotImplementedError(
            f"shoal: step_in_backward is not supported for shards on {units[0].device}: the "
            "threads compute on the host. Shard with offload_policy=CPUOffloadPolicy()"
        )
    taken = [unit.name for unit in on_host if unit.gradient_taker is not None]
    if taken:
        raise InvariantError(f"the units {taken} are stepped in backward already: remove() first")
    return on_host


def _held(groups: Iterable[dict[str, Any]]) -> set[int]:
    return {id(parameter) for group in groups for parameter in group["params"]}
