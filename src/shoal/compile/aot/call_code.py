"""Generate the function around the graphs: lines for arguments before them, for results after.

Each function of `BEFORE` and `AFTER` writes its lines, or none if it has nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from shoal._torch import autograd, dynamo, operators, traces
from shoal.compile.aot.arrange import Arrangement, Constant, Itself, memory_of
from shoal.compile.aot.code_writer import CodeWriter, listed
from shoal.compile.aot.graph_code import write_run
from shoal.compile.aot.lowered import Lowered
from shoal.compile.aot.signature import OutputKind, Signature, Symbol, ViewStep
from shoal.compile.aot.subclass_code import all_apart, all_names, put_together
from shoal.compile.aot.subclasses import Wrapped


@dataclass(frozen=True, slots=True)
class Frame:
    """The generated function, and the names of its variables."""

    signature: Signature
    arrangement: Arrangement
    checks: bool
    """Whether arguments are compared with those that the function was compiled for."""
    code: CodeWriter
    arguments: Sequence[str]

    def input(self, at: int) -> str:
        """An input of the graph: an argument, or the memory of several."""
        if self.arrangement.is_memory[at]:
            return f"m{at}"
        return self.arguments[self.arrangement.sources[at]]

    def inputs(self, numbers: Sequence[int]) -> str:
        """Several inputs, as a tuple."""
        return f"({listed(map(self.input, numbers))})"

    def returned(self, at: int) -> str:
        """A value that the graph returned."""
        return f"r{at}"

    @property
    def first_fresh(self) -> int:
        """Where the outputs begin among the returned values."""
        return len(self.signature.returned_mutations)

    @property
    def first_base(self) -> int:
        """Where the bases of views begin among the returned values."""
        return self.first_fresh + len(self.signature.fresh)

    @property
    def first_symbol(self) -> int:
        """Where the integers begin among the returned values."""
        return self.first_base + len(self.signature.bases)

    def view(self, tensor: str, step: ViewStep) -> str:
        """The expression that takes a view."""

        def text(value: Any) -> str:
            if isinstance(value, Symbol):
                return self.returned(self.first_symbol + value.index)
            if isinstance(value, tuple):
                return "[" + ", ".join(text(item) for item in value) + "]"
            return self.code.literal(value)

        op = self.code.name("view", operators.operator_named(step.op))
        values = [tensor, *(text(arg) for arg in step.args)]
        values += [f"{key}={text(value)}" for key, value in step.kwargs]
        item = "" if step.item is None else f"[{step.item}]"
        return f"{op}({', '.join(values)}){item}"

    @contextmanager
    def grad_mode(self, with_grad: bool) -> Iterator[None]:
        """Let the lines that are written meanwhile run with or without autograd."""
        if with_grad == self.signature.grad_mode:
            yield
            return
        context = self.code.call(torch.enable_grad if with_grad else torch.no_grad)
        with self.code.block(f"with {context}:"):
            yield

    def line(self, text: str, *, with_grad: bool) -> None:
        """Write a line that runs with or without autograd."""
        with self.grad_mode(with_grad):
            self.code.line(text)


def check_arguments(frame: Frame) -> None:
    """Refuse another argument where one came twice, and gradients where none were wanted."""
    if not frame.checks:
        return
    inputs, arrangement = frame.signature.inputs, frame.arrangement
    for i, place in enumerate(arrangement.places):
        if isinstance(place, Constant):
            continue
        name, first = frame.arguments[i], arrangement.sources[place.input]
        if isinstance(place, Itself) and first != i:
            test = f"{name} is not {frame.arguments[first]}"
            expected = f"be a duplicate of input {first}"
        elif inputs[place.input].is_tensor and not inputs[place.input].requires_grad:
            test, expected = f"{name}.requires_grad", "not require grad"
        else:
            continue
        message = (
            f"the graph was compiled under the assumption that input {i} would {expected}, but at "
            "runtime this was not the case. Compile it again for such arguments."
        )
        frame.code.line(f"if {test}: raise AssertionError({message!r})")


def make_leaves(frame: Frame) -> None:
    """Let arguments require a gradient that the function makes do so, before autograd sees them."""
    for at, one in enumerate(frame.signature.inputs):
        if one.mutation.is_made_leaf:
            frame.code.line(f"{frame.input(at)}.requires_grad_()")


def merge_arguments(frame: Frame) -> None:
    """Make one input of arguments that share memory, one of which is written to."""
    arrangement = frame.arrangement
    for at, is_memory in enumerate(arrangement.is_memory):
        if is_memory:
            first = frame.arguments[arrangement.sources[at]]
            members = ", ".join(frame.arguments[i] for i in arrangement.members(at))
            is_seen = f"is_seen={frame.signature.inputs[at].mutation.by_autograd}"
            memory = frame.code.call(memory_of, first, f"[{members}]", is_seen)
            frame.code.line(f"{frame.input(at)} = {memory}")


def note_versions(frame: Frame) -> None:
    """Note the versions of inputs that the graph may raise by a wrong number."""
    for variable, inputs, _ in _versioned(frame):
        versions = frame.code.call(autograd.versions_of, frame.inputs(inputs))
        frame.code.line(f"{variable} = {versions}")


def set_versions(frame: Frame) -> None:
    """Correct the versions that were noted."""
    for variable, inputs, put in _versioned(frame):
        more = tuple(frame.signature.inputs[at].mutation.num_versions for at in inputs)
        frame.code.line(frame.code.call(put, frame.inputs(inputs), variable, repr(more)))


def _versioned(frame: Frame) -> Iterator[tuple[str, list[int], Callable[..., None]]]:
    """The inputs whose versions are noted: a variable, inputs, the function that corrects them."""
    inputs, written = frame.signature.inputs, frame.signature.graph_mutations
    missing = ((at, inputs[at].num_missing_versions) for at in written)
    # The graph may have raised them too often.
    if known := [at for at, number in missing if number is None or number < 0]:
        yield "versions", known, autograd.set_versions
    # Custom operators raise them as often as they like.
    if open_ended := [at for at in written if inputs[at].is_counted_by_operators]:
        yield "lowest", open_ended, autograd.raise_versions


def write_mutations(frame: Frame) -> None:
    """Write to arguments the values that the graph returned for them; count the graph's writes."""
    signature = frame.signature
    returned = [
        (at, frame.input(at), frame.returned(number), signature.inputs[at].mutation)
        for number, at in enumerate(signature.returned_mutations)
    ]
    for _, target, value, mutation in returned:
        if mutation.is_set:
            frame.line(f"{target}.set_({value})", with_grad=False)
    for reshape in signature.reshapes:
        for step in reshape.steps:
            view = frame.view(frame.arguments[reshape.argument], step)
            frame.line(view, with_grad=step.with_grad)
    missing: list[int] = []
    for at, target, value, mutation in returned:
        if mutation.is_set:
            continue
        if not mutation.num_versions:
            frame.code.line(f"{target}.data.copy_({value})")
            continue
        frame.line(f"{target}.copy_({value})", with_grad=mutation.by_autograd)
        missing += [at] * (mutation.num_versions - 1)
    for at in signature.graph_mutations:
        missing += [at] * (signature.inputs[at].num_missing_versions or 0)
    if missing:
        increment = torch.autograd.graph.increment_version
        frame.code.line(frame.code.call(increment, frame.inputs(missing)))


