"""What the compiler did, for people who ask.

In: what the stages tell while they run. Out: a `CompileRecord` for each compilation, log lines for
the topics that are switched on, and the breaks and recompilations that Dynamo knows of.
"""

from shoal.compile.observe.observation import forget, records
from shoal.compile.observe.record import CompileRecord

__all__ = ["CompileRecord", "forget", "records"]
