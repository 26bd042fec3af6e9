"""Two versions of shoal beside each other: `shoal bench` of an older source folder and this one.

    git worktree add ../old COMMIT
    python benchmarks/beside.py --old ../old/src --cases B1-8,B2 --out benchmarks/results/FILE.json

They take turns: each round starts every case once with each version, in an order that changes from
round to round. The table has medians over the rounds, and ratios of this version to the older: of
medians, and of the quietest rounds, since what else a machine does only ever makes a step slower.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from shoal.bench.script import flags, store

NEW = Path(__file__).resolve().parents[1] / "src"
FIGURES = ("forward_backward_ms", "host_ms", "optimizer_ms")
Key = tuple[str, str, str, str]
"""A case, an engine, a mode, a figure."""


def main() -> None:
    """Measure, print a table, and write a file if one is named."""
    parser = flags(__doc__, rounds=2, quick="tiny models")
    parser.add_argument("--old", type=Path, required=True, help="the older src folder")
    parser.add_argument("--cases", default="B1-8,B2,B3,B4,B5")
    parser.add_argument("--engines", default="shoal,shoal-flat")
    parser.add_argument("--modes", default="eager")
    options = parser.parse_args()
    versions = {"old": options.old.resolve(), "new": NEW}
    seen: dict[str, dict[Key, list[float]]] = {"old": {}, "new": {}}
    failures: list[str] = []
    host: Any = None
    for number in range(options.rounds):
        for case in options.cases.split(","):
            names = list(versions) if number % 2 == 0 else list(versions)[::-1]
            for name in names:
                results = run(versions[name], case, options)
                host = host or results["sources"][0]["host"]
                for record in results["records"]:
                    where = (record["case"], record["engine"], record["mode"])
                    if record["status"] != "ok":
                        failures.append(f"{name} {' '.join(where)}: {record['reason']}")
                        continue
                    for figure in FIGURES:
                        value = record["figures"].get(figure)
                        if value is not None:
                            seen[name].setdefault((*where, figure), []).append(value)
        write(options, seen, failures, host)
    print(table(seen))
    for failure in failures:
        print(failure)
    sys.exit(1 if failures else 0)


def run(source: Path, case: str, options: argparse.Namespace) -> Any:
    """One `shoal bench` of a version."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        flags = ["--cases", case, "--engines", options.engines, "--modes", options.modes]
        flags += ["--repeats", "1", "--out", str(out), *(["--quick"] if options.quick else [])]
        subprocess.run(
            [sys.executable, "-m", "shoal", "bench", *flags],
            env={**os.environ, "PYTHONPATH": str(source)},
            stdout=subprocess.DEVNULL,
            check=False,  # a run that failed is in the results, with its reason
        )
        return json.loads(out.read_text(encoding="utf-8"))


def table(seen: dict[str, dict[Key, list[float]]]) -> str:
    """Case, engine, mode, figure, both medians, their ratio and that of the quietest rounds."""
    lines = [
        f"{'case':8} {'engine':14} {'mode':9} {'figure':20} {'old':>9} {'new':>9} {'new/old':>9} "
        f"{'quietest':>9}"
    ]
    for key in sorted(seen["old"].keys() & seen["new"].keys()):
        rounds = [seen[name][key] for name in ("old", "new")]
        old, new = map(statistics.median, rounds)
        ratios = [_ratio(*map(take, rounds)) for take in (statistics.median, min)]
        case, engine, mode, figure = key
        lines.append(
            f"{case:8} {engine:14} {mode:9} {figure:20} {old:9.3f} {new:9.3f} {' '.join(ratios)}"
        )
    return "\n".join(lines)


def _ratio(old: float, new: float) -> str:
    return f"{new / old:9.3f}" if old else "        –"


def write(
    options: argparse.Namespace,
    seen: dict[str, dict[Key, list[float]]],
    failures: list[str],
    host: Any,
) -> None:
    """Keep what was measured so far."""
    figures = [
        {"case": case, "engine": engine, "mode": mode, "figure": figure, **both}
        for case, engine, mode, figure in sorted(seen["old"].keys() | seen["new"].keys())
        for both in [
            {name: seen[name].get((case, engine, mode, figure), []) for name in ("old", "new")}
        ]
    ]
    store(options.out, host=host, figures=figures, failures=failures)


if __name__ == "__main__":
    main()
