"""Random training programs, each run on a sharded model and on its unsharded twin.

A program is a model, how it is sharded, and a list of moments in a user's script: training steps
with and without a reduction, exceptions, evaluation, freezing, state dicts, full parameters,
compiled steps. The twin computes on all ranks' data, and says what is right. After each moment
parameters, gradients and optimizer state are compared in double precision: what differs by more
than rounding is a bug.
"""
