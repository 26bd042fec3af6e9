"""A job: a run that has been checked as far as one process can, ready for its ranks."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch

from shoal.checkpoint import drop_unfinished, latest
from shoal.checkpoint.disk import disk_errors
from shoal.checkpoint.retention import LINK
from shoal.errors import CheckpointError, UsageError
from shoal.files import check_folder
from shoal.report.number_format import count, size
from shoal.train import environment
from shoal.train.checkpoints import (
    is_complete,
    newer_than,
    read_progress,
    read_saved_config,
    remove_newer,
    step_of,
)
from shoal.train.config import ModelConfig, TrainConfig
from shoal.train.data import Corpus, load_corpus, split_corpus
from shoal.train.hugging_face.adapters import add_adapters
from shoal.train.hugging_face.models import (
    CONFIG,
    build_skeleton,
    config_file,
    decoder_blocks,
    read_model_config,
    weights_folder,
)
from shoal.train.hugging_face.stored_weights import opened_weights
from shoal.train.model_facts import ModelFacts, demo_facts, facts_of_config
from shoal.train.options import options_of, replace_options
from shoal.train.run_folder import RunFolder
from shoal.train.text.documents import find_source, has_tables
from shoal.train.text.token_file import TokenFile, token_file
from shoal.train.text.tokenizer import Tokenizer, is_tokenizer, load_tokenizer, tokenizer_files
from shoal.version import __version__

_CPU_RANKS = 2
_BYTES_PER_NUMBER = 4
_STATE_COPIES = 4
"""Weights, gradients and AdamW's two moments."""

_SWAP_FACTOR = 2
"""A run that needs more than this many times the memory is refused: swap may do some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """A config in which nothing is left to be chosen, its folder, and where it starts from."""

    config: TrainConfig
    folder: RunFolder
    checkpoint: Path | None

    @property
    def num_ranks(self) -> int:
        """How many ranks the launcher starts."""
        assert self.config.parallel.nproc is not None, "a job has a resolved config"
        return self.config.parallel.nproc

    @property
    def model_config(self) -> Path:
        """The config of a model of `transformers`: the copy in the run folder, once it is there."""
        assert self.config.model.source is not None, "only such a model has a config of its own"
        copy = self.folder.model / CONFIG
        return copy if copy.exists() else config_file(self.config.model.source)

    @property
    def tokenizer_folder(self) -> Path | None:
        """The folder of the tokenizer: the copy in the run folder, once it is there."""
        if self.config.model.tokenizer is None:
            return None
        return self.folder.model if is_tokenizer(self.folder.model) else self.config.model.tokenizer

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the run."""
        return load_tokenizer(self.tokenizer_folder)

    def load_corpus(self) -> Corpus:
        """Return the text of the run, once `make_tokens` has run where it is needed."""
        data, context = self.config.data, self.config.model.context
        file = self._token_file()
        if file is None:
            return load_corpus(data, context)
        tokens, info = file.read()
        return split_corpus(
            tokens,
            where=f"--data: {file.data} has",
            held_out=data.held_out,
            context=context,
            content=f"{count(info.tokens)} tokens of {info.documents:,} documents",
            skipped=info.skipped,
            digest=info.digest,
        )

    def make_tokens(self) -> Iterator[str]:
        """Write the run's text as tokens, unless it is there; yield how far it is; one rank does.

        Raises a `UsageError` if the text cannot be read, or is too short.
        """
        file = self._token_file()
        if file is None:
            return
        is_new = not file.exists
        if is_new:
            yield from file.make(self.tokenizer())
        try:
            self.load_corpus()
        except UsageError:
            if is_new:  # too short for this run: nothing of it stays
                file.remove()
            raise

    def _token_file(self) -> TokenFile | None:
        """Name the run's token file; None if its text is read into memory, byte by byte."""
        data = self.config.data
        if data.folder is None or not _needs_tokens(self.config):
            return None
        return token_file(
            self.config.run.out,
            data.folder,
            self.tokenizer(),
            key=data.text_key,
            max_bytes=data.max_bytes,
        )

    @classmethod
    def reopen(cls, folder: RunFolder, checkpoint: Path | None) -> TrainJob:
        """Read back what `create` has written: how a launched rank learns its job."""
        config = folder.read_config(proposed=folder.proposed_config.exists())
        return cls(config=config, folder=folder, checkpoint=checkpoint)

    def check_machine(self, *, num_ranks: int, num_local_ranks: int) -> None:
        """Raise a `UsageError` if the job cannot run on so many ranks, so many of them here."""
        check_devices(self.config, num_local_ranks)
        self.config.check_ranks(num_ranks)
        facts = self.model_facts()
        check_text_fits(self.config, facts, self.tokenizer().size)
        check_memory(self.config, facts, num_ranks=num_ranks, num_local_ranks=num_local_ranks)
        if self.config.model.source is not None and self.checkpoint is None:
            check_parts(self.config.model, self.model_config)

    def model_facts(self) -> ModelFacts:
        """What there is to know of the model before it is made."""
        if self.config.model.source is None:
            return demo_facts(self.config.model)
        return facts_of_config(self.model_config)

    def operations_per_token(self) -> float:
        """How many floating-point operations a token of training costs."""
        model = self.config.model
        return self.model_facts().operations_per_token(
            model.context, is_frozen=model.lora is not None
        )

    def after_restart(self) -> TrainJob:
        """Go on from the newest whole checkpoint, since ranks were lost; one rank calls this.

        Unless not even the checkpoint that this job was to start from had been loaded: then newer
        ones, if there are any, are about to be given up.
        """
        drop_unfinished(self.folder.checkpoints)
        if self.checkpoint is not None and self.folder.proposed_config.exists():
            return self
        newest = latest(self.folder.checkpoints)
        return dataclasses.replace(self, checkpoint=newest or self.checkpoint)

    def create(self, *, num_ranks: int) -> None:
        """Make the run folder, or take over the one that is resumed, and write the config."""
        if self.checkpoint is None:
            self.folder.create()
            if self.config.model.source is not None:
                files = tokenizer_files(self.config.model.tokenizer)
                generation = self.model_config.with_name("generation_config.json")
                if generation.is_file():
                    files.append(generation)
                self.folder.keep_model(self.model_config, files)
        else:
            self.folder.take_over()
            if not os.path.lexists(self.folder.config):  # or the folder would pass for removed
                saved = read_saved_config(self.checkpoint)
                self.folder.write_config(saved, self._facts(num_ranks))
        # A resume that fails shall not change how the run is configured.
        proposed = self.checkpoint is not None
        self.folder.write_config(self.config, self._facts(num_ranks), proposed=proposed)

    def commit_resume(self, *, num_ranks: int) -> None:
        """Go on from the checkpoint for good, now that the ranks have loaded it."""
        assert self.checkpoint is not None, "a new run has its config already"
        remove_newer(self.checkpoint)
        self.folder.write_config(self.config, self._facts(num_ranks))
        self.folder.proposed_config.unlink(missing_ok=True)

    def _facts(self, num_ranks: int) -> dict[str, object]:
        return {
            "num_parameters": self.model_facts().num_parameters,
            "num_ranks": num_ranks,
            "operations_per_token": self.operations_per_token(),
            "job": environment.job_id(),
            "shoal": __version__,
            "torch": torch.__version__,
            "started": datetime.now().astimezone().isoformat(" ", "seconds"),
            "host": socket.gethostname(),
            "command": shlex.join(["shoal", *sys.argv[1:]]),
        }


