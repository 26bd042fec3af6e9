"""Resharding between any two placements, on ranks of this process."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pure.layout.strategies import (
    DTYPES,
    any_shapes,
    assert_same_bits,
    profile,
    random_tensors,
    spec,
)
from pure.tensor.tilings import Chunks, Dealt, Kind, kinds, placed, sharded
from shoal._torch.sharded import LocalShard
from shoal.comm.local import run_local
from shoal.errors import UsageError
from shoal.layout import Even, Flat, ParamSpec, Region, Rows, Whole
from shoal.tensor.listed import Listed
from shoal.tensor.packed import Packed
from shoal.tensor.reshard import reshard, reshard_
from shoal.tensor.sharded import ShardedTensor, allocate
from shoal.tensor.spec import ChunkShardingSpec


def assert_holds(tensor: ShardedTensor, whole: Tensor) -> None:
    """Every element of this rank's shards is the one that belongs there, bit by bit."""
    assert (tuple(tensor.shape), tensor.dtype) == (tuple(whole.shape), whole.dtype)
    parts = tensor.parts()
    assert [region for region, _ in parts] == list(tensor.placement.regions)
    assert_same_bits([part for _, part in parts], [whole[r.slices] for r, _ in parts])


def there_and_back(param: ParamSpec, first: Kind, second: Kind, device: str = "cpu") -> None:
    whole = random_tensors([param])[0].to(device)
    start = sharded(whole, first)
    target = placed(second, param.shape, device)
    there = reshard(start, target)
    assert_holds(there, whole)
    assert there.device == whole.device
    assert there.placement.agrees(target)
    assert_holds(reshard(there, start.placement), whole)
    assert_holds(start, whole)
    assert reshard_(start, there.placement) is start
    assert_holds(start, whole)
    assert start.placement.agrees(there.placement)


@profile(150)
@given(data=st.data())
def test_there_and_back(data: st.DataObject) -> None:
    shape = data.draw(any_shapes)
    world_size = data.draw(st.integers(1, 5))
    param = spec("w", *shape, dtype=data.draw(st.sampled_from(DTYPES)))
    first, second = data.draw(kinds(shape, world_size)), data.draw(kinds(shape, world_size))
    run_local(world_size, there_and_back, param, first, second)


WHOLE = torch.arange(6 * 8, dtype=torch.float32).view(6, 8)
ROWS, COLUMNS = Chunks(0, (0, 1, 2)), Chunks(1, (2, 0, 1))
CORNERS = Dealt(
    (
        (0, Region(offsets=(0, 0), sizes=(3, 5))),
        (1, Region(offsets=(0, 5), sizes=(3, 3))),
        (0, Region(offsets=(3, 0), sizes=(3, 8))),
    )
)
PAIRS = [(Flat(), Even(1)), (Rows(), Whole()), (Flat(), COLUMNS), (CORNERS, Rows())]
STANDING = [(ROWS, COLUMNS), (COLUMNS, CORNERS), (CORNERS, ROWS)]


def differentiate(first: Kind, second: Kind) -> None:
    """The gradient comes back cut as the tensor was, once for each way it was used."""
    source = sharded(WHOLE, first).requires_grad_()
    there = reshard(source, placed(second, (6, 8)))
    assert there.requires_grad
    factor = sharded(WHOLE + 1, second)
    (there * factor).backward(sharded(WHOLE * 2, second))
    assert isinstance(source.grad, ShardedTensor)
    assert source.grad.placement.agrees(source.placement)
    assert_holds(source.grad, (WHOLE + 1) * WHOLE * 2)


@pytest.mark.parametrize(("first", "second"), PAIRS + STANDING, ids=str)
def test_the_backward_is_the_reshard_back(first: Kind, second: Kind) -> None:
    run_local(3, differentiate, first, second)


