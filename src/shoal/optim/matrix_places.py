"""Where matrices lie on ranks, and which rank computes which: each is whole on one of them.

A *cut* is a matrix on a group of ranks: every rank's rectangles, and which ranks together have it
once. Replicas (HSDP, or axes of a mesh that replicate) are ranks of the group too, so that they
share the work instead of doing it twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from shoal._torch import distributed_tensor, meshes
from shoal.errors import UsageError
from shoal.layout.region import Region
from shoal.tensor.packed import Packed
from shoal.tensor.sharded import ShardedTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixCut:
    """A matrix on the ranks of a group."""

    shape: tuple[int, ...]
    group: ProcessGroup
    regions_of: Callable[[int], tuple[Region, ...]]
    """The rectangles that a rank of the group has."""
    copy_of: Callable[[int], object]
    """Which copy a rank has a part of: the ranks with one answer have the matrix once."""

    def numel_on(self, rank: int) -> int:
        """How many elements a rank has."""
        return sum(region.numel for region in self.regions_of(rank))


_ranges: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def note_range(tensor: Tensor, placement: Packed) -> None:
    """Say of a plain tensor that it is a range of a parameter, as the wrapper's shards are."""
    _ranges[tensor] = placement


def is_range(tensor: Tensor) -> bool:
    """Whether `note_range` was called of a tensor. Without elements it has no gradient."""
    return tensor in _ranges


def cut_of(name: str, tensor: Tensor, mesh: DeviceMesh | None) -> MatrixCut | None:
    """Where a parameter lies; None if it is all there is. `mesh` knows of a layout's replicas."""
    shape = tuple(tensor.shape)
    if isinstance(tensor, DTensor):
        spec, own = distributed_tensor.spec_of(tensor), tensor.device_mesh
        if not distributed_tensor.cuts_rectangles(spec):
            raise NotImplementedError(
                f"parameter {name!r} of shape {shape} is cut as {spec.placements}, by which ranks "
                "have no rectangles of it: cut it along another dim, or in even parts"
            )
        ranks = _Ranks(own)
        axes = [axis for axis, one in enumerate(spec.placements) if one.is_replicate()]
        return MatrixCut(
            shape=shape,
            group=ranks.group,
            regions_of=lambda rank: _rectangle(*distributed_tensor.chunk_at(spec, ranks.at(rank))),
            copy_of=lambda rank: tuple(ranks.at(rank)[axis] for axis in axes),
        )
    placement = tensor.placement if isinstance(tensor, ShardedTensor) else _ranges.get(tensor)
    if placement is None:
        return None
    shape = placement.shape
    if mesh is None or mesh.size() == placement.group.size():
        regions = placement.regions_of
        return MatrixCut(
            shape=shape, group=placement.group, regions_of=regions, copy_of=lambda _: 0
        )
    if mesh.size(-1) != placement.group.size():
        raise UsageError(
            f"parameter {name!r} is cut over {placement.group.size()} ranks, expected the last "
            f"axis of {mesh}: pass the mesh that fully_shard was given"
        )
    ranks = _Ranks(mesh)
    return MatrixCut(
        shape=shape,
        group=ranks.group,
        regions_of=lambda rank: placement.regions_of(ranks.at(rank)[-1]),
        copy_of=lambda rank: ranks.at(rank)[:-1],
    )


def _rectangle(sizes: tuple[int, ...], offsets: tuple[int, ...]) -> tuple[Region, ...]:
    region = Region(offsets=offsets, sizes=sizes)
    return (region,) if region.numel else ()


class _Ranks:
    """All ranks of a mesh as one group."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group = group_of(mesh)
        places = {int(rank): at for at, rank in enumerate(mesh.mesh.flatten())}
        sizes = tuple(mesh.mesh.shape)
        self._at = [
            _unravelled(places[dist.get_global_rank(self.group, rank)], sizes)
            for rank in range(self.group.size())
        ]

    def at(self, rank: int) -> tuple[int, ...]:
        """The coordinates of a rank of the group."""
        return self._at[rank]


def group_of(mesh: DeviceMesh) -> ProcessGroup:
    """All ranks of a mesh."""
    if mesh.ndim == 1:
        return mesh.get_group()
    if dist.group.WORLD is not None and mesh.size() == dist.get_world_size():
        return dist.group.WORLD
    return meshes.flatten_mesh(mesh, "_".join(mesh.mesh_dim_names or ())).get_group()


def _unravelled(at: int, sizes: Sequence[int]) -> tuple[int, ...]:
    found: list[int] = []
    for size in reversed(sizes):
        at, index = divmod(at, size)
        found.insert(0, index)
    return tuple(found)


def owners(costs: Sequence[float], cuts: Sequence[MatrixCut]) -> list[int]:
    """Which rank computes each matrix: about equal costs, and of those the one that has most.

    The dearest matrices choose first. Whoever stays below the mean, or the dearest of all, counts
    as equally free: there bytes decide. The same on every rank, with no communication.
    """
    size = cuts[0].group.size()
    fair = max(sum(costs) / size, max(costs))
    loads = [0.0] * size
    chosen = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        cut, cost = cuts[index], costs[index]

        def worth(rank: int, cut: MatrixCut = cut, cost: float = cost) -> tuple[float, ...]:
            return max(loads[rank] + cost, fair), -cut.numel_on(rank), loads[rank], rank

        chosen[index] = rank = min(range(size), key=worth)
        loads[rank] += cost
    return chosen
