"""The training loop: one run, read top to bottom.

    for each step       save, if the state that it begins with is to be saved
                        forward, backward, gate, optimizer
                        journal, validation
    at the end          save, sample, report

With `--survive` a step that loses a rank is undone and taken again by the others (`shoal.survive`).
Everything that communicates is inside of a step, so that it can be.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from shoal.errors import DivergedError
from shoal.report.metrics import StepRecord, ValidationRecord
from shoal.report.recorded_run import MOST_OTHERS
from shoal.report.throughput import of_rank
from shoal.survive.run import Recovery, SurvivingRun
from shoal.survive.shares import share_in
from shoal.train import environment
from shoal.train.build import BuiltRun, build_run
from shoal.train.checkpoints import CheckpointSaver, RunProgress
from shoal.train.config import TrainConfig
from shoal.train.data import Corpus, sample_offsets, spread_offsets, windows
from shoal.train.environment import Place
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


def train(
    job: TrainJob,
    world: World,
    stop_requested: Callable[[], bool],
    watch: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> bool:
    """Run a job as one of the world's ranks; return whether it came to its last step.

    `watch` makes what watches over the collectives of the groups that there are then.
    """
    watch_all, watch_crew = watch, nullcontext
    if job.config.faults.survive:  # groups come and go, and a watch with them
        watch_all, watch_crew = nullcontext, watch
    with watch_all():
        with watch_crew():
            built = build_run(job, world)
        course = Course(job.config, built.corpus, built.progress)
        crews = Crews(job, world, course, stop_requested, watch_crew, built.notes)
        with _steps(job, built, course, world) as run, crews:
            _run(run, crews, built, course)
    return course.is_finished


def _run(run: _PlainRun | SurvivingRun, crews: Crews, built: BuiltRun, course: Course) -> None:
    for step in run:
        with step:
            crew = crews.present(run)
            if crew.has_to_save:
                run.protect()  # what is saved is never undone
                crew.saver.start(built.model, built.optimizer, course.progress)
            if course.is_over:
                _finish(crew, built)
            else:
                _take(crew, built, step.batch, step.weight)


class Course:
    """How far the run has come, and which samples come next: the same on all ranks."""

    def __init__(self, config: TrainConfig, corpus: Corpus, progress: RunProgress) -> None:
        self.progress = progress
        self._config = config
        self._corpus = corpus
        self._start = progress
        self._end = config.run.steps

    @property
    def start_step(self) -> int:
        """The step that the run began after."""
        return self._start.step

    @property
    def is_over(self) -> bool:
        """Whether no step is to be taken any more."""
        return self.progress.step >= self._end

    @property
    def is_finished(self) -> bool:
        """Whether the last step was taken, and it did not only stop."""
        return self.progress.step >= self._config.run.steps

    def stop(self) -> None:
        """End after the steps so far."""
        self._end = self.progress.step

    def __len__(self) -> int:
        """After the last step comes another one, which takes none: it saves and reports."""
        return self._end + 1

    def __getitem__(self, step: int) -> Tensor:
        """Where the samples begin of the step after so many."""
        run, context = self._config.run, self._config.model.context
        offsets = sample_offsets(
            seed=run.seed,
            seen=self._start.samples + (step - self._start.step) * run.batch_size,
            num=run.batch_size,
            num_bytes=len(self._corpus.training),
            context=context,
        )
        return torch.from_numpy(offsets)

    def state_dict(self) -> dict[str, Any]:
        """What goes back when a step is undone."""
        return {"progress": self.progress, "end": self._end}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go back."""
        self.progress, self._end = state_dict["progress"], state_dict["end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlainStep:
    """A step of a run that ends when a rank dies."""

    batch: Tensor
    weight: float

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class _PlainRun:
    """The steps of such a run."""

    recoveries = ()

    def __init__(self, course: Course, world: World) -> None:
        self._course = course
        self._world = world

    def protect(self) -> None:
        """Nothing is undone."""

    def __iter__(self) -> Iterator[_PlainStep]:
        number = self._course.progress.step
        while number < len(self._course):
            offsets = self._course[number]
            batch, weight = share_in(offsets, self._world.rank, self._world.size)
            yield _PlainStep(batch=batch, weight=weight)
            number += 1


def _steps(
    job: TrainJob, built: BuiltRun, course: Course, world: World
) -> AbstractContextManager[_PlainRun | SurvivingRun]:
    if not job.config.faults.survive:
        return nullcontext(_PlainRun(course, world))
    start = course.progress.step
    return SurvivingRun(built.model, [built.optimizer], course, [course], 1, start)


@dataclass(slots=True, kw_only=True)
class Crew:
    """The ranks that train now, and what they do beside computing."""

    job: TrainJob
    world: World
    course: Course
    saver: CheckpointSaver
    gate: StepGate
    stragglers: Stragglers
    journal: Journal
    profiled: ProfileWindow
    is_new: bool = True
    """Whether it has taken no step yet: the first one compiles."""

    @property
    def has_to_save(self) -> bool:
        """Whether the state that a step begins with is to be saved."""
        step, every = self.course.progress.step, self.job.config.run.save_every
        is_due = self.course.is_over or (every > 0 and step % every == 0)
        return is_due and step > self.course.start_step


class Crews:
    """Keeps one crew at work: when ranks have died or come, the next one."""

    def __init__(
        self,
        job: TrainJob,
        world: World,
        course: Course,
        stop_requested: Callable[[], bool],
        watch: Callable[[], AbstractContextManager[object]],
        notes: Sequence[str],
    ) -> None:
        self._job = job
        self._world = world
        self._course = course
        self._stop_requested = stop_requested
        self._watch = watch
        self._notes = notes
        self._held = ExitStack()
        self._crew: Crew | None = None
        self._num_recoveries = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._held.__exit__(kind, error, trace)

    def present(self, run: _PlainRun | SurvivingRun) -> Crew:
        """The crew of the ranks that there are now; collective if they are others than before."""
        if self._crew is None or len(run.recoveries) > self._num_recoveries:
            if self._crew is not None:
                self._crew.journal.undone()
                self._crew = None
            self._held.close()
            num_before, self._num_recoveries = self._num_recoveries, len(run.recoveries)
            world = _world_of(run, self._world)
            with ExitStack() as held:
                held.enter_context(self._watch())
                self._crew = self._gather(world, held, was_broken=self._num_recoveries > 0)
                self._held = held.pop_all()
            for note in (*self._notes, *map(_note_on, run.recoveries[num_before:])):
                self._crew.journal.note(note)
            self._notes = ()
        return self._crew

    def _gather(self, world: World, held: ExitStack, *, was_broken: bool) -> Crew:
        job, course = self._job, self._course
        saved = job.checkpoint
        saver = CheckpointSaver(job.folder, job.config, world, saved=saved)
        if was_broken:
            saver.take_over()
        if world.leads and was_broken:
            _show_on_terminal()
        gate = StepGate(
            world,
            job.config.faults.on_nonfinite,
            self._stop_requested,
            saver,
            course.progress.scale,
        )
        journal = held.enter_context(_open_journal(job, world, course.progress))
        steps, folder = job.config.run.profiled_steps, job.folder.profile
        profiled = ProfileWindow(steps, folder, world.rank, world.device)
        held.enter_context(closing(profiled))
        return Crew(
            job=job,
            world=world,
            course=course,
            saver=saver,
            gate=gate,
            stragglers=Stragglers(),
            journal=journal,
            profiled=profiled,
        )


def _note_on(recovery: Recovery) -> str:
    seconds = sum(recovery.seconds.values())
    return (
        f"{len(recovery.members)} ranks go on after step {recovery.version}, {seconds:.2f} s after "
        "the others were missed"
    )


def _world_of(run: _PlainRun | SurvivingRun, first: World) -> World:
    if isinstance(run, _PlainRun):
        return first
    place = Place(
        rank=run.rank,
        world_size=run.world_size,
        local_rank=run.rank,
        local_world_size=run.world_size,
    )
    return replace(first, place=place, mesh=run.mesh)


def _show_on_terminal() -> None:
    """Let stdout be what the launcher's is: that of a rank that did not lead was a file."""
    descriptor = environment.terminal()
    if descriptor is not None:
        sys.stdout.flush()
        os.dup2(descriptor, 1)


def _take(crew: Crew, built: BuiltRun, offsets: Tensor, weight: float) -> None:
    """Take one step on this rank's samples, and tell of it."""
    config, course, gate = crew.job.config, crew.course, crew.gate
    run, faults = config.run, config.faults
    step = course.progress.step + 1
    lr = learning_rate(step, run.steps, config.optim)
    set_learning_rate(built.optimizer, lr)
    sequences = windows(built.corpus.training, offsets.numpy(), config.model.context)
    crew.profiled.before(step)
    compiles = crew.is_new and config.parallel.compile != "off"
    news = telling_compilation(crew.journal.note) if compiles else nullcontext()
    crew.is_new = False
    with naming_step(step, built.model), news:
        result = training_step(
            built.model,
            built.optimizer,
            sequences.to(crew.world.device).tensor_split(run.accumulate),
            clip=config.optim.clip,
            accept=partial(gate.admits, step),
            scale=gate.scale.factor,
            weight=weight,
            named=crew.profiled.is_open,
        )
    if (trace := crew.profiled.after(step)) is not None:
        steps = run.profiled_steps
        crew.journal.note(f"the trace of steps {steps[0]} to {steps[-1]} is {trace}")
    course.progress = course.progress.after(config, built.corpus.digest, gate.scale)
    # All ranks read the same reports, so they stop, skip and raise together.
    reports = gate.reports
    if any(report.folder_lost for report in reports):
        crew.saver.give_up()
    record = _record(crew, lr, result, reports)
    crew.journal.step(record, result.actions)
    for note in (*gate.notes, *crew.stragglers.notes(step, reports)):
        crew.journal.note(note)
    if gate.diverged:
        _end_diverged(crew)
    crew.saver.follow({report.save_status for report in reports})
    if run.validate_every and (step % run.validate_every == 0 or step == run.steps):
        loss = _validation_loss(built.model, built.corpus, config, crew.world)
        crew.journal.validation(ValidationRecord(step=step, loss=loss))
    if faults.check_replicas_every and step % faults.check_replicas_every == 0:
        check_replicas(built.model, group=crew.world.replicas)
    if any(report.stop for report in reports):
        course.stop()


def _finish(crew: Crew, built: BuiltRun) -> None:
    """Leave behind what a run leaves, when no step is to be taken any more."""
    job, world, finished = crew.job, crew.world, crew.course.is_finished
    saved = crew.saver.finish()
    crew.journal.note("writing a sample and the report…" if finished else "writing the report…")
    crew.journal.close()
    world.barrier()  # the report shows the timelines of several ranks
    if finished:
        write_sample(job, world, built.model, built.corpus)
    if world.leads:
        assert saved is not None
        print_summary(job, saved, step=crew.course.progress.step, finished=finished)
    world.barrier()  # no rank leaves while another still writes
    if finished and job.config.run.export and world.leads:
        assert saved is not None
        export_trained(job, saved)


def _end_diverged(crew: Crew) -> None:
    """Save nothing more, and say why."""
    saved = crew.saver.finish()
    crew.journal.note("writing the report…")
    crew.journal.close()
    crew.world.barrier()
    if crew.world.leads:
        draw_report(crew.job.folder)
    crew.world.barrier()  # a rank that left now would take the others with it
    raise DivergedError(divergence_advice(crew.gate.diverged, crew.job, saved))


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


def _record(crew: Crew, lr: float, result: StepResult, reports: Sequence[RankReport]) -> StepRecord:
    """Put together what all ranks reported with what this one measured."""
    job, world, progress = crew.job, crew.world, crew.course.progress
    losses = torch.tensor([report.loss for report in reports], dtype=torch.float64)
    tokens = job.config.run.batch_size * job.config.model.context
    tokens_per_s = tokens / result.step_ms * 1e3
    speed = of_rank(
        job.operations_per_token() * tokens_per_s / len(reports) / 1e12,
        torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "",
        job.config.parallel.precision,
    )
    return StepRecord(
        step=progress.step,
        loss=losses.mean().item(),  # each is in proportion to its share of the batch
        lr=lr,
        grad_norm=result.grad_norm,
        tokens=progress.tokens,
        tokens_per_s=tokens_per_s,
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
    mine, weight = share_in(torch.from_numpy(offsets), world.rank, world.size)
    sequences = windows(corpus.validation, mine.numpy(), context).to(world.device)
    parts = sequences.tensor_split(config.run.validation_batches * config.run.accumulate)
    losses = [
        next_token_loss(scores(model, part[:, :-1]), part[:, 1:])
        / (len(sequences) / len(part) / len(parts))
        for part in parts
    ]
    return world.gather([float(torch.stack(losses).mean()) * weight]).mean().item()
