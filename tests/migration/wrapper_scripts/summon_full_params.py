"""Whole parameters for a while: to initialise, to look at, to average, to correct.

torchrun --nproc-per-node 2 summon_full_params.py
"""

import torch
import torch.distributed as dist
from tiny import Block, Results, Transformer, batches, launch, next_token_loss, read_state, reading
from tiny_steps import train
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def initialise(module: nn.Module) -> None:
    """What depends on a weight's shape needs the whole weight."""
    if isinstance(module, nn.Linear):
        torch.manual_seed(module.in_features)
        nn.init.xavier_uniform_(module.weight)


def readings(model: FSDP) -> Results:
    return {
        name: {"value": reading(p), "grad": None if p.grad is None else reading(p.grad)}
        for name, p in model.named_parameters()
    }


def average(model: FSDP, optimizer: torch.optim.Optimizer, device: torch.device) -> Results:
    """An exponential average of the weights, which one rank keeps."""
    kept: dict[str, Tensor] = {}
    for _ in range(3):
        train(model, optimizer, device, num=1)
        with FSDP.summon_full_params(model, writeback=False, rank0_only=True):
            if dist.get_rank() == 0:
                for name, parameter in model.named_parameters():
                    before = kept.get(name, parameter.detach())
                    kept[name] = before.lerp(parameter.detach(), 0.5)
    return {name: reading(value) for name, value in kept.items()}


def run(device: torch.device, use_orig_params: bool) -> Results:
    torch.manual_seed(0)
    model = FSDP(
        Transformer(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=device,
        use_orig_params=use_orig_params,
    )
    model.apply(initialise)
    found: Results = {"initialised": read_state(model)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found["averaged"] = average(model, optimizer, device)
    next_token_loss(model, next(batches(1, device))).backward()
    with FSDP.summon_full_params(model, with_grads=use_orig_params):
        found["with_grads"] = readings(model)
        for parameter in model.parameters():
            parameter.data.clamp_(-0.1, 0.1)
    found["clamped"] = read_state(model)
    with FSDP.summon_full_params(model.layers[0], recurse=False, writeback=False):
        for parameter in model.layers[0].parameters():
            parameter.data.zero_()
    found["unchanged"] = read_state(model)
    found["losses"] = train(model, optimizer, device)
    return found


def main(device: torch.device) -> Results:
    return {f"orig {each}": run(device, each) for each in (False, True)}


if __name__ == "__main__":
    launch(main)
