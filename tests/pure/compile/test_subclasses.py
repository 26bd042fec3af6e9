"""Tensor subclasses that wrap tensors go in and come out as in eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from compile_compare import (
    BACKEND,
    ENTRIES,
    WRAPPED,
    Case,
    Entry,
    Given,
    compare,
    compiled,
    table,
    torch_fails,
)
from shoal.aot import aot_function


class Twin(Tensor):
    """Two tensors of one shape; every op runs on both."""

    a: Tensor
    b: Tensor

    @staticmethod
    def __new__(cls, a: Tensor, b: Tensor) -> Twin:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            a.size(),
            strides=a.stride(),
            storage_offset=a.storage_offset(),
            dtype=a.dtype,
            device=a.device,
            requires_grad=a.requires_grad,
        )

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.a, self.b = a, b

    def __repr__(self, **_: Any) -> str:
        return f"Twin({self.a}, {self.b})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: Any, size: Any, stride: Any) -> Twin:
        return Twin(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sides = []
        for side in ("a", "b"):
            own = tree_map_only(Twin, lambda twin, s=side: getattr(twin, s), (args, kwargs or {}))
            sides.append(func(*own[0], **own[1]))
        if isinstance(sides[0], (tuple, list)):
            made: Any = type(sides[0])(Twin(a, b) for a, b in zip(*sides, strict=True))
        elif isinstance(sides[0], Tensor):
            made = Twin(*sides)
        else:
            made = sides[0]
        return return_and_correct_aliasing(func, args, kwargs or {}, made)


def twin(grad: bool = True) -> Tensor:
    return Twin(torch.randn(4, 6), torch.randn(4, 6)).requires_grad_(grad)


def twins() -> tuple[Tensor, Tensor]:
    return twin(), twin()


def twin_and_plain() -> tuple[Tensor, Tensor]:
    return twin(), torch.randn(4, 6, requires_grad=True)


def nested() -> tuple[Tensor, Tensor]:
    return Twin(twin(False), twin(False)).requires_grad_(), torch.randn(4, 6)


def frozen() -> tuple[Tensor, Tensor]:
    return twin(False), twin(False)


def multiply(x: Tensor, y: Tensor) -> Tensor:
    return x.sin() * y


def several(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x.sum() + y.sum()


def view_out(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).t()


@pytest.mark.parametrize("fn", [multiply, several, view_out])
@pytest.mark.parametrize("inputs", [twins, twin_and_plain, nested, frozen])
def test_wrapped_inputs(fn: Any, inputs: Any) -> None:
    compare(fn, inputs, scenarios=("train", "infer"), ignore=WRAPPED)


def test_wrapper_made_inside() -> None:
    def program(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        made = x.detach() * 2
        return made, y * 2

    compare(program, twin_and_plain, scenarios=("train", "infer"), ignore=WRAPPED)


def one_frozen() -> tuple[Tensor]:
    return (twin(False),)


def one_leaf() -> tuple[Tensor]:
    return (twin(),)


def one_inner() -> Given:
    root = twin()
    return Given(args=(root * 1,), watched={"root": root})


def one_nested() -> tuple[Tensor]:
    return (Twin(twin(False), twin(False)),)


def written(x: Tensor) -> Tensor:
    x.mul_(2)
    return x + 1


def written_without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(2)
    return x + 1


def written_past_autograd(x: Tensor) -> Tensor:
    x.data.mul_(2)
    return x + 1


def written_view(x: Tensor) -> Tensor:
    x[0].mul_(3)
    return x.sin()


def turned(x: Tensor) -> Tensor:
    x.t_()
    return x + 1


def written_and_turned(x: Tensor) -> Tensor:
    x.mul_(2)
    x.t_()
    return x * 2


def inner_written(x: Twin) -> Tensor:
    x.a.mul_(2)
    return x * 3


WRAPPING: dict[str, Any] = {"scenarios": ("train", "infer"), "ignore": WRAPPED}
DYNAMO_BREAKS = {"entries": ("aot",), "options": WRAPPING}
"""For what Dynamo does not put into a graph."""


@table(
    *(
        Case(fn=fn, inputs=inputs, options=WRAPPING)
        for fn in (written, written_without_grad, written_past_autograd, written_view)
        for inputs in (one_frozen, one_leaf, one_inner, one_nested)
    ),
    *(
        Case(fn=fn, inputs=inputs, **DYNAMO_BREAKS)
        for fn in (turned, written_and_turned, inner_written)
        for inputs in (one_frozen, one_inner)
    ),
    torch_differs={
        "written_past*": "does not see the write",
        "*turned-*": "refuses it",
        "inner_written-*": "does not see the write",
        "*-one_nested-*": "asserts",
    },
)
def test_written_wrapper(case: Case, through: Entry) -> None:
    case.check(through)


@pytest.mark.parametrize("through", ENTRIES)
def test_versions_are_counted_once(through: Entry) -> None:
    """The graph writes to the inner tensors: the wrapper's own counter moves as in eager."""
    x, y = one_frozen()[0], one_frozen()[0]
    written(x)
    compiled(written, backend=BACKEND, through=through)(y)
    assert x._version == y._version


