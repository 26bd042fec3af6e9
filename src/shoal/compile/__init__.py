"""The compiler behind `torch.compile(backend="shoal")`, `shoal.aot` and `shoal.compile_step`.

In: a graph of Dynamo's, or a function, with its arguments. Out: a generated function that runs a
forward graph and a backward graph, and leaves arguments, outputs and gradients as eager would.

An installed shoal tells torch of its backend `"shoal"` by an entry point. In a source folder there
is none, so importing this package registers the name.
"""

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any


def _backend() -> Callable[..., Any]:
    from shoal.compile.backend import shoal

    return shoal


if not any(point.name == "shoal" for point in entry_points(group="torch_dynamo_backends")):
    from shoal._torch.dynamo import register_backend

    register_backend("shoal", _backend)
