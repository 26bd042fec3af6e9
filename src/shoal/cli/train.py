"""`shoal train`: train a small transformer on text, sharded over ranks."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.config_file import read_config_file, write_config
from shoal.cli.flags import Parser, add_config_flags, given_options
from shoal.errors import UsageError
from shoal.train import environment
from shoal.train.config import TrainConfig, load_recipe
from shoal.train.options import replace_options, to_json
from shoal.train.safe_stream import printable, say

if TYPE_CHECKING:
    from shoal.train.job import TrainJob

_DESCRIPTION = """\
Train a small transformer on text, fully sharded over ranks.

With no flags it learns the Python standard library on 2 local ranks, which takes about a
minute on two CPU cores. Everything it makes lies in runs/<name>/; Ctrl-C saves and stops.

  shoal train --name first --steps 300
  shoal train --resume runs/first --steps +100
  shoal train --recipe recipes/tiny.py --data my/texts
  torchrun --nproc-per-node 8 -m shoal train --name big --dim 1024 --layers 16
"""

STEPS = ("run", "steps")


@dataclass(frozen=True, slots=True)
class MoreSteps:
    """`--steps +K`: as many more than the checkpoint has."""

    count: int


def make_parser() -> Parser:
    """Build the parser of `shoal train`."""
    parser = Parser(prog="shoal train", usage="shoal train [flags]", description=_DESCRIPTION)
    start = parser.add_argument_group("where to start from")
    start.add_argument(
        "--recipe",
        metavar="FILE[:NAME]",
        help="take the config that a Python function returns (default name: recipe); "
        "flags change it",
    )
    start.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="take the config from a TOML file; flags change it",
    )
    start.add_argument(
        "--resume",
        type=Path,
        metavar="RUN",
        help="go on from the newest checkpoint of a run folder, or from RUN/checkpoints/step-N",
    )
    start.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the run folder if there is one; "
        "with --resume RUN/checkpoints/step-N, the checkpoints after it",
    )
    start.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything, print the resolved config as JSON, and stop there",
    )
    start.add_argument(
        "--print-config",
        action="store_true",
        help="print the config as TOML for --config, with what each option means, and stop there",
    )
    add_config_flags(parser, TrainConfig, parsers={"--steps": _parse_steps})
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status, or end the process as a rank of torchrun."""
    arguments = make_parser().parse(argv)
    if arguments.print_config:
        print(write_config(_new_config(arguments)))
        return 0
    if environment.place() is None and not arguments.dry_run:
        # Importing torch takes seconds: a word before it.
        source = given_options(arguments, TrainConfig).get(("model", "source"))
        what = arguments.resume or source or "the text and this machine"
        say(f"looking at {printable(str(what))}…", stream=sys.stdout)
    # Imported late, so that --help and a mistyped flag need no torch.
    from shoal.train.launch import STOP_SIGNALS, launch
    from shoal.train.rank import exit_now, run_rank
    from shoal.train.text.token_file import PROGRESS_S, in_turns

    place = environment.place()
    job = _make_job(arguments, is_rank=place is not None)
    num_ranks = place.world_size if place else job.num_ranks
    num_local_ranks = place.local_world_size if place else num_ranks
    if place is not None and job.config.faults.survive:
        raise UsageError(
            "--survive needs shoal's own launcher: without torchrun, `shoal train --ranks N "
            "--survive` starts the ranks of this machine"
        )
    job.check_machine(num_ranks=num_ranks, num_local_ranks=num_local_ranks)
    if arguments.dry_run:
        if place is None or place.rank == 0:
            print(json.dumps(to_json(job.config), indent=2))
        return 0
    if place is None:
        for progress in in_turns(job.make_tokens(), PROGRESS_S):
            say(f"reading the text: {progress}", stream=sys.stdout)
        with job.folder.locked():
            job.create(num_ranks=num_ranks)
            return launch(job)
    exit_now(run_rank(place, job, create=True, signals=STOP_SIGNALS))


def _make_job(arguments: argparse.Namespace, *, is_rank: bool) -> TrainJob:
    """Put recipe, flags and the resumed run together; writes nothing."""
    from shoal.train.job import check_can_restart, new_job, restarted_job, resumed_job

    changes = given_options(arguments, TrainConfig)
    steps, more_steps = changes.get(STEPS), None
    if isinstance(steps, MoreSteps):
        more_steps = steps.count
        del changes[STEPS]
    if arguments.resume is not None:
        if arguments.recipe or arguments.config:
            given = "--recipe" if arguments.recipe else "--config"
            raise UsageError(
                f"{given} does not go with --resume, which continues a run as it was configured"
            )
        restarted = restarted_job(TrainConfig(), arguments.resume) if is_rank else None
        return restarted or resumed_job(
            arguments.resume, changes, more_steps=more_steps, overwrite=arguments.overwrite
        )
    config = _new_config(arguments)
    check_can_restart(config)
    restarted = restarted_job(config, None) if is_rank else None
    return restarted or new_job(config, overwrite=arguments.overwrite)


def _new_config(arguments: argparse.Namespace) -> TrainConfig:
    """Put flags over the recipe, the file or the defaults."""
    if arguments.recipe and arguments.config:
        raise UsageError("--config and --recipe each say the whole config; give one of them")
    config = TrainConfig()
    if arguments.recipe:
        config = load_recipe(arguments.recipe)
    elif arguments.config:
        config = read_config_file(arguments.config)
    changes = given_options(arguments, TrainConfig)
    steps = changes.get(STEPS)
    if isinstance(steps, MoreSteps):
        raise UsageError(f"--steps +{steps.count} needs --resume RUN: more than what?")
    return replace_options(config, changes)


def _parse_steps(text: str) -> int | MoreSteps:
    digits = text.removeprefix("+")
    if not digits.isdecimal():
        raise argparse.ArgumentTypeError(
            f"expected a whole number, or +K with --resume; got {text!r}"
        )
    count = int(digits)
    if text == digits:
        return count
    if count < 1:
        raise argparse.ArgumentTypeError(f"expected at least +1, got {text}")
    return MoreSteps(count)
