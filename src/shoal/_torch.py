"""The one adapter: every private corner of torch that shoal leans on is named here.

Tested on torch 2.11 and 2.13, so that a new torch release breaks this file and no other.
"""

from __future__ import annotations

import functools
import importlib
import operator
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload as OpOverload
from torch.distributed import rpc
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem, _get_registry
from torch.distributed._shard import api as shard_api
from torch.distributed._shard import sharded_tensor, sharding_spec
from torch.distributed._shard.metadata import ShardMetadata as ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import (
    MEM_FORMAT_ENCODING as MEM_FORMAT_ENCODING,
)
from torch.distributed._shard.sharded_tensor.metadata import (
    ShardedTensorMetadata as ShardedTensorMetadata,
)
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as TensorProperties
from torch.distributed._shard.sharder import Sharder as Sharder
from torch.distributed._shard.sharding_plan import ShardingPlan as ShardingPlan
from torch.distributed._shard.sharding_plan import ShardingPlanner as ShardingPlanner
from torch.distributed._shard.sharding_spec import ChunkShardingSpec as ChunkShardingSpec
from torch.distributed._shard.sharding_spec import DevicePlacementSpec as DevicePlacementSpec
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec as EnumerableShardingSpec
from torch.distributed._shard.sharding_spec import PlacementSpec as PlacementSpec
from torch.distributed._shard.sharding_spec import ShardingSpec as ShardingSpec
from torch.distributed._shard.sharding_spec._internals import check_tensor as check_tensor
from torch.distributed._shard.sharding_spec._internals import (
    get_chunk_sharding_params as get_chunk_sharding_params,
)
from torch.distributed._shard.sharding_spec._internals import (
    get_chunked_dim_size as get_chunked_dim_size,
)
from torch.distributed._shard.sharding_spec._internals import get_split_size as get_split_size
from torch.distributed._shard.sharding_spec._internals import (
    validate_non_overlapping_shards_metadata as validate_non_overlapping_shards_metadata,
)
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.distributed.algorithms._comm_hooks import default_hooks as default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp import _common_utils as fsdp_common
from torch.distributed.fsdp.wrap import _or_policy as _or_policy
from torch.distributed.fsdp.wrap import _Policy as _Policy
from torch.distributed.fsdp.wrap import (
    _wrap_module_cls_individually as _wrap_module_cls_individually,
)
from torch.distributed.remote_device import _remote_device as RemoteDevice
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

Class = TypeVar("Class", bound=type)
Function = TypeVar("Function", bound=Callable[..., Any])

DYNAMO_MODULE = "torch._dynamo"
"""Optimizers import it at their first step, which takes longer than importing torch."""


no_torch_function: Any = torch._C._disabled_torch_function_impl
"""Makes a tensor subclass go straight to its `__torch_dispatch__`, at no cost per call."""

make_wrapper: Callable[..., Any] = Tensor._make_wrapper_subclass
"""A tensor with metadata and no memory, and of a subclass.

Arguments by position (cls, shape, strides, storage offset, memory format, dtype, layout, device,
pinned, requires_grad) are read in three quarters of the time that names take.
"""


def gather_method(
    group: dist.ProcessGroup, *, asynchronous: bool = True
) -> Callable[[Tensor, Tensor], dist.Work]:
    """The group's own all-gather into one tensor (output, input); torch 2.13 renamed it.

    Where it is not asynchronous, NCCL works on the current stream instead of one of its own.
    """
    method = getattr(group, "all_gather_single", None) or cast(Any, group)._allgather_base
    options = dist.distributed_c10d.AllgatherOptions()
    options.asyncOp = asynchronous
    return lambda output, input: method(output, input, options)


