"""What all tests share: the end of the ranks, and plain settings for optional plugins."""

from __future__ import annotations

import importlib.util
import sys

import pytest


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Let pyproject.toml name pytest-timeout's option where the plugin is not installed."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "ignored: pytest-timeout is not installed")


def pytest_configure(config: pytest.Config) -> None:
    """Name the marker that rank tests carry; give hypothesis time, since cores are shared."""
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout: ignored, pytest-timeout is not installed")
    if importlib.util.find_spec("hypothesis") is not None:
        from hypothesis import settings

        settings.register_profile("shoal", deadline=None)
        settings.load_profile("shoal")


def pytest_unconfigure() -> None:
    """Leave no rank behind, and import no torch for that."""
    pools = sys.modules.get("harness.pools")
    if pools is not None:
        pools.close_pools()
