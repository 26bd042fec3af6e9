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
from shoal.compile.node_kinds import flat

_LIFTING = (torch.ops.aten.lift.default, torch.ops.aten.lift_fresh.default)
"""Operators that bring a constant into a trace: each call makes a new tensor of it."""

_TURNS = {
    torch.ops.aten.t_.default: torch.ops.aten.t.default,
    torch.ops.aten.transpose_.default: torch.ops.aten.transpose.int,
}
"""Changes of shape in place that undo themselves."""

_SQUEEZES = {
    torch.ops.aten.squeeze_.default: torch.ops.aten.squeeze.default,
    torch.ops.aten.squeeze_.dim: torch.ops.aten.squeeze.dim,
    torch.ops.aten.squeeze_.dims: torch.ops.aten.squeeze.dims,
    torch.ops.aten.unsqueeze_.default: torch.ops.aten.unsqueeze.default,
}
"""Changes of shape in place that a `view` to the old shape undoes."""

_AS_STRIDED = torch.ops.aten.as_strided.default
_VIEWS = {**_TURNS, **_SQUEEZES, torch.ops.aten.as_strided_.default: _AS_STRIDED}
"""For a change of shape in place, the operator that returns such a view, by the same arguments."""

_Place = tuple[tuple[Any, ...], tuple[Any, ...], Any]
"""Shape, strides and offset."""


@dataclass(frozen=True, slots=True)
class TakenView:
    """A view as it was taken; its integers may still be symbolic."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    item: int | None
    with_grad: bool

    @property
    def is_detaching(self) -> bool:
        """Whether it is `detach`, which hides the view from autograd."""
        return self.op is torch.ops.aten.detach.default

    @property
    def is_hidden(self) -> bool:
        """Whether autograd does not see writes to the view."""
        return not self.with_grad or self.is_detaching


@dataclass(frozen=True, slots=True)
class _Moved:
    """A change of shape and strides in place, as two views: of the old tensor, and back to it."""

    there: TakenView
    back: TakenView

    @classmethod
    def by(cls, op: Any, args: tuple[Any, ...], tensor: Tensor, before: _Place) -> _Moved:
        """The change that an operator made to a tensor."""
        after = _place_of(tensor)
        there = (_VIEWS[op], args) if op in _VIEWS else (_AS_STRIDED, after)
        if op in _TURNS:
            back = there
        elif op in _SQUEEZES:
            back = (torch.ops.aten.view.default, before[:1])
        else:
            back = (_AS_STRIDED, before)
        return cls(*(TakenView(*one, {}, None, True) for one in (there, back)))


@dataclass(frozen=True, slots=True)
class Write:
    """A write to the elements of a tensor, in place."""

    tensor: Tensor
    with_grad: bool


class Effects(subclasses.TorchDispatchMode):
    """Traces operators with side effects as they are; tells `Draws` of random numbers."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Not a mode of the program, in which Dynamo would not read branches of `torch.cond`."""
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


