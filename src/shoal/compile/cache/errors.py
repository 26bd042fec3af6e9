"""The two ways in which something does not fit into the cache."""

from __future__ import annotations


class NotExactError(Exception):
    """Something that a file could not describe exactly, so that it is not stored."""


class DamagedError(Exception):
    """A file that does not say what a file of ours says, so that it is not read."""
