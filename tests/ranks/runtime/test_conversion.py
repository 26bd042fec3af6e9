"""What happens to sharded modules: materialised, converted, changed, copied, saved."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from differential import (
    DIM,
    Engine,
    Stack,
    check_engines_agree,
    check_same,
    copies,
    error_of,
    loss_of,
    seeded,
    snapshot,
    stack,
    train,
    train_beside_plain,
)
from harness import ranks
from oracle import full


class Filled(nn.Linear):
    """Initialised by rule, so that every way to build it gives the same weights."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters(recurse=False):
                nn.init.constant_(parameter, 0.1)
                parameter.mul_(parameter.ndim)


class Scaled(nn.Module):
    """A parameter outside of any layer, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Filled(DIM, 5)
        self.scale = nn.Parameter(torch.empty(3))
        self.register_buffer("offset", torch.empty(5))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        nn.init.constant_(self.offset, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale.sum() + self.offset


def _two_scaled() -> nn.Sequential:
    return nn.Sequential(Scaled(), Filled(5, DIM), Scaled())


def _on_meta(engine: Engine, make: Callable[[], nn.Module] = _two_scaled) -> Any:
    with torch.device("meta"):
        model = make()
    for layer in model:
        engine.api.fully_shard(layer)
    return engine.api.fully_shard(model)


@ranks(2, 4)
@pytest.mark.parametrize("when", ["before", "after"])
def test_meta_parameters_materialised_by_rule(when: str) -> None:
    def run(engine: Engine) -> list[Any]:
        if when == "before":
            with torch.device("meta"):
                model = _two_scaled()
            model.to_empty(device="cpu")
            engine.api.fully_shard(model[0])
            engine.api.fully_shard(model)
        else:
            model = _on_meta(engine)
            kinds = [(p.device.type, p.placements, p.to_local().shape) for p in model.parameters()]
            assert {kind[0] for kind in kinds} == {"meta"}
            model.to_empty(device="cpu")
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        return train_beside_plain(engine, model, _two_scaled)

    check_engines_agree(run, plain=False)


@pytest.mark.filterwarnings("ignore:DTensor random operators")
@ranks(2)
def test_meta_parameters_materialised_at_random() -> None:
    def run(engine: Engine) -> list[Any]:
        model = _on_meta(engine, lambda: nn.Sequential(nn.Linear(DIM, 13), nn.Linear(13, DIM)))
        model.to_empty(device="cpu")
        torch.manual_seed(7)
        for layer in model:
            layer.reset_parameters()
        return train(engine, model)

    check_engines_agree(run, plain=False)


@ranks(2, 4)
def test_meta_parameters_loaded() -> None:
    def run(engine: Engine) -> list[Any]:
        model = _on_meta(engine)
        source = _two_scaled()
        state = {
            name: distribute_tensor(value, model[1].weight.device_mesh, model[1].weight.placements)
            if "offset" not in name
            else value
            for name, value in source.state_dict().items()
        }
        model.load_state_dict(state, assign=True)
        return train_beside_plain(engine, model, _two_scaled)

    check_engines_agree(run, plain=False)


@ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_conversion_between_sharding_and_training(dtype: torch.dtype) -> None:
    def run(engine: Engine) -> list[Any]:
        model = engine.shard(stack())
        before = snapshot(model)
        model.to(dtype)
        seen = train(engine, model, [x.to(dtype) for x in engine.batches()])
        assert all(p.dtype is dtype for p in model.parameters())
        return [before, seen]

    check_engines_agree(run, plain=False)


@ranks(2)
def test_conversions_that_change_nothing_between_steps() -> None:
    def run(engine: Engine) -> list[Any]:
        model = engine.shard(stack())
        objects = [id(p) for p in model.parameters()]
        seen = []
        for change in (nn.Module.cpu, nn.Module.float, lambda m: m.to("cpu", torch.float32)):
            # The root is held here: what it is converted as is its shards.
            loss_of(model(engine.batches(1)[0]))
            change(model)
            seen.append([copies(p) for p in model.parameters()])
            assert [id(p) for p in model.parameters()] == objects
        return [seen, train(engine, model)]

    check_engines_agree(run, plain=False)


def _scale_in_place(model: nn.Module) -> None:
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.mul_(2)


def _scale_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(2)


def _scale_local(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.detach().to_local().mul_(2)


def _load_twice(model: nn.Module) -> None:
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


def _load_by_assignment(model: nn.Module) -> None:
    state = {name: value * 2 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


_CHANGES = [
    _scale_in_place,
    _scale_data,
    _scale_local,
    _load_twice,
    _load_by_assignment,
]


@ranks(2, 4)
@pytest.mark.parametrize("change", _CHANGES, ids=lambda change: change.__name__.strip("_"))
@pytest.mark.parametrize("after_evaluation", [False, True])
def test_values_changed_between_steps(
    change: Callable[[nn.Module], None], after_evaluation: bool
) -> None:
    def doubled() -> nn.Module:
        model = Stack()
        for parameter in model.parameters():
            parameter.data.mul_(2)
        return model

    def run(engine: Engine) -> list[Any]:
        model = engine.shard(stack())
        # A forward on other weights first: what it gathered must not be used again.
        with torch.set_grad_enabled(not after_evaluation):
            loss = loss_of(model(engine.batches(1)[0]))
        if not after_evaluation:
            loss.backward()
            model.zero_grad()
        for unit in (*model.blocks, model):
            unit.reshard()
        change(model)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        plain = seeded(doubled)
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(full(q), p)
        for buffer in model.buffers():
            buffer.zero_()
        return train_beside_plain(engine, model, doubled)

    check_engines_agree(run, plain=False)


@ranks(2)
def test_copies_and_pickles() -> None:
    def run(engine: Engine) -> list[Any]:
        model = engine.shard(stack())
        loss_of(model(engine.batches(1)[0])).backward()
        outer = nn.Sequential(nn.ReLU(), model)
        # Torch's engine makes gradients that cannot be copied of all but a unit's first parameter.
        shard = copy.deepcopy(model.first.weight)
        return [
            error_of(lambda: copy.deepcopy(model)),
            error_of(lambda: copy.deepcopy(model.blocks[0])),
            error_of(lambda: copy.deepcopy(outer)),
            error_of(lambda: pickle.dumps(model)),
            error_of(lambda: torch.save(model, io.BytesIO())),
            copies(shard),
            copies(copy.deepcopy(model.state_dict())),
        ]

    errors = check_engines_agree(run, plain=False)[:5]
    assert [type(error) for error in errors[:3]] == [AssertionError] * 3
    assert all(errors)


@ranks(2)
def test_a_saved_state_dict_comes_back() -> None:
    def run(engine: Engine) -> list[Any]:
        model = engine.shard(stack())
        optimizer = torch.optim.AdamW(model.parameters())
        loss_of(model(engine.batches(1)[0])).backward()
        optimizer.step()
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        file.seek(0)
        weights, moments = torch.load(file, weights_only=False)
        other = engine.shard(stack())
        other.load_state_dict(weights)
        return [copies(weights), copies(moments["state"]), train(engine, other)]

    check_engines_agree(run, plain=False)


@ranks(2, 4)
@pytest.mark.parametrize("reshard_after_forward", [None, False])
def test_a_state_dict_that_is_assigned_between_steps(reshard_after_forward: bool | None) -> None:
    def scenario(engine: Engine) -> list[Any]:
        model = engine.shard(stack(), reshard_after_forward=reshard_after_forward)
        seen = [train(engine, model, engine.batches(1))]
        saved = {name: value.detach().clone() for name, value in model.state_dict().items()}
        for _ in range(2):
            seen.append(train(engine, model))
            with torch.no_grad():
                seen.append(engine.mean(loss_of(model(engine.batches(1)[0]))))
            model.load_state_dict(saved, assign=True)
            check_same(copies(model.state_dict()), saved, exact=True, where="assigned")
            seen.append(engine.mean(loss_of(model(engine.batches(1)[0]))))
            # Training may write into what was assigned.
            saved = {name: value.detach().clone() for name, value in model.state_dict().items()}
        if engine.is_sharded:
            model.reshard()
        return [*seen, train(engine, model)]

    check_engines_agree(scenario)
