"""Which kind of state dict a wrapper gives and takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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

from shoal.wrapper.base import Wrapper, wrappers_below

_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


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
        """What applies to this wrapper: without shards only whole state dicts make sense."""
        if self._unit is not None and self._unit.transport is None:
            return StateDictType.FULL_STATE_DICT, FullStateDictConfig()
        self._follow_mesh(self._state_dict_config)
        return self._state_dict_type, self._state_dict_config

    def _follow_mesh(self, config: StateDictConfig | OptimStateDictConfig) -> None:
        """Who trains on a mesh is given tensors of that mesh."""
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
