"""Ahead of time: a function becomes a forward graph and a backward graph that run as it did.

In: a function and its arguments. Between: a `Signature`, a joint graph, and a `Lowered`, which the
cache stores. Out: a generated function. `compiler.py` has the stages in their order.
"""
