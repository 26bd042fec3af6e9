"""The one place that knows whether GPU tests can run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder, and skip it where there is no GPU."""
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker("gpu")
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))
