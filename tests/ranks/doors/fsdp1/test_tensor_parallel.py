"""Tensor parallelism inside the wrapper, beside torch's: training, state dicts, clipping."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchWrapper
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_leaves, tree_map

from harness import on_ranks, ranks
from shoal.errors import UsageError
from shoal.fsdp import (
    FullOptimStateDictConfig,
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardingStrategy,
    StateDictType,
)

pytestmark = pytest.mark.filterwarnings("ignore")

CPU = torch.device("cpu")
FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
CONFIGS = {
    FULL: FullOptimStateDictConfig(offload_to_cpu=False),
    SHARDED: ShardedOptimStateDictConfig(offload_to_cpu=False),
}


class Pair(nn.Module):
    """Two layers that tensor parallelism cuts, and one that it leaves whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(6, 12), nn.Linear(12, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(torch.relu(self.up(x))))


def mesh_of_two() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))


def build(wrapper: Any, mesh: DeviceMesh, seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    model = Pair()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    return wrapper(model, device_mesh=mesh["data"], device_id=CPU, **options)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def batches(mesh: DeviceMesh) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Those of this rank, which ranks that share a model have too; and all of them joined."""
    every = [
        [torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + i)) for i in (0, 1)]
        for step in range(3)
    ]
    place = mesh["data"].get_local_rank()
    return [step[place] for step in every], [torch.cat(step) for step in every]


def train(model: Any, optimizer: torch.optim.Optimizer, data: list[torch.Tensor]) -> list[float]:
    losses = []
    for x in data:
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def seen(value: Any) -> Any:
    """A value with its placements, put together."""
    if isinstance(value, DTensor):
        return str(value.placements), value.device_mesh.mesh_dim_names, value.full_tensor().clone()
    return value.clone() if isinstance(value, torch.Tensor) else value


def state_dicts(wrapper: Any, model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
    found = []
    for kind, config in CONFIGS.items():
        with wrapper.state_dict_type(model, kind, optim_state_dict_config=config):
            found.append(dict(model.state_dict()))
            state = wrapper.optim_state_dict(model, optimizer)["state"]
        found.append({name: dict(sorted(one.items())) for name, one in sorted(state.items())})
    return tree_map(seen, found)


def check_same(found: Any, wanted: Any) -> None:
    for one, other in zip(tree_leaves(found), tree_leaves(wanted), strict=True):
        if isinstance(other, (torch.Tensor, float)):
            torch.testing.assert_close(one, other)
        else:
            assert one == other


@ranks(4)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize(
    "strategy",
    [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP],
    ids=lambda strategy: strategy.name,
)
def test_training_beside_torch(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    mesh = mesh_of_two()
    results = []
    for wrapper in (FullyShardedDataParallel, TorchWrapper):
        options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
        model = build(wrapper, mesh, **options)
        optimizer = adam(model)
        losses = train(model, optimizer, batches(mesh)[0])
        with wrapper.summon_full_params(model):
            shown = {name: seen(value) for name, value in model.named_parameters()}
        results.append([losses, state_dicts(wrapper, model, optimizer), shown])
    check_same(results[0], results[1])


@ranks(4)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_clipping_by_the_norm_of_the_whole_model(use_orig_params: bool) -> None:
    """torch's counts what ranks of one axis have; here it is what one process computes."""
    mesh = mesh_of_two()
    mine, joined = batches(mesh)
    torch.manual_seed(0)
    plain = Pair()
    model = build(FullyShardedDataParallel, mesh, use_orig_params=use_orig_params)
    for norm_type in (2.0, float("inf"), 1.0):
        plain(joined[0]).pow(2).mean().backward()
        model(mine[0]).pow(2).mean().backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type)
        torch.testing.assert_close(model.clip_grad_norm_(0.01, norm_type), expected)
        # Once more: what was clipped has the norm that was asked for.
        again = model.clip_grad_norm_(0.01, norm_type)
        torch.testing.assert_close(again, torch.tensor(0.01), rtol=1e-3, atol=0.0)
        plain.zero_grad()
        model.zero_grad()