def write_results(frame: Frame) -> None:
    """Put the results together: values of the graph, arguments, and views that are taken again."""
    outputs = frame.signature.outputs
    names: dict[int, str] = {}
    detached: set[int] = set()
    for at, k in enumerate(frame.signature.fresh, start=frame.first_fresh):
        names[k] = frame.returned(at)
        if outputs[k].is_new_leaf:
            frame.code.line(f"{names[k]}.requires_grad_()")
    for k, out in enumerate(outputs):
        match out.kind:
            case OutputKind.CONSTANT:
                names[k] = frame.code.literal(out.value)
            case OutputKind.INPUT:
                names[k] = frame.arguments[out.of]
            case OutputKind.VIEW_OF_INPUT:
                names[k] = _write_view(frame, k, frame.arguments[out.of], detached)
            case OutputKind.VIEW_OF_BASE:
                base = frame.returned(frame.first_base + out.of)
                names[k] = _write_view(frame, k, base, detached)
            case _:
                pass
    last = [k for k, out in enumerate(outputs) if out.kind is OutputKind.VIEW_OF_OUTPUT]
    # Views of such views come after them.
    for k in sorted(last, key=lambda k: outputs[k].of in last):
        names[k] = _write_view(frame, k, names[outputs[k].of], detached)
    for k, out in enumerate(outputs):
        if out.kind is OutputKind.SAME:
            names[k] = names[out.of]
    frame.code.line(f"results = ({listed(names[k] for k in range(len(outputs)))})")


