"""`__all__` says exactly what a package shows."""

import importlib
import inspect
import pkgutil
from types import ModuleType

import pytest

import shoal
from shoal.integrations.frameworks import FrameworkError


def walk() -> list[str]:
    """Name every module of shoal but those that exist to be run, or that carry no promise."""
    found = pkgutil.walk_packages(shoal.__path__, prefix="shoal.")
    names = (module.name for module in found if not module.name.endswith(".__main__"))
    return ["shoal", *(name for name in names if not name.startswith("shoal._torch"))]


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
def test_all_is_exact(name):
    try:
        module = importlib.import_module(name)
    except FrameworkError as error:
        pytest.skip(str(error))
    listed = getattr(module, "__all__", None)
    if listed is None:
        assert not hasattr(module, "__path__") or not shown(module), (
            f"{name} shows {sorted(shown(module))} but has no __all__"
        )
        return
    assert len(listed) == len(set(listed)), "listed twice"
    assert not {entry for entry in listed if not hasattr(module, entry)}, "listed but not there"
    assert not shown(module) - set(listed), "there but not listed"
