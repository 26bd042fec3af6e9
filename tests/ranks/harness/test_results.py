"""What goes to the ranks and what comes back."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from harness import on_ranks


@dataclass(frozen=True)
class Offset:
    value: int


def shifted(numbers: torch.Tensor, *, by: Offset) -> tuple[torch.Tensor, Offset]:
    return numbers + by.value + dist.get_rank(), Offset(dist.get_world_size())


def unsendable() -> object:
    return lambda: None


def timeouts_and_sizes(*, world_size: int) -> tuple[int, int]:
    return dist.get_world_size(), world_size


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_back_in_rank_order(world_size):
    results = on_ranks(world_size, shifted, torch.tensor([1.0, 2.0]), by=Offset(10))
    assert len(results) == world_size
    for rank, (numbers, size) in enumerate(results):
        assert torch.equal(numbers, torch.tensor([11.0 + rank, 12.0 + rank]))
        assert size == Offset(world_size)


def test_a_function_may_have_arguments_named_like_those_of_on_ranks():
    assert on_ranks(2, timeouts_and_sizes, world_size=7) == [(2, 7), (2, 7)]


def test_a_function_of_an_installed_module_runs_too():
    assert on_ranks(2, dist.get_rank) == [0, 1]


def test_a_local_function_is_refused():
    def local() -> None: ...

    with pytest.raises(TypeError, match="module-level function"):
        on_ranks(2, local)


def test_an_argument_that_cannot_be_sent_is_named():
    with pytest.raises(TypeError, match="argument 'by' is a function"):
        on_ranks(2, shifted, torch.zeros(1), by=lambda: None)


def test_a_result_that_cannot_be_sent_fails_with_what_to_do():
    with pytest.raises(pytest.fail.Exception, match="return plain values or tensors"):
        on_ranks(2, unsendable)


def test_no_ranks_are_refused():
    with pytest.raises(ValueError, match="at least one rank"):
        on_ranks(0, dist.get_rank)
