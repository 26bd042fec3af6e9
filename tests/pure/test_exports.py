"""`__all__` says exactly what a package shows."""

import importlib
import inspect
import pkgutil
from types import ModuleType

import pytest

import shoal


def walk() -> list[str]:
    """Name every module of shoal but those that exist to be run."""
    found = pkgutil.walk_packages(shoal.__path__, prefix="shoal.")
    return ["shoal", *(module.name for module in found if not module.name.endswith(".__main__"))]


def order(name: str) -> tuple[int, str]:
    """Sort constants first, then classes, then the rest, as the linter does."""
    if len(name) > 1 and name.isupper():
        return 0, name
    return (1 if name[0].isupper() else 2), name


def shown(module: ModuleType) -> set[str]:
    """Return public classes and functions: a package's from all of shoal, a module's own."""
    is_package = hasattr(module, "__path__")
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and (
            value.__module__.split(".")[0] == "shoal"
            if is_package
            else value.__module__ == module.__name__
        )
    }


@pytest.mark.parametrize("name", walk())
def test_all_is_exact_and_sorted(name):
    module = importlib.import_module(name)
    listed = getattr(module, "__all__", None)
    if listed is None:
        assert not hasattr(module, "__path__") or not shown(module), (
            f"{name} shows {sorted(shown(module))} but has no __all__"
        )
        return
    assert list(listed) == sorted(set(listed), key=order)
    assert not {entry for entry in listed if not hasattr(module, entry)}, "listed but not there"
    assert not shown(module) - set(listed), "there but not listed"
