"""The loss on held-out text."""

from __future__ import annotations

import torch
from torch import nn

from shoal.train.config import TrainConfig
from shoal.train.data import Corpus, share_of, spread_offsets, windows
from shoal.train.model import next_byte_loss
from shoal.train.world import World


@torch.no_grad()
def validation_loss(model: nn.Module, corpus: Corpus, config: TrainConfig, world: World) -> float:
    """Return the mean over all ranks; the sequences are the same at every call."""
    context = config.model.context
    offsets = spread_offsets(
        num=config.run.validation_batches * config.run.batch_size,
        num_bytes=len(corpus.validation),
        context=context,
    )
    mine = share_of(offsets, rank=world.rank, world_size=world.size)
    sequences = windows(corpus.validation, mine, context).to(world.device)
    parts = sequences.chunk(config.run.validation_batches * config.run.accumulate)
    losses = [next_byte_loss(model(part[:, :-1]), part[:, 1:]) for part in parts]
    return world.gather([float(torch.stack(losses).mean())]).mean().item()
