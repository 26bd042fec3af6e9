"""Adam's step on local tensors: the same, bit by bit, as with the lists that torch makes."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness import ranks
from oracle import batches, build, full, loss_of, shard
from shoal.layout import Even, Flat, Layout, Rows, Whole
from shoal.optim import Adam, AdamW
from shoal.optim.adam import _OnLocalTensors

LAYOUTS: list[Layout] = [Even(), Flat(), Rows(), Whole()]


TORCH = {Adam: torch.optim.Adam, AdamW: torch.optim.AdamW}


def adamw(model: nn.Module, *, ours: bool = True, **options: Any) -> torch.optim.Optimizer:
    """Matrices decay, the rest does not."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    kind: Any = options.pop("kind", AdamW)
    kind = kind if ours else TORCH[kind]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return kind(groups, lr=1e-2, **options)


def trained(layout: Layout, *, max_norm: float | None, reloads: bool, **options: Any) -> list[Any]:
    """Parameters and optimizer state after some steps, one of them without some gradients."""
    model: Any = shard(build(), layout=layout)
    optimizer = adamw(model, **options)
    for index, (_, part) in enumerate(batches(5, dist.get_rank(), dist.get_world_size())):
        loss_of(model, part).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        if index == 3:
            next(iter(model.blocks[0].parameters())).grad = None
        optimizer.step()
        optimizer.zero_grad()
        if reloads and index == 1:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    states = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    values = [state[key] for state in states for key in sorted(state)]
    return [full(value) for value in (*model.parameters(), *values)]


OPTIONS: list[dict[str, Any]] = [
    {"fused": True},
    {"foreach": True},
    {"fused": True, "kind": Adam, "maximize": True},
    {"foreach": True, "amsgrad": True},
    {"foreach": False, "fused": False},
]


@ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda one: "-".join(one))
def test_steps_are_those_of_torch(layout: Layout, options: dict[str, Any]) -> None:
    found: list[Any] = []
    find = _OnLocalTensors._find

    def counting(*args: Any) -> Any:
        result = find(*args)
        found.append(result is not None)
        return result

    with patch.object(_OnLocalTensors, "_find", counting):
        fast = trained(layout, max_norm=0.05, reloads=True, **options)
    slow = trained(layout, max_norm=0.05, reloads=True, ours=False, **options)
    for a, b in zip(fast, slow, strict=True):
        assert torch.equal(a, b)
    is_plain = "amsgrad" not in options and options != OPTIONS[-1]
    # Two groups, in every step: in the first one after torch made the states.
    assert sum(found) == (2 * 5 if is_plain else 0)


@ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_parameters_without_gradients_get_no_state(layout: Layout) -> None:
    model: Any = build()
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    model = shard(model, layout=layout)
    frozen = [*model.blocks[0].parameters()]
    optimizer = AdamW(model.parameters(), lr=1e-2, fused=True)
    for _, part in batches(3, dist.get_rank(), dist.get_world_size()):
        loss_of(model, part).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not any(parameter in optimizer.state for parameter in frozen)
    assert len(optimizer.state) == len([*model.parameters()]) - len(frozen)


@ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_scaled_losses(layout: Layout) -> None:
    def run(*, ours: bool) -> list[Any]:
        model: Any = shard(build(), layout=layout)
        optimizer = adamw(model, ours=ours, fused=True)
        for index, (_, part) in enumerate(batches(4, dist.get_rank(), dist.get_world_size())):
            loss_of(model, part).backward()
            # What a scaler tells an optimizer that skips steps by itself.
            optimizer.grad_scale = torch.tensor(2.0)  # type: ignore[attr-defined]
            optimizer.found_inf = torch.tensor(float(index == 2))  # type: ignore[attr-defined]
            optimizer.step()
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
            optimizer.zero_grad()
        steps = [state["step"] for state in optimizer.state.values()]
        return [*(full(p) for p in model.parameters()), *steps]

    fast, slow = run(ours=True), run(ours=False)
    for a, b in zip(fast, slow, strict=True):
        assert torch.equal(a, b)
    assert {step.item() for step in fast[-4:]} == {3.0}


@ranks(2)
def test_replaced_moments_are_noticed() -> None:
    """Whoever writes another tensor into the state wants it used."""

    def run(*, ours: bool) -> list[Any]:
        model: Any = shard(build())
        optimizer = adamw(model, ours=ours, fused=True)
        for _, part in batches(4, dist.get_rank(), dist.get_world_size()):
            loss_of(model, part).backward()
            optimizer.step()
            optimizer.zero_grad()
            for state in optimizer.state.values():
                state["exp_avg"] = state["exp_avg"] * 0.5
        return [full(p) for p in model.parameters()]

    fast, slow = run(ours=True), run(ours=False)
    for a, b in zip(fast, slow, strict=True):
        assert torch.equal(a, b)


@ranks(2)
def test_an_optimizer_is_not_kept_alive() -> None:
    model: Any = shard(build())
    optimizer = adamw(model, fused=True)
    for _, part in batches(2, dist.get_rank(), dist.get_world_size()):
        loss_of(model, part).backward()
        optimizer.step()
    assert "_shoal_known" in vars(optimizer)
    gc.disable()
    try:
        gone = weakref.ref(optimizer)
        del optimizer
        assert gone() is None
    finally:
        gc.enable()


@ranks(2)
def test_loaded_moments_replace_the_old_ones() -> None:
    model: Any = shard(build())
    optimizer = adamw(model, fused=True)
    for _, part in batches(2, dist.get_rank(), dist.get_world_size()):
        loss_of(model, part).backward()
        optimizer.step()
    old = [weakref.ref(state["exp_avg"]) for state in optimizer.state.values()]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    gc.collect()
    assert not any(moment() is not None for moment in old)


@ranks(2)
def test_copies_and_pickles_have_their_own() -> None:
    model: Any = shard(build())
    optimizer = adamw(model, fused=True)
    for _, part in batches(2, dist.get_rank(), dist.get_world_size()):
        loss_of(model, part).backward()
        optimizer.step()
    assert "_shoal_known" not in optimizer.__getstate__()
