"""What all tests share: a cache of their own, the end of the ranks, settings for plugins."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator

import pytest

from sampling import mark_unsampled


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Let pyproject.toml name pytest-timeout's option where the plugin is not installed."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "ignored: pytest-timeout is not installed")


def pytest_configure(config: pytest.Config) -> None:
    """Name the marker that rank tests carry; give hypothesis time, since cores are shared.

    It draws the same examples in every ordinary run, so that a change is judged by itself; others
    in every soak, which is there to find what nobody has thought of.
    """
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout: ignored, pytest-timeout is not installed")
    if importlib.util.find_spec("hypothesis") is not None:
        from hypothesis import settings

        is_soak = config.getoption("markexpr") == "soak"
        settings.register_profile("shoal", deadline=None, derandomize=not is_soak)
        settings.load_profile("shoal")


@pytest.hookimpl(tryfirst=True)  # before those are dropped that the soak alone runs
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take samples of large products of parameters; all of what somebody asks for by name."""
    if not config.getoption("keyword"):
        mark_unsampled(items)


@pytest.fixture(scope="session", autouse=True)
def own_compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what tests compile, in this process and in others, apart from the user's cache."""
    before = os.environ.get("SHOAL_CACHE_DIR")
    os.environ["SHOAL_CACHE_DIR"] = str(tmp_path_factory.mktemp("compile-cache"))
    yield
    if before is None:
        del os.environ["SHOAL_CACHE_DIR"]
    else:
        os.environ["SHOAL_CACHE_DIR"] = before


def pytest_unconfigure() -> None:
    """Leave no rank behind, and import no torch for that."""
    pools = sys.modules.get("harness.pools")
    if pools is not None:
        pools.close_pools()
