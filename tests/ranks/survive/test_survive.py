"""Ranks die at every moment; the others go on bit for bit like a run resized from a checkpoint."""

import json
import os
import random
import shutil
import subprocess
import sys

import pytest
import torch

from harness import on_ranks
from shoal.survive.launcher import run_job
from survival import program
from survival.jobs import launch, starter
from survival.program import (
    build,
    shard,
)
from survival.truth import assert_bit_equal, deaths_in, one_stretch, uninterrupted
from train_command import SOURCE, alive, children_of, wait_until

PHASES = [
    "forward", "backward", "reduction", "optimizer", "parity", "parity sent", "parity done",
]  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_dies_in_every_phase(phase, tmp_path):
    plan = {"steps": 6, "1": [[3, phase]]}
    outcome = launch(tmp_path / "job", 4, plan)
    assert outcome.lost == [1]
    assert [r["members"] for r in outcome.recoveries] == [[0, 2, 3]]
    assert outcome.recoveries[0]["version"] in (2, 3, 4)
    assert_bit_equal(outcome, tmp_path, 4, plan)


def test_one_after_another_dies_also_the_first(tmp_path):
    """Four ranks become one; shares of 13 samples are not equal; state of Flat shards moves.

    And images of ranks that are gone are let go, without the garbage collector's help.
    """
    plan = {
        "steps": 9,
        "without_gc": True,
        "samples": 13,
        "layout": "flat",
        "0": [[1, "optimizer"]],
        "3": [[3, "backward"]],
        "1": [[6, "parity"]],
    }
    outcome = launch(tmp_path / "job", 4, plan)
    assert outcome.lost == [0, 3, 1]
    assert [r["members"] for r in outcome.recoveries] == [[1, 2, 3], [1, 2], [2]]
    assert [story["protections"] for story in outcome.stories.values()] == [1]
    assert_bit_equal(outcome, tmp_path, 4, plan)


def test_a_rank_joins_and_trains_on(tmp_path):
    plan = {"steps": 6, "samples": 7, "wait_for_events": {"2": 1}, "0": [[4, "parity"]]}
    outcome = launch(tmp_path / "job", 2, plan, num_joining=1)
    assert [r["members"] for r in outcome.recoveries] == [[0, 1, 2], [1, 2]]
    assert outcome.stories.keys() == {1, 2}
    assert_bit_equal(outcome, tmp_path, 2, plan)


def test_a_rank_leaves_and_nothing_is_lost(tmp_path):
    plan = {"steps": 5, "layout": "rows", "wait_for_events": {"2": 1}}
    outcome = launch(tmp_path / "job", 3, plan, leaving=0)
    assert outcome.stories[0]["has_left"]
    assert not outcome.lost
    assert [(r["members"], r["undone"]) for r in outcome.recoveries] == [([1, 2], 0)]
    assert_bit_equal(outcome, tmp_path, 3, plan)


def test_a_spare_takes_the_place_of_a_rank_that_died(tmp_path):
    """In one recovery; and another one waits then, which takes the next place."""
    plan = {
        "steps": 30,
        "wait_for_events": {"8": 2, "20": 4},
        "0": [[5, "backward"]],
        "1": [[16, "optimizer"]],
    }
    outcome = launch(tmp_path / "job", 3, plan, num_spares=1)
    assert outcome.lost == [0, 1]
    assert [len(r["members"]) for r in outcome.recoveries][-1] == 3
    assert {2, 3, 4} <= outcome.stories.keys()
    assert_bit_equal(outcome, tmp_path, 3, plan)


def has_content(path):
    return path.stat().st_size > 0


@pytest.mark.parametrize("trains", [pytest.param(True, marks=pytest.mark.soak), False])
def test_ranks_end_with_their_launcher(trains, tmp_path):
    """However it goes, and whenever: nobody trains on for nobody."""
    plan = json.dumps({"steps": 10**6, "pause_s": 0.01})
    words = ["-m", "shoal.survive", "--ranks", "2", program.__file__, str(tmp_path), plan]
    launcher = subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: len(children_of(launcher.pid)) == 2, 60)
        if trains:
            wait_until(lambda: sum(map(has_content, tmp_path.glob("*.at"))) == 2, 60)
        ranks = children_of(launcher.pid)
        assert len(ranks) == 2
    finally:
        launcher.kill()
        launcher.wait()
    wait_until(lambda: not any(map(alive, ranks)), 10)


def test_it_is_noticed_at_once_though_other_processes_hold_the_sockets(tmp_path):
    """Children of the dead rank, such as workers of a DataLoader, keep its connections open."""
    plan = {"steps": 5, "fork_at": 1, "1": [[3, "reduction"]]}
    outcome = launch(tmp_path / "job", 4, plan)
    ((died_at, _),) = deaths_in(tmp_path / "job")
    assert all(story["broken_at"][0] - died_at < 1 for story in outcome.stories.values())
    assert_bit_equal(outcome, tmp_path, 4, plan)