def differentiate_shards(first: Kind, second: Kind) -> None:
    source = sharded(WHOLE, first)
    for local in source.locals:
        local.requires_grad_()
    before = source.locals
    reshard_(source, placed(second, (6, 8)))
    factors = sharded(WHOLE + 1, second)
    torch.stack(
        [
            (local * factor).sum()
            for local, factor in zip(source.locals, factors.locals, strict=True)
        ]
    ).sum().backward()
    gradients = [local.grad for local in before if local.numel()]
    expected = [whole for whole in sharded(WHOLE + 1, first).locals if whole.numel()]
    assert len(gradients) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


@pytest.mark.parametrize(("first", "second"), STANDING, ids=str)
def test_shards_that_stand_alone_are_differentiated_by_themselves(
    first: Kind, second: Kind
) -> None:
    """As torch's are: autograd follows the local tensors, on ranks that hold nothing too."""
    run_local(3, differentiate_shards, first, second)


def differentiate_given_shards() -> None:
    """Rank 2 gives no shard, so nothing on it requires a gradient by itself."""
    rank = dist.get_rank()
    given = [
        LocalShard.from_tensor_and_offsets(
            WHOLE[3 * rank : 3 * rank + 3].clone().requires_grad_(), [3 * rank, 0], rank
        )
        for _ in range(1 if rank < 2 else 0)
    ]
    tensor = ShardedTensor._init_from_local_shards(given, 6, 8)
    reshard_(tensor, placed(COLUMNS, (6, 8)))
    (tensor.local * sharded(WHOLE + 1, COLUMNS).local).sum().backward()
    for shard in given:
        assert shard.tensor.grad is not None
        assert torch.equal(shard.tensor.grad, WHOLE[3 * rank : 3 * rank + 3] + 1)


def test_a_rank_without_shards_takes_part_in_the_backward() -> None:
    run_local(3, differentiate_given_shards)


def in_place_of_a_result() -> None:
    source = sharded(WHOLE, Flat()).requires_grad_()
    result = source * 3
    assert reshard_(result, placed(Even(1), (6, 8))) is result
    assert_holds(result, WHOLE * 3)
    (result * 2).backward(sharded(WHOLE, Even(1)))
    assert isinstance(source.grad, ShardedTensor)
    assert_holds(source.grad, WHOLE * 6)


def test_a_result_is_resharded_in_place_inside_the_graph() -> None:
    run_local(3, in_place_of_a_result)


def in_place_of_a_parameter() -> None:
    parameter = nn.Parameter(sharded(WHOLE, Flat()))
    parameter.grad = sharded(WHOLE + 5, Flat())
    assert isinstance(parameter, ShardedTensor)
    reshard_(parameter, placed(Rows(), (6, 8)))
    assert isinstance(parameter, nn.Parameter)
    assert parameter.is_leaf
    assert parameter.requires_grad
    assert_holds(parameter, WHOLE)
    assert isinstance(parameter.grad, ShardedTensor)
    assert_holds(parameter.grad, WHOLE + 5)
    torch.optim.SGD([parameter], lr=1.0).step()
    assert_holds(parameter, torch.full((6, 8), -5.0))


def test_a_parameter_takes_its_gradient_along() -> None:
    run_local(3, in_place_of_a_parameter)


def compare(first: Kind, second: Kind) -> None:
    """One element differs, on one rank that has it."""
    tensor, other, changed = (sharded(WHOLE, kind) for kind in (first, second, second))
    tensor.requires_grad_()
    placement = other.placement
    for region, part in changed.parts():
        if region.contains(Region(offsets=(5, 7), sizes=(1, 1))):
            part[-1, -1] += 0.5
    for same in (torch.equal, torch.allclose):
        assert same(tensor, other)
        assert same(other, tensor)
        assert not same(tensor, changed)
        assert not same(changed, tensor)
    assert torch.allclose(tensor, changed, atol=1.0, rtol=0.0)
    assert other.placement is placement


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=str)
def test_comparisons_of_tensors_cut_differently_are_global(first: Kind, second: Kind) -> None:
    run_local(3, compare, first, second)


