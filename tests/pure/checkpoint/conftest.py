"""Folders in memory: these tests write thousands of files, and a disk takes its time for each."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")
NEEDED_BYTES = 1 << 30


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """A folder that syncing costs nothing in, where there is such a thing."""
    if not os.access(MEMORY, os.W_OK) or shutil.disk_usage(MEMORY).free < NEEDED_BYTES:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=MEMORY, prefix="shoal-test-") as folder:
        yield Path(folder)
