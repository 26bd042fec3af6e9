"""Generate the autograd function that runs a forward graph and a backward graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shoal._torch import autograd, dynamo, settings, traces
from shoal.compile.aot.code_writer import CodeWriter, listed
from shoal.compile.aot.graph_code import Boxed, DirectGraph, write_run
from shoal.compile.aot.lowered import Lowered
from shoal.compile.aot.subclass_code import (
    all_apart,
    all_names,
    names_for,
    put_together,
    taken_apart,
)
from shoal.compile.aot.subclasses import Wrapped, Wrappings, as_traced
from shoal.compile.observe.observation import current, resumed

DOUBLE_BACKWARD = (
    "torch.compile with aot_autograd does not currently support double backward: the backward "
    "graph has no derivative. Run the function without torch.compile for second derivatives."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Graphs:
    """The compiled graphs of a function that is differentiated."""

    lowered: Lowered
    forward: Boxed
    backward: Callable[[bool], Boxed]
    """Compiles the backward graph; the argument says whether it may write over saved tensors."""
    donates: bool = False
    """Whether the backward graph would write over saved tensors if it may."""
    num_symbols: int
    """The number of symbols that forward returns for backward, after the tensors."""
    dependence: tuple[frozenset[int], ...]
    """For each gradient that the backward graph returns, the tangents it depends on."""

    @property
    def wrappings(self) -> Wrappings:
        """Which of the values around the graphs wrap other tensors."""
        return self.lowered.wrappings

    def is_partial(self, numbers: frozenset[int]) -> bool:
        """Whether a gradient depends on some tangents only, which may be missing alone."""
        return 0 < len(numbers) < len(self.wrappings.tangents)

    @property
    def watched(self) -> frozenset[int]:
        """The tangents that backward has to compare with None."""
        return frozenset().union(*(one for one in self.dependence if self.is_partial(one)))

    @property
    def gets_none(self) -> bool:
        """Whether backward itself fills in tangents that autograd has no gradient for."""
        return bool(self.watched) or self.wrappings.any

    @property
    def has_symbols(self) -> bool:
        """Whether the sizes of tangents differ from call to call."""
        sizes = (size for one in self.lowered.tangents if one is not None for size in one.shape)
        return any(isinstance(size, torch.SymInt) for size in sizes)


def as_laid_out(tangent: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A gradient in the memory format that backward was traced for."""
    # Strides of dimensions of one element say nothing.
    if all(
        size == 1 or a == b
        for size, a, b in zip(tangent.shape, tangent.stride(), strides, strict=True)
    ):
        return tangent
    out = torch.empty_strided(tangent.shape, strides, dtype=tangent.dtype, device=tangent.device)
    return out.copy_(tangent)


def zeros(
    sizes: Sequence[Sequence[int]], kinds: Sequence[tuple[torch.dtype, torch.device] | None]
) -> list[Tensor | None]:
    """The parts of a missing tangent; None for parts that the graph does not take."""
    return [
        None if kind is None else torch.zeros(size, dtype=kind[0], device=kind[1])
        for size, kind in zip(sizes, kinds, strict=True)
    ]


def make_function(graphs: Graphs) -> Callable[..., Any]:
    """`apply` of an autograd function made for these graphs."""
    observation = current()

    def backward(ctx: Any, *tangents: Any) -> Any:
        with resumed(observation):
            written = _backward(graphs)
        autograd.set_backward(function, written)
        return written(ctx, *tangents)

    function = type(
        # As torch's own runtime calls its function: programs and profiles look for the name.
        "CompiledFunction",
        (torch.autograd.Function,),
        {"forward": staticmethod(_forward(graphs))},
    )
    autograd.set_backward(function, backward)
    inputs = graphs.lowered.signature.inputs
    return autograd.applied(function, all_tensors=all(one.is_tensor for one in inputs))


