"""One run on fake tensors, to learn what a function does to its inputs and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal._torch import autograd, functionals, subclasses
from shoal._torch import fakes as torch_fakes
from shoal.compile.aot.arrange import Arrangement
from shoal.compile.aot.classify import Before, Classified, RecordedRun
from shoal.compile.aot.random_state import Draws
from shoal.compile.aot.recorder import Recorder
from shoal.compile.aot.signature import Signature
from shoal.compile.aot.subclasses import Wrapped, wrappings_of

Function = Callable[..., Sequence[Any]]
"""Takes its arguments one by one, returns a flat list."""


@dataclass(frozen=True, slots=True)
class Analysis:
    """What was learned."""

    signature: Signature
    returned: Wrapped
    """How what the graph returns wraps other tensors."""
    tangents: list[Tensor]
    """Fake gradients of what the graph returns, laid out as they are to come."""
    generators: tuple[torch.Generator, ...] = ()
    """What random numbers are drawn from."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A run, and what it says."""

    outputs: Sequence[Any]
    classified: Classified


def run_recorded(
    function: Function,
    arrangement: Arrangement,
    inputs: Sequence[Any],
    entering: Sequence[Any],
    draws: Draws,
) -> Recorded:
    """Run a function on functional tensors; it enters with those in `entering`.

    These are the inputs themselves, or stand for them where autograd would not allow the inputs to
    be written to.
    """
    with_grad = torch.is_grad_enabled()
    recorder = Recorder(draws)
    arguments = arrangement.arguments(entering)
    recorder.declare(arguments)
    before = [Before.of(value) for value in inputs]
    arguments_before = [Before.of(value) for value in arguments]
    draws.begin()
    with recorder:
        outputs = function(*arguments)
    draws.end()
    after = torch.is_grad_enabled()
    torch.set_grad_enabled(with_grad)
    run = RecordedRun(arrangement, recorder, entering, before, arguments, arguments_before, outputs)
    classified = run.classify(
        with_grad=with_grad, grad_mode_after=after if after != with_grad else None
    )
    return Recorded(outputs, classified)


def functional_inputs(fakes: Sequence[Any]) -> list[Any]:
    """Fake tensors, wrapped so that their mutations become values."""
    return [functionals.functional(one) if isinstance(one, Tensor) else one for one in fakes]


def returned_tensors(signature: Signature, recorded: Recorded, entered: Sequence[Any]) -> list[Any]:
    """What the graph returns, but for symbols."""
    return [
        *(entered[i] for i in signature.returned_mutations),
        *(recorded.outputs[k] for k in signature.fresh),
        *recorded.classified.bases,
    ]


def analyse(
    function: Function,
    arrangement: Arrangement,
    fakes: Sequence[Any],
    mode: torch_fakes.FakeTensorMode,
) -> Analysis:
    """Run the function and say what it does."""
    grad_mode = torch.is_grad_enabled()
    try:
        with (
            torch_fakes.below_python(mode),
            torch_fakes.without_bindings(mode),
            functionals.FunctionalTensorMode(),
            Draws() as draws,
            autograd.without_outer_hooks(),
        ):
            inputs = functional_inputs(fakes)
            recorded = run_recorded(function, arrangement, inputs, inputs, draws)
            signature = recorded.classified.signature
            values = [
                functionals.value_of(one) if isinstance(one, Tensor) else one
                for one in returned_tensors(signature, recorded, inputs)
            ]
        with torch_fakes.below_python(mode):
            values = [one.detach() if isinstance(one, Tensor) else one for one in values]
            tangents = [
                _tangent_of(value)
                for value, has_tangent in zip(values, signature.differentiable, strict=True)
                if has_tangent
            ]
    finally:
        torch.set_grad_enabled(grad_mode)
    tangents = tangents if signature.trains else []
    return Analysis(signature, wrappings_of(values), tangents, draws.generators)


def _tangent_of(value: Any) -> Tensor:
    """A gradient as it will most likely come."""
    if not subclasses.wraps_others(value):
        return torch.empty_like(value, memory_format=torch.preserve_format)
    tangent: Any = value.clone()
    if hasattr(tangent, "__coerce_tangent_metadata__"):
        tangent = tangent.__coerce_tangent_metadata__()
    return tangent.detach()
