"""The root of a model, and what the wrapper does around forward and backward, beside torch's."""

from __future__ import annotations

import copy
import operator
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchWrapper
from torch.distributed.optim import _apply_optimizer_in_backward

from harness import ranks
from shoal.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from shoal.fsdp.sharded_grad_scaler import ShardedGradScaler
from shoal.fsdp.wrap import ModuleWrapPolicy

pytestmark = pytest.mark.filterwarnings("ignore")

CPU = torch.device("cpu")
FSDP = FullyShardedDataParallel
EVAL = "FSDP_USE_FULL_PREC_IN_EVAL"


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def chain(wrapper: Any, num_layers: int = 3, **options: Any) -> Any:
    torch.manual_seed(0)
    layers = [wrapper(nn.Linear(4, 4), device_id=CPU, **options) for _ in range(num_layers)]
    return wrapper(nn.Sequential(*layers), device_id=CPU, **options)


@ranks(2)
def test_the_first_that_is_asked_is_the_root() -> None:
    model = chain(FSDP)
    assert [one.check_is_root() for one in FSDP.fsdp_modules(model)] == [True] + 3 * [False]
    with pytest.raises(RuntimeError, match="on inner FSDP instances is not supported"):
        with model[0].no_sync():
            pass
    roots = nn.Sequential(chain(FSDP), chain(FSDP))
    assert len(FSDP.fsdp_modules(roots, root_only=True)) == 2
    roots(torch.ones(2, 4)).sum().backward()
    assert all(one.check_is_root() for one in FSDP.fsdp_modules(roots, root_only=True))
    assert not roots[0][1].check_is_root()


@ranks(2)
@pytest.mark.parametrize("device_id", [torch.device("cpu:0"), torch.device("cpu")], ids=str)
def test_any_index_is_the_one_host(device_id: torch.device) -> None:
    model = FSDP(nn.Linear(4, 4), device_id=device_id, sync_module_states=True)
    model(torch.ones(2, 4)).sum().backward()
    assert model.compute_device == CPU
    assert all(parameter.grad is not None for parameter in model.parameters())


@ranks(2)
def test_wrappers_of_one_model_must_be_alike() -> None:
    for option in ({"use_orig_params": True}, {"limit_all_gathers": False}):
        inner = FSDP(nn.Linear(4, 4), device_id=CPU, **option)
        model = FSDP(nn.Sequential(inner, nn.Linear(4, 4)), device_id=CPU)
        with pytest.raises(ValueError, match="Expects one homogeneous value"):
            model(torch.ones(2, 4))


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_wrapper_of_a_wrapper_has_nothing_of_its_own(use_orig_params: bool) -> None:
    options: dict[str, Any] = {"device_id": CPU, "use_orig_params": use_orig_params}
    torch.manual_seed(0)
    plain = nn.Linear(4, 4)
    model = FSDP(FSDP(copy.deepcopy(plain), **options), **options)
    x = torch.arange(8.0).view(2, 4)
    assert torch.equal(model(x), plain(x))
    model(x).sum().backward()
    total = sum((p.grad.sum() for p in model.parameters() if p.grad is not None), torch.zeros(()))
    dist.all_reduce(total)
    plain(x).sum().backward()
    assert total == sum(p.grad.sum() for p in plain.parameters() if p.grad is not None)
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name])


class LooksLikeAGroup:
    """All that a rank that is alone needs to know."""

    def __init__(self, size: int) -> None:
        self._size = size

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._size


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_stand_in_for_a_group_of_one_rank(use_orig_params: bool) -> None:
    """A wrapper of one rank talks to nobody, and trains as the plain module does."""
    torch.manual_seed(dist.get_rank())
    plain = nn.Linear(4, 4)
    model = FSDP(
        copy.deepcopy(plain),
        process_group=LooksLikeAGroup(1),  # pyright: ignore[reportArgumentType]
        device_id=CPU,
        use_orig_params=use_orig_params,
    )
    x = torch.randn(2, 4)
    plain(x).sum().backward()
    model(x).sum().backward()
    grads = torch.cat([p.grad.reshape(-1) for p in model.params if p.grad is not None])
    expected = [p.grad.reshape(-1) for p in plain.parameters() if p.grad is not None]
    assert torch.equal(grads, torch.cat(expected))


