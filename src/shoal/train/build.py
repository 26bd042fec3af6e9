"""Building a run: its text, its model sharded over the ranks, its optimizer, and where it starts.

The result also has the lines that a run shows before its first step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import Optimizer

from shoal.doors.fsdp1.fully_sharded import FullyShardedDataParallel
from shoal.report.number_format import count
from shoal.runtime.fully_shard import fully_shard
from shoal.runtime.policy import MixedPrecisionPolicy
from shoal.train.checkpoints import RunProgress, is_complete, newer_than, restore_state
from shoal.train.config import TrainConfig
from shoal.train.data import Corpus
from shoal.train.hugging_face.adapters import add_adapters
from shoal.train.hugging_face.materialise import materialise
from shoal.train.hugging_face.models import (
    build_skeleton,
    decoder_blocks,
    read_model_config,
    recompute,
    units_of,
    weights_folder,
)
from shoal.train.hugging_face.stored_weights import opened_weights
from shoal.train.job import TrainJob
from shoal.train.model import Transformer, TransformerBlock
from shoal.train.optimizer import LossScale, configure_optimizer, make_optimizer
from shoal.train.world import World

_INNER = {"graph": "direct", "inductor": "inductor"}
_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NUM_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltRun:
    """A run before its next step; `notes` are for people."""

    corpus: Corpus
    model: nn.Module
    optimizer: Optimizer
    progress: RunProgress
    notes: tuple[str, ...]


def build_run(job: TrainJob, world: World) -> BuiltRun:
    """Read the text, build the model, and load the checkpoint that the job starts from."""
    config = job.config
    corpus = job.load_corpus()
    world.check_same("the text that they read", corpus.digest)
    model, blocks = _sharded_model(job, world)
    seed_generators(config.run.seed, world.rank)  # a checkpoint brings back those of the run
    optimizer = make_optimizer(model, config.optim, blocks=blocks, mesh=world.mesh)
    notes = [_size_note(job, world, corpus), *notes_on_data(config, corpus)]
    if config.model.lora is not None:
        notes.append(_adapters_note(model))
    progress = RunProgress(scale=LossScale.for_precision(config.parallel.precision))
    if job.checkpoint is not None:
        scale = progress.scale
        progress = restore_state(job.checkpoint, model, optimizer)
        if progress.scale.is_dynamic != scale.is_dynamic:  # it goes on in another precision
            progress = replace(progress, scale=scale)
        configure_optimizer(optimizer, config.optim)
        notes += notes_on_resume(job.checkpoint, progress, corpus)
        if world.leads:
            job.commit_resume(num_ranks=world.size)
    return BuiltRun(
        corpus=corpus, model=model, optimizer=optimizer, progress=progress, notes=tuple(notes)
    )


def _sharded_model(job: TrainJob, world: World) -> tuple[nn.Module, list[nn.Module]]:
    """The model of the run, and its blocks."""
    config = job.config
    if config.model.source is None:
        plain = build_model(config)
        return shard_model(plain, config, world), list(plain.blocks)
    skeleton = build_skeleton(read_model_config(job.model_config))
    blocks = decoder_blocks(skeleton)
    if config.model.lora is not None:
        add_adapters(skeleton, blocks, config.model)
    if config.parallel.activation_checkpointing:
        recompute(blocks)
    # What a checkpoint brings need not be drawn before.
    starts = job.checkpoint is None
    folder = weights_folder(config.model.source) if starts else None
    with opened_weights(folder, skeleton) as weights:
        seed = config.run.seed if starts else None
        units = units_of(skeleton)
        fill = partial(materialise, skeleton, units, weights=weights, seed=seed)
        return _shard(skeleton, units, fill, config, world), blocks


def build_model(config: TrainConfig) -> Transformer:
    """Make the whole model on CPU; the weights come from the seed alone."""
    torch.manual_seed(config.run.seed)
    return Transformer(
        config.model, activation_checkpointing=config.parallel.activation_checkpointing
    )


def shard_model(model: Transformer, config: TrainConfig, world: World) -> nn.Module:
    """Shard the demo's model with the engine of the run: each block is a unit, the rest is another.

    Blocks are moved one at a time: a device never holds more than its shards and one whole block.
    """
    param_dtype, reduce_dtype = _dtypes(config)
    if config.parallel.engine == "fsdp1-style":
        hybrid = world.mesh.ndim > 1
        strategy = ShardingStrategy.HYBRID_SHARD if hybrid else ShardingStrategy.FULL_SHARD
        return FullyShardedDataParallel(
            model,
            device_mesh=world.mesh,
            sharding_strategy=strategy,
            auto_wrap_policy=ModuleWrapPolicy({TransformerBlock}),
            mixed_precision=MixedPrecision(param_dtype, reduce_dtype),
            device_id=world.device,
            use_orig_params=True,
        )
    return _shard(model, list(model.blocks), lambda unit: None, config, world)


def _shard(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    fill: Callable[[nn.Module], None],
    config: TrainConfig,
    world: World,
) -> nn.Module:
    """Make a unit of each block and one of the rest; `fill` gives a unit its values before."""
    policy = MixedPrecisionPolicy(*_dtypes(config))
    for unit in (*blocks, model):
        fill(unit)
        fully_shard(unit.to(world.device), mesh=world.mesh, mp_policy=policy)
    if config.parallel.compile != "off":
        import shoal.compile  # noqa: F401 - so that torch knows the backend in a source folder

        inner = _INNER[config.parallel.compile]
        model.compile(backend="shoal", fullgraph=True, options={"inner": inner})
    return model


def _dtypes(config: TrainConfig) -> tuple[torch.dtype | None, torch.dtype | None]:
    """Tell the dtypes of compute and of reductions; None for what the weights have."""
    param_dtype = _HALF.get(config.parallel.precision)
    return param_dtype, torch.float32 if param_dtype is not None else None


def seed_generators(seed: int, rank: int) -> None:
    """Give every generator of this rank a state of its own, from the seed of the run."""
    for_torch, for_python, for_numpy = (
        int(np.random.SeedSequence([seed, rank, number]).generate_state(1, dtype=np.uint64)[0])
        for number in range(3)
    )
    torch.manual_seed(for_torch)
    random.seed(for_python)
    np.random.seed(for_numpy % 2**32)


def _size_note(job: TrainJob, world: World, corpus: Corpus) -> str:
    """Tell the size of everything in one line."""
    parallel = job.config.parallel
    plural = "s" if world.size != 1 else ""
    return (
        f"{job.folder.path}: {count(job.model_facts().num_parameters)} parameters, "
        f"{world.size} rank{plural} on {parallel.device} in {parallel.precision}, "
        f"{corpus.content}"
    )


def _adapters_note(model: nn.Module) -> str:
    """Tell how many parameters train."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    trained = sum(numel for numel, trains in sizes if trains)
    return f"{count(trained)} parameters of the adapters train; all others are frozen"


def notes_on_data(config: TrainConfig, corpus: Corpus) -> list[str]:
    """Name files that someone may have meant to be learned."""
    if config.data.folder is None or not corpus.skipped:
        return []
    names = ", ".join(corpus.skipped[:_NUM_NAMED])
    more = ", …" if len(corpus.skipped) > _NUM_NAMED else ""
    plural = "s" if len(corpus.skipped) > 1 else ""
    return [
        f"left out {len(corpus.skipped)} file{plural}, unreadable or no UTF-8 text: {names}{more}"
    ]


def notes_on_resume(checkpoint: Path, progress: RunProgress, corpus: Corpus) -> list[str]:
    """Tell from where the run goes on, and what is not as it was."""
    text = f"resumed from {checkpoint} at step {progress.step}"
    if progress.data_digest != corpus.digest:
        text += "; the text has changed since, so the data will differ from an unbroken run's"
    broken = [path.name for path in newer_than(checkpoint) if not is_complete(path)]
    if not broken:
        return [text]
    return [text, f"skipped, since it has no manifest: {', '.join(broken)}; renamed to damaged-…"]
