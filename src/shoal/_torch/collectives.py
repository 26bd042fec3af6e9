"""Collectives: a process group's own methods, and nodes of a graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from shoal._torch.subclasses import no_torch_function

RENAMED = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "start_coalescing": "_start_coalescing",
    "end_coalescing": "_end_coalescing",
}
"""Methods of a process group by their names since torch 2.13, and what they were called before."""


def _method(group: dist.ProcessGroup, name: str) -> Callable[..., dist.Work]:
    return getattr(group, name, None) or getattr(group, RENAMED[name])


def gather_method(group: dist.ProcessGroup) -> Callable[[Tensor, Tensor], dist.Work]:
    """The group's own all-gather into one tensor (output, input)."""
    method, options = _method(group, "all_gather_single"), c10d.AllgatherOptions()
    return lambda output, input: method(output, input, options)


def all_to_all_method(group: dist.ProcessGroup) -> Callable[[Tensor, Tensor], dist.Work]:
    """The group's own all-to-all of equal pieces (output, input)."""
    method = _method(group, "all_to_all_single")
    options = c10d.AllToAllOptions()
    return lambda output, input: method(output, input, [], [], options)


def scatter_method(
    group: dist.ProcessGroup, op: dist.ReduceOp | dist.ReduceOp.RedOpType
) -> Callable[[Tensor, Tensor], dist.Work]:
    """The group's own reduce-scatter of one tensor (output, input)."""
    method = _method(group, "reduce_scatter_single")
    options = c10d.ReduceScatterOptions()
    options.reduceOp = cast(Any, op)
    return lambda output, input: method(output, input, options)


def gather_in_stream(
    group: dist.ProcessGroup, pairs: Sequence[tuple[Tensor, Tensor]]
) -> Callable[[], object]:
    """All-gathers (output, input) as one launch, which NCCL makes on the current stream."""
    options = c10d.AllgatherOptions()
    options.asyncOp = False
    if len(pairs) == 1:
        return partial(_method(group, "all_gather_single"), *pairs[0], options)
    outputs, inputs = [one for one, _ in pairs], [one for _, one in pairs]
    return partial(_method(group, "all_gather_single_coalesced"), outputs, inputs, options)


def scatter_in_stream(
    group: dist.ProcessGroup, op: dist.ReduceOp | dist.ReduceOp.RedOpType
) -> Callable[[Sequence[tuple[Tensor, Tensor]]], object]:
    """Reduce-scatters (output, input) as one launch, which NCCL makes on the current stream."""
    one = _method(group, "reduce_scatter_single")
    several = _method(group, "reduce_scatter_single_coalesced")
    options = c10d.ReduceScatterOptions()
    options.reduceOp = cast(Any, op)
    options.asyncOp = False

    def scatter(pairs: Sequence[tuple[Tensor, Tensor]]) -> object:
        if len(pairs) == 1:
            return one(*pairs[0], options)
        return several([out for out, _ in pairs], [given for _, given in pairs], options)

    return scatter


def all_reduce_method(
    group: dist.ProcessGroup, op: dist.ReduceOp | dist.ReduceOp.RedOpType
) -> Callable[[Tensor], dist.Work]:
    """The group's own all-reduce."""
    method, options = group.allreduce, c10d.AllreduceOptions()
    options.reduceOp = cast(Any, op)
    return lambda tensor: method([tensor], options)


class _Shown(Tensor):
    """A collective's output while modes look at it: below them the collective is run another way.

    Modes come before subclasses. So every mode sees the collective, and then this class is asked.
    """

    run: Callable[[], dist.Work]

    @staticmethod
    def __new__(cls, output: Tensor, run: Callable[[], dist.Work]) -> _Shown:
        shown = Tensor._make_wrapper_subclass(
            cls, output.shape, dtype=output.dtype, device=output.device
        )
        shown.run = run
        return shown

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> tuple[Tensor, Any]:
        return args[0], args[0].run().boxed()


def shown_as(
    collective: Callable[[Tensor, Tensor], dist.Work],
    output: Tensor,
    input: Tensor,
    run: Callable[[], dist.Work],
) -> dist.Work:
    """Run a collective in a way of our own, and show dispatch modes the one that it stands for.

    A mode that counts collectives (`CommDebugMode`) counts the collective that was asked for. The
    bytes that go to other ranks stay the same, so that a mode may be active on some ranks only.
    """
    if not torch._C._len_torch_dispatch_stack():
        return run()
    return collective(cast(Tensor, _Shown(output, run)), input)


