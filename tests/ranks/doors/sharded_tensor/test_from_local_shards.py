"""Shards that ranks bring along where most of them are empty, or say nothing of the whole."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import ranks
from sharded_api import Api, compare, compare_errors


@ranks(1, 2, 4)
@pytest.mark.parametrize("size", [0, 5])
def test_rows_without_offsets_are_stacked(size: int) -> None:
    rank = dist.get_rank()

    def script(api: Api) -> Any:
        shards = [api.shard(torch.full((size, size), float(rank)), [0, 0], rank)]
        return api.tensor.init_from_local_shards(shards, None, None)

    compare(script)


@ranks(4)
def test_stacked_rows_leave_the_given_offsets_alone() -> None:
    rank = dist.get_rank()
    offsets = [rank // 2 * 5, rank % 2 * 5]

    def script(api: Api) -> Any:
        given = api.spec.ShardMetadata([*offsets], [5, 5], f"rank:{rank}/cpu")
        shard = api.tensor.Shard(torch.ones(5, 5), given)
        tensor = api.tensor.init_from_local_shards([shard], None, 5)
        assert given.shard_offsets == offsets
        return tensor

    compare(script)


@ranks(2, 4)
@pytest.mark.parametrize("size", [(), (0, 0)], ids=str)
def test_sizes_that_shards_do_not_fill(size: tuple[int, ...]) -> None:
    rank = dist.get_rank()

    def script(api: Api) -> Any:
        shards = [api.shard(torch.ones(5, 5), [5 * rank, 0], rank)]
        return api.tensor.init_from_local_shards(shards, *size)

    compare_errors(script, "shards|tensor")


def seen_alone(api: Api, row: int, size: tuple[int, int]) -> Any:
    """This rank's shard is the whole tensor to it; it takes all others for empty."""
    rank = dist.get_rank()
    shards = [
        api.spec.ShardMetadata(
            [row if other == rank else 0 if other < rank else size[0], 0],
            [*size] if other == rank else [0, 0],
            f"rank:{other}/cpu",
        )
        for other in range(dist.get_world_size())
    ]
    metadata = api.tensor.ShardedTensorMetadata(
        shards, torch.Size(size), api.tensor.TensorProperties(dtype=torch.float32)
    )
    own = api.tensor.Shard(torch.ones(size), shards[rank])
    return api.tensor.ShardedTensor._init_from_local_shards_and_global_metadata([own], metadata)


@ranks(2, 4)
@pytest.mark.parametrize("size", [(5, 5), (0, 0)], ids=str)
def test_a_rank_may_know_of_its_own_shard_alone(size: tuple[int, int]) -> None:
    compare(lambda api: seen_alone(api, 0, size))


@ranks(2, 4)
def test_a_shard_that_is_not_the_whole_is_an_error_there_too() -> None:
    compare_errors(lambda api: seen_alone(api, 1, (5, 5)), "exceeds tensor dim")


@ranks(4)
def test_a_subgroup_of_every_other_rank() -> None:
    """Of tensors without memory, which nobody but their metadata knows."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]

    def script(api: Api) -> Any:
        shard = api.shard(torch.empty(3, device="meta"), [rank // 2 * 3], rank)
        tensor = api.tensor.ShardedTensor._init_from_local_shards(
            [shard], 6, process_group=groups[rank % 2]
        )
        return tensor.metadata()

    compare(script)


@ranks(4)
def test_copies_of_shards_make_another_tensor() -> None:
    def script(api: Api) -> Any:
        tensor = api.tensor.rand(api.chunks(0, [2, 0, 3, 1]), 24, 12)
        shards = copy.deepcopy(tensor.local_shards())
        other = api.tensor.ShardedTensor._init_from_local_shards(shards, tensor.size())
        other.local_tensor().zero_()
        assert tensor.local_tensor().any()
        tensor.reshard(api.chunks(1, [1, 0, 3, 2]))
        metadata = tensor._metadata
        metadata.shards_metadata.sort(key=lambda shard: shard.placement.rank())
        return [metadata, tensor.local_tensor()]

    compare(script)


def test_strides_of_shards_without_a_process_group() -> None:
    """Columns of one tensor: none of them lies in one run."""
    whole = torch.arange(8.0).view(4, 2)

    def script(api: Api) -> Any:
        shards = [api.shard(whole[:, i : i + 1], [0, i], i) for i in range(2)]
        metadata = api.tensor.ShardedTensorMetadata(
            [shard.metadata for shard in shards], torch.Size([4, 2]), api.tensor.TensorProperties()
        )
        made = api.tensor.ShardedTensorBase._init_from_local_shards_and_global_metadata(
            local_shards=shards, sharded_tensor_metadata=metadata
        )
        return [shard.tensor for shard in made.local_shards()]

    compare(script)
