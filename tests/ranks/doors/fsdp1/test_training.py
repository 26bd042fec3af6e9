"""Training with the wrapper, beside torch's own: every strategy, flat or original parameters."""

from __future__ import annotations

import pytest
from torch.distributed.device_mesh import init_device_mesh

from harness import ranks
from shoal.fsdp import ShardingStrategy
from wrapper_oracle import HYBRID, STRATEGIES, check, sample

pytestmark = pytest.mark.filterwarnings("ignore")


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_strategies(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    check(sharding_strategy=strategy, use_orig_params=use_orig_params)


@ranks(4)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", HYBRID, ids=lambda strategy: strategy.name)
def test_hybrid_strategies(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    check(device_mesh=mesh, **options)
    groups = mesh.get_group(1), mesh.get_group(0)
    check(process_group=groups, num_backwards=2, **options)


@ranks(2)
@pytest.mark.parametrize("part", range(3))
def test_a_sample_of_all_combinations(part: int) -> None:
    for options in sample(8, part):
        check(**options)


@ranks(4)
def test_a_sample_of_all_combinations_on_four_ranks() -> None:
    for options in sample(4, 10):
        check(**options)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for options in sample(4, 11, sharding_strategy=list(HYBRID), device_mesh=[mesh]):
        check(**options)


@ranks(3)
def test_three_ranks() -> None:
    for options in sample(3, 20):
        check(**options)
