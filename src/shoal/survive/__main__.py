"""`python -m shoal.survive --ranks 4 program.py`: ranks of one machine, of which some may die."""

from __future__ import annotations

import argparse
import sys

from shoal.errors import RankError
from shoal.survive.launcher import Launcher, command


def main(arguments: list[str]) -> int:
    """Run a program on ranks; the exit status is 0 if those that were left came to the end."""
    parser = argparse.ArgumentParser(prog="python -m shoal.survive", description=__doc__)
    parser.add_argument("--ranks", type=int, required=True, help="how many processes to start")
    parser.add_argument("program", help="a Python file that calls shoal.survive.survive")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="for the program")
    options = parser.parse_args(arguments)
    try:
        start = command([options.program, *options.arguments])
        with Launcher(start, options.ranks) as launcher:
            lost = launcher.wait()
    except RankError as error:
        print(error, file=sys.stderr)
        return 1
    if lost:
        print(f"{len(lost)} of {options.ranks} ranks died, the others went on", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
