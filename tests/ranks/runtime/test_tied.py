"""Tied parameters in different units: one owner, gathered for all users, one gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from harness import ranks
from oracle import full
from shoal import compile_step
from shoal.errors import UsageError
from shoal.layout import Block as Blocks
from shoal.layout import Even, Flat, Layout, Rows, Whole
from shoal.runtime.fsdp_module import register_fsdp_forward_method
from shoal.runtime.full_parameters import full_parameters
from shoal.runtime.fully_shard import fully_shard, replicate
from shoal.runtime.observe import watch
from shoal.runtime.policy import CPUOffloadPolicy, MixedPrecisionPolicy

DIM, VOCABULARY = 6, 11


class Block(nn.Module):
    """Computes with its own weights; maybe with the embedding's too, maybe recomputed."""

    def __init__(self, table: nn.Parameter | None, recomputes: bool) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 7)
        self.down = nn.Linear(7, DIM)
        self.recomputes = recomputes
        self.table = table

    def forward(self, x: Tensor) -> Tensor:
        return (
            checkpoint(self.compute, x, use_reentrant=False) if self.recomputes else self.compute(x)
        )

    def compute(self, x: Tensor) -> Tensor:
        if self.table is not None:
            x = x + F.linear(x, self.table).tanh() @ self.table
        return x + self.down(torch.tanh(self.up(x)))


class Tied(nn.Module):
    """A language model whose embedding is its head, and whose last block reads it too."""

    def __init__(
        self, *, num_users: int = 2, recomputes: bool = False, frozen: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        table = self.embedding.weight if num_users > 2 else None
        self.blocks = nn.ModuleList([Block(None, recomputes), Block(table, recomputes)])
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY)
        self.head.weight = self.embedding.weight
        self.embedding.weight.requires_grad_(not frozen)

    def forward(self, tokens: Tensor, passes: int = 1) -> Tensor:
        x = self.embedding(tokens)
        for _ in range(passes):
            for block in self.blocks:
                x = block(x)
        scores = self.head(self.norm(x))
        if passes > 1:
            return self.head(self.norm(x + self.embedding(scores.argmax(-1))))
        return scores


Cut = Callable[..., None]


def ends_apart(model: Tied, shard: Any, **options: Any) -> None:
    """Both ends are units; the embedding owns the weight."""
    shard(model.embedding, **options)
    for block in model.blocks:
        shard(block, **options)
    shard(model.head, **options)
    shard(model, **options)


def head_owns(model: Tied, shard: Any, **options: Any) -> None:
    """The head is first, and has a bias beside what is tied; the norm is in one call with it."""
    shard([model.norm, model.head], **options)
    for block in reversed(model.blocks):
        shard(block, **options)
    shard(model.embedding, **options)
    shard(model, **options)


def root_borrows(model: Tied, shard: Any, **options: Any) -> None:
    """The root has the head, and borrows its weight from a unit inside."""
    shard(model.embedding, **options)
    for block in model.blocks:
        shard(block, **options)
    shard(model, **options)


def block_owns(model: Tied, shard: Any, **options: Any) -> None:
    """A block (if it is one of the users) owns it, with weights of its own."""
    for block in reversed(model.blocks):
        shard(block, **options)
    shard(model.embedding, **options)
    shard(model, **options)


CUTS = [ends_apart, head_owns, root_borrows, block_owns]


def make(**options: Any) -> Tied:
    torch.manual_seed(0)
    return Tied(**options)


def batches(num: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (2 * dist.get_world_size(), 4)
    return [torch.randint(VOCABULARY, shape, generator=generator) for _ in range(num)]


def own_part(batch: Tensor) -> Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def loss_of(model: Any, tokens: Tensor, **options: Any) -> Tensor:
    return model(tokens, **options).float().square().mean()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[Tensor]) -> Tensor:
    for loss in losses:
        loss.backward()
    norm = full(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    optimizer.step()
    return norm


def check_equal(model: nn.Module, plain: nn.Module, **tolerance: float) -> None:
    named = dict(plain.named_parameters(remove_duplicate=False))
    found = dict(model.named_parameters(remove_duplicate=False))
    assert list(found) == list(named)
    for name, parameter in named.items():
        torch.testing.assert_close(full(found[name].detach()), parameter.detach(), **tolerance)
        grad = found[name].grad
        assert (grad is None) == (parameter.grad is None), name
        if grad is not None:
            torch.testing.assert_close(full(grad), parameter.grad, **tolerance)


def train_both(
    model: nn.Module, plain: nn.Module, num: int = 3, *, compiled: Any = None, **options: Any
) -> None:
    """The same steps, on a part of each batch and on the whole."""
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (model, plain)]
    for batch in batches(num):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(model if compiled is None else compiled, own_part(batch), **options)
        norms = [
            step(model, optimizers[0], [loss]),
            step(plain, optimizers[1], [loss_of(plain, batch, **options)]),
        ]
        torch.testing.assert_close(*norms)
        check_equal(model, plain)


