"""`forecast`: what a run will need, before it runs.

The engine itself takes three training steps as rank 0 of N, on a device that is only imagined
(`training`, `device`). Its notes are played through the allocator (`memory`) and on lanes
(`timing`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal._torch import storage
from shoal.comm.network import Network
from shoal.errors import UsageError
from shoal.layout import Even, Layout
from shoal.plan.accelerators import Accelerator, accelerator, network_of
from shoal.plan.allocator import CachingAllocator, PlainAllocator
from shoal.plan.device import NotingDevice
from shoal.plan.group import imagined_world
from shoal.plan.memory import MemoryForecast, play
from shoal.plan.notes import Moment
from shoal.plan.profile import Profile
from shoal.plan.setup import Setup
from shoal.plan.timing import Lanes, Span, TimeForecast
from shoal.plan.training import NUM_SEEN, NUM_STEPS, Trained, Units, Workload, train
from shoal.runtime.policy import MixedPrecisionPolicy
from shoal.runtime.recorder import OPTIMIZER, RecordedAction


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One step, moment by moment; times in µs since it began."""

    actions: tuple[RecordedAction, ...]
    """What the engine does."""
    spans: tuple[Span, ...]
    """What the lanes do."""
    memory: tuple[tuple[float, dict[str, int]], ...]
    """What is alive, by category, whenever memory came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What one rank will need for a training step."""

    plan: str
    """The setup, in a line."""
    world_size: int
    num_parameters: int
    num_tokens: int
    """Of all ranks' steps together; rows of the inputs where those are no tokens."""
    device: str
    network: str
    memory: MemoryForecast
    time: TimeForecast
    fits: bool
    """Whether what is reserved, and what CUDA takes beside, is less than the device has."""
    device_bytes: int
    context_bytes: int
    assumptions: tuple[str, ...]
    picture: Picture | None = field(default=None, repr=False, compare=False)
    """The step moment by moment, if it was asked for."""

    @property
    def needed_bytes(self) -> int:
        """What is reserved, and what CUDA takes beside."""
        return self.memory.reserved_peak_bytes + self.context_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        values = asdict(replace(self, picture=None))
        del values["picture"]
        return values


def forecast(
    model_fn: Callable[[], nn.Module],
    inputs_fn: Callable[[], Any],
    *,
    world: int | None = None,
    mesh: Sequence[int] | None = None,
    replicas: int = 1,
    units: Callable[[nn.Module], Units] | None = None,
    layout: Layout | None = None,
    policy: MixedPrecisionPolicy | None = None,
    reshard: bool | int | None = None,
    prefetch_depth: int = 1,
    micro_batches: int = 1,
    reduces_each: bool = False,
    checkpointing: bool | int | Collection[int] = False,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    device: str | Accelerator = "h200",
    network: str | Network = "nvlink+ib",
    torch_version: str | None = None,
    profile: Profile | None = None,
) -> Forecast:
    """Forecast a steady training step of a model on `world` ranks.

    The model is built on the meta device, sharded by `fully_shard`, unit by unit, and given memory
    (`to_empty`). A step is forward, backward, optimizer, `zero_grad`. `inputs_fn` gives the
    arguments of forward: a tensor, a tuple, or a dict.

    `mesh=(2, 4)` are two replicas of four shards, as `replicas=2` of `world=8` are.
    `checkpointing` recomputes the activations of all units, of every n-th, or of those numbered.
    Of `micro_batches` the sum is reduced, or with `reduces_each` every one. `torch_version` is the
    release that will run, which decides how memory of gathers comes and goes. With a `profile`
    operators take as long as they took when they were measured, not what a table says.
    """
    world, replicas = _ranks(world, mesh, replicas)
    setup = Setup(
        world=world,
        replicas=replicas,
        layout=layout or Even(),
        policy=policy or MixedPrecisionPolicy(),
        reshard=reshard,
        prefetch_depth=prefetch_depth,
        micro_batches=micro_batches,
        reduces_each=reduces_each,
        checkpointing=checkpointing,
    )
    workload = Workload(
        model=model_fn, inputs=inputs_fn, units=units, loss=loss, optimizer=optimizer
    )
    return forecast_setup(
        workload,
        setup,
        device=device,
        network=network,
        torch_version=torch_version,
        profile=profile,
    )


def forecast_setup(
    workload: Workload,
    setup: Setup,
    *,
    device: str | Accelerator = "h200",
    network: str | Network = "nvlink+ib",
    torch_version: str | None = None,
    profile: Profile | None = None,
    num_steps: int = NUM_STEPS,
    draws: bool = False,
) -> Forecast:
    """Forecast a workload under a setup: `forecast`, for those who have both as data.

    After fewer steps what is reserved may not have settled. `draws` adds the picture.
    """
    chosen, wires = accelerator(device), network_of(network, setup.world)
    imagined = NotingDevice(
        swaps_memory=_swaps_memory(torch_version), is_cpu=chosen.is_cpu, profile=profile
    )
    with old_objects_frozen():
        with imagined_world(imagined, setup.world):
            trained = train(workload, setup, imagined, num_steps)
        return _forecast(imagined, setup, chosen, wires, trained, profile, draws=draws)


@contextmanager
def old_objects_frozen() -> Iterator[None]:
    """Look for garbage among the objects of a forecast, not in all of torch: that took half of it.

    Inside of another such block nothing is left to do.
    """
    global _are_frozen
    if _are_frozen:
        yield
        return
    freeze_old_objects()
    _are_frozen = True
    try:
        yield
    finally:
        _are_frozen = False
        gc.unfreeze()


