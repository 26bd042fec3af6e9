"""`FullyShardedDataParallel`, torch's first way to say what is sharded, on the same engine.

In: a module, and the arguments of torch's class. Out: a module around it, whose parameters are one
unit of the runtime, with torch's state dicts, optimizer state dicts and `summon_full_params`.
"""
