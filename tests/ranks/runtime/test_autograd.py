"""What a user's forward and backward may do, on all engines alike."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from differential import (
    DIM,
    PLAIN,
    SHOAL,
    Block,
    Engine,
    check_engines_agree,
    check_like_plain,
    gradients,
    loss_of,
    snapshot,
    stack,
    train,
)
from harness import ranks
from shoal.errors import InvariantError
from shoal.layout import Block as Blocks
from shoal.layout import Even, Flat, Layout, Rows, Whole


class Choosing(nn.Module):
    """Uses some of its blocks, in the order and as often as told."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.spare = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        x = self.first(x)
        for index in order:
            x = self.blocks[index](x)
        return self.head(self.spare(x) if 1 in order else x)


def choosing(engine: Engine, orders: list[tuple[int, ...]], **options: Any) -> list[Any]:
    """A step for every order."""
    torch.manual_seed(0)
    model = engine.shard(Choosing(), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: list[Any] = []
    for order, batch in zip(orders, engine.batches(len(orders)), strict=True):
        loss = loss_of(model(batch, order))
        loss.backward()
        seen.append([engine.mean(loss), gradients(model)])
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, snapshot(model, optimizer)]


@ranks(2, 4)
@pytest.mark.parametrize(
    "orders",
    [
        [(0, 1, 2), (0, 2), (2, 0), (1,), (), (0, 1, 2)],
        [(), (2,), (2, 1), (2, 1, 0), (0, 1, 2), (0, 1, 2)],
    ],
    ids=["fewer", "more"],
)
def test_parameters_that_a_step_does_not_use(orders: list[tuple[int, ...]]) -> None:
    check_engines_agree(choosing, orders)


@ranks(2)
@pytest.mark.parametrize("reshard", [None, True, False])
def test_modules_that_are_used_several_times(reshard: bool | None) -> None:
    orders = [(0, 0), (0, 1, 0, 1, 0), (2, 2, 2), (0, 1, 2)]

    def scenario(engine: Engine) -> list[Any]:
        return choosing(engine, orders, reshard_after_forward=reshard)

    # Torch reduces after each use and adds what was reduced, so that the last bits may differ.
    check_engines_agree(scenario, exact=False)


def several_forwards(engine: Engine, how: str) -> list[Any]:
    model = engine.shard(stack())
    seen = []
    for _ in range(2):
        losses = [loss_of(model(batch)) for batch in engine.batches(3)]
        if how == "summed":
            torch.stack(losses).sum().backward()
        elif how == "in order":
            for loss in losses:
                loss.backward()
        elif how == "backwards":
            for loss in reversed(losses):
                loss.backward()
        elif how == "only the first":
            losses[0].backward()
        seen.append(gradients(model))
    return seen


@ranks(2)
@pytest.mark.parametrize("how", ["summed", "in order", "backwards", "only the first"])
def test_several_forwards_before_a_backward(how: str) -> None:
    check_engines_agree(several_forwards, how, exact=False)


def several_losses(engine: Engine, how: str) -> list[Any]:
    model = engine.shard(stack(Chatty, 2))
    seen = []
    for batch in engine.batches(3):
        output = model(batch)
        losses = [loss_of(column) for column in output.split(1, dim=1)]
        losses.append(losses[0] + losses[1])
        if how == "together":
            torch.autograd.backward(losses)
        elif how == "one after the other":
            for index, loss in enumerate(losses):
                loss.backward(retain_graph=index < len(losses) - 1)
        elif how == "the same twice":
            losses[0].backward(retain_graph=True)
            losses[0].backward(retain_graph=True)
        elif how == "with a loss from inside":
            (losses[0] + sum(block.extra for block in model.blocks)).backward()
        elif how == "only a loss from inside":
            model.blocks[0].extra.backward()
        seen.append(gradients(model))
    return seen


