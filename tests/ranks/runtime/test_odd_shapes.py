"""0-d parameters, and shards that are uneven along any dim: they train as the unsharded ones do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from differential import (
    DIM,
    PLAIN,
    SHOAL,
    Engine,
    check_like_plain,
    gradients,
    loss_of,
    seeded,
    snapshot,
    two_axes,
)
from harness import ranks
from oracle import full
from shoal import compile_step, replicate
from shoal.checkpoint import load_training, save_training
from shoal.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    full_parameters,
)
from shoal.layout import Block, Even, Flat, Layout, Rows, Whole
from shoal.runtime.observe import plan_of

LAYOUTS: list[Layout] = [Even(), Flat(), Rows(), Block(5), Whole()]


class Scaled(nn.Module):
    """Numbers by themselves beside a matrix: a scale, a temperature that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.temperature = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x) / self.temperature)
        return x * self.scale + hidden * self.temperature


class Numbers(nn.Module):
    """One unit has numbers and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Scaled(), Only(), Scaled()])
        self.offset = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x + self.offset


class Only(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def trained(
    engine: Engine, model: Any, optimizer: Callable[..., Any] | None = None, num: int = 3
) -> list[Any]:
    """Steps of which the first adds up two backwards without a reduction, clipped by norm."""
    made = (optimizer or (lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True)))(
        model.parameters()
    )
    seen: list[Any] = []
    for index, batch in enumerate(engine.batches(num + 1)):
        if engine.is_sharded and hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(index != 0)
        loss = loss_of(model(batch))
        loss.backward()
        if index == 0 and engine.is_sharded and hasattr(model, "set_requires_gradient_sync"):
            continue
        if index == 0 and not engine.is_sharded:
            continue
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        seen += [engine.mean(loss), full(norm), gradients(model)]
        made.step()
        made.zero_grad()
    return [*seen, snapshot(model, made)]


@ranks(2, 4)
@pytest.mark.compose("0-d parameters", "fully_shard", "every layout")
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_numbers_by_themselves(layout: Layout) -> None:
    model = SHOAL.shard(seeded(Numbers), layout=layout)
    assert all(p.shape == q.shape for p, q in _pairs(model, Numbers()))
    check_like_plain(trained(SHOAL, model), trained(PLAIN, seeded(Numbers)))
    if isinstance(layout, Even):
        assert isinstance(model.offset, DTensor)
        values = [torch.zeros(()) for _ in range(dist.get_world_size())]
        dist.all_gather(values, model.offset.to_local().detach())
        assert all(torch.equal(value, values[0]) for value in values)


def _pairs(some: nn.Module, others: nn.Module) -> Any:
    return zip(some.parameters(), others.parameters(), strict=True)


@ranks(4)
@pytest.mark.compose("0-d parameters", "HSDP")
@pytest.mark.parametrize("layout", [Even(), Flat()], ids=repr)
def test_numbers_on_two_axes(layout: Layout) -> None:
    model = SHOAL.shard(seeded(Numbers), layout=layout, mesh=two_axes())
    check_like_plain(trained(SHOAL, model), trained(PLAIN, seeded(Numbers)))


@ranks(2)
@pytest.mark.compose("0-d parameters", "replicate")
def test_numbers_that_are_replicated() -> None:
    model = replicate(seeded(Numbers))
    plain = seeded(Numbers)
    for one, engine in ((model, SHOAL), (plain, PLAIN)):
        loss_of(one(engine.batches(1)[0])).backward()
    check_like_plain(gradients(model), gradients(plain))


@ranks(2, 4)
@pytest.mark.compose("0-d parameters", "offload")
@pytest.mark.parametrize("policy", ["bf16", "offload", "smaller", "held"])
def test_numbers_with_policies(policy: str) -> None:
    options: dict[str, Any] = {
        "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        "offload": {"offload_policy": CPUOffloadPolicy()},
        "smaller": {"reshard_after_forward": dist.get_world_size() // 2},
        "held": {"reshard_after_forward": False},
    }[policy]
    seen = trained(SHOAL, SHOAL.shard(seeded(Numbers), **options))
    if policy != "bf16":
        check_like_plain(seen, trained(PLAIN, seeded(Numbers)))


@ranks(2, 4)
@pytest.mark.compose("0-d parameters", "wrapper")
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_numbers_in_wrappers(use_orig_params: bool, strategy: str) -> None:
    model: Any = seeded(Numbers)
    options: dict[str, Any] = {
        "use_orig_params": use_orig_params,
        "sharding_strategy": ShardingStrategy[strategy],
    }
    for index, block in enumerate(model.blocks):
        model.blocks[index] = FullyShardedDataParallel(block, **options)
    wrapped = FullyShardedDataParallel(model, **options)
    plain = seeded(Numbers)
    optimizers = []
    for one, engine in ((wrapped, SHOAL), (plain, PLAIN)):
        optimizers.append(torch.optim.AdamW(one.parameters(), lr=1e-2))
        for batch in engine.batches(3):
            loss_of(one(batch)).backward()
            optimizers[-1].step()
            optimizers[-1].zero_grad()
    state = wrapped.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, msg=name)
    found = FullyShardedDataParallel.optim_state_dict(wrapped, optimizers[0])["state"]
    names = [name for name, _ in plain.named_parameters()]
    for index, expected in optimizers[1].state_dict()["state"].items():
        for kind, value in expected.items():
            torch.testing.assert_close(found[names[index]][kind], value, msg=names[index])


@ranks(2)
@pytest.mark.compose("0-d parameters", "compiled")
@pytest.mark.parametrize("layout", [Even(), Flat()], ids=repr)
def test_numbers_in_graphs(layout: Layout) -> None:
    model, plain = SHOAL.shard(seeded(Numbers), layout=layout), seeded(Numbers)
    compiled = torch.compile(model, backend="shoal")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for ours, theirs in zip(SHOAL.batches(2), PLAIN.batches(2), strict=True):
        loss_of(compiled(ours)).backward()
        loss_of(plain(theirs)).backward()
        check_like_plain(gradients(model), gradients(plain))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@ranks(2, 4)
@pytest.mark.parametrize("layout", [Even(), Flat()], ids=repr)
def test_numbers_in_captured_steps(layout: Layout) -> None:
    """Of the copies that ranks have of a number, one counts in the norm that is clipped to."""
    model, plain = SHOAL.shard(seeded(Numbers), layout=layout), seeded(Numbers)
    both = [list(one.parameters()) for one in (model, plain)]
    optimizers = [torch.optim.SGD(one, lr=99.0, momentum=0.9) for one in both]
    step = compile_step(model, lambda output, _: loss_of(output), optimizers[0], max_norm=1e-3)
    for ours, theirs in zip(SHOAL.batches(4), PLAIN.batches(4), strict=True):
        step(ours, None)
        loss_of(plain(theirs)).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
        optimizers[1].step()
        optimizers[1].zero_grad()
    assert step.why_not_captured is None
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs.detach())


@ranks(4)
@pytest.mark.compose("0-d parameters", "TP")
def test_numbers_beside_tensor_parallelism() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model: Any = seeded(Scaled)
    parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(output_layouts=Replicate())})
    placed = distribute_tensor(model.scale.detach(), mesh["tensor"], [Replicate()])
    model.scale = nn.Parameter(placed)
    model.forward = lambda x: Scaled.forward(model, x)
    scale = model.scale
    SHOAL.api.fully_shard(model, mesh=mesh["data"])
    assert model.scale.device_mesh.ndim == 2
    assert model.scale is not scale
    plain = seeded(Scaled)
    rank, batch = mesh["data"].get_local_rank(), PLAIN.batches(1)[0]
    sharded_x = distribute_tensor(batch.chunk(2)[rank], mesh["tensor"], [Replicate()])

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(batch.chunk(2)[rank]) / self.temperature)
        return (x * self.scale).to_local() + hidden * self.temperature

    del model.forward
    type(model).forward = forward
    loss_of(model(sharded_x)).backward()
    loss_of(plain(batch)).backward()
    for p, q in _pairs(model, plain):
        torch.testing.assert_close(full(p.grad), q.grad)


@ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_numbers_whole(layout: Layout) -> None:
    plain, model = seeded(Numbers), SHOAL.shard(seeded(Numbers), layout=layout)
    with full_parameters(model, writeback=True), torch.no_grad():
        assert model.offset.shape == ()
        model.offset.mul_(3)
        model.blocks[1].factor.data = torch.tensor(5.0)
    plain.offset.data.mul_(3)
    plain.blocks[1].factor.data.fill_(5.0)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in plain.state_dict().items():
        assert torch.equal(whole[name], value), name
    assert plan_of(model).units


@ranks(2)
@pytest.mark.compose("0-d parameters", "checkpoint")
def test_numbers_in_checkpoints(tmp_path: Path) -> None:
    def make(layout: Layout) -> tuple[Any, torch.optim.Optimizer]:
        model = SHOAL.shard(seeded(Numbers), layout=layout)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    for index, (source, target) in enumerate([(Even(), Flat()), (Whole(), Even())]):
        model, optimizer = make(source)
        loss_of(model(SHOAL.batches(1)[0])).backward()
        optimizer.step()
        save_training(tmp_path / str(index), model, optimizer, {})
        resumed, other = make(target)
        load_training(tmp_path / str(index), resumed, other)
        for ours, theirs in _pairs(resumed, model):
            assert torch.equal(full(ours.detach()), full(theirs.detach()))
            for name, value in optimizer.state[theirs].items():
                assert torch.equal(full(other.state[ours][name]), full(value)), name


@ranks(2)
@pytest.mark.filterwarnings("ignore:`_get_pg_default_device` will be deprecated")
@pytest.mark.filterwarnings("ignore:Multiple backends are registered")
@pytest.mark.parametrize("starts_on_meta", [False, True])
def test_numbers_from_full_state_dicts(starts_on_meta: bool) -> None:
    """Which torch loads as they are, into DTensors, or in place of ones on meta."""
    plain = seeded(Numbers)
    with torch.device("meta" if starts_on_meta else "cpu"):
        made = Numbers()
    model: Any = SHOAL.shard(made)
    weights = {name: value.clone() for name, value in plain.state_dict().items()}
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    check_like_plain(trained(SHOAL, model), trained(PLAIN, plain))


def test_a_plan_before_numbers_are_sharded() -> None:
    with torch.device("meta"):
        model = Numbers()
    assert [unit.name for unit in plan_of(model, world=4).units] == [
        "root",
        "blocks.0",
        "blocks.1",
        "blocks.2",
    ]


class Ragged(nn.Module):
    """Sizes that no world divides, along every dim; some dims are shorter than the world."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Parameter(torch.randn(DIM, 7) / 3)
        self.folded = nn.Parameter(torch.randn(3, 7, 5) / 3)
        self.short = nn.Parameter(torch.randn(5, 1) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = torch.einsum("bi,kij->bkj", x @ self.into, self.folded).sum(1)
        return mixed * self.short.t()


@ranks(2, 4)
@pytest.mark.compose("uneven shards along any dim", "fully_shard", "Even")
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_uneven_shards(reshard_after_forward: bool) -> None:
    def dims(p: nn.Parameter) -> Shard:
        return Shard(p.dim() - 1)

    model = SHOAL.api.fully_shard(
        seeded(Ragged), shard_placement_fn=dims, reshard_after_forward=reshard_after_forward
    )
    check_like_plain(trained(SHOAL, model), trained(PLAIN, seeded(Ragged)))
    by_layout = SHOAL.api.fully_shard(seeded(Ragged), layout=Even(1))
    check_like_plain(trained(SHOAL, by_layout), trained(PLAIN, seeded(Ragged)))
    assert all(p.placements == (Shard(1),) for p in by_layout.parameters())


@ranks(4)
@pytest.mark.compose("uneven shards along any dim", "HSDP", "offload")
def test_uneven_shards_on_two_axes() -> None:
    options: dict[str, Any] = {"layout": Even(1), "offload_policy": CPUOffloadPolicy()}
    model = SHOAL.api.fully_shard(seeded(Ragged), mesh=two_axes(), **options)
    check_like_plain(trained(SHOAL, model), trained(PLAIN, seeded(Ragged)))


@ranks(2)
@pytest.mark.compose("uneven shards along any dim", "compiled")
def test_uneven_shards_in_graphs() -> None:
    model, plain = SHOAL.api.fully_shard(seeded(Ragged), layout=Even(1)), seeded(Ragged)
    compiled = torch.compile(model, backend="shoal")
    loss_of(compiled(SHOAL.batches(1)[0])).backward()
    loss_of(plain(PLAIN.batches(1)[0])).backward()
    check_like_plain(gradients(model), gradients(plain))


@ranks(4)
@pytest.mark.compose("uneven shards along any dim", "checkpoint")
def test_uneven_shards_in_checkpoints(tmp_path: Path) -> None:
    def make(layout: Layout) -> tuple[Any, torch.optim.Optimizer]:
        model = SHOAL.api.fully_shard(seeded(Ragged), layout=layout)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, optimizer = make(Even(1))
    loss_of(model(SHOAL.batches(1)[0])).backward()
    optimizer.step()
    save_training(tmp_path / "c", model, optimizer, {})
    for layout in (Even((0, 2, 1)), Flat()):
        resumed, other = make(layout)
        load_training(tmp_path / "c", resumed, other)
        for ours, theirs in _pairs(resumed, model):
            assert torch.equal(full(ours.detach()), full(theirs.detach()))
            for name, value in optimizer.state[theirs].items():
                assert torch.equal(full(other.state[ours][name]), full(value)), name


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 7) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


@ranks(4)
@pytest.mark.compose("uneven shards along any dim", "TP")
@pytest.mark.parametrize("tensor_dim", [0, 1])
@pytest.mark.parametrize("data_dim", [0, 1])
def test_uneven_shards_beside_tensor_parallelism(tensor_dim: int, data_dim: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model, plain = seeded(Product), seeded(Product)
    model.weight = nn.Parameter(
        distribute_tensor(model.weight.detach(), mesh["tensor"], [Shard(tensor_dim)])
    )
    SHOAL.api.fully_shard(model, mesh=mesh["data"], layout=Even(data_dim))
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    own = x.chunk(2)[mesh["data"].get_local_rank()]
    output = model(distribute_tensor(own, mesh["tensor"], [Replicate()]))
    output.full_tensor().square().mean().backward()
    plain(x).square().mean().backward()
    torch.testing.assert_close(full(model.weight.detach()), plain.weight.detach())
    torch.testing.assert_close(full(model.weight.grad), plain.weight.grad)
