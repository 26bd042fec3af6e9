"""The run folder: where everything that a run leaves behind lies.

runs/demo/
  config.json     the resolved config, and facts about the run
  metrics.jsonl   one line per step and per validation
  timeline.json   what the engine did in one late step
  forecast.json   with --forecast: what the run was to need
  checkpoints/    step-00000100, step-00000120, …
  sample.txt      text that the model generated at the end
  report.html     all of it, drawn
  model/          with --model: its config.json, and the tokenizer
  logs/           what ranks wrote to stderr, and why one failed
  export/         with --export: the trained model, for transformers
  .lock           held while a run writes here
  adapters/       with --lora and --export: the adapters, for PEFT
  tensorboard/    with --tensorboard
  wandb/          with --wandb: its copy of what it logged
  profile/        with --profile: traces of each rank
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from shoal.checkpoint import drop_unfinished, latest
from shoal.errors import CheckpointError, UsageError
from shoal.files import (
    check_folder,
    is_still,
    open_own,
    open_regular,
    read_regular,
    replace,
    write_all,
)
from shoal.train.config import RunConfig, TrainConfig
from shoal.train.options import from_json, to_json

_MOST_CONFIG_BYTES = 1 << 20
_MOST_HOLDER_BYTES = 256
"""Of the lock holder's name; a file that came from elsewhere may hold anything."""


