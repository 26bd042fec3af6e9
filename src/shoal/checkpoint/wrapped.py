"""Checkpoints of models in `FullyShardedDataParallel`, the same as those of `fully_shard`.

Its parameters are pieces that do not say which, so its own state dicts are saved, and filled: they
are copies in rows, by clean names, which the wrapper takes over when all of them are right.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.optim import Optimizer

from shoal.checkpoint.manifest import JSON, Manifest, TensorEntry
from shoal.checkpoint.optimizer import PREFIX, groups_of, parsed
from shoal.errors import CheckpointError
from shoal.sharding_wrapper import ShardingWrapper, WrappedParameter, clean, wrappers_below


def wrapped_state(
    model: nn.Module, optimizer: Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, JSON]]:
    """The optimizer's tensors to save, and the rest as JSON. Collective."""
    with _in_rows(model):
        found = _wrapper(model).optim_state_dict(model, optimizer)["state"]
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, JSON] = {}
    for name, state in found.items():
        for kind, value in state.items():
            is_tensor = isinstance(value, torch.Tensor)
            (tensors if is_tensor else values)[f"{PREFIX}{name}/{kind}"] = value
    return tensors, {"groups": groups_of(model, optimizer), "values": values}


def wrapped_weights(model: nn.Module) -> dict[str, Any]:
    """A copy of the model's state dict, in rows. Collective."""
    with _in_rows(model):
        return model.state_dict()


def empty_states(model: nn.Module, manifest: Manifest) -> dict[str, torch.Tensor]:
    """Tensors into which a checkpoint's state of the optimizer can be loaded."""
    wrapper = _wrapper(model)
    members = {name: one for one in wrapper._wrapped_parameters(model) for name in one.names}
    sizes = {clean(name): value.numel() for name, value in model.named_parameters()}
    sizes |= {name: math.prod(member.shape) for name, member in members.items()}
    entries = {key: e for key, e in manifest.tensors.items() if key.startswith(PREFIX)}
    for key, entry in entries.items():
        _check_size(key, entry, sizes)
    return {
        key: _empty(key, entry, members.get(parsed(key)[0]), wrapper.compute_device)
        for key, entry in entries.items()
    }


def take_over(
    model: nn.Module,
    optimizer: Optimizer,
    weights: Mapping[str, Any],
    states: Mapping[str, torch.Tensor],
    hyper: Mapping[str, Any],
) -> None:
    """Let model and optimizer have what was loaded. Collective."""
    named: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in (*states.items(), *hyper["values"].items()):
        name, kind = parsed(key)
        named[name][kind] = value
    # The hyper-parameters of now: the saved ones come later, for all kinds of models alike.
    groups = [
        {**copy.copy(group), "params": saved["params"]}
        for group, saved in zip(optimizer.param_groups, hyper["groups"], strict=True)
    ]
    loaded = {"state": dict(named), "param_groups": groups}
    with _in_rows(model):
        model.load_state_dict(weights)
        own = _wrapper(model).optim_state_dict_to_load(model, optimizer, loaded)
    optimizer.load_state_dict(own)


def take_weights(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Let the model have weights that were loaded. Collective."""
    with _in_rows(model):
        model.load_state_dict(weights)


def _wrapper(model: nn.Module) -> ShardingWrapper:
    """One of the model's wrappers, which speaks for all."""
    return wrappers_below(model)[0]


def _in_rows(model: nn.Module) -> AbstractContextManager[None]:
    return _wrapper(model).state_dict_type(
        model,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(),
        ShardedOptimStateDictConfig(offload_to_cpu=False),
    )


def _check_size(key: str, entry: TensorEntry, sizes: Mapping[str, int]) -> None:
    """Refuse state of no parameter, and state beyond its parameter's size, before it is made."""
    name, _ = parsed(key)
    if name not in sizes:
        raise CheckpointError(f"{key!r} is not state of a parameter of this model")
    if math.prod(entry.shape) > max(1, sizes[name]):
        raise CheckpointError(
            f"{key!r} has shape {entry.shape} in the checkpoint, and its parameter "
            f"{sizes[name]:,} elements: it is a checkpoint of another model"
        )


def _empty(
    key: str, entry: TensorEntry, member: WrappedParameter | None, device: torch.device
) -> torch.Tensor:
    # Of the parameter's shape, which is the only one that it can take: who loads compares.
    rows = member.empty_rows(key, entry.dtype) if member is not None and entry.shape else None
    if rows is None:
        return torch.empty(entry.shape, dtype=entry.dtype, device=device)
    return rows
