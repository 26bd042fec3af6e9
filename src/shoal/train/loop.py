"""The training loop: one run, read top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from torch import Tensor, nn
from torch.optim import AdamW

from shoal.errors import DivergedError
from shoal.report.metrics import StepRecord, ValidationRecord
from shoal.train.build import build_model, shard_model
from shoal.train.config import TrainConfig
from shoal.train.data import Corpus, load_corpus, share_of, windows
from shoal.train.display import make_display
from shoal.train.divergence import advice_after
from shoal.train.finish import conclude, draw_report, write_sample
from shoal.train.greeting import greeting, notes_on_data, notes_on_resume
from shoal.train.job import Job
from shoal.train.journal import Journal, Listener
from shoal.train.metrics import MetricsFile
from shoal.train.optimizer import (
    configure_optimizer,
    learning_rate,
    make_optimizer,
    set_learning_rate,
)
from shoal.train.referee import Referee
from shoal.train.sampler import sample_offsets
from shoal.train.saver import Saver
from shoal.train.scale import LossScale
from shoal.train.seeding import seed_generators
from shoal.train.state import Progress, restore_state
from shoal.train.step import StepResult, training_step
from shoal.train.stragglers import Stragglers
from shoal.train.tensorboard import TensorBoard
from shoal.train.timeline import TimelineFile
from shoal.train.told import Told
from shoal.train.validation import validation_loss
from shoal.train.where import naming_step
from shoal.train.world import World
from shoal.watch import check_replicas


def train(job: Job, world: World, stop_requested: Callable[[], bool]) -> bool:
    """Run a job as one of the world's ranks; return whether it came to its last step."""
    config, run, faults = job.config, job.config.run, job.config.faults
    begun = _begin(job, world)
    corpus, model, optimizer = begun.corpus, begun.model, begun.optimizer
    progress = begun.progress
    saver, stragglers = Saver(job, world), Stragglers()
    referee = Referee(world, faults.on_nonfinite, stop_requested, saver, progress.scale)
    with _open_journal(job, world, progress) as journal:
        for note in begun.notes:
            journal.note(note)
        stopping, diverged = False, ""
        while progress.step < run.steps and not stopping:
            step = progress.step + 1
            lr = learning_rate(step, run.steps, config.optim)
            set_learning_rate(optimizer, lr)
            batch = _micro_batches(corpus, config, world, progress)
            with naming_step(step, model):
                result = training_step(
                    model,
                    optimizer,
                    batch,
                    clip=config.optim.clip,
                    accept=referee.judge(step),
                    scale=referee.scale.factor,
                )
            progress = progress.after(config, corpus.digest, referee.scale)
            # All ranks read the same answers, so they stop, skip and raise together.
            told, stopping = referee.told, referee.told.stopping
            if told.folder_lost:
                saver.give_up()
            journal.step(_record(progress, lr, result, told), result.events)
            for note in (*referee.notes, *stragglers.notes(step, told)):
                journal.note(note)
            diverged = referee.diverged
            if diverged:
                break  # before anything is saved
            saver.follow(told)

            last = step == run.steps
            if run.validate_every and (step % run.validate_every == 0 or last):
                loss = validation_loss(model, corpus, config, world)
                journal.validation(ValidationRecord(step=step, loss=loss))
            if faults.check_replicas_every and step % faults.check_replicas_every == 0:
                check_replicas(model, group=world.replicas)
            if last or stopping or (run.save_every and step % run.save_every == 0):
                saver.start(model, optimizer, progress)
        saved = saver.finish()
        finished = not diverged and progress.step == run.steps
        journal.note("writing a sample and the report…" if finished else "writing the report…")

    if diverged:
        _give_up(job, world, advice_after(diverged, job, saved))
    if finished:
        write_sample(job, world, model, corpus)
    if world.leads:
        assert saved is not None
        conclude(job, saved, step=progress.step, finished=finished)
    world.barrier()  # no rank leaves while another still writes
    return finished


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    """What a run has before its next step."""

    corpus: Corpus
    model: nn.Module
    optimizer: AdamW
    progress: Progress
    notes: tuple[str, ...]


def _begin(job: Job, world: World) -> _Begun:
    """Read the text, build the model, and load the checkpoint that the job starts from."""
    config = job.config
    corpus = load_corpus(config.data, config.model.context)
    world.agree("the text that they read", corpus.digest)
    model = shard_model(build_model(config), config, world)
    seed_generators(config.run.seed, world.rank)  # a checkpoint brings back those of the run
    optimizer = make_optimizer(model, config.optim)
    notes = [greeting(job, world, corpus), *notes_on_data(config, corpus)]
    progress = Progress(scale=LossScale.for_precision(config.parallel.precision))
    if job.checkpoint is not None:
        scale = progress.scale
        progress = restore_state(job.checkpoint, model, optimizer)
        if progress.scale.is_dynamic != scale.is_dynamic:  # it goes on in another precision
            progress = replace(progress, scale=scale)
        configure_optimizer(optimizer, config.optim)
        notes += notes_on_resume(job.checkpoint, progress, corpus)
        if world.leads:
            job.accept(num_ranks=world.size)
    return _Begun(
        corpus=corpus, model=model, optimizer=optimizer, progress=progress, notes=tuple(notes)
    )


def _give_up(job: Job, world: World, message: str) -> NoReturn:
    if world.leads:
        draw_report(job.folder)
    world.barrier()  # a rank that left now would take the others with it
    raise DivergedError(message)


def _micro_batches(
    corpus: Corpus, config: TrainConfig, world: World, progress: Progress
) -> Sequence[Tensor]:
    """Return this rank's share of the next global batch, in as many parts as accumulate."""
    context = config.model.context
    offsets = sample_offsets(
        seed=config.run.seed,
        seen=progress.samples,
        num=config.run.batch_size,
        num_bytes=len(corpus.training),
        context=context,
    )
    mine = share_of(offsets, rank=world.rank, world_size=world.size)
    sequences = windows(corpus.training, mine, context).to(world.device)
    return sequences.chunk(config.run.accumulate)


def _record(progress: Progress, lr: float, result: StepResult, told: Told) -> StepRecord:
    """Put together what all ranks told with what this one measured."""
    return StepRecord(
        step=progress.step,
        loss=told.loss,
        lr=lr,
        grad_norm=result.grad_norm,
        tokens=progress.tokens,
        tokens_per_s=result.num_tokens * len(told.words) / result.step_ms * 1e3,
        step_ms=result.step_ms,
        compute_ms=result.compute_ms,
        exposed_ms=result.exposed_ms,
        optimizer_ms=result.optimizer_ms,
        memory_bytes=tuple(int(word.memory_bytes) for word in told.words),
        own_ms=tuple(round(word.own_ms, 3) for word in told.words),
    )


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
