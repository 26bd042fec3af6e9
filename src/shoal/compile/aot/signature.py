"""What each input and output of a captured function is: pure data.

    analyse   makes it, from one run of the function on fake tensors
    capture   compares it with the run that is traced
    emit      writes the code around the graphs from it
    cache     stores it

A graph does not return an output that is a view. It returns the base of the view, unless that is an
input. The generated code takes the view again, so that autograd and later writes see the same
tensors as without a compiler.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, slots=True)
class Symbol:
    """A symbolic integer in the arguments of a view: the graph returns its value."""

    index: int
    """Its place among the integers that the graph returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewStep:
    """One view taken of a tensor."""

    op: str
    """The operator, by its full name: `aten.view.default`."""
    args: tuple[Any, ...]
    """The arguments after the tensor itself."""
    kwargs: tuple[tuple[str, Any], ...] = ()
    item: int | None = None
    """The index of the view, where the operator returns a list."""
    with_grad: bool = True
    """Whether autograd recorded it."""
    detached: int | None = None
    """The number of the detached tensor that it gives, the base of later views to autograd."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """The changes that a function makes to one of its inputs, in place."""

    data: bool = False
    """Whether elements are written."""
    by_autograd: bool = False
    """Whether autograd sees the write: gradients then flow through the new value."""
    is_reshaped: bool = False
    """Whether shape or strides change."""
    is_set: bool = False
    """Whether `set_` gives the input the memory of another tensor."""
    is_made_leaf: bool = False
    """Whether `requires_grad_` makes the input require a gradient."""
    num_versions: int = 0
    """By how much the version counter goes up, without changes of shape or strides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One input of the graph."""

    is_tensor: bool
    requires_grad: bool = False
    is_wrapper: bool = False
    """Whether it wraps other tensors: the graph reads and writes the inner ones."""
    is_counted: bool | None = None
    """Whether the graph raises its version when it writes to it; None if that is unknown."""
    is_counted_by_operators: bool = False
    """Whether custom operators alone write to it: these raise its version as in eager."""
    mutation: Mutation = Mutation()

    @property
    def is_written_in_graph(self) -> bool:
        """Whether the graph itself can write the new elements."""
        change = self.mutation
        return change.data and not (change.by_autograd or change.is_reshaped or change.is_set)

    @property
    def num_missing_versions(self) -> int | None:
        """The number of versions to add after the graph's writes, maybe -1; None if unknown."""
        if self.is_counted_by_operators:
            return 0
        # A tensor subclass has a version of its own, which writes to its inner tensors leave.
        is_counted = False if self.is_wrapper else self.is_counted
        return None if is_counted is None else self.mutation.num_versions - is_counted


class OutputKind(StrEnum):
    """Where an output comes from."""

    FRESH = "fresh"
    """The graph makes it."""
    INPUT = "input"
    """It is an input itself."""
    SAME = "same"
    """It is the same tensor as an earlier output."""
    VIEW_OF_INPUT = "view of an input"
    VIEW_OF_OUTPUT = "view of an output"
    VIEW_OF_BASE = "view of a tensor that is not returned"
    CONSTANT = "constant"
    """No tensor, and always the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One output of the function."""

    kind: OutputKind
    of: int = 0
    """The number of the argument, output or base that it is, or is a view of."""
    steps: tuple[ViewStep, ...] = ()
    requires_grad: bool = False
    is_view: bool = False
    """Whether a fresh output is a view in the graph, of a tensor that is not returned."""
    is_base: bool = False
    """Whether the same output is no view in eager."""
    value: Any = None
    """The constant."""
    is_tensor: bool = True
    is_new_leaf: bool = False
    """Whether `requires_grad_` made it a leaf: no gradient flows from it to an input."""
    free_dims: tuple[int, ...] = ()
    """The dims whose sizes differ from call to call."""

    @property
    def is_made(self) -> bool:
        """Whether it is a tensor that is neither an argument nor an earlier output."""
        return self.is_tensor and self.kind not in (OutputKind.INPUT, OutputKind.SAME)


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """A tensor that outputs are views of. The graph returns it, the function does not."""

    requires_grad: bool
    is_view: bool = False
    """Whether it is a view in the graph, of a tensor that is not returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshape:
    """Changes of an argument's shape and strides in place, such as `transpose_`."""

    argument: int
    steps: tuple[ViewStep, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """What each input and output of one captured function is.

    `inputs` are those of the graph. The numbers in `outputs` and `reshapes` are of arguments of the
    function.
    """

    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    bases: tuple[Base, ...] = ()
    reshapes: tuple[Reshape, ...] = ()
    num_symbols: int = 0
    """The number of integers that the graph returns, for views of symbolic sizes."""
    trains: bool = False
    """Whether a gradient flows from an output or a written input to an input."""
    grad_mode: bool = True
    """The grad mode that the function is called in."""
    grad_mode_after: bool | None = None
    """The grad mode that the function leaves behind; None if it is the same."""

    @property
    def returned_mutations(self) -> tuple[int, ...]:
        """The inputs whose new value the graph returns, because it cannot write it."""
        return tuple(
            i
            for i, one in enumerate(self.inputs)
            if (one.mutation.data or one.mutation.is_set) and not one.is_written_in_graph
        )

    @property
    def graph_mutations(self) -> tuple[int, ...]:
        """The inputs that the graph itself writes to."""
        return tuple(i for i, one in enumerate(self.inputs) if one.is_written_in_graph)

    def counted(
        self, places: Sequence[range], *, by_operators: Set[int], uncounted: Set[int] | None
    ) -> Signature:
        """The same, with the knowledge of who raises the versions of inputs.

        `places` say which inputs of the graph each input is. Custom operators alone write to those
        in `by_operators`; writes to those in `uncounted` raise no version, None if that is unknown.
        """
        inputs = (
            replace(
                one,
                is_counted_by_operators=not by_operators.isdisjoint(place),
                is_counted=None if uncounted is None else uncounted.isdisjoint(place),
            )
            for one, place in zip(self.inputs, places, strict=True)
        )
        return replace(self, inputs=tuple(inputs))

    @property
    def fresh(self) -> tuple[int, ...]:
        """The outputs that the graph makes."""
        return tuple(i for i, one in enumerate(self.outputs) if one.kind is OutputKind.FRESH)

    @property
    def differentiable(self) -> tuple[bool, ...]:
        """For each value that the graph returns, without symbols: whether it gets a gradient."""
        return (
            *(self.inputs[i].mutation.by_autograd for i in self.returned_mutations),
            *(self.outputs[k].requires_grad for k in self.fresh),
            *(base.requires_grad for base in self.bases),
        )

    @property
    def num_returned(self) -> int:
        """The number of values that the graph returns before those it saves for backward."""
        return len(self.returned_mutations) + len(self.fresh) + len(self.bases) + self.num_symbols
