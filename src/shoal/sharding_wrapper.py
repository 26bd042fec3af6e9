"""A module around a module that shards it, as checkpoints and `replicate` know it.

`FullyShardedDataParallel` is the only kind. Its parameters do not say which elements of the user's
parameters they hold, so the wrapper answers in their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from shoal._torch import wrapping

WRAPPED = "_fsdp_wrapped_module"
"""The name of the module inside; torch's, as state dicts in the wild have it."""
PREFIX = f"{WRAPPED}."


def clean(name: str) -> str:
    """A name without the levels that sharding, checkpointing and offloading wrappers add."""
    return name.replace(PREFIX, "").replace(wrapping.CHECKPOINT_PREFIX, "")


class WrappedParameter(Protocol):
    """One of the user's parameters that a wrapper shards."""

    @property
    def names(self) -> tuple[str, ...]:
        """Its clean names from the module that was asked; a shared parameter has several."""
        ...

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole parameter."""
        ...

    def empty_rows(self, name: str, dtype: torch.dtype) -> torch.Tensor | None:
        """An uninitialised tensor of its shape over the wrapper's ranks; None if nobody cuts it."""
        ...


class ShardingWrapper(nn.Module):
    """The base class of wrappers."""

    compute_device: torch.device

    @staticmethod
    def _wrapped_parameters(model: nn.Module) -> Sequence[WrappedParameter]:
        """The parameters that wrappers in a model shard."""
        _refuse()

    @staticmethod
    def _parameter_names(model: nn.Module) -> dict[torch.Tensor, tuple[str, ...]]:
        """See the function `parameter_names`."""
        _refuse()

    @staticmethod
    def state_dict_type(
        module: nn.Module,
        state_dict_type: Any,
        state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> AbstractContextManager[None]:
        """Have all wrappers in a module give a kind of state dict, until the block ends."""
        _refuse()

    @staticmethod
    def optim_state_dict(model: nn.Module, optim: Optimizer) -> dict[str, Any]:
        """The state of an optimizer by the names of parameters, in the form that was set for it."""
        _refuse()

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module, optim: Optimizer, optim_state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """A state for `optim.load_state_dict`, made of one that `optim_state_dict` gave."""
        _refuse()


def wrappers_below(module: nn.Module) -> list[ShardingWrapper]:
    """All wrappers in a module, itself included, from the outside in."""
    return [child for child in module.modules() if isinstance(child, ShardingWrapper)]


def parameter_names(model: nn.Module) -> dict[torch.Tensor, tuple[str, ...]]:
    """The clean names of each parameter: one, or those of all that a flat parameter stands for."""
    for wrapper in wrappers_below(model):
        return wrapper._parameter_names(model)
    return {parameter: (clean(path),) for path, parameter in model.named_parameters()}


def _refuse() -> NoReturn:
    raise NotImplementedError("a wrapper has to define this")
