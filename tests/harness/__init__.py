"""Live ranks for tests.

In: a test body, or any module-level function. Out: the same body run on every rank of a pool
whose processes outlive the test, with what each rank returned or how it failed.
"""

from harness.decorator import nccl_ranks, on_ranks, ranks
from harness.failures import RankDied, RankFailed, RankHung
from harness.pools import close_pools
from harness.setup import GLOO, NCCL, Setup

__all__ = [
    "GLOO",
    "NCCL",
    "RankDied",
    "RankFailed",
    "RankHung",
    "Setup",
    "close_pools",
    "nccl_ranks",
    "on_ranks",
    "ranks",
]
