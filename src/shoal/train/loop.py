"""The training loop: one run, read top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import DivergedError
from shoal.report.metrics import StepRecord, ValidationRecord
from shoal.train.build import build_model, shard_model
from shoal.train.checkpoints import drop_old_checkpoints
from shoal.train.config import TrainConfig
from shoal.train.data import Corpus, draw_offsets, load_corpus, share_of, windows
from shoal.train.display import make_display
from shoal.train.divergence import advice_after, divergence
from shoal.train.finish import conclude, draw_report, write_sample
from shoal.train.greeting import greeting, notes_on_data, notes_on_resume
from shoal.train.job import Job
from shoal.train.journal import Journal, Listener
from shoal.train.memory import memory_bytes
from shoal.train.metrics import MetricsFile
from shoal.train.optimizer import (
    configure_optimizer,
    learning_rate,
    make_optimizer,
    set_learning_rate,
)
from shoal.train.state import Progress, restore_state, save_state
from shoal.train.step import StepResult, training_step
from shoal.train.tensorboard import TensorBoard
from shoal.train.timeline import TimelineFile
from shoal.train.validation import validation_loss
from shoal.train.world import World


def train(job: Job, world: World, stop_requested: Callable[[], bool]) -> bool:
    """Run a job as one of the world's ranks; return whether it came to its last step."""
    config, run = job.config, job.config.run
    corpus = load_corpus(config.data, config.model.context)
    world.agree("the text that they read", corpus.digest)
    model = shard_model(build_model(config), config, world)
    optimizer = make_optimizer(model, config.optim)
    notes = [greeting(job, world, corpus), *notes_on_data(config, corpus)]
    progress = Progress()
    if job.checkpoint is not None:
        progress = restore_state(job.checkpoint, model, optimizer)
        configure_optimizer(optimizer, config.optim)
        notes += notes_on_resume(job.checkpoint, progress, corpus)
        if world.leads:
            job.accept(num_ranks=world.size)

    with _open_journal(job, world, progress) as journal:
        for note in notes:
            journal.note(note)
        saved, stopping, diverged = job.checkpoint, False, ""
        while progress.step < run.steps and not stopping:
            step = progress.step + 1
            lr = learning_rate(step, run.steps, config.optim)
            set_learning_rate(optimizer, lr)
            batch = _micro_batches(corpus, config, world, step)
            result = training_step(model, optimizer, batch, clip=config.optim.clip)

            progress = Progress(
                step=step,
                tokens=progress.tokens + run.batch_size * config.model.context,
                data_digest=corpus.digest,
            )
            # One exchange tells the mean loss, everyone's memory, and whether anyone was asked
            # to stop; all ranks read the same answer, so they leave the loop together.
            told = world.gather([result.loss, memory_bytes(world.device), stop_requested()])
            stopping = bool(told[:, 2].any())
            record = _record(progress, lr, result, told)
            journal.step(record, result.events)
            diverged = divergence(record, told[:, 0].tolist())
            if diverged:
                break  # all ranks alike, before anything is saved

            last = step == run.steps
            if run.validate_every and (step % run.validate_every == 0 or last):
                loss = validation_loss(model, corpus, config, world)
                journal.validation(ValidationRecord(step=step, loss=loss))
            if last or stopping or (run.save_every and step % run.save_every == 0):
                saved = _save(job, world, model, optimizer, progress)
        finished = not diverged and progress.step == run.steps
        journal.note("writing a sample and the report…" if finished else "writing the report…")

    if diverged:
        _give_up(job, world, diverged, saved)
    if finished:
        write_sample(job, world, model, corpus)
    if world.leads:
        assert saved is not None
        conclude(job, saved, step=progress.step, finished=finished)
    world.barrier()  # no rank leaves while another still writes
    return finished


def _give_up(job: Job, world: World, diverged: str, saved: Path | None) -> NoReturn:
    if world.leads:
        draw_report(job.folder)
    world.barrier()  # a rank that left now would take the others with it
    raise DivergedError(advice_after(diverged, job, saved))


def _micro_batches(
    corpus: Corpus, config: TrainConfig, world: World, step: int
) -> Sequence[Tensor]:
    """Return this rank's share of a step's global batch, in as many parts as accumulate."""
    context = config.model.context
    offsets = draw_offsets(
        seed=config.run.seed,
        step=step,
        batch_size=config.run.batch_size,
        num_bytes=len(corpus.training),
        context=context,
    )
    mine = share_of(offsets, rank=world.rank, world_size=world.size)
    sequences = windows(corpus.training, mine, context).to(world.device)
    return sequences.chunk(config.run.accumulate)


def _record(progress: Progress, lr: float, result: StepResult, told: Tensor) -> StepRecord:
    """Put together what all ranks told with what this one measured."""
    return StepRecord(
        step=progress.step,
        loss=told[:, 0].mean().item(),
        lr=lr,
        grad_norm=result.grad_norm,
        tokens=progress.tokens,
        tokens_per_s=result.num_tokens * len(told) / result.step_ms * 1e3,
        step_ms=result.step_ms,
        compute_ms=result.compute_ms,
        exposed_ms=result.exposed_ms,
        optimizer_ms=result.optimizer_ms,
        memory_bytes=tuple(int(value) for value in told[:, 1].tolist()),
    )


def _save(
    job: Job, world: World, model: nn.Module, optimizer: Optimizer, progress: Progress
) -> Path:
    folder = save_state(job.folder.checkpoints, model, optimizer, progress)
    if world.leads:
        drop_old_checkpoints(job.folder.checkpoints, job.config.run.keep)
    return folder


def _open_journal(job: Job, world: World, progress: Progress) -> Journal:
    """Only rank 0 keeps one; the others' has no listeners."""
    if not world.leads:
        return Journal([])
    folder = job.folder
    listeners: list[Listener] = [
        MetricsFile(folder.metrics, start_step=progress.step, num_ranks=world.size),
        TimelineFile(folder.timeline),
        make_display(start_step=progress.step, num_steps=job.config.run.steps),
    ]
    if job.config.run.tensorboard:
        listeners.append(TensorBoard(folder.tensorboard))
    return Journal(listeners)
