"""Functions and modules compiled by TorchScript, which fuses what it can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from shoal.compile.aot_function import aot_function, aot_module
from shoal.compile.graph_compilers import default_decompositions, ts_compile
from shoal.compile.partition import min_cut_rematerialization_partition


def nnc_jit(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f`, traced when it is called, its graphs given to TorchScript."""
    return aot_function(f, ts_compile)


def memory_efficient_fusion(fn: Callable[..., Any] | nn.Module, **kwargs: Any) -> Any:
    """A function or a module compiled so that it keeps little for its backward, and fuses.

    It is cut by `min_cut_rematerialization_partition`; `kwargs` are those of `aot_function`.
    """
    chosen: dict[str, Any] = {
        "fw_compiler": ts_compile,
        "bw_compiler": ts_compile,
        "partition_fn": min_cut_rematerialization_partition,
        "decompositions": default_decompositions,
        **kwargs,
    }
    return aot_module(fn, **chosen) if isinstance(fn, nn.Module) else aot_function(fn, **chosen)
