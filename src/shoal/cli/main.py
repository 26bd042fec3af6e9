"""The `shoal` command: choose the subcommand, and turn errors into messages and exit codes.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | something failed while it ran |
| 2 | wrong input: a flag, a config, a folder |
| 130 | stopped by Ctrl-C, SIGTERM or SIGHUP |
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from shoal.cli.suggest import did_you_mean
from shoal.errors import EXIT_INTERRUPTED, ShoalError, UsageError
from shoal.train import environment
from shoal.train.safe_stream import printable, say
from shoal.version import __version__

COMMANDS = {
    "train": "train a transformer on text, sharded over ranks",
    "plan": "forecast memory and time of a training step, before it runs",
    "rehearse": "run some steps as rank 0 of N, beside the forecast",
    "bench": "measure shoal against plain, DDP, FSDP1 and FSDP2",
    "report": "draw the report of a run folder again",
    "checkpoint": "inspect, verify, export, import or reshard a checkpoint",
    "explain": "run a script, then tell what the compiler made of it",
    "completion": "print what makes a shell complete commands and flags",
}

RUNS_ANOTHER = "explain"
"""The command that hands its flags on to a script."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a `shoal` command line and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    traceback_wanted = environment.traceback_wanted()
    if words[:1] != [RUNS_ANOTHER]:
        traceback_wanted = traceback_wanted or "--traceback" in words
        words = [word for word in words if word != "--traceback"]
    try:
        return _dispatch(words)
    except ShoalError as error:
        if traceback_wanted:
            raise
        if _speaks(error):
            say(printable(f"shoal: error: {error}", keep="\n"), stream=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        if traceback_wanted:
            raise
        say("shoal: interrupted", stream=sys.stderr)
        return EXIT_INTERRUPTED


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    command, *rest = words
    if command == "--version":
        print(f"shoal {__version__}")
        return 0
    if command not in COMMANDS:
        kind = "flag" if command.startswith("-") else "command"
        known = ["--help", "--version"] if kind == "flag" else COMMANDS
        raise UsageError(
            f"unknown {kind} {command}.{did_you_mean(command, known)} "
            f"The commands are {', '.join(COMMANDS)}."
        )
    # Imported only when asked for: `shoal --help` shall not wait for torch.
    return importlib.import_module(f"shoal.cli.{command}").main(rest)


def _usage() -> str:
    lines = [
        "usage: shoal COMMAND [flags]",
        "",
        "Sharded training on PyTorch, where a step is a plan.",
        "",
        *(f"  {name:<10} {text}" for name, text in COMMANDS.items()),
        "",
        "  --version    print the version",
        "  --traceback  show where an error came from (also: SHOAL_TRACEBACK=1)",
        "",
        "`shoal COMMAND --help` tells more.",
    ]
    return "\n".join(lines)


def _speaks(error: ShoalError) -> bool:
    """Tell whether this process prints an error: under torchrun one rank per machine suffices."""
    try:
        place = environment.place()
    except UsageError:
        return True
    if place is None:
        return True
    from shoal.train.failure import SHARED_ERRORS

    return place.local_rank == 0 or not isinstance(error, SHARED_ERRORS)
