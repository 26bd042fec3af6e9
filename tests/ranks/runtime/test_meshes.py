"""Meshes of one and two axes: torch's engine and ours, bit by bit, and the unsharded model."""

import io
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from differential import (
    PLAIN,
    SHOAL,
    Engine,
    Stack,
    check_close,
    check_engines_agree,
    copies,
    error_of,
    gradients,
    kind_of,
    loss_of,
    needs_mesh_dims,
    seeded,
    snapshot,
    stack,
    train,
    train_beside_plain,
    two_axes,
)
from harness import ranks
from oracle import full
from shoal import fully_shard
from shoal.layout import Even, Flat, Layout
from shoal.sharded_tensor import load_with_process_group


@ranks(2, 4)
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_one_axis_shards(reshard_after_forward: bool | None) -> None:
    def run(engine: Engine) -> list[Any]:
        return train_beside_plain(
            engine, engine.shard(stack(), reshard_after_forward=reshard_after_forward), Stack
        )

    check_engines_agree(run, plain=False)


@ranks(4)
@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_two_axes_replicate_and_shard(num_replicas: int) -> None:
    mesh = two_axes(num_replicas)

    def run(engine: Engine) -> list[Any]:
        model = engine.shard(stack(), mesh=mesh)
        assert model.head.weight.placements == (Replicate(), Shard(0))
        return train_beside_plain(engine, model, Stack)

    check_engines_agree(run, exact=num_replicas == 2, plain=False)


@ranks(4)
def test_two_axes_in_mixed_precision() -> None:
    mesh = two_axes()

    def run(engine: Engine) -> list[Any]:
        policy = engine.policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return train(engine, engine.shard(stack(), mesh=mesh, mp_policy=policy))

    check_engines_agree(run, exact=True, plain=False)


def _replicated_stack(mesh: DeviceMesh) -> Stack:
    """A stack whose parameters are on the mesh already, whole on every rank."""
    model = seeded(Stack)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            data = distribute_tensor(parameter.detach(), mesh, [Replicate()] * mesh.ndim)
            setattr(module, name, nn.Parameter(data))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, distribute_tensor(buffer, mesh, [Replicate()] * mesh.ndim))
    return model


@needs_mesh_dims
@ranks(2, 4)
def test_one_axis_replicates() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(DTensor.from_local(x, mesh, [Shard(0)])).to_local().pow(2).mean()

    def run(engine: Engine) -> list[Any]:
        dims = engine.api.DataParallelMeshDims(replicate="data")
        model = _replicated_stack(mesh)
        for unit in (*model.blocks, model):
            engine.api.fully_shard(unit, mesh=mesh, dp_mesh_dims=dims)
        result = train(engine, model, loss=loss)
        plain = seeded(Stack)
        train(PLAIN, plain)
        check_close(model, plain)
        return result

    check_engines_agree(run, plain=False)


def _accumulate(model: Any, synchronised: list[str], last_only: bool) -> list[Any]:
    """A backward for each word: what is done with its gradients, and which are there after."""
    seen = []
    for number, (word, x) in enumerate(zip(synchronised, SHOAL.batches(4), strict=False), 1):
        model.set_requires_gradient_sync(word != "nothing")
        model.set_requires_all_reduce(word == "everything")
        if last_only:
            model.set_is_last_backward(number == len(synchronised))
        loss_of(model(x)).backward()
        seen.append(gradients(model))
    return seen


@pytest.mark.sampled
@ranks(4)
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32], ids=["as_is", "wide"])
@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize(
    "synchronised",
    [
        ["scatter", "scatter", "everything"],
        ["nothing", "scatter", "everything"],
        ["scatter", "nothing", "everything"],
        ["everything", "scatter", "everything"],
    ],
    ids="-".join,
)
def test_accumulation_ontwo_axes(
    synchronised: list[str], last_only: bool, reduce_dtype: torch.dtype | None
) -> None:
    mesh = two_axes()

    def run(engine: Engine) -> list[Any]:
        dtype = None if reduce_dtype is None else torch.bfloat16
        policy = engine.policy(param_dtype=dtype, reduce_dtype=reduce_dtype)
        model = engine.shard(stack(), mesh=mesh, mp_policy=policy)
        seen = _accumulate(model, synchronised, last_only)
        if dtype is None:
            plain = seeded(Stack)
            for x in PLAIN.batches(4)[:3]:
                loss_of(plain(x)).backward()
            check_close(model, plain)
        return [seen, train(engine, model, engine.batches(1))]

    check_engines_agree(run, exact=True, plain=False)


@ranks(4)
def test_all_reduce_switched_for_one_module_only() -> None:
    mesh = two_axes()

    def run(engine: Engine) -> list[Any]:
        model = engine.shard(stack(), mesh=mesh)
        model.set_requires_all_reduce(False, recurse=False)
        first, second = engine.batches(2)
        loss_of(model(first)).backward()
        kept_back = gradients(model)
        assert kept_back["head.weight"] is None
        assert kept_back["blocks.0.gain"] is not None
        model.set_requires_all_reduce(True)
        loss_of(model(second)).backward()
        return [kept_back, snapshot(model)]

    check_engines_agree(run, exact=True, plain=False)


