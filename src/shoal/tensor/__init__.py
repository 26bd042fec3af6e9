"""One tensor over many ranks, cut as any layout cuts it.

In: a rank's local tensor and its place in a packing. Out: a `ShardedTensor` of the global shape,
which optimizers, gradient clipping and checkpoints take for a parameter, a gradient, or state.
"""

from shoal.tensor.placement import Placement
from shoal.tensor.sharded import ShardedTensor

__all__ = ["Placement", "ShardedTensor"]
