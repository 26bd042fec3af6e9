"""Modules that the wrapper leaves alone, and parameters that do not train.

torchrun --nproc-per-node 2 ignored_and_frozen.py
"""

import torch
import torch.distributed as dist
from tiny import Block, Results, Transformer, batches, launch, next_token_loss, read_state
from torch import nn
from torch.distributed.fsdp import FlatParameter, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def build(device: torch.device, use_orig_params: bool, by_states: bool) -> FSDP:
    torch.manual_seed(0)
    model = Transformer()
    model.embedding.to(device)  # nobody moves what is ignored
    for parameter in model.layers[0].parameters():
        parameter.requires_grad_(False)
    if use_orig_params:
        model.layers[1].get_submodule("out").get_parameter("bias").requires_grad_(False)
    ignored = (
        {"ignored_states": list(model.embedding.parameters())}
        if by_states
        else {"ignored_modules": [model.embedding]}
    )
    return FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        device_id=device,
        use_orig_params=use_orig_params,
        sync_module_states=device.type != "cpu",  # torch synchronises on accelerators
        **ignored,
    )


def train(model: FSDP, device: torch.device) -> list[float]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    losses = []
    for tokens in batches(3, device):
        loss = next_token_loss(model, tokens)
        loss.backward()
        # Nobody reduces the gradients of what is ignored.
        ignored = model.module.embedding.weight
        assert isinstance(ignored, nn.Parameter)
        assert ignored.grad is not None
        dist.all_reduce(ignored.grad)
        ignored.grad.div_(dist.get_world_size())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(device: torch.device) -> Results:
    found: Results = {}
    for use_orig_params in (False, True):
        for by_states in (False, True):
            model = build(device, use_orig_params, by_states)
            found[f"orig {use_orig_params}, states {by_states}"] = {
                "flat": sum(isinstance(p, FlatParameter) for p in model.parameters()),
                "names": [name for name, _ in model.named_parameters()],
                "trained": sum(p.requires_grad for p in model.parameters()),
                "losses": train(model, device),
                "state": read_state(model),
            }
    return found


if __name__ == "__main__":
    launch(main)
