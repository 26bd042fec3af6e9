"""A whole training step as one graph: forward, backward, clipping and the optimizer's update.

In: a model (plain, replicated or sharded), a loss, an optimizer. Out: a callable that does a step.
Public as `shoal.compile_step`.
"""
