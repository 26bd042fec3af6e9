"""What a sharded tensor is: its pieces, its place in autograd and modules, its refusals."""

import copy
import pickle
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cuts import LAYOUTS, parameters, placements, random_tensors, sharded
from pure.layout.strategies import (
    assert_same_bits,
    layouts_for,
    param_lists,
    profile,
)
from pure.layout.strategies import random_tensors as random_bits
from shoal.comm.local import run_local
from shoal.comm.transport import Transport
from shoal.doors.sharded_tensor.creation import empty
from shoal.errors import MeshError, UsageError
from shoal.layout import Even, Flat, Layout, Packing, Region, Rows, Whole
from shoal.tensor import Packed, ShardedTensor
from shoal.tensor.sharded import like


@st.composite
def packings(draw: st.DrawFn) -> Packing:
    params = draw(param_lists())
    return draw(layouts_for(params)).pack(params, draw(st.integers(1, 4)))


@profile(60)
@given(packing=packings())
def test_any_bits_in_any_cut_come_back_whole(packing: Packing) -> None:
    whole = random_bits(packing.params)

    def rank() -> None:
        group = dist.group.WORLD
        assert group is not None
        for index, tensor in enumerate(whole):
            placement = Packed(packing=packing, index=index, group=group, rank=group.rank())
            blank = torch.zeros(placement.piece.shape, dtype=tensor.dtype)
            ours = ShardedTensor.of(blank, placement)
            ours.copy_(tensor)
            assert (ours.shape, ours.dtype) == (tensor.shape, tensor.dtype)
            assert_same_bits(
                [part for _, part in ours.parts()], [tensor[r.slices] for r in ours.regions]
            )
            assert_same_bits([ours.full_tensor()], [tensor])

    run_local(packing.world_size, rank)


def on_each(
    *layouts: Layout,
) -> Callable[[Callable[[Layout], None]], Callable[[Layout, int], None]]:
    """Run a test for each layout on one, two and four ranks of this process."""

    def decorate(body: Callable[[Layout], None]) -> Any:
        @pytest.mark.parametrize("layout", layouts or LAYOUTS, ids=str)
        @pytest.mark.parametrize("world_size", [1, 2, 4])
        def test(layout: Layout, world_size: int) -> None:
            run_local(world_size, body, layout)

        return test

    return decorate


@on_each()
def test_a_parameter_keeps_the_local_tensor_and_takes_a_gradient(layout: Layout) -> None:
    for whole, tensor in zip(random_tensors(), sharded(random_tensors(), layout), strict=True):
        parameter = nn.Parameter(tensor)
        assert isinstance(parameter, nn.Parameter)
        assert type(parameter) is ShardedTensor
        assert parameter.local is tensor.local
        assert parameter.detach().local is tensor.local
        assert parameter.is_leaf
        assert parameter.requires_grad
        assert parameter.shape == whole.shape
        grad = like(parameter, torch.ones_like(parameter.local))
        parameter.grad = grad
        assert parameter.grad is grad
        (parameter * 3).backward(grad)
        assert torch.equal(parameter.grad.full_tensor(), torch.full(whole.shape, 4.0))


def test_gradients_of_another_shape_are_refused() -> None:
    def rank() -> None:
        first, second = parameters(random_tensors([(4, 4), (5, 3)]), Flat())
        with pytest.raises(RuntimeError, match="same size"):
            first.grad = second.detach()

    run_local(2, rank)


@on_each()
def test_deepcopy_makes_new_memory(layout: Layout) -> None:
    whole = random_tensors()
    original = parameters(whole, layout)
    original[0].grad = torch.ones_like(original[0])
    original[0].tag = ["kept"]
    copies = copy.deepcopy(original)
    copies[0].tag.append("changed")
    with torch.no_grad():
        for tensor in copies:
            tensor.add_(1)
    assert original[0].tag == ["kept"]
    assert copies[0].grad is not original[0].grad
    assert torch.equal(copies[0].grad.full_tensor(), original[0].grad.full_tensor())
    for before, after, value in zip(original, copies, whole, strict=True):
        assert isinstance(after, nn.Parameter)
        assert torch.equal(before.full_tensor(), value)
        assert torch.equal(after.full_tensor(), value + 1)
    with pytest.raises(UsageError, match="leaf"):
        copy.deepcopy(original[0] * 2)


