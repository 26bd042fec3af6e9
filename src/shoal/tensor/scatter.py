"""Scattering: a whole tensor that one rank has, dealt out as a spec says."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from shoal._torch.sharded import ShardingSpec
from shoal.layout.listing import Listing
from shoal.layout.region import Region
from shoal.tensor.creation import blank, group_or_default
from shoal.tensor.deliver import deliver, num_rounds
from shoal.tensor.device import shared_device
from shoal.tensor.listed import Listed
from shoal.tensor.sharded import ShardedTensor


def scatter(
    tensor: Tensor, spec: ShardingSpec, src_rank: int, process_group: ProcessGroup | None
) -> ShardedTensor:
    """Deal out the tensor of rank `src_rank` of the group; others give its shape: collective."""
    group = group_or_default(process_group)
    if not 0 <= src_rank < group.size():
        raise ValueError(f"src_rank {src_rank} does not exist: the group has {group.size()} ranks")
    placement = Listed.of_spec(spec, tensor.shape, group)
    sharded = blank(placement, tensor.dtype, requires_grad=tensor.requires_grad)
    source = Listing([(src_rank, Region.whole(tensor.shape))])
    deliver(
        [(region, tensor.detach()) for region in source.regions_of(placement.rank)],
        sharded.parts(),
        source,
        placement,
        group,
        device=shared_device(tensor.device, placement),
        rounds=num_rounds(tensor.nbytes, group.size()),
        reason="the scatter of a tensor",
    )
    return sharded
