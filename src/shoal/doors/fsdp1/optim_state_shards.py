"""An optimizer's state, from this rank's shards to the user's whole parameters, and back.

gather     shards of all ranks ──▶ states by the names of parameters, whole or in rows
scatter    states by the names of parameters ──▶ this rank's elements of them
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import nn

from shoal.doors.fsdp1.parameter_names import Entry, Key, NamedMember
from shoal.doors.fsdp1.state_dict_values import cut_rows, whole_of
from shoal.doors.fsdp1.tensor_parallel import local_part, whole
from shoal.doors.fsdp1.unit import WrappedUnit
from shoal.layout.buffer import shard_views

State = dict[str, Any]
"""An optimizer's state of one parameter, or of one member of a unit."""
_SAME_SCALARS = (
    "All unflattened parameters comprising a single flat parameter must have scalar state with the "
    "same value and dtype"
)


def _has_dims(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value of a state is a tensor whose elements lie with those of its parameter."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFormat:
    """The form in which this rank keeps gathered states."""

    is_kept: bool
    """Whether this rank keeps any."""
    is_cut: bool
    """Whether each rank keeps its chunk of a tensor only."""
    on_cpu: bool

    def put(self, kind: str, value: Any, member: NamedMember | None = None) -> Any:
        """A value of a state, in this form; without a member nobody else has parts of it."""
        if not isinstance(value, torch.Tensor):
            return value
        if member is not None and value.dim() > 0:
            value = whole(value, member.before)
            if self.is_cut and member.unit.transport is not None:
                uses_dtensor = member.wrapper._device_mesh is not None
                value = cut_rows(member.unit, kind, value, use_dtensor=uses_dtensor)
                return value.cpu() if self.on_cpu else value
        return value.cpu() if self.on_cpu and not value.is_cpu else value.clone()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outline:
    """Stands for a tensor with dims, whose elements are sent later."""

    shape: torch.Size
    dtype: torch.dtype


def _outlined(value: Any) -> Any:
    """A value of a state without its elements, to tell other ranks of."""
    if not isinstance(value, torch.Tensor):
        return value
    return _Outline(shape=value.shape, dtype=value.dtype) if value.dim() > 0 else value.cpu()


@torch.no_grad()
def gather(
    entries: Iterable[Entry],
    keyed: Mapping[Key, Entry],
    state: Mapping[Key, State],
    wanted: StateFormat,
) -> dict[str, State]:
    """The states of a model's parameters by name. Collective over the groups that shard them."""
    own = {entry.parameter: state[key] for key, entry in keyed.items() if key in state}
    result: dict[str, State] = {}
    units: dict[WrappedUnit, dict[int, Entry]] = {}
    # In the order of the model, which is that of all ranks; optimizers may differ.
    for entry in entries:
        if entry.members:
            member = entry.members[0]
            units.setdefault(member.unit, {})[member.unit_index] = entry
        elif wanted.is_kept and entry.parameter in own:
            found = own[entry.parameter].items()
            result[entry.names[0]] = {kind: wanted.put(kind, value) for kind, value in found}
    local = {
        unit: {i: own[e.parameter] for i, e in members.items() if e.parameter in own}
        for unit, members in units.items()
    }
    outlines = _outlines_of_all_ranks(local)
    for unit, states in local.items():
        if unit in outlines:
            states = _whole(unit, units[unit], states, outlines[unit])
        for index, found in states.items() if wanted.is_kept else ():
            for member, part in _parts(units[unit][index], found):
                result[member.name] = {k: wanted.put(k, v, member) for k, v in sorted(part.items())}
    return result


def _outlines_of_all_ranks(
    local: Mapping[WrappedUnit, dict[int, State]],
) -> dict[WrappedUnit, list[dict[int, State]]]:
    """The states that each rank has for the members of sharded units, without their elements."""
    by_group: dict[dist.ProcessGroup, list[WrappedUnit]] = {}
    for unit in local:
        if unit.transport is not None:
            by_group.setdefault(unit.transport.group, []).append(unit)
    found: dict[WrappedUnit, list[dict[int, State]]] = {}
    for group, units in by_group.items():
        mine = [
            {i: {k: _outlined(v) for k, v in state.items()} for i, state in local[unit].items()}
            for unit in units
        ]
        everyone: list[Any] = [None] * group.size()
        dist.all_gather_object(everyone, mine, group=group)
        for place, unit in enumerate(units):
            found[unit] = [theirs[place] for theirs in everyone]
    return found


def _whole(
    unit: WrappedUnit,
    members: Mapping[int, Entry],
    local: Mapping[int, State],
    outlines: list[dict[int, State]],
) -> dict[int, State]:
    """The states of a unit's members in full: one gather for each kind of state."""
    whole: dict[int, State] = {}
    for index in sorted({index for theirs in outlines for index in theirs}):
        numels = [unit.shards.packing.piece(index, rank).numel for rank in range(unit.size)]
        _check_complete(members[index], [theirs.get(index) for theirs in outlines], numels)
        whole[index] = {}
        # Where ranks differ, the first one counts that has elements, and so has trained them.
        for rank in sorted(range(unit.size), key=lambda rank: (numels[rank] > 0, -rank)):
            whole[index].update(outlines[rank].get(index, {}))
    kinds = {k for s in whole.values() for k, value in s.items() if isinstance(value, _Outline)}
    for kind in sorted(kinds):
        found = {i: s[kind] for i, s in whole.items() if isinstance(s.get(kind), _Outline)}
        stored = [param.dtype for param in unit.shards.packing.params]
        packing = unit.shards.packing.with_dtypes(
            [found[i].dtype if i in found else dtype for i, dtype in enumerate(stored)]
        )
        shard = torch.zeros(packing.shard_bytes, dtype=torch.uint8, device=unit.device)
        for index, view in enumerate(shard_views(packing, unit.rank, shard)):
            if index in found and view.numel() > 0:
                view.copy_(local[index][kind].view(view.shape))
        reason = f"the optimizer state {kind!r} of unit {unit.name!r}"
        full = unit.gathered(packing, shard, reason)
        for index in found:
            whole[index][kind] = full[index]
    return whole


def _check_complete(member: Entry, outlines: Sequence[State | None], numels: Sequence[int]) -> None:
    """Refuse states that some ranks lack, or that are not as long as the shards; on all ranks."""
    for rank, (state, numel) in enumerate(zip(outlines, numels, strict=True)):
        if numel > 0 and state is None:
            raise RuntimeError(
                "FSDP currently requires each rank to have at least the optimizer states needed by "
                "rank 0's optimizer but some ranks are missing some of those states\nRank "
                f"{rank} is missing states for the parameters: {list(member.names)}"
            )
        for kind, value in (state or {}).items():
            if isinstance(value, _Outline) and value.shape.numel() != numel:
                raise NotImplementedError(
                    f"the optimizer state {kind!r} of {list(member.names)} has "
                    f"{value.shape.numel()} elements on rank {rank}, where the shard has {numel}: "
                    "only states that are as large as their parameter can be gathered"
                )


def _parts(entry: Entry, state: State) -> list[tuple[NamedMember, State]]:
    """The state of each of the user's parameters in one member of a unit."""
    if entry.flat is None:
        return [(entry.members[0], state)]
    views = {kind: entry.flat.views(value) for kind, value in state.items() if _has_dims(value)}
    return [
        (member, {k: views[k][i] if k in views else value for k, value in state.items()})
        for i, member in enumerate(entry.members)
    ]


class LoadedState:
    """An optimizer's state dict by names, which every rank has, or the first one alone."""

    def __init__(
        self,
        loaded: Mapping[str, Any] | None,
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        is_on_first: bool,
    ) -> None:
        self._group, self._device, self._is_on_first = group, device, is_on_first
        if is_on_first:
            is_first = dist.get_rank(group) == 0
            sent = [_outlined_below(loaded) if is_first else None]
            dist.broadcast_object_list(sent, group=group, group_src=0)
            loaded = loaded if is_first else sent[0]
        if loaded is None or "state" not in loaded:
            raise ValueError(
                '`optim_state_dict` must have the keys "state"to be a valid optimizer state dict'
            )
        self.states: Mapping[str, Any] = loaded["state"]
        self.groups: list[dict[str, Any]] | None = loaded.get("param_groups")

    def take(self, name: str) -> State | None:
        """The state of a parameter, with whole tensors. Collective where others have parts."""
        found = self.states.get(name)
        return None if found is None else {k: self.whole(v) for k, v in sorted(found.items())}

    def whole(self, value: Any) -> Any:
        """A value of a state, from wherever it is."""
        if self._is_on_first and (_has_dims(value) or isinstance(value, _Outline)):
            sent = (
                value.to(self._device)
                if isinstance(value, torch.Tensor)
                else torch.empty(value.shape, dtype=value.dtype, device=self._device)
            )
            dist.broadcast(sent, group=self._group, group_src=0)
            return sent
        return whole_of(value, self._device)


def _outlined_below(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _outlined_below(v) for k, v in value.items()}
    return _outlined(value)


@torch.no_grad()
def scatter(entries: Iterable[Entry], source: LoadedState) -> dict[nn.Parameter, State]:
    """The states of a model's parameters, as far as this rank has elements of them."""
    result: dict[nn.Parameter, State] = {}
    for entry in entries:  # in the order of the model, which is that of all ranks
        found = [source.take(name) for name in entry.names]
        if all(state is None for state in found):
            continue
        if not entry.members:
            result[entry.parameter] = dict(found[0] or {})
            continue
        found = [_here(state, member) for state, member in zip(found, entry.members, strict=True)]
        local = _local(entry, found[0] or {} if entry.flat is None else _flattened(entry, found))
        if local is not None:
            result[entry.parameter] = local
    return result


def _here(state: State | None, member: NamedMember) -> State | None:
    """A state, of a parameter that may be distributed over other ranks than its wrapper's."""
    if state is None or member.before is None:
        return state
    return {k: local_part(v, member.before) if _has_dims(v) else v for k, v in state.items()}


def _local(entry: Entry, whole: State) -> State | None:
    """This rank's elements of a state; None where it has none, and optimizers keep none."""
    unit, index = entry.members[0].unit, entry.members[0].unit_index
    if unit.transport is None:
        return whole
    cut = {k: v for k, v in whole.items() if _has_dims(v)}
    for value in cut.values():  # before some ranks leave
        _check_shape(value, torch.Size(unit.shards.packing.params[index].shape), entry.names[0])
    own = unit.own_range(index)
    if own.start == own.stop and entry.flat is None:
        return None
    return whole | {kind: value.reshape(-1)[own].clone() for kind, value in cut.items()}


def _check_shape(value: torch.Tensor, shape: torch.Size, name: str) -> None:
    if value.shape != shape:
        raise ValueError(
            "Tensor optimizer state does not have same shape as its parameter: "
            f"{value.shape} {shape} ({name!r})"
        )


def _flattened(entry: Entry, found: Sequence[State | None]) -> State:
    """One state of the states of all parameters that a flat one stands for."""
    kinds = {frozenset(state) for state in found if state is not None}
    if len(kinds) > 1:
        raise ValueError(
            f"Differing optimizer state names for the unflattened parameters: {list(entry.names)}"
        )
    return {
        kind: _flat(entry, kind, [None if state is None else state[kind] for state in found])
        for kind in sorted(kinds.pop())
    }


def _flat(entry: Entry, kind: str, values: Sequence[Any]) -> Any:
    """One value of the values of all parameters; where a tensor is missing there are zeros."""
    present = [value for value in values if value is not None]
    if not present:
        return None
    if len({(type(value), _has_dims(value)) for value in present}) != 1:
        raise ValueError(
            f"Differing optimizer state types for state {kind}, values {present}, and unflattened "
            f"parameter names {list(entry.names)}"
        )
    dtypes = {getattr(value, "dtype", None) for value in present}
    if not _has_dims(present[0]):
        plain = {v.item() if isinstance(v, torch.Tensor) else v for v in values}
        if len(plain) != 1 or len(dtypes) != 1:
            raise ValueError(
                f"{_SAME_SCALARS} but got values {plain} and dtypes {dtypes} for state {kind} and "
                f"unflattened parameter names {list(entry.names)}"
            )
        return present[0]
    if len(dtypes) != 1:
        raise ValueError(
            "All unflattened parameters comprising a single flat parameter must have "
            f"positive-dimension tensor state with the same dtype but got dtypes {dtypes} for "
            f"state {kind} and unflattened parameter names {list(entry.names)}"
        )
    parts = []
    for member, value in zip(entry.members, values, strict=True):
        if value is None:
            value = present[0].new_zeros(member.shape)
        _check_shape(value, member.shape, member.name)
        parts.append(value.reshape(-1))
    return torch.cat(parts)
