"""What several ranks of a host need, its disk gives once."""

import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from harness import ranks
from shoal.checkpoint import load, save

IO = Path("/proc/self/io")
SHAPE = (2048, 4096)
NUM_BYTES = 4 * SHAPE[0] * SHAPE[1]


def from_disk() -> int:
    """How many bytes this process has had the disk give."""
    found = re.search(r"read_bytes: (\d+)", IO.read_text())
    assert found
    return int(found[1])


def forget(folder: Path) -> None:
    """Let the page cache drop what is in these files."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


@pytest.mark.skipif(not IO.exists(), reason="what a process reads is known on Linux alone")
@ranks(4)
def test_a_region_that_all_ranks_need_comes_from_the_disk_once(tmp_path: Path) -> None:
    values = torch.arange(float(SHAPE[0] * SHAPE[1])).reshape(SHAPE)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    save(tmp_path / "c", {"x": distribute_tensor(values, mesh, [Shard(0)])}, {})
    if dist.get_rank() == 0:
        forget(tmp_path / "c")
    dist.barrier()
    before = from_disk()
    found = torch.zeros(SHAPE)
    load(tmp_path / "c", {"x": found})
    read = torch.tensor(from_disk() - before)
    dist.all_reduce(read)
    assert torch.equal(found, values)
    if read == 0:
        pytest.skip("the file system here has no disk beneath it that counts")
    assert 0.9 * NUM_BYTES <= read <= 1.1 * NUM_BYTES