class Layer(nn.Module):
    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.weight, self.bias = parameters(random_tensors([(9, 5), (3,)]), layout)


@on_each()
def test_modules_move_cast_load_and_copy_their_parameters(layout: Layout) -> None:
    layer = Layer(layout)
    weight, values = layer.weight, random_tensors([(9, 5), (3,)])
    layer.double()
    assert layer.weight is weight
    assert layer.weight.dtype == layer.weight.local.dtype == torch.float64
    assert torch.equal(layer.weight.full_tensor(), values[0].double())
    layer.float().load_state_dict({"weight": values[0] + 1, "bias": values[1]})
    assert torch.equal(layer.weight.full_tensor(), values[0] + 1)
    other = Layer(layout)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.weight.full_tensor(), values[0] + 1)
    layer.to_empty(device="meta")
    assert layer.weight.is_meta
    assert layer.weight.local.is_meta
    assert layer.weight.local.shape == weight.placement.piece.shape
    assert "ShardedTensor" in repr(copy.deepcopy(layer).to("meta").weight)


@on_each()
def test_swapping_and_rehoming(layout: Layout) -> None:
    first, second = parameters(random_tensors([(8, 8), (8, 8)]), layout)
    values = [first.full_tensor(), second.full_tensor()]
    torch.utils.swap_tensors(first, second)
    assert torch.equal(first.full_tensor(), values[1])
    assert torch.equal(second.full_tensor(), values[0])
    home = torch.zeros_like(first.local)
    first.local = home
    assert first.local is home
    assert not first.full_tensor().any()


def test_data_moves_the_local_tensor_too() -> None:
    def rank() -> None:
        first, other = parameters(random_tensors([(8, 8), (3, 3)]), Rows())
        doubled = first.detach() * 2
        first.data = doubled
        assert first.local is doubled.local
        assert isinstance(first, nn.Parameter)
        assert first.data.local is doubled.local
        first.data = doubled.double()
        assert first.dtype == first.local.dtype == torch.float64
        for wrong in (other, torch.zeros(8, 8)):
            with pytest.raises(UsageError, match=r"`\.data` .* same placement"):
                first.data = wrong

    run_local(2, rank)


def test_the_repr_names_the_whole_and_the_part() -> None:
    def rank() -> str:
        return repr(parameters([torch.zeros(4, 2)], Whole())[0])

    assert run_local(2, rank)[0] == (
        "ShardedTensor(shape=(4, 2), dtype=torch.float32, device=cpu, rank 0 of 2 holding "
        f"8 elements of (4, 2) by WholePacking, requires_grad=True, local={torch.zeros(4, 2)!r})"
    )


@on_each()
def test_pickling_keeps_this_ranks_part(layout: Layout) -> None:
    for parameter, whole in zip(
        parameters(random_tensors(), layout), random_tensors(), strict=True
    ):
        loaded = pickle.loads(pickle.dumps(parameter))
        assert loaded.placement == parameter.placement
        assert loaded.local is not parameter.local
        assert isinstance(loaded, nn.Parameter)
        assert torch.equal(loaded.full_tensor(), whole)


