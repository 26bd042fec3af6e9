"""What a user's forward and backward may do, on all engines alike."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from harness import ranks
from peers import (
    DIM,
    PLAIN,
    SHOAL,
    TORCH,
    Engine,
    LoggedReduce,
    check_engines_agree,
    check_same,
    error_of,
    gradients,
    inputs,
    log_traffic,
    loss_of,
    mlp,
    snapshot,
    stack,
    train,
)
from shoal.errors import InvariantError


class Choosing(nn.Module):
    """Uses some of its blocks, in the order and as often as told."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(mlp() for _ in range(3))
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
    for order, batch in zip(orders, inputs(len(orders)), strict=True):
        loss = loss_of(model(engine.part(batch), order))
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
        losses = [loss_of(model(engine.part(batch))) for batch in inputs(3)]
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
    for batch in inputs(3):
        output = model(engine.part(batch))
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
        self.inner = mlp()
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
    check_same(found, expected, exact=False, where="plain")


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
    steps = train(engine, model, loss=lambda output: loss_of(unwrap(output)))
    return [steps, all(isinstance(p, DTensor) == engine.is_sharded for p in model.parameters())]


@ranks(2)
@pytest.mark.parametrize("kind", [kind for kind in WRAPS if kind != "one of two"])
def test_tensors_in_containers(kind: str) -> None:
    check_engines_agree(packed, kind)


@ranks(2)
def test_an_output_that_nobody_uses() -> None:
    """Torch's engine gives zeros to the parameters behind it, where there is no gradient."""
    kind = "one of two"
    check_same(packed(SHOAL, kind), packed(PLAIN, kind), exact=False, where="plain")


class Moody(nn.Module):
    """Behaves otherwise in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = mlp(), nn.BatchNorm1d(DIM)
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
    for index, batch in enumerate(inputs(3)):
        if first or index:
            model.eval()
            with MODES[mode]():
                output = model(engine.part(batch))
                seen.append((output + 0).clone())
            model.train()
        loss = loss_of(model(engine.part(batch)))
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
            loss = engine.mean(loss_of(model(engine.part(inputs(1)[0]))))
        return [loss.clone(), train(engine, model)]

    check_same(scenario(SHOAL), scenario(PLAIN), exact=False, where="plain")


def evaluated_inside(engine: Engine, mode: str) -> list[Any]:
    """A forward without gradients between a forward and its backward."""
    model = engine.shard(stack())
    seen: list[Any] = []
    for batch in inputs(2):
        loss = loss_of(model(engine.part(batch)))
        with MODES[mode]():
            seen.append(engine.mean(loss_of(model(engine.part(batch))).clone()))
        loss.backward()
        seen.append(gradients(model))
    return seen


@ranks(2)
@pytest.mark.parametrize("mode", ["no grad", "inference"])
def test_evaluation_between_forward_and_backward(mode: str) -> None:
    check_engines_agree(evaluated_inside, mode)


class Recomputing(nn.Module):
    """A stack that recomputes some part of itself."""

    def __init__(self, where: str, reentrant: bool) -> None:
        super().__init__()
        self.where, self.reentrant = where, reentrant
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Inner(where, self.run) for _ in range(4))
        self.head = nn.Linear(DIM, 3)

    def run(self, function: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return checkpoint(function, x, use_reentrant=self.reentrant)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "everything":
            return self.run(self.compute, x.detach().requires_grad_())
        return self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.where == "pairs of blocks":
            for index in (0, 2):
                x = self.run(self.pair(index), x)
        else:
            for index, block in enumerate(self.blocks):
                is_outside = self.where == "blocks" or (self.where == "some" and index % 2)
                x = self.run(block, x) if is_outside else block(x)
        return self.head(x)

    def pair(self, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: self.blocks[index + 1](self.blocks[index](x))


class Inner(nn.Module):
    """A block that may recompute inside itself, all of it or a layer."""

    def __init__(self, where: str, run: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.where, self.run = mlp(), where, run
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "inside":
            return self.run(self.compute, x)
        return self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        return torch.tanh(self.run(self.layer, x) if self.where == "a layer" else self.layer(x))


def recomputing(engine: Engine, where: str, reentrant: bool) -> list[Any]:
    torch.manual_seed(0)
    return train(engine, engine.shard(Recomputing(where, reentrant)))


@ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "where", ["inside", "a layer", "blocks", "some", "pairs of blocks", "everything"]
)
def test_activation_checkpointing(where: str, reentrant: bool) -> None:
    check_engines_agree(recomputing, where, reentrant, exact=False)


class Adapted(nn.Module):
    """A frozen layer with a small trained one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM).requires_grad_(False)
        self.down = nn.Linear(DIM, 2, bias=False)
        self.up = nn.Linear(2, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.base(x) + self.up(self.down(x)))


