from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from shoal.checkpoint import (
    drop_unfinished,
    latest,
    load,
    load_training,
    optimizer_tensors,
    prepare_optimizer,
    save,
    save_training,
)
from shoal.errors import CheckpointError, UsageError

Make = Callable[[nn.Module], torch.optim.Optimizer]


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    model.register_parameter("unused", nn.Parameter(torch.randn(2)))
    return model


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": weights, "weight_decay": 0.2}, {"params": others, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9))


OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, amsgrad=True),
    "AdamW, fused": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True),
    "AdamW, lr a tensor": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(1e-2)),
    "AdamW, groups": two_groups,
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=1e-2),
    "SGD, momentum": lambda m: torch.optim.SGD(m.parameters(), 1e-2, momentum=0.9, dampening=0.1),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters(), lr=1e-2),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-2, centered=True),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=1e-2),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(tmp_path: Path, make: Make) -> None:
    model = make_model(0)
    optimizer = make(model)
    steps(model, optimizer, range(3))
    save_training(tmp_path / "c", model, optimizer, {"step": 3})
    steps(model, optimizer, range(3, 6))

    resumed = make_model(1)
    fresh = make(resumed)
    for group in fresh.param_groups:
        group["lr"] = group["lr"] * 3
    assert load_training(tmp_path / "c", resumed, fresh) == {"step": 3}
    assert all(p.grad is None for p in resumed.parameters())
    steps(resumed, fresh, range(3, 6))
    for name, value in model.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
    expected, found = optimizer.state_dict(), fresh.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    torch.testing.assert_close(found["state"], expected["state"], rtol=0, atol=0)


def test_hyper_parameters_come_back(tmp_path: Path) -> None:
    model = make_model(0)
    optimizer = two_groups(model)
    optimizer.param_groups[0]["lr"] = 0.125
    optimizer.param_groups[1]["initial_lr"] = 0.5
    save_training(tmp_path / "c", model, optimizer, {})
    other = make_model(0)
    fresh = torch.optim.AdamW([dict(group) for group in two_groups(other).param_groups], lr=7.0)
    load_training(tmp_path / "c", other, fresh)
    assert fresh.param_groups[0]["lr"] == 0.125
    assert fresh.param_groups[0]["betas"] == (0.8, 0.9)
    assert fresh.param_groups[1]["initial_lr"] == 0.5
    assert fresh.param_groups[0]["weight_decay"] == 0.2


def test_state_that_was_not_saved_is_dropped_and_the_rest_keeps_its_values(tmp_path: Path) -> None:
    model = make_model(0)
    optimizer = torch.optim.AdamW(model.parameters())
    save_training(tmp_path / "before", model, optimizer, {})
    steps(model, optimizer, range(1))
    weights = [parameter.clone() for parameter in model.parameters()]
    tensors, _ = optimizer_tensors(model, optimizer)
    assert "optimizer/0.weight/exp_avg" in tensors
    assert "optimizer/unused/exp_avg" not in tensors
    prepare_optimizer(model, optimizer, [*tensors, "optimizer/unused/exp_avg"])
    assert optimizer.state[model.get_parameter("unused")]["exp_avg"].shape == (2,)
    assert torch.equal(optimizer.state[model.get_parameter("0.weight")]["step"], torch.tensor(1.0))
    assert all(map(torch.equal, model.parameters(), weights))
    load_training(tmp_path / "before", model, optimizer)
    assert not any(optimizer.state.values())


