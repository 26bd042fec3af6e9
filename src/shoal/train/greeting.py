"""What a run says of itself before its first step."""

from __future__ import annotations

from pathlib import Path

from shoal.report.number_format import count, size
from shoal.train.checkpoints import is_complete, newer_than
from shoal.train.config import TrainConfig
from shoal.train.data import Corpus
from shoal.train.job import Job, count_parameters
from shoal.train.state import Progress
from shoal.train.world import World

_NUM_NAMED = 3


def greeting(job: Job, world: World, corpus: Corpus) -> str:
    """Tell the size of everything in one line."""
    parallel = job.config.parallel
    plural = "s" if world.size != 1 else ""
    return (
        f"{job.folder.path}: {count(count_parameters(job.config))} parameters, "
        f"{world.size} rank{plural} on {parallel.device} in {parallel.precision}, "
        f"{size(len(corpus.training))} of text from {corpus.num_files} files"
    )


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


def notes_on_resume(checkpoint: Path, progress: Progress, corpus: Corpus) -> list[str]:
    """Tell from where the run goes on, and what is not as it was."""
    text = f"resumed from {checkpoint} at step {progress.step}"
    if progress.data_digest != corpus.digest:
        text += "; the text has changed since, so the data will differ from an unbroken run's"
    broken = [path.name for path in newer_than(checkpoint) if not is_complete(path)]
    if not broken:
        return [text]
    return [text, f"skipped, since it has no manifest: {', '.join(broken)}; renamed to damaged-…"]
