"""Two hundred deaths, fifty resizes: every run goes on, and ends as one that was resized there."""

import os
import random

import pytest

from harness import close_pools
from survival.deaths import AIMED, NUM_AIMED_EACH, NUM_DEATHS, all_jobs, num_by_phase
from survival.jobs import launch
from survival.truth import assert_bit_equal, deaths_in

NOTICED_S = 1.0
GOES_ON_S = 10.0
JOBS = all_jobs(int(os.environ.get("SHOAL_DEATHS_SEED", "0")))


def test_deaths_are_aimed_at_every_phase():
    counts = num_by_phase(JOBS)
    assert all(counts[phase] >= NUM_AIMED_EACH for phase in AIMED)
    assert sum(counts.values()) == NUM_DEATHS
    assert {job.num_ranks for job in JOBS} == {4, 5, 6, 7, 8}


def assert_noticed(outcome, folder, job):
    """All hear of a death within a second, and have done a step within ten."""
    slowest_s = 0.0
    for died_at, member in deaths_in(folder):
        for story in outcome.stories.values():
            if story["noticed"].get(str(member)) is None or died_at < story["began"]:
                continue
            heard = story["noticed"][str(member)] - died_at
            assert heard < NOTICED_S, (member, heard)
            later = [end for end in story["ends"] if end > died_at]
            went_on = min(later, default=died_at) - died_at
            assert went_on < GOES_ON_S, (member, went_on)
            slowest_s = max(slowest_s, went_on)
            if member not in job.unnoticed:
                broken = [at for at in story["broken_at"] if at > died_at]
                assert min(broken, default=died_at) - died_at < NOTICED_S, member
    return slowest_s


@pytest.mark.soak
@pytest.mark.timeout(600)  # most of it is the run that it is compared with
@pytest.mark.parametrize("number", range(len(JOBS)))
def test_ranks_die_and_the_others_go_on(number, tmp_path):
    job = JOBS[number]
    outcome = launch(tmp_path / "job", job.num_ranks, job.plan, orders=job.orders)
    assert outcome.lost == job.lost
    slowest_s = assert_noticed(outcome, tmp_path / "job", job)
    assert_bit_equal(outcome, tmp_path, job.num_ranks, job.plan)
    print(f"{len(job.lost)} deaths {job.phases}: went on after {slowest_s:.2f} s at most")


@pytest.fixture(autouse=True)
def few_processes():
    """Pools of all sizes would take gigabytes."""
    yield
    close_pools()


NUM_RESIZES = 50
RESIZES_EACH = 5


def random_resizes(seed):
    """A job that asks for other sizes, again as soon as it has the one that it has asked for."""
    draw = random.Random(seed)
    sizes = [draw.randint(2, 7)]
    step, num_events, plan = 1, 0, {"resize": {}, "wait_for_events": {}}
    for _ in range(RESIZES_EACH):
        size = draw.choice([n for n in range(1, 9) if n != sizes[-1]])
        plan["resize"][str(step)] = size
        for _ in range(abs(size - sizes[-1])):  # processes come and go one by one
            num_events += 1
            step += 4
            plan["wait_for_events"][str(step)] = num_events
        sizes.append(size)
        step += 4
    plan |= {
        "steps": step + draw.randint(1, 3),
        "samples": draw.randint(8, 16),
        "layout": draw.choice(["even", "flat", "rows"]),
        "optimizer": draw.choice(["adamw", "sgd"]),
        "limit_s": 110,
    }
    return sizes, plan


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(NUM_RESIZES // RESIZES_EACH))
def test_resizes_at_random(seed, tmp_path):
    sizes, plan = random_resizes(seed)
    outcome = launch(tmp_path / "job", sizes[0], plan)
    assert not outcome.lost
    reached = [len(recovery["members"]) for recovery in outcome.recoveries]
    assert reached[-1] == sizes[-1]
    assert set(sizes[1:]) <= set(reached)
    assert_bit_equal(outcome, tmp_path, sizes[0], plan)
