"""What a pool's ranks are given before their first test: a backend, a device, an environment."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How the ranks of a pool reach each other, and where their tensors live."""

    backend: str
    """As `torch.distributed.init_process_group` takes it."""
    device: str
    """The device all ranks share: `cpu`, or one GPU with its index."""

    def __post_init__(self) -> None:
        device = torch.device(self.device)
        if device.type not in ("cpu", "cuda") or (device.type == "cuda" and device.index is None):
            raise ValueError(
                f"expected 'cpu', or a GPU with its index as in 'cuda:0', got {device}"
            )

    @property
    def uses_cuda(self) -> bool:
        """Whether ranks share a GPU."""
        return torch.device(self.device).type == "cuda"

    def environment(self, rank: int, world_size: int) -> dict[str, str]:
        """Say what a launcher would say, and keep every byte on the loopback interface."""
        variables = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "GLOO_SOCKET_IFNAME": "lo"}
        if not self.uses_cuda:
            return variables | {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
        # NCCL refuses two ranks on one GPU of one host, so each rank is alone on its own host.
        return variables | {
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "NCCL_HOSTID": f"shoal-rank-{rank}",
            "NCCL_SOCKET_IFNAME": "lo",
        }


GLOO = Setup(backend="gloo", device="cpu")
NCCL = Setup(backend="cpu:gloo,cuda:nccl", device="cuda:0")
