"""Optimizer state dicts that know the user's parameters, and not how they are sharded."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import OptimStateKeyType, StateDictType
from torch.optim import Optimizer

from shoal.doors.fsdp1.optim_state_shards import LoadedState, StateFormat, gather, scatter
from shoal.doors.fsdp1.parameter_names import (
    Entry,
    Key,
    OptimInput,
    entries_of,
    is_of_named_optimizer,
    keys_of,
)
from shoal.doors.fsdp1.state_dict import StateDictTypes
from shoal.doors.fsdp1.wrapper import Wrapper, wrappers_below

StateDict = dict[str, Any]


class OptimStates(Wrapper):
    """The methods of the wrapper that save and load what optimizers know.

    All are collective: every rank of the model's group calls them.
    """

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: StateDict | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> StateDict:
        """The state of an optimizer by the names of parameters, in the form that was set for it."""
        settings = StateDictTypes.get_state_dict_type(model)
        config = settings.optim_state_dict_config
        return _saved(
            model,
            optim,
            optim.state_dict() if optim_state_dict is None else optim_state_dict,
            group=group,
            is_full=settings.state_dict_type is StateDictType.FULL_STATE_DICT,
            rank0_only=getattr(config, "rank0_only", False),
            on_cpu=config.offload_to_cpu,
        )

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: StateDict,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> StateDict:
        """Turn a result of `optim_state_dict` into an argument of `optim.load_state_dict`."""
        config = StateDictTypes.get_state_dict_type(model).optim_state_dict_config
        loaded = _loadable(
            model,
            optim,
            optim_state_dict,
            group=group,
            rank0_only=getattr(config, "rank0_only", False),
            is_named=is_named_optimizer,
        )
        if load_directly:
            optim.load_state_dict(loaded)
        return loaded

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_input: OptimInput = None,
        rank0_only: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> StateDict:
        """The state of an optimizer with whole tensors: an older way to say it."""
        _warn_old("full_optim_state_dict", "optim_state_dict", optim_input)
        state_dict = optim.state_dict()
        return _saved(
            model, optim, state_dict, optim_input, group=group, is_full=True, rank0_only=rank0_only
        )

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: Optimizer, group: dist.ProcessGroup | None = None
    ) -> StateDict:
        """The state of an optimizer with chunks of tensors: an older way to say it."""
        _warn_old("sharded_optim_state_dict", "optim_state_dict")
        return _saved(
            model, optim, optim.state_dict(), group=group, is_full=False, rank0_only=False
        )

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: StateDict,
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: Optimizer | None = None,
    ) -> StateDict:
        """The state that an optimizer loads, from whole tensors that every rank has."""
        _warn_old("shard_full_optim_state_dict", "optim_state_dict_to_load", optim_input)
        return _loadable(model, optim, full_optim_state_dict, optim_input)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: StateDict, model: nn.Module, optim: Optimizer
    ) -> StateDict:
        """The state that an optimizer loads, from chunks of tensors."""
        _warn_old("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
        return _loadable(model, optim, sharded_optim_state_dict)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: StateDict | None,
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: Optimizer | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> StateDict:
        """The state that an optimizer loads, from whole tensors that the first rank alone has."""
        _warn_old("scatter_full_optim_state_dict", "optim_state_dict_to_load", optim_input)
        return _loadable(
            model, optim, full_optim_state_dict, optim_input, group=group, rank0_only=True
        )

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: StateDict,
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: Optimizer | None = None,
    ) -> StateDict:
        """Put names in the place of numbers, or numbers in that of names, for a plain model."""
        _warn_input(optim_input)
        state = optim_state_dict["state"]
        if optim_state_key_type not in tuple(OptimStateKeyType):
            raise AssertionError(f"Expected an OptimStateKeyType, got {optim_state_key_type}")
        wanted = str if optim_state_key_type is OptimStateKeyType.PARAM_NAME else int
        kinds = {type(key) for key in state}
        if len(kinds & {str, int}) != len(kinds) or len(kinds) > 1:
            raise ValueError(f"Invalid parameter keys: {state.keys()}")
        if kinds <= {wanted}:
            return optim_state_dict
        keyed = keys_of(entries_of(model), model, optim, optim_input, is_named=False)
        new: dict[Key, Key] = {i: entry.names[0] for i, entry in keyed.items()}
        if wanted is int:
            new = {name: i for i, name in new.items()}
        return {
            "state": {new[key]: value for key, value in state.items()},
            "param_groups": [
                {**copy.deepcopy(group), "params": sorted(new[key] for key in group["params"])}
                for group in optim_state_dict["param_groups"]
            ],
        }


def _check_same_kind(model: nn.Module) -> None:
    if len({one._use_orig_params for one in wrappers_below(model)}) > 1:
        raise AssertionError("Not all FSDP modules have the same _use_orig_params value")


def _saved(
    model: nn.Module,
    optim: Optimizer,
    state_dict: StateDict,
    optim_input: OptimInput = None,
    *,
    group: dist.ProcessGroup | None,
    is_full: bool,
    rank0_only: bool,
    on_cpu: bool = True,
) -> StateDict:
    _check_same_kind(model)
    state = state_dict["state"]
    entries = entries_of(model)
    keyed = keys_of(entries, model, optim, optim_input, is_named=is_of_named_optimizer(state))
    wanted = StateFormat(
        is_kept=not (rank0_only and is_full) or dist.get_rank(group) == 0,
        is_cut=not is_full,
        on_cpu=on_cpu,
    )
    saved = gather(entries.values(), keyed, state, wanted)
    if not wanted.is_kept:
        return {}
    for key in state:
        if key not in keyed and key not in saved:
            warnings.warn(
                f"Found a optim state, {key}, that FSDP cannot process. FSDP will directly copy "
                "everything to the returned state_dict. In most cases, this is a user-defined "
                "state that is not associated with any particular parameter.",
                stacklevel=3,
            )
            saved[key] = state[key]
    result: StateDict = {"state": saved}
    if "param_groups" in state_dict:
        result["param_groups"] = [
            {**copy.deepcopy(one), "params": [n for k in one["params"] for n in keyed[k].names]}
            for one in state_dict["param_groups"]
        ]
    return result


def _loadable(
    model: nn.Module,
    optim: Optimizer | None,
    state_dict: StateDict | None,
    optim_input: OptimInput = None,
    *,
    group: dist.ProcessGroup | None = None,
    rank0_only: bool = False,
    is_named: bool = False,
) -> StateDict:
    _check_same_kind(model)
    device = wrappers_below(model)[0].compute_device
    source = LoadedState(state_dict, group, device, is_on_first=rank0_only)
    entries = entries_of(model)
    keyed = keys_of(entries, model, optim, optim_input, is_named=is_named)
    groups = None if source.groups is None else _regrouped(source.groups, keyed)
    states = scatter(entries.values(), source)
    result: StateDict = {
        "state": {k: states[e.parameter] for k, e in keyed.items() if e.parameter in states}
    }
    if is_named and optim is not None:
        _keep_own(result["state"], keyed, source, optim)
    known = {name for entry in entries.values() for name in entry.names}
    for name in source.states:  # what belongs to no parameter
        if name not in known:
            result["state"][name] = copy.copy(source.whole(source.states[name]))
    if groups is not None:
        result["param_groups"] = groups
    return result


def _keep_own(
    state: dict[Key, Any], keyed: Mapping[Key, Entry], source: LoadedState, optim: Optimizer
) -> None:
    """Let parameters that this rank has nothing of keep their state: such optimizers want one."""
    for key, entry in keyed.items():
        if key not in state and entry.names[0] in source.states:
            own = optim.state.get(entry.parameter)
            if own is None:
                warnings.warn(f"optim_state[{key}] is not on this rank.", stacklevel=3)
            else:
                state[key] = copy.deepcopy(own)


def _regrouped(groups: list[dict[str, Any]], keyed: Mapping[Key, Entry]) -> list[dict[str, Any]]:
    key_of = {name: key for key, entry in keyed.items() for name in entry.names}
    unknown = [name for group in groups for name in group["params"] if name not in key_of]
    if unknown:
        raise KeyError(
            f"the state dict has parameters that the optimizer does not hold: {unknown[:5]} "
            f"({len(unknown)} in all). Is it of another model? The optimizer's are "
            f"{list(key_of)[:5]}, ..."
        )
    return [
        {**copy.deepcopy(group), "params": sorted({key_of[name] for name in group["params"]})}
        for group in groups
    ]


def _warn_old(old: str, new: str, optim_input: OptimInput = None) -> None:
    warnings.warn(
        f"``FullyShardedDataParallel.{old}`` is being deprecated and is replaced by "
        f"``FullyShardedDataParallel.{new}``.",
        FutureWarning,
        stacklevel=3,
    )
    _warn_input(optim_input, stacklevel=4)


def _warn_input(optim_input: OptimInput, stacklevel: int = 3) -> None:
    if optim_input is not None:
        warnings.warn(
            "The `optim_input` argument is deprecated: pass the optimizer, or nothing.",
            FutureWarning,
            stacklevel=stacklevel,
        )
