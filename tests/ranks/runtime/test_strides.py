"""Parameters that are not row-major: full ones have the strides of the originals, by both doors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy

from differential import (
    DIM,
    PLAIN,
    SHOAL,
    Engine,
    check_like_plain,
    copies,
    error_of,
    gradients,
    loss_of,
    seeded,
    snapshot,
    two_axes,
)
from harness import ranks
from shoal import replicate
from shoal.checkpoint import load_training, save_training
from shoal.errors import UsageError
from shoal.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    full_parameters,
    fully_shard,
)
from shoal.layout import Block, Even, Flat, Layout, Rows, Whole
from shoal.runtime.fully_shard import replicate as replicate_by_fsdp

LAYOUTS: list[Layout] = [Even(), Flat(), Rows(), Block(5), Whole()]


class Strided(nn.Module):
    """Images, whose filters are channels-last, and matrices that are transposed or full of holes.

    Notes the strides with which a forward saw its parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter((torch.randn(7, DIM) / 3).t())
        self.folded = nn.Parameter((torch.randn(3, 7, 4) / 3).permute(2, 0, 1))
        self.holes = nn.Parameter((torch.randn(4, 2 * DIM) / 3)[:, ::2].detach())
        self.gain = nn.Parameter(torch.ones(DIM))
        self.seen: dict[str, tuple[int, ...]] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = {name: getattr(self, name).stride() for name in ("turned", "folded", "holes", "gain")}
        self.seen = {**own, "filters.weight": self.filters.weight.stride()}
        return self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """All but the noting."""
        image = x[:, None, :, None].expand(-1, 3, -1, 2).contiguous()
        image = self.filters(image.to(memory_format=torch.channels_last))
        hidden = x @ self.turned
        mixed = torch.einsum("bi,kji->bkj", hidden, self.folded).sum(-1)
        return x + self.gain * (mixed @ self.holes) + image.mean((1, 3))


class Quiet(Strided):
    """Notes nothing, for compilers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(x)


class Model(nn.Module):
    def __init__(self, block: type[Strided] = Strided) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.last = nn.Parameter((torch.randn(3, DIM) / 3).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x @ self.last


def strides(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: parameter.stride() for name, parameter in model.named_parameters()}


def dense(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Those of copies: what had holes has none."""
    return {name: torch.empty_like(p).stride() for name, p in model.named_parameters()}


def trained(engine: Engine, model: Any, num: int = 3) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    seen: list[Any] = []
    for batch in engine.batches(num):
        loss = loss_of(model(batch))
        loss.backward()
        seen += [engine.mean(loss), gradients(model)]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, snapshot(model, optimizer)]


def check_seen(model: Any, *, with_holes: bool = False) -> None:
    for block, plain in zip(model.blocks, seeded(Model).blocks, strict=True):
        expected = strides(plain) if with_holes else dense(plain)
        assert block.seen == {name: expected[name] for name in block.seen}
        assert block.seen["turned"] == (1, DIM)
        assert block.seen["filters.weight"] == plain.filters.weight.stride() == (27, 1, 9, 3)


@ranks(2, 4)
@pytest.mark.compose("non-contiguous parameters", "fully_shard", "every layout")
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_training(layout: Layout) -> None:
    model = SHOAL.shard(seeded(Model), layout=layout)
    check_like_plain(trained(SHOAL, model), trained(PLAIN, seeded(Model)))
    check_seen(model)


@ranks(4)
@pytest.mark.compose("non-contiguous parameters", "HSDP")
@pytest.mark.parametrize("layout", [Even(), Flat()], ids=repr)
def test_replicas_of_shards(layout: Layout) -> None:
    model = SHOAL.shard(seeded(Model), layout=layout, mesh=two_axes())
    check_like_plain(trained(SHOAL, model), trained(PLAIN, seeded(Model)))
    check_seen(model)


@ranks(2)
@pytest.mark.compose("non-contiguous parameters", "replicate")
@pytest.mark.parametrize("by_fsdp", [False, True])
def test_replicas(by_fsdp: bool) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("replicate",))
    model: Any = seeded(Model)
    if by_fsdp:
        for block in model.blocks:
            replicate_by_fsdp(block, mesh=mesh)
        replicate_by_fsdp(model, mesh=mesh)
    else:
        replicate(model)
    check_like_plain(trained(SHOAL, model), trained(PLAIN, seeded(Model)))
    check_seen(model, with_holes=not by_fsdp)


