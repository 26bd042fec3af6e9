"""How gradients are reduced: own collectives, hooks, factors, unused parameters."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

from collectives import LoggedGather, LoggedReduce
from differential import (
    DIM,
    PLAIN,
    SHOAL,
    Block,
    Engine,
    check_engines_agree,
    check_like_plain,
    error_of,
    gradients,
    loss_of,
    stack,
    train,
    two_axes,
)
from harness import ranks


def custom(engine: Engine, dtypes: dict[str, Any]) -> list[Any]:
    """Own collectives: they get the unit's buffers, and their results count."""
    model = engine.shard(stack(num=2), dtypes)
    comms = []
    log: list[str] = []
    for name in ("", "blocks.0"):
        gather, reduce = LoggedGather(name, log), LoggedReduce(name, log)
        comms.append((gather, reduce))
        model.get_submodule(name).set_custom_all_gather(gather)
        model.get_submodule(name).set_custom_reduce_scatter(reduce)
    steps = train(engine, model, engine.batches(2))
    used = [
        (
            {(b.dtype, b.dim(), str(b.device)) for b in gather.buffers},
            {(b.dtype, b.dim(), str(b.device)) for b in reduce.buffers},
            [op == dist.ReduceOp.AVG for op in reduce.ops],
        )
        for gather, reduce in comms
    ]
    return [steps, used, sorted(log)]


@ranks(2)
@pytest.mark.parametrize("dtypes", [{}, {"param_dtype": torch.bfloat16}])
def test_own_collectives(dtypes: dict[str, Any]) -> None:
    check_engines_agree(custom, dtypes, plain=False)


