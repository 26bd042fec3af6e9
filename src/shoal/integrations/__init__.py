"""Shoal inside of training frameworks: one module for each, which imports its framework.

In: a framework's own objects (an `Accelerator`, a `Trainer`, a config). Out: the same objects, on
shoal's engine, through the framework's public ways to extend it.
"""
