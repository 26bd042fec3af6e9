"""What each input and output of a captured function is: pure data.

    analyse   makes it, from one run of the function on fake tensors
    capture   traces by it
    emit      writes the code around the graphs from it
    cache     stores it

An output that shares memory with something is not returned by a graph. The graph returns what it
shares memory with (or that is an input), and the output is made of it again, view by view, so that
autograd and whoever writes to it later see what they would see without a compiler.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, slots=True)
class Symbol:
    """An integer in the arguments of a view that is known when the graph has run: its place."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One view taken of a tensor."""

    op: str
    """The operator, by its full name: `aten.view.default`."""
    args: tuple[Any, ...]
    """The arguments after the tensor itself."""
    kwargs: tuple[tuple[str, Any], ...] = ()
    item: int | None = None
    """Which of its results, where it gives a list."""
    with_grad: bool = True
    """Whether autograd recorded it."""
    detached: int | None = None
    """Which of the detached tensors it gave: autograd takes that for the base of views of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """What a function does to one of its inputs, in place."""

    data: bool = False
    """Whether elements are written."""
    by_autograd: bool = False
    """Whether autograd knows: gradients then flow through the new value."""
    is_reshaped: bool = False
    """Whether its shape or strides change too."""
    is_set: bool = False
    """Whether it was given another tensor's memory."""
    is_made_leaf: bool = False
    """Whether it was made to require a gradient, which it did not before."""
    num_versions: int = 0
    """By how much its version counter went up, but for changes of shape or strides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One input."""

    is_tensor: bool
    requires_grad: bool = False
    is_leaf: bool = True
    is_wrapper: bool = False
    """Whether it wraps other tensors: graphs see those, and write to them."""
    is_counted: bool | None = None
    """Whether the graph raises its version when it writes to it; None where nobody knows."""
    is_counted_by_operators: bool = False
    """Whether custom operators alone write to it, and raise its version as they do in eager."""
    mutation: Mutation = Mutation()

    @property
    def is_written_in_graph(self) -> bool:
        """Whether the graph itself can write the new elements."""
        what = self.mutation
        return what.data and not (what.by_autograd or what.is_reshaped or what.is_set)

    @property
    def num_missing_versions(self) -> int | None:
        """How many versions the graph does not count, of what it writes; -1 for one too many."""
        if self.is_counted_by_operators:
            return 0
        # A wrapper has a version of its own, apart from those of the tensors that are written to.
        is_counted = False if self.is_wrapper else self.is_counted
        return None if is_counted is None else self.mutation.num_versions - is_counted


class OutputKind(StrEnum):
    """Where an output comes from."""

    FRESH = "fresh"
    """The graph makes it."""
    INPUT = "input"
    """It is an input itself."""
    SAME = "same"
    """It is the very tensor that stands further left."""
    VIEW_OF_INPUT = "view of an input"
    VIEW_OF_OUTPUT = "view of an output"
    VIEW_OF_BASE = "view of a tensor that is not returned"
    CONSTANT = "constant"
    """No tensor, and always the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One output."""

    kind: OutputKind
    of: int = 0
    """Of which input, output or base it is a view, or the same as."""
    steps: tuple[Step, ...] = ()
    requires_grad: bool = False
    is_view: bool = False
    """Whether a fresh one is a view of something that nobody else sees."""
    is_base: bool = False
    """Whether, of those, eager has one that is no view."""
    value: Any = None
    """The constant."""
    is_tensor: bool = True
    is_new_leaf: bool = False
    """Whether the function made it a leaf that requires a gradient: nothing flows through it."""
    free_dims: tuple[int, ...] = ()
    """The dims whose sizes differ from call to call."""

    @property
    def is_made(self) -> bool:
        """Whether it is a tensor of its own, and neither an argument nor another output."""
        return self.is_tensor and self.kind not in (OutputKind.INPUT, OutputKind.SAME)


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """A tensor that outputs are views of, returned by the graph though not by the function."""

    requires_grad: bool
    is_view: bool = False
    """Whether it is a view of something that nobody else sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshape:
    """Changes of an argument's shape and strides in place, such as `transpose_`."""

    argument: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """What each input and output of one captured function is.

    `inputs` are the graph's; where outputs and reshapes say which input they are of, they mean the
    function's arguments.
    """

    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    bases: tuple[Base, ...] = ()
    reshapes: tuple[Reshape, ...] = ()
    num_symbols: int = 0
    """How many integers the graph returns for views to be taken."""
    trains: bool = False
    """Whether there is anything to differentiate."""
    grad_mode: bool = True
    """The grad mode that the function is called in."""
    grad_mode_after: bool | None = None
    """The grad mode that the function leaves behind, if it is another."""

    @property
    def returned_mutations(self) -> tuple[int, ...]:
        """The inputs whose new value the graph returns."""
        return tuple(
            i
            for i, one in enumerate(self.inputs)
            if (one.mutation.data or one.mutation.is_set) and not one.is_written_in_graph
        )

    @property
    def graph_mutations(self) -> tuple[int, ...]:
        """The inputs that the graph itself writes to."""
        return tuple(i for i, one in enumerate(self.inputs) if one.is_written_in_graph)

    def counted(self, past: Set[int], places: Sequence[Sequence[int]]) -> Signature:
        """The same, for a graph that raises the versions of what it writes to, but for some inputs.

        `past` are those inputs of the graph, `places` where those of the function are among them.
        """
        inputs = (
            replace(one, is_counted=past.isdisjoint(place))
            for one, place in zip(self.inputs, places, strict=True)
        )
        return replace(self, inputs=tuple(inputs))

    def counted_by_operators(self, written: Set[int], places: Sequence[Sequence[int]]) -> Signature:
        """The same, for a graph in which custom operators alone write to some of its inputs."""
        inputs = (
            replace(one, is_counted_by_operators=not written.isdisjoint(place))
            for one, place in zip(self.inputs, places, strict=True)
        )
        return replace(self, inputs=tuple(inputs)) if written else self

    @property
    def fresh(self) -> tuple[int, ...]:
        """The outputs that the graph makes."""
        return tuple(i for i, one in enumerate(self.outputs) if one.kind is OutputKind.FRESH)

    @property
    def differentiable(self) -> tuple[bool, ...]:
        """Of the tensors that the graph returns, in their order: which get gradients."""
        return (
            *(self.inputs[i].mutation.by_autograd for i in self.returned_mutations),
            *(self.outputs[k].requires_grad for k in self.fresh),
            *(base.requires_grad for base in self.bases),
        )

    @property
    def num_returned(self) -> int:
        """How many values the graph returns before what it saves for its backward."""
        return len(self.returned_mutations) + len(self.fresh) + len(self.bases) + self.num_symbols
