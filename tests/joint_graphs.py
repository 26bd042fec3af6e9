"""Joint graphs for the partitioners' tests: traced from functions, phases tagged on the way."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from shoal.compile.partition.partitioners import (
    default_partition,
    min_cut_rematerialization_partition,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A joint graph and what it was traced with."""

    module: fx.GraphModule
    num_fwd_outputs: int
    primals: tuple[Any, ...]
    tangents: tuple[Tensor, ...]

    def node(self, name: str) -> fx.Node:
        return next(node for node in self.module.graph.nodes if node.name == name)

    def calls(self, op: Any) -> list[fx.Node]:
        return [node for node in self.module.graph.nodes if node.target == op]

    def run(self, seed: int = 0) -> tuple[Any, ...]:
        """What the joint graph itself gives: the oracle."""
        torch.manual_seed(seed)
        with torch.no_grad():
            return tuple(self.module(list(self.primals), list(self.tangents)))


def trace_joint(
    function: Callable[..., Any],
    primals: Sequence[Any],
    *,
    mode: str = "fake",
    decompositions: Mapping[Any, Any] | None = None,
    example: Callable[..., Any] | None = None,
) -> Traced:
    """Trace a function of tensors and its gradients by everything that requires one.

    `example` gives outputs of the same shapes where the function itself cannot run.
    """
    outputs = _listed((example or function)(*primals))
    tangents = [torch.randn_like(one) for one in outputs if one.requires_grad]
    num_forward_nodes = [0]

    def joint(primals: list[Any], tangents: list[Tensor]) -> list[Tensor | None]:
        results = _listed(function(*primals))
        num_forward_nodes[0] = len(get_proxy_mode().tracer.graph.nodes)
        wanted = [one for one in primals if isinstance(one, Tensor) and one.requires_grad]
        outputs = [one for one in results if one.requires_grad]
        found = iter(torch.autograd.grad(outputs, wanted, tangents, allow_unused=True))
        of = {id(one): next(found) for one in wanted}
        return [*results, *(of.get(id(one)) for one in primals)]

    with enable_python_dispatcher():
        module = make_fx(
            joint,
            tracing_mode=mode,
            decomposition_table=None if decompositions is None else dict(decompositions),
        )(list(primals), tangents)
    for place, node in enumerate(module.graph.nodes):
        if node.op == "call_function":
            phase = "forward" if place < num_forward_nodes[0] else "backward"
            node.meta["phase"] = phase
            node.meta["partitioner_tag"] = f"is_{phase}"  # torch's word for it
    return Traced(
        module=module,
        num_fwd_outputs=len(outputs),
        primals=tuple(primals),
        tangents=tuple(tangents),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A forward graph and a backward graph, and how much goes from one to the other."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    num_saved_tensors: int
    num_saved_symints: int
    """Symbolic numbers, and whatever else is no tensor."""


def split_as_traced(module: fx.GraphModule, *, num_fwd_outputs: int, **options: Any) -> Split:
    """Take a joint graph apart by `default_partition`."""
    parts = default_partition(module, None, num_fwd_outputs=num_fwd_outputs, **options)
    return _counted(*parts, num_fwd_outputs)


def split_by_min_cut(
    module: fx.GraphModule,
    *,
    num_fwd_outputs: int,
    static_inputs: Sequence[int] = (),
    **options: Any,
) -> Split:
    """Take a joint graph apart by `min_cut_rematerialization_partition`."""
    parts = min_cut_rematerialization_partition(
        module,
        None,
        num_fwd_outputs=num_fwd_outputs,
        static_lifetime_input_indices=static_inputs,
        **options,
    )
    return _counted(*parts, num_fwd_outputs)


def _counted(forward: fx.GraphModule, backward: fx.GraphModule, num_fwd_outputs: int) -> Split:
    saved = forward.graph.output_node().args[0][num_fwd_outputs:]
    num_tensors = sum(isinstance(node.meta["val"], Tensor) for node in saved)
    return Split(
        forward=forward,
        backward=backward,
        num_saved_tensors=num_tensors,
        num_saved_symints=len(saved) - num_tensors,
    )


def run_split(
    traced: Traced, parts: Split, seed: int = 0, *, overwrite: Collection[int] = ()
) -> tuple[Any, ...]:
    """Run forward, then backward on what it kept; outputs, then gradients.

    Some inputs can be overwritten in between.
    """
    torch.manual_seed(seed)
    primals = [
        one.detach().clone() if place in overwrite else one
        for place, one in enumerate(traced.primals)
    ]
    with torch.no_grad():
        results = parts.forward(*primals)
        for place in overwrite:
            primals[place].fill_(torch.nan)
        outputs, tensors, symbols = kept_of(traced, parts, results)
        gradients = parts.backward(*symbols, *tensors, *traced.tangents)
    return (*outputs, *gradients)


def kept_of(traced: Traced, parts: Split, results: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Forward's results: outputs, kept tensors, kept symbols."""
    first = traced.num_fwd_outputs
    last = first + parts.num_saved_tensors
    assert len(results) == last + parts.num_saved_symints
    assert all(isinstance(one, Tensor) for one in results[first:last])
    return results[:first], results[first:last], results[last:]


def held_bytes(tensors: Sequence[Any]) -> int:
    """The memory that some tensors hold together."""
    storages = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
        for one in tensors
        if isinstance(one, Tensor)
    }
    return sum(storages.values())


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """A joint graph for a partitioner that changes what it is given."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = copy.copy(node.meta)
    return fx.GraphModule(module, graph)


def _listed(results: Any) -> list[Any]:
    return list(results) if isinstance(results, list | tuple) else [results]
