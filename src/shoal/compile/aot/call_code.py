"""The generated function around the graphs: arguments before, results after.

Each wrapper writes its lines, in the order of `WRAPPERS`; the generated function has all of them,
and none of a wrapper that has nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from shoal._torch import autograd, dynamo, operators, traces
from shoal.compile.aot.arrange import Arrangement, Constant, Itself, memory_of
from shoal.compile.aot.code_writer import CodeWriter
from shoal.compile.aot.graph_code import write_run
from shoal.compile.aot.signature import OutputKind, Signature, Step, Symbol
from shoal.compile.aot.subclass_code import all_apart, all_names, put_together
from shoal.compile.aot.subclasses import Wrapped, Wrappings


@dataclass(frozen=True, slots=True)
class Frame:
    """The names that wrappers use in the generated function."""

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


def call_of(code: CodeWriter, frame: Frame, tensor: str, step: Step) -> str:
    """The expression that takes a view."""

    def text(value: Any) -> str:
        if isinstance(value, Symbol):
            return frame.returned(frame.first_symbol + value.index)
        if isinstance(value, tuple):
            return "[" + ", ".join(text(item) for item in value) + "]"
        return code.literal(value)

    op = code.name("view", operators.operator_named(step.op))
    values = [tensor, *(text(arg) for arg in step.args)]
    values += [f"{key}={text(value)}" for key, value in step.kwargs]
    item = "" if step.item is None else f"[{step.item}]"
    return f"{op}({', '.join(values)}){item}"


def in_mode(code: CodeWriter, frame: Frame, with_grad: bool, line: str) -> None:
    """Write a line that runs with or without autograd, whatever the caller's mode is."""
    with mode(code, frame, with_grad):
        code.line(line)


@contextmanager
def mode(code: CodeWriter, frame: Frame, with_grad: bool) -> Iterator[None]:
    """Lines that are written meanwhile run with or without autograd, as said."""
    if with_grad == frame.signature.grad_mode:
        yield
        return
    name = ("enable_grad", torch.enable_grad) if with_grad else ("no_grad", torch.no_grad)
    code.begin(f"with {code.name(*name)}():")
    yield
    code.end()


class Wrapper:
    """Writes lines before the graphs run, and after; none, if it has nothing to do."""

    def before(self, code: CodeWriter, frame: Frame) -> None:
        """What happens to arguments."""

    def after(self, code: CodeWriter, frame: Frame) -> None:
        """What happens to arguments and results."""


class Assumptions(Wrapper):
    """Arguments are like those that the function was compiled for."""

    def before(self, code: CodeWriter, frame: Frame) -> None:
        """Refuse another argument where one came twice, and gradients where none were wanted."""
        if not frame.checks:
            return
        inputs, arrangement = frame.signature.inputs, frame.arrangement
        for i, place in enumerate(arrangement.places):
            if isinstance(place, Constant):
                continue
            name, first = frame.argument(i), arrangement.sources[place.input]
            if isinstance(place, Itself) and first != i:
                expected = f"be a duplicate of input {first}"
                self._refuse(code, i, f"{name} is not {frame.argument(first)}", expected)
            elif inputs[place.input].is_tensor and not inputs[place.input].requires_grad:
                self._refuse(code, i, f"{name}.requires_grad", "not require grad")

    def _refuse(self, code: CodeWriter, i: int, test: str, expected: str) -> None:
        message = (
            f"the graph was compiled under the assumption that input {i} would {expected}, but at "
            "runtime this was not the case. Compile it again for such arguments."
        )
        code.line(f"if {test}: raise AssertionError({message!r})")


class Leaves(Wrapper):
    """Arguments that the function makes require a gradient do so before autograd sees them."""

    def before(self, code: CodeWriter, frame: Frame) -> None:
        """Let them require one."""
        for at, one in enumerate(frame.signature.inputs):
            if one.mutation.is_made_leaf:
                code.line(f"{frame.input(at)}.requires_grad_()")


class Memory(Wrapper):
    """Arguments that share memory, one of which is written to, enter as one tensor."""

    def before(self, code: CodeWriter, frame: Frame) -> None:
        """Find the memory."""
        for at, is_memory in enumerate(frame.arrangement.is_memory):
            if is_memory:
                members = [frame.argument(i) for i in frame.arrangement.members(at)]
                first = frame.argument(frame.arrangement.sources[at])
                is_seen = frame.signature.inputs[at].mutation.by_autograd
                make = code.name("memory_of", memory_of)
                given = f"{first}, [{', '.join(members)}], is_seen={is_seen}"
                code.line(f"{frame.input(at)} = {make}({given})")


