"""Doors: import paths of torch's older APIs, served on shoal's core.

In: a call as torch's API spells it. Out: the same effect, by `tensor`, `runtime` and `checkpoint`.
The core imports nothing from here.
"""
