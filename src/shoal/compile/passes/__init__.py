"""Passes over captured graphs with collectives in them.

In: a graph with functional collectives as nodes, and metadata (`val`) on each node.
Out: the same graph with fewer collectives, started earlier and waited for later.
"""
