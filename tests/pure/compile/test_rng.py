"""Random numbers are those of eager, and the generator ends where eager leaves it."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from compile_compare import BACKEND, Case, Entry, Given, Program, compare, compiled, leaf, table
from shoal.aot import aot_function, nop


def dropout(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5)


def two_dropouts(x: Tensor) -> Tensor:
    return F.dropout(F.dropout(x, 0.3).sin(), 0.6)


def in_place_dropout(x: Tensor) -> Tensor:
    return F.dropout(x * 2, 0.5, inplace=True)


def rand(x: Tensor) -> Tensor:
    return x * torch.rand(4, 6)


def randn_like(x: Tensor) -> Tensor:
    return x + torch.randn_like(x)


def rand_like_and_dropout(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.rand_like(x) * x, F.dropout(x)


def bernoulli(x: Tensor) -> Tensor:
    return torch.bernoulli(x.sigmoid()) * x


def bernoulli_in_place(x: Tensor) -> Tensor:
    mask = torch.empty(4, 6).bernoulli_(0.4)
    return x * mask


def multinomial(x: Tensor) -> tuple[Tensor, Tensor]:
    picked = torch.multinomial(x.detach().softmax(1), 2)
    return picked, x.gather(1, picked)


def normal_in_place(x: Tensor) -> Tensor:
    return x * torch.empty_like(x).normal_(0, 2)


def uniform_in_place(x: Tensor) -> Tensor:
    return x + torch.empty(6).uniform_(-1, 1)


def randint(x: Tensor) -> Tensor:
    return x[torch.randint(0, 4, (3,))]


def randperm(x: Tensor) -> Tensor:
    return x[torch.randperm(4)]


def unused(x: Tensor) -> Tensor:
    # Nothing reads the draw, but the generator has moved on.
    torch.rand(3)
    return x * torch.rand(4, 6)


def saved_noise(x: Tensor) -> tuple[Tensor, Tensor]:
    noise = torch.rand(4, 6)
    return (x * noise).sin() * noise, noise


def input_filled(x: Tensor, out: Tensor) -> Tensor:
    out.normal_()
    return x * out


def leaf_and_buffer() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 6, requires_grad=True), torch.zeros(4, 6)


DRAWS = (
    dropout,
    two_dropouts,
    in_place_dropout,
    rand,
    randn_like,
    rand_like_and_dropout,
    bernoulli,
    bernoulli_in_place,
    multinomial,
    normal_in_place,
    uniform_in_place,
    randint,
    randperm,
    saved_noise,
)


@table(
    *(Case(fn=fn, inputs=leaf, options={"steps": 2}) for fn in DRAWS),
    Case(fn=input_filled, inputs=leaf_and_buffer, options={"steps": 2}),
    # Dynamo drops a draw that nobody reads before a backend sees it.
    Case(fn=unused, inputs=leaf, options={"steps": 2}, entries=("aot",)),
    torch_differs={
        f"{name}-leaf-aot": "draws again in backward"
        for name in ("two_dropouts", "uniform_in_place", "unused")
    },
)
def test_draws(case: Case, through: Entry) -> None:
    case.check(through)


def noisy(x: Tensor) -> Tensor:
    y = torch.rand_like(x) * x
    return F.dropout(y.exp(), 0.5) * y


def test_backward_draws_nothing() -> None:
    """What the caller drew between forward and backward does not move the mask."""

    def backward(outputs: Tensor, given: Given) -> None:
        torch.rand(7)
        outputs.sum().backward()

    compare(noisy, leaf, steps=2, backward=backward)


def test_seed_set_between_calls() -> None:
    """The same seed gives the same mask in one compiled program."""
    call = compiled(noisy, backend=BACKEND, through="compile")
    (x,) = leaf()
    seen = []
    for seed in (3, 4, 3):
        torch.manual_seed(seed)
        seen.append(call(x))
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])


def test_two_forwards_before_two_backwards() -> None:
    """Each backward uses its own forward's draws."""

    def twice(x: Tensor) -> tuple[Tensor, Tensor]:
        return noisy(x), noisy(x)

    def backward(outputs: tuple[Tensor, Tensor], given: Given) -> None:
        outputs[1].sum().backward(retain_graph=True)
        outputs[0].sum().backward()

    compare(twice, leaf, backward=backward, scenarios=("train",))


@pytest.mark.parametrize("training", [True, False])
def test_module_modes(training: bool) -> None:
    """`train()` and `eval()` are told apart, and only the first draws."""

    def program(module: nn.Module, x: Tensor) -> Tensor:
        return module(x)

    def inputs() -> tuple[nn.Module, Tensor]:
        module = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.RReLU(), nn.Linear(6, 2))
        return module.train(training), torch.randn(4, 6)

    compare(program, inputs, steps=2)