@pytest.mark.soak
def test_a_rank_dies_while_a_checkpoint_is_saved(tmp_path):
    plan = {"steps": 5, "save_at": 3, "1": [[2, "saving"]]}
    outcome = launch(tmp_path / "job", 4, plan)
    assert outcome.lost == [1]
    assert_bit_equal(outcome, tmp_path, 4, plan)
    plan["steps"] = 3
    shutil.copytree(tmp_path / "job" / "step-00000003", tmp_path / "step-3")
    _, saved = on_ranks(2, one_stretch, tmp_path, 3, 3, plan)[0]
    _, truth = uninterrupted(tmp_path / "truth", 4, outcome.recoveries, plan)
    assert all(torch.equal(saved[name], value) for name, value in truth.items())


def test_what_cannot_be_rebuilt_starts_again_from_the_checkpoint(tmp_path, capsys):
    """Two of four die, with one parity: all start again where the program has saved."""
    job = tmp_path / "job"
    plan = {"steps": 5, "save_at": 2, "1": [[3, "reduction"]], "2": [[3, "deciding"]]}
    assert run_job(starter(job, plan), 4, 1) == []
    said = capsys.readouterr().err
    assert "2 ranks died, the members [1, 2], too many at the same time" in said
    assert "starting all ranks again" in said
    stories = [json.loads(path.read_text()) for path in job.glob("*.json")]
    assert all(min(map(int, story["losses"])) == 2 for story in stories)
    _, truth = uninterrupted(tmp_path / "truth", 4, [], plan)
    found = torch.load(job / "state.pt")
    assert all(torch.equal(found[name], value) for name, value in truth.items())


def test_what_cannot_be_rebuilt_starts_again_from_the_newest_snapshot(tmp_path):
    """Nobody saves: snapshots are written beside the steps, and loaded by survive itself."""
    job = tmp_path / "job"
    plan = {"steps": 40, "snapshots": True, "1": [[30, "reduction"]], "2": [[30, "deciding"]]}
    assert run_job(starter(job, plan), 4, 1) == []
    stories = [json.loads(path.read_text()) for path in job.glob("*.json")]
    (first,) = {min(map(int, story["losses"])) for story in stories}
    assert 0 < first <= 30
    _, truth = uninterrupted(tmp_path / "truth", 4, [], plan)
    found = torch.load(job / "state.pt")
    assert all(torch.equal(found[name], value) for name, value in truth.items())
    assert 1 <= len(list((job / "snapshots").glob("step-*"))) <= 2


@pytest.mark.parametrize("parities", [1, 2])
def test_memory_and_bytes_are_as_stated(parities, tmp_path):
    """As docs/survive.md has them; S is the largest rank's state, in whole stripes."""
    size, plan = 4, {"steps": 3, "parities": parities}
    outcome = launch(tmp_path / "job", size, plan)
    state = on_ranks(size, own_bytes, plan)
    stripe = -(-max(state) // (size - parities) // 8) * 8
    padded = stripe * (size - parities)
    for story in outcome.stories.values():
        assert story["sent"] == parities * padded
        assert story["kept"] == 2 * padded + parities * stripe


def own_bytes(plan):
    """The bytes of a rank's weights and two moments, each tensor in whole words."""
    model = shard(build(), "even")
    numels = [parameter.detach().to_local().numel() for parameter in model.parameters()]
    return sum(3 * (-(-4 * numel // 8) * 8) for numel in numels)


NUM_SEEDS = int(os.environ.get("SHOAL_DEATHS", "20"))
"""How many jobs die at random; each has several deaths."""


def random_plan(seed):
    """A job of 4 to 6 ranks, of which up to three die, in the order of steps."""
    draw = random.Random(seed)
    num_ranks = draw.randint(4, 6)
    doomed = draw.sample(range(num_ranks), draw.randint(1, 3))
    step, plan = 0, {"samples": draw.randint(6, 14)}
    for member in doomed:
        step += draw.randint(2, 4)  # the one before is made good by then
        plan[str(member)] = [[step, draw.choice(PHASES)]]
    plan["steps"] = step + draw.randint(2, 4)
    plan["layout"] = draw.choice(["even", "flat", "rows"])
    plan["optimizer"] = draw.choice(["adamw", "sgd"])
    return num_ranks, plan, doomed


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_ranks_die_at_random(seed, tmp_path):
    num_ranks, plan, doomed = random_plan(seed)
    outcome = launch(tmp_path / "job", num_ranks, plan)
    assert outcome.lost == doomed
    assert len(outcome.stories) == num_ranks - len(doomed)
    assert_bit_equal(outcome, tmp_path, num_ranks, plan)


@pytest.mark.soak
def test_ranks_ask_for_other_sizes(tmp_path):
    """4, 3, 2, 4: all in one run."""
    plan = {"steps": 60, "pause_s": 0.1, "resize": {"2": 2, "20": 4}, "limit_s": 110}
    outcome = launch(tmp_path / "job", 4, plan)
    assert [len(r["members"]) for r in outcome.recoveries] == [3, 2, 3, 4]
    assert_bit_equal(outcome, tmp_path, 4, plan)


@pytest.mark.parametrize("moment", ["deciding", "rebuilding"])
def test_with_two_parities_another_may_die_while_they_recover(moment, tmp_path):
    plan = {
        "steps": 5,
        "parities": 2,
        "optimizer": "sgd",
        "1": [[2, "reduction"]],
        "2": [[2, moment]],
    }
    outcome = launch(tmp_path / "job", 5, plan)
    assert outcome.lost == [1, 2]
    assert outcome.recoveries[-1]["members"] == [0, 3, 4]
    assert_bit_equal(outcome, tmp_path, 5, plan)
