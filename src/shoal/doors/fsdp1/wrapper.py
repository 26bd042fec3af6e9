"""The base class of the wrapper: the attributes that its methods, in several files, share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy

from shoal.doors.fsdp1.parameters import FlatMembers, UserParameter
from shoal.doors.fsdp1.unit import WrappedUnit
from shoal.sharding_wrapper import ShardingWrapper

if TYPE_CHECKING:
    from shoal.doors.fsdp1.precision import Buffers
    from shoal.doors.fsdp1.root import ForwardOrder


class Wrapper(ShardingWrapper):
    """A module around a module; `FullyShardedDataParallel` is the only kind."""

    sharding_strategy: ShardingStrategy
    process_group: dist.ProcessGroup
    """The ranks that share one copy of the parameters."""
    rank: int
    world_size: int
    cpu_offload: CPUOffload
    mixed_precision: MixedPrecision
    limit_all_gathers: bool
    _use_full_prec_in_eval: bool
    _is_in_full_precision = False
    """Whether it computes so for an evaluation."""
    _have_run = False
    _order: ForwardOrder | None = None
    """The order of the model it belongs to, from its first forward on."""
    _unit: WrappedUnit | None
    """Its parameters; None if it has none."""
    _user_parameters: Sequence[UserParameter] = ()
    """The user's parameters in that unit."""
    _use_orig_params: bool
    _flat_members: FlatMembers | None = None
    """The flat parameter as views, with `use_orig_params=False`."""
    _device_mesh: DeviceMesh | None
    """The mesh that the user gave."""
    _buffers_cast: Buffers
    _ignored_params: set[nn.Parameter]


def wrappers_below(module: nn.Module) -> list[Wrapper]:
    """All wrappers in a module, itself included, from the outside in."""
    return [child for child in module.modules() if isinstance(child, Wrapper)]