def all_to_all_method(group: dist.ProcessGroup) -> Callable[[Tensor, Tensor], dist.Work]:
    """The group's own all-to-all of equal pieces (output, input); torch 2.13 renamed it."""
    method = getattr(group, "all_to_all_single", None) or cast(Any, group).alltoall_base
    options = dist.distributed_c10d.AllToAllOptions()
    return lambda output, input: method(output, input, [], [], options)


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

    Whoever counts collectives (`CommDebugMode`) counts those that were asked for. What goes to
    other ranks stays the same, so that not all of them need to be watched.
    """
    if not torch._C._len_torch_dispatch_stack():
        return run()
    return collective(cast(Tensor, _Shown(output, run)), input)


def scatter_method(
    group: dist.ProcessGroup,
    op: dist.ReduceOp | dist.ReduceOp.RedOpType,
    *,
    asynchronous: bool = True,
) -> Callable[[Tensor, Tensor], dist.Work]:
    """The group's own reduce-scatter of one tensor (output, input); torch 2.13 renamed it."""
    method = getattr(group, "reduce_scatter_single", None)
    method = method or cast(Any, group)._reduce_scatter_base
    options = dist.distributed_c10d.ReduceScatterOptions()
    options.reduceOp = cast(Any, op)
    options.asyncOp = asynchronous
    return lambda output, input: method(output, input, options)


def all_reduce_method(
    group: dist.ProcessGroup, op: dist.ReduceOp | dist.ReduceOp.RedOpType
) -> Callable[[Tensor], dist.Work]:
    """The group's own all-reduce."""
    method, options = group.allreduce, dist.distributed_c10d.AllreduceOptions()
    options.reduceOp = cast(Any, op)
    return lambda tensor: method([tensor], options)


def run_gloo_in_one_thread() -> None:
    """Give every gloo group that torch makes from now on one worker thread.

    torch gives it two, and when both end a collective at the same moment they write the name of
    the last one to the same string. Where one of the names is long (a coalesced all-gather has
    one) that is a write to freed memory, and the process dies of a corrupt heap, up to torch 2.13
    at least. Who owns the process calls this before it makes groups: a trainer, a test. It is not
    for hooks that wait for a collective in the callback of another, as PowerSGD's do.
    """
    if not dist.is_gloo_available() or _ONE_THREAD in vars(dist.ProcessGroupGloo):
        return
    gloo: Any = dist.ProcessGroupGloo
    make = gloo.__init__

    def make_with_one_thread(
        self: Any, store: dist.Store, rank: int, size: int, *args: Any, **kwargs: Any
    ) -> None:
        timeout = kwargs.pop("timeout", None)
        if args or kwargs:
            make(self, store, rank, size, *args, **kwargs)
            return
        options = gloo._Options()
        if timeout is not None:
            options._timeout = timeout
        options._threads = 1
        names = os.environ.get("GLOO_SOCKET_IFNAME", "")
        devices = [gloo.create_device(interface=name) for name in names.split(",") if name]
        options._devices = devices or [gloo.create_default_device()]
        make(self, store, rank, size, options)

    gloo.__init__ = make_with_one_thread
    setattr(gloo, _ONE_THREAD, True)


_ONE_THREAD = "_shoal_one_thread"


local_getter: operator.attrgetter[Tensor] = operator.attrgetter("_local_tensor")
"""`local_tensor`, in C."""

spec_getter: operator.attrgetter[Any] = operator.attrgetter("_spec")
"""How a DTensor is distributed, and what it is as a whole."""

place_getter: operator.attrgetter[Any] = operator.attrgetter(
    "_spec.placements", "_spec.mesh", "_spec.tensor_meta.shape"
)
"""Where a DTensor lies: what two must have in common to be added element by element."""


def local_tensor(tensor: Tensor) -> Tensor:
    """A DTensor's own local tensor, not the differentiable view that `to_local` makes."""
    assert isinstance(tensor, DTensor)
    return tensor._local_tensor


def set_local_tensor(tensor: DTensor, local: Tensor) -> None:
    """Give a DTensor other memory for its local tensor."""
    tensor._local_tensor = local


def spec_of(tensor: DTensor) -> DTensorSpec:
    """Mesh, placements and global shape of a DTensor."""
    return tensor._spec


def dtensor_spec(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
) -> DTensorSpec:
    """The spec of a DTensor that does not exist yet."""
    meta = TensorMeta(torch.Size(shape), tuple(stride), dtype)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


