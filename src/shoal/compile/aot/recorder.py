"""A dispatch mode that records which views a function takes and which tensors it writes to."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from shoal._torch import functionals, operators, subclasses, trees
from shoal.compile.aot.random_state import Draws

_LIFTING = (torch.ops.aten.lift.default, torch.ops.aten.lift_fresh.default)
"""What brings a constant into a trace: each call makes a new tensor of it."""

_TURNS = {
    torch.ops.aten.t_.default: torch.ops.aten.t.default,
    torch.ops.aten.transpose_.default: torch.ops.aten.transpose.int,
}
"""Those that undo themselves."""

_SQUEEZES = {
    torch.ops.aten.squeeze_.default: torch.ops.aten.squeeze.default,
    torch.ops.aten.squeeze_.dim: torch.ops.aten.squeeze.dim,
    torch.ops.aten.squeeze_.dims: torch.ops.aten.squeeze.dims,
    torch.ops.aten.unsqueeze_.default: torch.ops.aten.unsqueeze.default,
}
"""Those that a view of the shape before undoes."""

_AS_STRIDED = torch.ops.aten.as_strided.default
_VIEWS = {**_TURNS, **_SQUEEZES, torch.ops.aten.as_strided_.default: _AS_STRIDED}
"""By change of shape in place the view that shows the same, with the same arguments."""

_Place = tuple[tuple[Any, ...], tuple[Any, ...], Any]
"""Shape, strides and offset."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A view as it was taken; its integers may still be symbolic."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    item: int | None
    with_grad: bool

    @property
    def is_detaching(self) -> bool:
        """Whether it is one for the very purpose of not being seen."""
        return self.op is torch.ops.aten.detach.default

    @property
    def is_hidden(self) -> bool:
        """Whether autograd does not see what is done to the view."""
        return not self.with_grad or self.is_detaching


@dataclass(frozen=True, slots=True)
class _Moved:
    """A change of shape and strides in place, as views: of how a tensor was, and back to that."""

    there: Taken
    back: Taken

    @classmethod
    def by(cls, op: Any, args: tuple[Any, ...], tensor: Tensor, before: _Place) -> _Moved:
        """What an operator did to a tensor that lay elsewhere before."""
        after = _place_of(tensor)
        there = (_VIEWS[op], args) if op in _VIEWS else (_AS_STRIDED, after)
        if op in _TURNS:
            back = there
        elif op in _SQUEEZES:
            back = (torch.ops.aten.view.default, before[:1])
        else:
            back = (_AS_STRIDED, before)
        return cls(*(Taken(*one, {}, None, True) for one in (there, back)))


@dataclass(frozen=True, slots=True)
class Write:
    """Elements of a tensor were written in place."""

    tensor: Tensor
    with_grad: bool


class Effects(subclasses.TorchDispatchMode):
    """Traces operators that do something besides their results as they are; follows draws."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """No mode of the program's own: Dynamo would not read branches of `torch.cond` in one."""
        return True

    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self._draws = draws

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if operators.has_effects(func):
            return functionals.run_as_it_is(func, args, kwargs or {})
        generator = operators.drawn_from(func, args, kwargs or {})
        if generator is None:
            return func(*args, **(kwargs or {}))
        self._draws.before(generator)
        result = func(*args, **(kwargs or {}))
        self._draws.after(generator)
        return result


