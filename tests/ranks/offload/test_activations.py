"""Activations on the host in a sharded model, with all else that goes there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import ranks
from oracle import Checkpoint, batches, build, full, loss_of, shard
from shoal.fsdp import CPUOffloadPolicy
from shoal.layout import Even, Flat, Layout
from shoal.offload import activations_to_host, step_in_backward


@ranks(2)
@pytest.mark.parametrize("layout", [Even(), Flat()], ids=repr)
@pytest.mark.parametrize("checkpoint", ["none", "inside", "outside"])
def test_everything_on_the_host_is_the_model_on_the_device(
    layout: Layout, checkpoint: Checkpoint
) -> None:
    models: list[Any] = [
        shard(build(checkpoint), layout=layout, offload_policy=policy)
        for policy in (CPUOffloadPolicy(pin_memory=False), None)
    ]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in models]
    host = activations_to_host(models[0].blocks, least_bytes=0)
    step_in_backward(models[0], optimizers[0])
    for _, part in batches(3, dist.get_rank(), 2):
        for model, optimizer in zip(models, optimizers, strict=True):
            loss_of(model, part).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert host.num_bytes == 0
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(full(p.detach()), full(q.detach()))
