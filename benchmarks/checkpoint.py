"""Saving and loading on gloo ranks of one machine, beside torch's DCP.

    python benchmarks/checkpoint.py --mib 2048 --out benchmarks/results/checkpoint.json

A state of sharded tensors is saved, saved in the background, and loaded, into the same folder of
one disk, by both libraries in turns; of all rounds the median counts. Ours takes and compares
checksums of every byte, and syncs every file, as DCP does by default. The stall is the time until
the call that saves in the background returns, from the second on, when host memory is there. Times
of the processor are kept beside those of the clock, which others on the machine change.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from shoal.bench.script import flags, on_ranks, store
from shoal.checkpoint import async_save, load, save

Stall = tuple[Callable[[], Any], Callable[[Any], object]]
"""What begins a save in the background, and what waits for it."""


def main() -> None:
    """Measure, print a table, and write a file if one is named."""
    parser = flags(__doc__, rounds=5)
    parser.add_argument("--mib", type=int, default=256, help="size of all tensors together")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where to save; a temporary folder by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = on_ranks(options.ranks, _rank, options.mib, options.rounds, folder)
    print(f"{options.mib} MiB on {options.ranks} gloo ranks, median of {options.rounds} rounds")
    for name, of in found.items():
        ratio = of["shoal_ms"] / of["dcp_ms"]
        busy = of["shoal_cpu_ms"] / of["dcp_cpu_ms"]
        times = f"shoal {of['shoal_ms']:8.1f} ms   DCP {of['dcp_ms']:8.1f} ms   {ratio:.2f}"
        print(f"{name:6} {times}   in processor time {busy:.2f}")
    settings = {"mib": options.mib, "ranks": options.ranks, "rounds": options.rounds}
    store(options.out, settings=settings, results=found)


def _rank(mib: int, rounds: int, folder: str) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    state, target = _state(mib, 1.0), _state(mib, 0.0)
    found = _measure(Path(folder), rounds, state, target)
    for name, value in state.items():
        if not torch.equal(value.to_local(), target[name].to_local()):
            raise AssertionError(f"{name} did not come back")
    return found


def _state(mib: int, scale: float) -> dict[str, Any]:
    """Tensors of 16 MiB, and one small one for each, as weights and their norms are."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    state = {}
    for index in range(max(1, mib // 16)):
        large = torch.rand(4096, 1024, generator=generator) * scale
        state[f"layers.{index}.weight"] = distribute_tensor(large, mesh, [Shard(0)])
        state[f"layers.{index}.norm"] = distribute_tensor(large[:, 0].clone(), mesh, [Shard(0)])
    return state


def _measure(
    folder: Path, rounds: int, state: dict[str, Any], target: dict[str, Any]
) -> dict[str, Any]:
    ours, theirs = folder / "ours", folder / "theirs"
    apart: Any = dist.new_group()  # DCP's thread would meet the measurement's own collectives
    stalls: dict[str, Stall] = {
        "shoal": (lambda: async_save(ours, state, {}), lambda pending: pending.wait()),
        "dcp": (
            lambda: dcp.async_save(state, checkpoint_id=theirs, process_group=apart),
            lambda future: future.result(),
        ),
    }
    times: dict[str, dict[str, list[tuple[float, float]]]] = {
        name: {"shoal": [], "dcp": []} for name in ("save", "load", "stall")
    }
    for _ in range(rounds):
        times["save"]["shoal"].append(_timed(lambda: save(ours, state, {})))
        times["save"]["dcp"].append(_timed(lambda: dcp.save(state, checkpoint_id=theirs)))
        times["load"]["shoal"].append(_timed(lambda: load(ours, target)))
        times["load"]["dcp"].append(_timed(lambda: dcp.load(target, checkpoint_id=theirs)))
        _clear(ours, theirs)
    for index in range(rounds + 1):
        for name, (begin, wait) in stalls.items():
            pending: list[Any] = []
            spent = _timed(lambda begin=begin, pending=pending: pending.append(begin()))
            wait(pending[0])
            if index:
                times["stall"][name].append(spent)
        _clear(ours, theirs)
    return {
        name: {
            f"{who}_{kind}ms": round(1000 * statistics.median(values), 2)
            for who in of
            for kind, values in zip(("", "cpu_"), zip(*of[who], strict=True), strict=True)
        }
        | {f"{who}_all_ms": [round(1000 * clock, 2) for clock, _ in of[who]] for who in of}
        for name, of in times.items()
    }


def _timed(action: Callable[[], object]) -> tuple[float, float]:
    """The seconds that the slowest rank takes, by the clock and of the processor."""
    dist.barrier()
    start, busy = time.perf_counter(), time.process_time()
    action()
    spent = torch.tensor([time.perf_counter() - start, time.process_time() - busy])
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    clock, processor = spent.tolist()
    return clock, processor


def _clear(*folders: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        for folder in folders:
            shutil.rmtree(folder)
    dist.barrier()


if __name__ == "__main__":
    main()
