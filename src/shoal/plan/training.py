"""The run that a forecast imagines: a model is built on meta, sharded, and takes some steps.

`Workload` is what is trained, `Setup` is how; the steps are the engine's own.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from shoal._torch import composable, trees
from shoal.errors import ShoalError, UsageError
from shoal.optim import AdamW
from shoal.plan.device import NotedActions, NotingDevice
from shoal.plan.setup import Setup
from shoal.plan.timing import MICRO_BATCH
from shoal.runtime.fsdp_module import own_state
from shoal.runtime.fully_shard import fully_shard
from shoal.runtime.module_state import context_of
from shoal.runtime.observe import default_units

Units = Sequence[nn.Module | list[nn.Module]]
NUM_STEPS = 3
"""The first makes the optimizer's state, the second moves into the memory beside it, the third is
as all others."""
NUM_SEEN = 3
"""So many micro-batches are taken at most: those between the first and the last are all alike."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained, whatever the sharding."""

    model: Callable[[], Any]
    inputs: Callable[[], Any]
    """The arguments of forward: a tensor, a tuple, or a dict."""
    units: Callable[[Any], Any] | None = None
    loss: Callable[[Any], Any] | None = None
    optimizer: Callable[[Any], Any] | None = None
    clip: Callable[[nn.Module], object] | None = None
    """What is done to gradients before the optimizer's step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What is known of a run beside its notes."""

    num_parameters: int
    num_tokens: int
    """Elements of the integer inputs of one rank's step; rows of the inputs if there are none."""


def train(
    workload: Workload, setup: Setup, imagined: NotingDevice, num_steps: int = NUM_STEPS
) -> Trained:
    """Let a device take notes of a run; the process group of rank 0 is there already."""
    with torch.device("meta"):
        model, inputs = _built(workload.model), _on_meta(workload.inputs())
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    with imagined.running(notes=False):
        units = workload.units
        found: Units = default_units(model) if units is None else list(units(model))
        _checkpoint(found, setup)
        _shard(model, _joined(found, setup.blocks_per_unit), setup)
    with imagined.running():
        model.to_empty(device="meta")
        context_of(model, own_state(model)).recorder = NotedActions(imagined)
        gc.collect()
        _steps(imagined, model, inputs, workload, setup, num_steps)
    return Trained(
        num_parameters=num_parameters, num_tokens=_num_tokens(inputs) * setup.micro_batches
    )


def _built(model_fn: Callable[[], Any]) -> nn.Module:
    model = model_fn()
    if not isinstance(model, nn.Module):
        raise UsageError(f"expected model() to return an nn.Module, got a {type(model).__name__}")
    elsewhere = [name for name, one in model.named_parameters() if not one.is_meta]
    if elsewhere:
        raise UsageError(
            f"the model cannot be built on the meta device: parameter {elsewhere[0]!r} has memory. "
            "Make parameters without naming a device, so that torch.device('meta') holds"
        )
    return model


Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def _on_meta(inputs: Any) -> Inputs:
    moved = trees.tree_map(lambda one: one.to("meta") if isinstance(one, Tensor) else one, inputs)
    if isinstance(moved, dict):
        return (), moved
    return (moved if isinstance(moved, tuple) else (moved,)), {}


def num_tokens_of(inputs_fn: Callable[[], Any]) -> int:
    """How many tokens the inputs of one forward have."""
    with torch.device("meta"):
        return _num_tokens(_on_meta(inputs_fn()))


def _num_tokens(inputs: Inputs) -> int:
    tensors = [one for one in trees.tree_leaves(inputs) if isinstance(one, Tensor) and one.dim()]
    tokens = [one for one in tensors if not one.is_floating_point() and one.dim() > 1]
    if tokens:
        return math.prod(tokens[0].shape)
    return tensors[0].shape[0] if tensors else 1


def _joined(units: Units, count: int) -> Units:
    if count == 1:
        return units
    flat = [unit if isinstance(unit, list) else [unit] for unit in units]
    starts = range(0, len(flat), count)
    return [[one for unit in flat[at : at + count] for one in unit] for at in starts]


def _checkpoint(units: Units, setup: Setup) -> None:
    for number, unit in enumerate(units):
        if setup.is_checkpointed(number):
            for module in unit if isinstance(unit, list) else [unit]:
                composable.checkpoint(module)


def _shard(model: nn.Module, found: Units, setup: Setup) -> None:
    shape, names = (setup.shards,), ("shard",)
    if setup.replicas > 1:
        shape, names = (setup.replicas, *shape), ("replicate", *names)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for unit in [*found, model]:
        fully_shard(
            unit,
            mesh=mesh,
            layout=setup.layout,
            mp_policy=setup.policy,
            reshard_after_forward=setup.reshard if unit is not model else None,
        )
    model.set_prefetch_depth(setup.prefetch_depth)  # pyright: ignore


def _steps(
    imagined: NotingDevice,
    model: nn.Module,
    inputs: Inputs,
    workload: Workload,
    setup: Setup,
    num_steps: int,
) -> None:
    make = workload.optimizer or (lambda parameters: AdamW(parameters, fused=True))
    stepper = make(model.parameters())
    args, kwargs = inputs
    num_seen = min(setup.micro_batches, NUM_SEEN)
    for _ in range(num_steps):
        imagined.moment("step")
        for number in range(num_seen):
            imagined.moment(MICRO_BATCH)
            is_last = number == num_seen - 1
            model.set_requires_gradient_sync(is_last or setup.reduces_each)  # pyright: ignore
            imagined.phase = "activations"
            with _naming_values():
                value = _loss_of(model(*args, **kwargs), workload.loss)
            imagined.phase = "gradients"
            value.backward()
            del value
        imagined.moment("computed")
        if workload.clip is not None:
            workload.clip(model)
        imagined.phase = "optimizer state"
        stepper.step()
        stepper.zero_grad(set_to_none=True)
        imagined.moment("stepped")


@contextmanager
def _naming_values() -> Iterator[None]:
    """Say what it means when a forward asks a meta tensor for its values."""
    try:
        yield
    except (NotImplementedError, RuntimeError, ValueError) as error:
        if isinstance(error, ShoalError) or "meta" not in str(error).lower():
            raise
        raise UsageError(
            "the forward needs values, which a forecast has none of (it asks a meta tensor: "
            f"{str(error).splitlines()[0]}). Make its control flow depend on shapes alone, or "
            "plan a version that does"
        ) from error


def _loss_of(output: Any, loss: Callable[[Any], Any] | None) -> Tensor:
    if loss is not None:
        return loss(output)
    tensors = [one for one in trees.tree_leaves(output) if isinstance(one, Tensor)]
    if len(tensors) == 1 and tensors[0].numel() == 1:
        return tensors[0]
    named = getattr(output, "loss", None)
    if isinstance(named, Tensor):
        return named
    floating = [one for one in tensors if one.is_floating_point() and one.requires_grad]
    if not floating:
        raise UsageError(
            "the model returns nothing that a loss could be made of: pass loss=, or define "
            "loss(output) in the file"
        )
    return torch.stack([one.float().sum() for one in floating]).sum()
