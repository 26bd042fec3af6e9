"""Sharded state dicts of a model and its optimizer, in a checkpoint of many files.

torchrun --nproc-per-node 2 sharded_checkpoint.py
"""

import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tiny import Block, Results, Transformer, launch, read_state, reading
from tiny_steps import offloads, read_named_states, train
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import AdamW, Optimizer


def build(device: torch.device, seed: int, **options: Any) -> tuple[FSDP, Optimizer]:
    torch.manual_seed(seed)
    policy = ModuleWrapPolicy({Block})
    model = FSDP(Transformer(num_layers=2), auto_wrap_policy=policy, device_id=device, **options)
    return model, AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def chosen(model: FSDP, device: torch.device) -> Any:
    return FSDP.state_dict_type(
        model,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu=offloads(device)),
        ShardedOptimStateDictConfig(offload_to_cpu=offloads(device)),
    )


def kinds(state_dict: dict[str, Any]) -> Results:
    return {
        name: f"{type(value).__name__} {tuple(value.shape)}" for name, value in state_dict.items()
    }


def save(model: FSDP, optimizer: Optimizer, path: str, device: torch.device) -> Results:
    with chosen(model, device):
        weights = model.state_dict()
        states = FSDP.optim_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=path)
    return kinds(weights)


def load(model: FSDP, optimizer: Optimizer, path: str, device: torch.device) -> None:
    """The old way, which needs no optimizer state to load into, where there is no mesh."""
    with chosen(model, device):
        holder = {"model": model.state_dict()}
        dcp.load(holder, checkpoint_id=path)
        model.load_state_dict(holder["model"])
        read = load_sharded_optimizer_state_dict(
            model_state_dict=holder["model"],
            optimizer_key="optimizer",
            storage_reader=dcp.FileSystemReader(path),
        )
        states = FSDP.optim_state_dict_to_load(model, optimizer, read["optimizer"])
        optimizer.load_state_dict(states)


def run(device: torch.device, path: str, **options: Any) -> Results:
    model, optimizer = build(device, 0, **options)
    losses = train(model, optimizer, device)
    found = save(model, optimizer, path, device)
    other, other_optimizer = build(device, 1, **options)
    load(other, other_optimizer, path, device)
    whole = FullOptimStateDictConfig(offload_to_cpu=offloads(device))
    FSDP.set_state_dict_type(other, StateDictType.FULL_STATE_DICT, optim_state_dict_config=whole)
    states = FSDP.optim_state_dict(other, other_optimizer)
    state = {name: reading(value) for name, value in other.state_dict().items()}
    continued = [
        train(each, o, device) for each, o in ((model, optimizer), (other, other_optimizer))
    ]
    torch.testing.assert_close(continued[0], continued[1])
    return {
        "losses": losses,
        "kinds": found,
        "state": state,
        "states": read_named_states(states),
        "continued": continued,
        "after": read_state(other),
    }


def main(device: torch.device) -> Results:
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    found = {}
    for use_orig_params in (False, True):
        path = f"{folder[0]}/{use_orig_params}"
        found[f"group {use_orig_params}"] = run(device, path, use_orig_params=use_orig_params)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model, optimizer = build(device, 0, device_mesh=mesh, use_orig_params=True)
    train(model, optimizer, device)
    found["mesh"] = {"kinds": save(model, optimizer, f"{folder[0]}/mesh", device)}
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return found


if __name__ == "__main__":
    launch(main)
