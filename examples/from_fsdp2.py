"""From FSDP2: the script stays as it is, the import changes.

    torchrun --nproc-per-node 2 examples/from_fsdp2.py

`shoal.fsdp` has the names of `torch.distributed.fsdp`'s `fully_shard`, with the same arguments.
Losses, gradients and state dicts are those of torch's engine, bit by bit.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from start import Model, batch, join_ranks
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from shoal.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard  # was: torch.distributed.fsdp

MICRO_BATCHES = 2


def main() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train for some steps; return this rank's losses, and the weights, whole on rank 0."""
    torch.manual_seed(0)
    model = Model()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)

    losses = []
    for step in range(6):
        for micro in range(MICRO_BATCHES):
            model.set_requires_gradient_sync(micro == MICRO_BATCHES - 1)
            x, y = batch(step * MICRO_BATCHES + micro)
            loss = F.cross_entropy(model(x).float(), y) / MICRO_BATCHES
            loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {len(weights)} tensors to save")
    return losses, weights


if __name__ == "__main__":
    join_ranks()
    main()
    dist.destroy_process_group()
