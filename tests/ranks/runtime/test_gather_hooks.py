"""Gather hooks in the situations of training: what full parameters consist of, what is refused."""

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._pytree import tree_map_only

from collectives import LoggedGather
from differential import (
    DIM,
    PLAIN,
    SHOAL,
    Engine,
    check_close,
    check_engines_agree,
    check_same,
    error_of,
    loss_of,
    seeded,
    snapshot,
    train,
)
from harness import ranks
from oracle import full
from shoal._torch.storage import can_swap_memory
from shoal.errors import InvariantError, RankError, UsageError
from shoal.layout import Flat
from shoal.runtime.full_parameters import full_parameters
from shoal.runtime.module_state import state_of
from wrapped import KEPT, Plainly, Wrapped

_aten = torch.ops.aten


class Halved(Wrapped):
    """What a full parameter can be: a tensor of few bits that computes in many."""

    shown_as = torch.float32

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (_aten.detach.default, _aten.as_strided.default):
            return cls(func(args[0].whole, *args[1:]))
        args, kwargs = tree_map_only(Halved, lambda t: t.whole.float(), (args, kwargs or {}))
        return func(*args, **kwargs)


class Narrowly(Wrapped):
    """Travels as bfloat16 and stays so: as libraries of float8 tensors do it."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.whole.bfloat16(),), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        (output,) = outputs
        return None if out is not None else (Halved(output), (output,))


def _layers(kind: Callable[[torch.Tensor], torch.Tensor], *, bias: bool = True) -> Any:
    """Weights of a class of their own, biases that have none."""
    model = nn.Sequential(nn.Linear(DIM, 12, bias=bias), nn.Tanh(), nn.Linear(12, 4, bias=bias))
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(kind(layer.weight.detach()))
    return model


def _sharded(engine: Engine, kind: Any, *, bias: bool = True, **options: Any) -> Any:
    model = seeded(lambda: _layers(kind, bias=bias))
    for layer in (model[0], model[2]):
        engine.api.fully_shard(layer, **options)
    return engine.api.fully_shard(model, **options)


@ranks(2)
@pytest.mark.parametrize("kind", [Plainly, Narrowly])
@pytest.mark.parametrize("bias", [True, False])
def test_a_full_parameter_made_of_what_was_gathered(kind: type[Wrapped], bias: bool) -> None:
    def run(engine: Engine) -> list[Any]:
        return train(engine, _sharded(engine, kind, bias=bias))

    check_engines_agree(run, plain=False)


@ranks(2)
def test_hooks_that_change_nothing() -> None:
    plain = _sharded(SHOAL, lambda weight: weight)
    model = _sharded(SHOAL, Plainly)
    for x in SHOAL.batches():
        for one in (plain, model):
            one.zero_grad()
            loss_of(one(x)).backward()
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(full(p.grad), full(q.grad))


@ranks(2)
def test_frozen_tied_and_accumulated() -> None:
    def run(engine: Engine) -> list[Any]:
        model = seeded(lambda: _layers(Plainly))
        model.append(nn.Linear(4, 12)).append(nn.Linear(12, 4))
        model[4].weight = model[2].weight
        model[0].weight.requires_grad_(False)
        engine.api.fully_shard(model[0])
        engine.api.fully_shard(model)
        first, *rest = engine.batches()
        model.set_requires_gradient_sync(False)
        loss_of(model(first)).backward()
        model.set_requires_gradient_sync(True)
        steps = train(engine, model, rest)
        model[0].weight.requires_grad_(True)
        return [steps, train(engine, model, rest), model[4].weight is model[2].weight]

    check_engines_agree(run, plain=False)


@ranks(2)
def test_shards_on_the_cpu() -> None:
    def run(engine: Engine) -> list[Any]:
        policy = engine.api.CPUOffloadPolicy(pin_memory=False)
        return train(engine, _sharded(engine, Narrowly, offload_policy=policy))

    check_engines_agree(run, plain=False)


@ranks(4)
def test_hooks_beside_tensor_parallelism() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def run(engine: Engine) -> list[Any]:
        model = seeded(lambda: nn.Linear(DIM, 12, bias=False))
        weight = distribute_tensor(model.weight.detach(), mesh["tensor"], [Shard(0)])
        local = Plainly(weight.to_local())
        weight = DTensor.from_local(local, mesh["tensor"], [Shard(0)], run_check=False)
        model.weight = nn.Parameter(weight)
        engine.api.fully_shard(model, mesh=mesh["data"])
        x = DTensor.from_local(engine.batches(1)[0], mesh["tensor"], run_check=False)
        model(x).to_local().pow(2).sum().backward()
        return [snapshot(model)]

    check_engines_agree(run, exact=True, plain=False)


@ranks(2)
def test_inference_first() -> None:
    """Torch's engine fails then: what the first gather makes would belong to inference."""

    def run(*, infers: bool) -> list[Any]:
        model = _sharded(SHOAL, Narrowly)
        if infers:
            with torch.inference_mode():
                loss_of(model(SHOAL.batches(1)[0]))
        return train(SHOAL, model)

    check_same(run(infers=True), run(infers=False), exact=True, where="inference first")


