"""The wrapper: torch's first way to say what is sharded, on the same engine.

A module enters; a module around it leaves, whose parameters are one unit of the runtime.
"""
