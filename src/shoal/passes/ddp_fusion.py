"""DDP's fusion passes under torch's names: from `torch._inductor.fx_passes.ddp_fusion` to here."""

from shoal.compile.passes.comm_block import CommBlock, get_all_comm_blocks, get_comm_block
from shoal.compile.passes.ddp_fusion import (
    fuse_ddp_communication,
    fuse_ddp_with_coalesced_op,
    fuse_ddp_with_concat_op,
    schedule_comm_wait,
)
from shoal.compile.passes.rewrite import call_function, move_block_after, move_block_before

__all__ = [
    "CommBlock",
    "call_function",
    "fuse_ddp_communication",
    "fuse_ddp_with_coalesced_op",
    "fuse_ddp_with_concat_op",
    "get_all_comm_blocks",
    "get_comm_block",
    "move_block_after",
    "move_block_before",
    "schedule_comm_wait",
]
