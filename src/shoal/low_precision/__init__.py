"""Fewer bits on the way: formats in which shards are gathered, and gradients are reduced."""

from shoal.low_precision.formats import MXFP8, NVFP4, Float8, GatherFormat
from shoal.low_precision.reduction import Int8
from shoal.low_precision.wire import Wire

__all__ = ["MXFP8", "NVFP4", "Float8", "GatherFormat", "Int8", "Wire"]
