"""Graph passes over collectives: `shoal.passes.ddp_fusion` has torch's names."""

from shoal.comm.buckets import Limits
from shoal.compile.keep_gathered import keep_gathered
from shoal.compile.passes.bucket_all_reduce import bucket_all_reduces
from shoal.compile.passes.bucket_shards import bucket_all_gathers, bucket_reduce_scatters
from shoal.compile.passes.comm_block import (
    CommBlock,
    CommKey,
    get_all_comm_blocks,
    get_comm_block,
)
from shoal.compile.passes.contract import Fact, Pass, Pipeline, Report
from shoal.compile.passes.cost import Costs
from shoal.compile.passes.cost import Hardware as Machine
from shoal.compile.passes.in_place import average_in_place
from shoal.compile.passes.memory import GraphMemory, memory_of
from shoal.compile.passes.metadata import check_graph
from shoal.compile.passes.pipeline import replicated, sharded
from shoal.compile.passes.schedule import delay_waits, overlap
from shoal.compile.passes.traffic import GraphTraffic as Traffic
from shoal.compile.passes.traffic import Timeline, count_traffic, timeline
from shoal.compile.passes.view_cleanup import drop_idle_views

__all__ = [
    "CommBlock",
    "CommKey",
    "Costs",
    "Fact",
    "GraphMemory",
    "Limits",
    "Machine",
    "Pass",
    "Pipeline",
    "Report",
    "Timeline",
    "Traffic",
    "average_in_place",
    "bucket_all_gathers",
    "bucket_all_reduces",
    "bucket_reduce_scatters",
    "check_graph",
    "count_traffic",
    "delay_waits",
    "drop_idle_views",
    "get_all_comm_blocks",
    "get_comm_block",
    "keep_gathered",
    "memory_of",
    "overlap",
    "replicated",
    "sharded",
    "timeline",
]
