"""The config of a training run: complete, frozen, and impossible to build wrong.

A recipe is a Python file with a function that returns one, flags change single options of it, and
`config.json` in a run folder is one written down. Defaults make the demo: a 3 M parameter
transformer that learns the Python standard library in about a minute on two CPU cores.
"""

from __future__ import annotations

import os
import runpy
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import ClassVar, Literal, get_type_hints

from shoal.errors import UsageError
from shoal.files import open_regular
from shoal.train.options import check_options, option, options_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer over bytes, or a causal language model of `transformers`."""

    TITLE: ClassVar[str] = "model"

    source: str | None = option(
        None,
        "hf:PATH, a config.json of transformers (random weights) or a folder with config.json and "
        "safetensors (its weights); a small transformer over bytes unless given",
        flag="--model",
    )
    tokenizer: Path | None = option(  # noqa: RUF009  (a field specifier)
        None,
        "folder of a tokenizer of transformers; that in the folder of --model unless given, else "
        "bytes",
    )
    dim: int = option(256, "width of the residual stream", at_least=2, at_most=2**17)
    layers: int = option(4, "number of blocks", at_least=1, at_most=10_000)
    heads: int = option(4, "attention heads per block", at_least=1, at_most=2**16)
    hidden: int | None = option(
        None,
        "width inside the feed-forward; 8/3 of --dim unless given",
        at_least=1,
        at_most=2**20,
    )
    lora: int | None = option(
        None,
        "train LoRA adapters of this rank, and nothing else; needs --model",
        at_least=1,
        at_most=2**16,
    )
    lora_alpha: float = option(
        16.0, "the adapters' product is multiplied by this / --lora", above=0, at_most=2**16
    )
    lora_targets: str = option(
        "all",
        "layers to adapt, by the ends of their names: q_proj,v_proj; all linear ones of blocks",
    )
    context: int = option(
        128, "sequence length in tokens (bytes, without --model)", at_least=1, at_most=2**24
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.source is not None:
            self._check_source()
        elif self.tokenizer is not None:
            raise UsageError("--tokenizer needs --model: without it the model is one over bytes")
        elif self.lora is not None:
            raise UsageError("--lora needs --model: without it there is nothing to adapt")
        if self.dim % (2 * self.heads):
            raise UsageError(
                f"--dim must be a multiple of 2 x --heads, since every head rotates pairs of "
                f"features; got --dim {self.dim} with --heads {self.heads}. "
                f"Try --dim {_round_up(self.dim, 2 * self.heads)}."
            )

    def _check_source(self) -> None:
        if not self.source or not self.source.removeprefix("hf:") or self.source[:3] != "hf:":
            raise UsageError(
                f"--model: expected hf:PATH, a config.json or a folder of transformers; "
                f"got {self.source!r}"
            )
        shape = {name: getattr(self, name) for name in ("dim", "layers", "heads", "hidden")}
        plain = {found.path[0]: found.default for found in options_of(ModelConfig)}
        given = [name for name, value in shape.items() if value != plain[name]]
        if given:
            raise UsageError(
                f"--{given[0]} does not go with --model: config.json says the shape of the model"
            )

    @property
    def feed_forward_dim(self) -> int:
        """Width inside the feed-forward: as given, or 8/3 of `dim` in whole multiples of 32."""
        return self.hidden or _round_up(self.dim * 8 // 3, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Which text to learn."""

    TITLE: ClassVar[str] = "data"

    folder: Path | None = option(  # noqa: RUF009  (a field specifier)
        None,
        "text, JSONL or Parquet: a file, or a folder of files, read recursively; or a dataset of "
        "Hugging Face (save_to_disk). The Python standard library unless given",
        flag="--data",
    )
    text_key: str = option("text", "field or column that holds the text of JSONL and tables")
    max_bytes: int | None = option(
        None,
        "read at most this much text; 16,000,000 unless given where text files are read as bytes, "
        "else all",
        at_least=1,
    )
    held_out: float = option(
        0.05, "share at the end of the text kept for validation", at_least=0, at_most=0.5
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """AdamW, or Muon for matrices, with warm-up, cosine decay and clipping."""

    TITLE: ClassVar[str] = "optimizer"

    optimizer: Literal["adamw", "muon"] = option(
        "adamw",
        "muon updates the matrices inside of blocks by Muon, at the size of AdamW's updates, and "
        "all else by AdamW",
    )
    lr: float = option(3e-3, "peak learning rate", above=0, at_most=1000)
    warmup: int = option(20, "steps over which the learning rate rises to its peak", at_least=0)
    final_lr: float = option(
        0.1, "learning rate at the last step, as a share of the peak", at_least=0, at_most=1
    )
    weight_decay: float = option(0.1, "AdamW's weight decay", at_least=0, at_most=1000)
    beta1: float = option(0.9, "AdamW's decay of the first moment", at_least=0, at_most=0.99999)
    momentum: float = option(0.95, "Muon's momentum", at_least=0, at_most=0.99999)
    beta2: float = option(0.95, "AdamW's decay of the second moment", at_least=0, at_most=0.99999)
    clip: float = option(1.0, "clip gradients to this global norm; 0 leaves them", at_least=0)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """On what the run computes, and in which precision."""

    TITLE: ClassVar[str] = "ranks, devices and precision"

    nproc: int | None = option(
        None,
        "ranks to launch on this machine; unless given, 2 on CPU and one per CUDA device. "
        "Under torchrun, torchrun decides",
        alias="--ranks",
        at_least=1,
        at_most=1024,
    )
    device: Literal["auto", "cpu", "cuda"] = option("auto", "where to compute")
    precision: Literal["auto", "bf16", "fp16", "fp32"] = option(
        "auto",
        "precision of compute; auto is bf16 on CUDA, fp32 on CPU. Sums stay in fp32; in fp16 the "
        "loss is scaled",
    )
    replicas: int = option(
        1,
        "copies of the sharded model: each is sharded over ranks / replicas (hybrid sharding); as "
        "many as ranks is plain data parallelism",
        at_least=1,
        at_most=1024,
    )
    threads: int | None = option(
        None, "CPU threads per rank; the cores shared out unless given", at_least=1, at_most=1024
    )
    engine: Literal["fully_shard", "fsdp1-style"] = option(
        "fully_shard",
        "what shards the model: fully_shard, or the wrapper FullyShardedDataParallel. Losses and "
        "checkpoints are the same",
    )
    activation_checkpointing: bool = option(
        False, "recompute each block in backward instead of keeping its activations"
    )
    compile: Literal["off", "graph", "inductor"] = option(
        "off",
        "train from one graph of forward and one of backward, with all gathers and reductions in "
        "them: as it was traced, or made into kernels by Inductor",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.compile != "off" and self.engine != "fully_shard":
            raise UsageError(
                f"--compile {self.compile} needs --engine fully_shard, whose gathers can be in a "
                f"graph; got --engine {self.engine}. Drop one of them."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """How long the run is, and what it leaves behind."""

    TITLE: ClassVar[str] = "run"

    steps: int = option(
        120,
        "optimizer steps in all; with --resume, +K means K more than so far",
        at_least=1,
        at_most=10**12,
    )
    batch_size: int = option(16, "sequences per step, over all ranks", at_least=1, at_most=2**24)
    accumulate: int = option(1, "micro-batches per rank and step", at_least=1)
    seed: int = option(
        0, "seed of the weights and of the order of the data", at_least=0, at_most=2**63 - 1
    )
    validate_every: int = option(20, "steps between validations; 0 for none", at_least=0)
    validation_batches: int = option(
        2, "batches of --batch-size per validation", at_least=1, at_most=10**6
    )
    save_every: int = option(
        100, "steps between checkpoints; 0 for one at the end only", at_least=0
    )
    keep_last: int = option(2, "newest checkpoints to keep; 0 for all", at_least=0)
    keep_every: int = option(
        0, "also keep checkpoints whose step is a multiple of this; 0 for none", at_least=0
    )
    sample_tokens: int = option(
        200, "bytes to generate at the end; 0 for none", at_least=0, at_most=10**6
    )
    export: bool = option(
        False,
        "at the end write the model into the run folder as export/, which from_pretrained of "
        "transformers loads; needs --model",
    )
    forecast: Literal["auto", "on", "off"] = option(
        "auto",
        "forecast memory and time as `shoal plan` does, and set both beside what was measured in "
        "the report; auto: on CUDA",
    )
    tensorboard: bool = option(False, "also log to TensorBoard, which must be installed")
    wandb: bool = option(
        False, "also log to Weights & Biases (wandb), which must be installed; see WANDB_MODE"
    )
    profile: str | None = option(
        None,
        "FIRST:LAST: profile these steps on every rank, into profile/ of the run folder",
    )
    name: str | None = option(None, "name of the run; the date and time unless given")
    out: Path = option(Path("runs"), "folder that holds the run folders")  # noqa: RUF009

    def __post_init__(self) -> None:
        check_options(self)
        if self.name is not None and (self.name in ("", ".", "..") or "/" in self.name):
            raise UsageError(
                f"--name: expected one folder name, got {self.name!r}; --out says where it lies"
            )
        _ = self.profiled_steps

    @property
    def profiled_steps(self) -> range:
        """The steps of `--profile`."""
        if self.profile is None:
            return range(0)
        first, colon, last = self.profile.partition(":")
        is_range = bool(colon) and first.isdecimal() and last.isdecimal()
        if not is_range or not 1 <= int(first) <= int(last):
            raise UsageError(
                f"--profile: expected FIRST:LAST, two steps such as 20:25; got {self.profile!r}"
            )
        return range(int(first), int(last) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultConfig:
    """Restarts, bad numbers, ranks that stay away."""

    TITLE: ClassVar[str] = "faults"

    max_restarts: int = option(
        0,
        "start the ranks again from the newest checkpoint when one was lost, at most this often. "
        "Under torchrun, torchrun decides",
        at_least=0,
        at_most=10**6,
    )
    survive: bool = option(
        False,
        "when a rank dies let the others rebuild its part of the state from parity, and go on "
        "without it; if too many die at the same time, --max-restarts counts",
    )
    on_nonfinite: Literal["stop", "skip", "ignore"] = option(
        "stop",
        "a loss or gradient that is not finite on any rank: stop the run before the step changes "
        "anything, skip the step on all ranks, or ignore it",
    )
    stall_limit: float = option(
        300.0,
        "seconds that a rank may wait for the others before the run is ended and the ranks that "
        "did not come are named; 0 for no limit",
        at_least=0,
        at_most=10**6,
    )
    check_replicas_every: int = option(
        100, "steps between comparisons of the replicas' weights; 0 for none", at_least=0
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Everything a run needs to know."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    run: RunConfig = field(default_factory=RunConfig)
    faults: FaultConfig = field(default_factory=FaultConfig)

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(TrainConfig).items():
            part = getattr(self, name)
            if not isinstance(part, kind):
                raise UsageError(
                    f"TrainConfig.{name}: expected {kind.__name__}, got {type(part).__name__}"
                )
        if self.run.export and self.model.source is None:
            raise UsageError(
                "--export needs --model: transformers knows no class for the model over bytes. "
                "`shoal checkpoint export` writes its weights."
            )
        if self.model.source is not None and self.parallel.engine != "fully_shard":
            raise UsageError(
                f"--model needs --engine fully_shard; got --engine {self.parallel.engine}"
            )
        if self.faults.survive:
            self._check_can_survive()
        if self.optim.optimizer == "muon" and self.parallel.engine != "fully_shard":
            raise UsageError(
                f"--optimizer muon needs --engine fully_shard, which knows the shapes of matrices; "
                f"got --engine {self.parallel.engine}"
            )
        if self.run.validate_every and not self.data.held_out:
            raise UsageError(
                "--validate-every needs held-out text, but --held-out is 0; "
                "add --validate-every 0 or hold some out"
            )

    def _check_can_survive(self) -> None:
        parallel = self.parallel
        for flag, given, needed in (
            ("--engine", parallel.engine, "fully_shard"),
            ("--compile", parallel.compile, "off"),
            ("--replicas", parallel.replicas, 1),
            ("--optimizer", self.optim.optimizer, "adamw"),
        ):
            if given != needed:
                raise UsageError(f"--survive needs {flag} {needed}; got {flag} {given}")

    def check_ranks(self, num_ranks: int) -> None:
        """Raise a `UsageError` if a batch, or the replicas, do not fit `num_ranks`."""
        replicas = self.parallel.replicas
        if self.faults.survive and num_ranks == 1:
            raise UsageError("--survive needs 2 ranks or more (--nproc): one has nobody to go on")
        if num_ranks % replicas:
            raise UsageError(
                f"--replicas must divide the number of ranks (--nproc), which is {num_ranks}; "
                f"got {replicas}"
            )
        parts = num_ranks * self.run.accumulate
        if self.run.batch_size % parts:
            raise UsageError(
                f"--batch-size must be a multiple of ranks (--nproc) x --accumulate = "
                f"{num_ranks} x {self.run.accumulate} = {parts}; got {self.run.batch_size}. "
                f"Try --batch-size {_round_up(self.run.batch_size, parts)}."
            )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def load_recipe(reference: str) -> TrainConfig:
    """Call the function that `FILE[:function]` names and return its config."""
    path, name = _parse_reference(reference)
    function = _find_function(path, name)
    try:
        config = function()
    except (Exception, SystemExit) as error:
        raise UsageError(f"recipe {_line_of(error, path)}: {_describe_error(error)}") from error
    if not isinstance(config, TrainConfig):
        raise UsageError(
            f"recipe {path}, line {function.__code__.co_firstlineno}: {name}() returned "
            f"{type(config).__name__}, expected shoal.train.config.TrainConfig"
        )
    return config


def _parse_reference(reference: str) -> tuple[Path, str]:
    file, colon, name = reference.rpartition(":")
    path, name = (Path(file), name) if colon else (Path(reference), "recipe")
    if not os.path.exists(path):
        raise UsageError(f"--recipe: there is no file {path}")
    try:
        open_regular(path, follow=True).close()
    except OSError as error:
        raise UsageError(f"--recipe: cannot read {path}: {error.strerror}") from None
    if not name.isidentifier():
        raise UsageError(f"--recipe: expected FILE:function, got {reference!r}")
    return path, name


def _find_function(path: Path, name: str) -> FunctionType:
    try:
        names = runpy.run_path(str(path))
    except (Exception, SystemExit) as error:
        raise UsageError(f"recipe {_line_of(error, path)}: {_describe_error(error)}") from error
    function = names.get(name)
    if not isinstance(function, FunctionType):
        own = [
            other
            for other, value in names.items()
            if isinstance(value, FunctionType) and value.__code__.co_filename == str(path)
        ]
        known = f"it defines {', '.join(own)}" if own else "it defines no function"
        raise UsageError(
            f"recipe {path}: there is no function {name}() in it; {known}. "
            f"Name one with --recipe {path}:function."
        )
    return function


def _line_of(error: BaseException, path: Path) -> str:
    """Name the last line of the recipe that was running, or the one that is not Python."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{path}, line {error.lineno}"
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == str(path)
    ]
    return f"{path}, line {lines[-1]}" if lines else str(path)


def _describe_error(error: BaseException) -> str:
    if isinstance(error, UsageError):
        return str(error)
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}"
