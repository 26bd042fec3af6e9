"""The environment variables that the compiler reads: all of them, and only here."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where compiled results are kept: `SHOAL_CACHE_DIR`, or in the user's cache folder."""
    named = os.environ.get("SHOAL_CACHE_DIR")
    if named:
        return Path(named).expanduser()
    user = os.environ.get("XDG_CACHE_HOME")
    return (Path(user) if user else Path.home() / ".cache") / "shoal" / "compile"


def log_topics() -> str:
    """What `SHOAL_LOGS` asks for: topics, separated by commas."""
    return os.environ.get("SHOAL_LOGS", "")
