"""Replicas whose weights are no copies any more are found, with the parameter and the rank."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from harness import ranks
from shoal import fully_shard
from shoal.errors import RankError
from shoal.watch import check_replicas


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, dtype=torch.bfloat16))


def flip_a_bit(parameter: torch.Tensor, where: int = 3) -> None:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    bits = {2: torch.int16, 4: torch.int32}[local.element_size()]
    local.detach().view(-1).view(bits)[where] ^= 1


@ranks(4)
def test_one_flipped_bit_is_found_among_replicas_of_shards():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    sharded = fully_shard(model(), mesh=mesh)
    assert check_replicas(sharded) == 4
    # Ranks 1 and 3 hold copies of the second shard, and two ranks cannot tell who is right.
    if dist.get_rank() == 3:
        flip_a_bit(sharded[0].weight)
    if dist.get_rank() % 2:
        with pytest.raises(RankError, match=r"parameter '0.weight': ranks 1, 3 hold different"):
            check_replicas(sharded)
    else:
        assert check_replicas(sharded) == 4, "these two ranks hold copies of the first shard"


@ranks(4)
def test_the_odd_one_out_of_several_replicas_is_named():
    replicated = DistributedDataParallel(model())
    assert check_replicas(replicated) == 4
    with torch.no_grad():
        if dist.get_rank() == 2:
            flip_a_bit(replicated.module[1].weight)
            replicated.module[1].bias[0] = float("nan")
    with pytest.raises(RankError) as caught:
        check_replicas(replicated)
    text = "parameter 'module.1.weight': rank 2 differs from the others, and 1 more parameters"
    assert text in str(caught.value)


@ranks(2)
def test_swapped_values_are_found_and_nobodys_copies_are_not_compared():
    plain = model()
    assert check_replicas(plain) == 0
    group = dist.group.WORLD
    assert check_replicas(plain, group=group) == 4
    with torch.no_grad():
        if dist.get_rank():
            plain[0].weight.copy_(plain[0].weight.flip(0))
    with pytest.raises(RankError, match=r"replicas of parameter '0.weight'"):
        check_replicas(plain, group=group)
