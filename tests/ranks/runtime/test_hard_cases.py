"""Backwards that take unusual ways, and what is left when something was cut short or thrown away.

Each case went wrong once: a hang, a wrong gradient, an old weight or a leak. The truth is the
unsharded model on the batches of all ranks.
"""

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from differential import seeded
from harness import ranks
from oracle import full
from shoal._torch import storage
from shoal.errors import InvariantError
from shoal.layout import Flat
from shoal.runtime.full_parameters import full_parameters
from shoal.runtime.fully_shard import fully_shard
from shoal.runtime.policy import MixedPrecisionPolicy

DIM = 6

Loss = Callable[[Any, torch.Tensor, int], torch.Tensor]
"""Of a model, a rank's batch, and that rank."""


def linear() -> nn.Linear:
    return nn.Linear(DIM, DIM)


def batches() -> list[torch.Tensor]:
    """One batch for each rank, the same on all of them."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, DIM, generator=generator) for _ in range(dist.get_world_size())]


def twins(make: Callable[[], nn.Module], *units: str, **options: Any) -> tuple[Any, Any]:
    """A model, and its like with the named submodules and the root as units."""
    plain, sharded = seeded(make), seeded(make)
    for name in units:
        fully_shard(sharded.get_submodule(name), **options)
    return plain, fully_shard(sharded, **options)


def square(model: Any, x: torch.Tensor, rank: int) -> torch.Tensor:
    return model(x).square().mean()


def backward(plain: Any, sharded: Any, loss: Loss = square) -> None:
    """The mean of all ranks' losses on one side, this rank's loss on the other."""
    torch.stack([loss(plain, x, rank) for rank, x in enumerate(batches())]).mean().backward()
    rank = dist.get_rank()
    loss(sharded, batches()[rank], rank).backward()


def check_gradients(plain: nn.Module, sharded: nn.Module) -> None:
    """What no rank used may have no gradient, or zeros."""
    for (name, p), (_, q) in zip(plain.named_parameters(), sharded.named_parameters(), strict=True):
        expected = torch.zeros_like(p) if p.grad is None else p.grad
        got = torch.zeros_like(p) if q.grad is None else full(q.grad)
        torch.testing.assert_close(got, expected, msg=lambda m, n=name: f"{n}: {m}")


def check_parameters(plain: nn.Module, sharded: nn.Module) -> None:
    """Compare state dicts, which show the shards in every phase."""
    state = sharded.state_dict()
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(full(state[name]), expected, msg=lambda m, n=name: f"{n}: {m}")


class Tower(nn.Module):
    """Uses one of its layers on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = linear(), linear()

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        return self.always(x) + (self.sometimes(x) if use else 0)


class Towers(nn.Module):
    """Two units side by side, of which each rank uses all of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Tower(), Tower(), linear()

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return self.head(self.first(x, rank == 0) * self.second(2 * x, rank == 1))


class Rooted(nn.Module):
    """Two units in a row; a layer of the root that only one rank uses."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.option = linear(), linear()
        self.first, self.second = linear(), linear()

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        x = self.head(self.second(torch.relu(self.first(x))))
        return x + self.option(x) if rank == 0 else x


def square_of_rank(model: Any, x: torch.Tensor, rank: int) -> torch.Tensor:
    return model(x, rank).square().mean()


@ranks(2, timeout_s=15)
@pytest.mark.parametrize("make", [Towers, Rooted])
def test_ranks_that_use_different_parameters_reduce_in_one_order(
    make: Callable[[], nn.Module],
) -> None:
    plain, sharded = twins(make, "first", "second")
    sharded.set_reduce_scatter_unused_params(True)
    for _ in range(2):  # gradients accumulate
        backward(plain, sharded, square_of_rank)
    check_gradients(plain, sharded)


class Cut(nn.Module):
    """Units in a row with a bypass around the second; rank 1 cuts the graph behind one of them."""

    def __init__(self, behind: str) -> None:
        super().__init__()
        self.behind = behind
        self.stem, self.head = linear(), linear()
        self.first, self.second, self.third = linear(), linear(), linear()

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        x = self._cut("first", self.first(self.stem(x)), rank)
        return self.head(self.third(x + self._cut("second", self.second(x), rank)))

    def _cut(self, name: str, x: torch.Tensor, rank: int) -> torch.Tensor:
        return x.detach() if (name, rank) == (self.behind, 1) else x


@ranks(2, timeout_s=15)
@pytest.mark.parametrize("behind", ["first", "second"])
def test_a_unit_that_backward_skips_on_one_rank_is_reduced_in_its_turn(behind: str) -> None:
    units = ("first", "second", "third")
    # Held for backward: one that gathers again on some ranks only would hang.
    plain, sharded = twins(lambda: Cut(behind), *units, reshard_after_forward=False)
    sharded.set_reduce_scatter_unused_params(True)
    backward(plain, sharded, square_of_rank)
    check_gradients(plain, sharded)


@ranks(2)
def test_a_frozen_unit_has_nothing_unused_to_reduce() -> None:
    def make() -> nn.Module:
        model = Towers()
        model.first.requires_grad_(False)
        return model

    plain, sharded = twins(make, "first", "second")
    sharded.set_reduce_scatter_unused_params(True)
    backward(plain, sharded, square_of_rank)
    check_gradients(plain, sharded)