class Divisible(nn.Sequential):
    """Rows that divide by four, so that every way to cut them agrees."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 4))


@ranks(4)
@pytest.mark.parametrize("num_replicas", [None, 1])
def test_resharding_to_a_smaller_world(num_replicas: int | None) -> None:
    mesh = None if num_replicas is None else two_axes(num_replicas)

    def run(engine: Engine) -> list[Any]:
        model = seeded(Divisible)
        for layer in (model[0], model[2]):
            engine.api.fully_shard(layer, mesh=mesh, reshard_after_forward=2)
        engine.api.fully_shard(model, mesh=mesh)
        seen = []
        for x in engine.batches(2):
            loss = loss_of(model(x))
            seen.append([[copies(p) for p in model.parameters()], model[0].weight.grad])
            assert model[0].weight.placements == (Replicate(), Shard(0))
            assert model[0].weight.device_mesh.shape == (2, 2)
            loss.backward()
            seen.append(snapshot(model))
        return [seen, train(engine, model)]

    check_engines_agree(run, plain=False)


@ranks(4)
def test_resharding_uneven_rows_to_a_smaller_world() -> None:
    def run(engine: Engine) -> list[Any]:
        model = engine.shard(stack(), reshard_after_forward=2)
        loss = loss_of(model(engine.batches(1)[0]))
        registered = [
            (p.placements, p.device_mesh.mesh.tolist(), p.to_local().shape, p.requires_grad)
            for p in model.parameters()
        ]
        loss.backward()
        first = gradients(model)
        model.zero_grad()
        return [registered, first, train_beside_plain(engine, model, Stack)]

    check_engines_agree(run, plain=False)


@ranks(4)
def test_uneven_rows_in_a_smaller_world_are_the_right_ones() -> None:
    # Torch's engine cuts the padded rows, so that its later ranks hold rows of their neighbours.
    model = SHOAL.shard(stack(), reshard_after_forward=2)
    loss = loss_of(model(SHOAL.batches(1)[0]))
    for (name, p), (_, q) in zip(
        seeded(Stack).named_parameters(), model.named_parameters(), strict=True
    ):
        assert torch.equal(q.full_tensor(), p), name
    loss.backward()


@ranks(4)
def test_what_is_registered_between_forward_and_backward() -> None:
    def run(engine: Engine, first: Any, later: bool | None) -> list[Any]:
        model = engine.shard(stack(), reshard_after_forward=first)
        if later is not None:
            model.set_reshard_after_forward(later, recurse=False)
            model.blocks[1].set_reshard_after_forward(later)
        loss = loss_of(model(engine.batches(1)[0]))
        kinds = [(kind_of(p), tuple(p.shape)) for p in model.parameters()]
        for unit in (*model.blocks, model):
            unit.reshard()
        kinds += [(kind_of(p), p.placements) for p in model.parameters()]
        loss.backward()
        return [kinds, snapshot(model)]

    for first, later in itertools.product((None, True, False, 2, 4), (None, True, False)):
        check_engines_agree(run, first, later, plain=False)


@ranks(4)
def test_sizes_that_cannot_be_resharded_to() -> None:
    mesh = two_axes()

    def run(engine: Engine) -> list[Any]:
        errors = [
            error_of(
                lambda s=size: engine.api.fully_shard(nn.Linear(8, 8), reshard_after_forward=s)
            )
            for size in (0, 3, 8, -2, "2", 2.0)
        ]
        layer = nn.Linear(8, 8)
        errors.append(
            error_of(lambda: engine.api.fully_shard(layer, mesh=mesh, reshard_after_forward=4))
        )
        model = engine.shard(stack())
        return [*errors, error_of(lambda: model.set_reshard_after_forward(2))]

    errors = check_engines_agree(run, plain=False)
    assert all(isinstance(error, ValueError) for error in errors)


@ranks(4)
def test_resharding_to_one_rank_keeps_the_parameters() -> None:
    def run(engine: Engine) -> list[Any]:
        model = engine.shard(stack(), reshard_after_forward=1)
        loss = loss_of(model(engine.batches(1)[0]))
        kinds = [(kind_of(p), tuple(p.shape)) for p in model.parameters()]
        loss.backward()
        return [kinds, snapshot(model)]

    check_engines_agree(run, plain=False)


@ranks(4)
@pytest.mark.parametrize("is_hybrid", [False, True])
@pytest.mark.parametrize("layout", [Even(), Flat()], ids=str)
@pytest.mark.parametrize("reshard_after_forward", [True, 2])
def test_state_dicts_are_saved_by_torch(
    is_hybrid: bool, layout: Layout, reshard_after_forward: bool | int
) -> None:
    """Shards know their mesh, and nothing that stands on a mesh keeps it from being pickled."""
    size, names = ((2, 2), ("replicate", "shard")) if is_hybrid else ((4,), ("shard",))
    mesh = init_device_mesh("cpu", size, mesh_dim_names=names)
    after = reshard_after_forward
    if is_hybrid and after == 2:  # of two ranks that share a replica, two are all
        after = 1
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=mesh, layout=layout, reshard_after_forward=after)
    model(torch.ones(2, 8)).sum().backward()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    with load_with_process_group(mesh.get_group("shard")):
        loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    for name, parameter in model.named_parameters():
        assert torch.equal(full(loaded[name]), full(parameter))
