"""Mixed precision: which dtypes compute, communicate and remain, as torch's engine has it."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from differential import (
    DIM,
    SHOAL,
    Engine,
    check_engines_agree,
    check_same,
    error_of,
    gradients,
    in_full,
    loss_of,
    snapshot,
    stack,
    train,
)
from harness import ranks

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

POLICIES: dict[str, dict[str, Any]] = {
    "none": {},
    "param": {"param_dtype": BF16},
    "param, reduce": {"param_dtype": BF16, "reduce_dtype": FP32},
    "half": {"param_dtype": FP16},
    "half, reduce": {"param_dtype": FP16, "reduce_dtype": FP32},
    "param, reduce, output": {"param_dtype": BF16, "reduce_dtype": BF16, "output_dtype": FP32},
    "reduce": {"reduce_dtype": BF16},
    "output": {"param_dtype": FP32, "output_dtype": BF16},
    "double": {"param_dtype": FP64, "reduce_dtype": FP32},
}


class Noting(nn.Module):
    """Notes what it computes with, and keeps a running mean in a buffer."""

    mean: torch.Tensor
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.gain = nn.Parameter(torch.ones(DIM))
        self.register_buffer("mean", torch.zeros(DIM))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("fine", torch.ones(DIM, dtype=FP64))
        self.notes: list[tuple[torch.dtype, ...]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.notes.append(
            (x.dtype, self.linear.weight.dtype, self.gain.dtype, y.dtype, self.mean.dtype)
        )
        with torch.no_grad():
            self.mean.lerp_(y.detach().float().mean(0), 0.1)
            self.count += 1
        return torch.tanh(y * self.gain)


def notes(model: nn.Module) -> list[Any]:
    return [m.notes for m in model.modules() if isinstance(m, Noting)]


def trained_with(engine: Engine, dtypes: dict[str, Any]) -> list[Any]:
    model = engine.shard(stack(Noting, 2), dtypes)
    steps = train(engine, model)
    with torch.no_grad():
        evaluated = model(engine.batches(1)[0])
    return [steps, evaluated, notes(model)]


@ranks(2)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_trains_as_torch_does(policy: str) -> None:
    check_engines_agree(trained_with, POLICIES[policy], plain=False)


@ranks(4)
def test_no_policy_and_a_wide_one_train_as_the_unsharded_model() -> None:
    def full_precision(engine: Engine, dtypes: dict[str, Any]) -> list[Any]:
        return train(engine, engine.shard(stack(), dtypes))

    check_engines_agree(full_precision, {})
    check_engines_agree(full_precision, {"reduce_dtype": FP64})


def bf16_by_hand(reduce: torch.dtype, num_batches: int) -> dict[str, torch.Tensor]:
    """Gradients of a bf16 copy on this rank's rows, summed over batches and averaged over ranks."""
    model = stack().to(BF16)
    total = {name: torch.zeros_like(p, dtype=reduce) for name, p in model.named_parameters()}
    for batch in SHOAL.batches(num_batches):
        model.zero_grad()
        loss_of(model(batch.to(BF16))).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            total[name] += parameter.grad.to(reduce)
    for gradient in total.values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return {name: gradient.float() for name, gradient in total.items()}


@ranks(2)
@pytest.mark.parametrize("reduce", [BF16, FP32])
def test_gradients_are_those_of_a_copy_in_the_compute_dtype(reduce: torch.dtype) -> None:
    model = SHOAL.shard(stack(), {"param_dtype": BF16, "reduce_dtype": reduce})
    loss_of(model(SHOAL.batches(1)[0])).backward()
    expected = bf16_by_hand(reduce, 1)
    check_same(in_full(gradients(model)), expected, exact=True, where="by hand")


def accumulated(engine: Engine, dtypes: dict[str, Any], reshard: bool) -> list[Any]:
    model = engine.shard(stack(), dtypes)
    model.set_reshard_after_backward(reshard)
    seen = []
    for index, batch in enumerate(engine.batches(4)):
        model.set_requires_gradient_sync(index == 3)
        if index == 3:
            model.set_reshard_after_backward(True)
        loss_of(model(batch)).backward()
    seen.append(gradients(model))
    return seen


@ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("policy", ["none", "param", "param, reduce", "half, reduce", "reduce"])
def test_accumulation_without_sync_is_as_precise_as_in_torch(policy: str, reshard: bool) -> None:
    check_engines_agree(accumulated, POLICIES[policy], reshard, plain=False)


