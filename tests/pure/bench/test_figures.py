import pytest
import torch

from pure.bench.samples import make_built
from shoal.bench.cases import DeviceType
from shoal.bench.figures import ComputeRound, Figures, Memory, OptimizerRound, summarise
from shoal.bench.host import GIB, read_peak, reset_peak

CPU = torch.device("cpu")


def resident(gib: float) -> Memory:
    return Memory(allocated_gib=None, reserved_gib=None, resident_gib=gib)


def summary(device_type: DeviceType) -> Figures:
    rounds = [
        ComputeRound(forward_backward_ms=samples, wall_ms=samples, host_ms=())
        for samples in ((9.0, 3.0, 4.0), (5.0, 100.0))
    ]
    optimizer = [OptimizerRound(optimizer_ms=(2.0, 1.0, 6.0))]
    return summarise(device_type, make_built(memory=resident(9.0)), rounds, optimizer)


def test_cpu_takes_the_minimum_over_all_rounds() -> None:
    figures = summary("cpu")
    assert (figures.forward_backward_ms, figures.optimizer_ms) == (3.0, 1.0)


def test_cuda_takes_the_median_of_the_quietest_round() -> None:
    figures = summary("cuda")
    assert (figures.forward_backward_ms, figures.optimizer_ms) == (4.0, 2.0)


def test_memory_is_that_of_building_and_host_time_may_be_absent() -> None:
    figures = summary("cpu")
    assert figures.memory == resident(9.0)
    assert figures.host_ms is None


def test_no_samples_no_figures() -> None:
    with pytest.raises(ValueError, match="without a single sample"):
        summarise("cpu", make_built(), [], [])


def test_resident_peak_follows_what_is_touched() -> None:
    reset_peak(CPU)
    before = read_peak(CPU).resident_gib
    block = torch.ones(GIB // 16)  # 1/4 GiB
    during = read_peak(CPU).resident_gib
    assert before is not None
    assert during is not None
    assert 0.2 < during - before < 0.5
    del block
    assert read_peak(CPU).resident_gib == pytest.approx(during, abs=0.01)
    reset_peak(CPU)
    after = read_peak(CPU).resident_gib
    assert after is not None
    assert after < during - 0.2