class Mutations(Wrapper):
    """What the function did to its arguments in place happens to them."""

    def before(self, code: CodeWriter, frame: Frame) -> None:
        """Note versions that the graph may raise too often."""
        if known := self._versioned(frame):
            versions = code.name("versions", autograd.versions_of)
            code.line(f"versions = {versions}(({self._names(frame, known)}))")
        if open_ended := self._open_ended(frame):
            versions = code.name("versions", autograd.versions_of)
            code.line(f"lowest = {versions}(({self._names(frame, open_ended)}))")

    def after(self, code: CodeWriter, frame: Frame) -> None:
        """Write what the graph returned for it; count what it wrote itself."""
        signature = frame.signature
        missing: list[int] = []
        for number, at in enumerate(signature.returned_mutations):
            mutation = signature.inputs[at].mutation
            if mutation.is_set:
                self._set(code, frame, at, frame.returned(number))
        self._reshape(code, frame)
        for number, at in enumerate(signature.returned_mutations):
            mutation = signature.inputs[at].mutation
            if mutation.is_set:
                continue
            target, value = frame.input(at), frame.returned(number)
            if not mutation.num_versions:
                code.line(f"{target}.data.copy_({value})")
                continue
            in_mode(code, frame, mutation.by_autograd, f"{target}.copy_({value})")
            missing += [at] * (mutation.num_versions - 1)
        for at in signature.graph_mutations:
            missing += [at] * (signature.inputs[at].num_missing_versions or 0)
        if missing:
            count = code.name("increment", torch.autograd.graph.increment_version)
            code.line(f"{count}(({self._names(frame, missing)}))")
        if known := self._versioned(frame):
            put = code.name("set_versions", autograd.set_versions)
            more = tuple(signature.inputs[at].mutation.num_versions for at in known)
            code.line(f"{put}(({self._names(frame, known)}), versions, {more!r})")
        if open_ended := self._open_ended(frame):
            put = code.name("raise_versions", autograd.raise_versions)
            more = tuple(signature.inputs[at].mutation.num_versions for at in open_ended)
            code.line(f"{put}(({self._names(frame, open_ended)}), lowest, {more!r})")

    def _open_ended(self, frame: Frame) -> list[int]:
        """The inputs whose versions custom operators raise, by as much as they like."""
        inputs = frame.signature.inputs
        return [i for i in frame.signature.graph_mutations if inputs[i].is_counted_by_operators]

    def _versioned(self, frame: Frame) -> list[int]:
        """The inputs that the graph writes to, whose versions may be too high afterwards."""
        signature = frame.signature
        missing = ((i, signature.inputs[i].num_missing_versions) for i in signature.graph_mutations)
        return [at for at, number in missing if number is None or number < 0]

    def _names(self, frame: Frame, inputs: Sequence[int]) -> str:
        return "".join(f"{frame.input(at)}, " for at in inputs)

    def _set(self, code: CodeWriter, frame: Frame, at: int, value: str) -> None:
        in_mode(code, frame, False, f"{frame.input(at)}.set_({value})")

    def _reshape(self, code: CodeWriter, frame: Frame) -> None:
        for reshape in frame.signature.reshapes:
            for step in reshape.steps:
                call = call_of(code, frame, frame.argument(reshape.argument), step)
                in_mode(code, frame, step.with_grad, call)


class Outputs(Wrapper):
    """What the function returns: of the graph, an argument, or a view taken again."""

    def after(self, code: CodeWriter, frame: Frame) -> None:
        """Put the results together."""
        outputs = frame.signature.outputs
        names: dict[int, str] = {}
        views = _Views(code, frame)
        fresh = {
            k: frame.returned(frame.first_fresh + n) for n, k in enumerate(frame.signature.fresh)
        }
        for k, out in enumerate(outputs):
            if out.kind is OutputKind.FRESH:
                names[k] = fresh[k]
                if out.is_new_leaf:
                    code.line(f"{names[k]}.requires_grad_()")
        for k, out in enumerate(outputs):
            match out.kind:
                case OutputKind.CONSTANT:
                    names[k] = code.literal(out.value)
                case OutputKind.INPUT:
                    names[k] = frame.argument(out.of)
                case OutputKind.VIEW_OF_INPUT:
                    names[k] = views.write(f"v{k}", frame.argument(out.of), out.steps)
                case OutputKind.VIEW_OF_BASE:
                    base = frame.returned(frame.first_base + out.of)
                    names[k] = views.write(f"v{k}", base, out.steps)
                case _:
                    pass
        last = [k for k, out in enumerate(outputs) if out.kind is OutputKind.VIEW_OF_OUTPUT]
        # Those of others of them come after these.
        for k in sorted(last, key=lambda k: outputs[k].of in last):
            out = outputs[k]
            names[k] = views.write(f"v{k}", names[out.of], out.steps)
        for k, out in enumerate(outputs):
            if out.kind is OutputKind.SAME:
                names[k] = names[out.of]
        listed = "".join(f"{names[k]}, " for k in range(len(outputs)))
        code.line(f"results = ({listed})")


