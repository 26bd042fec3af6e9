"""To make and to gather ShardedTensors gives what torch's own calls give."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import ranks
from listed_cuts import everyone
from sharded_api import OURS, Api, compare, compare_errors, grid

SIZES = [(10, 20), (3, 4), (7,), (5, 6, 2), (2, 3, 2, 5), (0, 4), (1, 1)]


def reversed_ranks() -> list[int]:
    return everyone()[::-1]


@ranks(1, 2, 4)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_creation_by_chunks(size: tuple[int, ...]) -> None:
    for dim in range(-len(size), len(size)):
        for order in (everyone(), reversed_ranks(), everyone() * 2, everyone()[-1:]):

            def script(api: Api, dim: int = dim, order: list[int] = order) -> Any:
                spec, made = api.chunks(dim, order), api.tensor
                return [
                    made.zeros(spec, *size),
                    made.ones(spec, size),
                    made.full(spec, size, 3.5, dtype=torch.float64),
                    made.full(spec, size=size, fill_value=7, dtype=torch.int32),
                    made.rand(spec, *size, dtype=torch.float64),
                    made.randn(spec, *size, requires_grad=True),
                    made.empty(spec, *size, dtype=torch.bool).size(),
                    made.empty(spec, *size, dtype=torch.bfloat16).metadata(),
                ]

            compare(script)


@ranks(1, 2, 4)
def test_creation_by_listed_shards() -> None:
    def script(api: Api) -> Any:
        spec, made = api.listed(grid()), api.tensor
        return [made.ones(spec, 6, 6), made.rand(spec, [6, 6]), made.zeros(spec, (6, 6))]

    compare(script)


@ranks(2)
def test_creation_with_empty_shards_among_the_listed() -> None:
    def script(api: Api) -> Any:
        shards = [([0, 0], [5, 3], 1), ([5, 0], [0, 3], 0), ([5, 0], [0, 3], 1)]
        return api.tensor.ones(api.listed(shards), 5, 3)

    compare(script)


ERRORS: dict[str, tuple[Any, str]] = {
    "no spec": (lambda api: api.tensor.empty("spec", 4), "Expecting ShardingSpec"),
    "name for a dim": (lambda api: api.chunks("H", [0]), "does not support named dimension"),
    "no dim": (lambda api: api.chunks(None, [0]), "needs to be an integer"),
    "dim outside": (lambda api: api.tensor.empty(api.chunks(2, [0]), 4, 4), "Invalid sharding dim"),
    "rank outside": (
        lambda api: api.tensor.empty(api.chunks(0, [9]), 4, 4),
        "Global rank 9 does not exist in input process group",
    ),
    "sparse": (
        lambda api: api.tensor.empty(api.chunks(0, [0]), 4, layout=torch.sparse_coo),
        "Only torch.strided layout is currently supported",
    ),
    "channels last": (
        lambda api: api.tensor.empty(api.chunks(0, [0]), 4, memory_format=torch.channels_last),
        "Only torch.contiguous_format memory_format is currently supported",
    ),
    "size of text": (lambda api: api.tensor.empty(api.chunks(0, [0]), "four"), "ints"),
    "no RPC for a worker": (
        lambda api: api.tensor.empty(api.spec.ChunkShardingSpec(0, ["trainer/cpu"]), 4),
        "RPC framework needs to be initialized",
    ),
    "no RPC for references": (
        lambda api: api.tensor.empty(api.chunks(0, [0]), 4, init_rrefs=True),
        "RPC Framework needs to be initialized",
    ),
    "references not asked for": (
        lambda api: api.tensor.empty(api.chunks(0, [0]), 4).remote_shards(),
        "ShardedTensor created with init_rrefs=False",
    ),
    "overlap": (
        lambda api: api.listed([([0, 0], [3, 3], 0), ([2, 0], [3, 3], 0)]),
        "Shards.*overlap",
    ),
    "gap": (
        lambda api: api.tensor.empty(api.listed([([0], [3], 0), ([4], [2], 0)]), 6),
        "does not match tensor volume",
    ),
    "too large": (
        lambda api: api.tensor.empty(api.listed([([0], [7], 0)]), 6),
        "exceeds tensor dim",
    ),
    "dims differ": (
        lambda api: api.tensor.empty(api.listed([([0], [6], 0)]), 6, 1),
        "Rank of tensor is 2, but shards rank is 1",
    ),
    "no shards": (lambda api: api.listed([]), "Empty shard list provided"),
    "several local tensors": (
        lambda api: api.tensor.empty(api.chunks(0, [0] * 3), 6, 1).local_tensor(),
        "Only single local shard is supported",
    ),
}


@ranks(1)
@pytest.mark.parametrize("name", ERRORS)
def test_mistakes_of_creation(name: str) -> None:
    compare_errors(*ERRORS[name])


@ranks(1, 2, 4)
def test_assembly_of_all_ranks_shards() -> None:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    local = torch.arange(15.0).view(3, 5) + 100 * rank

    def script(api: Api) -> Any:
        shards = [api.shard(local, [3 * rank, 0], rank)]
        first = api.tensor.init_from_local_shards(shards, 3 * world_size, 5)
        assert first.local_shards()[0].tensor is local
        trained = torch.ones(2, 3, requires_grad=True)
        second = api.tensor.init_from_local_shards(
            [api.shard(trained, [0, 3 * rank], rank)], (2, 3 * world_size)
        )
        assert second.requires_grad
        assert second.local_tensor() is trained
        several = [api.shard(local[i : i + 1], [i * world_size + rank, 0], rank) for i in range(3)]
        third = api.tensor.init_from_local_shards(several, 3 * world_size, 5)
        rows = api.tensor.init_from_local_shards(
            [api.shard(torch.ones(rank + 1, 4), [0, 0], rank)], None, None
        )
        return [first, second, third, rows]

    compare(script)


@ranks(2, 4)
def test_assembly_where_some_ranks_have_nothing() -> None:
    rank = dist.get_rank()

    def script(api: Api) -> Any:
        shards = [api.shard(torch.ones(4, 2), [0, 0], rank)] if rank == 1 else []
        return api.tensor.init_from_local_shards(shards, 4, 2)

    compare(script)


@ranks(1, 2, 4)
def test_assembly_by_spec_and_by_metadata() -> None:
    rank, order = dist.get_rank(), reversed_ranks()

    def script(api: Api) -> Any:
        spec, size = api.chunks(1, order), (3, 4 * len(order))
        local = torch.full((3, 4), float(rank))
        first = api.tensor.ShardedTensor._init_from_local_tensor(local, spec, size)
        assert first.local_tensor() is local
        metadata = first.metadata()
        shards = [api.tensor.Shard(local, metadata.shards_metadata[order.index(rank)])]
        make = api.tensor.ShardedTensor._init_from_local_shards_and_global_metadata
        return [first, make(shards, metadata), make(shards, metadata, sharding_spec=spec)]

    compare(script)


def test_assembly_without_a_process_group() -> None:
    def script(api: Api) -> Any:
        shards = [api.shard(torch.rand(2, 3), [2 * rank, 0], rank) for rank in range(3)]
        metadata = api.tensor.ShardedTensorMetadata(
            [shard.metadata for shard in shards], torch.Size([6, 3]), api.tensor.TensorProperties()
        )
        make = api.tensor.ShardedTensorBase._init_from_local_shards_and_global_metadata
        made = make(shards, sharded_tensor_metadata=metadata)
        assert isinstance(made, api.tensor.ShardedTensorBase)
        return [[s.tensor for s in made.local_shards()], made.metadata()]

    compare(script)


def test_assembly_without_a_process_group_remembers_page_locked_memory() -> None:
    """Of shards without elements their tensors do not tell."""

    def script(api: Api) -> Any:
        shards = [api.shard(torch.rand(0, 3), [0, 0], 0)]
        properties = api.tensor.TensorProperties(pin_memory=True)
        metadata = api.tensor.ShardedTensorMetadata(
            [shard.metadata for shard in shards], torch.Size([0, 3]), properties
        )
        make = api.tensor.ShardedTensorBase._init_from_local_shards_and_global_metadata
        return make(shards, sharded_tensor_metadata=metadata).metadata()

    compare(script)


def brought(api: Api, **changes: Any) -> Any:
    """Put a (4, 4 x ranks) together of one shard on each rank; rank 1 brings something else."""
    rank = dist.get_rank()
    options: dict[str, Any] = {"dtype": torch.float32, "requires_grad": False, "shape": (4, 4)}
    options |= {"size": (4, 4 * dist.get_world_size()), "offsets": [0, 4 * rank], "rank": rank}
    if rank == 1:
        options |= changes
    local = torch.ones(
        options["shape"], dtype=options["dtype"], requires_grad=options["requires_grad"]
    )
    shard = api.shard(options.get("local", local), options["offsets"], options["rank"])
    return api.tensor.init_from_local_shards([shard], options["size"])


DISAGREEMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "size": ({"size": (8, 8)}, "global_size property does not match from different ranks"),
    "dtype": ({"dtype": torch.int32}, "dtype property does not match from different ranks"),
    "autograd": ({"requires_grad": True}, "requires_grad property does not match from different"),
    "overlap": ({"offsets": [0, 3]}, "overlap"),
    "gap": ({"shape": (4, 3)}, "does not match tensor volume"),
}


@ranks(2, 4)
@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_disagreement_is_found_on_all_ranks(name: str) -> None:
    changes, match = DISAGREEMENTS[name]
    compare_errors(lambda api: brought(api, **changes), match)


@ranks(4)
def test_disagreement_names_all_ranks_on_each_side() -> None:
    with pytest.raises(ValueError, match=r"float32 on rank:\[0, 2, 3\].*int32 on rank:\[1\]"):
        brought(OURS, dtype=torch.int32)


ALONE: dict[str, tuple[dict[str, Any], str]] = {
    "strides": ({"local": torch.ones(4, 4).t()[:, :4]}, "contiguous_format"),
    "layout": ({"local": torch.eye(4).to_sparse()}, "strided layout"),
    "rank": ({"rank": 0}, "rank does not match"),
    "absent rank": ({"rank": 9}, "rank 9 does not exist"),
}


@ranks(2)
@pytest.mark.parametrize("name", ALONE)
def test_a_mistake_of_one_rank_is_raised_on_all(name: str) -> None:
    changes, match = ALONE[name]
    with pytest.raises(ValueError, match=match):
        brought(OURS, **changes)


@ranks(1, 2)
def test_nobody_brings_a_shard() -> None:
    compare_errors(
        lambda api: api.tensor.init_from_local_shards([], 4, 4), "no local shards on all ranks"
    )


def by_metadata(api: Api, num_shards: int = 1, **changes: Any) -> Any:
    """Put a (4, 4) on one rank together from metadata that were made for something else."""
    metadata = api.tensor.ShardedTensorMetadata(
        [api.spec.ShardMetadata([0, 0], [4, 4], "rank:0/cpu")],
        torch.Size([4, 4]),
        api.tensor.TensorProperties(**changes.get("properties", {})),
    )
    shard = api.tensor.Shard(changes.get("local", torch.ones(4, 4)), metadata.shards_metadata[0])
    make = api.tensor.ShardedTensor._init_from_local_shards_and_global_metadata
    return make([shard] * num_shards, metadata)


UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"num_shards": 0}, "does not match number of local shards metadata"),
    "two": ({"num_shards": 2}, "does not match number of local shards metadata"),
    "dtype": ({"local": torch.ones(4, 4).int()}, "dtype property is incompatible with"),
    "layout": ({"local": torch.eye(4).to_sparse()}, "layout property is incompatible with"),
    "autograd": (
        {"local": torch.ones(4, 4, requires_grad=True)},
        "requires_grad property is incompatible with",
    ),
    "strides": ({"local": torch.ones(4, 4).t()}, "contiguous_format"),
    "sparse": ({"properties": {"layout": torch.sparse_coo}}, "strided layout"),
}


@ranks(1)
@pytest.mark.parametrize("name", UNFIT)
def test_shards_that_do_not_fit_metadata(name: str) -> None:
    changes, match = UNFIT[name]
    compare_errors(lambda api: by_metadata(api, **changes), match)


@ranks(1, 2, 4)
@pytest.mark.parametrize("order", [everyone, reversed_ranks], ids=["inorder", "reversed"])
def test_gather_on_one_rank(order: Any) -> None:
    world_size, rank = dist.get_world_size(), dist.get_rank()

    def script(api: Api) -> Any:
        found = []
        for spec, size in (
            (api.chunks(0, order()), (10, 20)),
            (api.chunks(1, order() * 2), (5, 15)),
            (api.listed(grid()), (6, 6)),
            (api.chunks(0, order()[:1]), (3,)),
        ):
            tensor = api.tensor.rand(spec, size)
            out = torch.zeros(size) if rank == world_size - 1 else None
            assert tensor.gather(world_size - 1, out) is None
            found.append(out)
            whole = torch.zeros(size, dtype=torch.float64) if rank == 0 else None
            tensor.gather(0, whole, dtype=torch.float64)
            found.append(whole)
            again = torch.zeros(size) if rank == 0 else None
            tensor.gather(out=again, enforce_dtype=True, dst=0)
            found.append(again)
        return found

    if world_size == 1:
        with pytest.warns(FutureWarning, match="enforce_dtype"):
            OURS.tensor.ones(OURS.chunks(0, [0]), 3).gather(0, torch.zeros(3), enforce_dtype=True)
    compare(script)


@ranks(1, 2)
def test_gather_keeps_bits_of_any_dtype() -> None:
    for dtype in (torch.float64, torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn):
        whole = torch.randint(0, 2, (7, 3), generator=torch.Generator().manual_seed(1)).to(dtype)
        tensor = OURS.tensor.empty(OURS.chunks(0, everyone()), 7, 3, dtype=dtype)
        tensor.copy_(whole)
        out = torch.empty_like(whole) if dist.get_rank() == 0 else None
        tensor.gather(0, out)
        for found in (out, tensor.full_tensor()):
            if found is not None:
                assert torch.equal(found.view(torch.uint8), whole.view(torch.uint8))


@ranks(2)
def test_mistakes_of_a_gather_end_on_all_ranks() -> None:
    tensor, rank = OURS.tensor.ones(OURS.chunks(0, everyone()), 4, 4), dist.get_rank()
    whole = torch.ones(4, 4)
    for out, wrong_rank in (([None, None], 0), ([whole[0], None], 0), ([whole, whole], 1)):
        if rank == wrong_rank:
            with pytest.raises(ValueError, match="``dst_tensor``"):
                tensor.gather(0, out[rank])
        else:
            tensor.gather(0, out[rank])
    with pytest.raises(ValueError, match="rank 7 does not exist"):
        tensor.gather(7)
