"""Passes over captured graphs.

In: a graph with metadata (`val`) on each node, and functional collectives as nodes.
Out: the same graph, rewritten for what runs it: fewer views, copies and collectives; these start
earlier and are waited for later. `pipeline.py` lists all passes in the order in which they run.
"""
