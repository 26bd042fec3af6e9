"""Your own layout: say which rank holds which elements, and let shoal do the rest.

    torchrun --nproc-per-node 2 examples/own_layout.py

A layout answers one question: how the parameters of a unit are packed over a number of ranks.
This one keeps all parameters of a submodule on one rank, so that an optimizer can treat them
together. Gathers, reductions, checkpoints and resharding work with it as with any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from start import Model, batch, join_ranks
from torch.nn import functional as F

from shoal import fully_shard
from shoal.layout import Layout, ParamSpec
from shoal.layout.spec import round_up
from shoal.layout.whole import WholePacking


@dataclass(frozen=True, slots=True)
class BySubmodule(Layout):
    """All parameters of a submodule on one rank; the submodules take turns."""

    def pack(self, params: Sequence[ParamSpec], world_size: int) -> WholePacking:
        """Place every parameter; the same on every rank, with no communication."""
        submodules = list(dict.fromkeys(p.name.rpartition(".")[0] for p in params))
        owners, offsets, ends = [], [], [0] * world_size
        for param in params:
            owner = submodules.index(param.name.rpartition(".")[0]) % world_size
            start = round_up(ends[owner], param.align_bytes)
            ends[owner] = start + param.nbytes
            owners.append(owner)
            offsets.append(start)
        return WholePacking(
            params=tuple(params),
            world_size=world_size,
            shard_bytes=round_up(max(ends), max(p.align_bytes for p in params)),
            owners=tuple(owners),
            offsets_bytes=tuple(offsets),
        )


def main(layout: Layout | None = None) -> tuple[list[float], dict[str, int]]:
    """Train; return this rank's losses, and the number of elements it holds of each parameter."""
    torch.manual_seed(0)
    model = Model()
    layout = layout or BySubmodule()
    for block in model.blocks:
        fully_shard(block, layout=layout)
    fully_shard(model, layout=layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    losses = []
    for step in range(6):
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    held = {name: p.local.numel() for name, p in model.named_parameters()}
    names = sorted({name.rpartition(".")[0] for name, numel in held.items() if numel})
    print(f"rank {dist.get_rank()} holds {', '.join(names)}")
    return losses, held


if __name__ == "__main__":
    join_ranks()
    main()
    dist.destroy_process_group()
