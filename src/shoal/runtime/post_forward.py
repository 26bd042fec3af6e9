"""Parameters between forward and backward, resharded over fewer ranks.

After forward each rank keeps its piece of the full parameters for a smaller group, so that the
gather in backward stays within that group: more memory, less communication.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from shoal._torch import distributed_tensor, kernels
from shoal.comm.transport import Pending, Transport
from shoal.layout import Even
from shoal.layout.buffer import gathered_rows, shard_of, shard_views
from shoal.layout.packing import Packing
from shoal.mesh import FSDPMeshInfo
from shoal.runtime.full import FullParameters

if TYPE_CHECKING:
    from shoal.runtime.unit import Unit


class PostForward:
    """What a unit keeps after forward."""

    def __init__(self, unit: Unit, info: FSDPMeshInfo) -> None:
        self._unit = unit
        self._info = info
        self._transport = Transport(info.shard_process_group)
        self._packing: Packing | None = None
        self._shard: torch.Tensor | None = None
        self._gathered: torch.Tensor | None = None

    @property
    def is_active(self) -> bool:
        """Whether the parameters are resharded here now."""
        return self._shard is not None

    def keep(self, full: FullParameters) -> None:
        """Keep this rank's piece of the full parameters, and register it on the modules."""
        datas = [parameter.detach() for parameter in full.parameters]
        if self._packing is None or self._packing.params != self._unit.compute_packing.params:
            params = self._unit.compute_packing.params
            self._packing = Even().pack(params, self._transport.size)
        self._shard = shard_of(self._packing, self._transport.rank, datas)
        views = shard_views(self._packing, self._transport.rank, self._shard)
        for member, data, view in zip(self._unit.shards.members, datas, views, strict=True):
            spec = distributed_tensor.dtensor_spec(
                self._info.mesh, (Replicate(), Shard(0)), data.shape, data.stride(), data.dtype
            )
            parameter = nn.Parameter(
                distributed_tensor.dtensor(view, spec), requires_grad=member.sharded.requires_grad
            )
            member.register(parameter)

    def launch(self) -> Pending:
        """Start to gather the pieces within the smaller group."""
        assert self._shard is not None
        assert self._packing is not None
        num_bytes = self._packing.gathered_bytes
        self._gathered = torch.empty(num_bytes, dtype=torch.uint8, device=self._shard.device)
        reason = f"the gather of unit {self._unit.name!r} after its forward"
        return self._transport.all_gather(self._gathered, self._shard, reason=reason)

    def restore(self, full: FullParameters) -> None:
        """Make the full parameters from what was gathered."""
        assert self._gathered is not None
        assert self._packing is not None
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for index, data in enumerate(full.revive()):
            rows = gathered_rows(self._packing, self._gathered, index)
            for stripe in self._packing.stripes(index):
                targets.append(stripe.of_full(data.view(-1)))
                sources.append(stripe.of_rows(rows))
        with torch.no_grad():
            if targets:
                kernels.foreach_copy(targets, sources)
        self.drop()

    def drop(self) -> None:
        """Free the pieces."""
        self._shard = self._gathered = None
