"""A forward graph and a backward graph as one function that autograd knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal import _torch_compile as adapter
from shoal.compile.aot.graph_code import Boxed
from shoal.compile.aot.signature import Signature
from shoal.compile.aot.source import Source

DOUBLE_BACKWARD = (
    "torch.compile with aot_autograd does not currently support double backward: the backward "
    "graph has no derivative. Run the function without torch.compile for second derivatives."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Graphs:
    """What runs: both boxed; the backward is made when it is first needed."""

    forward: Boxed
    backward: Callable[[], Boxed]
    num_saved: int
    """Tensors that forward returns for backward."""
    tangent_strides: tuple[tuple[int, ...] | None, ...]
    """How each gradient lies in memory; None where it depends on the sizes."""


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


def make_function(signature: Signature, graphs: Graphs) -> Callable[..., Any]:
    """`apply` of an autograd function made for these graphs."""
    source = Source("autograd function")
    _write_forward(source, signature, graphs)
    _write_backward(source, signature, graphs)
    forward = source.compiled("forward")
    backward = forward.__globals__["backward"]
    function = type(
        "ShoalFunction",
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(backward)},
    )
    return function.apply


def _write_forward(source: Source, signature: Signature, graphs: Graphs) -> None:
    inputs = [f"i{at}" for at in range(len(signature.inputs))]
    returned = [f"r{at}" for at in range(signature.num_returned)]
    saved = [f"s{at}" for at in range(graphs.num_saved)]
    source.begin(f"def forward(ctx, {', '.join(inputs)}):")
    run = source.name("forward", graphs.forward)
    targets = "".join(f"{name}, " for name in (*returned, *saved))
    source.line(f"{targets}*symbols = {run}([{', '.join(inputs)}])")
    if saved:
        source.line(f"ctx.save_for_backward({', '.join(saved)})")
    source.line("ctx.symbols = symbols")
    first = len(signature.returned_mutations)
    for number, k in enumerate(signature.fresh):
        if signature.outputs[k].is_view:
            # An output may be written to: a view made in here would refuse that. What `detach`
            # gives is no view for autograd, and a write to it still counts for what was saved.
            name = returned[first + number]
            source.line(f"{name} = {name}.detach()")
    fixed = [
        name
        for name, is_differentiable, is_tensor in zip(
            returned, signature.differentiable, _are_tensors(signature), strict=False
        )
        if is_tensor and not is_differentiable
    ]
    if fixed:
        source.line(f"ctx.mark_non_differentiable({', '.join(fixed)})")
    source.line(f"return ({''.join(f'{name}, ' for name in returned)})")
    source.end()


def _are_tensors(signature: Signature) -> list[bool]:
    return [
        *(True for _ in signature.returned_mutations),
        *(signature.outputs[k].is_tensor for k in signature.fresh),
        *(True for _ in signature.bases),
    ]


def _write_backward(source: Source, signature: Signature, graphs: Graphs) -> None:
    names = [f"t{at}" for at in range(signature.num_returned)]
    lazy = source.name("backward_of", _Lazy(graphs.backward))
    source.begin(f"def backward(ctx, {', '.join(names)}):")
    wanted = [name for name, has in zip(names, signature.differentiable, strict=False) if has]
    for name, strides in zip(wanted, graphs.tangent_strides, strict=True):
        if strides is not None:
            coerce = source.name("as_laid_out", as_laid_out)
            test = f"if {name}.stride() != {strides!r}:"
            source.line(f"{test} {name} = {coerce}({name}, {strides!r})")
        else:
            source.line(f"{name} = {name}.contiguous()")
    inputs = ", ".join(("*ctx.symbols", "*ctx.saved_tensors", *wanted))
    source.line(f"grads = {lazy}.run([{inputs}])")
    is_on = source.name("is_grad_enabled", torch.is_grad_enabled)
    source.line(f"if {is_on}(): grads = {source.name('refuse', _refuse_twice)}(grads)")
    source.line("return tuple(grads)")
    source.end()


class _Lazy:
    """A backward graph, compiled by the first call."""

    def __init__(self, make: Callable[[], Boxed]) -> None:
        self._make = make

    def run(self, inputs: list[Any]) -> list[Any]:
        """Compile, run, and stand aside."""
        self.run = self._make()  # type: ignore[method-assign]
        return self.run(inputs)


def _refuse_twice(grads: list[Any]) -> list[Any]:
    """Gradients that say what is missing when somebody differentiates them."""
    return [
        adapter.delayed_error(DOUBLE_BACKWARD, grad) if isinstance(grad, Tensor) else grad
        for grad in grads
    ]
