"""What an operator costs: floating-point operations, and bytes that are read and written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    is_counted: bool = True
    """Whether its arithmetic is known, or surely less than its traffic."""


def cost_of(func: Any, args: Sequence[Any], result: Any, outputs: Sequence[Tensor]) -> Cost:
    """The cost of an operator with these arguments; `outputs` are the tensors of its result."""
    packet = func.overloadpacket
    if packet in _FREE:
        return Cost(0, 0, False)
    count = _COUNTS.get(packet) or flop_registry.get(packet)
    flops = int(count(*args, out_val=result)) if count is not None else 0
    tensors = [one for one in trees.tree_leaves(tuple(args)) if isinstance(one, Tensor)]
    num_bytes = sum(one.nbytes for one in {id(t): t for t in (*tensors, *outputs)}.values())
    is_counted = count is not None or not num_bytes or not _is_opaque(func)
    return Cost(flops, num_bytes, packet in _PRODUCTS, is_counted)


_FREE = frozenset(
    {_aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided, _aten.new_empty_strided}
)


def _product_flops(some: Tensor, other: Tensor, *_: Any, out_val: Any) -> int:
    """Of a product of matrices, batched or in groups of rows: each row meets each column once."""
    rows = some.numel() if some.dim() == 2 or other.dim() == 3 else some[0].numel()
    return 2 * rows * (other.shape[-1] if other.dim() > 1 else 1)


_COUNTS: dict[Any, Callable[..., int]] = {
    _aten._grouped_mm: _product_flops,
    _aten.mv: _product_flops,
    _aten.dot: _product_flops,
    _aten.addmv: lambda _, *args, out_val: _product_flops(*args, out_val=out_val),
}
"""What torch's own counter leaves out."""

_HEAVY = ("_cdist", "_ctc", "_fft", "_linalg", "_thnn", "_trilinear", "cholesky", "deform", "geqrf")
_HEAVY += ("grid_sampler", "linalg", "lu_", "lstm", "miopen", "mkldnn_rnn", "ormqr", "svd")


def _is_opaque(func: Any) -> bool:
    """Whether an operator may compute far more than it reads and writes."""
    return func.namespace != "aten" or func.overloadpacket.__name__.startswith(_HEAVY)
