"""This rank's part of a sharded tensor: local tensors, and the metadata of all shards."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import torch
from torch import Tensor

from shoal._torch import subclasses
from shoal._torch.sharded import (
    LocalShard,
    ShardedTensorMetadata,
    ShardingSpec,
    ShardMetadata,
    TensorProperties,
)
from shoal.errors import UsageError
from shoal.layout.buffer import region_views
from shoal.layout.region import Region
from shoal.tensor.older_api import older_api
from shoal.tensor.placement import Placement

if TYPE_CHECKING:
    from shoal.tensor.sharded import ShardedTensor


DeviceDtype: TypeAlias = tuple[torch.device, torch.dtype]


class ShardedTensorBase(Tensor):
    """A tensor of which this rank has the elements that its placement says.

    `local` is the very tensor that holds them, often a view of a larger buffer; assign it to move
    the tensor to other memory of the same dtype and device. It has no elements where the rank holds
    nothing, and it is not there where the rank has several shards: `locals` always is. `kind` is
    the device and dtype.
    """

    __slots__ = ("kind", "placement")

    kind: DeviceDtype
    local: Tensor
    placement: Placement
    _several: tuple[Tensor, ...]

    __torch_function__ = subclasses.no_torch_function

    @property
    def locals(self) -> tuple[Tensor, ...]:
        """This rank's local tensors, one for each of the placement's local shapes."""
        # Asked for like this, an attribute that is not there takes a third of an exception's time.
        local = getattr(self, "local", None)
        return self._several if local is None else (local,)

    def replace_local(self, index: int, local: Tensor) -> None:
        """Have another tensor, of the same shape and kind, for one of the local ones."""
        if local.dtype != self.dtype:
            raise ValueError(f"expected a local tensor of {self.dtype}, got {local.dtype}")
        locals_ = [*self.locals]
        locals_[index] = local
        self.hold(locals_)

    def hold(self, locals_: Sequence[Tensor]) -> None:
        """Have these local tensors and no others; checks nothing."""
        # Who asks for the only local tensor must not get the first of several, nor may those that
        # the tensor had before live on.
        if len(locals_) == 1:
            present, absent, value = "local", "_several", locals_[0]
        else:
            present, absent, value = "_several", "local", tuple(locals_)
        setattr(self, present, value)
        if hasattr(self, absent):
            delattr(self, absent)

    @property
    def regions(self) -> tuple[Region, ...]:
        """This rank's rectangles of the global tensor; none where it holds nothing."""
        return self.placement.regions

    def parts(self) -> list[tuple[Region, Tensor]]:
        """Each region with this rank's memory for it, in its shape, outside of autograd."""
        return parts_of(self.placement, [local.detach() for local in self.locals])

    @property
    def _local_shards(self) -> list[LocalShard]:
        """`local_shards()`, under the name of torch's own attribute."""
        return self.local_shards()

    @property
    def _metadata(self) -> ShardedTensorMetadata:
        """`metadata()`, under the name of torch's own attribute."""
        return self.metadata()

    def local_shards(self) -> list[LocalShard]:
        """This rank's shards: the local tensors themselves, or views of each of their regions."""
        tensors: Sequence[Tensor]
        if self.placement.shards_stand_alone:
            tensors = self.locals
        elif not self.numel():
            tensors = [local.view(self.shape) for local in self.locals]
        else:
            tensors = [part for _, part in self.parts()]
        # Where a rank has no shard, its local tensor without elements is none either.
        pairs = zip(tensors, self.placement.own_shards(self.device), strict=False)
        if not self.placement.shards_stand_alone:
            return [LocalShard(tensor, metadata) for tensor, metadata in pairs]
        return [
            OwnShard.of(tensor, metadata, self, index)
            for index, (tensor, metadata) in enumerate(pairs)
        ]

    def metadata(self) -> ShardedTensorMetadata:
        """The place of each shard of each rank, and the properties that all shards have."""
        return ShardedTensorMetadata(
            shards_metadata=self.placement.shards(self.device),
            size=self.size(),
            tensor_properties=TensorProperties.create_from_tensor(self),
        )

    def is_pinned(self, device: Any = None) -> bool:
        """Whether all local tensors are in page-locked memory."""
        held = [local for local in self.locals if local.numel()]
        if held:
            return all(local.is_pinned() for local in held)
        return self.placement.is_pinned

    # What torch.distributed.checkpoint asks of a tensor class that it does not know itself.

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from shoal.tensor.torch_checkpoints import write_items

        return write_items(self, fqn)

    def __create_chunk_list__(self) -> list[Any]:
        from shoal.tensor.torch_checkpoints import chunks

        return chunks(self)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        from shoal.tensor.torch_checkpoints import shard_at

        return shard_at(self, index)

    @classmethod
    def _init_from_local_shards_and_global_metadata(
        cls,
        local_shards: list[LocalShard],
        sharded_tensor_metadata: ShardedTensorMetadata,
        sharding_spec: ShardingSpec | None = None,
    ) -> ShardedTensor:
        """Put shards together that are all here, without a process group."""
        return older_api().from_local_shards.assemble_without_group(
            local_shards, sharded_tensor_metadata, sharding_spec
        )


