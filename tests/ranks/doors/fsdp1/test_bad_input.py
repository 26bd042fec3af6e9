"""Mistakes are answered on every rank, by name, and nobody waits for the others."""

from __future__ import annotations

import warnings
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from harness import ranks
from shoal.comm import observer
from shoal.doors.fsdp1 import root
from shoal.errors import RankError
from shoal.fsdp import FullyShardedDataParallel, ShardingStrategy

pytestmark = pytest.mark.filterwarnings("ignore")

CPU = torch.device("cpu")
FSDP = FullyShardedDataParallel


@ranks(2)
def test_strategies_and_groups_that_do_not_fit() -> None:
    mesh = init_device_mesh("cpu", (2,))
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    hybrid = ShardingStrategy.HYBRID_SHARD
    with pytest.raises(ValueError, match="Cannot pass both process_group and device_mesh"):
        FSDP(nn.Linear(2, 2), process_group=group, device_mesh=mesh, device_id=CPU)
    with pytest.raises(ValueError, match="ndim=2"):
        FSDP(nn.Linear(2, 2), sharding_strategy=hybrid, device_mesh=mesh, device_id=CPU)
    with pytest.raises(ValueError, match="Expected process_group to be passed"):
        FSDP(nn.Linear(2, 2), group, hybrid, device_id=CPU)
    with pytest.raises(ValueError, match="requires explicit specification"):
        FSDP(nn.Linear(2, 2), sharding_strategy=hybrid, device_id=CPU)
    with pytest.raises(ValueError, match="one process group"):
        FSDP(nn.Linear(2, 2), (group, group), device_id=CPU)


@ranks(2)
def test_different_modules_on_ranks() -> None:
    rank = dist.get_rank()
    for module in (nn.Linear(4, 4 + rank), nn.Linear(4, 4, bias=bool(rank))):
        model = FSDP(module, device_id=CPU)
        with pytest.raises(RuntimeError, match="rank 0 and rank 1 have sharded different models"):
            model(torch.ones(2, 4))


@ranks(2)
def test_different_modules_on_ranks_that_are_to_be_synchronised() -> None:
    with pytest.raises(RuntimeError, match=r"rank 0 and rank 1 have different modules.*'weight'"):
        FSDP(nn.Linear(4, 4 + dist.get_rank()), device_id=CPU, sync_module_states=True)


class Fork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (FSDP(nn.Linear(4, 4), device_id=CPU) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 0:
            return self.second(self.first(x))
        return self.first(self.second(x))


@ranks(2)
def test_different_orders_on_ranks() -> None:
    model = FSDP(Fork(), device_id=CPU)
    with pytest.raises(RuntimeError, match=r"^Forward order differs across ranks"):
        model(torch.ones(2, 4))


@ranks(2)
def test_flat_parameters_of_mixed_kinds() -> None:
    frozen = nn.Linear(4, 4)
    frozen.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="uniform `requires_grad`"):
        FSDP(frozen, device_id=CPU)
    FSDP(frozen, device_id=CPU, use_orig_params=True)(torch.ones(2, 4)).sum().backward()
    mixed = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16())
    with pytest.raises(ValueError, match="uniform dtype"):
        FSDP(mixed, device_id=CPU)


@ranks(2)
def test_state_of_another_model() -> None:
    model = FSDP(nn.Linear(4, 4), device_id=CPU)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(nn.Linear(4, 5).state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(nn.Sequential(nn.Linear(4, 4)).state_dict())
    model(torch.ones(2, 4)).sum().backward()


@ranks(2)
def test_a_hook_for_a_model_that_already_ran() -> None:
    model = FSDP(nn.Linear(4, 4), device_id=CPU)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(AssertionError, match="already ran"):
        model.register_comm_hook(None, print)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (FSDP(nn.Linear(4, 4), device_id=CPU) for _ in range(2))
        self.goes_right = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.right(x) if self.goes_right else self.left(x)


@ranks(2, fresh=True)  # a gather that was started ahead waits for the other rank for good
def test_a_rank_that_goes_elsewhere_later() -> None:
    """Equal sizes would be mixed in silence: the rank that goes alone is told who is missing."""
    branches = Branches()
    model = FSDP(branches, device_id=CPU)
    model(torch.ones(2, 4))
    if dist.get_rank() == 1:
        branches.goes_right = True
        with (
            patch.object(root, "_LATER", timedelta(seconds=1)),
            pytest.raises(RankError, match=r"right', and rank 0 did not come there"),
        ):
            model(torch.ones(2, 4))


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_ranks_that_freeze_different_parameters(use_orig_params: bool) -> None:
    module = nn.Linear(4, 4).requires_grad_(dist.get_rank() == 0)
    model = FSDP(module, device_id=CPU, use_orig_params=use_orig_params)
    with pytest.raises(
        RankError, match=r"is torch.float32 .*, trained and torch.float32 .*, frozen"
    ):
        model(torch.ones(2, 4))


class Paths(Branches):
    """As `Branches`, with a layer that all ranks run."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.before(x))


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
@ranks(2, fresh=True)
def test_another_order_later_is_named_in_debug_mode(strategy: ShardingStrategy) -> None:
    """As torch does, the rank that goes another way warns, once, and goes on with what comes."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    paths = Paths()
    model = FSDP(paths, device_id=CPU, sharding_strategy=strategy)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    model.eval()
    model(torch.ones(2, 4))
    model.train()
    paths.goes_right = dist.get_rank() == 1
    for iteration in range(2):
        with warnings.catch_warnings(record=True) as caught, observer.uncompared():
            warnings.simplefilter("always")
            model(torch.ones(2, 4)).sum().backward()
        named = [str(w.message) for w in caught if "Forward order differs" in str(w.message)]
        assert len(named) == (paths.goes_right and iteration == 0), named
        if named:
            assert named[0].startswith("Forward order differs from that of the first iteration on")
            assert "left', got unit" in named[0]


@ranks(2)
def test_a_path_that_all_ranks_take_later() -> None:
    branches = Branches()
    model = FSDP(branches, device_id=CPU)
    model(torch.ones(2, 4)).sum().backward()
    branches.goes_right = True
    model(torch.ones(2, 4)).sum().backward()
