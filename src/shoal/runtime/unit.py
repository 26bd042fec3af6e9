"""A unit: the parameters that are communicated together, in one of the phases of `Phase`.

A unit has its shards (`shards`), its full parameters (`full`) and what is needed to go from one
to the other: a gather, and for gradients a reduction. It decides nothing about when.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, methodcaller
from typing import ClassVar, Protocol, TypeAlias

import torch
from torch import nn

from shoal._torch import autograd
from shoal.comm.transport import Transport
from shoal.errors import UsageError
from shoal.layout import Layout, Packing
from shoal.low_precision import GatherFormat, Wire
from shoal.low_precision.reduction import Int8ReduceScatter
from shoal.low_precision.wire import check_cuts
from shoal.mesh import DataParallelMeshInfo, DDPMeshInfo, FSDPMeshInfo
from shoal.runtime.arena import Arena
from shoal.runtime.full import (
    FullParameters,
    ShardOf,
    attach,
    full_name,
)
from shoal.runtime.gather import (
    EncodedGather,
    Gather,
    KeptShards,
    PostForward,
    ShardCopy,
    Stored,
)
from shoal.runtime.gather_hooks import Extension
from shoal.runtime.gradient_matrix import GradientMatrix
from shoal.runtime.gradients import Gradients
from shoal.runtime.policy import MixedPrecisionPolicy, OffloadPolicy, ReduceScatter, UnitOptions
from shoal.runtime.reduction import UnitReducer
from shoal.runtime.shards import Home, Member, ParameterSource, Shards
from shoal.runtime.streams import Streams
from shoal.runtime.updates import count_updates
from shoal.step.action import ActionKind, Actions
from shoal.step.phase import Phase
from shoal.step.unit_step import UnitStep, undo

_requires_grad = attrgetter("requires_grad")

Version: TypeAlias = tuple[int, int, int]
"""How often parameters were stepped, replaced, and changed in place."""


class InGraph(Protocol):
    """How graphs of a compiler gather and reduce a unit."""

    leaf: torch.Tensor
    """This rank's shard: the input of graphs."""
    full_leaves: tuple[torch.Tensor, ...]
    """For each parameter one of its full shape, without memory: what full gradients are for."""
    gather: Callable[..., tuple[torch.Tensor, ...]]
    """Full parameters of the leaf, which gets reduced gradients, or of both, where full ones do."""


class Inspector(Protocol):
    """Looks at what a unit communicates, on the way; nothing does unless somebody asked for it."""

    def on_gathered(
        self, unit: Unit, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]
    ) -> None:
        """A gather is over: what this rank has sent to each part of it, and received."""
        ...

    def on_reducing(self, unit: Unit, matrices: Sequence[torch.Tensor]) -> None:
        """Matrices of gradients, a row for each rank, are about to be reduced."""
        ...

    def on_reduced(self, unit: Unit, output: torch.Tensor) -> None:
        """This rank's row was reduced, and lies on its parameters."""
        ...


class GradientTaker(Protocol):
    """Takes reduced gradients off the shards as soon as they are there, and writes the shards."""

    def expect(self, unit: Unit) -> None:
        """Reduced gradients are about to be put on a unit's parameters; may refuse."""
        ...

    def take(self, unit: Unit, mark: torch.cuda.Event | None) -> None:
        """They are put there; where there is a mark, they are written when it has passed."""
        ...

    def before_read(self, unit: Unit) -> None:
        """The unit's shards are about to be gathered."""
        ...