class _Views:
    """Views that are taken again; of what was detached once, not one by one."""

    def __init__(self, code: CodeWriter, frame: Frame) -> None:
        self._code = code
        self._frame = frame
        self._detached: set[int] = set()

    def write(self, name: str, of: str, steps: tuple[Step, ...]) -> str:
        """Take some steps from one name to another, which is returned."""
        places = [at for at, step in enumerate(steps) if step.detached in self._detached]
        if places:
            of, steps = f"d{steps[places[-1]].detached}", steps[places[-1] + 1 :]
        for step in steps:
            target = name
            if step.detached is not None:
                target = f"d{step.detached}"
                self._detached.add(step.detached)
            line = f"{target} = {call_of(self._code, self._frame, of, step)}"
            in_mode(self._code, self._frame, step.with_grad, line)
            of = target
        return of


class FreeDims(Wrapper):
    """Dynamo is told which sizes of results were symbols, and takes them for such at once."""

    def after(self, code: CodeWriter, frame: Frame) -> None:
        """Mark the results."""
        for k, out in enumerate(frame.signature.outputs):
            if out.free_dims:
                mark = code.name("mark_free_dims", dynamo.mark_free_dims)
                code.line(f"{mark}(results[{k}], {out.free_dims!r})")


class GradMode(Wrapper):
    """The grad mode that the function leaves behind."""

    def after(self, code: CodeWriter, frame: Frame) -> None:
        """Leave it behind."""
        after = frame.signature.grad_mode_after
        if after is not None:
            code.line(f"{code.name('set_grad', torch.set_grad_enabled)}({after})")


WRAPPERS: tuple[Wrapper, ...] = (
    Assumptions(),
    Leaves(),
    Memory(),
    Mutations(),
    Outputs(),
    FreeDims(),
    GradMode(),
)
"""The order in which they are written, before and after alike: views are of what was written."""


def emit(
    signature: Signature,
    arrangement: Arrangement,
    run: Callable[..., Any],
    *,
    graph: Wrappings | None = None,
    checks: bool = False,
    autocast: bool = False,
) -> Callable[..., Any]:
    """The function to call instead of the one that was captured.

    `run` is an autograd function's, or that of a `graph`, whose inputs come in a list that it
    empties, and which knows nothing of tensors that wrap others. With `checks`, arguments unlike
    those that it was compiled for are refused. With `autocast`, calls come inside of it: what it
    has to cast is cast in the graph already, and the rest is to stay as it is.
    """
    code = CodeWriter("call")
    frame = Frame(signature, arrangement, checks)
    arguments = ", ".join(frame.argument(i) for i in range(len(arrangement.places)))
    code.begin(f"def call({arguments}):")
    for wrapper in WRAPPERS:
        wrapper.before(code, frame)
    inputs = [frame.input(at) for at in range(len(signature.inputs))]
    returned = [frame.returned(at) for at in range(signature.num_returned)]
    wrapped: Wrapped = () if graph is None else graph.returned
    # Without anything to differentiate, nothing may be recorded; the graph was traced so.
    records = signature.trains or not any(one.requires_grad for one in signature.inputs)
    if autocast:
        code.begin(f"with {code.name('no_autocast', traces.no_autocast)}():")
    with mode(code, frame, signature.trains or (records and signature.grad_mode)):
        if graph is None:
            results = f"{code.name('run', run)}({', '.join(inputs)})"
        else:
            found = write_run(code, run, all_apart(inputs, graph.inputs))
            results = found.unpacked(0, len(all_names(returned, wrapped)))
        if returned:
            names = "".join(f"{name}, " for name in all_names(returned, wrapped))
            code.line(f"{names}= {results}")
        elif graph is None:
            code.line(results)
    if autocast:
        code.end()
    put_together(code, returned, wrapped)
    if graph is not None:
        for at, k in enumerate(signature.fresh, start=frame.first_fresh):
            out = signature.outputs[k]
            if out.is_view and out.is_base and wrapped[at] is None:
                code.line(f"{returned[at]} = {returned[at]}.detach()")
    for wrapper in WRAPPERS:
        wrapper.after(code, frame)
    code.line("return results")
    code.end()
    return code.compiled("call")
