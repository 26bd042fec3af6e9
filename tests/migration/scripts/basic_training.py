"""Shard every layer, then the model, and train as before.

torchrun --nproc-per-node 2 basic_training.py
"""

import torch
from tiny import Results, Transformer, batches, launch, next_token_loss, read_optimizer, read_state
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard


def main(device: torch.device) -> Results:
    model = Transformer().to(device)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert isinstance(model, Transformer)
    assert isinstance(model, FSDPModule)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.placements == (Shard(0),)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for tokens in batches(5, device):
        loss = next_token_loss(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    model.eval()
    with torch.no_grad():
        logits = model(next(batches(1, device)))
    return {
        "class": type(model).__name__,
        "losses": losses,
        "logits": logits.double().norm().item(),
        "model": read_state(model),
        "optimizer": read_optimizer(optimizer),
    }


if __name__ == "__main__":
    launch(main)
