"""What surviving costs, on gloo ranks of one machine: a recovery, faults in a row, parity.

    python benchmarks/survive.py recovery --mib 2048 --out benchmarks/results/survive-recovery.json
    python benchmarks/survive.py goodput --minutes 10 --every 30 --out …
    python benchmarks/survive.py cost --out …

`recovery` kills one of four ranks, several times, and takes apart the time until the others have
done the next step, and the memory that the fullest of them has meanwhile. `goodput` kills one again
and again while a spare takes its place: steps times the median undisturbed step, over the time that
all of it took. `cost` trains with survive and without, in turns. Ranks are processes of
`shoal.survive.launcher`, of one thread each.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal import fully_shard
from shoal.bench.script import flags, store
from shoal.survive import survive
from shoal.survive.launcher import Launcher, command

_STATE_BYTES = 12
"""Of a parameter in fp32: itself and AdamW's two moments."""
_POLL_S = 0.01


def main() -> None:
    """Measure one of the three, print it, and write a file if one is named."""
    if sys.argv[1:2] == ["rank"]:
        _rank(Path(sys.argv[2]), json.loads(sys.argv[3]))
        return
    parser = flags(__doc__, rounds=3)
    parser.add_argument("what", choices=["recovery", "goodput", "cost"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mib", type=int, default=64, help="state of all ranks together")
    parser.add_argument("--layers", type=int, default=8, help="how many units")
    parser.add_argument("--batch", type=int, default=32, help="samples in a global batch")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=30.0, help="seconds from fault to fault")
    options = parser.parse_args()
    measure = {"recovery": _recovery, "goodput": _goodput, "cost": _cost}[options.what]
    plan = {"mib": options.mib, "layers": options.layers, "batch": options.batch}
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options, plan)
    settings = {"what": options.what, "ranks": options.ranks, **plan}
    if options.what == "goodput":
        settings |= {"minutes": options.minutes, "every_s": options.every}
    print(json.dumps(found, indent=2))
    store(options.out, settings=settings, results=found)


# A rank.


