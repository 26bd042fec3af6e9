"""Units as graph nodes: in go a unit and the machine's settings, out come a gather and a reduction.

Importing this tells the runtime that graphs of the backend "shoal" take units in.
"""

from shoal.compile.lowering.graph_unit import lower_units
from shoal.runtime.module_state import LOWERINGS

LOWERINGS["shoal"] = lower_units
