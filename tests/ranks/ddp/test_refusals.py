"""What replicate refuses, and that every rank hears it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from harness import ranks
from replicas import Branches, Model, batch
from shoal import fully_shard, replicate
from shoal.errors import MeshError, RankError, ShardedTwiceError, UsageError
from shoal.fsdp import FullyShardedDataParallel

pytestmark = pytest.mark.filterwarnings("ignore")


@ranks(2)
def test_ranks_with_other_parameters_are_named_on_all():
    with pytest.raises(RankError, match=r"'weight' .* is \(3, 5\) .* and \(4, 5\)"):
        replicate(nn.Linear(5, 3 + dist.get_rank(), bias=False))
    with pytest.raises(RankError, match=r"'bias' .* missing"):
        replicate(nn.Linear(5, 3, bias=dist.get_rank() == 0))
    frozen = nn.Linear(5, 3)
    frozen.bias.requires_grad_(dist.get_rank() == 0)
    with pytest.raises(RankError, match=r"'bias' .* missing"):
        replicate(frozen)


@ranks(2)
def test_one_manager_for_a_module():
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(ShardedTwiceError, match="fully_shard manages this"):
        replicate(fully_shard(nn.Linear(5, 3), mesh=mesh))
    with pytest.raises(ShardedTwiceError, match="replicate"):
        fully_shard(replicate(nn.Linear(5, 3)), mesh=mesh)
    with pytest.raises(ShardedTwiceError, match="FullyShardedDataParallel manages"):
        replicate(FullyShardedDataParallel(nn.Linear(5, 3), device_id=torch.device("cpu")))
    with pytest.raises(ShardedTwiceError, match="replicate"):
        FullyShardedDataParallel(replicate(nn.Linear(5, 3)), device_id=torch.device("cpu"))
    model = Model()
    replicate(model.last)
    with pytest.raises(ShardedTwiceError, match="'last' already"):
        replicate(model)


@ranks(2)
def test_sharded_modules_inside_are_left_alone():
    mesh = init_device_mesh("cpu", (2,))
    model = Branches()
    fully_shard(model.branches[0], mesh=mesh)
    replicate(model, mesh, find_unused_parameters=True)
    for _ in range(2):
        model(batch(0), 0).mean().backward()
    both = [torch.empty(3, 5) for _ in range(2)]
    dist.all_gather(both, model.last.weight.grad)
    assert torch.equal(*both)


@ranks(2)
def test_what_cannot_be_replicated():
    with pytest.raises(UsageError, match="takes a module"):
        replicate(torch.ones(3))
    with pytest.raises(UsageError, match="nothing to average"):
        replicate(nn.ReLU())
    with pytest.raises(UsageError, match="no shape yet"):
        replicate(nn.LazyLinear(3))
    with pytest.raises(UsageError, match="'weight' is on the meta device"):
        replicate(nn.Linear(5, 3, device="meta"))
    with pytest.raises(NotImplementedError, match="mixed_precision"):
        replicate(nn.Linear(5, 3), mixed_precision=object())
    mesh = init_device_mesh("cpu", (2, 1))
    with pytest.raises(MeshError, match="one axis"):
        replicate(nn.Linear(5, 3), mesh)
    with pytest.raises(MeshError, match="got both"):
        replicate(nn.Linear(5, 3), mesh, process_group=dist.group.WORLD)


@ranks(2)
def test_what_a_replicated_module_cannot_do():
    model = replicate(nn.Linear(5, 3))
    with pytest.raises(AssertionError, match="cannot be deep-copied"):
        copy.deepcopy(model)
    with pytest.raises(NotImplementedError, match="create_graph"):
        model(batch(0)).mean().backward(create_graph=True)


@ranks(2)
def test_a_slice_of_a_replicated_container_is_plain():
    model = replicate(nn.Sequential(nn.Linear(5, 5), nn.ReLU()))
    assert type(model[:1]) is nn.Sequential