class Unit:
    """The parameters communicated together."""

    gradients_type: ClassVar[type[Gradients]] = Gradients
    compares_frozen: ClassVar[bool] = True
    """Whether ranks compare what they freeze when the model first runs, not when the unit does."""

    def __init__(
        self,
        name: str,
        sources: Sequence[ParameterSource],
        layout: Layout,
        mesh_info: DataParallelMeshInfo,
        device: torch.device,
        policy: MixedPrecisionPolicy,
        offload: OffloadPolicy,
    ) -> None:
        self.step = UnitStep(self, name)
        """When: where the unit is in its step."""
        self.name = name
        self.policy = policy
        self.device = device
        self.mesh_info = mesh_info
        self.layout = layout
        self._options = UnitOptions()
        self.reduces_by_default = True
        """Whether gradients are reduced as without any setter; read more often than it changes."""
        self.transport = (
            Transport(mesh_info.shard_process_group)
            if isinstance(mesh_info, FSDPMeshInfo)
            else None
        )
        self.replicas = (
            Transport(mesh_info.replicate_process_group)
            if isinstance(mesh_info, DDPMeshInfo)
            else None
        )
        self.size = 1 if self.transport is None else self.transport.size
        self.rank = 0 if self.transport is None else self.transport.rank
        packing = layout.pack([source.spec for source in sources], self.size).in_sections()
        if policy.gather_format is not None:
            check_format(policy.gather_format, packing, is_gathered=self.transport is not None)
        self.shards = Shards(name, sources, packing, self.rank, offload)
        self._post: PostForward | None = None
        self.in_graph: InGraph | None = None
        """How graphs gather and reduce it, once one was captured."""
        self.inspector: Inspector | None = None
        self.num_updates = 0
        self.noted: int | None = None
        """What `note_operations` saw, while a backward of the model runs."""
        self._wait: Callable[[], object] | None = None
        self._copied: ShardCopy | None = None
        """Shards that came from the host, until they are gathered."""
        self._kept: tuple[KeptShards, Gather | EncodedGather] | None = None
        """Shards in the dtype of compute, or encoded, and what gathers from there."""
        self.wire: Wire | None = None
        """What gathers carry in a format of few bits, if there is one."""
        self._launched: Gather | EncodedGather | None = None
        """The gather that was launched last."""
        self._encoded_scatter: Int8ReduceScatter | None = None
        self._is_exact = False
        self._exact: Gather | EncodedGather | None = None
        self.gathered_version: Version = (-1, -1, -1)
        """The version that the full parameters have."""
        self.notices: Callable[..., None] | None = None
        self.told: Callable[[str, Actions], None] | None = None
        """Hears what is asked of the unit past the step machine: a request, and what it takes."""
        self.gradient_taker: GradientTaker | None = None
        """Where reduced gradients go from the shards, if somebody waits for them."""
        self.gradient_scale = 1.0
        """What reduced gradients are multiplied by, where fewer ranks have inputs."""
        self._counted: set[int] = set()
        self._watches_all = False
        self.trained: tuple[int, ...] = ()
        """The parameters that get gradients; the same object for as long as they stay the same."""
        self.trained_set: frozenset[int] = frozenset()
        self._trained_flags: list[bool] = []
        self._prepared: torch.Tensor | None = None
        self.gradients = self.gradients_type(self)
        self.reduces_in_graph = True
        """Whether a graph may reduce gradients by itself. An attribute, so that it is one guard."""
        count_updates(self)

    @torch.inference_mode(False)
    def prepare(self, arena: Arena, streams: Streams) -> None:
        """Make what depends on the parameters as they are at the first step."""
        self.streams = streams
        if self._prepared is not None:
            self.use(streams)
        self.shards.rename(self.name)
        if self.phase is Phase.SHARDED:
            self.shards.follow()
            self.shards.follow_hooks()
            self._check_materialised()
        if self._prepared is self.shards.buffer:
            self._name_full()
            return
        self.arena = arena
        packing = self.shards.packing
        stored = [param.dtype for param in packing.params]
        compute = [self.policy.compute_dtype(dtype) for dtype in stored]
        self.compute_packing = packing if stored == compute else packing.with_dtypes(compute)
        gather_dtype = compute[0] if len(set(compute)) == 1 else torch.uint8
        members = self.shards.members
        self.full = FullParameters(self.name, self.compute_packing, members, arena, gather_dtype)
        form = self.policy.gather_format
        self.wire = None if form is None else Wire(self.compute_packing, form)
        self.gather = self._gather_from(self.shards)
        self._kept = self._launched = self._exact = None
        self.discard_copy()
        if self.policy.reduce_format is not None:
            self._encoded_scatter = Int8ReduceScatter(self.policy.reduce_format)
        self.full.settle()
        self.extension = Extension(self) if self.shards.extended else None
        self.full.extension = self.extension
        for member, parameter in zip(self.shards.members, self.full.parameters, strict=True):
            attributes = {k: v for k, v in vars(member.sharded).items() if k != "_shoal_name"}
            vars(parameter).update(attributes)
        self._name_full()
        self._find_registrations()
        self._counted.clear()
        self.follow_requires_grad()
        self.matrix = GradientMatrix(self)
        self.reducer = UnitReducer(self)
        self._prepared = self.shards.buffer
        self._note_copies()

    def take_over(self, info: FSDPMeshInfo) -> None:
        """Be sharded over other ranks: shards are zeros, which the caller fills.

        Whatever was going on is forgotten, and nothing of it is waited for: its ranks may be gone.
        """
        self.mesh_info = info
        self.transport = Transport(info.shard_process_group)
        self.size, self.rank = self.transport.size, self.transport.rank
        self.step.reset()
        self._wait = self._kept = self._prepared = None
        self.discard_copy()
        self.noted = None
        self.gathered_version = (-1, -1, -1)
        self._counted.clear()
        self._trained_flags = []
        self.gradients = self.gradients_type(self)
        self.gradients.note_waiting()
        self.shards.take_over(self.packing_for(self.size), info)

    def part_from_replicas(self) -> None:
        """From now on reduce gradients over the ranks that shard, and leave the replicas alone."""
        self.replicas = None
        self.shards.num_recaptures += 1  # graphs that were captured reduce over them

    def packing_for(self, size: int) -> Packing:
        """How the parameters would be cut over so many ranks."""
        params = self.shards.whole.params
        return self.layout.pack(params, size).in_sections()

    @property
    def gather_bytes(self) -> int:
        """What all ranks' shards are on the way."""
        return self.full.gathered.nbytes if self.wire is None else self.wire.packing.gathered_bytes

    def _gather_from(self, stored: Stored) -> Gather | EncodedGather:
        if self.wire is None:
            return self._exact_gather_from(stored)
        where = self.full.gathered, self.transport, self.streams
        return EncodedGather(self.name, stored, self.wire, *where, self.arena)

    def _exact_gather_from(self, stored: Stored) -> Gather:
        return Gather(
            self.name,
            stored,
            self.compute_packing,
            self.full.gathered,
            self.transport,
            self.streams,
            reads_copies=self.shards.are_on_host and stored is self.shards,
        )

    def _name_full(self) -> None:
        """Let full parameters say what they are called."""
        self.full.rename(self.name)
        for member, parameter in zip(self.shards.members, self.full.parameters, strict=True):
            self._attach(member, parameter)

    def _attach(self, member: Member, parameter: nn.Parameter) -> None:
        """Let a full parameter know its shard."""
        attach(parameter, ShardOf(member, self.qualified(member.spec.name)))

    def _find_registrations(self) -> None:
        self._registrations = [
            (parameters, name, parameter)
            for member, parameter in zip(self.shards.members, self.full.parameters, strict=True)
            for parameters, name in member.places
        ]

    def put_full(self, index: int, parameter: nn.Parameter) -> None:
        """Take a full parameter that was made of its first gather."""
        self.full.put(index, parameter)
        self._attach(self.shards.members[index], parameter)
        self._find_registrations()
        self._counted.discard(index)
        self._trained_flags = []
        self.follow_requires_grad()

    def use(self, streams: Streams) -> None:
        """Work on other streams from here on."""
        self.streams = self.gather.streams = streams
        for gather in (self._exact, None if self._kept is None else self._kept[1]):
            if gather is not None:
                gather.streams = streams

    def compute_by(self, policy: MixedPrecisionPolicy) -> None:
        """Compute in the dtypes of another policy; what ran before has no backward any more."""
        if policy == self.policy:
            return
        self.reshard()
        self.policy = policy
        self.shards.num_changes += 1  # whoever runs that backward is told that it is too late
        self.shards.num_recaptures += 1
        if self._prepared is not None:
            self._prepared = None
            self.prepare(self.arena, self.streams)

    def prepare_alone(self) -> None:
        """Get ready to be gathered before the model is known."""
        if self._prepared is None:
            self.prepare(Arena(self.device), Streams(self.device))

    def qualified(self, name: str) -> str:
        """What something in the unit is called in the model."""
        return ".".join(part for part in (self.name, name) if part and part != "root")

    def _check_materialised(self) -> None:
        if self.device.type == "meta":  # imagined: nothing has values there
            return
        names = [self.qualified(m.spec.name) for m in self.shards.members if m.local.is_meta]
        if names:
            raise RuntimeError(
                "FSDP parameters should be materialized from meta device before training, but the "
                f"following were still on meta device: {names}. Call "
                "module.to_empty(device=...), then initialise them (reset_parameters) or load a "
                "state dict."
            )
        wanted = self.shards.home_device(self.device)
        elsewhere = [
            (self.qualified(m.spec.name), m.local.device)
            for m in self.shards.members
            if m.local.device.type != wanted.type
        ]
        if elsewhere:
            raise RuntimeError(
                f"Found following parameters on non-{wanted.type.upper()} device: {elsewhere}. "
                f"Those of unit {self.name!r} should be on {wanted}: move them back "
                f"(module.to({wanted.type!r}), or load a state dict of that device)."
            )

    @property
    def options(self) -> UnitOptions:
        """What setters have made of the unit."""
        return self._options

    @options.setter
    def options(self, new: UnitOptions) -> None:
        self._options = self.step.settings = new
        self.reduces_by_default = new.reduces_by_default
        self.gradients.note_waiting()
        self._note_copies()

    @property
    def is_uniform(self) -> bool:
        """Whether all parameters are floating-point numbers of one dtype."""
        dtypes = {param.dtype for param in self.shards.packing.params}
        return len(dtypes) == 1 and all(dtype.is_floating_point for dtype in dtypes)

    @property
    def graphs_may_reduce(self) -> bool:
        """Whether gradients make one matrix, which is reduced as it is."""
        return self.is_uniform and self.policy.reduce_format is None

    def _note_copies(self) -> None:
        """Tell the machine whether shards come from the host before they are gathered.

        A rank alone gathers nothing: its shards are copied to where they are computed with.
        """
        is_apart = self.size > 1 and self.shards.are_on_host and not self.shards.extended
        known = is_apart and self._prepared is not None
        self.step.copies_first = known and not self.keeps_shards

    @property
    def name(self) -> str:
        """What the unit is called in the model."""
        return self.step.name

    @name.setter
    def name(self, new: str) -> None:
        self.step.name = new

    @property
    def phase(self) -> Phase:
        """What the unit is doing."""
        return self.step.phase

    @property
    def post(self) -> PostForward | None:
        """What is kept of the unit between forward and backward, to gather from, if anything."""
        return self._post

    @post.setter
    def post(self, new: PostForward | None) -> None:
        self._post = new
        self.step.keeps_piece = new is not None

    @property
    def is_stale(self) -> bool:
        """Whether the shards were changed since they were last gathered."""
        return self.version != self.gathered_version

    @property
    def version(self) -> Version:
        """Changes with optimizer steps, and with whatever else changes the shards."""
        shards = self.shards
        return self.num_updates, shards.num_changes, shards.num_operations

    def note_operations(self) -> None:
        """Look at the shards now, once for the backward that begins."""
        self.noted = self.shards.num_operations

    @property
    def version_in_backward(self) -> Version:
        """`version`, but for what was done to shards in place since `note_operations`."""
        if self.noted is None:  # computed inside of another backward
            return self.version
        return self.num_updates, self.shards.num_changes, self.noted

    def share(self, member: Member, homes: Sequence[Home]) -> None:
        """Let modules of another call use one of the parameters (tied weights)."""
        self.reshard()
        self.step.is_borrowed = True
        self.shards.share(member, homes)
        if self._prepared is not None:
            self._find_registrations()

    def sharded_parameters(self) -> list[nn.Parameter]:
        """The parameters that the optimizer holds."""
        return [member.sharded for member in self.shards.members]

    # What users and state dicts ask for, outside of a step.

    def prefetch(self) -> None:
        """Start the gather, unless the full parameters are there or on their way."""
        self._perform(self._asked("prefetch", self.step.prefetch()))

    def hold(self) -> None:
        """Make the full parameters valid, from whatever phase this is."""
        self._perform(self._asked("hold", self.step.hold()))

    def reshard(self) -> None:
        """Let go of the full parameters, from whatever phase this is, and of casts of shards.

        State dicts ask for it, through which shards may be written with nothing counted.
        """
        self._perform(self._asked("release", self.step.release()))
        if self._kept is not None:
            self._kept[0].forget()

    def _asked(self, name: str, actions: Actions) -> Actions:
        if self.told is not None:
            self.told(name, actions)
        return actions

    def _perform(self, actions: Actions) -> None:
        for number, action in enumerate(actions):
            try:
                PERFORM[action.kind](self)
            except BaseException:
                undo(actions[number:])
                raise

    # Parameters: from shards to full ones, and back. Each is the effect of one action.

    def launch_copy(self) -> None:
        """Start to copy this unit's shards from the host, for a gather to come."""
        self._read_shards()
        self._copied = ShardCopy(self.shards, self.streams)

    def discard_copy(self) -> None:
        """Give that copy up unread."""
        if self._copied is not None:
            self._copied.discard()
            self._copied = None

    def _read_shards(self) -> None:
        """The shards are about to be read: note which version this is."""
        if self.gradient_taker is not None:
            self.gradient_taker.before_read(self)
        if autograd.inside_backward():
            self.gathered_version = self.version_in_backward
        else:
            self.follow()
            self.gathered_version = self.version

    def launch_gather(self) -> None:
        """Start the all-gather of this unit's shards."""
        if self.post is not None and self.post.is_active:
            if self.extension is not None:
                self.extension.launch()
            self._wait = self.post.launch().wait
            return
        if self._copied is not None and not autograd.inside_backward() and self.is_stale:
            self.discard_copy()  # of a forward that raised, before the shards were changed
        if self._copied is None:
            self._read_shards()
        has_begun = False
        try:
            if self.extension is not None:
                self.extension.launch()
            self.full.begin()
            has_begun = True
            self._wait = self._launch_gather()
        except BaseException:  # a hook, a custom collective, or no memory: nothing is on its way
            self.discard_copy()
            if has_begun:
                self.full.cancel()
            if self._launched is not None:
                self._launched.let_go()
            raise

    def _launch_gather(self) -> Callable[[], object]:
        """Start it from the shards, or from what is kept of them. There is memory to write to."""
        custom, before = self.options.all_gather, None
        if self._is_exact and self.wire is not None:
            self._exact = gather = self._exact or self._exact_gather_from(self.shards)
        elif self.keeps_shards and self._copied is None:
            kept, gather = self._kept = self._kept or self._make_kept()
            before = partial(kept.write, self.gathered_version)
        else:
            gather, self._kept = self.gather, None
        self._launched = gather
        return gather.launch(custom, before, copied=self._copied)

    @torch.inference_mode(False)  # an evaluation may be the first to gather
    def _make_kept(self) -> tuple[KeptShards, Gather | EncodedGather]:
        device = self.full.gathered.device
        kept = KeptShards(self.shards, self.compute_packing, self.rank, device, self.wire)
        return kept, self._gather_from(kept)

    @property
    def keeps_shards(self) -> bool:
        """Whether shards are kept in the dtype of compute, or encoded, beside those stored."""
        sent = self.compute_packing if self.wire is None else self.wire.packing
        is_smaller = sent.shard_bytes < self.shards.packing.shard_bytes
        return is_smaller and self._options.keeps_low_precision_shards

    @property
    def encodes_gradients(self) -> bool:
        """Whether gradients travel in few bits."""
        return self._encoded_scatter is not None and self._options.reduce_scatter is None

    @property
    def reduce_scatter(self) -> ReduceScatter | None:
        """What reduces gradients over the ranks that shard, if not the transport's own way."""
        return self._options.reduce_scatter or self._encoded_scatter

    @property
    def is_exact(self) -> bool:
        """Whether gathers give what the shards round to in the compute dtype, in whatever format.

        So it is where full parameters are looked at or changed, not computed with.
        """
        return self._is_exact

    @is_exact.setter
    def is_exact(self, is_exact: bool) -> None:
        if self.policy.gather_format is not None and is_exact is not self._is_exact:
            self.reshard()  # what was gathered before is rounded otherwise
            self._is_exact = is_exact

    def note_update(self) -> None:
        """An optimizer's step has written the shards: so it writes what is kept of them.

        Gathers that are in flight may read that memory, and a copy from the host belongs on their
        stream; a compiled step has no place for it. There the next gather does it.
        """
        self.num_updates += 1
        if self._kept is None or torch.compiler.is_compiling():
            return
        if self.keeps_shards and not self.offloads and self.phase is not Phase.GATHERING:
            self._kept[0].write_early(self.version)

    def follow(self) -> None:
        """Take over shards that were replaced or moved."""
        self.shards.follow()
        self.prepare_moved()

    def prepare_moved(self) -> None:
        """Get ready again, if the shards are in other memory than before."""
        if self._prepared is not self.shards.buffer:
            self.prepare(self.arena, self.streams)

    def wait_gather(self) -> None:
        """Wait for the bytes alone; `finish_gather` does the rest."""
        if self._wait is not None:
            self._wait()
            self._wait = self._copied = None
            if self.extension is not None:
                self.extension.wait()

    def finish_gather(self) -> None:
        """Wait, lay the parameters out, register them on the modules."""
        self.wait_gather()
        if self.post is None or not self.post.is_active:
            self._let_go_of_gather()
        if self.post is not None and self.post.is_active:
            self.post.restore(self.full)
        else:
            self.full.finish()
        if not autograd.inside_backward():
            self.follow_requires_grad()
        self.register_full()

    def _let_go_of_gather(self) -> None:
        """Show what has travelled to whoever inspects it, and give its memory back."""
        gather = self._launched
        assert gather is not None
        if self.inspector is not None:
            self.inspector.on_gathered(self, gather.sent, gather.received)
        gather.let_go()

    def cancel_gather(self) -> None:
        """Wait, and give the memory back unread."""
        self.wait_gather()
        if self.post is None or not self.post.is_active:
            if self._launched is not None:
                self._launched.let_go()
            self.full.cancel()
        elif self.extension is not None:
            self.extension.cancel()
        self.drop_piece()

    @property
    def is_substituted(self) -> bool:
        """Whether somebody has put other tensors where the full parameters are registered."""
        return any(homes.get(name) is not full for homes, name, full in self._registrations)

    def register_full(self) -> None:
        """Put the full parameters on the modules."""
        for homes, name, parameter in self._registrations:
            homes[name] = parameter

    def rest(self) -> None:
        """The full parameters stay, and nothing computes with them for a while."""
        self.full.rest()

    def wake(self) -> None:
        """Full parameters that stayed are about to be computed with."""
        self.full.wake()
        if not autograd.inside_backward():
            self.follow_requires_grad()

    def free_full(self) -> None:
        """Free the full parameters, and whatever was kept of them."""
        self._let_go(keeps=False)

    def keep_piece(self) -> None:
        """Free the full parameters, but for the piece that backward gathers from."""
        self._let_go(keeps=True)

    def _let_go(self, *, keeps: bool) -> None:
        written = self.full.written()
        if keeps and self.post is not None:
            self.post.keep(self.full)
        else:
            self.drop_piece()
            self.shards.register()
        self.full.free()
        if written is not None:
            raise NotImplementedError(
                f"parameter {full_name(written)!r} was changed in place while it was full (as by "
                "nn.Embedding(max_norm=…), or clamp_() in a forward), and full parameters are "
                "freed: the shards do not have the change. Change the shards between steps "
                "(parameter.clamp_()), or change full ones in full_parameters(model, "
                "writeback=True), on all ranks alike."
            )

    def drop_piece(self) -> None:
        """Give up the piece that backward would have gathered from."""
        if self.post is not None and self.post.is_active:
            self.post.drop()
            self.shards.register()

    # Gradients: from full parameters to shards.

    def on_grad(self, hook: Callable[[Unit], None]) -> None:
        """Call `hook` when autograd has accumulated a gradient of this unit."""
        self.notices = hook

    def watch_all_grads(self) -> None:
        """Call the hook for every parameter's gradient, and not for the first one's only."""
        if self._watches_all:
            return
        self._watches_all = True
        self._trained_flags = []
        self.follow_requires_grad()

    def follow_requires_grad(self) -> None:
        """Freeze and unfreeze as the sharded parameters were; have a gradient noticed."""
        flags = list(map(_requires_grad, self.shards.sharded))
        if flags == self._trained_flags and self._counted:
            return
        if self._encoded_scatter is not None:
            self._encoded_scatter.forget()
        self._trained_flags = flags
        self.trained = trained = tuple(i for i, flag in enumerate(flags) if flag)
        self.trained_set = frozenset(trained)
        self.step.is_trained = bool(trained)
        for index, parameter in enumerate(self.full.parameters):
            parameter.requires_grad_(index in trained)
        for index in trained if self._watches_all else trained[:1]:
            if self.notices is not None and index not in self._counted:
                self._counted.add(index)
                parameter = self.full.parameters[index]
                parameter.register_post_accumulate_grad_hook(_notifier(self))

    @property
    def offloads(self) -> bool:
        """Whether the shards live in other memory than the full parameters."""
        return self.shards.buffer.device != self.device

    def retrace_if_moved(self) -> None:
        """Let graphs that read this rank's shard be captured again if it was replaced."""
        if self.in_graph is not None and self.shards.have_moved:
            self.shards.num_recaptures += 1

    def show_after_break(self) -> None:
        """Let users see the gradients of shards; the phase tells where it broke until the next."""
        if self.phase not in (Phase.SHARDED, Phase.GATHERING):
            self.full.rest()


