"""torch's checkpoints, taught to know classes that are not torch's."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def serve_state_dicts(
    cls: type,
    gather: Callable[[Tensor], Tensor],
    fill: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Let the state dicts of `torch.distributed.checkpoint` know a sharded tensor class.

    A full state dict has what `gather` makes of such a tensor. Loaded from a full one, the tensor
    becomes what `fill` makes of it and of the whole.
    """
    utils: Any = importlib.import_module("torch.distributed._state_dict_utils")
    planner: Any = importlib.import_module("torch.distributed.checkpoint.default_planner")
    utils._all_gather_sharded_tensor = _gathering(utils._all_gather_sharded_tensor, cls, gather)
    planner._flatten_sharded_tensors = _keeping_all(planner._flatten_sharded_tensors, cls)
    importers = [utils, sys.modules.get("torch.distributed.checkpoint.state_dict")]
    for name in ("_broadcast_state_dict", "_distribute_state_dict"):
        distribute = _filling(getattr(utils, name), cls, fill)
        for module in filter(None, importers):
            setattr(module, name, distribute)


def _gathering(
    by_torch: Callable[..., Tensor], cls: type, gather: Callable[[Tensor], Tensor]
) -> Callable[..., Tensor]:
    """For full state dicts: torch would take a tensor's first shard for a chunk of dim 0."""

    def gathered(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return gather(tensor) if isinstance(tensor, cls) else by_torch(tensor, *args, **kwargs)

    return gathered


def _filling(
    by_torch: Callable[..., None], cls: type, fill: Callable[[Tensor, Tensor], Tensor]
) -> Callable[..., None]:
    """From full state dicts: torch would put the whole in a tensor's place."""

    def distribute(full: dict[str, Any], local: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        own = {name: value for name, value in local.items() if isinstance(value, cls)}
        by_torch(full, local, *args, **kwargs)
        for name, tensor in own.items():
            if name in local and local[name] is not tensor:
                local[name] = fill(tensor, local[name])

    return distribute


def _keeping_all(
    by_torch: Callable[[dict[str, Any]], dict[str, Any]], cls: type
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """For sharded state dicts: torch drops a tensor where a rank has no shard of it.

    Loading then misses the name, and takes the checkpoint for one of torch 2.3.
    """
    traverse: Any = importlib.import_module("torch.distributed.checkpoint._traverse")

    def flattened(state_dict: dict[str, Any]) -> dict[str, Any]:
        found = by_torch(state_dict)

        def keep(path: Any, value: object) -> None:
            if isinstance(value, cls):
                traverse.set_element(found, path, value)

        traverse.traverse_state_dict(state_dict, keep)
        return found

    return flattened


@functools.cache
def serve_wrapper(cls: Any) -> None:
    """Let `get_state_dict` and its like of torch's checkpoints know another wrapper class.

    They ask torch's class for everything; from here on each model's own class is asked.
    """
    state_dicts: Any = importlib.import_module("torch.distributed.checkpoint.state_dict")
    by_torch, state_by_torch = (
        state_dicts.FSDP,
        state_dicts._get_module_fsdp_state_if_fully_sharded_module,
    )

    class Either(type):
        def __instancecheck__(cls_: type, instance: object) -> bool:
            return isinstance(instance, (by_torch, cls))

        def __getattr__(cls_: type, name: str) -> Callable[..., Any]:
            def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                owner = cls if cls.fsdp_modules(module) else by_torch
                return getattr(owner, name)(module, *args, **kwargs)

            return call

    state_dicts.FSDP = Either("FSDP", (), {})
    state_dicts._get_module_fsdp_state_if_fully_sharded_module = lambda module: (
        module if isinstance(module, cls) else state_by_torch(module)
    )
