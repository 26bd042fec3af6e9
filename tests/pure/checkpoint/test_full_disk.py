"""Fifty sizes of a disk that is too small."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shoal.checkpoint import async_save, latest, load, save, step_folder
from shoal.errors import CheckpointError

NUMEL = 100_000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory; needs the right to mount one."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a file system of a given size cannot be mounted here")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def save_in_background(folder: Path, tensors: dict[str, torch.Tensor], extra: dict) -> None:
    async_save(folder, tensors, extra)
    async_save(folder.with_name("next"), {}, {})


def test_fifty_sizes(disk: Path) -> None:
    save(step_folder(disk, 1), {"x": torch.ones(3)}, {})
    for index in range(50):
        kib = 7 * (index + 1)
        resize = ["mount", "-o", f"remount,size={kib + 12}k", str(disk)]
        subprocess.run(resize, check=True)
        write = save_in_background if index % 2 else save
        with pytest.raises(CheckpointError) as raised:
            write(step_folder(disk, 2), {"x": torch.ones(NUMEL)}, {})
        found = re.search(
            r"rank-00000\.safetensors: No space left on device\. "
            r"([\d,]+) bytes are needed, ([\d,]+) bytes are free there",
            str(raised.value),
        )
        assert found, str(raised.value)
        needed, free = (int(text.replace(",", "")) for text in found.groups())
        assert needed > 4 * NUMEL > free
        assert latest(disk) == step_folder(disk, 1)
        assert [path.name for path in disk.iterdir()] == ["step-00000001"]
        target = {"x": torch.zeros(3)}
        load(step_folder(disk, 1), target)
        assert target["x"].all()
