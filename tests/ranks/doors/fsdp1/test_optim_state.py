"""Optimizer state dicts, beside those of torch's wrapper and of the unsharded model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchWrapper
from torch.distributed.optim import _NamedOptimizer
from torch.distributed.tensor import DTensor

from harness import ranks
from shoal.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)

pytestmark = pytest.mark.filterwarnings("ignore")

CPU = torch.device("cpu")
FSDP = FullyShardedDataParallel


class Bias(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


class Block(nn.Module):
    def __init__(self, dim_in: int, dim_out: int) -> None:
        super().__init__()
        self.before = Bias(dim_in)
        self.weight = nn.Parameter(torch.randn(dim_in, dim_out))
        self.after = Bias(dim_out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(torch.tanh(self.before(x)) @ self.weight)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = Block(5, 3)
        self.blocks = nn.Sequential(Block(3, 7), Block(7, 5))
        self.bias = nn.Parameter(torch.randn(5))
        self.tied = nn.Linear(5, 5, bias=False)
        self.tied_too = nn.Linear(5, 5, bias=False)
        self.tied_too.weight = self.tied.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.first(x)) + self.bias
        return self.tied_too(torch.tanh(self.tied(x)))


def wrapped(wrapper: Any, *, otherwise: bool = False, **options: Any) -> Any:
    """The model, wrapped in one of two ways."""
    model, options = Model(), {"device_id": CPU, **options}
    if otherwise:
        model.first = wrapper(model.first, **options)
        return wrapper(model, **options)
    model.blocks[0].after = wrapper(model.blocks[0].after, **options)
    model.blocks[0] = wrapper(model.blocks[0], **options)
    model.blocks[1] = wrapper(checkpoint_wrapper(model.blocks[1]), **options)
    return wrapper(model, **options)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: Any, num_steps: int = 2) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        model.zero_grad()
        model(torch.randn(4, 5, generator=generator)).pow(2).mean().backward()
        optimizer.step()


def trained(wrapper: Any, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = wrapped(wrapper, **options)
    optimizer = optimizer_of(model)
    step(model, optimizer)
    return model, optimizer


def plain_state() -> dict[str, Any]:
    """The unsharded model's state by names."""
    model = Model()
    optimizer = optimizer_of(model)
    step(model, optimizer)
    return FSDP.rekey_optim_state_dict(
        optimizer.state_dict(), OptimStateKeyType.PARAM_NAME, model, optim=optimizer
    )


def check_same(got: dict[Any, Any], expected: dict[Any, Any]) -> None:
    """Two state dicts, tensor for tensor; sharded ones are put together first."""
    assert got.keys() == expected.keys()
    assert got["state"].keys() == expected["state"].keys()
    for name, state in expected["state"].items():
        assert got["state"][name].keys() == state.keys()
        for kind, value in state.items():
            torch.testing.assert_close(whole(got["state"][name][kind]), whole(value))
    for ours, theirs in zip(got["param_groups"], expected["param_groups"], strict=True):
        assert sorted(ours["params"]) == sorted(theirs["params"])
        assert {k: v for k, v in ours.items() if k != "params"} == {
            k: v for k, v in theirs.items() if k != "params"
        }


def whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_full_state_is_that_of_torch_and_of_the_unsharded_model(use_orig_params: bool) -> None:
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        options = {"use_orig_params": use_orig_params, "sharding_strategy": strategy}
        model, optimizer = trained(FSDP, **options)
        saved = FSDP.optim_state_dict(model, optimizer)
        check_same(saved, plain_state())
        theirs = trained(TorchWrapper, **options)
        # On the CPU torch gives views of one buffer for all kinds of state if it is to offload.
        settings = FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu=False)
        TorchWrapper.set_state_dict_type(theirs[0], StateDictType.FULL_STATE_DICT, *settings)
        check_same(saved, TorchWrapper.optim_state_dict(*theirs))
        FSDP.set_state_dict_type(
            model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(),
            FullOptimStateDictConfig(rank0_only=True),
        )
        on_first = FSDP.optim_state_dict(model, optimizer)
        if dist.get_rank() == 0:
            check_same(on_first, saved)
        else:
            assert on_first == {}


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_sharded_state(use_orig_params: bool) -> None:
    model, optimizer = trained(FSDP, use_orig_params=use_orig_params)
    FSDP.set_state_dict_type(
        model,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(),
        ShardedOptimStateDictConfig(offload_to_cpu=True),
    )
    saved = FSDP.optim_state_dict(model, optimizer)
    average = saved["state"]["first.weight"]["exp_avg"]
    assert isinstance(average, ShardedTensor)
    assert average.local_shards()[0].tensor.shape == ((3, 3), (2, 3))[dist.get_rank()]
    check_same(saved, plain_state())
    before = copy.deepcopy(optimizer.state_dict())
    step(model, optimizer)
    loaded = FSDP.optim_state_dict_to_load(model, optimizer, saved, load_directly=True)
    check_same(loaded, before)
    check_same(optimizer.state_dict(), before)


