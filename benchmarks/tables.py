"""Write the figures in the documents from the stored results of `shoal bench`.

python benchmarks/tables.py            # after results were added or removed
python benchmarks/tables.py --check    # 1 if a document says something else
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shoal.bench.table import stored_results, write_tables

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "bench.md")


def main() -> int:
    """Write or check; 1 if a document differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    results = stored_results(ROOT / "benchmarks" / "results")
    stale = False
    for page in PAGES:
        before = page.read_text()
        after = write_tables(before, results)
        if before == after:
            continue
        stale = True
        print(f"{page.relative_to(ROOT)}: {'differs' if options.check else 'written'}")
        if not options.check:
            page.write_text(after)
    return int(stale and options.check)


if __name__ == "__main__":
    sys.exit(main())
