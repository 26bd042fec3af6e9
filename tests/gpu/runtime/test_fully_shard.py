"""The engine on NCCL ranks that share one GPU, against its oracles."""

import pytest
import torch
import torch.distributed as dist

from harness import nccl_ranks
from oracle import (
    CHECKPOINTS,
    Checkpoint,
    batches,
    build,
    check_bitwise_equal_to_torch,
    check_training_equals_unsharded,
    loss_of,
    shard,
)
from shoal.runtime.events import EXPOSED, EventKind
from shoal.runtime.fully_shard import watch


@nccl_ranks(2, 4)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_training_equals_the_unsharded_model(checkpoint: Checkpoint) -> None:
    check_training_equals_unsharded("cuda", checkpoint)


@nccl_ranks(2)
@pytest.mark.parametrize("precise", [True, False])
def test_bitwise_equal_to_torch(precise: bool) -> None:
    check_bitwise_equal_to_torch("cuda", precise)


@nccl_ranks(2)
def test_freed_units_hold_no_memory() -> None:
    model = shard(build(device="cuda"))
    ((_, part),) = batches(1, dist.get_rank(), 2, "cuda")
    loss_of(model, part).backward()
    model.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        loss_of(model, part).backward()
        model.zero_grad()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


@nccl_ranks(2)
def test_events_are_timed_on_the_stream() -> None:
    model = shard(build(device="cuda"))
    ((_, part),) = batches(1, dist.get_rank(), 2, "cuda")
    with watch(model) as recorder:
        loss_of(model, part).backward()
    events = recorder.events()
    assert {event.kind for event in events} == set(EventKind) - {EventKind.OPTIMIZER}
    assert all(event.duration_us >= 0 for event in events)
    assert any(event.kind in EXPOSED for event in events)
