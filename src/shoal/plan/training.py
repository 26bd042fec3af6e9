"""The run that a forecast imagines: a model is built on meta, sharded, and takes some steps.

`Workload` is what is trained, `Setup` is how; the steps are the engine's own.
"""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from shoal._torch import composable, dynamo, trees
from shoal.errors import ShoalError, UsageError
from shoal.optim import AdamW
from shoal.plan.device import NotedActions, NotingDevice
from shoal.plan.setup import Setup
from shoal.plan.timing import MICRO_BATCH
from shoal.runtime.fsdp_module import FSDPModule, own_state
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
    actions: NotedActions


class RunFollower(Protocol):
    """Hears how far a run has come."""

    phase: str
    """What memory is taken for now."""

    def moment(self, name: str, unit: str = "") -> None:
        """Something that people have a name for happens now."""
        ...


def train(
    workload: Workload, setup: Setup, imagined: NotingDevice, num_steps: int = NUM_STEPS
) -> Trained:
    """Let a device take notes of a run; the process group of rank 0 is there already."""
    with torch.device("meta"):
        inputs = arguments(workload, "meta")
    with imagined.running(notes=False):
        model = meta_model(workload)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        shard(model, workload, setup, "cpu")
    with imagined.running():
        model.to_empty(device="meta")
        context = context_of(model, own_state(model))
        if any(one.shards.home_device(one.device) != one.device for one in context.units):
            raise UsageError(
                "CPU offload is not modelled: plan without offload_policy. Shards, gradients and "
                "optimizer state are then what offload would take off the device"
            )
        actions = context.recorder = NotedActions(imagined)
        given = [one for one in trees.tree_leaves(inputs) if isinstance(one, Tensor)]
        imagined.holds(given, "inputs")
        gc.collect()
        take_steps(imagined, model, inputs, workload, setup, num_steps)
    return Trained(
        num_parameters=num_parameters,
        num_tokens=_num_tokens(inputs) * setup.micro_batches,
        actions=actions,
    )


def meta_model(workload: Workload) -> nn.Module:
    """The model, built on meta."""
    with torch.device("meta"), _blaming("model()"):
        model = workload.model()
    _check_model(model)
    return model


_WRAPPERS = ("FullyShardedDataParallel", "DistributedDataParallel")
"""torch's, and shoal's of the same name."""


