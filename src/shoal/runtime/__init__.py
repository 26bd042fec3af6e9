"""The eager engine.

In: modules, a mesh, a policy. Out: the same modules holding sharded parameters, which run
like the unsharded ones; and typed events for whoever wants to watch.
"""
