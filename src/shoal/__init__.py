"""shoal: sharded training on PyTorch, where a step is a plan."""

from shoal.version import __version__

__all__ = ["__version__"]
