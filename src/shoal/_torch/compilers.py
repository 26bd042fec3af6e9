"""Compilers of graphs that torch brings: Inductor, TorchScript."""

from __future__ import annotations

import contextlib
import copy
import itertools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch.fx import GraphModule

from shoal._torch.operators import OpOverload
from shoal._torch.traces import TracingContext


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
    keeps_order: bool = False,
    cudagraphs: CudaGraphs | None = None,
) -> Callable[[list[Any]], Any]:
    """What Inductor makes of a graph: a function that takes its inputs in a list.

    `fixed` are inputs that stay where they are from call to call, `handed` those that forward's
    graph left, `donated` those that may be written over. The first `num_visible` outputs are laid
    out as they were traced. Nodes run in another order, one that takes less memory, unless the
    graph's is to be kept.
    """
    from torch._inductor import compile_fx

    output = module.graph.find_nodes(op="output")[0]
    output.meta["user_visible_output_idxs"] = [
        at for at, one in enumerate(output.args[0][:num_visible]) if isinstance(one, torch.fx.Node)
    ]
    compile_fx.record_original_output_strides(module)
    # Random numbers by eager's operators, so that they are eager's numbers.
    settings: dict[str, Any] = {"fallback_random": True}
    if keeps_order:
        settings["reorder_for_peak_memory"] = False
    extra: dict[str, Any] = {}
    if cudagraphs is None or cudagraphs.is_one:
        fixed = [*fixed, *handed]  # without recordings: they need not be looked at for alignment
    if cudagraphs is not None:
        settings["triton.cudagraphs"] = bool(cudagraphs.use)
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
