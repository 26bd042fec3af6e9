"""`python -m shoal.survive --ranks 4 program.py`: ranks of one machine, of which some may die.

When more die than can be rebuilt, all ranks start again, as often as `--restarts` allows; the
program goes on from its last checkpoint then, if it looks for one.
"""

from __future__ import annotations

import argparse
import sys

from shoal.errors import RankError
from shoal.survive.launcher import command, run_job


def main(arguments: list[str]) -> int:
    """Run a program on ranks; the exit status is 0 if those that were left came to the end."""
    parser = argparse.ArgumentParser(prog="python -m shoal.survive", description=__doc__)
    parser.add_argument("--ranks", type=int, required=True, help="how many processes to start")
    parser.add_argument(
        "--restarts", type=int, default=0, help="how often to start again from a checkpoint"
    )
    parser.add_argument("program", help="a Python file that calls shoal.survive.survive")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="for the program")
    options = parser.parse_args(arguments)
    start = command([options.program, *options.arguments])
    try:
        lost = run_job(start, options.ranks, options.restarts)
    except RankError as error:
        print(error, file=sys.stderr)
        return 1
    if lost:
        print(f"{len(lost)} of {options.ranks} ranks died, the others went on", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
