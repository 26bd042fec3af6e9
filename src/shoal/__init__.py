"""shoal: sharded training on PyTorch, where a step is a plan.

Names are imported when they are first used, so that `import shoal`, and with it every command's
`--help`, does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from shoal.version import __version__

if TYPE_CHECKING:
    from shoal.runtime.fully_shard import FSDPModule, fully_shard
    from shoal.runtime.policy import MixedPrecisionPolicy

__all__ = ["FSDPModule", "MixedPrecisionPolicy", "__version__", "fully_shard"]

_MODULES = {
    "FSDPModule": "shoal.runtime.fully_shard",
    "MixedPrecisionPolicy": "shoal.runtime.policy",
    "fully_shard": "shoal.runtime.fully_shard",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
