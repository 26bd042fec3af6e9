"""A sharded tensor: global shape, dtype and device outside, one rank's elements inside.

    ShardedTensor (6, 4)          rank 0: .local (9,)    rank 1: .local (15,)
    torch sees the global one; every operation runs on `.local`

Operations find their handler by one dictionary look-up; `dispatch` finds it the first time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shoal._torch import checkpoints, operators, optimizers, sharded, subclasses
from shoal._torch.sharded import LocalShard, ShardedTensorMetadata, ShardingSpec
from shoal.errors import UsageError
from shoal.layout.region import Region
from shoal.tensor.base import DeviceDtype, ShardedTensorBase, check_locals, described
from shoal.tensor.older_api import older_api
from shoal.tensor.placement import Placement, preferred_device

Op: TypeAlias = operators.OpOverload
Handler: TypeAlias = Callable[[Op, tuple[Any, ...], dict[str, Any]], Any]

_wrapper = subclasses.make_wrapper
_strided = torch.strided


class _Handlers(dict[Op, Handler]):
    """The handlers of the operations seen so far."""

    def __missing__(self, op: Op) -> Handler:
        # Handlers need the class that is defined below, so they are imported when one is asked for.
        from shoal.tensor.dispatch import handler_of

        handler = self[op] = handler_of(op)
        return handler


_HANDLERS = _Handlers()
_KINDS: dict[DeviceDtype, DeviceDtype] = {}
"""One object for each device and dtype, so that lists of them compare by identity."""


class ShardedTensor(ShardedTensorBase, sharded.TorchShardedTensor):  # pyright: ignore
    """One tensor over the ranks of a process group.

    torch's class is a base for isinstance, which its checkpoints and users' code ask: every method
    that it offers is defined anew.

    `ShardedTensor(spec, *size)` allocates the shards that a spec lists, without filling them.
    `ShardedTensor.of(local, placement)` wraps memory that is there.
    """

    # Memory alone: torch's staging for asynchronous checkpoints copies what this names.
    __slots__ = ("_several", "local")

    # Optimizers ask both of every parameter in every step: 20 ns each, where torch takes 120 (it
    # looks for `__torch_function__`) and 70 (a function in Python).
    is_sparse = False  # pyright: ignore[reportAssignmentType]
    __hash__ = object.__hash__

    # A finalizer that does nothing, in C: 55 ns, where torch's takes 350 to look for RPC state.
    __del__ = bool  # pyright: ignore[reportAssignmentType]

    def __new__(
        cls,
        sharding_spec: ShardingSpec,
        *size: Any,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        requires_grad: bool = False,
        pin_memory: bool = False,
        memory_format: torch.memory_format = torch.contiguous_format,
        process_group: ProcessGroup | None = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """Allocate this rank's shards; every rank of the group calls it, and none communicates."""
        return older_api().creation.allocate_by_spec(
            sharding_spec,
            size,
            dtype=dtype,
            layout=layout,
            requires_grad=requires_grad,
            pin_memory=pin_memory,
            memory_format=memory_format,
            process_group=process_group,
            init_rrefs=init_rrefs,
        )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        Tensor.__init__(self)

    @classmethod
    def of(
        cls, local: Tensor | Sequence[Tensor], placement: Placement, *, requires_grad: bool = False
    ) -> ShardedTensor:
        """Wrap this rank's local tensor, or one for each of the placement's local shapes."""
        locals_ = (local,) if isinstance(local, Tensor) else tuple(local)
        check_locals(locals_, placement)
        _introduce()
        if placement.shards_stand_alone and len(placement.shape) == 2:
            _introduce_weights()
        tensor = _made(_kind_of(locals_[0]), placement, requires_grad)
        tensor.hold(locals_)
        return tensor

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Op,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _HANDLERS[func](func, args, kwargs or {})

    def full_tensor(self) -> Tensor:
        """Gather the whole tensor on every rank of the group: collective, and detached."""
        from shoal.tensor.gather import gather_everywhere

        return gather_everywhere(self)

    def gather(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        dst: int = 0,
        out: Tensor | None = None,
        enforce_dtype: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Gather the whole tensor into `out` on rank `dst` of the group: collective."""
        from shoal.tensor.gather import gather_on

        gather_on(self, dst, out, enforce_dtype=enforce_dtype, dtype=dtype)

    def reshard(self, resharding_spec: ShardingSpec) -> ShardedTensor:
        """Cut the tensor as another spec does, in place: collective."""
        from shoal.tensor.reshard import reshard_

        return reshard_(self, resharding_spec)

    def fetch(self, region: Region | tuple[slice, ...] | None) -> Tensor | None:
        """Get any rectangle of the whole, each rank another one or none: collective, no RPC."""
        from shoal.tensor.gather import fetch

        return fetch(self, region)

    def sharding_spec(self) -> ShardingSpec:
        """torch's spec for a tensor that is cut like this one."""
        return self.placement.spec(self.device)

    def local_tensor(self) -> Tensor:
        """The tensor of this rank's only shard."""
        shards = self.local_shards()
        if len(shards) != 1:
            raise NotImplementedError(
                "Only single local shard is supported. Number of shards: "
                f"{len(shards)} on {self.placement}; use local_shards()"
            )
        return shards[0].tensor

    def remote_shards(self) -> dict[int, list[Any]]:
        """RRefs to the other ranks' shards, by RPC rank."""
        return older_api().remote_shards.remote_shards(self)

    def to(self, *args: Any, **kwargs: Any) -> ShardedTensor:
        """Move or cast as a tensor does; `process_group` moves it to another group as well."""
        from shoal.tensor.conversion import to

        return to(self, *args, **kwargs)

    def cpu(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        memory_format: torch.memory_format = torch.preserve_format,
        process_group: ProcessGroup | None = None,
    ) -> ShardedTensor:
        """Move all ranks' shards to host memory; itself if they are there."""
        from shoal.tensor.conversion import to_cpu

        return to_cpu(self, memory_format, process_group)

    def cuda(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        device: torch.device | str | int | None = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
        process_group: ProcessGroup | None = None,
    ) -> ShardedTensor:
        """Move each rank's shards to its current CUDA device; always another tensor."""
        from shoal.tensor.conversion import to_cuda

        return to_cuda(self, device, non_blocking, memory_format, process_group)

    def requires_grad_(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, requires_grad: bool = True
    ) -> ShardedTensor:
        """Let autograd record; where shards are tensors in their own right, of them as well."""
        super().requires_grad_(requires_grad)
        if self.placement.shards_stand_alone:
            for local in self.locals:
                local.requires_grad_(requires_grad)
        return self

    def _set_requires_grad(self, requires_grad: bool) -> None:
        if self.placement.shards_stand_alone:
            raise RuntimeError(
                "torch function '__set__' of requires_grad would leave the shards as they are, and "
                "is not supported for ShardedTensor: use requires_grad_()"
            )
        subclasses.set_requires_grad(self, requires_grad)

    requires_grad = property(subclasses.get_requires_grad, _set_requires_grad)

    @property
    def data(self) -> ShardedTensor:
        """The same elements, outside of autograd."""
        return cast(ShardedTensor, self.detach())

    @data.setter
    def data(self, other: Tensor) -> None:
        # torch alone would change the outer tensor and leave the elements where they were.
        if not isinstance(other, ShardedTensor) or not self.placement.agrees(other.placement):
            raise UsageError(
                f"`.data` of a ShardedTensor ({self.placement}) takes a ShardedTensor of the same "
                f"placement, got {described(other)}; to change values, use copy_"
            )
        self.adopt(other)

    def adopt(self, other: ShardedTensor) -> None:
        """Become another tensor of the same shape: its local tensors, and where they lie."""
        subclasses.set_data(self, other)
        self.hold(other.locals)
        self.kind, self.placement = other.kind, other.placement

    @classmethod
    def from_dtensor(
        cls, dtensor: DTensor, process_group: ProcessGroup | None = None
    ) -> ShardedTensor:
        """The same local tensor as a ShardedTensor, without communication."""
        from shoal.tensor.conversion import from_dtensor

        return from_dtensor(dtensor, process_group)

    def to_dtensor(self, device_mesh: DeviceMesh, placements: Sequence[Any]) -> DTensor:
        """Cut the tensor as a DTensor's placements say: collective, unless it is cut so."""
        from shoal.tensor.conversion import to_dtensor

        return to_dtensor(self, device_mesh, placements)

    @classmethod
    def _init_from_local_shards(
        cls,
        local_shards: list[LocalShard],
        *global_size: Any,
        process_group: ProcessGroup | None = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """Put all ranks' shards together; one exchange finds out whether they fit: collective."""
        return older_api().from_local_shards.init_from_local_shards(
            local_shards, *global_size, process_group=process_group, init_rrefs=init_rrefs
        )

    @classmethod
    def _init_from_local_tensor(
        cls,
        local_tensor: Tensor,
        sharding_spec: ShardingSpec,
        *global_size: Any,
        process_group: ProcessGroup | None = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """Take a tensor for this rank's shard of a spec; no rank looks at the others'."""
        return older_api().from_local_shards.assemble_by_spec(
            local_tensor, sharding_spec, global_size, process_group, init_rrefs
        )

    @classmethod
    def _init_from_local_shards_and_global_metadata(  # pyright: ignore
        cls,
        local_shards: list[LocalShard],
        sharded_tensor_metadata: ShardedTensorMetadata,
        process_group: ProcessGroup | None = None,
        init_rrefs: bool = False,
        sharding_spec: ShardingSpec | None = None,
    ) -> ShardedTensor:
        """Put shards together as metadata say that each rank has; no rank looks at the others'."""
        return older_api().from_local_shards.assemble_by_metadata(
            local_shards, sharded_tensor_metadata, process_group, init_rrefs, sharding_spec
        )

    def _get_preferred_device(self) -> torch.device:
        return preferred_device(self.placement.group)

    @property
    def _process_group(self) -> ProcessGroup:
        return self.placement.group

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Placement, bool]]:
        return ["local"], (self.placement, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[Placement, bool], size: object, stride: object
    ) -> ShardedTensor:
        placement, requires_grad = context
        return ShardedTensor.of(inner["local"], placement, requires_grad=requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise UsageError(
                "only a ShardedTensor that is a leaf of autograd can be deep-copied: detach it"
            )
        copies = [
            local.detach().clone().requires_grad_(local.requires_grad) for local in self.locals
        ]
        copied = ShardedTensor.of(copies, self.placement, requires_grad=self.requires_grad)
        memo[id(self)] = copied
        vars(copied).update(deepcopy(vars(self), memo))
        if self.grad is not None:
            copied.grad = deepcopy(self.grad, memo)
        return copied

    def __reduce_ex__(self, protocol: object) -> Any:
        from shoal.tensor.pickling import reduced

        return reduced(self)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        if self.placement.shards_stand_alone:
            return f"ShardedTensor({self.metadata()})"
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"ShardedTensor(shape={self.placement.shape}, dtype={self.dtype}, "
            f"device={self.device}, {self.placement}{grad}, local={self.local!r})"
        )


def like(example: ShardedTensor, local: Tensor) -> ShardedTensor:
    """Wrap a local tensor of the right shape with another's placement; checks nothing."""
    kind, placement = example.kind, example.placement
    if local.dtype is not kind[1] or local.device != kind[0]:
        if local.device != kind[0]:
            placement = placement.on(local.device)
        kind = _kind_of(local)
    tensor = _made(kind, placement, False)
    tensor.local = local
    return tensor


def like_each(example: ShardedTensor, locals_: Sequence[Tensor]) -> ShardedTensor:
    """Do as `like` does for any number of local tensors."""
    tensor = like(example, locals_[0])
    if len(locals_) > 1:
        tensor.hold(locals_)
    return tensor


def allocate(
    placement: Placement,
    dtype: torch.dtype,
    device: torch.device | None = None,
    *,
    requires_grad: bool = False,
) -> ShardedTensor:
    """Allocate the local tensors of a placement; `device` serves one that does not say where."""
    devices = placement.local_devices or (device,) * len(placement.local_shapes)
    locals_ = [
        torch.empty(
            shape,
            dtype=dtype,
            device=where,
            pin_memory=placement.is_pinned,
            requires_grad=requires_grad and placement.shards_stand_alone,
        )
        for shape, where in zip(placement.local_shapes, devices, strict=True)
    ]
    return ShardedTensor.of(locals_, placement, requires_grad=requires_grad)


def _made(kind: DeviceDtype, placement: Placement, requires_grad: bool) -> ShardedTensor:
    """Make a tensor that has no local tensors yet."""
    device, dtype = kind
    shape = placement.shape
    tensor = _wrapper(
        ShardedTensor, shape, None, None, None, dtype, _strided, device, False, requires_grad
    )
    tensor.kind = kind
    tensor.placement = placement
    return tensor


def _kind_of(local: Tensor) -> DeviceDtype:
    kind = local.device, local.dtype
    return _KINDS.setdefault(kind, kind)


@functools.cache
def _introduce() -> None:
    """Make torch's optimizers and state dicts know the class, once there is a tensor of it."""
    from shoal.tensor.optimizer_lists import grouped
    from shoal.tensor.torch_checkpoints import filled

    # Without it, optimizers and clipping would take tensors one by one on CUDA.
    optimizers.offer_foreach(ShardedTensor)
    optimizers.group_for_optimizers(grouped)
    checkpoints.serve_state_dicts(ShardedTensor, cast(Any, ShardedTensor.full_tensor), filled)


@functools.cache
def _introduce_weights() -> None:
    """Make functions that take weights know the class, once there is a tensor that may be one."""
    from shoal.tensor.torch_function import listen

    older_api()  # which has the layers
    listen()