@ranks(2)
@pytest.mark.parametrize("strategy", [None, ShardingStrategy.NO_SHARD])
def test_a_stand_in_for_a_group_of_two_ranks_is_looked_at_only(
    strategy: ShardingStrategy | None,
) -> None:
    """What is wrapped in what can be seen without ranks to talk to; running it is refused."""
    group: Any = LooksLikeAGroup(2)
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    values = [parameter.detach().clone() for parameter in plain.parameters()]
    policy = ModuleWrapPolicy({nn.Linear})
    model = FSDP(plain, group, strategy, auto_wrap_policy=policy, device_id=CPU)
    wrapped = FSDP.fsdp_modules(model)
    assert [type(one.module) for one in wrapped] == [nn.Sequential, nn.Linear, nn.Linear]
    for one in wrapped:
        assert one.process_group is group
        assert (one.rank, one.world_size) == (0, 2)
        assert one.sharding_strategy is (strategy or ShardingStrategy.FULL_SHARD)
    assert all(map(torch.equal, model.state_dict().values(), values))
    with pytest.raises(NotImplementedError, match="of 2 ranks, which is no"):
        model(torch.randn(2, 4))


@ranks(2)
def test_what_a_wrapper_tells_of_itself() -> None:
    """Under torch's names: what it was given, and what it holds."""
    for wrapper in (FSDP, TorchWrapper):
        flat = wrapper(nn.Linear(8, 8), device_id=CPU, forward_prefetch=True)
        assert flat.forward_prefetch
        assert flat.backward_prefetch is BackwardPrefetch.BACKWARD_PRE
        assert all(map(operator.is_, flat.params, flat.parameters()))
        assert len(flat.params) == 1
        flat._assert_state(flat.training_state)
        with pytest.raises(ValueError, match="expected to be in states"), flat.no_sync():
            flat._assert_state([])
        assert wrapper(nn.ReLU(), device_id=CPU).params == []
    replicate = [dist.new_group([0]), dist.new_group([1])][dist.get_rank()]
    hybrid = FSDP(
        nn.Linear(8, 8),
        process_group=(dist.group.WORLD, replicate),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=CPU,
    )
    assert hybrid._inter_node_pg is replicate
    assert hybrid.process_group is dist.group.WORLD


@ranks(2)
def test_a_parameter_of_another_shape_is_no_shard() -> None:
    model = FSDP(nn.Linear(8, 8), device_id=CPU, use_orig_params=True)
    model.module.weight = nn.Parameter(torch.ones(3))
    with (
        pytest.raises(RuntimeError, match=r"Cannot writeback: parameter 'weight'"),
        FSDP.summon_full_params(model),
    ):
        pass