def respec(spec: DTensorSpec, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensorSpec:
    """The spec of the same global tensor, distributed in another way."""
    return DTensorSpec(mesh, tuple(placements), tensor_meta=spec.tensor_meta)


def num_shards(spec: DTensorSpec, dim: int) -> int:
    """Into how many pieces a distributed tensor is cut along a dim."""
    return spec.num_shards_map[dim]


def strided_shard(dim: int, split_factor: int) -> Placement:
    """A shard of a dim that another mesh axis, which comes later, has cut before."""
    return _StridedShard(dim, split_factor=split_factor)


def is_shard_of(placement: Placement, dim: int) -> bool:
    """Whether a placement cuts a dim, in whatever order."""
    return isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim


def dtensor(local: Tensor, spec: DTensorSpec) -> DTensor:
    """Wrap a local tensor; skips what `from_local` checks, and is not differentiable."""
    # Past `__init__`, which does nothing, behind wrappers that cost more than all the rest.
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def copy_columns(rows: Tensor, widths: list[int], outs: list[Tensor]) -> None:
    """Copy neighbouring bands of columns into a tensor each, in one kernel."""
    torch.split_with_sizes_copy(rows, widths, dim=1, out=outs)


def chunk_into_columns(tensors: list[Tensor], num_chunks: int, out: Tensor) -> None:
    """Cut tensors along dim 0, pad the chunks, lay those of one number side by side in a row.

    One kernel, which also casts to the dtype of `out`.
    """
    torch._chunk_cat(tensors, dim=0, num_chunks=num_chunks, out=out)


def can_swap_memory() -> bool:
    """Whether two storages can exchange their bytes, which torch learned after 2.11."""
    return hasattr(torch.UntypedStorage, "_swap_data_ptr_")


def swap_memory(a: torch.UntypedStorage, b: torch.UntypedStorage) -> None:
    """Exchange the bytes of two storages; views follow their storage."""
    cast(Any, a)._swap_data_ptr_(b)


def replicates(module: torch.nn.Module) -> bool:
    """Whether torch's composable `replicate` manages a module."""
    registry = _get_registry(module)
    return registry is not None and "replicate" in registry


def is_fully_sharded(module: torch.nn.Module) -> bool:
    """Whether torch's `fully_shard`, or one that registers like it, manages a module."""
    registry = _get_registry(module)
    return registry is not None and "fully_shard" in registry


def register_composable(module: torch.nn.Module, name: str) -> None:
    """Tell torch's composable APIs that one of that name manages a module."""
    if _get_registry(module) is None:
        vars(module)[REGISTRY_KEY] = OrderedDict()
    cast(Any, _get_registry(module))[name] = RegistryItem()


def allocating_backend(group: dist.ProcessGroup, device: torch.device) -> Any | None:
    """The backend of a group, if it can allocate memory that it communicates from."""
    try:
        backend = cast(Any, group)._get_backend(device)
        return backend if backend.supports_tensor_alloc(device) else None
    except (RuntimeError, AttributeError):
        return None


def default_store() -> dist.Store:
    """The key-value store that the default process group was made with."""
    return dist.distributed_c10d._get_default_store()


def separate_store() -> dist.Store:
    """The default store over a connection of its own, which a wait of others does not block."""
    return cast(Any, default_store()).clone()


def num_launched(group: dist.ProcessGroup) -> int | None:
    """How many collectives of a group this rank has launched, if its backend counts them."""
    try:
        return cast(Any, group)._get_sequence_number_for_group()
    except RuntimeError:
        return None


def unwrapped_by_dynamo(function: Function) -> Function:
    """Let a compiled caller break its graph here; without importing the compiler to say so."""
    cast(Any, function)._torchdynamo_disable = True
    return untraced_function(function)


def offer_foreach(cls: type) -> None:
    """Let optimizers and gradient clipping choose multi-tensor operations for a tensor class."""
    for module in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        classes: list[type] = sys.modules[module]._foreach_supported_types
        if cls not in classes:
            classes.append(cls)


def set_data(tensor: Tensor, other: Tensor) -> None:
    """`tensor.data = other` as torch itself does it, for a class that has its own `data`."""
    cast(Any, Tensor).data.__set__(tensor, other)


get_requires_grad: Callable[[Tensor], bool] = cast(Any, Tensor).requires_grad.__get__
"""`tensor.requires_grad` as torch itself reads it, in C."""


def set_requires_grad(tensor: Tensor, requires_grad: bool) -> None:
    """`tensor.requires_grad = ...` as torch itself does it, for a class that has its own."""
    cast(Any, Tensor).requires_grad.__set__(tensor, requires_grad)


def mutated_arguments(op: OpOverload) -> tuple[str, ...]:
    """The names of the arguments that an operation writes to."""
    return tuple(
        argument.name
        for argument in op._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def num_returns(op: OpOverload) -> int:
    """How many results an operation has."""
    return len(op._schema.returns)


def binding(op: OpOverload) -> Callable[..., Any]:
    """The function in torch's namespace, which reads long lists faster than the operation."""
    return getattr(torch, op.__name__.partition(".")[0])


def straight(op: OpOverload) -> Callable[..., Any]:
    """What an operation calls in the end; to call it at once saves 0.4 µs."""
    return op._op


def bind(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Every argument of a call by its name, with the defaults of those that were left out."""
    given = {argument.name: argument.default_value for argument in op._schema.arguments}
    given.update(zip(given, args, strict=False))
    given.update(kwargs)
    return given


def foreach_norm(tensors: list[Tensor], order: float, dtype: torch.dtype | None) -> list[Tensor]:
    """The norm of each tensor, in few kernels."""
    return list(torch._foreach_norm(tensors, order, dtype))


def aten_overload(name: str) -> OpOverload | None:
    """The operation of a name such as `add.Tensor`, where this torch has it."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload, None)


def run_post_accumulate_hooks(parameter: Tensor) -> None:
    """Do for a gradient that was put there by hand what autograd does for its own."""
    hooks = parameter._post_accumulate_grad_hooks  # pyright: ignore[reportAttributeAccessIssue]
    for hook in tuple(hooks.values()) if hooks else ():
        hook(parameter)


def alias(data: Tensor) -> Tensor:
    """The same memory as a tensor with a storage of its own that begins there.

    A DTensor over a view that begins later in its storage cannot be deep-copied: torch takes it
    for one with memory of its own.
    """
    return torch.from_dlpack(data) if data.numel() and not data.is_meta else data.clone()


def share_storage(tensor: Tensor, other: Tensor) -> bool:
    """Whether two plain tensors are parts of one storage, with memory or without."""
    return tensor.untyped_storage()._cdata == other.untyped_storage()._cdata


def storage_pointer(tensor: Tensor) -> int:
    """Where a tensor's storage is; 0 for none, and for a tensor without one of its own."""
    if is_traceable_wrapper_subclass(tensor) or not torch._C._has_storage(tensor):
        return 0
    return tensor.untyped_storage().data_ptr()


def foreach_add(targets: list[Tensor], number: float) -> None:
    """Add a number to each tensor, in few kernels."""
    torch._foreach_add_(targets, number)


def fused_adam(*, decoupled: bool) -> Callable[..., None]:
    """The operator of Adam's fused step, or of AdamW's."""
    return torch._fused_adamw_ if decoupled else torch._fused_adam_  # pyright: ignore[reportReturnType]


def foreach_copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target, casting where dtypes differ, in few kernels."""
    torch._foreach_copy_(targets, sources)


def inside_backward() -> bool:
    """Whether autograd is executing a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def inside_compiled_autograd() -> bool:
    """Whether this backward is one that `torch._dynamo.compiled_autograd` has captured."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and getattr(module, "in_compiled_autograd_region", False)


def call_after_backward(callback: Callable[[], None]) -> None:
    """Queue a call for the end of the backward that is being executed."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


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


def data_parallel_mesh_dims_class() -> type | None:
    """`DataParallelMeshDims`, which torch has only after 2.11."""
    return getattr(importlib.import_module("torch.distributed.fsdp"), "DataParallelMeshDims", None)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """The mesh as one axis; made once for each name on the root mesh."""
    return mesh._flatten(name)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that another one was cut from; itself if it was not."""
    return mesh._get_root_mesh()


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


class StreamInUse(NamedTuple):
    """A CUDA stream that was current, and what makes it current again."""

    stream: torch.cuda.Stream
    make_current: Callable[[], None]


def stream_in_use(device_index: int) -> StreamInUse:
    """The current CUDA stream; the same object each time, which costs the host next to nothing."""
    return _stream_in_use(*torch._C._cuda_getCurrentStream(device_index))


@functools.cache
def _stream_in_use(number: int, device_index: int, device_type: int) -> StreamInUse:
    # A handle, not a stream: making one costs microseconds, keeping it costs nothing.
    stream = torch.cuda.Stream(stream_id=number, device_index=device_index, device_type=device_type)
    return StreamInUse(stream, maker_of_current(stream))


def maker_of_current(stream: torch.cuda.Stream) -> Callable[[], None]:
    """What to call to launch on a stream of the current device from there on; for hot paths."""
    return functools.partial(
        torch._C._cuda_setStream,
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )


_event_in_c: Any = torch.cuda.Event.__mro__[1]

# Past the methods in Python around them: (event, stream).
record_event: Callable[[torch.cuda.Event, torch.cuda.Stream], None] = getattr(
    _event_in_c, "record", torch.cuda.Event.record
)
wait_event: Callable[[torch.cuda.Event, torch.cuda.Stream], None] = getattr(
    _event_in_c, "wait", torch.cuda.Event.wait
)


def untraced(cls: Class) -> Class:
    """Keep dynamo out of a class's methods and of what they call: c10d calls them anywhere."""
    for method in vars(cls).values():
        if isinstance(method, FunctionType):
            untraced_function(method)
    return cls


def untraced_function(function: Function) -> Function:
    """Keep dynamo out of a function and of what it calls."""
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(cast(FunctionType, function).__code__, strategy)
    return function


def hook_gradient(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> None:
    """Call `hook` with the gradient of a tensor that is no leaf, before any later hook.

    `register_hook`, without a handle to remove it by, which costs more than all the rest.
    """
    own = cast(Any, tensor)
    if own._backward_hooks is not None or type(tensor) is not Tensor:
        tensor.register_hook(hook)
        return
    own._backward_hooks = hooks = OrderedDict()
    own.grad_fn._register_hook_dict(tensor)
    hooks[_NO_HANDLE] = hook


_NO_HANDLE = -1
"""Where handles count from 0."""


def base_node(tensor: Tensor) -> Any | None:
    """Where the gradient of a view's base comes through; None for what is no view."""
    base = tensor._base
    return None if base is None else base.grad_fn


def inside_function_transform() -> bool:
    """Whether a transform of `torch.func` is running in this thread."""
    return torch._C._are_functorch_transforms_active()


grad_hooks: Callable[[Tensor], Any] = operator.attrgetter("_post_accumulate_grad_hooks")
"""Who is called when a gradient of a parameter is there; None or empty for nobody."""


Future: type = torch._C.Future
"""What c10d's works and `then` give; `torch.futures.Future` is a class below it."""


def set_grad_hooks(parameter: Tensor, hooks: OrderedDict[int, Callable[[Tensor], None]]) -> None:
    """Put another dict where torch keeps those; autograd calls what the base class finds in it."""
    parameter._post_accumulate_grad_hooks = hooks  # pyright: ignore


def has_post_accumulate_hooks(parameter: Tensor) -> bool:
    """Whether somebody is called when a gradient is there."""
    return bool(parameter._post_accumulate_grad_hooks)  # pyright: ignore


no_torch_function_subclass: Callable[[], Any] = torch._C.DisableTorchFunctionSubclass
"""A context in which tensor subclasses' `__torch_function__` is passed by."""


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], Any]:
    """An optimizer's step, as its class has it, without what stands around it for profilers."""
    private: Any = optimizer
    hooks = (private._optimizer_step_pre_hooks, private._optimizer_step_post_hooks)
    if any(hooks):
        raise NotImplementedError(
            "shoal: hooks on an optimizer's step are not called in a captured one; call them "
            "around the step instead"
        )
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def count_update(optimizer: torch.optim.Optimizer) -> None:
    """Let schedulers know that an optimizer has updated its parameters, though not by `step`."""
    cast(Any, optimizer)._opt_called = True


def group_for_optimizers(group: Callable[[str, list[list[Any]]], dict[Any, Any] | None]) -> None:
    """Offer the lists that an optimizer groups by device and dtype to `group` first.

    It gets the name of the optimizer's module, and the lists. None leaves them to torch, and so
    does a step that is being compiled.
    """
    optimizer = torch.optim.Optimizer
    by_torch: Callable[..., Any] = optimizer._group_tensors_by_device_and_dtype

    def grouped(tensorlistlist: list[list[Any]], with_indices: bool = False) -> Any:
        if not torch.compiler.is_compiling():
            module = sys._getframe(1).f_globals["__name__"]
            groups = group(module, tensorlistlist)
            if groups is not None:
                return groups
        return by_torch(tensorlistlist, with_indices)

    cast(Any, optimizer)._group_tensors_by_device_and_dtype = staticmethod(grouped)


def backward_task() -> int:
    """Which backward autograd is executing in this thread; -1 for none."""
    return torch._C._current_graph_task_id()


LocalShard = sharded_tensor.Shard
"""A local tensor with its metadata; named so that it is not taken for DTensor's `Shard`."""

parse_remote_device: Callable[[Any, RemoteDevice | None], tuple[int | None, torch.device]] = cast(
    Any, sharded_tensor
).utils._parse_and_validate_remote_device
"""Global rank and device of a placement, which must be in the group or name an RPC worker."""

build_metadata_from_local_shards: Callable[..., ShardedTensorMetadata] = cast(
    Any, sharded_tensor
).utils.build_metadata_from_local_shards
"""Metadata of one rank's shards, after a look at whether they can be right."""

build_global_metadata: Callable[..., ShardedTensorMetadata] = cast(
    Any, sharded_tensor
).utils.build_global_metadata
"""Metadata of all ranks' shards, of those that each rank has of its own."""

inferred_spec: Callable[[list[ShardMetadata]], ShardingSpec] = (
    sharding_spec._infer_sharding_spec_from_shards_metadata
)
"""The spec that would cut a tensor into such shards: chunks if they are equal, else a list."""


load_with_process_group = shard_api.load_with_process_group
"""A context in which tensors are unpickled into a group; one, whoever's tensors they are."""

group_to_load_into: Callable[[], dist.ProcessGroup] = shard_api._get_current_process_group
"""The group of that context, or the default one."""

empty_like_properties: Callable[..., Tensor] = sharded_tensor.api._create_tensor_from_params
"""An empty tensor of a size on a device, with what `TensorProperties` say."""


def on_device(remote: RemoteDevice, device: torch.device) -> RemoteDevice:
    """The same rank or worker, but another of its devices."""
    moved = RemoteDevice(device)
    moved._rank, moved._worker_name = remote._rank, remote._worker_name
    return moved


def rpc_is_running() -> bool:
    """Whether this process has called `init_rpc`."""
    return rpc.api._is_current_rpc_agent_set()


def rpc_gather(value: object) -> dict[int, Any]:
    """Give every RPC worker what each of them has, by the worker's id."""
    ids = {worker.name: worker.id for worker in rpc.api._get_current_rpc_agent().get_worker_infos()}
    gathered = cast(dict[str, Any], rpc.api._all_gather(value))
    return {ids[name]: found for name, found in gathered.items()}


def parsed_to(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Device, dtype, non_blocking and memory format of the arguments of `to`; None where unsaid."""
    return cast(Any, torch._C)._nn._parse_to(*args, **kwargs)


unflatten: Callable[[Tensor, list[Tensor]], tuple[Tensor, ...]] = cast(
    Any, torch._C
)._nn.unflatten_dense_tensors
"""Views of a flat tensor, in the shapes of examples, one after another."""


TorchShardedTensor = sharded_tensor.ShardedTensor
"""The class that torch's checkpoints and users' code look for."""


def serve_state_dicts(
    cls: type,
    gather: Callable[[Tensor], Tensor],
    fill: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Let the state dicts of `torch.distributed.checkpoint` know a sharded tensor class.

    A full state dict has what `gather` makes of such a tensor. Loaded from a full one, the tensor
    becomes what `fill` makes of it and of the whole.
    """
    utils: Any = importlib.import_module("torch.distributed._state_dict_utils")
    planner: Any = importlib.import_module("torch.distributed.checkpoint.default_planner")
    utils._all_gather_sharded_tensor = _gathering(utils._all_gather_sharded_tensor, cls, gather)
    planner._flatten_sharded_tensors = _keeping_all(planner._flatten_sharded_tensors, cls)
    importers = [utils, sys.modules.get("torch.distributed.checkpoint.state_dict")]
    for name in ("_broadcast_state_dict", "_distribute_state_dict"):
        distribute = _filling(getattr(utils, name), cls, fill)
        for module in filter(None, importers):
            setattr(module, name, distribute)


def _gathering(
    by_torch: Callable[..., Tensor], cls: type, gather: Callable[[Tensor], Tensor]
) -> Callable[..., Tensor]:
    """For full state dicts: torch would take a tensor's first shard for a chunk of dim 0."""

    def gathered(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return gather(tensor) if isinstance(tensor, cls) else by_torch(tensor, *args, **kwargs)

    return gathered


def _filling(
    by_torch: Callable[..., None], cls: type, fill: Callable[[Tensor, Tensor], Tensor]
) -> Callable[..., None]:
    """From full state dicts: torch would put the whole in a tensor's place."""

    def distribute(full: dict[str, Any], local: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        own = {name: value for name, value in local.items() if isinstance(value, cls)}
        by_torch(full, local, *args, **kwargs)
        for name, tensor in own.items():
            if name in local and local[name] is not tensor:
                local[name] = fill(tensor, local[name])

    return distribute


def _keeping_all(
    by_torch: Callable[[dict[str, Any]], dict[str, Any]], cls: type
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """For sharded state dicts: torch drops a tensor where a rank has no shard of it.

    Loading then misses the name, and takes the checkpoint for one of torch 2.3.
    """
    traverse: Any = importlib.import_module("torch.distributed.checkpoint._traverse")

    def flattened(state_dict: dict[str, Any]) -> dict[str, Any]:
        found = by_torch(state_dict)

        def keep(path: Any, value: object) -> None:
            if isinstance(value, cls):
                traverse.set_element(found, path, value)

        traverse.traverse_state_dict(state_dict, keep)
        return found

    return flattened


def auto_wrap(
    module: nn.Module,
    policy: Callable[..., Any],
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    options: dict[str, Any],
    wrapper: type[nn.Module],
) -> None:
    """Wrap the modules inside one that a policy chooses, as torch's wrapper does it."""
    from torch.distributed.fsdp import _wrap_utils

    _wrap_utils._auto_wrap(module, policy, ignored_modules, ignored_params, options, wrapper)


def lone_mesh(device_type: str) -> DeviceMesh:
    """A mesh of this rank alone, which needs no process group."""
    return DeviceMesh(device_type, torch.tensor([0]), _init_backend=False, _rank=0)


def device_count(device: torch.device) -> int:
    """How many devices of a kind this host has; one for the CPU."""
    return torch.get_device_module(device).device_count()


HYBRID_SHARD_ZERO2 = ShardingStrategy._HYBRID_SHARD_ZERO2
"""`HYBRID_SHARD` that keeps parameters full between forward and backward."""


CHECKPOINT_PREFIX: str = checkpoint_wrapper._CHECKPOINT_PREFIX
"""The level that a wrapper for activations adds to names."""

ActivationWrapper = checkpoint_wrapper.ActivationWrapper
"""What recomputes or offloads the activations of a module inside."""

TrainingState = fsdp_common.TrainingState
"""What a wrapper is doing, as errors and users' code call it."""


@functools.cache
def serve_wrapper(cls: Any) -> None:
    """Let `get_state_dict` and its like of torch's checkpoints know another wrapper class.

    They ask torch's class for everything; from here on each model's own class is asked.
    """
    state_dicts: Any = importlib.import_module("torch.distributed.checkpoint.state_dict")
    by_torch, state_by_torch = (
        state_dicts.FSDP,
        state_dicts._get_module_fsdp_state_if_fully_sharded_module,
    )

    class Either(type):
        def __instancecheck__(cls_: type, instance: object) -> bool:
            return isinstance(instance, (by_torch, cls))

        def __getattr__(cls_: type, name: str) -> Callable[..., Any]:
            def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                owner = cls if cls.fsdp_modules(module) else by_torch
                return getattr(owner, name)(module, *args, **kwargs)

            return call

    state_dicts.FSDP = Either("FSDP", (), {})
    state_dicts._get_module_fsdp_state_if_fully_sharded_module = lambda module: (
        module if isinstance(module, cls) else state_by_torch(module)
    )


Constant = TypeVar("Constant")


def allowed_in_graph(function: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """A function of a tensor that Dynamo does not look into: whoever traces its graph does."""

    def call(tensor: Tensor) -> Any:
        return function(tensor)

    return cast(Callable[[Tensor], Any], torch.compiler.allow_in_graph(call))


def mark_unmoving(tensor: Tensor) -> None:
    """Say that a tensor is where it is in every call, so that recorded graphs need no copy of it.

    As `torch._dynamo.mark_static_address` does, which would import Dynamo.
    """
    cast(Any, tensor)._dynamo_static_input_type = "unguarded"


def constant_in_graph(function: Callable[[], Constant]) -> Callable[[], Constant]:
    """A function that Dynamo calls once while it traces, and takes the result of for granted."""
    cast(Any, function)._dynamo_marked_constant = True
    return function


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


def tracing_backend() -> str | None:
    """The name of the backend that Dynamo traces for, while it does, or that captures by itself."""
    if _captures_for:
        return _captures_for[-1]
    convert = sys.modules.get("torch._dynamo.symbolic_convert")
    if convert is None:
        return None
    translator = convert.InstructionTranslator.current_tx()
    compiler: Any = translator.output.compiler_fn
    while compiler is not None:
        name = getattr(compiler, "compiler_name", None) or getattr(compiler, "__name__", None)
        inner = getattr(compiler, "_torchdynamo_orig_backend", None)
        if inner is None or inner is compiler:
            return name
        compiler = inner
    return None


def gather_in_graph(shard: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
    """An all-gather as nodes of a graph."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_gather_into_tensor(shard, size, group.group_name))


def reduce_scatter_in_graph(rows: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
    """A reduce-scatter that adds, as nodes of a graph."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.reduce_scatter_tensor(rows, "sum", size, group.group_name))


def all_reduce_in_graph(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """An all-reduce that adds, as nodes of a graph."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(tensor, "sum", group.group_name))


def broadcast_in_graph(tensor: Tensor, source: int, group: dist.ProcessGroup) -> Tensor:
    """What one rank of a group has, as nodes of a graph."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.broadcast(tensor, source, group.group_name))


def compressing_hooks() -> dict[Callable[..., Any], torch.dtype]:
    """The communication hooks of DDP that send gradients in another dtype, and which."""
    hooks: Any = importlib.import_module(f"{dist.__name__}.algorithms.ddp_comm_hooks.default_hooks")
    return {hooks.fp16_compress_hook: torch.float16, hooks.bf16_compress_hook: torch.bfloat16}


parameters_replaced = torch.nn.utils.stateless._reparametrize_module
"""A context in which a module has other tensors for some of its parameters; Dynamo knows it."""


@contextmanager
def computed_again_in_backward() -> Iterator[None]:
    """Tag the nodes that a trace makes inside, as activation checkpointing does."""
    from torch.fx import traceback
    from torch.utils.checkpoint import CheckpointPolicy

    meta = traceback.current_meta
    before = dict(meta)
    meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    try:
        yield
    finally:
        meta.clear()
        meta.update(before)
