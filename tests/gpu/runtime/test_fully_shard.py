"""What a user sees of the engine on NCCL ranks that share one GPU."""

from typing import Any

import torch
import torch.distributed as dist

from harness import nccl_ranks
from oracle import batches, build, loss_of, shard
from shoal.fsdp import full_parameters
from shoal.runtime.observe import watch
from shoal.runtime.recorder import EXPOSED


@nccl_ranks(2)
def test_actions_are_timed_on_the_stream() -> None:
    model = shard(build(device="cuda"))
    ((_, part),) = batches(1, dist.get_rank(), 2, "cuda")
    with watch(model) as recorder:
        loss_of(model, part).backward()
    actions = recorder.actions()
    kinds = {"gather", "wait", "forward", "backward", "take", "free", "reduce", "finish", "place"}
    assert kinds <= {action.kind for action in actions}
    assert all(action.duration_us >= 0 for action in actions)
    assert any(action.kind in EXPOSED for action in actions)


@nccl_ranks(2)
def test_a_model_made_on_the_host_is_sharded_on_the_gpu() -> None:
    model = shard(build(device="cpu"))
    assert {p.device.type for p in model.parameters()} == {"cuda"}
    ((_, part),) = batches(1, dist.get_rank(), 2, "cpu")
    expected = loss_of(build(device="cuda"), part.cuda())
    torch.testing.assert_close(loss_of(model, part.cuda()), expected)


@nccl_ranks(2)
def test_full_parameters_for_a_while() -> None:
    plain, model = build(device="cuda"), shard(build(device="cuda"))
    with full_parameters(model):
        for (name, p), (_, q) in zip(
            plain.named_parameters(), model.named_parameters(), strict=True
        ):
            assert torch.equal(p, q), name
    ((_, part),) = batches(1, dist.get_rank(), 2, "cuda")
    with torch.no_grad():
        torch.testing.assert_close(loss_of(model, part), loss_of(plain, part))


@nccl_ranks(2)
def test_a_handle_orders_the_stream_that_waits_for_it() -> None:
    plain: Any = build(device="cuda")
    model: Any = shard(build(device="cuda"))
    block, reader = model.blocks[0], torch.cuda.Stream()
    handle = block.unshard(async_op=True)
    with torch.cuda.stream(reader):
        handle.wait()
        copied = block.up.weight.clone()
    torch.cuda.current_stream().wait_stream(reader)
    assert torch.equal(copied, plain.blocks[0].up.weight)
    block.reshard()
