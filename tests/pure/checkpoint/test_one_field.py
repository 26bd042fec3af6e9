"""One field of a manifest changed, with a checksum that is right: refused before anything changes.

Whatever the field becomes, `load_training` either raises and leaves every byte of model, optimizer
and generators as it was, or loads what was saved.
"""

import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from shoal.checkpoint import load_training, restore_hyper_parameters, save_training
from shoal.checkpoint.manifest import NAME, sealed
from shoal.errors import CheckpointError, ShoalError

Steps = tuple[str | int, ...]
REMOVED, INFINITE = object(), "infinite: written as a number that overflows"
CHANGES: list[Any] = [
    *(REMOVED, INFINITE, None, True, False, 0, 1, -1, 7, 2**31, 2**63, -(2**70), 10**400, 0.5),
    *(1e300, "", "evil", "0", [], [0], ["evil"], [[]], [0.5, 0.5], {}, {"evil": 1}, {"params": 0}),
]


class Optimizer(torch.optim.Optimizer):
    """Keeps a count as a plain number, beside a tensor."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "powers": (0.9, 0.5), "name": "own", "flag": True})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    mean = state.setdefault("mean", torch.zeros_like(parameter))
                    mean.mul_(group["powers"][0]).add_(parameter.grad)
                    with torch.no_grad():
                        parameter.sub_(group["lr"] * mean)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, betas=(0.8, 0.9)),
    "lr a tensor": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.01)),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.01),
    "own": lambda m: Optimizer(m.parameters()),
}


def build(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = OPTIMIZERS[kind](model)
    for _ in range(seed):
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """All that a load could change, exactly, as text."""
    states = {n: v.tolist() for n, v in model.state_dict().items()}
    return repr(
        (
            *(states, plain(optimizer.state_dict()), torch.get_rng_state().tolist()),
            *(random.getstate(), plain(np.random.get_state(legacy=False))),
        )
    )


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain(item) for item in value)
    return value.tolist() if isinstance(value, torch.Tensor | np.ndarray) else value


def paths_of(value: Any, at: Steps = ()) -> Iterator[Steps]:
    """Every place in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        yield (*at, key)
        if isinstance(item, dict | list):
            yield from paths_of(item, (*at, key))


def changed(content: dict[str, Any], path: Steps, value: Any) -> bytes | None:
    """The sealed manifest with one field changed; None if that is no change."""
    content = copy.deepcopy(content)
    before = json.dumps(content, sort_keys=True)
    place: Any = content
    for step in path[:-1]:
        place = place[step]
    if value is REMOVED:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    if json.dumps(content, sort_keys=True) == before:
        return None
    if value is not INFINITE:
        return sealed(content)
    # As someone writes it who does not use our encoder.
    encode, quoted = json.dumps, json.dumps(INFINITE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json, "dumps", lambda *a, **k: encode(*a, **k).replace(quoted, "1e999"))
        return sealed(content)


