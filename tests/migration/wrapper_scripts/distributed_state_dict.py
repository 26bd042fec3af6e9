"""State dicts by torch's functions for all kinds of parallelism, with and without an optimizer.

torchrun --nproc-per-node 2 distributed_state_dict.py
"""

import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tiny import Block, Results, Transformer, launch, read_state, reading
from tiny_steps import offloads, read_named_states, train
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import AdamW, Optimizer

SPREAD = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def build(device: torch.device, seed: int, **options: Any) -> tuple[FSDP, Optimizer]:
    torch.manual_seed(seed)
    policy = ModuleWrapPolicy({Block})
    model = FSDP(Transformer(num_layers=2), auto_wrap_policy=policy, device_id=device, **options)
    return model, AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def run(device: torch.device, path: str, **options: Any) -> Results:
    model, optimizer = build(device, 0, **options)
    losses = train(model, optimizer, device)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=path)

    other, other_optimizer = build(device, 1, **options)
    weights, states = get_state_dict(other, other_optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=path)
    set_state_dict(other, other_optimizer, model_state_dict=weights, optim_state_dict=states)

    whole = StateDictOptions(full_state_dict=True, cpu_offload=offloads(device))
    weights = get_model_state_dict(other, options=whole)
    states = get_optimizer_state_dict(other, other_optimizer, options=whole)
    third, third_optimizer = build(device, 2, **options)
    set_model_state_dict(third, weights, options=SPREAD)
    set_optimizer_state_dict(third, third_optimizer, states, options=SPREAD)
    found = {
        "losses": losses,
        "weights": {name: reading(value) for name, value in weights.items()},
        "states": read_named_states(states) if states else None,
        "third": read_state(third),
    }
    trios = (model, optimizer), (other, other_optimizer), (third, third_optimizer)
    continued = [train(each, o, device) for each, o in trios]
    for again in continued[1:]:
        torch.testing.assert_close(again, continued[0])
    return found | {"continued": continued}


def main(device: torch.device) -> Results:
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    found = {
        "group": run(device, f"{folder[0]}/group", use_orig_params=True),
        "flat": run(device, f"{folder[0]}/flat"),
        "mesh": run(device, f"{folder[0]}/mesh", use_orig_params=True, device_mesh=mesh),
    }
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return found


if __name__ == "__main__":
    launch(main)
