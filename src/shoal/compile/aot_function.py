"""Functions and modules compiled ahead of time, with functorch's names and arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from shoal._torch import compilers, dynamo, functionals, settings, storage, traces, trees
from shoal.compile.aot.capture import Decompositions
from shoal.compile.aot.compiler import AotCompiler, Partition
from shoal.compile.aot.inner import Given
from shoal.compile.aot.subclasses import flat as inner_tensors
from shoal.compile.aot.subclasses import kind_of
from shoal.compile.graph_compilers import (
    Compiler,
    default_decompositions,
    make_boxed_func,
    ts_compile,
)
from shoal.compile.partition.partitioners import (
    default_partition,
    min_cut_rematerialization_partition,
)


def aot_function(
    fn: Callable[..., Any],
    fw_compiler: Compiler,
    bw_compiler: Compiler | None = None,
    partition_fn: Partition = default_partition,
    decompositions: Decompositions | None = None,
    num_params_buffers: int = 0,
    keep_inference_input_mutations: bool = False,
    inference_compiler: Compiler | None = None,
    *,
    dynamic: bool = False,
    enable_log: bool = True,
    disable_functionalization: bool = False,
) -> Callable[..., Any]:
    """`fn`, traced when it is called, its graphs given to the compilers.

    It is traced again when its arguments differ in what a graph depends on: structure, dtypes,
    devices, which require gradients, sizes (unless `dynamic`), and values that are no tensors.
    Mutations of inputs always stay in the graph where autograd allows it, and all others never:
    `keep_inference_input_mutations` and `disable_functionalization` change nothing; nor do
    `num_params_buffers` and `enable_log`. Where another trace passes through, it sees `fn`.
    """
    compiler = AotCompiler(
        inner=Given(fw_compiler, bw_compiler, inference_compiler),
        partition=partition_fn,
        decompositions=decompositions,
        dynamic=dynamic,
    )
    known: dict[Any, Callable[..., Any]] = {}

    def call(*args: Any, **kwargs: Any) -> Any:
        flat, spec = trees.tree_flatten((args, kwargs))
        if any(map(functionals.is_functional, flat)):
            return fn(*args, **kwargs)
        key = (spec, torch.is_grad_enabled(), _autocast(flat), *_key_of(flat, dynamic))
        entry = known.get(key)
        if entry is None:
            entry = known[key] = _compile(fn, flat, spec, compiler)
        return entry(flat)

    return call


def _autocast(flat: list[Any]) -> str | None:
    """The state of autocast, None if it is off: a graph contains its casts."""
    if not settings.is_autocast():
        return None
    devices = {one.device.type for one in flat if isinstance(one, Tensor)}
    return str(settings.autocast_state(devices))


def _key_of(flat: list[Any], dynamic: bool) -> list[Any]:
    """The properties of arguments that a graph depends on."""
    first: dict[int, int] = {}
    memory: dict[int, tuple[int, Tensor]] = {}
    crowded = _crowded(flat) if dynamic else set[int | None]()
    keys: list[Any] = []
    for i, one in enumerate(flat):
        if not isinstance(one, Tensor):
            keys.append((type(one), one))
            continue
        at = first.setdefault(id(one), i)
        keys.append((kind_of(one), one.requires_grad, one.is_leaf, at))
        for inner in inner_tensors(one, symbols=False):
            shared = None
            if storage.has_storage(inner):
                earlier, other = memory.setdefault(inner.untyped_storage()._cdata, (i, inner))
                if other is not inner:
                    shared = (earlier, other.storage_offset(), inner.storage_offset())
            sizes: Any = inner.dim()
            if not dynamic or storage.storage_key(inner) in crowded:
                strides = inner.stride() if inner.layout is torch.strided else inner.layout
                sizes = tuple(inner.shape), strides
            keys.append((inner.dtype, inner.device, sizes, shared))
    return keys


def _crowded(flat: list[Any]) -> set[int | None]:
    """The storages of several tensors: whether these overlap depends on their sizes."""
    tensors = {id(one): one for one in flat if isinstance(one, Tensor)}.values()
    inner = (part for one in tensors for part in inner_tensors(one, symbols=False))
    counts = Counter(map(storage.storage_key, inner))
    return {key for key, count in counts.items() if key is not None and count > 1}


def _compile(
    fn: Callable[..., Any], flat: list[Any], spec: Any, compiler: AotCompiler
) -> Callable[[list[Any]], Any]:
    out_spec: list[Any] = []

    def flat_fn(*values: Any) -> list[Any]:
        args, kwargs = trees.tree_unflatten(list(values), spec)
        result, result_spec = trees.tree_flatten(fn(*args, **kwargs))
        out_spec[:] = [result_spec]
        return result

    compiled = compiler.compile(flat_fn, flat)

    def run(values: list[Any]) -> Any:
        return trees.tree_unflatten(list(compiled(*values)), out_spec[0])

    return run


def _named_tensors(mod: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module, by every name that they have."""
    return {
        **dict(mod.named_parameters(remove_duplicate=False)),
        **dict(mod.named_buffers(remove_duplicate=False)),
    }


