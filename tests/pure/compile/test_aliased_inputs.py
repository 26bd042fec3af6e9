"""Arguments that share memory are seen, and left, as eager sees and leaves them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from compile_compare import Case, Entry, Given, compare, table
from shoal.aot import aot_function, nop


def reads(x: Tensor, y: Tensor) -> Tensor:
    return x * 2 + y.sum()


def first_written(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(2)
    return y.sum() + x


def second_written(x: Tensor, y: Tensor) -> Tensor:
    y.add_(1)
    return x.sin() * 2


def both_written(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x.mul_(2)
    y.add_(1)
    return x + 1, y * 3


def written_and_returned(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x.mul_(2)
    return x, y


def views_returned(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    y.add_(1)
    return x[0:1], y.view(-1)


def written_without_grad(x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(2)
    return y.sum() * 2


def duplicate_plain() -> tuple[Tensor, Tensor]:
    x = torch.randn(4, 6)
    return x, x


def duplicate_leaf() -> tuple[Tensor, Tensor]:
    x = torch.randn(4, 6, requires_grad=True)
    return x, x


def duplicate_inner() -> Given:
    root = torch.randn(4, 6, requires_grad=True)
    x = root * 1
    return Given(args=(x, x), watched={"root": root})


def overlapping_plain() -> Given:
    base = torch.randn(6, 6)
    return Given(args=(base[:4], base[2:]), watched={"base": base})


def overlapping_inner() -> Given:
    root = torch.randn(6, 6, requires_grad=True)
    base = root * 1
    return Given(args=(base[:4], base[2:]), watched={"root": root, "base": base})


def overlapping_gapped() -> Given:
    """Both leave out every other row; torch takes that for tensors that have none in common."""
    base = torch.randn(8, 6)[::2]
    return Given(args=(base, base[1:3]), watched={"base": base})


def interleaved_plain() -> Given:
    base = torch.randn(4, 6)
    return Given(args=(base[:, ::2], base[:, 1::2]), watched={"base": base})


def disjoint_plain() -> Given:
    base = torch.randn(8, 6)
    return Given(args=(base[:4], base[4:]), watched={"base": base})


def disjoint_inner() -> Given:
    root = torch.randn(8, 6, requires_grad=True)
    base = root * 1
    return Given(args=(base[:4], base[4:]), watched={"root": root, "base": base})


def base_and_view_plain() -> tuple[Tensor, Tensor]:
    base = torch.randn(4, 6)
    return base, base[1:3]


def base_and_view_inner() -> Given:
    root = torch.randn(4, 6, requires_grad=True)
    base = root * 1
    return Given(args=(base, base.t()), watched={"root": root})


def leaf_and_view() -> Given:
    root = torch.randn(4, 6, requires_grad=True)
    return Given(args=(root, root[1:3]), watched={})


def view_and_base_inner() -> Given:
    root = torch.randn(4, 6, requires_grad=True)
    base = root * 1
    return Given(args=(base[1:3], base), watched={"root": root})


def detached_pair() -> Given:
    root = torch.randn(4, 6, requires_grad=True)
    x = root * 1
    return Given(args=(x.detach(), x), watched={"root": root})


def detached_leaf() -> Given:
    root = torch.randn(4, 6, requires_grad=True)
    return Given(args=(root.detach(), root), watched={"root": root})


def detached_view_of_a_leaf() -> Given:
    root = torch.randn(6, 6, requires_grad=True)
    return Given(args=(root.detach()[:4], root[2:]), watched={"root": root})


def leaf_views() -> Given:
    root = torch.randn(6, 6, requires_grad=True)
    return Given(args=(root[:4], root[2:]), watched={"root": root})


def other_dtype() -> tuple[Tensor, Tensor]:
    x = torch.randn(4, 6)
    return x, x.view(torch.int32)


TANGENTS = "counts one tangent too many or too few for a shared base"
REPLAY = "replays a view on the base that it was not made from"

PLAIN = (
    duplicate_plain,
    overlapping_plain,
    overlapping_gapped,
    interleaved_plain,
    disjoint_plain,
    base_and_view_plain,
)
INNER = (
    duplicate_inner,
    overlapping_inner,
    disjoint_inner,
    base_and_view_inner,
    view_and_base_inner,
)
# A view that cannot be taken is a ValueError on fake tensors, and a RuntimeError on others.
IMPOSSIBLE = {"ignore": ("*: error",)}
WRITERS = (first_written, second_written, both_written, written_and_returned, views_returned)


@table(
    *(Case(fn=reads, inputs=inputs) for inputs in (*PLAIN, *INNER, duplicate_leaf, leaf_views)),
    *(
        Case(fn=fn, inputs=inputs, options=IMPOSSIBLE if fn is views_returned else {})
        for fn in WRITERS
        for inputs in (*PLAIN, *INNER)
    ),
    torch_differs={
        "second_written-disjoint_inner-*": "saves a part of the base that the graph overwrites",
        "both_written-*_inner-*": TANGENTS,
        "views_returned-overlapping_*": REPLAY,
        "views_returned-*_and_*": REPLAY,
        "written_and_returned-*-aot": "returns a new view of the base instead of the argument",
    },
)
def test_two_names_of_one_memory(case: Case, through: Entry) -> None:
    case.check(through)


@table(
    Case(fn=written_without_grad, inputs=duplicate_leaf),
    Case(fn=written_without_grad, inputs=overlapping_inner),
    Case(fn=written_without_grad, inputs=leaf_and_view),
    Case(fn=first_written, inputs=detached_pair, options={"may_refuse": "share"}),
    Case(fn=second_written, inputs=detached_pair, options={"may_refuse": "share"}),
    Case(fn=first_written, inputs=detached_leaf),
    Case(fn=first_written, inputs=detached_view_of_a_leaf),
    Case(fn=written_and_returned, inputs=detached_leaf),
    Case(fn=second_written, inputs=other_dtype, options={"may_refuse": "dtype"}),
    torch_differs={
        "written_without_grad-overlapping_inner-compile": TANGENTS,
        "written_without_grad-leaf_and_view-*": "asserts that all of them are leaves, or none",
        "*-detached_*-*": "asserts that it cannot tell which name carries the gradient",
        "*-other_dtype-*": "asserts that it knows no view of another dtype",
    },
)
def test_hidden_ties(case: Case, through: Entry) -> None:
    case.check(through)


@pytest.mark.parametrize("detach", [Tensor.detach, lambda x: x.data], ids=["detach", "data"])
def test_a_hidden_tie_that_is_given_a_gradient_is_refused(detach: Callable[..., Tensor]) -> None:
    def program(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        x.mul_(w)
        return x * y

    root, w = (torch.randn(4, requires_grad=True) for _ in range(2))
    with pytest.raises(NotImplementedError, match="non-differentiable view input mutations"):
        aot_function(program, nop)(detach(root), root, w)
    with torch.no_grad():
        aot_function(program, nop)(detach(root), root, w)


def three(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x.mul_(2)
    z.add_(y.sum())
    return x * 1, y, z * y


def two_groups(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    a.mul_(2)
    c.add_(1)
    return (b.sum() + d.sum()) * a.sum()


def three_inner() -> Given:
    root = torch.randn(12, requires_grad=True)
    base = root * 1
    return Given(args=(base[0:8], base[4:5], base.view(3, 4)), watched={"root": root, "base": base})


def three_with_stranger() -> tuple[Tensor, Tensor, Tensor]:
    base = torch.randn(8)
    return base[:6], torch.randn(1), base[2:]


def two_pairs() -> Given:
    roots = torch.randn(6, requires_grad=True), torch.randn(6, requires_grad=True)
    one, two = (root * 1 for root in roots)
    return Given(
        args=(one[:4], one[2:], two[:4], two[2:]), watched={"one": roots[0], "two": roots[1]}
    )


@table(
    Case(fn=three, inputs=three_inner),
    Case(fn=three, inputs=three_with_stranger),
    Case(fn=two_groups, inputs=two_pairs),
    torch_differs={"three-three_inner-*": TANGENTS},
)
def test_several_names(case: Case, through: Entry) -> None:
    case.check(through)


def test_a_compiled_program_notices_other_ties() -> None:
    """Compiled for separate inputs, then called with one tensor twice."""

    def program(calls: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        return [both_written(x, y)[1] for x, y in calls]

    def inputs() -> tuple[list[tuple[Tensor, Tensor]]]:
        x, y, z = (torch.randn(4, 6) for _ in range(3))
        return ([(x, y), (z, z), (x, x[:]), (y, z)],)

    compare(program, inputs, scenarios=("infer",))
