"""Any number of ranks and any layout load what any other saved, bit for bit."""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)

import cuts
from listed_cuts import CUTS, MATRIX_CUTS, listed
from shoal.checkpoint import data_files, load, save
from shoal.comm.local import run_local
from shoal.layout import Block, Even, Flat, Rows, Whole
from shoal.tensor import ShardedTensor

WORLD_SIZES = (1, 2, 3, 4, 5, 7, 8)
NUM_TENSORS = 21
"""For each of 49 pairs of world sizes: more than a thousand in all."""

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8)


def whole(index: int) -> torch.Tensor:
    """Random bits of a random shape, the same on every rank and in every run."""
    choose = random.Random(index)
    shape = [choose.choice((0, 1, 2, 3, 5, 8, 9)) for _ in range(choose.randrange(5))]
    if index % 3:
        shape = [max(1, size) for size in shape]
    dtype = choose.choice(DTYPES)
    data = choose.randbytes(torch.Size(shape).numel() * dtype.itemsize)
    return torch.tensor([*data], dtype=torch.uint8).view(dtype).reshape(shape)


def laid_out(values: torch.Tensor, choose: random.Random) -> torch.Tensor:
    """A tensor of these values, laid out over all ranks in a random way."""
    world_size = dist.get_world_size()
    dims = range(values.dim())
    kind = choose.choice(("plain", "axis", "axes", "packed", "packed", "listed"))
    if kind == "packed":
        layout = choose.choice((Even(), Flat(), Rows(), Block(choose.randrange(1, 7)), Whole()))
        return cuts.sharded([values], layout)[0]
    if kind == "listed" and values.numel() and values.dim():
        ways = MATRIX_CUTS if values.dim() == 2 else CUTS
        return listed(values, choose.choice([*ways.values()])(tuple(values.shape)))
    if kind in ("axis", "axes"):
        is_two = kind == "axes" and world_size % 2 == 0
        mesh = init_device_mesh("cpu", (2, world_size // 2) if is_two else (world_size,))
        ways = [Replicate(), *(Shard(dim) for dim in dims)]
        return distribute_tensor(values, mesh, [choose.choice(ways) for _ in range(mesh.ndim)])
    return values.clone()


def locals_of(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    if isinstance(tensor, ShardedTensor):
        return tensor.locals
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def state(indices: Sequence[int], seed: object) -> dict[str, torch.Tensor]:
    choose = random.Random(str(seed))
    return {str(index): laid_out(whole(index), choose) for index in indices}


def write(folder: Path, indices: Sequence[int]) -> None:
    save(folder, state(indices, f"save {dist.get_world_size()}"), {})


def read(folder: Path, indices: Sequence[int], seed: str) -> None:
    expected, found = state(indices, seed), state(indices, seed)
    for tensor in found.values():
        for local in locals_of(tensor):
            local.zero_()
    load(folder, found)
    for name, tensor in expected.items():
        for ours, theirs in zip(locals_of(found[name]), locals_of(tensor), strict=True):
            assert torch.equal(bits(ours), bits(theirs)), (name, seed)


def check_pairs(folder: Path, pairs: Sequence[tuple[int, int]], num_tensors: int) -> None:
    for before, afters in itertools.groupby(pairs, key=lambda pair: pair[0]):
        indices = [1000 * before + index for index in range(num_tensors)]
        run_local(before, write, folder / f"on-{before}", indices, timeout_s=100)
        for _, after in afters:
            seed = f"{before} to {after}"
            run_local(after, read, folder / f"on-{before}", indices, seed, timeout_s=100)


@pytest.fixture(params=[24, 1 << 20])
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """In small blocks a shard is many regions, which others cut elsewhere."""
    monkeypatch.setattr(data_files, "REGION_BYTES", request.param)
    return tmp_path


def test_some_world_sizes_and_layouts(folder: Path) -> None:
    check_pairs(folder, [(1, 4), (3, 2), (4, 3), (8, 1)], 12)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_all_pairs_of_world_sizes_and_a_thousand_layouts(folder: Path) -> None:
    check_pairs(folder, [*itertools.product(WORLD_SIZES, WORLD_SIZES)], NUM_TENSORS)
