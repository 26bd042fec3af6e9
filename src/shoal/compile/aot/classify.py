"""Call a function once, recorded; classify its inputs and outputs: views, writes, constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shoal._torch import autograd, dynamo, subclasses
from shoal._torch import symbols as torch_symbols
from shoal.compile.aot.arrange import Arrangement, Within
from shoal.compile.aot.random_state import Draws
from shoal.compile.aot.recorder import TakenView, ViewRecorder
from shoal.compile.aot.signature import (
    Base,
    Input,
    Mutation,
    Output,
    OutputKind,
    Reshape,
    Signature,
    Symbol,
    ViewStep,
)
from shoal.compile.aot.subclasses import flat

Function = Callable[..., Sequence[Any]]
"""Takes its arguments one by one, returns a flat list."""


@dataclass(frozen=True, slots=True)
class _Before:
    """A tensor as it was before the call."""

    requires_grad: bool
    is_leaf: bool
    version: int
    step: Any
    """The step of autograd that made it; None of a leaf."""

    @classmethod
    def of(cls, value: Any) -> _Before | None:
        """None if the value is no tensor."""
        if not isinstance(value, Tensor):
            return None
        version = autograd.version_of(value)
        return cls(value.requires_grad, value.is_leaf, version, autograd.step_of(value))


@dataclass(frozen=True, slots=True)
class Classified:
    """The signature of a call, and the values that the signature speaks of."""

    signature: Signature
    outputs: Sequence[Any]
    bases: list[Tensor]
    symbols: list[Any]


class RecordedCall:
    """One call of a function on functional tensors, recorded.

    `entering` are the inputs that the function gets. They are `inputs` themselves, or copies where
    autograd would not allow a write to the input.
    """

    def __init__(
        self,
        function: Function,
        arrangement: Arrangement,
        inputs: Sequence[Any],
        entering: Sequence[Any],
        draws: Draws,
    ) -> None:
        self._arrangement = arrangement
        self._inputs = entering
        self._arguments = arguments = arrangement.arguments(entering)
        self._recorder = ViewRecorder(draws)
        self._recorder.declare(arguments)
        self._before = [_Before.of(value) for value in inputs]
        self._arguments_before = [_Before.of(value) for value in arguments]
        self._grad_mode = torch.is_grad_enabled()
        draws.begin()
        with self._recorder:
            self._outputs = function(*arguments)
        draws.end()
        self._grad_mode_after = torch.is_grad_enabled()
        torch.set_grad_enabled(self._grad_mode)
        self._argument_of = {id(a): i for i, a in enumerate(arguments) if isinstance(a, Tensor)}
        self._wrapper_of = {
            id(inner): i
            for i, argument in enumerate(arguments)
            if subclasses.wraps_others(argument)
            for inner in flat(argument, symbols=False)
        }
        self._symbols: list[Any] = []
        self._bases: list[Tensor] = []
        self._detached: dict[int, int] = {}

    def classify(self) -> Classified:
        """Find the kind of each output, and the writes to each input."""
        mutations = self._mutations()
        inputs = tuple(
            Input(is_tensor=False)
            if before is None
            else Input(
                is_tensor=True,
                requires_grad=before.requires_grad or mutation.is_made_leaf,
                is_wrapper=subclasses.wraps_others(value),
                mutation=mutation,
            )
            for value, before, mutation in zip(self._inputs, self._before, mutations, strict=True)
        )
        outputs = self._classify_outputs()
        bases = tuple(
            Base(requires_grad=base.requires_grad, is_view=self._is_made_view(base, ()))
            for base in self._bases
        )
        flows = any(one.requires_grad for one in (*outputs, *bases)) or any(
            one.mutation.by_autograd for one in inputs
        )
        changes_mode = self._grad_mode_after != self._grad_mode
        signature = Signature(
            inputs=inputs,
            outputs=outputs,
            bases=bases,
            reshapes=self._reshapes(),
            num_symbols=len(self._symbols),
            trains=flows and any(one.requires_grad for one in inputs),
            grad_mode=self._grad_mode,
            grad_mode_after=self._grad_mode_after if changes_mode else None,
        )
        return Classified(signature, self._outputs, self._bases, self._symbols)

    def _mutations(self) -> list[Mutation]:
        written: dict[int, bool] = {}
        for write in self._recorder.writes:
            root, steps = self._recorder.chain(write.tensor)
            argument = self._argument_of.get(id(root))
            if argument is not None:
                is_hidden = self._is_detached(argument) or any(step.is_hidden for step in steps)
                is_seen = write.with_grad and not is_hidden
                written[argument] = written.get(argument, False) or is_seen
            elif id(root) in self._wrapper_of:
                # A write to an inner tensor: autograd sees writes to the outer tensor alone.
                written.setdefault(self._wrapper_of[id(root)], False)
        return [self._mutation(at, written) for at in range(len(self._inputs))]

    def _is_detached(self, argument: int) -> bool:
        """Whether an argument is a view of an input to the graph, but not to autograd."""
        place = self._arrangement.places[argument]
        if not isinstance(place, Within) or place.requires_grad:
            return False
        memory = self._before[place.input]
        return memory is not None and memory.requires_grad

    def _mutation(self, at: int, written: dict[int, bool]) -> Mutation:
        before = self._before[at]
        if before is None:
            return Mutation()
        members = self._arrangement.members(at)
        value = self._inputs[at]
        writes = [member for member in members if member in written]
        gave = any(id(self._arguments[member]) in self._recorder.given for member in members)
        versions = [
            autograd.version_of(self._arguments[m]) - b.version - len(self._reshapes_of(m))
            for m in members
            if (b := self._arguments_before[m]) is not None
        ]
        if gave and subclasses.wraps_others(value):
            raise NotImplementedError(
                f"set_ of a tensor subclass is not supported; got an argument of type "
                f"{type(value).__name__} that was given another tensor's memory"
            )
        now_requires = value.requires_grad or any(self._arguments[m].requires_grad for m in members)
        is_leaf = now_requires and not (before.requires_grad or writes or gave)
        lost = before.requires_grad and before.is_leaf and not value.requires_grad
        is_merged = self._arrangement.is_memory[at]
        if lost or (is_leaf and (is_merged or subclasses.wraps_others(value))):
            raise NotImplementedError(
                "requires_grad_(False) on an argument, or requires_grad_() on one that shares "
                "memory with another or is a tensor subclass, inside a function that is compiled, "
                "is not supported; call it before the function is called"
            )
        if any(self._is_detached(m) and self._arguments[m].requires_grad for m in writes):
            raise NotImplementedError(
                "non-differentiable view input mutations are not supported where they give the "
                "view a gradient: an argument shares memory with one that requires a gradient, is "
                "no view of it to autograd, and something that requires a gradient is written to "
                "it. Clone it, or write under torch.no_grad()."
            )
        was_seen = any(written[member] or self._is_redone(at, member) for member in writes)
        was_seen &= before.requires_grad
        return Mutation(
            data=bool(writes),
            by_autograd=bool(writes) and (was_seen or (now_requires and not before.requires_grad)),
            is_set=gave,
            num_versions=max(versions, default=0),
            is_reshaped=any(map(self._reshapes_of, members)),
            is_made_leaf=is_leaf,
        )

    def _is_redone(self, at: int, argument: int) -> bool:
        """Whether autograd has another step for an argument, as after `ctx.mark_dirty`.

        A merged argument is a view here, which gets a new step with every write, seen by autograd
        or not. So the step of its memory is compared.
        """
        value, before = self._arguments[argument], self._arguments_before[argument]
        if self._arrangement.is_memory[at]:
            value, before = self._inputs[at], self._before[at]
        step = autograd.step_of(value)
        return before is not None and step is not None and step is not before.step

    def _reshapes_of(self, argument: int) -> list[TakenView]:
        return self._recorder.reshaped.get(id(self._arguments[argument]), [])

    def _reshapes(self) -> tuple[Reshape, ...]:
        """The changes of shape of each argument; once of a tensor that is several arguments."""
        first = {id(argument): i for i, argument in reversed(list(enumerate(self._arguments)))}
        return tuple(
            Reshape(argument=i, steps=self._steps(taken))
            for i in sorted(first.values())
            if (taken := self._reshapes_of(i))
        )

    def _classify_outputs(self) -> tuple[Output, ...]:
        seen: dict[int, int] = {}
        outputs: list[Output | None] = [None] * len(self._outputs)
        views: dict[int, list[tuple[int, Tensor, list[TakenView]]]] = {}
        for k, out in enumerate(self._outputs):
            if not isinstance(out, Tensor):
                is_symbol = isinstance(out, torch_symbols.SYMBOLIC)
                kind = OutputKind.FRESH if is_symbol else OutputKind.CONSTANT
                outputs[k] = Output(kind=kind, value=None if is_symbol else out, is_tensor=False)
                continue
            if id(out) in self._argument_of:
                outputs[k] = Output(kind=OutputKind.INPUT, of=self._argument_of[id(out)])
                continue
            if id(out) in seen:
                outputs[k] = Output(kind=OutputKind.SAME, of=seen[id(out)])
                continue
            seen[id(out)] = k
            root, taken = self._recorder.replay(out)
            argument = self._argument_of.get(id(root))
            if self._is_new_leaf(out, root, taken):
                is_view = self._is_made_view(root, taken)
                outputs[k] = Output(kind=OutputKind.FRESH, is_view=is_view, is_new_leaf=True)
            elif taken and autograd.is_custom_view(out, root):
                # The backward of a custom function stands between the two. The graph returns the
                # view, because autograd has to refuse writes to it.
                outputs[k] = Output(kind=OutputKind.FRESH, requires_grad=True)
            elif argument is not None:
                outputs[k] = self._view(out, OutputKind.VIEW_OF_INPUT, argument, taken)
            else:
                views.setdefault(id(root), []).append((k, root, taken))
        for members in views.values():
            self._classify_views(members, seen, outputs)
        return tuple(
            replace(out, free_dims=dynamo.free_dims(value)) if out.is_made else out
            for out, value in zip(outputs, self._outputs, strict=True)
            if out is not None
        )

    def _view(self, out: Tensor, kind: OutputKind, of: int, taken: Sequence[TakenView]) -> Output:
        """An output that is a view: of another output, if autograd takes that for its base."""
        _refuse_new_history(out, taken)
        places = {id(one): k for k, one in reversed(list(enumerate(self._outputs)))}
        cut = None if self._recorder.reshaped else self._recorder.cut_at(out, places)
        if cut is None:
            return Output(kind=kind, of=of, steps=self._steps(taken))
        base, steps = places[id(cut[0])], self._steps(cut[1])
        return Output(kind=OutputKind.VIEW_OF_OUTPUT, of=base, steps=steps)

    def _classify_views(
        self,
        members: list[tuple[int, Tensor, list[TakenView]]],
        seen: dict[int, int],
        outputs: list[Output | None],
    ) -> None:
        """Classify outputs that share memory, which is no input's: all are views of one root."""
        _, root, taken = members[0]
        returned = seen.get(id(root))
        is_alone = returned is None and len(members) == 1 and not _is_cut(root, taken)
        kind, of = OutputKind.VIEW_OF_OUTPUT, returned
        if of is None:
            kind, of = OutputKind.VIEW_OF_BASE, len(self._bases)
            if not is_alone:
                self._bases.append(root)
        for k, _, taken in members:
            out = self._outputs[k]
            if is_alone or k == returned:
                outputs[k] = Output(
                    kind=OutputKind.FRESH,
                    requires_grad=out.requires_grad,
                    is_view=self._is_made_view(root, taken),
                    is_base=not out._is_view(),
                )
            else:
                outputs[k] = self._view(out, kind, of, taken)

    def _is_new_leaf(self, out: Tensor, root: Tensor, taken: Sequence[TakenView]) -> bool:
        """Whether `requires_grad_` made an output a leaf, which depends on no input."""
        is_cut = any(step.is_detaching for step in taken)
        is_apart = not taken or is_cut or not root.requires_grad
        is_seen = not self._recorder.is_unseen(out)
        return is_seen and is_apart and out.requires_grad and out.is_leaf

    def _is_made_view(self, root: Tensor, taken: Sequence[TakenView]) -> bool:
        """Whether the tensor that the graph returns is a view."""
        if taken or id(root) in self._wrapper_of or id(root) in self._recorder.reshaped:
            return True
        return self._recorder.is_written_through_a_view(root)

    def _steps(self, taken: Sequence[TakenView]) -> tuple[ViewStep, ...]:
        return tuple(
            ViewStep(
                op=str(one.op),
                args=self._frozen(one.args),
                kwargs=tuple((key, self._frozen(value)) for key, value in one.kwargs.items()),
                item=one.item,
                with_grad=one.with_grad,
                detached=self._detached.setdefault(id(one), len(self._detached))
                if one.is_detaching
                else None,
            )
            for one in taken
        )

    def _frozen(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return tuple(self._frozen(item) for item in value)
        if isinstance(value, torch_symbols.SYMBOLIC):
            self._symbols.append(value)
            return Symbol(len(self._symbols) - 1)
        return value


def _is_cut(root: Tensor, taken: Sequence[TakenView]) -> bool:
    """Whether a view was taken in no_grad mode: it requires a gradient, but has no history."""
    return root.requires_grad and any(not one.with_grad for one in taken)


def _refuse_new_history(out: Tensor, taken: Sequence[TakenView]) -> None:
    """Refuse an output that was detached, then written to with autograd."""
    if any(one.is_detaching for one in taken) and out.requires_grad and not out.is_leaf:
        raise NotImplementedError(
            "an output that was detached from a tensor, shares its memory, and was then written to "
            "with something that requires a gradient is not supported. Clone what is detached."
        )
