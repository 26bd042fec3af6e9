"""Ranks die at every moment; the others go on bit for bit like a run resized from a checkpoint."""

import json
import os
import random
import shutil

import pytest
import torch
import torch.distributed as dist

from harness import on_ranks
from shoal.checkpoint import load_training, save_training
from shoal.survive.launcher import run_job
from shoal.survive.shares import share_in
from survival.jobs import launch, starter
from survival.program import (
    Batches,
    build,
    optimizer_of,
    scheduler_of,
    shard,
    train_step,
    whole_state,
)


def one_stretch(folder, first, last, plan):
    """Steps on the ranks of the pool, from a checkpoint and to another; no survive in it."""
    model = shard(build(), plan.get("layout", "even"))
    optimizer = optimizer_of(model, plan.get("optimizer", "adamw"))
    scheduler = scheduler_of(optimizer)
    if first:
        extra = load_training(folder / f"step-{first}", model, optimizer)
        scheduler.load_state_dict(extra["scheduler"])
    batches = Batches(plan["steps"], plan.get("samples", 12))
    losses = {}
    for step in range(first, last):
        share, weight = share_in(batches[step], dist.get_rank(), dist.get_world_size())
        losses[step] = train_step(model, optimizer, scheduler, share, weight).hex()
    if last < plan["steps"]:
        extra = {"scheduler": scheduler.state_dict()}
        save_training(folder / f"step-{last}", model, optimizer, extra)
        return losses, {}
    return losses, whole_state(model, optimizer)


def uninterrupted(folder, num_ranks, recoveries, plan):
    """The truth: a run without survive, resized at the same steps by saving and loading."""
    stretches = [(0, num_ranks)] + [(r["version"], len(r["members"])) for r in recoveries]
    losses, state = {}, {}
    ends = [start for start, _ in stretches[1:]] + [plan["steps"]]
    for (first, size), last in zip(stretches, ends, strict=True):
        if first == last:  # somebody died again before a step was done
            continue
        found = on_ranks(size, one_stretch, folder, first, last, plan)
        for step in range(first, last):
            losses[step] = [by_step[step] for by_step, _ in found]
        state = found[0][1]
    return losses, state


def assert_bit_equal(outcome, folder, num_ranks, plan):
    losses, state = uninterrupted(folder, num_ranks, outcome.recoveries, plan)
    assert outcome.losses.keys() == losses.keys()
    for step, by_rank in outcome.losses.items():
        assert {rank: losses[step][rank] for rank in by_rank} == by_rank, step
    assert len(outcome.losses[plan["steps"] - 1]) == len(losses[plan["steps"] - 1])
    assert outcome.state
    assert outcome.state.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(outcome.state[name], value), name


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
    """Four ranks become one; shares of 13 samples are not equal; state of Flat shards moves."""
    plan = {
        "steps": 9,
        "samples": 13,
        "layout": "flat",
        "0": [[1, "optimizer"]],
        "3": [[3, "backward"]],
        "1": [[6, "parity"]],
    }
    outcome = launch(tmp_path / "job", 4, plan)
    assert outcome.lost == [0, 3, 1]
    assert [r["members"] for r in outcome.recoveries] == [[1, 2, 3], [1, 2], [2]]
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


def test_it_is_noticed_at_once_though_other_processes_hold_the_sockets(tmp_path):
    """Children of the dead rank, such as workers of a DataLoader, keep its connections open."""
    plan = {"steps": 5, "fork_at": 1, "1": [[3, "reduction"]]}
    outcome = launch(tmp_path / "job", 4, plan)
    died_at = float((tmp_path / "job" / "deaths.txt").read_text())
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
