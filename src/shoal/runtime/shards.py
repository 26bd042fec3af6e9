"""This rank's shards of a unit's parameters: one flat buffer, and the parameters that lie in it.

The sharded parameters' local tensors are views of the buffer, so a gather reads it with no
copy-in (or one cast). Whoever gives a parameter other memory (`module.to`, `load_state_dict` with
`assign`, materialising from the meta device) is followed: the values move back into a buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter, is_

import torch
from torch import nn

from shoal._torch import storage
from shoal.comm.imagined_device import imagined
from shoal.errors import InvariantError, UsageError
from shoal.layout import Packing, ParamSpec
from shoal.layout.buffer import shard_of, shard_views
from shoal.layout.even import EvenPacking
from shoal.layout.strides import Strides, strides_of
from shoal.mesh import FSDPMeshInfo
from shoal.runtime.gather_hooks import cut, has_hooks, without
from shoal.runtime.parameter_wrapping import ParameterWrapping, bytes_of
from shoal.runtime.policy import CPUOffloadPolicy, OffloadPolicy
from shoal.runtime.updates import mark_kept, mark_replaced, note_change
from shoal.tensor.sharded import ShardedTensor

_version_of = attrgetter("_version")


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """A place where a parameter is registered; a shared parameter has several."""

    module: nn.Module
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSource:
    """A parameter as `fully_shard` finds it."""

    spec: ParamSpec
    parameter: nn.Parameter
    homes: tuple[Home, ...]
    wrapping: ParameterWrapping


class Member:
    """One sharded parameter of a unit."""

    __slots__ = ("dtype", "homes", "local", "places", "sharded", "spec", "strides", "wrapping")

    def __init__(
        self, source: ParameterSource, sharded: nn.Parameter, strides: Strides | None
    ) -> None:
        self.spec = source.spec
        self.strides = strides
        """Those of the full parameter, unless it is row-major."""
        self.homes: tuple[Home, ...] = ()
        self.wrapping = source.wrapping
        # Straight into the dictionaries: `setattr` on a module costs ten times as much.
        self.places: list[tuple[dict[str, nn.Parameter | None], str]] = []
        self.add(source.homes)
        self.take(sharded)

    def add(self, homes: Sequence[Home]) -> None:
        """Know of more places where the parameter is registered."""
        self.homes += tuple(homes)
        self.places += [(home.module._parameters, home.name) for home in homes]

    def take(self, sharded: nn.Parameter) -> None:
        """Hold a sharded parameter, and the very object that is its local tensor."""
        local = self.wrapping.local_of(sharded)
        assert local is not None
        self.sharded, self.local, self.dtype = sharded, local, local.dtype

    def register(self, parameter: nn.Parameter) -> None:
        """Put a parameter where this one belongs."""
        for parameters, name in self.places:
            parameters[name] = parameter


class Shards:
    """The sharded parameters of one unit."""

    def __init__(
        self,
        unit: str,
        sources: Sequence[ParameterSource],
        packing: Packing,
        rank: int,
        offload: OffloadPolicy,
    ) -> None:
        self.whole = packing
        """How all parameters are cut, and so their gradients."""
        self._rank = rank
        self._offload = offload
        tensors = [bytes_of(source.parameter.detach()) for source in sources]
        strides = [strides_of(tensor) for tensor in tensors]
        tensors = [one.wrapping.packed(t) for one, t in zip(sources, tensors, strict=True)]
        self._leave_out(tensors)
        stored = [
            torch.empty(param.shape, dtype=param.dtype, device=tensor.device)
            if i in self.extended
            else tensor
            for i, (param, tensor) in enumerate(zip(self.packing.params, tensors, strict=True))
        ]
        self.buffer = self._place(shard_of(self.packing, rank, stored))
        locals_ = self._views()
        for index in self.extended:
            locals_[index] = self._cut(index, tensors[index])
        self.members = tuple(
            Member(source, self._adopt(source, local, index in self.extended), strides[index])
            for index, (source, local) in enumerate(zip(sources, locals_, strict=True))
        )
        self.rename(unit)
        self.num_changes = 0
        """How often parameters were replaced or moved."""
        self.num_recaptures = 0
        """How often graphs that read the buffer became wrong: for another dtype, or device."""
        self._remember()
        self.register()

    def rename(self, unit: str) -> None:
        """Call the unit by its name in the model; errors of its tensors name parameters so."""
        self.unit = unit
        for member in self.members:
            if isinstance(member.sharded, ShardedTensor):
                name = ".".join(part for part in (unit, member.spec.name) if part != "root")
                vars(member.sharded)["_shoal_name"] = name

    @property
    def is_on_one_device(self) -> bool:
        """Whether all parameters are, which they are not while modules are moved one by one."""
        found = (parameters.get(name) for parameters, name in self._first_places)
        return len({parameter.device for parameter in found if parameter is not None}) == 1

    def _remember(self) -> None:
        """Note what every step asks of every member, as lists that C can walk."""
        self.num_changes += 1
        note_change()
        self.sharded = [member.sharded for member in self.members]
        self._watched = [*self.sharded, *(member.local for member in self.members)]
        self._first_places = [member.places[0] for member in self.members]
        self._places = [
            (parameters, name, member.sharded)
            for member in self.members
            for parameters, name in member.places
        ]
        wrapping = type(self.members[0].wrapping)
        self._identity, self._is_same = wrapping.identity, wrapping.is_same
        self._identities = list(map(self._identity, self.sharded))

    def _leave_out(self, tensors: Sequence[torch.Tensor]) -> None:
        """Find the tensors that say themselves how they are gathered: they keep their memory."""
        params = self.whole.params
        self.extended = frozenset(
            index for index, tensor in enumerate(tensors) if has_hooks(params[index].name, tensor)
        )
        self.packing = without(self.whole, self.extended)
        """Where parameters lie in the buffer; those that are not in there have no elements."""

    def _cut(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        packing = self.whole
        assert isinstance(packing, EvenPacking)
        return cut(
            packing.params[index].name,
            tensor,
            dim=packing.dims[index],
            num_chunks=packing.world_size,
            rank=self._rank,
            place=self._place,
        )

    def _adopt(
        self, source: ParameterSource, local: torch.Tensor, is_extended: bool
    ) -> nn.Parameter:
        original = source.parameter
        sharded = source.wrapping.adopt(original, local)
        if sharded is original:
            mark_kept(original)
            return sharded
        if not is_extended:  # there the attributes are the tensor itself
            vars(sharded).update(vars(original))
        mark_replaced(original, source.spec.name, source.homes[0])
        return sharded

    def _place(self, buffer: torch.Tensor) -> torch.Tensor:
        if not isinstance(self._offload, CPUOffloadPolicy) or buffer.is_meta:
            return buffer
        buffer = buffer.cpu()
        # Pinned for copies to a device; without one there are none, and torch refuses to pin.
        pins = self._offload.pin_memory and torch.accelerator.is_available()
        return buffer.pin_memory() if pins else buffer

    def _views(self) -> list[torch.Tensor]:
        """This rank's local tensors: memory of the buffer, but each a tensor of its own."""
        views = shard_views(self.packing, self._rank, self.buffer)
        if imagined() is not None:  # meta memory has no address to make an alias of
            return views
        return [
            storage.alias(view.reshape(-1).view(torch.uint8)).view(view.dtype).view(view.shape)
            for view in views
        ]

    @property
    def are_on_host(self) -> bool:
        """Whether the policy has them in host memory, whatever device computes."""
        return isinstance(self._offload, CPUOffloadPolicy) and not self.buffer.is_meta

    def home_device(self, device: torch.device) -> torch.device:
        """Where the shards live, when `device` computes."""
        return torch.device("cpu") if isinstance(self._offload, CPUOffloadPolicy) else device

    def share(self, member: Member, homes: Sequence[Home]) -> None:
        """Register one of the parameters at more places, whose modules use it too."""
        member.add(homes)
        self._remember()
        member.register(member.sharded)

    def register(self) -> None:
        """Put the sharded parameters on the modules."""
        for parameters, name, sharded in self._places:
            parameters[name] = sharded

    @property
    def num_operations(self) -> int:
        """Grows with in-place operations on the parameters or their local tensors.

        An operation on a parameter counts there alone, one on its local tensor there alone.
        """
        return sum(map(_version_of, self._watched))

    @property
    def have_moved(self) -> bool:
        """Whether parameters were replaced, or given other memory."""
        found = [parameters.get(name) for parameters, name in self._first_places]
        return not (
            all(map(is_, found, self.sharded))
            and all(map(self._is_same, map(self._identity, self.sharded), self._identities))
        )

    def follow(self) -> None:
        """Notice parameters that were replaced or moved since, and take their values over."""
        if not self.have_moved:
            return
        changed = False
        for member, before in zip(self.members, self._identities, strict=True):
            parameters, name = member.places[0]
            found = parameters.get(name)
            if found is not member.sharded:
                self._replace(member, found)
            if not self._is_same(self._identity(member.sharded), before):
                changed = True
        if changed:
            self._rehome()
        self._remember()

    def follow_hooks(self) -> None:
        """Notice shards that were given hooks, or others without them."""
        found = {i for i, m in enumerate(self.members) if has_hooks(m.spec.name, m.local)}
        if found != self.extended:
            self._rehome()
            self._remember()

    def _replace(self, member: Member, found: nn.Parameter | None) -> None:
        local = None if found is None else member.wrapping.local_of(found)
        if found is None or local is None or local.shape != member.local.shape:
            what = "taken away" if found is None else f"replaced by a {type(found).__name__}"
            raise InvariantError(
                f"Cannot writeback: parameter {member.spec.name!r} of unit {self.unit!r} was "
                f"{what} after fully_shard, or the wrapper; expected a sharded one with a local "
                f"tensor of {tuple(member.local.shape)}, got "
                f"{None if local is None else tuple(local.shape)}. Change it in place "
                "(load_state_dict, parameter.copy_), or call fully_shard after replacing it "
                "(torch.func.functional_call with other parameters: inside of full_parameters)."
            )
        member.sharded = found
        member.register(found)

    @torch.no_grad()
    def take_over(self, packing: Packing, info: FSDPMeshInfo) -> None:
        """Lie on other ranks: in new memory of zeros, which the caller fills. Gradients are gone.

        The parameters stay the same objects, for optimizers hold them.
        """
        device = self.buffer.device
        self.whole = self.packing = packing
        self._rank = info.shard_mesh_rank
        self.buffer = self._place(
            torch.zeros(packing.shard_bytes, dtype=torch.uint8, device=device)
        )
        for index, (member, view) in enumerate(zip(self.members, self._views(), strict=True)):
            member.sharded.grad = None
            member.wrapping = member.wrapping.within(info, packing, index)
            member.wrapping.move(member.sharded, view)
            member.spec = packing.params[index]
            member.take(member.sharded)
        self.num_recaptures += 1
        self._remember()
        self.register()

    @torch.inference_mode(False)  # an evaluation may be the first to notice
    @torch.no_grad()
    def _rehome(self) -> None:
        """Copy every local tensor into a buffer again, in the dtypes and on the device of now."""
        present = [member.wrapping.local_of(member.sharded) for member in self.members]
        locals_ = [local for local in present if local is not None]
        devices = {local.device for local in locals_}
        if len(devices) != 1:
            raise UsageError(
                f"the parameters of unit {self.unit!r} are on {sorted(map(str, devices))}; move "
                "all of them to one device"
            )
        dtypes = [local.dtype for local in locals_]
        if dtypes != [param.dtype for param in self.whole.params]:
            self.whole = self.whole.with_dtypes(dtypes)
            self.num_recaptures += 1
        elif devices != {self.buffer.device}:
            self.num_recaptures += 1
        self._leave_out(locals_)
        num_bytes, device = self.packing.shard_bytes, locals_[0].device
        self.buffer = self._place(torch.zeros(num_bytes, dtype=torch.uint8, device=device))
        views = self._views()
        for index, (member, view) in enumerate(zip(self.members, views, strict=True)):
            local = locals_[index]
            if index not in self.extended:
                if not view.is_meta:
                    view.copy_(local.reshape(view.shape))
                member.wrapping.rehome(member.sharded, view)
            elif type(local) is torch.Tensor:  # it lies in the buffer that is given up
                local.data = self._place(local.clone())
            member.wrapping = member.wrapping.follow(member.sharded)
            member.take(member.sharded)
            member.spec = self.whole.params[index]