def new_job(config: TrainConfig, *, overwrite: bool) -> TrainJob:
    """Check a config that starts a new run."""
    if config.model.source is not None:
        weights_folder(config.model.source)
        # Absolute, so that a restart from another folder finds the same weights.
        file = config_file(config.model.source).absolute()
        is_file = Path(config.model.source.removeprefix("hf:")).is_file()
        source = f"hf:{file if is_file else file.parent}"
        tokenizer = config.model.tokenizer or (file.parent if not is_file else None)
        if tokenizer is not None and (config.model.tokenizer or is_tokenizer(tokenizer)):
            tokenizer = tokenizer.absolute()
        else:
            tokenizer = None
        config = replace_options(
            config, {("model", "source"): source, ("model", "tokenizer"): tokenizer}
        )
        if tokenizer is not None and config.data.folder is None:
            raise UsageError(
                "--model with a tokenizer needs --data: a file or folder of text, JSONL or "
                "Parquet, or a dataset of Hugging Face"
            )
    if config.run.name is None:
        name = datetime.now().strftime("%Y-%m-%d-%H%M%S")
        config = replace_options(config, {("run", "name"): name})
    config = _resolve(config)
    assert config.run.name is not None
    folder = RunFolder(config.run.out / config.run.name)
    folder.check_free(overwrite=overwrite)
    source = config.model.source
    if source is not None and Path(source.removeprefix("hf:")).is_relative_to(
        folder.path.absolute()
    ):
        raise UsageError(
            f"--overwrite would remove {folder.path}, in which the model of --model lies; choose "
            "another --name"
        )
    return TrainJob(config=config, folder=folder, checkpoint=None)


