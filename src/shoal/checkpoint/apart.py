"""Checkpoints of distant replicas, which are apart between two outer steps.

    model/<parameter>               the anchor: the weights that all replicas share
    outer/<parameter>               the momentum of the outer step
    replicas/model/<parameter>      each replica's own weights, a row for each
    replicas/optimizer/<…>/<state>  each replica's own state of its optimizer, likewise

So a checkpoint loads on any number of ranks that shard, and its model is that of a plain one. The
number of replicas has to be the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from shoal.checkpoint.ranks import Ranks
from shoal.checkpoint.shares import Part, Share, share_of
from shoal.distant import DistantReplicas
from shoal.errors import CheckpointError
from shoal.layout.region import Region
from shoal.tensor.sharded import ShardedTensor

ROWS = "replicas/"
OUTER = "outer/"

Tensors = dict[str, torch.Tensor | Share]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateApart:
    """What distant replicas save, and are filled from."""

    outer: DistantReplicas
    is_first: bool
    """Whether this rank writes what all ranks of its replica hold."""

    @classmethod
    def of(cls, outer: DistantReplicas, ranks: Ranks) -> StateApart:
        """Of this rank's replica. Collective."""
        numbers = ranks.exchange(outer.replica)
        return cls(outer=outer, is_first=outer.replica not in numbers[: ranks.rank])

    def tensors(
        self,
        model: nn.Module,
        weights: Mapping[str, torch.Tensor],
        moments: Mapping[str, torch.Tensor],
        prefix: str,
    ) -> Tensors:
        """All that is saved, by its names; `weights` by theirs in the model."""
        anchors, momenta = self.outer.anchors(), self.outer.momenta()
        parameters = dict(model.named_parameters(remove_duplicate=False))
        found: Tensors = {}
        for name, weight in weights.items():
            parameter = parameters.get(name)
            if parameter is None or parameter not in anchors:  # buffers, and what is frozen
                found[prefix + name] = weight
                continue
            found[prefix + name] = anchors[parameter]
            found[OUTER + name] = momenta[parameter]
            found[f"{ROWS}{prefix}{name}"] = self._row(name, weight)
        for name, moment in moments.items():
            found[ROWS + name] = self._row(name, moment)
        return found

    def _row(self, name: str, tensor: torch.Tensor) -> Share:
        """This replica's row of a tensor that has one for each replica."""
        share = share_of(name, tensor, is_first=self.is_first)
        number = self.outer.replica
        parts = tuple(
            Part(
                region=Region(
                    offsets=(number, *part.region.offsets), sizes=(1, *part.region.sizes)
                ),
                local=part.local.unsqueeze(0),
            )
            for part in share.parts
        )
        return replace(
            share,
            shape=(self.outer.num_replicas, *share.shape),
            parts=parts,
            writes=self._writes(tensor, share),
            layout=f"a row for each replica, {share.layout}",
        )

    def _writes(self, tensor: torch.Tensor, share: Share) -> bool:
        """Whether this rank writes what it holds of its replica's row."""
        if isinstance(tensor, ShardedTensor):
            return True  # the parts of its placement are nobody else's in the replica
        if not isinstance(tensor, DTensor):
            return share.writes
        mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
        ours = dist.get_process_group_ranks(self.outer.group)
        return coordinate is not None and all(
            coordinate[axis] == 0
            for axis, placement in enumerate(tensor.placements)
            if isinstance(placement, Replicate)
            and dist.get_process_group_ranks(mesh.get_group(axis)) != ours
        )

    def check(self, saved: object, where: object) -> None:
        """Raise unless a saved run can be gone on with."""
        if not isinstance(saved, Mapping) or not _are_numbers(saved):
            raise CheckpointError(
                f"{where}: expected steps, lr and momentum of distant replicas, got {saved!r:.200}"
            )
        differ = self.outer.mismatches(saved)
        if differ:
            raise CheckpointError(
                f"{where} was saved by distant replicas with {'; '.join(differ)}: build "
                "DistantReplicas as it was when the checkpoint was saved, or load_model for the "
                "weights that all replicas share, and begin anew from those"
            )


def _are_numbers(saved: Mapping[str, Any]) -> bool:
    """Whether the numbers that a run takes over are such as it could have."""
    steps, lr, momentum = (saved.get(name) for name in ("steps", "lr", "momentum"))
    if type(steps) is not int or not all(type(one) in (int, float) for one in (lr, momentum)):
        return False
    assert lr is not None
    assert momentum is not None
    return steps >= 0 and 0 < lr < math.inf and 0 <= momentum < 1


def refuse_rows(manifest_extra: Mapping[str, Any], where: object) -> None:
    """Refuse a checkpoint of distant replicas for a model that has none."""
    if "distant" in manifest_extra:
        raise CheckpointError(
            f"{where} was saved by distant replicas, whose optimizers differ, and this model has "
            "none: build DistantReplicas(model, ...) before load_training, or load_model for the "
            "weights that all replicas share"
        )
