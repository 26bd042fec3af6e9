"""State dicts of a wrapper, torch's or ours: their kinds, and when two of them are the same."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor as TorchShardedTensor
from torch.distributed.tensor import DTensor

from shoal.fsdp import StateDictType

CPU = torch.device("cpu")
FULL, SHARDED, LOCAL = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
)


def local_parts(value: Any) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """Where a rank's elements lie, with the elements."""
    if isinstance(value, DTensor):
        return [((dist.get_rank(),), value.to_local())]
    if isinstance(value, TorchShardedTensor):
        shards = value.local_shards()
        return [(tuple(s.metadata.shard_offsets), s.tensor) for s in shards]
    return [((), value)]


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same names in the same order, and on this rank the same elements of the same dtypes."""
    assert list(actual) == list(expected)
    for name, value in expected.items():
        mine, theirs = local_parts(actual[name]), local_parts(value)
        assert tuple(actual[name].size()) == tuple(value.size()), name
        assert [place for place, _ in mine] == [place for place, _ in theirs], name
        for (_, one), (_, other) in zip(mine, theirs, strict=True):
            assert one.dtype is other.dtype, name
            assert torch.equal(one, other), name
