"""The adapter of the compile half: every private name of torch's compiler that shoal leans on.

Tested on torch 2.11 and 2.13. Apart from `_torch`, because importing torch's compiler takes long.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import operator
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext as TracingContext
from torch._guards import detect_fake_mode as detect_fake_mode
from torch._guards import tracing as tracing
from torch._higher_order_ops import effects
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._prims.rng_prims import run_and_save_rng_state as run_and_save_rng_state
from torch._prims.rng_prims import run_with_rng_state as run_with_rng_state
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import is_fake
from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
from torch._subclasses.functional_tensor import FunctionalTensorMode as FunctionalTensorMode
from torch._subclasses.functional_tensor import disable_functional_mode
from torch.distributed import distributed_c10d as c10d
from torch.fx import GraphModule
from torch.fx import traceback as fx_traceback
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

SymInt = torch.SymInt
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def bind(
    schema: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """The arguments that a schema names, with what was given for them."""
    for position, argument in enumerate(schema.arguments):
        if position < len(args) and not argument.kwarg_only:
            yield argument, args[position]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def new_fake_mode(*, dynamic: bool) -> FakeTensorMode:
    """A mode of our own, where no compiler in front brought one."""
    # Shapes stay integers unless asked for: a shape environment is needed either way, because
    # operators with data-dependent results ask for one.
    shapes = ShapeEnv() if dynamic else ShapeEnv(assume_static_by_default=True)
    return FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=False)


def fake_of(mode: FakeTensorMode, tensor: Tensor, *, dynamic: bool) -> Tensor:
    """A tensor without elements that stands for one; Dynamo's symbols where it chose some."""
    if is_fake(tensor):
        return tensor
    context = TracingContext.try_get()
    if context is not None and tensor in context.tensor_to_context:
        symbols = context.tensor_to_context[tensor]
        fake = mode.from_tensor(
            tensor, symbolic_context=symbols, source=getattr(symbols, "tensor_source", None)
        )
    else:
        fake = mode.from_tensor(tensor, static_shapes=not dynamic)
    # What a wrapper holds besides tensors is a constant of the graph, so that it stays real.
    return with_inner(fake, lambda inner: inner) if wraps_others(fake) else fake


def wraps_others(value: object) -> bool:
    """Whether a value is a tensor that wraps others, which tracing can look into."""
    return is_traceable_wrapper_subclass(value)


def is_distributed(tensor: Tensor) -> bool:
    """Whether a tensor is torch's distributed one."""
    api = sys.modules.get("torch.distributed.tensor")
    return api is not None and isinstance(tensor, api.DTensor)


