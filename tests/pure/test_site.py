"""The documentation site: every page is in the navigation, every link of a page leads somewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!\!)\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)


def nav() -> list[str]:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    return re.findall(r": (\S+\.md)$", text, re.MULTILINE)


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The headings of a page, as the site names them."""
    found: set[str] = set()
    for heading in HEADING.findall(prose(page)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        kept = re.sub(r"[^\w\s-]", "", plain.encode("ascii", "ignore").decode()).strip().lower()
        found.add(re.sub(r"[-\s]+", "-", kept))
    return found


def test_every_page_is_in_the_navigation_once() -> None:
    pages, listed = {str(page.relative_to(DOCS)) for page in PAGES}, nav()
    assert len(listed) == len(set(listed))
    assert pages == set(listed), "`nav` of mkdocs.yml has a line for each page"


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *PAGES], ids=lambda page: str(page.relative_to(ROOT))
)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(prose(page)):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        other = (page.parent / name).resolve() if name else page
        assert other.exists(), f"{target} does not exist"
        if anchor and other.suffix == ".md":
            assert anchor in anchors(other), f"{target}: no such heading"


def test_names_on_api_pages_exist() -> None:
    import importlib

    for page in sorted((DOCS / "api").glob("*.md")):
        for name in re.findall(r"^::: ([\w.]+)$", page.read_text("utf-8"), re.MULTILINE):
            module, _, last = name.rpartition(".")
            owner = importlib.import_module(module) if module else None
            assert owner is None or hasattr(owner, last) or importlib.import_module(name), name


def test_the_site_loads_nothing_from_the_network() -> None:
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "font: false" in config
    assert "  - offline" in config
    assert "strict: true" in config


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_built_site_needs_no_network_and_its_search_finds(tmp_path: Path) -> None:
    mkdocs = ROOT / ".venv-docs" / "bin" / "mkdocs"
    if not mkdocs.exists():
        pytest.skip("needs the environment that `make docs` makes")
    subprocess.run(
        [mkdocs, "build", "--quiet", "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=True,
    )
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|link|img)[^>]+(?:src|href)=\"(https?:[^\"]+)", page.read_text()
        )
        assert not loaded, page
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("the rest needs chromium")
    url = f"file://{tmp_path}/site/tasks/start.html?q=watchdog"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    dom = subprocess.run(
        [chromium, *options, profile, "--virtual-time-budget=20000", "--dump-dom", url],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    assert "debug_a_hang.html" in dom.split('class="md-search-result__list"')[1].split("</ol>")[0]
