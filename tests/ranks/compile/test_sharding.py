"""`fully_shard` in a graph of `torch.compile(backend="shoal")`: the eager engine's training."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from harness import ranks
from oracle import batches, build, full, loss_of, shard
from shoal.compile import backend, communication
from shoal.compile.aot.inner import Task, directly
from shoal.compile.lowering.graph_unit import GraphUnit
from shoal.compile.passes.memory import GraphMemory, Use, memory_of
from shoal.compile.passes.pipeline import sharded
from shoal.compile.step.compile_step import compile_step
from shoal.fsdp import MixedPrecisionPolicy, fully_shard
from shoal.layout import Block, Even, Flat, Layout, Rows, Whole
from shoal.passes import Pass
from shoal.runtime import gradient_matrix

LAYOUTS: list[Layout] = [Even(), Flat(), Rows(), Block(5), Whole()]
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def trained(model: Any, *, compiles: bool, num_steps: int = 3, every: int = 1) -> list[Any]:
    """Losses, gradients and parameters of some steps."""
    torch._dynamo.reset()
    run = torch.compile(model, backend="shoal", fullgraph=True) if compiles else model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    seen: list[Any] = []
    data = batches(num_steps * every, dist.get_rank(), dist.get_world_size())
    for index, (_, part) in enumerate(data):
        torch.manual_seed(index)
        loss = loss_of(run, part)
        loss.backward()
        seen.append(loss.detach())
        if index % every == every - 1:
            seen += [full(p.grad) for p in model.parameters() if p.grad is not None]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return [*seen, *(full(p.detach()) for p in model.parameters())]


def check(make: Any, *, exact: bool = True, **options: Any) -> None:
    compiled = trained(make(), compiles=True, **options)
    eager = trained(make(), compiles=False, **options)
    assert len(compiled) == len(eager)
    for a, b in zip(compiled, eager, strict=True):
        if exact:
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)


@ranks(2, 4)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_training_is_that_of_the_eager_engine(layout: Layout, world_size: int) -> None:
    """Bit by bit on two ranks; more are added up in another order."""
    check(lambda: shard(build(), layout=layout), exact=world_size == 2)


@ranks(2)
@pytest.mark.parametrize("layout", [Even(), Flat()], ids=repr)
def test_mixed_precision(layout: Layout) -> None:
    check(lambda: shard(build(), layout=layout, mp_policy=HALF), exact=False)


@ranks(2)
def test_gradients_add_up() -> None:
    check(lambda: shard(build()), every=2)


@ranks(4)
def test_on_two_axes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    check(lambda: shard(build(), mesh=mesh), exact=False)


@ranks(2)
def test_replicas_only() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    check(lambda: shard(build(), mesh=mesh), exact=False)


@ranks(2)
@pytest.mark.parametrize("layout", [Even(), Flat()], ids=repr)
def test_frozen_parameters_stay_frozen(layout: Layout) -> None:
    def make() -> Any:
        model: Any = build()
        for parameter in model.blocks[1].parameters():
            parameter.requires_grad_(False)
        model.blocks[0].up.weight.requires_grad_(False)
        return shard(model, layout=layout)

    check(make)


class Dropped(nn.Module):
    """Dropout, BatchNorm and a weight cut along its second dim."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3))
            for _ in range(2)
        )
        self.head = nn.Linear(6, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x.flatten(0, -2)).view(x.shape)
        return self.head(x)


@ranks(2)
def test_dropout_and_buffers() -> None:
    buffers: list[list[torch.Tensor]] = []

    def make() -> Any:
        torch.manual_seed(0)
        model: Any = Dropped()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        buffers.append(list(model.buffers()))
        return model

    check(make)
    for a, b in zip(*buffers, strict=True):
        assert torch.equal(a, b)


@ranks(2)
def test_another_dim() -> None:
    def make() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 11))
        return fully_shard(
            model, shard_placement_fn=lambda p: Shard(p.dim() - 1 if p.dim() > 1 else 0)
        )

    check(make)


GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
REDUCE = torch.ops._c10d_functional.reduce_scatter_tensor.default