@pytest.fixture(scope="module", params=OPTIMIZERS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint, its manifest, and what a load of it gives."""
    folder = tmp_path_factory.mktemp("one-field") / "c"
    model, optimizer = build(request.param, 2)
    save_training(folder, model, optimizer, {"step": 2})
    content = json.loads((folder / NAME).read_text())
    content.pop("checksum")
    loaded = build(request.param, 0)
    load_training(folder, *loaded)
    return request.param, folder, content, everything(*loaded)


def is_choice(content: Any, path: Steps, value: Any) -> bool:
    """Whether it is another hyper-parameter of the same kind, which a checkpoint may hold."""
    for step in path:
        content = content[step]
    kinds = {int: "number", float: "number"}
    same = [kinds.get(type(one), type(one)) for one in (content, value)]
    return path[:2] == ("extra", "optimizer") and same[0] == same[1]


def check(saved: Any, path: Steps, value: Any) -> None:
    kind, folder, content, expected = saved
    data = changed(content, path, value)
    if data is None:
        return
    (folder / NAME).write_bytes(data)
    model, optimizer = build(kind, 1)
    before = everything(model, optimizer)
    try:
        extra = load_training(folder, model, optimizer)
    except ShoalError:
        assert everything(model, optimizer) == before, (path, value)
        model(torch.ones(1, 3))
        return
    assert isinstance(extra, dict)
    model(torch.ones(1, 3))
    if everything(model, optimizer) != expected:
        assert is_choice(content, path, value), (path, value)


@settings(max_examples=100, suppress_health_check=list(HealthCheck), deadline=None)
@given(data=st.data())
def test_a_changed_field_is_refused_or_harmless(saved: Any, data: st.DataObject) -> None:
    paths = list(paths_of(saved[2]))
    of_extra = [path for path in paths if path[0] == "extra"]
    path = data.draw(st.one_of(st.sampled_from(paths), st.sampled_from(of_extra)))
    check(saved, path, data.draw(st.sampled_from(CHANGES)))


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_all_changes_to_all_fields(saved: Any) -> None:
    for path in paths_of(saved[2]):
        for value in CHANGES:
            check(saved, path, value)


@pytest.mark.parametrize("rate", ["evil", None, True, [0.1], {}, 10**400, -(2**64)])
def test_a_learning_rate_that_is_no_number_is_refused_by_name(tmp_path: Path, rate: Any) -> None:
    model, optimizer = build("AdamW", 1)
    save_training(tmp_path / "c", model, optimizer, {})
    saved = edited(tmp_path / "c", "lr", rate)
    before = everything(model, optimizer)
    with pytest.raises(CheckpointError, match="'lr' of parameter group 0"):
        load_training(tmp_path / "c", model, optimizer)
    with pytest.raises(CheckpointError, match="'lr' of parameter group 0"):
        restore_hyper_parameters(model, optimizer, saved)
    assert everything(model, optimizer) == before


def edited(folder: Path, name: str, value: Any) -> Any:
    """Let a group of a saved optimizer say something else."""
    content = json.loads((folder / NAME).read_text())
    content.pop("checksum")
    content["extra"]["optimizer"]["groups"][0][name] = value
    (folder / NAME).write_bytes(sealed(content))
    return content["extra"]["optimizer"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -1.0),
        ("betas", [0.9, 1.0]),
        ("betas", [-0.1, 0.9]),
        ("eps", -1e-8),
        ("weight_decay", -0.01),
    ],
)
def test_a_number_that_no_optimizer_takes_is_refused_before_the_first_write(
    tmp_path: Path, name: str, value: Any
) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    model = torch.nn.ParameterList([parameter])
    optimizer = torch.optim.AdamW(model.parameters())
    save_training(tmp_path / "c", model, optimizer, {})
    saved = edited(tmp_path / "c", name, value)
    with torch.no_grad():
        parameter.zero_()
    before = dict(optimizer.param_groups[0])
    for restore in (
        lambda: load_training(tmp_path / "c", model, optimizer),
        lambda: restore_hyper_parameters(model, optimizer, saved),
    ):
        with pytest.raises(CheckpointError, match=f"'{name}' of parameter group 0 .* cannot be"):
            restore()
    assert optimizer.param_groups[0] == before
    assert not parameter.any()


def test_an_optimizer_that_has_a_negative_rate_itself_may_load_one(tmp_path: Path) -> None:
    """It climbs, so that its rates mean something else."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(2))])
    optimizer = Optimizer(model.parameters(), lr=-0.5)
    save_training(tmp_path / "c", model, optimizer, {})
    optimizer.param_groups[0]["lr"] = -0.25
    load_training(tmp_path / "c", model, optimizer)
    assert optimizer.param_groups[0]["lr"] == -0.5


@pytest.mark.parametrize("name", ["torch", "python", "numpy"])
def test_a_state_that_no_generator_takes_is_refused_before_the_first_write(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal.checkpoint import random_generators

    model, optimizer = build("AdamW", 2)
    shares = random_generators.generator_shares

    def bad(rank: int, world_size: int) -> Any:
        found = shares(rank, world_size)
        found[f"random/{name}"].parts[0].local.fill_(-1)
        return found

    with monkeypatch.context() as patch:
        patch.setattr("shoal.checkpoint.training.generator_shares", bad)
        save_training(tmp_path / "c", model, optimizer, {})
    model, optimizer = build("AdamW", 1)
    before = everything(model, optimizer)
    with pytest.raises(CheckpointError, match=f"'random/{name}' is not a generator's state"):
        load_training(tmp_path / "c", model, optimizer)
    assert everything(model, optimizer) == before


def resealed(folder: Path, change: Callable[[Any], object]) -> None:
    """Change what a checkpoint says of the optimizer, with a checksum that is right."""
    content = json.loads((folder / NAME).read_text())
    content.pop("checksum")
    change(content["extra"]["optimizer"])
    (folder / NAME).write_bytes(sealed(content))


@pytest.mark.parametrize("value", [1.0, 0, None, True])
@pytest.mark.parametrize("state", ["exp_avg", "step"])
def test_a_number_does_not_take_the_place_of_a_tensor(
    tmp_path: Path, state: str, value: Any
) -> None:
    save_training(tmp_path / "c", *build("AdamW", 2), {})
    resealed(tmp_path / "c", lambda o: o["values"].update({f"optimizer/weight/{state}": value}))
    model, optimizer = build("AdamW", 1)
    before = everything(model, optimizer)
    with pytest.raises(CheckpointError, match=f"optimizer/weight/{state} .* a tensor here"):
        load_training(tmp_path / "c", model, optimizer)
    assert everything(model, optimizer) == before


@pytest.mark.parametrize("option", ["capturable", "differentiable", "foreach", "fused"])
def test_how_a_step_is_computed_is_not_the_checkpoints_choice(tmp_path: Path, option: str) -> None:
    save_training(tmp_path / "c", *build("AdamW", 2), {})
    resealed(tmp_path / "c", lambda optimizer: optimizer["groups"][0].update({option: True}))
    model, optimizer = build("AdamW", 1)
    chosen = optimizer.param_groups[0][option]
    load_training(tmp_path / "c", model, optimizer)
    assert optimizer.param_groups[0][option] is chosen


def test_a_state_with_which_torch_reads_beyond_its_memory_is_refused() -> None:
    from shoal.checkpoint.random_generators import _attempt_torch

    generator = torch.Generator().manual_seed(1)
    for _ in range(1300):  # through two of its tables
        _attempt_torch(generator.get_state())
        torch.rand(1, generator=generator)
    state = generator.get_state()
    words = state.view(torch.int32)
    words[2], words[4] = 624, 624
    with pytest.raises(ValueError, match="624 words left from word 624 on"):
        _attempt_torch(state)