def _check_model(model: Any) -> None:
    """Refuse what cannot be imagined, with the name of what is in the way."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"expected model() to return an nn.Module, got a {type(model).__name__}")
    for name, module in model.named_modules():
        if type(module).__name__ in _WRAPPERS:
            raise UsageError(
                f"module {name or 'model'!r} is wrapped in {type(module).__name__}, which is not "
                "modelled: plan the model unwrapped; layout Flat is how shoal's wrapper shards"
            )
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    if not parameters:
        raise UsageError(f"the model, a {type(model).__name__}, has no parameters to train")
    if not any(one.requires_grad for one in parameters.values()):
        raise UsageError(
            f"no parameter of the model, a {type(model).__name__}, requires a gradient: there is "
            "nothing to train"
        )
    for name, one in (*parameters.items(), *buffers.items()):
        if isinstance(one, UninitializedParameter):
            raise UsageError(
                f"parameter {name!r} has no shape yet: replace lazy modules by those they become"
            )
        if isinstance(one, DTensor) and not isinstance(model, FSDPModule):
            raise UsageError(
                f"parameter {name!r} is sharded already, by something else than fully_shard of the "
                "whole model: plan the model as it was before, and let the setup shard it"
            )
        if not one.is_meta:
            kind = "parameter" if name in parameters else "buffer"
            raise UsageError(
                f"the model cannot be built on the meta device: {kind} {name!r} has memory. "
                "Make tensors without naming a device, so that torch.device('meta') holds"
            )
    for name, module in model.named_modules():
        if dynamo.runs_compiled(module):
            raise UsageError(
                f"module {name or 'model'!r} is compiled, which is not modelled: plan the model "
                "without torch.compile, which computes the same"
            )


def _units_of(model: nn.Module, workload: Workload) -> Units:
    if workload.units is None:
        return default_units(model)
    with _blaming("units(model)"):
        found = list(workload.units(model))
    names = {id(module): name for name, module in model.named_modules()}
    seen: set[int] = set()
    for unit in found:
        for one in unit if isinstance(unit, list) else [unit]:
            if not isinstance(one, nn.Module):
                continue
            if id(one) not in names:
                raise UsageError(
                    f"units(model) returned a {type(one).__name__} that is not in the model"
                )
            if one is model:
                raise UsageError(
                    "units(model) returned the model itself, which is always the last unit: leave "
                    "it out"
                )
            if id(one) in seen:
                raise UsageError(f"units(model) returned module {names[id(one)]!r} twice")
            seen.add(id(one))
    return found


Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def arguments(workload: Workload, device: str | torch.device) -> Inputs:
    """The arguments of forward, on a device."""
    with _blaming("inputs()"):
        inputs = workload.inputs()
    if inputs is None:
        raise UsageError(
            "expected inputs() to return the arguments of forward, a tensor, a tuple or a dict of "
            "them, got None"
        )
    moved = trees.tree_map(lambda one: one.to(device) if isinstance(one, Tensor) else one, inputs)
    if isinstance(moved, dict):
        return (), moved
    return (moved if isinstance(moved, tuple) else (moved,)), {}


def num_tokens_of(workload: Workload) -> int:
    """How many tokens the inputs of one forward have."""
    with torch.device("meta"):
        return _num_tokens(arguments(workload, "meta"))


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


def shard(model: nn.Module, workload: Workload, setup: Setup, device_type: str) -> None:
    """Shard a model as a setup says, over the ranks of the default process group.

    Unless `model()` did it by itself: then the setup has nothing to say.
    """
    if isinstance(model, FSDPModule):
        said = Setup(
            world=setup.world, micro_batches=setup.micro_batches, reduces_each=setup.reduces_each
        )
        if setup != said:
            raise UsageError(
                "model() has sharded the model by itself, so nothing else can say how: leave out "
                f"units, precision and flags like these ({setup})"
            )
        return
    found = _units_of(model, workload)
    _checkpoint(found, setup)
    found = _joined(found, setup.blocks_per_unit)
    shape, names = (setup.shards,), ("shard",)
    if setup.replicas > 1:
        shape, names = (setup.replicas, *shape), ("replicate", *names)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
    for unit in [*found, model]:
        fully_shard(
            unit,
            mesh=mesh,
            layout=setup.layout,
            mp_policy=setup.policy,
            reshard_after_forward=setup.reshard if unit is not model else None,
        )
    model.set_prefetch_depth(setup.prefetch_depth)  # pyright: ignore


def take_steps(
    follower: RunFollower,
    model: nn.Module,
    inputs: Inputs,
    workload: Workload,
    setup: Setup,
    num_steps: int,
    most_seen: int | None = NUM_SEEN,
) -> None:
    """Train some steps; after each, gradients are dropped. None takes all micro-batches."""
    make = workload.optimizer or (lambda parameters: AdamW(parameters, fused=True))
    with _blaming("optimizer(parameters)"):
        stepper = make(model.parameters())
    if not isinstance(stepper, torch.optim.Optimizer):
        raise UsageError(
            f"expected optimizer(parameters) to return an optimizer, got a {type(stepper).__name__}"
        )
    args, kwargs = inputs
    most = min(setup.micro_batches, most_seen or setup.micro_batches)
    for step in range(num_steps):
        follower.moment("step")
        # The first is there to make the optimizer's state, those before the last to settle.
        num_seen = most if most_seen is None or step == num_steps - 1 else min(most, step + 1)
        for number in range(num_seen):
            follower.moment(MICRO_BATCH)
            is_last = number == num_seen - 1
            model.set_requires_gradient_sync(is_last or setup.reduces_each)  # pyright: ignore
            follower.phase = "activations"
            with _blaming("the forward"):
                value = model(*args, **kwargs)
            with _blaming("the loss"):
                value = _loss_of(value, workload.loss)
            follower.phase = "gradients"
            with _blaming("the backward"):
                value.backward()
            del value
        follower.moment("computed")
        if workload.clip is not None:
            workload.clip(model)
        follower.phase = "optimizer state"
        with _blaming("the optimizer's step"):
            stepper.step()
        stepper.zero_grad(set_to_none=True)
        follower.moment("stepped")


@contextmanager
def _blaming(what: str) -> Iterator[None]:
    """Say which part of a program cannot be imagined, and why."""
    try:
        with warnings.catch_warnings():
            # torch turns autocast off where there is no CUDA, and only warns of it.
            warnings.filterwarnings("error", message=".*CUDA is not available.*Disabling")
            yield
    except ShoalError:
        raise
    except Exception as error:
        said = str(error).strip().partition("\n")[0]
        raise UsageError(_why(what, type(error).__name__, said)) from error


def _why(what: str, kind: str, said: str) -> str:
    """What an error means that a run on meta tensors met."""
    # The last is what torch says of `autocast(x.device.type)`.
    if any(part in said for part in ("autocast", "Disabling", "unsupported scalarType")):
        return (
            f"{what} uses torch.autocast, which does nothing on meta tensors, and is not modelled: "
            "plan the dtypes by precision = {...} in the file (MixedPrecisionPolicy)"
        )
    if "env:// rendezvous" in said:
        return (
            f"{what} asks for a process group, and a search has none: let it return the model "
            "unsharded, and the search shards it"
        )
    if "fake impl" in said:
        return f"{what} calls an operator without shapes for meta tensors: {said}"
    if "on the expected device meta" in said or "not compiled with CUDA" in said:
        return (
            f"{what} puts a tensor on a device of its own, and a forecast runs on meta ({said}). "
            "Make tensors on the device of others, as with device=x.device"
        )
    if "meta" in said.lower():
        return (
            f"{what} needs values, which a forecast has none of (it asks a meta tensor: {said}). "
            "Make its control flow depend on shapes alone, or plan a version that does"
        )
    return f"{what} raised {kind}: {said} (--traceback shows where)"


def _loss_of(output: Any, loss: Callable[[Any], Any] | None) -> Tensor:
    if loss is not None:
        found = loss(output)
        if not isinstance(found, Tensor) or found.numel() != 1:
            got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise UsageError(f"expected loss(output) to return a scalar tensor, got {got}")
        return found
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
