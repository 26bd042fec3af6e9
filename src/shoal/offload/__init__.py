"""More model than memory: what a step does on the host, beside the device.

In: a model whose shards are in host memory, and its optimizer; blocks whose activations are too
large. Out: the same numbers, with the optimizer's step done unit by unit while backward runs, and
with what autograd saves on the host until backward needs it.
"""

from shoal.offload.activations import HostActivations, activations_to_host
from shoal.offload.backward_steps import BackwardSteps, step_in_backward

__all__ = ["BackwardSteps", "HostActivations", "activations_to_host", "step_in_backward"]