@contextmanager
def counting_collectives(counts: dict[str, Counter[Any]]) -> Iterator[None]:
    """By the role of each graph that is compiled in here, the collectives in it."""

    def counting(task: Task) -> Any:
        counts[task.role] = Counter(
            node.target
            for node in task.module.graph.nodes
            if "c10d" in str(node.target) and "wait" not in str(node.target)
        )
        return directly(task)

    with patch.object(backend, "directly", counting):
        yield


def step_of(model: Any, bucket_mb: float) -> Callable[[], None]:
    """Forward and backward of a compiled model."""
    torch._dynamo.reset()
    options = {"cache": False, "bucket_mb": bucket_mb}
    run = torch.compile(model, backend="shoal", fullgraph=True, options=options)
    _, part = next(iter(batches(1, dist.get_rank(), dist.get_world_size())))
    return lambda: loss_of(run, part).backward()


def whole_step_of(model: Any, bucket_mb: float) -> Callable[[], object]:
    """A step with its optimizer, of which the first one runs as it is written."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"bucket_mb": bucket_mb}
    step = compile_step(model, lambda output, _: output.sum(), optimizer, options=options)
    _, x = batches(1, dist.get_rank(), dist.get_world_size())[0]
    step(x, x)
    return lambda: step(x, x)


@ranks(2)
@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("bucket_mb", [1e-6, 25])
def test_one_gather_and_one_reduction_per_unit(reshards: bool, bucket_mb: float) -> None:
    """Backward gathers again what forward freed; the root's are kept. Small ones become one."""
    model: Any = build()
    units = [fully_shard(block, reshard_after_forward=reshards) for block in model.blocks]
    fully_shard(model)
    counts: dict[str, Counter[Any]] = {}
    with counting_collectives(counts):
        step_of(model, bucket_mb)()
    num_gathers, num_again = (len(units) + 1, len(units)) if bucket_mb < 1 else (1, 1)
    assert counts["forward"] == {GATHER: num_gathers}
    assert counts["backward"][GATHER] == (num_again if reshards else 0)
    assert counts["backward"][REDUCE] == num_gathers


@ranks(2)
@pytest.mark.parametrize("whole", [False, True])
def test_as_many_units_are_gathered_ahead_as_setters_say(whole: bool) -> None:
    """The bound of gathered bytes is that of the unit which computes and of those ahead."""
    model: Any = build()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    bounds: list[int] = []

    def bounded(**how: Any) -> Any:
        bounds.append(how["max_gathered_bytes"])
        return sharded(**how)

    with patch.object(communication, "sharded", bounded):
        step = whole_step_of(model, 1e-6) if whole else step_of(model, 1e-6)
        for depth in (0, 1):
            model.set_prefetch_depth(depth)
            step()
    forwards = bounds if whole else bounds[::2]
    assert forwards[0] < forwards[1] <= 2 * forwards[0]


@ranks(2)
def test_two_units_are_gathered_and_one_is_reduced_at_a_time() -> None:
    """As in the eager engine: the one that computes and the next; and the root, whose use spans."""
    sizes = [8, *[16] * 7, 8]  # the root has as much as a unit
    model: Any = nn.Sequential(*(nn.Linear(*of, bias=False) for of in itertools.pairwise(sizes)))
    for layer in model[1:-1]:
        fully_shard(layer, layout=Flat())
    fully_shard(model, layout=Flat())
    memories: list[GraphMemory] = []
    note = Pass(name="memory", run=lambda graph: memories.append(memory_of(graph)))
    run = torch.compile(
        model,
        backend="shoal",
        fullgraph=True,
        options={"bucket_mb": 1e-6, "passes": lambda passes: passes.after("overlap", note)},
    )
    run(torch.ones(2, 8)).sum().backward()
    forward, backward = memories
    unit = 4 * 16 * 16
    assert forward.most(Use.GATHERED) == 3 * unit
    assert backward.most(Use.GATHERED) == 2 * unit
    sent = backward.by_use[Use.SENT]
    rows = [place for place, name in enumerate(backward.nodes) if name.startswith("lay_in_row")]
    assert [sent[place] for place in rows] == [unit] * 6 + [2 * unit], "the last need not wait"