@ranks(4)
def test_sharded_state_on_meshes() -> None:
    flat = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    hybrid = {"device_mesh": grid, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    for options in ({"device_mesh": flat, "use_orig_params": True}, hybrid):
        model, optimizer = trained(FSDP, **options)
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            saved = FSDP.optim_state_dict(model, optimizer)
            average = saved["state"]["first.weight"]["exp_avg"]
            assert isinstance(average, DTensor)
            assert average.device_mesh == options["device_mesh"]
            loaded = FSDP.optim_state_dict_to_load(model, optimizer, saved)
        check_same(saved, plain_state())
        check_same(loaded, optimizer.state_dict())


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_loading_into_another_wrapping_and_to_and_from_torch(use_orig_params: bool) -> None:
    saved = FSDP.optim_state_dict(*trained(FSDP))
    options = {"use_orig_params": use_orig_params, "otherwise": True}
    for wrapper, other in ((FSDP, FSDP), (TorchWrapper, FSDP), (FSDP, TorchWrapper)):
        model, optimizer = trained(wrapper, **options)
        own = copy.deepcopy(optimizer.state_dict())
        source = saved if other is FSDP else other.optim_state_dict(*trained(other))
        step(model, optimizer)
        loaded = wrapper.optim_state_dict_to_load(model, optimizer, copy.deepcopy(source))
        check_same(loaded, own)
        optimizer.load_state_dict(loaded)
        step(model, optimizer, num_steps=1)


@ranks(4)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_rank_0_alone_has_it_and_half_of_the_ranks_load_it(use_orig_params: bool) -> None:
    saved = FSDP.full_optim_state_dict(*trained(FSDP, use_orig_params=use_orig_params))
    assert bool(saved) == (dist.get_rank() == 0)
    group = dist.new_group([0, 2])
    if dist.get_rank() in (1, 3):
        return
    options = {"process_group": group, "use_orig_params": use_orig_params}
    model, optimizer = trained(FSDP, otherwise=True, **options)
    own = optimizer.state_dict()
    given = saved if dist.get_rank() == 0 else None
    scattered = FSDP.scatter_full_optim_state_dict(given, model, optim=optimizer, group=group)
    check_same(scattered, own)
    config = FullOptimStateDictConfig(rank0_only=True)
    full = StateDictType.FULL_STATE_DICT
    with FSDP.state_dict_type(model, full, FullStateDictConfig(), config):
        loaded = FSDP.optim_state_dict_to_load(model, optimizer, given or {}, group=group)
        check_same(loaded, own)


@ranks(2)
def test_the_older_methods_and_several_groups() -> None:
    model = wrapped(FSDP)
    flats = list(model.parameters())
    given = [{"params": flats[2:]}, {"params": flats[:2], "weight_decay": 0.5}]
    if dist.get_rank() == 1:  # optimizers need not have them in one order
        given = [{**one, "params": list(reversed(one["params"]))} for one in given]
    optimizer = torch.optim.Adam(given, lr=1e-2)
    step(model, optimizer)
    own = optimizer.state_dict()
    with pytest.warns(FutureWarning, match="deprecated"):
        saved = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    by_input = FSDP.full_optim_state_dict(model, optimizer, given, rank0_only=False)
    check_same(by_input, saved)
    assert [one["weight_decay"] for one in saved["param_groups"]] == [0, 0.5]
    check_same(FSDP.shard_full_optim_state_dict(saved, model, optim=optimizer), own)
    check_same(FSDP.shard_full_optim_state_dict(saved, model, optim_input=given), own)
    sharded = FSDP.sharded_optim_state_dict(model, optimizer)
    assert isinstance(sharded["state"]["bias"]["exp_avg"], ShardedTensor)
    check_same(FSDP.flatten_sharded_optim_state_dict(sharded, model, optimizer), own)


@ranks(2)
def test_rekeying_for_a_plain_model() -> None:
    saved = FSDP.optim_state_dict(*trained(FSDP, use_orig_params=True))
    plain = Model()
    optimizer = optimizer_of(plain)
    step(plain, optimizer)
    by_id = OptimStateKeyType.PARAM_ID
    check_same(FSDP.rekey_optim_state_dict(saved, by_id, plain), optimizer.state_dict())
    rekeyed = FSDP.rekey_optim_state_dict(saved, by_id, plain, optim=optimizer)
    check_same(rekeyed, optimizer.state_dict())
    assert FSDP.rekey_optim_state_dict(rekeyed, by_id, plain) is rekeyed
    with pytest.raises(ValueError, match="Invalid parameter keys"):
        FSDP.rekey_optim_state_dict({"state": {0: {}, "a": {}}}, by_id, plain)


@ranks(2)
def test_named_optimizers() -> None:
    for use_orig_params in (False, True):
        model = FSDP(
            nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 1)),
            device_id=CPU,
            use_orig_params=use_orig_params,
        )
        named = _NamedOptimizer(
            model.named_parameters(),
            torch.optim.Adam,
            [{"params": model.parameters()}],
            model,
            lr=1e-2,
        )
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        named.step()
        step(model, named)
        saved = FSDP.optim_state_dict(model, named)
        assert set(saved["state"]) == {"0.weight", "0.bias", "1.weight", "1.bias"}
        before = copy.deepcopy(named.state_dict())
        step(model, named)
        loaded = FSDP.optim_state_dict_to_load(model, named, saved, is_named_optimizer=True)
        named.load_state_dict(loaded)
        for name, state in before["state"].items():
            for kind, value in state.items():
                torch.testing.assert_close(named.state_dict()["state"][name][kind], value)