class _PathInside:
    """A path below the run folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: RunFolder, kind: type[RunFolder]) -> Path:
        return folder.path / self._name


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside one run folder, and the rules for making one."""

    path: Path

    config = _PathInside("config.json")
    metrics = _PathInside("metrics.jsonl")
    timeline = _PathInside("timeline.json")
    forecast = _PathInside("forecast.json")
    checkpoints = _PathInside("checkpoints")
    sample = _PathInside("sample.txt")
    report = _PathInside("report.html")
    logs = _PathInside("logs")
    lock = _PathInside(".lock")
    tensorboard = _PathInside("tensorboard")
    model = _PathInside("model")
    export = _PathInside("export")
    adapters = _PathInside("adapters")
    wandb = _PathInside("wandb")
    profile = _PathInside("profile")
    stop_request = _PathInside("logs/stop")
    """While this file exists, the run stops after the step that it is in."""
    proposed_config = _PathInside("logs/config.json")
    """The config of a resume, until the ranks have loaded its checkpoint."""

    def timeline_of(self, rank: int) -> Path:
        """What a rank's engine did in the step that `timeline.json` is of."""
        return self.logs / f"timeline-rank-{rank}.json" if rank else self.timeline

    @property
    def flags(self) -> str:
        """The flags that name this folder."""
        out = self.path.parent
        where = "" if out == RunConfig().out else f" --out {shlex.quote(str(out))}"
        return f"--name {shlex.quote(self.path.name)}{where}"

    @property
    def resume_command(self) -> str:
        """The command that goes on with this run."""
        return f"shoal train --resume {shlex.quote(str(self.path))}"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other runs out, from before the folder is made until the run is over."""
        with ExitStack() as held:
            with _writing_into(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
                # The system frees it when its holder dies, however it dies; the file stays.
                file = held.enter_context(open_own(self.lock))
                _acquire(file, self.lock, fcntl.LOCK_EX)
                file.truncate(0)
                write_all(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            yield

    def is_lost(self, home: os.stat_result) -> bool:
        """Tell whether the folder was removed or replaced; `home` is what it was."""
        return not (is_still(self.path, home) and os.path.lexists(self.config))

    def lost_error(self) -> CheckpointError:
        """Make the error for a folder that was removed or replaced."""
        return CheckpointError(
            f"{self.path} was removed, or replaced, while a run wrote into it. The run has ended "
            f"and writes nothing more there; what it had learned since its last checkpoint is lost"
        )

    def drop_remains(self, home: os.stat_result) -> None:
        """Remove what ranks still made while somebody removed the folder; whole checkpoints stay.

        Another folder that has its name now is left alone.
        """
        if not is_still(self.path, home):
            return
        drop_unfinished(self.checkpoints)
        # A folder that lost only its config.json still has metrics, and keeps all the rest.
        if latest(self.checkpoints) is None and not os.path.lexists(self.metrics):
            for path in (self.timeline, self.sample, self.report, self.lock):
                path.unlink(missing_ok=True)
        for path in (self.checkpoints, self.logs, self.path):
            with suppress(OSError):
                path.rmdir()  # if it is empty

    def check_unused(self) -> None:
        """Raise a `UsageError` if a run writes here now; any number may look at once."""
        with (
            _writing_into(self.path),
            suppress(FileNotFoundError),
            open_regular(self.lock) as file,
        ):
            _acquire(file, self.lock, fcntl.LOCK_SH)

    def check_free(self, *, overwrite: bool) -> None:
        """Raise a `UsageError` unless a new run may be made here."""
        with _writing_into(self.path):
            if not os.path.lexists(self.path):
                return
            if not self.path.is_dir():
                raise UsageError(f"{self.path} is a file; choose another --name or --out")
            if all(path == self.lock for path in self.path.iterdir()):
                return
        if not overwrite:
            raise UsageError(
                f"{self.path} exists already: continue it with --resume {self.path}, replace it "
                f"with --overwrite, or choose another --name"
            )
        if not self.config.is_file():
            raise UsageError(
                f"--overwrite: {self.path} holds no config.json, so it is not a run folder and "
                f"stays as it is; choose another --name"
            )

    def create(self) -> None:
        """Make the folder, without what an earlier run left in it."""
        with _writing_into(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            made = (self.checkpoints, self.logs, self.tensorboard, self.model, self.export)
            for path in (*made, self.adapters, self.wandb, self.profile):
                if path.is_symlink():
                    path.unlink()
                elif path.exists():
                    shutil.rmtree(path)
            for path in (self.config, self.metrics, self.timeline, self.sample, self.report):
                path.unlink(missing_ok=True)
            self.logs.mkdir()
            self.checkpoints.mkdir()

    def keep_model(self, config: Path, others: Sequence[Path]) -> None:
        """Copy what a model of `transformers` is beside its weights, for resumes and exports."""
        with _writing_into(self.path):
            self.model.mkdir()
            for source, name in [(config, "config.json"), *((f, f.name) for f in others)]:
                replace(self.model / name, source.read_bytes()).close()

    def take_over(self) -> None:
        """Make ready the folder of a run that goes on."""
        with _writing_into(self.path):
            # The folder may come from somebody else: what is written into it stays in it.
            for path in (
                *(self.checkpoints, self.logs, self.model),
                *(self.tensorboard, self.wandb, self.profile),
            ):
                check_folder(path)
            self.logs.mkdir(exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
            self.stop_request.unlink(missing_ok=True)
            drop_unfinished(self.checkpoints)

    def write_config(
        self, config: TrainConfig, facts: dict[str, Any], *, proposed: bool = False
    ) -> None:
        """Write the config, and facts about the run; all at once or not at all."""
        path = self.proposed_config if proposed else self.config
        text = json.dumps({**to_json(config), "facts": facts}, indent=2)
        with _writing_into(self.path):
            replace(path, f"{text}\n".encode()).close()

    def belongs_to(self, job_id: str) -> bool:
        """Tell whether a start of the job of this name has made the folder, or taken it over."""
        for path in (self.proposed_config, self.config):
            with suppress(OSError, ValueError, AttributeError):
                facts = _read_json(path).get("facts", {})
                if job_id and facts.get("job") == job_id:
                    return True
        return False

    def read_config(self, *, proposed: bool = False) -> TrainConfig:
        """Read the config that a run was made with, or the one it is about to go on with."""
        path = self.proposed_config if proposed else self.config
        try:
            tree = _read_json(path)
        except OSError as error:
            raise UsageError(
                f"{self.path} is not a run folder: cannot read {path.name}: {error.strerror}"
            ) from None
        except ValueError as error:
            raise UsageError(f"{path} is not JSON: {error}") from None
        if isinstance(tree, dict):
            tree.pop("facts", None)
        return from_json(TrainConfig, tree, where=path)


def _read_json(path: Path) -> Any:
    """Parse a small file that may come from anywhere; raises `OSError` or `ValueError`."""
    try:
        return json.loads(read_regular(path, _MOST_CONFIG_BYTES))
    except RecursionError:
        raise ValueError("it nests too deeply") from None


@contextmanager
def _writing_into(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = Path(error.filename) if isinstance(error.filename, str) else path
        within = f" ({where.name})" if where.parent == path else ""
        raise UsageError(f"cannot write into {path}{within}: {error.strerror or error}") from None


def _acquire(file: BinaryIO, path: Path, kind: int) -> None:
    """Take the lock in `file`; raise a `UsageError` if another process holds it."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(
            f"{path.parent} is in use by {_lock_holder(path)}; wait for it to end, stop it with "
            f"Ctrl-C or SIGTERM, or choose another --name"
        ) from None
    except OSError:
        pass  # some network file systems have no locks: better to train unguarded than not at all


def _lock_holder(path: Path) -> str:
    with suppress(OSError):
        text = read_regular(path, _MOST_HOLDER_BYTES).decode(errors="replace").strip()
        if text.isprintable() and text:
            return text
    return "another process"
