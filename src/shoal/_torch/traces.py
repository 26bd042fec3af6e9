"""Traces: how a graph is captured, what its nodes are told."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext as TracingContext
from torch._guards import tracing as tracing
from torch.fx import GraphModule
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils import _pytree as pytree

from shoal._torch.autograd import without_hooks_on_saved


def trace(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    decompositions: Mapping[Any, Callable[..., Any]] | None,
) -> GraphModule:
    """The graph of what a function does to fake tensors."""
    with keep_metadata():
        return make_fx(function, decomposition_table=decompositions)(*args)


@contextmanager
def without_fused_rnn() -> Iterator[None]:
    """Let a trace see what an LSTM is made of.

    oneDNN's operator on CPU keeps what backward reads only while autograd records, and a graph that
    has its own backward runs without.
    """
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def traced_nodes() -> list[torch.fx.Node]:
    """The nodes that the running trace has made so far; none without a trace."""
    mode = get_proxy_mode()
    return [] if mode is None else list(mode.tracer.graph.nodes)


keep_metadata = fx_traceback.preserve_node_meta
"""A context in which nodes carry the metadata of the nodes that they are traced from."""


def remember_lines() -> AbstractContextManager[None]:
    """A context in which autograd remembers the line of the program of each of its steps."""
    return torch.autograd.set_detect_anomaly(True, check_nan=False)


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


def keep_rng() -> AbstractContextManager[None]:
    """A context that leaves the generators as they were: tracing draws nothing."""
    return torch.random.fork_rng(devices=[])


def no_autocast() -> Any:
    """Backward runs outside the autocast regions of its forward, and so do traced graphs."""
    return torch._C._DisableAutocast()


INPUT_VALUES = "eager_input_vals"
"""Under which nodes keep the values that they read, if these must reach them laid out as traced."""


def tensor_metadata(value: Any) -> Any:
    """What `tensor_meta` of a node says about its value, in lists where there are several."""
    from torch.fx.passes.shape_prop import _extract_tensor_metadata

    return pytree.tree_map_only(Tensor, _extract_tensor_metadata, value)


@contextmanager
def computed_again_in_backward() -> Iterator[None]:
    """Tag the nodes that a trace makes inside, as activation checkpointing does."""
    from torch.utils.checkpoint import CheckpointPolicy

    meta = fx_traceback.current_meta
    before = dict(meta)
    meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    try:
        yield
    finally:
        meta.clear()
        meta.update(before)


parameters_replaced = torch.nn.utils.stateless._reparametrize_module
"""A context in which a module has other tensors for some of its parameters; Dynamo knows it."""


class Replay(torch.fx.Interpreter):
    """Runs a graph of Dynamo's."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self._regions: list[Any] = []

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run; a graph that fails leaves no region open, as its program would not."""
        try:
            return super().run(*args, **kwargs)
        except BaseException:
            while self._regions:
                self._regions.pop().__exit__(None, None, None)
            raise

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call, but for what a trace does in another way."""
        if target is torch.ops.higher_order.tag_activation_checkpoint:
            return self._tag_checkpoint(target, args, kwargs)
        if target is torch.autograd.grad_mode._enter_inference_mode:
            # Fake tensors have versions. Of a region that has none, it is traced what it computes.
            region = torch.set_grad_enabled(not args[0])
        else:
            region = super().call_function(target, args, kwargs)
        if target in _ENTERING:
            self._regions.append(region)
        elif target in _LEAVING:
            self._regions.remove(args[0])
        return region

    def _tag_checkpoint(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a checkpointed block so that it only tags what it does.

        The partition is what computes again. A checkpoint that did so in the trace would want its
        arguments unchanged, among them the buffers that batch norm writes to.
        """
        with without_hooks_on_saved():
            return super().call_function(target, args, kwargs)


_ENTERING = (
    torch.amp.autocast_mode._enter_autocast,
    torch.autograd.grad_mode._enter_inference_mode,
)
_LEAVING = (
    torch.amp.autocast_mode._exit_autocast,
    torch.autograd.grad_mode._exit_inference_mode,
)
"""How graphs enter and leave what their programs entered with `with`."""


def call_with(module: torch.nn.Module, given: Mapping[str, Tensor], args: Sequence[Any]) -> Any:
    """Call a module with other tensors in place of its parameters and buffers."""
    if isinstance(module, GraphModule):
        with parameters_replaced(module, dict(given)):
            return Replay(module).run(*args)
    return torch.func.functional_call(module, dict(given), tuple(args))


def attribute(module: Any, path: str) -> Any:
    """An attribute of a module, by its path."""
    return functools.reduce(getattr, path.split("."), module)