@ranks(2, 4)
@pytest.mark.sampled
@pytest.mark.parametrize("num_users", [2, 3])
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("cut", CUTS)
def test_training_equals_unsharded(cut: Cut, recomputes: bool, num_users: int) -> None:
    given = {"num_users": num_users, "recomputes": recomputes}
    model, plain = make(**given), make(**given)
    cut(model, fully_shard)
    assert model.head.weight is model.embedding.weight
    assert len(list(model.parameters())) == len(list(plain.parameters()))
    train_both(model, plain)
    assert model.head.weight is model.embedding.weight


@ranks(2, 4)
@pytest.mark.sampled(1)
@pytest.mark.parametrize("cut", [ends_apart, head_owns, root_borrows])
@pytest.mark.parametrize(
    "layout", [Even(), Flat(), Rows(), Blocks(5), Whole()], ids=lambda one: type(one).__name__
)
@pytest.mark.parametrize("reshards", [None, True, False, 2])
def test_layouts_and_resharding(cut: Cut, layout: Layout, reshards: bool | int | None) -> None:
    if reshards == 2 and (dist.get_world_size() == 2 or not isinstance(layout, Even)):
        reshards = None
    model, plain = make(num_users=3), make(num_users=3)
    cut(model, fully_shard, layout=layout, reshard_after_forward=reshards)
    train_both(model, plain)


@ranks(2)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("frozen", [False, True])
def test_frozen_and_called_several_times(cut: Cut, frozen: bool) -> None:
    given = {"num_users": 3, "frozen": frozen}
    model, plain = make(**given), make(**given)
    cut(model, fully_shard)
    train_both(model, plain, passes=2)


@ranks(4)
@pytest.mark.parametrize("cut", [ends_apart, root_borrows])
def test_two_axes(cut: Cut) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, plain = make(num_users=3), make(num_users=3)
    cut(model, fully_shard, mesh=mesh)
    train_both(model, plain)


@ranks(2)
@pytest.mark.parametrize("cut", [ends_apart, root_borrows])
def test_replicated(cut: Cut) -> None:
    model, plain = make(), make()
    cut(model, replicate)
    train_both(model, plain)


@ranks(2)
@pytest.mark.parametrize("cut", CUTS)
def test_bf16_is_that_of_one_unit(cut: Cut) -> None:
    """Gradients of both ends are added before they are reduced, as where one unit has both."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, one = make(), make()
    cut(model, fully_shard, mp_policy=policy)
    fully_shard(one, mp_policy=policy)
    for each in (model, one):
        loss_of(each, own_part(batches(1)[0])).backward()
    for (name, p), (_, q) in zip(model.named_parameters(), one.named_parameters(), strict=True):
        assert torch.equal(full(p.grad), full(q.grad)), name


@ranks(2, 4)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("reduces_unused", [False, True])
def test_accumulation(cut: Cut, reduces_unused: bool) -> None:
    model, plain = make(num_users=3), make(num_users=3)
    cut(model, fully_shard)
    model.set_reduce_scatter_unused_params(reduces_unused)
    for number, batch in enumerate(batches(3)):
        model.set_requires_gradient_sync(number != 1)
        loss_of(model, own_part(batch)).backward()
        loss_of(plain, batch).backward()
    check_equal(model, plain)


@ranks(2)
def test_two_forwards_before_their_backwards_and_evaluation_between() -> None:
    model, plain = make(num_users=3), make(num_users=3)
    ends_apart(model, fully_shard)
    first, second = batches(2)
    losses = [loss_of(model, own_part(batch)) for batch in (first, second)]
    with torch.no_grad():
        scores = model(first)
    for loss in losses:
        loss.backward()
    for batch in (first, second):
        loss_of(plain, batch).backward()
    check_equal(model, plain)
    torch.testing.assert_close(scores, plain(first))


@ranks(2)
@pytest.mark.parametrize("cut", [ends_apart, root_borrows])
def test_a_forward_that_raises(cut: Cut) -> None:
    model, plain = make(), make()
    cut(model, fully_shard)
    handle = model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(own_part(batches(1)[0]))
    handle.remove()
    (batch,) = batches(1)
    loss_of(model, own_part(batch)).backward()
    loss_of(plain, batch).backward()
    check_equal(model, plain)


@ranks(2)
def test_embedding_that_backward_does_not_gather() -> None:
    """The setting is the embedding's own: backward of the head reads the weight."""
    model, plain = make(), make()
    ends_apart(model, fully_shard)
    model.embedding.set_unshard_in_backward(False)
    with watch(model) as recorder:
        loss_of(model, own_part(batches(1)[0])).backward()
    gathers = [one for one in recorder.actions() if (one.kind, one.unit) == ("gather", "embedding")]
    assert len(gathers) == 3  # two forwards, one backward
    loss_of(plain, batches(1)[0]).backward()
    check_equal(model, plain)