def with_inner(tensor: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A wrapper like this one around changed tensors, in the same place for autograd."""
    if not wraps_others(tensor):
        return change(tensor) if isinstance(tensor, Tensor) else _real_object(tensor)
    names, context = tensor.__tensor_flatten__()
    inner = {name: with_inner(getattr(tensor, name), change) for name in names}
    made = type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
    torch._mirror_autograd_meta_to(tensor, made)  # type: ignore[attr-defined]
    return made


def _real_object(value: Any) -> Any:
    """What stands behind an object that fake tensors carry instead of a real one."""
    return getattr(value, "real_obj", value)


def functional(tensor: Tensor) -> Tensor:
    """A tensor whose mutations become new values."""
    return with_inner(tensor, FunctionalTensor.to_functional)


def is_functional(value: object) -> bool:
    """Whether a value is a tensor of a running trace, or wraps one."""
    if wraps_others(value):
        names, _ = cast(Any, value).__tensor_flatten__()
        return any(is_functional(getattr(value, name)) for name in names)
    return isinstance(value, FunctionalTensor)


def value_of(tensor: Tensor) -> Tensor:
    """What a functional tensor holds now."""
    if isinstance(tensor, FunctionalTensor):
        torch._sync(tensor)
        return torch._from_functional_tensor(tensor.elem)
    return with_inner(tensor, value_of) if wraps_others(tensor) else tensor


def is_custom_view(tensor: Tensor, root: Tensor) -> bool:
    """Whether a custom autograd function took one of the views that lead from a tensor to this."""
    if not tensor.requires_grad:
        return False
    try:
        step, end = tensor.grad_fn, root.grad_fn
    except RuntimeError:  # a view made without autograd, of something written to since
        return False
    while step is not None and step is not end:
        if isinstance(step, torch.autograd.function.BackwardCFunction):
            return True
        step = step.next_functions[0][0] if step.next_functions else None
    return False


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version


def is_reshaped(tensor: Tensor) -> bool:
    """Whether the shape or the strides of a functional tensor were changed in place."""
    return isinstance(tensor, FunctionalTensor) and torch._functionalize_has_metadata_mutation(
        tensor.elem
    )


@contextlib.contextmanager
def below_python(mode: FakeTensorMode) -> Iterator[None]:
    """Run on fake tensors, with the operators' Python implementations where shapes are symbolic."""
    python = enable_python_dispatcher() if mode.shape_env is not None else contextlib.nullcontext()
    with mode, python, torch.autograd.set_multithreading_enabled(False):
        yield


def without_bindings(mode: FakeTensorMode) -> Any:
    """Run operators with data-dependent sizes though no graph binds the symbols of these."""
    if mode.shape_env is None:
        return contextlib.nullcontext()
    return mode.shape_env.ignore_fresh_unbacked_symbols()


def trace(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    decompositions: Mapping[Any, Callable[..., Any]] | None,
) -> GraphModule:
    """The graph of what a function does to fake tensors."""
    with fx_traceback.preserve_node_meta():
        return make_fx(function, decomposition_table=decompositions)(*args)


def traced_nodes() -> list[torch.fx.Node]:
    """The nodes that the running trace has made so far; none without a trace."""
    mode = get_proxy_mode()
    return [] if mode is None else list(mode.tracer.graph.nodes)


@contextlib.contextmanager
def keep_metadata() -> Iterator[None]:
    """Let nodes carry what the nodes they were traced from carried."""
    with fx_traceback.preserve_node_meta():
        yield


@contextlib.contextmanager
def remember_lines() -> Iterator[None]:
    """Let autograd remember which line of the program each of its steps comes from."""
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        yield


def carry_lines(outputs: Sequence[Tensor]) -> None:
    """Let what is traced in backward name the lines that forward's steps came from."""
    pending: list[Any] = [one.grad_fn for one in outputs]
    seen: set[Any] = set()
    while pending:
        step = pending.pop()
        if step is None or step in seen:
            continue
        seen.add(step)
        lines = step.metadata.get("traceback_")
        if lines:
            step.register_prehook(lambda _, lines=lines: fx_traceback.set_stack_trace(lines))
        pending += [following for following, _ in step.next_functions]


def current_fake_mode(args: Sequence[object]) -> FakeTensorMode | None:
    """The mode of the compiler in front, or of the arguments."""
    context = TracingContext.try_get()
    if context is not None and context.fake_mode is not None:
        return context.fake_mode
    return detect_fake_mode(list(args))


UNKNOWN_SIZE = 4096
"""Taken for a symbolic size that nothing is known of: it depends on data."""


def size_hint(size: Any) -> int:
    """The value that a symbolic integer had when it was traced, without a guard on it."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    hint_of = getattr(symbolic_shapes, "optimization_hint", None)  # since 2.13
    if hint_of is not None:
        return int(hint_of(size, fallback=UNKNOWN_SIZE))
    hint = size.node.hint if size.node.has_hint() else None
    return hint if isinstance(hint, int) else UNKNOWN_SIZE


def storage_key(tensor: Tensor) -> int | None:
    """What two tensors have in common that share memory; None for those without a storage."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def schema_arguments(node: torch.fx.Node) -> Iterator[tuple[Any, Any]]:
    """The declared arguments of an operator's node, with what is given for them."""
    if isinstance(node.target, OpOverload):
        yield from bind(node.target._schema, node.args, node.kwargs)


def argument_of(node: torch.fx.Node, name: str) -> Any:
    """What an operator's node is given for an argument, or its default; None if it has none."""
    for argument, given in schema_arguments(node):
        if argument.name == name:
            return given
    declared = node.target._schema.arguments if isinstance(node.target, OpOverload) else ()
    return next((one.default_value for one in declared if one.name == name), None)


def declared_returns(op: OpOverload) -> list[Any]:
    """What an operator returns, by its schema, with the arguments it may share memory with."""
    return op._schema.returns


def is_view_op(op: OpOverload) -> bool:
    """Whether an operator returns another view of its argument, by its schema."""
    returns = op._schema.returns
    return bool(returns) and all(
        one.alias_info is not None and not one.alias_info.is_write for one in returns
    )


def symbol_bindings(graph: torch.fx.Graph) -> dict[Any, torch.fx.Node]:
    """The node that first brings each symbol of a graph in."""
    return symbolic_shapes.find_symbol_binding_fx_nodes(graph)


def bound_symbol(node: torch.fx.Node) -> Any:
    """The symbol that a node brings in, if it does."""
    return symbolic_shapes.is_symbol_binding_fx_node(node)


def symbols_in(value: Any) -> list[Any]:
    """The symbols in the shape of a value, by name."""
    if not isinstance(value, (Tensor, *SYMBOLIC)):
        return []
    return sorted(symbolic_shapes.free_symbols(value), key=str)


def fake_like(real: Tensor, example: FakeTensor) -> FakeTensor:
    """A tensor without elements that stands for `real` where `example` is used."""
    return example.fake_mode.from_tensor(real, static_shapes=True)


INPUT_VALUES = "eager_input_vals"
"""Under which nodes keep the values that they read, if these must reach them laid out as traced."""


def as_fake(mode: FakeTensorMode, value: Any) -> Any:
    """A value whose tensors have no elements."""
    return pytree.tree_map_only(
        Tensor,
        lambda one: one if is_fake(one) else mode.from_tensor(one, static_shapes=True),
        value,
    )


def has_storage(tensor: Tensor) -> bool:
    """Whether a tensor has memory that can be compared."""
    return torch._C._has_storage(tensor)


@contextlib.contextmanager
def keep_rng() -> Iterator[None]:
    """Leave the generators as they were: tracing draws nothing."""
    with torch.random.fork_rng(devices=[], enabled=True):
        yield


def no_autocast() -> Any:
    """Backward runs outside the autocast regions of its forward, and so do traced graphs."""
    return torch._C._DisableAutocast()


def is_autocast() -> bool:
    """Whether autocast is on, for any device."""
    return torch._C._is_any_autocast_enabled()


def is_impure(node: torch.fx.Node) -> bool:
    """Whether a node does something besides its result."""
    if node.op in ("placeholder", "output"):
        return True
    if node.op != "call_function":
        return node.is_impure() if node.op == "call_module" else False
    if has_effects(node.target):
        return True
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        return True
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.is_mutable:
        return True
    return node.is_impure()


getitem = operator.getitem


def direct(op: Any) -> Any:
    """An operator without the Python layer around it, where there is one that does nothing."""
    return op._op


def delayed_error(message: str, tensor: Tensor) -> Tensor:
    """The same tensor; to differentiate it raises."""
    # Only what requires a gradient is asked for one.
    functions: Any = vars(torch._C)["_functions"]
    return functions.DelayedError(message, 1)(tensor.detach().requires_grad_())


def operator_named(name: str) -> Any:
    """An operator by its full name."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found


def attribute(module: Any, path: str) -> Any:
    """An attribute of a module, by its path."""
    for name in path.split("."):
        module = getattr(module, name)
    return module


def inductor_decompositions() -> Mapping[Any, Callable[..., Any]]:
    """The operators that Inductor wants taken apart."""
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table

    with config.patch(fallback_random=True):
        return select_decomp_table()


def pointwise_decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Activations, their derivatives and batch norm, in terms of arithmetic."""
    from torch._decomp import get_decompositions

    derivatives = "elu gelu hardsigmoid hardswish hardtanh leaky_relu sigmoid silu tanh threshold"
    others = (
        "conj_physical cudnn_batch_norm cudnn_batch_norm_backward detach elu hardsigmoid hardswish "
        "hardtanh is_same_size leaky_relu masked_fill"
    )
    names = [*(f"{name}_backward" for name in derivatives.split()), *others.split()]
    return get_decompositions([getattr(torch.ops.aten, name) for name in names])


class CudaGraphs:
    """What the graphs of one function have in common when Inductor records CUDA graphs of them."""

    def __init__(self) -> None:
        from torch._inductor.cudagraph_utils import BoxedDeviceIndex
        from torch._inductor.utils import BoxedBool

        self.use = BoxedBool(True)
        self.device = BoxedDeviceIndex(None)
        self.number = next(_graph_numbers)
        self.is_one = True
        """Whether forward was recorded as one, so that what it leaves is where it was."""


_graph_numbers = itertools.count()


def inductor(
    module: GraphModule,
    inputs: Sequence[Any],
    *,
    backward: bool,
    inference: bool,
    fixed: Sequence[int] = (),
    handed: Sequence[int] = (),
    donated: Sequence[int] = (),
    num_visible: int = 0,
    cudagraphs: CudaGraphs | None = None,
) -> Callable[[list[Any]], Any]:
    """What Inductor makes of a graph: a function that takes its inputs in a list.

    `fixed` are inputs that stay where they are from call to call, `handed` those that forward's
    graph left, `donated` those that may be written over. The first `num_visible` outputs are laid
    out as they were traced.
    """
    from torch._inductor import compile_fx

    output = module.graph.find_nodes(op="output")[0]
    output.meta["user_visible_output_idxs"] = [
        at for at, one in enumerate(output.args[0][:num_visible]) if isinstance(one, torch.fx.Node)
    ]
    compile_fx.record_original_output_strides(module)
    # Random numbers by eager's operators, so that they are eager's numbers.
    settings: dict[str, Any] = {"fallback_random": True}
    extra: dict[str, Any] = {}
    if cudagraphs is not None:
        settings["triton.cudagraphs"] = bool(cudagraphs.use)
        fixed = [*fixed, *handed] if cudagraphs.is_one else fixed
        extra = {
            "cudagraphs": cudagraphs.use,
            "graph_id": cudagraphs.number,
            "boxed_forward_device_index": cudagraphs.device,
        }
    with compile_fx.config.patch(settings), _may_write_over(module, donated):
        made = compile_fx.compile_fx_inner(
            module,
            list(inputs),
            static_input_idxs=sorted(set(fixed)),
            is_backward=backward,
            is_inference=inference,
            **extra,
        )
    if cudagraphs is not None and not backward:
        cudagraphs.is_one = len(getattr(made, "partition_maps", None) or ()) <= 1
    return made


@contextlib.contextmanager
def _may_write_over(module: GraphModule, donated: Sequence[int]) -> Iterator[None]:
    """Let Inductor, compiling a graph inside, reuse the memory of some of its inputs."""
    context = TracingContext.try_get()
    if context is None or not donated:
        yield
        return
    inputs = module.graph.find_nodes(op="placeholder")
    for at in donated:
        # Inductor's cache knows graphs by their code alone: equal ones must differ in it.
        inputs[at].target = f"{inputs[at].target}_donated"
    module.recompile()
    before = context.fw_metadata
    context.fw_metadata = cast(Any, types.SimpleNamespace(bw_donated_idxs=list(donated)))
    try:
        yield
    finally:
        context.fw_metadata = before


def keeps_graph() -> bool:
    """Whether the running backward may be followed by another one over the same graph."""
    autograd: Any = vars(torch._C)["_autograd"]
    return autograd._get_current_graph_task_keep_graph()


def has_hooks_on_saved() -> bool:
    """Whether hooks see what is saved for backward."""
    autograd: Any = vars(torch._C)["_autograd"]
    return autograd._top_saved_tensors_default_hooks(False) is not None


@contextlib.contextmanager
def reported_strides() -> Iterator[list[Any] | None]:
    """The strides that a compiler gave the outputs of the graph it compiles inside."""
    if TracingContext.try_get() is None:
        yield None
        return
    with TracingContext.report_output_strides() as strides:
        yield strides


def check_unlike_jit(module: torch.nn.Module) -> None:
    """Refuse modules that Python cannot look into."""
    if isinstance(module, torch.jit.ScriptModule):
        raise NotImplementedError("a TorchScript module cannot be compiled ahead of time")


class Replay(torch.fx.Interpreter):
    """Runs a graph of Dynamo's."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call; a checkpointed block only tags what it does.

        The partition is what computes again. A checkpoint that did so in the trace would want its
        arguments unchanged, among them the buffers that batch norm writes to.
        """
        if target is not torch.ops.higher_order.tag_activation_checkpoint:
            return super().call_function(target, args, kwargs)
        autograd: Any = vars(torch._C)["_autograd"]
        before = autograd._saved_tensors_hooks_set_tracing(True)
        try:
            return super().call_function(target, args, kwargs)
        finally:
            autograd._saved_tensors_hooks_set_tracing(before)


def call_with(module: torch.nn.Module, given: Mapping[str, Tensor], args: Sequence[Any]) -> Any:
    """Call a module with other tensors in place of its parameters and buffers."""
    if isinstance(module, GraphModule):
        with torch.nn.utils.stateless._reparametrize_module(module, dict(given)):
            return Replay(module).run(*args)
    return torch.func.functional_call(module, dict(given), tuple(args))


def torchscript(module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A graph compiled by TorchScript, which knows operators without their overloads."""
    module = GraphModule(module, copy.deepcopy(module.graph))
    for node in module.graph.nodes:
        if node.op == "output":
            node.args = (tuple(node.args[0]),)
        if isinstance(node.target, OpOverload):
            node.target = node.target.overloadpacket
        if node.target is torch.ops.aten._to_copy and set(node.kwargs) == {"dtype"}:
            node.target = torch.ops.aten.to
        # Where no number is named, the current device of the kind is meant.
        named = {k: v.type if isinstance(v, torch.device) else v for k, v in node.kwargs.items()}
        node.kwargs = named
    module.graph.lint()
    module.recompile()
    with _no_autocast_in_torchscript():
        scripted = torch.jit.script(module)
        torch._C._jit_pass_remove_mutation(scripted.graph)
        return torch.jit.freeze(scripted.eval())


@contextlib.contextmanager
def _no_autocast_in_torchscript() -> Iterator[None]:
    """Let TorchScript cast nothing: a traced graph has its casts in it."""
    before = torch._C._jit_set_autocast_mode(False)
    try:
        yield
    finally:
        torch._C._jit_set_autocast_mode(before)


def has_effects(op: Any) -> bool:
    """Whether an operator does something that is no value, such as printing."""
    return isinstance(op, OpOverload) and effects.has_effects(op)


def run_as_it_is(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Trace an operator past functionalisation.

    Graphs run in the order in which they were traced, so effects need no values that order them.
    """
    plain_args, plain_kwargs = pytree.tree_map_only(Tensor, value_of, (args, kwargs))
    with disable_functional_mode():
        result = op(*plain_args, **plain_kwargs)
    return pytree.tree_map_only(Tensor, functional, result)


@functools.cache
def skip_in_dynamo(module: str) -> None:
    """Let Dynamo call the functions of a module instead of tracing them."""
    from torch._dynamo import trace_rules

    trace_rules.add(module)


def fixed_inputs(module: GraphModule) -> list[int]:
    """The inputs of a graph of Dynamo's that stay where they are from call to call."""
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    return [
        i
        for i, node in enumerate(inputs)
        if node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")
        or isinstance(node.meta.get("example_value"), torch.nn.Parameter)
    ]


def tensor_metadata(value: Any) -> Any:
    """What `tensor_meta` of a node says about its value, in lists where there are several."""
    from torch.fx.passes.shape_prop import _extract_tensor_metadata

    return pytree.tree_map_only(Tensor, _extract_tensor_metadata, value)


def report_ddp_buckets(number: int) -> None:
    """Keep the count that torch's own pass keeps, where its users look for it."""
    from torch._dynamo.utils import counters

    counters["inductor"]["ddp_buckets"] = number


def num_bytes(tensor: Tensor) -> int:
    """What the elements of a tensor take, with hints for symbolic sizes."""
    numel = 1
    for size in tensor.shape:
        numel *= size_hint(size)
    return numel * tensor.element_size()


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


def schema_text(op: OpOverload) -> str:
    """What an operator takes and returns."""
    return str(op._schema)


def dispatch_text(tensor: Tensor) -> str:
    """What the dispatcher makes of a tensor: device, lazy conjugation, inference and so on."""
    return str(torch._C._dispatch_keys(tensor))


def view_text(tensor: Tensor) -> str:
    """How a view came to be, as far as autograd allows or forbids writes to it by that."""
    return str(torch._C._autograd._get_creation_meta(tensor))  # type: ignore[attr-defined]


def what_intercepts() -> str | None:
    """Something that sees or changes every operator, which no key could describe; None if none."""
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    for mode in (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()):
        return f"the mode {type(mode).__name__} is active"
    functorch: Any = vars(torch._C)["_functorch"]
    if functorch.peek_interpreter_stack() is not None:
        return "a functorch transform is active"
    if has_hooks_on_saved():
        return "hooks on saved tensors are active"
    return None


def autocast_state(device_types: Iterable[str]) -> list[Any]:
    """Where autocast is on, and for which dtypes."""
    state: list[Any] = [torch.is_autocast_cache_enabled()]
    for kind in sorted(device_types):
        with contextlib.suppress(RuntimeError):  # a device that has no autocast
            state.append(
                [kind, torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind))]
            )
    return state


