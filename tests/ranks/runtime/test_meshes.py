"""Meshes of one and two axes: torch's engine and ours, bit by bit, and the unsharded model."""

import itertools
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from differential import (
    ENGINES,
    Stack,
    all_batches,
    assert_close_to,
    check_engines_agree,
    error_of,
    facts,
    my_batches,
    needs_mesh_dims,
    seeded,
    sharded_stack,
    square_loss,
    state_of_model,
    train,
)
from harness import ranks

_torch_engine, _our_engine = ENGINES


def _two_axes(num_replicas: int = 2) -> DeviceMesh:
    shape = (num_replicas, dist.get_world_size() // num_replicas)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def _trained(model: nn.Module) -> list[Any]:
    """Train, and find the unsharded model's parameters at the end."""
    result = train(model, my_batches())
    plain = seeded(Stack)
    train(plain, all_batches())
    assert_close_to(plain, model)
    return result


@ranks(2, 4)
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_one_axis_shards(reshard_after_forward: bool | None) -> None:
    def run(fsdp: ModuleType) -> list[Any]:
        return _trained(sharded_stack(fsdp, reshard_after_forward=reshard_after_forward))

    check_engines_agree(run)


@ranks(4)
@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_two_axes_replicate_and_shard(num_replicas: int) -> None:
    mesh = _two_axes(num_replicas)

    def run(fsdp: ModuleType) -> list[Any]:
        model = sharded_stack(fsdp, mesh=mesh)
        assert model.head.weight.placements == (Replicate(), Shard(0))
        return _trained(model)

    check_engines_agree(run, exact=num_replicas == 2)


@ranks(4)
def test_two_axes_in_mixed_precision() -> None:
    mesh = _two_axes()

    def run(fsdp: ModuleType) -> list[Any]:
        policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return train(sharded_stack(fsdp, mesh=mesh, mp_policy=policy), my_batches())

    check_engines_agree(run, exact=True)


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

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(DTensor.from_local(x, mesh, [Shard(0)])).to_local().pow(2).mean()

    def run(fsdp: ModuleType) -> list[Any]:
        dims = fsdp.DataParallelMeshDims(replicate="data")
        model = _replicated_stack(mesh)
        for unit in (*model.blocks, model):
            fsdp.fully_shard(unit, mesh=mesh, dp_mesh_dims=dims)
        result = train(model, my_batches(), loss_of=loss_of)
        plain = seeded(Stack)
        train(plain, all_batches())
        assert_close_to(plain, model)
        return result

    check_engines_agree(run)


def _accumulate(model: Any, synchronised: list[str], last_only: bool) -> list[Any]:
    """A backward for each word: what is done with its gradients, and which are there after."""
    seen = []
    for number, (word, x) in enumerate(zip(synchronised, my_batches(4), strict=False), 1):
        model.set_requires_gradient_sync(word != "nothing")
        model.set_requires_all_reduce(word == "everything")
        if last_only:
            model.set_is_last_backward(number == len(synchronised))
        square_loss(model, x).backward()
        seen.append(state_of_model(model)["gradients"])
    return seen


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
def test_accumulation_on_two_axes(
    synchronised: list[str], last_only: bool, reduce_dtype: torch.dtype | None
) -> None:
    mesh = _two_axes()

    def run(fsdp: ModuleType) -> list[Any]:
        dtype = None if reduce_dtype is None else torch.bfloat16
        policy = fsdp.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype)
        model = sharded_stack(fsdp, mesh=mesh, mp_policy=policy)
        seen = _accumulate(model, synchronised, last_only)
        if dtype is None:
            plain = seeded(Stack)
            for x in all_batches(4)[:3]:
                square_loss(plain, x).backward()
            assert_close_to(plain, model)
        return [seen, train(model, my_batches(1))]

    check_engines_agree(run, exact=True)


@ranks(4)
def test_all_reduce_switched_for_one_module_only() -> None:
    mesh = _two_axes()

    def run(fsdp: ModuleType) -> list[Any]:
        model = sharded_stack(fsdp, mesh=mesh)
        model.set_requires_all_reduce(False, recurse=False)
        first, second = my_batches(2)
        square_loss(model, first).backward()
        kept_back = state_of_model(model)["gradients"]
        assert kept_back["head.weight"] is None
        assert kept_back["blocks.0.gain"] is not None
        model.set_requires_all_reduce(True)
        square_loss(model, second).backward()
        return [kept_back, state_of_model(model)]

    check_engines_agree(run, exact=True)


