"""Which arguments of a function become inputs of its graph, and how they are found again.

a tensor                      → an input
the same tensor again         → the same input
tensors that overlap, one of them written to → one input, the memory; each is a view of it
anything but a tensor         → a constant of the graph (integers that are symbolic: an input)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal._torch import storage, subclasses, symbols
from shoal.compile.aot.subclasses import flat


@dataclass(frozen=True, slots=True)
class Constant:
    """An argument that the graph is made for."""

    value: Any


@dataclass(frozen=True, slots=True)
class Itself:
    """An argument that is an input as it is."""

    input: int


@dataclass(frozen=True, slots=True)
class Within:
    """An argument that is a view of an input, which is the memory of several."""

    input: int
    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    offset: Any
    dtype: torch.dtype
    requires_grad: bool


Place = Constant | Itself | Within


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """Where the arguments of a function are among the inputs of its graph."""

    places: tuple[Place, ...]
    sources: tuple[int, ...]
    """For each input, the argument it is, or the first one that lies in it."""
    is_memory: tuple[bool, ...]
    """Whether an input is the memory behind its arguments."""

    def inputs(self, args: Sequence[Any]) -> list[Any]:
        """The inputs of the graph."""
        return [
            memory_of(args[source], [args[i] for i in self.members(at)])
            if is_memory
            else args[source]
            for at, (source, is_memory) in enumerate(zip(self.sources, self.is_memory, strict=True))
        ]

    def settle(self, before: Arrangement, fakes: Sequence[Any]) -> None:
        """Make the graph one for the sizes of those arguments that it takes as views.

        `fakes` are the inputs as they were arranged before: who guards their symbols learns of it.
        """
        for place, earlier in zip(self.places, before.places, strict=True):
            if isinstance(place, Within) and not isinstance(earlier, Constant):
                fake = fakes[earlier.input]
                for number in (*fake.shape, *fake.stride(), fake.storage_offset()):
                    int(number)

    def members(self, at: int) -> list[int]:
        """The arguments that lie in an input."""
        return [
            i
            for i, place in enumerate(self.places)
            if not isinstance(place, Constant) and place.input == at
        ]

    def arguments(self, inputs: Sequence[Any]) -> list[Any]:
        """The function's arguments, made of the inputs."""
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
        self, args: Sequence[Any], written: set[int], *, apart: Collection[int] = ()
    ) -> Arrangement | None:
        """One in which inputs that share memory with one that is written are one; None if none.

        Inputs in `apart` have no element in common with another, whatever memory they lie in.
        """
        inputs = [args[i] for i in self.sources]
        _refuse_wrappers(inputs, written)
        shared = [[at for at in group if at not in apart] for group in sharing_memory(inputs)]
        groups = [group for group in shared if len(group) > 1 and written.intersection(group)]
        if not groups:
            return None
        merged = {at: number for number, group in enumerate(groups) for at in group}
        sources: list[int] = []
        is_memory: list[bool] = []
        new_index: dict[int, int] = {}
        memory_index: dict[int, int] = {}
        for at, source in enumerate(self.sources):
            number = merged.get(at)
            if number is not None and number in memory_index:
                new_index[at] = memory_index[number]
                continue
            new_index[at] = len(sources)
            if number is not None:
                memory_index[number] = len(sources)
            sources.append(source)
            is_memory.append(number is not None)
        places = tuple(
            place if isinstance(place, Constant) else _placed(args[i], place, new_index, merged)
            for i, place in enumerate(self.places)
        )
        return Arrangement(places=places, sources=tuple(sources), is_memory=tuple(is_memory))


def _placed(
    arg: Any, place: Itself | Within, new_index: dict[int, int], merged: dict[int, int]
) -> Place:
    at = new_index[place.input]
    if place.input not in merged:
        return Itself(at)
    shape, strides = tuple(arg.shape), tuple(arg.stride())
    return Within(at, shape, strides, arg.storage_offset(), arg.dtype, arg.requires_grad)


def _view_of(memory: Tensor, place: Within) -> Tensor:
    # First of all: writes to a strided view of a view cannot be traced.
    view = memory.as_strided(place.shape, place.strides, place.offset)
    if memory.requires_grad and not place.requires_grad:
        view = view.detach()
    if memory.dtype is not place.dtype:
        view = view.view(place.dtype)
    return view


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def arrange(args: Sequence[Any]) -> Arrangement:
    """Each tensor once, everything else a constant."""
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
            if id(arg) not in seen:
                seen[id(arg)] = len(sources)
                sources.append(i)
            places.append(Itself(seen[id(arg)]))
        else:
            places.append(Constant(arg))
    return Arrangement(
        places=tuple(places), sources=tuple(sources), is_memory=(False,) * len(sources)
    )


