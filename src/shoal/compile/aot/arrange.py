"""Which arguments of a function become inputs of its graph, and how arguments are made of inputs.

| argument | in the graph |
|---|---|
| a tensor, a symbolic number | an input |
| the same tensor again | the same input |
| tensors that overlap, one of them written to | one input, their memory; each is a view of it |
| any other value | a constant |
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal._torch import fakes, storage, subclasses, symbols
from shoal.compile.aot.subclasses import flat


@dataclass(frozen=True, slots=True)
class Constant:
    """An argument whose value is a constant of the graph."""

    value: Any


@dataclass(frozen=True, slots=True)
class Itself:
    """An argument that is an input."""

    input: int


@dataclass(frozen=True, slots=True)
class Within:
    """An argument that is a view of an input, which is the memory of several arguments."""

    input: int
    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    offset: Any
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, at: int, arg: Tensor) -> Within:
        """An argument as a view of an input."""
        shape, strides = tuple(arg.shape), tuple(arg.stride())
        return cls(at, shape, strides, arg.storage_offset(), arg.dtype, arg.requires_grad)


Place = Constant | Itself | Within


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """How the arguments of a function correspond to the inputs of its graph."""

    places: tuple[Place, ...]
    sources: tuple[int, ...]
    """For each input, the argument it is, or the first argument that is a view of it."""
    is_memory: tuple[bool, ...]
    """For each input, whether it is the memory that several arguments share."""

    def inputs(self, args: Sequence[Any]) -> list[Any]:
        """The inputs of the graph."""
        return [
            memory_of(args[source], [args[i] for i in self.members(at)])
            if is_memory
            else args[source]
            for at, (source, is_memory) in enumerate(zip(self.sources, self.is_memory, strict=True))
        ]

    def fake_inputs(
        self, args: Sequence[Any], mode: fakes.FakeTensorMode, *, dynamic: bool
    ) -> list[Any]:
        """Fake tensors that stand for the inputs of the graph."""
        return [
            fakes.fake_of(mode, one, dynamic=dynamic) if isinstance(one, Tensor) else one
            for one in self.inputs(args)
        ]

    def members(self, at: int) -> list[int]:
        """The arguments that are an input, or views of it."""
        return [
            i
            for i, place in enumerate(self.places)
            if not isinstance(place, Constant) and place.input == at
        ]

    def arguments(self, inputs: Sequence[Any]) -> list[Any]:
        """The arguments of the function, made of the inputs of the graph."""
        arguments: list[Any] = []
        for place in self.places:
            match place:
                case Constant(value):
                    arguments.append(value)
                case Itself(at):
                    arguments.append(inputs[at])
                case Within():
                    arguments.append(_view_of(inputs[place.input], place))
        return arguments

    def with_memory(
        self,
        args: Sequence[Any],
        fakes: Sequence[Any],
        written: set[int],
        apart: Collection[int] = (),
    ) -> Arrangement | None:
        """Make one input of those that share memory with one in `written`; None if none do.

        Inputs in `apart` have no element in common with another one. The graph will hold for the
        sizes of the merged inputs alone: the symbols in their `fakes` become constants, and the
        guards on them say so.
        """
        inputs = [args[i] for i in self.sources]
        _refuse_wrappers(inputs, written)
        shared = [[at for at in group if at not in apart] for group in sharing_memory(inputs)]
        groups = [group for group in shared if len(group) > 1 and written.intersection(group)]
        if not groups:
            return None
        first = {at: group[0] for group in groups for at in group}
        for number in (number for at in first for number in _placement(fakes[at])):
            int(number)
        kept = [at for at in range(len(inputs)) if first.get(at, at) == at]
        new_index = {at: index for index, at in enumerate(kept)}
        places = list(self.places)
        for i, place in enumerate(self.places):
            if isinstance(place, Itself):
                index = new_index[first.get(place.input, place.input)]
                places[i] = Within.of(index, args[i]) if place.input in first else Itself(index)
        return Arrangement(
            places=tuple(places),
            sources=tuple(self.sources[at] for at in kept),
            is_memory=tuple(at in first for at in kept),
        )


def _view_of(memory: Tensor, place: Within) -> Tensor:
    # `as_strided` comes first: a trace cannot write to an `as_strided` view of another view.
    view = memory.as_strided(place.shape, place.strides, place.offset)
    if memory.requires_grad and not place.requires_grad:
        view = view.detach()
    if memory.dtype is not place.dtype:
        view = view.view(place.dtype)
    return view


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def arrange(args: Sequence[Any]) -> Arrangement:
    """Make each tensor an input once, and every other value a constant."""
    places: list[Place] = []
    sources: list[int] = []
    seen: dict[int, int] = {}
    for i, arg in enumerate(args):
        if isinstance(arg, Tensor) and arg.layout in _COMPRESSED:
            raise NotImplementedError(
                f"compiled functions take no tensors of layout {arg.layout}, which autograd cannot "
                f"trace; got one as argument {i}. Pass its parts, or call the function uncompiled."
            )
        if isinstance(arg, (Tensor, *symbols.SYMBOLIC)):
            at = seen.setdefault(id(arg), len(sources))
            if at == len(sources):
                sources.append(i)
            places.append(Itself(at))
        else:
            places.append(Constant(arg))
    return Arrangement(
        places=tuple(places), sources=tuple(sources), is_memory=(False,) * len(sources)
    )


def sharing_memory(inputs: Sequence[Any]) -> list[list[int]]:
    """The plain tensors among the inputs, grouped by storage."""
    by_storage: dict[int, list[int]] = {}
    for at, one in enumerate(inputs):
        is_plain = isinstance(one, Tensor) and not subclasses.wraps_others(one)
        if is_plain and storage.has_storage(one):
            by_storage.setdefault(one.untyped_storage()._cdata, []).append(at)
    return list(by_storage.values())


def disjoint_inputs(inputs: Sequence[Any], fakes: Sequence[Any]) -> set[int]:
    """Inputs that share a storage with other inputs, but no element.

    Inputs with symbolic sizes do not count: they overlap for some sizes that the graph is called
    with. Nor do inputs that require gradients: autograd takes a write to one view for a write to
    its base, and so to all views.
    """
    apart: set[int] = set()
    for group in sharing_memory(inputs):
        if len(group) > 1 and all(
            _is_static(fakes[at]) and not fakes[at].requires_grad for at in group
        ):
            meeting = {
                at
                for pair in combinations(group, 2)
                if may_overlap(*(inputs[i] for i in pair))
                for at in pair
            }
            apart.update(set(group) - meeting)
    return apart


def _placement(tensor: Tensor) -> tuple[Any, ...]:
    """The sizes, strides and offset of a tensor."""
    return (*tensor.shape, *tensor.stride(), tensor.storage_offset())


def _is_static(tensor: Tensor) -> bool:
    """Whether sizes, strides and offset of a tensor are numbers, not symbols."""
    return all(isinstance(one, int) for one in _placement(tensor))


def _refuse_wrappers(inputs: Sequence[Any], written: set[int]) -> None:
    """Refuse a write to memory that a tensor subclass shares with another part of the inputs."""
    if not any(subclasses.wraps_others(one) for one in inputs):
        return
    parts: dict[int, list[tuple[int, Tensor]]] = {}
    for at, one in enumerate(inputs):
        for inner in flat(one, symbols=False):
            if isinstance(inner, Tensor) and storage.has_storage(inner) and inner.numel():
                parts.setdefault(inner.untyped_storage()._cdata, []).append((at, inner))
    for several in parts.values():
        for (at, one), (other, two) in combinations(several, 2):
            wrappers = [i for i in (at, other) if subclasses.wraps_others(inputs[i])]
            if wrappers and not written.isdisjoint((at, other)) and may_overlap(one, two):
                raise NotImplementedError(
                    "Encountered aliased inputs that are mutated in the graph, but one of them is "
                    "a tensor subclass. This is not supported today: its inner tensors share "
                    "memory with each other or with another argument; got one of type "
                    f"{type(inputs[wrappers[0]]).__name__}. Clone one of them."
                )


_FEW = 1 << 16
"""Tensors of at most this many elements are compared element by element."""


def may_overlap(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors of one storage have elements in common; True for large ones that may.

    Torch's own function for this misses some overlaps.
    """
    if _last_of(two) < one.storage_offset() or _last_of(one) < two.storage_offset():
        return False
    if not (_is_static(one) and _is_static(two)) or one.element_size() != two.element_size():
        return True
    if max(one.numel(), two.numel()) > _FEW:
        return True
    return bool(np.isin(_elements_of(one), _elements_of(two)).any())


