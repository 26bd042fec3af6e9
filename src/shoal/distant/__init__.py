"""Distant replicas: each trains by itself for some steps, then all take an outer step together.

In: a model on a mesh that replicates, and how often replicas meet. Out: the same model, whose
gradients stay in its replica; weights meet once in so many steps, in the background.
"""

from shoal.distant.replicas import DistantReplicas, distant_replicas_of

__all__ = ["DistantReplicas", "distant_replicas_of"]
