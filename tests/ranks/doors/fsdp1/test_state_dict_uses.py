"""What users do with state dicts of the wrapper: files, checkpoints, hooks, mistakes."""

from __future__ import annotations

import io
import itertools
import tempfile
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel as TorchWrapper

from harness import ranks
from shoal.errors import InvariantError
from shoal.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
)
from wrapper_states import CPU, FULL, LOCAL, SHARDED, assert_same

pytestmark = pytest.mark.filterwarnings("ignore")


class Resized(nn.Linear):
    """Loads what has fewer rows, and keeps the rest of its own."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        given = state_dict[f"{prefix}weight"]
        weight = self.weight.detach().clone()
        weight[: len(given)] = given
        state_dict[f"{prefix}weight"] = weight
        super()._load_from_state_dict(state_dict, prefix, *args)


def wrap(module: nn.Module, **options: Any) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(module, device_id=CPU, **options)


def nested(seed: int = 0, **options: Any) -> FullyShardedDataParallel:
    torch.manual_seed(seed)
    return wrap(nn.Sequential(wrap(nn.Linear(3, 5), **options), nn.Linear(5, 1)), **options)


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_wrappers_inside_a_plain_module(use_orig_params: bool) -> None:
    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        parts = [nested(seed, use_orig_params=use_orig_params) for _ in range(2)]
        return nn.ModuleDict({"left": parts[0], "plain": nn.Linear(1, 1), "right": parts[1]})

    one, other = model(0), model(1)
    for kind in (FULL, SHARDED, LOCAL):
        with FullyShardedDataParallel.state_dict_type(one, kind):
            saved = one.state_dict(prefix="any.")
        assert all(name.startswith("any.") and "_fsdp" not in name for name in saved)
        with FullyShardedDataParallel.state_dict_type(other, kind):
            other.load_state_dict({k.removeprefix("any."): v for k, v in saved.items()})
        assert_same(other.state_dict(), one.state_dict())
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
    config = FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
    with FullyShardedDataParallel.state_dict_type(one, FULL, config):
        names = list(one.state_dict())
    whole = list(one.state_dict())
    assert names == (["plain.weight", "plain.bias"] if dist.get_rank() else whole)


@ranks(2)
def test_checkpoints_on_disk() -> None:
    folders: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    for use_orig_params, kind in itertools.product((False, True), (SHARDED, LOCAL)):
        if use_orig_params and kind is LOCAL:
            continue  # pieces without their places
        one = nested(0, use_orig_params=use_orig_params)
        other = nested(1, use_orig_params=use_orig_params)
        path = f"{folders[0]}/{use_orig_params}{kind.name}"
        with FullyShardedDataParallel.state_dict_type(one, kind):
            dcp.save(one.state_dict(), checkpoint_id=path)
        with FullyShardedDataParallel.state_dict_type(other, kind):
            values = other.state_dict()
            dcp.load(values, checkpoint_id=path)
            other.load_state_dict(values)
        assert_same(other.state_dict(), one.state_dict())
        # A plain model reads what was saved by names.
        if kind is SHARDED:
            plain = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
            values = plain.state_dict()
            dcp.load(values, checkpoint_id=path)
            assert_same(values, one.state_dict())
    for kind in (FULL, SHARDED, LOCAL):
        with FullyShardedDataParallel.state_dict_type(one, kind):
            file = io.BytesIO()
            torch.save(one.state_dict(), file)
            file.seek(0)
            values = torch.load(file, weights_only=False)
            copied = deepcopy(one.state_dict())
            with torch.no_grad():
                for parameter in one.parameters():
                    parameter.mul_(2)
            for saved in (values, copied):
                one.load_state_dict(saved)
        assert_same(one.state_dict(), nested(0).state_dict())


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_modules_and_users_have_their_hooks(use_orig_params: bool) -> None:
    torch.manual_seed(0)
    inner = Resized(3, 6)
    before = inner.weight.detach().clone()
    options = {"use_orig_params": use_orig_params}
    model = wrap(nn.Sequential(wrap(inner, **options)), **options)
    seen: list[list[str]] = []
    model.register_state_dict_post_hook(lambda _, values, *__: seen.append(list(values)))
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
    assert seen == [["0.weight", "0.bias"]]
    model.load_state_dict({"0.weight": torch.zeros(4, 3), "0.bias": torch.ones(6)})
    loaded = model.state_dict()
    assert torch.equal(loaded["0.weight"][:4], torch.zeros(4, 3))
    assert torch.equal(loaded["0.weight"][4:], before[4:])
    # What was assigned is taken over, and training goes on with the objects it had.
    parameters = list(model.parameters())
    assigned = {"0.weight": torch.full((6, 3), 2.0), "0.bias": torch.full((6,), 3.0)}
    model.load_state_dict(assigned, assign=True)
    assert_same(model.state_dict(), assigned)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, nn.Linear))
    assert_same(model.state_dict(), assigned)
    model.load_state_dict(assigned)
    model(torch.ones(2, 3)).sum().backward()
    assert_same(model.state_dict(), assigned)


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_an_interrupted_load_leaves_a_model_that_trains(use_orig_params: bool) -> None:
    class Failing(nn.Linear):
        def _load_from_state_dict(self, *args: Any) -> None:
            raise KeyError("broken file")

    model = wrap(nn.Sequential(nn.Linear(3, 4), Failing(4, 1)), use_orig_params=use_orig_params)
    before = [parameter.shape for parameter in model.parameters()]
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(KeyError, match="broken file"):
        model.load_state_dict(model.state_dict())
    model(torch.ones(2, 3)).sum().backward()
    assert [parameter.shape for parameter in model.parameters()] == before
    assert [name for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_mistakes(use_orig_params: bool) -> None:
    model = nested(use_orig_params=use_orig_params)
    expected = deepcopy(model.state_dict())
    other = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1)).state_dict()
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        model.load_state_dict(other)
    with pytest.raises(RuntimeError, match=r'(?s)Missing key.*"0\.bias".*Unexpected.*"extra"'):
        model.load_state_dict(
            {**{k: v for k, v in expected.items() if k != "0.bias"}, "extra": torch.ones(1)}
        )
    model.load_state_dict(expected)
    result = model.load_state_dict(
        {**{k: v for k, v in expected.items() if k != "0.bias"}, "extra": torch.ones(1)},
        strict=False,
    )
    assert (result.missing_keys, result.unexpected_keys) == (["0.bias"], ["extra"])
    assert_same(model.state_dict(), expected)
    with (
        pytest.raises(RuntimeError, match="Expected state_dict_config of type"),
        FullyShardedDataParallel.state_dict_type(model, FULL, LocalStateDictConfig()),
    ):
        pass
    with (
        pytest.raises(RuntimeError, match="Expected optim_state_dict_config of type"),
        FullyShardedDataParallel.state_dict_type(
            model, FULL, FullStateDictConfig(), ShardedOptimStateDictConfig()
        ),
    ):
        pass
    FullyShardedDataParallel.set_state_dict_type(model[0], SHARDED)
    with pytest.raises(AssertionError, match="same state dict settings"):
        FullyShardedDataParallel.get_state_dict_type(model)
    with pytest.raises(AssertionError, match="same state_dict_type"):
        FullyShardedDataParallel.set_state_dict_type(model, SHARDED)


@ranks(2)
def test_settings_are_given_back() -> None:
    model = nested()
    config = ShardedStateDictConfig(offload_to_cpu=True)
    before = FullyShardedDataParallel.set_state_dict_type(model, SHARDED, config)
    assert before.state_dict_type is FULL
    with FullyShardedDataParallel.state_dict_type(model, LOCAL):
        assert FullyShardedDataParallel.get_state_dict_type(model).state_dict_type is LOCAL
    with (
        pytest.raises(ValueError, match="inside"),
        FullyShardedDataParallel.state_dict_type(model, LOCAL),
    ):
        raise ValueError("inside")
    settings = FullyShardedDataParallel.get_state_dict_type(model)
    assert settings.state_dict_type is SHARDED
    assert settings.state_dict_config is config


@ranks(2)
def test_state_dicts_between_forward_and_backward() -> None:
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        grads = []
        for asks in (False, True):
            model = nested(sharding_strategy=strategy, use_orig_params=True)
            loss = model(torch.ones(2, 3)).sum()
            if asks:
                model.state_dict()
                with FullyShardedDataParallel.summon_full_params(model, writeback=False):
                    pass
            loss.backward()
            grads.append([p.grad for p in model.parameters() if p.grad is not None])
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_the_state_dict_functions_of_torch(use_orig_params: bool) -> None:
    for kind, options in (
        (SHARDED, StateDictOptions()),
        (FULL, StateDictOptions(full_state_dict=True)),
        (FULL, StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)),
    ):
        one = nested(0, use_orig_params=use_orig_params)
        other = nested(1, use_orig_params=use_orig_params)
        # A model of torch's own is still served by torch.
        theirs = get_model_state_dict(TorchWrapper(nn.Linear(2, 2), device_id=CPU), options=options)
        assert list(theirs) == ["weight", "bias"]
        values = get_model_state_dict(one, options=options)
        with FullyShardedDataParallel.state_dict_type(one, kind):
            assert {n: type(v) for n, v in values.items()} == {
                n: type(v) for n, v in one.state_dict().items()
            }
        set_model_state_dict(other, values, options=options)
        assert_same(other.state_dict(), one.state_dict())


@ranks(2)
def test_parameters_in_a_flat_one_can_be_asked_how_they_look() -> None:
    model = nested()
    linear = model.module[0].module
    assert (linear.weight.shape, linear.weight.dtype) == ((5, 3), torch.float32)
    assert linear.weight.device == CPU
    with pytest.raises(InvariantError, match="'weight' was read"):
        linear.weight.sum()
    model(torch.ones(1, 3))
