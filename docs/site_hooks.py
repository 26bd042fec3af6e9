"""Scripts of `examples/` become files of the site, and links to them follow."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\]\((?:\.\./)+(examples/[\w.]+)\)")
"""A link of a page to a script, which lies beside `docs/` in the repository."""


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the scripts, as text that a browser shows."""
    for path in sorted((ROOT / "examples").iterdir()):
        if path.suffix in (".py", ".ipynb"):
            content = path.read_text(encoding="utf-8")
            files.append(File.generated(config, f"examples/{path.name}.txt", content=content))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Let links to scripts point at these files."""
    up = "../" * page.file.src_uri.count("/")
    return OUTSIDE.sub(lambda found: f"]({up}{found[1]}.txt)", markdown)
