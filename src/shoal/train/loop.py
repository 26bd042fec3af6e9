"""The training loop: one run, read top to bottom."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from shoal.errors import DivergedError
from shoal.report.metrics import StepRecord, ValidationRecord
from shoal.report.recorded_run import MOST_OTHERS
from shoal.report.throughput import of_rank
from shoal.train.build import build_run
from shoal.train.checkpoints import CheckpointSaver, RunProgress
from shoal.train.config import TrainConfig
from shoal.train.data import Corpus, sample_offsets, share_of, spread_offsets, windows
from shoal.train.job import TrainJob
from shoal.train.journal import Journal, Listener, MetricsFile, TimelineFile
from shoal.train.model import next_token_loss, scores
from shoal.train.observe.compiling import telling_compilation
from shoal.train.observe.display import make_display
from shoal.train.observe.loggers import TensorBoard, WeightsAndBiases
from shoal.train.observe.profile_window import ProfileWindow
from shoal.train.optimizer import learning_rate, set_learning_rate
from shoal.train.options import to_json
from shoal.train.results import draw_report, export_trained, print_summary, write_sample
from shoal.train.step import StepResult, naming_step, training_step
from shoal.train.step_gate import RankReport, StepGate, Stragglers, divergence_advice
from shoal.train.world import World
from shoal.watch import check_replicas


def train(job: TrainJob, world: World, stop_requested: Callable[[], bool]) -> bool:
    """Run a job as one of the world's ranks; return whether it came to its last step."""
    config, run, faults = job.config, job.config.run, job.config.faults
    built = build_run(job, world)
    corpus, model, optimizer = built.corpus, built.model, built.optimizer
    progress = built.progress
    saver = CheckpointSaver(job.folder, config, world, saved=job.checkpoint)
    gate = StepGate(world, faults.on_nonfinite, stop_requested, saver, progress.scale)
    stragglers = Stragglers()
    profiled = ProfileWindow(run.profiled_steps, job.folder.profile, world.rank, world.device)
    compiles = config.parallel.compile != "off"
    with _open_journal(job, world, progress) as journal, closing(profiled):
        for note in built.notes:
            journal.note(note)
        stopping = False
        while progress.step < run.steps and not stopping:
            step = progress.step + 1
            lr = learning_rate(step, run.steps, config.optim)
            set_learning_rate(optimizer, lr)
            batch = _micro_batches(corpus, config, world, progress)
            profiled.before(step)
            news = telling_compilation(journal.note) if compiles else nullcontext()
            compiles = False
            with naming_step(step, model), news:
                result = training_step(
                    model,
                    optimizer,
                    batch,
                    clip=config.optim.clip,
                    accept=partial(gate.admits, step),
                    scale=gate.scale.factor,
                    named=profiled.is_open,
                )
            if (trace := profiled.after(step)) is not None:
                journal.note(f"the trace of steps {_first_last(run.profiled_steps)} is {trace}")
            progress = progress.after(config, corpus.digest, gate.scale)
            # All ranks read the same reports, so they stop, skip and raise together.
            reports = gate.reports
            stopping = any(report.stop for report in reports)
            if any(report.folder_lost for report in reports):
                saver.give_up()
            journal.step(_record(job, world, progress, lr, result, reports), result.actions)
            for note in (*gate.notes, *stragglers.notes(step, reports)):
                journal.note(note)
            if gate.diverged:
                break  # before anything is saved
            saver.follow({report.save_status for report in reports})

            last = step == run.steps
            if run.validate_every and (step % run.validate_every == 0 or last):
                loss = _validation_loss(model, corpus, config, world)
                journal.validation(ValidationRecord(step=step, loss=loss))
            if faults.check_replicas_every and step % faults.check_replicas_every == 0:
                check_replicas(model, group=world.replicas)
            if last or stopping or (run.save_every and step % run.save_every == 0):
                saver.start(model, optimizer, progress)
        saved = saver.finish()
        finished = not gate.diverged and progress.step == run.steps
        journal.note("writing a sample and the report…" if finished else "writing the report…")
    world.barrier()  # the report shows the timelines of several ranks

    if gate.diverged:
        if world.leads:
            draw_report(job.folder)
        world.barrier()  # a rank that left now would take the others with it
        raise DivergedError(divergence_advice(gate.diverged, job, saved))
    if finished:
        write_sample(job, world, model, corpus)
    if world.leads:
        assert saved is not None
        print_summary(job, saved, step=progress.step, finished=finished)
    world.barrier()  # no rank leaves while another still writes
    if finished and run.export and world.leads:
        assert saved is not None
        export_trained(job, saved)
    return finished


