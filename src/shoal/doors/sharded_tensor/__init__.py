"""torch's older ShardedTensor API: constructors, RPC, sharded modules, layers and optimizers.

In: calls as `torch.distributed._shard` spells them. Out: `shoal.tensor`'s ShardedTensor, whose
methods of that API call the modules named here.
"""

from shoal.doors.sharded_tensor import creation, custom_ops, from_local_shards, remote_shards
from shoal.tensor import torch_function

torch_function.REPLACED.update(dict.fromkeys(custom_ops.LAYERS, custom_ops.call_replacement))

__all__ = ["creation", "custom_ops", "from_local_shards", "remote_shards"]