def views(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.t(), x[0]


def views_of_one(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y[0], y[1]


def base_and_view(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y, y.t()


def returned(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x * 2


def cut(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.detach(), x.sin().detach(), x.cos()


def parts(x: Twin) -> tuple[Tensor, Tensor]:
    return x.a * 2, x * 3


def part_itself(x: Twin) -> tuple[Tensor, Tensor]:
    return x.a, x * 3


def expanded(x: Tensor) -> Tensor:
    return x.sum().expand(3, 4)


OUTPUTS = (views, views_of_one, base_and_view, returned, cut, parts, part_itself, expanded)


@table(
    *(
        Case(fn=fn, inputs=inputs, options=WRAPPING)
        for fn in OUTPUTS
        for inputs in (one_frozen, one_leaf, one_inner)
    )
)
def test_outputs(case: Case, through: Entry) -> None:
    case.check(through)


@torch_fails("reads functorch's own door")
def test_graphs_see_inner_tensors_alone() -> None:
    """Three inner tensors in, two out, and none of them wraps others."""
    graphs: list[GraphModule] = []

    def keep(module: GraphModule, inputs: list[Any]) -> GraphModule:
        assert all(type(one) is FakeTensor for one in inputs)
        graphs.append(module)
        return module

    out = aot_function(multiply, keep)(*twin_and_plain())
    out.sum().backward()
    for module in graphs:
        nodes = module.graph.find_nodes(op="placeholder")
        assert all(type(node.meta["val"]) is FakeTensor for node in nodes)
    assert len(graphs[0].graph.find_nodes(op="placeholder")) == 3


@pytest.mark.parametrize("through", ENTRIES)
def test_made_of_plain_tensors(through: Entry) -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        return Twin(x.sin(), y * 2) * 2

    call = compiled(program, backend=BACKEND, through=through)
    x, y = torch.randn(3), torch.randn(3)
    assert torch.equal(call(x, y).b, program(x, y).b)  # type: ignore[attr-defined]


@pytest.mark.parametrize("through", ENTRIES)
def test_gradient_that_does_not_come(through: Entry) -> None:
    """Zeros in its place wrap what the gradient would have wrapped."""

    def backward(outputs: Any, given: Given) -> None:
        outputs[0].sum().backward()

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x.sin()

    compare(
        program,
        one_leaf,
        through=through,
        backward=backward,
        scenarios=("train",),
        ignore=WRAPPED,
    )


def test_double_backward_is_refused_when_it_is_asked_for() -> None:
    (x,) = one_leaf()
    out = compiled(lambda x: x * x.sin(), backend=BACKEND, through="aot")(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    assert type(grad) is Twin
    with pytest.raises(RuntimeError, match="double backward"):
        grad.sum().backward()


def test_parameters_that_wrap() -> None:
    layer = torch.nn.Linear(6, 4, bias=False)
    layer.weight = torch.nn.Parameter(Twin(torch.randn(4, 6), torch.randn(4, 6)))
    x = torch.randn(3, 6)
    layer(x).sum().backward()
    want, layer.weight.grad = layer.weight.grad, None
    compiled(layer, backend=BACKEND, through="compile")(x).sum().backward()
    assert type(layer.weight.grad) is Twin
    assert torch.equal(layer.weight.grad.b, want.b)  # type: ignore[union-attr]


@pytest.mark.parametrize("through", ENTRIES)
def test_shared_inner_memory_is_refused_when_written(through: Entry) -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return x + y

    call = compiled(program, backend=BACKEND, through=through)
    a = torch.randn(4, 6)
    with pytest.raises(Exception, match=r"aliased inputs that are mutated.*subclass") as caught:
        call(Twin(a, torch.randn(4, 6)), a.t().view(6, 4).t())
    cause = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(cause, NotImplementedError)


@torch_fails("sizes of wrappers are static in functorch's door")
def test_shared_memory_without_common_elements() -> None:
    both = Twin(torch.randn(4, 6), torch.randn(4, 6))

    def program(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(3)
        y.mul_(2)
        return x + y

    want = Twin(both.a.clone(), both.b.clone())
    out = compiled(program, backend=BACKEND, through="aot")(both[:2], both[2:])
    assert torch.equal(out.a, program(want[:2], want[2:]).a)  # type: ignore[attr-defined]
    assert torch.equal(both.a, want.a)


def test_symbolic_sizes() -> None:
    """One graph for all sizes; the outer sizes are taken from it."""

    def program(x: Any, y: Any) -> Any:
        return (x * y.sum()).t() * x.shape[0]

    call = compiled(program, backend=BACKEND, through="compile", dynamic=True)
    for size in (4, 5, 7):
        x = Twin(torch.randn(size, 6), torch.randn(size, 6)).requires_grad_()
        y = Twin(torch.randn(size, 6), torch.randn(size, 6))
        want, got = program(x, y), call(x, y)
        assert torch.equal(got.b, want.b)
        assert (got.shape, got.stride()) == (want.shape, want.stride())
        (grad,) = torch.autograd.grad(got.sum(), x)
        assert torch.equal(grad.a, torch.autograd.grad(want.sum(), x)[0].a)  # type: ignore[attr-defined]
        assert grad.shape == x.shape
    assert len(torch._dynamo.eval_frame._debug_get_cache_entry_list(program.__code__)) == 1


def test_ragged_tensors() -> None:
    """The offsets are part of the input, of the output and of its gradient."""
    x = torch.nested.nested_tensor(
        [torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged, requires_grad=True
    )

    def program(x: Tensor) -> Tensor:
        return x.sin() * 2

    out = compiled(program, backend=BACKEND, through="compile")(x)
    assert torch.equal(out.values(), program(x).values())
    out.values().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad.values(), x.detach().values().cos() * 2)


def test_tangent_of_another_type_is_refused() -> None:
    """Traced with a wrapped tangent, given a plain one: an error, not a guess."""
    call = compiled(multiply, backend=BACKEND, through="compile")
    out = call(*twins())
    with pytest.raises(RuntimeError, match=r"Expected a .* tangent but got a plain Tensor"):
        out.backward(torch.ones(4, 6))


def test_wrapped_tangent_of_a_plain_output_is_refused() -> None:
    def program(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, y + y

    x, y = compiled(program, backend=BACKEND, through="aot")(*twin_and_plain())
    with pytest.raises(RuntimeError, match="guessed its\nmetadata incorrectly"):
        (x + y).sum().backward()


class Willing(Twin):
    """One whose gradients take the form that is wanted."""

    def __coerce_same_metadata_as_tangent__(self, context: Any, kind: Any = None) -> Tensor:
        return self.a if kind is Tensor else Twin(self.a, self.b)


def test_tangent_that_takes_the_expected_form() -> None:
    x = twin()
    out = compiled(multiply, backend=BACKEND, through="aot")(x, torch.ones(4, 6))
    out.backward(Willing(torch.ones(4, 6), torch.ones(4, 6)))
    assert torch.equal(x.grad.a, x.detach().a.cos())  # type: ignore[attr-defined,union-attr]


def test_type_is_a_guard() -> None:
    """Compiled for plain tensors, then called with wrapped ones."""
    call = compiled(multiply, backend=BACKEND, through="compile")
    x = torch.randn(4, 6)
    assert type(call(x, x)) is Tensor
    out = call(*frozen())
    assert type(out) is Twin
