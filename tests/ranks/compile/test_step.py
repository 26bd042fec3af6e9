"""`compile_step` on several ranks: averages, shards and norms are in the graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from harness import ranks
from shoal import compile_step, fully_shard, replicate
from shoal.compile.observe import records
from shoal.layout import Flat
from zoo import Model, assert_same, batches, build

NORM = 0.3


def loss_fn(output: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), tokens.flatten())


def sharded(**options: Any) -> Model:
    model = build("tied transformer")
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def trained(model: nn.Module, *, compiles: bool) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = compile_step(model, loss_fn, optimizer, max_norm=NORM)
    for tokens in batches(6):
        if compiles:
            step(tokens, tokens)
            continue
        loss_fn(model(tokens), tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()
    if compiles:
        assert step.num_graphs == 1
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state.items()}


@ranks(2, timeout_s=180)
def test_replicas() -> None:
    ours = trained(replicate(build("batch norm")), compiles=True)
    assert records()[-1].num_collectives > 0
    assert_same(ours, trained(replicate(build("batch norm")), compiles=False), exact=False)


@ranks(2, timeout_s=180)
@pytest.mark.parametrize("options", [{}, {"layout": Flat()}], ids=["even", "flat"])
def test_shards(options: Any) -> None:
    ours = trained(sharded(**options), compiles=True)
    assert_same(ours, trained(sharded(**options), compiles=False), exact=False)


@pytest.mark.soak
@ranks(4, timeout_s=240)
def test_on_two_axes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    ours = trained(sharded(mesh=mesh), compiles=True)
    assert_same(ours, trained(sharded(mesh=mesh), compiles=False), exact=False)


@ranks(2, timeout_s=180)
def test_optimizers_of_whole_tensors_are_refused_on_shards() -> None:
    model = sharded()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    step = compile_step(model, loss_fn, optimizer)
    step._is_first = False
    (tokens,) = batches(1)
    with pytest.raises(NotImplementedError, match="Adafactor"):
        step(tokens, tokens)


class Idle(nn.Linear):
    """With a parameter that the loss does not depend on."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(4, 4)
        self.idle = nn.Parameter(torch.ones(3, 2))


@ranks(2, timeout_s=180)
def test_parameters_that_the_loss_does_not_depend_on_stay() -> None:
    """Not even decayed, as a gradient of zero would have it."""
    model = fully_shard(Idle())
    step = compile_step(
        model,
        lambda output, _: output.square().mean(),
        torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5),
    )
    for _ in range(3):
        step(torch.ones(2, 4), None)
    assert step.num_graphs == 1
    assert torch.equal(model.idle.full_tensor(), torch.ones(3, 2))
