"""State dicts of a wrapper: the names of the original model, with whole, sharded or local values.

|  | saves | loads |
|---|---|---|
| `FULL_STATE_DICT` | copies of the whole parameters, of all ranks or of rank 0 alone | the same |
| `SHARDED_STATE_DICT` | each rank's rows, as `ShardedTensor` or `DTensor` | either, however cut |
| `LOCAL_STATE_DICT` | the shards as they are | the same |

To save and to load, the modules have whole parameters, so that what they do themselves with state
dicts keeps working. Only local state dicts are saved without communication.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.tensor import DTensor

from shoal.doors.fsdp1.parameter_names import NamedMember, lenders, named_members
from shoal.doors.fsdp1.parameters import FLAT_PARAM
from shoal.doors.fsdp1.state_dict_values import as_sharded, cut_rows, whole_of
from shoal.doors.fsdp1.summon import Summoning, shown_whole
from shoal.doors.fsdp1.tensor_parallel import local_part, whole
from shoal.doors.fsdp1.wrapper import Wrapper, wrappers_below
from shoal.sharding_wrapper import PREFIX, clean

_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}
_FULL, _LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.LOCAL_STATE_DICT
_CPU = torch.device("cpu")


class StateDictTypes(Wrapper):
    """The methods of the wrapper that choose a kind of state dict."""

    def __init__(self) -> None:
        super().__init__()
        self._state_dict_type = StateDictType.FULL_STATE_DICT
        self._state_dict_config: StateDictConfig = FullStateDictConfig()
        self._optim_state_dict_config: OptimStateDictConfig = FullOptimStateDictConfig()

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Have all wrappers in a module give this kind of state dict; returns what they gave."""
        model_type, optim_type = _CONFIGS[state_dict_type]
        config = model_type() if state_dict_config is None else state_dict_config
        optim_config = optim_type() if optim_state_dict_config is None else optim_state_dict_config
        for name, given, expected in (
            ("state_dict_config", config, model_type),
            ("optim_state_dict_config", optim_config, optim_type),
        ):
            if type(given) is not expected:
                raise RuntimeError(
                    f"Expected {name} of type {expected} but got {type(given)}: it must be the one "
                    f"for {state_dict_type}"
                )
        before: StateDictSettings | None = None
        for wrapper in _choosers(module):
            settings = wrapper._settings()
            before = before or settings
            if before.state_dict_type is not settings.state_dict_type:
                raise AssertionError(
                    "All FSDP modules should have the same state_dict_type, got "
                    f"{before.state_dict_type} and {settings.state_dict_type}: set it on the "
                    "outermost module"
                )
            wrapper._state_dict_type = state_dict_type
            wrapper._state_dict_config = config
            wrapper._optim_state_dict_config = optim_config
        return before or StateDictSettings(state_dict_type, config, optim_config)

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The kind of state dict that all wrappers in a module give."""
        first: StateDictSettings | None = None
        for wrapper in _choosers(module):
            wrapper._follow_mesh(wrapper._state_dict_config)
            wrapper._follow_mesh(wrapper._optim_state_dict_config)
            settings = wrapper._settings()
            first = first or settings
            if settings != first:
                raise AssertionError(
                    "All FSDP modules must have the same state dict settings. Got "
                    f"{settings} and {first}."
                )
        if first is None:
            raise ValueError(f"no wrapper is in this {type(module).__name__}")
        return first

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """`set_state_dict_type`, until the block ends."""
        before = StateDictTypes.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            StateDictTypes.set_state_dict_type(
                module,
                before.state_dict_type,
                before.state_dict_config,
                before.optim_state_dict_config,
            )

    def _settings(self) -> StateDictSettings:
        return StateDictSettings(
            self._state_dict_type, self._state_dict_config, self._optim_state_dict_config
        )

    def _kind(self) -> tuple[StateDictType, StateDictConfig]:
        """The kind of this wrapper's state dicts: without shards only whole ones make sense."""
        if self._unit is not None and self._unit.transport is None:
            return StateDictType.FULL_STATE_DICT, FullStateDictConfig()
        self._follow_mesh(self._state_dict_config)
        return self._state_dict_type, self._state_dict_config

    def _follow_mesh(self, config: StateDictConfig | OptimStateDictConfig) -> None:
        """Let state dicts of a wrapper with a `device_mesh` have `DTensor`s on that mesh."""
        if self._device_mesh is None:
            return
        if self._state_dict_type is StateDictType.LOCAL_STATE_DICT:
            raise RuntimeError(
                "Found state_dict_type LOCAL_STATE_DICT. DeviceMesh is not compatible with "
                "LOCAL_STATE_DICT. Please set state_dict_type to SHARDED_STATE_DICT to get DTensor "
                "state_dict."
            )
        config._use_dtensor = True  # pyright: ignore[reportAttributeAccessIssue]