class Box:
    """An argument that cannot be looked into."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Adapted(nn.Module):
    """A trained layer above a frozen one, whose weight backward reads last."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.top = linear().requires_grad_(False), linear()
        self.box: Box | None = None

    def forward(self, box: Box | None = None) -> torch.Tensor:
        box = box or self.box
        assert box is not None
        return self.top(torch.relu(self.base(box.x)))


class Hidden(nn.Module):
    """Gives its middle unit an input in a way that no hook sees."""

    def __init__(self, by_attribute: bool) -> None:
        super().__init__()
        self.by_attribute = by_attribute
        self.first, self.middle, self.last = linear(), Adapted(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        box = Box(self.first(x))
        if self.by_attribute:
            self.middle.box = box
            return self.last(self.middle())
        return self.last(self.middle(box))


@ranks(2)
@pytest.mark.parametrize("by_attribute", [False, True])
def test_a_frozen_weight_is_still_there_when_all_gradients_are(by_attribute: bool) -> None:
    plain, sharded = twins(lambda: Hidden(by_attribute), "first", "middle", "last")
    backward(plain, sharded)
    check_gradients(plain, sharded)


class Branched(nn.Module):
    """A branch of two units whose result the loss may not depend on."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.trunk, self.branch, self.tip, self.head = linear(), linear(), linear(), linear()

    def forward(self, x: torch.Tensor) -> Any:
        x = self.trunk(x)
        y = self.tip(self.branch(x))
        if self.kind == "detached":
            return self.head(x + y.detach())
        if self.kind == "measured":
            self.metric = y.square().mean().item()
            return self.head(x)
        return self.head(x), y


@ranks(2)
@pytest.mark.parametrize("kind", ["detached", "measured", "second output"])
def test_a_branch_that_is_no_part_of_the_loss(kind: str) -> None:
    def loss(model: Any, x: torch.Tensor, rank: int) -> torch.Tensor:
        output = model(x)
        return (output if torch.is_tensor(output) else output[0]).square().mean()

    plain, sharded = twins(lambda: Branched(kind), "trunk", "branch", "tip")
    backward(plain, sharded, loss)
    check_gradients(plain, sharded)


class Gained(nn.Module):
    """Reads all its weights in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 5), nn.Linear(5, DIM)
        self.gain = nn.Parameter(torch.full((1,), 0.9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))) * self.gain


class Twice(nn.Module):
    """Runs a unit under a reentrant checkpoint, and on inputs that need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unit, self.head = linear(), Gained(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        recomputed = checkpoint(self.unit, self.first(x), use_reentrant=True)
        return self.head(recomputed + self.unit(x))


@ranks(2)
def test_a_unit_run_raw_besides_a_reentrant_checkpoint() -> None:
    plain, sharded = twins(Twice, "first", "unit")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on reentrant checkpoints
        backward(plain, sharded)
    check_gradients(plain, sharded)


class Fragile(nn.Module):
    """A layer that raises on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.raises = linear(), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.raises:
            raise ValueError("asked to")
        return self.layer(x)


class Interrupted(nn.Module):
    """May raise in the root between units, or in the last unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.guard, self.last = linear(), linear(), Fragile(), Fragile()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.guard(self.inner(torch.relu(self.first(x)))))

    def interrupt(self, where: str) -> None:
        """Run until something raises."""
        fragile = self.get_submodule(where)
        assert isinstance(fragile, Fragile)
        fragile.raises = True
        with pytest.raises(ValueError, match="asked to"):
            self(batches()[dist.get_rank()])
        fragile.raises = False


@ranks(2)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("where", ["guard", "last"])
def test_training_goes_on_with_new_weights_after_a_forward_that_raised(
    where: str, grad: bool
) -> None:
    plain, sharded = twins(Interrupted, "first", "last")
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (plain, sharded)]
    for step in range(4):
        backward(plain, sharded)
        if step == 0:
            with torch.set_grad_enabled(grad):
                sharded.interrupt(where)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    check_parameters(plain, sharded)


@ranks(2)
def test_evaluation_sees_an_update_after_a_forward_that_raised() -> None:
    plain, sharded = twins(Interrupted, "first", "last")
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (plain, sharded)]
    backward(plain, sharded)
    with torch.no_grad():
        sharded.interrupt("last")
        for optimizer in optimizers:
            optimizer.step()
        x = batches()[0]
        for _ in range(3):
            torch.testing.assert_close(sharded(x), plain(x))


@ranks(2, 4)
def test_replicas_add_up_though_micro_batches_use_different_parameters(world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicas", "shards"))
    plain, sharded = twins(Rooted, "first", "second", mesh=mesh)
    for uses_option in (True, False):
        sharded.set_requires_all_reduce(not uses_option)
        rank = 0 if uses_option else 1
        backward(plain, sharded, lambda model, x, _, rank=rank: square_of_rank(model, x, rank))
    check_gradients(plain, sharded)


@ranks(2)
def test_a_gradient_kept_from_before_its_parameter_was_frozen() -> None:
    plain, sharded = twins(Gained)
    sharded.set_requires_gradient_sync(False)
    backward(plain, sharded)
    sharded.set_requires_gradient_sync(True)
    for model in (plain, sharded):
        model.up.weight.requires_grad_(False)
    backward(plain, sharded)
    check_gradients(plain, sharded)


@ranks(2)
@pytest.mark.parametrize("use", ["evaluated", "forward", "backward", "step"])
def test_a_model_that_was_used_is_collected(use: str) -> None:
    _, model = twins(lambda: nn.Sequential(linear(), nn.ReLU(), linear()), "0")
    alive = [weakref.ref(module) for module in model.modules()]
    with torch.set_grad_enabled(use != "evaluated"):
        loss = square(model, batches()[0], 0)
    if use in ("backward", "step"):
        loss.backward()
    if use == "step":
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    del model, loss
    gc.collect()
    assert [ref() for ref in alive] == [None] * len(alive)


def num_tensors() -> int:
    gc.collect()
    return sum(isinstance(value, torch.Tensor) for value in gc.get_objects())


@ranks(2)
def test_full_parameters_between_steps_leave_nothing_behind() -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))

    _, model = twins(make, "0", "1", "2", layout=Flat())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []
    for _ in range(12):
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with full_parameters(model):
            pass
        counts.append(num_tensors())
    assert counts[-1] <= counts[2], counts


class Scaling(torch.autograd.Function):
    """Returns a view of its input, and reads a weight in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (weight,) = ctx.saved_tensors
        return grads[0] * weight, grads[0].sum(0) / 2


