"""What every test of the compiler needs: quiet tracing, and no cache of an earlier test."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let torch's own tracing look at the gradient of a tensor inside a graph."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"))


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    """Drop what Dynamo compiled, and torch's trace log, which would double the time of a test."""
    trace = logging.getLogger("torch.__trace")
    propagate, trace.propagate = trace.propagate, False
    yield
    trace.propagate = propagate
    torch._dynamo.reset()
