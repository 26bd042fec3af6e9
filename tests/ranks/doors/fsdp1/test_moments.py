"""What users see and do between the parts of a step: parameters, gradients, zeroing them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchWrapper
from torch.utils.checkpoint import checkpoint

from harness import ranks
from shoal.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from shoal.runtime.observe import watch

pytestmark = pytest.mark.filterwarnings("ignore")

CPU = torch.device("cpu")
STRATEGIES = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
)
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda one: one.name)
both_ways = pytest.mark.parametrize("use_orig_params", [False, True])


class Recomputing(nn.Sequential):
    """Reads its parameters again in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def build(wrapper: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    options = {"device_id": CPU, **options}
    inner = wrapper(Recomputing(nn.Linear(6, 9), nn.Tanh()), **options)
    return wrapper(nn.Sequential(inner, nn.Linear(9, 40, bias=False)), **options)


def x(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 10 * dist.get_rank())
    return torch.randn(4, 6, generator=generator)


def total(tensors: list[torch.Tensor]) -> float:
    squares = torch.zeros((), dtype=torch.float64)
    for tensor in tensors:
        squares += tensor.detach().double().pow(2).sum()
    dist.all_reduce(squares)
    return squares.item()


def grads(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@ranks(2)
@every_strategy
@both_ways
def test_zeroing_between_forward_and_backward(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """`model.zero_grad()` reaches the gradients of the step before, whatever is gathered."""

    def run(wrapper: Any, **options: Any) -> list[float]:
        model = build(wrapper, **options)
        found = []
        for step in range(3):
            loss = model(x(step)).pow(2).mean()
            model.zero_grad()
            assert not grads(model)
            loss.backward()
            is_whole = model.sharding_strategy is ShardingStrategy.NO_SHARD
            found += [loss.item(), total(grads(model)) / (2 if is_whole else 1)]
        return found

    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    # With flat parameters only: SHARD_GRAD_OP with original ones zeroes nothing in torch.
    expected = run(TorchWrapper)
    assert run(FullyShardedDataParallel, **options) == pytest.approx(expected, rel=1e-5)


@ranks(2)
@every_strategy
@both_ways
def test_parameters_after_forward_are_those_of_the_optimizer(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    model = build(
        FullyShardedDataParallel, sharding_strategy=strategy, use_orig_params=use_orig_params
    )
    held = list(model.parameters())
    output = model(x())
    assert [id(p) for p in model.parameters()] == [id(p) for p in held]
    again = model(x(1))  # what is still gathered is computed with again
    assert [id(p) for p in model.parameters()] == [id(p) for p in held]
    (output.sum() + again.sum()).backward()
    assert [id(p) for p in model.parameters()] == [id(p) for p in held]
    assert grads(model)


@ranks(2)
@every_strategy
@both_ways
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zeroing_what_waits_for_a_reduction(
    strategy: ShardingStrategy, use_orig_params: bool, set_to_none: bool
) -> None:
    """Gradients of `no_sync` are on the parameters, in full: zeroing takes them back."""

    def run(wrapper: Any) -> list[Any]:
        model = build(wrapper, sharding_strategy=strategy, use_orig_params=use_orig_params)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found: list[Any] = []
        for zeroes in (False, True):
            with model.no_sync():
                for step in range(2):
                    model(x(step)).pow(2).mean().backward()
            found.append(sorted(grad.numel() for grad in grads(model) if grad.numel() > 0))
            found.append(total(grads(model)))
            if zeroes:
                optimizer.zero_grad(set_to_none=set_to_none)
            model(x(2)).pow(2).mean().backward()
            found.append(total(grads(model)))
            optimizer.step()
            optimizer.zero_grad()
        return found

    expected, found = run(TorchWrapper), run(FullyShardedDataParallel)
    for value, wanted in zip(found, expected, strict=True):
        if isinstance(wanted, float):
            assert value == pytest.approx(wanted, rel=1e-5)
        elif not use_orig_params or strategy is ShardingStrategy.NO_SHARD:
            assert value == wanted  # torch pads a flat gradient, but not one of these


@ranks(2)
@both_ways
def test_a_step_after_zeroing_what_waits_is_an_ordinary_one(use_orig_params: bool) -> None:
    """Nothing waits any more: no unit is reduced a second time when its backward is over."""

    def actions() -> list[tuple[str, str]]:
        with watch(model) as recorder:
            model(x().requires_grad_() * 1).pow(2).mean().backward()
        return [(action.kind, action.unit) for action in recorder.actions()]

    model = build(FullyShardedDataParallel, use_orig_params=use_orig_params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    actions()
    ordinary = actions()
    with model.no_sync():
        actions()
    optimizer.zero_grad()
    actions()
    assert actions() == ordinary


@ranks(2)
@every_strategy
def test_gradients_that_wait_have_the_dtype_of_compute(strategy: ShardingStrategy) -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = build(
        FullyShardedDataParallel,
        sharding_strategy=strategy,
        use_orig_params=True,
        mixed_precision=precision,
    )
    with model.no_sync():
        for step in range(2):
            model(x(step)).float().pow(2).mean().backward()
            assert {grad.dtype for grad in grads(model)} == {torch.bfloat16}
    model(x()).float().pow(2).mean().backward()
    assert {grad.dtype for grad in grads(model)} == {torch.float32}


@ranks(2)
@both_ways
def test_accumulation_inside_and_outside_of_no_sync(use_orig_params: bool) -> None:
    """Reduced gradients, then some that wait, then reduced ones again, are all added up."""

    def run(wrapper: Any, order: tuple[bool, ...]) -> list[float]:
        model = build(wrapper, use_orig_params=use_orig_params)
        for step, waits in enumerate(order):
            loss_of = model(x(step)).pow(2).mean
            if waits:
                with model.no_sync():
                    loss_of().backward()
            else:
                loss_of().backward()
        return [total(grads(model))]

    plain = run(FullyShardedDataParallel, (False,) * 4)
    for order in (
        (True, True, True, False),
        (False, True, True, False),
        (True, False, True, False),
    ):
        assert run(FullyShardedDataParallel, order) == pytest.approx(plain, rel=1e-5), order


@ranks(2)
@both_ways
def test_converting_what_one_rank_has_nothing_of(use_orig_params: bool) -> None:
    """So few elements that the second rank has none: it must notice all the same."""
    results = []
    for wrapper in (FullyShardedDataParallel, TorchWrapper):
        torch.manual_seed(0)
        model: Any = wrapper(nn.Linear(2, 1), device_id=CPU, use_orig_params=use_orig_params)
        model.double()
        loss = model(torch.ones(3, 2, dtype=torch.float64)).pow(2).mean()
        loss.backward()
        results.append([loss.item(), total(grads(model))])
        assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert results[0] == pytest.approx(results[1])


@ranks(2)
def test_summoning_in_the_middle_of_backward() -> None:
    model = FullyShardedDataParallel(nn.Linear(2, 1), device_id=CPU)
    output = model(torch.ones(2))

    def summon(_: object) -> None:
        with FullyShardedDataParallel.summon_full_params(model):
            pass

    output.register_hook(summon)
    with pytest.raises(AssertionError, match="Cannot manually unshard parameters during"):
        output.backward()


class Other(nn.Module):
    """Not a wrapper, with parameters on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3, device="meta")
        self.scale = nn.Buffer(torch.empty(3, device="meta"))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs) * self.scale


@ranks(2)
def test_initialising_what_is_on_the_meta_device() -> None:
    seen: list[str] = []

    def initialise(module: nn.Module) -> None:
        seen.append(type(module).__name__)
        module.to_empty(device="cpu", recurse=False)
        with torch.no_grad():
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                tensor.fill_(0.5)

    model = FullyShardedDataParallel(
        nn.Sequential(Other(), nn.ReLU()), param_init_fn=initialise, device_id=CPU
    )
    assert seen == ["Sequential", "Other", "Linear", "ReLU"]
    torch.testing.assert_close(model(torch.ones(3)), torch.full((3,), 1.0))
    wrong: Any = 42
    with pytest.raises(ValueError, match="to be callable"):
        FullyShardedDataParallel(Other(), param_init_fn=wrong, device_id=CPU)


@ranks(2)
def test_ignoring_everything_warns() -> None:
    module = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="Trying to ignore the top-level module"):
        FullyShardedDataParallel(module, ignored_modules=[module], device_id=CPU)
    wrong: Any = 5
    with pytest.raises(TypeError, match=r"should be an iterable of `torch\.nn\.Module`s"):
        FullyShardedDataParallel(nn.Linear(2, 2), ignored_modules=wrong, device_id=CPU)


@ranks(1)
@both_ways
def test_one_rank_shards_nothing(use_orig_params: bool) -> None:
    with pytest.warns(UserWarning, match="switching to use `NO_SHARD` instead of Shard.*FULL_SH"):
        model = FullyShardedDataParallel(
            nn.Linear(3, 3), device_id=CPU, use_orig_params=use_orig_params
        )
    assert model.sharding_strategy is ShardingStrategy.NO_SHARD
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(
            FullyShardedDataParallel,
            sharding_strategy=ShardingStrategy.NO_SHARD,
            use_orig_params=use_orig_params,
        )
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    states = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
    assert {name: tuple(state["exp_avg"].shape) for name, state in states.items()} == {
        "weight": (3, 3),
        "bias": (3,),
    }


class Giving(nn.Module):
    """Returns its parameter, and a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(2, 3))

    def forward(self) -> dict[str, torch.Tensor]:
        return {"whole": self.weight, "row": self.weight[1]}


@ranks(2)
@every_strategy
@both_ways
def test_a_forward_may_return_a_parameter(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """What it returns is good for as long as the caller likes, and gradients come through it."""
    inner = FullyShardedDataParallel(
        Giving(), device_id=CPU, sharding_strategy=strategy, use_orig_params=use_orig_params
    )

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self) -> dict[str, torch.Tensor]:
            return self.inner()

    model = FullyShardedDataParallel(
        Around(), device_id=CPU, sharding_strategy=strategy, use_orig_params=use_orig_params
    )
    given = model()
    assert given["whole"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    (given["whole"].sum() + given["row"].sum()).backward()
    assert given["row"].tolist() == [3.0, 4.0, 5.0]
    # On each of two replicas, if nothing is sharded: 3 elements count once and 3 twice.
    num_copies = 2 if strategy is ShardingStrategy.NO_SHARD else 1
    assert total(grads(model)) == num_copies * (3 * 1.0 + 3 * 4.0)
