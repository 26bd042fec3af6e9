"""What can be given to `fully_shard`: lists, roots, ties, dtypes; and what classes come out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.tensor import DTensor

from differential import (
    DIM,
    PLAIN,
    SHOAL,
    TORCH,
    Block,
    Engine,
    Stack,
    check_close,
    check_engines_agree,
    copies,
    error_of,
    gradients,
    kind_of,
    loss_of,
    named_parameters,
    seeded,
    snapshot,
    stack,
    train,
    train_beside_plain,
)
from harness import ranks

BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


class Headed(nn.Module):
    """Blocks, then a norm and a head that form one unit though no module holds just the two."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, 5)
        self.runs_head = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x) if self.runs_head else x


def _without_head() -> Headed:
    model = Headed()
    model.runs_head = False
    return model


def _grouped(engine: Engine, make: Callable[[], Headed], **options: Any) -> Any:
    model = seeded(make)
    for block in model.blocks:
        engine.api.fully_shard(block, **options)
    pair = [model.norm, model.head]
    assert engine.api.fully_shard(pair, **options) is pair
    return engine.api.fully_shard(model, **options)


@ranks(2, 4)
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_a_list_of_modules_is_one_unit(reshard_after_forward: bool | None) -> None:
    def run(engine: Engine) -> list[Any]:
        model = _grouped(engine, Headed, reshard_after_forward=reshard_after_forward)
        model.head.unshard()
        kinds = [isinstance(p, DTensor) for p in (model.norm.weight, model.head.weight)]
        model.norm.reshard()
        kinds += [isinstance(p, DTensor) for p in (model.norm.weight, model.head.weight)]
        assert kinds == [False, False, True, True]
        return train_beside_plain(engine, model, Headed)

    check_engines_agree(run, plain=False)


@ranks(4)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_list_of_modules_in_a_smaller_world_between_forward_and_backward(size: int) -> None:
    def run(engine: Engine) -> list[Any]:
        model = _grouped(engine, Headed, reshard_after_forward=size)
        registered = []
        for x in engine.batches(2):
            loss = loss_of(model(x))
            for p in (*model.norm.parameters(), *model.head.parameters()):
                placed = isinstance(p, DTensor) and (p.placements, p.device_mesh.mesh.tolist())
                registered.append([kind_of(p), p.shape, placed, p.requires_grad])
            loss.backward()
            model.zero_grad()
        for buffer in model.buffers():
            buffer.zero_()
        return [registered, train_beside_plain(engine, model, Headed)]

    check_engines_agree(run, plain=False)


@ranks(2, 4)
@pytest.mark.parametrize("num_chunks", [1, 2])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_module_of_a_list_that_runs_later(num_chunks: int, at_once: bool) -> None:
    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        features = model(x)
        if at_once:
            parts = [model.head(chunk).pow(2).mean() for chunk in features.chunk(num_chunks)]
            return torch.stack(parts).mean()
        # To hold one chunk's logits at a time, each has its backward before the next forward.
        middle = features.detach().requires_grad_()
        for chunk in middle.chunk(num_chunks):
            (model.head(chunk).pow(2).mean() / num_chunks).backward()
        assert middle.grad is not None
        return (features * middle.grad).sum()

    def run(engine: Engine) -> list[Any]:
        return train_beside_plain(engine, _grouped(engine, _without_head), _without_head, loss)

    # One reduction for each chunk or one for all of them is the engine's choice.
    check_engines_agree(run, exact=False, plain=False)


@ranks(2)
def test_a_module_of_a_list_that_never_runs() -> None:
    def run(engine: Engine) -> list[Any]:
        model = _grouped(engine, _without_head)
        seen = []
        for x in engine.batches(2):
            loss_of(model(x)).backward()
            seen.append(snapshot(model))
        assert model.head.weight.grad is None
        assert model.norm.weight.grad is not None
        return seen

    check_engines_agree(run, plain=False)


@ranks(2)
@pytest.mark.parametrize("output_dtype", [None, torch.float32], ids=["as_is", "wide"])
def test_a_list_of_modules_in_mixed_precision(output_dtype: torch.dtype | None) -> None:
    def run(engine: Engine) -> list[Any]:
        model = seeded(Headed)
        policy = engine.policy(**BF16, output_dtype=output_dtype)
        engine.api.fully_shard([model.norm, model.head], mp_policy=policy)
        engine.api.fully_shard(model)
        dtypes = []
        for module in (model.norm, model.head):
            module.register_forward_hook(
                lambda _, args, output: dtypes.append((args[0].dtype, output.dtype))
            )
        return [train(engine, model), dtypes]

    check_engines_agree(run, plain=False)