def _choosers(module: nn.Module) -> list[StateDictTypes]:
    return [one for one in wrappers_below(module) if isinstance(one, StateDictTypes)]


class StateDicts(StateDictTypes, Summoning):
    """The methods of the wrapper that save and load."""

    def __init__(self) -> None:
        super().__init__()
        self._loading: ExitStack | None = None
        # Registered first, so that the user's own hooks see clean names and final values.
        self._register_state_dict_hook(_finish_save)
        self.register_load_state_dict_pre_hook(_begin_load)
        self.register_load_state_dict_post_hook(_end_load)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state dict of the original model, of the kind that `state_dict_type` has chosen."""
        self._give_up_load()
        kind, config = self._kind()
        if kind is not self._state_dict_type:
            warnings.warn(
                "When using ``NO_SHARD`` for ``ShardingStrategy``, full_state_dict will be "
                "returned.",
                stacklevel=2,
            )
        if kind is _LOCAL:
            if self._unit is not None:
                self._unit.reshard()
            return super().state_dict(*args, **kwargs)
        is_shown = self.rank == 0 or not getattr(config, "rank0_only", False)
        # As in torch, original parameters that nobody shards are saved from where they are.
        is_own = self._unit is not None and self._unit.transport is None and self._use_orig_params
        with shown_whole(self, is_shown=is_shown, in_place=is_own):
            return super().state_dict(*args, **kwargs)

    def _give_up_load(self) -> None:
        """End a load that somebody's hook has interrupted; what it had loaded stays."""
        if self._loading is not None:
            loading, self._loading = self._loading, None
            loading.close()


@torch.no_grad()
def _finish_save(
    wrapper: StateDicts, state_dict: dict[str, Any], prefix: str, local_metadata: object
) -> None:
    """Give what the modules have saved clean names, and the values of the kind in use."""
    _rename(state_dict, prefix + PREFIX, prefix)
    _rename_versions(state_dict, prefix + PREFIX, prefix)
    kind, config = wrapper._kind()
    unit, to_cpu = wrapper._unit, config.offload_to_cpu
    if kind is _LOCAL:
        if unit is not None and wrapper._flat_members is not None:
            # It says which of its elements a rank has; original parameters are the pieces alone.
            flat = as_sharded(unit, unit.shards.packing, unit.shards.members[0].local.detach())
            state_dict[prefix + FLAT_PARAM] = flat.cpu() if to_cpu else flat
        return
    if getattr(config, "rank0_only", False) and wrapper.rank != 0:
        _drop_own(wrapper, state_dict, prefix)
        return
    # Views of the whole parameters go with them, and are replaced; shared ones stay shared.
    for member in _members(wrapper):
        keys = [prefix + name for name in member.names if prefix + name in state_dict]
        if keys:
            value = state_dict[keys[0]].detach()
            if kind is _FULL:
                value = value.to(_CPU, copy=True) if to_cpu else value.clone()
            else:
                use_dtensor = getattr(config, "_use_dtensor", False)
                value = cut_rows(member.unit, keys[0], value, use_dtensor=use_dtensor)
                value = value.cpu() if to_cpu else value
            state_dict.update(dict.fromkeys(keys, value))
    _share_tied(wrapper, state_dict, prefix)
    _save_buffers(wrapper, state_dict, prefix, to_cpu=to_cpu)


def _share_tied(wrapper: StateDicts, state_dict: dict[str, Any], prefix: str) -> None:
    """Give all names of a parameter one value, also those that other wrappers have saved."""
    for member in named_members(wrapper):
        keys = [prefix + name for name in member.names if prefix + name in state_dict]
        state_dict.update(dict.fromkeys(keys[1:], state_dict[keys[0]] if keys else None))


def _save_buffers(
    wrapper: StateDicts, state_dict: dict[str, Any], prefix: str, *, to_cpu: bool
) -> None:
    """Buffers are saved in their own dtypes, whatever compute has cast them to."""
    for name, dtype in wrapper._buffers_cast.original_dtypes(wrapper).items():
        value = state_dict.get(prefix + clean(name))
        if value is not None and value.dtype is not dtype:
            state_dict[prefix + clean(name)] = value.to(dtype)
    if to_cpu:
        for name, _ in wrapper.named_buffers(remove_duplicate=False):
            if prefix + clean(name) in state_dict:
                state_dict[prefix + clean(name)] = state_dict[prefix + clean(name)].cpu()


