"""A unit: the parameters that are communicated together, in one of the phases of `Phase`.

A unit owns two flat buffers. `shard` is this rank's part, in the dtype the module had; the
sharded parameters are DTensors whose local tensors are views of it, so a gather reads it with
no copy-in (or one cast). `full` holds the gathered parameters in the compute dtype; it has memory
only in the phases in which the parameters are full.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from shoal import _torch
from shoal.comm.transport import Pending, Transport
from shoal.errors import InvariantError
from shoal.layout import Even, ParamSpec
from shoal.layout.spec import round_up
from shoal.layout.stripe import Stripe
from shoal.mesh import FSDPMeshInfo
from shoal.runtime.buffer import Buffer
from shoal.runtime.phase import Phase, check_transition
from shoal.runtime.policy import MixedPrecisionPolicy
from shoal.runtime.updates import count_updates, mark_replaced

_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """A place where a parameter is registered; a shared parameter has several."""

    module: nn.Module
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A parameter as `fully_shard` finds it."""

    spec: ParamSpec
    parameter: nn.Parameter
    homes: tuple[Home, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One parameter of a unit, in its two forms; `local` is the shard's view of the buffer."""

    spec: ParamSpec
    homes: tuple[Home, ...]
    local: torch.Tensor
    sharded: nn.Parameter
    full: nn.Parameter
    flat: torch.Tensor
    stripes: tuple[Stripe, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """One run of a unit's module: its backward begins at the outputs and ends at the inputs."""

    reaches_inputs: bool
    """Whether some inputs need gradients, so that backward goes on below the parameters."""
    version: tuple[int, ...]
    """The parameters' version in forward."""


class Unit:
    """The parameters communicated together."""

    def __init__(
        self,
        name: str,
        sources: Sequence[Source],
        mesh_info: FSDPMeshInfo,
        policy: MixedPrecisionPolicy,
    ) -> None:
        self.name = name
        self.policy = policy
        self.transport = Transport(mesh_info.shard_process_group)
        self.dtype = sources[0].spec.dtype
        self.compute_dtype = policy.param_dtype or self.dtype
        self.device = sources[0].parameter.device
        self._packing = Even().pack([source.spec for source in sources], self.transport.size)
        self.shard_numel = self._packing.shard_bytes // self.dtype.itemsize
        self.shard = torch.zeros(self.shard_numel, dtype=self.dtype, device=self.device)
        offsets = _aligned_offsets(
            (source.spec.numel for source in sources),
            max(1, _ALIGNMENT_BYTES // self.compute_dtype.itemsize),
        )
        self._full = Buffer(offsets[-1], self.compute_dtype, self.device)
        self._gathered = Buffer(
            self.transport.size * self.shard_numel, self.compute_dtype, self.device
        )
        self.members = tuple(
            self._adopt(index, source, offsets[index], mesh_info)
            for index, source in enumerate(sources)
        )
        rows = self._gathered.tensor.view(self.transport.size, self.shard_numel)
        self._layout = _Copies(
            (stripe.of_full(member.flat), stripe.of_rows(rows))
            for member in self.members
            for stripe in member.stripes
        )
        self._full.empty()
        self._gathered.empty()
        self._register(self.sharded_parameters())
        self._phase = Phase.SHARDED
        self._pending: Pending | None = None
        self._gathered_version: tuple[int, ...] = ()
        self._counted: set[int] = set()
        self._on_grad: Callable[[Unit], None] | None = None
        self.is_kept = False
        """Whether the user asked for the full parameters, and has not given them back."""
        self.num_updates = 0
        count_updates(self)
        self.num_missing_grads = 0
        self.open_passes: set[Pass] = set()

    def _adopt(
        self, index: int, source: Source, full_offset: int, mesh_info: FSDPMeshInfo
    ) -> Member:
        """Copy this rank's rows into the shard buffer; make the parameter's two forms."""
        shape, parameter = source.spec.shape, source.parameter
        piece = self._packing.piece(index, self.transport.rank)
        shard_offset = piece.offset_bytes // self.dtype.itemsize
        local = self.shard[shard_offset:][: math.prod(piece.shape)].view(piece.shape)
        with torch.no_grad():
            for region in piece.regions:
                local.copy_(parameter[region.slices])
            tensor = DTensor.from_local(
                local,
                mesh_info.mesh,
                [Shard(0)],
                run_check=False,
                shape=torch.Size(shape),
                stride=parameter.stride(),
            )
        flat = self._full.tensor[full_offset : full_offset + source.spec.numel]
        member = Member(
            spec=source.spec,
            homes=source.homes,
            local=local,
            sharded=nn.Parameter(tensor, requires_grad=parameter.requires_grad),
            # `.data` gives the parameter a version counter of its own, so that writing a gather
            # into the buffer does not look like an in-place change of what autograd saved.
            full=nn.Parameter(flat.view(shape).data, requires_grad=parameter.requires_grad),
            flat=flat,
            stripes=self._packing.stripes(index),
        )
        for form in (member.sharded, member.full):
            vars(form).update(vars(parameter))
        mark_replaced(parameter, source.spec.name)
        return member

    @property
    def phase(self) -> Phase:
        """What the unit is doing."""
        return self._phase

    @phase.setter
    def phase(self, new: Phase) -> None:
        check_transition(self.name, self._phase, new)
        self._phase = new

    @property
    def is_stale(self) -> bool:
        """Whether the shards were changed since they were last gathered."""
        return self.version != self._gathered_version

    @property
    def version(self) -> tuple[int, ...]:
        """Changes with optimizer steps, and with in-place operations on the shards."""
        in_place = sum(member.sharded._version for member in self.members)
        return self.num_updates, in_place, self.shard._version

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the memory of the full parameters."""
        pointer = _torch.storage_pointer(tensor)
        return pointer != 0 and pointer == _torch.storage_pointer(self._full.tensor)

    def sharded_parameters(self) -> list[nn.Parameter]:
        """The parameters that the optimizer holds."""
        return [member.sharded for member in self.members]

    def launch_gather(self) -> None:
        """SHARDED → GATHERING: start the all-gather of this unit's shards."""
        self._check_homes()
        self.phase = Phase.GATHERING
        self._gathered_version = self.version
        self._gathered.fill()
        self._pending = self.transport.all_gather(
            self._gathered.tensor,
            self.shard.to(self.compute_dtype),
            reason=f"the gather of unit {self.name!r}",
        )

    def wait_gather(self) -> None:
        """Wait for the bytes alone; `finish_gather` does the rest."""
        assert self._pending is not None
        self._pending.wait()

    def finish_gather(self) -> None:
        """GATHERING → HELD: wait, lay the parameters out, register them on the modules."""
        self.wait_gather()
        self._full.fill()
        self._layout.run()
        self._pending = None
        self._gathered.empty()
        self._follow_requires_grad()
        self._register([member.full for member in self.members])
        self.phase = Phase.HELD

    def hold(self) -> None:
        """Make the full parameters valid, from whatever phase this is."""
        if self.phase is Phase.SHARDED:
            self.launch_gather()
        if self.phase is Phase.GATHERING:
            self.finish_gather()

    def reshard(self) -> None:
        """Let go of the full parameters, from whatever phase this is."""
        self.is_kept = False
        if self.phase is Phase.GATHERING:
            self.finish_gather()
        if self.phase in (Phase.FORWARD, Phase.BACKWARD):
            self.phase = Phase.HELD
        if self.phase is Phase.HELD:
            self.phase = Phase.SHARDED
            self._register(self.sharded_parameters())
            self._full.empty()

    @property
    def has_grads(self) -> bool:
        """Whether any gradient waits to be reduced."""
        return any(member.full.grad is not None for member in self.members)

    def launch_reduce(self) -> Reduction:
        """Start the reduce-scatter of the gradients that arrived, and take them off."""
        dtype = self.policy.reduce_dtype or self.compute_dtype
        rows = torch.empty(self.transport.size, self.shard_numel, dtype=dtype, device=self.device)
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        reached: list[Member] = []
        for member in self.members:
            if member.full.grad is None:
                for stripe in member.stripes:
                    stripe.of_rows(rows).zero_()
                continue
            if member.full.grad.is_sparse:
                raise NotImplementedError(
                    f"parameter {member.spec.name!r} of unit {self.name!r} has a sparse gradient, "
                    "which shoal does not support; make it dense (Embedding(sparse=False))"
                )
            reached.append(member)
            grad = member.full.grad.reshape(-1)
            pairs.extend((stripe.of_rows(rows), stripe.of_full(grad)) for stripe in member.stripes)
            member.full.grad = None
        _Copies(pairs).run()
        output = torch.empty(self.shard_numel, dtype=dtype, device=self.device)
        pending = self.transport.reduce_scatter(
            output,
            rows.view(-1),
            op=torch.distributed.ReduceOp.AVG,
            reason=f"the reduction of unit {self.name!r}",
        )
        return Reduction(unit=self, members=tuple(reached), output=output, pending=pending)

    def on_grad(self, hook: Callable[[Unit], None]) -> None:
        """Call `hook` each time autograd has accumulated a gradient of this unit."""
        self._on_grad = hook
        self._follow_requires_grad()

    def _follow_requires_grad(self) -> None:
        """Freeze and unfreeze as the sharded parameters were; count gradients where there are."""
        for index, member in enumerate(self.members):
            if member.full.requires_grad != member.sharded.requires_grad:
                member.full.requires_grad_(member.sharded.requires_grad)
            hook = self._on_grad
            if hook is not None and member.full.requires_grad and index not in self._counted:
                self._counted.add(index)
                member.full.register_post_accumulate_grad_hook(lambda _, hook=hook: hook(self))

    def _register(self, parameters: Sequence[nn.Parameter]) -> None:
        # Straight into the dictionary: `setattr` on a module costs ten times as much.
        for member, parameter in zip(self.members, parameters, strict=True):
            for home in member.homes:
                home.module._parameters[home.name] = parameter

    def _check_homes(self) -> None:
        """What the modules hold must be what will be gathered, or new values would be ignored."""
        for member in self.members:
            for home in member.homes:
                if home.module._parameters.get(home.name) is not member.sharded:
                    raise InvariantError(
                        f"parameter {member.spec.name!r} of unit {self.name!r} was replaced after "
                        "fully_shard, so its new value would be ignored. Change it in place "
                        "(load_state_dict without assign=True, parameter.copy_), or call "
                        "fully_shard after replacing it."
                    )
            if _torch.local_tensor(member.sharded).data_ptr() != member.local.data_ptr():
                raise NotImplementedError(
                    f"parameter {member.spec.name!r} of unit {self.name!r} was moved to other "
                    "memory after fully_shard (module.to(...), parameter.data = ...), which shoal "
                    "does not support yet. Move or cast the module before fully_shard."
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """A unit's gradients on their way to the shards."""

    unit: Unit
    members: tuple[Member, ...]
    output: torch.Tensor
    pending: Pending

    def finish(self) -> None:
        """Wait, and add the reduced gradients to those of the sharded parameters."""
        self.pending.wait()
        output = self.output.to(self.unit.dtype)
        for member in self.members:
            local = member.local
            grad = output[local.storage_offset() :][: local.numel()].view(local.shape)
            if member.sharded.grad is None:
                member.sharded.grad = _torch.dtensor_like(member.sharded, grad)
            else:
                _torch.local_tensor(member.sharded.grad).add_(grad)
            _torch.run_post_accumulate_hooks(member.sharded)


def _aligned_offsets(numels: Iterable[int], alignment: int) -> list[int]:
    """Where each of several tensors starts in one buffer; last, the length of the buffer."""
    offsets = [0]
    for numel in numels:
        offsets.append(offsets[-1] + round_up(numel, alignment))
    return offsets


class _Copies:
    """Copies from many tensors into as many others, made as one call."""

    def __init__(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        both = list(pairs)
        self._targets = [target for target, _ in both]
        self._sources = [source for _, source in both]

    def run(self) -> None:
        if self._targets:
            with torch.no_grad():
                _torch.foreach_copy(self._targets, self._sources)
