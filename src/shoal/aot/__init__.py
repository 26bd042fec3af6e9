"""Ahead-of-time compilation under functorch's names: change `functorch.compile` to `shoal.aot`."""

from shoal.compile.aot.inner import get_aot_compilation_context, get_aot_graph_name
from shoal.compile.aot_function import (
    aot_function,
    aot_module,
    aot_module_simplified,
    compiled_function,
    compiled_module,
    memory_efficient_fusion,
    nnc_jit,
)
from shoal.compile.export import aot_export_joint_simple
from shoal.compile.graph_compilers import (
    debug_compile,
    default_decompositions,
    make_boxed_compiler,
    make_boxed_func,
    nop,
    print_compile,
    ts_compile,
)
from shoal.compile.partition.partitioners import (
    default_partition,
    min_cut_rematerialization_partition,
)

get_graph_being_compiled = get_aot_graph_name
"""The older name of `get_aot_graph_name`."""

__all__ = [
    "aot_export_joint_simple",
    "aot_function",
    "aot_module",
    "aot_module_simplified",
    "compiled_function",
    "compiled_module",
    "debug_compile",
    "default_decompositions",
    "default_partition",
    "get_aot_compilation_context",
    "get_aot_graph_name",
    "get_graph_being_compiled",
    "make_boxed_compiler",
    "make_boxed_func",
    "memory_efficient_fusion",
    "min_cut_rematerialization_partition",
    "nnc_jit",
    "nop",
    "print_compile",
    "ts_compile",
]
