"""One page from one run folder: the template filled, and written in place of the last one."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from shoal.errors import UsageError
from shoal.files import replace
from shoal.report.headline import headline
from shoal.report.run import Run, read_run
from shoal.report.sections import sections
from shoal.report.status import status
from shoal.version import __version__

MOST_PROBLEMS = 12
"""Unreadable lines named one by one; the rest is counted."""


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into a run folder, and return its path."""
    run_dir = Path(run_dir)
    html = render(read_run(run_dir))
    path = run_dir / "report.html"
    try:
        # A reader who reloads meanwhile sees the old page or the new one, never half of one.
        replace(path, html.encode(errors="replace")).close()
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}. Make the folder writable, "
            "or copy the run to one that is"
        ) from error
    return path


def render(run: Run) -> str:
    """Make the page's HTML; everything it needs is inside it."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    problems = list(run.problems[:MOST_PROBLEMS])
    if len(run.problems) > MOST_PROBLEMS:
        problems.append(f"… and {len(run.problems) - MOST_PROBLEMS:,} more like these")
    return environment.from_string(_asset("page.html.jinja")).render(
        run=run,
        status=status(run),
        tiles=headline(run),
        sections=sections(run),
        problems=problems,
        style=_asset("page.css"),
        script=_asset("page.js"),
        version=__version__,
    )


def _asset(name: str) -> str:
    return (files("shoal.report") / name).read_text(encoding="utf-8")
