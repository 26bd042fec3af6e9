"""Tests whose bodies run on ranks: what pytest and hypothesis hand to them."""

import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import RankFailed, ranks

pytestmark = pytest.mark.unsampled  # the harness itself must serve all of them

pids: list[int] = []


@pytest.fixture
def label(request: pytest.FixtureRequest) -> str:
    return request.node.name


@ranks(2, 4)
def test_several_world_sizes_make_several_tests(label):
    assert label == f"test_several_world_sizes_make_several_tests[{dist.get_world_size()}ranks]"


@ranks(2, 3)
@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_parameters_and_fixtures_reach_every_rank(world_size, factor, tmp_path):
    assert dist.get_world_size() == world_size
    total = torch.tensor([factor])
    dist.all_reduce(total)
    assert total.item() == factor * world_size
    (tmp_path / str(dist.get_rank())).write_text("here")
    dist.barrier()
    assert sorted(os.listdir(tmp_path)) == [str(rank) for rank in range(world_size)]


@ranks(2)
def test_one_world_size_is_handed_over_when_asked_for(world_size):
    assert world_size == dist.get_world_size() == 2


class TestMethods:
    @ranks(2)
    def test_a_method_is_a_body_too(self):
        assert type(self) is TestMethods
        assert dist.get_world_size() == 2


@given(numbers=st.lists(st.integers(-100, 100), min_size=1, max_size=5))
@settings(max_examples=20)
@ranks(2)
def test_given_sends_the_same_example_to_all_ranks(numbers):
    mine = torch.tensor(numbers)
    gathered = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(gathered, mine)
    assert torch.equal(gathered[0], gathered[1])


@given(number=st.integers(0, 1000))
@settings(database=None)
@ranks(2)
def check_small(number):
    assert number < 100


def test_given_shrinks_what_fails_on_ranks():
    with pytest.raises(RankFailed, match=r"assert 100 < 100"):
        check_small()


def test_given_below_ranks_is_refused():
    @given(st.integers())
    def body(number: int) -> None: ...

    with pytest.raises(TypeError, match="put @given above @ranks"):
        ranks(2)(body)


@pytest.mark.parametrize("world_sizes", [(), (0,), (2, -1)])
def test_impossible_world_sizes_are_refused(world_sizes):
    with pytest.raises(ValueError, match="world sizes of one or more"):
        ranks(*world_sizes)


@ranks(2)
@pytest.mark.parametrize("turn", [0, 1])
def test_processes_outlive_a_test(turn):
    pids.append(os.getpid())
    assert pids == [os.getpid()] * (turn + 1)


@ranks(2, fresh=True)
@pytest.mark.parametrize("turn", [0, 1])
def test_fresh_processes_do_not(turn):
    pids.append(os.getpid())
    assert len(pids) == 1


@pytest.mark.xfail(strict=True)
@ranks(2)
def test_marks_below_and_above_hold():
    raise AssertionError
