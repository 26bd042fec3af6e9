"""`--resume` of a folder that came from somebody else: nothing outside of it is written to."""

import os
import shutil
from pathlib import Path

import pytest

from train_command import TINY, Command

OLD_NAMES = (
    *("config.json.part", "metrics.part", ".report.html.1"),
    *("logs/config.json", "logs/config.json.part", "logs/launcher.log"),
    *("logs/stop", "logs/stopped", "logs/rank-0.out", "logs/rank-0.restart-1.err"),
)
"""Names that a run, or one of an earlier version, has only for a while."""
READ = ("config.json", "metrics.jsonl", ".lock")
"""Files that a resume reads before it writes: a link is refused, not replaced."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps."""
    folder = tmp_path_factory.mktemp("foreign")
    status, _, err = Command(folder, "--name", "a", "--steps", "2", *TINY).finish(120)
    assert (status, err) == (0, "")
    return folder / "runs" / "a"


@pytest.fixture
def copied(tmp_path: Path, finished: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "runs" / "a", symlinks=True)


def written_names(folder: Path) -> list[str]:
    """Every file that a run has written, beside its checkpoints."""
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    found = [name for name in names if not name.startswith("checkpoints/")]
    assert {"timeline.json", "sample.txt", "report.html", "logs/rank-1.err"} <= {*found}
    return sorted({*found, *OLD_NAMES})


def plant(path: Path, victim: Path, *, hard: bool) -> None:
    victim.parent.mkdir(parents=True, exist_ok=True)
    victim.write_bytes(path.read_bytes() if path.exists() else b"mine")
    path.unlink(missing_ok=True)
    if hard:
        path.hardlink_to(victim)
    else:
        path.symlink_to(os.path.relpath(victim, path.parent))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("hard", [False, True], ids=["symbolic", "hard"])
def test_links_lose_their_names_and_nothing_else(tmp_path, copied, start, hard):
    outside = tmp_path / "outside"
    # A hard link is a regular file, so what is read may be one; only a lock is written in place.
    kept = (".lock",) if hard else READ
    names = [name for name in written_names(copied) if name not in kept]
    for name in names:
        plant(copied / name, outside / name, hard=hard)
    before = {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()}
    times = {path: path.stat().st_mtime_ns for path in before}
    status, out, err = start("--resume", "runs/a", "--steps", "+2").finish(120)
    assert (status, err) == (0, ""), out
    assert {path: path.read_bytes() for path in before} == before
    assert {path: path.stat().st_mtime_ns for path in before} == times
    assert {path for path in outside.rglob("*") if path.is_file()} == before.keys()
    for name in ("timeline.json", "sample.txt", "report.html", "logs/rank-0.err"):
        assert not (copied / name).is_symlink()
        assert (copied / name).stat().st_nlink == 1


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", READ)
def test_a_link_that_would_be_read_is_refused(tmp_path, copied, start, name):
    victim = tmp_path / "outside" / name
    plant(copied / name, victim, hard=False)
    before = victim.read_bytes()
    status, _, err = start("--resume", "runs/a", "--steps", "+2").finish(90)
    assert status != 0
    assert "it is a link, not a regular file" in err
    assert "Traceback" not in err
    assert victim.read_bytes() == before


@pytest.mark.timeout(120)
def test_a_lock_that_is_another_file_too_is_refused(tmp_path, copied, start):
    plant(copied / ".lock", tmp_path / "outside" / "lock", hard=True)
    status, _, err = start("--resume", "runs/a", "--steps", "+2").finish(90)
    assert status == 2
    assert "a hard link to a file that has other names" in err


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["logs", "checkpoints", "tensorboard"])
def test_a_folder_elsewhere_is_refused(tmp_path, copied, start, name):
    outside = tmp_path / "outside"
    if (copied / name).exists():
        (copied / name).rename(outside)
    else:
        outside.mkdir()
    (copied / name).symlink_to(outside)
    before = {path: path.lstat().st_mtime_ns for path in [outside, *outside.rglob("*")]}
    status, _, err = start("--resume", "runs/a", "--steps", "+2").finish(90)
    assert status == 2
    assert "cannot write into runs/a" in err
    assert "it is a link, not a folder" in err
    assert {path: path.lstat().st_mtime_ns for path in [outside, *outside.rglob("*")]} == before