def resumed_job(
    path: Path,
    changes: Mapping[tuple[str, ...], object],
    *,
    more_steps: int | None,
    overwrite: bool = False,
) -> TrainJob:
    """Check a run that goes on, with some options changed.

    `path` is the run folder, for its newest checkpoint, or one of its checkpoints; newer ones
    than that are given up with `overwrite` only.
    """
    folder, checkpoint = _resume_point(path)
    folder.check_unused()
    _check_changes(changes)
    config = _config_of(folder, checkpoint)
    if checkpoint is None:
        if overwrite:
            raise UsageError(
                "--overwrite with --resume gives up newer checkpoints, so it needs to know from "
                f"which to go on: --resume {folder.checkpoints}/step-N"
            )
        checkpoint = latest(folder.checkpoints)
    elif not overwrite:
        _check_newest(checkpoint)
    if checkpoint is None:
        raise CheckpointError(
            f"{path} has no complete checkpoint to resume from in {folder.checkpoints}; "
            f"start it anew with {folder.flags} --overwrite"
        )
    # What a link leads to is no part of the run, and may be anybody's.
    with disk_errors("resume from", checkpoint):
        check_folder(checkpoint)
    done = read_progress(checkpoint).step
    changes = {
        **changes,
        ("run", "name"): folder.path.resolve().name,
        ("run", "out"): folder.path.parent,
    }
    if more_steps is not None:
        changes[("run", "steps")] = done + more_steps
    config = _resolve(replace_options(config, changes))
    if config.run.steps <= done:
        raise UsageError(
            f"{path} is at step {done} of {config.run.steps} already; add for example --steps +100 "
            f"to train it further"
        )
    return TrainJob(config=config, folder=folder, checkpoint=checkpoint)


def restarted_job(config: TrainConfig, resume: Path | None) -> TrainJob | None:
    """Find the job of ranks that torchrun has started again; None if these are the first ones.

    On several hosts some may have been started again, and others anew, with torchrun's --rdzv-id
    to tell that it is the same job.
    """
    is_restart = environment.restarts().count > 0
    if resume is not None:
        folder, checkpoint = _resume_point(resume)
    elif config.run.name is not None:
        folder, checkpoint = RunFolder(config.run.out / config.run.name), None
    else:
        return None
    if not (is_restart and folder.config.exists()) and not folder.belongs_to(environment.job_id()):
        return None
    return TrainJob.reopen(folder, checkpoint or latest(folder.checkpoints))


def check_can_restart(config: TrainConfig) -> None:
    """Raise a `UsageError` if ranks that torchrun starts again could not find their run."""
    if environment.restarts().limit and config.run.name is None:
        raise UsageError(
            "torchrun --max-restarts needs --name, so that ranks that are started again find "
            "their run"
        )


def check_devices(config: TrainConfig, num_local_ranks: int) -> None:
    """Raise a `UsageError` if this machine has fewer CUDA devices than ranks."""
    if config.parallel.device != "cuda":
        return
    num_devices = torch.cuda.device_count()
    if num_local_ranks > num_devices:
        raise UsageError(
            f"{num_local_ranks} ranks on this machine need as many CUDA devices, but it has "
            f"{num_devices}. Start at most {num_devices} with --nproc, or use --device cpu."
        )


def check_parts(config: ModelConfig, file: Path) -> None:
    """Raise a `UsageError` if stored weights are not the model's, or there is nothing to adapt."""
    assert config.source is not None
    skeleton = build_skeleton(read_model_config(file))
    if config.lora is not None:
        add_adapters(skeleton, decoder_blocks(skeleton), config)
    with opened_weights(weights_folder(config.source), skeleton) as weights:
        if weights is not None:
            weights.check()


def check_text_fits(config: TrainConfig, facts: ModelFacts, num_tokens: int) -> None:
    """Raise a `UsageError` if the model has no place for a token, or for a position."""
    if facts.vocabulary < num_tokens:
        given = config.model.tokenizer
        whose = "bytes, which text is read as without --tokenizer, are" if given is None else ""
        raise UsageError(
            f"--model: its embedding has {facts.vocabulary} rows, but "
            f"{whose or f'the tokenizer in {given} has'} {num_tokens} tokens. Give the "
            f"tokenizer that the model was made with (--tokenizer)."
        )
    longest = facts.most_positions
    if longest is not None and config.model.context > longest:
        raise UsageError(
            f"--context {config.model.context} is longer than the {longest} positions that the "
            f"model was made for (max_position_embeddings); try --context {longest}"
        )


def check_memory(
    config: TrainConfig, facts: ModelFacts, *, num_ranks: int, num_local_ranks: int
) -> None:
    """Raise a `UsageError` if a run cannot fit into this machine by any means."""
    model = facts.num_parameters * _BYTES_PER_NUMBER
    sequences = config.run.batch_size // (num_ranks * config.run.accumulate)
    activations = sequences * config.model.context * facts.width * _BYTES_PER_NUMBER
    # Frozen weights have neither gradients nor moments; adapters hardly count.
    copies = _STATE_COPIES if config.model.lora is None else 1
    per_rank = model * copies // num_ranks + activations
    made_at_once = facts.largest_unit * _BYTES_PER_NUMBER * num_local_ranks
    is_whole = facts.largest_unit == facts.num_parameters
    part = "the whole model" if is_whole else "the largest unit of the model"
    needed = {f"{part} once per rank": made_at_once}
    if config.parallel.device == "cpu":
        needed["shards and activations"] = per_rank * num_local_ranks
    else:
        _check_fits("a rank's shards and activations", per_rank, "a CUDA device", _device_bytes())
    for what, num_bytes in needed.items():
        _check_fits(what, num_bytes, "this machine", _machine_bytes())


