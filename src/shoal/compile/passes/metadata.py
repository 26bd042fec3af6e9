"""Compute the metadata of nodes (`node.meta["val"]`), and compare it after passes."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from shoal._torch import fakes, operators, symbols, traces, trees
from shoal.compile.node_kinds import flat
from shoal.compile.passes.collectives import collective
from shoal.errors import InvariantError, UsageError


def compute_metadata(node: fx.Node, mode: fakes.FakeTensorMode | None = None) -> None:
    """Write down what a node gives: `val`, a value without elements, and `tensor_meta`.

    `mode` is for nodes that read no tensors.
    """
    node.meta["val"] = Reading.of(node).result(mode)
    node.meta["tensor_meta"] = traces.tensor_metadata(node.meta["val"])


def inconsistencies(graph: fx.Graph) -> dict[fx.Node, str]:
    """The nodes whose metadata says something else than what they would give, and what."""
    found = {node: Reading.of(node).complaint() for node in graph.nodes}
    return {node: what for node, what in found.items() if what is not None}


def check_graph(graph: fx.Graph, known: dict[fx.Node, str] | None = None) -> None:
    """Raise unless each node stands after what it reads, and says what it gives.

    `known` are inconsistencies that were there before.
    """
    graph.lint()
    _raise_if([what for node, what in inconsistencies(graph).items() if node not in (known or {})])


class CheckedGraph:
    """A graph that passes change: only what they touched is computed again.

    What was wrong before the first of them is no fault of theirs.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._first = {node: Reading.of(node) for node in graph.nodes}
        self._last = self._first

    def check(self) -> None:
        """Raise unless what changed since the last time says what it gives."""
        now = {node: Reading.of(node) for node in self._graph.nodes}
        wrong: list[str] = []
        for node, reading in now.items():
            first, last = self._first.get(node), self._last.get(node)
            if last is not None and reading.is_like(last):
                continue
            what = reading.complaint()
            if what is not None and (first is None or first.complaint() is None):
                wrong.append(what)
        _raise_if(wrong)
        self._last = now


def _raise_if(wrong: list[str]) -> None:
    if wrong:
        raise InvariantError(
            f"the metadata of {len(wrong)} nodes is wrong after a pass; first: {wrong[0]}"
        )


BY_CONTENT = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
"""The shapes of such results are new symbols each time they are asked for."""
_NOTHING = object()


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """A node's operator, its arguments, their values without elements, and its own."""

    node: fx.Node
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: dict[fx.Node, Any]
    said: Any

    @classmethod
    def of(cls, node: fx.Node) -> Reading:
        """Look at a node as it is now."""
        given = {read: read.meta.get("val", _NOTHING) for read in node.all_input_nodes}
        said = node.meta.get("val", _NOTHING)
        return cls(node, node.target, node.args, dict(node.kwargs), given, said)

    def is_like(self, other: Reading) -> bool:
        """Whether another one is of the same arguments, or of tensors that are described alike."""
        if self.target is not other.target or self.said is not other.said:
            return False
        is_same = (
            self.args == other.args
            and self.kwargs == other.kwargs
            and all(other.given.get(read) is held for read, held in self.given.items())
        )
        return is_same or self._described() == other._described()

    def _described(self) -> object:
        """The arguments, with descriptions of tensors in the place of nodes.

        Equal to nothing where sizes are symbols: to compare these would be a guard.
        """
        described = {read: tuple(_describe(held)) for read, held in self.given.items()}
        if any(isinstance(one, symbols.SYMBOLIC) for one in flat(list(described.values()))):
            return object()
        return map_arg((self.args, self.kwargs), described.__getitem__)  # pyright: ignore[reportGeneralTypeIssues]

    def complaint(self) -> str | None:
        """Say how the node's `val` differs from its result; None if equal, or not to be told."""
        if not self._can_be_computed():
            return None
        said, computed = _describe(self.said), _describe(self.result())
        if len(said) == len(computed) and all(map(_agree, said, computed)):
            return None
        return f"{self.node.name} ({self.target}) says {said}, and gives {computed}"

    def result(self, mode: fakes.FakeTensorMode | None = None) -> Any:
        """The node's result, computed without elements; in `mode` if it reads no tensors."""
        mode = self._mode() or mode
        missing = [read.name for read, held in self.given.items() if held is _NOTHING]
        if missing:
            raise UsageError(
                f"expected what {missing[0]} gives in its metadata ('val'), got none: trace the "
                "graph with make_fx or a compiler"
            )
        values = trees.tree_map(partial(_in_mode, mode=mode), self.given)
        args, kwargs = map_arg((self.args, self.kwargs), values.__getitem__)  # pyright: ignore[reportGeneralTypeIssues]
        if mode is None:
            return self.target(*args, **kwargs)
        op = collective(self.node)
        with fakes.below_python(mode), torch.no_grad():
            result = self.target(*args, **kwargs)
            is_received = op is not None and not op.writes
            return trees.tree_map(_as_received, result) if is_received else result

    def _mode(self) -> fakes.FakeTensorMode | None:
        """The mode in which to compute; a new one where values disagree."""
        tensors = [one for one in flat(list(self.given.values())) if isinstance(one, Tensor)]
        modes = {getattr(one, "fake_mode", None) for one in tensors}
        mode = modes.pop() if len(modes) == 1 else None
        return fakes.new_fake_mode(dynamic=False) if tensors and mode is None else mode

    def _can_be_computed(self) -> bool:
        if self.node.op != "call_function" or self.said is _NOTHING:
            return False
        if self.target is operator.getitem:
            return True
        if not isinstance(self.target, operators.OpOverload):
            return False
        is_known = all(held is not _NOTHING for held in self.given.values())
        return is_known and BY_CONTENT.isdisjoint(self.target.tags)


def _in_mode(held: Any, mode: fakes.FakeTensorMode | None) -> Any:
    """A value in a mode: a trace of real tensors makes one mode for each."""
    if not isinstance(held, Tensor) or getattr(held, "fake_mode", None) is mode:
        return held
    assert mode is not None
    with mode:
        return torch.empty_strided(held.shape, held.stride(), dtype=held.dtype, device=held.device)


def _as_received(held: Any) -> Any:
    """A collective gives contiguous tensors, though torch says of some that strides are kept."""
    if not isinstance(held, Tensor):
        return held
    return torch.empty_like(held, memory_format=torch.contiguous_format)


def _describe(held: Any) -> list[Any]:
    """Type, device, sizes and strides of each tensor; strides only where they mean something."""
    return [
        (one.dtype, one.device, tuple(one.shape), _strides(one)) if isinstance(one, Tensor) else one
        for one in flat(held)
    ]


def _strides(tensor: Tensor) -> tuple[Any, ...]:
    if any(isinstance(size, int) and size == 0 for size in tensor.shape):
        return ()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple(0 if isinstance(size, int) and size == 1 else step for size, step in pairs)


def _agree(said: Any, computed: Any) -> bool:
    """Whether two descriptions are the same, as far as integers can tell."""
    if isinstance(said, tuple) and isinstance(computed, tuple):
        return len(said) == len(computed) and all(map(_agree, said, computed))
    if isinstance(said, symbols.SYMBOLIC) or isinstance(computed, symbols.SYMBOLIC):
        return True
    return said == computed
