"""What a load takes, and forty ways in which it cannot fit."""

from pathlib import Path

import pytest
import torch
from torch import nn

from shoal.checkpoint import load, load_model, load_training, save, save_training
from shoal.errors import CheckpointError, UsageError

SHAPES = [(3, 2), (2, 4), (2,), (2, 3, 1), (6,), ()]
OTHER_DTYPES = [
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def some() -> dict[str, torch.Tensor]:
    return {"a": torch.ones(2, 3), "b.w": torch.ones(4), "b.n": torch.tensor(3)}


def wrong() -> list[tuple[dict[str, torch.Tensor], str, str, str]]:
    """Targets that do not fit, with the name, what is expected and what is found."""
    cases = []
    for shape in SHAPES:
        cases.append(({**some(), "a": torch.zeros(shape)}, "'a'", "(2, 3)", str(shape)))
        cases.append(({**some(), "b.w": torch.zeros(shape)}, "'b.w'", "(4,)", str(shape)))
    for dtype in OTHER_DTYPES:
        for name in ("a", "b.w"):
            target = {**some(), name: some()[name].to(dtype)}
            cases.append((target, repr(name), "torch.float32", str(dtype)))
    for name in some():
        fewer = {other: tensor for other, tensor in some().items() if other != name}
        cases.append((fewer, repr(name), "only in the checkpoint", "1"))
    for name in ("c", "a.", "A", "b", "model/a", "b.w.x", "ab", "å"):
        more = {**some(), name: torch.zeros(1)}
        cases.append((more, repr(name), "not in the checkpoint", "1"))
    cases.append(({}, "'a'", "3 only in the checkpoint", "'b.n'"))
    many = {f"x{index}": torch.zeros(1) for index in range(500)}
    cases.append((many, "'x0'", "500 not in the checkpoint", "and 497 more"))
    cases.append(({**some(), "b.n": torch.tensor(3.0)}, "'b.n'", "torch.int64", "torch.float32"))
    return cases


def test_forty_wrong_targets_are_each_one_short_error(tmp_path: Path) -> None:
    save(tmp_path / "c", some(), {})
    assert len(wrong()) >= 40
    for target, *parts in wrong():
        before = {name: tensor.clone() for name, tensor in target.items()}
        with pytest.raises(CheckpointError) as raised:
            load(tmp_path / "c", target)
        text = str(raised.value)
        assert all(part in text for part in parts), (parts, text)
        assert len(text.splitlines()) <= 12
        assert "Build the model" in text
        assert all(torch.equal(target[name], before[name]) for name in target)


def test_include_and_exclude(tmp_path: Path) -> None:
    save(tmp_path / "c", some(), {"step": 1})
    target = {name: torch.zeros_like(tensor) for name, tensor in some().items()}
    assert load(tmp_path / "c", target, include=["b.*"], exclude=["*.n"]) == {"step": 1}
    assert target["b.w"].all()
    assert not target["a"].any()
    assert not target["b.n"].any()
    alone = {"a": torch.zeros(2, 3)}
    load(tmp_path / "c", alone, include=["a"])
    assert alone["a"].all()
    with pytest.raises(UsageError, match=r"'c\.\*' matches no tensor; the names begin with 'a'"):
        load(tmp_path / "c", target, include=["c.*"])
    with pytest.raises(UsageError, match="expected a list of patterns"):
        load(tmp_path / "c", target, include="a")


def test_dtypes_change_only_when_asked(tmp_path: Path) -> None:
    save(tmp_path / "c", {"x": torch.tensor([1.5, 2.25]), "n": torch.tensor(3)}, {})
    half = {"x": torch.zeros(2, dtype=torch.bfloat16), "n": torch.tensor(0)}
    with pytest.raises(CheckpointError, match="cast=True"):
        load(tmp_path / "c", half)
    load(tmp_path / "c", half, cast=True)
    assert half["x"].tolist() == [1.5, 2.25]
    with pytest.raises(CheckpointError, match=r"torch\.int64 there, torch\.int32 here"):
        load(tmp_path / "c", {**half, "n": torch.tensor(0, dtype=torch.int32)}, cast=True)


def test_weights_alone(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    save_training(tmp_path / "c", model, torch.optim.AdamW(model.parameters()), {})
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).bfloat16()
    before = other[1].weight.clone()
    load_model(tmp_path / "c", other, include=["0.*"], cast=True)
    assert torch.equal(other[0].weight, model[0].weight.bfloat16())
    assert torch.equal(other[1].weight, before)


def test_random_generators_come_back(tmp_path: Path) -> None:
    import random

    import numpy as np

    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    random.gauss(0, 1)
    np.random.standard_normal()
    save_training(tmp_path / "c", model, optimizer, {})

    def draw() -> list[float]:
        numbers = [random.gauss(0, 1), random.random(), torch.rand(()).item()]
        return [*numbers, np.random.standard_normal(), np.random.rand()]

    expected = draw()
    draw()
    load_training(tmp_path / "c", model, optimizer)
    assert draw() == expected
