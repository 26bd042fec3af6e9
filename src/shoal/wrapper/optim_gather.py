"""From an optimizer's state of shards to its state of the user's parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shoal.layout.buffer import full_tensors, shard_views
from shoal.wrapper.base import Wrapper
from shoal.wrapper.distributed import whole
from shoal.wrapper.names import NamedMember
from shoal.wrapper.optim_keys import Entry, Key
from shoal.wrapper.sharded_values import cut_rows

State = dict[str, Any]
"""What an optimizer knows of one parameter, or of one member of a unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """In which form this rank keeps what was gathered."""

    is_kept: bool
    """Whether it keeps anything."""
    is_cut: bool
    """Whether each rank keeps its chunk of a tensor only."""
    on_cpu: bool

    def put(self, kind: str, value: Any, member: NamedMember | None = None) -> Any:
        """A value of a state, in this form; without a member nobody else has parts of it."""
        if not isinstance(value, torch.Tensor):
            return value
        if member is not None and value.dim() > 0:
            unit, value = member.wrapper._unit, whole(value, member.before)
            if self.is_cut and unit is not None and unit.transport is not None:
                uses_dtensor = member.wrapper._device_mesh is not None
                value = cut_rows(unit, kind, value, use_dtensor=uses_dtensor)
                return value.cpu() if self.on_cpu else value
        return value.cpu() if self.on_cpu and not value.is_cpu else value.clone()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outline:
    """Stands for a tensor whose elements lie with those of its parameter."""

    dtype: torch.dtype
    numel: int


@torch.no_grad()
def gather(
    entries: Iterable[Entry],
    keyed: Mapping[Key, Entry],
    state: Mapping[Key, State],
    wanted: Wanted,
) -> dict[str, State]:
    """The states of a model's parameters by name. Collective over the groups that shard them."""
    own = {entry.parameter: state[key] for key, entry in keyed.items() if key in state}
    result: dict[str, State] = {}
    units: dict[Wrapper, dict[int, Entry]] = {}
    # In the order of the model, which is that of all ranks; optimizers may differ.
    for entry in entries:
        if entry.wrapper is not None:
            units.setdefault(entry.wrapper, {})[entry.index] = entry
        elif wanted.is_kept and entry.parameter in own:
            found = own[entry.parameter].items()
            result[entry.names[0]] = {kind: wanted.put(kind, value) for kind, value in found}
    local = {
        wrapper: {i: own[e.parameter] for i, e in members.items() if e.parameter in own}
        for wrapper, members in units.items()
    }
    outlines = _outlines_of_all_ranks(local)
    for wrapper, states in local.items():
        if wrapper in outlines:
            states = _whole(wrapper, units[wrapper], states, outlines[wrapper])
        for index, found in states.items() if wanted.is_kept else ():
            for member, part in _parts(units[wrapper][index], found):
                result[member.name] = {k: wanted.put(k, v, member) for k, v in sorted(part.items())}
    return result


def _outlines_of_all_ranks(
    local: Mapping[Wrapper, dict[int, State]],
) -> dict[Wrapper, list[dict[int, State]]]:
    """The states that each rank has for the members of sharded units, without their elements."""
    by_group: dict[dist.ProcessGroup, list[Wrapper]] = {}
    for wrapper in local:
        unit = wrapper._unit
        if unit is not None and unit.transport is not None:
            by_group.setdefault(unit.transport.group, []).append(wrapper)
    found: dict[Wrapper, list[dict[int, State]]] = {}
    for group, wrappers in by_group.items():
        mine = [{i: _outlined(s) for i, s in local[wrapper].items()} for wrapper in wrappers]
        everyone: list[Any] = [None] * group.size()
        dist.all_gather_object(everyone, mine, group=group)
        for place, wrapper in enumerate(wrappers):
            found[wrapper] = [theirs[place] for theirs in everyone]
    return found


def _outlined(state: State) -> State:
    def outline(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.dim() == 0:
            return value.cpu()
        return _Outline(dtype=value.dtype, numel=value.numel())

    return {name: outline(value) for name, value in state.items()}


def _whole(
    wrapper: Wrapper,
    members: Mapping[int, Entry],
    local: Mapping[int, State],
    outlines: list[dict[int, State]],
) -> dict[int, State]:
    """The states of a unit's members in full: one gather for each kind of state."""
    unit = wrapper._unit
    assert unit is not None
    assert unit.transport is not None
    whole: dict[int, State] = {}
    for index in sorted({index for theirs in outlines for index in theirs}):
        numels = [unit.shards.packing.piece(index, rank).numel for rank in range(unit.size)]
        _check(members[index], [theirs.get(index) for theirs in outlines], numels)
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
        device = wrapper.compute_device
        shard = torch.zeros(packing.shard_bytes, dtype=torch.uint8, device=device)
        for index, view in enumerate(shard_views(packing, unit.rank, shard)):
            if index in found and view.numel() > 0:
                view.copy_(local[index][kind].view(view.shape))
        gathered = torch.empty(packing.gathered_bytes, dtype=torch.uint8, device=device)
        reason = f"the optimizer state {kind!r} of unit {unit.name!r}"
        unit.transport.all_gather(gathered, shard, reason=reason).wait()
        full = full_tensors(packing, gathered)
        for index in found:
            whole[index][kind] = full[index]
    return whole


def _check(member: Entry, outlines: Sequence[State | None], numels: Sequence[int]) -> None:
    """Refuse states that some ranks lack, or that are not as long as the shards; on all ranks."""
    for rank, (state, numel) in enumerate(zip(outlines, numels, strict=True)):
        if numel > 0 and state is None:
            raise RuntimeError(
                "FSDP currently requires each rank to have at least the optimizer states needed by "
                "rank 0's optimizer but some ranks are missing some of those states\nRank "
                f"{rank} is missing states for the parameters: {list(member.names)}"
            )
        for kind, value in (state or {}).items():
            if isinstance(value, _Outline) and value.numel != numel:
                raise NotImplementedError(
                    f"the optimizer state {kind!r} of {list(member.names)} has {value.numel} "
                    f"elements on rank {rank}, where the shard has {numel}: only states that are "
                    "as large as their parameter can be gathered"
                )


def _parts(entry: Entry, state: State) -> list[tuple[NamedMember, State]]:
    """The state of each of the user's parameters in one member of a unit."""
    wrapper = entry.wrapper
    assert wrapper is not None
    if wrapper._flat_members is None:
        return [(entry.members[0], state)]
    flat = {k for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim() > 0}
    views = {kind: wrapper._flat_members.views(state[kind]) for kind in flat}
    return [
        (member, {k: views[k][i] if k in flat else value for k, value in state.items()})
        for i, member in enumerate(entry.members)
    ]