def sharing_memory(inputs: Sequence[Any]) -> list[list[int]]:
    """Inputs by the memory they lie in."""
    by_storage: dict[int, list[int]] = {}
    for at, one in enumerate(inputs):
        is_plain = isinstance(one, Tensor) and not subclasses.wraps_others(one)
        if is_plain and storage.has_storage(one):
            by_storage.setdefault(one.untyped_storage()._cdata, []).append(at)
    return list(by_storage.values())


def disjoint_inputs(inputs: Sequence[Any], fakes: Sequence[Any]) -> set[int]:
    """Inputs that share a storage, though no element of it, with others.

    Only where sizes are known: a graph for any size is called with some that overlap. Nor where
    gradients are wanted: to autograd, a write to one view is a write to what all are views of.
    """
    apart: set[int] = set()
    for group in sharing_memory(inputs):
        if len(group) > 1 and all(
            _is_plain(fakes[at]) and not fakes[at].requires_grad for at in group
        ):
            meeting = {
                at
                for pair in combinations(group, 2)
                if may_overlap(*(inputs[i] for i in pair))
                for at in pair
            }
            apart.update(set(group) - meeting)
    return apart


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is known where a tensor lies."""
    place = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return all(isinstance(one, int) for one in place)


def _refuse_wrappers(inputs: Sequence[Any], written: set[int]) -> None:
    """Refuse writes to memory that wrappers lie in, and something else too."""
    if not any(subclasses.wraps_others(one) for one in inputs):
        return
    parts: dict[int, list[tuple[int, Tensor]]] = {}
    for at, one in enumerate(inputs):
        for inner in flat(one, symbols=False):
            if isinstance(inner, Tensor) and storage.has_storage(inner) and inner.numel():
                parts.setdefault(inner.untyped_storage()._cdata, []).append((at, inner))
    for several in parts.values():
        for (at, one), (other, two) in combinations(several, 2):
            wrapper = next((i for i in (at, other) if subclasses.wraps_others(inputs[i])), None)
            if (
                wrapper is not None
                and not written.isdisjoint((at, other))
                and may_overlap(one, two)
            ):
                raise NotImplementedError(
                    "Encountered aliased inputs that are mutated in the graph, but one of them is "
                    "a tensor subclass. This is not supported today: its inner tensors share "
                    "memory with each other or with another argument; got one of type "
                    f"{type(inputs[wrapper]).__name__}. Clone one of them."
                )


_FEW = 1 << 16
"""So many elements are looked at one by one."""


def may_overlap(one: Tensor, two: Tensor) -> bool:
    """Whether tensors of one memory have elements in common, or may have: if they are large.

    Torch has such a function, which takes some that do for tensors that do not.
    """
    (first, last), (its_first, its_last) = _extent_of(one), _extent_of(two)
    if not (first <= its_last and its_first <= last):
        return False
    if not (_is_plain(one) and _is_plain(two)) or one.element_size() != two.element_size():
        return True
    if max(one.numel(), two.numel()) > _FEW:
        return True
    return bool(np.isin(_places_of(one), _places_of(two)).any())


def _places_of(tensor: Tensor) -> np.ndarray:
    """Which elements of its memory a tensor shows; the tensor itself may have none."""
    places = np.array([tensor.storage_offset()])
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = np.add.outer(places, np.arange(size) * stride).ravel()
    return places


def _extent_of(tensor: Tensor) -> tuple[Any, Any]:
    first = tensor.storage_offset()
    return first, first + sum(
        (n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)
    )


def memory_of(first: Tensor, members: Sequence[Tensor], *, is_seen: bool = False) -> Tensor:
    """One tensor that all of these are views of.

    With `is_seen`, autograd is to see what is written to it, as a write to each of them.
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
    """The tensor that all of these are views of to autograd, if it has all of the memory."""
    bases = {id(base): base for base in (m if m._base is None else m._base for m in members)}
    base = next(iter(bases.values()))
    is_whole = base.untyped_storage().nbytes() == base.numel() * base.element_size()
    return base if len(bases) == 1 and is_whole else None
