"""Replicas: whole parameters on every rank, gradients averaged in buckets while backward runs.

A module and a process group enter; the same module leaves, whose gradients are every rank's mean.
Public as `shoal.replicate`.
"""