@ranks(2, 4)
@pytest.mark.compose("non-contiguous parameters", "wrapper")
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_the_wrapper(use_orig_params: bool, strategy: str) -> None:
    model: Any = seeded(Model)
    options = {
        "use_orig_params": use_orig_params,
        "sharding_strategy": ShardingStrategy[strategy],
    }
    for index, block in enumerate(model.blocks):
        model.blocks[index] = FullyShardedDataParallel(block, **options)
    wrapped = FullyShardedDataParallel(model, **options)
    plain = seeded(Model)
    for one, engine in ((wrapped, SHOAL), (plain, PLAIN)):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
        for batch in engine.batches(3):
            loss_of(one(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
    check_seen(model)
    expected = dict(plain.named_parameters())
    with FullyShardedDataParallel.summon_full_params(wrapped, writeback=True):
        found = dict(wrapped.named_parameters())
        assert {name: p.stride() for name, p in found.items()} == dense(plain)
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], msg=name)
        with torch.no_grad():
            for value in found.values():
                value.mul_(2)
    state = wrapped.state_dict()
    assert {name: value.stride() for name, value in state.items()} == dense(plain)
    for name, value in state.items():
        torch.testing.assert_close(value, 2 * expected[name], msg=name)
    wrapped.load_state_dict(plain.state_dict())
    for name, value in wrapped.state_dict().items():
        torch.testing.assert_close(value, expected[name], msg=name)
        assert value.stride() == torch.empty_like(expected[name]).stride()


@ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_full_parameters_and_state_dicts(layout: Layout) -> None:
    plain = seeded(Model)
    model = SHOAL.shard(seeded(Model), layout=layout)
    with full_parameters(model, writeback=True):
        assert strides(model) == dense(plain)
        state = copies(model.state_dict())
        with torch.no_grad():
            for one in (model, plain):
                for parameter in one.parameters():
                    parameter.add_(1)
    assert {name: value.stride() for name, value in state.items()} == dense(plain)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in plain.state_dict().items():
        assert torch.equal(whole[name], value), name
        assert torch.equal(state[name] + 1, value), name
    loss_of(model(SHOAL.batches(1)[0])).backward()
    check_seen(model)


@ranks(2, 4)
@pytest.mark.compose("non-contiguous parameters", "offload")
@pytest.mark.parametrize("policy", ["bf16", "offload", "smaller", "held"])
def test_policies(policy: str) -> None:
    options: dict[str, Any] = {
        "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        "offload": {"offload_policy": CPUOffloadPolicy()},
        "smaller": {"reshard_after_forward": dist.get_world_size() // 2},
        "held": {"reshard_after_forward": False},
    }[policy]
    model = SHOAL.shard(seeded(Model), **options)
    seen = trained(SHOAL, model)
    check_seen(model)
    if policy != "bf16":
        check_like_plain(seen, trained(PLAIN, seeded(Model)))


@ranks(2)
@pytest.mark.compose("non-contiguous parameters", "compiled")
@pytest.mark.parametrize("layout", [Even(), Rows()], ids=repr)
def test_compiled(layout: Layout) -> None:
    def make() -> Model:
        return Model(Quiet)

    model = SHOAL.shard(seeded(make), layout=layout)
    compiled = torch.compile(model, backend="shoal")
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    plain = seeded(make)
    optimizers.append(torch.optim.SGD(plain.parameters(), lr=0.1))
    for ours, theirs in zip(SHOAL.batches(2), PLAIN.batches(2), strict=True):
        loss_of(compiled(ours)).backward()
        loss_of(plain(theirs)).backward()
        check_like_plain(gradients(model), gradients(plain))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@ranks(2)
@pytest.mark.compose("non-contiguous parameters", "checkpoint")
def test_checkpoints(tmp_path: Path) -> None:
    def make(layout: Layout) -> tuple[Any, torch.optim.Optimizer]:
        model = SHOAL.shard(seeded(Model), layout=layout)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    models = [make(Flat()), make(Even())]
    first, second = SHOAL.batches(2)
    for index, (model, optimizer) in enumerate(models):
        loss_of(model(first)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if index == 0:
            save_training(tmp_path / "c", model, optimizer, {})
    resumed, optimizer = make(Even())
    load_training(tmp_path / "c", resumed, optimizer)
    for model, one in ((models[1][0], models[1][1]), (resumed, optimizer)):
        loss_of(model(second)).backward()
        one.step()
    for ours, theirs in zip(resumed.parameters(), models[1][0].parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs.full_tensor())
    check_seen(resumed)


@ranks(2)
def test_elements_that_share_memory_are_refused() -> None:
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(torch.ones(4).expand(4, 4))
    for call in (lambda: fully_shard(layer), lambda: FullyShardedDataParallel(layer)):
        error = error_of(call)
        assert isinstance(error, UsageError)
        assert "weight" in str(error)
