"""Reducing the contributions of several ranks, always in rank order.

Every rank gets the same bits, and the same bits again in the next run. 16-bit floats are added
in fp32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from shoal._torch import collectives
from shoal.comm.calls import Reduction, reduction_name

_STEP: dict[ReduceOp.RedOpType, Callable[..., Tensor]] = {
    **dict.fromkeys((ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM), torch.add),
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}

_NARROW = frozenset({torch.bfloat16, torch.float16})
_SCALED = frozenset({ReduceOp.AVG, ReduceOp.PREMUL_SUM})


def reduce_in_order(pieces: Sequence[Tensor], op: Reduction, out: Tensor) -> None:
    """Write `pieces[0] op pieces[1] op …` into `out`, which must not overlap them.

    Not for autograd: none of them may require a gradient, unless gradients are switched off.
    """
    kind = collectives.reduction_kind(op)
    step = _STEP.get(kind)
    if step is None:
        raise NotImplementedError(f"reduction {reduction_name(op)} is not supported here")
    wide = out.dtype in _NARROW and (len(pieces) > 2 or kind in _SCALED)
    total = torch.empty_like(out, dtype=torch.float32) if wide else out
    first, *others = pieces
    if wide or not others:
        total.copy_(first)
    else:
        step(first, others.pop(0), out=total)
    for piece in others:
        step(total, piece, out=total)
    if kind == ReduceOp.AVG:
        total.div_(len(pieces))
    elif kind == ReduceOp.PREMUL_SUM:
        total.mul_(collectives.premultiplier(op))
    if wide:
        out.copy_(total)
