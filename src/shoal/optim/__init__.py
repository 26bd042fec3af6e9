"""Optimizers of torch that know how sharded parameters lie: the same numbers, in less time."""

from shoal.optim.adam import Adam, AdamW

__all__ = ["Adam", "AdamW"]
