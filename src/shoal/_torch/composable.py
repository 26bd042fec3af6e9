"""The register in which torch's composable APIs note what manages a module."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, cast

import torch
from torch.distributed._composable import checkpoint as checkpoint
from torch.distributed._composable.contract import (
    REGISTRY_KEY,
    STATE_KEY,
    RegistryItem,
    _get_registry,
)
from torch.distributed.fsdp import fully_shard


def replicates(module: torch.nn.Module) -> bool:
    """Whether torch's composable `replicate` manages a module."""
    registry = _get_registry(module)
    return registry is not None and "replicate" in registry


def is_fully_sharded(module: torch.nn.Module) -> bool:
    """Whether torch's `fully_shard`, or one that registers like it, manages a module."""
    registry = _get_registry(module)
    return registry is not None and "fully_shard" in registry


def register_composable(module: torch.nn.Module, name: str, state: object = None) -> None:
    """Tell torch's composable APIs that one of that name manages a module.

    `state`, if there is one, is what torch's own `fully_shard.state(module)` then answers: its
    pipelines ask.
    """
    if _get_registry(module) is None:
        vars(module)[REGISTRY_KEY] = OrderedDict()
    cast(Any, _get_registry(module))[name] = RegistryItem()
    if state is not None:
        states = vars(module).setdefault(STATE_KEY, OrderedDict())
        states[cast(Any, fully_shard).__wrapped__] = state
