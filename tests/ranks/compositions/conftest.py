"""A test of each column that a test's markers claim, so that the table says what was tried."""

import pytest

from compose import columns_of


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make the parameter `column` of the markers `compose`."""
    if "column" in metafunc.fixturenames:
        found: dict[str, None] = {}
        for marker in metafunc.definition.iter_markers("compose"):
            found.update(dict.fromkeys(columns_of(*marker.args[:1], marker.args[1:])))
        metafunc.parametrize("column", list(found))
