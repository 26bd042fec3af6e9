"""Whole state dicts, weights and optimizer, from every engine into every other, bit by bit."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel as TorchWrapper
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DistributedDataParallel

from harness import ranks
from shoal.doors.fsdp1.state_dict_values import whole_of
from shoal.fsdp import (
    FullOptimStateDictConfig,
    FullyShardedDataParallel,
    OptimStateKeyType,
    StateDictType,
    fully_shard,
)

pytestmark = pytest.mark.filterwarnings("ignore")

CPU = torch.device("cpu")
WHOLE = StateDictOptions(full_state_dict=True)
rekey = FullyShardedDataParallel.rekey_optim_state_dict
Saved = tuple[dict[str, torch.Tensor], dict[str, Any]]
"""Weights by name, and an optimizer's state by name, with whole tensors."""


class Model(nn.Module):
    """Sizes that divide no number of ranks, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 3, bias=False)
        self.register_buffer("scale", torch.rand(5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x)) * self.get_buffer("scale")
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Wrapped:
    """An engine that is a module around a module."""

    wrapper: Any
    use_orig_params: bool

    def shard(self, model: Any) -> Any:
        options = {"device_id": CPU, "use_orig_params": self.use_orig_params}
        for index, block in enumerate(model.blocks):
            model.blocks[index] = self.wrapper(block, **options)
        return self.wrapper(model, **options)

    def save(self, model: Any, optimizer: torch.optim.Optimizer) -> Saved:
        config = FullOptimStateDictConfig(offload_to_cpu=False)
        kind = StateDictType.FULL_STATE_DICT
        with self.wrapper.state_dict_type(model, kind, optim_state_dict_config=config):
            return model.state_dict(), self.wrapper.optim_state_dict(model, optimizer)

    def load(self, model: Any, optimizer: torch.optim.Optimizer, saved: Saved) -> None:
        model.load_state_dict(saved[0])
        states = self.wrapper.optim_state_dict_to_load(model, optimizer, saved[1])
        optimizer.load_state_dict(states)


@dataclass(frozen=True)
class Sharded:
    """An engine that gives modules other parameters."""

    function: Any

    def shard(self, model: Any) -> Any:
        for block in model.blocks:
            self.function(block)
        return self.function(model)

    def save(self, model: Any, optimizer: torch.optim.Optimizer) -> Saved:
        weights = get_model_state_dict(model, options=WHOLE)
        states: Any = get_optimizer_state_dict(model, optimizer, options=WHOLE)
        return weights, states  # pyright: ignore

    def load(self, model: Any, optimizer: torch.optim.Optimizer, saved: Saved) -> None:
        set_model_state_dict(model, saved[0], options=WHOLE)  # pyright: ignore
        set_optimizer_state_dict(model, optimizer, saved[1], options=WHOLE)  # pyright: ignore


class Replicated:
    """DDP: `module.` before the names of weights, numbers for the optimizer's parameters."""

    def shard(self, model: Any) -> Any:
        return DistributedDataParallel(model)

    def save(self, model: Any, optimizer: torch.optim.Optimizer) -> Saved:
        weights = model.state_dict()
        consume_prefix_in_state_dict_if_present(weights, "module.")
        states = optimizer.state_dict()
        return weights, rekey(states, OptimStateKeyType.PARAM_NAME, model.module)

    def load(self, model: Any, optimizer: torch.optim.Optimizer, saved: Saved) -> None:
        model.module.load_state_dict(saved[0])
        optimizer.load_state_dict(rekey(saved[1], OptimStateKeyType.PARAM_ID, model.module))


OURS: dict[str, Any] = {
    "shoal wrapper, flat": Wrapped(FullyShardedDataParallel, use_orig_params=False),
    "shoal wrapper, original": Wrapped(FullyShardedDataParallel, use_orig_params=True),
    "shoal fully_shard": Sharded(fully_shard),
}
THEIRS: dict[str, Any] = {
    "torch wrapper, flat": Wrapped(TorchWrapper, use_orig_params=False),
    "torch wrapper, original": Wrapped(TorchWrapper, use_orig_params=True),
    "torch fully_shard": Sharded(torch_fully_shard),
    "DDP": Replicated(),
}
ENGINES = OURS | THEIRS


def build(engine: Any, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = engine.shard(Model())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def train(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(2):
        tokens = torch.randint(7, (4, 3), generator=generator)
        loss = model(tokens).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_equal(found: Saved, wanted: Saved) -> None:
    assert found[0].keys() == wanted[0].keys()
    for name, value in wanted[0].items():
        assert torch.equal(found[0][name], value), name
    assert found[1]["state"].keys() == wanted[1]["state"].keys()
    for name, state in wanted[1]["state"].items():
        assert found[1]["state"][name].keys() == state.keys()
        for kind, value in state.items():
            # After loading, `fully_shard` has step counts on its mesh.
            mine = whole_of(found[1]["state"][name][kind], CPU)
            assert torch.equal(mine, whole_of(value, CPU)), f"{name}.{kind}"
    for mine, theirs in zip(found[1]["param_groups"], wanted[1]["param_groups"], strict=True):
        assert sorted(mine["params"]) == sorted(theirs["params"])
        assert mine["lr"] == theirs["lr"]


def check_moves(giver: str, taker: str) -> None:
    model, optimizer = build(ENGINES[giver], 0)
    train(model, optimizer)
    saved = copy.deepcopy(ENGINES[giver].save(model, optimizer))
    other, other_optimizer = build(ENGINES[taker], 1)
    # Each state of its own: torch's wrappers give one step tensor to many parameters.
    states = {name: copy.deepcopy(state) for name, state in saved[1]["state"].items()}
    given = dict(saved[0]), {**copy.deepcopy(saved[1]), "state": states}
    ENGINES[taker].load(other, other_optimizer, given)
    check_equal(ENGINES[taker].save(other, other_optimizer), saved)
    expected, found = train(model, optimizer), train(other, other_optimizer)
    assert found == pytest.approx(expected, rel=1e-5)


@ranks(2)
@pytest.mark.parametrize("ours", OURS)
def test_into_shoal(ours: str) -> None:
    for giver in ENGINES:
        check_moves(giver, ours)


@ranks(2)
@pytest.mark.parametrize("ours", OURS)
def test_out_of_shoal(ours: str) -> None:
    for taker in THEIRS:
        check_moves(ours, taker)