@ranks(2)
def test_lists_that_hold_parents_and_children() -> None:
    def run(engine: Engine) -> list[Any]:
        model = seeded(Headed)
        engine.api.fully_shard([model.blocks[0], model.blocks[0].up, model.head])
        engine.api.fully_shard(model)
        classes = [type(module).__name__ for module in model.modules()]
        return [classes, train_beside_plain(engine, model, Headed)]

    check_engines_agree(run, plain=False)


@ranks(2)
def test_a_list_cannot_be_the_root() -> None:
    def run(engine: Engine) -> list[Any]:
        layers = [nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)]
        engine.api.fully_shard(layers)
        return [error_of(lambda: layers[1](layers[0](engine.batches(1)[0])))]

    (error,) = check_engines_agree(run, plain=False)
    assert isinstance(error, RuntimeError)


class Chain(nn.Module):
    """No parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Stack(num=1), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@ranks(2)
@pytest.mark.parametrize("has_root", [True, False])
def test_several_roots_and_a_root_without_parameters(has_root: bool) -> None:
    def run(engine: Engine) -> list[Any]:
        model = seeded(Chain)
        engine.api.fully_shard(model.first.blocks[0])
        engine.api.fully_shard(model.first)
        engine.api.fully_shard(model.second)
        if has_root:
            engine.api.fully_shard(model)
        loss = loss_of(model(engine.batches(1)[0]))
        kinds = [isinstance(p, DTensor) for p in model.parameters()]
        loss.backward()
        first = gradients(model)
        model.zero_grad()
        return [kinds, first, train_beside_plain(engine, model, Chain)]

    check_engines_agree(run, plain=False)


@ranks(2)
def test_ignored_parameters_stay_as_they_are() -> None:
    def run(engine: Engine) -> list[Any]:
        model = seeded(Stack)
        block = model.blocks[0]
        ignored = {model.head.bias, block.gain, *block.up.parameters()}
        kept = {id(parameter) for parameter in ignored}
        engine.api.fully_shard(block, ignored_params=ignored)
        engine.api.fully_shard(model, ignored_params=ignored)
        assert [n for n, p in model.named_parameters() if not isinstance(p, DTensor)] == [
            "blocks.0.gain",
            "blocks.0.up.weight",
            "blocks.0.up.bias",
            "head.bias",
        ]
        loss_of(model(engine.batches(1)[0])).backward()
        plain = seeded(Stack)
        loss_of(plain(engine.batches(1)[0])).backward()
        # Nobody reduced these: they are this rank's own gradients.
        assert torch.equal(model.head.bias.grad, plain.head.bias.grad)
        model.zero_grad()
        result = train(engine, model)
        assert kept <= {id(parameter) for parameter in model.parameters()}
        return [result, list(model.state_dict())]

    check_engines_agree(run, plain=False)


class Tied(nn.Module):
    """One weight under two names, one module in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(DIM, 6, bias=False)
        self.block = nn.Linear(6, 6)
        self.again = self.block
        self.out = nn.Linear(DIM, 6, bias=False)
        self.out.weight = self.into.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(torch.relu(self.block(self.into(x)))) + self.out(x)


@ranks(2, 4)
@pytest.mark.parametrize("units", ["one", "list", "shared_module_alone"])
def test_tied_parameters(units: str) -> None:
    def run(engine: Engine) -> list[Any]:
        model = seeded(Tied)
        if units == "list":
            engine.api.fully_shard([model.into, model.out])
        if units == "shared_module_alone":
            engine.api.fully_shard(model.block)
        engine.api.fully_shard(model)
        result = train_beside_plain(engine, model, Tied)
        assert model.into.weight is model.out.weight
        assert model.block is model.again
        names = list(named_parameters(model))
        return [result, names, [name for name, _ in model.named_parameters()]]

    check_engines_agree(run, plain=False)


