"""Generate the autograd function that runs a forward graph and a backward graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal._torch import autograd, dynamo, settings, traces
from shoal.compile.aot.code_writer import CodeWriter
from shoal.compile.aot.graph_code import Boxed, DirectGraph, write_run
from shoal.compile.aot.signature import Signature
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
    """What runs: both boxed; the backward is made when it is first needed."""

    forward: Boxed
    backward: Callable[[bool], Boxed]
    """Makes it; told whether it may write over what was saved."""
    donates: bool = False
    """Whether it would write over what was saved, if it may."""
    num_saved: int
    """Tensors that forward returns for backward."""
    num_symbols: int
    """Numbers that it returns for backward after them."""
    free_dims: Mapping[int, tuple[int, ...]]
    """Of the tensors, the dims whose sizes differ from call to call."""
    tangents: Sequence[Tensor | None]
    """Fake gradients that the backward graph takes; None for parts that it does not take."""
    dependence: tuple[frozenset[int], ...]
    """For each gradient that the backward graph returns, the tangents it depends on."""
    copied: tuple[int, ...] = ()
    """Of what the backward graph returns, what lies in the memory of something else there."""
    writes_late: bool = False
    """Whether backward writes to an input that requires a gradient."""
    wrappings: Wrappings

    def is_partial(self, numbers: frozenset[int]) -> bool:
        """Whether a gradient that depends on these tangents may get nothing while others do."""
        return 0 < len(numbers) < len(self.wrappings.tangents)

    @property
    def watched(self) -> frozenset[int]:
        """The tangents of which it matters whether they came."""
        return frozenset().union(*(one for one in self.dependence if self.is_partial(one)))

    @property
    def gets_none(self) -> bool:
        """Whether backward deals itself with gradients that did not come."""
        return bool(self.watched) or self.wrappings.any

    @property
    def has_symbols(self) -> bool:
        """Whether the sizes of gradients differ from call to call."""
        sizes = (size for one in self.tangents if one is not None for size in one.shape)
        return any(isinstance(size, torch.SymInt) for size in sizes)


def _strides_of(tangent: Tensor) -> tuple[int, ...] | None:
    """How a gradient is to lie in memory; None where it depends on sizes."""
    strides = tangent.stride()
    return None if any(isinstance(one, torch.SymInt) for one in strides) else tuple(strides)


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
    """What a graph takes for a gradient that did not come; None for parts that it does not take."""
    return [
        None if kind is None else torch.zeros(size, dtype=kind[0], device=kind[1])
        for size, kind in zip(sizes, kinds, strict=True)
    ]


def make_function(signature: Signature, graphs: Graphs) -> Callable[..., Any]:
    """`apply` of an autograd function made for these graphs."""
    observation = current()

    def backward(ctx: Any, *tangents: Any) -> Any:
        with resumed(observation):
            written = _backward(signature, graphs)
        autograd.set_backward(function, written)
        return written(ctx, *tangents)

    function = type(
        # As torch's own runtime calls its function: programs and profiles look for the name.
        "CompiledFunction",
        (torch.autograd.Function,),
        {"forward": staticmethod(_forward(signature, graphs))},
    )
    autograd.set_backward(function, backward)
    return autograd.applied(function, all_tensors=all(one.is_tensor for one in signature.inputs))


def _forward(signature: Signature, graphs: Graphs) -> Callable[..., Any]:
    code = CodeWriter("forward")
    inputs = [f"i{at}" for at in range(len(signature.inputs))]
    returned = [f"r{at}" for at in range(signature.num_returned)]
    code.begin(f"def forward(ctx, {', '.join(inputs)}):")
    wrapped = graphs.wrappings.returned
    names = all_names(returned, wrapped)
    results = write_run(code, graphs.forward, all_apart(inputs, graphs.wrappings.inputs))
    visible, kept = len(names), len(names) + graphs.num_saved
    if names:
        code.line(f"{''.join(f'{name}, ' for name in names)}= {results.unpacked(0, visible)}")
    put_together(code, returned, wrapped)
    _write_sizes(code, returned, signature, graphs)
    for at, dims in graphs.free_dims.items():
        mark = code.name("mark_free_dims", dynamo.mark_free_dims)
        code.line(f"{mark}({results.one(visible + at)}, {dims!r})")
    if graphs.num_saved:
        code.line(f"ctx.save_for_backward({results.several(visible, kept)})")
    if graphs.donates:
        code.line(f"ctx.is_shared = {code.name('is_hooked', autograd.has_hooks_on_saved)}()")
    if graphs.num_symbols:
        code.line(f"ctx.symbols = {results.unpacked(kept, kept + graphs.num_symbols)}")
    views = [signature.outputs[k].is_view for k in signature.fresh]
    views += [base.is_view for base in signature.bases]
    first = len(signature.returned_mutations)
    for at, is_view in enumerate(views, start=first):
        if is_view and wrapped[at] is None:
            # An output may be written to: a view made in here would refuse that. What `detach`
            # gives is no view for autograd, and a write to it still counts for what was saved.
            code.line(f"{returned[at]} = {returned[at]}.detach()")
    fixed = [
        name
        for name, is_differentiable, is_tensor in zip(
            returned, signature.differentiable, _are_tensors(signature), strict=False
        )
        if is_tensor and not is_differentiable
    ]
    if fixed:
        leave = code.name("leave_undifferentiated", autograd.leave_undifferentiated)
        code.line(f"{leave}(ctx, {', '.join(fixed)})")
    code.line(f"return ({''.join(f'{name}, ' for name in returned)})")
    code.end()
    return code.compiled("forward")


def _are_tensors(signature: Signature) -> list[bool]:
    return [
        *(True for _ in signature.returned_mutations),
        *(signature.outputs[k].is_tensor for k in signature.fresh),
        *(True for _ in signature.bases),
    ]


def _backward(signature: Signature, graphs: Graphs) -> Callable[..., Any]:
    """The backward, with its graph compiled."""
    code = CodeWriter("backward")
    names = [f"t{at}" for at in range(signature.num_returned)]
    code.begin(f"def backward(ctx, {', '.join(names)}):")
    # What was not cast in the graph must not be cast because backward is called in there.
    code.begin(f"if {code.name('is_autocast', settings.is_autocast)}():")
    no_autocast = code.name("no_autocast", traces.no_autocast)
    code.line(f"with {no_autocast}(): return backward(ctx, {', '.join(names)})")
    code.end()
    wanted = [name for name, has in zip(names, signature.differentiable, strict=False) if has]
    given = _write_tangents(code, wanted, graphs)
    taken = [one for one in graphs.tangents if one is not None]
    for name, strides in zip(given, map(_strides_of, taken), strict=True):
        if strides is not None:
            coerce = code.name("as_laid_out", as_laid_out)
            test = f"if {name}.stride() != {strides!r}:"
            code.line(f"{test} {name} = {coerce}({name}, {strides!r})")
        else:
            code.line(f"{name} = {name}.contiguous()")
    is_on = code.name("is_grad_enabled", torch.is_grad_enabled)
    if graphs.writes_late:
        code.line(f"if {is_on}(): {code.name('refuse_writes', _refuse_writes)}()")
    _write_backward_graph(code, graphs, given)
    if graphs.copied or graphs.watched:
        code.line("grads = list(grads)")
    for at in graphs.copied:
        code.line(f"grads[{at}] = grads[{at}].clone()")
    _write_gradients(code, graphs.wrappings.gradients)
    _write_omissions(code, graphs)
    refuse = code.name("refuse", _refuse_twice)
    code.line(f"if through is not None: grads = {refuse}(grads, through)")
    code.line("return tuple(grads)")
    code.end()
    return code.compiled("backward")


def _write_backward_graph(code: CodeWriter, graphs: Graphs, tangents: list[str]) -> None:
    """Run the graph: `grads` is what it returns, `through` is what they depend on, if wanted."""
    through = code.name("through", _through)
    is_on = code.name("is_grad_enabled", torch.is_grad_enabled)
    # The graph frees each after its last use, if nothing else holds it.
    clear = "ctx.maybe_clear_saved_tensors()"
    run = None if graphs.donates else graphs.backward(False)
    if isinstance(run, DirectGraph):
        symbols = [f"y{at}" for at in range(graphs.num_symbols)]
        saved = [f"s{at}" for at in range(graphs.num_saved)]
        if symbols:
            code.line(f"{', '.join(symbols)}, = ctx.symbols")
        if saved:
            code.line(f"{', '.join(saved)}, = ctx.saved_tensors")
        inputs = [*symbols, *saved, *tangents]
        given = f"[{', '.join(inputs)}]"
        code.line(f"through = {through}(ctx, {given}) if {is_on}() else None")
        code.line(clear)
        results = run.write(code, inputs)
        code.line(f"grads = ({''.join(f'{one}, ' for one in results)})")
        return
    symbols = ["*ctx.symbols"] if graphs.num_symbols else []
    saved = ["*ctx.saved_tensors"] if graphs.num_saved else []
    code.line(f"inputs = [{', '.join([*symbols, *saved, *tangents])}]")
    code.line(f"through = {through}(ctx, inputs) if {is_on}() else None")
    code.line(clear)
    if run is not None:
        code.line(f"grads = {code.name('graph', run)}(inputs)")
        return
    lazy = code.name("graphs", _Lazy(graphs.backward))
    keeps = code.name("keeps_graph", autograd.keeps_graph)
    code.line(f"grads = {lazy}[not (ctx.is_shared or {keeps}())](inputs)")


def _write_sizes(code: CodeWriter, names: list[str], signature: Signature, graphs: Graphs) -> None:
    """Keep the sizes of what gradients may not come for, where they differ from call to call."""
    if not graphs.gets_none:
        return
    code.line("ctx.set_materialize_grads(False)")
    if not graphs.has_symbols:
        return
    sizes: list[str] = []
    kept = zip(names, graphs.wrappings.returned, signature.differentiable, strict=False)
    for name, wrapping, has_tangent in kept:
        if has_tangent:
            apart = taken_apart(name, wrapping, symbols=False)
            sizes.append(f"({''.join(f'{one}.shape, ' for one in apart)})")
    code.line(f"ctx.sizes = ({''.join(f'{one}, ' for one in sizes)})")


def _write_tangents(code: CodeWriter, names: list[str], graphs: Graphs) -> list[str]:
    """Fill in gradients that did not come, take wrappers apart; the names of what the graph takes.

    Where `gets_none`, autograd fills in nothing: its zeros would wrap nothing, and would look like
    gradients that came.
    """
    if not graphs.gets_none:
        return names
    found: list[str] = []
    for number, (name, wrapping) in enumerate(zip(names, graphs.wrappings.tangents, strict=True)):
        parts = names_for(name, wrapping, symbols=False)
        like = graphs.tangents[len(found) : len(found) + len(parts)]
        found += parts
        if number in graphs.watched:
            code.line(f"n{number} = {name} is None")
        code.begin(f"if {name} is None:")
        code.line(f"{', '.join(parts)}, = {_zeros_for(code, number, like, graphs)}")
        code.end()
        if graphs.wrappings.any:
            code.begin("else:")
            expected = "None" if wrapping is None else code.name("wrapping", wrapping)
            code.line(f"{name} = {code.name('as_traced', as_traced)}({name}, {expected})")
            if wrapping is not None:
                apart = taken_apart(name, wrapping, symbols=False)
                code.line(f"{', '.join(parts)}, = {', '.join(apart)},")
            code.end()
    return [name for name, one in zip(found, graphs.tangents, strict=True) if one is not None]


def _zeros_for(code: CodeWriter, number: int, like: Sequence[Tensor | None], graphs: Graphs) -> str:
    kinds = tuple(None if one is None else (one.dtype, one.device) for one in like)
    sizes = f"ctx.sizes[{number}]"
    if not graphs.has_symbols:
        sizes = code.literal(tuple(() if one is None else tuple(one.shape) for one in like))
    return f"{code.name('zeros', zeros)}({sizes}, {code.name('kinds', kinds)})"


def _write_omissions(code: CodeWriter, graphs: Graphs) -> None:
    """Leave out gradients that nothing flowed into, as autograd does."""
    if not graphs.watched:
        return
    for i, numbers in enumerate(graphs.dependence):
        if graphs.is_partial(numbers):
            test = " and ".join(f"n{number}" for number in sorted(numbers))
            code.line(f"if {test}: grads[{i}] = None")


def _write_gradients(code: CodeWriter, wrapped: Wrapped) -> None:
    """Put gradients together that wrap others."""
    if not any(one is not None for one in wrapped):
        return
    names = [f"g{at}" for at in range(len(wrapped))]
    code.line(f"{', '.join(all_names(names, wrapped))}, = grads")
    put_together(code, names, wrapped)
    code.line(f"grads = [{', '.join(names)}]")


class _Lazy(dict[bool, Boxed]):
    """A backward graph, compiled when it is first asked for.

    There are two where it may write over what was saved: one for the last time that this is read,
    and one for `retain_graph`, and for hooks that may hold what was saved.
    """

    def __init__(self, make: Callable[[bool], Boxed]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, is_last: bool) -> Boxed:
        """Compile it."""
        made = self[is_last] = self._make(is_last)
        return made


def _refuse_writes() -> None:
    raise NotImplementedError(
        "aot_autograd does not support input mutations with requires_grad in backward for "
        "create_graph=True: what is written could not be differentiated. Run the function without "
        "a compiler for second derivatives."
    )


def _through(ctx: Any, inputs: list[Any]) -> list[Tensor]:
    """What gradients depend on: whoever differentiates them by it has to be told."""
    taken = [one for one in inputs if isinstance(one, Tensor) and one.requires_grad]
    return [*taken, *autograd.leaves_after(ctx)]


def _refuse_twice(grads: list[Any], through: list[Tensor]) -> list[Any]:
    """Gradients that say what is missing when somebody differentiates them."""
    return [
        autograd.delayed_error(DOUBLE_BACKWARD, grad, through) if isinstance(grad, Tensor) else grad
        for grad in grads
    ]
