"""What happens around the graphs: one wrapper for each thing, which writes its own lines."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal._torch import autograd, dynamo
from shoal.compile.aot.arrange import Constant, Itself, memory_of
from shoal.compile.aot.frame import Frame, call_of, in_mode
from shoal.compile.aot.signature import OutputKind, Step
from shoal.compile.aot.source import Source


class Wrapper:
    """Writes lines before the graphs run, and after; none, if it has nothing to do."""

    def before(self, source: Source, frame: Frame) -> None:
        """What happens to arguments."""

    def after(self, source: Source, frame: Frame) -> None:
        """What happens to arguments and results."""


class Assumptions(Wrapper):
    """Arguments are like those that the function was compiled for."""

    def before(self, source: Source, frame: Frame) -> None:
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
                self._refuse(source, i, f"{name} is not {frame.argument(first)}", expected)
            elif inputs[place.input].is_tensor and not inputs[place.input].requires_grad:
                self._refuse(source, i, f"{name}.requires_grad", "not require grad")

    def _refuse(self, source: Source, i: int, test: str, expected: str) -> None:
        message = (
            f"the graph was compiled under the assumption that input {i} would {expected}, but at "
            "runtime this was not the case. Compile it again for such arguments."
        )
        source.line(f"if {test}: raise AssertionError({message!r})")


class Leaves(Wrapper):
    """Arguments that the function makes require a gradient do so before autograd sees them."""

    def before(self, source: Source, frame: Frame) -> None:
        """Let them require one."""
        for at, one in enumerate(frame.signature.inputs):
            if one.mutation.is_made_leaf:
                source.line(f"{frame.input(at)}.requires_grad_()")


class Memory(Wrapper):
    """Arguments that share memory, one of which is written to, enter as one tensor."""

    def before(self, source: Source, frame: Frame) -> None:
        """Find the memory."""
        for at, is_memory in enumerate(frame.arrangement.is_memory):
            if is_memory:
                members = [frame.argument(i) for i in frame.arrangement.members(at)]
                first = frame.argument(frame.arrangement.sources[at])
                is_seen = frame.signature.inputs[at].mutation.by_autograd
                make = source.name("memory_of", memory_of)
                given = f"{first}, [{', '.join(members)}], is_seen={is_seen}"
                source.line(f"{frame.input(at)} = {make}({given})")


class Mutations(Wrapper):
    """What the function did to its arguments in place happens to them."""

    def before(self, source: Source, frame: Frame) -> None:
        """Note versions that the graph may raise too often."""
        if known := self._versioned(frame):
            versions = source.name("versions", autograd.versions_of)
            source.line(f"versions = {versions}(({self._names(frame, known)}))")
        if open_ended := self._open_ended(frame):
            versions = source.name("versions", autograd.versions_of)
            source.line(f"lowest = {versions}(({self._names(frame, open_ended)}))")

    def after(self, source: Source, frame: Frame) -> None:
        """Write what the graph returned for it; count what it wrote itself."""
        signature = frame.signature
        missing: list[int] = []
        for number, at in enumerate(signature.returned_mutations):
            mutation = signature.inputs[at].mutation
            if mutation.is_set:
                self._set(source, frame, at, frame.returned(number))
        self._reshape(source, frame)
        for number, at in enumerate(signature.returned_mutations):
            mutation = signature.inputs[at].mutation
            if mutation.is_set:
                continue
            target, value = frame.input(at), frame.returned(number)
            if not mutation.num_versions:
                source.line(f"{target}.data.copy_({value})")
                continue
            in_mode(source, frame, mutation.by_autograd, f"{target}.copy_({value})")
            missing += [at] * (mutation.num_versions - 1)
        for at in signature.graph_mutations:
            missing += [at] * (signature.inputs[at].num_missing_versions or 0)
        if missing:
            count = source.name("increment", torch.autograd.graph.increment_version)
            source.line(f"{count}(({self._names(frame, missing)}))")
        if known := self._versioned(frame):
            put = source.name("set_versions", autograd.set_versions)
            more = tuple(signature.inputs[at].mutation.num_versions for at in known)
            source.line(f"{put}(({self._names(frame, known)}), versions, {more!r})")
        if open_ended := self._open_ended(frame):
            put = source.name("raise_versions", autograd.raise_versions)
            more = tuple(signature.inputs[at].mutation.num_versions for at in open_ended)
            source.line(f"{put}(({self._names(frame, open_ended)}), lowest, {more!r})")

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

    def _set(self, source: Source, frame: Frame, at: int, value: str) -> None:
        in_mode(source, frame, False, f"{frame.input(at)}.set_({value})")

    def _reshape(self, source: Source, frame: Frame) -> None:
        for reshape in frame.signature.reshapes:
            for step in reshape.steps:
                call = call_of(source, frame, frame.argument(reshape.argument), step)
                in_mode(source, frame, step.with_grad, call)


class Outputs(Wrapper):
    """What the function returns: of the graph, an argument, or a view taken again."""

    def after(self, source: Source, frame: Frame) -> None:
        """Put the results together."""
        outputs = frame.signature.outputs
        names: dict[int, str] = {}
        views = _Views(source, frame)
        fresh = {
            k: frame.returned(frame.first_fresh + n) for n, k in enumerate(frame.signature.fresh)
        }
        for k, out in enumerate(outputs):
            if out.kind is OutputKind.FRESH:
                names[k] = fresh[k]
                if out.is_new_leaf:
                    source.line(f"{names[k]}.requires_grad_()")
        for k, out in enumerate(outputs):
            match out.kind:
                case OutputKind.CONSTANT:
                    names[k] = source.literal(out.value)
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
        source.line(f"results = ({listed})")


class _Views:
    """Views that are taken again; of what was detached once, not one by one."""

    def __init__(self, source: Source, frame: Frame) -> None:
        self._source = source
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
            line = f"{target} = {call_of(self._source, self._frame, of, step)}"
            in_mode(self._source, self._frame, step.with_grad, line)
            of = target
        return of


class FreeDims(Wrapper):
    """Dynamo is told which sizes of results were symbols, and takes them for such at once."""

    def after(self, source: Source, frame: Frame) -> None:
        """Mark the results."""
        for k, out in enumerate(frame.signature.outputs):
            if out.free_dims:
                mark = source.name("mark_free_dims", dynamo.mark_free_dims)
                source.line(f"{mark}(results[{k}], {out.free_dims!r})")


class GradMode(Wrapper):
    """The grad mode that the function leaves behind."""

    def after(self, source: Source, frame: Frame) -> None:
        """Leave it behind."""
        after = frame.signature.grad_mode_after
        if after is not None:
            source.line(f"{source.name('set_grad', torch.set_grad_enabled)}({after})")


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
