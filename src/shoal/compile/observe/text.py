"""Signatures, graphs and what is saved, as text."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from shoal._torch import operators, symbols
from shoal.compile.aot.arrange import Arrangement, Constant, Itself
from shoal.compile.aot.lowered import Lowered
from shoal.compile.aot.signature import Input, Output, OutputKind, Signature


def signature_text(signature: Signature, arrangement: Arrangement) -> str:
    """What each argument, input and output is, one a line."""
    kind = "training" if signature.trains else "inference"
    lines = [f"signature, {kind}, grad mode {'on' if signature.grad_mode else 'off'}"]
    for i, place in enumerate(arrangement.places):
        match place:
            case Constant(value):
                lines.append(f"  argument {i}: constant {value!r}")
            case Itself(at):
                lines.append(f"  argument {i}: input {at}")
            case _:
                lines.append(
                    f"  argument {i}: view of input {place.input}, {list(place.shape)} by "
                    f"{list(place.strides)} from {place.offset}"
                )
    lines += [f"  input {i}: {_input_text(one)}" for i, one in enumerate(signature.inputs)]
    lines += [f"  output {i}: {_output_text(one)}" for i, one in enumerate(signature.outputs)]
    for i, base in enumerate(signature.bases):
        lines.append(f"  base {i}: {'requires' if base.requires_grad else 'takes no'} gradient")
    for reshape in signature.reshapes:
        lines.append(f"  argument {reshape.argument} is reshaped: {_steps_text(reshape.steps)}")
    if signature.grad_mode_after is not None:
        lines.append(f"  leaves grad mode {'on' if signature.grad_mode_after else 'off'}")
    return "\n".join(lines)


def _input_text(one: Input) -> str:
    words = ["tensor" if one.is_tensor else "number"]
    if one.requires_grad:
        words.append("requires gradient")
    if one.is_wrapper:
        words.append("wraps others")
    changed = [field.name for field in fields(one.mutation) if getattr(one.mutation, field.name)]
    if changed:
        words.append(f"mutated ({', '.join(changed)})")
    return ", ".join(words)


def _output_text(one: Output) -> str:
    match one.kind:
        case OutputKind.FRESH:
            text = "made by the graph"
        case OutputKind.CONSTANT:
            return f"constant {one.value!r}"
        case OutputKind.INPUT:
            return f"argument {one.of} itself"
        case OutputKind.SAME:
            return f"output {one.of} itself"
        case OutputKind.VIEW_OF_INPUT:
            text = f"view of argument {one.of}: {_steps_text(one.steps)}"
        case OutputKind.VIEW_OF_OUTPUT:
            text = f"view of output {one.of}: {_steps_text(one.steps)}"
        case OutputKind.VIEW_OF_BASE:
            text = f"view of base {one.of}: {_steps_text(one.steps)}"
    return f"{text}, requires gradient" if one.requires_grad else text


def _steps_text(steps: tuple[Any, ...]) -> str:
    return " → ".join(f"{step.op}{list(step.args)}" for step in steps)


def graph_text(title: str, module: GraphModule) -> str:
    """A graph, with what its nodes give."""
    return "\n".join([title, *map(_node_text, module.graph.nodes)])


def _node_text(node: Node) -> str:
    if node.op == "output":
        return f"return {node.args[0]}"
    if node.op == "placeholder":
        return f"{node.name}: {_value_text(node)}"
    given = [*map(str, node.args), *(f"{k}={v}" for k, v in node.kwargs.items())]
    return f"{node.name}: {_value_text(node)} = {_target_text(node)}({', '.join(given)})"


def _target_text(node: Node) -> str:
    if isinstance(node.target, (str, operators.OpOverload)):
        return str(node.target)
    return getattr(node.target, "__name__", None) or str(node.target)


def _value_text(node: Node) -> str:
    value = node.meta.get("val", node.meta.get("example_value"))
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_one_value_text, value))})"
    return _one_value_text(value)


def _one_value_text(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__ if value is not None else "?"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def saved_text(lowered: Lowered) -> str:
    """What forward saves for backward, the largest first."""
    sizes = [(_bytes_of(one), one) for one in lowered.saved if isinstance(one, Node)]
    sizes.sort(key=lambda pair: -pair[0])
    lines = [f"forward saves {lowered.num_saved} tensors, {lowered.saved_bytes:,} bytes"]
    for size, node in sizes:
        kind = "an input" if node.op == "placeholder" else _target_text(node)
        lines.append(f"  {size:>14,}  {node.name}: {_value_text(node)}, {kind}")
    return "\n".join(lines)


def _bytes_of(node: Node) -> int:
    value = node.meta.get("val")
    return symbols.num_bytes(value) if isinstance(value, Tensor) else 0
