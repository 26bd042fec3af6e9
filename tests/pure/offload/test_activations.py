"""What autograd saves goes to the host and comes back: the same numbers, block by block."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shoal.errors import InvariantError, UsageError
from shoal.offload import HostActivations, activations_to_host
from shoal.offload.activations import _BlockRun, _Saved


class Layer(nn.Module):
    """Attention over transposed heads, dropout, a residual: views and products of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 8)
        self.spoils = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = F.dropout(self.out(mixed.transpose(1, 2).flatten(-2)), 0.25)
        y = y.sigmoid()
        if self.spoils:
            y.mul_(2)
        return x + y


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.recomputes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return x


def build() -> Layers:
    torch.manual_seed(0)
    return Layers()


def gradients(model: nn.Module, *, retain: bool = False) -> list[torch.Tensor]:
    model.zero_grad()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 5, 8, generator=generator, requires_grad=True)
    torch.manual_seed(2)  # of dropout
    loss = model(x).square().sum()
    loss.backward(retain_graph=retain)
    if retain:
        loss.backward()
    assert x.grad is not None
    return [x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def with_host(model: Layers, **options: Any) -> HostActivations:
    return activations_to_host(model.layers, least_bytes=0, **options)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("budget_bytes", [None, 0, 1500])
def test_gradients_are_the_same_to_the_bit(
    recomputes: bool, retain: bool, budget_bytes: int | None
) -> None:
    plain, model = build(), build()
    plain.recomputes = model.recomputes = recomputes
    host = with_host(model, budget_bytes=budget_bytes)
    for _ in range(2):
        expected = gradients(plain, retain=retain)
        found = gradients(model, retain=retain)
        assert all(map(torch.equal, expected, found))
        assert host.num_bytes == 0, "nothing stays when the graph is gone"


def test_the_budget_is_kept_and_used() -> None:
    model = build()
    seen: list[int] = []
    host = with_host(model, budget_bytes=1500)
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: seen.append(host.num_bytes))
    gradients(model)
    assert 0 < seen[0] <= seen[-1] <= 1500
    host.budget_bytes = None
    gradients(model)
    assert seen[4] < seen[5] < seen[6] < seen[7], "each block adds to it"


def all_saved() -> list[_Saved]:
    return [one for one in gc.get_objects() if type(one) is _Saved]


def test_the_device_gives_back_the_memory_of_a_block_when_the_next_has_run() -> None:
    model = build()
    with_host(model)
    gc.collect()
    assert not all_saved()
    x = torch.ones(2, 5, 8, requires_grad=True) * 2  # no leaf: leaves stay
    loss = model(x).sum()
    saved = all_saved()
    given_back = [one._on_device is None for one in saved]
    assert len(saved) % 4 == 0, "each of the four layers saves the same"
    assert given_back.count(False) == len(saved) // 4, "the last one's is still there"
    loss.backward()
    del saved
    assert not all_saved()


def test_parameters_stay_where_they_are() -> None:
    model = build()
    host = with_host(model)
    run = _BlockRun(host, model.layers[0])
    view = model.layers[0].out.weight.t()  # type: ignore[union-attr, operator]
    assert run.pack(view) is view
    gaps = torch.ones(3, 4)[:, :2]
    assert run.pack(gaps) is gaps, "its copy would have other strides"
    assert isinstance(run.pack(torch.ones(3, 4).t()), tuple)


def test_a_change_in_place_is_seen() -> None:
    model = build()
    with_host(model)
    model.layers[1].spoils = True  # type: ignore[assignment]
    with pytest.raises(InvariantError, match="changed in place after it was saved"):
        gradients(model)


def test_evaluation_and_removal() -> None:
    model = build()
    host = with_host(model)
    with torch.no_grad():
        model(torch.ones(2, 5, 8))
    assert host.num_bytes == 0
    host.remove()
    loss = model(torch.ones(2, 5, 8)).sum()
    assert host.num_bytes == 0
    loss.backward()


def test_a_forward_that_raises_leaves_no_hooks_behind() -> None:
    model = build()
    host = with_host(model)
    other = build()
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.ones(2, 5, 7))
    other(torch.ones(2, 5, 8)).sum().backward()
    assert host.num_bytes == 0
    assert len(gradients(model)) == len(gradients(other))


def test_wrong_arguments_are_refused() -> None:
    model = build()
    with pytest.raises(UsageError, match="none that is inside of another"):
        activations_to_host([model, model.layers[0]])
    with pytest.raises(UsageError, match="got \\[\\]"):
        activations_to_host([])
    with pytest.raises(UsageError, match="budget_bytes of 0 or more, got -1"):
        activations_to_host(model.layers, budget_bytes=-1)
