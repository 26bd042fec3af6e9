"""Operators: their schemas, what calls of them are given, what they do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch._higher_order_ops import effects
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._prims.rng_prims import run_and_save_rng_state as run_and_save_rng_state
from torch._prims.rng_prims import run_with_rng_state as run_with_rng_state
from torch._subclasses.functional_tensor import FunctionalTensor


def mutated_arguments(op: OpOverload) -> tuple[str, ...]:
    """The names of the arguments that an operation writes to."""
    return tuple(
        argument.name
        for argument in op._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def schema_of(op: OpOverload) -> Any:
    """The schema of an operation: its `arguments` and `returns`, and which memory they share."""
    return op._schema


def binding(op: OpOverload) -> Callable[..., Any]:
    """The function in torch's namespace, which reads long lists faster than the operation."""
    return getattr(torch, op.__name__.partition(".")[0])


def straight(op: OpOverload) -> Callable[..., Any]:
    """The function in C++ under an operation; to call it directly saves 0.4 µs."""
    return op._op


def bind(op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Every argument of a call by its name, with the defaults of those that were left out."""
    given = {argument.name: argument.default_value for argument in op._schema.arguments}
    given.update(zip(given, args, strict=False))
    given.update(kwargs)
    return given


def given_arguments(
    schema: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """The arguments that a schema names, with what was given for them."""
    for position, argument in enumerate(schema.arguments):
        if position < len(args) and not argument.kwarg_only:
            yield argument, args[position]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def aten_overload(name: str) -> OpOverload | None:
    """The operation of a name such as `add.Tensor`, where this torch has it."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload, None)


def taken_apart(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operator by its decomposition; NotImplemented if it has none.

    In inference mode nobody takes operators apart before modes see them.
    """
    if not isinstance(op, OpOverload) or op in FunctionalTensor.metadata_fns:
        return NotImplemented
    if not op._can_decompose():
        return NotImplemented
    return op.decompose(*args, **kwargs)


def in_place_of(op: OpOverload) -> OpOverload | None:
    """The operation that writes over its first argument what another one returns, if there is one.

    It takes the same arguments otherwise.
    """
    packet, _, overload = op.name().removeprefix("aten::").partition(".")
    found = aten_overload(f"{packet}_.{overload or 'default'}")
    if found is None or op.namespace != "aten":
        return None
    first, *rest = found._schema.arguments
    is_written = first.alias_info is not None and first.alias_info.is_write
    return found if is_written and _shape_of(rest) == _shape_of(op._schema.arguments[1:]) else None


def _shape_of(arguments: Any) -> list[tuple[str, str]]:
    return [(one.name, str(one.type)) for one in arguments]


def operator_named(name: str) -> Any:
    """An operator by its full name."""
    return functools.reduce(getattr, name.split("."), cast(Any, torch.ops))


def schema_arguments(node: torch.fx.Node) -> Iterator[tuple[Any, Any]]:
    """The declared arguments of an operator's node, with what is given for them."""
    if isinstance(node.target, OpOverload):
        yield from given_arguments(node.target._schema, node.args, node.kwargs)


def argument_of(node: torch.fx.Node, name: str) -> Any:
    """What an operator's node is given for an argument, or its default; None if it has none."""
    if not isinstance(node.target, OpOverload):
        return None
    return bind(node.target, node.args, node.kwargs).get(name)


def is_view_op(op: OpOverload) -> bool:
    """Whether an operator returns another view of its argument, by its schema."""
    returns = op._schema.returns
    return bool(returns) and all(
        one.alias_info is not None and not one.alias_info.is_write for one in returns
    )


def has_effects(op: Any) -> bool:
    """Whether an operator does something that is no value, such as printing."""
    return isinstance(op, OpOverload) and effects.has_effects(op)


def default_generators() -> list[torch.Generator]:
    """The generators of the devices in use, which draw where nobody names another."""
    cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [torch.default_generator, *cuda]


def drawn_from(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator | None:
    """The generator that a call draws random numbers from; None if it draws none."""
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return None
    given = bind(op, args, kwargs)
    if given.get("dropout_p") == 0:  # attention declares random numbers even where it drops nothing
        return None
    named = given.get("generator")
    if named is not None:
        return named
    tensors = (one for one in given.values() if isinstance(one, torch.Tensor))
    device = given.get("device") or next((one.device for one in tensors), torch.device("cpu"))
    if device.type != "cuda":
        return torch.default_generator
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def is_impure(node: torch.fx.Node) -> bool:
    """Whether a node does something besides its result."""
    if node.op != "call_function":
        return node.op in ("placeholder", "output") or (
            node.op == "call_module" and node.is_impure()
        )
    schema = getattr(node.target, "_schema", None)
    return (
        has_effects(node.target)
        or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        or (schema is not None and schema.is_mutable)
        or node.is_impure()
    )


def parsed_to(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Device, dtype, non_blocking and memory format of the arguments of `to`; None where unsaid."""
    return cast(Any, torch._C)._nn._parse_to(*args, **kwargs)
