"""A shard of a sharded tensor: to give it another tensor changes the sharded tensor too."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from shoal._torch.sharded import LocalShard, ShardMetadata

if TYPE_CHECKING:
    from shoal.tensor.base import ShardedTensorBase


class OwnShard(LocalShard):
    """torch's `Shard`, which knows whose it is; copied or sent elsewhere, it is nobody's."""

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
