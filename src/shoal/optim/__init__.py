"""Optimizers of torch that know how sharded parameters lie: the same numbers, in less time."""

from shoal.optim.adam import Adam, AdamW
from shoal.optim.muon import Muon

__all__ = ["Adam", "AdamW", "Muon"]