@ranks(2)
@pytest.mark.parametrize("sizes", [[8, *[16] * 3, 40], [5, *[7] * 3, 13]], ids=str)
def test_a_large_matrix_is_reduced_in_parts_to_the_same_bits(sizes: list[int]) -> None:
    """As the engine does on CUDA: no other unit has memory of that size."""

    def gradients(large: int) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        torch._dynamo.reset()
        model: Any = nn.Sequential(*(nn.Linear(*of) for of in itertools.pairwise(sizes)))
        for layer in model[1:-1]:
            fully_shard(layer, layout=Flat(), mp_policy=HALF)
        fully_shard(model, layout=Flat(), mp_policy=HALF)
        counts: dict[str, Counter[Any]] = {}
        on_cuda = patch.object(GraphUnit, "allocates", True)
        with patch.object(gradient_matrix, "LARGE_BYTES", large), on_cuda:
            with counting_collectives(counts):
                options = {"bucket_mb": 1e-6, "cache": False}
                run = torch.compile(model, backend="shoal", fullgraph=True, options=options)
                run(torch.randn(4, sizes[0])).float().square().sum().backward()
        return [full(p.grad) for p in model.parameters()], counts["backward"][REDUCE]

    (whole, num_whole), (parts, num_parts) = gradients(1 << 40), gradients(1)
    assert num_parts > num_whole
    for a, b in zip(whole, parts, strict=True):
        assert torch.equal(a, b)


@ranks(2)
def test_units_are_kept_as_setters_say_after_capture() -> None:
    """Whether backward gathers again is the machine's choice by settings, which may change."""
    model: Any = build()
    units = [fully_shard(block) for block in model.blocks]
    fully_shard(model)
    counts: dict[str, Counter[Any]] = {}
    with counting_collectives(counts):
        step = step_of(model, bucket_mb=1e-6)
        for reshards in (True, False):
            model.set_reshard_after_forward(reshards)
            step()
            assert counts["backward"][GATHER] == (len(units) + 1) * reshards
            counts.clear()
            step()
            assert not counts, "nothing has changed"


@ranks(2)
@pytest.mark.parametrize("checkpoint", ["inside", "outside"])
def test_recomputation(checkpoint: Any) -> None:
    check(lambda: shard(build(checkpoint)), exact=False)


@ranks(2)
def test_evaluation_and_eager_steps_in_between() -> None:
    model: Any = shard(build())
    torch._dynamo.reset()
    run = torch.compile(model, backend="shoal", fullgraph=True)
    for _, part in batches(2, dist.get_rank(), dist.get_world_size()):
        with torch.no_grad():
            assert torch.equal(loss_of(run, part), loss_of(model, part))
        loss_of(run, part).backward()
        by_graph = [full(p.grad) for p in model.parameters()]
        model.zero_grad()
        loss_of(model, part).backward()
        for a, p in zip(by_graph, model.parameters(), strict=True):
            assert torch.equal(a, full(p.grad))
        model.zero_grad()


