"""A test of each column that a test's markers claim, so that the table says what was tried."""

import pytest

from compose import columns_of

QUICK = {"fully_shard", "wrapper", "replicate", "Flat"}
"""What `make test` tries: every feature by each door, in the two layouts that differ most. The
other columns are tried by `make soak`: meshes of four ranks and compilers take their time."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make the parameter `column` of the markers `compose`."""
    if "column" not in metafunc.fixturenames:
        return
    found: dict[str, None] = {}
    for marker in metafunc.definition.iter_markers("compose"):
        found.update(dict.fromkeys(columns_of(*marker.args[:1], marker.args[1:])))
    metafunc.parametrize(
        "column",
        [
            pytest.param(column, marks=() if column in QUICK else pytest.mark.soak)
            for column in sorted(found)
        ],
    )