def backend_flags() -> dict[str, Any]:
    """The global flags that decide which operators a function is made of."""
    backends: Any = torch.backends
    return {
        "default_dtype": str(torch.get_default_dtype()),
        "default_device": str(torch.get_default_device()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        "matmul": torch.get_float32_matmul_precision(),
        "mkldnn": backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled(),
        "cpu": backends.cpu.get_cpu_capability(),
        "cudnn": [
            *(backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic),
            backends.cudnn.allow_tf32,
        ],
        "attention": [
            *(backends.cuda.flash_sdp_enabled(), backends.cuda.mem_efficient_sdp_enabled()),
            *(backends.cuda.math_sdp_enabled(), backends.cuda.cudnn_sdp_enabled()),
        ],
        "attention_fast_path": backends.mha.get_fastpath_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
    }


def device_text(device: torch.device) -> str:
    """What kind of device it is: kernels are chosen by that."""
    if device.type != "cuda":
        return str(device)
    properties = torch.cuda.get_device_properties(device)
    return f"{device} {properties.name} {properties.major}.{properties.minor}"


def inductor_settings() -> str:
    """Inductor's settings, in short."""
    from torch._inductor import config

    return config.get_hash().hex()


def compiler_versions() -> list[str]:
    """The versions of what a graph was traced with."""
    return [torch.__version__, str(torch.version.git_version), str(torch.version.cuda)]


def first_line(module: GraphModule) -> str:
    """File and line of the program at which a graph of Dynamo's begins; empty if nothing tells."""
    traces = (node.meta.get("stack_trace") for node in module.graph.nodes)
    trace = next((one for one in traces if one), "")
    found = re.findall(r'^ *File "(.+)", line (\d+)', trace, re.MULTILINE)
    return ":".join(found[-1]) if found else ""


def group_named(name: str) -> dist.ProcessGroup:
    """The process group that a collective in a graph names."""
    return c10d._resolve_process_group(cast(Any, name))
