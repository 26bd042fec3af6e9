"""Say which layers to gather ahead, and gather by hand.

torchrun --nproc-per-node 2 explicit_prefetch.py
"""

import torch
from tiny import Results, Transformer, batches, launch, next_token_loss, read_state
from torch import nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle, fully_shard
from torch.distributed.tensor import DTensor

NUM_AHEAD = 2


def set_prefetch(layers: list[FSDPModule]) -> None:
    """Gather two layers ahead, in both directions."""
    for index, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 1 + NUM_AHEAD])
        before = layers[max(0, index - NUM_AHEAD) : index]
        layer.set_modules_to_backward_prefetch(before[::-1])


def num_gathered(module: nn.Module) -> int:
    """Parameters that are full at this moment."""
    return sum(not isinstance(parameter, DTensor) for parameter in module.parameters())


def main(device: torch.device) -> Results:
    model = Transformer(num_layers=5).to(device)
    layers = []
    for layer in model.layers:
        fully_shard(layer)
        assert isinstance(layer, FSDPModule)
        layers.append(layer)
    fully_shard(model)
    assert isinstance(model, FSDPModule)
    set_prefetch(layers)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, handles = [], []
    for tokens in batches(4, device):
        handle = model.unshard(async_op=True)  # its gather overlaps what comes before the forward
        assert isinstance(handle, UnshardHandle)
        handles.append(handle)
        loss = next_token_loss(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    counts = [num_gathered(model)]
    handle = layers[1].unshard(async_op=True)
    assert handle is not None
    handle.wait()
    counts.append(num_gathered(model))
    layers[2].unshard()
    counts.append(num_gathered(model))
    gathered = model.get_parameter("layers.2.out.weight").detach().double().norm().item()
    for layer in layers[1:3]:
        layer.reshard()
    counts.append(num_gathered(model))

    for layer in layers:
        layer.set_reshard_after_forward(False)
    with torch.no_grad():
        model(next(batches(1, device)))
    counts.append(num_gathered(model.layers))
    for layer in layers:
        layer.reshard()
    return {
        "losses": losses,
        "num_handles": len(handles),
        "num_gathered": counts,
        "gathered": gathered,
        "model": read_state(model),
    }


if __name__ == "__main__":
    launch(main)