def seeded(x: Tensor) -> Tensor:
    torch.manual_seed(5)
    return x * torch.rand_like(x)


def seeded_without_a_draw(x: Tensor) -> Tensor:
    torch.manual_seed(5)
    return x.sin()


def seeded_between(x: Tensor) -> Tensor:
    first = torch.rand_like(x)
    torch.manual_seed(5)
    return first * x + F.dropout(x) * torch.randn_like(x)


def seeded_twice(x: Tensor) -> Tensor:
    torch.manual_seed(5)
    first = F.dropout(x)
    torch.manual_seed(5)
    return first - F.dropout(x)


def forked(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        noise = torch.rand(6)
    return x * noise + torch.rand(6)


def forked_and_seeded(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        x = F.dropout(x)
    return x


def restored(x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    first = torch.rand_like(x)
    torch.set_rng_state(state)
    return first * x - torch.rand_like(x) * x


ELSEWHERE = torch.Generator().manual_seed(11).get_state()


def set_from_outside(x: Tensor) -> Tensor:
    torch.set_rng_state(ELSEWHERE)
    return x * torch.rand_like(x)


def checkpointed(x: Tensor) -> Tensor:
    block = checkpoint(lambda y: F.dropout(y.sin(), 0.5).cos(), x, use_reentrant=False)
    return cast(Tensor, block)


class Noisy(torch.autograd.Function):
    """Draws in backward, from a state of its own and from the one that is there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        ambient = torch.rand_like(grad)
        torch.manual_seed(3)
        return grad * torch.rand_like(grad) + ambient


def seeded_in_backward(x: Tensor) -> Tensor:
    return cast(Tensor, Noisy.apply(x))


SETTERS = [
    *(seeded, seeded_without_a_draw, seeded_between, seeded_twice, forked, forked_and_seeded),
    *(restored, set_from_outside, checkpointed, seeded_in_backward),
]


def states_of(call: Program, *, between: int) -> list[Tensor]:
    """Results, gradients and what the generator gives next, of three calls in a row."""
    torch.manual_seed(7)
    seen: list[Tensor] = []
    for _ in range(3):
        (x,) = leaf()
        result = call(x)
        torch.rand(between)
        result.sum().backward()
        seen += [result.detach(), cast(Tensor, x.grad), torch.rand(2)]
    return seen


@pytest.mark.parametrize("between", [0, 3])
@pytest.mark.parametrize("program", SETTERS)
def test_a_state_that_the_function_sets_is_set_by_its_graph(program: Program, between: int) -> None:
    """In every call, as in eager, and wherever the generator is before backward."""
    call = aot_function(program, nop)
    expected = states_of(program, between=between)
    for a, b in zip(states_of(call, between=between), expected, strict=True):
        assert torch.equal(a, b)


def test_a_generator_that_the_function_seeds() -> None:
    generator = torch.Generator()

    def program(x: Tensor) -> Tensor:
        first = torch.rand(6, generator=generator)
        generator.manual_seed(3)
        return x * first * torch.rand(6, generator=generator)

    def again(x: Tensor) -> Tensor:
        generator.manual_seed(4)
        return x * torch.rand(6, generator=generator)

    for one in (program, again):
        call = aot_function(one, nop)
        generator.manual_seed(1)
        expected = states_of(one, between=0)
        generator.manual_seed(1)
        for a, b in zip(states_of(call, between=0), expected, strict=True):
            assert torch.equal(a, b)


def test_tracing_leaves_the_generators_as_they_were() -> None:
    def refuse(*_: Any) -> Any:
        raise ValueError("not this one")

    (x,) = leaf()
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="not this one"):
        aot_function(seeded, refuse)(x)
    assert torch.equal(torch.get_rng_state(), before)


def test_graphs_that_set_no_state_read_none() -> None:
    graphs: list[Any] = []

    def keep(module: Any, args: Any) -> Any:
        graphs.append(module)
        return module

    (x,) = leaf()
    aot_function(noisy, keep)(x).sum().backward()
    assert not any("shoal_random" in str(node.target) for g in graphs for node in g.graph.nodes)


def test_a_checkpoint_that_draws_nothing_is_traced() -> None:
    """Attention says that it draws, though it drops nothing."""

    def program(x: Tensor) -> Tensor:
        def attend(y: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(y, y, y)

        kept = checkpoint(attend, x[None, None], use_reentrant=False)
        return F.dropout(cast(Tensor, kept), 0.5)

    compare(program, leaf, through="aot", scenarios=("train",), tolerance=1e-6)
