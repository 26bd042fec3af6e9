"""Ranks that never hang without a name.

In: the collectives of this process, as `shoal.comm` launches and waits for them. Out: which rank
did not come, what it did instead, and which replica's weights are no copy any more.
"""

from shoal.watch.diagnosis import post_mortem
from shoal.watch.replicas import check_replicas
from shoal.watch.watchdog import Watchdog, compare_collectives, digest_of_collectives

__all__ = [
    "Watchdog",
    "check_replicas",
    "compare_collectives",
    "digest_of_collectives",
    "post_mortem",
]
