"""Optimizers of torch that know how sharded parameters lie: the same numbers, in less time."""

from shoal.optim.adafactor import Adafactor
from shoal.optim.adam import Adam, AdamW
from shoal.optim.lbfgs import LBFGS
from shoal.optim.muon import Muon

__all__ = ["LBFGS", "Adafactor", "Adam", "AdamW", "Muon"]