def adapted(engine: Engine, frozen: list[str], late: bool) -> list[Any]:
    """Training beside frozen weights; `late` freezes after sharding."""
    model = stack(Adapted)
    shard = engine.shard
    if late:
        model = shard(model)
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    if not late:
        model = shard(model)
    return train(engine, model)


@ranks(2, 4)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("frozen", [[], ["first", "head"], ["blocks.1"], ["blocks.0", "first"]])
def test_adapters_beside_frozen_weights(frozen: list[str], late: bool) -> None:
    check_engines_agree(adapted, frozen, late)


def thawed(engine: Engine) -> list[Any]:
    """Layers that are frozen and trained by turns."""
    model = engine.shard(stack(Adapted))
    seen: list[Any] = []
    for index, batch in enumerate(inputs(4)):
        model.reshard() if engine.is_sharded else None
        model.blocks[0].requires_grad_(index % 2 == 0)
        model.head.requires_grad_(index % 2 == 1)
        loss_of(model(engine.part(batch))).backward()
        seen.append(gradients(model))
        model.zero_grad()
    return seen


@ranks(2)
def test_parameters_that_are_frozen_and_trained_by_turns() -> None:
    check_engines_agree(thawed)


def reduced_elements(engine: Engine) -> list[Any]:
    """How much is reduced, per unit: nothing for a frozen one."""
    model = stack(Adapted)
    model.blocks[1].requires_grad_(False)
    model = engine.shard(model)
    log = log_traffic(model)
    comms = []
    for module in (model, *model.blocks):
        comms.append(LoggedReduce("", log))
        module.set_custom_reduce_scatter(comms[-1])
    loss_of(model(engine.part(inputs(1)[0]))).backward()
    return [sorted(log), [sum(b.numel() for b in comm.buffers) for comm in comms]]


@ranks(2)
def test_frozen_parameters_take_no_gradient_memory() -> None:
    check_engines_agree(reduced_elements, plain=False)


def stepped_in_backward(engine: Engine) -> list[Any]:
    model = engine.shard(stack())
    optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}
    calls: list[bool] = []

    def step(parameter: torch.Tensor) -> None:
        calls.append(parameter.grad is not None)
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    seen: list[Any] = []
    for batch in inputs(3):
        loss = loss_of(model(engine.part(batch)))
        loss.backward()
        seen.append(engine.mean(loss))
    return [*seen, calls, snapshot(model)]


@ranks(2, 4)
def test_optimizers_that_step_in_backward() -> None:
    check_engines_agree(stepped_in_backward)


def scaled(engine: Engine, overflow: bool) -> list[Any]:
    model = engine.shard(stack())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    seen: list[Any] = []
    for index, batch in enumerate(inputs(4)):
        loss = loss_of(model(engine.part(batch)))
        if overflow and index == 1 and (not engine.is_sharded or dist.get_rank() == 1):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        seen.append(gradients(model) if index != 1 else None)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append(scaler.get_scale())
    return [*seen, snapshot(model)]


@ranks(2)
@pytest.mark.parametrize("overflow", [False, True])
def test_gradient_scaling(overflow: bool) -> None:
    check_engines_agree(scaled, overflow)


def clipped(
    engine: Engine, norm_type: float, foreach: bool | None, block: Callable[[], nn.Module] = mlp
) -> list[Any]:
    model = engine.shard(stack(block))
    loss_of(model(engine.part(inputs(1)[0]))).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-2, norm_type, foreach=foreach)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return [norm, gradients(model)]


@ranks(2, 4)
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0])
def test_clipping_by_norm(norm_type: float, foreach: bool | None) -> None:
    check_engines_agree(clipped, norm_type, foreach)


@ranks(2)
@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_by_the_largest_element(foreach: bool | None) -> None:
    """Where no rank's shard is empty, since torch has no such norm of nothing."""
    check_engines_agree(clipped, float("inf"), foreach, linear)


