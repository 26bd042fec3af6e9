"""What tracing leaves behind (`Lowered`), as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from shoal._torch import fakes, traces
from shoal.compile.aot.arrange import Arrangement
from shoal.compile.aot.lowered import Lowered, outputs_of
from shoal.compile.aot.signature import Signature
from shoal.compile.aot.subclasses import Wrappings
from shoal.compile.cache import values
from shoal.compile.cache.data import from_json, to_json
from shoal.compile.cache.errors import DamagedError, NotExactError
from shoal.compile.cache.graphs import graph_from_json, graph_to_json
from shoal.compile.cache.values import Json
from shoal.compile.node_kinds import communicates

_TYPED: dict[str, Any] = {
    "signature": Signature,
    "arrangement": Arrangement,
    **dict.fromkeys(("num_visible", "num_saved", "saved_bytes"), int),
    **dict.fromkeys(("fixed", "copied"), tuple[int, ...]),
}
"""Fields of `Lowered` that are pure data, with their types."""


def entry_to_json(lowered: Lowered) -> Json:
    """All of it; refused if anything could not be read back exactly."""
    if lowered.wrappings.any:
        raise NotExactError("it deals with a tensor subclass that wraps others")
    saved = lowered.saved if lowered.backward is not None else []
    if len(saved) != lowered.num_saved:
        raise NotExactError("it saves something for backward that is no tensor")
    return {
        "forward": graph_to_json(lowered.forward),
        "backward": None if lowered.backward is None else graph_to_json(lowered.backward),
        "tangents": [_tensor_to_json(one) for one in lowered.tangents],
        "returned": _returned_to_json(lowered.forward),
        **{name: to_json(getattr(lowered, name), kind) for name, kind in _TYPED.items()},
    }


def entry_from_json(
    json: Json, args: Sequence[Any], mode: fakes.FakeTensorMode, *, with_values: bool
) -> Lowered:
    """What tracing a function of these arguments has left behind.

    Its nodes get their fake values if asked for: generated code does not need them, Inductor does;
    and so does whoever compares or moves collectives.
    """
    expected = {*_TYPED, "forward", "backward", "tangents", "returned"}
    if type(json) is not dict or json.keys() != expected:
        raise DamagedError("expected the parts of a compilation")
    typed = {name: from_json(json[name], kind) for name, kind in _TYPED.items()}
    forward = graph_from_json(json["forward"])
    backward = None if json["backward"] is None else graph_from_json(json["backward"])
    with mode:
        tangents = [_tensor_from_json(one) for one in json["tangents"]]
    inputs: list[Any] = []
    nodes = [node for one in (forward, backward) if one is not None for node in one.graph.nodes]
    if with_values or any(map(communicates, nodes)):
        inputs = typed["arrangement"].fake_inputs(args, mode, dynamic=False)
        propagate(forward, inputs, mode)
        found, before = _returned_to_json(forward), json["returned"]
        if found != before:
            raise DamagedError(f"the graph returns {found}, not {before} as when it was traced")
        if backward is not None:
            saved = outputs_of(forward)[typed["num_visible"] :]
            propagate(backward, [*map(_value, saved), *tangents], mode)
    return Lowered(
        wrappings=_no_wrappings(typed["signature"], len(tangents)),
        forward=forward,
        backward=backward,
        inputs=inputs,
        tangents=tangents,
        **typed,
    )


def _no_wrappings(signature: Signature, num_tangents: int) -> Wrappings:
    return Wrappings(
        inputs=(None,) * len(signature.inputs),
        returned=(None,) * (signature.num_returned - signature.num_symbols),
        tangents=(None,) * num_tangents,
        gradients=(None,) * (len(signature.inputs) if signature.trains else 0),
    )


def _returned_to_json(module: fx.GraphModule) -> Json:
    return [_tensor_to_json(_value(one)) for one in outputs_of(module)]


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else node


def _tensor_to_json(value: Any) -> Json:
    if not isinstance(value, Tensor):
        return values.encode(value)
    sizes = [list(value.shape), list(value.stride())]
    return values.encode({"sizes": sizes, "dtype": value.dtype, "device": value.device})


def _tensor_from_json(json: Json) -> Tensor:
    try:
        described = values.decode(json)
        shape, strides = described["sizes"]
        return torch.empty_strided(
            shape, strides, dtype=described["dtype"], device=described["device"]
        )
    except (TypeError, KeyError, ValueError, RuntimeError) as error:
        raise DamagedError(f"{json!r} describes no tensor") from error


def propagate(module: fx.GraphModule, inputs: Sequence[Any], mode: fakes.FakeTensorMode) -> None:
    """Give each node the value that it had when it was traced, without its elements."""
    given = iter(inputs)

    def value(node: fx.Node) -> Any:
        return node.meta["val"]

    with fakes.below_python(mode), torch.no_grad(), traces.keep_rng():
        for node in module.graph.nodes:
            if node.op == "placeholder":
                one = next(given)
                node.meta["val"] = one.detach() if isinstance(one, Tensor) else one
            elif node.op == "output":
                node.meta["val"] = fx.map_arg(node.args[0], value)
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), value)
                if traces.INPUT_VALUES in node.meta:
                    node.meta[traces.INPUT_VALUES] = (args, kwargs)
                # Of a generator's state, operators give the real one.
                node.meta["val"] = fakes.as_fake(mode, node.target(*args, **kwargs))
