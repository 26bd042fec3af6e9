"""Makes torch know the backend `"shoal"` where no installed package says so.

Running from a source folder there is no entry point. Importing Dynamo to register a name would
cost every import of shoal a second, so the name is registered when Dynamo's registry is imported.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

_REGISTRY = "torch._dynamo.backends.registry"


def register_when_needed() -> None:
    """Register now if Dynamo is there, otherwise when it comes."""
    if _REGISTRY in sys.modules:
        _register(sys.modules[_REGISTRY])
    elif not any(isinstance(finder, _WaitsForRegistry) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WaitsForRegistry())


def _register(registry: Any) -> None:
    if not any(point.name == "shoal" for point in entry_points(group="torch_dynamo_backends")):
        registry.register_backend(_compile, name="shoal")


def _compile(module: Any, inputs: Any, **kwargs: Any) -> Any:
    from shoal.compile.backend import shoal

    return shoal(module, inputs, **kwargs)


class _WaitsForRegistry(MetaPathFinder):
    """Finds nothing itself; looks on when the registry is loaded."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The registry's own, with a loader that registers afterwards."""
        if fullname != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _ThenRegisters(spec.loader)
                return spec
        return None


class _ThenRegisters(Loader):
    """Another loader, followed by the registration."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the other does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Load, then register."""
        self._loader.exec_module(module)
        _register(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