def linear() -> nn.Module:
    return nn.Linear(DIM, DIM)


def input_gradients(engine: Engine, how: str) -> list[Any]:
    """Gradients for inputs alone, and a step after that."""
    model = engine.shard(stack())
    x = engine.part(inputs(1)[0]).clone().requires_grad_()
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
    return [*seen, train(engine, model, 2)]


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
        loss_of(model(engine.part(inputs(1)[0]))).backward()
        seen.append(gradients(model))
        model.zero_grad()
    return seen


class Detaching(nn.Module):
    """Lets no gradient through when told so."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.stop = mlp(), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.detach() if self.stop else x)


@ranks(2)
def test_backward_that_reaches_some_units_only() -> None:
    check_engines_agree(detached)


FUNCTIONS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "grad": lambda m, x: torch.func.grad(lambda y: loss_of(m(y)))(x),
    "vjp": lambda m, x: torch.func.vjp(m, x)[1](torch.ones(len(x), 3))[0],
    "jvp": lambda m, x: torch.func.jvp(m, (x,), (torch.ones_like(x),))[1].detach(),
    "vmap": lambda m, x: torch.func.vmap(m)(x).detach(),
}


def transformed(engine: Engine, name: str) -> list[Any]:
    """A transform of the model, and ordinary steps after it."""
    model = engine.shard(stack())
    found = FUNCTIONS[name](model, engine.part(inputs(1)[0]))
    return [found, gradients(model), train(engine, model, 2)]


@ranks(2)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_transforms_work_or_are_refused(name: str) -> None:
    expected = transformed(TORCH, name)
    try:
        found = transformed(SHOAL, name)
    except NotImplementedError as error:
        assert "torch.func" in str(error)
        return
    check_same(found, expected, exact=True, where=name)


def called_functionally(engine: Engine) -> list[Any]:
    model = engine.shard(stack())
    seen: list[Any] = []
    for batch in inputs(2):
        parameters = dict(model.named_parameters())
        loss = loss_of(torch.func.functional_call(model, parameters, engine.part(batch)))
        loss.backward()
        seen.append([engine.mean(loss), gradients(model)])
    return seen


@ranks(2)
def test_a_functional_call_with_the_models_own_parameters() -> None:
    check_engines_agree(called_functionally)


@ranks(2)
def test_a_functional_call_with_other_parameters_is_right_or_refused() -> None:
    """Torch's engine ignores the parameters it is given."""
    results = []
    for engine in (PLAIN, SHOAL):
        model = engine.shard(stack())
        train(engine, model, 1)
        others = {name: p.detach() * 2 for name, p in model.named_parameters()}
        part = engine.part(inputs(1)[0])
        try:
            output = torch.func.functional_call(model, others, part)
        except (InvariantError, NotImplementedError):
            return
        results.append(engine.mean(loss_of(output)))
    check_same(results[1], results[0], exact=False, where="plain")


@ranks(2)
@pytest.mark.parametrize("how", ["backward", "penalty"])
def test_graphs_of_gradients_are_refused_by_name_and_training_goes_on(how: str) -> None:
    """Torch's engine drops the graph without a word, or reads freed memory."""

    def scenario(engine: Engine) -> list[Any]:
        model = engine.shard(stack())
        x = engine.part(inputs(1)[0]).clone().requires_grad_()
        loss = loss_of(model(x))
        if engine.is_sharded:
            with pytest.raises(NotImplementedError, match="create_graph"):
                if how == "backward":
                    loss.backward(create_graph=True)
                else:
                    torch.autograd.grad(loss, x, create_graph=True)
            model.zero_grad()
        del loss
        return train(engine, model, 2)

    check_same(scenario(SHOAL), scenario(PLAIN), exact=False, where="plain")


def asked_for_shards(engine: Engine) -> list[Any]:
    """The shards are no part of the graph; gradients come to them, not through them."""
    model = engine.shard(stack())
    shards = list(model.blocks[0].parameters())
    loss = loss_of(model(engine.part(inputs(1)[0])))
    return [error_of(lambda: torch.autograd.grad(loss, shards))]


@ranks(2)
def test_gradients_of_shards_cannot_be_asked_for() -> None:
    check_engines_agree(asked_for_shards, plain=False)
