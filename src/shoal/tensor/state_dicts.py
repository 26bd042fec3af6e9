"""Full state dicts: a sharded tensor made whole for torch's state-dict functions, and filled again.

They know `DTensor`, and take every other sharded tensor for chunks of dim 0.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from shoal.tensor.sharded import ShardedTensor


def gathered(tensor: Tensor) -> Tensor:
    """Give every rank of the tensor's group the whole: collective."""
    return cast(ShardedTensor, tensor).full_tensor()


def filled(tensor: Tensor, whole: Tensor) -> Tensor:
    """The tensor, with this rank's elements of a whole one; allocated, if it was on meta."""
    with torch.no_grad():
        target = torch.empty_like(tensor, device=whole.device) if tensor.is_meta else tensor
        target.copy_(whole)
    return target