@ranks(2)
def test_accumulation_without_sync_is_in_the_reduce_dtype() -> None:
    model = SHOAL.shard(stack(), POLICIES["param, reduce"])
    for index, batch in enumerate(SHOAL.batches(4)):
        model.set_requires_gradient_sync(index == 3)
        loss_of(model(batch)).backward()
    found = in_full(gradients(model))
    check_same(found, bf16_by_hand(FP32, 4), exact=True, where="summed in fp32")
    coarse = bf16_by_hand(BF16, 4)
    # Otherwise this test could not tell the one sum from the other.
    assert any(not torch.equal(found[name], value) for name, value in coarse.items())


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


@dataclass
class Record:
    value: torch.Tensor
    label: str


def describe(value: Any) -> Any:
    """Types of containers and dtypes of tensors, in their nesting."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    if isinstance(value, Record):
        return ("Record", describe(value.value), value.label)
    if isinstance(value, dict):
        return (type(value).__name__, [(key, describe(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [describe(item) for item in value])
    return value


def containers(x: torch.Tensor) -> dict[str, Any]:
    return {
        "tensor": x,
        "list": [x, (x, {"deep": x})],
        "named": Pair(x, [x.long(), None]),
        "record": Record(x, "kept"),
        "ordered": OrderedDict(b=x, a=x.bool()),
        "plain": {"double": x.double(), "text": "kept", "number": 1.5, "complex": x + 0j},
        "nothing": None,
    }


class Sorting(nn.Module):
    """Takes and returns containers, and notes what came."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, 3)
        self.notes: list[Any] = []

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.notes.append((describe(args), describe(kwargs)))
        return containers(self.linear(x.to(self.linear.weight.dtype)))


def sorted_containers(engine: Engine, dtypes: dict[str, Any]) -> list[Any]:
    torch.manual_seed(0)
    model = engine.shard(Sorting(), dtypes)
    x = engine.batches(1)[0]
    output = model(x, *containers(x).values(), **containers(x))
    loss_of(output["list"][1][1]["deep"]).backward()
    return [model.notes, describe(output), gradients(model)]


@ranks(2)
@pytest.mark.parametrize("cast", [True, False])
@pytest.mark.parametrize("output", [None, BF16, FP64])
def test_containers_are_cast_inside(cast: bool, output: torch.dtype | None) -> None:
    dtypes = {"param_dtype": BF16, "output_dtype": output, "cast_forward_inputs": cast}
    check_engines_agree(sorted_containers, dtypes, plain=False)


def fed_uncast(engine: Engine) -> Any:
    dtypes = {"param_dtype": BF16, "cast_forward_inputs": False}
    return error_of(lambda: engine.shard(stack(), dtypes)(engine.batches(1)[0]))


@ranks(2)
def test_inputs_that_are_not_cast_meet_parameters_of_another_dtype() -> None:
    check_engines_agree(fed_uncast, plain=False)
    assert isinstance(fed_uncast(SHOAL), RuntimeError)


def nested(engine: Engine) -> list[Any]:
    model = stack(Noting, 3)
    first, second, third = model.blocks
    for block, dtypes in (
        (first, {"param_dtype": BF16, "reduce_dtype": FP32, "output_dtype": FP32}),
        (second, {}),
        (third, {"param_dtype": FP16, "output_dtype": BF16}),
        (model, {"param_dtype": FP32, "output_dtype": FP64}),
    ):
        engine.api.fully_shard(block, mp_policy=engine.policy(**dtypes))
    steps = train(engine, model)
    return [steps, notes(model), model(engine.batches(1)[0]).dtype]


@ranks(2)
def test_each_unit_has_its_own_policy() -> None:
    check_engines_agree(nested, plain=False)