def _first_last(steps: range) -> str:
    return f"{steps[0]} to {steps[-1]}"


def _open_journal(job: TrainJob, world: World, progress: RunProgress) -> Journal:
    """Rank 0 keeps one; of the next ranks only what they did in a step is written down."""
    folder = job.folder
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else ""
    timeline = TimelineFile(folder.timeline_of(world.rank), rank=world.rank, device=device)
    if not world.leads:
        return Journal([timeline] if world.rank <= MOST_OTHERS else [])
    listeners: list[Listener] = [
        MetricsFile(folder.metrics, start_step=progress.step, num_ranks=world.size),
        timeline,
        make_display(start_step=progress.step, num_steps=job.config.run.steps),
    ]
    if job.config.run.tensorboard:
        listeners.append(TensorBoard(folder.tensorboard))
    if job.config.run.wandb:
        listeners.append(WeightsAndBiases(folder.wandb, to_json(job.config)))
    return Journal(listeners)


def _micro_batches(
    corpus: Corpus, config: TrainConfig, world: World, progress: RunProgress
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


def _record(
    job: TrainJob,
    world: World,
    progress: RunProgress,
    lr: float,
    result: StepResult,
    reports: Sequence[RankReport],
) -> StepRecord:
    """Put together what all ranks reported with what this one measured."""
    losses = torch.tensor([report.loss for report in reports], dtype=torch.float64)
    tokens_per_s = result.num_tokens / result.step_ms * 1e3
    speed = of_rank(
        job.operations_per_token() * tokens_per_s / 1e12,
        torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "",
        job.config.parallel.precision,
    )
    return StepRecord(
        step=progress.step,
        loss=losses.mean().item(),  # their shares of the batch are equal
        lr=lr,
        grad_norm=result.grad_norm,
        tokens=progress.tokens,
        tokens_per_s=tokens_per_s * len(reports),
        tflops_per_s=speed.tflops_per_s,
        mfu=math.nan if speed.mfu is None else speed.mfu,
        step_ms=result.step_ms,
        compute_ms=result.compute_ms,
        exposed_ms=result.exposed_ms,
        optimizer_ms=result.optimizer_ms,
        memory_bytes=tuple(int(report.memory_bytes) for report in reports),
        own_ms=tuple(round(report.own_ms, 3) for report in reports),
    )


@torch.no_grad()
def _validation_loss(model: nn.Module, corpus: Corpus, config: TrainConfig, world: World) -> float:
    """Return the mean loss on held-out text over all ranks; the sequences are always the same."""
    context = config.model.context
    offsets = spread_offsets(
        num=config.run.validation_batches * config.run.batch_size,
        num_bytes=len(corpus.validation),
        context=context,
    )
    mine = share_of(offsets, rank=world.rank, world_size=world.size)
    sequences = windows(corpus.validation, mine, context).to(world.device)
    parts = sequences.chunk(config.run.validation_batches * config.run.accumulate)
    losses = [next_token_loss(scores(model, part[:, :-1]), part[:, 1:]) for part in parts]
    return world.gather([float(torch.stack(losses).mean())]).mean().item()