def _drop_own(wrapper: StateDicts, state_dict: dict[str, Any], prefix: str) -> None:
    """Another rank saves: leave only what the wrapper does not manage."""
    names = [name for member in _members(wrapper) for name in member.names]
    buffers = wrapper.named_buffers(remove_duplicate=False)
    for name in (*names, *(clean(name) for name, _ in buffers), FLAT_PARAM):
        state_dict.pop(prefix + name, None)


@torch.no_grad()
def _begin_load(
    wrapper: StateDicts,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: object,
    strict: bool,
    *reports: list[str],
) -> None:
    """Give the values names and wholes that the modules inside can load, and them parameters."""
    wrapper._give_up_load()
    kind, _config = wrapper._kind()
    flat = wrapper._flat_members
    if kind is _LOCAL:
        value = state_dict.pop(prefix + FLAT_PARAM, None)
        if flat is not None:
            if value is None:
                raise AssertionError(
                    "No `FlatParameter` in `state_dict` for this FSDP instance but it has "
                    f"parameters: expected {prefix + FLAT_PARAM!r}, as LOCAL_STATE_DICT saves it"
                )
            views = flat.views(whole_of(value, wrapper.compute_device))
            own = [member for member in _members(wrapper) if member.wrapper is wrapper]
            for member, view in zip(own, views, strict=True):
                state_dict.update((prefix + name, view) for name in member.names)
    else:
        for member in _members(wrapper):
            for key in (prefix + name for name in member.names):
                if key in state_dict:
                    state_dict[key] = _loadable(state_dict[key], member)
    _rename(state_dict, prefix, prefix + PREFIX)
    with ExitStack() as stack:
        stack.callback(_clean_all, reports)
        if kind is not _LOCAL:
            stack.enter_context(shown_whole(wrapper, writeback=True))
        elif flat is not None:  # otherwise pieces go where pieces are
            stack.enter_context(shown_whole(wrapper, writeback=True, is_alone=True))
        wrapper._loading = stack.pop_all()


def _end_load(wrapper: StateDicts, incompatible_keys: object) -> None:
    """Take the loaded values over."""
    wrapper._give_up_load()


def _clean_all(reports: Iterable[list[str]]) -> None:
    """Give missing keys, unexpected keys and errors the names that the user knows."""
    for report in reports:
        report[:] = [clean(line) for line in report]


def _members(wrapper: StateDicts) -> list[NamedMember]:
    """Each parameter that a wrapper shards itself, and what it uses of others by its own names."""
    names = _own_names(wrapper)
    own: list[NamedMember] = []
    for member in named_members(wrapper):
        if member.wrapper is wrapper:
            own.append(member)
        elif borrowed := tuple(name for name in member.names if name in names):
            own.append(replace(member, names=borrowed))
    return own


def _own_names(wrapper: StateDicts) -> set[str]:
    """The names of what no other wrapper inside saves, if it uses parameters of others."""
    if not lenders(wrapper):
        return set()
    inner = [
        f"{clean(name)}."
        for name, one in wrapper.named_modules()
        if one is not wrapper and isinstance(one, Wrapper)
    ]
    names = (name for member in named_members(wrapper) for name in member.names)
    return {name for name in names if not name.startswith(tuple(inner))}


def _loadable(value: Any, member: NamedMember) -> Any:
    """A value as the modules can load it: whole on the ranks of the wrapper."""
    if member.before is None or not isinstance(value, DTensor):
        value = whole_of(value, member.wrapper.compute_device)
    return whole(local_part(value, member.before), member.before)


def _rename(state_dict: dict[str, Any], old: str, new: str) -> None:
    """Give all names with one prefix another, in their order."""
    for key in [key for key in state_dict if key.startswith(old)]:
        state_dict[new + key.removeprefix(old)] = state_dict.pop(key)


def _rename_versions(state_dict: dict[str, Any], old: str, new: str) -> None:
    """Let modules of the original model find the versions that theirs have saved."""
    versions = getattr(state_dict, "_metadata", {})
    for key in [key for key in versions if f"{key}.".startswith(old)]:
        versions[(new + f"{key}.".removeprefix(old)).rstrip(".")] = versions[key]
