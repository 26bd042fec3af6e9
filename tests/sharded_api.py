"""One script run with torch's ShardedTensor and with ours, and what can be compared of both."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._shard.api as torch_api
import torch.distributed._shard.sharding_plan as torch_plan
import torch.distributed._shard.sharding_spec.api as torch_spec_api
from torch.distributed._shard import sharded_tensor as torch_tensor
from torch.distributed._shard import sharding_spec as torch_spec

from shoal import sharded_tensor, sharding_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """The same names of one implementation."""

    tensor: Any
    spec: Any
    module: Any
    plan: Any
    spec_api: Any

    def chunks(self, dim: int, ranks: list[int], device: str = "cpu") -> Any:
        return self.spec.ChunkShardingSpec(dim, [f"rank:{rank}/{device}" for rank in ranks])

    def listed(self, shards: list[tuple[list[int], list[int], int]], device: str = "cpu") -> Any:
        """An enumerable spec of (offsets, sizes, rank)."""
        return self.spec.EnumerableShardingSpec(
            [
                self.spec.ShardMetadata([*offsets], [*sizes], f"rank:{rank}/{device}")
                for offsets, sizes, rank in shards
            ]
        )

    def shard(self, tensor: torch.Tensor, offsets: list[int], rank: int) -> Any:
        return self.tensor.Shard.from_tensor_and_offsets(tensor, offsets, rank)


OURS = Api(
    tensor=sharded_tensor,
    spec=sharding_spec,
    module=sharded_tensor,
    plan=sharded_tensor,
    spec_api=sharding_spec,
)
TORCHS = Api(
    tensor=torch_tensor,
    spec=torch_spec,
    module=torch_api,
    plan=torch_plan,
    spec_api=torch_spec_api,
)


GRID = [([0, 0], [2, 4], 0), ([0, 4], [4, 2], 1), ([2, 0], [4, 4], 2), ([4, 4], [2, 2], 3)]


def grid() -> list[tuple[list[int], list[int], int]]:
    """A (6, 6) in four uneven rectangles on as many ranks as there are."""
    world_size = dist.get_world_size()
    return [(offsets, sizes, rank % world_size) for offsets, sizes, rank in GRID]


def described(value: Any) -> Any:
    """What a script's result is, in values that compare."""
    if isinstance(value, (torch_tensor.ShardedTensorBase, sharded_tensor.ShardedTensorBase)):
        spec = value.sharding_spec() if hasattr(value, "sharding_spec") else None
        return {
            "size": tuple(value.size()),
            "properties": (value.dtype, value.layout, value.requires_grad, value.device),
            "metadata": value.metadata(),
            "shards": [
                (shard.metadata, shard.tensor.detach().clone()) for shard in value.local_shards()
            ],
            "spec": (type(spec).__name__, str(vars(spec))),
            "pinned": value.is_pinned(),
        }
    if isinstance(value, (list, tuple)):
        return [described(each) for each in value]
    return value


def assert_same(ours: Any, theirs: Any) -> None:
    """Compare descriptions; tensors by their bits."""
    assert type(ours) is type(theirs), f"{ours!r} is not {theirs!r}"
    if isinstance(ours, torch.Tensor):
        assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)
        assert torch.equal(ours, theirs), f"{ours} is not {theirs}"
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert_same(ours[name], theirs[name])
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    else:
        assert ours == theirs, f"{ours} is not {theirs}"


def run(script: Callable[[Api], Any], api: Api) -> Any:
    """A script's result from one state of the generator, without torch's word on its end."""
    torch.manual_seed(7)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", message="Gathering a tensor with zero elements")
        return described(script(api))


def compare(script: Callable[[Api], Any]) -> None:
    """Run a script both ways: results are the same."""
    theirs = run(script, TORCHS)
    assert_same(run(script, OURS), theirs)


def compare_errors(script: Callable[[Api], Any], match: str) -> None:
    """Run a script both ways: both raise the same kind of error, with the same words in it."""
    errors: list[Exception] = []
    for api in (TORCHS, OURS):
        with pytest.raises(Exception, match=match) as caught:
            run(script, api)
        errors.append(caught.value)
    theirs, ours = errors
    assert isinstance(ours, type(theirs)), f"torch raises {theirs!r}, we {ours!r}"
