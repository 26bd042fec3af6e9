"""Every error shoal raises on purpose.

    ShoalError
    ├── UsageError (ValueError)        wrong input: the command line answers it with exit code 2
    │   ├── ShardedTwiceError          something manages the module already (an AssertionError too)
    │   └── MeshError                  a mesh or group that cannot do what is asked of it
    │       └── MissingAxisError       an axis is needed and not given (an AssertionError too)
    ├── InvariantError (RuntimeError)  the engine was used out of order, or is inconsistent
    ├── CheckpointError (RuntimeError) a checkpoint that cannot be written, or not trusted
    ├── DivergedError (ArithmeticError) a loss or a gradient that is no number any more
    └── RankError (RuntimeError)       another rank failed or stayed away

A message says what was expected, what was found, where (parameter, unit, rank), and what to do.
"""

EXIT_INTERRUPTED = 130
"""Exit status of a process that stopped because it was asked to: 128 + SIGINT, as in shells."""


class ShoalError(Exception):
    """The root of the tree."""


class UsageError(ShoalError, ValueError):
    """Input that cannot work."""


class ShardedTwiceError(UsageError, AssertionError):
    """A module that another call, or another engine, manages already.

    An AssertionError too, because torch answers these mistakes with one.
    """


class MeshError(UsageError):
    """A mesh or process group that cannot do what is asked of it."""


class MissingAxisError(MeshError, AssertionError):
    """An axis, or its name, is needed and not given.

    An AssertionError too, because torch answers these mistakes with one.
    """


class InvariantError(ShoalError, RuntimeError):
    """Something that must always hold does not."""


class CheckpointError(ShoalError, RuntimeError):
    """A checkpoint that cannot be written, or not trusted."""


class DivergedError(ShoalError, ArithmeticError):
    """A loss or a gradient that is no finite number any more."""


class RankError(ShoalError, RuntimeError):
    """Another rank failed or stayed away."""
