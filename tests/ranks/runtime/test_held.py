"""Between forward and backward, full parameters are registered: what users do with them then.

The root is held there, and every unit with `reshard_after_forward=False`; all that ran are, after a
forward that raised. The truth is the unsharded model.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from differential import seeded
from harness import ranks
from oracle import full
from shoal.errors import InvariantError
from shoal.layout import Block, Even, Flat, Layout, Rows, Whole
from shoal.runtime.full_parameters import full_parameters
from shoal.runtime.fully_shard import fully_shard

DIM = 6


class Model(nn.Module):
    """A root with parameters, and two units."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.raises = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = torch.relu(block(x))
        if self.raises:
            raise ArithmeticError("told to")
        return self.head(x)


def shard(**options: Any) -> Any:
    model = seeded(Model)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(step))


def check(plain: nn.Module, sharded: nn.Module) -> None:
    for (name, p), (_, q) in zip(plain.named_parameters(), sharded.named_parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None, name
        torch.testing.assert_close(full(q.grad), p.grad, msg=lambda m, n=name: f"{n}: {m}")


def by_model(model: Any) -> None:
    model.zero_grad()


def by_model_in_place(model: Any) -> None:
    model.zero_grad(set_to_none=False)


def by_parts(model: Any) -> None:
    for part in (model.stem, model.head, *model.blocks):
        part.zero_grad()


def by_parts_in_place(model: Any) -> None:
    for part in (model.stem, model.head, *model.blocks):
        part.zero_grad(set_to_none=False)


def by_hand(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = None


ZEROING = [by_model, by_model_in_place, by_parts, by_parts_in_place, by_hand]


@ranks(2)
@pytest.mark.parametrize("reshard", [None, False])
@pytest.mark.parametrize("zero", ZEROING)
@pytest.mark.parametrize("layout", [Even(), Flat(), Rows(), Block(4), Whole()], ids=repr)
@pytest.mark.sampled
def test_gradients_are_zeroed_between_forward_and_backward(
    layout: Layout, zero: Callable[[Any], None], reshard: bool | None
) -> None:
    plain, sharded = seeded(Model), shard(layout=layout, reshard_after_forward=reshard)
    for model in (plain, sharded):
        for step in range(3):
            loss = model(batch(step)).square().mean()
            zero(model)
            loss.backward()
    check(plain, sharded)


@ranks(2)
@pytest.mark.parametrize("zero", ZEROING)
def test_gradients_are_zeroed_after_a_forward_that_raised(zero: Callable[[Any], None]) -> None:
    plain, sharded = seeded(Model), shard()
    for model in (plain, sharded):
        model(batch(0)).square().mean().backward()
        model.raises = True
        with pytest.raises(ArithmeticError):
            model(batch(1))
        model.raises = False
        zero(model)
        model(batch(2)).square().mean().backward()
    check(plain, sharded)


@ranks(2)
def test_an_optimizer_that_knows_the_shards_zeroes_them() -> None:
    plain, sharded = seeded(Model), shard(reshard_after_forward=False)
    for model in (plain, sharded):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            loss = model(batch(step)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    check(plain, sharded)


@ranks(2)
def test_gradients_that_are_not_zeroed_accumulate() -> None:
    plain, sharded = seeded(Model), shard(reshard_after_forward=False)
    for model in (plain, sharded):
        for step in range(3):
            model(batch(step)).square().mean().backward()
    check(plain, sharded)


@ranks(2)
def test_gradients_are_clipped_by_parameters_that_were_taken_while_full() -> None:
    plain, sharded = seeded(Model), shard()
    norms = []
    for model in (plain, sharded):
        loss = model(batch(0)).square().mean()
        parameters = list(model.parameters())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters, 0.01)
        norms.append(full(norm) if model is sharded else norm)
    torch.testing.assert_close(norms[1], norms[0])
    check(plain, sharded)


def between(model: Any) -> None:
    model.kept = model(batch(0))


def after_raising(model: Any) -> None:
    model.raises = True
    with pytest.raises(ArithmeticError):
        model(batch(0))
    model.raises = False


def unsharded(model: Any) -> None:
    model.unshard()


MOMENTS = [between, after_raising, unsharded]


def build_new(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def add_group(model: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.step()
    optimizer.add_param_group({"params": list(model.parameters())})
    return optimizer


@ranks(2)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("build", [build_new, add_group])
@pytest.mark.parametrize("layout", [Even(), Flat()], ids=repr)
def test_an_optimizer_of_full_parameters_is_refused(
    layout: Layout, build: Callable[[Any], torch.optim.Optimizer], moment: Callable[[Any], None]
) -> None:
    model = shard(layout=layout)
    moment(model)
    optimizer = build(model)
    model(batch(1)).square().mean().backward()
    with pytest.raises(InvariantError, match=r"the first is 'stem.weight'.*model.reshard\(\)"):
        optimizer.step()


@ranks(2)
def test_an_optimizer_built_after_a_reshard_trains() -> None:
    plain, sharded = seeded(Model), shard()
    after_raising(sharded)
    sharded.reshard()
    for block in sharded.blocks:
        block.reshard()
    for model in (plain, sharded):
        optimizer = build_new(model)
        for step in range(2):
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            optimizer.step()
    check(plain, sharded)


@ranks(2)
def test_copies_of_full_parameters_are_tensors_of_their_own() -> None:
    model = shard()
    model(batch(0)).square().mean().backward()
    between(model)
    held = model.stem.weight
    assert held.grad is not None
    copied = copy.deepcopy(held)
    assert copied.grad is None or copied.grad.shape == copied.shape
    copied.grad = None
    assert held.grad is not None


class Written(nn.Module):
    """Changes a parameter in its forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.table = nn.Embedding(8, DIM, max_norm=0.5 if how == "renormalised" else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "clamped":
            with torch.no_grad():
                self.table.weight.clamp_(-0.1, 0.1)
        return self.table(x)


class Around(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner = Written(how)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@ranks(2)
@pytest.mark.parametrize("how", ["renormalised", "clamped"])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("layout", [Even(), Flat()], ids=repr)
@pytest.mark.filterwarnings("ignore:.*embedding_renorm")
def test_a_parameter_that_its_forward_changes_is_named(
    layout: Layout, grad: bool, how: str
) -> None:
    model = Around(how)
    fully_shard(model.inner, layout=layout)
    fully_shard(model, layout=layout)
    with (
        torch.set_grad_enabled(grad),
        pytest.raises(NotImplementedError, match=r"'inner.table.weight' was changed in place"),
    ):
        model(torch.arange(8))


@ranks(2)
def test_a_root_that_is_changed_before_its_backward_is_named() -> None:
    model = shard()
    loss = model(batch(0)).sum()
    with torch.no_grad():
        model.head.bias.zero_()
    with pytest.raises(NotImplementedError, match=r"'head.bias' was changed in place"):
        loss.backward()


@ranks(2)
@pytest.mark.parametrize("writeback", [True, False])
def test_full_parameters_may_be_written_to(writeback: bool) -> None:
    model = shard()
    before = full(model.head.bias.detach().clone())
    with full_parameters(model, writeback=writeback), torch.no_grad():
        model.head.bias.add_(1)
    torch.testing.assert_close(full(model.head.bias.detach()), before + 1 if writeback else before)
    dist.barrier()


def leave_full(model: Any, how: str) -> None:
    """Leave full parameters on the root and on its first block."""
    if how == "unshard":
        model.unshard()
        model.blocks[0].unshard()
    elif how == "kept":
        model.set_reshard_after_backward(False)
        model(batch(0)).sum().backward()
        model.zero_grad()
    else:
        model.raises = how == "raised"
        try:
            model(batch(0))
        except ArithmeticError:
            model.raises = False


@ranks(2, 4)
@pytest.mark.parametrize("layout", [Even(), Flat(), Rows(), Block(3), Whole()], ids=repr)
@pytest.mark.parametrize("how", ["forward", "raised", "unshard", "kept"])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.sampled
def test_freezing_full_parameters_freezes_their_shards(
    layout: Layout, how: str, trains: bool
) -> None:
    """And unfreezing them: a head that is unfrozen after a forward of evaluation is trained."""
    sharded, plain = shard(layout=layout), seeded(Model)
    for model in (sharded, plain):
        model.requires_grad_(not trains)
        model.stem.requires_grad_(True)
    leave_full(sharded, how)
    for model in (sharded, plain):
        model.head.requires_grad_(trains)
        for parameter in model.blocks[0].parameters():
            parameter.requires_grad = trains
    for step in range(3):
        for model in (sharded, plain):
            model.zero_grad()
            model(batch(step)).square().mean().backward()
        for (name, p), (_, q) in zip(
            plain.named_parameters(), sharded.named_parameters(), strict=True
        ):
            assert p.requires_grad is q.requires_grad, name
            assert (p.grad is None) is (q.grad is None), name
            if p.grad is not None:
                torch.testing.assert_close(full(q.grad), p.grad, msg=name)
        sharded.reshard()
        sharded.blocks[0].reshard()