def _forward(graphs: Graphs) -> Callable[..., Any]:
    lowered, signature = graphs.lowered, graphs.lowered.signature
    inputs = [f"i{at}" for at in range(len(signature.inputs))]
    returned = [f"r{at}" for at in range(signature.num_returned)]
    code = CodeWriter("forward", "forward", ["ctx", *inputs])
    wrapped = graphs.wrappings.returned
    names = all_names(returned, wrapped)
    results = write_run(code, graphs.forward, all_apart(inputs, graphs.wrappings.inputs))
    visible, kept = len(names), len(names) + lowered.num_saved
    if names:
        code.line(f"{listed(names)}= {results.unpacked(0, visible)}")
    put_together(code, returned, wrapped)
    _write_sizes(code, returned, graphs)
    for at, dims in lowered.free_dims.items():
        code.line(code.call(dynamo.mark_free_dims, results.one(visible + at), repr(dims)))
    if lowered.num_saved:
        code.line(f"ctx.save_for_backward({results.arguments(visible, kept)})")
    if graphs.donates:
        code.line(f"ctx.is_shared = {code.call(autograd.has_hooks_on_saved)}")
    if graphs.num_symbols:
        code.line(f"ctx.symbols = {results.unpacked(kept, kept + graphs.num_symbols)}")
    views = [signature.outputs[k].is_view for k in signature.fresh]
    views += [base.is_view for base in signature.bases]
    first = len(signature.returned_mutations)
    for at, is_view in enumerate(views, start=first):
        if is_view and wrapped[at] is None:
            # Callers may write to an output, which autograd refuses for a view made in here. To
            # autograd, `detach` gives no view, and a write to it raises the version of saved ones.
            code.line(f"{returned[at]} = {returned[at]}.detach()")
    are_tensors = [True] * len(signature.differentiable)
    for at, k in enumerate(signature.fresh, start=first):
        are_tensors[at] = signature.outputs[k].is_tensor
    kinds = zip(returned, are_tensors, signature.differentiable, strict=False)
    fixed = [name for name, is_tensor, has_tangent in kinds if is_tensor and not has_tangent]
    if fixed:
        code.line(code.call(autograd.leave_undifferentiated, "ctx", *fixed))
    code.line(f"return ({listed(returned)})")
    return code.compiled()


def _backward(graphs: Graphs) -> Callable[..., Any]:
    """The backward, with its graph compiled."""
    lowered, signature = graphs.lowered, graphs.lowered.signature
    names = [f"t{at}" for at in range(signature.num_returned)]
    code = CodeWriter("backward", "backward", ["ctx", *names])
    # The graph contains its casts: a backward that is called with autocast must add none.
    with code.block(f"if {code.call(settings.is_autocast)}:"):
        no_autocast = code.call(traces.no_autocast)
        code.line(f"with {no_autocast}: return backward(ctx, {', '.join(names)})")
    wanted = [name for name, has in zip(names, signature.differentiable, strict=False) if has]
    given = _write_tangents(code, wanted, graphs)
    taken = [one for one in lowered.tangents if one is not None]
    for name, strides in zip(given, (tuple(one.stride()) for one in taken), strict=True):
        if any(isinstance(one, torch.SymInt) for one in strides):
            code.line(f"{name} = {name}.contiguous()")
            continue
        laid_out = code.call(as_laid_out, name, repr(strides))
        code.line(f"if {name}.stride() != {strides!r}: {name} = {laid_out}")
    if lowered.writes_late:
        code.line(f"if {code.call(torch.is_grad_enabled)}: {code.call(_refuse_writes)}")
    _write_backward_graph(code, graphs, given)
    if lowered.copied or graphs.watched:
        code.line("grads = list(grads)")
    for at in lowered.copied:
        code.line(f"grads[{at}] = grads[{at}].clone()")
    _write_gradients(code, graphs.wrappings.gradients)
    _write_omissions(code, graphs)
    code.line(f"if through is not None: grads = {code.call(_refuse_twice, 'grads', 'through')}")
    code.line("return tuple(grads)")
    return code.compiled()


def _write_backward_graph(code: CodeWriter, graphs: Graphs, tangents: list[str]) -> None:
    """Run the graph: it returns `grads`, which depend on `through` if they are recorded."""
    if_recorded = f"if {code.call(torch.is_grad_enabled)} else None"
    # The graph frees each after its last use, if nothing else holds it.
    clear = "ctx.maybe_clear_saved_tensors()"
    run = None if graphs.donates else graphs.backward(False)
    held = [
        ("y", "ctx.symbols", graphs.num_symbols),
        ("s", "ctx.saved_tensors", graphs.lowered.num_saved),
    ]
    if isinstance(run, DirectGraph):
        inputs: list[str] = []
        for letter, source, number in held:
            names = [f"{letter}{at}" for at in range(number)]
            if names:
                code.line(f"{listed(names)}= {source}")
            inputs += names
        inputs += tangents
        through = code.call(_through, "ctx", f"[{', '.join(inputs)}]")
        code.line(f"through = {through} {if_recorded}")
        code.line(clear)
        code.line(f"grads = ({listed(run.write(code, inputs))})")
        return
    inputs = [f"*{source}" for _, source, number in held if number]
    code.line(f"inputs = [{', '.join([*inputs, *tangents])}]")
    code.line(f"through = {code.call(_through, 'ctx', 'inputs')} {if_recorded}")
    code.line(clear)
    if run is not None:
        code.line(f"grads = {code.name('graph', run)}(inputs)")
        return
    # One graph writes over saved tensors, for their last use. The other one does not: it is for
    # `retain_graph`, and for hooks that may hold saved tensors. Each is compiled when it is needed.
    is_last = f"not (ctx.is_shared or {code.call(autograd.keeps_graph)})"
    code.line(f"grads = {code.call(cache(graphs.backward), is_last)}(inputs)")


