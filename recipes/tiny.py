"""A few seconds of training, to see that everything works: shoal train --recipe recipes/tiny.py"""

from shoal.train.config import ModelConfig, OptimConfig, RunConfig, TrainConfig


def recipe() -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(dim=64, layers=2, heads=2, context=64),
        optim=OptimConfig(lr=5e-3, warmup=5),
        run=RunConfig(steps=40, batch_size=8, validate_every=20, sample_tokens=100),
    )
