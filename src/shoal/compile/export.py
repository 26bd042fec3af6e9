"""`aot_export_joint_simple`: the graph of a function, called as the function is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from shoal._torch import fakes as torch_fakes
from shoal._torch import settings
from shoal.compile.aot.analyse import Analysis, analyse
from shoal.compile.aot.arrange import arrange, sharing_memory
from shoal.compile.aot.capture import Decompositions, capture
from shoal.compile.aot.signature import OutputKind, Signature
from shoal.compile.passes import pipeline
from shoal.compile.passes.pipeline import Target

_NAME = "aot_export_joint_simple"
_ALIASES = frozenset(OutputKind) - {OutputKind.FRESH, OutputKind.CONSTANT}


def aot_export_joint_simple(
    func: Callable[..., Any],
    args: Sequence[Any],
    *,
    trace_joint: bool,
    num_params_buffers: int = 0,
    decompositions: Decompositions | None = None,
) -> GraphModule:
    """The graph of `func(*args)`; with `trace_joint`, forward and backward in one.

    The graph takes what `func` takes and returns what it returns. A joint graph takes gradients of
    the outputs too, and returns gradients of the inputs: a partition makes two graphs of it, of
    which forward takes what `func` takes. `func` may therefore not write to its arguments, nor
    return views; `args` and results are flat. These are `RuntimeError`s, as of torch.
    `num_params_buffers` changes nothing.
    """
    del num_params_buffers
    _check_arguments(args)
    tensors = _told_apart(args if trace_joint else [one.detach() for one in args])

    def flat_func(*values: Any) -> list[Any]:
        return _flat_results(func(*values))

    with nullcontext() if trace_joint else torch.no_grad():
        analysis = _analysed(flat_func, tensors)
        _check(analysis.signature, args)
        module = capture(analysis, decompositions).module
    pipeline.joint(Target.GIVEN, trains=analysis.signature.trains).run(module.graph)
    output = module.graph.output_node()
    output.args = (tuple(output.args[0]),)  # type: ignore[arg-type]
    module.recompile()
    return module


def _told_apart(args: Sequence[Tensor]) -> list[Tensor]:
    """Arguments, of which each is an input of its own, however often it is given."""
    seen: set[int] = set()
    apart: list[Tensor] = []
    for one in args:
        apart.append(one.detach().requires_grad_(one.requires_grad) if id(one) in seen else one)
        seen.add(id(one))
    return apart


def _analysed(func: Callable[..., Any], tensors: Sequence[Tensor]) -> Analysis:
    mode = torch_fakes.current_fake_mode(tensors) or torch_fakes.new_fake_mode(dynamic=False)
    try:
        return analyse(func, arrange(tensors), tensors, mode, dynamic=False)
    except RuntimeError as error:
        if "a leaf Variable that requires grad" not in str(error):
            raise
        raise RuntimeError(
            f"Found a graph input that requires gradients, and received a mutation: {_NAME} does "
            "not support that. Return the new value instead of writing it to the argument."
        ) from error


def _check_arguments(args: Sequence[Any]) -> None:
    if settings.functionalises_rng():
        raise RuntimeError(
            "Functionalized RNG is not currently supported in the aot_export workflow: expected "
            "torch._functorch.config.functionalize_rng_ops to be False"
        )
    for place, one in enumerate(args):
        if isinstance(one, (list, tuple, dict)):
            raise RuntimeError(
                f"{_NAME} requires individual inputs not to be pytrees: expected a tensor as "
                f"argument {place}, got a {type(one).__name__}. Flatten it, and let func take its "
                "parts."
            )
        if not isinstance(one, Tensor):
            raise NotImplementedError(
                f"{_NAME} takes tensors only: got {one!r} as argument {place}. Bind it to func "
                "(functools.partial)."
            )


def _flat_results(results: Any) -> list[Any]:
    if not isinstance(results, (tuple, list)):
        raise RuntimeError(
            f"{_NAME} requires outputs to be a single list/tuple: got a {type(results).__name__}"
        )
    for place, one in enumerate(results):
        if isinstance(one, (tuple, list, dict)):
            raise RuntimeError(
                f"{_NAME} requires individual outputs not to be pytrees: output {place} is a "
                f"{type(one).__name__}. Flatten it."
            )
    return list(results)


def _check(signature: Signature, args: Sequence[Tensor]) -> None:
    """Refuse functions whose graph cannot be called as they are: with writes or aliases."""
    changes = [one.mutation for one in signature.inputs]
    written = [i for i, one in enumerate(changes) if one.data or one.is_reshaped or one.is_set]
    for i in written:
        if any(args[i] is one for k, one in enumerate(args) if k != i):
            raise RuntimeError(
                "Encountered duplicated inputs that are mutated in the graph: argument "
                f"{i} is given twice, and func writes to it. Clone one of them."
            )
        if any(i in group and len(group) > 1 for group in sharing_memory(args)):
            raise RuntimeError(
                "Encountered aliased inputs that are mutated in the graph: argument "
                f"{i} shares memory with another, and func writes to it. Clone one of them."
            )
        if changes[i].is_reshaped:
            raise RuntimeError(
                f"Found an input that received a metadata mutation: func changes the shape or "
                f"strides of argument {i} in place. Return a view of it instead."
            )
        if changes[i].by_autograd:
            raise RuntimeError(
                f"Found a graph input that requires gradients, and received a mutation: argument "
                f"{i}. Return the new value instead of writing it there."
            )
    if written:
        raise RuntimeError(
            f"{_NAME} does not support input mutations. ViewAndMutationMeta of torch would name "
            f"inputs {written}: return the new values instead of writing them there."
        )
    aliases = [i for i, one in enumerate(signature.outputs) if one.kind in _ALIASES]
    if aliases:
        raise RuntimeError(
            f"{_NAME} does not support outputs that alias inputs, or each other: {aliases} do. "
            "Clone them."
        )
