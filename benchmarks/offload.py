"""Training with shards on the host: tokens per second and memory, beside torch's FSDP2.

    python benchmarks/offload.py --model 7B --out benchmarks/results/YYYYMMDD-offload-7b-h200.json
    python benchmarks/offload.py --model 13B --on-host 0.55 --engines shoal \
        --out benchmarks/results/YYYYMMDD-offload-13b-h200.json
    python benchmarks/offload.py --quick                                 # tiny, on CPU: no numbers

Each engine runs alone in a process of its own, on one device, with fp32 parameters and AdamW's
moments (fused, for all engines) and bf16 compute. `--on-host` says which share of the blocks lie
on the host, from the last one on: their gradients come first, so that their steps have most of
backward beside them. All other parameters, embedding and head among them, stay on the device.
"""

from __future__ import annotations

import json
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy as TorchOffload
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import OffloadPolicy as TorchNoOffload
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from shoal import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from shoal.bench.model import BenchTransformer, ModelShape, check_losses
from shoal.bench.script import flags, store
from shoal.offload import step_in_backward

SHAPES = {
    "tiny": ModelShape(dim=64, num_layers=4, num_heads=4, vocab_size=256),
    "1B": ModelShape(dim=2048, num_layers=18, num_heads=16, vocab_size=32000),
    "7B": ModelShape(dim=4096, num_layers=32, num_heads=32, vocab_size=32000),
    "13B": ModelShape(dim=5120, num_layers=40, num_heads=40, vocab_size=32000),
}
ENGINES = ("fsdp2", "shoal-at-end", "shoal")
"""torch's; ours with the optimizer's step after backward; ours with it beside backward."""


def main() -> None:
    """Measure, print a table, and write a file if one is named."""
    parser = flags(__doc__, rounds=8, quick="a tiny model")
    parser.add_argument("--model", choices=list(SHAPES), default="7B")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--on-host", type=float, default=1.0, help="share of the blocks")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--keep", action="store_true", help="bf16 shards stay on the device, ours")
    parser.add_argument("--threads", type=int, default=1, help="units stepped at the same time")
    options = parser.parse_args()
    settings = {
        key: getattr(options, key)
        for key in ("model", "on_host", "batch", "sequence", "keep", "threads", "rounds")
    }
    if options.quick:
        settings |= {"model": "tiny", "batch": 2, "sequence": 16, "rounds": 2}
    found = {engine: _alone(engine, settings) for engine in options.engines}
    for engine, one in found.items():
        print(f"{engine:14}" + "".join(f"{key} {value:10.3f}   " for key, value in one.items()))
    store(options.out, settings=settings, found=found)


def _alone(engine: str, settings: dict[str, Any]) -> dict[str, float]:
    """What one engine takes, in a process whose memory is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_measure, (folder, engine, settings), nprocs=1)
        return json.loads(Path(folder, "found.json").read_text(encoding="utf-8"))


def _measure(_: int, folder: str, engine: str, settings: dict[str, Any]) -> None:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    files = dist.FileStore(f"{folder}/store", 1)
    backend = "cuda:nccl,cpu:gloo" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=files, rank=0, world_size=1)
    shape = SHAPES[settings["model"]]
    model = _sharded(engine, shape, kind, settings["on_host"])
    if settings["keep"] and engine != "fsdp2":
        model.set_keep_low_precision_shards(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    if engine == "shoal":
        step_in_backward(model, optimizer, threads=settings["threads"])
    size = (settings["batch"], settings["sequence"] + 1)
    tokens = torch.randint(shape.vocab_size, size, generator=torch.Generator().manual_seed(0))
    inputs, targets = (part.to(kind) for part in (tokens[:, :-1], tokens[:, 1:]))
    times: list[dict[str, float]] = []
    losses: list[float] = []
    for _ in range(2 + settings["rounds"]):  # the first two make state, and pinned memory
        times.append({})
        began = time.perf_counter()
        loss = model(inputs, targets)
        loss.backward()
        _synchronize(kind)
        times[-1]["backward_s"] = time.perf_counter() - began
        optimizer.step()
        optimizer.zero_grad()
        _synchronize(kind)
        times[-1]["step_s"] = time.perf_counter() - began
        losses.append(float(loss.detach()))
    check_losses(losses[:1], shape)  # later ones have learned the only batch
    counted = times[2:]
    found = {key: statistics.median(one[key] for one in counted) for key in counted[0]}
    found["tokens_per_s"] = inputs.numel() / found["step_s"]
    found["host_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    found["parameters_b"] = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    if kind == "cuda":
        found["device_gib"] = torch.cuda.max_memory_allocated() / 2**30
        found["device_reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    Path(folder, "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def _sharded(engine: str, shape: ModelShape, kind: str, on_host: float) -> Any:
    """Block by block, so that the whole model is never on the device, nor twice on the host."""
    with torch.device("meta"):
        model = BenchTransformer(shape)
    mesh = init_device_mesh(kind, (1,))
    is_torch = engine == "fsdp2"
    policy_of, shard = (
        (TorchPolicy, torch_fully_shard) if is_torch else (MixedPrecisionPolicy, fully_shard)
    )
    policy: Any = policy_of(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    pins = kind == "cuda"
    host: Any = (TorchOffload if is_torch else CPUOffloadPolicy)(pin_memory=pins)
    device: Any = (TorchNoOffload if is_torch else OffloadPolicy)()
    first = round(len(model.blocks) * (1 - on_host))
    for number, block in enumerate(model.blocks):
        _fill(block, shape, kind)
        lies = host if number >= first else device
        shard(block, mesh=mesh, mp_policy=policy, offload_policy=lies)
    _fill(model, shape, kind)
    lies = host if on_host == 1 else device
    shard(model, mesh=mesh, mp_policy=policy, offload_policy=lies)
    return model


def _fill(module: nn.Module, shape: ModelShape, kind: str) -> None:
    """Give parameters that are still on the meta device memory and values."""
    for inner in module.modules():
        for name, parameter in inner.named_parameters(recurse=False):
            if parameter.is_meta:
                values = torch.empty(parameter.shape, device=kind).normal_(std=shape.std)
                setattr(inner, name, nn.Parameter(values))


def _synchronize(kind: str) -> None:
    if kind == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