_are_frozen = False


def freeze_old_objects() -> None:
    """Let no search for garbage look at what there is now."""
    gc.collect()
    gc.freeze()


def _ranks(world: int | None, mesh: Sequence[int] | None, replicas: int) -> tuple[int, int]:
    """World size and replicas, from either way to say them."""
    if mesh is None:
        if world is None:
            raise UsageError("expected a number of ranks: world=8, or mesh=(2, 4)")
        return world, replicas
    if replicas != 1 or not 1 <= len(mesh) <= 2 or any(type(n) is not int or n < 1 for n in mesh):
        raise UsageError(
            f"expected mesh=(shards,) or (replicas, shards), and no replicas beside it, got "
            f"mesh={mesh!r} and replicas={replicas}"
        )
    copies, shards = (1, *mesh) if len(mesh) == 1 else mesh
    if world not in (None, copies * shards):
        raise UsageError(f"mesh={tuple(mesh)} has {copies * shards} ranks, not world={world}")
    return copies * shards, copies


def _swaps_memory(torch_version: str | None) -> bool:
    """Whether storages exchange memory in a release of torch."""
    if torch_version is None:
        return storage.can_swap_memory()
    try:
        major, minor = (int(part) for part in torch_version.split(".")[:2])
    except ValueError:
        raise UsageError(f"expected a release of torch, as 2.13, got {torch_version!r}") from None
    return (major, minor) > (2, 11)


def _forecast(
    imagined: NotingDevice,
    setup: Setup,
    chosen: Accelerator,
    wires: Network,
    trained: Trained,
    profile: Profile | None,
    *,
    draws: bool,
) -> Forecast:
    begin = imagined.steps()[-1]
    seen: list[tuple[int, dict[str, int]]] | None = [] if draws else None
    memory = play(
        imagined.notes,
        imagined.purposes,
        begin=begin,
        end=len(imagined.notes),
        allocator=PlainAllocator() if chosen.is_cpu else CachingAllocator(),
        seen=seen,
    )
    lanes = Lanes(chosen, wires)
    lanes.play(imagined.notes[:begin])
    lanes.begin()
    lanes.spans = [] if draws else None
    lanes.play(imagined.notes[begin:])
    unseen = max(0, setup.micro_batches - NUM_SEEN)
    time = lanes.forecast(begin="step", computed="computed", end="stepped", unseen=unseen)
    picture = None
    if draws:
        start = lanes.clock[0]
        places = {one.name: at for at, one in enumerate(imagined.notes) if type(one) is Moment}
        trained.actions.add(OPTIMIZER, "", places["computed"], places["stepped"])
        picture = Picture(
            actions=trained.actions.since(begin, lanes.clock),
            spans=tuple(replace(one, start_us=one.start_us - start) for one in lanes.spans or ()),
            memory=tuple((lanes.clock[at - begin] - start, alive) for at, alive in seen or ()),
        )
    needed = memory.reserved_peak_bytes + chosen.context_bytes
    return Forecast(
        plan=str(setup),
        world_size=setup.world,
        num_parameters=trained.num_parameters,
        num_tokens=trained.num_tokens * setup.world,
        device=chosen.name,
        network=wires.name,
        memory=memory,
        time=time,
        fits=needed <= chosen.memory_bytes,
        device_bytes=chosen.memory_bytes,
        context_bytes=chosen.context_bytes,
        assumptions=_assumptions(chosen, imagined, profile),
        picture=picture,
    )


def _assumptions(
    chosen: Accelerator, imagined: NotingDevice, profile: Profile | None
) -> tuple[str, ...]:
    uncounted = imagined.uncounted
    said = [
        "the peak is that of the third step: forward, backward, optimizer, zero_grad",
        "the model is sharded on the meta device, and gets memory by to_empty",
    ]
    if chosen.is_cpu:
        said.append("memory is that of tensors, not of the interpreter and its libraries")
    else:
        said += [
            "bf16 and fp16 attention without a mask is flash attention, other attention is the "
            "memory-efficient kernel",
            f"CUDA takes {chosen.context_bytes / (1 << 20):.0f} MiB beside the allocator; NCCL's "
            "buffers are not counted",
        ]
    if profile is not None:
        said.append(f"operators take what they took one by one on {profile.name}")
        uncounted = profile.unmeasured
    elif chosen.is_cpu:
        said.append("time is from a table of one core, and says little about this machine's")
    else:
        said.append(
            "time is from a table: kernels reach a part of the data sheet's peak, launches take a "
            "constant"
        )
        if not chosen.is_measured:
            said.append(f"the figures of {chosen.name} are its data sheet's, not measured")
    if imagined.has_convolutions:
        said.append("what convolutions borrow while they run depends on the library: not counted")
    if imagined.timeless:
        said.append(f"the kernels of {', '.join(sorted(imagined.timeless))} take no time")
    if not chosen.is_cpu:
        said.append(
            "not modelled: that collectives' kernels slow down compute beside them, contention on "
            "links, and memory that a build on the device would leave in the cache"
        )
    if uncounted:
        said.append(
            f"the time of {', '.join(sorted(uncounted))} is not known: it is taken to be that of "
            "what they read and write, and memory that they borrow is not counted"
        )
    return tuple(said)