def _write_sizes(code: CodeWriter, names: list[str], graphs: Graphs) -> None:
    """Keep the sizes of outputs whose tangents may be missing, if they differ by call."""
    if not graphs.gets_none:
        return
    code.line("ctx.set_materialize_grads(False)")
    if not graphs.has_symbols:
        return
    sizes: list[str] = []
    differentiable = graphs.lowered.signature.differentiable
    kept = zip(names, graphs.wrappings.returned, differentiable, strict=False)
    for name, wrapping, has_tangent in kept:
        if has_tangent:
            apart = taken_apart(name, wrapping, symbols=False)
            sizes.append(f"({listed(f'{one}.shape' for one in apart)})")
    code.line(f"ctx.sizes = ({listed(sizes)})")


def _write_tangents(code: CodeWriter, names: list[str], graphs: Graphs) -> list[str]:
    """Fill in missing tangents, take tensor subclasses apart; the names of the graph's tangents.

    With `gets_none`, autograd fills in nothing. Its zeros would be plain tensors, and would look
    like gradients.
    """
    if not graphs.gets_none:
        return names
    found: list[str] = []
    tangents = graphs.lowered.tangents
    for number, (name, wrapping) in enumerate(zip(names, graphs.wrappings.tangents, strict=True)):
        parts = names_for(name, wrapping, symbols=False)
        like = tangents[len(found) : len(found) + len(parts)]
        found += parts
        if number in graphs.watched:
            code.line(f"n{number} = {name} is None")
        with code.block(f"if {name} is None:"):
            code.line(f"{listed(parts)}= {_zeros_for(code, number, like, graphs)}")
        if graphs.wrappings.any:
            with code.block("else:"):
                expected = "None" if wrapping is None else code.name("wrapping", wrapping)
                code.line(f"{name} = {code.call(as_traced, name, expected)}")
                if wrapping is not None:
                    apart = taken_apart(name, wrapping, symbols=False)
                    code.line(f"{listed(parts)}= {listed(apart)}")
    return [name for name, one in zip(found, tangents, strict=True) if one is not None]


def _zeros_for(code: CodeWriter, number: int, like: Sequence[Tensor | None], graphs: Graphs) -> str:
    kinds = tuple(None if one is None else (one.dtype, one.device) for one in like)
    sizes = f"ctx.sizes[{number}]"
    if not graphs.has_symbols:
        sizes = code.literal(tuple(() if one is None else tuple(one.shape) for one in like))
    return code.call(zeros, sizes, code.name("kinds", kinds))


def _write_omissions(code: CodeWriter, graphs: Graphs) -> None:
    """Leave out gradients that no tangent flowed into, as autograd does."""
    for i, numbers in enumerate(graphs.dependence):
        if graphs.is_partial(numbers):
            test = " and ".join(f"n{number}" for number in sorted(numbers))
            code.line(f"if {test}: grads[{i}] = None")


def _write_gradients(code: CodeWriter, wrapped: Wrapped) -> None:
    """Rebuild gradients that are tensor subclasses."""
    if not any(one is not None for one in wrapped):
        return
    names = [f"g{at}" for at in range(len(wrapped))]
    code.line(f"{listed(all_names(names, wrapped))}= grads")
    put_together(code, names, wrapped)
    code.line(f"grads = [{', '.join(names)}]")


def _refuse_writes() -> None:
    raise NotImplementedError(
        "aot_autograd does not support input mutations with requires_grad in backward for "
        "create_graph=True: what is written could not be differentiated. Run the function without "
        "a compiler for second derivatives."
    )


def _through(ctx: Any, inputs: list[Any]) -> list[Tensor]:
    """The tensors that gradients depend on: to differentiate by one of them has to raise."""
    taken = [one for one in inputs if isinstance(one, Tensor) and one.requires_grad]
    return [*taken, *autograd.leaves_after(ctx)]


def _refuse_twice(grads: list[Any], through: list[Tensor]) -> list[Any]:
    """Gradients that raise an error when they are differentiated."""
    return [
        autograd.delayed_error(DOUBLE_BACKWARD, grad, through) if isinstance(grad, Tensor) else grad
        for grad in grads
    ]
