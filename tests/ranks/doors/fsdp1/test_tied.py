"""Tied parameters in different wrappers: one owner, whole for all users, under all names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness import ranks
from shoal.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from shoal.fsdp.wrap import ModuleWrapPolicy

DIM, VOCABULARY = 6, 11
CPU = torch.device("cpu")


class Block(nn.Module):
    """Recomputed in backward, if asked."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 7), nn.Linear(7, DIM)
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputes:
            return checkpoint(self.compute, x, use_reentrant=False)
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Head(nn.Linear):
    """A class of its own, so that policies can name it."""


class Tied(nn.Module):
    """A language model whose embedding is its head."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block(recomputes) for _ in range(2))
        self.norm = nn.LayerNorm(DIM)
        self.head = Head(DIM, VOCABULARY)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


BOTH = {nn.Embedding, Block, Head}
ROOT_BORROWS = {nn.Embedding, Block}


def make(recomputes: bool = False) -> Tied:
    torch.manual_seed(0)
    return Tied(recomputes)


def wrap(model: nn.Module, classes: set[type[nn.Module]], **options: Any) -> Any:
    policy = ModuleWrapPolicy(classes)
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=CPU, **options)


def batches(num: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (2 * dist.get_world_size(), 4)
    return [torch.randint(VOCABULARY, shape, generator=generator) for _ in range(num)]


def own_part(batch: Tensor) -> Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens).float().square().mean()


def whole(model: Any) -> dict[str, Tensor]:
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return model.state_dict()


def check_equal(model: Any, plain: nn.Module) -> None:
    state, expected = whole(model), plain.state_dict()
    assert set(state) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, msg=lambda m, n=name: f"{n}: {m}")
    assert state["head.weight"] is state["embedding.weight"]


def train_both(model: Any, plain: nn.Module, num: int = 3) -> torch.optim.Optimizer:
    """The same steps with clipped gradients, on a part of each batch and on the whole."""
    optimizer, expected = (torch.optim.Adam(m.parameters(), lr=1e-2) for m in (model, plain))
    for batch in batches(num):
        loss_of(model, own_part(batch)).backward()
        loss_of(plain, batch).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        torch.testing.assert_close(model.clip_grad_norm_(0.5), norm)
        for one in (optimizer, expected):
            one.step()
            one.zero_grad()
    check_equal(model, plain)
    return optimizer


@ranks(2, 4)
@pytest.mark.sampled
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("classes", [BOTH, ROOT_BORROWS], ids=["both", "root_borrows"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_training_equals_unsharded(
    use_orig_params: bool, recomputes: bool, classes: set[type[nn.Module]], strategy: str
) -> None:
    model = wrap(
        make(recomputes),
        classes,
        use_orig_params=use_orig_params,
        sharding_strategy=ShardingStrategy[strategy],
    )
    train_both(model, make(recomputes))


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("classes", [BOTH, ROOT_BORROWS], ids=["both", "root_borrows"])
def test_accumulation(use_orig_params: bool, classes: set[type[nn.Module]]) -> None:
    model = wrap(make(), classes, use_orig_params=use_orig_params)
    plain = make()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    first, second = batches(2)
    with model.no_sync():
        loss_of(model, own_part(first)).backward()
    loss_of(model, own_part(second)).backward()
    for batch in (first, second):
        loss_of(plain, batch).backward()
    for optimizer in optimizers:
        optimizer.step()
    check_equal(model, plain)


@ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        {"cpu_offload": CPUOffload(True)},
        {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
        {"backward_prefetch": None, "sync_module_states": True},
    ],
    ids=["offload", "late", "synchronised"],
)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_options(use_orig_params: bool, options: dict[str, Any]) -> None:
    train_both(wrap(make(), BOTH, use_orig_params=use_orig_params, **options), make())


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("classes", [BOTH, ROOT_BORROWS], ids=["both", "root_borrows"])
@pytest.mark.parametrize("kind", list(StateDictType), ids=lambda one: one.name)
def test_every_kind_of_state_dict(
    use_orig_params: bool, classes: set[type[nn.Module]], kind: StateDictType
) -> None:
    plain = make()
    model = wrap(make(), classes, use_orig_params=use_orig_params)
    other = wrap(Tied(), classes, use_orig_params=use_orig_params)
    for one in (model, other):
        FullyShardedDataParallel.set_state_dict_type(one, kind)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    if kind is not StateDictType.LOCAL_STATE_DICT:
        assert set(state) == set(plain.state_dict())
    other.load_state_dict(state)
    check_equal(other, plain)


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_saved_by_one_rank_and_read_without_shards(use_orig_params: bool) -> None:
    plain = make()
    model = wrap(make(), BOTH, use_orig_params=use_orig_params)
    config = FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
    kind = StateDictType.FULL_STATE_DICT
    with FullyShardedDataParallel.state_dict_type(model, kind, config):
        state = model.state_dict()
    assert set(state) == (set(plain.state_dict()) if dist.get_rank() == 0 else set())
    if state:
        Tied().load_state_dict(state)


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_checkpoints_and_optimizer_state(use_orig_params: bool, tmp_path: Path) -> None:
    plain = make()
    model = wrap(make(), BOTH, use_orig_params=use_orig_params)
    optimizer = train_both(model, plain, 1)
    other = wrap(Tied(), ROOT_BORROWS, use_orig_params=use_orig_params)
    for one in (model, other):
        FullyShardedDataParallel.set_state_dict_type(one, StateDictType.SHARDED_STATE_DICT)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=tmp_path)
    other.load_state_dict(state)
    check_equal(other, plain)
    for one in (model, other):
        FullyShardedDataParallel.set_state_dict_type(
            one,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(),
            FullOptimStateDictConfig(),
        )
    saved = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    assert len(saved["state"]) == len(list(plain.parameters()))
    again = torch.optim.Adam(other.parameters(), lr=1e-2)
    loaded = FullyShardedDataParallel.optim_state_dict_to_load(other, again, saved)
    again.load_state_dict(loaded)
    for one, its in ((model, optimizer), (other, again)):
        loss_of(one, own_part(batches(1)[0])).backward()
        its.step()
    for name, value in whole(model).items():
        torch.testing.assert_close(whole(other)[name], value)


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_summoned(use_orig_params: bool) -> None:
    plain = make()
    model = wrap(make(), ROOT_BORROWS, use_orig_params=use_orig_params)
    with FullyShardedDataParallel.summon_full_params(model):
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        assert names == set(plain.state_dict())
        assert torch.equal(model.head.weight, plain.head.weight)
        with torch.no_grad():
            model.head.weight.add_(1)
    with torch.no_grad():
        plain.head.weight.add_(1)
    check_equal(model, plain)


@ranks(2)
def test_bf16() -> None:
    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    models = [wrap(make(), classes, mixed_precision=half) for classes in (BOTH, {Block})]
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of(model, own_part(batches(1)[0])).backward()
        optimizer.step()
    for name, value in whole(models[0]).items():
        assert torch.equal(value, whole(models[1])[name]), name