@ranks(2)
def test_values_that_are_no_tensors_and_states_that_are_not_there() -> None:
    for use_orig_params in (False, True):
        model, optimizer = trained(FSDP, use_orig_params=use_orig_params)
        given = copy.deepcopy(optimizer.state_dict())
        for state in given["state"].values():
            state.update(number=2.5, nothing=None)
        given["state"]["mine"] = torch.ones(2)
        with pytest.warns(UserWarning, match="Found a optim state, mine"):
            saved = FSDP.optim_state_dict(model, optimizer, given)
        loaded = FSDP.optim_state_dict_to_load(model, optimizer, saved)["state"]
        assert torch.equal(loaded.pop("mine"), torch.ones(2))
        assert {state["number"] for state in loaded.values()} == {2.5}
        assert {state["nothing"] for state in loaded.values()} == {None}
        groups = given.pop("param_groups")
        assert groups
        assert "param_groups" not in FSDP.optim_state_dict(model, optimizer, given)
        fresh = wrapped(FSDP, use_orig_params=use_orig_params)
        assert FSDP.optim_state_dict(fresh, optimizer_of(fresh))["state"] == {}


@ranks(2)
def test_frozen_and_ignored_parameters() -> None:
    model = Model()
    model.first.requires_grad_(False)
    ignored = [model.blocks[1].after]
    root = FSDP(model, device_id=CPU, use_orig_params=True, ignored_modules=ignored)
    optimizer = optimizer_of(root)
    step(root, optimizer)
    saved = FSDP.optim_state_dict(root, optimizer)
    expected = {n for n, p in Model().named_parameters() if not n.startswith("first")}
    assert set(saved["state"]) == expected
    assert saved["state"]["blocks.1.after.bias"]["exp_avg"].shape == (5,)
    before = copy.deepcopy(optimizer.state_dict())
    step(root, optimizer)
    check_same(FSDP.optim_state_dict_to_load(root, optimizer, saved), before)


@ranks(2)
@pytest.mark.parametrize(("size", "numels"), [((2, 4), [6, 6]), ((1, 1), [1, 1]), ((0, 1), [0, 1])])
def test_small_flat_parameters(size: tuple[int, int], numels: list[int]) -> None:
    """Every rank has elements if there are enough, and else a gradient and state without any."""
    model = FSDP(nn.Linear(*size), device_id=CPU)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(3, size[0])).sum().backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
        optimizer.step()
    found = [torch.tensor(0) for _ in range(2)]
    dist.all_gather(found, torch.tensor(model.params[0].numel()))
    assert sorted(numel.item() for numel in found) == numels
    before = copy.deepcopy(optimizer.state_dict())
    saved = FSDP.optim_state_dict(model, optimizer)
    optimizer.state.clear()
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, saved))
    check_same(optimizer.state_dict(), before)