@ranks(2)
def test_state_dicts() -> None:
    def run(engine: Engine) -> list[Any]:
        model, other = _sharded(engine, Plainly), _sharded(engine, Plainly)
        train(engine, other)
        loss_of(model(engine.batches(1)[0]))
        model.load_state_dict(other.state_dict())
        losses = [loss_of(model(x)) for x in engine.batches()]
        assert all(map(torch.equal, losses, [loss_of(other(x)) for x in engine.batches()]))
        model.load_state_dict(_sharded(engine, Plainly).state_dict(), assign=True)
        return [losses, train(engine, model)]

    check_engines_agree(run, plain=False)


@ranks(2)
def test_module_to_another_dtype() -> None:
    def run(engine: Engine) -> list[Any]:
        model = _sharded(engine, Narrowly).to(torch.float64)
        assert type(model[0].weight._local_tensor) is Narrowly
        return [snapshot(model)]

    check_engines_agree(run, plain=False)
    model = _sharded(SHOAL, Plainly)
    loss_of(model(SHOAL.batches(1)[0])).backward()
    model.zero_grad()
    model.to(torch.float64)
    plain = seeded(lambda: _layers(lambda weight: weight)).to(torch.float64)
    x = SHOAL.batches(1)[0].double()
    assert torch.equal(model(x), plain(x))


@ranks(2)
def test_shards_that_lose_their_hooks_are_plain_again() -> None:
    def give(shard: torch.Tensor) -> None:
        shard.fsdp_pre_all_gather = types.MethodType(lambda self, mesh: ((self * 2,), None), shard)
        shard.fsdp_post_all_gather = types.MethodType(
            lambda self, outputs, *_, out=None: (outputs[0], outputs), shard
        )

    model = seeded(lambda: nn.Linear(DIM, 4, bias=False))
    plain = seeded(lambda: nn.Linear(DIM, 4, bias=False))
    SHOAL.api.fully_shard(model)
    give(model.weight._local_tensor)
    shard = model.weight._local_tensor
    shared = shard.data_ptr()
    x = SHOAL.batches(1)[0]
    assert torch.equal(model(x), 2 * plain(x))
    # Memory of its own: with a part of the unit's buffer it would keep all of that alive.
    assert shard.data_ptr() != shared
    model.to(torch.float64)
    assert torch.equal(model(x.double()), plain.double()(x.double()))


