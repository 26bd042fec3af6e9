"""One tensor over many ranks, cut as any layout or spec cuts it.

In: a rank's local tensors and where they lie. Out: a `ShardedTensor` of the global shape, which
optimizers, gradient clipping and checkpoints take for a parameter, a gradient, or state.
"""

# `torch.load(weights_only=True)` loads what it is told of when this is imported.
from shoal.tensor import pickling as pickling
from shoal.tensor.listed import Listed
from shoal.tensor.packed import Packed
from shoal.tensor.placement import Placement
from shoal.tensor.sharded import ShardedTensor

__all__ = ["Listed", "Packed", "Placement", "ShardedTensor"]