class _Batches:
    """Random batches; as many as are wanted."""

    def __init__(self, num_steps: int, num_samples: int, width: int) -> None:
        self._num_steps = num_steps
        self._data = torch.randn(num_samples, width, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self._num_steps

    def __getitem__(self, step: int) -> Tensor:
        return self._data


def _model(plan: dict[str, Any]) -> tuple[nn.Module, int]:
    """Layers of one size that have the wanted state together."""
    layers = plan["layers"]
    numel = plan["mib"] * 2**20 / _STATE_BYTES / layers
    width = max(8, int(numel**0.5) // 8 * 8)
    torch.manual_seed(0)
    model = nn.Sequential()
    for _ in range(layers):
        model.append(fully_shard(nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh())))
    return fully_shard(model), width


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, weight: float) -> None:
    loss = model(batch).square().mean() * weight
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _rank(folder: Path, plan: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    member = os.environ["SHOAL_SURVIVE_MEMBER"]
    model, width = _model(plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    batches = _Batches(plan["steps"], plan["batch"], width)
    ends: list[tuple[int, float]] = []
    broken: list[float] = []
    memory: dict[str, float] = {}
    if plan.get("plain"):
        rank, size = dist.get_rank(), dist.get_world_size()
        for number in range(plan["steps"]):
            share = batches[number].tensor_split(size)[rank]
            _step(model, optimizer, share, 1.0)
            ends.append((number, time.time()))
        _leave(folder, member, ends=ends)
        return
    with survive(model, optimizer, batches) as run:
        break_off = run._break_off

        def noting() -> None:
            broken.append(time.time())
            memory["before"] = _resident_mib("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
            break_off()

        run._break_off = noting
        progress = os.open(folder / f"{member}.at", os.O_CREAT | os.O_WRONLY)
        for step in run:
            with step:
                _step(model, optimizer, step.batch, step.weight)
            ends.append((step.number, time.time()))
            if run.recoveries:
                memory.setdefault("peak", _resident_mib("VmHWM"))
            os.pwrite(progress, f"{step.number:9}".encode(), 0)
            if (folder / "stop").exists() and (folder / "stop").stat().st_size:
                batches._num_steps = min(batches._num_steps, _last_step(folder))
        recoveries = [
            {"members": len(r.members), "version": r.version, "seconds": r.seconds}
            for r in run.recoveries
        ]
        kept, sent = run.num_kept_bytes, run.num_sent_bytes
    memory["after"] = _resident_mib("VmRSS")
    story = {"ends": ends, "broken": broken, "recoveries": recoveries, "memory": memory}
    _leave(folder, member, **story, kept=kept, sent=sent)


def _resident_mib(name: str) -> float:
    """The memory of this process as the kernel counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(found.split()[1]) / 1024


def _last_step(folder: Path) -> int:
    return int((folder / "stop").read_text())


def _leave(folder: Path, member: str, **story: Any) -> None:
    path = folder / f"{member}.json"
    path.with_suffix(".part").write_text(json.dumps(story))
    path.with_suffix(".part").rename(path)


# The launcher's side.


def _start(folder: Path, plan: dict[str, Any]) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return command([str(Path(__file__).resolve()), "rank", str(folder), json.dumps(plan)])


def _at(folder: Path) -> int:
    """The last step that any rank has done."""
    texts = [path.read_text() for path in folder.glob("*.at")]
    return max((int(text) for text in texts if text.strip()), default=-1)


def _stories(folder: Path) -> dict[int, Any]:
    return {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}


def _usual_ms(ends: Sequence[Sequence[float]]) -> float:
    times = [end for _, end in ends]
    gaps = [(after - before) * 1e3 for before, after in itertools.pairwise(times)]
    return statistics.median(gaps)


def _recovery(folder: Path, options: Any, plan: dict[str, Any]) -> dict[str, Any]:
    rounds = [_one_recovery(folder / str(n), options, plan, seed=n) for n in range(options.rounds)]
    parts = {
        name: round(statistics.median(one["parts_s"][name] for one in rounds), 3)
        for name in rounds[0]["parts_s"]
    }
    whole = [one["whole_s"] for one in rounds]
    memory = {
        name: round(max(one["resident_mib"][name] for one in rounds))
        for name in ("before", "peak", "after")
    }
    return {
        "parts_s": parts,
        "whole_s": round(statistics.median(whole), 3),
        "resident_mib": memory,
        "rounds": rounds,
    }


def _one_recovery(folder: Path, options: Any, plan: dict[str, Any], seed: int) -> dict[str, Any]:
    steps, kill_at = 9, 5
    start = _start(folder, {**plan, "steps": steps})
    died_at = 0.0
    with Launcher(start, options.ranks) as launcher:
        while launcher.poll():
            time.sleep(_POLL_S)
            if not died_at and _at(folder) >= kill_at:
                victim = random.Random(seed).randrange(options.ranks)
                died_at = time.time()
                os.kill(launcher.processes[victim].pid, signal.SIGKILL)
    stories = _stories(folder)
    slowest: dict[str, float] = {}
    for story in stories.values():
        (recovery,) = story["recoveries"]
        parts = {"notice": story["broken"][0] - died_at, **recovery["seconds"]}
        again = min(end for _, end in story["ends"] if end > story["broken"][0])
        parts["next step"] = again - story["broken"][0] - sum(recovery["seconds"].values())
        for name, seconds in parts.items():
            slowest[name] = round(max(slowest.get(name, 0.0), seconds), 3)
    whole = max(
        min(end for _, end in story["ends"] if end > story["broken"][0]) - died_at
        for story in stories.values()
    )
    usual = statistics.median(_usual_ms(story["ends"][:kill_at]) for story in stories.values())
    memory = {
        name: round(max(story["memory"][name] for story in stories.values()))
        for name in ("before", "peak", "after")
    }
    return {
        "parts_s": slowest,
        "whole_s": round(whole, 3),
        "usual_step_ms": round(usual, 1),
        "resident_mib": memory,
    }


def _goodput(folder: Path, options: Any, plan: dict[str, Any]) -> dict[str, Any]:
    draw, num_faults = random.Random(0), 0
    start = _start(folder, {**plan, "steps": 10**9})
    with Launcher(start, options.ranks, num_spares=1) as launcher:
        while launcher.poll() and _at(folder) < 20:  # all have begun
            time.sleep(_POLL_S)
        began, first = time.time(), _at(folder)
        end, next_fault = began + options.minutes * 60, began + options.every
        while launcher.poll() and time.time() < end:
            time.sleep(_POLL_S)
            if time.time() > next_fault:
                next_fault += options.every
                spares = launcher._spares
                training = [member for member in launcher.running if member not in spares]
                os.kill(launcher.processes[draw.choice(training)].pid, signal.SIGKILL)
                num_faults += 1
        last, wall_s = _at(folder), time.time() - began
        (folder / "stop").write_text(str(last + 50))
        while launcher.poll():
            time.sleep(_POLL_S)
    story = max(_stories(folder).values(), key=lambda story: len(story["ends"]))
    usual = _usual_ms(story["ends"])  # few of the gaps between steps hold a recovery
    num_steps = last - first
    return {
        "goodput": round(num_steps * usual / 1e3 / wall_s, 4),
        "num_steps": num_steps,
        "num_faults": num_faults,
        "usual_step_ms": round(usual, 3),
        "wall_s": round(wall_s, 1),
        "recoveries": [
            {"members": r["members"], "seconds": round(sum(r["seconds"].values()), 3)}
            for r in story["recoveries"]
        ],
    }


def _cost(folder: Path, options: Any, plan: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, list[float]] = {"plain": [], "survive": []}
    kept = 0
    for number in range(options.rounds):
        for name, times in found.items():
            where = folder / f"{name}-{number}"
            start = _start(where, {**plan, "steps": 60, "plain": name == "plain"})
            with Launcher(start, options.ranks) as launcher:
                launcher.wait()
            stories = _stories(where).values()
            times.append(statistics.median(_usual_ms(story["ends"][10:]) for story in stories))
            kept = max([kept, *(story.get("kept", 0) for story in stories)])
    medians = {name: round(statistics.median(times), 3) for name, times in found.items()}
    ratio = round(medians["survive"] / medians["plain"], 4)
    state = plan["mib"] * 2**20 / options.ranks
    return {
        "step_ms": medians,
        "ratio": ratio,
        "kept_bytes_per_state_byte": round(kept / state, 3),
        "all_ms": {name: [round(time, 3) for time in times] for name, times in found.items()},
    }


if __name__ == "__main__":
    main()