def test_preparing_keeps_gradients_and_learning_rates() -> None:
    model = nn.Linear(2, 2)
    rate = torch.tensor(0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    gradient = torch.ones(2, 2)
    model.weight.grad = gradient
    prepare_optimizer(model, optimizer, ["optimizer/weight/exp_avg", "optimizer/bias/exp_avg"])
    assert model.weight.grad is gradient
    assert model.bias.grad is None
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == 0.5


def test_groups_that_differ_are_refused_before_anything_changes(tmp_path: Path) -> None:
    model = make_model(0)
    save_training(tmp_path / "c", model, two_groups(model), {})
    other = make_model(1)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointError, match="has 2 parameter groups, this one 1"):
        load_training(tmp_path / "c", other, torch.optim.AdamW(other.parameters()))
    turned = [{"params": group["params"]} for group in two_groups(other).param_groups[::-1]]
    with pytest.raises(CheckpointError, match=r"group 0 .*'0.weight' .* where .* '0.bias'"):
        load_training(tmp_path / "c", other, torch.optim.AdamW(turned))
    assert all(torch.equal(other.state_dict()[name], value) for name, value in before.items())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)), r"not in .*: 'model/1.weight'"),
        (nn.Sequential(nn.Linear(4, 7)), r"of another shape: 'model/0.weight' is \(6, 4\) there"),
        (nn.Sequential(nn.Linear(4, 6).double()), r"another dtype: 'model/0.weight' is .*float32"),
        (nn.Sequential(nn.Linear(4, 6, bias=False)), r"only in the checkpoint: 'model/0.bias'"),
        (nn.Linear(4, 6), r"not in the checkpoint: 'model/weight'"),
    ],
)
def test_another_model_is_named_by_its_parameters(
    tmp_path: Path, other: nn.Module, message: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 6))
    save_training(tmp_path / "c", model, torch.optim.AdamW(model.parameters()), {})
    with pytest.raises(CheckpointError, match=message) as raised:
        load_training(tmp_path / "c", other, torch.optim.AdamW(other.parameters()))
    assert "parameter group" not in str(raised.value)
    assert "include=" not in str(raised.value)


def test_before_the_first_checkpoint_there_is_nothing_to_load(tmp_path: Path) -> None:
    model = make_model(0)
    with pytest.raises(UsageError, match="`latest` gives None before the first one is saved"):
        load_training(latest(tmp_path), model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(UsageError, match="`latest` gives None before the first one is saved"):
        load(latest(tmp_path), {})


def test_a_damaged_checkpoint_leaves_the_optimizer_as_it_was(tmp_path: Path) -> None:
    model = make_model(0)
    optimizer = torch.optim.AdamW(model.parameters())
    steps(model, optimizer, range(2))
    save_training(tmp_path / "c", model, optimizer, {})
    (file,) = (tmp_path / "c").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    other = make_model(1)
    fresh = torch.optim.AdamW(other.parameters())
    with pytest.raises(CheckpointError):
        load_training(tmp_path / "c", other, fresh)
    assert not fresh.state


def test_what_a_dead_save_left_can_be_dropped(tmp_path: Path) -> None:
    save(tmp_path / "step-00000001", {"a": torch.ones(2)}, {})
    (tmp_path / ".step-00000002.saving-abc").mkdir()
    drop_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_checkpoint_of_tensors_alone_is_refused(tmp_path: Path) -> None:
    model = make_model(0)
    save(tmp_path / "c", model.state_dict(), {})
    with pytest.raises(CheckpointError, match="not written by save_training"):
        load_training(tmp_path / "c", model, torch.optim.AdamW(model.parameters()))
    load(tmp_path / "c", model.state_dict())


def test_what_is_not_supported_is_named(tmp_path: Path) -> None:
    model = make_model(0)
    lbfgs = torch.optim.LBFGS(nn.Linear(2, 2).parameters())
    with pytest.raises(UsageError, match="not one of the model"):
        save_training(tmp_path / "c", model, lbfgs, {})
    layer = nn.Linear(2, 2)
    lbfgs = torch.optim.LBFGS(layer.parameters())

    def closure() -> float:
        lbfgs.zero_grad()
        loss = layer(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss.item()

    lbfgs.step(closure)
    with pytest.raises(NotImplementedError, match="optimizer/weight/"):
        save_training(tmp_path / "c", layer, lbfgs, {})
    assert list(tmp_path.iterdir()) == []


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"a": 1}

    def set_extra_state(self, state: object) -> None: ...


def test_extra_state_that_is_not_a_tensor_is_named(tmp_path: Path) -> None:
    model = WithExtraState(2, 2)
    with pytest.raises(NotImplementedError, match="'_extra_state'"):
        save_training(tmp_path / "c", model, torch.optim.SGD(model.parameters()), {})
