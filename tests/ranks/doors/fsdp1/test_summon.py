"""Whole parameters of the wrapper for as long as a block, beside torch's own."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel as TorchWrapper

from harness import ranks
from shoal.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy

pytestmark = pytest.mark.filterwarnings("ignore")

CPU = torch.device("cpu")
HALF = MixedPrecision(param_dtype=torch.bfloat16)
WRAPPERS = (FullyShardedDataParallel, TorchWrapper)
FULL_SHARD, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD


def nested(wrapper: Any = FullyShardedDataParallel, **options: Any) -> Any:
    torch.manual_seed(0)
    inner = wrapper(nn.Linear(3, 5), device_id=CPU, **options)
    checkpointed = checkpoint_wrapper(nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)))
    model = nn.Sequential(inner, checkpointed)
    return wrapper(model, device_id=CPU, **options)


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)))


def seen(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(n, t.detach().clone()) for n, t in module.named_parameters()] + [
        (n, t.clone()) for n, t in module.named_buffers()
    ]


def assert_seen(actual: Any, expected: Any) -> None:
    assert [name for name, _ in actual] == [name for name, _ in expected]
    for (name, one), (_, other) in zip(actual, expected, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other), name


@ranks(2)
def test_parameters_are_those_of_torch() -> None:
    for use_orig_params, precision, strategy in itertools.product(
        (False, True), (None, HALF), (FULL_SHARD, NO_SHARD)
    ):
        options = {
            "use_orig_params": use_orig_params,
            "mixed_precision": precision,
            "sharding_strategy": strategy,
        }
        models = [nested(wrapper, **options) for wrapper in WRAPPERS]
        for recurse, target in itertools.product((False, True), (0, 1)):
            found = []
            for wrapper, model in zip(WRAPPERS, models, strict=True):
                with wrapper.summon_full_params(model[0] if target else model, recurse=recurse):
                    found.append([name for name, _ in model.named_parameters()])
                    if recurse and not target:
                        found[-1] = seen(model)
                    elif target:
                        found[-1] = seen(model[0])
            if isinstance(found[0][0], tuple):
                assert_seen(*found)
            elif use_orig_params:
                assert found[0] == found[1]
        with FullyShardedDataParallel.summon_full_params(
            models[0], rank0_only=True, writeback=False
        ):
            whole = [p.clone() for p in models[0].parameters()]
        if dist.get_rank() == 0:
            assert all(torch.equal(a, b) for a, b in zip(whole, plain().parameters(), strict=True))
        elif strategy is FULL_SHARD:
            shards = list(models[0].parameters())
            assert all(torch.equal(a, b) for a, b in zip(whole, shards, strict=True))


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_writes_are_kept_if_asked(use_orig_params: bool) -> None:
    for writeback, precision, strategy in itertools.product(
        (False, True), (None, HALF), (FULL_SHARD, NO_SHARD)
    ):
        model = nested(
            use_orig_params=use_orig_params, mixed_precision=precision, sharding_strategy=strategy
        )
        parameters = list(model.parameters())
        before = [p.detach().clone() for p in parameters]
        whole_numel = sum(p.numel() for p in plain().parameters())
        with FullyShardedDataParallel.summon_full_params(model, writeback=writeback):
            # Whoever holds a parameter holds the whole one now.
            assert sum(p.numel() for p in parameters) == whole_numel
            assert all(isinstance(p, nn.Parameter) for p in model.parameters())
            with torch.no_grad():
                for parameter in parameters:
                    parameter.fill_(7 + 2**-20)
        kept = writeback or strategy is NO_SHARD
        for parameter, old in zip(parameters, before, strict=True):
            expected = torch.full_like(old, 7 + 2**-20) if kept else old
            assert torch.equal(parameter, expected)
        if precision is None:  # a norm has buffers of full precision
            model(torch.ones(4, 3)).sum().backward()
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))


@ranks(2)
def test_gradients_are_whole() -> None:
    for strategy, writeback in itertools.product((FULL_SHARD, NO_SHARD), (False, True)):
        model, reference = nested(use_orig_params=True, sharding_strategy=strategy), plain()
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            assert all(p.grad is None for p in model.parameters())
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
        model(x).pow(2).sum().backward()
        reference(x).pow(2).sum().backward()
        before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        with FullyShardedDataParallel.summon_full_params(
            model, with_grads=True, writeback=writeback
        ):
            for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad)
                assert ours.grad is not None
                ours.grad *= 2
        factor = 2 if writeback or strategy is NO_SHARD else 1
        for parameter, old in zip(model.parameters(), before, strict=True):
            assert (parameter.grad is None) == (old is None)
            if parameter.grad is not None and old is not None:
                assert torch.equal(parameter.grad, factor * old)
    with (
        pytest.raises(NotImplementedError, match="with_grads=True"),
        FullyShardedDataParallel.summon_full_params(nested(), with_grads=True),
    ):
        pass


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_apply_sees_whole_parameters(use_orig_params: bool) -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            assert module.weight.dim() == 2
            with torch.no_grad():
                module.weight.copy_(torch.arange(15.0).view_as(module.weight))

    reference = plain().apply(init)
    model = nested(use_orig_params=use_orig_params)
    assert model.apply(init) is model
    with FullyShardedDataParallel.summon_full_params(model):
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        with pytest.raises(ValueError, match="expected to be in states"):
            model.apply(init)


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_forwards_inside_use_what_is_there(use_orig_params: bool) -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    model, reference = nested(use_orig_params=use_orig_params).eval(), plain().eval()
    with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
        for parameter in (*model.parameters(), *reference.parameters()):
            parameter.mul_(1.5)
        torch.testing.assert_close(model(x), reference(x))
    # Of the root alone: what is inside gathers as ever.
    with FullyShardedDataParallel.summon_full_params(model, recurse=False), torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model.module(x), reference(x))
            torch.testing.assert_close(model(x), reference(x))
    torch.testing.assert_close(model(x), reference(x))
    handle = model[0]._unshard(async_op=True)
    handle.wait()
    torch.testing.assert_close(model(x), reference(x))


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_unsharding_ahead_of_forward_sees_the_last_step(use_orig_params: bool) -> None:
    """As torch's users write it: the gathers must come after the optimizer's writes."""
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    model, reference = nested(use_orig_params=use_orig_params), plain()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for _ in range(3):
        handle = model[0]._unshard(async_op=True)
        handle.wait()
        # Not the sum: after the normalisation it depends on no weight.
        loss, expected = model(x).exp().sum(), reference(x).exp().sum()
        torch.testing.assert_close(loss, expected)
        (loss + expected).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        model._wait_unshard_streams_on_current_stream()


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_between_forward_and_backward(use_orig_params: bool) -> None:
    for strategy in (FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        model = nested(use_orig_params=use_orig_params, sharding_strategy=strategy)
        loss = model(torch.ones(4, 3)).sum()
        with FullyShardedDataParallel.summon_full_params(model):
            pass
        loss.backward()
        model(torch.ones(4, 3)).sum().backward()


class Summons(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(5))

    def forward(self, wrapper: FullyShardedDataParallel) -> None:
        with wrapper.summon_full_params(wrapper):
            pass


@ranks(2)
def test_mistakes() -> None:
    model = FullyShardedDataParallel(Summons(), device_id=CPU)
    computing = "Cannot manually unshard parameters during forward/backward"
    with pytest.raises(AssertionError, match=computing):
        model(model)
    other = FullyShardedDataParallel(nn.Linear(2, 1), device_id=CPU)
    output = other(torch.ones(2))

    def summon(_: torch.Tensor) -> None:
        with FullyShardedDataParallel.summon_full_params(other):
            pass

    output.register_hook(summon)
    with pytest.raises(AssertionError, match=computing):
        output.backward()
    model = nested()
    with (
        FullyShardedDataParallel.summon_full_params(model),
        pytest.raises(AssertionError, match="when already unsharding parameters"),
        FullyShardedDataParallel.summon_full_params(model),
    ):
        pass
    with (
        pytest.raises(NotImplementedError, match="is not supported"),
        FullyShardedDataParallel.summon_full_params(model, rank0_only=True),
    ):
        pass
    with (
        pytest.raises(NotImplementedError, match="NO_SHARD is not supported"),
        FullyShardedDataParallel.summon_full_params(
            nested(sharding_strategy=NO_SHARD), offload_to_cpu=True
        ),
    ):
        pass


@ranks(1)
def test_one_rank_alone() -> None:
    for use_orig_params in (False, True):
        model = nested(use_orig_params=use_orig_params)
        with (
            FullyShardedDataParallel.summon_full_params(model, writeback=False),
            torch.no_grad(),
        ):
            for parameter in model.parameters():
                parameter.fill_(3)
        assert all(bool((p == 3).all()) for p in model.parameters())
        model(torch.ones(4, 3)).sum().backward()
        assert bool((model.state_dict()["0.weight"] == 3).all())
        # With offloading a copy is shown, also where the compute is on the host itself.
        offload = CPUOffload(offload_params=True)
        model = nested(use_orig_params=use_orig_params, cpu_offload=offload)
        before = [p.detach().clone() for p in model.parameters()]
        for writeback in (False, True):
            with (
                FullyShardedDataParallel.summon_full_params(model, writeback=writeback),
                torch.no_grad(),
            ):
                for parameter in model.parameters():
                    parameter.fill_(3)
            kept = [bool((p == 3).all()) for p in model.parameters()]
            assert kept == [writeback] * len(before)
            if not writeback:
                assert all(map(torch.equal, model.parameters(), before))


@ranks(2)
def test_the_module_inside() -> None:
    linear = nn.Linear(3, 3)
    linear.note = "mine"  # pyright: ignore[reportArgumentType]
    model = FullyShardedDataParallel(checkpoint_wrapper(linear), device_id=CPU)
    assert model.module is linear
    assert model.note == "mine"
    assert [name for name, _ in model.named_parameters()] == [
        "_fsdp_wrapped_module._checkpoint_wrapped_module._flat_param"
    ]
    assert model.get_parameter("_fsdp_wrapped_module._flat_param") is next(model.parameters())