class Viewing(nn.Module):
    """Its output is a view that a function of the user's own made."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weight = linear(), nn.Parameter(torch.full((DIM,), 1.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scaling.apply(self.layer(x), self.weight)


@ranks(2)
def test_an_output_that_a_custom_function_made_a_view() -> None:
    plain, sharded = twins(lambda: nn.Sequential(linear(), Viewing(), linear()), "0", "1", "2")
    backward(plain, sharded)
    check_gradients(plain, sharded)


def change(parameter: nn.Parameter, value: float, how: str) -> None:
    """Fill the second half of a parameter, in one of the ways users do it."""
    half = parameter.shape[0] // 2
    if how == "assigned data":
        parameter.data = torch.cat([parameter[:half], torch.full_like(parameter[half:], value)])
    else:
        (parameter.data if how == "data" else parameter)[half:].fill_(value)


@ranks(2)
@pytest.mark.parametrize("how", ["parameter", "data", "assigned data"])
def test_writeback_takes_what_the_block_changed_and_rounds_nothing_else(how: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    plain, sharded = twins(lambda: nn.Sequential(linear(), linear()), "0", "1", mp_policy=policy)
    with full_parameters(sharded, writeback=True), torch.no_grad():
        for model in (plain, sharded):
            change(model[0].weight, 0.0, how)
            change(model[1].bias, 0.5, how)
    for name, expected in plain.state_dict().items():
        assert torch.equal(full(sharded.state_dict()[name]), expected), name
    x = batches()[0]
    torch.testing.assert_close(sharded(x).bfloat16(), plain.bfloat16()(x.bfloat16()))


class Hollow(nn.Module):
    """Parameters with no elements among others."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.wide = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(3, 0))
        self.layer, self.tall = linear(), nn.Parameter(torch.empty(0, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x)) + self.flat.sum() + self.wide.sum() + self.tall.sum()


@ranks(2)
def test_empty_parameters_among_others() -> None:
    plain, sharded = twins(lambda: nn.Sequential(Hollow(), Hollow()), "0")
    backward(plain, sharded)
    check_gradients(plain, sharded)
    assert all(p.grad is not None for p in sharded.parameters())


@ranks(2)
@pytest.mark.skipif(not storage.can_swap_memory(), reason="this torch cannot swap storages")
@pytest.mark.parametrize("view", ["detach", "t"])
def test_a_view_kept_from_forward_reads_nan(view: str) -> None:
    kept: list[torch.Tensor] = []
    _, model = twins(lambda: nn.Sequential(linear(), linear()), "0")
    model[0].register_forward_hook(lambda module, *_: kept.append(getattr(module.weight, view)()))
    model(batches()[0])
    assert torch.isnan(kept[0]).all()


class Secretive(nn.Module):
    """Keeps a loss to itself and returns what does not depend on it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.top = linear(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.top(torch.tanh(self.layer(x))).square().mean()
        return x.detach()


class Confided(nn.Module):
    """Units around the secretive one, so that its gather is prefetched in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.secretive = linear(), Secretive()
        self.third, self.last = linear(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(self.third(x + self.secretive(x)))


@ranks(2)
def test_a_backward_that_comes_unseen_to_a_prefetched_unit_is_refused() -> None:
    _, sharded = twins(Confided, "first", "secretive", "third", "last")
    x = batches()[dist.get_rank()]
    loss = sharded(x).square().mean() + sharded.secretive.kept
    with pytest.raises(InvariantError, match="while its parameters were freed"):
        loss.backward()