def reduction_kind(op: dist.ReduceOp | dist.ReduceOp.RedOpType) -> dist.ReduceOp.RedOpType:
    """The type of a reduction, whichever way c10d passes it."""
    return cast(Any, op).op if hasattr(op, "op") else cast(Any, op)


def premultiplier(op: dist.ReduceOp | dist.ReduceOp.RedOpType) -> float:
    """The factor of a PREMUL_SUM, which only pickling shows."""
    return cast(Any, op).__getstate__()[1]


def premultiplied_sum(factor: float) -> dist.ReduceOp:
    """A sum of inputs that are each multiplied first; torch 2.13 made it a constructor."""
    make = getattr(dist, "_make_nccl_premul_sum", None)
    return make(factor) if make is not None else cast(Any, dist.ReduceOp.PREMUL_SUM)(factor)


def is_asynchronous(opts: object) -> bool:
    """Whether c10d asked for an asynchronous collective; options made in C++ say yes."""
    return getattr(opts, "asyncOp", True)


def answer_gathers_from_c(
    answer: Callable[[dist.ProcessGroup, Tensor, Tensor, bool], dist.Work | None],
) -> torch.library.Library:
    """Offer every all-gather into one tensor to `answer` first, those issued from C++ included.

    Up to torch 2.13 `ProcessGroup`'s Python trampolines lack this one entry point, which Inductor's
    `all_gather_into_tensor_out` uses: it goes to the dispatcher instead, and there to the C++
    backend that a group written in Python does not have. The BackendSelect key is free, and stands
    before every backend. `answer` returns None for groups it does not know. Serves as long as the
    returned library lives.
    """
    op = torch.ops.c10d._allgather_base_.default
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def kernel(
        keyset: torch._C.DispatchKeySet,
        output: Tensor,
        input: Tensor,
        boxed: torch.ScriptObject,
        async_op: bool = True,
        timeout: int = -1,
    ) -> tuple[Tensor, torch.ScriptObject]:
        work = answer(dist.ProcessGroup.unbox(boxed), output, input, async_op)
        if work is None:
            return op.redispatch(keyset & below, output, input, boxed, async_op, timeout)
        return output, work.boxed()

    library = torch.library.Library("c10d", "IMPL")
    library.impl("_allgather_base_", kernel, "BackendSelect", with_keyset=True)
    return library


def gather_in_graph(shard: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
    """An all-gather as nodes of a graph."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_gather_into_tensor(shard, size, group.group_name))


def reduce_scatter_in_graph(
    rows: Tensor, size: int, group: dist.ProcessGroup, reduction: str = "sum"
) -> Tensor:
    """A reduce-scatter that adds, or averages, as nodes of a graph."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.reduce_scatter_tensor(rows, reduction, size, group.group_name))


def all_reduce_in_graph(tensor: Tensor, group: dist.ProcessGroup, reduction: str = "sum") -> Tensor:
    """An all-reduce that adds, or averages, as nodes of a graph."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(tensor, reduction, group.group_name))


def broadcast_in_graph(tensor: Tensor, source: int, group: dist.ProcessGroup) -> Tensor:
    """What one rank of a group has, as nodes of a graph."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.broadcast(tensor, source, group.group_name))


def group_named(name: str) -> dist.ProcessGroup:
    """The process group that a collective in a graph names."""
    return c10d._resolve_process_group(cast(Any, name))


_OPERATORS = (
    *("allreduce_", "allreduce_coalesced_", "reduce_", "broadcast_", "barrier", "gather_"),
    *("allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_"),
    *("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "scatter_"),
    *("alltoall_", "alltoall_base_", "send", "recv_", "recv_any_source_", "monitored_barrier_"),
)


def before_collectives(hear: Callable[[str], object]) -> torch.library.Library:
    """Call `hear` with the name of every collective of this process before it is launched.

    However it was asked for: all ways lead through these operators, whose BackendSelect key is
    free. What `hear` raises comes to whoever asked. Serves as long as the returned library lives.
    """
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    library = torch.library.Library("c10d", "IMPL")

    def listen(name: str) -> None:
        op = getattr(torch.ops.c10d, name).default

        def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
            hear(name)
            return op.redispatch(keyset & below, *args, **kwargs)

        library.impl(name, kernel, "BackendSelect", with_keyset=True)

    with warnings.catch_warnings():  # once in a process torch tells of kernels that are replaced
        warnings.filterwarnings("ignore", message=r"(?s).*Overriding a previously registered")
        for name in _OPERATORS:
            listen(name)
    return library


def stop_hearing(library: torch.library.Library) -> None:
    """End what `before_collectives` began."""
    cast(Any, library)._destroy()
