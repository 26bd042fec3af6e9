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
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor

from shoal.wrapper import flat_parameter
from shoal.wrapper.distributed import local_part, whole
from shoal.wrapper.names import PREFIX, NamedMember, clean, named_members
from shoal.wrapper.sharded_values import as_sharded, cut_rows, whole_of
from shoal.wrapper.state_dict_type import StateDictTypes
from shoal.wrapper.summon import Summoning, shown_whole

_FULL, _LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.LOCAL_STATE_DICT
_CPU = torch.device("cpu")


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
        is_shown = not (getattr(config, "rank0_only", False) and self.rank != 0)
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
    if kind is _LOCAL:
        _save_flat(wrapper, state_dict, prefix, to_cpu=config.offload_to_cpu)
        return
    if kind is _FULL and getattr(config, "rank0_only", False) and wrapper.rank != 0:
        _drop_own(wrapper, state_dict, prefix)
        return
    use_dtensor = getattr(config, "_use_dtensor", False)

    def saved(name: str, value: torch.Tensor) -> torch.Tensor:
        value = value.detach()
        if kind is not _FULL:
            assert wrapper._unit is not None
            value = cut_rows(wrapper._unit, name, value, use_dtensor=use_dtensor)
            return value.cpu() if config.offload_to_cpu else value
        return value.to(_CPU, copy=True) if config.offload_to_cpu else value.clone()

    _save_members(wrapper, state_dict, prefix, saved)
    _save_buffers(wrapper, state_dict, prefix, to_cpu=config.offload_to_cpu)


def _save_members(
    wrapper: StateDicts,
    state_dict: dict[str, Any],
    prefix: str,
    saved: Callable[[str, torch.Tensor], torch.Tensor],
) -> None:
    """Replace the views of whole parameters, which go with them; shared ones stay shared."""
    for member in _members(wrapper):
        keys = [prefix + name for name in member.names if prefix + name in state_dict]
        if keys:
            value = saved(keys[0], state_dict[keys[0]])
            state_dict.update(dict.fromkeys(keys, value))


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
    for name in (*names, *(clean(name) for name, _ in buffers), flat_parameter.NAME):
        state_dict.pop(prefix + name, None)


def _save_flat(
    wrapper: StateDicts, state_dict: dict[str, Any], prefix: str, *, to_cpu: bool
) -> None:
    """The flat parameter says which of its elements a rank has; others are the pieces alone."""
    unit = wrapper._unit
    if unit is None or wrapper._flat_members is None:
        return
    flat = as_sharded(unit, unit.shards.packing, unit.shards.members[0].local.detach())
    state_dict[prefix + flat_parameter.NAME] = flat.cpu() if to_cpu else flat


@torch.no_grad()
def _begin_load(
    wrapper: StateDicts,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: object,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Give the values names and wholes that the modules inside can load, and them parameters."""
    wrapper._give_up_load()
    kind, _config = wrapper._kind()
    flat = wrapper._flat_members
    if kind is _LOCAL:
        value = state_dict.pop(prefix + flat_parameter.NAME, None)
        if flat is not None:
            _check_flat(value, prefix)
            views = flat.views(whole_of(value, wrapper.compute_device))
            for member, view in zip(_members(wrapper), views, strict=True):
                state_dict.update((prefix + name, view) for name in member.names)
    else:
        for member in _members(wrapper):
            for key in (prefix + name for name in member.names):
                if key in state_dict:
                    state_dict[key] = _loadable(state_dict[key], member)
    _rename(state_dict, prefix, prefix + PREFIX)
    with ExitStack() as stack:
        stack.callback(_clean_all, missing_keys, unexpected_keys, error_msgs)
        if kind is not _LOCAL or flat is not None:  # otherwise pieces go where pieces are
            stack.enter_context(shown_whole(wrapper, writeback=True))
        wrapper._loading = stack.pop_all()


def _end_load(wrapper: StateDicts, incompatible_keys: object) -> None:
    """Take the loaded values over."""
    wrapper._give_up_load()


def _clean_all(*reports: list[str]) -> None:
    """Report names as the user knows them."""
    for report in reports:
        report[:] = [clean(line) for line in report]


def _check_flat(value: object, prefix: str) -> None:
    if value is None:
        raise AssertionError(
            "No `FlatParameter` in `state_dict` for this FSDP instance but it has parameters: "
            f"expected {prefix + flat_parameter.NAME!r}, as LOCAL_STATE_DICT saves it"
        )


def _members(wrapper: StateDicts) -> list[NamedMember]:
    """Each parameter that a wrapper shards itself."""
    return [member for member in named_members(wrapper) if member.wrapper is wrapper]


def _loadable(value: Any, member: NamedMember) -> Any:
    """A value as the modules can load it: whole on the ranks of the wrapper."""
    if member.before is not None and isinstance(value, DTensor):
        return whole(local_part(value, member.before), member.before)
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
