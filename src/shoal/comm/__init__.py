"""How bytes move: the seam between shoal and the backends that carry its collectives.

In: flat tensors and a c10d process group (gloo, NCCL, `local` threads, or the `modelled` network).
Out: `Pending` handles, one per collective in flight.
"""

from shoal.comm.pending import Pending, Prepared
from shoal.comm.transport import Transport

__all__ = ["Pending", "Prepared", "Transport"]