class Recorder(Effects):
    """Remembers every view of the tensors that pass through it, and every write to them."""

    def __init__(self, draws: Draws) -> None:
        super().__init__(draws)
        self._views: dict[int, tuple[Tensor, Taken, int]] = {}
        """By view, of what it was taken, how, and after how many of that one's moves."""
        self._moves: dict[int, list[_Moved]] = {}
        self._alive: list[Any] = []
        self._roots: set[int] = set()
        self.writes: list[Write] = []
        self.reshaped: dict[int, list[Taken]] = {}
        """Changes of shape and strides in place, by tensor."""
        self.given: set[int] = set()
        """The tensors that were given other memory."""
        # Weakly, because functionalisation takes a tensor that somebody else holds for a view.
        self._unseen: WeakValueDictionary[int, Tensor] = WeakValueDictionary()

    def declare(self, tensors: Sequence[object]) -> None:
        """Let chains of views end at these tensors, wherever they come from."""
        self._alive.extend(tensors)
        self._roots.update(id(tensor) for tensor in tensors if isinstance(tensor, Tensor))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():
            with self:
                result = operators.taken_apart(func, args, kwargs)
            if result is not NotImplemented:
                return result
        before = _place_of(args[0]) if _moves(func) else None
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if operators.has_effects(func):
            return result
        if before is not None:
            moved = _Moved.by(func, args[1:], args[0], before)
            self._moves.setdefault(id(args[0]), []).append(moved)
        if not torch.is_grad_enabled():
            made = (one for one in trees.tree_leaves(result) if isinstance(one, Tensor))
            self._unseen.update((id(one), one) for one in made)
        schema = getattr(func, "_schema", None)
        if schema is not None:
            self._note(func, schema, args, kwargs, result)
        return result

    def _note(
        self, func: Any, schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        if schema.is_mutable:
            self._note_writes(func, schema, args, kwargs)
            return
        if not args or not isinstance(args[0], Tensor):
            return
        if not any(out.alias_info is not None for out in schema.returns) or func in _LIFTING:
            return
        with_grad = torch.is_grad_enabled()
        many = isinstance(result, (list, tuple))
        for item, view in enumerate(result if many else [result]):
            if isinstance(view, Tensor) and view is not args[0]:
                taken = Taken(func, args[1:], kwargs, item if many else None, with_grad)
                self._views[id(view)] = (args[0], taken, self._num_moves(args[0]))
                self._alive.append(view)
        self._alive.append(args[0])

    def _note_writes(
        self, func: Any, schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        with_grad = torch.is_grad_enabled()
        written = [
            value
            for argument, value in operators.given_arguments(schema, args, kwargs)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if _counts_in_kernels(schema):
            _count([t for value in written if _is_list(value) for t in value])
        tensors = [t for value in written for t in (value if _is_list(value) else [value])]
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                continue
            self._alive.append(tensor)
            if func.overloadpacket is torch.ops.aten.set_:
                self.given.add(id(tensor))
            elif _moves(func):
                taken = Taken(func, args[1:], kwargs, None, with_grad)
                self.reshaped.setdefault(id(tensor), []).append(taken)
            else:
                self.writes.append(Write(tensor, with_grad))

    def is_unseen(self, tensor: Tensor) -> bool:
        """Whether it was made without autograd: it says of gradients what it was made of does."""
        return self._unseen.get(id(tensor)) is tensor

    def is_written_through_a_view(self, tensor: Tensor) -> bool:
        """Whether its last value was written to a view of it: in a graph, it is that one's view."""
        views = (write.tensor for write in self.writes if id(write.tensor) in self._views)
        return any(self.chain(view)[0] is tensor for view in views)

    def chain(self, tensor: Tensor) -> tuple[Tensor, list[Taken]]:
        """What a tensor is a view of in the end, and the views on the way to it."""
        steps: list[Taken] = []
        while id(tensor) not in self._roots and id(tensor) in self._views:
            tensor, step, _ = self._views[id(tensor)]
            steps.append(step)
        return tensor, steps[::-1]

    def cut_at(self, tensor: Tensor, ids: Container[int]) -> tuple[Tensor, list[Taken]] | None:
        """The first of some tensors on the way from the root that was detached there.

        With the views after it. Autograd takes it for what they are views of. None if none is.
        """
        found, steps = None, list[Taken]()
        later = tensor
        while id(later) not in self._roots and id(later) in self._views:
            earlier, step, _ = self._views[id(later)]
            if later is not tensor and step.is_detaching and id(later) in ids:
                found = (later, steps[::-1])
            steps.append(step)
            later = earlier
        return found

    def replay(self, tensor: Tensor) -> tuple[Tensor, list[Taken]]:
        """Like `chain`, with views that can be taken of the root as it is in the end.

        A view that was moved is a view of how it was taken. One that was taken before its root was
        moved starts with the way back.
        """
        steps: list[Taken] = []
        number = self._num_moves(tensor)
        while id(tensor) not in self._roots and id(tensor) in self._views:
            later, (earlier, step, seen) = tensor, self._views[id(tensor)]
            if step.is_detaching:
                # A root of views too, to autograd: it is moved before it is one.
                back = self._back(later, number, steps)
                steps = [*self._there(later, None, step), step, *back, *steps]
            else:
                steps = [step, *self._there(later, number, step), *steps]
            tensor, number = earlier, seen
        return tensor, [*self._back(tensor, number, steps), *steps]

    def _there(self, tensor: Tensor, number: int | None, taken: Taken) -> list[Taken]:
        """The first moves of a view; autograd sees it move as it saw it taken."""
        moves = self._moves.get(id(tensor), [])[:number]
        return [replace(one.there, with_grad=taken.with_grad) for one in moves]

    def _back(self, tensor: Tensor, number: int, steps: Sequence[Taken]) -> list[Taken]:
        """From a tensor as it is in the end to how it was after the first of its moves."""
        moves = self._moves.get(id(tensor), [])[number:] if steps else []
        return [replace(one.back, with_grad=steps[0].with_grad) for one in reversed(moves)]

    def _num_moves(self, tensor: Tensor) -> int:
        return len(self._moves.get(id(tensor), []))


def _moves(op: Any) -> bool:
    """Whether an operator changes a tensor's shape and strides in place."""
    return torch.Tag.inplace_view in getattr(op, "tags", ()) and (
        op.overloadpacket is not torch.ops.aten.set_
    )


def _place_of(tensor: Tensor) -> _Place:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset()


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple))


def _counts_in_kernels(schema: Any) -> bool:
    """Whether autograd leaves it to an operator's kernels to count writes to lists of tensors.

    On functional tensors, kernels do not run. Those of fused optimizers and gradient scalers do not
    count; of operators that are not torch's, those of `custom_op` counted before they came here.
    """
    is_foreach = schema.name.startswith("aten::_foreach_")
    return is_foreach or (
        schema.name.startswith("aten::") and any(one.is_out for one in schema.arguments)
    )


def _count(tensors: Sequence[object]) -> None:
    for tensor in tensors:
        if isinstance(tensor, Tensor) and not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
