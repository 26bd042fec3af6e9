"""Where a joint graph is cut into forward and backward.

In: one graph of a function's outputs and gradients, each node tagged with the phase it ran in.
Out: a forward graph, a backward graph, and the values that the first keeps for the second.
"""

from shoal.compile.partition.joint import Joint, read_joint
from shoal.compile.partition.partitioners import (
    default_partition,
    min_cut_rematerialization_partition,
    split_as_traced,
    split_by_min_cut,
)
from shoal.compile.partition.split import Split, split

__all__ = [
    "Joint",
    "Split",
    "default_partition",
    "min_cut_rematerialization_partition",
    "read_joint",
    "split",
    "split_as_traced",
    "split_by_min_cut",
]
