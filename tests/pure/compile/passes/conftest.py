"""A group of one rank, so that graphs with collectives can run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from comm_graphs import one_rank


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    with one_rank():
        yield
