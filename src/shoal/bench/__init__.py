"""Speed and memory beside the peers, as ratios measured in one run.

In: the cases of `cases.py` and the engines of `engines.py`. Out: one table, and one JSON file
that keeps every raw figure. Each (case, engine, mode) runs in processes of its own.
"""
