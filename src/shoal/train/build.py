"""Building the model of a run, sharded over its ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from shoal.doors.fsdp1.fully_sharded import FullyShardedDataParallel
from shoal.runtime.fully_shard import fully_shard
from shoal.runtime.policy import MixedPrecisionPolicy
from shoal.train.config import TrainConfig
from shoal.train.model import Block, Transformer
from shoal.train.world import World

_INNER = {"graph": "direct", "inductor": "inductor"}
_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def build_model(config: TrainConfig) -> Transformer:
    """Make the whole model on CPU; the weights come from the seed alone."""
    torch.manual_seed(config.run.seed)
    return Transformer(
        config.model, activation_checkpointing=config.parallel.activation_checkpointing
    )


def shard_model(model: Transformer, config: TrainConfig, world: World) -> nn.Module:
    """Shard the model with the engine of the run: each block is a unit, the rest is another.

    Blocks are moved one at a time: a device never holds more than its shards and one whole block.
    """
    param_dtype = _HALF.get(config.parallel.precision)
    reduce_dtype = torch.float32 if param_dtype is not None else None
    if config.parallel.engine == "fsdp1-style":
        hybrid = world.mesh.ndim > 1
        strategy = ShardingStrategy.HYBRID_SHARD if hybrid else ShardingStrategy.FULL_SHARD
        return FullyShardedDataParallel(
            model,
            device_mesh=world.mesh,
            sharding_strategy=strategy,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            mixed_precision=MixedPrecision(param_dtype, reduce_dtype),
            device_id=world.device,
            use_orig_params=True,
        )
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype)
    for block in model.blocks:
        fully_shard(block.to(world.device), mesh=world.mesh, mp_policy=policy)
    sharded = fully_shard(model.to(world.device), mesh=world.mesh, mp_policy=policy)
    if config.parallel.compile != "off":
        import shoal.compile  # noqa: F401 - so that torch knows the backend in a source folder

        inner = _INNER[config.parallel.compile]
        sharded.compile(backend="shoal", fullgraph=True, options={"inner": inner})
    return sharded
