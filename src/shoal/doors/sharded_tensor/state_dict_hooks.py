"""Hooks that let sharded tensors which are plain attributes of modules be in state dicts.

Ours or torch's: a model may have both, while its code moves from one to the other.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from shoal._torch.sharded import TorchShardedTensor


def state_dict_hook(
    module: nn.Module, destination: dict[str, Any], prefix: str, local_metadata: object
) -> None:
    """Add sharded tensors to a state dict; for `register_state_dict_post_hook`-like hooks."""
    for path, owner in module.named_modules():
        for name, value in vars(owner).items():
            if isinstance(value, TorchShardedTensor):
                destination[_key(prefix, path, name)] = value


def pre_load_state_dict_hook(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: object,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Give modules the sharded tensors of a state dict, where they have attributes of the names."""
    for path, owner in module.named_modules():
        for name in [*vars(owner)]:
            value = state_dict.get(_key(prefix, path, name))
            if isinstance(value, TorchShardedTensor):
                setattr(owner, name, value)


def _key(prefix: str, path: str, name: str) -> str:
    owner = prefix + path
    return f"{owner}.{name}" if owner else name
