from pathlib import Path

import pytest

from shoal.checkpoint import Retention, latest, load, point_latest, save, step_folder
from shoal.errors import UsageError


def test_what_may_go() -> None:
    steps = [10, 20, 30, 40, 50]
    assert Retention().expired(steps) == []
    assert Retention(last=2).expired(steps) == [10, 20, 30]
    assert Retention(last=2, every=20).expired(steps[::-1]) == [10, 30]
    assert Retention(last=9).expired(steps) == []
    with pytest.raises(UsageError, match="last=-1"):
        Retention(last=-1)


def test_folders_go_and_others_stay(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        save(step_folder(tmp_path, step), {}, {"step": step})
    (tmp_path / "step-00000009").mkdir()
    (tmp_path / "mine").mkdir()
    removed = Retention(last=1, every=2).apply(tmp_path)
    assert removed == [step_folder(tmp_path, step) for step in (1, 3)]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"step-00000002", "step-00000004", "step-00000005", "step-00000009", "mine"}


def test_of_a_link_the_link_goes(tmp_path: Path) -> None:
    checkpoints, outside = tmp_path / "checkpoints", tmp_path / "outside"
    save(outside, {}, {"step": 1})
    save(step_folder(checkpoints, 2), {}, {"step": 2})
    step_folder(checkpoints, 1).symlink_to(outside)
    Retention(last=1).apply(checkpoints)
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000002"]
    assert load(outside, {}) == {"step": 1}


def test_latest_follows(tmp_path: Path) -> None:
    assert point_latest(tmp_path) is None
    for step in (1, 2):
        save(step_folder(tmp_path, step), {}, {"step": step})
        assert point_latest(tmp_path) == step_folder(tmp_path, step)
        assert load(tmp_path / "latest", {}) == {"step": step}
    assert latest(tmp_path) == step_folder(tmp_path, 2)
    assert not list(tmp_path.glob(".latest*"))
