"""Compiled results that survive the process.

In: a graph of Dynamo's, what its inputs are, and the options. Out: what tracing it would give, read
from a file that an earlier process wrote; or traced now and written for the next one. What cannot
be described exactly is never stored, and whatever cannot be read exactly is traced again.
"""
