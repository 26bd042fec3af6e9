"""Survive: a rank dies, the others go on in place, with the same state bit for bit.

In: a sharded model, its optimizer, data in global batches. Out: steps that are applied on all ranks
or on none. `galois`, `parity`, `versions` and `roster` are pure; see docs/survive.md.
"""

from shoal.survive.door import resize, survive

__all__ = ["resize", "survive"]