def _check_fits(what: str, needed: int, where: str, available: int) -> None:
    if needed > _SWAP_FACTOR * available:
        raise UsageError(
            f"{what} would take at least {size(needed)}, but {where} has {size(available)}; "
            f"lower --dim, --layers, --batch-size or --context, or take a smaller --model"
        )


def _machine_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _device_bytes() -> int:
    return torch.cuda.get_device_properties(0).total_memory


def _resolve(config: TrainConfig) -> TrainConfig:
    """Choose what was left to be chosen, and check what a look at this machine can tell."""
    parallel = config.parallel
    device = parallel.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: this machine has no CUDA device; use --device cpu")
    precision = parallel.precision
    if precision == "auto":
        precision = "bf16" if device == "cuda" else "fp32"
    changes: dict[tuple[str, ...], object] = {
        ("parallel", "device"): device,
        ("parallel", "precision"): precision,
        ("parallel", "nproc"): parallel.nproc or _default_nproc(config, device),
    }
    for flag, is_wanted, package in (
        ("--tensorboard", config.run.tensorboard, "tensorboard"),
        ("--wandb", config.run.wandb, "wandb"),
    ):
        if is_wanted and importlib.util.find_spec(package) is None:
            raise UsageError(f"{flag}: {package} is not installed; try: pip install {package}")
    if _needs_tokens(config):
        _check_first_document(config)
    else:
        load_corpus(config.data, config.model.context)
    if config.data.folder is not None:
        # Absolute, so that a resume from another folder finds the same text.
        changes["data", "folder"] = config.data.folder.absolute()
    return replace_options(config, changes)


def _needs_tokens(config: TrainConfig) -> bool:
    """Tell whether the text is made into a token file: unless it is bytes of text files."""
    folder = config.data.folder
    if folder is None:
        return False
    if config.model.tokenizer is not None or folder.is_file():
        return True
    return folder.is_dir() and os.access(folder, os.R_OK | os.X_OK) and has_tables(folder)


def _check_first_document(config: TrainConfig) -> None:
    assert config.data.folder is not None
    next(find_source(config.data.folder).passages(config.data.text_key, []), None)


def _default_nproc(config: TrainConfig, device: str) -> int:
    """Two on CPU; on CUDA as many devices as the batch can be shared out to."""
    if device == "cpu":
        return _CPU_RANKS
    num = torch.cuda.device_count()
    while num > 1 and config.run.batch_size % (num * config.run.accumulate):
        num -= 1
    return max(1, num)


def _resume_point(path: Path) -> tuple[RunFolder, Path | None]:
    """Tell the run folder, and which of its checkpoints was named, if one was."""
    if not os.path.isdir(path):  # unlike Path.is_dir, False where permission is lacking
        raise UsageError(f"--resume: there is no run folder {path}")
    folder = RunFolder(path.parent.parent)
    if path.name == LINK and path.is_symlink():
        path = path.with_name(Path(os.readlink(path)).name)
    if path.parent == folder.checkpoints and (folder.config.exists() or step_of(path) >= 0):
        return folder, path
    return RunFolder(path), None


def _config_of(folder: RunFolder, checkpoint: Path | None) -> TrainConfig:
    """Read the config of a run that goes on; of one that lost its own, what it was saved with."""
    saved = checkpoint or latest(folder.checkpoints)
    if saved is None or os.path.lexists(folder.config):
        return folder.read_config()
    return read_saved_config(saved)


def _check_newest(checkpoint: Path) -> None:
    newer = [path.name for path in newer_than(checkpoint) if is_complete(path)]
    if newer:
        raise UsageError(
            f"--resume: going on from {checkpoint} would give up the newer {', '.join(newer)}; "
            f"add --overwrite to do so"
        )


def _check_changes(changes: Mapping[tuple[str, ...], object]) -> None:
    """Refuse what would make it another run."""
    flags = {found.path: found.flag for found in options_of(TrainConfig)}
    for path in changes:
        if path[0] == "model":
            raise UsageError(
                f"{flags[path]} cannot change with --resume: the checkpoint holds a model of the "
                f"old shape. Start a new run for it."
            )
        if path in (("run", "name"), ("run", "out")):
            raise UsageError(
                f"{flags[path]} cannot change with --resume, which continues the folder it names"
            )
