"""A sharded module's state under the names that torch's own has, for code that reaches for it.

`fully_shard.state(module)` and `module._get_fsdp_state()` answer with it. Such code asks to get
ready before the first forward (`_lazy_init`), who is the root, and which parameters a module
manages; torch's pipelines end a step by it (`post_backward`, then the root's final callback). The
rest of torch's state is its engine's, which is not there.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from shoal.mesh import DataParallelMeshInfo
from shoal.runtime.module_state import ModuleState, context_of, state_of
from shoal.runtime.shards import Member
from shoal.runtime.unit import Unit


@dataclass(frozen=True, slots=True)
class ManagedParameter:
    """One parameter of a unit."""

    _unit: Unit
    _member: Member

    @property
    def sharded_param(self) -> nn.Parameter:
        """The parameter while it is sharded."""
        return self._member.sharded

    @property
    def _param_fqn(self) -> str:
        return self._unit.qualified(self._member.spec.name)


@dataclass(frozen=True, slots=True)
class ManagedParameters:
    """The parameters of one unit."""

    _unit: Unit

    @property
    def fsdp_params(self) -> list[ManagedParameter]:
        """Each of them."""
        return [ManagedParameter(self._unit, member) for member in self._unit.shards.members]

    @property
    def mesh_info(self) -> DataParallelMeshInfo:
        """Over which ranks they are sharded or replicated."""
        return self._unit.mesh_info

    def post_backward(self) -> None:
        """Accepted: the root's final callback, which follows, reduces all units in one order."""

    @property
    def _module_fqn(self) -> str:
        return self._unit.qualified("")


@dataclass(frozen=True, slots=True)
class StateOfModel:
    """What the modules of one model share."""

    all_states: list[TorchState]


@dataclass(frozen=True, slots=True)
class TorchState:
    """What torch would call the FSDP state of a module."""

    _state: ModuleState

    @property
    def _is_root(self) -> bool:
        return self._state.is_root

    @property
    def _state_ctx(self) -> StateOfModel:
        module = self._state.modules[0]
        below = dict.fromkeys(state for m in module.modules() if (state := state_of(m)) is not None)
        return StateOfModel([TorchState(state) for state in below])

    @property
    def _fsdp_param_groups(self) -> list[ManagedParameters]:
        return [ManagedParameters(unit) for unit in self._state.units]

    @property
    def _fsdp_param_group(self) -> ManagedParameters | None:
        groups = self._fsdp_param_groups
        return groups[0] if groups else None

    def _root_post_backward_final_callback(self) -> None:
        """Reduce the gradients of all micro-batches; free the parameters."""
        context = self._state.context
        if context is not None:
            context.finish()

    def _lazy_init(self) -> None:
        """Get ready, with this module as the root; the first forward does the same."""
        context_of(self._state.modules[0], self._state)


def torch_state(module: nn.Module) -> TorchState | None:
    """The state of a module, if it was given to `fully_shard`."""
    state = state_of(module)
    return None if state is None else TorchState(state)
