"""torchtitan: `use_shoal(config)` lets its trainer shard by shoal's `fully_shard`.

A config names the function that parallelises its model, `model_spec.parallelize_fn`. It calls
torch's `fully_shard`, itself or by other functions of torchtitan. `use_shoal` puts a copy in its
place: the same code, in which that one name means shoal's function. torchtitan and torch stay as
they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import torch.distributed.fsdp

from shoal.errors import UsageError
from shoal.integrations.frameworks import require
from shoal.runtime.fully_shard import fully_shard

require("torchtitan", (0, 3), "titan")

__all__ = ["use_shoal"]

_THEIRS = torch.distributed.fsdp.fully_shard


def use_shoal(config: Any) -> Any:
    """Return a `Trainer.Config` of torchtitan whose model is sharded by shoal's `fully_shard`.

    Call it in a function of a config registry of your own:

    def llama3_8b():
        return use_shoal(torchtitan.models.llama3.config_registry.llama3_8b())

    and start it as always: `torchrun ... -m torchtitan.train --module my_configs --config
    llama3_8b`. All else, units, precision, checkpoints, is what the config and torchtitan say.
    """
    spec = getattr(config, "model_spec", None)
    function = getattr(spec, "parallelize_fn", None)
    if spec is None or not isinstance(function, FunctionType):
        raise UsageError(
            f"use_shoal expects a Trainer.Config of torchtitan with a model_spec, got a "
            f"{type(config).__name__}: call it on what a function of a config_registry returns"
        )
    if getattr(getattr(config, "parallelism", None), "enable_fsdp_symm_mem", False):
        raise NotImplementedError(
            "shoal: enable_fsdp_symm_mem of torchtitan is not supported; leave it off"
        )
    ours = _Copies().of(function)
    if ours is function and not _is_copy(function):
        raise UsageError(
            f"{function.__module__}.{function.__name__} never calls torch's fully_shard by a "
            f"global name, so there is nothing to replace: model_spec {spec.name!r} is sharded "
            "in another way"
        )
    return dataclasses.replace(config, model_spec=dataclasses.replace(spec, parallelize_fn=ours))


class _Copies:
    """Copies of the functions that lead to torch's `fully_shard`; all others are left alone."""

    def __init__(self) -> None:
        self._made: dict[FunctionType, FunctionType] = {}

    def of(self, function: FunctionType) -> FunctionType:
        """The function's copy, or the function if nothing in it would differ."""
        if function in self._made:
            return self._made[function]
        self._made[function] = function  # those that call each other end here
        changed: dict[str, object] = {}
        for name in set(_names_in(function.__code__)):
            value = function.__globals__.get(name)
            if value is _THEIRS:
                changed[name] = fully_shard
            elif isinstance(value, FunctionType) and _is_near(value, function):
                copy = self.of(value)
                if copy is not value:
                    changed[name] = copy
        if changed:
            copy = FunctionType(
                function.__code__,
                {**function.__globals__, **changed},
                function.__name__,
                function.__defaults__,
                function.__closure__,
            )
            copy.__kwdefaults__ = function.__kwdefaults__
            copy.__dict__.update(function.__dict__)
            copy.__doc__ = function.__doc__
            self._made[function] = copy
        return self._made[function]


def _is_near(value: FunctionType, caller: FunctionType) -> bool:
    """Whether a function is torchtitan's, or of the package that calls it."""
    packages = {"torchtitan", caller.__module__.partition(".")[0]}
    return value.__module__.partition(".")[0] in packages


def _is_copy(function: FunctionType) -> bool:
    """Whether the config went through `use_shoal` before."""
    values = function.__globals__.values()
    return any(
        value is fully_shard or (isinstance(value, FunctionType) and _calls_ours(value))
        for value in values
    )


def _calls_ours(function: FunctionType) -> bool:
    return any(
        function.__globals__.get(name) is fully_shard for name in _names_in(function.__code__)
    )


def _names_in(code: CodeType) -> Iterator[str]:
    """The names that code looks up, that of functions inside of it too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