def _last_of(tensor: Tensor) -> Any:
    """The offset of a tensor's last element in its storage."""
    steps = ((size - 1) * by for size, by in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.storage_offset() + sum(steps)


def _elements_of(tensor: Tensor) -> np.ndarray:
    """The offsets of all elements of a tensor, which may be fake, in its storage."""
    offsets = np.array([tensor.storage_offset()])
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = np.add.outer(offsets, np.arange(size) * stride).ravel()
    return offsets


def memory_of(first: Tensor, members: Sequence[Tensor], *, is_seen: bool = False) -> Tensor:
    """One tensor that all `members` are views of; `first` is one of them.

    With `is_seen`, autograd sees a write to that tensor as a write to each member.
    """
    if len({member.element_size() for member in members}) > 1:
        raise NotImplementedError(
            "arguments that share memory, of which one is written to, must have elements of one "
            f"size; got {sorted({str(m.dtype) for m in members})}. Clone one of them."
        )
    differentiable = [member for member in members if member.requires_grad]
    base = _base_of(differentiable or members)
    if base is not None and base.requires_grad is not bool(differentiable):
        base = None
    if differentiable and base is not None and all(m.dtype is base.dtype for m in members):
        return base
    if differentiable or (is_seen and base is None):
        raise NotImplementedError(
            "arguments that share memory, of which one is written to and one requires a gradient "
            "or is given one by that, are not supported unless those that require gradients are "
            f"views of one tensor that has all of the memory; got {len(members)} such arguments. "
            "Pass one tensor and take the views inside the function, or clone them."
        )
    numel = first.untyped_storage().nbytes() // first.element_size()
    if base is None:
        return first.detach().as_strided((numel,), (1,), 0)
    with torch.enable_grad():
        return base.as_strided((numel,), (1,), 0)


def _base_of(members: Sequence[Tensor]) -> Tensor | None:
    """The tensor that autograd takes for the base of all members, if it spans the storage."""
    bases = {id(base): base for base in (m if m._base is None else m._base for m in members)}
    base = next(iter(bases.values()))
    is_whole = base.untyped_storage().nbytes() == base.numel() * base.element_size()
    return base if len(bases) == 1 and is_whole else None
