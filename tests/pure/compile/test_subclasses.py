"""Tensor subclasses that wrap tensors go in and come out as in eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from compile_compare import BACKEND, WRAPPED, compare, compiled


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


def test_written_wrapper() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return x + y

    compare(program, frozen, scenarios=("infer",), ignore=WRAPPED, may_refuse="subclass")


def test_tangent_of_another_type_is_refused() -> None:
    """Traced with a wrapped tangent, given a plain one: an error, not a guess."""
    call = compiled(multiply, backend=BACKEND, through="compile")
    out = call(*twins())
    with pytest.raises(RuntimeError):
        out.backward(torch.ones(4, 6))


def test_type_is_a_guard() -> None:
    """Compiled for plain tensors, then called with wrapped ones."""
    call = compiled(multiply, backend=BACKEND, through="compile")
    x = torch.randn(4, 6)
    assert type(call(x, x)) is Tensor
    out = call(*frozen())
    assert type(out) is Twin
