"""Everything in one file that rank 0 writes, and training on from it; old names and new.

torchrun --nproc-per-node 2 full_state_dicts.py
"""

import copy
import io
from typing import Any

import torch
import torch.distributed as dist
from tiny import Block, Results, Transformer, launch, read_state, reading
from tiny_steps import offloads, read_groups, read_named_states, train
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateKeyType,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import AdamW, Optimizer


def build(device: torch.device, seed: int, use_orig_params: bool) -> tuple[FSDP, Optimizer]:
    torch.manual_seed(seed)
    model = FSDP(
        Transformer(num_layers=2),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=device,
        use_orig_params=use_orig_params,
    )
    return model, AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def saved(model: FSDP, optimizer: Optimizer, device: torch.device) -> dict[str, Any]:
    """Both state dicts on rank 0, on the host; nothing elsewhere."""
    to_host = offloads(device)
    FSDP.set_state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=to_host, rank0_only=True),
        FullOptimStateDictConfig(offload_to_cpu=to_host, rank0_only=True),
    )
    settings = FSDP.get_state_dict_type(model)
    assert settings.state_dict_type is StateDictType.FULL_STATE_DICT
    return {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}


def through_a_file(found: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(found, file)
    file.seek(0)
    everything = [torch.load(file)]
    dist.broadcast_object_list(everything)
    return everything[0]


def by_old_names(model: FSDP, optimizer: Optimizer, device: torch.device) -> Results:
    whole = FSDP.full_optim_state_dict(model, optimizer)
    other, other_optimizer = build(device, 0, use_orig_params=False)
    mine = FSDP.scatter_full_optim_state_dict(
        whole if dist.get_rank() == 0 else None, other, optim=other_optimizer
    )
    other_optimizer.load_state_dict(mine)
    everyone = FSDP.full_optim_state_dict(other, other_optimizer, rank0_only=False)
    cut = FSDP.shard_full_optim_state_dict(everyone, other, optim=other_optimizer)
    other_optimizer.load_state_dict(cut)
    everyone = FSDP.full_optim_state_dict(other, other_optimizer, rank0_only=False)
    plain = Transformer(num_layers=2)
    numbered = FSDP.rekey_optim_state_dict(everyone, OptimStateKeyType.PARAM_ID, plain)
    AdamW(plain.parameters()).load_state_dict(numbered)
    return {
        "whole": sorted(whole.get("state", {})),
        "states": read_named_states(everyone),
        "numbered": sorted(numbered["state"]),
    }


def main(device: torch.device) -> Results:
    model, optimizer = build(device, 0, use_orig_params=False)
    losses = train(model, optimizer, device)
    found = saved(model, optimizer, device)
    on_this_rank = {part: len(found[part].get("state", found[part])) for part in found}
    loaded = through_a_file(found)

    other, other_optimizer = build(device, 1, use_orig_params=False)
    with FSDP.state_dict_type(other, StateDictType.FULL_STATE_DICT):
        other.load_state_dict(loaded["model"])
        states = FSDP.optim_state_dict_to_load(other, other_optimizer, loaded["optimizer"])
        other_optimizer.load_state_dict(copy.deepcopy(states))
    pairs = (model, optimizer), (other, other_optimizer)
    continued = [train(each, its_optimizer, device) for each, its_optimizer in pairs]
    torch.testing.assert_close(continued[0], continued[1])

    # Models that hold their parameters in another way take the same file.
    third, _ = build(device, 2, use_orig_params=True)
    third.load_state_dict(loaded["model"])
    plain = Transformer(num_layers=2)
    plain.load_state_dict(loaded["model"])
    return {
        "losses": losses,
        "on_this_rank": on_this_rank,
        "model": {name: reading(value) for name, value in loaded["model"].items()},
        "optimizer": read_named_states(loaded["optimizer"]),
        "groups": read_groups(loaded["optimizer"]),
        "continued": continued,
        "other": read_state(other),
        "third": read_state(third),
        "old_names": by_old_names(model, optimizer, device),
    }


if __name__ == "__main__":
    launch(main)
