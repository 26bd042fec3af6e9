"""Blocks that recompute their activations, wrapped before and after they are sharded.

torchrun --nproc-per-node 2 activation_checkpointing.py
"""

import functools

import torch
from tiny import Block, Results, Transformer, launch, read_state
from tiny_steps import train, wrapped_names
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

again = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)


def is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


def results(model: FSDP, device: torch.device) -> Results:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    losses = train(model, optimizer, device, num=3)
    with FSDP.summon_full_params(model):
        names = [name for name, _ in model.named_parameters()]
    return {
        "losses": losses,
        "wrapped": wrapped_names(model, FSDP),
        "names": names,
        "state": read_state(model),
    }


def main(device: torch.device) -> Results:
    found: Results = {}
    for use_orig_params in (False, True):
        wrap = functools.partial(
            FSDP,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=device,
            use_orig_params=use_orig_params,
        )
        torch.manual_seed(0)
        inside = wrap(Transformer())
        apply_activation_checkpointing(inside, checkpoint_wrapper_fn=again, check_fn=is_block)
        found[f"inside {use_orig_params}"] = results(inside, device)

        torch.manual_seed(0)
        model = Transformer()
        for index, layer in enumerate(model.layers):
            outer = again(layer) if index < 2 else offload_wrapper(layer)
            model.layers[index] = FSDP(outer, device_id=device, use_orig_params=use_orig_params)
        whole = FSDP(model, device_id=device, use_orig_params=use_orig_params)
        found[f"each {use_orig_params}"] = results(whole, device)
    return found


if __name__ == "__main__":
    launch(main)
