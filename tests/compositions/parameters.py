"""Rows of the table: parameters of odd kinds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from compositions.feature import Feature
from compositions.net import DIM, Block, Net
from compositions.ways import Way
from wrapped import Plainly


class Tied(Feature):
    """Two layers of each block share a weight."""

    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.again = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
            self.again.weight = self.mix.weight

        def before(self, x: Tensor) -> Tensor:
            return self.again(torch.tanh(self.mix(x)))


class TiedAcross(Feature):
    """Layers of two units share a weight; one of them is a unit of its own."""

    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(DIM, DIM)

        def before(self, x: Tensor) -> Tensor:
            return torch.tanh(self.mix(x))

    def change(self, net: Net) -> None:
        net.blocks["1"].mix.weight = net.blocks["0"].mix.weight


class Strided(Feature):
    """A transposed matrix, and a filter with its channels last."""

    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.turned = nn.Parameter((torch.randn(7, DIM) / 3).t())
            self.filter = nn.Conv2d(1, 7, 3, padding=1).to(memory_format=torch.channels_last)

        def before(self, x: Tensor) -> Tensor:
            seen = self.filter(x.view(len(x), 1, 2, 4)).mean((2, 3))
            return x + torch.tanh(x @ self.turned + seen) @ self.turned.t()


class Complex(Feature):
    """A matrix of complex numbers beside real ones."""

    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.randn(DIM, DIM, dtype=torch.complex64) / 3)

        def before(self, x: Tensor) -> Tensor:
            return (x.to(torch.complex64) @ self.turn).abs()


class UnevenDims(Feature):
    """Cut along the last dim, which no number of ranks divides."""

    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.into = nn.Parameter(torch.randn(DIM, 7) / 3)
            self.folded = nn.Parameter(torch.randn(3, 7, 5) / 3)
            self.out = nn.Parameter(torch.randn(5, DIM) / 3)

        def before(self, x: Tensor) -> Tensor:
            mixed = torch.einsum("bi,kij->bj", x @ self.into, self.folded)
            return x + torch.tanh(mixed) @ self.out

    def options(self, way: Way) -> dict[str, Any]:
        return {"layout": None, "shard_placement_fn": lambda p: Shard(p.ndim - 1)}


class Numbers(Feature):
    """A scale and a temperature."""

    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.7))
            self.temperature = nn.Parameter(torch.tensor(1.3))

        def before(self, x: Tensor) -> Tensor:
            return self.scale * torch.tanh(x * self.temperature) * self.temperature


class Sparse(Feature):
    """An embedding whose gradient has the rows that were looked up."""

    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, DIM, sparse=True)

        def before(self, x: Tensor) -> Tensor:
            # By what is in the rows, so that it does not matter which rank has them.
            return x + self.table((x[:, 0] > 0).long())

    def optimizer(self, way: Way, parameters: Iterable[nn.Parameter]) -> Any:
        return torch.optim.SGD(parameters, lr=0.1)


class SeveralDtypes(Feature):
    """Parameters in half and in double precision beside others."""

    tolerance = {"rtol": 2e-2, "atol": 3e-4}

    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.coarse = nn.Parameter((torch.randn(DIM, DIM) / 3).bfloat16())
            self.fine = nn.Parameter(torch.randn(DIM, dtype=torch.float64))

        def before(self, x: Tensor) -> Tensor:
            return (x.double() * self.fine).to(x.dtype) + (x.bfloat16() @ self.coarse).to(x.dtype)


class Heard(Plainly):
    """Counts its gathers."""

    num_gathers = 0

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        Heard.num_gathers += 1
        return super().fsdp_pre_all_gather(mesh)


class GatherHooks(Feature):
    """Weights that say themselves how they are gathered."""

    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(DIM, DIM)

        def before(self, x: Tensor) -> Tensor:
            return torch.tanh(self.mix(x))

    def change_sharded(self, net: Net) -> None:
        for name, block in net.blocks.items():
            if name != "mixture":
                block.mix.weight = nn.Parameter(Heard(block.mix.weight.detach()))

    def step(self, way: Way, number: int) -> None:
        before = Heard.num_gathers
        super().step(way, number)
        assert (Heard.num_gathers > before) == way.is_sharded


class CutLayers(Feature):
    """Layers that tensor parallelism has cut: DTensors on an axis of their own."""

    cuts_layers = True
    needs_units = True

    def world_of(self, column: str) -> int:
        return 2 if column == "checkpoint" else 4


class WithExperts(Feature):
    """Experts, dealt to two ranks."""

    has_experts = True
    needs_units = True

    def world_of(self, column: str) -> int:
        return 4 if column in ("HSDP", "TP", "PP") else 2


ROWS: dict[str, list[Feature]] = {
    "tied parameters in one unit": [Tied()],
    "tied parameters across units": [TiedAcross()],
    "non-contiguous parameters": [Strided()],
    "complex parameters": [Complex()],
    "uneven shards along any dim": [UnevenDims()],
    "0-d parameters": [Numbers()],
    "sparse gradients": [Sparse()],
    "several dtypes in one unit": [SeveralDtypes()],
    "tensors with gather hooks": [GatherHooks()],
    "DTensor parameters": [CutLayers()],
    "experts": [WithExperts()],
}
