"""Complex parameters: they train as the unsharded ones do, in every layout and by both doors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from differential import (
    DIM,
    PLAIN,
    SHOAL,
    TORCH,
    Engine,
    check_like_plain,
    check_same,
    copies,
    gradients,
    in_full,
    loss_of,
    seeded,
    snapshot,
    two_axes,
)
from harness import ranks
from oracle import full
from shoal.checkpoint import load_training, save_training
from shoal.fsdp import FullyShardedDataParallel, full_parameters
from shoal.layout import Block, Even, Flat, Layout, Rows, Whole

LAYOUTS: list[Layout] = [Even(), Flat(), Rows(), Block(4), Whole()]


class Rotation(nn.Module):
    """Complex weights, whose rows divide no world size."""

    def __init__(self, *, with_real: bool) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(DIM, 7, dtype=torch.complex64) / 3)
        self.back = nn.Parameter(torch.randn(7, DIM, dtype=torch.complex64) / 3)
        self.offset = nn.Parameter(torch.zeros(4, dtype=torch.complex64))
        self.gain = nn.Parameter(torch.ones(DIM)) if with_real else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = (x.to(self.turn.dtype) @ self.turn).conj() @ self.back
        turned = turned + self.offset.sum().conj()
        moved = turned.real + turned.imag.square()
        return x + (moved if self.gain is None else self.gain * moved)


class Model(nn.Module):
    def __init__(self, *, with_real: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Rotation(with_real=with_real) for _ in range(2))
        self.last = nn.Parameter(torch.randn(DIM, 3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (x.to(self.last.dtype) @ self.last).abs()


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "adamw foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9),
    "sgd foreach": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, foreach=True),
}


def trained(engine: Engine, name: str, *, with_real: bool = False, **options: Any) -> list[Any]:
    """Steps with clipping, of which the first adds up two backwards without a reduction."""
    model: Any = engine.shard(seeded(lambda: Model(with_real=with_real)), **options)
    optimizer = OPTIMIZERS[name](model.parameters())
    seen: list[Any] = []
    for index, batch in enumerate(engine.batches(4)):
        if engine.is_sharded:
            model.set_requires_gradient_sync(index != 0)
        loss_of(model(batch)).backward()
        if index == 0:
            continue
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        seen += [full(norm), gradients(model)]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, snapshot(model, optimizer)]


@pytest.mark.compose("complex parameters", "fully_shard", "every layout")
@ranks(2, 4)
@pytest.mark.sampled
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize("with_real", [False, True])
def test_training(name: str, layout: Layout, with_real: bool) -> None:
    plain = trained(PLAIN, name, with_real=with_real)
    check_like_plain(trained(SHOAL, name, with_real=with_real, layout=layout), plain)


@ranks(2)
@pytest.mark.parametrize("dtypes", [None, {"reduce_dtype": torch.float32}], ids=repr)
def test_torchs_engine_gives_the_same(dtypes: Any) -> None:
    """Its gradients are cast to the reduce dtype: with one, the imaginary part is lost."""
    plain = trained(PLAIN, "sgd")
    ours = trained(SHOAL, "sgd", dtypes=dtypes)
    if dtypes is None:
        check_same(ours, trained(TORCH, "sgd"), exact=True, where="shoal against torch")
    check_like_plain(ours, plain)


@pytest.mark.compose("complex parameters", "HSDP")
@ranks(4)
@pytest.mark.parametrize("layout", [Even(), Flat()], ids=repr)
def test_replicas(layout: Layout) -> None:
    plain = trained(PLAIN, "sgd")
    check_like_plain(trained(SHOAL, "sgd", layout=layout, mesh=two_axes()), plain)


@pytest.mark.compose("complex parameters", "wrapper")
@ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_the_wrapper(use_orig_params: bool) -> None:
    model = seeded(lambda: Model(with_real=False))
    wrapped = FullyShardedDataParallel(model, use_orig_params=use_orig_params)
    plain = seeded(lambda: Model(with_real=False))
    for one, engine in ((wrapped, SHOAL), (plain, PLAIN)):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2, foreach=True)
        for batch in engine.batches(2):
            loss_of(one(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
    with FullyShardedDataParallel.summon_full_params(wrapped):
        found = copies(dict(model.named_parameters()))
    for (name, value), expected in zip(found.items(), plain.parameters(), strict=True):
        torch.testing.assert_close(value, expected, msg=name)


@ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_whole_values(layout: Layout) -> None:
    model = SHOAL.shard(seeded(lambda: Model(with_real=True)), layout=layout)
    plain = seeded(lambda: Model(with_real=True))
    with full_parameters(model, writeback=True), torch.no_grad():
        model.last.mul_(1j)
    with torch.no_grad():
        plain.last.mul_(1j)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value), name
    check_like_plain(in_full(dict(model.state_dict())), plain.state_dict())


@ranks(2)
@pytest.mark.parametrize("layouts", [(Even(), Flat()), (Rows(), Even())], ids=repr)
def test_checkpoints(layouts: tuple[Layout, Layout], tmp_path: Path) -> None:
    """Saved from one layout, loaded into another, with the optimizer's state."""
    models = [
        SHOAL.shard(seeded(lambda: Model(with_real=True)), layout=layout) for layout in layouts
    ]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    loss_of(models[0](SHOAL.batches(1)[0])).backward()
    optimizers[0].step()
    save_training(tmp_path / "saved", models[0], optimizers[0], {})
    load_training(tmp_path / "saved", models[1], optimizers[1])
    seen = [
        in_full([dict(model.named_parameters()), [*optimizer.state.values()]])
        for model, optimizer in zip(models, optimizers, strict=True)
    ]
    check_same(seen[1], seen[0], exact=True, where="loaded against saved")


class Vector(nn.Module):
    """A vector and a number, which no two ranks can share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.randn(DIM - 1, dtype=torch.complex64))
        self.turn = nn.Parameter(torch.randn((), dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x[:, 1:] * self.turn + self.offset).abs()


@ranks(2, 4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_uneven_vectors(name: str) -> None:
    """`torch.view_as_real` of such a DTensor would be a copy, into which Adam would write."""
    seen = []
    for engine in (SHOAL, PLAIN):
        model = engine.shard(seeded(Vector))
        optimizer = OPTIMIZERS[name](model.parameters())
        for batch in engine.batches(3):
            loss_of(model(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
        seen.append(snapshot(model, optimizer))
    check_like_plain(*seen)
