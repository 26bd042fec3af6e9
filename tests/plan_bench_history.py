"""The history of memory in `shoal bench`, on an imagined device: built, sharded, stepped."""

from __future__ import annotations

import gc

import torch
from torch.distributed.device_mesh import init_device_mesh

from shoal.bench.cases import Case
from shoal.bench.model import BenchTransformer
from shoal.layout import Flat
from shoal.optim import AdamW
from shoal.plan.device import NotingDevice
from shoal.plan.group import imagined_world
from shoal.plan.memory import MemoryForecast, play
from shoal.plan.notes import Moment
from shoal.runtime.fully_shard import fully_shard
from shoal.runtime.policy import MixedPrecisionPolicy


def memory_of(case: Case, engine: str) -> tuple[MemoryForecast, MemoryForecast]:
    """The peaks of forward+backward, and of whole training steps, as `shoal bench` takes them."""
    device = NotingDevice(swaps_memory=False)  # the results are of torch 2.11
    with imagined_world(device, case.world_size), device.running():
        with torch.device("meta"):
            model = BenchTransformer(case.shape)
            tokens = torch.empty(case.batch_size, case.seq_len + 1, dtype=torch.long)
        _wrap(model, case, engine)
        adamw = torch.optim.AdamW if engine == "plain" else AdamW
        optimizer = adamw(model.parameters(), lr=0.0, fused=True)
        inputs = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        del tokens
        gc.collect()
        device.empty_cache()
        for moment, num_steps, trains in (
            ("warm-up", 3, False),
            ("memory", 2, False),
            ("first", 1, True),
            ("training", 2, True),
            ("end", 0, False),
        ):
            device.moment(moment)
            losses: list[torch.Tensor] = []
            for _ in range(num_steps):
                loss = model(*inputs)
                loss.backward()
                loss = loss.detach()
                if trains:
                    optimizer.step()
                losses.append(loss.clone())
                optimizer.zero_grad(set_to_none=True)
    at = {note.name: place for place, note in enumerate(device.notes) if type(note) is Moment}
    return (
        play(device.notes, device.purposes, begin=at["memory"], end=at["first"]),
        play(device.notes, device.purposes, begin=at["training"], end=at["end"]),
    )


def _wrap(model: BenchTransformer, case: Case, engine: str) -> None:
    if engine == "plain":
        model.to(torch.bfloat16)
        return
    mesh = init_device_mesh("cpu", (case.world_size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layout = Flat() if engine == "shoal-flat" else None
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True, layout=layout)
    fully_shard(model, mesh=mesh, mp_policy=policy, layout=layout)
