"""Searches: what is chosen fits and is the fastest of what was asked, and rejections are right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from shoal.comm.network import INFINIBAND
from shoal.layout import Even
from shoal.plan import Choice, NothingFits, Search, Setup, Space, Workload, forecast_setup
from shoal.plan.shallow import Estimate, ShallowModel

DIM, LAYERS = 512, 12


class Blocks(nn.Module):
    """Equal blocks, and a first layer that is not one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM))
            for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def workload(sizes: Mapping[str, int]) -> Workload:
    def inputs() -> torch.Tensor:
        return torch.zeros(sizes.get("batch", 1) * 4096, DIM)

    return Workload(model=Blocks, inputs=inputs, units=lambda model: list(model.blocks))


SPACE = Space(
    layouts=(Even(),), checkpointings=(True, False), prefetch_depths=(1,), blocks_per_unit=(1,)
)


def search(budget_gb: float, **settings: Any) -> Search:
    given: dict[str, Any] = {"base": Setup(world=4), "space": SPACE, **settings}
    options = {"network": INFINIBAND}
    return Search(workload=workload, budget_bytes=budget_gb * 1e9, options=options, **given)


@pytest.mark.parametrize(
    "setup",
    [
        Setup(world=4),
        Setup(world=4, checkpointing=True, reshard=False),
        Setup(world=8, replicas=2, micro_batches=5),
    ],
)
def test_a_few_blocks_tell_of_all(setup: Setup) -> None:
    few = ShallowModel(workload({})).figures(workload({}), setup, {"network": INFINIBAND})
    whole = Estimate.of(forecast_setup(workload({}), setup, network=INFINIBAND))
    assert few.least_bytes == pytest.approx(whole.least_bytes, rel=0.002)
    assert few.step_ms == pytest.approx(whole.step_ms, rel=0.02)
    assert few.num_tokens == whole.num_tokens


def whole_forecasts(found: Choice) -> dict[str, tuple[bool, float]]:
    """For each plan that was judged, what a forecast of the whole model says."""
    answers = {}
    for one in found.judged:
        whole = forecast_setup(workload(one.sizes), one.setup, network=INFINIBAND)
        answers[str(one)] = whole.needed_bytes, whole.num_tokens / whole.time.step_ms
    return answers


def test_the_fastest_that_fits_is_chosen() -> None:
    """By forecasts of whole models: none that fits is faster, and what was rejected is too big."""
    budget = 1.1e9
    found = search(budget / 1e9).fastest([{"batch": 1}, {"batch": 2}])
    truth = whole_forecasts(found)
    assert {one.fits for one in found.judged} == {True, False}, truth
    fitting = {plan: speed for plan, (needed, speed) in truth.items() if needed <= budget}
    assert truth[str(found.chosen)][1] >= 0.98 * max(fitting.values())
    assert found.forecast.needed_bytes <= budget
    for one in found.judged:
        if not one.fits:
            assert truth[str(one)][0] > budget * 0.999
            assert one.why_not
    assert "fully_shard" in found.code


def test_the_largest_batch_fits_and_a_larger_one_does_not() -> None:
    wanted = search(1.5)
    largest = wanted.largest("batch", {}).chosen.sizes["batch"]
    assert largest >= 4
    with pytest.raises(NothingFits):
        search(1.5).fastest([{"batch": largest + max(1, largest // 32)}])


def test_a_budget_that_is_too_small_says_the_least() -> None:
    with pytest.raises(NothingFits, match=r"nothing fits into 0\.7 GB\. The least is .* GB, most"):
        search(0.7).fastest([{"batch": 8}])


def test_more_ranks_make_it_fit() -> None:
    small = Space(layouts=(Even(),), checkpointings=(True,), reshards=(True,), node_size=64)
    least = Setup(world=4, checkpointing=True, reshard=True)
    budget = forecast_setup(workload({"batch": 1}), least, network=INFINIBAND).needed_bytes
    found = search(budget / 1e9, base=Setup(world=16), space=small).fewest([{"batch": 1}])
    assert 1 < found.chosen.setup.world <= 4


def test_a_global_batch_is_split() -> None:
    found = search(8.0, global_batch=16 * 4096).fastest([{"batch": 1}, {"batch": 3}])
    assert found.chosen.setup.micro_batches == 4
    with pytest.raises(NothingFits, match="no multiple"):
        search(8.0, global_batch=1000).fastest([{"batch": 1}])
