"""`Lowered`: the graphs of a function, and the data that the generated code around them needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from shoal._torch import dynamo, symbols
from shoal.compile.aot.arrange import Arrangement
from shoal.compile.aot.signature import Signature
from shoal.compile.aot.subclasses import Wrappings, places


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """What tracing leaves behind: from here on nobody needs the function itself."""

    signature: Signature
    arrangement: Arrangement
    wrappings: Wrappings
    forward: GraphModule
    backward: GraphModule | None = None
    """None where nothing is differentiated."""
    inputs: Sequence[Any]
    """Fake inputs, as the forward graph takes them."""
    tangents: Sequence[Any] = ()
    """Fake gradients that the backward graph takes."""
    fixed: tuple[int, ...] = ()
    """Inputs of the forward graph that stay where they are from call to call."""
    num_visible: int
    """How many of forward's first outputs are not saved for backward."""
    num_saved: int = 0
    """Tensors that forward returns for backward."""
    copied: tuple[int, ...] = ()
    """The gradients, as backward's graph returns them, that get memory of their own afterwards."""
    saved_bytes: int = 0
    """What these take, those among them included that live on anyway."""

    @property
    def saved(self) -> list[Any]:
        """What forward returns for backward: tensors, then symbols."""
        return outputs_of(self.forward)[self.num_visible :]

    @property
    def free_dims(self) -> dict[int, tuple[int, ...]]:
        """Of the tensors that are saved, the dims whose sizes differ from call to call.

        None of a graph that the cache had, which knows no values: their sizes are the same always.
        """
        values = (node.meta.get("val") for node in self.saved[: self.num_saved])
        return {
            at: free
            for at, one in enumerate(values)
            if isinstance(one, Tensor) and (free := dynamo.free_dims(one))
        }

    @property
    def writes_late(self) -> bool:
        """Whether backward writes to an input that requires a gradient."""
        if self.backward is None:
            return False
        inputs = self.forward.graph.find_nodes(op="placeholder")
        differentiable = {
            inputs[at].name
            for one, place in zip(self.signature.inputs, places(self.wrappings.inputs), strict=True)
            for at in place
            if one.requires_grad
        }
        copies = self.backward.graph.find_nodes(
            op="call_function", target=torch.ops.aten.copy_.default
        )
        return any(node.args[0].name in differentiable for node in copies)


def outputs_of(module: GraphModule) -> list[Any]:
    """What a graph returns."""
    return list(next(iter(reversed(module.graph.nodes))).args[0])


def count_saved(saved: Sequence[Any]) -> tuple[int, int]:
    """Of what forward returns for backward: how many tensors, and their bytes."""
    values = [one.meta.get("val") for one in saved if isinstance(one, Node)]
    tensors = [value for value in values if isinstance(value, Tensor)]
    return len(tensors), sum(map(symbols.num_bytes, tensors))
