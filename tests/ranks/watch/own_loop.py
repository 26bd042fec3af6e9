"""A training loop of one's own under torchrun, in which one rank does something else.

torchrun … own_loop.py FOLDER MANNER
"""

import os
import sys
from pathlib import Path

os.environ["GLOO_SOCKET_IFNAME"] = "lo"

import torch
import torch.distributed as dist
from torch import nn

from shoal import fully_shard
from shoal.watch import Watchdog

VICTIM = 1


class Model(nn.Module):
    """Three units of three sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.second = nn.Linear(64, 256)
        self.third = nn.Linear(256, 16)

    def forward(self, x: torch.Tensor, *, swapped: bool = False) -> torch.Tensor:
        if swapped:
            return self.first(self.third(x.repeat(1, 16)))
        return self.third(self.second(self.first(x)))


def main() -> None:
    folder, manner = Path(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model()
    for unit in (model.first, model.second, model.third):
        fully_shard(unit)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Watchdog(limit_s=60, folder=folder):
        for step in range(1, 7):
            differs = step == 3 and dist.get_rank() == VICTIM
            loss = model(torch.randn(4, 16), swapped=differs and manner == "order").sum()
            if not (differs and manner == "skipped") and not (
                step >= 3 and dist.get_rank() == VICTIM and manner == "forward-only"
            ):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