class TwoHeads(nn.Module):
    """One of the heads is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.other = nn.Linear(DIM, VOCABULARY, bias=False)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> list[Tensor]:
        x = self.embedding(tokens)
        return [self.other(x), self.head(x)]


@ranks(2)
@pytest.mark.parametrize("gathers", [False, True])
def test_ranks_that_use_different_heads(gathers: bool) -> None:
    torch.manual_seed(0)
    plain = TwoHeads()
    torch.manual_seed(0)
    model: Any = TwoHeads()
    for module in (model.embedding, model.other, model.head, model):
        fully_shard(module)
    model.embedding.set_unshard_in_backward(gathers)
    model.set_reduce_scatter_unused_params(True)
    rank, size = dist.get_rank(), dist.get_world_size()
    for batch in batches():
        outputs = model(own_part(batch))
        outputs[rank].square().mean().backward()
        for user, part in enumerate(batch.chunk(size)):
            (plain(part)[user].square().mean() / size).backward()
        check_equal(model, plain)


@ranks(2)
def test_gathers_ahead_past_both_uses() -> None:
    """Backward of the head gathers the last block ahead, though the embedding ran first."""
    model = make()
    ends_apart(model, fully_shard)
    for _ in range(2):
        loss_of(model, own_part(batches(1)[0])).backward()
    with watch(model) as recorder:
        loss_of(model, own_part(batches(1)[0])).backward()
    done = [(str(one.kind), one.unit) for one in recorder.actions()]
    start = done.index(("backward", "head"))
    assert done.index(("gather", "blocks.1"), start) < done.index(("backward", "blocks.1"))
    assert done.index(("gather", "blocks.1"), start) < done.index(("free", "head"), start)
    reduced = [unit for kind, unit in done if kind == "reduce"]
    assert reduced.count("embedding") == 1


@ranks(2)
def test_offload() -> None:
    model, plain = make(), make()
    ends_apart(model, fully_shard, offload_policy=CPUOffloadPolicy())
    train_both(model, plain)


@ranks(2)
@pytest.mark.sampled(1)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("layout", [Even(), Rows()], ids=lambda one: type(one).__name__)
def test_captured_steps(cut: Cut, recomputes: bool, layout: Layout) -> None:
    given = {"num_users": 3, "recomputes": recomputes}
    model, plain = make(**given), make(**given)
    cut(model, fully_shard, layout=layout)
    ours, theirs = (torch.optim.Adam(m.parameters(), lr=1e-2) for m in (model, plain))
    captured = compile_step(model, lambda output, _: output.square().mean(), ours, max_norm=0.5)
    for batch in batches():
        captured(own_part(batch), None)
        step(plain, theirs, [loss_of(plain, batch)])
        theirs.zero_grad()
        check_equal(model, plain)
    assert captured.num_graphs == 1


@ranks(2)
def test_compiled() -> None:
    check_compiled(root_borrows, Even())


@ranks(2, 4)
@pytest.mark.soak
@pytest.mark.parametrize("cut", [ends_apart, head_owns, root_borrows])
@pytest.mark.parametrize("layout", [Even(), Flat()], ids=lambda one: type(one).__name__)
def test_compiled_in_every_cut(cut: Cut, layout: Layout) -> None:
    check_compiled(cut, layout)


def check_compiled(cut: Cut, layout: Layout) -> None:
    model, plain = make(num_users=3), make(num_users=3)
    cut(model, fully_shard, layout=layout)
    train_both(model, plain, 2, compiled=torch.compile(model, backend="shoal"))


@ranks(2)
def test_state_dicts_have_both_names(tmp_path: Path) -> None:
    model, plain = make(), make()
    ends_apart(model, fully_shard)
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    assert state["head.weight"] is not None
    other = Tied()
    head_owns(other, fully_shard)
    other.load_state_dict(state)
    check_equal(other, plain)
    with full_parameters(model):
        whole = model.state_dict()
        assert model.head.weight is model.embedding.weight
    assert whole["head.weight"] is whole["embedding.weight"]
    alone = Tied()
    alone.load_state_dict(whole)
    check_equal(alone, plain)


@ranks(2, 4)
def test_checkpoints_of_torch(tmp_path: Path) -> None:
    model, plain = make(), make()
    ends_apart(model, fully_shard)
    train_both(model, plain, 1)
    dcp.save(get_model_state_dict(model), checkpoint_id=tmp_path)
    other = Tied()
    root_borrows(other, fully_shard)
    state = get_model_state_dict(other)
    assert set(state) == set(plain.state_dict())
    dcp.load(state, checkpoint_id=tmp_path)
    set_model_state_dict(other, state)
    check_equal_values(other, plain)
    whole = get_model_state_dict(
        other, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if dist.get_rank() == 0:
        again = Tied()
        again.load_state_dict(whole)
        check_equal_values(again, plain)


def check_equal_values(model: nn.Module, plain: nn.Module) -> None:
    for (name, p), (_, q) in zip(
        model.named_parameters(remove_duplicate=False),
        plain.named_parameters(remove_duplicate=False),
        strict=True,
    ):
        torch.testing.assert_close(full(p.detach()), q.detach(), msg=name)


@ranks(2)
def test_unshard_of_who_borrows() -> None:
    model, plain = make(), make()
    ends_apart(model, fully_shard)
    model.head.unshard()
    assert torch.equal(model.head.weight, plain.head.weight)
    assert torch.equal(model.embedding.weight, plain.head.weight)
    model.head.reshard()
    assert model.head.weight is model.embedding.weight
    with full_parameters(model.head):
        assert torch.equal(model.head.weight, plain.head.weight)
    loss_of(model, own_part(batches(1)[0])).backward()
    model.head.zero_grad()
    assert model.embedding.weight.grad is None


@ranks(2)
def test_tied_after_sharding() -> None:
    """As `tie_weights()` of a library does it, between the calls."""
    torch.manual_seed(0)
    model, plain = make(), make()
    model.head.weight = nn.Parameter(torch.zeros(VOCABULARY, DIM))
    fully_shard(model.embedding)
    model.head.weight = model.embedding.weight
    fully_shard(model.head)
    fully_shard(model)
    train_both(model, plain)


@ranks(2)
def test_methods_of_who_borrows() -> None:
    model, plain = make(), make()
    model.head.scores = lambda x: F.linear(x, model.head.weight)  # type: ignore[assignment]
    ends_apart(model, fully_shard)
    register_fsdp_forward_method(model.head, "scores")
    x = torch.ones(2, DIM)
    model(own_part(batches(1)[0]))
    model.head.scores(x).sum().backward()
    F.linear(x, plain.head.weight).sum().backward()
    torch.testing.assert_close(full(model.head.weight.grad), plain.head.weight.grad)


@ranks(2)
def test_what_two_modules_cannot_have_in_common() -> None:
    model = make()
    fully_shard(model.embedding)
    with pytest.raises(UsageError, match=r"'weight' is tied to 'Embedding\.weight'.*param_dtype"):
        fully_shard(model.head, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(model.head)
    with pytest.raises(UsageError, match=r"'weight' is tied to 'Embedding\.weight'.*not below"):
        model.head(torch.ones(2, DIM))


@ranks(4)
def test_other_meshes_are_refused() -> None:
    model = make()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    fully_shard(model.embedding, mesh=mesh["a"])
    with pytest.raises(UsageError, match=r"'weight' is tied.*one mesh"):
        fully_shard(model.head, mesh=mesh["b"])
