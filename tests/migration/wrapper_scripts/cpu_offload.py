"""Parameters, gradients and optimizer state on the host of an accelerator.

torchrun --nproc-per-node 2 cpu_offload.py
"""

import torch
from tiny import Block, Results, Transformer, batches, launch, next_token_loss, read_state
from tiny_steps import offloads, read_named_states
from torch.distributed.fsdp import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def main(device: torch.device) -> Results:
    torch.manual_seed(0)
    model = FSDP(
        Transformer(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        cpu_offload=CPUOffload(offload_params=offloads(device)),
        device_id=device,
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    losses, norms, devices = [], [], set()
    for tokens in batches(4, device):
        loss = next_token_loss(model, tokens)
        loss.backward()
        devices |= {str(p.grad.device) for p in model.parameters() if p.grad is not None}
        norms.append(model.clip_grad_norm_(1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    config = FullStateDictConfig(offload_to_cpu=offloads(device), rank0_only=False)
    optim_config = FullOptimStateDictConfig(offload_to_cpu=offloads(device), rank0_only=False)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config, optim_config):
        state = read_state(model)
        states = FSDP.optim_state_dict(model, optimizer)
    return {
        "losses": losses,
        "norms": norms,
        "devices": sorted(devices),
        "parameters": sorted({str(p.device) for p in model.parameters()}),
        "state": state,
        "states": read_named_states(states),
    }


if __name__ == "__main__":
    launch(main)
