"""Names of parameters as the user's model has them, and the keys that optimizers have for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.doors.fsdp1.parameters import FlatMembers
from shoal.doors.fsdp1.state_dict_values import cut_rows
from shoal.doors.fsdp1.tensor_parallel import Spec
from shoal.doors.fsdp1.unit import WrappedUnit
from shoal.doors.fsdp1.wrapper import Wrapper, wrappers_below
from shoal.errors import UsageError
from shoal.runtime.module_state import state_of
from shoal.sharding_wrapper import clean

Key = int | str
"""The key of a parameter in an optimizer's state dict: its number, or its name."""
OptimInput = list[dict[str, Any]] | Iterable[nn.Parameter] | None
"""The parameters, or groups of them, that an optimizer was made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedMember:
    """One of the user's parameters that a wrapper shards."""

    names: tuple[str, ...]
    """Its clean names from the module that was asked, the first one first; a shared parameter has
    several."""
    wrapper: Wrapper
    index: int
    """In `wrapper._user_parameters`."""
    shape: torch.Size
    """The shape that the ranks of its wrapper have together."""
    before: Spec
    """How the parameter is distributed over other ranks."""

    @property
    def name(self) -> str:
        """The name that stands for it."""
        return self.names[0]

    @property
    def unit(self) -> WrappedUnit:
        """The unit of its wrapper."""
        assert self.wrapper._unit is not None
        return self.wrapper._unit

    @property
    def unit_index(self) -> int:
        """The member of that unit that holds its elements."""
        return self.index if self.wrapper._flat_members is None else 0

    def empty_rows(self, name: str, dtype: torch.dtype) -> torch.Tensor | None:
        """See `WrappedParameter.empty_rows`."""
        if self.unit.transport is None:
            return None
        # Expanded, so that no rank needs memory for the whole.
        whole = torch.empty((), dtype=dtype, device=self.unit.device).expand(self.shape)
        return cut_rows(self.unit, name, whole, use_dtensor=False)


def named_members(module: nn.Module) -> Iterator[NamedMember]:
    """The parameters that wrappers below a module shard, the module itself included."""
    prefixes: dict[nn.Module, list[str]] = {}
    for name, child in module.named_modules(remove_duplicate=False):
        prefixes.setdefault(child, []).append(f"{name}." if name else "")
    for wrapper in [*dict.fromkeys(one for each in prefixes for one in (each, *lenders(each)))]:
        if isinstance(wrapper, Wrapper):
            for index, one in enumerate(wrapper._user_parameters):
                names = [
                    clean(prefix + home.name)
                    for home in one.homes
                    for prefix in prefixes.get(home.module, ())
                ]
                if not names:  # of a wrapper elsewhere, of which some others are used here
                    continue
                yield NamedMember(
                    names=tuple(dict.fromkeys(names)),
                    wrapper=wrapper,
                    index=index,
                    shape=one.shape,
                    before=one.before,
                )


def lenders(module: nn.Module) -> list[Wrapper]:
    """The wrappers that own parameters which this one uses too (tied weights)."""
    state = state_of(module) if isinstance(module, Wrapper) else None
    units = () if state is None else state.used[len(state.units) :]
    found = (unit.wrapper() for unit in units if isinstance(unit, WrappedUnit))
    return [one for one in found if one is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A parameter that an optimizer can hold."""

    parameter: nn.Parameter
    names: tuple[str, ...]
    """The names of the user's parameters that it stands for: one, or all of a flat parameter."""
    path: str
    """Where it is registered, with what wrappers add."""
    members: tuple[NamedMember, ...] = ()
    """The user's parameters, if a wrapper shards them."""

    @property
    def num_dims(self) -> int:
        """How many dims it has as a whole; a flat parameter has one."""
        return len(self.members[0].shape) if len(self.members) == 1 else self.parameter.dim()

    @property
    def flat(self) -> FlatMembers | None:
        """How it is divided, if it is a flat parameter."""
        return self.members[0].wrapper._flat_members if self.members else None


def entries_of(model: nn.Module) -> dict[nn.Parameter, Entry]:
    """The parameters of a model, each once, in the order of the model."""
    for one in wrappers_below(model):
        if one._unit is not None:
            one._unit.reshard()  # so that modules have what optimizers hold
    members: dict[nn.Parameter, list[NamedMember]] = {}
    for member in named_members(model):
        held = member.unit.shards.members[member.unit_index].sharded
        members.setdefault(held, []).append(member)
    found: dict[nn.Parameter, Entry] = {}
    for path, parameter in model.named_parameters():
        own = tuple(members.get(parameter, ()))
        names = tuple(member.name for member in own) or (clean(path),)
        found[parameter] = Entry(parameter=parameter, names=names, path=path, members=own)
    return found


def keys_of(
    entries: Mapping[nn.Parameter, Entry],
    model: nn.Module,
    optim: Optimizer | None,
    optim_input: OptimInput,
    *,
    is_named: bool,
) -> dict[Key, Entry]:
    """Each parameter by its key in an optimizer; without one, as if made of the model's."""
    if optim is None or optim_input is not None:
        held = _listed(model, optim_input)
    else:
        held = [p for group in optim.param_groups for p in group["params"]]
    strangers = sum(parameter not in entries for parameter in held)
    if strangers:
        raise UsageError(
            f"the optimizer holds {strangers} parameters that are not in the model; build it from "
            "model.parameters() after wrapping the model"
        )
    named = (entries[parameter] for parameter in held)
    return {entry.path if is_named else i: entry for i, entry in enumerate(named)}


def is_of_named_optimizer(state: Mapping[Any, object]) -> bool:
    """Whether an optimizer's state has names for keys."""
    return isinstance(next(iter(state), None), str)


def _listed(model: nn.Module, optim_input: OptimInput) -> list[nn.Parameter]:
    if optim_input is None:
        return list(model.parameters())
    try:
        items: list[Any] = list(optim_input)
    except TypeError as error:
        raise TypeError(
            f"Optimizer input should be an iterable of Tensors or dicts, but got {optim_input}"
        ) from error
    if not items:
        raise ValueError("Optimizer input should not be empty")
    if all(isinstance(item, torch.Tensor) for item in items):
        return items
    if not all(isinstance(item, dict) for item in items):
        raise TypeError("Optimizer input should be an iterable of Tensors or dicts")
    return [parameter for group in items for parameter in group["params"]]
