"""What Dynamo is told of functions it meets, or tells of graphs it made."""

from __future__ import annotations

import functools
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.fx import GraphModule

Class = TypeVar("Class", bound=type)
Function = TypeVar("Function", bound=Callable[..., Any])
Constant = TypeVar("Constant")


DYNAMO_MODULE = "torch._dynamo"
"""Optimizers import it at their first step, which takes longer than importing torch."""


def runs_compiled(module: torch.nn.Module) -> bool:
    """Whether a call of a module runs what `torch.compile` made of it."""
    private: Any = module
    is_wrapper = type(module).__module__.startswith(DYNAMO_MODULE)
    return is_wrapper or private._compiled_call_impl is not None


def unwrapped_by_dynamo(function: Function) -> Function:
    """Let a compiled caller break its graph here; without importing the compiler to say so."""
    cast(Any, function)._torchdynamo_disable = True
    return untraced_function(function)


def untraced(cls: Class) -> Class:
    """Keep dynamo out of a class's methods and of what they call: c10d calls them anywhere."""
    for method in vars(cls).values():
        if isinstance(method, FunctionType):
            untraced_function(method)
    return cls


def untraced_function(function: Function) -> Function:
    """Keep dynamo out of a function and of what it calls."""
    return _skipped(function, eval_frame._FrameAction.SKIP)


def stepped_over_by_dynamo(function: Function) -> Function:
    """Keep dynamo out of a function that is called, though not out of what it calls.

    A graph that comes to it while it is traced goes into it.
    """
    return _skipped(function, eval_frame._FrameAction.DEFAULT)


def _skipped(function: Function, of_callees: eval_frame._FrameAction) -> Function:
    strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, of_callees)
    eval_frame.set_code_exec_strategy(cast(FunctionType, function).__code__, strategy)
    return function


