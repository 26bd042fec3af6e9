"""What a training whose ranks died is compared with: one that was resized by saving and loading."""

import torch
import torch.distributed as dist

from harness import GLOO, NCCL, on_ranks
from shoal.checkpoint import load_training, save_training
from shoal.survive.shares import share_in
from survival.program import (
    DEATHS,
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
    device = plan.get("device", "cpu")
    model = shard(build(device), plan.get("layout", "even"))
    optimizer = optimizer_of(model, plan.get("optimizer", "adamw"))
    scheduler = scheduler_of(optimizer)
    if first:
        extra = load_training(folder / f"step-{first}", model, optimizer)
        scheduler.load_state_dict(extra["scheduler"])
    batches = Batches(plan["steps"], plan.get("samples", 12), device)
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
        setup = GLOO if plan.get("device", "cpu") == "cpu" else NCCL
        found = on_ranks(size, one_stretch, folder, first, last, plan, setup=setup)
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
        assert torch.equal(outcome.state[name], value.cpu()), name


def deaths_in(folder):
    """Who died when, as (time, member)."""
    lines = (folder / DEATHS).read_text().splitlines()
    return [(float(at), int(member)) for at, member in map(str.split, lines)]
