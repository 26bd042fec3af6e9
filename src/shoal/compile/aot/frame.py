"""The names that the parts of a generated function share, and the lines that they all write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from shoal._torch import operators
from shoal.compile.aot.arrange import Arrangement
from shoal.compile.aot.signature import Signature, Step, Symbol
from shoal.compile.aot.source import Source


@dataclass(frozen=True, slots=True)
class Frame:
    """The names that wrappers share."""

    signature: Signature
    arrangement: Arrangement
    checks: bool = False
    """Whether arguments are compared with those that the function was compiled for."""

    def argument(self, i: int) -> str:
        """An argument of the function."""
        return f"a{i}"

    def input(self, at: int) -> str:
        """An input of the graph: an argument, or the memory of several."""
        if self.arrangement.is_memory[at]:
            return f"m{at}"
        return self.argument(self.arrangement.sources[at])

    def returned(self, at: int) -> str:
        """Something that the graph returned."""
        return f"r{at}"

    @property
    def first_fresh(self) -> int:
        """Where the outputs begin among what is returned."""
        return len(self.signature.returned_mutations)

    @property
    def first_base(self) -> int:
        """Where the bases of views begin."""
        return self.first_fresh + len(self.signature.fresh)

    @property
    def first_symbol(self) -> int:
        """Where the integers begin."""
        return self.first_base + len(self.signature.bases)


def call_of(source: Source, frame: Frame, tensor: str, step: Step) -> str:
    """The expression that takes a view."""

    def text(value: Any) -> str:
        if isinstance(value, Symbol):
            return frame.returned(frame.first_symbol + value.index)
        if isinstance(value, tuple):
            return "[" + ", ".join(text(item) for item in value) + "]"
        return source.literal(value)

    op = source.name("view", operators.operator_named(step.op))
    values = [tensor, *(text(arg) for arg in step.args)]
    values += [f"{key}={text(value)}" for key, value in step.kwargs]
    item = "" if step.item is None else f"[{step.item}]"
    return f"{op}({', '.join(values)}){item}"


def in_mode(source: Source, frame: Frame, with_grad: bool, line: str) -> None:
    """Write a line that runs with or without autograd, whatever the caller's mode is."""
    with mode(source, frame, with_grad):
        source.line(line)


@contextmanager
def mode(source: Source, frame: Frame, with_grad: bool) -> Iterator[None]:
    """Lines that are written meanwhile run with or without autograd, as said."""
    if with_grad == frame.signature.grad_mode:
        yield
        return
    name = ("enable_grad", torch.enable_grad) if with_grad else ("no_grad", torch.no_grad)
    source.begin(f"with {source.name(*name)}():")
    yield
    source.end()