def check_format(form: GatherFormat, packing: Packing, *, is_gathered: bool) -> None:
    """Refuse a format where nothing is gathered, or where shards would cut its blocks."""
    if not is_gathered:
        raise UsageError(
            f"gather_format={form!r} is for parameters that are gathered, and these are replicated "
            "on every rank: leave it out, or use fully_shard to shard them"
        )
    check_cuts(packing, form)


@dataclass(frozen=True, slots=True, kw_only=True)
class Borrowed:
    """A parameter that another call has sharded, whose unit is gathered for these modules too."""

    unit: Unit
    member: Member
    homes: tuple[Home, ...]
    name: str
    """Below the modules that borrow it."""


PERFORM: dict[ActionKind, Callable[[Unit], None]] = {
    ActionKind.COPY: methodcaller("launch_copy"),
    ActionKind.DISCARD: methodcaller("discard_copy"),
    ActionKind.GATHER: methodcaller("launch_gather"),
    ActionKind.WAIT: methodcaller("finish_gather"),
    ActionKind.CANCEL: methodcaller("cancel_gather"),
    ActionKind.WAKE: methodcaller("wake"),
    ActionKind.FOLLOW: methodcaller("follow"),
    ActionKind.REST: methodcaller("rest"),
    ActionKind.KEEP: methodcaller("keep_piece"),
    ActionKind.DROP: methodcaller("drop_piece"),
    ActionKind.FREE: methodcaller("free_full"),
}
"""The actions that concern one unit's parameters, for whoever performs them."""


def _notifier(unit: Unit) -> Callable[[object], None]:
    """Tells a unit of a gradient. Weakly: the garbage collector does not look into such hooks."""
    alive = weakref.ref(unit)

    def notify(_: object) -> None:
        unit = alive()
        if unit is not None and unit.notices is not None:
            unit.notices(unit)

    return notify