def _write_view(frame: Frame, k: int, of: str, detached: set[int]) -> str:
    """Take the view that output `k` is of a tensor; the name of the variable that holds it.

    Views of a tensor that was detached on the way are all taken of one detached tensor. Those in
    `detached` are there already.
    """
    steps = frame.signature.outputs[k].steps
    known = [at for at, step in enumerate(steps) if step.detached in detached]
    if known:
        of, steps = f"d{steps[known[-1]].detached}", steps[known[-1] + 1 :]
    for step in steps:
        target = f"v{k}" if step.detached is None else f"d{step.detached}"
        if step.detached is not None:
            detached.add(step.detached)
        frame.line(f"{target} = {frame.view(of, step)}", with_grad=step.with_grad)
        of = target
    return of


def mark_free_dims(frame: Frame) -> None:
    """Tell Dynamo which sizes of results were symbols, so that it takes them for such at once."""
    for k, out in enumerate(frame.signature.outputs):
        if out.free_dims:
            mark = frame.code.call(dynamo.mark_free_dims, f"results[{k}]", repr(out.free_dims))
            frame.code.line(mark)


def set_grad_mode(frame: Frame) -> None:
    """Leave the grad mode that the function leaves behind."""
    after = frame.signature.grad_mode_after
    if after is not None:
        frame.code.line(frame.code.call(torch.set_grad_enabled, str(after)))


BEFORE = (check_arguments, make_leaves, merge_arguments, note_versions)
AFTER = (write_mutations, set_versions, write_results, mark_free_dims, set_grad_mode)
"""In this order, because views are taken of arguments that were written to."""


def emit(
    lowered: Lowered, run: Callable[..., Any], *, checks: bool, autocast: bool
) -> Callable[..., Any]:
    """The function to call instead of the one that was captured.

    `run` is `apply` of an autograd function, or the forward graph itself if there is no backward.
    A graph takes its inputs in a list, and inner tensors instead of tensor subclasses. With
    `checks`, the function refuses arguments unlike those that it was compiled for. With `autocast`,
    it is called with autocast on: the graph has its casts in it, and runs without.
    """
    signature, arrangement = lowered.signature, lowered.arrangement
    graph = lowered.wrappings if lowered.backward is None else None
    arguments = [f"a{i}" for i in range(len(arrangement.places))]
    code = CodeWriter("call", "call", arguments)
    frame = Frame(signature, arrangement, checks, code, arguments)
    for write in BEFORE:
        write(frame)
    inputs = [frame.input(at) for at in range(len(signature.inputs))]
    returned = [frame.returned(at) for at in range(signature.num_returned)]
    wrapped: Wrapped = () if graph is None else graph.returned
    names = all_names(returned, wrapped)
    # Autograd must not record a graph that was traced without a backward.
    takes_grad = any(one.requires_grad for one in signature.inputs)
    with_grad = signature.trains or (signature.grad_mode and not takes_grad)
    with ExitStack() as blocks:
        if autocast:
            blocks.enter_context(code.block(f"with {code.call(traces.no_autocast)}:"))
        blocks.enter_context(frame.grad_mode(with_grad))
        if graph is None:
            results = f"{code.name('run', run)}({', '.join(inputs)})"
        else:
            found = write_run(code, run, all_apart(inputs, graph.inputs))
            results = found.unpacked(0, len(names))
        if returned:
            code.line(f"{listed(names)}= {results}")
        elif graph is None:
            code.line(results)
    put_together(code, returned, wrapped)
    if graph is not None:
        for at, k in enumerate(signature.fresh, start=frame.first_fresh):
            out = signature.outputs[k]
            if out.is_view and out.is_base and wrapped[at] is None:
                code.line(f"{returned[at]} = {returned[at]}.detach()")
    for write in AFTER:
        write(frame)
    code.line("return results")
    return code.compiled()