class Quantised(nn.Module):
    """Frozen whole numbers with their scales, beside what is trained."""

    def __init__(self, *, frozen_dtype: torch.dtype = torch.int8) -> None:
        super().__init__()
        weight = (torch.randn(5, DIM) * 20).to(frozen_dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(torch.rand(5, 1), requires_grad=False)
        self.adapter = nn.Linear(DIM, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight.to(x.dtype) * self.scale).t() / 20 + self.adapter(x)


@ranks(2, 4)
@pytest.mark.parametrize(
    "frozen_dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("dtypes", [{}, BF16], ids=["precise", "mixed"])
def test_frozen_parameters_of_other_dtypes(
    frozen_dtype: torch.dtype, dtypes: dict[str, torch.dtype]
) -> None:
    def make() -> Quantised:
        return Quantised(frozen_dtype=frozen_dtype)

    def run(engine: Engine) -> list[Any]:
        model = seeded(make)
        engine.api.fully_shard(model, mp_policy=engine.policy(**dtypes))
        assert model.weight.dtype is frozen_dtype
        if dtypes:
            return train(engine, model)
        return train_beside_plain(engine, model, make)

    check_engines_agree(run, plain=False)


@ranks(2)
def test_trained_parameters_of_several_dtypes() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(DIM, 5), nn.Linear(5, 5).double())
        model[0].register_forward_hook(lambda *args: args[-1].double())
        return model

    def run(engine: Engine) -> tuple[nn.Module, BaseException | None]:
        model = seeded(make)
        sharded = error_of(lambda: engine.api.fully_shard(model))
        return model, sharded or error_of(lambda: loss_of(model(engine.batches(1)[0])).backward())

    (_, expected), (model, got) = (run(engine) for engine in (TORCH, SHOAL))
    assert isinstance(expected, AssertionError)
    # Ours may do what torch's refuses, if it does it right.
    if got is None:
        plain = seeded(make)
        loss_of(plain(PLAIN.batches(1)[0])).backward()
        check_close(model, plain)
    else:
        assert isinstance(got, (AssertionError, NotImplementedError))


@ranks(2)
def test_buffers_are_left_alone() -> None:
    class Gated(nn.Linear):
        def __init__(self) -> None:
            super().__init__(DIM, 5)
            self.register_buffer("gate", torch.ones(5, dtype=torch.float64))
            self.register_buffer("count", torch.zeros(3, dtype=torch.int64), persistent=False)

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return super().forward(input) * self.gate

    def make() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(DIM), nn.Linear(DIM, DIM), Gated())

    def run(engine: Engine) -> list[Any]:
        model = seeded(make)
        buffers = {name: id(buffer) for name, buffer in model.named_buffers()}
        engine.api.fully_shard(model[2], mp_policy=engine.policy(**BF16))
        engine.api.fully_shard(model)
        seen = train(engine, model)
        assert {name: id(buffer) for name, buffer in model.named_buffers()} == buffers
        return [seen, list(model.state_dict())]

    check_engines_agree(run, plain=False)


@ranks(2)
def test_classes_after_sharding() -> None:
    def run(engine: Engine) -> list[Any]:
        model = engine.shard(stack())
        cls = type(model)
        assert isinstance(model, (Stack, engine.api.FSDPModule))
        assert isinstance(model, TorchFSDPModule)
        assert issubclass(engine.api.FSDPModule, TorchFSDPModule)
        assert type(model.blocks[0]) is type(model.blocks[1])
        fresh = cls(num=1)
        assert type(fresh) is Stack
        assert len(fresh.blocks) == 1
        return [
            cls.__name__,
            cls.__mro__.index(Stack) > cls.__mro__.index(engine.api.FSDPModule),
            [type(module).__name__ for module in model.modules()],
            [cls.__name__ for cls in cls.__mro__ if cls.__module__.startswith("torch.nn")],
        ]

    check_engines_agree(run, plain=False)


@ranks(2)
def test_indexing_into_a_sharded_sequential() -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(nn.Linear(DIM, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 4))

    def run(engine: Engine) -> list[Any]:
        model = seeded(make)
        engine.api.fully_shard(model[0])
        engine.api.fully_shard(model)
        head, tail = model[:2], model[2:]
        assert [type(part) for part in (head, tail)] == [nn.Sequential] * 2
        assert head[0] is model[0]
        assert tail[-1].weight is model[-1].weight
        rest = list(model.parameters())[2:]
        assert all(p is q for p, q in zip(tail.parameters(), rest, strict=True))
        return [
            [type(layer).__name__ for layer in model],
            [copies(p) for p in tail.parameters()],
            train_beside_plain(engine, model, make),
        ]

    check_engines_agree(run, plain=False)


@ranks(2)
def test_offload_pins_no_memory_where_no_device_copies_from_it() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is a device to copy to")
    model, plain = SHOAL.shard(stack(), offload_policy=SHOAL.api.CPUOffloadPolicy()), stack()
    loss_of(plain(PLAIN.batches(1)[0])).backward()
    loss_of(model(SHOAL.batches(1)[0])).backward()
    check_close(model, plain)
