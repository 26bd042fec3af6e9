"""The report of a run.

In: a run folder (config, metrics, timeline, sample), as `shoal train` leaves it. Out: one
`report.html` in that folder that opens without a network, and everything else stays as it was.
"""

from shoal.report.page import write_report

__all__ = ["write_report"]