def let_go() -> None:
    """Whether a tensor has one local tensor or several, those of before do not live on."""
    for first, second in [(CORNERS, ROWS), (ROWS, CORNERS)]:
        tensor = sharded(WHOLE, first)
        before = [weakref.ref(local) for local in tensor.locals]
        reshard_(tensor, placed(second, (6, 8)))
        assert not any(reference() is not None for reference in before)
        assert hasattr(tensor, "local") == (len(tensor.locals) == 1)


def test_a_resharded_tensor_lets_go_of_its_old_shards() -> None:
    run_local(3, let_go)


def no_change() -> None:
    for kind in (Flat(), ROWS, CORNERS):
        tensor = sharded(WHOLE, kind)
        local = tensor.locals
        assert reshard(tensor, placed(kind, (6, 8))) is tensor
        assert reshard_(tensor, placed(kind, (6, 8))) is tensor
        assert all(a is b for a, b in zip(tensor.locals, local, strict=True))


def test_no_change_moves_nothing() -> None:
    run_local(3, no_change)


def cross(members: list[int], wide: Kind) -> None:
    """To some ranks of the group and back, on ranks that have no part in it too; and autograd."""
    group = dist.new_group(members)
    start = sharded(WHOLE, wide).requires_grad_()
    chunks = ChunkShardingSpec(1, [f"rank:{rank}/cpu" for rank in reversed(members)])
    narrow = Listed.of_spec(chunks, (6, 8), group)
    there = reshard(start, narrow)
    is_member = dist.get_rank() in members
    assert_holds(there, WHOLE)
    assert there.placement is narrow
    assert bool(there.placement.regions) == is_member
    back = reshard(there, placed(wide, (6, 8)))
    assert_holds(back, WHOLE)
    back.backward(sharded(WHOLE * 2, wide))
    assert isinstance(start.grad, ShardedTensor)
    assert_holds(start.grad, WHOLE * 2)
    moved = reshard_(sharded(WHOLE, wide), narrow)
    assert_holds(moved, WHOLE)


@pytest.mark.parametrize("members", [[1, 3], [2], [0, 1, 2, 3]], ids=str)
@pytest.mark.parametrize("wide", [Flat(), Rows(), ROWS, CORNERS], ids=str)
def test_a_group_of_some_of_the_ranks(members: list[int], wide: Kind) -> None:
    run_local(4, cross, members, wide)


def mistakes() -> None:
    tensor = sharded(WHOLE, Flat())
    group = dist.new_group([0, 1])
    other = placed(Flat(), (8, 6))
    with pytest.raises(UsageError, match=r"\(6, 8\) cannot be resharded to .* \(8, 6\)"):
        reshard(tensor, other)
    with pytest.raises(UsageError, match="expected a ShardingSpec or a Placement, got 1"):
        reshard(tensor, 1)  # pyright: ignore
    with pytest.raises(UsageError, match=r"max_extra over 1\.0"):
        reshard(tensor, placed(Rows(), (6, 8)), max_extra=1.0)
    if dist.get_rank() < 2:
        packing = Flat().pack([spec("w", 6, 8)], 2)
        fewer = Packed(packing=packing, index=0, group=group, rank=group.rank())
        with pytest.raises(
            NotImplementedError, match=r"\[0, 1, 2\] .* to ranks \[0, 1\]: .* listed"
        ):
            reshard(tensor, fewer)
    neighbours = dist.new_group([1, 2])
    if dist.get_rank() == 1:
        beside = Listed.of_spec(ChunkShardingSpec(0, ["rank:1/cpu"]), (6, 8), neighbours)
        part = Listed.of_spec(ChunkShardingSpec(0, ["rank:0/cpu"]), (6, 8), group)
        with pytest.raises(NotImplementedError, match="neither group has all ranks"):
            reshard(allocate(part, torch.float32), beside)
    if dist.get_rank() == 2:
        part = Listed.of_spec(ChunkShardingSpec(0, ["rank:0/cpu"]), (6, 8), group)
        with pytest.raises(UsageError, match="this rank is not in it: pass a Placement"):
            reshard(allocate(part, torch.float32), ChunkShardingSpec(0, ["rank:0/cpu"]))


def test_mistakes_are_named_before_anything_moves() -> None:
    run_local(3, mistakes)