class Odd(nn.Module):
    """Parameters of many dtypes, some of which are no floating-point numbers, and one unused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, 6)
        self.first = nn.Linear(6, 5)
        self.wide = nn.Linear(5, 7).double()
        self.turn = nn.Parameter(torch.randn(7, dtype=torch.complex128))
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.shift = nn.Parameter(torch.arange(7), requires_grad=False)
        self.mask = nn.Parameter(torch.arange(7) % 2 == 0, requires_grad=False)
        self.frozen = nn.Parameter(torch.randn(7).bfloat16(), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3, 3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wide(self.first(self.table(tokens)).double())
        x = (x * self.turn).abs() + self.shift * self.frozen
        return (x * self.scale).where(self.mask, x).square().mean()


@ranks(2)
@pytest.mark.parametrize(
    ("layout", "reshards"), [(Even(), True), (Flat(), False), (Rows(), True), (Whole(), False)]
)
def test_parameters_of_several_dtypes(layout: Layout, reshards: bool) -> None:
    models = [Odd(), Odd()]
    for model in models:
        fully_shard(model, layout=layout, reshard_after_forward=reshards)
    torch._dynamo.reset()
    runs: list[Any] = [torch.compile(models[0], backend="shoal", fullgraph=True), models[1]]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, foreach=False) for one in models]
    for step in range(4):
        tokens = torch.arange(4) + step + dist.get_rank()
        losses: list[torch.Tensor] = []
        for model, run, optimizer in zip(models, runs, optimizers, strict=True):
            model.set_requires_gradient_sync(step != 1)
            losses.append(run(tokens))
            losses[-1].backward()
            if step != 1:
                optimizer.step()
                optimizer.zero_grad()
        assert torch.equal(*losses)
    assert all(map(torch.equal, *(map(full, model.parameters()) for model in models)))


@ranks(2)
def test_a_whole_step_refuses_several_dtypes_by_name() -> None:
    model: Any = Odd()
    fully_shard(model)
    step = compile_step(model, lambda loss, _: loss, torch.optim.SGD(model.parameters()))
    step(torch.arange(4), None)  # the first one is not captured
    with pytest.raises(NotImplementedError, match=r"torch\.int64 in compile_step"):
        step(torch.arange(4), None)


@ranks(2)
def test_ranks_that_capture_different_collectives_are_named() -> None:
    """Rank 1 computes with one layer less: it would wait in a gather that rank 0 does not issue."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    is_odd = dist.get_rank() == 1

    def step(x: torch.Tensor) -> torch.Tensor:
        for layer in model[:2] if is_odd else model:
            x = layer(x)
        return x.sum()

    model(torch.ones(2, 4)).sum().backward()  # one root for all
    torch._dynamo.reset()
    with pytest.raises(Exception, match="rank 0 and rank 1 have captured graphs with different"):
        torch.compile(step, backend="shoal", fullgraph=True)(torch.ones(2, 4))


@ranks(2)
def test_what_changes_after_capture_is_noticed() -> None:
    """Other weights by assignment, another dtype, other options: never the graph of before."""
    model: Any = shard(build())
    torch._dynamo.reset()
    run = torch.compile(model, backend="shoal", fullgraph=True)
    _, part = next(iter(batches(1, dist.get_rank(), dist.get_world_size())))
    loss_of(run, part).backward()
    model.zero_grad()

    other: Any = shard(build())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    model.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(loss_of(run, part), loss_of(model, part))
    loss_of(run, part).backward()
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad()

    model.double()
    assert torch.equal(loss_of(run, part), loss_of(model, part))

    model.set_requires_gradient_sync(False)
    loss_of(run, part).backward()
    assert all(p.grad is None for p in model.parameters())


@ranks(2)
def test_parameters_frozen_after_capture() -> None:
    model: Any = shard(build())
    torch._dynamo.reset()
    run = torch.compile(model, backend="shoal", fullgraph=True)
    _, part = next(iter(batches(1, dist.get_rank(), dist.get_world_size())))
    loss_of(run, part).backward()
    model.zero_grad()
    model.blocks[0].up.weight.requires_grad_(False)
    loss_of(run, part).backward()
    assert model.blocks[0].up.weight.grad is None
    assert model.blocks[0].down.weight.grad is not None


class Idle(nn.Module):
    """A layer beside the one that is asked for, in one unit with it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, *which: int) -> torch.Tensor:
        for index in which:
            x = self.layers[index](x)
        return x


@ranks(2)
def test_parameters_that_no_backward_comes_to_get_no_gradient() -> None:
    """As without a compiler: a zero would let optimizers decay them. Two graphs, then both."""
    torch._dynamo.reset()
    model, theirs = fully_shard(Idle()), fully_shard(Idle())
    run = torch.compile(model, backend="shoal", fullgraph=True, options={"cache": False})
    x = torch.ones(2, 4)
    for calls in ([(0, 1)], [(0,)], [(1,)], [(0,), (1,)], [(0, 1), (0,)], [(1,), (1,)]):
        for one, call in ((model, run), (theirs, theirs)):
            one.zero_grad()
            sum(call(x, *which).sum() for which in calls).backward()
        for a, b in zip(model.parameters(), theirs.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), calls
            assert b.grad is None or torch.equal(full(a.grad), full(b.grad))
