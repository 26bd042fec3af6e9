"""Bad input: an error on every rank, of torch's type where torch has one, and no hang."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_by_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from differential import (
    DIM,
    PLAIN,
    SHOAL,
    TORCH,
    Engine,
    Stack,
    check_close,
    check_engines_agree,
    error_of,
    loss_of,
    seeded,
    stack,
    train,
)
from harness import ranks
from shoal.errors import InvariantError, ShoalError, UsageError


def _layer() -> nn.Linear:
    return nn.Linear(DIM, 8)


def _first_error(*calls: Callable[[], Any]) -> BaseException | None:
    """What the first call that fails raises: some mistakes may be found early or late."""
    return next((error for error in map(error_of, calls) if error is not None), None)


def _with(name: str, parameter: torch.Tensor) -> nn.Linear:
    layer = _layer()
    setattr(layer, name, nn.Parameter(parameter))
    return layer


@ranks(4)
def test_meshes_that_cannot_be_used() -> None:
    three = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("a", "b", "c"))
    nameless = init_device_mesh("cpu", (2, 2))

    def run(engine: Engine) -> list[Any]:
        return [
            error_of(lambda m=m: engine.api.fully_shard(_layer(), mesh=m))
            for m in (three, nameless)
        ]

    errors = check_engines_agree(run, plain=False)
    assert [type(error) for error in errors] == [ValueError, AssertionError]


@ranks(2)
def test_a_mesh_of_another_device() -> None:
    if torch.cuda.is_available():
        pytest.skip("torch moves the parameters to a device that is there")
    mesh = DeviceMesh("cuda", [0, 1], _init_backend=False)
    with pytest.raises(UsageError, match="cuda"):
        SHOAL.api.fully_shard(_layer(), mesh=mesh)
    assert all(not isinstance(p, DTensor) for p in _layer().parameters())


@ranks(2)
def test_modules_and_parameters_that_cannot_be_sharded() -> None:
    def run(engine: Engine) -> list[Any]:
        twice = engine.api.fully_shard(_layer())
        return [
            error_of(lambda: engine.api.fully_shard(nn.ModuleList([_layer()]))),
            error_of(lambda: engine.api.fully_shard(nn.ModuleDict({"layer": _layer()}))),
            error_of(lambda: engine.api.fully_shard(twice)),
        ]

    errors = check_engines_agree(run, plain=False)
    expected = [ValueError] * 2 + [AssertionError]
    assert [type(error) for error in errors] == expected


@ranks(2)
def test_a_refused_module_is_left_as_it_was() -> None:
    layer = _with("weight", torch.ones(8, 1).expand(8, DIM))
    with pytest.raises(UsageError, match="'weight'"):
        SHOAL.api.fully_shard(layer)
    assert type(layer) is nn.Linear
    layer(SHOAL.batches(1)[0]).sum().backward()
    assert all(not isinstance(p, DTensor) for p in layer.parameters())
    layer.weight = nn.Parameter(layer.weight.detach().contiguous())
    model = SHOAL.api.fully_shard(layer)
    model(SHOAL.batches(1)[0]).sum().backward()


@ranks(2)
def test_a_container_that_has_a_forward_is_fine() -> None:
    class Running(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self:
                x = layer(x)
            return x

    def make() -> Running:
        return Running([_layer(), nn.Linear(8, 3)])

    def run(engine: Engine) -> list[Any]:
        model = engine.api.fully_shard(seeded(make))
        result = train(engine, model)
        plain = seeded(make)
        train(PLAIN, plain)
        check_close(model, plain)
        return result

    check_engines_agree(run, plain=False)


@ranks(2)
@pytest.mark.parametrize("materialised", [[], ["blocks.0"]], ids=["none", "some"])
def test_meta_parameters_at_the_first_forward(materialised: list[str]) -> None:
    def run(engine: Engine) -> list[Any]:
        with torch.device("meta"):
            model = Stack()
        for block in model.blocks:
            engine.api.fully_shard(block)
        engine.api.fully_shard(model)
        for name in materialised:
            model.get_submodule(name).to_empty(device="cpu")
        error = error_of(lambda: model(engine.batches(1)[0]))
        on_meta = {name: p.is_meta for name, p in model.named_parameters()}
        named = [on_meta[name] for name in on_meta if f"'{name}'" in str(error)]
        assert named
        assert all(named)
        assert "to_empty" in str(error)
        return [error]

    (error,) = check_engines_agree(run, plain=False)
    assert isinstance(error, RuntimeError)


@ranks(2)
def test_meta_parameters_at_an_explicit_gather() -> None:
    def run(engine: Engine) -> list[Any]:
        with torch.device("meta"):
            layer = _layer()
        engine.api.fully_shard(layer)
        return [error_of(layer.unshard)]

    (error,) = check_engines_agree(run, plain=False)
    assert isinstance(error, RuntimeError)


@ranks(2)
@pytest.mark.parametrize("units", ["all", "one_block"])
@pytest.mark.parametrize("kind", ["adamw", "foreach", "groups"])
def test_an_optimizer_from_before_sharding(units: str, kind: str) -> None:
    model = seeded(Stack)
    parameters = list(model.parameters())
    if kind == "adamw":
        optimizer = torch.optim.AdamW(parameters)
    elif kind == "foreach":
        optimizer = torch.optim.SGD(parameters, lr=0.1, foreach=True)
    else:
        optimizer = torch.optim.AdamW([{"params": [p], "lr": 0.1} for p in parameters])
    for unit in (*model.blocks, model) if units == "all" else (model.blocks[0],):
        SHOAL.api.fully_shard(unit)
    loss_of(model(SHOAL.batches(1)[0])).backward()
    with pytest.raises(InvariantError, match="after fully_shard"):
        optimizer.step()


@ranks(2)
def test_an_optimizer_of_other_parameters_is_left_in_peace() -> None:
    model = seeded(Stack)
    ignored = set(model.blocks[0].parameters())
    early = torch.optim.SGD(ignored, lr=0.1)
    SHOAL.api.fully_shard(model, ignored_params=ignored)
    late = torch.optim.SGD([p for p in model.parameters() if isinstance(p, DTensor)], lr=0.1)
    loss_of(model(SHOAL.batches(1)[0])).backward()
    before = model.blocks[0].gain.detach().clone()
    early.step()
    late.step()
    assert not torch.equal(model.blocks[0].gain, before)


def _differing(what: str) -> nn.Module:
    """A model that is not the same on every rank."""
    rank = dist.get_rank()
    model = seeded(Stack)
    if what == "shape":
        model.blocks[1].up = nn.Linear(DIM, 13 + rank)
        model.blocks[1].down = nn.Linear(13 + rank, DIM)
    elif what == "transposed":
        # The same number of elements: gathered together, the bytes would fit.
        shape = (6, 4) if rank == 0 else (4, 6)
        model.blocks[1].extra = nn.Parameter(torch.ones(shape))
    elif what == "dtype":
        # Half as many numbers of twice the size on the others.
        size, dtype = (8, torch.float32) if rank == 0 else (4, torch.float64)
        model.blocks[1].extra = nn.Parameter(torch.ones(size, dtype=dtype), requires_grad=False)
    else:
        setattr(model.blocks[1], f"extra{rank}", nn.Parameter(torch.ones(4)))
    return model


@ranks(2, 4, timeout_s=20)
@pytest.mark.parametrize("what", ["shape", "transposed", "dtype", "name"])
def test_ranks_with_different_parameters(what: str) -> None:
    model = _differing(what)

    def shard() -> None:
        for unit in (*model.blocks, model):
            SHOAL.api.fully_shard(unit)

    error = _first_error(shard, lambda: loss_of(model(SHOAL.batches(1)[0])).backward())
    assert isinstance(error, ShoalError), error
    assert "rank" in str(error)
    assert ("up.weight" if what == "shape" else "extra") in str(error)


def _shard_after_replicate(engine: Engine, apply: Callable[..., Any]) -> BaseException | None:
    layer = _layer()
    apply(layer)
    x = engine.batches(1)[0]
    return _first_error(lambda: engine.api.fully_shard(layer), lambda: layer(x).sum().backward())


@ranks(2)
def test_replicate_on_a_sharded_module() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))

    def run(engine: Engine) -> list[Any]:
        return [
            error_of(lambda: replicate(engine.shard(stack()))),
            error_of(lambda: replicate_by_fsdp(engine.shard(stack()), mesh=mesh)),
        ]

    errors = check_engines_agree(run, plain=False)
    assert [type(error) for error in errors] == [RuntimeError] * 2


@ranks(2)
def test_a_replicated_module_is_not_sharded() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))

    for engine in (TORCH, SHOAL):
        for apply in (replicate, lambda layer: replicate_by_fsdp(layer, mesh=mesh)):
            # Torch finds the one at construction and the other, by another error, in forward.
            error = _shard_after_replicate(engine, apply)
            assert isinstance(error, (RuntimeError, AssertionError)), error


@ranks(2)
def test_a_replicated_module_inside_a_sharded_one_keeps_its_parameters() -> None:
    def make() -> nn.Module:
        return nn.Sequential(_layer(), nn.ReLU(), nn.Linear(8, 5))

    def run(engine: Engine) -> list[Any]:
        model = seeded(make)
        replicate(model[0])
        engine.api.fully_shard(model)
        assert [isinstance(p, DTensor) for p in model.parameters()] == [False] * 2 + [True] * 2
        result = train(engine, model)
        plain = seeded(make)
        train(PLAIN, plain)
        check_close(model, plain)
        return result

    check_engines_agree(run, plain=False)


def _misuses(engine: Engine) -> dict[str, Callable[[], Any]]:
    """Mistakes, by words that people search for and tests match."""
    fully_shard = engine.api.fully_shard
    named = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    on_meta = nn.Sequential(nn.Linear(DIM, DIM, device="meta"))
    fully_shard(on_meta[0])
    fully_shard(on_meta)
    sharded = fully_shard(_layer())
    dims = getattr(engine.api, "DataParallelMeshDims", None)
    misuses: dict[str, Callable[[], Any]] = {
        "applied to a module once": lambda: fully_shard(sharded),
        "does not support deepcopy": lambda: copy.deepcopy(sharded),
        "Shard dim 2 is invalid for 2D tensor": lambda: fully_shard(
            nn.Linear(DIM, 8, bias=False), shard_placement_fn=lambda _: Shard(2)
        ),
        "still on meta device: ['0.weight', '0.bias']": lambda: on_meta(torch.ones(2, DIM)),
    }
    if dims is not None:
        misuses["not found in mesh.mesh_dim_names"] = lambda: fully_shard(
            _layer(), mesh=named, dp_mesh_dims=dims(shard="nowhere")
        )
    return misuses


@ranks(2)
@pytest.mark.parametrize("engine", [TORCH, SHOAL], ids=lambda engine: engine.name)
def test_refusals_have_words_that_are_known(engine: Engine) -> None:
    for words, call in _misuses(engine).items():
        error = error_of(call)
        assert error is not None, words
        assert words in str(error)