def aot_module(mod: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """A module that runs `mod` compiled; its parameters and buffers are `mod`'s own."""
    compilers.check_unlike_jit(mod)

    def functional_call(params: Mapping[str, Tensor], *call: Any, **named: Any) -> Any:
        return torch.func.functional_call(mod, dict(params), call, named)

    compiled = aot_function(functional_call, *args, **kwargs)

    class AOTModule(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.orig_module = mod

        def forward(self, *call: Any, **named: Any) -> Any:
            return compiled(_named_tensors(self.orig_module), *call, **named)

    return AOTModule()


def aot_module_simplified(
    mod: nn.Module,
    args: Sequence[Any],
    fw_compiler: Compiler,
    bw_compiler: Compiler | None = None,
    partition_fn: Partition = default_partition,
    decompositions: Decompositions | None = None,
    keep_inference_input_mutations: bool = False,
    inference_compiler: Compiler | None = None,
    compiler_config_extra: object = None,
    ignore_shape_env: bool = False,
    disable_functionalization: bool = False,
    pre_grad_passes: Callable[[GraphModule, Sequence[Any]], GraphModule] | None = None,
    compile_region_name: str | None = None,
    *,
    dynamic: bool = False,
) -> Callable[..., Any]:
    """A function of `mod`'s flat inputs, compiled now for arguments like `args`.

    `mod` takes and returns flat values, as Dynamo's graphs do; its parameters are read anew in
    every call. `pre_grad_passes` rewrites it first, if it is a graph. The function takes its
    inputs in a list if `mod` stands for a graph that takes lists. As of `aot_function`, some
    arguments change nothing: `keep_inference_input_mutations`, `disable_functionalization`,
    `compiler_config_extra`, `compile_region_name`.
    """
    if ignore_shape_env:
        raise NotImplementedError("aot_module_simplified(ignore_shape_env=True) is not supported")
    if pre_grad_passes is not None and isinstance(mod, GraphModule):
        mod = pre_grad_passes(mod, args)
    compiler = AotCompiler(
        inner=Given(fw_compiler, bw_compiler, inference_compiler),
        partition=partition_fn,
        decompositions=decompositions,
        dynamic=dynamic,
        checks=True,
    )
    named = _named_tensors(mod)
    names, tensors = list(named), list(named.values())

    def flat_fn(*values: Any) -> Any:
        given = dict(zip(names, values, strict=False))
        with traces.keep_metadata():
            result = traces.call_with(mod, given, values[len(names) :])
        if not isinstance(result, (tuple, list)):
            raise RuntimeError(
                "aot_module_simplified needs a module that returns a flat tuple or list; got "
                f"{type(result).__name__}. Use aot_module for any structure."
            )
        return list(result)

    compiled = compiler.compile(flat_fn, [*tensors, *args])

    def forward(*runtime_args: Any) -> Any:
        return compiled(*tensors, *runtime_args)

    call: Any = make_boxed_func(forward) if dynamo.stands_for_lists(mod) else forward
    call.zero_grad = mod.zero_grad
    call.named_parameters = mod.named_parameters
    call.named_buffers = mod.named_buffers
    return call


compiled_function = aot_function
"""The older name of `aot_function`."""

compiled_module = aot_module
"""The older name of `aot_module`."""


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
