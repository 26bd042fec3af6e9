"""Moves, copies, pickles and state dicts of ShardedTensors give what torch's own calls give."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness import ranks
from listed_cuts import everyone
from sharded_api import OURS, Api, compare, compare_errors, grid


@ranks(2, 4)
def test_moves_and_casts() -> None:
    def script(api: Api) -> Any:
        tensor = api.tensor.rand(api.chunks(0, everyone()), 10, 20)
        listed = api.tensor.rand(api.listed(grid()), 6, 6)
        assert tensor.cpu() is tensor
        assert tensor.to("cpu") is tensor
        assert tensor.to(torch.float32) is tensor
        assert tensor.to(device="cpu", dtype=torch.float32) is tensor
        assert tensor.to(torch.zeros(1)) is tensor
        other = dist.new_group(backend="gloo")
        moved = tensor.to("cpu", torch.float64, process_group=other)
        assert moved._process_group is other
        return [
            tensor.to(torch.float16),
            tensor.to("cpu", torch.float64),
            tensor.to(dtype=torch.bfloat16, copy=True, non_blocking=True),
            tensor.to(copy=True),
            tensor.to(torch.zeros(1, dtype=torch.int32)),
            tensor.to(torch.device("cpu"), copy=True),
            tensor.to(dtype=torch.float64, memory_format=torch.contiguous_format),
            tensor.to("meta").metadata(),
            listed.to(torch.float64),
            moved,
        ]

    compare(script)
    compare_errors(
        lambda api: api.tensor.ones(api.chunks(0, [0]), 4).to([1]), "have wrong arguments"
    )
    compare_errors(
        lambda api: api.tensor.ones(api.chunks(0, [0]), 4).cpu(torch.channels_last),
        "`torch.preserve_format` is supported",
    )


@ranks(2)
def test_a_rank_whose_shards_are_there_learns_that_the_others_moved() -> None:
    spec = OURS.spec.ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/meta"])
    tensor = OURS.tensor.empty(spec, 6, 2)
    moved = tensor.to("meta")
    assert [str(shard.placement) for shard in moved.metadata().shards_metadata] == [
        "rank:0/meta",
        "rank:1/meta",
    ]
    assert moved.sharding_spec() == OURS.chunks(0, [0, 1], "meta")
    assert tensor.sharding_spec() is spec
    assert moved is not tensor
    assert (moved.local is tensor.local) == (dist.get_rank() == 1)


@ranks(1)
def test_another_group_alone_gives_another_tensor_over_the_same_memory() -> None:
    tensor, group = OURS.tensor.ones(OURS.chunks(0, [0]), 4), dist.new_group()
    moved = tensor.to(process_group=group)
    assert moved is not tensor
    assert moved.placement.group is group
    assert moved.local is tensor.local


@ranks(1, 2, 4)
def test_copies() -> None:
    def script(api: Api) -> Any:
        found = []
        for spec in (api.chunks(0, everyone()), api.chunks(0, everyone() * 2)):
            tensor = api.tensor.rand(spec, 16, 5, requires_grad=True)
            copied, cloned, detached = copy.deepcopy(tensor), tensor.clone(), tensor.detach()
            assert not detached.requires_grad
            assert not any(shard.tensor.requires_grad for shard in detached.local_shards())
            assert all(shard.tensor.requires_grad for shard in copied.local_shards())
            for one, other in zip(tensor.local_shards(), copied.local_shards(), strict=True):
                assert one.tensor.data_ptr() != other.tensor.data_ptr()
            for one, other in zip(tensor.local_shards(), detached.local_shards(), strict=True):
                assert one.tensor.data_ptr() == other.tensor.data_ptr()
            found += [copied, cloned.detach(), detached]
        return found

    compare(script)


@ranks(1, 2, 4)
def test_values_that_are_filled_in_and_tensors_like_others() -> None:
    def script(api: Api) -> Any:
        found = []
        for spec in (api.chunks(0, everyone()), api.chunks(0, everyone()[::-1] * 2)):
            for fill, options in (
                (nn.init.uniform_, {"a": 10, "b": 20}),
                (nn.init.normal_, {"mean": 1, "std": 2}),
                (nn.init.constant_, {"val": 3}),
                (nn.init.kaiming_uniform_, {"a": 1, "mode": "fan_in"}),
            ):
                tensor = api.tensor.empty(spec, 16, 3, requires_grad=True)
                assert fill(tensor, **options) is tensor
                found.append(tensor)
            for make in (torch.zeros_like, torch.ones_like, torch.rand_like, torch.randn_like):
                found.append(make(tensor, dtype=torch.float64))
            found.append(torch.full_like(tensor, 8.5, dtype=torch.float32))
        return found

    compare(script)


@ranks(1, 2)
def test_autograd_of_the_whole_and_of_shards_is_switched_together() -> None:
    def script(api: Api) -> Any:
        tensor = api.tensor.rand(api.chunks(0, everyone() * 2), 12, 5)
        assert tensor.requires_grad_() is tensor
        trained = [shard.tensor.requires_grad for shard in tensor.local_shards()]
        parameter = nn.Parameter(tensor)
        trained += [shard.tensor.requires_grad for shard in parameter.local_shards()]
        trained.append(parameter.metadata().tensor_properties.requires_grad)
        tensor.requires_grad_(False)
        trained += [shard.tensor.requires_grad for shard in tensor.local_shards()]
        return [*trained, tensor.requires_grad, isinstance(parameter, nn.Parameter)]

    compare(script)


@ranks(1, 2, 4)
def test_pickles() -> None:
    def script(api: Api) -> Any:
        tensors = [
            api.tensor.rand(api.chunks(0, everyone()), 10, 20),
            api.tensor.rand(api.listed(grid()), 6, 6, dtype=torch.float64),
            api.tensor.rand(api.chunks(1, everyone()[-1:] * 2), 3, 4, requires_grad=True),
        ]
        stream = io.BytesIO()
        torch.save(tensors, stream)
        stream.seek(0)
        return [pickle.loads(pickle.dumps(tensors)), torch.load(stream, weights_only=False)]

    compare(script)


@ranks(4)
def test_pickles_are_loaded_into_an_equal_group_only() -> None:
    rank = dist.get_rank()
    pair = [rank // 2 * 2, rank // 2 * 2 + 1]
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([0, 2, 3])]
    own = groups[rank // 2]

    def script(api: Api) -> Any:
        saved = pickle.dumps(api.tensor.rand(api.chunks(0, pair), 6, 2, process_group=own))
        with api.module.load_with_process_group(own):
            loaded = pickle.loads(saved)
            assert loaded._process_group is own
        return loaded

    compare(script)

    def wrong(api: Api) -> Any:
        saved = pickle.dumps(api.tensor.rand(api.chunks(0, everyone()), 6, 2))
        with api.module.load_with_process_group(groups[2]):
            return pickle.loads(saved)

    match = "Local world size at save time was 4" if rank == 0 else "Local rank at save time was"
    compare_errors(wrong, match)

    def nested(api: Api) -> Any:
        with api.module.load_with_process_group(own), api.module.load_with_process_group(own):
            pass

    compare_errors(nested, "already set by previous")
    with OURS.module.load_with_process_group(own):
        pass


@ranks(4)
def test_subgroups_count_ranks_of_the_world() -> None:
    group = dist.new_group([1, 2, 3])
    rank = dist.get_rank()

    def script(api: Api) -> Any:
        tensor = api.tensor.rand(api.chunks(0, [2, 3]), 10, 4, process_group=group)
        if rank == 0:
            return [tensor.metadata(), len(tensor.local_shards())]
        shards = [api.shard(torch.full((2, 2), float(rank)), [2 * (rank - 1), 0], rank)]
        return [tensor, api.tensor.init_from_local_shards(shards, 6, 2, process_group=group)]

    compare(script)
    ours = OURS.tensor.ones(OURS.chunks(0, [2, 3]), 4, process_group=group)
    assert torch.equal(ours, ours.clone()), "on the rank outside, too"
    with pytest.raises(RuntimeError, match="same ProcessGroup"):
        torch.equal(ours, OURS.tensor.ones(OURS.chunks(0, [2, 3]), 4))
    match = "Global rank 0 does not exist in input process group"
    if rank > 0:
        compare_errors(
            lambda api: api.tensor.ones(api.chunks(0, [0, 1]), 4, process_group=group), match
        )
        ours = OURS.tensor.ones(OURS.chunks(0, [2, 3, 1]), 7, 2, process_group=group)
        assert torch.equal(ours.full_tensor(), torch.ones(7, 2))
        out = torch.zeros(7, 2) if dist.get_rank(group) == 2 else None
        ours.gather(2, out)
        assert out is None or bool(out.all())


class Holder(nn.Module):
    def __init__(self, tensor: Any = None, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.sharded = tensor
        self.plain = nn.Parameter(torch.zeros(2))
        self.inner = inner


@ranks(1, 2)
def test_state_dicts_take_sharded_attributes() -> None:
    def script(api: Api) -> Any:
        spec = api.chunks(0, everyone())
        tensors = [api.tensor.rand(spec, 6, 3), api.tensor.rand(spec, 5)]
        module = Holder(tensors[0], Holder(tensors[1]))
        module._register_state_dict_hook(api.tensor.state_dict_hook)
        state = module.state_dict()
        loaded = Holder(None, Holder())
        loaded._register_load_state_dict_pre_hook(api.tensor.pre_load_state_dict_hook, True)
        loaded.load_state_dict(state, strict=False)
        assert loaded.sharded is tensors[0]
        assert loaded.inner.sharded is tensors[1]
        return [sorted(state), state["sharded"], state["inner.sharded"]]

    compare(script)


@ranks(1)
def test_mistakes_of_shards_and_metadata() -> None:
    cases: list[tuple[Any, str]] = [
        (lambda api: api.spec.ShardMetadata([0], [1, 2]), "same number of elements"),
        (lambda api: api.spec.ShardMetadata([-1], [1]), "shard_offsets should be >=0"),
        (
            lambda api: api.tensor.Shard(torch.ones(3), api.spec.ShardMetadata([0], [2])),
            "Shard tensor size does not match",
        ),
        (
            lambda api: api.tensor.Shard(
                torch.ones(3), api.spec.ShardMetadata([0], [3], "rank:0/meta")
            ),
            "Local shard tensor device does not match",
        ),
        (
            lambda api: api.tensor.ShardedTensor._init_from_local_tensor(
                torch.ones(4, 3).t(), api.chunks(0, [0]), 3, 4
            ),
            "local_tensor is not a contiguous Tensor",
        ),
    ]
    for script, match in cases:
        compare_errors(script, match)


@ranks(2)
def test_reprs_hashes_and_sizes() -> None:
    def script(api: Api) -> Any:
        tensor = api.tensor.rand(api.chunks(0, everyone()), 6, 3)
        assert hash(tensor) == hash(tensor)
        assert len({tensor, tensor, tensor.clone()}) == 2
        return [
            repr(tensor),
            tensor.size(0),
            tensor.size(-1),
            tensor.dim(),
            tensor.ndim,
            tensor.shape,
            tensor.is_contiguous(),
            tensor.is_pinned(),
            tensor._get_preferred_device(),
        ]

    compare(script)
    for index in (2, -3):
        compare_errors(
            lambda api, index=index: api.tensor.ones(api.chunks(0, everyone()), 4, 4).size(index),
            "Dimension out of range",
        )