class Noting(Plainly):
    """Makes a full parameter of its own, and notes all that has memory for it."""

    noted: list[torch.Tensor]

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        (output,) = outputs
        if out is None:
            weight = output.clone()
            Noting.noted = [output, weight]
            return weight, (weight,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(output)
        return None


@ranks(2)
def test_memory_is_given_back_and_comes_back() -> None:
    model = seeded(lambda: nn.Linear(DIM, 4, bias=False))
    weight = model.weight.detach()
    model.weight = nn.Parameter(Noting(weight))
    SHOAL.api.fully_shard(model)
    for _ in range(2):
        model.unshard()
        pointers = [noted.data_ptr() for noted in Noting.noted]
        assert torch.equal(model.weight, weight)
        assert all(torch.equal(noted, weight) for noted in Noting.noted)
        model.reshard()
        for noted, pointer in zip(Noting.noted, pointers, strict=True):
            assert noted.untyped_storage().nbytes() == 0 or noted.data_ptr() != pointer


@ranks(2)
def test_what_was_gathered_is_freed_once() -> None:
    """Though the hook names it as its own."""
    model = nn.Linear(DIM, 4, bias=False)
    model.weight = nn.Parameter(Plainly(model.weight.detach()))
    SHOAL.api.fully_shard(model)
    for _ in range(2):
        model.unshard()
        model.reshard()
        model.unshard(async_op=True)
        model.reshard()
    state = state_of(model)
    assert state is not None
    # What was sent, and twice what was received: from all ranks, and beside each other.
    kept = (64 + 128 + 128) if can_swap_memory() else 0
    assert state.units[0].arena.num_bytes == kept


@ranks(2)
def test_reading_between_forward_and_backward() -> None:
    kept: list[torch.Tensor] = []

    class Noted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept.append(self.weight)
            return super().forward(x)

    model = seeded(lambda: nn.Sequential(Noted(DIM, 12), nn.Linear(12, 4)))
    model[0].weight = nn.Parameter(Plainly(model[0].weight.detach()))
    SHOAL.api.fully_shard(model[0])
    SHOAL.api.fully_shard(model)
    loss = loss_of(model(SHOAL.batches(1)[0]))
    with pytest.raises(InvariantError, match="parameter 'weight' of unit '0' was read"):
        kept[0] + 1
    loss.backward()
    loss_of(model(SHOAL.batches(1)[0]))
    assert kept[0] is kept[1]

    class Keeper(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.loss = super().forward(x).sum()
            return super().forward(x)

    keeper = nn.Sequential(Keeper(DIM, 12, bias=False), nn.Linear(12, 4))
    keeper[0].weight = nn.Parameter(Plainly(keeper[0].weight.detach()))
    SHOAL.api.fully_shard(keeper[0])
    SHOAL.api.fully_shard(keeper)
    for dtype in (torch.float32, torch.float64):
        keeper.to(dtype)
        keeper(SHOAL.batches(1)[0].to(dtype))
        with pytest.raises(InvariantError, match="it has read no weights"):
            keeper[0].loss.backward()

    class Leaky(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight.view(-1)

    leaky = Leaky(DIM, 12)
    leaky.weight = nn.Parameter(Plainly(leaky.weight.detach()))
    SHOAL.api.fully_shard(leaky)
    assert isinstance(error_of(lambda: leaky(SHOAL.batches(1)[0])), InvariantError)


@ranks(2)
def test_own_all_gather() -> None:
    x = SHOAL.batches(1)[0]
    # What has hooks, and what has none, are gathered apart.
    for bias, num_gathers in ((True, 2), (False, 1)):
        expected, model = (_sharded(SHOAL, Plainly, bias=bias) for _ in range(2))
        log: list[str] = []
        model[0].set_custom_all_gather(LoggedGather("0", log))
        assert torch.equal(model(x), expected(x))
        assert log == ["gather 0"] * num_gathers


class Forgetful(Plainly):
    """A class that its own shards do not have."""

    kept = KEPT - {_aten.new_zeros.default, _aten.slice.Tensor}


class Sometimes(Wrapped):
    """Sends what it is told to send."""

    send: Any = staticmethod(lambda whole: whole)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        return (type(self).send(self.whole),), None

    fsdp_post_all_gather = Plainly.fsdp_post_all_gather


@ranks(2)
def test_combinations_that_are_refused() -> None:
    engine, x = SHOAL, SHOAL.batches(1)[0]

    def write_back() -> None:
        with full_parameters(_sharded(engine, Plainly), writeback=True):
            pass

    assert isinstance(error_of(write_back), NotImplementedError)
    assert isinstance(error_of(lambda: _sharded(engine, Forgetful)), UsageError)
    early = nn.Linear(DIM, 4)
    early.weight.fsdp_pre_all_gather = early.weight.fsdp_post_all_gather = lambda mesh: None
    assert isinstance(error_of(lambda: engine.api.fully_shard(early)), NotImplementedError)
    with full_parameters(model := _sharded(engine, Plainly)):
        assert torch.equal(model[0].weight, seeded(lambda: _layers(lambda w: w))[0].weight)
    assert torch.equal(model(x), seeded(lambda: _layers(lambda w: w))(x))


@ranks(4)
@pytest.mark.parametrize("layout", [None, Flat()], ids=repr)
def test_a_smaller_group_after_forward(layout: Flat | None) -> None:
    """The hooks gather again what they gathered for forward; the rest comes from fewer ranks."""
    plain = seeded(lambda: _layers(lambda weight: weight))
    model = _sharded(SHOAL, Plainly, reshard_after_forward=2, layout=layout)
    train(SHOAL, model)
    train(PLAIN, plain)
    check_close(model, plain)


@ranks(2)
@torch.no_grad()
def test_hooks_that_send_the_wrong_thing() -> None:
    x = SHOAL.batches(1)[0]

    def error_if(send: Callable[[torch.Tensor], torch.Tensor], num_rows: int = 4) -> Any:
        model = nn.Linear(DIM, num_rows)
        model.weight = nn.Parameter(Sometimes(model.weight.detach()))
        SHOAL.api.fully_shard(model)
        Sometimes.send = staticmethod(send)
        return error_of(lambda: model(x))

    # Every rank raises: with one that goes on, the others would wait for ever.
    uneven = error_if(lambda whole: whole, num_rows=3)
    assert isinstance(uneven, AssertionError)
    assert "padded size (2, 8)" in str(uneven)
    assert isinstance(error_if(lambda whole: whole[dist.get_rank() :]), RankError)
    model = nn.Linear(DIM, 4)
    model.weight = nn.Parameter(Sometimes(model.weight.detach()))
    SHOAL.api.fully_shard(model)
    Sometimes.send = staticmethod(lambda whole: whole)
    output = model(x)
    for send, error in ((lambda _: 1 / 0, ZeroDivisionError), (lambda w: w[:1], InvariantError)):
        Sometimes.send = staticmethod(send)
        assert isinstance(error_of(lambda: model(x)), error)
    Sometimes.send = staticmethod(lambda whole: whole)
    assert torch.equal(model(x), output)


@ranks(2)
def test_one_rank_alone() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))

    def run(engine: Engine) -> list[Any]:
        return train(engine, _sharded(engine, Narrowly, mesh=mesh))

    check_engines_agree(run, plain=False)