class Doubling(LoggedReduce):
    """A reduction whose result shows that it was this one."""

    def __call__(self, output_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        work = super().__call__(output_tensor, *args, **kwargs)
        if work is not None:
            work.wait()
        output_tensor.mul_(2)


def doubled(engine: Engine) -> list[Any]:
    model = engine.shard(stack(num=2))
    model.blocks[1].set_custom_reduce_scatter(Doubling("", []))
    loss_of(model(engine.batches(1)[0])).backward()
    return [gradients(model)]


@ranks(2)
def test_what_an_own_reduction_writes_is_the_gradient() -> None:
    check_engines_agree(doubled, plain=False)


@ranks(2, 4)
@pytest.mark.parametrize("num_replicas", [None, 2])
@pytest.mark.parametrize("reduce", [torch.float32, torch.float64], ids=str)
def test_a_hook_between_reduction_and_gradient(
    num_replicas: int | None, reduce: torch.dtype
) -> None:
    mesh = None if num_replicas is None else two_axes(num_replicas)

    def run(engine: Engine) -> list[Any]:
        model = engine.shard(stack(num=2), {"reduce_dtype": reduce}, mesh=mesh)
        seen = []

        def hook(reduced: torch.Tensor) -> None:
            seen.append((type(reduced), reduced.dtype, reduced.ndim))
            dist.all_reduce(reduced)

        model.blocks[1].set_all_reduce_hook(hook)
        model.set_all_reduce_hook(hook)
        return [train(engine, model, engine.batches(2)), seen]

    check_engines_agree(run, plain=False)


@ranks(4)
def test_a_hook_that_replicates_equals_a_second_axis() -> None:
    mesh = two_axes()

    def run(engine: Engine) -> list[Any]:
        model = engine.shard(stack(), mesh=mesh["shard"])
        for unit in (*model.blocks, model):
            unit.set_all_reduce_hook(
                lambda reduced: dist.all_reduce(
                    reduced, group=mesh["replicate"].get_group(), op=dist.ReduceOp.AVG
                )
            )
        seen = train(engine, model)
        by_mesh = engine.shard(stack(), mesh=mesh)
        train(engine, by_mesh)
        for (name, p), (_, q) in zip(
            model.named_parameters(), by_mesh.named_parameters(), strict=True
        ):
            assert torch.equal(p.to_local(), q.to_local()), name
        return seen

    check_engines_agree(run, exact=True, plain=False)


@ranks(4)
def test_a_stream_for_the_hook_is_refused_ontwo_axes() -> None:
    mesh = two_axes()

    def run(engine: Engine) -> list[Any]:
        model = engine.shard(stack(), mesh=mesh)
        return [error_of(lambda: model.set_all_reduce_hook(print, stream=object()))]

    (error,) = check_engines_agree(run, plain=False)
    assert isinstance(error, ValueError)


def divided(engine: Engine, factor: float | None, force: bool, **options: Any) -> dict[str, Any]:
    model = engine.shard(stack(num=2), **options)
    for module in (model, *model.blocks):
        if factor is not None:
            module.set_gradient_divide_factor(factor)
        module.set_force_sum_reduction_for_comms(force)
    loss_of(model(engine.batches(1)[0])).backward()
    return gradients(model)


@ranks(2, 4)
@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_divide_factors(reduce: torch.dtype, world_size: int) -> None:
    # Two by two where there are four: few bits show the order of longer sums.
    mesh = two_axes() if world_size == 4 else None
    # Gloo has no reduction that multiplies first, which torch would take for other cases.
    choices = [(None, True), (1.0, True), (3.0, True), (4.0, True), (6.0, True)]
    if mesh is None:
        choices.append((2.0, False))

    def run(engine: Engine) -> list[Any]:
        options = {"mesh": mesh, "dtypes": {"reduce_dtype": reduce}}
        return [divided(engine, factor, force, **options) for factor, force in choices]

    check_engines_agree(run, exact=True, plain=False)


@ranks(2, 4)
def test_a_divide_factor_replaces_the_number_of_ranks() -> None:
    """Also where the backend has no operation that multiplies first, which torch needs."""
    plain, sharded = stack(num=2), SHOAL.shard(stack(num=2))
    for module in (sharded, *sharded.blocks):
        module.set_gradient_divide_factor(0.5)
    loss_of(plain(PLAIN.batches(1)[0])).backward()
    loss_of(sharded(SHOAL.batches(1)[0])).backward()
    factor = dist.get_world_size() / 0.5
    expected = {n: p.grad * factor for n, p in plain.named_parameters() if p.grad is not None}
    check_like_plain(gradients(sharded), expected)


def one_divided(engine: Engine) -> list[Any]:
    """The old name of the same; and of one unit alone."""
    model = engine.shard(stack(num=2))
    model.blocks[0].set_force_sum_reduction_for_comms(True)
    with pytest.warns(DeprecationWarning, match="set_gradient_divide_factor"):
        model.blocks[0].set_reduce_scatter_divide_factor(1.0)
    loss_of(model(engine.batches(1)[0])).backward()
    return [gradients(model)]


@ranks(2)
def test_factors_are_for_one_unit() -> None:
    check_engines_agree(one_divided, plain=False)


class Expert(nn.Module):
    """Ranks use different parameters of it."""

    def __init__(self) -> None:
        super().__init__()
        self.paths = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.split(4)  # the unsharded model does what all ranks do
        first = dist.get_rank() if len(parts) == 1 else 0
        return torch.cat([self.paths[(first + i) % 2](part) for i, part in enumerate(parts)])


def experts(engine: Engine) -> list[Any]:
    model = engine.shard(stack(Expert, 2))
    if engine.is_sharded:
        model.set_reduce_scatter_unused_params(True)
    loss_of(model(engine.batches(1)[0])).backward()
    found = gradients(model)
    unused = {n: found.pop(n) for n in list(found) if ".paths.2." in n}
    # Torch gives zeros to parameters that no rank has used.
    assert not engine.is_sharded or all(not g.full_tensor().any() for g in unused.values())
    return [found]


@ranks(2)
def test_parameters_that_some_ranks_do_not_use() -> None:
    check_engines_agree(experts)


@ranks(2)
@pytest.mark.parametrize("recurse", [True, False])
def test_unused_parameters_get_zeros_where_asked(recurse: bool) -> None:
    def scenario(engine: Engine) -> list[Any]:
        model = engine.shard(stack(Unused, 1))
        model.set_reduce_scatter_unused_params(True, recurse=recurse)
        loss_of(model(engine.batches(1)[0])).backward()
        return [gradients(model)]

    check_engines_agree(scenario, plain=False)


class Unused(nn.Module):
    """Has a layer that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = Block(), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


_MODE_WARNS = "ignore:(Full backward hook is firing|FSDP2-wrapped module)"
"""`CommDebugMode` puts hooks on all modules, which make views of outputs."""


def counted(engine: Engine, mesh_axes: int) -> list[Any]:
    """How many collectives of which kind a watcher sees, with and without reshard."""
    mesh = two_axes() if mesh_axes == 2 else None
    seen = []
    for reshard_after_forward in (True, False):
        model = engine.shard(stack(num=2), mesh=mesh, reshard_after_forward=reshard_after_forward)
        for batch in engine.batches(2):
            with CommDebugMode() as mode:
                loss_of(model(batch)).backward()
            counts = {str(op): count for op, count in mode.get_comm_counts().items()}
            seen.append(sorted(counts.items()))
    return seen


@pytest.mark.filterwarnings(_MODE_WARNS)
@ranks(2)
def test_whoever_counts_collectives_sees_gathers_and_reductions() -> None:
    """Although on gloo both are exchanges: what is asked for counts, not how it is done."""
    check_engines_agree(counted, 1, plain=False)


@pytest.mark.filterwarnings(_MODE_WARNS)
@ranks(4)
def test_whoever_counts_collectives_sees_all_reductions() -> None:
    check_engines_agree(counted, 2, plain=False)


@pytest.mark.filterwarnings(_MODE_WARNS)
@ranks(2)
def test_one_rank_alone_may_count() -> None:
    model = SHOAL.shard(stack(num=2))
    plain = stack(num=2)
    loss_of(plain(PLAIN.batches(1)[0])).backward()
    with CommDebugMode() if dist.get_rank() == 0 else nullcontext():
        loss_of(model(SHOAL.batches(1)[0])).backward()
    check_like_plain(gradients(model), gradients(plain))


@ranks(2)
def test_the_stream_of_an_all_reduce_hook_on_cpu() -> None:
    model = SHOAL.api.fully_shard(stack(num=2))
    stream, used = torch.cpu.Stream(), []
    model.set_all_reduce_hook(lambda _: used.append(torch.cpu.current_stream()), stream=stream)
    loss_of(model(SHOAL.batches(1)[0])).backward()
    assert used == [stream]


class Chain(nn.Module):
    """Layers in a row, of which neighbours share units."""

    def __init__(self, *, recomputes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(5))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, 2)
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return self.head(self.norm(x))


def neighbours(engine: Engine, recomputes: bool) -> list[Any]:
    """Units of modules that run one after the other."""
    model: Any = Chain(recomputes=recomputes)
    layers = list(model.layers)
    for modules in (layers[:2], layers[2:], [model.norm, model.head]):
        engine.api.fully_shard(modules)
    engine.api.fully_shard(model)
    steps = train(engine, model, engine.batches(2))
    # By threads of gloo: modes that count put hooks on modules, which change what is counted.
    with profile() as profiled:
        loss_of(model(engine.batches(1)[0])).backward()
    return [steps, sum(one.count for one in profiled.key_averages() if "gloo:" in one.key)]


@ranks(2)
@pytest.mark.parametrize("recomputes", [False, True])
def test_neighbours_in_a_unit_are_gathered_and_reduced_together(recomputes: bool) -> None:
    check_engines_agree(neighbours, recomputes, plain=False)