@on_each()
def test_shards_and_metadata_of_a_layout_are_torchs(layout: Layout) -> None:
    for tensor, whole in zip(sharded(random_tensors(), layout), random_tensors(), strict=True):
        metadata = tensor.metadata()
        assert (metadata.size, metadata.tensor_properties.dtype) == (whole.shape, whole.dtype)
        everywhere = torch.zeros(whole.shape)
        for shard in metadata.shards_metadata:
            region = Region(offsets=tuple(shard.shard_offsets), sizes=tuple(shard.shard_sizes))
            everywhere[region.slices] += 1
        assert bool((everywhere == 1).all())
        for shard in tensor.local_shards():
            assert shard.metadata in metadata.shards_metadata
            assert shard.metadata.placement.rank() == dist.get_rank()
            offsets, sizes = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            region = Region(offsets=tuple(offsets), sizes=tuple(sizes))
            assert torch.equal(shard.tensor, whole[region.slices])
        if whole.numel():
            again = empty(tensor.sharding_spec(), whole.shape).metadata()
            assert again.shards_metadata == metadata.shards_metadata


@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        ({"rank": 1}, MeshError, "expected rank 0 of the group, got 1"),
        ({"index": 2}, UsageError, "parameter 2 does not exist"),
        ({"group": None}, MeshError, "expected a process group"),
        ({"replica": -1}, UsageError, "replica of 0 or more"),
        ({"packing": Flat().pack([], 3)}, MeshError, "3 ranks cannot be placed on a group of 1"),
    ],
)
def test_placements_that_cannot_be(wrong: dict[str, Any], error: type, match: str) -> None:
    def rank() -> None:
        right = placements([(4, 2), (3,)], Flat())[0]
        given = {name: getattr(right, name) for name in ("packing", "index", "group", "rank")}
        with pytest.raises(error, match=match):
            Packed(**{**given, **wrong})

    run_local(1, rank)


@pytest.mark.parametrize(
    ("local", "match"),
    [
        (torch.zeros(7), r"needs a local tensor of shape \(8,\), got \(7,\)"),
        (torch.zeros(8, requires_grad=True), "outside of autograd"),
        (torch.zeros(16)[::2], r"contiguous local tensor, got strides \(2,\)"),
        ([0.0] * 8, "plain local tensors, got a float"),
    ],
)
def test_local_tensors_that_do_not_fit(local: Any, match: str) -> None:
    def rank() -> None:
        with pytest.raises(UsageError, match=match):
            ShardedTensor.of(local, placements([(4, 2)], Flat())[0])

    run_local(1, rank)


def test_placements_agree_where_ranks_hold_the_same() -> None:
    def rank() -> None:
        first, _ = placements([(4, 8), (4, 8)], Flat())
        again, _ = placements([(4, 8), (4, 8)], Flat())
        assert first.agrees(again)
        assert first == again
        rows, _ = placements([(4, 8), (4, 8)], Rows())
        assert not first.agrees(rows), "the same elements, but in another local shape"
        _, later = placements([(32, 8), (4, 8)], Flat())
        assert not first.agrees(later)
        assert not first.agrees(placements([(8, 4)], Flat())[0])
        scalar, number = placements([()], Whole())[0], placements([()], Flat())[0]
        assert not scalar.agrees(number), "on ranks that hold nothing, too"

    run_local(2, rank)


@pytest.mark.parametrize(
    ("layout", "num_gathers", "num_broadcasts"), [(Even(), 1, 0), (Flat(), 1, 0), (Whole(), 0, 1)]
)
def test_a_tensor_that_few_hold_is_broadcast_and_others_are_gathered(
    layout: Layout, num_gathers: int, num_broadcasts: int
) -> None:
    calls: list[str] = []

    def rank() -> None:
        (tensor,) = sharded([torch.arange(640.0)], layout)
        assert torch.equal(tensor.full_tensor(), torch.arange(640.0))

    def counted(name: str) -> Any:
        original = getattr(Transport, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        return call

    with (
        patch.object(Transport, "all_gather", counted("all_gather")),
        patch.object(Transport, "broadcast", counted("broadcast")),
    ):
        run_local(4, rank)
    assert calls.count("all_gather") == 4 * num_gathers
    assert calls.count("broadcast") == 4 * num_broadcasts
