"""Captured graphs with collectives in them, for tests of the passes over them.

All numbers are small integers and their halves, which floats add up exactly: results are the same
bits in whatever order ranks are summed.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from shoal._torch import groups
from shoal.compile.passes import pipeline
from shoal.compile.passes.metadata import inconsistencies
from shoal.compile.passes.pipeline import Target
from shoal.passes import Pipeline, check_graph, count_traffic

comm = torch.ops._c10d_functional
Function = Callable[..., Any]


@contextmanager
def one_rank() -> Iterator[None]:
    """A default group of this process alone."""
    groups.run_gloo_in_one_thread()  # two corrupt the heap, coalesced gathers above all
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def name() -> str:
    """The name of the default group."""
    return dist.group.WORLD.group_name


def all_reduce(x: Tensor, op: str = "sum") -> Tensor:
    """Start an all-reduce of the default group."""
    return comm.all_reduce(x, op, name())


def gather(x: Tensor) -> Tensor:
    """Start an all-gather of the default group."""
    return comm.all_gather_into_tensor(x, dist.get_world_size(), name())


def scatter(x: Tensor, op: str = "sum") -> Tensor:
    """Start a reduce-scatter of the default group."""
    return comm.reduce_scatter_tensor(x, op, dist.get_world_size(), name())


wait = comm.wait_tensor


def integers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small integers, other ones on each rank."""
    if not dist.is_initialized():
        return torch.randint(-4, 5, shape).to(dtype)
    generator = torch.Generator().manual_seed(17 * dist.get_rank() + sum(shape))
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


def capture(fn: Function, *args: Any, mode: str = "fake") -> fx.GraphModule:
    """The graph of what a function does."""
    return make_fx(fn, tracing_mode=mode)(*args)


def ops(graph: fx.Graph) -> list[str]:
    """The operators of a graph, in order."""
    return [
        node.target.__name__.split(".")[0] if node.target is not operator.getitem else "getitem"
        for node in graph.nodes
        if node.op == "call_function"
    ]


def count(graph: fx.Graph, op: str) -> int:
    """How many nodes call an operator."""
    return ops(graph).count(op)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a run: results, and inputs as they are afterwards."""

    results: list[Any]
    inputs: list[Any]


def run(module: fx.GraphModule, args: Sequence[Any]) -> Outcome:
    """Run a graph on copies of its inputs."""
    given = [copy.deepcopy(one) for one in args]
    torch.manual_seed(0)
    results = module(*given)
    flat = torch.utils._pytree.tree_leaves((results, given))
    return Outcome(results=[one.clone() for one in flat if isinstance(one, Tensor)], inputs=given)


def check_same(
    module: fx.GraphModule, args: Sequence[Any], change: Callable[[fx.Graph], object]
) -> fx.GraphModule:
    """Run a pass; the graph must be sound, move as many bytes, and give the same bits."""
    before, traffic = run(module, args), count_traffic(module.graph)
    known = inconsistencies(module.graph)  # torch says of some lists that strides are kept
    change(module.graph)
    check_graph(module.graph, known)
    module.recompile()
    after = run(module, args)
    assert len(before.results) == len(after.results)
    for one, other in zip(before.results, after.results, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other), f"{one} became {other} in\n{module.graph}"
    assert count_traffic(module.graph).num_bytes == traffic.num_bytes
    return module


def stages(target: Target) -> dict[str, Pipeline]:
    """All passes of a training function in the order in which they run, by stage."""
    return {
        "joint": pipeline.joint(target, trains=True),
        "before_cut": pipeline.before_cut(num_fwd_outputs=0),
        "forward": pipeline.forward(target),
        "backward": pipeline.backward(target),
        "collectives": pipeline.sharded(bucket_bytes=1, max_in_flight_bytes=None),
        "after_collectives": pipeline.after_collectives(target),
    }
