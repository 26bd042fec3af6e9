"""Scripts of `examples/` become files of the site, and links to them follow."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?:\.\./)+)([^)\s]+)\)")
"""A link of a page to what lies in a folder above it, with its text."""
WORKER = re.compile(r'<script src="https://unpkg.com/iframe-worker/shim"></script>')
"""What lets search run on pages from a disk, fetched from the network; `file_worker.js` does it."""


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the scripts, as text that a browser shows."""
    for path in sorted((ROOT / "examples").iterdir()):
        if path.suffix in (".py", ".ipynb"):
            content = path.read_text(encoding="utf-8")
            files.append(File.generated(config, f"examples/{path.name}.txt", content=content))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Let links to scripts point at these files; of links to other files keep the text."""
    depth = page.file.src_uri.count("/")

    def on_site(found: re.Match[str]) -> str:
        text, up, target = found.groups()
        if up.count("../") <= depth:
            return found[0]
        if target.startswith("examples/"):
            return f"[{text}]({'../' * depth}{target}.txt)"
        return text

    return LINK.sub(on_site, markdown)


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Load what search needs from the site itself."""
    up = "../" * page.file.src_uri.count("/")
    return WORKER.sub(f'<script src="{up}scripts/file_worker.js"></script>', output)


def on_post_template(output: str, **_: Any) -> str:
    """The same for the page that says that there is no such page."""
    return WORKER.sub('<script src="/scripts/file_worker.js"></script>', output)
