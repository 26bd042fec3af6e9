"""From an optimizer's state of the user's parameters to its state of this rank's shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shoal.layout.region import flat_span
from shoal.wrapper.distributed import local_part
from shoal.wrapper.names import NamedMember
from shoal.wrapper.optim_gather import State
from shoal.wrapper.optim_keys import Entry
from shoal.wrapper.sharded_values import whole_of

_SAME_SCALARS = (
    "All unflattened parameters comprising a single flat parameter must have scalar state with the "
    "same value and dtype"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Coming:
    """Stands for a tensor that the first rank will send."""

    shape: torch.Size
    dtype: torch.dtype


class Source:
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
            loaded = self._outline(loaded)
        if loaded is None or "state" not in loaded:
            raise ValueError(
                '`optim_state_dict` must have the keys "state"to be a valid optimizer state dict'
            )
        self.states: Mapping[str, Any] = loaded["state"]
        self.groups: list[dict[str, Any]] | None = loaded.get("param_groups")

    def _outline(self, loaded: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """What the first rank has, whose tensors are still to come."""
        is_first = dist.get_rank(self._group) == 0
        sent = [_outlined(loaded) if is_first else None]
        dist.broadcast_object_list(sent, group=self._group, group_src=0)
        return loaded if is_first else sent[0]

    def take(self, name: str) -> State | None:
        """The state of a parameter, with whole tensors. Collective where others have parts."""
        found = self.states.get(name)
        return None if found is None else {k: self.whole(v) for k, v in sorted(found.items())}

    def whole(self, value: Any) -> Any:
        """A value of a state, from wherever it is."""
        is_tensor = isinstance(value, torch.Tensor) and value.dim() > 0
        if self._is_on_first and (is_tensor or isinstance(value, _Coming)):
            sent = (
                value.to(self._device)
                if isinstance(value, torch.Tensor)
                else torch.empty(value.shape, dtype=value.dtype, device=self._device)
            )
            dist.broadcast(sent, group=self._group, group_src=0)
            return sent
        return whole_of(value, self._device)


def _outlined(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu() if value.dim() == 0 else _Coming(shape=value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        return {k: _outlined(v) for k, v in value.items()}
    return value


@torch.no_grad()
def scatter(entries: Iterable[Entry], source: Source) -> dict[nn.Parameter, State]:
    """The states of a model's parameters, as far as this rank has elements of them."""
    result: dict[nn.Parameter, State] = {}
    for entry in entries:  # in the order of the model, which is that of all ranks
        found = [source.take(name) for name in entry.names]
        if all(state is None for state in found):
            continue
        if entry.wrapper is None:
            result[entry.parameter] = dict(found[0] or {})
            continue
        found = [_here(state, member) for state, member in zip(found, entry.members, strict=True)]
        whole = found[0] or {}
        if entry.wrapper._flat_members is not None:
            whole = _flattened(entry, found)
        local = _local(entry, whole)
        if local is not None:
            result[entry.parameter] = local
    return result


def _here(state: State | None, member: NamedMember) -> State | None:
    """A state, of a parameter that may be distributed over other ranks than its wrapper's."""
    if state is None or member.before is None:
        return state
    return {
        kind: local_part(value, member.before)
        if isinstance(value, torch.Tensor) and value.dim() > 0
        else value
        for kind, value in state.items()
    }


def _local(entry: Entry, whole: State) -> State | None:
    """This rank's elements of a state; None where it has none, and optimizers keep none."""
    assert entry.wrapper is not None
    unit = entry.wrapper._unit
    assert unit is not None
    if unit.transport is None:
        return whole
    shape = torch.Size(unit.shards.packing.params[entry.index].shape)
    cut = {k: v for k, v in whole.items() if isinstance(v, torch.Tensor) and v.dim() > 0}
    for value in cut.values():  # before some ranks leave
        _check_shape(value, shape, entry.names[0])
    piece = unit.shards.packing.piece(entry.index, unit.rank)
    if piece.numel == 0 and entry.wrapper._flat_members is None:
        return None
    start = flat_span(shape, piece.regions[0])[0] if piece.regions else 0
    stop = start + piece.numel
    return whole | {kind: value.reshape(-1)[start:stop].clone() for kind, value in cut.items()}


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
    is_tensor = [isinstance(value, torch.Tensor) and value.dim() > 0 for value in present]
    if len({type(value) for value in present}) != 1 or len(set(is_tensor)) != 1:
        raise ValueError(
            f"Differing optimizer state types for state {kind}, values {present}, and unflattened "
            f"parameter names {list(entry.names)}"
        )
    dtypes = {getattr(value, "dtype", None) for value in present}
    if not is_tensor[0]:
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
