"""One run on fake tensors, to learn what a function does to its inputs and what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal._torch import autograd, functionals, subclasses
from shoal._torch import fakes as torch_fakes
from shoal.compile.aot.arrange import Arrangement
from shoal.compile.aot.classify import Classified, Function, RecordedCall
from shoal.compile.aot.random_state import Draws
from shoal.compile.aot.signature import Signature
from shoal.compile.aot.subclasses import Wrapped, wrappings_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """The signature of a function, and the fake tensors that its graph is traced with."""

    function: Function
    arrangement: Arrangement
    mode: torch_fakes.FakeTensorMode
    fakes: list[Any]
    """Fake inputs of the graph."""
    signature: Signature
    returned: Wrapped
    """How the values that the graph returns wrap other tensors."""
    tangents: list[Tensor]
    """Fake gradients of the values that the graph returns, in the expected memory layout."""
    generators: tuple[torch.Generator, ...]
    """The generators that random numbers are drawn from."""


def returned_tensors(
    signature: Signature, classified: Classified, entered: Sequence[Any]
) -> list[Any]:
    """The values that the graph returns, without symbols."""
    return [
        *(entered[i] for i in signature.returned_mutations),
        *(classified.outputs[k] for k in signature.fresh),
        *classified.bases,
    ]


def analyse(
    function: Function,
    arrangement: Arrangement,
    args: Sequence[Any],
    mode: torch_fakes.FakeTensorMode,
    *,
    dynamic: bool,
) -> Analysis:
    """Run the function on fake tensors that stand for `args`."""
    fakes = arrangement.fake_inputs(args, mode, dynamic=dynamic)
    grad_mode = torch.is_grad_enabled()
    try:
        with (
            torch_fakes.below_python(mode),
            torch_fakes.without_bindings(mode),
            functionals.FunctionalTensorMode(),
            Draws() as draws,
            autograd.without_outer_hooks(),
        ):
            inputs = [
                functionals.functional(one) if isinstance(one, Tensor) else one for one in fakes
            ]
            classified = RecordedCall(function, arrangement, inputs, inputs, draws).classify()
            signature = classified.signature
            returned = returned_tensors(signature, classified, inputs)
            values = list(map(functionals.value_of, returned))
        with torch_fakes.below_python(mode):
            values = [one.detach() if isinstance(one, Tensor) else one for one in values]
            tangents = [
                _tangent_of(value)
                for value, has_tangent in zip(values, signature.differentiable, strict=True)
                if has_tangent
            ]
    finally:
        torch.set_grad_enabled(grad_mode)
    return Analysis(
        function=function,
        arrangement=arrangement,
        mode=mode,
        fakes=fakes,
        signature=signature,
        returned=wrappings_of(values),
        tangents=tangents if signature.trains else [],
        generators=draws.generators,
    )


def _tangent_of(value: Any) -> Tensor:
    """A gradient of a returned value, in the memory layout that it will most likely have."""
    if not subclasses.wraps_others(value):
        return torch.empty_like(value, memory_format=torch.preserve_format)
    tangent: Any = value.clone()
    if hasattr(tangent, "__coerce_tangent_metadata__"):
        tangent = tangent.__coerce_tangent_metadata__()
    return tangent.detach()
