"""Parameters of modules turned into sharded tensors, one by one or by a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shoal._torch import sharded as torch_sharded
from shoal._torch.sharded import Sharder, ShardingPlan, ShardingSpec
from shoal.doors.sharded_tensor.from_local_shards import all_gather_objects
from shoal.tensor.placement import group_or_default
from shoal.tensor.sharded import ShardedTensor
from shoal.tensor.spec import own_spec


def shard_tensor(
    tensor: Tensor,
    sharding_spec: ShardingSpec,
    src_rank: int = 0,
    process_group: ProcessGroup | None = None,
) -> ShardedTensor:
    """Deal out the tensor of rank `src_rank` of the group, as a spec says: collective.

    One exchange finds out whether all ranks mean the same.
    """
    group = group_or_default(process_group)
    problem: str | None = None
    if not tensor.is_contiguous():
        problem = f"input tensor is not a contiguous Tensor, got strides {tensor.stride()}"
    everyone: list[tuple[int, ShardingSpec, str | None]] = all_gather_objects(
        (src_rank, sharding_spec, problem), group
    )
    if problem is not None:
        raise ValueError(problem)
    for rank, (_, _, text) in enumerate(everyone):
        if text is not None:
            raise ValueError(f"on rank {rank} of the group the {text}")
    here = dist.get_rank(group)
    for name, own, index in (("src_rank", src_rank, 0), ("sharding_spec", sharding_spec, 1)):
        for rank, said in enumerate(everyone):
            if own != said[index]:
                raise ValueError(
                    f"{name}={own} on rank: {here} does not match with {name}={said[index]} on "
                    f"rank: {rank}"
                )
    return own_spec(sharding_spec).shard(  # pyright: ignore[reportReturnType]
        tensor, src_rank=src_rank, process_group=group
    )


def shard_parameter(
    module: nn.Module,
    param_name: str,
    sharding_spec: ShardingSpec,
    src_rank: int = 0,
    process_group: ProcessGroup | None = None,
) -> None:
    """Replace a parameter of a module by a sharded one: collective."""
    if not hasattr(module, param_name):
        raise AttributeError(f"{type(module).__name__} has no attribute `{param_name}`")
    tensor = getattr(module, param_name)
    if not isinstance(tensor, Tensor):
        raise ValueError(
            f"Expected {type(module).__name__}.{param_name} to be a Tensor, but found "
            f"{type(tensor).__name__}"
        )
    sharded = shard_tensor(tensor, sharding_spec, src_rank, process_group)
    module.register_parameter(param_name, nn.Parameter(sharded))


def shard_module(
    module: nn.Module,
    plan: ShardingPlan,
    src_rank: int = 0,
    process_group: ProcessGroup | None = None,
) -> None:
    """Shard the parameters and submodules that a plan names, and treat outputs as it says."""
    sharders = [name for name, how in plan.plan.items() if isinstance(how, Sharder)]
    for name, how in plan.plan.items():
        if isinstance(how, ShardingSpec):
            path, _, param_name = name.rpartition(".")
            _check_no_sharder(name, path, sharders)
            owner = module.get_submodule(path)
            shard_parameter(owner, param_name, how, src_rank, process_group)
        elif isinstance(how, Sharder):
            _replace_submodule(module, name, how)
        else:
            raise TypeError(
                f"Only `ShardingSpec` and `Sharder` are supported to shard '{name}', "
                f"got a {type(how).__name__}"
            )
    for path, spec in (plan.output_plan or {}).items():
        if not isinstance(spec, ShardingSpec):
            raise TypeError(
                f"Only `ShardingSpec` is supported as output_plan for '{path}', "
                f"got a {type(spec).__name__}"
            )
        reshard_output(module.get_submodule(path), spec)
    for path in plan.return_local_tensor or ():
        collect_local_shard(module.get_submodule(path))


def reshard_output(module: nn.Module, resharding_spec: ShardingSpec) -> nn.Module:
    """Let a module reshard its output, where that is a ShardedTensor."""

    def reshard(module: nn.Module, args: Any, output: Any) -> Any:
        return output.reshard(resharding_spec) if isinstance(output, ShardedTensor) else output

    module.register_forward_hook(reshard)
    return module


def collect_local_shard(module: nn.Module) -> nn.Module:
    """Let a module return its output's local tensor, without the dim that chunks leave at 1."""

    def collect(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, ShardedTensor):
            return output
        local, spec = output.local_tensor(), output.sharding_spec()
        if isinstance(spec, torch_sharded.ChunkShardingSpec) and isinstance(spec.dim, int):
            return local.squeeze(spec.dim)
        return local

    module.register_forward_hook(collect)
    return module


def _check_no_sharder(name: str, path: str, sharders: Sequence[str]) -> None:
    for sharder in sharders:
        if path.startswith(sharder):
            raise RuntimeError(
                f"ShardingPlan is in-valid, trying to shard a parameter: {name}, but there's "
                f"already a Sharder entry for module {sharder}, parameter sharding should not "
                "conflict with the submodule tree that a Sharder is working with!"
            )


def _replace_submodule(module: nn.Module, name: str, sharder: Sharder) -> None:
    if name == "":
        raise KeyError("Module path must not be empty for custom sharder!")
    path, _, own_name = name.rpartition(".")
    sharded = sharder.shard(module.get_submodule(name))
    # A sharder may shard the module where it stands, and return something that only keeps the
    # parts: what cannot be called cannot take the place of what is.
    if type(sharded).forward is not nn.Module.forward:
        setattr(module.get_submodule(path), own_name, sharded)
