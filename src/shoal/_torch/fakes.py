"""Fake tensors: what stands for a tensor while a graph is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    is_fake,
)
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils import _pytree as pytree

from shoal._torch.subclasses import with_inner, wraps_others
from shoal._torch.traces import TracingContext


def new_fake_mode(*, dynamic: bool) -> FakeTensorMode:
    """A mode of our own, where no compiler in front brought one."""
    # Shapes stay integers unless asked for: a shape environment is needed either way, because
    # operators with data-dependent results ask for one.
    shapes = ShapeEnv() if dynamic else ShapeEnv(assume_static_by_default=True)
    return FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=False)


def why_not_traced(error: BaseException) -> str | None:
    """In plain words why a program cannot run on fake tensors; None if it raised by itself."""
    if isinstance(error, (DataDependentOutputException, GuardOnDataDependentSymNode)):
        return "it reads the value of a tensor on the host (item(), bool(), a branch on it)"
    if isinstance(error, DynamicOutputShapeException):
        return "the shape of one of its tensors depends on the values of another one"
    if isinstance(error, AssertionError) and "convert all Tensors to FakeTensors" in str(error):
        return (
            "it reads a tensor that is neither given to it nor a parameter, a buffer or a plain "
            "attribute of the model. Register it as a buffer, or give it with the inputs"
        )
    return None


def fake_of(mode: FakeTensorMode, tensor: Tensor, *, dynamic: bool) -> Tensor:
    """A tensor without elements that stands for one; Dynamo's symbols where it chose some."""
    if is_fake(tensor):
        return tensor
    context = TracingContext.try_get()
    if context is not None and tensor in context.tensor_to_context:
        symbols = context.tensor_to_context[tensor]
        fake = mode.from_tensor(
            tensor, symbolic_context=symbols, source=getattr(symbols, "tensor_source", None)
        )
    else:
        fake = mode.from_tensor(tensor, static_shapes=not dynamic)
    # What a wrapper holds besides tensors is a constant of the graph, so that it stays real.
    return with_inner(fake, lambda inner: inner) if wraps_others(fake) else fake


def fake_like(real: Tensor, example: FakeTensor) -> FakeTensor:
    """A tensor without elements that stands for `real` where `example` is used."""
    return example.fake_mode.from_tensor(real, static_shapes=True)


def as_fake(mode: FakeTensorMode, value: Any) -> Any:
    """A value whose tensors have no elements."""
    return pytree.tree_map_only(
        Tensor,
        lambda one: one if is_fake(one) else mode.from_tensor(one, static_shapes=True),
        value,
    )


def current_fake_mode(args: Sequence[object]) -> FakeTensorMode | None:
    """The mode of the compiler in front, or of the arguments."""
    context = TracingContext.try_get()
    if context is not None and context.fake_mode is not None:
        return context.fake_mode
    return detect_fake_mode(list(args))


@contextlib.contextmanager
def below_python(mode: FakeTensorMode) -> Iterator[None]:
    """Run on fake tensors, with the operators' Python implementations where shapes are symbolic."""
    python = enable_python_dispatcher() if mode.shape_env is not None else contextlib.nullcontext()
    with mode, python, torch.autograd.set_multithreading_enabled(False):
        yield


def num_fixed_sizes(mode: FakeTensorMode) -> int:
    """How many sizes that were symbols have turned out to be a number, or another one's."""
    return 0 if mode.shape_env is None else len(mode.shape_env.replacements)


def without_bindings(mode: FakeTensorMode) -> Any:
    """Run operators with data-dependent sizes though no graph binds the symbols of these."""
    if mode.shape_env is None:
        return contextlib.nullcontext()
    return mode.shape_env.ignore_fresh_unbacked_symbols()
