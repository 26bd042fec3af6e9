"""What an operator costs: floating-point operations, and bytes that are read and written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from shoal._torch import trees

_aten: Any = torch.ops.aten
_PRODUCTS = frozenset({_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm})


@dataclass(frozen=True, slots=True)
class Cost:
    """One run of an operator."""

    flops: int
    num_bytes: int
    uses_workspace: bool


def cost_of(func: Any, args: Sequence[Any], outputs: Sequence[Tensor]) -> Cost:
    """The cost of an operator with these arguments and results."""
    packet = func.overloadpacket
    if packet in _FREE:
        return Cost(0, 0, False)
    count = flop_registry.get(packet)
    result = outputs[0] if len(outputs) == 1 else tuple(outputs)
    flops = int(count(*args, out_val=result)) if count is not None else 0
    tensors = [one for one in trees.tree_leaves(tuple(args)) if isinstance(one, Tensor)]
    num_bytes = sum(one.nbytes for one in {id(t): t for t in (*tensors, *outputs)}.values())
    return Cost(flops, num_bytes, packet in _PRODUCTS)


_FREE = frozenset(
    {_aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided, _aten.new_empty_strided}
)
