"""State dicts of the wrapper, beside torch's own: every kind, and from one engine to another."""

from __future__ import annotations

import copy
import io
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchWrapper
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import shoal
from harness import ranks
from shoal.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalStateDictConfig,
    MixedPrecision,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from shoal.sharded_tensor import ShardedTensor
from wrapper_states import CPU, FULL, LOCAL, SHARDED, assert_same

pytestmark = pytest.mark.filterwarnings("ignore")

HALF = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)


class Block(nn.Module):
    """Shared weights, a buffer, and rows that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 5), nn.Linear(3, 5, bias=False)
        self.b.weight = self.a.weight
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("scale", torch.full((5,), 1.7))
        self.deep = nn.Sequential(nn.Linear(5, 5))
        self.back = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(self.deep(self.norm(self.a(x) + self.b(x)) * self.scale))


class Model(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(3, 1)
        self.left = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.left(x.float()).to(x.dtype))


def wrapped(wrapper: Any, seed: int = 0, **options: Any) -> Any:
    """A wrapped model in which one block is a wrapper, one is a checkpointed one."""
    model = Model(seed)
    options.setdefault("device_id", CPU)
    model.blocks[0] = wrapper(model.blocks[0], **options)
    model.blocks[1] = wrapper(checkpoint_wrapper(model.blocks[1]), **options)
    return wrapper(model, ignored_modules=[model.left], **options)


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(6, 3, generator=torch.Generator().manual_seed(3))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


OPTIONS = [
    {"use_orig_params": use_orig, "mixed_precision": precision, "sharding_strategy": strategy}
    for use_orig, precision, strategy in itertools.product(
        (False, True),
        (None, HALF),
        (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD),
    )
]


@ranks(2)
def test_full_and_sharded_state_dicts_are_those_of_torch() -> None:
    kinds = [
        (FULL, FullStateDictConfig()),
        (FULL, FullStateDictConfig(rank0_only=True)),
        (SHARDED, ShardedStateDictConfig()),
        (SHARDED, ShardedStateDictConfig(offload_to_cpu=True)),
    ]
    for options in OPTIONS:
        models = [wrapped(w, **options) for w in (FullyShardedDataParallel, TorchWrapper)]
        # Values by hand: training in half precision is not the same to the bit.
        for model, wrapper in zip(models, (FullyShardedDataParallel, TorchWrapper), strict=True):
            model(torch.ones(6, 3))
            with wrapper.summon_full_params(model), torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1e-3)
                for _, buffer in model.named_buffers():
                    buffer.fill_(2)
        for kind, config in kinds:
            found = []
            for model, wrapper in zip(
                models, (FullyShardedDataParallel, TorchWrapper), strict=True
            ):
                with wrapper.state_dict_type(model, kind, copy.copy(config)):
                    found.append(model.state_dict())
            assert_same(*found)
            assert all("_fsdp" not in name and "_flat" not in name for name in found[0])
            if kind is SHARDED and options["sharding_strategy"] is not ShardingStrategy.NO_SHARD:
                assert isinstance(found[0]["head.weight"], ShardedTensor)


@ranks(2)
def test_local_state_dicts_have_the_flat_parameters() -> None:
    options = {"mixed_precision": HALF, "use_orig_params": False}
    found: list[dict[str, Any]] = []
    for wrapper in (FullyShardedDataParallel, TorchWrapper):
        model = wrapped(wrapper, **options)
        with wrapper.state_dict_type(model, LOCAL, LocalStateDictConfig(offload_to_cpu=True)):
            found.append(model.state_dict())
    mine, theirs = found
    assert set(mine) == set(theirs)
    for name, value in theirs.items():
        if name.endswith("_flat_param"):
            assert isinstance(mine[name], ShardedTensor)
            whole = torch.empty(value.size()) if dist.get_rank() == 0 else None
            value.gather(0, whole)
            if whole is not None:
                expected = whole
                assert torch.equal(mine[name].full_tensor(), expected)
            else:
                mine[name].full_tensor()
        else:
            # torch casts buffers when it is asked first, this one when it runs first.
            assert torch.equal(mine[name].to(value.dtype), value)


def loaded(state_dict: dict[str, Any], kind: StateDictType, **options: Any) -> Any:
    """Another model, after it has loaded a state dict."""
    model = wrapped(FullyShardedDataParallel, seed=1, **options)
    with FullyShardedDataParallel.state_dict_type(model, kind):
        result = model.load_state_dict(state_dict)
    assert not result.missing_keys
    assert not result.unexpected_keys
    return model


@ranks(2)
def test_every_kind_is_loaded_again() -> None:
    for options in OPTIONS:
        model = wrapped(FullyShardedDataParallel, **options)
        with torch.no_grad():
            model(torch.ones(6, 3))
        model.eval()
        whole = model.state_dict()
        for kind in (FULL, SHARDED, LOCAL):
            with FullyShardedDataParallel.state_dict_type(model, kind):
                saved = model.state_dict()
            other = loaded(saved, kind, **options)
            assert_same(other.state_dict(), whole)
            x = torch.randn(4, 3)
            with torch.no_grad():
                assert torch.equal(model(x), other.eval()(x))
            assert FullyShardedDataParallel.get_state_dict_type(other).state_dict_type is FULL


@ranks(4)
def test_hybrid_and_meshes_give_dtensors() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    hybrid = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}
    groups = {
        "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
        "process_group": (mesh.get_group(1), mesh.get_group(0)),
    }
    line = {"device_mesh": init_device_mesh("cpu", (4,))}
    for options in (hybrid, groups, line):
        for use_orig_params in (False, True):
            found = []
            for wrapper in (FullyShardedDataParallel, TorchWrapper):
                model = wrapped(wrapper, use_orig_params=use_orig_params, **options)
                with wrapper.state_dict_type(model, SHARDED):
                    found.append(model.state_dict())
                found.append(model.state_dict())
            rows, whole, their_rows, their_whole = found
            assert_same(whole, their_whole)
            assert_same(rows, their_rows)
            for name, value in their_rows.items():
                assert isinstance(rows[name], DTensor) == isinstance(value, DTensor)
                if isinstance(value, DTensor):
                    assert rows[name].placements == value.placements
                    assert rows[name].device_mesh == value.device_mesh
            for saved in (rows, their_rows):
                other = loaded(saved, SHARDED, use_orig_params=use_orig_params, **options)
                assert_same(other.state_dict(), whole)
    model = wrapped(FullyShardedDataParallel, **line)
    with (
        FullyShardedDataParallel.state_dict_type(model, LOCAL),
        pytest.raises(RuntimeError, match="not compatible with LOCAL_STATE_DICT"),
    ):
        model.state_dict()


@ranks(2)
def test_full_state_dicts_go_from_engine_to_engine() -> None:
    def of_torch(seed: int) -> nn.Module:
        model = torch_fully_shard(Model(seed), mesh=init_device_mesh("cpu", (2,)))
        assert isinstance(model, nn.Module)
        return model

    def of_ours(seed: int) -> nn.Module:
        return shoal.fully_shard(Model(seed), mesh=init_device_mesh("cpu", (2,)))

    def whole(model: nn.Module) -> dict[str, Any]:
        values = model.state_dict()
        return {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in values.items()}

    plain = Model()
    train(plain)
    expected = plain.state_dict()
    ddp = DistributedDataParallel(Model(1))
    for use_orig_params in (False, True):
        wrapper = wrapped(FullyShardedDataParallel, 2, use_orig_params=use_orig_params)
        theirs = wrapped(TorchWrapper, 3, use_orig_params=use_orig_params)
        chain = [plain, theirs, wrapper, ddp.module, wrapper, of_torch(4), wrapper, of_ours(5)]
        chain += [wrapper, theirs, Model(6)]
        for source, target in itertools.pairwise(chain):
            values = whole(source)
            if isinstance(target, shoal.FSDPModule) or type(target).__name__.startswith("FSDP"):
                set_model_state_dict(target, values, options=StateDictOptions(full_state_dict=True))
            else:
                target.load_state_dict(values)
            found = whole(target)
            assert set(found) == set(expected)
            assert all(torch.equal(found[n], expected[n]) for n in expected)
            # What was loaded is what the next one gets, and nothing that was there before.
            with torch.no_grad():
                for parameter in source.parameters() if source is not plain else ():
                    parameter.zero_()


@ranks(4)
def test_a_mesh_without_names() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    model = FullyShardedDataParallel(
        nn.Linear(6, 8),
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=torch.device("cpu"),
    )
    kind = StateDictType.SHARDED_STATE_DICT
    FullyShardedDataParallel.set_state_dict_type(model, kind)
    settings: Any = FullyShardedDataParallel.get_state_dict_type(model)
    assert settings.state_dict_config._use_dtensor
    assert settings.optim_state_dict_config._use_dtensor
    for value in model.state_dict().values():
        assert value.placements == (Replicate(), Shard(0))
        assert value.device_mesh == mesh


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("kind", [FULL, SHARDED, LOCAL], ids=lambda kind: kind.name)
def test_saved_and_loaded_as_weights_only(kind: StateDictType, use_orig_params: bool) -> None:
    """What torch.load trusts by default is enough for every kind of state dict."""
    options = {"device_id": CPU, "use_orig_params": use_orig_params}
    model, other = (FullyShardedDataParallel(Block(), **options) for _ in range(2))
    stream = io.BytesIO()
    with FullyShardedDataParallel.state_dict_type(model, kind):
        torch.save(model.state_dict(), stream)
    stream.seek(0)
    with FullyShardedDataParallel.state_dict_type(other, kind):
        other.load_state_dict(torch.load(stream, weights_only=True))
    for ours, saved in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, saved)
