"""More model than memory: what a step does on the host, beside the device.

In: a model whose shards are in host memory, and its optimizer. Out: the same numbers, with the
optimizer's step done unit by unit while backward runs.
"""

from shoal.offload.backward_steps import BackwardSteps, step_in_backward

__all__ = ["BackwardSteps", "step_in_backward"]
