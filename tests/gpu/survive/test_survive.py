"""Ranks that talk NCCL on one GPU: one is killed, the others abort, regroup and go on."""

import pytest
import torch

from survival.deaths import IN_STEPS
from survival.jobs import launch
from survival.truth import assert_bit_equal, deaths_in, uninterrupted

TIMES = 10
CUDA = {"device": "cuda", "limit_s": 170}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("phase", IN_STEPS)
def test_one_of_four_dies_in_every_phase(phase, tmp_path):
    plan = {**CUDA, "steps": 6, "1": [[3, phase]]}
    outcome = launch(tmp_path / "job", 4, plan)
    assert outcome.lost == [1]
    assert [r["members"] for r in outcome.recoveries] == [[0, 2, 3]]
    ((died_at, _),) = deaths_in(tmp_path / "job")
    assert all(story["noticed"]["1"] - died_at < 1 for story in outcome.stories.values())
    assert_bit_equal(outcome, tmp_path, 4, plan)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("number", range(TIMES))
def test_one_of_two_dies_and_the_other_goes_on_alone(number, tmp_path):
    plan = {**CUDA, "steps": 6, str(number % 2): [[2, IN_STEPS[number % len(IN_STEPS)]]]}
    outcome = launch(tmp_path / "job", 2, plan)
    assert outcome.lost == [number % 2]
    assert_bit_equal(outcome, tmp_path, 2, plan)


@pytest.mark.timeout(400)
def test_four_become_one(tmp_path):
    plan = {
        **CUDA,
        "steps": 12,
        "layout": "flat",
        "0": [[2, "optimizer"]],
        "3": [[5, "backward"]],
        "1": [[8, "parity"]],
    }
    outcome = launch(tmp_path / "job", 4, plan)
    assert outcome.lost == [0, 3, 1]
    assert_bit_equal(outcome, tmp_path, 4, plan)


@pytest.mark.timeout(400)
def test_a_rank_joins_over_nccl(tmp_path):
    plan = {**CUDA, "steps": 6, "wait_for_events": {"2": 1}}
    outcome = launch(tmp_path / "job", 2, plan, num_joining=1)
    assert [r["members"] for r in outcome.recoveries] == [[0, 1, 2]]
    assert_bit_equal(outcome, tmp_path, 2, plan)


@pytest.mark.timeout(400)
def test_images_and_parity_lie_on_the_host(tmp_path):
    """So that the GPU holds nothing for survival but what is on its way."""
    plan = {**CUDA, "steps": 3}
    outcome = launch(tmp_path / "job", 2, plan)
    assert all(set(story["kept_on"]) == {"cpu"} for story in outcome.stories.values())
    _, truth = uninterrupted(tmp_path / "truth", 2, [], plan)
    assert all(torch.equal(outcome.state[name], value.cpu()) for name, value in truth.items())
