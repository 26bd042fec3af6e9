"""What the scripts share, whichever library their tensors are of: readings, a launcher."""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Results = dict[str, Any]


def places(num: int | None = None) -> list[Any]:
    """A placement on each rank, or on the first ones."""
    return [f"rank:{rank}/cpu" for rank in range(num or dist.get_world_size())]


def described(tensor: Any) -> Results:
    """What this rank knows of a sharded tensor, without communication."""
    metadata = tensor.metadata()
    return {
        "size": list(tensor.size()),
        "dtype": str(tensor.dtype),
        "requires_grad": tensor.requires_grad,
        "spec": type(tensor.sharding_spec()).__name__,
        "all": sorted(
            [list(shard.shard_offsets), list(shard.shard_sizes), str(shard.placement)]
            for shard in metadata.shards_metadata
        ),
        "own": [
            [list(shard.metadata.shard_offsets), shard.tensor.tolist()]
            for shard in tensor.local_shards()
        ],
    }


def gathered(tensor: Any) -> list[Any] | None:
    """The whole on rank 0: all ranks must call it."""
    out = torch.zeros(tensor.size(), dtype=tensor.dtype) if dist.get_rank() == 0 else None
    tensor.gather(dst=0, out=out)
    return None if out is None else out.tolist()


def launch(main: Callable[[], Results]) -> None:
    """Run under torchrun, and print rank 0's results."""
    dist.init_process_group("gloo")
    try:
        torch.manual_seed(0)
        results = main()
        if dist.get_rank() == 0:
            print(json.dumps(results, indent=1))
        dist.barrier()  # a rank that leaves while others still talk can bring them down
    finally:
        dist.destroy_process_group()