def allowed_in_graph(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors that Dynamo does not trace into; the backend of its graph does."""

    def call(*tensors: Tensor) -> Any:
        return function(*tensors)

    return cast(Callable[..., Any], torch.compiler.allow_in_graph(call))


def mark_unmoving(tensor: Tensor) -> None:
    """Say that a tensor is where it is in every call, so that recorded graphs need no copy of it.

    As `torch._dynamo.mark_static_address` does, which would import Dynamo.
    """
    cast(Any, tensor)._dynamo_static_input_type = "unguarded"


def constant_in_graph(function: Callable[[], Constant]) -> Callable[[], Constant]:
    """A function that Dynamo calls once while it traces, and takes the result of for granted."""
    cast(Any, function)._dynamo_marked_constant = True
    return function


def stands_for_lists(module: torch.nn.Module) -> bool:
    """Whether a module stands for a graph that takes lists, which Dynamo flattens for it."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and isinstance(module, utils.GmWrapper)


def sources_of(module: GraphModule) -> list[Any]:
    """Where Dynamo found each input of a graph of its own; None if it does not say."""
    inputs = module.graph.find_nodes(op="placeholder")
    return [getattr(node, "_dynamo_source", None) for node in inputs]


def overlapping(tensors: Sequence[Tensor]) -> set[int]:
    """Which of some tensors of one storage overlap others, as the guard of `guard_overlap` sees it.

    For that guard alone: it takes some that leave out the same rows for tensors that do not.
    """
    from torch._C._dynamo.guards import compute_overlapping_tensors

    return set(compute_overlapping_tensors(list(tensors), symbolic=False))


def guard_overlap(overlapping: Sequence[Any], apart: Sequence[Any]) -> None:
    """Have Dynamo compile anew where other tensors of one storage overlap than these sources'."""
    from torch._guards import StorageOverlap, TracingContext

    context = TracingContext.try_get()
    if context is not None:
        guard = StorageOverlap(list(overlapping), list(apart))
        context.guards_context.aotautograd_guards.append(guard)


_captures_for: list[str] = []
"""For which backends captures without Dynamo are under way."""


@contextmanager
def captured_for(backend: str) -> Iterator[None]:
    """A context in which programs are told that a backend captures them, as Dynamo tells them."""
    compiler: Any = torch.compiler
    before = compiler._is_compiling_flag
    compiler._is_compiling_flag = True
    _captures_for.append(backend)
    try:
        yield
    finally:
        _captures_for.pop()
        compiler._is_compiling_flag = before


def captures_without_dynamo() -> bool:
    """Whether a program is being captured by `captured_for`."""
    return bool(_captures_for)


def tracing_backend() -> str | None:
    """The name of the backend that Dynamo traces for, while it does, or that captures by itself."""
    if _captures_for:
        return _captures_for[-1]
    convert = sys.modules.get("torch._dynamo.symbolic_convert")
    if convert is None:
        return None
    return _name_of(convert.InstructionTranslator.current_tx().output.compiler_fn)


def compiling_backend() -> str | None:
    """The name of the backend for which the frames that are called now are compiled, if any."""
    callback: Any = get_eval_frame_callback()
    return None if callback is None or callback is False else _name_of(callback)


def _name_of(compiler: Any) -> str | None:
    """The name of a backend, whatever Dynamo has wrapped it in."""
    while compiler is not None:
        name = getattr(compiler, "compiler_name", None) or getattr(compiler, "__name__", None)
        inner = getattr(compiler, "_torchdynamo_orig_backend", None)
        if inner is None or inner is compiler:
            return name
        compiler = inner
    return None


def register_backend(name: str, load: Callable[[], Callable[..., Any]]) -> None:
    """Let `torch.compile(backend=name)` call what `load` returns, which is loaded when needed."""
    from torch._dynamo import register_backend as register

    def compile_graph(module: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        return load()(module, inputs, **kwargs)

    register(compile_graph, name=name)


@functools.cache
def skip_in_dynamo(module: str) -> None:
    """Let Dynamo call the functions of a module instead of tracing them."""
    from torch._dynamo import trace_rules

    trace_rules.add(module)


def fixed_inputs(module: GraphModule) -> list[int]:
    """The inputs of a graph of Dynamo's that stay where they are from call to call."""
    return [
        i
        for i, node in enumerate(module.graph.find_nodes(op="placeholder"))
        if node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")
        or isinstance(node.meta.get("example_value"), torch.nn.Parameter)
    ]


def report_ddp_buckets(number: int) -> None:
    """Keep the count that torch's own pass keeps, where its users look for it."""
    from torch._dynamo.utils import counters

    counters["inductor"]["ddp_buckets"] = number


def report_compiled() -> None:
    """Count a function in what torch's own runtime counts, where its users look for it."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")  # not there: nobody has asked
    if dynamo is not None:
        for what in ("total", "ok"):
            dynamo.counters["aot_autograd"][what] += 1


def fuse_traced_averages(bucket_mb: float) -> None:
    """Let Inductor make few of many all-reduces in backwards that are traced by themselves.

    If the program has asked Dynamo for that (`optimize_ddp`), as torch's own replicas do.
    """
    settings: Any = sys.modules.get("torch._dynamo.config")  # not there: nobody has asked
    if settings is not None and str(settings.optimize_ddp).startswith("python_reducer"):
        from torch._inductor import config

        cast(Any, config)._fuse_ddp_communication = True
        cast(Any, config)._fuse_ddp_bucket_size = bucket_mb


def graph_breaks() -> list[tuple[str, tuple[str, int | None] | None]]:
    """Why graphs of Dynamo's ended early, and the lines of the program at which they did."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")  # not there: nothing was compiled
    found: list[tuple[str, tuple[str, int | None] | None]] = []
    for one in list(dynamo.graph_break_reasons) if dynamo is not None else ():
        last = one.user_stack[-1] if one.user_stack else None
        found.append((one.reason, (last.filename, last.lineno) if last is not None else None))
    return found


def recompiles() -> list[tuple[types.CodeType, str]]:
    """The functions that Dynamo compiled again, with the guards that failed."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    failures = list(dynamo.guard_failures.items()) if dynamo is not None else []
    return [(code, str(one)) for code, reasons in failures for one in reasons]


def first_line(module: GraphModule) -> str:
    """File and line of the program at which a graph of Dynamo's begins; empty if nothing tells."""
    traces = (node.meta.get("stack_trace") for node in module.graph.nodes)
    trace = next((one for one in traces if one), "")
    found = re.findall(r'^ *File "(.+)", line (\d+)', trace, re.MULTILINE)
    return ":".join(found[-1]) if found else ""


def forget_inner_guards(parameters: Iterable[Tensor]) -> None:
    """Let the graph that Dynamo traces hold for parameters whatever is inside of them.

    That a parameter is of the same class, dtype and size, and trained or not, is still looked at
    before each call. The metadata of a subclass and its inner tensors are not looked at: each takes
    calls of Python, and a backend that takes parameters apart checks them itself.
    """
    tracing = sys.modules.get("torch._dynamo.symbolic_convert")
    context: Any = cast(Any, torch)._guards.TracingContext.try_get()
    if tracing is None or context is None:
        return
    root = tracing.InstructionTranslator.current_tx().output.root_tx
    scope = {"L": root.f_locals, "G": root.f_globals}
    wanted = {id(one): one for one in parameters}
    known: dict[str, Tensor | None] = {}

    def is_inner(guard: Any) -> bool:
        source, kind = guard.originating_source, guard.create_fn_name()
        if kind == "TENSOR_SUBCLASS_METADATA_MATCH":
            return parameter_at(source) is not None
        if type(source).__name__ == "SubclassAttrListSource":
            return parameter_at(source.base) is not None
        if kind != "TENSOR_MATCH" or type(source).__name__ != "AttrSource":
            return False
        parameter: Any = parameter_at(source.base)
        return parameter is not None and source.member in parameter.__tensor_flatten__()[0]

    def parameter_at(source: Any) -> Tensor | None:
        name: Any = source.name
        name = name() if callable(name) else name  # a method until 2.11
        if name not in known and "_parameters[" in name:
            known[name] = wanted.get(id(eval(name, scope)))  # as Dynamo finds values
        return known.get(name)

    guards: Any = context.guards_context.dynamo_guards
    kept = [guard for guard in guards.inner if not is_inner(guard)]
    guards.inner = type(guards.inner)(kept)
    if hasattr(guards, "source_to_guards"):
        guards.source_to_guards.clear()
        for guard in kept:
            guards.track_guard_by_source(guard)


def free_dims(tensor: Tensor) -> tuple[int, ...]:
    """The dims of a fake tensor whose sizes are symbols."""
    return tuple(d for d, size in enumerate(tensor.shape) if isinstance(size, torch.SymInt))


def mark_free_dims(tensor: Tensor, dims: tuple[int, ...]) -> None:
    """Let Dynamo take sizes of a tensor for symbols the first time that it meets it."""
    # Before 2.13, only marks that it also guards.
    is_guarded = torch.__version__ < "2.13"
    name = "_dynamo_weak_dynamic_indices" if is_guarded else "_dynamo_propagated_dynamic_indices"
    setattr(tensor, name, getattr(tensor, name, set()) | set(dims))
