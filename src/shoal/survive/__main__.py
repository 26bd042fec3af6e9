"""`python -m shoal.survive --ranks 4 program.py`: ranks of one machine, of which some may die.

When more die than can be rebuilt, all ranks start again, as often as `--restarts` allows; the
program goes on from its last checkpoint then, if it looks for one. Under torchrun (`torchrun
--nproc-per-node 4 -m shoal.survive program.py`) torchrun says how many ranks there are, and whether
they start again; each process that it starts guards one rank.
"""

from __future__ import annotations

import argparse
import signal
import sys
from typing import NoReturn

from shoal.errors import RankError
from shoal.survive.guard import guard, is_under_torchrun
from shoal.survive.launcher import command, run_job


def main(arguments: list[str]) -> int:
    """Run a program on ranks; the exit status is 0 if those that were left came to the end."""
    parser = argparse.ArgumentParser(prog="python -m shoal.survive", description=__doc__)
    parser.add_argument("--ranks", type=int, help="how many processes to start")
    parser.add_argument(
        "--restarts", type=int, default=0, help="how often to start again from a checkpoint"
    )
    parser.add_argument(
        "--spares", type=int, default=0, help="processes that wait to replace ranks that die"
    )
    parser.add_argument("program", help="a Python file that calls shoal.survive.survive")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="for the program")
    options = parser.parse_args(arguments)
    program = [options.program, *options.arguments]
    if is_under_torchrun():
        if options.ranks is not None or options.restarts or options.spares:
            parser.error("under torchrun, --nproc-per-node and --max-restarts say it; no --spares")
        return guard(program)
    if options.ranks is None or options.ranks < 1:
        parser.error("--ranks: how many processes to start, 1 or more")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    try:
        lost = run_job(command(program), options.ranks, options.restarts, options.spares)
    except RankError as error:
        print(error, file=sys.stderr)
        return 1
    if lost:
        print(f"{len(lost)} of {options.ranks} ranks died, the others went on", file=sys.stderr)
    return 0


def _stop(number: int, _: object) -> NoReturn:
    """End as by Ctrl-C: the ranks are ended on the way out."""
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
