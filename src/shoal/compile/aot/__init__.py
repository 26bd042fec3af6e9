"""Ahead of time: a function becomes a forward graph and a backward graph that run as it did."""
