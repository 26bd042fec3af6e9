"""Ranks with different numbers of inputs: `shoal.join`."""

from shoal.uneven.join import join

__all__ = ["join"]