@ranks(2)
def test_optimizers_in_backward_step_as_those_after_it() -> None:
    after = chain(FSDP, use_orig_params=True)
    optimizer = torch.optim.Adam(after.parameters(), lr=1e-2)
    within = chain(FSDP, use_orig_params=True)
    _apply_optimizer_in_backward(torch.optim.Adam, within.parameters(), {"lr": 1e-2})
    for _ in range(3):
        after(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        within(torch.ones(2, 4)).sum().backward()
        assert all(parameter.grad is None for parameter in within.parameters())
    for ours, theirs in zip(within.parameters(), after.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    flat = chain(FSDP)
    _apply_optimizer_in_backward(torch.optim.Adam, flat.parameters(), {"lr": 1e-2})
    with pytest.raises(RuntimeError, match="only supported with use_orig_params=True"):
        flat(torch.ones(2, 4))


class Spy(torch.autograd.Function):
    """Looks at units when backward comes by."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, units: Any, seen: list[str]) -> torch.Tensor:
        ctx.units, ctx.seen = units, seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.seen.extend(str(unit.phase) for unit in ctx.units)
        return grads[0], None, None


class Watched(nn.Module):
    """Two units, seen in the midst of the backward of the second, and then after it."""

    def __init__(self, prefetch: BackwardPrefetch | None) -> None:
        super().__init__()
        options = {"device_id": CPU, "backward_prefetch": prefetch}
        self.first = FSDP(nn.Linear(4, 4), **options)
        self.second = FSDP(nn.Sequential(nn.Linear(4, 4), nn.Identity()), **options)
        self.second.module[1].register_forward_hook(lambda _, __, output: self.spy(output))
        self.seen: list[str] = []

    def spy(self, x: torch.Tensor) -> torch.Tensor:
        return Spy.apply(x, [self.first._unit, self.second._unit], self.seen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.spy(self.first(x)))


@ranks(2)
def test_backward_prefetch_starts_before_or_after_a_unit() -> None:
    expected = {
        BackwardPrefetch.BACKWARD_PRE: ["gathering", "backward", "gathering", "sharded"],
        BackwardPrefetch.BACKWARD_POST: ["sharded", "backward", "gathering", "sharded"],
        None: ["sharded", "backward", "sharded", "sharded"],
    }
    for prefetch, phases in expected.items():
        inside = Watched(prefetch)
        model = FSDP(inside, device_id=CPU, backward_prefetch=prefetch)
        model(torch.ones(2, 4)).sum().backward()
        inside.seen.clear()
        model(torch.ones(2, 4)).sum().backward()
        assert inside.seen == phases


def evaluated(wrapper: Any) -> list[torch.Tensor]:
    os.environ[EVAL] = "1"
    try:
        half = MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16
        )
        options = {"device_id": CPU, "mixed_precision": half}
        inner = Normed()
        inner.layers[2] = wrapper(inner.layers[2], **options)
        model = wrapper(inner, **options)
    finally:
        del os.environ[EVAL]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(2))
    seen: list[torch.Tensor] = []
    for training in (False, True, False, False, True):
        model.train(training)
        with torch.set_grad_enabled(training):
            output = model(x)
        mean = model.module.layers[1].running_mean
        seen.extend((output.detach(), mean.clone()))
        if training:
            output.float().pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return seen


@ranks(2)
def test_full_precision_in_evaluations() -> None:
    for ours, theirs in zip(evaluated(FSDP), evaluated(TorchWrapper), strict=True):
        assert ours.dtype is theirs.dtype
        exact = ours.dtype is torch.float32
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=2e-2 if exact else 5e-2)
    dtypes = [seen.dtype for seen in evaluated(FSDP)][::2]
    assert dtypes == [torch.float32, torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]


@ranks(2)
def test_an_evaluation_in_between_ends_a_backward_with_a_clear_error() -> None:
    os.environ[EVAL] = "1"
    try:
        half = MixedPrecision(param_dtype=torch.bfloat16)
        model = FSDP(nn.Linear(4, 4), device_id=CPU, mixed_precision=half)
    finally:
        del os.environ[EVAL]
    loss = model(torch.ones(2, 4)).sum()
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match="between its forward and its backward"):
        loss.backward()
    model.train()
    model(torch.ones(2, 4)).sum().backward()


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_ranks_agree_on_infinite_gradients(use_orig_params: bool) -> None:
    model = FSDP(nn.Linear(4, 6), device_id=CPU, use_orig_params=use_orig_params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler(device="cpu", init_scale=4.0, growth_interval=1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss = model(torch.ones(2, 4)).sum()
    scaler.scale(loss).backward()
    if dist.get_rank() == 0:  # only one rank sees it in its shard
        grad = next(p.grad for p in model.parameters() if p.grad is not None)
        grad[0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert scaler.get_scale() == 2.0
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    for now, then in zip(model.parameters(), before, strict=True):  # two inputs of ones
        torch.testing.assert_close(now, then - 0.1 * 2)
