"""Outputs alias inputs, intermediates and each other as in eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compile_compare import Case, Entry, Given, compare, inner, leaf, plain, table, two_leaves
from shoal.aot import aot_function, nop


def is_input(x: Tensor) -> Tensor:
    return x


def is_input_with_more(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x * 2


def view_of_input(x: Tensor) -> Tensor:
    return x.view(-1)


def views_of_input(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x[1:], x.t(), x.unsqueeze(0)[0, :2]


def as_strided(x: Tensor) -> Tensor:
    return x.as_strided((2, 2), (6, 1), 3)


def expanded(x: Tensor) -> Tensor:
    return x[0].expand(3, 6)


def view_of_intermediate(x: Tensor) -> Tensor:
    return (x * 2).view(-1)


def intermediate_and_view(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y, y[1]


def view_and_intermediate(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y.t(), y


def view_beside_computed(x: Tensor) -> tuple[Tensor, Tensor]:
    """Whoever writes to the view writes to `x`, which eager's backward does not read."""
    return x.t(), (x * 2).sin()


def written_through_a_view(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    z = y.view(-1)
    z.mul_(2)
    return z, y


def detached_and_view(x: Tensor) -> tuple[Tensor, Tensor]:
    """Autograd takes what was detached for the base of its views."""
    y = (x * 2).detach()
    return y.t(), y


def base_detached_and_view(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = x * 2
    z = y.detach()
    return z.t(), z, y


def views_of_detached(x: Tensor) -> tuple[Tensor, ...]:
    """Of one and the same, and of another."""
    y = x.detach()
    return y.t(), y[1:], x.detach().t()


def views_of_intermediate(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y.view(-1), y[:2]


def two_bases(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, z = x * 2, x.sin()
    return y.t(), z[0], y[1:], z[1:]


def same_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y, y


def same_view_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    y = (x * 2).t()
    return y, y


def input_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x


def split(x: Tensor) -> tuple[Tensor, ...]:
    return (x * 2).split(2)


def split_input(x: Tensor) -> tuple[Tensor, ...]:
    return x.split(2)


def unbind(x: Tensor) -> tuple[Tensor, ...]:
    return (x * 2).unbind(0)


def chunk_first(x: Tensor) -> Tensor:
    return (x * 2).chunk(2)[0]


def split_and_base(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    return (y, *y.split(2))


def unsafe_view(x: Tensor) -> Tensor:
    return torch.ops.aten._unsafe_view(x * 2, [6, 4])


def unsafe_split(x: Tensor) -> Any:
    return torch.unsafe_split(x * 2, 2)


def reshape_copy(x: Tensor) -> Tensor:
    return x.t().reshape(-1)


def contiguous_same(x: Tensor) -> Tensor:
    return (x * 2).contiguous()


def detached(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y, y.detach()


def detached_input(x: Tensor) -> Tensor:
    return x.detach()


def detached_view(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y.sin(), y.detach()[1:]


def made_without_grad(x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        y = x * 2
    return y, x * 3


def integers(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.argmax(1), x > 0, x * 2


def nothing(x: Tensor) -> tuple[Any, ...]:
    return None, x * 2, 3, "text", 2.5, None


def nested(x: Tensor) -> dict[str, Any]:
    return {"a": [x + 1, (x * 2, None)], "b": {"c": x.sum()}}


def size_result(x: Tensor) -> tuple[Tensor, torch.Size, int]:
    return x * 2, x.shape, x.stride(0)


def fresh(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ones(3), x * 2


def no_tensor(x: Tensor) -> int:
    return x.shape[0]


def view_of_mutated(x: Tensor) -> tuple[Tensor, Tensor]:
    x.mul_(2)
    return x[1:], x.t()


def mutated_intermediate_views(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    z = y[1:]
    z.add_(1)
    return y, z


def chain_with_input_view(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = x.view(-1)
    return y, y[3:], y * 1


def real_of_complex(x: Tensor) -> Tensor:
    return torch.view_as_real(torch.complex(x, x * 2))


def conjugate(x: Tensor) -> Tensor:
    return torch.complex(x, x * 2).conj().resolve_conj()


def bits(x: Tensor) -> Tensor:
    return (x * 2).detach().view(torch.int32)


def channels_last(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    return y * 2, y


def transposed_result(x: Tensor) -> Tensor:
    return x.t() * 2


def pair_views(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    z = x * y
    return y[0], z[0], x, z, x[1]


class Halved(torch.autograd.Function):
    """Returns its argument as it is, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return grad_outputs[0] * 0.5


def custom_of_input(x: Tensor) -> Tensor:
    return Halved.apply(x)


def view_of_custom(x: Tensor) -> tuple[Tensor, Tensor]:
    return Halved.apply(x).t(), x * 2


def custom_of_intermediate(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return Halved.apply(y), y


def seen_without_grad(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = x * 2
    with torch.no_grad():
        return x.t(), y.t(), y


def copied_without_grad(x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        copy = x.t().reshape(-1)
    return copy, x * 2


def turned_in_place(x: Tensor) -> Tensor:
    y = x * 2
    y.t_()
    return y


def views_of_turned(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    y.t_()
    return y[0], y[1:]


def moved_bits(x: Tensor) -> Tensor:
    bits = x.detach().view(torch.int32)
    bits.t_()
    return bits


def moved_view_of_detached(x: Tensor) -> tuple[Tensor, Tensor]:
    base = x.detach()
    view = base[:2]
    view.unsqueeze_(0)
    return view, base


def moved_and_views_of_it(x: Tensor) -> tuple[Tensor, ...]:
    """Views of it as it was, and as it is."""
    base = x.detach()
    before = base[1:]
    base.t_()
    between = base[1:]
    base.unsqueeze_(1)
    return before, base, between, base[0]


def moved_view_of_written(x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        x.mul_(2)
    view = x.detach().transpose(0, 1)
    view.unsqueeze_(0)
    return x.detach().view(torch.int32), view


def moved_by_strides(x: Tensor) -> tuple[Tensor, Tensor]:
    base = x.detach()
    view = base[1:]
    view.as_strided_((2, 2), (1, 1))
    return view, base


def moved_in_many_ways(x: Tensor) -> tuple[Tensor, ...]:
    view = x.detach()[:1]
    view.swapaxes_(0, 1).unsqueeze_(-1).squeeze_((1, 2))
    other = view[1:]
    other.unsqueeze_(0).squeeze_()
    return view, other, view.expand(2, -1)


def moved_argument(x: Tensor) -> tuple[Tensor, ...]:
    """What was taken of an argument before it was moved is taken of it as it is afterwards."""
    with torch.no_grad():
        x.zero_()
    first = x.detach().t()
    x.unsqueeze_(0)
    second = x.detach()[0]
    x.transpose_(0, 1)
    x.squeeze_(1)
    x.t_()
    return first, second, x.detach()


def new_leaves(x: Tensor) -> tuple[Tensor, ...]:
    made = torch.ones(3).requires_grad_()
    return x.detach().requires_grad_(), made, made.view(3, 1), x * 2


def non_contiguous() -> tuple[Tensor]:
    return (torch.randn(6, 4).t().requires_grad_(),)


def gapped() -> Given:
    root = torch.randn(8, 6, requires_grad=True)
    return Given(args=((root * 1)[::2],), watched={"root": root})


def gapped_plain() -> tuple[Tensor]:
    return (torch.randn(4, 6)[:, ::2],)


ALIASES = (
    is_input,
    is_input_with_more,
    views_of_input,
    view_of_intermediate,
    intermediate_and_view,
    view_and_intermediate,
    view_beside_computed,
    written_through_a_view,
    detached_and_view,
    base_detached_and_view,
    views_of_detached,
    views_of_intermediate,
    two_bases,
    same_twice,
    same_view_twice,
    input_twice,
    chain_with_input_view,
)
VALUES = (
    unsafe_view,
    unsafe_split,
    reshape_copy,
    contiguous_same,
    detached,
    detached_input,
    detached_view,
    made_without_grad,
    integers,
    nothing,
    nested,
    size_result,
    fresh,
    no_tensor,
    mutated_intermediate_views,
    real_of_complex,
    conjugate,
    bits,
    channels_last,
    transposed_result,
)
MULTIPLE = (split, split_input, unbind, chunk_first, split_and_base)


@table(
    *(Case(fn=fn, inputs=inputs) for fn in ALIASES for inputs in (plain, leaf, inner)),
    Case(fn=view_of_input, inputs=leaf),
    Case(fn=expanded, inputs=inner),
    Case(fn=as_strided, inputs=inner),
    Case(fn=views_of_input, inputs=non_contiguous),
    Case(fn=views_of_input, inputs=gapped),
    Case(fn=view_of_mutated, inputs=inner),
    Case(fn=view_of_mutated, inputs=plain),
    Case(fn=pair_views, inputs=two_leaves),
    torch_differs={"same_view_twice-*-aot": "returns two objects for one"},
)
def test_aliases(case: Case, through: Entry) -> None:
    case.check(through)


@table(
    *(Case(fn=fn, inputs=leaf) for fn in VALUES),
    *(Case(fn=fn, inputs=non_contiguous) for fn in (reshape_copy, contiguous_same, nested)),
)
def test_kinds_of_output(case: Case, through: Entry) -> None:
    case.check(through)


@table(
    *(
        Case(fn=fn, inputs=inputs)
        for fn in (seen_without_grad, copied_without_grad, turned_in_place, views_of_turned)
        for inputs in (plain, leaf, inner)
    ),
    torch_differs={"*_without_grad-*": "records it", "*turned*": "returns a view"},
)
def test_views_that_autograd_does_not_record(case: Case, through: Entry) -> None:
    case.check(through)


# Eager counts changes of a view's shape as writes to its base, a graph does not.
UNCOUNTED = {"ignore": ("*.bumped",)}
MOVED = (
    moved_bits,
    moved_view_of_detached,
    moved_and_views_of_it,
    moved_view_of_written,
    moved_by_strides,
    moved_in_many_ways,
)


@table(
    *(
        Case(fn=fn, inputs=inputs, options=UNCOUNTED)
        for fn in MOVED
        for inputs in (plain, leaf, gapped_plain)
    ),
    # Dynamo does not let arguments change their shape.
    *(
        Case(fn=moved_argument, inputs=inputs, options=UNCOUNTED, entries=("aot",))
        for inputs in (plain, gapped_plain)
    ),
    torch_differs={"*": "ties the results otherwise, or reads strided memory as if it were dense"},
)
def test_views_whose_shape_changes_in_place(case: Case, through: Entry) -> None:
    case.check(through)


# Eager forbids writing to what a custom function returned as it is, because its backward would be
# lost. A graph keeps that backward: what it returns is no view for autograd, but shares the memory.
CUSTOM = {"scenarios": ("train",), "ignore": ("*: relation *",)}


@table(
    *(
        Case(fn=fn, inputs=inputs, options=CUSTOM)
        for fn in (custom_of_input, view_of_custom, custom_of_intermediate)
        for inputs in (leaf, inner)
    ),
    torch_differs={"*": "loses the custom backward, or requires_grad without gradients"},
)
def test_backward_of_a_custom_function_is_kept(case: Case, through: Entry) -> None:
    case.check(through)


@table(
    *(
        # Dynamo refuses to return such leaves.
        Case(fn=new_leaves, inputs=inputs, entries=("aot",), options={"scenarios": ("train",)})
        for inputs in (plain, leaf, inner)
    ),
    torch_differs={"*": "returns no leaves"},
)
def test_new_leaves(case: Case, through: Entry) -> None:
    case.check(through)


# Eager forbids writing to one of several views made at once. A graph may return each as a tensor
# of its own, which lifts the ban: what the caller can rely on are memory and values.
UNTIED = {"scenarios": ("train", "infer"), "ignore": ("*: relation (out*",)}


@table(
    *(
        Case(fn=fn, inputs=inputs, options=UNTIED)
        for fn in MULTIPLE
        for inputs in (plain, leaf, inner)
    )
)
def test_views_that_come_several_at_once(case: Case, through: Entry) -> None:
    case.check(through)


def test_view_taken_without_grad() -> None:
    """It says that it requires a gradient, as its base does, and has no history."""

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 3
        with torch.no_grad():
            view = y.view(-1)
        return y.sum(), view

    compare(program, leaf, through="aot", scenarios=("train",))


def test_detached_output_with_a_new_history_is_refused() -> None:
    def program(x: Tensor) -> Tensor:
        return x.detach().add_(x)

    with pytest.raises(NotImplementedError, match="detached"):
        aot_function(program, nop)(torch.ones(3, requires_grad=True))


@pytest.mark.parametrize("through", ["aot", "compile"])
def test_an_output_that_was_written_through_a_view_may_be_written_to(through: Entry) -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        y.view(-1).relu_()
        return x * 3, y

    compare(program, leaf, through=through, scenarios=("train", "edit"))


def constant_and_view(x: Tensor) -> tuple[Tensor, Tensor]:
    made = torch.tensor([1.0, 2.0])
    return made, made[:1]


def views_of_a_constant(x: Tensor) -> tuple[Tensor, Tensor]:
    made = torch.tensor([1.0, 2.0])
    return made[:1], made[1:]


def constant_written_through_a_view(x: Tensor) -> tuple[Tensor, Tensor]:
    made = torch.tensor([1.0, 2.0])
    shown = made.view(2, 1)
    shown.mul_(x.sum())
    return made, shown


@table(
    *(
        Case(fn=fn, inputs=leaf, options={"steps": 2})
        for fn in (constant_and_view, views_of_a_constant)
    ),
    # Without gradients, the two come back as views of one base.
    Case(
        fn=constant_written_through_a_view,
        inputs=leaf,
        options={"steps": 2, "scenarios": ("train", "edit")},
    ),
)
def test_constants(case: Case, through: Entry) -> None:
    """Each call makes them anew, whatever became of the last ones."""
    case.check(through)
