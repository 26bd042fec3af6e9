"""Split matrices over one axis of the mesh, and shard what is left over the other.

torchrun --nproc-per-node 4 tensor_parallel.py
"""

import torch
from tiny import Results, launch, read_gradients, read_optimizer, read_state
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

DIM = 8


class FeedForward(nn.Module):
    """A gated block: two matrices up, one down."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, 2 * DIM, bias=False)
        self.up = nn.Linear(DIM, 2 * DIM, bias=False)
        self.down = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def main(device: torch.device) -> Results:
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(*(FeedForward() for _ in range(3))).to(device)
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model:
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])

    # Ranks of one tensor-parallel group see the same batch.
    generator = torch.Generator().manual_seed(mesh.get_local_rank("dp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms, gradients = [], [], {}
    for _ in range(4):
        x = torch.randn(4, DIM, generator=generator).to(device)
        first = model[0]
        assert isinstance(first, FSDPModule)
        handle = first.unshard(async_op=True)
        target = x.roll(1, dims=1)  # computed while the first block is gathered
        assert handle is not None
        handle.wait()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
        assert isinstance(norm, DTensor)
        norms.append(norm.full_tensor().item())
        gradients = read_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {
        "losses": losses,
        "norms": norms,
        "gradients": gradients,
        "model": read_state(model),
        "optimizer": read_optimizer(optimizer),
    }


if __name__ == "__main__":
    launch(main)
