"""What one plan tells of another, and a search that finds its favourites too large."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from shoal.layout import Flat
from shoal.plan import Forecast, NothingFits, Search, Setup, Space, Workload, forecast_setup
from shoal.plan.bounds import computes_no_less, needs_no_less, times_carried

BASE = Setup(world=8, reshard=True, micro_batches=2, reduces_each=True)
ONE = {"batch": 2}


@pytest.mark.parametrize(
    "more",
    [
        {"reshard": False},
        {"replicas": 2},
        {"prefetch_depth": 2},
        {"reduces_each": False},
        {"micro_batches": 3},
    ],
)
def test_who_keeps_more_needs_no_less(more: dict[str, Any]) -> None:
    setup, recomputing = replace(BASE, **more), replace(BASE, checkpointing=True)
    assert needs_no_less(setup, ONE, BASE, ONE)
    assert needs_no_less(setup, {"batch": 3}, recomputing, ONE)
    assert not needs_no_less(recomputing, ONE, setup, ONE)
    assert not needs_no_less(setup, {"batch": 1}, BASE, ONE)
    assert not needs_no_less(replace(setup, layout=Flat()), ONE, BASE, ONE)


def test_who_computes_again_takes_no_less() -> None:
    recomputing = replace(BASE, checkpointing=2)
    assert computes_no_less(recomputing, ONE, BASE, ONE)
    assert computes_no_less(recomputing, {"batch": 1}, BASE, ONE)
    assert not computes_no_less(BASE, ONE, recomputing, ONE)
    assert not computes_no_less(recomputing, {"batch": 4}, BASE, ONE)
    assert not computes_no_less(BASE, {"sequence": 1}, BASE, {"sequence": 2})


def test_who_reduces_each_carries_more_with_every_micro_batch() -> None:
    assert times_carried(replace(BASE, micro_batches=6), BASE) == 3
    assert times_carried(replace(BASE, micro_batches=6), replace(BASE, reduces_each=False)) == 1
    assert times_carried(BASE, replace(BASE, reshard=False)) == 1
    assert not times_carried(replace(BASE, reshard=False), BASE)
    assert not times_carried(BASE, replace(BASE, replicas=2))
    assert not times_carried(BASE, replace(BASE, micro_batches=3))


def search(budget_bytes: float) -> Search:
    """Of plans of a small model, which all fit by what short models say."""

    def workload(sizes: Any) -> Workload:
        return Workload(
            model=lambda: nn.Sequential(*(nn.Linear(256, 256) for _ in range(3))),
            inputs=lambda: torch.zeros(64, 256),
            units=list,
        )

    space = Space(prefetch_depths=(1,), blocks_per_unit=(1,))
    return Search(workload=workload, base=Setup(world=8), budget_bytes=budget_bytes, space=space)


@pytest.mark.parametrize("num_fitting", [1, 0])
def test_however_many_do_not_fit_one_that_does_is_found(
    num_fitting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole forecasts of nearly all plans reserve too much: the search goes on to those left."""
    budget = 10e9
    wanted: list[Setup] = []

    def whole(workload: Workload, setup: Setup, **_: Any) -> Forecast:
        found = forecast_setup(workload, setup)
        asked.append(setup)
        reserved = 1 if setup in wanted else int(2 * budget)
        return replace(found, memory=replace(found.memory, reserved_peak_bytes=reserved))

    asked: list[Setup] = []
    looking = search(budget)
    frugal = replace(BASE, checkpointing=True, micro_batches=1)
    frugal = replace(frugal, policy=looking.base.policy, reduces_each=False)
    wanted += [frugal] * num_fitting
    monkeypatch.setattr(sys.modules["shoal.plan.search"], "forecast_setup", whole)
    if num_fitting:
        assert looking.fastest([{}]).chosen.setup == frugal
        assert len(asked) > 1
    else:
        with pytest.raises(NothingFits, match=r"nothing fits into 10 GB\. The least is 2\d\.\d GB"):
            looking.fastest([{}])
