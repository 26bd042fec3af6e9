"""The one adapter: every private corner of torch that shoal leans on is named here.

Tested on torch 2.11 and 2.13, so that a new torch release breaks this file and no other.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, SimpleNamespace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

Class = TypeVar("Class", bound=type)

DYNAMO_MODULE = "torch._dynamo"
"""Optimizers import it at their first step, which takes longer than importing torch."""


def all_gather_flat(output: Tensor, input: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Start an all-gather into one tensor; torch 2.13 renamed the function."""
    start = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return start(output, input, group=group, async_op=True)


def reduce_scatter_flat(
    output: Tensor,
    input: Tensor,
    op: dist.ReduceOp | dist.ReduceOp.RedOpType,
    group: dist.ProcessGroup,
) -> dist.Work | None:
    """Start a reduce-scatter of one tensor; torch 2.13 renamed the function."""
    start = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return start(output, input, op=cast(Any, op), group=group, async_op=True)


def local_tensor(tensor: Tensor) -> Tensor:
    """A DTensor's own local tensor, not the differentiable view that `to_local` makes."""
    assert isinstance(tensor, DTensor)
    return tensor._local_tensor


def dtensor_like(example: Tensor, local: Tensor) -> DTensor:
    """Wrap a local tensor with another DTensor's placement; skips what `from_local` checks."""
    assert isinstance(example, DTensor)
    return DTensor(local, example._spec, requires_grad=False)  # pyright: ignore[reportCallIssue]


def run_post_accumulate_hooks(parameter: Tensor) -> None:
    """Do for a gradient that was put there by hand what autograd does for its own."""
    hooks = parameter._post_accumulate_grad_hooks  # pyright: ignore[reportAttributeAccessIssue]
    for hook in tuple(hooks.values()) if hooks else ():
        hook(parameter)


def storage_pointer(tensor: Tensor) -> int:
    """Where a tensor's storage is; 0 for none, and for a tensor without one of its own."""
    return tensor.untyped_storage().data_ptr() if torch._C._has_storage(tensor) else 0


def foreach_copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target, casting where dtypes differ, in few kernels."""
    torch._foreach_copy_(targets, sources)


def inside_backward() -> bool:
    """Whether autograd is executing a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def call_after_backward(callback: Callable[[], None]) -> None:
    """Queue a call for the end of the backward that is being executed."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def reduction_and_factor(
    op: dist.ReduceOp | dist.ReduceOp.RedOpType,
) -> tuple[dist.ReduceOp.RedOpType, float]:
    """Split a reduction into its type and, for PREMUL_SUM, the factor that only pickling shows."""
    given = cast(Any, op)
    kind = given.op if hasattr(given, "op") else given
    return kind, given.__getstate__()[1] if kind == dist.ReduceOp.PREMUL_SUM else 1.0


def data_parallel_mesh_dims_class() -> type | None:
    """`DataParallelMeshDims`, which torch has only after 2.11."""
    return getattr(importlib.import_module("torch.distributed.fsdp"), "DataParallelMeshDims", None)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """The mesh as one axis; made once for each name on the root mesh."""
    return mesh._flatten(name)


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Meshes cut from one root, as the axes of one mesh; makes no process group."""
    return DeviceMesh._concatenate(meshes)


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


class _WorldOfThisThread:
    """Stands in for c10d's module state: threads that asked for it have a state of their own."""

    def __init__(self, of_process: object) -> None:
        super().__setattr__("_of_process", of_process)
        super().__setattr__("_of_thread", threading.local())
        super().__setattr__("_threads", [])

    def begin_thread(self) -> None:
        self._threads.append(threading.current_thread())
        self._of_thread.world = SimpleNamespace(
            default_pg=None,
            pg_map={},
            pg_names={},
            pg_group_ranks={},
            pg_backend_config={},
            pg_config_info=[],
            group_count=0,
            tags_to_pg={},
            pg_to_tag={},
            pg_coalesce_state={},
            comms=[],
        )

    def is_in_use(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(self._of_thread, "world", self._of_process), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(getattr(self._of_thread, "world", self._of_process), name, value)


@contextmanager
def ranks_as_threads() -> Iterator[Callable[[], None]]:
    """Let threads be ranks of `torch.distributed`; each calls the yielded function first."""
    c10d, c_api = cast(Any, dist.distributed_c10d), cast(Any, torch._C)._distributed_c10d
    process_world, hook = c10d._world, sys.excepthook
    c10d._world = world = _WorldOfThisThread(process_world)
    c_api._set_thread_isolation_mode(True)
    try:
        yield world.begin_thread
    finally:
        c_api._set_thread_isolation_mode(False)
        # A thread that is stuck must not find the groups of the process when it comes back.
        if not world.is_in_use():
            c10d._world = process_world
        sys.excepthook = hook  # init_process_group wraps it, once for each rank


def spin(num_cycles: int) -> None:
    """Keep the current CUDA stream busy for so many cycles of the device's clock."""
    torch.cuda._sleep(num_cycles)


def current_stream(device_index: int) -> torch.cuda.Stream:
    """The current CUDA stream, at a fifth of what `torch.cuda.current_stream` costs the host."""
    number, index, kind = torch._C._cuda_getCurrentStream(device_index)
    return torch.cuda.Stream(stream_id=number, device_index=index, device_type=kind)


def make_current(stream: torch.cuda.Stream) -> None:
    """Launch on another stream of the current device from here on; for pairs in a hot path."""
    torch._C._cuda_setStream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


def untraced(cls: Class) -> Class:
    """Keep dynamo out of a class's methods and of what they call: c10d calls them anywhere."""
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameAction.SKIP
    for method in vars(cls).values():
        if isinstance(method, FunctionType):
            strategy = eval_frame._FrameExecStrategy(skip, skip)
            eval_frame.set_code_exec_strategy(method.__code__, strategy)
    return cls
