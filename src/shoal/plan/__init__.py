"""Foresight: what a run will need, before it runs.

from shoal.plan import forecast

forecast(model, inputs, world=8).memory.reserved_peak_bytes
"""

from shoal.comm.network import Network
from shoal.plan.accelerators import Accelerator
from shoal.plan.forecast import Forecast, forecast, forecast_setup
from shoal.plan.profile import Profile
from shoal.plan.search import Choice, NothingFits, Search, Space
from shoal.plan.setup import Setup
from shoal.plan.training import Workload
from shoal.runtime.observe import default_units

__all__ = [
    "Accelerator",
    "Choice",
    "Forecast",
    "Network",
    "NothingFits",
    "Profile",
    "Search",
    "Setup",
    "Space",
    "Workload",
    "default_units",
    "forecast",
    "forecast_setup",
]
