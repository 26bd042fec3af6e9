"""torch's older ShardedTensor API: constructors, RPC, sharded modules, layers and optimizers.

In: calls as `torch.distributed._shard` spells them. Out: `shoal.tensor`'s ShardedTensor, whose
methods of that API call the functions registered here.
"""

from shoal.doors.sharded_tensor import creation, custom_ops, from_local_shards, remote_shards
from shoal.tensor import older_api, torch_function

older_api.serve(
    older_api.OlderApi(
        allocate=creation.allocate_by_spec,
        assemble=from_local_shards.assemble,
        assemble_by_spec=from_local_shards.assemble_by_spec,
        assemble_by_metadata=from_local_shards.assemble_by_metadata,
        assemble_without_group=from_local_shards.assemble_without_group,
        share=remote_shards.share,
        is_shared=remote_shards.is_shared,
        remote_shards=remote_shards.remote_shards,
    )
)
torch_function.REPLACED.update(dict.fromkeys(custom_ops.LAYERS, custom_ops.call_replacement))
