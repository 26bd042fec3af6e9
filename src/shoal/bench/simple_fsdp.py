"""A peer: each parameter gathered for itself where it is used, traced and left to Inductor.

What SimpleFSDP does: parametrizations of DTensors, gathered again in backward. Collectives stay as
they are traced, one for each parameter, neither merged nor moved.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from shoal.bench.run import Run


class _Gathered(nn.Module):
    """A parameter on one rank, from its shards on all."""

    def __init__(self, compute_dtype: torch.dtype, reduce_dtype: torch.dtype) -> None:
        super().__init__()
        self.dtypes: dict[str, Any] = {
            "forward_dtype": compute_dtype,
            "backward_dtype": reduce_dtype,
        }

    def forward(self, shards: DTensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, _policy)
        return checkpoint(self._gather, shards, use_reentrant=False, context_fn=contexts)

    def _gather(self, shards: DTensor) -> Tensor:
        whole: Any = shards.redistribute(placements=[Replicate()], **self.dtypes)
        return whole.to_local(grad_placements=[Partial("avg")])


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep nothing of a gather for backward."""
    return CheckpointPolicy.MUST_RECOMPUTE


def shard_each_parameter(model: nn.Module, run: Run, reduce_dtype: torch.dtype) -> nn.Module:
    """Replace parameters by their shards, from which they are gathered when they are read."""
    mesh = init_device_mesh(run.device_type, (run.case.world_size,))
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            shards = distribute_tensor(parameter.data, mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(shards))
            gathered = _Gathered(run.compute_dtype, reduce_dtype)
            register_parametrization(module, name, gathered, unsafe=True)
    return model
