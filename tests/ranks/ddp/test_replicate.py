"""Replicated modules beside torch's DistributedDataParallel, to the bit."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import shoal
from harness import ranks
from replicas import Branches, Model, assert_same, batch, pair, train
from shoal import replicate
from shoal.errors import InvariantError

pytestmark = pytest.mark.filterwarnings("ignore")


def buckets(model: nn.Module) -> list[tuple[int, ...]]:
    return [bucket.members for bucket in vars(model)["_shoal_replica"].reducer._buckets]


@ranks(2, 4)
@pytest.mark.parametrize("as_views", [False, True])
def test_training(as_views):
    for small in (True, False):
        ours, theirs = pair(small=small, gradient_as_bucket_view=as_views)
        assert_same(ours, theirs)
        assert len(buckets(ours)) == 1
        train(ours, theirs, set_to_none=not small)
        assert len(buckets(ours)) > 1 or not small
    assert isinstance(ours, Model)
    assert list(ours.state_dict()) == list(Model().state_dict())


@ranks(2)
def test_averages_are_those_of_one_big_batch():
    torch.manual_seed(0)
    whole, ours = nn.Linear(5, 3), nn.Linear(5, 3)
    replicate(ours)
    whole.load_state_dict(ours.state_dict())
    ours(batch(0)).pow(2).mean().backward()
    both = [torch.empty(6, 5) for _ in range(2)]
    dist.all_gather(both, batch(0))
    whole(torch.cat(both)).pow(2).mean().backward()
    for a, b in zip(ours.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@ranks(2)
@pytest.mark.parametrize("as_views", [False, True])
def test_accumulation(as_views):
    ours, theirs = pair(gradient_as_bucket_view=as_views)

    def step(model: nn.Module, x: torch.Tensor) -> None:
        with model.no_sync():
            model(x[:3]).pow(2).mean().backward()
        model(x[3:]).pow(2).mean().backward()

    train(ours, theirs, step=step)
    ours.set_requires_gradient_sync(False)
    with theirs.no_sync():
        for model in (ours, theirs):
            model(batch(7)).mean().backward()
    assert_same(ours, theirs)
    seen = [torch.empty_like(ours.last.weight) for _ in range(2)]
    dist.all_gather(seen, ours.last.weight.grad.contiguous())
    assert not torch.equal(*seen)


@ranks(2)
def test_several_forwards_before_one_backward():
    ours, theirs = pair(broadcast_buffers=False)

    def step(model: nn.Module, x: torch.Tensor) -> None:
        (model(x).mean() + model(2 * x).pow(2).mean()).backward()

    train(ours, theirs, step=step)


@ranks(2)
def test_several_backwards_average_each_time():
    torch.manual_seed(0)
    ours, plain = replicate(nn.Linear(5, 3)), nn.Linear(5, 3)
    plain.load_state_dict(ours.state_dict())
    for model in (ours, plain):
        losses = [model(batch(number)).pow(2).mean() for number in range(2)]
        for loss in losses:
            loss.backward()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        dist.all_reduce(b.grad)
        torch.testing.assert_close(a.grad, b.grad / 2)


@ranks(2)
@pytest.mark.parametrize("as_views", [False, True])
def test_ranks_use_different_branches(as_views):
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": as_views}
    ours, theirs = pair(Branches, **options)
    number = 0

    def step(model: nn.Module, x: torch.Tensor) -> None:
        choices = [(0, 1), (1, 1), (None, 2), (None, None), (2, 0), (0, 0)]
        branch = choices[number][dist.get_rank()]
        model(x, branch).pow(2).mean().backward()

    for number in range(6):  # noqa: B007
        train(ours, theirs, num_steps=1, step=step)
    assert ours.branches[1].weight.grad is None


@ranks(2)
def test_usage_counts_what_was_accumulated_alone():
    ours, theirs = pair(Branches, find_unused_parameters=True)
    for model in (ours, theirs):
        with model.no_sync():
            model(batch(0), dist.get_rank()).mean().backward()
        model(batch(1), None).mean().backward()
    assert_same(ours, theirs)
    assert ours.branches[0].weight.grad is not None
    assert ours.branches[2].weight.grad is None


class Twice(nn.Module):
    """Two reentrant recomputations of one layer, and a layer that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner, self.idle = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for _ in range(2):
            x = checkpoint(self.inner, x, use_reentrant=True)
        return x


@ranks(2)
def test_static_graph_counts_what_comes_twice_and_what_never_comes():
    ours, theirs = pair(Twice, static_graph=True)
    train(ours, theirs)
    assert ours.idle.weight.grad is None


@ranks(2)
def test_a_parameter_without_gradient_is_named_on_its_rank_and_hangs_nobody():
    ours = replicate(Branches())
    loss = ours(batch(0), 0).mean() + sum(b(batch(0)).mean() for b in ours.branches[:-1])
    if dist.get_rank() == 1:
        loss = loss + ours.branches[2](batch(0)).mean()
        loss.backward()
    else:
        with pytest.raises(InvariantError, match=r"rank 0 did not come to 2 of 8 .*branches\.2\.b"):
            loss.backward()
    # The next step is whole again.
    sum(ours(batch(1), branch).mean() for branch in range(3)).backward()


