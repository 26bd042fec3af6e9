"""Arguments that custom operators write to have the versions that eager gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.aot import aot_function, nop

Program = Callable[..., Any]


@torch.library.custom_op("shoal_writes::add_to", mutates_args=("x",))
def add_to(x: Tensor, y: Tensor) -> None:
    x.add_(y)


@torch.library.custom_op("shoal_writes::both", mutates_args=("x", "z"))
def both(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    x.add_(y)
    z.mul_(2).add_(1)
    return y * 2


@both.register_fake  # type: ignore[attr-defined]
def _(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return torch.empty_like(y)


@torch.library.custom_op("shoal_writes::several", mutates_args=("xs",))
def several(xs: Sequence[Tensor]) -> None:
    for one in xs:
        one.mul_(2)


@torch.library.custom_op("shoal_writes::past", mutates_args=("x",))
def past(x: Tensor) -> None:
    x.numpy()[:] += 1


@torch.library.custom_op("shoal_writes::perhaps", mutates_args=("x",))
def perhaps(x: Tensor, writes: bool) -> None:
    if writes:
        x.mul_(2)


_LIBRARY = torch.library.Library("shoal_writes_bare", "DEF")
_LIBRARY.define("add_to(Tensor(a!) x, Tensor y) -> ()")
_LIBRARY.impl("add_to", lambda x, y: (x.add_(y), None)[1], "CPU")
_LIBRARY.impl("add_to", lambda x, y: None, "Meta")


def once(x: Tensor, y: Tensor, z: Tensor) -> None:
    add_to(x, y)


def twice(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    add_to(x, y)
    add_to(x, z)
    return x * 2


def to_a_view(x: Tensor, y: Tensor, z: Tensor) -> None:
    add_to(x[1:3], y[1:3])


def to_two(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return both(x, y, z) + x


def to_a_list(x: Tensor, y: Tensor, z: Tensor) -> None:
    several([x, z])


def past_torch(x: Tensor, y: Tensor, z: Tensor) -> None:
    past(x)


def not_at_all(x: Tensor, y: Tensor, z: Tensor) -> None:
    perhaps(x, False)


def this_time(x: Tensor, y: Tensor, z: Tensor) -> None:
    perhaps(x, True)


def bare(x: Tensor, y: Tensor, z: Tensor) -> None:
    torch.ops.shoal_writes_bare.add_to(x, y)


def old_value_is_read(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    before = x * 2
    view = x[:2].clone()
    add_to(x, y)
    return before + x + view.sum()


def old_value_is_returned(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    before = x + 0
    add_to(x, y)
    return before, x * 3


def new_value_is_returned(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    add_to(x, y)
    return x


PROGRAMS = [
    *(once, twice, to_a_view, to_two, to_a_list, past_torch, not_at_all, this_time, bare),
    *(old_value_is_read, old_value_is_returned, new_value_is_returned),
]


def seen(program: Program) -> list[Any]:
    """Versions and values after each of two calls."""
    given = [torch.arange(4.0), torch.full((4,), 2.0), torch.ones(4)]
    found: list[Any] = []
    for _ in range(2):
        result = program(*given)
        results = result if isinstance(result, tuple) else (result,)
        found.append([one._version for one in given])
        found += [one.tolist() for one in (*given, *results) if one is not None]
    return found


def values(found: list[Any]) -> list[Any]:
    """What was seen but for versions."""
    return [one for one in found if isinstance(one[0], float)]


COMPILERS: dict[str, Callable[[Program], Program]] = {
    "direct": lambda one: torch.compile(one, backend="shoal"),
    "inductor": lambda one: torch.compile(one, backend="shoal", options={"inner": "inductor"}),
    "aot": lambda one: aot_function(one, nop),
}


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_versions_are_those_of_eager(program: Program, compiler: str) -> None:
    torch._dynamo.reset()
    found, expected = seen(COMPILERS[compiler](program)), seen(program)
    if compiler == "inductor" and program in (to_a_view, old_value_is_read):
        # On memory of Inductor's own: known to be written to, but not how often.
        assert found[0][0] >= 1
        found, expected = values(found), values(expected)
    assert found == expected


def after_other_writes(x: Tensor, y: Tensor, z: Tensor) -> None:
    x.mul_(3)
    add_to(x, y)


def test_a_write_is_never_hidden() -> None:
    """Behind operators of torch's own, a custom one counts once: autograd sees that it wrote."""
    torch._dynamo.reset()
    x = torch.ones(3, requires_grad=True)
    y = x * 1
    kept = y.sin()  # which keeps y
    with torch.no_grad():
        torch.compile(after_other_writes, backend="shoal")(y, torch.ones(3), torch.ones(3))
    assert y._version == 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()
