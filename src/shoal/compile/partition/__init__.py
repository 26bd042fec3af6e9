"""Where a joint graph is cut into forward and backward.

In: one graph of a function's outputs and gradients, each node tagged with the phase it ran in.
Out: a forward graph, a backward graph, and the values that the first keeps for the second.
`partitioners.py` is where to begin.
"""