@ranks(2)
@pytest.mark.parametrize("finds_unused", [False, True])
def test_gradients_that_are_not_accumulated_are_this_ranks_own(finds_unused):
    """One rank alone takes them, before and after the others' backward: it waits for nobody."""
    ours, theirs = pair(find_unused_parameters=finds_unused)
    taken: list[tuple[torch.Tensor, ...]] = []

    def step(model: nn.Module, x: torch.Tensor) -> None:
        loss = model(x).pow(2).mean()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if dist.get_rank() == 0:
            taken.append(torch.autograd.grad(loss, trained, retain_graph=True))
        loss.backward(retain_graph=True)
        if dist.get_rank() == 0:
            taken.append(torch.autograd.grad(loss, trained))

    train(ours, theirs, step=step)
    for mine, wanted in zip(taken[::4] + taken[1::4], taken[2::4] + taken[3::4], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, wanted, strict=True))


@ranks(2)
def test_gradients_of_inputs():
    ours, theirs = pair()

    def step(model: nn.Module, x: torch.Tensor) -> None:
        x.requires_grad_()
        loss = model(x).pow(2).mean()
        loss.backward(inputs=[x], retain_graph=True)
        assert all(parameter.grad is None for parameter in model.parameters())
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.pow(2).sum()).backward()

    train(ours, theirs, step=step)


class Exit(nn.Module):
    """Returns early what it was given, if told so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, is_early: bool) -> torch.Tensor:
        return x * 2 if is_early else self.linear(x)


@ranks(2)
def test_a_rank_that_uses_no_parameter_at_all_is_not_missed():
    is_early = dist.get_rank() == 0
    for finds_unused in (True, False):
        ours = replicate(Exit(), find_unused_parameters=finds_unused)
        for _ in range(2):
            ours.zero_grad()
            loss = ours(torch.ones(2, 5, requires_grad=True), is_early).sum()
            complains = is_early and not finds_unused
            with pytest.raises(InvariantError) if complains else nullcontext():
                loss.backward()
            assert torch.equal(ours.linear.bias.grad, torch.ones(5))  # half of two rows


@ranks(2)
def test_a_backward_that_broke_off_is_forgotten():
    ours, theirs = pair()

    def explode(_: torch.Tensor) -> None:
        raise ValueError("boom")

    handle = ours.first.weight.register_hook(explode)
    with pytest.raises(ValueError, match="boom"):
        ours(batch(9)).mean().backward()
    handle.remove()
    ours.zero_grad()
    theirs(batch(9)).mean().backward()
    theirs.zero_grad()
    train(ours, theirs)


@ranks(2)
def test_optimizers_in_backward_see_averages():
    ours, theirs = pair()
    early = ours.first.weight
    seen = []

    def step(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    for parameter in ours.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(step)
    handle = early.register_post_accumulate_grad_hook(lambda _: seen.append(1))
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for number in range(3):
        for model in (ours, theirs):
            model(batch(number)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b)
        handle.remove()
    assert seen == [1]


@ranks(2)
def test_dtypes_have_buckets_of_their_own():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5).double()
            self.c = nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(self.b(self.a(x).double()).float())

    ours, theirs = pair(Mixed, small=False)
    assert len(buckets(ours)) == 2
    train(ours, theirs)


@ranks(2)
def test_ignored_parts_stay_this_ranks_own():
    model = Model()
    replicate(model, ignored_modules=[model.first], ignored_params=[model.last.bias])
    model(batch(0)).pow(2).mean().backward()
    for tensor, is_same in (
        (model.first.weight, False),
        (model.last.bias, False),
        (model.last.weight, True),
    ):
        both = [torch.empty_like(tensor) for _ in range(2)]
        dist.all_gather(both, tensor.grad)
        assert torch.equal(*both) == is_same


@ranks(2)
def test_evaluation_between_steps_changes_nothing():
    # With broadcasts, torch's fails here too: they write to buffers that backward has saved.
    ours, theirs = pair(broadcast_buffers=False)

    def step(model: nn.Module, x: torch.Tensor) -> None:
        loss = model(x).pow(2).mean()
        with torch.no_grad():
            model.eval()
            model(x)
            model.train()
        loss.backward()

    train(ours, theirs, step=step)


@ranks(2)
def test_checkpoints_around_the_whole_module():
    ours, theirs = pair(lambda: nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)))
    for number in range(3):
        checkpoint(ours, batch(number), use_reentrant=False).mean().backward()
        theirs(batch(number)).mean().backward()
        assert_same(ours, theirs)


@ranks(2)
def test_torch_compile_around_it():
    ours, theirs = pair(lambda: nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)))
    compiled = torch.compile(ours, backend="eager")
    for number in range(3):
        compiled(batch(number)).mean().backward()
        theirs(batch(number)).mean().backward()
        assert_same(ours, theirs)


def test_the_public_name():
    assert shoal.replicate is replicate
