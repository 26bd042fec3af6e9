"""Ahead-of-time compilation under functorch's names: change `functorch.compile` to `shoal.aot`."""

from shoal.compile.aot_function import (
    aot_function,
    aot_module,
    aot_module_simplified,
    compiled_function,
    compiled_module,
    debug_compile,
    make_boxed_compiler,
    make_boxed_func,
    nop,
    print_compile,
    ts_compile,
)
from shoal.compile.partition import default_partition, min_cut_rematerialization_partition

__all__ = [
    "aot_function",
    "aot_module",
    "aot_module_simplified",
    "compiled_function",
    "compiled_module",
    "debug_compile",
    "default_partition",
    "make_boxed_compiler",
    "make_boxed_func",
    "min_cut_rematerialization_partition",
    "nop",
    "print_compile",
    "ts_compile",
]
