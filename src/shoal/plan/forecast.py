"""`forecast`: what a run will need, before it runs.

The engine itself takes three training steps as rank 0 of N, on a device that is only imagined
(`device`). Its notes are played through the allocator (`memory`) and on lanes (`timing`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from shoal._torch import composable, storage, trees
from shoal.comm.network import Network
from shoal.errors import ShoalError, UsageError
from shoal.layout import Layout
from shoal.optim import AdamW
from shoal.plan.accelerators import Accelerator, accelerator, network
from shoal.plan.device import NotedActions, NotingDevice
from shoal.plan.group import imagined_world
from shoal.plan.memory import MemoryForecast, play
from shoal.plan.timing import Lanes, TimeForecast
from shoal.runtime.fsdp_module import own_state
from shoal.runtime.fully_shard import fully_shard
from shoal.runtime.module_state import context_of
from shoal.runtime.observe import default_units
from shoal.runtime.policy import MixedPrecisionPolicy

Units = Sequence[nn.Module | list[nn.Module]]
NUM_STEPS = 3
"""The first makes the optimizer's state, the second moves into the memory beside it, the third is
as all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What one rank will need for a training step."""

    world_size: int
    num_parameters: int
    device: str
    network: str
    memory: MemoryForecast
    time: TimeForecast
    fits: bool
    """Whether what is reserved, and what CUDA takes beside, is less than the device has."""
    device_bytes: int
    context_bytes: int
    assumptions: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        return asdict(self)


def forecast(
    model_fn: Callable[[], nn.Module],
    inputs_fn: Callable[[], Any],
    *,
    world: int,
    replicas: int = 1,
    units: Callable[[nn.Module], Units] | None = None,
    layout: Layout | None = None,
    policy: MixedPrecisionPolicy | None = None,
    reshard: bool | int | None = None,
    prefetch_depth: int = 1,
    micro_batches: int = 1,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    device: str | Accelerator = "h200",
    network_model: str | Network = "nvlink+ib",
    checkpointing: bool = False,
    torch_version: str | None = None,
) -> Forecast:
    """Forecast a steady training step of a model on `world` ranks.

    The model is built on the meta device, sharded by `fully_shard`, unit by unit, and given memory
    (`to_empty`). A step is forward, backward, optimizer, `zero_grad`. `inputs_fn` gives the
    arguments of forward: a tensor, a tuple, or a dict. `replicas` of `world` hold the same shards.
    `checkpointing` recomputes the activations of each unit. `torch_version` is the release that
    will run, which decides how memory of gathers comes and goes.
    """
    if world < 1 or replicas < 1 or world % replicas:
        raise UsageError(
            f"expected a number of ranks that the replicas divide, got world={world} and "
            f"replicas={replicas}"
        )
    if micro_batches < 1:
        raise UsageError(f"expected one micro-batch or more, got micro_batches={micro_batches}")
    chosen, wires = accelerator(device), network(network_model, world)
    imagined = NotingDevice(swaps_memory=_swaps_memory(torch_version))
    with imagined_world(imagined, world):
        with torch.device("meta"):
            model, inputs = _built(model_fn), _on_meta(inputs_fn())
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        with imagined.running(notes=False):
            found = default_units(model) if units is None else list(units(model))
            if checkpointing:
                _checkpoint(found)
            _shard(model, found, world, replicas, layout, policy, reshard, prefetch_depth)
        with imagined.running():
            model.to_empty(device="meta")
            context_of(model, own_state(model)).recorder = NotedActions(imagined)
            gc.collect()
            _train(imagined, model, inputs, micro_batches, optimizer, loss)
    return _forecast(imagined, chosen, wires, world, num_parameters)


def _built(model_fn: Callable[[], nn.Module]) -> nn.Module:
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


def _on_meta(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    moved = trees.tree_map(lambda one: one.to("meta") if isinstance(one, Tensor) else one, inputs)
    if isinstance(moved, dict):
        return (), moved
    return (moved if isinstance(moved, tuple) else (moved,)), {}


def _swaps_memory(torch_version: str | None) -> bool:
    """Whether storages exchange memory in a release of torch."""
    if torch_version is None:
        return storage.can_swap_memory()
    try:
        major, minor = (int(part) for part in torch_version.split(".")[:2])
    except ValueError:
        raise UsageError(f"expected a release of torch, as 2.13, got {torch_version!r}") from None
    return (major, minor) > (2, 11)


def _checkpoint(units: Units) -> None:
    for unit in units:
        for module in unit if isinstance(unit, list) else [unit]:
            composable.checkpoint(module)


def _shard(
    model: nn.Module,
    found: Units,
    world: int,
    replicas: int,
    layout: Layout | None,
    policy: MixedPrecisionPolicy | None,
    reshard: bool | int | None,
    prefetch_depth: int,
) -> None:
    shape = (world,) if replicas == 1 else (replicas, world // replicas)
    names = ("shard",) if replicas == 1 else ("replicate", "shard")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for unit in [*found, model]:
        fully_shard(
            unit,
            mesh=mesh,
            layout=layout,
            mp_policy=policy or MixedPrecisionPolicy(),
            reshard_after_forward=reshard if unit is not model else None,
        )
    model.set_prefetch_depth(prefetch_depth)  # pyright: ignore


def _train(
    imagined: NotingDevice,
    model: nn.Module,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    micro_batches: int,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None,
    loss: Callable[[Any], Tensor] | None,
) -> None:
    make = optimizer or (lambda parameters: AdamW(parameters, fused=True))
    stepper = make(model.parameters())
    args, kwargs = inputs
    for _ in range(NUM_STEPS):
        imagined.moment("step")
        for number in range(micro_batches):
            model.set_requires_gradient_sync(number == micro_batches - 1)  # pyright: ignore
            imagined.phase = "activations"
            with _naming_values():
                value = _loss_of(model(*args, **kwargs), loss)
            imagined.phase = "gradients"
            value.backward()
            del value
        imagined.moment("computed")
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


def _loss_of(output: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
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


def _forecast(
    imagined: NotingDevice,
    chosen: Accelerator,
    wires: Network,
    world: int,
    num_parameters: int,
) -> Forecast:
    steps = imagined.steps()
    memory = play(imagined.notes, imagined.purposes, begin=steps[-1], end=len(imagined.notes))
    lanes = Lanes(chosen, wires)
    lanes.play(imagined.notes[: steps[-1]])
    lanes.forget_sums()
    lanes.play(imagined.notes[steps[-1] :])
    time = lanes.forecast(begin="step", computed="computed", end="stepped")
    needed = memory.reserved_peak_bytes + chosen.context_bytes
    return Forecast(
        world_size=world,
        num_parameters=num_parameters,
        device=chosen.name,
        network=wires.name,
        memory=memory,
        time=time,
        fits=needed <= chosen.memory_bytes,
        device_bytes=chosen.memory_bytes,
        context_bytes=chosen.context_bytes,
        assumptions=_assumptions(chosen),
    )


def _assumptions(chosen: Accelerator) -> tuple[str, ...]:
    said = [
        "the peak is that of the third step: forward, backward, optimizer, zero_grad",
        "the model is sharded on the meta device, and gets memory by to_empty",
        "bf16 and fp16 attention without a mask is flash attention, other attention is the "
        "memory-efficient kernel",
        f"CUDA takes {chosen.context_bytes / (1 << 20):.0f} MiB beside the allocator; NCCL's "
        "buffers are not counted",
        "time is from a table: kernels reach a part of the data sheet's peak, launches take a "
        "constant",
    ]
    if not chosen.is_measured:
        said.append(f"the figures of {chosen.name} are its data sheet's, not measured")
    return tuple(said)
