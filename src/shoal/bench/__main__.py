"""`python -m shoal.bench` is `shoal bench`."""

import sys

from shoal.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
