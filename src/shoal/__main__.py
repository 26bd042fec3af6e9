"""`python -m shoal`: the same as the `shoal` command."""

import sys

from shoal.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