@ranks(4)
@pytest.mark.parametrize("kind", [FULL, SHARDED], ids=lambda kind: kind.name)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_loading(use_orig_params: bool, kind: StateDictType) -> None:
    """From torch's wrapper and from one's own; weights and optimizer."""
    mesh = mesh_of_two()
    for giver in (FullyShardedDataParallel, TorchWrapper):
        model = build(giver, mesh, use_orig_params=use_orig_params)
        optimizer = adam(model)
        train(model, optimizer, batches(mesh)[0])
        with giver.state_dict_type(model, kind, optim_state_dict_config=CONFIGS[kind]):
            weights = model.state_dict()
            states = giver.optim_state_dict(model, optimizer)
        taker = FullyShardedDataParallel
        other = build(taker, mesh, seed=1, use_orig_params=use_orig_params)
        other_optimizer = adam(other)
        with taker.state_dict_type(other, kind, optim_state_dict_config=CONFIGS[kind]):
            other.load_state_dict(weights)
            own = taker.optim_state_dict_to_load(other, other_optimizer, states)
        other_optimizer.load_state_dict(own)
        found = state_dicts(taker, other, other_optimizer)
        check_same(found, state_dicts(giver, model, optimizer))
    plain = {name: tensor.clone() for name, tensor in Pair().state_dict().items()}
    other.load_state_dict(plain)
    for name, value in other.state_dict().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(whole, plain[name]), name


def save(path: Any) -> list[float]:
    mesh = mesh_of_two()
    model = build(FullyShardedDataParallel, mesh, use_orig_params=True)
    optimizer = adam(model)
    train(model, optimizer, batches(mesh)[0])
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=path)
    return mean(train(model, optimizer, batches(mesh)[0]))


def load(path: Any, shape: tuple[int, int]) -> list[float]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    model = build(FullyShardedDataParallel, mesh, seed=1, use_orig_params=True)
    optimizer = adam(model)
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    mine, joined = batches(mesh)
    return mean(train(model, optimizer, joined if shape[0] == 1 else mine))


def mean(losses: list[float]) -> list[float]:
    found = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(found)
    return (found / dist.get_world_size()).tolist()


def test_checkpoints_over_other_meshes(tmp_path: Any) -> None:
    expected = on_ranks(4, save, tmp_path / "saved")[0]
    for shape in ((2, 2), (1, 2), (2, 1)):
        found = on_ranks(shape[0] * shape[1], load, tmp_path / "saved", shape)[0]
        assert found == pytest.approx(expected, rel=1e-4), shape


@ranks(4)
def test_a_process_group_does_not_say_which_axis_it_is() -> None:
    mesh = mesh_of_two()
    model = parallelize_module(Pair(), mesh["tensor"], {"up": ColwiseParallel()})
    with pytest.raises(UsageError, match=r"'up.weight' is a DTensor.*device_mesh=mesh"):
        FullyShardedDataParallel(model, mesh["data"].get_group(), device_id=CPU)


class Replicated(nn.Module):
    """A parameter and a buffer that are on the mesh, and differ from rank to rank."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()

        def made() -> DTensor:
            return DTensor.from_local(torch.randn(8, 8), mesh, [Replicate()], run_check=False)

        self.weight = nn.Parameter(made())
        self.shift = nn.Buffer(made())


@ranks(4)
def test_synchronising_over_the_wrappers_axis() -> None:
    mesh = mesh_of_two()
    torch.manual_seed(dist.get_rank())
    module = Replicated(mesh["tensor"])
    model = FullyShardedDataParallel(
        module, device_mesh=mesh["data"], device_id=CPU, sync_module_states=True
    )
    with FullyShardedDataParallel.summon_full_params(model):
        for tensor in (module.weight, module.shift):
            assert isinstance(tensor, DTensor)
            local = tensor.to_local().detach().clone()
            dist.broadcast(local, group=mesh["data"].get_group(), group_src=0)
            assert torch.equal(local, tensor.to_local())