@ranks(2)
def test_refusals() -> None:
    model = wrapped(FSDP)
    held = list(model.parameters())
    optimizer = torch.optim.Adam(held if dist.get_rank() == 0 else held[:-1])
    step(model, optimizer)
    with pytest.raises(RuntimeError, match="Rank 1 is missing states"):
        FSDP.optim_state_dict(model, optimizer)

    model, optimizer = trained(FSDP)
    saved = FSDP.optim_state_dict(model, optimizer)

    def loading(**changes: Any) -> None:
        changed = copy.deepcopy(saved)
        changed["state"].update(changes)
        for name in [name for name, state in changed["state"].items() if state is None]:
            del changed["state"][name]
        FSDP.optim_state_dict_to_load(model, optimizer, changed)

    with pytest.raises(ValueError, match="scalar state with the same value and dtype"):
        loading(bias=None)
    with pytest.raises(ValueError, match="Differing optimizer state names"):
        loading(bias={"step": torch.tensor(2.0)})
    zeros = torch.zeros(4)
    with pytest.raises(ValueError, match="same shape as its parameter"):
        loading(bias={"step": torch.tensor(2.0), "exp_avg": zeros, "exp_avg_sq": zeros})
    with pytest.raises(ValueError, match='must have the keys "state"'):
        FSDP.optim_state_dict_to_load(model, optimizer, {})
    other = FSDP(nn.Linear(2, 2), device_id=CPU)
    with pytest.raises(KeyError, match="another model"):
        FSDP.optim_state_dict_to_load(other, optimizer_of(other), saved)
    with pytest.raises(ValueError, match="not in the model"):
        FSDP.optim_state_dict(other, optimizer)


class Parallel(nn.Module):
    """Shared by all ranks but for one module, which each has of its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = FSDP(Block(5, 5), device_id=CPU, **options)
        setattr(self, f"own{dist.get_rank()}", nn.Linear(5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(getattr(self, f"own{dist.get_rank()}")(x))


@ranks(2)
def test_models_that_no_wrapper_is_around() -> None:
    for use_orig_params in (False, True):
        model = Parallel(use_orig_params=use_orig_params)
        optimizer = optimizer_of(model)
        step(model, optimizer)
        saved = FSDP.optim_state_dict(model, optimizer)
        own = f"own{dist.get_rank()}"
        shared = ("shared.before.bias", "shared.weight", "shared.after.bias")
        assert set(saved["state"]) == {*shared, f"{own}.weight", f"{own}.bias"}
        before = copy.deepcopy(optimizer.state_dict())
        step(model, optimizer)
        check_same(FSDP.optim_state_dict_to_load(model, optimizer, saved), before)


@ranks(2)
def test_units_and_parameters_that_were_never_used() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = FSDP(nn.Linear(5, 5), device_id=CPU, use_orig_params=use_orig_params)
            self.used = FSDP(nn.Linear(5, 5), device_id=CPU, use_orig_params=use_orig_params)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    for use_orig_params in (False, True):
        model = FSDP(Half(), device_id=CPU, use_orig_params=use_orig_params)
        optimizer = optimizer_of(model)
        step(model, optimizer)
        saved = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
        assert set(saved["state"]) == {"used.weight", "used.bias"}
        loaded = FSDP.shard_full_optim_state_dict(saved, model)
        check_same(loaded, optimizer.state_dict())
        optimizer.load_state_dict(loaded)
        step(model, optimizer)


class Remembering(torch.optim.SGD):
    """Has a state that is smaller than its parameter."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["sums"] = parameter.grad.flatten()[:2].clone()
        return super().step(closure)


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_states_of_another_size_than_their_parameter(use_orig_params: bool) -> None:
    """Refused where they would have to be put together; kept where every rank has all."""
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        options = {"use_orig_params": use_orig_params, "sharding_strategy": strategy}
        model = FSDP(nn.Linear(40, 3), device_id=CPU, **options)
        optimizer = Remembering(model.parameters(), lr=0.1)
        model(torch.ones(2, 40)).sum().backward()
        optimizer.step()
        if strategy is ShardingStrategy.FULL_SHARD:
            with pytest.raises(NotImplementedError, match=r"'sums' of \['weight'.*has 2 elements"):
                FSDP.optim_state_dict(model, optimizer)
        elif use_orig_params:
            saved = FSDP.optim_state_dict(model, optimizer)
            assert tuple(saved["state"]["weight"]["sums"].shape) == (2,)
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, saved))


@ranks(2)
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
def test_adafactor(strategy: ShardingStrategy) -> None:
    """It factorises matrices, which shards are not."""
    results = []
    for wrapper in (FSDP, TorchWrapper):
        torch.manual_seed(0)
        model = wrapper(
            nn.Linear(6, 8), device_id=CPU, use_orig_params=True, sharding_strategy=strategy
        )
        optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        kind, config = StateDictType.FULL_STATE_DICT, FullOptimStateDictConfig(offload_to_cpu=False)
        with wrapper.state_dict_type(model, kind, optim_state_dict_config=config):
            saved = wrapper.optim_state_dict(model, optimizer)["state"]
        results.append({n: {k: v.clone() for k, v in s.items()} for n, s in saved.items()})
    assert results[0].keys() == results[1].keys()
    for name, state in results[1].items():
        assert results[0][name].keys() == state.keys()
        for kind, value in state.items():
            torch.testing.assert_close(results[0][name][kind], value)
