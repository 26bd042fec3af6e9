"""Shard inside a node, replicate between nodes: a mesh of two axes.

torchrun --nproc-per-node 4 hybrid_sharding.py
"""

import torch
from tiny import Results, Transformer, batches, launch, next_token_loss, read_gradients, read_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard


def main(device: torch.device) -> Results:
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Transformer(num_layers=4).to(device)
    for index, layer in enumerate(model.layers):
        # The last layer's backward follows its forward at once: keep it gathered.
        last = index == len(model.layers) - 1
        fully_shard(layer, mesh=mesh, reshard_after_forward=not last)
    fully_shard(model, mesh=mesh)
    assert isinstance(model, FSDPModule)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    losses = []
    for tokens in batches(3, device):
        loss = next_token_loss(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    # Between two backwards only the shard axis reduces; the second one does both.
    first, second = batches(2, device)
    model.set_requires_all_reduce(False)
    next_token_loss(model, first).backward()
    model.set_requires_all_reduce(True)
    next_token_loss(model, second).backward()
    return {
        "axes": [str(name) for name in mesh.mesh_dim_names or ()],
        "losses": losses,
        "gradients": read_gradients(model),
        "model": read_state(model),
    }


if __name__ == "__main__":
    launch(main)
