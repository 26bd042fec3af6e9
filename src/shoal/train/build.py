"""Building the model of a run, sharded over its ranks."""

from __future__ import annotations

import torch

from shoal.runtime.fully_shard import fully_shard
from shoal.runtime.policy import MixedPrecisionPolicy
from shoal.train.config import TrainConfig
from shoal.train.model import Transformer
from shoal.train.world import World


def build_model(config: TrainConfig) -> Transformer:
    """Make the whole model on CPU; the weights come from the seed alone."""
    torch.manual_seed(config.run.seed)
    return Transformer(
        config.model, activation_checkpointing=config.parallel.activation_checkpointing
    )


def shard_model(model: Transformer, config: TrainConfig, world: World) -> Transformer:
    """Shard the model in place: each block is a unit, what remains is another."""
    policy = MixedPrecisionPolicy()
    if config.parallel.precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        # Moved one at a time: a device never holds more than its shards and one whole block.
        fully_shard(block.to(world.device), mesh=world.mesh, mp_policy=policy)
    fully_shard(model.to(world.device), mesh=world.mesh, mp_policy=policy)
    return model