class OwnShard(LocalShard):
    """torch's `Shard`, which knows its sharded tensor; a copy or a pickle of it does not."""

    __slots__ = ("_index", "_owner")

    _index: int
    _owner: weakref.ref[ShardedTensorBase]

    @classmethod
    def of(
        cls, tensor: Tensor, metadata: ShardMetadata, owner: ShardedTensorBase, index: int
    ) -> Self:
        """Local tensor `index` of a sharded tensor, with its metadata."""
        shard = cls(tensor, metadata)
        # RRefs keep shards, and must not keep alive what they are cleaned up with.
        shard._owner, shard._index = weakref.ref(owner), index
        return shard

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "tensor" and hasattr(self, "_owner"):
            LocalShard(value, self.metadata)  # raises where it does not fit
            owner = self._owner()
            if owner is not None:
                owner.replace_local(self._index, value)
        super().__setattr__(name, value)

    def __reduce__(self) -> Any:
        return LocalShard, (self.tensor, self.metadata)


def parts_of(placement: Placement, locals_: Sequence[Tensor]) -> list[tuple[Region, Tensor]]:
    """Each region of a rank with its part of the rank's local tensors, in the region's shape."""
    each = zip(locals_, placement.local_regions, strict=True)
    return [part for local, regions in each for part in region_views(local, regions)]


def check_locals(locals_: tuple[Tensor, ...], placement: Placement) -> None:
    """Raise unless there is a plain tensor of the right shape for each of the local shapes."""
    for local in locals_:
        if isinstance(local, ShardedTensorBase) or not isinstance(local, Tensor):
            raise UsageError(f"expected plain local tensors, got {described(local)}")
    shapes = tuple(tuple(local.shape) for local in locals_)
    if shapes != placement.local_shapes:
        raise UsageError(
            f"{placement} needs {_counted(placement.local_shapes)}, got {_listed(shapes)}"
        )
    if placement.shards_stand_alone:
        return
    for local in locals_:
        if local.requires_grad:
            raise UsageError(
                "expected a local tensor outside of autograd, got one that requires a gradient: "
                "detach it, and pass requires_grad=True for the ShardedTensor itself"
            )
        if not local.is_contiguous():
            raise UsageError(
                f"expected a contiguous local tensor, got strides {local.stride()}: "
                "pass local.contiguous()"
            )


def _counted(shapes: tuple[tuple[int, ...], ...]) -> str:
    if len(shapes) == 1:
        return f"a local tensor of shape {shapes[0]}"
    return f"{len(shapes)} local tensors of shapes {_listed(shapes)}"


def _listed(shapes: tuple[tuple[int, ...], ...]) -> str:
    return ", ".join(map(str, shapes)) or "none"


def described(value: object) -> str:
    """Say what was given instead, for errors."""
    if isinstance(value, ShardedTensorBase):
        return f"a ShardedTensor ({value.placement})"
    if isinstance(value, Tensor):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