class Chatty(nn.Module):
    """Keeps a loss of its own, as routers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()
        self.extra = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        self.extra = y.square().mean()
        return y * 1.0


@ranks(2)
@pytest.mark.parametrize("how", ["together", "one after the other", "the same twice"])
def test_several_losses(how: str) -> None:
    check_engines_agree(several_losses, how, exact=False)


@ranks(2)
def test_a_loss_from_inside_beside_the_last_one() -> None:
    check_engines_agree(several_losses, "with a loss from inside", exact=False)


@ranks(2)
def test_a_loss_from_inside_alone_is_right_or_refused() -> None:
    """Backward enters a unit behind its outputs; torch's engine reads freed memory then."""
    expected = several_losses(PLAIN, "only a loss from inside")
    try:
        found = several_losses(SHOAL, "only a loss from inside")
    except InvariantError:
        return
    check_like_plain(found, expected)


class Both(NamedTuple):
    value: torch.Tensor
    rest: Any


@dataclass
class Held:
    value: torch.Tensor
    rest: Any


WRAPS: dict[str, tuple[Callable[..., Any], Callable[[Any], torch.Tensor]]] = {
    "one of two": (lambda x, y: (x, y), lambda o: o[0]),
    "tuple": (lambda x, y: (x, (y, None)), lambda o: o[0] + o[1][0]),
    "list": (lambda x, y: [1, [x, y]], lambda o: o[1][0] + o[1][1]),
    "dict": (lambda x, y: {"a": {"b": x}, "c": [y]}, lambda o: o["a"]["b"] + o["c"][0]),
    "NamedTuple": (Both, lambda o: o.value + o.rest),
    "dataclass": (Held, lambda o: o.value + o.rest),
    "dataclass inside": (lambda x, y: [Held(x, [y])], lambda o: o[0].value + o[0].rest[0]),
    "not differentiable": (lambda x, y: (x, y.detach(), y.argmax()), lambda o: o[0] + o[1]),
    "the same twice": (lambda x, y: (x, x), lambda o: o[0] + o[1]),
}


class Wrapping(nn.Module):
    """Takes and returns what a user packs tensors into."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.wrap, self.unwrap = WRAPS[kind]
        self.left, self.right = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, packed: Any) -> Any:
        x = self.unwrap(packed)
        return self.wrap(torch.tanh(self.left(x)), self.right(x))


class Packed(nn.Module):
    """Blocks that hand packed tensors on."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = Wrapping(kind)
        self.blocks = nn.ModuleList(Wrapping(kind) for _ in range(2))

    def forward(self, x: torch.Tensor) -> Any:
        packed = self.first(self.first.wrap(x, x))
        for block in self.blocks:
            packed = block(packed)
        return packed


def packed(engine: Engine, kind: str) -> list[Any]:
    torch.manual_seed(0)
    model = engine.shard(Packed(kind))
    unwrap = WRAPS[kind][1]
    steps = train(engine, model, loss=lambda model, x: loss_of(unwrap(model(x))))
    return [steps, all(isinstance(p, DTensor) == engine.is_sharded for p in model.parameters())]


@ranks(2)
@pytest.mark.parametrize("kind", [kind for kind in WRAPS if kind != "one of two"])
def test_tensors_in_containers(kind: str) -> None:
    check_engines_agree(packed, kind)


@ranks(2)
def test_an_output_that_nobody_uses() -> None:
    """Torch's engine gives zeros to the parameters behind it, where there is no gradient."""
    kind = "one of two"
    check_like_plain(packed(SHOAL, kind), packed(PLAIN, kind))


