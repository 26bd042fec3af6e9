"""A model worth several GPUs, twice: 85 M parameters, and 0.8 B.

torchrun --nproc-per-node 8 -m shoal train --recipe recipes/gpt.py --data my/texts
torchrun --nproc-per-node 8 -m shoal train --recipe recipes/gpt.py:large --data my/texts
"""

from shoal.train.config import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)


def recipe() -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(dim=768, layers=12, heads=12, context=1024),
        data=DataConfig(max_bytes=1_000_000_000, held_out=0.01),
        optim=OptimConfig(lr=6e-4, warmup=200),
        parallel=ParallelConfig(precision="bf16"),
        run=RunConfig(
            steps=5000,
            batch_size=64,
            validate_every=250,
            validation_batches=4,
            save_every=1000,
            sample_tokens=500,
        ),
    )


def large() -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(dim=2048, layers=16, heads=16, context=2048),
        data=DataConfig(max_bytes=4_000_000_000, held_out=0.005),
        optim=OptimConfig(lr=3e-4, warmup=500),
        parallel=ParallelConfig(precision="bf16", activation_checkpointing=True),
        run=RunConfig(
            steps=20000,
            batch_size=64,
            accumulate=2,
            validate_every=500,
            save_every=1000,
            sample_tokens=500,
        ),
    )