def _divided(fsdp: ModuleType, factor: float, sum_only: bool, **options: Any) -> dict[str, Any]:
    model = sharded_stack(fsdp, **options)
    for unit in (*model.blocks, model):
        unit.set_gradient_divide_factor(factor)
        unit.set_force_sum_reduction_for_comms(sum_only)
    square_loss(model, my_batches(1)[0]).backward()
    return state_of_model(model)


@ranks(2, 4)
@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_divide_factors(reduce_dtype: torch.dtype, world_size: int) -> None:
    # Two by two where there are four: few bits show the order of longer sums.
    mesh = _two_axes() if world_size == 4 else None

    def run(fsdp: ModuleType) -> list[Any]:
        policy = fsdp.MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        options = {"mesh": mesh, "mp_policy": policy}
        # Gloo has no reduction that multiplies first, which torch would take for other cases.
        choices = [(1.0, True), (3.0, True), (4.0, True)]
        if mesh is None and reduce_dtype is not torch.float16:
            choices.append((world_size, False))
        return [_divided(fsdp, factor, sum_only, **options) for factor, sum_only in choices]

    check_engines_agree(run, exact=True)


@ranks(2)
def test_a_divide_factor_where_the_group_cannot_multiply_first() -> None:
    # Gloo cannot, and torch's engine asks it to; ours must give what a plain sum gives.
    assert isinstance(error_of(lambda: _divided(_torch_engine, 3.0, False)), RuntimeError)
    expected = _divided(_torch_engine, 3.0, True)["gradients"]
    got = _divided(_our_engine, 3.0, False)["gradients"]
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name]["local"], gradient["local"])


@ranks(2)
def test_the_old_name_of_the_divide_factor_warns() -> None:
    def run(fsdp: ModuleType) -> list[Any]:
        model = sharded_stack(fsdp)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.set_reduce_scatter_divide_factor(2.0)
        square_loss(model, my_batches(1)[0]).backward()
        return [[warning.category for warning in caught], state_of_model(model)]

    check_engines_agree(run)


@ranks(4)
@pytest.mark.parametrize("num_replicas", [None, 2])
def test_all_reduce_hooks(num_replicas: int | None) -> None:
    mesh = None if num_replicas is None else _two_axes(num_replicas)

    def run(fsdp: ModuleType) -> list[Any]:
        model = sharded_stack(fsdp, mesh=mesh)
        seen = []

        def double(reduced: torch.Tensor) -> None:
            seen.append((type(reduced), reduced.dtype, reduced.ndim))
            reduced.mul_(2)

        model.blocks[0].set_all_reduce_hook(double)
        model.set_all_reduce_hook(double)
        return [train(model, my_batches(2)), seen]

    check_engines_agree(run, exact=mesh is not None)


@ranks(4)
def test_a_hook_that_replicates_equals_a_second_axis() -> None:
    mesh = _two_axes()

    def run(fsdp: ModuleType) -> list[Any]:
        model = sharded_stack(fsdp, mesh=mesh["shard"])
        for unit in (*model.blocks, model):
            unit.set_all_reduce_hook(
                lambda reduced: dist.all_reduce(
                    reduced, group=mesh["replicate"].get_group(), op=dist.ReduceOp.AVG
                )
            )
        return [train(model, my_batches()), _trained_alike(model, sharded_stack(fsdp, mesh=mesh))]

    check_engines_agree(run, exact=True)


def _trained_alike(model: nn.Module, other: nn.Module) -> None:
    train(other, my_batches())
    for (name, p), (_, q) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(p.to_local(), q.to_local()), name


@ranks(4)
def test_a_stream_for_the_hook_is_refused_on_two_axes() -> None:
    mesh = _two_axes()

    def run(fsdp: ModuleType) -> list[Any]:
        model = sharded_stack(fsdp, mesh=mesh)
        return [error_of(lambda: model.set_all_reduce_hook(print, stream=object()))]

    (error,) = check_engines_agree(run)
    assert isinstance(error, ValueError)