class ViewRecorder(Effects):
    """Remembers every view of the tensors that pass through it, and every write to them."""

    def __init__(self, draws: Draws) -> None:
        super().__init__(draws)
        self._views: dict[int, tuple[Tensor, TakenView, int]] = {}
        """By view: its base, how it was taken, and how often the base had been moved by then."""
        self._moves: dict[int, list[_Moved]] = {}
        self._alive: list[Any] = []
        self._roots: set[int] = set()
        self.writes: list[Write] = []
        self.reshaped: dict[int, list[TakenView]] = {}
        """By tensor, its changes of shape and strides in place."""
        self.given: set[int] = set()
        """The tensors that `set_` gave other memory."""
        # Weak, because functionalisation takes a tensor with another holder for a view.
        self._unseen: WeakValueDictionary[int, Tensor] = WeakValueDictionary()

    def declare(self, tensors: Sequence[object]) -> None:
        """Let chains of views end at these tensors, even if they are views."""
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
                taken = TakenView(func, args[1:], kwargs, item if many else None, with_grad)
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
            for tensor in flat([value for value in written if isinstance(value, list | tuple)]):
                if isinstance(tensor, Tensor) and not tensor.is_inference():
                    torch.autograd.graph.increment_version(tensor)
        for tensor in flat(written):
            if not isinstance(tensor, Tensor):
                continue
            self._alive.append(tensor)
            if func.overloadpacket is torch.ops.aten.set_:
                self.given.add(id(tensor))
            elif _moves(func):
                taken = TakenView(func, args[1:], kwargs, None, with_grad)
                self.reshaped.setdefault(id(tensor), []).append(taken)
            else:
                self.writes.append(Write(tensor, with_grad))

    def is_unseen(self, tensor: Tensor) -> bool:
        """Whether a tensor was made in no_grad mode: its `requires_grad` is that of its base."""
        return self._unseen.get(id(tensor)) is tensor

    def is_written_through_a_view(self, tensor: Tensor) -> bool:
        """Whether a view of a tensor was written to: in a graph, the tensor is a view of that."""
        views = (write.tensor for write in self.writes if id(write.tensor) in self._views)
        return any(self.chain(view)[0] is tensor for view in views)

    def _way_down(self, tensor: Tensor) -> tuple[Tensor, list[tuple[Tensor, TakenView, int]]]:
        """The root of a tensor, and the views on the way down to it.

        Each with how it was taken, and how often its base had been moved by then.
        """
        way: list[tuple[Tensor, TakenView, int]] = []
        while id(tensor) not in self._roots and id(tensor) in self._views:
            base, taken, num_moves = self._views[id(tensor)]
            way.append((tensor, taken, num_moves))
            tensor = base
        return tensor, way

    def chain(self, tensor: Tensor) -> tuple[Tensor, list[TakenView]]:
        """The root that a tensor is a view of, and the views on the way from it."""
        root, way = self._way_down(tensor)
        return root, [taken for _, taken, _ in reversed(way)]

    def cut_at(self, tensor: Tensor, ids: Container[int]) -> tuple[Tensor, list[TakenView]] | None:
        """The first tensor with one of these ids on the way from the root that was detached there.

        Also the views after it: autograd takes that tensor for their base. None if there is none.
        """
        found, steps = None, list[TakenView]()
        for view, step, _ in self._way_down(tensor)[1]:
            if view is not tensor and step.is_detaching and id(view) in ids:
                found = (view, steps[::-1])
            steps.append(step)
        return found

    def replay(self, tensor: Tensor) -> tuple[Tensor, list[TakenView]]:
        """Like `chain`, with views that can be taken of the root as the function leaves it.

        A view that was moved in place is taken again, then moved. One that was taken before its
        base was moved begins with the way back.
        """
        (root, way), steps = self._way_down(tensor), list[TakenView]()
        number = self._num_moves(tensor)
        for view, step, num_moves in way:
            if step.is_detaching:
                # Autograd takes it for a base of views too: it is moved before it is one.
                back = self._back(view, number, steps)
                steps = [*self._there(view, None, step), step, *back, *steps]
            else:
                steps = [step, *self._there(view, number, step), *steps]
            number = num_moves
        return root, [*self._back(root, number, steps), *steps]

    def _there(self, tensor: Tensor, number: int | None, taken: TakenView) -> list[TakenView]:
        """The first moves of a view, in the grad mode in which the view was taken."""
        moves = self._moves.get(id(tensor), [])[:number]
        return [replace(one.there, with_grad=taken.with_grad) for one in moves]

    def _back(self, tensor: Tensor, number: int, steps: Sequence[TakenView]) -> list[TakenView]:
        """The way from the tensor that the function leaves to the one after `number` moves."""
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


def _counts_in_kernels(schema: Any) -> bool:
    """Whether the kernels of an operator raise the versions of tensor lists that they write to.

    Kernels do not run on functional tensors. Those of fused optimizers and gradient scalers raise
    no version, and a `custom_op` has raised them before its call comes here.
    """
    is_foreach = schema.name.startswith("aten::_foreach_")
    return is_foreach or (
        schema.name.startswith("aten::") and any(one.is_out for one in schema.arguments)
    )
