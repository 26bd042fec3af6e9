"""The fake values of a graph's nodes, found by running it on fake inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from shoal._torch import fakes, traces


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