class Divisible(nn.Sequential):
    """Rows that divide by four, so that every way to cut them agrees."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 4))


@ranks(4)
@pytest.mark.parametrize("num_replicas", [None, 1])
def test_resharding_to_a_smaller_world(num_replicas: int | None) -> None:
    mesh = None if num_replicas is None else _two_axes(num_replicas)

    def run(fsdp: ModuleType) -> list[Any]:
        model = seeded(Divisible)
        for layer in (model[0], model[2]):
            fsdp.fully_shard(layer, mesh=mesh, reshard_after_forward=2)
        fsdp.fully_shard(model, mesh=mesh)
        seen = []
        for x in my_batches(2):
            loss = square_loss(model, x)
            seen.append([[facts(p) for p in model.parameters()], model[0].weight.grad])
            assert model[0].weight.placements == (Replicate(), Shard(0))
            assert model[0].weight.device_mesh.shape == (2, 2)
            loss.backward()
            seen.append(state_of_model(model))
        return [seen, train(model, my_batches())]

    check_engines_agree(run)


@ranks(4)
def test_resharding_uneven_rows_to_a_smaller_world() -> None:
    def run(fsdp: ModuleType) -> list[Any]:
        model = sharded_stack(fsdp, reshard_after_forward=2)
        loss = square_loss(model, my_batches(1)[0])
        registered = [
            (p.placements, p.device_mesh.mesh.tolist(), p.to_local().shape, p.requires_grad)
            for p in model.parameters()
        ]
        loss.backward()
        gradients = state_of_model(model)["gradients"]
        model.zero_grad()
        return [registered, gradients, _trained(model)]

    check_engines_agree(run)


@ranks(4)
def test_uneven_rows_in_a_smaller_world_are_the_right_ones() -> None:
    # Torch's engine cuts the padded rows, so that its later ranks hold rows of their neighbours.
    model = sharded_stack(_our_engine, reshard_after_forward=2)
    loss = square_loss(model, my_batches(1)[0])
    for (name, p), (_, q) in zip(
        seeded(Stack).named_parameters(), model.named_parameters(), strict=True
    ):
        assert torch.equal(q.full_tensor(), p), name
    loss.backward()


@ranks(4)
def test_what_is_registered_between_forward_and_backward() -> None:
    def run(fsdp: ModuleType, first: Any, later: bool | None) -> list[Any]:
        model = sharded_stack(fsdp, reshard_after_forward=first)
        if later is not None:
            model.set_reshard_after_forward(later, recurse=False)
            model.blocks[1].set_reshard_after_forward(later)
        loss = square_loss(model, my_batches(1)[0])
        kinds = [(type(p).__name__, tuple(p.shape)) for p in model.parameters()]
        for unit in (*model.blocks, model):
            unit.reshard()
        kinds += [(type(p).__name__, p.placements) for p in model.parameters()]
        loss.backward()
        return [kinds, state_of_model(model)]

    for first, later in itertools.product((None, True, False, 2, 4), (None, True, False)):
        check_engines_agree(run, first, later)


@ranks(4)
def test_sizes_that_cannot_be_resharded_to() -> None:
    mesh = _two_axes()

    def run(fsdp: ModuleType) -> list[Any]:
        errors = [
            error_of(lambda s=size: fsdp.fully_shard(nn.Linear(8, 8), reshard_after_forward=s))
            for size in (0, 3, 8, -2, "2", 2.0)
        ]
        layer = nn.Linear(8, 8)
        errors.append(error_of(lambda: fsdp.fully_shard(layer, mesh=mesh, reshard_after_forward=4)))
        model = sharded_stack(fsdp)
        return [*errors, error_of(lambda: model.set_reshard_after_forward(2))]

    errors = check_engines_agree(run)
    assert all(isinstance(error, ValueError) for error in errors)


@ranks(4)
def test_resharding_to_one_rank_keeps_the_parameters() -> None:
    def run(fsdp: ModuleType) -> list[Any]:
        model = sharded_stack(fsdp, reshard_after_forward=1)
        loss = square_loss(model, my_batches(1)[0])
        kinds = [(type(p).__name__, tuple(p.shape)) for p in model.parameters()]
        loss.backward()
        return [kinds, state_of_model(model)]

    check_engines_agree(run)
