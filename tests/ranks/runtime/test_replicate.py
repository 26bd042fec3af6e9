"""`replicate` on units: each rank holds whole parameters, gradients are all-reduced."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate as torch_replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.debug import CommDebugMode

from differential import (
    DIM,
    SHOAL,
    Engine,
    check_engines_agree,
    error_of,
    loss_of,
    stack,
    train,
)
from harness import ranks
from shoal.fsdp import FSDPModule, fully_shard
from shoal.fsdp.replicate_with_fsdp import ReplicateModule, replicate

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


def _replicated(engine: Engine, **options: Any) -> Any:
    """A stack whose blocks, and then the whole, are replicated."""
    model = stack(num=2)
    if not engine.is_sharded:
        return model
    apply = replicate if engine is SHOAL else torch_replicate
    for block in model.blocks:
        apply(block, **options)
    return apply(model, **options)


def trained(engine: Engine, dtypes: dict[str, Any]) -> list[Any]:
    """Steps, and what the parameters are between them."""
    options = {"mp_policy": engine.policy(**dtypes)} if engine.is_sharded and dtypes else {}
    return train(engine, _replicated(engine, **options), engine.batches(3))


@ranks(2, 4)
def test_replicas_train_as_the_plain_model_does() -> None:
    check_engines_agree(trained, {})


@ranks(2)
def test_mixed_precision() -> None:
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    check_engines_agree(trained, dtypes, plain=False)


@ranks(2)
def test_nothing_is_gathered_over_ranks() -> None:
    model = _replicated(SHOAL)
    assert all(type(m) is not FSDPModule and isinstance(m, ReplicateModule) for m in model.blocks)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.placements == (Replicate(),)
        assert parameter.to_local().shape == parameter.shape
    with CommDebugMode() as mode:
        loss_of(model(SHOAL.batches(1)[0])).backward()
    counts = {str(op): count for op, count in mode.get_comm_counts().items()}
    assert counts == {"c10d.allreduce_": 3}


@ranks(4)
def test_what_replicate_refuses() -> None:
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))

    def observe(engine: Engine) -> list[Any]:
        apply = replicate if engine is SHOAL else torch_replicate
        sharded = engine.api.fully_shard(nn.Linear(DIM, DIM))
        twice = apply(nn.Linear(DIM, DIM))
        return [
            error_of(lambda: apply(sharded)),
            error_of(lambda: apply(twice)),
            error_of(lambda: apply(nn.ModuleList([nn.Linear(DIM, DIM)]))),
            error_of(lambda: apply(nn.Linear(DIM, DIM), mesh=two)),
        ]

    errors = check_engines_agree(observe, plain=False)
    assert None not in errors
    with pytest.raises(ValueError, match="replicate"):
        fully_shard(replicate(nn.Linear(DIM, DIM)))