class Moody(nn.Module):
    """Behaves otherwise in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = Block(), nn.BatchNorm1d(DIM)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(self.inner(x)))


MODES: dict[str, Callable[[], Any]] = {
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
    "grad": torch.enable_grad,
}


def evaluated(engine: Engine, mode: str, first: bool) -> list[Any]:
    """Evaluation before every step, or only later; with dropout, so that every draw counts."""
    model = engine.shard(stack(Moody))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(dist.get_rank())
    seen: list[Any] = []
    for index, batch in enumerate(engine.batches(3)):
        if first or index:
            model.eval()
            with MODES[mode]():
                output = model(batch)
                seen.append((output + 0).clone())
            model.train()
        loss = loss_of(model(batch))
        loss.backward()
        seen.append(engine.mean(loss))
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, snapshot(model, optimizer)]


@ranks(2)
@pytest.mark.parametrize(
    ("mode", "first"),
    [("no grad", True), ("no grad", False), ("grad", True), ("grad", False), ("inference", False)],
)
def test_evaluation_between_steps(mode: str, first: bool) -> None:
    check_engines_agree(evaluated, mode, first, plain=False)


@ranks(2)
def test_inference_before_the_first_step() -> None:
    """Torch's engine cannot train after that: its buffers were made in inference mode."""

    def scenario(engine: Engine) -> list[Any]:
        model = engine.shard(stack())
        with torch.inference_mode():
            loss = engine.mean(loss_of(model(engine.batches(1)[0])))
        if engine.is_sharded:
            model.reshard()  # before the optimizer looks for parameters
        return [loss.clone(), train(engine, model)]

    check_like_plain(scenario(SHOAL), scenario(PLAIN))


@ranks(2)
@pytest.mark.parametrize("layout", [Even(), Flat(), Rows(), Blocks(4), Whole()], ids=repr)
@pytest.mark.parametrize("change", ["assign", "cast"])
def test_inference_is_the_first_to_notice_other_memory(layout: Layout, change: str) -> None:
    """Shards that are moved in inference mode train on."""

    def scenario(engine: Engine) -> list[Any]:
        model = engine.shard(stack(), layout=layout)
        train(engine, model)
        if change == "assign":
            copies = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict(copies, assign=True)
        else:
            model.double().float()
        with torch.inference_mode():
            loss = engine.mean(loss_of(model(engine.batches(1)[0])))
        if engine.is_sharded:
            model.reshard()
        return [loss.clone(), train(engine, model)]

    check_like_plain(scenario(SHOAL), scenario(PLAIN))


def evaluated_inside(engine: Engine, mode: str) -> list[Any]:
    """A forward without gradients between a forward and its backward."""
    model = engine.shard(stack())
    seen: list[Any] = []
    for batch in engine.batches(2):
        loss = loss_of(model(batch))
        with MODES[mode]():
            seen.append(engine.mean(loss_of(model(batch)).clone()))
        loss.backward()
        seen.append(gradients(model))
    return seen


@ranks(2)
@pytest.mark.parametrize("mode", ["no grad", "inference"])
def test_evaluation_between_forward_and_backward(mode: str) -> None:
    check_engines_agree(evaluated_inside, mode)


def input_gradients(engine: Engine, how: str) -> list[Any]:
    """Gradients for inputs alone, and a step after that."""
    model = engine.shard(stack())
    x = engine.batches(1)[0].clone().requires_grad_()
    loss = loss_of(model(x))
    if how == "grad":
        (found,) = torch.autograd.grad(loss, x)
    else:
        loss.backward(inputs=[x])
        found = x.grad
    assert found is not None
    scale = dist.get_world_size() if engine.is_sharded else 1
    rows = found if engine.is_sharded else found.chunk(dist.get_world_size())[dist.get_rank()]
    seen = [rows / scale, gradients(model)]
    return [*seen, train(engine, model, engine.batches(2))]


@ranks(2)
@pytest.mark.parametrize("how", ["grad", "backward"])
def test_gradients_of_inputs_alone(how: str) -> None:
    check_engines_agree(input_gradients, how)


def detached(engine: Engine) -> list[Any]:
    """Backward reaches the last block only."""
    model = engine.shard(stack(Detaching, 3))
    seen: list[Any] = []
    for stops in ([False, True, False], [False, False, True], [False, False, False]):
        for block, stop in zip(model.blocks, stops, strict=True):
            block.stop = stop
        loss_of(model(engine.batches(1)[0])).backward()
        seen.append(gradients(model))
        model.zero_grad()
    return seen


class Detaching(nn.Module):
    """Lets no gradient through when told so."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.stop = Block(), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.detach() if self.stop else x)


@ranks(2)
def test_backward_that_reaches_some_units_only() -> None:
    check_engines_agree(detached)