class Normed(nn.Module):
    """Batch statistics in fp32 inside a block that computes in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.norm = nn.BatchNorm1d(DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.linear(x)))


def normed(engine: Engine) -> list[Any]:
    model = stack(Normed, 2)
    fine = engine.policy(param_dtype=FP32, output_dtype=BF16)
    for block in model.blocks:
        engine.api.fully_shard(block.norm, mp_policy=fine)
    return train(engine, engine.shard(model, POLICIES["param, reduce"]))


@ranks(2)
def test_norms_in_full_precision_keep_their_statistics() -> None:
    check_engines_agree(normed, plain=False)


@ranks(2)
def test_buffers_are_left_alone() -> None:
    model = SHOAL.shard(stack(Noting, 1), POLICIES["param, reduce, output"])
    before = {name: (id(b), b.dtype, b.data_ptr()) for name, b in model.named_buffers()}
    loss_of(model(SHOAL.batches(1)[0])).backward()
    after = {name: (id(b), b.dtype, b.data_ptr()) for name, b in model.named_buffers()}
    assert after == before
    assert int(model.blocks[0].count) == 1


def small_frozen(engine: Engine) -> list[Any]:
    """A frozen parameter may have another dtype than those that are trained."""
    model = stack()
    for block in model.blocks:
        block.up.requires_grad_(False).to(BF16)
        block.up.forward = Upcast(block.up)
    return train(engine, engine.shard(model))


class Upcast:
    """A linear layer in the dtype of its weight, for inputs of any."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.layer.weight, self.layer.bias
        return nn.functional.linear(x.to(weight.dtype), weight, bias).to(x.dtype)


@ranks(2)
def test_frozen_parameters_of_another_dtype() -> None:
    check_engines_agree(small_frozen)


def low_precision_weights(engine: Engine, dtypes: dict[str, Any]) -> list[Any]:
    model = engine.shard(stack().to(BF16), dtypes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in engine.batches(2):
        loss_of(model(batch.to(BF16))).backward()
        optimizer.step()
    return [snapshot(model, optimizer)]


@ranks(2)
@pytest.mark.parametrize("dtypes", [{}, {"reduce_dtype": FP32}, {"param_dtype": FP32}])
def test_weights_that_are_stored_in_low_precision(dtypes: dict[str, Any]) -> None:
    check_engines_agree(low_precision_weights, dtypes, plain=False)


def large_gradients(engine: Engine) -> list[Any]:
    """Each rank's gradient fits into fp16, their sum does not."""
    model = engine.shard(nn.Linear(DIM, 3, bias=False), {"param_dtype": FP16})
    (80_000 / dist.get_world_size() * model(torch.ones(1, DIM)).sum()).backward()
    return [gradients(model)]


@ranks(2, 4)
def test_half_precision_sums_do_not_overflow() -> None:
    check_engines_agree(large_gradients, plain=False)
    (found,) = large_gradients(SHOAL)
    weight = found["weight"].full_tensor()
    assert torch.equal(weight, torch.full_like(weight, 80_000 / dist.get_world_size()))


class Recomputed(nn.Module):
    """A block that checkpoints what is inside it."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = Noting(), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def recomputed(engine: Engine, block: Callable[[], nn.Module], around: bool) -> list[Any]:
    model = stack(block, 2)
    model = engine.shard(model, POLICIES["param, reduce, output"])
    if around:
        for child in model.blocks:
            child.forward = Around(child.forward)
    return [train(engine, model), notes(model)]


class Around:
    """Recomputes a module's forward."""

    def __init__(self, forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.forward = forward

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.forward, x, use_reentrant=False)


@ranks(2)
@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "around"])
def test_recomputation_has_the_dtypes_of_the_first_computation(how: str) -> None:
    def block() -> nn.Module:
        return Noting() if how == "around" else Recomputed(how == "reentrant")

    check_engines_agree(recomputed, block, how == "around", plain=False)


@ranks(2)
def test_unsharding_follows_the_policy() -> None:
    model = SHOAL.shard(stack(), {"param_dtype": BF16})
    model.unshard()
    expected = stack().head.weight.to(BF16)
    assert torch.equal(model.head.weight, expected)
    model.reshard()
    assert model.head.weight.dtype is FP32


def policy_object(engine: Engine) -> list[Any]:
    policy = engine.api.MixedPrecisionPolicy(BF16, FP32, FP64, False)
    fields = (
        policy.param_dtype,
        policy.reduce_dtype,
        policy.output_dtype,
        policy.cast_forward_inputs,
    )
    default = engine.policy()
    return [
        fields,
        hash(policy) == hash(engine.api.MixedPrecisionPolicy(*fields)),
        policy == engine.api.MixedPrecisionPolicy(*fields),
        policy == default,
        (default.param_dtype, default.reduce_dtype, default.output_dtype),
        default.cast_forward_inputs,
        error_of(lambda: setattr(policy, "param_dtype", FP32)),
        error_of(lambda: engine.policy(param_type=FP32)),
    ]


@ranks(1)
def test_the_policy_is_a_frozen_value() -> None:
    check_engines_agree(policy_object, plain=False)
